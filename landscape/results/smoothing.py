"""The loss averaged over random displacements of the weights (DPSGD-2021, smoothing)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class Smoothing(Result):
    """The loss L at w_a, and L_Σ(w) = E L(w + δ), smoothed by displacements δ ~ N(0, Σ) (DPSGD-2021's paper).

    Arrays (2,) and (2, S) have two rows: Σ of the measured spread of the learners, and the isotropic Σ of the
    same trace. Expectations are means over m pairs ±δ_i, the same pairs for all numbers of one row.

    Attributes:
        loss, loss_smooth, loss_smooth_se: L in nats; L_Σ (2,) and its standard error (2,).
        lambda_max, residual: the largest eigenvalue of ∇²L in nats, and its residual ‖Hv − λv‖.
        lambda_smooth, lambda_smooth_residual: (2,), the largest eigenvalue of the mean of ∇²L(w_a ± δ_i), and
            its residual.
        lambda_smooth_se: (2,), the standard error of vᵀ∇²L_Σ v with the eigenvector v.
        lambda_smooth_bias: (2,), an estimate of how far ``lambda_smooth`` is too large. The largest
            eigenvalue of a mean of random matrices lies above that of their expectation; to second order,
            with the rest of the spectrum near 0, by m⁻¹ E‖P⊥(∇²L(w_a ± δ_i) v − mean)‖²/λ.
        eigenvalues: (k,), of ∇²L, descending.
        share: (k,), vᵀΣv/tr Σ of their eigenvectors v with the measured Σ; 1/P for an isotropic Σ.
        trace_hs: tr(HΣ) = n⁻¹ Σ_j Δw_jᵀHΔw_j, exact; half of it is the second-order term of E L − L.
        consensus: tr Σ.
        lipschitz: (S,), ‖∇L(w(t+1)) − ∇L(w(t))‖/‖w(t+1) − w(t)‖ for S steps of w_a, a lower bound on the
            Lipschitz constant of the gradient; empty if no steps were given.
        lipschitz_smooth, lipschitz_smooth_se: (2, S), the same for the smoothed gradients.
        pairs: m, the number of pairs ±δ_i.
        lr, alpha_e: α and α_e of the run; NaN if unknown.

    Example:
        >>> two = np.array([1.0, 0.5])
        >>> result = Smoothing(
        ...     loss=0.5, loss_smooth=two, loss_smooth_se=two / 9, lambda_max=2.0, residual=0.1,
        ...     lambda_smooth=two, lambda_smooth_residual=two, lambda_smooth_se=two, lambda_smooth_bias=two,
        ...     eigenvalues=two, share=two, trace_hs=0.1, consensus=0.1, lipschitz=np.zeros(0),
        ...     lipschitz_smooth=np.zeros((2, 0)), lipschitz_smooth_se=np.zeros((2, 0)), lr=0.1,
        ...     alpha_e=0.1, parameters=9, learners=3, pairs=4, samples=9, seed=0, converged=True)
        >>> result.rates.tolist()
        [1.0, 2.0, 4.0]
    """

    schema: ClassVar[str] = "landscape.smoothing"
    shapes: ClassVar[Mapping[str, str]] = {
        "loss_smooth": "spread",
        "loss_smooth_se": "spread",
        "lambda_smooth": "spread",
        "lambda_smooth_residual": "spread",
        "lambda_smooth_se": "spread",
        "lambda_smooth_bias": "spread",
        "eigenvalues": "rank",
        "share": "rank",
        "lipschitz": "step",
        "lipschitz_smooth": "spread step",
        "lipschitz_smooth_se": "spread step",
    }
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"spread": ("measured", "isotropic")}
    units: ClassVar[Mapping[str, str]] = {"share": "1"} | dict.fromkeys(
        (
            "loss", "loss_smooth", "loss_smooth_se", "lambda_max", "residual", "lambda_smooth",
            "lambda_smooth_residual", "lambda_smooth_se", "lambda_smooth_bias", "eigenvalues", "trace_hs",
            "lipschitz", "lipschitz_smooth", "lipschitz_smooth_se",
        ),
        "nat",
    )  # fmt: skip
    table: ClassVar[str] = "spread"

    loss: float
    loss_smooth: Array
    loss_smooth_se: Array
    lambda_max: float
    residual: float
    lambda_smooth: Array
    lambda_smooth_residual: Array
    lambda_smooth_se: Array
    lambda_smooth_bias: Array
    eigenvalues: Array
    share: Array
    trace_hs: float
    consensus: float
    lipschitz: Array
    lipschitz_smooth: Array
    lipschitz_smooth_se: Array
    lr: float
    alpha_e: float
    parameters: int
    learners: int
    pairs: int
    samples: int
    seed: int
    converged: bool
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""

    @property
    def rates(self) -> Array:
        """(3,): 2/λ_max of L, and of L smoothed by the measured and by the isotropic spread; inf if λ ≤ 0."""
        sharpness = np.array([self.lambda_max, *self.lambda_smooth])
        return np.where(sharpness > 0, 2 / np.where(sharpness > 0, sharpness, 1.0), np.inf)

"""The loss averaged over displacements of the weights (DPSGD-2021, smoothing)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class Smoothing(Result):
    """The loss at w_a and its smoothed forms; index 0 is the measured spread, 1 isotropic of the same trace.

    Over the m pairs ±δ_i, the same ones for all that is smoothed of one kind:

    - ``loss``, and ``loss_smooth`` (2,) E L(w_a + δ) with its standard error ``loss_smooth_se``;
    - ``lambda_max`` and ``residual`` of ∇²L, and of the mean of ∇²L(w_a ± δ_i) ``lambda_smooth``,
      ``lambda_smooth_residual``, ``lambda_smooth_se``, (2,): the error of vᵀ∇²L_Σ v, v the eigenvector found.
      The largest eigenvalue of a mean of random matrices lies above that of their expectation: to second
      order, with the rest of the spectrum near 0, by ``lambda_smooth_bias`` (2,),
      m⁻¹ E‖P⊥(∇²L(w_a ± δ_i) v − mean)‖²/λ;
    - ``share`` (k,): vᵀΣv/tr Σ for the ``eigenvalues`` (k,) of ∇²L; an isotropic one has 1/P in each;
    - ``trace_hs`` tr(HΣ) = n⁻¹ Σ_j Δw_jᵀHΔw_j, exact; half of it is the second-order part of E L − L;
    - along the ``steps`` S of w_a that were given, ‖∇L(w(t+1)) − ∇L(w(t))‖/‖w(t+1) − w(t)‖, a lower bound on
      the gradient's Lipschitz constant: ``lipschitz`` (S,), and of the smoothed gradients
      ``lipschitz_smooth`` (2, S) with ``lipschitz_smooth_se``. Empty where no path was given.

    ``lr`` α and ``alpha_e`` are the run's own (NaN where unknown); ``consensus`` is tr Σ.
    """

    schema: ClassVar[str] = "landscape.smoothing"
    shapes: ClassVar[Mapping[str, str]] = {
        "loss_smooth": "2",
        "loss_smooth_se": "2",
        "lambda_smooth": "2",
        "lambda_smooth_residual": "2",
        "lambda_smooth_se": "2",
        "lambda_smooth_bias": "2",
        "eigenvalues": "k",
        "share": "k",
        "lipschitz": "S",
        "lipschitz_smooth": "2 S",
        "lipschitz_smooth_se": "2 S",
    }

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
        """(3,): 2/λ_max of L, and of L smoothed by the measured and the isotropic spread; inf if λ ≤ 0."""
        sharp = np.array([self.lambda_max, *self.lambda_smooth])
        return np.where(sharp > 0, 2 / np.where(sharp > 0, sharp, 1.0), np.inf)

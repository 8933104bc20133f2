"""The learners' spread against the sharp directions of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from landscape.core.hdf5 import Array
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class Disagreement(Measurement):
    """How much of the learners' spread Δw_j = w_j − w_a, and of the gradient, is in the top-k Hessian space.

    H is the Hessian and g the gradient of the mean loss at w_a, over all samples; v_i the eigenvectors of
    the k largest eigenvalues of H; C = n⁻¹ Σ_j Δw_jΔw_jᵀ the covariance of the learners (not n⁻² Σ, as in
    Eq. 4 of DPSGD-2020). Errors are one standard error by the jackknife over the learners, as if these were
    independent draws; learners that have mixed are not, and the error is then too small. They are NaN for
    two learners. For these very learners the numbers are exact, but for the residuals of the eigenvectors.

    Attributes:
        values, residuals: (k,), eigenvalues in nats, descending, and ‖Hv − λv‖.
        spread_share: (k,), v_iᵀCv_i/tr C.
        spread_error: (k,), the error of its sum over the first i eigenvectors.
        gradient_share: (k,), (v_iᵀg)²/‖g‖²; NaN, as all shares of the gradient, where it is zero.
        consensus: tr C, the consensus distance.
        cost, cost_error: ½ tr(HC) in nats: to second order, the mean loss of the learners above that of w_a.
        cost_top: the part of it from the top-k space, ½ Σ_i λ_i v_iᵀCv_i.
        loss, learners_loss: at w_a, and the mean over the learners at their own weights, in nats, with the
            statistics of BatchNorm that ``bn`` names at both.
        gradient_in_span: ‖Pg‖²/‖g‖², P the projector on the span of the Δw_j, of dimension ``rank``.
        rank: the dimension of the span of the Δw_j, at most n − 1.
        dominant_in_span: ‖PQg‖²/‖Qg‖², Q the projector on the top-k space: the share of the gradient's sharp
            part that the spread alone shows (arXiv 2605.27739).
        grad_norm2: ‖g‖².
        parameters: P; an isotropic vector has the share k/P in the top-k space, and rank/P in the span.
        hvps: the number of Hessian-vector products.

    Example:
        >>> import numpy as np
        >>> half = np.array([0.5, 0.25])
        >>> result = Disagreement(
        ...     values=np.array([4.0, 1.0]), residuals=half, spread_share=half, spread_error=half,
        ...     gradient_share=half, consensus=0.1, cost=0.15, cost_error=0.01, cost_top=0.1, loss=0.5,
        ...     learners_loss=0.64, gradient_in_span=0.2, dominant_in_span=0.3, rank=3, grad_norm2=0.01,
        ...     parameters=100, learners=4, hvps=20, converged=True, tol=0.01, seed=0, samples=9,
        ...     dtype="float64")
        >>> result.value, result.standard_error, result.chance
        (0.75, 0.25, 0.02)
    """

    schema: ClassVar[str] = "landscape.disagreement"
    shapes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("residuals", "spread_share", "spread_error", "gradient_share"), "rank_of_eigenvalue"
    ) | {"values": "rank_of_eigenvalue+"}
    units: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("values", "residuals", "cost", "cost_error", "cost_top", "loss", "learners_loss"), "nat"
    ) | dict.fromkeys(
        (
            "spread_share",
            "spread_error",
            "gradient_share",
            "consensus",
            "gradient_in_span",
            "dominant_in_span",
        ),
        "1",
    )
    table: ClassVar[str] = "rank_of_eigenvalue"

    values: Array
    residuals: Array
    spread_share: Array
    spread_error: Array
    gradient_share: Array
    consensus: float
    cost: float
    cost_error: float
    cost_top: float
    loss: float
    learners_loss: float
    gradient_in_span: float
    dominant_in_span: float
    rank: int
    grad_norm2: float
    parameters: int
    learners: int
    hvps: int
    converged: bool
    tol: float

    @property
    def value(self) -> float:
        """The share of the spread in the top-k space."""
        return float(self.spread_share.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of :attr:`value`."""
        return float(self.spread_error[-1])

    @property
    def chance(self) -> float:
        """k/P: the expected share of an isotropic spread."""
        return len(self.values) / self.parameters

    @property
    def gradient_value(self) -> float:
        """The share of the gradient in the top-k space."""
        return float(self.gradient_share.sum())

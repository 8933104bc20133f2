"""The Hessian at one set of weights: batch sharpness, and the part of the learners' spread in its space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate, standard_error
from landscape.results.base import Measurement, no_rows
from landscape.results.shown import Row, converged, eigenvalue, interval, percent


@dataclass(frozen=True, kw_only=True)
class BatchSharpness(Measurement):
    """g_Bᵀ H_B g_B/‖g_B‖² of drawn minibatches, at w_a and at the weights of the learners.

    Batch sharpness is that of Andreyev and Beneventano 2024 (arXiv 2412.20553).

    Attributes:
        curvature: (draws,) in nats, one for each minibatch of ``batch`` samples, at w_a.
        norm2: (draws,) ‖g_B‖² of these.
        learner_curvature, learner_norm2: (learner draws, learners), the same of learner j's minibatch of
            ``local_batch`` samples at w_j; (0, 0) without learners.
        batch, local_batch: samples of a minibatch; local_batch 0 without learners.
        lambda_max, residual: the largest eigenvalue of ∇²L at w_a over all data, in nats, and ‖Hv − λv‖; NaN
            if not computed.
        lr: η of the run; NaN if unknown.
        limit: the largest stable ηλ of the run's update rule on a quadratic; NaN if unknown.
        relative_error: the relative standard error asked for.
        converged: whether the standard errors of w_a and of the learners are that small.
        derivatives: "exact", or "differences" of gradients.
        product_error: the largest error that a draw's curvature has by differences, as it was measured.

    Example:
        >>> result = BatchSharpness(
        ...     curvature=np.array([3.0, 5.0]), norm2=np.array([1.0, 3.0]), batch=8, lambda_max=6.0,
        ...     residual=0.0, lr=0.5, limit=2.0, relative_error=0.05, converged=False, samples=100,
        ...     seed=0, dtype="float64")
        >>> result.value, result.standard_error, result.lr * result.value, result.pooled
        (4.0, 1.0, 2.0, 4.5)
    """

    schema: ClassVar[str] = "landscape.batch_sharpness"
    renamed: ClassVar[Mapping[str, str]] = {"tol": "relative_error"}
    table: ClassVar[str] = "draw"

    curvature: Annotated[Array, "draw+", "nat"]
    norm2: Annotated[Array, "draw", "nat2"]
    batch: Annotated[int, "samples"]
    lambda_max: Annotated[float, "nat"]
    residual: Annotated[float, "nat"]
    lr: Annotated[float, "1"]
    limit: Annotated[float, "1"]
    relative_error: Annotated[float, "1"]
    converged: bool
    local_batch: Annotated[int, "samples"] = 0
    learner_curvature: Annotated[Array, "learner_draw learner", "nat"] = field(default_factory=no_rows)
    learner_norm2: Annotated[Array, "learner_draw learner", "nat2"] = field(default_factory=no_rows)
    derivatives: str = "exact"
    product_error: Annotated[float, "nat"] = 0.0

    @property
    def value(self) -> float:
        """Batch sharpness at w_a, E[g_Bᵀ H_B g_B/‖g_B‖²], in nats: the mean over the draws."""
        return float(self.curvature.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of ``value`` over the draws, with that of the products; NaN of one draw."""
        return math.hypot(standard_error(self.curvature), self.product_error)

    @property
    def pooled(self) -> float:
        """E[g_Bᵀ H_B g_B]/E‖g_B‖², in nats: the mean in which large gradients weigh more."""
        return float((self.curvature * self.norm2).sum() / self.norm2.sum())

    @property
    def learner_value(self) -> float:
        """The mean over learners of the batch sharpness at their weights, in nats; NaN without learners."""
        return float(self.learner_curvature.mean()) if self.learner_curvature.size else np.nan

    @property
    def learner_standard_error(self) -> float:
        """The standard error of ``learner_value`` over the draws, with that of the products."""
        if not self.learner_curvature.size:
            return np.nan
        return math.hypot(standard_error(self.learner_curvature.mean(1)), self.product_error)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of ``value``, from Student's t distribution, and the products' error.

        Args:
            level: the probability with which it contains the expectation.

        Returns:
            (lower end, upper end), in nats.

        Example:
            >>> none = dict(lambda_max=6.0, residual=0.0, lr=0.5, limit=2.0, relative_error=0.05)
            >>> four = np.array([3.0, 5.0, 3.0, 5.0])
            >>> result = BatchSharpness(curvature=four, norm2=np.ones(4), batch=8, samples=9, seed=0,
            ...                         converged=False, dtype="float64", **none)
            >>> [round(end, 2) for end in result.interval()]
            [2.16, 5.84]
        """
        low, high = Estimate.of(self.curvature).interval(level)
        return low - self.product_error, high + self.product_error

    def describe(self) -> list[Row]:
        drawn = f"{len(self.curvature)} draws of {self.batch:,}, {interval(self.interval())}"
        rows = [
            Row("batch sharpness at w_a", self.value, self.standard_error, "nat", drawn),
            Row("the same, pooled", self.pooled, unit="nat", note="E[gᵀHg]/E‖g‖²"),
        ]
        if self.local_batch:
            many = f"{len(self.learner_curvature)} draws of {self.local_batch:,}"
            value, error = self.learner_value, self.learner_standard_error
            rows.append(Row("batch sharpness at the learners", value, error, "nat", many))
        if np.isfinite(self.lambda_max):
            rows.append(eigenvalue("λ_max at w_a", self.lambda_max, self.residual))
        if np.isfinite(self.lr):
            limit = f"limit {self.limit:.4g}" if np.isfinite(self.limit) else ""
            scaled = []
            for row in rows[:1] + rows[2:]:  # all but the pooled mean
                note = f"{limit}, ±: residual" if "residual" in row.note else limit
                error = self.lr * row.error
                scaled.append(Row(f"{row.name}, times η", self.lr * float(row.value), error, note=note))
            rows = scaled + rows
        missed = f"not within {self.relative_error:.0%}, raise max_draws"
        return [*rows, Row("samples", self.samples), converged(self.converged, missed)]


@dataclass(frozen=True, kw_only=True)
class Disagreement(Measurement):
    """The share of the learners' spread Δw_j = w_j − w_a, and of the gradient, in the top-k Hessian space.

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
        cost, cost_error: ½ tr(HC) in nats: to second order, the mean loss of the learners above that of w_a;
            the error has that of products by differences.
        cost_top: the part of it from the top-k space, ½ Σ_i λ_i v_iᵀCv_i.
        loss, learners_loss: at w_a, and the mean over the learners at their own weights, in nats, with the
            statistics of BatchNorm that ``bn`` names at both.
        gradient_in_span: ‖Pg‖²/‖g‖², P the projector on the span of the Δw_j, of dimension ``rank``.
        rank: the dimension of the span of the Δw_j, at most n − 1.
        dominant_in_span: ‖PQg‖²/‖Qg‖², Q the projector on the top-k space: the share of the gradient's sharp
            part that the spread alone shows (arXiv 2605.27739).
        grad_norm2: ‖g‖².
        parameters: P; an isotropic vector has the share k/P in the top-k space, and rank/P in the span.
        products: the number of Hessian-vector products.
        residual_tol: the relative residual of the eigenvalues that was asked for.
        derivatives: "exact", or "differences" of gradients.

    Example:
        >>> import numpy as np
        >>> half = np.array([0.5, 0.25])
        >>> result = Disagreement(
        ...     values=np.array([4.0, 1.0]), residuals=half, spread_share=half, spread_error=half,
        ...     gradient_share=half, consensus=0.1, cost=0.15, cost_error=0.01, cost_top=0.1, loss=0.5,
        ...     learners_loss=0.64, gradient_in_span=0.2, dominant_in_span=0.3, rank=3, grad_norm2=0.01,
        ...     parameters=100, learners=4, products=20, converged=True, residual_tol=0.01, seed=0, samples=9,
        ...     dtype="float64")
        >>> result.value, result.standard_error, result.chance
        (0.75, 0.25, 0.02)
    """

    schema: ClassVar[str] = "landscape.disagreement"
    renamed: ClassVar[Mapping[str, str]] = {"hvps": "products", "tol": "residual_tol"}
    table: ClassVar[str] = "rank_of_eigenvalue"

    values: Annotated[Array, "rank_of_eigenvalue+", "nat"]
    residuals: Annotated[Array, "rank_of_eigenvalue", "nat"]
    spread_share: Annotated[Array, "rank_of_eigenvalue", "1"]
    spread_error: Annotated[Array, "rank_of_eigenvalue", "1"]
    gradient_share: Annotated[Array, "rank_of_eigenvalue", "1"]
    consensus: Annotated[float, "1"]
    cost: Annotated[float, "nat"]
    cost_error: Annotated[float, "nat"]
    cost_top: Annotated[float, "nat"]
    loss: Annotated[float, "nat"]
    learners_loss: Annotated[float, "nat"]
    gradient_in_span: Annotated[float, "1"]
    dominant_in_span: Annotated[float, "1"]
    rank: int
    grad_norm2: float
    parameters: int
    learners: int
    products: int
    converged: bool
    residual_tol: float
    derivatives: str = "exact"

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

    def describe(self) -> list[Row]:
        k, chance = len(self.values), f"an isotropic one: {100 * self.chance:.2g}%"
        span = f"an isotropic one: {100 * self.rank / self.parameters:.2g}%"
        top = f"of it in the top {k} {self.cost_top:.4g}"
        return [
            percent(f"of the learners' spread in the top {k}", self.value, self.standard_error, chance),
            percent(f"of the gradient in the top {k}", self.gradient_value),
            percent("of the gradient in the spread", self.gradient_in_span, note=span),
            percent("of its sharp part in the spread", self.dominant_in_span),
            Row("½ tr(HC)", self.cost, self.cost_error, "nat", top),
            Row("mean loss of the learners above w_a", self.learners_loss - self.loss, unit="nat"),
            Row("consensus distance", self.consensus, note=f"{self.learners} learners"),
            eigenvalue("λ_1", self.values[0], self.residuals[0]),
            Row("Hessian products", self.products),
            converged(self.converged, "raise max_products"),
        ]

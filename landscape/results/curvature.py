"""The Hessian at one set of weights: spectrum, batch sharpness, and where the learners' spread lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.core.statistics import Estimate, mean_and_error, standard_error
from landscape.results.base import Measured, Measurement
from landscape.results.shown import Row, converged, eigenvalue, interval, limit_in_words, percent

# Standard deviation of the Gaussians of a density, relative to the range of the nodes (ours: as fine as a
# plot shows).
BROADENING = 0.01
#: The parts of a spectrum besides its largest eigenvalues.
QUANTITIES = ("extremes", "trace", "density")


# Of the n − 1 degrees of freedom of a trace's n draws, which are quadratic forms and skewed: by
# simulation (docs/explanation/checks.md).
FREEDOM = 0.8


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace of a Hessian.

    Attributes:
        value: tr H, in nats.
        standard_error: of the value, in nats.
        products: the number of Hessian-vector products.
        draws: (n,), the estimates of which it is the mean, and whose standard error is its own; one where
            nothing was drawn.
        derivatives: "exact", or "differences" of gradients.
        product_error: how far products by differences may set the value off, as it was measured on some; the
            standard error contains it. 0 for exact products.

    Example:
        >>> trace = Trace(3.0, standard_error=0.1, products=9, draws=np.array([2.9, 2.9, 3.2]))
        >>> trace.freedom, [round(end, 2) for end in trace.interval()]
        (1.6, [2.45, 3.55])
    """

    value: float
    standard_error: float
    products: int
    draws: Array = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)
    derivatives: str = "exact"
    product_error: float = 0.0

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the standard error: 0.8 (n − 1) of n draws; NaN if they are not known."""
        return FREEDOM * (len(self.draws) - 1) if len(self.draws) else np.nan

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of ``value``, by Student's t with :attr:`freedom`.

        Args:
            level: the probability with which it contains tr H.

        Returns:
            (lower end, upper end), in nats.

        Example:
            >>> trace = Trace(3.0, standard_error=0.1, products=9, draws=np.array([2.9, 2.9, 3.2]))
            >>> [round(end, 2) for end in trace.interval()]
            [2.45, 3.55]
        """
        return Estimate(self.value, self.standard_error, self.freedom).interval(level)


@dataclass(frozen=True)
class Density:
    """The spectral density of a P × P matrix, as quadratures: nodes with masses.

    Attributes:
        nodes, masses: (draws, steps), a row for each draw. The masses of a draw sum to 1; one
            whose Krylov space ended early has nodes of mass 0 at its end.
        size: P.
        products: number of Hessian-vector products.
        derivatives: "exact", or "differences" of gradients.
        product_error: the largest error of such products with random vectors of norm 1, as measured, by which
            the nodes may be off. 0 for exact products.

    Example:
        >>> density = Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, products=2)
        >>> density.moment(1)[0], density.width()
        (0.5, 0.02)
        >>> density.broadened(np.array([0.0, 1.0]), width=0.1).round(3).tolist()
        [2.992, 0.0]
    """

    nodes: Array
    masses: Array
    size: int
    products: int
    derivatives: str = "exact"
    product_error: float = 0.0

    def moment(self, order: int) -> tuple[float, float]:
        """A moment of the spectral density, tr(H^order)/P.

        Args:
            order: 0, 1, 2, …

        Returns:
            (estimate, its standard error over the draws, which is NaN for one draw).

        Example:
            >>> density = Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, products=2)
            >>> density.moment(2)[0]
            1.0
        """
        return mean_and_error((self.masses * self.nodes**order).sum(1))

    def broadened(self, at: Array, width: float | None = None) -> Array:
        """The density with each node as a Gaussian (Ghorbani et al. 2019, Eq. 4).

        Args:
            at: (n,), eigenvalues.
            width: standard deviation of the Gaussians; default: that of :meth:`width`.

        Returns:
            (n,), the mean over the draws of Σ_i mass_i N(at; node_i, width²), whose integral is 1.

        Raises:
            InputError: a width that is not positive.

        Example:
            >>> density = Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, products=2)
            >>> density.broadened(np.array([0.0, 2.0]), width=0.1).round(3).tolist()
            [2.992, 0.997]
        """
        width = self.width() if width is None else width
        positive("width", width)
        total = np.zeros(len(at))
        for node, mass in zip(self.nodes.ravel(), self.masses.ravel(), strict=True):
            total += mass * np.exp(-0.5 * ((at - node) / width) ** 2)
        scaled: Array = total / (len(self.nodes) * width * np.sqrt(2 * np.pi))
        return scaled

    def width(self) -> float:
        """The default width of :meth:`broadened`: 1% of the range of the nodes (ours).

        Returns:
            The width; where all nodes are equal 1% of their magnitude, or 0.01 if that is 0.

        Example:
            >>> Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, products=2).width()
            0.02
        """
        span = float(np.ptp(self.nodes))
        largest = float(np.abs(self.nodes).max())
        return BROADENING * (span if span > 1e-6 * largest else largest or 1.0)


@dataclass(frozen=True)
class Spectrum(Measured):
    """Eigenvalues, trace and density of one Hessian, or of the block of some parameters; each may be missing.

    Attributes:
        values: (k,), eigenvalues in nats, descending: the largest ones, and then the ``lowest`` smallest.
        residuals: (k,), ‖Hv − λv‖ in nats.
        lowest: how many of ``values`` are the smallest ones.
        trace, trace_error, trace_freedom: tr H and one standard error, in nats, and the degrees of freedom of
            that; NaN if not computed, or in older files.
        nodes, masses: (draws, steps), as in :class:`Density`; (0, 0) if not computed.
        parameters: size of the Hessian or block.
        products: number of all Hessian-vector products.
        matrix: "hessian" or "gauss-newton".
        part: names of the parameters of the block, joined by commas; "" for all.
        engine: "landscape" or "pyhessian".
        residual_tol: the largest residual that was allowed, relative to the eigenvalue.
        search: the products with which the search was done.
        bound_low, bound_high, complete: as in :class:`landscape.Eigenpairs`; infinite in files older than
            these fields.
        derivatives: "exact", or "differences" of gradients.
        product_error: the largest error of products by differences that was measured, in nats, of which the
            residuals and the trace's standard error have their parts; 0 for exact products.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`.
        precondition: the optimizer whose preconditioner P was used, or "given": all is then of P^{-1/2} H
            P^{-1/2}, in units of 1/η; "" for none.
        lr, limit: the optimizer's η and the largest stable ηλ with P fixed; NaN if unknown or without P.

    Example:
        >>> none = np.zeros((0, 0))
        >>> result = Spectrum(
        ...     values=np.array([2.0, -1.0]), residuals=np.zeros(2), lowest=1, converged=True, trace=np.nan,
        ...     trace_error=np.nan, nodes=none, masses=none, parameters=9, products=12, matrix="hessian",
        ...     part="", engine="landscape", residual_tol=0.01, seed=0, samples=10, dtype="float64")
        >>> result.density is None
        True
    """

    schema: ClassVar[str] = "landscape.spectrum"
    renamed: ClassVar[Mapping[str, str]] = {
        "hvps": "products",
        "kind": "matrix",
        "weights": "masses",
        "tol": "residual_tol",
        "verified": "complete",
    }
    table: ClassVar[str] = "rank"

    values: Annotated[Array, "rank", "nat"]
    residuals: Annotated[Array, "rank", "nat"]
    lowest: int
    converged: bool
    trace: Annotated[float, "nat"]
    trace_error: Annotated[float, "nat"]
    nodes: Annotated[Array, "draw node", "nat"]
    masses: Annotated[Array, "draw node", "1"]
    parameters: int
    products: int
    matrix: str
    part: str
    engine: str
    residual_tol: float
    seed: int
    search: str = ""
    bound_low: Annotated[float, "nat"] = -np.inf
    bound_high: Annotated[float, "nat"] = np.inf
    complete: bool = False
    precondition: str = ""
    lr: float = np.nan
    limit: float = np.nan
    trace_freedom: Annotated[float, "1"] = np.nan
    derivatives: str = "exact"
    product_error: Annotated[float, "nat"] = 0.0

    def trace_interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of ``trace``, as that of :class:`landscape.Trace`; NaN where not known.

        Args:
            level: the probability with which it contains tr H.

        Returns:
            (lower end, upper end), in nats.

        Example:
            >>> [round(end, 2) for end in spectrum.trace_interval()]
            [2.45, 3.55]
        """
        return Estimate(self.trace, self.trace_error, self.trace_freedom).interval(level)

    @property
    def density(self) -> Density | None:
        """The spectral density; None if it was not computed."""
        return Density(self.nodes, self.masses, self.parameters, self.products) if self.nodes.size else None

    def describe(self) -> list[Row]:
        unit = "1/η" if self.precondition else "nat"
        top = len(self.values) - self.lowest
        largest = "largest |λ|, {}" if self.engine == "pyhessian" else "λ_{}"
        names = [largest.format(i + 1) for i in range(top)]
        names += [f"λ_min, {i}" if i > 1 else "λ_min" for i in range(self.lowest, 0, -1)]
        found = zip(names, self.values, self.residuals, strict=True)
        rows = [eigenvalue(name, value, residual, unit) for name, value, residual in found]
        if np.isfinite(self.lr) and top:
            rows.append(Row("lr · λ_max", float(self.lr * self.values[0]), note=limit_in_words(self.limit)))
        for name, bound in (("below", self.bound_low), ("above", self.bound_high)):
            if np.isfinite(bound):
                rows.append(Row(name, bound, unit=unit, note="no other eigenvalue, with 99% probability"))
        if np.isfinite(self.trace):
            rows.append(Row("trace", self.trace, self.trace_error, unit, interval(self.trace_interval())))
        if self.density:
            rows.append(Row("mean λ", *self.density.moment(1), unit, "from the density"))
        part = f", parameters {self.part}" if self.part else ""
        by = f", preconditioned by {self.precondition}" if self.precondition else ""
        error = Row(
            "product error", self.product_error, unit=unit, note="at most, of differences of gradients"
        )
        by_differences = [error] if self.derivatives == "differences" else []
        return [
            *rows,
            Row("matrix", self.matrix, note=f"{self.parameters:,} rows{part}{by}"),
            Row("samples", self.samples),
            Row("Hessian products", self.products),
            *by_differences,
            converged(self.converged, "raise max_products"),
        ]


def _no_draws() -> Array:
    return np.zeros((0, 0))


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
    learner_curvature: Annotated[Array, "learner_draw learner", "nat"] = field(default_factory=_no_draws)
    learner_norm2: Annotated[Array, "learner_draw learner", "nat2"] = field(default_factory=_no_draws)

    @property
    def value(self) -> float:
        """Batch sharpness at w_a, E[g_Bᵀ H_B g_B/‖g_B‖²], in nats: the mean over the draws."""
        return float(self.curvature.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of ``value`` over the draws; NaN of one draw."""
        return standard_error(self.curvature)

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
        """The standard error of ``learner_value`` over the draws."""
        return standard_error(self.learner_curvature.mean(1)) if self.learner_curvature.size else np.nan

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of ``value``, from Student's t distribution.

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
        return Estimate.of(self.curvature).interval(level)

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
        products: the number of Hessian-vector products.
        residual_tol: the relative residual of the eigenvalues that was asked for.

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

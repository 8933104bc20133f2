"""The spectrum of a Hessian or of another symmetric matrix: eigenvalues, trace and density."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Self

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.core.statistics import Estimate, mean_and_error
from landscape.results.base import Measured, no_rows, no_values
from landscape.results.shown import Row, converged, drawn_on, eigenvalue, in_words, interval, limit_in_words

# Standard deviation of the Gaussians of a density, relative to the range of the nodes (our choice: as fine as
# a plot shows).
BROADENING = 0.01
#: The parts of a spectrum besides its largest eigenvalues.
QUANTITIES = ("extremes", "trace", "density")
#: The row of all parameters in a table of blocks.
WHOLE = "all"

# Of a trace's n − 1 degrees of freedom: its draws are skewed (by simulation, docs/explanation/checks.md).
FREEDOM = 0.8


@dataclass(frozen=True, kw_only=True)
class MatrixResult(Measured):
    """A result about one symmetric matrix: a Hessian, a block of a Hessian, or the caller's operator.

    Attributes:
        matrix: "hessian" or "gauss-newton"; for the caller's operator, the name of its class.
        part: names of the parameters of the block, joined by commas; "" for all.
        parameters: the number of rows of the matrix.
        products: the number of all products with the matrix.
        engine: "landscape" or "pyhessian".
        precondition: the name of the optimizer with the preconditioner P, or "given" for the caller's P. All
            results are then of P^{-1/2} H P^{-1/2}, in units of 1/η. "" without preconditioner.
        lr, limit: the optimizer's η and the largest stable ηλ with P fixed; NaN if unknown or without P.
        derivatives: "exact", or "differences" of gradients.
        product_error: the largest measured error by differences; 0 for exact products. Of eigenvalues: the
            error of a product with an eigenvector, which the residuals include. Of a trace: the error of the
            trace, which the standard error includes. Of a density: the error of a product with a random
            vector of norm 1, and so of the nodes.
        seed: the seed of the random draws.
        random_device: "cpu", or the accelerator that drew them, for more than 2^18 parameters.
        samples: the problem's number of samples; 0 for the caller's operator.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`.
    """

    matrix: str = "hessian"
    part: str = ""
    parameters: int
    products: int
    engine: str = "landscape"
    precondition: str = ""
    lr: float = np.nan
    limit: float = np.nan
    derivatives: str = "exact"
    product_error: Annotated[float, "nat"] = 0.0
    seed: int
    random_device: str = "cpu"

    @property
    def unit(self) -> str:
        """The unit of the eigenvalues: "nat", "1/η" with a preconditioner, "" of a given operator."""
        return "1/η" if self.precondition else "nat" * (self.samples > 0)

    def _about(self) -> list[Row]:
        """Return the last rows of a description: the matrix, the samples and the products."""
        part = f", parameters {self.part}" if self.part else ""
        by = f", preconditioned by {self.precondition}" if self.precondition else ""
        matrix = Row("matrix", self.matrix, note=f"{self.parameters:,} rows{part}{by}")
        rows = [matrix, *[Row("samples", self.samples)] * (self.samples > 0)]
        rows += [Row("Hessian products", self.products), *drawn_on(self.random_device)]
        if self.derivatives == "differences":
            note = "at most, of differences of gradients"
            rows.append(Row("product error", self.product_error, unit=self.unit, note=note))
        return rows


@dataclass(frozen=True, kw_only=True)
class Eigenvalues(MatrixResult, table="rank"):
    """The outermost eigenvalues of a matrix, with their residuals and bounds on the others.

    After a search with cheaper products, bounds and ``complete`` hold for the cheaper operator. The bounds
    are then widened by the error of the innermost wanted eigenvalue.

    Attributes:
        values: (k,), eigenvalues in nats, descending: the largest, and then the ``lowest`` smallest.
        residuals: (k,), ‖Hv − λv‖ in nats, from further products, so that rounding is included. Some
            eigenvalue of H lies within the residual of λ; the bounds say whether it is the largest.
        lowest: the number of smallest eigenvalues in ``values``.
        converged: whether all residuals met the tolerance.
        residual_tol: the allowed residual, relative to the eigenvalue.
        search: the products of the search, such as "float32, 2,372 of 10,000 samples".
        bound_low, bound_high: bounds on all other eigenvalues; each holds with a probability of 99% over the
            random start. Infinite where nothing is known.
        complete: whether, by the bounds, no missed eigenvalue lies beyond the innermost wanted eigenvalue by
            more than the tolerance and a thousandth of the largest magnitude.
    """

    values: Annotated[Array, "rank", "nat"] = field(default_factory=no_values)
    residuals: Annotated[Array, "rank", "nat"] = field(default_factory=no_values)
    lowest: int = 0
    converged: bool = True
    residual_tol: float = np.nan
    search: str = ""
    bound_low: Annotated[float, "nat"] = -np.inf
    bound_high: Annotated[float, "nat"] = np.inf
    complete: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval of all other eigenvalues: (``bound_low``, ``bound_high``)."""
        return self.bound_low, self.bound_high

    def _eigenvalues(self) -> list[Row]:
        """Return the first rows of a description."""
        top = len(self.values) - self.lowest
        largest = "largest |λ|, {}" if self.engine == "pyhessian" else "λ_{}"
        names = [largest.format(i + 1) for i in range(top)]
        names += [f"λ_min, {i}" if i > 1 else "λ_min" for i in range(self.lowest, 0, -1)]
        pairs = zip(names, self.values, self.residuals, strict=True)
        rows = [eigenvalue(name, value, residual, self.unit) for name, value, residual in pairs]
        if np.isfinite(self.lr) and top:
            rows.append(Row("lr · λ_max", float(self.lr * self.values[0]), note=limit_in_words(self.limit)))
        for name, bound in (("below", self.bound_low), ("above", self.bound_high)):
            if np.isfinite(bound):
                note = "no other eigenvalue, with 99% probability"
                rows.append(Row(name, bound, unit=self.unit, note=note))
        return rows

    def describe(self) -> list[Row]:
        return [*self._eigenvalues(), *self._about(), converged(self.converged, "raise max_products")]


@dataclass(frozen=True, kw_only=True)
class Eigenpairs(Eigenvalues, schema="landscape.eigenpairs"):
    """The largest eigenvalues of a matrix, with unit eigenvectors, residuals and bounds.

    Attributes:
        vectors: (k, P), the eigenvectors, in the order of ``values``; (k, P') for a part of the model.

    Example:
        >>> pairs.values.tolist(), pairs.vectors.shape, pairs.converged
        ([2.0, -1.0], (2, 2), True)
    """

    vectors: Annotated[Array, "rank parameter", "1"]


@dataclass(frozen=True, kw_only=True)
class ExtremeEigenvalues(Eigenpairs, schema="landscape.extreme_eigenvalues"):
    """The largest and the algebraically smallest eigenvalue, with unit eigenvectors.

    Up to rounding, λ_max ≥ ``max`` and λ_min ≤ ``min``; ``bound_high`` and ``bound_low`` bound the errors.

    Attributes:
        values, residuals, vectors: of λ_max and λ_min, in this order; of one eigenvalue for a 1 × 1 matrix.

    Example:
        >>> import torch, landscape
        >>> ends = landscape.extreme_eigenvalues(torch.diag(torch.tensor([-1.0, 2.0])))
        >>> round(ends.min, 6), round(ends.max, 6), ends.vectors.round(3).tolist()
        (-1.0, 2.0, [[0.0, 1.0], [1.0, 0.0]])
    """

    lowest: int = 1

    @property
    def min(self) -> float:
        """The algebraically smallest eigenvalue λ_min, in nats."""
        return float(self.values[-1])

    @property
    def max(self) -> float:
        """The largest eigenvalue λ_max, in nats."""
        return float(self.values[0])

    @property
    def residual_min(self) -> float:
        """The residual ‖Hv − λv‖ of λ_min."""
        return float(self.residuals[-1])

    @property
    def residual_max(self) -> float:
        """The residual ‖Hv − λv‖ of λ_max."""
        return float(self.residuals[0])


@dataclass(frozen=True, kw_only=True)
class Trace(MatrixResult, schema="landscape.trace", table="draw"):
    """An estimate of the trace of a matrix.

    Attributes:
        value: tr H, in nats.
        standard_error: the standard error of the value, in nats.
        draws: (n,), estimates with ``value`` as mean and ``standard_error`` as standard error of the mean;
            (1,) where nothing was drawn.

    Example:
        >>> trace.value, trace.freedom, [round(end, 2) for end in trace.interval()]
        (3.0, 1.6, [2.45, 3.55])
    """

    value: Annotated[float, "nat"]
    standard_error: Annotated[float, "nat"]
    draws: Annotated[Array, "draw", "nat"] = field(default_factory=no_values)

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the standard error: 0.8 (n − 1) of n draws; NaN if they are not known."""
        return FREEDOM * (len(self.draws) - 1) if len(self.draws) else np.nan

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the confidence interval of ``value``, by Student's t with :attr:`freedom`.

        Args:
            level: the probability with which it contains tr H.

        Returns:
            (lower end, upper end), in nats.

        Example:
            >>> [round(end, 2) for end in trace.interval()]
            [2.45, 3.55]
        """
        return Estimate(self.value, self.standard_error, self.freedom).interval(level)

    def describe(self) -> list[Row]:
        row = Row("trace", self.value, self.standard_error, self.unit, interval(self.interval()))
        return [row, *self._about()]


@dataclass(frozen=True, kw_only=True)
class Density(MatrixResult, schema="landscape.density", table="draw node"):
    """The spectral density of a P × P matrix, as quadratures: nodes with masses.

    Attributes:
        nodes, masses: (draws, steps), a row for each draw. The masses of a draw sum to 1. A draw whose
            Krylov space ended early has nodes of mass 0 at the end of the row.

    Example:
        >>> density.moment(1)[0], density.width()
        (0.5, 0.02)
        >>> density.broadened(np.array([0.0, 1.0]), width=0.1).round(3).tolist()
        [2.992, 0.0]
    """

    nodes: Annotated[Array, "draw+ node+", "nat"]
    masses: Annotated[Array, "draw node", "1"]

    def moment(self, order: int) -> tuple[float, float]:
        """Return a moment of the spectral density, tr(H^order)/P.

        Args:
            order: 0, 1, 2, …

        Returns:
            (estimate, its standard error over the draws, which is NaN for one draw).

        Example:
            >>> density.moment(2)[0]
            1.0
        """
        return mean_and_error((self.masses * self.nodes**order).sum(1))

    def broadened(self, at: Array, width: float | None = None) -> Array:
        """Return the density with each node as a Gaussian (Ghorbani et al. 2019, Eq. 4).

        Args:
            at: (n,), eigenvalues.
            width: standard deviation of the Gaussians; default: that of :meth:`width`.

        Returns:
            (n,), the mean over the draws of Σ_i mass_i N(at; node_i, width²), whose integral is 1.

        Raises:
            InputError: a width that is not positive.

        Example:
            >>> density.broadened(np.array([0.0, 2.0]), width=0.1).round(3).tolist()
            [2.992, 0.997]
        """
        width = self.width() if width is None else width
        positive("width", width)
        total = np.zeros(len(at))
        for node, mass in zip(self.nodes.ravel(), self.masses.ravel(), strict=True):
            total += mass * np.exp(-0.5 * ((at - node) / width) ** 2)
        return total / (len(self.nodes) * width * np.sqrt(2 * np.pi))

    def width(self) -> float:
        """Return the default width of :meth:`broadened` (our choice: 1% of the range of the nodes).

        Returns:
            The width; where all nodes are equal 1% of their magnitude, or 0.01 if that is 0.

        Example:
            >>> density.width()
            0.02
        """
        span = float(np.ptp(self.nodes))
        largest = float(np.abs(self.nodes).max())
        return BROADENING * (span if span > 1e-6 * largest else largest or 1.0)

    def describe(self) -> list[Row]:
        return [Row("mean λ", *self.moment(1), self.unit, "from the density"), *self._about()]


@dataclass(frozen=True, kw_only=True)
class Spectrum(Eigenvalues, schema="landscape.spectrum"):
    """Eigenvalues, trace and density of one Hessian, or of the block of some parameters; each may be missing.

    Attributes:
        trace, trace_error, trace_freedom: tr H and one standard error, in nats, and the degrees of freedom of
            that; NaN if not computed.
        nodes, masses: (draws, steps), as in :class:`Density`; (0, 0) if not computed.

    Example:
        >>> result = Spectrum(
        ...     values=np.array([2.0, -1.0]), residuals=np.zeros(2), lowest=1, residual_tol=0.01,
        ...     parameters=9, products=12, seed=0, samples=10, dtype="float64")
        >>> result.density is None
        True
    """

    trace: Annotated[float, "nat"] = np.nan
    trace_error: Annotated[float, "nat"] = np.nan
    trace_freedom: Annotated[float, "1"] = np.nan
    nodes: Annotated[Array, "draw node", "nat"] = field(default_factory=no_rows)
    masses: Annotated[Array, "draw node", "1"] = field(default_factory=no_rows)

    @classmethod
    def of(cls, *parts: MatrixResult) -> Self:
        """Return one spectrum that holds several results of one matrix.

        Args:
            parts: an :class:`Eigenpairs`, a :class:`Trace` and a :class:`Density`, or some of these three.

        Returns:
            A spectrum with the parts' numbers, without eigenvectors, and the sum of the parts' products.

        Example:
            >>> found = Spectrum.of(pairs, trace, density)
            >>> found.values.tolist(), found.trace, found.density.width()
            ([2.0, -1.0], 3.0, 0.02)
        """
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in parts:
            values |= {field.name: getattr(part, field.name) for field in fields(part) if field.name in names}
            if isinstance(part, Trace):
                values |= {"trace": part.value, "trace_error": part.standard_error}
                values["trace_freedom"] = part.freedom
        values["products"] = sum(part.products for part in parts)
        by_differences = [part for part in parts if part.derivatives == "differences"]
        # The error of a Trace is no error of a product. It is kept only if all ``by_differences`` are traces.
        of_products = [part for part in by_differences if not isinstance(part, Trace)]
        if by_differences:
            largest = max(part.product_error for part in of_products or by_differences)
            values |= {"derivatives": "differences", "product_error": largest}
        return cls(**values)

    def trace_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the confidence interval of ``trace``, as :class:`landscape.Trace` does; NaN if not known.

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
        if not self.nodes.size:
            return None
        return Density(**{field.name: getattr(self, field.name) for field in fields(Density)})

    def describe(self) -> list[Row]:
        rows = self._eigenvalues()
        if np.isfinite(self.trace):
            ends = interval(self.trace_interval())
            rows.append(Row("trace", self.trace, self.trace_error, self.unit, ends))
        if self.density:
            rows.append(self.density.describe()[0])
        return [*rows, *self._about(), converged(self.converged, "raise max_products")]


@dataclass(frozen=True, kw_only=True)
class BatchSpectrum(MatrixResult, schema="landscape.batch_spectrum", table="draw rank"):
    """The k largest and the smallest eigenvalue of the Hessians of drawn minibatches (Park and Kim 2022).

    Park and Kim (arXiv 2202.06709) compare networks by the distribution of λ_max over minibatches, weight
    decay included.

    Attributes:
        values, residuals: (draws, k + 1), the largest eigenvalues of each minibatch's Hessian in nats,
            descending, and last the smallest; and ‖Hv − λv‖ of each, from another product.
        whole, whole_residuals: (k + 1,), the same of the Hessian over all ``samples``.
        batch: samples of a minibatch.
        weight_decay: λ of λ/2·‖θ‖², which is part of all eigenvalues.
        converged: whether all residuals met the tolerance.
        residual_tol: the largest residual that was allowed, relative to the eigenvalue.

    Example:
        >>> result = BatchSpectrum(
        ...     values=np.array([[3.0, -1.0], [5.0, 1.0]]), residuals=np.zeros((2, 2)), whole=np.ones(2),
        ...     whole_residuals=np.zeros(2), batch=8, converged=True, parameters=2, products=9, seed=0,
        ...     samples=100, dtype="float64")
        >>> result.value, result.standard_error, round(result.spread, 3), result.negative
        (4.0, 1.0, 1.414, 0.5)
    """

    values: Annotated[Array, "draw+ rank", "nat"]
    residuals: Annotated[Array, "draw rank", "nat"]
    whole: Annotated[Array, "rank", "nat"]
    whole_residuals: Annotated[Array, "rank", "nat"]
    batch: Annotated[int, "samples"]
    weight_decay: Annotated[float, "nat"] = 0.0
    converged: bool
    residual_tol: float = np.nan

    @property
    def value(self) -> float:
        """The mean of λ_max over the minibatches, in nats."""
        return float(self.values[:, 0].mean())

    @property
    def standard_error(self) -> float:
        """The standard error of ``value`` over the draws; NaN of one draw."""
        return mean_and_error(self.values[:, 0])[1]

    @property
    def spread(self) -> float:
        """The standard deviation of λ_max over the minibatches, in nats; NaN of one draw."""
        return float(self.standard_error * np.sqrt(len(self.values)))

    @property
    def negative(self) -> float:
        """The share of minibatches whose smallest eigenvalue is negative beyond its residual."""
        return float((self.values[:, -1] < -self.residuals[:, -1]).mean())

    def describe(self) -> list[Row]:
        ends = interval(Estimate.of(self.values[:, 0]).interval())
        draws = f"{len(self.values)} draws of {self.batch:,}, {ends}"
        below = f"mean λ_min {self.values[:, -1].mean():.4g}"
        rows = [
            Row("λ_max over minibatches", self.value, self.standard_error, self.unit, draws),
            Row("spread of λ_max", self.spread, unit=self.unit, note="standard deviation over minibatches"),
            Row("share with a negative end", self.negative, note=below),
            eigenvalue("λ_max of all samples", self.whole[0], self.whole_residuals[0], self.unit),
            eigenvalue("λ_min of all samples", self.whole[-1], self.whole_residuals[-1], self.unit),
        ]
        if self.weight_decay:
            rows.append(Row("weight decay", self.weight_decay, note="part of all eigenvalues"))
        return [*rows, *self._about(), converged(self.converged, "raise max_products")]


@dataclass(frozen=True, kw_only=True)
class CurvatureTable(MatrixResult, schema="landscape.curvature_table", table="groups"):
    """λ_max, λ_min and trace of a Hessian and of its diagonal blocks, by groups (G) of parameters.

    Attributes:
        groups: (G,), the names; the first is "all", the whole matrix, and each parameter is in one of the
            further groups.
        sizes: (G,), numbers of parameters.
        lambda_max, lambda_min: (G,), the largest and the algebraically smallest eigenvalue of each block.
        residual_max, residual_min: (G,), their residuals ‖Hv − λv‖, each from another product.
        trace, trace_error: (G,), the trace of each block and one standard error.
        share, share_error: (G,), the trace relative to that of all and one standard error; NaN where the
            trace of all is less than 3 standard errors from zero.
        met: (G,), whether both residuals met the tolerance.
        residual_tol: the largest residual that was allowed, relative to the eigenvalue.
        draws: random vectors of the traces.

    Example:
        >>> table.groups, table.share.tolist(), table.converged
        (('all', 'h.0', 'h.1'), [1.0, 0.75, 0.25], True)
        >>> table.to_dataframe().query("groups == 'h.0'").trace.tolist()
        [3.0]
    """

    groups: Annotated[tuple[str, ...], "groups+"]
    sizes: Annotated[Array, "groups", "1"]
    lambda_max: Annotated[Array, "groups", "nat"]
    lambda_min: Annotated[Array, "groups", "nat"]
    residual_max: Annotated[Array, "groups", "nat"]
    residual_min: Annotated[Array, "groups", "nat"]
    trace: Annotated[Array, "groups", "nat"]
    trace_error: Annotated[Array, "groups", "nat"]
    share: Annotated[Array, "groups", "1"]
    share_error: Annotated[Array, "groups", "1"]
    met: Annotated[Array, "groups"]
    residual_tol: float = np.nan
    draws: int = 0

    @property
    def converged(self) -> bool:
        """Return whether all residuals met the tolerance."""
        return bool(np.all(self.met))

    def describe(self) -> list[Row]:
        rows = []
        for g, name in enumerate(self.groups):
            lowest = in_words(float(self.lambda_min[g]), float(self.residual_min[g]))
            trace = in_words(float(self.trace[g]), float(self.trace_error[g]))
            share = in_words(100 * float(self.share[g]), 100 * float(self.share_error[g]))
            of_all = "" if g == 0 or np.isnan(self.share[g]) else f" ({share}%)"
            missed = "" if self.met[g] else ", NOT converged"
            note = f"λ_min {lowest}, trace {trace}{of_all}{missed}"
            value, residual = float(self.lambda_max[g]), float(self.residual_max[g])
            rows.append(Row(f"{name}: λ_max", value, residual, self.unit, note))
        return [*rows, *self._about(), converged(self.converged, "raise max_products")]


@dataclass(frozen=True, kw_only=True)
class LossChange(MatrixResult, schema="landscape.loss_change", table="groups"):
    """A step's change of the loss by groups (G) of parameters: ⟨g, d⟩, ½ dᵀHd and the rest.

    The directional sharpness is that of arXiv 2606.04662, the critical one that of arXiv 2601.16979.

    Attributes:
        groups: (G,), the names; the first is "all", and each parameter is in one other.
        sizes: (G,), numbers of parameters.
        gradient: (G,), ⟨g_a, d_a⟩ of each group a.
        curvature: (G,), ½ Σ_b d_aᵀH_ab d_b of each group a; curvature between two groups counts half for
            each, so that the groups add up to ½ dᵀHd, the number of "all".
        within: (G,), ½ d_aᵀH_aa d_a, the curvature within each group; for "all" the sum over the groups.
        between: (G − 1, G − 1), ½ d_aᵀH_ab d_b.
        loss_before, loss_after: L(θ) and L(θ + d).
        step_norm: ‖d‖.
        step_lr: α; NaN if it was not given.
        critical_multiple: the smallest m with L(θ + md) > L(θ), to 1%; 0 for a step uphill, NaN where there
            is none.
        product_error: as of all results; here, of the curvature of all at most.

    Example:
        >>> change.loss_change, change.rest
        (-0.75, 0.25)
        >>> change.sharpness, change.critical_sharpness
        (0.5, 5.0)
    """

    groups: Annotated[tuple[str, ...], "groups+"]
    sizes: Annotated[Array, "groups", "1"]
    gradient: Annotated[Array, "groups", "nat"]
    curvature: Annotated[Array, "groups", "nat"]
    within: Annotated[Array, "groups", "nat"]
    between: Annotated[Array, "group other", "nat"]
    loss_before: Annotated[float, "nat"]
    loss_after: Annotated[float, "nat"]
    step_norm: Annotated[float, "1"]
    step_lr: float = np.nan
    critical_multiple: Annotated[float, "1"] = np.nan

    @property
    def loss_change(self) -> float:
        """L(θ + d) − L(θ) in nats."""
        return self.loss_after - self.loss_before

    @property
    def rest(self) -> float:
        """The loss change that gradient and curvature leave, of third order in d and more, in nats."""
        return self.loss_change - float(self.gradient[0]) - float(self.curvature[0])

    @property
    def sharpness(self) -> float:
        """dᵀHd/‖d‖², the directional sharpness of the step, in nats."""
        return 2 * float(self.curvature[0]) / self.step_norm**2

    @property
    def critical_sharpness(self) -> float:
        """2/(αm), m the critical multiple (arXiv 2601.16979); NaN without α."""
        return 2 / (self.step_lr * self.critical_multiple) if self.critical_multiple else np.inf

    def describe(self) -> list[Row]:
        above = "of the step: the loss rises above its start"
        rows = [
            Row("loss change", self.loss_change, unit="nat"),
            Row("gradient", float(self.gradient[0]), unit="nat"),
            Row("curvature", float(self.curvature[0]), self.product_error or np.nan, "nat"),
            Row("rest", self.rest, unit="nat"),
            Row("directional sharpness", self.sharpness, unit="nat"),
            Row("critical multiple", self.critical_multiple, note=above),
        ]
        if np.isfinite(self.step_lr):
            rows.append(Row("critical sharpness", self.critical_sharpness, unit="nat"))
        for g, name in enumerate(self.groups[1:], 1):
            note = f"curvature {self.curvature[g]:.3g}, within it {self.within[g]:.3g}"
            rows.append(Row(f"{name}: gradient", float(self.gradient[g]), unit="nat", note=note))
        return [*rows, *self._about()]

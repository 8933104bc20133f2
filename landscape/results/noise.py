"""The noise of gradients, Δ(2), scales and critical batches, and how learners and their labels differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from landscape.core import statistics
from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate
from landscape.results.base import Measurement, Sourced, no_values
from landscape.results.shown import Row, converged, eigenvalue, interval, percent, rows_of_each


@dataclass(frozen=True)
class Noise(Sourced, schema="landscape.noise", table="draw"):
    """Δ(2) at one checkpoint, with learners w_j = w_a + Δw_j, learning rate α and local batch B.

    All values are squared weights. Arrays (draws,) have one value for each draw of n minibatches of B samples
    (with replacement). Numbers without draws are exact on the whole data set. With P⊥ the projector
    orthogonal to g and δ = n⁻¹ Σ_j [∇L^{μ_j}(w_j) − ∇L^{μ_j}(w_a)], Δ_DP = Δ_S + α²‖P⊥δ‖² + 2α²⟨P⊥g_S, P⊥δ⟩
    (DPSGD-2020, Eq. 4).

    Attributes:
        direct: (draws,), α²‖δ‖²: the definition.
        first_order: (draws,), α²‖n⁻¹ Σ_j H_{μ_j} Δw_j‖², its first-order expansion, with minibatch Hessians
            at w_a.
        delta_s: (draws,), Δ_S = α²‖P⊥g_S‖².
        delta_2: (draws,), α²‖P⊥δ‖².
        delta_cross: (draws,), 2α²⟨P⊥g_S, P⊥δ⟩.
        full_batch: the definition with ∇L in place of ∇L^{μ_j}, which has only terms of higher order.
        eq4: α² n⁻² Σ_j ‖HΔw_j‖², the Hessian form in the paper.

    Example:
        >>> noise.means()["direct"], noise.means()["eq4"]
        ((2.0, 1.0), (1.0, 0.0))
    """

    direct: Annotated[Array, "draw+", "1"]
    first_order: Annotated[Array, "draw+", "1"]
    delta_s: Annotated[Array, "draw+", "1"]
    delta_2: Annotated[Array, "draw+", "1"]
    delta_cross: Annotated[Array, "draw+", "1"]
    full_batch: Annotated[float, "1"]
    eq4: Annotated[float, "1"]
    consensus: Annotated[float, "1"]
    lr: Annotated[float, "1"]
    learners: int
    local_batch: int
    samples: int
    seed: int

    def means(self) -> dict[str, tuple[float, float]]:
        """Return all estimates of Δ(2), and the terms of Δ_DP.

        Returns:
            Name -> (mean over the draws, its standard error; 0 for numbers that are exact).

        Example:
            >>> noise.means()["direct"]
            (2.0, 1.0)
        """
        rows = {}
        for name in ("direct", "full_batch", "eq4", "first_order", "delta_s", "delta_2", "delta_cross"):
            value = getattr(self, name)
            rows[name] = statistics.mean_and_error(value) if np.ndim(value) else (float(value), 0.0)
        return rows

    def describe(self) -> list[Row]:
        names = {
            "direct": "Δ(2) by definition, α²‖δ‖²",
            "full_batch": "Δ(2) on the full batch",
            "eq4": "Δ(2) by Eq. 4, α² tr(HCH)",
            "first_order": "Δ(2) to first order",
            "delta_s": "Δ_S",
            "delta_2": "α²‖P⊥δ‖²",
            "delta_cross": "cross term",
        }
        means = self.means()
        direct, eq4 = means["direct"][0], means["eq4"][0]
        times = {"direct": f"Eq. 4 gives {eq4 / direct:.2g} times it" if direct > 0 else ""}
        return [
            *(Row(text, *means[name], note=times.get(name, "")) for name, text in names.items()),
            Row("consensus distance", self.consensus),
            Row("learning rate α", self.lr),
            Row("draws", len(self.direct), note=f"of {self.learners} × {self.local_batch:,} samples"),
        ]


@dataclass(frozen=True, kw_only=True)
class NoiseScale(Measurement, schema="landscape.noise_scale", table="replicate"):
    """B_simple = tr Σ/‖g‖² in samples, g = ∇L and Σ the covariance of one sample's gradient.

    The scale is that of McCandlish et al. 2018, section 2.2.

    Attributes:
        estimates: (replicates,), numbers whose mean is B_simple at w_a, and whose standard error is its own.
        trace, trace_error: tr Σ in squared nats, and one standard error.
        norm2, norm2_error: ‖g‖² in squared nats, and one standard error; 0 where it is exact.
        covariance, learner_covariance: the covariances of the estimates of tr Σ and ‖g‖².
        draws: the number of minibatches of ``batch`` samples.
        gradient: "whole": g is of all data; "draws": ‖g‖² is estimated from pairs of minibatches.
        batch: samples of a minibatch.
        learner_draws: the number of minibatches of ``local_batch`` samples for each learner.
        learner_estimates: (learner replicates,), as ``estimates``, of the learners' mean gradient at their
            own weights; empty without learners.
        learner_trace, learner_trace_error, learner_norm2, learner_norm2_error: the same of tr Σ and ‖g‖²; NaN
            without learners.
        round_trace, round_trace_error, round_norm2, round_norm2_error: the means of what a single draw shows,
            tr Σ and ‖g‖² from the n gradients of one step. With V the variance of the learners' own mean
            gradients (divided by n − 1), tr Σ then includes local_batch · V, and ‖g‖² lacks V/n, so that it
            may be below 0. NaN without learners.
        precondition: the optimizer whose preconditioner P was used, or "given": all is then of P^{-1/2} g.
        relative_error: the relative standard error asked for.
        converged: whether the standard errors of w_a and of the learners are that small.

    Example:
        >>> result = NoiseScale(
        ...     estimates=np.array([90.0, 110.0]), trace=200.0, trace_error=20.0, norm2=2.0, norm2_error=0.0,
        ...     batch=8, draws=2, gradient="whole", relative_error=0.05, converged=False, samples=100, seed=0,
        ...     dtype="float64")
        >>> result.value, result.standard_error
        (100.0, 10.0)
    """

    estimates: Annotated[Array, "replicate+", "samples"]
    trace: Annotated[float, "nat2"]
    trace_error: Annotated[float, "nat2"]
    norm2: Annotated[float, "nat2"]
    norm2_error: Annotated[float, "nat2"]
    batch: Annotated[int, "samples"]
    draws: int
    gradient: str
    relative_error: Annotated[float, "1"]
    converged: bool
    learners: int = 0
    local_batch: Annotated[int, "samples"] = 0
    learner_draws: int = 0
    learner_estimates: Annotated[Array, "learner_replicate", "samples"] = field(default_factory=no_values)
    learner_trace: Annotated[float, "nat2"] = np.nan
    learner_trace_error: Annotated[float, "nat2"] = np.nan
    learner_norm2: Annotated[float, "nat2"] = np.nan
    learner_norm2_error: Annotated[float, "nat2"] = np.nan
    round_trace: Annotated[float, "nat2"] = np.nan
    round_trace_error: Annotated[float, "nat2"] = np.nan
    round_norm2: Annotated[float, "nat2"] = np.nan
    round_norm2_error: Annotated[float, "nat2"] = np.nan
    covariance: float = 0.0
    learner_covariance: float = 0.0
    precondition: str = ""

    @property
    def value(self) -> float:
        """B_simple at w_a, in samples; NaN where ‖g‖² is not significantly above 0."""
        return statistics.scale_of(self.estimates, self.interval())

    def interval(self, level: float = 0.95, *, learners: bool = False) -> tuple[float, float]:
        """Return the confidence interval of B_simple = tr Σ/‖g‖², by Fieller's theorem.

        If ‖g‖² is near 0, the ratio has heavy tails: an interval of ± a few standard errors is too narrow.

        Args:
            level: the probability with which the interval contains B_simple.
            learners: True for the interval of ``learner_value``, False for that of ``value``.

        Returns:
            (lower end, upper end), in samples; the upper end is infinite where ‖g‖² is not significantly
            above 0.

        Example:
            >>> result = NoiseScale(
            ...     estimates=np.array([90.0, 110.0]), trace=200.0, trace_error=20.0, norm2=2.0,
            ...     norm2_error=0.5, batch=8, draws=2, gradient="draws", relative_error=0.05, converged=False,
            ...     samples=100, seed=0, dtype="float64")
            >>> result.interval()
            (0.0, inf)
            >>> result.value  # not 200/2: with two estimates, a t-test does not exclude that ‖g‖² is 0
            nan
        """
        names = ("estimates", "trace", "trace_error", "norm2", "norm2_error", "covariance")
        prefix = "learner_" if learners else ""
        values = {name: getattr(self, prefix + name) for name in names}
        freedom = len(values["estimates"]) - 1
        numerator = Estimate(values["trace"], values["trace_error"], freedom)
        denominator = Estimate(values["norm2"], values["norm2_error"], freedom)
        return statistics.ratio_interval(numerator, denominator, values["covariance"], level)

    @property
    def standard_error(self) -> float:
        """The standard error of ``value``."""
        return statistics.standard_error(self.estimates)

    @property
    def learner_value(self) -> float:
        """B_simple of the learners' mean gradient, in samples; NaN without them, or where ‖g‖² may be 0."""
        return statistics.scale_of(self.learner_estimates, self.interval(learners=True))

    @property
    def learner_standard_error(self) -> float:
        """The standard error of ``learner_value``."""
        return statistics.standard_error(self.learner_estimates)

    @property
    def bounded(self) -> bool:
        """Return whether ‖g‖² at w_a is significantly above 0 (95%); else B_simple has no upper bound."""
        return bool(np.isfinite(self.interval()[1]))

    def describe(self) -> list[Row]:
        draws_note = f"{self.draws} draws of {self.batch:,}, {interval(self.interval())}"
        draws_note += f", preconditioned by {self.precondition}" if self.precondition else ""
        unit = "" if self.precondition else "nat²"
        warning = "" if self.bounded else "not significantly above 0 (95%): more draws, or gradient='whole'"
        rows = [
            Row("noise scale at w_a", self.value, self.standard_error, "samples", draws_note),
            Row("tr Σ at w_a", self.trace, self.trace_error, unit),
            Row("‖g‖² at w_a", self.norm2, self.norm2_error, unit, warning),
        ]
        if self.learners:
            value, error = self.learner_value, self.learner_standard_error
            draws_note = f"{self.learner_draws} draws, {interval(self.interval(learners=True))}"
            rows += [
                Row(f"noise scale, mean of {self.learners} learners", value, error, "samples", draws_note),
                Row("tr Σ of the learners", self.learner_trace, self.learner_trace_error, unit),
                Row("‖g‖² of the learners", self.learner_norm2, self.learner_norm2_error, unit),
                Row("tr Σ from the gradients of one step", self.round_trace, self.round_trace_error, unit),
                Row("‖g‖² from the gradients of one step", self.round_norm2, self.round_norm2_error, unit),
            ]
        missed = f"not within {self.relative_error:.0%}, raise max_draws"
        return [*rows, Row("samples", self.samples), converged(self.converged, missed)]


@dataclass(frozen=True, kw_only=True)
class NoiseAlignment(Measurement, schema="landscape.noise_alignment", table="rank"):
    """How the gradients g_B of minibatches of B samples, drawn with replacement, lie in the curvature.

    H is the Hessian and g the gradient over all samples, v_i and λ_i the eigenvectors and eigenvalues of the
    k largest; S = E g_B g_Bᵀ the second moment, C = E (g_B − g)(g_B − g)ᵀ the covariance. Errors are one
    standard error over the drawn minibatches, by the jackknife.

    Attributes:
        values, residuals: (k,), λ_i in nats, descending, and ‖Hv − λv‖.
        covariance, covariance_error: (k,), C_ii = v_iᵀCv_i.
        ias, ias_error: tr(HS)/tr S in nats, the interaction-aware sharpness: the mean curvature along
            gradients of minibatches, at most λ_1.
        noise_curvature, noise_curvature_error: tr(HC)/tr C in nats, the mean curvature along the noise.
        trace_s, trace_c: tr S and tr C.
        grad_norm2: ‖g‖².
        gamma, gamma_error: γ in C_ii ∝ λ_i^γ (arXiv 2602.05600, in the eigenbasis of H), the least-squares
            slope of log C_ii over log λ_i for λ_i > 0, and the slope's error over the draws; NaN for fewer
            than 2 eigenvalues.
        gamma_scatter: the standard error of the slope from the scatter of the points around the line, as if
            the points were independent: large where there is no power law. NaN for fewer than 3 eigenvalues.
        batch: B.
        draws: the number of minibatches.
        estimates: (draws,), a number for each minibatch, with ``ias`` as mean and ``ias_error`` as standard
            error, so that results of equal minibatches can be compared in pairs.
        draws_converged: whether ``ias`` has the allowed relative standard error.
        products: the number of Hessian-vector products.
        converged: whether the eigenvalues have the allowed residuals.
        relative_error: the allowed relative standard error.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`; with BatchNorm each minibatch has its own
            statistics, and H and g are means over minibatches of B samples.

    Example:
        >>> import numpy as np
        >>> two = np.array([2.0, 1.0])
        >>> result = NoiseAlignment(
        ...     values=two, residuals=two / 99, covariance=two, covariance_error=two / 9, ias=1.5,
        ...     ias_error=0.1, noise_curvature=1.4, noise_curvature_error=0.1, trace_s=5.0, trace_c=4.0,
        ...     grad_norm2=1.0, gamma=1.0, gamma_error=0.1, gamma_scatter=np.nan, batch=4, draws=32,
        ...     draws_converged=True, parameters=9, products=50, converged=True, relative_error=0.05, seed=0,
        ...     samples=9, dtype="float64")
        >>> result.value, result.standard_error, result.shares.tolist()
        (1.5, 0.1, [0.5, 0.25])
    """

    values: Annotated[Array, "rank+", "nat"]
    residuals: Annotated[Array, "rank", "nat"]
    covariance: Annotated[Array, "rank", "nat^2"]
    covariance_error: Annotated[Array, "rank", "nat^2"]
    ias: Annotated[float, "nat"]
    ias_error: Annotated[float, "nat"]
    noise_curvature: Annotated[float, "nat"]
    noise_curvature_error: Annotated[float, "nat"]
    trace_s: Annotated[float, "nat^2"]
    trace_c: Annotated[float, "nat^2"]
    grad_norm2: Annotated[float, "nat^2"]
    gamma: Annotated[float, "1"]
    gamma_error: Annotated[float, "1"]
    gamma_scatter: Annotated[float, "1"]
    batch: int
    draws: int
    draws_converged: bool
    parameters: int
    products: int
    converged: bool
    relative_error: float
    estimates: Annotated[Array, "draw", "nat"] = field(default_factory=no_values)

    @property
    def value(self) -> float:
        """The interaction-aware sharpness in nats."""
        return self.ias

    @property
    def standard_error(self) -> float:
        """The standard error of :attr:`value`."""
        return self.ias_error

    @property
    def shares(self) -> Array:
        """(k,), C_ii/tr C: the share of the noise along each eigenvector."""
        return self.covariance / self.trace_c

    def describe(self) -> list[Row]:
        scatter = f"scatter around the line {self.gamma_scatter:.1e}"
        missed = "an eigenvalue is not" if self.draws_converged else "the error is not, raise max_draws"
        eigenvalues = zip(self.values, self.residuals, strict=True)
        names = [f"C_{i}{i}" for i in range(1, len(self.values) + 1)]
        of_noise = [f"{100 * share:.3g}% of the noise" for share in self.shares]
        return [
            Row("tr(HS)/tr S", self.ias, self.ias_error, "nat", f"λ_max {self.values[0]:.6g}"),
            Row("tr(HC)/tr C", self.noise_curvature, self.noise_curvature_error, "nat"),
            Row("γ in C_ii ∝ λ_i^γ", self.gamma, self.gamma_error, note=scatter),
            *(eigenvalue(f"λ_{i}", *pair) for i, pair in enumerate(eigenvalues, 1)),
            *rows_of_each(names, self.covariance, self.covariance_error, "nat²", of_noise),
            Row("minibatches", self.draws, note=f"of {self.batch:,} from {self.samples:,} samples"),
            Row("Hessian products", self.products),
            converged(self.draws_converged and self.converged, missed),
        ]


@dataclass(frozen=True, kw_only=True)
class CriticalBatch(
    Measurement, schema="landscape.critical_batch", axes="batch", table="batch seed_of_branch"
):
    """The loss after branches that train on equally many samples, by batch; the first is the reference.

    At the critical batch the mean loss is 1 + ``loss_tol`` times the mean loss of the reference.

    Attributes:
        batch: (K,), samples of a step, nB, increasing.
        lr: (K,), the learning rate of each branch.
        steps: (K,), the number of steps of each branch.
        loss: (K, seeds) in nats, the training loss at w_a near the end; inf where a branch diverged.
        own_batch: nB of the run from which the branches start.
        step: the step at which the branches start.
        trained_samples: the number of samples on which each branch trains.
        loss_tol: the allowed rise of the loss, relative to the reference.
        scaling: the scaling of the learning rate with the batch: "linear", "sqrt" or "none".

    Example:
        >>> result = CriticalBatch(
        ...     batch=np.array([10, 40]), lr=np.array([0.1, 0.4]), steps=np.array([40, 10]),
        ...     loss=np.array([[1.0, 1.0], [1.1, 1.3]]), own_batch=10, step=100, trained_samples=400,
        ...     loss_tol=0.1, scaling="linear", samples=50, seed=0, dtype="float32")
        >>> result.value, result.rise.round(3).tolist()
        (20.0, [0.0, 0.2])
    """

    batch: Annotated[Array, "batch+", "samples"]
    lr: Annotated[Array, "batch", "1"]
    steps: Annotated[Array, "batch", "steps"]
    loss: Annotated[Array, "batch seed_of_branch+", "nat"]
    own_batch: Annotated[int, "samples"]
    step: Annotated[int, "steps"]
    trained_samples: Annotated[int, "samples"]
    loss_tol: Annotated[float, "1"]
    scaling: str

    @property
    def rise(self) -> Array:
        """(K,), the mean loss above that of the reference, relative to it."""
        return _rise(self.loss)

    @property
    def rise_error(self) -> Array:
        """(K,), the standard error of ``rise`` over the seeds, in pairs; NaN for one seed."""
        mean = self.loss.mean(1)
        with np.errstate(invalid="ignore"):
            spread = self.loss / mean[0] - mean[:, None] / mean[0] ** 2 * self.loss[0]
        return np.array([statistics.standard_error(row) for row in spread])

    @property
    def value(self) -> float:
        """The critical batch in samples; inf where no branch is worse than allowed."""
        return self._crossing(self.loss)

    @property
    def standard_error(self) -> float:
        """The standard error of ``value`` over the seeds, by the jackknife; NaN where it is unknown.

        The distance to the batches that were tried on both sides, :attr:`bracket`, is not in it.
        """
        n = self.loss.shape[1]
        estimates = np.array([self._crossing(np.delete(self.loss, k, 1)) for k in range(n)] if n > 1 else [])
        usable = estimates.size and np.isfinite(estimates).all()
        return float(statistics.error_of(estimates)) if usable else math.nan

    @property
    def bracket(self) -> tuple[float, float]:
        """(the largest batch that is good enough, the next one; inf if there is none)."""
        k = self._first_worse(self.rise)
        return float(self.batch[k - 1]), float(self.batch[k]) if k < len(self.batch) else math.inf

    def _first_worse(self, rise: Array) -> int:
        worse = np.flatnonzero(~(rise <= self.loss_tol))
        return int(worse[0]) if len(worse) else len(rise)

    def _crossing(self, loss: Array) -> float:
        """Return the batch at which the rise passes ``loss_tol``, linear in log batch."""
        rise = _rise(loss)
        k = self._first_worse(rise)
        if k == len(rise):
            return math.inf
        share = (self.loss_tol - rise[k - 1]) / (rise[k] - rise[k - 1]) if np.isfinite(rise[k]) else 0.5
        low, high = np.log(self.batch[k - 1 : k + 1])
        return float(round(math.exp(low + share * (high - low)), 9))

    def describe(self) -> list[Row]:
        low, high = self.bracket
        if math.isfinite(high):
            between = f"between {low:,.0f} and {high:,.0f}"
            first = Row("critical batch", self.value, self.standard_error, "samples", between)
        else:
            first = Row("critical batch", f"above {low:,.0f}", unit="samples", note="the largest one tried")
        rises = []
        for k, (batch, steps, loss) in enumerate(zip(self.batch, self.steps, self.loss.mean(1), strict=True)):
            note = f"loss {loss:.5g} nat, rate {self.lr[k]:.4g}, {steps:,} steps"
            name = f"rise of the loss, batch {batch:,}"
            rises.append(percent(name, self.rise[k], self.rise_error[k], note))
        return [
            first,
            *rises,
            percent("allowed rise above the smallest batch", self.loss_tol),
            Row("samples of a branch", self.trained_samples, note=f"{self.loss.shape[1]} seeds"),
            Row("scaling of the rate", self.scaling),
        ]


def _rise(loss: Array) -> Array:
    """Return (K,), the means over the seeds above the first, relative to it."""
    mean = loss.mean(1)
    return mean / mean[0] - 1


@dataclass(frozen=True)
class LabelCounts(Sourced, schema="landscape.label_counts", table="learner class"):
    """Training samples by learner and label.

    Attributes:
        counts: (n, K), samples of each label that each learner draws its minibatches from.
        classes: (K,), the labels; one, 0, where samples have none.
        division: how the training set was divided, as in the recipe's key ``data.split``.

    Example:
        >>> result = LabelCounts(np.array([[30, 0], [10, 20]]), np.array([0, 1]), "dirichlet(0.1)")
        >>> [row.name for row in result.describe()]
        ['smallest part', 'labels of a learner', 'division']
    """

    counts: Annotated[Array, "learner+ class+", "samples"]
    classes: Annotated[Array, "class"]
    division: str

    def describe(self) -> list[Row]:
        sizes, present = self.counts.sum(1), (self.counts > 0).sum(1)
        largest = f"largest {sizes.max():,.0f}"
        of = f"of {len(self.classes)}, mean over {len(sizes)} learners"
        return [
            Row("smallest part", float(sizes.min()), 0.0, "samples", largest),
            Row("labels of a learner", float(present.mean()), 0.0, note=of),
            Row("division", self.division),
        ]


@dataclass(frozen=True, kw_only=True)
class Disagreement(Measurement, schema="landscape.disagreement", table="rank_of_eigenvalue"):
    """The share of the learners' spread Δw_j = w_j − w_a, and of the gradient, in the top-k Hessian space.

    H is the Hessian and g the gradient of the mean loss at w_a, over all samples; v_i the eigenvectors of
    the k largest eigenvalues of H; C = n⁻¹ Σ_j Δw_jΔw_jᵀ the covariance of the learners (not n⁻² Σ, as in
    Eq. 4 of DPSGD-2020). Errors are one standard error by the jackknife over the learners, as if learners
    were independent draws. After mixing learners are not independent, and the errors are too small. Errors
    are NaN for two learners. As statements on these learners, the numbers are exact up to the residuals of
    the eigenvectors.

    Attributes:
        values, residuals: (k,), eigenvalues in nats, descending, and ‖Hv − λv‖.
        spread_share: (k,), v_iᵀCv_i/tr C.
        spread_error: (k,), the error of the sum of ``spread_share`` over the first i eigenvectors.
        gradient_share: (k,), (v_iᵀg)²/‖g‖². All shares of the gradient are NaN for g = 0.
        consensus: tr C, the consensus distance.
        cost, cost_error: ½ tr(HC) in nats: to second order, the learners' mean loss minus the loss of w_a;
            the error includes errors of products by differences.
        cost_top: the part of ``cost`` from the top-k space, ½ Σ_i λ_i v_iᵀCv_i.
        loss, learners_loss: the loss of w_a, and the learners' mean loss, in nats; both with the BatchNorm
            statistics that ``bn`` names.
        gradient_in_span: ‖Pg‖²/‖g‖², P the projector on the span of the Δw_j, of dimension ``rank``.
        rank: the dimension of the span of the Δw_j, at most n − 1.
        dominant_in_span: ‖PQg‖²/‖Qg‖², Q the projector on the top-k space: the share of the gradient's sharp
            part that the spread alone shows (arXiv 2605.27739).
        grad_norm2: ‖g‖².
        parameters: P; an isotropic vector has the share k/P in the top-k space, and rank/P in the span.
        products: the number of Hessian-vector products.
        residual_tol: the allowed relative residual of the eigenvalues.
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

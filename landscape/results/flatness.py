"""How flat a minimum is: sharpness, smoothed losses, learning coefficients, and limits on steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate, standard_error
from landscape.results.base import Measurement, Sourced, no_rows
from landscape.results.shown import (
    Row,
    converged,
    drawn_on,
    eigenvalue,
    interval,
    limit_in_words,
    rows_of_each,
)


@dataclass(frozen=True, kw_only=True)
class Sharpness(Measurement, schema="landscape.sharpness", table="draw"):
    """Worst-case or average-case (m-)sharpness, in nats.

    With c = |w| ("adaptive") or c = 1, and S all samples or minibatches of m of them:

    - kind "worst": E_S max over ‖δ/c‖ ≤ ρ of L_S(w + δ) − L_S(w). A search finds each maximum, so that the
      value is a lower bound.
    - kind "average": E_S E L_S(w + δ) − L_S(w), δ ~ N(0, ρ² diag(c²)), so that ‖δ/c‖ is about ρ√P.

    Attributes:
        values: (draws,), the rise for each minibatch, or pair ±δ; (1,) where nothing is drawn.
        standard_error: the standard error of the mean of ``values``; 0 where nothing is drawn. The error of
            the search is not included.
        loss: L(w), the mean over the draws.
        kind: "worst" or "average".
        adaptive: whether displacements are relative to each weight.
        steps, starts: gradients of a search, and searches for each draw; 0 for "average".
        rho: ρ, without a unit if ``adaptive``, else a distance in weight space.
        m: samples of a minibatch, drawn with replacement; 0: all samples.
        converged: whether the allowed relative standard error was reached.
        residual: for "worst", the mean angle in radians between gradient and displacement at the end of the
            searches, 0 at a maximum; 0 for "average".
        gradients: the number of gradients ("worst") or losses ("average"), each of m samples or of all.
        fixed: weights that are exactly 0, which "adaptive" displacements never move.
        random_device: the device that drew the displacements, as in :class:`landscape.Eigenpairs`.

    Example:
        >>> import numpy as np
        >>> result = Sharpness(
        ...     values=np.array([0.1, 0.3]), standard_error=0.1, loss=0.5, kind="average", rho=0.05,
        ...     adaptive=True, m=0, converged=False, residual=0.0, gradients=5, steps=0, starts=0, fixed=0,
        ...     parameters=9, seed=0, samples=9, dtype="float64")
        >>> result.value, result.standard_error
        (0.2, 0.1)
    """

    values: Annotated[Array, "draw+", "nat"]
    standard_error: Annotated[float, "nat"]
    loss: Annotated[float, "nat"]
    kind: str
    rho: float
    adaptive: bool
    m: int
    converged: bool
    residual: float
    gradients: int
    steps: int
    starts: int
    fixed: int
    parameters: int
    random_device: str = "cpu"

    @property
    def value(self) -> float:
        """The sharpness in nats: the mean of ``values``."""
        return float(self.values.mean())

    @property
    def draws(self) -> int:
        """The number of minibatches or pairs ±δ; 0 where nothing was drawn."""
        return 0 if self.m == 0 and self.kind == "worst" else len(self.values)

    def describe(self) -> list[Row]:
        kind = f"{self.kind}-case {'adaptive ' if self.adaptive else ''}sharpness at ρ = {self.rho:g}"
        worst = self.kind == "worst"
        note = "a lower bound" if worst else ""
        error = self.standard_error if self.draws else np.nan
        rows = [
            Row(kind, self.value, error, "nat", note),
            Row("loss", self.loss, unit="nat", note=f"minibatches of {self.m:,}" if self.m else ""),
            Row("gradients" if worst else "losses", self.gradients),
        ]
        if self.draws:
            rows += [Row("draws", self.draws), converged(self.converged, "raise max_draws")]
        if worst:
            rows.append(Row("angle between gradient and displacement", self.residual, unit="rad"))
        if self.fixed:
            rows.append(Row("weights that are 0 and do not move", self.fixed, note=f"of {self.parameters:,}"))
        return [*rows, *drawn_on(self.random_device), Row("samples", self.samples)]


@dataclass(frozen=True)
class Smoothing(Sourced, schema="landscape.smoothing", table="spread"):
    """The loss L at w_a, and L_Σ(w) = E L(w + δ), smoothed by displacements δ ~ N(0, Σ) (DPSGD-2021's paper).

    Arrays (2,) and (2, S) have two rows: for Σ of the learners' measured spread, and for the isotropic Σ with
    an equal trace. Expectations are means over m pairs ±δ_i, which all numbers of a row share.

    Attributes:
        loss, loss_smooth, loss_smooth_se: L in nats; L_Σ (2,) and its standard error (2,).
        lambda_max, residual: the largest eigenvalue of ∇²L in nats, and its residual ‖Hv − λv‖.
        lambda_smooth, lambda_smooth_residual: (2,), the largest eigenvalue of the mean of ∇²L(w_a ± δ_i), and
            the residual.
        lambda_smooth_se: (2,), the standard error of vᵀ∇²L_Σ v with the eigenvector v.
        lambda_smooth_bias: (2,), an estimate of the bias of ``lambda_smooth``, which is too large. A mean of
            random matrices has a larger λ_max than the matrices' expectation. To second order, if other
            eigenvalues are near 0, the difference is m⁻¹ E‖P⊥(∇²L(w_a ± δ_i) v − mean)‖²/λ.
        eigenvalues: (k,), the largest eigenvalues of ∇²L, descending.
        share: (k,), vᵀΣv/tr Σ for the eigenvectors v and the measured Σ; 1/P for an isotropic Σ.
        trace_hs: tr(HΣ) = n⁻¹ Σ_j Δw_jᵀHΔw_j, exact; half of it is the second-order term of E L − L.
        consensus: tr Σ.
        lipschitz: (S,), ‖∇L(w(t+1)) − ∇L(w(t))‖/‖w(t+1) − w(t)‖ for S steps of w_a, a lower bound on the
            Lipschitz constant of the gradient; empty without steps.
        lipschitz_smooth, lipschitz_smooth_se: (2, S), the ratios of the smoothed gradients, and standard
            errors.
        draws: m, the number of pairs ±δ_i.
        lr, alpha_e: α and α_e of the run; NaN if unknown.

    Example:
        >>> two = np.array([1.0, 0.5])
        >>> result = Smoothing(
        ...     loss=0.5, loss_smooth=two, loss_smooth_se=two / 9, lambda_max=2.0, residual=0.1,
        ...     lambda_smooth=two, lambda_smooth_residual=two, lambda_smooth_se=two, lambda_smooth_bias=two,
        ...     eigenvalues=two, share=two, trace_hs=0.1, consensus=0.1, lipschitz=np.zeros(0),
        ...     lipschitz_smooth=np.zeros((2, 0)), lipschitz_smooth_se=np.zeros((2, 0)), lr=0.1,
        ...     alpha_e=0.1, parameters=9, learners=3, draws=4, samples=9, seed=0, converged=True)
        >>> result.rates.tolist()
        [1.0, 2.0, 4.0]
    """

    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"spread": ("measured", "isotropic")}

    loss: Annotated[float, "nat"]
    loss_smooth: Annotated[Array, "spread", "nat"]
    loss_smooth_se: Annotated[Array, "spread", "nat"]
    lambda_max: Annotated[float, "nat"]
    residual: Annotated[float, "nat"]
    lambda_smooth: Annotated[Array, "spread", "nat"]
    lambda_smooth_residual: Annotated[Array, "spread", "nat"]
    lambda_smooth_se: Annotated[Array, "spread", "nat"]
    lambda_smooth_bias: Annotated[Array, "spread", "nat"]
    eigenvalues: Annotated[Array, "rank", "nat"]
    share: Annotated[Array, "rank", "1"]
    trace_hs: Annotated[float, "nat"]
    consensus: float
    lipschitz: Annotated[Array, "step", "nat"]
    lipschitz_smooth: Annotated[Array, "spread step", "nat"]
    lipschitz_smooth_se: Annotated[Array, "spread step", "nat"]
    lr: float
    alpha_e: float
    parameters: int
    learners: int
    draws: int
    samples: int
    seed: int
    converged: bool

    @property
    def rates(self) -> Array:
        """(3,): 2/λ_max of L, and of L smoothed by the measured and by the isotropic spread; inf if λ ≤ 0."""
        sharpness = np.array([self.lambda_max, *self.lambda_smooth])
        return np.where(sharpness > 0, 2 / np.where(sharpness > 0, sharpness, 1.0), np.inf)

    def describe(self) -> list[Row]:
        def smoothed_rows(name: str, values: Array, errors: Array, unit: str = "nat") -> list[Row]:
            """Return a row for each of the two spreads, measured and isotropic."""
            names = [f"{name}, smoothed, {spread}" for spread in self.labels_of["spread"]]
            return rows_of_each(names, values, errors, unit)

        rate, smoothed_rates = self.rates[0], self.rates[1:]
        rate_errors = smoothed_rates * self.lambda_smooth_se / abs(self.lambda_smooth)
        rows = [
            Row("loss", self.loss, unit="nat"),
            *smoothed_rows("loss", self.loss_smooth, self.loss_smooth_se),
            eigenvalue("λ_max", self.lambda_max, self.residual),
            *smoothed_rows("λ_max", self.lambda_smooth, self.lambda_smooth_se),
            Row("2/λ_max", float(rate), note=f"lr {self.lr:.4g}, α_e {self.alpha_e:.4g}"),
            *smoothed_rows("2/λ_max", smoothed_rates, rate_errors, unit=""),
        ]
        if self.lipschitz.size:
            step = self.lipschitz_smooth.argmax(1)  # the step of the largest ratio, for each spread
            constants, errors = self.lipschitz_smooth[[0, 1], step], self.lipschitz_smooth_se[[0, 1], step]
            rows.append(Row("Lipschitz constant of the gradient", float(self.lipschitz.max()), unit="nat"))
            rows += smoothed_rows("Lipschitz constant of the gradient", constants, errors)
        shares = ", ".join(f"{100 * share:.3g}%" for share in self.share)
        biases = " and ".join(f"{bias:.1e}" for bias in self.lambda_smooth_bias)
        isotropic_share = f"isotropic: {100 / self.parameters:.2g}%"
        return [
            *rows,
            Row("a smoothed λ_max is too large by about", biases, note=f"{self.draws} pairs ±δ"),
            Row("spread along the sharpest directions", shares, note=isotropic_share),
            Row("tr(HΣ)", self.trace_hs, unit="nat"),
            Row("consensus distance", self.consensus),
            converged(self.converged, "an eigenvalue is not converged"),
        ]


# Parts of a chain whose means count as independent (our choice: of 100 effective draws each has 20).
PARTS = 5


@dataclass(frozen=True, kw_only=True)
class LearningCoefficient(Measurement, schema="landscape.learning_coefficient", table="chain draw"):
    """λ̂ = nβ (E L(w) − L(w*)), w ~ exp(−nβ L(w) − γ/2 ‖w − w*‖²), from chains of SGLD that begin at w*.

    L is the mean loss of n samples, in nats a negative logarithm of the likelihood; λ̂ has no unit. A draw is
    the mean of ``steps_a_draw`` steps of a chain; the first ``burn_in`` draws are discarded.

    Attributes:
        rise: (chains, draws), nβ (L(w) − L(w*)), on minibatches.
        heating: (chains, draws), the part of the rise that is due to step size and minibatches.
        distance2: (chains, draws), ‖w − w*‖².
        standard_error: the standard error of ``value`` at this γ: the larger of the standard error from the
            effective sample size, and of the standard error from the means of 5 parts of each chain. The
            former is too small where it decided when the chains stopped.
        r_hat: rank-normalized split R̂ of rise − heating (Vehtari et al. 2021), 1 where chains have mixed.
        r_hat_distance: R̂ of ``distance2``.
        ess: the effective sample size of the mean of rise − heating, all chains together.
        nbeta: nβ, the inverse temperature times the number of samples.
        localization: γ.
        step_size: ε.
        batch: samples of a minibatch.
        steps: the number of steps of each chain, with the burn-in.
        burn_in: draws of each chain that are discarded.
        loss: L(w*) in nats.
        weights_norm2: ‖w*‖².
        lambda_max: the largest eigenvalue of the Hessian at w* in nats; NaN where the caller chose ε.
        parameters: P; a regular model has λ = P/2.
        max_rhat: the limit on ``r_hat``.
        relative_error: the allowed relative standard error.
        converged: whether the allowed error and an effective sample size of 100 for each chain were reached.

    Example:
        >>> import numpy as np
        >>> rise = np.array([[0.0, 3.0, 5.0], [0.0, 4.0, 4.0]])
        >>> result = LearningCoefficient(
        ...     rise=rise, heating=rise / 4, distance2=rise, standard_error=0.3, r_hat=1.0,
        ...     r_hat_distance=1.0, ess=4.0, nbeta=10.0, localization=1.0, step_size=0.1, batch=8, steps=3,
        ...     burn_in=1, loss=0.5, weights_norm2=1.0, lambda_max=2.0, parameters=6, max_rhat=1.01,
        ...     relative_error=0.05, converged=False, samples=36, seed=0, dtype="float64")
        >>> result.value, result.uncorrected, result.chain_values.tolist(), result.mean_loss
        (3.0, 4.0, [3.0, 3.0], 0.8)
    """

    rise: Annotated[Array, "chain+ draw+", "1"]
    heating: Annotated[Array, "chain draw", "1"]
    distance2: Annotated[Array, "chain draw"]
    standard_error: Annotated[float, "1"]
    r_hat: Annotated[float, "1"]
    r_hat_distance: Annotated[float, "1"]
    ess: Annotated[float, "1"]
    nbeta: Annotated[float, "1"]
    localization: float
    step_size: float
    batch: Annotated[int, "samples"]
    steps: int
    burn_in: int
    loss: Annotated[float, "nat"]
    weights_norm2: float
    lambda_max: Annotated[float, "nat"]
    parameters: int
    max_rhat: float
    relative_error: float
    converged: bool

    @property
    def value(self) -> float:
        """λ̂: the mean of rise − heating over all chains after the burn-in."""
        return float(self.chain_values.mean())

    @property
    def freedom(self) -> int:
        """The degrees of freedom of ``standard_error``: the parts of all chains less one."""
        return PARTS * self.chains - 1

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the confidence interval of ``value``, by Student's t.

        Args:
            level: the probability with which it contains the mean of infinitely long chains.

        Returns:
            (lower end, upper end).

        Example:
            >>> [round(end, 2) for end in coefficient.interval()]
            [2.32, 3.68]
        """
        return Estimate(self.value, self.standard_error, self.freedom).interval(level)

    @property
    def chain_values(self) -> Array:
        """(chains,), λ̂ of each chain."""
        return (self.rise - self.heating)[:, self.burn_in :].mean(1)

    @property
    def uncorrected(self) -> float:
        """λ̂ with its heating: the mean of ``rise``, the estimator as Lau et al. write it."""
        return float(self.rise[:, self.burn_in :].mean())

    @property
    def chains(self) -> int:
        """The number of chains."""
        return len(self.rise)

    @property
    def steps_a_draw(self) -> int:
        """The steps that a draw is the mean of."""
        return int(self.steps // self.rise.shape[1])

    @property
    def mean_loss(self) -> float:
        """E L(w) of the chains without heating, L(w*) + λ̂/nβ, in nats."""
        return self.loss + self.value / self.nbeta

    @property
    def distance(self) -> float:
        """The root mean square of ‖w − w*‖ after the burn-in."""
        return float(self.distance2[:, self.burn_in :].mean() ** 0.5)

    def describe(self) -> list[Row]:
        heating = self.uncorrected - self.value
        chosen = f"λ_max at w* {self.lambda_max:.4g} nat" if math.isfinite(self.lambda_max) else ""
        missed = f"not within {self.relative_error:.0%} from {self.ess:.0f} draws, raise max_steps"
        ends = interval(self.interval())
        return [
            Row("local learning coefficient", self.value, self.standard_error, note=ends),
            Row("P/2", self.parameters / 2),
            Row("λ̂ of the chains", ", ".join(f"{value:.4g}" for value in self.chain_values)),
            Row("taken off as heating", heating, note=f"of {self.uncorrected:.6g}"),
            Row("R̂", self.r_hat),
            Row("effective draws", self.ess),
            Row("loss at w*", self.loss, unit="nat", note=f"of the chains {self.mean_loss:.5g}"),
            Row("‖w*‖", self.weights_norm2**0.5, note=f"distance of the chains from it {self.distance:.4g}"),
            Row("nβ", self.nbeta, note=f"γ = {self.localization:g}"),
            Row("step size ε", self.step_size, note=chosen),
            Row("chains", self.chains, note=f"of {self.steps:,} steps, minibatches of {self.batch:,}"),
            Row("samples", self.samples),
            converged(self.converged, missed),
        ]


@dataclass(frozen=True, kw_only=True)
class BatchSharpness(Measurement, schema="landscape.batch_sharpness", table="draw"):
    """g_Bᵀ H_B g_B/‖g_B‖² of drawn minibatches, at w_a and at the weights of the learners.

    Batch sharpness is that of Andreyev and Beneventano 2024 (arXiv 2412.20553).

    Attributes:
        curvature: (draws,) in nats, for each minibatch of ``batch`` samples, at w_a.
        norm2: (draws,), ‖g_B‖² of these minibatches.
        learner_curvature, learner_norm2: (learner draws, learners), curvature and ‖g_B‖² of learner j's
            minibatch of ``local_batch`` samples at w_j; (0, 0) without learners.
        batch, local_batch: samples of a minibatch; local_batch 0 without learners.
        lambda_max, residual: the largest eigenvalue of ∇²L at w_a over all data, in nats, and ‖Hv − λv‖; NaN
            if not computed.
        lr: η of the run; NaN if unknown.
        limit: the largest stable ηλ of the run's update rule on a quadratic; NaN if unknown.
        relative_error: the allowed relative standard error.
        converged: whether the standard errors at w_a and of the learners are allowed.
        derivatives: "exact", or "differences" of gradients.
        product_error: the largest measured error of a draw's curvature by differences.

    Example:
        >>> result = BatchSharpness(
        ...     curvature=np.array([3.0, 5.0]), norm2=np.array([1.0, 3.0]), batch=8, lambda_max=6.0,
        ...     residual=0.0, lr=0.5, limit=2.0, relative_error=0.05, converged=False, samples=100,
        ...     seed=0, dtype="float64")
        >>> result.value, result.standard_error, result.lr * result.value, result.pooled
        (4.0, 1.0, 2.0, 4.5)
    """

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
        """Return the confidence interval of ``value``, from Student's t and the error of the products.

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
        mean_note = f"{len(self.curvature)} draws of {self.batch:,}, {interval(self.interval())}"
        rows = [
            Row("batch sharpness at w_a", self.value, self.standard_error, "nat", mean_note),
            Row("the same, pooled", self.pooled, unit="nat", note="E[gᵀHg]/E‖g‖²"),
        ]
        if self.local_batch:
            learners_note = f"{len(self.learner_curvature)} draws of {self.local_batch:,}"
            value, error = self.learner_value, self.learner_standard_error
            rows.append(Row("batch sharpness at the learners", value, error, "nat", learners_note))
        if np.isfinite(self.lambda_max):
            rows.append(eigenvalue("λ_max at w_a", self.lambda_max, self.residual))
        if np.isfinite(self.lr):
            limit = f"limit {self.limit:.4g}" if np.isfinite(self.limit) else ""
            scaled_rows = []
            for row in rows[:1] + rows[2:]:  # all but the pooled mean
                note = f"{limit}, ±: residual" if "residual" in row.note else limit
                error = self.lr * row.error
                scaled_rows.append(Row(f"{row.name}, times η", self.lr * float(row.value), error, note=note))
            rows = scaled_rows + rows
        missed = f"not within {self.relative_error:.0%}, raise max_draws"
        return [*rows, Row("samples", self.samples), converged(self.converged, missed)]


# Forms of momentum: the rows of the limits.
FORMS = ("no momentum", "momentum", "shifted momentum")


def limit_names(delays: Array, momentum: float) -> list[str]:
    """Return names of the limits, by delay and then by form of momentum."""
    return [f"τ = {delay}, {form}" for delay in delays for form in forms_with(momentum)]


def forms_with(momentum: float) -> list[str]:
    """Return names of the forms with the momentum."""
    return [FORMS[0], *(f"{form} {momentum:g}" for form in FORMS[1:])]


@dataclass(frozen=True)
class Stability(Sourced, schema="landscape.stability", table="form delay"):
    """Limits of stable training with delayed gradients at a minimum, and the run that led there.

    Attributes:
        delay: (K,), in steps.
        limit: (3, K), the largest stable ηλ, a row for each form of momentum (none, ordinary, shifted).
            Training leaves this minimum if the learning rate is above limit/λ_max.
        momentum: the momentum of the second and third row.
        lambda_max, residual: the largest eigenvalue of the Hessian over all ``samples``, in nats, and its
            residual ‖Hv − λv‖.
        lr: the learning rate of the run; NaN if unknown.
        own_limit: the largest stable ηλ of the update rule of the run; NaN if unknown.
        own_delay: the delay of the run, in steps.
        precondition: the optimizer whose preconditioner P makes the Hessian P^{-1/2} H P^{-1/2}; "" without a
            preconditioner.

    Example:
        >>> result = Stability(np.array([0]), np.array([[2.0], [3.8], [3.8]]), momentum=0.9, lambda_max=4.0,
        ...                    residual=0.0, converged=True, lr=0.1, own_limit=2.0, own_delay=0, samples=10)
        >>> result.rates[:, 0].round(3).tolist()
        [0.5, 0.95, 0.95]
    """

    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": FORMS}

    delay: Annotated[Array, "delay+", "steps"]
    limit: Annotated[Array, "form delay", "1"]
    momentum: float
    lambda_max: Annotated[float, "nat"]
    residual: Annotated[float, "nat"]
    converged: bool
    lr: float
    own_limit: float
    own_delay: Annotated[int, "steps"]
    samples: int
    precondition: str = ""

    @property
    def rates(self) -> Array:
        """(3, K): the learning rates above which training leaves this minimum; inf where λ_max ≤ 0."""
        return self.limit / self.lambda_max if self.lambda_max > 0 else np.full_like(self.limit, np.inf)

    def describe(self) -> list[Row]:
        by = f"preconditioned by {self.precondition}" if self.precondition else ""
        rows = [eigenvalue("λ_max", self.lambda_max, self.residual, "1/η" if by else "nat")]
        if math.isfinite(self.lr):
            note = f"lr {self.lr:g}, {limit_in_words(self.own_limit)}"
            rows.append(Row("lr·λ_max", self.lr * self.lambda_max, note=note))
        if by:
            rows.append(Row("Hessian", by))
        if self.lambda_max <= 0:
            rows.append(Row("rates", "no direction curves upwards: no rate is too large for it"))
        else:
            names = limit_names(self.delay, self.momentum)
            leaves = np.where(self.lr > self.rates.T.ravel(), "the run's lr leaves", "")
            above = [f"training leaves above lr, {name}" for name in names]
            rows += rows_of_each(above, self.rates.T.ravel(), notes=leaves)
        return [*rows, converged(self.converged, "raise max_products")]

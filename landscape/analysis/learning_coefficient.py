"""The local learning coefficient, by Langevin chains around the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.analysis import analysis
from landscape.core.devices import double
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import AtLeastTwo, Count, Positive, Seed, Within, fit
from landscape.core.progress import ProgressOption, reporter
from landscape.core.registry import optional
from landscape.core.statistics import standard_error
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.learners import Stack
from landscape.gradients.minibatches import check_unpenalized, draws, in_minibatches, stream
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.losses import finite_gradient
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.flatness import PARTS, LearningCoefficient

# Of data given as batches, the steps whose minibatches one pass collects, unless they take too much memory
# (our choice: a chain takes a thousand steps or more, so that few are drawn in vain).
STEPS_A_PASS = 100


class Langevin:
    """Chains that sample exp(−U(w)), U(w) = nβ L(w) + γ/2 ‖w − w*‖², and begin at w*, the problem's weights.

    A step is w ← w − ε/2 ĝ + √ε ξ, with ξ ~ N(0, 1) and ĝ = nβ ∇L_B(w) + γ (w − w*). Each chain draws its own
    minibatch B with replacement (Lau et al., arXiv 2308.12108, algorithm 1). All chains are computed as one
    stack of learners.

    Args:
        problem: L and w*.
        batch: samples of a minibatch.
        chains: the number of chains, at least 2.
        step_size: ε.
        nbeta: nβ.
        localization: γ.
        seed: the seed of minibatches and noise; the noise depends on the device.

    Attributes:
        steps: the number of steps that each chain has taken.

    Example:
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
        >>> problem = Problem(model, torch.nn.functional.mse_loss, (x, y))
        >>> Langevin(problem, 2, 3, step_size=0.1, nbeta=1.0, localization=1.0, seed=0).run(5).shape
        (3, 3, 5)
    """

    def __init__(
        self, problem: Problem, batch: int, chains: int, *, step_size: float, nbeta: float,
        localization: float, seed: int,
    ) -> None:  # fmt: skip
        self._numbers, self.steps = list[Array](), 0
        self.step_size, self.nbeta, self.localization = step_size, nbeta, localization
        self._stack, self._along = Stack(problem), problem.along_weights
        self._start = problem.weights.expand(chains, -1)
        self._weights, self._gradient = self._start.clone(), torch.empty_like(self._start)
        self._minibatches = draws(problem.data, chains, batch, stream(seed, 0), STEPS_A_PASS)
        noise = int(torch.randint(2**62, (), generator=stream(seed, 1)))
        self._noise = torch.Generator(problem.device).manual_seed(noise)

    def run(self, steps: int) -> Array:
        """Make ``steps`` steps, and return three numbers for each as (3, chains, steps) float64.

        1. The rise nβ (L_B(w) − L_B(w*)), whose mean is nβ (L(w) − L(w*)). On one minibatch the two losses
           share much of their noise.
        2. The heating: the part of the mean rise that is due to ε > 0 and to the noise of minibatches. The
           formula is exact for a quadratic L, and of first order in ε near a minimum (our choice).
        3. ‖w − w*‖².

        The heating: let H be the Hessian, d = w − w*, A = nβ H + γ, G = E ĝĝᵀ and C = E ddᵀ. For stationary
        chains AC + CA = 2 + ε/2 G, so that the heating of nβ/2 tr(HC) is ε/8 tr(G − γ A⁻¹G). With
        a = nβ ∇L_B(w) this is ε/8 (E ĝ·a − γ tr(A⁻¹N)), N the covariance of a's noise. The estimate of
        tr(A⁻¹N) is half of the mean of (a·d' − a'·d)², with a' and d' of the other chains.
        """
        rows = [self._step() for _ in range(steps)]
        self.steps += steps
        self._numbers.append(double(torch.stack(rows, 2)).cpu().numpy())
        return self._numbers[-1]

    def _step(self) -> Tensor:
        """Return the three numbers (3, chains) of the weights before a step."""
        x, y = next(self._minibatches)
        losses = self._stack.gradients(self._weights, x, y, out=self._gradient)
        with torch.no_grad():
            rise = self.nbeta * (losses - self._stack.losses(self._start, x, y))
            displacement, gradient = self._weights - self._start, self._gradient.mul_(self.nbeta)
            drift = torch.add(gradient, displacement, alpha=self.localization)
            products = gradient @ displacement.T  # a·d' of all pairs of chains
            skew = (products - products.T).square().sum(1) / (2 * (len(products) - 1))
            heating = self.step_size / 8 * ((gradient * drift).sum(1) - self.localization * skew)
            noise = self._along(torch.empty_like(displacement).normal_(generator=self._noise))
            distance2 = displacement.square_().sum(1)
            self._weights.sub_(drift, alpha=self.step_size / 2).add_(noise, alpha=math.sqrt(self.step_size))
        return torch.stack([rise, heating, distance2])

    @property
    def finite(self) -> bool:
        """Return whether the losses of all chains are finite."""
        return bool(np.isfinite(self._numbers[-1]).all())

    def draws(self) -> Array:
        """Return means over equal numbers of the steps so far, (3, chains, DRAWS)."""
        numbers = np.concatenate(self._numbers, 2)
        return numbers.reshape(*numbers.shape[:2], DRAWS, -1).mean(3)


# γ of the experiments on MNIST with the package of the method's authors (devinterp).
LOCALIZATION = 100.0
BATCH = 512  # Lau et al.'s on MNIST
# The smallest number of chains, the largest R̂, and the smallest effective sample size per chain that Vehtari
# et al. (2021) recommend: otherwise R̂ and the standard error are themselves too uncertain.
CHAINS, MAX_RHAT, LEAST_ESS = 4, 1.01, 100
# The largest relative standard error (our choice, as for the other instruments).
RELATIVE_ERROR = 0.05
# The smallest number of steps of a chain, which is doubled until it suffices, and by default the largest (our
# choice: 20 s to 5 min with the MNIST network on 2 cores), and the number of draws: each is the mean over a
# power of two of steps, and the second half of the draws is used.
MIN_STEPS, MAX_STEPS = 1_000, 32_000
DRAWS = 500
# The first step size is this number over the largest curvature nβλ_max + γ (our choice: steps below 4 over
# the curvature are stable, and an eighth of such a step has an eighth of the heating).
FIRST_STEP = 0.5
# The heating, as a share of the rise, for which a step size is chosen, and the share above which an estimate
# is refused (our choice). The correction is exact to first order: for a share s about s² of the value remains
# (MNIST).
HEATING, MAX_HEATING = 0.1, 0.25
# The number of trials of a step size, the smallest ratio of one trial to the trial before, and the largest
# growth of the mean ‖w − w*‖² between the halves of the draws if R̂ is too large (our choice).
TRIALS, SHRINK, SETTLED = 6, 1 / 16, 0.05


@analysis(
    # Memory: 2 vectors of P numbers for w* and its gradient; for each chain at most 7 (its weights, gradient,
    # displacement, drift, noise and two temporary vectors), and twice the activations of a chunk.
    lambda problem, chains, **_: needs.need(problem, 7 * chains + 2, 2 * chains),
    shorter="a larger relative_error= or a smaller max_steps=",
    group="Measure curvature",
    options={"split": None},
)
def learning_coefficient(
    problem: Problem | Run,
    batch: Count = BATCH,
    *,
    localization: Positive = LOCALIZATION,
    step_size: Positive | None = None,
    nbeta: Positive | None = None,
    chains: AtLeastTwo = CHAINS,
    relative_error: Positive = RELATIVE_ERROR,
    max_rhat: Positive = MAX_RHAT,
    max_steps: Annotated[int, Within(MIN_STEPS)] = MAX_STEPS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> LearningCoefficient:
    """Estimate the local learning coefficient by stochastic gradient Langevin dynamics (SGLD).

    λ̂ = nβ (E L(w) − L(w*)), where E is the mean over w ~ exp(−nβ L(w) − γ/2 ‖w − w*‖²) (Lau et al., arXiv
    2308.12108). w* are the problem's weights. L is the mean over n samples of a negative log-likelihood in
    nats. At a minimum of L, the coefficient λ, which λ̂ estimates, is P/2 for a regular model with P
    parameters, and smaller for a singular model.

    The first half of each chain is discarded. The length of the chains is doubled until the chains have mixed
    and the error is small enough. BatchNorm uses each minibatch's statistics. The step size and the noise of
    minibatches raise E L(w). This effect is called heating; an estimate of it is subtracted (our choice).

    Args:
        problem: the loss on the training set, at the minimum w*; or a run, whose w_a (the mean of the
            learners' weights) is w*. For regression, the loss must be half the squared error, divided by
            the error's variance.
        batch: the number of samples in a minibatch, drawn with replacement; larger minibatches heat less.
        localization: γ, the attraction to w*; values of λ̂ are comparable only at equal γ and n.
        step_size: ε of the chains; default: 0.5/(nβλ_max + γ), or less if this heats too much.
        nbeta: the number of samples times the inverse temperature, nβ; default: n/log n (Watanabe 2013). If L
            is a mean over tokens, n counts the sequences; if the m tokens are to count, give nbeta=m/log m.
        chains: the number of independent chains, at least 2.
        relative_error: chains are extended until the standard error is at most this share of the value.
        max_rhat: the largest R̂ (Vehtari et al. 2021) at which chains count as mixed.
        max_steps: the largest number of steps of a chain.
        seed: the seed of the minibatches and the noise of the chains.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The result: ``value`` with its ``standard_error``; ``rise`` (chains, draws), the values of nβ (L(w) −
        L(w*)) before the heating is subtracted; R̂ (``r_hat``); and the effective sample size ``ess``.

    Raises:
        InputError: a number that is not allowed, data whose number of samples differs from pass to pass, or a
            penalty.
        OperationError: ArviZ is missing, or the chains give no estimate; the message says what to change.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(500, 2, generator=torch.manual_seed(0)), torch.zeros(500, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
        >>> problem = landscape.Problem(model, lambda out, y: 0.5 * (out - y).square().mean(), (x, y))
        >>> problem.weights.zero_()  # the minimum of a regular model with 2 parameters
        tensor([0., 0.])
        >>> options = {"localization": 1.0, "chains": 2, "relative_error": 0.5}
        >>> result = landscape.learning_coefficient(problem, 50, **options)
        >>> abs(result.value - 1) < 4 * result.standard_error
        True
    """
    problem = problem_of(problem)
    arviz = optional("arviz_stats.base", "learning_coefficient", "'sgd-landscape[bayes]'").array_stats
    if has_batchnorm(problem.model):
        fit("batch", batch, AtLeastTwo)  # refuses a batch of one sample, which has no variance
    check_unpenalized(problem, "the coefficient is defined by the data's likelihood")
    # For L over all samples, BatchNorm takes the statistics of minibatches, as it does in the chains.
    problem = in_minibatches(problem, batch)
    nbeta = _default_nbeta(problem.samples) if nbeta is None else float(nbeta)
    finite_gradient(*problem.loss_and_gradient())  # refuses a loss or gradient that is not finite
    report = reporter(progress)

    def extend(chain_stack: Langevin, steps: int) -> None:
        """Make ``steps`` more steps, or fewer if losses are not finite."""
        steps_between_reports = MIN_STEPS // 10
        for _ in range(0, steps, steps_between_reports):
            chain_stack.run(steps_between_reports)
            report(min(1.0, chain_stack.steps / max_steps))
            if not chain_stack.finite:
                return

    def start_chains(size: float) -> Langevin:
        """Return chains with step size ``size`` after MIN_STEPS steps."""
        options = {"step_size": size, "nbeta": nbeta, "localization": float(localization)}
        chain_stack = Langevin(problem, batch, chains, **options, seed=seed)
        extend(chain_stack, MIN_STEPS)
        return chain_stack

    lambda_max = math.nan
    if step_size is not None:
        chain_stack = start_chains(step_size)
    else:
        lambda_max = float(top_eigenvalues(problem, seed=seed).values[0])
        first_step_size = FIRST_STEP / (nbeta * max(lambda_max, 0.0) + localization)
        chain_stack = _start_with_little_heating(start_chains, first_step_size)
    summary = _summary(chain_stack, arviz, relative_error, max_rhat)
    while not summary.suffices and not summary.hopeless and 2 * chain_stack.steps <= max_steps:
        extend(chain_stack, chain_stack.steps)  # to twice the length
        summary = _summary(chain_stack, arviz, relative_error, max_rhat)
    report(1.0)
    _check_estimate(summary, chain_stack, max_rhat)
    rise, heating, distance2 = summary.draws
    return LearningCoefficient(
        rise=rise,
        heating=heating,
        distance2=distance2,
        standard_error=summary.error,
        r_hat=summary.r_hat,
        r_hat_distance=summary.r_hat_distance,
        ess=summary.ess,
        nbeta=chain_stack.nbeta,
        localization=chain_stack.localization,
        step_size=chain_stack.step_size,
        steps=chain_stack.steps,
        batch=batch,
        burn_in=rise.shape[1] // 2,  # the first half of the draws is discarded
        loss=problem.loss(),
        weights_norm2=float(double(problem.weights).square().sum()),
        lambda_max=lambda_max,
        parameters=problem.layout.size,
        max_rhat=max_rhat,
        relative_error=relative_error,
        converged=summary.suffices,
        seed=seed,
        **setting(problem),
        **about,
    )


def _default_nbeta(samples: int) -> float:
    if samples < 2:
        raise InputError(f"nbeta: missing, and of {samples} sample n/log n is not defined; give it")
    return samples / math.log(samples)


@dataclass(frozen=True)
class _Summary:
    """Estimates and diagnostics of chains.

    Attributes:
        rise, heating: the mean rise with heating, and the mean heating.
        drift: the relative change of ‖w − w*‖² from half to half.
        settled: whether the distance to w* has stopped growing. (Chains begin at w*: a fall is chance.)
        suffices: whether chains have mixed, and are long enough for the relative error.
    """

    draws: Array
    rise: float = math.nan
    heating: float = math.nan
    error: float = math.nan
    r_hat: float = math.nan
    ess: float = math.nan
    r_hat_distance: float = math.nan
    drift: float = math.nan
    settled: bool = False
    suffices: bool = False

    @property
    def hopeless(self) -> bool:
        """Return whether more steps are useless: a loss is not finite, or heating is the whole rise."""
        return not abs(self.heating) < abs(self.rise)


def _summary(run: Langevin, arviz: Any, relative_error: float, max_rhat: float) -> _Summary:
    """Summarize the draws of the second half, which suffice below ``relative_error`` and ``max_rhat``."""
    if not run.finite:
        return _Summary(np.full((3, 1, 2), math.nan))
    draws = run.draws()
    second_half = draws[:, :, DRAWS // 2 :]
    values, distances = second_half[0] - second_half[1], second_half[2]
    rise, heating = float(second_half[0].mean()), float(second_half[1].mean())
    halves = distances.reshape(len(distances), 2, -1).mean((0, 2))
    mcse = float(arviz.mcse(values, method="mean"))
    error = max(mcse, standard_error(values.reshape(PARTS * len(values), -1).mean(1)))
    r_hat, r_hat_distance = float(arviz.rhat(values)), float(arviz.rhat(distances))
    ess, drift = float(arviz.ess(values, method="mean")), float(halves[1] / halves[0] - 1)
    settled = r_hat_distance <= max_rhat or drift <= SETTLED
    precise = error <= relative_error * abs(rise - heating) and ess >= LEAST_ESS * len(values)
    suffices = precise and r_hat <= max_rhat and settled
    return _Summary(draws, rise, heating, error, r_hat, ess, r_hat_distance, drift, settled, suffices)


def _start_with_little_heating(start_chains: Callable[[float], Langevin], size: float) -> Langevin:
    """Start chains with step size ``size``, or with a smaller size if they heat up too much."""
    for _ in range(TRIALS):
        run = start_chains(size)
        factor = SHRINK
        if run.finite:
            rise, heating = run.draws()[:2, :, DRAWS // 2 :].mean((1, 2))
            if heating <= HEATING * rise or rise <= 0:
                break
            factor = max(SHRINK, 0.8 * HEATING * rise / heating)
        size *= factor
    return run


def _check_estimate(summary: _Summary, run: Langevin, max_rhat: float) -> None:
    """Raise OperationError if the chains give no estimate; the message says what to change."""
    steps, value = f"{run.steps:,} steps", summary.rise - summary.heating
    step_size = f"a smaller step_size (now {run.step_size:.3g})"
    localization = f"a larger localization (now {run.localization:g})"
    if not run.finite:
        reason = f"chains leave the weights: their loss is not finite after {steps}"
        remedy = f"choose {step_size} or {localization}"
    elif value > 0 and abs(summary.heating) > MAX_HEATING * summary.rise:
        share = f"{summary.heating:.3g} of the rise of {summary.rise:.3g}"
        reason = f"the chains heat up: by {share}, at most {MAX_HEATING:.0%} are allowed"
        remedy = f"choose {step_size}, a larger batch, or {localization}"
    elif value < -2 * summary.error:
        reason = f"its estimate is negative, {value:.3g} ± {summary.error:.1g}: the weights are no minimum"
        remedy = f"train further, or choose {localization}"
    elif not summary.r_hat <= max_rhat:
        reason = f"the chains do not mix: R-hat is {summary.r_hat:.3f} after {steps}, above {max_rhat:g}"
        remedy = f"choose more max_steps or {localization}"
    elif not summary.settled:
        half = f"{summary.drift:.0%} over their last half of {steps}, at most {SETTLED:.0%} are allowed"
        reason = f"the chains still move away: ‖w − w*‖² grows by {half}"
        remedy = f"choose more max_steps or {localization}"
    else:
        return
    raise OperationError(f"learning_coefficient: {reason}; {remedy}")

"""Sharpness along a run: λ_max in several forms, a rise of the loss, and the loss of an average."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.average import MEMBERS, average
from landscape.analysis.sharpness import sharpness
from landscape.checkpoint.history import MONITORED, OF_LAYER, UNITS
from landscape.core.devices import double, inner
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.statistics import mean_and_error
from landscape.curvature.double_backward import NoSecondDerivative
from landscape.curvature.hessian import exact_only, gradient_curvature
from landscape.curvature.search import RESIDUAL_TOL
from landscape.gradients.minibatches import MIN_COSTLY, Minibatches
from landscape.problem.problem import Problem
from landscape.training.instruments.base import Instrument, MeasuredRun, StepState, instrument, rounding
from landscape.training.optimizer.steepest import steepest

# Layers of a model, or blocks, whose parts of a change of the loss are recorded: colors of a picture (ours).
LAYERS = 12


@instrument("lambda-max", "k")
class LambdaMax(Instrument):
    """λ_max of ∇²L at w_a, lr·λ_max, the rule's limit, and the share of the spread along top eigenvectors.

    It is also measured every ``monitor.sharpness`` steps.
    """

    columns: Mapping[str, str] = {column: UNITS[column] for column in MONITORED}
    on_sample = True

    def measure(self, now: StepState) -> dict[str, float]:
        pairs = self.run.sample.top(now.step, now.mean)
        if pairs is None:
            return {}
        spread = now.weights - now.mean
        totals = self.run.comm.start_learners_mean(
            float(double(spread @ pairs.vectors.T).square().sum()) / len(spread),
            float(double(spread).square().sum()) / len(spread),
        )
        along, total = totals()
        top, share = float(pairs.values[0]), along / total if total > rounding(now.mean) else math.nan
        return self.row(top, float(pairs.residuals[0]), now.lr * top, self.run.limit, share)


@instrument("preconditioned-lambda-max")
class PreconditionedLambdaMax(Instrument):
    """λ_max of P^{-1/2} H P^{-1/2} at w_a, P the optimizer's preconditioner there, with its own limit.

    P and the limit are those of :func:`landscape.preconditioner`: of the learners' mean state.
    """

    columns: Mapping[str, str] = {
        "preconditioned_lambda_max": "nat",
        "preconditioned_lambda_max_residual": "nat",
        "lr_preconditioned_lambda_max": "1",
        "lr_preconditioned_limit": "1",
    }
    on_sample = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        run.preconditioner(None)

    def measure(self, now: StepState) -> dict[str, float]:
        seen = self.run.preconditioner(now)
        pairs = None if seen is None else self.run.sample.search(now.mean, 1, self.memory, seen)
        self.memory = None if pairs is None else pairs.vectors.sum(0)
        if seen is None or pairs is None:
            return {}
        top = float(pairs.values[0])
        return self.row(top, float(pairs.residuals[0]), now.lr * top, seen.limit)


# The instrument "generalized-sharpness" ends a search where the first-order gain left is below this share of
# its value, or after so many products (ours).
GAIN, ASCENT = 0.01, 100


@instrument("generalized-sharpness", "k")
class GeneralizedSharpness(Instrument):
    """S = max dᵀHd over the unit ball of the norm of the optimizer's steps at w_a, and η S with its limit.

    For "steepest" (Islamov et al. 2026, arXiv 2603.05002), whose limit is 2 for one learner; of normalized
    steps η is α/‖g‖_*. For other rules the limit is theirs on ηλ with plain steps (ours): where H = vvᵀ, the
    steps along v are those of plain SGD with S in place of λ.

    S is the largest of several local maxima, each found by Frank–Wolfe steps with exact line search, and so a
    lower bound: from that of the measurement before, from a random vector, and from the leading eigenvector,
    with the norm "block" from its part in each parameter tensor.
    """

    columns: Mapping[str, str] = {
        "generalized_sharpness": "nat",
        "lr_generalized_sharpness": "1",
        "lr_generalized_limit": "1",
    }
    on_sample = True

    def __init__(self, run: MeasuredRun) -> None:
        if run.geometry is None:
            raise InputError(
                "monitor.instruments: 'generalized-sharpness' is not allowed with this optimizer (allowed: "
                "steepest); 'lambda-max' is the sharpness of sgd, 'preconditioned-lambda-max' that of adam"
            )
        super().__init__(run)
        self._norm, self._normalized = run.geometry

    def _aligned(self, v: Tensor) -> tuple[Tensor, float]:
        """The direction of the unit ball with the largest product with ``v`` (P,), and this product."""
        d, dual = steepest(self._norm, self.run.problem.layout, v[None])
        return d[0], float(dual[0])

    def measure(self, now: StepState) -> dict[str, float]:
        pairs = self.run.sample.top(now.step, now.mean)
        if pairs is None:
            return {}
        starts = [pairs.vectors[0], torch.randn(len(now.mean), generator=self.generator(now)).to(now.mean)]
        if self._norm == "block":
            parts = [torch.zeros_like(starts[0]) for _ in self.run.problem.layout.slots]
            for part, slot in zip(parts, self.run.problem.layout.slots, strict=True):
                part[slot.place] = starts[0][slot.place]
            starts += parts
        kept = [] if self.memory is None else [self.memory]
        product = self.run.sample.product(now.mean)
        found = [self._ascend(product, d) for d in [*kept, *(self._aligned(v)[0] for v in starts)]]
        value, self.memory = max(found, key=lambda pair: pair[0])
        rate = now.lr
        if self._normalized:
            dual = self._aligned(self.run.sample.gradient(now.mean))[1]
            rate = rate / dual if dual else math.nan
        limit = math.nan if self.run.plain_limit is None else self.run.plain_limit
        return self.row(value, rate * value, limit)

    def _ascend(self, product: Callable[[Tensor], Tensor], d: Tensor) -> tuple[float, Tensor]:
        """A local maximum of dᵀHd and its place in the ball, from ``d`` on."""
        image, value = product(d), 0.0
        for _ in range(ASCENT):
            best, dual = self._aligned(image)
            value = float(inner(d, image))
            if dual - value <= GAIN * dual:
                break
            way, bent = best - d, product(best) - image
            curve, gain = float(inner(way, bent)), dual - value
            share = min(1.0, gain / -curve) if curve < 0 else 1.0
            d, image = d + share * way, image + share * bent
        return value, d


@instrument("batch-sharpness", "draws")
class BatchSharpness(Instrument):
    """E[gᵀHg/‖g‖²] (arXiv:2412.20553), over ``monitor.draws`` fresh minibatches of the training set.

    At w_a with minibatches of the total batch and, with several learners, where each of them takes its
    gradients, with the local one; see :func:`landscape.batch_sharpness`. A draw takes a gradient and a
    product over its minibatch. NaN where a gradient is zero or not finite.
    """

    columns: Mapping[str, str] = {
        "batch_sharpness": "nat",
        "batch_sharpness_se": "nat",
        "lr_batch_sharpness": "1",
        "lr_lambda_limit": "1",
        "learner_batch_sharpness": "nat",
        "learner_batch_sharpness_se": "nat",
        "lr_learner_batch_sharpness": "1",
    }
    on_minibatches = True

    def measure(self, now: StepState) -> dict[str, float]:
        value, error = mean_and_error(self._drawn(now, now.mean[None], 1).mean(1))
        values = [value, error, now.lr * value, self.run.limit]
        if self.run.learners > 1:
            value, error = mean_and_error(self._drawn(now, now.points, self.run.learners).mean(1))
            values += [value, error, now.lr * value]
        return self.row(*values)

    def _drawn(self, now: StepState, weights: Tensor, learners: int) -> Array:
        """(draws, learners): w_a's draws are shared by the processes; of learners each has its own."""
        comm, draws = self.run.comm, self.run.monitor.draws
        part = "learners" if learners > 1 else "mean"
        minibatches = Minibatches(
            self.run.problem, self.run.batch // learners, self.generator(now, part), learners
        )
        own = comm.local if learners > 1 else slice(0, 1)
        turns = range(draws)[slice(None) if learners > 1 else comm.share(draws)]
        table = torch.zeros(draws, learners, dtype=torch.float64)
        for k, drawn in zip(range(draws), minibatches, strict=False):
            if k in turns:
                pairs = zip(drawn[own], weights, strict=True)
                table[k, own] = torch.tensor([_curvature(p, t) for p, t in pairs], dtype=torch.float64)
        found: Array = comm.totals(table).numpy()
        return found


def _curvature(minibatch: Problem, weights: Tensor) -> float:
    """gᵀHg/‖g‖²; NaN where it does not exist or has too large an error, since a run must not end for it."""
    try:
        value, _, error = gradient_curvature(minibatch, weights, derivatives="auto")
    except (OperationError, NoSecondDerivative):
        return math.nan
    return value if error <= RESIDUAL_TOL * abs(value) else math.nan


@instrument("loss-change")
class LossChange(Instrument):
    """L(w_a + d) − L(w_a) = ⟨g, d⟩ + ½ dᵀHd + rest of the step d that w_a made, on the run's sample.

    Any rule and optimizer: d is what w_a has moved. The last three columns of the loss add up to the first;
    the sharpness is dᵀHd/‖d‖². A further column for each layer a, "loss_change LAYER", has its part
    ⟨g_a, d_a⟩ + ½ d_aᵀ(Hd)_a of the gradient's and the curvature's terms; models with more than LAYERS have
    those of their blocks, and with more of these none. See :func:`landscape.loss_change`.
    """

    columns: Mapping[str, str] = {
        "loss_change": "nat",
        "loss_change_gradient": "nat",
        "loss_change_curvature": "nat",
        "loss_change_rest": "nat",
        "directional_sharpness": "nat",
    }
    on_sample = on_step = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        every = (run.problem.layout.groups(by) for by in ("layer", "block"))
        self._groups = next((groups for groups in every if len(groups) <= LAYERS), {})
        self.columns = {**self.columns, **{f"{OF_LAYER}{name}": "nat" for name in self._groups}}

    def measure(self, now: StepState) -> dict[str, float]:
        if now.before is None:
            return {}
        step, sample = now.mean - now.before, self.run.sample
        places = [(slice(None),), *([slot.place for slot in slots] for slots in self._groups.values())]
        start, g = sample.loss_and_gradient(now.before)
        change = sample.loss(now.mean) - start
        gradients = np.array([sum(float(inner(g[p], step[p])) for p in place) for place in places])
        halves = np.array(sample.curvatures(now.before, places)(step)) / 2
        square = float(inner(step, step))
        sharpness = 2 * halves[0] / square if square else math.nan
        parts = (gradients + halves).tolist()
        return self.row(change, gradients[0], halves[0], change - parts[0], sharpness, *parts[1:])


@instrument("path")
class Path(Instrument):
    """cos(w_a(s) − w_a(t), ∇L(w_a(s))): how far the mean's way from step s to t points along −g at its start.

    s is the step of the measurement before, so that ``monitor.every`` is the length of the way; with that of
    a period it is the outer step of local SGD and DiLoCo. g is that of the run's sample.
    """

    columns: Mapping[str, str] = {"path_cosine": "1"}
    on_sample = True

    def measure(self, now: StepState) -> dict[str, float]:  # its memory is w_a and g, (2, P)
        start, self.memory = self.memory, torch.stack((now.mean, self.run.sample.gradient(now.mean)))
        if start is None:
            return {}
        way, g = start[0] - now.mean, start[1]
        norms = math.sqrt(float(inner(way, way)) * float(inner(g, g)))
        return self.row(float(inner(way, g)) / norms) if norms > 0 else {}


class _Rise(Instrument):
    """Adaptive sharpness at w_a within ``monitor.rho``, on the run's sample; rank 0 measures it.

    See :func:`landscape.sharpness`, whose defaults it has.
    """

    kind: ClassVar[Literal["worst", "average"]]
    on_sample = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if not run.monitor.rho:
            raise InputError(f"monitor.rho: missing, '{self.name}' is the rise of the loss within it")

    def measure(self, now: StepState) -> dict[str, float]:
        return self._row_of_first(lambda: self._rise(now))

    def _rise(self, now: StepState) -> list[float]:
        problem = copy.copy(self.run.sample.problem)
        problem.weights, draws = now.mean, self.run.monitor.draws
        try:
            result = sharpness(
                problem, self.run.monitor.rho, self.kind, min_draws=min(MIN_COSTLY, draws), max_draws=draws,
                seed=self.generator(now).initial_seed(),
            )  # fmt: skip
        except OperationError:  # a loss or gradient that is not finite: a run must not end for it
            return [math.nan] * len(self.columns)
        return [result.value, result.standard_error][: len(self.columns)]


@instrument("worst-sharpness", "rho")
class WorstSharpness(_Rise):
    """The largest rise of the loss for ‖δ/|w|‖ ≤ ρ, in nats; a lower bound."""

    kind = "worst"
    columns: Mapping[str, str] = {"worst_sharpness": "nat"}


@instrument("average-sharpness", "rho", "draws")
class AverageSharpness(_Rise):
    """The mean rise of the loss for δ/|w| ~ N(0, ρ²), in nats, over ``monitor.draws`` pairs ±δ."""

    kind = "average"
    columns: Mapping[str, str] = {"average_sharpness": "nat", "average_sharpness_se": "nat"}


@instrument("average", "window")
class RunningAverage(Instrument):
    """The loss of the mean of the last ``monitor.window`` measured w_a (LAWA), predicted; rank 0 predicts it.

    It is on the run's sample, with the ends of a 90% interval. The gain is the loss at w_a now minus the
    predicted loss: where it is above 0, to stop here and average is predicted to be better than to stop here.
    See :func:`landscape.average`. NaN until there are so many, and where there is no prediction.
    """

    columns: Mapping[str, str] = {
        "average_loss": "nat",
        "average_loss_low": "nat",
        "average_loss_high": "nat",
        "average_gain": "nat",
    }
    on_sample = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if run.monitor.window > MEMBERS:
            raise InputError(f"monitor.window: {run.monitor.window} is not allowed, at most {MEMBERS}")
        exact_only(run.sample.problem, f"monitor.instruments: '{self.name}'")

    def measure(self, now: StepState) -> dict[str, float]:
        window = self.run.monitor.window
        before = () if self.memory is None else self.memory
        self.memory = members = torch.stack([*before, now.mean][-window:])
        return self._row_of_first(lambda: self._predicted(members)) if len(members) == window else {}

    def _predicted(self, members: Tensor) -> list[float]:
        """The values of the columns for the average of ``members`` (m, P); NaN where there is none."""
        try:
            result = average(self.run.sample.problem, [*members], exact=False, progress=False)
        except OperationError:  # weights that are equal or not finite: a run must not end for it
            return [math.nan] * len(self.columns)
        loss = result.loss[0]
        return [loss, result.low[0], result.high[0], result.members_loss[-1] - loss]

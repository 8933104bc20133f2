"""Sharpness along a run, on a sample: λ_max in several forms, a rise of the loss, the loss of an average."""

from __future__ import annotations

import contextlib
import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.connection import MEMBERS, average
from landscape.analysis.sharpness import sharpness
from landscape.checkpoint.history import MONITORED, OF_LAYER, UNITS
from landscape.core.devices import double, inner, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.statistics import mean_and_error
from landscape.curvature.double_backward import NoSecondDerivative
from landscape.curvature.eigenvalues import eigenpairs, fast_hessian
from landscape.curvature.hessian import (
    FULL_HESSIAN,
    HessianOptions,
    Preconditioner,
    exact_only,
    gradient_curvature,
)
from landscape.curvature.search import (
    RESIDUAL_TOL,
    RitzPairs,
    SearchOptions,
    find_eigenpairs,
    ranks_of,
    start_vector,
    warm_start,
)
from landscape.gradients.minibatches import MIN_COSTLY, Minibatches
from landscape.problem.problem import Problem
from landscape.training.experiments import StatePreconditioner, loop_preconditioner
from landscape.training.instruments import Instrument, MeasuredRun, StepState, instrument, on_all, rounding
from landscape.training.optimizer import steepest
from landscape.training.processes.comm import Comm
from landscape.training.recipes import Monitor
from landscape.training.run import generator

STATE = "monitor_start"  # the name in a checkpoint of the vector near which the next search begins


class Sample:
    """Loss and Hessian of ``problem`` on ``monitor.samples`` of its samples; rank 0 computes, for all.

    A Lanczos search begins at the sum of the eigenvectors of the previous search, plus a random vector of the
    same norm, the same every time, so that an eigenvector orthogonal to them is not missed. It uses exact
    products only: cheaper products are chosen by timing, on which the history's bits must not depend. Where
    the model has no second derivatives, they are differences of gradients, with the errors in the residuals.
    ``state`` is the sum, so that a resumed run gives the bits of one that never stopped.

    All processes call the same methods in the same order.

    Attributes:
        problem: that of the whole sample.
        count: how many eigenvalues :meth:`top` gives.

    Raises:
        InputError: a model whose gradient is wrong.
    """

    def __init__(self, monitor: Monitor, problem: Problem, comm: Comm, seed: int) -> None:
        self._comm, self.count = comm, min(monitor.k, problem.layout.size)
        self.state: dict[str, Tensor] = {}
        self._found: tuple[int, RitzPairs | None] = -1, None
        # This refuses a model whose gradient is wrong, before the first step.
        self._options = HessianOptions(derivatives=HessianOptions().at(problem).derivatives)
        batch, samples = problem.batchnorm.samples, min(monitor.samples or problem.samples, problem.samples)
        if batch:  # whole batches, as a sample's loss depends on its batch
            samples = max(1, samples // batch) * batch
        if samples < problem.samples:
            order = torch.randperm(problem.samples, generator=generator(seed, "monitor"))
            problem = problem.subset(order[:samples].sort().values)
        self.problem = problem
        self._random = start_vector(problem, seed)

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Take ``state`` from a checkpoint, if it has one."""
        if STATE in shared:
            self.state = {STATE: shared[STATE].to(self._random)}

    def _of_first(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        """The result of ``compute()`` on rank 0, of the shape of ``like``, on all ranks."""
        return on_all(self._comm, compute() if self._comm.rank == 0 else None, like)

    def top(self, step: int, weights: Tensor) -> RitzPairs | None:
        """The ``count`` largest eigenvalues at ``weights`` (P,) after ``step``, searched once a step.

        None where the Hessian is not finite.
        """
        if self._found[0] != step:
            pairs = self.search(weights, self.count, self.state.get(STATE))
            self.state = {} if pairs is None else {STATE: pairs.vectors.sum(0)}
            self._found = step, pairs
        return self._found[1]

    def loss_and_gradient(self, weights: Tensor) -> tuple[float, Tensor]:
        """L and ∇L (P,) at ``weights`` over the sample."""
        loss, g = self.problem.loss_and_gradient(weights) if self._comm.rank == 0 else (0.0, None)
        return self._comm.total(loss)[0], on_all(self._comm, g, weights)

    def gradient(self, weights: Tensor) -> Tensor:
        """∇L (P,) at ``weights`` over the sample."""
        return self.loss_and_gradient(weights)[1]

    def loss(self, weights: Tensor) -> float:
        """L at ``weights`` (P,) over the sample."""
        return self._comm.total(self.problem.evaluate(weights)[0] if self._comm.rank == 0 else 0.0)[0]

    def curvature(self, weights: Tensor) -> Callable[[Tensor], float]:
        """v ↦ vᵀHv for the Hessian at ``weights``, and a v (P,) that all processes have."""
        parts = self.curvatures(weights, ((slice(None),),))
        return lambda v: parts(v)[0]

    def curvatures(
        self, weights: Tensor, groups: Sequence[Sequence[slice]]
    ) -> Callable[[Tensor], list[float]]:
        """v ↦ Σ v_i (Hv)_i over each of ``groups`` of coordinates; NaN where the error is too large."""
        product = self._product(weights)

        def along(v: Tensor) -> Tensor:
            image, error = product(v)
            values = [sum(float(double(v[p]) @ double(image[p])) for p in places) for places in groups]
            if error is not None:
                whole = abs(float(double(v) @ double(image)))
                values = values if error * float(vector_norm(v)) <= RESIDUAL_TOL * whole else unknown
            return torch.tensor(values, dtype=torch.float64)

        unknown = [math.nan] * len(groups)
        return lambda v: self._of_first(lambda: along(v), torch.tensor(unknown)).tolist()

    def product(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ Hv (P,) for the Hessian at ``weights``, and a v (P,) that all processes have.

        Raises:
            InputError: a model without second derivatives.
        """
        if self._options.derivatives == "differences":
            raise InputError(
                "monitor.instruments: one needs second derivatives, which this model or its loss has not"
            )
        product = self._product(weights)
        return lambda v: self._of_first(lambda: product(v)[0], v)

    def _product(
        self, weights: Tensor, precondition: Preconditioner | None = None
    ) -> Callable[[Tensor], tuple[Tensor, float | None]]:
        """v ↦ Hv (P,) and, of differences, its error relative to ‖v‖; for rank 0, which alone calls it."""
        if self._comm.rank:
            return lambda v: (v, None)
        if self._options.derivatives == "differences":
            by_differences = self._options.at(self.problem, weights)

            def measured(v: Tensor) -> tuple[Tensor, float | None]:
                images, errors = by_differences._measured(v[None])
                return images[0], errors[0]

            return measured
        h = fast_hessian(self.problem, weights, replace(FULL_HESSIAN, precondition=precondition))
        return lambda v: (h._images(v[None])[0], None)

    def search(
        self, weights: Tensor, count: int, near: Tensor | None, precondition: Preconditioner | None = None
    ) -> RitzPairs | None:
        """The largest eigenvalues of H, or of P^{-1/2} H P^{-1/2}, with vectors (count, P), on all ranks.

        Args:
            weights: θ (P,).
            count: how many.
            near: the sum of eigenvectors at weights nearby; None: there are none yet.
            precondition: P.
        """
        pairs = self._searched(weights, count, near, precondition) if self._comm.rank == 0 else None
        if self._comm.size == 1:
            return pairs
        table = torch.zeros(count, len(weights) + 3, dtype=torch.float64, device=weights.device)
        if pairs is not None:
            numbers = torch.stack((pairs.values, pairs.residuals), 1).to(table)
            table = torch.cat((torch.ones_like(numbers[:, :1]), numbers, double(pairs.vectors)), 1)
        table = self._comm.totals(table)
        if not table[0, 0]:
            return None
        return RitzPairs(table[:, 1].cpu(), table[:, 3:].to(weights), table[:, 2].cpu(), 0, True)

    def _searched(
        self, weights: Tensor, count: int, near: Tensor | None, precondition: Preconditioner | None
    ) -> RitzPairs | None:
        """:meth:`search`, on rank 0."""
        start = self._random if near is None else warm_start(near, self._random, ranks_of(self.problem))
        if self._options.derivatives == "differences":
            options = replace(self._options, precondition=precondition)
            found = eigenpairs(self.problem, weights[None], start, SearchOptions(high=count), options)[0]
            return found if bool(torch.isfinite(found.values).all()) else None
        product = self._product(weights, precondition)
        with contextlib.suppress(_NotFiniteError):
            return find_eigenpairs(lambda v: _finite(product(v)[0]), start, high=count)
        return None


class _NotFiniteError(Exception):
    """A Hessian with NaN or infinities has no eigenvalues."""


def _finite(product: Tensor) -> Tensor:
    if not bool(torch.isfinite(product).all()):
        raise _NotFiniteError
    return product


class OnSample(Instrument):
    """An instrument that takes the loss or its Hessian on the run's sample, and refuses a model without."""

    on_sample = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        run.sample = self.sample = run.sample or Sample(run.monitor, run.problem, run.comm, run.seed)


# Layers of a model, or blocks, whose parts of a change of the loss are recorded: colors of a picture (ours).
LAYERS = 12


@instrument("lambda-max", "k")
class LambdaMax(OnSample):
    """λ_max of ∇²L at w_a, lr·λ_max, the rule's limit, and the share of the spread along top eigenvectors.

    It is also measured every ``monitor.sharpness`` steps.
    """

    columns: Mapping[str, str] = {column: UNITS[column] for column in MONITORED}

    def measure(self, now: StepState) -> dict[str, float]:
        pairs = self.sample.top(now.step, now.mean)
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
class PreconditionedLambdaMax(OnSample):
    """λ_max of P^{-1/2} H P^{-1/2} at w_a, P the optimizer's preconditioner there, with its own limit.

    P and the limit are those of :func:`landscape.preconditioner`: of the learners' mean state.
    """

    columns: Mapping[str, str] = {
        "preconditioned_lambda_max": "nat",
        "preconditioned_lambda_max_residual": "nat",
        "lr_preconditioned_lambda_max": "1",
        "lr_preconditioned_limit": "1",
    }

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        self._of_state = run.recipe and StatePreconditioner(run.recipe, run.problem, "monitor.instruments")
        if self._of_state is None:
            loop_preconditioner(run.optimizer, run.parameters())  # refuses an optimizer that has none

    def _preconditioner(self, now: StepState) -> Preconditioner | None:
        """The preconditioner of the learners' mean state, at w_a; None where there is no state yet."""
        run, made = self.run, self._of_state
        if made is None:
            return loop_preconditioner(run.optimizer, run.parameters())
        state = {
            name: rows[:1]
            if name in made.counters
            else run.comm.fresh_mean(rows, f"optimizer's {name}")[None]
            for name, rows in run.optimizer.state.items()
        }
        draws = generator(run.seed, "monitor_preconditioner", now.step)
        return made.at(now.mean, state, now.step, now.lr, draws)

    def measure(self, now: StepState) -> dict[str, float]:
        seen = self._preconditioner(now)
        pairs = None if seen is None else self.sample.search(now.mean, 1, self.memory, seen)
        self.memory = None if pairs is None else pairs.vectors.sum(0)
        if seen is None or pairs is None:
            return {}
        top = float(pairs.values[0])
        return self.row(top, float(pairs.residuals[0]), now.lr * top, seen.limit)


# The instrument "generalized-sharpness" ends a search where the first-order gain left is below this share of
# its value, or after so many products (ours).
GAIN, ASCENT = 0.01, 100


@instrument("generalized-sharpness", "k")
class GeneralizedSharpness(OnSample):
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
        pairs = self.sample.top(now.step, now.mean)
        if pairs is None:
            return {}
        starts = [pairs.vectors[0], torch.randn(len(now.mean), generator=self.generator(now)).to(now.mean)]
        if self._norm == "block":
            parts = [torch.zeros_like(starts[0]) for _ in self.run.problem.layout.slots]
            for part, slot in zip(parts, self.run.problem.layout.slots, strict=True):
                part[slot.place] = starts[0][slot.place]
            starts += parts
        kept = [] if self.memory is None else [self.memory]
        product = self.sample.product(now.mean)
        found = [self._ascend(product, d) for d in [*kept, *(self._aligned(v)[0] for v in starts)]]
        value, self.memory = max(found, key=lambda pair: pair[0])
        rate = now.lr
        if self._normalized:
            dual = self._aligned(self.sample.gradient(now.mean))[1]
            rate = rate / dual if dual else math.nan
        return self.row(value, rate * value, self.run.plain_limit)

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
class LossChange(OnSample):
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
    on_step = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        every = (run.problem.layout.groups(by) for by in ("layer", "block"))
        self._groups = next((groups for groups in every if len(groups) <= LAYERS), {})
        self.columns = {**self.columns, **{f"{OF_LAYER}{name}": "nat" for name in self._groups}}

    def measure(self, now: StepState) -> dict[str, float]:
        if now.before is None:
            return {}
        step, sample = now.mean - now.before, self.sample
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
class Path(OnSample):
    """cos(w_a(s) − w_a(t), ∇L(w_a(s))): how far the mean's way from step s to t points along −g at its start.

    s is the step of the measurement before, so that ``monitor.every`` is the length of the way; with that of
    a period it is the outer step of local SGD and DiLoCo. g is that of the run's sample.
    """

    columns: Mapping[str, str] = {"path_cosine": "1"}

    def measure(self, now: StepState) -> dict[str, float]:  # its memory is w_a and g, (2, P)
        start, self.memory = self.memory, torch.stack((now.mean, self.sample.gradient(now.mean)))
        if start is None:
            return {}
        way, g = start[0] - now.mean, start[1]
        norms = math.sqrt(float(inner(way, way)) * float(inner(g, g)))
        return self.row(float(inner(way, g)) / norms) if norms > 0 else {}


class Along(OnSample):
    """An instrument whose columns are numbers of an analysis of the run's sample, which rank 0 makes.

    They are NaN where w_a or one of them is not finite, or where the analysis ends with an OperationError,
    for which a run must not end.
    """

    @abstractmethod
    def numbers(self, now: StepState) -> Sequence[float]:
        """The values of ``columns``, in their order."""

    def measure(self, now: StepState) -> dict[str, float]:
        own = [0.0] * len(self.columns)
        if self.run.comm.rank == 0:
            own[0] = math.nan
            if bool(torch.isfinite(now.mean).all()):
                with contextlib.suppress(OperationError):
                    own = [*self.numbers(now)]
        values = self.run.comm.total(*own)
        return self.row(*values) if all(map(math.isfinite, values)) else {}


class _Rise(Along):
    """Adaptive sharpness at w_a within ``monitor.rho``, with the defaults of :func:`landscape.sharpness`."""

    kind: ClassVar[Literal["worst", "average"]]

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if not run.monitor.rho:
            raise InputError(f"monitor.rho: missing, '{self.name}' is the rise of the loss within it")

    def numbers(self, now: StepState) -> list[float]:
        problem = copy.copy(self.sample.problem)
        problem.weights, draws = now.mean, self.run.monitor.draws
        result = sharpness(
            problem, self.run.monitor.rho, self.kind, min_draws=min(MIN_COSTLY, draws), max_draws=draws,
            seed=self.generator(now).initial_seed() % 2**62,
        )  # fmt: skip
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
class RunningAverage(Along):
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

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if run.monitor.window > MEMBERS:
            raise InputError(f"monitor.window: {run.monitor.window} is not allowed, at most {MEMBERS}")
        exact_only(self.sample.problem, f"monitor.instruments: '{self.name}'")

    def measure(self, now: StepState) -> dict[str, float]:
        window = self.run.monitor.window
        before = () if self.memory is None else self.memory
        self.memory = torch.stack([*before, now.mean][-window:])
        return super().measure(now) if len(self.memory) == window else {}

    def numbers(self, now: StepState) -> list[float]:
        assert self.memory is not None
        result = average(self.sample.problem, [*self.memory], exact=False, progress=False)
        loss = result.loss[0]
        return [loss, result.low[0], result.high[0], result.members_loss[-1] - loss]

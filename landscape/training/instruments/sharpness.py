"""Sharpness along a run, on a sample: λ_max in several forms, a rise of the loss, the loss of an average."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.connection import average
from landscape.analysis.sharpness import sharpness
from landscape.checkpoint.history import MONITORED, OF_LAYER, UNITS
from landscape.core.devices import double, finite, inner, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.statistics import mean_and_error
from landscape.curvature import hessian, search
from landscape.curvature.double_backward import NoSecondDerivative
from landscape.curvature.eigenvalues import fast_hessian
from landscape.curvature.hessian import HessianOperator, HessianOptions, Preconditioner, exact_only
from landscape.curvature.search import RitzPairs
from landscape.gradients.minibatches import MIN_COSTLY, Minibatches
from landscape.problem.problem import Problem
from landscape.training.experiments import StatePreconditioner, own_loop_preconditioner
from landscape.training.instruments import Instrument, MeasuredRun, StepState, instrument, rounding
from landscape.training.optimizer import steepest
from landscape.training.recipes import Monitor
from landscape.training.run import generator

STATE = "monitor_start"  # the name in a checkpoint of the vector near which the next search begins


class Sample:
    """Loss and Hessian of ``problem`` on ``monitor.samples`` of its samples, for rank 0.

    A Lanczos search begins at the sum of the previous search's eigenvectors, plus a fixed random vector of
    equal norm, so that an eigenvector orthogonal to the sum is not missed. The search uses exact products
    only: cheaper products are chosen by timing, and the history's bits must not depend on timing. Where the
    model has no second derivatives, products are differences of gradients, whose errors are in the residuals.

    Attributes:
        problem: the loss on the whole sample.
        count: the number of eigenvalues that :meth:`top` returns.
        state: the sum of the eigenvectors by its name in checkpoints, so that a resumed run has the bits of
            an unbroken run.

    Raises:
        InputError: a model whose gradient is wrong.
    """

    def __init__(self, monitor: Monitor, problem: Problem, seed: int) -> None:
        self.count = min(monitor.k, problem.layout.size)
        self.state: dict[str, Tensor] = {}
        self._last: tuple[int, RitzPairs | None] = -1, None
        # This refuses a model whose gradient is wrong, before the first step.
        self._options = HessianOptions(derivatives=HessianOptions().at(problem).derivatives)
        samples = min(monitor.samples or problem.samples, problem.samples)
        batch = problem.batchnorm.samples
        if batch:  # whole batches, as a sample's loss depends on its batch
            samples = max(1, samples // batch) * batch
        if samples < problem.samples:
            order = torch.randperm(problem.samples, generator=generator(seed, "monitor"))
            problem = problem.subset(order[:samples].sort().values)
        self.problem = problem
        self._random = search.start_vector(problem, seed)

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Take ``state`` from a checkpoint, if it has one."""
        if STATE in shared:
            self.state = {STATE: shared[STATE].to(self._random)}

    def top(self, step: int, weights: Tensor) -> RitzPairs | None:
        """Return the ``count`` largest eigenvalues at ``weights`` (P,) after ``step``, by one search a step.

        None where the Hessian is not finite.
        """
        if self._last[0] != step:
            pairs = self.largest(weights, self.count, self.state.get(STATE))
            self.state = {} if pairs is None else {STATE: pairs.vectors.sum(0)}
            self._last = step, pairs
        return self._last[1]

    def gradient(self, weights: Tensor) -> Tensor:
        """Return ∇L (P,) at ``weights`` over the sample."""
        return self.problem.loss_and_gradient(weights)[1]

    def operator(self, weights: Tensor, precondition: Preconditioner | None = None) -> HessianOperator:
        """Return H at ``weights`` (P,), or P^{-1/2} H P^{-1/2}."""
        return fast_hessian(self.problem, weights, replace(self._options, precondition=precondition))

    def curvatures(
        self, weights: Tensor, groups: Sequence[Sequence[slice]] = ((slice(None),),)
    ) -> Callable[[Tensor], list[float]]:
        """Return the function v ↦ Σ v_i (Hv)_i over each group of coordinates; NaN for a large error.

        The default is one group of all coordinates, whose sum is vᵀHv.
        """
        h = self.operator(weights)

        def along(v: Tensor) -> list[float]:
            (image,), (error,) = h._measured(v[None])
            curvature = abs(float(double(v) @ double(image)))
            if error and not error * float(vector_norm(v)) <= search.RESIDUAL_TOL * curvature:
                return [math.nan] * len(groups)
            return [sum(float(double(v[p]) @ double(image[p])) for p in parts) for parts in groups]

        return along

    def largest(
        self, weights: Tensor, count: int, near: Tensor | None, precondition: Preconditioner | None = None
    ) -> RitzPairs | None:
        """Return the largest eigenvalues of H, or of P^{-1/2} H P^{-1/2}; None if one is not finite.

        Args:
            weights: θ (P,).
            count: the number of eigenvalues.
            near: the sum of eigenvectors at weights nearby; None: there are none yet.
            precondition: P.
        """
        operator = self.operator(weights, precondition)
        start = self._random
        if near is not None:
            start = search.warm_start(near, start, search.ranks_of(self.problem))
        pairs, _ = search.search_operator(operator, start, search.SearchOptions(high=count))
        return pairs if finite(pairs.values) else None


class OnSample(Instrument):
    """An instrument of the loss or its Hessian on the run's sample, whose numbers rank 0 computes for all."""

    on_sample = True
    #: Whether the instrument needs the weights of all learners, which rank 0 then receives.
    of_learners = False

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        run.sample = self.sample = run.sample or Sample(run.monitor, run.problem, run.seed)

    @abstractmethod
    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        """Return the values of the first ``columns``, in their order, on rank 0.

        ``learners``: the weights (P,) of all learners, each valid until the next; none unless
        ``of_learners``.
        """

    def measure(self, now: StepState) -> dict[str, float]:
        comm, count = self.run.comm, len(self.columns)
        numbers = [0.0] * count
        if comm.rank == 0:
            learners = comm.rows(now.weights) if self.of_learners else iter(())
            numbers = [*self.numbers(now, learners), *[math.nan] * count][:count]
            for _ in learners:  # receive all rows, as the other processes send them in any case
                pass
        elif self.of_learners:
            comm.send_rows(now.weights)
        row = self.row(*comm.total(*numbers))
        return {column: value for column, value in row.items() if math.isfinite(value)}


class TopEigenvectors(OnSample):
    """An instrument of the Hessian's leading eigenvectors on the run's sample; NaN where H is not finite."""

    @abstractmethod
    def numbers_of(self, pairs: RitzPairs, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        """Return :meth:`numbers` from the ``monitor.k`` leading ``pairs`` at w_a."""

    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        pairs = self.sample.top(now.step, now.mean)
        return () if pairs is None else self.numbers_of(pairs, now, learners)


# The most layers of a model, or blocks, whose parts of a change of the loss are recorded (our choice: the
# colors of a picture).
LAYERS = 12


@instrument("lambda-max", "k")
class LambdaMax(TopEigenvectors):
    """λ_max of ∇²L at w_a, lr·λ_max, the rule's limit, and the share of the spread along top eigenvectors.

    λ_max is also measured every ``monitor.sharpness`` steps.
    """

    columns: Mapping[str, str] = {column: UNITS[column] for column in MONITORED}
    of_learners = True

    def numbers_of(self, pairs: RitzPairs, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        along = total = 0.0
        for weights in learners:
            spread = weights - now.mean
            along += float(double(pairs.vectors @ spread).square().sum())
            total += float(double(spread).square().sum())
        share = along / total if total > self.run.learners * rounding(now.mean) else math.nan
        top = float(pairs.values[0])
        return top, float(pairs.residuals[0]), now.lr * top, self.run.limit, share


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
        self._maker = run.recipe and StatePreconditioner(run.recipe, run.problem, "monitor.instruments")
        if self._maker is None:  # a loop of the user's own
            own_loop_preconditioner(run.optimizer, run.parameters())  # refuses optimizers without one

    def _preconditioner(self, now: StepState) -> Preconditioner | None:
        """Return the preconditioner of the learners' mean state, at w_a; None where there is no state yet."""
        run, maker = self.run, self._maker
        if maker is None:
            return own_loop_preconditioner(run.optimizer, run.parameters())
        state = maker.mean_of(
            run.optimizer.state, lambda key, rows: run.comm.fresh_mean(rows, f"optimizer's {key}")
        )
        draws = generator(run.seed, "monitor_preconditioner", now.step)
        return maker.preconditioner_at(now.mean, state, now.step, now.lr, draws)

    def measure(self, now: StepState) -> dict[str, float]:
        self._current = self._preconditioner(now)  # on all processes, as an exchange makes it
        return super().measure(now)

    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        current = self._current
        pairs = self.sample.largest(now.mean, 1, self.memory, current) if current else None
        self.memory = pairs.vectors.sum(0) if pairs else None
        if not (current and pairs):
            return ()
        top = float(pairs.values[0])
        return top, float(pairs.residuals[0]), now.lr * top, current.limit


# The instrument "generalized-sharpness" ends a search if the remaining first-order gain is below this share
# of its value, or after this number of products (our choice).
GAIN, ASCENT = 0.01, 100


@instrument("generalized-sharpness", "k")
class GeneralizedSharpness(TopEigenvectors):
    """S = max dᵀHd over the unit ball of the norm of the optimizer's steps at w_a, and η S with its limit.

    The optimizer must be "steepest" (Islamov et al. 2026, arXiv 2603.05002), whose limit is 2 for one
    learner. With normalized steps η is α/‖g‖_*. For other rules the limit is the rule's limit on ηλ with
    plain steps (our choice): if H = vvᵀ, the steps along v are those of plain SGD with S in place of λ.

    S is the largest of several local maxima, and so a lower bound. Each search makes Frank–Wolfe steps with
    exact line search. The searches start at the previous measurement's maximum, at a random vector, and at
    the leading eigenvector; with the norm "block" also at the eigenvector's part in each parameter tensor.
    """

    columns: Mapping[str, str] = {
        "generalized_sharpness": "nat",
        "lr_generalized_sharpness": "1",
        "lr_generalized_limit": "1",
    }

    def __init__(self, run: MeasuredRun) -> None:
        if run.geometry is None:
            remedy = "use 'lambda-max' for sgd, 'preconditioned-lambda-max' for adam"
            text = f"monitor.instruments: '{self.name}' is not allowed, only with the optimizer steepest"
            raise InputError(f"{text}; {remedy}")
        super().__init__(run)
        exact_only(self.sample.problem, "monitor.instruments: 'generalized-sharpness'")
        self._norm, self._normalized = run.geometry

    def _aligned(self, v: Tensor) -> tuple[Tensor, float]:
        """Return the direction of the unit ball with the largest product with ``v`` (P,), and the product."""
        directions, products = steepest(self._norm, self.run.problem.layout, v[None])
        return directions[0], float(products[0])

    def numbers_of(self, pairs: RitzPairs, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        starts = [pairs.vectors[0], torch.randn(len(now.mean), generator=self.generator(now)).to(now.mean)]
        if self._norm == "block":
            for slot in self.run.problem.layout.slots:
                part = torch.zeros_like(starts[0])
                part[slot.place] = starts[0][slot.place]
                starts.append(part)
        points = [self._aligned(v)[0] for v in starts]
        if self.memory is not None:
            points.insert(0, self.memory)
        h = self.sample.operator(now.mean)
        maxima = [self._ascend(lambda v: h._images(v[None])[0], d) for d in points]
        value, self.memory = max(maxima, key=lambda pair: pair[0])
        rate = now.lr
        if self._normalized:
            dual = self._aligned(self.sample.gradient(now.mean))[1]
            rate = rate / dual if dual else math.nan
        return value, rate * value, self.run.plain_limit

    def _ascend(self, product: Callable[[Tensor], Tensor], d: Tensor) -> tuple[float, Tensor]:
        """Return a local maximum of dᵀHd and its d in the ball, by steps from ``d``; ``product``: v ↦ Hv."""
        image, value = product(d), 0.0
        for _ in range(ASCENT):
            best, dual = self._aligned(image)
            value = float(inner(d, image))
            if dual - value <= GAIN * dual:
                break
            difference, difference_image = best - d, product(best) - image
            # dᵀHd grows by 2 gain share + curvature share² along d + share·difference, share in [0, 1].
            curvature, gain = float(inner(difference, difference_image)), dual - value
            share = min(1.0, gain / -curvature) if curvature < 0 else 1.0
            d, image = d + share * difference, image + share * difference_image
        return value, d


@instrument("batch-sharpness", "draws")
class BatchSharpness(Instrument):
    """E[gᵀHg/‖g‖²] (arXiv:2412.20553), over ``monitor.draws`` fresh minibatches of the training set.

    The first columns are at w_a with minibatches of the total batch. With several learners, the columns of
    "learner" are at the points where the learners take their gradients, with minibatches of the local batch;
    see :func:`landscape.batch_sharpness`. A draw takes a gradient and a product over its minibatch. NaN where
    a gradient is zero or not finite.
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
        value, error = mean_and_error(self._curvatures(now, now.mean[None], 1).mean(1))
        values = [value, error, now.lr * value, self.run.limit]
        if self.run.learners > 1:
            value, error = mean_and_error(self._curvatures(now, now.points, self.run.learners).mean(1))
            values += [value, error, now.lr * value]
        return self.row(*values)

    def _curvatures(self, now: StepState, weights: Tensor, learners: int) -> Array:
        """Return gᵀHg/‖g‖² (draws, learners); processes share draws at w_a, or have their own learners."""
        run, comm, draws = self.run, self.run.comm, self.run.monitor.draws
        purpose = "learners" if learners > 1 else "mean"
        minibatches = Minibatches(run.problem, run.batch // learners, self.generator(now, purpose), learners)
        local = comm.local if learners > 1 else slice(0, 1)
        share = range(draws) if learners > 1 else range(draws)[comm.share(draws)]
        table = torch.zeros(draws, learners, dtype=torch.float64)
        for k, batches in enumerate(itertools.islice(minibatches, draws)):
            if k in share:
                pairs = zip(batches[local], weights, strict=True)
                values = [_curvature(minibatch, point) for minibatch, point in pairs]
                table[k, local] = torch.tensor(values, dtype=torch.float64)
        return comm.totals(table).numpy()


def _curvature(minibatch: Problem, weights: Tensor) -> float:
    """Return gᵀHg/‖g‖²; NaN if its error is large, or after an exception, which must not end the run."""
    try:
        value, _, error = hessian.gradient_curvature(minibatch, weights, derivatives="auto")
    except (OperationError, NoSecondDerivative):
        return math.nan
    return value if error <= search.RESIDUAL_TOL * abs(value) else math.nan


@instrument("loss-change")
class LossChange(OnSample):
    """L(w_a + d) − L(w_a) = ⟨g, d⟩ + ½ dᵀHd + rest for the step d of w_a, on the run's sample.

    d is the change of w_a by any rule and optimizer. "loss_change" is the sum of the columns for gradient,
    curvature and rest; the sharpness is dᵀHd/‖d‖². A further column for each layer a, "loss_change LAYER",
    has the layer's part ⟨g_a, d_a⟩ + ½ d_aᵀ(Hd)_a. Models with more than LAYERS layers have columns of
    blocks; models with more than LAYERS blocks have no such columns. See :func:`landscape.loss_change`.
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
        choices = (run.problem.layout.groups(by) for by in ("layer", "block"))
        self._groups = next((groups for groups in choices if len(groups) <= LAYERS), {})
        self.columns = {**self.columns, **{f"{OF_LAYER}{name}": "nat" for name in self._groups}}

    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        if now.before is None:
            return ()
        step, problem = now.mean - now.before, self.sample.problem
        groups = [(slice(None),), *([slot.place for slot in slots] for slots in self._groups.values())]
        start, g = problem.loss_and_gradient(now.before)
        change = problem.evaluate(now.mean)[0] - start
        gradients = np.array([sum(float(inner(g[p], step[p])) for p in parts) for parts in groups])
        halves = np.array(self.sample.curvatures(now.before, groups)(step)) / 2
        square = float(inner(step, step))
        sharpness = 2 * halves[0] / square if square else math.nan
        total, *of_groups = (gradients + halves).tolist()
        return change, gradients[0], halves[0], change - total, sharpness, *of_groups


@instrument("path")
class Path(OnSample):
    """The cosine of the mean's path from step s to step t with −g, cos(w_a(s) − w_a(t), g), g = ∇L(w_a(s)).

    s is the step of the previous measurement, so that ``monitor.every`` is the length of the path. If this
    length is a period of local SGD or DiLoCo, the path is the outer step. g is that of the run's sample.
    """

    columns: Mapping[str, str] = {"path_cosine": "1"}

    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        start, self.memory = self.memory, torch.stack((now.mean, self.sample.gradient(now.mean)))
        if start is None:
            return ()
        path, g = start[0] - now.mean, start[1]
        norms = math.sqrt(float(inner(path, path)) * float(inner(g, g)))
        return (float(inner(path, g)) / norms,) if norms > 0 else ()


class Along(OnSample):
    """An instrument whose columns are numbers of an analysis of the run's sample.

    The columns are NaN where w_a is not finite, or where the analysis raises an OperationError, which must
    not end the run.
    """

    @abstractmethod
    def analyzed(self, now: StepState) -> Sequence[float]:
        """Return the values of ``columns``, in their order."""

    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        if finite(now.mean):
            with contextlib.suppress(OperationError):
                return self.analyzed(now)
        return ()


class _Rise(Along):
    """Adaptive sharpness at w_a within ``monitor.rho``, with the defaults of :func:`landscape.sharpness`."""

    kind: ClassVar[Literal["worst", "average"]]

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if not run.monitor.rho:
            raise InputError(f"monitor.rho: missing, '{self.name}' is the rise of the loss within it")

    def analyzed(self, now: StepState) -> Sequence[float]:
        problem = copy.copy(self.sample.problem)
        problem.weights, draws = now.mean, self.run.monitor.draws
        result = sharpness(
            problem, self.run.monitor.rho, self.kind, min_draws=min(MIN_COSTLY, draws), max_draws=draws,
            seed=self.generator(now).initial_seed() % 2**62,
        )  # fmt: skip
        return result.value, result.standard_error


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
    """The predicted loss at the mean of w_a over the last ``monitor.window`` measurements (LAWA).

    The loss is on the run's sample, with the ends of a 90% interval. The gain is the loss at w_a now minus
    the predicted loss: above 0, to stop now and average is predicted to be better than to stop now without
    averaging. See :func:`landscape.average`. NaN before a full window, and without a prediction.
    """

    columns: Mapping[str, str] = {
        "average_loss": "nat",
        "average_loss_low": "nat",
        "average_loss_high": "nat",
        "average_gain": "nat",
    }

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        exact_only(self.sample.problem, f"monitor.instruments: '{self.name}'")

    def measure(self, now: StepState) -> dict[str, float]:
        window = self.run.monitor.window
        before = () if self.memory is None else self.memory
        self.memory = torch.stack([*before, now.mean][-window:])
        return super().measure(now) if len(self.memory) == window else {}

    def analyzed(self, now: StepState) -> Sequence[float]:
        assert self.memory is not None
        result = average(self.sample.problem, [*self.memory], exact=False, progress=False)
        loss = result.loss[0]
        return loss, result.low[0], result.high[0], result.members_loss[-1] - loss

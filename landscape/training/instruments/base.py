"""Instruments, measurements that a run repeats: their base class, those of a run, and their sample."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.devices import double, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.curvature.eigenvalues import eigenpairs, fast_hessian
from landscape.curvature.hessian import FULL_HESSIAN, HessianOptions, Preconditioner
from landscape.curvature.search import (
    RESIDUAL_TOL,
    RitzPairs,
    SearchOptions,
    find_eigenpairs,
    ranks_of,
    start_vector,
    warm_start,
)
from landscape.problem.problem import Problem
from landscape.training.optimizer.base import Optimizer
from landscape.training.optimizer.preconditioning import StatePreconditioner
from landscape.training.processes.comm import Comm
from landscape.training.recipes.recipe import Monitor, Recipe
from landscape.training.run.randomness import generator

STATE = "monitor_start"  # the name in a checkpoint of the vector near which the next search begins


class Sample:
    """Loss and Hessian of ``problem`` on ``monitor.samples`` of its samples, the work shared by ``comm``.

    A Lanczos search begins at the sum of the eigenvectors of the previous search, plus a random vector of the
    same norm, the same every time, so that an eigenvector orthogonal to them is not missed. It uses exact
    products only: cheaper products are chosen by timing, on which the history's bits must not depend. Where
    the model has no second derivatives, they are differences of gradients, with the errors in the residuals.
    ``state`` is the sum, so that a resumed run gives the bits of one that never stopped.

    Every process multiplies with its share of the sample, and all call the same methods in the same order;
    rank 0 searches.

    Attributes:
        problem: that of the whole sample.
        count: how many eigenvalues :meth:`top` gives.

    Raises:
        InputError: a model whose gradient is wrong, or without second derivatives in several processes.
    """

    def __init__(self, monitor: Monitor, problem: Problem, comm: Comm, seed: int) -> None:
        self._comm, self.count = comm, min(monitor.k, problem.layout.size)
        self.state: dict[str, Tensor] = {}
        self._found: tuple[int, RitzPairs | None] = -1, None
        # This refuses a model whose gradient is wrong, before the first step.
        derivatives = HessianOptions().at(problem).derivatives
        self._options = HessianOptions(derivatives=derivatives)
        if derivatives == "differences" and comm.size > 1:
            raise InputError(
                f"monitor: {comm.size} processes are not allowed where second derivatives are differences of "
                "gradients; take one, or write model and loss in differentiable operations"
            )
        batch, samples = problem.batchnorm.samples, min(monitor.samples or problem.samples, problem.samples)
        if batch:  # whole batches, as a sample's loss depends on its batch
            samples = max(1, samples // batch) * batch
        if samples < problem.samples:
            order = torch.randperm(problem.samples, generator=generator(seed, "monitor"))
            problem = problem.subset(order[:samples].sort().values)
        self.problem = problem
        self._random = start_vector(problem, seed)
        share = comm.share(problem.samples)
        if batch:  # a share would be cut into other batches than the whole set: rank 0 computes alone
            share = slice(0, problem.samples if comm.rank == 0 else 0)
        self._share = (share.stop - share.start) / problem.samples
        self._local = problem.subset(share) if 0 < self._share < 1 else problem

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Take ``state`` from a checkpoint, if it has one."""
        if STATE in shared:
            self.state = {STATE: shared[STATE].to(self._random)}

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
        empty = 0.0, torch.zeros_like(weights)
        loss, part = self._local.loss_and_gradient(weights) if self._share else empty
        if self._comm.size == 1:
            return loss, part
        gradient = self._comm.totals(double(part) * self._share).to(weights)
        return self._comm.total(loss * self._share)[0], gradient

    def gradient(self, weights: Tensor) -> Tensor:
        """∇L (P,) at ``weights`` over the sample."""
        return self.loss_and_gradient(weights)[1]

    def loss(self, weights: Tensor) -> float:
        """L at ``weights`` (P,) over the sample."""
        part = self._local.evaluate(weights)[0] * self._share if self._share else 0.0
        return self._comm.total(part)[0] if self._comm.size > 1 else part

    def curvature(self, weights: Tensor) -> Callable[[Tensor], float]:
        """v ↦ vᵀHv for the Hessian at ``weights``, and a v (P,) that all processes have."""
        parts = self.curvatures(weights, ((slice(None),),))
        return lambda v: parts(v)[0]

    def curvatures(
        self, weights: Tensor, groups: Sequence[Sequence[slice]]
    ) -> Callable[[Tensor], list[float]]:
        """v ↦ Σ v_i (Hv)_i over each of ``groups`` of coordinates; NaN where the error is too large."""

        def along(v: Tensor, image: Tensor) -> list[float]:
            return [sum(float(double(v[p]) @ double(image[p])) for p in places) for places in groups]

        if self._options.derivatives == "differences":
            h = self._options.at(self.problem, weights)

            def measured(v: Tensor) -> list[float]:
                images, errors = h._measured(v[None])
                error, value = errors[0] * float(vector_norm(v)), float(double(v) @ double(images[0]))
                resolved = error <= RESIDUAL_TOL * abs(value)
                return along(v, images[0]) if resolved else [math.nan] * len(groups)

            return measured
        part = self._part(weights)
        return lambda v: self._comm.total(*along(v, part(v)))

    def product(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ Hv (P,) for the Hessian at ``weights``, and a v (P,) that all processes have.

        Raises:
            InputError: a model without second derivatives.
        """
        if self._options.derivatives == "differences":
            raise InputError(
                "monitor.instruments: one needs second derivatives, which this model or its loss has not"
            )
        part = self._part(weights)
        return lambda v: self._comm.totals(double(part(v))).to(v) if self._comm.size > 1 else part(v)

    def _part(
        self, weights: Tensor, precondition: Preconditioner | None = None
    ) -> Callable[[Tensor], Tensor]:
        """v ↦ this process's part of Hv (P,), exact; the parts of all processes add up to it."""
        if not self._share:
            return torch.zeros_like
        h = fast_hessian(self._local, weights, replace(FULL_HESSIAN, precondition=precondition))
        return lambda v: h._images(v[None])[0] * self._share

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
        start = self._random if near is None else warm_start(near, self._random, ranks_of(self.problem))
        if self._options.derivatives == "differences":
            options = replace(self._options, precondition=precondition)
            found = eigenpairs(self.problem, weights[None], start, SearchOptions(high=count), options)[0]
            return found if bool(torch.isfinite(found.values).all()) else None
        part = self._part(weights, precondition)
        if self._comm.size == 1:
            with contextlib.suppress(_NotFiniteError):
                return find_eigenpairs(lambda v: _finite(part(v)), start, high=count)
            return None

        def shared(v: Tensor, going: float = 1.0) -> Tensor | None:
            """H ``v`` for the ``v`` of rank 0, which all ranks receive; None, to stop, if ``going`` is 0."""
            sent = torch.cat((double(v), v.new_tensor([going], dtype=torch.float64)))
            sent = self._comm.totals(sent if self._comm.rank == 0 else torch.zeros_like(sent))
            if not sent[-1]:
                return None
            return self._comm.totals(double(part(sent[:-1].to(weights)))).to(weights)

        pairs: RitzPairs | None = None
        if self._comm.rank == 0:
            with contextlib.suppress(_NotFiniteError):
                pairs = find_eigenpairs(lambda v: _finite(shared(v)), start, high=count)
            shared(start, going=0.0)
        else:
            while shared(start) is not None:
                pass
        return self._broadcast(pairs, count, weights)

    def _broadcast(self, pairs: RitzPairs | None, count: int, weights: Tensor) -> RitzPairs | None:
        """The ``pairs`` of rank 0, on all ranks."""
        table = torch.zeros(count, len(weights) + 3, dtype=torch.float64, device=weights.device)
        if pairs is not None:
            numbers = torch.stack((pairs.values, pairs.residuals), 1).to(table)
            table = torch.cat((torch.ones_like(numbers[:, :1]), numbers, double(pairs.vectors)), 1)
        table = self._comm.totals(table)
        if not table[0, 0]:
            return None
        return RitzPairs(table[:, 1].cpu(), table[:, 3:].to(weights), table[:, 2].cpu(), 0, True)


class _NotFiniteError(Exception):
    """A Hessian with NaN or infinities has no eigenvalues."""


def _finite(product: Tensor | None) -> Tensor:
    if product is None or not bool(torch.isfinite(product).all()):
        raise _NotFiniteError
    return product


@dataclass(frozen=True)
class StepState:
    """The state of a run after a step.

    Attributes:
        step, lr: its number, counted from 1, and its learning rate α.
        weights: of this process's learners (n_local, P).
        points: where these take their gradients (n_local, P): for SSGD at w_a.
        mean: w_a (P,).
        before: w_a (P,) before the step; None unless an instrument asks for it (``on_step``).
    """

    step: int
    lr: float
    weights: Tensor
    points: Tensor
    mean: Tensor
    before: Tensor | None = None


@dataclass(frozen=True)
class Gradients:
    """The minibatch gradients of a step.

    Attributes:
        step: counted from 1.
        points, rows: of this process's learners (n_local, P): where they were taken, and what they are; both
            are overwritten later.
    """

    step: int
    points: Tensor
    rows: Tensor


@dataclass(frozen=True)
class MeasuredRun:
    """The run that instruments measure.

    Attributes:
        monitor: what is measured, and how.
        problem: the loss that the steps descend, on the training set.
        comm: the processes; all measure together, and have the same numbers.
        seed: of the run.
        learners, batch: n, and the samples of a step, all learners together; 0 where that is not known.
        stability_limit: the largest stable ηλ of the rule with its optimizer, None where it is not known.
        at_mean, synchronous: whether all learners take their gradients at w_a, or at another point together.
        geometry: of the optimizer's steps, as of :attr:`.Optimizer.geometry`.
        plain_limit: the largest stable ηλ of the rule with plain steps, None where it is not known.
        second: (step, learner, its point) -> a minibatch gradient (P,) of a learner of this process that is
            independent of its gradient in that step; None where the steps are another's.
        preconditioner: that of the optimizer at a moment, None where its state has none yet. Called with None
            before the first step, it raises InputError for an optimizer that has none at all.
    """

    monitor: Monitor
    problem: Problem
    comm: Comm
    seed: int
    batch: int
    stability_limit: float | None
    preconditioner: Callable[[StepState | None], Preconditioner | None]
    learners: int = 1
    at_mean: bool = True
    synchronous: bool = True
    second: Callable[[int, int, Tensor], Tensor] | None = None
    geometry: tuple[str, bool] | None = None
    plain_limit: float | None = None

    @property
    def limit(self) -> float:
        """``stability_limit``, NaN where it is not known."""
        return math.nan if self.stability_limit is None else self.stability_limit

    @functools.cached_property
    def sample(self) -> Sample:
        """The sample on which Hessians are taken."""
        return Sample(self.monitor, self.problem, self.comm, self.seed)


Kind = TypeVar("Kind", bound="Instrument")


def instrument(name: str, *reads: str) -> Callable[[type[Kind]], type[Kind]]:
    """A decorator that adds a class to the registry, and gives it its ``name`` and what it ``reads``."""

    def add(kind: type[Kind]) -> type[Kind]:
        kind.name, kind.reads = name, (*reads, *["samples"] * kind.on_sample)
        return registry.instruments.add(name)(kind)

    return add


class Instrument(ABC):
    """Measures a run every so many steps; ``measure`` gives one number for each of ``columns``.

    An instrument is added to the registry under the name that ``monitor.instruments`` has, in this package or
    in a plugin::

        @registry.instruments.add("my-instrument")
        class MyInstrument(Instrument):
            name = "my-instrument"

    Args:
        run: what is measured. ``__init__`` raises InputError where that is not possible.
    """

    #: The name in the registry.
    name = ""
    #: The keys of ``monitor`` that it reads, besides the interval.
    reads: tuple[str, ...] = ("samples", "k", "draws", "rho", "window")
    #: The history's columns: name -> unit. One of a run may have more than its class.
    columns: Mapping[str, str] = {}
    #: Whether it takes the Hessian on the run's sample: it then refuses a model that has none.
    on_sample = False
    #: Whether it draws minibatches, and so must know the samples of a step.
    on_minibatches = False
    #: Whether it measures the step itself, and so needs w_a before it.
    on_step = False

    def __init__(self, run: MeasuredRun) -> None:
        self.run = run
        #: What it remembers from one measurement to the next, the same on all processes; None: nothing yet.
        self.memory: Tensor | None = None
        if self.on_minibatches and not run.batch:
            raise InputError(
                f"monitor.instruments: '{self.name}' needs the samples of a minibatch; give batch="
            )
        if self.on_sample:
            _ = run.sample

    @property
    def key(self) -> str:
        """The name of its memory in checkpoints."""
        return f"monitor_{self.name}"

    def state(self, step: int) -> dict[str, Tensor]:
        """The memory after ``step``: {} or one tensor, the same on all processes, under :attr:`key`.

        It goes into checkpoints: with it a resumed run gives the bits of one that never stopped.
        """
        return {} if self.memory is None else {self.key: self.memory}

    def restore(self, state: Tensor) -> None:
        """Take the tensor of :meth:`state` from a checkpoint; not called where that has none."""
        self.memory = state.to(self.run.problem.weights)

    def see(self, gradients: Gradients) -> None:  # noqa: B027 - most instruments see no steps
        """Take the gradients of a step; called for every step."""

    def row(self, *values: float) -> dict[str, float]:
        """The columns with ``values``, in the order of ``columns``; those without a value are left out."""
        assert len(values) <= len(self.columns)
        return dict(zip(self.columns, values, strict=False))

    def _row_of_first(self, numbers: Callable[[], Sequence[float]]) -> dict[str, float]:
        """The columns with the ``numbers`` of rank 0, which alone computes; none where one is not finite."""
        comm = self.run.comm
        own = numbers() if comm.rank == 0 else [0.0] * len(self.columns)
        values = comm.totals(torch.tensor(own, dtype=torch.float64)).tolist()
        return self.row(*values) if all(map(math.isfinite, values)) else {}

    @abstractmethod
    def measure(self, now: StepState) -> dict[str, float]:
        """Column -> number; a column that is left out is NaN in the history."""

    def generator(self, now: StepState, part: str = "") -> torch.Generator:
        """A generator of this instrument's draws at ``now``; ``part`` names one of several uses."""
        return generator(self.run.seed, f"{self.key} {part}".rstrip(), now.step)


def rounding(mean: Tensor) -> float:
    """The consensus distance that equal learners can have by the rounding of their ``mean`` (P,)."""
    return (torch.finfo(mean.dtype).eps * float(vector_norm(mean))) ** 2


def on_all(comm: Comm, row: Tensor | None, like: Tensor) -> Tensor:
    """The ``row`` (P,) of the one process that has it, on all."""
    if comm.size == 1:
        assert row is not None
        return row
    return comm.totals(torch.zeros_like(like, dtype=torch.float64) if row is None else double(row)).to(like)


#: The instrument that ``monitor.sharpness`` has measure at steps of its own.
LAMBDA_MAX = "lambda-max"


class Monitoring:
    """Measures a run every ``monitor.every`` steps, and λ_max every ``monitor.sharpness``.

    Args:
        run: what is measured.
        taken: names of columns that instruments may not have.

    Attributes:
        columns: of all instruments: name -> unit.

    Raises:
        InputError: for an instrument that cannot measure this run, or a column of a name that is taken.
    """

    def __init__(self, run: MeasuredRun, taken: Iterable[str] = ()) -> None:
        self.run, settings = run, run.monitor
        names = dict.fromkeys(([LAMBDA_MAX] if settings.sharpness else []) + list(settings.instruments))
        #: Each instrument with the intervals at which it measures.
        self._instruments: list[tuple[Instrument, tuple[int, ...]]] = []
        self.columns: dict[str, str] = {}
        for name in names:
            instrument: Instrument = registry.instruments[name](run)
            listed = settings.every if name in settings.instruments else 0
            intervals = listed, settings.sharpness if name == LAMBDA_MAX else 0
            self._instruments.append((instrument, tuple(filter(None, intervals))))
            for column in instrument.columns:
                if column in taken:
                    raise InputError(
                        f"monitor.instruments: '{name}' has the column '{column}', which the algorithm has"
                    )
            self.columns |= instrument.columns

    @property
    def turns(self) -> tuple[int, ...]:
        """The intervals at which something is measured."""
        return tuple(every for _, intervals in self._instruments for every in intervals)

    def due(self, step: int) -> list[Instrument]:
        """The instruments that measure after ``step``."""
        return [i for i, intervals in self._instruments if any(step % every == 0 for every in intervals)]

    def needs_before(self, step: int) -> bool:
        """Say whether an instrument that is due after ``step`` needs the weights before it."""
        return any(instrument.on_step for instrument in self.due(step))

    def see(self, step: int, points: Tensor, rows: Tensor) -> None:
        """Show the instruments the gradients of a step; arguments as of :class:`.Gradients`."""
        for instrument, _ in self._instruments:
            instrument.see(Gradients(step, points, rows))

    def measure(
        self, step: int, lr: float, weights: Tensor, before: Tensor | None = None
    ) -> dict[str, float]:
        """The columns of the instruments that are due after a step; arguments as of :class:`.StepState`.

        ``before``: the weights of this process's learners (n_local, P) before the step.

        Raises:
            OperationError: for a column that an instrument does not declare.
        """
        columns = dict[str, float]()
        # Not the stored mean, which is that of the weights now.
        start = None if before is None else self.run.comm.fresh_mean(before, "before the step")
        mean = self.run.comm.mean(weights)
        points = mean.expand_as(weights) if self.run.at_mean else weights
        now = StepState(step, lr, weights, points, mean, start)
        for instrument in self.due(step):
            found = instrument.measure(now)
            if undeclared := [name for name in found if name not in instrument.columns]:
                raise OperationError(
                    f"monitor.instruments: 'columns' of '{instrument.name}' must declare '{undeclared[0]}'"
                )
            columns |= found
        return columns

    def state(self, step: int) -> dict[str, Tensor]:
        """The instruments' memory after ``step``, for a checkpoint."""
        state = dict(self.run.sample.state) if "sample" in vars(self.run) else {}
        for instrument, _ in self._instruments:
            state |= instrument.state(step)
        return state

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Take the instruments' memory from a checkpoint."""
        if "sample" in vars(self.run):
            self.run.sample.restore(shared)
        for instrument, _ in self._instruments:
            if instrument.key in shared:
                instrument.restore(shared[instrument.key])

    def warning(self, row: Mapping[str, float], column: Callable[[str], Array]) -> str:
        """A line where ``row`` is the first whose lr·λ_max exceeds the limit; "" if one before did.

        Args:
            row: the last of the history.
            column: gives the history's column of a name.
        """
        if not row["lr_lambda_max"] > row["lr_lambda_limit"]:  # NaN where one is not known
            return ""
        if np.any(column("lr_lambda_max")[:-1] > column("lr_lambda_limit")[:-1]):
            return ""
        return (
            f"step {row['step']:.0f}: lr·λ_max = {row['lr_lambda_max']:.3g} is above "
            f"{row['lr_lambda_limit']:.4g}, up to which the steps are stable on a quadratic; told once, the "
            "history has the rest"
        )


def of_run(
    recipe: Recipe,
    problem: Problem,
    comm: Comm,
    optimizer: Optimizer,
    second: Callable[[int, int, Tensor], Tensor],
) -> Monitoring:
    """The instruments of a recipe's run.

    Args:
        recipe: of the run.
        problem: the loss that its steps descend, on the training set.
        comm: its processes.
        optimizer: that makes its steps, whose state is read when it is measured.
        second: as of :class:`MeasuredRun`.

    Raises:
        InputError: for an instrument that cannot measure this run.
    """
    rule = recipe.rule()

    @functools.cache
    def made() -> StatePreconditioner:
        return StatePreconditioner(recipe, problem, "monitor.instruments")

    def preconditioner(now: StepState | None) -> Preconditioner | None:
        """The preconditioner of the learners' mean state, at w_a."""
        counters = made().counters
        if now is None:
            return None
        state = {
            name: rows[:1] if name in counters else comm.fresh_mean(rows, f"optimizer's {name}")[None]
            for name, rows in optimizer.state.items()
        }
        draws = generator(recipe.seed, "monitor_preconditioner", now.step)
        return made().at(now.mean, state, now.step, now.lr, draws)

    setting = MeasuredRun(
        recipe.monitor,
        problem,
        comm,
        recipe.seed,
        batch=recipe.batch,
        stability_limit=recipe.stability_limit(),
        preconditioner=preconditioner,
        learners=recipe.learners,
        at_mean=rule.at_mean,
        synchronous=rule.synchronous,
        second=second,
        geometry=optimizer.geometry,
        plain_limit=rule.stability_limit(),
    )
    return Monitoring(setting, taken=rule.columns)

"""Instruments, which measure a run as it goes, by name: their base class, and those of one run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from landscape.core import registry
from landscape.core.devices import vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.problem.problem import Problem
from landscape.training.processes.comm import Comm
from landscape.training.recipes import Monitor
from landscape.training.run import generator


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


@dataclass
class MeasuredRun:
    """The run that instruments measure.

    Attributes:
        monitor: the measurements and their options.
        problem: the loss that the steps descend, on the training set.
        comm: the processes; all measure together, and have the same numbers.
        seed: the run's seed.
        learners, batch: n, and the total samples of a step; 0: unknown.
        limit: the largest stable ηλ of the rule with its optimizer; NaN: unknown.
        at_mean, synchronous: whether all learners compute their gradients at w_a, or at one point.
        geometry: the geometry of the optimizer's steps, see :attr:`.Optimizer.geometry`.
        plain_limit: the largest stable ηλ of the rule with plain steps; NaN: unknown.
        second_gradient: the function (step, learner, weights) -> (P,), the gradient of a learner of this
            process at the weights, on a second minibatch, independent of that of the step; None in a user's
            training loop.
        optimizer: makes the steps: an optimizer of a recipe, or of a user's training loop.
        recipe: the run's recipe; None for a user's training loop.
        parameters: returns the parameters in a user's training loop, in the order of θ.
        sample: the sample for Hessians; None until an instrument needs it.
    """

    monitor: Monitor
    problem: Problem
    comm: Comm
    seed: int
    batch: int
    limit: float
    optimizer: Any
    learners: int = 1
    at_mean: bool = True
    synchronous: bool = True
    second_gradient: Callable[[int, int, Tensor], Tensor] | None = None
    geometry: tuple[str, bool] | None = None
    plain_limit: float = math.nan
    recipe: Any = None
    parameters: Callable[[], list[nn.Parameter]] = list
    sample: Any = None


Kind = TypeVar("Kind", bound="Instrument")


def instrument(name: str, *reads: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that registers a class under its ``name`` with the state that it ``reads``."""

    def add(kind: type[Kind]) -> type[Kind]:
        kind.name, kind.reads = name, (*reads, *["samples"] * kind.on_sample)
        return registry.instruments.add(name)(kind)

    return add


class Instrument(ABC):
    """Measures a run at intervals; ``measure`` returns one number for each of ``columns``.

    An instrument is added to the registry under the name that ``monitor.instruments`` has, in this package or
    in a plugin::

        @registry.instruments.add("my-instrument")
        class MyInstrument(Instrument):
            name = "my-instrument"

    Args:
        run: the run. ``__init__`` raises InputError if the instrument cannot measure it.
    """

    #: The name in the registry.
    name = ""
    #: The keys of ``monitor`` that it reads, in addition to the interval.
    reads: tuple[str, ...] = ("samples", "k", "draws", "rho", "window")
    #: The history's columns: name -> unit. An instance may have more columns than its class.
    columns: Mapping[str, str] = {}
    #: Whether it measures losses or Hessians on the run's sample, as ``OnSample`` does.
    on_sample = False
    #: Whether it draws minibatches, and so needs the number of samples of a step.
    on_minibatches = False
    #: Whether it measures the step itself, and so needs w_a before the step.
    on_step = False

    def __init__(self, run: MeasuredRun) -> None:
        self.run = run
        #: The memory from one measurement to the next, on rank 0 or more ranks; None: nothing yet.
        self.memory: Tensor | None = None
        if self.on_minibatches and not run.batch:
            raise InputError(f"monitor.instruments: '{self.name}' needs the size of a minibatch; give batch=")

    @property
    def key(self) -> str:
        """The name of its memory in checkpoints."""
        return f"monitor_{self.name}"

    def state(self, step: int) -> dict[str, Tensor]:
        """Return the memory after ``step``: {} or one tensor under :attr:`key`.

        Checkpoints have rank 0's memory, which all processes restore: a resumed run has the bits of an
        unbroken run.
        """
        return {} if self.memory is None else {self.key: self.memory}

    def restore(self, state: Tensor) -> None:
        """Restore the tensor of :meth:`state` from a checkpoint that has it."""
        self.memory = state.to(self.run.problem.weights)

    def see(self, step: int, points: Tensor, rows: Tensor) -> None:  # noqa: B027 - most see no steps
        """Observe the gradients of a step; called for every step.

        Args:
            step: counted from 1.
            points: (n_local, P), the points of the gradients of this process's learners; overwritten later.
            rows: (n_local, P), the gradients of their minibatches; overwritten later.
        """

    def row(self, *values: float) -> dict[str, float]:
        """Return the ``columns`` with ``values``, in order; columns without a value are left out."""
        assert len(values) <= len(self.columns)
        return dict(zip(self.columns, values, strict=False))

    @abstractmethod
    def measure(self, now: StepState) -> dict[str, float]:
        """Return the numbers by column; a column that is left out is NaN in the history."""

    def generator(self, now: StepState, part: str = "") -> torch.Generator:
        """Return a generator of this instrument's draws at ``now``; ``part`` names one of several uses."""
        return generator(self.run.seed, f"{self.key} {part}".rstrip(), now.step)


def rounding(mean: Tensor) -> float:
    """Return the consensus distance that equal learners can have by the rounding of their ``mean`` (P,)."""
    return (torch.finfo(mean.dtype).eps * float(vector_norm(mean))) ** 2


#: The instrument whose further measurements ``monitor.sharpness`` requests.
LAMBDA_MAX = "lambda-max"


class Monitoring:
    """Measures a run every ``monitor.every`` steps, and λ_max every ``monitor.sharpness``.

    Args:
        run: the run.
        reserved: names of columns that instruments may not have.

    Attributes:
        columns: name -> unit, of all instruments.

    Raises:
        InputError: for an instrument that cannot measure this run, or a column with a reserved name.
    """

    def __init__(self, run: MeasuredRun, reserved: Iterable[str] = ()) -> None:
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
                if column in reserved:
                    raise InputError(f"monitor.instruments: '{name}' and the algorithm both have '{column}'")
            self.columns |= instrument.columns

    @property
    def turns(self) -> tuple[int, ...]:
        """The intervals of all measurements."""
        return tuple(every for _, intervals in self._instruments for every in intervals)

    def due(self, step: int) -> list[Instrument]:
        """Return the instruments that measure after ``step``."""
        return [i for i, intervals in self._instruments if any(step % every == 0 for every in intervals)]

    def needs_before(self, step: int) -> bool:
        """Return whether an instrument that is due after ``step`` needs the weights before it."""
        return any(instrument.on_step for instrument in self.due(step))

    def see(self, step: int, points: Tensor, rows: Tensor) -> None:
        """Show the instruments the gradients of a step; arguments as of :meth:`.Instrument.see`."""
        for instrument, _ in self._instruments:
            instrument.see(step, points, rows)

    def measure(
        self, step: int, lr: float, weights: Tensor, before: Tensor | None = None
    ) -> dict[str, float]:
        """Return the columns of the instruments that are due; arguments as of :class:`.StepState`.

        ``before``: the weights of this process's learners (n_local, P) before the step.

        Raises:
            OperationError: for a column that an instrument does not declare.
        """
        columns: dict[str, float] = {}
        # fresh_mean does not replace the stored mean, which is that of ``weights``.
        start = None if before is None else self.run.comm.fresh_mean(before, "before the step")
        mean = self.run.comm.mean(weights)
        points = mean.expand_as(weights) if self.run.at_mean else weights
        now = StepState(step, lr, weights, points, mean, start)
        for instrument in self.due(step):
            row = instrument.measure(now)
            for column in row:
                if column not in instrument.columns:
                    name = f"'columns' of '{instrument.name}'"
                    raise OperationError(f"monitor.instruments: {name} must declare '{column}'")
            columns |= row
        return columns

    def state(self, step: int) -> dict[str, Tensor]:
        """Return the instruments' memory after ``step``, for a checkpoint."""
        state = dict(self.run.sample.state) if self.run.sample else {}
        for instrument, _ in self._instruments:
            state |= instrument.state(step)
        return state

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Restore the instruments' memory from a checkpoint."""
        if self.run.sample:
            self.run.sample.restore(shared)
        for instrument, _ in self._instruments:
            if instrument.key in shared:
                instrument.restore(shared[instrument.key])

    def warning(self, row: Mapping[str, float], column: Callable[[str], Array]) -> str:
        """Return a line where ``row`` is the first row whose lr·λ_max exceeds the limit; otherwise "".

        Args:
            row: the last row of the history.
            column: name -> the history's column.
        """
        if not row["lr_lambda_max"] > row["lr_lambda_limit"]:  # also NaN: unknown
            return ""
        if np.any(column("lr_lambda_max")[:-1] > column("lr_lambda_limit")[:-1]):
            return ""
        return (
            f"step {row['step']:.0f}: lr·λ_max = {row['lr_lambda_max']:.3g} is above "
            f"{row['lr_lambda_limit']:.4g}, the limit of stability on a quadratic (shown once only)"
        )

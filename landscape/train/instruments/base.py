"""What an instrument is: a measurement that a run repeats, with the columns that it adds to the history."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.curvature.hessian import Preconditioner
from landscape.problem.problem import Problem
from landscape.train.instruments.sample import Sample
from landscape.train.processes.comm import Comm
from landscape.train.recipes.recipe import Monitor
from landscape.train.run.randomness import generator


@dataclass(frozen=True)
class Moment:
    """The state of a run after a step.

    Attributes:
        step, lr: its number, counted from 1, and its learning rate α.
        weights: of this process's learners (n_local, P).
        points: where these take their gradients (n_local, P): for SSGD at w_a.
        mean: w_a (P,).
    """

    step: int
    lr: float
    weights: Tensor
    points: Tensor
    mean: Tensor


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
class Setting:
    """The run that instruments measure.

    Attributes:
        monitor: what is measured, and how.
        problem: the loss that the steps descend, on the training set.
        comm: the processes; all measure together, and have the same numbers.
        seed: of the run.
        learners, batch: n, and the samples of a step, all learners together; 0 where that is not known.
        stability_limit: the largest stable ηλ of the rule with its optimizer, None where it is not known.
        at_mean, synchronous: whether all learners take their gradients at w_a, or at another point together.
        second: (step, learner, its point) -> a minibatch gradient (P,) of a learner of this process that is
            independent of its gradient in that step; None where the steps are another's.
        preconditioner: that of the optimizer at a moment, None where its state has none yet. Called with None
            before the first step, it raises InputError for an optimizer that has none at all.
    """

    monitor: Monitor
    problem: Problem
    comm: Comm
    seed: int
    learners: int
    batch: int
    stability_limit: float | None
    at_mean: bool
    synchronous: bool
    second: Callable[[int, int, Tensor], Tensor] | None
    preconditioner: Callable[[Moment | None], Preconditioner | None]

    @functools.cached_property
    def sample(self) -> Sample:
        """The sample on which Hessians are taken."""
        return Sample(self.monitor, self.problem, self.comm, self.seed)


class Instrument(ABC):
    """Measures a run every so many steps; :meth:`measure` gives one number for each of ``columns``.

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
    #: The history's columns: name -> unit.
    columns: ClassVar[Mapping[str, str]] = {}
    #: Whether it takes the Hessian on the run's sample: it then refuses a model that has none.
    on_sample = False
    #: Whether it draws minibatches, and so must know the samples of a step.
    on_minibatches = False

    def __init__(self, run: Setting) -> None:
        self.run = run
        if self.on_minibatches:
            self.needs_batch()
        if self.on_sample:
            _ = run.sample

    @property
    def key(self) -> str:
        """The name in checkpoints of what it remembers."""
        return f"monitor_{self.name}"

    def state(self, step: int) -> dict[str, Tensor]:
        """What it remembers after ``step``: {} or one tensor, the same on all processes, under :attr:`key`.

        It goes into checkpoints: with it a resumed run gives the bits of one that never stopped.
        """
        return {}

    def restore(self, state: Tensor) -> None:  # noqa: B027 - most remember nothing
        """Take the tensor of :meth:`state` from a checkpoint; not called where that has none."""

    def see(self, gradients: Gradients) -> None:  # noqa: B027 - most instruments see no steps
        """Take the gradients of a step; called for every step."""

    @abstractmethod
    def measure(self, now: Moment) -> dict[str, float]:
        """Column -> number; a column that is left out is NaN in the history."""

    def generator(self, now: Moment, part: str = "") -> torch.Generator:
        """For random draws of this instrument at ``now``; ``part`` names one of several uses."""
        return generator(self.run.seed, f"{self.key} {part}".rstrip(), now.step)

    def needs_batch(self) -> int:
        """The samples of a step; InputError where they are not known."""
        if not self.run.batch:
            raise InputError(
                f"monitor.instruments: '{self.name}' needs the samples of a minibatch, which are not known; "
                "give batch="
            )
        return self.run.batch


def rounding(mean: Tensor) -> float:
    """The consensus distance that equal learners can have by the rounding of their ``mean`` (P,)."""
    return (torch.finfo(mean.dtype).eps * float(mean.norm())) ** 2


def on_all(comm: Comm, row: Tensor | None, like: Tensor) -> Tensor:
    """The ``row`` (P,) of the one process that has it, on all."""
    if comm.size == 1:
        assert row is not None
        return row
    return comm.totals(torch.zeros_like(like, dtype=torch.float64) if row is None else row.double()).to(like)

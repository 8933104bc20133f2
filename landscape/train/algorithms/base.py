"""What an update rule is: the loop calls its methods in the order of a step, and knows no more of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from landscape.checkpoint.history import UNITS
from landscape.core.errors import FailedError, InputError
from landscape.train.distributed.comm import Comm
from landscape.train.optimizer.base import Optimizer
from landscape.train.randomness import RESERVED, generator


class Rule(ABC):
    """One step w(t) -> w(t+1) of n learners; weights are (n, P), one row a learner.

    A step calls :meth:`begin`, :meth:`gradient_points`, then, with the directions of the optimizer,
    :meth:`finish` and :meth:`update_optimizer_state`. A process that holds some of the learners sees their
    rows only; what it needs of the others comes by ``comm``, which the loop replaces where there are several
    processes.

    What a rule remembers from step to step is in ``state``, name -> (n, …), a row for each learner, and
    ``shared``, name -> (…), the same on all processes: both go into checkpoints. The tensors are replaced,
    not written to, so that a step can be taken back; only :meth:`begin` may write to them, and the same again
    when a step is repeated.

    A rule is added to the registry under the name that recipes give, in this package or in a plugin; the
    arguments of its ``__init__`` after ``learners`` and ``seed`` are the options of the recipe::

        @registry.algorithms.add("my-rule")
        class MyRule(Rule): ...
    """

    #: The history's columns that this rule records beside the loop's own: name -> unit.
    columns: ClassVar[Mapping[str, str]] = {}
    #: What this rule draws random numbers for: the purposes that :meth:`generator` is called with.
    purposes: ClassVar[tuple[str, ...]] = ()
    #: Whether all gradients are taken at one point and only their mean matters: an optimizer whose direction
    #: is not linear in the gradient is then given that mean (see landscape.train.optimizer).
    synchronous = False
    #: Whether that point is the mean of the weights.
    at_mean = False
    #: Whether gradients come from processes at their own pace (:mod:`landscape.train.distributed.server`).
    measured = False
    #: η_0, the rate after the warm-up; the recipe sets it.
    peak_lr = 0.0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for kind, declared, taken in (
            ("column", cls.columns, UNITS.keys()),
            ("purpose", cls.purposes, RESERVED),
        ):
            for name in declared:
                if name in taken:
                    raise InputError(f"{cls.__name__}: its {kind} '{name}' is the training loop's own")

    def __init__(self, learners: int, seed: int) -> None:
        self.learners, self.seed = learners, seed
        self.comm = Comm(learners)
        self.state: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self._memory: list[Tensor] = []

    def start(self, weights: Tensor) -> None:  # noqa: B027 - most rules remember nothing
        """Set ``state`` and ``shared`` for learners that start at ``weights`` (n, P)."""

    def restore(self, state: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """Take ``state`` and ``shared`` from a checkpoint, after :meth:`start`.

        Raises:
            FailedError: where they are not this rule's, or not of so many learners.
        """
        for group, needed, given in (("rule", self.state, state), ("shared", self.shared, shared)):
            for name, tensor in needed.items():
                shape = tuple(given[name].shape) if name in given else "nothing"
                if shape != tuple(tensor.shape):
                    raise FailedError(
                        f"checkpoint: /{group}/{name} holds {shape}, its run needs {tuple(tensor.shape)}"
                    )
        self.state = {name: state[name].to(tensor) for name, tensor in self.state.items()}
        self.shared = {name: shared[name].to(tensor) for name, tensor in self.shared.items()}

    def begin(self, weights: Tensor, step: int) -> None:  # noqa: B027 - nothing to send is a fine default
        """Start whatever does not depend on the gradients, so that it overlaps their computation."""

    @abstractmethod
    def gradient_points(self, weights: Tensor) -> Tensor:
        """Where each learner's gradient is taken, (n, P)."""

    @abstractmethod
    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        """The new weights (n, P).

        Args:
            weights: those at the step's start (n, P).
            directions: each learner's descent direction (n, P), from the optimizer.
            lr: α of this step.
            step: counted from 1.
        """

    def update_optimizer_state(self, optimizer: Optimizer, step: int) -> None:  # noqa: B027 - mostly kept
        """Change ``optimizer.state`` to what the next step begins with; by default it is kept as it is."""

    def follows_mean_direction(self, step: int) -> bool:
        """Whether ``step`` moves w_a by −α times the mean of the directions, which Eq. 4's split assumes."""
        return True

    def record(self, step: int) -> dict[str, float]:
        """The values of this rule's ``columns`` at ``step``, after :meth:`finish`."""
        return {}

    @abstractmethod
    def communication_cost(self, step: int) -> tuple[float, int]:
        """(vectors of P numbers that a learner sends at ``step``, rounds of communication it waits for).

        With each learner on a machine of its own, however they are spread here. An all-reduce counts as
        2(n−1)/n vectors (what a ring sends), a neighbour as one.
        """

    @abstractmethod
    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The largest ηλ at which this rule is stable on one quadratic for all learners; None: not known.

        ``momentum`` and ``form`` ("ordinary" or "nesterov") are the optimizer's; see landscape.stability.
        """

    def generator(self, purpose: str, step: int = 0, *learner: int) -> torch.Generator:
        """:func:`landscape.train.randomness.generator` with this rule's seed.

        Raises:
            FailedError: for a ``purpose`` that the class does not declare.
        """
        if purpose not in self.purposes:
            raise FailedError(
                f"{type(self).__name__}: draws for '{purpose}', which its purposes do not declare "
                f"({', '.join(self.purposes) or 'none'})"
            )
        return generator(self.seed, purpose, step, *learner)

    @property
    def all_reduce(self) -> float:
        """Vectors that a learner sends for an average over all: 2(n−1)/n."""
        return 2 * (self.learners - 1) / self.learners

    def _new_weights(self, weights: Tensor) -> Tensor:
        """Memory for the new weights: that of the weights before ``weights``, which nobody needs any more.

        Fresh memory for a large network costs as much as the arithmetic that fills it.
        """
        if not self._memory or self._memory[0].shape != weights.shape:
            self._memory = [torch.empty_like(weights), torch.empty_like(weights)]
        return self._memory[self._memory[0].data_ptr() == weights.data_ptr()]

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        """What to tell the user at the start, one line: the limit, or more; "" if there is nothing.

        ``momentum`` None: an optimizer for which there is no limit.
        """
        limit = None if momentum is None else self.stability_limit(momentum, form)
        steps = f"steps with momentum {momentum:g}" if momentum else "plain steps"
        return "" if limit is None else f"{steps} are stable while lr·λ_max < {limit:.4g}"

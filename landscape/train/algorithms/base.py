"""What an update rule is: the loop calls begin, points, finish and carry, and knows no more of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from landscape.core.errors import FailedError
from landscape.train.distributed.comm import Comm


class Rule(ABC):
    """One step w(t) -> w(t+1) of n learners; weights are (n, P), one row a learner.

    A process that holds some of the learners sees their rows only; what it needs of the others comes by
    ``comm``, which the loop replaces where there are several processes.

    What a rule remembers from step to step is in ``state``, name -> (n, …), a row for each learner, and
    ``shared``, name -> (…), the same on all processes: both go into checkpoints. The tensors are replaced,
    not written to, so that a step can be taken back; only :meth:`begin` may write to them, and the same again
    when a step is repeated.
    """

    #: Whether all gradients are taken at one point and only their mean matters: an optimizer whose direction
    #: is not linear in the gradient is then given that mean (see landscape.train.optimizer).
    synchronous = False
    #: Whether that point is the mean of the weights.
    at_mean = False
    #: Whether gradients come from processes at their own pace (:mod:`landscape.train.distributed.server`).
    measured = False
    #: η_0, the rate after the warm-up; the recipe sets it.
    peak = 0.0

    def __init__(self, learners: int, seed: int) -> None:
        self.learners, self.seed = learners, seed
        self.comm = Comm(learners)
        self.state: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []

    def start(self, weights: Tensor) -> None:  # noqa: B027 - most rules remember nothing
        """Set ``state`` and ``shared`` for learners that start at ``weights`` (n, P)."""

    def restore(self, state: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """Those of a checkpoint, after :meth:`start`. FailedError if they are not this rule's."""
        for group, own, given in (("rule", self.state, state), ("shared", self.shared, shared)):
            for name, tensor in own.items():
                found = tuple(given[name].shape) if name in given else "nothing"
                if found != tuple(tensor.shape):
                    raise FailedError(
                        f"checkpoint: /{group}/{name} holds {found}, its run needs {tuple(tensor.shape)}"
                    )
        self.state = {name: state[name].to(own) for name, own in self.state.items()}
        self.shared = {name: shared[name].to(own) for name, own in self.shared.items()}

    def begin(self, weights: Tensor, step: int) -> None:  # noqa: B027 - nothing to send is a fine default
        """Start whatever does not depend on the gradients, so that it can overlap them."""

    @abstractmethod
    def points(self, weights: Tensor) -> Tensor:
        """(n, P): where each learner's gradient is taken."""

    @abstractmethod
    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        """The new weights (n, P), from those at the step's start and each learner's descent direction."""

    def carry(self, state: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """The optimizer's state, name -> (n, P), that the next step begins with; by default as it is."""
        return state

    def plain(self, step: int) -> bool:
        """Whether ``step`` moves w_a by −α times the mean of the directions, as Eq. 4 takes for granted."""
        return True

    def columns(self, step: int) -> dict[str, float]:
        """What the rule itself records of ``step`` in the history, after :meth:`finish`."""
        return {}

    @abstractmethod
    def traffic(self, step: int) -> tuple[float, int]:
        """(vectors of P numbers that a learner sends at ``step``, rounds of communication it waits for).

        With each learner on a machine of its own, however they are spread here. An all-reduce counts as
        2(n−1)/n vectors (what a ring sends), a neighbour as one.
        """

    @abstractmethod
    def limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The largest ηλ at which this rule is stable on one quadratic for all learners; None: not known.

        ``momentum`` and ``form`` ("ordinary" or "nesterov") are the optimizer's; see landscape.stability.
        """

    @property
    def all_reduce(self) -> float:
        """Vectors that a learner sends for an average over all: 2(n−1)/n."""
        return 2 * (self.learners - 1) / self.learners

    def _spare(self, weights: Tensor) -> Tensor:
        """Memory for the new weights: that of the weights before ``weights``, which nobody needs any more.

        Fresh memory for a large network costs as much as the arithmetic that fills it.
        """
        if not self._buffers or self._buffers[0].shape != weights.shape:
            self._buffers = [torch.empty_like(weights), torch.empty_like(weights)]
        return self._buffers[self._buffers[0].data_ptr() == weights.data_ptr()]

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        """What to tell the user at the start, one line: the limit, or more; "" if there is nothing.

        ``momentum`` None: an optimizer for which there is no limit.
        """
        limit = None if momentum is None else self.limit(momentum, form)
        steps = f"steps with momentum {momentum:g}" if momentum else "plain steps"
        return "" if limit is None else f"{steps} are stable while lr·λ_max < {limit:.4g}"

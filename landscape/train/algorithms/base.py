"""What an update rule is: the loop calls begin, points and finish each step, and knows no more of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from landscape.train.comm import Comm


class Rule(ABC):
    """One step w(t) -> w(t+1) of n learners; weights are (n, P), one row a learner.

    A process that holds some of the learners sees their rows only; what it needs of the others comes by
    ``comm``, which the loop replaces where there are several processes.
    """

    #: Whether all gradients are taken at one point and only their mean matters: an optimizer whose direction
    #: is not linear in the gradient is then given that mean (see landscape.train.optimizer).
    synchronous = False

    def __init__(self, learners: int, seed: int) -> None:
        self.learners, self.seed = learners, seed
        self.comm = Comm(learners)
        self._buffers: list[Tensor] = []

    def begin(self, weights: Tensor, step: int) -> None:  # noqa: B027 - nothing to send is a fine default
        """Start whatever does not depend on the gradients, so that it can overlap them."""

    @abstractmethod
    def points(self, weights: Tensor) -> Tensor:
        """(n, P): where each learner's gradient is taken."""

    @abstractmethod
    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        """The new weights (n, P), from those at the step's start and each learner's descent direction."""

    def _spare(self, weights: Tensor) -> Tensor:
        """Memory for the new weights: that of the weights before ``weights``, which nobody needs any more.

        Fresh memory for a large network costs as much as the arithmetic that fills it.
        """
        if not self._buffers or self._buffers[0].shape != weights.shape:
            self._buffers = [torch.empty_like(weights), torch.empty_like(weights)]
        return self._buffers[self._buffers[0].data_ptr() == weights.data_ptr()]

    def describe(self) -> str:
        """What to tell the user at the start; "" if nothing."""
        return ""

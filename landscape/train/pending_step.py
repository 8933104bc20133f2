"""A step whose mean loss over all learners is on its way to every process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from landscape.train.history import Row

#: What a step changes beside the weights: the optimizer's state, the rule's two, the learners' buffers.
State = tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class PendingStep:
    """A step that is done but for the all-reduce of its loss, and what it began with, to go back to.

    ``row`` of the history; ``weights`` (n_local, P) and ``state`` before the step; ``mean`` w_a (P,) after
    it, where it is known; ``results`` waits for the all-reduce and gives the mean over all learners of their
    loss and of ‖w_j − w_a‖², or of ‖w_j‖² where w_a is not known.
    """

    row: Row
    weights: Tensor
    state: State
    mean: Tensor | None
    results: Callable[[], list[float]]

    def wait(self) -> tuple[float, float]:
        """(loss, squares), when all processes have sent theirs; loss and consensus are in ``row`` then."""
        loss, squares = self.results()
        self.row["loss"] = loss
        self.row["consensus"] = math.nan if self.mean is None else squares
        return loss, squares

"""A step whose all-reduce of the learners' mean loss is not finished."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from landscape.train.history import Row

#: The state that a step changes in addition to the weights: of the optimizer, the rule (two) and the buffers.
State = tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class PendingStep:
    """A step that is done except for the all-reduce of its loss, and the state before it, to undo it.

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
        """Wait for the all-reduce, write loss and consensus to ``row``; (mean loss, mean squares)."""
        loss, squares = self.results()
        self.row["loss"] = loss
        self.row["consensus"] = math.nan if self.mean is None else squares
        return loss, squares

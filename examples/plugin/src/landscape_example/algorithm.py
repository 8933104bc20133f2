"""Synchronous SGD with clipped directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from landscape.plugins import SSGD, positive


class ClippedSSGD(SSGD):
    """w_j ← w_a − α c_j d_j, c_j = min(1, ``max_norm``/‖d_j‖), with d_j the direction of learner j.

    The history has one more column, ``clipped_share``: the share of the learners whose direction is clipped
    in a step. The arguments after ``learners`` and ``seed`` are options of a recipe.

    Args:
        max_norm: The largest norm of a direction. Source: ours.
    """

    columns: ClassVar[Mapping[str, str]] = {"clipped_share": "1"}

    def __init__(self, learners: int, seed: int, max_norm: float = 1.0) -> None:
        super().__init__(learners, seed)
        positive("algorithm.max_norm", max_norm)
        self.max_norm = max_norm
        self._clipped_share = 0.0

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        norms = directions.norm(dim=1, keepdim=True)
        clip = (self.max_norm / norms.clamp(min=1e-30)).clamp(max=1)  # a zero direction stays zero
        # A process has the rows of its own learners only: the count is a sum over the processes.
        self._clipped_share = self.comm.total(float((clip < 1).sum()))[0] / self.learners
        return super().finish(weights, clip * directions, lr, step)

    def record(self, step: int) -> dict[str, float]:
        return {"clipped_share": self._clipped_share}

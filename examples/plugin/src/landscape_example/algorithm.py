"""Synchronous SGD with clipped directions."""

from __future__ import annotations

from torch import Tensor

from landscape.core.options import positive
from landscape.train.algorithms.ssgd import SSGD


class ClippedSSGD(SSGD):
    """w_j ← w_a − α c_j d_j, c_j = min(1, ``max_norm``/‖d_j‖), with d_j the direction of learner j.

    Options of a recipe are the arguments after ``learners`` and ``seed``: ``algorithm.max_norm``.
    """

    def __init__(self, learners: int, seed: int, max_norm: float = 1.0) -> None:
        super().__init__(learners, seed)
        positive("algorithm.max_norm", max_norm)
        self.max_norm = max_norm

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        norms = directions.norm(dim=1, keepdim=True)
        clip = (self.max_norm / norms.clamp(min=1e-30)).clamp(max=1)  # a zero direction stays zero
        return super().finish(weights, clip * directions, lr, step)

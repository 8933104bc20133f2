"""DeMo: learners share the fastest-moving parts of their momentum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, NonNegative
from landscape.training.algorithms.base import Rule


@registry.algorithms.add("demo")
class DeMo(Rule):
    """m_j ← βm_j + αu_j, q_j = top-k(DCT m_j), m_j ← m_j − DCT⁻¹q_j; w ← w − α sign(DCT⁻¹q̄) for all.

    q̄ is the mean over the learners that sent a coefficient. The transform is the orthonormal one of blocks of
    each parameter tensor, whose sides are the largest divisors of its own up to ``chunk``; each block sends
    its ``k`` largest coefficients (Peng, Quesnelle and Kingma 2024, decoupled momentum). A bias is a row. All
    learners have the same weights, and a momentum of their own; u_j is the optimizer's direction, the
    gradient of plain SGD. A weight whose part of q̄ is rounding only still moves by α.

    Args:
        decay: β. Source: the authors' program.
        k: Coefficients that a block sends. Source: the authors' program.
        chunk: The largest side of a block. Source: the authors' program.
        weight_decay: λ: first w ← (1 − αλ) w. Source: the authors' program.
    """

    label, color = "DeMo", "#6699CC"

    def __init__(
        self,
        learners: int,
        seed: int,
        decay: BelowOne = 0.999,
        k: Count = 32,
        chunk: Count = 64,
        weight_decay: NonNegative = 0.0,
    ) -> None:
        super().__init__(learners, seed)
        self.decay, self.k, self.chunk, self.weight_decay = decay, k, chunk, weight_decay
        self._blocks: list[tuple[slice, tuple[int, int, int, int], Tensor, Tensor]] = []
        self._sent = 0.0

    def start(self, weights: Tensor) -> None:
        self.state = {"momentum": torch.zeros_like(weights)}
        shapes: list[tuple[slice, tuple[int, ...]]] = [(slot.place, slot.shape) for slot in self.layout.slots]
        self._blocks, count = [], 0
        for place, shape in shapes or [(slice(None), (weights.shape[1],))]:
            if len(shape) > 2:
                raise InputError(
                    f"algorithm.name: 'demo' is not allowed, it takes vectors and matrices, and a parameter "
                    f"of this model has shape {tuple(shape)}"
                )
            rows, columns = (1, 1, *shape)[-2:]
            h, w = (
                max(d for d in range(1, min(side, self.chunk) + 1) if side % d == 0)
                for side in (rows, columns)
            )
            of_rows, of_columns = (torch.from_numpy(dct(np.eye(s), norm="ortho")).to(weights) for s in (h, w))
            self._blocks.append((place, (rows // h, h, columns // w, w), of_rows, of_columns))
            count += rows // h * (columns // w) * min(self.k, h * w)
        self._sent = 2 * count / weights.shape[1]  # values and their places

    def _transformed(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each tensor's place, and the coefficients of its blocks (n, blocks, blocks, h, w)."""
        for place, shape, of_rows, of_columns in self._blocks:
            blocks = rows[:, place].reshape(-1, *shape).transpose(2, 3)
            yield place, of_rows.T @ blocks @ of_columns

    def _restored(self, coefficients: Tensor) -> Tensor:
        """The rows whose coefficients these are, (n, P) both."""
        rows = torch.empty_like(coefficients)
        for place, (y, h, x, w), of_rows, of_columns in self._blocks:
            blocks = of_rows @ coefficients[:, place].reshape(-1, y, x, h, w) @ of_columns.T
            rows[:, place] = blocks.transpose(2, 3).flatten(1)
        return rows

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        momentum = torch.add(self.decay * self.state["momentum"], directions, alpha=lr)
        sent, chosen = torch.zeros_like(weights), torch.zeros_like(weights)
        for place, blocks in self._transformed(momentum):
            flat = blocks.flatten(3)
            largest = flat.abs().topk(min(self.k, flat.shape[-1])).indices
            mask = torch.zeros_like(flat).scatter_(-1, largest, 1.0)
            sent[:, place], chosen[:, place] = (flat * mask).flatten(1), mask.flatten(1)
        self.state = {"momentum": momentum - self._restored(sent)}
        total, count = self.comm.fresh_mean(sent, "sent"), self.comm.fresh_mean(chosen, "chosen")
        update = self._restored((total / count.clamp(min=1 / (2 * self.learners)))[None]).sign_()
        kept = torch.mul(weights, 1 - lr * self.weight_decay, out=self._new_weights(weights))
        return kept.sub_(update, alpha=lr)

    def follows_mean_direction(self, step: int) -> bool:
        return False

    def communication_cost(self, step: int) -> tuple[float, int]:
        return (self.learners - 1) * self._sent, 1  # each learner's part goes round to all others

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is none: steps have one size, whatever the gradient."""
        return None

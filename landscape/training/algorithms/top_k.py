"""Rules whose learners send the largest coefficients of each block of a parameter: DeMo, and SparseLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import BelowOne, Count, NonNegative, Positive
from landscape.limits.rules import max_period_step
from landscape.training.algorithms.base import Rule


class TopK(Rule):
    """A rule whose learners send a part of a vector by blocks, and keep the rest for later: error feedback.

    The sides of a block are the largest divisors of the tensor's own up to ``chunk``; a bias is a row.
    """

    def _cut(
        self, weights: Tensor, chunk: int, kept: Callable[[int], int], basis: Callable[[int], Array]
    ) -> None:
        """Fix the blocks: of so many coefficients in ``basis`` (s, s), a block sends ``kept``."""
        shapes: list[tuple[slice, tuple[int, ...]]] = [(slot.place, slot.shape) for slot in self.layout.slots]
        self._blocks: list[tuple[slice, tuple[int, int, int, int], int, Tensor, Tensor]] = []
        count = 0
        for place, shape in shapes or [(slice(None), (weights.shape[1],))]:
            if len(shape) > 2:
                raise InputError(
                    f"algorithm.name: '{self.label.lower()}' is not allowed, it takes vectors and matrices, "
                    f"and a parameter of this model has shape {tuple(shape)}"
                )
            rows, columns = (1, 1, *shape)[-2:]
            h, w = (
                max(d for d in range(1, min(side, chunk) + 1) if side % d == 0) for side in (rows, columns)
            )
            of_rows, of_columns = (torch.from_numpy(basis(s)).to(weights) for s in (h, w))
            k = min(kept(h * w), h * w)
            self._blocks.append((place, (rows // h, h, columns // w, w), k, of_rows, of_columns))
            count += rows // h * (columns // w) * k
        self._sent = 2 * count / weights.shape[1]  # values and their places

    def _largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The coefficients that learners with ``rows`` (n, P) send, and 1 where one is sent; both (n, P)."""
        sent, chosen = torch.empty_like(rows), torch.empty_like(rows)
        for place, shape, k, of_rows, of_columns in self._blocks:
            blocks = rows[:, place].reshape(-1, *shape).transpose(2, 3)
            flat = (of_rows.T @ blocks @ of_columns).flatten(3)
            mask = torch.zeros_like(flat).scatter_(-1, flat.abs().topk(k).indices, 1.0)
            sent[:, place], chosen[:, place] = (flat * mask).flatten(1), mask.flatten(1)
        return sent, chosen

    def _restored(self, coefficients: Tensor) -> Tensor:
        """The rows whose coefficients these are, (n, P) both."""
        rows = torch.empty_like(coefficients)
        for place, (y, h, x, w), _, of_rows, of_columns in self._blocks:
            blocks = of_rows @ coefficients[:, place].reshape(-1, y, x, h, w) @ of_columns.T
            rows[:, place] = blocks.transpose(2, 3).flatten(1)
        return rows

    def _mean_of_senders(self, sent: Tensor, chosen: Tensor) -> Tensor:
        """(1, P): of each coefficient the mean over the learners that sent it; 0 where none did."""
        total, count = self.comm.fresh_mean(sent, "sent"), self.comm.fresh_mean(chosen, "chosen")
        return (total / count.clamp(min=1 / (2 * self.learners)))[None]


@registry.algorithms.add("demo")
class DeMo(TopK):
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

    def start(self, weights: Tensor) -> None:
        self.state = {"momentum": torch.zeros_like(weights)}
        self._cut(weights, self.chunk, lambda size: self.k, lambda side: dct(np.eye(side), norm="ortho"))

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        momentum = torch.add(self.decay * self.state["momentum"], directions, alpha=lr)
        sent, chosen = self._largest(momentum)
        self.state = {"momentum": momentum - self._restored(sent)}
        update = self._restored(self._mean_of_senders(sent, chosen)).sign_()
        kept = torch.mul(weights, 1 - lr * self.weight_decay, out=self._new_weights(weights))
        return kept.sub_(update, alpha=lr)

    def follows_mean_direction(self, step: int) -> bool:
        return False

    def communication_cost(self, step: int) -> tuple[float, int]:
        return (self.learners - 1) * self._sent, 1  # each learner's part goes round to all others

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is none: steps have one size, whatever the gradient."""
        return None


@registry.algorithms.add("sparseloco")
class SparseLoCo(TopK):
    """After ``period`` H steps e_j ← βe_j + x − w_j, q_j = top-k(e_j), e_j ← e_j − q_j, x ← x − νq̄, w_j ← x.

    x is where all learners began the period (Sarfi et al. 2025, arXiv 2508.15706). It is local SGD whose
    learners send the largest numbers of what they have moved by, in blocks of each parameter tensor whose
    sides are the largest divisors of its own up to ``chunk``. What is not sent yet, e_j, takes the place of
    DiLoCo's outer momentum; with ``share`` = 1 the rule is DiLoCo without outer momentum. Their inner
    optimizer is AdamW, whose state is kept; here it is the recipe's. Values are sent in full precision: the
    paper's quantization to 2 bits is not simulated.

    Args:
        period: H. Unit: steps.
        share: The share of a block's numbers that is sent, at least one of them. Source: the authors'
            program, 128 of 64·64.
        decay: β. Source: the authors' program.
        chunk: The largest side of a block. Source: the authors' program.
        outer_lr: ν. Source: the authors' program.
        average: "all": q̄ is the mean of q_j over all learners. "senders": that of each number over the
            learners that sent it, as in the authors' program. Source: the equations of the paper.
    """

    label, color = "SparseLoCo", "#0099AA"
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        share: Positive = 1 / 32,
        decay: BelowOne = 0.95,
        chunk: Count = 64,
        outer_lr: Positive = 1.0,
        average: Literal["all", "senders"] = "all",
    ) -> None:
        super().__init__(learners, seed)
        if share > 1:
            raise InputError(f"algorithm.share: {share} is not allowed, it must be > 0 and ≤ 1")
        self.period, self.share, self.decay, self.chunk = period, share, decay, chunk
        self.outer_lr, self.average = outer_lr, average

    def start(self, weights: Tensor) -> None:
        self.state, self.shared = {"error": torch.zeros_like(weights)}, {"anchor": weights[0].clone()}
        self._cut(weights, self.chunk, lambda size: max(1, round(self.share * size)), np.eye)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        if step % self.period:
            return new
        anchor = self.shared["anchor"]
        error = torch.add(anchor - new, self.state["error"], alpha=self.decay)
        sent, chosen = self._largest(error)
        if self.average == "all":
            mean = self.comm.fresh_mean(sent, "sent")[None]
        else:
            mean = self._mean_of_senders(sent, chosen)
        self.state = {"error": error - self._restored(sent)}
        self.shared = {"anchor": anchor - self.outer_lr * self._restored(mean)[0]}
        return new.copy_(self.shared["anchor"])

    def follows_mean_direction(self, step: int) -> bool:
        return step % self.period != 0

    def communication_cost(self, step: int) -> tuple[float, int]:
        return (0.0, 0) if step % self.period else ((self.learners - 1) * self._sent, 1)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is known where everything is sent: that of DiLoCo without outer momentum."""
        if self.share < 1:
            return None
        return max_period_step(self.period, momentum, form, outer="nesterov", outer_lr=self.outer_lr)

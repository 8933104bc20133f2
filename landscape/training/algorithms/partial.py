"""Rules that average a part of the weights in a step: SPARTA, and streaming DiLoCo by fragments.

A part is the numbers of its coordinates in θ, the same on all processes: ``comm.fresh_mean(w[:, part])``
averages it, and ``communication_cost`` counts its share of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, Natural, Positive
from landscape.limits import max_stable_step
from landscape.training.algorithms.base import Rule


@registry.algorithms.add("sparta")
class Sparta(Rule):
    """w_j ← w_j − α u_j; then a random part of the weights, drawn anew in each step, becomes the mean of all.

    Sparse parameter averaging (SPARTA, Baioumy and Cheema 2025): the part has round(``share`` · P) numbers,
    at least one, the same ones for all learners. Each learner's optimizer keeps a state of its own.

    Args:
        share: The share of the weights that a step averages. Source: Baioumy and Cheema 2025.
    """

    label, color = "SPARTA", "#8C6D31"
    purposes = ("part",)
    lr_is_factor = True

    def __init__(self, learners: int, seed: int, share: Positive = 0.005) -> None:
        super().__init__(learners, seed)
        if share > 1:
            raise InputError(f"algorithm.share: {share} is not allowed, it must be > 0 and ≤ 1")
        self.share = share
        self._sent = share  # that of the last step, rounded to whole numbers

    def part(self, step: int, size: int) -> Tensor:
        """(k,), the coordinates of P = ``size`` that ``step`` averages, in increasing order."""
        k = max(1, round(self.share * size))
        rng = np.random.default_rng(self.generator("part", step).initial_seed())
        return torch.from_numpy(np.sort(rng.choice(size, k, replace=False, shuffle=False)))

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        part = self.part(step, weights.shape[1]).to(weights.device)
        self._sent = len(part) / weights.shape[1]
        new[:, part] = self.comm.fresh_mean(new[:, part], "part")
        return new

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self._sent * self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit without momentum is the mean's, 2: averaging a part makes no disagreement larger."""
        return None if momentum else max_stable_step()


@registry.algorithms.add("streaming-diloco")
class StreamingDiLoCo(Rule):
    """DiLoCo whose outer steps are of one fragment of θ at a time (Douillard et al. 2025, arXiv 2501.18512).

    The layers are dealt out to F fragments in turn. After every ``period`` H steps, at evenly spread offsets,
    fragment p is averaged: Δ_p = x_p − w̄_p, v_p ← μ v_p + Δ_p, x_p ← x_p − ν (Δ_p + μ v_p), Nesterov's.
    ``delay`` τ steps later each learner takes it: w_jp ← a w_jp + (1 − a) x_p. One fragment with τ = 0 and
    a = 0 is DiLoCo. The message is not quantized, and is here waited for at once, so that τ changes the
    numbers as in the paper and not the time.

    Args:
        period: H. Unit: steps.
        fragments: F, at most H and the number of layers.
        delay: τ, below H. Unit: steps. Source: ours; 0 takes a fragment at once.
        own_share: a, the share of a learner's own weights that it keeps. Source: ours; 0 is DiLoCo's.
        outer_lr: ν. Source: Douillard et al. 2023.
        outer_momentum: μ. Source: Douillard et al. 2023.
    """

    label, color = "streaming DiLoCo", "#994455"
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        fragments: Count,
        delay: Natural = 0,
        own_share: BelowOne = 0.0,
        outer_lr: Positive = 0.7,
        outer_momentum: BelowOne = 0.9,
    ) -> None:
        super().__init__(learners, seed)
        if fragments > period:
            raise InputError(
                f"algorithm.fragments: {fragments} is not allowed, it must be ≤ the period {period}"
            )
        if delay >= period:
            raise InputError(f"algorithm.delay: {delay} is not allowed, it must be < the period {period}")
        self.period, self.delay, self.own_share = period, delay, own_share
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.offsets = [(p + 1) * period // fragments % period for p in range(fragments)]
        self.fragments: list[Tensor] = []
        self.shares = [1 / fragments] * fragments

    def start(self, weights: Tensor) -> None:
        size, count = weights.shape[1], len(self.offsets)
        layers = [
            torch.cat([torch.arange(size)[slot.place] for slot in slots])
            for slots in self.layout.groups("layer").values()
        ]
        layers = layers or [*torch.arange(size)[:, None]]  # of no network
        if count > len(layers):
            raise InputError(
                f"algorithm.fragments: {count} is not allowed, it must be ≤ the {len(layers)} layers with "
                "parameters of this model"
            )
        self.fragments = [torch.cat(layers[p::count]).to(weights.device) for p in range(count)]
        self.shares = [len(part) / size for part in self.fragments]
        self.shared = {"anchor": weights[0].clone(), "slow_momentum": torch.zeros_like(weights[0])}

    def _due(self, step: int) -> Iterator[int]:
        """The fragments of which a period ends with ``step``."""
        return (p for p, at in enumerate(self.offsets) if step > 0 and step % self.period == at)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        for p in self._due(step):
            part = self.fragments[p]
            anchor, slow = (self.shared[name].clone() for name in ("anchor", "slow_momentum"))
            moved = anchor[part] - self.comm.fresh_mean(new[:, part], "fragment")
            slow[part] = self.outer_momentum * slow[part] + moved
            anchor[part] -= self.outer_lr * (moved + self.outer_momentum * slow[part])
            self.shared = {"anchor": anchor, "slow_momentum": slow}
        for p in self._due(step - self.delay):
            part = self.fragments[p]
            outer = self.shared["anchor"][part].expand(len(new), -1)
            new[:, part] = torch.lerp(outer, new[:, part], self.own_share)
        return new

    def follows_mean_direction(self, step: int) -> bool:
        return not any(True for _ in self._due(step - self.delay))

    def communication_cost(self, step: int) -> tuple[float, int]:
        due = [self.shares[p] for p in self._due(step)]
        return sum(due) * self.all_reduce, len(due)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is not known."""
        return None

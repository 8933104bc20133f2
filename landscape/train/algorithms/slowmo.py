"""Outer steps over periods of local ones: SlowMo, and DiLoCo's Nesterov momentum."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import below_one, positive
from landscape.train.algorithms.local_sgd import Buffers, LocalSGD


class _Outer(LocalSGD):
    """Local SGD whose averages are the gradients of an outer optimizer, at the ``anchor`` x_old."""

    def start(self, weights: Tensor) -> None:
        self.shared = {"anchor": weights[0].clone(), "slow_momentum": torch.zeros_like(weights[0])}

    def _anchored(self, mean: Tensor) -> Tensor:
        self.shared = self.shared | {"anchor": mean.clone()}
        return mean

    def _moved(self, anchor: Tensor, slow: Tensor) -> Tensor:
        self.shared = {"anchor": anchor, "slow_momentum": slow}
        return anchor

    def follows_mean_direction(self, step: int) -> bool:
        return not self._ends_period(step)


@registry.algorithms.add("slowmo")
class SlowMo(_Outer):
    """After every ``period`` steps average to x̄, then u ← βu + (x_old − x̄)/γ, x_old ← x_old − a γ u.

    γ is the learning rate of the period's last step (Wang et al. 2020, Algorithm 1; LocalSGD-2021). a = 1 and
    β = 0 is local SGD, whose options it has.

    Args:
        slow_lr: a. Source: ours; with a = 1 the outer step without momentum is the average itself.
        slow_momentum: β. Source: ours.
    """

    label, color = "SlowMo", "#CC79A7"
    lr_is_factor = False

    def __init__(
        self,
        learners: int,
        seed: int,
        period: int,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        start: int = 0,
        nodes: int = 1,
        node_period: int = 1,
        mixing: str = "none",
        order: Literal["awc", "atc"] = "awc",
        buffers: Buffers = "keep",
    ) -> None:
        super().__init__(learners, seed, period, start, nodes, node_period, mixing, order, buffers)
        positive("algorithm.slow_lr", slow_lr)
        below_one("algorithm.slow_momentum", slow_momentum)
        self.slow_lr, self.slow_momentum = slow_lr, slow_momentum

    def _outer(self, mean: Tensor, lr: float) -> Tensor:
        anchor, slow = self.shared["anchor"], self.slow_momentum * self.shared["slow_momentum"]
        if lr:  # at the very end of a cosine schedule it is 0, and so is the step
            slow = slow + (anchor - mean) / lr
        return self._moved(anchor - self.slow_lr * lr * slow, slow)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        return self._period_limit(momentum, form, "slowmo", self.slow_lr, self.slow_momentum)


@registry.algorithms.add("diloco")
class DiLoCo(_Outer):
    """After every ``period`` steps Δ = x_old − x̄, v ← μv + Δ, x_old ← x_old − ν (Δ + μv): Nesterov's.

    The rule is Algorithm 1 of Douillard et al. 2023. Their inner optimizer is AdamW, whose state is kept;
    here it is the recipe's. ``period``, ``start`` and ``buffers`` are those of local SGD.

    Args:
        outer_lr: ν. Source: Douillard et al. 2023.
        outer_momentum: μ. Source: Douillard et al. 2023.
    """

    label, color = "DiLoCo", "#332288"

    def __init__(
        self,
        learners: int,
        seed: int,
        period: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        start: int = 0,
        buffers: Buffers = "keep",
    ) -> None:
        super().__init__(learners, seed, period, start, buffers=buffers)
        positive("algorithm.outer_lr", outer_lr)
        below_one("algorithm.outer_momentum", outer_momentum)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    def _outer(self, mean: Tensor, lr: float) -> Tensor:
        anchor = self.shared["anchor"]
        moved = anchor - mean
        v = self.outer_momentum * self.shared["slow_momentum"] + moved
        return self._moved(anchor - self.outer_lr * (moved + self.outer_momentum * v), v)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        return self._period_limit(momentum, form, "nesterov", self.outer_lr, self.outer_momentum)

"""Asynchronous decentralised parallel SGD, in step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import positive
from landscape.stability.rules import max_matching_step, max_mixing_step
from landscape.train.algorithms.async_sgd import DELAY
from landscape.train.algorithms.base import Rule
from landscape.train.algorithms.dpsgd import DPSGD


@registry.algorithms.add("ad-psgd")
class ADPSGD(DPSGD):
    """w_j(t+1) = Σ_k M_jk(t) w_k(t) − α ∇L^{μ_j}(w_j(t−d)): pairs average while gradients are under way.

    AD-PSGD (Lian et al. 2018): X ← X W_k − γ ∂g(X̂_k), W_k averaging one random pair and X̂_k older weights.
    There one learner acts at a time, at its own pace; here all act in each step, paired at random, which is
    the same with n events a step and no learner left behind. τ = 0 is DPSGD in AWC order.

    Args:
        delay: τ, the age of gradients. Unit: steps. Source: ours; a gradient is begun one exchange ago.
        schedule: "fixed": d is τ for all; "random": each learner draws d from 0…τ at each step (bounded
            staleness, Assumption 1 of Lian et al. 2018). Source: ours.
        mixing: The mixing matrix, as for dpsgd. Source: Lian et al. 2018.
    """

    label, color = "AD-PSGD", "#56B4E9"
    columns = DELAY
    purposes = ("delay",)

    def __init__(
        self,
        learners: int,
        seed: int,
        delay: int = 1,
        schedule: Literal["fixed", "random"] = "fixed",
        mixing: str = "random-matching",
    ) -> None:
        super().__init__(learners, seed, mixing)
        positive("algorithm.delay", delay, least=0)
        self.delay, self.schedule = delay, schedule
        self._slots, self._mean_delay = torch.empty(0), 0.0

    def start(self, weights: Tensor) -> None:
        self.state = {"past": weights[:, None].repeat(1, self.delay + 1, 1)}

    def begin(self, weights: Tensor, step: int) -> None:
        super().begin(weights, step)
        size = self.delay + 1
        self.state["past"][:, (step - 1) % size] = weights
        longest = min(self.delay, step - 1)
        delays = torch.full((self.learners,), longest)
        if self.schedule == "random":
            draw = self.generator("delay", step)
            delays = torch.randint(longest + 1, (self.learners,), generator=draw)
        self._mean_delay = float(delays.double().mean())
        self._slots = (step - 1 - delays[self.comm.local]) % size

    def gradient_points(self, weights: Tensor) -> Tensor:
        slots = self._slots.to(weights.device)
        return self.state["past"][torch.arange(len(weights), device=weights.device), slots]

    def record(self, step: int) -> dict[str, float]:
        return {"delay": self._mean_delay}

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Of random pairs in mean square, and with the fixed schedule only."""
        if not self.delay:
            return super().stability_limit(momentum, form)
        if self.schedule == "random" or len(self.mixing.cycle) > 1:
            return None
        if self.mixing.cycle or self.learners == 1:
            return max_mixing_step(self.mixing.modes[0], momentum, form, "awc", self.delay)
        return None if momentum else max_matching_step(float(self.mixing.modes.real[0, 0]), self.delay)

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if not self.delay:
            return super().describe(momentum, form)
        stable = Rule.describe(self, momentum, form) or "the limit is not known"
        return self.mixing.describe("awc", f"with gradients {self.delay} steps old {stable}")

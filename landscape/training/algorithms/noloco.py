"""Local steps and outer steps between pairs of learners, without an average of all: NoLoCo."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import BelowOne, Count, Positive
from landscape.limits.rules import max_paired_outer_step
from landscape.training.algorithms.base import Rule
from landscape.training.topology.mixing import Mixing


@registry.algorithms.add("noloco")
class NoLoCo(Rule):
    """NoLoCo: after ``period`` H steps δ_j ← μδ_j + ν (w̄ − φ̄) + γ (φ̄ − φ_j), φ_j ← φ_j + δ_j, w_j ← φ_j.

    w̄ and φ̄ are means over learner j and its random partner, φ_j are its weights at the end of the last
    period (Kolehmainen et al. 2025, modified Nesterov momentum). γ = ν as in the authors' program, so that
    only w_j has to be sent: δ_j ← μδ_j + ν (w̄ − φ_j). An odd learner is its own partner.

    Args:
        period: H. Unit: steps.
        outer_lr: ν. Source: the authors' program.
        outer_momentum: μ. Source: the authors' program.
        mixing: Who averages with whom at the end of a period, as for dpsgd; a cycle goes on by one matrix
            from period to period. Source: Kolehmainen et al. 2025.
    """

    label, color = "NoLoCo", "#44AA99"
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        outer_lr: Positive = 0.7,
        outer_momentum: BelowOne = 0.5,
        mixing: str = "random-matching",
    ) -> None:
        super().__init__(learners, seed)
        self.period, self.mixing = period, Mixing(mixing, learners, seed)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    def start(self, weights: Tensor) -> None:
        self.state = {"anchor": weights.clone(), "slow_momentum": torch.zeros_like(weights)}

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        if step % self.period:
            return new
        anchor = self.state["anchor"]
        mixed = self.comm.mix(new, self.mixing, step // self.period)()
        slow = torch.add(
            self.outer_momentum * self.state["slow_momentum"], mixed - anchor, alpha=self.outer_lr
        )
        self.state = {"anchor": anchor + slow, "slow_momentum": slow}
        return new.copy_(self.state["anchor"])

    def follows_mean_direction(self, step: int) -> bool:
        return step % self.period != 0

    def communication_cost(self, step: int) -> tuple[float, int]:
        ends = step % self.period == 0
        return (self.mixing.degree(step // self.period), 1) if ends else (0.0, 0)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is known without momentum, for one matrix, and for random pairs in mean square."""
        if momentum or len(self.mixing.cycle) > 1:
            return None
        modes, drawn = self.mixing.modes[0], not self.mixing.cycle and self.learners > 1
        return max_paired_outer_step(self.period, self.outer_lr, self.outer_momentum, modes, drawn)

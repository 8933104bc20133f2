"""Decentralised parallel SGD."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.stability import max_stable_step
from landscape.stability.rules import max_matching_momentum_step, max_mixing_step
from landscape.train.algorithms.base import Rule
from landscape.train.optimizer.base import OptimizerMemory
from landscape.train.processes.comm import Exchange
from landscape.train.topology.mixing import Mixing


@registry.algorithms.add("dpsgd")
class DPSGD(Rule):
    """Each learner takes its gradient at its own weights and averages with its neighbours.

    Args:
        mixing: The mixing matrix M: a topology by name, such as full, ring(2) or random-matching, or a .csv,
            .txt or .npy file with a doubly stochastic matrix. Source: DPSGD-2020, Figure 2(a).
        order: "awc" (adapt with combine): w_j ← Σ_k M_jk w_k − α ∇L^{μ_j}(w_j); "atc" (adapt then combine):
            w_j ← Σ_k M_jk (w_k − α ∇L^{μ_k}(w_k)). Source: DPSGD-2020, Eq. 2.
        buffers: "keep": the optimizer's state of each learner is its own. "mix": it is averaged with the
            weights, v_j ← Σ_k M_jk v_k after the step, by the matrix of the step; with momentum in ATC order
            that is DmSGD (Yu et al. 2019; Ying et al. 2021, Algorithm 1). Source: DPSGD-2020's update.
    """

    label, color = "DPSGD", "#009E73"
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        mixing: str = "full",
        order: Literal["awc", "atc"] = "awc",
        buffers: Literal["keep", "mix"] = "keep",
    ) -> None:
        super().__init__(learners, seed)
        self.mixing, self.order, self.buffers = Mixing(mixing, learners, seed), order, buffers
        self._mixed_buffers = 0
        self._mixed = Exchange(torch.empty(0), lambda: torch.empty(0))

    def begin(self, weights: Tensor, step: int) -> None:
        if self.order == "awc":
            self._mixed = self.comm.mix(weights, self.mixing, step)

    def gradient_points(self, weights: Tensor) -> Tensor:
        return weights

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        if self.order == "awc":
            return torch.sub(self._mixed(), directions, alpha=lr, out=self._new_weights(weights))
        stepped = torch.sub(weights, directions, alpha=lr)
        return self._new_weights(weights).copy_(self.comm.mix(stepped, self.mixing, step)())

    def finish_moved(self, weights: Tensor, points: Tensor, moved: Tensor, lr: float, step: int) -> Tensor:
        """In AWC order w_j − α u_j + Σ_k M_jk (w_k − w_j), for which three passes over memory are enough."""
        if self.order == "awc" and self.lr_is_factor and points.data_ptr() == weights.data_ptr():
            return self._mixed.add_to(moved)
        return super().finish_moved(weights, points, moved, lr, step)

    def update_optimizer_state(self, optimizer: OptimizerMemory, step: int) -> None:
        mixed = [k for k in optimizer.state if k not in optimizer.counters] if self.buffers == "mix" else []
        self._mixed_buffers = len(mixed)
        if mixed:
            optimizer.state = optimizer.state | {
                k: self.comm.mix(optimizer.state[k], self.mixing, step)().clone() for k in mixed
            }

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.mixing.degree(step) * (1 + self._mixed_buffers), 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Without momentum that of the mixing in this order; of random matching in mean square."""
        if not momentum:
            return self.mixing.stability_limit if self.order == "awc" else max_stable_step()
        mixed = self.buffers == "mix"
        if not self.mixing.cycle and self.learners > 1:
            rho = float(self.mixing.modes.real[0, 0])
            return max_matching_momentum_step(rho, momentum, form, self.order, mixed)
        fixed = len(self.mixing.cycle) == 1 or self.learners == 1
        modes = self.mixing.modes[0]
        return max_mixing_step(modes, momentum, form, self.order, mixed=mixed) if fixed else None

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if momentum == 0:
            return self.mixing.describe(self.order)
        stable = super().describe(momentum, form) or "the limit with this optimizer is not known"
        return self.mixing.describe(self.order, stable)

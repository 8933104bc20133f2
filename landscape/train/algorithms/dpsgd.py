"""Decentralised parallel SGD."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.stability import max_stable_step
from landscape.stability.rules import max_mixing_step
from landscape.train.algorithms.base import Rule
from landscape.train.distributed.exchange import Exchange
from landscape.train.mixing import Mixing


@registry.algorithms.add("dpsgd")
class DPSGD(Rule):
    """Each learner takes its gradient at its own weights and averages with its neighbours.

    Args:
        mixing: The mixing matrix M: full, ring(k), torus, torus(RxC), exponential, one-peer-exponential,
            hypercube, random-matching, star, or a .csv, .txt or .npy file with a doubly stochastic matrix.
            Source: DPSGD-2020, Figure 2(a).
        order: "awc" (adapt with combine): w_j ← Σ_k M_jk w_k − α ∇L^{μ_j}(w_j); "atc" (adapt then combine):
            w_j ← Σ_k M_jk (w_k − α ∇L^{μ_k}(w_k)). Source: DPSGD-2020, Eq. 2.
    """

    lr_is_factor = True

    def __init__(
        self, learners: int, seed: int, mixing: str = "full", order: Literal["awc", "atc"] = "awc"
    ) -> None:
        super().__init__(learners, seed)
        self.mixing, self.order = Mixing(mixing, learners, seed), order
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

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.mixing.degree(step), 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Without momentum that of the mixing in this order; of random matching in mean square."""
        if not momentum:
            return self.mixing.stability_limit if self.order == "awc" else max_stable_step()
        fixed = len(self.mixing.cycle) == 1
        return max_mixing_step(self.mixing.modes[0], momentum, form, self.order) if fixed else None

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if momentum == 0:
            return self.mixing.describe(self.order)
        stable = super().describe(momentum, form) or "the limit with this optimizer is not known"
        return self.mixing.describe(self.order, stable)

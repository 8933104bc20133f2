"""Decentralised SGD with adaptive consensus."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import positive
from landscape.train.algorithms.dpsgd import DPSGD


@registry.algorithms.add("dsgd-ac")
class DSGDAC(DPSGD):
    """w_j ← (1−γ_t) w_j + γ_t Σ_k M_jk w_k − α_t ∇L^{μ_j}(w_j), γ_t = (α_t/α_0)^p: less mixing as α falls.

    So the spread stays while the rate goes down (Wang and Johansson 2026, "DSGD-AC"). α_0 is the schedule's
    rate after the warm-up. While α_t = α_0 it is DPSGD in AWC order.

    Args:
        mixing: The mixing matrix, as for dpsgd. Source: DPSGD-2020, Figure 2(a).
        power: The power p. Source: ours.
    """

    label, color = "DSGD-AC", "#999933"
    lr_is_factor = False
    uses_peak_lr = True

    def __init__(self, learners: int, seed: int, mixing: str = "full", power: float = 1.0) -> None:
        super().__init__(learners, seed, mixing)
        positive("algorithm.power", power, least=0)
        self.power = power

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        gamma = (lr / self.peak_lr) ** self.power
        new = torch.lerp(weights, self._mixed(), gamma, out=self._new_weights(weights))
        return new.sub_(directions, alpha=lr)

"""Synchronous SGD, and with Gaussian noise on the weights, "SSGD*"."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import NonNegative
from landscape.limits import max_stable_step
from landscape.training.algorithms.base import Rule


@registry.algorithms.add("ssgd")
class SSGD(Rule):
    """w_j ← w_a − α ∇L^{μ_j}(w_a) (DPSGD-2020, Eq. 1): every learner starts each step from the mean.

    With one learner it is plain SGD.
    """

    label, color = "SSGD", "#D55E00"
    synchronous = True
    at_mean = True
    lr_is_factor = True

    def gradient_points(self, weights: Tensor) -> Tensor:
        return self.comm.mean(weights).expand_as(weights)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        return torch.sub(self.gradient_points(weights), directions, alpha=lr, out=self._new_weights(weights))

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        return max_stable_step(0, momentum, form)


@registry.algorithms.add("ssgd*")
class SSGDNoise(SSGD):
    """w_j ← w_a − α ∇L^{μ_j}(w_a) + ξ, ξ ~ N(0, σ²I) drawn anew each step (DPSGD-2020, section 2.1).

    The paper does not say whether each learner has noise of its own. Here all learners add the same ξ, so
    that the mean, the synchronized model, has noise of standard deviation ``sigma`` whatever n is.

    Args:
        sigma: Standard deviation σ of the noise on each weight.
    """

    label, color = "SSGD*", "#0072B2"
    purposes = ("noise",)

    def __init__(self, learners: int, seed: int, sigma: NonNegative) -> None:
        super().__init__(learners, seed)
        self.sigma = sigma

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        draw = torch.randn(weights.shape[1], generator=self.generator("noise", step))
        return super().finish(weights, directions, lr, step) + self.sigma * draw.to(weights)

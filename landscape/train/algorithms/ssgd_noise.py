"""Synchronous SGD with Gaussian noise on the weights, "SSGD*"."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import positive
from landscape.train.algorithms.ssgd import SSGD


@registry.algorithms.add("ssgd*")
class SSGDNoise(SSGD):
    """w_j ← w_a − α ∇L^{μ_j}(w_a) + ξ, ξ ~ N(0, σ²I) drawn anew each step (DPSGD-2020, section 2.1).

    The paper does not say whether each learner has noise of its own. Here all learners add the same ξ, so
    that the mean, the synchronised model, has noise of standard deviation ``sigma`` whatever n is.

    Args:
        sigma: Standard deviation σ of the noise on each weight.
    """

    label, color = "SSGD*", "#0072B2"
    purposes = ("noise",)

    def __init__(self, learners: int, seed: int, sigma: float) -> None:
        super().__init__(learners, seed)
        positive("algorithm.sigma", sigma, least=0)
        self.sigma = sigma

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        draw = torch.randn(weights.shape[1], generator=self.generator("noise", step))
        return super().finish(weights, directions, lr, step) + self.sigma * draw.to(weights)

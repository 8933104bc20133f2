"""Rates that adapt to each parameter tensor: LARS and LAMB, for large batches."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.options import below_one, positive
from landscape.problem.layout import Layout
from landscape.train.optimizer.base import Optimizer


@registry.optimizers.add("lars")
class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, Algorithm 1), for large batches.

    For each parameter tensor, biases and normalisation included: v ← m v + r (g + λ p), u = v,
    r = ``trust`` ‖p‖ / (‖g‖ + λ ‖p‖). The variant of common implementations: the learning rate outside v, and
    r = 1 where ‖p‖ or ‖g‖ is 0 (a tensor that starts at zero could never leave it).

    Args:
        momentum: m. Source: You, Gitman, Ginsburg 2017.
        weight_decay: λ. Source: You, Gitman, Ginsburg 2017.
        trust: The trust coefficient in r. Source: You, Gitman, Ginsburg 2017.
    """

    names = ("momentum",)
    linear = False

    def __init__(self, momentum: float = 0.9, weight_decay: float = 0.0005, trust: float = 0.001) -> None:
        super().__init__()
        below_one("optimizer.momentum", momentum)
        positive("optimizer.weight_decay", weight_decay, least=0)
        positive("optimizer.trust", trust)
        self.momentum, self.weight_decay, self.trust = momentum, weight_decay, trust
        self.preconditioned = momentum, "ordinary", 1.0

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor:
        return _scale(self.layout, torch.ones_like(points), 1 / self._ratios(points, gradients))

    def _ratios(self, points: Tensor, gradients: Tensor) -> Tensor:
        """r (n, slots)."""
        w, g = _norms(self.layout, points), _norms(self.layout, gradients)
        ratios = self.trust * w / (g + self.weight_decay * w)
        return torch.where((w > 0) & (g > 0), ratios, 1.0)

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        ratios = self._ratios(points, gradients)
        scaled = _scale(self.layout, torch.add(gradients, points, alpha=self.weight_decay), ratios)
        v = scaled.add_(self.state["momentum"], alpha=self.momentum)
        self.state = {"momentum": v}
        return v


@registry.optimizers.add("lamb")
class LAMB(Optimizer):
    """LAMB (You et al. 2020, Algorithm 2, φ the identity): Adam, then a ratio for each parameter tensor.

    m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g²; m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ); s = m̂/(√v̂ + ε) + λ p;
    u = s ‖p‖/‖s‖ for each parameter tensor, biases and normalisation included, and u = s where either norm is
    0, as in common implementations. Weight decay λ is decoupled.

    Args:
        beta1: β₁. Source: You et al. 2020, for BERT.
        beta2: β₂. Source: You et al. 2020, for BERT.
        epsilon: ε. Source: You et al. 2020, for BERT.
        weight_decay: λ. Source: You et al. 2020, for BERT.
    """

    names = ("first_moment", "second_moment")
    linear = False

    def __init__(
        self, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        below_one("optimizer.beta1", beta1)
        below_one("optimizer.beta2", beta2)
        positive("optimizer.epsilon", epsilon)
        positive("optimizer.weight_decay", weight_decay, least=0)
        self.betas, self.epsilon, self.weight_decay = (beta1, beta2), epsilon, weight_decay
        self.preconditioned = beta1, "ordinary", 1 - beta1

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        beta1, beta2 = self.betas
        first = self.state["first_moment"].lerp(gradients, 1 - beta1)
        second = torch.addcmul(beta2 * self.state["second_moment"], gradients, gradients, value=1 - beta2)
        self.state = {"first_moment": first, "second_moment": second}
        s = torch.div(first, self._root(step)).add_(points, alpha=self.weight_decay)
        return _scale(self.layout, s, self._ratios(points, s))

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor:
        root = self._root(step)
        s = torch.div(self.state["first_moment"], root).add_(points, alpha=self.weight_decay)
        return _scale(self.layout, root, 1 / self._ratios(points, s))

    def _root(self, step: int) -> Tensor:
        """(√v̂ + ε)(1 − β₁ᵗ), by which m is divided."""
        beta1, beta2 = self.betas
        root = (self.state["second_moment"] / (1 - beta2**step)).sqrt_().add_(self.epsilon)
        return root.mul_(1 - beta1**step)

    def _ratios(self, points: Tensor, s: Tensor) -> Tensor:
        """‖p‖/‖s‖ (n, slots)."""
        w, norms = _norms(self.layout, points), _norms(self.layout, s)
        return torch.where((w > 0) & (norms > 0), w / norms, 1.0)


def _norms(layout: Layout, v: Tensor) -> Tensor:
    """(n, slots): the norm of each learner's part of each parameter tensor."""
    return torch.stack([v[:, s.offset : s.offset + s.size].norm(dim=1) for s in layout.slots], dim=1)


def _scale(layout: Layout, v: Tensor, ratios: Tensor) -> Tensor:
    """``v`` (n, P), each parameter tensor of each learner times its ratio (n, slots); in place."""
    for slot, ratio in zip(layout.slots, ratios.unbind(1), strict=True):
        v[:, slot.offset : slot.offset + slot.size] *= ratio[:, None]
    return v

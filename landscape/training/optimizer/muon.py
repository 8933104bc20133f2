"""Muon: momentum whose matrices are made orthogonal, for the matrices of hidden layers."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, NonNegative
from landscape.problem.layout import Layout
from landscape.training.optimizer.base import Optimizer

# Jordan et al. 2024: the steepest quintic at zero that keeps singular values within about 0.7 and 1.2.
QUINTIC = 3.4445, -4.7750, 2.0315
EPSILON = 1e-7  # the least norm that is divided by, theirs


def check_matrices(name: str, layout: Layout, *, only_two: bool = False) -> None:
    """InputError, with the settings that help, where a parameter tensor is no matrix.

    Args:
        name: of the optimizer, for the message.
        layout: of the parameters that it is given.
        only_two: whether tensors of more than two dimensions, as of convolutions, are refused, too.
    """
    for slot in layout.slots:
        if len(slot.shape) < 2 or (only_two and len(slot.shape) > 2):
            raise InputError(
                f"optimizer.name: '{name}' is not allowed, Muon takes matrices, and {slot.name} has shape "
                f"{slot.shape}; give groups: optimizer.name=adamw, optimizer.groups.matrix.name=muon"
            )


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """(..., A, B), U f(S) Vᵀ of matrices U S Vᵀ, with f(S) near 1: the Newton–Schulz iteration of Muon."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


@registry.optimizers.add("muon")
class Muon(Optimizer):
    """Muon (Jordan et al. 2024): v ← μ v + (1 − μ) g; w = (1 − μ) g + μ v, or v; u = s NS(w) + λ p.

    w = v is without Nesterov's form. NS is the Newton–Schulz iteration, by which the singular values of each
    matrix become about 1. A tensor of more than two dimensions is the matrix of its first one and all
    others. The arithmetic is in the weights' precision; that of Jordan and of torch.optim.Muon is in
    bfloat16, from which the steps differ by about 1%. It takes matrices only: biases, norms, embeddings and
    the last layer belong in another group.

    Args:
        momentum: μ. Source: Jordan et al. 2024.
        nesterov: Use Nesterov's form. Source: Jordan et al. 2024.
        weight_decay: λ, decoupled. Source: Jordan et al. 2024, who have none.
        iterations: Newton–Schulz iterations. Source: Jordan et al. 2024.
        scale: s of an A × B matrix: "original", √max(1, A/B); or "match_rms_adamw", 0.2 √max(A, B), with
            which rates and decays of AdamW fit (Liu et al. 2025, arXiv 2502.16982). Source: Jordan et al.
            2024.
    """

    names = ("momentum",)
    linear = False

    def __init__(
        self,
        momentum: BelowOne = 0.95,
        nesterov: bool = True,
        weight_decay: NonNegative = 0.0,
        iterations: Count = 5,
        scale: Literal["original", "match_rms_adamw"] = "original",
    ) -> None:
        super().__init__()
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.iterations, self.scale = iterations, scale

    def start(self, layout: Layout, weights: Tensor) -> None:
        check_matrices("muon", layout)
        super().start(layout, weights)

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        v = self.state["momentum"].lerp(gradients, 1 - self.momentum)
        self.state = {"momentum": v}
        update = gradients.lerp(v, self.momentum) if self.nesterov else v
        u = torch.mul(points, self.weight_decay)
        for slot in self.layout.slots:
            rows, columns = slot.shape[0], slot.size // slot.shape[0]
            matched = 0.2 * math.sqrt(max(rows, columns))
            s = math.sqrt(max(1, rows / columns)) if self.scale == "original" else matched
            matrices = update[:, slot.place].reshape(-1, rows, columns)
            u[:, slot.place].add_(orthogonalized(matrices, self.iterations).flatten(1), alpha=s)
        return u

"""Steepest descent in a norm that is not Euclidean: by signs, spectra or blocks, and Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, NonNegative
from landscape.problem.layout import Layout
from landscape.training.optimizer.base import Optimizer, slot_norms


def steepest(norm: str, layout: Layout, v: Tensor) -> tuple[Tensor, Tensor]:
    """The directions d of a norm's unit ball with the largest ⟨v, d⟩, and these products, the dual norm of v.

    Args:
        norm: "max": the largest |w_i|; d is the sign of v, its dual norm Σ|v_i|. "spectral": the largest
            singular value of a parameter tensor, a matrix as in Muon (a vector is one row); d is UVᵀ of each
            USVᵀ, the dual norm the sum of all S. "block": the sum of the Euclidean norms of the parameter
            tensors; d is the tensor of v with the largest norm, over that norm.
        layout: of the parameter tensors in a row.
        v: (n, P).

    Returns:
        d (n, P), and (n,).

    Example:
        >>> steepest("max", Layout(()), torch.tensor([[3.0, -1.0]]))
        (tensor([[ 1., -1.]]), tensor([4.]))
    """
    if norm == "max":
        return v.sign(), v.abs().sum(1)
    d = torch.zeros_like(v)
    if norm == "block":
        sizes = slot_norms(layout, v)
        largest, which = sizes.max(1)
        for row, k in enumerate(which.tolist()):
            place = layout.slots[k].place
            d[row, place] = v[row, place] / largest[row].clamp(min=torch.finfo(v.dtype).tiny)
        return d, largest
    dual = torch.zeros_like(v[:, 0])
    for slot in layout.slots:
        rows = slot.shape[0] if len(slot.shape) > 1 else 1
        matrices = v[:, slot.place].reshape(len(v), rows, -1)
        left, sizes, right = torch.linalg.svd(matrices, full_matrices=False)
        # Directions in which v has rounding only have no sign.
        kept = sizes > sizes[:, :1] * max(matrices.shape[1:]) * torch.finfo(v.dtype).eps
        d[:, slot.place] = (left * kept[:, None] @ right).flatten(1)
        dual += sizes.sum(1)
    return d, dual


@registry.optimizers.add("steepest")
class Steepest(Optimizer):
    """u = ‖g‖_* d, d of the largest ⟨g, d⟩ in the unit ball of a norm: non-Euclidean gradient descent.

    It is w − αu = argmin ⟨g, w'⟩ + ‖w' − w‖²/(2α), stable about where α times the sharpness in that norm, the
    largest dᵀHd of its unit ball, is below 2 (Islamov et al. 2026, arXiv 2603.05002); the instrument
    "generalized-sharpness" measures it. Without the factor ‖g‖_* all steps have one length.

    Args:
        norm: "max": sign descent, u = ‖g‖₁ sign(g). "spectral": u = UVᵀ of each gradient matrix USVᵀ, times
            the sum of all S; normalized that is Muon without momentum, by singular values in place of its
            iteration. "block": the parameter tensor of the largest gradient takes a plain step, and the
            others rest.
        normalized: Leave out ‖g‖_*. Source: Islamov et al. 2026, whose steps have it.
    """

    linear = False

    def __init__(self, norm: Literal["max", "spectral", "block"], normalized: bool = False) -> None:
        super().__init__()
        self.geometry = self.norm, self.normalized = norm, normalized

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        d, dual = steepest(self.norm, self.layout, gradients)
        return d if self.normalized else d.mul_(dual[:, None])


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
    needs: Mapping[str, str] = {"nesterov": "momentum > 0"}

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

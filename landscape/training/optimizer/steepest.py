"""Steepest descent in a norm that is not Euclidean: sign descent, spectral descent, block descent."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
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

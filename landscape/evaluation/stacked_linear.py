"""A linear layer of many learners at once, whose gradients are written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StackedLinear(torch.autograd.Function):
    """W_j h_j + b_j (n, out, B) of each learner; the backward pass writes the gradients of W and b in place.

    Autograd would return them in fresh memory, to be copied: with 10 million parameters 4% of the time for a
    learner with 256 samples, 13% for two with 64 each.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, b: Tensor | None, w_grad: Tensor, b_grad: Tensor | None
    ) -> Tensor:
        w = w.to(h.dtype)
        ctx.save_for_backward(h, w)
        ctx.into = w_grad, b_grad
        return torch.bmm(w, h) if b is None else torch.baddbmm(b.to(h.dtype).unsqueeze(2), w, h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (h, w), (w_grad, b_grad) = grads, ctx.saved_tensors, ctx.into
        if h.dtype == w_grad.dtype:
            torch.bmm(grad, h.mT, out=w_grad)
        else:
            w_grad.copy_(torch.bmm(grad, h.mT))
        if b_grad is not None:
            torch.sum(grad, 2, dtype=b_grad.dtype, out=b_grad)
        return torch.bmm(w.mT, grad) if ctx.needs_input_grad[0] else None, None, None, None, None

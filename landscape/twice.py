"""Whether a gradient can be differentiated again, and gives the Hessian where it can."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from landscape.options import InputError

# What PyTorch says of operations without a second derivative; the operation's name comes first.
MISSING = re.compile(r"derivative for '?(?:aten::)?_?(\w+?)(?:_backward)?'? is not implemented")
# Differences of gradients at one and two steps must agree this well to be trusted, and the product must then
# differ from them by that much to be wrong: a kink within the step, or arithmetic that is coarser inside the
# model than its parameters, makes the two differ (ours).
TRUSTED, WRONG = 0.05, 0.25

WHAT_TO_DO = (
    "; write it in differentiable operations, or take another in its place (losses, contours and gradients "
    "do not need it)"
)


@contextlib.contextmanager
def missing_named() -> Iterator[None]:
    """PyTorch's error for an operation without a second derivative becomes an InputError in the block."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        found = MISSING.search(str(error))
        if found is None:
            raise
        raise InputError(
            f"model or loss: PyTorch has no second derivative of {found[1]}, so that there are no products "
            f"with its Hessian{WHAT_TO_DO}"
        ) from error


def check_graph(gradients: Sequence[Tensor]) -> None:
    """Raise InputError if these came by a backward pass that is marked ``once_differentiable``.

    PyTorch makes its results constants, whose derivatives would count as zero.
    """
    seen = {part.grad_fn for part in gradients}
    left = list(seen)
    while left:
        node = left.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::Error":
            raise InputError(
                "model or loss: one of its operations is marked once_differentiable, so that it has no "
                f"second derivative{WHAT_TO_DO}"
            )
        new = {below for below, _ in node.next_functions} - seen
        seen |= new
        left += new


def check_differences(slope: Callable[[float], Tensor], product: Tensor, step: float) -> None:
    """Raise InputError if ``product``, ∇²L·v, is not what gradients ``slope(t)`` = ∇L(θ + t·v) differ by.

    A backward pass that leaves something out (by detach, .data, NumPy) is seen in no other way.
    """
    near, far = ((slope(k * step) - slope(-k * step)) / (2 * k * step) for k in (1, 2))
    scale = torch.maximum(near.norm(), far.norm())
    if bool((near - far).norm() <= TRUSTED * scale) and bool(
        (product - near).norm() > WRONG * torch.maximum(scale, product.norm())
    ):
        raise InputError(
            "model or loss: its second derivative is wrong: products with the Hessian are not what gradients "
            "differ by, as where a part is detached, or a backward pass of one's own is not differentiable"
            f"{WHAT_TO_DO}"
        )

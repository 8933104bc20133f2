"""Whether a gradient can be differentiated again, and gives the Hessian where it can."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.problem.layout import gradients
from landscape.problem.problem import Problem

# PyTorch's message on operations without a second derivative, with the operation's name.
MISSING = re.compile(r"derivative for '?(?:aten::)?_?(\w+?)(?:_backward)?'? is not implemented")
# A product is wrong if the differences of gradients at one and two steps agree to the first share, and the
# product differs from them by the second: a kink within the step, or arithmetic that is coarser inside the
# model than its parameters, makes the two differences disagree (ours).
AGREEMENT, DISAGREEMENT = 0.05, 0.25

WHAT_TO_DO = (
    "; write it in differentiable operations, or take another in its place (losses, contours and gradients "
    "do not need it)"
)


@contextlib.contextmanager
def missing_named() -> Iterator[None]:
    """PyTorch's error for an operation without a second derivative becomes an InputError in the block."""
    try:
        yield
    except RuntimeError as error:
        match = MISSING.search(str(error))
        if match is None:
            raise
        raise InputError(
            f"model or loss: PyTorch has no second derivative of {match[1]}, so that there are no products "
            f"with its Hessian{WHAT_TO_DO}"
        ) from error


def check_graph(gradients: Sequence[Tensor]) -> None:
    """Raise InputError if these came by a backward pass that is marked ``once_differentiable``.

    PyTorch makes its results constants, whose derivatives would count as zero.
    """
    seen = {part.grad_fn for part in gradients}
    queue = list(seen)
    while queue:
        node = queue.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::Error":
            raise InputError(
                "model or loss: one of its operations is marked once_differentiable, so that it has no "
                f"second derivative{WHAT_TO_DO}"
            )
        new = {below for below, _ in node.next_functions} - seen
        seen |= new
        queue += new


def flat(parts: Sequence[Tensor]) -> Tensor:
    """One float64 vector of all numbers in ``parts``."""
    return torch.cat([part.detach().flatten() for part in parts]).double()


def check_differences(
    problem: Problem,
    leaves: dict[str, Tensor],
    active: list[Tensor],
    vectors: list[Tensor],
    image: Sequence[Tensor],
) -> None:
    """Raise InputError if ``image``, the product with ``vectors``, is not the difference of gradients.

    This alone detects a backward pass that leaves something out (by detach, .data, NumPy).

    Args:
        leaves: the parameters of the model's call.
        active: those among them that the vectors belong to; they are changed.
    """
    start = [a.detach().clone() for a in active]
    size = float(flat(start).norm()) / float(flat(vectors).norm())
    step = torch.finfo(problem.dtype).eps ** (1 / 3) * max(size, 1e-3)

    def slope(t: float) -> Tensor:
        with torch.no_grad():
            for a, at, v in zip(active, start, vectors, strict=True):
                a.copy_(at + t * v)
        x, y, _, seed = next(problem.parts())
        with problem.evaluating(seed):
            loss = problem.criterion(problem.call(leaves, x), y)
        return flat(gradients(loss, active)) if loss.requires_grad else 0 * flat(start)

    near, far = ((slope(k * step) - slope(-k * step)) / (2 * k * step) for k in (1, 2))
    product, scale = flat(image), torch.maximum(near.norm(), far.norm())
    trusted = bool((near - far).norm() <= AGREEMENT * scale)
    if trusted and bool((product - near).norm() > DISAGREEMENT * torch.maximum(scale, product.norm())):
        raise InputError(
            "model or loss: its second derivative is wrong: products with the Hessian are not what gradients "
            "differ by, as where a part is detached, or a backward pass of one's own is not differentiable"
            f"{WHAT_TO_DO}"
        )

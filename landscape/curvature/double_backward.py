"""Whether a gradient can be differentiated again, and gives the Hessian where it can."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from landscape.core.errors import InputError
from landscape.problem.layout import gradients
from landscape.problem.problem import Problem

# PyTorch's message on operations without a second derivative, with the operation's name.
MISSING = re.compile(r"derivative for '?(?:aten::)?_?(\w+?)(?:_backward)?'? is not implemented")
# A product is wrong if the differences of gradients at one and two steps agree to the first share, and the
# product differs from them by the second: a kink within the step, or arithmetic that is coarser inside the
# model than its parameters, makes the two differences disagree (ours).
AGREEMENT, DISAGREEMENT = 0.05, 0.25

# Numbers that are converted to float64 at once (ours): 8 MiB.
SLICE = 2**20

WHAT_TO_DO = (
    "; write it in differentiable operations, or take another in its place (losses, contours and gradients "
    "do not need it)"
)


class Decomposed(TorchFunctionMode):
    """PyTorch's operations whose second derivative it has not, or has wrong, by others.

    Those of weight_norm are wrong (up to 2.13), and EmbeddingBag has none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            v, g, dim = (*args, 0)[:3]
            return v * (g / torch.norm_except_dim(v, 2, dim))
        if func is F.embedding_bag:
            bags = inspect.signature(F.embedding_bag).bind(*args, **(kwargs or {}))
            bags.apply_defaults()
            return _bags(**bags.arguments)
        return func(*args, **(kwargs or {}))


def _bags(input: Tensor, weight: Tensor, offsets: Tensor | None, mode: str, **options: Any) -> Tensor:
    """What F.embedding_bag gives with these arguments: sums, or means, of the words of each bag."""
    if mode == "max" or options["scale_grad_by_freq"] or options["max_norm"] is not None:
        return F.embedding_bag(input, weight, offsets, mode=mode, **options)
    per_word, padding = options["per_sample_weights"], options["padding_idx"]
    words = input.flatten()
    if offsets is None:
        bags = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
        count = len(input)
    else:
        count = len(offsets) - options["include_last_offset"]
        bags = torch.searchsorted(offsets[:count], torch.arange(len(words)).to(offsets), right=True) - 1
    counted = torch.ones_like(words) if padding is None else words != padding % len(weight)
    share = counted.to(weight) if per_word is None else counted * per_word.flatten()
    rows = F.embedding(words, weight) * share[:, None]
    sums = weight.new_zeros(count, weight.shape[1]).index_add(0, bags, rows)
    numbers = weight.new_zeros(count).index_add(0, bags, counted.to(weight))
    return sums / numbers.clamp(min=1)[:, None] if mode == "mean" else sums


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


def _slices(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers of two vectors in parts, in float64, SLICE at a time: no copy of a whole vector."""
    for part, other in zip(a, b, strict=True):
        pairs = zip(torch.split(part.flatten(), SLICE), torch.split(other.flatten(), SLICE), strict=True)
        yield from ((x.double(), y.double()) for x, y in pairs)


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """⟨a, b⟩ of two vectors in parts, in float64."""
    return torch.stack([x @ y for x, y in _slices(a, b)]).sum()


def distance(a: Sequence[Tensor], b: Sequence[Tensor] | None = None) -> Tensor:
    """‖a − b‖, or ‖a‖, of vectors in parts, in float64."""
    squares = [(x if b is None else x - y).square().sum() for x, y in _slices(a, b or a)]
    return torch.stack(squares).sum().sqrt()


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
    size = float(distance(start) / distance(vectors))
    step = torch.finfo(problem.dtype).eps ** (1 / 3) * max(size, 1e-3)

    def gradient(t: float) -> list[Tensor]:
        with torch.no_grad():
            for a, at, v in zip(active, start, vectors, strict=True):
                torch.add(at, v, alpha=t, out=a)
        x, y, _, seed = next(problem.parts())
        with problem.evaluating(seed):
            loss = problem.criterion(problem.call(leaves, x), y)
        return gradients(loss, active) if loss.requires_grad else [torch.zeros_like(a) for a in active]

    def slope(t: float) -> list[Tensor]:
        return [(a - b).div_(2 * t) for a, b in zip(gradient(t), gradient(-t), strict=True)]

    near, far = slope(step), slope(2 * step)
    scale = torch.maximum(distance(near), distance(far))
    trusted = bool(distance(near, far) <= AGREEMENT * scale)
    if trusted and bool(distance(image, near) > DISAGREEMENT * torch.maximum(scale, distance(image))):
        raise InputError(
            "model or loss: its second derivative is wrong: products with the Hessian are not what gradients "
            "differ by, as where a part is detached, or a backward pass of one's own is not differentiable"
            f"{WHAT_TO_DO}"
        )

"""Curvature in float32 or better, whatever the precision of a model's weights and of its forward pass."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.errors import InputError, ProblemWarning
from landscape.problem.problem import Problem

LOW = (torch.bfloat16, torch.float16)
RAISED = (*LOW, torch.float32, torch.complex32, torch.complex64)
# Of ``Problem.checked``: whether model or loss compute in a precision of LOW.
INSIDE = ("low precision",)


class FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is asked for in a lower precision than ``dtype``, by autocast or a cast, is in ``dtype`` instead.

    ``seen`` are the precisions that were asked for. (Those of 8 bits are quantisation, and stay.)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.seen = dtype, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        asked = kwargs.get("dtype")
        if asked in RAISED:
            self.seen.add(asked)
            full = self.dtype.to_complex() if asked.is_complex else self.dtype
            kwargs["dtype"] = torch.promote_types(asked, full)
        return func(*args, **kwargs)


def first_loss(problem: Problem, weights: dict[str, Tensor]) -> Tensor:
    """The loss of the first chunk of the problem's data, with the parameters ``weights``."""
    x, y, _, seed = next(problem.parts())
    with problem.evaluating(seed):
        return problem.criterion(problem.call(weights, x), y)


def in_full_precision(problem: Problem) -> Problem:
    """``problem``, or its copy in float32 where its weights are in half precision, with the same numbers.

    Products in half precision have two or three digits, which the differences of an eigenvalue search lose.
    Where the pass computes in such a precision itself, ``problem.checked[INSIDE]`` is set, and products are
    taken within :class:`FullPrecision`. A ProblemWarning says so, once a problem.

    Raises:
        InputError: a model that does not run in float32.
    """
    low = problem.dtype in LOW
    full = problem.to(torch.float32) if low else problem
    if INSIDE in problem.checked:
        return full
    few = full.on(full.data.few())
    try:
        with torch.no_grad(), FullPrecision(full.dtype) as mode:
            first_loss(few, few.layout.views(few.theta))
    except InputError:
        raise
    except Exception as error:  # the user's model raises any kind of error where dtypes do not fit
        if not low and not mode.seen & {*LOW}:
            raise
        words = " ".join(str(error).split())[:100]
        raise InputError(
            f"model: it runs in half precision only, which is too coarse for second derivatives ({words}); "
            "let its forward pass follow the dtype of its weights, x.to(self.weight.dtype)"
        ) from error
    inside = mode.seen & {*LOW}
    problem.checked[INSIDE] = bool(inside)
    if low or inside:
        names = sorted(str(each).removeprefix("torch.") for each in inside | {problem.dtype} & {*LOW})
        warnings.warn(
            f"model: it computes in {' and '.join(names)}; second derivatives are those of the same weights "
            f"with {str(full.dtype).removeprefix('torch.')} arithmetic",
            ProblemWarning,
            stacklevel=4,
        )
    return full

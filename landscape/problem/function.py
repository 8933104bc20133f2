"""The function that the checks look at: a model as a function of its parameters, and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from landscape.problem.data import Data
from landscape.problem.layout import Layout

# How far the checks move θ, relative to the mean magnitude of each parameter (ours).
MOVE = 0.1


class Function(Protocol):
    """A problem under construction: a model as a function of its parameters θ (P,), a loss, and data."""

    model: nn.Module
    layout: Layout
    theta: Tensor
    criterion: Callable[[Any, Any], Tensor]
    data: Data
    device: torch.device
    draws: int
    differentiates: bool
    draws_elsewhere: bool

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The outputs with the parameters ``weights``."""

    def evaluating(self, seed: int | None) -> AbstractContextManager[None]:
        """What surrounds a forward pass and its loss; its random numbers are those of ``seed``."""

    def on(self, data: Data) -> Self:
        """The same on other data."""

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another precision."""

    def saved_bytes(self, x: Any, y: Any) -> int:
        """Bytes that the pass of a batch saves for its backward pass."""


def moved(problem: Function, seed: int = 0) -> Tensor:
    """θ moved at random by :data:`MOVE`: there samples have different losses, even of a model just made."""
    generator = torch.Generator().manual_seed(seed)
    theta = problem.theta.clone()
    for view in problem.layout.views(theta).values():
        if view.numel():
            size = float(view.detach().abs().float().mean()) + MOVE
            view += (MOVE * size * torch.randn(view.shape, generator=generator)).to(view)
    return theta


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways of computing one number count as equal: √eps."""
    return math.sqrt(torch.finfo(dtype).eps)

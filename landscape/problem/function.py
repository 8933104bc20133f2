"""The function that the checks look at: a model as a function of its parameters, and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from landscape.problem.layout import Layout

# How far the checks move θ, relative to the mean magnitude of each parameter (ours).
MOVE = 0.1


class Function(Protocol):
    """A model as a function of its parameters θ (P,), and a loss."""

    model: nn.Module
    layout: Layout
    theta: Tensor
    criterion: Callable[[Any, Any], Tensor]
    device: torch.device

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The outputs with the parameters ``weights``."""


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways of computing one number count as equal: √eps."""
    return math.sqrt(torch.finfo(dtype).eps)

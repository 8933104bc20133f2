"""Shapes of models and data that uses after several training scripts share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def net(inputs: int = 4, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def mask_of(lengths: list[int]) -> Tensor:
    """(N, longest) true up to each length."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

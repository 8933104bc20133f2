"""Layers of the convolutional networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from landscape.core.options import positive


def scaled(channels: int, width: float) -> int:
    """``channels`` times the multiplier ``width``, to the nearest even number, at least 2.

    Even, because ShuffleNet halves it; all counts of the papers are even, so that width 1 changes none.
    """
    return max(2, 2 * round(channels * width / 2))


def check(classes: int, width: float) -> None:
    """Check the options that networks share.

    Args:
        classes: Number of classes. Source: that of the data set the network is for.
        width: Multiplier of the numbers of channels or cells, for reduced networks. Source: ours; 1 is the
            network as published.

    Raises:
        InputError: a number of classes or a width that is not allowed.

    Example:
        >>> check(classes=10, width=0.25)
    """
    positive("model.classes", classes, least=2)
    positive("model.width", width)


def conv_bn(
    fan_in: int,
    fan_out: int,
    kernel: int = 1,
    stride: int = 1,
    *,
    groups: int = 1,
    bias: bool = False,
    relu: bool = True,
) -> nn.Sequential:
    """Convolution with padding (kernel − 1)/2, BatchNorm, and ReLU unless ``relu`` is false."""
    conv = nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, groups=groups, bias=bias)
    return nn.Sequential(conv, nn.BatchNorm2d(fan_out), *([nn.ReLU()] if relu else []))


def bn_conv(fan_in: int, fan_out: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """The other order: BatchNorm, ReLU, convolution without a bias."""
    conv = nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(fan_in), nn.ReLU(), conv)


class Residual(nn.Module):
    """after(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut, after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.body(x) + self.shortcut(x))
        return out


class Branches(nn.Module):
    """The outputs of several modules on one input, side by side as channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class SqueezeExcite(nn.Module):
    """Each channel times a gate in (0, 1) computed from all channels' means (Hu et al. 2018)."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Conv2d(channels, reduced, 1), nn.ReLU(), nn.Conv2d(reduced, channels, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = x * self.gate(x.mean((2, 3), keepdim=True))
        return gated


class Head(nn.Sequential):
    """Mean over the image, then a linear layer: (B, C, H, W) -> logits (B, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

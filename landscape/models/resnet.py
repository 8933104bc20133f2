"""Residual networks for 32×32 images: ResNet-18, ResNet-20, SENet-18, ResNeXt-29."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core import registry
from landscape.models.layers import Head, Residual, SqueezeExcite, bn_conv, check, conv_bn, scaled


def _projection(fan_in: int, fan_out: int, stride: int) -> nn.Module:
    """1×1 convolution and BatchNorm where the shape changes, else the identity."""
    if stride == 1 and fan_in == fan_out:
        return nn.Identity()
    return conv_bn(fan_in, fan_out, 1, stride, relu=False)


class _Pad(nn.Module):
    """A shortcut without parameters: every second pixel, and channels of zeros (He et al. 2016, option A)."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra))


def _basic(fan_in: int, fan_out: int, stride: int, shortcut: nn.Module) -> Residual:
    body = nn.Sequential(conv_bn(fan_in, fan_out, 3, stride), conv_bn(fan_out, fan_out, 3, relu=False))
    return Residual(body, shortcut, nn.ReLU())


@registry.models.add("resnet-18")
def resnet18(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) with a 3×3 stem and no max-pooling: images (B, 3, H, W) -> (B, classes)."""
    check(classes, width)
    channels = scaled(64, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    for base, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for stride in (first, 1):
            fan_out = scaled(base, width)
            layers.append(_basic(channels, fan_out, stride, _projection(channels, fan_out, stride)))
            channels = fan_out
    return nn.Sequential(*layers, Head(channels, classes))


@registry.models.add("resnet-20")
def resnet20(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """ResNet-20 for CIFAR (He et al. 2016, section 4.2): shortcuts without parameters, 0.27 million."""
    check(classes, width)
    channels = scaled(16, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    for base, first in ((16, 1), (32, 2), (64, 2)):
        for stride in (first, 1, 1):
            fan_out = scaled(base, width)
            shortcut = nn.Identity() if stride == 1 else _Pad(fan_out - channels)
            layers.append(_basic(channels, fan_out, stride, shortcut))
            channels = fan_out
    return nn.Sequential(*layers, Head(channels, classes))


class _PreActivation(nn.Module):
    """BatchNorm and ReLU before each convolution; where the shape changes the shortcut comes after the first
    of them. Squeeze-excitation gates the sum's second half."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(fan_in), nn.ReLU())
        changes = stride != 1 or fan_in != fan_out
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False) if changes else None
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False),
            bn_conv(fan_out, fan_out, 3),
            SqueezeExcite(fan_out, max(1, fan_out // 16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.body(h) + (x if self.shortcut is None else self.shortcut(h))
        return out


@registry.models.add("senet-18")
def senet18(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """Pre-activation ResNet-18 (He et al. 2016b) with squeeze-excitation (Hu et al. 2018), reduction 16.

    No BatchNorm before the head: that is the form whose size Table 1 of DPSGD-2020 gives.
    """
    check(classes, width)
    channels = scaled(64, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    for base, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for stride in (first, 1):
            layers.append(_PreActivation(channels, scaled(base, width), stride))
            channels = scaled(base, width)
    return nn.Sequential(*layers, Head(channels, classes))


@registry.models.add("resnext-29")
def resnext29(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """ResNeXt-29, 2×64d (Xie et al. 2017): 2 groups, each of 64, 128 and 256 channels in the three stages.

    The stem is 1×1 and blocks expand by 2: that is the form whose size Table 1 of DPSGD-2020 gives.
    """
    check(classes, width)
    groups, channels = 2, scaled(64, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 1)]
    for base, first in ((64, 1), (128, 2), (256, 2)):
        inner = groups * scaled(base, width)
        for stride in (first, 1, 1):
            body = nn.Sequential(
                conv_bn(channels, inner),
                conv_bn(inner, inner, 3, stride, groups=groups),
                conv_bn(inner, 2 * inner, relu=False),
            )
            layers.append(Residual(body, _projection(channels, 2 * inner, stride), nn.ReLU()))
            channels = 2 * inner
    return nn.Sequential(*layers, Head(channels, classes))

"""DenseNet-121 for 32×32 images."""

from __future__ import annotations

from torch import nn

from landscape.core import registry
from landscape.models.layers import Branches, Head, bn_conv, check, scaled


@registry.models.add("densenet-121")
def densenet121(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """DenseNet-121 (Huang et al. 2017), growth 32, compression ½, 3×3 stem: (B, 3, H, W) -> (B, classes).

    The width scales the growth rate, and with it all that follows from it.
    """
    check(classes, width)
    growth = scaled(32, width)
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for i, count in enumerate((6, 12, 24, 16)):
        if i > 0:
            layers += [bn_conv(channels, channels // 2), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(count):
            new = nn.Sequential(bn_conv(channels, 4 * growth), bn_conv(4 * growth, growth, 3))
            layers.append(Branches(new, nn.Identity()))
            channels += growth
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), Head(channels, classes))

"""Networks of depthwise convolutions for 32×32 images: MobileNet, MobileNetV2, EfficientNet-B0."""

from __future__ import annotations

from torch import nn

from landscape.core import registry
from landscape.models.layers import Head, Residual, SqueezeExcite, check, conv_bn, scaled


@registry.models.add("mobilenet")
def mobilenet(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """MobileNet (Howard et al. 2017) with stride 1 in the stem: (B, 3, H, W) -> (B, classes)."""
    check(classes, width)
    channels = scaled(32, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    plan = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for base, stride in plan:
        layers += [
            conv_bn(channels, channels, 3, stride, groups=channels),
            conv_bn(channels, scaled(base, width)),
        ]
        channels = scaled(base, width)
    return nn.Sequential(*layers, Head(channels, classes))


def _inverted(fan_in: int, fan_out: int, stride: int, expansion: int, gate: bool) -> nn.Module:
    """Expand, convolve depthwise, project; with a shortcut where the stride is 1."""
    inner = expansion * fan_in
    body = nn.Sequential(
        conv_bn(fan_in, inner),
        conv_bn(inner, inner, 3, stride, groups=inner),
        conv_bn(inner, fan_out, relu=False),
        *([SqueezeExcite(fan_out, max(1, fan_out // 16))] if gate else []),
    )
    if stride != 1:
        return body
    return Residual(body, nn.Identity() if fan_in == fan_out else conv_bn(fan_in, fan_out, relu=False))


@registry.models.add("mobilenet-v2")
def mobilenet_v2(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """MobileNetV2 (Sandler et al. 2018), ReLU for ReLU6, strides for 32×32: (B, 3, H, W) -> (B, classes).

    Every block of stride 1 has a shortcut, a 1×1 convolution where the number of channels changes: that is
    the form whose size Table 1 of DPSGD-2020 gives.
    """
    check(classes, width)
    channels = scaled(32, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    for expansion, base, count, first in (
        (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2),
        (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for i in range(count):
            layers.append(_inverted(channels, scaled(base, width), first if i == 0 else 1, expansion, False))
            channels = scaled(base, width)
    last = scaled(1280, width)
    return nn.Sequential(*layers, conv_bn(channels, last), Head(last, classes))


@registry.models.add("efficientnet-b0")
def efficientnet_b0(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """EfficientNet-B0 (Tan & Le 2019) in the early form of DPSGD-2020: (B, 3, H, W) -> (B, classes).

    All depthwise kernels 3×3, ReLU, squeeze-excitation after the projection with out//16 channels, strides
    2, 1, 2, 2, 1, 2, 2 after a stem of stride 1, no convolution before the head: 2,912,089 parameters.
    """
    check(classes, width)
    channels = scaled(32, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    for expansion, base, count, first in (
        (1, 16, 1, 2), (6, 24, 2, 1), (6, 40, 2, 2), (6, 80, 3, 2),
        (6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 2),
    ):  # fmt: skip
        for i in range(count):
            layers.append(_inverted(channels, scaled(base, width), first if i == 0 else 1, expansion, True))
            channels = scaled(base, width)
    return nn.Sequential(*layers, Head(channels, classes))

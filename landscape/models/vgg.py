"""LeNet-5 and VGG-19: convolutions in a row."""

from __future__ import annotations

from torch import nn

from landscape.core import registry
from landscape.models.layers import Head, check, conv_bn, scaled


@registry.models.add("lenet-5")
def lenet5(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) for (B, 3, 32, 32), with ReLU and max-pooling in place of the originals."""
    check(classes, width)
    a, b, c, d = (scaled(n, width) for n in (6, 16, 120, 84))
    return nn.Sequential(
        nn.Conv2d(3, a, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(b * 25, c), nn.ReLU(), nn.Linear(c, d), nn.ReLU(), nn.Linear(d, classes),
    )  # fmt: skip


@registry.models.add("vgg-19")
def vgg19(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """VGG-19 (Simonyan & Zisserman 2015) with BatchNorm and one linear layer: (B, 3, H, W) -> (B, classes).

    H and W at least 32, for the five poolings. That is the form whose size Table 1 of DPSGD-2020 gives.
    """
    check(classes, width)
    channels, layers = 3, list[nn.Module]()
    for base, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            layers.append(conv_bn(channels, scaled(base, width), 3, bias=True))
            channels = scaled(base, width)
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, Head(channels, classes))

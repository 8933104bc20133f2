"""GoogLeNet for 32×32 images."""

from __future__ import annotations

from torch import nn

from landscape.core import registry
from landscape.models.layers import Branches, Head, check, conv_bn, scaled

# Output channels: 1×1; 3×3 and the reduction before it; 5×5 and the reduction before it; after the pooling
# (Szegedy et al. 2015, Table 1). None: max-pooling of stride 2.
_PLAN = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


@registry.models.add("googlenet")
def googlenet(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """GoogLeNet (Szegedy et al. 2015) with BatchNorm, a 3×3 stem, each 5×5 as two 3×3, no auxiliary heads.

    (B, 3, H, W) -> (B, classes). 6,166,250 parameters, 23.52 MiB; Table 1 of DPSGD-2020 has 23.53.
    """
    check(classes, width)
    channels = scaled(192, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3, bias=True)]
    for plan in _PLAN:
        if plan is None:
            layers.append(nn.MaxPool2d(3, 2, 1))
            continue
        one, reduce3, three, reduce5, five, pooled = (scaled(n, width) for n in plan)
        layers.append(
            Branches(
                conv_bn(channels, one, bias=True),
                nn.Sequential(conv_bn(channels, reduce3, bias=True), conv_bn(reduce3, three, 3, bias=True)),
                nn.Sequential(
                    conv_bn(channels, reduce5, bias=True),
                    conv_bn(reduce5, five, 3, bias=True),
                    conv_bn(five, five, 3, bias=True),
                ),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_bn(channels, pooled, bias=True)),
            )
        )
        channels = one + three + five + pooled
    return nn.Sequential(*layers, Head(channels, classes))

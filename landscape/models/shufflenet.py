"""ShuffleNetV2 for 32×32 images."""

from __future__ import annotations

from torch import Tensor, nn

from landscape.core import registry
from landscape.models.layers import Branches, Head, check, conv_bn, scaled


class _Half(nn.Module):
    """The first (0) or second (1) half of the channels."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[self.which]


def _body(fan_in: int, fan_out: int, stride: int) -> list[nn.Module]:
    return [
        conv_bn(fan_in, fan_out),
        conv_bn(fan_out, fan_out, 3, stride, groups=fan_out, relu=False),
        conv_bn(fan_out, fan_out),
    ]


@registry.models.add("shufflenet-v2")
def shufflenet_v2(classes: int = 10, width: float = 1.0) -> nn.Sequential:
    """ShuffleNetV2 1× (Ma et al. 2018), stem of stride 1, no max-pooling: (B, 3, H, W) -> (B, classes)."""
    check(classes, width)
    channels = scaled(24, width)
    layers: list[nn.Module] = [conv_bn(3, channels, 3)]
    for base, count in ((116, 4), (232, 8), (464, 4)):
        half = scaled(base // 2, width)
        first_half = nn.Sequential(
            conv_bn(channels, channels, 3, 2, groups=channels, relu=False), conv_bn(channels, half)
        )
        layers += [Branches(first_half, nn.Sequential(*_body(channels, half, 2))), nn.ChannelShuffle(2)]
        for _ in range(count - 1):
            layers += [
                Branches(_Half(0), nn.Sequential(_Half(1), *_body(half, half, 1))),
                nn.ChannelShuffle(2),
            ]
        channels = 2 * half
    last = scaled(1024, width)
    return nn.Sequential(*layers, conv_bn(channels, last), Head(last, classes))

"""The papers' convolutional networks in their CIFAR forms, and torchvision's for ImageNet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core import registry
from landscape.core.options import AtLeastTwo, Positive, positive
from landscape.core.registry import optional

Side = Annotated[int, functools.partial(positive, least=16)]  # pixels, of images that LeNet-5 takes


def scaled(channels: int, width: float) -> int:
    """``channels`` times the multiplier ``width``, to the nearest even number, at least 2.

    Even, because ShuffleNet halves it; all counts of the papers are even, so that width 1 changes none.
    """
    return max(2, 2 * round(channels * width / 2))


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
        return self.after(self.body(x) + self.shortcut(x))


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
        return x * self.gate(x.mean((2, 3), keepdim=True))


class Head(nn.Sequential):
    """Mean over the image, then a linear layer: (B, C, H, W) -> logits (B, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def staged(
    classes: AtLeastTwo, width: Positive, stem: int, plan: Iterable[tuple[Any, ...]],
    block: Callable[..., list[nn.Module]], *, kernel: int = 3, times: int = 1, last: int = 0,
) -> nn.Sequential:  # fmt: skip
    """A stem of ``stem`` channels, blocks in stages, ``last`` channels by a 1×1 convolution if not 0, a head.

    ``plan``: (channels, of which blocks have ``times`` as many, number of blocks, stride of the first block,
    options…). ``block(fan_in, fan_out, stride, options…)`` gives the layers of one.

    Args:
        classes: Number of classes. Source: that of the data set the network is for.
        width: Multiplier of the numbers of channels or cells, for reduced networks. Source: ours; 1 is the
            network as published.
    """
    channels = scaled(stem, width)
    layers: list[nn.Module] = [conv_bn(3, channels, kernel)]
    for base, count, first, *options in plan:
        for i in range(count):
            layers += block(channels, times * scaled(base, width), first if i == 0 else 1, *options)
            channels = times * scaled(base, width)
    if last:
        layers.append(conv_bn(channels, scaled(last, width)))
        channels = scaled(last, width)
    return nn.Sequential(*layers, Head(channels, classes))


@registry.models.add("lenet-5")
def lenet5(classes: AtLeastTwo = 10, width: Positive = 1.0, size: Side = 32) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) for (B, 3, size, size), with ReLU and max-pooling for the originals.

    Args:
        size: Height and width of the images, at least 16. Unit: pixels. Source: LeCun et al. 1998.
    """
    a, b, c, d = (scaled(n, width) for n in (6, 16, 120, 84))
    side = ((size - 4) // 2 - 4) // 2  # two convolutions of 5 × 5, each halved
    return nn.Sequential(
        nn.Conv2d(3, a, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(b * side**2, c), nn.ReLU(), nn.Linear(c, d), nn.ReLU(), nn.Linear(d, classes),
    )  # fmt: skip


@registry.models.add("vgg-19")
def vgg19(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """VGG-19 (Simonyan & Zisserman 2015) with BatchNorm and one linear layer: (B, 3, H, W) -> (B, classes).

    H and W at least 32, for the five poolings. That is the form whose size Table 1 of DPSGD-2020 gives.
    """
    channels, layers = 3, list[nn.Module]()
    for base, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            layers.append(conv_bn(channels, scaled(base, width), 3, bias=True))
            channels = scaled(base, width)
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, Head(channels, classes))


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


def _basic(fan_in: int, fan_out: int, stride: int, shortcut: nn.Module) -> list[nn.Module]:
    body = nn.Sequential(conv_bn(fan_in, fan_out, 3, stride), conv_bn(fan_out, fan_out, 3, relu=False))
    return [Residual(body, shortcut, nn.ReLU())]


# The stages of the networks of 18 layers.
_FOUR_STAGES = (64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2)


@registry.models.add("resnet-18")
def resnet18(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """ResNet-18 (He et al. 2016) with a 3×3 stem and no max-pooling: images (B, 3, H, W) -> (B, classes)."""

    def block(fan_in: int, fan_out: int, stride: int) -> list[nn.Module]:
        return _basic(fan_in, fan_out, stride, _projection(fan_in, fan_out, stride))

    return staged(classes, width, 64, _FOUR_STAGES, block)


@registry.models.add("resnet-20")
def resnet20(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """ResNet-20 for CIFAR (He et al. 2016, section 4.2): shortcuts without parameters, 0.27 million."""

    def block(fan_in: int, fan_out: int, stride: int) -> list[nn.Module]:
        return _basic(fan_in, fan_out, stride, nn.Identity() if stride == 1 else _Pad(fan_out - fan_in))

    return staged(classes, width, 16, ((16, 3, 1), (32, 3, 2), (64, 3, 2)), block)


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
        return self.body(h) + (x if self.shortcut is None else self.shortcut(h))


@registry.models.add("senet-18")
def senet18(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """Pre-activation ResNet-18 (He et al. 2016b) with squeeze-excitation (Hu et al. 2018), reduction 16.

    No BatchNorm before the head: that is the form whose size Table 1 of DPSGD-2020 gives.
    """
    return staged(classes, width, 64, _FOUR_STAGES, lambda *shape: [_PreActivation(*shape)])


@registry.models.add("resnext-29")
def resnext29(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """ResNeXt-29, 2×64d (Xie et al. 2017): 2 groups, each of 64, 128 and 256 channels in the three stages.

    The stem is 1×1 and blocks expand by 2: that is the form whose size Table 1 of DPSGD-2020 gives.
    """

    def block(fan_in: int, fan_out: int, stride: int) -> list[nn.Module]:
        inner = fan_out // 2
        body = nn.Sequential(
            conv_bn(fan_in, inner),
            conv_bn(inner, inner, 3, stride, groups=2),
            conv_bn(inner, fan_out, relu=False),
        )
        return [Residual(body, _projection(fan_in, fan_out, stride), nn.ReLU())]

    return staged(classes, width, 64, ((64, 3, 1), (128, 3, 2), (256, 3, 2)), block, kernel=1, times=4)


@registry.models.add("densenet-121")
def densenet121(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """DenseNet-121 (Huang et al. 2017), growth 32, compression ½, 3×3 stem: (B, 3, H, W) -> (B, classes).

    The width scales the growth rate, and with it all that follows from it.
    """
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
def googlenet(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """GoogLeNet (Szegedy et al. 2015) with BatchNorm and a 3×3 stem, and without auxiliary heads.

    Two 3×3 convolutions replace each 5×5 convolution. (B, 3, H, W) -> (B, classes). 6,166,250 parameters,
    23.52 MiB; Table 1 of DPSGD-2020 has 23.53.
    """
    channels = scaled(192, width)
    layers: list[nn.Module] = [conv_bn(3, channels, kernel=3, bias=True)]
    for plan in _PLAN:
        if plan is None:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            continue
        # Output channels of the convolutions in the four branches of a block: 1×1; 1×1 and 3×3; 1×1 and 5×5
        # (as two 3×3); pooling and 1×1.
        of_1x1, before_3x3, of_3x3, before_5x5, of_5x5, after_pool = (scaled(n, width) for n in plan)
        branch_1x1 = conv_bn(channels, of_1x1, bias=True)
        branch_3x3 = nn.Sequential(
            conv_bn(channels, before_3x3, bias=True), conv_bn(before_3x3, of_3x3, kernel=3, bias=True)
        )
        branch_5x5 = nn.Sequential(
            conv_bn(channels, before_5x5, bias=True),
            conv_bn(before_5x5, of_5x5, kernel=3, bias=True),
            conv_bn(of_5x5, of_5x5, kernel=3, bias=True),
        )
        branch_pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), conv_bn(channels, after_pool, bias=True))
        layers.append(Branches(branch_1x1, branch_3x3, branch_5x5, branch_pool))
        channels = of_1x1 + of_3x3 + of_5x5 + after_pool
    return nn.Sequential(*layers, Head(channels, classes))


@registry.models.add("mobilenet")
def mobilenet(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """MobileNet (Howard et al. 2017) with stride 1 in the stem: (B, 3, H, W) -> (B, classes)."""

    def block(fan_in: int, fan_out: int, stride: int) -> list[nn.Module]:
        return [conv_bn(fan_in, fan_in, 3, stride, groups=fan_in), conv_bn(fan_in, fan_out)]

    plan = (64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 6, 2), (1024, 2, 2)
    return staged(classes, width, 32, plan, block)


def _inverted(fan_in: int, fan_out: int, stride: int, expansion: int, gate: bool = False) -> list[nn.Module]:
    """Expand, convolve depthwise, project; with a shortcut where the stride is 1."""
    inner = expansion * fan_in
    body = nn.Sequential(
        conv_bn(fan_in, inner),
        conv_bn(inner, inner, 3, stride, groups=inner),
        conv_bn(inner, fan_out, relu=False),
        *([SqueezeExcite(fan_out, max(1, fan_out // 16))] if gate else []),
    )
    if stride != 1:
        return [body]
    return [Residual(body, nn.Identity() if fan_in == fan_out else conv_bn(fan_in, fan_out, relu=False))]


@registry.models.add("mobilenet-v2")
def mobilenet_v2(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """MobileNetV2 (Sandler et al. 2018), ReLU for ReLU6, strides for 32×32: (B, 3, H, W) -> (B, classes).

    Every block of stride 1 has a shortcut, a 1×1 convolution where the number of channels changes: that is
    the form whose size Table 1 of DPSGD-2020 gives.
    """
    plan = (
        (16, 1, 1, 1), (24, 2, 1, 6), (32, 3, 2, 6), (64, 4, 2, 6), (96, 3, 1, 6),
        (160, 3, 2, 6), (320, 1, 1, 6),
    )  # fmt: skip
    return staged(classes, width, 32, plan, _inverted, last=1280)


@registry.models.add("efficientnet-b0")
def efficientnet_b0(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """EfficientNet-B0 (Tan & Le 2019) in the early form of DPSGD-2020: (B, 3, H, W) -> (B, classes).

    All depthwise kernels 3×3, ReLU, squeeze-excitation after the projection with out//16 channels, strides
    2, 1, 2, 2, 1, 2, 2 after a stem of stride 1, no convolution before the head: 2,912,089 parameters.
    """
    plan = (
        (16, 1, 2, 1), (24, 2, 1, 6), (40, 2, 2, 6), (80, 3, 2, 6), (112, 3, 1, 6),
        (192, 4, 2, 6), (320, 1, 2, 6),
    )  # fmt: skip
    return staged(classes, width, 32, plan, functools.partial(_inverted, gate=True))


class _Half(nn.Module):
    """The first (0) or second (1) half of the channels."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[self.which]


def _shuffled(fan_in: int, fan_out: int, stride: int) -> list[nn.Module]:
    """Two branches, and a shuffle of their channels; with a stride of 1 half of them stay as they are."""
    half = fan_out // 2
    first: list[nn.Module]
    second: list[nn.Module] = []
    if stride == 1:
        first, second, fan_in = [_Half(0)], [_Half(1)], half
    else:
        first = [conv_bn(fan_in, fan_in, 3, stride, groups=fan_in, relu=False), conv_bn(fan_in, half)]
    second += [
        conv_bn(fan_in, half),
        conv_bn(half, half, 3, stride, groups=half, relu=False),
        conv_bn(half, half),
    ]
    return [Branches(nn.Sequential(*first), nn.Sequential(*second)), nn.ChannelShuffle(2)]


@registry.models.add("shufflenet-v2")
def shufflenet_v2(classes: AtLeastTwo = 10, width: Positive = 1.0) -> nn.Sequential:
    """ShuffleNetV2 1× (Ma et al. 2018), stem of stride 1, no max-pooling: (B, 3, H, W) -> (B, classes)."""
    return staged(classes, width, 24, ((58, 4, 2), (116, 8, 2), (232, 4, 2)), _shuffled, times=2, last=1024)


EXTRA = "'sgd-landscape[imagenet]'"

# Our name -> torchvision's.
NETWORKS = {
    "imagenet-alexnet": "alexnet",
    "imagenet-densenet-161": "densenet161",
    "imagenet-resnet-50": "resnet50",
    "imagenet-resnext-50": "resnext50_32x4d",
    "imagenet-vgg-11": "vgg11",
    "imagenet-vgg-11-bn": "vgg11_bn",
}


def network(name: str) -> Callable[..., nn.Module]:
    """The factory of one of NETWORKS, with initial weights, for images (B, 3, 224, 224)."""

    def build(classes: AtLeastTwo = 1000) -> nn.Module:
        """torchvision's network with initial weights, for images (B, 3, 224, 224).

        Args:
            classes: Number of classes. Source: ImageNet's.
        """
        factory = getattr(optional("torchvision.models", f"model '{name}'", EXTRA), NETWORKS[name])
        return factory(weights=None, num_classes=classes)

    return build


for name in NETWORKS:
    registry.models.add(name)(network(name))

"""Normalizations, parametrizations and convolutions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.battery.case import Case, Parts, classes, images, module, net, warmed


def _flat(name: str, norm: Callable[[], nn.Module], **expected: Any) -> Case:
    """Linear, the normalization of 5 features, tanh, linear."""

    def build() -> Parts:
        model = nn.Sequential(nn.Linear(4, 5), norm(), nn.Tanh(), nn.Linear(5, 3))
        return warmed(model, torch.randn(16, 4)), F.cross_entropy, classes()

    return Case(name, build, **expected)


def _image(name: str, *layers: Callable[[], nn.Module], **expected: Any) -> Case:
    """Layers from 2 channels to 3, tanh, mean over the pixels, linear."""

    def build() -> Parts:
        body = nn.Sequential(*(layer() for layer in layers))
        model = net(lambda m, x: m.head(m.body(x).tanh().mean((2, 3))), body=body, head=nn.Linear(3, 3))
        return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()

    return Case(name, build, **expected)


def _conv(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(2, 3, 3, **options)


def _of_dimension(dimension: int) -> Case:
    conv, norm = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[dimension]
    shape = (9, 2, *[4] * dimension)

    def build() -> Parts:
        model = nn.Sequential(conv(2, 2, 2), norm(2), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 3**dimension, 3))
        model = warmed(model, torch.randn(shape))
        return model, F.cross_entropy, (torch.randn(shape), torch.randint(3, (9,)))

    return Case(f"convolution {dimension}d with BatchNorm{dimension}d", build)


def _old(wrap: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return wrap(nn.Linear(5, 5), *args, **options)

    return make


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def _parametrized(module: nn.Module, how: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", how)


def conv_used_again_by_weight() -> Parts:
    """The convolution's weight a second time, by name, after conv–BN."""

    @module(c=nn.Conv2d(2, 2, 3, padding=1), n=nn.BatchNorm2d(2), head=nn.Linear(2, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        h = m.n(m.c(x)).relu()
        return m.head(F.conv2d(h, m.c.weight, padding=1).mean((2, 3)))

    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def tied_after_batchnorm() -> Parts:
    """One weight in two convolutions, the first of them before a BatchNorm."""
    a, b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    b.weight = a.weight
    model = net(
        lambda m, x: m.head(m.b(m.n(m.a(x)).relu()).mean((2, 3))),
        a=a, b=b, n=nn.BatchNorm2d(2), head=nn.Linear(2, 3),
    )  # fmt: skip
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def tied_each_with_batchnorm() -> Parts:
    a, b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    b.weight, b.bias = a.weight, a.bias
    layers = a, nn.BatchNorm2d(2), nn.ReLU(), b, nn.BatchNorm2d(2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 3))
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def tied_affine() -> Parts:
    first, second = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3), first, nn.ReLU(), nn.Conv2d(2, 2, 3), second, nn.Flatten(), nn.Linear(8, 3)
    )
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def module_used_twice() -> Parts:
    model = net(
        lambda m, x: m.head(m.n(m.c(m.n(m.c(x)).tanh())).mean((2, 3))),
        c=nn.Conv2d(2, 2, 3, padding=1), n=nn.BatchNorm2d(2), head=nn.Linear(2, 3),
    )  # fmt: skip
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def tutorial_network() -> Parts:
    """PyTorch's tutorial: two convolutions with pooling, then x.view(-1, channels · height · width)."""

    @module(conv1=nn.Conv2d(2, 3, 3), conv2=nn.Conv2d(3, 3, 2), fc1=nn.Linear(12, 4), fc2=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(m.conv1(x)), 2)
        x = F.max_pool2d(F.relu(m.conv2(x)), 2)
        x = x.view(-1, 3 * 2 * 2)
        return m.fc2(F.relu(m.fc1(x)))

    return model, F.cross_entropy, images(9, 2, 12)


def unet() -> Parts:
    """Down, up and a skip; a class for each pixel."""

    @module(
        down=nn.Conv2d(2, 3, 2, stride=2), up=nn.ConvTranspose2d(3, 2, 2, stride=2), head=nn.Conv2d(4, 3, 1)
    )
    def model(m: Any, x: Tensor) -> Tensor:
        down = F.relu(m.down(x))
        up = F.relu(m.up(down))
        return m.head(torch.cat((up, x), 1))

    return model, F.cross_entropy, (torch.randn(5, 2, 4, 4), torch.randint(3, (5, 4, 4)))


def spectral_with_batchnorm() -> Parts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        c = nn.utils.spectral_norm(nn.Conv2d(2, 3, 3))
    model = nn.Sequential(c, nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def channels_last() -> Parts:
    """A model and images that their user has laid out channels last."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    x, y = images()
    form = torch.channels_last
    return model.to(memory_format=form), F.cross_entropy, (x.contiguous(memory_format=form), y)


def batchnorm_without_affine_behind_convolution() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(48, 3)
    )
    return warmed(model, torch.randn(8, 2, 6, 6)), F.cross_entropy, images()


def batch_statistics() -> Parts:
    """What the refusal of such layers advises: the data as one batch, which is never split."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    return model, F.cross_entropy, [classes()]


def each_once(y: Tensor) -> Tensor:
    return torch.ones(len(y))


CASES = [
    _flat("BatchNorm1d", lambda: nn.BatchNorm1d(5)),
    _flat("BatchNorm1d track_running_stats=False", lambda: nn.BatchNorm1d(5, track_running_stats=False), said="all"),
    _flat("LayerNorm", lambda: nn.LayerNorm(5)),
    _flat("RMSNorm", lambda: nn.RMSNorm(5)),
    _flat("spectral_norm old", _old(nn.utils.spectral_norm)),
    _flat("spectral_norm new", lambda: parametrizations.spectral_norm(nn.Linear(5, 5))),
    _flat("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(5, 5)), differences=True),
    _flat("own parametrization", lambda: _parametrized(nn.Linear(5, 5), Symmetric())),
    _flat("dropout in eval mode", lambda: nn.Dropout(0.5)),
    _image("BatchNorm2d", _conv(), lambda: nn.BatchNorm2d(3)),
    _image("BatchNorm2d before the convolution", lambda: nn.BatchNorm2d(2), _conv()),
    _image("BatchNorm2d track_running_stats=False", _conv(), lambda: nn.BatchNorm2d(3, track_running_stats=False), said="all"),
    _image("GroupNorm", _conv(), lambda: nn.GroupNorm(3, 3)),
    _image("InstanceNorm2d with statistics", _conv(), lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    _image("convolution dilated circular", _conv(dilation=2, padding=2, padding_mode="circular")),
    _image("convolution strided", _conv(stride=2, padding="valid"), lambda: nn.BatchNorm2d(3), nn.ReLU),
    _image("transposed convolution with BatchNorm", lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), lambda: nn.BatchNorm2d(3), nn.ReLU),
    _of_dimension(1),
    _of_dimension(3),
    Case("convolution's weight used again", conv_used_again_by_weight),
    Case("convolutions tied, one with BatchNorm", tied_after_batchnorm),
    Case("convolutions tied, each with BatchNorm", tied_each_with_batchnorm),
    Case("affine parameters tied", tied_affine),
    Case("convolution and BatchNorm used twice", module_used_twice),
    Case("the tutorial's network, x.view(-1, n)", tutorial_network),
    Case("channels last", channels_last),
    Case("U-net with a class a pixel", unet),
    Case("spectral_norm old with BatchNorm", spectral_with_batchnorm),
    Case("BatchNorm2d affine=False", batchnorm_without_affine_behind_convolution),
    Case("batch statistics, one batch", batch_statistics, options={"terms": each_once}),
]  # fmt: skip

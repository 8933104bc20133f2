"""Networks by name. ``build("mlp", widths=[784, 50, 50, 10])``; ``names()`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from landscape.core.options import check_keywords, choose
from landscape.models import imagenet
from landscape.models.densenet import densenet121
from landscape.models.googlenet import googlenet
from landscape.models.lstm import LSTM
from landscape.models.mlp import mlp
from landscape.models.mobilenet import efficientnet_b0, mobilenet, mobilenet_v2
from landscape.models.quadratic import Quadratic
from landscape.models.resnet import resnet18, resnet20, resnext29, senet18
from landscape.models.saddle import Saddle
from landscape.models.shufflenet import shufflenet_v2
from landscape.models.vgg import lenet5, vgg19

_REGISTRY: dict[str, Callable[..., nn.Module]] = {
    "densenet-121": densenet121,
    "efficientnet-b0": efficientnet_b0,
    "googlenet": googlenet,
    "lenet-5": lenet5,
    "lstm": LSTM,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "mobilenet-v2": mobilenet_v2,
    "quadratic": Quadratic,
    "resnet-18": resnet18,
    "resnet-20": resnet20,
    "resnext-29": resnext29,
    "saddle": Saddle,
    "senet-18": senet18,
    "shufflenet-v2": shufflenet_v2,
    "vgg-19": vgg19,
    **{name: imagenet.network(name) for name in imagenet.NETWORKS},
}


def names() -> list[str]:
    """The names that :func:`build` knows."""
    return sorted(_REGISTRY)


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the network's parameters, defaults filled in; InputError names the key."""
    return check_keywords("model", given, _REGISTRY[choose("model.name", name, _REGISTRY)])


def build(name: str, **kwargs: Any) -> nn.Module:
    """A new network with PyTorch's default initialisation from the current global random state.

    Raises InputError for an unknown name or option, naming the nearest known one.
    """
    return _REGISTRY[choose("model.name", name, _REGISTRY)](**options(name, kwargs))

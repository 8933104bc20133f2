"""Networks for ImageNet from torchvision, an optional extra that is imported when a network is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from landscape.core import registry
from landscape.core.errors import FailedError
from landscape.core.options import positive

# Our name -> torchvision's.
NETWORKS = {
    "imagenet-alexnet": "alexnet",
    "imagenet-densenet-161": "densenet161",
    "imagenet-resnet-50": "resnet50",
    "imagenet-resnext-50": "resnext50_32x4d",
    "imagenet-vgg-11": "vgg11",
    "imagenet-vgg-11-bn": "vgg11_bn",
}


def torchvision(module: str, wanted: str) -> Any:
    """torchvision's ``module``; FailedError says what to install if it is missing."""
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError as error:
        raise FailedError(
            f"{wanted}: needs torchvision, which cannot be imported here ({error}); "
            "pip install 'sgd-landscape[imagenet]'"
        ) from error


def network(name: str) -> Callable[..., nn.Module]:
    """The factory of one of NETWORKS, with initial weights, for images (B, 3, 224, 224)."""

    def build(classes: int = 1000) -> nn.Module:
        positive("model.classes", classes, least=2)
        factory = getattr(torchvision("models", f"model '{name}'"), NETWORKS[name])
        model: nn.Module = factory(weights=None, num_classes=classes)
        return model

    return build


for name in NETWORKS:
    registry.models.add(name)(network(name))

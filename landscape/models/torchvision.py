"""Networks for ImageNet from torchvision, an optional extra that is imported when a network is built."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from landscape.core import registry
from landscape.core.extras import optional
from landscape.core.options import positive

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

    def build(classes: int = 1000) -> nn.Module:
        """torchvision's network with initial weights, for images (B, 3, 224, 224).

        Args:
            classes: Number of classes. Source: ImageNet's.
        """
        positive("model.classes", classes, least=2)
        factory = getattr(optional("torchvision.models", f"model '{name}'", EXTRA), NETWORKS[name])
        model: nn.Module = factory(weights=None, num_classes=classes)
        return model

    return build


for name in NETWORKS:
    registry.models.add(name)(network(name))

"""Networks by name. ``build("mlp", widths=[784, 50, 50, 10])``; ``names()`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from landscape.models.mlp import mlp
from landscape.models.quadratic import Quadratic
from landscape.options import check_keywords, choose

_REGISTRY: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "quadratic": Quadratic}


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

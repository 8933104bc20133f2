"""Networks by name. ``build("mlp", widths=[784, 50, 50, 10])``; ``names()`` lists them.

Each network adds itself to :data:`landscape.core.registry.models` in its own file.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import check_keywords

__all__ = ["build", "names", "options"]


def names() -> list[str]:
    """The names of all networks, those of plugins included.

    Returns:
        The names, sorted.

    Example:
        >>> {"mlp", "resnet-18"} <= set(names())
        True
    """
    return registry.models.names()


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a network, checked and with their defaults.

    Args:
        name: one of :func:`names`.
        given: the options that are given.

    Returns:
        All options of the network.

    Raises:
        InputError: for an unknown name or option, or a value of another type; it names the key.

    Example:
        >>> options("mlp", {"widths": [64, 10]})
        {'widths': [64, 10], 'activation': 'relu'}
    """
    return check_keywords("model", given, registry.models[name])


def build(name: str, **kwargs: Any) -> nn.Module:
    """A new network with PyTorch's default initialisation from the current global random state.

    Args:
        name: one of :func:`names`.
        kwargs: its options, such as ``widths=[784, 50, 50, 10]``; those left out have their defaults.

    Returns:
        The network, in training mode.

    Raises:
        InputError: for an unknown name or option; it names the nearest known one.

    Example:
        >>> sum(p.numel() for p in build("mlp", widths=[784, 50, 50, 10]).parameters())
        42310
    """
    model = registry.models[name](**options(name, kwargs))
    if not isinstance(model, nn.Module):  # as a plugin may have it
        raise InputError(f"model.name: '{name}' gives a {type(model).__name__}, it must give an nn.Module")
    return model

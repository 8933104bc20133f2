"""Networks by name. ``build("mlp", widths=[784, 50, 50, 10])``; ``names()`` lists them.

Each network adds itself to :data:`landscape.core.registry.models` in its own file.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from landscape.core.errors import InputError
from landscape.core.registry import models

__all__ = ["build", "names", "options"]

names, options = models.names, models.options


def build(name: str, **kwargs: Any) -> nn.Module:
    """A new network with PyTorch's default initialization from the current global random state.

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
    model = models.make(name, kwargs)
    if not isinstance(model, nn.Module):  # as a plugin may have it
        raise InputError(f"model.name: '{name}' gives a {type(model).__name__}, it must give an nn.Module")
    return model

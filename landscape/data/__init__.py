"""Data sets by name. ``load("mnist", data_dir="…")``; ``names()`` lists them.

Each data set adds itself to :data:`landscape.core.registry.data_sets` in its own file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import check_keywords
from landscape.data.base import Dataset

__all__ = ["Dataset", "load", "names", "options"]


def names() -> list[str]:
    """The names of all data sets, those of plugins included.

    Returns:
        The names, sorted.

    Example:
        >>> {"digits", "mnist"} <= set(names())
        True
    """
    return registry.data_sets.names()


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a data set, checked and with their defaults.

    Args:
        name: one of :func:`names`.
        given: the options that are given.

    Returns:
        All options of the data set but ``data_dir``.

    Raises:
        InputError: for an unknown name or option, or a value of another type; it names the key.

    Example:
        >>> options("digits", {"form": "image"})
        {'form': 'image', 'test_samples': 360}
    """
    return check_keywords("data", given, registry.data_sets[name], given=("data_dir",))


def load(name: str, *, data_dir: str | Path | None = None, **kwargs: Any) -> Dataset:
    """The data set ``name``.

    Args:
        name: one of :func:`names`.
        data_dir: the folder with the data sets that are not bundled; None: the variable LANDSCAPE_DATA, or
            "data".
        kwargs: options of the data set; those left out have their defaults.

    Returns:
        Its two splits and its loss.

    Raises:
        InputError: for an unknown name or option.
        FailedError: for files that are missing or damaged.

    Example:
        >>> x, y = load("digits").train
        >>> tuple(x.shape), tuple(y.shape)
        ((1437, 64), (1437,))
    """
    dataset = registry.data_sets[name](data_dir=data_dir, **options(name, kwargs))
    if not isinstance(dataset, Dataset):  # as a plugin may have it
        raise InputError(f"data.name: '{name}' gives a {type(dataset).__name__}, it must give a Dataset")
    return dataset

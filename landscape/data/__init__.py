"""Data sets by name. ``load("mnist", data_dir="…")``; ``names()`` lists them.

Each data set adds itself to :data:`landscape.core.registry.data_sets` in its own file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.core.errors import InputError
from landscape.core.options import checked
from landscape.core.registry import data_sets
from landscape.data.base import Dataset

__all__ = ["Dataset", "load", "names", "options"]


names, options = data_sets.names, data_sets.options


@checked()
def load(name: str, *, data_dir: str | Path | None = None, **kwargs: Any) -> Dataset:
    """The data set ``name``.

    Args:
        name: one of :func:`names`.
        data_dir: the folder with the data sets that are not bundled; None: the environment variable
            LANDSCAPE_DATA, or "data".
        kwargs: options of the data set; those left out have their defaults.

    Returns:
        The data set: its two splits and its loss.

    Raises:
        InputError: for an unknown name or option.
        OperationError: for files that are missing or damaged.

    Example:
        >>> x, y = load("digits").train
        >>> tuple(x.shape), tuple(y.shape)
        ((1437, 64), (1437,))
    """
    dataset = data_sets.make(name, kwargs, data_dir=data_dir)
    if not isinstance(dataset, Dataset):  # a plugin's function may return anything
        raise InputError(f"data.name: '{name}' gives a {type(dataset).__name__}, it must give a Dataset")
    return dataset

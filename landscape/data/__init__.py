"""Data sets by name. ``load("mnist", data_dir="…")``; ``names()`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from landscape.core.options import check_keywords, choose
from landscape.data.base import Dataset
from landscape.data.cifar import cifar10, cifar100
from landscape.data.digits import digits
from landscape.data.folder import image_folder
from landscape.data.idx import fashion_mnist, mnist
from landscape.data.speech import speech_list, spoken_digits
from landscape.data.synthetic import quadratic, synthetic

__all__ = ["Dataset", "load", "names", "options"]

_REGISTRY: dict[str, Callable[..., Dataset]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "image-folder": image_folder,
    "mnist": mnist,
    "quadratic": quadratic,
    "speech-list": speech_list,
    "spoken-digits": spoken_digits,
    "synthetic": synthetic,
}


def names() -> list[str]:
    """The names that :func:`load` knows."""
    return sorted(_REGISTRY)


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the data set's options, defaults filled in; InputError names the key."""
    loader = _REGISTRY[choose("data.name", name, _REGISTRY)]
    return check_keywords("data", given, loader, given=("data_dir",))


def load(name: str, *, data_dir: str | Path | None = None, **kwargs: Any) -> Dataset:
    """The data set ``name``. ``data_dir`` (or the variable LANDSCAPE_DATA) holds what is not bundled.

    Raises InputError for an unknown name or option, FailedError for files that are missing or damaged.
    """
    return _REGISTRY[choose("data.name", name, _REGISTRY)](data_dir=data_dir, **options(name, kwargs))

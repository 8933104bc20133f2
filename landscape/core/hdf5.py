"""HDF5 in one place: files written whole, and read with their parts checked.

Files hold plain arrays and attributes (DESIGN, files): no pickled object, so reading one never runs code.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import h5py
import numpy as np
import torch

from landscape._version import __version__
from landscape.core import hdf5_verify
from landscape.core.errors import FailedError, InputError
from landscape.core.files import replacing
from landscape.core.files import write_text as write_text

if TYPE_CHECKING:
    pass


Array = np.ndarray[Any, Any]
T = TypeVar("T", bool, int, float, str)
# Coordinates beyond this cannot be drawn or stepped between: their differences overflow (ours).
LARGEST = 1e100


@contextlib.contextmanager
def writing(path: str | Path, schema: str, version: int = 1) -> Iterator[h5py.File]:
    """A new HDF5 file that appears under ``path`` only when whole, with a checksum at its end.

    On any error what stood at ``path`` is untouched. Raises FailedError for a folder that is not there, no
    permission or no space.
    """
    with replacing(path) as raw, hdf5_verify.writing(raw) as file:
        _stamp(file, schema, version)
        yield file


@contextlib.contextmanager
def changed_copy(source: str | Path, target: str | Path) -> Iterator[h5py.File]:
    """A copy of ``source``, to be changed; it appears under ``target`` when whole, as :func:`writing`."""
    with replacing(target) as raw, hdf5_verify.writing(raw, Path(source)) as file:
        yield file


def _stamp(file: h5py.File, schema: str, version: int) -> None:
    """The attributes that every file has."""
    file.attrs["schema"] = schema
    file.attrs["version"] = version
    file.attrs["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    file.attrs["landscape_version"] = __version__
    file.attrs["torch_version"] = str(torch.__version__)


@contextlib.contextmanager
def reading(
    path: str | Path, schema: str | None = None, version: int = 1, warn: bool = True
) -> Iterator[h5py.File]:
    """An HDF5 file of this project, checked; with ``schema`` given, of that one.

    Raises FailedError for a file that is missing, damaged, foreign, of another schema, of a newer version, or
    that lacks what the caller reads from it. With ``warn``, warns of one without a checksum (see
    :mod:`landscape.core.hdf5_verify`).
    """
    path = Path(path)
    if not path.exists():
        raise FailedError(f"{path}: no such file; an .h5 file that landscape wrote is needed")
    with hdf5_verify.reading(path) as (file, sealed):
        try:
            found = file.attrs.get("schema")
            if not isinstance(found, str) or not found.startswith("landscape."):
                raise FailedError(f"{path}: an HDF5 file, but not one that landscape wrote")
            if schema is not None and found != schema:
                raise FailedError(f"{path}: holds a {found}, a {schema} is needed")
            newest = attribute(file, "version", int)
            if newest > version:
                raise FailedError(
                    f"{path}: {found} version {newest} is newer than {version}, the newest that "
                    f"landscape {__version__} reads; update landscape"
                )
            if warn and not sealed:
                hdf5_verify.warn_unsealed(path)
            yield file
        except InputError:
            raise
        except Exception as error:  # a file may hold anything: what does not fit is the file's fault
            raise FailedError(f"{path}: damaged or incomplete ({hdf5_verify.first_words(error)})") from error


def group(parent: h5py.Group, name: str) -> h5py.Group:
    """The group ``name``; ValueError that names it where there is none."""
    found = parent.get(name)
    if not isinstance(found, h5py.Group):
        raise ValueError(
            f"{location(parent, name)} is {'missing' if found is None else 'a data set'}, a group is needed"
        )
    return found


def dataset(parent: h5py.Group, name: str, kinds: str = "fiub", dims: int | None = None) -> h5py.Dataset:
    """The data set ``name`` of one of numpy's ``kinds``, with ``dims`` dimensions; ValueError names it."""
    found, place = parent.get(name), location(parent, name)
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"{place} is {'missing' if found is None else 'a group'}, a data set is needed")
    if found.dtype.kind not in kinds or not found.dtype.isnative:
        raise ValueError(f"{place} holds {found.dtype}, which is not what belongs there")
    if dims is not None and found.ndim != dims:
        raise ValueError(f"{place} has shape {found.shape}, {dims} dimensions are needed")
    return found


def attribute(parent: h5py.Group, name: str, kind: type[T]) -> T:
    """The attribute ``name`` as a bool, int, float or str; ValueError that names it for anything else."""
    place = f"attribute {location(parent, name)}"
    if name not in parent.attrs:
        raise ValueError(f"{place} is missing")
    value = parent.attrs[name]
    allowed: dict[type, Any] = {
        str: str,
        bool: (bool, np.bool_),
        int: (int, np.integer),
        float: (int, float, np.integer, np.floating),
    }
    if not isinstance(value, allowed[kind]):
        raise ValueError(
            f"{place} is {hdf5_verify.first_words(ValueError(repr(value)))}, {kind.__name__} is needed"
        )
    return kind(value)


def location(parent: h5py.Group, name: str) -> str:
    """The full name of a member of ``parent``, for messages."""
    return f"{(parent.name or '').rstrip('/')}/{name}"


def sha256(path: str | Path) -> str:
    """SHA-256 (hex) of the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

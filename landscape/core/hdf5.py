"""Reading and writing of HDF5: files are replaced only when whole, and their parts are checked when read.

Files contain only arrays and attributes, and no pickled objects: reading a file never runs code.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import torch

from landscape._version import __version__
from landscape.core import hdf5_verify
from landscape.core.errors import FailedError, InputError
from landscape.core.files import replacing

Array = np.ndarray[Any, Any]
T = TypeVar("T", bool, int, float, str)
# Larger coordinates cannot be drawn, because their differences overflow (ours).
LARGEST = 1e100


@contextlib.contextmanager
def writing(path: str | Path, schema: str, version: int = 1) -> Iterator[h5py.File]:
    """A context with a new HDF5 file that replaces ``path`` at the end, with a checksum after its last byte.

    After an error the file at ``path`` is unchanged.

    Args:
        schema, version: the name and the version of the format, written as attributes.

    Raises:
        FailedError: the folder does not exist, or there is no permission or no space.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writing(f"{folder}/a.h5", "landscape.example") as file:
        ...         file.attrs["n"] = 5
        ...     with reading(f"{folder}/a.h5") as file:
        ...         attribute(file, "n", int)
        5
    """
    with replacing(path) as raw, hdf5_verify.writing(raw) as file:
        _stamp(file, schema, version)
        yield file


@contextlib.contextmanager
def changed_copy(source: str | Path, target: str | Path) -> Iterator[h5py.File]:
    """A context with a copy of the HDF5 file ``source`` to be changed; it replaces ``target`` at the end.

    Raises:
        FailedError: the folder does not exist, or there is no permission or no space.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writing(f"{folder}/a.h5", "landscape.example") as file:
        ...         file.attrs["n"] = 5
        ...     with changed_copy(f"{folder}/a.h5", f"{folder}/b.h5") as file:
        ...         file.attrs["n"] = 6
        ...     with reading(f"{folder}/b.h5") as file:
        ...         attribute(file, "n", int)
        6
    """
    with replacing(target) as raw, hdf5_verify.writing(raw, Path(source)) as file:
        yield file


def _stamp(file: h5py.File, schema: str, version: int) -> None:
    """Write the attributes that every file has."""
    file.attrs["schema"] = schema
    file.attrs["version"] = version
    file.attrs["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    file.attrs["landscape_version"] = __version__
    file.attrs["torch_version"] = str(torch.__version__)


@contextlib.contextmanager
def reading(
    path: str | Path, schema: str | None = None, version: int = 1, warn: bool = True
) -> Iterator[h5py.File]:
    """A context with an HDF5 file of this project, open for reading and checked.

    Args:
        schema: the format that the file must have; None: any.
        version: the newest version of the format that the caller can read.
        warn: whether to warn of a file without a checksum (see :mod:`landscape.core.hdf5_verify`).

    Raises:
        FailedError: the file is missing, damaged, of another program, of another format or of a newer
            version, or what the caller reads from it is missing.

    Example:
        >>> with reading("missing.h5") as file:
        ...     pass
        Traceback (most recent call last):
        landscape.core.errors.FailedError: missing.h5: no such file; ...
    """
    path = Path(path)
    if not path.exists():
        raise FailedError(f"{path}: no such file; an .h5 file that landscape wrote is needed")
    with hdf5_verify.reading(path) as (file, sealed):
        try:
            actual = file.attrs.get("schema")
            if not isinstance(actual, str) or not re.fullmatch(r"landscape(\.\w+)+", actual):
                raise FailedError(f"{path}: an HDF5 file, but not one that landscape wrote")
            if schema is not None and actual != schema:
                raise FailedError(f"{path}: holds a {actual}, a {schema} is needed")
            newest = attribute(file, "version", int)
            if newest > version:
                raise FailedError(
                    f"{path}: {actual} version {newest} is newer than {version}, the newest that "
                    f"landscape {__version__} reads; update landscape"
                )
            if warn and not sealed:
                hdf5_verify.warn_unsealed(path)
            yield file
        except InputError:
            raise
        except Exception as error:  # the file may contain anything, so every error is due to its content
            raise FailedError(f"{path}: damaged or incomplete ({hdf5_verify.first_words(error)})") from error


def group(parent: h5py.Group, name: str) -> h5py.Group:
    """The group ``name`` of ``parent``.

    Raises:
        ValueError: there is no such group.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     group(file, "history")
        Traceback (most recent call last):
        ValueError: /history is missing, a group is needed
    """
    member = parent.get(name)
    if not isinstance(member, h5py.Group):
        state = "missing" if member is None else "a data set"
        raise ValueError(f"{location(parent, name)} is {state}, a group is needed")
    return member


def dataset(parent: h5py.Group, name: str, kinds: str = "fiub", dims: int | None = None) -> h5py.Dataset:
    """The data set ``name`` of ``parent``.

    Args:
        kinds: allowed kinds of numbers, as the codes of numpy's ``dtype.kind``.
        dims: needed number of dimensions; None: any.

    Raises:
        ValueError: there is no such data set, or it has another kind or number of dimensions.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     file["loss"] = [0.5, 0.25]
        ...     dataset(file, "loss", "f", dims=1).shape
        (2,)
    """
    member, place = parent.get(name), location(parent, name)
    if not isinstance(member, h5py.Dataset):
        raise ValueError(f"{place} is {'missing' if member is None else 'a group'}, a data set is needed")
    if member.dtype.kind not in kinds or not member.dtype.isnative:
        raise ValueError(f"{place} holds {member.dtype}, one of the kinds '{kinds}' is needed")
    if dims is not None and member.ndim != dims:
        raise ValueError(f"{place} has shape {member.shape}, {dims} dimensions are needed")
    return member


def attribute(parent: h5py.Group, name: str, kind: type[T]) -> T:
    """The attribute ``name`` of ``parent``.

    Args:
        kind: bool, int, float or str.

    Raises:
        ValueError: there is no such attribute, or it has another type.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     file.attrs["lr"] = 1
        ...     attribute(file, "lr", float)
        1.0
    """
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
    """The full name of a member of ``parent``, for messages.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     location(file.create_group("history"), "loss")
        '/history/loss'
    """
    return f"{(parent.name or '').rstrip('/')}/{name}"


def sha256(path: str | Path) -> str:
    """SHA-256 of the bytes of a file, as 64 hexadecimal digits.

    Example:
        >>> len(sha256(__file__))
        64
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

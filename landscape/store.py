"""HDF5 in one place: atomic writing, checked reading, and results that save and load themselves.

Files hold plain arrays and attributes (DESIGN, files): no pickled object, so reading one never runs code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import h5py
import numpy as np
import torch

from landscape import hdf5
from landscape._version import __version__
from landscape.files import replacing
from landscape.files import write_text as write_text
from landscape.options import FailedError, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]
# Characters of a result's one line (ours).
LINE = 200
T = TypeVar("T", bool, int, float, str)
# Coordinates beyond this cannot be drawn or stepped between: their differences overflow (ours).
LARGEST = 1e100
_NUMBER = re.compile("[0-9]+")


@contextlib.contextmanager
def writing(path: str | Path, schema: str, version: int = 1) -> Iterator[h5py.File]:
    """A new HDF5 file that appears under ``path`` only when whole, with a checksum at its end.

    On any error what stood at ``path`` is untouched. Raises FailedError for a folder that is not there, no
    permission or no space.
    """
    with replacing(path) as raw, hdf5.writing(raw) as file:
        _stamp(file, schema, version)
        yield file


@contextlib.contextmanager
def changed_copy(source: str | Path, target: str | Path) -> Iterator[h5py.File]:
    """A copy of ``source``, to be changed; it appears under ``target`` when whole, as :func:`writing`."""
    with replacing(target) as raw, hdf5.writing(raw, Path(source)) as file:
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
    :mod:`landscape.hdf5`).
    """
    path = Path(path)
    if not path.exists():
        raise FailedError(f"{path}: no such file; an .h5 file that landscape wrote is needed")
    with hdf5.reading(path) as (file, sealed):
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
                hdf5.warn_unsealed(path)
            yield file
        except InputError:
            raise
        except Exception as error:  # a file may hold anything: what does not fit is the file's fault
            raise FailedError(f"{path}: damaged or incomplete ({hdf5.first_words(error)})") from error


def group(parent: h5py.Group, name: str) -> h5py.Group:
    """The group ``name``; ValueError that names it where there is none."""
    found = parent.get(name)
    if not isinstance(found, h5py.Group):
        raise ValueError(
            f"{_place(parent, name)} is {'missing' if found is None else 'a data set'}, a group is needed"
        )
    return found


def dataset(parent: h5py.Group, name: str, kinds: str = "fiub", dims: int | None = None) -> h5py.Dataset:
    """The data set ``name`` of one of numpy's ``kinds``, with ``dims`` dimensions; ValueError names it."""
    found, place = parent.get(name), _place(parent, name)
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"{place} is {'missing' if found is None else 'a group'}, a data set is needed")
    if found.dtype.kind not in kinds or not found.dtype.isnative:
        raise ValueError(f"{place} holds {found.dtype}, which is not what belongs there")
    if dims is not None and found.ndim != dims:
        raise ValueError(f"{place} has shape {found.shape}, {dims} dimensions are needed")
    return found


def attribute(parent: h5py.Group, name: str, kind: type[T]) -> T:
    """The attribute ``name`` as a bool, int, float or str; ValueError that names it for anything else."""
    place = f"attribute {_place(parent, name)}"
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
        raise ValueError(f"{place} is {hdf5.first_words(ValueError(repr(value)))}, {kind.__name__} is needed")
    return kind(value)


def _place(parent: h5py.Group, name: str) -> str:
    return f"{(parent.name or '').rstrip('/')}/{name}"


def sha256(path: str | Path) -> str:
    """SHA-256 (hex) of the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class About(typing.TypedDict, total=False):
    """Where a result came from: split of the data, a label for plots, source file and its SHA-256."""

    split: str
    label: str
    source: str
    source_sha256: str


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished analysis: arrays and plain attributes that save and load themselves.

    Array fields become data sets, the rest attributes. A field with a default may be absent from a file,
    which may be older than the field; an empty array is not written there.

    Subclasses name a ``schema``; ``shapes``, field -> its dimensions by name or number, such as "ny nx", the
    same name meaning the same number everywhere and "+" that it is not 0; ``axes_of``, those of its arrays
    that are coordinates: finite and increasing; ``texts``, arrays of UTF-8 bytes. What does not fit is
    refused with a ValueError.
    """

    schema: ClassVar[str] = ""
    shapes: ClassVar[Mapping[str, str]] = {}
    axes_of: ClassVar[tuple[str, ...]] = ()
    texts: ClassVar[tuple[str, ...]] = ()
    schemas: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # or a dataclass would print its arrays
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]
        if cls.schema:
            Result.schemas[cls.schema] = cls

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, text in self.shapes.items():
            value = getattr(self, name)
            shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
            wanted = [size.rstrip("+") for size in text.split()]
            fits = len(wanted) == len(shape)
            for key, size, length in zip(wanted, text.split(), shape, strict=False):
                expected = int(key) if key.isdecimal() else sizes.setdefault(key, length)
                fits = fits and length == expected and (length > 0 or not size.endswith("+"))
            if not fits:
                known = ", ".join(str(sizes.get(key, key)) for key in wanted)
                raise ValueError(f"{name} has shape {shape}, it must fit ({known})")
        for name in self.axes_of:
            value = getattr(self, name)
            with np.errstate(over="ignore"):
                if not (np.abs(value) < LARGEST).all() or not (np.diff(value) > 0).all():
                    raise ValueError(f"{name} must be finite and increasing")

    def __repr__(self) -> str:
        """One line: whose result it is, and the shapes of its arrays."""
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        said = [repr(value) for name, value in values if name in ("label", "split") and value]
        said += [f"{name} {v.shape}" for name, v in values if isinstance(v, np.ndarray) and v.size]
        text = ", ".join(said)
        return f"{type(self).__name__}({text if len(text) <= LINE else text[: LINE - 1] + '…'})"

    def plot(
        self,
        style: str = "contour",
        *,
        path: str | Path | None = None,
        ax: Axes | None = None,
        **options: Any,
    ) -> Figure:
        """A picture of the result, which a notebook shows as it is and ``.show()`` puts in a window.

        Args:
            style: of a surface, "contour" or "surface" (3-D).
            path: a .png, .pdf or .svg file to write it to, too.
            ax: axes to draw into instead, where the picture has one panel; their figure is returned.
            options: such as ``title``; see :func:`landscape.plots.draw`.
        """
        # By name: a result knows nothing of who draws it, and no matplotlib is imported before.
        plots = importlib.import_module("landscape.plots")
        figure: Figure = plots.draw([self], style, ax=ax, **options)
        if path is not None:
            plots.save_figure(figure, path)
        return figure

    def save(self, path: str | Path) -> None:
        """Write to ``path``, atomically."""
        save([self], path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the one result in ``path``. Raises FailedError if it is not such a file or holds several."""
        results = load_results(path)
        if len(results) != 1 or not isinstance(results[0], cls):
            raise FailedError(f"{path}: holds {len(results)} {results[0].schema}, one {cls.schema} is needed")
        return results[0]

    def _write(self, group: h5py.Group) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) and value.size == 0 and _optional(field):
                continue  # what is absent reads as empty
            if isinstance(value, np.ndarray):
                group.create_dataset(field.name, data=value)
            elif isinstance(value, tuple):
                group.attrs[field.name] = np.array(value, dtype=h5py.string_dtype())
            else:
                group.attrs[field.name] = value

    @classmethod
    def _read(cls, group: h5py.Group) -> Self:
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            kind, name = hints[field.name], field.name
            if _optional(field) and name not in group and name not in group.attrs:
                continue
            if kind in (bool, int, float, str):
                values[name] = attribute(group, name, kind)
            elif kind == tuple[str, ...]:
                texts = group.attrs.get(name)
                if not isinstance(texts, np.ndarray) or not all(isinstance(t, str) for t in texts.flat):
                    raise ValueError(f"attribute {_place(group, name)} is no list of texts")
                values[name] = tuple(texts.ravel())
            else:
                values[name] = np.asarray(dataset(group, name, "S" if name in cls.texts else "fiub"))
        return cls(**values)


def _optional(field: dataclasses.Field[Any]) -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


def save(results: Sequence[Result], path: str | Path) -> None:
    """Write results of one kind to ``path``: one at the file's root, several in groups /0, /1, …"""
    with writing(path, results[0].schema) as file:
        for i, result in enumerate(results):
            result._write(file if len(results) == 1 else file.create_group(str(i)))


def load_results(path: str | Path) -> list[Result]:
    """The results in ``path``, in order. Raises FailedError as :func:`reading` does."""
    with reading(path) as file:
        schema = str(file.attrs["schema"])
        if schema not in Result.schemas:
            known = ", ".join(sorted(Result.schemas))
            raise FailedError(f"{path}: holds a {schema}, not a result (allowed: {known})")
        kind = Result.schemas[schema]
        numbers = {name for name in file if _NUMBER.fullmatch(name)}
        if numbers != {str(i) for i in range(len(numbers))}:
            raise ValueError(f"its groups are {', '.join(sorted(numbers))}, they must be 0, 1, …")
        numbered = [group(file, str(i)) for i in range(len(numbers))]
        return [kind._read(part) for part in numbered or [file]]

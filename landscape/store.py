"""HDF5 in one place: atomic writing, checked reading, and results that save and load themselves.

Files hold plain arrays and attributes (DESIGN, files): no pickled object, so reading one never runs code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import io
import os
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import h5py
import numpy as np
import torch

from landscape._version import __version__
from landscape.options import FailedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]
# Characters of a result's one line (ours).
LINE = 200


@contextlib.contextmanager
def writing(path: str | Path, schema: str, version: int = 1) -> Iterator[h5py.File]:
    """A new HDF5 file that appears under ``path`` only when whole: temporary file, fsync, rename.

    On any error the temporary file is removed and what stood at ``path`` is untouched. Raises FailedError
    for a folder that is not there, no permission or no space.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _CalmFile(temporary, "wb+") as raw:
            with h5py.File(raw, "w") as file:
                _stamp(file, schema, version)
                yield file
            if raw.error:
                raise raw.error
            os.fsync(raw.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise FailedError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` so that ``path`` is never half of it. Raises FailedError as :func:`writing` does."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise FailedError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class _CalmFile(io.FileIO):
    """A file whose first failed write or change of size is kept in ``error`` instead of raised.

    HDF5 reports a full disk once for every object that is open, as tracebacks from its destructors; told
    that all is well, it closes quietly, and the caller raises the one error that counts.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        while self.error is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
        return size or 0


def _stamp(file: h5py.File, schema: str, version: int) -> None:
    """The attributes that every file has."""
    file.attrs["schema"] = schema
    file.attrs["version"] = version
    file.attrs["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    file.attrs["landscape_version"] = __version__
    file.attrs["torch_version"] = str(torch.__version__)


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, on systems where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def reading(path: str | Path, schema: str | None = None, version: int = 1) -> Iterator[h5py.File]:
    """An HDF5 file of this project, checked; with ``schema`` given, of that one.

    Raises FailedError for a file that is missing, truncated, foreign, of another schema, of a newer version,
    or that lacks what the caller reads from it.
    """
    path = Path(path)
    if not path.is_file():
        raise FailedError(f"{path}: no such file; an .h5 file that landscape wrote is needed")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FailedError(f"{path}: not a readable HDF5 file ({_first_words(error)})") from error
    with file:
        found = file.attrs.get("schema")
        if not isinstance(found, str) or not found.startswith("landscape."):
            raise FailedError(f"{path}: an HDF5 file, but not one that landscape wrote")
        if schema is not None and found != schema:
            raise FailedError(f"{path}: holds a {found}, a {schema} is needed")
        if int(file.attrs.get("version", 0)) > version:
            raise FailedError(
                f"{path}: {found} version {file.attrs['version']} is newer than {version}, the newest that "
                f"landscape {__version__} reads; update landscape"
            )
        try:
            yield file
        except (KeyError, OSError, RuntimeError, TypeError, IndexError) as error:
            raise FailedError(f"{path}: damaged or incomplete ({_first_words(error)})") from error


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


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
    which may be older than the field; an empty array is not written there. Subclasses name a ``schema`` and
    may check themselves in ``__post_init__``, raising ValueError.
    """

    schema: ClassVar[str] = ""
    schemas: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # or a dataclass would print its arrays
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]
        if cls.schema:
            Result.schemas[cls.schema] = cls

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
            kind = hints[field.name]
            if _optional(field) and field.name not in group and field.name not in group.attrs:
                continue
            if kind in (bool, int, float, str):
                values[field.name] = kind(group.attrs[field.name])
            elif kind == tuple[str, ...]:
                values[field.name] = tuple(str(text) for text in group.attrs[field.name])
            else:
                values[field.name] = np.asarray(group[field.name])
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
        numbered = [file[name] for name in sorted((n for n in file if n.isdigit()), key=int)]
        try:
            return [kind._read(group) for group in numbered or [file]]
        except ValueError as error:
            raise FailedError(f"{path}: damaged or incomplete ({_first_words(error)})") from error

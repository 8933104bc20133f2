"""A finished analysis: arrays and attributes that save and load themselves."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import h5py
import numpy as np

from landscape.core.errors import FailedError
from landscape.core.files import write_text as write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from landscape.core.hdf5 import LARGEST, _place, attribute, dataset, group, reading, writing

# Characters of a result's one line (ours).
LINE = 200
_NUMBER = re.compile("[0-9]+")


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
        _import_kinds()
        if schema not in Result.schemas:
            known = ", ".join(sorted(Result.schemas))
            raise FailedError(f"{path}: holds a {schema}, not a result (allowed: {known})")
        kind = Result.schemas[schema]
        numbers = {name for name in file if _NUMBER.fullmatch(name)}
        if numbers != {str(i) for i in range(len(numbers))}:
            raise ValueError(f"its groups are {', '.join(sorted(numbers))}, they must be 0, 1, …")
        numbered = [group(file, str(i)) for i in range(len(numbers))]
        return [kind._read(part) for part in numbered or [file]]


@functools.cache
def _import_kinds() -> None:
    """Import every module of this folder, so that all kinds of results are known."""
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{folder}.{module.name}")

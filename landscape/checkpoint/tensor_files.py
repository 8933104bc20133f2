"""The tensors in a file of safetensors or torch.save, or in a folder of torch.distributed.checkpoint.

Nothing that a file holds is run. A tensor is read when it is asked for, where its format allows that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import safetensors
import torch
from torch import Tensor

from landscape.core.errors import LandscapeError, OperationError
from landscape.core.files import open_regular, read_regular

# The index of a folder of torch.distributed.checkpoint, and the command that makes one file of the folder.
METADATA = ".metadata"
CONVERSION = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
# The largest index that is read, in bytes (ours: that of 671 billion parameters in 163 files has 9 MB), and
# the depth of dicts in which tensors are looked for (ours).
MOST, DEPTH = 32 << 20, 8
# What else than torch.save writes zip archives: a file in it, what it is, and its weights.
OTHERS = {
    "constants.pkl": ("a TorchScript archive", "torch.jit.load({!r}).state_dict()"),
    "archive_format": ("a program of torch.export", "torch.export.load({!r}).state_dict"),
}
Key = tuple[str, ...]


class Stored(NamedTuple):
    """A tensor in a file; ``weights``: whether it has dimensions and is of floating-point numbers."""

    read: Callable[[], Tensor]
    weights: bool = True


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """A context in which any error says that ``path`` is damaged: what readers raise is not documented."""
    try:
        yield
    except LandscapeError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        line = f"{path}: not a readable state file ({type(error).__name__}: {words})"
        raise OperationError(line) from error


def is_plain(name: str) -> bool:
    """Return whether ``name`` is that of a file in the same folder, and no path out of it."""
    return Path(name).name == name != ".."


def entries_of(loaded: Any) -> dict[Key, Any]:
    """The objects in nested dicts by their paths of keys, each dict once."""
    entries: dict[Key, Any] = {}
    todo: list[tuple[Key, Any]] = [((), loaded)]
    seen: set[int] = set()
    for key, value in todo:
        if isinstance(value, Mapping) and len(key) < DEPTH:
            if id(value) not in seen:
                seen.add(id(value))
                todo += [((*key, str(name)), part) for name, part in value.items()]
        else:
            entries[key] = value
    return entries


def read_entries(path: Path) -> dict[Key, Any]:
    """:func:`entries_of` a file; of safetensors, only the header is read."""
    with open_regular(path) as file, readable(path):
        if path.suffix == ".safetensors":
            opened: Any = safetensors.safe_open(path, "pt")
            return {(name,): Stored(partial(opened.get_tensor, name)) for name in opened.keys()}  # noqa: SIM118
        return entries_of(_load(path, file, mmap=True))


def _load(path: Path, file: IO[bytes], mmap: bool = False) -> Any:
    """The object in a ``file`` of torch.save; ``mmap``: its numbers are read from ``path`` when used."""
    archive = _check_archive(path, file)
    file.seek(0)
    try:
        # Options that a script saved beside its weights are a Namespace, whose class only holds values.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # of torch about its own quantized tensors
            source: Any = path if mmap and archive else file
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap and archive)
    except pickle.UnpicklingError as error:
        raise OperationError(
            f"{path}: not a file of weights alone, and code from a file is never run; write one by "
            "torch.save(model.state_dict(), …) or safetensors; from a checkpoint that you trust, such as "
            f"Lightning's, by torch.save(torch.load({str(path)!r}, weights_only=False)['state_dict'], "
            f"'{path.stem}-weights.pt')"
        ) from error


def _check_archive(path: Path, file: IO[bytes]) -> bool:
    """Return whether it is a zip archive, as of torch.save since 1.6.

    OperationError for one of another program, or that unpacks to more than itself.
    """
    if file.read(2) != b"PK":
        return False
    length = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
    for name in {part.filename.rpartition("/")[2] for part in parts} & {*OTHERS}:
        what, state = OTHERS[name][0], OTHERS[name][1].format(str(path))
        remedy = f"torch.save({state}, '{path.stem}-weights.pt')"
        raise OperationError(f"{path}: {what}, which holds code; write its weights alone by {remedy}")
    packed = [part for part in parts if part.compress_type != zipfile.ZIP_STORED]
    total = sum(part.file_size for part in parts)
    if packed or total > length:
        what = f"its part {packed[0].filename} is compressed" if packed else f"its parts have {total:,} bytes"
        raise OperationError(f"{path}: not as torch.save writes a file of {length:,} bytes, {what}")
    return True


# ---- Folders of torch.distributed.checkpoint


class _Record:
    """One of PyTorch's records as a pickle holds it, without any of its code."""

    saved: Any = None

    def __init__(self, *values: Any) -> None:
        """Take what an enumeration or a path is made from."""

    def __setstate__(self, saved: Any) -> None:
        self.saved = saved


class _Unpickler(pickle._Unpickler):
    """Read the index of a folder: numbers, texts, and PyTorch's records as :class:`_Record`.

    It is the unpickler in Python, as that in C allocates whatever a file says; so does one code, left out.
    PyTorch's own reader would run what the pickle names.
    """

    dispatch = {  # noqa: RUF012
        code: read for code, read in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        if (module, name) == ("torch", "Size"):
            return tuple
        own = [f"torch.distributed.checkpoint.{part}" for part in ("metadata", "filesystem")]
        if module in (*own, "torch.serialization") or module.split(".")[0] == "pathlib":
            return _Record
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of PyTorch's records")


def read_folder(path: Path) -> tuple[tuple[Path, ...], dict[Key, Any]]:
    """The files of a folder by its index ``path``, and :func:`entries_of` the state that was saved there."""
    raw = read_regular(path, MOST)
    with readable(path):
        try:
            index = _Unpickler(io.BytesIO(raw)).load().saved
        except pickle.UnpicklingError as error:
            raise OperationError(
                f"{path}: {error}, and code from a file is never run; make one file of a folder that you "
                f"trust by {CONVERSION} {path.parent} FILE.pt"
            ) from error
        places = {
            (at.saved["fqn"], at.saved.get("offset")): info.saved
            for at, info in index["storage_data"].items()
        }
        names = sorted({info["relative_path"] for info in places.values()})
        if outside := [name for name in names if not is_plain(name)]:
            raise OperationError(f"{path}: names the file {outside[0]!r}, which is not in its folder")
        files, size = [path.with_name(name) for name in names], 0
        for file in files:
            with open_regular(file) as opened:
                size += opened.seek(0, 2)
        entries, keys = {}, index.get("planner_data") or {}
        for name, of in index["state_dict_metadata"].items():
            key = tuple(str(part) for part in keys.get(name, (name,)))
            tensor = isinstance(of.saved, dict) and "chunks" in of.saved
            entries[key] = _stored(path, name, of.saved, places, size) if tensor else None
        return (path, *files), entries


def _stored(path: Path, name: str, of: dict[str, Any], places: Mapping[Any, Any], most: int) -> Stored:
    """The tensor ``name`` of a folder, whose files have ``most`` bytes; ValueError if a part is missing."""
    size, dtype = tuple(of["size"]), of["properties"].saved[0]
    chunks = {tuple(c.saved["offsets"]): tuple(c.saved["sizes"]) for c in of["chunks"]}
    inside = all(
        0 <= a <= a + n <= m for at, shape in chunks.items() for a, n, m in zip(at, shape, size, strict=True)
    )
    numbers = math.prod(size)
    if not inside or sum(map(math.prod, chunks.values())) != numbers or numbers * dtype.itemsize > most:
        raise ValueError(f"'{name}' of {numbers:,} numbers is not whole")

    def read() -> Tensor:
        value = torch.zeros(size, dtype=dtype)
        for at, shape in chunks.items():
            if math.prod(shape):
                place = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
                value[place] = _chunk(path, places[name, at], shape, dtype)
        return value

    return Stored(read, bool(size) and (dtype.is_floating_point or dtype.is_complex))


def _chunk(path: Path, info: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that torch.save wrote into a file of the folder, at the place that its index says."""
    file = path.with_name(info["relative_path"])
    if info.get("transform_descriptors"):
        raise OperationError(
            f"{file}: compressed by {info['transform_descriptors']}; use {CONVERSION} {path.parent} FILE.pt"
        )
    with open_regular(file) as opened:
        length = min(info["length"], opened.seek(0, 2))
        opened.seek(info["offset"])
        value = _load(file, io.BytesIO(opened.read(length)))
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(f"shape {tuple(value.shape)} and {value.dtype}, its index says {shape} and {dtype}")
    return value

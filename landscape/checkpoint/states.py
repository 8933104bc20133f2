"""The files in which other programs store weights: what is in them, without running any of it.

Tensors are mapped to memory, and read when they are used. Only an index of torch.distributed.checkpoint names
places from which pieces of tensors are put together.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from landscape.core.errors import LandscapeError, OperationError
from landscape.core.files import open_regular, read_regular
from landscape.core.options import ends_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# How save_pretrained and others name the index of a model in parts, and the parts.
INDEX, PART = ".index.json", re.compile(r"(.+)-\d{5,6}-of-\d{5,6}(\.\w+)")
# The index and a part of torch.distributed.checkpoint, whose own reader runs what the index names.
METADATA, DISTRIBUTED = ".metadata", ".distcp"
# The largest index that is read, in bytes (our choice: that of 671 billion parameters in 163 files has 9 MB),
# and the depth of dicts in which a state is looked for (our choice).
MOST, DEPTH = 32 << 20, 8
# What else than torch.save writes zip archives: a file in it, what it is, and its weights.
OTHERS = {
    "constants.pkl": ("a TorchScript archive", "torch.jit.load({!r}).state_dict()"),
    "archive_format": ("a program of torch.export", "torch.export.load({!r}).state_dict"),
}
# What lies in place of the file of weights itself, by its first bytes.
STANDING_IN = {
    b"version https://git-lfs": "is a pointer of Git LFS (git lfs pull fetches the file)",
    b"<": "is a web page",
}
Message = Callable[[str], None]


def names_state(path: Path) -> bool:
    """Return whether weights of another program go by the name of this file, or lie in this folder."""
    inside = path.glob("*") if path.is_dir() else [path]
    foreign = any(p.suffix in (*SUFFIXES, DISTRIBUTED) or p.name.endswith((INDEX, METADATA)) for p in inside)
    return foreign and not (path / "last.h5").exists()


def name_beside(path: Path) -> Path:
    """``path``, with a name beside which results can lie: "." has none."""
    return path if path.name.strip(".") else path.resolve()


def files_of(path: Path) -> list[Path]:
    """The file of one model's weights, or the index of its parts and these; ``path`` may be their folder.

    Raises OperationError for what is missing, or must be converted first; InputError for another suffix.
    """
    file = _model_in(path) if path.is_dir() else path
    if file.suffix and not names_state(file):
        ends_in("STATE", file, SUFFIXES)
    if not file.exists():
        raise OperationError(f"{file}: no such file or folder of weights")
    part = PART.fullmatch(file.name)
    if part or file.suffix == DISTRIBUTED:
        index = file.with_name(f"{part[1]}{part[2]}{INDEX}" if part else METADATA)
        raise OperationError(f"{path}: one part of a model; give its index, {index}")
    if file.name == METADATA:
        pieces = _index_of(file)[1].values()
        parts = [*dict.fromkeys(piece.file for tensor in pieces for piece in tensor)]
    elif file.name.endswith(INDEX):
        parts = [*dict.fromkeys(_weight_map(file).values())]
    else:
        return [file]
    if absent := [part.name for part in parts if not part.exists()]:
        raise OperationError(f"{file}: {', '.join(absent[:3])} of its {len(parts)} files missing beside it")
    return [file, *parts]


def read_state(
    path: str | Path, message: Message = lambda line: None, names: Collection[str] = ()
) -> dict[str, Any]:
    """Name -> tensor of a file, index or folder of weights, as of :func:`state_in`.

    Raises OperationError for what is missing, damaged or a part only, holds no state or several, or could
    only be read by running code from it; InputError for another suffix.
    """
    file, *parts = files_of(Path(path))
    pieces, loaded = dict[int, list[_Piece]](), None
    if file.name == METADATA:
        loaded, pieces = _index_of(file)
    elif parts:
        whole = {part: _load(part) for part in parts}
        with readable(file):
            loaded = {name: whole[part][name] for name, part in _weight_map(file).items()}
    else:
        loaded = _load(file)
    state = state_in(path, loaded, message, names, f"torch.save(torch.load({str(path)!r})[…], 'one.pt')")
    return {name: _joined(t, pieces[id(t)]) if id(t) in pieces else t for name, t in state.items()}


def state_in(
    where: str | Path,
    loaded: Any,
    message: Message = lambda line: None,
    names: Collection[str] = (),
    alone: str = "[…]",
) -> dict[str, Any]:
    """The one dict, among nested ones, that holds weights, and is no optimizer's.

    ``message`` receives a line with its keys. If there are several, such as a discriminator's beside a
    generator's, the one with ``names`` of the model is taken. Without such a one they are refused; ``alone``
    is the code that gives one of them, with […] for its keys.
    """
    dicts: dict[tuple[str, ...], dict[str, Any]] = dict(_states(loaded, (), set()))
    keys = [key for key, part in dicts.items() if any(map(_is_weights, part.values()))]
    keys = keys or [key for key in dicts if any(isinstance(value, Tensor) for value in dicts[key].values())]
    if not keys:
        raise OperationError(f"{where}: holds no tensors by name, a model's state_dict() is needed")
    if len(keys) > 1:
        keys = [key for key in keys if any(n.endswith(tuple(names)) for n in dicts[key])] or keys
    if len(keys) > 1:
        titles = ", ".join(repr(".".join(key)) if key else "its own" for key in keys)
        example = alone.replace("[…]", "".join(f"[{part!r}]" for part in max(keys, key=bool)))
        raise OperationError(f"{where}: holds several states, {titles}; give one alone, as by {example}")
    (key,) = keys
    if key:
        message(f"{where}: took the state under '{'.'.join(key)}'")
    return dicts[key]


def _states(loaded: Any, key: tuple[str, ...], seen: set[int]) -> Iterator[Any]:
    """Pairs (keys, dict) of all dicts in nested ones, each once, without those of optimizers."""
    optimizer = isinstance(loaded, Mapping) and any(str(name).startswith("param_groups") for name in loaded)
    if isinstance(loaded, Mapping) and not optimizer and id(loaded) not in seen and len(key) < DEPTH:
        seen.add(id(loaded))
        yield key, {str(name): value for name, value in loaded.items()}
        for name, value in loaded.items():
            yield from _states(value, (*key, str(name)), seen)


def _is_weights(value: Any) -> bool:
    """Return whether it is a tensor with a dimension, of floating-point or complex numbers."""
    return isinstance(value, Tensor) and value.dim() > 0 and (value.is_floating_point() or value.is_complex())


def _model_in(folder: Path) -> Path:
    """The one model in a folder of save_pretrained, by its index or file; .bin where nothing else is."""
    models = [path for path in [folder / METADATA] if path.is_file()]
    for suffix in (".safetensors", ".bin"):
        files = (path for end in (suffix, suffix + INDEX) for path in sorted(folder.glob(f"*model*{end}")))
        models = models or [path for path in files if path.name[0] != "." and not PART.fullmatch(path.name)]
    if not models:
        words = f"model.safetensors, pytorch_model.bin, {METADATA}, or an index (model.safetensors{INDEX})"
        raise OperationError(f"{folder}: a folder without {words}; give it, or another file of weights")
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise OperationError(f"{folder}: holds several models, {names}; give one of these files")
    return models[0]


def _weight_map(index: Path) -> dict[str, Path]:
    """Name of a tensor -> its file, which lies beside the index: with_name refuses other places."""
    with readable(index):
        files = json.loads(read_regular(index, MOST))["weight_map"].items()
        return {name: index.with_name(file) for name, file in files}


class _Inert:
    """An object in place of any in a pickle: it does nothing when it is made, and only keeps its state."""

    state: Any = None

    def __new__(cls, *args: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Index(pickle.Unpickler):
    """Reads an index of torch.distributed.checkpoint, of whose classes nothing is imported or called.

    The format is that of PyTorch's ``Metadata``, which has no other; a class becomes a new, inert one.
    """

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        if module.partition(".")[0] not in ("torch", "pathlib") and name != "getattr":
            raise OperationError(f"names {module}.{name}, and code from a file is never run")
        return tuple if (module, name) == ("torch", "Size") else type("Inert", (_Inert,), {})


class _Piece(NamedTuple):
    """The place of a part of a tensor: in the tensor, and in a file."""

    corner: tuple[int, ...]
    file: Path
    offset: int
    length: int


def _index_of(path: Path) -> tuple[dict[str, Any], dict[int, list[_Piece]]]:
    """Nested dicts of tensors on the device "meta", None for other values; the pieces of each, by its id."""
    with open_regular(path, MOST) as file, readable(path):
        try:
            index = _Index(file).load().state
        except OperationError as error:
            convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
            way = f"if you trust it, use {convert} {shlex.quote(str(path.parent))} FILE.pt"
            raise OperationError(f"{path}: {error}; {way}") from error
        places: dict[str, list[_Piece]] = {}
        for key, stored in index["storage_data"].items():
            lies, corner = stored.state, tuple(key.state.get("offset") or ())
            piece = _Piece(corner, path.with_name(lies["relative_path"]), lies["offset"], lies["length"])
            places.setdefault(key.state["fqn"], []).append(piece)
        nested, pieces = dict[str, Any](), dict[int, list[_Piece]]()
        for name, about in index["state_dict_metadata"].items():
            *outer, last = (index["planner_data"] or {}).get(name, (name,))
            inner, tensor = nested, None
            for key in outer:
                inner = inner.setdefault(str(key), {})
            if about.state:
                kind, size = about.state["properties"].state[0], about.state["size"]
                tensor = torch.empty(size, dtype=kind, device="meta")
                if name not in places:
                    raise OperationError(f"{path}: pieces of '{name}' are missing; save the checkpoint again")
                pieces[id(tensor)] = places[name]
            inner[str(last)] = tensor
    return nested, pieces


def _joined(like: Tensor, pieces: list[_Piece]) -> Tensor:
    """The tensor like ``like`` that the ``pieces`` make, which must cover each of its numbers once."""
    if like.nbytes > sum(piece.file.stat().st_size for piece in pieces):
        raise OperationError(f"{pieces[0].file}: too short for its tensors; copy or save it again")
    whole, covered = torch.empty(like.shape, dtype=like.dtype), torch.zeros(like.shape, dtype=torch.bool)
    for corner, path, offset, length in pieces:
        with open_regular(path) as file, readable(path):
            file.seek(offset)
            raw = io.BytesIO(file.read(length))
            _is_archive(path, raw)  # which refuses one that unpacks to more
            raw.seek(0)
            part = torch.load(raw, map_location="cpu", weights_only=True)
            place = tuple(slice(at, at + size) for at, size in zip(corner, part.shape, strict=True))
            if whole[place].shape != part.shape or part.dtype != like.dtype:
                raise ValueError(f"a piece of {part.dtype} and shape {tuple(part.shape)} does not fit")
            if covered[place].any():
                raise ValueError("pieces of a tensor overlap")
            whole[place], covered[place] = part, True
    if not bool(covered.all()):
        raise OperationError(f"{pieces[0].file}: pieces of a tensor are missing; save the checkpoint again")
    return whole


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """A context in which any error says that ``path`` is damaged: what readers raise is not documented."""
    try:
        yield
    except LandscapeError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        line = f"{path}: not a readable state file ({type(error).__name__}: {words})"
        raise OperationError(line) from error


def _load(path: Path) -> Any:
    """The object in a file of torch.save, or the tensors in one of safetensors."""
    with open_regular(path) as file, readable(path):
        head = file.read(64)
        is_safetensors = path.suffix == ".safetensors" or head[6:9] == b"\0\0{"
        is_pickle = head.startswith((b"PK", b"\x80"))
        what = f"begins with {head[:16]!r}" if head else "is empty"
        what = next((words for start, words in STANDING_IN.items() if head.lstrip().startswith(start)), what)
        if not (is_safetensors or is_pickle) or what in STANDING_IN.values():
            line = f"{path}: not a readable state file, it {what}; give a file of torch.save or safetensors"
            raise OperationError(line)
        if is_safetensors:
            return safetensors.torch.load_file(path)
        file.seek(0)
        archive = _is_archive(path, file)
        try:
            # Options that a script saved beside its weights are a Namespace, whose class only holds values.
            with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
                warnings.simplefilter("ignore")  # of torch about its own quantized tensors
                return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
        except pickle.UnpicklingError as error:
            saved = f"saved = torch.load({str(path)!r}, weights_only=False)"
            states = "saved.state_dict() of a model, or saved['state_dict'] of a checkpoint"
            words = "not a file of weights alone, and code from a file is never run; if you trust it, let"
            raise OperationError(f"{path}: {words} {saved}, and torch.save {states}") from error


def _is_archive(path: Path, file: IO[bytes]) -> bool:
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

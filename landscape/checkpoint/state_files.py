"""Weights as other programs store them: files, parts with an index, folders; and which dict is the state.

Nothing that a file holds is run. Its tensors are mapped to memory, and read when they are used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from torch import Tensor

from landscape.core.errors import LandscapeError, OperationError
from landscape.core.files import open_regular, read_regular
from landscape.core.options import ends_in

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# How save_pretrained and others name the index of a model in parts, and the parts.
INDEX, PART = ".index.json", re.compile(r"(.+)-\d{5,6}-of-\d{5,6}(\.\w+)")
# The index and a part of torch.distributed.checkpoint, whose own reader unpickles the index.
METADATA, DISTRIBUTED = ".metadata", ".distcp"
# The largest index that is read, in bytes (ours: that of 671 billion parameters in 163 files has 9 MB), and
# the depth of dicts in which a state is looked for (ours).
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


def place(path: Path) -> Path:
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
    if file.name == METADATA or file.suffix == DISTRIBUTED:
        raise OperationError(
            f"{path}: of torch.distributed.checkpoint, whose index may hold code; if you trust it, use "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{shlex.quote(str(file.parent))} FILE.pt"
        )
    if part := PART.fullmatch(file.name):
        index = file.with_name(f"{part[1]}{part[2]}{INDEX}")
        raise OperationError(f"{path}: one part of a model; give its index, {index}")
    if not file.name.endswith(INDEX):
        return [file]
    parts = [*dict.fromkeys(_weight_map(file).values())]
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
    loaded = _load(file) if not file.name.endswith(INDEX) else {part: _load(part) for part in parts}
    if parts:
        with readable(file):
            loaded = {name: loaded[part][name] for name, part in _weight_map(file).items()}
    return state_in(path, loaded, message, names, f"torch.save(torch.load({str(path)!r})[…], 'one.pt')")


def state_in(
    where: str | Path,
    loaded: Any,
    message: Message = lambda line: None,
    names: Collection[str] = (),
    alone: str = "[…]",
) -> dict[str, Any]:
    """The one dict, among nested ones, that holds weights, and is no optimizer's.

    ``message`` is told of its keys. Where there are several, such as a discriminator's beside a generator's,
    one with ``names`` of the model is taken, or they are refused; ``alone`` says how to give the one […].
    """
    dicts: dict[tuple[str, ...], dict[str, Any]] = dict(_states(loaded, (), set()))
    kept = [key for key, part in dicts.items() if any(map(_is_weights, part.values()))]
    kept = kept or [key for key in dicts if any(isinstance(value, Tensor) for value in dicts[key].values())]
    if not kept:
        raise OperationError(f"{where}: holds no tensors by name, a model's state_dict() is needed")
    if len(kept) > 1:
        kept = [key for key in kept if any(n.endswith(tuple(names)) for n in dicts[key])] or kept
    if len(kept) > 1:
        titles = ", ".join(repr(".".join(key)) if key else "its own" for key in kept)
        one = alone.replace("[…]", "".join(f"[{part!r}]" for part in max(kept, key=bool)))
        raise OperationError(f"{where}: holds several states, {titles}; give one alone, as by {one}")
    (key,) = kept
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
        words = f"model.safetensors, pytorch_model.bin, or an index such as model.safetensors{INDEX}"
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
        plain = path.suffix == ".safetensors" or head[6:9] == b"\0\0{"  # of safetensors, whatever its name
        pickled = head.startswith((b"PK", b"\x80"))
        what = "" if plain or pickled else f"begins with {head[:16]!r}"
        what = next((words for start, words in STANDING_IN.items() if head.lstrip().startswith(start)), what)
        if what:
            line = f"{path}: not a readable state file, it {what}; give a file of torch.save or safetensors"
            raise OperationError(line)
        if plain:
            return safetensors.torch.load_file(path)
        file.seek(0)
        archive = _is_archive(path, file)
        try:
            # Options that a script saved beside its weights are a Namespace, whose class only holds values.
            with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
                warnings.simplefilter("ignore")  # of torch about its own quantized tensors
                return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
        except pickle.UnpicklingError as error:
            raise OperationError(
                f"{path}: not a file of weights alone, and code from a file is never run; if you trust it, "
                f"let saved = torch.load({str(path)!r}, weights_only=False), and torch.save("
                f"saved.state_dict(), '{path.stem}-weights.pt') of a model, or saved['state_dict'] of a "
                "checkpoint such as Lightning's"
            ) from error


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

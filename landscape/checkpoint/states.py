"""Files in which other programs store weights: their content is read, and no code in them is ever run.

Tensors are mapped to memory, and read when they are used; only those of torch.distributed.checkpoint are
joined from pieces.
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
# The largest size, in bytes, of an index or an adapter's configuration (our choice: the index of a model with
# 671 billion parameters in 163 files has 9 MB).
MAX_BYTES = 32 << 20
DEPTH = 8  # the number of levels of nested dicts in which a state is looked for (our choice)
# Zip archives that torch.save did not write: a file in it -> (a name for the archive, code for its weights).
OTHERS = {
    "constants.pkl": ("a TorchScript archive", "torch.jit.load({!r}).state_dict()"),
    "archive_format": ("a program of torch.export", "torch.export.load({!r}).state_dict"),
}
# What a download may have put in place of a file of weights, by the first bytes.
OTHER_FILES = {
    b"version https://git-lfs": "is a pointer of Git LFS (git lfs pull fetches the file)",
    b"<": "is a web page",
}
Message = Callable[[str], None]


def names_state(path: Path) -> bool:
    """Return whether a file, by its name, has weights of another program, or a folder has such a file."""
    inside = path.glob("*") if path.is_dir() else [path]
    foreign = any(p.suffix in (*SUFFIXES, DISTRIBUTED) or p.name.endswith((INDEX, METADATA)) for p in inside)
    return foreign and not (path / "last.h5").exists()


def name_beside(path: Path) -> Path:
    """Return ``path`` with a proper last name, next to which results can be written: "." has none."""
    return path if path.name.strip(".") else path.resolve()


def files_of(path: Path) -> list[Path]:
    """Return [the file of a model's weights], or [the index, its parts…]; ``path`` may be their folder.

    Raises OperationError if a file is missing, or only a part of a model; InputError for another suffix.
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
    """Return the tensors by name in a file, index or folder of weights; see :func:`state_in`.

    Raises OperationError if a file is missing, damaged, or a part only, if it has no state or several, or
    could only be read by running code from it; InputError for another suffix.
    """
    file, *parts = files_of(Path(path))
    pieces, loaded = dict[int, list[_Piece]](), None
    if file.name == METADATA:
        loaded, pieces = _index_of(file)
    elif parts:
        tensors_of_part = {part: _load(part) for part in parts}
        with as_operation_errors(file):
            loaded = {name: tensors_of_part[part][name] for name, part in _weight_map(file).items()}
    else:
        loaded = _load(file)
    state = state_in(path, loaded, message, names, f"torch.save(torch.load({str(path)!r})[…], 'one.pt')")
    return {name: _joined(t, pieces[id(t)]) if id(t) in pieces else t for name, t in state.items()}


def state_in(
    where: str | Path,
    loaded: Any,
    message: Message = lambda line: None,
    names: Collection[str] = (),
    saving_code: str = "[…]",
) -> dict[str, Any]:
    """Return the only dict of weights among nested dicts. The dicts of optimizers do not count.

    Args:
        where: the file, for messages.
        loaded: the nested dicts.
        message: a function that receives a line of text with the keys that lead to the returned dict.
        names: the names of the model's tensors. They decide between several dicts of weights, such as those
            of a discriminator and a generator. Without names, several dicts are an error.
        saving_code: the Python code that the error message shows, which saves one of several dicts in a file
            of its own; […] stands for the keys that lead to this dict.

    Raises:
        OperationError: there is no dict of weights, or there are several.
    """
    # Each dict by the tuple of keys that leads to it; () leads to the outermost dict.
    dicts: dict[tuple[str, ...], dict[str, Any]] = dict(_nested_dicts(loaded, keys=(), yielded_ids=set()))
    key_paths = [keys for keys, state in dicts.items() if any(_is_weights(t) for t in state.values())]
    if not key_paths:  # then dicts with only integer tensors, or tensors without a dimension, count too
        for keys, state in dicts.items():
            if any(isinstance(value, Tensor) for value in state.values()):
                key_paths.append(keys)
    if not key_paths:
        raise OperationError(f"{where}: holds no tensors by name, a model's state_dict() is needed")
    if len(key_paths) > 1:
        # Keep the dicts with a tensor of the model. A wrapper may have put a prefix before the tensor's name.
        suffixes = tuple(names)
        with_own_names = [keys for keys in key_paths if any(name.endswith(suffixes) for name in dicts[keys])]
        key_paths = with_own_names or key_paths
    if len(key_paths) > 1:
        titles = ", ".join(repr(".".join(keys)) if keys else "the outermost" for keys in key_paths)
        first_nested = next(keys for keys in key_paths if keys)
        example = saving_code.replace("[…]", "".join(f"[{key!r}]" for key in first_nested))
        raise OperationError(f"{where}: holds several states, {titles}; give one alone, as by {example}")
    (keys,) = key_paths
    if keys:
        message(f"{where}: took the state under '{'.'.join(keys)}'")
    return dicts[keys]


def _nested_dicts(loaded: Any, keys: tuple[str, ...], yielded_ids: set[int]) -> Iterator[Any]:
    """Yield (keys, dict) for each of nested dicts once, without the dicts of optimizers."""
    is_new = isinstance(loaded, Mapping) and id(loaded) not in yielded_ids and len(keys) < DEPTH
    if is_new and not any(str(name).startswith("param_groups") for name in loaded):
        yielded_ids.add(id(loaded))
        yield keys, {str(name): value for name, value in loaded.items()}
        for name, value in loaded.items():
            yield from _nested_dicts(value, (*keys, str(name)), yielded_ids)


def _is_weights(value: Any) -> bool:
    """Return whether an object is a tensor with a dimension, of floating-point or complex numbers."""
    return isinstance(value, Tensor) and value.dim() > 0 and (value.is_floating_point() or value.is_complex())


def _model_in(folder: Path) -> Path:
    """Return the index or file of the one model in a folder of save_pretrained; .bin if there is no other."""
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
    """Return the file of each tensor, by its name; all files must be in the folder of the index."""
    with as_operation_errors(index):
        files = json.loads(read_regular(index, MAX_BYTES))["weight_map"].items()
        return {name: index.with_name(file) for name, file in files}  # with_name refuses other folders


class _Inert:
    """An object in place of those in a pickle: its construction runs no code, and it only keeps its state."""

    state: Any = None

    def __new__(cls, *args: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Index(pickle.Unpickler):
    """Reads an index of torch.distributed.checkpoint, a pickle of PyTorch's class ``Metadata``.

    No class in it is imported or called: each becomes a subclass of :class:`_Inert`.
    """

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        if module.partition(".")[0] not in ("torch", "pathlib") and name != "getattr":
            raise OperationError(f"names {module}.{name}, and code from a file is never run")
        return tuple if (module, name) == ("torch", "Size") else type("Inert", (_Inert,), {})


class _Piece(NamedTuple):
    """A part of a tensor: its first index in the tensor, its file, and its first byte and length there."""

    corner: tuple[int, ...]
    file: Path
    offset: int
    length: int


def _index_of(path: Path) -> tuple[dict[str, Any], dict[int, list[_Piece]]]:
    """Return the nested dicts of a distributed checkpoint, and the pieces of each tensor by the tensor's id.

    The tensors in the dicts are on the device "meta"; values other than tensors are None. The index holds
    :class:`_Inert` objects, whose attributes are in ``state``.
    """
    with open_regular(path, MAX_BYTES) as file, as_operation_errors(path):
        try:
            index = _Index(file).load().state
        except OperationError as error:
            convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
            remedy = f"if you trust it, use {convert} {shlex.quote(str(path.parent))} FILE.pt"
            raise OperationError(f"{path}: {error}; {remedy}") from error
        pieces_by_name: dict[str, list[_Piece]] = {}
        for piece_index, storage_info in index["storage_data"].items():
            name, corner = piece_index.state["fqn"], tuple(piece_index.state.get("offset") or ())
            place = storage_info.state
            piece = _Piece(corner, path.with_name(place["relative_path"]), place["offset"], place["length"])
            pieces_by_name.setdefault(name, []).append(piece)
        nested, pieces_by_id = dict[str, Any](), dict[int, list[_Piece]]()
        keys_by_name = index["planner_data"] or {}  # the keys that lead to each value in the nested dicts
        for name, metadata in index["state_dict_metadata"].items():
            *outer_keys, last_key = keys_by_name.get(name, (name,))
            innermost, tensor = nested, None
            for key in outer_keys:
                innermost = innermost.setdefault(str(key), {})
            if metadata.state:  # it is empty for a value that is no tensor
                dtype = metadata.state["properties"].state[0]  # TensorProperties saves a tuple, dtype first
                tensor = torch.empty(metadata.state["size"], dtype=dtype, device="meta")
                if name not in pieces_by_name:
                    raise OperationError(f"{path}: pieces of '{name}' are missing; save the checkpoint again")
                pieces_by_id[id(tensor)] = pieces_by_name[name]
            innermost[str(last_key)] = tensor
    return nested, pieces_by_id


def _joined(like: Tensor, pieces: list[_Piece]) -> Tensor:
    """Return the tensor like ``like`` from its ``pieces``, which must cover each number once."""
    if like.nbytes > sum(piece.file.stat().st_size for piece in pieces):
        raise OperationError(f"{pieces[0].file}: too short for its tensors; copy or save it again")
    whole, covered = torch.empty(like.shape, dtype=like.dtype), torch.zeros(like.shape, dtype=torch.bool)
    for corner, path, offset, length in pieces:
        with open_regular(path) as file, as_operation_errors(path):
            file.seek(offset)
            raw = io.BytesIO(file.read(length))
            _is_archive(path, raw)  # raises OperationError for one that unpacks to more bytes
            raw.seek(0)
            part = torch.load(raw, map_location="cpu", weights_only=True)
            place = tuple(slice(start, start + size) for start, size in zip(corner, part.shape, strict=True))
            if whole[place].shape != part.shape or part.dtype != like.dtype:
                raise ValueError(f"a piece of {part.dtype} and shape {tuple(part.shape)} does not fit")
            if covered[place].any():
                raise ValueError("pieces of a tensor overlap")
            whole[place], covered[place] = part, True
    if not bool(covered.all()):
        raise OperationError(f"{pieces[0].file}: pieces of a tensor are missing; save the checkpoint again")
    return whole


@contextlib.contextmanager
def as_operation_errors(path: Path) -> Iterator[None]:
    """Return a context that turns every error of a reader into an OperationError about ``path``."""
    try:
        yield
    except LandscapeError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        line = f"{path}: not a readable state file ({type(error).__name__}: {words})"
        raise OperationError(line) from error


def _load(path: Path) -> Any:
    """Return the object in a file of torch.save, or the tensors in a file of safetensors."""
    with open_regular(path) as file, as_operation_errors(path):
        head = file.read(64)
        # A safetensors file begins with the length of its header in 8 bytes, of which the last two are 0, and
        # with the header, {…}.
        is_safetensors = path.suffix == ".safetensors" or head[6:9] == b"\0\0{"
        is_pickle = head.startswith((b"PK", b"\x80"))  # in a zip archive, or alone
        fault = ""
        if not (is_safetensors or is_pickle):
            fault = f"begins with {head[:16]!r}" if head else "is empty"
        for first_bytes, description in OTHER_FILES.items():
            if head.lstrip().startswith(first_bytes):
                fault = description
        if fault:
            remedy = "give a file of torch.save or safetensors"
            raise OperationError(f"{path}: not a readable state file, it {fault}; {remedy}")
        if is_safetensors:
            return safetensors.torch.load_file(path)
        file.seek(0)
        is_archive = _is_archive(path, file)
        try:
            # Scripts save their options with the weights, as a Namespace, a class without code of its own.
            with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
                warnings.simplefilter("ignore")  # for quantized tensors torch calls its own deprecated code
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        except pickle.UnpicklingError as error:
            fault = "not a file of weights alone, and code from a file is never run"
            load = f"let saved = torch.load({str(path)!r}, weights_only=False)"
            save = "save saved.state_dict() of a model, or saved['state_dict'] of a checkpoint, by torch.save"
            raise OperationError(f"{path}: {fault}; if you trust it, {load}, and {save}") from error


def _is_archive(path: Path, file: IO[bytes]) -> bool:
    """Return whether a file is a zip archive, as of torch.save since PyTorch 1.6.

    Raises OperationError for an archive of another program, or one that unpacks to more bytes.
    """
    if file.read(2) != b"PK":
        return False
    length = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
    for name in {part.filename.rpartition("/")[2] for part in parts} & {*OTHERS}:
        description, code = OTHERS[name]
        remedy = f"torch.save({code.format(str(path))}, '{path.stem}-weights.pt')"
        raise OperationError(f"{path}: {description}, which holds code; write its weights alone by {remedy}")
    compressed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
    total = sum(part.file_size for part in parts)
    if compressed or total > length:
        reason = (
            f"its part {compressed[0]} is compressed" if compressed else f"its parts have {total:,} bytes"
        )
        raise OperationError(f"{path}: not as torch.save writes a file of {length:,} bytes, {reason}")
    return True

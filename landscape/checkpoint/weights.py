"""Weights as users have them, in files of other programs, too, by one converter.

Nothing that a file holds is run. Its tensors are mapped to memory, and read when they are used. A state and
its model become a checkpoint (:func:`import_state`), or θ of a problem (:func:`network_of`). Parameters are
matched by name. What a model has besides θ must be the problem's, but for the statistics of BatchNorm, which
stay with the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import shlex
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint, mean_buffer, storable, unknown_data
from landscape.checkpoint.storage import load
from landscape.core import hdf5
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.files import open_regular, read_regular
from landscape.core.hdf5 import Array
from landscape.core.options import checked, ends_in, near
from landscape.problem.batchnorm import BatchNormPolicy, buffer_names
from landscape.problem.layout import Layout, unwrapped, vector_of
from landscape.problem.problem import Problem
from landscape.problem.sharded import on_ranks

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# How save_pretrained and others name the index of a model in parts, and the parts.
INDEX, PART = ".index.json", re.compile(r"(.+)-\d{5,6}-of-\d{5,6}(\.\w+)")
# The index and a part of torch.distributed.checkpoint, whose own reader unpickles the index.
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
    if file.name == METADATA or file.suffix == DISTRIBUTED:
        convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        way = f"{convert} {shlex.quote(str(file.parent))} FILE.pt"
        raise OperationError(f"{path}: of torch.distributed, which may hold code; if you trust it, use {way}")
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


# Prefixes that wrappers add to every name: DataParallel and DistributedDataParallel; Lightning. torch.compile
# adds its prefix to the name of each compiled module.
PREFIXES = ("module.", "model.")
COMPILED = "_orig_mod."

# The types of numbers that a parameter or buffer of floats, or of integers, can be read from.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def _unfit(value: Tensor, target: Tensor) -> str:
    """The reason why the numbers of ``value`` cannot become those of ``target``; "" if they can."""
    if value.is_meta:
        return "is on the device 'meta' and holds no numbers"
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return f"is {kind}, a plain tensor is needed (.dequantize() or .to_dense() makes one)"
    allowed = FLOATS if target.is_floating_point() else (target.dtype,) if target.is_complex() else INTEGERS
    if value.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        return f"holds {str(value.dtype).removeprefix('torch.')}, the model needs one of {names}"
    return ""


def unwrapped_state(
    where: str | Path, state: Mapping[str, Any], names: set[str], message: Message = lambda line: None
) -> dict[str, Any]:
    """``state`` by the model's ``names``: without the prefixes that wrappers added to them.

    The model may also be an attribute of the module that was saved. Lightning's checkpoints are an example:
    their module has the model as self.net, next to metrics. That part is used if exactly one prefix gives all
    ``names`` of the model.
    """
    state = dict(state)
    if any(COMPILED in name for name in state) and not any(COMPILED in name for name in names):
        state = {name.replace(COMPILED, ""): value for name, value in state.items()}
        message(f"{where}: dropped '{COMPILED}'")
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state) and not any(n.startswith(prefix) for n in names):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
            message(f"{where}: dropped '{prefix}'")
    first = min(names, default="")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    whole = [prefix for prefix in prefixes if all(prefix + name in state for name in names)]
    if first in state or len(whole) != 1:
        return state
    rest = [name for name in state if not name.startswith(whole[0])]
    omitted = f", left out {len(rest)} more ({', '.join(rest[:3])}{', …' * (len(rest) > 3)})" if rest else ""
    message(f"{where}: took '{whole[0]}'{omitted}")
    return {name.removeprefix(whole[0]): v for name, v in state.items() if name.startswith(whole[0])}


def fitted(
    path: str | Path, state: Mapping[str, Any], model: nn.Module, name: str
) -> Iterator[tuple[str, Tensor]]:
    """The model's names, each with its tensor; OperationError names the first tensor that does not fit.

    One of several tied names is sufficient, and BatchNorm's counts may be missing (files older than PyTorch
    0.4.1 have none).
    """
    model_state = model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in model_state.items() if isinstance(value, Tensor)}
    for key in state:
        if key not in model_state and isinstance(state[key], Tensor):
            raise OperationError(f"{path}: '{key}' is not in the model {name}{near(key, model_state)}")
    groups: dict[int, list[str]] = {}
    for key, value in tensors.items():
        groups.setdefault(id(value), []).append(key)
    for keys in groups.values():
        named = {key: state[key] for key in keys if key in state}
        if not named and keys[0].endswith("num_batches_tracked"):
            continue
        if not named:
            raise OperationError(f"{path}: it lacks '{keys[0]}' of the model {name}{near(keys[0], state)}")
        first = next(iter(named))
        for key, value in named.items():
            shape = tuple(tensors[key].shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                what = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else "is no tensor"
                raise OperationError(f"{path}: '{key}' {what}, the model {name} needs shape {shape}")
            if why := _unfit(value, tensors[key]):
                raise OperationError(f"{path}: '{key}' {why}")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise OperationError(f"{path}: '{key}' holds NaN or infinite numbers, all must be finite")
            if key != first and not torch.equal(value, named[first]):
                raise OperationError(f"{path}: '{first}' and '{key}' differ, but are one tensor in {name}")
        yield keys[0], named[first].detach()


@checked()
def import_state(
    paths: str | Path | Sequence[str | Path],
    model: nn.Module,
    *,
    name: str = "",
    options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    message: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """A checkpoint with one learner for each state.

    θ holds the trainable parameters; frozen ones go with the buffers. Numbers narrower than float32 become
    float32.

    Args:
        paths: .pt, .pth, .bin, .ckpt or .safetensors files, indices of parts (.index.json), or folders of
            save_pretrained, all of one model.
        model: that model, of any weights; left as it is.
        name, options: the model in the checkpoint: a built-in name and its options, or "module:factory".
            Default: where the model's class was defined, in the form of the latter.
        data: the data in the checkpoint (see :class:`landscape.Checkpoint`); default: unknown.
        message: receives a line for each container that was unwrapped.

    Returns:
        The checkpoint, with n learners and no history; it is not saved yet.

    Raises:
        InputError: for a model without trainable parameters.
        OperationError: for a file that cannot be read or does not fit; it names the parameter.

    Example:
        >>> import tempfile, torch, landscape
        >>> model, folder = torch.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> torch.save(model.state_dict(), f"{folder}/net.pt")
        >>> run = landscape.import_state(f"{folder}/net.pt", model)
        >>> run.learners, tuple(run.weights.shape)
        (1, (1, 8))
    """
    files_given = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not files_given:
        raise InputError("paths: an empty list is not allowed, it must name a file of weights")
    name = name or f"{type(model).__module__}:{type(model).__qualname__}"
    layout = Layout.of(model)
    if layout.size == 0:
        raise InputError(f"model: {name} has no trainable parameters, at least one is needed")
    slices, names = {slot.name: slot.place for slot in layout.slots}, {*model.state_dict()}
    rows, fixed = [], list[dict[str, Tensor]]()
    for path in files_given:
        state = unwrapped_state(path, read_state(path, message, names), names, message)
        row, row_fixed = torch.empty(layout.size, dtype=torch.float32), {}
        for key, value in fitted(path, state, model, name):  # one by one: never all of them beside θ
            if key in slices:
                row = row.to(torch.promote_types(row.dtype, value.dtype))
                row[slices[key]] = value.flatten()
            else:
                row_fixed[key] = storable(value).clone()
        rows.append(row)
        fixed.append(row_fixed)
    common = [key for key in fixed[0] if all(key in row for row in fixed)]
    files = [file for path in files_given for file in files_of(path)]
    origin = [f'[[import]]\nfile = {json.dumps(f.name)}\nsha256 = "{hdf5.sha256(f)}"\n' for f in files]
    return Checkpoint(
        weights=torch.stack(rows) if rows[1:] else rows[0][None],
        layout=layout,
        step=0,
        epoch=0.0,
        algorithm=IMPORTED,
        recipe="".join(origin),
        model={"name": name, "options": options or {}},
        buffers={key: torch.stack([row[key] for row in fixed]) for key in common},
        data=data or unknown_data(),
    )


ALLOWED = "a vector (P,), a Problem, a model, a state dict, a run, or the name of a file of one"
Weights = Annotated[
    Tensor | Array | Problem | nn.Module | Mapping[str, Any] | Checkpoint | str | Path, ALLOWED
]


@dataclass(frozen=True, eq=False)
class Network:
    """θ (P,), as a problem has its own, and BatchNorm's buffers by name; None where these are not known."""

    theta: Tensor
    statistics: Mapping[str, Tensor] | None

    def own_loss(self, problem: Problem) -> float:
        """The loss with the network's own statistics; NaN where they are not known."""
        if self.statistics is None:
            return float("nan")
        with_statistics = problem.on(problem.data)
        with_statistics.batchnorm = BatchNormPolicy(buffers=self.statistics)
        return with_statistics.loss(self.theta)

    def shares_statistics(self, problem: Problem) -> bool:
        """Return whether its statistics are known to be those in the buffers of the problem's model."""
        if self.statistics is None:
            return False
        buffers = dict(problem.model.named_buffers())  # with counts of batches, which no loss depends on
        return all(torch.equal(t, buffers[n]) for n, t in self.statistics.items() if t.is_floating_point())


def network_of(problem: Problem, source: Any, name: str) -> Network:
    """The network with the weights of ``source``, which the user gave as the argument ``name``.

    Raises:
        InputError: what is no weights, or is of another model.
        OperationError: a file that cannot be read, a tensor that does not fit, or numbers not finite.
    """
    names = {*problem.model.state_dict()}
    if isinstance(source, (str, os.PathLike)):
        source, name = _read(Path(source), name, names), f"{name}: {source}"
    if isinstance(source, (Tensor, np.ndarray)) or (on_ranks(problem) and source is not None):
        theta, buffers = vector_of(source, problem.weights, name), dict(problem.model.named_buffers())
        stats = {key: buffers[key] for key in buffer_names(problem.model)}
        network = Network(theta, stats if not stats or torch.equal(theta, problem.weights) else None)
    else:
        state = unwrapped_state(name, _state(problem, source, name, names), names)
        network = _network(problem, state, name)
    if not bool(torch.isfinite(network.theta).all()):
        raise OperationError(f"{name}: its weights are NaN or infinite, all must be finite")
    return network


def networks_of(problem: Problem, weights: Any, labels: Sequence[str] = ()) -> list[Network]:
    """:func:`network_of` of each entry of the argument ``weights``, a list or vectors (n, P)."""
    is_one_network = isinstance(weights, (str, os.PathLike, Mapping, nn.Module, Problem, Checkpoint))
    is_vector = getattr(weights, "ndim", 2) == 1
    if is_one_network or is_vector or not isinstance(weights, Iterable):
        kind = "vector" if is_vector else type(weights).__name__
        raise InputError(f"weights: a {kind} is not allowed, it must be a list, each entry {ALLOWED}")
    rows = list(weights)
    if labels and len(labels) != len(rows):
        raise InputError(f"labels: {len(labels)} for {len(rows)} weights, each needs one")
    names = labels or [f"weights[{k}]" for k in range(len(rows))]
    return [network_of(problem, row, name) for row, name in zip(rows, names, strict=True)]


def _read(path: Path, name: str, names: set[str]) -> Any:
    """The contents of a file: a run or a result of this project, or the state that another program saved."""
    foreign = names_state(path)
    if not foreign and not path.is_dir():
        ends_in(name, path, (".h5", *SUFFIXES))
    try:
        return read_state(path, names=names) if foreign else load(path)
    except LandscapeError as error:
        raise type(error)(f"{name}: {error}") from error


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and frozen parameters, which a model's state has besides θ."""
    state = model.state_dict(keep_vars=True).items()
    return {name: t for name, t in state if isinstance(t, Tensor) and not t.requires_grad}


def _layers(model: nn.Module) -> Counter[str]:
    """How many layers of each class a model has, without those that are nothing in eval mode."""
    idle = (nn.Identity, nn.modules.dropout._DropoutNd)
    leaves = (m for m in model.modules() if not [*m.children()] and not isinstance(m, idle))
    return Counter(getattr(m, "original_name", type(m).__name__) for m in leaves)  # of TorchScript, too


def _state(problem: Problem, source: Any, name: str, names: set[str]) -> dict[str, Any]:
    """Name -> tensor of all that a network's outputs depend on; what is not known of a run is missing."""
    if isinstance(source, Mapping):
        return state_in(name, source, names=names)
    if isinstance(source, Checkpoint):
        buffers = {key: mean_buffer(rows) for key, rows in source.buffers.items()} | source.mean_buffers
        state = _constants(problem.model) | buffers | source.layout.views(source.mean)
        unknown = buffer_names(problem.model) if source.learners > 1 and not source.mean_buffers else ()
        return {key: t for key, t in state.items() if key not in unknown}
    if not isinstance(source, (Problem, nn.Module)):
        raise InputError(f"{name}: a {type(source).__name__} is not allowed, it must be {ALLOWED}")
    model = source.model if isinstance(source, Problem) else unwrapped(source)
    if lacking := _layers(problem.model) - _layers(model):
        kinds = ", ".join(sorted(lacking))
        raise InputError(f"{name}: it lacks layers ({kinds}) of the problem's model, it must be alike")
    if isinstance(source, Problem):
        return _constants(model) | source.layout.views(source.weights) | dict(source.at().batchnorm.buffers)
    return model.state_dict()


def _network(problem: Problem, state: dict[str, Any], name: str) -> Network:
    """The network of a state; InputError where it has other constants than the problem's model."""
    model, fixed, statistics = problem.model, _constants(problem.model), buffer_names(problem.model)
    unknown = {key for key in statistics if key not in state and not key.endswith("num_batches_tracked")}
    state |= {key: fixed[key] for key in unknown}
    tensors = dict(fitted(name, state, model, type(model).__name__))
    constants = {key: t.to(fixed[key], copy=True) for key, t in tensors.items() if key in fixed}
    for key in constants.keys() - {*statistics}:
        t = fixed[key]
        count = t.numel() == 1 and not t.is_floating_point()  # of steps, which outputs do not depend on
        if not count and not torch.equal(constants[key], t):
            kind = "frozen parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise InputError(f"{name}: its {kind} '{key}' is not the problem's; give a vector of θ alone")
    theta = problem.layout.flatten(tensors).to(problem.weights)
    return Network(theta, None if unknown else {key: t for key, t in constants.items() if key in statistics})

"""Weights from other programs: a state file and its model become a checkpoint.

Only weights are read, by torch.load(weights_only=True) or safetensors: no code that a file might hold is run.
"""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint, storable, unknown_data
from landscape.core import hdf5
from landscape.core.errors import InputError, OperationError
from landscape.core.files import open_regular
from landscape.core.options import ends_in, near
from landscape.problem.layout import Layout

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# Keys under which training scripts save the state, next to optimizer and epoch, and prefixes that wrappers
# add to every name: DataParallel and DistributedDataParallel; Lightning. torch.compile adds its prefix to
# each compiled module.
KEYS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.")
COMPILED = "_orig_mod."

Message = Callable[[str], None]


def read_state(path: str | Path, message: Message = lambda line: None) -> dict[str, Any]:
    """Name -> tensor of a .pt, .pth, .bin, .ckpt or .safetensors file; ``message`` of what was unwrapped.

    Raises OperationError for a file that is missing, damaged, holds no state, or could only be read by
    running code from it; InputError for another suffix.
    """
    path = Path(path)
    ends_in("STATE", path, SUFFIXES)
    if not path.exists():
        raise OperationError(f"{path}: no such file; a state that torch.save or safetensors wrote is needed")
    with open_regular(path) as file:
        _check_archive(path, file)
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        with warnings.catch_warnings():  # of torch about its own quantized tensors
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise OperationError(
            f"{path}: not a file of weights alone, and code from a file is never run; write one by "
            "torch.save(model.state_dict(), …) or safetensors; from a Lightning checkpoint that you trust by "
            f"torch.save(torch.load({path.name!r}, weights_only=False)['state_dict'], '{path.stem}.pt')"
        ) from error
    except Exception as error:  # what zip, pickle and safetensors raise for a damaged file is not documented
        raise _unreadable(path, error) from error
    return state_in(path, loaded, message)


def state_in(where: str | Path, loaded: Any, message: Message = lambda line: None) -> dict[str, Any]:
    """Name -> tensor of what a training script saved; OperationError, with ``where``, if it has no state."""
    for key in KEYS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            message(f"{where}: took the state under '{key}'")
            loaded = loaded[key]
    state = loaded if isinstance(loaded, Mapping) else {}
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise OperationError(f"{where}: holds no tensors by name, a model's state_dict() is needed")
    return {str(name): value for name, value in state.items()}


def _unreadable(path: Path, error: Exception) -> OperationError:
    words = " ".join(str(error).split())[:120]
    return OperationError(f"{path}: not a readable state file ({type(error).__name__}: {words})")


def _check_archive(path: Path, file: IO[bytes]) -> None:
    """Raise OperationError for a zip archive, which a .pt file is, that unpacks to more than itself."""
    if path.suffix == ".safetensors" or file.read(2) != b"PK":
        return
    length = file.seek(0, 2)
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [e for e in archive.infolist() if e.compress_type != zipfile.ZIP_STORED]
            total = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # what zipfile raises for a damaged archive is not documented
        raise _unreadable(path, error) from error
    if packed or total > length:
        what = f"its part {packed[0].filename} is compressed" if packed else f"its parts have {total:,} bytes"
        raise OperationError(f"{path}: not as torch.save writes a file of {length:,} bytes, {what}")


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
    path: str | Path, state: dict[str, Any], names: set[str], message: Message = lambda line: None
) -> dict[str, Any]:
    """``state`` by the model's ``names``: without the prefixes that wrappers added to them.

    The model may also be an attribute of the module that was saved. Lightning's checkpoints are an example:
    their module has the model as self.net, next to metrics. That part is used if exactly one prefix gives all
    ``names`` of the model.
    """
    if any(COMPILED in name for name in state) and not any(COMPILED in name for name in names):
        state = {name.replace(COMPILED, ""): value for name, value in state.items()}
        message(f"{path}: dropped '{COMPILED}'")
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state) and not any(n.startswith(prefix) for n in names):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
            message(f"{path}: dropped '{prefix}'")
    first = min(names, default="")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    whole = [prefix for prefix in prefixes if all(prefix + name in state for name in names)]
    if first in state or len(whole) != 1:
        return state
    rest = [name for name in state if not name.startswith(whole[0])]
    omitted = f", left out {len(rest)} more ({', '.join(rest[:3])}{', …' * (len(rest) > 3)})" if rest else ""
    message(f"{path}: took '{whole[0]}'{omitted}")
    return {name.removeprefix(whole[0]): v for name, v in state.items() if name.startswith(whole[0])}


def fitted(path: str | Path, state: dict[str, Any], model: nn.Module, name: str) -> dict[str, Tensor]:
    """The model's names -> the tensors of the state; OperationError names the first tensor that does not fit.

    One of several tied names is sufficient, and BatchNorm's counts may be missing (files older than PyTorch
    0.4.1 have none).
    """
    known = model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in known.items() if isinstance(value, Tensor)}
    for key in state:
        if key not in known:
            raise OperationError(f"{path}: '{key}' is not in the model {name}{near(key, known)}")
    groups: dict[int, list[str]] = {}
    for key, value in tensors.items():
        groups.setdefault(id(value), []).append(key)
    found = {}
    for keys in groups.values():
        names = [key for key in keys if key in state]
        if not names and keys[0].endswith("num_batches_tracked"):
            continue
        if not names:
            raise OperationError(f"{path}: it lacks '{keys[0]}' of the model {name}{near(keys[0], state)}")
        for key in names:
            value, shape = state[key], tuple(tensors[key].shape)
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                what = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else "is no tensor"
                raise OperationError(f"{path}: '{key}' {what}, the model {name} needs shape {shape}")
            if why := _unfit(value, tensors[key]):
                raise OperationError(f"{path}: '{key}' {why}")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise OperationError(f"{path}: '{key}' holds NaN or infinite numbers, all must be finite")
            if key != names[0] and not torch.equal(value, state[names[0]]):
                raise OperationError(f"{path}: '{names[0]}' and '{key}' differ, but are one tensor in {name}")
        found[keys[0]] = state[names[0]]
    return found


def import_state(
    paths: str | Path | Sequence[str | Path],
    model: nn.Module,
    *,
    name: str = "",
    options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    message: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """A checkpoint with one learner for each state file.

    θ holds the trainable parameters; frozen ones go with the buffers. Numbers narrower than float32 become
    float32.

    Args:
        paths: .pt, .pth, .bin, .ckpt or .safetensors files, all of one model.
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
    files = [Path(p) for p in ([paths] if isinstance(paths, (str, Path)) else paths)]
    name = name or f"{type(model).__module__}:{type(model).__qualname__}"
    layout = Layout.of(model)
    if layout.size == 0:
        raise InputError(f"model: {name} has no trainable parameters, at least one is needed")
    trained = {slot.name for slot in layout.slots}
    rows, fixed = [], []
    for path in files:
        state = unwrapped_state(path, read_state(path, message), {*model.state_dict()}, message)
        tensors = {key: storable(value) for key, value in fitted(path, state, model, name).items()}
        rows.append(layout.flatten({key: value for key, value in tensors.items() if key in trained}))
        fixed.append({key: value for key, value in tensors.items() if key not in trained})
    common = [key for key in fixed[0] if all(key in row for row in fixed)]
    origin = "".join(
        f'[[import]]\nfile = {json.dumps(path.name)}\nsha256 = "{hdf5.sha256(path)}"\n' for path in files
    )
    return Checkpoint(
        weights=torch.stack(rows),
        layout=layout,
        step=0,
        epoch=0.0,
        algorithm=IMPORTED,
        recipe=origin,
        model={"name": name, "options": options or {}},
        buffers={key: torch.stack([row[key] for row in fixed]) for key in common},
        data=data or unknown_data(),
    )

"""Weights from other programs: a state and its model become a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint, storable, unknown_data
from landscape.checkpoint.state_files import Message, files_of, read_state
from landscape.core import hdf5
from landscape.core.errors import InputError, OperationError
from landscape.core.options import near
from landscape.problem.layout import Layout

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
    known = model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in known.items() if isinstance(value, Tensor)}
    for key in state:
        if key not in known and isinstance(state[key], Tensor):
            raise OperationError(f"{path}: '{key}' is not in the model {name}{near(key, known)}")
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
    given = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not given:
        raise InputError("paths: an empty list is not allowed, it must name a file of weights")
    name = name or f"{type(model).__module__}:{type(model).__qualname__}"
    layout = Layout.of(model)
    if layout.size == 0:
        raise InputError(f"model: {name} has no trainable parameters, at least one is needed")
    places, names = {slot.name: slot.place for slot in layout.slots}, {*model.state_dict()}
    rows, fixed = [], list[dict[str, Tensor]]()
    for path in given:
        state = unwrapped_state(path, read_state(path, message, names), names, message)
        row, others = torch.empty(layout.size, dtype=torch.float32), {}
        for key, value in fitted(path, state, model, name):  # one by one: never all of them beside θ
            if key in places:
                row = row.to(torch.promote_types(row.dtype, value.dtype))
                row[places[key]] = value.flatten()
            else:
                others[key] = storable(value).clone()
        rows.append(row)
        fixed.append(others)
    common = [key for key in fixed[0] if all(key in row for row in fixed)]
    origin = "".join(
        f'[[import]]\nfile = {json.dumps(file.name)}\nsha256 = "{hdf5.sha256(file)}"\n'
        for path in given
        for file in files_of(path)
    )
    return Checkpoint(
        weights=torch.stack(rows) if rows[1:] else rows[0][None],
        layout=layout,
        step=0,
        epoch=0.0,
        algorithm=IMPORTED,
        recipe=origin,
        model={"name": name, "options": options or {}},
        buffers={key: torch.stack([row[key] for row in fixed]) for key in common},
        data=data or unknown_data(),
    )

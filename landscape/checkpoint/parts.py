"""The parts of a checkpoint: arrays of its file, and its network."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from landscape import models
from landscape.checkpoint.user_code import command_text, is_user_defined
from landscape.core import hdf5
from landscape.core.errors import FailedError
from landscape.problem.layout import Layout, Slot

SLOT = np.dtype(
    [
        ("name", h5py.string_dtype()),
        ("shape", h5py.string_dtype()),
        ("offset", "i8"),
        ("size", "i8"),
        ("role", h5py.string_dtype()),
    ]
)


def storable(tensor: Tensor) -> Tensor:
    """``tensor`` in a precision that files have: float32 for bfloat16 and float16."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def layout(rows: h5py.Dataset) -> Layout:
    """The layout as a checkpoint holds it."""
    if rows.dtype.names != SLOT.names:
        raise ValueError(f"/layout has the columns {rows.dtype.names}, {SLOT.names} are needed")
    return Layout(
        tuple(
            Slot(
                bytes(name).decode("utf-8"),
                tuple(int(n) for n in bytes(shape).decode("ascii").split("x") if n),
                int(offset),
                int(size),
                bytes(role).decode("utf-8"),
            )
            for name, shape, offset, size, role in np.asarray(rows).tolist()
        )
    )


def facts(file: h5py.File, name: str, kinds: dict[str, type]) -> dict[str, Any]:
    """A JSON object in an attribute, with values of these kinds."""
    facts = json.loads(hdf5.attribute(file, name, str))
    for key, kind in kinds.items():
        if not isinstance(facts, dict) or type(facts.get(key)) is not kind:
            raise ValueError(f"attribute /{name} has no '{key}' of the kind {kind.__name__}")
    return dict(facts)


def tensors(group: Any, rows: slice | EllipsisType, learners: int | None = None) -> dict[str, Tensor]:
    """Tensors by name; with ``learners``, each has so many rows."""
    by_name = {}
    for name in group:
        dataset = hdf5.dataset(group, name, "fiubc")
        if learners is not None and (not dataset.ndim or len(dataset) != learners):
            raise ValueError(
                f"{dataset.name} has shape {dataset.shape}, a row for each of {learners} learners is needed"
            )
        by_name[name] = torch.from_numpy(np.asarray(dataset[rows]))
    return by_name


def check_layout(layout: Layout) -> None:
    """Raise ValueError where the slots of a layout do not add up."""
    if len({slot.name for slot in layout.slots}) < len(layout.slots) or not layout.slots:
        raise ValueError("layout must hold names, each once")
    offset = 0
    for slot in layout.slots:
        if min(slot.shape, default=1) < 0:
            raise ValueError(f"layout of {slot.name} has a negative size")
        if slot.offset != offset or slot.size != math.prod(slot.shape):
            raise ValueError(f"layout of {slot.name} does not add up")
        offset += slot.size


Network = nn.Module | Callable[[], nn.Module]


def restored(
    where: str,
    name: str,
    options: dict[str, Any],
    layout: Layout,
    buffers: Mapping[str, Tensor],
    given: Network | None,
) -> nn.Module:
    """The model called ``name``, or a copy of the ``given`` one, with these buffers.

    Args:
        where: the file, for messages.
        layout: that of the weights, which the model must have.

    Raises:
        FailedError: the model is code of the user's and not given, or does not fit.
    """
    if given is None and is_user_defined(name):
        raise FailedError(
            f"{where}: its model is '{name}', code that a file cannot bring along; give --model "
            f"{command_text(name, options)} (from Python, model=…)"
        )
    if given is None:
        network = models.build(name, **options)
    else:
        network = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
    if Layout.of(network) != layout:
        raise FailedError(f"{where}: its weights do not fit the model: {misfit(layout, Layout.of(network))}")
    set_buffers(where, network, buffers)
    return network


def set_buffers(where: str, network: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set buffers, and parameters that are not trained, by name; FailedError for one that does not fit."""
    known = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for key, value in values.items():
        if key not in known or known[key].shape != value.shape:
            raise FailedError(f"{where}: its buffer '{key}' {tuple(value.shape)} does not fit the model")
    set_tensors(network, values)


def misfit(file: Layout, model: Layout) -> str:
    """Where two layouts first differ."""
    shapes, needed = ({slot.name: slot.shape for slot in layout.slots} for layout in (file, model))
    for name in {**shapes, **needed}:
        if shapes.get(name) != needed.get(name):
            here, there = shapes.get(name, "missing"), needed.get(name, "missing or frozen")
            return f"'{name}' is {here} in the file, {there} in the model"
    return "the order of the parameters differs"


def mean_buffer(rows: Tensor) -> Tensor:
    """The mean of a buffer over the learners (n, …); row 0 where all are equal, or counts."""
    equal = bool((rows == rows[0]).all())
    return rows[0] if equal or not rows.is_floating_point() else rows.mean(0)


@torch.no_grad()
def set_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers of ``model`` by name."""
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        known[name].copy_(value)

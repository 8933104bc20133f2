"""The parts of a checkpoint's file, read and checked one by one; ValueError names what does not fit."""

from __future__ import annotations

import json
import math
from types import EllipsisType
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from landscape.core import hdf5
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

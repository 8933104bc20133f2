"""The network of a checkpoint: built by name or given, and fitted with the checkpoint's buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from landscape import models
from landscape.checkpoint.user_code import command_text, is_user_defined
from landscape.core.errors import FailedError
from landscape.problem.layout import Layout

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

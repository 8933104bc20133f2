"""Weights as users have them: a vector, a problem, a model, a state dict, a run or a file, by one converter.

Parameters are matched by name. What a model has besides θ must be the problem's, but for the statistics of
BatchNorm, which stay with the weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import Checkpoint, mean_buffer
from landscape.checkpoint.foreign_weights import fitted, unwrapped_state
from landscape.checkpoint.run_folder import load
from landscape.checkpoint.state_files import SUFFIXES, names_state, read_state, state_in
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import ends_in
from landscape.problem.batchnorm import BatchNormPolicy, buffer_names
from landscape.problem.layout import unwrapped, vector_of
from landscape.problem.problem import Problem
from landscape.problem.sharded import on_ranks

Weights = Tensor | Array | Problem | nn.Module | Mapping[str, Any] | Checkpoint | str | Path
ALLOWED = "a vector (P,), a Problem, a model, a state dict, a run, or the name of a file of one"


@dataclass(frozen=True, eq=False)
class Network:
    """θ (P,), as a problem has its own, and BatchNorm's buffers by name; None where these are not known."""

    theta: Tensor
    statistics: Mapping[str, Tensor] | None

    def own_loss(self, problem: Problem) -> float:
        """The loss with the network's own statistics; NaN where they are not known."""
        if self.statistics is None:
            return float("nan")
        own = problem.on(problem.data)
        own.batchnorm = BatchNormPolicy(buffers=self.statistics)
        return own.loss(self.theta)

    def shares_statistics(self, problem: Problem) -> bool:
        """Return whether its statistics are known to be those in the buffers of the problem's model."""
        if self.statistics is None:
            return False
        own = dict(problem.model.named_buffers())  # with counts of batches, which no loss depends on
        return all(torch.equal(t, own[name]) for name, t in self.statistics.items() if t.is_floating_point())


def network_of(problem: Problem, given: Any, name: str) -> Network:
    """The weights of the problem's model that were given as the argument ``name``.

    Raises:
        InputError: what is no weights, or is of another model.
        OperationError: a file that cannot be read, a tensor that does not fit, or numbers not finite.
    """
    names = {*problem.model.state_dict()}
    if isinstance(given, (str, os.PathLike)):
        given, name = _read(Path(given), name, names), f"{name}: {given}"
    if isinstance(given, (Tensor, np.ndarray)) or (on_ranks(problem) and given is not None):
        theta, buffers = vector_of(given, problem.weights, name), dict(problem.model.named_buffers())
        own = {key: buffers[key] for key in buffer_names(problem.model)}
        network = Network(theta, own if not own or torch.equal(theta, problem.weights) else None)
    else:
        state = unwrapped_state(name, _state(problem, given, name, names), names)
        network = _network(problem, state, name)
    if not bool(torch.isfinite(network.theta).all()):
        raise OperationError(f"{name}: its weights are NaN or infinite, all must be finite")
    return network


def networks_of(problem: Problem, given: Any, labels: Sequence[str] = ()) -> list[Network]:
    """:func:`network_of` of each entry of the argument ``weights``, a list or vectors (n, P)."""
    one = isinstance(given, (str, os.PathLike, Mapping, nn.Module, Problem, Checkpoint))
    if one or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise InputError(f"weights: a {kind} is not allowed, it must be a list, each entry {ALLOWED}")
    rows = list(given)
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


def _state(problem: Problem, given: Any, name: str, names: set[str]) -> dict[str, Any]:
    """Name -> tensor of all that a network's outputs depend on; what is not known of a run is missing."""
    if isinstance(given, Mapping):
        return state_in(name, given, names=names)
    if isinstance(given, Checkpoint):
        buffers = {key: mean_buffer(rows) for key, rows in given.buffers.items()} | given.mean_buffers
        state = _constants(problem.model) | buffers | given.layout.views(given.mean)
        lost = buffer_names(problem.model) if given.learners > 1 and not given.mean_buffers else ()
        return {key: t for key, t in state.items() if key not in lost}
    if not isinstance(given, (Problem, nn.Module)):
        raise InputError(f"{name}: a {type(given).__name__} is not allowed, it must be {ALLOWED}")
    model = given.model if isinstance(given, Problem) else unwrapped(given)
    if lacking := _layers(problem.model) - _layers(model):
        kinds = ", ".join(sorted(lacking))
        raise InputError(f"{name}: it lacks layers ({kinds}) of the problem's model, it must be alike")
    if isinstance(given, Problem):
        return _constants(model) | given.layout.views(given.weights) | dict(given.at().batchnorm.buffers)
    return model.state_dict()


def _network(problem: Problem, state: dict[str, Any], name: str) -> Network:
    """The network of a state; InputError where it has other constants than the problem's model."""
    model, own, statistics = problem.model, _constants(problem.model), buffer_names(problem.model)
    unknown = {key for key in statistics if key not in state and not key.endswith("num_batches_tracked")}
    state |= {key: own[key] for key in unknown}
    tensors = dict(fitted(name, state, model, type(model).__name__))
    constants = {key: t.to(own[key], copy=True) for key, t in tensors.items() if key in own}
    for key in constants.keys() - {*statistics}:
        t = own[key]
        count = t.numel() == 1 and not t.is_floating_point()  # of steps, which outputs do not depend on
        if not count and not torch.equal(constants[key], t):
            kind = "frozen parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise InputError(
                f"{name}: its {kind} '{key}' is not the problem's, and is no part of θ; it must be equal, or "
                "a vector (P,) be given, which stands for θ alone"
            )
    theta = problem.layout.flatten(tensors).to(problem.weights)
    return Network(theta, None if unknown else {key: t for key, t in constants.items() if key in statistics})

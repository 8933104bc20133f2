"""Measurements of a loop that trains a model divided among ranks, which all of them make together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import storable
from landscape.core.errors import InputError
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.problem import Loss, Problem
from landscape.problem.shards import whole
from landscape.training.decomposition import Gradient
from landscape.training.own_loop.flat import DefaultGroup, rank_and_size
from landscape.training.own_loop.observer import Observer, Parameters
from landscape.training.recipes.recipe import Monitor, build_table


class ShardedObserver(Observer):
    """It measures a module whose parameters are DTensors, itself and no copy as :class:`.Observer` does.

    Args and errors as there; all ranks make the same calls. Refused in one line is what would need the whole
    model in one process: samples drawn anew, BatchNorm's own batches, and other instruments than λ_max.
    """

    def __init__(
        self, module: nn.Module, loss: Loss | None, data: Any, test: Any, *, samples: int,
        monitor: Mapping[str, Any], batch: int, processes: int, seed: int, optimizer: Any, **how: Any,
    ) -> None:  # fmt: skip
        table = build_table(Monitor, {"samples": 0, **monitor}, "monitor.")
        refused = {
            "samples": samples,
            "monitor.samples": table.samples,
            "monitor.instruments": table.instruments,
            "randomness": how.pop("randomness") != "refuse",
            "model: BatchNorm": has_batchnorm(module),
        }
        for name, given in refused.items():
            if given:
                raise InputError(f"{name}: not allowed in a recorder of a sharded model")
        self._data, self._device = (data, test), next(module.parameters()).device
        self._start = None
        with self._undisturbed():
            self._shards: Any = Problem(module, loss, data, **how)
            self.train = self._objective = self._shards
            self.test = None if test is None else Problem(module, loss, test, **how)
            self.parameters = ShardedParameters(module, self.train)
            self.monitor = self._monitoring(table, seed, 0, optimizer)
        self._group = DefaultGroup(*rank_and_size(), self._device)

    def start(self, step: int) -> None:
        with self._undisturbed():
            loss, g = self.train.loss_and_gradient()
        comm: Any = SimpleNamespace(totals=self._shards.total)
        self._start = self.parameters.flat(), Gradient(loss, g[None], comm)

    def state(self, step: int) -> dict[str, Tensor]:
        self._group.step = step  # which an error of the exchange that follows names
        return {}  # vectors of this rank

    def agreed(self, due: bool) -> bool:
        return bool(self._shards.gathered(torch.tensor(float(due))).any())

    def together(self) -> contextlib.AbstractContextManager[None]:
        return self._group.together()


class ShardedParameters(Parameters):
    """The module's trainable parameters, as the vector (n,) of this rank."""

    def __init__(self, module: nn.Module, problem: Problem) -> None:
        super().__init__(module, problem)
        self.problem = problem

    def flat(self) -> Tensor:
        return self.problem.weights

    def show(self, copy: nn.Module) -> None:
        """Change nothing, as there is no copy."""

    @torch.no_grad()
    def recorded(self) -> Tensor:
        """θ (1, P) in the CPU's memory of rank 0, gathered parameter by parameter; (1, 0) on the others."""
        first = dist.get_rank() == 0
        theta = torch.empty(1, self.layout.size if first else 0, dtype=self._dtype)
        views = list(self.layout.views(theta[0]).values()) if first else []
        for k, parameter in enumerate(self.trained()):
            part = whole(parameter)
            if first:
                views[k].copy_(part)
        return theta

    def kept(self) -> dict[str, Tensor]:
        found = {}
        for name, tensor in self.rest(saved=True).items():
            part = whole(tensor)
            if dist.get_rank() == 0:
                found[name] = storable(part)[None].to("cpu", copy=True)
        return found

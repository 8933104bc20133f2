"""Users' training loops, recorded or decentralized: their modules, optimizers and processes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape import limits
from landscape.checkpoint.checkpoint import Checkpoint, storable
from landscape.core.errors import InputError, LandscapeError
from landscape.problem.layout import Layout
from landscape.training.processes.comm import LostProcessError, Processes, first_line

REMEDY = "make the change first, then a new optimizer and a new DecentralizedDataParallel"


def check_module(model: nn.Module) -> None:
    """Raise InputError unless ``model`` has all of its parameters here."""
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise InputError("model: FSDP cuts its parameters into shards, they are needed whole (DDP)")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise refusal(name, "has no shape yet", "run one batch through the model first")
        if hasattr(p, "placements"):
            raise refusal(name, "is cut into shards (DTensor)", "it is needed whole (DDP)")


class Tracked:
    """The parameters and buffers of the user's module, with separate names.

    Args:
        module: the user's.
        layout: of its trainable parameters, with these names.
        own_name: from the module's names to these.
    """

    def __init__(self, module: nn.Module, layout: Layout, own_name: Callable[[str], str]) -> None:
        self.module, self.layout, self._own_name = module, layout, own_name

    def named(self) -> dict[str, nn.Parameter]:
        """Name -> parameter now."""
        return {self._own_name(name): p for name, p in self.module.named_parameters()}

    def untrained(self, saved: bool = False) -> dict[str, Tensor]:
        """Name -> frozen parameters and buffers, as they are; ``saved``: only those that state_dict has."""
        everything = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        chosen = self.module.state_dict().keys() & everything.keys() if saved else everything.keys()
        named = {self._own_name(name): t.detach() for name, t in everything.items() if name in chosen}
        trained = {slot.name for slot in self.layout.slots}
        return {name: t for name, t in named.items() if name not in trained}

    def untrained_rows(self) -> dict[str, Tensor]:
        """Return the saved part of :meth:`untrained`, a row for the one learner, as files take it."""
        return {name: storable(t)[None].clone() for name, t in self.untrained(saved=True).items()}


def unwrapped_name(name: str) -> str:
    """Return the name of a parameter in the module that torch.compile wrapped."""
    return name.replace("_orig_mod.", "")


def kind(t: Tensor) -> str:
    """Return the precision and the shape of a parameter or buffer, and whether it is trained, in words."""
    return f"{precision(t)} of shape {tuple(t.shape)}{'' if t.requires_grad else ', not trained'}"


def precision(t: Tensor) -> str:
    """Return the name of the precision of ``t``, as torch has it."""
    return str(t.dtype).removeprefix("torch.")


def kind_and_place(p: Tensor) -> str:
    """Return the precision and the device of a parameter, in words."""
    return f"{precision(p)} on {p.device}"


def refusal(name: str, change: str, remedy: str = REMEDY) -> InputError:
    """Return the error that the parameter called ``name`` has a ``change`` that is not allowed."""
    return InputError(f"model: parameter '{name}' {change}; {remedy}")


class DefaultGroup(Processes):
    """The user's own process group, or the only process where there is none.

    Raises:
        InputError: where the group cannot exchange tensors of the device.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size, device)
        if device.type == "cuda" and size > 1 and "nccl" not in (backends := str(dist.get_backend_config())):
            raise InputError(f"model: on {device}, its process group is {backends}; it must have 'nccl'")

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn torch's errors in the exchanges inside into one line."""
        try:
            yield
        except RuntimeError as error:
            words = first_line(error).split(". ")[0]
            text = f"rank {self.rank} of {self.size}: an exchange of step {self.step} failed ({words})"
            remedy = "another process is lost or made fewer steps; resume from the last checkpoint"
            raise LostProcessError(f"{text}, {remedy}") from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return a copy of rank 0's ``tensor``, whose shape and precision are the same on all ranks."""
        copied = tensor.detach().to(self.device, copy=True).contiguous()
        if self.size > 1 and copied.numel():
            with self.naming():
                dist.broadcast(copied.view(-1).view(torch.uint8), 0)
        return copied.to(tensor.device)

    @contextlib.contextmanager
    def raising_on_all_ranks(self) -> Iterator[None]:
        """Make a failure inside fail every rank: with its own error, or with a line that names the rank."""
        error: LandscapeError | None = None
        try:
            yield
        except LostProcessError:
            raise
        except LandscapeError as raised:
            error = raised
        messages = self.gathered("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(messages):
            if text:
                raise LostProcessError(f"rank {rank}: {text}")


def class_path(model: nn.Module) -> str:
    """Return MODULE:NAME of the model's class; for a class of a script its file in place of MODULE."""
    kind = type(model)
    if kind.__bases__[0].__name__ == "FSDPModule":  # fully_shard puts it in front of the user's class
        kind = kind.__bases__[1]
    module = kind.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else module
    return f"{module}:{kind.__qualname__}"


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate of all parameter groups; NaN where they differ, or there is no optimizer."""
    rates = {float(group.get("lr", math.nan)) for group in getattr(optimizer, "param_groups", ())}
    return rates.pop() if len(rates) == 1 else math.nan


def heavy_ball(optimizer: Any) -> tuple[float, str] | None:
    """Return the momentum of torch.optim.SGD and its form, or None for another optimizer."""
    if type(optimizer) is not torch.optim.SGD:
        return None
    keys = ("lr", "momentum", "dampening", "nesterov", "maximize")
    forms = {tuple(float(group[key]) for key in keys) for group in optimizer.param_groups}
    _, momentum, dampening, nesterov, maximize = forms.pop()
    if forms or maximize or not 0 <= momentum < 1 or (momentum and dampening):
        return None
    return momentum, "nesterov" if nesterov else "ordinary"


def stability_limit(optimizer: Any) -> float | None:
    """The largest stable ηλ of torch.optim.SGD in its form; None for another optimizer."""
    form = heavy_ball(optimizer)
    return limits.max_stable_step(0, *form) if form else None


def optimizer_table(optimizer: Any) -> dict[str, Any]:
    """Return the class of a torch optimizer and its defaults that TOML can hold."""
    table: dict[str, Any] = {"name": type(optimizer).__name__}
    for key, value in getattr(optimizer, "defaults", {}).items():
        value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        items = value if isinstance(value, (list, tuple)) else [value]
        writable = all(isinstance(v, str) or (isinstance(v, int | float) and math.isfinite(v)) for v in items)
        if writable and re.fullmatch(r"[\w-]+", key):
            table[key] = value
    return table


def read_settings(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the tables of the settings of a recorded checkpoint."""
    return {name: table for name, table in checkpoint.settings.items() if isinstance(table, dict)}


def has_group() -> bool:
    """Return whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_size(what: str = "Recorder") -> tuple[int, int]:
    """Return the rank and the number of processes; InputError for several without a process group."""
    if has_group():
        return dist.get_rank(), dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise InputError(f"{what}: WORLD_SIZE is {size}; call init_process_group first")
    return 0, 1

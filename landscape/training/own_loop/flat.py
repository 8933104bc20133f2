"""The user's own loop: its optimizer, its module's parameters (as one tensor, too), its processes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape import limits
from landscape.checkpoint.checkpoint import Checkpoint, storable
from landscape.core.devices import float64_device
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.curvature.hessian import Preconditioner
from landscape.problem.layout import Layout
from landscape.training.optimizer.torch_optim import preconditioned
from landscape.training.optimizer.torch_optim import preconditioner as found_preconditioner
from landscape.training.processes.comm import Processes
from landscape.training.processes.process_group import LostProcessError, first_line

REMEDY = "make the change first, then a new optimizer and a new DecentralizedDataParallel"


def check_module(model: Any) -> None:
    """Raise InputError unless ``model`` is a module with all of its parameters here."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: a {type(model).__name__} is not allowed, it must be a torch.nn.Module")
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise InputError("model: FSDP cuts its parameters into shards, they are needed whole (DDP)")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise _refusal(name, "has no shape yet", "run one batch through the model first")
        if hasattr(p, "placements"):
            raise _refusal(name, "is cut into shards (DTensor)", "it is needed whole (DDP)")


class Tracked:
    """The parameters and buffers of the user's module, under names of their own.

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

    def rest(self, saved: bool = False) -> dict[str, Tensor]:
        """Name -> frozen parameters and buffers, as they are; ``saved``: only those that state_dict has."""
        everything = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        chosen = self.module.state_dict().keys() & everything.keys() if saved else everything.keys()
        named = {self._own_name(name): t.detach() for name, t in everything.items() if name in chosen}
        trained = {slot.name for slot in self.layout.slots}
        return {name: t for name, t in named.items() if name not in trained}

    def kept(self) -> dict[str, Tensor]:
        """The saved part of :meth:`rest`, a row for the one learner, as files take it."""
        return {name: storable(t)[None].clone() for name, t in self.rest(saved=True).items()}


class FlatParameters(Tracked):
    """The trainable parameters of ``module`` as views of ``flat`` (1, P), in the order of ``layout``.

    The Parameter objects stay the same, so that the optimizer's are these; only their memory is replaced. A
    tied parameter is there once. ``trained`` name -> parameter.

    Args:
        module: the user's.
        optimizer: its optimizer, which must have all trainable parameters and no others.

    Raises:
        InputError: for parameters that cannot lie in one piece of memory, or are not the optimizer's.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        slots = (dataclasses.replace(slot, name=plain(slot.name)) for slot in Layout.of(module).slots)
        super().__init__(module, Layout(tuple(slots)), plain)
        self.optimizer, self._known = optimizer, self.named()
        self.trained = {name: p for name, p in self._known.items() if p.requires_grad}
        self._groups = self._optimized()
        self._check_parameters()
        self._check_optimizer()
        first = next(iter(self.trained.values()))
        self.device = first.device
        self.flat = torch.empty(1, self.layout.size, dtype=first.dtype, device=first.device)
        self.views = [*self.layout.views(self.flat[0]).values()]
        for p, view in zip(self.trained.values(), self.views, strict=True):
            view.copy_(p.detach())
            p.data = view

    def _optimized(self) -> list[int]:
        """The identities of the optimizer's parameters."""
        return [id(p) for group in self.optimizer.param_groups for p in group["params"]]

    def _check_parameters(self) -> None:
        if not self.trained:
            raise InputError("model: it has no trainable parameter")
        first, memory = next(iter(self.trained)), dict[int, str]()
        for name, p in self.trained.items():
            if p.device.type == "meta" or not p.is_floating_point():
                raise _refusal(name, f"is {_kind(p)}", "parameters are real numbers with values")
            if _kind(p) != (kind := _kind(self.trained[first])):
                reason = f"is {_kind(p)}, '{first}' is {kind}"
                raise _refusal(name, reason, "all trainable parameters must be alike; use autocast")
            if p.numel() and (other := memory.setdefault(p.data_ptr(), name)) != name:
                reason = f"shares the memory of '{other}'"
                raise _refusal(name, reason, "tied weights must be one Parameter under both names")

    def _check_optimizer(self) -> None:
        own = {id(p) for p in self._known.values()}
        given = [p for group in self.optimizer.param_groups for p in group["params"]]
        if foreign := [p for p in given if id(p) not in own]:
            shape = tuple(foreign[0].shape)
            raise InputError(
                f"optimizer: its parameter of shape {shape} is not the model's; use its parameters()"
            )
        for name, p in self.trained.items():
            if id(p) not in self._groups:
                raise InputError(f"optimizer: parameter '{name}' is not in it; add it, or freeze it")

    def check(self) -> None:
        """Raise InputError where the trained parameters are no longer the same; others may come and go."""
        now = self.named()
        for name, p in {**self._known, **now}.items():
            if now.get(name) is not self._known.get(name) and (name in self.trained or p.requires_grad):
                raise _refusal(name, "was added, replaced or removed")
            if p.requires_grad and name not in self.trained:
                raise _refusal(name, "was frozen, now it is trained")
        self._known = now
        if self._optimized() != self._groups:
            raise InputError(f"optimizer: its parameters have changed; {REMEDY}")
        self.check_memory()

    def check_memory(self) -> None:
        """Raise InputError where parameters have another shape, precision or device.

        New memory of the same kind, as ``p.data = …`` gives, is copied and given up.
        """
        for (name, p), view in zip(self.trained.items(), self.views, strict=True):
            if p.data_ptr() == view.data_ptr() and p.shape == view.shape:  # as almost always
                continue
            if p.shape != view.shape:
                raise _refusal(name, f"had shape {tuple(view.shape)}, now {tuple(p.shape)}")
            if p.dtype != view.dtype or p.device != view.device:
                raise _refusal(name, f"was {_kind(view)}, now {_kind(p)}")
            view.copy_(p.detach().clone())
            p.data = view


def plain(name: str) -> str:
    """The name of a parameter in the module that torch.compile wrapped."""
    return name.replace("_orig_mod.", "")


def kind(t: Tensor) -> str:
    """The precision and the shape of a parameter or buffer, and whether it is trained, in words."""
    return f"{_precision(t)} of shape {tuple(t.shape)}{'' if t.requires_grad else ', not trained'}"


def _precision(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _kind(p: Tensor) -> str:
    return f"{_precision(p)} on {p.device}"


def _refusal(name: str, change: str, remedy: str = REMEDY) -> InputError:
    return InputError(f"model: parameter '{name}' {change}; {remedy}")


class DefaultGroup(Processes):
    """The user's own process group, or the only process where there is none.

    Raises:
        InputError: where the group cannot exchange tensors of the device.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size, device)
        backends = str(dist.get_backend_config()) if size > 1 else ""
        if device.type == "cuda" and "nccl" not in backends and size > 1:
            raise InputError(
                f"model: it is on {device}, the process group is {backends}; call init_process_group('nccl')"
            )

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn torch's errors in the exchanges inside into one line."""
        try:
            yield
        except RuntimeError as error:
            words = first_line(error).split(". ")[0]
            raise LostProcessError(
                f"rank {self.rank} of {self.size}: an exchange of step {self.step} failed, another process "
                f"is lost or made fewer steps ({words}); go on from the last checkpoint"
            ) from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """``tensor`` of rank 0, in memory of its own; its shape and precision are the same on all ranks."""
        copied = tensor.detach().to(self.device, copy=True).contiguous()
        if self.size > 1 and copied.numel():
            with self.naming():
                dist.broadcast(copied.view(-1).view(torch.uint8), 0)
        return copied.to(tensor.device)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make a failure inside fail every rank: with its own error, or with a line that names the rank."""
        error: LandscapeError | None = None
        try:
            yield
        except LostProcessError:
            raise
        except LandscapeError as raised:
            error = raised
        found = self.gathered("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(found):
            if text:
                raise LostProcessError(f"rank {rank}: {text}")


#: The name in a checkpoint of which parameters have a state (n, parameter tensors): one that never had a
#: gradient has none.
PRESENT = "present"


class OptimizerState:
    """The state of one learner's torch optimizer as update rules take it, an :class:`.OptimizerMemory`.

    ``state`` is read and written by rules that average it: name -> (1, …), for each name of torch's the
    parameter tensors one after the other. All processes read it at the same step, since they compare first
    whether theirs have the same parts.
    """

    def __init__(self, parameters: FlatParameters, group: DefaultGroup) -> None:
        self._parameters, self._group = parameters, group
        # Such as Adagrad's, which is made before the first step.
        self._first = {p: copy.deepcopy(dict(s)) for p, s in self._states() if s}

    def _states(self) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
        state = self._parameters.optimizer.state
        return [(p, state.get(p, {})) for p in self._parameters.trained.values()]

    def _parts(self) -> dict[str, list[Tensor]]:
        """Name -> tensors of the parameters that have one."""
        parts: dict[str, list[Tensor]] = {}
        for _, state in self._states():
            for key in sorted(k for k, v in state.items() if isinstance(v, Tensor)):
                parts.setdefault(key, []).append(state[key])
        return parts

    @property
    def counters(self) -> frozenset[str]:
        """Names of tensors that count steps."""
        return frozenset(
            key
            for key, parts in self._parts().items()
            if any(not t.dim() or not t.is_floating_point() for t in parts)
        )

    @property
    def state(self) -> dict[str, Tensor]:
        parts = self._parts()
        if self._group.size > 1:
            shapes = [(name, key, tuple(v.shape)) for name, key, v in self._named()]
            digest = hashlib.sha256(repr(shapes).encode()).hexdigest()
            if len(set(self._group.gathered(digest))) > 1:
                raise InputError(
                    "optimizer: its state cannot be averaged, since on some process a parameter never had a "
                    "gradient; use all parameters in the first step, or algorithm buffers='keep'"
                )
        return {
            key: torch.cat([t.detach().flatten() for t in tensors])[None] for key, tensors in parts.items()
        }

    @state.setter
    def state(self, rows: dict[str, Tensor]) -> None:
        for key, tensors in self._parts().items():
            sizes = [t.numel() for t in tensors]
            for tensor, part in zip(tensors, torch.split(rows[key][0], sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def reset(self) -> None:
        """Restore the state that the optimizer had when it was wrapped: for most, none."""
        for p, _ in self._states():
            self._parameters.optimizer.state.pop(p, None)
            if p in self._first:
                self._parameters.optimizer.state[p] = copy.deepcopy(self._first[p])

    # Checkpoints.

    def _named(self) -> list[tuple[str, str, Tensor]]:
        """(parameter, name, tensor) of all tensors. OperationError for a state that is none."""
        found = []
        for name, (_, state) in zip(self._parameters.trained, self._states(), strict=True):
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    found.append((name, key, value.detach()))
                elif value is not None:
                    kind = type(value).__name__
                    raise OperationError(f"optimizer: its state '{key}' is a {kind}, not a tensor")
        return found

    def rows(self) -> dict[str, Tensor]:
        """The state for a checkpoint: "PARAMETER.NAME" -> (1, …), the same names and shapes on all ranks."""
        mine = {f"{name}.{key}": storable(value) for name, key, value in self._named()}
        kinds: dict[str, list[Any]] = {}
        own = {name: [_precision(t), list(t.shape)] for name, t in mine.items()}
        for theirs in self._group.gathered(own):
            kinds |= theirs
        device = self._parameters.device
        rows = {
            name: mine[name].to(device)[None].clone()
            if name in mine
            else torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in sorted(kinds.items())
        }
        has = [bool(state) for _, state in self._states()]
        return rows | {PRESENT: torch.tensor([has], dtype=torch.uint8, device=device)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`rows` gave, of this learner; the learning rates stay as they are.

        Raises:
            OperationError: where it does not fit the optimizer.
        """
        optimizer, trained = self._parameters.optimizer, self._parameters.trained
        if PRESENT not in state or state[PRESENT].shape[1:] != (len(trained),):
            raise OperationError("checkpoint: its /optimizer does not fit the model's parameters")
        found: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
        for full, rows in state.items():
            name, _, key = full.rpartition(".")
            if name in found:
                found[name][key] = rows[0].clone()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        present = state[PRESENT][0].tolist()
        for (name, p), has in zip(trained.items(), present, strict=True):
            optimizer.state.pop(p, None)
            if has:
                group = groups[id(p)]
                optimizer.state[p] = {key: _placed(t, p, group) for key, t in found[name].items()}


def _placed(value: Tensor, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """``value`` where and in the precision that torch's optimizers have it.

    Their single numbers, such as the step, lie on the CPU unless a kernel on the device reads them.
    """
    if value.dim() == 0:
        return value.to(p.device) if group.get("capturable") or group.get("fused") else value.cpu()
    half = p.itemsize < 4 and value.is_floating_point()
    return value.to(p.device, p.dtype if half else value.dtype)


def class_path(model: nn.Module) -> str:
    """MODULE:NAME of the model's class; of a script's its file, from which others can import it."""
    kind = type(model)
    if kind.__bases__[0].__name__ == "FSDPModule":  # which fully_shard puts in front of the user's class
        kind = kind.__bases__[1]
    module = kind.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else module
    return f"{module}:{kind.__qualname__}"


def rate(optimizer: Any) -> float:
    """The learning rate of all parameter groups; NaN where they differ, or there is no optimizer."""
    if optimizer is None:
        return math.nan
    rates = {float(group.get("lr", math.nan)) for group in optimizer.param_groups}
    return rates.pop() if len(rates) == 1 else math.nan


def heavy_ball(optimizer: Any) -> tuple[float, str] | None:
    """(momentum, form) of torch.optim.SGD, as limits of stability take them; None for what is not known."""
    if type(optimizer) is not torch.optim.SGD:
        return None
    keys = ("lr", "momentum", "dampening", "nesterov", "maximize")
    forms = {tuple(float(group[key]) for key in keys) for group in optimizer.param_groups}
    _, momentum, dampening, nesterov, maximize = forms.pop()
    if forms or maximize or not 0 <= momentum < 1 or (momentum and dampening):
        return None
    return momentum, "nesterov" if nesterov else "ordinary"


def stability_limit(optimizer: Any) -> float | None:
    """The largest stable ηλ of torch.optim.SGD in its form; None for what is not known."""
    form = heavy_ball(optimizer)
    return limits.max_stable_step(0, *form) if form else None


def preconditioner(optimizer: Any, parameters: Sequence[nn.Parameter]) -> Preconditioner | None:
    """The preconditioner of torch's Adam, AdamW or RMSprop for all ``parameters``; None before its first
    step.

    Raises:
        InputError: for another optimizer, or parameter groups with different options.
    """
    kind = type(optimizer)
    names = ("betas", "eps", "amsgrad", "centered", "momentum", "maximize")
    groups = optimizer.param_groups if optimizer is not None else [{}]
    values = {name: groups[0][name] for name in names if name in groups[0]}
    form = preconditioned(kind, values)
    if form is None or any(group.get(name) != value for group in groups for name, value in values.items()):
        words = "parameter groups with different options" if form else f"the optimizer '{kind.__name__}'"
        raise InputError(
            f"monitor.instruments: 'preconditioned-lambda-max' is not allowed with {words}, only with Adam, "
            "AdamW or RMSprop of torch.optim with the same options for all parameters"
        )
    states = [optimizer.state.get(p, {}) for p in parameters]
    if not all("step" in state for state in states):
        return None
    flat = {
        key: torch.cat([state[key].detach().flatten() for state in states])[None]
        for key, value in states[0].items()
        if value is not None and key != "step"
    }
    pairs = zip(parameters, states, strict=True)
    updates = torch.cat([torch.full((p.numel(),), float(state["step"])) for p, state in pairs])[None]
    m, momentum_form, factor = form
    place = float64_device(parameters[0].device)
    diagonal = found_preconditioner(kind, values, flat, updates.to(place, torch.float64))[0]
    limit = limits.max_stable_step(0, m, momentum_form) / factor
    return Preconditioner(diagonal, name=kind.__name__, lr=rate(optimizer), limit=limit)


def optimizer_table(optimizer: Any) -> dict[str, Any]:
    """The class of a torch optimizer and its defaults: flags, finite numbers, text and lists, as TOML has."""
    table: dict[str, Any] = {"name": type(optimizer).__name__}
    for key, value in getattr(optimizer, "defaults", {}).items():
        value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        each = value if isinstance(value, (list, tuple)) else [value]
        writable = all(
            isinstance(v, bool | int | str) or (isinstance(v, float) and math.isfinite(v)) for v in each
        )
        if writable and re.fullmatch(r"[\w-]+", key):
            table[key] = value
    return table


def read_settings(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The tables of its settings that a recorded checkpoint holds."""
    return {name: table for name, table in checkpoint.settings.items() if isinstance(table, dict)}


def has_group() -> bool:
    """Say whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_size(what: str = "Recorder", why: str = "so that one rank alone records") -> tuple[int, int]:
    """(rank, processes) of this process. InputError where there are several that know no group yet."""
    if has_group():
        return dist.get_rank(), dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise InputError(
            f"{what}: WORLD_SIZE is {size}, but torch.distributed knows no group yet; call "
            f"init_process_group first, {why}"
        )
    return 0, 1

"""A learner of the user's own loop: its parameters as one tensor, its processes, its optimizer's state."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import storable
from landscape.core.errors import FailedError, InputError
from landscape.problem.layout import Layout
from landscape.train.processes.board import first_line
from landscape.train.processes.process_group import Lost

REMEDY = "make the change first, then a new optimizer and a new DecentralizedDataParallel"


def check_module(model: Any) -> None:
    """InputError unless ``model`` is a module with all of its parameters here."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: a {type(model).__name__} is not allowed, it must be a torch.nn.Module")
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise InputError("model: FSDP cuts its parameters into shards, they are needed whole (DDP)")
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise _refusal(name, "has no shape yet", "run one batch through the model first")
        if hasattr(p, "placements"):
            raise _refusal(name, "is cut into shards (DTensor)", "it is needed whole (DDP)")


class FlatParameters:
    """The trainable parameters of ``module`` as views of ``flat`` (1, P), in the order of ``layout``.

    The Parameter objects stay the same, so that the optimizer's are these; only their memory is replaced. A
    tied parameter is there once.

    Args:
        module: the user's.
        optimizer: its optimizer, which must have all trainable parameters and no others.

    Raises:
        InputError: for parameters that cannot lie in one piece of memory, or are not the optimizer's.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        named = {plain(name): p for name, p in module.named_parameters()}
        self._check_parameters(named)
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self._check_optimizer(named, trained)
        slots = Layout.of(module).slots
        self.layout = Layout(tuple(dataclasses.replace(slot, name=plain(slot.name)) for slot in slots))
        self.names, self.parameters = [*trained], [*trained.values()]
        first = self.parameters[0]
        self.device = first.device
        self.flat = torch.empty(1, self.layout.size, dtype=first.dtype, device=first.device)
        self.views = [*self.layout.views(self.flat[0]).values()]
        self._known = named
        self._groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
        for p, view in zip(self.parameters, self.views, strict=True):
            view.copy_(p.detach())
            p.data = view
        self._look()

    def _look(self) -> None:
        """Remember the module's parts, to see a change at little cost."""
        parts = [part for m in self.module.modules() for part in (m._modules, m._parameters)]
        self._tree = [(part, [*map(id, part.values())]) for part in parts]
        self._frozen = {name: p for name, p in self._known.items() if name not in self.names}

    def _check_parameters(self, named: dict[str, nn.Parameter]) -> None:
        first: tuple[str, nn.Parameter] | None = None
        memory: dict[int, str] = {}
        for name, p in named.items():
            if not p.requires_grad:
                continue
            first = first or (name, p)
            if p.device.type == "meta" or not p.is_floating_point():
                raise _refusal(name, f"is {_kind(p)}", "parameters are real numbers with values")
            if _kind(p) != _kind(first[1]):
                reason = f"is {_kind(p)}, '{first[0]}' is {_kind(first[1])}"
                raise _refusal(name, reason, "all trainable parameters must be alike; use autocast")
            if p.numel() and (other := memory.setdefault(p.data_ptr(), name)) != name:
                reason = f"shares the memory of '{other}'"
                raise _refusal(name, reason, "tied weights must be one Parameter under both names")
        if first is None:
            raise InputError("model: it has no trainable parameter")

    def _check_optimizer(self, named: dict[str, nn.Parameter], trained: dict[str, nn.Parameter]) -> None:
        given = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        foreign = [p for key, p in given.items() if key not in {id(p) for p in named.values()}]
        if foreign:
            raise InputError(
                f"optimizer: its parameter of shape {tuple(foreign[0].shape)} is not the model's; give the "
                "optimizer of model.parameters(), made after the last change of the model"
            )
        for name, p in trained.items():
            if id(p) not in given:
                raise InputError(f"optimizer: parameter '{name}' is not in it; add it, or freeze it")

    def check(self) -> None:
        """Raise InputError where the parameters are no longer those that were wrapped."""
        if not all([*map(id, part.values())] == ids for part, ids in self._tree):
            self._check_names()
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise _refusal(name, "was frozen, now it is trained")
        groups = (id(p) for group in self.optimizer.param_groups for p in group["params"])
        if [*groups] != self._groups:
            raise InputError(f"optimizer: its parameters have changed; {REMEDY}")
        self.check_memory()

    def check_memory(self) -> None:
        """Raise InputError where parameters have another shape, precision or device.

        New memory of the same kind, as ``p.data = …`` gives, is copied and given up.
        """
        for name, p, view in zip(self.names, self.parameters, self.views, strict=True):
            if p.data_ptr() == view.data_ptr() and p.shape == view.shape:  # as almost always
                continue
            if p.shape != view.shape:
                raise _refusal(name, f"had shape {tuple(view.shape)}, now {tuple(p.shape)}")
            if p.dtype != view.dtype or p.device != view.device:
                raise _refusal(name, f"was {_kind(view)}, now {_kind(p)}")
            view.copy_(p.detach().clone())
            p.data = view

    def _check_names(self) -> None:
        """Raise InputError unless the trained parameters are still the same; others may come and go."""
        now = {plain(name): p for name, p in self.module.named_parameters()}
        for name, p in {**self._known, **now}.items():
            trained = name in self.names or p.requires_grad
            if trained and now.get(name) is not self._known.get(name):
                change = "added" if name not in self._known else "replaced" if name in now else "removed"
                raise _refusal(name, f"was {change}")
        self._known = now
        self._look()

    def rest(self) -> dict[str, Tensor]:
        """Name -> frozen parameters and buffers that the module's state_dict has, as they are."""
        saved = {plain(name) for name in self.module.state_dict()} - {*self.names}
        everything = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {plain(name): t.detach() for name, t in everything.items() if plain(name) in saved}


def plain(name: str) -> str:
    """The name of a parameter in the module that torch.compile wrapped."""
    return name.replace("_orig_mod.", "")


def _kind(p: Tensor) -> str:
    return f"{str(p.dtype).removeprefix('torch.')} on {p.device}"


def _refusal(name: str, change: str, remedy: str = REMEDY) -> InputError:
    return InputError(f"model: parameter '{name}' {change}; {remedy}")


class DefaultGroup:
    """This process in the default process group; alone where there is none.

    Args:
        rank, size: its number, and that of all processes.
        device: that of the exchanged tensors.

    Raises:
        InputError: where the group cannot exchange tensors of that device.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.device, self.step = device, 0
        backends = str(dist.get_backend_config()) if size > 1 else ""
        if device.type == "cuda" and "nccl" not in backends and size > 1:
            raise InputError(
                f"model: it is on {device}, the process group exchanges by {backends}; call "
                "init_process_group('nccl'), or leave the model on the CPU"
            )

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn torch's errors in the exchanges inside into one line."""
        try:
            yield
        except RuntimeError as error:
            words = first_line(error).split(". ")[0]
            raise Lost(
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

    def texts(self, mine: str) -> list[str]:
        """The text that each rank gives, in the order of the ranks; they travel as bytes."""
        if self.size == 1:
            return [mine]
        raw = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([len(raw)], device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        with self.naming():
            dist.all_gather(lengths, length)
            longest = max(1, *(int(n) for n in lengths))
            padded = raw.new_zeros(longest)
            padded[: len(raw)] = raw
            gathered = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(gathered, padded)
        pairs = zip(gathered, lengths, strict=True)
        return [bytes(text[: int(n)].tolist()).decode() for text, n in pairs]

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raise InputError on every rank, with the first difference, unless ``facts`` are equal on all."""
        first, *others = [json.loads(text) for text in self.texts(json.dumps(dict(facts)))]
        for rank, theirs in enumerate(others, 1):
            for name in {**first, **theirs}:
                a, b = first.get(name, "missing"), theirs.get(name, "missing")
                if a != b:
                    raise InputError(f"{name}: {b} on rank {rank}, but {a} on rank 0; all must be the same")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails inside fails on every rank: with its own error, or with a line that names the rank."""
        error: InputError | None = None
        try:
            yield
        except Lost:
            raise
        except InputError as raised:
            error = raised
        found = self.texts("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(found):
            if text:
                raise Lost(f"rank {rank}: {text}")


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
        return [(p, state.get(p, {})) for p in self._parameters.parameters]

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

        def counts(t: Tensor) -> bool:
            return t.dim() == 0 or not t.is_floating_point()

        return frozenset(key for key, parts in self._parts().items() if any(map(counts, parts)))

    @property
    def state(self) -> dict[str, Tensor]:
        parts = self._parts()
        if self._group.size > 1:
            shapes = [(name, key, tuple(v.shape)) for name, key, v in self._named()]
            digest = hashlib.sha256(repr(shapes).encode()).hexdigest()
            if len(set(self._group.texts(digest))) > 1:
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
        """The state is again that which the optimizer had when it was wrapped: none, for most."""
        for p, _ in self._states():
            self._parameters.optimizer.state.pop(p, None)
            if p in self._first:
                self._parameters.optimizer.state[p] = copy.deepcopy(self._first[p])

    # Checkpoints.

    def _named(self) -> list[tuple[str, str, Tensor]]:
        """(parameter, name, tensor) of all tensors. FailedError for a state that is none."""
        found = []
        for name, (_, state) in zip(self._parameters.names, self._states(), strict=True):
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    found.append((name, key, value.detach()))
                elif value is not None:
                    kind = type(value).__name__
                    raise FailedError(f"optimizer: its state '{key}' is a {kind}, not a tensor")
        return found

    def rows(self) -> dict[str, Tensor]:
        """For a checkpoint: "PARAMETER.NAME" -> (1, …), the same names and shapes on all ranks."""
        mine = {f"{name}.{key}": storable(value) for name, key, value in self._named()}
        facts = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in mine.items()}
        union: dict[str, Any] = {}
        for text in self._group.texts(json.dumps(facts)):
            union |= json.loads(text)
        device = self._parameters.device
        rows = {
            name: mine[name].to(device)[None].clone()
            if name in mine
            else torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in sorted(union.items())
        }
        has = [bool(state) for _, state in self._states()]
        return rows | {PRESENT: torch.tensor([has], dtype=torch.uint8, device=device)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what :meth:`rows` gave, of this learner; the learning rates stay as they are.

        Raises:
            FailedError: where it does not fit the optimizer.
        """
        optimizer, names = self._parameters.optimizer, self._parameters.names
        if PRESENT not in state or state[PRESENT].shape[1:] != (len(names),):
            raise FailedError("checkpoint: its /optimizer does not fit the model's parameters")
        found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for full, rows in state.items():
            name, _, key = full.rpartition(".")
            if name in found:
                found[name][key] = rows[0].clone()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        present = state[PRESENT][0].tolist()
        for name, p, has in zip(names, self._parameters.parameters, present, strict=True):
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

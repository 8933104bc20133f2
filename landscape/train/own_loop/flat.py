"""DUMMY"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.problem.layout import Layout
from landscape.train.processes.process_group import Lost, first_line

REMEDY = "make the change first, then a new optimizer and a new DecentralizedDataParallel"


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
        self.layout = plain_layout(module)
        self.names, self.parameters = [*trained], [*trained.values()]
        first = self.parameters[0]
        self.flat = torch.empty(1, self.layout.size, dtype=first.dtype, device=first.device)
        self.views = [*self.layout.views(self.flat[0]).values()]
        self._known = named
        self._groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
        self._memory = [(view.data_ptr(), view.shape) for view in self.views]
        for p, view in zip(self.parameters, self.views, strict=True):
            view.copy_(p.detach())
            p.data = view
        self._look()

    def _look(self) -> None:
        """Remember the module's parts, to see a change at little cost."""
        parts = [part for m in self.module.modules() for part in (m._modules, m._parameters)]
        self._tree = [(part, [*map(id, part.values())]) for part in parts]
        self._frozen = {name: p for name, p in self._known.items() if name not in self.names}

    @property
    def device(self) -> torch.device:
        return self.flat.device

    def _check_parameters(self, named: dict[str, nn.Parameter]) -> None:
        first: tuple[str, nn.Parameter] | None = None
        memory: dict[int, str] = {}
        for name, p in named.items():
            if nn.parameter.is_lazy(p):
                raise _refusal(name, "has no shape yet", "run one batch through the model first")
            if hasattr(p, "placements"):
                raise _refusal(name, "is cut into shards (DTensor)", "each learner holds the whole model")
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
                raise InputError(
                    f"optimizer: the model's parameter '{name}' is not in it; add it, or freeze it by "
                    "requires_grad_(False)"
                )

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
        for p, (pointer, shape) in zip(self.parameters, self._memory, strict=True):
            if p.data_ptr() != pointer or p.shape != shape:
                break
        else:
            return
        for name, p, view in zip(self.names, self.parameters, self.views, strict=True):
            if p.shape != view.shape:
                raise _refusal(name, f"had shape {tuple(view.shape)}, now {tuple(p.shape)}")
            if p.dtype != view.dtype or p.device != view.device:
                raise _refusal(name, f"was {_kind(view)}, now {_kind(p)}")
            if p.data_ptr() != view.data_ptr():
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

    def statistics(self) -> list[Tensor]:
        """The floating-point buffers, such as the running statistics of BatchNorm."""
        return [b for b in self.module.buffers() if b.is_floating_point()]


def plain(name: str) -> str:
    """The name of a parameter in the module that torch.compile wrapped."""
    return name.replace("_orig_mod.", "")


def plain_layout(module: nn.Module) -> Layout:
    """The layout of ``module`` with plain names."""
    slots = Layout.of(module).slots
    return Layout(tuple(dataclasses.replace(slot, name=plain(slot.name)) for slot in slots))


def _kind(p: Tensor) -> str:
    return f"{str(p.dtype).removeprefix('torch.')} on {p.device}"


def _refusal(name: str, change: str, remedy: str = REMEDY) -> InputError:
    return InputError(f"model: parameter '{name}' {change}; {remedy}")


def has_group() -> bool:
    """Whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


class DefaultGroup:
    """This process in the default process group.

    Args:
        device: that of the exchanged tensors.

    Raises:
        InputError: where the group cannot exchange tensors of that device.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self.step = device, 0
        backends = str(dist.get_backend_config())
        if device.type == "cuda" and "nccl" not in backends and self.size > 1:
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

    def check(self, error: InputError | None) -> None:
        """Raise on every rank if one of them gives an ``error``: its own, or a line that names the rank."""
        found = self.texts("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(found):
            if text:
                raise Lost(f"rank {rank}: {text}")

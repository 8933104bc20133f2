"""The part of a sharded model that one rank holds, and blocks in which it has other weights."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.problem.layout import Slot

# Errors of torch.distributed about other ranks are RuntimeErrors, told from the model's own by their texts.
_LOST = re.compile(r"connection|socket|\bpeer|timed? ?out|remote|aborted", re.IGNORECASE)


def is_sharded(model: nn.Module) -> bool:
    """Test whether parameters of ``model`` are DTensors, as those of FSDP2 and tensor parallelism are.

    InputError for FSDP1, whose parameters are parts of one vector.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise InputError("model: FullyShardedDataParallel is not allowed, use fully_shard of FSDP2")
    # After a forward pass, FSDP2's parameters may be whole for a while. A module of Lightning's has the
    # attribute device_mesh, too, whatever its parameters are.
    split = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    return split or any(hasattr(module, "reshard") for module in model.modules())


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, or a tensor that each rank has; it shares its memory."""
    found: Tensor = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def whole(tensor: Any) -> Tensor:
    """A DTensor, gathered from all ranks, or a tensor that each rank has."""
    found: Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


@dataclass(frozen=True)
class Piece:
    """A trainable parameter, whose numbers on this rank are on 1/``share`` ranks."""

    slot: Slot
    parameter: nn.Parameter
    share: float

    @classmethod
    def of(cls, slot: Slot, parameter: nn.Parameter) -> Piece:
        """The piece of the parameter of a slot."""
        given: Any = parameter
        kinds = getattr(given, "placements", ())
        if any(kind.is_partial() for kind in kinds):
            raise InputError(f"model: {slot.name} is a sum over ranks, it must be in shards or copies")
        shards = math.prod(
            given.device_mesh.size(i) for i, kind in enumerate(kinds) if not kind.is_replicate()
        )
        return cls(slot, parameter, shards / dist.get_world_size())

    @property
    def local(self) -> Tensor:
        """The numbers on this rank, in the parameter's memory."""
        return local_part(self.parameter)

    def gradient(self) -> Tensor:
        """The gradient of these numbers that a backward pass left: zero where it left none."""
        found: Any = self.parameter.grad
        if found is None:
            return torch.zeros_like(self.local)
        like: Any = self.parameter
        if hasattr(found, "placements") and found.placements != like.placements:
            found = found.redistribute(placements=like.placements)
        return local_part(found)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's numbers of a tensor like the parameter, which all ranks have."""
        like: Any = self.parameter
        if not hasattr(like, "placements"):
            return whole
        from torch.distributed.tensor import DTensor, Replicate  # takes a second, and is there already

        copies = DTensor.from_local(
            whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
        )
        return copies.redistribute(placements=like.placements).to_local()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def all_ranks() -> Iterator[None]:
    """Raise OperationError, in one line, for an error in the block that says that another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LandscapeError) or not _LOST.search(f"{type(error).__name__} {error}"):
            raise
        words = " ".join(str(error).split())[:160]
        raise OperationError(
            f"rank {dist.get_rank()}: another rank is lost, or did not answer in time ({words})"
        ) from error

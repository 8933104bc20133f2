"""The part of a sharded model that one rank holds, and blocks in which it has other weights."""

from __future__ import annotations

import contextlib
import io
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.problem.layout import Slot

T = TypeVar("T")

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


class LostError(OperationError):
    """Another rank is lost, or did not answer in time."""


class SharedError(InputError):
    """An error of one rank, which all of them raise."""


@contextlib.contextmanager
def all_ranks() -> Iterator[None]:
    """Raise LostError, in one line, for an error in the block that says that another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LandscapeError) or not _LOST.search(f"{type(error).__name__} {error}"):
            raise
        words = " ".join(str(error).split())[:160]
        raise LostError(
            f"rank {dist.get_rank()}: another rank is lost, or did not answer in time ({words})"
        ) from error


class Exchanges:
    """The numbers, objects and errors that all ranks of torch.distributed tell each other."""

    ranks: int
    device: torch.device

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of what each of them has.

        Args:
            values: of one shape on all ranks.

        Returns:
            The sum, the same on all ranks.

        Raises:
            OperationError: another rank is lost, or did not answer in time.

        Example:
            >>> float(problem.total(gradient @ gradient))  # doctest: +SKIP
            0.25
        """
        found = values.detach().to(self.device, copy=True).contiguous()
        with all_ranks():
            dist.all_reduce(found)
        return found.to(values.device)

    def gathered(self, values: Tensor) -> Tensor:
        """The values of each rank.

        Args:
            values: of one shape on all ranks.

        Returns:
            (ranks, ...), the same on all ranks.

        Example:
            >>> float(problem.gathered(torch.tensor(seconds)).max())  # doctest: +SKIP
            0.25
        """
        each = values.new_zeros(self.ranks, *values.shape)
        each[dist.get_rank()] = values
        return self.total(each)

    def _each(self, *values: float) -> Tensor:
        """Numbers of each rank, (ranks, ...)."""
        return self.gathered(torch.tensor(values, dtype=torch.float64)).squeeze(1)

    def _mean(self, value: float) -> float:
        """The mean of a number over the ranks."""
        return float(self._each(value).mean())

    def _on_all(self, function: Callable[[], T]) -> T:
        """``function()``; an error in it on one rank is raised on all of them, in one line."""
        result, error = None, None
        try:
            result = function()
        except (SharedError, LostError):
            raise
        except Exception as failure:  # the user's data, model and loss raise any kind of error
            error = failure
        self._share(error)
        return cast(T, result)

    def _share(self, error: Exception | None = None) -> None:
        """Raise the first rank's ``error`` on all ranks, in one line, if any has one."""
        if not bool(self._each(error is not None).any()):
            return
        own = "" if isinstance(error, LandscapeError) else f"model, loss or data: {type(error).__name__}: "
        texts = self._gathered_objects("" if error is None else " ".join(f"{own}{error}".split()))
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise SharedError(f"{text} (rank {rank})") from error

    def _pass_on_all(self, function: Callable[[], T]) -> T:
        """``function()``, a pass of the model, as :meth:`_on_all`.

        An error may end it on one rank while the others wait for that rank's part of the next block of FSDP2,
        so that before each of these the ranks tell each other of errors.
        """

        def share(module: nn.Module, inputs: Any) -> None:
            if hasattr(module, "reshard"):
                self._share()

        hook = nn.modules.module.register_module_forward_pre_hook(share)
        try:
            return self._on_all(function)
        finally:
            hook.remove()

    def _gathered_objects(self, value: Any) -> list[Any]:
        """``value`` of each rank: tensors, numbers and texts in tuples, lists and dicts, never code."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        own = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        sizes = [int(size) for size in self._each(len(own))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.zeros_like(padded, device=self.device) for _ in sizes]
        with all_ranks():
            dist.all_gather(parts, padded.to(self.device))
        texts = [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
        return [torch.load(io.BytesIO(text), map_location="cpu", weights_only=True) for text in texts]

"""The default process group of torch.distributed, which the user started, as the exchanges need it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.errors import InputError
from landscape.train.distributed.process_group import Lost, first_line


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

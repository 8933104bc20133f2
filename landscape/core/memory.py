"""How much memory is held, and how much of a bound on it is left."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from landscape.core.errors import InputError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Kept free for what libraries load and keep when they are first used: code, thread stacks, scratch space.
# Seen on a CPU with small networks: up to 21 MiB (ours).
RESERVE = 32 * 2**20


def parse_size(where: str, text: str) -> int:
    """Bytes from "2.5GiB", "800 MB" or "1000000". Raises InputError naming ``where``."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Z]*)", text.strip().upper())
    if not match or match[2] not in UNITS or float(match[1]) <= 0:
        raise InputError(
            f"{where}: '{text}' is not allowed, it must be a number > 0 of bytes, or of KB, MB, GB, KiB, MiB "
            "or GiB, such as 2.5GiB"
        )
    return int(float(match[1]) * UNITS[match[2]])


def held(device: torch.device) -> int:
    """Bytes held now: on CUDA by PyTorch on that device, else resident in memory by this process.

    Where the system does not tell (only Linux does), the most that was ever resident.
    """
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    try:
        import resource
    except ImportError as error:
        raise InputError("max_memory: this system does not say how much memory a process holds") from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Room:
    """What is left of ``limit`` bytes (None: no bound) beside the ``held`` ones, a reserve included."""

    limit: int | None
    held: int = 0

    @classmethod
    def under(cls, limit: int | None, device: torch.device) -> Room:
        """The room that is left on ``device`` now."""
        return cls(limit, 0 if limit is None else held(device) + RESERVE)

    @property
    def left(self) -> float:
        """Bytes; infinite without a bound."""
        return math.inf if self.limit is None else self.limit - self.held

    def need(self, size: float) -> None:
        """Raise InputError, with the least that would do, unless ``size`` bytes are left."""
        if size > self.left:
            assert self.limit is not None
            least, now = (f"{math.ceil(n / 2**20)}MiB" for n in (self.held + size, self.held))
            raise InputError(
                f"max_memory: {self.limit / 2**20:.6g}MiB is not enough, at least {least} is needed ({now} "
                "before the grid starts: program, weights, directions, data)"
            )


def fits(size: int, device: torch.device) -> bool:
    """Whether ``size`` bytes of data may lie on ``device``: half of a GPU's free memory at most (ours, to
    leave room for weights and activations); on the CPU the data is where it was."""
    return device.type != "cuda" or size <= torch.cuda.mem_get_info(device)[0] // 2


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward passes recorded inside the block.

    Tensors that share memory with ``besides`` (the parameters, which are there anyway) do not count.
    """

    def __init__(self, besides: Iterable[Tensor] = ()) -> None:
        self.bytes_ = 0
        seen = {tensor.data_ptr() for tensor in besides}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self.bytes_ += tensor.nbytes  # not its storage's: a chunk is a view of the whole data
            return tensor.detach()  # a node that kept its own output would never be freed

        super().__init__(pack, lambda tensor: tensor)

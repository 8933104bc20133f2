"""Memory: how much is in use, and how much of a limit remains."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.errors import InputError
from landscape.core.options import positive

T = TypeVar("T")

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Reserve for the code, thread stacks and buffers that libraries load when they are first used: up to 21 MiB
# were measured on a CPU with small networks (ours).
RESERVE = 32 * 2**20

# The limit of a process's control group and what it uses, in versions 2 and 1 (a container's memory).
CGROUPS = [
    (Path("/sys/fs/cgroup", *limit), Path("/sys/fs/cgroup", *used))
    for limit, used in (
        (("memory.max",), ("memory.current",)),
        (("memory", "memory.limit_in_bytes"), ("memory", "memory.usage_in_bytes")),
    )
]


def parse_size(where: str, text: str) -> int:
    """The number of bytes that a text such as "2.5GiB", "800 MB" or "1000000" stands for.

    Args:
        where: the option that the text was given with, for the message.

    Raises:
        InputError: the text is no positive number with a unit of memory.

    Example:
        >>> parse_size("--max-memory", "2 KiB")
        2048
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Z]*)", text.strip().upper())
    if not match or match[2] not in UNITS or float(match[1]) <= 0:
        raise InputError(
            f"{where}: '{text}' is not allowed, it must be a number > 0 of bytes, or of KB, MB, GB, KiB, MiB "
            "or GiB, such as 2.5GiB"
        )
    return int(float(match[1]) * UNITS[match[2]])


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: on CUDA what PyTorch reserves on the device, else the resident memory of the process.

    On systems other than Linux, where the present resident memory is not known, its largest value so far.

    Raises:
        InputError: the system does not tell how much memory a process uses.

    Example:
        >>> memory_in_use(torch.device("cpu")) > 1_000_000
        True
    """
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    if (peak := peak_memory()) is None:
        raise InputError("max_memory: this system does not say how much memory a process uses")
    return peak


def peak_memory() -> int | None:
    """The largest resident memory of the process so far in bytes; None where the system does not say it.

    Example:
        >>> (peak_memory() or 2_000_000) > 1_000_000
        True
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that may still be used: ``limit`` bytes (None: no limit) minus ``used`` bytes.

    Example:
        >>> budget = MemoryBudget(limit=1000, used=400)
        >>> budget.remaining
        600
        >>> budget.require(600)
    """

    limit: int | None
    used: int = 0

    @classmethod
    def on(cls, device: torch.device, limit: int | None) -> MemoryBudget:
        """The budget on ``device`` now; a reserve for libraries counts as used.

        Args:
            limit: bytes that the process may use on the device; None: no limit.
        """
        if limit is not None:
            positive("max_memory", limit)
        return cls(limit, 0 if limit is None else memory_in_use(device) + RESERVE)

    @property
    def remaining(self) -> float:
        """Bytes; infinite without a limit."""
        return math.inf if self.limit is None else self.limit - self.used

    def require(self, size: float) -> None:
        """Check that ``size`` bytes remain.

        Raises:
            InputError: fewer bytes remain; the message names the smallest limit that is enough.
        """
        if size > self.remaining:
            assert self.limit is not None
            least, now = (f"{math.ceil(n / 2**20)}MiB" for n in (self.used + size, self.used))
            raise InputError(
                f"max_memory: {self.limit / 2**20:.6g}MiB is not enough, at least {least} is needed ({now} "
                "before the grid starts: program, weights, directions, data)"
            )


def fits(size: int, device: torch.device) -> bool:
    """Whether ``size`` bytes of data may be placed on ``device``.

    On a GPU, data may take half of the free memory (ours: weights and activations need memory, too). On the
    CPU they are in memory already.

    Example:
        >>> fits(1 << 40, torch.device("cpu"))
        True
    """
    return device.type != "cuda" or size <= torch.cuda.mem_get_info(device)[0] // 2


def available_memory(device: torch.device) -> int:
    """Bytes that a process may still take on ``device``, by the system and by its control group.

    Example:
        >>> available_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [sys.maxsize]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free.append(int(found[1]) * 1024)
    for limit, used in CGROUPS:
        if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
            free.append(max(0, int(text) - int(used.read_text())))
    return min(free)


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves for backward passes, but for those of ``excluding``."""

    def __init__(self, excluding: Iterable[Tensor]) -> None:
        self.bytes_ = 0
        seen = {tensor.data_ptr() for tensor in excluding}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self.bytes_ += tensor.nbytes  # of the tensor alone: its storage may be that of the whole data
            return tensor.detach()  # a node that kept its own output would never be freed

        super().__init__(pack, lambda tensor: tensor)


class _MadeBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all results: at least those that are saved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_ = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        made = results if isinstance(results, (tuple, list)) else (results,)
        self.bytes_ += sum(tensor.nbytes for tensor in made if isinstance(tensor, Tensor))
        return results


def with_saved_bytes(function: Callable[[], T], excluding: Iterable[Tensor] = ()) -> tuple[T, int]:
    """Call ``function``, and count the bytes that autograd saves for backward passes.

    The hooks that count them do not go with ``torch.func`` inside a model: the bytes of all results are
    counted then, which are more.

    Args:
        excluding: tensors, such as the parameters, whose memory is not counted.

    Returns:
        What the function returns, and the bytes.

    Example:
        >>> weights = torch.ones(4, requires_grad=True)
        >>> with_saved_bytes(lambda: (weights * weights).sum())[1]
        16
    """
    saved = _SavedBytes(excluding)
    try:
        with saved:
            return function(), saved.bytes_
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    made = _MadeBytes()
    with made:
        return function(), made.bytes_

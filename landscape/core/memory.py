"""Memory: how much is in use, and how much of a limit remains."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.errors import InputError
from landscape.core.options import positive

T = TypeVar("T")

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Reserve for the code, thread stacks and buffers that libraries load when they are first used: up to 21 MiB
# were measured on a CPU with small networks (our choice).
RESERVE = 32 * 2**20

# Where control groups (a container's, a service's) have their limit, their use, and what of it is cache that
# the system takes back: versions 2 and 1.
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}

_LIMIT: ContextVar[int | None] = ContextVar("limit", default=None)
# The share of the free memory, beyond what a call needs, that it takes to be faster (our choice: others run
# beside it); all of it below a limit of the user's.
SHARE = 0.5
# Bytes beyond which a call first returns what was freed before (our choice).
LARGE = 2**30


class MemoryAllowance(NamedTuple):
    """Bytes that a bounded call may take for graphs that it keeps, and for others, besides the ``fixed``."""

    graphs: float = math.inf
    extra: float = 0.0
    fixed: float = 0.0


# That of the bounded call that is under way; None: none is.
_ALLOWANCE: ContextVar[MemoryAllowance | None] = ContextVar("room", default=None)


def quantity(where: str, text: str, units: Mapping[str, float]) -> float:
    """The value of a number with a unit, such as "90min" or "6 h".

    Args:
        where: the option that the text was given with, for the message.
        units: the factor of each unit. Upper and lower case are the same.

    Raises:
        InputError: no finite number > 0, or no known unit.

    Example:
        >>> quantity("--budget", "1.5 h", {"s": 1.0, "h": 3600.0})
        5400.0
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+))?\s*(\D.*)?", text.strip())
    value = float(f"{match[1]}e{match[2] or 0}") if match else -1.0
    factor = {unit.lower(): of for unit, of in units.items()}.get((match[3] or "").lower()) if match else None
    if not factor or not 0 < value < float("inf"):
        allowed = f"it must be a number > 0 with its unit ({', '.join(filter(None, units))})"
        raise InputError(f"{where}: '{text}' is not allowed, {allowed}")
    return value * factor


def parse_size(where: str, text: str) -> int:
    """The number of bytes that a text such as "2.5GiB", "800 MB" or "1000000" stands for.

    Args:
        where: the parameter that the text was given for, for the message.

    Raises:
        InputError: the text is no positive number with a unit of memory.

    Example:
        >>> parse_size("max_memory", "2 KiB")
        2048
    """
    return int(quantity(where, text, UNITS))


def in_words(size: float) -> str:
    """A number of bytes in the largest unit of which it is at least one.

    Example:
        >>> in_words(1), in_words(1.5 * 2**30)
        ('1 B', '1.5 GiB')
    """
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit]), "B")
    return f"{size / UNITS[unit]:,.4g} {unit}"


def _of_module(device: torch.device, name: str) -> Any:
    """A function of torch.cuda or its like on a device's own memory; None where that is the CPU's."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: what PyTorch reserves on a device with own memory, else the process's resident memory.

    On systems other than Linux, where the present resident memory is not known, its largest value so far.

    Raises:
        InputError: the system does not tell how much memory a process uses.

    Example:
        >>> memory_in_use(torch.device("cpu")) > 1_000_000
        True
    """
    if reserved := _of_module(device, "memory_reserved"):
        return reserved(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    if (peak := peak_memory()) is None:
        raise InputError("max_memory: this system does not say how much memory a process uses; leave it out")
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
            needed, used = (f"{math.ceil(n / 2**20)} MiB" for n in (self.used + size, self.used))
            limit = in_words(self.limit)
            raise InputError(f"max_memory: {limit} is not enough, at least {needed} is needed ({used} now)")


def fits(size: int, device: torch.device) -> bool:
    """Return whether ``size`` bytes of data may be placed on ``device``.

    On a GPU, data may take half of the free memory (our choice: weights and activations need memory, too). On
    the CPU they are in memory already.

    Example:
        >>> fits(1 << 40, torch.device("cpu"))
        True
    """
    free_and_total = _of_module(device, "mem_get_info")
    return not free_and_total or size <= free_and_total(device)[0] // 2


def available_memory(device: torch.device) -> int:
    """Bytes that a process may still take on ``device``, by the system and by its control group.

    Example:
        >>> available_memory(torch.device("cpu")) > 0
        True
    """
    if free_and_total := _of_module(device, "mem_get_info"):
        return free_and_total(device)[0]
    free = [sys.maxsize]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (match := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free.append(int(match[1]) * 1024)
    return min([*free, *_free_in_groups(Path("/proc/self/cgroup"))])


def _free_in_groups(membership: Path) -> Iterator[int]:
    """Bytes left in the process's control group and in those around it, as far as they have a limit."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        for controller in CGROUP_FILES.keys() & set(controllers.split(",")):
            root, limit, used, cached = CGROUP_FILES[controller]
            for folder in (Path(path), *Path(path).parents):
                group = CGROUPS / root / folder.relative_to("/")
                if (group / limit).exists() and (text := (group / limit).read_text().strip()).isdigit():
                    match = re.search(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                    cache = int(match[1]) if match else 0
                    yield max(0, int(text) - int((group / used).read_text()) + cache)


class _MadeBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all results: at least those that are saved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_ = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = results if isinstance(results, (tuple, list)) else (results,)
        self.bytes_ += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
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
    seen, size = {tensor.data_ptr() for tensor in excluding}, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal size
        if tensor.layout is torch.strided and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            size += tensor.nbytes  # of the tensor alone: its storage may be that of the whole data
        return tensor.detach()  # a node that kept its own output would never be freed

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return function(), size
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    counter = _MadeBytes()
    with counter:
        return function(), counter.bytes_


@dataclass(frozen=True)
class Need:
    """Bytes that a call takes on ``device`` besides what is in use.

    ``fixed``: at least; ``spare``: what it keeps where there is room, and computes again where there is not.
    """

    device: torch.device
    fixed: float
    spare: float = 0.0


@contextlib.contextmanager
def at_most(limit: int | None) -> Iterator[None]:
    """Inside the block the process may take ``limit`` bytes; None: as before."""
    token = _LIMIT.set(_LIMIT.get() if limit is None else limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def limit() -> int | None:
    """The bytes that the process may take, by the innermost :func:`at_most`; None: no limit."""
    return _LIMIT.get()


def spare() -> float:
    """The bytes of graphs that the call under way may keep; infinite outside of any."""
    return (_ALLOWANCE.get() or MemoryAllowance()).graphs


def room() -> float:
    """The bytes that the call under way may take to be faster, as for a larger basis; 0 outside of any."""
    return (_ALLOWANCE.get() or MemoryAllowance()).extra


@contextlib.contextmanager
def admitted(name: str, limit: int | None, need: Callable[[], Need | None]) -> Iterator[None]:
    """Inside the block the call ``name`` is under way, which is refused before where its memory is not there.

    Args:
        name: of the function, for the message.
        limit: bytes that the process may take; None: as before.
        need: gives the need of the call, None where it is not known; not called inside another block, which
            states the need of all, unless there is a limit.
    """
    needed = None if limit is None and _ALLOWANCE.get() is not None else need()
    if needed is None:
        yield
        return
    with at_most(limit):
        token = _ALLOWANCE.set(_admitted(name, needed))
        try:
            yield
        finally:
            _ALLOWANCE.reset(token)


def require_besides(name: str, device: torch.device, size: float) -> None:
    """Check that ``size`` bytes are there, for ``name``, besides those that the call under way needs.

    Raises:
        InputError: they are not there.
    """
    _admitted(name, Need(device, (_ALLOWANCE.get() or MemoryAllowance()).fixed + size))


def _release_freed() -> None:
    """Return to the system what was freed: the C library of Linux keeps blocks of less than 32 MiB."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _admitted(name: str, need: Need) -> MemoryAllowance:
    """The room for graphs, infinite if for all, and for others; InputError without room for the fixed."""
    if need.fixed > LARGE:  # for less, what the library keeps does not matter
        _release_freed()
    budget = MemoryBudget.on(need.device, limit())
    budget.require(need.fixed)
    if need.fixed + need.spare <= RESERVE and budget.limit is None:
        return MemoryAllowance()
    free = available_memory(need.device)
    if need.fixed > free:
        raise InputError(
            f"{name}: it takes about {need.fixed / 2**20:,.0f} MiB of memory, and {free / 2**20:,.0f} MiB "
            "are free; take a smaller grid, fewer points or eigenvalues"
        )
    remaining = min(budget.remaining, free) - need.fixed
    extra = remaining if budget.limit is not None else SHARE * remaining
    graphs = math.inf if need.spare <= remaining else remaining
    return MemoryAllowance(graphs, max(0.0, extra - need.spare), need.fixed)

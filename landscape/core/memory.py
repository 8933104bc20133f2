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

# By controller, for control groups of versions 2 and 1 (of containers and services): the folder in CGROUPS,
# the files of the limit and of the memory in use, and the entry of memory.stat for cache that can be freed.
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}

_LIMIT: ContextVar[int | None] = ContextVar("limit", default=None)
# The share of the free memory, beyond its need, that a call may use to be faster (our choice: other programs
# need memory, too); with a limit of the user's it may use all memory up to the limit.
SHARE = 0.5
# A call that needs more bytes than this first returns freed blocks to the system (our choice).
LARGE = 2**30


class MemoryAllowance(NamedTuple):
    """The bytes that a running call may use.

    Attributes:
        graphs: for graphs of gradients that it keeps for speed.
        extra: for other data that make it faster, such as a larger basis.
        fixed: the bytes that it needs in any case.
    """

    graphs: float = math.inf
    extra: float = 0.0
    fixed: float = 0.0


# The allowance of the running call; None outside of calls with a forecast.
_ALLOWANCE: ContextVar[MemoryAllowance | None] = ContextVar("room", default=None)


def quantity(where: str, text: str, units: Mapping[str, float]) -> float:
    """Return the value of a text with a number and a unit, such as "90min" or "6 h".

    Args:
        where: the option that the text was given with, for the message.
        units: the factor of each unit. Upper and lower case are the same.

    Raises:
        InputError: the text is no finite number > 0 with one of these units.

    Example:
        >>> quantity("--budget", "1.5 h", {"s": 1.0, "h": 3600.0})
        5400.0
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+))?\s*(\D.*)?", text.strip())
    if match:
        number, exponent, unit = match.groups(default="")
        factor = {name.lower(): factor for name, factor in units.items()}.get(unit.lower(), math.nan)
        value = float(f"{number}e{exponent or 0}") * factor
        if 0 < value < math.inf:
            return value
    allowed = f"it must be a number > 0 with its unit ({', '.join(filter(None, units))})"
    raise InputError(f"{where}: '{text}' is not allowed, {allowed}")


def parse_size(where: str, text: str) -> int:
    """Return the number of bytes of a text such as "2.5GiB", "800 MB" or "1000000".

    Args:
        where: the name of the parameter, for the message.

    Raises:
        InputError: the text is no positive number with a unit of memory.

    Example:
        >>> parse_size("max_memory", "2 KiB")
        2048
    """
    return int(quantity(where, text, UNITS))


def in_words(size: float) -> str:
    """Return a number of bytes as text, such as "1.5 GiB"; below 1 KiB, in bytes.

    Example:
        >>> in_words(1), in_words(1.5 * 2**30)
        ('1 B', '1.5 GiB')
    """
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit]), "B")
    return f"{size / UNITS[unit]:,.4g} {unit}"


def _memory_function(device: torch.device, name: str) -> Any:
    """Return a function of torch.cuda, or of another device's module, on its memory; None for the CPU."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that PyTorch reserves on an accelerator; for the CPU, the process's resident memory.

    Systems other than Linux do not report the present resident memory; there it is the largest value so far.

    Raises:
        InputError: the system does not report how much memory a process uses.

    Example:
        >>> memory_in_use(torch.device("cpu")) > 1_000_000
        True
    """
    if reserved := _memory_function(device, "memory_reserved"):
        return reserved(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    if (peak := peak_memory()) is None:
        raise InputError("max_memory: this system does not say how much memory a process uses; leave it out")
    return peak


def peak_memory() -> int | None:
    """Return the largest resident memory of the process so far in bytes; None if the system has no record.

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
        """Return the present budget on ``device``; a reserve for libraries counts as used.

        Args:
            limit: the bytes that the process may use on the device; None: no limit.
        """
        if limit is not None:
            positive("max_memory", limit)
        return cls(limit, 0 if limit is None else memory_in_use(device) + RESERVE)

    @property
    def remaining(self) -> float:
        """The bytes that may still be used; infinite without a limit."""
        return math.inf if self.limit is None else self.limit - self.used

    def require(self, size: float) -> None:
        """Check that ``size`` bytes remain.

        Raises:
            InputError: fewer bytes remain; the message names the smallest limit that is enough.
        """
        if size > self.remaining:
            assert self.limit is not None
            limit, used = in_words(self.limit), f"{math.ceil(self.used / 2**20)} MiB"
            needed = f"{math.ceil((self.used + size) / 2**20)} MiB"
            raise InputError(f"max_memory: {limit} is not enough, at least {needed} is needed ({used} now)")


def fits(size: int, device: torch.device) -> bool:
    """Return whether ``size`` bytes of data may be placed on ``device``.

    On a GPU, data may use half of the free memory (our choice: weights and activations need memory, too). On
    the CPU, data is in memory already.

    Example:
        >>> fits(1 << 40, torch.device("cpu"))
        True
    """
    free_and_total = _memory_function(device, "mem_get_info")
    return not free_and_total or size <= free_and_total(device)[0] // 2


def available_memory(device: torch.device) -> int:
    """Return the bytes that a process may still allocate on ``device``, by the system and its control group.

    Example:
        >>> available_memory(torch.device("cpu")) > 0
        True
    """
    if free_and_total := _memory_function(device, "mem_get_info"):
        return free_and_total(device)[0]
    free = [sys.maxsize]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (match := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free.append(int(match[1]) * 1024)
    return min([*free, *_free_in_groups(Path("/proc/self/cgroup"))])


def _free_in_groups(membership: Path) -> Iterator[int]:
    """Yield the free bytes of the process's control group, and of those around it, for each with a limit."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        for controller in CGROUP_FILES.keys() & set(controllers.split(",")):
            root, limit_file, usage_file, cache_entry = CGROUP_FILES[controller]
            for folder in (Path(path), *Path(path).parents):
                group = CGROUPS / root / folder.relative_to("/")
                limit = (group / limit_file).read_text().strip() if (group / limit_file).exists() else ""
                if limit.isdigit():  # "max" is no limit
                    statistics = (group / "memory.stat").read_text()
                    match = re.search(rf"^{cache_entry} (\d+)$", statistics, re.MULTILINE)
                    cache = int(match[1]) if match else 0
                    yield max(0, int(limit) - int((group / usage_file).read_text()) + cache)


class _ResultBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of PyTorch that counts the bytes of the results of all operations."""

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

    For a model that uses ``torch.func``, saved bytes cannot be counted. The bytes of the results of all
    operations are then counted instead, an upper bound.

    Args:
        function: a function without arguments.
        excluding: tensors, such as the parameters, whose memory is not counted.

    Returns:
        (the function's result, the bytes).

    Example:
        >>> weights = torch.ones(4, requires_grad=True)
        >>> with_saved_bytes(lambda: (weights * weights).sum())[1]
        16
    """
    known_addresses = {tensor.data_ptr() for tensor in excluding}  # excluded, or already counted
    saved_bytes = 0

    def count(tensor: Tensor) -> Tensor:
        """Count the bytes of a tensor that autograd saves, and return the tensor to save."""
        nonlocal saved_bytes
        if tensor.layout is torch.strided and tensor.data_ptr() not in known_addresses:
            known_addresses.add(tensor.data_ptr())
            # Not the bytes of its storage, of which the tensor may be a small part.
            saved_bytes += tensor.nbytes
        # Detached: a node of the graph that refers to its own output would never be freed.
        return tensor.detach()

    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            result = function()
        return result, saved_bytes
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    counter = _ResultBytes()
    with counter:
        result = function()
    return result, counter.bytes_


@dataclass(frozen=True)
class Need:
    """The bytes that a call allocates on ``device`` in addition to those in use.

    Attributes:
        device: the device of the call's tensors.
        fixed: the bytes that it needs in any case.
        spare: the bytes of intermediate results that it keeps if they fit, and computes again if not.
    """

    device: torch.device
    fixed: float
    spare: float = 0.0


@contextlib.contextmanager
def at_most(limit: int | None) -> Iterator[None]:
    """Return a context inside which the process may use ``limit`` bytes; None: the limit outside of it."""
    token = _LIMIT.set(_LIMIT.get() if limit is None else limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def limit() -> int | None:
    """Return the bytes that the process may use, by the innermost :func:`at_most`; None: no limit."""
    return _LIMIT.get()


def spare() -> float:
    """Return the bytes of graphs that the running call may keep; infinite outside of a call."""
    return (_ALLOWANCE.get() or MemoryAllowance()).graphs


def room() -> float:
    """Return the bytes that the running call may use to be faster; 0 outside of a call."""
    return (_ALLOWANCE.get() or MemoryAllowance()).extra


@contextlib.contextmanager
def admitted(name: str, limit: int | None, need: Callable[[], Need | None]) -> Iterator[None]:
    """Return a context for the run of a call, which raises InputError at its start if memory is too small.

    Args:
        name: the name of the function, for the message.
        limit: the bytes that the process may use; None: the limit outside of the context.
        need: returns the need of the call, or None if there is no forecast. Inside another such context,
            which has checked the need of all its calls, it is called only if there is a ``limit``.
    """
    call_need = None if limit is None and _ALLOWANCE.get() is not None else need()
    if call_need is None:
        yield
        return
    with at_most(limit):
        token = _ALLOWANCE.set(_allowance(name, call_need))
        try:
            yield
        finally:
            _ALLOWANCE.reset(token)


def require_besides(name: str, device: torch.device, size: float) -> None:
    """Check that ``size`` bytes are free for ``name``, in addition to the need of the running call.

    Raises:
        InputError: fewer bytes are free.
    """
    _allowance(name, Need(device, (_ALLOWANCE.get() or MemoryAllowance()).fixed + size))


def _allowance(name: str, need: Need) -> MemoryAllowance:
    """Return the allowance of a call with this need; raise InputError if its fixed bytes are not free."""
    if need.fixed > LARGE and sys.platform == "linux":
        # Return freed blocks to the system: the C library of Linux keeps those of less than 32 MiB.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
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
    graphs = math.inf if need.spare <= remaining else remaining  # infinite if all graphs fit
    return MemoryAllowance(graphs, max(0.0, extra - need.spare), need.fixed)

"""Devices of PyTorch: their names, whether they have float64, their random numbers and their queues."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.errors import InputError, first_words
from landscape.core.memory import limit
from landscape.core.options import choose

LOG = logging.getLogger(__name__)
_BUILT_FOR = torch.accelerator.current_accelerator()
#: Names of devices; another accelerator that this PyTorch was built for is the last.
DEVICES: tuple[str, ...] = ("auto", "cpu", "cuda", "xpu", "mps")
if _BUILT_FOR and _BUILT_FOR.type not in DEVICES:
    DEVICES += (_BUILT_FOR.type,)


def check_device(where: str, device: torch.device | str) -> None:
    """Raise InputError for a device that PyTorch does not know or find here.

    Example:
        >>> check_device("device", "cpu")
    """
    try:
        named = torch.device(device)
        torch.empty(0, device=named)
    except (RuntimeError, AssertionError, NotImplementedError):
        present = accelerator()
        allowed = " or ".join(["cpu", *([present.type] if present else [])])
        raise InputError(where, str(device), allowed=f"a device that PyTorch finds here: {allowed}") from None


#: The device of a call; and of a command or a run, whose names are :data:`DEVICES`.
Device = Annotated[torch.device | str, check_device, "a device, such as 'cpu'"]


def accelerator() -> torch.device | None:
    """The kind of accelerator that PyTorch finds here, such as "cuda"; None where there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def check_device_name(where: str, name: str) -> None:
    """Raise InputError for a name of a device that is not one of DEVICES, or not here."""
    choose(where, name, DEVICES)
    present = accelerator()
    if name not in ("auto", "cpu") and (present is None or present.type != name):
        raise InputError(where, name, allowed="auto or cpu, as PyTorch finds none here")


DeviceName = Annotated[str, check_device_name]


def pick_device(name: DeviceName) -> torch.device:
    """The device with a name: "cpu", or the accelerator's, such as "cuda", "xpu" or "mps".

    "auto" is the accelerator where there is one that computes in float64, as the CPU does; else the CPU.

    Raises:
        InputError: for a name that is not known, or an accelerator that is not there.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    check_device_name("device", name)
    if name == "auto":
        present = accelerator()
        return present if present and has_float64(present) else torch.device("cpu")
    return torch.device(name)


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; MPS and some GPUs of Intel do not."""
    try:
        return float(torch.ones(2, dtype=torch.float64, device=device).sum()) == 2
    except (RuntimeError, TypeError):
        return False


def float64_device(device: torch.device) -> torch.device:
    """The device itself if it computes in float64, else the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def widest_dtype(device: torch.device) -> torch.dtype:
    """The precision with the most digits that a device has."""
    return torch.float64 if has_float64(device) else torch.float32


def check_precision(where: str, dtype: torch.dtype) -> None:
    """Raise InputError for a dtype that is not of real floating-point numbers."""
    if not dtype.is_floating_point:
        raise InputError(where, str(dtype), allowed="one of real floating-point numbers")


Dtype = Annotated[torch.dtype, check_precision, "a torch.dtype, such as torch.float64"]


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise InputError for float64 on a device without it."""
    if dtype == torch.float64 and not has_float64(device):
        raise InputError(f"dtype: float64 is not allowed on {device}, which has none; use float32 or cpu")


def check_default_device() -> None:
    """Raise InputError where tensors are made on another device than the CPU, which draws random numbers."""
    if (default := torch.get_default_device()).type != "cpu":
        raise InputError(f"torch.set_default_device: '{default}' is not allowed, it must be cpu")


def double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64: on its device, or on the CPU if the device has no float64.

    Example:
        >>> double(torch.ones(1)).dtype
        torch.float64
    """
    return tensor.to(float64_device(tensor.device)).double()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision in float32, and any other tensor unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# Numbers that are summed in their own precision: of more, PyTorch's norms and MKL's products on the CPU lose
# digits, as they add small terms to few large sums. Of 124 million float32 numbers a norm is 1.3% too small,
# and an inner product 3.6%; in parts of 2^18 both are right to 1.1e-6, in a third more time. The
# learners of a small network are one part.
PART = 2**18
# Elsewhere kernels sum as trees: on an H200 parts of 2^20 are as exact (3e-8), and 15 times as fast.
ELSEWHERE = 2**20


def part_length(device: torch.device) -> int:
    """The count of numbers that are summed at once."""
    return PART if device.type == "cpu" else ELSEWHERE


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of the rows of ``a`` (…, P) and of ``b`` (…, P).

    Example:
        >>> inner(torch.ones(2, 100), torch.ones(100)).tolist()
        [100.0, 100.0]
    """
    length = part_length(a.device)
    if a.shape[-1] <= length:
        return a @ (b.mT if b.dim() > 1 else b)
    parts = torch.split(a, length, -1)
    pairs = zip(parts, parts if b is a else torch.split(b, length, -1), strict=True)
    return _sum([x @ (y.mT if y.dim() > 1 else y) for x, y in pairs])


def vector_norm(v: Tensor) -> Tensor:
    """The Euclidean norms of the rows of ``v`` (…, P).

    Example:
        >>> vector_norm(torch.ones(2, 100)).tolist()
        [10.0, 10.0]
    """
    length = part_length(v.device)
    if v.shape[-1] <= length:
        return torch.linalg.vector_norm(v, dim=-1)
    norm = functools.partial(torch.linalg.vector_norm, dim=-1)
    whole = 0 if v.device.type == "cpu" else v.shape[-1] // length * length
    squares = [norm(x).square() for x in torch.split(v[..., whole:], length, -1)]
    if whole:  # one kernel for all parts
        blocks = v[..., :whole].reshape(*v.shape[:-1], -1, length)
        squares.append(norm(blocks).square().sum(-1, dtype=widest_dtype(v.device)))
    return _sum(squares).sqrt()


def finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite; their sum, which is cheaper to look at, may overflow.

    Example:
        >>> finite(torch.tensor([1.0, 3e38, 3e38])), finite(torch.tensor([1.0, torch.nan]))
        (True, False)
    """
    return math.isfinite(float(numbers.sum())) or bool(numbers.isfinite().all())


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum in the widest precision, given in that of the parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts).sum(0, dtype=widest_dtype(parts[0].device)).to(parts[0])


# A device other than the CPU draws longer vectors itself (our choice): 2^18 numbers take the CPU 8 ms, short
# enough for vectors that are the same on every device.
LONG = 2**18


def generator(seed: int, device: torch.device | str, size: int) -> torch.Generator:
    """Return the seeded generator of vectors (size,): the device's own above LONG numbers, else the CPU's.

    A device draws the same numbers each time. Above LONG numbers, different devices draw different numbers.

    Example:
        >>> generator(0, "cpu", 10**9).device
        device(type='cpu')
    """
    return torch.Generator(device if size > LONG else "cpu").manual_seed(seed)


def normal(
    shape: int | Sequence[int], draws: torch.Generator, dtype: torch.dtype | None = torch.float64
) -> Tensor:
    """Return normal numbers on the generator's device, drawn in ``dtype`` on the CPU, else in float32.

    Example:
        >>> normal(3, generator(0, "cpu", 3)).dtype
        torch.float64
    """
    dtype = dtype if draws.device.type == "cpu" else torch.float32
    return torch.randn(shape, dtype=dtype, device=draws.device, generator=draws)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what is queued on it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


class Graph(Protocol):
    """The kernels of one call, which a replay starts together."""

    def record(self, call: Callable[[], Tensor]) -> Tensor:
        """Record a call; its result is the memory that each replay writes."""

    def replay(self) -> None:
        """Compute the call again, with the present numbers in its inputs."""


class CudaGraph:
    """A graph of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()

    def record(self, call: Callable[[], Tensor]) -> Tensor:
        stream, outside = _stream(self._device), torch.cuda.current_stream(self._device)
        # After a failed record, torch.cuda.graph would stay in its stream. Other threads, such as those that
        # load data, go on.
        with torch.cuda.device(self._device), torch.cuda.stream(outside):
            try:
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    return call()
            except Exception:
                # Before PyTorch 2.10, the generator draws again only after a record that succeeds.
                with contextlib.suppress(RuntimeError), torch.cuda.stream(stream):
                    other = torch.cuda.CUDAGraph()
                    other.capture_begin()
                    torch.zeros(1, device=self._device)
                    other.capture_end()
                raise

    def replay(self) -> None:
        self._graph.replay()


#: Graphs by the type of device.
GRAPHS: dict[str, Callable[[torch.device], Graph]] = {"cuda": CudaGraph}
# A record takes about as long as three calls, and is made in the third call with a shape. Above MAX_NUMBERS
# the kernels take longer than their starts, so that a replay saves nothing (our choices).
CALLS, MAX_NUMBERS = 3, 2**24


# The streams of a record's branches, and the index of the stream of records (our choice: more streams need
# more memory at once).
STREAMS, OF_RECORDS = 4, -1


@functools.cache
def _stream(device: torch.device, index: int = OF_RECORDS) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _without_waits() -> Iterator[None]:
    """Raise an error where the block waits for a CUDA device, which no record can do."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _modes() -> object:
    """Return the settings of PyTorch on which kernels depend."""
    return (
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )


@contextlib.contextmanager
def branches(device: torch.device) -> Iterator[Callable[[int], contextlib.AbstractContextManager[object]]]:
    """Return a context in which the parts of a computation get different streams of a CUDA device.

    This happens only while a CUDA graph is recorded. A replay of the graph then computes the parts at the
    same time. Without a recording several streams would not be faster, because the host starts the kernels
    more slowly than the device computes them.

    Yields:
        A function that takes the number of a part, from 0, and returns the context in which to compute it. No
        part may depend on another one.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield lambda part: contextlib.nullcontext()
        return
    outer_stream, part_streams = torch.cuda.current_stream(device), list[torch.cuda.Stream]()

    def branch(part: int) -> contextlib.AbstractContextManager[object]:
        stream = _stream(device, part % STREAMS)
        if stream not in part_streams:
            stream.wait_stream(outer_stream)
            part_streams.append(stream)
        return torch.cuda.stream(stream)

    try:
        yield branch
    finally:
        for stream in part_streams:
            outer_stream.wait_stream(stream)


@contextlib.contextmanager
def recordable(device: torch.device) -> Iterator[None]:
    """Compute the block so that a record can differentiate its graph: on CUDA, not in the default stream."""
    if device.type != "cuda":
        yield
        return
    stream, outside = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


class Captured:
    """A function of tensors that is recorded once, then replayed for tensors of the same shapes and dtypes.

    The first replay must equal the function's own results to the bit. If it does not, or if recording fails,
    the function is called each time, and the log of ``landscape.core.devices`` has the reason.

    Attributes:
        failure: why the function cannot be replayed; "" if it can, or if it was not recorded yet.
        replays: the number of replays.

    Example:
        >>> Captured()(torch.square, torch.ones(2))  # the CPU calls the function
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        self.failure, self.replays, self._calls = "", 0, Counter[object]()
        self._recorded: tuple[object, Graph, list[Tensor], Tensor] | None = None

    def __call__(
        self,
        function: Callable[..., Tensor],
        *tensors: Tensor,
        state: object = None,
        written: Sequence[Tensor] = (),
        networks: int = 1,
    ) -> Tensor:
        """Return ``function(*tensors)``, by a replay if this call is like the recorded one.

        Args:
            function: the same in each call; it must depend on nothing but ``tensors``, ``state`` and the
                tensors ``written``.
            tensors: the arguments of ``function``.
            state: what else ``function`` depends on, hashable.
            written: the tensors that ``function`` changes in place.
            networks: the number of networks that ``function`` computes. A call is not recorded if a tensor
                has more than MAX_NUMBERS numbers for each network.
        """
        device = tensors[0].device
        # Under a limit of memory nothing is recorded, because the memory of a recording is not counted.
        if device.type not in GRAPHS or self.failure or limit() is not None:
            return function(*tensors)
        user_is_recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_excluded = any(t.requires_grad or t.numel() > MAX_NUMBERS * networks for t in tensors)
        if user_is_recording or is_excluded or torch.is_inference_mode_enabled():
            return function(*tensors)
        input_forms = tuple((t.shape, t.dtype, t.device) for t in tensors)
        written_memory = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in written)
        # One recording can replay all calls of the same kind.
        kind = (input_forms, written_memory, _modes(), state)
        if self._recorded and self._recorded[0] == kind:
            return self._replay(tensors).clone()
        if not self._recorded:
            self._calls[kind] += 1
            if self._calls[kind] >= CALLS:
                return self._record(kind, function, tensors, written)
        return function(*tensors)

    def _replay(self, tensors: Sequence[Tensor]) -> Tensor:
        assert self._recorded
        _, graph, inputs, result = self._recorded
        for recorded_input, tensor in zip(inputs, tensors, strict=True):
            recorded_input.copy_(tensor)
        graph.replay()
        self.replays += 1
        return result

    def _record(
        self, kind: object, function: Callable[..., Tensor], tensors: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Return the result of a call; also record the function, and compare a replay with this call.

        ``written`` are the tensors that ``function`` changes in place.
        """
        written_before: list[Tensor] = []  # copies before the call; none if copying fails
        try:
            written_before = [t.clone() for t in written]
            with _without_waits() if tensors[0].is_cuda else contextlib.nullcontext():
                expected = function(*tensors)
        except RuntimeError as error:  # for example, the function waits for the device
            # The call below starts from the tensors ``written`` as they were before the failed call.
            self._give_up_and_restore(function, written, written_before, error)
            return function(*tensors)
        written_after: list[Tensor] = []  # copies after the call; none if copying fails
        try:
            written_after = [t.clone() for t in written]
            inputs = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
            graph = GRAPHS[tensors[0].device.type](tensors[0].device)
            self._recorded = kind, graph, inputs, graph.record(lambda: function(*inputs))
            _restore(written, written_before)
            replayed = self._replay(tensors)  # also changes the tensors ``written``
            pairs = zip((replayed, *written), (expected, *written_after), strict=True)
            if not all(torch.equal(_bits(of_replay), _bits(of_call)) for of_replay, of_call in pairs):
                raise ArithmeticError("a replay gives other numbers")
        except Exception as error:  # for example, a function that seeds random numbers cannot be recorded
            # The caller gets the tensors ``written`` as the successful call has left them.
            self._give_up_and_restore(function, written, written_after, error)
        return expected

    def _give_up_and_restore(
        self, function: object, written: Sequence[Tensor], values: Sequence[Tensor], error: Exception
    ) -> None:
        """Replay nothing from now on, and set the tensors ``written`` to ``values``, if there are any."""
        self.failure, self._recorded = first_words(error), None
        _restore(written, values)
        LOG.info("%s is not replayed: %s", getattr(function, "__qualname__", "a function"), self.failure)


def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=False):  # no values: the tensors stay as they are
        tensor.copy_(value)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators of the CPU and of a device, of which that of the CPU is the first."""
    if device.type == "cpu":
        return [torch.get_rng_state()]
    module = torch.get_device_module(device)
    # MPS is one device, whose functions take none.
    return [torch.get_rng_state(), module.get_rng_state(*([] if device.type == "mps" else [device]))]


@contextlib.contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """After the block, the generators of the CPU and of a device are as they were before."""
    states = random_states(device)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(device).set_rng_state(state, *([] if device.type == "mps" else [device]))


def gather_bytes(
    message: bytes, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """The ``message`` of every process of a group, in the order of their ranks, by way of ``device``."""
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    length = torch.tensor([len(mine)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    padded = mine.new_zeros(max(map(int, lengths)))
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]

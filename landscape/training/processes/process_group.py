"""The processes of one run: their rendezvous, their signs of life, and the rank that was lost.

Process groups and their collectives are torch.distributed's. In addition a store holds a sign of life of each
rank and the first failure, so that the remaining processes can report the cause. Under ``--nproc`` it is a
private folder. Otherwise it is a store of torch's on rank 0, or on torchrun's agent, at MASTER_ADDR and
MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from landscape import _version
from landscape.core.devices import pick_device
from landscape.core.errors import InputError, OperationError
from landscape.core.files import within
from landscape.core.options import Within, fit
from landscape.core.progress import tolerant_stream
from landscape.training.processes import children
from landscape.training.processes.comm import LostProcessError, Processes, first_line

T = TypeVar("T")

# Interval of the signs of life, and the silence after which a process counts as lost (s). Our choice:
# long enough for writing one learner to a checkpoint, which holds Python's lock.
BEAT, LOST_AFTER = 1.0, 10.0


class TorchStore:
    """A :class:`.FolderStore` in one of torch's stores, with a key for each text; raises RuntimeErrors."""

    def __init__(self, store: PrefixStore) -> None:
        self.store = store

    def set(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def get(self, name: str) -> str:
        return self.store.get(name).decode() if self.store.check([name]) else ""

    def first(self, name: str, text: str) -> bool:
        return bool(self.store.compare_set(name, "", text).decode() == text)


Store = children.FolderStore | TorchStore
PAUSE = 0.05  # seconds between two attempts to connect


class Group(Processes):
    """This process in the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    The constructor only reads the environment; :meth:`join` connects. Under ``--nproc`` the processes meet in
    the launcher's private folder, without an address.

    Args:
        device: the device of the exchanged tensors; the backend is NCCL on GPUs, else gloo.
        timeout: the longest time of the rendezvous, and of a rank without a sign of life (s).

    Raises InputError for a missing or wrong rank or size.
    """

    _store: Store

    def __init__(self, device: torch.device, timeout: float = children.TIMEOUT) -> None:
        super().__init__(number("RANK", 0), number("WORLD_SIZE", 1), device)
        self.timeout, self.attempt = timeout, number("TORCHELASTIC_RESTART_COUNT", 0, 0)
        if self.rank >= self.size:
            raise InputError(f"RANK: {self.rank} is not allowed, WORLD_SIZE is {self.size}")
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._hosts = False  # whether this process holds the store
        self._stop, self._failure, self._failure_beats = threading.Event(), "", 0
        # Whether the store is lost, and the number of beats without an answer of the store.
        self._store_lost, self._unanswered = False, 0
        # For each rank: the last sign of life, the seconds since the sign changed, the number of changes.
        self._signs = dict.fromkeys(range(self.size), "")
        self._silent = dict.fromkeys(range(self.size), 0.0)
        self._changes = dict.fromkeys(range(self.size), 0)
        self._parent = os.getppid()

    @classmethod
    def join(
        cls, device: torch.device, timeout: float = children.TIMEOUT, exchange_timeout: float | None = None
    ) -> Group:
        """Join the process group that the environment variables describe, and wait for all its processes.

        Args:
            device, timeout: as for the class.
            exchange_timeout: the longest time of an exchange (s), which may be longer than ``timeout``;
                default: ``timeout``.

        Raises InputError if the address is missing or wrong; OperationError if a port is in use, or if a
        process does not join within ``timeout``.
        """
        group = cls(device, timeout)
        # ``_store`` is for signs of life and failures.
        exchange_store, group._store = group._connect()
        group._wait_for_ranks()
        init = functools.partial(
            dist.init_process_group,
            group.backend,
            store=exchange_store,
            rank=group.rank,
            world_size=group.size,
            timeout=datetime.timedelta(seconds=exchange_timeout or timeout),
            device_id=device if device.type == "cuda" else None,
        )
        try:
            if group.backend == "nccl":
                # Only the thread that starts NCCL may use NCCL, and within() calls init() in a new thread.
                init()
            else:
                # init() may hang, or wait as long as ``exchange_timeout``. within() raises an error after
                # ``timeout`` and some seconds.
                within(timeout + LOST_AFTER, init)
        except (RuntimeError, TimeoutError) as error:
            words = f"the processes cannot meet ({first_line(error)})"
            raise OperationError(f"rank {group.rank}: {words}") from error
        threading.Thread(target=group._beat, daemon=True).start()  # exchanges signs of life
        return group

    def _connect(self) -> tuple[Any, Store]:
        """Return the store for torch's exchanges, and another connection for signs of life and failures."""
        if children.STORE in os.environ:
            folder = Path(os.environ[children.STORE])
            return FileStore(str(folder / "store"), self.size), children.FolderStore(folder)
        address, port = os.environ.get("MASTER_ADDR", ""), number("MASTER_PORT", 1, maximum=65535)
        if not address:
            raise InputError("MASTER_ADDR: missing; it is the address of rank 0's machine")
        address = "127.0.0.1" if address == "localhost" else address
        if is_loopback(address):  # the exchanges' own sockets, too
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, children.loopback())
        # The store is at torch's elastic agent; without an agent it is at rank 0.
        self._hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        stores = connect(address, port, self.rank, self._hosts, self.timeout)
        exchanges, signs = (PrefixStore(f"landscape/{self.attempt}", store) for store in stores)
        return PrefixStore("group", exchanges), TorchStore(signs)

    def _wait_for_ranks(self) -> None:
        """Wait for every rank; each writes the number of ranks that it expects."""
        self._ask(lambda: self._store.set(f"here-{self.rank}", str(self.size)))
        deadline = time.monotonic() + self.timeout
        while True:
            late = time.monotonic() > deadline
            sizes = [self._ask(functools.partial(self._store.get, f"here-{r}")) for r in range(self.size)]
            for rank, size in enumerate(sizes):
                if size not in ("", str(self.size)):
                    words = f"{self.size} on rank {self.rank}, but {size} on rank {rank}"
                    raise OperationError(f"WORLD_SIZE: {words}")
            if all(sizes):
                return
            if late:
                missing = _ranks([rank for rank, size in enumerate(sizes) if not size])
                raise OperationError(f"{missing} of {self.size} did not come within {self.timeout:g} s")
            time.sleep(PAUSE)

    def _ask(self, call: Callable[[], T]) -> T:
        """Return the result of ``call()`` to the store, which may not answer if rank 0 holds it."""
        try:
            return within(min(self.timeout, LOST_AFTER), call)
        except (RuntimeError, OSError) as error:  # a TimeoutError is an OSError
            raise LostProcessError(self._no_answer(first_line(error))) from error

    def _no_answer(self, words: str) -> str:
        return f"rank 0 of {self.size} was lost: its store does not answer ({words})"

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this method."""
        with self.naming():
            dist.barrier()

    def agree(self, facts: dict[str, str]) -> None:
        """Raise OperationError on every rank if ``facts`` (and the code) are not the same on all of them."""
        version = f"{_version.__version__} ({code_fingerprint()[:12]})"
        versions = {"landscape": version, "torch": str(torch.__version__)}
        if difference := self.difference(versions | facts):
            raise OperationError(difference)

    def _beat(self) -> None:
        """Write a sign of life every BEAT seconds, read other signs, and end this process if needed.

        The process ends if its parent has ended, if another rank has reported a failure while this rank waits
        in an exchange (which cannot be canceled), or if a rank is silent for too long.
        """
        pending: threading.Thread | None = None
        while not self._stop.wait(BEAT):
            self._unanswered = self._unanswered + 1 if pending and pending.is_alive() else 0
            if not self._unanswered:
                pending = threading.Thread(target=self._exchange_signs, daemon=True)
                pending.start()
            for rank in self._silent:
                self._silent[rank] += BEAT * (rank != self.rank)
            if self._failure_beats > 2 or os.getppid() != self._parent:
                os._exit(1)
            if max(self._silent.values()) > max(self.timeout, LOST_AFTER) + 2 * BEAT:
                self._give_up()

    def _exchange_signs(self) -> None:
        """Write and read the signs of life once; this may hang with the store."""
        try:
            count = int(self._signs[self.rank].partition(" ")[0] or 0) + 1
            self._signs[self.rank] = f"{count} {self.step}"
            self._store.set(f"beat-{self.rank}", self._signs[self.rank])
            for rank in set(self._silent) - {self.rank}:
                sign = self._store.get(f"beat-{rank}")
                if sign != self._signs[rank]:
                    self._signs[rank], self._silent[rank] = sign, 0.0
                    self._changes[rank] += 1
            self._failure = self._store.get("failure")
            self._failure_beats += bool(self._failure)
        except (RuntimeError, OSError):  # the store is lost: exchanges will fail
            self._store_lost = True

    def _give_up(self) -> None:
        """End this process, with a message if no other rank has reported one."""
        line = self._loss_line(max(self.timeout, LOST_AFTER))
        if self.report(line) and not children.launcher_store():
            print(f"landscape: {line}", file=sys.stderr, flush=True)
        os._exit(1)

    def _loss_line(self, limit: float, words: str = "") -> str:
        """Return a line on lost ranks, silent for ``limit`` seconds, or rank 0 with the store; or ""."""
        silent = [rank for rank, seconds in self._silent.items() if seconds >= limit]
        if self._store_lost or (self._unanswered > 2 and 0 in silent):
            return self._no_answer(words or f"for {limit:g} s")
        line = f"{_ranks(silent)} of {self.size} lost, no sign of life for {limit:g} s"
        return line + f" ({words})" * bool(words) if silent else ""

    def diagnose(self, error: BaseException) -> LostProcessError:
        """Return the reason for a failed exchange: another rank's reported failure, or the silent ranks."""
        words, before = first_line(error), dict(self._changes)
        deadline = time.monotonic() + 2 * LOST_AFTER  # a busy machine reads the last sign of a rank late
        while time.monotonic() < deadline and not (self._failure or self._store_lost):
            # The first new sign may be the last sign of a lost rank; the second sign shows that it lives.
            waiting = [rank for rank, count in self._changes.items() if count < before[rank] + 2]
            if all(self._silent[rank] >= LOST_AFTER for rank in waiting if rank != self.rank):
                break
            time.sleep(BEAT / 4)
        if self._failure:
            return LostProcessError(self._failure.split(" ", 2)[2])
        if line := self._loss_line(LOST_AFTER, words):
            return LostProcessError(line)
        steps = {rank: int(sign.partition(" ")[2] or -1) for rank, sign in self._signs.items()}
        behind = [rank for rank, step in steps.items() if step < max(steps.values())]
        late = f"; {_ranks(behind)} only at step {steps[behind[0]]}" if behind else ""
        reason = f"failed, though all ranks live ({words}){late}"
        return LostProcessError(f"an exchange of rank {self.rank} {reason}")

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn torch's errors in the exchanges inside into an error that names the lost rank."""
        try:
            yield
        except RuntimeError as error:
            raise self.diagnose(error) from error

    def report(self, message: str, code: int = 1) -> bool:
        """Report ``message`` to the other ranks, and return False if another failure was reported before."""
        self._stop.set()
        text = children.failure(self.rank, code, message)
        try:
            first: bool = within(2 * BEAT, lambda: self._store.first("failure", text))
        except (RuntimeError, OSError):
            return True  # no other rank is left
        if self._hosts:
            time.sleep(4 * BEAT)  # the other ranks read it before the store ends with this process
        return first

    def close(self) -> None:
        """Leave the group when all ranks are done."""
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        self._stop.set()
        dist.destroy_process_group()


def started_by_launcher() -> bool:
    """Return whether a launcher (--nproc, torchrun, srun …) started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[Callable[[str], object]]:
    """Open a log, and yield the function that appends a line with the time.

    The log also has the output of C libraries to stderr; Python's output still goes to stderr.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("ab")
    except OSError as error:
        raise OperationError(f"{path}: cannot be written ({error.strerror})") from error

    file, console = tolerant_stream(opened.fileno()), os.dup(2)
    sys.stderr.flush()
    with opened, contextlib.redirect_stderr(tolerant_stream(console)):
        os.dup2(opened.fileno(), 2)
        try:
            yield lambda line: file.write(children.stamped(line))
        finally:
            os.dup2(console, 2)
            os.close(console)


def code_fingerprint() -> str:
    """Return the SHA-256 (hex) of the package's Python files, which must be the same on all ranks."""
    root, digest = Path(_version.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def number(name: str, minimum: int, default: int | None = None, maximum: int | None = None) -> int:
    """Return the whole number in the environment variable ``name``; InputError if it is not allowed."""
    text = os.environ.get(name, "" if default is None else str(default))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
    whole: int = fit(name, value, Annotated[int, Within(minimum, maximum)])
    return whole


def worker_device(name: str) -> torch.device:
    """Return the device of a process that a launcher started: the CPU, or the GPU of its LOCAL_RANK.

    Raises InputError for more processes than GPUs on this machine, because NCCL needs a GPU for each process,
    and for several processes on accelerators other than CUDA's.
    """
    device, alone = pick_device(name), number("WORLD_SIZE", 1, 1) == 1
    if device.type == "cpu" or (alone and device.type != "cuda"):
        return device
    if device.type != "cuda":
        words = f"is {device.type} here, which several processes cannot share"
        raise InputError(f"device: '{name}' {words}; use cpu")
    local, gpus = number("LOCAL_RANK", 0, 0), torch.cuda.device_count()
    processes = max(number("LOCAL_WORLD_SIZE", 1, 1), local + 1)
    if processes > gpus:
        words = f"is not allowed, {processes} processes need a GPU each of {gpus}"
        raise InputError(f"device: '{name}' {words}; use cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach ``address``."""
    return address == "::1" or address.startswith("127.")


def connect(host: str, port: int, rank: int, serve: bool, timeout: float) -> tuple[TCPStore, TCPStore]:
    """Return two connections to the store at ``host``: a call on one does not wait for the other.

    With ``serve`` this process has the store, which listens only at ``host`` if that is a loopback address,
    and otherwise at all addresses of this machine, because ``host`` may be a name outside. Raises
    OperationError if the port is in use, or if no store answers within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    with _listen(host, port) if serve else contextlib.nullcontext() as listener:
        try:
            address = _reach(host, port, deadline)
            limit, seconds = datetime.timedelta(seconds=timeout), max(0.1, deadline - time.monotonic())
            store = functools.partial(
                TCPStore, address, port, timeout=limit, wait_for_workers=False, use_libuv=True
            )
            descriptor = listener.detach() if listener else None
            first = within(seconds, lambda: store(is_master=serve, master_listen_fd=descriptor))
            return first, within(seconds, store)
        except (RuntimeError, OSError) as error:  # torch raises RuntimeErrors
            words = f"does not answer at {host}:{port} ({first_line(error)})"
            raise OperationError(f"rank {rank}: rank 0 {words}") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        local = is_loopback(host)
        dual = not local and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or host == "::1" else socket.AF_INET
        address = (host if local else "", port)
        return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        words = os.strerror(error.errno or 0)  # the error's own text would repeat the address
        raise OperationError(f"MASTER_PORT: {port} fails on {host} ({words}); choose another") from error


def _reach(host: str, port: int, deadline: float) -> str:
    """Return the address of ``host`` at which a server listens; attempts by torch would each warn."""
    while True:
        remaining = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(remaining, PAUSE)) as connection:
                return str(connection.getpeername()[0])
        except OSError:
            if remaining <= 0:
                raise
            time.sleep(PAUSE)

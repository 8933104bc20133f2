"""The processes of one run: meeting, staying in sight of each other, and naming the one that is lost.

Process groups and their collectives are torch.distributed's. A small store beside them, on the same address,
holds a sign of life for each rank and the first failure, so that whoever is left can say what happened.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import landscape
from landscape.options import FailedError, InputError

# How long any exchange may take before the run ends (s): the default of torch's NCCL groups.
TIMEOUT = 600.0
# A process shows that it lives once a second; one that did not for this long is lost (s). Ours: long enough
# for a checkpoint's write of one learner, which holds Python's lock.
BEAT, LOST_AFTER = 1.0, 10.0


class Lost(FailedError):
    """Another process is gone, or failed first; the message names its rank."""


class Group:
    """This process among those that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    ``device`` is where tensors are exchanged: gloo on the CPU, NCCL on GPUs. Raises InputError for variables
    that are missing or wrong, FailedError where a port is in use or a rank does not come within ``timeout``
    seconds.
    """

    def __init__(self, device: torch.device, timeout: float = TIMEOUT) -> None:
        self.rank, self.size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.device, self.timeout, self.step = device, datetime.timedelta(seconds=timeout), 0
        if self.rank >= self.size:
            raise InputError(f"RANK: {self.rank} is not allowed, WORLD_SIZE is {self.size}")
        self._address = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 1)
        if not self._address[0]:
            raise InputError("MASTER_ADDR: missing; it is the address of rank 0's machine")
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._stop = threading.Event()
        # torch's elastic agents keep a store of their own there; without one, rank 0 does.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            self._hosts = self.rank == 0 and not agent
            self._server = self._connect(master=self._hosts)
            self._store = PrefixStore(f"landscape/{self.attempt}", self._server)
            self._meet()
            dist.init_process_group(
                self.backend,
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=self.timeout,
                device_id=device if device.type == "cuda" else None,
            )
        except dist.DistError as error:
            raise FailedError(f"rank {self.rank}: the processes cannot meet ({first_line(error)})") from error
        self._beats = PrefixStore(f"landscape/{self.attempt}", self._connect(master=False))
        self._parent = os.getppid()
        threading.Thread(target=self._beat, daemon=True).start()

    def _connect(self, master: bool) -> TCPStore:
        host, port = self._address
        try:
            return TCPStore(
                host, port, is_master=master, timeout=self.timeout, wait_for_workers=False, use_libuv=True
            )
        except RuntimeError as error:  # DistNetworkError, but for a port in use up to PyTorch 2.6
            if master:
                raise FailedError(
                    f"MASTER_PORT: {port} cannot be used on {host} ({first_line(error)})"
                ) from error
            raise FailedError(
                f"rank {self.rank}: rank 0 does not answer at {host}:{port} ({first_line(error)})"
            ) from error

    def _meet(self) -> None:
        """Wait for every rank; each says how many it expects."""
        self._store.set(f"here/{self.rank}", str(self.size))
        deadline = time.monotonic() + self.timeout.total_seconds()
        for rank in range(self.size):
            left = datetime.timedelta(seconds=max(0.01, deadline - time.monotonic()))
            try:
                self._store.wait([f"here/{rank}"], left)
            except dist.DistStoreError as error:
                missing = [r for r in range(self.size) if not self._store.check([f"here/{r}"])]
                raise FailedError(
                    f"{_ranks(missing)} of {self.size} did not come within {self.timeout.total_seconds():g} s"
                ) from error
            size = int(self._store.get(f"here/{rank}"))
            if size != self.size:
                raise FailedError(f"WORLD_SIZE: {self.size} on rank {self.rank}, but {size} on rank {rank}")

    def agree(self, facts: dict[str, str]) -> None:
        """Raise FailedError on every rank if ``facts`` (and the code) are not the same on all of them."""
        facts = {"landscape": f"{landscape.__version__} ({code_fingerprint()[:12]})", **facts}
        facts["torch"] = str(torch.__version__)
        try:
            self._store.set(f"facts/{self.rank}", json.dumps(facts))
            if self.rank == 0:
                self._store.set("agreed", self._difference(facts))
            self._store.wait(["agreed"], self.timeout)
            difference = self._store.get("agreed").decode()
        except dist.DistError as error:
            raise self.diagnose(error) from error
        if difference:
            raise FailedError(difference)

    def _difference(self, facts: dict[str, str]) -> str:
        for rank in range(1, self.size):
            self._store.wait([f"facts/{rank}"], self.timeout)
            theirs = json.loads(self._store.get(f"facts/{rank}"))
            for name, mine in facts.items():
                if theirs.get(name) != mine:
                    return f"{name}: {theirs.get(name)} on rank {rank}, but {mine} on rank 0"
        return ""

    def _beat(self) -> None:
        """Once a second: show that this process lives, and end it where nobody else would.

        That is when the process that started it is gone, or when another rank has told a failure and this one
        still waits for it: an exchange cannot be called off.
        """
        count, told = 0, 0
        while not self._stop.wait(BEAT if count else 0):
            count += 1
            with contextlib.suppress(RuntimeError):  # a store that is gone is noticed by the exchanges
                self._beats.set(f"beat/{self.rank}", f"{count} {self.step}")
                told += self._beats.check(["failure"])
            if told > 2 or os.getppid() != self._parent:
                os._exit(1)

    def diagnose(self, error: Exception) -> Lost:
        """Why an exchange failed: the failure that another rank told, or who shows no more sign of life."""
        try:
            before = {rank: self._signs(rank) for rank in range(self.size)}
            deadline = time.monotonic() + LOST_AFTER
            silent = set(before) - {self.rank}
            while silent and time.monotonic() < deadline and not self._store.check(["failure"]):
                time.sleep(BEAT / 4)
                silent = {rank for rank in silent if self._signs(rank) == before[rank]}
            if self._store.check(["failure"]):
                return Lost(self._store.get("failure").decode().partition(" ")[2])
            steps = {rank: int(self._signs(rank).partition(" ")[2] or -1) for rank in range(self.size)}
        except RuntimeError:  # torch's own errors are RuntimeErrors
            return Lost(f"rank 0 of {self.size} was lost: its store does not answer ({first_line(error)})")
        words = first_line(error)
        if silent:
            gone = f"{_ranks(sorted(silent))} of {self.size} lost"
            return Lost(f"{gone}, no sign of life for {LOST_AFTER:g} s ({words})")
        behind = [rank for rank, step in steps.items() if step < max(steps.values())]
        late = f"; {_ranks(behind)} only at step {steps[behind[0]]}" if behind else ""
        return Lost(f"an exchange of rank {self.rank} failed, though all ranks live ({words}){late}")

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn torch's errors of exchanges inside into the name of the lost rank."""
        try:
            yield
        except RuntimeError as error:
            raise self.diagnose(error) from error

    def _signs(self, rank: int) -> str:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def tell(self, message: str) -> bool:
        """Leave ``message`` for the other ranks; False if another failure was told before."""
        self._stop.set()
        mine = f"{self.rank} {' '.join(message.split())}"
        try:
            first: bool = self._store.compare_set("failure", "", mine).decode() == mine
        except RuntimeError:
            return True  # nobody is left to tell
        if self._hosts:
            time.sleep(4 * BEAT)  # the store ends with this process; the others are to read it
        return first

    def close(self) -> None:
        """Leave in good order, when all ranks are done."""
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        self._stop.set()
        dist.destroy_process_group()


def started_by_launcher() -> bool:
    """Whether a launcher (--nproc, torchrun, srun …) started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[Callable[[str], None]]:
    """A log that what it yields appends lines to, with the time.

    What libraries below Python write to stderr goes there, too; Python's own stderr stays as it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise FailedError(f"{path}: cannot be written ({error.strerror})") from error

    def log(line: str) -> None:
        file.write(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}Z {line}\n")

    console, before = os.dup(2), sys.stderr
    with file, os.fdopen(console, "w", buffering=1) as shown:
        before.flush()
        os.dup2(file.fileno(), 2)
        sys.stderr = shown
        try:
            yield log
        finally:
            shown.flush()
            os.dup2(console, 2)
            sys.stderr = before


def code_fingerprint() -> str:
    """SHA-256 (hex) of the package's Python files: the same on every rank, or the run is not one run."""
    root, digest = Path(landscape.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def where() -> str:
    """This machine and process, for logs."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def first_line(error: BaseException) -> str:
    """The first line of an error of torch's, without where in torch's sources it arose."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2][:160] if line.startswith("[/") else line[:160]


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _number(name: str, least: int) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit() or int(text) < least:
        raise InputError(f"{name}: {text!r} is not allowed, it must be a whole number ≥ {least}")
    return int(text)

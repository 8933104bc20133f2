"""One command over several processes: ``--nproc N``, or started by torchrun."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import click
import torch
import torch.distributed as dist

from landscape.grid import KEPT, LostError
from landscape.options import FailedError, InputError, positive

option = click.option(
    "--nproc",
    default=1,
    show_default=True,
    help="Processes (and GPUs) that share the points; under torchrun, which starts them, leave it out.",
)

HOST = "127.0.0.1"
PORT = "LANDSCAPE_PORT"  # tells a process that --nproc started where the first one listens
JOIN = datetime.timedelta(minutes=5)  # for all processes to start; importing torch takes most of it
# One that ends is noticed at once; one that is slow may take its time over a portion.
WAIT = datetime.timedelta(days=7)
NOTICE = 10.0  # seconds to see which process it was that ended


@dataclass(frozen=True)
class Team:
    """The processes of a command: a torch.distributed ``group`` (None: it is alone) and the own ``rank``."""

    group: dist.ProcessGroup | None = None
    rank: int = 0


def rank() -> int:
    """The number of this process among those of its command, before they join."""
    return int(os.environ.get("RANK", 0))


@contextlib.contextmanager
def team(nproc: int) -> Iterator[Team]:
    """Start the same command ``nproc`` − 1 more times, and join with what was started so, or by torchrun.

    The processor's threads are divided among the processes. Each must make the same calls with the group
    inside the block. One that fails there ends all, with an error that names its rank.
    """
    positive("--nproc", nproc, least=1)
    size = int(os.environ.get("WORLD_SIZE", 1) if "RANK" in os.environ else 1)
    if size > 1 and nproc not in (1, size):
        raise InputError(f"--nproc: {nproc} is not allowed here, torchrun has started {size} processes")
    if max(size, nproc) == 1:
        yield Team()
    elif not dist.is_available():
        raise InputError("--nproc: this build of PyTorch has no torch.distributed; use 1")
    elif PORT in os.environ:
        store = dist.TCPStore(HOST, int(os.environ[PORT]), is_master=False, timeout=JOIN)  # type: ignore[attr-defined]
        store.set(str(rank()), "here")
        with _joined(store, rank(), size) as joined:
            yield joined
    elif size > 1:
        with _joined(None, rank(), size) as joined:
            yield joined
    else:
        with _workers(nproc) as joined:
            yield joined


@contextlib.contextmanager
def _workers(nproc: int) -> Iterator[Team]:
    """Start the others, be the first of them, and end those that are left."""
    threads = torch.get_num_threads()
    part = max(1, threads // nproc)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=JOIN)  # type: ignore[attr-defined]
    workers: list[Worker] = []
    try:
        torch.set_num_threads(part)
        for r in range(1, nproc):
            workers.append(_start(r, nproc, store.port, part))
        _wait(store, workers)
        with _joined(store, 0, nproc) as joined:
            yield joined
    except LostError as error:
        raise _culprit(workers) or error from error
    finally:
        for worker in workers:
            worker.stop()
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Worker:
    """A process of this command other than the first, and what it says on stderr."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def failure(self) -> str:
        """How it ended, if it failed; "" if it did not, or not yet."""
        code = self.process.poll()
        if not code:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.strip()), "").removeprefix("landscape: ")
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}{f': {said}' if said else ''}"

    def stop(self) -> None:
        """End it, if it has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if sys.exc_info()[0] else NOTICE)
        self.process.kill()
        self.process.wait()
        self.errors.close()


def _start(rank: int, size: int, port: int, threads: int) -> Worker:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by Worker.stop)
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, PORT: port}
    settings |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    process = subprocess.Popen(
        [sys.executable, "-m", "landscape", *sys.argv[1:]],
        env={**os.environ, **{name: str(value) for name, value in settings.items()}},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )
    return Worker(rank, process, errors)


def _wait(store: Any, workers: list[Worker]) -> None:
    """Until all workers are here, or one has failed, or JOIN is over."""
    until = time.monotonic() + JOIN.total_seconds()
    while not store.check([str(worker.rank) for worker in workers]):
        for worker in workers:
            failure = worker.failure()
            if failure:
                raise FailedError(f"rank {worker.rank} failed ({failure})")
        if time.monotonic() > until:
            raise FailedError(f"--nproc: the processes did not all start within {JOIN}")
        time.sleep(0.02)


def _culprit(workers: list[Worker]) -> FailedError | None:
    """What to say about the worker that ended first. The others end because of it, with LostError's words."""
    until = time.monotonic() + NOTICE
    while time.monotonic() < until:
        for worker in workers:
            failure = worker.failure()
            if failure and LostError.words not in failure:
                return FailedError(f"rank {worker.rank} failed ({failure}); {KEPT}")
        time.sleep(0.02)
    return None


@contextlib.contextmanager
def _joined(store: Any, rank: int, size: int) -> Iterator[Team]:
    """The group of all processes; without ``store``, by torchrun's environment variables."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=JOIN)
    except (RuntimeError, ValueError) as error:
        raise FailedError(f"--nproc: the processes cannot join ({str(error).splitlines()[0]})") from error
    try:
        group = dist.new_group(timeout=WAIT, backend="gloo")
        yield Team(group, rank)
        dist.barrier(group)  # or the first to end would look lost to the others
    finally:
        dist.destroy_process_group()

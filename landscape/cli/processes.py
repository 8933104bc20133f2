"""One command over several processes: ``--nproc N``, or started by torchrun."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

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
    size = int(os.environ.get("WORLD_SIZE", 0) if "RANK" in os.environ else 0)
    if size and nproc not in (1, size):
        raise InputError(f"--nproc: {nproc} is not allowed here, torchrun has started {size} processes")
    if max(size, nproc) == 1:
        yield Team()
        return
    if not dist.is_available():
        raise InputError("--nproc: this build of PyTorch has no torch.distributed; use 1")
    if size:
        with _joined() as joined:
            yield joined
        return
    threads = torch.get_num_threads()
    part = max(1, threads // nproc)
    shared = {
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    before = {name: os.environ.get(name) for name in (*shared, "RANK", "LOCAL_RANK")}
    workers: list[Worker] = []
    try:
        torch.set_num_threads(part)
        os.environ.update(shared)
        for r in range(1, nproc):
            workers.append(_start(r, part))
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
        with _joined() as joined:
            yield joined
    except LostError as error:
        raise _culprit(workers) or error from error
    finally:
        for worker in workers:
            worker.stop()
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


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
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.errors.close()


def _start(rank: int, threads: int) -> Worker:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by Worker.stop)
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "landscape", *sys.argv[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )
    return Worker(rank, process, errors)


def _culprit(workers: list[Worker]) -> FailedError | None:
    """What to say about the worker that ended first. The others end because of it, with LostError's words."""
    until = time.monotonic() + NOTICE
    while time.monotonic() < until:
        for worker in workers:
            failure = worker.failure()
            if failure and LostError.words not in failure:
                return FailedError(f"rank {worker.rank} failed ({failure}); {KEPT}")
        time.sleep(0.05)
    return None


@contextlib.contextmanager
def _joined() -> Iterator[Team]:
    """The group of all processes; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        dist.init_process_group("gloo", timeout=JOIN)
    except (RuntimeError, ValueError) as error:
        raise FailedError(f"--nproc: the processes cannot join ({str(error).splitlines()[0]})") from error
    try:
        group = dist.new_group(timeout=WAIT, backend="gloo")
        yield Team(group, dist.get_rank())
        dist.barrier(group)  # or the first to end would look lost to the others
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

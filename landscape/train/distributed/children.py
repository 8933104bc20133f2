"""Child processes on this machine: they are watched, and end with this process.

Two modules use them: :mod:`.launcher` for a group that computes one result together, and :mod:`.pool` for
independent jobs.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from landscape.core.errors import FailedError, InputError
from landscape.core.lock import HAS_LOCKS, lock_descriptor
from landscape.train.distributed import boot

# Interval of the checks of the children (s), short enough not to delay a short command noticeably.
CHECK_INTERVAL = 0.05
FOLDER = "landscape-processes-"
LOCKED_WITHIN = 60.0  # a new folder is locked within this time (s)


class Child:
    """A process that runs ``MODULE.main()`` of this package; ``number`` is its index among the children."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], link: socket.socket, errors: Path
    ) -> None:
        self.number, self.process, self.link, self.errors = number, process, link, errors
        #: Seconds without a sign of life, not counting the time in which this process itself was stopped.
        self.silent = 0.0

    @property
    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def exit_description(self) -> str:
        """ "was killed by SIGNAL" or "ended with CODE", after it has ended."""
        code = self.process.returncode
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"

    def stderr_text(self) -> str:
        """The text that it wrote to stderr; "" if it shares this process's stderr."""
        return self.errors.read_text(errors="replace") if self.errors.exists() else ""

    def receive_beats(self, seconds: float) -> None:
        """Read the signs of life of the last ``seconds``, and count the silence."""
        self.silent += seconds
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self.link.recv(2**16):
                self.silent = 0.0


class Children:
    """Child processes, and a private folder, which is deleted after them.

    A context manager: at its end all children have ended.
    """

    def __init__(self) -> None:
        if not HAS_LOCKS:
            raise InputError("--nproc, --jobs: this system has no processes that share sockets; use 1")
        _sweep()
        self.all: list[Child] = []
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDER))
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise FailedError(f"TMPDIR: no folder for temporary files ({error.strerror})") from error
        lock_descriptor(self._lock, wait=True)
        self._checked = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def start(
        self,
        module: str,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
        shown: bool = False,
    ) -> Child:
        """Start ``module``'s main with ``words``.

        With ``shown`` its output goes to this process's stdout and stderr; otherwise stderr goes to a file
        and stdout is dropped. With ``piped`` its stdin and stdout are pipes to this process.
        """
        number = len(self.all)
        parent_end, child_end = socket.socketpair()
        parent_end.setblocking(False)
        errors = self.folder / f"errors-{number}"
        settings = {boot.LINK: str(child_end.fileno()), **(environment or {})}
        with child_end, contextlib.nullcontext() if shown else errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", boot.__file__, module, *words],
                env={**os.environ, **settings},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else None if shown else subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[child_end.fileno()],
            )
        child = Child(number, process, parent_end, errors)
        self.all.append(child)
        return child

    def check(self, *streams: IO[bytes]) -> list[IO[bytes]]:
        """Read the children's signs of life; the ``streams`` that can be read now, or within a moment."""
        ready = select.select(streams, [], [], CHECK_INTERVAL)[0]
        now = time.monotonic()
        # At most one beat is counted, as this process itself may have been stopped.
        passed, self._checked = min(now - self._checked, boot.BEAT), now
        for child in self.all:
            child.receive_beats(passed)
        return ready

    def end(self) -> None:
        """Kill the children that still run; all files are written atomically, so that none is damaged."""
        for child in self.all:
            if child.ended is None:
                child.process.kill()
        for child in self.all:
            child.process.wait()
            child.link.close()
            for stream in (child.process.stdin, child.process.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
        self.all = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def signal_name(number: int) -> str:
    """SIGKILL of 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def threads_each(processes: int, threads: int | None) -> dict[str, str]:
    """The environment in which each of ``processes`` takes its share of ``threads`` threads, if given."""
    if threads is None:
        return {}
    share = str(max(1, threads // processes))
    return {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share}


def _sweep() -> None:
    """Remove the folders of processes that were killed: they are this user's, and their locks are free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            state = os.fstat(handle)
            old = state.st_uid == os.getuid() and time.time() - state.st_mtime > LOCKED_WITHIN
            if old and lock_descriptor(handle):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)

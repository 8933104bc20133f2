"""Child processes on this machine: started safely, watched, and never left behind.

Both ways to use several processes rest on this: a group that computes one thing together
(:mod:`.launcher`), and a pool that does many jobs (:mod:`.pool`).
"""

from __future__ import annotations

import contextlib
import fcntl
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

from landscape.core.errors import FailedError
from landscape.train.distributed import boot

# How often to look after the children (s): a short command should not take noticeably longer by it.
LOOK = 0.05
FOLDER = "landscape-processes-"
FRESH = 60.0  # seconds in which a new folder is surely locked


class Child:
    """A process that runs ``MODULE.main()`` of this package; ``number`` is its name among its like."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], link: socket.socket, errors: Path
    ) -> None:
        self.number, self.process, self.link, self.errors = number, process, link, errors
        #: Seconds without a sign of life, as long as this process was awake to see one.
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
    """Child processes, and a folder that nobody else can open, which ends with them.

    A context manager: at its end all children are ended and gone.
    """

    def __init__(self) -> None:
        _sweep()
        self.all: list[Child] = []
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDER))
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise FailedError(f"TMPDIR: no folder for temporary files ({error.strerror})") from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._looked = time.monotonic()

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

        What it writes is ``shown``, or else stderr is kept and stdout dropped; with ``piped`` stdin and
        stdout are pipes of this process's.
        """
        number = len(self.all)
        mine, its = socket.socketpair()
        mine.setblocking(False)
        errors = self.folder / f"errors-{number}"
        settings = {boot.LINK: str(its.fileno()), **(environment or {})}
        with its, contextlib.nullcontext() if shown else errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", boot.__file__, module, *words],
                env={**os.environ, **settings},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else None if shown else subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[its.fileno()],
            )
        child = Child(number, process, mine, errors)
        self.all.append(child)
        return child

    def look(self, *streams: IO[bytes]) -> list[IO[bytes]]:
        """Wait a moment, or until some of ``streams`` can be read, and note who lives; those streams."""
        ready = select.select(streams, [], [], LOOK)[0]
        now = time.monotonic()
        # No more than this counts of the time that this process was stopped itself.
        passed, self._looked = min(now - self._looked, boot.BEAT), now
        for child in self.all:
            child.receive_beats(passed)
        return ready

    def end(self) -> None:
        """Kill those that are left; files are written so that this harms none."""
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
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > FRESH:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)

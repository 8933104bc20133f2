"""Locks: one process at a time writes a folder of runs or a result file, if the file system has locks.

Where there is no fcntl, as on Windows, filelock uses the system's own; locks of descriptors are left out.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import filelock

from landscape.core.errors import FailedError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
#: Whether open files and folders can be locked.
HAS_LOCKS = fcntl is not None

# Seconds until a lock counts as taken: a process that was just killed has its locks for a moment longer.
PATIENCE = 2.0


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A lock on a folder between processes that may read it; the others wait. It ends with its process.

    Raises:
        OSError: the folder cannot be opened, or its file system has no locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder)):
        ...     list(Path(folder).glob("*.h5"))
        []
    """
    if not HAS_LOCKS:
        with filelock.FileLock(folder / ".lock", fallback_to_soft=False):
            yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_descriptor(handle, wait=True)
        yield
    finally:
        os.close(handle)


def lock_descriptor(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed.

    Args:
        wait: wait until no other process has the lock.

    Returns:
        Whether this process has the lock: not where another one has it, or the system has no such locks.

    Raises:
        OSError: the file system has no locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryFile() as file:
        ...     isinstance(lock_descriptor(file.fileno()), bool)
        True
    """
    if not HAS_LOCKS:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


class Lock:
    """The exclusive right to write the folder or file ``path``, until it is released or the process ends.

    A hidden file next to the file, or in the folder, names the process that has the lock; it is removed when
    the lock is released. The hidden file of a process that was killed does not matter. A file system without
    locks gives a warning.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Lock(Path(folder)) as lock:
        ...         lock.acquire()
        ...         list(Path(folder).iterdir())[0].name
        '.lock'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
        self._file: filelock.BaseFileLock | None = None

    def acquire(self) -> None:
        """Take the lock, if this object does not have it already.

        Raises:
            FailedError: another process has the lock, or its file cannot be written.
        """
        if self._file:
            return None
        self._name = self.path / ".lock" if self.path.is_dir() else self._name
        file = filelock.FileLock(self._name, fallback_to_soft=False)
        try:
            file.acquire(timeout=PATIENCE, poll_interval=0.02)
        except filelock.Timeout as error:
            raise FailedError(f"{self.path}: in use by {self._holder()}") from error
        except NotImplementedError:
            return self._without("not implemented")
        except PermissionError as error:
            raise FailedError(f"{self._name}: cannot be written ({error.strerror})") from error
        except OSError as error:
            return self._without(error.strerror)
        self._file = file
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        with contextlib.suppress(OSError):  # the lock is valid without its text
            self._name.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", "utf-8")
        return None

    def _without(self, words: str | None) -> None:
        warnings.warn(
            f"{self.path}: the file system has no locks ({words}); do not let another process write there",
            stacklevel=3,
        )

    def _holder(self) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if line := self._name.read_text("utf-8").strip()[:200]:
                return f"{line}; wait for it, or name another place with -o"
        return "another process; wait for it, or name another place with -o"

    def release(self) -> None:
        """Release the lock, if this object has it."""
        if self._file:
            with contextlib.suppress(
                OSError
            ):  # before the release: a process that opened it earlier then sees that it is gone
                self._name.unlink()
            self._file.release()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def in_use(path: Path) -> bool:
    """Whether a process has the lock of the folder ``path``, without taking it or waiting for it.

    The hidden file of a process of this machine that was killed does not count. A process of another machine
    is taken to be alive.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Lock(Path(folder)) as lock:
        ...     before = in_use(Path(folder))
        ...     lock.acquire()
        ...     before, in_use(Path(folder))
        (False, True)
    """
    try:
        words = (path / ".lock").read_text("utf-8").split()
    except (OSError, UnicodeDecodeError):
        return False
    if len(words) < 4 or words[0] != "process" or not words[1].isdecimal():
        return bool(words) or (path / ".lock").exists()  # its holder is about to write its name
    if words[3] != socket.gethostname():
        return True
    if not HAS_LOCKS:  # os.kill would end the process
        return _taken(path / ".lock")
    try:
        os.kill(int(words[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # alive, and another user's
        return True
    return True


def wait_until_free(path: Path, seconds: float) -> None:
    """Wait until no process has the lock of the folder ``path``, for as many seconds at most.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     wait_until_free(Path(folder), 1.0)
    """
    if (path / ".lock").exists():
        with contextlib.suppress(OSError, NotImplementedError):  # what acquire reports
            _taken(path / ".lock", seconds)


def _taken(path: Path, seconds: float = 0.0) -> bool:
    """Whether a process has the lock of a hidden file for ``seconds``, by an attempt to take it."""
    try:
        with filelock.FileLock(path, timeout=seconds, fallback_to_soft=False):
            return False
    except filelock.Timeout:
        return True

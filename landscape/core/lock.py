"""Locks: one process at a time writes a folder of runs or a result file, if the file system has locks.

Where there is no fcntl, as on Windows, filelock uses the system's own; locks of descriptors are left out.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import stat
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import filelock

from landscape.core.errors import FailedError
from landscape.core.files import HAS_LOCKS, SAFE, lock_descriptor, open_regular, printable

# Seconds until a lock counts as taken: a process that was just killed has its locks for a moment longer.
PATIENCE = 2.0
# Bytes that are read of a lock's text, and seconds after its opening in which its holder writes it (ours).
TEXT, NAMED = 4096, 10.0
_ODD = "is a link, a folder, a pipe or a device, or has two names; no lock can lie there, remove it"


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


def _locked(path: Path, seconds: float, *, make: bool = True) -> int | None:
    """A descriptor of the lock's file ``path``, locked; None where another process has it for ``seconds``.

    Raises OSError where there are no locks, FailedError for what is no file of its own: whoever may write the
    folder could else have the lock's text written to a file of somebody else.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            handle = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0) | SAFE, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise FailedError(f"{path}: {_ODD}") from error
            raise
        status = os.fstat(handle)
        try:
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise FailedError(f"{path}: {_ODD}")
            if lock_descriptor(handle) and _has_name(handle, path):  # not one that its holder just removed
                return handle
        except BaseException as error:
            if isinstance(error, OSError) and not status.st_size:  # no locks, and nobody's name in it
                with contextlib.suppress(OSError):
                    path.unlink()
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > end:
            return None
        time.sleep(0.02)


def _has_name(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


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
        self._free: Callable[[], Any] | None = None

    def acquire(self) -> None:
        """Take the lock, if this object does not have it already.

        Raises:
            FailedError: another process has the lock, or its file cannot be written.
        """
        if self._free:
            return
        self._name = self.path / ".lock" if self.path.is_dir() else self._name
        try:
            self._name.parent.mkdir(parents=True, exist_ok=True)
            if HAS_LOCKS:
                self._take()
            else:
                file = filelock.FileLock(self._name, fallback_to_soft=False)
                file.acquire(timeout=PATIENCE, poll_interval=0.02)
                self._free = file.release
        except filelock.Timeout as error:
            raise FailedError(f"{self.path}: in use by {self._holder()}") from error
        except NotImplementedError:
            self._without("not implemented")
        except PermissionError as error:
            raise FailedError(f"{self._name}: cannot be written ({error.strerror})") from error
        except OSError as error:
            self._without(error.strerror)

    def _take(self) -> None:
        """Lock the file, and write this process's name to the descriptor that has the lock."""
        if (handle := _locked(self._name, PATIENCE)) is None:
            raise FailedError(f"{self.path}: in use by {self._holder()}")
        self._free = weakref.finalize(self, os.close, handle)
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        with contextlib.suppress(OSError):  # the lock is valid without its text
            os.ftruncate(handle, 0)
            os.write(handle, text.encode())

    def _without(self, words: str | None) -> None:
        warnings.warn(
            f"{self.path}: the file system has no locks ({words}); do not let another process write there",
            stacklevel=3,
        )

    def _holder(self) -> str:
        with contextlib.suppress(FailedError, OSError), open_regular(self._name, TEXT) as file:
            if line := file.read().decode("utf-8", "replace").strip()[:200]:
                return f"{printable(line)}; wait for it, or name another place with -o"
        return "another process; wait for it, or name another place with -o"

    def release(self) -> None:
        """Release the lock, if this object has it."""
        if self._free:
            # Before the release: a process that opened it earlier then sees that it is gone.
            with contextlib.suppress(OSError):
                self._name.unlink()
            self._free()
            self._free = None

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
    name = path / ".lock"
    if not HAS_LOCKS:  # os.kill would end the process
        return name.exists() and _taken(name)
    try:
        with open_regular(name, TEXT) as file:
            made, words = os.fstat(file.fileno()).st_mtime, file.read().decode("utf-8", "replace").split()
    except FailedError:
        if os.path.lexists(name):
            raise
        return False
    if len(words) < 4 or words[0] != "process" or not words[1].isdecimal():
        return time.time() - made < NAMED  # its holder is about to write its name, or nobody ever will
    if words[3] != socket.gethostname():
        return True
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
    if HAS_LOCKS:
        if (handle := _locked(path, seconds, make=False)) is not None:
            os.close(handle)
        return handle is None
    try:
        with filelock.FileLock(path, timeout=seconds, fallback_to_soft=False):
            return False
    except filelock.Timeout:
        return True

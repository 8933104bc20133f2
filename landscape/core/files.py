"""Files: atomic writing, reading of regular files only, locks, time limits, and names safe to print."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Self, TypeVar

import filelock

from landscape.core.errors import DataWarning, OperationError, warn_caller

#: Whether open files can be removed and renamed, and folders opened and locked: not on Windows.
HAS_LOCKS = hasattr(os, "fork")

# Names of temporary files are random, so that nobody can create a link of that name in advance. They do not
# contain the name of the file, so that they are never too long.
_TEMPORARY = re.compile(r"\.landscape-[0-9a-f]{16}\.tmp")
# Windows has only the last of these flags, without which it translates line ends.
_NO_LINK, _CLOSE_ON_EXEC, _NO_WAIT, _BINARY = (
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY")
)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK | _CLOSE_ON_EXEC | _BINARY
# Seconds after which a temporary file is stale on systems that cannot remove open files (our choice: a day).
_OLD = 86400.0
T = TypeVar("T")
_cleaned: set[str] = set()  # folders in which this process has looked for stale files


class TolerantFile(io.FileIO):
    """A file that stores its first failed write or change of size in ``error`` and does not raise it.

    HDF5 reports a full disk once for every open object, as tracebacks from its destructors. If it sees no
    error it closes without a message, and the caller then raises the stored error.

    Example:
        >>> with TolerantFile("/dev/null", "wb") as file:
        ...     file.write(b"abc"), file.error
        (3, None)
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        view, written = memoryview(data).cast("B"), 0
        while self.error is None and written < len(view):
            try:
                written += super().write(view[written:]) or 0
            except OSError as error:
                self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
        return size or 0


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[TolerantFile]:
    """Return a context with a new open file, which replaces the file at ``path`` when the context ends.

    Until then the new file is a locked temporary file in the same folder. After an error the temporary file
    is removed, and the file at ``path`` is unchanged. The first call for a folder also removes temporary
    files that killed processes left there.

    Raises:
        OperationError: the folder does not exist, or there is no permission or no space.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/a.txt") as file:
        ...         size = file.write(b"abc")
        ...     Path(f"{folder}/a.txt").read_text()
        'abc'
    """
    path = Path(path)
    folder_name = os.path.abspath(path.parent)
    if folder_name not in _cleaned:
        _cleaned.add(folder_name)
        remove_stale(path.parent)
    temporary = None
    try:
        temporary, handle = _temporary(path.parent)
        with TolerantFile(handle, "wb+") as raw:
            yield raw
            if raw.error:  # of a failed write, stored by TolerantFile
                raise raw.error
            os.fsync(raw.fileno())
            if os.name == "nt":  # Windows cannot rename an open file
                raw.close()
            os.replace(temporary, path)
        with contextlib.suppress(OSError):  # write the rename to the disk; Windows cannot open a folder
            folder_handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder_handle)
            finally:
                os.close(folder_handle)
    except OSError as error:
        raise OperationError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):  # after a success, the temporary file is renamed already
            if temporary is not None:
                temporary.unlink()


def _temporary(folder: Path) -> tuple[Path, int]:
    """Make a temporary file in ``folder`` and return its path and its open, locked descriptor.

    Another process may take a file without a lock for stale and delete it; the next attempt makes a new one.
    """
    while True:
        path = folder / f".landscape-{secrets.token_hex(8)}.tmp"
        handle = os.open(path, _FLAGS, 0o666)
        try:
            is_locked = not HAS_LOCKS or filelock.lock_descriptor(handle, blocking=False)
        except OSError:  # a file system without locks, where no process deletes stale files
            is_locked = True
        if is_locked and path.exists():
            return path, handle
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8; ``path`` is replaced only after the new file is complete.

    Raises:
        OperationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(f"{folder}/a.txt", "α")
        ...     Path(f"{folder}/a.txt").read_text("utf-8")
        'α'
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def remove_stale(folder: Path) -> None:
    """Delete temporary files in ``folder`` that no process is writing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stale = Path(folder, ".landscape-0123456789abcdef.tmp")
        ...     stale.touch()
        ...     remove_stale(Path(folder))
        ...     stale.exists()
        False
    """
    with contextlib.suppress(OSError):
        for name in [entry.name for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                if not HAS_LOCKS:
                    if time.time() - os.stat(folder / name).st_mtime > _OLD:
                        os.unlink(folder / name)
                    continue
                handle = os.open(folder / name, os.O_RDONLY | _NO_LINK | _NO_WAIT)
                try:
                    if filelock.lock_descriptor(handle, blocking=False):
                        os.unlink(folder / name)
                finally:
                    os.close(handle)


def open_regular(path: str | Path, most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading; refuse devices and pipes, which may have no end.

    Args:
        most: the largest allowed size in bytes; None: no limit.

    Raises:
        OperationError: the file is missing, not regular or too large, or cannot be read.

    Example:
        >>> open_regular("/dev/zero")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: /dev/zero: is no regular file but ...; a file is needed
    """
    try:
        handle = os.open(path, os.O_RDONLY | _NO_WAIT | _CLOSE_ON_EXEC | _BINARY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OperationError(f"{path}: cannot be read ({reason})") from error
    status, fault = os.fstat(handle), ""
    if not stat.S_ISREG(status.st_mode):
        fault = "is no regular file but a folder, a device or a pipe; a file is needed"
    elif most is not None and status.st_size > most:
        fault = f"has {status.st_size:,} bytes, at most {most:,} are read"
    if fault:
        os.close(handle)
        raise OperationError(f"{path}: {fault}")
    return os.fdopen(handle, "rb")


def read_regular(path: str | Path, most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        most: the largest allowed size in bytes; None: no limit.

    Raises:
        OperationError: the file is missing, not regular or too large, or cannot be read.

    Example:
        >>> len(read_regular(__file__, most=1_000_000)) > 1000
        True
    """
    with open_regular(path, most) as file:
        try:
            return file.read()
        except (OSError, MemoryError) as error:
            raise OperationError(f"{path}: cannot be read ({str(error) or 'too little memory'})") from error


def printable(text: object) -> str:
    """Return ``text`` with escapes in place of all characters that cannot be printed.

    A terminal then shows an escape sequence in a name and does not obey it. Bytes that are not UTF-8 are
    written as \\udcff.

    Example:
        >>> print(printable("a" + chr(27) + "[2J"))
        a\\x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


# Seconds to wait for a lock: the locks of a process that was just killed remain for a moment.
PATIENCE = 2.0
TEXT = 4096  # the most bytes that are read from a lock's file (our choice)
_NOT_LOCKABLE = "is a link, a folder, a pipe or a device, or has two names; no lock can lie there, remove it"


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Return a context that has the only lock on a folder; other processes wait for it.

    The lock ends with its process. A process needs permission to read the folder, and none to write it.

    Raises:
        OSError: the folder cannot be opened, or its file system has no locks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, folder_lock(Path(folder)):
        ...     list(Path(folder).glob("*.h5"))
        []
    """
    if not HAS_LOCKS:
        with filelock.FileLock(folder / ".lock", fallback_to_soft=False):
            yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        filelock.lock_descriptor(handle)
        yield
    finally:
        os.close(handle)


def _sign(handle: int) -> None:
    """Write this process's number, host and time to a lock's file, which it has just locked.

    Raises OperationError for a link or another special file: without this check, anybody who may write to
    the folder could let this process overwrite a file of somebody else.
    """
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise OperationError(_NOT_LOCKABLE)
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
    with contextlib.suppress(OSError):  # the lock is valid without its text
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())


class Lock:
    """The exclusive right to write to the folder or file ``path``, until its release or the process's end.

    A hidden file, next to the file or in the folder, names the process that has the lock; it is removed when
    the lock is released. The hidden file of a killed process does not block others. On a file system without
    locks there is a warning, and no lock.

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
        self._lock_file = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
        self._lock: filelock.BaseFileLock | None = None

    def acquire(self) -> None:
        """Acquire the lock, unless this object already has the lock.

        On a file system without locks there is a warning, and nothing is locked.

        Raises:
            OperationError: another process has the lock, or the file of the lock cannot be written.
        """
        if self._lock:
            return
        if self.path.is_dir():  # the folder may have been made since __init__
            self._lock_file = self.path / ".lock"
        lock_file = self._lock_file
        lock = filelock.FileLock(lock_file, thread_local=False, fallback_to_soft=False, on_acquired=_sign)
        try:
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=PATIENCE, poll_interval=0.02)
            self._lock = lock
        except filelock.Timeout as error:
            raise OperationError(f"{self.path}: in use by {self._holder()}") from error
        except OperationError as error:  # by _sign, for a link or another special file
            raise OperationError(f"{lock_file}: {error}") from error
        except PermissionError as error:
            raise OperationError(f"{lock_file}: cannot be written ({error.strerror})") from error
        except (OSError, NotImplementedError) as error:
            # ELOOP, EISDIR and ENXIO mean that the lock's file is a link, a folder or a pipe.
            if getattr(error, "errno", 0) in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise OperationError(f"{lock_file}: {_NOT_LOCKABLE}") from error
            with contextlib.suppress(OSError):
                if not lock_file.stat().st_size:  # empty: no other process has the lock
                    lock_file.unlink()
            reason = f"the file system has no locks ({getattr(error, 'strerror', 'not implemented')})"
            warn_caller(f"{self.path}: {reason}; do not let another process write there", DataWarning)

    def _holder(self) -> str:
        with contextlib.suppress(OperationError, OSError), open_regular(self._lock_file, TEXT) as file:
            if line := file.read().decode("utf-8", "replace").strip()[:200]:
                return f"{printable(line)}; wait for it, or name another place with -o"
        return "another process; wait for it, or name another place with -o"

    def release(self) -> None:
        """Release the lock, if this object has it."""
        if self._lock:
            # Before the release, so that a process that waits for the lock sees that its file is gone.
            with contextlib.suppress(OSError):
                self._lock_file.unlink()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def make_folder(folder: Path) -> None:
    """Make ``folder`` and check that files can be written to it; called before long work, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"{folder}: cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise OperationError(f"{folder}: cannot be written to (Permission denied)")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of ``call()``, or raise TimeoutError after ``seconds``.

    Args:
        seconds: the time limit.
        call: a function. It runs in a thread of its own, which cannot be stopped: the thread continues after
            the time limit.

    Raises:
        TimeoutError: the call has not ended within the time limit.

    Example:
        >>> within(5.0, lambda: 1)
        1
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    return result.result()

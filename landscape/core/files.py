"""Files: written whole or not at all, read only where they are regular, and their names shown as they are."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from landscape.core.errors import FailedError

# Names of temporary files are random, so that nobody can put a link there in advance, and do not hold the
# file's own, so that they are never too long. The second form is version 0.6.0's, of a run's files.
_TEMPORARY = re.compile(r"\.landscape-[0-9a-f]{16}\.tmp|\.(step-\d{7}\.h5|last\.h5|recipe\.toml)\.\d+\.tmp")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_cleaned: set[str] = set()  # folders that this process has looked for stale files in


class CalmFile(io.FileIO):
    """A file whose first failed write or change of size is kept in ``error`` instead of raised.

    HDF5 reports a full disk once for every object that is open, as tracebacks from its destructors; told
    that all is well, it closes quietly, and the caller raises the one error that counts.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        while self.error is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
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
def replacing(path: str | Path) -> Iterator[CalmFile]:
    """A new file, open for reading and writing, that takes the place of ``path`` once it is whole.

    It is a temporary file in the same folder, created exclusively under a random name and locked while it is
    written; on any error it is removed and what stood at ``path`` is untouched. Stale ones, of processes that
    were killed, are removed first. FailedError for a folder that is not there, no permission, no space.
    """
    path = Path(path)
    if (key := os.path.abspath(path.parent)) not in _cleaned:
        _cleaned.add(key)
        remove_stale(path.parent)
    temporary = path.with_name(f".landscape-{secrets.token_hex(8)}.tmp")
    try:
        with CalmFile(os.open(temporary, _FLAGS, 0o666), "wb+") as raw:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield raw
            if raw.error:
                raise raw.error
            os.fsync(raw.fileno())
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise FailedError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) so that ``path`` is never half of it. FailedError as :func:`replacing`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def remove_stale(folder: Path) -> None:
    """Delete temporary files in ``folder`` that no process holds any more."""
    with contextlib.suppress(OSError):
        for name in [entry.name for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):
                handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(folder / name)
                finally:
                    os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, on systems where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_regular(path: str | Path, most: int | None = None) -> io.BufferedReader:
    """``path``, open for reading, if it is a regular file of at most ``most`` bytes.

    A device or a pipe would be read for ever, or waited for. Raises FailedError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or error
        raise FailedError(f"{path}: cannot be read ({words})") from error
    found, why = os.fstat(handle), ""
    if not stat.S_ISREG(found.st_mode):
        why = "is no regular file but a folder, a device or a pipe; a file is needed"
    elif most is not None and found.st_size > most:
        why = f"has {found.st_size:,} bytes, at most {most:,} are read"
    if why:
        os.close(handle)
        raise FailedError(f"{path}: {why}")
    return os.fdopen(handle, "rb")


def read_regular(path: str | Path, most: int | None = None) -> bytes:
    """The bytes of ``path``. Raises FailedError as :func:`open_regular`."""
    with open_regular(path, most) as file:
        try:
            return file.read()
        except (OSError, MemoryError) as error:
            raise FailedError(f"{path}: cannot be read ({error or 'too little memory'})") from error


def printable(text: object) -> str:
    """``text`` with everything that a terminal or a picture would not show as a character written out.

    So an escape sequence in a name is seen, and not obeyed; bytes that are not UTF-8 read \\udcff.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))

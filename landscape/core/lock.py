"""One writer at a time for a folder of runs or a result file, wherever its file system shares locks."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

import filelock

from landscape.core.errors import FailedError

# How long the lock is tried for (s): processes that were just killed still hold it for a moment.
PATIENCE = 2.0


class Lock:
    """The right to write the folder or file ``path``; the system takes it back from a process that ends.

    A hidden file beside the file, or in the folder, says who has it, and is removed in the end. One that a
    killed process left behind is in nobody's way. Where the file system knows no locks, a warning says so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
        self._file: filelock.BaseFileLock | None = None

    def acquire(self) -> None:
        """Take it, unless it is had. Raises FailedError that names the process that has it."""
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
        with contextlib.suppress(OSError):  # it says less then, and holds all the same
            self._name.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", "utf-8")
        return None

    def _without(self, words: str | None) -> None:
        warnings.warn(
            f"{self.path}: no lock can be had here ({words}); let nobody else write there", stacklevel=3
        )

    def _holder(self) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if line := self._name.read_text("utf-8").strip()[:200]:
                return f"{line}; wait for it, or name another place with -o"
        return "another process; wait for it, or name another place with -o"

    def release(self) -> None:
        """Give it back, if it is had."""
        if self._file:
            with contextlib.suppress(OSError):  # while it is held: who opened it before sees that it is gone
                self._name.unlink()
            self._file.release()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

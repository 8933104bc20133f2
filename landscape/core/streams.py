"""Standard streams that are closed or cannot be written."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Named(io.FileIO):
    """A file whose write errors name stdout."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from error


class _Calm(io.FileIO):
    """A file that ignores write errors: messages to a terminal that was closed must not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def calm(descriptor: int) -> io.TextIOWrapper:
    """A text stream to a file descriptor, written line by line, that ignores write errors.

    Example:
        >>> stream = calm(os.open(os.devnull, os.O_WRONLY))
        >>> stream.write("message")
        7
        >>> stream.close()
    """
    raw = io.BufferedWriter(_Calm(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def prepare() -> None:
    """Make the standard streams usable: replace closed ones, and ignore write errors on stderr.

    Otherwise the next file that is opened would get a closed descriptor, and with it the text for the
    terminal. Used once, at the start of a command.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        raw = io.BufferedWriter(_Named(1, "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(
            raw, sys.stdout.encoding if sys.stdout else "utf-8", line_buffering=True
        )
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = calm(2)


def flush() -> OSError | None:
    """Write the buffer of stdout.

    Returns:
        The error, if the buffer cannot be written; it is then discarded. None otherwise.

    Example:
        >>> flush() is None
        True
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error
    return None

"""Standard streams that are closed, full or gone."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Named(io.FileIO):
    """A file whose failed writes say that it is stdout."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from error


class _Calm(io.FileIO):
    """A file whose failed writes are forgotten: messages to a terminal that is gone must not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def calm(descriptor: int) -> io.TextIOWrapper:
    """What is written to the descriptor, as text, line by line, whether it arrives or not."""
    raw = io.BufferedWriter(_Calm(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def prepare() -> None:
    """Make the standard streams usable: closed ones lead nowhere, and messages on stderr may be lost.

    A descriptor that is closed would be that of the next file opened, and get what is meant for the terminal.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        raw = io.BufferedWriter(_Named(1, "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(
            raw, sys.stdout.encoding if sys.stdout else "utf-8", line_buffering=True
        )
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = calm(2)


def flush() -> OSError | None:
    """Write out what stdout still holds; the error, if that cannot be done, after which nothing is held."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error
    return None

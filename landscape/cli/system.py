"""Signals that end a command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from landscape.train.processes.children import of_launcher

# Windows has no SIGHUP.
STOPPING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
PATIENCE = 5.0  # seconds for an orderly end; code below Python, such as an exchange, may not hear a signal


_importing = False


class Stopped(KeyboardInterrupt):
    """A signal that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in shells."""
        return 128 + self.number

    def __str__(self) -> str:
        name = "" if self.number == signal.SIGINT else f" by {signal.Signals(self.number).name}"
        return f"interrupted{name}; the same command resumes contours and sweeps, --resume a training"


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While the modules of a command are imported, a signal ends the process at once.

    There is nothing to be saved yet, and an exception inside of an import, which other packages may catch,
    would leave their modules incomplete.
    """
    global _importing
    _importing = True
    try:
        yield
    finally:
        _importing = False


def _end(number: int) -> NoReturn:
    """End the process with the line and the exit code of :class:`Stopped`."""
    sys.stderr.write(f"landscape: {Stopped(number)}\n")
    sys.stderr.flush()
    os._exit(128 + number)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Turn the first signal that ends a command into :class:`Stopped`; a second one ends it at once.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored. Processes of a launcher leave signals
    to the launcher.
    """
    if threading.current_thread() is not threading.main_thread() or of_launcher():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if _importing:
            _end(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {n: signal.getsignal(n) for n in STOPPING if signal.getsignal(n) in usual}
    with _impatient(tuple(before)):
        try:
            for number in before:
                signal.signal(number, stop)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _impatient(numbers: tuple[int, ...]) -> Iterator[None]:
    """A context in which a thread ends the process if a signal has not ended it; on Windows there is none."""
    if os.name == "nt":  # whose signals write to sockets only
        yield
        return
    hear, wake = os.pipe()
    os.set_blocking(wake, False)
    old = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        threading.Thread(target=_end_later, args=(hear, numbers), daemon=True).start()
        yield
    finally:
        signal.set_wakeup_fd(old)
        os.close(wake)


def _end_later(hear: int, numbers: tuple[int, ...]) -> None:
    """End the process PATIENCE seconds after one of the signals, if it still runs."""
    while heard := os.read(hear, 1):
        if heard[0] in numbers:
            time.sleep(PATIENCE)
            _end(heard[0])
    os.close(hear)

"""Output to a terminal: streams that may be closed, and the progress of long work."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class _Named(io.FileIO):
    """A file whose write errors name stdout."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from error


class _TolerantFile(io.FileIO):
    """A file that ignores write errors: messages to a terminal that was closed must not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def tolerant_stream(descriptor: int) -> io.TextIOWrapper:
    """A text stream to a file descriptor, written line by line, that ignores write errors.

    Example:
        >>> stream = tolerant_stream(os.open(os.devnull, os.O_WRONLY))
        >>> stream.write("message")
        7
        >>> stream.close()
    """
    raw = io.BufferedWriter(_TolerantFile(descriptor, "wb", closefd=False))
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
        encoding = sys.stdout.encoding if sys.stdout else "utf-8"
        sys.stdout = io.TextIOWrapper(raw, encoding, line_buffering=True)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = tolerant_stream(2)


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


# Seconds from one line to the next where there is no terminal: rare enough for the log of a night (ours).
EVERY = 30.0
#: Takes the completed share of a piece of work.
Progress = Callable[[float], None]


def no_progress(share: float) -> None:
    """Takes a share, and shows nothing."""


# What shows the work in progress, of a title; work inside of other work is shown by the same one. It gives a
# context with the function that takes the completed share.
_Display = Callable[[str], AbstractContextManager[Progress]]
_open: list[_Display | None] = []  # of the work in progress, the innermost last; None where it is not shown


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Progress]:
    """A context that shows on stderr how far its work has come and an estimate of the remaining time.

    On a terminal it is a bar, without colours where NO_COLOR is set; elsewhere, as in the log of a batch job,
    a line every 30 s. Inside another progress bar it is a line below that one, and is shown only if that one
    is.

    Args:
        title: the name of the work.
        quiet: whether to show nothing.

    Yields:
        A function that takes the completed share, from 0 to 1.

    Example:
        >>> with progress_bar("contour", quiet=True) as progress:
        ...     progress(0.5)
    """
    with contextlib.ExitStack() as stack:
        if _open:
            display = _open[-1]
        elif quiet:
            display = None
        elif sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            display = stack.enter_context(_bars())
        else:
            display = stack.enter_context(_lines())
        shown = None if quiet else display
        _open.append(shown)
        try:
            yield stack.enter_context(shown(title)) if shown else no_progress
        finally:
            _open.pop()


@contextlib.contextmanager
def _bars() -> Iterator[_Display]:
    """Bars of rich, which is imported here, as most jobs have no terminal."""
    from rich import progress
    from rich.console import Console

    @contextlib.contextmanager
    def work(title: str) -> Iterator[Progress]:
        task = bars.add_task(title, total=None)  # it only moves until the first share is known
        try:
            yield lambda share: bars.update(task, completed=share, total=1.0)
        finally:
            bars.remove_task(task)

    shown = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeRemainingColumn())
    columns = (progress.TextColumn("{task.description}"), *shown)
    # What is printed on stdout meanwhile goes past the bar on the same terminal, but unchanged into a pipe.
    both = sys.stdout.isatty()
    with progress.Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=both
    ) as bars:
        yield work


class _Work:
    """A piece of work: its title, its beginning on the monotonic clock, and the completed share."""

    def __init__(self, title: str) -> None:
        self.title, self.began, self.share = title, time.monotonic(), 0.0

    def update(self, share: float) -> None:
        self.share = share

    def __str__(self) -> str:
        passed = time.monotonic() - self.began
        if not 0 < self.share <= 1:
            return f"{self.title}: {duration(passed)} so far"
        return f"{self.title}: {self.share:.0%}, {duration(passed * (1 / self.share - 1))} left"


@contextlib.contextmanager
def _lines() -> Iterator[_Display]:
    """A line on stderr every EVERY seconds about the work in progress, the outermost first.

    A thread writes it, since a single step of the work may take long.
    """
    going: list[_Work] = []
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(EVERY):
            if now := tuple(
                going
            ):  # the time of work that does not know its share says no more than the last's
                words = [str(each) if each.share or each is now[-1] else each.title for each in now]
                print("; ".join(words), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def work(title: str) -> Iterator[Progress]:
        mine = _Work(title)
        going.append(mine)
        try:
            yield mine.update
        finally:
            going.remove(mine)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield work
    finally:
        ended.set()
        thread.join()


def portion(progress: Progress | None, first: float, last: float) -> Progress:
    """The progress of a part of some work, which takes the whole from the share ``first`` to ``last``.

    Example:
        >>> portion(print, 0.5, 1.0)(0.5)
        0.75
    """
    return (lambda share: progress(first + share * (last - first))) if progress else no_progress


def duration(seconds: float) -> str:
    """A time in words, to the unit that matters.

    Example:
        >>> duration(8.2), duration(75), duration(7300)
        ('8 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

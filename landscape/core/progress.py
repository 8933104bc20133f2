"""Output to a terminal: streams that may be closed, and the progress of long work."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from landscape.core.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")


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
# Seconds before a call from Python shows that it takes long: a user begins to wonder (ours).
DELAY = 2.0
#: Takes the completed share of a piece of work.
Progress = Callable[[float], None]
#: The argument of functions that may take long: a function that takes the completed share; None, to show it
#: after DELAY; or whether to show it.
ProgressOption = Progress | bool | None


def no_progress(share: float) -> None:
    """Takes a share, and shows nothing."""


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


# A place where progress is shown: called with the work that goes on, the outermost first, and at the end with
# none.
_Show = Callable[[tuple[_Work, ...]], None]


@contextlib.contextmanager
def _display(delay: float, hint: str) -> Iterator[list[_Work]]:
    """A list of work that a thread shows, since a single step of the work may take long."""
    terminal = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    place: Callable[[], _Show] = _Bars if terminal else _Cell if _in_notebook() else _Log
    first, every = (EVERY, EVERY) if place is _Log else (delay, 0.1 if terminal else 1.0)
    going, ended = list[_Work](), threading.Event()

    def run() -> None:
        show, wait = None, first
        while not ended.wait(wait):
            wait = every
            if now := tuple(going):
                if show is None:
                    show = place()
                    if hint and hint not in _said:
                        _said.add(hint)
                        print(hint, file=sys.stderr, flush=True)
                show(now)
        if show is not None:
            show(())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield going
    finally:
        ended.set()
        thread.join()


class _Bars:
    """Bars of rich on a terminal. It is imported here, as most jobs have no terminal."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console
        from rich.errors import LiveError

        shown = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeRemainingColumn())
        columns = (progress.TextColumn("{task.description}"), *shown)
        # What is printed on stdout meanwhile goes past the bar on the same terminal, unchanged into a pipe.
        both, console = sys.stdout.isatty(), Console(stderr=True)
        self._bars = progress.Progress(*columns, console=console, transient=True, redirect_stdout=both)
        self._tasks: dict[_Work, Any] = {}
        with contextlib.suppress(LiveError):  # before rich 14.1, beside a display of the user's program
            self._bars.start()

    def __call__(self, now: tuple[_Work, ...]) -> None:
        for ended in self._tasks.keys() - set(now):
            self._bars.remove_task(self._tasks.pop(ended))
        for work in now:
            if work not in self._tasks:  # a bar only moves until the first share is known
                self._tasks[work] = self._bars.add_task(work.title, total=None)
            if work.share:
                self._bars.update(self._tasks[work], completed=work.share, total=1.0)
        if not now:
            self._bars.stop()


def _line(now: tuple[_Work, ...]) -> str:
    # The time of work that does not know its share says no more than the last's.
    return "; ".join(str(each) if each.share or each is now[-1] else each.title for each in now)


class _Log:
    """A line on stderr each time, as in the log of a batch job."""

    def __call__(self, now: tuple[_Work, ...]) -> None:
        if now:
            print(_line(now), file=sys.stderr, flush=True)


class _Cell:
    """One line below the cell of a notebook, which is written over and empty at the end."""

    def __init__(self) -> None:
        display = importlib.import_module("IPython.display").display
        self._place = display({"text/plain": ""}, raw=True, display_id=True)

    def __call__(self, now: tuple[_Work, ...]) -> None:
        self._place.update({"text/plain": _line(now)}, raw=True)


def _in_notebook() -> bool:
    shell: Any = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


# The displays of the work in progress, the innermost last; None where it is not shown.
_open: list[list[_Work] | None] = []
_said: set[str] = set()  # the hints that were shown


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False, delay: float = 0.0, hint: str = "") -> Iterator[Progress]:
    """A context that shows on stderr how far its work has come and an estimate of the remaining time.

    On a terminal it is a bar, without colors where NO_COLOR is set; in a notebook a line below the cell;
    elsewhere, as in the log of a batch job, a line every 30 s. Inside another progress bar it is a line below
    that one, and is shown only if that one is.

    Args:
        title: the name of the work.
        quiet: whether to show nothing.
        delay: seconds before anything is shown.
        hint: a line that is shown once, with the first sight of the work.

    Yields:
        A function that takes the completed share, from 0 to 1.

    Example:
        >>> with progress_bar("contour", quiet=True) as progress:
        ...     progress(0.5)
    """
    work = _Work(title)
    with contextlib.ExitStack() as inside:
        going = None if quiet else _open[-1] if _open else inside.enter_context(_display(delay, hint))
        _open.append(going)
        inside.callback(_open.pop)
        if going is not None:
            going.append(work)
            inside.callback(going.remove, work)
        yield work.update


def shows_progress(hint: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for a public function with the keyword ``progress``, a :data:`ProgressOption`.

    Without that, a call that takes longer than DELAY shows how far it is; not inside of another that may, nor
    in other threads and processes than the first, nor where LANDSCAPE_PROGRESS is 0. The function itself gets
    a function that takes the share.

    Args:
        hint: the arguments that make a call shorter, which is said once.
    """

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__name__
        about = f"{name} takes long: {hint} makes it shorter; progress=False hides this" if hint else ""

        @functools.wraps(function)
        def shown(*args: P.args, **kwargs: P.kwargs) -> T:
            asked = kwargs.get("progress")
            if not (asked is None or isinstance(asked, bool) or callable(asked)):
                allowed = "it must be True, False or a function of the share"
                raise InputError(f"progress: {asked!r} is not allowed, {allowed}")
            quiet = callable(asked) or asked is False or (asked is None and _silent())
            with progress_bar(name, quiet, 0.0 if asked else DELAY, about) as report:
                kwargs["progress"] = asked if callable(asked) else report
                return function(*args, **kwargs)

        return shown

    return declare


def _silent() -> bool:
    """Say whether a call shows nothing unless it is asked to."""
    first = threading.current_thread() is threading.main_thread() and multiprocessing.parent_process() is None
    rank, switch = os.environ.get("RANK", "0"), os.environ.get("LANDSCAPE_PROGRESS", "1")
    return bool(_open) or not first or rank != "0" or switch == "0"


def portion(progress: ProgressOption, first: float, last: float) -> Progress:
    """The progress of a part of some work, which takes the whole from the share ``first`` to ``last``.

    Example:
        >>> portion(print, 0.5, 1.0)(0.5)
        0.75
    """
    whole = taken(progress)
    return lambda share: whole(first + share * (last - first))


def taken(progress: ProgressOption) -> Progress:
    """The function that takes the share: ``progress`` itself, or one that shows nothing."""
    return progress if callable(progress) else no_progress


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

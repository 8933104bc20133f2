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
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar

from landscape.core.files import TolerantFile

P = ParamSpec("P")
T = TypeVar("T")


class _Named(io.FileIO):
    """A file whose write errors name stdout."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from error


def tolerant_stream(descriptor: int) -> io.TextIOWrapper:
    """A text stream to a file descriptor, written line by line, that ignores write errors.

    Messages to a terminal that was closed must not end a run.

    Example:
        >>> stream = tolerant_stream(os.open(os.devnull, os.O_WRONLY))
        >>> stream.write("message")
        7
        >>> stream.close()
    """
    raw = io.BufferedWriter(TolerantFile(descriptor, "wb", closefd=False))
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


# Seconds between lines where there is no terminal: rare enough for the log of a night (our choice).
EVERY = 30.0
# Seconds before a call from Python shows that it takes long: a user begins to wonder (our choice).
DELAY = 2.0
#: Takes the completed share of a piece of work.
Progress = Callable[[float], None]
#: The argument of functions that may take long: a function that takes the completed share; None, to show it
#: after DELAY; or whether to show it.
ProgressOption = Annotated[Progress | bool | None, "True, False or a function of the share"]


def no_progress(share: float) -> None:
    """Takes a share, and shows nothing."""


class Bar(Protocol):
    """Takes the completed share of a piece of work, and words about it that are shown beside it."""

    def __call__(self, share: float, words: str = "") -> None: ...


class _Lines(io.TextIOBase):
    """A line on stderr for each state of a bar, as in the log of a batch job."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)


def _tqdm(title: str, delay: float) -> Any:
    """A bar of tqdm: on a terminal, in a notebook, or as lines; imported here, as most calls are short."""
    looks: dict[str, Any] = {"delay": delay, "dynamic_ncols": True}
    form = "{desc}: {percentage:3.0f}%|{bar}| {remaining} left{postfix}"
    if _in_notebook():
        with warnings.catch_warnings(action="ignore"):  # that the widgets are not installed
            kind = importlib.import_module("tqdm.auto").tqdm
    else:
        kind = importlib.import_module("tqdm").tqdm
        if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
            looks = {"delay": EVERY, "mininterval": EVERY, "position": 0, "file": _Lines()}
            form = "{desc}: {percentage:.0f}%, {remaining} left{postfix}"
    return kind(total=1.0, desc=title, leave=False, miniters=0, smoothing=0, bar_format=form, **looks)


def _in_notebook() -> bool:
    shell: Any = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


def aside() -> contextlib.AbstractContextManager[None]:
    """A context in which something can be printed on a terminal that has bars."""
    tqdm: Any = sys.modules.get("tqdm")
    return tqdm.tqdm.external_write_mode(file=sys.stderr) if tqdm else contextlib.nullcontext()


_open: list[bool] = []  # whether the work in progress is shown, the innermost last
_hints_shown: set[str] = set()


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False, delay: float = 0.0, hint: str = "") -> Iterator[Bar]:
    """A context that shows on stderr how far its work has come and an estimate of the remaining time.

    On a terminal and in a notebook it is a bar of tqdm; elsewhere, as in the log of a batch job, a line every
    30 s. Inside another progress bar it is one below that, and is shown only if that is.

    Args:
        title: the name of the work.
        quiet: whether to show nothing.
        delay: seconds before anything is shown.
        hint: the arguments that make the work shorter, for a line that is shown once, with its first sight.

    Yields:
        A function that takes the completed share, from 0 to 1.

    Example:
        >>> with progress_bar("contour", quiet=True) as progress:
        ...     progress(0.5)
    """
    visible, first = not quiet and all(_open[-1:]), list[tuple[float, float]]()
    _open.append(visible)
    try:
        with _tqdm(title, delay) if visible else contextlib.nullcontext() as bar:

            def update(share: float, words: str = "") -> None:
                if bar is None:
                    return
                bar.set_postfix_str(words, refresh=False)
                first[:] = first or [(time.monotonic(), share)]
                if (
                    bar.update(share - bar.n)
                    and first[0][1] < share < 1
                    and hint
                    and title not in _hints_shown
                ):
                    _hints_shown.add(title)
                    # The first report has the start of the work, too.
                    left = duration((time.monotonic() - first[0][0]) * (1 - share) / (share - first[0][1]))
                    line = f"{title}: about {left} more; {hint} makes it shorter; progress=False hides this"
                    with aside():
                        print(line, file=sys.stderr, flush=True)

            yield update
    finally:
        _open.pop()


def shows_progress(hint: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for a public function with the keyword ``progress``, a :data:`ProgressOption`.

    Where ``progress`` is not given, a call that takes longer than DELAY shows how far it is. It shows nothing
    inside another such call, in other threads and processes than the first, or where LANDSCAPE_PROGRESS is 0.
    The decorated function receives ``progress`` as a callable that takes the completed share, 0 to 1.

    Args:
        hint: the names of arguments that make a call shorter, for a message that is shown once.
    """

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def with_progress(*args: P.args, **kwargs: P.kwargs) -> T:
            option = kwargs.get("progress")
            # A function of the user's own shows the progress in place of the bar.
            quiet = callable(option) or option is False or (option is None and _silent())
            delay = 0.0 if option else DELAY
            with progress_bar(function.__name__, quiet, delay, hint) as report:
                kwargs["progress"] = option if callable(option) else report
                return function(*args, **kwargs)

        return with_progress

    return declare


def _silent() -> bool:
    """Return whether a call shows its progress only on request."""
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

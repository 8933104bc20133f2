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


class _StdoutFile(io.FileIO):
    """Standard output as a file; its write errors name stdout."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OSError(error.errno, error.strerror, "stdout") from error


def tolerant_stream(descriptor: int) -> io.TextIOWrapper:
    """Return a text stream to a file descriptor, written line by line, that ignores write errors.

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

    Otherwise the next file that is opened would get the descriptor of a closed stream, and with it the text
    for the terminal. Used once, at the start of a command.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        raw = io.BufferedWriter(_StdoutFile(1, "wb", closefd=False))
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


# Seconds between lines of progress without a terminal: rare enough for the log of a night (our choice).
EVERY = 30.0
# Seconds before a call from Python shows that it takes long: a user begins to wonder (our choice).
DELAY = 2.0
#: A function of the completed share of some work, from 0 to 1.
Progress = Callable[[float], None]
#: The parameter ``progress``: True (show), False (hide), None (show after DELAY), or a function that takes
#: the completed share.
ProgressOption = Annotated[Progress | bool | None, "True, False or a function of the share"]


def no_progress(share: float) -> None:
    """Ignore the completed share."""


class Bar(Protocol):
    """A function of the completed share, and of words that are shown next to it."""

    def __call__(self, share: float, words: str = "") -> None: ...


class _Lines(io.TextIOBase):
    """A file that writes each state of a bar as a line to stderr, as in the log of a batch job."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)


def _tqdm(title: str, delay: float) -> Any:
    """Return a bar of tqdm for a terminal or a notebook, or one that writes lines.

    It imports tqdm only here, as most calls are too short for a bar.
    """
    options: dict[str, Any] = {"delay": delay, "dynamic_ncols": True}
    line = "{desc}: {percentage:3.0f}%|{bar}| {remaining} left{postfix}"
    ipython: Any = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):  # in a notebook
        with warnings.catch_warnings(action="ignore"):  # tqdm warns if the widgets are not installed
            bar_class = importlib.import_module("tqdm.auto").tqdm
    else:
        bar_class = importlib.import_module("tqdm").tqdm
        if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
            options = {"delay": EVERY, "mininterval": EVERY, "position": 0, "file": _Lines()}
            line = "{desc}: {percentage:.0f}%, {remaining} left{postfix}"
    return bar_class(total=1.0, desc=title, leave=False, miniters=0, smoothing=0, bar_format=line, **options)


def aside() -> contextlib.AbstractContextManager[None]:
    """Return a context in which lines can be printed on a terminal that shows bars."""
    tqdm: Any = sys.modules.get("tqdm")
    return tqdm.tqdm.external_write_mode(file=sys.stderr) if tqdm else contextlib.nullcontext()


_visibility: list[bool] = []  # for each open progress bar, whether it is shown; the innermost comes last
_hints_shown: set[str] = set()


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False, delay: float = 0.0, hint: str = "") -> Iterator[Bar]:
    """Return a context that shows on stderr which share of its work is done, and the estimated time left.

    A terminal or a notebook shows a bar of tqdm; the log of a batch job gets a line every 30 s. A bar inside
    another bar is shown below the outer one, and is hidden if the outer one is hidden.

    Args:
        title: the name of the work.
        quiet: whether to show nothing.
        delay: seconds before anything is shown.
        hint: the arguments that make the work shorter. A line with them is printed once for each title.

    Yields:
        A function of the completed share, from 0 to 1.

    Example:
        >>> with progress_bar("contour", quiet=True) as progress:
        ...     progress(0.5)
    """
    # Empty, or one item: (time, share) of the first report. The time before it includes preparations, and is
    # not used to estimate the time left.
    first_report = list[tuple[float, float]]()
    is_shown = not quiet and (not _visibility or _visibility[-1])
    _visibility.append(is_shown)
    try:
        with _tqdm(title, delay) if is_shown else contextlib.nullcontext() as bar:

            def update(share: float, words: str = "") -> None:
                """Show the completed share, and ``words`` next to it."""
                if bar is None:
                    return
                bar.set_postfix_str(words, refresh=False)
                now = time.monotonic()
                if not first_report:
                    first_report.append((now, share))
                first_time, first_share = first_report[0]
                is_drawn = bar.update(share - bar.n)
                if is_drawn and first_share < share < 1 and hint and title not in _hints_shown:
                    _hints_shown.add(title)
                    seconds_left = (now - first_time) * (1 - share) / (share - first_share)
                    remaining = duration(seconds_left)
                    line = f"about {remaining} more; {hint} makes it shorter; progress=False hides this"
                    with aside():
                        print(f"{title}: {line}", file=sys.stderr, flush=True)

            yield update
    finally:
        _visibility.pop()


def shows_progress(hint: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for a public function with the keyword ``progress``, a :data:`ProgressOption`.

    Without ``progress``, a call that takes longer than DELAY shows its progress; but not inside another such
    call, outside of the main thread and process, or with the environment variable LANDSCAPE_PROGRESS=0.
    The decorated function receives as ``progress`` a function of the completed share, from 0 to 1.

    Args:
        hint: the names of arguments that make a call shorter, for a message that is shown once.
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def with_progress(*args: P.args, **kwargs: P.kwargs) -> T:
            option = kwargs.get("progress")
            # With a function of the user there is no bar.
            quiet = callable(option) or option is False or (option is None and _silent())
            delay = 0.0 if option else DELAY
            with progress_bar(function.__name__, quiet, delay, hint) as report:
                kwargs["progress"] = option if callable(option) else report
                return function(*args, **kwargs)

        return with_progress

    return decorator


def _silent() -> bool:
    """Return whether a call without the argument ``progress`` shows none."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_main_process = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    is_first = is_main_thread and is_main_process and not _visibility
    return not is_first or os.environ.get("LANDSCAPE_PROGRESS", "1") == "0"


def portion(progress: ProgressOption, first: float, last: float) -> Progress:
    """Return the progress function of a step that takes the whole work from share ``first`` to ``last``.

    Example:
        >>> portion(print, 0.5, 1.0)(0.5)
        0.75
    """
    report = reporter(progress)
    return lambda share: report(first + share * (last - first))


def reporter(progress: ProgressOption) -> Progress:
    """Return ``progress`` if it is a function, else a function that does nothing."""
    return progress if callable(progress) else no_progress


def duration(seconds: float) -> str:
    """Return a time as a text, in one or two units.

    Example:
        >>> duration(8.2), duration(75), duration(7300)
        ('8 s', '1 min 15 s', '2 h 1 min')
    """
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"

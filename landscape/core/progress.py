"""Progress bars, also nested; shown on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_open: list[Progress | None] = []  # the bars in use, the innermost last; None for one that is not shown


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A context with a progress bar that shows an estimate of the remaining time.

    Inside another progress bar it is a line below that one, and is shown only if that one is.

    Args:
        title: the text to the left of the bar.
        quiet: whether to show nothing.

    Yields:
        A function that takes the completed share, from 0 to 1.

    Example:
        >>> with progress_bar("contour", quiet=True) as progress:
        ...     progress(0.5)
    """
    outer = _open[-1] if _open else None
    if quiet or not sys.stderr.isatty() or (_open and outer is None):
        _open.append(None)
        try:
            yield lambda share: None
        finally:
            _open.pop()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = outer or Progress(*columns, console=Console(stderr=True), transient=True)
    with contextlib.nullcontext() if outer else bar:
        task = bar.add_task(title, total=1.0)
        _open.append(bar)
        try:
            yield lambda share: bar.update(task, completed=share)
        finally:
            _open.pop()
            bar.remove_task(task)

"""Progress bars: on a terminal only, and one inside another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_open: list[Progress | None] = []  # the innermost last; None where nothing is to be shown


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A bar with the time left; what it yields takes the share done, 0…1.

    Inside another it is a line under that one, and not shown where that one is not.
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

"""Figures that show themselves and are not in pyplot's list; pictures drawn into axes of a user's."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.figure import Figure

from landscape.core.errors import FailedError, InputError

_GIVEN: ContextVar[Axes | None] = ContextVar("axes that pictures are drawn into", default=None)


class Picture(Figure):
    """A figure that a notebook shows as the value of a cell, and a script by ``show()``.

    It is none of pyplot's, which keeps those that it makes until they are closed.
    """

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()

    def show(self, warn: bool = True) -> None:
        """Show it: in a notebook, or in a window until that is closed.

        FailedError where there is neither, as on a machine without a screen.
        """
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is not None and hasattr(shell, "kernel"):
            ipython.display.display(self)  # type: ignore[union-attr]
            return
        from matplotlib import pyplot  # only here: it looks for a screen

        window = pyplot.figure(figsize=self.get_size_inches())  # pyplot's, with a window where there are any
        number = int(window.number)
        try:
            manager = window.canvas.manager
            if manager is None or type(manager).show is FigureManagerBase.show:
                raise FailedError(
                    "show: there is no window to show a picture in; write it to a file by plot(path=…)"
                )
            manager.canvas.figure = self
            self.set_canvas(manager.canvas)
            pyplot.show()
        finally:
            pyplot.close(number)


class _Inside:
    """What a drawing does to its figure, done to one pair of axes in a figure of a user's."""

    def __init__(self, ax: Axes) -> None:
        self.ax = ax

    def suptitle(self, text: str) -> None:
        title = self.ax.get_title()
        self.ax.set_title("\n".join(filter(None, (text, title))))

    def legend(self, *entries: Any, **options: Any) -> None:
        self.ax.legend(*entries, **{k: v for k, v in options.items() if k != "loc"})

    def colorbar(self, mappable: Any, ax: Any, **options: Any) -> Any:
        return self.ax.get_figure().colorbar(mappable, ax=self.ax, **options)  # type: ignore[union-attr]


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Any]]:
    """A figure of ``rows`` × ``columns`` axes, each ``width`` × ``height`` inches; or the axes given."""
    given = _GIVEN.get()
    if given is None:
        figure = Picture(figsize=(width * columns, height * rows))
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        return figure, list(axes.ravel())
    if rows * columns != 1:
        raise InputError(f"ax: this picture has {rows} × {columns} panels, axes hold one; leave ax out")
    wanted = (options.get("subplot_kw") or {}).get("projection", "rectilinear")
    if given.name != wanted:
        raise InputError(f"ax: its projection is '{given.name}', this picture needs '{wanted}'")
    return cast(Figure, _Inside(given)), [given]


def several(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Any]]:
    """A figure of ``count`` axes, each ``width`` × ``height`` inches: three a row, but four two by two."""
    columns = 2 if count == 4 else min(3, count)
    figure, axes = panels(-(-count // columns), columns, width, height, **options)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


@contextlib.contextmanager
def into(ax: Axes | None) -> Iterator[None]:
    """Pictures made inside the block are drawn into ``ax``; None: into figures of their own."""
    token = _GIVEN.set(ax)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def inside() -> bool:
    """Whether pictures are drawn into axes of a user's."""
    return _GIVEN.get() is not None


def splits(results: Sequence[Any]) -> str:
    """The split that ``results`` are of, or all of them: "train", "train and test", or "data" if unknown."""
    return " and ".join(dict.fromkeys(r.split for r in results if r.split)) or "data"


def loss_of(results: Sequence[Any]) -> str:
    """What the numbers of ``results`` are of: "train loss", or "loss" where the split is not known."""
    return f"{splits(results)} loss" if any(r.split for r in results) else "loss"

"""Figures with panels: shown by notebooks and by ``show()``, or drawn into axes that the user gives."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from landscape.core.errors import InputError, OperationError

# Characters of a title in an inch of a picture, at the size that style.mplstyle gives it.
TITLE_CHARACTERS = 8.8
# The caption's size in points, the height of its lines in inches, and characters in an inch of them.
CAPTION_SIZE, CAPTION_LINE, CAPTION_CHARACTERS = 8.5, 0.155, 15.5
_GIVEN: ContextVar[Axes | None] = ContextVar("axes that pictures are drawn into", default=None)


class Picture(Figure):
    """A figure that a notebook shows as the value of a cell, and a script by ``show()``.

    pyplot does not know it: pyplot keeps its own figures in memory until they are closed.
    """

    _caption: Text | None = None
    _caption_text, _caption_height = "", 0.0

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()

    def savefig(self, *arguments: Any, **options: Any) -> None:
        """As in matplotlib; panels of a fixed aspect get the room of their labels only in a second layout."""
        engine = self.get_layout_engine()
        if engine is not None and any(ax.get_aspect() != "auto" for ax in self.axes):
            engine.execute(self)
        super().savefig(*arguments, **options)

    def set_caption(self, text: str) -> None:
        """Put ``text`` below everything else; the figure becomes higher by what it takes.

        Args:
            text: it is broken into lines. In place of an earlier caption; "" removes that one. Legends of the
                figure stand above it; they must be there already.
        """
        width, height = self.get_size_inches()
        height -= self._caption_height
        lines = textwrap.wrap(text, int(CAPTION_CHARACTERS * width), break_on_hyphens=False)
        self._caption_text, self._caption_height = text, CAPTION_LINE * len(lines) + 0.08 * bool(lines)
        self.set_size_inches(width, height + self._caption_height)
        share = self._caption_height / (height + self._caption_height)
        if self._caption is not None:
            self._caption.remove()
        self._caption = self.text(
            0.06 / width, 0.04 / height, "\n".join(lines), ha="left", va="bottom", fontsize=CAPTION_SIZE,
            color="#444444", linespacing=1.25, in_layout=False,
        )  # fmt: skip
        # matplotlib's layout leaves room for a legend, but only for one at the very edge of the figure.
        renderer: Any = RendererAgg(self.bbox.width, self.bbox.height, self.dpi)  # type: ignore[no-untyped-call]
        below = share
        for legend in self.legends:
            legend.set_bbox_to_anchor((0, share, 1, 1 - share), transform=self.transFigure)
            taken = legend.get_window_extent(renderer).height / self.bbox.height
            below = max(below, share + taken + 0.1 / self.get_size_inches()[1])
        engine = self.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):
            engine.set(rect=(0, below, 1, 1 - below))

    def suptitle(self, t: str, **options: Any) -> Text:
        """As in matplotlib, with lines broken where the picture ends."""
        wrapper = textwrap.TextWrapper(
            int(TITLE_CHARACTERS * self.get_size_inches()[0]), break_on_hyphens=False
        )

        # A formula is not broken: its dollar signs must stay on one line.
        lines = [line if "$" in line else wrapper.fill(line) for line in t.split("\n")]
        return super().suptitle("\n".join(lines), **options)

    def get_caption(self) -> str:
        """The text below the figure; "" for none."""
        return self._caption_text

    def show(self, warn: bool = True) -> None:
        """Show the figure in a notebook, or in a window until the window is closed.

        Args:
            warn: not used; matplotlib's own method has it.

        Raises:
            OperationError: there is neither a notebook nor a screen.
        """
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is not None and hasattr(shell, "kernel"):
            ipython.display.display(self)  # type: ignore[union-attr]
            return
        from matplotlib import pyplot  # only here: importing it looks for a screen

        window = pyplot.figure(figsize=self.get_size_inches())  # pyplot's figure brings the window
        number = int(window.number)
        try:
            manager = window.canvas.manager
            if manager is None or type(manager).show is FigureManagerBase.show:
                raise OperationError("show: there is no window for a picture; write a file by plot(path=…)")
            manager.canvas.figure = self
            self.set_canvas(manager.canvas)
            pyplot.show()
        finally:
            pyplot.close(number)


class _GivenAxes:
    """Stands in for the figure of a drawing: titles, legends and colour bars go to the axes of the user."""

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
    """A figure of ``rows`` × ``columns`` axes, or the axes that the user gave (see :func:`drawn_into`).

    Args:
        width, height: size of one panel in inches.
        options: passed to matplotlib's ``Figure.subplots``.

    Returns:
        (figure, axes row by row).

    Raises:
        InputError: the user gave axes for a picture of several panels, or axes of another projection.
    """
    given = _GIVEN.get()
    if given is None:
        figure = Picture(figsize=(width * columns, height * rows))
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        return figure, list(axes.ravel())
    if rows * columns != 1:
        raise InputError(f"ax: this picture has {rows} × {columns} panels, axes hold one; leave ax out")
    projection = (options.get("subplot_kw") or {}).get("projection", "rectilinear")
    if given.name != projection:
        raise InputError(f"ax: its projection is '{given.name}', this picture needs '{projection}'")
    return cast(Figure, _GivenAxes(given)), [given]


def wrapped_panels(
    count: int, width: float, height: float, columns: int = 3, **options: Any
) -> tuple[Figure, list[Any]]:
    """A figure of ``count`` axes, at most ``columns`` a row, but 4 not as 3 and 1; else as :func:`panels`."""
    figure, axes, _ = stacked_panels(count, width, (height,), columns, **options)
    return figure, axes


def stacked_panels(
    count: int, width: float, heights: Sequence[float], columns: int = 3, **options: Any
) -> tuple[Figure, list[Any], list[Any]]:
    """``count`` panels as :func:`wrapped_panels` places them, each with another one below it.

    Args:
        heights: of a panel and, if there is a second one, of that below it, in inches. Axes that the user
            gave have none below.

    Returns:
        (figure, panels, those below them or []).
    """
    heights = heights[:1] if has_given_axes() else heights
    across = 2 if (count, columns) == (4, 3) else min(columns, count)
    rows, kinds = -(-count // across), len(heights)
    ratios = {"height_ratios": [*heights] * rows}
    figure, axes = panels(kinds * rows, across, width, sum(heights) / kinds, gridspec_kw=ratios, **options)
    placed = [[ax for k, ax in enumerate(axes) if k // across % kinds == kind] for kind in range(kinds)]
    for unused in [ax for group in placed for ax in group[count:]]:
        unused.set_visible(False)
    return figure, placed[0][:count], placed[1][:count] if kinds == 2 else []


def finish(
    figure: Figure, title: str, text: str | None = None, legend: Sequence[Axes] = (), **options: Any
) -> Figure:
    """End a drawing: a legend below all panels, a title, and a caption.

    Args:
        text: the caption; None for none.
        legend: the panels whose entries the legend has.
        options: of the legend, passed to matplotlib.

    Returns:
        ``figure``.
    """
    shared_legend(figure, legend, **options)
    figure.suptitle(title)
    if text is not None:
        caption(figure, text)
    return figure


def caption(figure: Figure, text: str) -> None:
    """Put ``text`` below ``figure``; axes that the user gave have no caption."""
    if isinstance(figure, Picture):
        figure.set_caption(text)


def shared_legend(figure: Figure, axes: Sequence[Axes], **options: Any) -> None:
    """Put one legend for all panels below them; entries of the same name appear once.

    Args:
        options: passed to matplotlib's ``Figure.legend``; in 4 columns by default, or 2 if names are long.
    """
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(str(name), handle)
    if entries:
        usual = {"loc": "outside lower center", "ncols": 2 if max(map(len, entries)) > 20 else 4}
        figure.legend(list(entries.values()), list(entries), **(usual | options))


def points(
    ax: Axes, x: Any, y: Any, error: Any, color: Any, label: str | None = None, **options: Any
) -> None:
    """Points with error bars.

    Args:
        error: half the lengths of the bars along y; None with ``xerr``.
        options: passed to matplotlib's ``Axes.errorbar``.
    """
    usual: dict[str, Any] = {"marker": "o", "ls": "none", "capsize": 3}
    ax.errorbar(x, y, error, color=color, label=label, **(usual | options))


def categories(ax: Axes, names: Sequence[str]) -> None:
    """Name the places 0, 1, … along x, each part of a name in a line, with no grid lines."""
    ax.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    ax.grid(False, axis="x")


@contextlib.contextmanager
def drawn_into(ax: Axes | None) -> Iterator[None]:
    """A context in which pictures are drawn into ``ax``; None: into figures of their own."""
    token = _GIVEN.set(ax)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def has_given_axes() -> bool:
    """Whether pictures are drawn into axes that the user gave."""
    return _GIVEN.get() is not None

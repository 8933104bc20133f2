"""Figures with panels: shown by notebooks and by ``show()``, or drawn into axes that the user gives."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib import rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import LogFormatterSciNotation
from matplotlib.transforms import ScaledTranslation

from landscape.core.errors import InputError, OperationError
from landscape.core.options import choose
from landscape.plots.style import DARK, LABEL, decimal_labels, numbered, style

# Characters in an inch of a text, times its size in points: of a title, which is never cut, and of others.
TITLE_CHARACTERS, CHARACTERS = 122, 132
# The caption's size in points, the height of its lines in inches, and the largest length of its text in
# inches: five lines of a page (our choice: a page or a table says the rest).
CAPTION_SIZE, CAPTION_LINE, CAPTION_LENGTH = 8.5, 0.155, 52.5
Names = Sequence[str]
# In a picture for a paper (our choice): the smallest width and the smallest height of a panel, relative to
# its usual size; in inches, the height below which no panel is made lower, and the largest picture height.
MIN_WIDTH_SHARE, MIN_HEIGHT_SHARE, MIN_HEIGHT, MAX_PICTURE_HEIGHT = 0.5, 0.65, 1.9, 8.5
# The metadata of a file that have the caption, by its format.
METADATA = {"pdf": "Subject", "png": "Description", "svg": "Description"}
# The parts around the panels of a picture that can be changed or left out.
VISUALS = ("title", "panel_titles", "legend", "colorbar", "caption")


class Picture(Figure):
    """A figure that a notebook shows as the value of a cell, and a script by ``show()``.

    pyplot does not know it: pyplot keeps its own figures in memory until they are closed.

    Attributes:
        axes_by_name: the axes of each panel, such as "surface" and "profile"; "surface 0", "surface 1" and so
            on where there are several of a kind.
    """

    axes_by_name: Mapping[str, Axes] = {}
    _caption: Text | None = None
    _caption_text, _caption_height = "", 0.0
    # For the file's metadata, also if the picture leaves them out.
    _metadata_title, _metadata_caption = "", ""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save as matplotlib does; the file's metadata have the title and the caption."""
        engine = self.get_layout_engine()
        if engine is not None and any(ax.get_aspect() != "auto" for ax in self.axes):
            engine.execute(self)  # panels of a fixed aspect get room for labels only in a second layout
        name = METADATA.get(options.get("format") or Path(str(fname)).suffix[1:])
        if name and (self._metadata_title or self._metadata_caption):
            options.setdefault("metadata", {"Title": self._metadata_title, name: self._metadata_caption})
        super().savefig(fname, **options)

    def set_caption(self, text: str, **options: Any) -> None:
        """Put ``text`` below everything else, and make the figure higher by the height of the caption.

        Call this method after the figure has its legends, which are above the caption.

        Args:
            text: the caption, which replaces an earlier one; "" removes it. A caption has at most five lines
                in a picture as wide as a page, and more lines in a narrower one. Sentences at its end that
                have no room are left out.
            options: properties of matplotlib's ``Text``.
        """
        width, previous_height = self.get_size_inches()
        inner_height = previous_height - self._caption_height  # without a caption
        # A caption that is removed from the picture stays in the file's metadata.
        self._metadata_caption = text or self._metadata_caption
        lines = _caption_lines(text, width)
        self._caption_text = " ".join(lines)
        self._caption_height = CAPTION_LINE * len(lines) + 0.08 if lines else 0.0
        height = inner_height + self._caption_height
        self.set_size_inches(width, height)
        if self._caption is not None:
            self._caption.remove()
        look = {"fontsize": CAPTION_SIZE, "color": DARK, "linespacing": 1.25, "in_layout": False}
        # 0.06 inches from the left edge, and 0.04 · height / inner_height inches from the lower edge.
        self._caption = self.text(0.06 / width, 0.04 / inner_height, formulas("\n".join(lines)), va="bottom")
        self._caption.set(**look | options)
        # matplotlib leaves room for legends only if they are at the edge of the figure. Here the caption is
        # at the edge and the legends are above it: set the room, in shares of the figure's height.
        caption_share = self._caption_height / height
        share_below_panels = caption_share
        for legend in self.legends:
            box = (0, caption_share, 1, 1 - caption_share)
            legend.set_bbox_to_anchor(box, transform=self.transFigure)
            legend_share = self.extent(legend).height / self.bbox.height
            # with a gap of 0.1 inches
            share_below_panels = max(share_below_panels, caption_share + legend_share + 0.1 / height)
        engine = self.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):
            engine.set(rect=(0, share_below_panels, 1, 1 - share_below_panels))

    def suptitle(self, t: str, **options: Any) -> Text:
        """Set the title as matplotlib does, with lines broken where the picture ends."""
        self._metadata_title = t or self._metadata_title
        title = super().suptitle(t, **options)
        width = int(TITLE_CHARACTERS / float(title.get_fontsize()) * self.get_figwidth())
        title.set_text(formulas(wrapped(t, width)))
        return title

    def extent(self, artist: Any) -> Any:
        """Return the box of pixels around ``artist``."""
        renderer: Any = RendererAgg(self.bbox.width, self.bbox.height, self.dpi)  # type: ignore[no-untyped-call]
        return artist.get_window_extent(renderer)

    def get_caption(self) -> str:
        """Return the text below the figure; "" for none."""
        return self._caption_text

    def show(self, warn: bool = True) -> None:
        """Show the figure in a notebook, or in a window until the window is closed.

        Args:
            warn: not used; matplotlib's ``Figure.show`` has this parameter.

        Raises:
            OperationError: there is neither a notebook nor a screen.
        """
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is not None and hasattr(shell, "kernel"):
            ipython.display.display(self)  # type: ignore[union-attr]
            return
        from matplotlib import pyplot  # only here: importing it looks for a screen

        # pyplot opens windows only for its own figures: this figure takes the window of an empty one.
        empty_figure = pyplot.figure(figsize=self.get_size_inches())
        number = int(empty_figure.number)
        try:
            manager = empty_figure.canvas.manager
            # Without a screen, the manager does not override ``show``.
            if manager is None or type(manager).show is FigureManagerBase.show:
                raise OperationError("show: there is no window for a picture; write a file by plot(path=…)")
            manager.canvas.figure = self
            self.set_canvas(manager.canvas)
            pyplot.show()
        finally:
            pyplot.close(number)


class UserAxes:
    """The axes of the user that a picture is drawn into. A drawing function uses this object as its figure.

    The title, the legend and the color bars go to these axes. Other panels are drawn, but not shown.

    Args:
        ax: axes for the one panel of a picture.
        axes: axes for panels by name.

    Raises:
        InputError: both are given.
    """

    def __init__(self, ax: Axes | None, axes: Mapping[str, Axes]) -> None:
        if ax is not None and axes:
            raise InputError("ax, axes: only one of the two is allowed")
        self.where, self.requested = ("axes", axes) if ax is None else ("ax", {"": ax})
        self.axes: dict[str, Axes] = {}
        self.title = ""
        self.legends: list[Any] = []
        self.bars: list[Any] = []

    def take(self, picture: Picture, side_panels: Sequence[str]) -> list[Any]:
        """Return the axes to draw into, one for each panel of ``picture``, in the order of the panels.

        They are the user's axes for panels that the user has named, and the axes of ``picture`` for others.
        With ``ax``, the user's axes are for the one panel that is not in ``side_panels``.

        Args:
            picture: the picture, which has its panels already.
            side_panels: names of the panels besides the main panel.

        Raises:
            InputError: ``ax`` for a picture of several panels, an unknown name of a panel, or axes whose
                projection is not that of the panel.
        """
        user_axes: dict[str, Any] = dict(self.requested)
        self.picture, picture_axes = picture, picture.axes_by_name
        if self.where == "ax":
            main_panels = [name for name in picture_axes if name not in side_panels]
            if len(main_panels) > 1:
                raise InputError(f"ax: several panels; give axes={{NAME: …}} of {', '.join(picture_axes)}")
            user_axes = {main_panels[0]: user_axes[""]}  # "" is the key of ``ax`` in ``requested``
        for name, ax in user_axes.items():
            choose(self.where, name, picture_axes)
            projection = picture_axes[name].name
            if not isinstance(ax, Axes) or ax.name != projection:
                why = f"its projection is '{ax.name}'" if isinstance(ax, Axes) else f"{ax!r} is not allowed"
                raise InputError(f"{self.where}: {why}, it must be axes with '{projection}'")
            # If the x label has matplotlib's default size, texts get the sizes of our pictures.
            if ax.xaxis.label.get_fontsize() == rcParamsDefault["font.size"]:
                ax.tick_params(labelsize=rcParams["xtick.labelsize"])
                ax.title.set_fontsize(rcParams["axes.titlesize"])
                ax.xaxis.label.set_fontsize(rcParams["axes.labelsize"])
                ax.yaxis.label.set_fontsize(rcParams["axes.labelsize"])
        self.axes = user_axes
        return [user_axes.get(name, ax) for name, ax in picture_axes.items()]

    def get_figure(self) -> Figure:
        """Return the figure of the axes."""
        return cast(Figure, next(iter(self.axes.values())).get_figure())

    def suptitle(self, text: str) -> None:
        self.title = text

    def legend(self, handles: Sequence[Any], names: Names) -> None:
        ax = next(iter(self.axes.values()))
        options: dict[str, Any] = {"frameon": True}
        if ax.get_aspect() != "auto":  # a map, which a legend inside would hide
            below = ax.transAxes + ScaledTranslation(0, -0.45, ax.figure.dpi_scale_trans)
            options = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
        inches = ax.get_window_extent().width / ax.figure.dpi
        line_length = max(8, int(inches * CHARACTERS / float(rcParams["legend.fontsize"])) - 6)
        names = [wrapped(name, line_length) for name in names]
        self.legends.append(ax.legend(handles, names, **options))

    def colorbar(self, mappable: Any, ax: Any, **options: Any) -> Any:
        user_axes = [candidate for candidate in np.ravel(ax) if candidate in self.axes.values()]
        if not user_axes:
            return self.picture.colorbar(mappable, ax=ax, **options)
        bar = user_axes[0].get_figure().colorbar(mappable, ax=user_axes, **options)
        self.bars.append(bar.ax)
        return bar

    def visual_artists(self, is_visible: Mapping[str, bool]) -> dict[str, list[Any]]:
        """Write the picture's title above the first panel's, and return the artists of each of ``VISUALS``.

        Args:
            is_visible: name of ``VISUALS`` -> whether it is kept; a name that is missing is kept.
        """
        has_title, has_panel_titles = is_visible.get("title", True), is_visible.get("panel_titles", True)
        titles = [ax.title for ax in self.axes.values()]
        lines = [self.title if has_title else "", titles[0].get_text() if has_panel_titles else ""]
        titles[0].set_text("\n".join(filter(None, lines)))
        title, panel_titles = titles[:1] if has_title else [], titles if has_panel_titles else titles[1:]
        return {"title": title, "panel_titles": panel_titles, "legend": self.legends, "colorbar": self.bars}


# The user's axes that pictures are drawn into, or the width of a picture for a paper in inches; None without
# either.
_AXES_OR_WIDTH: ContextVar[UserAxes | float | None] = ContextVar("axes_or_width", default=None)


def change_visuals(figure: Figure | UserAxes, visuals: Mapping[str, Any]) -> None:
    """Leave out or change titles, legends, color bars and the caption of a finished drawing.

    Args:
        visuals: the keys are names of ``VISUALS``. A value is False to leave the part out, True to keep it,
            or a dict of properties for matplotlib's ``Artist.set``.

    Raises:
        InputError: an unknown name, or a property that the artist does not have.
    """
    for name, value in visuals.items():
        choose("visuals", name, VISUALS)  # refuses an unknown name
        if not isinstance(value, (bool, Mapping)):
            raise InputError(f"visuals: '{name}': {value!r} is not allowed, it must be a bool or a dict")
    properties = {name: value for name, value in visuals.items() if isinstance(value, Mapping)}
    is_visible = {name: value is not False for name, value in visuals.items()}
    # With the user's axes, the picture's title and the first panel's title are one text. ``visual_artists``
    # also writes this text, from those of the two titles that ``is_visible`` keeps.
    artists = figure.visual_artists(is_visible) if isinstance(figure, UserAxes) else _visual_artists(figure)
    try:  # ``name`` is the changed part, for the message
        for name in visuals:
            for artist in artists.get(name, ()):
                if is_visible[name]:
                    artist.set(**properties.get(name, {}))
                elif isinstance(artist, Text):
                    artist.set_text("")
                else:  # a legend; or the axes of a color bar, which is removed as a whole
                    getattr(artist, "_colorbar", artist).remove()
        if isinstance(figure, Picture) and visuals:  # placed again: its position depends on the legends
            name = "caption"
            caption_text = figure.get_caption() if is_visible.get("caption", True) else ""
            figure.set_caption(caption_text, **properties.get("caption", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"visuals: '{name}': {error}, give properties of matplotlib's Artist.set") from error


def _visual_artists(figure: Figure) -> dict[str, list[Any]]:
    """Return the artists of each of ``VISUALS`` except for the caption."""
    title = getattr(figure, "_suptitle", None)
    return {
        "title": [title] if title else [],
        "panel_titles": [ax.title for ax in figure.axes],
        "legend": [*figure.legends, *filter(None, (ax.get_legend() for ax in figure.axes))],
        "colorbar": [ax for ax in figure.axes if hasattr(ax, "_colorbar")],
    }


def _caption_lines(text: str, width: float) -> list[str]:
    """Return the lines of a caption in a picture of ``width`` inches.

    They have all sentences that have room, and at least the start of the first.
    """
    characters, most_lines = int(CHARACTERS / CAPTION_SIZE * width), max(5, round(CAPTION_LENGTH / width))
    sentences = re.split(r"(?<=\.) (?=[A-Z])", text)
    while len(sentences) > 1 and len(textwrap.wrap(" ".join(sentences), characters)) > most_lines:
        sentences.pop()
    limits: dict[str, Any] = {"max_lines": most_lines, "placeholder": " …", "break_on_hyphens": False}
    return textwrap.wrap(" ".join(sentences), characters, **limits)


def formulas(text: str) -> str:
    """Return ``text`` with its w_a, α_e, λ_max and the like as formulas, if it has none of its own."""
    return text if "$" in text else re.sub(r"(\bw|[αλω])_(a|e|max|min)\b", r"$\1_{\2}$", text)


def wrapped(text: str, width: int) -> str:
    """Wrap each line of ``text`` at ``width`` characters, except for lines with formulas between dollars."""
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False)
    return "\n".join(line if "$" in line else wrapper.fill(line) for line in text.split("\n"))


def panels(
    rows: int, columns: int, width: float, height: float, names: Names = (), beside: Names = (),
    **options: Any,
) -> tuple[Figure, list[Any]]:  # fmt: skip
    """Make a figure of ``rows`` × ``columns`` panels; the user's axes, if there are any, replace the panels.

    If the user has chosen the width of the picture, panels become smaller, and a row may have fewer panels.
    If the user has given axes, the object returned as the figure sets title, legend and color bars there.

    Args:
        width, height: size of one panel in inches.
        names: names of the panels, row by row; "" for an empty cell. Default: "panel", or "panel 0", "panel
            1" and so on.
        beside: names of the panels beside or below the main panel. They are not shown if the user gives
            ``ax``, which is for the main panel.
        options: passed to matplotlib's ``Figure.subplots``.

    Returns:
        (figure, axes row by row, without empty cells).

    Raises:
        InputError: axes of the user are for other panels, or have another projection.
    """
    names = [*(names or numbered("panel", rows * columns))]
    axes_or_width = _AXES_OR_WIDTH.get()
    if isinstance(axes_or_width, float):  # the width of the picture
        # The width of a panel in a row of ``columns`` panels, relative to its usual width. The height follows
        # this share, also if ``fewer_columns`` makes the panel wider.
        width_share = axes_or_width / width / columns
        # Two lower limits of the height: MIN_HEIGHT_SHARE of the usual height, and MIN_HEIGHT inches.
        height_share = min(max(width_share, MIN_HEIGHT_SHARE), 1.0)
        height = max(height * height_share, min(height, MIN_HEIGHT))
        fewer_columns = fitting_columns(columns, width)
        if fewer_columns < columns:
            columns = fewer_columns
            names = [name for name in names if name]
            rows = -(-len(names) // columns)  # rounded up
            names += [""] * (rows * columns - len(names))
        width = axes_or_width / columns
        height = min(height, MAX_PICTURE_HEIGHT / rows)
    figure = Picture(figsize=(width * columns, height * rows))
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for name, ax in zip(names, axes, strict=True):
        ax.set_visible(bool(name))
    figure.axes_by_name = {name: ax for name, ax in zip(names, axes, strict=True) if name}
    if isinstance(axes_or_width, UserAxes):  # has the methods of a figure that drawing functions call
        return cast(Figure, axes_or_width), axes_or_width.take(figure, beside)
    return figure, list(figure.axes_by_name.values())


def fitting_columns(columns: int, width: float) -> int:
    """Return the number of panels in a row, at most ``columns``, with half of ``width`` or more."""
    picture_width = _AXES_OR_WIDTH.get()
    if not isinstance(picture_width, float):
        return columns
    return max(1, min(columns, int(picture_width / width / MIN_WIDTH_SHARE)))


def in_paper() -> bool:
    """Return whether panels are drawn for a paper: into the user's axes, or at a width of the user."""
    return _AXES_OR_WIDTH.get() is not None


def labeled_axes(axes: Sequence[Any], position: str = "first_col") -> Sequence[Any]:
    """Return the axes that have labels: those in the first column or last row; all axes of the user."""
    if isinstance(_AXES_OR_WIDTH.get(), UserAxes):
        return axes
    return [ax for ax in axes if getattr(ax.get_subplotspec(), f"is_{position}")()]


def wrapped_panels(
    count: int, width: float, height: float, columns: int = 3, names: str | Names = "panel", **options: Any
) -> tuple[Figure, list[Any]]:
    """Make ``count`` panels in rows of at most ``columns``; if these are 3, 4 panels are in rows of 2.

    A single panel is wider, so that its title has room, if it is not a narrow one.

    Args:
        width, height, options: those of :func:`panels`.
        names: names of the panels; a single name is numbered.
    """
    panel_names = numbered(names, count) if isinstance(names, str) else [*names]
    width = 6.4 if count == 1 and 4.5 < width < 6.4 and "subplot_kw" not in options else width
    figure, (axes,) = _panels_in_rows([panel_names], width, [height], columns, **options)
    return figure, axes


def stacked_panels(
    count: int, width: float, kinds: Mapping[str, float], **options: Any
) -> tuple[Figure, list[Any], list[Any]]:
    """Make ``count`` panels as :func:`wrapped_panels` does, each with another one below it.

    Args:
        kinds: the keys are one or two names, of the panels and of the panels below them; the values are their
            heights in inches. Panels below are not shown if the user gives ``ax``.

    Returns:
        (figure, panels, panels below them or []).
    """
    names = [numbered(name, count) for name in kinds]
    below = names[1] if len(names) > 1 else []
    figure, axes = _panels_in_rows(names, width, [*kinds.values()], columns=3, beside=below, **options)
    return figure, axes[0], axes[1] if below else []


def _panels_in_rows(
    kinds: Sequence[list[str]], width: float, heights: Sequence[float], columns: int, **options: Any
) -> tuple[Figure, list[list[Any]]]:
    """Make panels of one or two kinds, and return the figure and the axes of each kind.

    Args:
        kinds: for each kind, the names of its panels. A panel of the second kind is below the panel of the
            first kind with the same index.
        width: width of a panel in inches.
        heights: for each kind, the height of a panel in inches.
        columns: the largest number of panels in a row.
        options: passed to :func:`panels`.
    """
    count = len(kinds[0])
    if count == 4 and columns == 3:  # two rows of 2, not a row of 3 and one of 1
        columns = 2
    columns = fitting_columns(min(columns, count), width)
    names: list[str] = []  # row by row; "" for an empty cell
    for start in range(0, count, columns):
        for kind in kinds:
            row = kind[start : start + columns]
            names += row + [""] * (columns - len(row))
    rows = len(names) // columns
    options["gridspec_kw"] = {"height_ratios": [*heights] * (rows // len(kinds))}
    figure, axes = panels(rows, columns, width, sum(heights) / len(kinds), names, **options)
    by_name = dict(zip(filter(None, names), axes, strict=True))
    if options.get("sharex") and not isinstance(_AXES_OR_WIDTH.get(), UserAxes):
        # If the last row is not full, matplotlib leaves out the tick labels of a column that ends above it.
        # The user's axes keep the tick labels that they have.
        for name in kinds[-1][-columns:]:
            by_name[name].tick_params(labelbottom=True)
    return figure, [[by_name[name] for name in kind] for kind in kinds]


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
    _shorten(figure.axes if isinstance(figure, Picture) else cast(Any, figure).axes.values())
    caption(figure, text or "")
    return figure


def _shorten(axes: Iterable[Axes]) -> None:
    """Break long labels into lines; for a paper, fit them to the panel, and leave numbers out of titles."""
    paper = in_paper()
    for ax in axes:
        box, texts = ax.get_window_extent(), [ax.xaxis.label, ax.yaxis.label]
        if paper:
            name, _, numbers = ax.get_title().rpartition("\n")
            ax.set_title(name or numbers)
            texts.append(ax.title)
        for text in texts:
            inches = (box.height if text is ax.yaxis.label else box.width) / ax.figure.dpi
            line_length = inches * CHARACTERS / float(text.get_fontsize()) if paper else LABEL
            text.set_text(formulas(wrapped(text.get_text(), int(line_length))))
        for axis in (ax.xaxis, ax.yaxis):
            if paper and isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
                decimal_labels(axis)


def caption(figure: Figure, text: str) -> None:
    """Put ``text`` below ``figure``; axes that the user gave have no caption."""
    if isinstance(figure, Picture):
        figure.set_caption(text)


def shared_legend(figure: Any, axes: Sequence[Axes], **options: Any) -> None:
    """Put one legend for all panels below them; entries of the same name appear once.

    Args:
        options: passed to matplotlib's ``Figure.legend``; in 4 columns by default, or 2 if names are long.
    """
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(str(name), handle)
    if not entries:
        return
    if not isinstance(figure, Picture):
        figure.legend([*entries.values()], [*entries])
        return
    width = int(CHARACTERS / float(rcParams["legend.fontsize"]) * figure.get_figwidth()) - 6
    names = [formulas(wrapped(name, width)) for name in entries]
    most_columns = options.pop("ncols", 2 if max(map(len, entries)) > 20 else 4)
    for columns in range(most_columns, 0, -1):  # as many as fit
        look: dict[str, Any] = {"loc": "outside lower center", "ncols": columns} | options
        legend = figure.legend([*entries.values()], names, **look)
        if columns == 1 or figure.extent(legend).width <= figure.bbox.width:
            break
        legend.remove()


def points(
    ax: Axes, x: Any, y: Any, error: Any = None, color: Any = None, label: str | None = None, **options: Any
) -> None:
    """Draw points with error bars.

    Args:
        error: half the lengths of the bars along y; None for no such bars.
        options: passed to matplotlib's ``Axes.errorbar``.
    """
    usual: dict[str, Any] = {"marker": "o", "ls": "none", "capsize": 3}
    ax.errorbar(x, y, error, color=color, label=label, **(usual | options))


def categories(ax: Axes, names: Sequence[str]) -> None:
    """Label the positions 0, 1, … along x, with a line break after each comma, and without grid lines."""
    ax.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    ax.grid(False, axis="x")


@contextlib.contextmanager
def drawn_into(user_axes: UserAxes | None, width: float | None = None) -> Iterator[None]:
    """Return a context in which pictures are drawn into the user's axes; None: into new figures.

    Args:
        width: width of the new figures in inches, for a paper; None: their usual width.
    """
    token = _AXES_OR_WIDTH.set(user_axes or width)
    try:
        with style(paper=in_paper()):
            yield
    finally:
        _AXES_OR_WIDTH.reset(token)

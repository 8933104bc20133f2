"""Figures of results. Results of one picture share scales and levels; nothing is computed here.

A drawing is a function of a sequence of results of one kind and a title that returns a figure. It lies in a
module of this package and registers itself under the name of the class of the results::

    @draws(Surface)
    def draw_surfaces(results: Sequence[Surface], title: str = "") -> Figure: ...

Another package registers drawings of its own classes in the same way, in the module that its entry point of
the group "landscape.plugins" names (see :mod:`landscape.core.registry`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser

from landscape.checkpoint.storage import load
from landscape.core.errors import InputError
from landscape.core.files import printable, replacing
from landscape.core.hdf5 import LARGEST
from landscape.core.options import Within, checked, ends_in
from landscape.core.registry import drawings
from landscape.plots.picture import UserAxes, change_visuals, drawn_into
from landscape.plots.style import style as _style
from landscape.results.base import Result
from landscape.results.grids import Interpolated, Line

FORMATS = (".png", ".pdf", ".svg")
# Below it nothing can be read; above it a picture of 12 inches takes more than 800 MB of memory (our choice).
Dpi = Annotated[float, Within(20, 1200)]
# Inches: below it no label has room; above it no page (our choice).
Width = Annotated[float, Within(2, 20)]


@checked()
def draw(
    results: Any, path: str | Path | None = None, *, style: str = "contour", ax: Axes | None = None,
    axes: Mapping[str, Axes] | None = None, width: Width | None = None,
    visuals: Mapping[str, bool | Mapping[str, Any]] | None = None, dpi: Dpi | None = None, **options: Any,
) -> Figure:  # fmt: skip
    """Draw results or runs of one kind in one picture, whose panels share their scales.

    Args:
        results: one or several results, runs or paths of their files; a dict names them in the picture.
        path: a .png, .pdf or .svg file to write; its metadata have the title and the caption.
        style: how surfaces are drawn: "contour"; "hillshade", contours on a relief; "surface", in three
            dimensions; or "difference", the first of two surfaces minus the second.
        ax: axes to draw into, for a picture of one panel. Default: a new figure.
        axes: axes to draw into, by name of the panel; other panels are not shown.
        width: width in inches of a picture for a paper, such as 3.3 for a column or 7 for a page. Such a
            picture has small texts, no caption, and a title only if one is given. Panels in ``ax`` or
            ``axes`` look like those of such a picture.
        visuals: parts to leave out or to change. The keys are "title", "panel_titles", "legend", "colorbar"
            and "caption"; a value is False, which leaves the part out, or a dict of properties for
            matplotlib's ``Artist.set``.
        dpi: pixels per inch of the file. Default: 150.
        options: further arguments of the drawing: ``title`` (None: no title) and, for surfaces, ``log``,
            ``levels``, ``vmax``, ``cmap`` and ``labels``.

    Returns:
        A new figure, with the axes of its panels in ``axes_by_name``; with ``ax`` or ``axes``, their figure.

    Raises:
        InputError: results that cannot be drawn in one picture, no finite number to draw, or an argument that
            is not allowed.
        OperationError: a file cannot be read or written.

    Example:
        >>> figure = draw(surface, title="A valley", visuals={"caption": False, "legend": {"alpha": 0.5}})
        >>> list(figure.axes_by_name), figure.get_suptitle(), figure.get_caption()
        (['surface', 'profile'], 'A valley', '')
    """
    if path is not None:
        check_format(path)
    loaded_results = loaded(results)
    classes = dict.fromkeys(type(result) for result in loaded_results)
    functions = {drawing_of(result_class) for result_class in classes}
    if len(functions) != 1:
        names = ", ".join(sorted(result_class.__name__ for result_class in classes)) or "no result"
        raise InputError(f"results: {names} cannot be drawn in one picture, all must be of one kind")
    drawing_function = functions.pop()
    class_name = type(loaded_results[0]).__name__
    parameters = inspect.signature(drawing_function).parameters
    if style != "contour":
        if "style" not in parameters:
            cause = f"a {class_name} has one style (allowed: contour)"
            raise InputError(f"style: '{style}' is not allowed, {cause}")
        options["style"] = style
    for option in options:
        if option not in parameters:
            # The first parameter has the results and is no option.
            cause = f"whose drawing has the options {', '.join(list(parameters)[1:])}"
            raise InputError(f"{option}: not allowed for a {class_name}, {cause}")
    if width is not None and (ax is not None or axes):
        raise InputError("width: not allowed with axes of your own; set the width of their figure")
    user_axes = UserAxes(ax, axes or {}) if ax is not None or axes else None
    is_for_paper = user_axes is not None or width is not None
    all_visuals: dict[str, Any] = {"caption": False} if is_for_paper else {}
    title = options.pop("title", "")  # "" for the default title, None for no title
    if title:
        options["title"] = title
    elif title is None or is_for_paper:
        all_visuals["title"] = False
    all_visuals |= visuals or {}
    with drawn_into(user_axes, width):
        # If the user gives axes, ``user_axes`` is what panels() returns as the figure.
        figure_or_axes: Any = drawing_function([drawable(result) for result in loaded_results], **options)
        if user_axes is not None and figure_or_axes is not user_axes:  # no call of panels()
            reason = f"the drawing of a {class_name} makes a figure of its own"
            raise InputError(f"{user_axes.where}: not allowed, {reason}")
        change_visuals(figure_or_axes, all_visuals)
    figure: Figure = figure_or_axes if user_axes is None else user_axes.get_figure()
    if path is not None:
        save_figure(figure, path, dpi)
    return figure


def loaded(results: Any) -> list[Any]:
    """Return the results and runs of ``results``: files are read, and keys of a dict become names."""
    if isinstance(results, Mapping):
        return [_named(item, str(name)) for name, value in results.items() for item in loaded(value)]
    items: list[Any] = []
    for item in each_of(results):
        contents = load(item) if isinstance(item, (str, Path)) else item
        items += contents if isinstance(contents, list) else [contents]
    return items


def _named(item: Any, name: str) -> Any:
    """Return the result or the run with this name."""
    if hasattr(item, "using"):
        return item.using(name=name)
    if not hasattr(item, "label"):
        raise InputError(f"results: '{name}': a {type(item).__name__} takes no name, give a list")
    return dataclasses.replace(item, label=name, **{"labels": (name,)} if isinstance(item, Line) else {})


@checked()
def save_figure(figure: Figure, path: str | Path, dpi: Dpi | None = None) -> None:
    """Write ``figure`` to a file. An existing file stays unchanged until the new file is complete.

    Args:
        path: its suffix says the format: .png, .pdf or .svg.
        dpi: pixels per inch. Default: 150.

    Raises:
        InputError: another suffix, or a dpi that is not allowed.
        OperationError: the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from landscape.plots.picture import panels
        >>> figure, axes = panels(1, 1, 4.0, 3.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_figure(figure, f"{folder}/empty.svg")
        ...     [path.name for path in pathlib.Path(folder).iterdir()]
        ['empty.svg']
    """
    path = Path(path)
    check_format(path)
    # matplotlib also projects unused corners of 3-D facets. Their coordinates are uninitialized memory, so
    # the projection may overflow.
    with replacing(path) as file, _style(), np.errstate(over="ignore", invalid="ignore"):
        figure.savefig(file, format=path.suffix[1:], dpi=dpi)  # None: the dpi of style.mplstyle


def check_format(path: str | Path) -> None:
    """Check that the suffix of ``path`` is a format in which figures are written.

    Raises:
        InputError: a suffix other than .png, .pdf and .svg.
    """
    ends_in("path", path, FORMATS)


# Longest label in characters (our choice: more do not fit into any picture).
LENGTH = 300


def literal(text: str) -> str:
    """Return ``text`` in the form in which matplotlib shows its characters unchanged.

    A dollar sign then begins no formula, and characters that cannot be printed are written as escapes. Texts
    longer than 300 characters are cut.
    """
    short = text if len(text) <= LENGTH else text[:LENGTH] + "…"
    return "\n".join(printable(line) for line in short.split("\n")).replace("$", r"\$")


def drawable(result: Any) -> Any:
    """Return a copy of ``result`` that matplotlib can draw; an object that is no result is not changed.

    Texts become :func:`literal`. Numbers too large for an axis become infinite; drawings leave out infinite
    numbers. An unfinished grid is reduced to its finest complete grid.
    """
    if not isinstance(result, Result):
        return result
    if isinstance(result, Interpolated):
        result = result.nested()
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, str):
            changed[field.name] = literal(value)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(map(literal, value))
        elif isinstance(value, float) and abs(value) > LARGEST:
            changed[field.name] = np.copysign(np.inf, value)
        elif isinstance(value, np.ndarray) and value.dtype == np.float64:
            too_large = np.abs(value) > LARGEST
            if too_large.any():
                changed[field.name] = np.where(too_large, np.copysign(np.inf, value), value)
    return dataclasses.replace(result, **changed) if changed else result


def each_of(results: Any) -> list[Any]:
    """Return one or several results, runs or names of files, as a list."""
    several = isinstance(results, Iterable) and not isinstance(results, (str, Path))
    return list(results) if several else [results]


def check_title(where: str, text: str) -> None:
    """Check that matplotlib can set the formulas between dollar signs in ``text``.

    Args:
        where: the option with this text, for the message.

    Raises:
        InputError: a formula that matplotlib cannot read.
    """
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        return  # matplotlib then shows every dollar sign as it is
    try:
        MathTextParser("agg").parse(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"{where}: '{text}' holds a formula that cannot be read; write \\$ for a dollar sign"
        ) from error


F = TypeVar("F", bound=Callable[..., Figure])


def draws(kind: type) -> Callable[[F], F]:
    """Return a decorator for a function that draws results of class ``kind``.

    The decorator registers the function. :func:`landscape.draw` calls the function with a ``drawable``
    copy of each result, and passes on options, such as ``log``. An option that the function does not have as
    a parameter is refused.

    Args:
        kind: the class of the results; subclasses without a drawing of their own have this drawing, too.

    Raises:
        InputError: another class of the same name already has a drawing.

    Example:
        >>> from landscape.plots import draw
        >>> from landscape.plots.picture import panels
        >>> class Height(float):
        ...     pass
        >>> @draws(Height)
        ... def draw_heights(results, title=""):
        ...     figure, (ax,) = panels(1, 1, 4.0, 3.0)
        ...     ax.bar(range(len(results)), results)
        ...     return figure
        >>> len(draw([Height(2), Height(1)]).axes[0].patches)
        2
    """

    return drawings.add(kind.__name__)


def drawing_of(kind: type) -> Callable[..., Figure]:
    """Return the drawing of results of class ``kind``: its own, or the drawing of the nearest base class.

    Raises:
        InputError: neither the class nor any base class has a drawing.
    """
    for base in kind.__mro__:
        if base.__name__ in drawings:
            return drawings[base.__name__]
    raise InputError(
        f"results: a {kind.__name__} has no drawing (allowed: {', '.join(drawings.names())}); register one "
        "with landscape.plugins.draws"
    )

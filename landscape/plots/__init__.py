"""Figures of results. Results of one picture share scales and levels; nothing is computed here.

Each kind of result has a drawing in a module of this package, which registers it
(:mod:`landscape.plots.drawing`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.files import replacing
from landscape.plots.drawing import drawing_of
from landscape.plots.picture import drawn_into
from landscape.plots.style import style as _style

FORMATS = (".png", ".pdf", ".svg")


def draw(results: Sequence[Any], style: str = "contour", *, ax: Axes | None = None, **options: Any) -> Figure:
    """Draw ``results``, all of one kind, in one figure.

    Args:
        results: results or checkpoints.
        style: the style of surfaces: "contour"; "hillshade", contours on a relief; "surface", in three
            dimensions; or "difference", the first of two surfaces minus the second. "contour" also stands
            for the one style of other results.
        ax: axes to draw into, for a picture of one panel. Default: a new figure.
        options: further arguments of the drawing, such as ``title``, or ``log``, ``levels``, ``vmax``,
            ``cmap`` and ``labels`` of surfaces (see ``landscape.plots.surface.draw_surfaces``).

    Returns:
        The new figure, or that of ``ax``.

    Raises:
        InputError: no results, results of several kinds or of a kind without a drawing, an unknown style,
            nothing finite to draw, or ``ax`` for a picture with several panels.

    Example:
        >>> from landscape.results.training import Stability
        >>> import numpy as np
        >>> limits = np.array([[2.0, 1.0], [3.8, 0.1], [3.8, 0.19]])
        >>> result = Stability(np.array([0, 1]), limits, momentum=0.9, lambda_max=4.0, residual=0.0,
        ...                    converged=True, lr=0.1, own_limit=np.nan, own_delay=0, samples=100)
        >>> draw([result], title="Stable learning rates").get_suptitle()
        'Stable learning rates'
    """
    kinds = {type(result): None for result in results}
    if len({drawing_of(kind) for kind in kinds}) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no result"
        raise InputError(f"FILE: {names} cannot be drawn in one picture, all files must be of one kind")
    name, drawing = type(results[0]).__name__, drawing_of(type(results[0]))
    allowed = inspect.signature(drawing).parameters
    if style != "contour":
        if "style" not in allowed:
            raise InputError(f"style: '{style}' is not allowed, a {name} has one style (allowed: contour)")
        options["style"] = style
    for option in options:
        if option not in allowed:
            known = ", ".join(list(allowed)[1:])
            raise InputError(f"{option}: not allowed for a {name}, whose drawing has the options {known}")
    with drawn_into(ax):
        figure = drawing(results, **options)
    return figure if ax is None else cast(Figure, ax.get_figure())


def save_figure(figure: Figure, path: str | Path, dpi: float | None = None) -> None:
    """Write ``figure`` to a file; a file that already exists is replaced only once the new one is whole.

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
    if dpi is not None:
        check_dpi("dpi", dpi)
    # matplotlib projects the unused corners of 3-D facets, too: memory with any content, which may overflow.
    with replacing(path) as file, _style(), np.errstate(over="ignore", invalid="ignore"):
        figure.savefig(file, format=path.suffix[1:], dpi=rcParams["savefig.dpi"] if dpi is None else dpi)


def check_dpi(where: str, dpi: float) -> None:
    """Check that ``dpi`` pixels per inch make a picture that can be written.

    Raises:
        InputError: naming ``where``, below 20 (nothing can be read) or above 1200 (ours; a picture of 12
            inches then takes 800 MB of memory).
    """
    if not 20 <= dpi <= 1200:
        raise InputError(f"{where}: {dpi:g} is not allowed, it must be from 20 to 1200")


def check_format(path: str | Path) -> None:
    """Check that the suffix of ``path`` is a format in which figures are written.

    Raises:
        InputError: a suffix other than .png, .pdf and .svg.
    """
    if Path(path).suffix not in FORMATS:
        raise InputError(f"{path}: a picture's name must end in {', '.join(FORMATS)}")

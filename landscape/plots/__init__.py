"""Finished results -> figures. Nothing here computes a landscape; several results share scales and levels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import InputError
from landscape.core.files import replacing
from landscape.core.options import choose
from landscape.plots.hessian_grid import hessian_grids
from landscape.plots.noise import noises
from landscape.plots.picture import into
from landscape.plots.run_times import run_times
from landscape.plots.spectrum import spectra
from landscape.plots.stability import minima, smoothings, stabilities
from landscape.plots.surface import difference, lines, surfaces, surfaces_3d
from landscape.plots.surface import style as _style
from landscape.plots.sweep import sweeps
from landscape.plots.training import escapes, training
from landscape.results.escape import Escape
from landscape.results.hessian_grid import HessianGrid
from landscape.results.line import Line
from landscape.results.minima import Minima
from landscape.results.noise import NoiseEstimate
from landscape.results.run_times import RunTimes
from landscape.results.smoothing import Smoothing
from landscape.results.spectrum import Spectrum
from landscape.results.stability import Stability
from landscape.results.surface import Surface
from landscape.results.sweep import Sweep

FORMATS = (".png", ".pdf", ".svg")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` as PNG, PDF or SVG, atomically. InputError for another suffix."""
    path = Path(path)
    check_format(path)
    with replacing(path) as file, _style():
        figure.savefig(file, format=path.suffix[1:])


def check_format(path: str | Path) -> None:
    """Raise InputError unless the suffix of ``path`` is one that figures are written in."""
    if Path(path).suffix not in FORMATS:
        raise InputError(f"{path}: a picture's name must end in {', '.join(FORMATS)}")


STYLES = ("contour", "surface", "difference")


def draw(results: Sequence[Any], style: str = "contour", *, ax: Axes | None = None, **options: Any) -> Figure:
    """The figure for ``results``, all of one kind. InputError for a mixture.

    With ``ax`` that of these axes, which it is drawn into: for a picture of one panel, else InputError.

    ``style`` is how surfaces are drawn: "contour"; "surface", in 3-D; or "difference", the first of two less
    the second. InputError for another one, or for anything but "contour" with results that are no surfaces.
    """
    painters = {
        Checkpoint: training,
        Surface: surfaces,
        Line: lines,
        HessianGrid: hessian_grids,
        NoiseEstimate: noises,
        Spectrum: spectra,
        RunTimes: run_times,
        Stability: stabilities,
        Minima: minima,
        Sweep: sweeps,
        Escape: escapes,
        Smoothing: smoothings,
    }
    choose("style", style, STYLES)
    kinds = {type(r) for r in results}
    if len(kinds) != 1:
        names = ", ".join(sorted(k.__name__ for k in kinds))
        raise InputError(f"FILE: {names} cannot be drawn in one picture, all files must be of one kind")
    kind = kinds.pop()
    painter: Any = painters[kind]
    if style != "contour":
        if kind is not Surface:
            raise InputError(f"style: '{style}' is for surfaces, a {kind.__name__} is drawn one way only")
        painter = surfaces_3d if style == "surface" else difference
    with into(ax):
        figure = painter(results, **options)
    made: Any = figure if ax is None else ax.get_figure()
    return cast(Figure, made)

"""Basins of surfaces: contours with what belongs to each basin, and below them how wide the region is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import cm
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import split_names
from landscape.plots.levels import Scale, scale
from landscape.plots.picture import caption, shared_legend, stacked_panels
from landscape.plots.style import colors_of, decimal_labels, paper_name, short_names, style
from landscape.results.basins import Basins

CMAP = "mako_r"  # as contours have it
_MARK: dict[str, Any] = {"ls": "none", "mec": "k", "mew": 0.8, "zorder": 5}
# What is marked: the lowest point of a basin, its saddle, and the point that the region is around.
_LOWEST: dict[str, Any] = {**_MARK, "marker": "v", "mfc": "w", "ms": 7, "label": "lowest point of a basin"}
_SADDLE: dict[str, Any] = {**_MARK, "marker": "X", "mfc": "#CC79A7", "ms": 7, "label": "its saddle"}
_AROUND: dict[str, Any] = {"marker": "+", "ls": "none", "mec": "#E69F00", "ms": 10, "mew": 2, "zorder": 6}
_NAMES = {"center": "centre", "lowest": "lowest point"}


@draws(Basins)
def draw_basins(results: Sequence[Basins], title: str = "") -> Figure:
    """Contours in distances, the borders of basins, and below the widths of the region around one point.

    Example:
        >>> from landscape.results.basin import parabola
        >>> print(draw_basins([parabola().basins()]).get_suptitle())
        One basin; 1 nat above the centre the region
        is 2 × 2, 1 times as long as wide
    """
    with style():
        chosen = scale([r.loss for r in results])
        figure, axes, below = stacked_panels(len(results), 5.0 if len(results) == 1 else 3.9, (4.4, 1.9))
        for ax, r in zip(axes, results, strict=True):
            _draw_panel(ax, r, chosen)
        mappable = cm.ScalarMappable(chosen.norm, sns.color_palette(CMAP, as_cmap=True))
        bar = figure.colorbar(mappable, ax=axes, shrink=0.85, pad=0.02, extend="max")
        bar.set_label(f"{split_names(results)} loss (nat), {chosen.step}")
        if isinstance(chosen.norm, LogNorm):
            decimal_labels(bar.ax.yaxis)
        for ax, r, color in zip(below, results, colors_of([r.label for r in results]), strict=False):
            _draw_widths(ax, r, color)
        if below:
            below[0].set_ylabel("distance")
        shared_legend(figure, [*axes, *below], ncols=2 if len(results) == 1 else 3)
        figure.suptitle(title or _finding(results))
        caption(figure, _caption(results))
    return figure


def _draw_panel(ax: Axes, r: Basins, chosen: Scale) -> None:
    """The contour on axes of distances along the two directions, which need not be orthogonal."""
    lengths = np.sqrt(np.diag(r.gram))
    x, y = r.x * lengths[0], r.y * lengths[1]
    ax.set_facecolor("#bbbbbb")  # shows through where a loss is not finite
    ax.grid(False)
    ax.set_aspect("equal")
    cmap = sns.color_palette(CMAP, as_cmap=True)
    ax.contourf(x, y, np.ma.masked_invalid(r.loss), chosen.levels, cmap=cmap, norm=chosen.norm, extend="max")
    for number in range(len(r.minimum)) if len(r.minimum) > 1 else ():
        ax.contour(x, y, (r.basin == number).astype(float), [0.5], colors="w", linewidths=0.9)
    widest = np.flatnonzero(~r.cut)
    if len(widest):
        level = r.reference_loss + r.rise[widest[-1]]
        ax.contour(x, y, np.ma.masked_invalid(r.loss), [level], colors="#E69F00", linewidths=1.8)
    ax.plot(*(r.minimum * lengths).T, clip_on=False, **_LOWEST)
    known = np.isfinite(r.saddle[:, 0])
    if known.any():
        ax.plot(*(r.saddle[known] * lengths).T, **_SADDLE)
    ax.plot(*(r.reference * lengths)[:, None], label=_NAMES[r.around], **_AROUND)
    ax.set_xlabel("distance along u")
    ax.set_ylabel("distance along v")
    basins = f"{len(r.minimum)} basin{'s' * (len(r.minimum) > 1)}"
    minima = f"{r.minima} local minim{'a' if r.minima > 1 else 'um'} of the grid"
    ax.set_title(f"{paper_name(r.label) or 'surface'}\n{basins}, {minima}")


def _draw_widths(ax: Axes, r: Basins, color: str) -> None:
    """Both axes of the region against the rise; dashed where the edge of the grid cuts it."""
    for k, (name, width) in enumerate((("longer axis", 2.0), ("shorter axis", 1.1))):
        ax.plot(
            r.rise,
            np.where(r.cut, np.nan, r.width[:, k]),
            color=color,
            lw=width,
            label=f"{name} of the region",
        )
        ax.plot(r.rise, np.where(r.cut, r.width[:, k], np.nan), color=color, lw=width, ls=":")
    ax.set_xlabel(f"rise above the {_NAMES[r.around]} (nat)")
    ax.set_xlim(0, float(r.rise[-1]))
    ax.set_ylim(0, None)


def _finding(results: Sequence[Basins]) -> str:
    """One line with the number of basins and the width of the widest region that is not cut."""
    if len(results) > 1:
        if len({r.around for r in results}) > 1:
            return f"Basins: {', '.join(str(len(r.minimum)) for r in results)}"
        shared = min(float(r.rise[~r.cut][-1]) if (~r.cut).any() else 0.0 for r in results)
        if shared > 0:
            widths = [
                f"{name} {np.interp(shared, np.append(0, r.rise), np.append(0, r.equivalent_width)):.3g}"
                for name, r in zip(short_names([r.label for r in results]), results, strict=True)
            ]
            return f"Width {shared:.3g} nat above the {_NAMES[results[0].around]}: {', '.join(widths)}"
        return f"Basins: {', '.join(str(len(r.minimum)) for r in results)}"
    r = results[0]
    number = "One basin" if len(r.minimum) == 1 else f"{len(r.minimum)} basins"
    if r.cut.all():
        return f"{number}; the region around the {_NAMES[r.around]} reaches the edge of the grid"
    last = int(np.flatnonzero(~r.cut)[-1])
    return (
        f"{number}; {r.rise[last]:.3g} nat above the {_NAMES[r.around]} the region is "
        f"{r.width[last, 0]:.3g} × {r.width[last, 1]:.3g}, {r.anisotropy[last]:.2g} times as long as wide"
    )


def _caption(results: Sequence[Basins]) -> str:
    least = " / ".join(dict.fromkeys(f"{r.least:.3g}" for r in results))
    smad = ", ".join(f"{r.smad:.3g}" for r in results)
    parts = [
        f"{split_names(results).capitalize()} loss. Basins with a persistence of {least} nat and more, by "
        "the merge tree of the grid (8 neighbours); white: their borders.",
        "Orange line: the largest measured region that the edge does not cut. Below: its axes by second "
        "moments; dotted: cut by the edge, so that they are too small.",
        f"Saddle-minimum average distance of all local minima: {smad} nat.",
    ]
    if any(r.at_edge.any() for r in results):
        parts.append("A minimum on the edge of the grid belongs to a basin outside.")
    return " ".join(parts)

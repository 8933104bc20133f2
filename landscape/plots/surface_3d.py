"""Loss surfaces as heights in three dimensions, and differences of two as colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.labels import split_names
from landscape.plots.levels import Look, scale
from landscape.plots.picture import caption, panels, wrapped_panels
from landscape.plots.style import paper_name
from landscape.plots.surface_parts import (
    CENTER,
    add_scale_and_legend,
    axis_labels,
    finding,
    label_axes,
    marks,
    panel_title,
    settings,
)
from landscape.results.basin import loss_at
from landscape.results.surface import Surface

MAX_FACETS = 100  # along each axis of a 3-D picture: more than can be seen, and slow to draw (ours)


def draw_3d(results: Sequence[Surface], title: str, look: Look, cmap: Any) -> Figure:
    """The loss as height above the plane, one panel for each surface, with shared heights and colours.

    The markers are those of contours, at the height of the surface.

    Args:
        results, title, look, cmap: as :func:`landscape.plots.surface.draw_surfaces` has them.

    Returns:
        The figure.

    Example:
        >>> from landscape.results.basin import parabola
        >>> draw_3d([parabola()], "", Look(), "viridis").axes[0].name
        '3d'
    """
    figure, axes = wrapped_panels(len(results), 4.8, 4.5, subplot_kw={"projection": "3d"})
    chosen = scale([r.loss for r in results], look)
    highest = max(float(np.max(r.loss, initial=-np.inf, where=np.isfinite(r.loss))) for r in results)
    top = chosen.levels[-1] if look.vmax is not None else max(chosen.levels[-1], highest)
    for ax, r in zip(axes, results, strict=True):
        x, y = np.meshgrid(r.x, r.y)
        height = np.where(
            np.isfinite(r.loss) & (r.loss <= top), r.loss, np.nan
        )  # facets at a NaN are left out
        ax.plot_surface(
            x, y, height, cmap=cmap, norm=chosen.norm, lw=0.1, edgecolor="#00000040",
            rcount=MAX_FACETS, ccount=MAX_FACETS,
        )  # fmt: skip
        ax.computed_zorder = False  # the markers lie on the surface, not in it
        for places, label, marker in marks(r):
            inside = places[(np.abs(places) <= np.abs([r.x[0], r.y[0]])).all(1)]
            heights = loss_at(r, *inside.T) if len(inside) else np.zeros(0)
            seen = np.isfinite(heights) & (heights <= top)
            options = {k: v for k, v in marker.items() if k != "clip_on"}
            ax.plot(*inside[seen].T, heights[seen], label=label, **options)
        ax.set_zlim(chosen.levels[0], top)
        ax.view_init(elev=32, azim=-58)
        ax.set_box_aspect(None, zoom=0.85)
        label_axes(ax, r)
        ax.tick_params(labelsize=7.5, pad=0)
        for axis, label in zip((ax.xaxis, ax.yaxis), axis_labels(r), strict=True):
            axis.set_label_text(label.partition("(weights")[0].strip(), fontsize=8)
        ax.set_title(panel_title(r))
    add_scale_and_legend(figure, axes, chosen.norm, cmap, "loss (nat)")
    figure.suptitle(title or finding(results))
    caption(figure, f"{settings(results)} Colours: {chosen.why}.")
    return figure


def draw_difference(results: Sequence[Surface], title: str, look: Look) -> Figure:
    """The loss of the first surface minus that of the second: blue where it is negative, red where positive.

    Raises:
        InputError: not two surfaces, different grids, directions that were drawn in different ways, or an
            option of contours.

    Example:
        >>> from landscape.results.basin import parabola
        >>> draw_difference([parabola(), parabola()], "None", Look()).get_suptitle()
        'None'
    """
    if len(results) != 2:
        raise InputError(f"difference: {len(results)} surfaces are not allowed, it takes two")
    for name, value in vars(look).items():
        if value not in (None, False):
            raise InputError(f"--{name}: not allowed with style difference, its scale is symmetric around 0")
    a, b = results
    same_grid = np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
    if not same_grid or (a.kind, a.norm, a.seed, a.ignore) != (b.kind, b.norm, b.seed, b.ignore):
        raise InputError("difference: the two surfaces must have the same grid, span, kind of plane and seed")
    with np.errstate(invalid="ignore"):
        change = np.ma.masked_invalid(a.loss - b.loss)
    if change.count() == 0:
        raise InputError("loss: no value is finite in both, there is nothing to draw")
    reach = max(float(np.abs(change).max()), 1e-12)
    figure, (ax,) = panels(1, 1, 5.2, 4.8)
    norm = colors.Normalize(-reach, reach)
    ax.set_facecolor("#bbbbbb")
    ax.grid(False)
    ax.set_aspect("equal")
    label_axes(ax, a)
    ax.contourf(a.x, a.y, change, np.linspace(-reach, reach, 25), cmap="RdBu_r", norm=norm)
    label = f"difference of {split_names(results)} loss (nat)"
    if float(change.min()) < 0 < float(change.max()):
        ax.contour(a.x, a.y, change, [0.0], colors="k", linewidths=1.0)
        label += ", line: 0"
    ax.plot(0, 0, label="centre", **CENTER)
    add_scale_and_legend(figure, [ax], norm, "RdBu_r", label)
    names = [
        paper_name(r.label) or usual for r, usual in zip(results, ("the first", "the second"), strict=True)
    ]
    higher = float((change > 0).sum() / change.count())
    figure.suptitle(
        title or f"The loss of {names[0]} is higher than that\nof {names[1]} at {higher:.0%} of points"
    )
    caption(figure, settings(results))
    return figure

"""Loss surfaces: contours, hillshaded contours, three-dimensional surfaces, differences of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import colormaps, ticker
from matplotlib.axes import Axes
from matplotlib.colors import LightSource, LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from scipy.interpolate import RegularGridInterpolator

from landscape.core.options import choose
from landscape.plots import surface_3d
from landscape.plots.drawing import draws
from landscape.plots.levels import Look, Scale, scale
from landscape.plots.picture import caption, stacked_panels
from landscape.plots.style import color_of, decimal_labels
from landscape.plots.style import style as figure_style
from landscape.plots.surface_parts import (
    add_scale_and_legend,
    check_grids,
    finding,
    label_axes,
    mark,
    panel_title,
    settings,
)
from landscape.results import basin
from landscape.results.surface import Surface

STYLES = ("contour", "hillshade", "surface", "difference")
CMAP = "mako_r"  # of seaborn: dark where the loss is high, and monotone in lightness
PIXELS = 400  # along each axis of a hillshaded picture (ours: as many as are seen at README width)
# The light from the north-west, where maps have it; and the height of the highest loss relative to the
# width of the picture (ours).
LIGHT, HEIGHT = LightSource(azdeg=315, altdeg=45), 1.0
_EQUAL: dict[str, Any] = {"colors": "#E69F00", "linewidths": 1.8}


@draws(Surface)
def draw_surfaces(
    results: Sequence[Surface],
    title: str = "",
    style: str = "contour",
    *,
    log: bool | None = None,
    levels: int | None = None,
    vmax: float | None = None,
    cmap: str | None = None,
    labels: bool = False,
) -> Figure:
    """Surfaces as contours, as heights in three dimensions, or as the difference of two.

    Args:
        style: "contour", "hillshade" (contours on a relief lit from the upper left), "surface" (three
            dimensions) or "difference" (the first of two minus the second).
        log: whether levels and colours are at equal ratios. Default: where the losses are positive and differ
            by a factor of more than 100; the caption says which.
        levels: about how many levels. Default: lines 0.005 apart as in the paper, where 4 to 40 are enough.
        vmax: the highest level; higher losses have its colour.
        cmap: a colour map of matplotlib.
        labels: whether to write losses on contour lines.

    Raises:
        InputError: an unknown style or colour map, nothing finite to draw, a grid below 2 × 2, or levels that
            the losses do not allow.

    Example:
        >>> draw_surfaces([basin.parabola()], title="A parabola").get_suptitle()
        'A parabola'
    """
    choose("style", style, STYLES)
    if cmap is not None:
        choose("--cmap", cmap, colormaps)
    check_grids(results)
    look = Look(log, levels, vmax, cmap, labels)
    with figure_style():
        if style == "difference":
            return surface_3d.draw_difference(results, title, look)
        colors = cmap or sns.color_palette(CMAP, as_cmap=True)
        if style == "surface":
            return surface_3d.draw_3d(results, title, look, colors)
        return _draw_contours(results, title, look, colors, shaded=style == "hillshade")


@dataclass(frozen=True)
class _Colors:
    """What all panels of a picture share."""

    scale: Scale
    cmap: Any
    rise: float
    labels: bool
    shaded: bool


def _draw_contours(results: Sequence[Surface], title: str, look: Look, cmap: Any, *, shaded: bool) -> Figure:
    """Contours, one panel for each surface, at shared levels and colours, each above its basin's profile.

    Markers show the lowest grid point, and either the centre or the weights that define the plane: the
    checkpoints that it passes through, the trajectory of a run, or the learners and their mean. A thick line
    is at the same rise above the centre in all panels.
    """
    chosen = scale([r.loss for r in results], look)
    shared = _Colors(chosen, cmap, basin.shared_rise(results), look.labels, shaded)
    profiled = all(map(basin.has_profile, results))
    width = 5.0 if len(results) == 1 else 3.9
    figure, axes, below = stacked_panels(len(results), width, (4.7, 1.7) if profiled else (4.7,))
    for ax, r in zip(axes, results, strict=True):
        _draw_panel(ax, r, shared)
    above = any((r.loss[np.isfinite(r.loss)] > chosen.levels[-1]).any() for r in results)
    label = f"loss (nat), {chosen.step}"
    add_scale_and_legend(figure, axes, chosen.norm, cmap, label, "max" if above else "neither")
    if below:
        _draw_profiles(below, results, shared)
    figure.suptitle(title or finding(results))
    caption(figure, _caption(results, shared, bool(below)))
    return figure


def _draw_panel(ax: Axes, r: Surface, shared: _Colors) -> None:
    ax.set_facecolor("#bbbbbb")  # shows through where a loss is not finite
    ax.grid(False)
    ax.set_aspect("equal")
    label_axes(ax, r)
    masked, levels = np.ma.masked_invalid(r.loss), shared.scale.levels
    if shared.shaded:
        _draw_relief(ax, r, shared)
    else:
        ax.contourf(r.x, r.y, masked, levels, cmap=shared.cmap, norm=shared.scale.norm, extend="max")
    lines = ax.contour(r.x, r.y, masked, levels, colors="k", linewidths=0.35, alpha=0.55)
    if shared.labels:
        texts = ax.clabel(lines, levels[:: max(1, len(levels) // 8)], fontsize=7.5, fmt=lambda v: f"{v:.3g}")
        for text in texts:
            text.set(color="k", path_effects=[withStroke(linewidth=2, foreground="w")])
    if np.isfinite(shared.rise) and basin.has_profile(r):
        ax.contour(r.x, r.y, masked, [basin.center_loss(r) + shared.rise], **_EQUAL)
    mark(ax, r)
    ax.set_title(panel_title(r))


def _draw_relief(ax: Axes, r: Surface, shared: _Colors) -> None:
    """The surface as a map with hills, lit from the upper left."""
    norm = shared.scale.norm
    finite = np.isfinite(r.loss)
    filled = np.where(finite, r.loss, r.loss[finite].max())
    cubic = min(filled.shape) >= 4 and finite.all()
    height = RegularGridInterpolator((r.y, r.x), np.asarray(norm(filled)), "cubic" if cubic else "linear")
    known = RegularGridInterpolator((r.y, r.x), finite.astype(float), "nearest")
    at = np.stack(
        np.meshgrid(*(np.linspace(g[0], g[-1], PIXELS) for g in (r.y, r.x)), indexing="ij"), axis=-1
    )
    relief = np.clip(height(at), 0.0, 1.0)  # a loss above the last level is drawn as a plateau
    paint = colormaps[shared.cmap] if isinstance(shared.cmap, str) else shared.cmap
    image = LIGHT.shade_rgb(
        paint(relief)[..., :3], HEIGHT * PIXELS * relief, blend_mode="soft", vert_exag=1.0, dx=1.0, dy=-1.0
    )
    rgba = np.concatenate([image, (known(at) > 0.5)[..., None].astype(float)], axis=-1)
    extent = (r.x[0], r.x[-1], r.y[0], r.y[-1])
    ax.imshow(np.clip(rgba, 0, 1), extent=extent, origin="lower", interpolation="bilinear", aspect="equal")


def _draw_profiles(axes: Sequence[Axes], results: Sequence[Surface], shared: _Colors) -> None:
    """The loss against the distance: the panel's own with its quartiles, the others in grey."""
    profiles = [basin.profile(r) for r in results]
    levels = shared.scale.levels
    highest = [float(np.max(p.high, initial=0.0, where=p.high <= levels[-1])) for p in profiles]
    log = isinstance(shared.scale.norm, LogNorm)
    for ax, r, own in zip(axes, results, profiles, strict=True):
        for p in profiles:
            if p is not own:
                ax.plot(p.distance, np.where(np.isfinite(p.median), p.median, np.nan), color="#BBBBBB", lw=1)
        color = color_of(r.label)
        own = replace(
            own, **{k: np.minimum(getattr(own, k), 1e3 * levels[-1]) for k in ("low", "median", "high")}
        )
        ax.fill_between(own.distance, own.low, own.high, color=color, alpha=0.25, lw=0)
        ax.plot(own.distance, own.median, color=color)
        if np.isfinite(shared.rise):
            ax.axhline(basin.center_loss(r) + shared.rise, color="#E69F00", lw=1.2)
        ax.set_yscale("log" if log else "linear")
        ax.set_ylim(levels[0], max(*highest, levels[1]))
        ax.set_xlim(0, max(p.distance[-1] for p in profiles))
        ax.set_xlabel("distance from the centre")
        if log:
            decimal_labels(ax.yaxis)
        else:
            ax.yaxis.set_major_locator(ticker.MaxNLocator(4))
    axes[0].set_ylabel("loss (nat)")


def _caption(results: Sequence[Surface], shared: _Colors, profiled: bool) -> str:
    parts = [settings(results), f"Colours: {shared.scale.why}."]
    many = " in all panels" if len(results) > 1 else ""
    if profiled and np.isfinite(shared.rise):
        parts.append(
            f"Orange line: {shared.rise:.3g} nat above the centre{many}, half the median rise at the edge"
            f"{' of the flattest one' if many else ''} (ours)."
        )
    if profiled:
        rises = ", ".join(f"{basin.median_rise(r):.3g}" for r in results)
        parts.append(f"Flatness: median rise over the plane, {rises} nat.")
        others = "; grey: the other panels' medians" if many else ""
        parts.append(f"Below: median and quartiles over directions{others}.")
    return " ".join(parts)

"""Loss surfaces as contours, reliefs, differences, and in three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import colormaps, colors, ticker
from matplotlib.axes import Axes
from matplotlib.colors import LightSource, LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from scipy.interpolate import RegularGridInterpolator

from landscape.core.errors import InputError
from landscape.core.options import choose
from landscape.geometry import profiles
from landscape.geometry.profiles import loss_at
from landscape.plots.drawing import draws
from landscape.plots.picture import caption, panels, stacked_panels, wrapped_panels
from landscape.plots.style import color_of, decimal_labels, paper_name, split_names
from landscape.plots.surface_parts import (
    CENTER,
    Look,
    Scale,
    add_scale_and_legend,
    axis_labels,
    check_grids,
    finding,
    label_axes,
    mark,
    marks,
    panel_title,
    scale,
    settings,
)
from landscape.results.grids import Surface

MAX_FACETS = 100  # along each axis of a 3-D picture: more than can be seen, and slow to draw (ours)


def draw_3d(results: Sequence[Surface], title: str, look: Look, cmap: Any) -> Figure:
    """The loss as height above the plane, one panel for each surface, with shared heights and colours.

    The markers are those of contours, at the height of the surface.

    Args:
        results, title, look, cmap: as :func:`landscape.plots.surface.draw_surfaces` has them.

    Returns:
        The figure.
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
    """
    choose("style", style, STYLES)
    if cmap is not None:
        choose("--cmap", cmap, colormaps)
    check_grids(results)
    look = Look(log, levels, vmax, cmap, labels)
    if style == "difference":
        return draw_difference(results, title, look)
    colors = cmap or sns.color_palette(CMAP, as_cmap=True)
    if style == "surface":
        return draw_3d(results, title, look, colors)
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
    shared = _Colors(chosen, cmap, profiles.shared_rise(results), look.labels, shaded)
    profiled = all(map(profiles.has_profile, results))
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
    if np.isfinite(shared.rise) and profiles.has_profile(r):
        ax.contour(r.x, r.y, masked, [profiles.center_loss(r) + shared.rise], **_EQUAL)
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
    curves = [profiles.profile(r) for r in results]
    levels = shared.scale.levels
    highest = [float(np.max(p.high, initial=0.0, where=p.high <= levels[-1])) for p in curves]
    log = isinstance(shared.scale.norm, LogNorm)
    for ax, r, own in zip(axes, results, curves, strict=True):
        for p in curves:
            if p is not own:
                ax.plot(p.distance, np.where(np.isfinite(p.median), p.median, np.nan), color="#BBBBBB", lw=1)
        color = color_of(r.label)
        own = replace(
            own, **{k: np.minimum(getattr(own, k), 1e3 * levels[-1]) for k in ("low", "median", "high")}
        )
        ax.fill_between(own.distance, own.low, own.high, color=color, alpha=0.25, lw=0)
        ax.plot(own.distance, own.median, color=color)
        if np.isfinite(shared.rise):
            ax.axhline(profiles.center_loss(r) + shared.rise, color="#E69F00", lw=1.2)
        ax.set_yscale("log" if log else "linear")
        ax.set_ylim(levels[0], max(*highest, levels[1]))
        ax.set_xlim(0, max(p.distance[-1] for p in curves))
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
        rises = ", ".join(f"{profiles.median_rise(r):.3g}" for r in results)
        parts.append(f"Flatness: median rise over the plane, {rises} nat.")
        others = "; grey: the other panels' medians" if many else ""
        parts.append(f"Below: median and quartiles over directions{others}.")
    return " ".join(parts)

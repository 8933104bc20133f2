"""Loss surfaces as contours, reliefs, differences, and in three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import cm, colormaps, colors, ticker
from matplotlib.axes import Axes
from matplotlib.colors import LightSource, LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from scipy.interpolate import RegularGridInterpolator

from landscape.core.errors import InputError
from landscape.core.hdf5 import LARGEST, Array
from landscape.core.options import choose, positive
from landscape.plots import draws, style
from landscape.plots.picture import finish, in_paper, labeled_axes, panels, stacked_panels, wrapped_panels
from landscape.results import geometry
from landscape.results.base import with_unit
from landscape.results.shown import Radius, logarithmic
from landscape.results.surfaces import Surface

STYLES = ("contour", "hillshade", "surface", "difference")
CMAP = sns.color_palette(style.SEQUENTIAL, as_cmap=True)
PAPER_SPACING = 0.005  # distance between contour lines in DPSGD-2020, Figure 3
MAX_LEVELS = 40  # more lines than this run together at this size (our choice)
LOG_LEVELS, LINEAR_LEVELS = 25, 24  # at equal ratios; at round numbers, approximately (our choice)
MAX_FACETS = 100  # along each axis of a 3-D picture: more than can be seen, and slow to draw (our choice)
PIXELS = 400  # along each axis of a hillshaded picture (our choice: as many as are seen at README width)
# The light from the north-west, where maps have it; and the height of the highest loss relative to the width
# of the picture (our choice).
LIGHT, HEIGHT = LightSource(azdeg=315, altdeg=45), 1.0
HALO = [withStroke(linewidth=2, foreground="w")]  # of texts on colors
# Lines, as keyword arguments of matplotlib's plot: where the loss is that of the center plus a rise (orange);
# levels below this loss; and a ring.
RISE_LINE: dict[str, Any] = {"color": style.AMBER, "lw": 1.8}
VALLEY: dict[str, Any] = {"color": "k", "lw": 1.0, "ls": ":"}
RING: dict[str, Any] = {"color": style.PINK, "lw": 2.2, "ls": "--"}
# Markers, as keyword arguments of matplotlib's plot.
POINT: dict[str, Any] = {"ls": "none", "mec": "k", "mew": 0.8, "zorder": 5}
CENTER: dict[str, Any] = {"marker": "+", "ls": "none", "mec": style.AMBER, "ms": 8, "mew": 2, "zorder": 6}
LOWEST: dict[str, Any] = {**POINT, "marker": "v", "mfc": "w", "ms": 8, "clip_on": False}
LEARNER: dict[str, Any] = {**POINT, "marker": "o", "mfc": style.YELLOW, "ms": 6}
MEAN: dict[str, Any] = {**POINT, "marker": "*", "mfc": style.AMBER, "ms": 13}
_PATH: dict[str, Any] = {**LEARNER, "color": style.YELLOW, "mew": 0.6, "ms": 4.5, "ls": "-", "lw": 1.4}
_ANCHORS = (("o", style.YELLOW), ("s", style.SKY), ("D", style.PINK))
#: Kinds of planes in words.
PLANES = {
    "random": "random directions u and v",
    "between": "the plane through checkpoints",
    "pca": "the principal components of the trajectory",
    "learners": "the plane nearest to the learners",
    "eigen": "the Hessian's eigenvectors of λ_max (x) and λ_min (y)",
}


@draws(Surface)
def draw_surfaces(
    results: Sequence[Surface], title: str = "", style: str = "contour", *, quantity: str = "loss",
    log: bool | None = None, levels: int | None = None, vmax: float | None = None, cmap: str | None = None,
    labels: bool = False, ring: Radius | Sequence[Radius] = (),
) -> Figure:  # fmt: skip
    """Draw surfaces as contours, as heights in three dimensions, or as the difference of two.

    Args:
        style: "contour", "hillshade" (contours on a relief lit from the upper left), "surface" (three
            dimensions) or "difference" (the first of two surfaces minus the second).
        quantity: "loss", "accuracy", or the name of a metric of the problem.
        log: True: levels and colors are at equal ratios; False: at equal distances. Default: True if the
            losses are positive and differ by a factor of more than 100; the caption says so.
        levels: approximate number of levels. Default: lines 0.005 apart, as in DPSGD-2020, if this makes 4 to
            40 lines, else 24; on a logarithmic scale, 25.
        vmax: the highest level; higher losses have the color of this level.
        cmap: a color map of matplotlib.
        labels: whether to write losses on contour lines.
        ring: for each surface, a result of :meth:`landscape.Surface.radius`, whose points are drawn as a
            closed line on the contours.

    Raises:
        InputError: an unknown style or color map, nothing finite to draw, a grid below 2 × 2, or levels that
            the losses do not allow.
    """
    choose("style", style, STYLES)
    rings = [ring] if isinstance(ring, Radius) else [*ring]
    if rings and (len(rings) != len(results) or style == "surface"):
        raise InputError(f"ring: {len(rings)} for {len(results)} surfaces; give one per surface, on contours")
    if quantity != "loss":
        results = [r.showing(quantity) for r in results]  # ``loss`` then holds the values of the quantity
        values = np.concatenate([r.loss[np.isfinite(r.loss)] for r in results])
        if len(values) and not title:
            title = f"{results[0].loss_name} from {values.min():.2g} to {values.max():.2g}"
    color_map = color_map_of(cmap)
    for r in results:
        if min(r.loss.shape) < 2:
            raise InputError(f"grid: {r.loss.shape[::-1]} points cannot be drawn as contours, 2 × 2 can")
    if style == "difference":
        options = {"log": log, "levels": levels, "vmax": vmax, "cmap": cmap, "labels": labels, "ring": rings}
        for name, value in options.items():
            if value not in (None, False, []):
                raise InputError(f"{name}: not allowed with style difference, which has a scale of its own")
        return _draw_difference(results, title)
    # The markers of a "pca" surface are a trajectory. The levels of contours depend on the losses along
    # trajectories; the levels of pictures in three dimensions do not. Quantities other than the loss are not
    # known along a trajectory: ``marker_loss`` is then NaN.
    trajectory_losses = [r.marker_loss for r in results if r.kind == "pca" and style != "surface"]
    level_scale = scale([r.loss for r in results], log, levels, vmax, trajectory_losses)
    if style == "surface":
        return _draw_3d(results, title, level_scale, color_map, vmax)
    look: dict[str, Any] = {"as_relief": style == "hillshade", "marks_lowest": quantity == "loss"}
    return _draw_contours(results, title, level_scale, color_map, labels=labels, rings=rings, **look)


def _draw_3d(
    results: Sequence[Surface], title: str, level_scale: LevelScale, cmap: Any, vmax: float | None
) -> Figure:
    """Draw the loss as height above the plane, one panel for each surface.

    The panels share the axis of the loss and the colors. The markers of :func:`marks` lie on the surface.
    """
    figure, axes = wrapped_panels(len(results), 4.8, 4.5, names="surface", subplot_kw={"projection": "3d"})
    top = level_scale.levels[-1]  # the highest loss that is drawn
    if vmax is None:
        highest_losses = [np.max(r.loss, initial=-np.inf, where=np.isfinite(r.loss)) for r in results]
        top = max(top, float(max(highest_losses)))
    for ax, r, name in zip(axes, results, style.names_of(results, "surface"), strict=True):
        x, y = np.meshgrid(r.x, r.y)
        # matplotlib leaves out facets with a corner at NaN.
        drawn_loss = np.where(np.isfinite(r.loss) & (r.loss <= top), r.loss, np.nan)
        ax.plot_surface(
            x, y, drawn_loss, cmap=cmap, norm=level_scale.norm, lw=0.1, edgecolor="#00000040",
            rcount=MAX_FACETS, ccount=MAX_FACETS,
        )  # fmt: skip
        ax.computed_zorder = False  # draw the markers over the surface
        half_widths = np.abs([r.x[0], r.y[0]])
        for points, label, marker in marks(r):
            inside = points[(np.abs(points) <= half_widths).all(1)]
            heights = geometry.loss_at(r, *inside.T) if len(inside) else np.zeros(0)
            is_drawn = np.isfinite(heights) & (heights <= top)
            ax.plot(*inside[is_drawn].T, heights[is_drawn], label=label, **(marker | {"clip_on": True}))
        ax.view_init(elev=32, azim=-58)
        ax.set_box_aspect(None, zoom=0.85)
        label_axes(ax, r)
        ax.tick_params(labelsize=7.5, pad=0)
        for axis in (ax.xaxis, ax.yaxis):
            axis.label.set_size(8)
        ax.set(zlim=(level_scale.levels[0], top), title=_panel_title(r, name))
    label = f"{results[0].loss_name}{style.unit(results[0], 'loss')}"
    color_bar(figure, axes, level_scale.norm, cmap, label, top)
    return finish(figure, title or finding(results), caption_of(results, level_scale.reason), axes)


def _draw_difference(results: Sequence[Surface], title: str) -> Figure:
    """Draw the loss of the first surface minus the loss of the second: negative values blue, others red.

    Raises:
        InputError: not two surfaces, different grids, planes of different kinds, or no finite difference.
    """
    if len(results) != 2:
        raise InputError(f"difference: {len(results)} surfaces are not allowed, it takes two")
    a, b = results
    same_grid = np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
    if not same_grid or (a.kind, a.norm, a.seed, a.ignore) != (b.kind, b.norm, b.seed, b.ignore):
        raise InputError("difference: the two surfaces must have the same grid, span, kind of plane and seed")
    with np.errstate(invalid="ignore"):  # the difference of two infinite losses
        difference = np.ma.masked_invalid(a.loss - b.loss)
    if difference.count() == 0:
        raise InputError("loss: no value is finite in both, there is nothing to draw")
    limit = max(float(np.abs(difference).max()), 1e-12)  # not 0: levels must increase
    figure, (ax,) = panels(1, 1, 5.2, 4.8, names=["difference"])
    norm = colors.Normalize(-limit, limit)
    map_axes(ax)
    label_axes(ax, a)
    ax.contourf(a.x, a.y, difference, np.linspace(-limit, limit, 25), cmap=style.DIVERGING, norm=norm)
    if float(difference.min()) < 0 < float(difference.max()):
        level_lines(ax, a.x, a.y, difference, [0.0], label="equal", color="k", lw=1.0)
    ax.plot(0, 0, label="center", **CENTER)
    first, second = style.short_names([a.label or "the first", b.label or "the second"])
    # If the first text is too long, the label has only the name of the loss.
    label = style.fitting(f"{first} minus {second}: {a.loss_name}", a.loss_name, most=2 * style.LABEL)
    color_bar(figure, [ax], norm, style.DIVERGING, f"{label}{style.unit(a, 'loss')}")
    share = float((difference > 0).sum() / difference.count())
    default_title = style.fitting(f"{first} has the higher loss at {share:.0%} of points")
    return finish(figure, title or default_title, caption_of(results), [ax])


def _draw_contours(
    results: Sequence[Surface], title: str, level_scale: LevelScale, cmap: Any, *, labels: bool,
    as_relief: bool, rings: Sequence[Radius], marks_lowest: bool,
) -> Figure:  # fmt: skip
    """Draw contours, one panel for each surface, with shared levels and colors.

    Below each panel is the profile of its surface. Markers show the center or the weights from which the
    plane was computed (checkpoints, the trajectory of a run, or the learners and their mean), and with
    ``marks_lowest`` the lowest grid point. On the orange lines the loss is higher than at the center, by the
    same amount in all panels. Dashed lines connect the points of ``rings``, one ring for each surface.
    """
    rise = geometry.shared_rise(results)  # NaN if the surfaces share none
    width = 5.2 if len(results) == 1 else 3.5
    heights = {"surface": 4.7 if len(results) == 1 else 4.2}
    if all(map(geometry.has_profile, results)):
        heights["profile"] = 1.9
    figure, axes, below = stacked_panels(len(results), width, heights)
    levels, norm = level_scale.levels, level_scale.norm
    names = style.names_of(results, "surface")
    for k, (ax, r, name) in enumerate(zip(axes, results, names, strict=True)):
        map_axes(ax)
        label_axes(ax, r)
        masked = np.ma.masked_invalid(r.loss)
        if as_relief:
            _draw_relief(ax, r, norm, cmap)
        else:
            ax.contourf(r.x, r.y, masked, levels, cmap=cmap, norm=norm, extend="both")
        lines = ax.contour(r.x, r.y, masked, levels, colors="k", linewidths=0.35, alpha=0.55)
        lowest_labeled, risen_loss = -np.inf, np.nan
        if np.isfinite(rise) and geometry.has_profile(r):
            risen_loss, lowest_loss = geometry.center_loss(r) + rise, masked.min()
            label = with_unit(r, f"{rise:.2g} nat above the center")
            level_lines(ax, r.x, r.y, masked, [risen_loss], label, **RISE_LINE)
            lines_in_valley = ((levels > lowest_loss) & (levels < risen_loss)).sum()
            if lines_in_valley < 2:  # more lines, dotted, so that the form of the valley can be seen
                dotted_levels = np.linspace(lowest_loss, risen_loss, 6)[1:-1]
                label = "each fifth of the rise to the orange line"
                level_lines(ax, r.x, r.y, masked, dotted_levels, label, **VALLEY)
                # No numbers on lower lines: a number could be taken for the loss on a dotted line.
                lowest_labeled = risen_loss
        if labels:
            _label_lines(ax, lines, risen_loss, lowest_labeled)
        shown_marks = marks(r) if marks_lowest else marks(r)[1:]  # the first is the lowest grid point
        for points, label, look in shown_marks:
            ax.plot(*points.T, label=label, **look)
        if rings:
            x, y = np.where(rings[k].censored, np.nan, rings[k].points.T)
            label = f"{rings[k].metric}, {rings[k].change} against the center"
            # The first point comes again at the end and closes the ring.
            ax.plot(np.append(x, x[0]), np.append(y, y[0]), label=label, **RING)
        if r.kind == "pca" and len(r.markers):
            text_look: dict[str, Any] = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 8.5}
            ax.annotate(r.labels[0], r.markers[0], path_effects=HALO, **text_look)
        ax.set(xlim=(r.x[0], r.x[-1]), ylim=(r.y[0], r.y[-1]), title=_panel_title(r, name))
    loss_name = results[0].loss_name
    label = f"{loss_name}{style.unit(results[0], 'loss')}, {level_scale.step}"
    losses = np.concatenate([r.loss[np.isfinite(r.loss)] for r in results])
    color_bar(figure, axes, norm, cmap, label, losses)
    if below:
        _draw_profiles(below, results, level_scale, rise)
    # All profiles have the same legend: only the first adds its entries. If the user of ``draw`` gives axes
    # only for contours, profiles are in another figure, which is not shown, and add no entries.
    in_legend = [*axes, *(ax for ax in below[:1] if ax.figure is figure)]
    text = caption_of(results, level_scale.reason)
    if below:
        text += f" Below: the {loss_name} by distance from the center, median and quartiles (band)."
    return finish(figure, title or finding(results), text, in_legend, ncols=3)


def _label_lines(ax: Axes, lines: Any, orange: float, low: float) -> None:
    """Write losses on contour lines with room, except for losses next to ``orange`` or below ``low``."""
    places: dict[str, Array] = {}
    step = np.diff(lines.levels).min()
    for text in ax.clabel(lines, fontsize=7.5, fmt="%.3g", inline=False):
        place, loss = ax.transLimits.transform(text.get_position()), text.get_text()
        in_way = abs(float(loss) - orange) < step / 2 or float(loss) < low or max(abs(place - 0.5)) > 0.45
        if in_way or loss in places or any(np.hypot(*(place - other)) < 0.12 for other in places.values()):
            text.remove()
        else:
            places[loss] = place
            text.set(color="k", path_effects=HALO)


def _draw_relief(ax: Axes, r: Surface, norm: Any, cmap: Any) -> None:
    """Draw the surface as a map with hills, lit from the upper left."""
    finite = np.isfinite(r.loss)
    filled = np.where(finite, r.loss, r.loss[finite].max())
    method = "cubic" if min(filled.shape) >= 4 and finite.all() else "linear"
    height = RegularGridInterpolator((r.y, r.x), np.asarray(norm(filled)), method)
    is_finite = RegularGridInterpolator((r.y, r.x), finite.astype(float), "nearest")
    y, x = (np.linspace(grid[0], grid[-1], PIXELS) for grid in (r.y, r.x))
    pixels = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1)
    relief = np.clip(height(pixels), 0.0, 1.0)  # a loss above the last level is drawn as a plateau
    image = LIGHT.shade_rgb(cmap(relief)[..., :3], HEIGHT * PIXELS * relief, blend_mode="soft", dy=-1.0)
    rgba = np.concatenate([image, (is_finite(pixels) > 0.5)[..., None].astype(float)], axis=-1)
    extent = (r.x[0], r.x[-1], r.y[0], r.y[-1])
    ax.imshow(np.clip(rgba, 0, 1), extent=extent, origin="lower", interpolation="bilinear", aspect="equal")


def _draw_profiles(
    axes: Sequence[Axes], results: Sequence[Surface], level_scale: LevelScale, rise: float
) -> None:
    """Draw for each surface its profile: median and quartiles of the loss by distance from the center.

    Gray lines are the medians of the other surfaces. An orange line marks the loss that is ``rise`` above the
    loss at the center. If ``rise`` is NaN, no orange line is drawn.
    """
    profiles = [geometry.profile(r) for r in results]
    levels, log = level_scale.levels, isinstance(level_scale.norm, LogNorm)
    # For each profile, the highest value of its upper quartile that is not above the last level.
    highest = [float(np.max(p.high, initial=0.0, where=p.high <= levels[-1])) for p in profiles]
    y_limits = levels[0], max(*highest, levels[1])  # at least from the first to the second level
    longest_distance = max(p.distance[-1] for p in profiles)
    for ax, r, own in zip(axes, results, profiles, strict=True):  # own: the profile of this panel's surface
        for p in profiles:
            if p is not own:
                label = "medians of other panels"
                ax.plot(p.distance, np.ma.masked_invalid(p.median), c=style.PALE, lw=1, label=label)
        # Infinite losses become large: a curve then leaves the panel, and does not end within it.
        low, median, high = np.minimum([own.low, own.median, own.high], 1e3 * levels[-1])
        ax.fill_between(own.distance, low, high, color=style.color_of(r.label), alpha=0.25, lw=0)
        ax.plot(own.distance, median, color=style.color_of(r.label))
        if np.isfinite(rise):
            ax.axhline(geometry.center_loss(r) + rise, zorder=1, **RISE_LINE)
        ax.set(xlim=(0, longest_distance), xlabel="distance from the center", ylim=y_limits)
        if log:
            ax.set_yscale("log")
            style.decimal_labels(ax.yaxis)
        else:
            ax.yaxis.set_major_locator(ticker.MaxNLocator(4))
    for ax in labeled_axes(axes):
        ax.set_ylabel(f"{results[0].loss_name}{style.unit(results[0], 'loss')}")


@dataclass(frozen=True)
class LevelScale:
    """The levels and colors of surfaces.

    Attributes:
        levels: the increasing levels.
        norm: the color scale, from the first to the last level.
        step: the distance of the lines, in words.
        reason: the kind of the scale and the reason for it, in words.
    """

    levels: Array
    norm: colors.Normalize
    step: str
    reason: str


def scale(
    losses: Sequence[Array], log: bool | None = None, levels: int | None = None, vmax: float | None = None,
    trajectory_losses: Sequence[Array] = (),
) -> LevelScale:  # fmt: skip
    """Return levels, color scale and texts for surfaces that are drawn together.

    By default the scale is logarithmic, with 25 levels, if losses differ by more than a factor of 100. With
    linear levels, a whole valley would then be below the first level. On a linear scale, levels are 0.005
    apart (DPSGD-2020, Figure 3) if this makes 4 to 40 lines, or else at about 24 round numbers. The highest
    2% of the losses are left above the last level if they would take more than half of the levels. Losses far
    from those along a trajectory are left outside of the levels, so that the trajectory has at least a third
    of the levels.

    Args:
        losses: arrays of losses in nats; values that are not finite are ignored.
        log, levels, vmax: arguments of :func:`draw_surfaces`.
        trajectory_losses: losses along trajectories.

    Returns:
        The scale; its first level is at most the lowest loss, unless a trajectory narrows the range.

    Raises:
        InputError: no loss is finite, or an argument that these losses do not allow.
    """
    full_range = _full_range(losses, levels, vmax)
    log, reason = _kind_of_scale(*full_range, log)
    # Without a trajectory, this is the full range.
    low, high = _range_around(np.concatenate([[], *trajectory_losses]), full_range, log)
    if (low, high) != full_range:
        reason += ", around the losses of the trajectory"
    high = high if vmax is None else vmax  # the user's vmax, also if a trajectory has narrowed the range
    if high - low <= 1e-12 * max(1.0, abs(high)):  # all losses are equal: a level below them, and one above
        margin = max(abs(high), 1.0) * 1e-6
        values, log = np.array([low - margin, high + margin]), False
    elif log:
        values = np.geomspace(low, high, max(2, levels or LOG_LEVELS))
    elif levels is None and 4 <= (high - low) / PAPER_SPACING <= MAX_LEVELS:
        start, stop = np.floor(low / PAPER_SPACING), np.ceil(high / PAPER_SPACING)
        values = np.arange(start, stop + 1) * PAPER_SPACING
    else:
        values = np.asarray(ticker.MaxNLocator(levels or LINEAR_LEVELS).tick_values(low, high))
    # Rounding must not leave a loss just outside of the levels: its place in the picture would be empty.
    values[0] = min(values[0], low)
    values[-1] = max(values[-1], high)
    distance = f"{100 * (values[1] / values[0] - 1):.0f}%" if log else f"{float(values[1] - values[0]):.3g}"
    norm_class = LogNorm if log else colors.Normalize
    return LevelScale(values, norm_class(values[0], values[-1]), f"lines {distance} apart", reason)


def _full_range(losses: Sequence[Array], levels: int | None, vmax: float | None) -> tuple[float, float]:
    """Return the lowest and the highest level, and check the user's ``levels`` and ``vmax``."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    if finite.size == 0:
        raise InputError("loss: no value is finite, there is nothing to draw")
    low, high, most = float(finite.min()), float(finite.max()), float(np.quantile(finite, 0.98))
    if levels is not None:
        positive("levels", levels, least=2)
    if vmax is not None:
        if not np.isfinite(vmax) or vmax <= low:
            raise InputError(f"vmax: {vmax:g} is not allowed, it must be above the lowest loss, {low:.4g}")
        return low, vmax
    if most > low and high - low > 2 * (most - low):
        high = most
    return low, high


def _range_around(path_losses: Array, full_range: tuple[float, float], log: bool) -> tuple[float, float]:
    """Return the range of the losses of a path, three times as wide, but within the full range."""
    path_losses = np.clip(path_losses[np.isfinite(path_losses)], *full_range)
    if not np.unique(path_losses).size > 1:
        return full_range
    transform, inverse = (np.log, np.exp) if log else (np.asarray, float)
    path_low, path_high = transform(path_losses.min()), transform(path_losses.max())
    low = max(full_range[0], float(inverse(2 * path_low - path_high)))
    return low, min(full_range[1], float(inverse(transform(low) + 3 * (path_high - path_low))))


def _kind_of_scale(low: float, high: float, log: bool | None) -> tuple[bool, str]:
    """Return whether the levels are at equal ratios, and the kind of the scale in words for the caption."""
    if log and low <= 0:
        raise InputError(f"log: not allowed, the lowest loss is {low:.4g}; it must be > 0")
    if log is None and logarithmic(np.array([low, high])):
        return True, "logarithmic, since losses differ by a factor of more than 100"
    return bool(log), "logarithmic" if log else "linear"


class _Distances(ticker.MaxNLocator):
    """Ticks at round distances, of an axis whose coordinate times ``length`` is a distance; at most 5."""

    axis: Any  # set by matplotlib

    def __init__(self, length: float) -> None:
        super().__init__(5)
        self.length = length

    def tick_values(self, vmin: float, vmax: float) -> Any:
        self.set_params(nbins=min(5, max(2, self.axis.get_tick_space())))
        return np.asarray(super().tick_values(vmin * self.length, vmax * self.length)) / self.length


def _axis_labels(r: Surface) -> tuple[str, str]:
    """Return the labels of the two axes of a surface."""
    if r.kind == "between":
        return r.axes[0], r.axes[1]
    u, v = ("u", "v") if r.kind == "random" else (axis.replace("= -", "= −") for axis in r.axes)
    if in_paper():
        u, v = u.split(",")[0], v.split(",")[0]
    x_label = style.fitting(f"distance along {u}", u, most=style.LABEL)
    return x_label, style.fitting(f"distance along {v}", v, most=style.LABEL)


def map_axes(ax: Axes) -> None:
    """Set up the axes of a map: the same scale on both, and gray where a loss is not finite."""
    ax.grid(False)
    ax.set(facecolor=style.PALE, aspect="equal")


def label_axes(ax: Axes, r: Surface) -> None:
    """Label the axes with distances in weight space; coordinates stay those of the plane."""
    lengths = (1.0, 1.0) if r.kind == "between" else geometry.lengths(r)
    for axis, length, label in zip((ax.xaxis, ax.yaxis), lengths, _axis_labels(r), strict=True):
        if 0 < length < LARGEST:
            axis.set_major_locator(_Distances(length))
            formatter = ticker.FuncFormatter(lambda v, _, by=length: f"{v * by:.3g}".replace("-", "−"))
            axis.set_major_formatter(formatter)
        axis.set_label_text(label)


def marks(r: Surface) -> list[tuple[np.ndarray[Any, Any], str, dict[str, Any]]]:
    """Return (coordinates (n, 2), name, look) of the marks on a surface.

    They are the lowest grid point, and the center or the markers of the plane.
    """
    finite = np.where(np.isfinite(r.loss), r.loss, np.inf)
    i, j = np.unravel_index(finite.argmin(), finite.shape)
    marked = [(np.array([[r.x[j], r.y[i]]]), "lowest grid point", LOWEST)]
    if r.kind == "pca" and len(r.markers):
        marked += [(r.markers, "trajectory", _PATH), (r.markers[-1:], "last checkpoint", MEAN)]
    elif r.kind == "learners" and len(r.markers):
        marked += [(r.markers[:-1], "learners", LEARNER), (r.markers[-1:], "their mean $w_a$", MEAN)]
    elif r.kind == "between":
        for label, point, (shape, color) in zip(r.labels, r.markers, _ANCHORS, strict=False):
            look = {**POINT, "marker": shape, "mfc": color, "ms": 7}
            marked.append((point[None], style.paper_name(label), look))
    else:
        marked.append((np.zeros((1, 2)), "center", CENTER))
    return marked


def level_lines(ax: Axes, x: Array, y: Array, loss: Array, levels: Any, label: str, **look: Any) -> None:
    """Draw contour lines with an entry in the legend.

    Args:
        look: the color, width and style of the lines, as matplotlib's plot has them.
    """
    ax.contour(x, y, loss, levels, colors=look["color"], linewidths=look["lw"], linestyles=look.get("ls"))
    ax.plot([], [], label=label, **look)  # legends have no entries of contours, but of this empty curve


def color_map_of(name: str | None) -> colors.Colormap:
    """Return matplotlib's color map of this name, or ``CMAP`` for None."""
    return CMAP if name is None else colormaps[choose("cmap", name, colormaps)]


def color_bar(figure: Figure, axes: Any, norm: Any, cmap: Any, label: str, values: Any = ()) -> None:
    """Draw one color bar for all panels.

    Args:
        norm, cmap, label: of the color bar, as matplotlib has them.
        values: drawn values; an arrow is at an end of the bar if some lie beyond that end.
    """
    is_below, is_above = np.any(np.less(values, norm.vmin)), np.any(np.greater(values, norm.vmax))
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    arrows: Any = extend[bool(is_below), bool(is_above)]
    bar = figure.colorbar(cm.ScalarMappable(norm, cmap), ax=axes, shrink=0.85, pad=0.02, extend=arrows)
    bar.set_label(label.split(", ")[0] if in_paper() else label)
    assert bar.solids is not None
    bar.solids.set(rasterized=False, edgecolor="face")  # else an image of few pixels in a PDF
    if isinstance(norm, LogNorm):
        style.decimal_labels(bar.ax.yaxis)


def _plane_note(r: Surface) -> str:
    """Return the kind of the plane and its span, in words."""
    norm = "not normalized" if r.norm == "none" else f"{r.norm}-normalized"
    norm = f", {norm}, up to ±{r.span:.3g} times each" if r.kind == "random" else ""
    return PLANES.get(r.kind, r.kind) + norm


def _panel_title(r: Surface, name: str) -> str:
    """Return a surface's name and the loss at its center; "" in a paper without a name."""
    if in_paper() and name == "surface":
        return ""
    center = r.describe()[0].value
    where = "near middle" if r.kind == "between" else "near center"
    return f"{name}\n{r.loss_name} {where} {center:.3g}".removeprefix("surface\n")


def caption_of(results: Sequence[Surface], colors: str = "") -> str:
    """Return the caption of surfaces: loss, samples, grid, plane. Different texts are in the panels' order.

    ``colors``: the kind of their color scale, in words.
    """
    parts = [
        style.joined(f"{r.samples:,}" for r in results) + " samples",
        style.joined(f"{len(r.x)} × {len(r.y)} points" for r in results),
        style.joined(map(_plane_note, results)),
    ]
    if any(r.batchnorm for r in results):
        parts.append(style.joined(style.batchnorm_note(r) or "no BatchNorm" for r in results))
    loss = style.loss_of(results).capitalize()
    parts += [f"colors: {colors}"] * bool(colors)
    return f"{loss} over {'; '.join(parts)}{style.interpolation_note(results)}."


def finding(results: Sequence[Surface]) -> str:
    """Return one line that says what the surfaces show, with numbers from them."""
    sentences = _flatness(results) if geometry.comparable(results) else _losses(results)
    return style.fitting(*(with_unit(results[0], sentence) for sentence in sentences))


def _losses(results: Sequence[Surface]) -> list[str]:
    name, first = results[0].loss_name, results[0]
    if len(results) == 1 and first.kind == "pca" and len(first.marker_loss):
        start, end = first.marker_loss[0], first.marker_loss[-1]
        return [f"Along the trajectory the {name} goes from {start:.3g} to {end:.3g} nat"]
    lowest = ", ".join(f"{r.describe()[1].value:.3g}" for r in results)
    return [f"Lowest {name} {lowest} nat", f"Lowest {name}"]


def _flatness(results: Sequence[Surface]) -> list[str]:
    """Return titles on the rise of the loss around each algorithm's weights, the preferred title first."""
    loss = results[0].loss_name
    names = []
    for k, r in enumerate(results):
        algorithm = style.paper_name(style.algorithm_in(r.label))
        names.append(algorithm or r.label.split(",")[0] or f"surface {k}")
    columns = {"rise": [*map(geometry.median_rise, results)], "center": [*map(geometry.center_loss, results)]}
    medians = pd.DataFrame(columns).groupby(names, sort=False).median()
    median_rise, center_loss = medians["rise"], medians["center"]
    if len(medians) == 1:
        rise = median_rise.iloc[0]
        maps = f"{len(results)} maps" if len(results) > 1 else "the map"
        return [f"The {loss} {'falls' if rise < 0 else 'rises'} by {abs(rise):.2g} nat (median of {maps})"]
    numbers = ", ".join(f"{name} {rise:.3g}" for name, rise in median_rise.items())
    words = f"Median rise of the {loss}"
    titles = [f"{words}: {numbers} nat", f"Rise of the {loss} (nat): {numbers}", words]
    flattest, steepest = median_rise.idxmin(), median_rise.idxmax()
    low_rise, high_rise = median_rise.min(), median_rise.max()
    # A ratio of rises compares minima. Centers are not taken for minima if a rise is not positive, or if the
    # losses at the centers differ by more than the larger rise (our choice).
    if not low_rise > 0 or abs(center_loss[flattest] - center_loss[steepest]) > high_rise:
        return titles
    ratio = high_rise / low_rise
    factor = f"{ratio:.2g} times" if ratio >= 1.1 else "about"  # 10% may be due to the seed (our choice)
    return [f"The {loss} rises {factor} as much around {steepest} as around {flattest}", *titles]

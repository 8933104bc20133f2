"""Loss surfaces: contours, three-dimensional surfaces, differences of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import cm, colors, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, shared_note, split_names
from landscape.plots.picture import panels, shared_legend, wrapped_panels
from landscape.plots.style import style as figure_style
from landscape.results.surface import Surface

PAPER_SPACING = 0.005  # distance between contour lines in DPSGD-2020, Figure 3
MAX_LEVELS = 40  # more lines than this cannot be told apart at this size (ours)
# The ratio of highest to lowest loss from which levels are at equal ratios, and their number then (ours).
LOG_RATIO, LOG_LEVELS = 100.0, 25
MAX_FACETS = 100  # along each axis of a 3-D picture: more than can be seen, and slow to draw (ours)
# Markers, as keyword arguments of matplotlib's plot. Colours from Okabe and Ito's palette.
_POINT: dict[str, Any] = {"ls": "none", "mec": "k", "mew": 0.8, "zorder": 5}
_CENTER: dict[str, Any] = {"marker": "+", "ls": "none", "mec": "#E69F00", "ms": 9, "mew": 2, "zorder": 6}
_LOWEST: dict[str, Any] = {**_POINT, "marker": "v", "mfc": "w", "ms": 6}
_LEARNER: dict[str, Any] = {**_POINT, "marker": "o", "mfc": "#D55E00", "ms": 6}
_MEAN: dict[str, Any] = {**_POINT, "marker": "*", "mfc": "#E69F00", "ms": 13}
_PATH: dict[str, Any] = {
    "marker": "o",
    "color": "#D55E00",
    "mec": "k",
    "mew": 0.6,
    "ms": 4.5,
    "lw": 1.4,
    "zorder": 5,
}
_ANCHORS = (("o", "#D55E00"), ("s", "#56B4E9"), ("D", "#CC79A7"))


def levels(losses: Sequence[Array]) -> Array:
    """Contour levels for surfaces that are drawn together.

    The levels are 0.005 apart (DPSGD-2020, Figure 3) if that takes 4 to 40 lines, else at round numbers.
    Losses that differ by more than a factor of 100 get levels at equal ratios: at equal distances a whole
    valley would lie below the first level. The highest 2% of the losses lie above the last level if they
    would otherwise take more than half of the levels.

    Args:
        losses: arrays of losses in nats; values that are not finite are ignored.

    Returns:
        Increasing levels; the first is at most the lowest loss.

    Raises:
        InputError: no loss is finite.

    Example:
        >>> levels([np.array([[0.0, 0.01], [0.02, np.nan]])])
        array([0.   , 0.005, 0.01 , 0.015, 0.02 ])
    """
    low, high = _range(losses)
    if high - low <= 1e-12 * max(1.0, abs(high)):  # a flat surface: one level on either side
        pad = max(abs(high), 1.0) * 1e-6
        return np.array([low - pad, high + pad])
    if (high - low) / PAPER_SPACING <= MAX_LEVELS and (high - low) / PAPER_SPACING >= 4:
        start, stop = np.floor(low / PAPER_SPACING), np.ceil(high / PAPER_SPACING)
        chosen = np.arange(start, stop + 1) * PAPER_SPACING
    elif _by_ratio(low, high):
        chosen = np.geomspace(low, high, LOG_LEVELS)
    else:
        chosen = np.asarray(ticker.MaxNLocator(24).tick_values(low, high))
    chosen[0], chosen[-1] = min(chosen[0], low), max(chosen[-1], high)  # a rounding must not leave a hole
    return chosen


def _range(losses: Sequence[Array]) -> tuple[float, float]:
    """The lowest and the highest level."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    if finite.size == 0:
        raise InputError("loss: no value is finite, there is nothing to draw")
    low, high, usual = float(finite.min()), float(finite.max()), float(np.quantile(finite, 0.98))
    return low, usual if usual > low and high - low > 2 * (usual - low) else high


def _by_ratio(low: float, high: float) -> bool:
    return low > 0 and high > max(LOG_RATIO * low, MAX_LEVELS * PAPER_SPACING)


def _scale(results: Sequence[Surface]) -> tuple[Array, colors.Normalize, str]:
    """Levels, colour scale and a text on the distance between lines, for surfaces drawn together."""
    losses = [r.loss for r in results]
    shared = levels(losses)
    if _by_ratio(*_range(losses)):
        step = f"each line {100 * (shared[1] / shared[0] - 1):.0f}% above the last"
        return shared, colors.LogNorm(shared[0], shared[-1]), step
    step = f"lines {float(shared[1] - shared[0]):.3g} apart"
    return shared, colors.Normalize(shared[0], shared[-1]), step


def _draw_contours(results: Sequence[Surface], title: str = "") -> Figure:
    """Filled contours with lines, one panel for each surface, at shared levels and colours.

    Markers show the lowest grid point, and either the centre or the weights that define the plane: the
    checkpoints that it passes through, the trajectory of a run, or the learners and their mean.
    """
    _check_grids(results)
    with figure_style():
        figure, axes = wrapped_panels(len(results), 5.0 if len(results) == 1 else 3.9, 4.7)
        shared, norm, step = _scale(results)
        plane, planes = shared_note([f"\n{_plane_note(r)}" for r in results])
        note, statistics = shared_note([batchnorm_note(r) for r in results])
        cmap = sns.color_palette("mako_r", as_cmap=True)
        for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
            _prepare_axes(ax, r)
            masked = np.ma.masked_invalid(r.loss)
            ax.contourf(r.x, r.y, masked, shared, cmap=cmap, norm=norm, extend="max")
            ax.contour(r.x, r.y, masked, shared, colors="k", linewidths=0.35, alpha=0.55)
            _mark(ax, r)
            ax.set_title(_surface_title(r) + planes[k] + statistics[k])
        above = any((r.loss[np.isfinite(r.loss)] > shared[-1]).any() for r in results)
        label = f"{split_names(results)} loss (nat), {step}"
        _add_scale_and_legend(figure, axes, norm, cmap, label, "max" if above else "neither")
        figure.suptitle(title or f"Loss{plane}{note}")
    return figure


def _draw_difference(results: Sequence[Surface], title: str = "") -> Figure:
    """The loss of the first surface minus that of the second: blue where it is negative, red where positive.

    Raises:
        InputError: not two surfaces, different grids, or directions that were drawn in different ways.
    """
    if len(results) != 2:
        raise InputError(f"difference: {len(results)} surfaces are not allowed, it takes two")
    a, b = results
    _check_grids([a])
    same_grid = np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
    if not same_grid or (a.kind, a.norm, a.seed, a.ignore) != (b.kind, b.norm, b.seed, b.ignore):
        raise InputError("difference: the two surfaces must have the same grid, span, kind of plane and seed")
    with np.errstate(invalid="ignore"):
        change = np.ma.masked_invalid(a.loss - b.loss)
    if change.count() == 0:
        raise InputError("loss: no value is finite in both, there is nothing to draw")
    reach = max(float(np.abs(change).max()), 1e-12)
    with figure_style():
        figure, axes = panels(1, 1, 5.2, 4.8)
        ax = axes[0]
        norm = colors.Normalize(-reach, reach)
        _prepare_axes(ax, a)
        ax.contourf(a.x, a.y, change, np.linspace(-reach, reach, 25), cmap="RdBu_r", norm=norm)
        label = f"difference of {split_names(results)} loss (nat)"
        if float(change.min()) < 0 < float(change.max()):
            ax.contour(a.x, a.y, change, [0.0], colors="k", linewidths=1.0)
            label += ", line: 0"
        ax.plot(0, 0, label="centre", **_CENTER)
        _add_scale_and_legend(figure, axes, norm, "RdBu_r", label)
        names = (a.label or "first", b.label or "second")
        note, notes = shared_note([batchnorm_note(r) for r in results])
        usual = f"Loss of {names[0]}{notes[0]}\nminus that of {names[1]}{notes[1]}{note}"
        figure.suptitle(title or usual)
    return figure


def _draw_3d(results: Sequence[Surface], title: str = "") -> Figure:
    """The loss as height above the plane, one panel for each surface, with shared heights and colours."""
    _check_grids(results)
    with figure_style():
        figure, axes = wrapped_panels(len(results), 4.8, 4.5, subplot_kw={"projection": "3d"})
        shared, norm, _ = _scale(results)
        top = max(float(np.max(r.loss, initial=-np.inf, where=np.isfinite(r.loss))) for r in results)
        notes = [f"\n{_plane_note(r)}\nx: {r.axes[0]}\ny: {r.axes[1]}" for r in results]
        plane, planes = shared_note(notes)
        note, statistics = shared_note([batchnorm_note(r) for r in results])
        cmap = sns.color_palette("mako_r", as_cmap=True)
        for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
            x, y = np.meshgrid(r.x, r.y)
            height = np.where(np.isfinite(r.loss), r.loss, np.nan)  # facets at a NaN are left out
            ax.plot_surface(
                x, y, height, cmap=cmap, norm=norm, lw=0.1, edgecolor="#00000040",
                rcount=MAX_FACETS, ccount=MAX_FACETS,
            )  # fmt: skip
            ax.set_zlim(shared[0], max(shared[-1], top))
            ax.view_init(elev=32, azim=-58)
            ax.set_box_aspect(None, zoom=0.85)
            ax.tick_params(labelsize=7.5, pad=0)
            ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
            ax.yaxis.set_major_locator(ticker.MaxNLocator(4))
            ax.set_xlabel("x", labelpad=0)
            ax.set_ylabel("y", labelpad=0)
            ax.set_title(_surface_title(r) + planes[k] + statistics[k])
        _add_scale_and_legend(figure, axes, norm, cmap, f"{split_names(results)} loss (nat)")
        figure.suptitle(title or f"Loss{plane}{note}")
    return figure


STYLES = {"contour": _draw_contours, "surface": _draw_3d, "difference": _draw_difference}


@draws(Surface)
def draw_surfaces(results: Sequence[Surface], title: str = "", style: str = "contour") -> Figure:
    """Surfaces as contours, as heights in three dimensions, or as the difference of two.

    Args:
        style: "contour", "surface" (three dimensions) or "difference" (the first of two minus the second).

    Raises:
        InputError: an unknown style, nothing finite to draw, a grid below 2 × 2.

    Example:
        >>> grid = np.linspace(-1, 1, 3)
        >>> loss = grid**2 + grid[:, None] ** 2
        >>> surface = Surface(
        ...     x=grid, y=grid, loss=loss, accuracy=loss, done=loss < 9, directions=np.eye(2),
        ...     center=np.zeros(2), kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64",
        ...     bn="center", path="batched")
        >>> draw_surfaces([surface], title="A parabola").get_suptitle()
        'A parabola'
    """
    return STYLES[choose("style", style, STYLES)](results, title)


def _check_grids(results: Sequence[Surface]) -> None:
    for r in results:
        if min(r.loss.shape) < 2:
            raise InputError(f"grid: {r.loss.shape[::-1]} points cannot be drawn as contours, 2 × 2 can")


def _prepare_axes(ax: Axes, r: Surface) -> None:
    ax.set_facecolor("#bbbbbb")  # shows through where a loss is not finite
    ax.grid(False)
    ax.set_aspect("equal")
    ax.set_xlabel(f"x ({r.axes[0]})")
    ax.set_ylabel(f"y ({r.axes[1]})")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(5))
    ax.yaxis.set_major_locator(ticker.MaxNLocator(5))


def _mark(ax: Axes, r: Surface) -> None:
    """Mark the lowest grid point, and the centre or the markers of the plane that lie inside the picture."""
    finite = np.where(np.isfinite(r.loss), r.loss, np.inf)
    i, j = np.unravel_index(finite.argmin(), finite.shape)
    ax.plot(r.x[j], r.y[i], label="lowest grid point", clip_on=False, **_LOWEST)
    ax.set_xlim(r.x[0], r.x[-1])
    ax.set_ylim(r.y[0], r.y[-1])
    if r.kind == "pca" and len(r.markers):
        ax.plot(*r.markers.T, label="trajectory", **_PATH)
        ax.plot(*r.markers[-1], label="last checkpoint", **_MEAN)
        ax.annotate(r.labels[0], r.markers[0], xytext=(5, 5), textcoords="offset points", fontsize=8.5)
    elif r.kind == "learners" and len(r.markers):
        ax.plot(*r.markers[:-1].T, label="learners", **_LEARNER)
        ax.plot(*r.markers[-1], label="their mean $w_a$", **_MEAN)
    elif r.kind == "between":
        for label, place, (shape, color) in zip(r.labels, r.markers, _ANCHORS, strict=False):
            ax.plot(*place, label=label, **{**_POINT, "marker": shape, "mfc": color, "ms": 7})
    else:
        ax.plot(0, 0, label="centre", **_CENTER)


def _add_scale_and_legend(
    figure: Figure, axes: Sequence[Any], norm: Any, cmap: Any, label: str, extend: Any = "neither"
) -> None:
    """One colour bar and one legend for all panels."""
    bar = figure.colorbar(cm.ScalarMappable(norm, cmap), ax=axes, shrink=0.85, pad=0.02, extend=extend)
    bar.set_label(label)
    names = [name for ax in axes for name in ax.get_legend_handles_labels()[1]]
    shared_legend(figure, axes, ncols=2 if max(map(len, names), default=0) > 20 else 4)


def _plane_note(r: Surface) -> str:
    """How the directions of the plane were chosen."""
    kinds = {
        "random": f"random directions, normalisation: {r.norm}"
        + ("\nbias and norm parameters fixed" if r.ignore == "bias+norm" else ""),
        "between": "plane through checkpoints",
        "pca": "principal components of the trajectory (distances)",
        "learners": "plane nearest to the learners (distances)",
        "eigen": "Hessian eigenvectors of unit length",
    }
    return kinds.get(r.kind, r.kind)


def _surface_title(r: Surface) -> str:
    center = r.loss[np.abs(r.y).argmin(), np.abs(r.x).argmin()]
    lowest = np.nanmin(np.where(np.isfinite(r.loss), r.loss, np.nan)) if np.isfinite(r.loss).any() else np.nan
    where = "near middle" if r.kind == "between" else "near centre"
    return f"{r.label or 'surface'}\n{where} {center:.4g}, lowest {lowest:.4g}"

"""Pictures of surfaces and lines: contours, 3-D, differences, curves. Nothing here computes a landscape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import seaborn as sns
from matplotlib import cm, colors, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.plots.picture import inside
from landscape.plots.picture import panels as panels
from landscape.plots.picture import several as several
from landscape.plots.values import drawing
from landscape.results.hessian_grid import HessianGrid
from landscape.results.line import Line
from landscape.results.spectrum import Spectrum
from landscape.results.surface import Surface

PAPER_SPACING = 0.005  # distance between contour lines in DPSGD-2020, Figure 3
MAX_LEVELS = 40  # more lines than this cannot be told apart at this size (ours)
LOG_RATIO, LOG_LEVELS = 100.0, 25  # from which ratio of highest to lowest, and how many levels then (ours)
MAX_FACETS = 100  # along each axis of a 3-D picture: more than can be seen, and slow to draw (ours)
_STYLE = str(Path(__file__).with_name("style.mplstyle"))
# How markers look: what the legend calls them, then matplotlib's words. Colours from Okabe and Ito's palette.
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


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The look of all figures, inside the block."""
    with matplotlib.style.context(_STYLE):
        yield


def plain_numbers(axis: Any) -> None:
    """Let a logarithmic ``axis`` read 0.5, 20, 100, as percentages are read, and not as powers of ten."""
    for setter in (axis.set_major_formatter, axis.set_minor_formatter):
        setter(_Plain(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


class _Plain(ticker.LogFormatter):
    """Labels the ticks that its base would, but as plain numbers below 1, too."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def levels(losses: Sequence[Array]) -> Array:
    """Levels for surfaces drawn together: 0.005 apart if that takes 4 to 40 lines, else at round numbers.

    Losses that differ a hundredfold get levels at equal ratios: at equal distances all of a valley would lie
    below the first. Where the highest 2% of the losses would take more than half of the levels, these end
    below them.
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
    """What the levels go from and to."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    if finite.size == 0:
        raise InputError("loss: no value is finite, there is nothing to draw")
    low, high, usual = float(finite.min()), float(finite.max()), float(np.quantile(finite, 0.98))
    return low, usual if usual > low and high - low > 2 * (usual - low) else high


def _by_ratio(low: float, high: float) -> bool:
    return low > 0 and high > max(LOG_RATIO * low, MAX_LEVELS * PAPER_SPACING)


def _scale(results: Sequence[Surface]) -> tuple[Array, colors.Normalize, str]:
    """Levels, colour scale and what the distance of two lines is, for surfaces drawn together."""
    losses = [r.loss for r in results]
    shared = levels(losses)
    if _by_ratio(*_range(losses)):
        step = f"each line {100 * (shared[1] / shared[0] - 1):.0f}% above the last"
        return shared, colors.LogNorm(shared[0], shared[-1]), step
    step = f"lines {float(shared[1] - shared[0]):.3g} apart"
    return shared, colors.Normalize(shared[0], shared[-1]), step


@drawing
def surfaces(results: Sequence[Surface], title: str = "") -> Figure:
    """Filled contours with lines, one panel a surface, at shared levels and colours.

    Marked are the grid's lowest point, and the centre or the weights that the plane was made from: the
    checkpoints it passes through, a run's trajectory, or the learners and their mean.
    """
    for r in results:
        _drawable(r)
    with style():
        figure, axes = several(len(results), 5.0 if len(results) == 1 else 3.9, 4.7)
        shared, norm, step = _scale(results)
        made, own = _common([f"\n{_made(r)}" for r in results])
        note, statistics = _common([bn_note(r) for r in results])
        cmap = sns.color_palette("mako_r", as_cmap=True)
        for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
            _ground(ax, r)
            masked = np.ma.masked_invalid(r.loss)
            ax.contourf(r.x, r.y, masked, shared, cmap=cmap, norm=norm, extend="max")
            ax.contour(r.x, r.y, masked, shared, colors="k", linewidths=0.35, alpha=0.55)
            _mark(ax, r)
            ax.set_title(_surface_title(r) + own[k] + statistics[k])
        above = any((r.loss[np.isfinite(r.loss)] > shared[-1]).any() for r in results)
        label = f"{_mean(results)} loss (nat), {step}"
        _finish(figure, axes, norm, cmap, label, "max" if above else "neither")
        figure.suptitle(title or f"Loss{made}{note}")
    return figure


@drawing
def difference(results: Sequence[Surface], title: str = "") -> Figure:
    """The first surface's loss less the second's: blue where the first is lower, red where it is higher.

    InputError unless there are two, on the same grid, with directions made the same way.
    """
    if len(results) != 2:
        raise InputError(f"difference: {len(results)} surfaces are not allowed, it takes two")
    a, b = results
    _drawable(a)
    same_grid = np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
    if not same_grid or (a.kind, a.norm, a.seed, a.ignore) != (b.kind, b.norm, b.seed, b.ignore):
        raise InputError("difference: the two surfaces must have the same grid, span, kind of plane and seed")
    with np.errstate(invalid="ignore"):
        less = np.ma.masked_invalid(a.loss - b.loss)
    if less.count() == 0:
        raise InputError("loss: no value is finite in both, there is nothing to draw")
    reach = max(float(np.abs(less).max()), 1e-12)
    with style():
        figure, axes = panels(1, 1, 5.2, 4.8)
        ax = axes[0]
        norm = colors.Normalize(-reach, reach)
        _ground(ax, a)
        ax.contourf(a.x, a.y, less, np.linspace(-reach, reach, 25), cmap="RdBu_r", norm=norm)
        label = f"difference of {_mean(results)} loss (nat)"
        if float(less.min()) < 0 < float(less.max()):
            ax.contour(a.x, a.y, less, [0.0], colors="k", linewidths=1.0)
            label += ", line: 0"
        ax.plot(0, 0, label="centre", **_CENTER)
        _finish(figure, axes, norm, "RdBu_r", label)
        names = (a.label or "first", b.label or "second")
        note, own = _common([bn_note(r) for r in results])
        figure.suptitle(title or f"Loss of {names[0]}{own[0]}\nless that of {names[1]}{own[1]}{note}")
    return figure


@drawing
def surfaces_3d(results: Sequence[Surface], title: str = "") -> Figure:
    """The loss as height over the plane, one panel a surface, with shared height axis and colours."""
    for r in results:
        _drawable(r)
    with style():
        figure, axes = several(len(results), 4.8, 4.5, subplot_kw={"projection": "3d"})
        shared, norm, _ = _scale(results)
        top = max(float(np.max(r.loss, initial=-np.inf, where=np.isfinite(r.loss))) for r in results)
        made, own = _common([f"\n{_made(r)}\nx: {r.axes[0]}\ny: {r.axes[1]}" for r in results])
        note, statistics = _common([bn_note(r) for r in results])
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
            ax.set_title(_surface_title(r) + own[k] + statistics[k])
        _finish(figure, axes, norm, cmap, f"{_mean(results)} loss (nat)")
        figure.suptitle(title or f"Loss{made}{note}")
    return figure


@drawing
def lines(results: Sequence[Line], title: str = "") -> Figure:
    """Loss above, accuracy below, along one or several lines of one kind; barriers in the legend."""
    kinds = {r.kind for r in results}
    if len(kinds) != 1:
        raise InputError("FILE: interpolations and directions have different axes, give files of one kind")
    inner = kinds == {"interpolation"}
    accurate = not inside() and any(np.isfinite(r.accuracy).any() for r in results)
    with style():
        figure, axes = panels(2 if accurate else 1, 1, 5.4, 2.6, sharex=True)
        note, own = _common([bn_note(r) for r in results])
        for k, r in enumerate(results):
            name = " to ".join(r.ends) or r.label or f"line {k + 1}"
            if inner:
                name += f" (barrier {r.barrier:.3g})"
            # What is not finite leaves a gap: a curve is not drawn across it.
            axes[0].plot(r.t, np.where(np.isfinite(r.loss), r.loss, np.nan), label=name + own[k])
            if accurate:
                axes[1].plot(r.t, 100 * r.accuracy)
            if inner and np.isfinite(r.barrier):
                axes[0].plot([0, 1], r.loss[[0, -1]], color=f"C{k % 7}", lw=0.9, ls=":")
        axes[0].set_ylabel(f"{_mean(results)} loss (nat)")
        if accurate:
            axes[1].set_ylabel(f"{_mean(results)} accuracy (%)")
        axes[-1].set_xlabel("t (0: first end, 1: second end)" if inner else "t (step along the direction)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
        usual = (
            "Loss between two sets of weights; dotted: the straight line" if inner else "Loss along a line"
        )
        figure.suptitle(title or usual + note)
    return figure


def _mean(results: Sequence[Surface | Line]) -> str:
    """What the losses are means over: the split, or the splits of the panels or lines in turn."""
    if len({r.split for r in results}) > 1:
        return ", ".join(r.split or "?" for r in results)
    return results[0].split or "mean"


def _drawable(r: Surface) -> None:
    if min(r.loss.shape) < 2:
        raise InputError(f"grid: {r.loss.shape[::-1]} points cannot be drawn as contours, 2 × 2 can")


def _ground(ax: Axes, r: Surface) -> None:
    ax.set_facecolor("#bbbbbb")  # shows through where a loss is not finite
    ax.grid(False)
    ax.set_aspect("equal")
    ax.set_xlabel(f"x ({r.axes[0]})")
    ax.set_ylabel(f"y ({r.axes[1]})")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(5))
    ax.yaxis.set_major_locator(ticker.MaxNLocator(5))


def _mark(ax: Axes, r: Surface) -> None:
    """The lowest grid point, and the centre or the markers; those out of the picture are left out."""
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


def _finish(
    figure: Figure, axes: Sequence[Any], norm: Any, cmap: Any, label: str, extend: Any = "neither"
) -> None:
    """One colour bar and one legend for all panels."""
    bar = figure.colorbar(cm.ScalarMappable(norm, cmap), ax=axes, shrink=0.85, pad=0.02, extend=extend)
    bar.set_label(label)
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    if entries:
        columns = 2 if max(map(len, entries)) > 20 else 4
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def _made(r: Surface) -> str:
    """How the plane was made."""
    kinds = {
        "random": f"random directions, normalisation: {r.norm}"
        + ("\nbias and norm parameters fixed" if r.ignore == "bias+norm" else ""),
        "between": "plane through checkpoints",
        "pca": "principal components of the trajectory (distances)",
        "learners": "plane nearest to the learners (distances)",
        "eigen": "Hessian eigenvectors of unit length",
    }
    return kinds.get(r.kind, r.kind)


def _common(notes: Sequence[str]) -> tuple[str, list[str]]:
    """A note for the figure and one for each result: what all share is said once, what differs at each."""
    if len(set(notes)) == 1:
        return notes[0], [""] * len(notes)
    return "", list(notes)


def bn_note(r: Surface | Line | HessianGrid | Spectrum) -> str:
    """A line about the statistics that BatchNorm used; "" without BatchNorm."""
    if not r.batchnorm:
        return ""
    notes = {
        "center": "the centre's statistics",
        "recalibrate": f"from {r.bn_samples:,} samples a point",
        "train": f"statistics of batches of {r.bn_samples:,}" if r.bn_samples else "statistics of each batch",
    }
    return f"\nBatchNorm: {notes.get(r.bn, r.bn)}"


def _surface_title(r: Surface) -> str:
    center = r.loss[np.abs(r.y).argmin(), np.abs(r.x).argmin()]
    lowest = np.nanmin(np.where(np.isfinite(r.loss), r.loss, np.nan)) if np.isfinite(r.loss).any() else np.nan
    where = "near middle" if r.kind == "between" else "near centre"
    return f"{r.label or 'surface'}\n{where} {center:.4g}, lowest {lowest:.4g}"

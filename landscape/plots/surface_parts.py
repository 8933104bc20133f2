"""Parts of pictures of surfaces: colour scales and levels, markers, axes, panels of profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import cm, colors, ticker
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import LARGEST, Array
from landscape.core.options import positive
from landscape.geometry import profiles
from landscape.plots.picture import shared_legend
from landscape.plots.style import (
    algorithm_in,
    batchnorm_note,
    decimal_labels,
    interpolation_note,
    paper_name,
    split_names,
)
from landscape.results.grids import Plane, Surface
from landscape.results.shown import LOG_RATIO, logarithmic

PAPER_SPACING = 0.005  # distance between contour lines in DPSGD-2020, Figure 3
MAX_LEVELS = 40  # more lines than this cannot be told apart at this size (ours)
LOG_LEVELS = 25  # at equal ratios (ours)


@dataclass(frozen=True)
class Look:
    """How surfaces are drawn where the user says so; None: the default.

    Attributes:
        log: whether levels and colours are at equal ratios; None: see :func:`.shown.logarithmic`.
        levels: about how many levels.
        vmax: the highest level; higher losses have the last colour.
        cmap: a colour map of matplotlib.
        labels: whether contour lines are labelled with their losses.
    """

    log: bool | None = None
    levels: int | None = None
    vmax: float | None = None
    cmap: str | None = None
    labels: bool = False


@dataclass(frozen=True)
class Scale:
    """Increasing ``levels``, the colour scale ``norm``, the ``step`` between lines and ``why`` it is so."""

    levels: Array
    norm: colors.Normalize
    step: str
    why: str


def levels(losses: Sequence[Array], look: Look | None = None) -> Array:
    """Contour levels for surfaces that are drawn together.

    The levels are 0.005 apart (DPSGD-2020, Figure 3) if that takes 4 to 40 lines, else at round numbers.
    Losses that differ by more than a factor of 100 get levels at equal ratios: at equal distances a whole
    valley would lie below the first level. The highest 2% of the losses lie above the last level if they
    would otherwise take more than half of the levels.

    Args:
        losses: arrays of losses in nats; values that are not finite are ignored.
        look: what the user chose.

    Returns:
        Increasing levels; the first is at most the lowest loss.

    Raises:
        InputError: no loss is finite, or a choice that these losses do not allow.
    """
    return scale(losses, look).levels


def scale(losses: Sequence[Array], look: Look | None = None) -> Scale:
    """Levels, colour scale and texts for surfaces that are drawn together; see :func:`levels`."""
    look = look or Look()
    low, high = _range(losses, look)
    log, why = _is_logarithmic(low, high, look)
    flat = high - low <= 1e-12 * max(1.0, abs(high))
    if flat:  # one level on either side
        pad = max(abs(high), 1.0) * 1e-6
        chosen, log = np.array([low - pad, high + pad]), False
    elif log:
        chosen = np.geomspace(low, high, max(2, look.levels or LOG_LEVELS))
    elif look.levels is None and 4 <= (high - low) / PAPER_SPACING <= MAX_LEVELS:
        start, stop = np.floor(low / PAPER_SPACING), np.ceil(high / PAPER_SPACING)
        chosen = np.arange(start, stop + 1) * PAPER_SPACING
    else:
        chosen = np.asarray(ticker.MaxNLocator(look.levels or 24).tick_values(low, high))
    chosen[0] = min(chosen[0], low)  # a rounding must not leave a hole
    chosen[-1] = max(chosen[-1], high)
    if log:
        return Scale(
            chosen,
            colors.LogNorm(chosen[0], chosen[-1]),
            f"each line {100 * (chosen[1] / chosen[0] - 1):.0f}% above the last",
            why,
        )
    step = f"lines {float(chosen[1] - chosen[0]):.3g} apart"
    return Scale(chosen, colors.Normalize(chosen[0], chosen[-1]), step, why)


def _range(losses: Sequence[Array], look: Look) -> tuple[float, float]:
    """The lowest and the highest level."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    if finite.size == 0:
        raise InputError("loss: no value is finite, there is nothing to draw")
    low, high, usual = float(finite.min()), float(finite.max()), float(np.quantile(finite, 0.98))
    if look.levels is not None:
        positive("--levels", look.levels, least=2)
    if look.vmax is not None:
        if not np.isfinite(look.vmax) or look.vmax <= low:
            raise InputError(
                f"--vmax: {look.vmax:g} is not allowed, it must be above the lowest loss, {low:.4g}"
            )
        return low, look.vmax
    return low, usual if usual > low and high - low > 2 * (usual - low) else high


def _is_logarithmic(low: float, high: float, look: Look) -> tuple[bool, str]:
    """Whether levels are at equal ratios, and why, for the caption."""
    if look.log is not None:
        if look.log and low <= 0:
            raise InputError(
                f"--log: not allowed, the lowest loss is {low:.4g}; it must be > 0 (or --linear)"
            )
        return look.log, f"{'logarithmic' if look.log else 'linear'}, as asked"
    if logarithmic(np.array([low, high])):
        return True, f"logarithmic, as losses differ by a factor of {high / low:.3g}, more than {LOG_RATIO:g}"
    if low <= 0:
        return False, "linear, as not all losses are > 0"
    return False, f"linear, as losses differ by a factor of {high / low:.3g}, at most {LOG_RATIO:g}"


# Markers, as keyword arguments of matplotlib's plot. Colours from Okabe and Ito's palette.
_POINT: dict[str, Any] = {"ls": "none", "mec": "k", "mew": 0.8, "zorder": 5}
CENTER: dict[str, Any] = {"marker": "+", "ls": "none", "mec": "#E69F00", "ms": 9, "mew": 2, "zorder": 6}
_LOWEST: dict[str, Any] = {**_POINT, "marker": "v", "mfc": "w", "ms": 6}
LEARNER: dict[str, Any] = {**_POINT, "marker": "o", "mfc": "#F0E442", "ms": 6}
MEAN: dict[str, Any] = {**_POINT, "marker": "*", "mfc": "#E69F00", "ms": 13}
_PATH: dict[str, Any] = {
    "marker": "o",
    "color": "#F0E442",
    "mec": "k",
    "mew": 0.6,
    "ms": 4.5,
    "lw": 1.4,
    "zorder": 5,
}
_ANCHORS = (("o", "#F0E442"), ("s", "#56B4E9"), ("D", "#CC79A7"))
_KINDS = {
    "between": "plane through checkpoints",
    "pca": "principal components of the trajectory",
    "learners": "plane nearest to the learners",
    "eigen": "Hessian eigenvectors",
}


def check_grids(results: Sequence[Surface]) -> None:
    """Check that each grid has 2 × 2 points or more.

    Raises:
        InputError: for a smaller one.
    """
    for r in results:
        if min(r.loss.shape) < 2:
            raise InputError(f"grid: {r.loss.shape[::-1]} points cannot be drawn as contours, 2 × 2 can")


class _Distances(ticker.MaxNLocator):
    """Ticks at round distances, of an axis whose coordinate times ``length`` is a distance."""

    def __init__(self, length: float) -> None:
        super().__init__(5)
        self.length = length

    def tick_values(self, vmin: float, vmax: float) -> Any:
        return np.asarray(super().tick_values(vmin * self.length, vmax * self.length)) / self.length


def _number(value: float) -> str:
    """A number of an axis with a minus sign, as matplotlib writes it."""
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def axis_labels(r: Surface) -> tuple[str, str]:
    """The labels of the two axes of a surface."""
    weights = profiles.lengths(r)[2]
    if r.kind == "between":
        return r.axes[0], r.axes[1]
    usual = Plane.__dataclass_fields__["axes"].default
    names = ("u", "v") if r.axes == usual else r.axes
    gap = " " if names[0] == "u" else "\n"
    return f"distance along {names[0]}{gap}(weights' norm = {weights:.3g})", f"distance along {names[1]}"


def label_axes(ax: Axes, r: Surface) -> None:
    """Label the axes with distances in weight space; coordinates stay those of the plane."""
    lengths = (1.0, 1.0) if r.kind == "between" else profiles.lengths(r)[:2]
    for axis, length, label in zip((ax.xaxis, ax.yaxis), lengths, axis_labels(r), strict=True):
        if 0 < length < LARGEST:
            axis.set_major_locator(_Distances(length))
            axis.set_major_formatter(ticker.FuncFormatter(lambda v, _, by=length: _number(v * by)))
        axis.set_label_text(label)


def marks(r: Surface) -> list[tuple[np.ndarray[Any, Any], str, dict[str, Any]]]:
    """(coordinates (n, 2), name, look) of what is marked on a surface.

    That is the lowest grid point, and the centre or the markers of the plane.
    """
    finite = np.where(np.isfinite(r.loss), r.loss, np.inf)
    i, j = np.unravel_index(finite.argmin(), finite.shape)
    marked = [(np.array([[r.x[j], r.y[i]]]), "lowest grid point", {**_LOWEST, "clip_on": False})]
    if r.kind == "pca" and len(r.markers):
        marked += [(r.markers, "trajectory", _PATH), (r.markers[-1:], "last checkpoint", MEAN)]
    elif r.kind == "learners" and len(r.markers):
        marked += [(r.markers[:-1], "learners", LEARNER), (r.markers[-1:], "their mean $w_a$", MEAN)]
    elif r.kind == "between":
        for label, place, (shape, color) in zip(r.labels, r.markers, _ANCHORS, strict=False):
            look = {**_POINT, "marker": shape, "mfc": color, "ms": 7}
            marked.append((place[None], paper_name(label), look))
    else:
        marked.append((np.zeros((1, 2)), "centre", CENTER))
    return marked


def mark(ax: Axes, r: Surface) -> None:
    """Draw :func:`marks` on a contour, which keeps the limits of the grid."""
    for places, label, look in marks(r):
        ax.plot(*places.T, label=label, **look)
    ax.set_xlim(r.x[0], r.x[-1])
    ax.set_ylim(r.y[0], r.y[-1])
    if r.kind == "pca" and len(r.markers):
        ax.annotate(r.labels[0], r.markers[0], xytext=(5, 5), textcoords="offset points", fontsize=8.5)


def add_scale_and_legend(
    figure: Figure, axes: Sequence[Any], norm: Any, cmap: Any, label: str, extend: Any = "neither"
) -> None:
    """One colour bar and one legend for all panels.

    Args:
        figure, axes: the figure and its panels.
        norm, cmap, label, extend: of the colour bar, as matplotlib has them.
    """
    bar = figure.colorbar(cm.ScalarMappable(norm, cmap), ax=axes, shrink=0.85, pad=0.02, extend=extend)
    bar.set_label(label)
    if isinstance(norm, LogNorm):
        decimal_labels(bar.ax.yaxis)
    names = [name for ax in axes for name in ax.get_legend_handles_labels()[1]]
    shared_legend(figure, axes, ncols=2 if max(map(len, names), default=0) > 20 else 4)


def plane_note(r: Surface) -> str:
    """How the plane was chosen, and how far it reaches."""
    note = _KINDS.get(r.kind, r.kind)
    if r.kind == "random":
        fixed = ", bias and norm parameters fixed" if r.ignore == "bias+norm" else ""
        note = f"random directions u, v, normalisation: {r.norm}{fixed}"
    u, v, _ = profiles.lengths(r)
    steps = f", ‖u‖ = {u:.3g}, ‖v‖ = {v:.3g}" if r.kind == "random" else ""
    return f"{note}{steps}, span {r.span:.3g}"


def panel_title(r: Surface) -> str:
    """The name of a surface, the loss at its centre and the lowest one."""
    center = r.loss[np.abs(r.y).argmin(), np.abs(r.x).argmin()]
    lowest = np.nanmin(np.where(np.isfinite(r.loss), r.loss, np.nan)) if np.isfinite(r.loss).any() else np.nan
    where = "near middle" if r.kind == "between" else "near centre"
    return f"{paper_name(r.label) or 'surface'}\n{where} {center:.4g}, lowest {lowest:.4g}"


def settings(results: Sequence[Surface]) -> str:
    """What the surfaces are of, for the caption; what differs is named in the order of the panels."""
    data = [
        f"{split_names(results).capitalize()} loss over {_joined(f'{r.samples:,}' for r in results)} samples"
    ]
    data.append(_joined(f"{len(r.x)} × {len(r.y)} points" for r in results))
    data.append(_joined(plane_note(r) for r in results))
    notes = _joined(batchnorm_note(r).strip() or "no BatchNorm" for r in results)
    text = "; ".join(data + [notes] * any(r.batchnorm for r in results))
    return f"{text}{interpolation_note(results)}."


def _joined(texts: Any) -> str:
    return " / ".join(dict.fromkeys(texts))


def finding(results: Sequence[Surface]) -> str:
    """One line that says what the surfaces show, with numbers from them."""
    if profiles.comparable(results):
        return _flatness(results)
    if len(results) == 1 and len(results[0].marker_loss):
        losses = results[0].marker_loss
        if results[0].kind == "pca":
            return f"Along the trajectory the loss goes from {losses[0]:.3g} to {losses[-1]:.3g} nat"
        named = zip(results[0].labels, losses, strict=True)
        return f"Loss at {', '.join(f'{paper_name(label)}: {loss:.3g}' for label, loss in named)} nat"
    lowest = [float(np.min(r.loss, initial=np.inf, where=np.isfinite(r.loss))) for r in results]
    return f"Lowest loss {', '.join(f'{loss:.3g}' for loss in lowest)} nat"


def _flatness(results: Sequence[Surface]) -> str:
    rises: dict[str, list[float]] = {}
    centers: dict[str, list[float]] = {}
    for k, r in enumerate(results):
        algorithm = algorithm_in(r.label)
        name = paper_name(algorithm) or r.label.split(",")[0] or f"surface {k + 1}"
        rises.setdefault(name, []).append(profiles.median_rise(r))
        centers.setdefault(name, []).append(profiles.center_loss(r))
    middle = {name: float(np.median(values)) for name, values in rises.items()}
    if len(middle) == 1:
        ((name, rise),) = middle.items()
        where = f"the weights of {name}" if results[0].label else "the centre"
        many = f", {len(results)} surfaces" if len(results) > 1 else ""
        return f"Around {where} the loss rises by {rise:.3g} nat (median over the plane{many})"
    flat, steep = min(middle, key=middle.__getitem__), max(middle, key=middle.__getitem__)
    if not middle[flat] > 0:
        listed = ", ".join(f"{name} {rise:.3g}" for name, rise in middle.items())
        return f"Median rise of the loss around the centre: {listed} nat"
    ratio = middle[steep] / middle[flat]
    here, there = float(np.median(centers[flat])), float(np.median(centers[steep]))
    if abs(here - there) > middle[steep]:  # weights of losses that far apart are not all at a minimum
        level = f"at {here:.3g} against {there:.3g} nat"
        return f"The loss is {ratio:.2g} times as flat around {flat}'s weights as around {steep}'s, {level}"
    if ratio < 1.1:  # closer than seeds differ (ours)
        return f"{flat}'s minimum is about as flat as {steep}'s (median rises of the loss within 10%)"
    return f"{flat}'s minimum is {ratio:.2g} times as flat as {steep}'s"

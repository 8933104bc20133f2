"""Pictures of Hessian grids, counts of labels, lines and basins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.plots import draws, style, surface
from landscape.plots.picture import finish, labeled_axes, panels, stacked_panels, wrapped, wrapped_panels
from landscape.results.base import with_unit
from landscape.results.comparison import PATHS, Connection
from landscape.results.grids import HessianGrid, Line
from landscape.results.noise import LabelCounts
from landscape.results.surfaces import Basins

# Characters in a line of a panel's title (our choice: more would reach into the next panel).
TITLE = 34


def starred(r: HessianGrid) -> Array:
    """Return the ratios (ny, nx) as text, with a star where the eigenvalues have not converged."""
    pairs = zip(r.ratio.flat, r.usable.flat, strict=True)
    texts = [f"{ratio:#.2g}".rstrip(".") + "*" * (not usable) for ratio, usable in pairs]
    return np.reshape(texts, r.ratio.shape)


@draws(HessianGrid)
def draw_hessian_grids(
    results: Sequence[HessianGrid], title: str = "", *, vmax: float | None = None, cmap: str | None = None
) -> Figure:
    """Draw heatmaps of |λ_min|/|λ_max|, one panel for each grid, with one color scale.

    Each title gives the median ratio over the points whose eigenvalues have converged. A grid of at most 64
    points has its ratios as numbers; a star marks ratios whose eigenvalues have not converged.

    Args:
        vmax: the ratio with the darkest color; larger ratios have the same color. Default: the largest ratio,
            but at most 1 (our choice: where λ_max is near 0, ratios have no bound).
        cmap: a color map of matplotlib. Default: the color map of contours.

    Raises:
        InputError: a vmax or color map that is not allowed.
    """
    color_map = surface.color_map_of(cmap)
    if vmax is not None:
        positive("vmax", vmax)
    # The panels are named "ratio", or "ratio 0", "ratio 1" and so on.
    figure, axes = wrapped_panels(len(results), 3.5, 3.4, names="ratio")
    finite_ratios = np.concatenate([r.ratio[np.isfinite(r.ratio)] for r in results])
    largest = float(finite_ratios.max(initial=0.0))
    if vmax is None:
        vmax = min(largest, 1.0) if largest > 0 else 1.0
    for ax, r, name in zip(axes, results, style.names_of(results, "grid"), strict=True):
        # The first row of a heatmap is at the top, but y grows upwards: rows are reversed.
        numbers = starred(r)[::-1] if r.ratio.size <= 64 else None  # more do not fit (our choice)
        x, y = ([f"{v:.2g}".replace("-", "−") for v in values] for values in (r.x, r.y[::-1]))
        _heatmap(ax, r.ratio[::-1], vmax, color_map, x, y, annot=numbers, fmt="", square=True)
        usable = r.ratio[r.usable]
        median_text = f"{np.median(usable):.3g}" if usable.size else "–"
        count_note = f" ({usable.size} of {r.ratio.size} points)" if usable.size < r.ratio.size else ""
        ax.set(title=f"{wrapped(name, TITLE)}\nmedian {median_text}{count_note}", xlabel="x", ylabel="y")
    label = r"$|\lambda_{min}| / |\lambda_{max}|$"
    surface.color_bar(figure, axes, colors.Normalize(0.0, vmax), color_map, label, largest)
    text = f"{style.samples_of(results)}{style.interpolation_note(results)}."
    text = f"A low ratio means nearly convex. x, y: multiples of the plane's directions. {text}"
    return finish(figure, title or style.headline(results), text)


@draws(LabelCounts)
def draw_label_counts(results: Sequence[LabelCounts], title: str = "") -> Figure:
    """Draw samples by learner (down) and label (across), one panel for each run, with one color scale.

    Up to 400 cells have their number.
    """
    figure, axes = wrapped_panels(len(results), 5.2, 3.6, names="counts")
    top = max(float(r.counts.max()) for r in results)
    for ax, r, name in zip(axes, results, style.names_of(results, "run"), strict=True):
        labels, learners = [f"{label:g}" for label in r.classes], range(len(r.counts))
        numbers = {"annot": r.counts.size <= 400, "fmt": ".0f"}
        _heatmap(ax, r.counts, top, style.SEQUENTIAL, labels, learners, linewidths=0.5, **numbers)
        ax.set(title=f"{name}\n{r.division}", xlabel="label", ylabel="learner")
    text = "Training samples by learner and label; a darker cell has more."
    return finish(figure, title or style.headline(results), text)


def _heatmap(
    ax: Axes, values: Array, top: float, cmap: Any, x_labels: Any, y_labels: Any, **options: Any
) -> None:
    """Draw ``values`` as colors from 0 to ``top``, with options of seaborn's ``heatmap``."""
    look = {"cmap": cmap, "cbar": False, "annot_kws": {"fontsize": 9}}
    look |= {"xticklabels": x_labels, "yticklabels": y_labels}
    sns.heatmap(values, ax=ax, vmin=0.0, vmax=top, **look, **options)
    ax.tick_params(axis="y", rotation=0)


@draws(Line)
def draw_lines(results: Sequence[Line], title: str = "") -> Figure:
    """Draw the loss and, below it, accuracy and metrics along lines; the legend has the barriers.

    Raises:
        InputError: lines between two sets of weights together with lines along a direction.
    """
    kinds = {r.kind for r in results}
    if len(kinds) != 1:
        raise InputError("results: interpolations and directions have different axes, give one kind")
    is_between = kinds == {"interpolation"}  # lines between two sets of weights
    quantities = _drawn_quantities(results)
    height = 2.6 if len(quantities) < 3 else 1.7
    # If the user gives ``ax``, the panels ``beside`` are not shown: only the first, of the loss, is.
    figure, axes = panels(len(quantities), 1, 6.4, height, quantities, beside=quantities[1:], sharex=True)
    notes = [style.batchnorm_note(r) for r in results]
    shared_note = notes[0] if len(set(notes)) == 1 else ""  # different notes are in the legend
    colors_of_lines = style.colors_of([" to ".join(r.labels) or r.label for r in results])
    for k, (r, color) in enumerate(zip(results, colors_of_lines, strict=True)):
        name_of_ends = " to ".join(style.paper_name(label) for label in r.labels)
        legend_name = name_of_ends or style.paper_name(r.label) or f"line {k + 1}"
        if is_between:
            legend_name += f" (barrier {r.barrier:.3g})"
        if notes[k] and not shared_note:
            legend_name += f"\n{notes[k]}"
        for ax, quantity in zip(axes, quantities, strict=True):
            ax.plot(r.t, _values(r, quantity), color=color, label=legend_name)
        if is_between and np.isfinite(r.barrier):
            axes[0].plot([0, 1], r.loss[[0, -1]], color=color, lw=0.9, ls=":")
    _label_quantities(axes, quantities, results)
    ends = results[0].labels if len(results) == 1 else ()
    start, end = ends if len(ends) == 2 else ("first end", "second end")
    for ax in labeled_axes(axes, "last_row"):
        ax.set_xlabel(f"t (0: {start}, 1: {end})" if is_between else "t, along the direction")
    default_title = style.headline(results) if is_between else "Loss along a line"
    lines_note = "dotted: between the ends' losses; barrier: the largest rise above it" if is_between else ""
    text = style.sentence(lines_note, shared_note, style.interpolation_note(results).removeprefix("; "))
    return finish(figure, title or default_title, text, axes[:1], ncols=1)


_QUANTITIES = {"accuracy": "accuracy (%)", "f1": "F1 score", "calibration": "calibration error"}


def _drawn_quantities(results: Sequence[Line] | Sequence[Connection]) -> list[str]:
    """Return the quantities with a panel: loss, accuracy if a result has it, metrics of all results."""
    has_accuracy = any(np.isfinite(r.accuracy).any() for r in results)
    names = ["loss", "accuracy"] if has_accuracy else ["loss"]
    return names + [name for name in results[0].metric_names if all(name in r.metric_names for r in results)]


def _values(r: Line | Connection, quantity: str) -> Array:
    """Return the values of a quantity, accuracy in %; where they are not finite, curves have a gap."""
    values = r.column(quantity) * (100 if quantity == "accuracy" else 1)
    return np.where(np.isfinite(values), values, np.nan)


def _label_quantities(axes: Sequence[Axes], quantities: Sequence[str], results: Sequence[Any]) -> None:
    labels = _QUANTITIES | {"loss": style.loss_label(results)}
    for ax, quantity in zip(axes, quantities, strict=True):
        ax.set_ylabel(labels.get(quantity, quantity))


@draws(Connection)
def draw_connections(results: Sequence[Connection], title: str = "") -> Figure:
    """Draw loss and, below it, accuracy and metrics on the three paths; a column for each result."""
    names, columns = _drawn_quantities(results), len(results)
    panel_names = [f"{name} {k}" if columns > 1 else name for name in names for k in range(columns)]
    width = 6.4 if columns == 1 else 4.6
    figure, axes = panels(
        len(names), columns, width, 2.6, panel_names, panel_names[columns:], sharex=True, sharey="row"
    )
    for k, (r, name) in enumerate(zip(results, style.names_of(results, "pair"), strict=True)):
        column = axes[k::columns]
        for path, (label, color) in enumerate(zip(PATHS, style.CYCLE, strict=False)):
            curve_label = f"{label} (barrier {r.barrier[path]:.2g})" if columns == 1 else label
            for ax, quantity in zip(column, names, strict=True):
                ax.plot(r.t, _values(r, quantity)[path], color=color, label=curve_label)
        if columns > 1:
            column[0].set_title(name)
        column[-1].set_xlabel("t (0: first, 1: second weights)")
    _label_quantities(axes[::columns], names, results)
    text = f"Barrier: the largest rise above the line between the ends' losses; {style.samples_of(results)}."
    return finish(figure, title or style.headline(results), text, [axes[0]], ncols=1)


_SADDLE: dict[str, Any] = {**surface.POINT, "marker": "X", "mfc": style.PINK, "ms": 7}
_NAMES = {"center": "center", "lowest": "lowest point"}


@draws(Basins)
def draw_basins(results: Sequence[Basins], title: str = "") -> Figure:
    """Draw contours on axes of distances, the borders of basins, and below the widths of a region."""
    level_scale = surface.scale([r.loss for r in results])
    width = 5.0 if len(results) == 1 else 3.9
    figure, axes, below = stacked_panels(len(results), width, {"basins": 4.4, "widths": 1.9})
    for ax, r in zip(axes, results, strict=True):
        _draw_panel(ax, r, level_scale)
    label = f"{style.loss_label(results)}, {level_scale.step.replace('lines', 'steps')}"
    # The arrow is always there: the color of the last level fills all that is above it.
    surface.color_bar(figure, axes, level_scale.norm, surface.CMAP, label, np.inf)
    for ax, r, color in zip(below, results, style.colors_of([r.label for r in results]), strict=True):
        # Both axes of the region against the rise; dotted where the edge of the grid cuts it.
        for axis_width, name, lw in zip(r.width.T, ("longer axis", "shorter axis"), (2.0, 1.1), strict=True):
            look: dict[str, Any] = {"color": color, "lw": lw}
            ax.plot(r.rise, np.where(r.cut, np.nan, axis_width), label=f"{name} of the region", **look)
            ax.plot(r.rise, np.where(r.cut, axis_width, np.nan), ls=":", **look)
        ax.set_xlabel(f"rise above the {_NAMES[r.around]}{style.unit(r, 'rise')}")
        ax.set(xlim=(0, float(r.rise[-1])), ylim=(0, None))
        ax.locator_params(axis="x", nbins=5)
    for ax in labeled_axes(below):
        ax.set_ylabel("distance")
    headline, text = with_unit(results[0], _basins_finding(results)), with_unit(results[0], _caption(results))
    columns = 2 if len(results) == 1 else 3
    return finish(figure, title or headline, text, [*axes, *below], ncols=columns)


def _draw_panel(ax: Axes, r: Basins, level_scale: surface.LevelScale) -> None:
    """Draw the contour on axes of distances along the two directions, which need not be orthogonal."""
    lengths = np.sqrt(np.diag(r.gram))
    x, y = r.x * lengths[0], r.y * lengths[1]
    loss = np.ma.masked_invalid(r.loss)
    surface.map_axes(ax)
    ax.contourf(x, y, loss, level_scale.levels, cmap=surface.CMAP, norm=level_scale.norm, extend="max")
    if len(r.minimum) > 1:
        for number in range(len(r.minimum)):
            ax.contour(x, y, (r.basin == number).astype(float), [0.5], colors="w", linewidths=0.9)
    if not r.cut.all():
        level = r.reference_loss + r.rise[np.flatnonzero(~r.cut)[-1]]
        label = with_unit(r, f"{level - r.reference_loss:.2g} nat above the {_NAMES[r.around]}")
        surface.level_lines(ax, x, y, loss, [level], label, **surface.RISE_LINE)
    ax.plot(*(r.minimum * lengths).T, label="lowest point of a basin", **(surface.LOWEST | {"ms": 9}))
    has_saddle = np.isfinite(r.saddle[:, 0])
    if has_saddle.any():
        ax.plot(*(r.saddle[has_saddle] * lengths).T, label="saddle of a basin", **_SADDLE)
    ax.plot(*(r.reference * lengths)[:, None], label=_NAMES[r.around], **(surface.CENTER | {"ms": 10}))
    basins = f"{len(r.minimum)} basin{'s' * (len(r.minimum) > 1)}"
    minima = f"{r.minima} local minim{'a' if r.minima > 1 else 'um'} of the grid"
    ax.set(xlabel="distance along u", ylabel="distance along v")
    ax.set_title(f"{style.paper_name(r.label) or 'surface'}\n{basins}, {minima}")


def _basins_finding(results: Sequence[Basins]) -> str:
    """Return one line with the number of basins and the width of the widest region that is not cut."""
    around = _NAMES[results[0].around]
    if len(results) > 1:
        sentences = [f"Basins: {', '.join(str(len(r.minimum)) for r in results)}"]
        shared_rise = min(float(r.rise[~r.cut].max(initial=0.0)) for r in results)
        if shared_rise > 0 and len({r.around for r in results}) == 1:
            names = style.short_names([r.label for r in results])
            widths = [np.interp(shared_rise, [0, *r.rise], [0, *r.equivalent_width]) for r in results]
            texts = [f"{name} {width:.3g}" for name, width in zip(names, widths, strict=True)]
            sentences.insert(0, f"Width {shared_rise:.3g} nat above the {around}: {', '.join(texts)}")
        return style.fitting(*sentences)
    (r,) = results
    number = "One basin" if len(r.minimum) == 1 else f"{len(r.minimum)} basins"
    if r.cut.all():
        return f"{number}; the region of the {around} reaches the edge"
    last = int(np.flatnonzero(~r.cut)[-1])
    return f"{number}; the orange region is {r.width[last, 0]:.2g} × {r.width[last, 1]:.2g}"


def _caption(results: Sequence[Basins]) -> str:
    persistence = style.joined(f"{r.least:.3g}" for r in results)
    text = f"Basins: minima at least {persistence} nat below their saddle; white: their borders. Orange: the "
    text += "largest region that the edge does not cut. u, v: directions of the plane. "
    text += "Below: the region's axes"
    text += ", dotted where cut." if any(r.cut.any() for r in results) else "."
    at_edge = any(r.at_edge.any() for r in results)
    return text + " A minimum on the edge belongs to a basin outside." * at_edge

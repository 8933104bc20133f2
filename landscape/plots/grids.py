"""Pictures of Hessian grids, lines and basins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import cm, colormaps, colors
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.options import choose, positive
from landscape.plots.drawing import draws
from landscape.plots.picture import (
    caption,
    has_given_axes,
    panels,
    shared_legend,
    stacked_panels,
    wrapped_panels,
)
from landscape.plots.style import (
    batchnorm_note,
    colors_of,
    decimal_labels,
    headline,
    interpolation_note,
    loss_of,
    paper_name,
    shared_note,
    short_names,
    split_names,
    splits,
)
from landscape.plots.surface_parts import Scale, scale
from landscape.results.basins import Basins
from landscape.results.grids import HessianGrid, Line


@draws(HessianGrid)
def draw_hessian_grids(
    results: Sequence[HessianGrid], title: str = "", *, vmax: float | None = None, cmap: str | None = None
) -> Figure:
    """Heatmaps of |λ_min|/|λ_max|, one panel for each grid, with one colour scale.

    A star marks points where the eigenvalues have not converged; the medians leave these out.

    Args:
        vmax: the ratio of the darkest colour. Default: the largest one.
        cmap: a colour map of matplotlib. Default: rocket_r of seaborn.

    Raises:
        InputError: a vmax or colour map that is not allowed.
    """
    if cmap is not None:
        choose("--cmap", cmap, colormaps)
    if vmax is not None:
        positive("--vmax", vmax)
    figure, axes = wrapped_panels(len(results), 3.9, 3.5)
    finite = np.concatenate([r.ratio[np.isfinite(r.ratio)] for r in results])
    top = float(finite.max()) if finite.size and vmax is None else vmax or 1.0
    colours = sns.color_palette("rocket_r", as_cmap=True) if cmap is None else colormaps[cmap]
    for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
        flipped = r.ratio[::-1]  # a heatmap's first row is its top; y grows upwards
        marks = np.where(r.trusted[::-1], "", "*")
        labels = np.array(
            [[f"{v:.2g}{m}" for v, m in zip(*row, strict=True)] for row in zip(flipped, marks, strict=True)]
        )
        sns.heatmap(
            flipped,
            ax=ax,
            vmin=0.0,
            vmax=top,
            cmap=colours,
            annot=labels if r.ratio.size <= 64 else None,
            fmt="",
            annot_kws={"fontsize": 8},
            square=True,
            cbar=False,
            xticklabels=[f"{v:.2g}" for v in r.x],
            yticklabels=[f"{v:.2g}" for v in r.y[::-1]],
        )
        ax.tick_params(axis="y", rotation=0)
        good = r.ratio[r.trusted]
        middle = f"{np.median(good):.3g}" if good.size else "–"
        few = f" ({good.size} of {r.ratio.size} points)" if good.size < r.ratio.size else ""
        ax.set_title(f"{paper_name(r.label) or f'grid {k}'}\nmedian {middle}{few}")
        ax.set_xlabel("x (step along direction 1)")
        ax.set_ylabel("y (step along direction 2)")
    scale = cm.ScalarMappable(colors.Normalize(0.0, top), colours)
    bar = figure.colorbar(scale, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label(rf"$|\lambda_{{min}}| / |\lambda_{{max}}|$ ({loss_of(results)})")
    usual = f"Hessian ratio, {results[0].samples:,} samples of {splits(results)}"
    figure.suptitle(title or headline(results))
    usual += batchnorm_note(results[0]).replace("\n", "; ") + interpolation_note(results)
    caption(figure, f"{usual}. Low: nearly convex.")
    return figure


@draws(Line)
def draw_lines(results: Sequence[Line], title: str = "") -> Figure:
    """Loss and, below it, accuracy along lines of one kind; barriers in the legend.

    Axes that the user gave show the loss alone.

    Raises:
        InputError: lines between two sets of weights together with lines along a direction.
    """
    kinds = {r.kind for r in results}
    if len(kinds) != 1:
        raise InputError("FILE: interpolations and directions have different axes, give files of one kind")
    between = kinds == {"interpolation"}
    with_accuracy = not has_given_axes() and any(np.isfinite(r.accuracy).any() for r in results)
    figure, axes = panels(2 if with_accuracy else 1, 1, 5.4, 2.6, sharex=True)
    note, notes = shared_note([batchnorm_note(r) for r in results])
    colors = colors_of([" to ".join(r.ends) or r.label for r in results])
    for k, (r, color) in enumerate(zip(results, colors, strict=True)):
        name = " to ".join(map(paper_name, r.ends)) or paper_name(r.label) or f"line {k + 1}"
        if between:
            name += f" (barrier {r.barrier:.3g})"
        # Points that are not finite leave a gap in the curve.
        axes[0].plot(r.t, np.where(np.isfinite(r.loss), r.loss, np.nan), color=color, label=name + notes[k])
        if with_accuracy:
            axes[1].plot(r.t, 100 * r.accuracy, color=color)
        if between and np.isfinite(r.barrier):
            axes[0].plot([0, 1], r.loss[[0, -1]], color=color, lw=0.9, ls=":")
    axes[0].set_ylabel(f"{split_names(results)} loss (nat)")
    if with_accuracy:
        axes[1].set_ylabel(f"{split_names(results)} accuracy (%)")
    axes[-1].set_xlabel("t (0: first end, 1: second end)" if between else "t (step along the direction)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
    usual = "Loss between two sets of weights; dotted: the straight line" if between else "Loss along a line"
    figure.suptitle(title or usual + note)
    caption(figure, interpolation_note(results).removeprefix("; ").capitalize())
    return figure


BASINS_CMAP = "mako_r"  # as contours have it
_MARK: dict[str, Any] = {"ls": "none", "mec": "k", "mew": 0.8, "zorder": 5}
# What is marked: the lowest point of a basin, its saddle, and the point that the region is around.
_LOWEST: dict[str, Any] = {**_MARK, "marker": "v", "mfc": "w", "ms": 7, "label": "lowest point of a basin"}
_SADDLE: dict[str, Any] = {**_MARK, "marker": "X", "mfc": "#CC79A7", "ms": 7, "label": "its saddle"}
_AROUND: dict[str, Any] = {"marker": "+", "ls": "none", "mec": "#E69F00", "ms": 10, "mew": 2, "zorder": 6}
_NAMES = {"center": "centre", "lowest": "lowest point"}


@draws(Basins)
def draw_basins(results: Sequence[Basins], title: str = "") -> Figure:
    """Contours in distances, the borders of basins, and below the widths of the region around one point."""
    chosen = scale([r.loss for r in results])
    figure, axes, below = stacked_panels(len(results), 5.0 if len(results) == 1 else 3.9, (4.4, 1.9))
    for ax, r in zip(axes, results, strict=True):
        _draw_panel(ax, r, chosen)
    mappable = cm.ScalarMappable(chosen.norm, sns.color_palette(BASINS_CMAP, as_cmap=True))
    bar = figure.colorbar(mappable, ax=axes, shrink=0.85, pad=0.02, extend="max")
    bar.set_label(f"{split_names(results)} loss (nat), {chosen.step}")
    if isinstance(chosen.norm, LogNorm):
        decimal_labels(bar.ax.yaxis)
    for ax, r, color in zip(below, results, colors_of([r.label for r in results]), strict=False):
        _draw_widths(ax, r, color)
    if below:
        below[0].set_ylabel("distance")
    shared_legend(figure, [*axes, *below], ncols=2 if len(results) == 1 else 3)
    figure.suptitle(title or _basins_finding(results))
    caption(figure, _caption(results))
    return figure


def _draw_panel(ax: Axes, r: Basins, chosen: Scale) -> None:
    """The contour on axes of distances along the two directions, which need not be orthogonal."""
    lengths = np.sqrt(np.diag(r.gram))
    x, y = r.x * lengths[0], r.y * lengths[1]
    ax.set_facecolor("#bbbbbb")  # shows through where a loss is not finite
    ax.grid(False)
    ax.set_aspect("equal")
    cmap = sns.color_palette(BASINS_CMAP, as_cmap=True)
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


def _basins_finding(results: Sequence[Basins]) -> str:
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

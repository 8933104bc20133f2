"""Pictures of stability, sweeps, comparisons, averages of weights, and of topologies as graphs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.plots import draws, literal, style
from landscape.plots.picture import finish, leading, panels, points, wrapped_panels
from landscape.results.comparison import MANY, Comparison, WeightAverage, heading, summary, verdict
from landscape.results.flatness import Stability, forms_with
from landscape.results.grids import Sweep
from landscape.results.noise import LabelCounts
from landscape.results.shown import logarithmic


@draws(Stability)
def draw_stability(results: Sequence[Stability], title: str = "") -> Figure:
    """Draw learning rate against delay, one panel for each minimum: above a line training leaves the minimum.

    The star is the run; the dash above or below it is the limit of its update rule, where that is known.
    """
    figure, axes = wrapped_panels(len(results), 4.6, 3.6, names="rates", sharex=True, sharey=True)
    run: dict[str, Any] = {"ls": "none", "clip_on": False}
    for ax, r in zip(axes, results, strict=True):
        finite = np.isfinite(r.rates).all()
        if finite:
            for name, rate, marker in zip(forms_with(r.momentum), r.rates, "osD", strict=True):
                ax.plot(*without_bridge(r.delay, rate), marker=marker, ms=4, label=name)
        if np.isfinite(r.lr):
            star = {"marker": "*", "ms": 14, "mfc": style.AMBER, "mec": "k", "zorder": 5, "label": "the run"}
            ax.plot(r.own_delay, r.lr, **run, **star)
            ax.axhline(r.lr, color=style.OTHER, lw=0.9, ls=":", zorder=0)
        if np.isfinite(r.own_limit) and finite:
            dash = {"marker": "_", "ms": 16, "mew": 2.5, "color": "k", "label": "the run's own limit"}
            ax.plot(r.own_delay, r.own_limit / r.lambda_max, **run, **dash)
        delay_axes(ax, r, max(r.delay.max(), r.own_delay))
        style.decimal_labels(ax.yaxis)
    by = dict.fromkeys(r.precondition for r in results if r.precondition)
    text = f"Preconditioned by {', '.join(by)}." if by else None
    usual = f"Above a line training leaves the minimum ({style.splits(results)})"
    return finish(figure, title or usual, text, axes, ncols=2 * min(3, len(axes)))


def without_bridge(delay: Array, values: Array) -> tuple[Array, Array]:
    """Return the points of a line with a gap after delay 0, which on the axis is no neighbor of delay 1."""
    after = np.flatnonzero(np.diff(delay == 0)) + 1
    return np.insert(delay.astype(float), after, np.nan), np.insert(values.astype(float), after, np.nan)


def delay_axes(ax: Axes, r: Any, largest: int) -> None:
    """Label ``ax`` as learning rate against delay, from 0 to ``largest`` steps, at the minimum of ``r``."""
    ax.set_xscale("symlog", base=2, linthresh=1)
    style.ticks_at(ax.xaxis, r.delay, [str(tau) for tau in r.delay])
    about = f"$\\lambda_{{max}}$ = {r.lambda_max:.4g} ({r.split or 'data'})"
    ax.set_title(f"{style.paper_name(r.label) or 'minimum'}\n{about}")
    ax.set(xlim=(-0.3, max(0.3, largest * 1.2)), yscale="log", ylabel="learning rate η")
    ax.set_xlabel(f"delay τ{style.unit(type(r), 'delay')}")


@draws(LabelCounts)
def draw_label_counts(results: Sequence[LabelCounts], title: str = "") -> Figure:
    """Draw samples by learner (down) and label (across), one panel for each run, with one color scale.

    Up to 400 cells have their number.
    """
    figure, axes = wrapped_panels(len(results), 5.2, 3.6, names="counts")
    top = max(float(r.counts.max()) for r in results)
    for ax, r, name in zip(axes, results, style.names_of(results, "run"), strict=True):
        sns.heatmap(
            r.counts, ax=ax, vmin=0.0, vmax=top, cmap=style.SEQUENTIAL, cbar=False, linewidths=0.5,
            annot=r.counts.size <= 400, fmt=".0f", annot_kws={"fontsize": 7},
            xticklabels=[f"{label:g}" for label in r.classes], yticklabels=True,
        )  # fmt: skip
        ax.tick_params(axis="y", rotation=0)
        ax.set_title(f"{name}\n{r.division}")
        ax.set(xlabel="label", ylabel="learner")
    text = "Training samples by learner and label; a darker cell has more."
    return finish(figure, title or style.headline(results), text)


# An axis is logarithmic from this ratio of the largest to the smallest value (our choice).
WIDE = 5.0


@draws(Sweep)
def draw_sweeps(results: Sequence[Sweep], title: str = "") -> Figure:
    """Test error against the first key that varies, one panel for each sweep.

    A line belongs to one combination of the other keys; the recipe is on the x axis only if nothing else
    varies. Error bars are one standard deviation over the seeds. An open marker means that at least one seed
    diverged. Without a test error the test loss is drawn.

    Raises:
        InputError: no key varies.
    """
    figure, axes = wrapped_panels(len(results), 5.2, 4.0, names="sweep")
    for ax, r in zip(axes, results, strict=True):
        _draw_sweep(ax, r)
    counts = sorted({len(seeds) for r in results for seeds in r.seed_lists})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    note = "; open: some diverged" if any(r.diverged.any() for r in results) else ""
    text = f"Bars: standard deviation over {seeds} seeds{note}."
    return finish(figure, title or "After the last step: mean over the seeds", text)


def _draw_sweep(ax: Axes, r: Sweep) -> None:
    rows = [{key: literal(value) for key, value in row.items()} for row in r.rows]
    varying = [k for k in r.keys if len({row[k] for row in rows}) > 1]
    if not varying:
        raise InputError("sweep: its table has one row, there is nothing to draw")
    x_key = next((k for k in varying if k != "recipe"), "recipe")
    column = "test_error" if np.isfinite(r.test_error).any() else "test_loss"
    mean, spread = getattr(r, column), np.nan_to_num(getattr(r, f"{column}_std"))
    texts = [row[x_key] for row in rows]
    ticks = list(dict.fromkeys(texts))
    numbers = pd.to_numeric(ticks, errors="coerce")
    is_numeric = bool(np.isfinite(numbers).all())
    position = dict(zip(ticks, numbers if is_numeric else range(len(ticks)), strict=True))
    lines: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        label = ", ".join(_setting(k, row[k]) for k in varying if k != x_key and row[k])
        lines.setdefault(label, []).append(i)
    for color, (label, chosen) in zip(itertools.cycle(style.CYCLE), lines.items(), strict=False):
        x = np.array([position[texts[i]] for i in chosen])
        look = {"ls": "-", "lw": 1.6 if is_numeric else 0, "elinewidth": 1.2, "ms": 5}
        points(ax, x, mean[chosen], spread[chosen], color, label or None, **look)
        diverged = r.diverged[chosen] > 0
        if diverged.any():
            ax.plot(x[diverged], mean[chosen][diverged], "o", ms=5, mfc="w", mec=color, zorder=5)
    if not is_numeric:
        ax.set_xticks(range(len(ticks)), ticks, rotation=20, ha="right")
    elif _is_wide(numbers):
        ax.set_xscale("log")
    if is_numeric and len(ticks) <= 8:
        style.ticks_at(ax.xaxis, numbers, ticks)
    if _is_wide(mean[np.isfinite(mean)]):
        style.log_axis(ax.yaxis)
    ax.set_xlabel(x_key)
    name = "test error of $w_a$" if column == "test_error" else "test loss at $w_a$"
    ax.set_ylabel(f"{name}{style.unit(Sweep, column)}")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()


def _is_wide(values: Any) -> bool:
    return len(values) > 0 and min(values) > 0 and max(values) >= WIDE * min(values)


def _setting(key: str, value: str) -> str:
    """Return a key and its value, as the legend shows them."""
    return value if key in ("recipe", "algorithm.name") else f"{key.split('.')[-1]} {value}"


COLUMNS = 4


@draws(Comparison)
def draw_comparisons(results: Sequence[Comparison], title: str = "") -> Figure:
    """Draw each quantity of all sides with its 95% interval, or its bound, and the verdict of its test.

    Thin lines with dots are intervals of standard errors, by Student's t; thick bars are 99% bounds
    on the true eigenvalue; dots alone are exact. Open dots are the single checkpoints of a group. Names of
    quantities that say how flat a minimum is are bold.

    Raises:
        InputError: several comparisons: each has sides of its own.
    """
    if len(results) > 1:
        raise InputError("results: several comparisons cannot be drawn in one picture, give one")
    (comparison,) = results
    c = dataclasses.replace(comparison, sides=tuple(map(style.paper_name, comparison.sides)))
    figure, axes = wrapped_panels(len(c.quantities), 3.1, 1.35 + 0.27 * len(c.sides), COLUMNS, c.quantities)
    tones = style.colors_of(c.sides)
    for q, ax in enumerate(axes):
        _draw_quantity(ax, c, q, tones)
        if ax not in leading(axes):
            ax.set_yticklabels([])
    lines = summary(c) or ["No measure of flatness"]
    usual = (
        style.fitting(*lines, "Which is flatter") if len(lines) == 1 else f"Flatness of {len(lines)} pairs"
    )
    return finish(figure, title or usual, _caption(c))


def _draw_quantity(ax: Axes, c: Comparison, q: int, colors: Sequence[str]) -> None:
    """Draw a panel with a row for each side, the first at the top."""
    rows = np.arange(len(c.sides))[::-1]
    values, half = c.value[q], np.nan_to_num(c.interval[q], posinf=0.0)
    bound = c.kinds[q] == "bound"
    for row, value, error, color in zip(rows, values, half, colors, strict=True):
        if np.isfinite(value):
            ax.plot([value - error, value + error], [row, row], color=color, lw=6 if bound else 1.6,
                    alpha=0.45 if bound else 1, solid_capstyle="butt", zorder=2)  # fmt: skip
            ax.plot([value], [row], "o", ms=6, color=color, zorder=3)
    values_own = c.own_value[q] if c.grouped else np.zeros(0)
    for value, side in zip(values_own, c.side_of if c.grouped else (), strict=True):
        ax.plot([value], [rows[side] - 0.22], "o", ms=4, mfc="none", color=colors[side], zorder=3)
    ends = np.concatenate([values - half, values + half, values_own])
    ends = ends[np.isfinite(ends)]
    if logarithmic(values) and ends.min() > 0:
        style.log_axis(ax.xaxis)
    else:
        ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
        ax.ticklabel_format(axis="x", scilimits=(-3, 4), useMathText=True)
        if ends.size and 0 <= ends.min() < ends.max():
            ax.set_xlim(0, 1.06 * ends.max())
    ax.set_ylim(-0.6, len(c.sides) - 0.4)
    ax.set_yticks(rows, c.sides)
    ax.grid(False, axis="y")
    ax.set_title(heading(c, q), fontweight="bold" if c.flatter[q] else "normal")
    sentence, _, evidence = verdict(c, q).partition(" (")
    words = f"{sentence}\n({evidence}" if evidence else sentence
    ax.set_xlabel(words, fontsize=8, color="k" if c.significant[q].any() else style.OTHER)


def _caption(c: Comparison) -> str:
    parts = ["Thin lines: 95% intervals", "thick bars: 99% bounds"][: 1 + ("bound" in c.kinds)]
    parts += [f"bold: measures of flatness; level {c.significance:g} for all tests together"]
    counts = ", ".join(f"{n:,}" for n in sorted(set(c.sample_counts.tolist())))
    about = f"{'; '.join(parts)}; {counts} samples of {c.split}."
    # They come first, since they can say that a comparison means nothing.
    notes = "; ".join(note for note in c.notes if " was not measured" not in note)
    return f"{notes[0].upper()}{notes[1:]}. {about}" if notes else about


@draws(WeightAverage)
def draw_averages(results: Sequence[WeightAverage], title: str = "") -> Figure:
    """Draw the losses of the members and of the averages: predicted with their intervals, and exact."""
    figure, axes = wrapped_panels(len(results), 6.4, 3.2, names="averages")
    for ax, r in zip(axes, results, strict=True):
        n, count = len(r.members_loss), len(r.loss) - 1
        members, averages = np.arange(n), n + 0.5 + np.arange(count + 1)
        chosen = r.chosen.astype(bool)  # a file may have numbers
        ax.plot(members, r.members_loss, "o", color=style.SKY, label="member")
        ax.plot(members[chosen], r.members_loss[chosen], "o", ms=11, mfc="none", color="k", label="chosen")
        has_interval = np.isfinite(r.high)
        ends = [(r.loss - r.low)[has_interval], (r.high - r.loss)[has_interval]]
        look = {"color": style.AMBER, "capsize": 4, "label": f"predicted, {r.level:.0%} interval"}
        ax.errorbar(averages[has_interval], r.loss[has_interval], ends, fmt="s", mfc="white", **look)
        ax.plot(averages, r.exact, "x", color="k", ms=8, mew=1.8, zorder=5, label="exact")
        named = {*r.ranking[:MANY]} if count > MANY else {*range(count)}
        names = [name if k in named else "" for k, name in enumerate(r.titles[:-1])]
        ax.set_xticks([*members, *averages], [*r.labels, *names, "chosen\naverage"], rotation=30, ha="right")
        ax.axvline(n - 0.25, color=style.PALE, lw=1)
        ax.set_ylabel(f"loss{style.unit(results[0], 'loss')}")
        ax.set_title(style.paper_name(r.label))
    text = f"{style.samples_of(results)}; without a prediction: the members are too far apart for one."
    return finish(figure, title or style.headline(results), text, list(axes[:1]), ncols=4)


# Most steps of a cycle that are drawn, and most learners whose numbers are (our choice: they stay legible).
STEPS, NUMBERED = 8, 32


def draw_topologies(matrices: Mapping[str, Sequence[Array]]) -> Figure:
    """Draw mixing matrices as graphs: a row for each topology, a panel for each step, at most eight.

    The learners stand on a circle, colored by the share M_jj that they keep of their own weights. A line says
    that two take the same share of each other, an arrow from k to j that j alone takes M_jk; its color is the
    share.

    Args:
        matrices: name -> the mixing matrices (n, n) that steps go through in turn.

    Returns:
        The figure.
    """
    cycles = {name: cycle[:STEPS] for name, cycle in matrices.items()}
    columns = max(map(len, cycles.values()))
    names = [
        f"{name} {t}" if t < len(cycle) else "" for name, cycle in cycles.items() for t in range(columns)
    ]
    with style.style():
        figure, axes = panels(len(cycles), columns, 2.3, 2.5, names)
        free = iter(axes)
        for name, cycle in cycles.items():
            steps = len(matrices[name])
            for t, matrix in enumerate(cycle, 1):
                dots = _graph(ax := next(free), matrix)
                ax.set_title(f"{name}\nstep {t} of {steps}" if steps > 1 else name)
        figure.colorbar(dots, ax=axes, label="share of the weights", shrink=0.9)
        return finish(figure, "Who takes whose weights")


def _graph(ax: Axes, matrix: Array) -> ScalarMappable:
    """Draw a mixing matrix as a graph, and return the dots, which have the colors of the shares."""
    n = len(matrix)
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n  # learner 0 is at the top, and the others go clockwise
    corners = np.column_stack([np.cos(angle), np.sin(angle)])
    look: dict[str, Any] = {"cmap": style.SEQUENTIAL, "clim": (0, 1)}
    j, k = np.nonzero(np.triu(np.abs(matrix - matrix.T) < 1e-12, 1) & (matrix > 0))
    ax.add_collection(LineCollection([*corners[np.column_stack([j, k])]], array=matrix[j, k], **look))
    j, k = np.nonzero((np.abs(matrix - matrix.T) >= 1e-12) & (matrix > 0))
    ax.quiver(
        *corners[k].T, *(0.93 * (corners[j] - corners[k])).T, matrix[j, k],
        angles="xy", scale_units="xy", scale=1, width=0.008, headwidth=5, **look,
    )  # fmt: skip
    x, y = corners.T
    size = 110 if n <= NUMBERED else 20
    dots = ax.scatter(x, y, c=np.diag(matrix), s=size, zorder=3, edgecolors="k", **look)
    for number, (x, y) in enumerate(corners if n <= NUMBERED else []):
        ax.annotate(str(number), (1.2 * x, 1.2 * y), ha="center", va="center", fontsize=8)
    ax.set(aspect="equal", xlim=(-1.35, 1.35), ylim=(-1.35, 1.35))
    ax.set_axis_off()
    return dots

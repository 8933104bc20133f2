"""Pictures of stability, sweeps, comparisons, averages of weights, and of topologies as graphs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.plots import draws, literal, style
from landscape.plots.picture import finish, formulas, labeled_axes, points, wrapped_panels
from landscape.results.comparison import MANY, Comparison, WeightAverage, heading, summary, verdict
from landscape.results.flatness import Stability, forms_with
from landscape.results.grids import Sweep
from landscape.results.shown import logarithmic


@draws(Stability)
def draw_stability(results: Sequence[Stability], title: str = "") -> Figure:
    """Draw the largest stable learning rates against the delay, one panel for each minimum.

    Each form of momentum has a line; above the line, training leaves the minimum. The star is the run. If the
    result has the largest stable learning rate of the run's own update rule, a dash above or below the star
    shows it.
    """
    # The panels are named "rates", or "rates 0", "rates 1" and so on.
    figure, axes = wrapped_panels(len(results), 4.6, 3.6, names="rates", sharex=True, sharey=True)
    star: dict[str, Any] = {"ls": "none", "clip_on": False, "label": "the run", "zorder": 5}
    star |= {"marker": "*", "ms": 14, "mfc": style.AMBER, "mec": "k"}
    dash = star | {"label": "the run's own limit", "zorder": 1.5, "marker": "_", "ms": 26, "mew": 2.5}
    for ax, r in zip(axes, results, strict=True):
        has_rates = np.isfinite(r.rates).all()
        if has_rates:
            # Markers become smaller from line to line, so that equal points are all visible.
            lines = zip(forms_with(r.momentum), r.rates, ("o", "s", "D"), (9, 7.5, 3.5), strict=True)
            for name, rates, marker, size in lines:
                ax.plot(*with_gap_at_zero(r.delay, rates), marker=marker, ms=size, mfc="w", label=name)
        if np.isfinite(r.lr):
            ax.plot(r.own_delay, r.lr, **star)
            ax.axhline(r.lr, color=style.OTHER, lw=0.9, ls=":", zorder=0, label="the run's rate")
        if np.isfinite(r.own_limit) and has_rates:
            ax.plot(r.own_delay, r.own_limit / r.lambda_max, **dash)
        label_delay_axes(ax, r, max(r.delay.max(), r.own_delay))
        style.decimal_labels(ax.yaxis)
    text = "Momentum adds a share of the last step; shifted momentum, a share of the step before the delay."
    text = f"{text} {style.sentence(style.preconditioned_by(results))}".rstrip()
    default_title = "Above a line, training leaves the minimum"
    return finish(figure, title or default_title, text, axes, ncols=2 * min(3, len(axes)))


def with_gap_at_zero(delay: Array, values: Array) -> tuple[Array, Array]:
    """Return the points of a line with a gap next to delay 0, which is far from delay 1 on the axis."""
    gaps = np.flatnonzero(np.diff(delay == 0)) + 1
    return np.insert(delay.astype(float), gaps, np.nan), np.insert(values.astype(float), gaps, np.nan)


def label_delay_axes(ax: Axes, r: Any, largest: int) -> None:
    """Label ``ax`` as learning rate against delay, from 0 to ``largest`` steps, at the minimum of ``r``."""
    ax.set_xscale("symlog", base=2, linthresh=1)
    style.ticks_at(ax.xaxis, r.delay)
    about = f"$\\lambda_{{max}}$ of the {style.loss_of([r])}: {r.lambda_max:.3g}"
    ax.set_title(f"{style.paper_name(r.label) or 'minimum'}\n{about}")
    ax.set(xlim=(-0.3, max(0.3, largest * 1.2)), yscale="log", ylabel="learning rate η")
    ax.set_xlabel(f"delay τ{style.unit(type(r), 'delay')}")


# An axis is logarithmic from this ratio of the largest to the smallest value (our choice).
WIDE = 5.0


@draws(Sweep)
def draw_sweeps(results: Sequence[Sweep], title: str = "") -> Figure:
    """Draw the test error against the first key that varies, one panel for each sweep.

    A line belongs to one combination of the other keys. The recipe is on the x axis only if no key of the
    recipes varies. Error bars are one standard deviation over the seeds. An open marker means that at least
    one seed diverged. If a sweep has no test error, its test loss is drawn.

    Raises:
        InputError: no key varies.
    """
    figure, axes = wrapped_panels(len(results), 5.2, 4.0, names="sweep")
    titles = [_draw_sweep(ax, r) for ax, r in zip(axes, results, strict=True)]
    counts = sorted({len(seeds) for r in results for seeds in r.seed_lists})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    note = "; open: some diverged" if any(r.diverged.any() for r in results) else ""
    text = f"Mean over {seeds} seeds after the last step; bars: standard deviation{note}; w_a: learners' mean"
    texts = [" / ".join(titles)] if all(titles) else []
    default_title = style.fitting(*texts, "After the last step: mean over the seeds")
    return finish(figure, title or default_title, f"{text}.")


def _draw_sweep(ax: Axes, r: Sweep) -> str:
    """Draw the test error (if none is finite, the test loss) of a sweep against the first key that varies.

    Returns a title with the smallest value and its row of the table; "" if no value is finite.
    """
    rows = [{key: literal(value) for key, value in row.items()} for row in r.rows]
    varying_keys = [key for key in r.keys if len({row[key] for row in rows}) > 1]
    if not varying_keys:
        raise InputError("sweep: its table has one row, there is nothing to draw")
    x_key = next((key for key in varying_keys if key != "recipe"), "recipe")
    column = "test_error" if np.isfinite(r.test_error).any() else "test_loss"
    mean, std = getattr(r, column), np.nan_to_num(getattr(r, f"{column}_std"))
    x_texts = list(dict.fromkeys(row[x_key] for row in rows))  # the different values of x_key
    x_numbers = pd.to_numeric(x_texts, errors="coerce")
    is_numeric = bool(np.isfinite(x_numbers).all())
    position_of = dict(zip(x_texts, x_numbers if is_numeric else range(len(x_texts)), strict=True))
    positions = np.array([position_of[row[x_key]] for row in rows])
    # Rows that differ only in x_key are one line. The value is "" where a recipe does not have the key.
    row_indices_of: dict[str, list[int]] = {}  # label of a line -> indices of its rows
    for i, row in enumerate(rows):
        label = ", ".join(_key_and_value(key, row[key]) for key in varying_keys if key != x_key and row[key])
        row_indices_of.setdefault(label, []).append(i)
    look = {"ls": "-", "lw": 1.6 if is_numeric else 0}
    # A line has the color of its algorithm, which colors_of finds at the beginning of a label or behind a
    # comma. In the name of a recipe, such as "digits-dpsgd", the algorithm is behind a hyphen.
    colors = style.colors_of([label.replace("-", ", ") for label in row_indices_of])
    for k, (color, (label, indices)) in enumerate(zip(colors, row_indices_of.items(), strict=True)):
        x, y, has_diverged = positions[indices], mean[indices], r.diverged[indices] > 0
        extra_size = min(len(colors) - 1 - k, 3)  # so that equal points are both visible
        look |= {"elinewidth": 1.2 + extra_size, "ms": 5 + 2 * extra_size, "capsize": 3 + 2 * extra_size}
        points(ax, x, y, std[indices], color, label or None, **look)
        if has_diverged.any():
            ax.plot(x[has_diverged], y[has_diverged], "o", ms=look["ms"], mfc="w", mec=color, zorder=5)
    if not is_numeric:
        ax.set_xticks(range(len(x_texts)), x_texts, rotation=20, ha="right")
    elif _is_wide(x_numbers):
        ax.set_xscale("log")
    if is_numeric and len(x_texts) <= 8:  # a number at each point: more do not fit (our choice)
        style.ticks_at(ax.xaxis, x_numbers, x_texts)
    if _is_wide(mean[np.isfinite(mean)]):
        style.log_axis(ax.yaxis)
    ax.set_xlabel("learning rate" if x_key == "lr" else x_key)
    quantity, sign = ("test error of $w_a$", "%") if column == "test_error" else ("test loss at $w_a$", "")
    ax.set_ylabel(f"{quantity}{style.unit(Sweep, column)}")
    if any(label for label in row_indices_of):
        ax.legend()
    best = int(np.nan_to_num(mean, nan=np.inf).argmin())
    setting = ", ".join(_key_and_value(key, rows[best][key]) for key in varying_keys)
    text = f"{column.replace('_', ' ')}: {mean[best]:.2g}{sign}, {setting}"
    return f"Lowest {text}" if np.isfinite(mean[best]) else ""


def _is_wide(values: Any) -> bool:
    """Return whether all values are positive, and the largest is at least ``WIDE`` times the smallest."""
    return len(values) > 0 and min(values) > 0 and max(values) >= WIDE * min(values)


def _key_and_value(key: str, value: str) -> str:
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
    c = dataclasses.replace(results[0], sides=tuple(map(style.paper_name, results[0].sides)))
    figure, axes = wrapped_panels(len(c.quantities), 3.1, 1.35 + 0.27 * len(c.sides), COLUMNS, c.quantities)
    colors = style.colors_of(c.sides)
    for q, ax in enumerate(axes):
        _draw_quantity(ax, c, q, colors)
        if ax not in labeled_axes(axes):
            ax.set_yticklabels([])
    lines = summary(c) or ["No measure of flatness"]
    several = f"Flatness of {len(lines)} pairs"
    default_title = several if len(lines) > 1 else style.fitting(*lines, "Which is flatter")
    return finish(figure, title or default_title, _caption(c))


def _draw_quantity(ax: Axes, c: Comparison, q: int, colors: Sequence[str]) -> None:
    """Draw the panel of quantity ``q``, an index, with a row for each side, the first side at the top."""
    rows = np.arange(len(c.sides))[::-1]
    # An interval that is unknown or infinite has no line: its dot stands alone.
    values, errors = c.value[q], np.nan_to_num(c.interval[q], posinf=0.0)
    bar_look: dict[str, Any] = {"lw": 6, "alpha": 0.45} if c.kinds[q] == "bound" else {"lw": 1.6}
    for row, value, error, color in zip(rows, values, errors, colors, strict=True):
        if np.isfinite(value):
            low, high = value - error, value + error
            ax.plot([low, high], [row, row], color=color, solid_capstyle="butt", zorder=2, **bar_look)
            ax.plot([value], [row], "o", ms=6, color=color, zorder=3)
    drawn_values = [values - errors, values + errors]
    if c.grouped:  # each checkpoint of a group is an open dot below the row of its side
        for value, side in zip(c.own_value[q], c.side_of, strict=True):
            ax.plot([value], [rows[side] - 0.22], "o", ms=4, mfc="none", color=colors[side], zorder=3)
        drawn_values.append(c.own_value[q])
    all_values = np.concatenate(drawn_values)
    finite_values = all_values[np.isfinite(all_values)]
    if logarithmic(values) and finite_values.min() > 0:
        style.log_axis(ax.xaxis)
    else:
        ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
        ax.ticklabel_format(axis="x", scilimits=(-3, 4), useMathText=True)
        if finite_values.size and 0 <= finite_values.min() < finite_values.max():
            ax.set_xlim(0, 1.06 * finite_values.max())
    ax.set_ylim(-0.6, len(c.sides) - 0.4)
    ax.set_yticks(rows, c.sides)
    ax.grid(False, axis="y")
    measures_flatness = c.flatter[q] != 0  # 0: the quantity does not say how flat a minimum is
    ax.set_title(formulas(heading(c, q)), fontweight="bold" if measures_flatness else "normal")
    text = verdict(c, q).replace(" (", "\n(", 1)
    ax.set_xlabel(text, fontsize=8, color="k" if c.significant[q].any() else style.OTHER)


def _caption(c: Comparison) -> str:
    """Return the notes of a comparison, the meaning of lines and bars, and the samples."""
    bounds = "; thick bars: 99% bounds" if "bound" in c.kinds else ""
    level = f"level {c.significance:g} for all tests together"
    counts = ", ".join(f"{n:,}" for n in sorted(set(c.sample_counts.tolist())))
    markers = "; open: runs, filled: their mean" if c.grouped else ""
    text = f"Thin lines: 95% intervals{bounds}{markers}; bold: measures of flatness; {level}"
    text += f"; {counts} {c.split} samples."
    # The notes come first, as they can say that a comparison means nothing.
    notes = style.sentence(*(note for note in c.notes if " was not measured" not in note))
    return f"{notes} {text}".lstrip()


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
        errors = [(r.loss - r.low)[has_interval], (r.high - r.loss)[has_interval]]
        look = {"color": style.AMBER, "capsize": 4, "label": f"predicted, {r.level:.0%} interval"}
        ax.errorbar(averages[has_interval] - 0.15, r.loss[has_interval], errors, fmt="s", ms=3, **look)
        ax.plot(averages + 0.15, r.exact, "x", color="k", ms=8, mew=1.8, zorder=5, label="exact")
        with_label = r.ranking[:MANY] if count > MANY else range(count)
        names = [name if k in with_label else "" for k, name in enumerate(r.titles[:-1])]
        ax.set_xticks([*members, *averages], [*r.labels, *names, "chosen\naverage"], rotation=30, ha="right")
        ax.axvline(n - 0.25, color=style.PALE, lw=1)
        ax.set(title=style.paper_name(r.label), ylabel=f"loss{style.unit(results[0], 'loss')}")
    missing = "; without a prediction: the members are too far apart for one"
    text = style.samples_of(results) + missing * any(np.isinf(r.high).any() for r in results)
    return finish(figure, title or style.headline(results), f"{text}.", list(axes[:1]), ncols=4)


# The largest number of steps of a cycle that are drawn, and of learners with numbers (our choice: legible).
STEPS, NUMBERED = 8, 32


def draw_topologies(matrices: Mapping[str, Sequence[Array]]) -> Figure:
    """Draw mixing matrices M as graphs, a panel for each of the first eight steps of a topology.

    Learner j takes the share M_jk of the weights of learner k. The learners are on a circle; the color of
    learner j shows its own share M_jj. If M_jk = M_kj, a line connects learners j and k; otherwise an arrow
    leads from k to j. The color of the line or arrow shows the share M_jk.

    Args:
        matrices: name -> the mixing matrices (n, n) of a cycle of steps, in their order.

    Returns:
        The figure.
    """
    graphs = [(name, t, matrix) for name, cycle in matrices.items() for t, matrix in enumerate(cycle[:STEPS])]
    # The matrix of a whole cycle is the product of its matrices, the first step's at the right.
    cycle_matrices = {name: functools.reduce(np.matmul, cycle[::-1]) for name, cycle in matrices.items()}
    # With equal entries, each learner has the exact average of all weights after a cycle.
    averaging = " or ".join(name for name, matrix in cycle_matrices.items() if np.ptp(matrix) < 1e-9)
    panel_names = [f"{name} {t}" for name, t, _ in graphs]
    with style.style():
        figure, axes = wrapped_panels(len(graphs), 2.3, 2.5, columns=4, names=panel_names)
        for ax, (name, t, matrix) in zip(axes, graphs, strict=True):
            dots = _draw_graph(ax, matrix)
            steps = len(matrices[name])
            ax.set_title(f"{name}\nstep {t + 1} of {steps}" if steps > 1 else name)
        figure.colorbar(dots, ax=axes, label="share of the weights", shrink=0.9)
        text = "Color of a dot: the share of its own weights that a learner keeps; of a line: the share that "
        text += "both ends take of each other; of an arrow: the share that its head takes."
        titles = [f"After a cycle of {averaging} all learners have the exact average"] if averaging else []
        return finish(figure, style.fitting(*titles, "Who takes whose weights"), text)


def _draw_graph(ax: Axes, matrix: Array) -> ScalarMappable:
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
        ax.annotate(str(number), (1.25 * x, 1.25 * y), ha="center", va="center", fontsize=8)
    ax.set(aspect="equal", xlim=(-1.35, 1.35), ylim=(-1.35, 1.35))
    ax.set_axis_off()
    return dots

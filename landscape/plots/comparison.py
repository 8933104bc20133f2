"""Comparisons of checkpoints or groups: a panel for each quantity, with dots and intervals."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.drawing import draws
from landscape.plots.picture import finish, wrapped_panels
from landscape.plots.style import OTHER, colors_of, log_axis, paper_name
from landscape.results.comparison import Comparison, summary, verdict
from landscape.results.shown import logarithmic

COLUMNS = 4
# Characters of a verdict in a line below its panel, at its size.
CHARACTERS = 36


@draws(Comparison)
def draw_comparisons(results: Sequence[Comparison], title: str = "") -> Figure:
    """Each quantity of all sides with its 95% interval, or its bound; below it what the test says.

    Thin lines with dots are intervals of standard errors, by Student's t; thick bars are 99% bounds
    on the true eigenvalue; dots alone are exact. Open dots are the single checkpoints of a group. Names of
    quantities that say how flat a minimum is are bold.

    Raises:
        InputError: several comparisons: each has sides of its own.
    """
    if len(results) > 1:
        raise InputError("FILE: several comparisons cannot be drawn in one picture, give one")
    (given,) = results
    c = dataclasses.replace(given, sides=tuple(map(paper_name, given.sides)))
    figure, axes = wrapped_panels(len(c.quantities), 3.1, 1.35 + 0.27 * len(c.sides), COLUMNS)
    tones = colors_of(c.sides)
    for q, ax in enumerate(axes):
        _draw_quantity(ax, c, q, tones)
        if q % COLUMNS:
            ax.set_yticklabels([])
    lines = summary(c)
    more = [f"… ({len(lines)} pairs)"] if len(lines) > 3 else []
    return finish(figure, title or "\n".join([*lines[:3], *more]) or "No measure of flatness", _caption(c))


def _draw_quantity(ax: Axes, c: Comparison, q: int, colors: Sequence[str]) -> None:
    """One panel: a row for each side, the first at the top."""
    rows = np.arange(len(c.sides))[::-1]
    values, half = c.value[q], np.nan_to_num(c.interval[q], posinf=0.0)
    bound = c.kinds[q] == "bound"
    for row, value, error, color in zip(rows, values, half, colors, strict=True):
        if np.isfinite(value):
            ax.plot([value - error, value + error], [row, row], color=color, lw=6 if bound else 1.6,
                    alpha=0.45 if bound else 1, solid_capstyle="butt", zorder=2)  # fmt: skip
            ax.plot([value], [row], "o", ms=6, color=color, zorder=3)
    own = c.own_value[q] if c.grouped else np.zeros(0)
    for value, side in zip(own, c.side_of if c.grouped else (), strict=True):
        ax.plot([value], [rows[side] - 0.22], "o", ms=4, mfc="none", color=colors[side], zorder=3)
    ends = np.concatenate([values - half, values + half, own])
    ends = ends[np.isfinite(ends)]
    if logarithmic(values) and ends.min() > 0:
        log_axis(ax.xaxis)
    else:
        ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
        ax.ticklabel_format(axis="x", scilimits=(-3, 4), useMathText=True)
        if ends.size and 0 <= ends.min() < ends.max():
            ax.set_xlim(0, 1.06 * ends.max())
    ax.set_ylim(-0.6, len(c.sides) - 0.4)
    ax.set_yticks(rows, c.sides)
    ax.grid(False, axis="y")
    unit = f" ({c.unit_names[q]})" if c.unit_names[q] != "1" else ""
    ax.set_title(f"{c.titles[q]}{unit}", fontsize=10, fontweight="bold" if c.flatter[q] else "normal")
    said, _, evidence = verdict(c, q).partition(" (")
    lines = [textwrap.fill(said, CHARACTERS), *([f"({evidence}"] if evidence else [])]
    ax.set_xlabel("\n".join(lines), fontsize=8, color="k" if c.told[q].any() else OTHER)


def _caption(c: Comparison) -> str:
    counts = sorted(set(c.sample_counts.tolist()))
    seeds = ", over the seeds, which are the open dots" if c.grouped else ""
    parts = [
        f"Thin lines: 95% intervals, by Student's t{seeds}",
        "thick bars: 99% bounds on eigenvalues" if "bound" in c.kinds else "",
        "bold: measures of flatness",
        f"told apart at a level of {c.level:g} for all tests together (Holm)",
    ]
    about = f"{', '.join(f'{n:,}' for n in counts)} samples of {c.split}"
    if c.batch:
        about += f", minibatches of {c.batch:,}"
    if np.isfinite(c.equal_loss):
        about += f", at the training loss nearest to {c.equal_loss:.3g} nat"
    if "basin-width" in c.quantities:
        about += f"; width at a rise of {c.rise:g} nat"
    return f"{'; '.join(filter(None, parts))}. {about}."

"""Tables as pictures: our numbers beside the paper's, with the winner marked and the batch that was used."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from landscape.paper.verdicts import Rows

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn
    from matplotlib.figure import Figure


def value_text(mean: float, spread: float = float("nan")) -> str:
    """ "36.90 ± 1.10", or "diverged" for what is not finite."""
    if not np.isfinite(mean):
        return "diverged"
    return f"{mean:.2f}" if np.isnan(spread) else f"{mean:.2f} ± {spread:.2f}"


def used(label: str, batch: int) -> str:
    """``label`` with the batch of the run where that is not the paper's.

    Example:
        >>> used("SSGD, batch 8192", 512), used("SSGD, batch 512", 512), used("SSGD, lr 0.8", 512)
        ('SSGD, batch 512 (paper 8192)', 'SSGD, batch 512', 'SSGD, lr 0.8')
    """
    return re.sub(
        r"batch (\d+)", lambda m: m[0] if int(m[1]) == batch else f"batch {batch} (paper {m[1]})", label
    )


def winners(cells: Rows, higher: bool) -> set[int]:
    """The cells that are best among those of their network that differ in the algorithm alone.

    Where no two cells do, the best of each network. Means closer than the paper prints (0.005) are equal, and
    nobody has won.
    """
    place = ["network", "at"] if cells.duplicated(["network", "at"]).any() else ["network"]
    won = set()
    for _, group in cells.groupby(place):
        finite = group["ours"][np.isfinite(group["ours"])].sort_values(ascending=not higher)
        second = finite.iloc[1] if len(finite) > 1 else np.inf
        if len(group) > 1 and len(finite) and abs(second - finite.iloc[0]) > 0.005:
            won.add(finite.index[0])
    return won


def table_picture(cells: Rows, what: str, higher: bool) -> Figure:
    """A table: our numbers, the best of each setting in bold, and the paper's below them in grey.

    ``cells`` has "setting" and "network", the place; "at", which cells to be compared share; "ours",
    "ours_std", "batch" and "paper".
    """
    from landscape.plots.picture import caption, panels
    from landscape.plots.style import style

    lines, columns = (list(dict.fromkeys(cells[name])) for name in ("setting", "network"))
    won = winners(cells, higher)
    shown = [used(line, cells["batch"][cells["setting"] == line].iloc[0]) for line in lines]
    heads = [used(column, cells["batch"][cells["network"] == column].iloc[0]) for column in columns]
    with style():
        width = 1.0 + 0.075 * max(map(len, shown)) + 1.45 * len(columns)
        picture, (ax,) = panels(1, 1, max(6.6, width), 1.0 + 0.38 * (len(lines) + 1))
        left = -0.6 - 0.052 * max(map(len, shown))
        ax.axis("off")
        ax.set(xlim=(left - 0.1, len(columns) - 0.4), ylim=(len(lines) - 0.4, -1.3))
        for j, column in enumerate(heads):
            text = column.replace(", batch", ",\nbatch")
            ax.text(j, -0.9, text, ha="center", va="center", fontsize=9.5, weight="bold")
        for i, line in enumerate(shown):
            if i % 2 == 0:
                ax.axhspan(i - 0.5, i + 0.5, color="#f2f2f2", lw=0)
            ax.text(left, i, line, ha="left", va="center", fontsize=9.5)
        for cell in cells.itertuples():
            at = (columns.index(cell.network), lines.index(cell.setting))
            _draw_cell(ax, at, cell, cell.Index in won)
        caption(picture, f"{what[0].upper()}{what[1:]}. Bold: the best mean of its setting.")
    return picture


def _draw_cell(ax: Any, at: tuple[int, int], cell: Any, won: bool) -> None:
    from landscape.plots.style import OTHER, color_of

    (j, i), color = at, color_of(cell.setting)
    look = {"weight": "bold", "color": color if color != OTHER else "k"} if won else {}
    text = value_text(cell.ours, cell.ours_std)
    ax.text(j, i - 0.14, text, ha="center", va="center", fontsize=9.5, **look)
    below = f"paper {cell.paper:.2f}" if np.isfinite(cell.paper) else ""
    ax.text(j, i + 0.26, below, ha="center", va="center", fontsize=7, color="#666666")

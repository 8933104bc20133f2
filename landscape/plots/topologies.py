"""Topologies as graphs: who takes weights of whom, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from landscape.core.hdf5 import Array
from landscape.plots.picture import finish, panels
from landscape.plots.style import style

# Most steps of a cycle that are drawn, and most learners whose numbers are (ours: they stay legible).
STEPS, NUMBERED = 8, 32
COLORS = "viridis_r"


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
    shown = {name: cycle[:STEPS] for name, cycle in matrices.items()}
    columns = max(map(len, shown.values()))
    names = [f"{name} {t}" if t < len(cycle) else "" for name, cycle in shown.items() for t in range(columns)]
    with style():
        figure, axes = panels(len(shown), columns, 2.3, 2.5, names)
        free = iter(axes)
        for name, cycle in shown.items():
            steps = len(matrices[name])
            for t, matrix in enumerate(cycle, 1):
                dots = _graph(ax := next(free), matrix)
                ax.set_title(f"{name}\nstep {t} of {steps}" if steps > 1 else name)
        figure.colorbar(dots, ax=axes, label="share of the weights", shrink=0.9)
        return finish(figure, "Who takes whose weights")


def _graph(ax: Axes, matrix: Array) -> ScalarMappable:
    """One panel; what is returned has the colors of the shares."""
    n = len(matrix)
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n  # learner 0 is at the top, and the others go clockwise
    place = np.column_stack([np.cos(angle), np.sin(angle)])
    look: dict[str, Any] = {"cmap": COLORS, "clim": (0, 1)}
    j, k = np.nonzero(np.triu(np.abs(matrix - matrix.T) < 1e-12, 1) & (matrix > 0))
    ax.add_collection(LineCollection([*place[np.column_stack([j, k])]], array=matrix[j, k], **look))
    j, k = np.nonzero((np.abs(matrix - matrix.T) >= 1e-12) & (matrix > 0))
    ax.quiver(
        *place[k].T, *(0.93 * (place[j] - place[k])).T, matrix[j, k],
        angles="xy", scale_units="xy", scale=1, width=0.008, headwidth=5, **look,
    )  # fmt: skip
    x, y = place.T
    size = 110 if n <= NUMBERED else 20
    dots = ax.scatter(x, y, c=np.diag(matrix), s=size, zorder=3, edgecolors="k", **look)
    for number, (x, y) in enumerate(place if n <= NUMBERED else []):
        ax.annotate(str(number), (1.2 * x, 1.2 * y), ha="center", va="center", fontsize=8)
    ax.set(aspect="equal", xlim=(-1.35, 1.35), ylim=(-1.35, 1.35))
    ax.set_axis_off()
    return dots

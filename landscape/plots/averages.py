"""Pictures of averages of weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.plots import style
from landscape.plots.drawing import draws
from landscape.plots.picture import finish, wrapped_panels
from landscape.results.comparison import MANY, WeightAverage


@draws(WeightAverage)
def draw_averages(results: Sequence[WeightAverage], title: str = "") -> Figure:
    """The losses of the members, and beside them the averages: predicted with their intervals, and exact."""
    figure, axes = wrapped_panels(len(results), 6.4, 3.2, names="averages")
    for ax, r in zip(axes, results, strict=True):
        n, asked = len(r.members_loss), len(r.loss) - 1
        members, averages = np.arange(n), n + 0.5 + np.arange(asked + 1)
        chosen = r.chosen.astype(bool)  # a file may have numbers
        ax.plot(members, r.members_loss, "o", color="#56B4E9", label="member")
        ax.plot(members[chosen], r.members_loss[chosen], "o", ms=11, mfc="none", color="k", label="chosen")
        known = np.isfinite(r.high)
        ends = [(r.loss - r.low)[known], (r.high - r.loss)[known]]
        look = {"color": "#D55E00", "capsize": 4, "label": f"predicted, {r.level:.0%} interval"}
        ax.errorbar(averages[known], r.loss[known], ends, fmt="s", mfc="white", **look)
        ax.plot(averages, r.exact, "x", color="k", ms=8, mew=1.8, zorder=5, label="exact")
        names = ["average"] if asked == 1 else [f"average {k}" if asked <= MANY else "" for k in range(asked)]
        ax.set_xticks([*members, *averages], [*r.labels, *names, "chosen\naverage"], rotation=30, ha="right")
        ax.axvline(n - 0.25, color="0.8", lw=1)
        ax.set_ylabel(f"loss{style.unit(results[0], 'loss')}")
        ax.set_title(style.paper_name(r.label))
    text = (
        "Predicted from losses, gradients and one Hessian product at each member; where no prediction is "
        f"drawn, the members are too far apart for one; {style.samples_of(results)}."
    )
    return finish(figure, title or style.headline(results), text, list(axes[:1]), ncols=4)

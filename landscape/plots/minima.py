"""Learning rates that training tolerates at a minimum, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import splits
from landscape.plots.picture import shared_legend, wrapped_panels
from landscape.plots.stability import delay_axes, without_bridge
from landscape.plots.style import style
from landscape.results.minima import Minima


@draws(Minima)
def draw_minima(results: Sequence[Minima], title: str = "") -> Figure:
    """Learning rate against delay, one panel for each minimum: lines are predicted, markers are measured.

    The bar of a marker reaches from the largest rate at which training stayed at the minimum to the smallest
    at which it left.

    Example:
        >>> ones, delay = np.ones((3, 2)), np.array([0, 1])
        >>> result = Minima(delay, predicted=ones, stays=ones, leaves=1.1 * ones, steps=ones,
        ...                 lambda_after=ones, momentum=0.9, weight_decay=0.0, lambda_max=2.0, residual=0.0,
        ...                 loss=0.0, gradient_norm=0.0, displacement=0.1, factor=4.0, samples=10)
        >>> draw_minima([result]).axes[0].get_ylabel()
        'learning rate η'
    """
    with style():
        figure, axes = wrapped_panels(len(results), 5.6, 4.2, sharex=True, sharey=True)
        for ax, r in zip(axes, results, strict=True):
            names = ("no momentum", f"momentum {r.momentum:g}", f"shifted momentum {r.momentum:g}")
            for f, (name, marker) in enumerate(zip(names, "osD", strict=True)):
                line = without_bridge(r.delay, r.predicted[f])
                ax.plot(*line, color=f"C{f}", label=f"{name}: predicted")
                if 0 in r.delay:  # no line goes through it
                    start = r.predicted[f][r.delay == 0]
                    ax.plot(r.delay[r.delay == 0], start, marker="_", ms=14, mew=1.6, color=f"C{f}")
                bars = np.abs(np.stack([r.stays[f], r.leaves[f]]) - r.boundary[f])
                ax.errorbar(
                    r.delay, r.boundary[f], bars, color=f"C{f}", marker=marker, ls="none", ms=5, mfc="w",
                    capsize=2, label=f"{name}: measured",
                )  # fmt: skip
            delay_axes(ax, r, max(1, r.delay.max()))
        shared_legend(figure, axes, ncols=2 * min(3, len(axes)))
        samples = f"{results[0].samples:,} samples of {splits(results)}"
        figure.suptitle(
            title or f"The largest rate at which training stays at its minimum\n{samples}, full batch"
        )
    return figure

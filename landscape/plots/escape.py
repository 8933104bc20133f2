"""Escape times from a saddle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.picture import wrapped_panels
from landscape.plots.style import color_of, decimal_labels, paper_name, style
from landscape.results.escape import Escape


@draws(Escape)
def draw_escapes(results: Sequence[Escape], title: str = "") -> Figure:
    """Median escape time, with its 95% confidence band, against the quantity that is varied.

    One panel for each result. The upper edge is the last step: lines and bands there stand for runs that had
    not escaped by then.

    Example:
        >>> times = np.arange(1.0, 13.0).reshape(1, 2, 6)
        >>> result = Escape(times, np.array([2.0, 4.0]), "dimension", ("ssgd",), share=0.5, steps=20)
        >>> draw_escapes([result]).axes[0].get_xlabel()
        'dimension'
    """
    names = {"dimension": "dimension", "noise": "std of a sample's gradient", "lr": "learning rate"}
    with style():
        figure, axes = wrapped_panels(len(results), 3.9, 3.1, sharey=True)
        for ax, r in zip(axes, results, strict=True):
            low, high = (np.minimum(edge, r.steps) for edge in r.band())
            median = np.minimum(r.median, r.steps)
            for a, name in enumerate(r.algorithms):
                ax.fill_between(r.values, low[a], high[a], color=color_of(name), alpha=0.2, lw=0)
                ax.plot(
                    r.values,
                    median[a],
                    color=color_of(name),
                    marker="osD"[a % 3],
                    ms=4,
                    label=paper_name(name),
                )
            ax.set_xscale("log", base=10 if r.vary == "noise" else 2)
            ax.set_yscale("log")
            if r.vary != "noise":
                ax.set_xticks(r.values, [f"{v:g}" for v in r.values])
                ax.xaxis.set_minor_locator(ticker.NullLocator())
            ax.set_title(r.setting)
            ax.set_xlabel(names.get(r.vary, r.vary))
            decimal_labels(ax.yaxis)
            ax.set_ylabel("steps to escape" if ax.get_subplotspec().is_first_col() else "")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle(
            title or f"Escape from a saddle, median of {results[0].times.shape[2]} seeds and 95% band"
        )
    return figure

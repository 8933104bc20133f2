"""Pictures of limits of stability, minima that training leaves, and escape from saddles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.hdf5 import Array
from landscape.plots.drawing import draws
from landscape.plots.labels import samples_of, splits
from landscape.plots.picture import shared_legend, wrapped_panels
from landscape.plots.style import color_of, decimal_labels, paper_name
from landscape.results.stability import Escape, Minima, Stability


@draws(Stability)
def draw_stability(results: Sequence[Stability], title: str = "") -> Figure:
    """Learning rate against delay, one panel for each minimum: above a line training leaves the minimum.

    The star is the run; the dash above or below it is the limit of its update rule, where that is known.
    """
    figure, axes = wrapped_panels(len(results), 4.6, 3.6, sharex=True, sharey=True)
    for ax, r in zip(axes, results, strict=True):
        names = ("no momentum", f"momentum {r.momentum:g}", f"shifted momentum {r.momentum:g}")
        finite = np.isfinite(r.rates).all()
        for name, rate, marker in zip(names, r.rates, "osD", strict=True):
            if finite:
                ax.plot(*without_bridge(r.delay, rate), marker=marker, ms=4, label=name)
        if np.isfinite(r.lr):
            ax.plot(
                r.own_delay, r.lr, marker="*", ls="none", ms=14, mfc="#E69F00", mec="k", zorder=5,
                label="the run", clip_on=False,
            )  # fmt: skip
            ax.axhline(r.lr, color="#777777", lw=0.9, ls=":", zorder=0)
        if np.isfinite(r.own_limit) and finite:
            ax.plot(
                r.own_delay, r.own_limit / r.lambda_max, marker="_", ls="none", ms=16, mew=2.5, color="k",
                label="the run's own limit", clip_on=False,
            )  # fmt: skip
        delay_axes(ax, r, max(1, r.delay.max(), r.own_delay))
    shared_legend(figure, axes, ncols=2 * min(3, len(axes)))
    by = [r.precondition for r in results if r.precondition]
    seen = f", preconditioned by {', '.join(dict.fromkeys(by))}" if by else ""
    figure.suptitle(title or f"Above a line training leaves the minimum ({splits(results)}{seen})")
    return figure


def without_bridge(delay: Array, values: Array) -> tuple[Array, Array]:
    """The points of a line with a gap after delay 0, which on the axis is no neighbour of delay 1."""
    after = np.flatnonzero(np.diff(delay == 0)) + 1
    return np.insert(delay.astype(float), after, np.nan), np.insert(values.astype(float), after, np.nan)


def delay_axes(ax: Axes, r: Stability | Minima, largest: int) -> None:
    """Label ``ax`` as learning rate against delay, from 0 to ``largest`` steps."""
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xlim(-0.3, largest * 1.2)
    ax.set_yscale("log")
    ax.set_xticks(r.delay, [str(tau) for tau in r.delay])
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_title(
        f"{paper_name(r.label) or 'minimum'}\n$\\lambda_{{max}}$ = {r.lambda_max:.4g} ({r.split or 'data'})"
    )
    ax.set_xlabel("delay τ (steps)")
    ax.set_ylabel("learning rate η")


@draws(Minima)
def draw_minima(results: Sequence[Minima], title: str = "") -> Figure:
    """Learning rate against delay, one panel for each minimum: lines are predicted, markers are measured.

    The bar of a marker reaches from the largest rate at which training stayed at the minimum to the smallest
    at which it left.
    """
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
    figure.suptitle(
        title or f"The largest rate at which training stays at its minimum\n{samples_of(results)}, full batch"
    )
    return figure


@draws(Escape)
def draw_escapes(results: Sequence[Escape], title: str = "") -> Figure:
    """Median escape time, with its 95% confidence band, against the quantity that is varied.

    One panel for each result. The upper edge is the last step: lines and bands there stand for runs that had
    not escaped by then.
    """
    names = {"dimension": "dimension", "noise": "std of a sample's gradient", "lr": "learning rate"}
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

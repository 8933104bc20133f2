"""Pictures of the stability of minima, and of smoothed losses. Nothing here computes a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.hdf5 import Array
from landscape.plots.picture import loss_of, panels, several, splits
from landscape.plots.surface import plain_numbers, style
from landscape.plots.values import drawing
from landscape.results.minima import Minima
from landscape.results.smoothing import Smoothing
from landscape.results.stability import Stability


@drawing
def stabilities(results: Sequence[Stability], title: str = "") -> Figure:
    """Learning rate against delay, a panel a minimum: above a line training leaves it.

    The star is the run, the dash above or below it what its own rule's limit allows, where that is known.
    """
    with style():
        figure, axes = several(len(results), 4.6, 3.6, sharex=True, sharey=True)
        for ax, r in zip(axes, results, strict=True):
            names = ("no momentum", f"momentum {r.momentum:g}", f"shifted momentum {r.momentum:g}")
            finite = np.isfinite(r.rates).all()
            for name, rate, marker in zip(names, r.rates, "osD", strict=True):
                if finite:
                    ax.plot(r.delay, rate, marker=marker, ms=4, label=name)
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
            _delays(ax, r, max(1, r.delay.max(), r.own_delay))
        _legend(figure, axes)
        figure.suptitle(title or f"Above a line training leaves the minimum ({splits(results)})")
    return figure


@drawing
def minima(results: Sequence[Minima], title: str = "") -> Figure:
    """Learning rate against delay, a panel a minimum: lines as predicted, markers where training left.

    A marker's bar goes from the largest rate that stayed to the smallest that left.
    """
    with style():
        figure, axes = several(len(results), 5.6, 4.2, sharex=True, sharey=True)
        for ax, r in zip(axes, results, strict=True):
            names = ("no momentum", f"momentum {r.momentum:g}", f"shifted momentum {r.momentum:g}")
            for f, (name, marker) in enumerate(zip(names, "osD", strict=True)):
                ax.plot(r.delay, r.predicted[f], color=f"C{f}", label=f"{name}: predicted")
                bars = np.abs(np.stack([r.stays[f], r.leaves[f]]) - r.found[f])
                ax.errorbar(
                    r.delay, r.found[f], bars, color=f"C{f}", marker=marker, ls="none", ms=5, mfc="w",
                    capsize=2, label=f"{name}: found",
                )  # fmt: skip
            _delays(ax, r, max(1, r.delay.max()))
        _legend(figure, axes)
        samples = f"{results[0].samples:,} samples of {splits(results)}"
        figure.suptitle(
            title or f"The largest rate at which training stays at its minimum\n{samples}, full batch"
        )
    return figure


def _delays(ax: Axes, r: Stability | Minima, most: int) -> None:
    """Axes of learning rate against delay, 0 to ``most``."""
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xlim(-0.3, most * 1.2)
    ax.set_yscale("log")
    ax.set_xticks(r.delay, [str(tau) for tau in r.delay])
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_title(f"{r.label or 'minimum'}\n$\\lambda_{{max}}$ = {r.lambda_max:.4g} ({r.split or 'data'})")
    ax.set_xlabel("delay τ (steps)")
    ax.set_ylabel("learning rate η")


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels."""
    handles = {
        label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(len(handles), 2 * min(3, len(axes))),
    )


@drawing
def smoothings(results: Sequence[Smoothing], title: str = "") -> Figure:
    """Rates that the loss allows beside those taken, sharpness and loss over the checkpoints; the spread.

    Each of the loss itself and of it smoothed; dashes are the gradient's steepest change along the steps.

    Bars are one standard error.
    """
    place = np.arange(len(results))
    names = ("loss", "smoothed by the spread", "smoothed, isotropic")
    looks = [
        {"marker": m, "ls": "none", "ms": 7, "capsize": 3, "color": f"C{c}"} for m, c in ("o6", "s2", "D0")
    ]
    with style():
        figure, axes = panels(2, 2, max(4.6, 1.3 * len(results)), 3.4)
        rate, sharp, loss, lie = axes
        for k, (name, look) in enumerate(zip(names, looks, strict=True)):
            at = place + 0.12 * (k - 1)
            shown = [
                _of(r.lambda_max, r.lambda_smooth, r.lambda_smooth_se, k)
                + _of(r.loss, r.loss_smooth, r.loss_smooth_se, k)
                for r in results
            ]
            value, error, mean, mean_error = np.array(shown).T
            sharp.errorbar(at, value, error, label=f"$\\lambda_{{max}}$, {name}", **look)
            loss.errorbar(at, mean, mean_error, **look)
            top = np.array([r.rates[k] for r in results])
            seen = np.where(np.isfinite(top), top, np.nan)
            rate.errorbar(
                at, seen, seen * error / np.abs(value), label=f"2/$\\lambda_{{max}}$, {name}", **look
            )
            slopes = [(r.lipschitz, *r.lipschitz_smooth)[k] for r in results]
            steepest = [s.max() if s.size else np.nan for s in slopes]
            sharp.plot(at, steepest, marker="_", ls="none", ms=14, mew=2.5, color=look["color"], alpha=0.6)
        rate.plot(place, [r.lr for r in results], "k_", ms=26, mew=2, label=r"$\alpha$")
        rate.plot(place, [r.alpha_e for r in results], "kx", ms=8, mew=2, label=r"$\alpha_e$")
        for k, r in enumerate(results):
            rank = np.arange(1, len(r.share) + 1)
            lie.plot(
                rank,
                np.maximum(r.share, 0.1 / r.parameters),
                marker="o",
                ms=4,
                label=r.label or f"{k}",
                color=f"C{k % 7}",
            )
        lie.axhline(1 / results[0].parameters, color="#777777", lw=0.9, ls=":")
        lie.annotate("isotropic", (1, 1 / results[0].parameters), va="bottom", fontsize=9, color="#555555")
        lie.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        lie.set_xlabel("eigenvector of the Hessian, the sharpest first")
        lie.legend(fontsize=8)
        titles = ("learning rates", "sharpness; dashes: steepest gradient change", "loss", "the spread")
        labels = (
            "rate",
            "$\\lambda_{max}$ (nat)",
            f"{loss_of(results)} (nat)",
            "share of the spread along it",
        )
        for ax, head, label in zip(axes, titles, labels, strict=True):
            ax.set_title(head)
            ax.set_ylabel(label)
            ax.set_yscale("log")
            if ax is not lie:
                plain_numbers(ax.yaxis)
                ax.set_xticks(
                    place, [(r.label or f"{k}").replace(", step", ",\nstep") for k, r in enumerate(results)]
                )
                ax.tick_params(axis="x", labelsize=8)
                ax.margins(x=0.15)
        figure.legend(*rate.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        first = results[0]
        figure.suptitle(
            title or f"Smoothing by the learners' spread, {first.samples:,} samples of {splits(results)}"
        )
    return figure


def _of(plain: float, smooth: Array, error: Array, k: int) -> tuple[float, float]:
    """(value, standard error) of the loss itself (k = 0) or smoothed (1, 2)."""
    return (plain, 0.0) if k == 0 else (float(smooth[k - 1]), float(error[k - 1]))

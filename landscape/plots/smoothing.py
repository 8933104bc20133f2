"""The loss smoothed by the spread of the learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.hdf5 import Array
from landscape.plots.drawing import draws
from landscape.plots.labels import loss_of, splits
from landscape.plots.picture import panels
from landscape.plots.style import colors_of, decimal_labels, paper_name, style
from landscape.results.smoothing import Smoothing

# The loss itself, and smoothed by the measured and by an isotropic spread.
_NAMES = ("loss", "smoothed by the spread", "smoothed, isotropic")
_MARKERS: list[dict[str, Any]] = [
    {"marker": m, "ls": "none", "ms": 7, "capsize": 3, "color": f"C{c}"} for m, c in ("o3", "s1", "D0")
]


@draws(Smoothing)
def draw_smoothing(results: Sequence[Smoothing], title: str = "") -> Figure:
    """Four panels: learning rates, sharpness and loss at the checkpoints, and the directions of the spread.

    The first three show the loss itself and the loss smoothed by the spread, with one standard error.
    Learning rates are 2/λ_max, against the rates α and α_e of the run. Dashes beside the sharpness are the
    steepest change of the gradient along the steps. The fourth panel shows the share of the spread along the
    eigenvectors of the Hessian.

    Example:
        >>> two = np.array([0.5, 0.6])
        >>> result = Smoothing(
        ...     loss=0.5, loss_smooth=two, loss_smooth_se=two / 9, lambda_max=2.0, residual=0.1,
        ...     lambda_smooth=two, lambda_smooth_residual=two, lambda_smooth_se=two, lambda_smooth_bias=two,
        ...     eigenvalues=two, share=two, trace_hs=0.1, consensus=0.1, lipschitz=two,
        ...     lipschitz_smooth=np.stack([two, two]), lipschitz_smooth_se=np.stack([two, two]), lr=0.1,
        ...     alpha_e=0.1, parameters=9, learners=3, pairs=4, samples=9, seed=0, converged=True)
        >>> [ax.get_title() for ax in draw_smoothing([result]).axes][2:]
        ['loss', 'the spread']
    """
    with style():
        figure, axes = panels(2, 2, max(4.6, 1.3 * len(results)), 3.4)
        rate, sharpness, loss, spread = axes
        for k in range(len(_NAMES)):
            _draw_smoothed(rate, sharpness, loss, results, k)
        place = np.arange(len(results))
        rate.plot(place, [r.lr for r in results], "k_", ms=26, mew=2, label=r"$\alpha$")
        rate.plot(place, [r.alpha_e for r in results], "kx", ms=8, mew=2, label=r"$\alpha_e$")
        _draw_spread(spread, results)
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
            if ax is not spread:
                decimal_labels(ax.yaxis)
                names = [
                    (paper_name(r.label) or f"{k}").replace(", step", ",\nstep")
                    for k, r in enumerate(results)
                ]
                ax.set_xticks(place, names)
                ax.tick_params(axis="x", labelsize=8)
                ax.margins(x=0.15)
        figure.legend(*rate.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        samples = f"{results[0].samples:,} samples of {splits(results)}"
        figure.suptitle(title or f"Smoothing by the learners' spread, {samples}")
    return figure


def _draw_smoothed(rate: Axes, sharpness: Axes, loss: Axes, results: Sequence[Smoothing], k: int) -> None:
    """Draw the rates, sharpness and loss of the loss itself (k = 0) or of a smoothed loss (1, 2)."""
    at, markers = np.arange(len(results)) + 0.12 * (k - 1), _MARKERS[k]
    value, error, mean, mean_error = np.array(
        [
            _value(r.lambda_max, r.lambda_smooth, r.lambda_smooth_se, k)
            + _value(r.loss, r.loss_smooth, r.loss_smooth_se, k)
            for r in results
        ]
    ).T
    sharpness.errorbar(at, value, error, label=f"$\\lambda_{{max}}$, {_NAMES[k]}", **markers)
    loss.errorbar(at, mean, mean_error, **markers)
    rates = np.array([r.rates[k] for r in results])
    finite = np.where(np.isfinite(rates), rates, np.nan)
    label = f"2/$\\lambda_{{max}}$, {_NAMES[k]}"
    rate.errorbar(at, finite, finite * error / np.abs(value), label=label, **markers)
    slopes = [(r.lipschitz, *r.lipschitz_smooth)[k] for r in results]
    steepest = [s.max() if s.size else np.nan for s in slopes]
    sharpness.plot(at, steepest, marker="_", ls="none", ms=14, mew=2.5, color=markers["color"], alpha=0.6)


def _draw_spread(ax: Axes, results: Sequence[Smoothing]) -> None:
    """Draw the share of the spread along each eigenvector, against that of an isotropic spread."""
    colors = colors_of([r.label for r in results])
    for k, r in enumerate(results):
        rank, share = np.arange(1, len(r.share) + 1), np.maximum(r.share, 0.1 / r.parameters)
        ax.plot(rank, share, marker="o", ms=4, label=paper_name(r.label) or f"{k}", color=colors[k])
    ax.axhline(1 / results[0].parameters, color="#777777", lw=0.9, ls=":")
    ax.annotate("isotropic", (1, 1 / results[0].parameters), va="bottom", fontsize=9, color="#555555")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.set_xlabel("eigenvector of the Hessian, the sharpest first")
    ax.legend(fontsize=8)


def _value(loss: float, smooth: Array, error: Array, k: int) -> tuple[float, float]:
    """(value, standard error) of the loss itself (k = 0) or of a smoothed loss (1, 2)."""
    return (loss, 0.0) if k == 0 else (float(smooth[k - 1]), float(error[k - 1]))

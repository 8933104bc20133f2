"""Pictures of sharpness, smoothed losses, and local learning coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.picture import finish, panels, points, wrapped_panels
from landscape.plots.style import (
    OTHER,
    color_of,
    colors_of,
    decimal_labels,
    headline,
    joined,
    log_axis,
    loss_of,
    names_of,
    paper_name,
    rows_of,
    samples_of,
    shades,
)
from landscape.results.flatness import LearningCoefficient, Sharpness, Smoothing


@draws(Sharpness)
def draw_sharpness(results: Sequence[Sharpness], title: str = "") -> Figure:
    """The sharpness of each checkpoint against ρ where there are several, else one beside the other.

    Error bars are one standard error over the draws.
    """
    labels = list(dict.fromkeys(r.label for r in results))
    names = [paper_name(label) or f"result {k}" for k, label in enumerate(labels)]
    many = len({r.rho for r in results}) > 1
    figure, (ax,) = panels(1, 1, max(5.0, 1.5 * len(labels)), 3.8)
    for k, (label, name, color) in enumerate(zip(labels, names, colors_of(labels), strict=True)):
        own = sorted((r for r in results if r.label == label), key=lambda r: r.rho)
        at = [r.rho for r in own] if many else [k] * len(own)
        values, errors = [r.value for r in own], [r.standard_error for r in own]
        points(ax, at, values, errors, color, name, capsize=4, ls="-" if many else "none")
    lowest = min(r.value for r in results)
    if many:
        log_axis(ax.xaxis)
        if lowest > 0:
            ax.set_yscale("log")
        ax.set_xlabel("ρ (relative to each weight)" if results[0].adaptive else "ρ (distance)")
    else:
        ax.set_xticks(range(len(labels)), [name.replace(", ", ",\n") for name in names])
        ax.set_ylim(min(0.0, lowest), None)
        ax.margins(x=0.3)
        ax.grid(False, axis="x")
    ax.set_ylabel(f"rise of the {loss_of(results)} (nat)")
    usual = headline([r for r in results if r.rho == max(r.rho for r in results)])
    return finish(figure, title or usual, _caption(results), [ax] * many, ncols=2)


def _caption(results: Sequence[Sharpness]) -> str:
    r = results[0]
    of = f"Minibatches of {r.m} from " if r.m else ""
    drawn = (
        f"; {rows_of(results, 'draws')}, error bars: one standard error"
        if any(r.draws for r in results)
        else ""
    )
    how = "mean over pairs of displacements ±δ"
    if r.kind == "worst":
        how = f"a lower bound, by at most {r.steps} gradients from each of {r.starts + 1} starts"
    return (
        f"{of}{samples_of(results)}; {how}{drawn}. Sharpness of this kind predicts generalisation poorly "
        "(arXiv 2302.07011)."
    )


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
    """
    figure, axes = panels(2, 2, max(4.6, 1.3 * len(results)), 3.4)
    rate, sharpness, loss, spread = axes
    for k in range(len(_NAMES)):
        _draw_smoothed(rate, sharpness, loss, results, k)
    place = np.arange(len(results))
    rate.plot(place, [r.lr for r in results], "k_", ms=26, mew=2, label=r"$\alpha$")
    rate.plot(place, [r.alpha_e for r in results], "kx", ms=8, mew=2, label=r"$\alpha_e$")
    _draw_spread(spread, results)
    for ax, head, label in (
        (rate, "learning rates", "rate"),
        (sharpness, "sharpness; dashes: steepest gradient change", "$\\lambda_{max}$ (nat)"),
        (loss, "loss", f"{loss_of(results)} (nat)"),
        (spread, "the spread", "share of the spread along it"),
    ):
        ax.set(title=head, ylabel=label, yscale="log")
        if ax is not spread:
            decimal_labels(ax.yaxis)
            ax.set_xticks(place, [name.replace(", step", ",\nstep") for name in names_of(results, "")])
            ax.tick_params(axis="x", labelsize=8)
            ax.margins(x=0.15)
    usual = f"Smoothing by the learners' spread, {samples_of(results)}"
    return finish(figure, title or usual, legend=[rate], ncols=3)


def _draw_smoothed(rate: Axes, sharpness: Axes, loss: Axes, results: Sequence[Smoothing], k: int) -> None:
    """Draw the rates, sharpness and loss of the loss itself (k = 0) or of a smoothed loss (1, 2)."""
    at, markers = np.arange(len(results)) + 0.12 * (k - 1), _MARKERS[k]
    if k == 0:
        rows = [(r.lambda_max, 0.0, r.loss, 0.0) for r in results]
    else:
        smoothed = ("lambda_smooth", "lambda_smooth_se", "loss_smooth", "loss_smooth_se")
        rows = [tuple(getattr(r, name)[k - 1] for name in smoothed) for r in results]
    value, error, mean, mean_error = np.transpose(rows)
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
    tones = colors_of([r.label for r in results])
    for r, name, color in zip(results, names_of(results, ""), tones, strict=True):
        rank, share = np.arange(1, len(r.share) + 1), np.maximum(r.share, 0.1 / r.parameters)
        ax.plot(rank, share, marker="o", ms=4, label=name, color=color)
    ax.axhline(1 / results[0].parameters, color="#777777", lw=0.9, ls=":")
    ax.annotate("isotropic", (1, 1 / results[0].parameters), va="bottom", fontsize=9, color="#555555")
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.set_xlabel("eigenvector of the Hessian, the sharpest first")
    ax.legend(fontsize=8)


@draws(LearningCoefficient)
def draw_learning_coefficient(results: Sequence[LearningCoefficient], title: str = "") -> Figure:
    """The chains' nβ (L(w) − L(w*)) without heating against the step, one panel for each result.

    The line is λ̂ with a band of one standard error; the grey part is the burn-in.
    """
    figure, axes = wrapped_panels(len(results), 4.8, 3.4, sharey=True)
    for ax, result in zip(axes, results, strict=True):
        _draw_chains(ax, result)
    chosen = ("chains", "nβ", "step size ε", "R̂", "effective draws", "taken off as heating")
    text = f"SGLD from w* on {samples_of(results)}; {rows_of(results, *chosen)}; a point is the mean of "
    text += f"{joined(str(r.steps_a_draw) for r in results)} steps."
    return finish(figure, title or headline(results), text, axes, ncols=3)


def _draw_chains(ax: Axes, result: LearningCoefficient) -> None:
    """Traces, burn-in and estimate of one result."""
    traces = result.rise - result.heating
    steps = (np.arange(traces.shape[1]) + 0.5) * result.steps_a_draw
    for k, (trace, color) in enumerate(zip(traces, shades(color_of(result.label), len(traces)), strict=True)):
        ax.plot(steps, trace, color=color, lw=0.7, alpha=0.8, label="chains" if k == 0 else None)
    ax.axvspan(0, result.burn_in * result.steps_a_draw, color=OTHER, alpha=0.15, lw=0, label="burn-in")
    kept = result.burn_in * result.steps_a_draw, result.steps
    low, high = result.value - result.standard_error, result.value + result.standard_error
    ax.fill_between(kept, low, high, color="k", alpha=0.25, lw=0)
    ax.plot(kept, [result.value] * 2, color="k", lw=1.5, label="estimate ± standard error")
    # A chain that begins far from where it settles must not hide the rest.
    after = traces[:, result.burn_in :]
    low, high = float(after.min()), float(after.max())
    ax.set(
        ylim=(min(0.0, low), 1.15 * high), xlim=(0, result.steps), title=paper_name(result.label) or "weights"
    )
    ax.set(xlabel="step of the chain", ylabel="nβ (L(w) − L(w*))")

"""Pictures of the noise of gradients: Δ(2), noise scales, alignment, critical batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.plots import draws, style
from landscape.plots.picture import categories, finish, panels, points, wrapped_panels
from landscape.results.noise import CriticalBatch, Noise, NoiseAlignment, NoiseScale

ESTIMATES = {
    "direct": "direct\n(definition)",
    "full_batch": "full-batch",
    "eq4": "Eq. 4\nα² tr(HCH)",
    "first_order": "first-order",
}


@draws(Noise)
def draw_noise(results: Sequence[Noise], title: str = "") -> Figure:
    """Draw the four estimates of Δ(2) as bars on a log scale, one panel for each checkpoint.

    Error bars are one standard error.
    """
    figure, axes = wrapped_panels(len(results), 3.9, 3.1, names="estimates")
    estimates = [[r.means()[name] for name in ESTIMATES] for r in results]
    values = [value for rows in estimates for value, _ in rows]
    smallest = min((value for value in values if value > 0), default=1.0)
    positions = np.arange(len(ESTIMATES))
    for ax, r, rows in zip(axes, results, estimates, strict=True):
        heights, errors = np.transpose(rows)
        bars = ax.bar(positions, heights, yerr=errors, color=style.SKY, ecolor="k", capsize=3, width=0.65)
        ax.bar_label(bars, fmt="{:.2g}", padding=3, fontsize=8.5)
        categories(ax, list(ESTIMATES.values()))
        draws_note = f"{len(r.direct)} draws of {r.learners} × {r.local_batch}"
        ax.set(yscale="log", ylim=(smallest / 5, max(*values, smallest) * 6))
        ax.set_title(f"{style.paper_name(r.label)}\nα = {r.lr:g}, {draws_note}")
        ax.set_ylabel("Δ(2) (squared weights)")
    text = "Δ(2), which the spread adds to the noise of a step, in four ways; bars: one standard error."
    return finish(figure, title or style.headline(results), text)


@draws(NoiseScale)
def draw_noise_scale(results: Sequence[NoiseScale], title: str = "") -> Figure:
    """Draw the noise scale of each checkpoint on a log axis, a row each, with one standard error.

    Filled points are w_a, open ones are the learners' mean gradient; the bar is the batch.
    """
    figure, (ax,) = panels(1, 1, 6.4, 1.6 + 0.5 * len(results), ["noise_scale"])
    for k, r in enumerate(results):
        color = style.color_of(r.label)
        for value, error, face, name, y in (
            (r.value, r.standard_error, color, "at w_a", k - 0.12),
            (r.learner_value, r.learner_standard_error, "white", "mean gradient of the learners", k + 0.12),
        ):
            if np.isfinite(value) and value > 0:
                bar = error if np.isfinite(error) else 0.0
                low = min(bar, 0.9 * value)  # a logarithmic axis has no room below 0
                points(ax, value, y, None, color, name, xerr=[[low], [bar]], ms=6, mfc=face)
        ax.plot(r.batch, k, marker="|", ms=18, mew=2, color="k", ls="none", label="batch")
    style.log_axis(ax.xaxis)
    ax.margins(x=0.15)
    ax.set_yticks(range(len(results)), style.names_of(results, "weights"))
    ax.set(ylim=(len(results) - 0.4, -0.6), xlabel=NoiseScale.units["batch"])
    text = (
        f"tr Σ/‖g‖², {style.joined(f'{r.draws:,}' for r in results)} draws from {style.samples_of(results)}; "
        "bars: one standard error."
    )
    if by := dict.fromkeys(r.precondition for r in results if r.precondition):
        text += f" Preconditioned by {', '.join(by)}."
    return finish(figure, title or style.headline(results), text, [ax], ncols=3)


@draws(NoiseAlignment)
def draw_noise_alignment(results: Sequence[NoiseAlignment], title: str = "") -> Figure:
    """Draw C_ii against λ_i on logarithmic axes with its power law; beside it tr(HS)/tr S next to λ_max.

    Error bars are one standard error over the draws.
    """
    figure, (power, curvature) = panels(1, 2, 4.6, 3.8, ["power", "curvature"])
    for r, name, color in style.labeled(results, "result"):
        _draw_power(power, r, color, name)
    power.set_xlabel(f"eigenvalue $\\lambda_i${style.unit(results[0], 'values')}")
    power.set_yscale("log")
    power.set_ylabel(f"gradient noise along $v_i${style.unit(results[0], 'covariance')}")
    style.log_axis(power.xaxis)
    positions = np.arange(len(results))
    for shift, name, label, look in (
        (-0.25, "ias", "tr(HS)/tr S", {"color": "k"}),
        (0.0, "noise_curvature", "tr(HC)/tr C", {"color": style.SKY, "marker": "s"}),
    ):
        value, error = ([getattr(r, name + end) for r in results] for end in ("", "_error"))
        points(curvature, positions + shift, value, error, label=label, **look)
    top = [r.values[0] for r in results]
    curvature.plot(positions + 0.25, top, "_", color=style.AMBER, ms=18, mew=2.5, label="$\\lambda_{max}$")
    categories(curvature, style.names_of(results, "result"))
    curvature.margins(x=0.3)
    curvature.set_ylim(min(0.0, *(r.ias for r in results)), None)
    curvature.set_ylabel(f"curvature{style.unit(results[0], 'ias')}")
    curvature.legend(fontsize=8)
    text = (
        "S: second moment, C: covariance of the gradients of minibatches; H: Hessian over "
        f"{style.samples_of(results)}; bars: one standard error."
    )
    return finish(figure, title or style.headline(results), text, [power], ncols=2)


def _draw_power(ax: Axes, r: NoiseAlignment, color: str, name: str) -> None:
    """Draw the points of one result, and the line through them."""
    used = (r.values > 0) & (r.covariance > 0)
    x, y = r.values[used], r.covariance[used]
    below = np.minimum(r.covariance_error[used], 0.9 * y)  # the bar of a logarithm must not reach 0
    points(ax, x, y, [below, r.covariance_error[used]], color, name, capsize=2)
    if np.isfinite(r.gamma):
        line = np.exp(np.log(y).mean() + r.gamma * (np.log(x) - np.log(x).mean()))
        ax.plot(x, line, color=color, lw=1.2, label=f"γ = {r.gamma:.2f} ± {r.gamma_error:.2g}")


@draws(CriticalBatch)
def draw_critical_batch(results: Sequence[CriticalBatch], title: str = "") -> Figure:
    """Draw the rise of the loss against the batch, a line for each checkpoint; bars: one standard error.

    Branches that diverged are not drawn.
    """
    figure, (ax,) = panels(1, 1, 6.4, 4.0, ["rise"])
    first, allowed = results[0], 100 * results[0].loss_tol
    for r, name, color in style.labeled(results, ""):
        seen = np.isfinite(r.rise)
        name += "" if "step" in r.label else f", step {r.step:,}"  # unless the run ended there
        error = 100 * np.nan_to_num(r.rise_error[seen])
        points(ax, r.batch[seen], 100 * r.rise[seen], error, color, name, ls="-", ms=5)
        if np.isfinite(r.value):
            ax.axvline(r.value, color=color, ls="--", lw=1.2)
    ax.axhline(allowed, color=style.DARK, lw=1.0, ls=":", label="allowed")
    ax.set(xscale="log", ylabel="rise of the training loss (%)")
    ax.set_xlabel(f"batch{style.unit(CriticalBatch, 'batch')}")
    # Linear up to what is allowed: far above the critical batch the loss is many times as large.
    ax.set_yscale("symlog", linthresh=allowed)
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    sizes = sorted({int(batch) for r in results for batch in r.batch})
    style.ticks_at(ax.xaxis, sizes, [f"{size:,}" for size in sizes])
    text = (
        f"Branches on {first.trained_samples:,} samples each, {first.loss.shape[1]} seeds; bars: one "
        "standard error; dashed: the critical batch."
    )
    return finish(figure, title or style.headline(results), text, [ax], ncols=2)

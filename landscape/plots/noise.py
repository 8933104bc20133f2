"""Pictures of the noise of gradients: Δ(2), noise scales, alignment, critical batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.plots import draws, style
from landscape.plots.picture import categories, finish, panels, points, wrapped_panels
from landscape.results.noise import CriticalBatch, Noise, NoiseAlignment, NoiseScale
from landscape.results.shown import in_words

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
        ax.bar_label(bars, [style.power_of_ten(height) for height in heights], padding=3, fontsize=8.5)
        categories(ax, list(ESTIMATES.values()))
        draws_note = f"{len(r.direct)} draws of {r.learners} × {r.local_batch} samples"
        ax.set(yscale="log", ylim=(smallest / 5, max(*values, smallest) * 6), ylabel="Δ(2) (squared weights)")
        ax.set_title(f"{style.paper_name(r.label)}\nα = {r.lr:g}, {draws_note}")
    text = "Δ(2), which the spread adds to the noise of a step, in four ways; bars: one standard error."
    return finish(figure, title or style.headline(results), text)


@draws(NoiseScale)
def draw_noise_scale(results: Sequence[NoiseScale], title: str = "") -> Figure:
    """Draw the noise scales of checkpoints on a logarithmic axis, each checkpoint in a row.

    Filled points are noise scales at w_a; open points are noise scales of the learners' mean gradient. Error
    bars are one standard error. The short vertical line is the batch of the run.
    """
    figure, (ax,) = panels(1, 1, 6.4, 1.6 + 0.5 * len(results), names=["noise_scale"])
    # With learners, a row has two points: one for w_a and, below it, one for the learners. The y axis points
    # down.
    shift = 0.12 if np.isfinite([r.learner_value for r in results]).any() else 0.0
    for k, r in enumerate(results):
        color = style.color_of(r.label)
        for value, error, face_color, name, y in (
            (r.value, r.standard_error, color, "at w_a", k - shift),
            (r.learner_value, r.learner_standard_error, "white", "mean gradient of the learners", k + shift),
        ):
            if np.isfinite(value) and value > 0:
                upper = error if np.isfinite(error) else 0.0
                # On a logarithmic axis, an error bar cannot reach 0.
                bar = [[min(upper, 0.9 * value)], [upper]]
                points(ax, value, y, color=color, label=name, xerr=bar, ms=6, mfc=face_color)
        ax.plot(r.batch, k, marker="|", ms=18, mew=2, color="k", ls="none", label="batch of the run")
    style.log_axis(ax.xaxis)
    ax.margins(x=0.15)
    ax.set_yticks(range(len(results)), style.names_of(results, "weights"))
    ax.set(ylim=(len(results) - 0.4, -0.6), xlabel=f"noise scale ({NoiseScale.units['batch']})")
    draws_count = style.joined(f"{r.draws:,}" for r in results)
    text = f"tr Σ/‖g‖², {draws_count} draws from {style.samples_of(results)}; bars: one standard error."
    text = f"{text} {style.sentence(style.preconditioned_by(results))}".rstrip()
    return finish(figure, title or style.headline(results), text, [ax], ncols=3)


@draws(NoiseAlignment)
def draw_noise_alignment(results: Sequence[NoiseAlignment], title: str = "") -> Figure:
    """Draw the noise along eigenvectors against their eigenvalues, and the mean curvature along gradients.

    The first panel has C_ii against λ_i on logarithmic axes, with a power law C_ii ∝ λ_i^γ. The second panel
    has tr(HS)/tr S, tr(HC)/tr C and λ_max of each result. C is the covariance and S the second moment of
    minibatch gradients. Error bars are one standard error over the draws.
    """
    figure, (power_ax, curvature_ax) = panels(1, 2, 4.6, 3.8, names=["power", "curvature"])
    for r, name, color in style.labeled(results, "result"):
        positive = (r.values > 0) & (r.covariance > 0)
        values, noise, error = r.values[positive], r.covariance[positive], r.covariance_error[positive]
        lower_error = np.minimum(error, 0.9 * noise)  # on a logarithmic axis, a bar cannot reach 0
        points(power_ax, values, noise, [lower_error, error], color, name, capsize=2)
        if np.isfinite(r.gamma):  # a line through the mean of the logarithms
            line = np.exp(np.log(noise).mean() + r.gamma * (np.log(values) - np.log(values).mean()))
            power_ax.plot(values, line, color=color, lw=1.2, label=f"γ = {in_words(r.gamma, r.gamma_error)}")
    power_ax.set_xlabel(f"eigenvalue $\\lambda_i${style.unit(results[0], 'values')}")
    power_ax.set(yscale="log", ylabel=f"gradient noise along $v_i${style.unit(results[0], 'covariance')}")
    style.log_axis(power_ax.xaxis)
    positions = np.arange(len(results))
    for shift, field, label, look in (
        (-0.25, "ias", "tr(HS)/tr S", {"color": "k"}),  # interaction-aware sharpness
        (0.0, "noise_curvature", "tr(HC)/tr C", {"color": style.SKY, "marker": "s"}),
    ):
        means = [getattr(r, field) for r in results]
        errors = [getattr(r, f"{field}_error") for r in results]
        points(curvature_ax, positions + shift, means, errors, label=label, **look)
    lambda_max = [r.values[0] for r in results]
    label = "$\\lambda_{max}$"
    curvature_ax.plot(positions + 0.25, lambda_max, "_", color=style.AMBER, ms=18, mew=2.5, label=label)
    categories(curvature_ax, style.names_of(results, "result"))
    curvature_ax.margins(x=0.3)
    curvature_ax.set_ylim(min(0.0, *(r.ias for r in results)), 1.1 * max(lambda_max))
    curvature_ax.set_ylabel(f"curvature{style.unit(results[0], 'ias')}")
    text = "S: second moment, C: covariance of the gradients of minibatches; H: Hessian over "
    text += f"{style.samples_of(results)}; bars: one standard error; lines: λ to the power γ."
    return finish(figure, title or style.headline(results), text, [power_ax, curvature_ax], ncols=3)


@draws(CriticalBatch)
def draw_critical_batch(results: Sequence[CriticalBatch], title: str = "") -> Figure:
    """Draw the rise of the training loss (%) against the batch, a line for each checkpoint.

    Error bars are one standard error. A batch with which training diverged is not drawn. A dashed line marks
    the critical batch of a checkpoint, a dotted line the allowed rise.
    """
    figure, (ax,) = panels(1, 1, 6.4, 4.0, names=["rise"])
    first = results[0]
    allowed_rise = 100 * first.loss_tol  # in %, as the axis
    for r, name, color in style.labeled(results, ""):
        is_finite = np.isfinite(r.rise)
        if "step" not in r.label:
            name += f", step {r.step:,}"
        error = 100 * np.nan_to_num(r.rise_error[is_finite])
        points(ax, r.batch[is_finite], 100 * r.rise[is_finite], error, color, name, ms=5)
        # The line is linear in log(batch), as is the interpolation that gives the critical batch.
        batch = np.geomspace(r.batch[0], r.batch[-1], 200)
        ax.plot(batch, np.interp(np.log(batch), np.log(r.batch), 100 * r.rise), color=color)
        if np.isfinite(r.value):
            ax.axvline(r.value, color=color, ls="--", lw=1.2)
    ax.axhline(allowed_rise, color=style.DARK, lw=1.0, ls=":", label="rise that is allowed")
    ax.set(xscale="log", xlabel=f"batch{style.unit(first, 'batch')}", ylabel="rise of the training loss (%)")
    # Linear up to the allowed rise, then logarithmic: far above the critical batch, the rise is many times
    # the allowed one.
    ax.set_yscale("symlog", linthresh=allowed_rise)
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    sizes = sorted({int(batch) for r in results for batch in r.batch})
    style.ticks_at(ax.xaxis, sizes, [f"{size:,}" for size in sizes])
    text = f"Rise above the smallest batch's loss, after training on {first.trained_samples:,} more samples, "
    text += f"mean over {first.loss.shape[1]} seeds; bars: one standard error; dashed: the critical batch."
    return finish(figure, title or style.headline(results), text, [ax], ncols=2)

"""Pictures of curvature and flatness: spectra, sharpness, spread, smoothing, learning coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots import draws, style
from landscape.plots.picture import categories, finish, panels, points, wrapped_panels
from landscape.results.base import with_unit
from landscape.results.flatness import BatchSharpness, LearningCoefficient, Sharpness, Smoothing
from landscape.results.noise import Disagreement
from landscape.results.shown import logarithmic
from landscape.results.spectrum import (
    BatchSpectrum,
    CurvatureTable,
    Density,
    Eigenpairs,
    LossChange,
    MatrixResult,
    Spectrum,
    Trace,
)

_MATRICES = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix"}


def draw_parts(results: Sequence[MatrixResult], title: str = "") -> Figure:
    """Draw eigenvalues, traces and densities as in spectra."""
    return draw_spectra([Spectrum.of(r) for r in results], title)


for _kind in (Eigenpairs, Trace, Density):
    draws(_kind)(draw_parts)


@draws(Spectrum)
def draw_spectra(results: Sequence[Spectrum], title: str = "") -> Figure:
    """Draw spectral densities on a logarithmic axis, and eigenvalues as ticks at the bottom of the panel.

    Each result has a color. The axis of the density begins at a tenth of the peak that a single eigenvalue
    makes. If no result has eigenvalues or a density, traces are drawn, with 95% intervals.

    Raises:
        InputError: no result has eigenvalues, a density or a trace.
    """
    if not any(r.values.size or r.density for r in results):
        return _draw_traces(results, title)
    figure, (ax,) = panels(1, 1, 6.4, 3.9, names=["spectrum"])
    densities = [r.density for r in results if r.density]
    if densities:
        # A peak has fallen to almost nothing five widths away from its node.
        low = min(float(d.nodes.min()) - 5 * d.width() for d in densities)
        high = max(float(d.nodes.max()) + 5 * d.width() for d in densities)
        x = np.linspace(low, high, 2000)
        # A tenth of the peak that one eigenvalue out of P makes.
        floor = min(0.1 / (d.parameters * d.width() * np.sqrt(2 * np.pi)) for d in densities)
    # Each result has a row of ticks; heights are relative to the panel.
    row_height = 0.05 if densities else 0.9 / len(results)
    for k, (r, name, color) in enumerate(style.labeled(results, "spectrum")):
        if r.density:
            density = r.density.broadened(x)
            ax.plot(x, np.where(density < floor, np.nan, density), color=color, label=name)
        row_bottom, row_top = row_height * k, row_height * (k + 0.9)
        # All ticks have the name of the result, which the legend shows once.
        for eigenvalue in r.values:
            ax.axvline(eigenvalue, row_bottom, row_top, color=color, lw=1.5, label=name, clip_on=False)
    if densities:
        ax.set(yscale="log", ylim=(floor, None), ylabel="spectral density (log)")
    else:
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.margins(x=0.08)
    ax.set_xlabel("eigenvalue λ")
    first = results[0]
    parts = style.joined(r.part for r in results if r.part)
    notes = [_size(results), f"parameters {parts}" if parts else "", style.preconditioned_by(results)]
    # The products of learning rate and λ_max; "" if the results have no learning rate.
    notes.append(style.rows_of(results, "lr · λ_max"))
    if any(r.values.size for r in results):
        notes.append("ticks: computed eigenvalues")
    default_title = f"Spectrum of the {_MATRICES.get(first.matrix, first.matrix)}"
    return finish(figure, title or default_title, style.sentence(*notes), [ax], ncols=3)


def _size(results: Sequence[Spectrum]) -> str:
    """Return the samples of the loss or, for an operator, its number of rows."""
    return style.samples_of(results) if results[0].samples else f"{results[0].parameters:,} rows"


def _draw_traces(results: Sequence[Spectrum], title: str) -> Figure:
    """Draw traces with their 95% intervals, one below the other."""
    if not any(np.isfinite(r.trace) for r in results):
        raise InputError("spectrum: no eigenvalue, no density and no trace, there is nothing to draw")
    figure, (ax,) = panels(1, 1, 6.4, 1.5 + 0.4 * len(results), names=["trace"])
    for k, (r, _, color) in enumerate(style.labeled(results, "spectrum")):
        half = r.trace_interval()[1] - r.trace
        error = next((e for e in (half, r.trace_error) if np.isfinite(e)), 0.0)
        points(ax, r.trace, k, color=color, xerr=error, capsize=4)
        text = f"{r.trace:.4g} ± {error:.2g}"
        ax.annotate(text, (r.trace, k), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
    ax.set_yticks(range(len(results)), style.names_of(results, "spectrum"))
    ax.margins(x=0.25)
    ax.set(ylim=(len(results) - 0.4, -0.8), xlabel=f"trace{style.unit(results[0], 'trace')}, 95% interval")
    matrix = results[0].matrix
    return finish(figure, title or f"Trace of the {_MATRICES.get(matrix, matrix)}", f"{_size(results)}.")


@draws(BatchSpectrum)
def draw_batch_spectra(results: Sequence[BatchSpectrum], title: str = "") -> Figure:
    """Draw a histogram of λ_max over minibatches for each result; dashed lines are λ_max of all samples."""
    figure, (ax,) = panels(1, 1, 6.4, 3.9, names=["batch_spectrum"])
    lambda_max = [r.values[:, 0] for r in results]
    bin_count = max(8, int(2 * np.sqrt(max(map(len, lambda_max)))))
    bins = np.histogram_bin_edges(np.concatenate(lambda_max), bin_count)
    for (r, label, color), values in zip(style.labeled(results, "spectrum"), lambda_max, strict=True):
        percent = np.full(len(values), 100 / len(values))
        look: dict[str, Any] = {"histtype": "stepfilled", "fc": (color, 0.3), "ec": color, "lw": 1.8}
        ax.hist(values, bins, weights=percent, label=label, **look)
        ax.axvline(r.whole[0], color=color, ls="--", lw=1.5)
    xlabel = f"λ_max of a minibatch{style.unit(results[0], 'values')}"
    ax.set(xlabel=xlabel, ylabel="share of the minibatches (%)")
    decay = style.rows_of(results, "weight decay")
    minibatches = style.joined(f"{len(r.values):,} minibatches of {r.batch:,}" for r in results)
    origin = f"{minibatches} from {style.samples_of(results)}"
    text = style.sentence(origin, "dashed: λ_max of all samples", decay)
    return finish(figure, title or style.headline(results), text, [ax] if len(results) > 1 else [])


@draws(CurvatureTable)
def draw_curvature_tables(results: Sequence[CurvatureTable], title: str = "") -> Figure:
    """Draw λ_max (bars) and λ_min (circles) of each block and, in a second panel, its share of the trace.

    Dotted lines are λ_max and λ_min of all parameters. Error bars of eigenvalues are residuals; error bars of
    shares are one standard error.
    """
    # The first group of a table is all parameters; the others are blocks.
    names = list(dict.fromkeys(name for r in results for name in r.groups[1:]))
    thickness = 0.8 / len(results)  # of a bar: a block's bars have 0.8 of the distance to the next block
    height = 1.6 + (0.16 + 0.12 * len(results)) * len(names)
    # The panel with λ_min and λ_max, the ends of the spectrum, is named "ends".
    figure, (eigenvalue_ax, share_ax) = panels(1, 2, 4.6, max(2.6, height), ["ends", "shares"], sharey=True)
    for k, (r, label, color) in enumerate(style.labeled(results, "")):
        block_positions = np.array([names.index(name) for name in r.groups[1:]])
        # The bars of several results are side by side, from 0.4 above the block's position to 0.4 below it.
        y = block_positions + thickness * (k + 0.5) - 0.4
        bar_look: dict[str, Any] = {"height": 0.9 * thickness, "color": color, "ecolor": "k", "capsize": 2}
        eigenvalue_ax.barh(y, r.lambda_max[1:], xerr=r.residual_max[1:], **bar_look)
        points(eigenvalue_ax, r.lambda_min[1:], y, color="k", xerr=r.residual_min[1:], mfc="w", ms=4)
        share_ax.barh(y, 100 * r.share[1:], xerr=100 * r.share_error[1:], **bar_look, label=label)
        for eigenvalue in (r.lambda_max[0], r.lambda_min[0]):
            eigenvalue_ax.axvline(eigenvalue, color=color, ls=":", lw=1.3)
    eigenvalue_ax.set_yticks(range(len(names)), names)
    eigenvalue_ax.invert_yaxis()
    for ax in (eigenvalue_ax, share_ax):
        ax.axvline(0, color="k", lw=0.8)
        ax.grid(False, axis="y")
    lambda_max = np.concatenate([r.lambda_max for r in results])
    if logarithmic(lambda_max[lambda_max > 0]):
        # Linear below a thousandth of the largest λ_max, logarithmic above.
        eigenvalue_ax.set_xscale("symlog", linthresh=1e-3 * np.nanmax(lambda_max))
    eigenvalue_ax.set_xlabel(f"λ_min and λ_max of the block{style.unit(results[0], 'lambda_max')}")
    share_ax.set_xlabel("share of the trace (%)")
    matrix = _MATRICES[results[0].matrix]
    text = f"{style.samples_of(results)}; λ_max (bars) and λ_min (circles) of blocks of the {matrix}; "
    text += "dotted: of the whole; error bars: residuals, or one standard error."
    default_title = f"Where the curvature is: blocks of the {matrix}"
    return finish(figure, title or default_title, text, legend=[share_ax] if len(results) > 1 else [])


@draws(LossChange)
def draw_loss_changes(results: Sequence[LossChange], title: str = "") -> Figure:
    """Draw the terms of the change of the loss in a step as stacked bars, for each group of parameters.

    The terms are those of the gradient, of the curvature within the group, and of the curvature between
    groups. Each result has a panel; its dashed line is the change of the loss.
    """
    height = 1.8 + 0.3 * max(len(r.groups) for r in results)
    figure, axes = wrapped_panels(len(results), 5.6, height, names="change")
    within, between = "curvature within the group", "curvature between groups"
    colors = {"gradient": style.SKY, within: style.PINK, between: style.YELLOW}
    for ax, r, name in zip(axes, results, style.names_of(results, ""), strict=True):
        terms = r.gradient, r.within, r.curvature - r.within
        y = np.arange(len(r.groups))
        # Positive terms are stacked to the right of 0, and negative ones to the left.
        bar_ends = np.zeros((2, len(r.groups)))  # row 0: sums of positive terms; row 1: of negative terms
        for (label, color), values in zip(colors.items(), terms, strict=True):
            row = (values < 0).astype(int)
            ax.barh(y, values, left=bar_ends[row, y], color=color, label=label, height=0.7)
            bar_ends[row, y] += values
        ax.axvline(0, color="k", lw=0.8)
        ax.axvline(r.loss_change, color=style.DARK, ls="--", lw=1.3, label="total change of the loss")
        ax.set_yticks(y, r.groups)
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.set(title=name, ylabel="parameters", xlabel=f"part of the change{style.unit(r, 'gradient')}")
    rests = style.joined(with_unit(r, f"{style.power_of_ten(r.rest)} nat") for r in results)
    text = f"Gradient: ⟨g, d⟩, curvature: ½ dᵀHd of a step d, {style.samples_of(results)}; rest: {rests}."
    return finish(figure, title or "What the step did to the loss", text, axes, ncols=2)


@draws(BatchSharpness)
def draw_batch_sharpness(results: Sequence[BatchSharpness], title: str = "") -> Figure:
    """Draw batch sharpness against the batch, one panel for each checkpoint.

    If all results have a learning rate η, curvatures are multiplied by η. Filled points are batch sharpness
    at w_a; open points are the mean over the learners, at their own weights and minibatches. The dashed line
    is λ_max, the solid line the limit of the update rule. Error bars are one standard error.
    """
    groups: dict[str, list[BatchSharpness]] = {r.label: [] for r in results}
    for r in sorted(results, key=lambda r: r.batch):
        groups[r.label].append(r)
    times_lr = all(np.isfinite(r.lr) for r in results)
    figure, axes = wrapped_panels(len(groups), 4.8, 3.4, names="batch_sharpness", sharex=True, sharey=True)
    for ax, (label, group) in zip(axes, groups.items(), strict=True):
        _draw_group(ax, group, times_lr)
        ylabel = "η · curvature" if times_lr else f"curvature{style.unit(results[0], 'curvature')}"
        ax.set(title=style.paper_name(label) or "weights", xlabel="samples in a minibatch", ylabel=ylabel)
    minibatches = style.joined(f"{len(r.curvature):,}" for r in results)
    text = f"Mean of gᵀHg/‖g‖² over {minibatches} minibatches; bars: one standard error; "
    text += f"{style.samples_of(results)}."
    default_title = style.headline(results if len(groups) == 1 else [group[-1] for group in groups.values()])
    return finish(figure, title or default_title, text, axes, ncols=3)


def _draw_group(ax: Axes, group: Sequence[BatchSharpness], times_lr: bool) -> None:
    """Draw points and lines of one checkpoint; curvatures are multiplied by η with ``times_lr``."""
    color, last = style.color_of(group[0].label), group[-1]
    factor = [r.lr if times_lr else 1.0 for r in group]
    mean_rows = [(r.batch, r.value, r.standard_error) for r in group]
    learner_rows = [(r.local_batch, r.learner_value, r.learner_standard_error) for r in group]
    for rows, name, face in (
        (mean_rows, "at w_a", color),
        (learner_rows, "at the learners' weights, mean", "white"),
    ):
        batch, value, error = np.transpose(rows)
        if batch.all():
            points(ax, batch, value * factor, error * factor, color, name, ls="-", ms=6, mfc=face)
    if np.isfinite(last.lambda_max):
        name = "η λ_max at w_a, all samples" if times_lr else "λ_max at w_a, all samples"
        ax.axhline(factor[-1] * last.lambda_max, color=color, ls="--", lw=1.3, label=name)
    if times_lr and np.isfinite(last.limit):
        ax.axhline(last.limit, color=style.DARK, lw=1.3, label="limit of the update rule")
    sizes = sorted({r.batch for r in group} | {r.local_batch for r in group if r.local_batch})
    ax.set(xscale="log", xlim=(sizes[0] / 1.6, sizes[-1] * 1.6), ylim=(min(0.0, ax.get_ylim()[0]), None))
    style.ticks_at(ax.xaxis, sizes, [f"{size:,}" for size in sizes])


@draws(Disagreement)
def draw_disagreement(results: Sequence[Disagreement], title: str = "") -> Figure:
    """Draw how much of spread and gradient lies along eigenvectors, and how much the spread raises the loss.

    The first panel has two shares within the span of the first k eigenvectors, against k: the share of the
    spread and the share of the gradient. The second panel has ½ tr(HC), with C the covariance of the
    learners, and the mean loss of the learners minus the loss of w_a. Error bars are one standard error over
    the learners.
    """
    figure, (shares, costs) = panels(1, 2, 4.6, 3.8, names=["shares", "costs"])
    for r, name, color in style.labeled(results, "result"):
        rank = np.arange(1, len(r.values) + 1)
        spread = 100 * np.cumsum(r.spread_share)
        # spread_error holds the errors of these cumulative sums.
        error = 100 * np.where(np.isfinite(r.spread_error), r.spread_error, 0.0)
        points(shares, rank, spread, error, color, f"spread, {name}", ls="-", ms=4, capsize=2)
        shares.plot(rank, 100 * np.cumsum(r.gradient_share), color=color, ls="--", label=f"gradient, {name}")
        shares.plot(rank, 100 * rank / r.parameters, ":", color=style.OTHER, label="an isotropic spread")
    shares.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    shares.set(ylim=(-2, None), xlabel="number of sharpest eigenvectors", ylabel="share in their span (%)")
    positions = np.arange(len(results))
    half_trace = [r.cost for r in results]  # ½ tr(HC)
    errors = [r.cost_error if np.isfinite(r.cost_error) else 0.0 for r in results]
    colors = style.colors_of([r.label for r in results])
    costs.bar(positions - 0.2, half_trace, yerr=errors, color=colors, width=0.38, capsize=3, ecolor="k")
    extra_loss = [r.learners_loss - r.loss for r in results]
    costs.bar(positions + 0.2, extra_loss, width=0.38, color="w", edgecolor=colors, hatch="//")
    costs.axhline(0, color="k", lw=0.8)
    categories(costs, style.names_of(results, "result"))
    costs.set(xlim=(-0.7, len(results) - 0.3), ylabel=f"rise of the {style.loss_label(results)}")
    text = f"{style.samples_of(results)}; filled: ½ tr(HC), to second order; hatched: the mean loss of the "
    text += f"{results[0].learners} learners minus the loss of w_a; bars: one standard error."
    return finish(figure, title or style.headline(results), text, [shares], ncols=2)


@draws(Sharpness)
def draw_sharpness(results: Sequence[Sharpness], title: str = "") -> Figure:
    """Draw the sharpness of checkpoints: against ρ if results have several values of ρ, else side by side.

    Error bars are one standard error over the draws.
    """
    labels = list(dict.fromkeys(r.label for r in results))
    names = [style.paper_name(label) or f"result {k}" for k, label in enumerate(labels)]
    several_radii = len({r.rho for r in results}) > 1
    line_style = "-" if several_radii else "none"
    figure, (ax,) = panels(1, 1, max(6.4, 1.5 * len(labels)), 3.8, names=["sharpness"])
    for k, (label, name, color) in enumerate(zip(labels, names, style.colors_of(labels), strict=True)):
        group = sorted((r for r in results if r.label == label), key=lambda r: r.rho)
        x = [r.rho for r in group] if several_radii else [k] * len(group)
        values, errors = [r.value for r in group], [r.standard_error for r in group]
        points(ax, x, values, errors if np.any(errors) else None, color, name, capsize=4, ls=line_style)
    lowest = min(r.value for r in results)
    if several_radii:
        style.log_axis(ax.xaxis)
        if lowest > 0:
            style.log_axis(ax.yaxis)
        ax.set_xlabel("ρ (relative to each weight)" if results[0].adaptive else "ρ (distance)")
    else:
        categories(ax, names)
        ax.set_ylim(min(0.0, lowest), None)
        ax.margins(x=0.3)
    ax.set_ylabel(f"rise of the {style.loss_of(results)}{style.unit(results[0], 'values')}")
    # The default title has one number for each checkpoint, its sharpness at the largest ρ.
    largest_rho = max(r.rho for r in results)
    default_title = style.headline([r for r in results if r.rho == largest_rho])
    # Side by side, the names are below the points: a legend is not needed.
    return finish(figure, title or default_title, _caption(results), legend=[ax] * several_radii, ncols=2)


def _caption(results: Sequence[Sharpness]) -> str:
    """Return the caption: how the sharpness was computed, from which samples and how many draws."""
    r = results[0]
    minibatches = f"minibatches of {r.m} from " if r.m else ""
    draws = style.rows_of(results, "draws")  # "" if nothing was drawn
    draws_note = f"; {draws}, bars: one standard error" if draws else ""
    method = "Largest rise found, a lower bound" if r.kind == "worst" else "Mean over pairs ±δ"
    return f"{method}; {minibatches}{style.samples_of(results)}{draws_note}."


# Name, marker and color of three losses: the loss itself, the loss smoothed by the learners' spread, and the
# loss smoothed by an isotropic spread.
_LOOKS = (
    ("loss", "o", "k"), ("smoothed by the spread", "s", style.AMBER), ("smoothed, isotropic", "D", style.SKY),
)  # fmt: skip


@draws(Smoothing)
def draw_smoothing(results: Sequence[Smoothing], title: str = "") -> Figure:
    """Draw learning rates, sharpness λ_max and loss at checkpoints, and directions of the learners' spread.

    The first three panels have a marker for each of three losses: the loss itself, the loss smoothed by the
    learners' spread, and the loss smoothed by an isotropic spread. Error bars are one standard error. The
    first panel has 2/λ_max of each loss, the limit of stable learning rates. Black dashes are the learning
    rate α of the run; black crosses are the effective learning rate α_e. Open markers in the panel of the
    sharpness are the largest quotient ‖change of the gradient‖ / ‖change of w_a‖ in a step, a lower bound of
    λ_max. The fourth panel has the share of the learners' spread along each eigenvector of the Hessian.
    """
    width = max(4.6, 1.3 * len(results))
    figure, axes = panels(2, 2, width, 3.4, names=["rates", "sharpness", "loss", "spread"])
    rates, sharpness, loss, spread = axes
    for k in range(len(_LOOKS)):  # the three losses
        _draw_loss_or_smoothed(rates, sharpness, loss, results, k)
    positions = np.arange(len(results))
    rates.plot(positions, [r.lr for r in results], "k_", ms=26, mew=2, label=r"rate $\alpha$ of the run")
    if np.isfinite([r.alpha_e for r in results]).any():
        rates.plot(positions, [r.alpha_e for r in results], "kx", ms=8, mew=2, label=r"rate $\alpha_e$")
    _draw_spread(spread, results)
    tick_labels = [name.replace(", step", ",\nstep") for name in style.names_of(results, "")]
    for ax, panel_title, label in (
        (rates, "learning rates, and $2/\\lambda_{max}$ of the losses", "rate"),
        (sharpness, "sharpness", f"$\\lambda_{{max}}${style.unit(results[0], 'lambda_max')}"),
        (loss, "loss", style.loss_label(results)),
        (spread, "the spread", "share of the spread"),
    ):
        ax.set(title=panel_title, ylabel=label, yscale="log")
        if ax is not spread:  # its x axis has eigenvectors, not results
            style.decimal_labels(ax.yaxis)
            ax.set_xticks(positions, tick_labels)
            ax.tick_params(axis="x", labelsize=8.5)
            ax.margins(x=0.15)
    text = f"{style.samples_of(results)}; bars: one standard error"
    if any(r.lipschitz.size for r in results):
        text += "; open: the largest ‖change of the gradient‖ / ‖change of w_a‖ in a step, a lower bound of λ"
    return finish(figure, title or "Smoothing by the learners' spread", f"{text}.", [rates], ncols=5)


def _draw_loss_or_smoothed(
    rate_axes: Axes, sharpness: Axes, loss: Axes, results: Sequence[Smoothing], k: int
) -> None:
    """Draw learning rates, sharpness and loss: for k = 0 of the loss itself, for 1, 2 of a smoothed loss."""
    x = np.arange(len(results)) + 0.12 * (k - 1)
    name, marker, color = _LOOKS[k]
    if k == 0:
        rows = [(r.lambda_max, 0.0, r.loss, 0.0) for r in results]
    else:
        fields = ("lambda_smooth", "lambda_smooth_se", "loss_smooth", "loss_smooth_se")
        rows = [tuple(getattr(r, name)[k - 1] for name in fields) for r in results]
    lambda_max, lambda_error, mean_loss, loss_error = np.transpose(rows)
    points(sharpness, x, lambda_max, lambda_error, color, marker=marker, ms=7)
    points(loss, x, mean_loss, loss_error, color, marker=marker, ms=7)
    rates = np.array([r.rates[k] for r in results])
    rates = np.where(np.isfinite(rates), rates, np.nan)
    rate_errors = rates * lambda_error / np.abs(lambda_max)
    points(rate_axes, x, rates, rate_errors, color, name, marker=marker, ms=7)
    constants = [(r.lipschitz, *r.lipschitz_smooth)[k] for r in results]
    largest = [values.max() if values.size else np.nan for values in constants]
    sharpness.plot(x, largest, marker=marker, ls="none", mfc="w", mec=color)


def _draw_spread(ax: Axes, results: Sequence[Smoothing]) -> None:
    """Draw the share of the spread along each eigenvector, against that of an isotropic spread."""
    for r, name, color in style.labeled(results, ""):
        rank, share = np.arange(1, len(r.share) + 1), np.maximum(r.share, 0.1 / r.parameters)
        ax.plot(rank, share, marker="o", ms=4, label=name, color=color)
    ax.axhline(1 / results[0].parameters, color=style.OTHER, lw=0.9, ls=":")
    ax.annotate("isotropic", (1, 1 / results[0].parameters), va="bottom", fontsize=9, color=style.OTHER)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.set_xlabel("eigenvector, the sharpest first")
    if len(results) > 1 or results[0].label:
        ax.legend(fontsize=8.5, loc="lower right", bbox_to_anchor=(1, 0.12))


@draws(LearningCoefficient)
def draw_learning_coefficient(results: Sequence[LearningCoefficient], title: str = "") -> Figure:
    """Draw nβ (L(w) − L(w*)) of the chains against the step, one panel for each result.

    What the step size and the minibatches add ("heating") is subtracted. The line is λ̂ with a band of
    one standard error; the gray part is the burn-in.
    """
    figure, axes = wrapped_panels(len(results), 4.8, 3.4, names="chains", sharey=True)
    for ax, r in zip(axes, results, strict=True):
        chains = r.rise - r.heating  # (chains, draws)
        # Each draw is a mean over ``steps_a_draw`` steps. Its x coordinate is the middle of these steps.
        steps = (np.arange(chains.shape[1]) + 0.5) * r.steps_a_draw
        kept_steps = r.burn_in * r.steps_a_draw, r.steps  # from the end of the burn-in to the last step
        tones = style.shades(style.color_of(r.label), len(chains))
        for chain, color in zip(chains, tones, strict=True):
            ax.plot(steps, chain, color=color, lw=0.7, alpha=0.8, label="chains")
        ax.axvspan(0, kept_steps[0], color=style.OTHER, alpha=0.15, lw=0, label="burn-in")
        low, high = r.value - r.standard_error, r.value + r.standard_error
        ax.fill_between(kept_steps, low, high, color=style.AMBER, lw=0, zorder=3, label="± standard error")
        ax.plot(kept_steps, [r.value] * 2, color="k", lw=0.8, zorder=3, label="estimate")
        # The limits of the y axis disregard the burn-in, whose large values would hide the rest.
        after_burn_in = chains[:, r.burn_in :]
        lowest, highest = float(after_burn_in.min()), float(after_burn_in.max())
        ax.set(ylim=(min(0.0, lowest), 1.15 * highest), xlim=(0, r.steps), xlabel="step of the chain")
        ax.set(title=style.paper_name(r.label) or "weights", ylabel="nβ (L(w) − L(w*))")
    checks = style.three_digits(style.rows_of(results, "chains", "R̂", "effective draws"))
    text = f"Langevin dynamics from w* on {style.samples_of(results)}; {checks}."
    return finish(figure, title or style.headline(results), text, axes, ncols=4)

"""Pictures of spectra, batch sharpness, and the learners' spread in sharp directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.plots.drawing import draws
from landscape.plots.picture import finish, panels, points, wrapped_panels
from landscape.plots.style import (
    between,
    color_of,
    colors_of,
    headline,
    loss_of,
    names_of,
    paper_name,
    rows_of,
    samples_of,
    ticks_at,
)
from landscape.results.curvature import BatchSharpness, Density, Disagreement, Spectrum


@draws(Spectrum)
def draw_spectra(results: Sequence[Spectrum], title: str = "") -> Figure:
    """Spectral densities on a log axis with eigenvalues as ticks below it, one colour for each result.

    The axis ends a factor of 10 below the peak of one eigenvalue out of P. Results that have only traces
    are drawn as traces, with one standard error.

    Raises:
        InputError: no result has eigenvalues, a density or a trace.
    """
    if not any(r.values.size or r.nodes.size for r in results):
        return _draw_traces(results, title)
    figure, (ax,) = panels(1, 1, 6.4, 3.9)
    dense = [r.density for r in results if r.density]
    at, floor = density_scale(dense, 2000)
    names, tones = names_of(results, "spectrum"), colors_of([r.label for r in results])
    for k, (r, label, color) in enumerate(zip(results, names, tones, strict=True)):
        if r.density:
            ax.plot(at, np.maximum(r.density.broadened(at), floor), color=color, label=label)
            label = "_"
        row = 0.05 if dense else 0.9 / len(results)  # one above the other: none hides another
        for value in r.values:
            ax.plot(
                [value, value], [row * k, row * (k + 0.9)], transform=ax.get_xaxis_transform(),
                color=color, lw=1.5, label=label, clip_on=False,
            )  # fmt: skip
            label = "_"
    if dense:
        ax.set(yscale="log", ylim=(floor, None), ylabel="spectral density (log scale)")
    else:
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.margins(x=0.08)
    first = results[0]
    matrix = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix"}.get(first.kind, first.kind)
    ticks = "; ticks: computed eigenvalues" if any(r.values.size for r in results) else ""
    ax.set_xlabel(f"eigenvalue λ of the {loss_of(results)}'s {matrix}{ticks}")
    part = f", parameters {first.part}" if first.part else ""
    usual = f"Spectrum, {samples_of(results)}{part}{_preconditioned(results)}"
    figure.legend(loc="outside lower center", ncols=3)
    return finish(figure, title or usual)


def density_scale(dense: Sequence[Density], count: int) -> tuple[Array, float]:
    """``count`` eigenvalues at which densities are drawn, and the density at which their axis begins.

    Below a tenth of the peak of one eigenvalue out of P there is nothing to see.
    """
    if not dense:
        return np.zeros(0), 0.0
    low = min(float(d.nodes.min()) - 5 * d.width() for d in dense)
    high = max(float(d.nodes.max()) + 5 * d.width() for d in dense)
    floor = min(0.1 / (d.size * d.width() * np.sqrt(2 * np.pi)) for d in dense)
    return np.linspace(low, high, count), floor


def _preconditioned(results: Sequence[Spectrum]) -> str:
    """Whose preconditioners the results have, and lr · λ_max with its limit where that is known."""
    names = dict.fromkeys(r.precondition for r in results if r.precondition)
    if not names:
        return ""
    edges = [
        f"lr·λ_max {r.lr * r.values[0]:.3g} (limit {r.limit:.3g})"
        for r in results
        if np.isfinite(r.lr + r.limit) and len(r.values) > r.lowest
    ]
    return "; ".join([f", preconditioned by {', '.join(names)}", *edges])


def _draw_traces(results: Sequence[Spectrum], title: str) -> Figure:
    """Traces with their 95% intervals (of older files one standard error), one below the other."""
    if not any(np.isfinite(r.trace) for r in results):
        raise InputError("spectrum: no eigenvalue, no density and no trace, there is nothing to draw")
    figure, (ax,) = panels(1, 1, 6.4, 1.5 + 0.4 * len(results))
    for k, (r, color) in enumerate(zip(results, colors_of([r.label for r in results]), strict=True)):
        half = r.trace_interval()[1] - r.trace
        error = next((e for e in (half, r.trace_error) if np.isfinite(e)), 0.0)
        points(ax, r.trace, k, None, color, xerr=error, capsize=4)
        text = f"{r.trace:.4g} ± {error:.2g}"
        ax.annotate(text, (r.trace, k), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
    ax.set_yticks(range(len(results)), names_of(results, "spectrum"))
    ax.margins(x=0.25)
    label = f"trace of the {loss_of(results)}'s Hessian (nat), 95% interval"
    ax.set(ylim=(len(results) - 0.4, -0.8), xlabel=label)
    return finish(figure, title or f"Trace, {samples_of(results)}")


@draws(BatchSharpness)
def draw_batch_sharpness(results: Sequence[BatchSharpness], title: str = "") -> Figure:
    """Batch sharpness against the batch, one panel for each checkpoint, times η where that is known.

    Filled points are w_a, open ones the mean over the learners at their own weights and minibatches; the
    dashed line is λ_max, the solid one the limit of the update rule. Error bars are one standard error.
    """
    groups: dict[str, list[BatchSharpness]] = {r.label: [] for r in results}
    for r in sorted(results, key=lambda r: r.batch):
        groups[r.label].append(r)
    scaled = all(np.isfinite(r.lr) for r in results)
    figure, axes = wrapped_panels(len(groups), 4.8, 3.4, sharex=True, sharey=True)
    for ax, (label, group) in zip(axes, groups.items(), strict=True):
        _draw_group(ax, group, scaled)
        ylabel = "η · curvature" if scaled else "curvature (nat)"
        ax.set(title=paper_name(label) or "weights", xlabel="samples in a minibatch", ylabel=ylabel)
    text = (
        "Batch sharpness is the mean of gᵀHg/‖g‖² over minibatches, g and H gradient and Hessian of the "
        f"minibatch's loss; {between([len(r.curvature) for r in results])} draws at w_a, error bars one "
        f"standard error; {samples_of(results)}."
    )
    usual = headline([group[-1] for group in groups.values()])
    return finish(figure, title or usual, text, axes, ncols=min(2, len(axes)))


def _draw_group(ax: Axes, group: Sequence[BatchSharpness], scaled: bool) -> None:
    """Points and lines of one checkpoint."""
    color, last = color_of(group[0].label), group[-1]
    factor = [r.lr if scaled else 1.0 for r in group]
    own = [(r.batch, r.value, r.standard_error) for r in group]
    local = [(r.local_batch, r.learner_value, r.learner_standard_error) for r in group]
    for rows, name, face in ((own, "at w_a", color), (local, "at the learners' weights, mean", "white")):
        x, y, bars = np.transpose(rows)
        if x.all():
            points(ax, x, y * factor, bars * factor, color, name, ls="-", ms=6, mfc=face)
    if np.isfinite(last.lambda_max):
        name = "η λ_max at w_a, all samples" if scaled else "λ_max at w_a, all samples"
        ax.axhline(factor[-1] * last.lambda_max, color=color, ls="--", lw=1.3, label=name)
    if scaled and np.isfinite(last.limit):
        ax.axhline(last.limit, color="#444444", lw=1.3, label="limit of the update rule")
    sizes = sorted({r.batch for r in group} | {r.local_batch for r in group if r.local_batch})
    ax.set(xscale="log", xlim=(sizes[0] / 1.6, sizes[-1] * 1.6), ylim=(min(0.0, ax.get_ylim()[0]), None))
    ticks_at(ax.xaxis, sizes, [f"{size:,}" for size in sizes])


@draws(Disagreement)
def draw_disagreement(results: Sequence[Disagreement], title: str = "") -> Figure:
    """Cumulative shares over the eigenvectors; beside them ½ tr(HC) against the loss that the spread costs.

    Error bars are one standard error over the learners.
    """
    figure, (shares, costs) = panels(1, 2, 4.6, 3.8)
    names, tones = names_of(results, "result"), colors_of([r.label for r in results])
    for r, color, name in zip(results, tones, names, strict=True):
        rank = np.arange(1, len(r.values) + 1)
        error = 100 * np.where(np.isfinite(r.spread_error), r.spread_error, 0.0)
        spread = 100 * np.cumsum(r.spread_share)
        points(shares, rank, spread, error, color, f"spread, {name}", ls="-", ms=4, capsize=2)
        shares.plot(rank, 100 * np.cumsum(r.gradient_share), color=color, ls="--", label=f"gradient, {name}")
        shares.plot(rank, 100 * rank / r.parameters, color="#777777", lw=0.9, ls=":")
    shares.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    shares.set(ylim=(0, None), xlabel="eigenvectors of the Hessian, the sharpest first")
    shares.set_ylabel("share in their space (%)")
    place = np.arange(len(results))
    errors = [r.cost_error if np.isfinite(r.cost_error) else 0.0 for r in results]
    bars = {"width": 0.38, "capsize": 3, "ecolor": "k"}
    costs.bar(place - 0.2, [r.cost for r in results], yerr=errors, color=tones, **bars)
    extra = [r.learners_loss - r.loss for r in results]
    costs.bar(place + 0.2, extra, width=0.38, color="w", edgecolor=tones, hatch="//")
    costs.axhline(0, color="k", lw=0.8)
    costs.set_xticks(place, [name.replace(", ", ",\n") for name in names])
    costs.grid(False, axis="x")
    costs.set_ylabel(f"{loss_of(results)} (nat)")
    costs.set_title("filled: ½ tr(HC); hatched: the learners'\nmean loss above that of $w_a$")
    shared = rows_of(results, "of the gradient in the spread", "of its sharp part in the spread")
    text = (
        f"{samples_of(results)}, Hessian and gradient at w_a, {results[0].learners} learners; error bars: "
        f"one standard error over the learners, by the jackknife; dotted: an isotropic spread; {shared}."
    )
    figure.legend(loc="outside lower center", ncols=2)
    return finish(figure, title or headline(results), text)

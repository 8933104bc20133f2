"""Pictures of spectra, batch sharpness, and the learners' spread in sharp directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.drawing import draws
from landscape.plots.picture import caption, panels, shared_legend, wrapped_panels
from landscape.plots.style import between, color_of, colors_of, headline, loss_of, paper_name, samples_of
from landscape.results.curvature import BatchSharpness, Disagreement, Spectrum


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
    dense = [(r, r.density) for r in results if r.density]
    floor = 0.0
    if dense:
        low = min(float(d.nodes.min()) - 5 * d.width() for _, d in dense)
        high = max(float(d.nodes.max()) + 5 * d.width() for _, d in dense)
        floor = min(0.1 / (d.size * d.width() * np.sqrt(2 * np.pi)) for _, d in dense)
        at = np.linspace(low, high, 2000)
    colors = colors_of([r.label for r in results])
    for k, r in enumerate(results):
        color, label = colors[k], paper_name(r.label) or f"spectrum {k}"
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
        ax.set_yscale("log")
        ax.set_ylim(floor, None)
        ax.set_ylabel("spectral density (log scale)")
    else:
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.margins(x=0.08)
    named = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix"}
    first = results[0]
    matrix = named.get(first.kind, first.kind)
    ticks = "; ticks: computed eigenvalues" if any(r.values.size for r in results) else ""
    ax.set_xlabel(f"eigenvalue λ of the {loss_of(results)}'s {matrix}{ticks}")
    figure.legend(loc="outside lower center", ncols=min(3, len(results)))
    part = f", parameters {first.part}" if first.part else ""
    part += _preconditioned(results)
    usual = f"Spectrum, {samples_of(results)}{part}"
    figure.suptitle(title or usual)
    return figure


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
    colors = colors_of([r.label for r in results])
    for k, (r, color) in enumerate(zip(results, colors, strict=True)):
        half = r.trace_interval()[1] - r.trace
        error = next((e for e in (half, r.trace_error) if np.isfinite(e)), 0.0)
        ax.errorbar(r.trace, k, xerr=error, color=color, marker="o", capsize=4, ls="none")
        text = f"{r.trace:.4g} ± {error:.2g}"
        ax.annotate(text, (r.trace, k), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
    names = [paper_name(r.label) or f"spectrum {k}" for k, r in enumerate(results)]
    ax.set_yticks(range(len(results)), names)
    ax.set_ylim(len(results) - 0.4, -0.8)
    ax.margins(x=0.25)
    ax.set_xlabel(f"trace of the {loss_of(results)}'s Hessian (nat), 95% interval")
    figure.suptitle(title or f"Trace, {samples_of(results)}")
    return figure


@draws(BatchSharpness)
def draw_batch_sharpness(results: Sequence[BatchSharpness], title: str = "") -> Figure:
    """Batch sharpness against the batch, one panel for each checkpoint, times η where that is known.

    Filled points are w_a, open ones the mean over the learners at their own weights and minibatches; the
    dashed line is λ_max, the solid one the limit of the update rule. Error bars are one standard error.
    """
    groups: dict[str, list[BatchSharpness]] = {}
    for r in sorted(results, key=lambda r: r.batch):
        groups.setdefault(r.label, []).append(r)
    groups = {r.label: groups[r.label] for r in results}  # in the order given
    scaled = all(np.isfinite(r.lr) for r in results)
    figure, axes = wrapped_panels(len(groups), 4.8, 3.4, sharex=True, sharey=True)
    for ax, (label, group) in zip(axes, groups.items(), strict=True):
        _draw_group(ax, group, scaled)
        ax.set_title(paper_name(label) or "weights")
        ax.set_xlabel("samples in a minibatch")
        ax.set_ylabel("η · curvature" if scaled else "curvature (nat)")
    shared_legend(figure, axes, ncols=min(2, len(axes)))
    figure.suptitle(title or headline([group[-1] for group in groups.values()]))
    counts = [len(r.curvature) for r in results]
    caption(
        figure,
        "Batch sharpness is the mean of gᵀHg/‖g‖² over minibatches, g and H gradient and Hessian of the "
        f"minibatch's loss; {between(counts)} draws at w_a, error bars one standard error; "
        f"{samples_of(results)}.",
    )
    return figure


def _draw_group(ax: Axes, group: Sequence[BatchSharpness], scaled: bool) -> None:
    """Points and lines of one checkpoint."""
    color = color_of(group[0].label)
    factor = [r.lr if scaled else 1.0 for r in group]

    def points(x: list[int], values: list[float], errors: list[float], name: str, face: str) -> None:
        y, bars = np.multiply(values, factor), np.multiply(errors, factor)
        ax.errorbar(x, y, yerr=bars, marker="o", ms=6, mfc=face, color=color, capsize=3, label=name)

    points(
        [r.batch for r in group], [r.value for r in group], [r.standard_error for r in group],
        "at w_a", color,
    )  # fmt: skip
    if all(r.local_batch for r in group):
        points(
            [r.local_batch for r in group], [r.learner_value for r in group],
            [r.learner_standard_error for r in group], "at the learners' weights, mean", "white",
        )  # fmt: skip
    last = group[-1]
    if np.isfinite(last.lambda_max):
        name = "η λ_max at w_a, all samples" if scaled else "λ_max at w_a, all samples"
        ax.axhline(factor[-1] * last.lambda_max, color=color, ls="--", lw=1.3, label=name)
    if scaled and np.isfinite(last.limit):
        ax.axhline(last.limit, color="#444444", lw=1.3, label="limit of the update rule")
    ax.set_xscale("log")
    sizes = sorted({r.batch for r in group} | {r.local_batch for r in group if r.local_batch})
    ax.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_ylim(min(0.0, ax.get_ylim()[0]), None)


@draws(Disagreement)
def draw_disagreement(results: Sequence[Disagreement], title: str = "") -> Figure:
    """Cumulative shares over the eigenvectors; beside them ½ tr(HC) against the loss that the spread costs.

    Error bars are one standard error over the learners.
    """
    figure, (shares, costs) = panels(1, 2, 4.6, 3.8)
    names = [paper_name(r.label) or f"result {k}" for k, r in enumerate(results)]
    colors = colors_of([r.label for r in results])
    for r, color, name in zip(results, colors, names, strict=True):
        rank = np.arange(1, len(r.values) + 1)
        spread = 100 * np.cumsum(r.spread_share)
        error = 100 * np.where(np.isfinite(r.spread_error), r.spread_error, 0.0)
        shares.errorbar(
            rank, spread, error, color=color, marker="o", ms=4, capsize=2, label=f"spread, {name}"
        )
        shares.plot(rank, 100 * np.cumsum(r.gradient_share), color=color, ls="--", label=f"gradient, {name}")
        shares.plot(rank, 100 * rank / r.parameters, color="#777777", lw=0.9, ls=":")
    shares.set_ylim(0, None)
    shares.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    shares.set_xlabel("eigenvectors of the Hessian, the sharpest first")
    shares.set_ylabel("share in their space (%)")
    place = np.arange(len(results))
    cost_errors = [r.cost_error if np.isfinite(r.cost_error) else 0.0 for r in results]
    bars = {"width": 0.38, "capsize": 3, "ecolor": "k"}
    extra = [r.learners_loss - r.loss for r in results]
    costs.bar(place - 0.2, [r.cost for r in results], yerr=cost_errors, color=colors, **bars)
    costs.bar(place + 0.2, extra, width=0.38, color="w", edgecolor=colors, hatch="//")
    costs.axhline(0, color="k", lw=0.8)
    costs.set_xticks(place, [name.replace(", ", ",\n") for name in names])
    costs.grid(False, axis="x")
    costs.set_ylabel(f"{loss_of(results)} (nat)")
    costs.set_title("filled: ½ tr(HC); hatched: the learners'\nmean loss above that of $w_a$")
    figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(title or headline(results))
    caption(figure, _caption(results))
    return figure


def _caption(results: Sequence[Disagreement]) -> str:
    r = results[0]
    in_span = ", ".join(f"{100 * each.gradient_in_span:.2g}%" for each in results)
    dominant = ", ".join(f"{100 * each.dominant_in_span:.2g}%" for each in results)
    return (
        f"{samples_of(results)}, Hessian and gradient at w_a, {r.learners} learners; "
        "error bars: one standard error over the learners, by the jackknife; dotted: an isotropic spread. In "
        f"the span of the spread: {in_span} of the gradient, {dominant} of its part in the sharp space."
    )

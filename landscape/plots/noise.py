"""Pictures of the noise of gradients: Δ(2), noise scales, alignment, critical batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.picture import caption, panels, shared_legend, wrapped_panels
from landscape.plots.style import (
    between,
    color_of,
    colors_of,
    decimal_labels,
    headline,
    paper_name,
    samples_of,
)
from landscape.results.noise import CriticalBatch, NoiseAlignment, NoiseEstimate, NoiseScale


@draws(NoiseEstimate)
def draw_noise(results: Sequence[NoiseEstimate], title: str = "") -> Figure:
    """The four estimates of Δ(2) as bars on a log scale, one panel for each checkpoint.

    Error bars are one standard error.
    """
    names = {
        "direct": "direct\n(definition)",
        "full_batch": "full-batch",
        "eq4": "Eq. 4\nα² tr(HCH)",
        "first_order": "first-order",
    }
    figure, axes = wrapped_panels(len(results), 3.9, 3.1)
    smallest = min(
        (v for r in results for k, (v, _) in r.summary().items() if k in names and v > 0), default=1.0
    )
    largest = max((v for r in results for k, (v, _) in r.summary().items() if k in names), default=1.0)
    for ax, r in zip(axes, results, strict=True):
        summary = r.summary()
        values, errors = zip(*(summary[name] for name in names), strict=True)
        place = np.arange(len(names))
        ax.bar(place, values, yerr=errors, color="#56B4E9", ecolor="k", capsize=3, width=0.65)
        ax.set_yscale("log")
        ax.set_ylim(smallest / 5, max(largest, smallest) * 6)
        for i, value in enumerate(values):
            ax.annotate(
                f"{value:.2g}",
                (i, max(value, smallest / 4)),
                ha="center",
                va="bottom",
                xytext=(0, 6),
                textcoords="offset points",
                fontsize=8.5,
            )
        ax.set_xticks(place, list(names.values()))
        drawn = f"{len(r.direct)} draws of {r.learners} × {r.local_batch}"
        ax.set_title(f"{paper_name(r.label)}\nα = {r.lr:g}, {drawn}")
        ax.set_ylabel(f"Δ(2), {r.split or 'data'} (squared weights)")
        ax.grid(False, axis="x")
    figure.suptitle(title or headline(results))
    caption(
        figure,
        "Δ(2) is what the learners' spread adds to the noise of a step. Direct: its definition, with "
        "minibatches; full-batch: with the whole training set; Eq. 4: the Hessian form of DPSGD-2020; "
        "first-order: with the Hessians of minibatches. Error bars: one standard error over draws.",
    )
    return figure


@draws(NoiseScale)
def draw_noise_scale(results: Sequence[NoiseScale], title: str = "") -> Figure:
    """The noise scale of each checkpoint on a log axis, a row each, with one standard error.

    Filled points are w_a, open ones are the learners' mean gradient; the bar is the batch.
    """
    figure, (ax,) = panels(1, 1, 6.4, 1.6 + 0.5 * len(results))
    for k, r in enumerate(results):
        color = color_of(r.label)
        points = [
            (r.value, r.standard_error, color, "at w_a", k - 0.12),
            (
                r.learner_value,
                r.learner_standard_error,
                "white",
                "mean gradient of the learners",
                k + 0.12,
            ),
        ]
        for value, error, face, name, place in points:
            if np.isfinite(value) and value > 0:
                bar = error if np.isfinite(error) else 0.0
                low = min(bar, 0.9 * value)  # a logarithmic axis has no room below 0
                ax.errorbar(
                    value, place, xerr=[[low], [bar]], marker="o", ms=6, mfc=face, color=color, capsize=3,
                    ls="none", label=name,
                )  # fmt: skip
        ax.plot(r.batch, k, marker="|", ms=18, mew=2, color="k", ls="none", label="batch")
    ax.set_xscale("log")
    decimal_labels(ax.xaxis)
    ax.margins(x=0.15)
    ax.set_yticks(range(len(results)), [paper_name(r.label) or f"weights {k}" for k, r in enumerate(results)])
    ax.set_ylim(len(results) - 0.4, -0.6)
    ax.set_xlabel("samples")
    shared_legend(figure, [ax], ncols=3)
    figure.suptitle(title or headline(results))
    counts = [r.draws for r in results]
    how = {"whole": "‖g‖² exact", "draws": "‖g‖² from pairs of minibatches"}
    exact = " / ".join(dict.fromkeys(how.get(r.gradient, r.gradient) for r in results))
    caption(
        figure,
        "The noise scale tr Σ/‖g‖² is the batch at which noise and gradient are equal in size; "
        f"{between(counts)} draws, {exact}; error bars: one standard error; "
        f"{samples_of(results)}.",
    )
    return figure


@draws(NoiseAlignment)
def draw_noise_alignment(results: Sequence[NoiseAlignment], title: str = "") -> Figure:
    """C_ii against λ_i on logarithmic axes with its power law; beside it tr(HS)/tr S next to λ_max.

    Error bars are one standard error over the draws.
    """
    figure, (power, curvature) = panels(1, 2, 4.6, 3.8)
    colors = colors_of([r.label for r in results])
    names = [paper_name(r.label) or f"result {k}" for k, r in enumerate(results)]
    for r, color, name in zip(results, colors, names, strict=True):
        _draw_power(power, r, color, name)
    power.set_xscale("log")
    power.set_yscale("log")
    decimal_labels(power.xaxis)
    power.set_xlabel("eigenvalue $\\lambda_i$ of the Hessian (nat)")
    power.set_ylabel("variance of the gradient along $v_i$")
    place = np.arange(len(results))
    for shift, head, value, error in (
        (-0.25, "tr(HS)/tr S", "ias", "ias_error"),
        (0.0, "tr(HC)/tr C", "noise_curvature", "noise_curvature_error"),
    ):
        curvature.errorbar(
            place + shift,
            [getattr(r, value) for r in results],
            [getattr(r, error) for r in results],
            marker="o" if shift else "s",
            color="k" if shift else "#56B4E9",
            capsize=3,
            ls="none",
            label=head,
        )
    top = [r.values[0] for r in results]
    curvature.plot(place + 0.25, top, "_", color="#D55E00", ms=18, mew=2.5, label="$\\lambda_{max}$")
    curvature.set_xticks(place, [name.replace(", ", ",\n") for name in names])
    curvature.set_ylim(min(0.0, *(r.ias for r in results), 0.0), None)
    curvature.margins(x=0.3)
    curvature.grid(False, axis="x")
    curvature.set_ylabel("curvature (nat)")
    curvature.legend(fontsize=8)
    figure.legend(*power.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(title or headline(results))
    caption(figure, _caption(results))
    return figure


def _draw_power(ax: Axes, r: NoiseAlignment, color: str, name: str) -> None:
    """The points of one result, and the line through them."""
    used = (r.values > 0) & (r.covariance > 0)
    x, y = r.values[used], r.covariance[used]
    below = np.minimum(r.covariance_error[used], 0.9 * y)  # the bar of a logarithm must not reach 0
    ax.errorbar(
        x, y, [below, r.covariance_error[used]], color=color, marker="o", ls="none", capsize=2, label=name
    )
    if np.isfinite(r.gamma):
        line = np.exp(np.log(y).mean() + r.gamma * (np.log(x) - np.log(x).mean()))
        ax.plot(x, line, color=color, lw=1.2, label=f"γ = {r.gamma:.2f} ± {r.gamma_error:.2g}")


def _caption(results: Sequence[NoiseAlignment]) -> str:
    drawn = " / ".join(dict.fromkeys(f"{each.draws} minibatches of {each.batch}" for each in results))
    scatter = ", ".join(f"{each.gamma_scatter:.2g}" for each in results)
    return (
        f"{drawn}, drawn with replacement from {samples_of(results)}; H over all of "
        "them; error bars: one standard error over the draws. S: second moment, C: covariance of the "
        f"gradients. The scatter of the points around the line leaves an error of {scatter} in γ."
    )


@draws(CriticalBatch)
def draw_critical_batch(results: Sequence[CriticalBatch], title: str = "") -> Figure:
    """The rise of the loss against the batch, a line for each checkpoint; bars: one standard error.

    Branches that diverged are not drawn.
    """
    figure, (ax,) = panels(1, 1, 6.4, 4.0)
    for r, color in zip(results, colors_of([r.label for r in results]), strict=True):
        seen = np.isfinite(r.rise)
        ax.errorbar(
            r.batch[seen], 100 * r.rise[seen], yerr=100 * np.nan_to_num(r.rise_error[seen]), marker="o",
            ms=5, capsize=3, color=color, label=_name(r),
        )  # fmt: skip
        if np.isfinite(r.value):
            ax.axvline(r.value, color=color, ls="--", lw=1.2)
    ax.axhline(100 * results[0].tol, color="#444444", lw=1.0, ls=":", label="allowed")
    ax.set_xscale("log")
    # Linear up to what is allowed: far above the critical batch the loss is many times as large.
    ax.set_yscale("symlog", linthresh=100 * results[0].tol)
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    sizes = sorted({int(batch) for r in results for batch in r.batch})
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_xlabel("batch (samples)")
    ax.set_ylabel("rise of the training loss (%)")
    shared_legend(figure, [ax], ncols=2)
    figure.suptitle(title or headline(results))
    first = results[0]
    caption(
        figure,
        f"Branches train on {first.trained_samples:,} samples each, {first.loss.shape[1]} seeds, rate "
        f"{first.scaling} in the batch; loss at w_a over {first.samples:,} training samples, mean "
        "over the last quarter of a branch; dashed: the critical batch.",
    )
    return figure


def _name(r: CriticalBatch) -> str:
    """The label, which names the step unless the run ended there."""
    return paper_name(r.label) if "step" in r.label else f"{paper_name(r.label)}, step {r.step:,}"

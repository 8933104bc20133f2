"""Batch sharpness over batch sizes, next to λ_max and the limit of stability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, between, plus_minus, splits
from landscape.plots.picture import caption, shared_legend, wrapped_panels
from landscape.plots.style import color_of, paper_name, style
from landscape.results.batch_sharpness import BatchSharpness


@draws(BatchSharpness)
def draw_batch_sharpness(results: Sequence[BatchSharpness], title: str = "") -> Figure:
    """Batch sharpness against the batch, one panel for each checkpoint, times η where that is known.

    Filled points are w_a, open ones the mean over the learners at their own weights and minibatches; the
    dashed line is λ_max, the solid one the limit of the update rule. Error bars are one standard error.

    Example:
        >>> result = BatchSharpness(
        ...     curvature=np.array([3.0, 5.0]), norm2=np.array([1.0, 3.0]), batch=8, lambda_max=6.0,
        ...     residual=0.0, lr=0.5, limit=2.0, tol=0.05, converged=False, samples=100, seed=0,
        ...     dtype="float64", label="ssgd, seed 0")
        >>> draw_batch_sharpness([result]).get_suptitle()
        'Batch sharpness times η: 2.0 ± 0.5 SSGD\\n(limit 2)'
    """
    groups: dict[str, list[BatchSharpness]] = {}
    for r in sorted(results, key=lambda r: r.batch):
        groups.setdefault(r.label, []).append(r)
    groups = {r.label: groups[r.label] for r in results}  # in the order given
    scaled = all(np.isfinite(r.lr) for r in results)
    with style():
        figure, axes = wrapped_panels(len(groups), 4.8, 3.4, sharex=True, sharey=True)
        for ax, (label, group) in zip(axes, groups.items(), strict=True):
            _draw_group(ax, group, scaled)
            ax.set_title(paper_name(label) or "weights")
            ax.set_xlabel("samples in a minibatch")
            ax.set_ylabel("η · curvature" if scaled else "curvature (nat)")
        shared_legend(figure, axes, ncols=min(2, len(axes)))
        figure.suptitle(title or _finding([group[-1] for group in groups.values()], scaled))
        first = results[0]
        counts = [len(r.curvature) for r in results]
        caption(
            figure,
            "Batch sharpness is the mean of gᵀHg/‖g‖² over minibatches, g and H gradient and Hessian of the "
            f"minibatch's loss; {between(counts)} draws at w_a, error bars one standard error; "
            f"{first.samples:,} samples ({splits(results)}){batchnorm_note(first).replace(chr(10), '; ')}.",
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


def _finding(results: Sequence[BatchSharpness], scaled: bool) -> str:
    """Batch sharpness of each checkpoint at its largest batch, with the limit."""
    words = []
    for r in results[:6]:
        factor = r.lr if scaled else 1.0
        limit = f" (limit {r.limit:.3g})" if scaled and np.isfinite(r.limit) else ""
        name = paper_name(r.label).split(",")[0]
        words.append(f"{plus_minus(factor * r.value, factor * r.standard_error)} {name}".rstrip() + limit)
    more = f", … ({len(results)} in all)" if len(results) > 6 else ""
    return f"Batch sharpness{' times η' if scaled else ''}: {', '.join(words)}{more}"

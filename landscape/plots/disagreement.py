"""Shares of the spread and the gradient in the sharpest directions, and what the spread costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, loss_of, splits
from landscape.plots.picture import caption, panels
from landscape.plots.style import colors_of, paper_name, short_names, style
from landscape.results.disagreement import Disagreement


@draws(Disagreement)
def draw_disagreement(results: Sequence[Disagreement], title: str = "") -> Figure:
    """Cumulative shares over the eigenvectors; beside them ½ tr(HC) against the loss that the spread costs.

    Error bars are one standard error over the learners.

    Example:
        >>> half = np.array([0.5, 0.25])
        >>> result = Disagreement(
        ...     values=np.array([4.0, 1.0]), residuals=half, spread_share=half, spread_error=half / 10,
        ...     gradient_share=half, consensus=0.1, cost=0.15, cost_error=0.01, cost_top=0.1, loss=0.5,
        ...     learners_loss=0.64, gradient_in_span=0.2, dominant_in_span=0.3, rank=3, grad_norm2=0.01,
        ...     parameters=100, learners=4, hvps=20, converged=True, tol=0.01, seed=0, samples=9,
        ...     dtype="float64")
        >>> print(draw_disagreement([result]).get_suptitle())
        75 ± 2.5% of the learners' spread is in the 2 sharpest directions of 100
    """
    with style():
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
            shares.plot(
                rank, 100 * np.cumsum(r.gradient_share), color=color, ls="--", label=f"gradient, {name}"
            )
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
        figure.suptitle(title or _finding(results))
        caption(figure, _caption(results))
    return figure


def _share(r: Disagreement) -> str:
    error = f" ± {100 * r.standard_error:.2g}" if np.isfinite(r.standard_error) else ""
    return f"{100 * r.value:.3g}{error}%"


def _finding(results: Sequence[Disagreement]) -> str:
    if len(results) == 1:
        r = results[0]
        count = f"{len(r.values)} sharpest directions" if len(r.values) > 1 else "sharpest direction"
        return f"{_share(r)} of the learners' spread is in the {count} of {r.parameters:,}"
    names = short_names([r.label for r in results])
    named = [f"{name} {_share(r)}" for name, r in zip(names, results, strict=True)]
    return f"Of the learners' spread in the sharpest directions: {', '.join(named)}"


def _caption(results: Sequence[Disagreement]) -> str:
    r = results[0]
    in_span = ", ".join(f"{100 * each.gradient_in_span:.2g}%" for each in results)
    dominant = ", ".join(f"{100 * each.dominant_in_span:.2g}%" for each in results)
    note = batchnorm_note(r).strip()
    return (
        f"{r.samples:,} samples of {splits(results)}, Hessian and gradient at w_a, {r.learners} learners; "
        "error bars: one standard error over the learners, by the jackknife; dotted: an isotropic spread. In "
        f"the span of the spread: {in_span} of the gradient, {dominant} of its part in the sharp space."
        f"{f' {note}.' if note else ''}"
    )

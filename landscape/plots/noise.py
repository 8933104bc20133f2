"""The four estimates of Δ(2), with their standard errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.picture import caption, wrapped_panels
from landscape.plots.style import paper_name, style
from landscape.results.noise import NoiseEstimate


@draws(NoiseEstimate)
def draw_noise(results: Sequence[NoiseEstimate], title: str = "") -> Figure:
    """The four estimates of Δ(2) as bars on a log scale, one panel for each checkpoint.

    Error bars are one standard error.

    Example:
        >>> draws_of = np.array([1.0, 2.0])
        >>> result = NoiseEstimate(direct=draws_of, first_order=draws_of, delta_s=draws_of, delta_2=draws_of,
        ...                        delta_cross=draws_of, full_batch=1.5, eq4=1.0, consensus=0.1, lr=0.1,
        ...                        learners=2, local_batch=4, samples=10, seed=0)
        >>> [text.get_text() for text in draw_noise([result]).axes[0].texts]
        ['1.5', '1.5', '1', '1.5']
    """
    names = {
        "direct": "direct\n(definition)",
        "full_batch": "full-batch",
        "eq4": "Eq. 4\nα² tr(HCH)",
        "first_order": "first-order",
    }
    with style():
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
        figure.suptitle(title or _finding(results))
        caption(
            figure,
            "Δ(2) is what the learners' spread adds to the noise of a step. Direct: its definition, with "
            "minibatches; full-batch: with the whole training set; Eq. 4: the Hessian form of DPSGD-2020; "
            "first-order: with the Hessians of minibatches. Error bars: one standard error over draws.",
        )
    return figure


def _finding(results: Sequence[NoiseEstimate]) -> str:
    """Δ(2) by its definition, and what Eq. 4 makes of it."""
    summaries = [r.summary() for r in results]
    direct = [s["direct"][0] for s in summaries]
    shares = ", ".join(f"{s['eq4'][0] / v:.2g}" for s, v in zip(summaries, direct, strict=True) if v > 0)
    times = f"; Eq. 4 gives {shares} times it" if shares else ""
    return f"Noise of the spread, Δ(2): {', '.join(f'{v:.2g}' for v in direct)}{times}"

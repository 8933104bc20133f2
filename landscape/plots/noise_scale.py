"""The gradient noise scale of several checkpoints, next to their batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, between, plus_minus, splits
from landscape.plots.picture import caption, panels, shared_legend
from landscape.plots.style import color_of, decimal_labels, paper_name, style
from landscape.results.noise_scale import NoiseScale


@draws(NoiseScale)
def draw_noise_scale(results: Sequence[NoiseScale], title: str = "") -> Figure:
    """The noise scale of each checkpoint on a log axis, a row each, with one standard error.

    Filled points are w_a, open ones are the learners' mean gradient; the bar is the batch.

    Example:
        >>> result = NoiseScale(
        ...     estimates=np.array([90.0, 110.0]), trace=200.0, trace_error=20.0, norm2=2.0, norm2_error=0.0,
        ...     batch=8, draws=2, gradient="whole", tol=0.05, converged=False, samples=100, seed=0,
        ...     dtype="float64", label="ssgd, seed 0")
        >>> draw_noise_scale([result]).get_suptitle()
        'Noise scale: 100 ± 10 samples'
    """
    with style():
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
        ax.set_yticks(
            range(len(results)), [paper_name(r.label) or f"weights {k}" for k, r in enumerate(results)]
        )
        ax.set_ylim(len(results) - 0.4, -0.6)
        ax.set_xlabel("samples")
        shared_legend(figure, [ax], ncols=3)
        figure.suptitle(title or _finding(results))
        first = results[0]
        counts = [r.draws for r in results]
        how = {"whole": "‖g‖² exact", "draws": "‖g‖² from pairs of minibatches"}
        exact = " / ".join(dict.fromkeys(how.get(r.gradient, r.gradient) for r in results))
        caption(
            figure,
            "The noise scale tr Σ/‖g‖² is the batch at which noise and gradient are equal in size; "
            f"{between(counts)} draws, {exact}; error bars: one standard error; {first.samples:,} samples "
            f"({splits(results)}){batchnorm_note(first).replace(chr(10), '; ')}.",
        )
    return figure


def _finding(results: Sequence[NoiseScale]) -> str:
    """The noise scales at w_a, with their errors."""
    words = ", ".join(plus_minus(r.value, r.standard_error) for r in results[:6])
    more = f", … ({len(results)} in all)" if len(results) > 6 else ""
    return f"Noise scale: {words}{more} samples"

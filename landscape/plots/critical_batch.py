"""The loss after branches with other batches, and the critical batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import plus_minus
from landscape.plots.picture import caption, panels, shared_legend
from landscape.plots.style import colors_of, paper_name, style
from landscape.results.critical_batch import CriticalBatch


@draws(CriticalBatch)
def draw_critical_batch(results: Sequence[CriticalBatch], title: str = "") -> Figure:
    """The rise of the loss against the batch, a line for each checkpoint; bars: one standard error.

    Branches that diverged are not drawn.

    Example:
        >>> result = CriticalBatch(
        ...     batch=np.array([10, 40]), lr=np.array([0.1, 0.4]), steps=np.array([40, 10]),
        ...     loss=np.array([[1.0, 1.0], [1.2, 1.2]]), own_batch=10, step=100, trained_samples=400, tol=0.1,
        ...     scaling="linear", samples=50, seed=0, dtype="float32", label="ssgd, seed 0")
        >>> draw_critical_batch([result]).get_suptitle()
        'Critical batch: 20 samples (SSGD, seed 0, step 100)'
    """
    with style():
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
        figure.suptitle(title or f"Critical batch: {'; '.join(map(_finding, results[:4]))}")
        first = results[0]
        caption(
            figure,
            f"Branches train on {first.trained_samples:,} samples each, {first.loss.shape[1]} seeds, rate "
            f"{first.scaling} in the batch; loss at w_a over {first.samples:,} training samples, mean "
            "over the last quarter of a branch; dashed: the critical batch.",
        )
    return figure


def _finding(r: CriticalBatch) -> str:
    """The critical batch of one checkpoint, or its bound."""
    known = np.isfinite(r.value)
    words = f"{plus_minus(r.value, r.standard_error)}" if known else f"above {r.bracket[0]:,.0f}"
    return f"{words} samples ({_name(r)})"


def _name(r: CriticalBatch) -> str:
    """The label, which names the step unless the run ended there."""
    return paper_name(r.label) if "step" in r.label else f"{paper_name(r.label)}, step {r.step:,}"

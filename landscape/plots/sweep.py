"""Pictures of sweeps. Nothing here computes a mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.picture import several
from landscape.plots.surface import plain_numbers, style
from landscape.plots.values import drawing, plain
from landscape.results.sweep import Sweep

# From which ratio of largest to smallest an axis is logarithmic (ours).
LOG_RATIO = 5.0


@drawing
def sweeps(results: Sequence[Sweep], title: str = "") -> Figure:
    """Test error against the first key that varies, a line for each of the others, a panel a sweep.

    The recipe is what a line is of, not what is drawn against, unless nothing else varies. Bars are one
    standard deviation over the seeds; an open marker says that some seed diverged. Where there is no test
    error it is the test loss. InputError if nothing varies.
    """
    with style():
        figure, axes = several(len(results), 5.2, 4.0)
        for ax, r in zip(axes, results, strict=True):
            rows = [{key: plain(value) for key, value in row.items()} for row in r.rows]
            varying = [k for k in r.keys if len({row[k] for row in rows}) > 1]
            if not varying:
                raise InputError("sweep: its table has one row, there is nothing to draw")
            against = next((k for k in varying if k != "recipe"), "recipe")
            others = [k for k in varying if k != against]
            name = "test_error" if np.isfinite(r.test_error).any() else "test_loss"
            mean, spread = getattr(r, name), np.nan_to_num(getattr(r, f"{name}_std"))
            texts = [row[against] for row in rows]
            words = list(dict.fromkeys(texts))
            numbers = _numbers(words)
            place = dict(zip(words, numbers or range(len(words)), strict=True))
            lines: dict[str, list[int]] = {}
            for i, row in enumerate(rows):
                lines.setdefault(", ".join(_told(k, row[k]) for k in others if row[k]), []).append(i)
            palette = sns.color_palette("colorblind", max(1, len(lines)))
            for color, (label, chosen) in zip(palette, lines.items(), strict=True):
                x = [place[texts[i]] for i in chosen]
                ax.errorbar(
                    x, mean[chosen], spread[chosen], color=color, lw=1.6 if numbers else 0, elinewidth=1.2,
                    capsize=3, marker="o", ms=5, label=label or None,
                )  # fmt: skip
                bad = [(p, mean[i]) for p, i in zip(x, chosen, strict=True) if r.diverged[i]]
                if bad:
                    ax.plot(*zip(*bad, strict=True), "o", ms=5, mfc="w", mec=color, zorder=5)
            if numbers:
                if min(numbers) > 0 and max(numbers) >= LOG_RATIO * min(numbers):
                    ax.set_xscale("log")
                if len(numbers) <= 8:
                    ax.set_xticks(numbers, words)
                    ax.xaxis.set_minor_locator(ticker.NullLocator())
            else:
                ax.set_xticks(range(len(words)), words, rotation=20, ha="right")
            shown = mean[np.isfinite(mean)]
            if shown.size and shown.min() > 0 and shown.max() >= LOG_RATIO * shown.min():
                ax.set_yscale("log")
                plain_numbers(ax.yaxis)
            ax.set_xlabel(against)
            ax.set_ylabel("test error of $w_a$ (%)" if name == "test_error" else "test loss at $w_a$ (nat)")
            if ax.get_legend_handles_labels()[1]:
                ax.legend()
        many = sorted({len(seeds) for r in results for seeds in r.seed_lists})
        seeds = f"{many[0]} to {many[-1]}" if len(many) > 1 else str(many[0])
        lost = "; open: some diverged" if any(r.diverged.any() for r in results) else ""
        figure.suptitle(title or f"After the last step: mean and standard deviation, seeds: {seeds}{lost}")
    return figure


def _told(key: str, value: str) -> str:
    return value if key in ("recipe", "algorithm.name") else f"{key.split('.')[-1]} {value}"


def _numbers(words: list[str]) -> list[float]:
    """``words`` as numbers, or none if one is not."""
    try:
        return [float(word) for word in words]
    except ValueError:
        return []

"""Pictures of sweeps and of predicted times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.plots.drawing import draws, literal
from landscape.plots.picture import panels, wrapped_panels
from landscape.plots.style import color_of, decimal_labels, paper_name, shades
from landscape.results.tables import RunTimes, Sweep

# An axis is logarithmic from this ratio of the largest to the smallest value (ours).
WIDE = 5.0


@draws(Sweep)
def draw_sweeps(results: Sequence[Sweep], title: str = "") -> Figure:
    """Test error against the first key that varies, one panel for each sweep.

    A line belongs to one combination of the other keys; the recipe is on the x axis only if nothing else
    varies. Error bars are one standard deviation over the seeds. An open marker means that at least one seed
    diverged. Without a test error the test loss is drawn.

    Raises:
        InputError: no key varies.
    """
    figure, axes = wrapped_panels(len(results), 5.2, 4.0)
    for ax, r in zip(axes, results, strict=True):
        _draw_sweep(ax, r)
    counts = sorted({len(seeds) for r in results for seeds in r.seed_lists})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    note = "; open: some diverged" if any(r.diverged.any() for r in results) else ""
    figure.suptitle(title or f"After the last step: mean and standard deviation\nseeds: {seeds}{note}")
    return figure


def _draw_sweep(ax: Axes, r: Sweep) -> None:
    rows = [{key: literal(value) for key, value in row.items()} for row in r.rows]
    varying = [k for k in r.keys if len({row[k] for row in rows}) > 1]
    if not varying:
        raise InputError("sweep: its table has one row, there is nothing to draw")
    x_key = next((k for k in varying if k != "recipe"), "recipe")
    column = "test_error" if np.isfinite(r.test_error).any() else "test_loss"
    mean, spread = getattr(r, column), np.nan_to_num(getattr(r, f"{column}_std"))
    texts = [row[x_key] for row in rows]
    ticks = list(dict.fromkeys(texts))
    numbers = _numbers(ticks)
    place = dict(zip(ticks, numbers or range(len(ticks)), strict=True))
    lines: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        label = ", ".join(_setting(k, row[k]) for k in varying if k != x_key and row[k])
        lines.setdefault(label, []).append(i)
    palette = sns.color_palette("colorblind", max(1, len(lines)))
    for color, (label, chosen) in zip(palette, lines.items(), strict=True):
        x = [place[texts[i]] for i in chosen]
        ax.errorbar(
            x, mean[chosen], spread[chosen], color=color, lw=1.6 if numbers else 0, elinewidth=1.2,
            capsize=3, marker="o", ms=5, label=label or None,
        )  # fmt: skip
        diverged = [(p, mean[i]) for p, i in zip(x, chosen, strict=True) if r.diverged[i]]
        if diverged:
            ax.plot(*zip(*diverged, strict=True), "o", ms=5, mfc="w", mec=color, zorder=5)
    _label_axes(ax, ticks, numbers, mean)
    ax.set_xlabel(x_key)
    ax.set_ylabel("test error of $w_a$ (%)" if column == "test_error" else "test loss at $w_a$ (nat)")
    if ax.get_legend_handles_labels()[1]:
        ax.legend()


def _label_axes(ax: Axes, ticks: list[str], numbers: list[float], mean: Array) -> None:
    """Choose linear or logarithmic axes and label the x axis with the values of its key."""
    if numbers:
        if min(numbers) > 0 and max(numbers) >= WIDE * min(numbers):
            ax.set_xscale("log")
        if len(numbers) <= 8:
            ax.set_xticks(numbers, ticks)
            ax.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        ax.set_xticks(range(len(ticks)), ticks, rotation=20, ha="right")
    finite = mean[np.isfinite(mean)]
    if finite.size and finite.min() > 0 and finite.max() >= WIDE * finite.min():
        ax.set_yscale("log")
        decimal_labels(ax.yaxis)


def _setting(key: str, value: str) -> str:
    """A key and its value, as the legend shows them."""
    return value if key in ("recipe", "algorithm.name") else f"{key.split('.')[-1]} {value}"


def _numbers(words: list[str]) -> list[float]:
    """``words`` as numbers; an empty list if one of them is no number."""
    try:
        return [float(word) for word in words]
    except ValueError:
        return []


@draws(RunTimes)
def draw_run_times(results: Sequence[RunTimes], title: str = "") -> Figure:
    """Seconds per step against workers, a line for each algorithm and topology, two panels for each result.

    The panels show the two orders of DPSGD (AWC, ATC); SSGD is in both. Error bars are one standard error of
    the simulation.
    """
    # All topologies are DPSGD's: shades of its colour, told apart by their markers.
    names = list(dict.fromkeys(m for r in results for m in r.mixing if m))
    tones = shades(color_of("dpsgd"), max(1, len(names)))
    styles = {
        m: (tone, "sD^v<>Pp*hH8"[i % 12]) for i, (m, tone) in enumerate(zip(names, tones, strict=False))
    }
    figure, axes = panels(len(results), 2, 4.6, 4.0, sharey="row")
    for k, r in enumerate(results):
        lines: dict[tuple[str, str], list[int]] = {}
        for i, key in enumerate(zip(r.algorithm, r.mixing, strict=True)):
            lines.setdefault(key, []).append(i)
        for order, ax in zip(("awc", "atc"), axes[2 * k : 2 * k + 2], strict=True):
            for (algorithm, mixing), rows in lines.items():
                if mixing and not algorithm.endswith(order):
                    continue
                color, marker = styles[mixing] if mixing else (color_of(algorithm), "o")
                thin = {"color": color, "lw": 1.2, "marker": marker, "mfc": "none"}
                thick = {**thin, "lw": 2.2, "ls": "--" if algorithm == "ssgd*" else "-"}
                ax.errorbar(
                    r.workers[rows], r.step_s[rows], r.step_error[rows], **(thin if mixing else thick),
                    label=mixing or paper_name(algorithm),
                )  # fmt: skip
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.xaxis.set_major_formatter(ticker.ScalarFormatter())
            ax.set_xticks(np.unique(r.workers).astype(int))
            ax.set_xlabel("workers (log scale)")
            ax.set_title(f"{r.label}\nDPSGD, {order.upper()} order")
        decimal_labels(axes[2 * k].yaxis)
        axes[2 * k].set_ylabel("time a step (s, log scale)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(title or "Predicted time a step: SSGD, and DPSGD by topology")
    return figure

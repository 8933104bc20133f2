"""Predicted times of a step, by the number of workers."""

from __future__ import annotations

from collections.abc import Sequence

import seaborn as sns
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.plots.picture import panels as _panels
from landscape.plots.surface import plain_numbers, style
from landscape.plots.training import COLORS
from landscape.plots.values import drawing
from landscape.results.run_times import RunTimes


@drawing
def run_times(results: Sequence[RunTimes], title: str = "") -> Figure:
    """Seconds a step against workers, a line each algorithm and topology; one row of panels a result.

    SSGD is in both panels. Bars are one standard error of the simulation.
    """
    # Neither SSGD's colour nor SSGD*'s, and black as the last.
    palette = [c for i, c in enumerate(sns.color_palette("colorblind").as_hex()) if i not in (0, 3)] + ["k"]
    names = list(dict.fromkeys(m for r in results for m in r.mixing if m))
    look = {m: (palette[i % len(palette)], "sD^v<>Pp*hH8"[i % 12]) for i, m in enumerate(names)}
    with style():
        figure, axes = _panels(len(results), 2, 4.6, 4.0, sharey="row")
        for k, r in enumerate(results):
            lines: dict[tuple[str, str], list[int]] = {}
            for i, key in enumerate(zip(r.algorithm, r.mixing, strict=True)):
                lines.setdefault(key, []).append(i)
            for order, ax in zip(("awc", "atc"), axes[2 * k : 2 * k + 2], strict=True):
                for (algorithm, mixing), rows in lines.items():
                    if mixing and not algorithm.endswith(order):
                        continue
                    color, marker = look[mixing] if mixing else (COLORS.get(algorithm, "#777777"), "o")
                    plain = {"color": color, "lw": 1.2, "marker": marker, "mfc": "none"}
                    bold = {**plain, "lw": 2.2, "ls": "--" if algorithm == "ssgd*" else "-"}
                    ax.errorbar(
                        r.workers[rows], r.step_s[rows], r.step_error[rows], **(plain if mixing else bold),
                        label=mixing or algorithm.upper(),
                    )  # fmt: skip
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
                ax.xaxis.set_major_formatter(ticker.ScalarFormatter())
                ax.set_xticks(sorted({int(w) for w in r.workers}))
                ax.set_xlabel("workers (log scale)")
                ax.set_title(f"{r.label}\nDPSGD, {order.upper()} order")
            plain_numbers(axes[2 * k].yaxis)
            axes[2 * k].set_ylabel("time a step (s, log scale)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.suptitle(title or "Predicted time a step: SSGD, and DPSGD by topology")
    return figure

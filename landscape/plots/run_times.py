"""Predicted times of a step, by the number of workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.picture import panels
from landscape.plots.style import color_of, decimal_labels, paper_name, shades, style
from landscape.results.run_times import RunTimes


@draws(RunTimes)
def draw_run_times(results: Sequence[RunTimes], title: str = "") -> Figure:
    """Seconds per step against workers, a line for each algorithm and topology, two panels for each result.

    The panels show the two orders of DPSGD (AWC, ATC); SSGD is in both. Error bars are one standard error of
    the simulation.

    Example:
        >>> one = np.ones(1)
        >>> result = RunTimes(
        ...     workers=np.array([2]), algorithm=("ssgd",), mixing=("",), gradient_s=one, update_s=one,
        ...     exchange_s=one, step_s=3 * one, step_error=0 * one, steps=one, run_s=3 * one, waiting=0 * one,
        ...     samples_per_s=one, speedup=one, efficiency=one, recipe="r", parameters=9, held=1,
        ...     bandwidth=1e9, latency=1e-5, straggler=0.0, slow=1.0, all_reduce="ring", news=True, seed=0)
        >>> len(draw_run_times([result]).axes)
        2
    """
    # All topologies are DPSGD's: shades of its colour, told apart by their markers.
    names = list(dict.fromkeys(m for r in results for m in r.mixing if m))
    tones = shades(color_of("dpsgd"), max(1, len(names)))
    styles = {
        m: (tone, "sD^v<>Pp*hH8"[i % 12]) for i, (m, tone) in enumerate(zip(names, tones, strict=False))
    }
    with style():
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

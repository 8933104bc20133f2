"""The sharpness that runs settle at, against the limit of their update rule: numbers, curves, effects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.verdicts import Effect, Rows, by_seed, column, ratio
from landscape.plots.style import color_of, shades

MIXINGS = ("full", "ring(2)", "ring(1)")
COLORS = {"SSGD": color_of("ssgd"), **dict(zip(MIXINGS, shades(color_of("dpsgd"), 3), strict=True))}
# The relative residual up to which an eigenvalue counts as converged (ours).
RESIDUAL = 0.05
# What counts as near a limit (ours).
NEAR = (0.67, 1.5)


def algorithm(name: str) -> list[str]:
    """For recipes: "SSGD", "MIXING ORDER" or "MIXING ORDER BUFFERS", such as "ring(2) AWC mix"."""
    if name == "SSGD":
        return ["algorithm={name='ssgd'}"]
    mixing, order, *buffers = name.rsplit(" ", 2) if name.endswith(("keep", "mix")) else name.rsplit(" ", 1)
    more = f", buffers='{buffers[0]}'" if buffers else ""
    return [f"algorithm={{name='dpsgd', mixing='{mixing}', order='{order.lower()}'{more}}}"]


def plateau(run: Checkpoint) -> float:
    """The median of ηλ_max over the second half of the run, where it lasted; NaN if nothing was recorded.

    A value counts unless its residual says that the search has not converged.
    """
    values, steps = run.history["lr_lambda_max"], run.history["step"]
    off = run.history["lambda_max_residual"] > RESIDUAL * np.abs(run.history["lambda_max"])
    late = values[np.isfinite(values) & ~off & (steps > run.step / 2)]
    return float(np.median(late)) if len(late) else float("nan")


def limit_of(run: Checkpoint) -> float:
    """The largest stable ηλ of the run's rule; NaN where it is not known."""
    limits = run.history["lr_lambda_limit"]
    known = limits[np.isfinite(limits)]
    return float(known[-1]) if len(known) else float("nan")


def draw(ax: Any, color: Any, runs: list[Checkpoint], label: str = "") -> None:
    """The seeds' ηλ_max as thin lines, their median as a thick one, their limit dashed."""
    curves = []
    for run in runs:
        values = run.history["lr_lambda_max"]
        recorded = np.isfinite(values)
        curves.append(dict(zip(run.history["step"][recorded], values[recorded], strict=True)))
        ax.plot(*zip(*curves[-1].items(), strict=True), color=color, lw=0.4, alpha=0.4)
    steps = sorted({step for curve in curves for step in curve})
    median = [np.median([curve[s] for curve in curves if s in curve]) for s in steps]
    ax.plot(steps, median, color=color, lw=1.7, label=label or None)
    ax.axhline(limit_of(runs[0]), color=color, lw=1.2, ls="--")


def rows_of(panel: str, name: str, runs: Iterable[Checkpoint], **more: Any) -> list[dict[str, Any]]:
    """Rows of a CSV: of each run of the setting ``name`` in ``panel`` the plateau and the limit."""
    return [
        {
            "panel": panel,
            "setting": name,
            "seed": run.seed,
            "plateau_lr_lambda_max": plateau(run),
            "limit": limit_of(run),
            "diverged": run.diverged,
            **more,
        }
        for run in runs
    ]


def near_limits(rows: Rows) -> list[Effect]:
    """The plateau of each setting over its limit."""
    effects = []
    for panel, name in dict.fromkeys(zip(column(rows, "panel"), column(rows, "setting"), strict=True)):
        at = {"panel": panel, "setting": name}
        near = ratio(by_seed(rows, "plateau_lr_lambda_max", **at), by_seed(rows, "limit", **at))
        effects.append(Effect(f"{panel}, {name}", "plateau of ηλ_max / limit", near, NEAR, ratio=True))
    return effects


def named(setting: str) -> str:
    """A setting's name for the legend: a mixing is one of DPSGD."""
    return setting if setting == "SSGD" else f"DPSGD {setting}"

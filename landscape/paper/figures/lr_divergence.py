"""DPSGD-2021: the rates at which SSGD and DPSGD still converge, with ηλ_max and each rule's limit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from matplotlib import ticker

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper import scales
from landscape.paper.context import Axes, Context, Runs, Scale, runs_of
from landscape.paper.figure import Compared, Drawing, figure, test_error
from landscape.paper.figures.edge import limit_of
from landscape.paper.figures.sixteen import SMOKE, lenet
from landscape.paper.figures.training_curves import ALL, BOTH, COLOR, cell, classes
from landscape.paper.verdicts import Effect, Rows, difference_effect, need, select, settings, stacked
from landscape.plots.picture import panels
from landscape.plots.style import decimal_labels, style
from landscape.train.recipe import Recipe

# A task's rates, a factor of 2 apart or a little more: from one at which both converge to one at which
# neither does, if trials reached such a rate. The LSTM's are those of batch 16, scaled linearly to 512.
RATES = {
    "MLP, MNIST": (0.2, 0.5, 1.0, 2.0, 4.0),
    "LeNet-5, CIFAR-10": (0.05, 0.1, 0.2, 0.4),
    "LSTM, spoken digits": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
}
FORM = "{task} {algorithm} {lr:g}"
ERROR, SHARPNESS = "test_error_percent", "largest_lr_lambda_max"


def _recipe(scale: Scale, task: str, algorithm: str, lr: float, seed: int) -> Recipe:
    if task.startswith("MLP"):
        changes = [f"lr={lr}", "decompose.every=0", "evaluate.every=50", "monitor.sharpness=100"]
        return scales.mnist(scale, f"fig2a-{algorithm}", seed, *changes, steps=1000)
    if task.startswith("LSTM"):
        return scales.cell(scale, cell("lstm", 512, algorithm), seed, f"lr={lr}")
    changes = ["batch=1024", "steps=200", "evaluate.every=20", "data.subset=10000"]
    if scale == "smoke":
        changes = [*SMOKE, "steps=4", "evaluate.every=2"]
    return lenet(algorithm, *changes, f"lr={lr}", seed=seed)


def _axes(scale: Scale, task: str) -> Axes:
    """A task, both algorithms, and the task's rates; at smoke scale the first and the last."""
    rates = RATES[task]
    chosen = rates[:: len(rates) - 1] if scale == "smoke" else rates
    return {"task": (task,), "algorithm": BOTH, "lr": chosen}


def _runs(scale: Scale) -> Runs:
    runs: dict[str, Recipe] = {}
    for task in RATES:
        make = functools.partial(_recipe, scale)
        runs |= runs_of(FORM, _axes(scale, task), scales.seeds(scale, 3), make)
    return runs


def largest_sharpness(run: Checkpoint) -> float:
    """The largest ηλ_max that was measured; NaN if none was."""
    values = run.history["lr_lambda_max"]
    return float(values[np.isfinite(values)].max()) if np.isfinite(values).any() else float("nan")


def _table(context: Context) -> Rows:
    """A row for each run; the rate is that after scaling and warm-up."""

    def measure(key: str, run: Checkpoint) -> dict[str, Any]:
        recipe, guess = context.runs[key], 100 * (1 - 1 / classes(run))
        return {
            "lr": recipe.schedule.peak_lr(recipe.lr, recipe.batch),
            ERROR: guess if run.diverged else test_error(run),
            "chance_percent": guess,
            SHARPNESS: largest_sharpness(run),
            "limit": limit_of(run),
            "diverged": run.diverged,
        }

    tables = (context.table(FORM, _axes(context.scale, task), measure) for task in RATES)
    return stacked(tables).replace({"algorithm": ALL})


def _draw_task(above: Any, below: Any, rows: Rows) -> None:
    """Above the median test error and its range by rate, the bound dotted; below ηλ_max and limits."""
    for marker, offset, a in zip("os", (0.98, 1.02), BOTH, strict=True):
        one = select(rows, algorithm=ALL[a])
        for ax, quantity in ((above, ERROR), (below, SHARPNESS)):
            by = one.groupby("lr")[quantity].agg(["median", "min", "max"]).dropna()
            reach = [by["median"] - by["min"], by["max"] - by["median"]]
            look = {"marker": marker, "color": COLOR[a], "capsize": 3, "label": ALL[a]}
            ax.errorbar(by.index * offset, by["median"], reach, **look)
        for limit in one["limit"].dropna()[:1]:
            below.axhline(limit, color=COLOR[a], lw=1.0, ls="--")
    above.axhline(_bound(rows), color="#777777", lw=0.9, ls=":")
    shown = sorted(settings(rows, "lr"))
    for ax in (above, below):
        ax.set_xscale("log")
        ax.set_xticks(shown, [f"{rate:g}" for rate in shown])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    above.set(yscale="log", title=rows["task"].iloc[0])
    if (rows[SHARPNESS] > 0).any():
        below.set_yscale("log")
    else:
        below.text(0.5, 0.5, "not measured", ha="center", va="center", transform=below.transAxes)
    decimal_labels(above.yaxis)
    below.set_xlabel("learning rate α")


def _bound(rows: Rows) -> float:
    """Below this test error in % a run of a task has converged: halfway from the best to a guess (ours).

    In files without the column of chance, that is 99% for the LSTM's 100 classes and else 90%.
    """
    guess = 99.0 if rows["task"].iloc[0].startswith("LSTM") else 90.0
    if "chance_percent" in rows:
        guess = float(rows["chance_percent"].iloc[0])
    return (float(rows[ERROR].min()) + guess) / 2


def _edges(rows: Rows) -> dict[str, dict[float, float]]:
    """The largest rate up to which a seed converges, by algorithm and seed, of one task.

    In doublings; one below the smallest rate where no rate converges. Rates below the first one that
    converges are too low for the number of steps, and say nothing about the largest.
    """
    need(rows, "algorithm", "seed", "lr", ERROR)
    below, found = _bound(rows), dict[str, dict[float, float]]()
    none = float(np.log2(rows["lr"].min())) - 1
    for (algorithm, seed), runs in rows.sort_values("lr").groupby(["algorithm", "seed"], sort=False):
        largest = none
        for rate, error in zip(runs["lr"], runs[ERROR], strict=True):
            if error < below:
                largest = float(np.log2(rate))
            elif largest > none:
                break
        found.setdefault(algorithm, {})[float(seed)] = largest
    return found


def _judge(rows: Rows) -> list[Effect]:
    """By how many doublings of the rate each form of DPSGD converges beyond SSGD, by task."""
    effects = []
    for task in settings(rows, "task"):
        found = _edges(select(rows, task=task))
        for algorithm in settings(rows, "algorithm"):
            if algorithm != "SSGD" and {algorithm, "SSGD"} <= found.keys():
                where = f"{task}: {algorithm} beyond SSGD"
                both = found[algorithm], found["SSGD"]
                effects.append(difference_effect(where, "doublings of the rate", both))
    return effects


def _rates(context: Context) -> Drawing:
    rows = _table(context)
    tasks = settings(rows, "task")
    compared, larger = list[Compared](), list[bool]()
    with style():
        picture, axes = panels(2, len(tasks), 3.9, 2.9)
        for above, below, task in zip(axes, axes[len(tasks) :], tasks, strict=False):
            of_task = select(rows, task=task)
            _draw_task(above, below, of_task)
            found = _edges(of_task)
            low = {ALL[a]: 2.0 ** min(found[ALL[a]].values()) for a in BOTH if ALL[a] in found}
            what = f"largest rate at which every seed converges, {task}"
            compared += [Compared(f"{what}, {a}", f"{rate:.4g}") for a, rate in low.items()]
            if len(low) == 2:
                larger.append(low["DPSGD"] > low["SSGD"])
        axes[0].set_ylabel("test error of $w_a$ (%)")
        axes[len(tasks)].set_ylabel(r"largest $\eta\lambda_{max}$ (lines: limits)")
        most = max(axes[: len(tasks)], key=lambda ax: len(ax.get_legend_handles_labels()[1]))
        picture.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Drawing(
        {"": picture},
        rows,
        compared,
        "The largest rate tried at which every seed converges (test error below the dotted line, halfway "
        "from the best to chance) is larger for DPSGD than for SSGD on "
        f"{sum(larger)} of {len(larger)} networks.",
    )


_OURS = (
    "784-50-50-10 with n = 5, nB = 2000, 1,000 steps; LeNet-5 on 10,000 images, n = 16, nB = 1024, 200 "
    f"steps; {scales.SPEECH_NOTE}, nB = 512; only the abstract is at hand: all settings are ours"
)
figure(
    "lr-divergence", "DPSGD-2021", "learning rate against divergence",
    "DPSGD converges at rates at which SSGD does not.",
    _runs, _judge, laptop=_OURS, partial=True,
)(_rates)  # fmt: skip

"""Test error by learning rate: DPSGD-2021's rates at which training converges, and (ours) a tuned LAMB."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from matplotlib import ticker

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.statistics import standard_error
from landscape.paper import scales
from landscape.paper.context import Axes, Context, Runs, Scale, runs_of
from landscape.paper.figure import Compared, Drawing, figure, mean_and_spread, test_error
from landscape.paper.figures.edge import COLORS, algorithm, limit_of, named
from landscape.paper.figures.training_curves import ORDERS, cell, classes, tuned
from landscape.paper.verdicts import (
    Effect,
    Rows,
    by_seed,
    difference,
    difference_effect,
    select,
    settings,
    stacked,
)
from landscape.plots.picture import panels, shared_legend
from landscape.plots.style import color_of, decimal_labels, shades
from landscape.training.recipes.recipe import Recipe
from landscape.training.recipes.table_recipes import SPEECH_BATCHES

ERROR, SHARPNESS = "test_error_percent", "largest_lr_lambda_max"


def _draw(ax: Any, rows: Rows, column: str, offset: float = 1.0, **look: Any) -> None:
    """The median over seeds and its range by rate, all rates times ``offset``."""
    by = rows.groupby("lr")[column].agg(["median", "min", "max"]).dropna()
    reach = [by["median"] - by["min"], by["max"] - by["median"]]
    ax.errorbar(by.index * offset, by["median"], reach, capsize=3, **look)


# ---- The rates at which training converges

# A task's rates after scaling and warm-up, a factor of 2 apart or a little more: from one at which both
# converge to one at which neither does.
RATES = {
    "MLP, MNIST": (0.2, 0.5, 1.0, 2.0, 4.0),
    "ResNet-18, CIFAR-10": (0.2, 0.4, 0.8, 1.6, 3.2),
    "LSTM, spoken digits": (0.4, 0.8, 1.6, 3.2, 6.4, 12.8),
}
FORM = "{task} {algorithm} {lr:g}"
# SSGD and the forms of DPSGD with their colours.
LOOKS = {"SSGD": color_of("ssgd"), **dict(zip(ORDERS, shades(color_of("dpsgd"), 2), strict=True))}


def _recipe(scale: Scale, task: str, algorithm: str, lr: float, seed: int) -> Recipe:
    rule, form = ("ssgd", "") if algorithm == "SSGD" else ("dpsgd", ORDERS[algorithm])
    if task.startswith("MLP"):
        changes = ["steps=1000", "decompose.every=0", "evaluate.every=50", "monitor.sharpness=100"]
        more = form.split("+")[1:]
        return scales.mnist(scale, f"fig2a-{rule}", seed, f"lr={lr}", *changes, *more)
    if task.startswith("LSTM"):
        rate = lr * 16 / SPEECH_BATCHES[-1]  # rates are those of batch 16
        return scales.cell(scale, f"{cell('lstm', SPEECH_BATCHES[-1], rule)}+lr={rate:g}{form}", seed)
    return scales.cell(scale, tuned("resnet-18", rule, lr) + form, seed)


def _axes(scale: Scale) -> list[Axes]:
    """For each task all algorithms and the task's rates; at smoke scale the first and the last."""
    return [
        {
            "task": (task,),
            "algorithm": ("SSGD", *ORDERS),
            "lr": rates[:: len(rates) - 1 if scale == "smoke" else 1],
        }
        for task, rates in RATES.items()
    ]


def _runs(scale: Scale) -> Runs:
    make, seeds = functools.partial(_recipe, scale), range(2 if scale == "smoke" else 3)
    return {key: run for axes in _axes(scale) for key, run in runs_of(FORM, axes, seeds, make).items()}


def largest_sharpness(run: Checkpoint) -> float:
    """The largest ηλ_max that was measured; NaN if none was."""
    values = run.history["lr_lambda_max"]
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else float("nan")


def _table(context: Context) -> Rows:
    """A row for each run."""

    def measure(key: str, run: Checkpoint) -> dict[str, Any]:
        guess = 100 * (1 - 1 / classes(run))
        return {
            ERROR: guess if run.diverged else test_error(run),
            "chance_percent": guess,
            SHARPNESS: largest_sharpness(run),
            "limit": limit_of(run),
            "diverged": run.diverged,
        }

    tables = (context.table(FORM, axes, measure) for axes in _axes(context.scale))
    return stacked(tables)


def _draw_task(above: Any, below: Any, rows: Rows) -> None:
    """Above the median test error and its range by rate, the bound dotted; below ηλ_max and limits."""
    for (name, color), marker, offset in zip(LOOKS.items(), "osD", (0.96, 1.0, 1.04), strict=True):
        one = select(rows, algorithm=name)
        for ax, quantity in ((above, ERROR), (below, SHARPNESS)):
            _draw(ax, one, quantity, offset, marker=marker, color=color, label=name)
        for limit in one["limit"].dropna()[:1]:
            below.axhline(limit, color=color, lw=1.0, ls="--")
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
    below, found = _bound(rows), dict[str, dict[float, float]]()
    none = float(np.log2(rows["lr"].min())) - 1
    for (name, seed), runs in rows.sort_values("lr").groupby(["algorithm", "seed"], sort=False):
        largest = none
        for rate, error in zip(runs["lr"], runs[ERROR], strict=True):
            if error < below:
                largest = float(np.log2(rate))
            elif largest > none:
                break
        found.setdefault(name, {})[float(seed)] = largest
    return found


def _judge_rates(rows: Rows) -> list[Effect]:
    """By how many doublings of the rate each form of DPSGD converges beyond SSGD, by task."""
    found = {task: _edges(select(rows, task=task)) for task in settings(rows, "task")}
    return [
        difference_effect(f"{task}: {a} beyond SSGD", "doublings of the rate", (edges[a], edges["SSGD"]))
        for task, edges in found.items()
        for a in settings(rows, "algorithm")
        if a != "SSGD" and {a, "SSGD"} <= edges.keys()
    ]


def _rates(context: Context) -> Drawing:
    rows = _table(context)
    tasks = settings(rows, "task")
    compared, larger = list[Compared](), list[bool]()
    picture, axes = panels(2, len(tasks), 3.9, 2.9)
    for above, below, task in zip(axes, axes[len(tasks) :], tasks, strict=False):
        of_task = select(rows, task=task)
        _draw_task(above, below, of_task)
        found = _edges(of_task)
        low = {a: 2.0 ** min(edges.values()) for a, edges in found.items()}
        what = f"largest rate at which every seed converges, {task}"
        compared += [Compared(f"{what}, {a}", f"{rate:.4g}") for a, rate in low.items()]
        if {"SSGD", "DPSGD"} <= low.keys():
            larger.append(low["DPSGD"] > low["SSGD"])
    axes[0].set_ylabel("test error of $w_a$ (%)")
    axes[len(tasks)].set_ylabel(r"largest $\eta\lambda_{max}$ (lines: limits)")
    shared_legend(picture, axes[: len(tasks)], ncols=3)
    return Drawing(
        {"": picture},
        rows,
        compared,
        "The largest rate tried at which every seed converges (test error below the dotted line, halfway "
        "from the best to chance) is larger for DPSGD than for SSGD on "
        f"{sum(larger)} of {len(larger)} networks.",
    )


_OURS = (
    f"784-50-50-10 with n = 5, nB = 2000, 1,000 steps; {scales.CIFAR_NOTE}, nB = 8192; "
    f"{scales.SPEECH_NOTE}, nB = 512; {scales.OURS}"
)
figure(
    "lr-divergence", "DPSGD-2021", "learning rate against divergence",
    "DPSGD converges at rates at which SSGD does not.",
    _runs, _judge_rates, laptop=_OURS, partial=True,
)(_rates)  # fmt: skip

# ---- Whether the advantage of decentralised training outlives a tuned adaptive optimizer

# The learning rates of each optimizer (ours).
TUNED = {"LAMB": (0.003, 0.01, 0.03), "SGD": (0.2, 0.5, 1.0)}
SETTINGS = {"SSGD": "o", "ring(2) AWC": "s"}
LAMB_FORM = "{optimizer} {lr:g} {setting}"


def _lamb_runs(scale: Scale) -> Runs:
    def changes(optimizer: str, lr: float, setting: str) -> list[str]:
        more = ["optimizer={name='lamb'}"] if optimizer == "LAMB" else []
        return [f"lr={lr}", algorithm(setting), "steps=1000", "decompose.every=0", *more]

    axes = ({"optimizer": (kind,), "lr": rates, "setting": SETTINGS} for kind, rates in TUNED.items())
    every = (scales.mnist_runs(LAMB_FORM, each, 5, "fig2b-dpsgd", changes)(scale) for each in axes)
    return dict(itertools.chain.from_iterable(runs.items() for runs in every))


def _best(rows: Rows, kind: str, name: str) -> dict[float, float]:
    """The test errors by seed at the rate with the lowest median."""
    chosen = select(rows, optimizer=kind, setting=name)
    return by_seed(chosen, ERROR, lr=chosen.groupby("lr")[ERROR].median().idxmin())


def _lamb(context: Context) -> Drawing:
    order = list(itertools.product(SETTINGS.items(), TUNED.items()))
    rows = stacked(
        context.table(
            LAMB_FORM,
            {"optimizer": (kind,), "lr": rates, "setting": (name,)},
            lambda key, run: {ERROR: test_error(run)},
        )
        for (name, _), (kind, rates) in order
    )
    picture, (ax,) = panels(1, 1, 6.8, 3.8)
    for (name, marker), (kind, _) in order:
        color, label = COLORS[name.split()[0]], f"{named(name.replace(' AWC', ''))}, {kind}"
        look: Any = {"color": color, "marker": marker, "mfc": "none" if kind == "SGD" else color}
        _draw(ax, select(rows, optimizer=kind, setting=name), ERROR, label=label, **look)
    ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test error of $w_a$ (%)")
    decimal_labels(ax.xaxis)
    decimal_labels(ax.yaxis)
    picture.legend(loc="outside lower center", ncols=2)
    said, compared = [], list[Compared]()
    for kind in reversed(TUNED):
        best = {name: list(_best(rows, kind, name).values()) for name in SETTINGS}
        a, b = map(np.array, best.values())
        error = float(np.hypot(standard_error(a), standard_error(b)))
        said.append(f"with {kind} {a.mean() - b.mean():.2f} ± {error:.2f}")
        compared += [
            Compared(f"test error (%) of {name}, {kind}, best rate", mean_and_spread(errors))
            for name, errors in best.items()
        ]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"At each one's best rate, SSGD's test error less that of DPSGD ring(2) is {', '.join(said)} points "
        "(± standard error).",
    )


def _judge_lamb(rows: Rows) -> list[Effect]:
    """How much of SGD's advantage LAMB takes away, by seed at each one's best rate."""
    gaps = {}
    for kind in TUNED:
        best = [_best(rows, kind, name) for name in SETTINGS]
        gaps[kind] = dict(zip(best[0], difference(*best), strict=True))
    plain = Effect("with SGD", "test error of SSGD less DPSGD (points)", tuple(gaps["SGD"].values()))
    none = "" if plain.holds else "with SGD there is no advantage that could vanish"
    what = "test error of SSGD less DPSGD, with SGD less with LAMB (points)"
    lost = difference(gaps["SGD"], gaps["LAMB"])
    return [Effect("at each one's best rate", what, lost, untested=none)]


figure(
    "lamb", "Further analyses", "does DPSGD's advantage outlive a tuned LAMB? MNIST, n = 6",
    "With a tuned adaptive optimizer the decentralised advantage is reported to vanish.",
    _lamb_runs, _judge_lamb, laptop="nB = 1998, 1,000 steps, five seeds; all settings ours",
    paper="nB = 1998, 1,000 steps; all settings ours",
)(_lamb)  # fmt: skip

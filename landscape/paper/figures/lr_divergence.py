"""DPSGD-2021: the rates at which SSGD and DPSGD still converge, with ηλ_max and each rule's limit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import ticker

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper import scales
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure
from landscape.paper.figures import edges
from landscape.paper.figures.plateaus import limit_of
from landscape.paper.figures.sixteen import LENET
from landscape.paper.figures.training_curves import BOTH, NAMED, cell
from landscape.paper.verdicts import Effect, Rows, column, difference, select
from landscape.plots.picture import panels
from landscape.plots.style import decimal_labels, style
from landscape.train import table_recipes as recipes
from landscape.train.recipe import Recipe
from landscape.train.table_recipes import BATCHES, SPEECH_BATCHES

# A task's rates, a factor of 2 apart or a little more: from one at which both converge to one at which
# neither does, if trials reached such a rate. The LSTM's are those of batch 16, scaled linearly to 512.
RATES = {
    "MLP, MNIST": (0.2, 0.5, 1.0, 2.0, 4.0),
    "LeNet-5, CIFAR-10": (0.05, 0.1, 0.2, 0.4),
    "LSTM, spoken digits": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
}
# The networks at workstation scale, those of Tables 5 and 6, whose runs these are.
STATION = {f"{NAMED[m]}, CIFAR-10": (m, BATCHES[-1]) for m in ("efficientnet-b0", "senet-18")} | {
    "LSTM, spoken digits": ("lstm", SPEECH_BATCHES[-1])
}
SEEDS = 3


def _recipe(scale: Scale, task: str, algorithm: str, rate: float, seed: int) -> Recipe:
    if task.startswith("MLP"):
        changes = [f"lr={rate}", "decompose.every=0", "evaluate.every=50", "monitor.sharpness=100"]
        return scales.mnist(scale, f"fig2a-{algorithm}", seed, *changes, steps=1000)
    if task.startswith("LSTM"):
        return scales.cell(scale, cell("lstm", 512, algorithm), seed, f"lr={rate}")
    changes = ["batch=1024", "steps=200", "evaluate.every=20", "data.subset=10000"]
    if scale == "smoke":
        changes = [
            "learners=4",
            "batch=64",
            "steps=4",
            "data={name='digits', form='image'}",
            "evaluate.every=2",
        ]
    return recipes.read(cell("resnet-18", 4096, algorithm), [*LENET, *changes, f"lr={rate}", f"seed={seed}"])


def _key(task: str, algorithm: str, rate: float) -> str:
    return f"{task} {algorithm} {rate:g}"


def _runs(scale: Scale) -> Runs:
    """On a workstation Figure 2's network, and the runs of Tables 5 and 6; else those of RATES."""
    tasks = [task for task in RATES if scale != "workstation" or task.startswith("MLP")]
    runs: dict[str, Recipe] = {}
    for task in tasks:
        rates = RATES[task][:: len(RATES[task]) - 1] if scale == "smoke" else RATES[task]
        for a, rate, seed in itertools.product(BOTH, rates, scales.seeds(scale, SEEDS)):
            runs[f"{_key(task, a, rate)}/{seed}"] = _recipe(scale, task, a, rate, seed)
    if scale == "workstation":
        for model, batch in STATION.values():
            runs |= edges.runs_at(scale, model, batch, edges.variants(model), edges.FACTORS)
    return runs


@dataclass(frozen=True)
class Task:
    """The ended runs of one task by algorithm and rate, the rate after scaling and warm-up."""

    name: str
    groups: dict[tuple[str, float], list[Checkpoint]]

    @classmethod
    def of(cls, work: Work, name: str) -> Task:
        """The task ``name``, one of RATES or of STATION."""
        prefixes: dict[tuple[str, float], str] = {}
        if work.scale == "workstation" and name in STATION:
            model, batch = STATION[name]
            for variant, factor in itertools.product(edges.variants(model), edges.FACTORS):
                prefixes[variant, factor] = edges.key(model, batch, variant, factor)
        else:
            for a, rate in itertools.product(BOTH, RATES[name]):
                prefixes[a, rate] = _key(name, a, rate)
        groups = {}
        for (a, _), prefix in prefixes.items():
            if f"{prefix}/0" in work.runs and (runs := work.group(prefix)):
                recipe = work.runs[f"{prefix}/0"]
                groups[a, recipe.schedule.peak_lr(recipe.lr, recipe.batch)] = runs
        return cls(name, groups)

    def draw(self, above: Any, below: Any) -> None:
        """Above the median test error and its range by rate, the bound dotted; below ηλ_max and limits."""
        offsets = np.linspace(0.96, 1.04, len(edges.VARIANTS))
        for marker, offset, a in zip("osD^v", offsets, edges.VARIANTS, strict=True):
            rates = sorted(rate for name, rate in self.groups if name == a)
            if not rates:
                continue
            look = {"marker": marker, "color": edges.COLORS[a], "capsize": 3, "label": edges.VARIANTS[a].name}
            for ax, measure in ((above, edges.error), (below, largest_sharpness)):
                values = [[measure(run) for run in self.groups[a, rate]] for rate in rates]
                middle = np.array([np.median(v) for v in values])
                reach = np.abs([[m - min(v), max(v) - m] for m, v in zip(middle, values, strict=True)])
                ax.errorbar(np.array(rates) * offset, middle, reach.T, **look)
            limit = limit_of(self.groups[a, rates[0]][0])
            if np.isfinite(limit):
                below.axhline(limit, color=edges.COLORS[a], lw=1.0, ls="--")
        above.axhline(_bound(self.rows()), color="#777777", lw=0.9, ls=":")
        shown = sorted({rate for _, rate in self.groups})
        for ax in (above, below):
            ax.set_xscale("log")
            ax.set_xticks(shown, [f"{rate:g}" for rate in shown])
            ax.xaxis.set_minor_locator(ticker.NullLocator())
        above.set_yscale("log")
        if any(largest_sharpness(run) > 0 for runs in self.groups.values() for run in runs):
            below.set_yscale("log")
        else:
            below.text(0.5, 0.5, "not measured", ha="center", va="center", transform=below.transAxes)
        decimal_labels(above.yaxis)
        above.set_title(self.name)
        below.set_xlabel("learning rate α")

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of the figure's CSV."""
        return [
            {
                "task": self.name,
                "algorithm": edges.VARIANTS[a].name,
                "lr": rate,
                "seed": run.seed,
                "test_error_percent": edges.error(run),
                "chance_percent": edges.chance(run),
                "largest_lr_lambda_max": largest_sharpness(run),
                "limit": limit_of(run),
                "diverged": run.diverged,
            }
            for (a, rate), runs in self.groups.items()
            for run in runs
        ]


def largest_sharpness(run: Checkpoint) -> float:
    """The largest ηλ_max that was measured; NaN if none was."""
    values = run.history["lr_lambda_max"]
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else float("nan")


def _chance(row: dict[str, Any]) -> float:
    """In %; in files without this column, 99% for the LSTM's 100 classes and else 90%."""
    return float(row.get("chance_percent", 99.0 if str(row["task"]).startswith("LSTM") else 90.0))


def _bound(rows: Rows) -> float:
    """Below this test error in % a run has converged, of the rows of one task."""
    return edges.bound(min(float(r["test_error_percent"]) for r in rows), _chance(rows[0]))


def _edges(rows: Rows) -> dict[str, dict[float, float]]:
    """The largest rate up to which a seed converges, by algorithm and seed, of one task.

    In doublings; one below the smallest rate where no rate converges. Rates below the first one that
    converges are too low for the number of steps, and say nothing about the largest.
    """
    below, found = _bound(rows), dict[str, dict[float, float]]()
    for algorithm in dict.fromkeys(column(rows, "algorithm")):
        chosen = select(rows, algorithm=algorithm)
        for seed in dict.fromkeys(float(r["seed"]) for r in chosen):
            none = largest = float(np.log2(min(float(r["lr"]) for r in rows))) - 1
            for row in sorted(select(chosen, seed=seed), key=lambda r: float(r["lr"])):
                if float(row["test_error_percent"]) < below:
                    largest = float(np.log2(float(row["lr"])))
                elif largest > none:
                    break
            found.setdefault(algorithm, {})[seed] = largest
    return found


def _judge(rows: Rows) -> list[Effect]:
    """By how many doublings of the rate each form of DPSGD converges beyond SSGD, by task."""
    effects = []
    for task in dict.fromkeys(column(rows, "task")):
        found = _edges(select(rows, task=task))
        for algorithm in found:
            if algorithm != "SSGD" and "SSGD" in found:
                more = difference(found[algorithm], found["SSGD"])
                effects.append(Effect(f"{task}: {algorithm} beyond SSGD", "doublings of the rate", more))
    return effects


def _rates(work: Work) -> Drawing:
    names = ["MLP, MNIST", *STATION] if work.scale == "workstation" else list(RATES)
    tasks = [task for task in (Task.of(work, name) for name in names) if task.groups]
    with style():
        picture, axes = panels(2, len(tasks), 3.9, 2.9)
        for k, task in enumerate(tasks):
            task.draw(axes[k], axes[k + len(tasks)])
        axes[0].set_ylabel("test error of $w_a$ (%)")
        axes[len(tasks)].set_ylabel(r"largest $\eta\lambda_{max}$ (lines: limits)")
        most = max(axes[: len(tasks)], key=lambda ax: len(ax.get_legend_handles_labels()[1]))
        picture.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    rows = [row for task in tasks for row in task.rows()]
    compared, larger = [], []
    for task in tasks:
        found = _edges(task.rows())
        low = {name: 2.0 ** min(values.values()) for name, values in found.items()}
        compared += [
            Compared(f"largest rate at which every seed converges, {task.name}, {a}", f"{rate:.4g}")
            for a, rate in low.items()
        ]
        if {"SSGD", "DPSGD"} <= low.keys():
            larger.append(low["DPSGD"] > low["SSGD"])
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
    "lr-divergence",
    "DPSGD-2021",
    "learning rate against divergence",
    "DPSGD converges at rates at which SSGD does not.",
    _runs,
    _judge,
    smoke=scales.SMOKE_NOTE,
    laptop=_OURS,
    workstation=(
        f"784-50-50-10 with n = 5, nB = 2000, 1,000 steps; batch 8192 of {scales.STATION_CIFAR}; "
        f"{scales.SPEECH_NOTE}, nB = 512; only the abstract is at hand: all settings are ours"
    ),
    paper=_OURS,
    partial=True,
)(_rates)

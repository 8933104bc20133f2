"""DPSGD-2021: the rates at which SSGD and DPSGD still converge, over networks that two cores can train."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import ticker

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper import recipes, scales
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, test_error
from landscape.paper.figures.networks import ALL, BOTH, COLOR, cell
from landscape.paper.figures.sixteen_learners import LENET
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
SEEDS = 3


def _recipe(scale: Scale, task: str, algorithm: str, rate: float, seed: int) -> Recipe:
    if task.startswith("MLP"):
        changes = [f"lr={rate}", "decompose.every=0", "evaluate.every=50"]
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
    rates = {task: every[:: len(every) - 1] if scale == "smoke" else every for task, every in RATES.items()}
    return {
        f"{_key(task, a, rate)}/{seed}": _recipe(scale, task, a, rate, seed)
        for task in RATES
        for a, rate, seed in itertools.product(BOTH, rates[task], scales.seeds(scale, SEEDS))
    }


def _chance(run: Checkpoint) -> float:
    """Test error in % of a guess among the classes, were they equally likely."""
    options = run.model["options"]
    return 100 * (1 - 1 / int(options.get("classes") or options["widths"][-1]))


@dataclass(frozen=True)
class Task:
    """The runs of one task: test errors in % by (algorithm, rate); below ``bound``, a run has converged."""

    name: str
    rates: list[float]
    peaks: dict[float, float]
    groups: dict[tuple[str, float], list[Checkpoint]]
    errors: dict[tuple[str, float], list[float]]
    bound: float

    @classmethod
    def of(cls, work: Work, name: str) -> Task:
        """The finished runs of the task ``name``."""
        rates = [rate for rate in RATES[name] if f"{_key(name, BOTH[0], rate)}/0" in work.runs]
        groups = {(a, rate): work.group(_key(name, a, rate)) for a in BOTH for rate in rates}
        errors = {key: [test_error(run) for run in runs] for key, runs in groups.items()}
        chance = _chance(groups[BOTH[0], rates[0]][0])
        bound = (chance + min(min(values) for values in errors.values())) / 2
        return cls(name, rates, {rate: _peak(work, name, rate) for rate in rates}, groups, errors, bound)

    def largest_rate(self, algorithm: str) -> float:
        """The largest rate at which every seed converges; 0 if there is none."""
        converged = (r for r in self.rates if max(self.errors[algorithm, r]) < self.bound)
        return max((self.peaks[rate] for rate in converged), default=0.0)

    def draw(self, ax: Any) -> None:
        """The median test error and its range by rate; the bound is dotted."""
        for marker, a in zip("os", BOTH, strict=True):
            values = np.array([self.errors[a, rate] for rate in self.rates])
            middle = np.median(values, 1)
            ax.errorbar(
                list(self.peaks.values()),
                middle,
                [middle - values.min(1), values.max(1) - middle],
                marker=marker,
                color=COLOR[a],
                capsize=3,
                label=ALL[a],
            )
        ax.axhline(self.bound, color="#777777", lw=0.9, ls=":")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(list(self.peaks.values()), [f"{rate:g}" for rate in self.peaks.values()])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        decimal_labels(ax.yaxis)
        ax.set_title(self.name)
        ax.set_xlabel("learning rate α")

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of the figure's CSV."""
        return [
            {
                "task": self.name,
                "algorithm": ALL[a],
                "lr": self.peaks[rate],
                "seed": run.seed,
                "test_error_percent": value,
                "diverged": run.diverged,
            }
            for (a, rate), runs in self.groups.items()
            for run, value in zip(runs, self.errors[a, rate], strict=True)
        ]


def _rates(work: Work) -> Drawing:
    tasks = [Task.of(work, name) for name in RATES]
    with style():
        picture, axes = panels(1, len(tasks), 3.9, 3.6)
        for ax, task in zip(axes, tasks, strict=True):
            task.draw(ax)
        axes[0].set_ylabel("test error of $w_a$ (%)")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    what = "largest rate at which every seed converges"
    larger = [task.largest_rate("dpsgd") > task.largest_rate("ssgd") for task in tasks]
    return Drawing(
        {"": picture},
        [row for task in tasks for row in task.rows()],
        [Compared(f"{what}, {t.name}, {ALL[a]}", f"{t.largest_rate(a):g}") for t in tasks for a in BOTH],
        "The largest rate tried at which every seed converges (test error below the dotted line, halfway "
        "from the best to chance) is larger for DPSGD than for SSGD on "
        f"{sum(larger)} of {len(larger)} networks.",
        all(larger),
    )


def _peak(work: Work, task: str, rate: float) -> float:
    """The rate after scaling and warm-up."""
    run = work.runs[f"{_key(task, BOTH[0], rate)}/0"]
    return run.schedule.peak_lr(run.lr, run.batch)


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
    smoke=scales.SMOKE_NOTE,
    laptop=_OURS,
    paper=_OURS,
)(_rates)

"""SSGD and DPSGD with 16 learners, the number in DPSGD-2020, on a network that two cores can train."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, mean_and_spread
from landscape.paper.figures.training_curves import ALL, BOTH, COLOR, accuracy, cell, curves
from landscape.paper.scales import SMOKE_NOTE
from landscape.paper.verdicts import Effect, Rows, by_seed, difference
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.train import table_recipes as recipes

# What is changed of Table 3's cell of ResNet-18 at batch 4096; the rate, which is not scaled, is ours.
LENET = ("model={name='lenet-5'}", "schedule={}", "lr=0.1", "checkpoint.every=0")


def _runs(scale: Scale) -> Runs:
    """LeNet-5 on all of CIFAR-10, batch 4096; the batch of a learner, 256, is the paper's."""
    if scale == "smoke":
        changes = [
            "learners=4",
            "batch=64",
            "steps=6",
            "data={name='digits', form='image'}",
            "evaluate.every=3",
        ]
    else:
        changes = ["evaluate.every=12", "steps=244"]
    return {
        f"{a}/{seed}": recipes.read(cell("resnet-18", 4096, a), [*LENET, *changes, f"seed={seed}"])
        for a, seed in itertools.product(BOTH, range(3))
    }


def _draw(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    ends = {}
    with style():
        picture, (ax,) = panels(1, 1, 6.8, 3.8)
        for a in BOTH:
            runs = work.group(a)
            points = curves(ax, runs, "test_accuracy", color=COLOR[a], lw=1.4, label=ALL[a])
            rows += [
                {"algorithm": ALL[a], "test_accuracy_percent": r.pop("test_accuracy"), **r} for r in points
            ]
            ends[a] = [accuracy(run) for run in runs]
        ax.set_xlabel("epoch")
        ax.set_ylabel("test accuracy of $w_a$ (%)")
        picture.legend(loc="outside lower center", ncols=2)
    return Drawing(
        {"": picture},
        rows,
        [Compared(f"test accuracy (%), {ALL[a]}", mean_and_spread(ends[a])) for a in BOTH],
        f"Mean test accuracy: DPSGD {np.mean(ends['dpsgd']):.2f}%, SSGD {np.mean(ends['ssgd']):.2f}%.",
    )


def _judge(rows: Rows) -> list[Effect]:
    ends = {a: by_seed(rows, "test_accuracy_percent", algorithm=ALL[a]) for a in BOTH}
    return [Effect("DPSGD less SSGD", "test accuracy (points)", difference(ends["dpsgd"], ends["ssgd"]))]


_LENET = "LeNet-5, 16 learners, batch 4096, lr 0.1 throughout, 20 epochs, three seeds: ours"
figure(
    "sixteen",
    "DPSGD-2020, section 4.1",
    "SSGD and DPSGD with 16 learners on all of CIFAR-10",
    "In the large-batch setting DPSGD is better than SSGD at the same rate and batch.",
    _runs,
    _judge,
    smoke=SMOKE_NOTE,
    laptop=_LENET,
    paper=_LENET,
)(_draw)

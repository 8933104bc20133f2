"""SSGD and DPSGD with 16 learners, the number in DPSGD-2020, on a network that two cores can train."""

from __future__ import annotations

import functools

from landscape.paper.context import Context, Runs, Scale, runs_of
from landscape.paper.figure import Drawing, compare, figure, mean_and_spread
from landscape.paper.figures.training_curves import ALL, BOTH, COLOR, cell, curves, points
from landscape.paper.verdicts import Effect, Rows, difference_effect, pair, select
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.train import table_recipes
from landscape.train.recipe import Recipe

# What is changed of Table 3's cell of ResNet-18 at batch 4096; the rate, which is not scaled, is ours.
LENET = ("model={name='lenet-5'}", "schedule={}", "lr=0.1", "checkpoint.every=0")
SMOKE = ("learners=4", "batch=64", "data={name='digits', form='image'}")
ACCURACY = "test_accuracy_percent"


def lenet(algorithm: str, *changes: str, seed: int) -> Recipe:
    """LeNet-5 with 16 learners on all of CIFAR-10, batch 4096; a learner's batch, 256, is the paper's."""
    return table_recipes.read(cell("resnet-18", 4096, algorithm), [*LENET, *changes, f"seed={seed}"])


def _runs(scale: Scale) -> Runs:
    changes = ["evaluate.every=12", "steps=244"]
    if scale == "smoke":
        changes = [*SMOKE, "steps=6", "evaluate.every=3"]
    return runs_of(
        "{algorithm}",
        {"algorithm": BOTH},
        range(3),
        lambda algorithm, seed: lenet(algorithm, *changes, seed=seed),
    )


def _draw(context: Context) -> Drawing:
    measure = functools.partial(points, "test_accuracy")
    rows = context.table("{algorithm}", {"algorithm": BOTH}, measure).replace({"algorithm": ALL})
    rows.insert(1, ACCURACY, rows.pop("test_accuracy"))
    with style():
        picture, (ax,) = panels(1, 1, 6.8, 3.8)
        for a in BOTH:
            curves(ax, select(rows, algorithm=ALL[a]), ACCURACY, ALL[a], color=COLOR[a], lw=1.4)
        ax.set(xlabel="epoch", ylabel="test accuracy of $w_a$ (%)")
        picture.legend(loc="outside lower center", ncols=2)
    last = rows.groupby(["algorithm", "seed"], sort=False).last().reset_index()
    last.loc[last["diverged"].astype(bool), ACCURACY] = 10.0
    means = last.groupby("algorithm")[ACCURACY].mean()
    return Drawing(
        {"": picture},
        rows,
        compare(last, "test accuracy (%), {algorithm}", ACCURACY, mean_and_spread),
        f"Mean test accuracy: DPSGD {means['DPSGD']:.2f}%, SSGD {means['SSGD']:.2f}%.",
    )


def _judge(rows: Rows) -> list[Effect]:
    accuracies = pair(rows, ACCURACY, algorithm=("DPSGD", "SSGD"))
    return [difference_effect("DPSGD less SSGD", "test accuracy (points)", accuracies)]


_LENET = "LeNet-5, 16 learners, batch 4096, lr 0.1 throughout, 20 epochs, three seeds: ours"
figure(
    "sixteen", "DPSGD-2020, section 4.1", "SSGD and DPSGD with 16 learners on all of CIFAR-10",
    "In the large-batch setting DPSGD is better than SSGD at the same rate and batch.",
    _runs, _judge, laptop=_LENET,
)(_draw)  # fmt: skip

"""LocalSGD-2021: accuracy against communication. Only the abstract is at hand: every setting here is ours."""

from __future__ import annotations

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Runs, Scale, runs_of
from landscape.paper.figure import Drawing, compare, figure, mean_and_spread, test_error
from landscape.paper.figures.smoothing import OURS
from landscape.paper.scales import mnist, seeds
from landscape.paper.verdicts import Effect, Rows, difference_effect, pair
from landscape.plots.picture import panels
from landscape.plots.style import color_of, style
from landscape.train.recipes.recipe import Recipe, recipe_of

PERIODS = (1, 4, 16, 64)
NAMED = {"local-sgd": "local SGD", "slowmo": "with slow momentum"}
FORM, AXES = "{algorithm} {period}", {"algorithm": NAMED, "period": PERIODS}
ACCURACY = "test_accuracy_percent"


def _runs(scale: Scale) -> Runs:
    def make(algorithm: str, period: int, seed: int) -> Recipe:
        changes = [f"algorithm.period={period}", "decompose.every=0"]
        return mnist(scale, algorithm, seed, *changes, steps=960)

    return runs_of(FORM, AXES, seeds(scale, 3), make)


def _rounds(run: Checkpoint) -> int:
    """The rounds of communication that a learner waited for."""
    rule = recipe_of(run).rule()
    return sum(rule.communication_cost(t)[1] for t in range(1, run.step + 1))


def _local(context: Context) -> Drawing:
    rows = context.table(
        FORM, AXES, lambda key, run: {"rounds": _rounds(run), ACCURACY: 100 - test_error(run)}
    )
    groups = rows.groupby(["algorithm", "period"])
    means = groups[ACCURACY].mean()
    with style():
        picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
        for marker, (a, name) in zip("os", NAMED.items(), strict=True):
            for ax, x in zip(axes, (PERIODS, groups["rounds"].first()[a]), strict=True):
                look = {"marker": marker, "capsize": 3, "color": color_of(a), "label": name}
                ax.errorbar(x, means[a], groups[ACCURACY].std()[a], **look)
        for ax, label in zip(axes, ("steps between averages H", "communication rounds"), strict=True):
            ax.set_xscale("log", base=4 if ax is axes[0] else 10)
            ax.set_xlabel(label)
        axes[0].set_xticks(PERIODS, [str(h) for h in PERIODS])
        axes[0].set_ylabel("test accuracy of $w_a$ (%)")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    plain, slow = (means[a] for a in NAMED)
    shown = rows.replace({"algorithm": NAMED})
    return Drawing(
        {"": picture},
        rows,
        compare(shown, "test accuracy (%), {algorithm}, H = {period}", ACCURACY, mean_and_spread),
        f"From H = 1 to 64 local SGD loses {plain[1] - plain[64]:.2f} points of accuracy; slow momentum "
        f"changes it by {', '.join(f'{v:+.2f}' for v in slow - plain)} points at H = "
        f"{', '.join(map(str, PERIODS))}.",
    )


def _judge(rows: Rows) -> list[Effect]:
    first, last = PERIODS[0], PERIODS[-1]
    what, ends = "test accuracy (points)", pair(rows, ACCURACY, algorithm="local-sgd", period=(first, last))
    effects = [difference_effect(f"local SGD, H = {first} less H = {last}", what, ends)]
    for h in PERIODS[1:]:
        both = pair(rows, ACCURACY, algorithm=("slowmo", "local-sgd"), period=h)
        effects.append(difference_effect(f"slow momentum less none, H = {h}", what, both))
    return effects


figure(
    "local-sgd", "LocalSGD-2021", "accuracy against communication, local SGD and SlowMo, MNIST",
    "Accuracy falls as learners average less often, and slow momentum wins some of it back.",
    _runs, _judge, laptop=f"n = 8, nB = 2000, lr 0.2, β = 0.5, 960 steps, three seeds; {OURS}", paper=OURS,
)(_local)  # fmt: skip

"""What communication costs: DPSGD-2020's run time, predicted, and LocalSGD-2021's accuracy against rounds.

The settings of the first are in an appendix that is not available; of the second only the abstract is at
hand, and every setting here is ours.
"""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from landscape import plots
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, identity
from landscape.paper.figure import Compared, Drawing, compare_with_paper, figure, mean_and_spread, test_error
from landscape.paper.scales import OURS, mnist_runs
from landscape.paper.verdicts import Effect, Rows, difference_effect, pair
from landscape.plots.picture import panels, shared_legend
from landscape.plots.style import color_of
from landscape.results.training import RunTimes
from landscape.training.planning import calibration, plan
from landscape.training.planning.plan import Costs, Link, Machines, Stragglers
from landscape.training.recipes.recipe import read, recipe_of

# ---- Predicted run time


def _runtime(context: Context) -> Drawing:
    workers = context.pick([2, 4, 8], [2, 4, 8, 16, 32, 64, 128], [8, 16, 32, 64, 128, 256, 512])
    digits = ("digits-dpsgd", "64, 512, 512", "digits, 64-512-512-10")
    mnist = ("mnist-fig2b-dpsgd", "784, 2048, 2048", "MNIST, 784-2048-2048-10")
    name, widths, words = context.pick(digits, mnist, mnist)
    recipe = read(name, [f"model.widths=[{widths}, 10]", f"name='{words}'"])
    machines = Machines(Link(50e-6, 1.25e9), Stragglers(0.2, 1.0))
    mixings = ("full", "ring(1)", "random-matching", "one-peer-exponential")

    @functools.cache  # all numbers of workers compute the same: what else the machine does must not differ
    def costs(local_batch: int) -> Costs:
        return calibration.calibrate(recipe, 1, local_batch, data_dir=context.data_dir)

    (result,) = context.cached(
        RunTimes,
        [],
        {"workers": workers, "recipe": identity(recipe)},
        lambda: plan.predict(recipe, workers, costs, machines, mixings=mixings),
        (plan.predict,),
    )
    rows = _times(result).drop(columns="step_error")
    most = rows[rows["workers"] == workers[-1]]
    last = dict(zip(most["algorithm"] + " " + most["mixing"], most["speedup_over_ssgd"], strict=True))
    best = max(last, key=lambda name: last[name])
    odd = falls(result)
    busy = f" Its times fall with more workers for {', '.join(odd)}: they were measured badly." if odd else ""
    return Drawing(
        {"": plots.draw([result])},
        rows,
        [
            Compared(f"samples/s over SSGD's, {workers[-1]} workers, {name}", f"{value:.2f}")
            for name, value in last.items()
            if name.startswith("dpsgd")
        ],
        f"On {workers[-1]} workers {best} does {last[best]:.2f} times SSGD's samples/s.{busy}",
    )


def _times(result: RunTimes) -> Rows:
    columns = ["workers", "algorithm", "mixing", "step_s", "step_error"]
    table = pd.DataFrame({name: getattr(result, name) for name in columns})
    return table.astype({"workers": int}).assign(speedup_over_ssgd=result.speedup)


def _judge_runtime(rows: Rows) -> list[Effect]:
    why = "predicted by a model from one measurement of the compute; nothing was timed on so many workers"
    best = float(rows["speedup_over_ssgd"].max())
    return [Effect("best topology", "samples/s over SSGD's", (best,), (1.0, np.inf), untested=why)]


def falls(result: RunTimes) -> list[str]:
    """The curves in which a step takes less time on more workers, by more than 1% and the simulation's error.

    More workers have more to wait for: such a curve is of a machine that was busy when it was measured.
    """
    odd = []
    for name, curve in _times(result).groupby(["algorithm", "mixing"], sort=False):
        step, error = curve["step_s"].to_numpy(), curve["step_error"].to_numpy()
        allowed = 0.01 * step[:-1] + 3 * np.hypot(error[:-1], error[1:])
        if (step[:-1] - step[1:] > allowed).any():
            odd.append(" ".join(name).strip())
    return odd


_TIME = "predicted; compute measured here, 10 Gbit/s, 50 µs, stragglers 0.2: model and numbers ours"
figure(
    "runtime", "DPSGD-2020, run time", "predicted time a step against workers",
    "Decentralised steps cost less than an all-reduce and wait less for stragglers.",
    lambda scale: {}, _judge_runtime, smoke=_TIME, laptop=_TIME,
)(_runtime)  # fmt: skip

# ---- Local SGD

PERIODS = (1, 4, 16, 64)
NAMED = {"local-sgd": "local SGD", "slowmo": "with slow momentum"}
FORM, AXES = "{algorithm} {period}", {"algorithm": NAMED, "period": PERIODS}
ACCURACY = "test_accuracy_percent"


def _changes(algorithm: str, period: int) -> list[str]:
    return [f"algorithm.period={period}", "steps=960", "decompose.every=0"]


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
    picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
    for marker, (a, name) in zip("os", NAMED.items(), strict=True):
        for ax, x in zip(axes, (PERIODS, groups["rounds"].first()[a]), strict=True):
            look = {"marker": marker, "capsize": 3, "color": color_of(a), "label": name}
            ax.errorbar(x, means[a], groups[ACCURACY].std()[a], **look)
    for ax, label, base in zip(
        axes, ("steps between averages H", "communication rounds"), (4, 10), strict=True
    ):
        ax.set_xscale("log", base=base)
        ax.set_xlabel(label)
    axes[0].set_xticks(PERIODS, [str(h) for h in PERIODS])
    axes[0].set_ylabel("test accuracy of $w_a$ (%)")
    shared_legend(picture, axes[:1], ncols=2)
    plain, slow = (means[a] for a in NAMED)
    shown = rows.replace({"algorithm": NAMED})
    return Drawing(
        {"": picture},
        rows,
        compare_with_paper(shown, "test accuracy (%), {algorithm}, H = {period}", ACCURACY, mean_and_spread),
        f"From H = 1 to 64 local SGD loses {plain[1] - plain[64]:.2f} points of accuracy; slow momentum "
        f"changes it by {', '.join(f'{v:+.2f}' for v in slow - plain)} points at H = "
        f"{', '.join(map(str, PERIODS))}.",
    )


def _judge_local(rows: Rows) -> list[Effect]:
    what, (first, *longer) = "test accuracy (points)", PERIODS
    ends = pair(rows, ACCURACY, algorithm="local-sgd", period=(first, longer[-1]))
    effects = [difference_effect(f"local SGD, H = {first} less H = {longer[-1]}", what, ends)]
    for h in longer:
        both = pair(rows, ACCURACY, algorithm=("slowmo", "local-sgd"), period=h)
        effects.append(difference_effect(f"slow momentum less none, H = {h}", what, both))
    return effects


figure(
    "local-sgd", "LocalSGD-2021", "accuracy against communication, local SGD and SlowMo, MNIST",
    "Accuracy falls as learners average less often, and slow momentum wins some of it back.",
    mnist_runs(FORM, AXES, 5, "{algorithm}", _changes), _judge_local,
    laptop=f"n = 8, nB = 2000, lr 0.2, β = 0.5, 960 steps, five seeds; {OURS}", paper=OURS,
)(_local)  # fmt: skip

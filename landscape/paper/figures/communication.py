"""What communication costs: DPSGD-2020's run time, predicted, and LocalSGD-2021's accuracy against rounds.

The settings of the first are in an appendix that is not available; of the second only the abstract is at
hand, and every setting here is ours.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd

from landscape import plots
from landscape.paper.context import Context, Ended, identity
from landscape.paper.figure import Compared, Drawing, compare_with_paper, figure, mean_and_spread, test_error
from landscape.paper.verdicts import Effect, Rows, paired_effect, settings
from landscape.plots.picture import panels, shared_legend
from landscape.plots.style import color_of
from landscape.results.training import RunTimes
from landscape.training.planning import calibration, plan
from landscape.training.planning.plan import Costs, Link, Machines, Stragglers
from landscape.training.recipes.recipe import read

# ---- Predicted run time


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


@figure("runtime", _judge_runtime)
def _runtime(context: Context) -> Drawing:
    sizes = context.sizes
    recipe = read(sizes["recipe"], [f"model.widths=[{sizes['widths']}, 10]", f"name='{sizes['name']}'"])
    machines = Machines(Link(50e-6, 1.25e9), Stragglers(0.2, 1.0))
    mixings = ("full", "ring(1)", "random-matching", "one-peer-exponential")

    @functools.cache  # all numbers of workers compute the same: what else the machine does must not differ
    def costs(local_batch: int) -> Costs:
        return calibration.calibrate(recipe, 1, local_batch, data_dir=context.data_dir)

    (result,) = context.cached(
        RunTimes,
        [],
        {"workers": sizes["workers"], "recipe": identity(recipe)},
        lambda: plan.predict(recipe, sizes["workers"], costs, machines, mixings=mixings),
        (plan.predict,),
    )
    rows = _times(result).drop(columns="step_error")
    most = rows[(rows["workers"] == sizes["workers"][-1]) & rows["algorithm"].str.startswith("dpsgd")]
    compared = [
        Compared(
            f"samples/s over SSGD's, {row.workers} workers, {row.algorithm} {row.mixing}",
            f"{row.speedup_over_ssgd:.2f}",
        )
        for row in most.itertuples()
    ]
    odd = falls(result)
    busy = f"Its times fall with more workers for {', '.join(odd)}: they were measured badly." if odd else ""
    return Drawing({"": plots.draw([result])}, rows, compared, busy)


# ---- Local SGD

NAMED = {"local-sgd": "local SGD", "slowmo": "with slow momentum"}
ACCURACY = "test_accuracy_percent"


def _judge_local(rows: Rows) -> list[Effect]:
    what, (first, *longer) = "test accuracy (points)", settings(rows, "period")
    where, ends = f"local SGD, H = {first:g} less H = {longer[-1]:g}", (first, longer[-1])
    effects = [paired_effect(where, what, rows, ACCURACY, algorithm="local-sgd", period=ends)]
    for h in longer:
        where, both = f"slow momentum less none, H = {h:g}", ("slowmo", "local-sgd")
        effects.append(paired_effect(where, what, rows, ACCURACY, algorithm=both, period=h))
    return effects


@figure("local-sgd", _judge_local)
def _local(context: Context) -> Drawing:
    def measure(run: Ended) -> dict[str, Any]:
        rule = run.last.recipe.rule()  # a learner waits for the rounds of communication that it counts
        rounds = sum(rule.communication_cost(t)[1] for t in range(1, run.end.step + 1))
        return {"rounds": rounds, ACCURACY: 100 - test_error(run.end)}

    rows = context.table(measure)
    groups = rows.groupby(["algorithm", "period"])
    means, periods = groups[ACCURACY].mean(), settings(rows, "period")
    picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
    for marker, (a, name) in zip("os", NAMED.items(), strict=True):
        for ax, x in zip(axes, (periods, groups["rounds"].first()[a]), strict=True):
            look = {"marker": marker, "capsize": 3, "color": color_of(a), "label": name}
            ax.errorbar(x, means[a], groups[ACCURACY].std()[a], **look)
    labels = {"steps between averages H": 4, "communication rounds": 10}
    for ax, (label, base) in zip(axes, labels.items(), strict=True):
        ax.set_xscale("log", base=base)
        ax.set_xlabel(label)
    axes[0].set_xticks(periods, [str(h) for h in periods])
    axes[0].set_ylabel("test accuracy of $w_a$ (%)")
    shared_legend(picture, axes[:1], ncols=2)
    what = "test accuracy (%), {algorithm}, H = {period}"
    shown = rows.replace({"algorithm": NAMED})
    return Drawing({"": picture}, rows, compare_with_paper(shown, what, ACCURACY, mean_and_spread))

"""DPSGD-2020's run time against workers, predicted; its settings are in an appendix that is not available."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from landscape import plots
from landscape.paper.context import Context
from landscape.paper.figure import Compared, Drawing, figure
from landscape.paper.verdicts import Effect, Rows, need
from landscape.results.tables import RunTimes
from landscape.train.planning import calibration, plan
from landscape.train.planning.plan import Cluster, Costs, Link, Stragglers
from landscape.train.recipes.recipe import read


def _runtime(context: Context) -> Drawing:
    workers = context.pick([2, 4, 8], [2, 4, 8, 16, 32, 64, 128], [8, 16, 32, 64, 128, 256, 512])
    digits = ("digits-dpsgd", "64, 512, 512", "digits, 64-512-512-10")
    mnist = ("mnist-fig2b-dpsgd", "784, 2048, 2048", "MNIST, 784-2048-2048-10")
    name, widths, words = context.pick(digits, mnist, mnist)
    recipe = read(name, [f"model.widths=[{widths}, 10]", f"name='{words}'"])
    cluster = Cluster(Link(50e-6, 1.25e9), Stragglers(0.2, 1.0))
    mixings = ("full", "ring(1)", "random-matching", "one-peer-exponential")

    @functools.cache  # all numbers of workers compute the same: what else the machine does must not differ
    def costs(local_batch: int) -> Costs:
        return calibration.calibrate(recipe, 1, local_batch, data_dir=context.data_dir)

    (result,) = context.cached(
        RunTimes,
        [],
        {"workers": workers, "recipe": recipe.to_toml()},
        lambda: plan.plan(recipe, workers, costs, cluster, mixings=mixings),
        (plan.plan,),
    )
    rows = _table(result).drop(columns="step_error")
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


def _table(result: RunTimes) -> Rows:
    columns = ["workers", "algorithm", "mixing", "step_s", "step_error"]
    table = pd.DataFrame({name: getattr(result, name) for name in columns})
    return table.astype({"workers": int}).assign(speedup_over_ssgd=result.speedup)


def _judge(rows: Rows) -> list[Effect]:
    need(rows, "speedup_over_ssgd")
    why = "predicted by a model from one measurement of the compute; nothing was timed on so many workers"
    best = float(rows["speedup_over_ssgd"].max())
    return [Effect("best topology", "samples/s over SSGD's", (best,), (1.0, np.inf), untested=why)]


def falls(result: RunTimes) -> list[str]:
    """The curves in which a step takes less time on more workers, by more than 1% and the simulation's error.

    More workers have more to wait for: such a curve is of a machine that was busy when it was measured.
    """
    odd = []
    for name, curve in _table(result).groupby(["algorithm", "mixing"], sort=False):
        step, error = curve["step_s"].to_numpy(), curve["step_error"].to_numpy()
        allowed = 0.01 * step[:-1] + 3 * np.hypot(error[:-1], error[1:])
        if (step[:-1] - step[1:] > allowed).any():
            odd.append(" ".join(name).strip())
    return odd


_TIME = "predicted; compute measured here, 10 Gbit/s, 50 µs, stragglers 0.2: model and numbers ours"
figure(
    "runtime", "DPSGD-2020, run time", "predicted time a step against workers",
    "Decentralised steps cost less than an all-reduce and wait less for stragglers.",
    lambda scale: {}, _judge, smoke=_TIME, laptop=_TIME,
)(_runtime)  # fmt: skip

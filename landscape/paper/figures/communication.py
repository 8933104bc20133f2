"""The costs of communication: DPSGD-2020's run time, predicted and measured, and LocalSGD-2021's accuracy.

The settings of the first are in an appendix that is not available; of the second only the abstract is at
hand, and every setting here is ours.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.figure import Figure

from landscape.core.errors import OperationError
from landscape.paper.compared import compare_with_paper, mean_and_spread
from landscape.paper.context import Context, Ended, identity
from landscape.paper.figure import Drawing, draw_ranges, figure, test_error
from landscape.paper.run_times import Machines, RunTimes, calibrate, measure_steps, predict
from landscape.paper.verdicts import NEGLIGIBLE, Effect, Rows, distinct, paired_effect
from landscape.plots import style
from landscape.plots.picture import finish, panels, points, shared_legend
from landscape.plots.style import color_of, ticks_at
from landscape.results import base
from landscape.training.recipes.recipe import Recipe, read

# ---- Predicted run time


def _times(result: RunTimes) -> Rows:
    columns = ["workers", "algorithm", "mixing", "step_s", "step_error"]
    table = pd.DataFrame({name: getattr(result, name) for name in columns}).astype({"workers": int})
    of_ssgd = table.groupby("workers")["step_s"].transform("first")
    return table.assign(speedup_over_ssgd=of_ssgd / table["step_s"])


def _judge_runtime(rows: Rows) -> list[Effect]:
    why = "predicted by a model from one measurement of the compute; nothing was timed on so many workers"
    best = float(rows["speedup_over_ssgd"].max())
    return [Effect("best topology", "samples/s over SSGD's", (best,), (1.0, np.inf), untested=why)]


def falls(result: RunTimes) -> list[str]:
    """Return the curves in which a step takes less time on more workers, by more than 1% and three errors.

    More workers have more to wait for: such a curve shows that the machine was busy during the measurement.
    """
    falling = []
    for name, curve in _times(result).groupby(["algorithm", "mixing"], sort=False):
        step_s, error = curve["step_s"].to_numpy(), curve["step_error"].to_numpy()
        allowed = 0.01 * step_s[:-1] + 3 * np.hypot(error[:-1], error[1:])
        if (step_s[:-1] - step_s[1:] > allowed).any():
            falling.append(" ".join(name).strip())
    return falling


def _draw_times(result: RunTimes) -> Figure:
    """Draw the seconds of a step against the number of workers, a line for each algorithm and mixing.

    One panel has DPSGD in AWC order, the other in ATC order; both have SSGD and SSGD*. Error bars are one
    standard error of the simulation.
    """
    # SSGD and SSGD* have no mixing. Each mixing of DPSGD has a shade of DPSGD's color and a marker.
    mixings = [mixing for mixing in dict.fromkeys(result.mixing) if mixing]
    shade_of = dict(zip(mixings, style.shades(color_of("dpsgd"), len(mixings)), strict=True))
    marker_of = dict(zip(mixings, "sD^v", strict=False))
    picture, axes = panels(1, 2, 4.6, 4.0, sharey="row")
    for order, ax in zip(("awc", "atc"), axes, strict=True):
        for (algorithm, mixing), rows in _times(result).groupby(["algorithm", "mixing"], sort=False):
            if mixing and not algorithm.endswith(order):
                continue
            look: Any = {"lw": 2.2, "ls": "--" if algorithm == "ssgd*" else "-", "marker": "o"}
            if mixing:
                look = {"lw": 1.2, "ls": "-", "marker": marker_of[mixing]}
            color = shade_of.get(mixing, color_of(algorithm))
            workers, step_s, error = (rows[name].to_numpy() for name in ("workers", "step_s", "step_error"))
            legend_name = f"DPSGD {mixing}" if mixing else style.paper_name(algorithm)
            points(ax, workers, step_s, error, color, legend_name, capsize=0, mfc="none", **look)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(ticker.ScalarFormatter())
        ax.set_xticks(np.unique(result.workers).astype(int))
        ax.set(xlabel="workers (log scale)", title=f"DPSGD, {order.upper()} order")
    style.log_axis(axes[0].yaxis)
    axes[0].set_ylabel("time per step (s, log scale)")
    text = result.label.replace("\n", "; link: ") + "."  # the label's second line describes the link
    # The legend has the entries of the first panel. The second panel has the same entries.
    return finish(picture, "Predicted time per step: SSGD, and DPSGD by topology", text, axes[:1], ncols=3)


@figure("runtime", _judge_runtime)
def _runtime(context: Context) -> Drawing:
    sizes = context.sizes
    recipe = read(sizes["recipe"], [f"model.widths=[{sizes['widths']}, 10]", f"name='{sizes['name']}'"])
    machines = Machines(latency=50e-6, bandwidth=1.25e9, straggler=0.2)
    mixings = ("full", "ring(1)", "random-matching", "one-peer-exponential")

    def make() -> RunTimes:
        costs = calibrate(recipe, recipe.local_batch, data_dir=context.data_dir)
        return predict(recipe, sizes["workers"], costs, machines, mixings)

    settings = {"workers": sizes["workers"], "recipe": identity(recipe)}
    (result,) = context.cached(RunTimes, points=[], settings=settings, make=make, functions=[predict])
    rows = _times(result).drop(columns="step_error")
    most = rows[(rows["workers"] == sizes["workers"][-1]) & rows["algorithm"].str.startswith("dpsgd")]
    what = "samples/s over SSGD's, {workers} workers, {algorithm} {mixing}"
    compared = compare_with_paper(most, what, "speedup_over_ssgd")
    odd = falls(result)
    busy = f"Its times fall with more workers for {', '.join(odd)}: they were measured badly." if odd else ""
    return Drawing({"": _draw_times(result)}, rows, compared, busy)


# ---- Run time over loopback, measured

RULES = {
    "ssgd": "{name='ssgd'}",
    "dpsgd awc": "{name='dpsgd', mixing='random-matching'}",
    "dpsgd atc": "{name='dpsgd', mixing='random-matching', order='atc'}",
}
LOCAL_BATCH = 64


def _recipe(rule: str, processes: int, widths: str) -> Recipe:
    samples = f"samples=1000, dimension={widths.partition(',')[0]}, classes=10"
    return read("digits-ssgd", [
        f"algorithm={RULES[rule]}", f"learners={processes}", f"batch={LOCAL_BATCH * processes}", "lr=0.01",
        f"model={{name='mlp', widths=[{widths}]}}", f"data={{name='synthetic', {samples}}}", "steps=1000000",
        "decompose.every=0", "evaluate.every=0",
    ])  # fmt: skip


def measure_times(path: str, processes: int, widths: str, rounds: int, steps: int, bandwidth: float) -> None:
    """Write the times of a step as predicted and as measured to ``path``, two tables a round.

    ``bandwidth``: of each process's link (bytes/s), for the prediction; 0: as it is measured.
    """
    recipes, tables = {rule: _recipe(rule, processes, widths) for rule in RULES}, list[RunTimes]()
    for costs, link, seconds in measure_steps(recipes, processes, rounds, steps):
        machines = Machines(link["latency"], bandwidth or link["bandwidth"])
        predicted = predict(recipes["ssgd"], [processes], costs, machines, ["random-matching"])
        step_s = predicted.step_s.copy()
        for rule, value in seconds.items():
            step_s[predicted.algorithm.index(rule)] = value
        tables += [predicted, dataclasses.replace(predicted, step_s=step_s, step_error=0 * step_s)]
    base.save(tables, path)


def _measured(**how: Any) -> list[RunTimes]:
    """Return the tables of :func:`measure_times`; loopback has ``bandwidth`` for each process.

    Raises:
        OperationError: it failed, or this machine permits no network namespace with tc.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, rate = f"{folder}/times.h5", 8 * how["processes"] * how["bandwidth"]
        code = f"from {__name__} import measure_times; measure_times({path!r}, **{how!r})"
        command = [sys.executable, "-c", code]
        if rate:
            queue = f"root tbf rate {rate:.0f}bit burst 1mb latency 200ms"
            shape = f'ip link set lo up && tc qdisc add dev lo {queue} && exec "$0" "$@"'
            own_user = ["--map-root-user"] if os.geteuid() else []
            command = ["unshare", "--net", *own_user, "sh", "-c", shape, *command]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            raise OperationError(
                f"processes over a slow loopback cannot be timed here ({message}); run it as root, with "
                "unshare, ip and tc installed"
            ) from error
        return [times for times in base.load_results(path) if isinstance(times, RunTimes)]


def _judge_loopback(rows: Rows) -> Iterator[Effect]:
    what = "time per step, SSGD / DPSGD"
    how: dict[str, Any] = {"times": True, "margin": NEGLIGIBLE}
    for processes, rule in itertools.product(distinct(rows, "processes"), list(RULES)[1:]):
        where, pair = f"{processes:g} processes, {rule}", ("ssgd", rule)
        yield paired_effect(where, what, rows, "measured_s", processes=processes, algorithm=pair, **how)


@figure("runtime-loopback", _judge_loopback)
def _loopback(context: Context) -> Drawing:
    """Draw the predicted and the measured seconds of a step against the number of processes, for each rule.

    Lines are medians of the predictions over the rounds of measurement. Points are medians of the measured
    seconds, with bars for the range.
    """
    tables = []
    for processes in context.sizes["processes"]:
        options = {**context.sizes, "processes": processes}
        make = functools.partial(_measured, **options)
        run_times = context.cached(RunTimes, points=[], settings=options, make=make, functions=[predict])
        # Each round has two results, the prediction and the measurement. In the table, the number of a round
        # is in the column "seed".
        rounds = zip(run_times[::2], run_times[1::2], strict=True)
        for round_number, (predicted, measured) in enumerate(rounds):
            columns = {
                "processes": processes,
                "seed": round_number,
                "measured_s": _times(measured).set_index("algorithm")["step_s"],
                "predicted_s": _times(predicted).set_index("algorithm")["step_s"],
            }
            tables.append(pd.DataFrame(columns).loc[list(RULES)].reset_index(names="algorithm"))
    rows = pd.concat(tables, ignore_index=True)
    rows["predicted_over_measured"] = rows["predicted_s"] / rows["measured_s"]
    process_counts = distinct(rows, "processes")
    picture, (ax,) = panels(1, 1, 6.4, 3.7)
    for (rule, rule_rows), marker in zip(rows.groupby("algorithm", sort=False), "osD", strict=True):
        by_count = rule_rows.groupby("processes")
        color, is_atc = color_of(rule), rule.endswith("atc")
        label = f"{rule.upper()}, predicted"
        predicted_s = by_count["predicted_s"].median()
        ax.plot(process_counts, predicted_s, color=color, ls=":" if is_atc else "--", label=label)
        look: Any = {"color": color, "marker": marker, "ls": "none", "mfc": "none" if is_atc else color}
        draw_ranges(ax, by_count["measured_s"], label=f"{rule.upper()}, measured", **look)
    ax.set(xscale="log", ylim=(0, None), xlabel="processes", ylabel="time per step (s)")
    ax.locator_params(axis="y", nbins=5)
    ticks_at(ax.xaxis, process_counts)
    shared_legend(picture, [ax], ncols=3)
    what = "predicted / measured time per step, {algorithm}, {processes} processes"
    return Drawing({"": picture}, rows, compare_with_paper(rows, what, "predicted_over_measured"))


# ---- Local SGD

NAMED = {"local-sgd": "local SGD", "slowmo": "with slow momentum"}
ACCURACY = "test_accuracy_percent"


def _judge_local(rows: Rows) -> Iterator[Effect]:
    what, (first, *longer) = "test accuracy (points)", distinct(rows, "period")
    where, ends = f"local SGD, with H = {first:g} − with H = {longer[-1]:g}", (first, longer[-1])
    yield paired_effect(where, what, rows, ACCURACY, algorithm="local-sgd", period=ends)
    for h in longer:
        where, pair = f"with − without slow momentum, averages every {h:g} steps", ("slowmo", "local-sgd")
        yield paired_effect(where, what, rows, ACCURACY, algorithm=pair, period=h)


@figure("local-sgd", _judge_local)
def _local(context: Context) -> Drawing:
    def measure(run: Ended) -> dict[str, Any]:
        rule = run.last.recipe.rule()  # a learner waits for the rounds of communication that it counts
        rounds = sum(rule.communication_cost(t)[1] for t in range(1, run.end.step + 1))
        return {"rounds": rounds, ACCURACY: 100 - test_error(run.end)}

    rows = context.table(measure)
    groups = rows.groupby(["algorithm", "period"])
    means, periods = groups[ACCURACY].mean(), distinct(rows, "period")
    rounds = groups["rounds"].first()["local-sgd"]
    picture, (ax,) = panels(1, 1, 6.8, 3.7)
    for marker, (a, name) in zip("os", NAMED.items(), strict=True):
        look = {"marker": marker, "capsize": 3, "color": color_of(a), "label": name}
        ax.errorbar(periods, means[a], groups[ACCURACY].std()[a], **look)
    ax.set_xscale("log")
    ticks_at(ax.xaxis, periods, [f"{h}\n{rounds[h]:g}" for h in periods])
    ax.set(xlabel="steps between averages\nrounds of communication", ylabel="test accuracy of $w_a$ (%)")
    shared_legend(picture, [ax], ncols=2)
    what = "test accuracy (%), {algorithm}, H = {period}"
    named_rows = rows.replace({"algorithm": NAMED})
    return Drawing({"": picture}, rows, compare_with_paper(named_rows, what, ACCURACY, mean_and_spread))

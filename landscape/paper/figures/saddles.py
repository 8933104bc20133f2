"""DPSGD-2020's saddles and run time, whose settings are in an appendix that is not available."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from landscape import plots
from landscape.paper.figure import Compared, Drawing, Work, figure, summary
from landscape.paper.verdicts import Effect, Rows, by_seed, column, ratio
from landscape.results.escape import Escape
from landscape.results.run_times import RunTimes
from landscape.train.experiments import saddles
from landscape.train.loop import Trainer
from landscape.train.planning import calibration, plan
from landscape.train.planning.run_time import Cluster, Link, Stragglers
from landscape.train.recipe import read


def _saddles(work: Work) -> Drawing:
    values: dict[str, list[float]] = {
        "dimension": [2, 4, 8, 16],
        "noise": [1e-4, 1e-3, 1e-2, 1e-1],
        "lr": [0.05, 0.1, 0.2, 0.4],
    }
    if work.scale == "smoke":
        values = {"dimension": [2, 8]}
    many = work.pick(6, 20, 40)
    algorithms = {
        "ssgd": ["algorithm={name='ssgd'}"],
        "ssgd*": ["algorithm={name='ssgd*', sigma=0.001}"],
        "dpsgd": [],
    }
    results = work.cached(
        Escape,
        [],
        {"values": values, "seeds": many},
        lambda: [
            saddles.sweep(name, list(chosen), algorithms, range(many)) for name, chosen in values.items()
        ],
        (saddles.sweep, Trainer),
    )
    rows: list[dict[str, Any]] = [
        {"vary": r.vary, "value": float(v), "algorithm": name, "seed": s, "steps": min(float(steps), r.steps)}
        for r in results
        for a, name in enumerate(r.algorithms)
        for k, v in enumerate(r.values)
        for s, steps in enumerate(r.times[a, k])
    ]
    ratio = [float(np.median(effect.values)) for effect in _judge_saddles(rows)]
    return Drawing(
        {"": plots.draw(results)},
        rows,
        [Compared("steps of SSGD / steps of DPSGD to leave, median over the seeds", summary(ratio))],
        f"DPSGD leaves the saddle {np.median(ratio):.2f} times as fast as SSGD (median over the settings, "
        f"{min(ratio):.2f} to {max(ratio):.2f}).",
    )


def _judge_saddles(rows: Rows) -> list[Effect]:
    """An effect for each setting; of a run that does not leave, all of its steps count."""
    effects = []
    settings = zip(column(rows, "vary"), column(rows, "value"), strict=True)
    for vary, value in dict.fromkeys(settings):
        steps = {a: by_seed(rows, "steps", vary=vary, value=value, algorithm=a) for a in ("ssgd", "dpsgd")}
        times = ratio(steps["ssgd"], steps["dpsgd"])
        effects.append(
            Effect(f"{vary} {value:g}", "steps of SSGD / of DPSGD", times, (1.0, np.inf), ratio=True)
        )
    return effects


_SADDLE = "the paper's problem is in an appendix that is not available: the family of saddles is ours"
figure(
    "saddles",
    "DPSGD-2020, section 2",
    "steps to leave a saddle",
    "DPSGD's noise leaves saddles faster than SSGD's.",
    lambda scale: {},
    _judge_saddles,
    smoke="two dimensions, six seeds",
    laptop=_SADDLE,
    paper=_SADDLE,
)(_saddles)


def _runtime(work: Work) -> Drawing:
    workers = work.pick([2, 4, 8], [2, 4, 8, 16, 32, 64, 128], [8, 16, 32, 64, 128, 256, 512])
    recipe = (
        read("digits-dpsgd", ["model.widths=[64, 512, 512, 10]", "name='digits, 64-512-512-10'"])
        if work.scale == "smoke"
        else read(
            "mnist-fig2b-dpsgd", ["model.widths=[784, 2048, 2048, 10]", "name='MNIST, 784-2048-2048-10'"]
        )
    )
    cluster = Cluster(Link(50e-6, 1.25e9), Stragglers(0.2, 1.0))

    @functools.cache  # all numbers of workers compute the same: what else the machine does must not differ
    def costs(local_batch: int) -> calibration.Costs:
        return calibration.calibrate(recipe, 1, local_batch, data_dir=work.cache.data_dir)

    def make() -> RunTimes:
        return plan.plan(
            recipe,
            workers,
            costs,
            cluster,
            mixings=("full", "ring(1)", "random-matching", "one-peer-exponential"),
        )

    result = work.cached(RunTimes, [], {"workers": workers, "recipe": recipe.to_toml()}, make, (plan.plan,))[
        0
    ]
    rows: list[dict[str, Any]] = [
        {"workers": int(w), "algorithm": a, "mixing": m, "step_s": float(s), "speedup_over_ssgd": float(x)}
        for w, a, m, s, x in zip(
            result.workers, result.algorithm, result.mixing, result.step_s, result.speedup, strict=True
        )
    ]
    last = {
        f"{r['algorithm']} {r['mixing']}": r["speedup_over_ssgd"] for r in rows if r["workers"] == workers[-1]
    }
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


def _judge_runtime(rows: Rows) -> list[Effect]:
    why = "predicted by a model from one measurement of the compute; nothing was timed on so many workers"
    best = max(float(v) for v in column(rows, "speedup_over_ssgd"))
    return [Effect("best topology", "samples/s over SSGD's", (best,), (1.0, np.inf), untested=why)]


def falls(result: RunTimes) -> list[str]:
    """The curves in which a step takes less time on more workers, by more than 1% and the simulation's error.

    More workers have more to wait for: such a curve is of a machine that was busy when it was measured.
    """
    curves: dict[str, list[int]] = {}
    for i, words in enumerate(zip(result.algorithm, result.mixing, strict=True)):
        curves.setdefault(" ".join(words).strip(), []).append(i)
    odd = []
    for name, rows in curves.items():
        step, error = result.step_s[rows], result.step_error[rows]
        allowed = 0.01 * step[:-1] + 3 * np.hypot(error[:-1], error[1:])
        if (step[:-1] - step[1:] > allowed).any():
            odd.append(name)
    return odd


_TIME = "predicted; compute measured here, 10 Gbit/s, 50 µs, stragglers 0.2: model and numbers ours"
figure(
    "runtime",
    "DPSGD-2020, run time",
    "predicted time a step against workers",
    "Decentralised steps cost less than an all-reduce and wait less for stragglers.",
    lambda scale: {},
    _judge_runtime,
    smoke=_TIME,
    laptop=_TIME,
    paper=_TIME,
)(_runtime)

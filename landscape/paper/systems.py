"""DPSGD-2020's saddles and run time, whose settings are in an appendix that is not available."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape import plots
from landscape.escape import Escape
from landscape.paper.figure import (
    Compared,
    Drawing,
    Work,
    figure,
    summary,
)
from landscape.runtime import Link, RunTimes, Stragglers
from landscape.train import calibrate, escape, plan
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
    results = work.keep(
        Escape,
        [],
        {"values": values, "seeds": many},
        lambda: [escape.sweep(name, list(chosen), algorithms, many) for name, chosen in values.items()],
    )
    rows: list[dict[str, Any]] = [
        {
            "vary": r.vary,
            "value": float(v),
            "algorithm": name,
            "median_steps": float(r.median[a, k]),
            "low": float(r.band()[0][a, k]),
            "high": float(r.band()[1][a, k]),
        }
        for r in results
        for a, name in enumerate(r.algorithms)
        for k, v in enumerate(r.values)
    ]
    ratio = [
        s["median_steps"] / d["median_steps"]
        for s in rows
        for d in rows
        if s["algorithm"] == "ssgd"
        and d["algorithm"] == "dpsgd"
        and (s["vary"], s["value"]) == (d["vary"], d["value"])
    ]
    return Drawing(
        {"": plots.draw(results, title=work.title)},
        rows,
        [Compared("steps of SSGD / steps of DPSGD to leave", summary(ratio))],
        f"DPSGD leaves the saddle {np.median(ratio):.2f} times as fast as SSGD (median over the settings, "
        f"{min(ratio):.2f} to {max(ratio):.2f}).",
        bool(np.median(ratio) > 1),
    )


_SADDLE = "the paper's problem is in an appendix that is not available: the family of saddles is ours"
figure(
    "saddles",
    "DPSGD-2020, section 2",
    "steps to leave a saddle",
    "DPSGD's noise leaves saddles faster than SSGD's.",
    lambda scale: {},
    smoke="two dimensions, six seeds",
    laptop=_SADDLE,
    paper=_SADDLE,
)(_saddles)


def _runtime(work: Work) -> Drawing:
    workers = work.pick([2, 4, 8], [2, 4, 8, 16, 32, 64, 128], [8, 16, 32, 64, 128, 256, 512])
    recipe = (
        read("digits-dpsgd", ["model.widths=[64, 512, 512, 10]"])
        if work.scale == "smoke"
        else read("mnist-fig2b-dpsgd", ["model.widths=[784, 2048, 2048, 10]"])
    )
    link = Link(50e-6, 1.25e9)

    def make() -> RunTimes:
        return plan.plan(
            recipe,
            workers,
            lambda local: calibrate.calibrate(recipe, 1, local, data_dir=work.shop.data_dir),
            link,
            stragglers=Stragglers(0.2, 1.0),
            mixings=("full", "ring(1)", "random-matching", "one-peer-exponential"),
        )

    result = work.keep(RunTimes, [], {"workers": workers, "recipe": recipe.to_toml()}, make)[0]
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
    return Drawing(
        {"": plots.draw([result], title=work.title)},
        rows,
        [
            Compared(f"samples/s over SSGD's, {workers[-1]} workers, {name}", f"{value:.2f}")
            for name, value in last.items()
            if name.startswith("dpsgd")
        ],
        f"On {workers[-1]} workers {best} does {last[best]:.2f} times SSGD's samples/s.",
        last[best] > 1,
    )


_TIME = "predicted; compute measured here, 10 Gbit/s, 50 µs, stragglers 0.2: model and numbers ours"
figure(
    "runtime",
    "DPSGD-2020, run time",
    "predicted time a step against workers",
    "Decentralised steps cost less than an all-reduce and wait less for stragglers.",
    lambda scale: {},
    smoke=_TIME,
    laptop=_TIME,
    paper=_TIME,
)(_runtime)

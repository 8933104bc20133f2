"""DPSGD-2021 and LocalSGD-2021: what their abstracts claim.

Of these papers only the abstracts are at hand: every setting here is ours.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from landscape import plots
from landscape.analysis.smoothing import smoothing
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import (
    Compared,
    Drawing,
    Point,
    Runs,
    Scale,
    Work,
    figure,
    mean_and_spread,
    summary,
    test_error,
)
from landscape.paper.scales import SMOKE_NOTE, mnist, seeds
from landscape.paper.verdicts import Effect, Rows, by_seed, difference
from landscape.plots.picture import panels
from landscape.plots.style import color_of, style
from landscape.results.smoothing import Smoothing
from landscape.train.experiments import continuation
from landscape.train.loop import recipe_of

OURS = "only the abstract is at hand: all settings are ours"

# ---- DPSGD-2021: smoothing and the self-adjusting rate


def _smoothing_runs(scale: Scale) -> Runs:
    return {f"{a}/{s}": mnist(scale, f"fig2a-{a}", s) for a in ("ssgd", "dpsgd") for s in seeds(scale, 3)}


def _smoothings(work: Work, key: str) -> list[Smoothing]:
    points = work.points(key)
    pairs, samples = work.pick((2, 200), (16, 10_000), (64, 60_000))
    results = []
    for point in (points[0], points[-1]):

        def make(point: Point = point) -> Smoothing:
            run = point.load()
            route = continuation.mean_path(run, continuation.STEPS, data_dir=work.cache.data_dir)
            return smoothing(
                work.problem(point, "train").subset(slice(samples)),
                run.weights,
                pairs=pairs,
                path=route,
                lr=run.lr,
                alpha_e=continuation.effective_rate(run),
                split="train",
                label=point.label,
            )

        by = (smoothing, continuation.mean_path)
        results += work.cached(Smoothing, point, {"pairs": pairs, "samples": samples}, make, by)
    return results


def _smoothing(work: Work) -> Drawing:
    results = [
        r for a in ("ssgd", "dpsgd") for s in seeds(work.scale, 3) for r in _smoothings(work, f"{a}/{s}")
    ]
    rows = []
    for r in results:
        rows.append(
            {
                "checkpoint": r.label,
                "lambda_max": r.lambda_max,
                "lambda_smoothed": float(r.lambda_smooth[0]),
                "standard_error": float(r.lambda_smooth_se[0]),
                "lambda_smoothed_isotropic": float(r.lambda_smooth[1]),
                "tr_H_Sigma": r.trace_hs,
                "consensus_distance": r.consensus,
                "alpha": r.lr,
                "alpha_e": r.alpha_e,
                "share_along_sharpest": float(r.share[0]),
            }
        )
    compared = [
        Compared(
            f"λ_max smoothed / λ_max, {r.label}",
            f"{r.lambda_smooth[0] / r.lambda_max:.3f} ± {r.lambda_smooth_se[0] / abs(r.lambda_max):.3f}",
        )
        for r in results
    ]
    first = [r for r in results if ", seed 0," in r.label]
    early = [r for r in results if r.label.startswith("dpsgd")][::2]
    late = [r for r in results if r.label.startswith("dpsgd")][1::2]
    ratio = {
        when: [r.lambda_smooth[0] / r.lambda_max for r in rs]
        for when, rs in (("early", early), ("late", late))
    }
    return Drawing(
        {"": plots.draw(first)},
        rows,
        compared,
        f"Smoothed by DPSGD's measured spread λ_max is {summary(ratio['early'], '.3f')} of the loss's own "
        f"early in training and {summary(ratio['late'], '.3f')} at the end; below 1 the spread flattens the "
        "loss.",
    )


def _judge_smoothing(rows: Rows) -> list[Effect]:
    """Of DPSGD's checkpoints, the first and the last of each seed."""
    runs: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        found = re.fullmatch(r"dpsgd, seed (\d+), step .*", str(row["checkpoint"]))
        if found:
            runs.setdefault(float(found[1]), []).append(row)
    effects = []
    for k, when in ((0, "early"), (-1, "at the end")):
        flat = tuple(run[k]["lambda_smoothed"] / run[k]["lambda_max"] for run in runs.values())
        effects.append(
            Effect(when, "λ_max of the smoothed loss / of the loss", flat, (-np.inf, 1.0), ratio=True)
        )
    low = tuple(run[0]["alpha_e"] / run[0]["alpha"] for run in runs.values())
    effects.append(Effect("early", "effective rate α_e / α", low, (-np.inf, 1.0)))
    return effects


figure(
    "smoothing",
    "DPSGD-2021",
    "the loss smoothed by the learners' spread; the rates it allows, α and α_e",
    "The spread smooths the loss, hence allows a larger rate; the effective rate adjusts itself to the "
    "landscape.",
    _smoothing_runs,
    _judge_smoothing,
    smoke=SMOKE_NOTE,
    laptop=f"Figure 2(a), early (a tenth) and at the end, 10,000 training samples; {OURS}",
    paper=f"Figure 2(a); {OURS}",
    weights=True,
)(_smoothing)

# ---- LocalSGD-2021

PERIODS = (1, 4, 16, 64)


def _local_runs(scale: Scale) -> Runs:
    return {
        f"{a} {h}/{s}": mnist(scale, a, s, f"algorithm.period={h}", "decompose.every=0", steps=960)
        for a, h, s in itertools.product(("local-sgd", "slowmo"), PERIODS, seeds(scale, 3))
    }


def _rounds(run: Checkpoint) -> int:
    """The rounds of communication that a learner waited for."""
    rule = recipe_of(run).rule()
    return sum(rule.communication_cost(t)[1] for t in range(1, run.step + 1))


def _local(work: Work) -> Drawing:
    named = {"local-sgd": "local SGD", "slowmo": "with slow momentum"}
    rows: list[dict[str, Any]] = []
    means: dict[str, list[float]] = {}
    with style():
        picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
        for k, (a, name) in enumerate(named.items()):
            groups = [work.group(f"{a} {h}") for h in PERIODS]
            accuracy = [[100 - test_error(run) for run in runs] for runs in groups]
            rounds = [_rounds(runs[0]) for runs in groups]
            means[a] = [float(np.mean(v)) for v in accuracy]
            for ax, x in zip(axes, (PERIODS, rounds), strict=True):
                ax.errorbar(
                    x,
                    means[a],
                    [np.std(v, ddof=1) for v in accuracy],
                    marker="os"[k],
                    capsize=3,
                    color=color_of(a),
                    label=name,
                )
            rows += [
                {"algorithm": a, "period": h, "seed": s, "rounds": r, "test_accuracy_percent": v}
                for h, r, vs in zip(PERIODS, rounds, accuracy, strict=True)
                for s, v in enumerate(vs)
            ]
        for ax, label in zip(axes, ("steps between averages H", "communication rounds"), strict=True):
            ax.set_xscale("log", base=4 if ax is axes[0] else 10)
            ax.set_xlabel(label)
        axes[0].set_xticks(PERIODS, [str(h) for h in PERIODS])
        axes[0].set_ylabel("test accuracy of $w_a$ (%)")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    compared = [
        Compared(
            f"test accuracy (%), {named[a]}, H = {h}",
            mean_and_spread(
                [r["test_accuracy_percent"] for r in rows if (r["algorithm"], r["period"]) == (a, h)]
            ),
        )
        for a, h in itertools.product(named, PERIODS)
    ]
    falls = means["local-sgd"][0] - means["local-sgd"][-1]
    slow = [b - a for a, b in zip(means["local-sgd"], means["slowmo"], strict=True)]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"From H = 1 to 64 local SGD loses {falls:.2f} points of accuracy; slow momentum changes it by "
        f"{', '.join(f'{v:+.2f}' for v in slow)} points at H = {', '.join(map(str, PERIODS))}.",
    )


def _judge_local(rows: Rows) -> list[Effect]:
    accuracy = {
        (a, h): by_seed(rows, "test_accuracy_percent", algorithm=a, period=h)
        for a, h in itertools.product(("local-sgd", "slowmo"), PERIODS)
    }
    first, last = PERIODS[0], PERIODS[-1]
    lost = difference(accuracy["local-sgd", first], accuracy["local-sgd", last])
    effects = [Effect(f"local SGD, H = {first} less H = {last}", "test accuracy (points)", lost)]
    for h in PERIODS[1:]:
        won = difference(accuracy["slowmo", h], accuracy["local-sgd", h])
        effects.append(Effect(f"slow momentum less none, H = {h}", "test accuracy (points)", won))
    return effects


figure(
    "local-sgd",
    "LocalSGD-2021",
    "accuracy against communication, local SGD and SlowMo, MNIST",
    "Accuracy falls as learners average less often, and slow momentum wins some of it back.",
    _local_runs,
    _judge_local,
    smoke=SMOKE_NOTE,
    laptop=f"n = 8, nB = 2000, lr 0.2, β = 0.5, 960 steps, three seeds; {OURS}",
    paper=OURS,
)(_local)

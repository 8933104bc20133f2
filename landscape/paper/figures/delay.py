"""Delay-2019: the stability boundary, and which rates leave a trained minimum. All settings are ours."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from matplotlib import ticker

from landscape import plots, stability
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary
from landscape.paper.figures.smoothing import OURS
from landscape.paper.scales import SMOKE_NOTE
from landscape.paper.verdicts import Effect, Rows, by_seed, column, measured, select
from landscape.plots.picture import panels
from landscape.plots.stability import without_bridge
from landscape.plots.style import style
from landscape.results.minima import Minima
from landscape.train.experiments.minima import minima
from landscape.train.loop import recipe_of
from landscape.train.recipe import read

# ---- Delay-2019: the boundary

DELAYS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PRINTED = {
    (0.0, "ordinary"): (1, 0.4450, 0.2091, 0.0499),
    (0.9, "ordinary"): (0.1, 0.0348, 0.0158, 0.0042),
    (0.9, "shifted"): (0.19, 0.0648, 0.0279, 0.0063),
}


def _boundary(work: Work) -> Drawing:
    named = {
        (0.0, "ordinary"): "no momentum",
        (0.9, "ordinary"): "momentum 0.9",
        (0.9, "shifted"): "shifted momentum 0.9",
    }
    rows, compared, slopes = list[dict[str, Any]](), list[Compared](), list[float]()
    with style():
        picture, (ax,) = panels(1, 1, 6.8, 3.9)
        for k, ((m, form), label) in enumerate(named.items()):
            limits = [stability.max_stable_step(delay=tau, momentum=m, form=form) for tau in DELAYS]
            ax.plot(*without_bridge(np.array(DELAYS), np.array(limits)), marker="osD"[k], ms=4, label=label)
            rows += [
                {"momentum": m, "form": form, "delay": t, "limit": v}
                for t, v in zip(DELAYS, limits, strict=True)
            ]
            slopes.append(float(np.polyfit(np.log(DELAYS[-5:]), np.log(limits[-5:]), 1)[0]))
            for tau, value in zip((1, 3, 7, 31), PRINTED[m, form], strict=True):
                here = stability.max_stable_step(delay=tau, momentum=m, form=form)
                compared.append(
                    Compared(f"largest ηλ, τ = {tau}, {label} (known value)", f"{here:.4f}", f"{value:.4f}")
                )
        ax.plot(
            DELAYS[1:],
            [np.pi / (2 * tau + 1) for tau in DELAYS[1:]],
            color="#777777",
            lw=0.9,
            ls=":",
            label="π/(2τ + 1)",
        )
        ax.set_xscale("symlog", base=2, linthresh=1)
        ax.set_yscale("log")
        ax.set_xticks([0, 1, 2, 4, 8, 16, 32, 64], ["0", "1", "2", "4", "8", "16", "32", "64"])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        ax.set_xlabel("delay τ (steps)")
        ax.set_ylabel("largest stable ηλ")
        picture.legend(loc="outside lower center", ncols=2)
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"For large delays the limit falls as τ to the power {', '.join(f'{s:.2f}' for s in slopes)} (no, "
        "ordinary, shifted momentum): the rate must be inversely proportional to the delay. Shifted "
        "momentum allows more than ordinary.",
    )


def _judge_boundary(rows: Rows) -> list[Effect]:
    """Exact: no seed enters."""
    effects, limits = [], dict[tuple[float, str], dict[float, float]]()
    for m, form in ((0.0, "ordinary"), (0.9, "ordinary"), (0.9, "shifted")):
        chosen = select(rows, momentum=m, form=form)
        limits[m, form] = {float(row["delay"]): float(row["limit"]) for row in chosen}
        tau, limit = np.log([list(part)[-5:] for part in (limits[m, form], limits[m, form].values())])
        slope = float(np.polyfit(tau, limit, 1)[0])
        name = f"{form} momentum {m:g}" if m else "no momentum"
        effects.append(Effect(name, "power of τ, long delays", (slope,), (-1.15, -0.85), exact=True))
    shifted, ordinary = limits[0.9, "shifted"], limits[0.9, "ordinary"]
    delayed = tuple(shifted[tau] / ordinary[tau] for tau in shifted if tau)
    effects.append(
        Effect("all delays", "limit of shifted / ordinary momentum", delayed, (1.0, np.inf), exact=True)
    )
    return effects


_EXACT = "from the characteristic polynomial; nothing is trained"
figure(
    "delay-boundary",
    "Delay-2019",
    "the largest stable ηλ against delay, three forms of momentum",
    "At high delay the rate must be inversely proportional to it; momentum should be off, or shifted.",
    lambda scale: {},
    _judge_boundary,
    smoke=_EXACT,
    laptop=_EXACT,
    paper=_EXACT,
)(_boundary)


# ---- Delay-2019: minima stability


def _minimum(scale: Scale) -> Runs:
    changes = ["steps=600", "model.widths=[64, 50, 50, 10]", "data={name='digits'}", "batch=1437"]
    small = [*changes, "schedule.milestones=[]", "monitor.sharpness=0"] if scale == "smoke" else []
    return {
        f"gd/{s}": read("mnist-minimum", [*small, f"seed={s}"]) for s in range(1 if scale == "smoke" else 3)
    }


def _minima_of(work: Work, key: str) -> Minima:
    delays, tol = work.pick([0, 4], DELAYS_TRIED, DELAYS_TRIED), work.pick(0.3, 0.07, 0.07)
    point = work.last(key)
    decay = float(recipe_of(work.end(key)).optimizer["weight_decay"])

    def make() -> Minima:
        problem = work.problem(point, "train")
        return minima(problem, delays, weight_decay=decay, tol=tol, split="train", label=point.label)

    return work.cached(Minima, point, {"delays": delays, "tol": tol}, make, (minima,))[0]


def _delay_minima(work: Work) -> Drawing:
    """Full-batch training with delay, close to a trained minimum: the largest rate that stays there."""
    results = {work.end(key).seed: _minima_of(work, key) for key in work.runs}
    first = results[0]
    forms = ("no momentum", f"momentum {first.momentum:g}", f"shifted momentum {first.momentum:g}")
    rows: list[dict[str, Any]] = [
        {
            "seed": seed,
            "delay": int(tau),
            "form": form,
            "largest_lr_that_stays": float(result.boundary[f, k]),
            "predicted_lr": float(result.predicted[f, k]),
            "ratio": float(result.boundary[f, k] / result.predicted[f, k]),
        }
        for seed, result in results.items()
        for f, form in enumerate(forms)
        for k, tau in enumerate(result.delay)
    ]
    ratio = {form: [r["ratio"] for r in rows if r["form"] == form] for form in forms}
    worst = max(abs(r["ratio"] - 1) for r in rows)
    return Drawing(
        {"": plots.draw([first])},
        rows,
        [
            Compared(f"largest rate that stays / predicted, {form}", summary(v, ".3f"), "1")
            for form, v in ratio.items()
        ],
        f"With delay, the largest stable rate is within {100 * worst:.0f}% of the prediction; all three "
        f"forms, delays {int(first.delay.min())} to {int(first.delay.max())}, {len(results)} "
        f"seed{'s' * (len(results) > 1)}. The picture is of the first.",
    )


def _judge_minima(rows: Rows) -> list[Effect]:
    effects = []
    for form, tau in dict.fromkeys(zip(column(rows, "form"), column(rows, "delay"), strict=True)):
        effects.append(
            measured(
                f"{form}, delay {tau:g}",
                "largest rate that stays / predicted",
                functools.partial(_ratios, rows, form, tau),
                (0.8, 1.25),
                ratio=True,
            )
        )
    return effects


def _ratios(rows: Rows, form: str, tau: float) -> list[float]:
    return list(by_seed(rows, "ratio", form=form, delay=tau).values())


DELAYS_TRIED = [0, 1, 2, 4, 8, 16, 32]
_SETTING = "MNIST's first 1,000 images, 784-50-50-10, weight decay 0.005, full-batch gradients"
figure(
    "delay-minima",
    "Delay-2019",
    "which rate leaves a minimum, against delay and momentum",
    "The delay decides with the learning rate which minima are accessible; the rule keeps them the same.",
    _minimum,
    _judge_minima,
    smoke=SMOKE_NOTE,
    laptop=f"{_SETTING}; three seeds; {OURS}",
    paper=f"{_SETTING}; three seeds; {OURS}",
    weights=True,
)(_delay_minima)

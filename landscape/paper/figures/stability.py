"""Delay-2019's stability boundary and rates that leave a minimum, and DPSGD-2020's steps to leave a saddle.

All settings are ours: of the first only the abstract is at hand, and the problem of the second is in an
appendix that is not available.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker

from landscape import limits, plots
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Runs, Scale, runs_of
from landscape.paper.figure import Compared, Drawing, compare_with_paper, figure, summary
from landscape.paper.scales import OURS
from landscape.paper.verdicts import Effect, Rows, by_seed, pair, ratio_effect, select, settings
from landscape.plots.picture import panels
from landscape.plots.tables import without_bridge
from landscape.results.training import Escape, Minima
from landscape.training.experiments.escapes import escape_times, minima
from landscape.training.recipes.recipe import Recipe, read, recipe_of
from landscape.training.run.loop import Trainer

# ---- The boundary

DELAYS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Known limits for delays 1, 3, 7 and 31, by momentum and its form.
KNOWN = {
    (0.0, "ordinary"): (1, 0.4450, 0.2091, 0.0499),
    (0.9, "ordinary"): (0.1, 0.0348, 0.0158, 0.0042),
    (0.9, "shifted"): (0.19, 0.0648, 0.0279, 0.0063),
}
NAMED = ("no momentum", "momentum 0.9", "shifted momentum 0.9")


def _limit(tau: int, m: float, form: Any) -> float:
    return limits.max_stable_step(delay=tau, momentum=m, form=form)


def _boundary(context: Context) -> Drawing:
    rows = pd.DataFrame(
        {"momentum": m, "form": form, "delay": tau, "limit": _limit(tau, m, form)}
        for m, form in KNOWN
        for tau in DELAYS
    )
    picture, (ax,) = panels(1, 1, 6.8, 3.9)
    for marker, label, (m, form) in zip("osD", NAMED, KNOWN, strict=True):
        limits = select(rows, momentum=m, form=form)["limit"].to_numpy()
        ax.plot(*without_bridge(np.array(DELAYS), limits), marker=marker, ms=4, label=label)
    line = [np.pi / (2 * tau + 1) for tau in DELAYS[1:]]
    ax.plot(DELAYS[1:], line, color="#777777", lw=0.9, ls=":", label="π/(2τ + 1)")
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xticks(shown := [0, 1, 2, 4, 8, 16, 32, 64], map(str, shown))
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set(xlabel="delay τ (steps)", ylabel="largest stable ηλ", yscale="log")
    picture.legend(loc="outside lower center", ncols=2)
    compared = [
        Compared(f"largest ηλ, τ = {tau}, {label} (known value)", f"{_limit(tau, *key):.4f}", f"{value:.4f}")
        for label, (key, known) in zip(NAMED, KNOWN.items(), strict=True)
        for tau, value in zip((1, 3, 7, 31), known, strict=True)
    ]
    slopes = ", ".join(f"{effect.values[0]:.2f}" for effect in _judge_boundary(rows)[:3])
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"For large delays the limit falls as τ to the power {slopes} (no, ordinary, shifted momentum): the "
        "rate must be inversely proportional to the delay. Shifted momentum allows more than ordinary.",
    )


def _judge_boundary(rows: Rows) -> list[Effect]:
    """Exact: no seed enters."""
    effects, limits = [], {}
    for m, form in KNOWN:
        chosen = select(rows, momentum=m, form=form)
        limits[m, form] = chosen.set_index("delay")["limit"]
        tau, limit = np.log(chosen[["delay", "limit"]].to_numpy(float)[-5:].T)
        slope = float(np.polyfit(tau, limit, 1)[0])
        name = f"{form} momentum {m:g}" if m else "no momentum"
        effects.append(Effect(name, "power of τ, long delays", (slope,), (-1.15, -0.85), exact=True))
    more = (limits[0.9, "shifted"] / limits[0.9, "ordinary"]).drop(0)
    what = "limit of shifted / ordinary momentum"
    return [*effects, Effect("all delays", what, tuple(more.tolist()), (1.0, np.inf), exact=True)]


_EXACT = "from the characteristic polynomial; nothing is trained"
figure(
    "delay-boundary", "Delay-2019", "the largest stable ηλ against delay, three forms of momentum",
    "At high delay the rate must be inversely proportional to it; momentum should be off, or shifted.",
    lambda scale: {}, _judge_boundary, smoke=_EXACT, laptop=_EXACT,
)(_boundary)  # fmt: skip

# ---- Which rates leave a minimum

DELAYS_TRIED = [0, 1, 2, 4, 8, 16, 32]


def _minimum(scale: Scale) -> Runs:
    changes = [
        "steps=600", "model.widths=[64, 50, 50, 10]", "data={name='digits'}", "batch=1437",
        "schedule.milestones=[]", "monitor.sharpness=0",
    ]  # fmt: skip
    if scale != "smoke":
        changes = []

    def make(seed: int) -> Recipe:
        return read("mnist-minimum", [*changes, f"seed={seed}"])

    return runs_of("gd", {}, range(1 if scale == "smoke" else 3), make)


def _minima_of(context: Context, key: str, run: Checkpoint) -> Minima:
    delays, tol = context.pick([0, 4], DELAYS_TRIED, DELAYS_TRIED), context.pick(0.3, 0.07, 0.07)
    point, decay = context.last(key), float(recipe_of(run).optimizer["weight_decay"])

    def make() -> Minima:
        problem = context.problem(point, "train")
        return minima(problem, delays, weight_decay=decay, rate_tol=tol, split="train", label=point.label)

    return context.cached(Minima, point, {"delays": delays, "tol": tol}, make, (minima,))[0]


def _delay_minima(context: Context) -> Drawing:
    """Full-batch training with delay, close to a trained minimum: the largest rate that stays there."""
    results: list[Minima] = []

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        results.append(found := _minima_of(context, key, run))
        forms = ("no momentum", f"momentum {found.momentum:g}", f"shifted momentum {found.momentum:g}")
        return [
            {
                "delay": int(tau),
                "form": form,
                "largest_lr_that_stays": float(found.boundary[f, k]),
                "predicted_lr": float(found.predicted[f, k]),
                "ratio": float(found.boundary[f, k] / found.predicted[f, k]),
            }
            for f, form in enumerate(forms)
            for k, tau in enumerate(found.delay)
        ]

    rows, many = context.table("gd", {}, measure), len(results)
    return Drawing(
        {"": plots.draw(results[:1])},
        rows,
        compare_with_paper(
            rows, "largest rate that stays / predicted, {form}", "ratio", paper="1", form=".3f"
        ),
        f"With delay, the largest stable rate is within {100 * (rows['ratio'] - 1).abs().max():.0f}% of the "
        f"prediction; all three forms, delays {rows['delay'].min()} to {rows['delay'].max()}, {many} "
        f"seed{'s' * (many > 1)}. The picture is of the first.",
    )


def _judge_minima(rows: Rows) -> list[Effect]:
    what, claimed = "largest rate that stays / predicted", (0.8, 1.25)
    return [
        Effect(f"{form}, delay {tau:g}", what, tuple(ratios.values()), claimed, ratio=True)
        for form, tau in settings(rows, "form", "delay")
        for ratios in [by_seed(rows, "ratio", form=form, delay=tau)]
    ]


_SETTING = "MNIST's first 1,000 images, 784-50-50-10, weight decay 0.005, full-batch gradients"
figure(
    "delay-minima", "Delay-2019", "which rate leaves a minimum, against delay and momentum",
    "The delay decides with the learning rate which minima are accessible; the rule keeps them the same.",
    _minimum, _judge_minima, laptop=f"{_SETTING}; three seeds; {OURS}", weights=True,
)(_delay_minima)  # fmt: skip

# ---- Steps to leave a saddle

VARIED: dict[str, list[float]] = {
    "dimension": [2, 4, 8, 16],
    "noise": [1e-4, 1e-3, 1e-2, 1e-1],
    "lr": [0.05, 0.1, 0.2, 0.4],
}
FEW: dict[str, list[float]] = {"dimension": [2, 8]}
ALGORITHMS: dict[str, list[str]] = {
    "ssgd": ["algorithm={name='ssgd'}"],
    "ssgd*": ["algorithm={name='ssgd*', sigma=0.001}"],
    "dpsgd": [],
}


def _saddles(context: Context) -> Drawing:
    values, many = context.pick(FEW, VARIED, VARIED), context.pick(6, 200, 400)
    results = context.cached(
        Escape,
        [],
        {"values": values, "seeds": many},
        lambda: [escape_times(name, list(each), ALGORITHMS, range(many)) for name, each in values.items()],
        (escape_times, Trainer),
    )
    rows = pd.DataFrame(
        {"vary": r.vary, "value": float(v), "algorithm": name, "seed": s, "steps": min(float(steps), r.steps)}
        for r in results
        for a, name in enumerate(r.algorithms)
        for k, v in enumerate(r.values)
        for s, steps in enumerate(r.times[a, k])
    )
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
    for vary, value in settings(rows, "vary", "value"):
        steps = pair(rows, "steps", vary=vary, value=value, algorithm=("ssgd", "dpsgd"))
        effects.append(ratio_effect(f"{vary} {value:g}", "steps of SSGD / of DPSGD", steps))
    return effects


_SADDLE = "the paper's problem is in an appendix that is not available: the family of saddles is ours"
figure(
    "saddles", "DPSGD-2020, section 2", "steps to leave a saddle",
    "DPSGD's noise leaves saddles faster than SSGD's.",
    lambda scale: {}, _judge_saddles, smoke="two dimensions, six seeds", laptop=_SADDLE,
)(_saddles)  # fmt: skip

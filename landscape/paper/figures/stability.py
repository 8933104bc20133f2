"""Delay-2019's stability boundary and rates that leave a minimum, and DPSGD-2020's steps to leave a saddle.

All settings are ours: of the first only the abstract is at hand, and the problem of the second is in an
appendix that is not available.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from landscape import limits, plots
from landscape.paper.context import Context, Ended
from landscape.paper.figure import Compared, Drawing, compare_with_paper, figure, printed, summary
from landscape.paper.verdicts import Effect, Rows, by_seed, paired_effect, select, settings
from landscape.plots.picture import panels
from landscape.plots.style import ticks_at
from landscape.plots.tables import without_bridge
from landscape.results.training import Escape, Minima
from landscape.training.experiments.escapes import minima, saddles
from landscape.training.run.loop import Trainer

# ---- The boundary

DELAYS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FORMS = {
    (0.0, "ordinary"): "no momentum",
    (0.9, "ordinary"): "momentum 0.9",
    (0.9, "shifted"): "shifted momentum 0.9",
}


def _limit(tau: int, m: float, form: Any) -> float:
    return limits.max_stable_step(delay=tau, momentum=m, form=form)


def _judge_boundary(rows: Rows) -> list[Effect]:
    """Exact: no seed enters."""
    effects, limits = [], {}
    for m, form in FORMS:
        chosen = select(rows, momentum=m, form=form)
        limits[m, form] = chosen.set_index("delay")["limit"]
        tau, limit = np.log(chosen[["delay", "limit"]].to_numpy(float)[-5:].T)
        slope = float(np.polyfit(tau, limit, 1)[0])
        name = f"{form} momentum {m:g}" if m else "no momentum"
        effects.append(Effect(name, "power of τ, long delays", (slope,), (-1.15, -0.85), exact=True))
    more = (limits[0.9, "shifted"] / limits[0.9, "ordinary"]).drop(0)
    what = "limit of shifted / ordinary momentum"
    return [*effects, Effect("all delays", what, tuple(more.tolist()), (1.0, np.inf), exact=True)]


@figure("delay-boundary", _judge_boundary)
def _boundary(context: Context) -> Drawing:
    rows = pd.DataFrame(
        {"momentum": m, "form": form, "delay": tau, "limit": _limit(tau, m, form)}
        for m, form in FORMS
        for tau in DELAYS
    )
    picture, (ax,) = panels(1, 1, 6.8, 3.9)
    for marker, label, (m, form) in zip("osD", FORMS.values(), FORMS, strict=True):
        limits = select(rows, momentum=m, form=form)["limit"].to_numpy()
        ax.plot(*without_bridge(np.array(DELAYS), limits), marker=marker, ms=4, label=label)
    line = [np.pi / (2 * tau + 1) for tau in DELAYS[1:]]
    ax.plot(DELAYS[1:], line, color="#777777", lw=0.9, ls=":", label="π/(2τ + 1)")
    ax.set_xscale("symlog", base=2, linthresh=1)
    shown = [0, 1, 2, 4, 8, 16, 32, 64]
    ticks_at(ax.xaxis, shown, [*map(str, shown)])
    ax.set(xlabel="delay τ (steps)", ylabel="largest stable ηλ", yscale="log")
    picture.legend(loc="outside lower center", ncols=2)
    compared = list[Compared]()
    for row in printed("delay_limits").itertuples():
        m, tau = float(row.momentum), int(row.delay)
        what = f"largest ηλ, τ = {tau}, {FORMS[m, row.form]} (known value)"
        compared.append(Compared(what, f"{_limit(tau, m, row.form):.4f}", f"{float(row.limit):.4f}"))
    return Drawing({"": picture}, rows, compared)


# ---- Which rates leave a minimum


def _judge_minima(rows: Rows) -> list[Effect]:
    what, claimed = "largest rate that stays / predicted", (0.8, 1.25)
    return [
        Effect(f"{form}, delay {tau:g}", what, tuple(by_seed(one, "ratio")), claimed, ratio=True)
        for (form, tau), one in rows.groupby(["form", "delay"], sort=False)
    ]


@figure("delay-minima", _judge_minima)
def _delay_minima(context: Context) -> Drawing:
    """Full-batch training with delay, close to a trained minimum: the largest rate that stays there."""
    results, sizes = list[Minima](), dict(context.sizes)

    def measure(run: Ended) -> Rows:
        point = run.last
        decay = float(point.recipe.optimizer["weight_decay"])

        def make() -> Minima:
            problem = context.problem(point, "train")
            about: Any = {"split": "train", "label": point.label}
            return minima(problem, sizes["delays"], weight_decay=decay, rate_tol=sizes["tol"], **about)

        (found,) = context.cached(Minima, point, sizes, make, (minima,))
        results.append(found)
        forms = ("no momentum", f"momentum {found.momentum:g}", f"shifted momentum {found.momentum:g}")
        columns = {
            "delay": np.tile(found.delay, len(forms)),
            "form": np.repeat(forms, len(found.delay)),
            "largest_lr_that_stays": found.boundary.ravel(),
            "predicted_lr": found.predicted.ravel(),
        }
        return pd.DataFrame(columns).assign(ratio=(found.boundary / found.predicted).ravel())

    rows = context.table(measure)
    what = "largest rate that stays / predicted, {form}"
    compared = compare_with_paper(rows, what, "ratio", paper="1", form=".3f")
    return Drawing({"": plots.draw(results[:1])}, rows, compared, "The picture is of the first seed.")


# ---- Steps to leave a saddle


def _judge_saddles(rows: Rows) -> list[Effect]:
    """An effect for each setting; of a run that does not leave, all of its steps count."""
    what, both = "steps of SSGD / of DPSGD", ("ssgd", "dpsgd")
    return [
        paired_effect(
            f"{vary} {value:g}", what, rows, "steps", vary=vary, value=value, algorithm=both, times=True
        )
        for vary, value in settings(rows, "vary", "value")
    ]


@figure("saddles", _judge_saddles)
def _saddles(context: Context) -> Drawing:
    sizes = dict(context.sizes)
    seeds = range(sizes.pop("seeds"))
    stored = {"values": {name: values for name, values in sizes.items() if values}, "seeds": len(seeds)}
    by = (saddles, Trainer)
    results = context.cached(Escape, [], stored, lambda: saddles(seeds, **sizes), by)
    rows = pd.DataFrame(
        {"vary": r.vary, "value": float(v), "algorithm": name, "seed": s, "steps": min(float(steps), r.steps)}
        for r in results
        for a, name in enumerate(r.algorithms)
        for k, v in enumerate(r.values)
        for s, steps in enumerate(r.times[a, k])
    )
    ratios = [float(np.median(effect.values)) for effect in _judge_saddles(rows)]
    what = "steps of SSGD / steps of DPSGD to leave, median over the seeds"
    return Drawing({"": plots.draw(results)}, rows, [Compared(what, summary(ratios))])

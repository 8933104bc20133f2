"""Delay-2019's stability boundary and rates that leave a minimum, and DPSGD-2020's steps to leave a saddle.

All settings are ours: of the first only the abstract is at hand, and the problem of the second is in an
appendix that is not available.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from landscape import limits
from landscape.paper.context import Context, Ended
from landscape.paper.departures import Escape, Minima, minima, saddles
from landscape.paper.figure import Compared, Drawing, compare_with_paper, figure, printed, summary
from landscape.paper.verdicts import Effect, Rows, by_seed, paired_effect, select, settings
from landscape.plots import style
from landscape.plots.picture import finish, panels, points, wrapped_panels
from landscape.plots.style import ticks_at
from landscape.plots.tables import delay_axes, without_bridge
from landscape.results.training import forms_with
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


def _draw_minimum(r: Minima) -> Figure:
    """Learning rate against delay: lines are predicted, markers are measured.

    The bar of a marker reaches from the largest rate at which training stayed at the minimum to the smallest
    at which it left.
    """
    picture, (ax,) = panels(1, 1, 5.6, 4.2)
    for f, (name, marker) in enumerate(zip(forms_with(r.momentum), "osD", strict=True)):
        ax.plot(*without_bridge(r.delay, r.predicted[f]), color=f"C{f}", label=f"{name}: predicted")
        # No line goes through delay 0.
        ax.plot(r.delay[:1], r.predicted[f, :1], marker="_", ms=14, mew=1.6, color=f"C{f}")
        bars = np.abs(np.stack([r.stays[f], r.leaves[f]]) - r.boundary[f])
        look: Any = {"marker": marker, "ms": 5, "mfc": "w", "capsize": 2}
        points(ax, r.delay, r.boundary[f], bars, f"C{f}", f"{name}: measured", **look)
    delay_axes(ax, r, max(1, r.delay.max()))
    title = f"The largest rate at which training stays at its minimum\n{style.samples_of([r])}, full batch"
    return finish(picture, title, legend=[ax], ncols=2)


@figure("delay-minima", _judge_minima)
def _delay_minima(context: Context) -> Drawing:
    """Full-batch training with delay, close to a trained minimum: the largest rate that stays there."""
    results, sizes = list[Minima](), dict(context.sizes)

    def measure(run: Ended) -> Rows:
        point = run.last
        decay = float(point.recipe.optimizer["weight_decay"])

        def make() -> Minima:
            problem = context.problem(point, "train")
            return minima(problem, sizes["delays"], decay, sizes["tol"], split="train", label=point.label)

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
    return Drawing({"": _draw_minimum(results[0])}, rows, compared, "The picture is of the first seed.")


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


def _draw_escapes(results: Sequence[Escape]) -> Figure:
    """Median escape time, with its 95% confidence band, against the quantity that is varied.

    There is a panel for each. The upper edge is the last step: lines and bands there stand for runs that had
    not escaped by then.
    """
    names = {"dimension": "dimension", "noise": "std of a sample's gradient", "lr": "learning rate"}
    picture, axes = wrapped_panels(len(results), 3.9, 3.1, names="times", sharey=True)
    for ax, r in zip(axes, results, strict=True):
        low, high = (np.minimum(edge, r.steps) for edge in r.band)
        median = np.minimum(r.median, r.steps)
        for a, name in enumerate(r.algorithms):
            color = style.color_of(name)
            ax.fill_between(r.values, low[a], high[a], color=color, alpha=0.2, lw=0)
            look: Any = {"color": color, "marker": "osD"[a], "ms": 4, "label": style.paper_name(name)}
            ax.plot(r.values, median[a], **look)
        ax.set_xscale("log", base=10 if r.vary == "noise" else 2)
        if r.vary != "noise":
            ticks_at(ax.xaxis, r.values, [f"{v:g}" for v in r.values])
        style.log_axis(ax.yaxis)
        ax.set(title=r.setting, xlabel=names[r.vary])
    axes[0].set_ylabel("steps to escape")
    title = f"Escape from a saddle, median of {results[0].times.shape[2]} seeds and 95% band"
    return finish(picture, title, legend=axes[:1], ncols=3)


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
    return Drawing({"": _draw_escapes(results)}, rows, [Compared(what, summary(ratios))])

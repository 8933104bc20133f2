"""Delay-2019: the stability boundary, and which rates leave a trained minimum. All settings are ours."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import ticker

from landscape import plots, stability
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary
from landscape.paper.figures.abstracts import OURS
from landscape.paper.scales import SMOKE_NOTE
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
        all(abs(s + 1) < 0.15 for s in slopes),
    )


_EXACT = "from the characteristic polynomial; nothing is trained"
figure(
    "delay-boundary",
    "Delay-2019",
    "the largest stable ηλ against delay, three forms of momentum",
    "At high delay the rate must be inversely proportional to it; momentum should be off, or shifted.",
    lambda scale: {},
    smoke=_EXACT,
    laptop=_EXACT,
    paper=_EXACT,
)(_boundary)


# ---- Delay-2019: minima stability


def _minimum(scale: Scale) -> Runs:
    changes = ["steps=600", "model.widths=[64, 50, 50, 10]", "data={name='digits'}", "batch=1437"]
    small = [*changes, "schedule.milestones=[]", "monitor.sharpness=0"]
    return {"gd/0": read("mnist-minimum", small if scale == "smoke" else [])}


def _delay_minima(work: Work) -> Drawing:
    """Full-batch training with delay, close to one trained minimum: the largest rate that stays there."""
    delays, tol = work.pick([0, 4], DELAYS_TRIED, DELAYS_TRIED), work.pick(0.3, 0.07, 0.07)
    end = work.end("gd/0")

    def make() -> Minima:
        decay = float(recipe_of(end).optimizer["weight_decay"])
        problem = work.problem(end, "train")
        return minima(problem, delays, weight_decay=decay, tol=tol, split="train", label=end.label)

    result = work.cached(Minima, end, {"delays": delays, "tol": tol}, make)[0]
    forms = ("no momentum", f"momentum {result.momentum:g}", f"shifted momentum {result.momentum:g}")
    rows: list[dict[str, Any]] = [
        {
            "delay": int(tau),
            "form": form,
            "largest_lr_that_stays": float(result.boundary[f, k]),
            "predicted_lr": float(result.predicted[f, k]),
            "ratio": float(result.boundary[f, k] / result.predicted[f, k]),
        }
        for f, form in enumerate(forms)
        for k, tau in enumerate(result.delay)
    ]
    ratio = {form: [r["ratio"] for r in rows if r["form"] == form] for form in forms}
    worst = max(abs(r["ratio"] - 1) for r in rows)
    return Drawing(
        {"": plots.draw([result])},
        rows,
        [
            Compared(f"largest rate that stays / predicted, {form}", summary(v, ".3f"), "1")
            for form, v in ratio.items()
        ],
        f"The largest rate at which delayed training stays at the minimum is within {100 * worst:.0f}% of "
        f"the prediction for delays {min(delays)} to {max(delays)} in all three forms.",
        worst < 0.2,
    )


DELAYS_TRIED = [0, 1, 2, 4, 8, 16, 32]
_SETTING = "MNIST's first 1,000 images, 784-50-50-10, weight decay 0.005, full-batch gradients"
figure(
    "delay-minima",
    "Delay-2019",
    "which rate leaves a minimum, against delay and momentum",
    "The delay decides with the learning rate which minima are accessible; the rule keeps them the same.",
    _minimum,
    smoke=SMOKE_NOTE,
    laptop=f"{_SETTING}; {OURS}",
    paper=f"{_SETTING}; {OURS}",
)(_delay_minima)

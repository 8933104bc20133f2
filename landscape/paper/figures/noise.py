"""DPSGD-2020's Eq. 4 in detail: what Figure 2's runs say about the paper's noise."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd

from landscape.analysis.noise import estimate_noise
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.statistics import mean_and_error
from landscape.paper.context import Context, Runs, Scale, runs_of
from landscape.paper.figure import Compared, Drawing, figure, summary
from landscape.paper.figures.figure_2 import runs_of_part
from landscape.paper.scales import MNIST_NOTE, mnist, seeds
from landscape.paper.verdicts import Effect, Rows, measured, need, ratio, select, settings, stacked
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.results.noise import NoiseEstimate

# ---- Four numbers for Δ(2)

_FORMS = {
    "direct": "definition (Eq. 4, left)",
    "full_batch": "on the full batch",
    "eq4": "Eq. 4, α² tr(HCH)",
    "first_order": "first order, minibatch Hessians",
}
# What counts as equal (ours).
_FACTOR = 1.5


def _estimates(context: Context, key: str, run: Checkpoint) -> list[dict[str, Any]]:
    """The four numbers at every checkpoint of a run, form by form."""
    draws, points = context.pick(2, 16, 32), context.points(key)

    def make() -> list[NoiseEstimate]:
        found = []
        for point in points:
            here = point.load()
            problem, label = context.problem(here, "train"), str(here.step)
            found.append(
                estimate_noise(problem, here.weights, here.lr, here.local_batch, draws=draws, label=label)
            )
        return found

    known = {"draws": draws, "along": True}
    estimates = context.cached(NoiseEstimate, points, known, make, (estimate_noise,))
    return [
        {"step": int(estimate.label), "estimate": name, "value": value, "standard_error": error}
        for name in _FORMS
        for estimate in estimates
        for value, error in [estimate.summary()[name]]
    ]


def _eq4(context: Context) -> Drawing:
    rows = context.table("dpsgd", {}, functools.partial(_estimates, context))
    with style():
        groups = rows.groupby("seed")
        picture, axes = panels(1, len(groups), 4.4, 3.7, sharey=True)
        for ax, (seed, of_seed) in zip(axes, groups, strict=True):
            for marker, (name, label) in zip("osD^", _FORMS.items(), strict=True):
                one = select(of_seed, estimate=name)
                look = {"marker": marker, "ms": 4, "capsize": 2, "label": label}
                ax.errorbar(one["step"], one["value"], one["standard_error"], **look)
            ax.set(yscale="log", title=f"seed {seed}", xlabel="step")
        axes[0].set_ylabel("Δ(2) (squared weights)")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    by = rows.pivot(index=["seed", "step"], columns="estimate", values="value")
    off = by.div(by["direct"], axis=0)
    within = float(np.mean(np.abs(np.log(off["eq4"])) < np.log(_FACTOR)))
    return Drawing(
        {"": picture},
        rows,
        [Compared(f"{_FORMS[n]}, of the definition", summary(off[n], ".2g"), "1") for n in list(_FORMS)[1:]],
        f"Eq. 4's Hessian form is within a factor {_FACTOR} of the definition at {100 * within:.0f}% of the "
        f"checkpoints (ratios {off['eq4'].min():.2g} to {off['eq4'].max():.2g}), the first-order sum with "
        f"minibatch Hessians between {off['first_order'].min():.2g} and {off['first_order'].max():.2g}.",
    )


def _judge_eq4(rows: Rows) -> list[Effect]:
    """The median over the checkpoints of a run."""
    ratios = []
    for seed in settings(rows, "seed"):
        direct, eq4 = (
            select(rows, seed=seed, estimate=name).set_index("step")["value"] for name in ("direct", "eq4")
        )
        ratios.append(float(np.median(ratio(eq4.to_dict(), direct.to_dict()))))
    what = "α² tr(HCH) / definition, median over checkpoints"
    return [Effect("Figure 2(a)", what, tuple(ratios), (1 / _FACTOR, _FACTOR), ratio=True)]


figure(
    "eq4", "DPSGD-2020, Eq. 4 in detail", "Δ(2) over training, four ways",
    "DPSGD's extra noise is α² tr(HCH), a function of the Hessian and of the learners' spread.",
    runs_of_part("fig2a", ("dpsgd",), 3), _judge_eq4, laptop=f"Figure 2(a), {MNIST_NOTE}", paper=MNIST_NOTE,
    weights=True,
)(_eq4)  # fmt: skip

# ---- The three terms of DPSGD's noise

_TERMS = {
    "delta_s": r"$\Delta_S$",
    "delta_2": r"$\alpha^2\Vert P_\perp\delta\Vert^2$",
    "delta_cross": "|cross term|",
}


def _split(context: Context) -> Drawing:
    """Δ_DP = Δ_S + α²‖P⊥δ‖² + cross, over training; the median over seeds, and the cross term's mean."""
    tables, compared, means, sizes = [], list[Compared](), list[str](), list[float]()
    with style():
        picture, axes = panels(1, 2, 5.0, 3.7)
        for ax, part in zip(axes, "ab", strict=True):
            runs = context.group(part)
            chosen = np.isfinite(runs[0].history["delta"])
            steps = runs[0].history["step"][chosen].astype(int)
            whole = [run for run in runs if run.step == runs[0].step]
            share = {
                name: np.array([run.history[name][chosen] / run.history["delta"][chosen] for run in whole])
                for name in _TERMS
            }
            for name, label in _TERMS.items():
                middle = np.median(np.abs(share[name]), 0)
                ax.plot(steps, middle, lw=1.0, label=label)
                columns = {"figure": f"2({part})", "seed": "median", "step": steps, "term": name}
                tables.append(pd.DataFrame(columns | {"share_of_delta": middle}))
            cross = share["delta_cross"]
            columns = {"figure": f"2({part})", "seed": [r.seed for r in whole], "step": "mean"}
            tables.append(pd.DataFrame(columns | {"term": "delta_cross", "share_of_delta": cross.mean(1)}))
            mean, error = mean_and_error(cross.mean(1))
            sizes.append(100 * float(np.median(np.abs(cross))))
            means.append(f"{100 * mean:+.1f}" + (f" ± {100 * error:.1f}%" if np.isfinite(error) else "%"))
            what = f"cross term of Δ_DP, Figure 2({part}): median size; mean ± standard error"
            compared.append(Compared(what, f"{sizes[-1]:.1f}%; {means[-1]}", "0"))
            title = f"Figure 2({part}), median of {len(runs)} seeds"
            ax.set(yscale="log", title=title, xlabel="step")
        axes[0].set_ylabel(r"share of $\Delta_{DP}$")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Drawing(
        {"": picture},
        stacked([table.astype(object) for table in tables]),
        compared,
        f"The cross term of Δ_DP is {means[0]} of it in (a), {means[1]} in (b). These are means over "
        f"training; its median size is {sizes[0]:.1f} and {sizes[1]:.1f}%. A mean under 5% counts as none.",
    )


def _judge_split(rows: Rows) -> list[Effect]:
    """The mean over the steps of a run; below 5% counts as none (ours)."""
    what, claimed = "cross term / Δ_DP, mean over the steps", (-0.05, 0.05)
    return [
        measured(f"Figure {part}", what, functools.partial(_cross, rows, part), claimed)
        for part in settings(rows, "figure")
    ]


def _cross(rows: Rows, part: str) -> list[float]:
    need(rows, "seed")
    found = select(rows, figure=part, step="mean", term="delta_cross")
    return [float(share) for share in found["share_of_delta"]]


def _split_runs(scale: Scale) -> Runs:
    every = seeds(scale, 5)
    return runs_of(
        "{part}", {"part": "ab"}, every, lambda part, seed: mnist(scale, f"fig2{part}-dpsgd", seed)
    )


figure(
    "noise-split", "DPSGD-2020, Eq. 4 in detail", "what DPSGD's noise is made of",
    "Δ_DP = Δ_S + Δ(2): the cross term between the two is zero.",
    _split_runs, _judge_split, laptop=f"Figure 2, {MNIST_NOTE}", paper=MNIST_NOTE,
)(_split)  # fmt: skip

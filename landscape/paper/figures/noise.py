"""DPSGD-2020's Eq. 4 in detail, and the loss smoothed by the learners' spread, of DPSGD-2021's abstract."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd

from landscape import plots
from landscape.analysis.noise import noise
from landscape.analysis.spread import smoothing
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.statistics import mean_and_error
from landscape.paper import scales
from landscape.paper.context import Context, Point
from landscape.paper.figure import Compared, Drawing, figure, summary
from landscape.paper.verdicts import Effect, Rows, select, settings, stacked
from landscape.plots.picture import panels, shared_legend, wrapped_panels
from landscape.results.flatness import Smoothing
from landscape.results.noise import Noise
from landscape.training.experiments import continued

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

    def estimate(point: Point) -> Noise:
        run = point.load()
        problem, step = context.problem(run, "train"), str(run.step)
        return noise(problem, run.weights, run.lr, run.local_batch, draws=draws, label=step)

    known = {"draws": draws, "along": True}
    estimates = context.cached(Noise, points, known, lambda: list(map(estimate, points)), (noise,))
    return [
        {"step": int(estimate.label), "estimate": name, "value": value, "standard_error": error}
        for name in _FORMS
        for estimate in estimates
        for value, error in [estimate.summary()[name]]
    ]


def _eq4(context: Context) -> Drawing:
    rows = context.table("dpsgd", {}, functools.partial(_estimates, context))
    groups = rows.groupby("seed")
    picture, axes = wrapped_panels(len(groups), 4.0, 3.3, sharey=True)
    for ax, (seed, of_seed) in zip(axes, groups, strict=True):
        for marker, (name, label) in zip("osD^", _FORMS.items(), strict=True):
            one = select(of_seed, estimate=name)
            look = {"marker": marker, "ms": 4, "capsize": 2, "label": label}
            ax.errorbar(one["step"], one["value"], one["standard_error"], **look)
        ax.set(yscale="log", title=f"seed {seed}", xlabel="step")
    axes[0].set_ylabel("Δ(2) (squared weights)")
    shared_legend(picture, axes[:1], ncols=2)
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
    by = rows.pivot(index=["seed", "step"], columns="estimate", values="value")
    off = by["eq4"] / by["direct"].where(by["direct"] != 0)
    ratios = off.groupby("seed", sort=False).agg(lambda values: np.median(values))  # NaN where one is
    what = "α² tr(HCH) / definition, median over checkpoints"
    return [Effect("Figure 2(a)", what, tuple(ratios.tolist()), (1 / _FACTOR, _FACTOR), ratio=True)]


figure(
    "eq4", "DPSGD-2020, Eq. 4 in detail", "Δ(2) over training, four ways",
    "DPSGD's extra noise is α² tr(HCH), a function of the Hessian and of the learners' spread.",
    scales.mnist_runs("{rule}", {"rule": ("dpsgd",)}, 5, "fig2a-{rule}"), _judge_eq4,
    laptop=f"Figure 2(a), {scales.MNIST_NOTE}", paper=scales.MNIST_NOTE, weights=True,
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
    picture, axes = panels(1, 2, 5.0, 3.7)
    for ax, part in zip(axes, "ab", strict=True):
        runs = context.group(part)
        chosen = np.isfinite(runs[0].history["delta"])
        steps = runs[0].history["step"][chosen].astype(int)
        whole = [run for run in runs if run.step == runs[0].step]
        for name, label in _TERMS.items():
            share = np.array([run.history[name][chosen] / run.history["delta"][chosen] for run in whole])
            middle = np.median(np.abs(share), 0)
            ax.plot(steps, middle, lw=1.0, label=label)
            columns = {"figure": f"2({part})", "seed": "median", "step": steps, "term": name}
            tables.append(pd.DataFrame(columns | {"share_of_delta": middle}))
        # The last one, the cross term: also its mean over the steps of each run.
        columns |= {"seed": [r.seed for r in whole], "step": "mean", "share_of_delta": share.mean(1)}
        tables.append(pd.DataFrame(columns))
        mean, error = mean_and_error(share.mean(1))
        sizes.append(100 * float(np.median(np.abs(share))))
        means.append(f"{100 * mean:+.1f}" + (f" ± {100 * error:.1f}%" if np.isfinite(error) else "%"))
        what = f"cross term of Δ_DP, Figure 2({part}): median size; mean ± standard error"
        compared.append(Compared(what, f"{sizes[-1]:.1f}%; {means[-1]}", "0"))
        ax.set(yscale="log", title=f"Figure 2({part}), median of {len(runs)} seeds", xlabel="step")
    axes[0].set_ylabel(r"share of $\Delta_{DP}$")
    shared_legend(picture, axes[:1], ncols=3)
    return Drawing(
        {"": picture},
        stacked([table.astype(object) for table in tables]),
        compared,
        f"The cross term of Δ_DP is {means[0]} of it in (a), {means[1]} in (b). These are means over "
        f"training; its median size is {sizes[0]:.1f} and {sizes[1]:.1f}%. A mean under 5% counts as none.",
    )


def _judge_split(rows: Rows) -> list[Effect]:
    """The mean over the steps of a run; below 5% counts as none (ours)."""
    means = select(rows, step="mean", term="delta_cross")
    what, claimed = "cross term / Δ_DP, mean over the steps", (-0.05, 0.05)
    return [
        Effect(
            f"Figure {part}", what, tuple(map(float, select(means, figure=part)["share_of_delta"])), claimed
        )
        for part in settings(rows, "figure")
    ]


figure(
    "noise-split", "DPSGD-2020, Eq. 4 in detail", "what DPSGD's noise is made of",
    "Δ_DP = Δ_S + Δ(2): the cross term between the two is zero.",
    scales.mnist_runs("{part}", {"part": "ab"}, 5, "fig2{part}-dpsgd"), _judge_split,
    laptop=f"Figure 2, {scales.MNIST_NOTE}", paper=scales.MNIST_NOTE,
)(_split)  # fmt: skip

# ---- The loss smoothed by the spread

FORM, AXES = "{algorithm}", {"algorithm": ("ssgd", "dpsgd")}


def _smoothed(context: Context, point: Point) -> Smoothing:
    draws, samples = context.pick((2, 200), (16, 10_000), (64, 60_000))

    def make() -> Smoothing:
        run = point.load()
        return smoothing(
            context.problem(run, "train", samples=samples),
            run.weights,
            draws=draws,
            trajectory=continued.mean_path(run, continued.PATH_STEPS, data_dir=context.data_dir),
            lr=run.lr,
            alpha_e=continued.effective_rate(run),
            split="train",
            label=point.label,
        )

    by = (smoothing, continued.mean_path)
    return context.cached(Smoothing, point, {"pairs": draws, "samples": samples}, make, by)[0]


def _smoothing(context: Context) -> Drawing:
    first, compared = list[Smoothing](), list[Compared]()

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        points = context.points(key)
        found = [_smoothed(context, point) for point in (points[0], points[-1])]
        if run.seed == 0:
            first.extend(found)
        for r in found:
            smooth, error = float(r.lambda_smooth[0]), float(r.lambda_smooth_se[0])
            text = f"{smooth / r.lambda_max:.3f} ± {error / abs(r.lambda_max):.3f}"
            compared.append(Compared(f"λ_max smoothed / λ_max, {r.label}", text))
        return [
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
            for r in found
        ]

    rows = context.table(FORM, AXES, measure).drop(columns=["algorithm", "seed"])
    early, late = (summary(effect.values, ".3f") for effect in _judge_smoothing(rows)[:2])
    return Drawing(
        {"": plots.draw(first)},
        rows,
        compared,
        f"Smoothed by DPSGD's measured spread λ_max is {early} of the loss's own early in training and "
        f"{late} at the end; below 1 the spread flattens the loss.",
    )


def _judge_smoothing(rows: Rows) -> list[Effect]:
    """Of DPSGD's checkpoints, the first and the last of each seed."""
    seeds = rows["checkpoint"].astype(str).str.extract(r"^dpsgd, seed (\d+), step ", expand=False)
    runs, below = rows.groupby(seeds, sort=False), (-np.inf, 1.0)
    effects = []
    for when, run in (("early", runs.first()), ("at the end", runs.last())):
        flat = tuple((run["lambda_smoothed"] / run["lambda_max"]).tolist())
        effects.append(Effect(when, "λ_max of the smoothed loss / of the loss", flat, below, ratio=True))
    low = tuple((runs.first()["alpha_e"] / runs.first()["alpha"]).tolist())
    return [*effects, Effect("early", "effective rate α_e / α", low, below)]


figure(
    "smoothing", "DPSGD-2021", "the loss smoothed by the learners' spread; the rates it allows, α and α_e",
    "The spread smooths the loss, hence allows a larger rate; the effective rate adjusts itself to the "
    "landscape.",
    scales.mnist_runs(FORM, AXES, 5, "fig2a-{algorithm}"), _judge_smoothing,
    laptop=f"Figure 2(a), early (a tenth) and at the end, 10,000 training samples; {scales.OURS}",
    paper=f"Figure 2(a); {scales.OURS}", weights=True,
)(_smoothing)  # fmt: skip

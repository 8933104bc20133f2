"""DPSGD-2020's Eq. 4 in detail, and the loss smoothed by the learners' spread, of DPSGD-2021's abstract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from landscape import plots
from landscape.analysis.noise import noise
from landscape.analysis.spread import smoothing
from landscape.core.statistics import mean_and_error
from landscape.paper.context import Context, Ended, Point
from landscape.paper.figure import Compared, Drawing, figure, summary
from landscape.paper.verdicts import Effect, Rows, select
from landscape.plots.picture import panels, shared_legend, wrapped_panels
from landscape.results.flatness import Smoothing
from landscape.results.noise import Noise
from landscape.training import experiments as continued

# ---- Four numbers for Δ(2)

_FORMS = {
    "direct": "definition (Eq. 4, left)",
    "full_batch": "on the full batch",
    "eq4": "Eq. 4, α² tr(HCH)",
    "first_order": "first order, minibatch Hessians",
}
# What counts as equal (ours).
_FACTOR = 1.5


def _of_definition(rows: Rows) -> Rows:
    """The four numbers by seed and step, divided by the definition."""
    by = rows.pivot(index=["seed", "step"], columns="estimate", values="value")
    return by.div(by["direct"].where(by["direct"] != 0), axis=0)


def _judge_eq4(rows: Rows) -> list[Effect]:
    """The median over the checkpoints of a run."""
    ratios = _of_definition(rows)["eq4"].groupby("seed", sort=False)
    ratios = ratios.agg(lambda values: np.median(values))  # NaN where one is
    what = "α² tr(HCH) / definition, median over checkpoints"
    return [Effect("Figure 2(a)", what, tuple(ratios.tolist()), (1 / _FACTOR, _FACTOR), ratio=True)]


@figure("eq4", _judge_eq4)
def _eq4(context: Context) -> Drawing:
    draws = context.sizes["draws"]

    def estimate(context: Context, point: Point) -> Noise:
        run = point.load()
        problem, step = context.problem(run, "train"), str(run.step)
        return noise(problem, run.weights, run.lr, run.local_batch, draws=draws, label=step)

    def measure(run: Ended) -> list[dict[str, Any]]:
        """The four numbers at every checkpoint of a run, form by form."""
        known = {"draws": draws, "along": True}
        estimates = context.cached(
            Noise, run.points, known, lambda: [estimate(context, point) for point in run.points], (noise,)
        )
        return [
            {"step": int(each.label), "estimate": name, "value": value, "standard_error": error}
            for name in _FORMS
            for each in estimates
            for value, error in [each.means()[name]]
        ]

    rows = context.table(measure)
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
    off = _of_definition(rows)
    others = list(_FORMS)[1:]
    compared = [Compared(f"{_FORMS[n]}, of the definition", summary(off[n], ".2g"), "1") for n in others]
    return Drawing({"": picture}, rows, compared)


# ---- The three terms of DPSGD's noise

_TERMS = {
    "delta_s": r"$\Delta_S$",
    "delta_2": r"$\alpha^2\Vert P_\perp\delta\Vert^2$",
    "delta_cross": "|cross term|",
}


def _judge_split(rows: Rows) -> list[Effect]:
    """The mean over the steps of a run; below 5% counts as none (ours)."""
    means = select(rows, step="mean", term="delta_cross")
    what, claimed = "cross term / Δ_DP, mean over the steps", (-0.05, 0.05)
    return [
        Effect(f"Figure {part}", what, tuple(map(float, group["share_of_delta"])), claimed)
        for part, group in means.groupby("figure", sort=False)
    ]


@figure("noise-split", _judge_split)
def _split(context: Context) -> Drawing:
    """Δ_DP = Δ_S + α²‖P⊥δ‖² + cross, over training; the median over seeds, and the cross term's mean."""
    tables, compared = [], list[Compared]()
    picture, axes = panels(1, 2, 5.0, 3.7)
    for ax, part in zip(axes, "ab", strict=True):
        runs = [run.end for run in context.ended(_part=part)]
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
        size = f"{100 * float(np.median(np.abs(share))):.1f}%"
        mean_text = f"{100 * mean:+.1f}" + (f" ± {100 * error:.1f}%" if np.isfinite(error) else "%")
        what = f"cross term of Δ_DP, Figure 2({part}): median size; mean ± standard error"
        compared.append(Compared(what, f"{size}; {mean_text}", "0"))
        ax.set(yscale="log", title=f"Figure 2({part}), median of {len(runs)} seeds", xlabel="step")
    axes[0].set_ylabel(r"share of $\Delta_{DP}$")
    shared_legend(picture, axes[:1], ncols=3)
    rows = pd.concat([table.astype(object) for table in tables], ignore_index=True)
    return Drawing({"": picture}, rows, compared)


# ---- The loss smoothed by the spread


def _smoothed(context: Context, point: Point) -> Smoothing:
    draws, samples = context.sizes["draws"], context.sizes["samples"]

    def make() -> Smoothing:
        run = point.load()
        problem, rate = context.problem(run, "train", samples=samples), continued.effective_rate(run)
        path = continued.mean_path(run, continued.PATH_STEPS, data_dir=context.data_dir)
        known: Any = {"lr": run.lr, "alpha_e": rate, "split": "train", "label": point.label}
        return smoothing(problem, run.weights, draws=draws, trajectory=path, **known)

    by = (smoothing, continued.mean_path)
    return context.cached(Smoothing, point, {"pairs": draws, "samples": samples}, make, by)[0]


def _judge_smoothing(rows: Rows) -> list[Effect]:
    """DPSGD's checkpoints, the first and the last of each seed."""
    seeds = rows["checkpoint"].astype(str).str.extract(r"^dpsgd, seed (\d+), step ", expand=False)
    runs, below = rows.groupby(seeds, sort=False), (-np.inf, 1.0)
    effects = []
    for when, run in (("early", runs.first()), ("at the end", runs.last())):
        flat = tuple((run["lambda_smoothed"] / run["lambda_max"]).tolist())
        effects.append(Effect(when, "λ_max of the smoothed loss / of the loss", flat, below, ratio=True))
    low = tuple((runs.first()["alpha_e"] / runs.first()["alpha"]).tolist())
    return [*effects, Effect("early", "effective rate α_e / α", low, below)]


@figure("smoothing", _judge_smoothing)
def _smoothing(context: Context) -> Drawing:
    first = list[Smoothing]()

    def measure(run: Ended) -> list[dict[str, Any]]:
        found = [_smoothed(context, point) for point in (run.points[0], run.points[-1])]
        if not run.values["seed"]:
            first.extend(found)
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

    rows = context.table(measure).drop(columns="seed")
    compared = []
    for r in rows.itertuples():
        ours = f"{r.lambda_smoothed / r.lambda_max:.3f} ± {r.standard_error / abs(r.lambda_max):.3f}"
        compared.append(Compared(f"λ_max smoothed / λ_max, {r.checkpoint}", ours))
    return Drawing({"": plots.draw(first)}, rows, compared)

"""DPSGD-2021: the loss smoothed by the learners' spread. Only its abstract is at hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape import plots
from landscape.analysis.smoothing import smoothing
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Point, Runs, Scale, runs_of
from landscape.paper.figure import Compared, Drawing, figure, summary
from landscape.paper.scales import mnist, seeds
from landscape.paper.verdicts import Effect, Rows, need
from landscape.results.flatness import Smoothing
from landscape.train.experiments import minima

OURS = "only the abstract is at hand: all settings are ours"


def _runs(scale: Scale) -> Runs:
    return runs_of(
        "{algorithm}",
        {"algorithm": ("ssgd", "dpsgd")},
        seeds(scale, 3),
        lambda algorithm, seed: mnist(scale, f"fig2a-{algorithm}", seed),
    )


def _smoothed(context: Context, point: Point) -> Smoothing:
    pairs, samples = context.pick((2, 200), (16, 10_000), (64, 60_000))

    def make() -> Smoothing:
        run = point.load()
        return smoothing(
            context.problem(run, "train", samples=samples),
            run.weights,
            pairs=pairs,
            path=minima.mean_path(run, minima.STEPS, data_dir=context.data_dir),
            lr=run.lr,
            alpha_e=minima.effective_rate(run),
            split="train",
            label=point.label,
        )

    by = (smoothing, minima.mean_path)
    return context.cached(Smoothing, point, {"pairs": pairs, "samples": samples}, make, by)[0]


def _smoothing(context: Context) -> Drawing:
    first, compared = list[Smoothing](), list[Compared]()

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        points, rows = context.points(key), []
        for point in (points[0], points[-1]):
            r = _smoothed(context, point)
            if run.seed == 0:
                first.append(r)
            smooth, error = (float(v[0]) for v in (r.lambda_smooth, r.lambda_smooth_se))
            text = f"{smooth / r.lambda_max:.3f} ± {error / abs(r.lambda_max):.3f}"
            compared.append(Compared(f"λ_max smoothed / λ_max, {r.label}", text))
            rows.append(
                {
                    "checkpoint": r.label,
                    "lambda_max": r.lambda_max,
                    "lambda_smoothed": smooth,
                    "standard_error": error,
                    "lambda_smoothed_isotropic": float(r.lambda_smooth[1]),
                    "tr_H_Sigma": r.trace_hs,
                    "consensus_distance": r.consensus,
                    "alpha": r.lr,
                    "alpha_e": r.alpha_e,
                    "share_along_sharpest": float(r.share[0]),
                }
            )
        return rows

    rows = context.table("{algorithm}", {"algorithm": ("ssgd", "dpsgd")}, measure)
    rows = rows.drop(columns=["algorithm", "seed"])
    early, late = (summary(effect.values, ".3f") for effect in _judge(rows)[:2])
    return Drawing(
        {"": plots.draw(first)},
        rows,
        compared,
        f"Smoothed by DPSGD's measured spread λ_max is {early} of the loss's own early in training and "
        f"{late} at the end; below 1 the spread flattens the loss.",
    )


def _judge(rows: Rows) -> list[Effect]:
    """Of DPSGD's checkpoints, the first and the last of each seed."""
    need(rows, "checkpoint", "lambda_max", "lambda_smoothed", "alpha", "alpha_e")
    seeds_ = rows["checkpoint"].astype(str).str.extract(r"^dpsgd, seed (\d+), step ", expand=False)
    runs, below = rows.groupby(seeds_, sort=False), (-np.inf, 1.0)
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
    _runs, _judge, laptop=f"Figure 2(a), early (a tenth) and at the end, 10,000 training samples; {OURS}",
    paper=f"Figure 2(a); {OURS}", weights=True,
)(_smoothing)  # fmt: skip

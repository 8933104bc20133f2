"""landscape smoothing"""

from __future__ import annotations

from typing import Any

import click

from landscape.analysis.smoothing import smoothing as compute_smoothing
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.core.memory import pick_device
from landscape.core.options import positive
from landscape.results.flatness import Smoothing
from landscape.train.experiments.minima import STEPS, effective_rate, mean_path


@click.command(epilog="Example: landscape smoothing runs/ss/last.h5 runs/dp/last.h5 --plot smoothing.png")
@click.option(
    "--steps",
    default=STEPS,
    show_default=True,
    help="Further training steps, in memory, along which the gradient's Lipschitz constant is estimated; "
    "0: none.",
)
@analysis_options(compute_smoothing, "pairs", "top", "tol", own={"top": {"flag": "--top-k", "metavar": "K"}})
def smoothing(analysis: Analysis, steps: int) -> None:
    """The loss at w_a of each CKPT, smoothed over the spread of its learners, and its sharpness.

    The displacements have the measured covariance Σ of the learners; for comparison, isotropic ones have the
    same trace. Prints loss, λ_max and the gradient's Lipschitz constant along the path of w_a, each with a
    standard error; tr(HΣ), the share of the spread along the sharpest directions, and 2/λ_max next to the
    learning rate α and the effective α_e.
    """
    positive("--steps", steps, least=0)
    source = analysis.source

    def compute(run: Checkpoint, **settings: Any) -> Smoothing:
        problem = analysis.problem(run)
        # A recipe in a file may name a user's code, which a file must never run.
        not_built_in = not run.has_recipe or source.model or source.data or source.loss
        if steps and not_built_in:
            analysis.message(f"{run.label}: no further steps, --steps needs built-in model and data")
        device = pick_device(analysis.device)
        route = None if not_built_in or not steps else mean_path(run, steps, device, source.data_dir)
        rate = effective_rate(run)
        return compute_smoothing(problem, run.weights, path=route, lr=run.lr, alpha_e=rate, **settings)

    analysis.compute("smoothing", analysis.open(), compute, table)


def table(r: Smoothing) -> str:
    """The numbers of one result, a line each."""
    missed = "" if r.converged else "; an eigenvalue is NOT CONVERGED"
    lines = [
        f"{r.label}: {r.split} loss, consensus distance {r.consensus:.4g}, tr(HΣ) = {r.trace_hs:.4g}{missed}"
    ]
    heads = ("", "at w_a", "smoothed, measured", "smoothed, isotropic")
    lines.append(f"  {heads[0]:20}" + "".join(f"{h:>24}" for h in heads[1:]))

    def row(name: str, plain: float, smooth: Any, error: Any) -> str:
        cells = [f"{plain:.5g}", *(f"{v:.5g} ± {e:.1e}" for v, e in zip(smooth, error, strict=True))]
        return f"  {name:20}" + "".join(f"{c:>24}" for c in cells)

    lines.append(row("loss", r.loss, r.loss_smooth, r.loss_smooth_se))
    lines.append(row("λ_max", r.lambda_max, r.lambda_smooth, r.lambda_smooth_se))
    lines.append(
        row("2/λ_max", r.rates[0], r.rates[1:], r.rates[1:] * r.lambda_smooth_se / abs(r.lambda_smooth))
    )
    if r.lipschitz.size:
        worst = r.lipschitz_smooth.argmax(1)
        pick = [r.lipschitz_smooth[k, i] for k, i in enumerate(worst)]
        error = [r.lipschitz_smooth_se[k, i] for k, i in enumerate(worst)]
        lines.append(row("steepest of gradient", r.lipschitz.max(), pick, error))
    shares = ", ".join(f"{100 * s:.3g}%" for s in r.share)
    lines.append(f"  spread along the sharpest directions: {shares} (isotropic: {100 / r.parameters:.2g}%)")
    bias = " and ".join(f"{b:.1e}" for b in r.lambda_smooth_bias)
    lines.append(f"  a smoothed λ_max is too large by about {bias} ({r.pairs} pairs)")
    lines.append(f"  lr {r.lr:.4g}, α_e {r.alpha_e:.4g}")
    return "\n".join(lines)

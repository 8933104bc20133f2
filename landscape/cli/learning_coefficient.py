"""landscape learning-coefficient"""

from __future__ import annotations

import math

import click

from landscape.analysis.learning_coefficient import learning_coefficient as compute_learning_coefficient
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.results.flatness import LearningCoefficient

BATCH = 512  # Lau et al.'s on MNIST


@click.command(epilog="Example: landscape learning-coefficient runs/ss runs/dp --plot coefficient.png")
@analysis_options(
    compute_learning_coefficient,
    "batch",
    "localization",
    "step_size",
    "nbeta",
    "chains",
    "tol",
    "max_rhat",
    "max_steps",
    split=False,
    own={"batch": {"default": BATCH, "show_default": True, "required": False}},
)
def learning_coefficient(analysis: Analysis) -> None:
    """The local learning coefficient at w_a of each CKPT, by SGLD chains around it.

    λ̂ = nβ (E L(w) − L(w_a)) over w ~ exp(−nβ L(w) − γ/2 ‖w − w_a‖²), L the training loss (Lau et al., arXiv
    2308.12108): P/2 for a regular model, less for a singular one. Needs pip install 'sgd-landscape[bayes]'.
    """
    analysis.compute(
        "learning-coefficient",
        analysis.open(),
        lambda run, **settings: compute_learning_coefficient(analysis.problem(run), **settings),
        table,
    )


def table(r: LearningCoefficient) -> str:
    """The numbers of one result, a line each."""
    missed = "" if r.converged else f"; NOT within {r.tol:.0%} from {r.ess:.0f} draws: raise --max-steps"
    chosen = f", λ_max at w_a {r.lambda_max:.4g}" if math.isfinite(r.lambda_max) else ""
    heating = r.uncorrected - r.value
    rows = {
        "λ̂": f"{r.value:.6g} ± {r.standard_error:.2g}{common.interval(r.interval())}",
        "P/2": f"{r.parameters / 2:,g}",
        "of the chains": ", ".join(f"{value:.4g}" for value in r.chain_values),
        "taken off as heating": f"{heating:.4g}, {heating / r.uncorrected:.1%} of {r.uncorrected:.6g}",
        "R̂, effective draws": f"{r.r_hat:.3f}, {r.ess:,.0f}",
        "loss at w_a, of chains": f"{r.loss:.5g}, {r.mean_loss:.5g}",
        "‖w_a‖, distance from it": f"{r.weights_norm2**0.5:.4g}, {r.distance:.4g}",
        "nβ, γ, ε, batch": f"{r.nbeta:.6g}, {r.localization:g}, {r.step_size:.3g}, {r.batch:,}{chosen}",
    }
    head = f"{r.label}: {r.split} loss, {r.samples:,} samples, {r.chains} chains of {r.steps:,} steps{missed}"
    return "\n".join([head, *(f"  {name:24} {text}" for name, text in rows.items())])

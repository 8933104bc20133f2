"""landscape learning-coefficient"""

from __future__ import annotations

import math
from dataclasses import dataclass

import click

from landscape.analysis.learning_coefficient import CHAINS, LOCALIZATION, MAX_RHAT, MOST, TOL
from landscape.analysis.learning_coefficient import learning_coefficient as compute_learning_coefficient
from landscape.cli import common, options
from landscape.cli.analysis import Analysis, analysis_options
from landscape.results.flatness import LearningCoefficient

BATCH = 512  # Lau et al.'s on MNIST


@dataclass(frozen=True)
class Sampling:
    """How the posterior around the weights is sampled, and how long."""

    batch: int
    localization: float
    step_size: float | None
    nbeta: float | None
    chains: int
    tol: float
    max_rhat: float
    max_steps: int


sampling_options = options.grouped(
    "sampling",
    Sampling,
    click.option("--batch", default=BATCH, show_default=True, help="Samples in a minibatch."),
    click.option(
        "--localization",
        default=LOCALIZATION,
        show_default=True,
        help="γ: how strongly chains are held at w_a. The value depends on it.",
    ),
    click.option(
        "--step-size", type=float, help="ε of the chains. [default: half of 1/(nβλ_max + γ), or less]"
    ),
    click.option("--nbeta", type=float, help="nβ, samples times inverse temperature. [default: n/log n]"),
    click.option("--chains", default=CHAINS, show_default=True, help="Chains, computed at once."),
    click.option(
        "--tol", default=TOL, show_default=True, help="Go on until the relative standard error is so small."
    ),
    click.option(
        "--max-rhat", default=MAX_RHAT, show_default=True, help="The largest R̂ of chains that have mixed."
    ),
    click.option("--max-steps", default=MOST, show_default=True, help="At most so many steps of a chain."),
)


@click.command(epilog="Example: landscape learning-coefficient runs/ss runs/dp --plot coefficient.png")
@sampling_options
@analysis_options("Draws the minibatches and the noise.", split=False)
def learning_coefficient(analysis: Analysis, sampling: Sampling) -> None:
    """The local learning coefficient at w_a of each CKPT, by SGLD chains around it.

    λ̂ = nβ (E L(w) − L(w_a)) over w ~ exp(−nβ L(w) − γ/2 ‖w − w_a‖²), L the training loss (Lau et al., arXiv
    2308.12108): P/2 for a regular model, less for a singular one. Needs pip install 'sgd-landscape[bayes]'.
    """
    runs = analysis.open()
    path = analysis.target(runs[0], "learning-coefficient")
    results = []
    for run, progress in analysis.each("learning-coefficient", runs):
        result = compute_learning_coefficient(
            analysis.problem(run),
            **vars(sampling),
            seed=analysis.seed,
            progress=progress,
            **analysis.about(run),
        )
        results.append(result)
        analysis.values(table(result))
    analysis.write(results, path)


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

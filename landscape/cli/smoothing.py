"""landscape smoothing"""

from __future__ import annotations

from typing import Any

import click

from landscape.analysis.spread import smoothing as compute_smoothing
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

    analysis.compute("smoothing", analysis.open(), compute)

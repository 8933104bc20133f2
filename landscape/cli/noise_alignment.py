"""landscape noise-alignment"""

from __future__ import annotations

from typing import Any

import click

from landscape.analysis.noise import noise_alignment as compute_noise_alignment
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.core.errors import InputError
from landscape.results.noise import NoiseAlignment


@click.command(epilog="Example: landscape noise-alignment runs/ss runs/dp --batch 100 --plot alignment.png")
@click.option("--batch", type=int, help="Samples in a minibatch. [default: the run's total batch]")
@analysis_options(compute_noise_alignment, "top_k", "tol", "max_draws", split=False)
def noise_alignment(analysis: Analysis, batch: int | None) -> None:
    """How the noise of minibatch gradients at w_a of each CKPT lies in the curvature.

    Prints tr(HS)/tr S, the interaction-aware sharpness, the variance along each of the top-K eigenvectors,
    and γ in C_ii ∝ λ_i^γ, with standard errors. Uses the training set, and the total batch of the run.
    """
    runs = analysis.open()
    for run in runs:
        if batch is None and not run.local_batch:
            raise InputError(f"--batch: {run.path} has none, give it")

    def compute(run: Checkpoint, **settings: Any) -> NoiseAlignment:
        size = run.learners * run.local_batch if batch is None else batch
        return compute_noise_alignment(analysis.problem(run), size, **settings)

    analysis.compute("noise-alignment", runs, compute)

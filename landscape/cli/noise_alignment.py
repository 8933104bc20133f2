"""landscape noise-alignment"""

from __future__ import annotations

from typing import Any

import click

from landscape.analysis.noise_alignment import noise_alignment as compute_noise_alignment
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

    analysis.compute("noise-alignment", runs, compute, table)


def table(r: NoiseAlignment) -> str:
    """The numbers of one result, a line each."""
    missed = "" if r.reached else "; standard error NOT REACHED: raise --max-draws"
    missed += "" if r.converged else "; an eigenvalue is NOT CONVERGED"
    lines = [
        f"{r.label}: {r.split} loss, {r.draws} minibatches of {r.batch}, {r.hvps} products{missed}",
        f"  {'tr(HS)/tr S':14} {r.ias: .6e}  ± {r.ias_error:.1e}   (λ_max {r.values[0]:.6e})",
        f"  {'tr(HC)/tr C':14} {r.noise_curvature: .6e}  ± {r.noise_curvature_error:.1e}",
        f"  {'γ':14} {r.gamma: .4f}  ± {r.gamma_error:.1e}   (scatter around the line {r.gamma_scatter:.1e})",
    ]
    for i, (value, variance, error, share) in enumerate(
        zip(r.values, r.covariance, r.covariance_error, r.shares, strict=True)
    ):
        lines.append(
            f"  {f'λ_{i + 1}':6} {value: .5e}  C_ii {variance:.5e} ± {error:.1e}  "
            f"{100 * share:.3g}% of the noise"
        )
    return "\n".join(lines)

"""landscape noise"""

from __future__ import annotations

from typing import Any

import click

from landscape.analysis.noise import estimate_noise
from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.core.errors import InputError
from landscape.results.noise import NoiseEstimate


@click.command(epilog="Example: landscape noise runs/dp/step-0000250.h5 --draws 64 --plot noise.png")
@click.option("--lr", type=float, help="Learning rate α. [default: the run's]")
@click.option("--local-batch", type=int, help="Samples in a minibatch of a learner. [default: the run's]")
@analysis_options(
    estimate_noise,
    "draws",
    split=False,
    own={"draws": {"flag": "--draws", "help": "Draws of n minibatches."}},
)
def noise(analysis: Analysis, lr: float | None, local_batch: int | None) -> None:
    """Four estimates of Δ(2) of each CKPT: definition, full batch, Eq. 4, and first order.

    Uses the training set, and the learning rate and local batch of the run; imported weights have neither,
    and need at least two learners. Prints mean ± standard error.
    """
    runs = analysis.open()
    for run in runs:
        if run.algorithm == IMPORTED and (lr is None or local_batch is None):
            raise InputError(f"--lr, --local-batch: {run.path} was imported and has none, give both")

    def estimate(run: Checkpoint, **settings: Any) -> NoiseEstimate:
        rate, batch = run.lr if lr is None else lr, run.local_batch if local_batch is None else local_batch
        return estimate_noise(analysis.problem(run), run.weights, rate, batch, **settings)

    analysis.compute("noise", runs, estimate)

"""landscape noise-scale"""

from __future__ import annotations

from typing import Any

import click
from torch import Tensor

from landscape.analysis.noise import GRADIENTS
from landscape.analysis.noise import noise_scale as compute_noise_scale
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.batch_sharpness import batch_sizes, check_learners
from landscape.cli.choices import Choice
from landscape.results.noise import NoiseScale
from landscape.train.recipes.recipe import recipe_of


@click.command(
    name="noise-scale",
    epilog="Example: landscape noise-scale runs/dp/step-0000100.h5 runs/dp/last.h5 --plot noise-scale.png",
)
@click.option(
    "--batch", type=int, metavar="B", help="Samples in a minibatch at w_a. [default: the run's total batch]"
)
@click.option("--no-learners", is_flag=True, help="Only w_a, without the learners' own gradients.")
@analysis_options(
    compute_noise_scale,
    "gradient",
    "tol",
    "draws",
    "max_draws",
    split=False,
    own={
        "gradient": {
            "type": Choice(GRADIENTS),
            "help": "‖g‖²: whole (of all data, exact), or draws (from pairs of minibatches, no pass over all "
            "data).",
        }
    },
)
def noise_scale(analysis: Analysis, batch: int | None, no_learners: bool) -> None:
    """The gradient noise scale tr Σ/‖g‖² at w_a of each CKPT, and from its learners.

    It is the batch, in samples of the training set, at which noise and gradient are equal in size. Learners
    take their gradients where the run's update rule does (SSGD: at w_a), each with a share of 1/n of the
    batch. Prints value ± standard error, and what the learners' gradients of one step show on average, to
    which their spread adds.
    """
    runs = analysis.open()
    sizes = [batch_sizes(run, None)[0] if batch is None else batch for run in runs]
    check_learners(zip(runs, sizes, strict=True), no_learners)

    def compute(run: Checkpoint, size: int, **settings: Any) -> NoiseScale:
        weights = gradient_points(run) if run.learners > 1 and not no_learners else None
        return compute_noise_scale(analysis.problem(run), size, weights=weights, **settings)

    analysis.compute("noise-scale", zip(runs, sizes, strict=True), compute)


def gradient_points(run: Checkpoint) -> Tensor:
    """(n, P), where the learners of ``run`` take their gradients: at w_a if the update rule says so."""
    if run.has_recipe and recipe_of(run).rule().at_mean:
        return run.mean.expand_as(run.weights)
    return run.weights

"""landscape batch-sharpness"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from landscape.analysis.sharpness import batch_sharpness as compute_batch_sharpness
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.stability import known
from landscape.core.errors import InputError
from landscape.results.curvature import BatchSharpness


@click.command(
    name="batch-sharpness",
    epilog="Example: landscape batch-sharpness runs/dp/last.h5 --batch 50,500 --plot sharpness.png",
)
@click.option(
    "--batch", "batches", metavar="B,…", help="Samples in a minibatch at w_a. [default: the run's total]"
)
@click.option("--no-learners", is_flag=True, help="Only w_a, without the learners' own weights.")
@click.option("--no-lambda-max", is_flag=True, help="Without λ_max over all of the data.")
@analysis_options(compute_batch_sharpness, "tol", "draws", "max_draws", split=False)
def batch_sharpness(analysis: Analysis, batches: str | None, no_learners: bool, no_lambda_max: bool) -> None:
    """The curvature that minibatch gradients meet, at w_a of each CKPT and its learners.

    Batch sharpness is the mean of gᵀHg/‖g‖² over minibatches of the training set, with gradient and Hessian
    of the minibatch. A learner's minibatch has a share of 1/n of the batch. Prints mean ± standard error,
    next to λ_max and, where they are known, the learning rate and the limit of the update rule.
    """
    runs = analysis.open()
    jobs = [(run, size) for run in runs for size in batch_sizes(run, batches)]
    check_learners(jobs, no_learners)

    def compute(run: Checkpoint, size: int, **settings: Any) -> BatchSharpness:
        rate, rule_limit, _ = known(run)
        return compute_batch_sharpness(
            analysis.problem(run),
            size,
            weights=run.weights if run.learners > 1 and not no_learners else None,
            lr=rate,
            limit=rule_limit,
            with_lambda_max=not no_lambda_max,
            **settings,
        )

    analysis.compute("batch-sharpness", jobs, compute)


def batch_sizes(run: Checkpoint, text: str | None) -> list[int]:
    """The batches that were asked for, such as "64,512", or the run's own total batch."""
    if text is None:
        if not run.local_batch:
            raise InputError(f"--batch: missing; {run.path} does not know the batch of its run, give it")
        return [run.local_batch * run.learners]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and 0 < int(word) < 2**31 for word in words):
        raise InputError(f"--batch: '{text}' is not allowed, it must be whole numbers ≥ 1, such as 64,512")
    return sorted({int(word) for word in words})


def check_learners(jobs: Iterable[tuple[Checkpoint, int]], no_learners: bool) -> None:
    """InputError where a batch cannot be shared evenly by the learners of its run."""
    for run, size in jobs:
        if not no_learners and size % run.learners:
            raise InputError(
                f"--batch: {size} is no multiple of the {run.learners} learners of {run.path}; choose "
                "another, or --no-learners"
            )

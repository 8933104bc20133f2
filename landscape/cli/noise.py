"""landscape noise, noise-scale, noise-alignment and batch-sharpness: what minibatches of a run see"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from landscape.analysis.noise import GRADIENTS, estimate_noise
from landscape.analysis.noise import noise_alignment as compute_noise_alignment
from landscape.analysis.noise import noise_scale as compute_noise_scale
from landscape.analysis.sharpness import batch_sharpness as compute_batch_sharpness
from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.completion import Choice
from landscape.cli.options import command, numbers
from landscape.cli.run_summary import known
from landscape.core.errors import InputError
from landscape.results.curvature import BatchSharpness
from landscape.results.noise import NoiseEstimate, NoiseScale


@command(
    analysis=analysis_options(
        estimate_noise, split=False, draws={"flag": "--draws", "help": "Draws of n minibatches."}
    )
)
def noise(lr: float | None, local_batch: int | None, analysis: Analysis) -> None:
    """Four estimates of Δ(2) of each CKPT: definition, full batch, Eq. 4, and first order.

    Uses the training set, and the learning rate and local batch of the run; imported weights have neither,
    and need at least two learners. Prints mean ± standard error.

    Args:
        lr: Learning rate α. [default: the run's]
        local_batch: Samples in a minibatch of a learner. [default: the run's]

    Example:
        landscape noise runs/dp/step-0000250.h5 --draws 64 --plot noise.png
    """
    runs = analysis.open()
    for run in runs:
        if run.algorithm == IMPORTED and (lr is None or local_batch is None):
            raise InputError(f"--lr, --local-batch: {run.path} was imported and has none, give both")

    def estimate(run: Checkpoint, **settings: Any) -> NoiseEstimate:
        rate, batch = run.lr if lr is None else lr, run.local_batch if local_batch is None else local_batch
        return estimate_noise(analysis.problem(run), run.weights, rate, batch, **settings)

    analysis.compute("noise", runs, estimate)


@command(
    batch={"metavar": "B"},
    analysis=analysis_options(
        compute_noise_scale,
        "gradient",
        "tol",
        "draws",
        "max_draws",
        split=False,
        gradient={
            "type": Choice(GRADIENTS),
            "help": "‖g‖²: whole (of all data, exact), or draws (from pairs of minibatches, no pass over all "
            "data).",
        },
    ),
)
def noise_scale(batch: int | None, no_learners: bool, analysis: Analysis) -> None:
    """The gradient noise scale tr Σ/‖g‖² at w_a of each CKPT, and from its learners.

    It is the batch, in samples of the training set, at which noise and gradient are equal in size. Learners
    take their gradients where the run's update rule does (SSGD: at w_a), each with a share of 1/n of the
    batch. Prints value ± standard error, and what the learners' gradients of one step show on average, to
    which their spread adds.

    Args:
        batch: Samples in a minibatch at w_a. [default: the run's total batch]
        no_learners: Only w_a, without the learners' own gradients.

    Example:
        landscape noise-scale runs/dp/step-0000100.h5 runs/dp/last.h5 --plot noise-scale.png
    """
    runs = analysis.open()
    jobs = [(run, batch_sizes(run, None)[0] if batch is None else batch) for run in runs]
    check_learners(jobs, no_learners)

    def compute(run: Checkpoint, size: int, **settings: Any) -> NoiseScale:
        weights = gradient_points(run) if run.learners > 1 and not no_learners else None
        return compute_noise_scale(analysis.problem(run), size, weights=weights, **settings)

    analysis.compute("noise-scale", jobs, compute)


@command(analysis=analysis_options(compute_noise_alignment, "top_k", "tol", "max_draws", split=False))
def noise_alignment(batch: int | None, analysis: Analysis) -> None:
    """How the noise of minibatch gradients at w_a of each CKPT lies in the curvature.

    Prints tr(HS)/tr S, the interaction-aware sharpness, the variance along each of the top-K eigenvectors,
    and γ in C_ii ∝ λ_i^γ, with standard errors. Uses the training set, and the total batch of the run.

    Args:
        batch: Samples in a minibatch. [default: the run's total batch]

    Example:
        landscape noise-alignment runs/ss runs/dp --batch 100 --plot alignment.png
    """
    runs = analysis.open()
    analysis.compute(
        "noise-alignment",
        [(run, batch_sizes(run, None)[0] if batch is None else batch) for run in runs],
        lambda run, size, **settings: compute_noise_alignment(analysis.problem(run), size, **settings),
    )


@command(
    batch={"metavar": "B,…"},
    analysis=analysis_options(compute_batch_sharpness, "tol", "draws", "max_draws", split=False),
)
def batch_sharpness(batch: str | None, no_learners: bool, no_lambda_max: bool, analysis: Analysis) -> None:
    """The curvature that minibatch gradients meet, at w_a of each CKPT and its learners.

    Batch sharpness is the mean of gᵀHg/‖g‖² over minibatches of the training set, with gradient and Hessian
    of the minibatch. A learner's minibatch has a share of 1/n of the batch. Prints mean ± standard error,
    next to λ_max and, where they are known, the learning rate and the limit of the update rule.

    Args:
        batch: Samples in a minibatch at w_a. [default: the run's total]
        no_learners: Only w_a, without the learners' own weights.
        no_lambda_max: Without λ_max over all of the data.

    Example:
        landscape batch-sharpness runs/dp/last.h5 --batch 50,500 --plot sharpness.png
    """
    jobs = [(run, size) for run in analysis.open() for size in batch_sizes(run, batch)]
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
    return numbers("--batch", text, "64,512")


def check_learners(jobs: Iterable[tuple[Checkpoint, int]], no_learners: bool) -> None:
    """InputError where a batch cannot be shared evenly by the learners of its run."""
    for run, size in jobs:
        if not no_learners and size % run.learners:
            raise InputError(
                f"--batch: {size} is no multiple of the {run.learners} learners of {run.path}; choose "
                "another, or --no-learners"
            )


def gradient_points(run: Checkpoint) -> Tensor:
    """(n, P), where the learners of ``run`` take their gradients: at w_a if the update rule says so."""
    if run.has_recipe:
        from landscape.train.recipes.recipe import recipe_of  # and training: only for runs

        if recipe_of(run).rule().at_mean:
            return run.mean.expand_as(run.weights)
    return run.weights

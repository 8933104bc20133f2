"""The instruments at w_a of checkpoints: curvature, its limits, and what minibatches of a run see."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from landscape.analysis.noise import GRADIENTS
from landscape.analysis.noise import noise_scale as compute_noise_scale
from landscape.analysis.sharpness import batch_sharpness as compute_batch_sharpness
from landscape.analysis.spectrum import curvature_table
from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.analysis import Analysis, analysis_options, say_cost
from landscape.cli.completion import Choice
from landscape.cli.options import command, numbers
from landscape.core.errors import InputError
from landscape.curvature.peers import ENGINES
from landscape.gradients.minibatches import known_batch
from landscape.problem.layout import GROUPINGS
from landscape.results.flatness import BatchSharpness
from landscape.results.noise import NoiseScale
from landscape.results.spectrum import CurvatureTable, Spectrum
from landscape.training.experiments import operating_point, preconditioner


@command(
    by={"metavar": "block|layer|parameter|NAME,…"},
    parts={"flag": "--part", "metavar": "NAME"},
    analysis=analysis_options(
        compute_spectrum,
        k={"show_default": False, "help": "The K largest eigenvalues."},
        quantities={
            "metavar": "NAME,…",
            "help": "Compute these: extremes (λ_max and λ_min), trace, density. [default: extremes, unless "
            "--k is given]",
        },
        draws={"flag": "--draws", "help": "Random vectors for the density."},
        steps={"help": "Lanczos steps for each random vector."},
        matrix={"help": "The Hessian, or its positive semi-definite part JᵀH_L J."},
        engine={
            "help": "landscape, or pyhessian: the eigenvalue of largest magnitude, and the trace.",
        },
    ),
)
def spectrum(by: str | None, precondition: bool, parts: tuple[str, ...], analysis: Analysis) -> None:
    """Compute the Hessian's eigenvalues, trace, density.

    The Hessian is that at w_a of each CKPT, over the whole split.

    Prints each eigenvalue with its relative residual, the bounds outside which there is no other eigenvalue
    (with 99% probability), and the trace with its standard error. With --precondition also the learning rate
    times λ_max, next to the largest stable one of the optimizer.

    Args:
        by: A table of λ_max, λ_min and trace of the whole and of each block of parameters instead: by block
            (h.3, layer1.0), by layer, by parameter, or by names, prefixes and patterns (*.bias) of them.
        precondition: Of P^{-1/2} H P^{-1/2}, P from the state of the optimizer: Adam, AdamW, RMSprop, LARS or
            LAMB.
        parts: Only the block of these parameters: a name (1.weight) or a prefix (1); can be repeated.

    Example:
        landscape spectrum runs/dp/last.h5 --k 5 --quantities trace,density --plot f.png
    """

    if by is not None:
        _table(by, analysis, {"precondition": precondition, "part": parts})
        return

    def compute(run: Checkpoint, **settings: Any) -> Spectrum:
        problem = run.problem()
        by = preconditioner(run, problem) if precondition else None
        known = {**settings, "part": list(parts) or None}
        if by is None and settings["engine"] == ENGINES[0]:
            say_cost(problem, "spectrum", known)
        return compute_spectrum(problem, precondition=by, **known)

    variant = [analysis.settings["matrix"], *(["preconditioned"] if precondition else [])]
    analysis.compute("spectrum", analysis.open(), compute, *variant)


def _table(by: str, analysis: Analysis, others: Mapping[str, Any]) -> None:
    """``landscape spectrum --by``: the curvature of the blocks of each CKPT."""
    known, usual = (inspect.signature(f).parameters for f in (curvature_table, compute_spectrum))
    given = {k: v for k, v in analysis.settings.items() if v is not None and v != usual[k].default}
    for name in [*(k for k in given if k not in known), *(k for k, v in others.items() if v)]:
        raise InputError(f"--{name.replace('_', '-')}: not allowed with --by, whose table has no such number")
    groups = [by] if by in GROUPINGS else [name.strip() for name in by.split(",")]

    def compute(run: Checkpoint, **settings: Any) -> CurvatureTable:
        problem, known = run.problem(), {**settings, "by": groups if len(groups) > 1 else groups[0]}
        say_cost(problem, "curvature_table", known)
        return curvature_table(problem, **known)

    analysis = replace(analysis, settings=given)
    analysis.compute("curvature-table", analysis.open(), compute, *([by] if by in GROUPINGS[1:] else []))


@command(
    analysis=analysis_options(
        compute_noise_scale,
        split=False,
        batch={"metavar": "B"},
        local_batch=None,
        gradient={
            "type": Choice(GRADIENTS),
            "help": "‖g‖²: whole (of all data, exact), or draws (from pairs of minibatches, no pass over all "
            "data).",
        },
    )
)
def noise_scale(no_learners: bool, analysis: Analysis) -> None:
    """Estimate the gradient noise scale tr Σ/‖g‖².

    It is estimated at w_a of each CKPT, and from its learners.

    It is the batch, in samples of the training set, at which noise and gradient are equal in size. Learners
    take their gradients where the run's update rule does (SSGD: at w_a), each with a share of 1/n of the
    batch. Prints value ± standard error, and what the learners' gradients of one step show on average, to
    which their spread adds.

    Args:
        no_learners: Only w_a, without the learners' own gradients.

    Example:
        landscape noise-scale runs/dp/step-0000100.h5 runs/dp/last.h5 --plot noise-scale.png
    """
    runs = analysis.open()
    batch = analysis.settings["batch"]
    check_learners([(run, known_batch(batch or run.batch or None)) for run in runs], no_learners)

    def compute(run: Checkpoint, **settings: Any) -> NoiseScale:
        weights = gradient_points(run) if run.learners > 1 and not no_learners else None
        return compute_noise_scale(run, weights=weights, **settings)

    analysis.compute("noise-scale", runs, compute)


@command(
    batch={"metavar": "B,…"},
    analysis=analysis_options(
        compute_batch_sharpness,
        split=False,
        batch=None,
        local_batch=None,
        lr=None,
        limit=None,
        quantities=None,
    ),
)
def batch_sharpness(batch: str | None, no_learners: bool, no_lambda_max: bool, analysis: Analysis) -> None:
    """Measure the curvature that minibatches meet.

    It is measured at w_a of each CKPT, and at its learners.

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
    asked = None if batch is None else numbers("--batch", batch, "64,512")
    jobs = [(run, size) for run in analysis.open() for size in asked or [known_batch(run.batch or None)]]
    check_learners(jobs, no_learners)

    def compute(run: Checkpoint, size: int, **settings: Any) -> BatchSharpness:
        rate, rule_limit, _ = operating_point(run)
        settings["weights"] = run.weights if run.learners > 1 and not no_learners else None
        settings["quantities"] = () if no_lambda_max else ("lambda-max",)
        return compute_batch_sharpness(run, size, lr=rate, limit=rule_limit, **settings)

    analysis.compute("batch-sharpness", jobs, compute)


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
        from landscape.training.recipes.recipe import recipe_of  # and training: only for runs

        if recipe_of(run).rule().at_mean:
            return run.mean.expand_as(run.weights)
    return run.weights

"""landscape minima, critical-batch and smoothing, which train on from a checkpoint"""

from __future__ import annotations

from typing import Any

from landscape.analysis.spread import smoothing as compute_smoothing
from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.completion import Choice
from landscape.cli.options import command, numbers
from landscape.core.errors import InputError
from landscape.core.memory import pick_device
from landscape.core.options import positive
from landscape.results.flatness import Smoothing
from landscape.train.experiments.continued import FACTORS, PATH_STEPS, SCALING, effective_rate, mean_path
from landscape.train.experiments.continued import critical_batch as compute_critical_batch
from landscape.train.experiments.escapes import minima as compute_minima
from landscape.train.own_loop.flat import read_settings
from landscape.train.recipes.recipe import recipe_of

DELAYS = "0,1,2,4,8,16,32"


@command(
    delay={"metavar": "τ,…"},
    analysis=analysis_options(compute_minima, "momentum", "tol"),
)
def minima(*, delay: str = DELAYS, analysis: Analysis) -> None:
    """The largest learning rates at which training with delay stays at the minimum w_a of a CKPT.

    Full-batch training by async-sgd starts close to the minimum: without momentum, with momentum, and with
    shifted momentum. Bisection finds the rate above which training leaves the minimum; it is printed next to
    the prediction of landscape stability. The CKPT must be near a minimum of its training loss, such as the
    end of the recipe mnist-minimum.

    Args:
        delay: Delays in steps.

    Example:
        landscape minima runs/gd/last.h5 --delay 0,2,8 --plot minima.png
    """
    delays = numbers("--delay", delay, DELAYS, least=0)
    analysis.compute(
        "minima",
        analysis.open(),
        lambda run, **settings: compute_minima(
            analysis.problem(run), delays, weight_decay=weight_decay(run), **settings
        ),
    )


def weight_decay(run: Checkpoint) -> float:
    """The weight decay of a run's SGD, which is part of its loss; 0 for imported weights."""
    if run.algorithm == IMPORTED:
        return 0.0
    if run.algorithm == RECORDED:
        options = read_settings(run).get("optimizer", {"name": "SGD"})
        name = str(options["name"]).lower()
    else:
        name, options = recipe_of(run).part("optimizer")
    if name != "sgd":
        raise InputError(f"{run.path}: its optimizer is '{name}', the experiment needs 'sgd'")
    return float(options.get("weight_decay", 0.0))


@command(
    factors={"metavar": "k,…"},
    samples={"metavar": "N"},
    analysis=analysis_options(
        compute_critical_batch,
        "seeds",
        "tol",
        "scaling",
        split=False,
        problem=False,
        seeds={"flag": "--branches", "help": "Branches for each batch, by seed."},
        tol={"help": "Allowed rise of the loss, relative to it."},
        scaling={
            "flag": "--lr-scaling",
            "type": Choice(tuple(SCALING)),
            "help": "Of the learning rate with the batch. [default: linear; sqrt for Adam and its relatives]",
        },
    ),
)
def critical_batch(
    *, factors: str = ",".join(f"{factor:g}" for factor in FACTORS), samples: int | None, analysis: Analysis
) -> None:
    """The batch above which training from each CKPT loses, sample for sample, by training branches from it.

    Branches with batches of several sizes train on equally many samples. Prints where the training loss at
    w_a ends higher than with the smallest batch by more than --tol, with one standard error over the seeds.

    Args:
        factors: Batches of the branches, in units of the run's own.
        samples: Training samples that each branch sees. [default: 40 steps of the largest batch]

    Example:
        landscape critical-batch runs/dp/step-0000250.h5 --factors 1,2,4,8 --plot critical.png
    """
    chosen = numbers("--factors", factors, "1,2,4", kind=float)
    analysis.compute(
        "critical-batch",
        analysis.open(),
        lambda run, **settings: compute_critical_batch(
            run,
            chosen,
            trained_samples=samples,
            device=pick_device(analysis.device),
            data_dir=analysis.source.data_dir,
            **settings,
        ),
    )


@command(
    analysis=analysis_options(
        compute_smoothing, "pairs", "top", "tol", top={"flag": "--top-k", "metavar": "K"}
    )
)
def smoothing(*, steps: int = PATH_STEPS, analysis: Analysis) -> None:
    """The loss at w_a of each CKPT, smoothed over the spread of its learners, and its sharpness.

    The displacements have the measured covariance Σ of the learners; for comparison, isotropic ones have the
    same trace. Prints loss, λ_max and the gradient's Lipschitz constant along the path of w_a, each with a
    standard error; tr(HΣ), the share of the spread along the sharpest directions, and 2/λ_max next to the
    learning rate α and the effective α_e.

    Args:
        steps: Further training steps, in memory, along which the gradient's Lipschitz constant is estimated;
            0: none.

    Example:
        landscape smoothing runs/ss/last.h5 runs/dp/last.h5 --plot smoothing.png
    """
    positive("--steps", steps, least=0)
    source = analysis.source

    def compute(run: Checkpoint, **settings: Any) -> Smoothing:
        problem = analysis.problem(run)
        # A recipe in a file may name a user's code, which a file must never run.
        not_built_in = not run.has_recipe or source.model or source.data or source.loss
        if steps and not_built_in:
            common.message(f"{run.label}: no further steps, --steps needs built-in model and data")
        device = pick_device(analysis.device)
        route = None if not_built_in or not steps else mean_path(run, steps, device, source.data_dir)
        rate = effective_rate(run)
        return compute_smoothing(problem, run.weights, path=route, lr=run.lr, alpha_e=rate, **settings)

    analysis.compute("smoothing", analysis.open(), compute)

"""landscape minima, critical-batch and smoothing, which train on from a checkpoint, and saddles."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from landscape.analysis.spread import smoothing as compute_smoothing
from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.options import command, group, numbers, parse_seeds
from landscape.core.errors import InputError
from landscape.core.memory import pick_device
from landscape.core.options import positive
from landscape.results.flatness import Smoothing
from landscape.results.training import median_rank
from landscape.training.experiments.continued import PATH_STEPS, effective_rate, mean_path
from landscape.training.experiments.escapes import VARY, sweep
from landscape.training.experiments.escapes import minima as compute_minima
from landscape.training.own_loop.flat import read_settings
from landscape.training.recipes.recipe import recipe_of

DELAYS = "0,1,2,4,8,16,32"


@command(
    delay={"metavar": "τ,…"},
    analysis=analysis_options(compute_minima, weight_decay=None),
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
            run.problem(), delays, weight_decay=weight_decay(run), **settings
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


@command(analysis=analysis_options(compute_smoothing, lr=None, alpha_e=None, k={}))
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
        problem = run.problem()
        # A recipe in a file may name a user's code, which a file must never run.
        not_built_in = not run.has_recipe or source.model or source.data or source.loss
        if steps and not_built_in:
            common.message(f"{run.label}: no further steps, --steps needs built-in model and data")
        device = pick_device(analysis.device)
        route = None if not_built_in or not steps else mean_path(run, steps, device, source.data_dir)
        rate = effective_rate(run)
        return compute_smoothing(problem, run.weights, trajectory=route, lr=run.lr, alpha_e=rate, **settings)

    analysis.compute("smoothing", analysis.open(), compute)


LEVEL = 0.95
RECIPE = "saddle-dpsgd"
# Around the recipe's own values, far enough to show the slope (ours).
VALUES = {"dimension": "2,4,8,16", "noise": "0.0001,0.001,0.01,0.1", "lr": "0.05,0.1,0.2,0.4"}


@command(
    seeds={"metavar": "N-M,…"},
    target=group(common.Target, output={"default": "saddles.h5", "help": "Result file."}),
)
def saddles(
    *,
    dimension: str = VALUES["dimension"],
    noise: str = VALUES["noise"],
    lr: str = VALUES["lr"],
    sigma: float = 0.001,
    seeds: str = "0-19",
    settings: tuple[str, ...],
    target: common.Target,
) -> None:
    """Steps until SSGD, SSGD* and DPSGD leave a saddle, by dimension, noise and learning rate.

    One of the three varies at a time; the others are as in the recipe saddle-dpsgd. An empty list skips one.
    Prints medians over seeds with exact 95% confidence bands. The problem is ours: DPSGD-2020 describes its
    problem in an appendix that is not available.

    Args:
        dimension: Dimensions of the saddle.
        noise: Standard deviation of a sample's gradient.
        lr: Learning rates.
        sigma: Noise on the weights that SSGD* adds.
        seeds: Seeds of each setting: 0-19, or 0,1,5; at least six.
        settings: Changes the recipe saddle-dpsgd for all.

    Example:
        landscape saddles --seeds 0-39 --noise 0.001,0.01 -o saddles.h5 --plot saddles.png
    """
    seed_list = parse_seeds(seeds)
    median_rank(len(seed_list), LEVEL)
    chosen = {
        name: numbers(f"--{name}", text, VALUES[name], kind=int if name == "dimension" else float)
        for name, text in (("dimension", dimension), ("noise", noise), ("lr", lr))
        if text.strip()
    }
    algorithms = {
        "ssgd": ["algorithm={name='ssgd'}"],
        "ssgd*": [f"algorithm={{name='ssgd*', sigma={sigma!r}}}"],
        "dpsgd": list[str](),
    }
    if not chosen:
        raise InputError(f"--{', --'.join(VARY)}: at least one of them must have a value")
    path = target.path(Path())
    runs, finished = len(seed_list) * len(algorithms) * sum(map(len, chosen.values())), itertools.count(1)
    with common.progress_bar("saddles") as bar:
        results = [
            sweep(
                name,
                values,
                algorithms,
                seed_list,
                recipe=RECIPE,
                settings=settings,
                done=lambda: bar(next(finished) / runs),
            )
            for name, values in chosen.items()
        ]
    for result in results:
        common.describe(result)
    common.write(results, path, target.picture)

"""landscape minima"""

from __future__ import annotations

import click
import numpy as np

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.stability import HEADS, parse_delays
from landscape.core.errors import InputError
from landscape.results.stability import Minima
from landscape.train.experiments.minima import minima as experiment
from landscape.train.own_loop.recording import read_settings
from landscape.train.recipes.recipe import recipe_of

DELAYS = "0,1,2,4,8,16,32"


@click.command(epilog="Example: landscape minima runs/gd/last.h5 --delay 0,2,8 --plot minima.png")
@click.option("--delay", "delays", metavar="τ,…", default=DELAYS, show_default=True, help="Delays in steps.")
@analysis_options(experiment, "momentum", "tol")
def minima(analysis: Analysis, delays: str) -> None:
    """The largest learning rates at which training with delay stays at the minimum w_a of a CKPT.

    Full-batch training by async-sgd starts close to the minimum: without momentum, with momentum, and with
    shifted momentum. Bisection finds the rate above which training leaves the minimum; it is printed next to
    the prediction of landscape stability. The CKPT must be near a minimum of its training loss, such as the
    end of the recipe mnist-minimum.
    """
    chosen = parse_delays(delays)
    analysis.compute(
        "minima",
        analysis.open(),
        lambda run, **settings: experiment(
            analysis.problem(run), chosen, weight_decay=weight_decay(run), **settings
        ),
        table,
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


def table(result: Minima) -> str:
    """Measured and predicted rates, one line for each delay, and the largest change of λ_max."""
    moved = np.abs(result.lambda_after / result.lambda_max - 1).max()
    lines = [
        f"{result.label}: {result.split} loss, λ_max {result.lambda_max:.5g}, "
        f"{common.residual(result.residual, result.lambda_max)}; weight decay "
        f"{result.weight_decay:g}; ‖gradient‖ {result.gradient_norm:.1e}",
        f"  largest lr that stays: measured, predicted, ratio; λ_max changed by at most {100 * moved:.1f}%",
    ]
    heads = [HEADS[0], *(f"{h}, m = {result.momentum:g}" for h in HEADS[1:])]
    lines.append(f"{'τ':>5}" + "".join(f"{head:>28}" for head in heads))
    for k, tau in enumerate(result.delay):
        pairs = zip(result.boundary[:, k], result.predicted[:, k], strict=True)
        cells = [
            f"{measured:.4g} {predicted:.4g} {measured / predicted:5.3f}" for measured, predicted in pairs
        ]
        lines.append(f"{tau:>5}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)

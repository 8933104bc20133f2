"""landscape minima"""

from __future__ import annotations

import click

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.stability import parse_delays
from landscape.core.errors import InputError
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

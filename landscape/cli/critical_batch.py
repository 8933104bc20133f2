"""landscape critical-batch"""

from __future__ import annotations

import click

from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.choices import Choice
from landscape.cli.saddles import parse
from landscape.core.memory import pick_device
from landscape.train.experiments.critical_batch import FACTORS, SCALING
from landscape.train.experiments.critical_batch import critical_batch as experiment


@click.command(
    name="critical-batch",
    epilog="Example: landscape critical-batch runs/dp/step-0000250.h5 --factors 1,2,4,8 --plot critical.png",
)
@click.option(
    "--factors",
    metavar="k,…",
    default=",".join(f"{factor:g}" for factor in FACTORS),
    show_default=True,
    help="Batches of the branches, in units of the run's own.",
)
@click.option(
    "--samples",
    type=int,
    metavar="N",
    help="Training samples that each branch sees. [default: 40 steps of the largest batch]",
)
@analysis_options(
    experiment,
    "seeds",
    "tol",
    "scaling",
    split=False,
    problem=False,
    own={
        "seeds": {"flag": "--branches", "help": "Branches for each batch, by seed."},
        "tol": {"help": "Allowed rise of the loss, relative to it."},
        "scaling": {
            "flag": "--lr-scaling",
            "type": Choice(tuple(SCALING)),
            "help": "Of the learning rate with the batch. [default: linear; sqrt for Adam and its relatives]",
        },
    },
)
def critical_batch(analysis: Analysis, factors: str, samples: int | None) -> None:
    """The batch above which training from each CKPT loses, sample for sample, by training branches from it.

    Branches with batches of several sizes train on equally many samples. Prints where the training loss at
    w_a ends higher than with the smallest batch by more than --tol, with one standard error over the seeds.
    """
    chosen = parse("--factors", factors, "1,2,4", whole=False)
    analysis.compute(
        "critical-batch",
        analysis.open(),
        lambda run, **settings: experiment(
            run,
            chosen,
            trained_samples=samples,
            device=pick_device(analysis.device),
            data_dir=analysis.source.data_dir,
            **settings,
        ),
    )

"""landscape critical-batch"""

from __future__ import annotations

import click

from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.choices import Choice
from landscape.cli.saddles import parse
from landscape.core.memory import pick_device
from landscape.results.noise import CriticalBatch
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
        table,
    )


def table(result: CriticalBatch) -> str:
    """The numbers of one result, a line for each batch."""
    low, high = result.bracket
    if high < float("inf"):
        words = (
            f"critical batch {result.value:.4g} ± {result.standard_error:.2g} samples, between {low:,.0f} "
            f"and {high:,.0f}"
        )
    else:
        words = f"critical batch above {low:,.0f} samples, the largest one tried"
    lines = [
        f"{result.label}: {words} (loss up to {result.tol:.2%} above that of the smallest; "
        f"{result.trained_samples:,} samples a branch, {result.loss.shape[1]} seeds, rate {result.scaling})"
    ]
    rows = zip(result.batch, result.lr, result.steps, result.loss.mean(1), strict=True)
    for (batch, lr, steps, loss), rise, error in zip(rows, result.rise, result.rise_error, strict=True):
        lines.append(
            f"  batch {batch:>8,}, rate {lr:<8.4g} {steps:>6,} steps: loss {loss:.5g}, "
            f"{100 * rise:+.2f}% ± {100 * error:.2g}%"
        )
    return "\n".join(lines)

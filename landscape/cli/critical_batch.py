"""landscape critical-batch"""

from __future__ import annotations

import functools
from pathlib import Path

import click

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, options
from landscape.cli.analysis import about
from landscape.cli.saddles import parse
from landscape.core.devices import pick_device
from landscape.core.options import SPLIT
from landscape.results.critical_batch import CriticalBatch
from landscape.train.experiments.critical_batch import FACTORS, SCALING, SEEDS, TOL
from landscape.train.experiments.critical_batch import critical_batch as experiment


@click.command(
    name="critical-batch",
    epilog="Example: landscape critical-batch runs/dp/step-0000250.h5 --factors 1,2,4,8 --plot critical.png",
)
@click.argument("checkpoints", metavar="CKPT…", nargs=-1, required=True)
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
@click.option("--branches", default=SEEDS, show_default=True, help="Branches for each batch, by seed.")
@click.option("--tol", default=TOL, show_default=True, help="Allowed rise of the loss, relative to it.")
@click.option(
    "--lr-scaling",
    "scaling",
    type=click.Choice(list(SCALING)),
    help="Of the learning rate with the batch. [default: linear; sqrt for Adam and its relatives]",
)
@click.option("--seed", default=0, show_default=True, help="Draws the minibatches of the first branch.")
@options.data_dir
@options.device
@options.grouped("output", lambda **v: options.Output(v["output"], v["force"], v["picture"]), *options.OUTPUT)
@options.quiet
def critical_batch(
    checkpoints: tuple[str, ...],
    factors: str,
    samples: int | None,
    branches: int,
    tol: float,
    scaling: str | None,
    seed: int,
    data_dir: str | None,
    device: str,
    output: options.Output,
    quiet: bool,
) -> None:
    """The batch above which training from each CKPT loses, sample for sample, by training branches from it.

    Branches with batches of several sizes train on equally many samples. Prints where the training loss at
    w_a ends higher than with the smallest batch by more than --tol, with one standard error over the seeds.
    """
    chosen = parse("--factors", factors, "1,2,4", whole=False)
    runs = [Checkpoint.load(run_folder.checkpoint_in(Path(path))) for path in checkpoints]
    first = runs[0].path
    assert first is not None
    path = Path(output.path) if output.path else first.with_name(f"{first.stem}-critical-batch.h5")
    common.check_targets(path, output.picture, output.force)
    results = []
    with common.progress_bar("critical batch", quiet) as bar:
        for k, run in enumerate(runs):
            result = experiment(
                run,
                chosen,
                trained_samples=samples,
                seeds=branches,
                tol=tol,
                scaling=scaling,
                seed=seed,
                device=pick_device(device),
                data_dir=data_dir,
                progress=functools.partial(lambda k, share: bar((k + share) / len(runs)), k),
                **about(run, SPLIT),
            )
            results.append(result)
    for result in results:
        common.values(table(result))
    common.write(results, path, output.picture)


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

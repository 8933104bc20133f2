"""landscape minima"""

from __future__ import annotations

import click
import numpy as np

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.cli import common
from landscape.cli.stability import HEADS, parse_delays
from landscape.core.errors import InputError
from landscape.results.minima import Minima
from landscape.train.experiments.minima import minima as experiment
from landscape.train.loop import recipe_of
from landscape.train.recording import read_settings

DELAYS = "0,1,2,4,8,16,32"


@click.command(epilog="Example: landscape minima runs/gd/last.h5 --delay 0,2,8 --plot minima.png")
@common.checkpoints
@click.option("--delay", "delays", metavar="τ,…", default=DELAYS, show_default=True, help="Delays in steps.")
@click.option("--momentum", default=0.9, show_default=True, help="m of the ordinary and shifted forms.")
@click.option("--tol", default=0.07, show_default=True, help="How near to the boundary rates are bisected.")
@common.split
@click.option(
    "--seed", default=0, show_default=True, help="Draws the vector that the search for λ_max starts from."
)
@click.option("--dtype", default="float32", show_default=True, help="float32 or float64.")
@common.outputs
@common.device
@common.source
@common.quiet
def minima(
    checkpoints: tuple[str, ...],
    delays: str,
    momentum: float,
    tol: float,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    force: bool,
    picture: str | None,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """The largest rates at which training with delay stays at the minimum w_a of a CKPT, found by trying.

    Full-batch steps of async-sgd, without momentum, with it, and in its shifted form, start a little beside
    the minimum; rates are bisected until training leaves. Beside them: what landscape stability predicts.
    The CKPT must be near a minimum of its training loss, such as the end of the recipe mnist-minimum.
    """
    chosen = parse_delays(delays)
    runs = common.open_checkpoints(checkpoints, source, quiet)
    path = common.result_path(output, runs[0], "minima", picture, force=force, variant={"split": split})
    results = []
    for run, progress in common.each("minima", runs, quiet):
        result = experiment(
            common.open_problem(run, split, source, device, dtype, quiet),
            chosen,
            momentum,
            weight_decay=weight_decay(run),
            tol=tol,
            seed=seed,
            progress=progress,
            **common.about(run, split, source),
        )
        results.append(result)
        common.message(table(result), quiet)
    common.write(results, path, picture)


def weight_decay(run: Checkpoint) -> float:
    """That of a run's SGD, which its minimum is one of; 0 for imported weights."""
    if run.algorithm == IMPORTED:
        return 0.0
    if run.algorithm == RECORDED:
        options = read_settings(run).get("optimizer", {"name": "SGD"})
        name = str(options["name"]).lower()
    else:
        name, options = recipe_of(run).part("optimizer")
    if name != "sgd":
        raise InputError(f"{run.path}: its optimizer is '{name}', the experiment goes by 'sgd'")
    return float(options.get("weight_decay", 0.0))


def table(result: Minima) -> str:
    """Found and predicted rates, a line a delay, and how far λ_max moved."""
    moved = np.abs(result.lambda_after / result.lambda_max - 1).max()
    lines = [
        f"{result.label}: {result.split} loss, λ_max {result.lambda_max:.5g}, "
        f"{common.residual(result.residual, result.lambda_max)}; weight decay "
        f"{result.weight_decay:g}; ‖gradient‖ {result.gradient_norm:.1e}",
        f"  largest lr that stays: found, predicted, their ratio; λ_max moved by at most {100 * moved:.1f}%",
    ]
    heads = [HEADS[0], *(f"{h}, m = {result.momentum:g}" for h in HEADS[1:])]
    lines.append(f"{'τ':>5}" + "".join(f"{head:>28}" for head in heads))
    for k, tau in enumerate(result.delay):
        pairs = zip(result.found[:, k], result.predicted[:, k], strict=True)
        cells = [f"{found:.4g} {predicted:.4g} {found / predicted:5.3f}" for found, predicted in pairs]
        lines.append(f"{tau:>5}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)

"""landscape line"""

from __future__ import annotations

import click
import numpy as np

from landscape.analysis.line import POINTS
from landscape.analysis.line import line as compute_line
from landscape.analysis.planes import random_plane
from landscape.cli import common, planes
from landscape.core.errors import InputError


@click.command(epilog="Example: landscape line runs/ss/last.h5 runs/dp/last.h5 --plot barrier.png")
@click.argument("checkpoints", metavar="CKPT [CKPT]", nargs=-1, required=True)
@click.option("--points", default=POINTS, show_default=True, help="Points on the line.")
@click.option("--span", type=float, help="One CKPT: t runs over [−span, span]. [default: 0.1]")
@click.option("--norm", default="none", show_default=True, help="One CKPT: as for contour.")
@click.option("--ignore", help="One CKPT: as for contour.")
@common.split
@click.option("--seed", default=0, show_default=True, help="One CKPT: draws the direction.")
@click.option("--dtype", default="float32", show_default=True, help="float32 or float64.")
@common.outputs
@common.batchnorm
@common.device
@common.source
@common.quiet
def line(
    checkpoints: tuple[str, ...],
    points: int,
    span: float | None,
    norm: str,
    ignore: str | None,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    force: bool,
    picture: str | None,
    bn: str,
    bn_samples: int,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.

    With one CKPT, along a random direction through its w_a: the first that contour draws from the same seed.
    """
    if len(checkpoints) > 2:
        raise InputError(f"CKPT: {len(checkpoints)} checkpoints are not allowed, a line takes one or two")
    if len(checkpoints) == 2 and (span is not None or norm != "none" or ignore is not None):
        raise InputError(
            "--span, --norm, --ignore: they are for one CKPT; a line between two has none to set"
        )
    runs = common.open_checkpoints(checkpoints, source, quiet)
    planes.same_network(runs)
    two = len(runs) == 2
    named = {"plane": "between" if two else "random", "norm": norm, "split": split}
    path = common.result_path(output, runs[0], "line", picture, force=force, variant=named)
    problem = common.open_problem(runs[0], split, source, device, dtype, quiet)
    if two:
        along = planes.ends(problem, runs)
    else:
        along = random_plane(problem, norm=norm, seed=seed, ignore=ignore).directions[0]
    first, last = planes.names(runs) if two else ("", "")
    with common.progress_bar("line", quiet) as bar:
        result = compute_line(
            problem,
            along,
            points,
            span,
            ends=(first, last) if two else (),
            bn=bn,
            bn_samples=bn_samples,
            progress=bar,
            **planes.about(runs, "between" if two else "random", split, source),
        )
    rise = f"barrier {result.barrier:.4g}" if two else f"lowest {np.min(result.loss):.4g}"
    name = " to ".join(result.ends) or result.label
    common.message(
        f"{name}: {split} loss from {result.loss[0]:.4g} to {result.loss[-1]:.4g}, "
        f"highest {np.max(result.loss):.4g}, {rise}",
        quiet,
    )
    common.write([result], path, picture)

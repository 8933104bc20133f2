"""landscape line"""

from __future__ import annotations

from typing import Any

from landscape.analysis.grids import line as compute_line
from landscape.analysis.planes import IGNORES, NORMS, random_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import planes
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.completion import Choice
from landscape.cli.options import command
from landscape.core.errors import InputError
from landscape.results.grids import Line


@command(
    norm={"type": Choice(NORMS)},
    ignore={"type": Choice(IGNORES)},
    analysis=analysis_options(
        compute_line,
        "points",
        "span",
        "tolerance",
        "bn",
        "bn_samples",
        metavar="CKPT [CKPT]",
        span={"help": "One CKPT: t runs over [−span, span]. [default: 0.1]"},
    ),
)
def line(*, norm: str = "none", ignore: str | None, analysis: Analysis) -> None:
    """Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.

    With one CKPT, along a random direction through its w_a: the first that contour draws from the same seed.

    Args:
        norm, ignore: One CKPT: as for contour.

    Example:
        landscape line runs/ss/last.h5 runs/dp/last.h5 --plot barrier.png
    """
    count = len(analysis.checkpoints)
    if count > 2:
        raise InputError(f"CKPT: {count} checkpoints are not allowed, it must be one or two")
    if count == 2 and (analysis.settings["span"] is not None or norm != "none" or ignore is not None):
        raise InputError(
            "--span, --norm, --ignore: they are for one CKPT; a line between two has none to set"
        )
    runs = analysis.open()
    planes.same_network(runs)
    kind = "between" if len(runs) == 2 else "random"

    def compute(run: Checkpoint, *others: Checkpoint, seed: int, **settings: Any) -> Line:
        problem = analysis.problem(run)
        if others:
            first, last = planes.names(runs)
            return compute_line(problem, planes.ends(problem, runs), ends=(first, last), **settings)
        along = random_plane(problem, norm=norm, seed=seed, ignore=ignore).directions[0]
        return compute_line(problem, along, **settings)

    analysis.compute("line", [tuple(runs)], compute, kind, norm)

"""landscape line"""

from __future__ import annotations

import click

from landscape.analysis.grids import line as compute_line
from landscape.analysis.planes import IGNORES, NORMS, random_plane
from landscape.cli import common, planes
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.choices import Choice
from landscape.core.errors import InputError


@click.command(epilog="Example: landscape line runs/ss/last.h5 runs/dp/last.h5 --plot barrier.png")
@click.option(
    "--norm", type=Choice(NORMS), default="none", show_default=True, help="One CKPT: as for contour."
)
@click.option("--ignore", type=Choice(IGNORES), help="One CKPT: as for contour.")
@analysis_options(
    compute_line,
    "points",
    "span",
    "tolerance",
    "bn",
    "bn_samples",
    metavar="CKPT [CKPT]",
    own={"span": {"help": "One CKPT: t runs over [−span, span]. [default: 0.1]"}},
)
def line(analysis: Analysis, norm: str, ignore: str | None) -> None:
    """Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.

    With one CKPT, along a random direction through its w_a: the first that contour draws from the same seed.
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
    two = len(runs) == 2
    kind = "between" if two else "random"
    path = analysis.target(runs[0], "line", kind, norm)
    problem = analysis.problem(runs[0])
    if two:
        along = planes.ends(problem, runs)
    else:
        along = random_plane(problem, norm=norm, seed=analysis.seed, ignore=ignore).directions[0]
    first, last = planes.names(runs) if two else ("", "")
    with common.progress_bar("line", analysis.quiet) as bar:
        result = compute_line(
            problem,
            along,
            ends=(first, last) if two else (),
            **analysis.settings,
            progress=bar,
            **planes.about(runs, kind, analysis),
        )
    common.describe(result)
    analysis.write([result], path)

"""landscape contour"""

from __future__ import annotations

import click

from landscape.analysis.grids import contour as compute_contour
from landscape.cli import planes, processes
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.gridfile import compute_on_grid
from landscape.results.grids import Surface


@click.command(
    epilog="Example: landscape contour runs/ss/last.h5 runs/dp/last.h5 --norm filter --span 1 --plot both.png"
)
@planes.option
@processes.option
@analysis_options(
    compute_contour,
    "grid",
    "span",
    "tolerance",
    "bn",
    "bn_samples",
    "path",
    "precision",
    own={"grid": {"default": "50"}},
)
def contour(analysis: Analysis, plane: planes.Chosen, processes: processes.Processes) -> None:
    """Loss contours over a plane around w_a of each CKPT; all have common levels.

    Random directions (the default) are the same for all CKPTs; "between" draws one surface through all. The
    other defaults are those of the paper's figures.

    The result file is written during the computation; after an interruption, the same command resumes it.
    With --tolerance 1% a smooth surface takes a tenth of the points; the error of the others is estimated and
    kept. The same command without it computes them.

    Points in the file are not computed again: a grid of 49 contains all points of a grid of 25, a grid of 50
    only its corners. Points that the new grid does not contain, and results of other checkpoints or options,
    are replaced only with --force.
    """
    compute_on_grid(analysis, plane, processes, "contour", Surface, compute_contour)

"""landscape hessian-grid"""

from __future__ import annotations

import click

from landscape.analysis.grids import hessian_grid as compute_hessian_grid
from landscape.cli import planes, processes
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.gridfile import compute_on_grid
from landscape.results.grids import HessianGrid


@click.command(
    "hessian-grid", epilog="Example: landscape hessian-grid runs/dp/step-0000250.h5 --grid 4 --plot ratio.png"
)
@planes.option
@processes.option
@analysis_options(
    compute_hessian_grid,
    "grid",
    "span",
    "tolerance",
    "bn",
    "bn_samples",
    "tol",
    "max_products",
    "search",
    own={"grid": {"default": "4"}, "max_products": {"help": "Hessian-vector products a point, at most."}},
)
def hessian_grid(analysis: Analysis, plane: planes.Chosen, processes: processes.Processes) -> None:
    """Extreme Hessian eigenvalues and |λ_min|/|λ_max| on a grid around w_a of each CKPT."""
    compute_on_grid(analysis, plane, processes, "hessian", HessianGrid, compute_hessian_grid)

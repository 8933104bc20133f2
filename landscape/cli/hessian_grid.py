"""landscape hessian-grid"""

from __future__ import annotations

import click
import numpy as np

from landscape.analysis.hessian_grid import hessian_grid as compute_hessian_grid
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

    def text(result: HessianGrid, previous: HessianGrid | None) -> str:
        return summary(result, analysis.split)

    compute_on_grid(analysis, plane, processes, "hessian", HessianGrid, compute_hessian_grid, text)


def summary(result: HessianGrid, split: str) -> str:
    """One line about a grid: ratios, λ_max, residuals, products."""
    exact = result.done
    missed = int((~result.converged[exact]).sum())
    at, residual = ((result.lambda_min, result.lambda_max), (result.residual_min, result.residual_max))
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = float(np.max(np.array(residual)[:, exact] / np.abs(at)[:, exact]))
    worst = f"; {missed} of {result.evaluations} points did not converge" if missed else ""
    if result.columns:
        worst += f"; {result.interpolation()}"
    return (
        f"{result.label}: {split} loss, median |λ_min|/|λ_max| {np.median(result.ratio):.4g}, "
        f"λ_max {result.lambda_max.min():.4g}…{result.lambda_max.max():.4g}, "
        f"largest relative residual {largest:.1e}, {int(result.hvps.sum())} products{worst}"
    )

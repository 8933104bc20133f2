"""landscape hessian-grid"""

from __future__ import annotations

import functools

import click
import numpy as np

from landscape.analysis.contour import axes
from landscape.analysis.hessian_grid import hessian_grid as compute_hessian_grid
from landscape.analysis.planes import random_plane
from landscape.cli import options, processes
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.gridfile import GridFile
from landscape.results.grids import HessianGrid


@click.command(
    "hessian-grid", epilog="Example: landscape hessian-grid runs/dp/step-0000250.h5 --grid 4 --plot ratio.png"
)
@options.grid("4")
@options.eigenvalues("Hessian-vector products a point, at most.")
@processes.option
@analysis_options("Draws the directions.")
def hessian_grid(
    analysis: Analysis,
    grid: options.Grid,
    eigenvalues: options.Eigenvalues,
    processes: processes.Processes,
) -> None:
    """Extreme Hessian eigenvalues and |λ_min|/|λ_max| on a grid around w_a of each CKPT."""
    team = processes.join()
    runs = analysis.open()
    path = analysis.target(runs[0], "hessian", grid.norm, resumes=True)
    origins = [analysis.about(run) for run in runs]
    wanted = {
        "norm": grid.norm,
        "seed": analysis.seed,
        "tol": eigenvalues.tol,
        "dtype": analysis.dtype,
        "split": analysis.split,
        "search": eigenvalues.search,
    }
    file = GridFile(path, HessianGrid, origins, wanted, analysis.quiet, team, analysis.output.force)
    with team:
        for i, (run, progress) in enumerate(analysis.each("hessian-grid", runs)):
            problem = analysis.problem(run)
            plane = random_plane(problem, norm=grid.norm, seed=analysis.seed)
            result, _ = file.add(
                functools.partial(
                    compute_hessian_grid,
                    problem,
                    plane,
                    grid=grid.shape,
                    span=grid.span,
                    tolerance=grid.tolerance,
                    **vars(eigenvalues),
                    progress=progress,
                    **origins[i],
                ),
                team,
                *axes(grid.shape, plane.span if grid.span is None else grid.span),
            )
            analysis.values(summary(result, analysis.split))
    if team.rank == 0:
        file.finish(analysis.output.picture)


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

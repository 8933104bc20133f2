"""landscape hessian-grid"""

from __future__ import annotations

import functools

import click
import numpy as np

from landscape.analysis.contour import axes
from landscape.analysis.hessian_grid import hessian_grid as compute_hessian_grid
from landscape.analysis.planes import random_plane
from landscape.cli import common, processes
from landscape.cli.gridfile import GridFile
from landscape.core.options import choose
from landscape.curvature.eigenvalues import SEARCHES
from landscape.results.hessian_grid import HessianGrid


@click.command(
    "hessian-grid", epilog="Example: landscape hessian-grid runs/dp/step-0000500.h5 --grid 4 --plot ratio.png"
)
@common.checkpoints
@common.plane_options("4", None)
@click.option("--tol", default=0.01, show_default=True, help="Residual of each eigenvalue, relative to it.")
@click.option(
    "--max-products", default=1000, show_default=True, help="Hessian-vector products a point, at most."
)
@common.search
@click.option(
    "--randomness", default="refuse", show_default=True, help="A model random in eval mode: refuse or seed."
)
@processes.option
@common.device
@common.source
@common.quiet
def hessian_grid(
    checkpoints: tuple[str, ...],
    grid: str,
    span: float | None,
    norm: str,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    force: bool,
    picture: str | None,
    tol: float,
    max_products: int,
    search: str,
    randomness: str,
    nproc: int,
    timeout: float,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """Both ends of the Hessian's spectrum, and |λ_min|/|λ_max|, on a grid around w_a of each CKPT."""
    shape = common.parse_grid(grid)
    choose("--search", search, SEARCHES)
    team = processes.join(nproc, timeout)
    runs = common.open_checkpoints(checkpoints, source, quiet)
    named = {"norm": norm, "split": split}
    path = common.result_path(output, runs[0], "hessian", picture, force=force, variant=named, goes_on=True)
    origins = [common.about(run, split, source) for run in runs]
    wanted = {"norm": norm, "seed": seed, "tol": tol, "dtype": dtype, "split": split, "search": search}
    quiet = quiet or team.rank > 0
    file = GridFile(path, HessianGrid, origins, wanted, quiet, team, force)
    with team:
        for i, (run, progress) in enumerate(common.each("hessian-grid", runs, quiet)):
            problem = common.open_problem(run, split, source, device, dtype, quiet)
            plane = random_plane(problem, norm=norm, seed=seed)
            result, _ = file.add(
                functools.partial(
                    compute_hessian_grid,
                    problem,
                    plane,
                    grid=shape,
                    span=span,
                    tol=tol,
                    max_products=max_products,
                    randomness=randomness,
                    search=search,
                    progress=progress,
                    **origins[i],
                ),
                team,
                *axes(shape, plane.span if span is None else span),
            )
            missed = int((~result.converged).sum())
            at, off = ((result.lambda_min, result.lambda_max), (result.residual_min, result.residual_max))
            with np.errstate(divide="ignore", invalid="ignore"):
                largest = float(np.max(np.array(off) / np.abs(at)))
            worst = f"; {missed} of {result.ratio.size} points did not converge" if missed else ""
            common.message(
                f"{result.label}: {split} loss, median |λ_min|/|λ_max| {np.median(result.ratio):.4g}, "
                f"λ_max {result.lambda_max.min():.4g}…{result.lambda_max.max():.4g}, "
                f"largest relative residual {largest:.1e}, {int(result.hvps.sum())} products{worst}",
                quiet,
            )
    if team.rank == 0:
        file.finish(picture)

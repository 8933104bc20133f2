"""landscape hessian-grid"""

from __future__ import annotations

import click
import numpy as np

import landscape
from landscape.cli import common


@click.command(
    "hessian-grid", epilog="Example: landscape hessian-grid runs/dp/step-0000500.h5 --grid 4 --plot ratio.png"
)
@common.checkpoints
@common.plane_options("4")
@click.option("--tol", default=0.01, show_default=True, help="Residual of each eigenvalue, relative to it.")
@click.option(
    "--max-products", default=1000, show_default=True, help="Hessian-vector products a point, at most."
)
@click.option(
    "--randomness", default="refuse", show_default=True, help="A model random in eval mode: refuse or seed."
)
@common.device
@common.source
@common.quiet
def hessian_grid(
    checkpoints: tuple[str, ...],
    grid: str,
    span: float,
    norm: str,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    picture: str | None,
    tol: float,
    max_products: int,
    randomness: str,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """Both ends of the Hessian's spectrum, and |λ_min|/|λ_max|, on a grid around w_a of each CKPT."""
    shape = common.parse_grid(grid)
    runs = common.open_checkpoints(checkpoints)
    path = common.result_path(output, runs[0], "hessian", picture)
    results = []
    for run, progress in common.each("hessian-grid", runs, quiet):
        problem = common.open_problem(run, split, source, device, dtype)
        result = landscape.hessian_grid(
            problem,
            landscape.random_plane(problem, norm=norm, seed=seed),
            grid=shape,
            span=span,
            tol=tol,
            max_products=max_products,
            randomness=randomness,
            progress=progress,
            **common.about(run, split),
        )
        results.append(result)
        missed = int((~result.converged).sum())
        worst = f"; {missed} of {result.ratio.size} points did not converge" if missed else ""
        common.message(
            f"{result.label}: median |λ_min|/|λ_max| {np.median(result.ratio):.4g}, "
            f"λ_max {result.lambda_max.min():.4g}…{result.lambda_max.max():.4g}, "
            f"{int(result.hvps.sum())} products{worst}",
            quiet,
        )
    common.write(results, path, picture)

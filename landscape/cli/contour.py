"""landscape contour"""

from __future__ import annotations

import functools

import click

from landscape.analysis.contour import ERROR_POINTS, axes, reused_points
from landscape.analysis.contour import contour as compute_contour
from landscape.cli import options, planes, processes
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.gridfile import GridFile
from landscape.evaluation import evaluate
from landscape.results.surface import Surface


@click.command(
    epilog="Example: landscape contour runs/ss/last.h5 runs/dp/last.h5 --norm filter --span 1 --plot both.png"
)
@click.option(
    "--plane",
    "kind",
    type=options.Choice(planes.KINDS),
    default="random",
    show_default=True,
    help="random; between (through two or three CKPTs); pca (of the step-*.h5 up to the CKPT); learners "
    "(nearest to all learners); eigen (Hessian eigenvectors of λ_max and λ_min).",
)
@options.grid("50")
@options.ignore(
    "What random directions leave out: none, or bias+norm (bias and norm parameters). "
    "[default: bias+norm with --norm filter, else none]"
)
@options.batchnorm
@click.option(
    "--path",
    type=options.Choice(evaluate.PATHS),
    default="auto",
    show_default=True,
    help="How points are evaluated.",
)
@click.option(
    "--precision",
    type=options.Choice(evaluate.PRECISIONS),
    default="model",
    show_default=True,
    help="Arithmetic: model (that of --dtype), bfloat16 (networks that torch.fx can trace), tf32 (CUDA).",
)
@processes.option
@analysis_options("Draws the directions.")
def contour(
    analysis: Analysis,
    grid: options.Grid,
    batchnorm: options.BatchNorm,
    processes: processes.Processes,
    kind: str,
    ignore: str | None,
    path: str,
    precision: str,
) -> None:
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
    team = processes.join()
    groups = planes.check(kind, analysis.open(), grid.norm, ignore)
    target = analysis.target(groups[0][0], "contour", kind, grid.norm, resumes=True)
    origins = [planes.about(group, kind, analysis) for group in groups]
    wanted = {
        "split": analysis.split,
        "kind": kind,
        "norm": grid.norm,
        "dtype": analysis.dtype,
        "bn": batchnorm.bn,
        "precision": precision,
    }
    drawn = {"seed": analysis.seed} if kind in ("random", "eigen") else {}
    file = GridFile(target, Surface, origins, wanted | drawn, analysis.quiet, team, analysis.output.force)
    with team:
        for i, (group, progress) in enumerate(analysis.each("contour", groups)):
            problem = analysis.problem(group[0])
            if file.previous and kind == "eigen":  # costly to find, and the same but for rounding
                plane = file.previous.plane(problem.theta)
            else:
                plane = planes.make(kind, problem, group, grid.norm, ignore, analysis.seed)
            surface, previous = file.add(
                functools.partial(
                    compute_contour,
                    problem,
                    plane,
                    grid=grid.shape,
                    span=grid.span,
                    tolerance=grid.tolerance,
                    **vars(batchnorm),
                    path=path,
                    precision=precision,
                    progress=progress,
                    **origins[i],
                ),
                team,
                *axes(grid.shape, plane.span if grid.span is None else grid.span),
            )
            analysis.values(summary(surface, previous, analysis.split))
    if team.rank == 0:
        file.finish(analysis.output.picture)


def summary(surface: Surface, previous: Surface | None, split: str) -> str:
    """One line about a surface, with the number of points that the file had before."""
    text = f"{surface.label}: {split} loss from {surface.loss.min():.4g} to {surface.loss.max():.4g}"
    text += planes.summary(surface)
    if surface.columns:
        text += f"; {surface.interpolation()}"
    if surface.precision != "model":
        error = f"{surface.precision_error:.2g} of {surface.dtype} at up to {ERROR_POINTS} points"
        text += f"; {surface.precision}: within {error}"
    if previous:
        text += f"; {reused_points(previous, surface):,} of {surface.loss.size:,} points were in the file"
    return text

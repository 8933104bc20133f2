"""landscape contour"""

from __future__ import annotations

import functools

import click

from landscape.analysis.contour import ERROR_POINTS, axes, reused_points
from landscape.analysis.contour import contour as compute_contour
from landscape.cli import common, planes, processes
from landscape.cli.gridfile import GridFile
from landscape.core.memory import parse_size
from landscape.core.options import choose
from landscape.evaluation import evaluate
from landscape.results.surface import Surface


@click.command(
    epilog="Example: landscape contour runs/ss/last.h5 runs/dp/last.h5 --norm filter --span 1 --plot both.png"
)
@common.checkpoints
@click.option(
    "--plane",
    "kind",
    default="random",
    show_default=True,
    help="random; between (through two or three CKPTs); pca (of the step-*.h5 up to the CKPT); learners "
    "(nearest to all learners); eigen (Hessian eigenvectors of λ_max and λ_min).",
)
@common.plane_options("50", span=None)
@click.option(
    "--ignore",
    help="Random directions leave out: none, or bias+norm (bias and norm parameters). "
    "[default: bias+norm with --norm filter, else none]",
)
@common.batchnorm
@click.option(
    "--path",
    "way",
    default="auto",
    show_default=True,
    help="How points are evaluated: auto, batched, compiled, folded or pointwise.",
)
@click.option(
    "--precision",
    default="model",
    show_default=True,
    help="Arithmetic: model (that of --dtype), bfloat16 (networks that torch.fx can trace), tf32 (CUDA).",
)
@click.option(
    "--max-memory",
    "memory",
    metavar="SIZE",
    help="What a process may hold, such as 2.5GiB (on CUDA: of the GPU's memory). [default: a chunk of data, "
    "at most 256MiB, beside weights, directions and data]",
)
@processes.option
@common.device
@common.source
@common.quiet
def contour(
    checkpoints: tuple[str, ...],
    kind: str,
    grid: str,
    span: float | None,
    norm: str,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    force: bool,
    picture: str | None,
    ignore: str | None,
    bn: str,
    bn_samples: int,
    way: str,
    precision: str,
    memory: str | None,
    nproc: int,
    timeout: float,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """Loss contours around w_a of each CKPT, over a plane; several CKPTs share levels and colours.

    Random directions (the default) are the same for all CKPTs; "between" draws one surface through all. The
    other defaults are those of the paper's figures.

    The result file is written while the work goes on, and the same command goes on where it stopped. Points
    that it holds already are not computed again: a grid of 49 has every point of one of 25, one of 50 only
    the corners, and replaces the rest with --force only, as what the file holds of other checkpoints or by
    other options.
    """
    shape = common.parse_grid(grid)
    choose("--path", way, evaluate.PATHS)
    choose("--precision", precision, evaluate.PRECISIONS)
    max_memory = parse_size("--max-memory", memory) if memory else None
    team = processes.join(nproc, timeout)
    groups = planes.check(kind, common.open_checkpoints(checkpoints, source, quiet), norm, ignore)
    named = {"plane": kind, "norm": norm, "split": split}
    path = common.result_path(
        output, groups[0][0], "contour", picture, force=force, variant=named, goes_on=True
    )
    origins = [planes.about(group, kind, split, source) for group in groups]
    wanted = {"split": split, "kind": kind, "norm": norm, "dtype": dtype, "bn": bn, "precision": precision}
    drawn = {"seed": seed} if kind in ("random", "eigen") else {}
    quiet = quiet or team.rank > 0
    file = GridFile(path, Surface, origins, wanted | drawn, quiet, team, force)
    with team:
        for i, (group, progress) in enumerate(common.each("contour", groups, quiet)):
            problem = common.open_problem(group[0], split, source, device, dtype, quiet)
            if file.previous and kind == "eigen":  # costly to find, and the same but for rounding
                plane = file.previous.plane(problem.theta)
            else:
                plane = planes.make(kind, problem, group, norm, ignore, seed)
            surface, previous = file.add(
                functools.partial(
                    compute_contour,
                    problem,
                    plane,
                    grid=shape,
                    span=span,
                    bn=bn,
                    bn_samples=bn_samples,
                    path=way,
                    precision=precision,
                    max_memory=max_memory,
                    progress=progress,
                    **origins[i],
                ),
                team,
                *axes(shape, plane.span if span is None else span),
            )
            common.message(summary(surface, previous, split), quiet)
    if team.rank == 0:
        file.finish(picture)


def summary(surface: Surface, previous: Surface | None, split: str) -> str:
    """One line about a surface, and what of it was there before."""
    text = f"{surface.label}: {split} loss from {surface.loss.min():.4g} to {surface.loss.max():.4g}"
    text += planes.summary(surface)
    if surface.precision != "model":
        error = f"{surface.precision_error:.2g} of {surface.dtype} at up to {ERROR_POINTS} points"
        text += f"; {surface.precision}: within {error}"
    if previous:
        text += f"; {reused_points(previous, surface):,} of {surface.loss.size:,} points were there already"
    return text

"""landscape contour"""

from __future__ import annotations

import click

import landscape
from landscape import evaluate
from landscape.cli import common, planes
from landscape.options import choose


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
    picture: str | None,
    ignore: str | None,
    bn: str,
    bn_samples: int,
    way: str,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """Loss contours around w_a of each CKPT, over a plane; several CKPTs share levels and colours.

    Random directions (the default) are the same for all CKPTs; "between" draws one surface through all. The
    other defaults are those of the paper's figures.
    """
    shape = common.parse_grid(grid)
    choose("--path", way, evaluate.PATHS)
    groups = planes.check(kind, common.open_checkpoints(checkpoints), norm, ignore)
    path = common.result_path(output, groups[0][0], "contour", picture)
    results = []
    for group, progress in common.each("contour", groups, quiet):
        problem = common.open_problem(group[0], split, source, device, dtype)
        surface = landscape.contour(
            problem,
            planes.make(kind, problem, group, norm, ignore, seed),
            grid=shape,
            span=span,
            bn=bn,
            bn_samples=bn_samples,
            path=way,
            progress=progress,
            **planes.about(group, kind, split),
        )
        results.append(surface)
        common.message(
            f"{surface.label}: {split} loss from {surface.loss.min():.4g} to {surface.loss.max():.4g}"
            + planes.summary(surface),
            quiet,
        )
    common.write(results, path, picture)

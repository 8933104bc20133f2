"""landscape contour"""

from __future__ import annotations

import click

import landscape
from landscape import evaluate
from landscape.cli import common
from landscape.options import choose


@click.command(
    epilog="Example: landscape contour runs/ss/last.h5 runs/dp/last.h5 --norm filter --span 1 --plot both.png"
)
@common.checkpoints
@common.plane_options("50")
@click.option(
    "--path",
    "way",
    default="auto",
    show_default=True,
    help="How points are evaluated: auto, batched or pointwise.",
)
@common.device
@common.data_dir
@common.quiet
def contour(
    checkpoints: tuple[str, ...],
    grid: str,
    span: float,
    norm: str,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    picture: str | None,
    way: str,
    device: str,
    data_dir: str | None,
    quiet: bool,
) -> None:
    """Loss contours around w_a of each CKPT, over the plane of two random directions.

    Several checkpoints share directions, levels and colours. Defaults are those of the paper's figures.
    """
    shape = common.parse_grid(grid)
    choose("--path", way, evaluate.PATHS)
    runs = common.open_checkpoints(checkpoints)
    path = common.result_path(output, runs[0], "contour", picture)
    results = []
    with common.progress_bar("contour", quiet) as bar:
        for i, run in enumerate(runs):
            problem = common.open_problem(run, split, data_dir, device, dtype)
            plane = landscape.random_plane(problem, norm=norm, seed=seed)
            surface = landscape.contour(
                problem,
                plane,
                grid=shape,
                span=span,
                path=way,
                progress=lambda share, i=i: bar((i + share) / len(runs)),  # type: ignore[misc]
                **common.about(run, split),
            )
            results.append(surface)
            common.message(
                f"{surface.label}: {split} loss from {surface.loss.min():.4g} to {surface.loss.max():.4g}",
                quiet,
            )
    landscape.save(results, path)
    click.echo(str(path))
    common.write_picture(results, picture)

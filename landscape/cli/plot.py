"""landscape plot"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import landscape
from landscape import plots
from landscape.cli import common


@click.command(epilog="Example: landscape plot runs/ss/last.h5 runs/dp/last.h5 -o training.png")
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@click.option("-o", "--output", metavar="F", help="Picture, .png, .pdf or .svg. [default: FILE.png]")
@click.option("--title", default="", help="Title, instead of the usual one.")
@common.quiet
def plot(files: tuple[str, ...], output: str | None, title: str, quiet: bool) -> None:
    """Draw FILEs of one kind in one picture: training curves, contours, Hessian ratios, spectra or Δ(2).

    Panels of one picture share levels and colour scale.
    """
    picture = output or str(Path(files[0]).with_suffix(".png"))
    plots.check_format(picture)
    results: list[Any] = []
    for file in files:
        loaded = landscape.load(file)
        results += loaded if isinstance(loaded, list) else [loaded]
    common.make_folder(Path(picture).parent)
    figure = plots.draw(results)
    if title:
        figure.suptitle(title)
    plots.save_figure(figure, picture)
    click.echo(picture)

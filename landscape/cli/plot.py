"""landscape plot"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from landscape import plots
from landscape.checkpoint import run_folder
from landscape.checkpoint.run_folder import load
from landscape.cli import animate, common, options
from landscape.core.errors import FailedError, InputError
from landscape.geometry.vtk import save_vts
from landscape.plots.drawing import check_title
from landscape.plots.surface import STYLES
from landscape.results.grids import Surface

LOOK = options.grouped(
    "look",
    dict,
    click.option(
        "--log/--linear",
        default=None,
        help="Scale of colours and levels. [default: --log where losses differ by a factor over 100]",
    ),
    click.option(
        "--levels", type=int, metavar="N", help="About how many contour levels. [default: 0.005 apart, or 24]"
    ),
    click.option("--vmax", type=float, metavar="V", help="Highest level; above, its colour."),
    click.option(
        "--cmap", metavar="NAME", help="Colour map of matplotlib. [default: mako_r; rocket_r for ratios]"
    ),
    click.option("--labels", is_flag=True, help="Write losses on the contour lines."),
)


@click.command(epilog="Example: landscape plot runs/ss/last.h5 runs/dp/last.h5 -o training.png")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, shell_complete=options.paths("file"))
@click.option(
    "-o",
    "--output",
    metavar="F",
    shell_complete=options.paths("file"),
    help="Picture, .png, .pdf or .svg; .vts, a surface for ParaView; .gif or .mp4 of --animate. "
    "[default: FILE.png, FILE.gif]",
)
@click.option(
    "--style",
    type=options.Choice(STYLES),
    default="contour",
    show_default=True,
    help="Surfaces as contour, hillshade (a relief), surface (3-D), or difference (the first of two minus "
    "the second).",
)
@LOOK
@click.option("--title", default="", help="Title in place of the default one.")
@click.option("--dpi", type=float, metavar="D", help="Pixels per inch. [default: 150]")
@animate.options
@options.quiet
def plot(
    files: tuple[str, ...],
    output: str | None,
    style: str,
    look: dict[str, Any],
    title: str,
    dpi: float | None,
    film: animate.Film,
    quiet: bool,
) -> None:
    """Draw FILEs of one kind in one picture: training, sweeps, contours, lines, spectra, …

    Panels of one picture share levels and colour scale. Several surfaces exported to F.vts become F-0.vts,
    F-1.vts and so on. "--animate learners" draws a run's learners on the landscape that moves with them.
    """
    given = {name: value for name, value in look.items() if value not in (None, False) or name == "log"}
    given = {name: value for name, value in given.items() if value is not None}
    if dpi is not None:
        plots.check_dpi("--dpi", dpi)
    if film.of is not None:
        if given or title or style != "contour":
            word = next(iter(given), "title" if title else "style")
            raise InputError(f"--{word}: not allowed with --animate")
        animate.animate(files, output, film, dpi, quiet)
        return
    picture = Path(output or run_folder.checkpoint_in(Path(files[0])).with_suffix(".png"))
    export = picture.suffix == ".vts"
    if not export:
        plots.check_format(picture)
    results: list[Any] = []
    for file in files:
        loaded = load(run_folder.checkpoint_in(Path(file)))
        results += loaded if isinstance(loaded, list) else [loaded]
    if export:
        common.files(*_export(results, picture))
        return
    common.make_folder(picture.parent)
    check_title("--title", title)
    try:
        figure = plots.draw(results, style, **given)
        if title:
            figure.suptitle(title)
        plots.save_figure(figure, picture, dpi)
    except InputError:
        raise
    except (ArithmeticError, LookupError, ValueError) as error:  # numbers that no axis takes
        words = " ".join(str(error).split())[:120]
        raise FailedError(f"{', '.join(files)}: values that cannot be drawn ({words})") from error
    common.files(picture)


def _export(results: list[Any], path: Path) -> list[Path]:
    for result in results:
        if not isinstance(result, Surface):
            raise InputError(f"{path}: only a surface becomes a .vts file, this is a {type(result).__name__}")
    common.make_folder(path.parent)
    many = len(results) > 1
    paths = [path.with_stem(f"{path.stem}-{i}") if many else path for i in range(len(results))]
    for result, target in zip(results, paths, strict=True):
        save_vts(result, target)
    return paths

"""landscape basins"""

from __future__ import annotations

from pathlib import Path

import click

from landscape.cli import common, options
from landscape.core.errors import FailedError
from landscape.geometry.surfaces import AROUND
from landscape.results.base import load_results
from landscape.results.grids import Surface


@click.command(epilog="Example: landscape basins runs/dp/last-contour.h5 --rise 0.05 --plot basins.png")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, shell_complete=options.paths("file"))
@click.option(
    "--rise",
    "rises",
    type=float,
    multiple=True,
    metavar="NATS",
    help="Measure the region where the loss rises by at most NATS; can be repeated. [default: 24 rises up to "
    "the one at which the region reaches the edge of the grid]",
)
@click.option(
    "--least",
    type=float,
    metavar="NATS",
    help="The smallest persistence of a basin that is listed. [default: 1% of the median rise]",
)
@click.option(
    "--around", type=options.Choice(AROUND), help="The point in the region. [default: as the plane has it]"
)
@options.grouped("target", lambda output, **values: options.Output(output, **values), *options.OUTPUT)
@options.quiet
def basins(
    files: tuple[str, ...],
    rises: tuple[float, ...],
    least: float | None,
    around: str | None,
    target: options.Output,
    quiet: bool,
) -> None:
    """Basins of the contours in FILEs: where they merge, and how wide they are at a given rise.

    Pure arithmetic on files that landscape contour wrote. Prints the basins by persistence, and area, volume
    and widths of the region around the centre (or the lowest point) in distances of weight space.
    """
    surfaces = [surface for file in files for surface in _surfaces(Path(file))]
    first = Path(files[0])
    path = Path(target.path) if target.path else first.with_name(f"{first.stem}-basins.h5")
    common.check_targets(path, target.picture, target.force)
    results = []
    for surface in surfaces:
        results.append(surface.basins(rises or None, least=least, around=around))
        common.describe(results[-1])
    common.write(results, path, target.picture)


def _surfaces(path: Path) -> list[Surface]:
    """The surfaces in a file, all points of which are computed."""
    found = load_results(path)
    for each in found:
        if not isinstance(each, Surface):
            raise FailedError(f"{path}: holds a {each.schema}, a surface of landscape contour is needed")
        if not each.done.all() and not each.columns:
            raise FailedError(f"{path}: is not finished, run its command again to compute the other points")
    return [each for each in found if isinstance(each, Surface)]

"""landscape basins"""

from __future__ import annotations

from pathlib import Path

from landscape.cli import common
from landscape.cli.completion import Choice
from landscape.cli.options import command
from landscape.core.errors import FailedError
from landscape.geometry.surfaces import AROUND
from landscape.results.base import load_results
from landscape.results.grids import Surface


@command(
    rises={"flag": "--rise", "metavar": "NATS"},
    least={"metavar": "NATS"},
    around={"type": Choice(AROUND)},
    target=common.TARGET,
)
def basins(
    files: tuple[str, ...],
    rises: tuple[float, ...],
    least: float | None,
    around: str | None,
    target: common.Target,
) -> None:
    """Basins of the contours in FILEs: where they merge, and how wide they are at a given rise.

    Pure arithmetic on files that landscape contour wrote. Prints the basins by persistence, and area, volume
    and widths of the region around the centre (or the lowest point) in distances of weight space.

    Args:
        rises: Measure the region where the loss rises by at most NATS; can be repeated. [default: 24 rises up
            to the one at which the region reaches the edge of the grid]
        least: The smallest persistence of a basin that is listed. [default: 1% of the median rise]
        around: The point in the region. [default: as the plane has it]

    Example:
        landscape basins runs/dp/last-contour.h5 --rise 0.05 --plot basins.png
    """
    surfaces = [surface for file in files for surface in _surfaces(Path(file))]
    first = Path(files[0])
    path = target.path(first.with_name(f"{first.stem}-basins.h5"))
    results = [surface.basins(rises or None, least=least, around=around) for surface in surfaces]
    for result in results:
        common.describe(result)
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

"""landscape basins"""

from __future__ import annotations

from pathlib import Path

import click

from landscape.cli import common, options
from landscape.core.errors import FailedError
from landscape.geometry.basins import AROUND
from landscape.results.base import load_results
from landscape.results.grids import Basins, Surface


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
        common.values(table(results[-1]))
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


def table(result: Basins) -> str:
    """The numbers of one surface, a line each."""
    r = result
    lines = [
        f"{r.label}: {r.split} loss, local minima of the grid: {r.minima}, of them {len(r.minimum)} with "
        f"a persistence of at least {r.least:.3g}; SMAD {r.smad:.4g}"
    ]
    for k in range(len(r.minimum)):
        edge = ", on the edge of the grid" if r.at_edge[k] else ""
        rise = "meets no deeper one" if r.saddle_loss[k] == float("inf") else f"saddle {r.saddle_loss[k]:.5g}"
        lines.append(
            f"  basin {k + 1}: lowest {r.minimum_loss[k]:.5g} at ({r.minimum[k, 0]:.3g}, "
            f"{r.minimum[k, 1]:.3g}), {rise}, {100 * r.share[k]:.3g}% of the grid{edge}"
        )
    point = "centre" if r.around == "center" else "lowest point"
    lines.append(f"  region around the {point}, loss {r.reference_loss:.5g}; reaches the edge at a rise of "
                 f"{r.edge_rise:.4g}")  # fmt: skip
    heads = ("rise", "area", "volume", "longer axis", "shorter axis", "ratio")
    lines.append("  " + "".join(f"{head:>14}" for head in heads))
    for k in range(len(r.rise)):
        row = (r.rise[k], r.area[k], r.volume[k], *r.width[k], r.anisotropy[k])
        cut = "  cut by the edge" if r.cut[k] else ""
        lines.append("  " + "".join(f"{value:>14.5g}" for value in row) + cut)
    return "\n".join(lines)

"""landscape report"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from landscape.cli import common
from landscape.cli.analysis import SOURCE
from landscape.cli.grids import contour
from landscape.cli.instruments import spectrum
from landscape.cli.options import Group, command, option
from landscape.core.options import ends_in
from landscape.reports import contents, page
from landscape.reports.contents import Contents
from landscape.results.spectrum import Spectrum
from landscape.results.surfaces import Surface


@command(output={"metavar": "F.html"}, source=Group(dict, [*SOURCE.options, option("device")]))
def report(
    *,
    files: tuple[str, ...],
    output: str = "report.html",
    title: str = "",
    analyse: bool,
    source: dict[str, Any],
) -> None:
    """Write one page about runs and results.

    It has pictures, tables, the origin of the numbers, and surfaces that can be turned.

    A FILE is a checkpoint, a result, or the folder of a run with the results in it. The page says what is not
    in the files, and which command makes it.

    Args:
        output: The page: one file, which sends no request.
        title: Title in place of the default one.
        analyse: Compute what is missing of each checkpoint: a contour, eigenvalues and trace; files as the
            commands write them.

    Example:
        landscape report runs/ss runs/dp contour.h5 -o report.html --analyse
    """
    path = Path(output)
    ends_in("-o", path, page.FORMATS)
    page.check_installed()
    common.make_folder(path.parent)
    paths = [Path(file) for file in files]
    given = contents.read(paths)
    if analyse and (made := _analyze(given, path.parent, source)):
        given = contents.read([*paths, *made])
    page.write(given, path, title)
    common.files(path)


def _analyze(given: Contents, folder: Path, values: dict[str, Any]) -> list[Path]:
    """The files of what was missing: contours and spectra."""
    context = click.get_current_context()
    made = []
    parts: dict[str, Any] = {"quantities": ("extremes", "trace")}
    for kind, analysis, chosen in ((Surface, contour, {}), (Spectrum, spectrum, parts)):
        for path in given.lacking(kind):
            # Next to the checkpoint, where its folder can be written to; else next to the page.
            target = path.with_name(f"{path.stem}-{analysis.name}.h5")
            if not os.access(path.parent, os.W_OK):
                target = folder / f"{path.resolve().parent.name}-{target.name}"
            context.invoke(analysis, checkpoints=(str(path),), output=str(target), **chosen, **values)
            made.append(target)
    return made

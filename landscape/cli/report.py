"""landscape report"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from landscape.cli import common
from landscape.cli.analysis import SOURCE
from landscape.cli.grids import contour
from landscape.cli.instruments import spectrum
from landscape.cli.options import Group, command, option
from landscape.core.errors import OperationError
from landscape.core.options import ends_in
from landscape.reports import analyses, contents, page
from landscape.reports.contents import Contents, Run
from landscape.reports.parts import Page
from landscape.results.grids import Surface
from landscape.results.spectrum import Spectrum


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

    It has words, charts and tables.

    A FILE is a checkpoint, a result, or the folder of a run with the results in it. The page says what is not
    in the files, and which command makes it.

    Args:
        output: The page: one file, which sends no request.
        title: Title in place of the default one.
        analyse: Compute what is missing of each checkpoint: a contour, a plane of its learners or trajectory,
            eigenvalues and trace; files as the commands write them.

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
    page.write(page.build(given, title), path)
    common.files(path)


def finish(make: Callable[[], Page], path: Path) -> None:
    """End a command with a report; where a package for it is missing, a line says what to install."""
    try:
        page.check_installed()
    except OperationError as error:
        common.message(str(error))
        return
    page.write(make(), path)
    common.files(path)


def _analyze(given: Contents, folder: Path, values: dict[str, Any]) -> list[Path]:
    """The files of what was missing: contours, planes of learners or trajectories, spectra."""
    context = click.get_current_context()
    made = []

    def make(command: click.Command, run: Run, words: str, **chosen: Any) -> None:
        target = _target(run, words, folder)
        context.invoke(command, checkpoints=(str(run.path),), output=str(target), **chosen, **values)
        made.append(target)

    for run in given.lacking(Surface):
        make(contour, run, "contour")
    for run in given.runs:
        kind = analyses.plane_of(run)
        if len(analyses.frames_of(run)) >= analyses.FEWEST and run in given.lacking(Surface, kind=kind):
            make(contour, run, f"contour-{kind}", kind=kind)
    for run in given.lacking(Spectrum):
        make(spectrum, run, "spectrum", quantities=("extremes", "trace"))
    return made


def _target(run: Run, words: str, folder: Path) -> Path:
    """Next to the checkpoint, where its folder can be written to; else next to the page."""
    if os.access(run.path.parent, os.W_OK):
        return run.path.with_name(f"{run.path.stem}-{words}.h5")
    return folder / f"{run.path.resolve().parent.name}-{run.path.stem}-{words}.h5"

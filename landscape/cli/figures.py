"""landscape figures"""

from __future__ import annotations

import os
from pathlib import Path

import click

from landscape.cli import common, options
from landscape.cli.processes import timeout as timeout_option
from landscape.core.errors import FailedError, InputError
from landscape.core.options import choose, positive
from landscape.paper import figure, gallery
from landscape.paper.figure import SCALES, Figure, Scale, Work
from landscape.paper.run_cache import RunCache


@click.command(epilog="Example: landscape figures fig2a fig2b --scale laptop --nproc 2 -o figures")
@click.argument("names", metavar="[NAME…]", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All figures.")
@click.option(
    "--scale",
    default="laptop",
    show_default=True,
    help="smoke (bundled data, seconds), laptop (real data, two cores) or paper (its own setting).",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the runs and data that are needed, and about how long they take."
)
@click.option(
    "-o", "--output", default="figures", show_default=True, metavar="DIR", help="Folder for the gallery."
)
@click.option(
    "--runs", default="figure-runs", show_default=True, metavar="DIR", help="Folder for runs and results."
)
@click.option(
    "--nproc", default=1, show_default=True, help="Number of runs at a time, each in its own process."
)
@timeout_option
@options.data_dir
@options.device
@options.quiet
def figures(
    names: tuple[str, ...],
    every: bool,
    scale: str,
    dry_run: bool,
    output: str,
    runs: str,
    nproc: int,
    timeout: float,
    data_dir: str | None,
    device: str,
    quiet: bool,
) -> None:
    """Make the papers' figures and tables; without a NAME, list them.

    Trains the runs that a figure needs, each once for all figures, and writes DIR/NAME.png, NAME.csv and a
    README.md with the figures next to the paper's numbers. The same command resumes after an interruption. A
    figure whose data is missing is skipped, with a line that says what to download; the exit code is then 1.
    """
    positive("--nproc", nproc, least=1)
    positive("--timeout", timeout)
    choose("--scale", scale, SCALES)
    if every and names:
        raise InputError(f"--all: not allowed with a NAME ('{names[0]}')")
    chosen = [figure.get(name) for name in (figure.names() if every else dict.fromkeys(names))]
    if not chosen:
        for name in figure.names():
            found = figure.get(name)
            click.echo(f"{name:18} {found.where}: {found.title}")
        return
    cache = RunCache(
        Path(runs), device, data_dir, nproc, lambda line: common.message(f"  {line}", quiet), timeout=timeout
    )
    skipped = []
    for found in chosen:
        try:
            if dry_run:
                _plan(found, _scale(scale), cache)
            else:
                _make(found, _scale(scale), cache, Path(output), quiet)
        except FailedError as error:
            if not every and len(chosen) == 1:
                raise
            skipped.append(found.name)
            click.echo(f"{found.name}: skipped: {error}", err=True)
    if not dry_run and len(skipped) < len(chosen):
        click.echo(gallery.page(Path(output)))
    if skipped:
        raise FailedError(f"{len(skipped)} of {len(chosen)} figures were skipped: {', '.join(skipped)}")


def _scale(name: str) -> Scale:
    return next(scale for scale in SCALES if scale == name)


def _plan(found: Figure, scale: Scale, cache: RunCache) -> None:
    """Print the runs, the time and the data that ``found`` needs."""
    runs = found.runs(scale)
    cache.check_data(runs.values())
    missing = cache.missing(runs.values())
    data = ", ".join(sorted({recipe.data["name"] for recipe in runs.values()})) or "none"
    took = gallery.duration(cache.estimate(missing)) if missing else "no time"
    click.echo(
        f"{found.name}: {len(missing)} of {len(runs)} runs to train, about {took} of training one after "
        f"another; data: {data}"
    )


def _make(found: Figure, scale: Scale, cache: RunCache, output: Path, quiet: bool) -> None:
    runs = found.runs(scale)
    cache.check_data(runs.values())
    common.make_folder(output)
    common.make_folder(cache.folder)
    missing = cache.missing(runs.values())
    common.message(f"{found.name}: {found.title} ({len(missing)} of {len(runs)} runs to train)", quiet)
    with common.progress_bar(found.name, quiet) as bar:
        cache.progress = bar
        cache.run(missing)
    drawing, pictures = gallery.make(Work(found, scale, cache, runs), output)
    common.message(f"  {drawing.verdict}", quiet)
    for picture in pictures:
        click.echo(os.fspath(picture))

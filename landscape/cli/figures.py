"""landscape figures"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from landscape.cli import common, options, processes
from landscape.core.errors import FailedError, InputError
from landscape.core.files import printable
from landscape.paper import figure, gallery
from landscape.paper.figure import SCALES, Figure, Scale, Work
from landscape.paper.run_cache import RunCache


@click.command(epilog="Example: landscape figures fig2a fig2b --scale laptop --jobs 2 -o figures")
@click.argument("names", metavar="[NAME…]", nargs=-1, shell_complete=options.names(figure.names))
@click.option("--all", "every", is_flag=True, help="All figures.")
@click.option(
    "--scale",
    type=options.Choice(SCALES),
    default="laptop",
    show_default=True,
    help="smoke (bundled data, seconds), laptop (real data, two cores) or paper (its own setting).",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the runs and data that are needed, and about how long they take."
)
@click.option(
    "-o",
    "--output",
    default="figures",
    show_default=True,
    metavar="DIR",
    shell_complete=options.paths("dir"),
    help="Folder for the gallery.",
)
@click.option(
    "--runs",
    default="figure-runs",
    show_default=True,
    metavar="DIR",
    shell_complete=options.paths("dir"),
    help="Folder for runs and results.",
)
@processes.jobs
@options.quiet
def figures(
    jobs: processes.Jobs,
    names: tuple[str, ...],
    every: bool,
    scale: str,
    dry_run: bool,
    output: str,
    runs: str,
    quiet: bool,
) -> None:
    """Make the papers' figures and tables; without a NAME, list them.

    Trains the runs that a figure needs, each once for all figures, and writes DIR/NAME.png, NAME.csv and a
    README.md with the figures next to the paper's numbers, with --all report.html, the same as one page, too.
    The same command resumes after an interruption. A figure whose data is missing is skipped, with a line
    that says what to download; the exit code is then 1.
    """
    if every and names:
        raise InputError(f"--all: not allowed with a NAME ('{names[0]}')")
    chosen = [figure.get(name) for name in (figure.names() if every else dict.fromkeys(names))]
    if not chosen:
        entries = [figure.get(name) for name in figure.names()]
        common.values(
            "\n".join(f"{each.name:18} {each.where}: {each.title}" for each in entries),
            figures=[{"name": each.name, "where": each.where, "title": each.title} for each in entries],
        )
        return
    cache = RunCache(
        Path(runs),
        jobs.device,
        jobs.data_dir,
        jobs.at_once,
        message=lambda line: common.message(f"  {line}", quiet),
        timeout=jobs.timeout,
    )
    skipped, done = [], list[dict[str, Any]]()
    for entry in chosen:
        try:
            if dry_run:
                done.append(_plan(entry, _scale(scale), cache))
            else:
                done.append(_make(entry, _scale(scale), cache, Path(output), quiet))
            common.values("", figures=done)
        except FailedError as error:
            if not every and len(chosen) == 1:
                raise
            skipped.append(entry.name)
            click.echo(f"{entry.name}: skipped: {printable(error)}", err=True)
    if not dry_run and len(skipped) < len(chosen):
        common.files(gallery.page(Path(output)))
        if every:
            _report(Path(output), quiet)
    if skipped:
        raise FailedError(f"{len(skipped)} of {len(chosen)} figures were skipped: {', '.join(skipped)}")


def _report(folder: Path, quiet: bool) -> None:
    """The gallery as one page."""
    from landscape.cli import report  # and matplotlib: only where it is used
    from landscape.report.gallery import figures_page

    report.finish(lambda: figures_page(folder), folder / "report.html", quiet)


def _scale(name: str) -> Scale:
    return next(scale for scale in SCALES if scale == name)


def _plan(entry: Figure, scale: Scale, cache: RunCache) -> dict[str, Any]:
    """Print and return the runs, the time and the data that ``entry`` needs."""
    runs = entry.runs(scale)
    cache.check_data(runs.values())
    missing = cache.missing(runs.values())
    data = ", ".join(sorted({recipe.data["name"] for recipe in runs.values()})) or "none"
    with common.progress_bar(entry.name):
        seconds = cache.estimate(missing) if missing else 0.0
    took = gallery.duration(seconds) if missing else "no time"
    common.values(
        f"{entry.name}: {len(missing)} of {len(runs)} runs to train, about {took} of training one after "
        f"another; data: {data}"
    )
    return {"name": entry.name, "runs": len(runs), "missing": len(missing), "seconds": seconds, "data": data}


def _make(entry: Figure, scale: Scale, cache: RunCache, output: Path, quiet: bool) -> dict[str, Any]:
    """Train the missing runs of ``entry`` and draw it; its conclusion is printed and returned."""
    runs = entry.runs(scale)
    cache.check_data(runs.values())
    common.make_folder(output)
    common.make_folder(cache.folder)
    missing = cache.missing(runs.values())
    common.message(f"{entry.name}: {entry.title} ({len(missing)} of {len(runs)} runs to train)", quiet)
    with common.progress_bar(entry.name, quiet) as bar:
        cache.progress = bar
        cache.run(missing)
    with common.progress_bar(f"{entry.name}: analyses", quiet):
        drawing, pictures = gallery.make(Work(entry, scale, cache, runs), output)
    common.values(f"{entry.name}: {drawing.conclusion}")
    common.files(*pictures)
    return {"name": entry.name, "conclusion": drawing.conclusion, "claim_holds": drawing.claim_holds}

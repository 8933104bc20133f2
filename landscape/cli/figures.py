"""landscape figures"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import click

from landscape.cli import common, processes
from landscape.cli.options import FOLDER, Choice, command, offer
from landscape.cli.output import list_figures
from landscape.core.errors import InputError, OperationError
from landscape.core.files import printable
from landscape.core.memory import quantity
from landscape.paper import figure, pages
from landscape.paper.context import SCALES, Context, OutOfTimeError, Scale, identity
from landscape.paper.figure import Figure
from landscape.training.processes.children import Pool
from landscape.training.recipes.recipe import Recipe
from landscape.training.run.launch import share_of

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@command(
    names={"argument": True, "metavar": "[NAME…]", "shell_complete": offer(figure.names)},
    every={"flag": "--all"},
    scale={"type": Choice(SCALES)},
    budget={"metavar": "TIME"},
    output=FOLDER,
    runs=FOLDER,
    records=FOLDER,
    jobs=processes.JOBS,
)
def figures(
    *, names: tuple[str, ...], every: bool, scale: Scale = "laptop", budget: str | None, dry_run: bool,
    output: str = "figures", runs: str = "figure-runs", records: str | None, prune: bool,
    jobs: processes.Jobs,
) -> None:  # fmt: skip
    """Make the papers' figures and tables, or list them.

    Without a NAME, lists the figures and tables.

    Trains the runs that the figures need. Writes for each figure DIR/NAME.png, NAME.csv and NAME.md (the
    verdict on the paper's claim, and the paper's numbers), and for all of them a front page, README.md. The
    same command resumes after an interruption. A figure whose data is missing is skipped; the exit code is
    then 1.

    Args:
        every: Make all figures.
        scale: Size of the runs: smoke (bundled data, seconds), laptop (real data, two cores) or paper (the
            setting of each paper).
        budget: Stop after this time, such as 6h or 90min; the same command resumes. [default: no limit]
        dry_run: Print which runs and data are needed, and about how long the training takes.
        output: Folder for the pictures, their data and the pages.
        runs: Folder for runs, with weights.
        records: Folder for the records, two files for each figure, with the numbers of its runs and analyses;
            numbers in them are not computed again. [default: records in the folder of --output]
        prune: Once the record of a run is written, delete the weights that this command trained. Weights from
            which a figure of this scale is drawn are kept.

    Example:
        landscape figures fig2a fig2b --scale laptop --jobs 2 -o figures
    """
    budget_seconds = quantity("--budget", budget, UNITS) if budget is not None else math.inf
    if every and names:
        raise InputError(f"--all: not allowed with a NAME ('{names[0]}')")
    if jobs.share is not None and (dry_run or not (every or names)):
        raise InputError("--share: not allowed with --dry-run, nor without a NAME or --all")
    all_figures = [figure.get(name) for name in figure.names()]
    entries = all_figures if every else [figure.get(name) for name in dict.fromkeys(names)]
    if not entries:
        list_figures([{"name": f.name, "where": f.where, "title": f.title} for f in all_figures])
        return
    folder = Path(output)
    context = Context(
        # A dry run trains nothing, and so needs no processes.
        Path(runs), scale, jobs.device, jobs.data_dir, Pool() if dry_run else jobs.pool(),
        message=lambda line: common.message(f"  {line}"),
        records=Path(records) if records else folder / "records", until=time.time() + budget_seconds,
        # None: the weights of all runs are kept.
        runs_with_weights=figure.with_weights(all_figures, scale) if prune else None,
    )  # fmt: skip
    if jobs.share is not None:
        _train_share(entries, context, jobs.share)
        return
    skipped: list[str] = []
    unfinished: list[str] = []
    json_entries: list[dict[str, Any]] = []
    seconds_by_kind: dict[str, float] = {}  # kind of run -> seconds of one sample's gradient
    for entry in entries:
        try:
            if dry_run:
                json_entries.append(_plan(entry, context, seconds_by_kind))
            else:
                json_entry, all_runs_ended = _make(entry, context, folder)
                if json_entry:
                    json_entries.append(json_entry)
                if not all_runs_ended:
                    unfinished.append(entry.name)
            common.add_values(figures=json_entries)
        except OperationError as error:
            if not every and len(entries) == 1:  # the error of the only figure is the error of the command
                raise
            skipped.append(entry.name)
            click.echo(f"{entry.name}: skipped: {printable(error)}", err=True)
    if not dry_run and any(folder.glob("*.json")):  # the folder has a figure, made now or before
        common.print_files(pages.page(folder))
    if unfinished:
        common.message(f"--budget: {budget} are used; the same command resumes {', '.join(unfinished)}")
    if skipped:
        raise OperationError(f"{len(skipped)} of {len(entries)} figures were skipped: {', '.join(skipped)}")


def _train_share(entries: list[Figure], context: Context, share: str) -> None:
    """Train a share of the runs of all figures together, as figures have runs in common."""
    contexts = [entry.of(context) for entry in entries]
    recipes: dict[str, Recipe] = {}
    for figure_context in contexts:
        recipes |= {identity(cell.recipe): cell.recipe for cell in figure_context.cells}
    runs = share_of([*recipes.values()], share)

    def without_record() -> list[Recipe]:
        return [recipe for recipe in runs if not any(own.record(recipe) for own in contexts)]

    to_train = without_record()
    _check_data(context, to_train)
    common.make_folder(context.folder)
    with common.progress_bar("figures") as bar:
        dataclasses.replace(context, progress=bar).train(to_train)
    ended = len(runs) - len(without_record())
    common.print_values(f"share {share}: {ended} of {len(runs)} runs have ended", runs=len(runs), ended=ended)


def _plan(entry: Figure, context: Context, seconds_by_kind: dict[str, float]) -> dict[str, Any]:
    """Print and return the runs, the time and the data that a figure needs."""
    context = entry.of(context)
    runs, missing, seconds = context.cells, context.missing(), math.nan
    data = ", ".join(sorted({cell.recipe.data["name"] for cell in runs})) or "none"
    try:
        _check_data(context, missing)
        with common.progress_bar(entry.name):
            seconds = figure.seconds_of(context, missing, seconds_by_kind)
        time_text = f"about {pages.duration(seconds) if missing else 'no time'} of training one after another"
    except OperationError as error:
        time_text = "for a time that is known once their data is there"
        data += f" ({error})"
    text = f"{len(missing)} of {len(runs)} runs to train, {time_text}; data: {data}"
    common.print_values(f"{entry.name}: {text}")
    return {"name": entry.name, "runs": len(runs), "missing": len(missing), "seconds": seconds, "data": data}


def _check_data(context: Context, recipes: list[Recipe]) -> None:
    """Read the data sets of runs. OperationError says what to download."""
    for recipe in recipes:
        spec = recipe.spec("data")
        context.dataset(spec.name, spec.options)


def _make(entry: Figure, context: Context, output: Path) -> tuple[dict[str, Any] | None, bool]:
    """Train, analyze and draw a figure, and print its conclusion.

    Returns:
        The name and the conclusion of the figure, for --json (None if the budget was used up before the
        figure was drawn); and whether all runs have ended.
    """
    context = entry.of(context)  # with the runs of this figure, which are ``context.cells``
    count, missing = len(context.cells), context.missing()
    _check_data(context, missing)
    for folder in (output, context.folder):
        common.make_folder(folder)
    common.message(f"{entry.name}: {entry.title} ({len(missing)} of {count} runs to train)")
    if missing:
        with common.progress_bar(entry.name) as bar:
            dataclasses.replace(context, progress=bar).train(missing)
    still_missing = len(context.missing())
    if still_missing:
        common.message(f"  {still_missing} of {count} runs have not ended")
    try:
        with common.progress_bar(f"{entry.name}: analyses"):
            conclusion, pictures = pages.draw(entry, context, output)
    except OutOfTimeError:
        return None, False
    common.print_values(f"{entry.name}: {conclusion}")
    common.print_files(*pictures)
    return {"name": entry.name, "conclusion": conclusion}, not still_missing

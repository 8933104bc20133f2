"""A figure from its recipes to its files: rounds of runs, analyses, drawing; within a budget of time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from landscape.paper import gallery
from landscape.paper.figure import Drawing, Figure, Runs, Scale, WeightsNeededError, Work
from landscape.paper.run_cache import OutOfTimeError, RunCache, identity


def known_runs(entry: Figure, scale: Scale, cache: RunCache) -> Runs:
    """The runs of a figure, with those that follow from others where these have ended."""
    runs = dict(entry.runs(scale))
    while not cache.missing(runs.values()):
        more = {k: r for k, r in entry.more(Work(entry, scale, cache, runs)).items() if k not in runs}
        if not more:
            break
        runs |= more
    return runs


def train(entry: Figure, scale: Scale, cache: RunCache) -> Runs:
    """Train the runs of a figure, round by round, until all have ended or the budget is used.

    Returns:
        The runs that are known then, whether they have ended or not.

    Raises:
        FailedError: a run could not be made.
    """
    trained: set[str] = set()
    while True:
        runs = known_runs(entry, scale, cache)
        missing = cache.missing(runs.values())
        again = {identity(recipe) for recipe in missing} <= trained
        if not missing or again:  # what was tried before and has not ended was stopped by the budget
            return runs
        trained |= {identity(recipe) for recipe in missing}
        cache.run(missing)


def draw(
    entry: Figure, scale: Scale, cache: RunCache, runs: Runs, folder: Path
) -> tuple[Drawing, list[Path]]:
    """Draw a figure whose runs have ended, or some of them where it can be drawn so, and write its files.

    A run whose weights an analysis needs, and that is known by its record alone, is made again.

    Raises:
        OutOfTimeError: the budget is used before all is there that it needs.
        FailedError: a run or a file could not be made.
    """
    while True:
        work = Work(entry, scale, cache, runs)
        ended = [key for key in runs if work.ended(key)]
        if len(ended) < len(runs) and not (entry.partial and ended):
            raise OutOfTimeError
        try:
            return gallery.make(work, folder)
        except WeightsNeededError as needed:
            cache.check_time()
            cache.run([needed.recipe])


def with_weights(figures: Iterable[Figure], scale: Scale) -> set[str]:
    """The identities of the runs whose weights figures need."""
    return {identity(recipe) for entry in figures if entry.weights for recipe in entry.runs(scale).values()}

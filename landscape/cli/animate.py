"""The films of landscape plot --animate: what they show is computed here, coarsely."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch

from landscape.analysis.grids import contour
from landscape.analysis.planes import learners_plane
from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common
from landscape.cli.analysis import about, open_problem
from landscape.cli.options import Choice, grouped
from landscape.cli.source import SOURCE, Source
from landscape.cli.stability import known
from landscape.core.errors import FailedError, InputError
from landscape.core.options import positive
from landscape.core.progress import Progress
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.problem.problem import Problem
from landscape.results.grids import Plane

if TYPE_CHECKING:  # matplotlib is imported where a film is drawn
    from landscape.plots.animation import Frame

# The defaults are ours: 25 × 25 points show the shape at the size of a film, which with 60 frames of 6 a
# second lasts ten seconds.
GRID, FRAMES, FPS, DPI = 25, 60, 6, 100
# Half the width of the picture, relative to the largest coordinate of a learner at the median checkpoint
# (ours): the spread of a run falls by orders of magnitude, and its beginning would hide the rest.
WIDTH = 2.0


@dataclass(frozen=True)
class Film:
    """What a film is ``of`` (None: there is none), its grid, its number of frames and frames per second."""

    of: str | None
    grid: int
    frames: int
    fps: int
    source: Source


def _film(animate: str | None, film_grid: int, frames: int, fps: int, **source: Any) -> Film:
    return Film(animate, film_grid, frames, fps, Source.of_options(**source))


options = grouped(
    "film",
    _film,
    click.option(
        "--animate",
        type=Choice(("learners",)),
        help="A film of the run FILE: its learners on the landscape around w_a at its checkpoints, with a "
        "dial of lr·λ_max and its limit.",
    ),
    click.option("--film-grid", default=GRID, show_default=True, help="Points along each axis of a film."),
    click.option("--frames", default=FRAMES, show_default=True, help="Most frames of a film."),
    click.option("--fps", default=FPS, show_default=True, help="Frames a second of a film."),
    *SOURCE,
)


def animate(files: tuple[str, ...], output: str | None, film: Film, dpi: float | None, quiet: bool) -> None:
    """Write the film of one run."""
    positive("--film-grid", film.grid, least=2)
    positive("--frames", film.frames, least=1)
    positive("--fps", film.fps, least=1)
    if len(files) != 1:
        raise InputError(f"FILE: {len(files)} are not allowed with --animate, it takes one run")
    from landscape.plots import animation  # and matplotlib: only where something is drawn

    last = run_folder.checkpoint_in(Path(files[0]))
    path = Path(output) if output else last.with_suffix(".gif")
    animation.check_film(path)
    common.make_folder(path.parent)
    runs = checkpoints(last, film.frames)
    with common.progress_bar("surfaces", quiet) as bar:
        shots = frames(runs, film, bar)
    with common.progress_bar("film", quiet) as bar:
        animation.save_film(animation.film(shots, runs[-1].algorithm), path, film.fps, dpi or DPI, bar)
    common.files(path)


def checkpoints(last: Path, most: int) -> list[Checkpoint]:
    """At most ``most`` checkpoints, evenly chosen, of the run that ends with ``last``."""
    paths = [path for path in run_folder.steps(last.parent) if path != last]
    end = Checkpoint.load(last)
    if end.learners < 3:
        raise FailedError(f"{last}: {end.learners} learners span no plane, a film needs at least 3")
    before = [Checkpoint.load(path, whole_history=False) for path in paths]
    saved = [run for run in before if run.step < end.step and run.weights.shape == end.weights.shape]
    moving = [run for run in [*saved, end] if bool((run.weights != run.weights[0]).any())]
    if len(moving) < 2:
        raise FailedError(
            f"{last}: {len(moving)} checkpoints of its run have learners that differ, a film needs 2; "
            "train with --set checkpoint.every=N"
        )
    chosen = np.unique(np.linspace(0, len(moving) - 1, min(most, len(moving))).round().astype(int))
    return [moving[k] for k in chosen]


def frames(runs: list[Checkpoint], film: Film, progress: Progress) -> list[Frame]:
    """The surfaces around w_a of ``runs`` over one pair of directions, and where their sharpness stands.

    The directions are the first two principal components of the learners' spread over all of the checkpoints,
    each of which counts the same.
    """
    from landscape.plots.animation import Frame

    spreads = [run.weights.double() - run.weights.double().mean(0) for run in runs]
    rows = torch.cat([spread / spread.norm() for spread in spreads])
    first = open_problem(runs[0], "train", film.source, "cpu")
    directions = learners_plane(first, rows).directions
    places = [(spread.to(directions) @ directions.T).numpy() for spread in spreads]
    span = WIDTH * float(np.median([np.abs(place).max() for place in places]))
    shots = []
    for k, (run, place) in enumerate(zip(runs, places, strict=True)):
        problem = open_problem(run, "train", film.source, "cpu")
        markers = np.concatenate([place, np.zeros((1, 2))])
        labels = tuple(f"learner {j}" for j in range(len(place)))
        axes = ("direction 1 of the spread", "direction 2 of the spread")
        plane = Plane(
            problem.theta, directions, "learners", "none", 0, axes=axes, markers=markers,
            labels=(*labels, "w_a"), thetas=torch.cat((run.weights, run.mean[None])).to(problem.theta),
        )  # fmt: skip
        surface = contour(problem, plane, grid=film.grid, span=span, **about(run, "train"))
        history = _at(runs[-1], run.step)
        sharp, limit = _sharpness(run, problem, history)
        shots.append(Frame(surface, run.step, sharp, limit, history["train_loss"]))
        progress((k + 1) / len(runs))
    return shots


def _at(end: Checkpoint, step: int) -> dict[str, float]:
    """Of each column of a run's history, the last number up to ``step``; NaN if there is none."""
    upto = end.history["step"] <= step
    values = {name: column[upto & np.isfinite(column)] for name, column in end.history.items()}
    return {name: float(column[-1]) if len(column) else float("nan") for name, column in values.items()}


def _sharpness(run: Checkpoint, problem: Problem, history: dict[str, float]) -> tuple[float, float]:
    """(ηλ_max, its limit): the run's own numbers where it recorded them, else measured at its weights."""
    lr, limit, _ = known(run)
    limit = float("nan") if limit is None else limit
    if np.isfinite(history["lr_lambda_max"]):
        return history["lr_lambda_max"], limit
    return lr * float(top_eigenvalues(problem, 1, tol=0.05).values[0]), limit

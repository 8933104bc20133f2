"""The learners along a run, as dots in a plane with its contour beneath: a frame for each step file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.hdf5 import Array
from landscape.report import surfaces
from landscape.report.contents import NAMED, Contents, Run, missing_of
from landscape.report.parts import Missing, Section, chart_text, listed
from landscape.results.grids import Surface

MAX_FRAMES = 60  # step files of one run, at equal distances (ours: more cannot be told apart on a slider)
LEAST = 3  # step files: a plane of the trajectory takes two before the last
KINDS = ("learners", "pca")
_NO_PLANE = {
    "learners": "There is no plane through the learners of",
    "pca": "There is no plane through the trajectory of",
}
# Of the history, what stands next to a frame: (column, name, digits).
_READINGS = (
    ("train_loss", "training loss", "{:.4g}"),
    ("consensus", "consensus distance", "{:.3g}"),
    ("lr_lambda_max", "lr·λ_max", "{:.3g}"),
    ("lr_lambda_limit", "limit", "{:.3g}"),
)


def section(contents: Contents) -> tuple[Section, list[dict[str, Any]]]:
    """The section, and for each run with a plane of its learners or trajectory the frames."""
    scrubbers, without = [], []
    planeless: dict[str, list[Run]] = {}
    shown = surfaces.drawn(contents)
    for run in contents.runs:
        planes = [(k, s) for k, s in enumerate(shown) if s.kind in KINDS and contents.run_of(s) is run]
        files = frames_of(run)
        if len(files) < LEAST:
            without.append(run)
        elif not planes:
            planeless.setdefault(plane_of(run), []).append(run)
        else:
            checkpoints = [c for c in map(_load, files) if c.layout == run.checkpoint.layout]
            scrubbers += [_scrubber(run, k, surface, checkpoints) for k, surface in planes]
    missing = [
        entry
        for kind, runs in planeless.items()
        for entry in missing_of(_NO_PLANE[kind], "contour", f"--plane {kind}", runs)
    ]
    if without:
        names = "; ".join(run.name for run in without[:NAMED])
        few = f"There are fewer than {LEAST} checkpoints step-*.h5 next to {names}."
        missing.append(Missing(few, "landscape train RECIPE --set checkpoint.every=50"))
    text = (
        "Each dot is a learner, the star is their mean w_a, the line is the way of the mean: the points of "
        "the plane nearest to the weights. The distance from the plane stands below. The contour is that of "
        "the file, around the run's end."
    )
    made = Section(
        "scrubber",
        "Learners along the run",
        (text,) if scrubbers else (),
        missing=tuple(missing),
        widget="scrubber" if scrubbers else "",
    )
    return made, scrubbers


def plane_of(run: Run) -> str:
    """The kind of plane for the frames of a run: of its learners if three of them differ, else "pca"."""
    weights = run.checkpoint.weights
    return "learners" if len(weights) >= 3 and bool((weights != weights[0]).any()) else "pca"


def frames_of(run: Run) -> list[Path]:
    """The step files of a run, at most MAX_FRAMES, the last one among them."""
    files = []
    if run.checkpoint.has_recipe or run.path.name == "last.h5":
        files = [path for path in run_folder.steps(run.path.parent) if _step(path) <= run.checkpoint.step]
    if len(files) > MAX_FRAMES:
        files = [files[k] for k in np.linspace(0, len(files) - 1, MAX_FRAMES).round().astype(int)]
    return files


def _step(path: Path) -> int:
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def _load(path: Path) -> Checkpoint:
    return Checkpoint.load(path, whole_history=False)


def _scrubber(run: Run, k: int, surface: Surface, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    frames = []
    for c in sorted(checkpoints, key=lambda c: c.step):
        points, _ = _project(surface, c.weights.numpy())
        mean, away = _project(surface, c.mean.numpy()[None])
        frames.append(
            {
                "step": c.step,
                "points": listed(points),
                "mean": listed(mean[0]),
                "text": _reading(run, c.step) + f"; w_a is {away[0]:.3g} from the plane",
            }
        )
    plane = "plane of the learners" if surface.kind == "learners" else "plane of the trajectory"
    return {"name": f"{chart_text(run.name)}: {plane}", "surface": k, "frames": frames}


def _project(surface: Surface, weights: Array) -> tuple[Array, Array]:
    """Coordinates (n, 2) of the points of the plane nearest to ``weights`` (n, P), and their distances."""
    away = weights.astype(np.float64) - surface.center
    directions = np.asarray(surface.directions, dtype=np.float64)
    places = np.linalg.solve(directions @ directions.T, directions @ away.T).T
    rest = away - places @ directions
    return places, np.linalg.norm(rest, axis=1)


def _reading(run: Run, step: int) -> str:
    """The numbers of the history at the last row up to ``step`` that has each."""
    history = run.checkpoint.history
    rows = history["step"] <= step
    words = [f"step {step:,}"]
    for column, name, form in _READINGS:
        values = history[column][rows & np.isfinite(history[column])] if column in history else np.zeros(0)
        if len(values) and math.isfinite(values[-1]):
            words.append(f"{name} {form.format(values[-1])}")
    return ", ".join(words)

"""Surfaces: contours with one colour scale, the three-dimensional view, and learners along a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.hdf5 import Array
from landscape.plots.surface import scale
from landscape.report.contents import NAMED, Contents, Run, missing_of
from landscape.report.parts import Chart, Missing, Section, chart_text, described, listed
from landscape.results.grids import Surface

# Points of all surfaces together: about 1.6 MB of the page. Finer grids are drawn with every k-th row (ours).
MAX_POINTS = 200_000
_KINDS = {
    "random": "random directions",
    "between": "the plane through checkpoints",
    "pca": "the principal components of a trajectory",
    "learners": "the plane nearest to the learners",
    "eigen": "eigenvectors of λ_max (x) and λ_min (y)",
}


@dataclass(frozen=True)
class Group:
    """Surfaces of one kind of plane, with one colour scale.

    Attributes:
        title: what they have in common.
        surfaces: (place among all surfaces, surface).
    """

    title: str
    surfaces: tuple[tuple[int, Surface], ...]

    @property
    def scale(self) -> dict[str, Any]:
        """The common scale: whether it is logarithmic, its ends, and the lines between; of log10 then."""
        shown = scale([surface.loss for _, surface in self.surfaces])
        log = isinstance(shown.norm, LogNorm)
        chosen = np.log10(shown.levels) if log else shown.levels
        inner = chosen[1:-1] if len(chosen) > 3 else chosen  # the outer ones may be moved to the extremes
        step = float(inner[1] - inner[0])
        return {
            "log": log,
            "low": float(chosen[0]),
            "high": float(chosen[-1]),
            "start": float(inner[0]),
            "end": float(inner[-1]),
            "size": step,
        }


def drawn(contents: Contents) -> list[Surface]:
    """The surfaces that can be drawn: grids from 2 × 2 with a finite loss."""
    every = [surface for surface, _ in contents.of(Surface)]
    return [s for s in every if min(s.loss.shape) >= 2 and np.isfinite(s.loss).any()]


def groups(contents: Contents) -> list[Group]:
    """The surfaces by kind of plane, normalisation and split."""
    members: dict[str, list[tuple[int, Surface]]] = {}
    for k, surface in enumerate(drawn(contents)):
        members.setdefault(_title(surface), []).append((k, surface))
    order = [*_KINDS]  # the plane that all checkpoints share comes first
    every = [Group(title, tuple(surfaces)) for title, surfaces in members.items()]
    return sorted(every, key=lambda g: order.index(kind) if (kind := g.surfaces[0][1].kind) in order else 9)


def data(contents: Contents) -> dict[str, Any]:
    """The surfaces and the scales of their groups, as the page's script takes them."""
    every = groups(contents)
    group_of = {k: i for i, group in enumerate(every) for k, _ in group.surfaces}
    surfaces = drawn(contents)
    total = sum(surface.loss.size for surface in surfaces)
    stride = math.ceil(math.sqrt(total / MAX_POINTS)) if total > MAX_POINTS else 1
    return {
        "surfaces": [_surface(s, stride, group_of[k]) for k, s in enumerate(surfaces)],
        "groups": [{"title": chart_text(group.title), "scale": group.scale} for group in every],
        "stride": stride,
    }


def sections(contents: Contents) -> list[Section]:
    """A section of contours for each group, and the three-dimensional view of all surfaces."""
    every = groups(contents)
    made = [
        Section(
            f"contours-{i}",
            f"Contours: {group.title}" if len(every) > 1 else "Contours",
            (_intro(group, contents),),
            tuple(_chart(k, surface) for k, surface in group.surfaces),
            (described("These surfaces", [s for _, s in group.surfaces]),),
            missing=_missing(contents) if i == len(every) - 1 else (),
            linked=f"group-{i}" if len(group.surfaces) > 1 else "",
        )
        for i, group in enumerate(every)
    ]
    if not made:
        return [Section("contours-0", "Contours", missing=_missing(contents))]
    text = (
        "Height and colour are the loss, on one scale for both views; turning one turns the other. Dots are "
        "learners or checkpoints, at the height of the surface below them. Drag to turn, or use the buttons."
    )
    return [*made, Section("space", "In three dimensions", (text,), widget="scene")]


def _title(surface: Surface) -> str:
    norm = f", normalisation: {surface.norm}" if surface.kind == "random" else ""
    loss = f"{surface.split} loss" if surface.split else "loss"
    return f"{loss} over {_KINDS.get(surface.kind, surface.kind)}{norm}"


def _intro(group: Group, contents: Contents) -> str:
    text = f"{group.title[0].upper()}{group.title[1:]}, in nats."
    scale = group.scale
    if scale["log"]:
        text += (
            f" The scale is logarithmic: each line is {100 * (10 ** scale['size'] - 1):.0f}% above the last."
        )
    else:
        text += f" Lines are {scale['size']:.3g} apart."
    if len(group.surfaces) > 1:
        text += (
            " All panels have one colour scale and the same lines. Point at a place, or move there with the "
            "arrow keys, and the other panels show the same coordinates."
        )
    if (stride := data(contents)["stride"]) > 1:
        text += f" Of these fine grids, every {stride}th row and column is drawn; numbers are of all points."
    return text


def _chart(k: int, surface: Surface) -> Chart:
    loss = surface.loss[np.isfinite(surface.loss)]
    ny, nx = surface.loss.shape
    label = surface.label or f"surface {k}"
    alt = (
        f"Contours of the loss of {label} on {nx} × {ny} points, from {loss.min():.4g} to {loss.max():.4g}, "
        f"{_centre(surface):.4g} near the centre."
    )
    return Chart(f"surface-{k}", label, alt, {"surface": k})


def _centre(surface: Surface) -> float:
    return float(surface.loss[np.abs(surface.y).argmin(), np.abs(surface.x).argmin()])


def _surface(surface: Surface, stride: int, group: int) -> dict[str, Any]:
    finite = np.where(np.isfinite(surface.loss), surface.loss, np.inf)
    i, j = np.unravel_index(finite.argmin(), finite.shape)
    return {
        "label": chart_text(surface.label or "surface"),
        "x": listed(surface.x[::stride]),
        "y": listed(surface.y[::stride]),
        "z": listed(surface.loss[::stride, ::stride]),
        "axes": [chart_text(axis) for axis in surface.axes],
        "group": group,
        "kind": surface.kind,
        "lowest": listed([surface.x[j], surface.y[i]]),
        "markers": _markers(surface),
    }


def _markers(surface: Surface) -> list[dict[str, Any]]:
    """The weights that define the plane, or its centre."""
    if not len(surface.markers):
        return [{"x": 0, "y": 0, "text": "centre, w_a", "role": "mean"}]
    roles = {"pca": "path", "learners": "learner", "between": "anchor"}
    role = [roles.get(surface.kind, "anchor")] * len(surface.markers)
    if surface.kind in ("pca", "learners"):
        role[-1] = "mean"
    losses = surface.marker_loss if len(surface.marker_loss) == len(role) else np.full(len(role), np.nan)
    return [
        {
            "x": listed([place[0]])[0],
            "y": listed([place[1]])[0],
            "text": chart_text(label) + (f", own loss {loss:.4g}" if math.isfinite(loss) else ""),
            "role": r,
        }
        for place, label, loss, r in zip(surface.markers, surface.labels, losses, role, strict=True)
    ]


def _missing(contents: Contents) -> tuple[Missing, ...]:
    return missing_of("There is no contour around", "contour", "", contents.lacking(Surface))


MAX_FRAMES = 60  # step files of one run, at equal distances (ours: more cannot be told apart on a slider)
FEWEST = 3  # step files: a plane of the trajectory takes two before the last
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


def scrubber_section(contents: Contents) -> tuple[Section, list[dict[str, Any]]]:
    """The scrubber_section, and for each run with a plane of its learners or trajectory the frames."""
    scrubbers, without = [], []
    planeless: dict[str, list[Run]] = {}
    shown = drawn(contents)
    for run in contents.runs:
        planes = [(k, s) for k, s in enumerate(shown) if s.kind in KINDS and contents.run_of(s) is run]
        files = frames_of(run)
        if len(files) < FEWEST:
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
        few = f"There are fewer than {FEWEST} checkpoints step-*.h5 next to {names}."
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
        files = [path for path in run_folder.steps(run.path.parent) if _step_of(path) <= run.checkpoint.step]
    if len(files) > MAX_FRAMES:
        files = [files[k] for k in np.linspace(0, len(files) - 1, MAX_FRAMES).round().astype(int)]
    return files


def _step_of(path: Path) -> int:
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

"""Surfaces: contours side by side with one colour scale, and the data of the three-dimensional view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from landscape.plots.surface_parts import scale
from landscape.report.contents import Contents, missing_of
from landscape.report.parts import Chart, Missing, Section, Table, chart_text, listed, number, text_cells
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
            (_table(group.surfaces),),
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


def _table(surfaces: Sequence[tuple[int, Surface]]) -> Table:
    rows = []
    for k, s in surfaces:
        loss = s.loss[np.isfinite(s.loss)]
        at = _centre(s)
        lost = int(s.loss.size - loss.size)
        rows.append(
            (
                *text_cells(s.label or f"surface {k}"),
                *(number(float(v)) for v in (at, loss.min(), loss.max(), np.median(loss) - loss.min())),
                number(s.span),
                number(float(lost)),
            )
        )
    columns = (
        "surface", "loss near the centre", "lowest", "highest", "median rise above the lowest", "span",
        "points without a finite loss",
    )  # fmt: skip
    return Table("The losses of these surfaces, in nats", columns, tuple(rows))


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

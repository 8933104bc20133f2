"""The shape of a surface: its basins, and how wide the region below a level is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np

from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.core.options import choose, positive
from landscape.results.base import Provenance, Result
from landscape.results.merge_tree import MergeTree, merge_tree
from landscape.results.regions import FineGrid

# A basin less deep than this share of the median rise above the lowest loss is not listed (ours): it cannot
# be seen in a picture.
LEAST = 0.01
# Rises up to the one at which the region reaches the edge of the grid (ours: a smooth curve).
RISES = 24
AROUND = ("center", "lowest")


@dataclass(frozen=True)
class Basins(Result):
    """The basins of a surface, and the region around one point in which the loss rises by less than a bound.

    All numbers are of the surface as it was computed: of its grid, and of bilinear interpolation between the
    points. They have no standard errors; another sample of the data, or another plane, gives other numbers.

    A basin is a component of the points below a level, where a point of the grid has eight neighbours; it
    ends at the saddle where it meets a deeper one (persistence, :mod:`landscape.results.merge_tree`).

    Attributes:
        x, y, loss: of the surface: (nx,), (ny,), (ny, nx).
        gram: (2, 2), the inner products of the directions, by which steps in the plane become distances.
        basin: (ny, nx), the number of the basin to which a descent from each point leads, from neighbour to
            lowest neighbour; −1 where the loss is not finite.
        minimum, saddle: (M, 2), coordinates of the lowest point of each basin and of the saddle where it
            meets a deeper one (NaN: nowhere on the grid), in order of persistence, the largest first.
        minimum_loss, saddle_loss: (M,), the losses there in nats; infinite where there is no saddle.
        share: (M,), of the points of the grid.
        at_edge: (M,), whether the lowest point lies on the edge of the grid, so that there is none inside.
        least: the smallest persistence in nats of a basin that is listed; all others belong to one that is.
        minima: the number of local minima of the grid, whatever their persistence.
        smad: the saddle-minimum average distance in nats (Landscaper; arXiv 2602.07135): the mean over all
            local minima of the rise to the first saddle, unweighted; 0 where there is but one minimum. That
            package may join other points of the grid as neighbours.
        around: "center" or "lowest": the point of which the other numbers are.
        reference, reference_loss: its coordinates (2,), and the loss there in nats.
        rise: (R,), rises above it in nats.
        area: (R,), of the connected region around it where the loss is at most that high, in squared
            distances.
        volume: (R,), the integral over that region of what the loss lies below that height, in nats times
            squared distances.
        width: (R, 2), the axes of the ellipse with the region's second moments, the longer one first: for an
            elliptic region its own. Distances in weight space.
        cut: (R,), whether the region reaches the edge of the grid, so that area, volume and widths are too
            small.
        edge_rise: the rise at which the region reaches the edge; infinite if it never does.
        split, label, source, source_sha256: of the surface.

    Example:
        >>> from landscape.results.basin import parabola
        >>> basins = parabola().basins([0.25])
        >>> len(basins.minimum), basins.width.round(2).tolist(), basins.anisotropy.round(2).tolist()
        (1, [[1.0, 1.0]], [1.0])
    """

    schema: ClassVar[str] = "landscape.basins"
    shapes: ClassVar[Mapping[str, str]] = {
        "x": "x+",
        "y": "y+",
        "loss": "y x",
        "basin": "y x",
        "gram": "direction other_direction",
        "minimum": "number+ direction",
        "saddle": "number direction",
        "minimum_loss": "number",
        "saddle_loss": "number",
        "share": "number",
        "at_edge": "number",
        "reference": "direction",
        "rise": "rise+",
        "area": "rise",
        "volume": "rise",
        "width": "rise axis",
        "cut": "rise",
    }
    axes_of: ClassVar[tuple[str, ...]] = ("x", "y", "rise")
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "direction": ("x", "y"),
        "other_direction": ("x", "y"),
        "axis": ("long", "short"),
    }
    units: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("loss", "minimum_loss", "saddle_loss", "least", "smad", "reference_loss", "rise", "edge_rise"), "nat"
    ) | {"width": "1", "area": "1", "share": "1", "volume": "nat"}
    table: ClassVar[str] = "rise"

    x: Array
    y: Array
    loss: Array
    gram: Array
    basin: Array
    minimum: Array
    saddle: Array
    minimum_loss: Array
    saddle_loss: Array
    share: Array
    at_edge: Array
    least: float
    minima: int
    smad: float
    around: str
    reference: Array
    reference_loss: float
    rise: Array
    area: Array
    volume: Array
    width: Array
    cut: Array
    edge_rise: float
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""

    @property
    def persistence(self) -> Array:
        """(M,), the rise from each minimum to its saddle; infinite for one that meets no deeper basin."""
        return self.saddle_loss - self.minimum_loss

    @property
    def anisotropy(self) -> Array:
        """(R,), the longer over the shorter axis: √(λ₁/λ₂) for curvatures λ₁ > λ₂ in the plane."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Array = self.width[:, 0] / self.width[:, 1]
        return ratio

    @property
    def equivalent_width(self) -> Array:
        """(R,), the diameter of the circle with the region's area."""
        width: Array = 2 * np.sqrt(self.area / np.pi)
        return width


@dataclass(frozen=True)
class Sheet:
    """What basins are found on: coordinates (nx,), (ny,), losses (ny, nx), and products of directions (2, 2).

    ``error``: the largest error of a loss in nats, such as that of interpolation.

    Example:
        >>> grid = np.arange(3.0)
        >>> Sheet(grid, grid, np.ones((3, 3)), np.eye(2)).error
        0.0
    """

    x: Array
    y: Array
    loss: Array
    gram: Array
    error: float = 0.0


def find_basins(
    sheet: Sheet,
    around: str,
    rises: Sequence[float] | None = None,
    least: float | None = None,
    **about: Unpack[Provenance],
) -> Basins:
    """The basins of a sheet; see :meth:`landscape.Surface.basins`.

    Example:
        >>> grid = np.linspace(-1, 2, 31)
        >>> sheet = Sheet(grid, grid, grid**4 - grid**2 + grid[:, None] ** 2, np.eye(2))
        >>> find_basins(sheet, "lowest").persistence.round(2).tolist()
        [inf, 0.25]
    """
    choose("around", around, AROUND)
    _check(sheet)
    finite = sheet.loss[np.isfinite(sheet.loss)]
    if least is None:
        least = max(LEAST * float(np.median(finite) - finite.min()), 2 * sheet.error)
    positive("least", least, least=0)
    tree = merge_tree(sheet.loss)
    first = tree.first[np.isfinite(tree.first)]
    listed = tree.without(max(least, float(np.nextafter(0, 1))))
    start = (0.0, 0.0) if around == "center" else tuple(_places(sheet, listed.minimum[:1])[0])
    _check_start(sheet, around, start)
    fine = FineGrid.of(sheet.x, sheet.y, sheet.loss, sheet.gram, start)
    edge = fine.edge_rise()
    height = np.array(_default_rises(fine, edge) if rises is None else sorted(map(float, rises)))
    for rise in height:
        positive("rises", float(rise))
    if not len(height) or len(np.unique(height)) < len(height):
        raise InputError(f"rises: {list(height)} is not allowed, it must hold different numbers > 0")
    regions = [fine.region(float(rise)) for rise in height]
    return Basins(
        x=sheet.x,
        y=sheet.y,
        loss=sheet.loss,
        gram=sheet.gram,
        **_listed(sheet, listed),
        least=least,
        minima=len(tree.minimum),
        smad=float(np.mean(first)) if len(first) else 0.0,
        around=around,
        reference=np.array([fine.x[fine.start[1]], fine.y[fine.start[0]]]),
        reference_loss=fine.reference,
        rise=height,
        area=np.array([r.area for r in regions]),
        volume=np.array([r.volume for r in regions]),
        width=np.stack([r.width for r in regions]),
        cut=np.array([r.cut for r in regions]),
        edge_rise=edge,
        **about,
    )


def _check(sheet: Sheet) -> None:
    if min(sheet.loss.shape) < 2:
        raise InputError(f"grid: {sheet.loss.shape[::-1]} points have no basins, 2 × 2 points are the fewest")
    if not np.isfinite(sheet.loss).any():
        raise FailedError("loss: no value is finite, there is no basin")
    u, v, both = sheet.gram[0, 0], sheet.gram[1, 1], sheet.gram[0, 1]
    if not (np.isfinite(sheet.gram).all() and u * v - both**2 > 1e-12 * u * v):
        raise FailedError("directions: they are parallel, zero or not finite, so that areas mean nothing")


def _check_start(sheet: Sheet, around: str, start: Sequence[float]) -> None:
    """FailedError for a centre outside the grid, or beside a loss that is not finite."""
    known = True
    for grid, at in zip((sheet.x, sheet.y), start, strict=True):
        known &= bool(grid[0] <= at <= grid[-1])
    if known:
        beside = [
            np.flatnonzero(np.abs(grid - at) < np.diff(grid).max())
            for grid, at in zip((sheet.y, sheet.x), start[::-1], strict=True)
        ]
        known = around == "lowest" or bool(np.isfinite(sheet.loss[np.ix_(*beside)]).all())
    if not known:
        raise FailedError(f"around: '{around}' is not on the grid, or its loss is not finite; give 'lowest'")


def _default_rises(fine: FineGrid, edge: float) -> Array:
    """Equal steps up to the edge's rise; if it is never cut, or always, to the highest loss."""
    top = edge
    if not 0 < edge < np.inf:
        top = float(fine.loss[np.isfinite(fine.loss)].max()) - fine.reference
    if not top > 0:
        raise FailedError(f"rises: no loss is above that at the reference point, {fine.reference:.4g}")
    return top * np.arange(1, RISES + 1) / RISES


def _places(sheet: Sheet, points: Array) -> Array:
    """(M, 2), the coordinates of points of the flattened grid; NaN for −1."""
    rows, columns = np.divmod(points, len(sheet.x))
    at = np.stack([sheet.x[columns], sheet.y[rows]], axis=1)
    return np.where(points[:, None] < 0, np.nan, at)


def _listed(sheet: Sheet, tree: MergeTree) -> dict[str, Array]:
    """The fields of :class:`Basins` of which there is one for each basin."""
    flat = sheet.loss.ravel()
    rows, columns = np.divmod(tree.minimum, len(sheet.x))
    edge = np.isin(rows, (0, len(sheet.y) - 1)) | np.isin(columns, (0, len(sheet.x) - 1))
    count = np.bincount(tree.basin[tree.basin >= 0], minlength=len(tree.minimum))
    return {
        "basin": tree.basin,
        "minimum": _places(sheet, tree.minimum),
        "saddle": _places(sheet, tree.saddle),
        "minimum_loss": flat[tree.minimum],
        "saddle_loss": np.where(tree.saddle < 0, np.inf, flat[tree.saddle]),
        "share": count / flat.size,
        "at_edge": edge,
    }

"""The basins of a surface: where they merge, and how wide the region below a level is.

As a level rises, each local minimum begins a component of the points below it. Where two components meet, at
a saddle, the one with the higher minimum ends: the saddle's height above its minimum is its persistence
(Edelsbrunner and Harer 2010, section VII.1, "elder rule").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

import numpy as np

from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.core.options import choose, positive
from landscape.results.base import Provenance
from landscape.results.grids import CENTERED, Basins, Surface


@dataclass(frozen=True)
class MergeTree:
    """Basins in order of persistence, the largest first; those that merge with no deeper one are first.

    Attributes:
        minimum: (M,), the place of each basin's lowest point in the flattened grid.
        saddle: (M,), the place where it merges with a deeper basin; −1: nowhere.
        into: (M,), the number of that basin; −1: none.
        persistence: (M,), the loss at the saddle less that at the minimum; infinite where there is no saddle.
        first: (M,), the rise above its minimum at which it first merges with any other, deeper or not;
            infinite for one that never does.
        basin: (ny, nx), the basin to which a descent from each point leads, from neighbour to lowest
            neighbour; −1 where the loss is not finite.
    """

    minimum: Array
    saddle: Array
    into: Array
    persistence: Array
    first: Array
    basin: Array

    def without(self, least: float) -> MergeTree:
        """The tree without basins of a persistence below ``least``: parts of those that they merge with."""
        kept = int(np.searchsorted(-self.persistence, -least, "right"))
        target = np.arange(len(self.minimum) + 1)  # the last one stands for −1
        for k in range(kept, len(self.minimum)):
            target[k] = target[self.into[k]]  # a deeper basin, whose persistence is not smaller
        return MergeTree(
            self.minimum[:kept], self.saddle[:kept], self.into[:kept], self.persistence[:kept],
            self.first[:kept], np.where(self.basin < 0, -1, target[self.basin]),
        )  # fmt: skip


def merge_tree(loss: Array) -> MergeTree:
    """The merge tree of ``loss`` (ny, nx), where a point has eight neighbours.

    Losses that are not finite are above all others and belong to no basin. A plateau is one minimum at most.
    """
    ny, nx = loss.shape
    value = loss.ravel()
    order = np.argsort(np.where(np.isfinite(value), value, np.inf), kind="stable")
    order = order[: int(np.isfinite(value).sum())]
    rank = np.full(value.size, -1)
    rank[order] = np.arange(len(order))
    root = np.full(value.size, -1).tolist()  # of a point that was not reached: −1
    merged: dict[int, tuple[int, int]] = {}  # minimum -> (minimum it merges into, saddle)
    first: dict[int, float] = {}
    owner = np.full(value.size, -1)

    def find(point: int) -> int:
        while root[point] != point:
            root[point] = root[root[point]]
            point = root[point]
        return point

    for point in order.tolist():
        y, x = divmod(point, nx)
        around = [
            j * nx + i
            for j in range(max(y - 1, 0), min(y + 2, ny))
            for i in range(max(x - 1, 0), min(x + 2, nx))
        ]
        met = sorted({find(other) for other in around if root[other] >= 0}, key=rank.__getitem__)
        elder = met[0] if met else point
        root[point] = elder
        lowest = min((other for other in around if root[other] >= 0), key=rank.__getitem__)
        owner[point] = owner[lowest] if met else point
        for other in met[1:]:
            root[other] = elder
            merged[other] = elder, point
        apart = [minimum for minimum in met if value[minimum] < value[point]]  # others are of one plateau
        for minimum in apart if len(apart) > 1 else []:
            first.setdefault(minimum, float(value[point] - value[minimum]))
    return _sorted(value, owner.reshape(ny, nx), merged, first)


def _sorted(
    value: Array, owner: Array, merged: dict[int, tuple[int, int]], first: dict[int, float]
) -> MergeTree:
    """The tree with its basins in order; minima of persistence 0 belong to the basin that they merge with."""
    every = np.unique(owner[owner >= 0])
    rise = {m: value[merged[m][1]] - value[m] if m in merged else np.inf for m in every.tolist()}
    order = sorted(every.tolist(), key=lambda m: (-rise[m], value[m], m))
    number = {m: k for k, m in enumerate(order)}
    tree = MergeTree(
        minimum=np.array(order, dtype=np.int64),
        saddle=np.array([merged[m][1] if m in merged else -1 for m in order], dtype=np.int64),
        into=np.array([number[merged[m][0]] if m in merged else -1 for m in order], dtype=np.int64),
        persistence=np.array([rise[m] for m in order], dtype=np.float64),
        first=np.array([first.get(m, np.inf) for m in order], dtype=np.float64),
        basin=np.vectorize(lambda m: number.get(m, -1), otypes=[np.int64])(owner),
    )
    return tree.without(float(np.nextafter(0, 1)))


# Points along each axis between which areas are counted, at least (ours): those of an ellipse half as wide as
# the picture are then right within 0.3%.
FINE = 400
# Halvings of the range in which the rise to the edge is searched: to 1e-9 of it.
HALVINGS = 30
NEIGHBOURS = np.ones((3, 3), int)


@dataclass(frozen=True)
class Region:
    """Area, volume, widths (2,) and whether the edge of the grid cuts it; see :class:`.Basins`."""

    area: float
    volume: float
    width: Array
    cut: bool


@dataclass(frozen=True)
class FineGrid:
    """A surface on a finer grid, bilinear between its points, and the regions around one of its points.

    Attributes:
        x, y: (kx,), (ky,), coordinates.
        loss: (ky, kx); infinite where one of the four losses around is not finite.
        gram: (2, 2), the inner products of the directions.
        start: (row, column), the point that all regions contain.
    """

    x: Array
    y: Array
    loss: Array
    gram: Array
    start: tuple[int, int]
    weight: Array = field(repr=False)

    @classmethod
    def of(cls, x: Array, y: Array, loss: Array, gram: Array, start: tuple[float, float]) -> FineGrid:
        """From a grid; ``start`` are coordinates (x, y), of which the nearest fine point is taken."""
        fine_x, fine_y = _refined(x), _refined(y)
        known = np.isfinite(loss)
        between = _bilinear(x, y, np.where(known, loss, 0.0), fine_x, fine_y)
        unknown = _bilinear(x, y, (~known).astype(float), fine_x, fine_y) > 0
        place = int(np.abs(fine_y - start[1]).argmin()), int(np.abs(fine_x - start[0]).argmin())
        weight = np.outer(_cells(fine_y), _cells(fine_x))
        return cls(fine_x, fine_y, np.where(unknown, np.inf, between), gram, place, weight)

    @property
    def reference(self) -> float:
        """The loss at ``start``."""
        return float(self.loss[self.start])

    def inside(self, rise: float) -> Array:
        """(ky, kx), the connected region around ``start`` where the loss is at most ``rise`` above it."""
        from scipy import ndimage  # only here: it would slow down every import

        parts, _ = ndimage.label(self.loss <= self.reference + rise, NEIGHBOURS)
        own: Array = parts == parts[self.start]
        return own

    def region(self, rise: float) -> Region:
        """The region around ``start`` with losses of at most ``rise`` above it."""
        inside = self.inside(rise)
        share = self.weight[inside] / self.weight[inside].sum()
        scale = float(np.sqrt(np.linalg.det(self.gram)))
        area = scale * float(self.weight[inside].sum())
        depth = float(share @ (self.reference + rise - self.loss[inside]))
        rows, columns = np.nonzero(inside)
        # Coordinates in an orthonormal basis of the plane: steps times the Cholesky factor of their products.
        at = np.stack([self.x[columns], self.y[rows]], axis=1) @ np.linalg.cholesky(self.gram)
        at = at - share @ at
        moments = np.linalg.eigvalsh((at * share[:, None]).T @ at)[::-1]
        # The second moment of an ellipse along an axis of length d is d²/16.
        width = 4 * np.sqrt(np.maximum(moments, 0.0))
        return Region(area, area * depth, width, _touches_edge(inside))

    def edge_rise(self) -> float:
        """The rise at which the region reaches the edge of the grid, from below; inf if it never does."""
        low, high = 0.0, float(self.loss[np.isfinite(self.loss)].max()) - self.reference
        if _touches_edge(self.inside(0.0)):
            return 0.0
        if not _touches_edge(self.inside(high)):
            return np.inf
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if _touches_edge(self.inside(middle)) else (middle, high)
        return low


def _refined(grid: Array) -> Array:
    """``grid`` (k,) with an even number of equal steps for each of its own."""
    parts = 2 * -(-FINE // (2 * (len(grid) - 1)))
    places = np.arange((len(grid) - 1) * parts + 1) / parts
    return np.interp(places, np.arange(len(grid)), grid)


def _bilinear(x: Array, y: Array, values: Array, fine_x: Array, fine_y: Array) -> Array:
    """``values`` (ny, nx), bilinear at the points of the fine grid."""
    rows = np.stack([np.interp(fine_x, x, row) for row in values])
    return np.stack([np.interp(fine_y, y, column) for column in rows.T], axis=1)


def _cells(grid: Array) -> Array:
    """The length of the axis that each point of ``grid`` stands for."""
    steps = np.diff(grid)
    cells: Array = (np.append(0, steps) + np.append(steps, 0)) / 2
    return cells


def _touches_edge(inside: Array) -> bool:
    return bool(inside[[0, -1]].any() or inside[:, [0, -1]].any())


# A basin less deep than this share of the median rise above the lowest loss is not listed (ours): it cannot
# be seen in a picture.
LEAST = 0.01
# Rises up to the one at which the region reaches the edge of the grid (ours: a smooth curve).
RISES = 24
AROUND = ("center", "lowest")


@dataclass(frozen=True)
class Sheet:
    """What basins are found on: coordinates (nx,), (ny,), losses (ny, nx), and products of directions (2, 2).

    ``error``: the largest error of a loss in nats, such as that of interpolation.
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
    """The basins of a sheet; see :meth:`landscape.Surface.basins`."""
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


def basins_of(
    surface: Surface, rises: Sequence[float] | None, least: float | None, around: str | None
) -> Basins:
    """The basins of a surface; see :meth:`landscape.Surface.basins`."""
    chosen = ("center" if surface.kind in CENTERED else "lowest") if around is None else around
    u, v = surface.directions.astype(np.float64)
    gram = np.array([[u @ u, u @ v], [u @ v, v @ v]])
    sheet = Sheet(surface.x, surface.y, surface.loss.astype(np.float64), gram, _loss_error(surface))
    about = {name: getattr(surface, name) for name in Provenance.__annotations__}
    return find_basins(sheet, chosen, rises, least, **about)


def _loss_error(surface: Surface) -> float:
    """The largest stated error of a loss in nats, that of interpolation or of the precision."""
    finite = surface.loss[np.isfinite(surface.loss)]
    if "loss" not in surface.columns or not finite.size:
        return surface.precision_error
    stated = float(surface.stated_error[surface.columns.index("loss")])
    if not surface.tolerance.endswith("%"):
        return max(surface.precision_error, stated)
    if "loss" in surface.log_columns:  # a share of the range of the logarithms
        return max(
            surface.precision_error, float(np.median(finite) * np.expm1(stated * np.ptp(np.log(finite))))
        )
    return max(surface.precision_error, stated * float(np.ptp(finite)))

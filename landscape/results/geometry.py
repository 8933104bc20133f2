"""Computations on finished surfaces: basins and merge trees, and the rise of the loss by distance.

As a level rises, each local minimum begins a component of the points below it. Where two components meet, at
a saddle, the one with the higher minimum ends: the saddle's height above its minimum is its persistence
(Edelsbrunner and Harer 2010, section VII.1, "elder rule").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from landscape.core.errors import InputError, OperationError
from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.core.options import NonNegative, OneOf, Positive, checked, ends_in
from landscape.results.base import Provenance
from landscape.results.surfaces import CENTERED, Basins, Surface


@dataclass(frozen=True)
class MergeTree:
    """M basins in order of falling persistence; basins that merge with no deeper basin come first.

    Attributes:
        minimum: (M,), the place of the basin's lowest point in the flattened grid.
        saddle: (M,), the place where the basin merges with a deeper basin; −1: nowhere.
        into: (M,), the number of this deeper basin; −1: none.
        persistence: (M,), the loss at the saddle minus the loss at the minimum; infinite without a saddle.
        first_rise: (M,), the rise above the minimum at which the basin first merges with another, deeper or
            not; infinite for a basin that never merges.
        basin: (ny, nx), the number of the basin that a descent from the point reaches, always to the lowest
            neighbor; −1 where the loss is not finite.
    """

    minimum: Array
    saddle: Array
    into: Array
    persistence: Array
    first_rise: Array
    basin: Array

    def without_basins_below(self, persistence: float) -> MergeTree:
        """Return the tree in which basins of a lower ``persistence`` belong to those they merge with."""
        count = int(np.searchsorted(-self.persistence, -persistence, "right"))
        target = np.arange(len(self.minimum) + 1)  # the last entry stands for −1
        for k in range(count, len(self.minimum)):
            # A deeper basin has no smaller persistence: its target is final.
            target[k] = target[self.into[k]]
        return MergeTree(
            self.minimum[:count], self.saddle[:count], self.into[:count], self.persistence[:count],
            self.first_rise[:count], np.where(self.basin < 0, -1, target[self.basin]),
        )  # fmt: skip


def merge_tree(loss: Array) -> MergeTree:
    """Return the merge tree of ``loss`` (ny, nx), where a point has eight neighbors.

    Points are added in order of rising loss, and connected to those neighbors that were added before. A
    point between several connected regions is a saddle. There these regions merge into the one with the
    lowest minimum. Points whose loss is not finite belong to no basin. A plateau has at most one minimum, so
    that each basin has a persistence above 0.
    """
    ny, nx = loss.shape
    value = loss.ravel()
    finite = np.isfinite(value)
    ascending = np.argsort(np.where(finite, value, np.inf), kind="stable")
    order = ascending[: int(finite.sum())]
    rank = np.full(value.size, -1)  # the position of each point in ``order``
    rank[order] = np.arange(len(order))
    # A chain of parents leads from each point to the minimum of its region; −1: the point is not added yet.
    parent = np.full(value.size, -1).tolist()
    merged: dict[int, tuple[int, int]] = {}  # minimum -> (deeper minimum, saddle)
    first_rise: dict[int, float] = {}  # minimum -> its rise to the first saddle with another region
    owner = np.full(value.size, -1)  # the minimum that a descent from the point reaches

    def minimum_of(point: int) -> int:
        """Return the lowest point of the region of ``point``."""
        while parent[point] != point:
            parent[point] = parent[parent[point]]  # shortens later paths
            point = parent[point]
        return point

    for point in order.tolist():
        y, x = divmod(point, nx)
        rows, columns = range(max(y - 1, 0), min(y + 2, ny)), range(max(x - 1, 0), min(x + 2, nx))
        neighbors = [j * nx + i for j in rows for i in columns]
        added_neighbors = [neighbor for neighbor in neighbors if parent[neighbor] >= 0]
        minima = sorted({minimum_of(neighbor) for neighbor in added_neighbors}, key=rank.__getitem__)
        if not minima:  # the point is a minimum
            parent[point] = owner[point] = point
            continue
        deepest = minima[0]
        parent[point] = deepest
        owner[point] = owner[min(added_neighbors, key=rank.__getitem__)]
        for minimum in minima[1:]:
            parent[minimum] = deepest
            merged[minimum] = deepest, point
        # A minimum as high as the point lies on one plateau with the point, which is then no saddle. If the
        # minimum merges here, its persistence is 0, and ``_tree_of`` removes its basin.
        lower_minima = [minimum for minimum in minima if value[minimum] < value[point]]
        if len(lower_minima) > 1:
            for minimum in lower_minima:
                first_rise.setdefault(minimum, float(value[point] - value[minimum]))
    return _tree_of(value, owner.reshape(ny, nx), merged, first_rise)


def _tree_of(
    value: Array, owner: Array, merged: dict[int, tuple[int, int]], first_rise: dict[int, float]
) -> MergeTree:
    """Return the tree, basins by falling persistence; minima of persistence 0 join a basin beside them."""
    minima = np.unique(owner[owner >= 0]).tolist()
    persistence = {m: value[merged[m][1]] - value[m] if m in merged else np.inf for m in minima}
    order = sorted(minima, key=lambda m: (-persistence[m], value[m], m))
    number = np.full(value.size + 1, -1)  # the last entry stands for −1
    number[order] = np.arange(len(order))
    deeper, saddle = np.array([merged.get(m, (-1, -1)) for m in order], dtype=np.int64).reshape(-1, 2).T
    tree = MergeTree(
        minimum=np.array(order, dtype=np.int64),
        saddle=saddle,
        into=number[deeper],
        persistence=np.array([persistence[m] for m in order], dtype=np.float64),
        first_rise=np.array([first_rise.get(m, np.inf) for m in order], dtype=np.float64),
        basin=number[owner],
    )
    return tree.without_basins_below(float(np.nextafter(0, 1)))


# Points along each axis between which areas are counted, at least (our choice: those of an ellipse half as
# wide as the picture are then right within 0.3%).
FINE = 400
# Halvings of the range in which the rise to the edge is searched: to 1e-9 of it.
HALVINGS = 30
NEIGHBORS = np.ones((3, 3), int)


class Region(NamedTuple):
    """The size of the region around a point for one rise of the loss, as in :class:`.Basins`.

    ``width``: (2,). ``cut``: whether the region touches the edge of the grid.
    """

    area: float
    volume: float
    width: Array
    cut: bool


class FineGrid:
    """A surface on a finer grid, with bilinear interpolation, and the regions around one of its points.

    Args:
        surface: a surface, whose losses may not be finite.
        gram: (2, 2), the inner products of the directions.
        start: coordinates (x, y). All regions contain the point of the fine grid that is nearest to these.

    Attributes:
        loss: (ky, kx); infinite where one of the four losses around is not finite.
        reference: (x, y) of the starting point.
        reference_loss: the loss at the starting point.
    """

    def __init__(self, surface: Surface, gram: Array, start: Sequence[float]) -> None:
        self._x, self._y = _subdivided(surface.x), _subdivided(surface.y)
        self.loss = loss_at(surface, self._x[None], self._y[:, None])
        self._start = int(np.abs(self._y - start[1]).argmin()), int(np.abs(self._x - start[0]).argmin())
        self._weight, self._gram = np.outer(_cells(self._y), _cells(self._x)), gram
        self.reference = np.array([self._x[self._start[1]], self._y[self._start[0]]])
        self.reference_loss = float(self.loss[self._start])

    def inside(self, rise: float) -> Array:
        """Return a mask (ky, kx): the region connected to the start with losses up to ``rise`` above it."""
        from scipy import ndimage  # only here: it would slow down every import

        parts, _ = ndimage.label(self.loss <= self.reference_loss + rise, NEIGHBORS)
        return parts == parts[self._start]

    def region(self, rise: float) -> Region:
        """Return the size of the region up to ``rise``, as in :class:`.Basins`."""
        inside = self.inside(rise)
        share = self._weight[inside] / self._weight[inside].sum()
        area = float(np.sqrt(np.linalg.det(self._gram))) * float(self._weight[inside].sum())
        depth = float(share @ (self.reference_loss + rise - self.loss[inside]))
        rows, columns = np.nonzero(inside)
        # Coordinates in an orthonormal basis of the plane: steps times the Cholesky factor of their products.
        at = np.stack([self._x[columns], self._y[rows]], axis=1) @ np.linalg.cholesky(self._gram)
        at = at - share @ at
        moments = np.linalg.eigvalsh((at * share[:, None]).T @ at)[::-1]
        # The second moment of an ellipse along an axis of length d is d²/16.
        width = 4 * np.sqrt(np.maximum(moments, 0.0))
        return Region(area, area * depth, width, _touches_edge(inside))

    def edge_rise(self) -> float:
        """Return the rise at which the region reaches the edge of the grid; inf if it never does."""
        low, high = 0.0, self.highest - self.reference_loss
        if _touches_edge(self.inside(0.0)):
            return 0.0
        if not _touches_edge(self.inside(high)):
            return np.inf
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if _touches_edge(self.inside(middle)) else (middle, high)
        return low

    @property
    def highest(self) -> float:
        """The highest loss."""
        return float(self.loss[np.isfinite(self.loss)].max())


def _subdivided(grid: Array) -> Array:
    """Return the coordinates ``grid`` (k,) with each step divided into the same even number of steps."""
    parts = 2 * -(-FINE // (2 * (len(grid) - 1)))
    points = np.arange((len(grid) - 1) * parts + 1) / parts
    return np.interp(points, np.arange(len(grid)), grid)


def _cells(grid: Array) -> Array:
    """Return the length of the axis that each point of ``grid`` stands for."""
    steps = np.diff(grid)
    return (np.append(0, steps) + np.append(steps, 0)) / 2


def _touches_edge(inside: Array) -> bool:
    return bool(inside[[0, -1]].any() or inside[:, [0, -1]].any())


# A basin less deep than this share of the median rise above the lowest loss is not listed (our choice: it
# cannot be seen in a picture).
LEAST = 0.01
# Rises up to the one at which the region reaches the edge of the grid (our choice: a smooth curve).
RISES = 24
AROUND = ("center", "lowest")
Around = Annotated[str, OneOf(AROUND)]


def _default_rises(fine: FineGrid, edge: float) -> Array:
    """Return RISES equal steps up to the rise ``edge``; if it is 0 or infinite, up to the highest loss."""
    top = edge if 0 < edge < np.inf else fine.highest - fine.reference_loss
    if not top > 0:
        words = f"no loss exceeds the reference, {fine.reference_loss:.4g}; widen the span"
        raise OperationError(f"rises: {words}")
    return top * np.arange(1, RISES + 1) / RISES


def _coordinates(surface: Surface, points: Array) -> Array:
    """Return (M, 2), the coordinates of points of the flattened grid; NaN for −1."""
    rows, columns = np.divmod(points, len(surface.x))
    at = np.stack([surface.x[columns], surface.y[rows]], axis=1)
    return np.where(points[:, None] < 0, np.nan, at)


def _fields_of_basins(surface: Surface, tree: MergeTree) -> dict[str, Any]:
    """Return the fields of :class:`Basins` of which there is one for each basin."""
    flat = surface.loss.astype(np.float64).ravel()
    rows, columns = np.divmod(tree.minimum, len(surface.x))
    edge = np.isin(rows, (0, len(surface.y) - 1)) | np.isin(columns, (0, len(surface.x) - 1))
    count = np.bincount(tree.basin[tree.basin >= 0], minlength=len(tree.minimum))
    return {
        "basin": tree.basin,
        "minimum": _coordinates(surface, tree.minimum),
        "saddle": _coordinates(surface, tree.saddle),
        "minimum_loss": flat[tree.minimum],
        "saddle_loss": np.where(tree.saddle < 0, np.inf, flat[tree.saddle]),
        "share": count / flat.size,
        "at_edge": edge,
    }


def _loss_error(surface: Surface) -> float:
    """Return the largest stated error of a loss in nats, that of interpolation or of the precision."""
    finite = surface.loss[np.isfinite(surface.loss)]
    if "loss" not in surface.columns or not finite.size:
        return surface.autocast_error
    stated = float(surface.stated_error[surface.columns.index("loss")])
    if "loss" in surface.log_columns:  # a share of the range of the logarithms
        stated = float(np.median(finite) * np.expm1(stated * np.ptp(np.log(finite))))
    elif surface.interpolation_tol.endswith("%"):
        stated *= float(np.ptp(finite))
    return max(surface.autocast_error, stated)


def _start(surface: Surface, around: str, lowest: Sequence[float]) -> Sequence[float]:
    """Return the start (x, y) of all regions; it must be on the grid, with finite losses beside it."""
    if around == "lowest":
        return lowest
    beside = [np.flatnonzero(np.abs(grid) < np.diff(grid).max()) for grid in (surface.y, surface.x)]
    inside = all(grid[0] <= 0 <= grid[-1] for grid in (surface.x, surface.y))
    if not inside or not np.isfinite(surface.loss[np.ix_(*beside)]).all():
        raise OperationError(f"around: '{around}' is not on the grid, or its loss not finite; give 'lowest'")
    return 0.0, 0.0


@checked()
def basins(
    surface: Surface, rises: Sequence[Positive] | None = None, *, least: NonNegative | None = None,
    around: Around | None = None,
) -> Basins:  # fmt: skip
    """Return the basins of a surface, and the sizes of the regions around a point for rises of the loss.

    The region for a rise is connected to the point, and its losses exceed the point's loss by at most the
    rise.

    Args:
        surface: a finished surface of :func:`landscape.contour`.
        rises: R rises in nats; default: 24 equal steps up to where the region reaches the edge of the grid.
        least: the smallest persistence in nats of a listed basin; default: 1% of the median rise above the
            lowest loss, but at least twice the error of interpolated losses (our choice).
        around: the point: "center", or "lowest", the point of the grid with the lowest loss. Default: the
            center of planes around a single network, else the lowest point.

    Returns:
        Basins in order of falling persistence. For each rise: area and widths (R, 2) of the region, and the
        volume between the loss and the level of the rise.

    Raises:
        InputError: an argument that is not allowed, or fewer than 2 × 2 points.
        OperationError: no finite loss, no finite loss at the center, or parallel directions.

    Example:
        >>> import torch, landscape
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> surface = landscape.contour(problem, landscape.random_plane(problem), grid=9)
        >>> landscape.basins(surface, around="lowest").minima
        1
    """
    if around is None:
        around = "center" if surface.kind in CENTERED else "lowest"
    loss = surface.loss.astype(np.float64)
    gram_matrix = gram(surface)
    if min(loss.shape) < 2:
        raise InputError(f"grid: {loss.shape[::-1]} points have no basins, 2 × 2 points are the fewest")
    finite_losses = loss[np.isfinite(loss)]
    if not finite_losses.size:
        raise OperationError("loss: no value is finite, there is no basin; take a smaller span")
    if not are_independent(gram_matrix):
        raise OperationError("directions: they are parallel, zero or not finite, so that areas mean nothing")
    if least is None:
        least = max(LEAST * float(np.median(finite_losses) - finite_losses.min()), 2 * _loss_error(surface))
    tree = merge_tree(loss)
    merged = np.isfinite(tree.first_rise)  # whether a basin merges with another, deeper or not
    listed_basins = tree.without_basins_below(least)
    # The basin of the lowest minimum merges with no deeper one. Its infinite persistence makes it the first.
    lowest = _coordinates(surface, listed_basins.minimum)[0]
    fine_grid = FineGrid(surface, gram_matrix, _start(surface, around, lowest))
    edge_rise = fine_grid.edge_rise()
    rise = _default_rises(fine_grid, edge_rise) if rises is None else np.sort([float(r) for r in rises])
    if not len(rise) or len(np.unique(rise)) < len(rise):
        raise InputError("rises", rise.tolist(), allowed="different numbers > 0")
    regions = [fine_grid.region(r) for r in rise.tolist()]
    return Basins(
        x=surface.x,
        y=surface.y,
        loss=loss,
        gram=gram_matrix,
        **_fields_of_basins(surface, listed_basins),
        least=least,
        minima=len(tree.minimum),
        # The saddle-minimum average distance: a minimum's distance is the rise to its first saddle.
        smad=float(np.mean(tree.first_rise[merged])) if merged.any() else 0.0,
        loss_name=surface.loss_name,
        loss_unit=surface.loss_unit,
        around=around,
        reference=fine_grid.reference,
        reference_loss=fine_grid.reference_loss,
        rise=rise,
        area=np.array([region.area for region in regions]),
        volume=np.array([region.volume for region in regions]),
        width=np.array([region.width for region in regions]),
        cut=np.array([region.cut for region in regions]),
        edge_rise=edge_rise,
        **{name: getattr(surface, name) for name in Provenance.__annotations__},
    )


# Directions that a profile is a median over, and its points (our choice: more change nothing that can be
# seen).
DIRECTIONS, POINTS = 128, 60


@dataclass(frozen=True)
class Profile:
    """The loss against the distance from the center, over all directions of a plane.

    Attributes:
        distance: (K,), Euclidean distances in weight space, from 0 to the edge of the grid.
        low, median, high: (K,), quartiles of the loss over the directions, in nats; infinite where more
            than a quarter (half, three quarters) of the directions have no finite loss.
    """

    distance: Array
    low: Array
    median: Array
    high: Array


def lengths(surface: Surface) -> tuple[float, float]:
    """Return (‖u‖, ‖v‖): the lengths of the directions."""
    u, v = (float(np.linalg.norm(direction.astype(np.float64))) for direction in surface.directions)
    return u, v


def gram(surface: Surface) -> Array:
    """Return (2, 2), the inner products of the directions."""
    u, v = surface.directions.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no comparison of lengths, nor NaN
        return np.array([[u @ u, u @ v], [u @ v, v @ v]])


def are_independent(gram: Array) -> bool:
    """Return whether directions with these inner products are finite, not zero and not parallel."""
    with np.errstate(over="ignore", invalid="ignore"):
        area = gram[0, 0] * gram[1, 1]
        return bool(np.isfinite(gram).all() and np.isfinite(area) and area - gram[0, 1] ** 2 > 1e-12 * area)


def loss_at(surface: Surface, x: Array, y: Array) -> Array:
    """Return the loss at points of the plane, between the points of the grid by bilinear interpolation.

    Losses that are not finite count as infinite, also beside such a point.
    """
    from scipy.interpolate import RegularGridInterpolator  # only here: it would slow down every import

    finite = np.isfinite(surface.loss)
    values = np.stack([np.where(finite, surface.loss, 0.0), ~finite], axis=-1)
    inside = np.clip(y, *surface.y[[0, -1]]), np.clip(x, *surface.x[[0, -1]])
    loss, unknown = np.moveaxis(RegularGridInterpolator((surface.y, surface.x), values)(inside), -1, 0)
    return np.where(unknown > 0, np.inf, loss)


def profile(surface: Surface) -> Profile:
    """Return the loss against the distance from the center: quartiles over all directions of the plane."""
    angle = np.arange(DIRECTIONS) / DIRECTIONS * 2 * np.pi
    circle = np.stack([np.cos(angle), np.sin(angle)])
    # (2, DIRECTIONS), for each direction the coordinates (x, y) of the point at distance 1.
    unit_points = np.linalg.solve(np.linalg.cholesky(gram(surface)).T, circle)
    with np.errstate(divide="ignore"):
        reach = [
            np.where(s > 0, grid[-1], grid[0]) / np.where(s == 0, np.nan, s)
            for s, grid in zip(unit_points, (surface.x, surface.y), strict=True)
        ]
    distance = np.linspace(0.0, float(np.nanmin(reach)), POINTS)
    along = loss_at(surface, *(s * distance[:, None] for s in unit_points))
    # "inverted_cdf" takes one of the losses and so never the difference of two infinite ones.
    return Profile(distance, *np.quantile(along, (0.25, 0.5, 0.75), axis=1, method="inverted_cdf"))


def has_profile(surface: Surface) -> bool:
    """Return whether a surface has a profile: its center is inside the grid and has a finite loss."""
    if surface.kind not in CENTERED or min(surface.loss.shape) < 2:
        return False
    inside = all(grid[0] < 0 < grid[-1] and np.all(np.diff(grid) > 0) for grid in (surface.x, surface.y))
    return inside and are_independent(gram(surface)) and bool(np.isfinite(center_loss(surface)))


def center_loss(surface: Surface) -> float:
    """Return the loss at the center, interpolated where the grid has no point there."""
    return float(loss_at(surface, np.zeros(1), np.zeros(1))[0])


def median_rise(surface: Surface) -> float:
    """Return the median of the loss over the plane less that at the center: how flat a minimum is (nat)."""
    finite = surface.loss[np.isfinite(surface.loss)]
    return float(np.median(finite)) - center_loss(surface) if finite.size else np.nan


def shared_rise(surfaces: Sequence[Surface]) -> float:
    """Return the rise of the loss above the center whose contour is drawn on all ``surfaces``; NaN for none.

    Half the median rise at the edge of the profile, of the surface on which that is the smallest (our
    choice): the contour is then inside every picture.
    """
    rises = [float(p.median[-1] - p.median[0]) for p in map(profile, filter(has_profile, surfaces))]
    positive = [rise for rise in rises if np.isfinite(rise) and rise > 0]
    return min(positive) / 2 if positive else np.nan


def comparable(surfaces: Sequence[Surface]) -> bool:
    """Return whether the rises of ``surfaces`` can be compared.

    They must be of networks of one size, over one kind of plane, one span and one split of the data.
    """
    kinds = {(s.kind, s.norm, s.seed, s.ignore, s.span, s.split, len(s.center)) for s in surfaces}
    return len(kinds) == 1 and all(map(has_profile, surfaces))


@checked()
def barrier(t: Array, loss: Array) -> float:
    """Return the loss barrier between the ends of a line: max_t [L(t) − ((1−t)·L(0) + t·L(1))] ≥ 0.

    A barrier of 0 means that the loss never rises above the straight line between its ends, as in a convex
    valley: the two ends are linearly connected (Frankle et al. 2020, who use the mean of the two ends in
    place of the straight line; this form is from Entezari et al. 2022, section 2).

    Args:
        t: (K,), from 0 to 1.
        loss: (K,).

    Returns:
        The barrier in the unit of the loss; NaN if a loss is NaN or an end is infinite.

    Raises:
        InputError: no arrays.

    Example:
        >>> barrier(np.array([0.0, 0.5, 1.0]), np.array([1.0, 4.0, 3.0]))
        2.0
    """
    with np.errstate(invalid="ignore"):
        return float(np.max(loss - ((1 - t) * loss[0] + t * loss[-1])))


HIDDEN_POINT = 2  # vtkDataSetAttributes::HIDDENPOINT: a point with this bit set is not drawn


@checked()
def save_vts(surface: Surface, path: str | Path) -> None:
    """Write a surface as an ASCII file for ParaView: points (x, y, loss) with the data "loss" and "accuracy".

    As in VTK, x varies fastest: point k is (x[k % nx], y[k // nx]). A point whose loss is not finite is
    hidden by the data "vtkGhostType". Its height is the lowest finite loss, but its value in "loss" is the
    loss itself.

    Args:
        surface: the surface.
        path: a name that ends in .vts.

    Raises:
        InputError: an argument that is not a surface, another suffix, or no finite loss.
        OperationError: the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> grid = np.linspace(-1, 1, 3)
        >>> loss = grid**2 + grid[:, None] ** 2
        >>> surface = Surface(
        ...     x=grid, y=grid, loss=loss, accuracy=loss, done=np.ones((3, 3), bool), directions=np.eye(2),
        ...     center=np.zeros(2), kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64",
        ...     bn="center", method="batched")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_vts(surface, f"{folder}/surface.vts")
        ...     pathlib.Path(f"{folder}/surface.vts").read_text().splitlines()[2]
        '  <StructuredGrid WholeExtent="0 2 0 2 0 0">'
    """
    ends_in("path", path, [".vts"])
    finite = np.isfinite(surface.loss)
    if not finite.any():
        raise InputError("loss: no value is finite, there is nothing to export; take a smaller span")
    height = np.where(finite, surface.loss, surface.loss[finite].min())
    x, y = np.meshgrid(surface.x, surface.y)
    points = np.stack((x, y, height), -1).reshape(-1, 3)
    hidden = np.where(finite, 0, HIDDEN_POINT).ravel().astype(np.uint8)
    ny, nx = surface.loss.shape
    extent = f"0 {nx - 1} 0 {ny - 1} 0 0"
    text = f"""<?xml version="1.0"?>
<VTKFile type="StructuredGrid" version="0.1" byte_order="LittleEndian">
  <StructuredGrid WholeExtent="{extent}">
    <Piece Extent="{extent}">
      <PointData Scalars="loss">
{_array("loss", surface.loss.ravel())}
{_array("accuracy", surface.accuracy.ravel())}
{_array("vtkGhostType", hidden)}
      </PointData>
      <Points>
{_array("points", points)}
      </Points>
    </Piece>
  </StructuredGrid>
</VTKFile>
"""
    write_text(path, text)


def _array(name: str, values: Array) -> str:
    """Return one DataArray element; repr writes every digit of a float64."""
    kind = "UInt8" if values.dtype == np.uint8 else "Float64"
    size = f' NumberOfComponents="{values.shape[1]}"' if values.ndim == 2 else ""
    rows = values.reshape(len(values), -1).tolist()
    lines = "\n".join(" ".join(map(repr, row)) for row in rows)
    return (
        f'        <DataArray type="{kind}" Name="{name}"{size} format="ascii">\n{lines}\n        </DataArray>'
    )

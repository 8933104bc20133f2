"""The connected regions of a surface below a level: area, volume, widths."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from landscape.core.hdf5 import Array

# Points along each axis between which areas are counted, at least (ours): those of an ellipse half as wide as
# the picture are then right within 0.3%.
FINE = 400
# Halvings of the range in which the rise to the edge is searched: to 1e-9 of it.
HALVINGS = 30
NEIGHBOURS = np.ones((3, 3), int)


@dataclass(frozen=True)
class Region:
    """Area, volume, widths (2,) and whether the edge of the grid cuts it; see :class:`.Basins`.

    Example:
        >>> Region(1.0, 0.5, np.ones(2), cut=False).area
        1.0
    """

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

    Example:
        >>> grid = np.linspace(-1, 1, 41)
        >>> fine = FineGrid.of(grid, grid, grid**2 + grid[:, None] ** 2, np.eye(2), (0.0, 0.0))
        >>> region = fine.region(0.25)
        >>> round(region.area / np.pi, 3), region.width.round(3).tolist(), round(fine.edge_rise(), 3)
        (0.249, [0.998, 0.998], 1.0)
    """

    x: Array
    y: Array
    loss: Array
    gram: Array
    start: tuple[int, int]
    weight: Array = field(repr=False)

    @classmethod
    def of(cls, x: Array, y: Array, loss: Array, gram: Array, start: tuple[float, float]) -> FineGrid:
        """From a grid; ``start`` are coordinates (x, y), of which the nearest fine point is taken.

        Example:
            >>> grid = np.linspace(-1, 1, 5)
            >>> FineGrid.of(grid, grid, np.ones((5, 5)), np.eye(2), (0.0, 0.5)).loss.shape
            (401, 401)
        """
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
        """(ky, kx), the connected region around ``start`` where the loss is at most ``rise`` above it.

        Example:
            >>> grid = np.linspace(-1, 1, 5)
            >>> bool(FineGrid.of(grid, grid, np.ones((5, 5)), np.eye(2), (0.0, 0.5)).inside(0.1).all())
            True
        """
        from scipy import ndimage  # only here: it would slow down every import

        parts, _ = ndimage.label(self.loss <= self.reference + rise, NEIGHBOURS)
        own: Array = parts == parts[self.start]
        return own

    def region(self, rise: float) -> Region:
        """The region around ``start`` with losses of at most ``rise`` above it.

        Example:
            >>> grid = np.linspace(-1, 1, 5)
            >>> FineGrid.of(grid, grid, np.ones((5, 5)), np.eye(2), (0.0, 0.5)).region(0.1).cut
            True
        """
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
        """The rise at which the region reaches the edge of the grid, from below; infinite if it never does.

        Example:
            >>> grid = np.linspace(-1, 1, 5)
            >>> FineGrid.of(grid, grid, np.ones((5, 5)), np.eye(2), (0.0, 0.5)).edge_rise()
            0.0
        """
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

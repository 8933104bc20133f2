"""The basins of a surface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Sourced
from landscape.results.shown import Row


@dataclass(frozen=True)
class Basins(Sourced):
    """The basins of a surface, and the region around one point in which the loss rises by less than a bound.

    All numbers are of the surface as it was computed: of its grid, and of bilinear interpolation between the
    points. They have no standard errors; another sample of the data, or another plane, gives other numbers.

    A basin is a component of the points below a level, where a point of the grid has eight neighbours; it
    ends at the saddle where it meets a deeper one (persistence, :mod:`landscape.geometry.basins`).

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
        >>> basins = surface.basins([0.25])
        >>> len(basins.minimum), basins.width.round(2).tolist(), basins.anisotropy.round(2).tolist()
        (1, [[1.0, 1.0]], [1.0])
    """

    schema: ClassVar[str] = "landscape.basins"
    axes_of: ClassVar[tuple[str, ...]] = ("x", "y", "rise")
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "direction": ("x", "y"),
        "other_direction": ("x", "y"),
        "axis": ("long", "short"),
    }
    table: ClassVar[str] = "rise"

    x: Annotated[Array, "x+"]
    y: Annotated[Array, "y+"]
    loss: Annotated[Array, "y x", "nat"]
    gram: Annotated[Array, "direction other_direction"]
    basin: Annotated[Array, "y x"]
    minimum: Annotated[Array, "number+ direction"]
    saddle: Annotated[Array, "number direction"]
    minimum_loss: Annotated[Array, "number", "nat"]
    saddle_loss: Annotated[Array, "number", "nat"]
    share: Annotated[Array, "number", "1"]
    at_edge: Annotated[Array, "number"]
    least: Annotated[float, "nat"]
    minima: int
    smad: Annotated[float, "nat"]
    around: str
    reference: Annotated[Array, "direction"]
    reference_loss: Annotated[float, "nat"]
    rise: Annotated[Array, "rise+", "nat"]
    area: Annotated[Array, "rise", "1"]
    volume: Annotated[Array, "rise", "nat"]
    width: Annotated[Array, "rise axis", "1"]
    cut: Annotated[Array, "rise"]
    edge_rise: Annotated[float, "nat"]

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

    def describe(self) -> list[Row]:
        rows = [Row("basins", len(self.minimum), note=f"of a persistence of {self.least:.3g} nat and more")]
        for k, (x, y) in enumerate(self.minimum):
            meets = np.isfinite(self.saddle_loss[k])
            rise = f"saddle {self.saddle_loss[k]:.5g}" if meets else "meets no deeper one"
            edge = ", on the edge of the grid" if self.at_edge[k] else ""
            note = f"at ({x:.3g}, {y:.3g}), {rise}, {100 * self.share[k]:.3g}% of the grid{edge}"
            rows.append(Row(f"lowest of basin {k + 1}", float(self.minimum_loss[k]), unit="nat", note=note))
        point = "centre" if self.around == "center" else "lowest point"
        rows += [
            Row("local minima of the grid", self.minima, note=f"SMAD {self.smad:.4g} nat"),
            Row(f"loss at the {point}", self.reference_loss, unit="nat"),
            Row("rise at which its region reaches the edge", self.edge_rise, unit="nat"),
        ]
        for k, rise in enumerate(self.rise):
            long, short = self.width[k]
            cut = ", cut by the edge" if self.cut[k] else ""
            note = (
                f"volume {self.volume[k]:.5g}, axes {long:.5g} × {short:.5g}, ratio {self.anisotropy[k]:.4g}"
            )
            rows.append(Row(f"area at a rise of {rise:.5g}", float(self.area[k]), note=note + cut))
        return rows

"""Loss and accuracy on a grid over a plane."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.results.basins import Basins, Sheet, find_basins
from landscape.results.interpolated import Interpolated
from landscape.results.plane import CENTERED, Plane


@dataclass(frozen=True)
class Surface(Interpolated):
    """Loss and accuracy on a grid: ``loss[i, j]`` is L(center + x[j]·directions[0] + y[i]·directions[1]).

    Attributes:
        x, y: (nx,) and (ny,), coordinates in the plane.
        loss: (ny, nx), in nats; NaN or infinite where the model returns that, NaN where not computed yet.
        accuracy: (ny, nx), between 0 and 1; NaN without class labels, and between exact points if it is too
            rough to be interpolated.
        done: (ny, nx), True where the values are exact; elsewhere they are interpolated, or not computed yet.
        tolerance, columns, stated_error, largest_error, checks, log_columns: of interpolated values, as in
            :class:`landscape.results.interpolated.Interpolated`.
        directions, center: (2, P) and (P,), the plane in weight space.
        kind, norm, seed, ignore: how the directions were chosen, see :class:`landscape.Plane`; ``ignore`` is
            "" in files older than this field.
        span: half the width of the grid.
        samples: number of samples of the data.
        batchnorm: whether the model has BatchNorm.
        bn: the statistics that BatchNorm used: "center", "recalibrate" or "train".
        bn_samples: from how many samples they were estimated at each point, or the size of the batches.
        path: how the losses were computed, see :func:`landscape.contour`.
        precision: "model", "tf32" or "bfloat16".
        precision_error: the largest difference in loss to the precision of the model, measured at some of the
            points; 0 if that precision was used.
        provenance: lines on the model, the loss and the data, with which an unfinished surface is compared
            before it is resumed; files older than this field have none.
        split, label, source, source_sha256: the split of the data, a name for plots, the checkpoint file and
            its SHA-256.
        markers: (M, 2), coordinates of the weights that define the plane, if any.
        labels: (M,), their names.
        marker_loss: (M,), the loss at these weights themselves, which may lie outside the plane.
        explained, axes: as in :class:`landscape.Plane`.

    Example:
        >>> grid = np.linspace(-1, 1, 3)
        >>> loss = grid**2 + grid[:, None] ** 2
        >>> surface = Surface(
        ...     x=grid, y=grid, loss=loss, accuracy=loss, done=loss < 9, directions=np.eye(2),
        ...     center=np.zeros(2), kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64",
        ...     bn="center", path="batched")
        >>> float(surface.to_xarray().loss.sel(x=1.0, y=0.0))
        1.0
    """

    schema: ClassVar[str] = "landscape.surface"
    shapes: ClassVar[Mapping[str, str]] = {
        **Interpolated.shapes,
        "x": "x+",
        "y": "y+",
        "loss": "y x",
        "accuracy": "y x",
        "done": "y x",
        "directions": "direction parameter",
        "center": "parameter",
        "axes": "direction",
        "labels": "marker",
        "markers": "marker direction",
        "marker_loss": "marker",
    }
    axes_of: ClassVar[tuple[str, ...]] = ("x", "y")
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"direction": ("x", "y")}
    units: ClassVar[Mapping[str, str]] = {
        "loss": "nat",
        "accuracy": "1",
        "marker_loss": "nat",
        "precision_error": "nat",
    }
    table: ClassVar[str] = "y x"

    x: Array
    y: Array
    loss: Array
    accuracy: Array
    done: Array
    directions: Array
    center: Array
    kind: str
    norm: str
    seed: int
    span: float
    samples: int
    dtype: str
    bn: str
    path: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    ignore: str = ""  # "": a file older than the option
    batchnorm: bool = False
    bn_samples: int = 0
    provenance: tuple[str, ...] = ()
    precision: str = "model"
    precision_error: float = 0.0
    axes: tuple[str, ...] = ("step along direction 1", "step along direction 2")
    markers: Array = field(default_factory=lambda: np.zeros((0, 2)))
    labels: tuple[str, ...] = ()
    marker_loss: Array = field(default_factory=lambda: np.zeros(0))
    explained: Array = field(default_factory=lambda: np.zeros(0))

    def plane(self, like: Tensor) -> Plane:
        """The plane with its markers.

        Args:
            like: a tensor on the device and in the precision that the plane is wanted in, such as
                ``problem.theta``.

        Returns:
            The plane of which this is a surface.

        Example:
            >>> grid = np.linspace(-1, 1, 3)
            >>> loss = grid**2 + grid[:, None] ** 2
            >>> surface = Surface(
            ...     x=grid, y=grid, loss=loss, accuracy=loss, done=loss < 9, directions=np.eye(2),
            ...     center=np.zeros(2), kind="random", norm="none", seed=0, span=1.0, samples=1,
            ...     dtype="float64", bn="center", path="batched")
            >>> surface.plane(torch.zeros(2)).directions.tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        return Plane(
            torch.from_numpy(self.center).to(like),
            torch.from_numpy(self.directions).to(like),
            self.kind,
            self.norm,
            self.seed,
            self.ignore,
            self.axes,
            self.markers,
            self.labels,
            self.explained,
        )

    def compact(self) -> Surface:
        """The same surface over a plane in two dimensions instead of P, a file of a few kilobytes.

        Lengths and angles of the directions, and so drawings, basins and tables, are the same, and so is
        the length of the centre. The weights are lost: it cannot be resumed.

        Returns:
            A surface with directions (2, 2) and center (2,).

        Example:
            >>> from landscape.results.basin import parabola
            >>> parabola().compact().directions.tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        directions = self.directions.astype(np.float64)
        if directions.shape[1] <= 2 or not np.isfinite(directions).all():
            return self
        values, vectors = np.linalg.eigh(directions @ directions.T)
        root = vectors @ np.diag(np.sqrt(values.clip(min=0))) @ vectors.T
        center = np.array([np.linalg.norm(self.center.astype(np.float64)), 0.0])
        return dataclasses.replace(self, directions=root, center=center)

    def basins(
        self, rises: Sequence[float] | None = None, *, least: float | None = None, around: str | None = None
    ) -> Basins:
        """The surface's basins, and the width, area and volume of the region around one point, by its rise.

        Args:
            rises: rises of the loss in nats at which the region is measured; default: 24 up to the one at
                which it reaches the edge of the grid.
            least: the smallest persistence in nats of a basin that is listed; default: 1% of the median rise
                above the lowest loss, and no less than twice the error of interpolated losses (ours).
            around: the point that the region contains: "center" or "lowest", the lowest point of the grid;
                default: the centre of planes around one set of weights, else the lowest point.

        Returns:
            Basins in order of persistence, and for each rise the area, volume and widths (R, 2).

        Raises:
            InputError: a rise that is not positive, or an unknown ``around``.
            FailedError: no finite loss, none at the centre, fewer than 2 × 2 points, parallel directions.

        Example:
            >>> from landscape.results.basin import parabola
            >>> parabola().basins([0.25]).area.round(1).tolist()  # π/4
            [0.8]
        """
        chosen = ("center" if self.kind in CENTERED else "lowest") if around is None else around
        u, v = self.directions.astype(np.float64)
        gram = np.array([[u @ u, u @ v], [u @ v, v @ v]])
        loss = self.loss.astype(np.float64)
        about = {"split": self.split, "label": self.label}
        origin = {"source": self.source, "source_sha256": self.source_sha256}
        sheet = Sheet(self.x, self.y, loss, gram, self._loss_error())
        return find_basins(sheet, chosen, rises, least, **about, **origin)

    def _loss_error(self) -> float:
        """The largest stated error of a loss in nats, that of interpolation or of the precision."""
        finite = self.loss[np.isfinite(self.loss)]
        if "loss" not in self.columns or not finite.size:
            return self.precision_error
        stated = float(self.stated_error[self.columns.index("loss")])
        if not self.tolerance.endswith("%"):
            return max(self.precision_error, stated)
        if "loss" in self.log_columns:  # a share of the range of the logarithms
            return max(
                self.precision_error, float(np.median(finite) * np.expm1(stated * np.ptp(np.log(finite))))
            )
        return max(self.precision_error, stated * float(np.ptp(finite)))

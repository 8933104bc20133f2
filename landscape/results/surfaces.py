"""The loss on a plane, what its picture shows and leaves out, and its basins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from landscape.core.errors import OperationError
from landscape.core.hdf5 import Array
from landscape.results.base import Evaluated, Sourced, no_values
from landscape.results.grids import Interpolated, Plane
from landscape.results.shown import Finding, Radius, Row, SurfaceCheck, own_losses, radius_of
from landscape.results.spectrum import ExtremeEigenvalues

if TYPE_CHECKING:  # results are read and shown without torch
    from torch import Tensor

# Planes whose center is a set of weights that training reached.
CENTERED = ("random", "eigen", "learners")

# Ours, all of them. A center that lies higher than the lowest point by more than this share of the median
# rise is no minimum of the picture: the threshold of a basin that is listed (landscape.basins).
NO_MINIMUM = 0.01
# A loss that changes by less than this share of itself is drawn from its last digits.
FLAT = 1e-3
# A rise by more than this many times the lowest loss, or of 1, is of weights that compute nothing sensible:
# runs at Figure 2(a)'s rate come back from bursts of 1,272 nat, and count as diverged above 10,000.
FAR = 1e3
# The lower tenth of the range is a valley. With fewer points its shape is that of the grid, unless they are
# more than this share of a coarse one; a parabola has 16% of the points there.
VALLEY, LEAST_POINTS, LEAST_SHARE = 0.1, 9, 0.05
# A plane with less than half of λ_max, or of a negative λ_min, does not show how sharp the place is.
SHOWN = 0.5
# Of the spread of the places on a plane, and of the range of losses: what a reader of the picture overlooks.
EXPLAINED, OVERLOOKED = 0.9, 0.05
# The directions in which the radius of a metric is measured.
RAYS = 72


@dataclass(frozen=True)
class Surface(Interpolated, Evaluated, schema="landscape.surface", axes="x y", table="y x"):
    """Loss and accuracy on a grid: ``loss[i, j]`` is L(center + x[j]·directions[0] + y[i]·directions[1]).

    Attributes:
        x, y: (nx,) and (ny,), coordinates in the plane.
        loss: (ny, nx), in nats; NaN or infinite where the model's loss is, NaN where not computed yet.
        accuracy: (ny, nx), between 0 and 1; NaN without class labels, and between exact points where the
            accuracy is too rough to be interpolated.
        metrics: (metrics, ny, nx), the values of the metrics ``metric_names``; NaN between exact points where
            a metric is too rough to be interpolated.
        done: (ny, nx), True where the values are exact; elsewhere they are interpolated, or not computed yet.
        interpolation_tol, columns, stated_error, largest_error, checks, log_columns: as in
            :class:`landscape.results.grids.Interpolated`.
        directions, center: (2, P) and (P,), the plane in weight space.
        kind, norm, seed, ignore: the choice of the directions, see :class:`landscape.Plane`.
        span: half the width of the grid.
        samples: number of samples of the data.
        batchnorm: whether the model has BatchNorm.
        bn: the statistics that BatchNorm used: "center", "recalibrate" or "train".
        bn_samples: the number of samples for these statistics at each point, or the size of the batches.
        method: the evaluation of points, see :func:`landscape.contour`.
        autocast: "tf32" or "bfloat16"; "" for the precision of the model.
        autocast_error: the largest difference from losses in the model's precision, measured at some of the
            points; 0 without autocast.
        provenance: lines on the model, the loss and the data; a call resumes only a surface with equal lines.
        split, label, source, source_sha256: the split of the data, a name for plots, the checkpoint file and
            its SHA-256.
        markers: (M, 2), coordinates of the weights from which the plane was computed, if any.
        labels: (M,), the names of these weights.
        marker_loss: (M,), the loss at these weights, which may lie outside the plane.
        own_loss: (M,), with BatchNorm, the loss at these weights with their own statistics; NaN where the
            statistics are not known.
        statistics_of: the label of the weights whose statistics all points have; "" for the center's.
        explained, axes: as in :class:`landscape.Plane`.

    Example:
        >>> grid = np.linspace(-1, 1, 3)
        >>> loss = grid**2 + grid[:, None] ** 2
        >>> surface = Surface(
        ...     x=grid, y=grid, loss=loss, accuracy=loss, done=loss < 9, directions=np.eye(2),
        ...     center=np.zeros(2), kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64",
        ...     bn="center", method="batched")
        >>> float(surface.to_xarray().loss.sel(x=1.0, y=0.0))
        1.0
    """

    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"direction": ("x", "y")}

    x: Annotated[Array, "x+"]
    y: Annotated[Array, "y+"]
    loss: Annotated[Array, "y x", "nat"]
    accuracy: Annotated[Array, "y x", "1"]
    done: Annotated[Array, "y x"]
    directions: Annotated[Array, "direction parameter"]
    center: Annotated[Array, "parameter"]
    kind: str
    norm: str
    seed: int
    span: float
    method: str
    ignore: str = ""
    metrics: Annotated[Array, "metric y x", "1"] = field(default_factory=no_values)
    provenance: tuple[str, ...] = ()
    autocast: str = ""
    autocast_error: Annotated[float, "nat"] = 0.0
    axes: Annotated[tuple[str, ...], "direction"] = ("u", "v")
    markers: Annotated[Array, "marker direction"] = field(default_factory=lambda: np.zeros((0, 2)))
    labels: Annotated[tuple[str, ...], "marker"] = ()
    marker_loss: Annotated[Array, "marker", "nat"] = field(default_factory=no_values)
    own_loss: Annotated[Array, "network", "nat"] = field(default_factory=no_values)
    statistics_of: str = ""
    explained: Array = field(default_factory=no_values)

    def showing(self, name: str) -> Surface:
        """Return the surface with another column in place of the loss, for pictures and measurements.

        Args:
            name: "accuracy", or the name of a metric.

        Returns:
            A surface whose ``loss`` is that column.

        Raises:
            InputError: another name.

        Example:
            >>> surface.showing("accuracy").loss_name
            'accuracy'
        """
        unknown = np.full_like(self.marker_loss, np.nan)
        return dataclasses.replace(
            self, loss=self.column(name), loss_name=name, loss_unit="", marker_loss=unknown
        )

    def plane(self, like: Tensor) -> Plane:
        """Return the plane with its markers.

        Args:
            like: a tensor on the device and in the precision that the plane is wanted in, such as
                ``problem.weights``.

        Returns:
            The plane of which this is a surface.

        Example:
            >>> surface.plane(torch.zeros(2)).directions.tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        import torch

        center, directions = (torch.from_numpy(a).to(like) for a in (self.center, self.directions))
        names = ("kind", "norm", "seed", "ignore", "axes", "markers", "labels", "explained")
        return Plane(center, directions, **{name: getattr(self, name) for name in names})

    def compact(self) -> Surface:
        """Return the same surface over a plane in two dimensions instead of P, a file of a few kilobytes.

        Lengths and angles of the directions, and so drawings, basins and tables, are the same, and so is
        the length of the center. The weights are lost: it cannot be resumed.

        Returns:
            A surface with directions (2, 2) and center (2,).

        Example:
            >>> surface.compact().directions.tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        directions = self.directions.astype(np.float64)
        if directions.shape[1] <= 2 or not np.isfinite(directions).all():
            return self
        values, vectors = np.linalg.eigh(directions @ directions.T)
        root = vectors @ np.diag(np.sqrt(values.clip(min=0))) @ vectors.T
        center = np.array([np.linalg.norm(self.center.astype(np.float64)), 0.0])
        return dataclasses.replace(self, directions=root, center=center)

    def radius(self, metric: str, drop: str | float | None = None, *, rise: float | None = None) -> Radius:
        """Return the distance from the center at which a metric has fallen by ``drop``, or risen by ``rise``.

        The distance is measured in weight space along 72 directions of the plane, to the first point of a
        direction where the metric has changed by so much. Between the points of the grid, the metric is
        interpolated by cubic polynomials; the stated error is the difference from linear interpolation. If a
        direction has no such point on the surface, the distance to the edge of the surface is a lower bound.
        The median may then be a lower bound, too.

        Args:
            metric: "loss", "accuracy", or the name of a metric.
            drop: by how much the metric falls: a number, or a share of its value at the center such as "1%".
            rise: by how much the metric rises, a number, in place of ``drop``.

        Returns:
            Distances, with median and interval over the directions; ``plot(ring=…)`` draws them.

        Raises:
            InputError: an unknown metric, or not exactly one of ``drop`` and ``rise``.
            OperationError: a center outside of the grid or without a value, or directions that are parallel.

        Example:
            >>> radius = surface.radius("loss", rise=0.25)
            >>> float(radius.distance.round(2).max()), bool(radius.censored.any())
            (0.5, False)
        """
        values, axes = self.column(metric), (self.y, self.x)
        directions = self.directions.astype(np.float64)
        gram = directions @ directions.T
        is_center_inside = all(len(axis) > 1 and axis[0] < 0 < axis[-1] for axis in axes)
        if not is_center_inside or np.linalg.matrix_rank(gram) < 2:
            words = "its center is not inside the grid, or its directions are parallel; take another surface"
            raise OperationError(f"surface: {words}")
        angle = np.arange(RAYS) / RAYS * 2 * np.pi
        circle = np.stack([np.cos(angle), np.sin(angle)])
        # (RAYS, 2), for each ray the coordinates (x, y) of its point at distance 1 in weight space.
        unit_points = np.linalg.solve(np.linalg.cholesky(gram).T, circle).T
        ends = np.where(unit_points > 0, [self.x[-1], self.y[-1]], [self.x[0], self.y[0]])
        # (RAYS, 2), the distances to the edges of x and y; NaN if x or y is 0 all along the ray.
        edge_distances = ends / np.where(unit_points == 0, np.nan, unit_points)
        return radius_of(metric, axes, values, unit_points, np.nanmin(edge_distances, axis=1), drop, rise)

    def check(self, eigenvalues: ExtremeEigenvalues | None = None) -> SurfaceCheck:
        """Return findings on how a picture of the surface may mislead, with remedies.

        The findings are about these topics; all thresholds are our choice:

        - the center: whether it is the lowest point, and the slope there;
        - the window: whether the loss changes in it, and whether the valley is wider than a few points;
        - the curvature along the plane, beside the ``eigenvalues``, if they are given;
        - the marked networks: their distance from the plane;
        - BatchNorm: the losses of the networks with their own statistics;
        - the kind of directions;
        - points that are interpolated or missing.

        Args:
            eigenvalues: λ_min and λ_max at the center, by :func:`landscape.extreme_eigenvalues`, for a
                comparison with the curvature along the plane. Default: no comparison.

        Returns:
            The findings, each printed as a line; ``fine`` is True for a finding without a problem.

        Raises:
            OperationError: no finite loss.

        Example:
            >>> [finding.subject for finding in surface.check().findings if not finding.fine]
            ['directions']
        """
        if not np.isfinite(self.loss).any():
            raise OperationError("surface: it has no finite loss to look at; choose a smaller span")
        findings = [*_center_findings(self), *_window_findings(self)]
        findings += [*_curvature_findings(self, eigenvalues), *_marker_findings(self)]
        findings += [*_batchnorm_findings(self), *_direction_findings(self), *_point_findings(self)]
        return SurfaceCheck(tuple(findings))

    def describe(self) -> list[Row]:
        finite_loss = self.loss[np.isfinite(self.loss)]
        missing_points = self.loss.size - finite_loss.size
        lowest, median, highest = np.nan, np.nan, np.nan
        if finite_loss.size:
            lowest, median, highest = np.quantile(finite_loss, (0, 0.5, 1)).tolist()
        center_loss = self.loss[np.abs(self.y).argmin(), np.abs(self.x).argmin()]
        rows = [
            Row("loss near the center", float(center_loss), unit="nat"),
            Row("lowest loss", lowest, unit="nat"),
            Row("highest loss", highest, unit="nat"),
            Row("median rise above the lowest", median - lowest, unit="nat"),
            Row("span", self.span, note=f"plane: {self.kind}"),
        ]
        if self.kind == "random":
            vectors = [vector.astype(np.float64) for vector in (*self.directions, self.center)]
            u_norm, v_norm, center_norm = [float(np.linalg.norm(vector)) for vector in vectors]
            fixed = ", bias and norm parameters fixed" if self.ignore == "bias+norm" else ""
            note = f"norms of the directions {u_norm:.3g} and {v_norm:.3g}, normalization: {self.norm}{fixed}"
            rows.append(Row("norm of the weights", center_norm, note=note))
        if missing_points:
            rows.append(Row("points without a finite loss", missing_points, note=f"of {self.loss.size:,}"))
        if len(self.marker_loss) and self.kind == "learners":
            *learner_losses, loss_of_mean = self.marker_loss  # the last marker is the learners' mean w_a
            rows.append(Row("loss of w_a", float(loss_of_mean), unit="nat"))
            rows.append(Row("mean loss of the learners", float(np.mean(learner_losses)), unit="nat"))
        elif len(self.marker_loss) and self.kind != "pca":
            labeled_losses = zip(self.labels, self.marker_loss, strict=True)
            rows += [Row(f"loss of {label}", float(value), unit="nat") for label, value in labeled_losses]
        # With BatchNorm: the losses of the markers by the markers' own statistics. ``marker_loss`` has their
        # losses by the statistics of the surface.
        rows += own_losses(self.own_loss, self.marker_loss)
        if self.explained.size:
            shares = " + ".join(f"{100 * share:.1f}%" for share in self.explained)
            quantity = "variance" if self.kind == "pca" else "spread"
            name = f"share of the {quantity} in the plane"
            rows.append(Row(name, shares, note=f"{len(self.labels)} weight vectors"))
        if self.kind == "eigen":
            rows.append(Row("directions", "; ".join(self.axes)))
        if self.autocast:
            rows.append(Row("autocast", self.autocast, note=f"within {self.autocast_error:.2g} nat"))
        return [*rows, *self._metric_rows(), *self._interpolated()]


def _center_findings(surface: Surface) -> Iterator[Finding]:
    if surface.kind not in CENTERED:
        return
    loss = surface.loss
    i, j = np.abs(surface.y).argmin(), np.abs(surface.x).argmin()
    low = np.unravel_index(np.nanargmin(np.where(np.isfinite(loss), loss, np.nan)), loss.shape)
    depth = loss[i, j] - loss[low]
    rise = np.nanmedian(loss[np.isfinite(loss)]) - loss[low]
    fine = bool(depth <= NO_MINIMUM * rise)
    words = f"its loss is {loss[i, j]:.4g}"
    if not depth <= 0:  # also NaN
        words += f", {depth:.2g} above the lowest, at ({surface.x[low[1]]:.3g}, {surface.y[low[0]]:.3g})"
    else:
        words += ", the lowest of all points"
    fit = _quadratic(surface)
    if fit is not None:
        slope, curvature = fit
        words += f"; slopes {slope[0]:.2g} and {slope[1]:.2g} {surface.loss_unit} a unit".replace("  ", " ")
        if np.linalg.eigvalsh(curvature)[0] > 0:
            step = np.linalg.solve(curvature, slope)
            words += f", zero {np.abs(step).max() / surface.span:.1g} spans away"
    yield Finding("center", fine, words, "" if fine else "the training split, or more training steps")


def _quadratic(surface: Surface) -> tuple[Array, Array] | None:
    """Return slope (2,) and second derivatives (2, 2) at the origin, of a parabola through 3 × 3 points.

    None where the origin is no inner point of the grid, or a loss there is not finite.
    """
    i, j = np.abs(surface.y).argmin(), np.abs(surface.x).argmin()
    loss = surface.loss[i - 1 : i + 2, j - 1 : j + 2] if i and j else surface.loss[:0]
    if loss.shape != (3, 3) or not np.isfinite(loss).all():
        return None
    x, y = (a.ravel() for a in np.meshgrid(surface.x[j - 1 : j + 2], surface.y[i - 1 : i + 2]))
    width, height = np.ptp(x), np.ptp(y)
    u, v = x / width, y / height  # of the size of 1, for the least squares
    terms = np.stack((np.ones(9), u, v, u * u / 2, u * v, v * v / 2), axis=1)
    _, gu, gv, uu, uv, vv = np.linalg.lstsq(terms, loss.ravel())[0]
    scale = np.array([1 / width, 1 / height])
    return np.array([gu, gv]) * scale, np.array([[uu, uv], [uv, vv]]) * np.outer(scale, scale)


def _window_findings(surface: Surface) -> Iterator[Finding]:
    finite = surface.loss[np.isfinite(surface.loss)]
    low, high = float(finite.min()), float(finite.max())
    missing = surface.loss.size - finite.size if surface.done.all() or surface.columns else 0
    few = int((finite <= low + VALLEY * (high - low)).sum())
    words = f"losses from {low:.4g} to {high:.4g}; {few:,} of {surface.loss.size:,} points in the lower tenth"
    if missing:
        yield Finding("window", False, f"{missing:,} points have no finite loss; {words}", "a smaller span=")
    elif high - low <= FLAT * abs(low):
        yield Finding("window", False, f"the loss hardly changes, {words}", "a larger span=")
    elif not high - low <= FAR * max(abs(low), 1.0):
        yield Finding("window", False, f"far beyond any working network, {words}", "a smaller span=")
    elif few < min(LEAST_POINTS, LEAST_SHARE * surface.loss.size):
        advice = "a smaller span=, a larger grid= or a logarithmic scale"
        yield Finding("window", False, f"the walls hide the valley, {words}", advice)
    else:
        yield Finding("window", True, words)


def _curvature_findings(surface: Surface, ends: ExtremeEigenvalues | None) -> Iterator[Finding]:
    """Yield the curvature along the plane against the ends of the spectrum at its center."""
    if ends is None or surface.kind not in CENTERED:
        return
    fit, directions = _quadratic(surface), surface.directions.astype(np.float64)
    if np.linalg.matrix_rank(directions) < 2:
        return
    if fit is None:
        yield Finding("curvature", False, "the grid has no 3 × 3 points around its center", "an odd grid=")
        return
    import scipy.linalg  # here, because most checks do without it, and it takes longer than they

    smallest, largest = scipy.linalg.eigh(fit[1], directions @ directions.T, eigvals_only=True)
    sharp, down = largest >= SHOWN * ends.max, ends.min >= 0 or smallest <= SHOWN * ends.min
    words = (
        f"{smallest:.3g} to {largest:.3g} on the plane, λ_min {ends.min:.3g} and λ_max {ends.max:.3g} in all"
    )
    advice = "landscape.eigen_plane, which shows both ends" if not (sharp and down) else ""
    yield Finding("curvature", bool(sharp and down), words, advice)


def _marker_findings(surface: Surface) -> Iterator[Finding]:
    """Yield how closely the plane fits the places from which it was computed."""
    if surface.explained.size:
        share = float(surface.explained.sum())
        advice = "" if share >= EXPLAINED else "the distances of the places beside the picture"
        words = f"the plane has {share:.0%} of the spread of its {len(surface.labels)} places"
        yield Finding("places", share >= EXPLAINED, words, advice)
    if not len(surface.marker_loss):
        return
    finite = surface.loss[np.isfinite(surface.loss)]
    method = "cubic" if min(surface.loss.shape) > 3 and finite.size == surface.loss.size else "linear"
    from scipy.interpolate import RegularGridInterpolator

    plane_loss = RegularGridInterpolator((surface.y, surface.x), surface.loss, method, bounds_error=False)(
        surface.markers[:, ::-1]
    )
    gap = np.where(np.isfinite(plane_loss), surface.marker_loss - plane_loss, 0.0)
    if not np.isfinite(plane_loss).any():
        return
    worst = int(np.abs(gap).argmax())
    words = f"{surface.labels[worst]} has the loss {surface.marker_loss[worst]:.4g}"
    words += f", the plane below it {plane_loss[worst]:.4g}"
    fine = bool(abs(gap[worst]) <= OVERLOOKED * np.ptp(finite))
    advice = "" if fine else "a plane through fewer places, as of landscape.between"
    yield Finding("places", fine, words, advice)


def _batchnorm_findings(surface: Surface) -> Iterator[Finding]:
    if surface.batchnorm and surface.bn == "center":
        whose = surface.statistics_of or "the center"
        words = f"all points use the statistics of {whose}, so that losses away from it come out too high"
        yield Finding("BatchNorm", False, words, 'bn="recalibrate"')
    elif surface.batchnorm:
        yield Finding("BatchNorm", True, f"statistics of each point itself ({surface.bn})")


def _direction_findings(surface: Surface) -> Iterator[Finding]:
    if surface.kind != "random":
        return
    moved = "" if surface.ignore == "bias+norm" else ", and biases and normalization layers move, too"
    if surface.norm == "none":
        words = f"random, of the same size for large and small weights{moved}"
        advice = 'norm="filter" before pictures of two networks are compared'
        yield Finding("directions", False, words, advice)
    else:
        yield Finding("directions", True, f"random, scaled by {surface.norm}{moved}")


def _point_findings(surface: Surface) -> Iterator[Finding]:
    missing = int((~surface.done).sum())
    if missing and not surface.columns:
        share = f"{missing:,} of {surface.done.size:,} points are not computed yet"
        yield Finding("points", False, share, "the same call again, which goes on with the file")
    elif missing:
        yield Finding("points", True, surface.interpolation())


@dataclass(frozen=True)
class Basins(Sourced, schema="landscape.basins", axes="x y rise", table="rise"):
    """The basins of a surface, and the region around one point in which the loss rises by less than a bound.

    All numbers describe the computed surface: the grid's points, with bilinear interpolation between them.
    There are no standard errors; another sample of the data, or another plane, gives other numbers.

    A basin is a connected component of the points below a level, with eight neighbors for each point. The
    basin ends at the saddle where it meets a deeper basin (persistence, see ``landscape.results.geometry``).

    Attributes:
        x, y, loss: of the surface: (nx,), (ny,), (ny, nx).
        gram: (2, 2), the inner products of the directions, by which steps in the plane become distances.
        basin: (ny, nx), the number of the basin that a descent from the point reaches, always to the lowest
            neighbor; −1 where the loss is not finite.
        minimum, saddle: (M, 2), coordinates of the basins' lowest points, and of the saddles where basins
            meet deeper basins (NaN: no saddle); in order of falling persistence.
        minimum_loss, saddle_loss: (M,), the losses at ``minimum`` and ``saddle`` in nats; infinite without a
            saddle.
        share: (M,), each basin's share of the points of the grid.
        at_edge: (M,), whether the lowest point lies on the edge of the grid, and so may be no minimum.
        least: the smallest persistence in nats of a listed basin; other basins are parts of listed basins.
        minima: the number of local minima of the grid, whatever their persistence.
        smad: the saddle-minimum average distance in nats (Landscaper; arXiv 2602.07135): the mean over all
            local minima of the rise to the first saddle, unweighted; 0 for a single minimum. Landscaper may
            have another neighborhood of points.
        around: the reference point, "center" or "lowest".
        reference, reference_loss: the coordinates (2,) of the reference point, and the loss there in nats.
        rise: (R,), rises above the loss of the reference point, in nats.
        area: (R,), the area of the region for each rise, in squared distances of weight space. The region is
            the connected part around the reference point with a rise of at most ``rise``.
        volume: (R,), the integral over the region of ``rise`` minus the loss's rise, in nats times squared
            distances.
        width: (R, 2), the axes of the ellipse with the region's second moments, the longer axis first; in
            distances of weight space.
        cut: (R,), whether the region reaches the edge of the grid, so that area, volume and widths are too
            small.
        edge_rise: the rise at which the region reaches the edge; infinite if it never does.
        split, label, source, source_sha256: of the surface.

    Example:
        >>> basins = landscape.basins(surface, [0.25])
        >>> len(basins.minimum), basins.width.round(2).tolist(), basins.anisotropy.round(2).tolist()
        (1, [[1.0, 1.0]], [1.0])
    """

    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "direction": ("x", "y"),
        "other_direction": ("x", "y"),
        "axis": ("long", "short"),
    }

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
        return 2 * np.sqrt(self.area / np.pi)

    def describe(self) -> list[Row]:
        rows = [Row("basins", len(self.minimum), note=f"of a persistence of {self.least:.3g} nat and more")]
        for k, (x, y) in enumerate(self.minimum):
            meets = np.isfinite(self.saddle_loss[k])
            rise = f"saddle {self.saddle_loss[k]:.5g}" if meets else "meets no deeper one"
            edge = ", on the edge of the grid" if self.at_edge[k] else ""
            note = f"at ({x:.3g}, {y:.3g}), {rise}, {100 * self.share[k]:.3g}% of the grid{edge}"
            rows.append(Row(f"lowest of basin {k + 1}", float(self.minimum_loss[k]), unit="nat", note=note))
        point = "center" if self.around == "center" else "lowest point"
        rows += [
            Row("local minima of the grid", self.minima, note=f"SMAD {self.smad:.4g} nat"),
            Row(f"loss at the {point}", self.reference_loss, unit="nat"),
            Row("rise at which its region reaches the edge", self.edge_rise, unit="nat"),
        ]
        for k, rise in enumerate(self.rise):
            long, short = self.width[k]
            cut = ", cut by the edge" if self.cut[k] else ""
            note = f"volume {self.volume[k]:.5g}, axes {long:.5g} × {short:.5g}"
            note += f", ratio {self.anisotropy[k]:.4g}{cut}"
            rows.append(Row(f"area at a rise of {rise:.5g}", float(self.area[k]), note=note))
        return rows

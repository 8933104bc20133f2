"""Fit columns of values at the exact points of a grid, and estimate the errors at the other points."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads its parts when they are used

from landscape.core.hdf5 import Array
from landscape.evaluation.interpolant import (
    KERNELS,
    ErrorScale,
    Interpolant,
    Tolerance,
    choose_points,
    coarse_indices,
    evaluate,
)

# All numbers here are our choice, from the surfaces of benchmarks/surfaces.py.
# The largest expected error, in units of the tolerance: a negative value on a logarithmic scale has an
# infinite one.
ERROR_CAP = 1e6
NEIGHBORS = 6  # exact points whose errors are looked at around a point
MIN_EXACT = {1: 8, 2: 13}  # the smallest number of points of a fit, by dimension
DIAGONALS = tuple(itertools.product((1, -1), repeat=2))
# With a part of the samples: the number of points along an axis that are computed with all samples in any
# case; the error, in units of the tolerance, with which an interpolant through the points for all samples
# approximates the part; the minimum, usual and maximum number of these points, by dimension.
GUIDED_BASE, FOLLOW_ERROR, GUIDED_COUNTS = 5, 0.5, {1: (8, 16, 40), 2: (16, 32, 160)}


@dataclass(frozen=True)
class _Function:
    """A function through N exact points of K points: an interpolant plus a base.

    Attributes:
        log: whether the function's values are logarithms.
        interpolant: the functions of one kernel through the exact points.
        coefficients: the interpolant's coefficients.
        base: (K,), a constant; with a guide, a constant plus a multiple of the guide.
        leave_one_out: (N,), at each exact point, the error of the function through the N − 1 other points.
        guide_error: returns the expected errors (K,) where the interpolant does not follow the guide; 0
            without a guide.
    """

    log: bool
    interpolant: Interpolant
    coefficients: Array
    base: Array
    leave_one_out: Array
    guide_error: Callable[[], Array]

    @classmethod
    def through(cls, values: Array, interpolant: Interpolant, log: bool, size: int) -> _Function:
        """Return the function through ``values`` (N,), on a base (``size``,) of their mean."""
        mean = float(values.mean())
        coefficients = interpolant.coefficients(values - mean)
        leave_one_out = interpolant.left_out(coefficients)
        return cls(log, interpolant, coefficients, np.full(size, mean), leave_one_out, lambda: np.zeros(size))

    def guided(self, guide: Array, at: Array, exact: Array) -> _Function:
        """Return the function with a multiple of ``guide`` (K,) in its base, which the interpolant corrects.

        The multiple minimizes the leave-one-out errors. Errors are expected where the interpolant of the
        guide's values at the exact points differs from the guide.
        """
        coefficients = self.interpolant.coefficients(guide[exact])
        guide_left_out = self.interpolant.left_out(coefficients)
        share = float(self.leave_one_out @ guide_left_out / max(guide_left_out @ guide_left_out, 1e-300))
        leave_one_out = self.leave_one_out - share * guide_left_out
        ratio = float(np.abs(leave_one_out).mean() / max(np.abs(guide_left_out).mean(), 1e-300))

        def guide_error() -> Array:  # only of the function that is chosen: it takes longest
            return np.nan_to_num(ratio * np.abs(self.interpolant(coefficients, at) - guide))

        difference, base = self.coefficients - share * coefficients, self.base + share * guide
        return _Function(self.log, self.interpolant, difference, base, leave_one_out, guide_error)


class Fit:
    """A column, fitted at exact points by the function with the smallest leave-one-out errors.

    Candidates are all kernels, for the values and, if all are positive, for their logarithms, each without
    and with the guide. Errors are errors of the fitted quantity, and change little from point to point;
    ``in_tolerance_units`` converts errors to units of the tolerance.
    """

    def __init__(
        self, at: Array, values: Array, exact: Array, scale: ErrorScale,
        interpolants: Sequence[Interpolant], guide: Array | None = None,
    ) -> None:  # fmt: skip
        self._at, self._values, self.scale = at, values, scale
        lowest = min(values[exact].min(), math.inf if guide is None else guide.min())
        candidates: list[_Function] = []
        for interpolant in interpolants:
            for log in (False, True) if lowest > 0 else (False,):
                transform = np.log if log else np.asarray
                function = _Function.through(transform(values[exact]), interpolant, log, len(at))
                candidates.append(function)
                if guide is not None:
                    centered = transform(guide)
                    centered = centered - centered[exact].mean()
                    candidates.append(function.guided(centered, at, exact))
        self.function = min(candidates, key=functools.partial(self._usual_error, values[exact]))
        self._guide_error = self.function.guide_error()

    @property
    def has_smooth_kernel(self) -> bool:
        """Return whether the function's kernel is one that follows smooth surfaces."""
        return self.function.interpolant.order > 1.0

    def _usual_error(self, values: Array, function: _Function) -> float:
        """Return the 90% quantile of the leave-one-out errors of exact points, in units of the tolerance."""
        predicted = np.log(values) if function.log else values
        errors = self._in_tolerance_units(predicted, np.abs(function.leave_one_out), function.log)
        return float(np.sort(errors)[int(0.9 * len(errors))])

    def _in_tolerance_units(self, predicted: Array, errors: Array, log: bool) -> Array:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if log == self.scale.log:
                converted = errors
            elif log:
                converted = np.exp(predicted) * np.expm1(errors)
            else:  # to first order
                converted = np.where(errors > 0, errors / np.maximum(predicted, 0.0), 0.0)
        return np.minimum(np.nan_to_num(converted / self.scale.limit, nan=ERROR_CAP), ERROR_CAP)

    def in_tolerance_units(self, predicted: Array, errors: Array) -> Array:
        """Return ``errors`` of the fitted quantity where it is ``predicted``, in units of the tolerance."""
        return self._in_tolerance_units(predicted, errors, self.function.log)

    def values(self, quantity: Array) -> Array:
        """Return the values where the fitted quantity, the values or their logarithms, is ``quantity``."""
        with np.errstate(over="ignore"):
            return np.exp(quantity) if self.function.log else quantity

    def errors(self, predicted: Array, indices: Array) -> tuple[Array, Array]:
        """Return |errors| of the quantity ``predicted`` at exact points, also in units of the tolerance."""
        values = self._values[indices]
        true, predicted_values = values, predicted
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if self.function.log:
                true, predicted_values = np.log(values), np.exp(predicted)
            errors = np.abs(predicted - true)
            in_tolerance_units = np.abs(self.scale(predicted_values) - self.scale(values))
        return np.nan_to_num(errors, nan=math.inf), np.nan_to_num(in_tolerance_units, nan=math.inf)

    def expected(self, indices: Array, distance: Array, nearest: Array, spacing: Array) -> Array:
        """Return the expected errors at the points ``indices`` (M,), up to a common factor.

        Without one of the ``nearest`` (M, k) exact points there is a hole of its ``spacing`` (N,). The
        leave-one-out error there is scaled to the smaller hole around the point, whose size is the point's
        ``distance`` (M,) from exact points.
        """
        holes = np.minimum(distance[:, None] / spacing[nearest], 1.0)
        errors = np.abs(self.function.leave_one_out)[nearest]
        largest = (errors * holes**self.function.interpolant.order).max(1)
        return np.maximum(largest, self._guide_error[indices])


@dataclass(frozen=True)
class Evaluations:
    """Columns of values on a grid of K points, for all samples or for a part.

    Attributes:
        columns: name -> values (K,). Interpolated values are written here.
        done: (K,), whether a point is exact. Values at other points are overwritten.
        compute: a function of the indices of points that writes the exact values and sets ``done`` there.
    """

    columns: Mapping[str, Array]
    done: Array
    compute: Callable[[Array], None]


@dataclass(frozen=True)
class Guide:
    """The values of a part of the samples at all points, which the values of all samples resemble.

    Attributes:
        columns: name -> values (K,).
        smooth: whether few exact points were enough for them.
    """

    columns: Mapping[str, Array]
    smooth: bool


class FittedGrid:
    """The points of a grid, which of them are exact, and the fits through these.

    ``exact`` are the points computed in this call: values of an earlier result do not change its choices.
    ``deciding`` are the names of the columns whose errors must be within the tolerance.
    """

    def __init__(
        self, shape: Sequence[int], evaluations: Evaluations, tolerance: Tolerance, deciding: Sequence[str],
        guide: Guide | None,
    ) -> None:  # fmt: skip
        axes = [np.arange(count) for count in shape if count > 1]
        positions = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        self.dimension = len(axes)
        self.coordinates = 2.0 / max(1, positions.max()) * positions - 1.0  # (K, d)
        self.half_steps = 2 * positions + 1  # (K, d), in units of half a step, from half a step outside
        self.exact = np.zeros(len(positions), bool)
        self._evaluations, self._columns = evaluations, evaluations.columns
        self._tolerance, self.deciding, self.guide = tolerance, deciding, guide
        self._followed_log: dict[str, bool] = {}  # column -> whether the guide was followed on a log scale

    def finite(self) -> Array:
        """Return at which points (K,) all deciding columns are finite."""
        return np.all([np.isfinite(self._columns[name]) for name in self.deciding], axis=0)

    def compute(self, indices: Array) -> None:
        """Make the points ``indices`` exact."""
        self._evaluations.compute(indices)
        self.exact[indices] = True

    def fit(self) -> bool:
        """Fit the columns to the exact points. Return whether those that decide can be interpolated."""
        all_finite = self.finite()
        finite, nonfinite = np.flatnonzero(self.exact & all_finite), np.flatnonzero(self.exact & ~all_finite)
        if len(finite) < MIN_EXACT[self.dimension]:
            return False
        self._tree = scipy.spatial.cKDTree(self.coordinates[finite])
        self._spacing = self._tree.query(self.coordinates[finite], k=2)[0][:, 1]
        try:
            self._fit_columns(finite)
        except np.linalg.LinAlgError:  # all on a line, say
            return False
        if not self.fits.keys() >= set(self.deciding):
            return False
        self.open = np.flatnonzero(~self.exact)
        self.border, self.outside = np.zeros(0, int), np.zeros(len(self.coordinates), bool)
        if len(nonfinite):
            if self.dimension == 1:
                return False
            self._separate(nonfinite)
        return True

    def _fit_columns(self, exact: Array) -> None:
        """Fit each column that is finite at the points ``exact`` and can meet the tolerance."""
        interpolants = [Interpolant(self.coordinates[exact], kernel) for kernel in KERNELS]
        guides = self.guide.columns if self.guide else {}
        self.fits: dict[str, Fit] = {}
        for name, values in self._columns.items():
            if np.isfinite(values[exact]).all():
                scale = ErrorScale.of(values[exact], self._tolerance)
                if scale.possible:
                    self.fits[name] = Fit(
                        self.coordinates, values, exact, scale, interpolants, guides.get(name)
                    )

    def _separate(self, nonfinite: Array) -> None:
        """Set ``border`` and ``outside`` by the corners of the triangle of exact points around each open one.

        In triangles on the border some corners are ``nonfinite``. Points in triangles of these alone are
        outside.
        """
        exact = np.flatnonzero(self.exact)
        mesh = scipy.spatial.Delaunay(self.coordinates[exact])
        corners = np.isin(exact[mesh.simplices], nonfinite).sum(1)
        around = mesh.find_simplex(self.coordinates[self.open])
        self.outside[self.open[corners[around] == 3]] = True
        self._nearest_nonfinite = nonfinite[
            scipy.spatial.cKDTree(self.coordinates[nonfinite]).query(self.coordinates)[1]
        ]
        beside = [mesh.find_simplex(self.coordinates[self.open] + 1e-6 * np.array(d)) for d in DIAGONALS]
        mixed = (corners > 0) & (corners < 3)
        # Of each triangle, the point that is furthest from all corners. A point on an edge belongs to both.
        triangles = np.max([np.where((t >= 0) & mixed[t], t, -1) for t in (around, *beside)], axis=0)
        on_border = triangles >= 0
        candidates, triangles = self.open[on_border], triangles[on_border]
        distance = scipy.spatial.cKDTree(self.coordinates[exact]).query(self.coordinates[candidates])[0]
        order = np.lexsort((-distance, triangles))  # by triangle, then from the furthest point on
        furthest = np.unique(triangles[order], return_index=True)[1]
        self.border = candidates[order][furthest]

    def fit_and_compute_border(self) -> bool:
        """Fit the columns, and compute all points between finite and other values.

        Return whether the columns that decide can be interpolated.
        """
        while self.fit():
            if not len(self.border):
                return True
            self.compute(self.border)
        return False

    def has_scale_of_guide(self) -> bool:
        """Return whether all values are finite, and their scale is that on which the guide was followed."""
        return not self.outside.any() and all(
            self.fits[name].scale.log == self._followed_log[name] for name in self.deciding
        )

    def guided_indices(self, shape: Sequence[int]) -> Array:
        """Return the points to compute first: an interpolant through them approximates the guide's values.

        The guide has the values that were computed with a part of the samples. The points include the
        coarsest GUIDED_BASE × GUIDED_BASE points and the extremes of the guide. At these first points, this
        method also computes the values with all samples. The values with all samples decide between a linear
        and a logarithmic scale, on which the interpolant must approximate the guide.
        """
        assert self.guide is not None
        guides = {name: self.guide.columns[name] for name in self.deciding}
        extremes = [index for values in guides.values() for index in (values.argmin(), values.argmax())]
        first = chosen = np.union1d(coarse_indices(shape, GUIDED_BASE), extremes)
        self.compute(first)
        for name, values in guides.items():
            # A guide with values ≤ 0 has no logarithms. The scale is then that of the guide, which is linear.
            scale_values = self._columns[name][first] if values.min() > 0 else values
            scale = ErrorScale.of(scale_values[np.isfinite(scale_values)], self._tolerance)
            self._followed_log[name] = scale.log
            # What to approximate, and factors that convert its errors to units of the tolerance. The numbers
            # scale(values) have this unit already. On a log scale the values themselves are tried, too. The
            # error of a logarithm is the error of the value divided by the value.
            targets = [(scale(values), np.ones(len(values)))]
            if scale.log:
                targets.append((values, 1 / (scale.limit * values)))
            counts = GUIDED_COUNTS[self.dimension]
            choices = [
                choose_points(self.coordinates, target, factors, kernel, chosen, FOLLOW_ERROR, *counts)
                for target, factors in targets
                for kernel in ("cubic", "quintic")
            ]
            chosen = np.union1d(chosen, min(choices, key=len))
        return chosen

    def quantities(self, indices: Array) -> dict[str, Array]:
        """Column -> the fitted quantity at the points ``indices``: the values, or their logarithms."""
        functions = [fit.function for fit in self.fits.values()]
        pairs = [(function.interpolant, function.coefficients) for function in functions]
        corrections = evaluate(pairs, self.coordinates[indices]) if pairs else []
        return {
            name: correction + function.base[indices]
            for name, function, correction in zip(self.fits, functions, corrections, strict=True)
        }

    def expected(self) -> dict[str, Array]:
        """Column -> (M,): the expected error of the fitted quantity at the open points, up to a factor."""
        distances, nearest = self._tree.query(self.coordinates[self.open], k=NEIGHBORS)
        self._distance = distances[:, 0]  # to the nearest exact point
        columns = {}
        for name, fit in self.fits.items():
            errors = fit.expected(self.open, self._distance, nearest, self._spacing)
            columns[name] = np.where(self.outside[self.open], 0.0, errors)
        return columns

    def errors(self, predicted: Mapping[str, Array], indices: Array) -> dict[str, tuple[Array, Array]]:
        """Column -> the errors at the points ``indices``, which are exact by now.

        They are those of the fitted quantity, and in units of the tolerance. Where only the value or only the
        prediction is finite, they are infinite.
        """
        finite, outside = self.finite()[indices], self.outside[indices]
        columns = {}
        for name, quantity in predicted.items():
            columns[name] = self.fits[name].errors(quantity, indices)
            for errors in columns[name]:
                errors[outside & ~finite] = 0.0
                errors[outside == finite] = math.inf
        return columns

    def extremes(self) -> Array:
        """The points of the lowest and the highest finite values of the columns that decide."""
        indices = []
        for name in self.deciding:
            values = np.where(np.isfinite(self._columns[name]), self._columns[name], np.nan)
            indices += [np.nanargmin(values), np.nanargmax(values)]
        return np.unique(indices)

    def largest_expected(self, expected: Array, threshold: float, count: int) -> Array:
        """Return at most ``count`` points with the largest expected errors above ``threshold``, far apart.

        ``expected`` (K,) are errors at all points, 0 at exact ones. A chosen point reduces those around it.
        """
        expected = expected.copy()
        chosen: list[int] = []
        distance = np.full(len(expected), np.inf)
        distance[self.open] = self._distance
        while len(chosen) < count:
            index = int(expected.argmax())
            if not expected[index] > threshold:
                break
            chosen.append(index)
            to_index = np.linalg.norm(self.coordinates - self.coordinates[index], axis=1)
            closer = np.flatnonzero(to_index < distance)
            expected[closer] *= (to_index[closer] / np.maximum(distance[closer], 1e-300)) ** 2
            distance[closer] = to_index[closer]
        return np.array(chosen, dtype=int)

    def fill(self, done: Array) -> dict[str, ErrorScale]:
        """Write predictions to the points that are not ``done``; column -> the scale of its values then."""
        missing = np.flatnonzero(~done)
        outside = missing[self.outside[missing]]
        predicted = self.quantities(missing)
        for name, column in self._columns.items():
            column[missing] = self.fits[name].values(predicted[name]) if name in self.fits else np.nan
            if len(outside):
                column[outside] = column[self._nearest_nonfinite[outside]]
        fitted = {name: self._columns[name] for name in self.fits}
        return {name: ErrorScale.of(c[np.isfinite(c)], self._tolerance) for name, c in fitted.items()}

"""Values on a grid from some of its points: exact where they are needed, interpolated elsewhere.

A coarse level is computed first. Then, in rounds, an interpolant (:mod:`.interpolation`) is fitted to all
exact points and checked at points drawn at random that it has not seen. If the stated error is within the
tolerance, the interpolant through all points fills the rest; if not, the points where the error is expected
to be largest are computed as well. Where half of the grid is reached, all of it is computed. Between points
with finite and with other values, all points are computed.

The expected error at a point is that of leaving its exact neighbours out, which shrinks with the distance to
them; the checks measure by how much. What lies wholly between the points of the coarsest level, a twelfth of
the width apart, is only found if a check falls into it: of 100 cases in 95 if it covers 5% of the grid, in 45
if it covers 1% (60 checks). The next points depend on the values alone, not on what was known before: an
interrupted computation, run again, asks for the same ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # which loads its parts when they are used: a grid of exact points needs none

from landscape.core.hdf5 import Array
from landscape.evaluation.interpolation import KERNELS, Interpolant
from landscape.evaluation.tolerance import Scale, Tolerance

# All numbers here are ours, from the surfaces of tests/test_adaptive.py.
BASE = 13  # points of the coarsest level along an axis: smooth surfaces need no more for 1%
CHECKS = {1: 12, 2: 60}  # points at which the error is measured in a round, by dimension
GROWTH = 0.15  # new points in a round, of those known
NEIGHBOURS = 6  # exact points whose errors are looked at around a point
SAFETY = 3.0  # how many times the errors at the checks the largest of all may be
# How many times the mean ratio of measured and expected errors any ratio may be, in the first two rounds, in
# which smooth surfaces end, and later: at kinks the ratios differ more.
MARGIN, LATE_MARGIN = 3.5, 5.0
MOST = 1e6  # no larger error is expected: a negative value on a logarithmic scale is infinitely wrong
LEAST = 0.01  # no smaller error is stated, in units of the tolerance
# An error shrinks with this power of the size of the hole, at least.
ORDERS = {"linear": 1.0, "cubic": 2.0, "quintic": 3.0}
FULL = 0.5  # the share of exact points from which on all are computed
ROUGHLY = (
    0.6  # the stated error that ends a long refinement, in units of the tolerance: at kinks it is less sure
)
DIAGONALS = ((1, 1), (1, -1), (-1, 1), (-1, -1))

Compute = Callable[[Array], None]


def first_points(shape: Sequence[int]) -> int:
    """How many points are computed at least."""
    return min(math.prod(shape), len(base_places(shape)) + _checks(shape))


@dataclass(frozen=True)
class Outcome:
    """The errors of a finished grid, in units of its tolerance.

    Attributes:
        stated: column -> the stated error; it is 0 where all points are exact.
        largest: column -> the largest error at the last check points.
        checks: how many these are.
        log: the columns whose errors are of logarithms.
    """

    stated: Mapping[str, float]
    largest: Mapping[str, float]
    checks: int
    log: frozenset[str]


def base_places(shape: Sequence[int]) -> Array:
    """The numbers of the coarsest level's points on a grid of ``shape``, the last axis fastest.

    They are denser towards the ends, where an interpolant has neighbours on one side only.
    """
    chosen = np.zeros(shape, bool)
    along = []
    for count in shape:
        even = np.linspace(-1, 1, min(BASE, count))
        bent = np.sin(np.pi / 2 * even)
        along.append(np.unique(np.rint((0.5 * (even + bent) + 1) / 2 * (count - 1)).astype(int)))
    chosen[np.ix_(*along)] = True
    return np.flatnonzero(chosen)


class _Fit:
    """One column through the exact points ``places``: the interpolant that predicts left-out points best.

    Candidates are all kernels, for the values and, where these are positive, for their logarithms.
    """

    def __init__(
        self,
        at: Array,
        values: Array,
        places: Array,
        tolerance: Tolerance,
        through: Mapping[str, Interpolant],
    ) -> None:
        exact = values[places]
        self._at, self._values, self.scale = at, values, Scale.of(exact, tolerance)
        best = math.inf
        for kernel, interpolant in through.items():
            for log in (False, True) if exact.min() > 0 else (False,):
                fitted = np.log(exact) if log else exact
                coefficients = interpolant.coefficients(fitted)
                missed = self._errors(fitted - interpolant.left_out(coefficients), exact, log)
                missed = np.minimum(missed, MOST)
                if (usual := float(np.sort(missed)[int(0.9 * len(missed))])) < best:
                    best, self.missed = usual, missed  # (N,), where each exact point is left out
                    self._through, self._coefficients, self._log = interpolant, coefficients, log
                    self._order = ORDERS[kernel]

    def _errors(self, predicted: Array, exact: Array, log: bool) -> Array:
        with np.errstate(over="ignore"):
            values = np.exp(predicted) if log else predicted
        missed: Array = np.nan_to_num(np.abs(self.scale(values) - self.scale(exact)), nan=math.inf)
        return missed

    def predict(self, places: Array) -> Array:
        """The values at ``places``."""
        found = self._through(self._coefficients, self._at[places])
        if self._log:
            with np.errstate(over="ignore"):
                found = np.exp(found)
        return found

    def errors(self, predicted: Array, places: Array) -> Array:
        """|difference| of ``predicted`` from the values at ``places``, in units of the tolerance."""
        return self._errors(predicted, self._values[places], log=False)

    def expected(self, distance: Array, nearest: Array, spacing: Array) -> Array:
        """The error to be expected at points at ``distance`` (M,) from the exact ones, up to a common factor.

        That of leaving one of the ``nearest`` (M, k) exact points out, which opens a hole of its ``spacing``
        (N,), is scaled to the smaller hole around the point.
        """
        holes = np.minimum(distance[:, None] / spacing[nearest], 1.0)
        found: Array = (self.missed[nearest] * holes**self._order).max(1)
        return found


class _Grid:
    """The points of a grid, which of them are exact, and the fits through these.

    ``exact`` are those asked for in this computation, in which earlier results have no say.
    """

    def __init__(self, shape: Sequence[int], columns: Mapping[str, Array], tolerance: Tolerance) -> None:
        axes = [np.arange(count) for count in shape if count > 1]
        at = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        self.at = 2.0 * at / max(1, at.max()) - 1.0  # (K, d)
        self.exact = np.zeros(len(at), bool)
        self._columns, self._tolerance = columns, tolerance

    def fit(self, deciding: Sequence[str]) -> bool:
        """Fit every column to the exact points; False where too few of these are finite for it."""
        finite = _finite(self._columns, deciding)
        good, bad = np.flatnonzero(self.exact & finite), np.flatnonzero(self.exact & ~finite)
        if len(good) < BASE:
            return False
        self._tree = scipy.spatial.cKDTree(self.at[good])
        self._spacing = self._tree.query(self.at[good], k=2)[0][:, 1]
        through = {kernel: Interpolant(self.at[good], kernel) for kernel in KERNELS}
        try:
            self.fits = {
                name: _Fit(self.at, values, good, self._tolerance, through)
                for name, values in self._columns.items()
                if np.isfinite(values[good]).all()
            }
        except np.linalg.LinAlgError:  # all on a line, say
            return False
        self.open = np.flatnonzero(~self.exact)
        self.border, self.outside = np.zeros(0, int), np.zeros(len(self.at), bool)
        if len(bad):
            if self.at.shape[1] == 1:
                return False
            self._separate(bad)
        return True

    def _separate(self, bad: Array) -> None:
        """Find the points that lie between exact ones of which some are finite, and those where none is.

        The exact ones are the corners of the triangle around a point.
        """
        exact = np.flatnonzero(self.exact)
        mesh = scipy.spatial.Delaunay(self.at[exact])
        corners = np.isin(exact[mesh.simplices], bad).sum(1)
        around = mesh.find_simplex(self.at[self.open])
        self.outside[self.open[corners[around] == 3]] = True
        self._nearest_bad = bad[scipy.spatial.cKDTree(self.at[bad]).query(self.at)[1]]
        beside = [mesh.find_simplex(self.at[self.open] + 1e-6 * np.array(way)) for way in DIAGONALS]
        mixed = (corners > 0) & (corners < 3)
        # Of each triangle, the point that is furthest from all corners. A point on an edge belongs to both.
        triangles = np.max([np.where((t >= 0) & mixed[t], t, -1) for t in (around, *beside)], axis=0)
        places, triangles = self.open[triangles >= 0], triangles[triangles >= 0]
        distance = scipy.spatial.cKDTree(self.at[exact]).query(self.at[places])[0]
        order = np.lexsort((-distance, triangles))
        first = np.unique(triangles[order], return_index=True)[1]
        self.border = places[order][first]

    def expected(self) -> dict[str, Array]:
        """Column -> (K,): the error to be expected at each point, up to a common factor."""
        places = self.open[~self.outside[self.open]]
        distance, nearest = self._tree.query(self.at[places], k=NEIGHBOURS)
        found = {}
        for name, fit in self.fits.items():
            found[name] = np.zeros(len(self.at))
            found[name][places] = fit.expected(distance[:, 0], nearest, self._spacing)
        return found

    def errors(
        self, guesses: Mapping[str, Array], places: Array, deciding: Sequence[str]
    ) -> dict[str, Array]:
        """Column -> the errors at ``places``, now exact: infinite where only one of the two is finite."""
        finite = _finite(self._columns, deciding)[places]
        found = {}
        for name, guess in guesses.items():
            found[name] = self.fits[name].errors(guess, places)
            found[name][self.outside[places] & ~finite] = 0.0
            found[name][self.outside[places] == finite] = math.inf
        return found

    def worst(self, expected: Array, enough: float, count: int) -> Array:
        """At most ``count`` places where the largest errors are expected, above ``enough``, and far apart."""
        expected = expected.copy()
        chosen: list[int] = []
        distance = np.full(len(expected), np.inf)
        distance[self.open] = self._tree.query(self.at[self.open])[0]
        while len(chosen) < count and expected[place := int(expected.argmax())] > enough:
            chosen.append(place)
            nearer = np.linalg.norm(self.at - self.at[place], axis=1)
            closer = np.flatnonzero(nearer < distance)
            expected[closer] *= (nearer[closer] / np.maximum(distance[closer], 1e-300)) ** 2
            distance[closer] = nearer[closer]
        return np.array(chosen, dtype=int)

    def fill(self, done: Array) -> None:
        """Write predictions to the places that are not ``done``."""
        places = np.flatnonzero(~done)
        outside = places[self.outside[places]]
        for name, column in self._columns.items():
            column[places] = self.fits[name].predict(places) if name in self.fits else np.nan
            if len(outside):
                column[outside] = column[self._nearest_bad[outside]]


def interpolate(
    shape: Sequence[int],
    columns: Mapping[str, Array],
    done: Array,
    compute: Compute,
    tolerance: Tolerance,
    deciding: Sequence[str],
    seed: int = 0,
) -> Outcome:
    """Compute some points of a grid and interpolate the others.

    Args:
        shape: of the grid, such as (ny, nx).
        columns: name -> values (K,), K the number of points; written.
        done: (K,), which of them are exact; other values are overwritten.
        compute: called with the places, numbers below K, that must become exact if they are not.
        tolerance: for each column, by its own range.
        deciding: the columns whose errors must be within it; the others' errors are only stated.
        seed: of the check points.
    """
    all_exact = Outcome(dict.fromkeys(columns, 0.0), dict.fromkeys(columns, 0.0), 0, frozenset())
    if first_points(shape) > FULL * len(done):
        compute(np.arange(len(done)))
        return all_exact
    grid, draw = _Grid(shape, columns, tolerance), np.random.default_rng([seed, *shape])
    wanted, checks = base_places(shape), _checks(shape)
    for round_ in itertools.count():
        compute(wanted)
        grid.exact[wanted] = True
        if grid.exact.sum() + checks > FULL * len(done) or not grid.fit(deciding):
            compute(np.flatnonzero(~grid.exact))
            return all_exact
        limit, margin = (1.0, MARGIN) if round_ < 2 else (ROUGHLY, LATE_MARGIN)
        outcome, expected = _checked(grid, checks, compute, deciding, draw, margin)
        if not len(grid.border) and max(outcome.stated[name] for name in deciding) <= limit:
            break
        if round_ == 0:  # a little is often enough
            checks, count = 2 * checks // 3, checks // 3
        else:
            checks = _checks(shape)
            count = max(checks, int(GROWTH * grid.exact.sum()))
        wanted = np.union1d(grid.border, grid.worst(expected, 0.5, count))
    while grid.fit(deciding) and len(grid.border):  # through the check points, too
        compute(grid.border)
        grid.exact[grid.border] = True
    grid.fill(done)
    return outcome


def _checked(
    grid: _Grid,
    count: int,
    compute: Compute,
    deciding: Sequence[str],
    draw: np.random.Generator,
    margin: float,
) -> tuple[Outcome, Array]:
    """Compute ``count`` points that are not exact: the errors there, and those expected at all points (K,).

    The largest error of all is stated as SAFETY times the largest at the checks, or as the largest that is
    expected, if that is more. The expected ones are scaled by ``margin`` times the ratio of the means of
    measured and expected errors at the checks.
    """
    expected = grid.expected()
    checks = _drawn(draw, grid.open, np.max([expected[name] for name in deciding], axis=0), count)
    guesses = {name: fit.predict(checks) for name, fit in grid.fits.items()}
    compute(checks)
    grid.exact[checks] = True
    stated, largest = {}, {}
    for name, errors in grid.errors(guesses, checks, deciding).items():
        finite, largest[name] = np.isfinite(errors), float(errors.max())
        total = float(expected[name][checks][finite].sum())
        expected[name] *= margin * float(errors[finite].sum()) / total if total else 0.0
        stated[name] = max(LEAST, SAFETY * largest[name], float(expected[name].max()))
    log = frozenset(name for name, fit in grid.fits.items() if fit.scale.log)
    worst = np.max([expected[name] for name in deciding], axis=0)
    worst[checks] = 0.0
    return Outcome(stated, largest, count, log), worst


def _finite(columns: Mapping[str, Array], deciding: Sequence[str]) -> Array:
    """(K,): where all columns that decide are finite."""
    found: Array = np.all([np.isfinite(columns[name]) for name in deciding], axis=0)
    return found


def _checks(shape: Sequence[int]) -> int:
    """How many points are drawn to measure the error on a grid of ``shape``."""
    return CHECKS[sum(count > 1 for count in shape) or 1]


def _drawn(draw: np.random.Generator, places: Array, expected: Array, count: int) -> Array:
    """``count`` of ``places``, half of them uniformly, half in proportion to the errors expected there."""
    uniform = draw.choice(places, count // 2, replace=False)
    others = np.setdiff1d(places, uniform)
    share = expected[others] + 1e-3 * expected.max() + 1e-300
    return np.union1d(
        uniform, draw.choice(others, count - len(uniform), replace=False, p=share / share.sum())
    )

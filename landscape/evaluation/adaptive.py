"""Values on a grid from some of its points: exact where they are needed, interpolated elsewhere.

A coarse level is computed first. Then, in rounds, an interpolant is fitted to all
exact points and checked at points that it has not seen, drawn in the widest holes between exact points and
where the error is expected to be large. If the estimated error is within the tolerance, the interpolant
through all points fills the rest; if not, the points where the error is expected to be largest are computed
as well. Where a share FULL of the grid is reached, or where the tolerance is finer than the rounding of the
values, all of it is computed. Between points with finite and with other values, all points are computed.

The expected error at a point is that of leaving its exact neighbors out, which shrinks with the distance to
them; the checks measure by how much. It is one of what is fitted, the values or their logarithms, and is then
converted to the scale that is shown: on the floor of a valley, an error of the loss that is small elsewhere
is a large one of its logarithm. What lies wholly in a hole that is left cannot be seen: of discs anywhere on
a smooth surface of 51 × 51 points that cover 1% of it, 0.6% held no exact point, of those that cover 0.5%,
18%, and of those that cover 1.5%, none. The next points depend on the values alone, not on what
was known before: an interrupted computation, run again, asks for the same ones.

With a part of the samples all this is done for the part. Its values, which are then known everywhere, guide
the others: all samples are computed where a function through few points follows the part's values, and what
is interpolated is the difference from a multiple of these. The error is measured at points that were not
chosen, of all samples. Where the part is rough, or values are not finite, all samples do without it. What no
sample of the part has, such as an island of NaN that only others have, can be missed if it lies between the
fewer points of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # loads its parts when they are used

from landscape.core.hdf5 import Array
from landscape.evaluation.interpolant import KERNELS, ErrorScale, Interpolant, Tolerance, follow

# All numbers here are ours, from the surfaces of benchmarks/surfaces.py and others of the same families.
BASE = 13  # points of the coarsest level along an axis: smooth surfaces need no more for 1%
CHECKS = {1: 12, 2: 60}  # points at which the error is measured in a round, by dimension
COVERING = 2 / 3  # the share of checks that are drawn in the widest holes
JITTER = 0.3  # how much nearer to exact points than the middle of the widest hole a check may be
GROWTH = 0.15  # new points in a round, of those known
NEIGHBORS = 6  # exact points whose errors are looked at around a point
SAFETY = 3.0  # how many times the errors at the checks the largest of all may be
# How many times the mean ratio of measured and expected errors any ratio may be, in the first two rounds, in
# which smooth surfaces end, and later: at kinks the ratios differ more.
MARGIN, LATE_MARGIN = 3.5, 6.0
EARLY = 2  # rounds
MOST = 1e6  # no larger error is expected: a negative value on a logarithmic scale is infinitely wrong
WIDER = 2.0  # how many times the estimated error is stated
LEAST = 0.1  # no smaller error is stated, in units of the tolerance
FULL = 0.7  # the share of exact points from which on all are computed
# The estimated error that ends a long refinement, and those that end one by a part that is not smooth, in the
# first round and later, in units of the tolerance: at kinks they are less sure.
ROUGHLY, GUIDED = 0.7, (0.5, 0.85)
DIAGONALS = tuple(itertools.product((1, -1), repeat=2))

# With a part of the samples: the points along an axis that all samples have at least; the error with which
# the places for all samples follow the part's values, in units of the tolerance; how many places are chosen
# at least, usually and at most, by dimension.
FIRST, FOLLOWED, PLACES = 5, 0.35, {1: (8, 16, 40), 2: (16, 32, 160)}
# A part is smooth if it takes no more than SMOOTH times the least number of points, and is followed through
# FEW places: the largest error is then estimated from so many checks alone, for so many rounds.
SMOOTH, FEW, FEW_CHECKS, FEW_ROUNDS = 2.0, 64, {1: 6, 2: 12}, 3
PART_FULL = 0.5  # the share of points from which on a part is too rough to be a guide
HOPELESS = 2.0  # a part is, too, whose estimated error is so large and not a third of that two rounds before

Compute = Callable[[Array], None]


@dataclass(frozen=True)
class Part:
    """The same columns for a part of the samples, as arguments of :func:`interpolate`."""

    columns: Mapping[str, Array]
    done: Array
    compute: Compute


@dataclass(frozen=True)
class _Guide:
    """The values of a part of the samples at all points, of which those of all samples are a share and more.

    Attributes:
        columns: name -> values (K,).
        smooth: whether few of them are exact.
    """

    columns: Mapping[str, Array]
    smooth: bool


def first_points(shape: Sequence[int]) -> int:
    """The least number of points that are computed."""
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


def base_places(shape: Sequence[int], base: int = BASE) -> Array:
    """The numbers of the ``base`` × ``base`` points of the coarsest level, the last axis fastest.

    They are denser toward the ends, where an interpolant has neighbors on one side only.
    """
    chosen = np.zeros(shape, bool)
    along = []
    for count in shape:
        even = np.linspace(-1, 1, min(base, count))
        bent = np.sin(np.pi / 2 * even)
        along.append(np.unique(np.rint((0.5 * (even + bent) + 1) / 2 * (count - 1)).astype(int)))
    chosen[np.ix_(*along)] = True
    return np.flatnonzero(chosen)


class _Fit:
    """One column through the exact points ``places``: the interpolant that predicts left-out points best.

    Candidates are all kernels, for the values and, where these are positive, for their logarithms. Errors
    are those of what is fitted, which change little from point to point, until ``shown`` has them in units of
    the tolerance: one error of the values is large in the logarithm where the values are small.
    """

    def __init__(
        self,
        at: Array,
        values: Array,
        places: Array,
        scale: ErrorScale,
        through: Sequence[Interpolant],
        guide: Array | None = None,
    ) -> None:
        exact, candidates = values[places], []
        self._at, self._values, self.scale = at, values, scale
        least = exact.min() if guide is None else min(exact.min(), guide.min())
        for interpolant in through:
            for log in (False, True) if least > 0 else (False,):
                fitted = np.log(exact) if log else exact
                middle = float(fitted.mean())
                coefficients = interpolant.coefficients(fitted - middle)
                missed, base = interpolant.left_out(coefficients), np.full(len(at), middle)
                fits = [(coefficients, missed, base, np.zeros(len(at)))]
                if guide is not None:  # a share of which is subtracted
                    like = np.log(guide) if log else guide
                    like = like - like[places].mean()
                    others = interpolant.coefficients(like[places])
                    missed_others = interpolant.left_out(others)
                    share = float(missed @ missed_others / max(missed_others @ missed_others, 1e-300))
                    less = missed - share * missed_others
                    # Errors are expected where the function through the places leaves the guide.
                    ratio = float(np.abs(less).mean() / max(np.abs(missed_others).mean(), 1e-300))
                    astray = np.nan_to_num(ratio * np.abs(interpolant(others, at) - like))
                    fits.append((coefficients - share * others, less, base + share * like, astray))
                for coefficients, missed, base, astray in fits:
                    missed = np.abs(missed)
                    usual = np.sort(self._shown(fitted, missed, log))[int(0.9 * len(missed))]
                    candidates.append((float(usual), log, interpolant, coefficients, missed, base, astray))
        best = min(candidates, key=lambda candidate: candidate[0])
        self._log, self._through, self._coefficients, self._missed, self._base, self._astray = best[1:]

    def _shown(self, fitted: Array, errors: Array, log: bool) -> Array:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if log == self.scale.log:
                found = errors
            elif log:
                found = np.exp(fitted) * np.expm1(errors)
            else:  # to first order
                found = np.where(errors > 0, errors / np.maximum(fitted, 0.0), 0.0)
        return np.minimum(np.nan_to_num(found / self.scale.limit, nan=MOST), MOST)

    def shown(self, fitted: Array, errors: Array) -> Array:
        """``errors`` of what is ``fitted``, in units of the tolerance."""
        return self._shown(fitted, errors, self._log)

    def fitted(self, places: Array) -> Array:
        """The values at ``places``, or their logarithms."""
        return self._through(self._coefficients, self._at[places]) + self._base[places]

    def predict(self, places: Array) -> Array:
        """The values at ``places``."""
        found = self.fitted(places)
        with np.errstate(over="ignore"):
            return np.exp(found) if self._log else found

    def errors(self, fitted: Array, places: Array) -> tuple[Array, Array]:
        """|differences| of ``fitted`` from what is at ``places``, and these in units of the tolerance."""
        values = self._values[places]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            truth, found = (np.log(values), np.exp(fitted)) if self._log else (values, fitted)
            shown = np.abs(self.scale(found) - self.scale(values))
            return np.nan_to_num(np.abs(fitted - truth), nan=math.inf), np.nan_to_num(shown, nan=math.inf)

    def expected(self, places: Array, distance: Array, nearest: Array, spacing: Array) -> Array:
        """The error to be expected at ``places`` (M,), ``distance`` from exact ones, up to a common factor.

        That of leaving one of the ``nearest`` (M, k) exact points out, which opens a hole of its ``spacing``
        (N,), is scaled to the smaller hole around the point.
        """
        holes = np.minimum(distance[:, None] / spacing[nearest], 1.0)
        return np.maximum((self._missed[nearest] * holes**self._through.order).max(1), self._astray[places])


class _Grid:
    """The points of a grid, which of them are exact, and the fits through these.

    ``exact`` are those asked for in this computation, in which earlier results have no say.
    """

    def __init__(
        self,
        shape: Sequence[int],
        level: Part,
        tolerance: Tolerance,
        guide: _Guide | None = None,
    ) -> None:
        axes = [np.arange(count) for count in shape if count > 1]
        at = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        self.step = 2.0 / max(1, at.max())
        self.at = self.step * at - 1.0  # (K, d)
        self.exact = np.zeros(len(at), bool)
        self._level, self._columns, self._tolerance, self.guide = level, level.columns, tolerance, guide

    def compute(self, places: Array) -> None:
        """Make the points ``places`` exact."""
        self._level.compute(places)
        self.exact[places] = True

    def fit(self, deciding: Sequence[str]) -> bool:
        """Fit the columns to the exact points; False where those that decide cannot be interpolated."""
        finite = _finite(self._columns, deciding)
        good, bad = np.flatnonzero(self.exact & finite), np.flatnonzero(self.exact & ~finite)
        if len(good) < min(BASE, PLACES[self.at.shape[1]][0]):
            return False
        self._tree = scipy.spatial.cKDTree(self.at[good])
        self._spacing = self._tree.query(self.at[good], k=2)[0][:, 1]
        through = [Interpolant(self.at[good], kernel) for kernel in KERNELS]
        guides = self.guide.columns if self.guide else {}
        try:
            self.fits = {
                name: _Fit(self.at, values, good, scale, through, guides.get(name))
                for name, values in self._columns.items()
                if np.isfinite(values[good]).all()
                and (scale := ErrorScale.of(values[good], self._tolerance)).possible
            }
        except np.linalg.LinAlgError:  # all on a line, say
            return False
        if not self.fits.keys() >= set(deciding):
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

    def settle(self, deciding: Sequence[str]) -> bool:
        """Fit, and compute all points between finite and other values; False where that is not possible."""
        while fits := self.fit(deciding):
            if not len(self.border):
                break
            self.compute(self.border)
        return fits

    def like_guide(self, deciding: Sequence[str]) -> bool:
        """Return whether all values are finite, and shown on the scale on which the guide's are."""
        return not self.outside.any() and all(
            self.fits[name].scale.log == self._scale(name).log for name in deciding
        )

    def _scale(self, name: str) -> ErrorScale:
        assert self.guide is not None
        return ErrorScale.of(self.guide.columns[name], self._tolerance)

    def first_places(self, shape: Sequence[int], deciding: Sequence[str]) -> Array:
        """The first places for all samples: a function through them follows the guide's values."""
        assert self.guide is not None
        chosen = base_places(shape, FIRST)
        for name in deciding:
            values, scale = self.guide.columns[name], self._scale(name)
            ways = [(scale(values), np.ones(len(values)))]
            if scale.log:  # by errors of the values, which are larger in the logarithm where these are small
                ways.append((values, 1 / (scale.limit * values)))
            chosen = np.union1d(chosen, [values.argmin(), values.argmax()])
            tries = [
                follow(self.at, *way, kernel, chosen, FOLLOWED, *PLACES[self.at.shape[1]])
                for way in ways
                for kernel in ("cubic", "quintic")
            ]
            chosen = np.union1d(chosen, min(tries, key=len))
        return chosen

    def expected(self) -> dict[str, Array]:
        """Column -> (M,): the error of what is fitted to be expected at the open points, up to a factor."""
        distance, nearest = self._tree.query(self.at[self.open], k=NEIGHBORS)
        return {
            name: np.where(
                self.outside[self.open], 0.0, fit.expected(self.open, distance[:, 0], nearest, self._spacing)
            )
            for name, fit in self.fits.items()
        }

    def errors(
        self, fitted: Mapping[str, Array], places: Array, deciding: Sequence[str]
    ) -> dict[str, tuple[Array, Array]]:
        """Column -> the errors at ``places``, now exact: infinite where only one of the two is finite.

        They are given as fitted, and in units of the tolerance.
        """
        finite = _finite(self._columns, deciding)[places]
        found = {}
        for name, guess in fitted.items():
            found[name] = self.fits[name].errors(guess, places)
            for errors in found[name]:
                errors[self.outside[places] & ~finite] = 0.0
                errors[self.outside[places] == finite] = math.inf
        return found

    def extremes(self, deciding: Sequence[str]) -> Array:
        """The places of the lowest and the highest finite values of the columns that decide."""
        columns = [self._columns[name] for name in deciding]
        columns = [np.where(np.isfinite(c), c, np.nan) for c in columns]
        return np.unique([place for c in columns for place in (np.nanargmin(c), np.nanargmax(c))])

    def worst(self, expected: Array, enough: float, count: int) -> Array:
        """Places, at most ``count``, where the largest errors above ``enough`` are expected, far apart."""
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

    def fill(self, done: Array) -> dict[str, ErrorScale]:
        """Write predictions to the places that are not ``done``; column -> the scale of what is shown."""
        places = np.flatnonzero(~done)
        outside = places[self.outside[places]]
        for name, column in self._columns.items():
            column[places] = self.fits[name].predict(places) if name in self.fits else np.nan
            if len(outside):
                column[outside] = column[self._nearest_bad[outside]]
        shown = {name: self._columns[name] for name in self.fits}
        return {name: ErrorScale.of(c[np.isfinite(c)], self._tolerance) for name, c in shown.items()}


def interpolate(
    shape: Sequence[int],
    columns: Mapping[str, Array],
    done: Array,
    compute: Compute,
    tolerance: Tolerance,
    deciding: Sequence[str],
    seed: int = 0,
    part: Part | None = None,
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
        part: the columns of a part of the samples, which are computed first and guide the others.
    """
    whole, guide = Part(columns, done, compute), None
    if part is not None:
        compute(first := base_places(shape, FIRST))  # which all samples have with any guide
        if _finite(columns, deciding)[first].all():
            guide = _guided(shape, part, tolerance, deciding, seed)
    outcome = _refined(shape, whole, tolerance, deciding, seed, guide)
    if outcome is None:
        compute(np.arange(len(done)))
        return Outcome(dict.fromkeys(columns, 0.0), dict.fromkeys(columns, 0.0), 0, frozenset())
    return outcome


def _guided(
    shape: Sequence[int], part: Part, tolerance: Tolerance, deciding: Sequence[str], seed: int
) -> _Guide | None:
    """The values of a part of the samples at all points; None where they cannot be interpolated."""
    outcome = _refined(shape, part, tolerance, deciding, seed, of_part=True)
    if outcome is None:
        return None
    good = (name for name, stated in outcome.stated.items() if name in deciding or stated <= 1.0)
    columns = {name: part.columns[name] for name in good if np.isfinite(part.columns[name]).all()}
    if not columns.keys() >= set(deciding):
        return None
    return _Guide(columns, bool(part.done.sum() <= SMOOTH * first_points(shape)))


def _refined(
    shape: Sequence[int],
    level: Part,
    tolerance: Tolerance,
    deciding: Sequence[str],
    seed: int,
    guide: _Guide | None = None,
    of_part: bool = False,
) -> Outcome | None:
    """:func:`interpolate` from the coarsest level on, or by a ``guide``; None where these are not enough.

    They are not where a share of FULL of the points would be needed. A part of the samples is not where a
    share of PART_FULL would be, where values are not finite, which others are elsewhere, or where it is
    HOPELESS.
    """
    if 2 * first_points(shape) > len(level.done):
        return None
    grid, draw = _Grid(shape, level, tolerance, guide), np.random.default_rng([seed, *shape])
    wanted = grid.first_places(shape, deciding) if guide else base_places(shape)
    smooth = guide is not None and guide.smooth and len(wanted) <= FEW
    most, estimates = _checks(shape), list[float]()
    for round_ in itertools.count():
        grid.compute(wanted)
        if (of_part and not _finite(level.columns, deciding)[grid.exact].all()) or not grid.settle(deciding):
            return None
        few = smooth and round_ < FEW_ROUNDS and grid.like_guide(deciding)
        late = guide is None and len(estimates) >= EARLY
        limit = ROUGHLY if late else GUIDED[bool(estimates)] if guide and not few else 1.0
        if few:
            checks = FEW_CHECKS[grid.at.shape[1]]
        elif guide or (late and of_part):
            checks = most // 2
        else:
            checks = 2 * most // 3 if len(estimates) == 1 else most
        if grid.exact.sum() + checks > (PART_FULL if of_part else FULL) * len(level.done):
            return None
        margin = LATE_MARGIN if late and not of_part else MARGIN
        outcome, expected = _checked(grid, checks, deciding, draw, None if few else margin)
        estimate = max(outcome.stated[name] for name in deciding)
        if estimate <= limit:
            scales = {name: fit.scale for name, fit in grid.fits.items()}
            if not grid.settle(deciding):
                return None
            shown = grid.fill(level.done)
            if all(shown[name].log == scales[name].log for name in deciding):
                break
            # The scale that is shown hangs on interpolated values: on these.
            wanted = grid.extremes(deciding)
            if grid.exact[wanted].all():
                return None
            continue
        if few:
            count = checks // 2
        elif not estimates:  # a little is often enough
            count = most // 3
        else:
            count = max(most // 2 if guide else most, int(GROWTH * grid.exact.sum()))
        estimates += [] if few else [estimate]
        if of_part and len(estimates) > 3 and HOPELESS < estimate > estimates[-3] / 3:
            return None
        wanted = grid.worst(expected, 0.5, count)
    return _stated(outcome, scales, shown, 1.0 if guide or late else LEAST)


def _stated(
    outcome: Outcome,
    scales: Mapping[str, ErrorScale],
    shown: Mapping[str, ErrorScale],
    least: float,
) -> Outcome:
    """``outcome``, of errors on ``scales``, with the errors that are stated on those of what is ``shown``.

    That an estimate is within the tolerance is surer than the estimate itself: WIDER times as much is
    stated, though no more than the tolerance, nor less than ``least``. Another scale would be another error:
    the columns that have one, which do not decide, have an infinite error.
    """
    stated, largest = {}, {}
    for name, scale in shown.items():
        estimate, before = outcome.stated.get(name, math.inf), scales.get(name, scale)
        share = before.limit / scale.limit if before.log == scale.log else math.inf
        largest[name] = share * outcome.largest.get(name, math.inf)
        stated[name] = max(share * estimate, min(max(WIDER * share * estimate, least), 1.0))
    return replace(outcome, stated=stated, largest=largest)


def _checked(
    grid: _Grid,
    count: int,
    deciding: Sequence[str],
    draw: np.random.Generator,
    margin: float | None,
) -> tuple[Outcome, Array]:
    """Compute ``count`` points that are not exact: the errors there, and those expected at all points (K,).

    The largest error of all is estimated as SAFETY times the largest at the checks, or as the largest that is
    expected, if that is more and there is a ``margin``. Expected ones are scaled by the margin times the
    ratio of the means of measured and expected errors at the checks.
    """
    expected = grid.expected()
    fitted = {name: fit.fitted(grid.open) for name, fit in grid.fits.items()}
    worst = np.max([grid.fits[name].shown(fitted[name], expected[name]) for name in deciding], axis=0)
    drawn = _drawn(draw, grid, worst, count)  # among the open ones
    checks = grid.open[drawn]
    grid.compute(checks)
    stated, largest, shown = {}, {}, {}
    guesses = {name: guess[drawn] for name, guess in fitted.items()}
    for name, (errors, seen) in grid.errors(guesses, checks, deciding).items():
        finite, largest[name] = np.isfinite(errors), float(seen.max())
        total = float(expected[name][drawn][finite].sum())
        factor = (margin or MARGIN) * float(errors[finite].sum()) / total if total else 0.0
        shown[name] = grid.fits[name].shown(fitted[name], factor * expected[name])
        shown[name][drawn] = 0.0
        stated[name] = max(SAFETY * largest[name], float(shown[name].max()) if margin else 0.0)
    log = frozenset(name for name, fit in grid.fits.items() if fit.scale.log)
    most = np.zeros(len(grid.at))
    most[grid.open] = np.max([shown[name] for name in deciding], axis=0)
    return Outcome(stated, largest, count, log), most


def _finite(columns: Mapping[str, Array], deciding: Sequence[str]) -> Array:
    """The points (K,) at which all columns that decide are finite."""
    return np.all([np.isfinite(columns[name]) for name in deciding], axis=0)


def _checks(shape: Sequence[int]) -> int:
    """The number of points that are drawn to measure the error on a grid of ``shape``."""
    return CHECKS[sum(count > 1 for count in shape) or 1]


def _drawn(draw: np.random.Generator, grid: _Grid, expected: Array, count: int) -> Array:
    """``count`` of the open points: most in the widest holes, others in proportion to the expected errors."""
    at = grid.at[grid.open]
    # Half a step around each point: the middle of a hole is often between points. (corners, M, d)
    around = at + 0.5 * grid.step * np.array(list(itertools.product((-1, 1), repeat=at.shape[1])))[:, None]
    distance = scipy.spatial.cKDTree(grid.at[grid.exact]).query(around)[0]
    chosen: list[int] = []
    for _ in range(int(COVERING * count)):
        wide = distance.max(0) * draw.uniform(1 - JITTER, 1, len(at))
        chosen.append(int(wide.argmax()))
        distance = np.minimum(distance, np.linalg.norm(around - at[chosen[-1]], axis=-1))
        distance[:, chosen] = 0.0
    others = np.setdiff1d(np.arange(len(at)), chosen)
    share = expected[others] + 1e-3 * expected.max() + 1e-300
    drawn = draw.choice(others, count - len(chosen), replace=False, p=share / share.sum())
    return np.union1d(chosen, drawn)

"""Values on a grid from some of its points: exact where they are needed, interpolated elsewhere.

A coarse level is computed first. Then, in rounds, an interpolant is fitted to all exact points. Its error is
estimated at check points: most are in the widest holes between exact points, the others where large errors
are expected. If the estimate is within the tolerance, an interpolant through all exact points fills the rest.
Otherwise the points with the largest expected errors are computed, and the next round begins. The whole grid
is computed if more than a share MAX_SHARE of it would be, or if the tolerance is finer than the rounding of
the values. Between points with finite and with other values, all points are computed.

The expected error at a point is the leave-one-out error of its exact neighbors, reduced by the distance to
them, up to a factor that the checks measure. It is an error of the fitted quantity, the values or their
logarithms, and is converted to the scale of the result: on the floor of a valley, a small error of the loss
is a large one of its logarithm. A feature that lies wholly in a hole between exact points is not seen: of
discs anywhere on a smooth surface of 51 × 51 points, 18% of those that cover 0.5% of it held no exact point,
0.6% of those that cover 1%, and none of those that cover 1.5%. The next points depend on the values alone,
not on earlier results: an interrupted computation, run again, asks for the same ones.

With a part of the samples, the coarsest points are computed with all samples. If their values are finite,
the loss of the part is completed, and guides the choice of further points: those through which an interpolant
approximates the part's values. The interpolated quantity is then the difference from a multiple of the part's
values. Where the part is rough, or values are not finite, there is no guide. A feature that no sample of the
part has, such as an island of NaN, can be missed if it lies between the fewer points of all samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from landscape.core.hdf5 import Array
from landscape.evaluation.fit import GUIDED_BASE, Evaluations, FittedGrid, Guide
from landscape.evaluation.interpolant import ErrorScale, Tolerance, coarse_indices, widest_holes

# All numbers here are our choice, from the surfaces of benchmarks/surfaces.py and others of these families.
BASE = 13  # points of the coarsest level along an axis: smooth surfaces need no more for 1%
CHECKS = {1: 12, 2: 60}  # points at which the error is measured in a round, by dimension
COVERING = 2 / 3  # the share of checks that are drawn in the widest holes
JITTER = 0.3  # how much nearer to exact points than the middle of the widest hole a check may be
GROWTH = 0.15  # new points in a round, as a share of the exact ones
SAFETY = 3.0  # the estimated largest error, as a multiple of the largest at the checks
# The same with few checks where a linear kernel fits best: the surface is then less smooth than its part.
LINEAR_SAFETY = 5.0
# The largest expected error is scaled by MARGIN times the mean ratio of measured and expected errors. In the
# first two rounds, in which smooth surfaces end, it is smaller than later: at kinks the ratios differ more.
MARGIN, LATE_MARGIN = 3.5, 6.0
EARLY = 2  # rounds
STATED_FACTOR = 2.0  # the stated error, as a multiple of the estimated one
MIN_STATED = 0.1  # the smallest stated error, in units of the tolerance
MAX_SHARE = 0.7  # the share of exact points from which on all are computed
# The estimated errors that end a long refinement, and one by a part that is not smooth, in the first round
# and later, in units of the tolerance: at kinks estimates are less sure.
LATE_LIMIT, GUIDED_LIMITS = 0.7, (0.5, 0.7)

# A part is smooth if it needs at most SMOOTH times the minimum number of points, and if a function through
# FEW_POINTS follows it: the first FEW_ROUNDS then estimate the largest error from FEW_CHECKS alone.
SMOOTH, FEW_POINTS, FEW_CHECKS, FEW_ROUNDS = 2.0, 72, {1: 6, 2: 12}, 10
PART_MAX_SHARE = 0.5  # the share of points from which on a part is too rough to be a guide
# The estimated error in tolerances above which a part is given up, too, if the error fell by less than a
# factor of 3 in the last two rounds.
HOPELESS = 4.0
# After a part is given up, the numbers of checks and of new points are multiplied by GIVEN_UP, and the margin
# of late rounds is GIVEN_UP_MARGIN: islands in the part's loss were seen at its own points, whose cost has to
# be made up for.
GIVEN_UP, GIVEN_UP_MARGIN = 2 / 3, 5.0

# The samples of a refinement: all samples without a part, a part of the samples, or all samples after a part.
Stage = Literal["without part", "part", "after part"]


def first_points(shape: Sequence[int]) -> int:
    """The minimum number of points that are computed."""
    return min(math.prod(shape), len(coarse_indices(shape, BASE)) + _checks(shape))


@dataclass(frozen=True)
class Outcome:
    """The errors of a finished grid, in units of its tolerance.

    Attributes:
        stated: column -> the stated error; it is 0 where all points are exact.
        largest: column -> the largest error at the last check points.
        checks: the number of these points.
        log: the columns whose errors are of logarithms.
    """

    stated: Mapping[str, float]
    largest: Mapping[str, float]
    checks: int
    log: frozenset[str]


def interpolate(
    shape: Sequence[int], whole: Evaluations, tolerance: Tolerance, deciding: Sequence[str], seed: int = 0,
    part: Evaluations | None = None,
) -> Outcome:  # fmt: skip
    """Compute some points of a grid and interpolate the others.

    Args:
        shape: the shape of the grid, such as (ny, nx).
        whole: the columns of values on the grid, computed with all samples.
        tolerance: the largest allowed error; a relative tolerance is a share of each column's own range.
        deciding: the columns whose errors must be within ``tolerance``; the errors of other columns are only
            stated.
        seed: the seed of the draw of check points.
        part: the same columns, computed with a part of the samples. A few points are first computed with all
            samples. If their values are finite, the values of the part are computed or interpolated at all
            points, and guide the choice of further points for all samples.
    """
    stage: Stage = "without part"
    guide = None
    if part is not None:
        coarse = coarse_indices(shape, GUIDED_BASE)  # these points are computed with or without a guide
        whole.compute(coarse)
        if all(np.isfinite(whole.columns[name][coarse]).all() for name in deciding):
            stage = "after part"
            guide = _guide_from(shape, part, tolerance, deciding, seed)
    outcome = _refine(shape, whole, tolerance, deciding, seed, stage, guide)
    if outcome is None:  # the tolerance needs all points
        whole.compute(np.arange(len(whole.done)))
        no_errors = dict.fromkeys(whole.columns, 0.0)
        return Outcome(no_errors, no_errors, 0, frozenset())
    return outcome


def _guide_from(
    shape: Sequence[int], part: Evaluations, tolerance: Tolerance, deciding: Sequence[str], seed: int
) -> Guide | None:
    """Return a part's values at all points as a guide; None if they cannot be interpolated."""
    outcome = _refine(shape, part, tolerance, deciding, seed, stage="part")
    if outcome is None:
        return None
    accurate = [name for name, stated in outcome.stated.items() if name in deciding or stated <= 1.0]
    columns = {name: part.columns[name] for name in accurate if np.isfinite(part.columns[name]).all()}
    if not columns.keys() >= set(deciding):
        return None
    return Guide(columns, bool(part.done.sum() <= SMOOTH * first_points(shape)))


@dataclass(frozen=True)
class _Round:
    """The numbers of one round of a refinement.

    Attributes:
        checks: the number of check points.
        error_limit: the estimated error that ends the refinement, in units of the tolerance.
        margin: the factor of expected errors, as in :func:`_estimate`; None with few checks.
        min_new: the minimum number of points to compute if the refinement goes on.
        min_growth: the minimum share of points to compute, relative to the exact points.
        min_stated: the smallest error that a result states after the round, in units of the tolerance.
    """

    checks: int
    error_limit: float
    margin: float | None
    min_new: int
    min_growth: float
    min_stated: float

    @property
    def probe(self) -> int:
        """The number of checks that are computed first; if these fail, the other checks are not computed."""
        return self.checks // (2 if self.margin is None else 3)

    @classmethod
    def after(cls, estimates: int, grid: FittedGrid, stage: Stage, few: bool) -> _Round:
        """Return the round after a number of ``estimates``, with ``few`` checks if a smooth part guides."""
        if few:
            count = FEW_CHECKS[grid.dimension]
            return cls(count, 1.0, None, count // 2, 0.0, 1.0)
        checks, limit, margin = CHECKS[grid.dimension], 1.0, MARGIN
        growth = GROWTH if estimates else 0.0  # after the first round a few points are often enough
        part_given_up = stage == "after part" and grid.guide is None
        if part_given_up:
            checks, growth = int(GIVEN_UP * checks), GIVEN_UP * growth
        new = checks if estimates else checks // 3
        late = estimates >= EARLY
        if grid.guide is not None:
            checks, limit = checks // 2, GUIDED_LIMITS[min(estimates, 1)]
            new = min(new, checks)
        elif late and stage == "part":
            checks, limit = checks // 2, LATE_LIMIT
        elif late:
            limit, margin = (1.0, GIVEN_UP_MARGIN) if part_given_up else (LATE_LIMIT, LATE_MARGIN)
        elif estimates:
            checks = 2 * checks // 3
        min_stated = 1.0 if late or grid.guide is not None else MIN_STATED
        return cls(checks, limit, margin, new, growth, min_stated)


def _refine(
    shape: Sequence[int], evaluations: Evaluations, tolerance: Tolerance, deciding: Sequence[str], seed: int,
    stage: Stage, guide: Guide | None = None,
) -> Outcome | None:  # fmt: skip
    """Compute points in rounds until the others can be interpolated, and interpolate these.

    The first points are the coarsest points, or those that a ``guide`` chooses. The errors of the
    ``deciding`` columns must be within the tolerance.

    The result is None if the caller must compute all points: if the grid is small, if more than a share
    MAX_SHARE of its points is needed, or if no function can be fitted. The smallest and the largest value of
    a column decide whether its errors are measured on a linear or a logarithmic scale. The result is also
    None if the interpolated values change this decision, although the column's extremes are exact.

    At the stage "part" the result is also None if more than a share PART_MAX_SHARE of the points is needed,
    if the estimated error is HOPELESS, or if a value is not finite.
    """
    if 2 * first_points(shape) > len(evaluations.done):
        return None
    grid = FittedGrid(shape, evaluations, tolerance, deciding, guide)
    rng = np.random.default_rng([seed, *shape])
    next_points = grid.guided_indices(shape) if guide else coarse_indices(shape, BASE)
    is_smooth = guide is not None and guide.smooth and len(next_points) <= FEW_POINTS
    max_share = PART_MAX_SHARE if stage == "part" else MAX_SHARE
    # The largest error in units of the tolerance, estimated in each round with many check points.
    estimates: list[float] = []
    failures = 0
    while True:
        grid.compute(next_points)
        if stage == "part" and not grid.finite()[grid.exact].all():
            return None
        if not grid.fit_and_compute_border():
            return None
        few_checks = is_smooth and failures < FEW_ROUNDS and grid.has_scale_of_guide()
        this_round = _Round.after(len(estimates), grid, stage, few_checks)
        if grid.exact.sum() + this_round.checks > max_share * len(evaluations.done):
            return None
        outcome, expected_errors = _measure_errors(grid, this_round, rng, probes=stage != "without part")
        # ``outcome.stated`` has the estimated errors, until _on_final_scales replaces them at the end.
        estimate = max(outcome.stated[name] for name in deciding)
        if estimate <= this_round.error_limit:
            scales = {name: fit.scale for name, fit in grid.fits.items()}
            if not grid.fit_and_compute_border():  # a new fit: the check points are exact now
                return None
            filled_scales = grid.fill(evaluations.done)
            if all(filled_scales[name].log == scales[name].log for name in deciding):
                break
            # Interpolated extremes changed a scale from linear to logarithmic or back: compute the extremes.
            next_points = grid.extremes()
            if grid.exact[next_points].all():
                return None
            continue
        failures += 1
        if not few_checks:
            estimates.append(estimate)
        falls_slowly = len(estimates) > 2 and estimate > estimates[-3] / 3
        if stage == "part" and HOPELESS < estimate < math.inf and falls_slowly:
            return None
        count = max(this_round.min_new, int(this_round.min_growth * grid.exact.sum()))
        next_points = grid.largest_expected(expected_errors, threshold=0.5, count=count)
    return _on_final_scales(outcome, scales, filled_scales, this_round.min_stated)


def _on_final_scales(
    outcome: Outcome, scales: Mapping[str, ErrorScale], filled_scales: Mapping[str, ErrorScale],
    min_stated: float,
) -> Outcome:  # fmt: skip
    """Return ``outcome`` with its errors converted from ``scales`` to those of the filled grid.

    The stated error is STATED_FACTOR times the estimate, because the estimate may be too low; it is at most
    the tolerance and at least ``min_stated``. Linear and logarithmic errors cannot be converted into each
    other: where a column's scale has changed from one to the other, the error is infinite.
    """
    stated_errors, largest_errors = {}, {}
    for name, filled_scale in filled_scales.items():
        scale = scales.get(name, filled_scale)
        ratio = scale.limit / filled_scale.limit if scale.log == filled_scale.log else math.inf
        estimate = ratio * outcome.stated.get(name, math.inf)
        largest_errors[name] = ratio * outcome.largest.get(name, math.inf)
        stated_errors[name] = max(estimate, min(max(STATED_FACTOR * estimate, min_stated), 1.0))
    return replace(outcome, stated=stated_errors, largest=largest_errors)


def _measure_errors(
    grid: FittedGrid, this_round: _Round, rng: np.random.Generator, *, probes: bool
) -> tuple[Outcome, Array]:
    """Draw the check points of a round from the open points, compute them, and estimate the errors.

    With ``probes``, the first check points are where the largest errors are expected. If their errors are not
    within the limit of the round, no others are computed.

    Returns:
        The same as :func:`_estimate`.
    """
    expected = grid.expected()
    predicted = grid.quantities(grid.open)
    expected_in_tolerances = [
        grid.fits[name].in_tolerance_units(predicted[name], expected[name]) for name in grid.deciding
    ]
    largest = np.max(expected_in_tolerances, axis=0)
    chosen = np.zeros(0, int)  # positions in grid.open
    # The total number of check points after each step; with ``probes`` there are two steps.
    total_counts = [this_round.probe, this_round.checks] if probes else [this_round.checks]
    for total_count in total_counts:
        probing = total_count < this_round.checks
        positions = _check_points(rng, grid, largest, total_count - len(chosen), chosen, probing)
        grid.compute(grid.open[positions])
        chosen = np.union1d(chosen, positions)
        outcome, all_expected = _estimate(grid, predicted, expected, chosen, this_round.margin)
        if not max(outcome.stated[name] for name in grid.deciding) <= this_round.error_limit:
            break
    return outcome, all_expected


def _estimate(
    grid: FittedGrid, predicted: Mapping[str, Array], expected: Mapping[str, Array], positions: Array,
    margin: float | None,
) -> tuple[Outcome, Array]:  # fmt: skip
    """Estimate the largest error of each column from the errors at the check points.

    The values at the check points have been computed. The expected errors are only known up to a factor. This
    factor is the mean error at the check points, divided by the mean of the expected errors there, and
    multiplied by ``margin``. The estimate is SAFETY times the largest error at the check points, or the
    largest expected error if that is larger.

    A round with few check points has the ``margin`` None. The factor then has MARGIN, the expected errors of
    deciding columns are left out, and LINEAR_SAFETY replaces SAFETY where a linear kernel fits best.

    Args:
        grid: the grid with its fits.
        predicted: column -> (M,), the fitted quantity at the open points.
        expected: column -> (M,), its expected errors, up to a factor.
        positions: the check points, as positions in ``grid.open``.
        margin: the factor of expected errors; None in a round with few check points.

    Returns:
        The outcome, whose ``stated`` has the estimates; and, at each of the K points of the grid, the largest
        expected error of the deciding columns, (K,), 0 at exact points. All errors are in units of the
        tolerance.
    """
    at_checks = {name: quantity[positions] for name, quantity in predicted.items()}
    estimates, largest_errors, scaled_expected = {}, {}, {}
    for name, (errors, errors_in_tolerances) in grid.errors(at_checks, grid.open[positions]).items():
        fit = grid.fits[name]
        largest_errors[name] = float(errors_in_tolerances.max())
        finite = np.isfinite(errors)
        total_expected = float(expected[name][positions][finite].sum())
        total = float(errors[finite].sum())
        factor = (margin or MARGIN) * total / total_expected if total_expected else 0.0
        scaled_expected[name] = fit.in_tolerance_units(predicted[name], factor * expected[name])
        scaled_expected[name][positions] = 0.0  # the check points are exact now
        largest_expected = float(scaled_expected[name].max()) if margin or name not in grid.deciding else 0.0
        safety = SAFETY if margin or fit.has_smooth_kernel else LINEAR_SAFETY
        estimates[name] = max(safety * largest_errors[name], largest_expected)
    log = frozenset(name for name, fit in grid.fits.items() if fit.scale.log)
    all_expected = np.zeros(len(grid.coordinates))
    all_expected[grid.open] = np.max([scaled_expected[name] for name in grid.deciding], axis=0)
    return Outcome(estimates, largest_errors, len(positions), log), all_expected


def _checks(shape: Sequence[int]) -> int:
    """The number of points that are drawn to measure the error on a grid of ``shape``."""
    return CHECKS[sum(count > 1 for count in shape) or 1]


def _check_points(
    rng: np.random.Generator, grid: FittedGrid, expected: Array, count: int, checked: Array, probing: bool
) -> Array:
    """Return the positions in ``grid.open`` of ``count`` new check points.

    A share COVERING is in the widest holes between exact points. The others are drawn with probabilities in
    proportion to the ``expected`` errors (M,) at the open points. With ``probing``, as many as possible are
    those with the largest expected errors instead. ``checked`` are the positions of earlier check points.
    """
    everywhere = np.zeros(len(grid.coordinates))
    everywhere[grid.open] = expected
    largest = grid.largest_expected(everywhere, threshold=0.0, count=count if probing else 0)
    chosen: list[int] = [*checked, *np.searchsorted(grid.open, largest)]
    count_in_holes = count - len(largest) if probing else int(COVERING * count)
    exact, candidates = grid.half_steps[grid.exact], grid.half_steps[grid.open]
    chosen = widest_holes(rng, exact, candidates, chosen, count_in_holes, JITTER)
    remaining = np.setdiff1d(np.arange(len(grid.open)), chosen)
    weights = expected[remaining] + 1e-3 * expected.max() + 1e-300
    drawn_count = count + len(checked) - len(chosen)
    drawn = rng.choice(remaining, drawn_count, replace=False, p=weights / weights.sum())
    return np.setdiff1d([*chosen, *drawn], checked)

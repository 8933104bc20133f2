"""Fit one column of values at some points of a grid, and estimate the errors at the other points."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from landscape.core.hdf5 import Array
from landscape.evaluation.interpolant import ErrorScale, Interpolant, evaluate

# The largest expected error, in units of the tolerance: a negative value on a logarithmic scale has an
# infinite one.
ERROR_CAP = 1e6


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
        self._function = min(candidates, key=functools.partial(self._usual_error, values[exact]))
        self._guide_error = self._function.guide_error()

    @property
    def has_smooth_kernel(self) -> bool:
        """Return whether the function's kernel is one that follows smooth surfaces."""
        return self._function.interpolant.order > 1.0

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
        return self._in_tolerance_units(predicted, errors, self._function.log)

    def values(self, quantity: Array) -> Array:
        """Return the values where the fitted quantity, the values or their logarithms, is ``quantity``."""
        with np.errstate(over="ignore"):
            return np.exp(quantity) if self._function.log else quantity

    def errors(self, predicted: Array, indices: Array) -> tuple[Array, Array]:
        """Return |errors| of the quantity ``predicted`` at exact points, also in units of the tolerance."""
        values = self._values[indices]
        true, predicted_values = values, predicted
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if self._function.log:
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
        errors = np.abs(self._function.leave_one_out)[nearest]
        largest = (errors * holes**self._function.interpolant.order).max(1)
        return np.maximum(largest, self._guide_error[indices])


def quantities(fits: Mapping[str, Fit], indices: Array) -> dict[str, Array]:
    """Return the fitted quantity of each of ``fits``, to the same exact points, at the points ``indices``."""
    if not fits:
        return {}
    functions = [fit._function for fit in fits.values()]
    at = next(iter(fits.values()))._at[indices]
    parts = evaluate([(function.interpolant, function.coefficients) for function in functions], at)
    return {
        name: part + function.base[indices]
        for name, function, part in zip(fits, functions, parts, strict=True)
    }

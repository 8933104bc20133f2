"""The error that an interpolation may have: a share of the range shown, or an absolute number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.results.shown import logarithmic

# No error below this share of the values counts (ours): sums in float32 round to about a tenth of it.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Tolerance:
    """The largest error: ``size`` is a share of the range shown if ``relative``, else in the values' unit.

    Example:
        >>> Tolerance.parse("1%"), Tolerance.parse(0.005)
        (Tolerance(size=0.01, relative=True), Tolerance(size=0.005, relative=False))
    """

    size: float
    relative: bool

    @classmethod
    def parse(cls, value: str | float) -> Tolerance:
        """A tolerance from text such as "1%" or "0.005", or a number.

        Raises:
            InputError: anything else, or a size that is not positive, or a share of 100% and more.
        """
        text = str(value).strip()
        relative = text.endswith("%")
        try:
            size = float(text.removesuffix("%")) / (100 if relative else 1)
        except ValueError:
            size = math.nan
        if not 0 < size < (1 if relative else math.inf):
            raise InputError(
                f"tolerance: {value!r} is not allowed, it must be a share of the range shown, such as '1%', "
                "or a positive number in the unit of the values"
            )
        return cls(size, relative)

    def __str__(self) -> str:
        return f"{100 * self.size:g}%" if self.relative else f"{self.size:g}"


@dataclass(frozen=True)
class Scale:
    """How values are measured against a tolerance: by their logarithms if ``log``, in units of ``limit``.

    A share is one of the range of the values as they are shown: of their logarithms where a picture has a
    logarithmic scale (:mod:`landscape.results.shown`).
    """

    log: bool
    limit: float

    @classmethod
    def of(cls, values: Array, tolerance: Tolerance) -> Scale:
        """The scale for finite ``values`` (K,), at least one of them."""
        log = tolerance.relative and logarithmic(values)
        shown = np.log(values) if log else values
        width = float(np.ptp(shown)) if tolerance.relative else 1.0
        rounding = ROUNDING * (1.0 if log else float(np.abs(values).max()))
        return cls(log, max(tolerance.size * width, rounding, np.finfo(np.float64).tiny))

    def __call__(self, values: Array) -> Array:
        """``values`` in units of the largest error that is allowed; NaN for a logarithm of none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            shown: Array = (np.log(values) if self.log else values) / self.limit
        return np.where(np.isfinite(shown), shown, np.nan)

"""The error that an interpolation may have: a share of the range shown, or an absolute number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.results.shown import logarithmic


@dataclass(frozen=True)
class Tolerance:
    """The largest error: ``size`` is a share of the range shown if ``relative``, else in the values' unit.

    ``rounding`` is the share of a value by which it may be rounded: the machine epsilon of its computation.

    Example:
        >>> Tolerance.parse("1%").size, Tolerance.parse(0.005).relative
        (0.01, False)
    """

    size: float
    relative: bool
    rounding: float = np.finfo(np.float64).eps

    @classmethod
    def parse(cls, value: str | float, dtype: torch.dtype = torch.float64) -> Tolerance:
        """A tolerance from text such as "1%" or "0.005", or a number, for values computed in ``dtype``.

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
        return cls(size, relative, torch.finfo(dtype).eps)

    def __str__(self) -> str:
        return f"{100 * self.size:g}%" if self.relative else f"{self.size:g}"


@dataclass(frozen=True)
class Scale:
    """How values are measured against a tolerance: by their logarithms if ``log``, in units of ``limit``.

    A share is one of the range of the values as they are shown: of their logarithms where a picture has a
    logarithmic scale (:mod:`landscape.results.shown`). A tolerance that is less than the rounding of the
    values is not ``possible``.
    """

    log: bool
    limit: float
    possible: bool

    @classmethod
    def of(cls, values: Array, tolerance: Tolerance) -> Scale:
        """The scale for finite ``values`` (K,), at least one of them."""
        log = tolerance.relative and logarithmic(values)
        width = float(np.ptp(np.log(values) if log else values)) if tolerance.relative else 1.0
        rounding = tolerance.rounding * (1.0 if log else float(np.abs(values).max()))
        limit = max(tolerance.size * width, np.finfo(np.float64).tiny)
        return cls(log, limit, limit > rounding)

    def __call__(self, values: Array) -> Array:
        """``values`` in units of the largest error that is allowed; NaN for a logarithm of none."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            shown: Array = (np.log(values) if self.log else values) / self.limit
        return np.where(np.isfinite(shown), shown, np.nan)

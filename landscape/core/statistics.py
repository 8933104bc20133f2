"""Means of independent draws and their standard errors."""

from __future__ import annotations

import math

import numpy as np

from landscape.core.hdf5 import Array


def standard_error(values: Array) -> float:
    """The standard error of the mean of independent ``values`` (n,): their standard deviation, / √n.

    Returns:
        The error in the unit of the values; NaN of fewer than two values, or of values that are not finite.

    Example:
        >>> standard_error(np.array([1.0, 3.0])), standard_error(np.array([1.0]))
        (1.0, nan)
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def mean_and_error(values: Array) -> tuple[float, float]:
    """(the mean of ``values`` (n,), its :func:`standard_error`).

    Example:
        >>> mean_and_error(np.array([1.0, 3.0]))
        (2.0, 1.0)
    """
    return float(np.mean(values)), standard_error(values)

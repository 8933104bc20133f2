"""Standard errors by the jackknife: from the estimates that are left without one of the samples."""

from __future__ import annotations

import numpy as np

from landscape.core.hdf5 import Array


def error_of(without: Array) -> Array:
    """The standard error from the estimates (n, …) without each sample, along the first axis.

    Example:
        >>> values = np.array([1.0, 2.0, 6.0])
        >>> float(error_of((values.sum() - values) / 2).round(3))  # σ/√n, here of the mean
        1.528
    """
    n = len(without)
    error: Array = np.sqrt((n - 1) / n * ((without - without.mean(0)) ** 2).sum(0))
    return error


def ratio(above: Array, below: Array) -> tuple[float, float]:
    """(Σ above/Σ below, its standard error) of samples (n,).

    Example:
        >>> ratio(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
        (1.0, 0.5)
    """
    value, without = _ratios(above, below)
    return value, float(error_of(without))


def ratio_estimates(above: Array, below: Array) -> Array:
    """(n,) numbers, one a sample, whose mean is Σ above/Σ below and whose standard error is :func:`ratio`'s.

    Two ratios of the same samples differ by the mean of the differences of these numbers, with its error.

    Example:
        >>> ratio_estimates(np.array([1.0, 3.0]), np.array([2.0, 2.0])).tolist()
        [0.5, 1.5]
    """
    value, without = _ratios(above, below)
    estimates: Array = value + (len(without) - 1) * (without.mean() - without)
    return estimates


def _ratios(above: Array, below: Array) -> tuple[float, Array]:
    """The ratio, and those (n,) without each sample."""
    total, base = above.sum(), below.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(total / base), (total - above) / (base - below)

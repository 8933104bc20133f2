"""Means of independent draws, their standard errors, and tests of their differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error, and the degrees of freedom of that: n − 1 of n draws.

    Example:
        >>> Estimate.of(np.array([1.0, 3.0]))
        Estimate(value=2.0, standard_error=1.0, freedom=1)
    """

    value: float
    standard_error: float
    freedom: float

    @classmethod
    def of(cls, values: Array) -> Estimate:
        """The mean of independent draws (n,)."""
        return cls(*mean_and_error(values), freedom=len(values) - 1)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of this level, by Student's t.

        Example:
            >>> [round(end, 1) for end in Estimate(2.0, 1.0, freedom=1).interval()]
            [-10.7, 14.7]
        """
        half = float(t_quantile(level, self.freedom)) * self.standard_error if self.standard_error else 0.0
        return self.value - half, self.value + half


def ratio_interval(
    above: Estimate, below: Estimate, covariance: float = 0.0, level: float = 0.95
) -> tuple[float, float]:
    """Return the confidence interval of the ratio of two true values ≥ 0 (Fieller 1954).

    It contains each R ≥ 0 for which ``above`` − R·``below`` does not differ significantly from 0 by Student's
    t test. The upper end is infinite unless ``below`` is significantly above 0. The lower end is NaN if the
    interval contains no R. Both ends are NaN if a value or a standard error is NaN.

    Args:
        above: the estimate of the numerator.
        below: the estimate of the denominator. Its degrees of freedom must be those of ``above``, unless its
            standard error is 0.
        covariance: the covariance of the two estimates.
        level: the confidence level.

    Example:
        >>> above = Estimate(2.0, 0.1, freedom=20)
        >>> [round(end, 2) for end in ratio_interval(above, Estimate(4.0, 1.0, freedom=20))]
        [0.32, 1.05]
        >>> [round(end, 2) for end in ratio_interval(above, Estimate(1.0, 1.0, freedom=20))]
        [0.64, inf]
    """
    t2 = float(t_quantile(level, above.freedom)) ** 2
    # The interval has each R ≥ 0 with a·R² − 2b·R + c ≤ 0. With s = √(b² − ac), the roots are (b + s)/a, and
    # (b − s)/a, which is c/(b + s).
    a = below.value**2 - t2 * below.standard_error**2
    b = above.value * below.value - t2 * covariance
    c = above.value**2 - t2 * above.standard_error**2
    if any(map(math.isnan, (a, b, c))):
        return math.nan, math.nan
    b_plus_s = b + math.sqrt(max(b * b - a * c, 0.0))
    low = math.nan  # if no R ≥ 0 is in the interval
    if c <= 0:  # R = 0 is in the interval
        low = 0.0
    elif b_plus_s > 0:  # c/(b + s) is the smaller root if a > 0, otherwise the only positive root
        low = c / b_plus_s
    # The upper end is the larger root if the denominator ``below`` is significantly positive. If a > 0, the
    # denominator may still be significantly negative.
    high = b_plus_s / a if a > 0 and below.value > 0 else math.inf
    return low, high


def scale_of(estimates: Array, interval: tuple[float, float]) -> float:
    """The mean of ``estimates`` of a ratio; NaN where its ``interval`` has no upper end, or it is negative.

    Example:
        >>> scale_of(np.array([1.0, 3.0]), (0.5, 4.0)), scale_of(np.array([1.0, 3.0]), (0.5, math.inf))
        (2.0, nan)
    """
    value = float(estimates.mean()) if len(estimates) else math.nan
    return value if math.isfinite(interval[1]) and value >= 0 else math.nan


def covariance_of_means(a: Array, b: Array) -> float:
    """The covariance of the means of paired draws (n,); NaN of fewer than two.

    Example:
        >>> covariance_of_means(np.array([1.0, 3.0]), np.array([2.0, 6.0]))
        2.0
    """
    if len(a) < 2:
        return math.nan
    return float(((a - a.mean()) * (b - b.mean())).sum() / (len(a) * (len(a) - 1)))


@dataclass(frozen=True)
class Difference(Estimate):
    """A difference, its error, and the p-value of the test that it is zero, two-sided; NaN if unknown.

    Example:
        >>> Difference(1.0, 0.5, freedom=10, p=0.073).value
        1.0
    """

    p: float


def paired(a: Array, b: Array) -> Difference:
    """b − a of draws (n,) with the same random numbers, by Student's t test of their differences.

    Example:
        >>> d = paired(np.array([1.0, 5.0, 9.0]), np.array([2.0, 6.5, 10.5]))
        >>> round(d.value, 3), round(d.standard_error, 3), d.freedom, round(d.p, 3)
        (1.333, 0.167, 2, 0.015)
    """
    difference = Estimate.of(b - a)
    return _tested(difference.value, difference.standard_error, difference.freedom)


def welch(a: Estimate, b: Estimate) -> Difference:
    """b − a of independent estimates of any variances, by Welch's t test.

    Example:
        >>> d = welch(Estimate(1.0, 0.3, freedom=4), Estimate(2.0, 0.4, freedom=9))
        >>> round(d.standard_error, 3), round(d.freedom, 2), round(d.p, 3)
        (0.5, 12.84, 0.067)
    """
    errors, freedoms = (a.standard_error, b.standard_error), (a.freedom, b.freedom)
    return _tested(b.value - a.value, math.hypot(*errors), welch_freedom(errors, freedoms))


def welch_freedom(errors: tuple[float, float], freedoms: tuple[float, float]) -> float:
    """The degrees of freedom of a difference, from both standard errors and theirs (Welch and Satterthwaite).

    Infinite where both errors are 0 or known exactly.

    Example:
        >>> welch_freedom((1.0, 1.0), (2, 2)), welch_freedom((1.0, 0.0), (5, 5))
        (4.0, 5.0)
    """
    parts = np.array(errors) ** 2
    below = float((parts**2 / np.array(freedoms)).sum())
    return float(parts.sum()) ** 2 / below if below else math.inf


def mcnemar(a: Array, b: Array) -> Difference:
    """b − a of the shares of ones in ``a`` and ``b`` (n,), 0 or 1 of the same samples: McNemar's exact test.

    Only the samples in which both differ say anything: under the null hypothesis half of them go either way.

    Example:
        >>> a, b = np.array([0, 0, 0, 0, 1.0]), np.array([1, 1, 1, 1, 1.0])
        >>> mcnemar(a, b).value, mcnemar(a, b).p
        (0.8, 0.125)
    """
    from scipy.stats import binomtest  # only here: it would slow down every import

    up, down = int((b > a).sum()), int((b < a).sum())
    p = float(binomtest(up, up + down).pvalue) if up + down else 1.0
    return Difference(*mean_and_error(b - a), freedom=len(a) - 1, p=p)


def _tested(value: float, error: float, freedom: float) -> Difference:
    from scipy.stats import t  # only here: it would slow down every import

    # Without an error every draw gives the same difference.
    p = float(value == 0) if error == 0 else float(2 * t.sf(abs(value) / error, freedom))
    return Difference(value, error, freedom, p)


def holm(p: Array) -> Array:
    """p-values of several tests, corrected so that one level holds for all of them together (Holm 1979).

    Args:
        p: of any shape; NaN stands for no test.

    Returns:
        The corrected p-values, at most 1, in the same shape.

    Example:
        >>> holm(np.array([0.01, 0.04, np.nan, 0.03])).tolist()
        [0.03, 0.06, nan, 0.06]
    """
    corrected = np.full(p.shape, np.nan)
    order = np.argsort(p, axis=None, kind="stable")[: np.isfinite(p).sum()]  # NaN comes last
    steps = (len(order) - np.arange(len(order))) * p.flat[order]
    corrected.flat[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected


def t_quantile(level: float, freedom: Array | float) -> Array:
    """Half the width of the two-sided interval of this level, in standard errors: Student's t.

    Example:
        >>> t_quantile(0.95, np.array([2.0, np.inf])).round(2).tolist()
        [4.3, 1.96]
    """
    from scipy.stats import t  # only here: it would slow down every import

    return t.ppf((1 + level) / 2, freedom)


def error_of(without: Array) -> Array:
    """The standard error from the estimates (n, …) without each sample, along the first axis.

    Example:
        >>> values = np.array([1.0, 2.0, 6.0])
        >>> float(error_of((values.sum() - values) / 2).round(3))  # σ/√n, here of the mean
        1.528
    """
    n = len(without)
    return np.sqrt((n - 1) / n * ((without - without.mean(0)) ** 2).sum(0))


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
    return value + (len(without) - 1) * (without.mean() - without)


def _ratios(above: Array, below: Array) -> tuple[float, Array]:
    """The ratio, and those (n,) without each sample."""
    total, base = above.sum(), below.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(total / base), (total - above) / (base - below)

"""Times that algorithms need to escape from a saddle, with exact confidence bands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class Escape(Result):
    """Escape times from a saddle: the steps until L(w_a) is below ``share`` of the saddle's depth.

    One quantity is varied.

    Attributes:
        times: (algorithms, values, runs), in steps, one run for each seed; inf for runs that diverged or had
            not escaped after ``steps`` steps.
        values: (values,), of the quantity that is varied.
        vary: the name of this quantity.
        algorithms: names of the algorithms.
        share: the share of the saddle's depth below which a run has escaped.
        steps: the length of the runs.
        setting: the quantities that are not varied, as text.

    Example:
        >>> times = np.array([[[3.0, 1.0, 2.0, 5.0, 4.0, np.inf]]])
        >>> result = Escape(times, np.array([0.1]), "lr", ("ssgd",), share=0.5, steps=10)
        >>> result.median.tolist(), [edge.tolist() for edge in result.band(0.9)]
        ([[4.0]], [[[1.0]], [[inf]]])
    """

    schema: ClassVar[str] = "landscape.escape"
    shapes: ClassVar[Mapping[str, str]] = {
        "times": "algorithms+ values+ run+",
        "values": "values",
        "algorithms": "algorithms",
    }
    units: ClassVar[Mapping[str, str]] = {"times": "steps", "steps": "steps"}
    table: ClassVar[str] = "algorithms values run"

    times: Array
    values: Array
    vary: str
    algorithms: tuple[str, ...]
    share: float
    steps: int
    setting: str = ""
    label: str = ""

    @property
    def median(self) -> Array:
        """(algorithms, values): the median over the runs; inf where half of them or more had not escaped."""
        ordered = np.sort(self.times, axis=2)
        middle = ordered.shape[2] // 2  # the upper of two: halfway to inf is inf
        return ordered[:, :, middle]

    def band(self, level: float = 0.95) -> tuple[Array, Array]:
        """A confidence interval for the median escape time.

        The interval lies between two of the measured times, chosen by rank. It is valid for every
        distribution of times, because the number of times below the median is binomial with probability ½.
        Runs that did not escape count as longer than all others, which does not change the ranks.

        Args:
            level: the least probability with which the interval contains the median, between 0 and 1.

        Returns:
            (lower ends, upper ends), both (algorithms, values), in steps.

        Raises:
            InputError: a level that is not between 0 and 1, or that needs more runs.

        Example:
            >>> times = np.arange(6.0).reshape(1, 1, 6)
            >>> result = Escape(times, np.array([0.1]), "lr", ("ssgd",), share=0.5, steps=9)
            >>> lower, upper = result.band()
            >>> float(lower[0, 0]), float(upper[0, 0])
            (0.0, 5.0)
        """
        rank = median_rank(self.times.shape[2], level)
        ordered = np.sort(self.times, axis=2)
        return ordered[:, :, rank], ordered[:, :, -1 - rank]


def median_rank(samples: int, level: float) -> int:
    """The rank of the ends of a confidence interval for the median.

    Args:
        samples: number of independent samples.
        level: the least probability with which the interval contains the median, between 0 and 1.

    Returns:
        The largest r, counted from 0, for which the interval from the r-th smallest to the r-th largest
        sample contains the median with probability ``level`` or more.

    Raises:
        InputError: even the interval from the smallest to the largest sample does not.

    Example:
        >>> median_rank(9, 0.95)
        1
    """
    if not 0 < level < 1:
        raise InputError(f"level: {level} is not allowed, it must be > 0 and < 1")
    outside, rank = 0.0, -1
    while rank + 1 < (samples + 1) // 2:
        outside += 2 * math.comb(samples, rank + 1) / 2**samples
        if outside > 1 - level:
            break
        rank += 1
    if rank < 0:
        least = math.ceil(1 - math.log2(1 - level))
        raise InputError(f"seeds: {samples} is not allowed, a band of {level:g} needs at least {least}")
    return rank

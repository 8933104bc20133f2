"""How long algorithms stay at a saddle: escape times over seeds, with exact confidence bands."""

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
    """Steps until L(w_a) of a saddle is below ``share`` of its depth, while one thing is varied.

    ``times`` (A, K, S): of each of the ``algorithms``, at each of ``values`` (K,) of ``vary``, for each of S
    seeds; inf where it had not escaped after ``steps``, or had diverged. ``setting`` says what is not varied.
    """

    schema: ClassVar[str] = "landscape.escape"
    shapes: ClassVar[Mapping[str, str]] = {"times": "A+ K+ S+", "values": "K", "algorithms": "A"}

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
        """(A, K): the median over the seeds; inf where half of them or more had not escaped."""
        ordered = np.sort(self.times, axis=2)
        middle = ordered.shape[2] // 2  # the upper of two: halfway to inf is inf
        return ordered[:, :, middle]

    def band(self, level: float = 0.95) -> tuple[Array, Array]:
        """((A, K), (A, K)): an interval for the true median that holds it with probability ``level`` or more.

        From two of the S times by rank, whatever their distribution: the number of times below the median is
        binomial with ½. Runs that did not escape count as longer than all others, which is exact, too.
        """
        rank = median_rank(self.times.shape[2], level)
        ordered = np.sort(self.times, axis=2)
        return ordered[:, :, rank], ordered[:, :, -1 - rank]


def median_rank(samples: int, level: float) -> int:
    """The largest r, from 0, for which the r-th smallest and largest of ``samples`` hold the median so often.

    Raises InputError where even the smallest and the largest do not.
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

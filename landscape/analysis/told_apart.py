"""Which sides of a comparison differ by more than their errors, by which test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from landscape.analysis.quantities import BOUND, EXACT, SE, Measured, Quantity
from landscape.core.hdf5 import Array
from landscape.core.statistics import Difference, Estimate, holm, mcnemar, paired, welch

# Seeds of a group from which its mean and its error say something (ours): of two, a 95% interval reaches 12.7
# standard errors to each side.
SEEDS = 3
# Differences below so many roundings of the numbers are none, as for losses that must be the same
# (landscape.evaluation.provenance).
ROUNDINGS = 1000


@dataclass(frozen=True)
class Row:
    """A quantity with its number at each checkpoint, and of each side.

    Attributes:
        cells: one for each checkpoint.
        sides: the same numbers, or of groups the means of theirs, with these as draws.
        grouped: whether the sides are groups.
    """

    quantity: Quantity
    cells: Sequence[Measured]
    sides: Sequence[Measured]
    grouped: bool

    @classmethod
    def of(cls, quantity: Quantity, cells: Sequence[Measured], side_of: Sequence[int], grouped: bool) -> Row:
        """From the cells, and the place of each one's side."""
        if not grouped:
            return cls(quantity, cells, cells, grouped)
        values = np.array([cell.value for cell in cells])
        place = np.array(side_of)
        means = [Measured.mean(values[place == side]) for side in range(max(side_of) + 1)]
        # One checkpoint is a group without an error, not an exact number.
        sides = [m if len(m.draws) > 1 else Measured(m.value, math.nan, math.nan, m.draws) for m in means]
        return cls(quantity, cells, sides, grouped)

    @property
    def kind(self) -> str:
        """Of the errors of the sides."""
        return SE if self.grouped else self.quantity.kind

    def over(self) -> str:
        """What the errors of the sides are over, such as "64 minibatches"."""
        if self.kind != SE:
            return ""
        counts = {len(side.draws) for side in self.sides}
        if not self.grouped:
            counts = {int(side.freedom) + 1 for side in self.sides if math.isfinite(side.freedom)}
        if not counts:
            return ""
        low, high = min(counts), max(counts)
        what = "seeds" if self.grouped else self.quantity.over
        return f"{low:,} {what}" if low == high else f"{low:,} to {high:,} {what}"

    def difference(self, first: int, second: int) -> tuple[Difference, str]:
        """Of two sides, and the test by which it is judged."""
        a, b = self.sides[first], self.sides[second]
        if self.kind != SE:
            found = Difference(b.value - a.value, a.error + b.error, math.nan, math.nan)
            return found, "exact" if self.kind == EXACT else "bounds"
        common = self.quantity.common and not self.grouped and len(a.draws) == len(b.draws) > 1
        if common and self._ones_and_zeros(a, b):
            scale = max(a.draws.max(), b.draws.max())  # draws are percentages
            found = mcnemar(a.draws / scale, b.draws / scale)
            return Difference(
                scale * found.value, scale * found.standard_error, found.freedom, found.p
            ), "McNemar"
        if common:
            return paired(a.draws, b.draws), "paired t"
        found = welch(*(Estimate(s.value, s.error, s.freedom) for s in (a, b)))
        if self.grouped and min(len(a.draws), len(b.draws)) < SEEDS:
            found = Difference(found.value, found.standard_error, found.freedom, math.nan)
        return found, "Welch t"

    @staticmethod
    def _ones_and_zeros(a: Measured, b: Measured) -> bool:
        """Whether both are of draws with two values, one of them 0, and not all are 0."""
        values = np.union1d(a.draws, b.draws)
        return len(values) == 2 and values[0] == 0


def told_apart(rows: Sequence[Row], sides: int, eps: float, level: float) -> dict[str, Any]:
    """The fields of a :class:`.Comparison` about the differences of all pairs of ``sides`` sides.

    ``eps`` is the relative rounding of the numbers.
    """
    pairs = list(combinations(range(sides), 2))
    every = [[row.difference(*pair) for pair in pairs] for row in rows]
    values = _column(every, "value")
    errors = _column(every, "standard_error")
    p = _column(every, "p")
    corrected = holm(p)
    size = np.array([[max(abs(row.sides[i].value) for i in pair) for pair in pairs] for row in rows])
    bounded = np.array([row.kind in (BOUND, EXACT) for row in rows])[:, None]
    larger = np.where(bounded, np.abs(values) > errors, corrected <= level)  # False for NaN
    return {
        "tests": tuple(" or ".join(dict.fromkeys(test for _, test in row)) for row in every),
        "first": np.array([pair[0] for pair in pairs]),
        "second": np.array([pair[1] for pair in pairs]),
        "difference": values,
        "difference_error": errors,
        "difference_freedom": _column(every, "freedom"),
        "p": p,
        "p_holm": corrected,
        "told": larger & (np.abs(values) > ROUNDINGS * eps * size),
    }


def _column(every: Sequence[Sequence[tuple[Difference, str]]], name: str) -> Array:
    return np.array([[float(getattr(difference, name)) for difference, _ in row] for row in every])


def described(rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of a :class:`.Comparison` about the quantities, their numbers and their errors."""
    quantities = [row.quantity for row in rows]

    def numbers(cells: str, name: str) -> Array:
        return np.array([[float(getattr(cell, name)) for cell in getattr(row, cells)] for row in rows])

    return {
        "quantities": tuple(q.name for q in quantities),
        "titles": tuple(q.title for q in quantities),
        "unit_names": tuple(q.unit for q in quantities),
        "flatter": np.array([q.flatter for q in quantities]),
        "kinds": tuple(row.kind for row in rows),
        "own_kinds": tuple(q.kind for q in quantities),
        "over": tuple(row.over() for row in rows),
        "value": numbers("sides", "value"),
        "error": numbers("sides", "error"),
        "freedom": numbers("sides", "freedom"),
        "own_value": numbers("cells", "value"),
        "own_error": numbers("cells", "error"),
    }


def remarks(rows: Sequence[Row], sides: Sequence[str], side_of: Sequence[int]) -> list[str]:
    """What must be known of groups: those too small for a statement, and bounds as large as the errors."""
    if not rows or not rows[0].grouped:
        return []
    counts = {name: side_of.count(place) for place, name in enumerate(sides)}
    few = [f"{name} has {count}" for name, count in counts.items() if count < SEEDS]
    said = [f"no statement on groups of fewer than {SEEDS} seeds: {', '.join(few)}"] if few else []
    for row in rows:
        if row.quantity.kind != BOUND:
            continue
        for place, side in enumerate(row.sides):
            bound = max(
                (cell.error for cell, of in zip(row.cells, side_of, strict=True) if of == place), default=0.0
            )
            if bound > side.error:
                said.append(
                    f"{row.quantity.name}, {sides[place]}: the largest bound, {bound:.2g}, is above the "
                    f"standard error over its seeds, {side.error:.2g}"
                )
    return said

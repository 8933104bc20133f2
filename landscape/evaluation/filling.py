"""The values of a grid: all of its points exact, or some, with the others interpolated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.core.progress import Progress
from landscape.evaluation.adaptive import Outcome, Tolerance, interpolate
from landscape.evaluation.grid import Evaluate, Portions, compute_missing
from landscape.results.grids import Interpolated

ROUGH = (
    5.0  # ours: the accuracy of 10,000 samples, which is no smooth function, is off by about two tolerances
)


def complete(
    points: Tensor,
    done: Array,
    columns: Mapping[str, Array],
    evaluate: Evaluate,
    portions: Portions,
    tolerance: Tolerance | None,
    deciding: Sequence[str],
    others: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Complete the values of a grid.

    Args:
        points: (K, 2), in the order of ``done``.
        done: of the grid's shape, which of its points are known; updated.
        columns: name -> an array of that shape; updated.
        evaluate, portions: as for :func:`.grid.compute_missing`.
        tolerance: None computes all points.
        deciding: the columns whose error must be within the tolerance.
        seed: of the points at which the error is measured.
        others: columns that are NaN between exact points if their error is above ROUGH tolerances.

    Returns:
        The fields of :class:`landscape.results.grids.Interpolated` that say so.
    """
    known, flat = done.reshape(-1), {name: column.reshape(-1) for name, column in columns.items()}
    if tolerance is None:
        compute_missing(points, known, flat, evaluate, portions)
        return {}
    used = {name: flat[name] for name in (*deciding, *others)}
    report = _Progress(portions.progress)

    def compute(places: Array) -> None:
        part_done, part = known[places], {name: column[places] for name, column in flat.items()}

        def store() -> None:
            known[places] = part_done
            for name, column in part.items():
                flat[name][places] = column

        def save() -> None:
            store()
            if portions.save:
                portions.save()

        inner = replace(portions, save=save if portions.save else None, progress=report.part)
        try:
            compute_missing(points[places], part_done, part, evaluate, inner)
        finally:
            store()
        report.next()

    outcome = interpolate(done.shape, used, known, compute, tolerance, deciding, seed)
    for name in others:
        if not _kept(outcome, name):
            used[name][~known] = np.nan
    if known.all():
        return {}
    names = tuple(name for name in used if _kept(outcome, name))
    return {
        "tolerance": str(tolerance),
        "columns": names,
        "stated_error": tolerance.size * np.array([outcome.stated[name] for name in names]),
        "largest_error": tolerance.size * np.array([outcome.largest[name] for name in names]),
        "checks": outcome.checks,
        "log_columns": tuple(name for name in names if name in outcome.log),
    }


def meets(previous: Interpolated, tolerance: Tolerance | None) -> bool:
    """Whether the values of ``previous`` are all exact, or interpolated within ``tolerance``."""
    if previous.exact.all():
        return True
    if tolerance is None or not previous.columns:
        return False
    asked = Tolerance.parse(previous.tolerance)
    return asked.relative == tolerance.relative and asked.size <= tolerance.size


def _kept(outcome: Outcome, name: str) -> bool:
    return outcome.stated.get(name, np.inf) <= ROUGH


class _Progress:
    """A share of the work done where the amount of work is not known: each part takes most of the rest."""

    PART = 0.75  # ours: the first part is the coarsest level, which is often most of the work

    def __init__(self, report: Progress | None) -> None:
        self._report, self._before = report, 0.0

    def part(self, share: float) -> None:
        """``share`` of the part is done."""
        if self._report:
            self._report(self._before + (1 - self._before) * self.PART * share)

    def next(self) -> None:
        """The part is done."""
        self._before += (1 - self._before) * self.PART

"""The history of a run in memory, and the test for divergence that reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import UNITS
from landscape.core.errors import FailedError
from landscape.core.hdf5 import Array
from landscape.train.recipes.recipe import Diverge

Row = dict[str, float]
# Number of last rows for the mean speed in logs (ours).
RECENT = 100
# Rows of a block of the history (ours): a row in it takes 8 bytes a column, as a dict 1.2 kB.
BLOCK = 1000


class History:
    """The steps of a run so far: the last ones as rows that can still change, those before as arrays.

    Args:
        algorithm: the name of the update rule, for messages.
        columns: the columns that the rule adds to those of every run: name -> unit.
    """

    def __init__(self, algorithm: str, columns: Mapping[str, str]) -> None:
        self.algorithm = algorithm
        #: Column -> unit.
        self.units = {**UNITS, **columns}
        #: The last rows: all of them, or at least RECENT.
        self.rows: list[Row] = []
        self._blocks: list[dict[str, Array]] = []

    def new_row(self, step: int, lr: float) -> Row:
        """A row that is not among ``rows`` yet: NaN in all columns but these two."""
        return dict.fromkeys(self.units, math.nan) | {"step": step, "lr": lr}

    def append(self, row: Row) -> None:
        """Add ``row``, the last one; it may be changed until RECENT others follow."""
        self.rows.append(row)
        if len(self.rows) >= BLOCK + RECENT:
            old, self.rows = self.rows[:BLOCK], self.rows[BLOCK:]
            self._blocks.append({name: _column(old, name) for name in self.units})

    def record(self, row: Row, values: Mapping[str, float]) -> None:
        """Write ``values`` to ``row``.

        Raises:
            FailedError: for a column that is not declared.
        """
        for name in values:
            if name not in self.units:
                raise FailedError(
                    f"algorithm.name: '{self.algorithm}' records the column '{name}', which its class must "
                    "declare with a unit in 'columns'"
                )
        row |= values

    def restore(self, columns: Mapping[str, Array], units: Mapping[str, str]) -> None:
        """Take the rows of a checkpoint; columns that this run does not record are NaN in later rows."""
        self.units |= units
        length = len(next(iter(columns.values()), ()))
        whole = {name: columns.get(name, np.full(length, np.nan)) for name in self.units}
        first = max(0, length - RECENT)
        self._blocks = [{name: column[:first] for name, column in whole.items()}] if first else []
        last = zip(*(column[first:].tolist() for column in whole.values()), strict=True)
        self.rows = [dict(zip(whole, row, strict=True)) for row in last]

    def column(self, name: str) -> Array:
        """(T,) float64, a copy."""
        return np.concatenate([*(block[name] for block in self._blocks), _column(self.rows, name)])

    def columns(self) -> dict[str, Array]:
        """Column -> (T,) float64, copies."""
        return {name: self.column(name) for name in self.units}

    def pace(self, batch: int) -> str:
        """For logs: the speed of the last steps and the share of waiting; "" before the first step.

        Args:
            batch: samples a step.
        """
        recent = self.rows[-RECENT:]
        if not recent:
            return ""
        seconds = sum(batch / row["samples_per_s"] for row in recent)
        waited = sum(row["wait_s"] for row in recent)
        speed = len(recent) * batch / seconds
        return f"; {speed:.0f} samples/s, {100 * waited / seconds:.0f}% of the time waiting"


def _column(rows: Sequence[Row], name: str) -> Array:
    return np.array([row[name] for row in rows], dtype=np.float64)


# Consecutive steps in which the spread must exceed its bound (ours): a burst, such as one huge gradient, is
# shorter, and under SSGD the learners are equal again after one step.
PERSISTENT = 10


class Diverged(FailedError):
    """A run that diverged: its files are whole, and end with the last finite state."""

    exit_code = 3


@dataclass(frozen=True)
class DivergenceTest:
    """The bounds on loss and spread that :class:`landscape.train.recipes.recipe.Diverge` describes.

    ``start_norm2`` is ‖w_a‖² at the start of the run.
    """

    bounds: Diverge
    start_norm2: float

    def needs_spread(self, rows: Sequence[Row]) -> bool:
        """Whether the last measured spread may exceed its bound, so that the next one must be measured."""
        return bool(rows) and rows[-1]["consensus"] > self.bounds.consensus * self.start_norm2

    def bounds_loss(self, loss: float) -> bool:
        """Whether ``loss`` is within its bound; not of NaN."""
        return loss <= self.bounds.loss

    def learners_apart(self, rows: Sequence[Row], mean: Tensor | None) -> bool:
        """Whether the spread exceeded its bound in all of the last steps.

        Args:
            rows: the history, the newest step included.
            mean: w_a (P,) after the newest step, None where it is not known.
        """
        recent = [row["consensus"] for row in rows[-PERSISTENT:]]
        if mean is None or len(recent) < PERSISTENT:
            return False
        bound = self.bounds.consensus * max(float(mean @ mean), self.start_norm2)
        return all(spread > bound for spread in recent)


def divergence_message(end: Checkpoint) -> str:
    """One line about a run that diverged."""
    reasons = {
        "mean": "the mean's loss left all bounds",
        "learners": "the learners drifted apart without bound while the mean's loss stays within its own",
    }
    return f"diverged at step {end.diverged_at}: {reasons[end.diverged]}; the last finite state is kept"

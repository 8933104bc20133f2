"""The history of a run in memory: a row a step, a number a column."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from landscape.checkpoint.history import UNITS
from landscape.core.errors import FailedError
from landscape.core.hdf5 import Array

Row = dict[str, float]
# Number of last rows for the mean speed in logs (ours).
RECENT = 100


class History:
    """The steps of a run so far.

    Args:
        algorithm: the name of the update rule, for messages.
        columns: the columns that the rule adds to those of every run: name -> unit.

    Example:
        >>> history = History("my-rule", {"age": "steps"})
        >>> row = history.new_row(step=1, lr=0.5)
        >>> history.record(row, {"age": 3.0})
        >>> history.rows.append(row)
        >>> history.columns()["age"]
        array([3.])
    """

    def __init__(self, algorithm: str, columns: Mapping[str, str]) -> None:
        self.algorithm = algorithm
        #: Column -> unit.
        self.units = {**UNITS, **columns}
        self.rows: list[Row] = []

    def new_row(self, step: int, lr: float) -> Row:
        """A row that is not among ``rows`` yet: NaN in all columns but these two."""
        return dict.fromkeys(self.units, math.nan) | {"step": step, "lr": lr}

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
        table = zip(*(columns[name].tolist() for name in columns), strict=True)
        unknown = dict.fromkeys(self.units, math.nan)
        self.rows = [unknown | dict(zip(columns, row, strict=True)) for row in table]

    def columns(self) -> dict[str, Array]:
        """Column -> (T,) float64, copies."""
        return {name: np.array([row[name] for row in self.rows], dtype=np.float64) for name in self.units}

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

"""The history of a run. Its folder holds it once: complete in last.h5, in parts in the step files.

A run of 10⁶ steps that is saved every 500 would otherwise write each row a thousand times.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from landscape.core import hdf5
from landscape.core.errors import DataWarning, OperationError, warn_caller
from landscape.core.files import printable
from landscape.core.hdf5 import Array
from landscape.results.shown import Row

#: The columns that every run has: name -> (unit, meaning). Update rules declare more of their own. A row
#: describes one step, from w(t−1) to w(t), t its number: loss, train_loss, alpha_e … delta_cross belong to
#: the step's start, consensus and the test columns to its end. NaN where a column was not evaluated. Losses
#: are in nats; weights, and so their squares, have no unit.
with Path(__file__).with_name("columns.csv").open(encoding="utf-8", newline="") as _file:
    COLUMNS = {name: (unit, meaning) for name, unit, meaning in [*csv.reader(_file)][1:]}
#: Column -> unit.
UNITS = {name: unit for name, (unit, _) in COLUMNS.items()}
#: The columns of :class:`.LambdaMax`.
MONITORED = ("lambda_max", "lambda_max_residual", "lr_lambda_max", "lr_lambda_limit", "spread_share")
#: The columns of :class:`.LossChange` on single layers begin with this.
OF_LAYER = "loss_change "

History = dict[str, Array]
# The least number of rows in a step file: a run that is resumed from it alone needs the last ten (for the
# test for divergence), and the files of a short run are then complete (our choice).
LEAST = 100


class HistoryWarning(DataWarning):
    """The rows at the beginning of a history are in none of the files that are there."""


def write(file: h5py.File, history: History, units: Mapping[str, str]) -> None:
    """Write the columns of ``history`` to the group /history, in place of what is there.

    Args:
        units: column -> unit, of all of them.

    Raises:
        OperationError: for a column without a unit.
    """
    if "history" in file:
        del file["history"]
    group = file.create_group("history")
    for name, column in history.items():
        if name not in units:
            raise OperationError(f"history: the column '{name}' has no unit, it must be declared with one")
        group.create_dataset(name, data=column).attrs["unit"] = units[name]


def read(group: h5py.Group) -> tuple[History, dict[str, str]]:
    """The columns of the group /history and their units, also those that this installation does not know.

    Raises:
        ValueError: for a data set that is not a column.
    """
    columns = {name: np.asarray(hdf5.dataset(group, name, "f", 1)) for name in group}
    units = {name: UNITS.get(name, "") for name in group}
    units |= {name: hdf5.attribute(c, "unit", str) for name, c in group.items() if "unit" in c.attrs}
    return columns, units


def recent(history: History, step: int, every: int) -> History:
    """The rows of ``history`` after the step file before that of ``step``, and at least the last LEAST.

    ``history`` itself where these are all.

    Args:
        every: steps between two files, 0 for none.
    """
    if not every:
        return history
    before = (step - 1) // every * every
    first = min(int((history["step"] <= before).sum()), max(0, len(history["step"]) - LEAST))
    return {name: column[first:] for name, column in history.items()} if first else history


def latest(history: Mapping[str, Array], column: str) -> float:
    """The last number that was recorded in a column; NaN if there is none."""
    values = history.get(column, np.zeros(0))
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else math.nan


def describe(history: History) -> list[Row]:
    """The last numbers of the columns that a reader asks for first."""
    accuracy = latest(history, "test_accuracy")
    note = "" if math.isnan(accuracy) else f"accuracy {accuracy:.4g}"
    rows = [
        Row("test loss", latest(history, "test_loss"), unit="nat", note=note),
        Row("training loss", latest(history, "train_loss"), unit="nat"),
        Row("consensus distance", latest(history, "consensus")),
        Row("effective rate α_e", latest(history, "alpha_e")),
    ]
    return [row for row in rows if row.value == row.value]


def completed(history: History, path: Path) -> History:
    """``history`` of the file ``path``, with its earlier rows from last.h5 or the step files in its folder.

    Warns if these are missing, damaged, or from another run.
    """
    names = sorted((p for p in path.parent.glob("step-*.h5") if p.stem[5:].isdecimal()), reverse=True)
    end = history["step"][-1] if len(history["step"]) else 0
    for earlier in (path.with_name("last.h5"), *(p for p in names if int(p.stem[5:]) < end)):
        if not len(history["step"]) or history["step"][0] <= 1:
            return history
        numbered = earlier.stem[5:]
        if earlier == path or (numbered.isdecimal() and int(numbered) < history["step"][0]):
            continue
        with contextlib.suppress(OperationError), hdf5.reading(earlier, warn=False) as file:
            history = _joined(read(hdf5.group(file, "history"))[0], history)
    if len(history["step"]) and history["step"][0] > 1:
        missing = "the rows before are in other files of its run, which are not in its folder"
        begin = f"its history begins at step {history['step'][0]:.0f}"
        warn_caller(f"{printable(path)}: {begin}; {missing}", HistoryWarning)
    return history


def _joined(earlier: History, history: History) -> History:
    """``history`` with the rows of ``earlier`` before it, if both have its first row.

    That row is identified by its step and its time, which no other run has.
    """
    first = int(np.searchsorted(earlier["step"], history["step"][0])) if "step" in earlier else 0
    same = all(
        name in earlier and earlier[name][first : first + 1].tobytes() == history[name][:1].tobytes()
        for name in ("step", "wall_s")
    )
    if not same:
        return history
    # A column that only one of the two has is NaN in the other's rows.
    before, after = np.full(first, np.nan), np.full(len(history["step"]), np.nan)
    names = dict.fromkeys([*history, *earlier])
    return {n: np.concatenate([earlier.get(n, before)[:first], history.get(n, after)]) for n in names}

"""The history of a run, which its folder holds once: whole in last.h5, in parts in the step files.

A run of 10⁶ steps that is saved every 500 would otherwise write each row a thousand times.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import h5py
import numpy as np

from landscape.checkpoint import parts as parts
from landscape.core import hdf5
from landscape.core.errors import FailedError
from landscape.core.files import printable
from landscape.core.hdf5 import Array

History = dict[str, Array]
# Rows that a step file holds at least: a run resumed from it alone needs the last ten (the test for
# divergence), and those of a short run are then whole by themselves (ours).
LEAST = 100


class HistoryWarning(UserWarning):
    """The rows at the beginning of a history are in none of the files that are there."""


def write(file: h5py.File, history: History, units: dict[str, str]) -> None:
    """Write the columns of ``history`` to the group /history, in place of what is there."""
    if "history" in file:
        del file["history"]
    for name, column in history.items():
        file.create_dataset(f"history/{name}", data=column).attrs["unit"] = units.get(name, "")


def recent(history: History, step: int, every: int) -> History:
    """The rows of ``history`` after the step file before that of ``step``, and at least the last LEAST.

    Args:
        every: steps between two files, 0 for none.
    """
    if not every:
        return history
    before = (step - 1) // every * every
    first = min(int((history["step"] <= before).sum()), max(0, len(history["step"]) - LEAST))
    return {name: column[first:] for name, column in history.items()}


def completed(history: History, path: Path, newer: tuple[str, ...]) -> History:
    """``history``, as ``path`` holds it, with its earlier rows from last.h5 or the step files beside it.

    Warns where these are not there, are damaged, or are another run's.
    """
    names = sorted((p for p in path.parent.glob("step-*.h5") if p.stem[5:].isdecimal()), reverse=True)
    end = history["step"][-1] if len(history["step"]) else 0
    for other in (path.with_name("last.h5"), *(p for p in names if int(p.stem[5:]) < end)):
        if not len(history["step"]) or history["step"][0] <= 1:
            return history
        numbered = other.stem[5:]
        if other == path or (numbered.isdecimal() and int(numbered) < history["step"][0]):
            continue
        with contextlib.suppress(FailedError), hdf5.reading(other, warn=False) as file:
            history = _joined(parts.history(hdf5.group(file, "history"), newer), history)
    if len(history["step"]) and history["step"][0] > 1:
        warnings.warn(
            f"{printable(path)}: its history begins at step {history['step'][0]:.0f}; the rows before are in "
            "the last.h5 and step files of its run, which are not beside it",
            HistoryWarning,
            stacklevel=3,
        )
    return history


def _joined(earlier: History, history: History) -> History:
    """``history`` with the rows of ``earlier`` before it, if both have its first row.

    That row is known by its step and its clock, which no other run has.
    """
    first = int(np.searchsorted(earlier["step"], history["step"][0])) if "step" in earlier else 0
    same = all(
        name in earlier and earlier[name][first : first + 1].tobytes() == history[name][:1].tobytes()
        for name in ("step", "wall_s")
    )
    if not same:
        return history
    unknown, later = np.full(first, np.nan), np.full(len(history["step"]), np.nan)
    names = [*history, *(name for name in earlier if name not in history)]  # of columns that only one has
    return {
        name: np.concatenate([earlier.get(name, unknown)[:first], history.get(name, later)]) for name in names
    }

"""The history of a run. Its folder holds it once: complete in last.h5, in parts in the step files.

A run of 10⁶ steps that is saved every 500 would otherwise write each row a thousand times.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from landscape.core import hdf5
from landscape.core.errors import FailedError
from landscape.core.files import printable
from landscape.core.hdf5 import Array

# The columns that every run has, and their units; update rules declare more of their own. A row describes one
# step, from w(t−1) to w(t), t its number: loss, train_loss, alpha_e … delta_cross belong to the step's start,
# consensus and the test columns to its end.
# delta = delta_s + delta_2 + delta_cross for SSGD and DPSGD; the noise that SSGD* injects is in delta alone.
# delta_s … delta_cross are NaN with momentum, weight decay, LARS or LAMB: Eq. 4 splits steps
# −α × gradient.
# NaN where a column was not evaluated. Losses are in nats; weights, and so their squares, have no unit.
UNITS = {
    "step": "steps",
    "loss": "nat",  # mean over the learners of the minibatch loss at the weights they took gradients at
    "train_loss": "nat",  # L(w_a), over the whole training set (or the sample of decompose.samples)
    "lr": "1",
    "alpha_e": "1",
    "grad_norm2": "nat^2",
    "displacement2": "1",
    "delta": "1",
    "delta_s": "1",
    "delta_2": "1",  # α²‖P⊥δ‖²: what makes delta = delta_s + delta_2 + delta_cross exact
    "delta_2_full": "1",  # α²‖δ‖²: the paper's Δ(2) (Eq. 4, left), without the projector
    "delta_cross": "1",
    "alpha_e_se": "1",  # standard errors where g is estimated from samples; 0 where it is exact
    "grad_norm2_se": "nat^2",
    "delta_se": "1",
    "delta_s_se": "1",
    "delta_2_se": "1",
    "delta_cross_se": "1",
    "consensus": "1",
    "wall_s": "s",
    "samples_per_s": "1/s",  # of this step, all learners together, without evaluation and checkpoints
    "wait_s": "s",  # of this step, what rank 0 spent waiting for other processes; 0 in one process
    # Communication, if each learner had its own machine: sent by a learner (mean over learners), and how
    # often it waits for other learners. An all-reduce counts as 2(n−1)/n vectors, a neighbour as one.
    "comm_bytes": "byte",
    "comm_rounds": "1",
    # Of the Hessian at the step's end, on a fixed sample of the training set (the recipe's table "monitor").
    "lambda_max": "nat",
    "lambda_max_residual": "nat",  # ‖Hv − λv‖: an eigenvalue lies within that distance
    "lr_lambda_max": "1",
    "lr_lambda_limit": "1",  # up to which the rule is stable on a quadratic; NaN where that is not known
    "spread_share": "1",  # of Σ_j ‖Δw_j‖², what lies along the top eigenvectors (monitor.top of them)
    "test_loss": "nat",
    "test_accuracy": "1",
}
# Columns that files written before they existed lack; NaN when those are read.
MONITORED = ("lambda_max", "lambda_max_residual", "lr_lambda_max", "lr_lambda_limit", "spread_share")
_ERRORS = ("delta_se", "delta_s_se", "delta_2_se", "delta_cross_se")
_LATER = (*_ERRORS, "samples_per_s", "wait_s", "comm_bytes", "comm_rounds", *MONITORED)

History = dict[str, Array]
# The least number of rows in a step file: a run that is resumed from it alone needs the last ten (for the
# test for divergence), and the files of a short run are then complete (ours).
LEAST = 100


class HistoryWarning(UserWarning):
    """The rows at the beginning of a history are in none of the files that are there."""


def write(file: h5py.File, history: History, units: Mapping[str, str]) -> None:
    """Write the columns of ``history`` to the group /history, in place of what is there.

    Args:
        units: column -> unit, of all of them.

    Raises:
        FailedError: for a column without a unit.
    """
    if "history" in file:
        del file["history"]
    for name, column in history.items():
        if name not in units:
            raise FailedError(f"history: the column '{name}' has no unit, it must be declared with one")
        file.create_dataset(f"history/{name}", data=column).attrs["unit"] = units[name]


def read(group: h5py.Group) -> tuple[History, dict[str, str]]:
    """The columns of the group /history and their units, also those that this installation does not know.

    Columns that files of earlier versions lack are NaN.

    Raises:
        ValueError: for a data set that is not a column.
    """
    columns = {name: np.asarray(hdf5.dataset(group, name, "f", 1)) for name in group}
    units = {
        name: hdf5.attribute(column, "unit", str) if "unit" in column.attrs else UNITS.get(name, "")
        for name, column in group.items()
    }
    length = len(next(iter(columns.values()), ()))
    for name in _LATER:
        columns.setdefault(name, np.full(length, np.nan))
        units.setdefault(name, UNITS[name])
    return columns, units


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


def completed(history: History, path: Path) -> History:
    """``history`` of the file ``path``, with its earlier rows from last.h5 or the step files in its folder.

    Warns if these are missing, damaged, or from another run.
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
            history = _joined(read(hdf5.group(file, "history"))[0], history)
    if len(history["step"]) and history["step"][0] > 1:
        warnings.warn(
            f"{printable(path)}: its history begins at step {history['step'][0]:.0f}; the rows before are in "
            "the last.h5 and step files of its run, which are not in its folder",
            HistoryWarning,
            stacklevel=3,
        )
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
    unknown = np.full(first, np.nan)  # a column that only one of the two has
    names = [*history, *(name for name in earlier if name not in history)]
    later = np.full(len(history["step"]), np.nan)
    return {
        name: np.concatenate([earlier.get(name, unknown)[:first], history.get(name, later)]) for name in names
    }

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
from landscape.core.errors import OperationError
from landscape.core.files import printable
from landscape.core.hdf5 import Array

#: The columns that every run has: name -> (unit, meaning). Update rules declare more of their own. A row
#: describes one step, from w(t−1) to w(t), t its number: loss, train_loss, alpha_e … delta_cross belong to
#: the step's start, consensus and the test columns to its end. NaN where a column was not evaluated. Losses
#: are in nats; weights, and so their squares, have no unit.
COLUMNS = {
    "step": ("steps", "the number of the step, from 1"),
    "loss": ("nat", "mean over the learners of the minibatch loss at the weights they took gradients at"),
    "train_loss": ("nat", "L(w_a) over the whole training set, or the sample of ``decompose.samples``"),
    "lr": ("1", "the learning rate α of the step"),
    "alpha_e": ("1", "effective learning rate α_e = −⟨d, g⟩/‖g‖², d the displacement of w_a, g = ∇L(w_a)"),
    "grad_norm2": ("nat^2", "‖g‖²"),
    "displacement2": ("1", "‖d‖²"),
    "delta": ("1", "Δ = ‖d + α_e g‖²; α_e²‖g‖² + Δ = ‖d‖² for any rule"),
    "delta_s": ("1", "Δ_S = α²‖P⊥g_S‖², the part of Δ from the sampling of minibatches (Eq. 4; NaN with any "
    "optimizer but plain SGD, as the other terms of Eq. 4)"),
    "delta_2": ("1", "α²‖P⊥δ‖², the part from the spread; delta = delta_s + delta_2 + delta_cross for SSGD "
    "and DPSGD, while the noise that SSGD* adds is in delta alone"),
    "delta_2_full": ("1", "α²‖δ‖², the paper's Δ(2) (left side of Eq. 4), without the projector"),
    "delta_cross": ("1", "2α²⟨P⊥g_S, P⊥δ⟩, which the paper takes as zero"),
    "alpha_e_se": ("1", "standard error of alpha_e where g is estimated from samples; 0 where it is exact"),
    "grad_norm2_se": ("nat^2", "standard error of grad_norm2"),
    "delta_se": ("1", "standard error of delta"),
    "delta_s_se": ("1", "standard error of delta_s"),
    "delta_2_se": ("1", "standard error of delta_2"),
    "delta_cross_se": ("1", "standard error of delta_cross"),
    "consensus": ("1", "consensus distance n⁻¹ Σ_j ‖w_j − w_a‖²"),
    "wall_s": ("s", "time since the start of the run"),
    "samples_per_s": ("1/s", "speed of the step, all learners together, without evaluation and checkpoints"),
    "wait_s": ("s", "time of the step that rank 0 waited for other processes; 0 in one process"),
    "comm_bytes": ("byte", "what a learner sends in the step, as if each had a machine of its own (mean over "
    "learners; an all-reduce counts as 2(n−1)/n vectors, a neighbour as one)"),
    "comm_rounds": ("1", "how often a learner waits for other learners in the step"),
    "lambda_max": ("nat", "λ_max of the Hessian at the step's end, on a fixed sample of the training set "
    "(the recipe's table ``monitor``)"),
    "lambda_max_residual": ("nat", "‖Hv − λv‖: some eigenvalue lies within that distance of lambda_max"),
    "lr_lambda_max": ("1", "the learning rate times lambda_max"),
    "lr_lambda_limit": ("1", "the rule's limit on ηλ, up to which it is stable on a quadratic; NaN where "
    "that is not known"),
    "spread_share": ("1", "share of Σ_j ‖Δw_j‖² that lies along the ``monitor.k`` leading eigenvectors"),
    "test_loss": ("nat", "loss of w_a on the test set"),
    "test_accuracy": ("1", "accuracy of w_a on the test set"),
}  # fmt: skip
#: Column -> unit.
UNITS = {name: unit for name, (unit, _) in COLUMNS.items()}
#: The columns of :class:`.LambdaMax`.
MONITORED = ("lambda_max", "lambda_max_residual", "lr_lambda_max", "lr_lambda_limit", "spread_share")

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
    units = {
        name: hdf5.attribute(column, "unit", str) if "unit" in column.attrs else UNITS.get(name, "")
        for name, column in group.items()
    }
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
        with contextlib.suppress(OperationError), hdf5.reading(other, warn=False) as file:
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

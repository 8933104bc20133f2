"""The history of a run: its folder has all rows in last.h5, and each step file has the latest rows only.

Otherwise a run of 10⁶ steps that is saved every 500 steps would write each row a thousand times.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import h5py
import numpy as np

from landscape.core import hdf5
from landscape.core.errors import DataWarning, LandscapeError, OperationError, warn_caller
from landscape.core.files import printable
from landscape.core.hdf5 import Array
from landscape.core.options import parse_toml
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

SCHEMA = "landscape.checkpoint"
IMPORTED = "import"  # the algorithm of imported weights (landscape.checkpoint.weights)
RECORDED = "recorded"  # that of a loop of the user's own (landscape.training.own_loop.recorder)

DIVERGED = ("", "mean", "learners")
ATTRIBUTES: dict[str, type] = {
    "step": int, "epoch": float, "algorithm": str, "recipe": str, "lr": float, "local_batch": int,
    "diverged_at": int, "diverged": str,
}  # fmt: skip
# Groups of tensors: with a row for each learner, and of all learners.
STACKED, COMMON = ("buffers", "optimizer", "rule"), ("shared", "mean_buffers")
_TEXT = h5py.string_dtype()
SLOT = np.dtype([("name", _TEXT), ("shape", _TEXT), ("offset", "i8"), ("size", "i8"), ("role", _TEXT)])
DATA: dict[str, type] = {"name": str, "options": dict, "train": int, "test": int, "fingerprint": str}

History = dict[str, Array]
# The least number of rows in a step file: a run that is resumed from it alone needs the last ten (for the
# test for divergence), and the files of a short run are then complete (our choice).
LEAST = 100


class HistoryWarning(DataWarning):
    """The rows at the beginning of a history are in none of the files that are there."""


def write(file: h5py.File, history: History, units: Mapping[str, str]) -> None:
    """Write the columns of ``history`` to the group /history, which is replaced.

    Args:
        units: the units of all columns.

    Raises:
        OperationError: a column has no unit.
    """
    if "history" in file:
        del file["history"]
    group = file.create_group("history")
    for name, column in history.items():
        if name not in units:
            raise OperationError(f"history: the column '{name}' has no unit, it must be declared with one")
        group.create_dataset(name, data=column).attrs["unit"] = units[name]


def read(group: h5py.Group) -> tuple[History, dict[str, str]]:
    """Return the columns of the group /history and their units, including columns of plugins.

    Raises:
        ValueError: a data set is no column.
    """
    columns = {name: np.asarray(hdf5.dataset(group, name, "f", 1)) for name in group}
    units = {name: UNITS.get(name, "") for name in group}
    units |= {name: hdf5.attribute(c, "unit", str) for name, c in group.items() if "unit" in c.attrs}
    return columns, units


def recent(history: History, step: int, every: int) -> History:
    """Return the rows of ``history`` since the previous step file, and at least the last LEAST.

    It is ``history`` itself if these are all rows.

    Args:
        step: the step of the file.
        every: steps between two files, 0 for no step files.
    """
    if not every:
        return history
    previous_step = (step - 1) // every * every
    first = min(int((history["step"] <= previous_step).sum()), max(0, len(history["step"]) - LEAST))
    return {name: column[first:] for name, column in history.items()} if first else history


def latest(history: Mapping[str, Array], column: str) -> float:
    """Return the last finite number in a column; NaN if there is none."""
    values = history.get(column, np.zeros(0))
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else math.nan


def describe(history: History) -> list[Row]:
    """Return rows with the last numbers of the most important columns."""
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
    """Return ``history`` of the file ``path``, with earlier rows from last.h5 or step files in its folder.

    It warns if rows are missing, damaged, or from another run.
    """
    step_files = sorted((p for p in path.parent.glob("step-*.h5") if p.stem[5:].isdecimal()), reverse=True)
    end = history["step"][-1] if len(history["step"]) else 0
    for file_path in (path.with_name("last.h5"), *(p for p in step_files if int(p.stem[5:]) < end)):
        if not len(history["step"]) or history["step"][0] <= 1:
            return history
        number = file_path.stem[5:]
        if file_path == path or (number.isdecimal() and int(number) < history["step"][0]):
            continue  # this file, or one without a row in common
        with contextlib.suppress(OperationError), hdf5.reading(file_path, warn=False) as file:
            history = _joined(read(hdf5.group(file, "history"))[0], history)
    if len(history["step"]) and history["step"][0] > 1:
        reason = "the rows before are in other files of its run, which are not in its folder"
        start = f"its history begins at step {history['step'][0]:.0f}"
        warn_caller(f"{printable(path)}: {start}; {reason}", HistoryWarning)
    return history


def _joined(earlier: History, history: History) -> History:
    """Return ``history`` with the rows of ``earlier`` before it, if both have the first row of ``history``.

    They have it if its step and its time are equal; no other run has the same time.
    """
    first = int(np.searchsorted(earlier["step"], history["step"][0])) if "step" in earlier else 0
    for name in ("step", "wall_s"):
        if name not in earlier or earlier[name][first : first + 1].tobytes() != history[name][:1].tobytes():
            return history
    # A column that only one of the two has is NaN in the other's rows.
    before, after = np.full(first, np.nan), np.full(len(history["step"]), np.nan)
    names = dict.fromkeys([*history, *earlier])
    return {n: np.concatenate([earlier.get(n, before)[:first], history.get(n, after)]) for n in names}


def checkpoint_in(path: Path) -> Path:
    """Return ``path``, or the last checkpoint if it is a run's folder; OperationError if that has none."""
    if not path.is_dir():
        return path
    if not (path / "last.h5").is_file():
        runs = [file.parent for file in sorted(path.glob("*/last.h5"))]
        inside = f"; give {runs[0]} or another of its {len(runs)} runs" if runs else ""
        words = f"a folder without a last.h5, a run's folder or a checkpoint is needed{inside}"
        raise OperationError(f"{path}: {words}")
    return path / "last.h5"


def settings(algorithm: str, recipe: str, where: str | Path) -> dict[str, Any]:
    """Return the values in a run's recipe, {} for imported weights; OperationError if they are unreadable."""
    try:
        return {} if algorithm == IMPORTED else parse_toml(recipe, f"{where}: recipe")
    except LandscapeError as error:
        raise OperationError(str(error)) from error


def read_fields(
    path: str | Path, learners: Callable[[int], slice] | None = None, *, whole_history: bool = True
) -> dict[str, Any]:
    """Return the validated fields of a :class:`.Checkpoint` in a file, with arrays in place of tensors.

    The arguments are those of :meth:`.Checkpoint.load`.
    """
    with hdf5.reading(path, SCHEMA) as file:
        weights = hdf5.dataset(file, "weights", "f", 2)
        n = len(weights)
        rows = learners(n) if learners else slice(None)
        columns, units = read(hdf5.group(file, "history"))
        fields: dict[str, Any] = {key: hdf5.attribute(file, key, kind) for key, kind in ATTRIBUTES.items()}
        fields |= {name: _arrays(hdf5.group(file, name), rows, n) for name in STACKED}
        fields |= {name: _arrays(hdf5.group(file, name), ...) for name in COMMON}  # "...": whole arrays
        fields |= {
            "weights": weights[rows],
            "layout": _layout(hdf5.dataset(file, "layout", "V", 1)),
            "model": _json_attribute(file, "model", {"name": str, "options": dict}),
            "data": _json_attribute(file, "data", DATA),
            "seed": int(hdf5.dataset(hdf5.group(file, "rng"), "seed", "ui", 0)[()]),
            "history": columns,
            # Files of version 0.29.0 and before have no description.
            "description": hdf5.attribute(file, "description", str) if "description" in file.attrs else "",
        }
        _validate(fields, path)
    if whole_history:
        fields["history"] = completed(columns, Path(path))
    fields["units"] = {name: units.get(name, "") for name in fields["history"]}
    return fields


def _validate(parts: Mapping[str, Any], path: str | Path) -> None:
    """Raise ValueError unless the parts fit together."""
    size = sum(slot[3] for slot in parts["layout"])
    if parts["weights"].shape[1] != size:
        raise ValueError(f"weights {parts['weights'].shape} for a layout of {size}")
    if parts["diverged"] not in DIVERGED:
        raise ValueError(f"diverged is '{parts['diverged']}', it must be one of {DIVERGED}")
    data = parts["data"]
    if min(parts["step"], parts["local_batch"], data["train"], data["test"], parts["diverged_at"] + 1) < 0:
        raise ValueError("step, local_batch, sizes of the data and diverged_at must not be negative")
    steps = settings(parts["algorithm"], parts["recipe"], path).get("steps", 0)
    if type(steps) is not int or steps < 0:
        raise ValueError("steps of its recipe must be a whole number ≥ 0")
    missing = [name for name in UNITS if name not in parts["history"]]
    if missing:
        raise ValueError(f"/history/{missing[0]} is missing")
    lengths = {len(column) for column in parts["history"].values()}
    if len(lengths) > 1:
        raise ValueError("history columns are of unequal length")
    steps = parts["history"]["step"]
    if not np.isfinite(steps).all() or not (np.diff(steps) > 0).all():
        raise ValueError("/history/step must be finite and increasing")


def _layout(rows: h5py.Dataset) -> list[Any]:
    """Return the fields of each :class:`.Slot`; ValueError if offsets and sizes do not add up."""
    if rows.dtype.names != SLOT.names:
        raise ValueError(f"/layout has the columns {rows.dtype.names}, {SLOT.names} are needed")
    slots, end = [], 0
    for name, text, offset, size, role in np.asarray(rows).tolist():
        shape = tuple(int(n) for n in bytes(text).decode("ascii").split("x") if n)
        slot = bytes(name).decode(), shape, int(offset), int(size), bytes(role).decode()
        if offset != end or size != math.prod(shape) or min(shape, default=1) < 0:
            raise ValueError(f"layout of {slot[0]} does not add up")
        slots.append(slot)
        end += size
    if not slots or len({slot[0] for slot in slots}) < len(slots):
        raise ValueError("layout must hold names, each once")
    return slots


def _json_attribute(file: h5py.File, name: str, kinds: dict[str, type]) -> dict[str, Any]:
    """Return the JSON object in an attribute, whose values have these types."""
    facts = json.loads(hdf5.attribute(file, name, str))
    for key, kind in kinds.items():
        if not isinstance(facts, dict) or type(facts.get(key)) is not kind:
            raise ValueError(f"attribute /{name} has no '{key}' of the kind {kind.__name__}")
    return dict(facts)


def _arrays(group: Any, rows: slice | EllipsisType, learners: int | None = None) -> dict[str, Array]:
    """Return the arrays of a group by name; with ``learners``, each must have that number of rows."""
    by_name = {}
    for name in group:
        dataset = hdf5.dataset(group, name, "fiubc")
        if learners is not None and (not dataset.ndim or len(dataset) != learners):
            raise ValueError(f"{dataset.name} has shape {dataset.shape}, {learners} rows are needed")
        by_name[name] = np.asarray(dataset[rows])
    return by_name

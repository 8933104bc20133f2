"""The common parts of runs and users' training loops: random numbers, history, numbers for trackers.

All randomness of a run follows from its seed and the step.

Each draw has its own generator, from (seed, purpose, step) and, where learners draw separately, the learner.
No state has to be saved to resume at a step, and every process of a distributed run can make the draws that
it needs without an exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape.checkpoint.history import UNITS
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.core.registry import optional

# Purposes whose streams follow from a number, as in version 0.8 and before, so that their bits stay the same.
# The streams of all other purposes follow from their names; no purpose is added here.
_NAMES = "init", "batch", "noise", "mixing", "decompose", "delay", "push", "augment", "dropout", "monitor"
_NUMBERED = {name: number for number, name in enumerate(_NAMES)}
#: Purposes of the training loop and of mixing, which an update rule may not declare.
RESERVED = (frozenset(_NUMBERED) - {"noise", "delay", "push"}) | {"split", "heterogeneity"}


def generator(seed: int, purpose: str, step: int = 0, *learner: int) -> torch.Generator:
    """Return a CPU generator for one ``purpose`` at one ``step``, of one learner where it is given.

    The streams of two seeds, purposes, steps or learners are independent.

    Args:
        seed: the recipe's seed.
        purpose: the purpose of the draw. An update rule declares its purposes (:attr:`.Rule.purposes`).
        step: counted from 1; 0 for a draw once in a run.
        learner: the learner's index and, for several draws in a step, the number of the draw.
    """
    entropy = np.random.SeedSequence((seed, *_stream(purpose), step, *learner))
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))


def _stream(purpose: str) -> list[int]:
    """Return the words of the seed that identify ``purpose``.

    For a name they are 124 bits of its SHA-256, in four words of 32 bits whose highest bit is set. The upper
    words of seeds, and all numbers of purposes, are below 2³¹: a stream by name equals no stream by number.
    """
    if purpose in _NUMBERED:
        return [_NUMBERED[purpose]]
    digest = hashlib.sha256(purpose.encode()).digest()
    return [int.from_bytes(digest[i : i + 4], "big") | 1 << 31 for i in range(0, 16, 4)]


Row = dict[str, float]


def due(every: int, step: int) -> bool:
    """Return whether ``step`` is a multiple of ``every``; False for 0."""
    return bool(every) and step % every == 0


# Number of last rows for the mean speed in logs (our choice: seconds to minutes of a run).
RECENT = 100


# Rows in a block of the history (our choice): a block has 8 bytes per number, a dict 1.2 kB per row.
BLOCK = 1000


class History:
    """The steps of a run so far: the last steps are rows that can still change, earlier steps are arrays.

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
        """Return a new row, which is not added to ``rows``, with NaN in all columns except these two."""
        return dict.fromkeys(self.units, math.nan) | {"step": step, "lr": lr}

    def append(self, row: Row) -> None:
        """Add ``row`` at the end; it may be changed until RECENT other rows follow."""
        self.rows.append(row)
        if len(self.rows) >= BLOCK + RECENT:
            old, self.rows = self.rows[:BLOCK], self.rows[BLOCK:]
            self._blocks.append({name: _column(old, name) for name in self.units})

    def write_to_row(self, row: Row, values: Mapping[str, float]) -> None:
        """Write ``values`` to ``row``.

        Raises:
            OperationError: for a column that is not declared.
        """
        if undeclared := [name for name in values if name not in self.units]:
            words = f"'columns' of '{self.algorithm}' must declare '{undeclared[0]}' with a unit"
            raise OperationError(f"algorithm.name: {words}")
        row |= values

    def restore(self, columns: Mapping[str, Array], units: Mapping[str, str]) -> None:
        """Restore the rows of a checkpoint; columns that this run does not record are NaN in later rows."""
        self.units |= units
        length = len(next(iter(columns.values()), ()))
        all_columns = {name: columns.get(name, np.full(length, np.nan)) for name in self.units}
        first = max(0, length - RECENT)
        self._blocks = [{name: column[:first] for name, column in all_columns.items()}] if first else []
        last = zip(*(column[first:].tolist() for column in all_columns.values()), strict=True)
        self.rows = [dict(zip(all_columns, row, strict=True)) for row in last]

    def column(self, name: str) -> Array:
        """Return the column (T,) float64, a copy."""
        blocks = (block.get(name, np.full(len(block["step"]), np.nan)) for block in self._blocks)
        return np.concatenate([*blocks, _column(self.rows, name)])

    def columns(self) -> dict[str, Array]:
        """Return copies of the columns (T,) by name, in float64."""
        return {name: self.column(name) for name in self.units}

    def pace(self, batch: int) -> str:
        """Return the speed of the last steps and the share of waiting, for logs; "" before the first step.

        Args:
            batch: samples per step.
        """
        recent = self.rows[-RECENT:]
        if not recent:
            return ""
        seconds = sum(batch / row["samples_per_s"] for row in recent)
        waited = sum(row["wait_s"] for row in recent)
        speed = len(recent) * batch / seconds
        return f"; {speed:.0f} samples/s, {100 * waited / seconds:.0f}% of the time waiting"


def _column(rows: Sequence[Row], name: str) -> Array:
    return np.array([row.get(name, math.nan) for row in rows], dtype=np.float64)  # columns may be added later


# The prefix of names in a tracker's run to which the user's loop writes, too.
PREFIX = "landscape/"


#: Writes numbers of one step by name; there may be several calls for a step.
Write = Callable[[int, Mapping[str, float]], object]


WRITERS = ("tensorboard", "wandb", "trackio")


def writer_names(scalars: str | Sequence[str] | None) -> list[str]:
    """Return the names of the writers in ``scalars``; InputError for an unknown name."""
    if scalars is None:
        return []
    names = [scalars] if isinstance(scalars, str) else scalars
    if not isinstance(names, (list, tuple)):
        raise InputError("scalars", scalars, allowed=f"one of {', '.join(WRITERS)}")
    return [choose("scalars", name, WRITERS) for name in names]


def package_of(name: str) -> Any:
    """Return the package of the writer called ``name``; OperationError where it is not installed."""
    return optional(name, "scalars", f"{name}, or leave scalars out")


def open_writer(name: str, folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    """Return the writer ``name`` for a run in ``folder`` after ``step`` steps; ``opened`` closes it.

    Raises OperationError if its package is missing or raises an error.
    """
    try:
        package = package_of(name)
        if name == "tensorboard":
            return _tensorboard(folder, step, opened)
        return _tracked(package, folder, opened)
    except LandscapeError:
        raise
    except Exception as error:  # the package and its service may raise any error
        words = " ".join(str(error).split())[:200]
        raise OperationError(f"scalars: '{name}' cannot be used ({type(error).__name__}: {words})") from error


def row_writer(
    name: str, folder: Path, step: int, opened: contextlib.ExitStack, then: Callable[[dict[str, float]], None]
) -> Callable[[dict[str, float]], None]:
    """Return a function that writes the finite numbers of a history's row, and calls ``then`` with it.

    The other arguments are :func:`open_writer`'s.
    """
    write = open_writer(name, folder, step, opened)

    def take(row: dict[str, float]) -> None:
        write(int(row["step"]), {k: v for k, v in row.items() if k != "step" and math.isfinite(v)})
        then(row)

    return take


def _tensorboard(folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    """Return the function that writes event files to the folder "tensorboard" of the run."""
    module = optional("torch.utils.tensorboard", "scalars", "tensorboard, or leave scalars out")
    # A run that is resumed from an earlier step first removes the numbers of later steps.
    writer = module.SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
    opened.callback(writer.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _tracked(tracker: Any, folder: Path, opened: contextlib.ExitStack) -> Write:
    """Return the writer to a run of Weights & Biases, or of trackio, which has the same functions.

    An active run of the user's loop gets names with a prefix, and the step as a number. Otherwise the writer
    starts a run in the project "landscape" with the name of the folder.
    """
    current = getattr(getattr(tracker, "context_vars", None), "current_run", None)  # trackio's
    active = current.get() if current else getattr(tracker, "run", None)
    if active is not None:  # its steps are the user's
        return lambda step, values: active.log(
            {f"{PREFIX}{k}": v for k, v in values.items()} | {f"{PREFIX}step": step}
        )
    run = tracker.init(project="landscape", name=folder.name)
    opened.callback(run.finish)
    return lambda step, values: run.log(dict(values), step=step)

"""The record of a run that has ended: its settings, its last numbers and its curves, without weights.

A record is a JSON text of some kilobytes, HASH.json with the hash of the run's settings and of the version
of the training's numerics. Figures are drawn from records, so that a campaign of many runs can be resumed on
another machine without the checkpoints. The settings in a record are only for human readers: a figure has
those of its runs, and a record stays valid after a key is renamed.

The records of a figure's runs are packed into one archive, and its analyses into another; new ones are files
beside it.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape._version import __version__
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import DIVERGED, UNITS
from landscape.core.errors import OperationError
from landscape.core.files import make_folder, read_regular, replacing
from landscape.core.hdf5 import Array
from landscape.core.registry import version_of
from landscape.problem.layout import Layout
from landscape.training.recipes.recipe import Recipe, recipe_of
from landscape.training.run.loop import Trainer

# The number of stored values of a column, evenly over its steps, and their digits (our choice).
POINTS, DIGITS = 1000, 6
# Of the minibatch loss, which is mostly noise, this number is stored evenly over the steps, and the values at
# steps with a measurement (our choice).
NOISY, FEW = "loss", 100
# Columns that follow from the recipe, or that say how busy a machine was.
LEFT_OUT = ("step", "lr", "wall_s", "samples_per_s", "wait_s", "comm_rounds")


@dataclass(frozen=True)
class Record:
    """A run that has ended.

    Attributes:
        version, numerics: the version of this package, and that of its training's numerics.
        recipe: its settings.
        data: {"name", "options", "train", "test", "fingerprint"}, as of a checkpoint.
        step: the number of its steps.
        diverged: "mean", "learners" or "": what diverged.
        diverged_at: the step at which the run diverged, or −1.
        seconds: seconds of training, on the machine that made the run.
        checkpoints: the steps at which weights were saved.
        curves: columns of the history that have values at the same steps, with these steps as "step".
    """

    version: str
    numerics: int
    recipe: Recipe
    data: dict[str, Any]
    step: int
    diverged: str
    diverged_at: int
    seconds: float
    checkpoints: tuple[int, ...]
    curves: tuple[dict[str, Array], ...]

    @classmethod
    def of(cls, end: Checkpoint, checkpoints: Sequence[int]) -> Record:
        """Return the record of the run that ended in ``end``, with weights saved at ``checkpoints``."""
        clock = end.history["wall_s"]
        return cls(
            version=__version__, numerics=version_of(Trainer), recipe=recipe_of(end), data=end.data,
            step=end.step, diverged=end.diverged, diverged_at=end.diverged_at,
            seconds=round(float(clock[-1]), 1) if len(clock) else 0.0, checkpoints=tuple(checkpoints),
            curves=tuple(_curves(end.history)),
        )  # fmt: skip

    def checkpoint(self) -> Checkpoint:
        """Return the end of the run without its weights, (n, 0), and with the stored part of its history."""
        recipe, model = self.recipe, self.recipe.spec("model")
        samples = int(self.data["train"])
        steps = np.unique(np.concatenate([curve["step"] for curve in self.curves] or [np.zeros(0)]))
        history = {name: np.full(len(steps), np.nan) for name in UNITS}
        for curve in self.curves:
            rows = np.searchsorted(steps, curve["step"])
            for name, values in curve.items():
                history.setdefault(name, np.full(len(steps), np.nan))[rows] = values
        history["step"] = steps
        history["lr"] = np.array([recipe.rate(int(t), samples) for t in steps])
        return Checkpoint(
            weights=torch.zeros(recipe.learners, 0), layout=Layout(()), step=self.step,
            epoch=self.step * recipe.batch / samples, algorithm=recipe.part("algorithm")[0],
            recipe=recipe.to_toml(), model={"name": model.name, "options": model.options}, data=self.data,
            lr=recipe.rate(min(self.step + 1, max(1, recipe.steps)), samples), local_batch=recipe.local_batch,
            seed=recipe.seed, history=history, diverged_at=self.diverged_at, diverged=self.diverged,
        )  # fmt: skip

    def to_json(self) -> bytes:
        """Return the record as JSON, a line for each key."""
        values = vars(self) | {
            "recipe": self.recipe.to_toml(),  # not read again
            "curves": [{name: _digits(values) for name, values in curve.items()} for curve in self.curves],
        }
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items())
        return f"{{\n{lines}\n}}\n".encode()

    @classmethod
    def read(cls, content: bytes, recipe: Recipe, where: str) -> Record:
        """Read the record of a run of ``recipe``. OperationError: damaged, or no record."""
        try:
            return _of_values(json.loads(content.decode()), recipe)
        except KeyError as error:
            words = f"it has no {error}"
        except (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError) as error:
            words = " ".join(str(error).split())[:120]
        raise OperationError(f"{where}: damaged ({words}); delete it to make its run again")


def _curves(history: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the columns with their finite values, those at the same steps together."""
    rows_of = {n: np.flatnonzero(np.isfinite(column)) for n, column in history.items() if n not in LEFT_OUT}
    rows_of = {name: rows for name, rows in rows_of.items() if len(rows)}
    most = max(map(len, rows_of.values()), default=0)
    measured_rows = [rows for rows in rows_of.values() if len(rows) < most]  # of columns with gaps
    curves: dict[bytes, dict[str, Array]] = {}  # bytes of the steps -> columns at these steps
    for name, rows in rows_of.items():
        count = min(len(rows), FEW if name == NOISY else POINTS)
        stored = rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]
        if name == NOISY:
            stored = np.concatenate([stored, *(np.intersect1d(rows, others) for others in measured_rows)])
        stored = np.unique(stored)
        steps = history["step"][stored]
        curves.setdefault(steps.tobytes(), {"step": steps})[name] = history[name][stored]
    return list(curves.values())


def _digits(values: Array) -> list[float]:
    """Round ``values`` to DIGITS digits; whole numbers become int."""
    rounded = [float(f"{value:.{DIGITS}g}") for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _of_values(values: dict[str, Any], recipe: Recipe) -> Record:
    """Return the record of a run of ``recipe`` from the ``values`` of its JSON file.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: ``values`` are not those of a
            record.
    """
    data, curves = values["data"], []
    for key in ("name", "fingerprint"):
        if not isinstance(data[key], str):
            raise TypeError(f"data.{key} is no text")
    for curve in values["curves"]:
        columns = {name: np.array(column, dtype=np.float64) for name, column in curve.items()}
        steps = columns["step"]
        if any(column.shape != steps.shape or column.ndim != 1 for column in columns.values()):
            raise ValueError("columns of unequal length")
        if not np.isfinite(steps).all() or not (np.diff(steps) > 0).all() or (steps < 1).any():
            raise ValueError("steps that are not finite, do not increase or are below 1")
        curves.append(columns)
    sample_counts = {split: int(data[split]) for split in ("train", "test")}
    # ``numerics`` is a version number. ``diverged`` says what diverged: "mean", "learners" or "".
    record = Record(
        version=str(values["version"]), recipe=recipe,
        data={**data, "options": dict(data["options"]), **sample_counts},
        diverged=str(values["diverged"]), checkpoints=tuple(int(step) for step in values["checkpoints"]),
        curves=tuple(curves), numerics=int(values["numerics"]), step=int(values["step"]),
        diverged_at=int(values["diverged_at"]), seconds=float(values["seconds"]),
    )  # fmt: skip
    numbers_are_possible = record.data["train"] >= 1 and record.step >= 0 and 0 <= record.seconds < math.inf
    if not numbers_are_possible or record.diverged not in DIVERGED:
        raise ValueError("values that no run can have")
    last_step = max((curve["step"][-1] for curve in curves if len(curve["step"])), default=0)
    if last_step > record.step:
        raise ValueError("curves longer than the run")
    return record


_NAME = re.compile(r"[0-9a-f]{24}\.(json|h5|seconds)")
# The largest archive that is read, in bytes, packed and unpacked (our choice).
MAX_PACKED, MAX_BYTES = 1 << 26, 1 << 30


@dataclass
class Store:
    """Small files by name: those of an archive, and those of a folder that are not packed yet.

    Attributes:
        archive: the file, which need not exist.
        folder: the folder to which a new file is written at once, so that nothing is lost.
    """

    archive: Path
    folder: Path
    _packed: dict[str, bytes] | None = field(default=None, repr=False)

    @property
    def packed(self) -> dict[str, bytes]:
        """The files of the archive, which is read once. OperationError: it is damaged."""
        if self._packed is None:
            self._packed = _unpacked(self.archive) if self.archive.exists() else {}
        return self._packed

    def read(self, name: str) -> bytes | None:
        """Return the file ``name``; None if there is none."""
        loose = self.folder / name
        if name in self.packed:
            return self.packed[name]
        return read_regular(loose, MAX_PACKED) if loose.exists() else None

    def add(self, name: str, content: bytes) -> None:
        """Write a new file into the folder."""
        make_folder(self.folder)
        with replacing(self.folder / name) as file:
            file.write(content)

    def pack(self, names: Iterable[str]) -> None:
        """Pack the files ``names``, and no others, into the archive, unless it contains just these.

        The archive does not depend on the time and the machine.
        """
        files = {name: content for name in sorted(names) if (content := self.read(name)) is not None}
        if files == self.packed:
            return
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        make_folder(self.archive.parent)
        with replacing(self.archive) as file:
            file.write(lzma.compress(plain.getvalue()))
        self._packed = files


def _unpacked(path: Path) -> dict[str, bytes]:
    """Return the files in an archive. OperationError: it is damaged."""
    try:
        unpacking = lzma.LZMADecompressor()
        plain = unpacking.decompress(read_regular(path, MAX_PACKED), MAX_BYTES)
        if not unpacking.eof:
            raise ValueError("it is cut off, or too large")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            entries = tar.getmembers()
            if strange := [entry.name for entry in entries if not _NAME.fullmatch(entry.name)]:
                raise ValueError(f"it holds {strange[0]!r}")
            files = {entry.name: tar.extractfile(entry) for entry in entries}
            return {name: file.read() for name, file in files.items() if file}
    except (EOFError, ValueError, lzma.LZMAError, tarfile.TarError) as error:
        words = " ".join(str(error).split())[:120]
        raise OperationError(f"{path}: damaged ({words}); delete it to make its runs again") from error

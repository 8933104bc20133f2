"""The record of a run that has ended: its settings, its last numbers and its curves, without weights.

A record is a JSON text of some kilobytes, HASH.json with the hash of the run's settings and of the version
of the training's numerics. Figures are drawn from records, so that a campaign of many runs goes on
on another machine, without the checkpoints. The settings in a record are for its readers alone: a figure
knows those of its runs, and a record stays good where a key gets another name.


The records of a figure's runs, and its analyses, lie in a packed file each, and beside it while they are new.
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
from landscape.checkpoint.checkpoint import DIVERGED, Checkpoint
from landscape.checkpoint.history import UNITS
from landscape.core.errors import OperationError
from landscape.core.files import make_folder, read_regular, replacing
from landscape.core.hdf5 import Array
from landscape.core.registry import version_of
from landscape.problem.layout import Layout
from landscape.training.recipes.recipe import Recipe, recipe_of
from landscape.training.run.loop import Trainer

# Values that are stored of a column, evenly over its steps, and their digits (our choice).
POINTS, DIGITS = 1000, 6
# Of the minibatch loss, mostly noise, this number evenly over the steps, and those at the steps of a
# measurement (our choice).
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
        step: how many steps it has made.
        diverged, diverged_at: as of :class:`landscape.Checkpoint`.
        seconds: of training, on the machine that did it.
        checkpoints: the steps of which weights were saved.
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
            version=__version__,
            numerics=version_of(Trainer),
            recipe=recipe_of(end),
            data=end.data,
            step=end.step,
            diverged=end.diverged,
            diverged_at=end.diverged_at,
            seconds=round(float(clock[-1]), 1) if len(clock) else 0.0,
            checkpoints=tuple(checkpoints),
            curves=tuple(_curves(end.history)),
        )

    def checkpoint(self) -> Checkpoint:
        """Return the end of the run without its weights, (n, 0), and with the stored part of its history."""
        recipe, model = self.recipe, self.recipe.spec("model")
        samples = int(self.data["train"])
        steps = np.unique(np.concatenate([curve["step"] for curve in self.curves] or [np.zeros(0)]))
        history = {name: np.full(len(steps), np.nan) for name in UNITS}
        for curve in self.curves:
            at = np.searchsorted(steps, curve["step"])
            for name, values in curve.items():
                history.setdefault(name, np.full(len(steps), np.nan))[at] = values
        history["step"] = steps
        history["lr"] = np.array([recipe.rate(int(t), samples) for t in steps])
        return Checkpoint(
            weights=torch.zeros(recipe.learners, 0),
            layout=Layout(()),
            step=self.step,
            epoch=self.step * recipe.batch / samples,
            algorithm=recipe.part("algorithm")[0],
            recipe=recipe.to_toml(),
            model={"name": model.name, "options": model.options},
            data=self.data,
            lr=recipe.rate(min(self.step + 1, max(1, recipe.steps)), samples),
            local_batch=recipe.local_batch,
            seed=recipe.seed,
            history=history,
            diverged_at=self.diverged_at,
            diverged=self.diverged,
        )

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
    finite = {n: np.flatnonzero(np.isfinite(values)) for n, values in history.items() if n not in LEFT_OUT}
    finite = {name: rows for name, rows in finite.items() if len(rows)}
    most = max(map(len, finite.values()), default=0)
    measured = [rows for rows in finite.values() if len(rows) < most]
    curves: dict[bytes, dict[str, Array]] = {}
    for name, rows in finite.items():
        count = min(len(rows), FEW if name == NOISY else POINTS)
        chosen = rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]
        if name == NOISY:
            chosen = np.concatenate([chosen, *(np.intersect1d(rows, columns) for columns in measured)])
        chosen = np.unique(chosen)
        steps = history["step"][chosen]
        curves.setdefault(steps.tobytes(), {"step": steps})[name] = history[name][chosen]
    return list(curves.values())


def _digits(values: Array) -> list[float]:
    """Return ``values`` in as many digits as are stored; whole numbers without a point."""
    rounded = [float(f"{value:.{DIGITS}g}") for value in values]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _of_values(values: dict[str, Any], recipe: Recipe) -> Record:
    """Return the record with these values; one of several kinds of error where they are none."""
    data, curves = values["data"], []
    for key in ("name", "fingerprint"):
        if not isinstance(data[key], str):
            raise TypeError(f"data.{key} is no text")
    for curve in values["curves"]:
        columns = {name: np.array(column, dtype=np.float64) for name, column in curve.items()}
        steps = columns["step"]
        if any(column.shape != steps.shape or column.ndim != 1 for column in columns.values()):
            raise ValueError("columns of unequal length")
        if not np.isfinite(steps).all() or not (np.diff(steps) > 0).all() or (len(steps) and steps[0] < 1):
            raise ValueError("steps that do not increase from 1")
        curves.append(columns)
    kinds = {"numerics": int, "step": int, "diverged_at": int, "seconds": float}
    record = Record(
        version=str(values["version"]),
        recipe=recipe,
        data={**data, "options": dict(data["options"]), **{n: int(data[n]) for n in ("train", "test")}},
        diverged=str(values["diverged"]),
        checkpoints=tuple(int(step) for step in values["checkpoints"]),
        curves=tuple(curves),
        **{name: kind(values[name]) for name, kind in kinds.items()},
    )
    if record.diverged not in DIVERGED or min(record.step, record.data["train"] - 1, record.seconds) < 0:
        raise ValueError("numbers of no run")
    last = max((curve["step"][-1] for curve in curves if len(curve["step"])), default=0)
    if not math.isfinite(record.seconds) or last > record.step:
        raise ValueError("curves longer than the run")
    return record


_NAME = re.compile(r"[0-9a-f]{24}\.(json|h5|seconds)")
# The largest archive that is read, in bytes, packed and unpacked (our choice).
MAX_PACKED, MAX_BYTES = 1 << 26, 1 << 30


@dataclass
class Store:
    """Small files by name: those of an archive, and of a folder what is not packed yet.

    Attributes:
        archive: the file, which need not exist.
        folder: where a new file is written at once, so that nothing is lost.
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
        """Make the archive one of the files ``names`` alone; where it is one, it is left as it is.

        Nothing in it depends on when and where it is packed.
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

"""The contents of a report: the runs and results in the files and folders that it was given."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import IMPORTED, SCHEMA, Checkpoint
from landscape.checkpoint.user_code import is_user_defined
from landscape.core import hdf5
from landscape.core.errors import InputError, OperationError
from landscape.core.files import printable
from landscape.plots.drawing import each_of
from landscape.plots.style import in_brackets, paper_name
from landscape.plots.surface import PLANES
from landscape.results import base
from landscape.results.grids import HessianGrid
from landscape.results.noise import Noise
from landscape.results.shown import Row
from landscape.results.spectrum import Spectrum
from landscape.results.surfaces import Surface

LONGEST = 300  # characters of a setting (ours)
# What a reader expects of each run, with the command that makes it.
_EXPECTED = {Surface: "contour", Spectrum: "spectrum", HessianGrid: "hessian-grid", Noise: "noise"}


@dataclass(frozen=True, eq=False)  # tensors and arrays cannot be compared
class Item:
    """A run or a result that the page shows.

    Attributes:
        of: the run or result.
        path: its file; None for a result that has none.
        sha256: of a run's file, by which results name it as their source; "" for a result.
        name: its label.
    """

    of: Any
    path: Path | None
    sha256: str
    name: str

    @property
    def heading(self) -> str:
        """The heading of its section: what can be drawn in one picture has the same."""
        if isinstance(self.of, Checkpoint):
            return "Weights of other programs" if self.of.algorithm == IMPORTED else "Training"
        if isinstance(self.of, Surface):
            norm = f", normalization: {self.of.norm}" if self.of.kind == "random" else ""
            loss = f"{self.of.split} {self.of.loss_name}{in_brackets(self.of.loss_unit)}".strip()
            return f"Contours: {loss} over {PLANES.get(self.of.kind, self.of.kind)}{norm}"
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self.of).__name__)
        return words[0] + words[1:].lower()

    @property
    def origin(self) -> list[Row]:
        """The file, and all settings that it holds: numbers and texts, not arrays."""
        known: dict[str, Any] = {"file": str(self.path or "not saved"), "SHA-256": self.sha256}
        known |= {f.name: getattr(self.of, f.name) for f in dataclasses.fields(self.of)}
        if isinstance(self.of, Checkpoint):
            known |= {"learners": self.of.learners, "weights of each": self.of.layout.size}
            about = {"model": self.of.model, "data": self.of.data}
            known |= {name: tuple(f"{k}: {v}" for k, v in of.items()) for name, of in about.items()}
            unknown = () if self.of.has_recipe else ("seed", "local_batch")
            known |= dict.fromkeys(unknown if self.of.diverged else (*unknown, "diverged_at"))
        said = {key.replace("_", " "): _said(value) for key, value in known.items()}
        return [Row(key, text[:LONGEST]) for key, text in said.items() if text and key != "recipe"]


def _said(value: Any) -> str:
    """A number, a text, or several texts, in words; "" for anything else."""
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return "; ".join(value)
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return str(value) if isinstance(value, (bool, int, str)) else ""


@dataclass(frozen=True)
class Contents:
    """Runs and results in the order given, the runs first; and notes on files left out."""

    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Checkpoint]:
        """The runs."""
        return [item.of for item in self.items if isinstance(item.of, Checkpoint)]

    def lacking(self, kind: type[base.Result]) -> list[Path]:
        """The files of the runs of which there is no result of ``kind``."""
        sources = {getattr(item.of, "source_sha256", "") for item in self.items if isinstance(item.of, kind)}
        return [i.path for i in self.items if i.path and i.sha256 and i.sha256 not in sources]

    def missing(self) -> list[tuple[str, str]]:
        """The analyses that are in no file, and for each the command that makes it of all runs."""
        runs, made = [item for item in self.items if item.sha256], []
        for kind, name in _EXPECTED.items():
            fit = [run for run in runs if kind is not Noise or run.of.learners > 1]
            if fit and not any(isinstance(item.of, kind) for item in self.items):
                made.append((name.replace("-", " "), _command(name, fit)))
        return made


def _command(name: str, runs: Sequence[Item]) -> str:
    places = [str(i.path.parent if i.path.name == "last.h5" else i.path) for i in runs if i.path]
    own = any(not i.of.data["name"] or is_user_defined(i.of.model["name"]) for i in runs)
    needed = " --model MODULE:NAME --data MODULE:NAME" if own else ""  # a file cannot bring code along
    return shlex.join(["landscape", name, *places]) + needed


def read(given: Any) -> Contents:
    """Read checkpoints, results and folders of runs; a folder brings the results that lie in it.

    Args:
        given: one or several names of files or folders, runs that have a file, or results.

    Raises:
        InputError: something else, or a run that was not saved.
        OperationError: a file that is missing, damaged or of another program, or a folder without a run. A
            damaged result in a folder is left out, with a note.
    """
    runs: dict[Path, tuple[Path, Checkpoint]] = {}
    results: dict[Path | int, tuple[Path | None, list[base.Result]]] = {}
    notes: list[str] = []
    for k, one in enumerate(each_of(given)):
        if isinstance(one, base.Result):
            results[k] = None, [one]
            continue
        place = one.path if isinstance(one, Checkpoint) else one
        if not isinstance(place, (str, Path)):
            shown = "a run without a file" if place is None else f"a {type(one).__name__}"
            raise InputError(f"runs: {shown} is not allowed, give a run with a file, a result or a path")
        folder = Path(place)
        path = run_folder.checkpoint_in(folder)
        if _schema(path) == SCHEMA:
            runs.setdefault(path.resolve(), (path, Checkpoint.load(path)))
        else:
            results.setdefault(path.resolve(), (path, base.load_results(path)))
        for other in sorted(folder.glob("*.h5")) if folder.is_dir() else ():
            try:
                if _schema(other) != SCHEMA:
                    results.setdefault(other.resolve(), (other, base.load_results(other)))
            except OperationError as error:
                notes.append(f"Left out: {printable(error)}")
    labels = [paper_name(run.label) for _, run in runs.values()]
    items = []
    for (at, run), label in zip(runs.values(), labels, strict=True):
        name = label if labels.count(label) == 1 else f"{label} ({at})"
        items.append(Item(run, at, hdf5.sha256(at), name))
    for file, of in results.values():
        for k, result in enumerate(of):
            label = " ".join(getattr(result, "label", "").split())
            items.append(Item(result, file, "", paper_name(label) or f"{type(result).__name__} {k}"))
    return Contents(tuple(items), tuple(notes))


def _schema(path: Path) -> str:
    with hdf5.reading(path, warn=False) as file:
        return str(file.attrs["schema"])

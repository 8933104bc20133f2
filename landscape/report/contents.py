"""What a report is about: the runs and results in the files and folders that it was given, by setting."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import SCHEMA, Checkpoint
from landscape.checkpoint.user_code import is_user_defined
from landscape.core import hdf5
from landscape.core.errors import FailedError
from landscape.core.files import printable
from landscape.plots.style import OTHER, color_of, paper_name, shades
from landscape.plots.training import recipe_keys
from landscape.report.parts import Missing
from landscape.results import base

NAMED = 4  # runs that a sentence names; its command has all of them (ours)
R = TypeVar("R", bound=base.Result)


@dataclass(frozen=True, eq=False)  # tensors cannot be compared
class Run:
    """A checkpoint with the history of its run.

    Attributes:
        path: its file.
        sha256: of the file; results name it as their source.
        name: its label, with its folder where several runs have one label.
    """

    checkpoint: Checkpoint
    path: Path
    sha256: str
    name: str

    @property
    def shown_path(self) -> Path:
        """What a command takes: the folder of a run's last.h5, or the file."""
        return self.path.parent if self.path.name == "last.h5" else self.path


@dataclass(frozen=True)
class Found:
    """A result and the file that it lies in."""

    result: base.Result
    path: Path


@dataclass(frozen=True)
class Contents:
    """All runs and results, in the order in which they were given, and notes on files left out."""

    runs: tuple[Run, ...]
    found: tuple[Found, ...]
    notes: tuple[str, ...] = ()

    def of(self, kind: type[R]) -> list[tuple[R, Path]]:
        """The results of one kind, with their files."""
        return [(f.result, f.path) for f in self.found if isinstance(f.result, kind)]

    def run_of(self, result: base.Result) -> Run | None:
        """The run that ``result`` was computed from, if it is among the runs."""
        source = getattr(result, "source_sha256", "")
        return next((run for run in self.runs if source and source == run.sha256), None)

    def lacking(self, kind: type[base.Result], /, **fields: str) -> list[Run]:
        """The runs of which there is no result of ``kind``, with these values of its fields."""
        return [
            run
            for run in self.runs
            if not any(
                self.run_of(result) is run and all(getattr(result, k) == v for k, v in fields.items())
                for result, _ in self.of(kind)
            )
        ]


def read(paths: Iterable[Path]) -> Contents:
    """Read checkpoints, results and folders of runs; a folder brings the results that lie in it.

    Raises:
        FailedError: a file that is missing, damaged or of another program, or a folder without a run. A
            damaged result that was found in a folder is left out, with a note.
    """
    checkpoints: dict[Path, Checkpoint] = {}
    found: dict[Path, list[base.Result]] = {}
    notes: list[str] = []
    for given in paths:
        path = run_folder.checkpoint_in(given)
        _read_file(path, checkpoints, found)
        if given.is_dir():
            for other in sorted(given.glob("*.h5")):
                try:
                    if _schema(other) != SCHEMA:
                        _read_file(other, checkpoints, found)
                except FailedError as error:
                    notes.append(f"Left out: {printable(error)}")
    known = {path.resolve(): (path, checkpoint) for path, checkpoint in checkpoints.items()}
    names = _names([checkpoint for _, checkpoint in known.values()])
    runs = [
        Run(checkpoint, path, hdf5.sha256(path), name)
        for (path, checkpoint), name in zip(known.values(), names, strict=True)
    ]
    results = {path.resolve(): (path, parts) for path, parts in found.items()}
    every = [Found(_named(result), path) for path, parts in results.values() for result in parts]
    return Contents(tuple(runs), tuple(every), tuple(notes))


def missing_of(text: str, command: str, options: str, runs: Sequence[Run]) -> tuple[Missing, ...]:
    """That something is missing of ``runs``, with the one command that makes it; nothing for no runs."""
    if not runs:
        return ()
    names = [run.name for run in runs]
    shown = "; ".join(names[:NAMED]) + (f"; and {len(names) - NAMED} more" if len(names) > NAMED else "")
    words = ["landscape", command, *(str(run.shown_path) for run in runs), *options.split()]
    own = any(not r.checkpoint.data["name"] or is_user_defined(r.checkpoint.model["name"]) for r in runs)
    needed = " --model MODULE:NAME --data MODULE:NAME" if own else ""  # a file cannot bring code along
    return (Missing(f"{text} {shown}.", shlex.join(words) + needed),)


def _named(result: base.Result) -> base.Result:
    """``result`` with the algorithm in its label named as in the papers."""
    if not any(field.name == "label" for field in dataclasses.fields(result)):
        return result
    changed: dict[str, Any] = {"label": paper_name(getattr(result, "label", ""))}
    return dataclasses.replace(result, **changed)


def _schema(path: Path) -> str:
    with hdf5.reading(path, warn=False) as file:
        return str(file.attrs["schema"])


def _read_file(path: Path, checkpoints: dict[Path, Checkpoint], found: dict[Path, list[base.Result]]) -> None:
    if path in checkpoints or path in found:
        return
    if _schema(path) == SCHEMA:
        checkpoints[path] = Checkpoint.load(path)
    else:
        found[path] = base.load_results(path)


def _names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The labels; with the folder, or else the path, where labels are equal."""
    labels = [paper_name(c.label) for c in checkpoints]
    places = [c.path or Path() for c in checkpoints]
    folders = [f"{name} ({path.resolve().parent.name})" for name, path in zip(labels, places, strict=True)]
    paths = [f"{name} ({path})" for name, path in zip(labels, places, strict=True)]
    shared, again = Counter(labels), Counter(folders)
    return [
        label if shared[label] == 1 else folder if again[folder] == 1 else path
        for label, folder, path in zip(labels, folders, paths, strict=True)
    ]


# For loops of others, which have no colour in that table.
_OTHERS = ("#56B4E9", "#CC79A7", "#E69F00", "#999999")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed.

    Attributes:
        name: the algorithm as papers write it, with the keys in which settings of one algorithm differ.
        color: of its lines.
        places: of its runs among all runs.
    """

    name: str
    color: str
    places: tuple[int, ...]


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """The settings of ``runs``, in the order of their first runs."""
    keys = [_keys(run) for run in runs]
    places: dict[tuple[Any, ...], list[int]] = {}
    for k, (run, key) in enumerate(zip(runs, keys, strict=True)):
        unknown = () if run.checkpoint.has_recipe else (run.name,)  # nothing says what two loops share
        places.setdefault((run.checkpoint.algorithm, *unknown, *sorted(key.items())), []).append(k)
    settings: list[Setting] = []
    tones = _tones([runs[members[0]].checkpoint.algorithm for members in places.values()])
    for members, color in zip(places.values(), tones, strict=True):
        run, key = runs[members[0]], keys[members[0]]
        algorithm = run.checkpoint.algorithm
        same = [other for r, other in zip(runs, keys, strict=True) if r.checkpoint.algorithm == algorithm]
        differing = [k for k, v in key.items() if any(other.get(k) != v for other in same)]
        name = paper_name(algorithm) if run.checkpoint.has_recipe else run.name
        words = [name, *(f"{k.rpartition('.')[2]} {key[k]}" for k in differing[:3])]
        settings.append(Setting(", ".join(words), color, tuple(members)))
    return settings


def _tones(algorithms: Sequence[str]) -> list[str]:
    """A colour for each setting: shades of its algorithm's colour; others in turn."""
    tones = {
        name: iter(shades(color_of(name), algorithms.count(name)))
        for name in algorithms
        if color_of(name) != OTHER
    }
    others = itertools.cycle(_OTHERS)
    return [next(tones[name]) if name in tones else next(others) for name in algorithms]


def lines_of(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The colour of each run's setting, and a dash that tells its seeds apart."""
    lines: list[dict[str, str]] = [{} for _ in runs]
    for setting in settings_of(runs):
        for k, place in enumerate(setting.places):
            lines[place] = {"color": setting.color, "dash": _DASHES[k % len(_DASHES)]}
    return lines


def _keys(run: Run) -> dict[str, str]:
    """The keys of a run's recipe with their values as texts; none for a loop without a recipe."""
    checkpoint = run.checkpoint
    return {k: str(v) for k, v in recipe_keys(checkpoint).items()} if checkpoint.has_recipe else {}

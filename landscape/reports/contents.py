"""The contents of a report: the runs and results in the files and folders that it was given, by setting."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import SCHEMA, Checkpoint
from landscape.checkpoint.user_code import is_user_defined
from landscape.core import hdf5
from landscape.core.errors import InputError, OperationError
from landscape.core.files import printable
from landscape.plots.drawing import each_of
from landscape.plots.style import colors_of, paper_name
from landscape.plots.training import groups_of
from landscape.reports.parts import Missing
from landscape.results import base

_UNSAVED = Path("RESULT.h5")  # in place of the file of a result that has none
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
        """The path that a command takes: the folder of a run's last.h5, or the file."""
        return self.path.parent if self.path.name == "last.h5" else self.path


@dataclass(frozen=True)
class Contents:
    """All runs, and results with their files, in the order given; and notes on files left out."""

    runs: tuple[Run, ...]
    found: tuple[tuple[base.Result, Path], ...]
    notes: tuple[str, ...] = ()

    def of(self, kind: type[R]) -> list[R]:
        """The results of one kind."""
        return [result for result, _ in self.found if isinstance(result, kind)]

    def others(self, *known: type[base.Result]) -> dict[type[base.Result], list[base.Result]]:
        """The results of all kinds but those ``known``, by kind."""
        kinds: dict[type[base.Result], list[base.Result]] = {}
        for result, _ in self.found:
            if not isinstance(result, known):
                kinds.setdefault(type(result), []).append(result)
        return kinds

    def run_of(self, result: base.Result) -> Run | None:
        """The run that ``result`` was computed from, if it is among the runs."""
        source = getattr(result, "source_sha256", "")
        return next((run for run in self.runs if source and source == run.sha256), None)

    def lacking(self, kind: type[base.Result], /, **fields: str) -> list[Run]:
        """The runs of which there is no result of ``kind``, with these values of its fields."""
        having = [
            self.run_of(result)
            for result in self.of(kind)
            if all(getattr(result, name) == value for name, value in fields.items())
        ]
        return [run for run in self.runs if run not in having]


def read(given: Any) -> Contents:
    """Read checkpoints, results and folders of runs; a folder brings the results that lie in it.

    Args:
        given: one or several names of files or folders, runs that have a file, or results.

    Raises:
        InputError: something else, or a run that was not saved.
        OperationError: a file that is missing, damaged or of another program, or a folder without a run. A
            damaged result that was found in a folder is left out, with a note.
    """
    loaded: dict[Path, tuple[Path, Checkpoint | list[base.Result]]] = {}
    notes: list[str] = []

    def load(path: Path, schema: str) -> None:
        if path.resolve() not in loaded:
            of = Checkpoint.load(path) if schema == SCHEMA else base.load_results(path)
            loaded[path.resolve()] = path, of

    for k, one in enumerate(each_of(given)):
        if isinstance(one, base.Result):
            loaded[Path(f"result {k}")] = _UNSAVED, [one]
            continue
        place = one.path if isinstance(one, Checkpoint) else one
        if not isinstance(place, (str, Path)):
            shown = "a run without a file" if place is None else f"a {type(one).__name__}"
            raise InputError(f"runs: {shown} is not allowed, give a run with a file, a result or a path")
        path = run_folder.checkpoint_in(Path(place))
        load(path, _schema(path))
        for other in sorted(Path(place).glob("*.h5")) if Path(place).is_dir() else ():
            try:
                if (schema := _schema(other)) != SCHEMA:
                    load(other, schema)
            except OperationError as error:
                notes.append(_left_out(error))
    known = [(path, of) for path, of in loaded.values() if isinstance(of, Checkpoint)]
    named = zip(known, _names([checkpoint for _, checkpoint in known]), strict=True)
    runs = tuple(Run(of, path, hdf5.sha256(path), name) for (path, of), name in named)
    results = [(path, of) for path, of in loaded.values() if not isinstance(of, Checkpoint)]
    return Contents(runs, tuple((_named(r), path) for path, of in results for r in of), tuple(notes))


def _left_out(error: OperationError) -> str:
    return f"Left out: {printable(error)}"


def missing_of(text: str, command: str, options: str, runs: Sequence[Run]) -> tuple[Missing, ...]:
    """A note that something is missing of ``runs``, with the command that makes it; nothing for no runs."""
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
    if all(field.name != "label" for field in dataclasses.fields(result)):
        return result
    changed: dict[str, Any] = {"label": paper_name(getattr(result, "label", ""))}
    return dataclasses.replace(result, **changed)


def _schema(path: Path) -> str:
    with hdf5.reading(path, warn=False) as file:
        return str(file.attrs["schema"])


def name_of(checkpoint: Checkpoint) -> str:
    """The label of a run without its step."""
    label = paper_name(checkpoint.label)
    return label.rpartition(", step ")[0] or label


def _names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The labels; with the step, the folder, or else the path, where they are equal without."""
    labels = [name_of(c) for c in checkpoints]
    if len(set(labels)) < len(labels):
        labels = [paper_name(c.label) for c in checkpoints]
    places = [c.path or Path() for c in checkpoints]
    folders = [f"{name} ({path.resolve().parent.name})" for name, path in zip(labels, places, strict=True)]
    paths = [f"{name} ({path})" for name, path in zip(labels, places, strict=True)]
    shared, again = Counter(labels), Counter(folders)
    return [
        label if shared[label] == 1 else folder if again[folder] == 1 else path
        for label, folder, path in zip(labels, folders, paths, strict=True)
    ]


# For loops of others, which have no color in that table.
_OTHERS = ("#56B4E9", "#CC79A7", "#E69F00", "#999999")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed.

    Attributes:
        name: the algorithm as papers write it, with the keys in which settings of one algorithm differ.
        color: of its lines.
        places: of its runs among all runs.
    """

    name: str
    color: str
    places: tuple[int, ...]


def seed_groups(runs: Sequence[Run]) -> list[SeedGroup]:
    """The settings of ``runs``, in the order of their first runs; loops without a recipe are one each."""
    known = [run.checkpoint for run in runs if run.checkpoint.has_recipe]
    named = {id(c): (k, name) for k, (name, _, of) in enumerate(groups_of(known)) for c in of}
    places: dict[tuple[int, str], list[int]] = {}
    for k, run in enumerate(runs):
        places.setdefault(named.get(id(run.checkpoint), (-1, run.name)), []).append(k)
    tones = colors_of([runs[of[0]].checkpoint.algorithm for of in places.values()], _OTHERS)
    colored = zip(places.items(), tones, strict=True)
    return [SeedGroup(name, color, tuple(of)) for ((_, name), of), color in colored]


def lines_of(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The color of each run's setting, and a dash that tells its seeds apart."""
    lines: list[dict[str, str]] = [{} for _ in runs]
    for setting in seed_groups(runs):
        for k, place in enumerate(setting.places):
            lines[place] = {"color": setting.color, "dash": _DASHES[k % len(_DASHES)]}
    return lines

"""The context in which figures are made: runs and analyses, each made once, stored by the hash of its inputs.

A run is in FOLDER/runs/HASH, with the hash of its recipe, and its record is HASH.json; an analysis is
HASH.h5, with that of its runs, its settings and the version of its numerics. They are written to
FOLDER/records, and packed into two archives in RECORDS, of the figure's runs and of its analyses, when it is
drawn. So figures share them, an interrupted computation resumes, and the archives alone are enough to draw.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from landscape import data
from landscape.analysis.grids import contour, hessian_grid
from landscape.analysis.planes import random_plane
from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.devices import pick_device
from landscape.core.files import make_folder
from landscape.core.hdf5 import Array
from landscape.core.progress import Progress, progress_bar
from landscape.core.registry import version_of
from landscape.paper.record import Record, Store
from landscape.paper.verdicts import Rows
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.results.grids import HessianGrid
from landscape.results.surfaces import Surface
from landscape.training.processes import children
from landscape.training.recipes import Monitor
from landscape.training.recipes.recipe import Recipe
from landscape.training.run import launch
from landscape.training.run.launch import TrainingJob, train_runs
from landscape.training.run.loop import Trainer

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
R = TypeVar("R", bound=base.Result)


class OutOfTimeError(Exception):
    """The budget is used: what is done is stored, and the same command goes on."""


class WeightsNeededError(Exception):
    """The weights of a run are needed, which is known by its record alone."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


@dataclass(frozen=True)
class Cell:
    """A run of a figure.

    Attributes:
        values: what the run stands for, with its seed; in the figure's table these are columns, but for those
            whose name begins with "_".
        recipe: of the run.
    """

    values: Mapping[str, Any]
    recipe: Recipe


@dataclass(frozen=True)
class Point:
    """A run at a step at which its weights were saved; they are read only where they are needed.

    ``history`` is that of the run's record, up to this step.
    """

    folder: Path
    recipe: Recipe
    step: int
    epoch: float
    label: str
    history: Mapping[str, Array]

    @property
    def key(self) -> list[Any]:
        """The identity of the weights: of the run, and the step."""
        return [identity(self.recipe), self.step]

    def load(self) -> Checkpoint:
        """Load the checkpoint with its weights. Raises WeightsNeededError if the run's folder lacks it."""
        path = self.folder / f"step-{self.step:07d}.h5"
        if not path.exists():
            raise WeightsNeededError(self.recipe)
        return Checkpoint.load(path, whole_history=False)


@dataclass(frozen=True)
class Ended:
    """A run of a figure that has ended, as its record has it: a history and no weights.

    Attributes:
        values: of its cell.
        end: its end.
        last: the same with weights, which are read where they are needed.
        points: the run where its weights were saved, in order, without its start.
    """

    values: Mapping[str, Any]
    end: Checkpoint
    last: Point
    points: list[Point]


@dataclass
class Context:
    """The runs of one figure at a scale, its analyses, and how and where both are made and stored.

    Attributes:
        folder: of the runs with their weights.
        scale: of the figure.
        device, data_dir, pool: for the training of runs, and for analyses, which are computed here.
        message: takes a line when a run ends.
        progress: takes the share of the runs that is done.
        records: the folder of archives that figures are drawn from; by default FOLDER/records.
        until: nothing is begun after this time, as time.time() has it, and a run that goes on then stops; it
            resumes from its last checkpoint.
        runs_with_weights: the runs, by their ``identity``, whose weights are not deleted once the record is
            written; None keeps all.
        cells: the runs of the figure.
        sizes: its numbers for this scale.
        seconds: of the analyses of the figure.
        versions: of the numerics of all that was trained and computed for it.
        archives: the names of those of its runs and of its analyses.
    """

    folder: Path
    scale: Scale = "laptop"
    device: str = "auto"
    data_dir: str | None = None
    pool: children.Pool = field(default_factory=children.Pool)
    message: Callable[[str], None] = lambda line: None
    progress: Progress = lambda share: None
    records: Path | None = None
    until: float = math.inf
    runs_with_weights: set[str] | None = None
    cells: Sequence[Cell] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, int] = field(default_factory=dict)
    archives: tuple[str, str] = ("runs", "analyses")
    # The files of the analyses that were asked for.
    _requested: set[str] = field(default_factory=set)
    # Read once, for all figures.
    _data: dict[str, Any] = field(default_factory=dict)
    _records: dict[str, Record] = field(default_factory=dict)
    _stores: dict[str, Store] = field(default_factory=dict)

    def of(self, cells: Sequence[Cell], **changes: Any) -> Context:
        """Return the same for a figure with these ``cells``, of which nothing is computed yet."""
        return dataclasses.replace(self, cells=cells, seconds=0.0, versions={}, _requested=set(), **changes)

    def _store(self, name: str) -> Store:
        """Return the archive ``name``, and what is not packed yet."""
        loose = self.folder / "records"
        archive = (self.records or loose) / f"{name}.tar.xz"
        return self._stores.setdefault(name, Store(archive, loose))

    def pack(self, complete: bool) -> None:
        """Pack the runs that have ended and the analyses into the archives of the figure.

        ``complete``: all analyses were asked for, so that others in their archive are of no use.
        """
        runs, analyses = map(self._store, self.archives)
        runs.pack(f"{identity(cell.recipe)}.json" for cell in self.cells if self.record(cell.recipe))
        analyses.pack(self._requested if complete else self._requested | {*analyses.packed})

    # ---- Runs

    def run_folder(self, recipe: Recipe) -> Path:
        """Return the folder of the run of ``recipe``, whatever its name."""
        return self.folder / "runs" / identity(recipe)

    def record(self, recipe: Recipe) -> Record | None:
        """Return the record of the run of ``recipe``; None if it has not ended.

        Of a run that has ended without a record, that is written now.

        Raises:
            OperationError: a damaged record, or a folder that holds a run of another recipe.
        """
        name, unnamed, runs = f"{identity(recipe)}.json", _unnamed(recipe), self._store(self.archives[0])
        if name not in self._records:
            if (stored := runs.read(name)) is None:
                folder = self.run_folder(recipe)
                end = launch.ended(unnamed, folder)
                if end is None:
                    return None
                steps = [Checkpoint.load(p, lambda n: slice(0), whole_history=False).step
                         for p in storage.steps(folder)]  # fmt: skip
                stored = Record.of(end, steps).to_json()
                runs.add(name, stored)
            # As it is stored, rounded, so that all draw from the same numbers.
            self._records[name] = Record.read(stored, unnamed, f"{runs.archive}, {name}")
        return self._records[name]

    def missing(self) -> list[Recipe]:
        """Return the recipes of the runs that have not ended yet, each once."""
        recipes = {identity(cell.recipe): cell.recipe for cell in self.cells}
        return [recipe for recipe in recipes.values() if self.record(recipe) is None]

    def train(self, recipes: Iterable[Recipe]) -> None:
        """Train ``recipes`` whose weights are not in FOLDER; an interrupted run resumes.

        Raises:
            OperationError: a run could not be made.
        """
        folders = {self.run_folder(recipe): _unnamed(recipe) for recipe in recipes}  # each once
        todo = [TrainingJob(r, folder) for folder, r in folders.items() if launch.ended(r, folder) is None]
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        done = 0

        def ended(run: TrainingJob, seconds: float | None) -> None:
            nonlocal done
            if seconds is None:  # the time was over
                return
            done, recipe = done + 1, run.recipe
            self.record(recipe)
            if self.runs_with_weights is not None and identity(recipe) not in self.runs_with_weights:
                shutil.rmtree(run.folder)
            self.message(
                f"{done} of {len(todo)}: {recipe.algorithm['name']}, {recipe.model['name']}, lr "
                f"{recipe.lr:g}, batch {recipe.batch}, seed {recipe.seed}: {seconds:.0f} s"
            )
            self.progress(done / len(todo))

        train_runs(
            todo,
            ended,
            lambda share: self.progress((done + share) / len(todo)),
            pool=self.pool,
            device=self.device,
            data_dir=self.data_dir,
            until=None if math.isinf(self.until) else self.until,
        )

    def check_time(self) -> None:
        """Raise ``OutOfTimeError`` once the budget is used."""
        if time.time() > self.until:
            raise OutOfTimeError

    def ended(self, **values: Any) -> list[Ended]:
        """Return the runs of the figure that have ended and have these ``values``."""
        chosen = [c for c in self.cells if all(c.values[name] == value for name, value in values.items())]
        return [self._end(cell, record) for cell in chosen if (record := self.record(cell.recipe))]

    def _end(self, cell: Cell, record: Record) -> Ended:
        self.versions["training"] = record.numerics
        end = record.checkpoint()
        points = [self._point(cell.recipe, end, step) for step in record.checkpoints if step]
        return Ended(cell.values, end, self._point(cell.recipe, end, end.step), points)

    def table(self, measure: Callable[[Ended], Any], **values: Any) -> Rows:
        """Return a table of the runs that have ended: what they stand for, and what ``measure`` gives.

        Args:
            measure: gives columns of a run, or several rows of such: a list, or a table.
            values: of the runs that are meant; by default all.
        """
        import pandas as pd

        tables = []
        for run in self.ended(**values):
            measured = measure(run)
            rows = pd.DataFrame([measured] if isinstance(measured, dict) else measured)
            first = {name: value for name, value in run.values.items() if not name.startswith("_")}
            tables.append(pd.DataFrame(first, index=rows.index).join(rows))
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()

    # ---- Weights

    def _point(self, recipe: Recipe, end: Checkpoint, step: int) -> Point:
        rows = end.history["step"] <= step
        label, epoch = f"{end.algorithm}, seed {end.seed}, step {step:,}", step * end.epoch / max(1, end.step)
        history = {name: column[rows] for name, column in end.history.items()}
        return Point(self.run_folder(recipe), recipe, step, epoch, label, history)

    def dataset(self, name: str, options: Mapping[str, Any]) -> data.Dataset:
        """Return a data set, which is read once. OperationError for a missing one says what to download."""
        key = digest(name, dict(options))
        if key not in self._data:
            self._data[key] = data.load(name, data_dir=self.data_dir, **options)
        return self._data[key]

    def problem(
        self, point: Point | Checkpoint, split: str = "test", learner: str | int = "mean", samples: int = 0
    ) -> Problem:
        """Return the problem of a run with the data of its recipe, on its first ``samples`` (0: all)."""
        end = point.load() if isinstance(point, Point) else point
        dataset = self.dataset(end.data["name"], end.data["options"])
        end.check_data(dataset)
        problem = end.problem(split, learner, data=dataset, device=pick_device(self.device))
        return problem.subset(slice(min(samples, problem.samples))) if samples else problem

    # ---- Analyses

    def cached(
        self,
        kind: type[R],
        points: Point | Sequence[Point],
        settings: Mapping[str, Any],
        make: Callable[[], R | Sequence[R]],
        by: Sequence[Any],
    ) -> list[R]:
        """Return ``make()``, computed once for these points, ``settings`` and the versions of ``by``.

        These must be all that it depends on; ``by`` are functions and classes under
        ``landscape.core.registry.numerics``, whose names do not count. Of the plane of a surface only
        lengths and angles are stored (:meth:`.Surface.compact`).

        Raises:
            OutOfTimeError: it is not stored, and the budget is used.
            OperationError: its file is damaged; once that is deleted, it is computed again.
        """
        several = [points] if isinstance(points, Point) else list(points)
        versions = [version_of(function) for function in by]
        self.versions |= {function.__name__: version_of(function) for function in by}
        what = {"of": [point.key for point in several], "numerics": versions, **settings}
        key, store = digest(kind.schema, what), self._store(self.archives[1])
        name, took = f"{key}.h5", f"{key}.seconds"
        self._requested |= {name, took}
        path, content = store.folder / name, store.packed.get(name)
        if content is not None and not path.exists():
            store.add(name, content)
        if path.exists():
            results = base.load_results(path)
        else:
            self.check_time()
            clock = time.perf_counter()
            with progress_bar(kind.__name__):
                computed = make()
            computed_list = [computed] if isinstance(computed, base.Result) else list(computed)
            results = [
                result.compact() if isinstance(result, Surface) else result for result in computed_list
            ]
            make_folder(store.folder)
            base.save(results, path)
            store.add(took, f"{time.perf_counter() - clock:.1f}\n".encode())
        self.seconds += float(store.read(took) or 0)
        return [result for result in results if isinstance(result, kind)]

    def contour(self, point: Point, label: str = "", **settings: Any) -> Surface:
        """Compute the contour of the test loss around w_a; with ``samples`` 0, over all.

        What is not given is as in the figure's sizes.
        """
        return self._around(Surface, contour, point, label, {**self.sizes, **settings})

    def hessian_grid(self, point: Point, label: str = "") -> HessianGrid:
        """Compute the Hessian ratios of the test loss around w_a, by the figure's sizes."""
        settings = dict(self.sizes)
        most = settings["products"]
        return self._around(HessianGrid, hessian_grid, point, label, settings, max_products=most)

    def _around(
        self, kind: type[R], analysis: Any, point: Point, label: str, settings: dict[str, Any], **options: Any
    ) -> R:
        """Return the ``analysis`` of a random plane around w_a, with the test loss."""

        def make() -> R:
            problem, grid = self.problem(point, samples=settings.get("samples", 0)), settings["grid"]
            plane, name = random_plane(problem, norm=settings.get("norm", "none")), label or point.label
            span = settings.get("span", 0.1)
            return analysis(problem, plane, (grid, grid), span, split="test", label=name, **options)

        return self.cached(kind, point, settings | {"label": label}, make, (analysis, random_plane))[0]


def digest(*parts: Any) -> str:
    """Return 24 hex digits that identify the result of ``parts`` (strings, numbers, lists and dicts)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def identity(recipe: Recipe) -> str:
    """Return a hash of the settings of ``recipe`` without defaults and name: a new key keeps old runs.

    Runs of another version of the training's numerics have another one.
    """
    return digest(_non_default(_unnamed(recipe)), version_of(Trainer))


# Fields under whose names before 0.18 runs are known.
_FORMER = {(Recipe, "autocast"): "precision", (Monitor, "k"): "top"}


def _non_default(part: Any) -> dict[str, Any]:
    """Return the fields of a recipe, or of a table in it, that differ from their defaults."""
    return {
        _FORMER.get((type(part), entry.name), entry.name): _non_default(value)
        if dataclasses.is_dataclass(value)
        else value
        for entry in dataclasses.fields(part)
        for value in [getattr(part, entry.name)]
        if value
        != (entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory())
    }


def _unnamed(recipe: Recipe) -> Recipe:
    """Return ``recipe`` without its own name, in which equal recipes may differ."""
    return dataclasses.replace(recipe, name=recipe.algorithm["name"])

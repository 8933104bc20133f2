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
    """The budget is used up: finished work is stored, and the same command resumes."""


class WeightsNeededError(Exception):
    """An analysis needs the weights of a run of which only the record is stored."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


@dataclass(frozen=True)
class Cell:
    """A run of a figure.

    Attributes:
        values: the settings that name the run, with its seed: columns of the figure's table, except for names
            that begin with "_".
        recipe: recipe of the run.
    """

    values: Mapping[str, Any]
    recipe: Recipe


@dataclass(frozen=True)
class Point:
    """A run at a step at which its weights were saved; :meth:`load` reads the weights.

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
    """A run of a figure that has ended.

    Attributes:
        values: settings that name the run, from its cell.
        end: the last checkpoint without weights: the history and the settings, from the run's record.
        last: the last step, whose weights ``Point.load`` reads.
        points: all steps with saved weights, in order, without the start.
    """

    values: Mapping[str, Any]
    end: Checkpoint
    last: Point
    points: list[Point]


@dataclass
class Context:
    """The runs of one figure at a scale, its analyses, and how and where both are made and stored.

    Attributes:
        folder: folder of the runs with their weights.
        scale: scale of the figure.
        device, data_dir, pool: for the training of runs and for analyses.
        message: called with a line when a run ends.
        progress: called with the finished share of the runs.
        records: the folder of archives from which figures are drawn; by default FOLDER/records.
        until: end of the budget, as of time.time(): nothing begins after it, and a run that is not finished
            stops; it resumes from its last checkpoint.
        runs_with_weights: the ``identity`` of runs whose weights are kept after the record is written; None
            keeps all.
        cells: the runs of the figure.
        sizes: the figure's numbers for this scale.
        seconds: seconds of the figure's analyses.
        versions: versions of the numerics of training and of all analyses.
        archives: names of the archives of the runs and of the analyses.
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
        """Return a context like this one for a figure with these ``cells``, before any analysis."""
        return dataclasses.replace(self, cells=cells, seconds=0.0, versions={}, _requested=set(), **changes)

    def _store(self, name: str) -> Store:
        """Return the store of the archive ``name``, which also has the files that are not packed yet."""
        loose = self.folder / "records"
        archive = (self.records or loose) / f"{name}.tar.xz"
        return self._stores.setdefault(name, Store(archive, loose))

    def pack(self, complete: bool) -> None:
        """Pack the runs that have ended and the analyses into the archives of the figure.

        ``complete``: whether all analyses of the figure were asked for; the archive then keeps no others.
        """
        runs, analyses = map(self._store, self.archives)
        runs.pack(f"{identity(cell.recipe)}.json" for cell in self.cells if self.record(cell.recipe))
        analyses.pack(self._requested if complete else self._requested | {*analyses.packed})

    # ---- Runs

    def run_folder(self, recipe: Recipe) -> Path:
        """Return the folder of the run of ``recipe``, whatever its name."""
        return self.folder / "runs" / identity(recipe)

    def record(self, recipe: Recipe) -> Record | None:
        """Return the record of the run of ``recipe``, written now if missing; None for an unfinished run.

        Raises:
            OperationError: a damaged record, or a folder that holds a run of another recipe.
        """
        name, unnamed, store = f"{identity(recipe)}.json", _unnamed(recipe), self._store(self.archives[0])
        if name not in self._records:
            content = store.read(name)
            if content is None:
                folder = self.run_folder(recipe)
                end = launch.ended(unnamed, folder)
                if end is None:
                    return None
                steps = [Checkpoint.load(path, lambda n: slice(0), whole_history=False).step
                         for path in storage.steps(folder)]  # fmt: skip
                content = Record.of(end, steps).to_json()
                store.add(name, content)
            # Always read from the file, whose numbers are rounded, so that all figures use the same numbers.
            self._records[name] = Record.read(content, unnamed, f"{store.archive}, {name}")
        return self._records[name]

    def missing(self) -> list[Recipe]:
        """Return the recipes of the runs that have not ended yet, each once."""
        recipes = {identity(cell.recipe): cell.recipe for cell in self.cells}
        return [recipe for recipe in recipes.values() if self.record(recipe) is None]

    def train(self, recipes: Iterable[Recipe]) -> None:
        """Train the runs of ``recipes`` that have not ended in this context's folder; write their records.

        An interrupted run resumes. If ``runs_with_weights`` is not None, the folder of a run that is not
        in this set is deleted once the run's record is written.

        Raises:
            OperationError: a run could not be made.
        """
        # A run that several recipes describe, under different names, has one folder and is trained once.
        recipe_in = {self.run_folder(recipe): _unnamed(recipe) for recipe in recipes}
        jobs = [TrainingJob(r, folder) for folder, r in recipe_in.items() if launch.ended(r, folder) is None]
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        ended_count = 0

        def after_run(job: TrainingJob, seconds: float | None) -> None:
            """Write the record of a run, and report that it ended; ``seconds`` is None for a stopped run."""
            nonlocal ended_count
            if seconds is None:  # stopped because the time budget has run out
                return
            ended_count += 1
            recipe = job.recipe
            self.record(recipe)
            if self.runs_with_weights is not None and identity(recipe) not in self.runs_with_weights:
                shutil.rmtree(job.folder)
            self.message(
                f"{ended_count} of {len(jobs)}: {recipe.algorithm['name']}, {recipe.model['name']}, lr "
                f"{recipe.lr:g}, batch {recipe.batch}, seed {recipe.seed}: {seconds:.0f} s"
            )
            self.progress(ended_count / len(jobs))

        def show_progress(share: float) -> None:
            """Report the progress of all runs, given the completed ``share`` of the present run.

            train_runs calls this function only if it trains one run at a time.
            """
            self.progress((ended_count + share) / len(jobs))

        train_runs(
            jobs, after_run, show_progress, pool=self.pool, device=self.device, data_dir=self.data_dir,
            until=None if math.isinf(self.until) else self.until,
        )  # fmt: skip

    def check_time(self) -> None:
        """Raise ``OutOfTimeError`` once the budget is used up."""
        if time.time() > self.until:
            raise OutOfTimeError

    def ended(self, **values: Any) -> list[Ended]:
        """Return the runs of the figure that have ended and have these ``values``."""
        ends = []
        for cell in self.cells:
            matches = all(cell.values[name] == value for name, value in values.items())
            if matches and (record := self.record(cell.recipe)):
                self.versions["training"] = record.numerics
                end = record.checkpoint()
                points = [self._point(cell.recipe, end, step) for step in record.checkpoints if step]
                ends.append(Ended(cell.values, end, self._point(cell.recipe, end, end.step), points))
        return ends

    def table(self, measure: Callable[[Ended], Any], **values: Any) -> Rows:
        """Return a table of the runs that have ended: the values of their cells, and their measurements.

        Args:
            measure: returns a row of a run as a dict, or several rows, or a table.
            values: values of the runs; by default, all runs.
        """
        import pandas as pd

        tables = []
        for run in self.ended(**values):
            measured = measure(run)
            rows = pd.DataFrame([measured] if isinstance(measured, dict) else measured)
            cell_values = {name: value for name, value in run.values.items() if not name.startswith("_")}
            tables.append(pd.DataFrame(cell_values, index=rows.index).join(rows))
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
        self, kind: type[R], points: Point | Sequence[Point], settings: Mapping[str, Any],
        make: Callable[[], R | Sequence[R]], functions: Sequence[Any],
    ) -> list[R]:  # fmt: skip
        """Return the results of ``make()``: read them from their file, or compute and write them.

        The name of the file is a hash of the class ``kind``, the ``points``, the ``settings`` and the
        versions of the ``functions``. So the results are computed again after a change of a version. A stored
        surface has the lengths of its plane's two directions and the angle between them, but not the
        directions themselves (:meth:`.Surface.compact`).

        Args:
            kind: the class of the results.
            points: the weights on which the results depend.
            settings: all other numbers and texts on which the results depend.
            make: computes the results.
            functions: the functions and classes that ``make`` calls and that have a version
                (``registry.numerics``).

        Raises:
            OutOfTimeError: there is no file, and the time budget is used up.
            OperationError: the file is damaged. It is neither deleted nor replaced.
        """
        point_list = [points] if isinstance(points, Point) else list(points)
        versions = [version_of(function) for function in functions]
        self.versions |= {function.__name__: version_of(function) for function in functions}
        # "of" means the points. A clearer key would change the hash, and so the names of all stored files.
        inputs = {"of": [point.key for point in point_list], "numerics": versions, **settings}
        _, name_of_archive = self.archives  # the first archive has the runs
        key, store = digest(kind.schema, inputs), self._store(name_of_archive)
        name, seconds_name = f"{key}.h5", f"{key}.seconds"
        self._requested |= {name, seconds_name}
        path, packed_content = store.folder / name, store.packed.get(name)
        if packed_content is not None and not path.exists():
            store.add(name, packed_content)  # as a file: HDF5 cannot read from the archive
        if path.exists():
            results = base.load_results(path)
        else:
            self.check_time()
            start = time.perf_counter()
            with progress_bar(kind.__name__):
                new_results = make()
            results = [new_results] if isinstance(new_results, base.Result) else list(new_results)
            results = [result.compact() if isinstance(result, Surface) else result for result in results]
            make_folder(store.folder)
            base.save(results, path)
            store.add(seconds_name, f"{time.perf_counter() - start:.1f}\n".encode())
        self.seconds += float(store.read(seconds_name) or 0)
        # All results are of this class; the condition tells mypy so.
        return [result for result in results if isinstance(result, kind)]

    def contour(self, point: Point, label: str = "", **settings: Any) -> Surface:
        """Compute the contour of the test loss around w_a; with ``samples`` 0, over all.

        Other ``settings`` are those of the figure's sizes.
        """
        return self._around(Surface, contour, point, label, {**self.sizes, **settings})

    def hessian_grid(self, point: Point, label: str = "") -> HessianGrid:
        """Compute the Hessian ratios of the test loss around w_a, by the figure's sizes."""
        settings = dict(self.sizes)
        limit = settings["products"]
        return self._around(HessianGrid, hessian_grid, point, label, settings, max_products=limit)

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


# Fields -> their names before 0.18, with which the identities of stored runs were computed.
_FORMER = {(Recipe, "autocast"): "precision", (Monitor, "k"): "top"}


def _non_default(table: Any) -> dict[str, Any]:
    """Return the fields of a recipe, or of a table in it, that differ from their defaults."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(table):
        value, default = getattr(table, entry.name), entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        if value != default:
            name = _FORMER.get((type(table), entry.name), entry.name)
            values[name] = _non_default(value) if dataclasses.is_dataclass(value) else value
    return values


def _unnamed(recipe: Recipe) -> Recipe:
    """Return ``recipe`` without its own name, in which equal recipes may differ."""
    return dataclasses.replace(recipe, name=recipe.algorithm["name"])

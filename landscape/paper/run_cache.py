"""A cache of the runs and analyses of figures, by the hash of their settings and of the code's versions.

A run is in FOLDER/runs/HASH, with the hash of its recipe, and its record in RECORDS/HASH.json; an analysis is
in RECORDS/results/HASH.h5, with the hash of its runs, its settings and the version of its numerics. So
figures share them, an interrupted computation resumes, and the records alone are enough to draw.
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
from typing import Any, TypeVar

from landscape import data
from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError
from landscape.core.files import write_text
from landscape.core.numerics import version_of
from landscape.core.progress import progress_bar
from landscape.paper.record import Record
from landscape.problem.batches import Stream
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.results.surface import Surface
from landscape.train import launch
from landscape.train.distributed import pool
from landscape.train.loop import Trainer
from landscape.train.planning.calibration import calibrate
from landscape.train.recipe import Recipe
from landscape.train.runs import Run, train_runs

R = TypeVar("R", bound=base.Result)
# Samples of a learner in the steps that are timed for an estimate, which takes time as proportional to
# samples; a step of the fewer ones that takes longer than so many seconds is enough (ours).
TIMED_SAMPLES, BUSY_SECONDS = (16, 512), 0.02
# A measurement of λ_max along a run takes as long as so many gradients of its samples (ours; Figure 2(b)).
SHARPNESS_PASSES = 30


def digest(*parts: Any) -> str:
    """24 hex digits that identify the result of ``parts`` (strings, numbers, lists and dicts)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


class OutOfTimeError(Exception):
    """The budget is used: what is done is stored, and the same command goes on."""


@dataclass
class RunCache:
    """Trains runs by ``executor`` and computes analyses here, on ``device``, each once, and stores them.

    ``folder`` has the runs with their weights, ``records`` (default: FOLDER/records) what figures are drawn
    from. ``message`` takes a line when a run ends, ``progress`` the share of the runs that is done. Nothing
    is begun after ``until``, as time.time() has it, and a run that goes on then stops; it resumes from its
    last checkpoint. Of runs that are not ``kept``, by their :func:`identity`, the weights are deleted once
    the record is written; None keeps all.
    """

    folder: Path
    device: str = "auto"
    data_dir: str | None = None
    executor: pool.Executor = field(default_factory=pool.Pool)
    message: Callable[[str], None] = lambda line: None
    progress: Callable[[float], None] = lambda share: None
    records: Path | None = None
    until: float = math.inf
    kept: set[str] | None = None
    _problems: dict[str, Any] = field(default_factory=dict)
    _records: dict[Path, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records = self.records or self.folder / "records"

    def run_folder(self, recipe: Recipe) -> Path:
        """The folder of the run of ``recipe``, whatever its name."""
        return self.folder / "runs" / identity(recipe)

    def record(self, recipe: Recipe) -> Record | None:
        """The record of the run of ``recipe``; None if it has not ended.

        Of a run that has ended without a record, that is written now.

        Raises:
            FailedError: a damaged record, or a folder that holds a run of another recipe.
        """
        assert self.records is not None
        path = self.records / f"{identity(recipe)}.json"
        if path not in self._records and path.exists():
            self._records[path] = Record.read(path)
        if path not in self._records:
            folder = self.run_folder(recipe)
            end = launch.ended(_unnamed(recipe), folder)
            if end is None:
                return None
            self._records[path] = Record.of(end, _saved_steps(folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._records[path].write(path)
        return self._records[path]

    def missing(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Those of ``recipes`` whose runs have not ended yet, each once."""
        folders = {self.run_folder(recipe): _unnamed(recipe) for recipe in recipes}
        return [recipe for recipe in folders.values() if self.record(recipe) is None]

    def run(self, recipes: Iterable[Recipe]) -> None:
        """Train ``recipes`` whose weights are not in FOLDER; an interrupted run resumes.

        Raises:
            FailedError: a run could not be made.
        """
        folders = {self.run_folder(recipe): _unnamed(recipe) for recipe in recipes}
        todo = [recipe for folder, recipe in folders.items() if launch.ended(recipe, folder) is None]
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        done = 0

        def ended(run: Run, seconds: float | None) -> None:
            nonlocal done
            if seconds is None:  # the time was over
                return
            done, recipe = done + 1, run.recipe
            self.record(recipe)
            if self.kept is not None and identity(recipe) not in self.kept:
                shutil.rmtree(run.folder)
            self.message(
                f"{done} of {len(todo)}: {recipe.algorithm['name']}, {recipe.model['name']}, lr "
                f"{recipe.lr:g}, batch {recipe.batch}, seed {recipe.seed}: {seconds:.0f} s"
            )
            self.progress(done / len(todo))

        train_runs(
            [Run(recipe, self.run_folder(recipe)) for recipe in todo],
            ended,
            lambda share: self.progress((done + share) / len(todo)),
            executor=self.executor,
            device=self.device,
            data_dir=self.data_dir,
            until=None if math.isinf(self.until) else self.until,
        )

    def check_time(self) -> None:
        """Raise :class:`OutOfTimeError` once the budget is used."""
        if time.time() > self.until:
            raise OutOfTimeError

    def estimate(self, recipes: Iterable[Recipe]) -> float:
        """Seconds that ``recipes`` take here, one after another, from a short measurement of each kind.

        Includes steps, evaluations, decompositions and λ_max (as passes over their samples), but no
        checkpoints and no instruments.
        """
        total, known = 0.0, dict[str, float]()
        for recipe in recipes:
            most = min(max(TIMED_SAMPLES), recipe.local_batch)
            kind = digest(recipe.model, recipe.data, recipe.precision, recipe.dtype, most)
            if kind not in known:
                known[kind] = self._seconds_a_sample(recipe)
            passes = 0.0
            spec = recipe.spec("data")
            whole = self._dataset(spec.name, spec.options)
            train, test = (_samples(split) for split in (whole.train, whole.test))
            if recipe.decompose.every:
                passes += (recipe.decompose.samples or train) / recipe.decompose.every
            if recipe.evaluate.every:
                passes += test / 3 / recipe.evaluate.every  # without a backward pass
            if recipe.monitor.sharpness:
                passes += SHARPNESS_PASSES * (recipe.monitor.samples or train) / recipe.monitor.sharpness
            total += recipe.steps * (recipe.batch + passes) * known[kind]
        return total

    def _seconds_a_sample(self, recipe: Recipe) -> float:
        """Of a gradient, from steps of few samples, or of more where such steps take next to no time."""
        timed = dataclasses.replace(  # also of a run whose steps are of all samples
            recipe, accumulate=1, sampling="replacement", monitor=type(recipe.monitor)()
        )
        place = launch.pick_device(self.device)
        for samples in TIMED_SAMPLES:
            local = min(samples, recipe.local_batch)
            seconds = calibrate(timed, 1, local, device=place, data_dir=self.data_dir).gradient
            if seconds > BUSY_SECONDS or local == recipe.local_batch:
                break
        return seconds / local

    def check_data(self, recipes: Iterable[Recipe]) -> None:
        """Read every data set of ``recipes`` once; FailedError for a missing one says what to download."""
        for spec in {digest(r.data): r.spec("data") for r in recipes}.values():
            self._dataset(spec.name, spec.options)

    def _dataset(self, name: str, options: Mapping[str, Any]) -> data.Dataset:
        key = digest(name, dict(options))
        if key not in self._problems:
            self._problems[key] = data.load(name, data_dir=self.data_dir, **options)
        dataset: data.Dataset = self._problems[key]
        return dataset

    def problem(self, end: Checkpoint, split: str = "test", learner: str | int = "mean") -> Problem:
        """The problem of a run with the data of its recipe, which is read only once."""
        dataset = self._dataset(end.data["name"], end.data["options"])
        end.check_data(dataset)
        return end.problem(split, learner, data=dataset, device=launch.pick_device(self.device))

    def cached(self, kind: type[R], what: Mapping[str, Any], make: Callable[[], R | Sequence[R]]) -> list[R]:
        """``make()``, or the results stored for the same ``what``: all that they depend on.

        Of the plane of a surface only lengths and angles are stored (:meth:`.Surface.compact`).

        Raises:
            OutOfTimeError: they are not stored, and the budget is used.
        """
        path = self._result(kind, what)
        if path.exists():
            try:
                return [result for result in base.load_results(path) if isinstance(result, kind)]
            except FailedError as error:
                self.message(f"{error}; it is computed again")
        self.check_time()
        path.parent.mkdir(parents=True, exist_ok=True)
        clock = time.perf_counter()
        with progress_bar(kind.__name__):
            computed = make()
        results = [computed] if isinstance(computed, base.Result) else list(computed)
        stored = [result.compact() if isinstance(result, Surface) else result for result in results]
        base.save(stored, path)
        write_text(path.with_suffix(".seconds"), f"{time.perf_counter() - clock:.1f}\n")
        return [result for result in stored if isinstance(result, kind)]

    def seconds(self, kind: type[base.Result], what: Mapping[str, Any]) -> float:
        """The seconds that :meth:`cached` needed to compute it."""
        path = self._result(kind, what).with_suffix(".seconds")
        return float(path.read_text()) if path.exists() else 0.0

    def _result(self, kind: type[base.Result], what: Mapping[str, Any]) -> Path:
        assert self.records is not None
        return self.records / "results" / f"{digest(kind.__name__, dict(what))}.h5"


def _saved_steps(folder: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    loaded = (Checkpoint.load(p, lambda n: slice(0), whole_history=False) for p in run_folder.steps(folder))
    return [checkpoint.step for checkpoint in loaded]


def _samples(split: Any) -> int:
    return split.samples if isinstance(split, Stream) else len(split[1])


def identity(recipe: Recipe) -> str:
    """Hash of the settings of ``recipe`` that are no defaults, without its name: a new key keeps old runs.

    Runs of another version of the training's numerics have another one.
    """
    return digest(_non_default(_unnamed(recipe)), version_of(Trainer))


def _non_default(part: Any) -> dict[str, Any]:
    """The fields of a recipe, or of a table in it, that differ from their defaults."""
    settings = {}
    for entry in dataclasses.fields(part):
        value = getattr(part, entry.name)
        usual = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
        if value != usual:
            settings[entry.name] = _non_default(value) if dataclasses.is_dataclass(value) else value
    return settings


def _unnamed(recipe: Recipe) -> Recipe:
    """``recipe`` without its own name, in which equal recipes may differ."""
    return dataclasses.replace(recipe, name=recipe.algorithm["name"])

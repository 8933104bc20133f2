"""A cache of the runs and analyses of figures, by the hash of their settings.

A run is in FOLDER/runs/HASH, with the hash of its recipe; an analysis is in FOLDER/results/HASH.h5, with the
hash of its runs and settings. So figures share them, and an interrupted computation resumes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from landscape import data
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError
from landscape.core.files import write_text
from landscape.core.progress import progress_bar
from landscape.problem.batches import Stream
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.train import launch
from landscape.train.distributed import pool
from landscape.train.planning.calibration import calibrate
from landscape.train.recipe import Recipe
from landscape.train.sweep import train

R = TypeVar("R", bound=base.Result)
# Samples of a learner in the step that is timed for an estimate; time is proportional to samples (ours).
TIMED_SAMPLES = 16


def digest(*parts: Any) -> str:
    """24 hex digits that identify the result of ``parts`` (strings, numbers, lists and dicts)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass
class RunCache:
    """Trains runs and computes analyses once, on ``device``, ``at_once`` runs at a time, and stores them.

    ``message`` takes a line when a run ends, ``progress`` the share of the runs that is done. A process that
    is silent for ``timeout`` seconds ends the work.
    """

    folder: Path
    device: str = "auto"
    data_dir: str | None = None
    at_once: int = 1
    message: Callable[[str], None] = lambda line: None
    progress: Callable[[float], None] = lambda share: None
    timeout: float = pool.TIMEOUT
    _problems: dict[str, Any] = field(default_factory=dict)

    def run_folder(self, recipe: Recipe) -> Path:
        """The folder of the run of ``recipe``, whatever its name."""
        return self.folder / "runs" / identity(recipe)

    def missing(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        """Those of ``recipes`` whose runs have not ended yet, each once."""
        folders = {self.run_folder(recipe): _unnamed(recipe) for recipe in recipes}
        return [recipe for folder, recipe in folders.items() if launch.ended(recipe, folder) is None]

    def run(self, recipes: Iterable[Recipe]) -> None:
        """Train the missing runs of ``recipes``; an interrupted run resumes from its last checkpoint."""
        todo = self.missing(recipes)
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        jobs = [
            (recipe.to_toml(), os.fspath(self.run_folder(recipe)), self.device, self.data_dir)
            for recipe in todo
        ]
        done = 0

        def ended(recipe: Recipe, seconds: float) -> None:
            nonlocal done
            done += 1
            self.message(
                f"{done} of {len(jobs)}: {recipe.algorithm['name']}, {recipe.model['name']}, lr "
                f"{recipe.lr:g}, batch {recipe.batch}, seed {recipe.seed}: {seconds:.0f} s"
            )
            self.progress(done / len(jobs))

        if min(self.at_once, len(jobs)) <= 1:
            for k, (recipe, job) in enumerate(zip(todo, jobs, strict=True)):
                step = functools.partial(self._step, k, len(jobs))
                ended(recipe, train(*job, step))
            return
        try:
            pool.run(
                "landscape.train.sweep:train",
                jobs,
                self.at_once,
                lambda job, seconds: ended(todo[job], seconds),
                threads=torch.get_num_threads(),
                timeout=self.timeout,
            )
        except pool.JobError as error:
            raise FailedError(f"{jobs[error.number][1]}: {error}") from error

    def _step(self, before: int, jobs: int, done: int, total: int) -> None:
        """Progress within one run."""
        self.progress((before + done / total) / jobs)

    def estimate(self, recipes: Iterable[Recipe]) -> float:
        """Seconds that ``recipes`` take here, one after another, from a short measurement of each kind.

        Includes steps, evaluations and decompositions (as passes over their samples), but no checkpoints.
        """
        total, known = 0.0, dict[str, float]()
        for recipe in recipes:
            local = min(TIMED_SAMPLES, recipe.local_batch)
            kind = digest(recipe.model, recipe.data, recipe.precision, recipe.dtype, local)
            if kind not in known:
                place = launch.pick_device(self.device)
                timed = dataclasses.replace(  # a step of TIMED_SAMPLES samples, also where a run's are of all
                    recipe, accumulate=1, sampling="replacement", monitor=type(recipe.monitor)()
                )
                costs = calibrate(timed, 1, local, device=place, data_dir=self.data_dir)
                known[kind] = costs.gradient / local
            passes = 0.0
            spec = recipe.spec("data")
            whole = self._dataset(spec.name, spec.options)
            train, test = (_samples(split) for split in (whole.train, whole.test))
            if recipe.decompose.every:
                passes += (recipe.decompose.samples or train) / recipe.decompose.every
            if recipe.evaluate.every:
                passes += test / 3 / recipe.evaluate.every  # without a backward pass
            total += recipe.steps * (recipe.batch + passes) * known[kind]
        return total

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
        """``make()``, or the results stored for the same ``what``: all that they depend on."""
        path = self.folder / "results" / f"{digest(kind.__name__, dict(what))}.h5"
        if path.exists():
            try:
                return [result for result in base.load_results(path) if isinstance(result, kind)]
            except FailedError as error:
                self.message(f"{error}; it is computed again")
        path.parent.mkdir(parents=True, exist_ok=True)
        clock = time.perf_counter()
        with progress_bar(kind.__name__):
            computed = make()
        results = [computed] if isinstance(computed, base.Result) else list(computed)
        base.save(results, path)
        write_text(path.with_suffix(".seconds"), f"{time.perf_counter() - clock:.1f}\n")
        return results

    def seconds(self, kind: type[base.Result], what: Mapping[str, Any]) -> float:
        """The seconds that :meth:`cached` needed to compute it."""
        path = self.folder / "results" / f"{digest(kind.__name__, dict(what))}.seconds"
        return float(path.read_text()) if path.exists() else 0.0


def _samples(split: Any) -> int:
    return split.samples if isinstance(split, Stream) else len(split[1])


def identity(recipe: Recipe) -> str:
    """Hash of the settings of ``recipe`` that are no defaults, without its name: a new key keeps old runs."""
    return digest(_non_default(_unnamed(recipe)))


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

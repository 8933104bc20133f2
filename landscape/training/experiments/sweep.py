"""A grid of runs, or a search over one key, in a folder: runs of landscape.training.run.launch, and a table.

A run lies in DIR/SETTING/seed-N, SETTING being its recipe's name and the keys that were set. A run that is
there is not repeated, so that a sweep can be resumed or extended.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.devices import DeviceName
from landscape.core.errors import InputError
from landscape.core.files import Lock, make_folder
from landscape.core.options import Count, Positive, Seed, Within, checked, toml_value
from landscape.core.progress import Progress, ProgressOption, reporter, shows_progress
from landscape.results.grids import COLUMNS, Sweep
from landscape.results.grids import texts as as_texts
from landscape.training.processes.children import TIMEOUT
from landscape.training.processes.process_group import started_by_launcher
from landscape.training.recipes import names
from landscape.training.recipes.recipe import Recipe
from landscape.training.recipes.settings import parse_value, parsed, plain_value
from landscape.training.run import launch
from landscape.training.run.launch import Ended, TrainingJob, share_of

#: ("recipe", LABEL), then (KEY, VALUE) as --set takes them, by key.
Setting = tuple[tuple[str, str], ...]
# Longest name of a setting's folder in characters; file systems allow 255 bytes.
MAX_NAME = 150


def outcome_of(end: Checkpoint) -> dict[str, float]:
    """Return the results of a finished run, by the names of :class:`landscape.results.grids.Sweep`."""
    last = {name: float(column[-1]) for name, column in end.history.items() if len(column)}
    errors = 100 * (1 - end.history.get("test_accuracy", np.zeros(0)))
    return {
        "test_loss": last.get("test_loss", math.nan),
        "test_error": float(errors[-1]) if len(errors) else math.nan,
        "best_test_error": float(np.nanmin(errors)) if np.isfinite(errors).any() else math.nan,
        "diverged": float(bool(end.diverged)),
        "seconds": last.get("wall_s", 0.0),
    }


def canonical(value: Any) -> str:
    """Return ``value`` as text; equal values in different notations have one text."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str) and parse_value(value) is value:  # the text needs no quotes
        return value
    return toml_value(value)


def grid(labels: Iterable[str], values: Mapping[str, Any]) -> list[Setting]:
    """Return all combinations of the recipes ``labels`` and of ``values``, key -> value or list of values.

    Raises:
        InputError: for a key that a sweep does not allow, and for a value that is missing or given twice.
    """
    axes: dict[str, list[str]] = {"recipe": list(labels)}
    for key, value in values.items():
        if key in ("seed", "recipe", "name"):
            raise InputError(f"settings: '{key}' is not a key of a sweep", give={"seeds": ...})
        plain = plain_value(key, value)
        items = plain if isinstance(plain, list) else [plain]
        axes[key] = [canonical(item) for item in items]
    for key, texts in axes.items():
        doubles = [text for text in texts if texts.count(text) > 1]
        if doubles or not texts or "" in texts:
            reason = f"has {doubles[0]} twice" if doubles and doubles[0] else "lacks a value"
            raise InputError(f"settings: {key}={','.join(texts)} is not allowed, it {reason}")
    combinations = itertools.product(*axes.values())
    return [_setting(dict(zip(axes, texts, strict=True))) for texts in combinations]


def _setting(values: Mapping[str, str]) -> Setting:
    """Return the setting of ``values``, key -> text: the recipe's label, then the other pairs by key."""
    pairs = sorted((key, text) for key, text in values.items() if key != "recipe")
    return (("recipe", values["recipe"]), *pairs)


def folder_name(setting: Setting) -> str:
    """Return the setting in letters for any shell; if letters change, a part of its SHA-256 follows."""
    (_, label), *pairs = setting
    text = ",".join([label.replace("/", "-"), *(f"{key}={value}" for key, value in pairs)])
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", text)[:MAX_NAME]
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass
class Runner:
    """Runs settings with all ``seeds`` and keeps DIR/sweep.csv and DIR/sweep.h5 up to date.

    The table has the outcomes of earlier sweeps in the folder, too.

    Args:
        folder: DIR.
        seeds: the seeds of every setting.
        keys: the columns, in order; columns of earlier sweeps follow.
        read: makes the recipe of a setting with a further KEY=VALUE.
        execute: trains the runs of its first argument. It calls its second argument with each run that ends,
            and its third argument, during a run, with the completed share of this run (0 to 1).
        message: takes a line for the user.
        progress: takes the number of completed runs, plus the completed share of the present run.
        share: K/N: only this share of the runs is made, and the table is neither read nor written.

    Attributes:
        done: the number of completed runs.
        outcomes: setting -> seed -> the numbers of :func:`outcome_of`.
    """

    folder: Path
    seeds: Sequence[int]
    keys: list[str]
    read: Callable[[Setting, str], Recipe]
    execute: Callable[[Sequence[TrainingJob], Ended, Progress], None]
    message: Callable[[str], None]
    progress: Progress
    share: str | None
    done: int = field(default=0, init=False)
    outcomes: dict[Setting, dict[int, dict[str, float]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.table, self.keys = self.folder / "sweep.h5", ["recipe", *self.keys]
        if self.share is not None or not self.table.exists():
            return
        old = Sweep.load(self.table)
        self.keys += [key for key in old.keys if key not in self.keys]
        for row, old_seeds in zip(old.rows, old.seed_lists, strict=True):
            setting = _setting({key: value for key, value in row.items() if value})
            ends = {seed: self._run_folder(setting, seed) / "last.h5" for seed in old_seeds}
            self.outcomes[setting] = {
                seed: _outcome_of_file(path) for seed, path in ends.items() if path.exists()
            }

    def _run_folder(self, setting: Setting, seed: int) -> Path:
        return self.folder / folder_name(setting) / f"seed-{seed}"

    def run(self, settings: Iterable[Setting]) -> None:
        """Make the runs of all ``settings`` with every seed, except runs that are already complete.

        The table gets the outcomes of the new and of the complete runs. Raises OperationError if the folder
        of a run holds a run of another recipe.
        """
        # The runs to make, by folder, with their settings and seeds.
        jobs: dict[Path, tuple[TrainingJob, Setting, int]] = {}
        for setting, seed in share_of([*itertools.product(settings, self.seeds)], self.share):
            recipe, folder = self.read(setting, f"seed={seed}"), self._run_folder(setting, seed)
            end = launch.ended(recipe, folder)  # None: there is no complete run
            if end is not None:
                self.outcomes.setdefault(setting, {})[seed] = outcome_of(end)
                self.done += 1
            else:
                # The run is made (again): an outcome in the table of an earlier sweep does not hold any more.
                self.outcomes.get(setting, {}).pop(seed, None)
                jobs[folder] = TrainingJob(recipe, folder), setting, seed
        self.save()

        def record(job: TrainingJob, _seconds: float | None) -> None:
            _, setting, seed = jobs[job.folder]
            outcome = _outcome_of_file(job.folder / "last.h5")
            self.outcomes.setdefault(setting, {})[seed] = outcome
            self.done += 1
            diverged = "diverged, " if outcome["diverged"] else ""
            line = f"{diverged}test loss {outcome['test_loss']:.4g}"
            if math.isfinite(outcome["test_error"]):
                line += f", test error {outcome['test_error']:.2f}%"
            self.message(f"{job.folder.relative_to(self.folder)}: {line}, {outcome['seconds']:.1f} s")
            self.progress(self.done)
            self.save()

        runs = [job for job, _, _ in jobs.values()]
        self.execute(runs, record, lambda share_of_one_run: self.progress(self.done + share_of_one_run))

    def score(self, setting: Setting) -> tuple[int, float]:
        """Return the number of diverged seeds, and the mean final test loss of all seeds; lower is better."""
        outcomes = [self.outcomes[setting][seed] for seed in self.seeds]
        diverged = sum(outcome["diverged"] for outcome in outcomes)
        loss = float(np.mean([outcome["test_loss"] for outcome in outcomes]))
        return int(diverged), loss if loss < math.inf else math.inf  # NaN counts as infinite

    def result(self) -> Sweep:
        """Return the table now: sorted by its columns, numbers before words."""
        import pandas  # takes half a second

        def order(setting: Setting) -> list[tuple[int, float, str]]:
            values = dict(setting)
            return [_rank(values.get(key, "")) for key in self.keys]

        rows = sorted((setting for setting, outcomes in self.outcomes.items() if outcomes), key=order)
        # A table for each setting, a row for each seed.
        tables = [pandas.DataFrame([*self.outcomes[setting].values()]) for setting in rows]
        reductions = {name: "std" if name.endswith("_std") else "mean" for name in COLUMNS}
        reductions["diverged"] = "sum"
        arrays: dict[str, Any] = {}
        for name, reduction in reductions.items():
            columns = [table[name.removesuffix("_std")] for table in tables]
            with np.errstate(invalid="ignore", over="ignore"):  # a diverged run's loss may be infinite
                arrays[name] = np.array([column.agg(reduction, skipna=False) for column in columns])
        seeds = [" ".join(map(str, sorted(self.outcomes[setting]))) for setting in rows]
        values = [[dict(setting).get(key, "") for key in self.keys] for setting in rows]
        settings = as_texts(values).reshape(len(rows), len(self.keys))
        return Sweep(keys=tuple(self.keys), settings=settings, seeds=as_texts(seeds), **arrays)

    def save(self) -> None:
        """Write DIR/sweep.csv and DIR/sweep.h5 if any run has ended; for a share, write nothing."""
        if self.share is not None:
            return
        result = self.result()
        if len(result.seeds):
            result.save(self.table)
            result.to_csv(self.table.with_suffix(".csv"))


def _outcome_of_file(path: Path) -> dict[str, float]:
    return outcome_of(Checkpoint.load(path, learners=lambda n: slice(0)))


def _rank(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


# More rounds would need values that six digits cannot distinguish.
Rounds = Annotated[int, Within(1, 16)]
Source = Recipe | str | Path


def _check_seeds(where: str, seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(where, list(seeds), allowed="one or several different whole numbers ≥ 0")


Seeds = Annotated[Sequence[Seed], _check_seeds]


@checked()
@shows_progress()
def sweep(
    recipes: Source | Sequence[Source],
    folder: str | Path,
    *,
    seeds: Seeds = (0,),
    search: tuple[str, Positive, Positive] | None = None,
    rounds: Rounds = 8,
    jobs: Count = 1,
    share: str | None = None,
    timeout: Positive = TIMEOUT,
    device: DeviceName = "auto",
    data_dir: str | Path | None = None,
    allow_code: bool = False,
    message: Callable[[str], None] | None = None,
    progress: ProgressOption = None,
    **settings: Any,
) -> Sweep:
    """Train all combinations of recipes, seeds and values of the recipes' keys, as ``landscape sweep`` does.

    Each run has a folder FOLDER/SETTING/seed-N with the files of :func:`landscape.train`; SETTING consists of
    the recipe's name and of the keys and values that the call sets. The table, in FOLDER/sweep.csv and
    FOLDER/sweep.h5, is rewritten after each run. A repeated call resumes an interrupted sweep; a call with
    other values or seeds extends the table. A run that diverges raises no error: the table counts such runs.

    A search evaluates the lowest, the middle and the highest value of a range. Each of ``rounds`` further
    rounds evaluates the two neighbors of the best value so far, at half the previous distance on a log scale.
    The best value has the fewest diverged seeds and, among such values, the lowest mean final test loss.

    Args:
        recipes: one or several names, patterns of names such as "cifar10/resnet-18-b8192-*", TOML files, or
            :class:`landscape.Recipe`\\ s.
        folder: the folder for the runs and the table.
        seeds: the seeds of each setting.
        search: (key, lowest value, highest value): the range in which each setting's best value is searched.
        rounds: how often a search halves the distance; a search evaluates at most 3 + 2·rounds values.
        jobs: the number of runs at a time, each in its own process.
        share: "K/N": make only the K-th of N shares of the runs, and do not write the table. Several machines
            with a common folder can make one share each; a later call without ``share`` writes the table.
        timeout, device, data_dir, allow_code, message, progress: as for :func:`landscape.train`.
        settings: values of the recipes' keys. A list gives several values, each with runs of its own; any
            other value holds for all runs. A value that itself is a list is given as a list in a list.

    Returns:
        The table, a row for each setting, with means and standard deviations over the seeds. With ``share``
        it has the runs of this share only.

    Raises:
        InputError: a recipe, key or value that is not allowed or given twice.
        OperationError: a folder that another process uses; a run's folder that holds a run of another recipe;
            a run that failed.

    Example:
        >>> import tempfile, landscape
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = landscape.sweep("digits-ssgd", folder, seeds=[0, 1], lr=[0.5, 1.0], steps=2)
        >>> [row["lr"] for row in table.rows], table.seed_lists
        (['0.5', '1'], [[0, 1], [0, 1]])
    """
    if started_by_launcher():
        raise InputError("sweep: not allowed under torchrun; for several runs at once use jobs")
    sources = _recipes_by_label(recipes)

    def read_setting(setting: Setting, *changes: str) -> Recipe:
        """Return the recipe of ``setting``, with further changes KEY=VALUE."""
        (_, label), *pairs = setting  # ("recipe", label), then pairs (key, value)
        source = sources[label]
        texts = [f"{key}={value}" for key, value in pairs]
        values = parsed([*texts, *changes])
        if isinstance(source, Recipe):
            return source.replace(**values)
        return Recipe.read(source, allow_code=allow_code, **values)

    bases = grid(labels=sources, values=settings)  # a search adds its key to each of these settings
    keys = list(settings)
    total_runs = len(share_of(range(len(bases) * len(seeds)), share))  # in this call
    search_change: list[str] = []  # with a search one text KEY=VALUE, with the lowest value; else empty
    if search:
        if share is not None:
            raise InputError("share: not allowed with search, which needs the results of all runs of a round")
        key, low, high = search
        if key in (*keys, "seed"):
            raise InputError(f"search: {key} is not allowed, its values are already given")
        if not low < high:
            raise InputError(f"search: {low} to {high} is not allowed, the first must be below the second")
        keys = [key, *keys]
        total_runs *= 3 + 2 * rounds  # an upper bound
        search_change = [f"{key}={low:g}"]
    for setting in bases:  # a wrong value raises its error here, before the folder is made
        read_setting(setting, *search_change)
    folder = Path(folder)
    show_progress = reporter(progress)
    make_folder(folder)
    with Lock(folder) as lock:  # the end of the block releases the lock; acquire() locks the folder
        if share is None:  # calls with a share may work at the same time; each run has its own lock
            lock.acquire()
        pool = launch.pool(jobs, timeout, device)
        train = functools.partial(launch.train_runs, pool=pool, device=device, data_dir=data_dir)
        runner = Runner(
            folder,
            seeds,
            keys,
            read=read_setting,
            execute=train,
            message=message or (lambda line: None),
            progress=lambda done: show_progress(done / total_runs),
            share=share,
        )
        if search:
            find_best(runner, bases, key, low, high, rounds)
        else:
            runner.run(bases)
        return runner.result()


def _recipes_by_label(recipes: Source | Sequence[Source]) -> dict[str, Source]:
    """Return the recipes by label: the name of a bundled recipe, the stem of a file, a Recipe's name."""
    sources: dict[str, Source] = {}
    items: Any = [recipes] if isinstance(recipes, (str, Path, Recipe)) else recipes
    for item in items:
        matches: list[Any] = []
        if not isinstance(item, Recipe):
            matches = [name for name in names() if fnmatchcase(name, str(item))]
        for source in matches or [item]:
            name = source.name if isinstance(source, Recipe) else str(source)
            name = Path(name).stem if name.endswith(".toml") else name
            if name in sources:
                raise InputError(f"recipes: '{name}' is given twice; rename one, a sweep tells them by name")
            sources[name] = source
    return sources


def find_best(
    runner: Runner, bases: Sequence[Setting], key: str, low: float, high: float, rounds: int
) -> dict[Setting, str]:
    """Search in [low, high], for each of ``bases``, for the value of ``key`` with the lowest score.

    The first three values are ``low``, ``high`` and their geometric mean. Each of ``rounds`` further rounds
    tries the two neighbors of the best value so far, at half of the previous distance on a log scale. With 8
    rounds at most 19 values are tried for each base. If high/low is 10⁶, the values of the eighth round
    differ from the best value so far by 2.7%. DPSGD-2020 (section 4.3) speaks of a binary search over about
    20 settings; the details and the score are our choice. If the score has several local minima, the search
    may miss the lowest one.

    Returns:
        Base -> the best value that was tried, as text.
    """
    last = 2 ** (rounds + 1)  # the points 0, …, last stand for values from low to high, on a log scale

    def setting_at(base: Setting, point: int) -> Setting:
        value = low * (high / low) ** (point / last)
        return _setting({**dict(base), key: canonical(float(f"{value:.6g}"))})

    # For each base: point -> score, which is (number of diverged seeds, mean test loss).
    all_scores: dict[Setting, dict[int, tuple[int, float]]] = {base: {} for base in bases}
    points = {base: [0, last // 2, last] for base in bases}  # the points of the next round
    best_points = dict.fromkeys(bases, 0)
    for search_round in range(rounds + 1):  # round 0 has the first three values
        runner.run([setting_at(base, point) for base in bases for point in points[base]])
        # The points of the next round lie at this distance from the best point. 0: there is no next round.
        distance = last // 2 ** (search_round + 2)
        for base, scores in all_scores.items():
            scores |= {point: runner.score(setting_at(base, point)) for point in points[base]}
            best_point = best_points[base] = min(scores, key=lambda point: scores[point])
            neighbors = (best_point - distance, best_point + distance)
            points[base] = [point for point in neighbors if 0 <= point <= last and point not in scores]
    return {base: dict(setting_at(base, point))[key] for base, point in best_points.items()}

"""A grid of runs, or a search over one key, in a folder: runs of landscape.training.run.launch, and a table.

A run lies in DIR/SETTING/seed-N, SETTING being its recipe's name and the keys that were set. A run that is
there is not repeated, so that a sweep can be resumed or extended.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import InputError
from landscape.core.options import toml_value
from landscape.core.progress import Progress
from landscape.results.training import COLUMNS, Sweep, texts
from landscape.training.recipes.recipe import Recipe
from landscape.training.recipes.settings import key_and_value, parse_value
from landscape.training.run import launch
from landscape.training.run.launch import Ended, TrainingJob

#: ("recipe", LABEL), then (KEY, VALUE) as --set takes them, by key.
Setting = tuple[tuple[str, str], ...]
# Longest name of a setting's folder in characters; file systems allow 255 bytes.
MAX_NAME = 150
#: Trains runs; takes what is called with each as it ends, and with the share of the present one.
Execute = Callable[[Sequence[TrainingJob], Ended, Progress], None]


@dataclass(frozen=True)
class Outcome:
    """The results of a run; see :class:`landscape.results.training.Sweep`."""

    test_loss: float
    test_error: float
    best_test_error: float
    diverged: bool
    seconds: float

    @classmethod
    def of(cls, end: Checkpoint) -> Outcome:
        """The outcome of a finished run."""
        if not end.step:
            return cls(math.nan, math.nan, math.nan, bool(end.diverged), 0.0)
        history = end.history
        errors = 100 * (1 - history["test_accuracy"])
        best = float(np.nanmin(errors)) if np.isfinite(errors).any() else math.nan
        last = {name: float(column[-1]) for name, column in history.items()}
        return cls(last["test_loss"], float(errors[-1]), best, bool(end.diverged), last["wall_s"])

    def __str__(self) -> str:
        error = "" if math.isnan(self.test_error) else f", test error {self.test_error:.2f}%"
        return f"{'diverged, ' * self.diverged}test loss {self.test_loss:.4g}{error}, {self.seconds:.1f} s"


def split(text: str) -> list[str]:
    """The parts of a text between commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth == 0:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def canonical(written: str) -> str:
    """One form of all values that mean the same."""
    value = parse_value(written)
    if isinstance(value, bool):
        return toml_value(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str):  # bare where that reads back as the same
        return value if parse_value(value) is value else toml_value(value)
    try:
        return toml_value(value)
    except TypeError as error:  # a date
        raise InputError(f"--set: '{written}' is not allowed as a value ({error})") from error


def grid(labels: Iterable[str], settings: Iterable[str]) -> list[Setting]:
    """All combinations of recipes and KEY=V1,V2,… ``settings``.

    Raises:
        InputError: for a key that is given twice or is none of a sweep, and for a value that is missing or
            given twice.
    """
    axes: dict[str, list[str]] = {"recipe": list(labels)}
    for setting in settings:
        key, written = key_and_value(setting)
        if key in ("seed", "recipe", "name"):
            raise InputError(f"--set: '{key}' is not a key of a sweep; seeds are given with --seeds")
        if key in axes:
            raise InputError(f"--set: {key} is given twice; give its values with commas, {key}=V1,V2")
        axes[key] = [canonical(value) for value in split(written)]
    for key, values in axes.items():
        doubles = [v for v in values if values.count(v) > 1]
        if doubles or "" in values:
            what = f"holds {doubles[0]} twice" if doubles and doubles[0] else "lacks a value"
            raise InputError(f"--set: {key}={','.join(values)} is not allowed, it {what}")
    pairs = itertools.product(*([(key, value) for value in values] for key, values in axes.items()))
    return [_setting(dict(combination)) for combination in pairs]


def _setting(values: Mapping[str, str]) -> Setting:
    rest = sorted((k, v) for k, v in values.items() if k != "recipe")
    return (("recipe", values["recipe"]), *rest)


def folder_name(setting: Setting) -> str:
    """The setting in letters that any shell takes; where that loses something, with a part of its SHA-256."""
    label, *rest = setting
    text = ",".join([label[1].replace("/", "-"), *(f"{key}={value}" for key, value in rest)])
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", text)[:MAX_NAME]
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass
class Runner:
    """Runs settings with all ``seeds`` and keeps DIR/sweep.csv and DIR/sweep.h5 up to date.

    The table has the outcomes of earlier sweeps in the folder, too.

    Args:
        folder: DIR.
        seeds: those of every setting.
        keys: the columns, in order; those of earlier sweeps follow.
        read: makes a recipe of a label and KEY=VALUE settings.
        execute: trains runs.
        message: takes a line for the user.
        progress: takes the number of runs that are done, with the part of the present one.
    """

    folder: Path
    seeds: Sequence[int]
    keys: list[str]
    read: Callable[[str, list[str]], Recipe]
    execute: Execute
    message: Callable[[str], None] = lambda line: None
    progress: Progress = lambda runs: None
    done: int = field(default=0, init=False)
    outcomes: dict[Setting, dict[int, Outcome]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.table, self.keys = self.folder / "sweep.h5", ["recipe", *self.keys]
        if not self.table.exists():
            return
        old = Sweep.load(self.table)
        self.keys += [key for key in old.keys if key not in self.keys]
        for row, old_seeds in zip(old.rows, old.seed_lists, strict=True):
            setting = _setting({key: value for key, value in row.items() if value})
            ends = {seed: self._run_folder(setting, seed) / "last.h5" for seed in old_seeds}
            outcomes = {seed: _outcome(path) for seed, path in ends.items() if path.exists()}
            if outcomes:
                self.outcomes[setting] = outcomes

    def _run_folder(self, setting: Setting, seed: int) -> Path:
        return self.folder / folder_name(setting) / f"seed-{seed}"

    def run(self, settings: Iterable[Setting]) -> None:
        """Run every setting with every seed; runs that are in the folder are checked first, and not repeated.

        Raises OperationError where a folder holds a run of another recipe than its name says.
        """
        waiting: dict[Path, tuple[TrainingJob, Setting, int]] = {}
        for setting, seed in itertools.product(settings, self.seeds):
            (_, label), *rest = setting
            changes = [*(f"{key}={value}" for key, value in rest), f"seed={seed}"]
            recipe = self.read(label, changes)
            folder = self._run_folder(setting, seed)
            end = launch.ended(recipe, folder)
            if end:
                self.outcomes.setdefault(setting, {})[seed] = Outcome.of(end)
                self.done += 1
            else:
                self.outcomes.get(setting, {}).pop(seed, None)
                waiting[folder] = TrainingJob(recipe, folder), setting, seed
        self.save()

        def record(run: TrainingJob, seconds: float | None) -> None:
            _, setting, seed = waiting[run.folder]
            outcome = _outcome(run.folder / "last.h5")
            self.outcomes.setdefault(setting, {})[seed] = outcome
            self.done += 1
            self.message(f"{run.folder.relative_to(self.folder)}: {outcome}")
            self.progress(self.done)
            self.save()

        self.execute(
            [run for run, _, _ in waiting.values()], record, lambda share: self.progress(self.done + share)
        )

    def score(self, setting: Setting) -> tuple[int, float]:
        """(number of diverged seeds, mean final test loss of all); lower is better."""
        outcomes = [self.outcomes[setting][seed] for seed in self.seeds]
        loss = float(np.mean([o.test_loss for o in outcomes]))
        return sum(o.diverged for o in outcomes), loss if loss < math.inf else math.inf

    def result(self) -> Sweep:
        """The table now: sorted by its columns, numbers before words."""

        def order(setting: Setting) -> list[tuple[int, float, str]]:
            values = dict(setting)
            return [_rank(values.get(key, "")) for key in self.keys]

        rows = sorted((s for s, outcomes in self.outcomes.items() if outcomes), key=order)
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for setting in rows:
            outcomes = list(self.outcomes[setting].values())
            for name in ("test_loss", "test_error", "best_test_error"):
                values = [getattr(o, name) for o in outcomes]
                with np.errstate(invalid="ignore", over="ignore"):  # a diverged run's loss may be infinite
                    columns[name].append(float(np.mean(values)))
                    columns[f"{name}_std"].append(
                        float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
                    )
            columns["diverged"].append(sum(o.diverged for o in outcomes))
            columns["seconds"].append(float(np.mean([o.seconds for o in outcomes])))
        seeds = [" ".join(map(str, sorted(self.outcomes[s]))) for s in rows]
        table = [[dict(s).get(key, "") for key in self.keys] for s in rows]
        arrays: dict[str, Any] = {k: np.array(v, dtype=np.float64) for k, v in columns.items()}
        settings = texts(table).reshape(len(rows), len(self.keys))
        return Sweep(keys=tuple(self.keys), settings=settings, seeds=texts(seeds), **arrays)

    def save(self) -> None:
        """Write DIR/sweep.csv and DIR/sweep.h5, once a run has ended."""
        result = self.result()
        if len(result.seeds):
            result.save(self.table)
            result.to_csv(self.table.with_suffix(".csv"))


def _outcome(path: Path) -> Outcome:
    return Outcome.of(Checkpoint.load(path, learners=lambda n: slice(0)))


def _rank(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def search(
    runner: Runner, bases: Sequence[Setting], key: str, low: float, high: float, rounds: int
) -> dict[Setting, str]:
    """The value of ``key`` in [low, high] with the best :meth:`Runner.score`, for each of ``bases``.

    By halving, in the logarithm: both ends and the middle are tried; then, ``rounds`` times, the two points
    half as far as before from the best so far. 3 + 2·rounds settings at most: 19 with 8 rounds, where
    neighbours differ by 2.7% for a range of six decades. DPSGD-2020 (section 4.3) speaks of a binary search
    over about 20 settings; this halving and its criterion, the final test loss, are ours.
    It finds the best value if the score has one valley; with seeds that differ, the best of those tried.
    """
    last = 2 ** (rounds + 1)

    def at(base: Setting, point: int) -> Setting:
        value = low * (high / low) ** (point / last)
        return _setting({**dict(base), key: canonical(f"{value:.6g}")})

    all_scores: dict[Setting, dict[int, tuple[int, float]]] = {base: {} for base in bases}
    points = {base: [0, last // 2, last] for base in bases}
    best = dict.fromkeys(bases, 0)
    for half in range(rounds + 1):
        runner.run([at(base, point) for base in bases for point in points[base]])
        reach = last >> (half + 2)
        for base, scores in all_scores.items():
            scores |= {point: runner.score(at(base, point)) for point in points[base]}
            best[base] = min(scores, key=lambda point: scores[point])
            near = (best[base] - reach, best[base] + reach)
            points[base] = [point for point in near if 0 <= point <= last and point not in scores]
    return {base: dict(at(base, point))[key] for base, point in best.items()}

"""landscape sweep"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from landscape.cli import common, processes
from landscape.cli.completion import names
from landscape.cli.options import FOLDER, command, group, parse_seeds
from landscape.core.errors import InputError
from landscape.core.memory import pick_device
from landscape.results.training import Sweep
from landscape.train.experiments import sweep as sweeping
from landscape.train.processes.process_group import started_by_launcher
from landscape.train.recipes import table_recipes
from landscape.train.run.launch import train_runs

# More rounds would need values that six digits cannot distinguish.
MAX_ROUNDS = 16


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for the best value of ``key`` between ``low`` and ``high``, in ``rounds`` halvings."""

    key: str
    low: float
    high: float
    rounds: int


def search_of(search: str | None, rounds: int = 8) -> Search | None:
    """The search, if there is one; InputError for a value that is not allowed.

    Args:
        search: Find the value of KEY with the lowest final test loss, such as algorithm.sigma=1e-5..10.
        rounds: Halvings of --search: at most 3 + 2·ROUNDS values. DPSGD-2020 evaluates about 20.
    """
    if not 1 <= rounds <= MAX_ROUNDS:
        raise InputError(f"--rounds: {rounds} is not allowed, it must be 1 to {MAX_ROUNDS}")
    return Search(*parse_search(search), rounds) if search else None


@command(
    recipes={
        "argument": True,
        "metavar": "RECIPE…",
        "required": True,
        "shell_complete": names(table_recipes.names),
    },
    settings={"metavar": "KEY=V1,V2,…"},
    seeds={"metavar": "N-M,…"},
    search=group(search_of, search={"metavar": "KEY=LO..HI"}),
    output=FOLDER | {"required": True},
    jobs=processes.JOBS,
)
def sweep(
    *,
    recipes: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: str = "0",
    search: Search | None,
    output: str,
    jobs: processes.Jobs,
    allow_code: bool,
) -> None:
    """Train all combinations of RECIPEs, values and seeds; a table has mean and deviation.

    RECIPE is a name, a .toml file or a pattern of names such as 'cifar10/resnet-18-b8192-*'. A run is in
    DIR/SETTING/seed-N, with the files of landscape train; the table is in DIR/sweep.csv and DIR/sweep.h5,
    which are rewritten after each run. The same command resumes after an interruption; other values and seeds
    are added to the table. Runs that diverge are counted in the table; they are no failure.

    --search evaluates both ends of the range and its middle, then ROUNDS times the two neighbours of the
    best value so far, at half the previous distance on a log scale. The best value has the fewest diverged
    seeds, and among those the lowest mean final loss.

    Args:
        settings: Values of a key of the recipes; one value changes it in all runs.
        seeds: Seeds of each setting: 0-4, or 0,1,5.
        output: Folder of the runs and the table.

    Example:
        landscape sweep mnist-fig2a-ssgd mnist-fig2a-dpsgd --set lr=0.2,0.5,1 --seeds 0-2 -o lr
    """
    if started_by_launcher():
        raise InputError("sweep: not allowed under torchrun; --jobs makes several runs at once")
    if not jobs.cluster:  # whose workers have their own devices
        pick_device(jobs.device)
    read = functools.partial(table_recipes.read, allow_code=allow_code)
    sources = label(recipes)
    seed_list = parse_seeds(seeds)
    bases = sweeping.grid(sources, settings)
    keys = [s.partition("=")[0].strip() for s in settings]
    total, first_value = len(bases) * len(seed_list), list[str]()
    if search:
        if search.key in (*keys, "seed"):
            raise InputError(f"--search: {search.key} is not allowed, --set or --seeds give it")
        keys, total = [search.key, *keys], total * (3 + 2 * search.rounds)
        first_value = [f"{search.key}={search.low:g}"]
    for setting in bases:  # bad values are reported before the folder is made
        read(sources[setting[0][1]], [*(f"{k}={v}" for k, v in setting[1:]), *first_value])
    folder = Path(output)
    common.make_folder(folder)
    common.lock(folder)
    execute = functools.partial(
        train_runs, executor=jobs.executor(), device=jobs.device, data_dir=jobs.data_dir
    )
    with common.progress_bar("sweep") as bar:
        runner = sweeping.Runner(
            folder,
            seed_list,
            keys,
            read=lambda label, changes: read(sources[label], changes),
            execute=execute,
            message=common.message,
            progress=lambda runs: bar(runs / total),
        )
        if search:
            best = sweeping.search(runner, bases, search.key, search.low, search.high, search.rounds)
        else:
            runner.run(bases)
    result = runner.result()
    common.values(table(result))
    if search:
        found = [{**dict(setting), search.key: value} for setting, value in best.items()]
        common.values("\n".join(best_values(search.key, best)), best=found)
    common.results([result])
    common.files(folder / "sweep.csv", folder / "sweep.h5")


def best_values(key: str, best: Mapping[sweeping.Setting, str]) -> list[str]:
    """The best value of ``key`` of each setting, a line each: the recipe, the keys that vary, the value."""
    shown = {"recipe", *_varying(map(dict, best))}
    lines = []
    for setting, value in best.items():
        words = [v if k == "recipe" else f"{k}={v}" for k, v in setting if k in shown]
        lines.append(f"{', '.join(words)}: best {key} of the values evaluated: {value}")
    return lines


def label(recipes: tuple[str, ...]) -> dict[str, str]:
    """Label -> recipe: names and patterns as they are, files by their stem."""
    sources: dict[str, str] = {}
    for pattern in recipes:
        known = [name for name in table_recipes.names() if fnmatchcase(name, pattern)]
        for source in known or [pattern]:
            name = Path(source).stem if source.endswith(".toml") else source
            if name in sources:
                raise InputError(
                    f"RECIPE: '{name}' is given twice; a sweep distinguishes recipes by their names"
                )
            sources[name] = source
    return sources


def parse_search(text: str) -> tuple[str, float, float]:
    """("algorithm.sigma", 1e-5, 10.0) of "algorithm.sigma=1e-5..10"."""
    match = re.fullmatch(r"\s*([\w.-]+)\s*=\s*(\S+?)\s*\.\.\s*(\S+)\s*", text)
    try:
        low, high = (float(match[2]), float(match[3])) if match else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if not match or not 0 < low < high < math.inf:
        raise InputError(
            f"--search: '{text}' is not allowed, it must be KEY=LO..HI with 0 < LO < HI, such as "
            "algorithm.sigma=1e-5..10"
        )
    return match[1], low, high


def table(result: Sweep) -> str:
    """The rows, a line each: what varies, then the numbers."""
    rows = result.rows
    varying = _varying(rows) or ["recipe"]
    head = [*varying, "seeds", "test loss", "test error %", "best %", "diverged", "s"]
    lines = [head]
    for i, (row, seeds) in enumerate(zip(rows, result.seed_lists, strict=True)):
        lines.append(
            [
                *(row[k] for k in varying),
                str(len(seeds)),
                _pm(result.test_loss[i], result.test_loss_std[i], ".4g", ".2g"),
                _pm(result.test_error[i], result.test_error_std[i], ".2f", ".2f"),
                f"{result.best_test_error[i]:.2f}",
                f"{result.diverged[i]:.0f}",
                f"{result.seconds[i]:.1f}",
            ]
        )
    return common.columns(lines)


def _varying(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The keys of which ``rows`` have more than one value."""
    every = list(rows)
    return [key for key in every[0] if len({row[key] for row in every}) > 1]


def _pm(mean: float, spread: float, form: str, spread_form: str) -> str:
    return f"{mean:{form}}" if np.isnan(spread) else f"{mean:{form}} ± {spread:{spread_form}}"

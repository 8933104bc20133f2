"""landscape sweep"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import click
import numpy as np

from landscape import paper
from landscape.cli import common, options
from landscape.cli.processes import timeout as timeout_option
from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.results.sweep import Sweep
from landscape.train import sweep as sweeping
from landscape.train.distributed.process_group import started_by_launcher
from landscape.train.launch import pick_device

# More rounds would need values that six digits cannot distinguish.
MOST_ROUNDS = 16


@click.command(
    epilog="Example: landscape sweep mnist-fig2a-ssgd mnist-fig2a-dpsgd --set lr=0.2,0.5,1 --seeds 0-2 -o lr"
)
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True)
@click.option(
    "--set",
    "settings",
    metavar="KEY=V1,V2,…",
    multiple=True,
    help="Values of a key of the recipes; one value changes it in all runs.",
)
@click.option("--seeds", default="0", show_default=True, help="Seeds of each setting: 0-4, or 0,1,5.")
@click.option(
    "--search",
    metavar="KEY=LO..HI",
    help="Find the value of KEY with the lowest final test loss, such as algorithm.sigma=1e-5..10.",
)
@click.option(
    "--rounds",
    default=8,
    show_default=True,
    help="Halvings of --search: at most 3 + 2·ROUNDS values. DPSGD-2020 evaluates about 20.",
)
@click.option("-o", "--output", metavar="DIR", required=True, help="Folder of the runs and the table.")
@click.option(
    "--nproc", default=1, show_default=True, help="Number of runs at a time, each in its own process."
)
@timeout_option
@options.allow_code
@options.device
@options.data_dir
@options.quiet
def sweep(
    recipes: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: str,
    search: str | None,
    rounds: int,
    output: str,
    nproc: int,
    timeout: float,
    allow_code: bool,
    device: str,
    data_dir: str | None,
    quiet: bool,
) -> None:
    """Train all combinations of RECIPEs, values and seeds; a table has mean and deviation.

    RECIPE is a name, a .toml file or a pattern of names such as 'cifar10/resnet-18-b8192-*'. A run is in
    DIR/SETTING/seed-N, with the files of landscape train; the table is in DIR/sweep.csv and DIR/sweep.h5,
    which are rewritten after each run. The same command resumes after an interruption; other values and seeds
    are added to the table. Runs that diverge are counted in the table; they are no failure.

    --search evaluates both ends of the range and its middle, then ROUNDS times the two neighbours of the
    best value so far, at half the previous distance on a log scale. The best value has the fewest diverged
    seeds, and among those the lowest mean final loss.
    """
    positive("--nproc", nproc, least=1)
    positive("--timeout", timeout)
    if not 1 <= rounds <= MOST_ROUNDS:
        raise InputError(f"--rounds: {rounds} is not allowed, it must be 1 to {MOST_ROUNDS}")
    if started_by_launcher():
        raise InputError("sweep: not allowed under torchrun; --nproc makes several runs at once")
    pick_device(device)
    read = functools.partial(paper.read, allow_code=allow_code)
    sources = label(recipes)
    wanted = parse_seeds(seeds)
    bases = sweeping.grid(sources, settings)
    keys = [s.partition("=")[0].strip() for s in settings]
    total = len(bases) * len(wanted)
    tried: list[str] = []
    if search:
        key, low, high = parse_search(search)
        if key in (*keys, "seed"):
            raise InputError(f"--search: {key} is not allowed, --set or --seeds give it")
        keys, total, tried = [key, *keys], total * (3 + 2 * rounds), [f"{key}={low:g}"]
    for setting in bases:  # a bad value is found before the folder is made
        read(sources[setting[0][1]], [*(f"{k}={v}" for k, v in setting[1:]), *tried])
    execute = sweeping.one_by_one(device, data_dir)
    if nproc > 1:
        execute = sweeping.at_once(nproc, device, data_dir, timeout)
    folder = Path(output)
    common.make_folder(folder)
    common.lock(folder)
    with common.progress_bar("sweep", quiet) as bar:
        runner = sweeping.Runner(
            folder,
            sources,
            wanted,
            keys,
            read=read,
            execute=execute,
            total=total,
            message=lambda line: common.message(line, quiet),
            progress=bar,
        )
        if search:
            best = sweeping.search(runner, bases, key, low, high, rounds)
        else:
            runner.run(bases)
    common.message(table(runner.result()), quiet)
    for base, value in best.items() if search else ():
        told = [
            v if k == "recipe" else f"{k}={v}"
            for k, v in base
            if k in ("recipe", *_varying(map(dict, bases)))
        ]
        common.message(f"{', '.join(told)}: best {key} of the values evaluated: {value}", quiet)
    for name in ("sweep.csv", "sweep.h5"):
        click.echo(str(folder / name))


def label(recipes: tuple[str, ...]) -> dict[str, str]:
    """Label -> recipe: names and patterns as they are, files by their stem."""
    found: dict[str, str] = {}
    for given in recipes:
        known = [name for name in paper.names() if fnmatchcase(name, given)]
        for source in known or [given]:
            name = Path(source).stem if source.endswith(".toml") else source
            if name in found:
                raise InputError(
                    f"RECIPE: '{name}' is given twice; a sweep distinguishes recipes by their names"
                )
            found[name] = source
    return found


def parse_seeds(text: str) -> list[int]:
    """[0, 1, 2, 5] of "0-2,5"."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= 1000:
            raise InputError(
                f"--seeds: '{text}' is not allowed, it must be whole numbers such as 0-4 or 0,1,5"
            )
        seeds += range(first, last + 1)
    return sorted(set(seeds))


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
    widths = [max(len(line[c]) for line in lines) for c in range(len(head))]
    return "\n".join("  ".join(w.rjust(n) for w, n in zip(line, widths, strict=True)) for line in lines)


def _varying(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The keys of which ``rows`` have more than one value."""
    every = list(rows)
    return [key for key in every[0] if len({row[key] for row in every}) > 1]


def _pm(mean: float, spread: float, form: str, spread_form: str) -> str:
    return f"{mean:{form}}" if np.isnan(spread) else f"{mean:{form}} ± {spread:{spread_form}}"

"""landscape train, sweep and import."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import latest
from landscape.checkpoint.states import files_of, name_beside
from landscape.cli import common, processes
from landscape.cli.common import SOURCE, Source, imported
from landscape.cli.info import closing
from landscape.cli.options import FOLDER, SHARED, Choice, command, names, parse_seeds
from landscape.cli.output import current
from landscape.core.errors import InputError, OperationError
from landscape.core.options import SPLITS, Count, Natural, Positive, ends_in
from landscape.results.grids import Sweep
from landscape.training.experiments import operating_point
from landscape.training.experiments.sweep import Rounds
from landscape.training.experiments.sweep import sweep as compute_sweep
from landscape.training.processes import children
from landscape.training.processes.children import TIMEOUT
from landscape.training.processes.process_group import Group, started_by_launcher, worker_device
from landscape.training.recipes import names as recipe_names
from landscape.training.recipes.recipe import Recipe
from landscape.training.recipes.settings import key_and_value, parse_value, parsed
from landscape.training.run import WRITERS
from landscape.training.run.launch import complete, in_processes, launch
from landscape.training.run.loop import Hooks
from landscape.training.run.setup import DivergedError, chosen_recipe, default_folder, divergence_message


@command(
    recipe={"argument": True, "metavar": "[RECIPE]", "shell_complete": names(recipe_names)},
    output=FOLDER,
    nproc={"metavar": "N"},
    max_restarts={"metavar": "K"},
    scalars={"type": Choice(WRITERS)},
    timeout=processes.TIMEOUT_S,
)
def train(
    *,
    recipe: str | None,
    settings: tuple[str, ...],
    output: str | None,
    resume: bool,
    force: bool,
    nproc: Count = 1,
    max_restarts: Natural = 0,
    scalars: str | None,
    timeout: Positive = TIMEOUT,
    allow_code: bool,
    device: str,
    data_dir: str | None,
) -> None:
    """Train learners by a recipe, every step decomposed.

    RECIPE is a built-in name or a .toml file.

    Model and data may be MODULE:NAME, your own code. It runs if --set names it, or if a file names it and
    --allow-code is given.

    Writes DIR/last.h5, DIR/step-NNNNNNN.h5 and DIR/recipe.toml. With --resume, RECIPE may be left out. With
    --nproc, or under torchrun (see docs/cluster.md), several processes share the learners, and each writes
    DIR/logs/rank-R.log.

    The exit code is 3 if the run diverged, with a message; its files are complete.

    Args:
        settings: Change a key of the recipe, such as lr=0.5 or algorithm.mixing='ring(1)'; ~KEY takes it out.
        output: Folder of the run. [default: runs/NAME-seedN]
        resume: Resume from DIR/last.h5; the result is bit-identical to an uninterrupted run.
        force: First delete the run in DIR.
        nproc: Processes on this machine that share the learners.
        max_restarts: How often all processes are restarted from last.h5 after one is lost.
        scalars: Where each row of the history goes, too, as --set scalars=…; the package must be installed.
        timeout: Seconds that a process may be silent, or that an exchange in training may take.
        allow_code: Run code that a file names as MODULE:NAME for its model or data; code named by --set
            always runs.

    Example:
        landscape train mnist-fig2a-dpsgd --set seed=1 --data-dir ~/data -o runs/dp-1
    """
    if scalars and recipe is None:
        raise InputError("scalars: not allowed without the recipe; give its name or file, too")
    settings += (f"scalars={scalars}",) if scalars else ()
    chosen = chosen_recipe(recipe, parsed(settings), allow_code)
    folder = output or (default_folder(chosen) if chosen else "")
    if not folder:
        raise InputError("recipe: missing; give a name (landscape recipes), a .toml file, or -o DIR --resume")
    about: dict[str, Any] = {"resume": resume, "force": force, "device": device, "data_dir": data_dir}
    about["allow_code"] = allow_code
    if (nproc > 1 or max_restarts) and (force or not complete(chosen, Path(folder))):
        now = current()
        flags = {"--quiet": now.quiet, "--json": now.as_json, "--verbose": now.verbose}
        about["output_flags"] = [flag for flag, is_set in flags.items() if is_set]
        end = in_processes(chosen, Path(folder), nproc, max_restarts, timeout, **about)
        _check_divergence(end, folder)
    else:
        _train(chosen, folder, timeout, about)


def _train(chosen: Recipe | None, folder: str, timeout: float, about: dict[str, Any]) -> None:
    """Train in this process, which may be one of a group."""
    joined: AbstractContextManager[Group | None] = nullcontext()
    if started_by_launcher():
        joined = processes.joined(worker_device(about["device"]), timeout)
    with joined as group:
        first = group is None or group.rank == 0
        current().muted = not first
        with common.progress_bar("training") as bar:
            row: dict[str, float] = {}  # the last number of each column

            def record(new: dict[str, float]) -> None:
                row.update((name, value) for name, value in new.items() if not math.isnan(value))

            def show(done: int, total: int) -> None:
                bar(done / total, present(row))

            hooks = Hooks(message=common.message, step=show, row=record)
            end = launch(chosen, folder, hooks=hooks, group=group, **about)
        if first:
            advice = next_command(end, folder, about["data_dir"])
            common.values(closing(end), run=numbers(end), next=advice)
            common.files(f"{folder}/last.h5")
            common.message(f"next: {advice}")
    if children.launcher_store() is None:  # the launcher of --nproc reads it from the last checkpoint
        _check_divergence(end, folder, group.rank if group else 0)


def _check_divergence(end: Checkpoint, folder: str, rank: int = 0) -> None:
    """Raise DivergedError if the run has; only rank 0 says so."""
    if end.diverged and rank:
        sys.exit(DivergedError.exit_code)
    if end.diverged:
        raise DivergedError(f"{folder}: {divergence_message(end)}")


@command(
    recipes={"argument": True, "metavar": "RECIPE…", "required": True, "shell_complete": names(recipe_names)},
    settings={"metavar": "KEY=V1,V2,…"},
    seeds={"metavar": "N-M,…"},
    search={"metavar": "KEY=LO..HI"},
    output=FOLDER | {"required": True},
    jobs=processes.JOBS,
)
def sweep(
    *,
    recipes: tuple[str, ...],
    settings: tuple[str, ...],
    seeds: str = "0",
    search: str | None,
    rounds: Rounds = 8,
    output: str,
    jobs: processes.Jobs,
    allow_code: bool,
) -> None:
    """Train all combinations of recipes, values and seeds.

    A table has mean and deviation.

    RECIPE is a name, a .toml file or a pattern of names such as 'cifar10/resnet-18-b8192-*'. A run is in
    DIR/SETTING/seed-N, with the files of landscape train; the table is in DIR/sweep.csv and DIR/sweep.h5,
    which are rewritten after each run. The same command resumes after an interruption; other values and seeds
    are added to the table. Runs that diverge are counted in the table; they are no failure.

    --search evaluates both ends of the range and its middle, then ROUNDS times the two neighbors of the
    best value so far, at half the previous distance on a log scale. The best value has the fewest diverged
    seeds, and among those the lowest mean final loss.

    Args:
        settings: Values of a key of the recipes; one value changes it in all runs.
        seeds: Seeds of each setting: 0-4, or 0,1,5.
        search: Find the value of KEY with the lowest final test loss, such as algorithm.sigma=1e-5..10.
        rounds: Halvings of --search: at most 3 + 2·ROUNDS values. DPSGD-2020 evaluates about 20.
        output: Folder of the runs and the table.
        allow_code: Run code that a file names as MODULE:NAME for its model or data; code named by --set
            always runs.

    Example:
        landscape sweep mnist-fig2a-ssgd mnist-fig2a-dpsgd --set lr=0.2,0.5,1 --seeds 0-2 -o lr
    """
    folder, target = Path(output), parse_search(search) if search else None
    with common.progress_bar("sweep") as bar:
        options: dict[str, Any] = {"seeds": parse_seeds(seeds), "search": target, "rounds": rounds}
        options |= {"allow_code": allow_code, "message": common.message, "progress": bar}
        result = compute_sweep(recipes, folder, **options, **vars(jobs), **values_of(settings))
    common.values(table(result))
    if jobs.share:
        common.message(f"share {jobs.share} has ended; the same command without --share makes the table")
        return
    if target:
        best = result.best(target[0])
        common.values("\n".join(best_values(target[0], best)), best=best)
    common.results([result])
    common.files(folder / "sweep.csv", folder / "sweep.h5")


def values_of(settings: Iterable[str]) -> dict[str, Any]:
    """The values of each key of "KEY=V1,V2" settings."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, written = key_and_value(setting)
        if key in values:
            raise InputError(f"settings: {key} is given twice; give its values with commas, {key}=V1,V2")
        values[key] = [parse_value(value) for value in split(written)]
    return values


def split(text: str) -> list[str]:
    """The parts of a text between commas outside brackets and quotes."""
    parts: list[str] = []
    for piece in text.split(","):
        if parts and (any(parts[-1].count(q) % 2 for q in "\"'") or _open(parts[-1])):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return [part.strip() for part in parts]


def _open(text: str) -> bool:
    return any(text.count(start) > text.count(end) for start, end in ("()", "[]", "{}"))


def best_values(key: str, best: list[dict[str, str]]) -> list[str]:
    """The best value of ``key`` of each setting, a line each: the recipe, the keys that vary, the value."""
    keys = {"recipe", *_varying(best)} - {key}
    lines = []
    for row in best:
        words = [v if k == "recipe" else f"{k}={v}" for k, v in row.items() if k in keys]
        lines.append(f"{', '.join(words)}: best {key} of the values evaluated: {row[key]}")
    return lines


def parse_search(text: str) -> tuple[str, float, float]:
    """("algorithm.sigma", 1e-5, 10.0) of "algorithm.sigma=1e-5..10"."""
    match = re.fullmatch(r"\s*([\w.-]+)\s*=\s*(\S+?)\s*\.\.\s*(\S+)\s*", text)
    try:
        low, high = (float(match[2]), float(match[3])) if match else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if not match or not 0 < low < high < math.inf:
        raise InputError(f"--search: '{text}' is not allowed, it must be KEY=LO..HI with 0 < LO < HI")
    return match[1], low, high


def table(result: Sweep) -> str:
    """The rows, a line each: what varies, then the numbers."""
    rows = result.rows
    varying = _varying(rows) or ["recipe"]
    head = [*varying, "seeds", "test loss", "test error %", "best %", "diverged", "s"]
    lines = [head]
    for i, (row, seeds) in enumerate(zip(rows, result.seed_lists, strict=True)):
        loss = _pm(result.test_loss[i], result.test_loss_std[i], ".4g", ".2g")
        error = _pm(result.test_error[i], result.test_error_std[i], ".2f", ".2f")
        rest = f"{result.best_test_error[i]:.2f}", f"{result.diverged[i]:.0f}", f"{result.seconds[i]:.1f}"
        lines.append([*(row[k] for k in varying), str(len(seeds)), loss, error, *rest])
    return common.columns(lines)


def _varying(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The keys of which ``rows`` have more than one value."""
    every = list(rows)
    return [key for key in every[0] if len({row[key] for row in every}) > 1]


def _pm(mean: float, spread: float, form: str, spread_form: str) -> str:
    return f"{mean:{form}}" if np.isnan(spread) else f"{mean:{form}} ± {spread:{spread_form}}"


def numbers(end: Checkpoint) -> dict[str, Any]:
    """The numbers of the summary, for --json; None where they are not known."""
    names = ("loss", "test_loss", "consensus", "lr_lambda_max", "lr_lambda_limit")
    last = {name: latest(end.history, name) for name in names}
    limit = last["lr_lambda_limit"]
    return {
        **{name: getattr(end, name) for name in ("algorithm", "seed", "step", "diverged", "diverged_at")},
        **last,
        "test_error": 1 - latest(end.history, "test_accuracy"),
        "seconds": latest(end.history, "wall_s"),
        "share_of_limit": last["lr_lambda_max"] / limit if limit else math.nan,
    }


def present(row: Mapping[str, float]) -> str:
    """The last numbers of a run that goes on, by column, in a few words.

    Example:
        >>> present({"loss": 0.25, "test_accuracy": 0.9})
        'loss 0.25, test error 10.00%'
    """
    words = [f"loss {row['loss']:.3g}"] if "loss" in row else []
    words += [f"test error {1 - row['test_accuracy']:.2%}"] if "test_accuracy" in row else []
    words += [f"ηλ_max {row['lr_lambda_max']:.3g}"] if "lr_lambda_max" in row else []
    return ", ".join(words)


def next_command(end: Checkpoint, folder: str, data_dir: str | None) -> str:
    """The command to try next, and what it shows."""
    if end.diverged:
        return f"{shlex.join(['landscape', 'plot', folder])}  # where the run left its bounds"
    if operating_point(end)[2]:
        words, shows = ["stability", folder], "λ_max, and the rates that its delay allows"
    else:
        words, shows = ["contour", folder, "--plot", f"{folder}/contour.png"], "the landscape around the end"
    words += ["--data-dir", data_dir] if data_dir else []
    line = shlex.join(["landscape", *words])
    for option, spec in (("--model", end.model), ("--data", end.data)):
        if ":" in spec["name"]:  # a file names a user's code and never runs it
            line += f" {option} {user_code.command_text(spec['name'], spec['options'])}"
    return f"{line}  # {shows}"


@command(
    "import",
    states=SHARED["files"] | {"metavar": "STATE…"},
    output={"help": "Checkpoint. [default: the first STATE's name, .h5]"},
    source=SOURCE,
)
def import_state(states: tuple[str, ...], output: str | None, source: Source) -> None:
    """Import weights of other programs as a checkpoint.

    A STATE is a .pt, .pth, .bin, .ckpt or .safetensors file, the index of its parts (.index.json), or a
    folder of save_pretrained.

    Several STATEs of one model become its learners. Only weights are read, never code: a file with anything
    else than weights is refused. With --data, loss and accuracy on each split are printed.

    MODULE:NAME is found in the current folder or among the installed packages, and called with the options
    in brackets, if any: nets:resnet(depth=20). A model must be an nn.Module. Data is a dict of splits such as
    {"train": …, "test": …, "loss": …}, an object with such attributes, or one split for both; a split is
    (x, y), one dict of tensors, or batches of these. Checkpoints name such code but never run it: name it
    again at each analysis:

    \b
      landscape contour net.h5 --model nets:resnet20 --data nets:cifar

    Example:
        landscape import net.pt --model nets:resnet20 --data nets:cifar -o net.h5
    """
    paths, data = [Path(state) for state in states], source.data_spec
    for state in paths:
        files_of(state)
    path = Path(output) if output else name_beside(paths[0]).with_suffix(".h5")
    ends_in("-o", path, [".h5"])
    checkpoint = imported(paths, source)
    if path.exists():
        old = Checkpoint.load(path)
        recorded = old.recipe, old.model, old.data["name"]
        imported_values = checkpoint.recipe, checkpoint.model, data.name if data else ""
        for before, after in zip(recorded, imported_values, strict=True):
            if before != after:
                raise OperationError(f"-o: {path} is of {before!r}, not of {after!r}; give another name")
        common.message(f"{path}: complete already, nothing is imported")
        common.files(path)
        return
    checkpoint.path = path
    if data:
        checkpoint.data = _evaluated(checkpoint, source, data)
    common.make_folder(path.parent)
    checkpoint.save(path)
    common.files(path)


def _evaluated(checkpoint: Checkpoint, source: Source, spec: user_code.Spec) -> dict[str, Any]:
    """The entry of the data in the checkpoint; loss and accuracy on each split are printed."""
    data, sizes = source.user_data, dict.fromkeys(SPLITS, 0)
    splits = [name for name in sizes if not isinstance(data, user_code.UserData) or name in data.splits]
    losses: dict[str, dict[str, float]] = {}
    with common.progress_bar("evaluation") as bar:
        for k, split in enumerate(splits):
            problem = source.of(checkpoint, "cpu", split).problem()
            loss, accuracy = problem.evaluate()
            sizes[split] = problem.samples
            losses[split] = {"loss": loss, "accuracy": accuracy, "samples": problem.samples}
            bar((k + 1) / len(splits))
    for split, of in losses.items():  # so that a user sees whether the weights are right
        right = "" if math.isnan(of["accuracy"]) else f", accuracy {100 * of['accuracy']:.2f}%"
        common.values(f"{split}: loss {of['loss']:.6g}{right} ({of['samples']:,} samples)")
    common.values("", splits=losses)
    mark = data.fingerprint if data else ""
    return {"name": spec.name, "options": spec.options, **sizes, "fingerprint": mark}

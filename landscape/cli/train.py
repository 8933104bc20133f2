"""landscape train, sweep and import."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
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
from landscape.cli.info import end_of_run_line
from landscape.cli.options import FOLDER, SHARED, Choice, command, offer, parse_seeds
from landscape.cli.output import current as current_output
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
from landscape.training.run.launch import in_processes, is_complete, launch
from landscape.training.run.loop import Hooks
from landscape.training.run.setup import DivergedError, chosen_recipe, default_folder, divergence_message


@command(
    recipe={"argument": True, "metavar": "[RECIPE]", "shell_complete": offer(recipe_names)},
    output=FOLDER,
    nproc={"metavar": "N"},
    max_restarts={"metavar": "K"},
    scalars={"type": Choice(WRITERS)},
    timeout=processes.SECONDS,
)
def train(
    *, recipe: str | None, settings: tuple[str, ...], output: str | None, resume: bool, force: bool,
    nproc: Count = 1, max_restarts: Natural = 0, scalars: str | None, timeout: Positive = TIMEOUT,
    allow_code: bool, device: str, data_dir: str | None,
) -> None:  # fmt: skip
    """Train learners by a recipe, and decompose each step.

    RECIPE is a built-in name or a .toml file.

    A step of w_a, the mean weights of the learners, is decomposed into a part along the gradient of the whole
    training loss, and a part orthogonal to the gradient, which is the noise. Both parts are recorded.

    Writes DIR/last.h5, DIR/step-NNNNNNN.h5 and DIR/recipe.toml. With --nproc, or under torchrun (see
    docs/cluster.md), several processes share the learners, and each writes DIR/logs/rank-R.log. If the run
    diverges, a message says so and the exit code is 3; its files are complete.

    Args:
        settings: Change a key of the recipe, such as lr=0.5 or algorithm.mixing='ring(1)'; ~KEY removes KEY.
        output: Folder of the run. [default: runs/NAME-seedN]
        resume: Resume from DIR/last.h5, also without RECIPE; the result is bit-identical to an uninterrupted
            run.
        force: First delete the run in DIR.
        nproc: Processes on this machine that share the learners.
        max_restarts: Number of times that all processes restart from last.h5 after one is lost.
        scalars: Also write each row of the history with this writer, as --set scalars=… does; its package
            must be installed.
        timeout: Seconds that a process may be silent, or that an exchange in training may take.
        allow_code: Allow a recipe's file to name your own model or data as MODULE:NAME; --set may always name
            them.

    Example:
        landscape train mnist-fig2a-dpsgd --set seed=1 --data-dir ~/data -o runs/dp-1
    """
    if scalars and recipe is None:
        raise InputError("scalars: not allowed without the recipe; give its name or file, too")
    if scalars:
        settings += (f"scalars={scalars}",)
    changed_recipe = chosen_recipe(recipe, parsed(settings), allow_code)  # None without RECIPE
    folder = output or ""
    if changed_recipe and not output:
        folder = default_folder(changed_recipe)
    if not folder:
        raise InputError("recipe: missing; give a name (landscape recipes), a .toml file, or -o DIR --resume")
    options: dict[str, Any] = {"resume": resume, "force": force, "device": device, "data_dir": data_dir}
    options["allow_code"] = allow_code
    uses_processes = nproc > 1 or max_restarts > 0
    # For a complete run no processes are started: ``_train`` only prints how the run ended.
    if uses_processes and (force or not is_complete(changed_recipe, Path(folder))):
        out = current_output()
        flags = {"--quiet": out.quiet, "--json": out.as_json, "--verbose": out.verbose}
        options["output_flags"] = [flag for flag, is_set in flags.items() if is_set]
        end = in_processes(changed_recipe, Path(folder), nproc, max_restarts, timeout, **options)
        _check_divergence(end, folder)
    else:
        _train(changed_recipe, folder, timeout, options)


def _train(recipe: Recipe | None, folder: str, timeout: float, options: dict[str, Any]) -> None:
    """Train in this process, and print how the run ended.

    If a launcher started several processes, all of them call this function; only rank 0 prints.
    """
    group_context: AbstractContextManager[Group | None] = nullcontext()
    if started_by_launcher():
        group_context = processes.joined(worker_device(options["device"]), timeout)
    with group_context as group:
        rank = group.rank if group else 0
        current_output().muted = rank > 0
        with common.progress_bar("training") as bar:
            last_values: dict[str, float] = {}  # column of the history -> its last number, NaN left out

            def keep_numbers(row: dict[str, float]) -> None:
                last_values.update((name, value) for name, value in row.items() if not math.isnan(value))

            def show_progress(done: int, total: int) -> None:
                bar(done / total, progress_text(last_values))

            hooks = Hooks(message=common.message, step=show_progress, row=keep_numbers)
            end = launch(recipe, folder, hooks=hooks, group=group, **options)
        if rank == 0:
            advice = next_command(end, folder, options["data_dir"])
            common.print_values(end_of_run_line(end), run=final_numbers(end), next=advice)
            common.print_files(f"{folder}/last.h5")
            common.message(f"next: {advice}")
    # With --nproc there is a launcher store, and the launching process checks for divergence.
    if children.launcher_store() is None:
        _check_divergence(end, folder, rank)


def _check_divergence(end: Checkpoint, folder: str, rank: int = 0) -> None:
    """Raise DivergedError if the run diverged; on other ranks than 0, exit without a message."""
    if end.diverged and rank:
        sys.exit(DivergedError.exit_code)
    if end.diverged:
        raise DivergedError(f"{folder}: {divergence_message(end)}")


@command(
    recipes={"argument": True, "metavar": "RECIPE…", "required": True, "shell_complete": offer(recipe_names)},
    settings={"metavar": "KEY=V1,V2,…"},
    seeds={"metavar": "N-M,…"},
    search={"metavar": "KEY=LO..HI"},
    output=FOLDER | {"required": True},
    jobs=processes.JOBS,
)
def sweep(
    *, recipes: tuple[str, ...], settings: tuple[str, ...], seeds: str = "0", search: str | None,
    rounds: Rounds = 8, output: str, jobs: processes.Jobs, allow_code: bool,
) -> None:  # fmt: skip
    """Train all combinations of recipes, values and seeds.

    A table has the mean and the standard deviation over the seeds.

    RECIPE is a name, a .toml file or a pattern of names such as 'cifar10/resnet-18-b8192-*'. Runs are in
    DIR/SETTING/seed-N, with the files of landscape train; the table is in DIR/sweep.csv and DIR/sweep.h5. The
    same command resumes after an interruption; with other values or seeds it adds these to the table. Runs
    that diverge are counted in the table, and are no errors.

    --search evaluates the ends and the middle of the range. Then, ROUNDS times, it halves the distance
    between values on a log scale, and evaluates the two neighbors of the best value so far. The best value
    has the fewest diverged seeds and, among values with equally many, the lowest mean final loss.

    Args:
        settings: Values of a key of the recipes, such as lr=0.2,0.5; a single value is for all runs.
        seeds: Seeds of each setting, such as 0-4 or 0,1,5.
        search: Find the value of KEY with the lowest final test loss, such as algorithm.sigma=1e-5..10.
        rounds: Number of halvings of --search, which evaluates at most 3 + 2·ROUNDS values (DPSGD-2020
            evaluated about 20).
        output: Folder of the runs and the table.
        allow_code: Allow a recipe's file to name your own model or data as MODULE:NAME; --set may always name
            them.

    Example:
        landscape sweep mnist-fig2a-ssgd mnist-fig2a-dpsgd --set lr=0.2,0.5,1 --seeds 0-2 -o lr
    """
    folder = Path(output)
    search_range = parse_search(search) if search else None  # (key, lowest value, highest value)
    with common.progress_bar("sweep") as bar:
        options: dict[str, Any] = {"seeds": parse_seeds(seeds), "search": search_range, "rounds": rounds}
        # vars(jobs) has the values of jobs, timeout, share, device and data_dir.
        options |= {"allow_code": allow_code, "message": common.message, "progress": bar, **vars(jobs)}
        result = compute_sweep(recipes, folder, **options, **values_of(settings))
    common.print_values(table(result))
    if jobs.share:
        common.message(f"share {jobs.share} has ended; the same command without --share makes the table")
        return
    if search_range:
        key = search_range[0]
        best = result.best(key)
        common.print_values("\n".join(best_values(key, best)), best=best)
    common.add_results([result])  # to the output of --json and -v
    common.print_files(folder / "sweep.csv", folder / "sweep.h5")


def values_of(settings: Iterable[str]) -> dict[str, Any]:
    """Return the values of each key of settings such as "KEY=V1,V2"."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, value_texts = key_and_value(setting)
        if key in values:
            raise InputError(f"settings: {key} is given twice; give its values with commas, {key}=V1,V2")
        values[key] = [parse_value(text) for text in split(value_texts)]
    return values


def split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets and quotes."""
    items: list[str] = []
    for piece in text.split(","):
        if items and _is_open(items[-1]):
            items[-1] += f",{piece}"
        else:
            items.append(piece)
    return [item.strip() for item in items]


def _is_open(text: str) -> bool:
    """Return whether a text has a quote or a bracket that it does not close."""
    open_bracket = any(text.count(start) > text.count(end) for start, end in ("()", "[]", "{}"))
    return open_bracket or any(text.count(quote) % 2 for quote in "\"'")


def best_values(key: str, best: list[dict[str, str]]) -> list[str]:
    """Return a line for each setting: its recipe, the keys that vary, and the best value of ``key``."""
    keys = {"recipe", *_varying(best)} - {key}
    lines = []
    for row in best:
        words = [text if name == "recipe" else f"{name}={text}" for name, text in row.items() if name in keys]
        lines.append(f"{', '.join(words)}: best {key} of the values evaluated: {row[key]}")
    return lines


def parse_search(text: str) -> tuple[str, float, float]:
    """Return ("algorithm.sigma", 1e-5, 10.0) for the text "algorithm.sigma=1e-5..10"."""
    match = re.fullmatch(r"\s*([\w.-]+)\s*=\s*(\S+?)\s*\.\.\s*(\S+)\s*", text)
    try:
        low, high = (float(match[2]), float(match[3])) if match else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if not match or not 0 < low < high < math.inf:
        raise InputError(f"--search: '{text}' is not allowed, it must be KEY=LO..HI with 0 < LO < HI")
    return match[1], low, high


def table(result: Sweep) -> str:
    """Return the table of a sweep: for each setting the keys that vary, then the numbers."""
    rows = result.rows
    varying = _varying(rows) or ["recipe"]
    lines = [[*varying, "seeds", "test loss", "test error %", "best %", "diverged", "s"]]
    for i, (row, seeds) in enumerate(zip(rows, result.seed_lists, strict=True)):
        loss = _with_std(f"{result.test_loss[i]:.4g}", result.test_loss_std[i], ".2g")
        error = _with_std(f"{result.test_error[i]:.2f}", result.test_error_std[i], ".2f")
        rest = f"{result.best_test_error[i]:.2f}", f"{result.diverged[i]:.0f}", f"{result.seconds[i]:.1f}"
        lines.append([*(row[key] for key in varying), str(len(seeds)), loss, error, *rest])
    return common.table_text(lines)


def _varying(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys with more than one value in ``rows``."""
    return [key for key in rows[0] if len({row[key] for row in rows}) > 1]


def _with_std(mean: str, std: float, number_format: str) -> str:
    """Return the text of a mean with its standard deviation, if there is one."""
    return mean if np.isnan(std) else f"{mean} ± {std:{number_format}}"


def final_numbers(end: Checkpoint) -> dict[str, Any]:
    """Return the numbers at the end of a run, for --json; NaN for those that were not measured."""
    columns = ("loss", "test_loss", "consensus", "lr_lambda_max", "lr_lambda_limit")
    last = {name: latest(end.history, name) for name in columns}
    limit = last["lr_lambda_limit"]
    return {
        **{name: getattr(end, name) for name in ("algorithm", "seed", "step", "diverged", "diverged_at")},
        **last,
        "test_error": 1 - latest(end.history, "test_accuracy"),
        "seconds": latest(end.history, "wall_s"),
        "share_of_limit": last["lr_lambda_max"] / limit if limit else math.nan,
    }


def progress_text(row: Mapping[str, float]) -> str:
    """Return the last numbers of an unfinished run, by column, in a few words.

    Example:
        >>> progress_text({"loss": 0.25, "test_accuracy": 0.9})
        'loss 0.25, test error 10.00%'
    """
    words = [f"loss {row['loss']:.3g}"] if "loss" in row else []
    words += [f"test error {1 - row['test_accuracy']:.2%}"] if "test_accuracy" in row else []
    words += [f"ηλ_max {row['lr_lambda_max']:.3g}"] if "lr_lambda_max" in row else []
    return ", ".join(words)


def next_command(end: Checkpoint, folder: str, data_dir: str | None) -> str:
    """Return the command to try next, with a comment that says what it shows."""
    if end.diverged:
        return f"{shlex.join(['landscape', 'plot', folder])}  # where the run diverged"
    _, _, delay = operating_point(end)
    if delay:
        words, comment = ["stability", folder], "λ_max, and the rates that its delay allows"
    else:
        words = ["contour", folder, "--plot", f"{folder}/contour.png"]
        comment = "the landscape around the end"
    if data_dir:
        words += ["--data-dir", data_dir]
    line = shlex.join(["landscape", *words])
    for option, spec in (("--model", end.model), ("--data", end.data)):
        if ":" in spec["name"]:  # code of the user, which must be named again
            line += f" {option} {user_code.command_text(spec['name'], spec['options'])}"
    return f"{line}  # {comment}"


@command(
    "import",
    states=SHARED["files"] | {"metavar": "STATE…"},
    output={"help": "Checkpoint. [default: the first STATE's name, .h5]"},
    source=SOURCE,
)
def import_state(states: tuple[str, ...], output: str | None, source: Source) -> None:
    """Import weights of other programs as a checkpoint.

    A STATE is a .pt, .pth, .bin, .ckpt or .safetensors file, the index of its shards (.index.json), or a
    folder of save_pretrained.

    Several STATEs of one model become its learners. Only weights are read, never code: a file with other
    contents is refused. With --data, loss and accuracy on each split are printed.

    Name your code as MODULE:NAME, such as nets:resnet(depth=20). MODULE is in the current folder or an
    installed package. NAME is called with the options in brackets, if any. A model must be an nn.Module. Data
    is a dict of splits such as {"train": …, "test": …, "loss": …}, an object with these attributes, or a
    single split, used as training and test set. A split is (x, y), one dict of tensors, or batches of these.
    A checkpoint names your code, but never runs it. Name the code again for each analysis:

    \b
      landscape contour net.h5 --model nets:resnet20 --data nets:cifar

    Example:
        landscape import net.pt --model nets:resnet20 --data nets:cifar -o net.h5
    """
    paths, data_spec = [Path(state) for state in states], source.data_spec
    for state in paths:
        files_of(state)  # raises an error for a file that cannot be read as weights
    path = Path(output) if output else name_beside(paths[0]).with_suffix(".h5")
    ends_in("-o", path, [".h5"])
    checkpoint = imported(paths, source)
    if path.exists():
        saved_checkpoint = Checkpoint.load(path)  # its ``recipe`` has the names and SHA-256 of its STATEs
        saved_values = saved_checkpoint.recipe, saved_checkpoint.model, saved_checkpoint.data["name"]
        new_values = checkpoint.recipe, checkpoint.model, data_spec.name if data_spec else ""
        for old, new in zip(saved_values, new_values, strict=True):
            if old != new:
                raise OperationError(f"-o: {path} is of {old!r}, not of {new!r}; give another name")
        common.message(f"{path}: complete already, nothing is imported")
        common.print_files(path)
        return
    checkpoint.path = path
    if data_spec:
        sizes = _evaluate(checkpoint, source)
        checkpoint.data = {"name": data_spec.name, "options": data_spec.options, **sizes}
        checkpoint.data["fingerprint"] = source.user_data.fingerprint if source.user_data else ""
    common.make_folder(path.parent)
    checkpoint.save(path)
    common.print_files(path)


def _evaluate(checkpoint: Checkpoint, source: Source) -> dict[str, int]:
    """Print loss and accuracy on each split, and return the number of samples of each split."""
    data, sizes = source.user_data, dict.fromkeys(SPLITS, 0)
    splits = [name for name in sizes if not isinstance(data, user_code.UserData) or name in data.splits]
    losses: dict[str, dict[str, float]] = {}
    with common.progress_bar("evaluation") as bar:
        for split in splits:
            problem = source.of(checkpoint, "cpu", split).problem()
            loss, accuracy = problem.evaluate()
            sizes[split] = problem.samples
            losses[split] = {"loss": loss, "accuracy": accuracy, "samples": problem.samples}
            bar(len(losses) / len(splits))
    for split, numbers in losses.items():  # so that a user sees whether the weights are right
        accuracy = numbers["accuracy"]
        accuracy_text = "" if math.isnan(accuracy) else f", accuracy {100 * accuracy:.2f}%"
        common.print_values(f"{split}: loss {numbers['loss']:.6g}{accuracy_text} ({sizes[split]:,} samples)")
    common.add_values(splits=losses)
    return sizes

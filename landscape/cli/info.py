"""landscape info, recipes and topologies; torch is imported only where a network is read."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import tomllib
import types
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint import history
from landscape.checkpoint.history import latest
from landscape.cli import output
from landscape.cli.options import command, offer, paths
from landscape.cli.output import print_files, print_values
from landscape.core import hdf5
from landscape.results import base
from landscape.results.surfaces import Surface
from landscape.training import recipes as built_in_recipes
from landscape.training import topology


@command(file={"argument": True, "metavar": "FILE", "shell_complete": paths("file")})
def info(file: str) -> None:
    """Show what a checkpoint or a result contains.

    A checkpoint is validated.

    Example:
        landscape info runs/dp/last.h5
    """
    path = history.checkpoint_in(Path(file))
    with hdf5.reading(path, warn=False) as raw:
        names = ("schema", "version", "created", "landscape_version", "torch_version")
        stamps = {key: raw.attrs[key] for key in names}
    is_run = stamps["schema"] == history.SCHEMA
    # For a file of another format, load_results raises the error that says why it is not read.
    contents: Any = history.read_fields(path) if is_run else base.load_results(path)
    _print_stamps(path, stamps)
    if is_run:
        _print_checkpoint(types.SimpleNamespace(**contents))
    else:
        _print_results(contents)


def _print_stamps(path: Path, stamps: dict[str, object]) -> None:
    """Print which versions wrote the file, and whether its checksum fits."""
    stamps["checksum"] = "SHA-256, fits" if hdf5.has_checksum(path) else "none"
    print_values("\n".join(f"{key}: {value}" for key, value in stamps.items()), file=stamps)


def _print_results(results: list[base.Result]) -> None:
    """Print summary and fields of the results of a file."""
    for result in results:
        print_values(f"\n{result.summary()}")
        if isinstance(result, Surface) and np.isfinite(result.loss).any():
            print_values(f"\n{result.check()}")
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        print_values("\n" + "\n".join(f"{name}: {_short(value)}" for name, value in fields.items()))
    output.add_results(results)


def _short(value: object) -> str:
    """Return the text of a value; for an array its type, shape and range."""
    if not isinstance(value, np.ndarray):
        return str(value)
    if value.dtype == bool:
        return f"{value.dtype} {value.shape}, {value.sum():,} of {value.size:,} true"
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    span = f", {finite.min():.6g} to {finite.max():.6g}" if finite.size and value.dtype.kind in "fi" else ""
    return f"{value.dtype} {value.shape}{span}"


MAX_STATES = 8  # tensors of the optimizer's state that are listed (our choice)


def _print_checkpoint(run: Any) -> None:
    """Print what a run's checkpoint contains; ``run`` has the contents of the file as attributes."""
    columns, data = run.history, run.data
    finite_counts = {name: int(np.isfinite(column).sum()) for name, column in columns.items()}
    history_entries = {name: {"rows": n, "last": latest(columns, name)} for name, n in finite_counts.items()}
    learners, size = run.weights.shape
    is_finite = bool(np.isfinite(run.weights).all())
    attributes = ("model", "data", "algorithm", "seed", "step", "epoch", "diverged_at", "recipe")
    entries = {"learners": learners, "parameters": size, "finite": is_finite, "history": history_entries}
    output.add_values(checkpoint={name: getattr(run, name) for name in attributes} | entries)
    dtype = run.weights.dtype
    print_values(f"weights: {learners} learners × {size:,} {dtype}, {'' if is_finite else 'NOT '}finite")
    print_values(f"model: {run.model['name']} {run.model['options']}")
    names = list(run.buffers)
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        print_values(f"buffers and frozen parameters: {', '.join(names[:4])}{more}")
        if run.mean_buffers:  # w_a has statistics of its own
            print_values("BatchNorm statistics of w_a: estimated again at w_a")
    fingerprint = f", fingerprint {data['fingerprint'][:12]}…" if data["fingerprint"] else ""
    sizes = f"{data['train']:,} train, {data['test']:,} test{fingerprint}"
    if data["name"]:
        print_values(f"data: {data['name']} {data['options']}, {sizes}")
    else:  # imported without data, or recorded in a training loop of the user's own
        print_values(f"data: the loop's own, {sizes}" if data["train"] else "data: not known")
    if run.algorithm == history.IMPORTED:  # ``recipe`` then has the names of the files in place of a recipe
        print_values(f"imported from:\n{run.recipe}".rstrip("\n"))
        return
    epoch = f" (epoch {run.epoch:.3g})" if math.isfinite(run.epoch) else ""
    print_values(f"algorithm: {run.algorithm}, seed {run.seed}, step {run.step:,}{epoch}")
    if run.description:
        print_values(run.description)
    for name, state in [*run.optimizer.items()][:MAX_STATES]:
        print_values(f"optimizer state: {name} {tuple(state.shape)}")
    if len(run.optimizer) > MAX_STATES:
        print_values(f"optimizer state: {len(run.optimizer) - MAX_STATES} more tensors")
    # The state of the update rule: of each learner (``rule``), and common to all learners (``shared``).
    for name, state in {**run.rule, **run.shared}.items():
        print_values(f"state: {name} {tuple(state.shape)}")
    has_recipe = run.algorithm != history.RECORDED  # a recorded run has a few settings in place of a recipe
    if has_recipe:
        print_values(end_of_run_line(run))
    for name, count in finite_counts.items():
        last_text = f"last {latest(columns, name):.6g}" if count else "never recorded"
        print_values(f"  {name}: {count} of {len(columns[name])} rows, {last_text}")
    title = "recipe:" if has_recipe else "recorded:"
    print_values("\n".join([title, *(f"  {line}" for line in run.recipe.splitlines())]))


def end_of_run_line(end: Any) -> str:
    """Return one line about the end of a run, from its last checkpoint."""
    if not len(end.history["step"]):
        return "no step that could be made" if end.diverged else "no step to make"
    last = {name: float(column[-1]) for name, column in end.history.items()}
    error = 1 - last["test_accuracy"]
    error_text = "" if math.isnan(error) else f", test error {100 * error:.2f}%"
    outcome = f"diverged at step {end.diverged_at}: the {end.diverged}" if end.diverged else "did not diverge"
    numbers = f"test loss {last['test_loss']:.4g}{error_text}, consensus distance {last['consensus']:.3g}"
    return f"step {end.step}: {numbers}{limit_note(end)}, {outcome}, {last['wall_s']:.1f} s"


def limit_note(end: Any) -> str:
    """Return ", ηλ_max …", the last ηλ_max of a run with its limit; "" if it was not measured."""
    value, limit = latest(end.history, "lr_lambda_max"), latest(end.history, "lr_lambda_limit")
    if math.isnan(value):
        return ""
    share = f" of {limit:.3g} ({value / limit:.0%} of the limit)" if limit > 0 else ""
    return f", ηλ_max {value:.3g}{share}"


#: Built-in recipe -> its text with all defaults, and its description; ``tests.test_commands`` writes it.
RECIPES = Path(__file__).with_name("recipes.json.gz")


@command(name={"argument": True, "metavar": "[NAME]", "shell_complete": offer(built_in_recipes.names)})
def recipes(name: str | None) -> None:
    """List the built-in recipes, or print one.

    With NAME (or a .toml file), prints that recipe with all defaults; the properties of its mixing matrix
    (spectral gap, smallest eigenvalue ω_min, largest stable ηλ) go to stderr.

    If NAME is a pattern, such as 'cifar10/resnet-18-*', the matching recipes are listed. Without NAME, all
    recipes are listed; the recipes of a paper's table share one line, in which NETWORK stands for each of the
    networks named at the end.

    Example:
        landscape recipes mnist-fig2a-dpsgd > mine.toml
    """
    summaries = built_in_recipes.recipes(name)
    # A built-in recipe is printed if its name is given. A name without any summary is that of a file, or
    # ``recipe.read`` below raises an error.
    if name and (name in summaries or not summaries):
        if name in summaries:
            text, description = json.loads(gzip.decompress(RECIPES.read_bytes()))[name]
        else:
            from landscape.training.recipes import recipe  # here, because it imports torch

            # ``allow_code`` is safe: the user's code that a recipe names is not run here.
            recipe_of_file = recipe.read(name, allow_code=True)
            text, description = recipe_of_file.to_toml(), recipe_of_file.describe()
        print_values(text.rstrip("\n"), recipe=tomllib.loads(text), description=description)
        if description:
            output.message(description)
        return
    width = max(map(len, summaries))
    lines = [f"{recipe_name:{width}} {summary}" for recipe_name, summary in summaries.items()]
    if not name:
        lines += [f"{series.pattern}: {series.where}" for series in built_in_recipes.SERIES]
        lines.append(f"The tables are DPSGD-2020's. NETWORK: {', '.join(built_in_recipes.NETWORKS)}")
    print_values("\n".join(lines), recipes=[built_in_recipes.facts(listed) for listed in summaries])


# ``picture`` is the option --plot, as in all commands.
@command(
    mixings={"argument": True, "metavar": "[MIXING]…", "shell_complete": offer(topology.default_mixings)},
    learners={"metavar": "N"},
    parameters={"metavar": "P"},
)
def topologies(
    *, mixings: tuple[str, ...], learners: int = 8, parameters: int = 1_000_000, picture: str | None = None
) -> None:
    """List the topologies for a number of learners, or compare some.

    Columns: the spectral gap and the smallest eigenvalue ω_min of the mixing matrix; the largest stable ηλ of
    DPSGD without momentum, if each learner takes its gradient, averages with its neighbors, and then moves
    (AWC order); the number of mixing steps after which all learners have exactly the average ("-": never);
    the mean number of bytes that a learner sends in a step. For a cycle of matrices, the gap per step is
    computed from the product of the matrices, and ω_min is the smallest eigenvalue of all matrices.

    MIXING is a value of algorithm.mixing, such as ring(2), base, or a file. The picture shows each topology
    as a graph, with a panel for each step.

    Args:
        learners: Number of learners.
        parameters: Number of parameters of the network, 4 bytes each.
        picture: Also draw a picture: .png, .pdf or .svg.

    Example:
        landscape topologies base 'ring(2)' --learners 25 --parameters 11000000 --plot graphs.png
    """
    if picture:
        from landscape.cli import common  # here, because it imports torch

        common.check_targets(None, picture)
    options: dict[str, Any] = {"learners": learners, "parameters": parameters, "picture": picture}
    with output.progress_bar("topologies") as bar:
        rows = topology.topologies(mixings or None, progress=bar, **options)  # None: all topologies
    lines = [["mixing", "gap", "ω_min", "ηλ <", "exact after", "bytes a step"]]
    for mixing, row in rows.items():
        numbers = f"{row['gap']:.4f}", f"{row['omega_min']:.4f}", f"{row['limit']:.4g}"
        lines.append([mixing, *numbers, str(row["rounds"] or "-"), f"{row['bytes']:,.0f}"])
    print_values(output.table_text(lines), topologies=rows)
    if not mixings:
        unavailable = [mixing for mixing in topology.default_mixings() if mixing not in rows]
        if unavailable:
            output.message(f"not for {learners} learners: {', '.join(unavailable)}")
        output.message(f"forms: {', '.join(topology.forms())}; a file .csv, .txt or .npy")
    if picture:
        print_files(picture)

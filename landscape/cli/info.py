"""landscape info and recipes, without an import of torch where only results are read or recipes listed."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint.history import latest
from landscape.cli import output
from landscape.cli.options import command, names, paths
from landscape.cli.output import values
from landscape.core import hdf5, registry
from landscape.core.errors import OperationError
from landscape.results import base
from landscape.results.surfaces import Surface
from landscape.training import recipes as named


@command(file={"argument": True, "metavar": "FILE", "shell_complete": paths("file")})
def info(file: str) -> None:
    """Show what a checkpoint or a result contains.

    A checkpoint is validated.

    Example:
        landscape info runs/dp/last.h5
    """
    path = Path(file)
    if path.is_dir():
        from landscape.checkpoint import storage  # and torch, as below

        path = storage.checkpoint_in(path)
    with hdf5.reading(path, warn=False) as raw:
        names = ("schema", "version", "created", "landscape_version", "torch_version")
        stamps = {key: raw.attrs[key] for key in names}
    if stamps["schema"] in registry.results:
        results = base.load_results(path)
        _stamps(path, stamps)
        _results(results)
    else:
        from landscape.checkpoint import storage

        checkpoint = storage.load(path)  # or why a file of another format is not read
        _stamps(path, stamps)
        _checkpoint(checkpoint)


def _stamps(path: Path, stamps: dict[str, object]) -> None:
    """Print which versions wrote the file, and whether its checksum fits."""
    stamps["checksum"] = "SHA-256, fits" if hdf5.has_checksum(path) else "none"
    for key, value in stamps.items():
        values(f"{key}: {value}")
    values("", file=stamps)


def _results(results: list[base.Result]) -> None:
    """Print summary and fields of the results of a file."""
    for result in results:
        values(f"\n{result.summary()}")
        if isinstance(result, Surface) and np.isfinite(result.loss).any():
            values(f"\n{result.check()}")
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        values("\n" + "\n".join(f"{name}: {_short(value)}" for name, value in fields.items()))
    output.results(results)


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


def _checkpoint(checkpoint: Any) -> None:
    """Print what a run's checkpoint contains."""
    from landscape.checkpoint.checkpoint import IMPORTED  # and torch

    recorded, data = checkpoint.history, checkpoint.data
    rows = {name: int(np.isfinite(column).sum()) for name, column in recorded.items()}
    history = {name: {"rows": count, "last": latest(recorded, name)} for name, count in rows.items()}
    weights = checkpoint.weights.numpy()
    finite = bool(np.isfinite(weights).all())
    attributes = ("learners", "model", "data", "algorithm", "seed", "step", "epoch", "diverged_at", "recipe")
    entries = {name: getattr(checkpoint, name) for name in attributes}
    entries |= {"parameters": checkpoint.layout.size, "finite": finite, "history": history}
    values("", checkpoint=entries)
    learners, size = weights.shape
    values(f"weights: {learners} learners × {size:,} {weights.dtype}, {'' if finite else 'NOT '}finite")
    values(f"model: {checkpoint.model['name']} {checkpoint.model['options']}")
    if names := list(checkpoint.buffers):
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        values(f"buffers and frozen parameters: {', '.join(names[:4])}{more}")
        if checkpoint.mean_buffers:
            values("BatchNorm statistics of the mean: re-estimated at its weights")
    fingerprint = f", fingerprint {data['fingerprint'][:12]}…" if data["fingerprint"] else ""
    sizes = f"{data['train']:,} train, {data['test']:,} test{fingerprint}"
    if data["name"]:
        values(f"data: {data['name']} {data['options']}, {sizes}")
    else:
        values(f"data: the loop's own, {sizes}" if data["train"] else "data: not known")
    if checkpoint.algorithm == IMPORTED:
        values(f"imported from:\n{checkpoint.recipe}".rstrip("\n"))
        return
    epoch = f" (epoch {checkpoint.epoch:.3g})" if math.isfinite(checkpoint.epoch) else ""
    values(f"algorithm: {checkpoint.algorithm}, seed {checkpoint.seed}, step {checkpoint.step:,}{epoch}")
    if checkpoint.has_recipe and (rule := _rule(checkpoint)):
        values(rule)
    for name, state in [*checkpoint.optimizer.items()][:MAX_STATES]:
        values(f"optimizer state: {name} {tuple(state.shape)}")
    if len(checkpoint.optimizer) > MAX_STATES:
        values(f"optimizer state: {len(checkpoint.optimizer) - MAX_STATES} more tensors")
    for name, state in {**checkpoint.rule, **checkpoint.shared}.items():
        values(f"state: {name} {tuple(state.shape)}")
    if checkpoint.has_recipe:
        values(closing(checkpoint))
    for name, count in rows.items():
        last = f"last {latest(recorded, name):.6g}" if count else "never recorded"
        values(f"  {name}: {count} of {len(recorded[name])} rows, {last}")
    title = "recipe:" if checkpoint.has_recipe else "recorded:"
    values("\n".join([title, *(f"  {line}" for line in checkpoint.recipe.splitlines())]))


def _rule(checkpoint: Any) -> str:
    """Return the description of the update rule, such as its mixing; or why its matrix file is not read."""
    from landscape.training.recipes.recipe import recipe_of

    try:
        return recipe_of(checkpoint).describe()
    except OperationError as error:
        return str(error)


def closing(end: Any) -> str:
    """Return one line about the end of a run, from its last checkpoint."""
    if not len(end.history["step"]):
        return "no step that could be made" if end.diverged else "no step to make"
    last = {name: float(column[-1]) for name, column in end.history.items()}
    error = 1 - last["test_accuracy"]
    error_text = "" if math.isnan(error) else f", test error {100 * error:.2f}%"
    outcome = f"diverged at step {end.diverged_at}: the {end.diverged}" if end.diverged else "did not diverge"
    numbers = f"test loss {last['test_loss']:.4g}{error_text}, consensus distance {last['consensus']:.3g}"
    return f"step {end.step}: {numbers}{standing(end)}, {outcome}, {last['wall_s']:.1f} s"


def standing(end: Any) -> str:
    """Return ", ηλ_max …", the last ηλ_max of a run with its limit; "" if it was not measured."""
    value, limit = latest(end.history, "lr_lambda_max"), latest(end.history, "lr_lambda_limit")
    if math.isnan(value):
        return ""
    share = f" of {limit:.3g} ({value / limit:.0%} of the limit)" if limit > 0 else ""
    return f", ηλ_max {value:.3g}{share}"


@command(name={"argument": True, "metavar": "[NAME]", "shell_complete": names(named.names)})
def recipes(name: str | None) -> None:
    """List the built-in recipes, or print one.

    With NAME (or a .toml file), it prints that recipe with all defaults.

    NAME may be a pattern, such as 'cifar10/resnet-18-*': then the matching recipes are listed. Without NAME,
    the recipes of a paper's table are one line. The properties of a recipe's mixing matrix (gap, ω_min,
    stability limit) go to stderr.

    Example:
        landscape recipes mnist-fig2a-dpsgd > mine.toml
    """
    summaries = named.recipes(name)
    if name and (name in summaries or not summaries):
        from landscape.training.recipes import recipe  # and torch, as above

        chosen = recipe.read(name, allow_code=True)  # the code is only named, and does not run
        text, description = chosen.to_toml(), chosen.describe()
        values(text.rstrip("\n"), recipe=tomllib.loads(text), description=description)
        if description:
            output.message(description)
        return
    width = max(map(len, summaries))
    lines = [f"{recipe_name:{width}} {summary}" for recipe_name, summary in summaries.items()]
    if not name:
        lines += [f"{series.pattern}: {series.where}" for series in named.SERIES]
        lines.append(f"The tables are DPSGD-2020's. NETWORK: {', '.join(named.NETWORKS)}")
    values("\n".join(lines), recipes=[named.facts(recipe_name) for recipe_name in summaries])

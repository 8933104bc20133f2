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
from landscape.cli.options import command, names, paths
from landscape.cli.output import values
from landscape.core import hdf5
from landscape.results import base
from landscape.results.surfaces import Surface
from landscape.training import recipes as named
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
    # Of another format the latter says why it is not read.
    contents: Any = history.stored(path) if is_run else base.load_results(path)
    _stamps(path, stamps)
    _checkpoint(types.SimpleNamespace(**contents)) if is_run else _results(contents)


def _stamps(path: Path, stamps: dict[str, object]) -> None:
    """Print who wrote the file, and whether its checksum fits."""
    stamps["checksum"] = "SHA-256, fits" if hdf5.has_checksum(path) else "none"
    for key, value in stamps.items():
        values(f"{key}: {value}")
    values("", file=stamps)


def _results(every: list[base.Result]) -> None:
    for result in every:
        values(f"\n{result.summary()}")
        if isinstance(result, Surface) and np.isfinite(result.loss).any():
            values(f"\n{result.check()}")
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        values("\n" + "\n".join(f"{name}: {_short(value)}" for name, value in fields.items()))
    output.results(every)


def _short(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    if value.dtype == bool:
        return f"{value.dtype} {value.shape}, {value.sum():,} of {value.size:,} true"
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    span = f", {finite.min():.6g} to {finite.max():.6g}" if finite.size and value.dtype.kind in "fi" else ""
    return f"{value.dtype} {value.shape}{span}"


MOST = 8  # tensors of the optimizer's state that are listed (our choice)


def _checkpoint(c: Any) -> None:
    """Print what a run's checkpoint contains."""
    rows = {name: int(np.isfinite(column).sum()) for name, column in c.history.items()}
    columns = {name: {"rows": count, "last": latest(c.history, name)} for name, count in rows.items()}
    (n, size), finite = c.weights.shape, bool(np.isfinite(c.weights).all())
    same = ("model", "data", "algorithm", "seed", "step", "epoch", "diverged_at", "recipe")
    facts = {"learners": n, "parameters": size, "finite": finite, "history": columns}
    values("", checkpoint={name: getattr(c, name) for name in same} | facts)
    values(f"weights: {n} learners × {size:,} {c.weights.dtype}, {'' if finite else 'NOT '}finite")
    values(f"model: {c.model['name']} {c.model['options']}")
    if c.buffers:
        names = list(c.buffers)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        values(f"buffers and frozen parameters: {', '.join(names[:4])}{more}")
        if c.mean_buffers:
            values("BatchNorm statistics of the mean: re-estimated at its weights")
    mark = f", fingerprint {c.data['fingerprint'][:12]}…" if c.data["fingerprint"] else ""
    sizes = f"{c.data['train']:,} train, {c.data['test']:,} test{mark}"
    if c.data["name"]:
        values(f"data: {c.data['name']} {c.data['options']}, {sizes}")
    else:
        values(f"data: the loop's own, {sizes}" if c.data["train"] else "data: not known")
    if c.algorithm == history.IMPORTED:
        values(f"imported from:\n{c.recipe}".rstrip("\n"))
        return
    epoch = f" (epoch {c.epoch:.3g})" if math.isfinite(c.epoch) else ""
    values(f"algorithm: {c.algorithm}, seed {c.seed}, step {c.step:,}{epoch}")
    if c.description:
        values(c.description)
    for name, state in [*c.optimizer.items()][:MOST]:
        values(f"optimizer state: {name} {tuple(state.shape)}")
    if len(c.optimizer) > MOST:
        values(f"optimizer state: {len(c.optimizer) - MOST} more tensors")
    for name, state in {**c.rule, **c.shared}.items():
        values(f"state: {name} {tuple(state.shape)}")
    has_recipe = c.algorithm != history.RECORDED
    if has_recipe:
        values(closing(c))
    for name, of in columns.items():
        last = f"last {of['last']:.6g}" if of["rows"] else "never recorded"
        values(f"  {name}: {of['rows']} of {len(c.history[name])} rows, {last}")
    title = "recipe:" if has_recipe else "recorded:"
    values("\n".join([title, *(f"  {line}" for line in c.recipe.splitlines())]))


def closing(end: Any) -> str:
    """One line about the end of a run."""
    if not len(end.history["step"]):
        return "no step that could be made" if end.diverged else "no step to make"
    last = {name: float(column[-1]) for name, column in end.history.items()}
    wrong = 1 - last["test_accuracy"]
    error = "" if math.isnan(wrong) else f", test error {100 * wrong:.2f}%"
    drift = f"diverged at step {end.diverged_at}: the {end.diverged}" if end.diverged else "did not diverge"
    numbers = f"test loss {last['test_loss']:.4g}{error}, consensus distance {last['consensus']:.3g}"
    return f"step {end.step}: {numbers}{standing(end)}, {drift}, {last['wall_s']:.1f} s"


def standing(end: Any) -> str:
    """The last ηλ_max beside its limit: ", ηλ_max …"; "" if it was not measured."""
    value, limit = latest(end.history, "lr_lambda_max"), latest(end.history, "lr_lambda_limit")
    if math.isnan(value):
        return ""
    share = f" of {limit:.3g} ({value / limit:.0%} of the limit)" if limit > 0 else ""
    return f", ηλ_max {value:.3g}{share}"


#: Built-in recipe -> its text with all defaults, and its description; ``tests.test_commands`` writes it.
RECIPES = Path(__file__).with_name("recipes.json.gz")


@command(name={"argument": True, "metavar": "[NAME]", "shell_complete": names(named.names)})
def recipes(name: str | None) -> None:
    """List the built-in recipes, or print one.

    With NAME (or a .toml file), print that recipe with all defaults.

    NAME may be a pattern, such as 'cifar10/resnet-18-*': then the matching recipes are listed. Without a
    pattern, the recipes of a paper's table are one line. The properties of a recipe's mixing matrix (gap,
    ω_min, stability limit) go to stderr.

    Example:
        landscape recipes mnist-fig2a-dpsgd > mine.toml
    """
    listed = named.recipes(name)
    if name and (name in listed or not listed):
        if name in listed:
            text, description = json.loads(gzip.decompress(RECIPES.read_bytes()))[name]
        else:
            from landscape.training.recipes import recipe  # and torch, as above

            chosen = recipe.read(name, allow_code=True)  # which is only printed
            text, description = chosen.to_toml(), chosen.describe()
        values(text.rstrip("\n"), recipe=tomllib.loads(text), description=description)
        if description:
            output.message(description)
        return
    width = max(map(len, listed))
    lines = [f"{name:{width}} {summary}" for name, summary in listed.items()]
    if not name:
        lines += [f"{series.pattern}: {series.where}" for series in named.SERIES]
        lines.append(f"The tables are DPSGD-2020's. NETWORK: {', '.join(named.NETWORKS)}")
    values("\n".join(lines), recipes=[named.facts(recipe_name) for recipe_name in listed])


@command(
    mixings={"argument": True, "metavar": "[MIXING]…", "shell_complete": names(topology.default_mixings)},
    learners={"metavar": "N"},
    parameters={"metavar": "P"},
)
def topologies(
    *, mixings: tuple[str, ...], learners: int = 8, parameters: int = 1_000_000, picture: str | None = None
) -> None:
    """List the topologies, or compare some, for so many learners.

    Columns: the spectral gap and the smallest eigenvalue ω_min of the mixing matrix; the largest stable ηλ of
    DPSGD in AWC order without momentum; after how many steps from the first the learners have exactly the
    average ("-": never); the bytes that a learner sends in a step, the mean over the steps. Of a cycle of
    matrices the gap is per step, ω_min that of any.

    MIXING is what algorithm.mixing may be, such as ring(2), base, or a file. The picture has them as graphs,
    a panel for each step.

    Args:
        learners: How many learners.
        parameters: How many parameters the network has, 4 bytes each.
        picture: Draw it, too: .png, .pdf or .svg.

    Example:
        landscape topologies base 'ring(2)' --learners 25 --parameters 11000000 --plot graphs.png
    """
    if picture:
        from landscape.cli import common  # and torch, as below

        common.check_targets(None, picture)
    about: dict[str, Any] = {"learners": learners, "parameters": parameters, "picture": picture}
    with output.progress_bar("topologies") as bar:
        rows = topology.topologies(mixings or None, progress=bar, **about)
    lines = [["mixing", "gap", "ω_min", "ηλ <", "exact after", "bytes a step"]]
    for spec, row in rows.items():
        spectrum = f"{row['gap']:.4f}", f"{row['omega_min']:.4f}", f"{row['limit']:.4g}"
        lines.append([spec, *spectrum, str(row["rounds"] or "-"), f"{row['bytes']:,.0f}"])
    values(output.columns(lines), topologies=rows)
    if not mixings:
        if unfit := [spec for spec in topology.default_mixings() if spec not in rows]:
            output.message(f"not for {learners} learners: {', '.join(unfit)}")
        output.message(f"forms: {', '.join(topology.forms())}; a file .csv, .txt or .npy")
    if picture:
        output.files(picture)

"""landscape info"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import click
import numpy as np

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.checkpoint.files import load
from landscape.cli import train
from landscape.core import hdf5, hdf5_verify
from landscape.core.errors import FailedError
from landscape.core.files import printable
from landscape.train.loop import recipe_of

MOST = 8  # tensors of the optimizer's state that are listed (ours)


@click.command(epilog="Example: landscape info runs/dp/last.h5")
@click.argument("file", metavar="FILE")
def info(file: str) -> None:
    """Show what is in FILE: a checkpoint (validated) or a result."""
    file = str(run_folder.checkpoint_in(Path(file)))
    loaded = load(file)
    with hdf5.reading(file, warn=False) as raw:
        stamps = {
            key: raw.attrs[key]
            for key in ("schema", "version", "created", "landscape_version", "torch_version")
        }
    stamps["checksum"] = "SHA-256, fits" if hdf5_verify.has_checksum(file) else "none"
    for key, value in stamps.items():
        _say(f"{key}: {value}")
    if isinstance(loaded, Checkpoint):
        _checkpoint(loaded)
        return
    for result in loaded if isinstance(loaded, list) else [loaded]:
        _say("")
        for field in dataclasses.fields(result):
            value = getattr(result, field.name)
            _say(f"{field.name}: {_short(value)}")


def _say(text: str) -> None:
    """Lines on stdout; control characters from a file are escaped for the terminal."""
    for line in text.split("\n"):
        click.echo(printable(line))


def _short(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    if value.dtype == bool:
        return f"{value.dtype} {value.shape}, {value.sum():,} of {value.size:,} true"
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    span = f", {finite.min():.6g} to {finite.max():.6g}" if finite.size and value.dtype.kind in "fi" else ""
    return f"{value.dtype} {value.shape}{span}"


def _rule(c: Checkpoint) -> str:
    """What the update rule says of itself, such as its mixing; a matrix file may be gone by now."""
    try:
        return recipe_of(c).describe()
    except FailedError as error:
        return str(error)


def _checkpoint(c: Checkpoint) -> None:
    n, size = c.weights.shape
    finite = bool(np.isfinite(c.weights.numpy()).all())
    _say(
        f"weights: {n} learners × {size:,} {c.weights.numpy().dtype}, {'finite' if finite else 'NOT FINITE'}"
    )
    _say(f"model: {c.model['name']} {c.model['options']}")
    if c.buffers:
        names = list(c.buffers)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        _say(f"buffers and frozen parameters: {', '.join(names[:4])}{more}")
        if c.mean_buffers:
            _say("BatchNorm statistics of the mean: re-estimated at its weights")
    mark = f", fingerprint {c.data['fingerprint'][:12]}…" if c.data["fingerprint"] else ""
    sizes = f"{c.data['train']:,} train, {c.data['test']:,} test{mark}"
    known = f"data: {c.data['name']} {c.data['options']}, {sizes}"
    _say(
        known
        if c.data["name"]
        else f"data: the loop's own, {sizes}"
        if c.data["train"]
        else "data: not known"
    )
    if c.algorithm == IMPORTED:
        _say(f"imported from:\n{c.recipe}".rstrip("\n"))
        return
    epoch = f" (epoch {c.epoch:.3g})" if math.isfinite(c.epoch) else ""
    _say(f"algorithm: {c.algorithm}, seed {c.seed}, step {c.step:,}{epoch}")
    if c.has_recipe and (about := _rule(c)):
        _say(about)
    for name, state in [*c.optimizer.items()][:MOST]:
        _say(f"optimizer state: {name} {tuple(state.shape)}")
    if len(c.optimizer) > MOST:
        _say(f"optimizer state: {len(c.optimizer) - MOST} more tensors")
    for name, state in {**c.rule, **c.shared}.items():
        _say(f"state: {name} {tuple(state.shape)}")
    if c.has_recipe:
        _say(train.closing(c))
    for name, column in c.history.items():
        recorded = column[np.isfinite(column)]
        last = f"last {recorded[-1]:.6g}" if len(recorded) else "never recorded"
        _say(f"  {name}: {len(recorded)} of {len(column)} rows, {last}")
    title = "recipe:" if c.has_recipe else "recorded:"
    _say("\n".join([title, *(f"  {line}" for line in c.recipe.splitlines())]))

"""landscape info. Of a file of results it says what it contains without an import of torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from landscape.cli import output
from landscape.cli.completion import paths
from landscape.cli.options import command
from landscape.cli.output import values
from landscape.core import hdf5, registry
from landscape.results import base
from landscape.results.surfaces import Surface


@command(file={"argument": True, "metavar": "FILE", "shell_complete": paths("file")})
def info(file: str) -> None:
    """Show what a checkpoint or a result contains.

    A checkpoint is validated.

    Example:
        landscape info runs/dp/last.h5
    """
    path = Path(file)
    if path.is_dir():
        from landscape.checkpoint import run_folder  # and torch, as below

        path = run_folder.checkpoint_in(path)
    with hdf5.reading(path, warn=False) as raw:
        known = ("schema", "version", "created", "landscape_version", "torch_version")
        stamps = {key: raw.attrs[key] for key in known}
    if stamps["schema"] in registry.results:
        results = base.load_results(path)
        _stamps(path, stamps)
        _results(results)
    else:
        from landscape.checkpoint import run_folder
        from landscape.checkpoint.checkpoint import Checkpoint
        from landscape.cli import checkpoints

        checkpoint = run_folder.load(path)  # or why a file of another format is not read
        assert isinstance(checkpoint, Checkpoint)
        _stamps(path, stamps)
        checkpoints.show(checkpoint)


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

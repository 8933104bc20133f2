"""Any file of this project: checkpoints and results."""

from __future__ import annotations

from pathlib import Path

from landscape.checkpoint.checkpoint import SCHEMA, Checkpoint
from landscape.core import hdf5
from landscape.results import base


def load(path: str | Path) -> Checkpoint | base.Result | list[base.Result]:
    """Read any file of this project.

    Args:
        path: the file.

    Returns:
        A :class:`Checkpoint`, a result, or a list where the file holds several results.

    Raises:
        FailedError: a file that is missing, truncated, foreign or of a newer version.

    Example:
        >>> load("missing.h5")
        Traceback (most recent call last):
        landscape.core.errors.FailedError: missing.h5: no such file; ...
    """
    with hdf5.reading(path, warn=False) as file:
        schema = file.attrs["schema"]
    if schema == SCHEMA:
        return Checkpoint.load(path)
    results = base.load_results(path)
    return results[0] if len(results) == 1 else results

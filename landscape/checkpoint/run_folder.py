"""The files in the folder of a run, and any file of this project."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from landscape.checkpoint import history
from landscape.checkpoint.checkpoint import IMPORTED, SCHEMA, Checkpoint
from landscape.core import hdf5
from landscape.core.errors import InputError, OperationError, warn_caller
from landscape.core.files import printable
from landscape.core.hdf5 import DamageWarning
from landscape.results import base

_STEP = re.compile(r"step-\d{7,}\.h5")
_NAMES = ("last.h5", "recipe.toml")


def write(
    checkpoint: Checkpoint,
    folder: Path,
    every: int,
    learners: int | None = None,
    rows: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> Path:
    """Write step-NNNNNNN.h5, and last.h5 as a copy of it with the whole history; gives the former.

    What damages one of the two spares the other. ``every``: steps between two files, 0 for none; ``learners``
    and ``rows`` as :meth:`.Checkpoint.save` takes them.
    """
    path = folder / f"step-{checkpoint.step:07d}.h5"
    recent = history.recent(checkpoint.history, checkpoint.step, every)
    dataclasses.replace(checkpoint, history=recent).save(path, learners, rows)
    with hdf5.changed_copy(path, folder / "last.h5") as file:
        if recent is not checkpoint.history:
            history.write(file, checkpoint.history, checkpoint.units)
    return path


def checkpoint_in(path: Path) -> Path:
    """``path``, or the last checkpoint of the run whose folder it is. OperationError for a folder without."""
    if not path.is_dir():
        return path
    if not (path / "last.h5").is_file():
        runs = [file.parent for file in sorted(path.glob("*/last.h5"))]
        inside = f"; give {runs[0]} or another of its {len(runs)} runs" if runs else ""
        words = f"a folder without a last.h5, a run's folder or a checkpoint is needed{inside}"
        raise OperationError(f"{path}: {words}")
    return path / "last.h5"


def steps(folder: Path) -> list[Path]:
    """The checkpoints step-*.h5 in ``folder``, sorted by name, without other files with such names.

    OperationError for a step-NNNNNNN.h5 that cannot be read: it must be a damaged checkpoint.
    """
    found = []
    for path in sorted(folder.glob("step-*.h5")):
        try:
            with hdf5.reading(path, warn=False) as file:
                found += [path] if file.attrs["schema"] == SCHEMA else []
        except OperationError:
            if _STEP.fullmatch(path.name):
                raise
    return found


def named_like_a_run(folder: Path) -> list[Path]:
    """The files in ``folder`` with a name that a run writes: they would be overwritten."""
    known = [folder / name for name in _NAMES]
    return sorted([p for p in known if p.exists()] + [p for p in folder.glob("*") if _STEP.fullmatch(p.name)])


def of_a_run(path: Path) -> bool:
    """Say whether ``path``, named as a run's file, is one: a checkpoint of a run, or its recipe."""
    if path.name == "recipe.toml":
        return True
    try:
        with hdf5.reading(path, SCHEMA, warn=False) as file:
            return bool(file.attrs["algorithm"] != IMPORTED)
    except OperationError:
        return False


def load(path: str | Path) -> Checkpoint | base.Result | list[base.Result]:
    """Read any file of this project.

    Args:
        path: the file; or the folder of a run, which stands for its last checkpoint.

    Returns:
        A :class:`Checkpoint`, a result, or a list where the file holds several results.

    Raises:
        OperationError: a file that is missing, truncated, foreign or of a newer version.

    Example:
        >>> load("missing.h5")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    path = checkpoint_in(Path(path))
    with hdf5.reading(path, warn=False) as file:
        schema = file.attrs["schema"]
    if schema == SCHEMA:
        return Checkpoint.load(path)
    results = base.load_results(path)
    return results[0] if len(results) == 1 else results


def check_folder(folder: Path, *, resume: bool, force: bool | None = None) -> list[Path]:
    """The files of a run in ``folder``; OperationError if there are any, and neither option is given.

    With ``force`` also if another file has the name of one, as it would be deleted; None: there is no such
    option.
    """
    if resume and force:
        raise InputError("resume, force: only one of the two is allowed")
    present = named_like_a_run(folder)
    if present and not (resume or force):
        ways = "resume=True" if force is None else "resume=True, force=True"
        raise OperationError(
            f"{folder}: holds a run already ({present[0].name}); give {ways} or another folder"
        )
    for path in present if force else []:
        if not of_a_run(path):
            raise OperationError(
                f"force: {path} is no checkpoint of a run, it is not deleted; move it or give another folder"
            )
    return present


def last_sound(folder: Path, learners: Callable[[int], slice]) -> Checkpoint:
    """The checkpoint last.h5 or, if that is damaged, the newest step file that is sound, with a warning.

    ``learners`` as of :meth:`.Checkpoint.load`.

    Raises OperationError, about last.h5, where no file of the run is sound.
    """
    try:
        return Checkpoint.load(folder / "last.h5", learners)
    except OperationError as error:
        numbered = [p for p in named_like_a_run(folder) if p.name.startswith("step-")]
        for path in reversed(numbered):
            with contextlib.suppress(OperationError):
                checkpoint = Checkpoint.load(path, learners)
                warn_caller(f"{printable(error)}; {printable(path.name)} takes its place", DamageWarning)
                return checkpoint
        raise

"""Start or resume a run in a folder, without ever touching another run's files."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from landscape.checkpoint import Checkpoint
from landscape.options import FailedError, InputError, choose
from landscape.train.loop import Hooks, Trainer, recipe_of
from landscape.train.recipe import Recipe, read


def launch(
    recipe: Recipe | None,
    folder: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "auto",
    data_dir: Any = None,
    hooks: Hooks | None = None,
) -> Checkpoint:
    """Train ``recipe`` in ``folder``: writes recipe.toml, step-NNNNNNN.h5 and last.h5; returns the end.

    Args:
        recipe: may be None with ``resume``: then that of the folder's run.
        resume: go on from last.h5 (or start, where there is none yet). The recipe must be the folder's own,
            but for ``steps``, which may grow.
        force: delete the files of a run that is in the folder first.
        device: "auto" (CUDA where there is a GPU), "cpu" or "cuda".

    Raises InputError or FailedError for a folder that holds another run, or cannot be written or resumed.
    """
    folder = Path(folder)
    place = pick_device(device)
    if resume and force:
        raise InputError("--resume and --force: only one of the two is allowed")
    checkpoint = None
    held = run_files(folder)
    if held and not (resume or force):
        raise FailedError(
            f"{folder}: holds a run already ({held[0].name}); give --resume, --force or another -o"
        )
    if resume:
        checkpoint, recipe = _resumed(folder, recipe)
    if recipe is None:
        raise InputError("RECIPE: missing; give a name (see 'landscape recipes'), a .toml file, or --resume")
    save = functools.partial(_save, folder=folder)
    hooks = dataclasses.replace(hooks or Hooks(), save=save)
    trainer = Trainer(recipe, checkpoint=checkpoint, device=place, data_dir=data_dir, hooks=hooks)
    try:  # only now, when nothing else can be wrong: a mistake leaves no trace in the folder
        folder.mkdir(parents=True, exist_ok=True)
        if force:
            for path in held:
                path.unlink()
        _write_text(folder / "recipe.toml", recipe.to_toml())
    except OSError as error:
        raise FailedError(f"{folder}: cannot be written ({error.strerror})") from error
    n, lr = recipe.learners, recipe.schedule.peak(recipe.lr, recipe.batch)
    hooks.message(
        f"{recipe.name}: {trainer.algorithm}, {n} learner{'s' * (n > 1)} × {recipe.local_batch} samples, "
        f"{recipe.part('optimizer')[0]}, lr {lr:g}, step {trainer.step} to {recipe.steps}, seed {recipe.seed}"
    )
    return trainer.run()


def pick_device(name: str) -> torch.device:
    """The device called "auto", "cpu" or "cuda". Raises InputError for CUDA where there is none."""
    choose("--device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: 'cuda' is not allowed, PyTorch finds no GPU here; use cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def run_files(folder: Path) -> list[Path]:
    """The files of a run in ``folder``, if it holds one."""
    return sorted(p for pattern in ("last.h5", "step-*.h5", "recipe.toml") for p in folder.glob(pattern))


def _resumed(folder: Path, recipe: Recipe | None) -> tuple[Checkpoint | None, Recipe | None]:
    last = folder / "last.h5"
    if not last.exists():  # stopped before its first checkpoint: the same steps from the start
        if (folder / "recipe.toml").exists():
            stored = read(str(folder / "recipe.toml"))
            return None, _same(stored, recipe, folder)
        if recipe is None:
            raise FailedError(f"{folder}: holds no run to resume (no last.h5); give a RECIPE to start one")
        return None, recipe
    checkpoint = Checkpoint.load(last)
    return checkpoint, _same(recipe_of(checkpoint), recipe, folder)


def _same(stored: Recipe, wanted: Recipe | None, folder: Path) -> Recipe:
    """``stored``, or ``wanted`` if it differs in nothing but more steps; else FailedError names the key."""
    if wanted is None:
        return stored
    if wanted.steps < stored.steps:
        raise FailedError(
            f"{folder}: its run has steps = {stored.steps}, --resume with {wanted.steps} is not allowed"
        )
    before = dataclasses.replace(stored, steps=wanted.steps).to_toml().splitlines()
    after = wanted.to_toml().splitlines()
    for a, b in zip(before, after, strict=False):
        if a != b:
            raise FailedError(
                f"{folder}: its run has {a}, --resume with {b} is not allowed; only steps may grow"
            )
    return wanted


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _save(checkpoint: Checkpoint, folder: Path) -> None:
    """Write step-NNNNNNN.h5 and make last.h5 the same file (a second name where the disk allows it)."""
    path, last = folder / f"step-{checkpoint.step:07d}.h5", folder / "last.h5"
    checkpoint.save(path)
    temporary = folder / f".last.h5.{os.getpid()}.tmp"
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without links
            shutil.copy2(path, temporary)
        os.replace(temporary, last)
    except OSError as error:
        raise FailedError(f"{last}: cannot be written ({error.strerror})") from error

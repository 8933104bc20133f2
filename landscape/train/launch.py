"""Start or resume a run in a folder, without ever touching another run's files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import files
from landscape.core.errors import FailedError, InputError
from landscape.core.files import printable
from landscape.core.hdf5_verify import DamageWarning
from landscape.core.lock import Lock
from landscape.core.options import choose
from landscape.data.base import fingerprint
from landscape.train.distributed.comm import Comm
from landscape.train.distributed.process_group import Group, Lost, log_to, number, where
from landscape.train.distributed.server import kind
from landscape.train.loop import Hooks, recipe_of, verdict
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
    group: Group | None = None,
    allow_code: bool = False,
) -> Checkpoint:
    """Train ``recipe`` in ``folder``: writes recipe.toml, step-NNNNNNN.h5 and last.h5; returns the end.

    With a ``group`` every one of its processes calls this, each returns the learners it holds, rank 0 writes
    the files, and all write logs/rank-R.log. Of asynchronous SGD with measured delays rank 0 is the server,
    the others are its workers, which return the last weights without a history.

    Args:
        recipe: may be None with ``resume``: then that of the folder's run.
        resume: go on from last.h5 (or start, where there is none yet). The recipe must be the folder's own,
            but for ``steps``, which may grow.
        force: delete the checkpoints of a run that is in the folder first; nothing else is deleted.
        device: "auto" (CUDA where there is a GPU), "cpu" or "cuda".
        allow_code: run what the folder's own recipe names as MODULE:NAME where ``recipe`` is None.

    Raises InputError or FailedError for a folder that holds another run, that another process works in, or
    that cannot be written or resumed.
    """
    with Lock(Path(folder)) as lock:
        return _launch(recipe, Path(folder), lock, resume, force, device, data_dir, hooks, group, allow_code)


def _launch(
    recipe: Recipe | None,
    folder: Path,
    lock: Lock,
    resume: bool,
    force: bool,
    device: str,
    data_dir: Any,
    hooks: Hooks | None,
    group: Group | None,
    allow_code: bool,
) -> Checkpoint:
    """:func:`launch`, with the folder's ``lock``, which of several processes the first one takes."""
    place, first = group.device if group else pick_device(device), group is None or group.rank == 0
    if first and run_folder.named_like_a_run(folder):
        lock.acquire()
    held = check_folder(folder, resume=resume, force=force)
    checkpoint = None
    if resume:
        given = recipe is not None
        checkpoint, recipe = _resumed(folder, recipe, group)
        if recipe and not given and recipe.names_code and not allow_code:
            raise FailedError(
                f"{folder}: its recipe names a user's own code, which a file there may only with "
                "--allow-code; or give the RECIPE again with --resume"
            )
    if recipe is None:
        raise InputError("RECIPE: missing; give a name (see 'landscape recipes'), a .toml file, or --resume")
    hooks = dataclasses.replace(hooks or Hooks())
    trainer = kind(recipe, group)(
        recipe, checkpoint=checkpoint, device=place, data_dir=data_dir, hooks=hooks, group=group
    )
    recipe = trainer.recipe  # which now says what it started from
    hooks.save = functools.partial(_save, folder=folder, comm=trainer.comm, every=recipe.checkpoint.every)
    if group:
        start = {"data": str(trainer.data["fingerprint"]), "first step": str(trainer.step + 1)}
        start["mixing matrix"] = fingerprint(recipe.matrices.values())
        group.agree(_flat(recipe.values()) | start)
    try:  # only now, when nothing else can be wrong: a mistake leaves no trace in the folder
        folder.mkdir(parents=True, exist_ok=True)
        if first:
            lock.acquire()
            if not held and run_folder.named_like_a_run(folder):
                raise FailedError(f"{folder}: another process has started a run there meanwhile")
            files.remove_stale(folder)
            for path in held if force else []:
                path.unlink(missing_ok=True)
            files.write_text(folder / "recipe.toml", recipe.to_toml())
    except OSError as error:
        raise FailedError(f"{folder}: cannot be written ({error.strerror})") from error
    n, lr = recipe.learners, recipe.schedule.peak(recipe.lr, recipe.batch)
    hooks.message(
        f"{recipe.name}: {trainer.algorithm}, {n} learner{'s' * (n > 1)} × {recipe.local_batch} samples, "
        f"{recipe.part('optimizer')[0]}, lr {lr:g}, step {trainer.step} to {recipe.steps}, seed {recipe.seed}"
    )
    if group is None:
        return trainer.run()
    with log_to(folder / "logs" / f"rank-{group.rank}.log") as log:
        who = f"rank {group.rank} of {group.size}, {trainer.part()}"
        log(f"{who}, on {place}; {where()}; {group.backend}")
        tell, save = hooks.message, hooks.save

        def message(line: str) -> None:
            log(line)
            tell(line)

        def save_and_log(checkpoint: Checkpoint) -> None:
            save(checkpoint)
            log(f"step {checkpoint.step} is safe{trainer.pace()}")

        hooks.message, hooks.save = message, save_and_log
        if group.attempt:
            message(f"restart {group.attempt}: from step {trainer.step}")
        try:
            end = trainer.run()
            if end.diverged:
                log(verdict(end))
            return end
        except Lost as error:
            line = f"{error}; --resume goes on from {folder / 'last.h5'}"
            log(line)
            raise Lost(line) from error
        except Exception as error:
            log(f"{type(error).__name__}: {error}")
            raise


def check_folder(folder: Path, *, resume: bool, force: bool) -> list[Path]:
    """The files of a run in ``folder``; FailedError where there are some, and neither option is given.

    With ``force`` also where something else has the name of one: it would be lost.
    """
    if resume and force:
        raise InputError("--resume and --force: only one of the two is allowed")
    held = run_folder.named_like_a_run(folder)
    if held and not (resume or force):
        raise FailedError(
            f"{folder}: holds a run already ({held[0].name}); give --resume, --force or another -o"
        )
    for path in held if force else []:
        if not run_folder.of_a_run(path):
            raise FailedError(
                f"--force: {path} is no checkpoint of a run, it is not deleted; move it or give another -o"
            )
    return held


def pick_device(name: str) -> torch.device:
    """The device called "auto", "cpu" or "cuda". Raises InputError for CUDA where there is none."""
    choose("--device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: 'cuda' is not allowed, PyTorch finds no GPU here; use cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def worker_device(name: str) -> torch.device:
    """The device of a process that a launcher started: the CPU, or the GPU of its LOCAL_RANK.

    Raises InputError where more processes than GPUs are on this machine: NCCL needs a GPU for each.
    """
    device = pick_device(name)
    if device.type == "cpu":
        return device
    here, gpus = number("LOCAL_WORLD_SIZE", 1, 1), torch.cuda.device_count()
    local = number("LOCAL_RANK", 0, 0)
    if max(here, local + 1) > gpus:
        raise InputError(
            f"--device: '{name}' is not allowed, {here} processes here need a GPU each and there are {gpus}; "
            "start fewer, or use cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def ended(recipe: Recipe, folder: Path) -> Checkpoint | None:
    """The end of the run of ``recipe`` in ``folder``, its history but no weights; None if it has none yet.

    Raises FailedError where ``folder`` holds a run of another recipe.
    """
    if not (folder / "last.h5").exists():
        _resumed(folder, recipe, None)
        return None
    checkpoint = last_sound(folder, held=lambda learners: slice(0))
    _same(recipe_of(checkpoint), recipe, folder)
    return checkpoint if checkpoint.diverged or checkpoint.step == recipe.steps else None


def last_sound(folder: Path, held: Callable[[int], slice]) -> Checkpoint:
    """last.h5, or where it is damaged the newest step file that is not, with a warning.

    Raises FailedError, about last.h5, where no file of the run is sound.
    """
    try:
        return Checkpoint.load(folder / "last.h5", held)
    except FailedError as error:
        steps = [p for p in run_folder.named_like_a_run(folder) if p.name.startswith("step-")]
        for path in reversed(steps):
            with contextlib.suppress(FailedError):
                checkpoint = Checkpoint.load(path, held)
                warnings.warn(
                    f"{printable(error)}; {printable(path.name)} takes its place", DamageWarning, stacklevel=3
                )
                return checkpoint
        raise


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values by dotted key, as text."""
    found: dict[str, str] = {}
    for key, value in values.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
        found |= inner
    return found


def _resumed(
    folder: Path, recipe: Recipe | None, group: Group | None
) -> tuple[Checkpoint | None, Recipe | None]:
    last = folder / "last.h5"
    if not last.exists():  # stopped before its first checkpoint: the same steps from the start
        if (folder / "recipe.toml").exists():
            stored = read(str(folder / "recipe.toml"), allow_code=True)  # our caller asks what it names
            return None, _same(stored, recipe, folder)
        if recipe is None:
            raise FailedError(f"{folder}: holds no run to resume (no last.h5); give a RECIPE to start one")
        return None, recipe

    def held(learners: int) -> slice:
        """What this process holds; all, where there are too few, or a server and its workers share them."""
        return Comm(learners, group if group and learners >= group.size else None).own

    checkpoint = last_sound(folder, held)
    return checkpoint, _same(recipe_of(checkpoint), recipe, folder)


def _same(stored: Recipe, wanted: Recipe | None, folder: Path) -> Recipe:
    """``stored``, or ``wanted`` if it differs in nothing but more steps; else FailedError names the key."""
    if wanted is None:
        return stored
    if wanted.init.checkpoint == stored.init.checkpoint and not wanted.init.sha256:
        wanted = dataclasses.replace(wanted, init=stored.init)
    if wanted.steps < stored.steps:
        raise FailedError(
            f"{folder}: its run has steps = {stored.steps}, going on with {wanted.steps} is not allowed"
        )
    before = dataclasses.replace(stored, steps=wanted.steps).to_toml().splitlines()
    after = wanted.to_toml().splitlines()
    for a, b in zip(before, after, strict=False):
        if a != b:
            raise FailedError(
                f"{folder}: its run has {a}, going on with {b} is not allowed; only steps may grow"
            )
    for path, matrix in wanted.matrices.items():
        if not np.array_equal(stored.matrices[path], matrix):
            raise FailedError(
                f"{folder}: {path} holds another matrix than its run began with; leave RECIPE out to go on "
                "with the run's own"
            )
    return wanted


def _save(checkpoint: Checkpoint, folder: Path, comm: Comm, every: int) -> None:
    """Write step-NNNNNNN.h5 and last.h5: rank 0 does, and gets the others' learners one at a time."""
    if comm.rank > 0:
        for tensor in checkpoint.stacked().values():
            comm.send_rows(tensor)
        return
    run_folder.write(checkpoint, folder, every, comm.learners, comm.rows)

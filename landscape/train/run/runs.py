"""Runs as independent jobs: in this process, in several of this machine, or on the workers of a cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from landscape.core.errors import FailedError
from landscape.core.files import wait_until_free
from landscape.core.progress import Progress
from landscape.data.base import data_root
from landscape.train.processes import children
from landscape.train.processes.cluster import end_if_unwanted
from landscape.train.recipes.recipe import Recipe, from_values, parse
from landscape.train.run import launch
from landscape.train.run.loop import Hooks

NOT_SHARED = "runs on a cluster need a folder that all machines share, under the same path"
# NFS keeps what it knows of a directory for so long (acdirmax, s).
NFS_SECONDS = 60.0
# NFS keeps the locks of a machine that was lost for 90 s (the lease of Linux's server), and a worker whose
# command was killed ends its job after the step that it is at (ours).
LOCKED_SECONDS = 180.0


@dataclass(frozen=True)
class Run:
    """``recipe`` in ``folder``."""

    recipe: Recipe
    folder: Path


#: Takes a run as it ends, and its seconds; None where the time was over before its end.
Ended = Callable[[Run, float | None], None]


class _OutOfTime(Exception):
    """It is later than a run may go on."""


def train_runs(
    runs: Sequence[Run],
    ended: Ended,
    progress: Progress,
    *,
    executor: children.Executor,
    device: str,
    data_dir: str | None,
    until: float | None = None,
) -> None:
    """Train ``runs`` by ``executor``, or go on with them; here, where that is a pool with one process to use.

    Args:
        ended: takes each run as it ends.
        progress: takes the share of the present run that is done, where it is made here.
        until: as of :func:`train`.

    Raises:
        FailedError: a run failed, or its folder is not visible both here and where it was trained.
    """
    if isinstance(executor, children.Pool) and min(executor.nproc, len(runs)) <= 1:
        for run in runs:
            ended(run, train(run, device, data_dir, until, lambda done, total: progress(done / total)))
        return

    def done(number: int, seconds: float | None) -> None:
        run = runs[number]
        if seconds is not None and not _visible(run.folder):
            raise FailedError(f"{run.folder}: the run has ended elsewhere, but {NOT_SHARED}")
        ended(run, seconds)

    for run in runs:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
    data = os.path.abspath(data_root(data_dir))  # workers may have another current folder
    patience = 0.0 if isinstance(executor, children.Pool) else LOCKED_SECONDS
    jobs = [
        [run.recipe.to_toml(), os.path.abspath(run.folder), device, data, until, patience] for run in runs
    ]
    try:
        executor.run(f"{__name__}:train_elsewhere", jobs, done)
    except children.JobError as error:
        raise FailedError(f"{runs[error.number].folder}: {error}") from error


def _visible(folder: Path) -> bool:
    """Whether the files of a run that has ended elsewhere can be seen: over NFS after a while."""
    deadline = time.monotonic() + NFS_SECONDS
    while "last.h5" not in (os.listdir(folder) if folder.is_dir() else ()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def train_elsewhere(
    toml: str, folder: str, device: str, data_dir: str, until: float | None, patience: float
) -> float | None:
    """:func:`train`, with the recipe as text: a job for an executor, whose workers may be elsewhere.

    For ``patience`` seconds it waits for another worker that has the run.
    """
    run = Run(from_values(parse(toml, folder)), Path(folder))
    if not run.folder.parent.is_dir():
        raise FailedError(f"{run.folder.parent}: no such folder on {socket.gethostname()}; {NOT_SHARED}")
    wait_until_free(run.folder, patience)
    return train(run, device, data_dir, until, lambda done, total: end_if_unwanted())


def train(
    run: Run,
    device: str,
    data_dir: str | None,
    until: float | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> float | None:
    """Train ``run``, or go on with it; seconds.

    At the time ``until``, as time.time() has it, the run stops and the result is None: it goes on from its
    last checkpoint. ``step`` takes, after each step, how many are done and how many there are.
    """

    def after(done: int, total: int) -> None:
        step(done, total)
        if until is not None and done < total and time.time() > until:
            raise _OutOfTime

    clock = time.perf_counter()
    try:
        if until is not None and time.time() > until:
            raise _OutOfTime
        hooks = Hooks(step=after)
        launch.launch(run.recipe, run.folder, resume=True, device=device, data_dir=data_dir, hooks=hooks)
    except _OutOfTime:
        return None
    return time.perf_counter() - clock

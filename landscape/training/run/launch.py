"""Runs in a folder: started or resumed, never touching another run's files; in several processes; as jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import files
from landscape.core.devices import DeviceName, pick_device
from landscape.core.errors import InputError, OperationError
from landscape.core.files import Lock
from landscape.core.options import Count, Natural, Positive, checked, parse_toml
from landscape.core.progress import Progress, ProgressOption, reporter, shows_progress
from landscape.data.base import fingerprint
from landscape.training.algorithms.central import AsyncSGD
from landscape.training.processes import children
from landscape.training.processes.children import TIMEOUT
from landscape.training.processes.comm import Comm, LostProcessError
from landscape.training.processes.process_group import Group, log_to, started_by_launcher
from landscape.training.recipes import Evaluate, file_values
from landscape.training.recipes.recipe import Recipe, from_values, recipe_of
from landscape.training.run import package_of, row_writer
from landscape.training.run.loop import Hooks, Server, Trainer, Worker
from landscape.training.run.setup import chosen_recipe, default_folder, divergence_message

T = TypeVar("T")


def launch(
    recipe: Recipe | None, folder: str | Path, *, resume: bool = False, force: bool = False,
    device: str = "auto", data_dir: Any = None, hooks: Hooks | None = None, group: Group | None = None,
    allow_code: bool = False,
) -> Checkpoint:  # fmt: skip
    """Train ``recipe`` in ``folder``: write recipe.toml, step-NNNNNNN.h5 and last.h5.

    With a ``group``, each process of the group calls ``launch`` and returns a checkpoint of its own learners
    (of all learners, if the run was complete before); rank 0 writes the checkpoints, and every process writes
    logs/rank-R.log. In asynchronous SGD with measured delays rank 0 is the server; the other ranks are
    workers, and return the last weights without a history.

    Args:
        recipe, folder, resume, force, device, data_dir: as for :func:`train`.
        hooks: functions to call during the run; ``save`` is ignored, because files are written instead.
        group: the processes that share the run; None: only this process.
        allow_code: whether to run code that the folder's recipe names as MODULE:NAME, if ``recipe`` is None.

    Returns:
        The last checkpoint of the run.

    Raises:
        InputError: for options that exclude each other, or a recipe whose parts do not fit.
        OperationError: for a folder that holds another run, that another process uses, or that cannot be
            written or resumed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     end = launch(Recipe.read("saddle-dpsgd", steps=3), folder)
        ...     end.step, sorted(path.name for path in Path(folder).glob("*.h5"))
        (3, ['last.h5', 'step-0000000.h5', 'step-0000003.h5'])
    """
    folder = Path(folder)
    hooks = dataclasses.replace(hooks or Hooks())  # a copy, because its functions are replaced below
    writes_files = group is None or group.rank == 0
    with Lock(folder) as lock:  # the end of the block releases the lock; acquire() locks the folder
        # A folder with files of a run is locked before they are read. A folder without them is locked below,
        # after all checks. To acquire the lock twice changes nothing.
        if writes_files and storage.named_like_a_run(folder):
            lock.acquire()
        if group:  # so that no process reads a checkpoint before rank 0 has the lock
            group.wait_for_all()
        if not force and is_complete(recipe, folder):
            hooks.message(f"{folder}: complete already, nothing is trained")
            return Checkpoint.load(folder / "last.h5")
        # The files of a run that the folder already holds. With ``force`` they are deleted below.
        run_files = storage.check_folder(folder, resume=resume, force=force)
        checkpoint = None  # the state to resume from; None: the start of the run
        if resume:
            own_learners = functools.partial(_own_learners, group)
            checkpoint, recipe = _checkpoint_and_recipe(folder, recipe, own_learners, allow_code)
        if recipe is None:  # the message ends with "; give resume=True or a recipe's name …"
            words = "a recipe's name (see 'landscape recipes') or a .toml file"
            raise InputError("recipe: missing", give={"resume": True}, otherwise=words)
        if recipe.scalars and writes_files:
            package_of(recipe.scalars)  # raises an error if the package is not installed
        run_device = group.device if group else pick_device(device)
        trainer = trainer_class(recipe, group)(
            recipe, checkpoint=checkpoint, device=run_device, data_dir=data_dir, hooks=hooks, group=group
        )
        recipe = trainer.recipe
        bn_samples = recipe.evaluate.bn_samples
        has_batchnorm = bool(trainer.buffers.local)
        # A value that is not the default was given by the user. A resumed run keeps its recipe unchecked.
        if checkpoint is None and bn_samples != Evaluate.bn_samples and not has_batchnorm:
            words = "is not allowed, it changes nothing without BatchNorm in the model; leave it out"
            raise InputError(f"evaluate.bn_samples: {bn_samples} {words}")
        every = recipe.checkpoint.every
        hooks.save = functools.partial(_save_on_rank_0, folder=folder, comm=trainer.comm, every=every)
        if group:  # all processes must have the same recipe, data and step
            facts = _by_dotted_key(recipe.values())
            facts["data"] = str(trainer.data["fingerprint"])
            facts["first step"] = str(trainer.step + 1)
            facts["mixing matrix"] = fingerprint(recipe.matrices.values())
            group.agree(facts)
        files.make_folder(folder)  # after all checks, so that a wrong call leaves no folder
        if writes_files:
            lock.acquire()
            if not run_files and storage.named_like_a_run(folder):
                raise OperationError(f"{folder}: another process has started a run there meanwhile")
            files.remove_stale(folder)
            if force:
                for path in run_files:
                    path.unlink(missing_ok=True)
            files.write_text(folder / "recipe.toml", recipe.to_toml())
        hooks.message(_headline(trainer))
        with contextlib.ExitStack() as writers:
            if recipe.scalars and writes_files:
                hooks.row = row_writer(recipe.scalars, folder, trainer.step, writers, hooks.row)
            return trainer.run() if group is None else _run_in_group(trainer, folder, group)


def _own_learners(group: Group | None, learners: int) -> slice:
    """Return this process's learners: all of them if processes outnumber them, as with a server."""
    return Comm(learners, group if group and learners >= group.size else None).local


def _headline(trainer: Trainer) -> str:
    """Return the line that a run begins with."""
    recipe = trainer.recipe
    n, lr = recipe.learners, recipe.schedule.peak_lr(recipe.lr, recipe.batch)
    return (
        f"{recipe.name}: {trainer.algorithm}, {n} learner{'s' * (n > 1)} × {recipe.local_batch} samples, "
        f"{recipe.part('optimizer')[0]}, lr {lr:g}, step {trainer.step} to {recipe.steps}, seed {recipe.seed}"
    )


def _run_in_group(trainer: Trainer, folder: Path, group: Group) -> Checkpoint:
    """Run ``trainer``, which has this process's learners, and write logs/rank-R.log."""
    hooks = trainer.hooks
    with log_to(folder / "logs" / f"rank-{group.rank}.log") as log:
        role = type(trainer).__name__.lower()  # trainer, server or worker
        learners = trainer.comm.local
        own_learners = f"{role} of learners {learners.start} to {learners.stop - 1}"
        process = f"{socket.gethostname()}, process {os.getpid()}; {group.backend}"
        log(f"rank {group.rank} of {group.size}, {own_learners}, on {group.device}; {process}")
        message, save = hooks.message, hooks.save  # the hooks that the two functions below extend by the log

        def message_and_log(line: str) -> None:
            log(line)
            message(line)

        def save_and_log(checkpoint: Checkpoint) -> None:
            save(checkpoint)
            # pace() returns a text that begins with "; ", or "".
            log(f"step {checkpoint.step} is saved{trainer.history.pace(trainer.recipe.batch)}")

        hooks.message, hooks.save = message_and_log, save_and_log
        if group.attempt:
            hooks.message(f"restart {group.attempt}: from step {trainer.step}")
        try:
            end = trainer.run()
            if end.diverged:
                log(divergence_message(end))
            return end
        except LostProcessError as error:
            line = f"{error}; a resumed run continues from {folder / 'last.h5'}"
            log(line)
            raise LostProcessError(line) from error
        except Exception as error:
            log(f"{type(error).__name__}: {error}")
            raise


def trainer_class(recipe: Recipe, group: Group | None) -> type[Trainer]:
    """Return the class that this process runs: Trainer, or with measured delays Server or Worker.

    Raises InputError where measured delays need another number of processes.
    """
    check_processes(recipe, group.size if group else 1)
    if not recipe.rule().measured:
        return Trainer
    assert group is not None
    return Server if group.rank == 0 else Worker


def check_processes(recipe: Recipe, size: int) -> None:
    """Raise InputError unless ``size`` processes can share the learners of ``recipe``."""
    rule = recipe.rule()
    if isinstance(rule, AsyncSGD) and rule.measured:
        if size != rule.delay + 2:
            allowed = f"{rule.delay + 2} with algorithm.schedule 'measured': a server and delay + 1 workers"
            raise InputError("nproc", size, allowed=allowed)
    elif size > recipe.learners:
        raise InputError("nproc", size, allowed=f"≤ {recipe.learners}, the number of learners of the recipe")


def ended(recipe: Recipe, folder: Path) -> Checkpoint | None:
    """Return the last checkpoint, without weights, of the complete run of ``recipe`` in ``folder``.

    None if the run is not complete. Raises OperationError if ``folder`` has a run of another recipe.
    """
    checkpoint, _ = _checkpoint_and_recipe(folder, recipe, lambda learners: slice(0))
    return checkpoint if checkpoint and (checkpoint.diverged or checkpoint.step == recipe.steps) else None


def is_complete(recipe: Recipe | None, folder: Path) -> bool:
    """Return whether ``folder`` has the complete run of ``recipe``; OperationError for another run."""
    return recipe is not None and storage.of_a_run(folder / "last.h5") and ended(recipe, folder) is not None


def _by_dotted_key(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the texts of nested ``values`` by dotted key."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _by_dotted_key(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return flat


def _checkpoint_and_recipe(
    folder: Path, recipe: Recipe | None, learners: Callable[[int], slice], allow_code: bool = True
) -> tuple[Checkpoint | None, Recipe | None]:
    """Return the checkpoint from which the run in ``folder`` continues, and the recipe to follow.

    The checkpoint is None if the run begins at step 0. The recipe is ``recipe``; if ``recipe`` is None, it is
    the recipe of the folder's run. ``learners`` chooses the learners to read, as in :meth:`.Checkpoint.load`.
    Raises OperationError if there is neither a run nor a recipe, and if the recipe cannot continue the run.
    """
    checkpoint: Checkpoint | None = None
    if (folder / "last.h5").exists():
        checkpoint = storage.last_sound(folder, learners)
        stored_recipe = recipe_of(checkpoint)
    elif (folder / "recipe.toml").exists():  # the run was stopped before its first checkpoint
        stored_recipe = from_values(file_values(str(folder / "recipe.toml")))  # runs no code of the recipe
    elif recipe is not None:
        return None, recipe
    else:
        raise OperationError(f"{folder}: holds no run to resume (no last.h5); give a recipe to start one")
    if recipe is not None:
        return checkpoint, _checked_recipe(stored_recipe, recipe, folder)
    if stored_recipe.names_code and not allow_code:
        words = f"{folder}: its recipe names code"
        raise OperationError(words, give={"allow_code": True}, otherwise="the recipe again")
    return checkpoint, stored_recipe


def _checked_recipe(stored: Recipe, recipe: Recipe, folder: Path) -> Recipe:
    """Return ``recipe`` with the digest of a stored init; OperationError if it cannot continue ``stored``.

    Only ``scalars`` and a larger ``steps`` may differ. The message has the key that differs.
    """
    if recipe.init.checkpoint == stored.init.checkpoint and not recipe.init.sha256:
        recipe = dataclasses.replace(recipe, init=stored.init)
    steps = max(stored.steps, recipe.steps)
    allowed = dataclasses.replace(stored, scalars=recipe.scalars, steps=steps)
    pairs = zip(allowed.to_toml().splitlines(), recipe.to_toml().splitlines(), strict=False)
    for stored_line, line in pairs:
        if stored_line != line:
            words = f"its run has {stored_line}, resuming it with {line} is not allowed, only steps may grow"
            raise OperationError(f"{folder}: {words}", give={"force": True}, otherwise="another folder")
    for path, matrix in recipe.matrices.items():
        if not np.array_equal(stored.matrices[path], matrix):
            words = f"{path} has another matrix than its run"
            raise OperationError(f"{folder}: {words}; leave the recipe out to use the run's")
    return recipe


def _save_on_rank_0(checkpoint: Checkpoint, folder: Path, comm: Comm, every: int) -> None:
    """Write step-NNNNNNN.h5 and last.h5 on rank 0, which receives the others' learners one at a time."""
    if comm.rank > 0:
        for tensor in checkpoint.stacked().values():
            comm.send_rows(tensor)
        return
    storage.write(checkpoint, folder, every, comm.learners, comm.rows)


@dataclass(frozen=True)
class TrainingJob:
    """A run to be started or resumed: ``recipe`` in ``folder``."""

    recipe: Recipe
    folder: Path


#: Called with a run that has ended or is stopped, and the duration (s), which is None for a stopped run.
Ended = Callable[[TrainingJob, float | None], None]


class _OutOfTime(Exception):
    """The time at which a run must stop is over."""


def share_of(items: Sequence[T], share: str | None) -> list[T]:
    """Return the items K, K + N, K + 2N, … (counted from 1) for the ``share`` "K/N"; all items for None.

    Raises:
        InputError: anything else than K/N with 1 ≤ K ≤ N, or more shares than items.

    Example:
        >>> share_of("abcde", "2/3")
        ['b', 'e']
    """
    if share is None:
        return list(items)
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", share, re.ASCII)
    k, n = map(int, match.groups()) if match else (0, 0)
    if not 1 <= k <= n <= len(items):
        raise InputError("share", share, allowed=f"K/N with 1 ≤ K ≤ N ≤ {len(items)}, the number of runs")
    return list(items[k - 1 :: n])


def pool(jobs: int, timeout: float, device: str) -> children.Pool:
    """Return a pool of processes that makes ``jobs`` runs at a time; the processes take the GPUs in turn.

    ``timeout``: seconds that a process may be silent.
    """
    gpus = [str(k) for k in range(torch.cuda.device_count())] if device != "cpu" else []
    if gpus and "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    def environment(number: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}

    return children.Pool(jobs, torch.get_num_threads(), timeout, environment)


def train_runs(
    runs: Sequence[TrainingJob], on_end: Ended, progress: Progress, *, pool: children.Pool, device: str,
    data_dir: str | Path | None, until: float | None = None,
) -> None:  # fmt: skip
    """Start or resume ``runs`` in the processes of ``pool``.

    If there is only one run, or only one process in the pool, the runs are made in this process.

    Args:
        runs: the recipe and the folder of each run.
        on_end: called when a run has ended or is stopped: with the run and its duration (s). The duration is
            None if ``until`` stopped the run.
        progress: called with the completed share of the present run (0 to 1), only for runs in this process.
        pool, device, data_dir: the processes, the device, and the folder of data sets.
        until: the time at which the runs stop, in the seconds of time.time(); None: no such time.

    Raises:
        OperationError: a run failed.
    """
    if pool.nproc == 1 or len(runs) <= 1:
        for run in runs:
            seconds = train_one(run, device, data_dir, until, step=lambda done, total: progress(done / total))
            on_end(run, seconds)
        return
    for run in runs:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
    # The arguments of _train_job, in types that JSON can represent.
    common_arguments = [device, None if data_dir is None else os.fspath(data_dir), until]
    jobs = [[run.recipe.to_toml(), os.fspath(run.folder), *common_arguments] for run in runs]
    try:
        pool.run(f"{__name__}:_train_job", jobs, lambda index, seconds: on_end(runs[index], seconds))
    except children.JobError as error:
        raise OperationError(f"{runs[error.number].folder}: {error}") from error


def _train_job(
    toml: str, folder: str, device: str, data_dir: str | None, until: float | None
) -> float | None:
    """Call :func:`train_one` in a pool's process, with the recipe as text, and return its result."""
    run = TrainingJob(from_values(parse_toml(toml, folder)), Path(folder))
    return train_one(run, device, data_dir, until)


def train_one(
    run: TrainingJob, device: str, data_dir: str | Path | None, until: float | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> float | None:  # fmt: skip
    """Start or resume ``run``, and return its duration (s), or None if ``until`` stopped the run.

    Args:
        until: the time at which the run stops, in the seconds of time.time(). A later call resumes the run
            from its last checkpoint.
        step: called after each step with the number of completed steps and the total.
    """

    def after_step(done: int, total: int) -> None:
        step(done, total)
        if until is not None and done < total and time.time() > until:
            raise _OutOfTime

    began = time.perf_counter()
    try:
        after_step(0, 1)  # the time may be over before the first step
        hooks = Hooks(step=after_step)
        launch(run.recipe, run.folder, resume=True, device=device, data_dir=data_dir, hooks=hooks)
    except _OutOfTime:
        return None
    return time.perf_counter() - began


@checked()
@shows_progress()
def train(
    recipe: Recipe | str | Path | None,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    nproc: Count = 1,
    max_restarts: Natural = 0,
    timeout: Positive = TIMEOUT,
    device: DeviceName = "auto",
    data_dir: str | Path | None = None,
    allow_code: bool = False,
    message: Callable[[str], None] | None = None,
    progress: ProgressOption = None,
    **settings: Any,
) -> Checkpoint:
    """Train n learners by a recipe in a folder; the result is bit-identical to that of ``landscape train``.

    Args:
        recipe: a name (see :func:`landscape.recipes`), the path of a TOML file, or a
            :class:`landscape.Recipe`. None, only with ``resume``: the recipe of the folder's run.
        folder: the folder for last.h5, step-NNNNNNN.h5 and recipe.toml; default: runs/NAME-seedN.
        resume: whether to resume from last.h5, with the same numbers as without a stop; without last.h5 the
            run starts at step 0. The recipe must be the run's, except for ``scalars`` and a larger ``steps``.
        force: whether to delete the files of a run that the folder already holds; other files stay.
        nproc: the number of processes that share the learners. If there are several, each writes
            logs/rank-R.log, and ``message`` and ``progress`` are not called.
        max_restarts: how often all processes may be restarted from last.h5 after a process is lost.
        timeout: seconds that a process may be silent, or that an exchange between processes may take.
        device: "auto" (an accelerator with float64, where there is one), "cpu", "cuda", "xpu" or "mps".
        data_dir: the folder of data sets that are not bundled; default: $LANDSCAPE_DATA or data.
        allow_code: whether to run code that a file names as MODULE:NAME; code in ``settings`` always runs.
        message: called with lines for the user.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        settings: values of the recipe's keys, as for :meth:`landscape.Recipe.read`.

    Returns:
        The last checkpoint of the run, as in last.h5; ``diverged`` says whether and how the run diverged.

    Raises:
        InputError: a recipe, setting or option that is not allowed.
        OperationError: a folder that is in use, holds another run, or cannot be written or resumed; missing
            data; a lost process.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = train("digits-dpsgd", folder, steps=5, **{"algorithm.mixing": "ring(1)"})
        >>> run.step, run.algorithm, run.path.name
        (5, 'dpsgd', 'last.h5')
    """
    run_recipe = chosen_recipe(recipe, settings, allow_code)
    if folder is None:
        if run_recipe is None:
            raise InputError("recipe: missing; give one, or the folder of a run to resume")
        folder = default_folder(run_recipe)
    options: dict[str, Any] = {"resume": resume, "force": force, "device": device, "data_dir": data_dir}
    options["allow_code"] = allow_code
    # A complete run needs no processes: launch() returns its last checkpoint.
    if (nproc != 1 or max_restarts) and (force or not is_complete(run_recipe, Path(folder))):
        return in_processes(run_recipe, Path(folder), nproc, max_restarts, timeout, **options)
    show_progress = reporter(progress)
    hooks = Hooks(message=message or (lambda line: None))
    hooks.step = lambda done, total: show_progress(done / total)
    checkpoint = launch(run_recipe, folder, hooks=hooks, **options)
    checkpoint.path = Path(folder) / "last.h5"
    return checkpoint


def in_processes(
    recipe: Recipe | None, folder: Path, nproc: int, max_restarts: int, timeout: float, *, resume: bool,
    force: bool, device: str, data_dir: str | Path | None, allow_code: bool,
    output_flags: Sequence[str] | None = None,
) -> Checkpoint:  # fmt: skip
    """Train as :func:`train` does, in ``nproc`` processes that each run the command ``landscape train``.

    ``output_flags`` are the command's flags that choose what rank 0 prints; None: rank 0 prints nothing.
    """
    if started_by_launcher():
        raise InputError("nproc, max_restarts: not allowed under torchrun, whose own options do the same")
    if force and max_restarts:
        raise InputError("force, max_restarts: only one of the two is allowed")
    last = folder / "last.h5"  # the last checkpoint
    storage.check_folder(folder, resume=resume, force=force)
    run_recipe = recipe
    if resume:
        # slice(0) reads the weights of no learner, because only the recipe is needed.
        _, run_recipe = _checkpoint_and_recipe(folder, recipe, lambda learners: slice(0), allow_code)
    if run_recipe is not None:
        check_processes(run_recipe, nproc)
    arguments = ["train", "-o", str(folder), "--device", device, "--timeout", str(timeout)]
    if data_dir:
        arguments += ["--data-dir", str(data_dir)]
    # A restart runs the same command, and must resume; in a folder without a run, --resume starts a run.
    if resume or max_restarts:
        arguments.append("--resume")
    if force:
        arguments.append("--force")
    # If ``recipe`` names code, the user has allowed it: reading the recipe fails otherwise.
    if allow_code or (recipe and recipe.names_code):
        arguments.append("--allow-code")
    arguments += ["--quiet"] if output_flags is None else output_flags
    with tempfile.TemporaryDirectory(prefix="landscape-recipe-") as recipe_folder:
        if recipe is not None:
            recipe_file = Path(recipe_folder, "recipe.toml")
            files.write_text(recipe_file, recipe.to_toml())
            arguments.append(str(recipe_file))
        exit_code = children.run_in_processes(
            arguments,
            nproc,
            timeout=timeout,
            # The threads of all processes together; None: OMP_NUM_THREADS says how many each process has.
            threads=None if "OMP_NUM_THREADS" in os.environ else os.cpu_count(),
            restarts=max_restarts,
            hint=lambda: (
                f"a resumed run continues from {last}" if last.exists() else "no checkpoint exists yet"
            ),
            log=folder / "logs" / "launcher.log",
            show_output=output_flags is not None,
        )
    if exit_code:
        words = f"its processes ended with exit code {exit_code}, the run can be resumed"
        error = OperationError(f"{folder}: {words}")
        error.exit_code = exit_code
        raise error
    return Checkpoint.load(last)

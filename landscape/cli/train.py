"""landscape train"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, output, processes, run_summary
from landscape.cli.completion import names
from landscape.cli.options import FOLDER, command, group
from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.train.processes import children
from landscape.train.processes.children import TIMEOUT
from landscape.train.processes.process_group import Group, started_by_launcher, worker_device
from landscape.train.recipes import table_recipes
from landscape.train.recipes.recipe import Recipe
from landscape.train.run import launch
from landscape.train.run.loop import Hooks
from landscape.train.run.setup import Diverged, divergence_message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The options of ``landscape train``.

    Args:
        settings: Change a key of the recipe, such as lr=0.5 or algorithm.mixing='ring(1)'.
        output: Folder of the run. [default: runs/NAME-seedN]
        resume: Resume from DIR/last.h5; the result is bit-identical to an uninterrupted run.
        force: First delete the run in DIR.
        nproc: Processes on this machine that share the learners.
        max_restarts: How often all processes are restarted from last.h5 after one is lost.
    """

    recipe_name: str | None
    settings: tuple[str, ...]
    output: str | None
    resume: bool
    force: bool
    nproc: int = 1
    max_restarts: int = 0
    timeout: float = TIMEOUT
    allow_code: bool
    device: str
    data_dir: str | None

    def recipe(self) -> Recipe | None:
        """The recipe, if one is named, after a check of the options."""
        positive("--nproc", self.nproc, least=1)
        positive("--max-restarts", self.max_restarts, least=0)
        positive("--timeout", self.timeout)
        if self.recipe_name:
            return table_recipes.read(self.recipe_name, self.settings, allow_code=self.allow_code)
        if self.settings:
            raise InputError("--set: needs a RECIPE to change; give its name or file")
        if self.output is None:
            raise InputError(
                "RECIPE: missing; give a name (see 'landscape recipes'), a .toml file, or -o DIR --resume"
            )
        return None

    def folder(self, chosen: Recipe | None) -> str:
        """The folder of the run."""
        if self.output:
            return self.output
        name, seed = (chosen.name.replace("/", "-"), chosen.seed) if chosen else ("", 0)
        return f"runs/{name}-seed{seed}"

    def arguments(self, folder: str) -> list[str]:
        """The command line of each process that --nproc starts."""
        arguments = ["train", *([self.recipe_name] if self.recipe_name else [])]
        arguments += [word for setting in self.settings for word in ("--set", setting)]
        arguments += ["-o", folder, "--device", self.device, "--timeout", str(self.timeout)]
        arguments += ["--data-dir", self.data_dir] if self.data_dir else []
        # A restart has to resume; where there is no run yet, --resume starts it.
        flags = {"--resume": self.resume or self.max_restarts, "--force": self.force}
        shown = output.current()
        flags |= {"--allow-code": self.allow_code, "--quiet": shown.quiet}
        flags |= {"--json": shown.as_json, "--verbose": shown.verbose}
        return [*arguments, *(flag for flag, is_set in flags.items() if is_set)]


@command(
    training=group(
        Training,
        recipe_name={"argument": True, "metavar": "[RECIPE]", "shell_complete": names(table_recipes.names)},
        output=FOLDER,
        nproc={"metavar": "N"},
        max_restarts={"metavar": "K"},
        timeout=processes.TIMEOUT_S,
    )
)
def train(training: Training) -> None:
    """Train n learners by RECIPE, a built-in name or a .toml file; every step is decomposed.

    Model and data may be MODULE:NAME, your own code. It runs if --set names it, or if a file names it and
    --allow-code is given.

    Writes DIR/last.h5, DIR/step-NNNNNNN.h5 and DIR/recipe.toml. With --resume, RECIPE may be left out. With
    --nproc, or under torchrun (see docs/cluster.md), several processes share the learners, and each writes
    DIR/logs/rank-R.log.

    The exit code is 3 if the run diverged, with a message; its files are complete.

    Example:
        landscape train mnist-fig2a-dpsgd --set seed=1 --data-dir ~/data -o runs/dp-1
    """
    chosen = training.recipe()
    folder = training.folder(chosen)
    if training.nproc > 1 or training.max_restarts:
        _start_processes(training, folder)
    else:
        _train(training, chosen, folder)


def _start_processes(training: Training, folder: str) -> None:
    """Run this command in --nproc processes, and restart them while restarts are left."""
    if started_by_launcher():
        raise InputError("--nproc, --max-restarts: not allowed under torchrun, which has its own")
    if training.force and training.max_restarts:
        raise InputError("--force and --max-restarts: only one of the two is allowed")
    launch.check_folder(Path(folder), resume=training.resume, force=training.force)
    last = Path(folder) / "last.h5"
    code = children.start(
        training.arguments(folder),
        training.nproc,
        timeout=training.timeout,
        threads=None if "OMP_NUM_THREADS" in os.environ else os.cpu_count(),
        restarts=training.max_restarts,
        hint=lambda: f"--resume goes on from {last}" if last.exists() else "there is no checkpoint yet",
        log=Path(folder) / "logs" / "launcher.log",
    )
    if code:
        raise click.exceptions.Exit(code)
    _check_divergence(Checkpoint.load(last, learners=lambda n: slice(0)), folder)


def _train(training: Training, chosen: Recipe | None, folder: str) -> None:
    """Train in this process, which may be one of a group."""
    with _joined(training.device, training.timeout) as group:
        first = group is None or group.rank == 0
        output.current().muted = not first
        with common.progress_bar("training") as bar:
            hooks = Hooks(
                message=common.message,
                step=lambda done, total: bar(done / total),
            )
            end = launch.launch(
                chosen,
                folder,
                resume=training.resume,
                force=training.force,
                device=training.device,
                data_dir=training.data_dir,
                hooks=hooks,
                group=group,
                allow_code=training.allow_code,
            )
        if first:
            advice = run_summary.next_command(end, folder, training.data_dir)
            common.values(run_summary.closing(end), run=run_summary.numbers(end), next=advice)
            common.files(f"{folder}/last.h5")
            common.message(f"next: {advice}")
    if not _launched():  # the launcher reads it from the last checkpoint
        _check_divergence(end, folder, group.rank if group else 0)


def _launched() -> bool:
    """Whether the launcher of --nproc started this process, and waits for it."""
    return children.of_launcher() is not None


def _check_divergence(end: Checkpoint, folder: str, rank: int = 0) -> None:
    """Raise Diverged if the run has; only rank 0 says so."""
    if end.diverged and rank:
        sys.exit(Diverged.exit_code)
    if end.diverged:
        raise Diverged(f"{folder}: {divergence_message(end)}")


@contextlib.contextmanager
def _joined(device: str, timeout: float) -> Iterator[Group | None]:
    """The group of processes that a launcher started this one in, if any."""
    if started_by_launcher():
        with processes.joined(worker_device(device), timeout) as group:
            yield group
    else:
        yield None

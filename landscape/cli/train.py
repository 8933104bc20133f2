"""landscape train"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from landscape import paper
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, processes
from landscape.core.errors import InputError
from landscape.core.files import printable
from landscape.core.options import positive
from landscape.train import launch
from landscape.train.distributed import board, launcher
from landscape.train.distributed.process_group import Group, started_by_launcher
from landscape.train.divergence import Diverged, divergence_message
from landscape.train.loop import Hooks


@click.command(
    epilog="Example: landscape train mnist-fig2a-dpsgd --set seed=1 --data-dir ~/data -o runs/dp-1"
)
@click.argument("recipe_name", metavar="[RECIPE]", required=False)
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a key of the recipe, such as lr=0.5 or algorithm.mixing='ring(1)'.",
)
@click.option("-o", "--output", metavar="DIR", help="Folder of the run. [default: runs/NAME-seedN]")
@click.option("--resume", is_flag=True, help="Go on from DIR/last.h5, to the bits of an unbroken run.")
@click.option("--force", is_flag=True, help="Delete the run that is in DIR first.")
@click.option(
    "--nproc",
    metavar="N",
    default=1,
    show_default=True,
    help="Processes on this machine that share the learners.",
)
@click.option(
    "--max-restarts",
    metavar="K",
    default=0,
    show_default=True,
    help="How often to start all processes anew, from last.h5, when one was lost.",
)
@processes.timeout
@common.allow_code
@common.device
@common.data_dir
@common.quiet
def train(
    recipe_name: str | None,
    settings: tuple[str, ...],
    output: str | None,
    resume: bool,
    force: bool,
    nproc: int,
    max_restarts: int,
    timeout: float,
    allow_code: bool,
    device: str,
    data_dir: str | None,
    quiet: bool,
) -> None:
    """Train n learners by RECIPE, a built-in name or a .toml file, every step decomposed.

    Its model and data may be MODULE:NAME, code of your own, which is then run: where --set names it, or a
    file does and --allow-code is given.

    Writes DIR/last.h5, DIR/step-NNNNNNN.h5 and DIR/recipe.toml. With --resume, RECIPE may be left out. With
    --nproc, or started by torchrun (see docs/cluster.md), several processes share the learners, and each
    writes DIR/logs/rank-R.log.

    Exits with 3 if the run diverged, which is always said; its files are as whole as any other's.
    """
    positive("--nproc", nproc, least=1)
    positive("--max-restarts", max_restarts, least=0)
    positive("--timeout", timeout)
    chosen = paper.read(recipe_name, settings, allow_code=allow_code) if recipe_name else None
    if chosen is None and settings:
        raise InputError("--set: needs a RECIPE to change; give its name or file")
    if output is None and chosen is None:
        raise InputError(
            "RECIPE: missing; give a name (see 'landscape recipes'), a .toml file, or -o DIR --resume"
        )
    folder = (
        output or f"runs/{chosen.name.replace('/', '-') if chosen else ''}-seed{chosen.seed if chosen else 0}"
    )
    if nproc > 1 or max_restarts:
        if started_by_launcher():
            raise InputError("--nproc, --max-restarts: not allowed under torchrun, which has its own")
        if force and max_restarts:
            raise InputError("--force and --max-restarts: only one of the two is allowed")
        launch.check_folder(Path(folder), resume=resume, force=force)
        arguments = ["train", *([recipe_name] if recipe_name else [])]
        arguments += [word for setting in settings for word in ("--set", setting)]
        arguments += ["-o", folder, "--device", device, "--timeout", str(timeout)]
        arguments += ["--data-dir", data_dir] if data_dir else []
        # A restart has to go on; where there is no run yet, --resume starts it.
        flags = {"--resume": resume or max_restarts, "--force": force, "--quiet": quiet}
        flags |= {"--allow-code": allow_code}
        arguments += [flag for flag, given in flags.items() if given]
        last = Path(folder) / "last.h5"
        code = launcher.start(
            "landscape.cli",
            arguments,
            nproc,
            timeout=timeout,
            threads=None if "OMP_NUM_THREADS" in os.environ else os.cpu_count(),
            restarts=max_restarts,
            kept=lambda: f"--resume goes on from {last}" if last.exists() else "there is no checkpoint yet",
            log=Path(folder) / "logs" / "launcher.log",
        )
        if code:
            raise click.exceptions.Exit(code)
        _judge(Checkpoint.load(last, held=lambda learners: slice(0)), folder)
        return
    with _joined(device, timeout) as group:
        silent = quiet or (group is not None and group.rank > 0)
        with common.progress_bar("training", silent) as bar:
            hooks = Hooks(
                message=lambda line: common.message(line, silent),
                step=lambda done, total: bar(done / total),
            )
            end = launch.launch(
                chosen,
                folder,
                resume=resume,
                force=force,
                device=device,
                data_dir=data_dir,
                hooks=hooks,
                group=group,
                allow_code=allow_code,
            )
        common.message(closing(end), silent)
        if group is None or group.rank == 0:
            click.echo(printable(f"{folder}/last.h5"))
    if not _launched():  # the launcher reads it off the run's end
        _judge(end, folder, group.rank if group else 0)


def _launched() -> bool:
    """Whether the launcher of --nproc started this process, and waits for it."""
    return board.of_launcher() is not None


def _judge(end: Checkpoint, folder: str, rank: int = 0) -> None:
    """Raise Diverged if the run has; only rank 0 says so."""
    if end.diverged and rank:
        sys.exit(Diverged.exit_code)
    if end.diverged:
        raise Diverged(f"{folder}: {divergence_message(end)}")


@contextlib.contextmanager
def _joined(device: str, timeout: float) -> Iterator[Group | None]:
    """The group of processes that a launcher started this one in, if any."""
    if started_by_launcher():
        with processes.joined(launch.worker_device(device), timeout) as group:
            yield group
    else:
        yield None


def closing(end: Checkpoint) -> str:
    """One line about how a run ended."""
    if not len(end.history["step"]):
        return "no step that could be made" if end.diverged else "no step to make"
    last = {name: float(column[-1]) for name, column in end.history.items()}
    error = (
        "" if math.isnan(last["test_accuracy"]) else f", test error {100 * (1 - last['test_accuracy']):.2f}%"
    )
    drift = f" (diverged at step {end.diverged_at}: the {end.diverged})" if end.diverged else ""
    return (
        f"step {end.step}{drift}: test loss {last['test_loss']:.4g}{error}, "
        f"consensus distance {last['consensus']:.3g}, {last['wall_s']:.1f} s"
    )

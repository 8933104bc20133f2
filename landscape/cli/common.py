"""What several commands share: options, progress bars, and checkpoints opened as problems."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from landscape import plots
from landscape.checkpoint import run_folder, user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.foreign_weights import SUFFIXES, import_state
from landscape.cli.source import Source as Source
from landscape.cli.source import data_dir as data_dir
from landscape.cli.source import source as source
from landscape.core import hdf5
from landscape.core.errors import FailedError, InputError
from landscape.core.files import printable
from landscape.core.lock import Lock
from landscape.core.options import SPLIT
from landscape.core.progress import progress_bar as progress_bar
from landscape.problem.batchnorm import SAMPLES
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.train.launch import pick_device

F = TypeVar("F", bound=Callable[..., Any])

# What the name of a result does not tell: the defaults of its options.
USUAL = ("random", "none", "hessian", SPLIT)

checkpoints = click.argument("checkpoints", metavar="CKPT…", nargs=-1, required=True)
split = click.option("--split", default=SPLIT, show_default=True, help="Data: train or test.")
force = click.option("--force", is_flag=True, help="Replace another result that the file holds.")
picture = click.option("--plot", "picture", metavar="F.png", help="Draw it, too: .png, .pdf or .svg.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No messages and no progress bar.")
device = click.option(
    "--device", default="auto", show_default=True, help="auto (CUDA where there is a GPU), cpu or cuda."
)


def outputs(function: F) -> F:
    """The options that say where the result goes, and whether it is drawn."""
    output = click.option(
        "-o", "--output", metavar="OUT.h5", help="Result file. [default: beside the checkpoint]"
    )
    return output(force(picture(function)))


allow_code = click.option(
    "--allow-code",
    is_flag=True,
    help="Run code that a file names as MODULE:NAME for its model or data; what --set names needs no leave.",
)

search = click.option(
    "--search",
    default="auto",
    show_default=True,
    help="auto: cheaper products find eigenvectors, exact ones check and mend them; exact: no cheaper ones.",
)


def batchnorm(function: F) -> F:
    """The options that say whose statistics BatchNorm uses."""
    policy = click.option(
        "--bn",
        default="center",
        show_default=True,
        help="BatchNorm statistics: center (the checkpoint's), recalibrate (re-estimated at each point) or "
        "train (the batch's own).",
    )
    size = click.option(
        "--bn-samples", default=SAMPLES, show_default=True, help="Samples to re-estimate from, or in a batch."
    )
    return policy(size(function))


def plane_options(grid: str, span: float | None = 0.1) -> Callable[[F], F]:
    """The options of commands that work on a grid over a plane; ``span`` None: the plane knows."""
    usual = "" if span else " [default: 0.1, or what shows all markers]"

    def decorate(function: F) -> F:
        for option in reversed(
            [
                click.option(
                    "--grid", default=grid, show_default=True, help="Points: K, or KXxKY such as 51x25."
                ),
                click.option(
                    "--span",
                    default=span,
                    type=float,
                    show_default=bool(span),
                    help=f"x and y run over [−span, span].{usual}",
                ),
                click.option(
                    "--norm",
                    default="none",
                    show_default=True,
                    help="Directions: none (i.i.d. normal, the paper's), filter or layer (Li et al. 2018).",
                ),
                split,
                click.option("--seed", default=0, show_default=True, help="Draws the directions."),
                click.option("--dtype", default="float32", show_default=True, help="float32 or float64."),
                outputs,
            ]
        ):
            function = option(function)
        return function

    return decorate


def parse_grid(text: str) -> tuple[int, int]:
    """(nx, ny) from "50" or "51x25"."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match or min(int(match[1]), int(match[2] or match[1])) < 1:
        raise InputError(
            f"--grid: '{text}' is not allowed, it must be K or KXxKY with numbers ≥ 1, such as 51x25"
        )
    return int(match[1]), int(match[2] or match[1])


def open_checkpoints(paths: Sequence[str], source: Source, quiet: bool) -> list[Checkpoint]:
    """The checkpoints, all read and checked before any work starts.

    The folder of a run stands for its last one; a file of weights trained elsewhere becomes one.
    """
    found = []
    for path in (run_folder.checkpoint_in(Path(path)) for path in paths):
        if path.suffix not in SUFFIXES:
            found.append(Checkpoint.load(path))
            continue
        if source.model is None:
            raise InputError(f"--model: missing, {path} holds weights alone; give the model they belong to")
        spec = source.model
        tell = functools.partial(message, quiet=quiet)
        found.append(
            import_state(path, source.build_model(), name=spec.name, options=spec.options, message=tell)
        )
        found[-1].path = path
    return found


def open_problem(
    checkpoint: Checkpoint,
    split: str,
    source: Source,
    device_name: str,
    dtype: str = "float32",
    quiet: bool = True,
) -> Problem:
    """The checkpoint's problem, centred on w_a, in the precision and on the device asked for."""
    if dtype not in ("float32", "float64"):
        raise InputError(f"--dtype: '{dtype}' is not allowed, it must be float32 or float64")
    source.check_model(checkpoint)
    other = source.other_data(checkpoint)
    problem = checkpoint.problem(
        split,
        model=source.build_model if source.model else None,
        data=source.own_data,
        loss=source.own_loss,
        data_dir=source.data_dir,
        device=pick_device(device_name),
        dtype=getattr(torch, dtype),
    )
    if other:
        known = user_code.spelled(checkpoint.data["name"], checkpoint.data["options"])
        message(f"--data: {other} is other data than {checkpoint.path} was made with, {known}", quiet)
    return problem


def about(checkpoint: Checkpoint, split: str, source: Source | None = None) -> base.About:
    """Where a result came from, as the result keeps it; its label names data that is not the checkpoint's."""
    assert checkpoint.path is not None
    other = source.other_data(checkpoint) if source else ""
    return {
        "split": split,
        "label": f"{checkpoint.label}, on {other}" if other else checkpoint.label,
        "source": checkpoint.path.name,
        "source_sha256": hdf5.sha256(checkpoint.path),
    }


def result_path(
    output: str | None,
    checkpoint: Checkpoint,
    kind: str,
    picture: str | None = None,
    *,
    force: bool,
    variant: Mapping[str, str] | None = None,
    goes_on: bool = False,
) -> Path:
    """Where the result goes; found out, and the folders made, before the work starts.

    By default beside the checkpoint, under a name with those values of ``variant`` that are not the usual
    ones, such as last-contour-pca.h5. ``goes_on``: the command looks itself at what the file holds.
    """
    assert checkpoint.path is not None
    words = [kind, *(value for value in (variant or {}).values() if value not in USUAL)]
    path = (
        Path(output) if output else checkpoint.path.with_name(f"{checkpoint.path.stem}-{'-'.join(words)}.h5")
    )
    check_targets(path, picture, force or goes_on)
    return path


def check_targets(path: Path | None, picture: str | None, force: bool) -> None:
    """See that a result and a picture can be written there, and make the folders.

    A checkpoint is never overwritten, a result by ``force``.
    """
    if path and path.suffix != ".h5":
        raise InputError(f"-o: '{path}' is not allowed, a result's name must end in .h5")
    if path and path.exists():
        with hdf5.reading(path) as file:
            schema = str(file.attrs["schema"])
        if schema == "landscape.checkpoint":
            raise FailedError(f"-o: {path} is a checkpoint, it is not overwritten; give another name")
        if not force:
            raise FailedError(
                f"-o: {path} holds a finished {schema}; give --force to replace it, or another -o "
                "(landscape plot draws it)"
            )
    if picture:
        plots.check_format(picture)
    for target in filter(None, (path, Path(picture) if picture else None)):
        make_folder(target.parent)


def lock(path: Path) -> None:
    """See that no other process of ours works on the file or folder ``path``, until the command ends."""
    held = Lock(path)
    click.get_current_context().call_on_close(held.release)
    held.acquire()


def make_folder(folder: Path) -> None:
    """Make ``folder`` and see that files can be put in it, before work is done that would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FailedError(f"{folder}: cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise FailedError(f"{folder}: cannot be written to (Permission denied)")


T = TypeVar("T")


def each(title: str, items: Sequence[T], quiet: bool) -> Iterator[tuple[T, Callable[[float], None]]]:
    """The items under one bar, each with what takes the share of its own work that is done."""
    with progress_bar(title, quiet) as bar:
        for i, item in enumerate(items):
            yield item, lambda share, i=i: bar((i + share) / len(items))  # type: ignore[misc]


def residual(absolute: float, value: float) -> str:
    """An eigenvalue's residual as --tol counts it, in words: relative to the eigenvalue."""
    return f"relative residual {absolute / abs(value):.1e}" if value else f"residual {absolute:.1e}"


def message(text: str, quiet: bool) -> None:
    """A line for the user, on stderr."""
    if not quiet:
        click.echo("\n".join(map(printable, text.split("\n"))), err=True)


def write(results: Sequence[base.Result], path: Path, picture: str | None) -> None:
    """Save ``results``, draw them if a picture is asked for, and name the files on stdout."""
    base.save(results, path)
    show(results, path, picture)


def show(results: Sequence[base.Result], path: Path, picture: str | None) -> None:
    """Draw ``results`` if a picture is asked for, and name the files on stdout."""
    click.echo(printable(path))
    if picture:
        plots.save_figure(plots.draw(results), picture)
        click.echo(printable(picture))

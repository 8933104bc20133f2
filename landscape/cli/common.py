"""What several commands share: options, progress bars, and checkpoints opened as problems."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click
import torch
from torch import nn

from landscape import factories, plots, store
from landscape.batchnorm import SAMPLES
from landscape.checkpoint import Checkpoint
from landscape.data import Dataset
from landscape.lock import Lock
from landscape.options import FailedError, InputError
from landscape.problem import Loss, Problem
from landscape.progress import progress_bar as progress_bar
from landscape.train.launch import pick_device

F = TypeVar("F", bound=Callable[..., Any])

checkpoints = click.argument("checkpoints", metavar="CKPT…", nargs=-1, required=True)
quiet = click.option("-q", "--quiet", is_flag=True, help="No messages and no progress bar.")
data_dir = click.option(
    "--data-dir",
    metavar="D",
    help="Folder with the data sets that are not bundled. [default: $LANDSCAPE_DATA or data]",
)
device = click.option(
    "--device", default="auto", show_default=True, help="auto (CUDA where there is a GPU), cpu or cuda."
)


@dataclass(frozen=True)
class Source:
    """Where an analysis takes model, data and loss from; None: from the checkpoint, or the data."""

    model: factories.Spec | None
    data: factories.Spec | None
    loss: str | None
    data_dir: str | None

    def build_model(self) -> nn.Module:
        """The user's model, new at each call."""
        assert self.model is not None
        return factories.build_model("--model", self.model)

    @cached_property
    def own_data(self) -> factories.UserData | Dataset | None:
        """The user's data, made once."""
        return factories.load_data("--data", self.data, self.data_dir) if self.data else None

    @cached_property
    def own_loss(self) -> Loss | Literal["data"] | None:
        """The user's loss, or "data", as Checkpoint.problem takes it."""
        return factories.load_loss("--loss", self.loss) if self.loss else "data"


def source(function: F) -> F:
    """The options that say where model, data and loss come from; the command is given them as one Source."""

    @functools.wraps(function)
    def command(
        *args: Any,
        model: str | None,
        data: str | None,
        loss: str | None,
        data_dir: str | None,
        **options: Any,
    ) -> Any:
        from_where = Source(
            factories.model_spec("--model", model) if model else None,
            factories.data_spec("--data", data) if data else None,
            loss,
            data_dir,
        )
        return function(*args, source=from_where, **options)

    own = "MODULE:NAME, called to make it, or a built-in name; options follow in brackets"
    for option in (
        data_dir,
        click.option(
            "--loss",
            metavar="NAME",
            help="MODULE:NAME of loss(outputs, targets), a mean (a class, or a name with brackets, is called "
            "to make it); or output: the model's output carries it. [default: the data's, else "
            "cross-entropy, or output where batches are single dicts]",
        ),
        click.option(
            "--data",
            metavar="NAME",
            help=f"{own}: (x, y), batches, or splits of them. [default: the checkpoint's]",
        ),
        click.option("--model", metavar="NAME", help=f"{own}. [default: the checkpoint's, if built in]"),
    ):
        command = option(command)
    return cast(F, command)


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
                click.option("--split", default="test", show_default=True, help="Data: test or train."),
                click.option("--seed", default=0, show_default=True, help="Draws the directions."),
                click.option("--dtype", default="float32", show_default=True, help="float32 or float64."),
                click.option(
                    "-o", "--output", metavar="OUT.h5", help="Result file. [default: beside the checkpoint]"
                ),
                click.option("--plot", "picture", metavar="F.png", help="Draw it, too: .png, .pdf or .svg."),
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


def open_checkpoints(paths: Sequence[str]) -> list[Checkpoint]:
    """The checkpoints, all read and checked before any work starts."""
    return [Checkpoint.load(path) for path in paths]


def open_problem(
    checkpoint: Checkpoint, split: str, source: Source, device_name: str, dtype: str = "float32"
) -> Problem:
    """The checkpoint's problem, centred on w_a, in the precision and on the device asked for."""
    if dtype not in ("float32", "float64"):
        raise InputError(f"--dtype: '{dtype}' is not allowed, it must be float32 or float64")
    if source.data:
        check_same_data(checkpoint, source.data, source.own_data)
    problem = checkpoint.problem(
        split,
        model=source.build_model if source.model else None,
        data=source.own_data,
        loss=source.own_loss,
        data_dir=source.data_dir,
        device=pick_device(device_name),
        dtype=getattr(torch, dtype),
    )
    if source.model or source.data or source.loss:
        problem.check_fit()
    return problem


def check_same_data(checkpoint: Checkpoint, spec: factories.Spec, data: Any) -> None:
    """FailedError if ``data`` has the name of the checkpoint's, but holds something else.

    Data of another name is the user's choice.
    """
    known = checkpoint.data
    same = (known["name"], known["options"]) == (spec.name, spec.options)
    if same and known["fingerprint"] and data.fingerprint != known["fingerprint"]:
        raise FailedError(
            f"--data: {spec.name} gives other data than {checkpoint.path} was made with: fingerprint "
            f"{data.fingerprint[:12]}…, not {known['fingerprint'][:12]}… (does it draw without a seed?)"
        )


def about(checkpoint: Checkpoint, split: str) -> store.About:
    """Where a result came from, as the result keeps it."""
    assert checkpoint.path is not None
    return {
        "split": split,
        "label": checkpoint.label,
        "source": checkpoint.path.name,
        "source_sha256": store.sha256(checkpoint.path),
    }


def result_path(output: str | None, checkpoint: Checkpoint, kind: str, picture: str | None = None) -> Path:
    """Where the result goes; found out, and the folders made, before the work starts."""
    assert checkpoint.path is not None
    path = Path(output) if output else checkpoint.path.with_name(f"{checkpoint.path.stem}-{kind}.h5")
    check_targets(path, picture)
    return path


def check_targets(path: Path | None, picture: str | None) -> None:
    """See that a result and a picture can be written there, and make the folders."""
    if path and path.suffix != ".h5":
        raise InputError(f"-o: '{path}' is not allowed, a result's name must end in .h5")
    if path and path.exists():
        with store.reading(path) as file:
            if file.attrs["schema"] == "landscape.checkpoint":
                raise FailedError(f"-o: {path} is a checkpoint, it is not overwritten; give another name")
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


def message(text: str, quiet: bool) -> None:
    """A line for the user, on stderr."""
    if not quiet:
        click.echo(text, err=True)


def write(results: Sequence[store.Result], path: Path, picture: str | None) -> None:
    """Save ``results``, draw them if a picture is asked for, and name the files on stdout."""
    store.save(results, path)
    show(results, path, picture)


def show(results: Sequence[store.Result], path: Path, picture: str | None) -> None:
    """Draw ``results`` if a picture is asked for, and name the files on stdout."""
    click.echo(str(path))
    if picture:
        plots.save_figure(plots.draw(results), picture)
        click.echo(picture)

"""Options that several commands share, and groups of options that a command receives as one object."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from landscape.cli import output
from landscape.cli.choices import Choice as Choice
from landscape.cli.choices import names as names
from landscape.cli.choices import paths as paths
from landscape.core.errors import InputError
from landscape.core.memory import DEVICES, at_most, parse_size
from landscape.core.options import SPLIT
from landscape.data.base import SPLITS

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Any], Any]


split = click.option(
    "--split", type=Choice(SPLITS), default=SPLIT, show_default=True, help="Part of the data."
)
dtype = click.option(
    "--dtype", type=Choice(("float32", "float64")), default="float32", show_default=True, help="Precision."
)
force = click.option("--force", is_flag=True, help="Replace another result that the file holds.")
picture = click.option(
    "--plot",
    "picture",
    metavar="F.png",
    shell_complete=paths("file"),
    help="Draw it, too: .png, .pdf or .svg.",
)
quiet = click.option("-q", "--quiet", **output.QUIET)
device = click.option(
    "--device",
    type=Choice(DEVICES),
    default="auto",
    show_default=True,
    help="Where to compute; auto: CUDA where there is a GPU.",
)
data_dir = click.option(
    "--data-dir",
    metavar="D",
    shell_complete=paths("dir"),
    help="Folder with the data sets that are not bundled. [default: $LANDSCAPE_DATA or data]",
)
allow_code = click.option(
    "--allow-code",
    is_flag=True,
    help="Run code that a file names as MODULE:NAME for its model or data; code named by --set always runs.",
)
randomness = click.option(
    "--randomness",
    metavar="refuse|seed|N",
    default="refuse",
    show_default=True,
    help="A model or loss that draws random numbers in eval mode: seed holds them fixed, a number is that of "
    "the draws over which the loss is averaged.",
)


def _limit(context: click.Context, parameter: click.Parameter, text: str | None) -> None:
    context.with_resource(at_most(parse_size("--max-memory", text) if text else None))


max_memory = click.option(
    "--max-memory",
    metavar="SIZE",
    callback=_limit,
    expose_value=False,
    help="Memory of a process, such as 2.5GiB (on CUDA: of the GPU). What needs more is refused before it "
    "starts. [default: what is free]",
)


def grouped(name: str, make: Callable[..., Any], *options: Option) -> Callable[[F], F]:
    """A decorator for a command: its parameter ``name`` is ``make(**values)``, the values of ``options``."""

    def none() -> None: ...

    for option in options:
        option(none)
    known = none.__click_params__  # type: ignore[attr-defined]
    fields = [parameter.name for parameter in known if parameter.expose_value]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(*args: Any, **values: Any) -> Any:
            group = make(**{field: values.pop(field) for field in fields})
            return function(*args, **values, **{name: group})

        for option in reversed(options):
            command = option(command)
        return cast(F, command)

    return decorate


@dataclass(frozen=True)
class Output:
    """Where a result is written (``path`` None: next to the checkpoint), and the picture of it, if any."""

    path: str | None
    force: bool
    picture: str | None


OUTPUT = (
    click.option(
        "-o",
        "--output",
        metavar="OUT.h5",
        shell_complete=paths("file"),
        help="Result file. [default: next to the checkpoint]",
    ),
    force,
    picture,
)


def seeds(default: str, help: str) -> Option:
    """The option --seeds of commands that train several runs of one setting."""
    return click.option("--seeds", metavar="N-M,…", default=default, show_default=True, help=help)


def parse_seeds(text: str) -> list[int]:
    """[0, 1, 2, 5] of "0-2,5"."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= 1000:
            raise InputError(
                f"--seeds: '{text}' is not allowed, it must be whole numbers such as 0-4 or 0,1,5"
            )
        seeds += range(first, last + 1)
    return sorted(set(seeds))

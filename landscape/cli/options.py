"""Options that several commands share, and groups of options that a command receives as one object."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from landscape.analysis.planes import IGNORES, NORMS
from landscape.cli import output
from landscape.cli.choices import Choice as Choice
from landscape.cli.choices import names as names
from landscape.cli.choices import paths as paths
from landscape.core.devices import DEVICES
from landscape.core.errors import InputError
from landscape.core.options import SPLIT
from landscape.curvature.eigenvalues import SEARCHES
from landscape.data.base import SPLITS
from landscape.problem.batchnorm import POLICIES, SAMPLES

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
tolerance = click.option(
    "--tolerance",
    metavar="SIZE",
    help="Compute exact points only until the others can be interpolated with an error below SIZE: 1% of the "
    "range shown, or a number such as 0.005. [default: all points are exact]",
)


def grouped(name: str, make: Callable[..., Any], *options: Option) -> Callable[[F], F]:
    """A decorator for a command: its parameter ``name`` is ``make(**values)``, the values of ``options``."""

    def none() -> None: ...

    for option in options:
        option(none)
    fields = [parameter.name for parameter in none.__click_params__]  # type: ignore[attr-defined]

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


@dataclass(frozen=True)
class BatchNorm:
    """Which statistics BatchNorm uses, and how many samples they are estimated from."""

    bn: str
    bn_samples: int


batchnorm = grouped(
    "batchnorm",
    BatchNorm,
    click.option(
        "--bn",
        type=Choice(POLICIES),
        default="center",
        show_default=True,
        help="BatchNorm statistics: center (the checkpoint's), recalibrate (estimated again at each point) "
        "or train (those of the batch itself).",
    ),
    click.option(
        "--bn-samples",
        default=SAMPLES,
        show_default=True,
        help="Number of samples for recalibrate, and in a batch for train.",
    ),
)


@dataclass(frozen=True)
class Grid:
    """Points on a plane: ``shape`` (nx, ny) over [−span, span] in x and y; ``norm`` scales the directions.

    Values within ``tolerance`` suffice, if it is given.
    """

    shape: tuple[int, int]
    span: float | None
    norm: str
    tolerance: str | None


def norm(help: str) -> Option:
    """The option --norm of commands that draw random directions."""
    return click.option("--norm", type=Choice(NORMS), default="none", show_default=True, help=help)


def ignore(help: str) -> Option:
    """The option --ignore of commands that draw random directions."""
    return click.option("--ignore", type=Choice(IGNORES), help=help)


def grid(points: str) -> Callable[[F], F]:
    """The options of commands that work on a grid over a plane, with ``points`` by default."""

    def make(grid: str, span: float | None, norm: str, tolerance: str | None) -> Grid:
        return Grid(parse_grid(grid), span, norm, tolerance)

    return grouped(
        "grid",
        make,
        click.option("--grid", default=points, show_default=True, help="Points: K, or KXxKY such as 51x25."),
        click.option(
            "--span",
            type=float,
            help="x and y run over [−span, span]. [default: 0.1, or what shows all markers]",
        ),
        norm("Directions: none (i.i.d. normal, the paper's), filter or layer (Li et al. 2018)."),
        tolerance,
    )


def parse_grid(text: str) -> tuple[int, int]:
    """(nx, ny) from "50" or "51x25"."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match or min(int(match[1]), int(match[2] or match[1])) < 1:
        raise InputError(
            f"--grid: '{text}' is not allowed, it must be K or KXxKY with numbers ≥ 1, such as 51x25"
        )
    return int(match[1]), int(match[2] or match[1])


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


@dataclass(frozen=True)
class Eigenvalues:
    """How eigenvalues are computed: relative residual, limit of products, and search."""

    tol: float
    max_products: int
    search: str


def eigenvalues(products: str) -> Callable[[F], F]:
    """The options of commands that compute both ends of a spectrum; ``products``: help of --max-products."""
    return grouped(
        "eigenvalues",
        Eigenvalues,
        click.option(
            "--tol", default=0.01, show_default=True, help="Residual of each eigenvalue, relative to it."
        ),
        click.option("--max-products", default=1000, show_default=True, help=products),
        click.option(
            "--search",
            type=Choice(SEARCHES),
            default="auto",
            show_default=True,
            help="auto: cheaper products find the eigenvectors, the results are verified and refined with "
            "exact products; exact: exact products only.",
        ),
    )


@dataclass(frozen=True)
class Draws:
    """How often minibatches are drawn: until the relative standard error is ``tol``, within these bounds."""

    tol: float
    draws: int
    max_draws: int


draws = grouped(
    "draws",
    Draws,
    click.option(
        "--tol",
        default=0.05,
        show_default=True,
        help="Draw minibatches until the standard error is at most this share of the mean.",
    ),
    click.option("--min-draws", "draws", default=16, show_default=True, help="At least so many draws."),
    click.option("--max-draws", default=1000, show_default=True, help="At most so many draws."),
)

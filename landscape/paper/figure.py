"""A figure: the runs that it needs at each scale, and a drawing of their finished results."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import latest
from landscape.core import registry
from landscape.core.options import check_keywords
from landscape.paper import scales
from landscape.paper.context import SCALES, Cell, Context, Point, Scale, identity
from landscape.paper.verdicts import Judge, Rows

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn
    from matplotlib.figure import Figure as Picture


@dataclass(frozen=True)
class Compared:
    """A number of ours and the paper's; ``paper`` is "" where the paper has none."""

    what: str
    ours: str
    paper: str = ""


@dataclass
class Drawing:
    """A finished figure: pictures by suffix ("" for the first), data, and numbers beside the paper's.

    ``rows`` become the CSV; from the CSV alone follows the verdict on the claim. ``remark`` is what must be
    said beside it.
    """

    pictures: dict[str, Picture]
    rows: Rows
    compared: list[Compared]
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The keys of a figure's table in figures.toml, where they are described."""

    where: str
    title: str
    claims: str
    finding: str
    laptop: str
    smoke: str = "{smoke}"
    paper: str = ""
    weights: bool = False
    partial: bool = False
    cells: Any = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figure(Described):
    """One figure or table of a paper.

    Attributes:
        name: in ``landscape figures``, and of its table in figures.toml.
        judge: gives the effects that the verdict on the claim rests on, from the rows of the CSV.
        draw: is called with matplotlib in the toolkit's style.
    """

    name: str
    judge: Judge
    draw: Callable[[Context], Drawing]

    def runs(self, scale: Scale) -> list[Cell]:
        """The runs that the figure needs at ``scale``."""
        return scales.cells(self.cells, scale) if self.cells else []

    def of(self, context: Context) -> Context:
        """``context`` with the runs and the sizes of this figure, of which nothing is computed yet."""
        sizes = {name: values[SCALES.index(context.scale)] for name, values in self.sizes.items()}
        runs = self.cells if self.cells and isinstance(self.cells, str) else self.name
        archives = (f"runs-{runs}", f"analyses-{self.name}")
        return context.of(self.runs(context.scale), sizes=sizes, archives=archives)

    def note(self, context: Context) -> str:
        """The changes that the scale makes to the paper, and how many of the runs have not ended yet."""
        notes = {"smoke": self.smoke, "laptop": self.laptop, "paper": self.paper or self.laptop}
        missing = sum(context.record(cell.recipe) is None for cell in context.cells)
        left = f"; {missing} of {len(context.cells)} runs have not ended yet" if missing else ""
        return notes[context.scale].format(**scales.declared()["notes"]) + left


def figure(
    name: str, judge: Judge, table: dict[str, Any] | None = None
) -> Callable[[Callable[[Context], Drawing]], Figure]:
    """A decorator: add the :class:`Figure` that the function draws to the registry.

    Args:
        name: in ``landscape figures``.
        judge: gives the effects behind the verdict on the claim, from the rows of the CSV.
        table: what figures.toml of this package has for a figure, with the table of its ``cells``; by default
            what it has under this name.

    Returns:
        The decorator; it gives the figure for the function.

    Raises:
        InputError: a key that no figure has, or one that is missing.

    Example:
        >>> figure("mine", list, {"title": "my figure"})(print)
        Traceback (most recent call last):
        landscape.core.errors.InputError: mine.where: missing...
    """

    def add(draw: Callable[[Context], Drawing]) -> Figure:
        cells = name if name in scales.declared()["cells"] else ""
        made = check_keywords(name, table or {"cells": cells} | scales.declared()[name], Described)
        return registry.figures.add(name)(Figure(name=name, judge=judge, draw=draw, **made))

    return add


def names() -> list[str]:
    """The figures by paper, in the order of the paper, its other figures after its tables; ours come last."""
    papers = ("DPSGD-2020", "DPSGD-2021", "LocalSGD-2021", "Delay-2019")

    def place(name: str) -> tuple[int, bool, str, str]:
        paper, _, part = get(name).where.partition(", ")
        return (*papers, paper).index(paper), not part.startswith(("Figure", "Table")), part, name

    return sorted(registry.figures, key=place)


def get(name: str) -> Figure:
    """The figure called ``name``. InputError names the nearest one."""
    return registry.figures[name]


def with_weights(figures: Iterable[Figure], scale: Scale) -> set[str]:
    """The identities of the runs whose weights figures need."""
    return {identity(cell.recipe) for entry in figures if entry.weights for cell in entry.runs(scale)}


def handle(label: str, **look: Any) -> Any:
    """An entry of a legend that is no curve of its own; gray where ``look`` has no color."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": "#555555", **look})


def last(run: Checkpoint | Point, column: str) -> float:
    """The last number of a column of the history; NaN if it has none."""
    return latest(run.history, column)


def test_error(run: Checkpoint) -> float:
    """Test error of w_a where it was last evaluated, in %."""
    return 100 * (1 - last(run, "test_accuracy"))


def late(rows: Rows, *by: str) -> Rows:
    """The rows in the second half of the steps: of each run, which the columns ``by`` tell apart, or all."""
    last = rows.groupby(list(by))["step"].transform("max") if by else rows["step"].max()
    return rows[rows["step"] > last / 2]


def printed(table: str) -> Rows:
    """The numbers of a paper, all as text: the rows of numbers/TABLE.csv, such as "table3_cifar10"."""
    import pandas as pd

    return pd.read_csv(Path(__file__).parent / "numbers" / f"{table}.csv", dtype=str, keep_default_na=False)


def summary(values: Iterable[float], form: str = ".2f") -> str:
    """ "3.09 (2.69 to 4.53)": median and range, or the one value there is."""
    finite = np.array([v for v in values if np.isfinite(v)])
    if not len(finite):
        return "–"
    if len(finite) == 1:
        return f"{finite[0]:{form}}"
    return f"{np.median(finite):{form}} ({finite.min():{form}} to {finite.max():{form}})"


def mean_and_spread(values: Sequence[float], form: str = ".2f") -> str:
    """ "2.43 ± 0.11": mean and sample standard deviation, or the one value there is."""
    values = list(values)
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "–"
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}}"


def compare_with_paper(
    rows: Rows, what: str, value: str, text: Callable[..., str] = summary, paper: str = "", **form: str
) -> list[Compared]:
    """``text`` of the column ``value`` for each setting that ``what`` names, in the order of the rows.

    Args:
        rows: of the figure.
        what: the words, with columns in braces, such as "test error of {algorithm} (%)".
        value: the column.
        text: :func:`summary` or ``mean_and_spread``.
        paper: the paper's number, the same for all settings.
        form: ``form`` of ``text``.
    """
    columns = [name for _, name, _, _ in string.Formatter().parse(what) if name]
    return [
        Compared(what.format(**dict(zip(columns, place, strict=True))), text(group[value], **form), paper)
        for place, group in rows.groupby(columns, sort=False, dropna=False)
    ]

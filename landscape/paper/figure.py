"""What a figure is: the runs it needs at each scale, and a drawing of their finished results."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.paper.context import Context, Point, Runs, Scale, identity
from landscape.paper.verdicts import Judge, Rows

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn
    from matplotlib.figure import Figure as Picture

SMOKE_NOTE = "bundled digits and a few steps; the numbers mean nothing"


@dataclass(frozen=True)
class Compared:
    """A number of ours and the paper's; ``paper`` is "" where the paper has none."""

    what: str
    ours: str
    paper: str = ""


@dataclass
class Drawing:
    """A finished figure: pictures by suffix ("" for the first), data, numbers, and a sentence about them.

    ``rows`` become the CSV; from the CSV alone follows the verdict on the claim.
    """

    pictures: dict[str, Picture]
    rows: Rows
    compared: list[Compared]
    conclusion: str


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper, by ``name``; ``where`` it is and what it ``claims``.

    ``notes`` says what each scale changes from the paper, and what is ours. ``judge`` gives the effects that
    the verdict on the claim rests on. ``weights`` says that weights are needed, ``partial`` that it can be
    drawn while some runs have not ended.
    """

    name: str
    where: str
    title: str
    claims: str
    notes: Mapping[Scale, str]
    runs: Callable[[Scale], Runs]
    judge: Judge
    draw: Callable[[Context], Drawing]
    weights: bool = False
    partial: bool = False

    def note(self, context: Context) -> str:
        """What the scale changes, and how many of the runs have not ended yet."""
        missing = sum(not context.ended(key) for key in context.runs)
        left = f"; {missing} of {len(context.runs)} runs have not ended yet" if missing else ""
        return " ".join(self.notes[context.scale].split()) + left


def figure(
    name: str,
    where: str,
    title: str,
    claims: str,
    runs: Callable[[Scale], Runs],
    judge: Judge,
    laptop: str,
    paper: str = "",
    smoke: str = SMOKE_NOTE,
    **more: Any,
) -> Callable[[Callable[[Context], Drawing]], Figure]:
    """A decorator: add the :class:`Figure` that the function draws to the registry, under ``name``.

    The function is called with matplotlib in the toolkit's style.

    Args:
        name: what ``landscape figures`` calls it.
        where: the paper and the figure, such as "DPSGD-2020, Figure 2(a)".
        title: what the figure shows.
        claims: what the paper claims.
        runs: gives the recipes of the runs at a scale.
        judge: gives the effects behind the verdict on the claim, from the rows of the CSV.
        laptop, paper, smoke: what each scale changes from the paper; ``paper`` is by default as ``laptop``.
        more: further fields of :class:`Figure`.
    """

    def add(draw: Callable[[Context], Drawing]) -> Figure:
        notes: dict[Scale, str] = {"smoke": smoke, "laptop": laptop, "paper": paper or laptop}
        entry = Figure(name, where, title, claims, notes, runs, judge, draw, **more)
        return registry.figures.add(name)(entry)

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
    entry: Figure = registry.figures[name]
    return entry


def with_weights(figures: Iterable[Figure], scale: Scale) -> set[str]:
    """The identities of the runs whose weights figures need."""
    return {identity(recipe) for entry in figures if entry.weights for recipe in entry.runs(scale).values()}


def handle(label: str, **look: Any) -> Any:
    """An entry of a legend that is no curve of its own; grey where ``look`` has no colour."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": "#555555", **look})


def last(run: Checkpoint | Point, column: str) -> float:
    """The last number of a column of the history; NaN if it has none."""
    values = run.history[column]
    recorded = values[np.isfinite(values)]
    return float(recorded[-1]) if len(recorded) else float("nan")


def test_error(run: Checkpoint) -> float:
    """Test error of w_a where it was last evaluated, in %."""
    return 100 * (1 - last(run, "test_accuracy"))


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
        text: :func:`summary` or :func:`mean_and_spread`.
        paper: the paper's number, the same for all settings.
        form: ``form`` of ``text``.
    """
    columns = [name for _, name, _, _ in string.Formatter().parse(what) if name]
    return [
        Compared(what.format(**dict(zip(columns, place, strict=True))), text(group[value], **form), paper)
        for place, group in rows.groupby(columns, sort=False, dropna=False)
    ]

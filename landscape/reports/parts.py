"""Parts of a page: sections with sentences, charts, tables and pictures."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from landscape.core.files import printable
from landscape.core.hdf5 import Array
from landscape.results.base import Result
from landscape.results.shown import Row

LINES = 8  # of a description, that are columns of a table (ours)
DIGITS = 6  # of a number in a chart: finer than a screen shows (ours)


@dataclass(frozen=True)
class Chart:
    """A chart that the page draws.

    Attributes:
        name: unique on the page.
        title: the heading above it, as plain text.
        alt: a sentence that says what it shows, for readers who do not see it.
        figure: the data and layout of Plotly; ``{"surface": k}`` for the contour of the page's surface k.
    """

    name: str
    title: str
    alt: str
    figure: dict[str, Any]

    @property
    def kind(self) -> str:
        """ "contour" for a surface that the page draws itself, else "figure"."""
        return "contour" if "surface" in self.figure else "figure"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the value by which rows are sorted."""

    text: str
    key: float | str = ""


@dataclass(frozen=True)
class Table:
    """A table whose rows can be sorted by each column."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A PNG picture and a sentence that says what it shows."""

    title: str
    alt: str
    png: bytes


@dataclass(frozen=True)
class Missing:
    """Something that is not in the files, and the command that makes it."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page. A table without rows is left out.

    Attributes:
        name: its anchor.
        widget: "", "scene" (the three-dimensional view) or "scrubber".
        linked: a group of charts with linked cursors; "" for none.
    """

    name: str
    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    missing: tuple[Missing, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()  # a title and a preformatted text each
    widget: str = ""
    linked: str = ""
    runs: bool = False  # whether the checkboxes of the runs stand above its charts

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", tuple(table for table in self.tables if table.rows))

    @property
    def shows(self) -> bool:
        """True if there is more in it than what is missing."""
        return bool(self.charts or self.tables or self.pictures or self.widget)


@dataclass(frozen=True)
class Page:
    """A whole page: its title, findings, sections, the data that its script draws, and what was run."""

    title: str
    findings: tuple[str, ...]
    sections: tuple[Section, ...]
    data: dict[str, Any] = field(default_factory=dict)
    ran: str = ""

    @property
    def first(self) -> Chart | None:
        """The chart beside the findings: the first contour, or else the first one."""
        charts = [chart for section in self.sections for chart in section.charts]
        return next((c for c in charts if c.kind == "contour"), charts[0] if charts else None)


def number(value: float, error: float = math.nan) -> Cell:
    """A number with its error, if it has one, as a cell: "0.123 ± 0.004"; "–" for NaN."""
    return _cell(Row("", value, error))


def labels_of(results: Sequence[Result], usual: str) -> list[str]:
    """The label of each result in one line, or ``usual`` and its place."""
    return [" ".join(getattr(r, "label", "").split()) or f"{usual} {k}" for k, r in enumerate(results)]


def described(caption: str, results: Sequence[Result], names: Sequence[str] = ()) -> Table:
    """A row for each result, and a column for each line of its description.

    Args:
        names: the lines that are shown; default: the first ones (the most important) of all results.
    """
    rows = [{row.name: row for row in result.describe()} for result in results]
    names = list(dict.fromkeys(name for row in rows for name in (names or list(row)[:LINES])))
    cells = tuple(
        (*text_cells(label), *(_cell(row.get(name)) for name in names))
        for label, row in zip(labels_of(results, "result"), rows, strict=True)
    )
    return Table(caption, ("of", *names), cells)


def _cell(row: Row | None) -> Cell:
    """A line of a description as a cell; "–" where a result has none, or a number that is unknown."""
    if row is None or row.value != row.value:
        return Cell("–", -math.inf)
    return Cell(row.number, row.value)


def text_cells(*texts: object) -> tuple[Cell, ...]:
    """Cells of texts, which are sorted as texts."""
    return tuple(Cell(str(text), str(text)) for text in texts)


def listed(values: Array | Sequence[float]) -> list[Any]:
    """Numbers as lists for JSON, to six digits, with None for those that are not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [listed(row) for row in array]
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in array.tolist()]


def trace(kind: str, name: str, **values: Any) -> dict[str, Any]:
    """A trace of Plotly; arrays among ``values`` become lists."""
    given = {key: listed(value) if isinstance(value, np.ndarray) else value for key, value in values.items()}
    return {"type": kind, "name": chart_text(name), **given}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis of Plotly with its title."""
    return {"title": {"text": title}, **more}


def chart_text(text: str) -> str:
    """``text`` in the form in which Plotly shows its characters unchanged: it reads some tags of HTML."""
    return html.escape(printable(text), quote=False)


def script_json(value: Any) -> str:
    """``value`` as JSON that can stand inside a script element: in ASCII, without <, > and &.

    Raises:
        ValueError: a number that is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text

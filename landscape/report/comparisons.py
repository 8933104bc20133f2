"""Comparisons of checkpoints or groups: their tables, with what each difference is worth."""

from __future__ import annotations

import dataclasses

import numpy as np

from landscape.plots.style import paper_name
from landscape.report.analyses import picture_of
from landscape.report.contents import Contents
from landscape.report.parts import Cell, Picture, Section, Table, text_cells
from landscape.results.comparison import Comparison, cell, footnotes, summary, verdict


def section(contents: Contents) -> Section:
    """A table and a picture for each comparison."""
    found = comparisons(contents)
    pictures = [picture_of("comparison", [c]) for c in found]
    return Section(
        "comparisons",
        "Comparison of minima",
        tuple(line for c in found for line in (f"{_heading(c)}.", *footnotes(c))),
        tables=tuple(_table(c) for c in found),
        pictures=tuple(p for p in pictures if isinstance(p, Picture)),
    )


def comparisons(contents: Contents) -> list[Comparison]:
    """The comparisons, with algorithms named as in the papers."""
    return [dataclasses.replace(c, sides=tuple(map(paper_name, c.sides))) for c, _ in contents.of(Comparison)]


def sentences(contents: Contents) -> list[str]:
    """By how many measures one side is flatter, for each pair of each comparison."""
    found = comparisons(contents)
    return [f"{line}{_setting(c)}." for c in found for line in summary(c)]


def _setting(c: Comparison) -> str:
    """What the sides are, after a comma."""
    at = f", at a training loss near {c.equal_loss:.3g} nat" if np.isfinite(c.equal_loss) else ""
    counts = np.bincount(c.side_of, minlength=len(c.sides))
    return f"{at}, over {' and '.join(map(str, counts))} seeds" if c.grouped else at


def _heading(c: Comparison) -> str:
    return f"{', '.join(c.sides)}{_setting(c)}"


def _table(c: Comparison) -> Table:
    rows = []
    for q, title in enumerate(c.titles):
        unit = f" ({c.unit_names[q]})" if c.unit_names[q] != "1" else ""
        values = [
            Cell(cell(c, q, s), float(np.nan_to_num(c.value[q, s], nan=-np.inf))) for s in range(len(c.sides))
        ]
        rows.append((*text_cells(f"{title}{unit}"), *values, *text_cells(c.over[q] or "–", verdict(c, q))))
    columns = ("quantity", *c.sides, "standard error over", "difference")
    return Table(_heading(c), columns, tuple(rows))

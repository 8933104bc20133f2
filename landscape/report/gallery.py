"""The gallery of the papers' figures as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.core.files import read_regular
from landscape.paper import gallery
from landscape.report.parts import Cell, Page, Picture, Section, Table, text_cells

MAX_BYTES = 1 << 26  # of a picture that is read (ours)


def figures_page(folder: Path) -> Page:
    """The page about the figures that ``landscape figures`` wrote to ``folder``.

    Raises:
        FailedError: a damaged file, or a picture that cannot be read.
    """
    entries = gallery.entries_in(folder)
    number = f"{len(entries)} figures and tables of the papers."
    said = [number, gallery.counted(entries), gallery.RULES]
    if any(not entry["outcome"] for entry in entries.values()):
        said.append(gallery.NO_CONCLUSION)
    rows = tuple(_verdict(name, entry) for name, entry in entries.items())
    heads = ("claim", "where tested", "outcome", "effect, with its interval")
    verdicts = Section("verdicts", "The claims", (), tables=(Table("Claims and verdicts", heads, rows),))
    sections = (verdicts, *(_section(name, entry, folder) for name, entry in entries.items()))
    return Page("The figures and tables of the papers", tuple(filter(None, said)), sections)


def _verdict(name: str, entry: dict[str, Any]) -> tuple[Cell, ...]:
    where = f"{entry['scale']}: {entry['note']}"
    return text_cells(f"{name}: {entry['claims']}", where, entry["outcome"] or "–", gallery.sizes(entry))


def _section(name: str, entry: dict[str, Any], folder: Path) -> Section:
    verdict = f"The claim: {entry['outcome']}. {entry['verdict']}" if entry["outcome"] else entry["verdict"]
    pictures = tuple(
        Picture(
            f"{entry['where']}: {entry['title']}",
            f"{entry['title']}. {verdict}",
            read_regular(folder / Path(picture).name, MAX_BYTES),
        )
        for picture in entry["pictures"]
    )
    effects = tuple(text_cells(*gallery.effect_cells(effect)) for effect in entry["effects"])
    rows = tuple(text_cells(e["what"], e["ours"], e["paper"]) for e in entry["compared"])
    tables = (
        Table("What the verdict rests on", ("where", "effect", "seeds", "the claim"), effects),
        Table("Here and in the paper", ("what", "here", "paper"), rows),
    )
    return Section(
        name,
        f"{entry['where']}: {entry['title']}",
        (entry["claims"], verdict, gallery.made(entry).replace("`", "")),
        tables=tuple(table for table in tables if table.rows),
        pictures=pictures,
    )

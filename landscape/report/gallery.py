"""The gallery of the papers' figures as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.core.files import read_regular
from landscape.paper import gallery
from landscape.report.parts import Page, Picture, Section, Table, text_cells

MAX_BYTES = 1 << 26  # of a picture that is read (ours)


def figures_page(folder: Path) -> Page:
    """The page about the figures that ``landscape figures`` wrote to ``folder``.

    Raises:
        FailedError: a damaged file, or a picture that cannot be read.
    """
    entries = gallery.entries_in(folder)
    judged = [entry["held"] for entry in entries.values() if entry["scale"] != "smoke"]
    said = [
        f"{len(entries)} figures and tables of the papers; of {len(judged)} claims that runs of this scale "
        f"can judge, {judged.count(True)} hold, {judged.count(False)} do not, and of {judged.count(None)} "
        "nothing can be said."
    ]
    if len(judged) < len(entries):
        said.append(gallery.NO_CONCLUSION)
    sections = tuple(_section(name, entry, folder) for name, entry in entries.items())
    return Page("The figures and tables of the papers", tuple(said), sections)


def _section(name: str, entry: dict[str, Any], folder: Path) -> Section:
    smoke = entry["scale"] == "smoke"
    verdict = (
        entry["verdict"] if smoke else f"The claim {gallery.claim_text(entry['held'])}. {entry['verdict']}"
    )
    made = f"Scale {entry['scale']}: {' '.join(entry['note'].split())}. Made by {entry['command']} in "
    pictures = tuple(
        Picture(
            f"{entry['where']}: {entry['title']}",
            f"{entry['title']}. {verdict}",
            read_regular(folder / Path(picture).name, MAX_BYTES),
        )
        for picture in entry["pictures"]
    )
    rows = tuple(text_cells(e["what"], e["ours"], e["paper"]) for e in entry["compared"])
    return Section(
        name,
        f"{entry['where']}: {entry['title']}",
        (entry["claims"], verdict, f"{made}{gallery.duration(entry['seconds'])}."),
        tables=(Table("Here and in the paper", ("what", "here", "paper"), rows),) if rows else (),
        pictures=pictures,
    )

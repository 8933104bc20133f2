"""The files of a finished figure: pictures, data, and its verdict."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

from PIL import Image

from landscape._version import __version__
from landscape.core.errors import FailedError
from landscape.core.files import read_regular, write_text
from landscape.paper.figure import Drawing, Work, get, names
from landscape.paper.verdicts import judged, outcome, rows_of, table

# Colours a picture keeps: what a palette of 8 bits holds. A picture is a third of its size so.
COLORS = 256
NO_CONCLUSION = "Smoke scale shows that the figure can be made; its numbers say nothing about the claim."
# Of the JSON or CSV file of a figure: the largest size that is read, in bytes, and the keys that the page
# needs.
MAX_BYTES = 1 << 24
TEXTS = ("where", "title", "claims", "scale", "note", "command", "version", "verdict")
COMPARED = ("what", "ours", "paper")


def make(work: Work, folder: Path) -> tuple[Drawing, list[Path]]:
    """Draw ``work``, whose runs have ended, and write its files to ``folder``; gives the pictures' paths."""
    drawing = get(work.figure.name).draw(work)
    if work.scale == "smoke":
        drawing.conclusion = NO_CONCLUSION
    records = [work.cache.record(recipe) for recipe in work.runs.values()]
    trained = sum(record.seconds for record in records if record)
    return drawing, write(work, drawing, folder, trained + work.seconds)


def write(work: Work, drawing: Drawing, folder: Path, took: float) -> list[Path]:
    """Write NAME.png (and NAME-….png), NAME.csv and NAME.json to ``folder``; returns the pictures.

    ``took``: seconds of training and analysis behind the figure, including those that other figures share.
    """
    from landscape import plots  # and matplotlib: only where something is drawn

    name = work.figure.name
    folder.mkdir(parents=True, exist_ok=True)
    head(work, drawing)
    pictures = []
    for suffix, picture in drawing.pictures.items():
        path = folder / f"{name}{suffix}.png"
        plots.save_figure(picture, path)
        _shrink(path)
        pictures.append(path)
    data = table(drawing.rows)
    write_text(folder / f"{name}.csv", data)
    entry = {
        "where": work.figure.where,
        "title": work.figure.title,
        "claims": work.figure.claims,
        "scale": work.scale,
        "note": " ".join(work.figure.notes[work.scale].split()) + work.unfinished,
        "command": f"landscape figures {name} --scale {work.scale}",
        "seconds": round(took, 1),
        "version": __version__,
        "numerics": dict(sorted(work.versions.items())),
        "pictures": [path.name for path in pictures],
        "compared": [dataclasses.asdict(entry) for entry in drawing.compared],
        "verdict": drawing.conclusion,
    }
    _write_entry(folder / f"{name}.json", entry | verdict(name, work.scale, data))
    return pictures


def _write_entry(path: Path, entry: dict[str, Any]) -> None:
    write_text(path, json.dumps(entry, ensure_ascii=False, indent=1) + "\n")


def verdict(name: str, scale: str, data: str) -> dict[str, Any]:
    """{"outcome", "effects"} of the figure ``name`` from the text of its CSV; empty at smoke scale."""
    if scale == "smoke":
        return {"outcome": "", "effects": []}
    effects = judged(get(name).judge, rows_of(data))
    return {"outcome": outcome(effects), "effects": [effect.entry() for effect in effects]}


def head(work: Work, drawing: Drawing) -> None:
    """Give the first picture the conclusion as its title, and each one a caption that begins with the figure.

    At smoke scale there is no conclusion, and the picture keeps its title.
    """
    from landscape.plots.picture import Picture, caption
    from landscape.plots.style import style

    with style():
        for suffix, picture in drawing.pictures.items():
            if not suffix and work.scale != "smoke":
                picture.suptitle(first_sentence(drawing.conclusion))
            elif not picture.get_suptitle():
                picture.suptitle(work.figure.title)
            own = picture.get_caption() if isinstance(picture, Picture) else ""
            caption(picture, f"{work.about} {own}".strip())


def first_sentence(text: str) -> str:
    """The beginning of ``text`` up to a full stop, colon or semicolon that ends 40 characters or more (ours).

    Example:
        >>> first_sentence("The largest of the batches is the worst one: 3 of 4. More.")
        'The largest of the batches is the worst one'
    """
    ends = [match.start() for match in re.finditer(r"[.;:] |\.$", text)]
    return text[: next((end for end in ends if end >= 40), len(text))].rstrip(".")


def _shrink(path: Path) -> None:
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    path.write_bytes(buffer.getvalue())


def entries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of the figures' JSON files in ``folder``, by name, in the order of ``landscape figures``.

    The verdicts are computed from the CSV files, so that those of older versions are graded alike.

    Raises:
        FailedError: a damaged or missing file.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name in names():
        path = folder / f"{name}.json"
        if path.exists():
            try:
                entry = json.loads(read_regular(path, MAX_BYTES).decode())
                _check(entry)
                path = path.with_suffix(".csv")
                data = read_regular(path, MAX_BYTES).decode()
                entries[name] = entry | verdict(name, entry["scale"], data)
            except (
                ArithmeticError,
                AttributeError,
                LookupError,
                TypeError,
                ValueError,
                RecursionError,
            ) as error:
                if isinstance(error, FailedError):
                    raise
                raise FailedError(f"{path}: damaged ({error}); make the figure again") from error
    return entries


def _check(entry: Any) -> None:
    """One of several kinds of error where ``entry`` is not what the JSON file of a figure holds."""
    for key in TEXTS:
        if not isinstance(entry[key], str):
            raise TypeError(f"'{key}' is no text")
    if not isinstance(entry["seconds"], (int, float)) or not 0 <= entry["seconds"] < 1e12:
        raise ValueError("'seconds' is no time")
    texts = [*entry["pictures"], *(each[key] for each in entry["compared"] for key in COMPARED)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("'pictures' or 'compared' hold what is no text")
    if not all(isinstance(version, int) for version in entry.get("numerics", {}).values()):
        raise TypeError("'numerics' holds what is no version")


def rejudge(folder: Path) -> None:
    """Write the verdicts that follow from the CSV files in ``folder`` to the JSON files beside them."""
    for name, entry in entries_in(folder).items():
        entry.pop("held", None)  # the verdict of versions before 0.13.0
        path = folder / f"{name}.json"
        if json.loads(path.read_text(encoding="utf-8")) != entry:
            _write_entry(path, entry)


def duration(seconds: float) -> str:
    """Seconds below 100, else hours and minutes: "42 s", "27 min", "4 h 10 min"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"

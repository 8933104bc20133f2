"""The files of a finished figure: pictures, data, and a page that shows all figures."""

from __future__ import annotations

import csv
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

# Colours a picture keeps: what a palette of 8 bits holds. A picture is a third of its size so.
COLORS = 256
NO_CONCLUSION = "Smoke scale shows that the figure can be made; its numbers say nothing about the claim."
# Of the JSON file of a figure: the largest size that is read, in bytes, and the keys that the page needs.
MAX_BYTES = 1 << 24
KEYS = (
    "where", "title", "claims", "scale", "note", "command", "seconds", "pictures", "compared", "verdict",
    "held",
)  # fmt: skip


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
    write_text(folder / f"{name}.csv", table(drawing.rows))
    entry = {
        "where": work.figure.where,
        "title": work.figure.title,
        "claims": work.figure.claims,
        "scale": work.scale,
        "note": work.figure.notes[work.scale],
        "command": f"landscape figures {name} --scale {work.scale}",
        "seconds": round(took, 1),
        "version": __version__,
        "pictures": [path.name for path in pictures],
        "compared": [dataclasses.asdict(entry) for entry in drawing.compared],
        "verdict": drawing.conclusion,
        "held": drawing.claim_holds,
    }
    write_text(folder / f"{name}.json", json.dumps(entry, ensure_ascii=False, indent=1) + "\n")
    return pictures


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


def table(rows: list[dict[str, Any]]) -> str:
    """``rows`` as CSV; numbers to 6 digits."""
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return buffer.getvalue()


def entries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of the figures' JSON files in ``folder``, by name, in the order of ``landscape figures``.

    Raises:
        FailedError: a damaged file.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name in names():
        path = folder / f"{name}.json"
        if path.exists():
            try:
                entries[name] = json.loads(read_regular(path, MAX_BYTES).decode())
                missing = [key for key in KEYS if key not in entries[name]]
                if missing:
                    raise ValueError(f"it has no '{missing[0]}'")
            except (TypeError, ValueError, RecursionError) as error:
                if isinstance(error, FailedError):
                    raise
                raise FailedError(f"{path}: damaged ({error}); make the figure again") from error
    return entries


def page(folder: Path) -> Path:
    """Write README.md: every figure that ``folder`` holds, in the order of ``landscape figures``."""
    entries = entries_in(folder)
    lines = [
        "# The figures and tables of the papers",
        "",
        "Made by `landscape figures` and not edited by hand; `make figures` makes them again. The papers: "
        "DPSGD-2020 is *Why Does Decentralized Training Outperform Synchronous Training in the Large Batch "
        "Setting?*, DPSGD-2021 *Loss Landscape Dependent Self-Adjusting Learning Rates in Decentralized "
        "SGD*, LocalSGD-2021 *Trade-offs of Local SGD at Scale*, Delay-2019 *At Stability's Edge*. The time "
        "is the sum over runs and analyses as each was measured, those that figures share counted in each; "
        "on two cores, `--jobs 2` takes about half. A conclusion applies to the runs made here, which at "
        "laptop scale are often smaller than those of the paper's claim.",
        "",
        "| figure | what | scale | claim |",
        "|---|---|---|---|",
    ]
    for name, entry in entries.items():
        what = f"{entry['where']}: {entry['title']}"
        claim = "–" if entry["scale"] == "smoke" else claim_text(entry["held"])
        lines.append(f"| [{name}](#{name}) | {what} | {entry['scale']} | {claim} |")
    for name, entry in entries.items():
        lines += ["", f"## {name}", "", f"**{entry['where']}: {entry['title']}.** {entry['claims']}", ""]
        lines += [f"![{entry['title']}]({picture})" for picture in entry["pictures"]]
        note = " ".join(entry["note"].split())
        lines += [
            "",
            f"Scale {entry['scale']}: {note}. `{entry['command']}`, {duration(entry['seconds'])}; data in "
            f"[{name}.csv]({name}.csv).",
            "",
            entry["verdict"]
            if entry["scale"] == "smoke"
            else f"**{claim_text(entry['held']).capitalize()}.** {entry['verdict']}",
        ]
        if entry["compared"]:
            lines += ["", "| | here | paper |", "|---|---|---|"]
            lines += [
                f"| {_cell(e['what'])} | {_cell(e['ours'])} | {_cell(e['paper'])} |"
                for e in entry["compared"]
            ]
    path = folder / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def claim_text(holds: bool | None) -> str:
    return {True: "holds", False: "does not hold", None: "cannot be said"}[holds]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def duration(seconds: float) -> str:
    """Seconds below 100, else hours and minutes: "42 s", "27 min", "4 h 10 min"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def make(work: Work, folder: Path) -> tuple[Drawing, list[Path]]:
    """Draw ``work``, whose runs have ended, and write its files to ``folder``."""
    drawing = get(work.figure.name).draw(work)
    if work.scale == "smoke":
        drawing.conclusion, drawing.claim_holds = NO_CONCLUSION, None
    trained = sum(float(_last(work.end(key).history["wall_s"])) for key in work.runs)
    return drawing, write(work, drawing, folder, trained + work.seconds)


def _last(column: Any) -> float:
    return float(column[-1]) if len(column) else 0.0

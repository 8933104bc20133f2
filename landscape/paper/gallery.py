"""The files of a finished figure, its verdict, and the page that shows all figures."""

from __future__ import annotations

import dataclasses
import html
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from landscape._version import __version__
from landscape.core.errors import OperationError
from landscape.core.files import read_regular, write_text
from landscape.paper.context import Context, OutOfTimeError, WeightsNeededError
from landscape.paper.figure import Drawing, Figure, declared, get, names
from landscape.paper.verdicts import (
    CONFIDENCE,
    OUTCOMES,
    SEEDS,
    SHOWN,
    finding,
    judged,
    outcome,
    rows_of,
    table,
)

# Colors a picture keeps, what a palette of 8 bits holds, and rounds that move each to the mean of the colors
# that it stands for (our choice). A picture is a third of its size so.
COLORS, KMEANS = 256, 3
# Of the JSON or CSV file of a figure: the largest size that is read, in bytes.
MAX_BYTES = 1 << 24
COMPARED = ("what", "ours", "paper")
# What reading a damaged file raises.
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


def words(name: str) -> str:
    """The text page.NAME of figures.toml."""
    text: str = declared()["page"][name]
    return text.format(confidence=CONFIDENCE, seeds=SEEDS)


def draw(figure: Figure, context: Context, folder: Path) -> tuple[str, list[Path]]:
    """Draw a figure from its runs, if all have ended or it can be drawn from some, and write its files.

    A run whose weights an analysis needs, and that is known by its record alone, is made again.

    Returns:
        The verdict in words, and the paths of its pictures in ``folder``.

    Raises:
        OutOfTimeError: the budget is used before all is there that it needs.
        OperationError: a run or a file could not be made.
    """
    from landscape.plots.style import style  # and matplotlib: only where something is drawn

    ended = [record for cell in context.cells if (record := context.record(cell.recipe))]
    if len(ended) < len(context.cells) and not (figure.partial and ended):
        context.pack(complete=False)
        raise OutOfTimeError
    while True:
        context = context.of(context.cells)
        try:
            with style():
                drawing = figure.draw(context)
        except WeightsNeededError as needed:
            context.check_time()
            context.train([needed.recipe])
            continue
        except OutOfTimeError:
            context.pack(complete=False)
            raise
        context.pack(complete=True)
        took = sum(record.seconds for record in ended) + context.seconds
        return write(figure, context, drawing, folder, took)


def write(
    figure: Figure, context: Context, drawing: Drawing, folder: Path, took: float
) -> tuple[str, list[Path]]:
    """Write NAME.png (and NAME-….png), NAME.csv and NAME.json to ``folder``; returns as :func:`draw`.

    ``took``: seconds of training and analysis behind the figure, including those that other figures share.
    """
    from landscape import plots  # and matplotlib: only where something is drawn

    name, scale, data = figure.name, context.scale, table(drawing.rows)
    found = verdict(name, scale, data, drawing.remark)
    folder.mkdir(parents=True, exist_ok=True)
    head(figure, context, drawing, found["finding"])
    pictures = [folder / f"{name}{suffix}.png" for suffix in drawing.pictures]
    for path, picture in zip(pictures, drawing.pictures.values(), strict=True):
        plots.save_figure(picture, path)
        _shrink(path)
    write_text(folder / f"{name}.csv", data)
    entry = {
        **{key: getattr(figure, key) for key in ("where", "title", "claims")},
        "scale": scale,
        "note": figure.note(context),
        "command": f"landscape figures {name} --scale {scale}",
        "seconds": round(took, 1),
        "version": __version__,
        "numerics": dict(sorted(context.versions.items())),
        "pictures": [path.name for path in pictures],
        "compared": [dataclasses.asdict(entry) for entry in drawing.compared],
        "remark": drawing.remark,
    }
    _write_entry(folder / f"{name}.json", entry | found)
    return found["verdict"], pictures


def _write_entry(path: Path, entry: dict[str, Any]) -> None:
    """Write the JSON file of a figure, if it does not hold this already."""
    text = json.dumps(entry, ensure_ascii=False, indent=1) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def verdict(name: str, scale: str, data: str, remark: str = "") -> dict[str, Any]:
    """The verdict on the claim of the figure ``name`` from the text of its CSV; none at smoke scale.

    Returns:
        {"outcome", "effects", "finding", "verdict"}: the grade, what it rests on, a title, and a sentence.
    """
    if scale == "smoke":
        return {"outcome": "", "effects": [], "finding": "", "verdict": words("smoke")}
    figure = get(name)
    effects = judged(figure.judge, rows_of(data))
    title = finding(effects, figure.finding)
    said = {"outcome": outcome(effects), "effects": [effect.entry() for effect in effects], "finding": title}
    return said | {"verdict": " ".join(f"{title}. {remark}".split())}


def head(figure: Figure, context: Context, drawing: Drawing, title: str) -> None:
    """Give the first picture the finding as its title, and each one a caption that begins with the figure."""
    from landscape.plots.picture import Picture, caption
    from landscape.plots.style import style

    about = f"{figure.where}: {figure.title}. {context.scale.capitalize()} scale: {figure.note(context)}."
    with style():
        for suffix, picture in drawing.pictures.items():
            if title and not suffix:
                picture.suptitle(title)
            elif not picture.get_suptitle():
                picture.suptitle(figure.title)
            own = picture.get_caption() if isinstance(picture, Picture) else ""
            caption(picture, f"{about} {own}".strip())


def _shrink(path: Path) -> None:
    with Image.open(path) as picture:
        # Median cut, the default, gives thin lines the color of others: SSGD's that of the orange line.
        # Without KMEANS the pale colors of a contour become gray.
        method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
        small = picture.convert("RGB").quantize(COLORS, method=method, kmeans=KMEANS, dither=dither)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    path.write_bytes(buffer.getvalue())


def entries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The contents of the figures' JSON files in ``folder``, by name, in the order of ``landscape figures``.

    The verdicts are computed from the CSV files, so that all are graded alike.

    Raises:
        OperationError: a damaged or missing file.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name in names():
        path = folder / f"{name}.json"
        if path.exists():
            try:
                entry = json.loads(read_regular(path, MAX_BYTES).decode())
                # What the page cannot show is damaged; the verdict does not stand in this file.
                shown = entry | verdict(name, "smoke", "")
                overview({name: shown})
                _section(name, shown)
                path = path.with_suffix(".csv")
                data = read_regular(path, MAX_BYTES).decode()
                entries[name] = entry | verdict(name, entry["scale"], data, entry.get("remark", ""))
            except OperationError:
                raise
            except DAMAGED as error:
                said = " ".join(str(error).split())
                raise OperationError(f"{path}: damaged ({said}); make the figure again") from error
    return entries


def duration(seconds: float) -> str:
    """Seconds below 100, else hours and minutes: "42 s", "27 min", "4 h 10 min"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def page(folder: Path) -> Path:
    """Write README.md: every figure that ``folder`` holds, in the order of ``landscape figures``.

    The verdicts in the JSON files are brought up to date with their CSV files.

    Raises:
        OperationError: a damaged file.
    """
    entries = entries_in(folder)
    for name, entry in entries.items():
        _write_entry(folder / f"{name}.json", entry)
    lines = ["# The figures and tables of the papers", "", words("introduction"), "", counted(entries), ""]
    lines += ["## What we found about these papers", "", found(entries), ""]
    lines += ["## The claims", "", words("rules"), "", *overview(entries), "", words("times")]
    for name, entry in entries.items():
        lines += _section(name, entry)
    path = folder / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def found(entries: dict[str, dict[str, Any]]) -> str:
    """Our findings about the papers: the sentences of figures.toml whose figures have these outcomes."""
    outcomes = {name: entry["outcome"] for name, entry in entries.items()}
    every = declared()["findings"]
    return " ".join(each["text"] for each in every if each["rests"].items() <= outcomes.items())


def overview(entries: dict[str, dict[str, Any]], folder: str = "") -> list[str]:
    """The lines of a table of all claims: a small picture, which lies in ``folder``, and the verdict."""
    lines = ["| | claim | where tested | outcome | effect, with its interval |", "|---|---|---|---|---|"]
    for name, entry in entries.items():
        alt = html.escape(entry["title"])
        small = "".join(f'<img src="{folder}{p}" width="240" alt="{alt}">' for p in entry["pictures"][:1])
        claim = f"{name if folder else f'[{name}](#{name})'}, {entry['where']}: {entry['claims']}"
        where, said = f"{entry['scale']}: {entry['note']}", f"**{entry['outcome'] or '–'}**"
        lines.append(_line(small, claim, where, said, sizes(entry)))
    return lines


def counted(entries: dict[str, dict[str, Any]]) -> str:
    """The number of claims with each outcome, in words."""
    found = [entry["outcome"] for entry in entries.values() if entry["outcome"]]
    counts = ", ".join(f"{outcome}: {found.count(outcome)}" for outcome in OUTCOMES)
    return f"The {len(found)} claims with runs of more than smoke scale: {counts}." if found else ""


def sizes(entry: dict[str, Any]) -> str:
    """The effects of a claim in a few words: where it holds, where not, and how many are open.

    Where all are open, those with the reasons.
    """
    parts = []
    for holds, words in ((True, "as claimed"), (False, "not")):
        found = [f"{_joined(e)}: {e['text']}" for e in entry["effects"] if e["holds"] is holds]
        parts += [f"{words}: {_first(found)}"] if found else []
    left = [effect for effect in entry["effects"] if effect["holds"] is None]
    if not parts:
        reasons = dict.fromkeys(e["reason"] for e in left if not e["seeds"])
        measured = [f"{_joined(e)}: {e['text']} ({e['reason']})" for e in left if e["seeds"]]
        return "; ".join([*reasons, *([_first(measured)] if measured else [])])
    if left:
        parts.append(f"open: {len(left)} of {len(entry['effects'])}")
    return ". ".join(parts)


def _first(texts: list[str]) -> str:
    """The first of ``texts``, and how many more the section of the figure has."""
    more = [f"{len(texts) - SHOWN} more below"] if len(texts) > SHOWN else []
    return "; ".join([*texts[:SHOWN], *more])


def _joined(effect: dict[str, Any]) -> str:
    return ", ".join(part for part in (effect["where"], effect["what"]) if part)


def effect_cells(effect: dict[str, Any]) -> tuple[str, str, str, str]:
    """(where, effect with its interval, seeds, whether it is as claimed) of an entry in the JSON file."""
    claimed = {True: "as claimed", False: "not as claimed", None: f"open: {effect['reason']}"}
    least, most = effect["least"], effect["most"]
    border = "" if (least, most) == (0, None) else f" (claimed: {_between(least, most)})"
    text = f"{effect['what']}: {effect['text']}{border}" if effect["what"] else effect["text"]
    return effect["where"], text, str(effect["seeds"] or "–"), claimed[effect["holds"]]


def _between(least: float | None, most: float | None) -> str:
    """An open interval in words; None: no border."""
    if least is None or most is None:
        return f"above {least:.3g}" if most is None else f"below {most:.3g}"
    return f"{least:.3g} to {most:.3g}"


def _section(name: str, entry: dict[str, Any]) -> list[str]:
    lines = ["", f"## {name}", "", f"**{entry['where']}: {entry['title']}.** {entry['claims']}", ""]
    lines += [f"![{entry['title']}]({picture})" for picture in entry["pictures"]]
    lines += ["", f"{made(entry)} Data in [{name}.csv]({name}.csv).", ""]
    said = f"**{entry['outcome'].capitalize()}.** " if entry["outcome"] else ""
    lines.append(f"{said}{entry['verdict']}")
    if text := get(name).found.get(entry["outcome"]):
        lines += ["", f"What we found: {text}"]
    if entry["effects"]:
        lines += ["", "| where | effect | seeds | |", "|---|---|---|---|"]
        lines += [_line(*effect_cells(effect)) for effect in entry["effects"]]
    if entry["compared"]:
        lines += ["", "| | here | paper |", "|---|---|---|"]
        lines += [_line(*(each[key] for key in COMPARED)) for each in entry["compared"]]
    return lines


def made(entry: dict[str, Any]) -> str:
    """The settings, the command and the version of the code that made a figure, in one or two sentences."""
    numerics = ", ".join(f"{key} {value}" for key, value in entry.get("numerics", {}).items())
    versions = f"version {entry['version']}" + (f", numerics: {numerics}" if numerics else "")
    return (
        f"Scale {entry['scale']}: {' '.join(entry['note'].split()).rstrip('.')}. `{entry['command']}`, "
        f"{duration(entry['seconds'])}; drawn by {versions}."
    )


def _line(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

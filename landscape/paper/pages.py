"""The files of a finished figure, its verdict, and the pages that show all figures."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from landscape.core.errors import OperationError
from landscape.core.files import read_regular, write_text
from landscape.paper.context import Context, OutOfTimeError, WeightsNeededError
from landscape.paper.figure import Drawing, Figure, figures_toml, get, names
from landscape.paper.verdicts import CONFIDENCE, OUTCOMES, SEEDS, counted, judged, outcome, rows_of, table

# Colors a picture keeps, what a palette of 8 bits holds, and rounds that move each to the mean of the colors
# that it stands for (our choice). A picture is a third of its size so.
COLORS, KMEANS = 256, 3
# Of the JSON or CSV file of a figure: the largest size that is read, in bytes.
MAX_BYTES = 1 << 24
# Heads of the table of claims; columns of the numbers beside the paper's, and their heads.
CLAIMS = ("figure", "claim", "outcome", "one effect, with its interval")
COMPARED = {"what": "", "ours": "here", "paper": "paper"}
# Commands of formulas -> their letters in figures.toml.
LETTERS = {"alpha": "α", "Delta": "Δ", "eta": "η", "lambda": "λ", "omega": "ω"}
# What reading a damaged file raises.
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


def words(name: str) -> str:
    """Return the text page.NAME of figures.toml."""
    text: str = figures_toml()["page"][name]
    return text.format(confidence=CONFIDENCE, seeds=SEEDS)


def explanations(text: str) -> list[str]:
    """Return explanations, from figures.toml, of the words in ``text`` that it does not explain itself."""
    plain = re.sub(r"\\([A-Za-z]+)", lambda command: LETTERS.get(command[1], ""), text)
    plain = re.sub("[${}]", "", plain)
    entries = [words for pattern, words in figures_toml()["words"].items() if re.search(pattern, plain)]
    return [words for words in entries if f"{words.partition(':')[0]}:" not in plain]


def draw(figure: Figure, context: Context, folder: Path) -> tuple[str, list[Path]]:
    """Draw a figure, and write its files to ``folder``.

    All runs must have ended; for a figure with the key ``partial``, at least one. If an analysis needs the
    weights of a run of which only the record is stored, the run is trained again.

    Returns:
        The verdict in words, and the paths of the pictures.

    Raises:
        OutOfTimeError: a run that the figure needs has not ended, or the time budget is used up before all
            analyses are made.
        OperationError: a run or a file could not be made.
    """
    from landscape.plots.style import style  # here, because it imports matplotlib, which only drawing needs

    all_records = [context.record(cell.recipe) for cell in context.cells]
    records = [record for record in all_records if record]
    all_ended = len(records) == len(all_records)
    if not all_ended and not (figure.partial and records):
        context.pack(complete=False)  # finished runs and analyses go into the archives of the figure
        raise OutOfTimeError  # the caller trains all runs first, so the time did not suffice
    while True:  # each attempt to draw ends with the return, an error, or the training of a run that it needs
        context = context.of(context.cells)  # a new one, without the analyses of the attempt before
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
        seconds = sum(record.seconds for record in records) + context.seconds
        return write(figure, context, drawing, folder, seconds)


def write(
    figure: Figure, context: Context, drawing: Drawing, folder: Path, seconds: float
) -> tuple[str, list[Path]]:
    """Write the pictures NAME.png and NAME-….png, and NAME.csv and NAME.json, to ``folder``.

    Args:
        seconds: seconds of all training and analyses that the figure needs, even if other figures share them.

    Returns:
        The verdict in words, and the paths of the pictures.
    """
    from landscape import plots  # here, because it imports matplotlib, which only drawing needs

    name, scale, csv_text = figure.name, context.scale, table(drawing.rows)
    judgment = verdict(name, scale, csv_text, drawing.remark)
    folder.mkdir(parents=True, exist_ok=True)
    # The effects are the tests of the claim. Their answers select a text of the table "results" of
    # figures.toml. A line "-PICTURE: TITLE" of this text has the title of NAME-PICTURE.png.
    title_lines = [line for line in _result_lines(name, scale, judgment["effects"]) if line.startswith("-")]
    titles = {"": judgment["finding"], **dict(line.split(": ", maxsplit=1) for line in title_lines)}
    picture_text = set_titles_and_captions(figure, context, drawing, titles)
    pictures = [folder / f"{name}{suffix}.png" for suffix in drawing.pictures]
    for path, picture in zip(pictures, drawing.pictures.values(), strict=True):
        plots.save_figure(picture, path)
        _reduce_colors(path)
    write_text(folder / f"{name}.csv", csv_text)
    entry = {
        **{key: getattr(figure, key) for key in ("where", "title", "claims")},
        "scale": scale,
        "note": figure.note(context),
        "command": f"landscape figures {name} --scale {scale}",
        "seconds": round(seconds, 1),
        # Name of a numerical function, or "training" -> version number.
        "numerics": dict(sorted(context.versions.items())),
        "pictures": [path.name for path in pictures],
        "words": explanations(picture_text),  # of the terms that occur in the pictures
        "compared": [dataclasses.asdict(compared) for compared in drawing.compared],
        "remark": drawing.remark,
    }
    _write_entry(folder / f"{name}.json", entry | judgment)
    return judgment["verdict"], pictures


def _write_entry(path: Path, entry: dict[str, Any]) -> None:
    """Write the JSON file of a figure, if it does not hold this already."""
    text = json.dumps(entry, ensure_ascii=False, indent=1) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def verdict(name: str, scale: str, data: str, remark: str = "") -> dict[str, Any]:
    """Return the verdict on the claim of the figure ``name`` from the text of its CSV; none at smoke scale.

    Returns:
        {"outcome", "counts", "effects", "finding", "verdict"}: the grade, the number of tests with each
        answer, the tests, the title of a picture, and a sentence.
    """
    if scale == "smoke":
        return {"outcome": "", "counts": "", "effects": [], "finding": "", "verdict": words("smoke")}
    figure = get(name)
    effects = judged(figure.judge, rows_of(data))
    grade, counts = outcome(effects), counted(effects)
    parts: dict[str, Any] = {"outcome": grade, "counts": counts, "effects": [e.entry() for e in effects]}
    result, _ = result_of(name, scale, parts["effects"])
    title = figure.finding if grade == "holds" else result.rstrip(".")
    parts["finding"] = title or f"{figure.title[0].upper()}{figure.title[1:]}: {counts}"
    sentence = ": ".join(filter(None, (graded(parts), result.rstrip(".") or title)))
    return parts | {"verdict": f"{sentence}. {remark}".strip()}


def graded(entry: dict[str, Any]) -> str:
    """Return "Holds in part (3 of 4 as claimed, 1 open)": the grade, and on how many tests it rests."""
    grade = entry["outcome"] or "smoke"
    return grade.capitalize() + (f" ({entry['counts']})" if grade not in ("holds", "smoke") else "")


def result_of(name: str, scale: str, effects: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return what came out of a figure, a sentence and details; "" where figures.toml says nothing of it."""
    sentence, *more = _result_lines(name, scale, effects)
    return sentence, " ".join(line for line in more if not line.startswith("-"))


def _result_lines(name: str, scale: str, effects: Sequence[dict[str, Any]]) -> list[str]:
    answers = "".join(effect["answer"][0] for effect in effects)
    return (get(name).results.get(answers, "") if scale == "laptop" else "").rstrip("\n").split("\n")


def set_titles_and_captions(
    figure: Figure, context: Context, drawing: Drawing, titles: Mapping[str, str]
) -> str:
    """Set the titles and the captions of the pictures of ``drawing``.

    A caption begins with ``where`` and ``title`` of the figure and with the scale, such as "DPSGD-2020,
    Figure 1, laptop scale: TITLE.". The caption with which the picture was drawn follows, and the caption in
    figures.toml.

    Args:
        titles: titles by suffix of the picture. A picture that has none here keeps the title with which it
            was drawn; if it was drawn without a title, it gets the figure's.

    Returns:
        All texts of the pictures.
    """
    from matplotlib.text import Text

    from landscape.plots.picture import Picture, caption
    from landscape.plots.style import style

    about = f"{figure.where}, {context.scale} scale: {figure.title}."
    if context.scale == "smoke":
        about += " The numbers mean nothing."
    texts: list[str] = []
    with style():
        for suffix, picture in drawing.pictures.items():
            if titles.get(suffix):
                picture.suptitle(titles[suffix])
            elif not picture.get_suptitle():
                picture.suptitle(figure.title[0].upper() + figure.title[1:])
            drawn_caption = picture.get_caption() if isinstance(picture, Picture) else ""
            caption(picture, " ".join(filter(None, (about, drawn_caption, figure.caption))))
            texts += [text.get_text() for text in picture.findobj(Text) if text.get_visible()]
    return " ".join(texts)


def _reduce_colors(path: Path) -> None:
    """Rewrite a picture with at most ``COLORS`` colors, which makes the file smaller."""
    with Image.open(path) as picture:
        # Median cut, the default, gives thin lines the color of others: SSGD's that of the orange line.
        # Without KMEANS the pale colors of a contour become gray.
        method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
        small = picture.convert("RGB").quantize(COLORS, method=method, kmeans=KMEANS, dither=dither)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    path.write_bytes(buffer.getvalue())


def entries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the figures' JSON files, by name of the figure, in the order of ``names()``.

    The verdicts are computed again from the CSV files, so that all figures are judged by the same rules.

    Raises:
        OperationError: a damaged JSON file, or a damaged or missing CSV file.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name in names():
        path = folder / f"{name}.json"
        if not path.exists():  # the figure is not made yet
            continue
        try:
            entry = json.loads(read_regular(path, MAX_BYTES).decode())
            # The pages need a verdict. At smoke scale a verdict needs no CSV file.
            trial_entry = entry | verdict(name, "smoke", "")
            # Only a check, in which a damaged entry raises an error. The texts of the pages are not used.
            front({name: trial_entry})
            details(name, trial_entry)
            path = path.with_suffix(".csv")  # an error from here on names the CSV file
            csv_text = read_regular(path, MAX_BYTES).decode()
            entries[name] = entry | verdict(name, entry["scale"], csv_text, entry.get("remark", ""))
        except DAMAGED as error:
            reason = " ".join(str(error).split())
            raise OperationError(f"{path}: damaged ({reason}); make the figure again") from error
    return entries


def duration(seconds: float) -> str:
    """Return seconds below 100, else hours and minutes: "42 s", "27 min", "4 h 10 min"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def page(folder: Path) -> Path:
    """Write README.md, with a row for every figure that ``folder`` holds, and the page NAME.md of each.

    The verdicts in the JSON files are brought up to date with their CSV files.

    Raises:
        OperationError: a damaged file.
    """
    entries = entries_in(folder)
    for name, entry in entries.items():
        _write_entry(folder / f"{name}.json", entry)
        write_text(folder / f"{name}.md", details(name, entry))
    path = folder / "README.md"
    write_text(path, front(entries))
    return path


def front(entries: dict[str, dict[str, Any]]) -> str:
    """Return the text of README.md: what we found, and a table of the claims of each paper."""
    parts = ["# The figures of the papers", words("introduction")]
    if lines := findings(entries):
        parts += ["## What we found", "\n".join(lines)]
    parts += ["## The claims", outcomes(entries), words("words")]
    for paper, group in itertools.groupby(entries.items(), lambda pair: pair[1]["where"].partition(", ")[0]):
        title = figures_toml()["papers"].get(paper)
        parts += [f"### {paper}: {title}" if title else f"### {paper}"]
        parts += [_table(CLAIMS, (_row(name, entry) for name, entry in group))]
    return "\n\n".join([*parts, "## How an outcome is decided", words("rules"), words("times")]) + "\n"


def findings(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Return our findings about the papers: sentences of figures.toml whose figures have these outcomes."""
    outcomes = {name: entry["outcome"] for name, entry in entries.items()}
    every = figures_toml()["findings"]
    return [f"- {finding['text']}" for finding in every if finding["rests"].items() <= outcomes.items()]


def outcomes(entries: dict[str, dict[str, Any]]) -> str:
    """Return the number of claims with each outcome."""
    grades = [entry["outcome"] for entry in entries.values()]
    return f"Outcomes: {', '.join(f'{grade} {grades.count(grade)}' for grade in OUTCOMES)}."


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a claim: its figure, the claim, its outcome, the effect that carries it."""
    alt = html.escape(entry["title"])
    small = "".join(f'<img src="{path}" width="160" alt="{alt}"><br>' for path in entry["pictures"][:1])
    result, _ = result_of(name, entry["scale"], entry["effects"])
    effects = [effect for effect in entry["effects"] if effect["where"] == get(name).effect]
    texts = [f"**{e['text']}**: {e['what']}, {e['where']}" for e in effects or entry["effects"]]
    came_out = f"**{graded(entry)}.** {result}".rstrip()
    return f"{small}[{name}]({name}.md)", entry["claims"], came_out, "".join(texts[:1])


def effect_cells(effect: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return (where, effect with its interval, seeds, whether it is as claimed) of a JSON entry."""
    answer, reason = effect["answer"], effect["reason"]
    answer += f": {reason}" * (reason not in answer)
    low, high = effect["least"], effect["most"]
    border = "" if (low, high) == (0, None) else f" (claimed: {_between(low, high)})"
    text = f"{effect['what']}: {effect['text']}{border}" if effect["what"] else effect["text"]
    return effect["where"], text, str(effect["seeds"] or "–"), answer


def _between(low: float | None, high: float | None) -> str:
    """Return an open interval in words; None: no border."""
    if low is None or high is None:
        return f"above {low:.3g}" if high is None else f"below {high:.3g}"
    return f"{low:.3g} to {high:.3g}"


def details(name: str, entry: dict[str, Any]) -> str:
    """Return the text of NAME.md: pictures, claim, outcome, tests and numbers of a figure."""
    effects, compared = entry["effects"], entry["compared"]
    result, detail = result_of(name, entry["scale"], entry["effects"])
    parts = [f"# {name}: {(result or entry['title']).rstrip('.')}"]
    parts += [f"{entry['where']}: {entry['title']}. [All figures](README.md)"]
    parts += [f"![{entry['title']}]({picture})" for picture in entry["pictures"]]
    parts += [f"**Claim.** {entry['claims']} {get(name).detail}".rstrip()]
    sentences = (f"**{graded(entry)}.**", detail, entry.get("remark", ""))
    parts += [" ".join(filter(None, sentences)) if entry["outcome"] else entry["verdict"]]
    parts += [f"**Setting.** {setting_of(entry)} Data in [{name}.csv]({name}.csv)."]
    if effects:
        parts += [_table(("where", "effect", "seeds", ""), map(effect_cells, effects))]
    if compared:
        columns = [key for key in COMPARED if key != "paper" or any(number[key] for number in compared)]
        rows = ([number[key] for key in columns] for number in compared)
        parts += [_table([COMPARED[key] for key in columns], rows)]
    entries = {*entry.get("words", ()), *explanations(" ".join(parts))}
    in_order = [words for words in figures_toml()["words"].values() if words in entries]
    return "\n\n".join([*parts, *[f"**Words.** {'; '.join(in_order)}."] * bool(in_order)]) + "\n"


def setting_of(entry: dict[str, Any]) -> str:
    """Return the settings, the command and the numerics' versions of a figure, in a sentence or two."""
    numerics = ", ".join(f"{key} {value}" for key, value in entry.get("numerics", {}).items())
    return (
        f"Scale {entry['scale']}: {' '.join(entry['note'].split()).rstrip('.')}. `{entry['command']}`, "
        f"{duration(entry['seconds'])}{f'; versions of the numerics: {numerics}' if numerics else ''}."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)

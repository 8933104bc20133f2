"""The gallery as a page: one table of all claims and verdicts, and a section for each figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.core.files import write_text
from landscape.paper import gallery
from landscape.paper.verdicts import CONFIDENCE, OUTCOMES, SEEDS, SHOWN

INTRODUCTION = (
    "Made by `landscape figures` and not edited by hand; `make figures` makes them again. The papers: "
    "DPSGD-2020 is *Why Does Decentralized Training Outperform Synchronous Training in the Large Batch "
    "Setting?*, DPSGD-2021 *Loss Landscape Dependent Self-Adjusting Learning Rates in Decentralized SGD*, "
    "LocalSGD-2021 *Trade-offs of Local SGD at Scale*, Delay-2019 *At Stability's Edge*."
)
RULES = (
    f"A claim is tested by effects, each paired over seeds, with Student's {CONFIDENCE:.0%} interval in "
    f"brackets; an effect counts from {SEEDS} seeds on and where its interval leaves out zero (or the border "
    "that is named). A claim *holds* where all effects are as claimed, *holds in part* where some are, *does "
    "not hold* where none is and at least one is the opposite, and is *not tested here* where none counts. "
    "Each interval stands for itself: of twenty effects that are none, one leaves out zero by chance. A "
    "verdict is about the runs made here, and where they are smaller than those of the claim, the table says "
    "so."
)
TIMES = (
    "The time of a figure is the sum over runs and analyses as each was measured, those that figures share "
    "counted in each; on two cores, `--jobs 2` takes about half. Runs leave their records in "
    "[records](records), from which the figures are drawn: settings, last numbers and curves, with the "
    "version of the code."
)


def page(folder: Path) -> Path:
    """Write README.md: every figure that ``folder`` holds, in the order of ``landscape figures``.

    The verdicts in the JSON files are brought up to date with their CSV files.

    Raises:
        FailedError: a damaged file.
    """
    gallery.rejudge(folder)
    entries = gallery.entries_in(folder)
    lines = ["# The figures and tables of the papers", "", INTRODUCTION, "", counted(entries), "", RULES, ""]
    lines += ["| claim | where tested | outcome | effect, with its interval |", "|---|---|---|---|"]
    for name, entry in entries.items():
        claim = f"[{name}](#{name}), {entry['where']}: {entry['claims']}"
        outcome = entry["outcome"] or "–"
        cells = (claim, f"{entry['scale']}: {entry['note']}", f"**{outcome}**", sizes(entry))
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    lines += ["", TIMES]
    for name, entry in entries.items():
        lines += _section(name, entry)
    path = folder / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def counted(entries: dict[str, dict[str, Any]]) -> str:
    """How many claims have which outcome."""
    found = [entry["outcome"] for entry in entries.values() if entry["outcome"]]
    counts = ", ".join(f"{outcome}: {found.count(outcome)}" for outcome in OUTCOMES)
    return f"The {len(found)} claims with runs of more than smoke scale: {counts}." if found else ""


def sizes(entry: dict[str, Any]) -> str:
    """The effects of a claim in a few words: where it holds, where not, and how many are open.

    The reasons where nothing can be said.
    """
    parts = []
    for holds, words in ((True, "as claimed"), (False, "not")):
        found = [effect for effect in entry["effects"] if effect["holds"] is holds]
        if found:
            texts = [f"{_joined(effect)}: {effect['text']}" for effect in found[:SHOWN]]
            texts += [f"{len(found) - SHOWN} more below"] if len(found) > SHOWN else []
            parts.append(f"{words}: {'; '.join(texts)}")
    left = [effect for effect in entry["effects"] if effect["holds"] is None]
    if not parts:
        said = [f"{_joined(effect)}: {effect['text']}" for effect in left[:SHOWN] if effect["seeds"]]
        return "; ".join([*dict.fromkeys(effect["reason"] for effect in left), *said])
    if left:
        parts.append(f"open: {len(left)} of {len(entry['effects'])}")
    return ". ".join(parts)


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
    if entry["effects"]:
        lines += ["", "| where | effect | seeds | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(map(_cell, effect_cells(e)))} |" for e in entry["effects"]]
    if entry["compared"]:
        lines += ["", "| | here | paper |", "|---|---|---|"]
        rows = ((e["what"], e["ours"], e["paper"]) for e in entry["compared"])
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return lines


def made(entry: dict[str, Any]) -> str:
    """With what settings, command and version of the code a figure was made, in one or two sentences."""
    numerics = ", ".join(f"{key} {value}" for key, value in entry.get("numerics", {}).items())
    versions = f"version {entry['version']}" + (f", numerics: {numerics}" if numerics else "")
    return (
        f"Scale {entry['scale']}: {' '.join(entry['note'].split()).rstrip('.')}. `{entry['command']}`, "
        f"{gallery.duration(entry['seconds'])}; drawn by {versions}."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

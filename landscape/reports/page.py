"""The page of a report: its sections, and the gallery of pictures."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from landscape._version import __version__
from landscape.core.files import printable, read_regular, write_text
from landscape.core.options import ends_in
from landscape.core.registry import optional
from landscape.paper import gallery
from landscape.plots.style import paper_name
from landscape.plots.surface import CMAP
from landscape.reports import analyses, contents, curves, findings
from landscape.reports.contents import NAMED, Contents, lines_of, seed_groups
from landscape.reports.parts import Page, Picture, Section, Table, chart_text, script_json, text_cells

MAX_BYTES = 1 << 26  # of a picture that is read (ours)
COLORS = 17  # of the pictures' scale, between which Plotly interpolates (ours: no step is seen)


def figures_page(folder: Path) -> Page:
    """The page about the figures that ``landscape figures`` wrote to ``folder``.

    Raises:
        OperationError: a damaged file, or a picture that cannot be read.
    """
    entries = gallery.entries_in(folder)
    count = f"{len(entries)} figures and tables of the papers."
    said = [count, gallery.counted(entries), gallery.words("rules")]
    if any(not entry["outcome"] for entry in entries.values()):
        said.append(gallery.words("smoke"))
    rows = tuple(
        text_cells(
            f"{name}: {e['claims']}", f"{e['scale']}: {e['note']}", e["outcome"] or "–", gallery.sizes(e)
        )
        for name, e in entries.items()
    )
    heads = ("claim", "where tested", "outcome", "effect, with its interval")
    verdicts = Section("verdicts", "The claims", (), tables=(Table("Claims and verdicts", heads, rows),))
    sections = (verdicts, *(_section(name, entry, folder) for name, entry in entries.items()))
    return Page("The figures and tables of the papers", tuple(filter(None, said)), sections)


def _section(name: str, entry: dict[str, Any], folder: Path) -> Section:
    verdict = f"The claim: {entry['outcome']}. {entry['verdict']}" if entry["outcome"] else entry["verdict"]
    title, alt = f"{entry['where']}: {entry['title']}", f"{entry['title']}. {verdict}"
    files = (read_regular(folder / Path(name).name, MAX_BYTES) for name in entry["pictures"])
    pictures = tuple(Picture(title, alt, file) for file in files)
    effects = tuple(text_cells(*gallery.effect_cells(effect)) for effect in entry["effects"])
    rows = tuple(text_cells(e["what"], e["ours"], e["paper"]) for e in entry["compared"])
    tables = (
        Table("What the verdict rests on", ("where", "effect", "seeds", "the claim"), effects),
        Table("Here and in the paper", ("what", "here", "paper"), rows),
    )
    words = (entry["claims"], verdict, gallery.made(entry).replace("`", ""))
    return Section(name, title, words, tables=tables, pictures=pictures)


EXTRA = "'sgd-landscape[report]'"
FORMATS = (".html", ".htm")
_FOLDER = Path(__file__).parent


def check_installed() -> None:
    """Check that the packages for a report are there, before work is done for one.

    Raises:
        OperationError: plotly or jinja2 is not installed; the line says what to install.
    """
    optional("jinja2", "a report", EXTRA)
    optional("plotly", "a report", EXTRA)


def report(runs: Any, path: str | Path, title: str = "") -> None:
    """Write a report on runs and results to one HTML file, which needs no other and sends no request.

    Args:
        runs: one or several runs with a file, results, or names of files and folders; the folder of a run
            brings the results that lie in it.
        path: of the page, .html.
        title: of the page. Default: the algorithms and data of the runs.

    Raises:
        InputError: something else than runs and results, or another suffix.
        OperationError: a file that cannot be read or written; plotly or jinja2 is not installed.

    Example:
        >>> report(["missing.h5"], "report.html")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    ends_in("path", path, FORMATS)
    check_installed()
    write(build(contents.read(runs), title), path)


def build(given: Contents, title: str = "") -> Page:
    """The page about ``given``."""
    learners, scrubbers = analyses.scrubber_section(given)
    sections = [
        findings.runs_section(given),
        curves.section(given.runs),
        analyses.comparison_section(given),
        *analyses.sections(given),
        learners,
        *analyses.other_sections(given),
        findings.section(given),
    ]
    data = _drawn(given) | {"scrubbers": scrubbers}
    # What is missing of sections that would show nothing else stands at the end.
    shown = [s for s in sections if s.shows]
    missing = tuple(m for s in sections for m in (() if s.shows else s.missing))
    shown[-1] = replace(shown[-1], missing=(*shown[-1].missing, *missing))
    name = title or _title(given)
    return Page(name, findings.sentences(given), tuple(shown), data, _ran(given))


def _drawn(given: Contents) -> dict[str, Any]:
    """The surfaces, the runs with their lines, and the colors, as the page's script takes them."""
    lines = zip(given.runs, lines_of(given.runs), strict=True)
    bands = curves.banded(given.runs)
    in_bands, medians = {k for band in bands for k in band.places}, {b.places[0]: b.name for b in bands}
    runs = [{"name": run.name, "grouped": k in in_bands, **line} for k, (run, line) in enumerate(lines)]
    key = [run | {"name": medians.get(k, run["name"])} for k, run in enumerate(runs)]
    key = [line for k, line in enumerate(key) if k in medians or k not in in_bands]
    colors = [to_hex(CMAP(share)) for share in np.linspace(0, 1, COLORS)]
    return analyses.data(given) | {"scrubbers": [], "runs": runs, "key": key, "colors": colors}


def _ran(given: Contents) -> str:
    """Sentences that list the settings with their runs and steps, and the results."""
    words = []
    for setting in seed_groups(given.runs):
        runs = [given.runs[k].checkpoint for k in setting.places]
        steps = " and ".join(f"{step:,}" for step in sorted({run.step for run in runs}))
        several = f"{len(runs)} seeds, " if len(runs) > 1 else ""
        words.append(f"{setting.name} ({several}{steps} steps)")
    kinds = Counter(type(result).__name__ for result, _ in given.found)
    results = [f"{kind} ({count})" for kind, count in kinds.items()]
    parts = {"Runs": words, "Results": results}
    return " ".join(f"{name}: {'; '.join(texts)}." for name, texts in parts.items() if texts)


def write(page: Page, path: str | Path) -> None:
    """Render ``page`` and write it to ``path``, which is replaced only once the new file is whole.

    Raises:
        OperationError: the file cannot be written; plotly or jinja2 is not installed.
    """
    write_text(path, render(page))


def render(page: Page) -> str:
    """The HTML of ``page``. The code of Plotly is in it only if there is something for it to draw."""
    jinja2 = optional("jinja2", "a report", EXTRA)
    markup = optional("markupsafe", "a report", EXTRA)
    lines = {"trim_blocks": True, "lstrip_blocks": True}
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(finalize=_visible, **strict, **lines)
    template = environment.from_string(_part("template.html"))
    charts = [chart for section in page.sections for chart in section.charts]
    scripts = [_part("report.js")]
    if charts or any(section.widget for section in page.sections):
        plotly = optional("plotly.offline", "a report", EXTRA).get_plotlyjs()
        scripts.insert(0, plotly.replace("</script", "<\\/script"))
    return template.render(
        page=page,
        version=__version__,
        data=markup.Markup(script_json(data_of(page))),
        style=markup.Markup(_part("report.css")),
        scripts=[markup.Markup(script) for script in scripts],
        hashes=markup.Markup(" ".join(map(_source, scripts))),
        image=_image,
    )


def data_of(page: Page) -> dict[str, Any]:
    """The data that the page's script draws, with its charts."""
    charts = [chart for section in page.sections for chart in section.charts]
    drawn = {chart.name: {"title": chart_text(chart.title), "figure": chart.figure} for chart in charts}
    return page.data | {"charts": drawn}


def _part(name: str) -> str:
    return read_regular(_FOLDER / name).decode()


def _source(script: str) -> str:
    """The source that allows ``script``, and no other, in the page's Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _visible(value: Any) -> Any:
    """Texts with characters that cannot be printed as escapes, but for the ends of lines."""
    text = isinstance(value, str) and not hasattr(value, "__html__")  # which says that it is HTML
    return "\n".join(map(printable, value.split("\n"))) if text else value


def _image(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _title(given: Contents) -> str:
    names = dict.fromkeys(run.checkpoint.algorithm for run in given.runs)
    data = filter(None, dict.fromkeys(run.checkpoint.data["name"] for run in given.runs))
    if not names:
        return "Loss landscape"
    if not any(run.checkpoint.has_recipe for run in given.runs):
        return ", ".join(run.name for run in given.runs[:NAMED])
    return " on ".join(filter(None, (" and ".join(map(paper_name, names)), ", ".join(data))))

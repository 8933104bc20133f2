"""One self-contained page about runs and results: ``landscape report``.

The template of this folder shows the pictures of :mod:`landscape.plots`, the descriptions of the results as
tables, and what the files say of their origin. Surfaces can be turned, which Plotly.js draws. No request
leaves the page.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import io
import json
import math
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.collections import Collection
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from landscape import plots
from landscape._version import __version__
from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import IMPORTED, SCHEMA, Checkpoint
from landscape.checkpoint.user_code import is_user_defined
from landscape.core import hdf5
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.files import printable, read_regular, write_text
from landscape.core.options import checked, ends_in
from landscape.core.registry import optional
from landscape.plots import drawable, each_of
from landscape.plots.picture import Picture as Drawn
from landscape.plots.style import in_brackets, paper_name, style
from landscape.plots.surface import CMAP, PLANES, LevelScale, marks, scale
from landscape.results import base
from landscape.results.geometry import loss_at
from landscape.results.grids import HessianGrid
from landscape.results.noise import Noise
from landscape.results.shown import Row
from landscape.results.spectrum import Spectrum
from landscape.results.surfaces import Surface

LONGEST = 300  # characters of a setting (our choice)
# Result of each run that a reader expects -> the command that computes it.
_EXPECTED = {Surface: "contour", Spectrum: "spectrum", HessianGrid: "hessian-grid", Noise: "noise"}


@dataclass(frozen=True, eq=False)  # tensors and arrays cannot be compared
class Item:
    """A run or a result that the page shows.

    Attributes:
        of: the run or result.
        path: its file; None for a result that has none.
        sha256: of a run's file, by which results name it as their source; "" for a result.
        name: its label.
    """

    of: Any
    path: Path | None
    sha256: str
    name: str

    @property
    def heading(self) -> str:
        """The heading of its section; items that one picture can show have the same heading."""
        if isinstance(self.of, Checkpoint):
            return "Weights of other programs" if self.of.algorithm == IMPORTED else "Training"
        if isinstance(self.of, Surface):
            norm = f", normalization: {self.of.norm}" if self.of.kind == "random" else ""
            loss = f"{self.of.split} {self.of.loss_name}{in_brackets(self.of.loss_unit)}".strip()
            return f"Contours: {loss} over {PLANES.get(self.of.kind, self.of.kind)}{norm}"
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self.of).__name__)
        return words[0] + words[1:].lower()

    @property
    def origin(self) -> list[Row]:
        """The file, and all settings in it: numbers and texts, not arrays."""
        fields: dict[str, Any] = {"file": str(self.path or "not saved"), "SHA-256": self.sha256}
        fields |= {field.name: getattr(self.of, field.name) for field in dataclasses.fields(self.of)}
        if isinstance(self.of, Checkpoint):
            fields |= {"learners": self.of.learners, "weights of each": self.of.layout.size}
            for name in ("model", "data"):
                fields[name] = tuple(f"{key}: {value}" for key, value in fields[name].items())
            unknown = [] if self.of.has_recipe else ["seed", "local_batch"]
            unknown += [] if self.of.diverged else ["diverged_at"]
            fields |= dict.fromkeys(unknown)
        texts = {key.replace("_", " "): _text_of(value) for key, value in fields.items()}
        return [Row(key, text[:LONGEST]) for key, text in texts.items() if text and key != "recipe"]


def _text_of(value: Any) -> str:
    """Return a number, a text, or several texts, in words; "" for anything else."""
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return "; ".join(value)
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value) if isinstance(value, (bool, int, str)) else ""


@dataclass(frozen=True)
class Contents:
    """The runs of a page and then its results, in the user's order; and notes on files that are left out."""

    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Checkpoint]:
        """The runs."""
        return [item.of for item in self.items if isinstance(item.of, Checkpoint)]

    def lacking(self, kind: type[base.Result]) -> list[Path]:
        """Return the files of the runs without a result of class ``kind``."""
        sources = {getattr(item.of, "source_sha256", "") for item in self.items if isinstance(item.of, kind)}
        return [item.path for item in self.items if item.path and item.sha256 and item.sha256 not in sources]

    def missing(self) -> list[tuple[str, str]]:
        """Return the name of each analysis without a result, and the command that computes it."""
        runs, commands = [item for item in self.items if item.sha256], []
        for kind, name in _EXPECTED.items():
            suitable = [run for run in runs if kind is not Noise or run.of.learners > 1]
            if suitable and not any(isinstance(item.of, kind) for item in self.items):
                commands.append((name.replace("-", " "), _command(name, suitable)))
        return commands


def _command(name: str, runs: Sequence[Item]) -> str:
    """Return the command of an analysis for the files of runs."""
    paths = [run.path.parent if run.path.name == "last.h5" else run.path for run in runs if run.path]
    line = shlex.join(["landscape", name, *map(str, paths)])
    if any(not run.of.data["name"] or is_user_defined(run.of.model["name"]) for run in runs):
        line += " --model MODULE:NAME --data MODULE:NAME"  # the user's code is in no file
    return line


def read(sources: Any) -> Contents:
    """Read the runs and results of a page. From the folder of a run, all results are read, too.

    A run or a file that is named several times is read once. A damaged result in a folder is left out, with a
    note.

    Args:
        sources: one or several paths of files or folders, runs that have a file, or results.

    Raises:
        InputError: no source, a source of another type, or a run without a file.
        OperationError: a file that is missing, damaged or of another program, or a folder without a run.
    """
    runs: dict[Path, tuple[Path, Checkpoint]] = {}  # resolved path -> (path as given, run)
    # Resolved path -> (path as given, results). A result without a file has its index in ``sources`` as key.
    results: dict[Path | int, tuple[Path | None, list[base.Result]]] = {}
    notes: list[str] = []
    source_list = each_of(sources)
    if not source_list:
        raise InputError("runs", sources, allowed="one or several")
    for index, source in enumerate(source_list):
        if isinstance(source, base.Result):
            results[index] = None, [source]
            continue
        location = source.path if isinstance(source, Checkpoint) else source
        if not isinstance(location, (str, Path)):
            kind = "a run without a file" if location is None else f"a {type(source).__name__}"
            raise InputError(f"runs: {kind} is not allowed, give a run with a file, a result or a path")
        file_or_folder = Path(location)
        path = storage.checkpoint_in(file_or_folder)  # the last checkpoint in a run's folder, or the file
        if hdf5.schema_of(path) == SCHEMA:
            runs.setdefault(path.resolve(), (path, Checkpoint.load(path)))
        else:
            results.setdefault(path.resolve(), (path, base.load_results(path)))
        other_files = sorted(file_or_folder.glob("*.h5")) if file_or_folder.is_dir() else []
        for result_file in other_files:
            try:
                if hdf5.schema_of(result_file) != SCHEMA:
                    results.setdefault(result_file.resolve(), (result_file, base.load_results(result_file)))
            except OperationError as error:
                notes.append(f"Left out: {printable(error)}")
    # In the labels of runs, paper_name writes algorithms as the papers do: DPSGD for "dpsgd".
    labels = [paper_name(run.label) for _, run in runs.values()]
    items = []
    for (path, run), label in zip(runs.values(), labels, strict=True):
        name = label if labels.count(label) == 1 else f"{label} ({path})"
        items.append(Item(run, path, sha256=hdf5.sha256(path), name=name))
    for file, results_of_file in results.values():
        for index, result in enumerate(results_of_file):
            label = " ".join(getattr(result, "label", "").split())
            name = paper_name(label) or f"{type(result).__name__} {index}"
            items.append(Item(result, file, sha256="", name=name))
    return Contents(tuple(items), tuple(notes))


EXTRA, FORMATS = "'sgd-landscape[report]'", (".html", ".htm")
# Curves and areas of more than MOST_POINTS points are pixels inside a picture, DPI per inch; coordinates, in
# points of 1/72 inch, have this number of decimals (our choice).
MOST_POINTS, DPI, DECIMALS = 2000, 150, 2
MOST_CELLS = 100_000  # of a CSV file: about 1 MB of the page; longer tables have every k-th row (our choice)
MOST_FACETS = 75  # along each axis of a surface that turns: more cannot be seen at its size (our choice)
COLORS = 17  # of the pictures' color scale, between which Plotly interpolates (our choice: no step is seen)
LIFT = 0.02  # of the range of heights, by which markers stand above the surface (our choice)
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Picture:
    """A picture as ``landscape plot`` draws it, and its numbers.

    Attributes:
        alt: the title and the caption, for readers who do not see the picture.
        svg, csv: contents of files.
        note: which rows the CSV file has; "" for all.
    """

    alt: str
    svg: str
    csv: str
    note: str


@dataclass(frozen=True)
class Table:
    """Rows of a description, a column for each run or result; None where one does not have the row."""

    names: tuple[str, ...]
    rows: dict[str, tuple[Row | None, ...]]


@dataclass(frozen=True)
class Section:
    """A section of the page, on runs or on results of one kind.

    Attributes:
        scenes: figures of Plotly, of surfaces that turn.
        recipes: names of runs, and their recipes as text.
        notes: why something is not drawn.
    """

    title: str
    pictures: tuple[Picture, ...]
    numbers: Table
    origin: Table
    scenes: tuple[dict[str, Any], ...] = ()
    recipes: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The title as the name of a file."""
        return "-".join(re.findall(r"\w+", self.title)).lower()


def check_installed() -> None:
    """Check that the packages for a report are installed, before other work begins.

    Raises:
        OperationError: plotly or jinja2 is not installed; the line says what to install.
    """
    optional("jinja2", "a report", EXTRA)
    optional("plotly", "a report", EXTRA)


@checked()
def report(runs: Any, path: str | Path, title: str = "") -> None:
    """Write a report on runs and results to one HTML file, which needs no other file and sends no request.

    Args:
        runs: one or several runs with a file, results, or names of files and folders; the folder of a run
            adds all results in it.
        path: file of the page, .html.
        title: title of the page. Default: the algorithms and data of the runs.

    Raises:
        InputError: anything except runs and results, or another suffix.
        OperationError: a file that cannot be read or written; plotly or jinja2 is not installed.

    Example:
        >>> report(["missing.h5"], "report.html")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    ends_in("path", path, FORMATS)
    check_installed()
    write(read(runs), path, title)


def write(contents: Contents, path: str | Path, title: str = "") -> None:
    """Write the page about ``contents``; an existing file is replaced only when the new one is complete.

    Raises:
        OperationError: the file cannot be written; plotly or jinja2 is not installed.
    """
    groups: dict[str, list[Item]] = {}
    for item in contents.items:
        groups.setdefault(item.heading, []).append(item)
    sections = [_section(heading, items) for heading, items in groups.items()]
    write_text(path, render(title or _title(contents), sections, contents))


def render(title: str, sections: Sequence[Section], contents: Contents) -> str:
    """Return the HTML of a page. The code of Plotly is in it only if there is a surface that turns."""
    jinja2 = optional("jinja2", "a report", EXTRA)
    markup = optional("markupsafe", "a report", EXTRA).Markup
    lines = {"trim_blocks": True, "lstrip_blocks": True}
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(finalize=_visible, **strict, **lines).from_string(_part("template.html"))
    scripts = [_part("report.js")]
    scenes = [scene for section in sections for scene in section.scenes]
    if scenes:
        plotly = optional("plotly.offline", "a report", EXTRA).get_plotlyjs()
        scripts.insert(0, plotly.replace("</script", "<\\/script"))
    text: str = template.render(
        title=title, sections=sections, contents=contents, version=__version__, base64=_base64,
        style=markup(_part("report.css")), scenes=markup(script_json(scenes)),
        scripts=[markup(script) for script in scripts], hashes=markup(" ".join(map(_source, scripts))),
    )  # fmt: skip
    return text


def _section(heading: str, items: Sequence[Item]) -> Section:
    """Return the section of items with this heading, with pictures of the loss and of shared metrics."""
    pictures, notes = _pictures(items)
    metrics = [{*item.of.metric_names} if isinstance(item.of, Surface) else set() for item in items]
    for name in sorted(set.intersection(*metrics)):
        metric_pictures, metric_notes = _pictures(items, quantity=name)
        pictures, notes = pictures + metric_pictures, notes + metric_notes
    recipes = tuple((item.name, item.of.recipe) for item in items if getattr(item.of, "recipe", ""))
    numbers = _table(items, [item.of.describe() for item in items])
    origin = _table(items, [item.origin for item in items])
    return Section(heading, pictures, numbers, origin, _scenes(items), recipes, notes)


def _table(items: Sequence[Item], descriptions: Sequence[Sequence[Row]]) -> Table:
    """Return a table with a column for each item; ``descriptions`` are its rows."""
    columns = [{row.name: row for row in rows} for rows in descriptions]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = {name: tuple(column.get(name) for column in columns) for name in names}
    return Table(tuple(item.name for item in items), rows)


def _pictures(items: Sequence[Item], **look: Any) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """Return the picture of all items, or of each if they need several, and the reasons for missing ones."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # of matplotlib: the browser has more fonts
            figure = plots.draw([item.of for item in items], **look)
            svg = _svg(figure)
    except (LandscapeError, ArithmeticError, LookupError, ValueError) as error:  # such as numbers for no axis
        if len(items) == 1:
            return (), (f"{items[0].name} is not drawn: {error}",)
        pictures, notes = zip(*(_pictures([item], **look) for item in items), strict=True)
        return sum(pictures, ()), sum(notes, ())
    caption = figure.get_caption() if isinstance(figure, Drawn) else ""
    alt = " ".join(f"{figure.get_suptitle() or items[0].heading}. {caption}".split())
    return (Picture(alt, svg, *_csv(items)),), ()


def _svg(figure: Figure) -> str:
    """Return a figure as SVG; areas and curves of many points are pixels in it, lines of contours are not."""
    for artist in [artist for ax in figure.axes for artist in ax.get_children()]:
        points = 0
        if isinstance(artist, Line2D):
            points = len(np.asarray(artist.get_xdata()))
        elif isinstance(artist, Collection) and getattr(artist, "filled", True):
            points = sum(map(len, artist.get_paths()))
        if points > MOST_POINTS:
            artist.set_rasterized(True)
    buffer = io.StringIO()
    with style(), rc_context({"svg.hashsalt": "landscape"}), np.errstate(over="ignore", invalid="ignore"):
        figure.savefig(buffer, format="svg", dpi=DPI, metadata={"Date": None})
    path_data = re.compile(r'(?<= d=")[^"]+')
    digits = re.compile(rf"(\.\d{{{DECIMALS}}})\d+")
    text = path_data.sub(lambda path: digits.sub(r"\1", path[0]), buffer.getvalue())
    # Matplotlib names clip paths by hashes of coordinates, whose last bits differ between equal drawings.
    for number, name in enumerate(re.findall(r'(?<=<clipPath id=")[^"]+', text)):
        text = text.replace(name, f"clip{number}")
    return text


def _csv(items: Sequence[Item]) -> tuple[str, str]:
    """Return the numbers of a picture to six digits as CSV, and a note on the rows; "" for all rows."""
    frames = []
    for item in items:
        frame = item.of.to_dataframe()
        if frame.empty:  # the result is only a few numbers
            frame = pd.DataFrame([dataclasses.asdict(row) for row in item.of.describe()])
        frame.insert(0, "of", item.name, allow_duplicates=True)
        frames.append(frame.dropna(axis="columns", how="all"))
    step = max(1, math.ceil(sum(frame.size for frame in frames) / MOST_CELLS))
    table = pd.concat([frame.iloc[::step] for frame in frames], ignore_index=True)
    note = f", one row in {step}" if step > 1 else ""
    return table.to_csv(index=False, float_format="%.6g"), note


def _scenes(items: Sequence[Item]) -> tuple[dict[str, Any], ...]:
    """Return surfaces that turn, with the heights and colors of their picture."""
    surfaces = [(item.name, drawable(item.of)) for item in items if isinstance(item.of, Surface)]
    surfaces = [(name, s) for name, s in surfaces if min(s.loss.shape) > 1 and np.isfinite(s.loss).any()]
    if not surfaces:
        return ()
    level_scale = scale([surface.loss for _, surface in surfaces])
    return tuple(_scene(name, surface, level_scale) for name, surface in surfaces)


def _scene(label: str, surface: Surface, level_scale: LevelScale) -> dict[str, Any]:
    """Return the JSON object of a picture of Plotly: the loss as height above the plane, and marks on it.

    The object has the picture's name, the "data" that Plotly draws, and the "scene" with the axes.
    """
    low, high = float(level_scale.levels[0]), float(level_scale.levels[-1])
    is_log = isinstance(level_scale.norm, LogNorm)
    step = math.ceil(max(surface.loss.shape) / MOST_FACETS)  # every step-th row and column is drawn
    loss = surface.loss[::step, ::step]
    color_shares = [k / (COLORS - 1) for k in range(COLORS)]
    facets = {
        "type": "surface", "x": _listed(surface.x[::step]), "y": _listed(surface.y[::step]),
        "z": _listed(loss), "cmin": low, "cmax": high, "showscale": False,
        "colorscale": [[share, to_hex(CMAP(share))] for share in color_shares],
        "lighting": {"ambient": 0.7, "diffuse": 0.35, "specular": 0.03, "roughness": 0.9, "fresnel": 0},
        "lightposition": {"x": -1000, "y": -500, "z": 3000},
        "hovertemplate": "x = %{x:.4g}<br>y = %{y:.4g}<br>loss %{z:.4g}<extra></extra>",
    }  # fmt: skip
    if is_log:  # Plotly's color scales are linear
        with np.errstate(divide="ignore", invalid="ignore"):
            facets["surfacecolor"] = _listed(np.log10(loss))
        facets |= {"cmin": math.log10(low), "cmax": math.log10(high)}
    traces = [facets]

    def lift(heights: Any) -> Any:
        """Raise heights by the share LIFT of the axis, so that marks lie above the surface."""
        return heights * (high / low) ** LIFT if is_log else heights + LIFT * (high - low)

    for points, mark_label, look in marks(surface):
        heights = loss_at(surface, *points.T)
        color = to_hex(look.get("mfc", look["mec"]))  # the color of the marker's face, or else of its edge
        name = mark_label.replace("$w_a$", "w_a").replace(r"\$", "$")  # Plotly has no mathtext
        traces.append({
            "type": "scatter3d", "mode": "lines+markers" if look["ls"] == "-" else "markers",
            "x": _listed(points[:, 0]), "y": _listed(points[:, 1]), "z": _listed(lift(heights)),
            "name": _plotly_text(name), "hoverinfo": "name", "line": {"color": color, "width": 5},
            "marker": {"color": color, "size": 4, "line": {"color": "#000", "width": 1}},
        })  # fmt: skip
    z_range = np.array([low, lift(high)])  # room for a mark at the highest loss
    if is_log:
        z_range = np.log10(z_range)
    z_axis = {"title": {"text": _plotly_text(surface.loss_name)}, "type": "log" if is_log else "linear"}
    axes = {
        f"{axis}axis": {"range": _listed(grid[[0, -1]]), "nticks": 4, "title": {"text": axis}}
        for axis, grid in (("x", surface.x), ("y", surface.y))
    }
    scene = {"zaxis": {"range": _listed(z_range), "nticks": 4, **z_axis}, **axes}
    return {"name": label, "data": traces, "scene": scene}


def _listed(values: Any) -> list[Any]:
    """Return numbers as lists for JSON, to six digits, with None for those that are not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [_listed(row) for row in array]
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in array.tolist()]


def _plotly_text(text: str) -> str:
    """Return ``text`` with escapes, so that Plotly, which reads some HTML tags, shows it unchanged."""
    return html.escape(printable(text), quote=False)


def script_json(value: Any) -> str:
    """Return ``value`` as JSON that can stand inside a script element: in ASCII, without <, > and &.

    Raises:
        ValueError: a number that is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    return read_regular(_FOLDER / name).decode()


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _source(script: str) -> str:
    """Return the source that allows ``script``, and no other, in the page's Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _visible(value: Any) -> Any:
    """Return texts with characters that cannot be printed as escapes, except for the ends of lines."""
    text = isinstance(value, str) and not hasattr(value, "__html__")  # HTML has this attribute
    return "\n".join(map(printable, value.split("\n"))) if text else value


def _title(contents: Contents) -> str:
    """Return the algorithms and data of the runs; the names of runs without a recipe."""
    if not all(run.has_recipe for run in contents.runs):
        return ", ".join(item.name for item in contents.items[:3])
    names = dict.fromkeys(paper_name(run.algorithm) for run in contents.runs)
    data = dict.fromkeys(run.data["name"] for run in contents.runs)
    return " on ".join(filter(None, (" and ".join(names), ", ".join(data)))) or "Loss landscape"

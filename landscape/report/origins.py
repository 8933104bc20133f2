"""What was run and on what, how each number was made, its error, and the command that makes it again."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path

from landscape.plots.style import paper_name
from landscape.report.contents import NAMED, Contents, Run
from landscape.report.curves import test_error, values_of
from landscape.report.parts import Cell, Section, Table, number, text_cells
from landscape.results.base import Result
from landscape.results.comparison import Comparison
from landscape.results.curvature import Spectrum
from landscape.results.grids import HessianGrid, Interpolated, Surface
from landscape.results.noise import NoiseEstimate

_COLUMNS = (
    "run", "algorithm", "model", "parameters", "data", "training samples", "n", "nB", "lr", "seed", "step",
    "test error (%)", "test loss (nat)", "training loss (nat)", "consensus distance", "time (s)",
)  # fmt: skip


def runs_section(contents: Contents) -> Section:
    """A table of the runs, and their recipes."""
    rows = tuple(_run(run) for run in contents.runs)
    text = (
        "Losses and errors are those of w_a, the mean of the n learners, at the last evaluated step. "
        "The error of a test error is the standard error of its test samples."
    )
    texts = tuple((f"Recipe of {r.name}", r.checkpoint.recipe) for r in contents.runs if r.checkpoint.recipe)
    tables = (Table("Runs", _COLUMNS, rows),) if rows else ()  # a section without a table is left out
    return Section("runs", "What was run, and on what", (text, *contents.notes), tables=tables, texts=texts)


def _run(run: Run) -> tuple[Cell, ...]:
    c = run.checkpoint
    options = [", ".join(f"{k} = {v}" for k, v in of["options"].items()) for of in (c.model, c.data)]
    model, data = (
        f"{of['name'] or 'not known'} {more}".strip()
        for of, more in zip((c.model, c.data), options, strict=True)
    )
    lasts = (values_of(run, name)[1] for name in ("test_loss", "train_loss", "consensus", "wall_s"))
    return (
        *text_cells(run.name, paper_name(c.algorithm), model),
        Cell(f"{c.layout.size:,}", c.layout.size),
        *text_cells(data),
        *(number(float(v)) for v in (c.data["train"], c.learners, c.learners * c.local_batch, c.lr, c.seed)),
        Cell(f"{c.step:,}" + (" (diverged)" if c.diverged else ""), c.step),
        number(*test_error(run)),
        *(number(float(values[-1]) if len(values) else math.nan) for values in lasts),
    )


def section(contents: Contents) -> Section:
    """A row for each result: how it was made, its error, its command, its file and that of its weights."""
    rows = []
    for result, path in contents.found:
        label = " ".join(getattr(result, "label", "").split()) or "–"
        source = getattr(result, "source_sha256", "")
        of = f", of weights with SHA-256 {source[:12]}…" if source else ""
        how, error, again = _fields(result), _error(result), command(contents, result, path)
        rows.append((type(result).__name__, label, how, error, again, f"{path}{of}"))
    for run in contents.runs:
        if run.checkpoint.has_recipe:
            recipe = shlex.quote(str(run.path.parent / "recipe.toml"))
            how = "every step decomposed as the recipe's decompose.every says; trained by landscape"
            error = "the columns …_se of the history; 0 where exact"
            again = f"landscape train {recipe} -o NEW-FOLDER"
            rows.append(("Run", run.name, how, error, again, f"{run.path}, SHA-256 {run.sha256[:12]}…"))
    columns = ("kind", "of", "how it was made", "its error", "the command that makes it again", "file")
    table = Table("Origin of the numbers", columns, tuple(text_cells(*row) for row in rows))
    return Section("origins", "How each number was made", tables=(table,) if rows else ())


def _error(result: Result) -> str:
    """The errors of a result's first numbers, and of interpolated ones."""
    rows = [row for row in result.describe() if row.error > 0][:NAMED]
    words = [f"{row.name} ± {row.error:.2g} {row.unit}".rstrip() for row in rows]
    if isinstance(result, Interpolated) and result.columns:
        words.append(result.interpolation())
    return "; ".join(words) or "none but rounding; another sample of the data gives other numbers"


def _fields(result: Result) -> str:
    """The numbers and short texts of a result of any kind."""
    hidden = ("label", "source", "source_sha256")
    values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in hidden}
    words = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str)) and value != ""
    ]
    return ", ".join(words)[:600]


def command(contents: Contents, result: Result, path: Path) -> str:
    """The command that makes ``result`` again; names of files are quoted for a shell."""
    run = contents.run_of(result)
    source = str(run.shown_path) if run else str(getattr(result, "source", "")) or "CKPT"
    places = source.split(", ") if isinstance(result, Surface) and result.kind == "between" else [source]
    if isinstance(result, Comparison):
        known = {run.sha256: str(run.shown_path) for run in contents.runs}
        files = zip(result.sources, result.sources_sha256, strict=True)
        places = [known.get(digest, name or "CKPT") for name, digest in files]
    name = _COMMANDS.get(result.schema, result.schema.partition(".")[2].replace("_", "-"))
    options: list[object] = []
    if isinstance(result, (Surface, HessianGrid)):
        options += ["--grid", f"{len(result.x)}x{len(result.y)}", "--span", f"{result.span:g}"]
        options += ["--seed", result.seed] + ["--norm", result.norm] * (result.kind == "random")
        options += ["--plane", result.kind] * isinstance(result, Surface)
    elif isinstance(result, Spectrum):
        top = result.values.size - result.lowest
        options += ["--top-k", top] * (top > 1 or not result.lowest)
        options += ["--ends"] * bool(result.lowest) + ["--trace"] * math.isfinite(result.trace)
        options += ["--density"] * (result.density is not None)
        options += ["--kind", result.kind, "--seed", result.seed]
        options += ["--part", result.part] * bool(result.part) + ["--precondition"] * bool(
            result.precondition
        )
    elif isinstance(result, NoiseEstimate):
        options += ["--draws", len(result.direct), "--seed", result.seed]
    else:
        return f"{shlex.join(['landscape', name, *places])}, with the options that it was given"
    if (split := getattr(result, "split", "")) and not isinstance(result, NoiseEstimate):
        options += ["--split", split]
    if (dtype := getattr(result, "dtype", "float32")) != "float32":
        options += ["--dtype", dtype]
    return shlex.join(map(str, ["landscape", name, *places, *options, "-o", path]))


# Commands whose name is not that of the file format.
_COMMANDS = {
    "landscape.surface": "contour",
    "landscape.escape": "saddles",
    "landscape.comparison": "compare",
}

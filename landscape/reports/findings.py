"""The page's sentences: the outcome, what was run, and how each number was made."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import standard_error, t_quantile, welch_freedom
from landscape.plots.style import headline, paper_name
from landscape.plots.surface import finding
from landscape.reports import analyses
from landscape.reports.contents import NAMED, Contents, Run, SeedGroup, seed_groups
from landscape.reports.curves import last_test_error, values_of
from landscape.reports.parts import Cell, Section, Table, number, text_cells
from landscape.results.base import Result
from landscape.results.comparison import Comparison
from landscape.results.grids import HessianGrid, Interpolated, Surface
from landscape.results.noise import Noise
from landscape.results.shown import in_words
from landscape.results.spectrum import QUANTITIES, Spectrum

# Two settings differ where the 95% interval of their difference leaves zero out (the usual level).
LEVEL = 0.95
# Of a run: its last quarter is "at the end", its first tenth "at first" (ours).
END, START = 0.25, 0.1
RELAPSE = 10.0  # times its lowest training loss, above which a run is said to have left a minimum (ours)


@dataclass(frozen=True)
class ErrorSummary:
    """The test error of a setting in %: mean and deviation over ``seeds``, standard error of the mean.

    Of one seed, spread and standard error are those of the test samples.
    """

    mean: float
    spread: float
    standard_error: float
    words: str
    seeds: int = 1


def sentences(contents: Contents) -> tuple[str, ...]:
    """Sentences about the files, one each; the most important first."""
    settings = seed_groups(contents.runs)
    errors = {s.name: e for s in settings if (e := test_error(contents.runs, s))}
    said = [f"{name}: test error {error.words}." for name, error in errors.items()]
    said += _comparison(errors)
    said += analyses.comparison_sentences(contents)
    for setting in settings:
        runs = [contents.runs[k] for k in setting.places]
        about = (_divergence(runs), _relapse(runs), _edge(runs), _rate(runs))
        said += [f"{setting.name}: {words}." for words in about if words]
    for group in analyses.groups(contents):
        said.append(f"{finding([s for _, s in group.surfaces])} ({group.title}).")
    said += [
        f"{headline(results)}{' (±: residual)' if kind is Spectrum else ''}."
        for kind, results in contents.others(Surface, Comparison).items()
        if results[0].describe()
    ]
    return tuple(said) or ("The files hold no run and no result that a sentence can be made of.",)


def test_error(runs: Sequence[Run], setting: SeedGroup) -> ErrorSummary | None:
    """The last test error of a setting: mean and deviation over seeds, or one run with its sampling error.

    None where the accuracy was never evaluated.
    """
    lasts = [(runs[k], *last_test_error(runs[k])) for k in setting.places]
    finite = [(run.checkpoint, value, error) for run, value, error in lasts if math.isfinite(value)]
    if not finite:
        return None
    steps = " and ".join(f"{step:,}" for step in sorted({run.step for run, *_ in finite}))
    if len(finite) > 1:
        values = np.array([value for _, value, _ in finite])
        mean, spread = float(values.mean()), float(values.std(ddof=1))
        seeds = ", ".join(str(run.seed) for run, *_ in finite)
        words = f"{in_words(mean, spread)}% after {steps} steps"
        words += f" (mean and standard deviation of {len(values)} seeds: {seeds})"
        return ErrorSummary(mean, spread, standard_error(values), words, len(values))
    ((run, value, error),) = finite
    words = f"{in_words(value, error)}% after {steps} steps"
    if samples := run.data["test"]:
        seed = f"seed {run.seed}; " if run.has_recipe else ""
        words += f" ({seed}standard error of {samples:,} test samples)"
    return ErrorSummary(value, error, error, words)


def _comparison(errors: dict[str, ErrorSummary]) -> list[str]:
    """The best setting against the second best, and whether the runs show which is better."""
    if len(errors) < 2:
        return []
    (best, a), (other, b) = sorted(errors.items(), key=lambda item: item[1].mean)[:2]
    gap, error = b.mean - a.mean, math.hypot(a.standard_error, b.standard_error)
    words = f"{best} has the lowest test error, {in_words(gap, error)} points below {other}"
    if not math.isfinite(error):
        return [f"{words}; how sure that is cannot be said from these files."]
    if not error:
        return [f"{words}."]
    # Student's t at which the interval of a difference ends, with Welch's degrees of freedom.
    freedoms = [math.inf if e.seeds == 1 else e.seeds - 1 for e in (a, b)]
    freedom = welch_freedom((a.standard_error, b.standard_error), (freedoms[0], freedoms[1]))
    needed = float(t_quantile(LEVEL, freedom))
    if gap > needed * error:
        return [f"{words}, {gap / error:.1f} standard errors."]
    lowest = ", the two lowest," if len(errors) > 2 else ""
    return [
        f"The test errors of {best} and {other}{lowest} differ by {in_words(gap, error)} points, "
        f"{gap / error:.1f} standard errors; {needed:.1f} are needed to say which is lower."
    ]


def _divergence(runs: Sequence[Run]) -> str:
    lost = [run.checkpoint for run in runs if run.checkpoint.diverged]
    seeds = ", ".join(f"seed {c.seed} at step {c.diverged_at:,} (the {c.diverged})" for c in lost)
    return f"{len(lost)} of {len(runs)} runs diverged: {seeds}" if lost else ""


def _relapse(runs: Sequence[Run]) -> str:
    """The runs that left a minimum: their loss at the end is far above the lowest that they had."""
    words = []
    for run in runs:
        steps, values = values_of(run, "train_loss")
        if len(values) and not run.checkpoint.diverged and values.min() > 0:
            ratio = float(np.median(_end(steps, values)) / values.min())
            if ratio > RELAPSE:
                at = steps[values.argmin()]
                words.append(f"seed {run.checkpoint.seed}, {ratio:.3g} times that of step {at:,.0f}")
    if not words:
        return ""
    return (
        f"{len(words)} of {len(runs)} runs left a minimum: the training loss in the last quarter (median) is "
        f"far above the lowest ({'; '.join(words)})"
    )


def _edge(runs: Sequence[Run]) -> str:
    """lr·λ_max at the end of the runs, against the limit of the rule."""
    values = np.concatenate([_end(*values_of(run, "lr_lambda_max")) for run in runs])
    limits = np.concatenate([values_of(run, "lr_lambda_limit")[1] for run in runs])
    if not len(values):
        return ""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    words = f"lr·λ_max in the last quarter is {middle:.3g} (quartiles {low:.3g} and {high:.3g})"
    if len(limits):
        limit = float(np.median(limits))
        words += f", {100 * middle / limit:.0f}% of its rule's limit {limit:.4g}"
    return words


def _rate(runs: Sequence[Run]) -> str:
    """α_e relative to α, at first and at the end."""
    first, last = [], []
    for run in runs:
        history = run.checkpoint.history
        with np.errstate(divide="ignore", invalid="ignore"):
            share = history["alpha_e"] / history["lr"]
        there = np.isfinite(share)
        steps, share = history["step"][there], share[there]
        if len(steps):
            first.append(share[steps <= steps[0] + START * (steps[-1] - steps[0])])
            last.append(_end(steps, share))
    if not first:
        return ""
    return (
        f"the effective learning rate α_e is {np.median(np.concatenate(first)):.2f} of α in the first tenth "
        f"of the steps and {np.median(np.concatenate(last)):.2f} of it in the last quarter (medians)"
    )


def _end(steps: Array, values: Array) -> Array:
    """The values in the last quarter of the steps."""
    return values[steps >= steps[-1] - END * (steps[-1] - steps[0])] if len(steps) else values


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
    texts = tuple(
        (f"{'Recipe' if r.checkpoint.has_recipe else 'Settings'} of {r.name}", r.checkpoint.recipe)
        for r in contents.runs
        if r.checkpoint.recipe
    )
    words, tables = (text, *contents.notes), (Table("Runs", _COLUMNS, rows),)
    return Section("runs", "What was run, and on what", words, tables=tables, texts=texts)


def _run(run: Run) -> tuple[Cell, ...]:
    c = run.checkpoint
    # A recorded loop knows neither its minibatches nor its seed.
    batch, seed = (c.learners * c.local_batch, c.seed) if c.has_recipe else (math.nan, math.nan)

    def named(of: dict[str, Any]) -> str:
        options = ", ".join(f"{k} = {v}" for k, v in of["options"].items())
        return f"{of['name'] or 'of its own'} {options}".strip()

    lasts = (values_of(run, name)[1] for name in ("test_loss", "train_loss", "consensus", "wall_s"))
    return (
        *text_cells(run.name, paper_name(c.algorithm), named(c.model)),
        Cell(f"{c.layout.size:,}", c.layout.size),
        *text_cells(named(c.data)),
        *(number(float(v)) for v in (c.data["train"], c.learners, batch, c.lr, seed)),
        Cell(f"{c.step:,}" + (" (diverged)" if c.diverged else ""), c.step),
        number(*last_test_error(run)),
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
    return Section("origins", "How each number was made", tables=(table,))


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
        options += ["--k", top] * (top > 1 or not result.lowest)
        parts = (result.lowest, math.isfinite(result.trace), result.density is not None)
        names = [name for name, held in zip(QUANTITIES, parts, strict=True) if held]
        options += ["--quantities", ",".join(names)] * bool(names)
        options += ["--matrix", result.matrix, "--seed", result.seed]
        options += ["--part", result.part] * bool(result.part)
        options += ["--precondition"] * bool(result.precondition)
    elif isinstance(result, Noise):
        options += ["--draws", len(result.direct), "--seed", result.seed]
    else:
        return f"{shlex.join(['landscape', name, *places])}, with the options that it was given"
    if (split := getattr(result, "split", "")) and not isinstance(result, Noise):
        options += ["--split", split]
    if (dtype := getattr(result, "dtype", "float32")) != "float32":
        options += ["--dtype", dtype]
    return shlex.join(map(str, ["landscape", name, *places, *options, "-o", path]))


# Commands whose name is not that of the file format.
_COMMANDS = {"landscape.surface": "contour", "landscape.escape": "saddles", "landscape.comparison": "compare"}

"""Heatmaps of Hessian ratios, spectra and noise with error bars, comparisons, and all other results."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from landscape import plots
from landscape.core.errors import InputError
from landscape.plots.curvature import density_scale
from landscape.plots.style import paper_name, style
from landscape.report import parts
from landscape.report.contents import Contents, lines_of, missing_of
from landscape.report.parts import Chart, Section, Table, trace
from landscape.results.base import Result
from landscape.results.comparison import Comparison, cell, footnotes, summary, verdict
from landscape.results.curvature import Spectrum
from landscape.results.grids import HessianGrid, Surface
from landscape.results.noise import NoiseEstimate
from landscape.results.shown import logarithmic

_RATIOS = [[0, "#fff7ec"], [0.25, "#fdd49e"], [0.5, "#fc8d59"], [0.75, "#d7301f"], [1, "#4f0000"]]
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_ESTIMATES = {
    "direct": "direct",
    "full_batch": "full batch",
    "eq4": "Eq. 4",
    "first_order": "first order",
}
_SPECTRUM = (
    "λ_1", "λ_min", "largest |λ|, 1", "lr · λ_max", "trace", "samples", "Hessian products", "converged",
)  # fmt: skip
_DENSITY_POINTS = 600
# Tables write the numbers of cells up to this size into them; larger grids cannot show them (ours).
_ANNOTATED = 64


def sections(contents: Contents) -> list[Section]:
    """Ratios, spectra, noise, and a section with pictures of whatever else there is."""
    made = [_ratios(contents), _spectra(contents), _noise(contents)]
    others = contents.others(Surface, HessianGrid, Spectrum, NoiseEstimate, Comparison)
    if others:
        pictures = [picture_of(kind.__name__, results) for kind, results in others.items()]
        notes = tuple(p for p in pictures if isinstance(p, str))
        drawn = tuple(p for p in pictures if isinstance(p, parts.Picture))
        told = [(kind.__name__, results) for kind, results in others.items() if results[0].describe()]
        tables = tuple(parts.described(kind, results) for kind, results in told)
        made.append(Section("more", "More results", notes, tables=tables, pictures=drawn))
    return made


def _section(
    name: str, title: str, text: str, results: Sequence[Result], charts: Sequence[Chart], table: Table,
    missing: tuple[parts.Missing, ...],
) -> Section:  # fmt: skip
    """A section about ``results``; without them it only says what is missing."""
    if not results:
        return Section(name, title, missing=missing)
    return Section(name, title, (text,), tuple(charts), (table,), missing=missing)


def picture_of(kind: str, results: Sequence[Result]) -> parts.Picture | str:
    """The picture that ``landscape plot`` makes of results of one kind, or why there is none."""
    try:
        figure = plots.draw(results)
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format="png", dpi=110)
    except InputError as error:
        return f"{kind}: not drawn, {error}"
    except (ArithmeticError, LookupError, ValueError) as error:  # numbers that no axis takes
        return f"{kind}: values that cannot be drawn ({error})"
    title = " ".join(figure.get_suptitle().split()) or kind
    labels = ", ".join(dict.fromkeys(" ".join(getattr(r, "label", "").split()) for r in results))
    alt = f"{title}{f': {labels}' if labels else ''}, as landscape plot draws it."
    return parts.Picture(title, alt, buffer.getvalue())


def _ratios(contents: Contents) -> Section:
    grids = contents.of(HessianGrid)
    lacking = () if grids else contents.runs
    missing = missing_of("Hessian ratios on a grid were not computed around", "hessian-grid", "", lacking)
    top = max((float(g.ratio[np.isfinite(g.ratio)].max(initial=0.0)) for g in grids), default=0.0) or 1.0
    charts = []
    for k, (grid, label) in enumerate(zip(grids, parts.labels_of(grids, "grid"), strict=True)):
        alt = (
            f"Heatmap of |λ_min|/|λ_max| of {label} on {grid.ratio.shape[1]} × {grid.ratio.shape[0]} points, "
            f"median {grid.describe()[0].number}."
        )
        charts.append(Chart(f"ratio-{k}", label, alt, _heatmap(grid, top)))
    text = (
        "The ratio |λ_min|/|λ_max| of the Hessian's extreme eigenvalues at each point of the plane, with one "
        "colour scale: low means nearly convex. A star marks points that did not converge; medians leave "
        "them out."
    )
    table = parts.described("Hessian ratios", grids)
    return _section("ratios", "Hessian ratios", text, grids, charts, table, missing)


def _heatmap(grid: HessianGrid, top: float) -> dict[str, Any]:
    heat: dict[str, Any] = {
        "type": "heatmap", "x": [f"{v:.3g}" for v in grid.x], "y": [f"{v:.3g}" for v in grid.y],
        "z": parts.listed(grid.ratio), "zmin": 0, "zmax": top, "colorscale": _RATIOS,
        "colorbar": {"thickness": 10, "title": {"text": "ratio"}},
    }  # fmt: skip
    if grid.ratio.size <= _ANNOTATED:
        texts = [
            [f"{v:.2g}{'' if c else '*'}" for v, c in zip(*row, strict=True)]
            for row in zip(grid.ratio, grid.trusted, strict=True)
        ]
        heat |= {"text": texts, "texttemplate": "%{text}"}
    axes = (parts.axis(f"{name}, along direction {k}", type="category") for name, k in (("x", 1), ("y", 2)))
    return {"data": [heat], "layout": dict(zip(("xaxis", "yaxis"), axes, strict=True))}


def _colors(contents: Contents, results: Sequence[Result]) -> list[str]:
    """The colours of the runs that results belong to; others for those of no run, or of a run seen before."""
    lines = dict(zip(contents.runs, lines_of(contents.runs), strict=True))
    free = [color for color in _COLORS if color not in {line["color"] for line in lines.values()}]
    return [
        lines[run]["color"] if (run := contents.run_of(result)) else free[k % len(free)]
        for k, result in enumerate(results)
    ]


def _spectra(contents: Contents) -> Section:
    spectra = contents.of(Spectrum)
    wanted = "--top-k 5 --ends --trace --density"
    missing = missing_of("There is no spectrum of", "spectrum", wanted, contents.lacking(Spectrum))
    labels, colors = parts.labels_of(spectra, "spectrum"), _colors(contents, spectra)
    labelled = list(zip(spectra, labels, colors, strict=True))
    text = (
        "Eigenvalues λ of the loss's Hessian at w_a. The error of an eigenvalue is its residual ‖Hv − λv‖: "
        "some eigenvalue lies within that distance, not necessarily the outermost. The error of the trace is "
        "one standard error. Error bars smaller than a dot are hidden by it."
    )
    table = parts.described("Eigenvalues and traces", spectra, _SPECTRUM)
    charts = [*_eigenvalues(labelled), *_densities(labelled)]
    return _section("spectra", "Spectra", text, spectra, charts, table, missing)


def _eigenvalues(labelled: Sequence[tuple[Spectrum, str, str]]) -> list[Chart]:
    traces, words = [], []
    for s, label, color in labelled:
        if not s.values.size:
            continue
        names = [f"λ_{i + 1}" for i in range(len(s.values) - s.lowest)] + ["λ_min"] * s.lowest
        look = {"mode": "markers", "marker": {"size": 7, "color": color}, "showlegend": False}
        error = {"type": "data", "array": parts.listed(s.residuals), "thickness": 1.5}
        row = [parts.chart_text(label)] * len(names)
        traces.append(trace("scatter", label, x=s.values, y=row, text=names, error_x=error, **look))
        words.append(f"{label} from {s.values.min():.3g} to {s.values.max():.3g}")
    if not traces:
        return []
    layout = {"xaxis": parts.axis("eigenvalue (nat)"), "yaxis": {"type": "category", "automargin": True}}
    alt = f"Eigenvalues with error bars: {'; '.join(words)}."
    return [Chart("eigenvalues", "Eigenvalues", alt, {"data": traces, "layout": layout})]


def _densities(labelled: Sequence[tuple[Spectrum, str, str]]) -> list[Chart]:
    dense = [s.density for s, _, _ in labelled if s.density]
    if not dense:
        return []
    at, floor = density_scale(dense, _DENSITY_POINTS)
    traces = []
    for k, (s, label, color) in enumerate(labelled):
        if s.density:
            again = color in [before for _, _, before in labelled[:k]]
            line = {"color": color, "width": 1.8, "dash": "dot" if again else "solid"}
            y = np.maximum(s.density.broadened(at), floor)
            traces.append(trace("scatter", label, mode="lines", x=at, y=y, line=line))
    yaxis = parts.axis("spectral density", type="log", exponentformat="power")
    layout = {"xaxis": parts.axis("eigenvalue (nat)"), "yaxis": yaxis, "showlegend": len(dense) > 1}
    names = ", ".join(label for s, label, _ in labelled if s.density)
    alt = f"Spectral densities on a logarithmic axis from {at[0]:.3g} to {at[-1]:.3g}: {names}."
    return [Chart("densities", "Spectral densities", alt, {"data": traces, "layout": layout})]


def _noise(contents: Contents) -> Section:
    noises = contents.of(NoiseEstimate)
    lacking = [] if noises else [run for run in contents.runs if run.checkpoint.learners > 1]
    missing = missing_of("Δ(2) was not estimated by its definition at", "noise", "", lacking)
    traces, words, every = [], [], []
    labels, colors = parts.labels_of(noises, "estimate"), _colors(contents, noises)
    for noise, label, color in zip(noises, labels, colors, strict=True):
        values, errors = np.transpose([noise.summary()[name] for name in _ESTIMATES])
        error = {"type": "data", "array": parts.listed(errors)}
        names = list(_ESTIMATES.values())
        traces.append(trace("bar", label, x=names, y=values, error_y=error, marker={"color": color}))
        said = (f"{name} {value:.3g}" for name, value in zip(names, values, strict=True))
        words.append(f"{label}: {', '.join(said)}")
        every += [*values]
    log = "log" if every and logarithmic(np.array(every)) else "linear"
    yaxis = parts.axis("Δ(2), squared weights", type=log, exponentformat="power")
    figure = {"data": traces, "layout": {"barmode": "group", "yaxis": yaxis, "showlegend": len(noises) > 1}}
    text = (
        "Δ(2), the noise that the spread of the learners adds to a step, in squared weights. Errors are one "
        "standard error over the drawn minibatches; full batch and Eq. 4 are exact on the data."
    )
    charts = [Chart("noise", "Δ(2) in four estimates", f"{'; '.join(words)}.", figure)]
    table = parts.described("Estimates of Δ(2)", noises)
    return _section("noise", "Noise of the spread", text, noises, charts, table, missing)


def comparison_section(contents: Contents) -> Section:
    """A table and a picture for each comparison."""
    found = comparisons(contents)
    pictures = [picture_of("comparison", [c]) for c in found]
    return Section(
        "comparisons",
        "Comparison of minima",
        tuple(line for c in found for line in (f"{', '.join(c.sides)}{_setting(c)}.", *footnotes(c))),
        tables=tuple(_comparison_table(c) for c in found),
        pictures=tuple(p for p in pictures if isinstance(p, parts.Picture)),
    )


def comparisons(contents: Contents) -> list[Comparison]:
    """The comparisons, with algorithms named as in the papers."""
    return [dataclasses.replace(c, sides=tuple(map(paper_name, c.sides))) for c in contents.of(Comparison)]


def comparison_sentences(contents: Contents) -> list[str]:
    """By how many measures one side is flatter, for each pair of each comparison."""
    return [f"{line}{_setting(c)}." for c in comparisons(contents) for line in summary(c)]


def _setting(c: Comparison) -> str:
    """What the sides are, after a comma."""
    at = f", at a training loss near {c.equal_loss:.3g} nat" if np.isfinite(c.equal_loss) else ""
    counts = np.bincount(c.side_of, minlength=len(c.sides))
    return f"{at}, over {' and '.join(map(str, counts))} seeds" if c.grouped else at


def _comparison_table(c: Comparison) -> Table:
    rows = []
    for q, title in enumerate(c.titles):
        unit = f" ({c.unit_names[q]})" if c.unit_names[q] != "1" else ""
        keys = np.nan_to_num(c.value[q], nan=-np.inf)
        values = [parts.Cell(cell(c, q, s), float(key)) for s, key in enumerate(keys)]
        name, over, said = parts.text_cells(f"{title}{unit}", c.over[q] or "–", verdict(c, q))
        rows.append((name, *values, over, said))
    columns = ("quantity", *c.sides, "standard error over", "difference")
    return Table(f"{', '.join(c.sides)}{_setting(c)}", columns, tuple(rows))

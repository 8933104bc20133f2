"""Heatmaps of Hessian ratios, spectra and noise with error bars, comparisons, and all other results."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from landscape import plots
from landscape.core.errors import InputError
from landscape.plots.style import paper_name, style
from landscape.report.contents import Contents, lines_of, missing_of
from landscape.report.parts import (
    Cell,
    Chart,
    Picture,
    Section,
    Table,
    chart_text,
    described,
    listed,
    text_cells,
)
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
    "λ_1",
    "λ_min",
    "largest |λ|, 1",
    "lr · λ_max",
    "trace",
    "samples",
    "Hessian products",
    "converged",
)
_DENSITY_POINTS = 600
# Tables write the numbers of cells up to this size into them; larger grids cannot show them (ours).
_ANNOTATED = 64


def sections(contents: Contents) -> list[Section]:
    """Ratios, spectra, noise, and a section with pictures of whatever else there is."""
    made = [_ratios(contents), _spectra(contents), _noise(contents)]
    known = (Surface, HessianGrid, Spectrum, NoiseEstimate, Comparison)
    others: dict[type[Result], list[Result]] = {}
    for found in contents.found:
        if not isinstance(found.result, known):
            others.setdefault(type(found.result), []).append(found.result)
    if others:
        pictures = [picture_of(kind.__name__, results) for kind, results in others.items()]
        notes = tuple(p for p in pictures if isinstance(p, str))
        drawn = tuple(p for p in pictures if isinstance(p, Picture))
        tables = tuple(
            described(kind.__name__, results) for kind, results in others.items() if results[0].describe()
        )
        made.append(Section("more", "More results", notes, tables=tables, pictures=drawn))
    return made


def picture_of(kind: str, results: Sequence[Result]) -> Picture | str:
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
    labels = ", ".join(dict.fromkeys(" ".join(str(getattr(r, "label", "")).split()) for r in results))
    return Picture(
        title, f"{title}{f': {labels}' if labels else ''}, as landscape plot draws it.", buffer.getvalue()
    )


def _ratios(contents: Contents) -> Section:
    grids = [grid for grid, _ in contents.of(HessianGrid)]
    lacking = () if grids else contents.runs
    missing = missing_of("Hessian ratios on a grid were not computed around", "hessian-grid", "", lacking)
    finite = [g.ratio[np.isfinite(g.ratio)] for g in grids]
    top = max((float(f.max()) for f in finite if f.size), default=1.0)
    charts = []
    for k, grid in enumerate(grids):
        label = grid.label or f"grid {k}"
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
    return Section(
        "ratios",
        "Hessian ratios",
        (text,) if grids else (),
        tuple(charts),
        (described("Hessian ratios", grids),) if grids else (),
        missing=missing,
    )


def _colors(contents: Contents, results: Sequence[Result]) -> list[str]:
    """The colours of the runs that results belong to; others for those of no run, or of a run seen before."""
    lines = dict(zip(contents.runs, lines_of(contents.runs), strict=True))
    free = [color for color in _COLORS if color not in {line["color"] for line in lines.values()}]
    return [
        lines[run]["color"] if (run := contents.run_of(result)) else free[k % len(free)]
        for k, result in enumerate(results)
    ]


def _heatmap(grid: HessianGrid, top: float) -> dict[str, Any]:
    texts = [
        [f"{v:.2g}{'' if c else '*'}" for v, c in zip(*row, strict=True)]
        for row in zip(grid.ratio, grid.trusted, strict=True)
    ]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": [f"{v:.3g}" for v in grid.x],
        "y": [f"{v:.3g}" for v in grid.y],
        "z": listed(grid.ratio),
        "zmin": 0,
        "zmax": top or 1.0,
        "colorscale": _RATIOS,
        "colorbar": {"thickness": 10, "title": {"text": "ratio"}},
    }
    if grid.ratio.size <= _ANNOTATED:
        trace |= {"text": texts, "texttemplate": "%{text}"}
    axis = {"type": "category"}
    layout = {
        "xaxis": {**axis, "title": {"text": "x, along direction 1"}},
        "yaxis": {**axis, "title": {"text": "y, along direction 2"}},
    }
    return {"data": [trace], "layout": layout}


def _spectra(contents: Contents) -> Section:
    spectra = [s for s, _ in contents.of(Spectrum)]
    lacking, colors = contents.lacking(Spectrum), _colors(contents, spectra)
    wanted = "--top-k 5 --ends --trace --density"
    missing = missing_of("There is no spectrum of", "spectrum", wanted, lacking)
    charts = [chart for chart in (_eigenvalues(spectra, colors), _densities(spectra, colors)) if chart]
    text = (
        "Eigenvalues λ of the loss's Hessian at w_a. The error of an eigenvalue is its residual ‖Hv − λv‖: "
        "some eigenvalue lies within that distance, not necessarily the outermost. The error of the trace is "
        "one standard error. Error bars smaller than a dot are hidden by it."
    )
    table = (described("Eigenvalues and traces", spectra, _SPECTRUM),) if spectra else ()
    return Section("spectra", "Spectra", (text,) if spectra else (), tuple(charts), table, missing=missing)


def _eigenvalues(spectra: Sequence[Spectrum], colors: Sequence[str]) -> Chart | None:
    traces, words = [], []
    for k, s in enumerate(spectra):
        if not s.values.size:
            continue
        top = len(s.values) - s.lowest
        names = [f"λ_{i + 1}" for i in range(top)] + ["λ_min"] * s.lowest
        label = s.label or f"spectrum {k}"
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": chart_text(label),
                "x": listed(s.values),
                "y": [chart_text(label)] * len(s.values),
                "text": names,
                "error_x": {"type": "data", "array": listed(s.residuals), "thickness": 1.5},
                "marker": {"size": 7, "color": colors[k]},
                "showlegend": False,
            }
        )
        words.append(f"{label} from {s.values.min():.3g} to {s.values.max():.3g}")
    if not traces:
        return None
    layout = {
        "xaxis": {"title": {"text": "eigenvalue (nat)"}},
        "yaxis": {"type": "category", "automargin": True},
    }
    alt = f"Eigenvalues with error bars: {'; '.join(words)}."
    return Chart("eigenvalues", "Eigenvalues", alt, {"data": traces, "layout": layout})


def _densities(spectra: Sequence[Spectrum], colors: Sequence[str]) -> Chart | None:
    dense = [(k, s, d) for k, s in enumerate(spectra) if (d := s.density)]
    if not dense:
        return None
    low = min(float(d.nodes.min()) - 5 * d.width() for _, _, d in dense)
    high = max(float(d.nodes.max()) + 5 * d.width() for _, _, d in dense)
    at = np.linspace(low, high, _DENSITY_POINTS)
    # Below a tenth of the peak of one eigenvalue out of P there is nothing to see, as in landscape plot.
    floor = min(0.1 / (d.size * d.width() * np.sqrt(2 * np.pi)) for _, _, d in dense)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": chart_text(s.label or f"spectrum {k}"),
            "x": listed(at),
            "y": listed(np.maximum(d.broadened(at), floor)),
            "line": {
                "color": colors[k],
                "width": 1.8,
                "dash": "solid" if colors.index(colors[k]) == k else "dot",
            },
        }
        for k, s, d in dense
    ]
    layout = {
        "xaxis": {"title": {"text": "eigenvalue (nat)"}},
        "yaxis": {"type": "log", "title": {"text": "spectral density"}, "exponentformat": "power"},
        "showlegend": len(dense) > 1,
    }
    names = ", ".join(s.label or f"spectrum {k}" for k, s, _ in dense)
    alt = f"Spectral densities on a logarithmic axis from {low:.3g} to {high:.3g}: {names}."
    return Chart("densities", "Spectral densities", alt, {"data": traces, "layout": layout})


def _noise(contents: Contents) -> Section:
    noises = [noise for noise, _ in contents.of(NoiseEstimate)]
    lacking = [] if noises else [run for run in contents.runs if run.checkpoint.learners > 1]
    missing = missing_of("Δ(2) was not estimated by its definition at", "noise", "", lacking)
    traces, words, colors = [], [], _colors(contents, noises)
    every = np.array([noise.summary()[name][0] for noise in noises for name in _ESTIMATES])
    for k, noise in enumerate(noises):
        summary = noise.summary()
        values, errors = (np.array([summary[name][i] for name in _ESTIMATES]) for i in (0, 1))
        label = noise.label or f"estimate {k}"
        traces.append(
            {
                "type": "bar",
                "name": chart_text(label),
                "x": list(_ESTIMATES.values()),
                "y": listed(values),
                "error_y": {"type": "data", "array": listed(errors)},
                "marker": {"color": colors[k]},
            }
        )
        words.append(
            f"{label}: {', '.join(f'{n} {v:.3g}' for n, v in zip(_ESTIMATES.values(), values, strict=True))}"
        )
    layout = {
        "barmode": "group",
        "yaxis": {
            "type": "log" if len(every) and logarithmic(every) else "linear",
            "title": {"text": "Δ(2), squared weights"},
            "exponentformat": "power",
        },
        "showlegend": len(noises) > 1,
    }
    chart = Chart(
        "noise", "Δ(2) in four estimates", f"{'; '.join(words)}.", {"data": traces, "layout": layout}
    )
    text = (
        "Δ(2), the noise that the spread of the learners adds to a step, in squared weights. Errors are one "
        "standard error over the drawn minibatches; full batch and Eq. 4 are exact on the data."
    )
    return Section(
        "noise",
        "Noise of the spread",
        (text,) if noises else (),
        (chart,) if noises else (),
        (described("Estimates of Δ(2)", noises),) if noises else (),
        missing=missing,
    )


def comparison_section(contents: Contents) -> Section:
    """A table and a picture for each comparison."""
    found = comparisons(contents)
    pictures = [picture_of("comparison", [c]) for c in found]
    return Section(
        "comparisons",
        "Comparison of minima",
        tuple(line for c in found for line in (f"{_heading(c)}.", *footnotes(c))),
        tables=tuple(_comparison_table(c) for c in found),
        pictures=tuple(p for p in pictures if isinstance(p, Picture)),
    )


def comparisons(contents: Contents) -> list[Comparison]:
    """The comparisons, with algorithms named as in the papers."""
    return [dataclasses.replace(c, sides=tuple(map(paper_name, c.sides))) for c, _ in contents.of(Comparison)]


def comparison_sentences(contents: Contents) -> list[str]:
    """By how many measures one side is flatter, for each pair of each comparison."""
    found = comparisons(contents)
    return [f"{line}{_setting(c)}." for c in found for line in summary(c)]


def _setting(c: Comparison) -> str:
    """What the sides are, after a comma."""
    at = f", at a training loss near {c.equal_loss:.3g} nat" if np.isfinite(c.equal_loss) else ""
    counts = np.bincount(c.side_of, minlength=len(c.sides))
    return f"{at}, over {' and '.join(map(str, counts))} seeds" if c.grouped else at


def _heading(c: Comparison) -> str:
    return f"{', '.join(c.sides)}{_setting(c)}"


def _comparison_table(c: Comparison) -> Table:
    rows = []
    for q, title in enumerate(c.titles):
        unit = f" ({c.unit_names[q]})" if c.unit_names[q] != "1" else ""
        values = [
            Cell(cell(c, q, s), float(np.nan_to_num(c.value[q, s], nan=-np.inf))) for s in range(len(c.sides))
        ]
        rows.append((*text_cells(f"{title}{unit}"), *values, *text_cells(c.over[q] or "–", verdict(c, q))))
    columns = ("quantity", *c.sides, "standard error over", "difference")
    return Table(_heading(c), columns, tuple(rows))

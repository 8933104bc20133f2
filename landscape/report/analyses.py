"""Heatmaps of Hessian ratios, spectra and noise with error bars, and pictures of the other results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from landscape import plots
from landscape.core.errors import InputError
from landscape.plots.style import style
from landscape.report.contents import Contents, missing_of
from landscape.report.parts import (
    Chart,
    Picture,
    Section,
    Table,
    chart_text,
    listed,
    number,
    text_cells,
)
from landscape.report.settings import lines_of
from landscape.results.base import Result
from landscape.results.comparison import Comparison
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
        made.append(Section("more", "More results", notes, pictures=drawn))
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
    charts, rows = [], []
    for k, grid in enumerate(grids):
        good = grid.ratio[grid.trusted & np.isfinite(grid.ratio)]
        middle = float(np.median(good)) if good.size else np.nan
        label = grid.label or f"grid {k}"
        alt = (
            f"Heatmap of |λ_min|/|λ_max| of {label} on {grid.ratio.shape[1]} × {grid.ratio.shape[0]} points, "
            f"median {middle:.3g}."
        )
        charts.append(Chart(f"ratio-{k}", label, alt, _heatmap(grid, top)))
        worst = max(
            (float(np.nanmax(e / np.abs(v), initial=0.0)) for e, v in _relative(grid)), default=np.nan
        )
        rows.append(
            (
                *text_cells(label),
                number(middle),
                *(number(float(f(good)) if good.size else np.nan) for f in (np.min, np.max)),
                number(worst),
                *text_cells(f"{good.size} of {grid.ratio.size}"),
            )
        )
    columns = (
        "grid",
        "median ratio",
        "lowest",
        "highest",
        "largest relative residual of λ_max",
        "converged points",
    )
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
        (Table("Hessian ratios", columns, tuple(rows)),) if grids else (),
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


def _relative(grid: HessianGrid) -> list[tuple[Any, Any]]:
    """Residuals of λ_max with the eigenvalues, where these are not 0."""
    there = np.isfinite(grid.lambda_max) & (grid.lambda_max != 0)
    return [(grid.residual_max[there], grid.lambda_max[there])]


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
    rows = []
    for k, s in enumerate(spectra):
        top = (s.values[0], s.residuals[0]) if s.values.size > s.lowest else (np.nan, np.nan)
        low = (s.values[-1], s.residuals[-1]) if s.lowest else (np.nan, np.nan)
        rows.append(
            (
                *text_cells(s.label or f"spectrum {k}", s.split or "–", s.kind),
                number(float(top[0]), float(top[1])),
                number(float(low[0]), float(low[1])),
                number(s.trace, s.trace_error),
                number(float(s.samples)),
                number(float(s.hvps)),
                *text_cells("yes" if s.converged else "NO"),
            )
        )
    columns = (
        "spectrum", "split", "matrix", "λ_max", "λ_min", "trace", "samples", "Hessian products", "converged",
    )  # fmt: skip
    text = (
        "Eigenvalues λ of the loss's Hessian at w_a. The error of an eigenvalue is its residual ‖Hv − λv‖: "
        "some eigenvalue lies within that distance, not necessarily the outermost. The error of the trace is "
        "one standard error. Error bars smaller than a dot are hidden by it."
    )
    table = (Table("Eigenvalues and traces, in nats", columns, tuple(rows)),) if rows else ()
    return Section("spectra", "Spectra", (text,) if rows else (), tuple(charts), table, missing=missing)


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
    traces, rows, words, colors = [], [], [], _colors(contents, noises)
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
        rows.append(
            (
                *text_cells(label),
                *(number(value, error or np.nan) for value, error in (summary[name] for name in _ESTIMATES)),
                number(noise.consensus),
            )
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
    columns = ("checkpoint", *_ESTIMATES.values(), "consensus distance")
    text = (
        "Δ(2), the noise that the spread of the learners adds to a step, in squared weights. Errors are one "
        "standard error over the drawn minibatches; full batch and Eq. 4 are exact on the data."
    )
    return Section(
        "noise",
        "Noise of the spread",
        (text,) if noises else (),
        (chart,) if noises else (),
        (Table("Estimates of Δ(2)", columns, tuple(rows)),) if noises else (),
        missing=missing,
    )

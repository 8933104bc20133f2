"""The sections of results: surfaces, learners along a run, ratios, spectra, noise and the rest."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from landscape import plots
from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import LandscapeError
from landscape.core.hdf5 import Array
from landscape.plots.curvature import density_scale
from landscape.plots.grids import starred
from landscape.plots.noise import ESTIMATES
from landscape.plots.style import paper_name, style
from landscape.plots.surface import PLANES, marks, scale
from landscape.reports import parts
from landscape.reports.contents import NAMED, Contents, Run, lines_of, missing_of
from landscape.reports.curves import values_of
from landscape.reports.parts import Chart, Missing, Picture, Section, Table
from landscape.results.base import Result
from landscape.results.comparison import Comparison, footnotes, summary, table_of
from landscape.results.grids import HessianGrid, Surface
from landscape.results.noise import Noise
from landscape.results.shown import logarithmic
from landscape.results.spectrum import Spectrum

# Points of all surfaces together: about 1.6 MB of the page. Finer grids are drawn with every k-th row (ours).
MAX_POINTS = 200_000


@dataclass(frozen=True)
class Group:
    """Surfaces of one kind of plane, with one color scale.

    Attributes:
        title: what they have in common.
        surfaces: (place among all surfaces, surface).
    """

    title: str
    surfaces: tuple[tuple[int, Surface], ...]

    @property
    def scale(self) -> dict[str, Any]:
        """The common scale: whether it is logarithmic, its ends, and the lines between; of log10 then."""
        shown = scale([surface.loss for _, surface in self.surfaces])
        log = isinstance(shown.norm, LogNorm)
        chosen = np.log10(shown.levels) if log else shown.levels
        inner = chosen[1:-1] if len(chosen) > 3 else chosen  # the outer ones may be moved to the extremes
        ends = {"low": chosen[0], "high": chosen[-1], "start": inner[0], "end": inner[-1]}
        return {"log": log, "size": float(inner[1] - inner[0]), **{k: float(v) for k, v in ends.items()}}


def drawn(contents: Contents) -> list[Surface]:
    """The surfaces that can be drawn: grids from 2 × 2 with a finite loss."""
    parts = [surface.nested() for surface in contents.of(Surface)]
    return [s for s in parts if min(s.loss.shape) >= 2 and np.isfinite(s.loss).any()]


def groups(contents: Contents) -> list[Group]:
    """The surfaces by kind of plane, normalization and split."""
    members: dict[str, list[tuple[int, Surface]]] = {}
    order = {kind: k for k, kind in enumerate(PLANES)}  # the plane that all checkpoints share comes first
    for k, surface in sorted(enumerate(drawn(contents)), key=lambda at: order.get(at[1].kind, len(order))):
        members.setdefault(_title(surface), []).append((k, surface))
    return [Group(title, tuple(surfaces)) for title, surfaces in members.items()]


def data(contents: Contents) -> dict[str, Any]:
    """The surfaces and the scales of their groups, as the page's script takes them."""
    every = groups(contents)
    group_of = {k: i for i, group in enumerate(every) for k, _ in group.surfaces}
    stride = _stride(contents)
    return {
        "surfaces": [_surface(s, stride, group_of[k]) for k, s in enumerate(drawn(contents))],
        "groups": [{"title": parts.chart_text(group.title), "scale": group.scale} for group in every],
        "stride": stride,
    }


def _stride(contents: Contents) -> int:
    total = sum(surface.loss.size for surface in drawn(contents))
    return math.ceil(math.sqrt(total / MAX_POINTS)) if total > MAX_POINTS else 1


def sections(contents: Contents) -> list[Section]:
    """A section of contours for each group, and the three-dimensional view of all surfaces."""
    every = groups(contents)
    missing = missing_of("There is no contour around", "contour", "", contents.lacking(Surface))
    if not every:
        return [Section("contours-0", "Contours", missing=missing)]
    made = []
    for i, group in enumerate(every):
        title = f"Contours: {group.title}" if len(every) > 1 else "Contours"
        charts = tuple(_chart(k, surface) for k, surface in group.surfaces)
        tables = (parts.described("These surfaces", [s for _, s in group.surfaces]),)
        linked, lacking = f"group-{i}" * (len(charts) > 1), missing if group is every[-1] else ()
        words = (_intro(group, contents),)
        made.append(Section(f"contours-{i}", title, words, charts, tables, missing=lacking, linked=linked))
    text = (
        "Height and color are the loss, on one scale for both views; turning one turns the other. Dots are "
        "learners or checkpoints, at the height of the surface below them. Drag to turn, or use the buttons."
    )
    return [*made, Section("space", "In three dimensions", (text,), widget="scene")]


def _title(surface: Surface) -> str:
    norm = f", normalization: {surface.norm}" if surface.kind == "random" else ""
    loss = f"{surface.split} loss" if surface.split else "loss"
    return f"{loss} over {PLANES.get(surface.kind, surface.kind)}{norm}"


def _intro(group: Group, contents: Contents) -> str:
    size = group.scale["size"]
    spaced = f"Lines are {size:.3g} apart."
    if group.scale["log"]:
        spaced = f"The scale is logarithmic: each line is {100 * (10**size - 1):.0f}% above the last."
    text = f"{group.title[0].upper()}{group.title[1:]}, in nats. {spaced}"
    if len(group.surfaces) > 1:
        text += (
            " All panels have one color scale and the same lines. Point at a place, or move there with the "
            "arrow keys, and the other panels show the same coordinates."
        )
    if (stride := _stride(contents)) > 1:
        text += f" Of these fine grids, every {stride}th row and column is drawn; numbers are of all points."
    return text


def _chart(k: int, surface: Surface) -> Chart:
    center, low, high, *_ = (row.value for row in surface.describe())
    ny, nx = surface.loss.shape
    label = surface.label or f"surface {k}"
    ends = f"from {low:.4g} to {high:.4g}, {center:.4g} near the center"
    alt = f"Contours of the loss of {label} on {nx} × {ny} points, {ends}."
    return Chart(f"surface-{k}", label, alt, {"surface": k})


def _surface(surface: Surface, stride: int, group: int) -> dict[str, Any]:
    ((lowest,), _, _), *_ = marks(surface)
    return {
        "label": parts.chart_text(surface.label or "surface"), "group": group, "kind": surface.kind,
        "x": parts.listed(surface.x[::stride]), "y": parts.listed(surface.y[::stride]),
        "z": parts.listed(surface.loss[::stride, ::stride]), "axes": [*map(parts.chart_text, surface.axes)],
        "lowest": parts.listed(lowest), "markers": _markers(surface),
    }  # fmt: skip


def _markers(surface: Surface) -> list[dict[str, Any]]:
    """The weights that define the plane, or its center."""
    if not len(surface.markers):
        return [{"x": 0, "y": 0, "text": "center, w_a", "role": "mean"}]
    roles = {"pca": "path", "learners": "learner", "between": "anchor"}
    role = [roles.get(surface.kind, "anchor")] * len(surface.markers)
    if surface.kind in ("pca", "learners"):
        role[-1] = "mean"
    losses = surface.marker_loss if len(surface.marker_loss) == len(role) else [math.nan] * len(role)
    made = []
    for place, label, loss, r in zip(surface.markers, surface.labels, losses, role, strict=True):
        x, y = parts.listed(place)
        own = f", own loss {loss:.4g}" if math.isfinite(loss) else ""
        made.append({"x": x, "y": y, "text": parts.chart_text(label) + own, "role": r})
    return made


MAX_FRAMES = 60  # step files of one run, at equal distances (ours: a slider has no place for more)
FEWEST = 3  # step files: a plane of the trajectory takes two before the last
_NO_PLANE = {
    "learners": "There is no plane through the learners of",
    "pca": "There is no plane through the trajectory of",
}
# Of the history, what stands next to a frame: (column, name, digits).
_READINGS = (
    ("train_loss", "training loss", "{:.4g}"),
    ("consensus", "consensus distance", "{:.3g}"),
    ("lr_lambda_max", "lr·λ_max", "{:.3g}"),
    ("lr_lambda_limit", "limit", "{:.3g}"),
)


def scrubber_section(contents: Contents) -> tuple[Section, list[dict[str, Any]]]:
    """The section, and for each run with a plane of its learners or trajectory the frames."""
    scrubbers, without = [], []
    planeless: dict[str, list[Run]] = {}
    for run in contents.runs:
        shown = enumerate(drawn(contents))
        planes = [(k, s) for k, s in shown if s.kind in _NO_PLANE and contents.run_of(s) is run]
        files = frames_of(run)
        if len(files) < FEWEST:
            without.append(run)
        elif not planes:
            planeless.setdefault(plane_of(run), []).append(run)
        else:
            frames = [Checkpoint.load(path, whole_history=False) for path in files]
            checkpoints = [c for c in frames if c.layout == run.checkpoint.layout]
            scrubbers += [_scrubber(run, k, surface, checkpoints) for k, surface in planes]
    missing: list[Missing] = []
    for kind, runs in planeless.items():
        missing += missing_of(_NO_PLANE[kind], "contour", f"--plane {kind}", runs)
    if without:
        names = "; ".join(run.name for run in without[:NAMED])
        few = f"There are fewer than {FEWEST} checkpoints step-*.h5 next to {names}."
        trained = any(run.checkpoint.has_recipe for run in without)
        advice = (
            "landscape train RECIPE --set checkpoint.every=50" if trained else "Recorder(…, save_every=50)"
        )
        missing.append(Missing(few, advice))
    text = (
        "Each dot is a learner, the star is their mean w_a, the line is the path of w_a. All are "
        "projected onto the plane. The distance from the plane stands below. The contour is that of "
        "the file, around the run's end."
    )
    widget = "scrubber" if scrubbers else ""
    title = "Learners along the run"
    return Section("scrubber", title, (text,), missing=tuple(missing), widget=widget), scrubbers


def plane_of(run: Run) -> str:
    """The kind of plane for the frames of a run: of its learners if three of them differ, else "pca"."""
    weights = run.checkpoint.weights
    return "learners" if len(weights) >= 3 and bool((weights != weights[0]).any()) else "pca"


def frames_of(run: Run) -> list[Path]:
    """The step files of a run, at most MAX_FRAMES, the last one among them."""
    if not run.checkpoint.has_recipe and run.path.name != "last.h5":
        return []
    files = [path for path in run_folder.steps(run.path.parent) if _step_of(path) <= run.checkpoint.step]
    chosen = np.linspace(0, len(files) - 1, min(len(files), MAX_FRAMES)).round().astype(int)
    return [files[k] for k in chosen]


def _step_of(path: Path) -> int:
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0


def _scrubber(run: Run, k: int, surface: Surface, checkpoints: list[Checkpoint]) -> dict[str, Any]:
    frames = []
    for c in sorted(checkpoints, key=lambda c: c.step):
        points, _ = _project(surface, c.weights.numpy())
        (mean,), (away,) = _project(surface, c.mean.numpy()[None])
        text = f"{_reading(run, c.step)}; w_a is {away:.3g} from the plane"
        dots = {"points": parts.listed(points), "mean": parts.listed(mean)}
        frames.append({"step": c.step, "text": text, **dots})
    plane = "plane of the learners" if surface.kind == "learners" else "plane of the trajectory"
    return {"name": f"{parts.chart_text(run.name)}: {plane}", "surface": k, "frames": frames}


def _project(surface: Surface, weights: Array) -> tuple[Array, Array]:
    """Coordinates (n, 2) of the points of the plane nearest to ``weights`` (n, P), and their distances."""
    away = weights.astype(np.float64) - surface.center
    directions = np.asarray(surface.directions, dtype=np.float64)
    places = np.linalg.solve(directions @ directions.T, directions @ away.T).T
    rest = away - places @ directions
    return places, np.linalg.norm(rest, axis=1)


def _reading(run: Run, step: int) -> str:
    """The numbers of the history at the last row up to ``step`` that has each."""
    words = [f"step {step:,}"]
    for column, name, form in _READINGS:
        steps, values = values_of(run, column)
        if (before := values[steps <= step]).size:
            words.append(f"{name} {form.format(before[-1])}")
    return ", ".join(words)


_RATIOS = [[0, "#fff7ec"], [0.25, "#fdd49e"], [0.5, "#fc8d59"], [0.75, "#d7301f"], [1, "#4f0000"]]
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SPECTRUM = (
    "λ_1", "λ_min", "largest |λ|, 1", "lr · λ_max", "trace", "samples", "Hessian products", "converged",
)  # fmt: skip
_DENSITY_POINTS = 600
# Tables write the numbers of cells up to this size into them; larger grids cannot show them (ours).
_ANNOTATED = 64


def other_sections(contents: Contents) -> list[Section]:
    """Ratios, spectra, noise, and a section with pictures of whatever else there is."""
    made = [_ratios(contents), _spectra(contents), _noise(contents)]
    others = contents.others(Surface, HessianGrid, Spectrum, Noise, Comparison)
    if others:
        pictures = [picture_of(kind.__name__, results) for kind, results in others.items()]
        notes = tuple(p for p in pictures if isinstance(p, str))
        drawn = tuple(p for p in pictures if isinstance(p, Picture))
        described = [(kind.__name__, results) for kind, results in others.items() if results[0].describe()]
        tables = tuple(parts.described(kind, results) for kind, results in described)
        made.append(Section("more", "More results", notes, tables=tables, pictures=drawn))
    return made


def picture_of(kind: str, results: Sequence[Result]) -> Picture | str:
    """The picture that ``landscape plot`` makes of results of one kind, or why there is none."""
    try:
        figure = plots.draw(results)
        buffer = io.BytesIO()
        with style():
            figure.savefig(buffer, format="png", dpi=110)
    except LandscapeError as error:
        return f"{kind}: not drawn, {error}"
    except (ArithmeticError, LookupError, ValueError) as error:  # numbers that no axis takes
        return f"{kind}: values that cannot be drawn ({error})"
    title = " ".join(figure.get_suptitle().split()) or kind
    labels = ", ".join(dict.fromkeys(" ".join(getattr(r, "label", "").split()) for r in results))
    alt = f"{title}{f': {labels}' if labels else ''}, as landscape plot draws it."
    return Picture(title, alt, buffer.getvalue())


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
        "color scale: low means nearly convex. A star marks points that did not converge; medians leave "
        "them out."
    )
    tables = (parts.described("Hessian ratios", grids),)
    return Section("ratios", "Hessian ratios", (text,), tuple(charts), tables, missing=missing)


def _heatmap(grid: HessianGrid, top: float) -> dict[str, Any]:
    heat: dict[str, Any] = {
        "type": "heatmap", "x": [f"{v:.3g}" for v in grid.x], "y": [f"{v:.3g}" for v in grid.y],
        "z": parts.listed(grid.ratio), "zmin": 0, "zmax": top, "colorscale": _RATIOS,
        "colorbar": {"thickness": 10, "title": {"text": "ratio"}},
    }  # fmt: skip
    if grid.ratio.size <= _ANNOTATED:
        heat |= {"text": starred(grid).tolist(), "texttemplate": "%{text}"}
    axes = (parts.axis(f"{name}, along direction {k}", type="category") for name, k in (("x", 1), ("y", 2)))
    return {"data": [heat], "layout": dict(zip(("xaxis", "yaxis"), axes, strict=True))}


def _colors(contents: Contents, results: Sequence[Result]) -> list[str]:
    """The colors of the runs that results belong to; others for those of no run, or of a run seen before."""
    lines = dict(zip(contents.runs, lines_of(contents.runs), strict=True))
    free = [color for color in _COLORS if color not in {line["color"] for line in lines.values()}]
    runs = map(contents.run_of, results)
    return [lines[run]["color"] if run else free[k % len(free)] for k, run in enumerate(runs)]


def _spectra(contents: Contents) -> Section:
    spectra = contents.of(Spectrum)
    wanted = "--k 5 --quantities extremes,trace,density"
    missing = missing_of("There is no spectrum of", "spectrum", wanted, contents.lacking(Spectrum))
    labels, colors = parts.labels_of(spectra, "spectrum"), _colors(contents, spectra)
    labeled = list(zip(spectra, labels, colors, strict=True))
    text = (
        "Eigenvalues λ of the loss's Hessian at w_a. The error of an eigenvalue is its residual ‖Hv − λv‖: "
        "some eigenvalue lies within that distance, not necessarily the outermost. The error of the trace is "
        "one standard error. Error bars smaller than a dot are hidden by it."
    )
    tables = (parts.described("Eigenvalues and traces", spectra, _SPECTRUM),)
    charts = (*_eigenvalues(labeled), *_densities(labeled))
    return Section("spectra", "Spectra", (text,), charts, tables, missing=missing)


def _eigenvalues(labeled: Sequence[tuple[Spectrum, str, str]]) -> list[Chart]:
    traces, words = [], []
    for s, label, color in labeled:
        if not s.values.size:
            continue
        names = [f"λ_{i + 1}" for i in range(len(s.values) - s.lowest)] + ["λ_min"] * s.lowest
        look = {"mode": "markers", "marker": {"size": 7, "color": color}, "showlegend": False}
        error = {"type": "data", "array": parts.listed(s.residuals), "thickness": 1.5}
        row = [parts.chart_text(label)] * len(names)
        traces.append(parts.trace("scatter", label, x=s.values, y=row, text=names, error_x=error, **look))
        words.append(f"{label} from {s.values.min():.3g} to {s.values.max():.3g}")
    if not traces:
        return []
    layout = {"xaxis": parts.axis("eigenvalue (nat)"), "yaxis": {"type": "category", "automargin": True}}
    alt = f"Eigenvalues with error bars: {'; '.join(words)}."
    return [Chart("eigenvalues", "Eigenvalues", alt, {"data": traces, "layout": layout})]


def _densities(labeled: Sequence[tuple[Spectrum, str, str]]) -> list[Chart]:
    dense = [s.density for s, _, _ in labeled if s.density]
    if not dense:
        return []
    at, floor = density_scale(dense, _DENSITY_POINTS)
    traces = []
    for k, (s, label, color) in enumerate(labeled):
        if s.density:
            again = color in [before for _, _, before in labeled[:k]]
            line = {"color": color, "width": 1.8, "dash": "dot" if again else "solid"}
            y = np.maximum(s.density.broadened(at), floor)
            traces.append(parts.trace("scatter", label, mode="lines", x=at, y=y, line=line))
    yaxis = parts.axis("spectral density", type="log", exponentformat="power")
    layout = {"xaxis": parts.axis("eigenvalue (nat)"), "yaxis": yaxis, "showlegend": len(dense) > 1}
    names = ", ".join(label for s, label, _ in labeled if s.density)
    alt = f"Spectral densities on a logarithmic axis from {at[0]:.3g} to {at[-1]:.3g}: {names}."
    return [Chart("densities", "Spectral densities", alt, {"data": traces, "layout": layout})]


def _noise(contents: Contents) -> Section:
    noises = contents.of(Noise)
    lacking = [] if noises else [run for run in contents.runs if run.checkpoint.learners > 1]
    missing = missing_of("Δ(2) was not estimated by its definition at", "noise", "", lacking)
    traces, words, every = [], [], []
    labels, colors = parts.labels_of(noises, "estimate"), _colors(contents, noises)
    for noise, label, color in zip(noises, labels, colors, strict=True):
        values, errors = np.transpose([noise.means()[name] for name in ESTIMATES])
        error = {"type": "data", "array": parts.listed(errors)}
        names = [name.split("\n")[0] for name in ESTIMATES.values()]
        traces.append(parts.trace("bar", label, x=names, y=values, error_y=error, marker={"color": color}))
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
    charts = (Chart("noise", "Δ(2) in four estimates", f"{'; '.join(words)}.", figure),) if noises else ()
    tables = (parts.described("Estimates of Δ(2)", noises),)
    return Section("noise", "Noise of the spread", (text,), charts, tables, missing=missing)


def comparison_section(contents: Contents) -> Section:
    """A table and a picture for each comparison."""
    found = comparisons(contents)
    words = tuple(line for c in found for line in (f"{_heading(c)}.", *footnotes(c)))
    made = (picture_of("comparison", [c]) for c in found)
    drawn = tuple(p for p in made if isinstance(p, Picture))
    tables = tuple(_comparison_table(c) for c in found)
    return Section("comparisons", "Comparison of minima", words, tables=tables, pictures=drawn)


def comparisons(contents: Contents) -> list[Comparison]:
    """The comparisons, with algorithms named as in the papers."""
    return [dataclasses.replace(c, sides=tuple(map(paper_name, c.sides))) for c in contents.of(Comparison)]


def comparison_sentences(contents: Contents) -> list[str]:
    """By how many measures one side is flatter, for each pair of each comparison."""
    return [f"{line}{_setting(c)}." for c in comparisons(contents) for line in summary(c)]


def _setting(c: Comparison) -> str:
    """The setting of the sides, after a comma."""
    at = f", at a training loss near {c.equal_loss:.3g} nat" if np.isfinite(c.equal_loss) else ""
    counts = np.bincount(c.side_of, minlength=len(c.sides))
    return f"{at}, over {' and '.join(map(str, counts))} seeds" if c.grouped else at


def _heading(c: Comparison) -> str:
    return f"{', '.join(c.sides)}{_setting(c)}"


def _comparison_table(c: Comparison) -> Table:
    rows = []
    for (name, *numbers, over, said), values in zip(table_of(c), c.value, strict=True):
        keys = np.nan_to_num(values, nan=-np.inf).tolist()
        cells = map(parts.Cell, numbers, keys)
        rows.append((*parts.text_cells(name), *cells, *parts.text_cells(over, said)))
    columns = ("quantity", *c.sides, "standard error over", "difference")
    return Table(_heading(c), columns, tuple(rows))

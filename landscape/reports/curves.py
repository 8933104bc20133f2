"""Training curves: decimated so that no peak is lost, with the median of stretches where they are noisy."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from landscape.core.hdf5 import Array
from landscape.plots import style
from landscape.plots.training import LIMITS, PANELS, column_of, layers_of, unit_of
from landscape.reports.contents import Run, SeedGroup, lines_of, seed_groups
from landscape.reports.parts import Chart, Missing, Section, axis, listed, trace
from landscape.results.shown import WINDOW, running_quartiles

BUCKETS = 400  # of a curve: its lowest and highest point in each are drawn, two for each pixel (ours)
MANY = 40  # rows of a noisy curve above which its running median is drawn, too (ours)
FEWEST = 3  # runs of a setting for a median and a band (ours)
# Of logarithmic axes: their lower end relative to the median (a spread that is 0 but for rounding would make
# all else one line), and the decades below which ticks have decimal labels (ours).
FLOOR, SHORT = 1e-5, 4.0
# Not of charts: what others show, and what only recorded loops have.
_LEFT_OUT = ("lambda_max", "grad_norm2", "displacement2")
_NOISY = ("alpha_e", "delta", "delta_2_full", "consensus")  # medians are drawn, too
# Of charts with another column beside theirs: that column, its name and dash.
_BESIDE = {column: (limit, "limit of", "dash") for column, limit in LIMITS.items()}
_BESIDE["alpha_e"] = ("lr", "learning rate α of", "dot")
# What is said of runs without a column, and the setting that records it.
_ABSENT = {
    "lr_lambda_max": ("The sharpness λ_max along the runs was not recorded.", "monitor.sharpness=50"),
    "alpha_e": ("No step was decomposed into effective rate and noise.", "decompose.every=10"),
    "test_error": ("The test accuracy was not evaluated along the runs.", "evaluate.every=50"),
}


def decimate(x: Array, y: Array, buckets: int = BUCKETS) -> tuple[Array, Array]:
    """The lowest and the highest point of each of ``buckets`` stretches, and the first and the last point.

    Args:
        x, y: (T,), without NaN; a curve of at most 2·buckets points is returned as it is.

    Returns:
        Points of the curve, in order, at most 2·buckets + 2.
    """
    if len(y) <= 2 * buckets:
        return x, y
    edges = np.linspace(0, len(y), buckets + 1).astype(int)
    kept = {0, len(y) - 1}
    for low, high in itertools.pairwise(edges):
        kept |= {low + int(y[low:high].argmin()), low + int(y[low:high].argmax())}
    places = np.array(sorted(kept))
    return x[places], y[places]


def section(runs: Sequence[Run]) -> Section:
    """The curves of all runs, a chart for each quantity that any run recorded."""
    charts, missing = [], []
    for column in (column for column in PANELS if column not in _LEFT_OUT):
        if chart := _chart(runs, column):
            charts.append(chart)
        elif column in _ABSENT and any(run.checkpoint.has_recipe for run in runs):
            words, setting = _ABSENT[column]
            missing.append(Missing(words, f"landscape train RECIPE --set {setting}"))
    text = (
        f"A curve with more than {2 * BUCKETS} points is drawn by the lowest and the highest in each of "
        f"{BUCKETS} stretches, so that every peak is there. Thick lines of noisy quantities are running "
        f"medians over {100 * WINDOW:g}% of the steps. A setting with {FEWEST} runs or more is drawn as "
        "their median, in a band of all runs (for noisy quantities, between the quartiles). Dashed lines are "
        "the rules' limits, dotted ones the learning rates. A "
        f"logarithmic axis leaves zeros and negative values out, and begins at {FLOOR:g} of the median or "
        "above (drag it to see what is below)."
    )
    return Section("curves", "Training", (text,), tuple(charts), missing=tuple(missing), runs=True)


def values_of(run: Run, column: str) -> tuple[Array, Array]:
    """(step, value) of the rows in which a run has a finite value; the test error is in %."""
    values = column_of(run.checkpoint, column)
    there = np.isfinite(values)
    return run.checkpoint.history["step"][there], values[there]


def last_test_error(run: Run) -> tuple[float, float]:
    """(the last test error of a run in %, its standard error from the test samples); NaN where not known."""
    values, samples = values_of(run, "test_error")[1], run.checkpoint.data["test"]
    value = float(values[-1]) if len(values) else math.nan
    known = samples and 0 <= value <= 100
    return value, math.sqrt(value * (100 - value) / samples) if known else math.nan


def _chart(runs: Sequence[Run], column: str) -> Chart | None:
    traces, words, shown = [], [], []
    title, unit = PANELS[column][0], style.in_brackets(unit_of(column)).strip(" ()")
    first = title.split()[0]
    title = title if "·" in first else title[0].upper() + title[1:]  # not of a symbol, such as lr·λ_max
    log = PANELS[column][1] == "log"
    lines, settings = lines_of(runs), banded(runs)
    for setting in settings:
        traces += _band(setting, [values_of(runs[k], column) for k in setting.places], column, log)
    for k, (run, line) in enumerate(zip(runs, lines, strict=True)):
        x, y = values_of(run, column)
        if log and (y > 0).any():
            x, y = x[y > 0], y[y > 0]
        if not len(y) or not y.any():
            continue
        many = column in _NOISY and len(y) > MANY
        traces.append(_trace(run.name, k, decimate(x, y), line, 0.6 if many else 1.5, 0.25 if many else 1))
        if many:
            at, (_, middle, _) = running_quartiles(x, y)
            traces.append(_trace(f"{run.name}, running median", k, (at, middle), line, 2.5, 1))
        words.append(f"{run.name} from {y[0]:.3g} to {y[-1]:.3g}")
        shown.append(middle if many else y)
    if not traces:
        return None
    layers = layers_of([run.checkpoint for run in runs]) if column == "loss_change" else {}
    for (layer, y), color in zip(layers.items(), style.in_order(len(layers)), strict=True):
        there, x = np.isfinite(y), runs[0].checkpoint.history["step"]
        traces.append(trace("bar", layer, x=x[there], y=y[there], marker={"color": color}))
    yaxis = axis(unit)
    if log:
        yaxis |= _log_axis(np.concatenate([y[y > 0] for y in shown]))
    beside, name, dash = _BESIDE.get(column, ("", "", ""))
    if column in LIMITS:
        yaxis["rangemode"] = "tozero"
    if column == "alpha_e":  # an axis that shows the usual values, not the outliers
        rates = [y for run in runs if len(y := values_of(run, "lr")[1])]
        usual = float(np.quantile(np.abs(np.concatenate(shown)), 0.98))
        top = max([usual, *(float(y.max()) for y in rates)])
        yaxis["range"] = [-0.25 * top, 1.5 * top]
    for k, (run, line) in enumerate(zip(runs, lines, strict=True)):
        x, y = values_of(run, beside)
        of = next((s for s in settings if k in s.places), None)
        if len(y) and (of is None or k == of.places[0]):  # the runs of a setting have one limit
            shown_for, own = None if of else k, line | {"dash": dash}
            label = f"{name} {of.name if of else run.name}"
            line_beside = _trace(label, shown_for, _corners(x, y), own, 1.2, 0.9)
            traces.append(line_beside | {"legendgroup": "beside"})
    alt = f"{title} by step: {'; '.join(words)}."
    layout = {"xaxis": axis("step"), "yaxis": yaxis, "barmode": "relative", "showlegend": bool(layers)}
    return Chart(f"curve-{column}", title, alt, {"data": traces, "layout": layout})


def banded(runs: Sequence[Run]) -> list[SeedGroup]:
    """The settings with so many runs that their median and a band are drawn in place of each run."""
    return [setting for setting in seed_groups(runs) if len(setting.places) >= FEWEST]


def _band(
    setting: SeedGroup, given: Sequence[tuple[Array, Array]], column: str, log: bool
) -> list[dict[str, Any]]:
    """The median of a setting's runs by step, in a band: all runs; of noisy quantities, the quartiles."""
    several = [(x, y) for x, y in given if len(y) and y.any()]
    if len(several) < FEWEST:
        return []
    if column in _NOISY:
        steps, values = (np.concatenate(part) for part in zip(*several, strict=True))
        at, (low, middle, high) = running_quartiles(steps, values)
    else:
        at = functools.reduce(np.intersect1d, [x for x, _ in several])
        together = np.array([y[np.isin(x, at)] for x, y in several])
        low, middle, high = np.quantile(together, (0, 0.5, 1), axis=0)
    kept = np.flatnonzero(low > 0) if log else np.arange(len(at))
    if not len(kept):
        return []
    kept = kept[np.unique(np.linspace(0, len(kept) - 1, BUCKETS).astype(int))]
    around = np.concatenate([kept, kept[::-1]])
    edge = np.concatenate([high[kept], low[kept][::-1]])
    what = "quartiles" if column in _NOISY else "all runs"
    filled = trace(
        "scatter", f"{setting.name}, {what}", mode="lines", x=at[around], y=edge, fill="toself", opacity=0.25,
        fillcolor=setting.color, line={"width": 0, "color": setting.color}, hoverinfo="skip",
    )  # fmt: skip
    name, line = f"{setting.name}, median of {len(several)}", {"color": setting.color}
    return [filled, _trace(name, None, (at[kept], middle[kept]), line, 2.5, 1)]


def _log_axis(values: Array) -> dict[str, Any]:
    """A logarithmic axis for ``values``, from FLOOR of their median up; ticks at 1, 2, 5 if it is short."""
    if not len(values):
        return {}
    low = max(float(values.min()), FLOOR * float(np.median(values)))
    ends = np.log10([low / 1.15, 1.15 * float(values.max())])
    look: dict[str, Any] = {"type": "log", "range": listed(ends), "exponentformat": "power"}
    if ends[1] - ends[0] < SHORT:
        digits = (1, 2, 5) if ends[1] - ends[0] < SHORT / 2 else (1,)
        ticks = [d * 10.0**k for k in range(math.floor(ends[0]), math.ceil(ends[1])) for d in digits]
        look |= {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return look


def _trace(
    name: str,
    run: int | None,
    points: tuple[Array, Array],
    line: dict[str, str],
    width: float,
    opacity: float,
) -> dict[str, Any]:
    """A line of one run; ``meta`` is the run's place, by which the page hides it, or None."""
    x, y = points
    return trace(
        "scatter", name, mode="lines" if len(x) > 1 else "markers", x=x, y=y, line={**line, "width": width},
        marker={"color": line["color"]}, opacity=opacity, **({} if run is None else {"meta": run}),
    )  # fmt: skip


def _corners(x: Array, y: Array) -> tuple[Array, Array]:
    """The points between which a curve of constant pieces changes, then decimated."""
    change = np.flatnonzero(np.diff(y))
    places = np.unique(np.concatenate(([0], change, change + 1, [len(y) - 1])))
    return decimate(x[places], y[places])

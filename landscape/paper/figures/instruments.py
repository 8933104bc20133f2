"""Ours: batch sharpness, noise scale and disagreement along training, by mixing matrix and batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.hdf5 import Array
from landscape.paper import verdicts
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure
from landscape.paper.figures.edge import SETTINGS
from landscape.paper.figures.plateaus import COLORS, algorithm, named
from landscape.paper.scales import SMOKE_NOTE, mnist, seeds_of
from landscape.paper.verdicts import Effect, Rows, select
from landscape.plots.picture import panels
from landscape.plots.style import style

# Learners of the recipe mnist-fig2b-dpsgd. Total batches and steps (ours): a tenth of Figure 2's batch, that
# of Figure 2, and three times as much; they are below, near and above the noise scale. The plateau is reached
# within half of the steps.
LEARNERS, STEPS = 6, {198: 2000, 1998: 2000, 6000: 1000}
MEASURED = (
    "monitor.instruments=['lambda-max', 'batch-sharpness', 'noise-scale', 'disagreement']",
    "monitor.every=100",
    "monitor.draws=8",
    "monitor.top=10",  # the classes
)
NOTE = (
    "n = 6, α = 0.2, three seeds, measured every 100 steps: batch sharpness on 8 minibatches, Hessians on "
    "2,000 training samples, 10 eigenvectors; 1,000 steps at nB = 6000, else 2,000; all settings but α ours"
)
# Windows of the noise scale that are drawn as one (ours): one alone does not resolve DPSGD's ‖g‖².
WINDOWS = 3
# Rows of the two pictures: (column, label, scale of the axis).
SHARPNESS = (
    ("lr_batch_sharpness", "η × batch sharpness at $w_a$,\ntotal batch", "linear"),
    ("lr_learner_batch_sharpness", "η × batch sharpness at the\nlearners, their own batch", "linear"),
    ("noise_scale", "noise scale (samples)", "log"),
)
SPREAD = (
    ("spread_share", "share of the spread in\n10 sharpest directions", "linear"),
    ("gradient_share", "share of the gradient in\n10 sharpest directions", "linear"),
    ("disagreement_cost", "½ tr(HC), what the\nspread costs (nat)", "log"),
)


def _runs(scale: Scale) -> Runs:
    return {
        f"{batch} {name}/{seed}": mnist(
            scale, "fig2b-dpsgd", seed, f"batch={batch}", *algorithm(name), "decompose.every=0",
            "evaluate.every=500", *MEASURED, steps=steps,
        )
        for (batch, steps), name in itertools.product(STEPS.items(), SETTINGS)
        for seed in seeds_of(scale, 3)
    }  # fmt: skip


def measured(run: Checkpoint, column: str) -> Array:
    """The values of a column at the steps at which instruments measured."""
    at = np.isfinite(run.history["lambda_max"])
    values: Array = run.history.get(column, np.full(len(at), np.nan))[at]  # a record has no empty columns
    return values


def plateau(runs: Sequence[Checkpoint], column: str) -> float:
    """The median of a column over the second half of the runs; NaN where it was never computed."""
    late = np.concatenate([measured(r, column)[measured(r, "step") > r.step / 2] for r in runs])
    return float(np.median(late[np.isfinite(late)])) if np.isfinite(late).any() else float("nan")


def noise_scale(runs: Sequence[Checkpoint], first: float, last: float) -> float:
    """tr Σ/‖g‖², each averaged over the runs and their windows that end in (first, last]; NaN if ‖g‖² ≤ 0."""
    parts = []
    for column in ("noise_trace", "noise_norm2"):
        values = [measured(r, column)[_within(measured(r, "step"), first, last)] for r in runs]
        parts.append(float(np.nanmean(np.concatenate(values))))
    return parts[0] / parts[1] if parts[1] > 0 else float("nan")


def _within(steps: Array, first: float, last: float) -> Array:
    inside: Array = (steps > first) & (steps <= last)
    return inside


def _instruments(work: Work) -> Drawing:
    groups = {
        (batch, name): work.group(f"{batch} {name}") for batch, name in itertools.product(STEPS, SETTINGS)
    }
    ends = {key: _end(runs) for key, runs in groups.items()}
    with style():
        pictures = {"": _picture(groups, SHARPNESS), "-disagreement": _picture(groups, SPREAD)}
        if work.scale != "smoke":
            pictures["-disagreement"].suptitle(_spread(ends))
    return Drawing(
        pictures,
        [row for key, runs in groups.items() for run in runs for row in _rows(*key, run)],
        [
            Compared(
                f"nB = {batch}, {named(name)} (limit {end['limit']:.2f}): {'; '.join(FORMS)}", _numbers(end)
            )
            for (batch, name), end in ends.items()
        ],
        _conclusion(ends),
    )


# What the table of the gallery has of each setting: the name and the format of each column.
FORMS = {
    "ηλ_max": ("lr_lambda_max", ".2f"),
    "η × batch sharpness at w_a": ("lr_batch_sharpness", ".2f"),
    "at the learners": ("lr_learner_batch_sharpness", ".2f"),
    "noise scale": ("noise_scale", ",.0f"),
    "sharp share of the spread": ("spread_share", ".2f"),
    "of the gradient": ("gradient_share", ".2f"),
    "½ tr(HC)": ("disagreement_cost", ".2g"),
}


def _numbers(end: dict[str, float]) -> str:
    return "; ".join(f"{end[c]:{form}}" if np.isfinite(end[c]) else "–" for c, form in FORMS.values())


def _end(runs: Sequence[Checkpoint]) -> dict[str, float]:
    """The plateau of a setting, over its seeds."""
    columns = ("lr_lambda_max", *(column for column, _, _ in (*SHARPNESS[:2], *SPREAD)))
    values = {column: plateau(runs, column) for column in columns}
    step = runs[0].step
    return values | {"noise_scale": noise_scale(runs, step / 2, step), "limit": _limit(runs)}


def _judge(rows: Rows) -> list[Effect]:
    """At the smallest batch, by how much batch sharpness is nearer to the limit than λ_max, by setting."""
    low, effects = min(STEPS), []
    columns = ("lr_lambda_max", "lr_batch_sharpness", "lr_lambda_limit")
    for name in SETTINGS:
        chosen, gains = select(rows, batch=float(low), setting=name), []
        for seed in sorted(set(verdicts.column(chosen, "seed"))) if chosen else []:
            of_seed = select(chosen, seed=seed)
            late = [row for row in of_seed if row["step"] > max(verdicts.column(of_seed, "step")) / 2]
            middle = {c: np.nanmedian(verdicts.column(late, c)) for c in columns}
            with np.errstate(invalid="ignore"):  # a negative one has no ratio to the limit: not tested
                off = [abs(np.log(middle[c] / middle["lr_lambda_limit"])) for c in columns[:2]]
            gains.append(float(off[0] - off[1]))
        what = "how much nearer batch sharpness is to the limit than λ_max (logarithm of the ratio)"
        effects.append(Effect(f"nB = {low}, {named(name)}", what, tuple(gains)))
    return effects


def _conclusion(ends: dict[tuple[int, str], dict[str, float]]) -> str:
    """What came out."""
    low = min(STEPS)

    def off(end: dict[str, float], column: str) -> float:
        """The distance from the limit, as the logarithm of a ratio."""
        return float(abs(np.log(end[column] / end["limit"])))

    def nearer(column: str, found: Sequence[dict[str, float]]) -> str:
        """In how many settings the column is nearer to the limit than ηλ_max."""
        return (
            f"{sum(off(end, column) < off(end, 'lr_lambda_max') for end in found)} of {len(found)} settings"
        )

    def ratios(order: str, column: str) -> str:
        """The range of a column's plateau in units of SSGD's, over batches and mixings."""
        found = [end[column] / ends[batch, "SSGD"][column] for (batch, n), end in ends.items() if order in n]
        return f"{np.nanmin(found):.2g} to {np.nanmax(found):.2g}"

    small = [end for (batch, _), end in ends.items() if batch == low]
    ssgd, columns = ends[low, "SSGD"], ("lr_lambda_max", "lr_batch_sharpness", "lr_learner_batch_sharpness")
    plain, total, own = (ssgd[column] / ssgd["limit"] for column in columns)
    return (
        f"With the learners' own batches of {low // LEARNERS} samples, batch sharpness is nearer to the "
        f"limit than λ_max in {nearer(columns[2], small)}; at w_a with the total batch it is in "
        f"{nearer(columns[1], list(ends.values()))}. At nB = {low}, the second half of SSGD's training is at "
        f"{plain:.2f} of the limit by λ_max, {total:.2f} by batch sharpness at w_a, {own:.2f} by that of "
        f"the learners' batches. DPSGD's noise scale is {ratios('AWC', 'noise_scale')} times SSGD's in AWC "
        f"order, {ratios('ATC', 'noise_scale')} times in ATC order. {_spread(ends)}, which costs "
        f"{ratios('AWC', 'disagreement_cost')} times SSGD's in AWC order."
    )


def _spread(ends: dict[tuple[int, str], dict[str, float]]) -> str:
    """The finding of the second picture."""
    shares = [end["spread_share"] for end in ends.values() if np.isfinite(end["spread_share"])]
    return (
        f"The 10 sharpest directions have {min(shares):.2f} to {max(shares):.2f} of the learners' spread"
        if shares
        else "The learners have no spread"
    )


def _rows(batch: int, name: str, run: Checkpoint) -> list[dict[str, Any]]:
    """A row for each step at which instruments measured."""
    columns = (
        "lr_lambda_max", "lr_lambda_limit", "lr_batch_sharpness", "batch_sharpness_se",
        "lr_learner_batch_sharpness", "learner_batch_sharpness_se", "noise_trace", "noise_norm2",
        "spread_share", "spread_share_se", "gradient_share", "disagreement_cost", "disagreement_cost_se",
    )  # fmt: skip
    table = {column: measured(run, column) for column in ("step", *columns)}
    known = {"batch": batch, "setting": name, "seed": run.seed}
    return [
        known | {"step": int(table["step"][k])} | {c: float(table[c][k]) for c in columns}
        for k in range(len(table["step"]))
    ]


def _picture(
    groups: dict[tuple[int, str], list[Checkpoint]], shown: Sequence[tuple[str, str, str]]
) -> Picture:
    """A row of panels for each quantity, a column for each batch, a line for each setting."""
    picture, axes = panels(len(shown), len(STEPS), 3.9, 2.6, sharey="row")
    for k, ((column, label, scale), batch) in enumerate(itertools.product(shown, STEPS)):
        ax = axes[k]
        for name in SETTINGS:
            color, ls = COLORS[name.split()[0]], "--" if name.endswith("ATC") else "-"
            steps, values = _curve(groups[batch, name], column)
            ax.plot(steps, values, color=color, ls=ls, lw=1.4)
            if column.startswith("lr_"):
                ax.axhline(_limit(groups[batch, name]), color=color, lw=1.0, ls=":")
        if column == "noise_scale":
            ax.axhline(batch, color="#555555", lw=1.0, ls=":")
        ax.set_yscale(scale)
        if not k % len(STEPS):
            ax.set_ylabel(label)
        if k < len(STEPS):
            ax.set_title(f"nB = {batch}")
        if k >= len(axes) - len(STEPS):
            ax.set_xlabel("step")
    handles = [Line2D([], [], color=c, lw=1.8, label=named(n)) for n, c in COLORS.items()]
    handles.append(Line2D([], [], color="#555555", lw=1.4, ls="--", label="ATC order"))
    if shown is SHARPNESS:
        handles.append(Line2D([], [], color="#555555", lw=1.0, ls=":", label="limit; total batch"))
    picture.legend(handles=handles, loc="outside lower center", ncols=6)
    return picture


def _limit(runs: Sequence[Checkpoint]) -> float:
    return float(np.nanmax(measured(runs[0], "lr_lambda_limit")))


def _curve(runs: Sequence[Checkpoint], column: str) -> tuple[Array, Array]:
    """Steps, and the median over seeds; of the noise scale the ratio of means over seeds and WINDOWS."""
    steps = np.unique(np.concatenate([measured(run, "step") for run in runs]))
    if column == "noise_scale":
        width = WINDOWS * (steps[1] - steps[0])
        return steps, np.array([noise_scale(runs, step - width, step) for step in steps])
    found = [dict(zip(measured(r, "step"), measured(r, column), strict=True)) for r in runs]
    table = np.array([[curve.get(step, np.nan) for step in steps] for curve in found])
    if column == "disagreement_cost":  # of learners that agree it is rounding
        agree = [np.isnan(measured(r, "spread_share")).all() for r in runs]
        table[agree] = np.nan
    known = np.isfinite(table).any(0)
    return steps[known], np.nanmedian(table[:, known], 0)


figure(
    "instruments",
    "Further analyses",
    "batch sharpness, noise scale and disagreement along training, MNIST",
    "With small batches batch sharpness, not λ_max, settles at the limit (Andreyev and Beneventano, for "
    "plain SGD; other rules are ours). Beside it the noise scale (McCandlish et al. 2018), and how much of "
    "the learners' disagreement lies along the sharpest directions.",
    _runs,
    _judge,
    smoke=SMOKE_NOTE,
    laptop=NOTE,
    paper=NOTE,
)(_instruments)

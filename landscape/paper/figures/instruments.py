"""Ours: batch sharpness, noise scale and disagreement along training, by mixing matrix and batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Picture

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context
from landscape.paper.figure import Compared, Drawing, figure, handle
from landscape.paper.figures.edge import COLORS, SETTINGS, algorithm, named, settings_legend
from landscape.paper.scales import mnist_runs
from landscape.paper.verdicts import Effect, Rows, select, settings
from landscape.plots.picture import panels

# Learners of the recipe mnist-fig2b-dpsgd. Total batches and steps (ours): a tenth of Figure 2's batch, that
# of Figure 2, and three times as much; they are below, near and above the noise scale. The plateau is reached
# within half of the steps.
LEARNERS, STEPS = 6, {198: 2000, 1998: 2000, 6000: 1000}
MEASURED = (
    "decompose.every=0",
    "evaluate.every=500",
    "monitor.instruments=['lambda-max', 'batch-sharpness', 'noise-scale', 'disagreement']",
    "monitor.every=100",
    "monitor.draws=8",
    "monitor.k=10",  # the classes
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
# The columns of the CSV after the step.
COLUMNS = (
    "lr_lambda_max", "lr_lambda_limit", "lr_batch_sharpness", "batch_sharpness_se",
    "lr_learner_batch_sharpness", "learner_batch_sharpness_se", "noise_trace", "noise_norm2",
    "spread_share", "spread_share_se", "gradient_share", "disagreement_cost", "disagreement_cost_se",
)  # fmt: skip
# What the gallery's table has of each setting: the name and the format of each column.
FORMS = {
    "ηλ_max": ("lr_lambda_max", ".2f"),
    "η × batch sharpness at w_a": ("lr_batch_sharpness", ".2f"),
    "at the learners": ("lr_learner_batch_sharpness", ".2f"),
    "noise scale": ("noise_scale", ",.0f"),
    "sharp share of the spread": ("spread_share", ".2f"),
    "of the gradient": ("gradient_share", ".2f"),
    "½ tr(HC)": ("disagreement_cost", ".2g"),
}
FORM, AXES = "{batch} {setting}", {"batch": STEPS, "setting": SETTINGS}


def _changes(batch: int, setting: str) -> list[str]:
    return [f"batch={batch}", f"steps={STEPS[batch]}", algorithm(setting), *MEASURED]


def _measured(key: str, run: Checkpoint) -> list[dict[str, Any]]:
    """A row for each step at which instruments measured; a record has no empty columns."""
    at, none = np.isfinite(run.history["lambda_max"]), np.full(len(run.history["step"]), np.nan)
    table = pd.DataFrame({column: run.history.get(column, none) for column in ("step", *COLUMNS)})[at]
    return table.astype({"step": int}).to_dict("records")  # type: ignore[no-any-return]


def _late(rows: Rows) -> Rows:
    """The second half of each run."""
    last = rows.groupby(["batch", "setting", "seed"])["step"].transform("max")
    return rows[rows["step"] > last / 2]


def _ends(rows: Rows) -> Rows:
    """By batch and setting the medians over the second half of all seeds; of the noise scale, of means."""
    groups = _late(rows).groupby(["batch", "setting"], sort=False)
    ends = groups[list(COLUMNS)].median()
    ends["noise_scale"] = _ratio(groups[["noise_trace", "noise_norm2"]].mean())
    return ends.assign(limit=groups["lr_lambda_limit"].max())


def _ratio(means: Rows) -> Any:
    """tr Σ/‖g‖² of the means of both; NaN if ‖g‖² ≤ 0."""
    return means["noise_trace"] / means["noise_norm2"].where(means["noise_norm2"] > 0)


def _instruments(context: Context) -> Drawing:
    rows = context.table(FORM, AXES, _measured)
    ends = _ends(rows)
    pictures = {"": _picture(rows, ends, SHARPNESS), "-disagreement": _picture(rows, ends, SPREAD)}
    if context.scale != "smoke":
        pictures["-disagreement"].suptitle(_spread(ends))
    compared = []
    for (batch, name), end in ends.iterrows():
        values = [f"{end[c]:{form}}" if np.isfinite(end[c]) else "–" for c, form in FORMS.values()]
        what = f"nB = {batch}, {named(name)} (limit {end['limit']:.2f}): {'; '.join(FORMS)}"
        compared.append(Compared(what, "; ".join(values)))
    return Drawing(pictures, rows, compared, _conclusion(ends))


def _judge(rows: Rows) -> list[Effect]:
    """At the smallest batch, by how much batch sharpness is nearer to the limit than λ_max, by setting."""
    low, late, effects = min(STEPS), _late(rows), []
    what = "how much nearer batch sharpness is to the limit than λ_max (logarithm of the ratio)"
    columns = ["lr_lambda_max", "lr_batch_sharpness", "lr_lambda_limit"]
    for name in SETTINGS:
        middle = select(late, batch=low, setting=name).groupby("seed")[columns].median()
        with np.errstate(invalid="ignore"):  # a negative one has no ratio to the limit: not tested
            off = np.abs(np.log(middle[columns[:2]].div(middle[columns[2]], axis=0)))
        gains = tuple((off[columns[0]] - off[columns[1]]).tolist())
        effects.append(Effect(f"nB = {low}, {named(name)}", what, gains))
    return effects


def _conclusion(ends: Rows) -> str:
    """What came out."""
    low, columns = min(STEPS), ["lr_lambda_max", "lr_batch_sharpness", "lr_learner_batch_sharpness"]
    of_limit = ends[columns].div(ends["limit"], axis=0)
    with np.errstate(invalid="ignore"):  # a negative one is not near
        off = np.abs(np.log(of_limit))

    def nearer(column: str, found: Rows) -> str:
        """In how many settings the column is nearer to the limit than ηλ_max."""
        return f"{(found[column] < found['lr_lambda_max']).sum()} of {len(found)} settings"

    def ratios(order: str, column: str) -> str:
        """The range of a column's plateau in units of SSGD's, over batches and mixings."""
        found = ends[column] / ends[column].xs("SSGD", level="setting")
        found = found[[order in setting for _, setting in found.index]]
        return f"{found.min():.2g} to {found.max():.2g}"

    plain, total, own = of_limit.loc[low, "SSGD"]
    return (
        f"With the learners' own batches of {low // LEARNERS} samples, batch sharpness is nearer to the "
        f"limit than λ_max in {nearer(columns[2], off.loc[[low]])}; at w_a with the total batch it is in "
        f"{nearer(columns[1], off)}. At nB = {low}, the second half of SSGD's training is at "
        f"{plain:.2f} of the limit by λ_max, {total:.2f} by batch sharpness at w_a, {own:.2f} by that of "
        f"the learners' batches. DPSGD's noise scale is {ratios('AWC', 'noise_scale')} times SSGD's in AWC "
        f"order, {ratios('ATC', 'noise_scale')} times in ATC order. {_spread(ends)}, which costs "
        f"{ratios('AWC', 'disagreement_cost')} times SSGD's in AWC order."
    )


def _spread(ends: Rows) -> str:
    """The finding of the second picture."""
    low, high = ends["spread_share"].min(), ends["spread_share"].max()
    if np.isnan(low):
        return "The learners have no spread"
    return f"The 10 sharpest directions have {low:.2f} to {high:.2f} of the learners' spread"


def _picture(rows: Rows, ends: Rows, shown: Sequence[tuple[str, str, str]]) -> Picture:
    """A row of panels for each quantity, a column for each batch, a line for each setting."""
    picture, axes = panels(len(shown), len(STEPS), 3.9, 2.6, sharey="row")
    for k, ((column, label, scale), batch) in enumerate(itertools.product(shown, STEPS)):
        ax = axes[k]
        for name in settings(rows, "setting"):
            color, ls = COLORS[name.split()[0]], "--" if name.endswith("ATC") else "-"
            curve = _curve(select(rows, batch=batch, setting=name), column)
            ax.plot(curve.index, curve, color=color, ls=ls, lw=1.4)
            if column.startswith("lr_"):
                ax.axhline(ends["limit"][batch, name], color=color, lw=1.0, ls=":")
        if column == "noise_scale":
            ax.axhline(batch, color="#555555", lw=1.0, ls=":")
        ax.set_yscale(scale)
        if not k % len(STEPS):
            ax.set_ylabel(label)
        if k < len(STEPS):
            ax.set_title(f"nB = {batch}")
        if k >= len(axes) - len(STEPS):
            ax.set_xlabel("step")
    lines = [handle("ATC order", lw=1.4, ls="--")]
    if shown is SHARPNESS:
        lines.append(handle("limit; total batch", lw=1.0, ls=":"))
    settings_legend(picture, *lines, columns=6, lw=1.8)
    return picture


def _curve(rows: Rows, column: str) -> Any:
    """The median over seeds by step; of the noise scale the ratio of means over seeds and WINDOWS."""
    by_step = rows.groupby("step")
    if column == "noise_scale":
        parts = by_step[["noise_trace", "noise_norm2"]]
        sums, counts = (each.rolling(WINDOWS, min_periods=1).sum() for each in (parts.sum(), parts.count()))
        return _ratio(sums / counts)
    if column == "disagreement_cost":  # of learners that agree it is rounding
        agree = rows.groupby("seed")["spread_share"].transform("count") == 0
        return rows[column].mask(agree).groupby(rows["step"]).median().dropna()
    return by_step[column].median().dropna()


figure(
    "instruments", "Further analyses", "batch sharpness, noise scale and disagreement along training, MNIST",
    "With small batches batch sharpness, not λ_max, settles at the limit (Andreyev and Beneventano, for "
    "plain SGD; other rules are ours). Beside it the noise scale (McCandlish et al. 2018), and how much of "
    "the learners' disagreement lies along the sharpest directions.",
    mnist_runs(FORM, AXES, 3, "fig2b-dpsgd", _changes, smoke=1), _judge, laptop=NOTE,
)(_instruments)  # fmt: skip

"""Ours: batch sharpness, noise scale and disagreement along training, by mixing matrix and batch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from landscape.paper.context import Context, Ended
from landscape.paper.figure import Compared, Drawing, figure, handle, late
from landscape.paper.figures.edge import look_of, named, settings_legend
from landscape.paper.scales import declared
from landscape.paper.verdicts import Effect, Rows, select, settings
from landscape.plots.picture import panels
from landscape.plots.training import column_of

# Windows of the noise scale that are drawn as one (ours): one alone does not resolve DPSGD's ‖g‖².
WINDOWS = 3
SHOWN = declared()["instruments_shown"]
# The columns of the CSV after the step.
COLUMNS: list[str] = SHOWN["columns"]
_RUN = "batch", "setting", "seed"


def _measured(run: Ended) -> Rows:
    """A row for each step at which instruments measured; a record has no empty columns."""
    table = pd.DataFrame({column: column_of(run.end, column) for column in ("step", *COLUMNS)})
    return table[np.isfinite(run.end.history["lambda_max"])].astype({"step": int})


def _ends(rows: Rows) -> Rows:
    """Medians over the second half of all seeds, by batch and setting; the noise scale is that of means."""
    groups = late(rows, *_RUN).groupby(["batch", "setting"], sort=False)
    ends = groups[COLUMNS].median()
    ends["noise_scale"] = _ratio(groups[["noise_trace", "noise_norm2"]].mean())
    return ends.assign(limit=groups["lr_lambda_limit"].max())


def _ratio(means: Rows) -> Any:
    """The tr Σ/‖g‖² of the means of both; NaN if ‖g‖² ≤ 0."""
    return means["noise_trace"] / means["noise_norm2"].where(means["noise_norm2"] > 0)


def _judge(rows: Rows) -> list[Effect]:
    """At the smallest batch, by how much batch sharpness is nearer to the limit than λ_max, by setting."""
    effects, half = [], late(rows, *_RUN)
    what = "how much nearer batch sharpness is to the limit than λ_max (logarithm of the ratio)"
    columns, low = ["lr_lambda_max", "lr_batch_sharpness", "lr_lambda_limit"], rows["batch"].min()
    for name in settings(rows, "setting"):
        middle = select(half, batch=low, setting=name).groupby("seed")[columns].median()
        with np.errstate(invalid="ignore"):  # a negative one has no ratio to the limit: not tested
            off = np.abs(np.log(middle[columns[:2]].div(middle[columns[2]], axis=0)))
        gains = tuple((off[columns[0]] - off[columns[1]]).tolist())
        effects.append(Effect(f"nB = {low:g}, {named(name)}", what, gains))
    return effects


@figure("instruments", _judge)
def _instruments(context: Context) -> Drawing:
    rows = context.table(_measured)
    ends, compared = _ends(rows), list[Compared]()
    for (batch, name), end in ends.iterrows():
        values = [f"{end[c]:{form}}" if np.isfinite(end[c]) else "–" for c, form in SHOWN["forms"].values()]
        what = f"nB = {batch}, {named(name)} (limit {end['limit']:.2f}): {'; '.join(SHOWN['forms'])}"
        compared.append(Compared(what, "; ".join(values)))
    pictures = {"": _picture(rows, ends, "sharpness"), "-disagreement": _picture(rows, ends, "spread")}
    return Drawing(pictures, rows, compared)


def _picture(rows: Rows, ends: Rows, which: str) -> Any:
    """A row of panels for each quantity, a column for each batch, a line for each setting."""
    batches, shown = settings(rows, "batch"), SHOWN[which]
    picture, axes = panels(len(shown), len(batches), 3.9, 2.6, sharey="row")
    for ax, ((column, label, scale), batch) in zip(axes, itertools.product(shown, batches), strict=True):
        for name in settings(rows, "setting"):
            color, atc = look_of(name)
            curve = _curve(select(rows, batch=batch, setting=name), column)
            ax.plot(curve.index, curve, color=color, ls="--" if atc else "-", lw=1.4)
            if column.startswith("lr_"):
                ax.axhline(ends["limit"][batch, name], color=color, lw=1.0, ls=":")
        if column == "noise_scale":
            ax.axhline(batch, color="#555555", lw=1.0, ls=":")
        ax.set_yscale(scale)
        place = ax.get_subplotspec()
        if place.is_first_col():
            ax.set_ylabel(label)
        if place.is_first_row():
            ax.set_title(f"nB = {batch}")
        if place.is_last_row():
            ax.set_xlabel("step")
    lines = [handle("ATC order", lw=1.4, ls="--")]
    if which == "sharpness":
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

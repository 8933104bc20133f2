"""Ours: each algorithm at its own edge of stability, what of M decides, and instruments along training.

Then the rates at which training converges, of DPSGD-2021, and (our choice) a tuned LAMB.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Ended
from landscape.paper.figure import (
    Compared,
    Drawing,
    compare_with_paper,
    declared,
    figure,
    handle,
    last,
    late,
    mean_and_spread,
    test_error,
)
from landscape.paper.figures.landscapes import median_rise
from landscape.paper.figures.large_batch import classes
from landscape.paper.verdicts import (
    Effect,
    Numbers,
    Rows,
    by_seed,
    difference,
    effect_of,
    paired_effect,
    select,
    settings,
)
from landscape.plots.picture import caption, numbered, panels, shared_legend
from landscape.plots.style import DARK, OTHER, PALE, color_of, log_axis, shades, ticks_at
from landscape.plots.training import column_of
from landscape.training.topology import Mixing

MIXINGS = ("full", "ring(2)", "ring(1)")
COLORS = {"SSGD": color_of("ssgd"), **dict(zip(MIXINGS, shades(color_of("dpsgd"), 3), strict=True))}
# The relative residual up to which an eigenvalue counts as converged, and what counts as near a limit (our
# choice).
RESIDUAL, NEAR = 0.05, (0.67, 1.5)
LEVEL, ERROR, RISE = "plateau_lr_lambda_max", "test_error_percent", "median_rise_nat"
# The column with the largest stable ηλ of a run's rule, NaN where nobody has it.
LIMIT, SHARPNESS = "lr_lambda_limit", "largest_lr_lambda_max"


def named(setting: str) -> str:
    """Return a setting's name for the legend: a mixing is one of DPSGD."""
    return setting if setting == "SSGD" else f"DPSGD {setting}"


def look_of(setting: str) -> tuple[Any, bool]:
    """Return the color of a setting, and whether it is DPSGD in ATC order."""
    return COLORS[setting.split()[0]], setting.endswith("ATC")


def plateau(run: Checkpoint) -> float:
    """Return the median of ηλ_max over the second half of the run; NaN if nothing was recorded.

    A value counts unless its residual says that the search has not converged.
    """
    values, steps = run.history["lr_lambda_max"], run.history["step"]
    unconverged = run.history["lambda_max_residual"] > RESIDUAL * np.abs(run.history["lambda_max"])
    late = values[np.isfinite(values) & ~unconverged & (steps > run.step / 2)]
    return float(np.median(late)) if len(late) else float("nan")


def settings_legend(picture: Any, *more: Any, columns: int, **look: Any) -> None:
    """Draw the legend of a picture, with the colors of COLORS in this ``look``, and ``more`` entries."""
    handles = [handle(named(name), color=color, **look) for name, color in COLORS.items()]
    picture.legend(handles=[*handles, *more], loc="outside lower center", ncols=columns)


# ---- Each algorithm at its own edge


def _judge_edge(rows: Rows) -> list[Effect]:
    """Judge each setting's plateau against its limit, their order in AWC order, and ATC against SSGD."""
    effects, what = [], "plateau of ηλ_max"
    for rate in settings(rows, "lr"):
        for pair in (("SSGD", "full AWC"), ("full AWC", "ring(1) AWC")):
            where = f"α = {rate:g}, {pair[0]} less {pair[1]}"
            effects.append(paired_effect(where, what, rows, LEVEL, lr=rate, setting=pair))
        for mixing in MIXINGS:
            where, two_settings = f"α = {rate:g}, {mixing} ATC / SSGD", (f"{mixing} ATC", "SSGD")
            how: dict[str, Any] = {"times": True, "claimed": NEAR}
            effects.append(paired_effect(where, what, rows, LEVEL, lr=rate, setting=two_settings, **how))
    for rate, name in settings(rows, "lr", "setting"):
        levels = [by_seed(rows, column, lr=rate, setting=name) for column in (LEVEL, "limit")]
        effects.append(effect_of(f"α = {rate:g}, {name}", f"{what} / limit", *levels, **how))
    return effects


@figure("edge", _judge_edge)
def _edge(context: Context) -> Drawing:
    """Draw the seeds' ηλ_max as thin lines, their median as a thick one, the limit dashed."""

    def measure(run: Ended) -> dict[str, Any]:
        values = {LEVEL: plateau(run.end), "limit": last(run.end, LIMIT), ERROR: test_error(run.end)}
        return values | {"diverged": run.end.diverged}

    rows = context.table(measure)
    rates = settings(rows, "lr")
    picture, axes = panels(2, len(rates), 4.2, 3.3, sharey=True)
    for (column, rate), name in itertools.product(enumerate(rates), settings(rows, "setting")):
        color, atc = look_of(name)
        runs = [run.end for run in context.ended(lr=rate, setting=name)]
        curves = [pd.Series(run.history["lr_lambda_max"], run.history["step"]) for run in runs]
        table = pd.concat([curve[np.isfinite(curve)] for curve in curves], axis=1).sort_index()
        for row in (0, 1) if name == "SSGD" else (int(atc),):
            ax = axes[column + len(rates) * row]
            ax.plot(table, color=color, lw=0.4, alpha=0.4)
            ax.plot(table.median(axis=1), color=color, lw=1.7)
            ax.axhline(last(runs[0], LIMIT), color=color, lw=1.2, ls="--")
    for ax, (order, rate) in zip(axes, itertools.product(("AWC", "ATC"), rates), strict=True):
        ax.set(title=f"α = {rate:g}, DPSGD in {order} order", xlabel="step")
    for ax in axes[:: len(rates)]:
        ax.set_ylabel(r"$\eta\lambda_{max}$ of $w_a$")
    axes[0].set_ylim(0, 3)
    settings_legend(picture, handle("its limit on ηλ", lw=1.2, ls="--"), columns=5, lw=1.8)
    text = "Thin lines: seeds; thick lines: their median. η is the rate α; values above 3 are not shown."
    caption(picture, f"{text} In ATC order all limits are that of SSGD.")
    what = "plateau of ηλ_max, α = {lr:g}, {setting} (limit {limit:.2f})"
    return Drawing({"": picture}, rows, compare_with_paper(rows, what, LEVEL))


# ---- Flatness and test error


def _correlation(rows: Rows) -> float:
    """Return the correlation of log λ_max with the log rise of the loss.

    NaN from fewer than three rows where both are positive.
    """
    pairs = rows[["lambda_max_nat", RISE]].to_numpy(float)
    pairs = np.log(pairs[np.isfinite(pairs).all(1) & (pairs > 0).all(1)])
    return float(np.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else float("nan")


def _judge_follows(rows: Rows) -> list[Effect]:
    """Judge SSGD against DPSGD ring(2) in AWC order by rate, and the correlation over all settings."""
    effects = []
    for rate in settings(rows, "lr"):
        where = f"α = {rate:g}, SSGD and ring(2) AWC"
        pair: dict[str, Any] = {"lr": rate, "setting": ("SSGD", "ring(2) AWC")}
        what = "test error, the first less the second (points)"
        effects.append(paired_effect(where, what, rows, ERROR, **pair))
        what = "rise of the loss, the first / the second"
        effects.append(paired_effect(where, what, rows, RISE, times=True, **pair))
    together = tuple(_correlation(of_seed) for _, of_seed in rows.groupby("seed"))
    return [*effects, Effect("all settings of a seed", "correlation of log λ_max with log rise", together)]


@figure("edge-follows", _judge_follows)
def _follows(context: Context) -> Drawing:
    """Test error and rise of the loss against the final sharpness, by rate: a point for each run."""

    def measure(run: Ended) -> dict[str, Any]:
        sharpness, error = plateau(run.end) / run.values["lr"], test_error(run.end)
        return {"lambda_max_nat": sharpness, ERROR: error, RISE: median_rise(context.contour(run.last))}

    rows = context.table(measure)
    rates, quantities = settings(rows, "lr"), {RISE: "median rise of the loss (nat)", ERROR: "test error (%)"}
    picture, axes = panels(2, len(rates), 3.4, 2.7)
    for ax, (quantity, rate) in zip(axes, itertools.product(quantities, rates), strict=True):
        for name, group in select(rows, lr=rate).groupby("setting", sort=False):
            color, atc = look_of(name)
            look = {"color": color, "marker": "o", "mfc": "none" if atc else color}
            ax.plot(group["lambda_max_nat"], group[quantity], ls="none", ms=5, **look)
        log_axis(ax.xaxis)
        log_axis(ax.yaxis, 2)
    for ax, rate in zip(axes, rates, strict=False):
        ax.set_title(f"α = {rate:g}")
    for ax, label in zip(axes[:: len(rates)], quantities.values(), strict=True):
        ax.set_ylabel(label)
    axes[-len(rates) // 2].set_xlabel(r"$\lambda_{max}$ of $w_a$, second half (nat)")
    atc_order = handle("ATC order", marker="o", mfc="none", ls="none")
    settings_legend(picture, atc_order, columns=5, marker="o", ls="none")
    text = "A point a run; filled: SSGD, AWC order. Rise: over a plane around w_a."
    caption(picture, text)
    chosen = rows[rows["setting"].isin(["SSGD", "ring(2) AWC", "ring(2) ATC"])]
    compared = compare_with_paper(chosen, "test error (%), α = {lr:g}, {setting}", ERROR, mean_and_spread)
    compared.append(Compared("correlation of log λ_max with log rise", f"{_correlation(rows):.2f}"))
    return Drawing({"": picture}, rows, compared)


# ---- Lazy mixing: the same gap, or the same ω_min

LEARNERS = 6
# By how much another ω_min moves the plateau, and what counts as the same (our choice).
CLAIMED = {"the same gap": (1.25, np.inf), "the same ω_min": (0.8, 1.25)}


def _judge_lazy(rows: Rows) -> list[Effect]:
    """Judge the powers of 1 + ω_min and of the gap that fit the sharpness, and the families."""
    powers = []
    for _, of_seed in rows.groupby("seed", sort=False):
        x = np.stack([np.ones(len(of_seed)), np.log(1 + of_seed["omega_min"]), np.log(of_seed["gap"])])
        if len(of_seed) > 3 and (of_seed[LEVEL] > 0).all():
            powers.append(np.linalg.lstsq(x.T, np.log(of_seed[LEVEL].to_numpy()), rcond=None)[0][1:].tolist())
    effects = [
        Effect("six mixings", f"power of sharpness in {what}", tuple(p[k] for p in powers), claimed)
        for k, what, claimed in ((0, "1 + ω_min", (0.5, 1.5)), (1, "the spectral gap", (-0.25, 0.25)))
    ]
    for family, claimed in CLAIMED.items():
        first, *other_settings = settings(select(rows, panel=family), "setting")
        for name in other_settings:
            where, what = f"{family}: {name} / {first}", "plateau of ηλ_max"
            how: dict[str, Any] = {"times": True, "claimed": claimed, "setting": (name, first)}
            effects.append(paired_effect(where, what, rows, LEVEL, panel=family, **how))
    return effects


@figure("edge-lazy", _judge_lazy)
def _lazy(context: Context) -> Drawing:
    rows = context.table(lambda run: {LEVEL: plateau(run.end)})
    mixings = [Mixing(name, LEARNERS, 0) for name in rows["setting"]]
    rows["gap"], rows["omega_min"] = [m.gap for m in mixings], [m.omega_min for m in mixings]
    picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
    looks = zip("os", shades(color_of("dpsgd"), 3)[1:], strict=True)
    for (family, table), (marker, color) in zip(rows.groupby("panel", sort=False), looks, strict=True):
        for ax, at in zip(axes, (1 + table["omega_min"], table["gap"]), strict=True):
            ax.plot(at, table[LEVEL], marker, color=color, mfc="none", ms=6, label=family)
    axes[0].plot([0.5, 1.8], [0.5, 1.8], color=OTHER, lw=0.9, ls=":", label="the limit 1 + ω_min")
    axes[0].set(xlabel="1 + ω_min of the mixing matrix", ylabel=r"plateau of $\eta\lambda_{max}$")
    axes[1].set_xlabel("its spectral gap")
    shared_legend(picture, axes[:1], ncols=3)
    what = "plateau of ηλ_max, gap {gap:.3g}, ω_min {omega_min:+.3g} ({setting})"
    return Drawing({"": picture}, rows, compare_with_paper(rows, what, LEVEL))


# ---- Each optimizer at the edge of its own geometry

# What a sharpness is divided by its limit, by the instrument that measured it.
MEASURES = {
    "lr_lambda_max": "lr_lambda_limit",
    "lr_preconditioned_lambda_max": "lr_preconditioned_limit",
    "lr_generalized_sharpness": "lr_generalized_limit",
}
# What counts as settled at the limit, where the paper says "around or above", and the training loss below
# which cross-entropy is flat whatever the rate is (Cohen et al. 2021); both ours.
SETTLED, LEARNED = (0.7, 1.3), 0.1


def _of_limit(run: Ended) -> Rows:
    """Return the sharpness over its limit at each step at which it was measured, and the loss there."""
    history = run.end.history
    ratios = [column_of(run.end, value) / column_of(run.end, limit) for value, limit in MEASURES.items()]
    table = pd.DataFrame({"step": history["step"], "loss": history["loss"], "ratio": np.fmax.reduce(ratios)})
    return table[np.isfinite(table["ratio"])].astype({"step": int})


def _settled(rows: Rows) -> Rows:
    """Return the second half of the steps up to which a run had not learned its data by heart."""
    return late(rows[rows["loss"] > LEARNED], "rule", "optimizer", "seed")


def _judge_geometries(rows: Rows) -> list[Effect]:
    """Judge the median of each run, by rule and optimizer."""
    effects = []
    for (rule, optimizer), group in _settled(rows).groupby(["rule", "optimizer"], sort=False):
        values = tuple(group.groupby("seed")["ratio"].median().tolist())
        effects.append(Effect(f"{optimizer}, {rule}", "η × sharpness / limit", values, SETTLED, ratio=True))
    return effects


@figure("edge-geometries", _judge_geometries)
def _geometries(context: Context) -> Drawing:
    """Draw a panel for each optimizer: seeds as thin lines, their median as a thick one, by rule."""
    rows = context.table(_of_limit)
    optimizers, rules = settings(rows, "optimizer"), settings(rows, "rule")
    picture, axes = panels(2, len(optimizers) // 2, 3.0, 2.5, sharex=True, sharey=True)
    for ax, optimizer in zip(axes, optimizers, strict=True):
        ax.axhspan(*SETTLED, color=PALE, alpha=0.5, lw=0, zorder=0)
        for rule in rules:
            curves = select(rows, optimizer=optimizer, rule=rule).pivot_table("ratio", "step", "seed")
            color = color_of(rule)
            ax.plot(curves, color=color, lw=0.4, alpha=0.5)
            ax.plot(curves.median(axis=1), color=color, lw=1.7)
        ax.set_title(optimizer)
    axes[0].set_ylim(0, 2.5)
    for ax in axes[len(axes) // 2 :]:
        ax.set_xlabel("step")
    for ax in axes[:: len(axes) // 2]:
        ax.set_ylabel("η × sharpness / limit")
    handles = [handle(rule, color=color_of(rule), lw=1.8) for rule in rules]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    what = "η × sharpness / limit, {optimizer}, {rule}"
    runs = _settled(rows).groupby(["optimizer", "rule", "seed"], sort=False, as_index=False)
    return Drawing({"": picture}, rows, compare_with_paper(runs["ratio"].median(), what, "ratio"))


# Windows of the noise scale that are drawn as one (our choice: one alone does not resolve DPSGD's ‖g‖²).
WINDOWS = 3
LAYOUT = declared()["instruments_layout"]
# The columns of the CSV after the step.
COLUMNS: list[str] = LAYOUT["columns"]
_RUN = "batch", "setting", "seed"


def _measured(run: Ended) -> Rows:
    """Return a row for each step at which instruments measured; a record has no empty columns."""
    table = pd.DataFrame({column: column_of(run.end, column) for column in ("step", *COLUMNS)})
    return table[np.isfinite(run.end.history["lambda_max"])].astype({"step": int})


def _ends(rows: Rows) -> Rows:
    """Return medians over the second half of all seeds, by batch and setting; ratios are of means."""
    groups = late(rows, *_RUN).groupby(["batch", "setting"], sort=False)
    ends = groups[COLUMNS].median()
    ends["noise_scale"] = _ratio(groups[["noise_trace", "noise_norm2"]].mean())
    return ends.assign(limit=groups["lr_lambda_limit"].max())


def _ratio(means: Rows) -> Any:
    """Return the tr Σ/‖g‖² of the means of both; NaN if ‖g‖² ≤ 0."""
    return means["noise_trace"] / means["noise_norm2"].where(means["noise_norm2"] > 0)


def _judge(rows: Rows) -> list[Effect]:
    """Judge how much nearer to the limit batch sharpness is than λ_max, at the smallest batch."""
    effects, half = [], late(rows, *_RUN)
    what = "how much nearer batch sharpness is to the limit than λ_max (logarithm of the ratio)"
    columns, low = ["lr_lambda_max", "lr_batch_sharpness", "lr_lambda_limit"], rows["batch"].min()
    for name in settings(rows, "setting"):
        middle = select(half, batch=low, setting=name).groupby("seed")[columns].median()
        with np.errstate(invalid="ignore"):  # a negative one has no ratio to the limit: not tested
            deviation = np.abs(np.log(middle[columns[:2]].div(middle[columns[2]], axis=0)))
        gains = tuple((deviation[columns[0]] - deviation[columns[1]]).tolist())
        effects.append(Effect(f"nB = {low:g}, {named(name)}", what, gains))
    return effects


@figure("instruments", _judge)
def _instruments(context: Context) -> Drawing:
    rows = context.table(_measured)
    ends, compared = _ends(rows), list[Compared]()
    for (batch, name), end in ends.iterrows():
        values = [f"{end[c]:{form}}" if np.isfinite(end[c]) else "–" for c, form in LAYOUT["forms"].values()]
        what = f"nB = {batch}, {named(name)} (limit {end['limit']:.2f}): {'; '.join(LAYOUT['forms'])}"
        compared.append(Compared(what, "; ".join(values)))
    pictures = {"": _picture(rows, ends, "sharpness"), "-disagreement": _picture(rows, ends, "spread")}
    return Drawing(pictures, rows, compared)


def _picture(rows: Rows, ends: Rows, which: str) -> Any:
    """Return a row of panels for each quantity, a column for each batch, a line for each setting."""
    batches, rows_of_panels = settings(rows, "batch"), LAYOUT[which]
    picture, axes = panels(len(rows_of_panels), len(batches), 3.9, 2.6, sharey="row")
    for ax, ((column, label, scale), batch) in zip(
        axes, itertools.product(rows_of_panels, batches), strict=True
    ):
        for name in settings(rows, "setting"):
            color, atc = look_of(name)
            curve = _curve(select(rows, batch=batch, setting=name), column)
            ax.plot(curve.index, curve, color=color, ls="--" if atc else "-", lw=1.4)
            if column.startswith("lr_"):
                ax.axhline(ends["limit"][batch, name], color=color, lw=1.0, ls=":")
        if column == "noise_scale":
            ax.axhline(batch, color=DARK, lw=1.0, ls=":")
        ax.set_yscale(scale)
        position = ax.get_subplotspec()
        if position.is_first_col():
            ax.set_ylabel(label)
        if position.is_first_row():
            ax.set_title(f"nB = {batch}")
        if position.is_last_row():
            ax.set_xlabel("step")
    lines = [handle("ATC order", lw=1.4, ls="--")]
    if which == "sharpness":
        lines.append(handle("limit; total batch", lw=1.0, ls=":"))
    settings_legend(picture, *lines, columns=6, lw=1.8)
    if which == "spread":
        picture.suptitle("Spread and gradient along the sharpest directions, MNIST")
        text = "Sharp: along the 10 sharpest directions of the Hessian H; C: covariance of the learners"
        caption(picture, f"Medians over seeds. {text}; in ATC order, full mixing leaves no spread.")
    return picture


def _curve(rows: Rows, column: str) -> Any:
    """Return the median over seeds by step; of the noise scale the ratio of means over seeds and WINDOWS."""
    by_step = rows.groupby("step")
    if column == "noise_scale":
        parts = by_step[["noise_trace", "noise_norm2"]]
        sums, counts = (
            windows.rolling(WINDOWS, min_periods=1).sum() for windows in (parts.sum(), parts.count())
        )
        return _ratio(sums / counts)
    if column == "disagreement_cost":  # of learners that agree it is rounding
        agree = rows.groupby("seed")["spread_share"].transform("count") == 0
        return rows[column].mask(agree).groupby(rows["step"]).median().dropna()
    return by_step[column].median().dropna()


def _draw(ax: Any, rows: Rows, column: str, offset: float = 1.0, **look: Any) -> None:
    """Draw the median over seeds and its range by rate, all rates times ``offset``."""
    by = rows.groupby("lr")[column].agg(["median", "min", "max"]).dropna()
    reach = [by["median"] - by["min"], by["max"] - by["median"]]
    ax.errorbar(by.index * offset, by["median"], reach, capsize=3, **look)


# ---- The rates at which training converges

DPSGD = ("DPSGD", "DPSGD in ATC order")
LOOKS = {"SSGD": color_of("ssgd"), **dict(zip(DPSGD, shades(color_of("dpsgd"), 3)[1:], strict=True))}


def _bound(rows: Rows) -> float:
    """Return the test error (%) of a converged run: below halfway from the best to a guess (our choice)."""
    return (float(rows[ERROR].min()) + float(rows["chance_percent"].iloc[0])) / 2


def largest_rates(rows: Rows) -> dict[str, Numbers]:
    """Return the largest rate up to which a seed converges, by algorithm and seed, of one task.

    In doublings; one below the smallest rate where no rate converges. Rates below the first one that
    converges are too low for the number of steps, and say nothing about the largest.
    """
    below, none = _bound(rows), float(np.log2(rows["lr"].min())) - 1

    def largest(runs: Rows) -> float:
        good = runs[ERROR].to_numpy() < below
        first = int(good.argmax())
        last = first + int(np.append(~good[first:], True).argmax()) - 1
        return float(np.log2(runs["lr"].iloc[last])) if good.any() else none

    groups = rows.sort_values("lr").groupby(["algorithm", "seed"])[["lr", ERROR]]
    rates = groups.apply(largest)
    return {name: rates[name] for name in settings(rows, "algorithm")}


def _judge_rates(rows: Rows) -> list[Effect]:
    """Judge by how many doublings of the rate DPSGD converges beyond SSGD, by task and form."""
    effects, what = [], "doublings of the rate"
    for task, of_task in rows.groupby("task", sort=False):
        edges = largest_rates(of_task)
        ssgd = edges.pop("SSGD", None)
        for a, edge in edges.items() if ssgd is not None else ():
            effects.append(effect_of(f"{task}: {a} beyond SSGD", what, edge, ssgd))
    return effects


@figure("lr-divergence", _judge_rates)
def _rates(context: Context) -> Drawing:
    """Draw median and range by rate: each task's test error with its bound, and ηλ_max with its limits."""

    def measure(run: Ended) -> dict[str, Any]:
        end, guess = run.end, 100 * (1 - 1 / classes(run.end))
        return {
            ERROR: guess if end.diverged else test_error(end),
            "chance_percent": guess,
            SHARPNESS: float(pd.Series(end.history["lr_lambda_max"]).replace(np.inf, np.nan).max()),
            "limit": last(end, LIMIT),
            "diverged": end.diverged,
        }

    rows = context.table(measure)
    tasks, compared = [task_rows for _, task_rows in rows.groupby("task", sort=False)], list[Compared]()
    panels_shown = [(ERROR, task_rows) for task_rows in tasks]
    panels_shown += [(SHARPNESS, task_rows) for task_rows in tasks if (task_rows[SHARPNESS] > 0).any()]
    names = numbered("panel", len(panels_shown))
    picture, axes = panels(-(-len(panels_shown) // 2), 2, 4.6, 2.9, [*names, *[""] * (len(names) % 2)])
    for ax, (quantity, of_task) in zip(axes, panels_shown, strict=True):
        _draw_task(ax, of_task, quantity)
    for of_task in tasks:
        what = f"largest rate at which every seed converges, {of_task['task'].iloc[0]}"
        for a, edges in largest_rates(of_task).items():
            compared.append(Compared(f"{what}, {a}", f"{2.0 ** edges.min():.4g}"))
    shared_legend(picture, axes, ncols=3)
    remark = "A run converges where its test error is below the dotted line, halfway from the best to chance."
    return Drawing({"": picture}, rows, compared, remark)


def _draw_task(ax: Any, rows: Rows, quantity: str) -> None:
    for (name, color), marker, offset in zip(LOOKS.items(), "osD", (0.96, 1.0, 1.04), strict=True):
        of_rule = select(rows, algorithm=name)
        _draw(ax, of_rule, quantity, offset, marker=marker, color=color, label=name)
        for limit in of_rule["limit"].dropna()[:1] if quantity == SHARPNESS else ():
            ax.axhline(limit, color=color, lw=1.0, ls="--")
    if quantity == ERROR:
        ax.axhline(_bound(rows), color=OTHER, lw=0.9, ls=":")
    rates = sorted(settings(rows, "lr"))
    ax.set_xscale("log")
    ticks_at(ax.xaxis, rates, [f"{rate:g}" for rate in rates])
    log_axis(ax.yaxis)
    what = {ERROR: "test error of $w_a$ (%)", SHARPNESS: r"largest $\eta\lambda_{max}$ (lines: limits)"}
    ax.set(title=rows["task"].iloc[0], xlabel="learning rate α", ylabel=what[quantity])


# ---- Whether the advantage of decentralized training outlives a tuned adaptive optimizer

SETTINGS = {"SSGD": "o", "ring(2) AWC": "s"}


def _best(rows: Rows, kind: str) -> list[Numbers]:
    """Return the test errors by seed at the rate with the lowest median, of each setting."""
    errors = []
    for name in SETTINGS:
        chosen = select(rows, optimizer=kind, setting=name)
        errors.append(by_seed(chosen, ERROR, lr=chosen.groupby("lr")[ERROR].median().idxmin()))
    return errors


def _judge_lamb(rows: Rows) -> list[Effect]:
    """Judge the share of DPSGD's advantage with SGD that LAMB removes, by seed at the best rates."""
    sgd, lamb = (a.sub(b).dropna() for a, b in (_best(rows, kind) for kind in ("SGD", "LAMB")))
    plain = Effect("with SGD", "test error of SSGD less DPSGD (points)", tuple(sgd))
    none = "" if plain.holds else "with SGD there is no advantage that could vanish"
    what = "test error of SSGD less DPSGD, with SGD less with LAMB (points)"
    return [Effect("at each one's best rate", what, difference(sgd, lamb), untested=none)]


@figure("lamb", _judge_lamb)
def _lamb(context: Context) -> Drawing:
    rows = context.table(lambda run: {ERROR: test_error(run.end)})
    rows = rows[["optimizer", "lr", "setting", "seed", ERROR]]
    picture, (ax,) = panels(1, 1, 6.8, 3.8)
    for (name, marker), kind in itertools.product(SETTINGS.items(), ("LAMB", "SGD")):
        color, label = look_of(name)[0], f"{named(name.replace(' AWC', ''))}, {kind}"
        look: Any = {"color": color, "marker": marker, "mfc": "none" if kind == "SGD" else color}
        _draw(ax, select(rows, optimizer=kind, setting=name), ERROR, label=label, **look)
    ax.set(xlabel="learning rate", ylabel="test error of $w_a$ (%)")
    log_axis(ax.xaxis)
    log_axis(ax.yaxis)
    picture.legend(loc="outside lower center", ncols=2)
    compared = [
        Compared(f"test error (%) of {name}, {kind}, best rate", mean_and_spread(errors.tolist()))
        for kind in ("SGD", "LAMB")
        for name, errors in zip(SETTINGS, _best(rows, kind), strict=True)
    ]
    return Drawing({"": picture}, rows, compared)

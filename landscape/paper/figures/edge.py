"""Ours: each algorithm at its own edge of stability, what of M decides, and instruments along training.

Then the rates at which training converges, of DPSGD-2021, and (our choice) a tuned LAMB.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.compared import Compared, compare_with_paper, mean_and_spread
from landscape.paper.context import Context, Ended
from landscape.paper.figure import Drawing, draw_ranges, figure, figures_toml, handle, last, late, test_error
from landscape.paper.figures.landscapes import median_rise
from landscape.paper.figures.large_batch import classes
from landscape.paper.verdicts import Effect, Rows, Series, by_seed, distinct, effect_of, paired_effect, select
from landscape.plots.picture import caption, formulas, panels, shared_legend, wrapped_panels
from landscape.plots.style import DARK, OTHER, PALE, color_of, log_axis, shades, ticks_at
from landscape.plots.training import column_of
from landscape.training.topology import Mixing

MIXINGS = ("full", "ring(2)", "ring(1)")
COLORS = {"SSGD": color_of("ssgd"), **dict(zip(MIXINGS, shades(color_of("dpsgd"), 3), strict=True))}
# The relative residual up to which an eigenvalue counts as converged, and what counts as near a limit (our
# choice).
RESIDUAL, NEAR = 0.05, (0.67, 1.5)
PLATEAU, ERROR, RISE = "plateau_lr_lambda_max", "test_error_percent", "median_rise_nat"
# The history's column with the largest stable ηλ of a run's rule, NaN where nobody has it (in the CSV it is
# "limit"); and the CSV's column with the largest ηλ_max of a run.
LIMIT_IN_HISTORY, SHARPNESS = "lr_lambda_limit", "largest_lr_lambda_max"


def named(setting: str) -> str:
    """Return a setting's name for the legend: a mixing is one of DPSGD."""
    return setting if setting == "SSGD" else f"DPSGD {setting}"


def look_of(setting: str) -> tuple[Any, bool]:
    """Return the color of a setting, and whether it is in ATC order."""
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


def _judge_edge(rows: Rows) -> Iterator[Effect]:
    """Judge each setting's plateau against its limit, their order in AWC order, and ATC against SSGD."""
    what = "plateau of ηλ_max"
    near_one: dict[str, Any] = {"times": True, "claimed": NEAR}
    for rate in distinct(rows, "lr"):
        for pair in (("SSGD", "full AWC"), ("full AWC", "ring(1) AWC")):
            where = f"α = {rate:g}, {pair[0]} − {pair[1]}"
            yield paired_effect(where, what, rows, PLATEAU, lr=rate, setting=pair)
        for mixing in MIXINGS:
            where, pair = f"α = {rate:g}, {mixing} ATC / SSGD", (f"{mixing} ATC", "SSGD")
            yield paired_effect(where, what, rows, PLATEAU, lr=rate, setting=pair, **near_one)
    for rate, name in distinct(rows, "lr", "setting"):
        plateaus, limits = (by_seed(rows, column, lr=rate, setting=name) for column in (PLATEAU, "limit"))
        yield effect_of(f"α = {rate:g}, {name}", f"{what} / limit", plateaus, limits, **near_one)


@figure("edge", _judge_edge)
def _edge(context: Context) -> Drawing:
    """Draw ηλ_max along training: seeds as thin lines, their median as a thick one, the limit dashed.

    Each learning rate has a column of two panels: DPSGD in AWC order and in ATC order. SSGD is in both. α in
    the titles and η on the axes are the same learning rate.
    """

    def measure(run: Ended) -> dict[str, Any]:
        values = {PLATEAU: plateau(run.end), "limit": last(run.end, LIMIT_IN_HISTORY)}
        return values | {ERROR: test_error(run.end), "diverged": run.end.diverged}

    rows = context.table(measure)
    rates = distinct(rows, "lr")
    picture, axes = panels(2, len(rates), 3.5, 2.8, sharey="row")
    for column, rate in enumerate(rates):
        awc_panel, atc_panel = axes[column], axes[column + len(rates)]
        for name in distinct(rows, "setting"):
            color, is_atc = look_of(name)
            checkpoints = [run.end for run in context.ended(lr=rate, setting=name)]
            curves = [pd.Series(c.history["lr_lambda_max"], c.history["step"]) for c in checkpoints]
            seed_curves = pd.concat([curve[np.isfinite(curve)] for curve in curves], axis=1).sort_index()
            own_panels = [atc_panel] if is_atc else [awc_panel]
            if name == "SSGD":
                own_panels = [awc_panel, atc_panel]
            for ax in own_panels:
                ax.plot(seed_curves, color=color, lw=0.4, alpha=0.4)
                # SSGD's lines are wider: they can be seen behind equal lines of DPSGD in ATC order.
                ax.plot(seed_curves.median(axis=1), color=color, lw=3.0 if name == "SSGD" else 1.5)
                ax.axhline(last(checkpoints[0], LIMIT_IN_HISTORY), color=color, lw=1.2, ls="--")
    for ax, (order, rate) in zip(axes, itertools.product(("AWC", "ATC"), rates), strict=True):
        ax.set(title=f"α = {rate:g}, DPSGD in {order} order", xlabel="step")
    for ax in axes[:: len(rates)]:
        ax.set_ylabel(r"$\eta\lambda_{max}$ of $w_a$")
    # All limits lie in these ranges. Higher values, mostly peaks of single seeds, are left out.
    axes[0].set_ylim(0, 3)
    axes[-1].set_ylim(1, 4)
    settings_legend(picture, handle("limit on ηλ", lw=1.2, ls="--"), columns=5, lw=1.8)
    what = "plateau of ηλ_max, α = {lr:g}, {setting} (limit {limit:.2f})"
    return Drawing({"": picture}, rows, compare_with_paper(rows, what, PLATEAU))


# ---- Flatness and test error


def _correlation(rows: Rows) -> float:
    """Return the correlation of log λ_max with the log rise of the loss.

    NaN from fewer than three rows where both are positive.
    """
    pairs = rows[["lambda_max_nat", RISE]].to_numpy(float)
    pairs = np.log(pairs[np.isfinite(pairs).all(1) & (pairs > 0).all(1)])
    return float(np.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else float("nan")


def _judge_flatness_and_error(rows: Rows) -> Iterator[Effect]:
    """Judge SSGD against DPSGD ring(2) in AWC order by rate, and the correlation over all settings."""
    for rate in distinct(rows, "lr"):
        where = f"α = {rate:g}, SSGD {{}} ring(2) AWC"
        pair: dict[str, Any] = {"lr": rate, "setting": ("SSGD", "ring(2) AWC")}
        yield paired_effect(where.format("−"), "test error (points)", rows, ERROR, **pair)
        what = "rise of the loss around w_a"
        yield paired_effect(where.format("/"), what, rows, RISE, times=True, **pair)
    correlations = tuple(_correlation(seed_rows) for _, seed_rows in rows.groupby("seed"))
    what = "correlation of log λ_max with the log of the rise of the loss around w_a"
    yield Effect("over all settings, by seed", what, correlations)


@figure("edge-follows", _judge_flatness_and_error)
def _flatness_and_error(context: Context) -> Drawing:
    """Draw the test error, and the median rise of the loss around w_a, against λ_max: a point for each run.

    λ_max is the median over the second half of the steps: :func:`plateau` divided by the learning rate. The
    rise and the test error have a row of panels each, and each learning rate has a column.
    """

    def measure(run: Ended) -> dict[str, Any]:
        lambda_max = plateau(run.end) / run.values["lr"]
        rise = median_rise(context.contour(run.last))  # run.last has the weights, run.end the history
        return {"lambda_max_nat": lambda_max, ERROR: test_error(run.end), RISE: rise}

    rows = context.table(measure)
    rates = distinct(rows, "lr")
    quantities = {RISE: "median rise of the loss (nat)", ERROR: "test error (%)"}
    picture, axes = panels(2, len(rates), 3.4, 2.7)
    for ax, (quantity, rate) in zip(axes, itertools.product(quantities, rates), strict=True):
        for name, group in select(rows, lr=rate).groupby("setting", sort=False):
            color, is_atc = look_of(name)
            look = {"color": color, "marker": "o", "mfc": "none" if is_atc else color}
            ax.plot(group["lambda_max_nat"], group[quantity], ls="none", ms=5, **look)
        log_axis(ax.xaxis)
        log_axis(ax.yaxis, factor=2)
    for ax, rate in zip(axes[: len(rates)], rates, strict=True):
        ax.set_title(f"α = {rate:g}")
    for ax, label in zip(axes[:: len(rates)], quantities.values(), strict=True):
        ax.set_ylabel(label)
    # One label for the last row, below its middle panel.
    axes[len(rates) + len(rates) // 2].set_xlabel(r"$\lambda_{max}$ of $w_a$ (nat)")
    atc_order = handle("ATC order", marker="o", mfc="none", ls="none")
    settings_legend(picture, atc_order, columns=5, marker="o", ls="none")
    main_rows = rows[rows["setting"].isin(["SSGD", "ring(2) AWC", "ring(2) ATC"])]
    compared = compare_with_paper(main_rows, "test error (%), α = {lr:g}, {setting}", ERROR, mean_and_spread)
    compared.append(Compared("correlation of log λ_max with log rise", f"{_correlation(rows):.2f}"))
    return Drawing({"": picture}, rows, compared)


# ---- Lazy mixing: the same gap, or the same ω_min

LEARNERS = 6
# Ratios of plateaus: a different ω_min changes them by a quarter or more, the same by less (our choice).
CLAIMED = {"the same gap": (1.25, np.inf), "the same ω_min": (0.8, 1.25)}


def _judge_lazy(rows: Rows) -> Iterator[Effect]:
    """Judge the powers of 1 + ω_min and of the gap that fit the sharpness, and the families."""
    omega_powers, gap_powers = [], []
    for _, seed_rows in rows.groupby("seed", sort=False):
        if len(seed_rows) > 3 and (seed_rows[PLATEAU] > 0).all():
            ones, omega = np.ones(len(seed_rows)), np.log(1 + seed_rows["omega_min"])
            columns = np.stack([ones, omega, np.log(seed_rows["gap"])], axis=1)
            fit = np.linalg.lstsq(columns, np.log(seed_rows[PLATEAU].to_numpy()), rcond=None)[0]
            omega_powers.append(float(fit[1]))
            gap_powers.append(float(fit[2]))
    where, what = "six mixing matrices", "sharpness as a product of powers: exponent of"
    yield Effect(where, f"{what} 1 + ω_min", tuple(omega_powers), (0.5, 1.5))
    yield Effect(where, f"{what} the spectral gap", tuple(gap_powers), (-0.25, 0.25))
    for family, claimed in CLAIMED.items():
        first, *other_settings = distinct(select(rows, panel=family), "setting")
        for name in other_settings:
            where, pair = f"{family}: {name} / {first}", (name, first)
            options: dict[str, Any] = {"times": True, "claimed": claimed, "setting": pair}
            yield paired_effect(where, "plateau of ηλ_max", rows, PLATEAU, panel=family, **options)


@figure("edge-lazy", _judge_lazy)
def _lazy(context: Context) -> Drawing:
    """Draw the plateau against 1 + ω_min and against the spectral gap of lazy mixings."""
    rows = context.table(lambda run: {PLATEAU: plateau(run.end)})
    mixings = [Mixing(name, LEARNERS, 0) for name in rows["setting"]]
    rows["gap"], rows["omega_min"] = [m.gap for m in mixings], [m.omega_min for m in mixings]
    picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
    looks = zip("os", shades(color_of("dpsgd"), 3)[:2], strict=True)
    for (family, table), (marker, color) in zip(rows.groupby("panel", sort=False), looks, strict=True):
        for ax, x in zip(axes, (1 + table["omega_min"], table["gap"]), strict=True):
            label = f"mixing matrices with {family}"
            ax.plot(x, table[PLATEAU], marker, color=color, mfc="none", ms=6, label=label)
    axes[0].plot([0.5, 1.7], [0.5, 1.7], color=OTHER, lw=0.9, ls=":", label="the limit 1 + ω_min")
    axes[0].set(xlabel=formulas("1 + ω_min of the mixing matrix"), ylabel=r"plateau of $\eta\lambda_{max}$")
    axes[1].set_xlabel("spectral gap of the mixing matrix")
    shared_legend(picture, axes[:1], ncols=3)
    what = "plateau of ηλ_max, gap {gap:.3g}, ω_min {omega_min:+.3g} ({setting})"
    return Drawing({"": picture}, rows, compare_with_paper(rows, what, PLATEAU))


# ---- Each optimizer at the edge of its own geometry

# Column of a sharpness -> column of its limit.
MEASURES = {
    "lr_lambda_max": "lr_lambda_limit",
    "lr_preconditioned_lambda_max": "lr_preconditioned_limit",
    "lr_generalized_sharpness": "lr_generalized_limit",
}
# Ratios that count as settled at the limit, where the paper says "around or above"; and the training loss
# below which cross-entropy is flat at any rate (Cohen et al. 2021). Both are our choices.
SETTLED, LEARNED = (0.7, 1.3), 0.1


def _of_limit(run: Ended) -> Rows:
    """Return, for each step at which a sharpness was measured, its ratio to its limit, and the loss.

    A rule has one of MEASURES, or several; the largest ratio counts.
    """
    history = run.end.history
    ratios = [column_of(run.end, value) / column_of(run.end, limit) for value, limit in MEASURES.items()]
    table = pd.DataFrame({"step": history["step"], "loss": history["loss"], "ratio": np.fmax.reduce(ratios)})
    return table[np.isfinite(table["ratio"])].astype({"step": int})


def _settled(rows: Rows) -> Rows:
    """Return the second half of the steps of each run before it fits its data (a loss up to LEARNED)."""
    return late(rows[rows["loss"] > LEARNED], "rule", "optimizer", "seed")


def _judge_geometries(rows: Rows) -> Iterator[Effect]:
    """Judge the median of each run, by rule and optimizer."""
    for (rule, optimizer), group in _settled(rows).groupby(["rule", "optimizer"], sort=False):
        values = tuple(group.groupby("seed")["ratio"].median().tolist())
        yield Effect(f"{optimizer}, {rule}", "η × sharpness / limit", values, SETTLED, ratio=True)


@figure("edge-geometries", _judge_geometries)
def _geometries(context: Context) -> Drawing:
    """Draw a panel for each optimizer: seeds as thin lines, their median as a thick one, by rule."""
    rows = context.table(_of_limit)
    optimizers, rules = distinct(rows, "optimizer"), distinct(rows, "rule")
    picture, axes = panels(2, len(optimizers) // 2, 2.6, 2.4, sharex=True, sharey=True)
    for ax, optimizer in zip(axes, optimizers, strict=True):
        ax.axhspan(*SETTLED, color=PALE, alpha=0.5, lw=0, zorder=0)
        for rule in rules:
            curves = select(rows, optimizer=optimizer, rule=rule).pivot_table("ratio", "step", "seed")
            color = color_of(rule)
            ax.plot(curves, color=color, lw=0.4, alpha=0.5)
            ax.plot(curves.median(axis=1), color=color, lw=3.0 if rule == "SSGD" else 1.5)
        ax.set_title(optimizer)
    log_axis(axes[0].yaxis)
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
LAYOUT = figures_toml()["instruments_layout"]
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


def _judge(rows: Rows) -> Iterator[Effect]:
    """Judge how much nearer to the limit batch sharpness is than λ_max, at the smallest batch."""
    second_half = late(rows, *_RUN)
    what = "how much nearer batch sharpness is to the limit than λ_max (logarithm of the ratio)"
    columns, batch = ["lr_lambda_max", "lr_batch_sharpness", "lr_lambda_limit"], rows["batch"].min()
    for name in distinct(rows, "setting"):
        medians = select(second_half, batch=batch, setting=name).groupby("seed")[columns].median()
        with np.errstate(invalid="ignore"):  # a negative sharpness has no logarithm: not tested
            distance = np.abs(np.log(medians.div(medians["lr_lambda_limit"], axis=0)))
        gains = tuple((distance["lr_lambda_max"] - distance["lr_batch_sharpness"]).tolist())
        yield Effect(f"nB = {batch:g}, {named(name)}", what, gains)


@figure("instruments", _judge)
def _instruments(context: Context) -> Drawing:
    """Draw all quantities of the instruments along training, in two pictures."""
    rows = context.table(_measured)
    ends, compared = _ends(rows), list[Compared]()
    for (batch, name), end in ends.iterrows():
        values = [f"{end[c]:{form}}" if np.isfinite(end[c]) else "–" for c, form in LAYOUT["forms"].values()]
        what = f"nB = {batch}, {named(name)} (limit {end['limit']:.2f}): {'; '.join(LAYOUT['forms'])}"
        compared.append(Compared(what, "; ".join(values)))
    limits = ends["limit"]
    pictures = {"": _picture(rows, limits, "sharpness"), "-disagreement": _picture(rows, limits, "spread")}
    return Drawing(pictures, rows, compared)


def _picture(rows: Rows, limits: Any, subject: str) -> Any:
    """Draw the quantities that LAYOUT lists for ``subject``, "sharpness" or "spread".

    Each quantity has a row of panels, each batch a column, each setting a line. ``limits`` are the largest
    stable ηλ by (batch, setting).
    """
    batches, quantities = distinct(rows, "batch"), LAYOUT[subject]
    picture, axes = panels(len(quantities), len(batches), 3.5, 2.3, sharey="row")
    cells = itertools.product(quantities, batches)
    for ax, ((csv_column, label, scale), batch) in zip(axes, cells, strict=True):
        for name in distinct(rows, "setting"):
            color, is_atc = look_of(name)
            curve = _curve(select(rows, batch=batch, setting=name), csv_column)
            # SSGD's lines are wider: they can be seen behind equal lines of DPSGD in ATC order.
            extra_width = 2.0 if name == "SSGD" else 0.0
            ax.plot(curve.index, curve, color=color, ls="--" if is_atc else "-", lw=1.4 + extra_width)
            if csv_column.startswith("lr_"):  # a learning rate times a curvature, to which the limit applies
                ax.axhline(limits[batch, name], color=color, lw=1.0 + extra_width, ls=":")
        if csv_column == "noise_scale":
            ax.axhline(batch, color=DARK, lw=1.0, ls="-.")
        ax.set_yscale(scale)
        ax.locator_params(axis="x", nbins=5)
        position = ax.get_subplotspec()
        if position.is_first_col():
            ax.set_ylabel(label)
        if position.is_first_row():
            ax.set_title(f"nB = {batch}")
        if position.is_last_row():
            ax.set_xlabel("step")
    lines = [handle("ATC order", lw=1.4, ls="--")]
    if subject == "sharpness":
        lines += [handle("limit", lw=1.0, ls=":"), handle("total batch nB", lw=1.0, ls="-.")]
    settings_legend(picture, *lines, columns=7, lw=1.8)
    if subject == "spread":
        picture.suptitle("Spread and gradient along the sharpest directions, MNIST")
    caption(picture, LAYOUT["captions"][subject])
    return picture


def _curve(rows: Rows, column: str) -> Any:
    """Return the median over seeds by step; of the noise scale the ratio of means over seeds and WINDOWS."""
    by_step = rows.groupby("step")
    if column == "noise_scale":
        columns = by_step[["noise_trace", "noise_norm2"]]
        sums = columns.sum().rolling(WINDOWS, min_periods=1).sum()
        counts = columns.count().rolling(WINDOWS, min_periods=1).sum()
        return _ratio(sums / counts)
    if column == "disagreement_cost":  # it is only rounding if learners agree
        agree = rows.groupby("seed")["spread_share"].transform("count") == 0
        return rows[column].mask(agree).groupby(rows["step"]).median().dropna()
    return by_step[column].median().dropna()


_POINTS = "Points: medians over seeds, moved apart sideways; bars: their range."


# ---- The rates at which training converges

DPSGD = ("DPSGD", "DPSGD in ATC order")
LOOKS = {"SSGD": color_of("ssgd"), **dict(zip(DPSGD, shades(color_of("dpsgd"), 3)[1:], strict=True))}


def _bound(rows: Rows) -> float:
    """Return the test error (%) of a converged run: below halfway from the best to a guess (our choice)."""
    return (float(rows[ERROR].min()) + float(rows["chance_percent"].iloc[0])) / 2


def largest_log2_rates(rows: Rows) -> dict[str, Series]:
    """Return log2 of the largest learning rate up to which one task converges, by algorithm and seed.

    If no rate converges, the value is one less than log2 of the smallest rate. Rates below the first that
    converges are too low for the number of steps, and are ignored.
    """
    bound = _bound(rows)
    value_if_none = float(np.log2(rows["lr"].min())) - 1

    def largest(runs: Rows) -> float:
        converges = (runs[ERROR].to_numpy() < bound).tolist()
        if True not in converges:
            return value_if_none
        first_converged = converges.index(True)
        first_failed = [*converges, False].index(False, first_converged)
        return float(np.log2(runs["lr"].iloc[first_failed - 1]))

    groups = rows.sort_values("lr").groupby(["algorithm", "seed"])[["lr", ERROR]]
    rates = groups.apply(largest)
    return {algorithm: rates[algorithm] for algorithm in distinct(rows, "algorithm")}


def _judge_rates(rows: Rows) -> Iterator[Effect]:
    """Judge by how many doublings of the rate DPSGD converges beyond SSGD, by task and form."""
    what = "log₂ of the largest rate that converges"
    for task, task_rows in rows.groupby("task", sort=False):
        log2_rates = largest_log2_rates(task_rows)
        ssgd = log2_rates.pop("SSGD", None)
        if ssgd is not None:
            for name, dpsgd in log2_rates.items():
                yield effect_of(f"{task}: {name} − SSGD", what, dpsgd, ssgd)


@figure("lr-divergence", _judge_rates)
def _rates(context: Context) -> Drawing:
    """Draw the test error, and the largest ηλ_max during a run, against the learning rate.

    Each task has a panel for the test error; runs below the dotted line have converged. If ηλ_max was
    measured, the task also has a panel for ηλ_max and its limits. Points are medians over seeds; bars are the
    range.
    """

    def measure(run: Ended) -> dict[str, Any]:
        end = run.end
        chance = 100 * (1 - 1 / classes(end))  # the test error of a guess, in %
        finite_sharpness = pd.Series(end.history["lr_lambda_max"]).replace(np.inf, np.nan)
        return {
            ERROR: chance if end.diverged else test_error(end),
            "chance_percent": chance,
            SHARPNESS: float(finite_sharpness.max()),
            "limit": last(end, LIMIT_IN_HISTORY),
            "diverged": end.diverged,
        }

    rows = context.table(measure)
    rows_of_tasks = [task_rows for _, task_rows in rows.groupby("task", sort=False)]
    contents = [(ERROR, task_rows) for task_rows in rows_of_tasks]
    contents += [(SHARPNESS, task_rows) for task_rows in rows_of_tasks if (task_rows[SHARPNESS] > 0).any()]
    picture, axes = wrapped_panels(len(contents), 4.6, 2.9, columns=2)
    for ax, (quantity, task_rows) in zip(axes, contents, strict=True):
        _draw_task(ax, task_rows, quantity)
    compared: list[Compared] = []
    for task_rows in rows_of_tasks:
        what = f"largest rate at which every seed converges, {task_rows['task'].iloc[0]}"
        for algorithm, log2_rates in largest_log2_rates(task_rows).items():
            # log2 of the largest rate up to which every seed converges. If a seed converges at no rate, this
            # number is below log2 of the lowest rate.
            log2_rate = log2_rates.min()
            text = f"{2.0**log2_rate:.4g}" if log2_rate >= np.log2(task_rows["lr"].min()) else "none"
            compared.append(Compared(f"{what}, {algorithm}", text))
    shared_legend(picture, axes, ncols=4)
    caption(picture, _POINTS)
    remark = "A run converges where its test error is below the dotted line, halfway from the best to chance."
    return Drawing({"": picture}, rows, compared, remark)


def _draw_task(ax: Any, rows: Rows, quantity: str) -> None:
    """Draw a quantity of one task by rate, for each algorithm, with its bound or limits."""
    for (name, color), marker, offset in zip(LOOKS.items(), "osD", (0.93, 1.0, 1.07), strict=True):
        rule_rows = select(rows, algorithm=name)
        by_rate = rule_rows.groupby("lr")[quantity]
        draw_ranges(ax, by_rate, offset, marker=marker, color=color, label=name)
        limits = rule_rows["limit"].dropna()
        if quantity == SHARPNESS and len(limits):
            # SSGD's line is wider: it can be seen behind an equal line of DPSGD in ATC order.
            ax.axhline(limits.iloc[0], color=color, lw=2.2 if name == "SSGD" else 1.0, ls="--")
    if quantity == ERROR:
        ax.axhline(_bound(rows), color=OTHER, lw=0.9, ls=":", label="halfway from the best to chance")
    ax.set_xscale("log")
    ticks_at(ax.xaxis, sorted(distinct(rows, "lr")))
    log_axis(ax.yaxis)
    labels = {ERROR: "test error of $w_a$ (%)", SHARPNESS: r"largest $\eta\lambda_{max}$ of a run"}
    title = f"{rows['task'].iloc[0]}: {'test error' if quantity == ERROR else 'sharpness'}"
    ax.set(title=title, xlabel="learning rate α", ylabel=labels[quantity])


# ---- Whether the advantage of decentralized training outlives a tuned adaptive optimizer

# Marker, and the factor by which points are moved sideways.
SETTINGS = {"SSGD": ("o", 1 / 1.05), "ring(2) AWC": ("s", 1.05)}


def _best(rows: Rows, optimizer: str) -> list[Series]:
    """Return the test errors by seed at the rate with the lowest median, for each of SETTINGS."""
    errors = []
    for name in SETTINGS:
        group = select(rows, optimizer=optimizer, setting=name)
        errors.append(by_seed(group, ERROR, lr=group.groupby("lr")[ERROR].median().idxmin()))
    return errors


def _advantage(rows: Rows, optimizer: str) -> Series:
    """Return the test error of SSGD − that of DPSGD by seed, each at its best rate."""
    ssgd, dpsgd = _best(rows, optimizer)
    return ssgd.sub(dpsgd).dropna()


def _judge_lamb(rows: Rows) -> list[Effect]:
    """Judge the share of DPSGD's advantage with SGD that LAMB removes, by seed at the best rates."""
    advantages = [_advantage(rows, optimizer) for optimizer in ("SGD", "LAMB")]
    holds = Effect("", "", tuple(advantages[0])).holds
    reason = "" if holds else "with SGD there is no advantage that could vanish"
    what = "advantage of DPSGD over SSGD in test error (points), with SGD − with LAMB"
    return [effect_of("each at its best rate", what, *advantages, untested=reason)]


@figure("lamb", _judge_lamb)
def _lamb(context: Context) -> Drawing:
    """Draw the test error by rate, with SGD and with LAMB."""
    rows = context.table(lambda run: {ERROR: test_error(run.end)})
    rows = rows[["optimizer", "lr", "setting", "seed", ERROR]]
    picture, (ax,) = panels(1, 1, 6.8, 3.8)
    for (name, (marker, offset)), kind in itertools.product(SETTINGS.items(), ("LAMB", "SGD")):
        color, label = look_of(name)[0], f"{named(name.replace(' AWC', ''))}, {kind}"
        look: Any = {"color": color, "marker": marker, "mfc": "none" if kind == "SGD" else color}
        by_rate = select(rows, optimizer=kind, setting=name).groupby("lr")[ERROR]
        draw_ranges(ax, by_rate, offset, label=label, **look)
    ax.set(xlabel="learning rate", ylabel="test error of $w_a$ (%)", xscale="log")
    ticks_at(ax.xaxis, sorted(distinct(rows, "lr")))
    log_axis(ax.yaxis)
    picture.legend(loc="outside lower center", ncols=2)
    text = Effect("", "", tuple(_advantage(rows, "SGD"))).entry()["text"]
    words = f"With SGD at the best rates, the error of SSGD − that of DPSGD is {text} points (95% interval)."
    caption(picture, f"{_POINTS} {words}")
    compared = [
        Compared(f"test error (%) of {name}, {kind}, best rate", mean_and_spread(errors.tolist()))
        for kind in ("SGD", "LAMB")
        for name, errors in zip(SETTINGS, _best(rows, kind), strict=True)
    ]
    return Drawing({"": picture}, rows, compared)

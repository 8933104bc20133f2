"""Ours: each algorithm at its own edge of stability, what follows from it, and what of M decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Picture

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context
from landscape.paper.figure import (
    Compared,
    Drawing,
    compare_with_paper,
    figure,
    handle,
    last,
    mean_and_spread,
    test_error,
)
from landscape.paper.figures.figure_2 import median_rise
from landscape.paper.scales import mnist_runs
from landscape.paper.verdicts import (
    Effect,
    Rows,
    by_seed,
    difference_effect,
    pair,
    ratio_effect,
    select,
    settings,
    stacked,
)
from landscape.plots.picture import panels, shared_legend
from landscape.plots.style import color_of, decimal_labels, shades
from landscape.training.topology.mixing import Mixing

MIXINGS = ("full", "ring(2)", "ring(1)")
COLORS = {"SSGD": color_of("ssgd"), **dict(zip(MIXINGS, shades(color_of("dpsgd"), 3), strict=True))}
# The relative residual up to which an eigenvalue counts as converged, and what counts as near a limit (ours).
RESIDUAL, NEAR = 0.05, (0.67, 1.5)
# Steps for each rate: the plateau is reached within a third of them (ours).
STEPS = {0.2: 3000, 0.5: 1000, 1.0: 1000}
SETTINGS = ("SSGD", *(f"{m} {o}" for o in ("AWC", "ATC") for m in MIXINGS))
NOTE = "n = 6, nB = 1998, λ_max on 2,000 training samples every 50 steps; five seeds; all settings but α ours"
EVERY = ("decompose.every=0", "monitor.sharpness=50", "evaluate.every=500")
# The runs by their keys, and the column of their plateaus.
FORM, AXES, LEVEL = "{lr:g} {setting}", {"lr": STEPS, "setting": SETTINGS}, "plateau_lr_lambda_max"


def algorithm(name: str) -> str:
    """For recipes: "SSGD", or "MIXING ORDER" of DPSGD, such as "ring(2) AWC"."""
    if name == "SSGD":
        return "algorithm={name='ssgd'}"
    mixing, order = name.rsplit(" ", 1)
    return f"algorithm={{name='dpsgd', mixing='{mixing}', order='{order.lower()}'}}"


def named(setting: str) -> str:
    """A setting's name for the legend: a mixing is one of DPSGD."""
    return setting if setting == "SSGD" else f"DPSGD {setting}"


def plateau(run: Checkpoint) -> float:
    """The median of ηλ_max over the second half of the run, where it lasted; NaN if nothing was recorded.

    A value counts unless its residual says that the search has not converged.
    """
    values, steps = run.history["lr_lambda_max"], run.history["step"]
    off = run.history["lambda_max_residual"] > RESIDUAL * np.abs(run.history["lambda_max"])
    late = values[np.isfinite(values) & ~off & (steps > run.step / 2)]
    return float(np.median(late)) if len(late) else float("nan")


def limit_of(run: Checkpoint) -> float:
    """The largest stable ηλ of the run's rule; NaN where it is not known."""
    return last(run, "lr_lambda_limit")


def settings_legend(picture: Picture, *more: Any, columns: int, **look: Any) -> None:
    """The legend of a picture with a colour for each of COLORS, in this ``look``, and ``more`` entries."""
    handles = [handle(named(name), color=color, **look) for name, color in COLORS.items()]
    picture.legend(handles=[*handles, *more], loc="outside lower center", ncols=columns)


def _changes(lr: float, setting: str) -> list[str]:
    return [f"lr={lr}", f"steps={STEPS[lr]}", algorithm(setting), *EVERY]


_runs = mnist_runs(FORM, AXES, 5, "fig2b-dpsgd", _changes)


# ---- Each algorithm at its own edge


def _draw(ax: Any, color: Any, runs: list[Checkpoint]) -> None:
    """The seeds' ηλ_max as thin lines, their median as a thick one, their limit dashed."""
    curves = [pd.Series(run.history["lr_lambda_max"], run.history["step"]) for run in runs]
    table = pd.concat([curve[np.isfinite(curve)] for curve in curves], axis=1).sort_index()
    ax.plot(table, color=color, lw=0.4, alpha=0.4)
    ax.plot(table.median(axis=1), color=color, lw=1.7)
    ax.axhline(limit_of(runs[0]), color=color, lw=1.2, ls="--")


def _edge(context: Context) -> Drawing:
    def measure(key: str, run: Checkpoint) -> dict[str, Any]:
        found = {LEVEL: plateau(run), "limit": limit_of(run), "test_error_percent": test_error(run)}
        return found | {"diverged": run.diverged}

    rows = context.table(FORM, AXES, measure)
    picture, axes = panels(2, 3, 4.2, 3.3, sharey=True)
    for column, rate in enumerate(STEPS):
        for name in SETTINGS:
            runs, color = context.group(f"{rate:g} {name}"), COLORS[name.split()[0]]
            for row in (0, 1) if name == "SSGD" else (int(name.endswith("ATC")),):
                _draw(axes[column + 3 * row], color, runs)
        for row, order in enumerate(("AWC", "ATC")):
            axes[column + 3 * row].set(title=f"α = {rate:g}, DPSGD in {order} order", xlabel="step")
    for ax in axes[::3]:
        ax.set_ylabel(r"$\eta\lambda_{max}$ of $w_a$")
    axes[0].set_ylim(0, 3)
    settings_legend(picture, handle("its limit on ηλ", lw=1.2, ls="--"), columns=5, lw=1.8)
    groups = rows.groupby(["lr", "setting"], sort=False)
    middle = groups[LEVEL].median()
    near = middle / groups["limit"].first()
    ordered = [middle[r, "ring(1) AWC"] <= middle[r, "full AWC"] <= middle[r, "SSGD"] for r in STEPS]
    atc = [middle[r, f"{m} ATC"] / middle[r, "SSGD"] for r in STEPS for m in MIXINGS]
    return Drawing(
        {"": picture},
        rows,
        compare_with_paper(rows, "plateau of ηλ_max, α = {lr:g}, {setting} (limit {limit:.2f})", LEVEL),
        f"The median plateau of ηλ_max is {min(near):.2f} to {max(near):.2f} times the setting's own limit, "
        f"over {len(near)} settings; ring(1) ≤ full ≤ SSGD, the order of their limits (AWC), at "
        f"{sum(ordered)} of {len(ordered)} rates. In ATC order, whose limit is SSGD's, it is {min(atc):.2f} "
        f"to {max(atc):.2f} times SSGD's.",
    )


def _judge_edge(rows: Rows) -> list[Effect]:
    """Each setting's plateau against its limit; the order of the plateaus in AWC order; ATC against SSGD."""
    effects, what = [], "plateau of ηλ_max"
    for rate in settings(rows, "lr"):
        for two in (("SSGD", "full AWC"), ("full AWC", "ring(1) AWC")):
            levels = pair(rows, LEVEL, lr=rate, setting=two)
            effects.append(difference_effect(f"α = {rate:g}, {two[0]} less {two[1]}", what, levels))
        for mixing in MIXINGS:
            levels = pair(rows, LEVEL, lr=rate, setting=(f"{mixing} ATC", "SSGD"))
            effects.append(ratio_effect(f"α = {rate:g}, {mixing} ATC / SSGD", what, levels, NEAR))
    for rate, name in settings(rows, "lr", "setting"):
        levels = [by_seed(rows, column, lr=rate, setting=name) for column in (LEVEL, "limit")]
        effects.append(ratio_effect(f"α = {rate:g}, {name}", f"{what} / limit", levels, NEAR))
    return effects


figure(
    "edge", "Further analyses", "each algorithm at its own edge of stability, MNIST",
    "The sharpness of the mean rises until ηλ_max is near the rule's own limit: 2 for SSGD, 1 + ω_min for "
    "DPSGD in AWC order, 2 again in ATC order. DPSGD's flatter minima follow from that limit (ours, not the "
    "paper's).",
    _runs, _judge_edge, laptop=NOTE,
)(_edge)  # fmt: skip

# ---- Flatness and test error


def _flatness_picture(rows: Rows) -> Picture:
    """Test error and rise of the loss against the final sharpness, a point a run."""
    markers = dict(zip(STEPS, "os^", strict=True))
    quantities = {"test_error_percent": "test error (%)", "median_rise_nat": "median rise of the loss (nat)"}
    picture, axes = panels(1, 2, 5.2, 3.9)
    for ax, (quantity, label) in zip(axes, quantities.items(), strict=True):
        for (rate, name), group in rows.groupby(["lr", "setting"], sort=False):
            color, face = COLORS[name.split()[0]], {"mfc": "none"} if name.endswith("ATC") else {}
            look = {"color": color, "marker": markers[rate], "ls": "none", "ms": 5, **face}
            ax.plot(group["lambda_max_nat"], group[quantity], **look)
        sharpness = r"$\lambda_{max}$ of $w_a$, second half of training (nat)"
        ax.set(xscale="log", yscale="log", xlabel=sharpness, ylabel=label)
        decimal_labels(ax.xaxis)
        decimal_labels(ax.yaxis)
    grey = [handle(f"α = {rate:g}", marker=marker, ls="none") for rate, marker in markers.items()]
    grey.append(handle("ATC order", marker="o", mfc="none", ls="none"))
    settings_legend(picture, *grey, columns=4, marker="o", ls="none")
    return picture


def _edge_follows(context: Context) -> Drawing:
    """Final sharpness, test error and rise of the loss of each run of the edge figure."""
    grid = context.pick(5, 11, 11)

    def measure(key: str, run: Checkpoint) -> dict[str, Any]:
        rise = median_rise(context.contour(context.last(key), grid=grid))
        return {
            "lambda_max_nat": plateau(run),
            "test_error_percent": test_error(run),
            "median_rise_nat": rise,
        }

    rows = context.table(FORM, AXES, measure)
    rows["lambda_max_nat"] /= rows["lr"]
    shown = rows[rows["setting"].isin(["SSGD", "ring(2) AWC", "ring(2) ATC"])]
    middle = shown.groupby(["lr", "setting"])["test_error_percent"].median()
    lower = [middle[rate, "ring(2) AWC"] < middle[rate, "SSGD"] for rate in STEPS]
    correlation = f"{_correlation(rows):.2f}"
    return Drawing(
        {"": _flatness_picture(rows)},
        rows,
        [
            *compare_with_paper(
                shown, "test error (%), α = {lr:g}, {setting}", "test_error_percent", mean_and_spread
            ),
            Compared("correlation of log λ_max with log rise", correlation),
        ],
        f"Over all runs log λ_max and the log rise of the loss correlate with {correlation}; DPSGD ring(2) "
        f"in AWC order has a lower median test error than SSGD at {sum(lower)} of {len(lower)} rates.",
    )


def _judge_follows(rows: Rows) -> list[Effect]:
    """By rate, SSGD against DPSGD ring(2) in AWC order; and the correlation over all settings of a seed."""
    effects, both = [], ("SSGD", "ring(2) AWC")
    for rate in settings(rows, "lr"):
        error = pair(rows, "test_error_percent", lr=rate, setting=both)
        rise = pair(rows, "median_rise_nat", lr=rate, setting=both)
        where = f"α = {rate:g}, SSGD and ring(2) AWC"
        effects.append(difference_effect(where, "test error, the first less the second (points)", error))
        effects.append(ratio_effect(where, "rise of the loss, the first / the second", rise))
    together = tuple(_correlation(select(rows, seed=seed)) for seed in settings(rows, "seed"))
    effects.append(Effect("all settings of a seed", "correlation of log λ_max with log rise", together))
    return effects


def _correlation(rows: Rows) -> float:
    """Of log λ_max and the log rise of the loss; NaN from fewer than three rows where both are positive."""
    pairs = rows[["lambda_max_nat", "median_rise_nat"]].to_numpy(float)
    pairs = np.log(pairs[np.isfinite(pairs).all(1) & (pairs > 0).all(1)])
    return float(np.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else float("nan")


figure(
    "edge-follows", "Further analyses", "what follows from the edge: test error and flatness",
    "A lower limit on ηλ gives flatter minima, and these a lower test error.",
    _runs, _judge_follows, laptop=NOTE, weights=True,
)(_edge_follows)  # fmt: skip

# ---- Lazy mixing: the same gap, or the same ω_min

LEARNERS, RATE = 6, 0.5
# Mixings of six learners: three with the spectral gap of ring(1), 1/3, and three with the ω_min of full, 0.
FAMILIES = {
    "the same gap": ("ring(1)", "lazy(0.416667, ring(2))", "lazy(0.333333, full)"),
    "the same ω_min": ("full", "lazy(0.833333, ring(2))", "lazy(0.75, ring(1))"),
}


MIXED = [name for family in FAMILIES.values() for name in family]


def _lazy_changes(mixing: str) -> list[str]:
    return _changes(RATE, f"{mixing} AWC")


def _lazy(context: Context) -> Drawing:
    rows = stacked(
        context.table("{setting}", {"setting": names}, lambda key, run: {LEVEL: plateau(run)}, panel=family)
        for family, names in FAMILIES.items()
    )
    mixings = [Mixing(name, LEARNERS, 0) for name in rows["setting"]]
    rows["gap"], rows["omega_min"] = [m.gap for m in mixings], [m.omega_min for m in mixings]
    picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
    looks = (("o", color_of("dpsgd")), ("s", color_of("ssgd")))
    for family, (marker, color) in zip(FAMILIES, looks, strict=True):
        table = select(rows, panel=family)
        for ax, at in zip(axes, (1 + table["omega_min"], table["gap"]), strict=True):
            ax.plot(at, table[LEVEL], marker, color=color, mfc="none", ms=6, label=family)
    axes[0].plot([0.5, 1.8], [0.5, 1.8], color="#777777", lw=0.9, ls=":", label="the limit 1 + ω_min")
    axes[0].set(xlabel="1 + ω_min of the mixing matrix", ylabel=r"plateau of $\eta\lambda_{max}$")
    axes[1].set_xlabel("its spectral gap")
    shared_legend(picture, axes[:1], ncols=3)
    omega, gap = (f"{np.mean(e.values):.2f}" if e.values else "–" for e in _judge_lazy(rows)[:2])
    return Drawing(
        {"": picture},
        rows,
        compare_with_paper(
            rows, "plateau of ηλ_max, gap {gap:.3g}, ω_min {omega_min:+.3g} ({setting})", LEVEL
        ),
        f"Sharpness follows ω_min: as the power {omega} of 1 + ω_min and {gap} of the spectral gap, fitted "
        "over six mixings.",
    )


def _judge_lazy(rows: Rows) -> list[Effect]:
    """The powers of 1 + ω_min and of the gap that fit the sharpness; and the families, end against end."""
    powers = []
    for seed in settings(rows, "seed"):
        here = select(rows, seed=seed)
        x = np.stack([np.ones(len(here)), np.log(1 + here["omega_min"]), np.log(here["gap"])])
        if len(here) > 3 and (here[LEVEL] > 0).all():
            powers.append(np.linalg.lstsq(x.T, np.log(here[LEVEL].to_numpy()), rcond=None)[0][1:].tolist())
    effects = [
        Effect("six mixings", f"power of sharpness in {what}", tuple(p[k] for p in powers), claimed)
        for k, what, claimed in ((0, "1 + ω_min", (0.5, 1.5)), (1, "the spectral gap", (-0.25, 0.25)))
    ]
    ranges = ((1.25, np.inf), (0.8, 1.25))  # another one, and the same (ours)
    return effects + [
        ratio_effect(
            f"{family}: {name} / {first}",
            "plateau of ηλ_max",
            pair(rows, LEVEL, panel=family, setting=(name, first)),
            claimed,
        )
        for (family, (first, *others)), claimed in zip(FAMILIES.items(), ranges, strict=True)
        for name in others
    ]


_LAZY_NOTE = "n = 6, nB = 1998, α = 0.5, 1,000 steps, AWC order, five seeds: all settings ours"
figure(
    "edge-lazy", "Further analyses", "only ω_min changed: lazy mixing, MNIST",
    "Flatness follows ω_min of the mixing matrix and not its spectral gap: (1 − a)I + aM with the same gap "
    "and another ω_min moves ηλ_max with 1 + ω_min, with the same ω_min and another gap leaves it (ours).",
    mnist_runs("{mixing}", {"mixing": MIXED}, 5, "fig2b-dpsgd", _lazy_changes, 1), _judge_lazy,
    laptop=_LAZY_NOTE,
)(_lazy)  # fmt: skip

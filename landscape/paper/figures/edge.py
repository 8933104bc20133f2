"""Ours: each algorithm at its own edge of stability, and the flatness and test error that follow from it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from landscape.paper.figure import (
    Compared,
    Drawing,
    Runs,
    Scale,
    Work,
    figure,
    mean_and_spread,
    summary,
    test_error,
)
from landscape.paper.figures.figure_2 import median_rise
from landscape.paper.figures.plateaus import COLORS, MIXINGS, NEAR, algorithm, draw, limit_of, named, plateau
from landscape.paper.scales import SMOKE_NOTE, mnist, seeds
from landscape.paper.verdicts import Effect, Rows, by_seed, column, difference, ratio, select
from landscape.plots.picture import panels
from landscape.plots.style import decimal_labels, style

# Steps for each rate: the plateau is reached within a third of them (ours).
STEPS = {0.2: 3000, 0.5: 1000, 1.0: 1000}
SETTINGS = ("SSGD", *(f"{m} {o}" for o in ("AWC", "ATC") for m in MIXINGS))
NOTE = "n = 6, nB = 1998, λ_max on 2,000 training samples every 50 steps; five seeds; all settings but α ours"


def _runs(scale: Scale) -> Runs:
    every = ("decompose.every=0", "monitor.sharpness=50", "evaluate.every=500")
    return {
        f"{rate:g} {name}/{seed}": mnist(
            scale, "fig2b-dpsgd", seed, f"lr={rate}", *algorithm(name), *every, steps=steps
        )
        for (rate, steps), name in itertools.product(STEPS.items(), SETTINGS)
        for seed in seeds(scale, 5)
    }


def _edge(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    compared: list[Compared] = []
    near: list[float] = []
    with style():
        picture, axes = panels(2, 3, 4.2, 3.3, sharey=True)
        for column, rate in enumerate(STEPS):
            for name in SETTINGS:
                runs = work.group(f"{rate:g} {name}")
                ax = axes[column + 3 * name.endswith("ATC")]
                draw(ax, COLORS[name.split()[0]], runs)
                if name == "SSGD":
                    draw(axes[column + 3], COLORS[name.split()[0]], runs)
                values, limit = [plateau(run) for run in runs], limit_of(runs[0])
                rows += [
                    {
                        "lr": rate,
                        "setting": name,
                        "seed": run.seed,
                        "plateau_lr_lambda_max": value,
                        "limit": limit,
                        "test_error_percent": test_error(run),
                        "diverged": run.diverged,
                    }
                    for run, value in zip(runs, values, strict=True)
                ]
                compared.append(
                    Compared(f"plateau of ηλ_max, α = {rate:g}, {name} (limit {limit:.2f})", summary(values))
                )
                near.append(float(np.nanmedian(values)) / limit)
            for row, order in enumerate(("AWC", "ATC")):
                axes[column + 3 * row].set_title(f"α = {rate:g}, DPSGD in {order} order")
                axes[column + 3 * row].set_xlabel("step")
        for ax in axes[::3]:
            ax.set_ylabel(r"$\eta\lambda_{max}$ of $w_a$")
        axes[0].set_ylim(0, 3)
        _legend(picture)
    by = {
        (r["lr"], r["setting"]): [
            q["plateau_lr_lambda_max"] for q in rows if (q["lr"], q["setting"]) == (r["lr"], r["setting"])
        ]
        for r in rows
    }
    middle = {key: float(np.nanmedian(values)) for key, values in by.items()}
    ordered = [middle[r, "ring(1) AWC"] <= middle[r, "full AWC"] <= middle[r, "SSGD"] for r in STEPS]
    atc = [middle[r, f"{m} ATC"] / middle[r, "SSGD"] for r in STEPS for m in MIXINGS]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"The median plateau of ηλ_max is {min(near):.2f} to {max(near):.2f} times the setting's own limit, "
        f"over {len(near)} settings; ring(1) ≤ full ≤ SSGD, the order of their limits (AWC), at "
        f"{sum(ordered)} of {len(ordered)} rates. In ATC order, whose limit is SSGD's, it is {min(atc):.2f} "
        f"to {max(atc):.2f} times SSGD's.",
    )


def _judge_edge(rows: Rows) -> list[Effect]:
    """Each setting's plateau against its limit; the order of the plateaus in AWC order; ATC against SSGD."""
    settings = dict.fromkeys(zip(column(rows, "lr"), column(rows, "setting"), strict=True))
    plateaus = {
        (rate, name): by_seed(rows, "plateau_lr_lambda_max", lr=rate, setting=name) for rate, name in settings
    }
    effects = []
    for rate in dict.fromkeys(rate for rate, _ in settings):
        for larger, smaller in (("SSGD", "full AWC"), ("full AWC", "ring(1) AWC")):
            gap = difference(plateaus[rate, larger], plateaus[rate, smaller])
            effects.append(Effect(f"α = {rate:g}, {larger} less {smaller}", "plateau of ηλ_max", gap))
        for mixing in MIXINGS:
            same = ratio(plateaus[rate, f"{mixing} ATC"], plateaus[rate, "SSGD"])
            effects.append(
                Effect(f"α = {rate:g}, {mixing} ATC / SSGD", "plateau of ηλ_max", same, NEAR, ratio=True)
            )
    for rate, name in settings:
        limit = by_seed(rows, "limit", lr=rate, setting=name)
        near = ratio(plateaus[rate, name], limit)
        effects.append(Effect(f"α = {rate:g}, {name}", "plateau of ηλ_max / limit", near, NEAR, ratio=True))
    return effects


def _legend(picture: Picture) -> None:
    handles = [Line2D([], [], color=c, lw=1.8, label=named(n)) for n, c in COLORS.items()]
    handles.append(Line2D([], [], color="#555555", lw=1.2, ls="--", label="its limit on ηλ"))
    picture.legend(handles=handles, loc="outside lower center", ncols=5)


figure(
    "edge",
    "Further analyses",
    "each algorithm at its own edge of stability, MNIST",
    "The sharpness of the mean rises until ηλ_max is near the rule's own limit: 2 for SSGD, 1 + ω_min for "
    "DPSGD in AWC order, 2 again in ATC order. DPSGD's flatter minima follow from that limit (ours, not the "
    "paper's).",
    _runs,
    _judge_edge,
    smoke=SMOKE_NOTE,
    laptop=NOTE,
    paper=NOTE,
)(_edge)


def _flatness_rows(work: Work) -> list[dict[str, Any]]:
    """Final sharpness, test error and rise of the loss of each run of the edge figure."""
    grid, rows = work.pick(5, 11, 11), list[dict[str, Any]]()
    for rate, name in itertools.product(STEPS, SETTINGS):
        for run in work.group(f"{rate:g} {name}"):
            rise = median_rise(work.contour(work.last(f"{rate:g} {name}/{run.seed}"), grid=grid))
            rows.append(
                {
                    "lr": rate,
                    "setting": name,
                    "seed": run.seed,
                    "lambda_max_nat": plateau(run) / rate,
                    "test_error_percent": test_error(run),
                    "median_rise_nat": rise,
                }
            )
    return rows


def _flatness_picture(rows: list[dict[str, Any]]) -> Picture:
    """Test error and rise of the loss against the final sharpness, a point a run."""
    markers = dict(zip(STEPS, "os^", strict=True))
    quantities = {"test_error_percent": "test error (%)", "median_rise_nat": "median rise of the loss (nat)"}
    with style():
        picture, axes = panels(1, 2, 5.2, 3.9)
        for ax, (quantity, label) in zip(axes, quantities.items(), strict=True):
            for row in rows:
                color = COLORS[row["setting"].split()[0]]
                ax.plot(
                    row["lambda_max_nat"],
                    row[quantity],
                    color=color,
                    marker=markers[row["lr"]],
                    mfc="none" if row["setting"].endswith("ATC") else color,
                    ls="none",
                    ms=5,
                )
            ax.set_xscale("log")
            ax.set_yscale("log")
            decimal_labels(ax.xaxis)
            decimal_labels(ax.yaxis)
            ax.set_xlabel(r"$\lambda_{max}$ of $w_a$, second half of training (nat)")
            ax.set_ylabel(label)
        handles = [Line2D([], [], color=c, marker="o", ls="none", label=named(n)) for n, c in COLORS.items()]
        handles += [
            Line2D([], [], color="#555555", marker=m, ls="none", label=f"α = {r:g}")
            for r, m in markers.items()
        ]
        handles.append(Line2D([], [], color="#555555", marker="o", mfc="none", ls="none", label="ATC order"))
        picture.legend(handles=handles, loc="outside lower center", ncols=4)
    return picture


def _edge_follows(work: Work) -> Drawing:
    rows = _flatness_rows(work)
    compared, lower = [], []
    for rate in STEPS:
        errors = {
            name: [r["test_error_percent"] for r in rows if (r["lr"], r["setting"]) == (rate, name)]
            for name in ("SSGD", "ring(2) AWC", "ring(2) ATC")
        }
        compared += [
            Compared(f"test error (%), α = {rate:g}, {n}", mean_and_spread(e)) for n, e in errors.items()
        ]
        lower.append(np.median(errors["ring(2) AWC"]) < np.median(errors["SSGD"]))
    correlation = _correlation(rows)
    compared.append(Compared("correlation of log λ_max with log rise", f"{correlation:.2f}"))
    return Drawing(
        {"": _flatness_picture(rows)},
        rows,
        compared,
        f"Over all runs log λ_max and the log rise of the loss correlate with {correlation:.2f}; DPSGD "
        f"ring(2) in AWC order has a lower median test error than SSGD at {sum(map(bool, lower))} of "
        f"{len(lower)} rates.",
    )


def _judge_follows(rows: Rows) -> list[Effect]:
    """By rate, SSGD against DPSGD ring(2) in AWC order; and the correlation over all settings of a seed."""
    effects = []
    for rate in dict.fromkeys(column(rows, "lr")):
        error, rise = (
            [by_seed(rows, quantity, lr=rate, setting=name) for name in ("SSGD", "ring(2) AWC")]
            for quantity in ("test_error_percent", "median_rise_nat")
        )
        where = f"α = {rate:g}, SSGD and ring(2) AWC"
        effects.append(Effect(where, "test error, the first less the second (points)", difference(*error)))
        effects.append(
            Effect(where, "rise of the loss, the first / the second", ratio(*rise), (1.0, np.inf), ratio=True)
        )
    together = tuple(_correlation(select(rows, seed=seed)) for seed in dict.fromkeys(column(rows, "seed")))
    effects.append(Effect("all settings of a seed", "correlation of log λ_max with log rise", together))
    return effects


def _correlation(rows: Rows) -> float:
    """Of log λ_max and the log rise of the loss; NaN from fewer than three rows where both are positive."""
    pairs = np.array([[float(r["lambda_max_nat"]), float(r["median_rise_nat"])] for r in rows])
    pairs = np.log(pairs[np.isfinite(pairs).all(1) & (pairs > 0).all(1)])
    return float(np.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else float("nan")


figure(
    "edge-follows",
    "Further analyses",
    "what follows from the edge: test error and flatness",
    "A lower limit on ηλ gives flatter minima, and these a lower test error.",
    _runs,
    _judge_follows,
    smoke=SMOKE_NOTE,
    laptop=NOTE,
    paper=NOTE,
    weights=True,
)(_edge_follows)

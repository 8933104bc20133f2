"""Test error by learning rate: DPSGD-2021's rates at which training converges, and (ours) a tuned LAMB."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from landscape.paper.context import Context, Ended
from landscape.paper.figure import Compared, Drawing, figure, mean_and_spread, test_error
from landscape.paper.figures.edge import limit_of, look_of, named
from landscape.paper.figures.large_batch import classes
from landscape.paper.verdicts import Effect, Numbers, Rows, by_seed, difference, effect_of, select, settings
from landscape.plots.picture import numbered, panels, shared_legend
from landscape.plots.style import color_of, log_axis, shades, ticks_at

ERROR, SHARPNESS = "test_error_percent", "largest_lr_lambda_max"


def _draw(ax: Any, rows: Rows, column: str, offset: float = 1.0, **look: Any) -> None:
    """The median over seeds and its range by rate, all rates times ``offset``."""
    by = rows.groupby("lr")[column].agg(["median", "min", "max"]).dropna()
    reach = [by["median"] - by["min"], by["max"] - by["median"]]
    ax.errorbar(by.index * offset, by["median"], reach, capsize=3, **look)


# ---- The rates at which training converges

DPSGD = ("DPSGD", "DPSGD in ATC order")
LOOKS = {"SSGD": color_of("ssgd"), **dict(zip(DPSGD, shades(color_of("dpsgd"), 2), strict=True))}


def _bound(rows: Rows) -> float:
    """The test error in % below which a run of a task has converged: halfway from the best to a guess (ours).

    In files without the column of chance, that is 99% for the LSTM's 100 classes and else 90%.
    """
    guess = 99.0 if rows["task"].iloc[0].startswith("LSTM") else 90.0
    if "chance_percent" in rows:
        guess = float(rows["chance_percent"].iloc[0])
    return (float(rows[ERROR].min()) + guess) / 2


def largest_rates(rows: Rows) -> dict[str, Numbers]:
    """The largest rate up to which a seed converges, by algorithm and seed, of one task.

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
    found = groups.apply(largest)
    return {name: found[name] for name in settings(rows, "algorithm")}


def _judge_rates(rows: Rows) -> list[Effect]:
    """The doublings of the rate by which each form of DPSGD converges beyond SSGD, by task."""
    effects, what = [], "doublings of the rate"
    for task, of_task in rows.groupby("task", sort=False):
        edges = largest_rates(of_task)
        ssgd = edges.pop("SSGD", None)
        for a, edge in edges.items() if ssgd is not None else ():
            effects.append(effect_of(f"{task}: {a} beyond SSGD", what, edge, ssgd))
    return effects


@figure("lr-divergence", _judge_rates)
def _rates(context: Context) -> Drawing:
    """Median and range by rate: of each task's test error with its bound, and of ηλ_max with its limits."""

    def measure(run: Ended) -> dict[str, Any]:
        end, guess = run.end, 100 * (1 - 1 / classes(run.end))
        return {
            ERROR: guess if end.diverged else test_error(end),
            "chance_percent": guess,
            SHARPNESS: float(pd.Series(end.history["lr_lambda_max"]).replace(np.inf, np.nan).max()),
            "limit": limit_of(end),
            "diverged": end.diverged,
        }

    rows = context.table(measure)
    tasks, compared = [one for _, one in rows.groupby("task", sort=False)], list[Compared]()
    shown = [(ERROR, one) for one in tasks]
    shown += [(SHARPNESS, one) for one in tasks if (one[SHARPNESS] > 0).any()]
    names = numbered("panel", len(shown))
    picture, axes = panels(-(-len(shown) // 2), 2, 4.6, 2.9, [*names, *[""] * (len(names) % 2)])
    for ax, (quantity, of_task) in zip(axes, shown, strict=True):
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
        one = select(rows, algorithm=name)
        _draw(ax, one, quantity, offset, marker=marker, color=color, label=name)
        for limit in one["limit"].dropna()[:1] if quantity == SHARPNESS else ():
            ax.axhline(limit, color=color, lw=1.0, ls="--")
    if quantity == ERROR:
        ax.axhline(_bound(rows), color="#777777", lw=0.9, ls=":")
    shown = sorted(settings(rows, "lr"))
    ax.set_xscale("log")
    ticks_at(ax.xaxis, shown, [f"{rate:g}" for rate in shown])
    log_axis(ax.yaxis)
    what = {ERROR: "test error of $w_a$ (%)", SHARPNESS: r"largest $\eta\lambda_{max}$ (lines: limits)"}
    ax.set(title=rows["task"].iloc[0], xlabel="learning rate α", ylabel=what[quantity])


# ---- Whether the advantage of decentralized training outlives a tuned adaptive optimizer

SETTINGS = {"SSGD": "o", "ring(2) AWC": "s"}


def _best(rows: Rows, kind: str) -> list[Numbers]:
    """The test errors by seed at the rate with the lowest median, of each setting."""
    found = []
    for name in SETTINGS:
        chosen = select(rows, optimizer=kind, setting=name)
        found.append(by_seed(chosen, ERROR, lr=chosen.groupby("lr")[ERROR].median().idxmin()))
    return found


def _judge_lamb(rows: Rows) -> list[Effect]:
    """The part of DPSGD's advantage with SGD that LAMB takes away, by seed at each one's best rate."""
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

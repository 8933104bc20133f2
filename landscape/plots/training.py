"""Pictures of training: curves by step, seeds of one setting together. Nothing here computes a number."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.core.errors import InputError
from landscape.plots.picture import panels as _panels
from landscape.plots.picture import several
from landscape.plots.surface import plain_numbers, style
from landscape.plots.values import drawing, plain
from landscape.results.escape import Escape

# Figure 2's colours, in a colour-blind-safe version: DPSGD green, SSGD red, SSGD* blue.
COLORS = {"ssgd": "#D55E00", "dpsgd": "#009E73", "ssgd*": "#0072B2"}


@drawing
def training(runs: Sequence[Checkpoint], title: str = "") -> Figure:
    """Loss, test error, α_e, Δ, Δ(2) and spread by step; thin lines are seeds, thick ones their median.

    Runs count as seeds of one setting if their recipes differ in nothing else that bears on the weights; the
    legend says in what others differ. The dotted lines are the learning rates α. Spread and noise are in
    squared weights. A dashed line marks where a run diverged. Where a run monitored its sharpness, ηλ_max is
    drawn above against 2, which plain SGD can stand, and each rule's own limit in its colour; with λ_max and
    the share of the spread along the top eigenvectors. InputError for weights that were imported: they have
    no history.
    """
    for run in runs:
        if run.algorithm == IMPORTED:
            raise InputError(f"{run.path}: imported weights have no training to draw")
    with style():
        monitored = [r for r in runs if np.isfinite(r.history["lr_lambda_max"]).any()]
        figure, axes = _panels(3 if monitored else 2, 3, 3.9, 2.75)
        panels = [*_SHARPNESS] if monitored else []
        panels += [
            ("train_loss", "training loss at $w_a$ (nat)", "log"),
            ("test_error", "test error of $w_a$ (%)", "log"),
            ("consensus", "consensus distance", "log"),
            ("alpha_e", r"effective rate $\alpha_e$ (dots: $\alpha$)", "linear"),
            ("delta", r"noise $\Delta$", "log"),
            ("delta_2_full", r"$\Delta^{(2)} = \alpha^2\Vert\delta\Vert^2$", "log"),
        ]
        groups = _groups(runs)
        for ax, (column, name, scale) in zip(axes, panels, strict=True):
            drawn = [_draw_runs(ax, *group, column) for group in groups]
            ax.set_ylabel(name)
            ax.set_xlabel("step")
            ax.set_yscale(scale if any(drawn) else "linear")
            if column == "test_error":  # percentages are read as plain numbers
                plain_numbers(ax.yaxis)
            if not any(drawn):
                ax.text(0.5, 0.5, "zero or not recorded", ha="center", va="center", transform=ax.transAxes)
            if column == "alpha_e":
                _draw_rates(ax, runs)
            elif column == "lr_lambda_max":
                _draw_limits(ax, groups)
        handles, labels = axes[0].get_legend_handles_labels()
        wide = max(map(len, labels), default=0) > 30
        figure.legend(
            handles, labels, loc="outside lower center", ncols=2 if wide else min(4, len(labels) or 1)
        )
        figure.suptitle(title or _run_title(runs))
    return figure


_LINEAR = ("alpha_e", "lr_lambda_max", "spread_share")
# Columns that are drawn where any run has them: (column, label, scale of the axis).
_SHARPNESS = (
    ("lr_lambda_max", r"$\eta\lambda_{max}$ of $w_a$ (lines: limits)", "linear"),
    ("lambda_max", r"sharpness $\lambda_{max}$ of $w_a$ (nat)", "log"),
    ("spread_share", "share of the spread along\nthe top eigenvectors", "linear"),
)


def _run_title(runs: Sequence[Checkpoint]) -> str:
    first, seeds = runs[0], sorted({r.seed for r in runs})
    if first.algorithm == RECORDED:  # the batch and the data's name are not known
        return plain(first.model["name"])
    many = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    size = f"n = {first.learners}, nB = {first.learners * first.local_batch}"
    return f"{plain(first.data['name'])}, {size}, {many}"


# Keys of a recipe in which seeds of one setting may differ: they do not bear on the weights.
_BESIDE = ("name", "seed", "steps", "decompose", "evaluate", "checkpoint", "monitor", "diverge")


def _groups(runs: Sequence[Checkpoint]) -> list[tuple[str, Any, list[Checkpoint]]]:
    """(label, colour, runs) of each setting: the algorithm, and what tells it from others of the same one."""
    settings = [_setting(run) for run in runs]
    found: dict[tuple[str, ...], list[Checkpoint]] = {}
    for run, own in zip(runs, settings, strict=True):
        others = [s for r, s in zip(runs, settings, strict=True) if r.algorithm == run.algorithm]
        differ = [k for k, v in own.items() if any(s.get(k) != v for s in others)]
        tables = tuple(k.removesuffix("name") for k in differ if k.endswith(".name"))
        told = [k for k in differ if k.endswith(".name") or not k.startswith(tables)]
        key = (run.algorithm, *(f"{k.removesuffix('.name').split('.')[-1]} {own[k]}" for k in told))
        found.setdefault(key, []).append(run)
    # Without blue, green and red, which are those of COLORS but for a digit.
    spare = [c for i, c in enumerate(sns.color_palette("colorblind").as_hex()) if i not in (0, 2, 3)]
    named = set[str]()
    groups: list[tuple[str, Any, list[Checkpoint]]] = []
    for words, members in found.items():  # the first setting of an algorithm has the algorithm's colour
        color = None if words[0] in named else COLORS.get(words[0])
        named.add(words[0])
        label = plain(", ".join(words[:4]) + ", …" * (len(words) > 4))
        groups.append((label, color or spare[len(groups) % len(spare)], members))
    return groups


def _setting(run: Checkpoint) -> dict[str, Any]:
    """What a run's recipe says that bears on its weights, by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tomllib.loads(run.recipe).items():
        if key not in _BESIDE:
            inner = value.items() if isinstance(value, dict) else [("", value)]
            flat |= {f"{key}.{k}" if k else key: v for k, v in inner}
    return flat


def _draw_rates(ax: Axes, runs: Sequence[Checkpoint]) -> None:
    """The learning rates over the steps, and limits near them and near the usual α_e."""
    top = 0.0
    for run in runs:
        lr, alpha_e = run.history["lr"], run.history["alpha_e"]
        if not len(lr):
            continue
        ax.plot(run.history["step"], lr, color="#777777", lw=0.9, ls=":", zorder=0)
        # Where g is small α_e is all noise: show what is near α, or, if the steps are not plain ones and α_e
        # is of another size, what most of it is.
        seen = np.abs(alpha_e[np.isfinite(alpha_e)])
        plain = not len(seen) or np.isfinite(run.history["delta_s"]).any()
        top = max(top, float(2.5 * lr.max() if plain else 1.5 * np.quantile(seen, 0.9)))
    if top:
        ax.set_ylim(-0.2 * top, top)


def _draw_limits(ax: Axes, groups: Sequence[tuple[str, Any, list[Checkpoint]]]) -> None:
    """The line 2, the settings' own limits, and the axis from 0 to what most of the values are."""
    values = [r.history["lr_lambda_max"] for _, _, runs in groups for r in runs]
    seen = np.concatenate([v[np.isfinite(v)] for v in values])
    ax.axhline(2.0, color="#777777", lw=0.9, ls=":", zorder=0)
    for _, color, runs in groups:
        limits = np.concatenate([r.history["lr_lambda_limit"] for r in runs])
        for limit in np.unique(limits[np.isfinite(limits)]):
            ax.axhline(limit, color=color, lw=1.2, ls="--", zorder=1)
    top = max(2.2, 1.2 * float(np.quantile(seen, 0.98)))
    ax.set_ylim(min(0.0, float(seen.min())), top)


def _draw_runs(ax: Axes, label: str, color: Any, runs: Sequence[Checkpoint], column: str) -> bool:
    """Draw the seeds of one setting; False if there is nothing to see (all NaN, or all zero)."""
    curves = []
    for run in runs:
        values = 100 * (1 - run.history["test_accuracy"]) if column == "test_error" else run.history[column]
        # Zeros have no place on the log scales, which most have.
        shown = np.isfinite(values) & ((values > 0) | (column in _LINEAR))
        if shown.any():
            curves.append((run.history["step"][shown], values[shown]))
            alone = len(runs) == 1
            ax.plot(
                *curves[-1],
                color=color,
                lw=1.4 if alone else 0.6,
                alpha=1 if alone else 0.45,
                label=label if alone else None,
            )
        if run.diverged and run.step:
            ax.axvline(run.step, color=color, lw=0.8, ls="--")
    if len(runs) > 1 and curves:
        steps = sorted(set.intersection(*(set(c[0].tolist()) for c in curves)))
        table = [np.interp(steps, *curve) for curve in curves]
        ax.plot(
            steps, np.median(table, axis=0), color=color, lw=1.8, label=f"{label} (median of {len(runs)})"
        )
    return bool(curves)


@drawing
def escapes(results: Sequence[Escape], title: str = "") -> Figure:
    """Median escape time with its 95% band against what is varied, a panel a result.

    A line or band at the top edge, which is the last step, had not escaped by then.
    """
    names = {"dimension": "dimension", "noise": "std of a sample's gradient", "lr": "learning rate"}
    with style():
        figure, axes = several(len(results), 3.9, 3.1, sharey=True)
        for ax, r in zip(axes, results, strict=True):
            low, high = (np.minimum(edge, r.steps) for edge in r.band())
            median = np.minimum(r.median, r.steps)
            for a, name in enumerate(r.algorithms):
                ax.fill_between(r.values, low[a], high[a], color=COLORS.get(name, "#777777"), alpha=0.2, lw=0)
                ax.plot(
                    r.values,
                    median[a],
                    color=COLORS.get(name, "#777777"),
                    marker="osD"[a % 3],
                    ms=4,
                    label=name,
                )
            ax.set_xscale("log", base=10 if r.vary == "noise" else 2)
            ax.set_yscale("log")
            if r.vary != "noise":
                ax.set_xticks(r.values, [f"{v:g}" for v in r.values])
                ax.xaxis.set_minor_locator(ticker.NullLocator())
            ax.set_title(r.setting)
            ax.set_xlabel(names.get(r.vary, r.vary))
            plain_numbers(ax.yaxis)
            ax.set_ylabel("steps to escape" if ax.get_subplotspec().is_first_col() else "")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle(
            title or f"Escape from a saddle, median of {results[0].times.shape[2]} seeds and 95% band"
        )
    return figure

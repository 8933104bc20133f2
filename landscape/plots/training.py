"""Training curves of checkpoints; runs that differ only in their seed are drawn as one setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.checkpoint.history import OF_LAYER, UNITS, latest
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.plots import draws, literal, style
from landscape.plots.picture import finish, in_paper, panels
from landscape.results.shown import running_quartiles

Group = tuple[str, Any, list[Checkpoint]]  # label, color and runs of a setting


@draws(Checkpoint)
def draw_training(runs: Sequence[Checkpoint], title: str = "") -> Figure:
    """Draw the history of runs by step, with a panel for each quantity.

    The last two rows have the training loss, the test error, the consensus distance, the effective learning
    rate α_e, the noise Δ of a step, and Δ(2), the noise that the learners' spread adds.

    Runs whose recipes differ only in the seed, or in keys that do not change the weights, are one setting.
    Thin lines are its seeds, a thick line is their median. Consensus distance, α_e, Δ and Δ(2) vary much from
    step to step: their thick line is the running median over 5% of the steps and all seeds, with a band
    between the quartiles. The legend names the keys in which settings differ. Dotted lines are the learning
    rates α; a dashed line marks the step at which a run diverged.

    The rows above have a panel for each quantity that instruments measured during a run, such as λ_max, and
    for each metric of the test data of a :class:`landscape.Recorder`. For a single run, the panel of the
    change of the loss has the changes by layer. The panels of ηλ_max and of η times batch sharpness have the
    limit of each setting's update rule in the setting's color or, if no limit is known, the limit 2 of plain
    SGD. In the panel of the noise scale, a dotted line is the total batch.

    Raises:
        InputError: imported weights, which have no training history.
    """
    for run in runs:
        if run.algorithm == IMPORTED:
            raise InputError(f"{run.path or run.label}: imported weights have no training history to draw")

    def is_measured(column: str) -> bool:
        return any(np.isfinite(column_of(run, column)).any() for run in runs)

    metrics = dict.fromkeys(c for r in runs for c in r.history if c.startswith("test_") and c not in UNITS)
    measured_columns = [column for column in (*_INSTRUMENTS, *metrics) if is_measured(column)]
    standard_columns = list(_STANDARD)
    if all(run.algorithm == RECORDED for run in runs):
        # With one learner, the columns about the spread of learners say nothing. Two others replace them.
        standard_columns = [_RECORDED_IN_PLACE_OF.get(column, column) for column in _STANDARD]
        # All standard columns if none has a value, so that the picture has a panel.
        standard_columns = [column for column in standard_columns if is_measured(column)] or standard_columns

    drawn_columns = measured_columns + standard_columns
    # The names of the cells in rows of three; the last row may have one or two empty cells, "".
    cells = drawn_columns + [""] * (-len(drawn_columns) % 3)
    groups = [(literal(label), color, members) for label, color, members in groups_of(runs)]
    # For a paper, ``panels`` makes panels narrower, but not below half of the width that it is given. With
    # 3.2 inches, two panels have room in a column of 3.3 inches.
    figure, axes = panels(len(cells) // 3, 3, 3.2 if in_paper() else 3.5, 2.7, cells)
    for ax, column in zip(axes, drawn_columns, strict=True):  # ``axes`` has none for empty cells
        name, scale, _ = PANELS.get(column, (column.replace("_", " "), "linear", ""))
        layers = layers_of(runs) if column == "loss_change" else {}  # also {} for several runs
        has_values = bool(layers)
        if layers:
            _draw_layers(ax, runs[0], layers)
        else:
            for k, group in enumerate(groups):
                # Earlier groups have wider lines, so that two equal curves are both visible.
                extra_width = 0.6 * min(len(groups) - 1 - k, 3)
                has_values |= _draw_runs(ax, group, column, scale, extra_width)
        ax.set_ylabel(f"{name}{style.in_brackets(unit_of(column))}", fontsize=9)
        ax.set(xlabel="step", yscale=scale if has_values else "linear")
        if has_values and scale == "log":
            style.decimal_labels(ax.yaxis)
        if not has_values:
            ax.text(0.5, 0.5, "zero or not recorded", ha="center", va="center", transform=ax.transAxes)
        if column == "alpha_e":
            _draw_rates(ax, runs)
        elif column in LIMITS:
            _draw_limits(ax, groups, column)
        elif column == "noise_scale":
            for batch in {r.learners * r.local_batch for r in runs if r.local_batch}:
                ax.axhline(batch, color=style.OTHER, lw=0.9, ls=":", zorder=0)
        for line in ax.lines:
            has_one_point = np.isfinite(line.get_xydata()).all(1).sum() == 1
            if has_one_point and line.get_marker() == "None":  # a line of one point is invisible
                line.set(marker="o", markersize=3 * line.get_linewidth())
    # The legend below all panels has the settings, with more room for long names; the panel of the layers has
    # a legend of its own.
    legend_panel = axes[1] if measured_columns[:1] == ["loss_change"] else axes[0]
    _, legend_names = legend_panel.get_legend_handles_labels()
    legend_columns = 2 if max(map(len, legend_names), default=0) > 30 else 4  # our choice
    heading = title or _finding(groups) or _run_title(runs)
    # A legend with no other name than that of recorded loops says nothing and is left out.
    in_legend = [] if legend_names == [RECORDED] else [legend_panel]
    return finish(figure, heading, _caption(runs, drawn_columns), in_legend, ncols=legend_columns)


_MEAN = "w_a: mean of the n learners' weights, which take nB samples a step"
_SPREAD = "Spread: the learners around w_a, before they average"
_BATCH = "Batch sharpness: the curvature along minibatches' gradients"
_LIMIT = "η: learning rate (α); dashed: limit of stable training"
_SHARP = "Sharp: along the Hessian's top eigenvectors"
_SCALE = "Noise scale: the batch with as much noise as gradient; dotted: the run's batch"
#: Columns of the history that pictures show -> (name, scale of the axis, for the caption its meaning).
PANELS = {
    "train_loss": ("training loss of $w_a$", "log", _MEAN),
    "test_error": ("test error of $w_a$", "log", _MEAN),
    "consensus": ("consensus distance", "log", f"{_SPREAD}; consensus distance: its mean square"),
    "alpha_e": ("$α_e$; dotted: α", "linear", "α_e: how far a step moves against the gradient g, over ‖g‖"),
    "delta": ("noise Δ of a step", "log", "Δ: squared length of the rest of the step"),
    "delta_2_full": ("Δ(2), from the spread", "log", "Δ(2): noise that the spread adds; no curve: 0"),
    "grad_norm2": ("‖g‖² of the training loss", "log", ""),
    "displacement2": ("‖d‖² of a step", "log", "d: the step"),
    "heterogeneity": ("heterogeneity of the data", "log", ""),
    "lr_lambda_max": ("$ηλ_{max}$ of $w_a$", "linear", _LIMIT),
    "lambda_max": ("$λ_{max}$ of $w_a$", "log", "λ_max: largest eigenvalue of the Hessian H"),
    "spread_share": ("sharp share of the spread", "linear", _SHARP),
    "lr_batch_sharpness": ("η × batch sharpness", "linear", f"{_LIMIT}. {_BATCH}"),
    "lr_learner_batch_sharpness": ("η × learners' batch sharpness", "linear", _LIMIT),
    "noise_scale": ("noise scale", "log", _SCALE),
    "gradient_share": ("sharp share of the gradient", "linear", _SHARP),
    "disagreement_cost": ("½ tr(HC)", "log", "C: covariance of the learners' weights, H: Hessian"),
    "noise_alignment": ("tr(HS)/tr S", "log", "S: covariance of the gradient noise, H: Hessian"),
    "loss_change": ("change of the loss", "linear", "d: the step, H: the Hessian"),
    "loss_change_gradient": ("⟨g, d⟩ of a step", "linear", ""),
    "loss_change_curvature": ("½ dᵀHd of a step", "linear", ""),
    "directional_sharpness": ("dᵀHd/‖d‖² of a step", "log", ""),
    "lr_preconditioned_lambda_max": ("$ηλ_{max}$ preconditioned", "linear", _LIMIT),
    "worst_sharpness": ("worst sharpness", "log", ""),
    "average_sharpness": ("average sharpness", "log", ""),
}
# The columns of every run, and those of instruments; the two between them replace columns of a recorded loop.
_STANDARD, _INSTRUMENTS = tuple(PANELS)[:6], tuple(PANELS)[8:]
# Standard column -> the column that replaces it for recorded loops.
_RECORDED_IN_PLACE_OF = {"consensus": "grad_norm2", "delta_2_full": "displacement2"}
# Columns with a limit -> the column of the limit.
_OF_RULES = ("lr_lambda_max", "lr_batch_sharpness", "lr_learner_batch_sharpness")
LIMITS = dict.fromkeys(_OF_RULES, "lr_lambda_limit")
LIMITS |= {"lr_preconditioned_lambda_max": "lr_preconditioned_limit"}
# Columns that change more from step to step than over training. With at least this number of values, they
# are drawn as running median and quartiles of all seeds of a setting (our choice).
_NOISY, _MANY = ("consensus", "alpha_e", "delta", "delta_2_full"), 100
# Columns in the unit of squared weights, which weights themselves do not have.
_SQUARES = ("consensus", "delta", "delta_2_full", "displacement2")


def _finding(groups: Sequence[Group]) -> str:
    """Return the test errors after the last step, or the training losses; "" if neither was recorded."""
    steps = sorted({run.step for _, _, runs in groups for run in runs})
    after = f"after step {steps[-1]:,}" if len(steps) == 1 else "after the last step"
    for column, name, number_format, unit in (("test_error", "Test error", ".2f", "%"),
                                              ("train_loss", "Training loss", ".3g", "")):  # fmt: skip
        texts = []
        for label, _, runs in groups:
            ends = np.array([latest({column: column_of(run, column)}, column) for run in runs])
            if np.isfinite(ends).any():
                name_of = "" if label == RECORDED else f"{label} "
                texts.append(f"{name_of}{np.nanmedian(ends):{number_format}}{unit}")
        if texts:
            return style.fitting(f"{name} {after}: {', '.join(texts)}", f"{name} {after}")
    return ""


def _caption(runs: Sequence[Checkpoint], columns: Sequence[str]) -> str:
    """Return the settings of the runs, and the meaning of lines, bands and symbols of the ``columns``."""
    sentences = [_run_title(runs)]
    if len(runs) > len(groups_of(runs)):
        sentences.append("Thin lines: seeds; thick lines: their median")
    if any(r.diverged for r in runs):
        sentences.append("Dashed: the step at which a run diverged")
    if any(np.isfinite(r.history[c]).sum() >= _MANY for r in runs for c in _NOISY):
        sentences.append("Bands: quartiles over 5% of the steps and all seeds")
    meanings = [text for column in columns if column in PANELS for text in PANELS[column][2].split(". ")]
    sentences += filter(None, [*dict.fromkeys(meanings), _errors(runs)])
    text = ". ".join(sentences) + "."
    return text if any(r.algorithm != RECORDED for r in runs) else text.replace(_MEAN, "w_a: the weights")


def _errors(runs: Sequence[Checkpoint]) -> str:
    """Return the median standard errors of Δ and α_e as text; "" where g is not estimated."""
    texts = []
    for name, column in (("Δ", "delta"), ("α_e", "alpha_e")):
        values = np.concatenate([r.history[column] for r in runs])
        errors = np.concatenate([r.history[f"{column}_se"] for r in runs])
        relative = np.abs(errors / np.where(values == 0, np.nan, values))
        relative = relative[np.isfinite(relative) & (relative > 0)]
        if len(relative):
            texts.append(f"{100 * np.median(relative):.2g}% of {name}")
    return f"Estimated from samples, standard error {', '.join(texts)}" if texts else ""


def _run_title(runs: Sequence[Checkpoint]) -> str:
    """Return data, n, nB and seeds of the runs; different values are in the order of the legend."""
    trained = [r for r in runs if r.algorithm != RECORDED]  # batch and data of others are unknown
    if not trained:
        return f"Recorded loop of {style.joined(literal(r.model['name'].split(':')[-1]) for r in runs)}"
    seeds = sorted({r.seed for r in trained})
    seeds_note = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    sizes = style.joined(f"n = {r.learners}, nB = {r.learners * r.local_batch}" for r in trained)
    return f"{style.joined(literal(r.data['name']) for r in trained)}, {sizes}, {seeds_note}"


# Keys of a recipe in which the seeds of one setting may differ: they do not change the weights.
_IRRELEVANT = ("name", "seed", "steps", "decompose", "evaluate", "checkpoint", "monitor", "diverge")


def groups_of(runs: Sequence[Checkpoint]) -> list[Group]:
    """Return (label, color, runs) of each setting; the label names the algorithm and the keys that differ.

    Runs of one setting have recipes that differ only in the seed, or in keys that do not change the weights.
    """
    settings = [recipe_keys(run) for run in runs]
    runs_of: dict[tuple[str, ...], list[Checkpoint]] = {}
    for run, setting in zip(runs, settings, strict=True):
        user_name = run.source.get("name")
        if user_name:
            runs_of.setdefault((str(user_name),), []).append(run)
            continue
        same_algorithm = [s for r, s in zip(runs, settings, strict=True) if r.algorithm == run.algorithm]
        differing = [k for k, value in setting.items() if any(s.get(k) != value for s in same_algorithm)]
        # If the name in a table differs, such as model.name, its other keys say nothing more.
        tables = tuple(key.removesuffix("name") for key in differing if key.endswith(".name"))
        keys = [key for key in differing if key.endswith(".name") or not key.startswith(tables)]
        words = [f"{key.removesuffix('.name').split('.')[-1]} {setting[key]}" for key in keys]
        runs_of.setdefault((run.algorithm, *words), []).append(run)
    labels = [", ".join([*words[:4], "…"] if len(words) > 4 else words) for words in runs_of]
    return list(zip(map(style.paper_name, labels), style.colors_of(labels), runs_of.values(), strict=True))


def recipe_keys(run: Checkpoint) -> dict[str, Any]:
    """Return the keys of a run's recipe that change its weights, dotted, with their values."""
    flat: dict[str, Any] = {}
    for key, value in run.settings.items():
        if key not in _IRRELEVANT:
            inner = value.items() if isinstance(value, dict) else [("", value)]
            flat |= {f"{key}.{k}" if k else key: v for k, v in inner}
    return flat


def layers_of(runs: Sequence[Checkpoint]) -> dict[str, Array]:
    """Return layer -> its change of the loss (T,) of one run; {} of several runs, or if not recorded."""
    if len(runs) > 1:
        return {}
    columns = {k: v for k, v in runs[0].history.items() if k.startswith(OF_LAYER) and np.isfinite(v).any()}
    return {name.removeprefix(OF_LAYER): column for name, column in columns.items()}


def _draw_layers(ax: Axes, run: Checkpoint, layers: dict[str, Array]) -> None:
    """Stack the layers' changes of the loss by step: falls below zero, rises above it."""
    values, total = np.array(list(layers.values())), run.history["loss_change"]
    finite = np.isfinite(values).all(0)
    steps, values = run.history["step"][finite], values[:, finite]
    colors = style.in_order(len(layers))
    ax.stackplot(steps, np.minimum(values, 0), colors=colors, labels=[*layers])
    ax.stackplot(steps, np.maximum(values, 0), colors=colors)
    ax.plot(steps, total[finite], color=style.DARK, lw=1.0, label="in all")
    ax.legend(fontsize="small", ncols=2, title="layer", title_fontsize="small")


def _draw_rates(ax: Axes, runs: Sequence[Checkpoint]) -> None:
    """Draw the learning rates over the steps, and set the axis to their size and that of most α_e."""
    top = 0.0
    for run in runs:
        lr, alpha_e = run.history["lr"], run.history["alpha_e"]
        if not len(lr):
            continue
        ax.plot(run.history["step"], lr, color=style.DARK, lw=1.4, ls=":", zorder=3)  # above equal α_e
        # α_e is mostly noise where g is small: show values near α. If steps are not −α × gradient (delta_s is
        # then NaN), α_e has another size: show 95% of its values.
        finite = np.abs(alpha_e[np.isfinite(alpha_e)])
        gradient_steps = not len(finite) or np.isfinite(run.history["delta_s"]).any()
        top = max(top, float(1.8 * lr.max() if gradient_steps else 1.5 * np.quantile(finite, 0.95)))
    if top:
        ax.set_ylim(-0.2 * top, top)


def unit_of(column: str) -> str:
    """Return the unit of a drawn column of the history."""
    units: dict[str, str] = UNITS | {"test_error": "%"} | dict.fromkeys(_SQUARES, "weights²")
    for instrument in registry.instruments.names():
        units |= registry.instruments[instrument].columns
    return units.get(column, "1")


def column_of(run: Checkpoint, name: str) -> Array:
    """Return a column of the history, NaN if the run does not have it; the test error is in %."""
    if name == "test_error":
        return 100 * (1 - run.history["test_accuracy"])
    return run.history.get(name, np.full(len(run.history["step"]), np.nan))


def _draw_limits(ax: Axes, groups: Sequence[Group], column: str) -> None:
    """Draw the limits of the settings, or else the limit 2 of SGD, and set the axis to most of the values."""
    values = [column_of(r, column) for _, _, runs in groups for r in runs]
    finite = np.concatenate([v[np.isfinite(v)] for v in values])
    is_sgd, highest = LIMITS[column] == "lr_lambda_limit", 0.0
    for _, color, runs in groups:
        limits = np.concatenate([column_of(r, LIMITS[column]) for r in runs])
        for limit in np.unique(limits[np.isfinite(limits)]):
            ax.axhline(limit, color=color, lw=1.2, ls="--", zorder=1)
            highest = max(highest, float(limit))
    if is_sgd and not highest:
        ax.axhline(2.0, color=style.OTHER, lw=0.9, ls=":", zorder=0)
    top = max(2.2 if is_sgd else 1.1 * highest, 1.2 * float(np.quantile(finite, 0.995)))
    ax.set_ylim(min(0.0, float(finite.min())), top)


def _draw_runs(ax: Axes, group: Group, column: str, scale: str, extra_width: float) -> bool:
    """Draw a column of the history of one setting: a line for each seed and their median.

    Many values of a noisy column are drawn as running median and quartiles. ``extra_width`` (points) makes
    all lines wider, except for the thin lines of seeds. Returns whether any value can be drawn.
    """
    label, color, runs = group
    curves = []  # (steps, values) of each seed
    for run in runs:
        values = column_of(run, column)
        is_drawn = np.isfinite(values)
        if scale == "log":
            is_drawn &= values > 0
        if is_drawn.any():
            curves.append((run.history["step"][is_drawn], values[is_drawn]))
        if run.diverged and run.step:
            ax.axvline(run.step, color=color, lw=0.8, ls="--")
    value_count = sum(len(steps) for steps, _ in curves)
    if column in _NOISY and value_count >= _MANY:
        all_steps, all_values = np.concatenate(curves, axis=1)
        steps, (low, median, high) = running_quartiles(all_steps, all_values)
        ax.fill_between(steps, low, high, color=color, alpha=0.25, lw=0)
        ax.plot(steps, median, color=color, lw=1.6 + extra_width, label=label)
    elif curves and len(runs) == 1:
        ax.plot(*curves[0], color=color, lw=1.4 + extra_width, label=label)
    elif curves:
        for curve in curves:
            ax.plot(*curve, color=color, lw=0.6, alpha=0.45)
        # The median is taken at the steps that all seeds have, where np.interp returns a seed's own values.
        shared_steps = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in curves)))
        median = np.median([np.interp(shared_steps, *curve) for curve in curves], axis=0)
        # The label has the number of all seeds, also if one of them has no value to draw.
        median_label = f"{label} (median of {len(runs)})"
        ax.plot(shared_steps, median, color=color, lw=1.8 + extra_width, label=median_label)
    return bool(curves)

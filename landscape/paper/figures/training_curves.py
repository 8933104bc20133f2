"""DPSGD-2020's Figures 1, 3, 4, 6 and 7: CIFAR-10's networks and the acoustic model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, mean_and_spread, test_error
from landscape.paper.scales import (
    PAPER_CIFAR,
    PAPER_SPEECH,
    SMOKE_NOTE,
    SPEECH_NOTE,
    STATION_CIFAR,
    cells,
    cifar_note,
)
from landscape.paper.table_picture import used
from landscape.paper.verdicts import Effect, Rows, by_seed, column, difference, select
from landscape.plots.picture import panels, wrapped_panels
from landscape.plots.style import color_of, style
from landscape.train.table_recipes import BATCHES, NETWORKS, SPEECH_BATCHES

# What the paper calls the networks.
NAMED = dict(zip(NETWORKS, (
    "EfficientNet-B0", "SENet-18", "VGG-19", "ResNet-18", "DenseNet-121", "MobileNet", "MobileNetV2",
    "ShuffleNet", "GoogleNet", "ResNext-29",
), strict=True))  # fmt: skip
BOTH = ("ssgd", "dpsgd")
ALL = {"ssgd": "SSGD", "ssgd-noise": "SSGD*", "dpsgd": "DPSGD"}
COLOR = {a: color_of(name) for a, name in ALL.items()}
SCALED: dict[str, Any] = {
    "smoke": SMOKE_NOTE,
    "laptop": cifar_note(),
    "workstation": STATION_CIFAR,
    "paper": PAPER_CIFAR,
    "partial": True,
}
SPOKEN: dict[str, Any] = {
    "smoke": SMOKE_NOTE,
    "laptop": SPEECH_NOTE,
    "workstation": f"{SPEECH_NOTE}, three seeds",
    "paper": PAPER_SPEECH,
    "partial": True,
}


def networks(scale: Scale, laptop: int, smoke: int = 2) -> tuple[str, ...]:
    """Those that a figure has: the first ``smoke`` or ``laptop`` of the paper's ten, or all.

    A workstation has as many as a laptop.
    """
    return NETWORKS[: {"smoke": smoke, "laptop": laptop, "workstation": laptop, "paper": 10}[scale]]


def batches(scale: Scale) -> tuple[int, ...]:
    """Those of Table 3 that a figure has."""
    both = BATCHES[0], BATCHES[-1]
    return {"smoke": BATCHES[-1:], "laptop": both, "workstation": both, "paper": BATCHES}[scale]


def seeded(scale: Scale, names: Iterable[str]) -> Runs:
    """Three seeds of each cell, but on a laptop one where the batch is not the task's largest."""
    runs: dict[str, Any] = {}
    for name in names:
        largest = (SPEECH_BATCHES if name.startswith("speech") else BATCHES)[-1]
        runs |= cells(scale, [name], 3 if f"-b{largest}-" in name or scale != "laptop" else 1)
    return runs


def speech(scale: Scale) -> Runs:
    """Table 4's runs."""
    return seeded(scale, [cell("lstm", batch, a) for batch in SPEECH_BATCHES for a in BOTH])


def cell(model: str, batch: int, algorithm: str, rate: str = "") -> str:
    """The name of a table's cell."""
    task = "speech" if model == "lstm" else "cifar10"
    return f"{task}/{model}-b{batch}-{algorithm}{rate}"


def _batch(work: Work, model: str, batch: int) -> str:
    """The batch that the runs of a cell used, and the paper's where it is another one."""
    printed = 16 * batch if model == "lstm" else batch  # the cells of speech have the batches used here
    return used(f"batch {printed}", work.runs[f"{cell(model, batch, 'ssgd')}/0"].batch)


def accuracy(run: Checkpoint) -> float:
    """Test accuracy in %, as the paper prints it: 10 where training diverged."""
    return 10.0 if run.diverged else 100 - test_error(run)


def _by_epoch(run: Checkpoint, column: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(epochs, values) where the column was evaluated; accuracy in %."""
    values = run.history[column] * (100 if column == "test_accuracy" else 1)
    evaluated = np.isfinite(values)
    return run.history["step"][evaluated] * run.epoch / max(1, run.step), values[evaluated]


def curves(ax: Any, runs: list[Checkpoint], column: str, **look: Any) -> list[dict[str, Any]]:
    """Draw a column of ``runs`` by epoch, with a cross where one diverged; returns what was drawn."""
    rows = []
    for k, run in enumerate(runs):
        epochs, values = _by_epoch(run, column)
        ax.plot(epochs, values, **(look if k == 0 else {**look, "label": None}))
        if run.diverged and len(epochs):
            ax.plot(epochs[-1], values[-1], "x", color=look["color"], ms=8, mew=2)
        rows += [
            {"seed": run.seed, "epoch": float(e), column: float(v), "diverged": run.diverged}
            for e, v in zip(epochs, values, strict=True)
        ]
    return rows


_WHAT = {"test_accuracy": "test accuracy of $w_a$ (%)", "test_loss": "held-out loss (nat)"}

# ---- Figure 1

_FIRST = (
    ("lstm", 512, "test_loss"),
    ("efficientnet-b0", 8192, "test_accuracy"),
    ("senet-18", 8192, "test_accuracy"),
)


def _fig1_runs(scale: Scale) -> Runs:
    return seeded(scale, [cell(m, b, a) for m, b, _ in _FIRST for a in ALL])


def _fig1(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    compared: list[Compared] = []
    better = []
    paper = {"efficientnet-b0": ("10", "22.15", "91.13"), "senet-18": ("10", "84.86", "90.48")}
    with style():
        picture, axes = panels(1, 3, 4.0, 3.5)
        for ax, (model, batch, column) in zip(axes, _FIRST, strict=True):
            final = {}
            for k, (a, name) in enumerate(ALL.items()):
                runs = work.group(cell(model, batch, a))
                points = curves(ax, runs, column, color=COLOR[a], ls=("-", "--", "-.")[k], label=name)
                rows += [
                    {"model": model, "algorithm": name, "quantity": column, "value": r.pop(column), **r}
                    for r in points
                ]
                values = [accuracy(run) if column == "test_accuracy" else held_out(run) for run in runs]
                final[a] = float(np.mean(values)) if values else math.nan
                what = _WHAT[column].replace(" of $w_a$", "")
                printed = paper.get(model, ("10.37", "", "1.66"))[k]
                compared.append(Compared(f"{what}, {_name(model)}, {name}", mean_and_spread(values), printed))
            sign = -1 if column == "test_loss" else 1
            if all(map(math.isfinite, final.values())):
                better.append(sign * final["dpsgd"] > max(sign * final["ssgd"], sign * final["ssgd-noise"]))
            ax.set_title(f"{_name(model)}, {_batch(work, model, batch)}")
            ax.set_xlabel("epoch")
            ax.set_ylabel(_WHAT[column])
        _legend(picture, axes)
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"DPSGD ends best of the three in {sum(better)} of {len(better)} tasks.",
    )


def _legend(picture: Any, axes: Any) -> None:
    """What the panels show, those without a line left out."""
    shown = dict(pair[::-1] for ax in axes for pair in zip(*ax.get_legend_handles_labels(), strict=True))
    picture.legend(shown.values(), shown, loc="outside lower center", ncols=3)


def _judge_1(rows: Rows) -> list[Effect]:
    """DPSGD against both others, and what SSGD ends with against a guess."""
    effects = []
    for model, _, quantity in _FIRST:
        end = {a: ends(rows, "value", quantity, model=model, algorithm=name) for a, name in ALL.items()}
        for other in ("ssgd", "ssgd-noise"):
            won = gain(end["dpsgd"], end[other], quantity)
            effects.append(Effect(f"{_name(model)}, DPSGD less {ALL[other]}", GAIN[quantity], won))
    return effects


def held_out(run: Checkpoint) -> float:
    """Held-out loss at the end in nats; where training diverged, that of a guess, as the paper prints it."""
    losses = run.history["test_loss"][np.isfinite(run.history["test_loss"])]
    return guess(run) if run.diverged or not len(losses) else float(losses[-1])


def guess(run: Checkpoint) -> float:
    """The loss of equal probabilities for all classes (nat)."""
    options = run.model["options"]
    return float(np.log(int(options.get("classes") or options["widths"][-1])))


# What stands for the end of a run that diverged: the paper's 10% accuracy, and the loss of a guess among the
# 100 classes of the spoken digits.
_LOST = {"test_accuracy": 10.0, "test_loss": float(np.log(100))}


def ends(rows: Rows, value: str, quantity: str, **where: Any) -> dict[float, float]:
    """The last ``value`` of each seed, of ``quantity``; of a run that diverged what stands for it."""
    last = by_seed(rows, value, **where)
    if "diverged" not in rows[0]:
        return last
    lost = {float(row["seed"]) for row in select(rows, **where) if row["diverged"]}
    return {seed: _LOST[quantity] if seed in lost else v for seed, v in last.items()}


def gain(better: Any, worse: Any, quantity: str) -> tuple[float, ...]:
    """By how much the first is better, by seed: points of accuracy, or nats of loss."""
    return difference(better, worse) if quantity == "test_accuracy" else difference(worse, better)


GAIN = {"test_accuracy": "test accuracy (points)", "test_loss": "held-out loss, by how much lower (nat)"}


def _name(model: str) -> str:
    return NAMED.get(model, "LSTM")


figure(
    "fig1",
    "DPSGD-2020, Figure 1",
    "SSGD, SSGD* and DPSGD at the largest batch",
    "SSGD does not converge in the large-batch setting; with injected noise (SSGD*) it converges to "
    "something worse than DPSGD.",
    _fig1_runs,
    _judge_1,
    smoke=SMOKE_NOTE,
    laptop=f"{cifar_note()}; {SPEECH_NOTE}",
    workstation=f"{STATION_CIFAR}; {SPEECH_NOTE}",
    partial=True,
    paper=f"{PAPER_CIFAR}; {PAPER_SPEECH}",
)(_fig1)

# ---- Figure 6 and Table 3; Figure 7 and Table 4


def _table3_runs(scale: Scale) -> Runs:
    return seeded(scale, [cell(m, b, a) for m in networks(scale, 4) for b in batches(scale) for a in BOTH])


def _progress(work: Work, tasks: list[tuple[str, list[int]]], column: str) -> Drawing:
    rows: list[dict[str, Any]] = []
    with style():
        picture, axes = wrapped_panels(len(tasks), 3.9 if len(tasks) > 1 else 6.0, 3.2, sharey=True)
        for ax, (model, batches) in zip(axes, tasks, strict=True):
            for a, (k, batch) in itertools.product(BOTH, enumerate(batches)):
                runs = work.group(cell(model, batch, a))
                shade = 0.35 + 0.65 * (k + 1) / len(batches)
                points = curves(ax, runs, column, color=COLOR[a], alpha=shade, lw=0.8 + 0.4 * k)
                rows += [{"model": _name(model), "batch": batch, "algorithm": ALL[a], **r} for r in points]
            ax.set_title(_name(model))
            ax.set_xlabel("epoch")
            if ax.get_subplotspec().is_first_col():
                ax.set_ylabel(_WHAT[column])
        handles = [Line2D([], [], color=COLOR[a], label=ALL[a]) for a in BOTH]
        handles += [
            Line2D(
                [],
                [],
                color="#555555",
                lw=0.8 + 0.4 * k,
                alpha=0.35 + 0.65 * (k + 1) / len(tasks[0][1]),
                label=_batch(work, tasks[0][0], batch),
            )
            for k, batch in enumerate(tasks[0][1])
        ]
        picture.legend(handles=handles, loc="outside lower center", ncols=6 if len(tasks) > 1 else 3)
    effects = _judge_progress(rows)
    ahead = [np.mean(e.values) > 0 for e in effects if e.values]
    return Drawing(
        {"": picture},
        rows,
        [],
        f"At the largest batch DPSGD ends better than SSGD for {sum(ahead)} of {len(ahead)} networks.",
    )


def _judge_progress(rows: Rows) -> list[Effect]:
    """DPSGD against SSGD at each network's largest batch."""
    quantity = "test_loss" if rows and "test_loss" in rows[0] else "test_accuracy"
    effects = []
    for model in dict.fromkeys(column(rows, "model")):
        batch = max(float(row["batch"]) for row in rows if row["model"] == model)
        end = [ends(rows, quantity, quantity, model=model, batch=batch, algorithm=ALL[a]) for a in BOTH]
        where = f"{model}, batch {batch * (16 if quantity == 'test_loss' else 1):g}, DPSGD less SSGD"
        effects.append(Effect(where, GAIN[quantity], gain(end[1], end[0], quantity)))
    return effects


def _fig6(work: Work) -> Drawing:
    chosen = list(batches(work.scale))
    return _progress(work, [(m, chosen) for m in networks(work.scale, 4)], "test_accuracy")


def _fig7(work: Work) -> Drawing:
    return _progress(work, [("lstm", list(SPEECH_BATCHES))], "test_loss")


figure(
    "fig6",
    "DPSGD-2020, Figure 6",
    "test accuracy by epoch, CIFAR-10, by batch",
    "DPSGD converges where SSGD diverges, and better than it at the largest batch.",
    _table3_runs,
    _judge_progress,
    **SCALED,
)(_fig6)
figure(
    "fig7",
    "DPSGD-2020, Figure 7",
    "held-out loss by epoch, LSTM, by batch",
    "SSGD diverges beyond a batch that DPSGD still converges at.",
    speech,
    _judge_progress,
    **SPOKEN,
)(_fig7)

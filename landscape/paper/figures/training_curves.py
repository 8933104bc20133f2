"""DPSGD-2020's Figures 1, 6 and 7: CIFAR-10's networks and the acoustic model, by epoch."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Runs, Scale
from landscape.paper.figure import (
    Compared,
    Drawing,
    figure,
    handle,
    last,
    mean_and_spread,
    test_error,
)
from landscape.paper.scales import CIFAR_NOTE, PAPER_CIFAR, PAPER_SPEECH, SPEECH_NOTE, cells
from landscape.paper.verdicts import (
    Effect,
    Rows,
    by_seed,
    difference,
    select,
    settings,
    stacked,
)
from landscape.plots.picture import panels, shared_legend, wrapped_panels
from landscape.plots.style import color_of
from landscape.training.recipes.table_recipes import BATCHES, NETWORKS, SPEECH_BATCHES

# What the paper calls the networks.
NAMED = dict(zip(NETWORKS, (
    "EfficientNet-B0", "SENet-18", "VGG-19", "ResNet-18", "DenseNet-121", "MobileNet", "MobileNetV2",
    "ShuffleNet", "GoogleNet", "ResNext-29",
), strict=True))  # fmt: skip
BOTH = ("ssgd", "dpsgd")
ALL = {"ssgd": "SSGD", "ssgd-noise": "SSGD*", "dpsgd": "DPSGD"}
COLOR = {a: color_of(name) for a, name in ALL.items()}
SCALED: dict[str, Any] = {"laptop": CIFAR_NOTE, "paper": PAPER_CIFAR, "partial": True}
SPOKEN: dict[str, Any] = {"laptop": SPEECH_NOTE, "paper": PAPER_SPEECH, "partial": True}
_WHAT = {"test_accuracy": "test accuracy of $w_a$ (%)", "test_loss": "held-out loss (nat)"}
GAIN = {"test_accuracy": "test accuracy (points)", "test_loss": "held-out loss, by how much lower (nat)"}
# What stands for the end of a run that diverged: the paper's 10% accuracy, and the loss of a guess among the
# 100 classes of the spoken digits.
_LOST = {"test_accuracy": 10.0, "test_loss": float(np.log(100))}


def networks(scale: Scale) -> tuple[str, ...]:
    """The networks that figures have: the paper's ten, or some."""
    return {"smoke": NETWORKS[1:2], "laptop": ("senet-18", "resnet-18"), "paper": NETWORKS}[scale]


def batches(scale: Scale) -> tuple[int, ...]:
    """The batches of Table 3 that figures have."""
    return {"smoke": BATCHES[-1:], "laptop": (BATCHES[0], BATCHES[-1]), "paper": BATCHES}[scale]


def cell(model: str, batch: int, algorithm: str, rate: str = "") -> str:
    """The name of a table's cell."""
    task = "speech" if model == "lstm" else "cifar10"
    return f"{task}/{model}-b{batch}-{algorithm}{rate}"


#: What DPSGD-2020 leaves open of DPSGD: the order of gradient and mixing, and whether velocities are mixed.
PLAIN = {"DPSGD": ""}
ORDERS = PLAIN | {"DPSGD in ATC order": "+algorithm.order='atc'"}
FORMS = ORDERS | {
    f"{name}, velocities mixed": f"{settings}+algorithm.buffers='mix'" for name, settings in ORDERS.items()
}


def tuned(model: str, algorithm: str, rate: float) -> str:
    """The name of a cell at batch 8192 and the peak ``rate``, one of Table 5's or another."""
    own = {0.8: "", 0.4: "-lr0.4", 0.2: "-lr0.2"}.get(rate, f"-lr0.4+lr={rate:g}")
    return cell(model, BATCHES[-1], algorithm, own)


def used(label: str, batch: int) -> str:
    """``label`` with the batch of the run where that is not the paper's.

    Example:
        >>> used("SSGD, batch 8192", 512), used("SSGD, batch 512", 512), used("SSGD, lr 0.8", 512)
        ('SSGD, batch 512 (paper 8192)', 'SSGD, batch 512', 'SSGD, lr 0.8')
    """
    return re.sub(
        r"batch (\d+)", lambda m: m[0] if int(m[1]) == batch else f"batch {batch} (paper {m[1]})", label
    )


def _batch(context: Context, model: str, batch: int) -> str:
    """The batch that the runs of a cell used, and the paper's where it is another one."""
    printed = 16 * batch if model == "lstm" else batch  # the cells of speech have the batches used here
    return used(f"batch {printed}", context.runs[f"{cell(model, batch, 'ssgd')}/0"].batch)


def _name(model: str) -> str:
    return NAMED.get(model, "LSTM")


def accuracy(run: Checkpoint) -> float:
    """Test accuracy in %, as the paper prints it: 10 where training diverged."""
    return 10.0 if run.diverged else 100 - test_error(run)


def classes(run: Checkpoint) -> int:
    """The number of classes that the run's network tells apart."""
    options = run.model["options"]
    return int(options.get("classes") or options["widths"][-1])


def held_out(run: Checkpoint) -> float:
    """Held-out loss at the end in nats; where training diverged, that of a guess, as the paper prints it."""
    loss = float("nan") if run.diverged else last(run, "test_loss")
    return float(np.log(classes(run))) if math.isnan(loss) else loss


def points(column: str, key: str, run: Checkpoint) -> list[dict[str, Any]]:
    """Rows of a run: ``column`` by epoch where it was evaluated; accuracy in %."""
    values = run.history[column] * (100 if column == "test_accuracy" else 1)
    epochs = run.history["step"] * run.epoch / max(1, run.step)
    return [
        {"epoch": float(e), column: float(v), "diverged": run.diverged}
        for e, v in zip(epochs, values, strict=True)
        if np.isfinite(v)
    ]


def curves(ax: Any, rows: Rows, column: str, label: str | None = None, **look: Any) -> None:
    """Draw a column by epoch, a line for each seed, with a cross where one diverged."""
    for k, (_, run) in enumerate(rows.groupby("seed") if len(rows) else []):
        ax.plot(run["epoch"], run[column], label=None if k else label, **look)
        if run["diverged"].iloc[-1]:
            ax.plot(run["epoch"].iloc[-1], run[column].iloc[-1], "x", color=look["color"], ms=8, mew=2)


def ends(rows: Rows, value: str, quantity: str, **where: Any) -> dict[float, float]:
    """The last ``value`` of each seed, of ``quantity``; of a run that diverged what stands for it."""
    found = by_seed(rows, value, **where)
    if "diverged" in rows:
        chosen = select(rows, **where)
        lost = chosen["seed"][chosen["diverged"].astype(bool)]
        found |= dict.fromkeys(map(float, lost), _LOST[quantity])
    return found


def _gain(where: str, better: Any, worse: Any, quantity: str) -> Effect:
    """By how much the first is better, by seed: points of accuracy, or nats of loss."""
    higher = quantity == "test_accuracy"
    return Effect(where, GAIN[quantity], difference(better, worse) if higher else difference(worse, better))


# ---- Figure 1

_FIRST = (
    ("lstm", 512, "test_loss"),
    ("efficientnet-b0", 8192, "test_accuracy"),
    ("senet-18", 8192, "test_accuracy"),
)
# At the end of SSGD, SSGD* and DPSGD, as the paper prints it.
_PRINTED = {
    "lstm": ("10.37", "", "1.66"),
    "efficientnet-b0": ("10", "22.15", "91.13"),
    "senet-18": ("10", "84.86", "90.48"),
}


def _fig1(context: Context) -> Drawing:
    tables, compared, better = [], list[Compared](), list[bool]()
    picture, axes = panels(1, 3, 4.0, 3.5)
    for ax, (model, batch, quantity) in zip(axes, _FIRST, strict=True):
        final, sign = {}, -1 if quantity == "test_loss" else 1
        for (a, name), ls, printed in zip(ALL.items(), ("-", "--", "-."), _PRINTED[model], strict=True):
            first = {"model": model, "algorithm": name, "quantity": quantity, "value": 0.0}
            prefix, measure = cell(model, batch, a), functools.partial(points, quantity)
            rows = context.table(prefix, {}, measure, **first)
            if len(rows):
                rows["value"] = rows.pop(quantity)
                tables.append(rows)
            curves(ax, rows, "value", name, color=COLOR[a], ls=ls)
            score = accuracy if quantity == "test_accuracy" else held_out
            values = [score(run) for run in context.group(prefix)]
            final[a] = sign * float(np.mean(values)) if values else math.nan
            what = f"{_WHAT[quantity].replace(' of $w_a$', '')}, {_name(model)}, {name}"
            compared.append(Compared(what, mean_and_spread(values), printed))
        if all(map(math.isfinite, final.values())):
            better.append(final["dpsgd"] > max(final["ssgd"], final["ssgd-noise"]))
        title = f"{_name(model)}, {_batch(context, model, batch)}"
        ax.set(title=title, xlabel="epoch", ylabel=_WHAT[quantity])
    shared_legend(picture, axes, ncols=3)
    return Drawing(
        {"": picture},
        stacked(tables),
        compared,
        f"DPSGD ends best of the three in {sum(better)} of {len(better)} tasks.",
    )


def _judge_1(rows: Rows) -> list[Effect]:
    """DPSGD against both others."""

    def end(model: str, quantity: str, algorithm: str) -> dict[float, float]:
        return ends(rows, "value", quantity, model=model, algorithm=algorithm)

    return [
        _gain(
            f"{_name(model)}, DPSGD less {other}",
            end(model, quantity, "DPSGD"),
            end(model, quantity, other),
            quantity,
        )
        for model, _, quantity in _FIRST
        for other in ("SSGD", "SSGD*")
    ]


figure(
    "fig1", "DPSGD-2020, Figure 1", "SSGD, SSGD* and DPSGD at the largest batch",
    "SSGD does not converge in the large-batch setting; with injected noise (SSGD*) it converges to "
    "something worse than DPSGD.",
    lambda scale: cells(scale, [cell(m, b, a) for m, b, _ in _FIRST for a in ALL]), _judge_1,
    laptop=f"{CIFAR_NOTE}; {SPEECH_NOTE}", partial=True, paper=f"{PAPER_CIFAR}; {PAPER_SPEECH}",
)(_fig1)  # fmt: skip

# ---- Figure 6 and Table 3; Figure 7 and Table 4


def by_batch(scale: Scale, models: Iterable[str], batches: Iterable[int]) -> Runs:
    """SSGD and DPSGD by network and batch."""
    return cells(scale, [cell(*each) for each in itertools.product(models, batches, BOTH)])


def _progress(context: Context, models: tuple[str, ...], batches: tuple[int, ...], column: str) -> Drawing:
    tables, many = [], len(models) > 1
    looks: dict[int, dict[str, Any]] = {
        batch: {"lw": 0.8 + 0.4 * k, "alpha": 0.35 + 0.65 * (k + 1) / len(batches)}
        for k, batch in enumerate(batches)
    }
    picture, axes = wrapped_panels(len(models), 3.9 if many else 6.0, 3.2, sharey=True)
    for ax, model in zip(axes, models, strict=True):
        for a, (batch, look) in itertools.product(BOTH, looks.items()):
            first = {"model": _name(model), "batch": batch, "algorithm": ALL[a]}
            measure = functools.partial(points, column)
            tables.append(context.table(cell(model, batch, a), {}, measure, **first))
            curves(ax, tables[-1], column, color=COLOR[a], **look)
        ax.set(title=_name(model), xlabel="epoch")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(_WHAT[column])
    handles = [handle(ALL[a], color=COLOR[a]) for a in BOTH]
    handles += [handle(_batch(context, models[0], batch), **look) for batch, look in looks.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=6 if many else 3)
    rows = stacked(tables)
    ahead = [np.mean(e.values) > 0 for e in _judge_progress(rows) if e.values]
    return Drawing(
        {"": picture},
        rows,
        [],
        f"At the largest batch DPSGD ends better than SSGD for {sum(ahead)} of {len(ahead)} networks.",
    )


def _judge_progress(rows: Rows) -> list[Effect]:
    """DPSGD against SSGD at each network's largest batch."""
    quantity = "test_loss" if "test_loss" in rows else "test_accuracy"
    effects = []
    for model in settings(rows, "model"):
        batch = float(select(rows, model=model)["batch"].max())
        ssgd, dpsgd = (
            ends(rows, quantity, quantity, model=model, batch=batch, algorithm=ALL[a]) for a in BOTH
        )
        where = f"{model}, batch {batch * (16 if quantity == 'test_loss' else 1):g}, DPSGD less SSGD"
        effects.append(_gain(where, dpsgd, ssgd, quantity))
    return effects


figure(
    "fig6", "DPSGD-2020, Figure 6", "test accuracy by epoch, CIFAR-10, by batch",
    "DPSGD converges where SSGD diverges, and better than it at the largest batch.",
    lambda scale: by_batch(scale, networks(scale), batches(scale)), _judge_progress, **SCALED,
)(lambda c: _progress(c, networks(c.scale), batches(c.scale), "test_accuracy"))  # fmt: skip
figure(
    "fig7", "DPSGD-2020, Figure 7", "held-out loss by epoch, LSTM, by batch",
    "SSGD diverges beyond a batch that DPSGD still converges at.",
    lambda scale: by_batch(scale, ("lstm",), SPEECH_BATCHES), _judge_progress, **SPOKEN,
)(lambda c: _progress(c, ("lstm",), SPEECH_BATCHES, "test_loss"))  # fmt: skip

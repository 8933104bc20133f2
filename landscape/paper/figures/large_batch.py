"""DPSGD-2020's Figures 1, 6 and 7 and Tables 1 to 6: networks of CIFAR-10 and the acoustic model, by batch.

Those of speech have spoken digits for Switchboard.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from landscape import models
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.compared import Compared, compare_with_paper, mean_and_spread, printed
from landscape.paper.context import Context, Ended
from landscape.paper.figure import Drawing, figure, figures_toml, handle, last, test_error
from landscape.paper.verdicts import Effect, Rows, Series, by_seed, distinct, effect_of, paired_effect, select
from landscape.plots.picture import panels, shared_legend, wrapped_panels
from landscape.plots.style import color_of
from landscape.problem.layout import Layout

MIB = 2.0**20
# "As good as": worse by at most this number of points of accuracy, or nats of loss (our choice). So large a
# difference counts as none.
MARGIN = {"test_accuracy": 1.0, "test_loss": 0.05}
_WHAT = {"test_accuracy": "test accuracy of $w_a$ (%)", "test_loss": "held-out loss (nat)"}
GAIN = {"test_accuracy": "test accuracy (points)", "test_loss": "held-out loss (nat)"}
# What stands for the end of a run that diverged: the paper's 10% accuracy, and the loss of a guess among the
# 100 classes of the spoken digits.
_LOST = {"test_accuracy": 10.0, "test_loss": float(np.log(100))}


def label_with_batch(label: str, batch: int) -> str:
    """Replace the paper's batch in ``label`` by ours, with the paper's in brackets, if they differ.

    Example:
        >>> label_with_batch("SSGD, batch 8192", 512), label_with_batch("SSGD, batch 512", 512)
        ('SSGD, batch 512 (paper 8192)', 'SSGD, batch 512')
        >>> label_with_batch("SSGD, lr 0.8", 512)
        'SSGD, lr 0.8'
    """
    return re.sub(
        r"batch (\d+)", lambda m: m[0] if int(m[1]) == batch else f"batch {batch} (paper {m[1]})", label
    )


def classes(run: Checkpoint) -> int:
    """Return the number of classes that the run's network tells apart."""
    options = run.model["options"]
    return int(options.get("classes") or options["widths"][-1])


def score(run: Checkpoint, quantity: str) -> float:
    """Test accuracy in %, or held-out loss in nats; where training diverged what the paper prints.

    That is an accuracy of 10%, and the loss of a guess.
    """
    if quantity == "test_accuracy":
        return 10.0 if run.diverged else 100 - test_error(run)
    loss = math.nan if run.diverged else last(run, "test_loss")
    return float(np.log(classes(run))) if math.isnan(loss) else loss


def curve(run: Ended, quantity: str, column: str = "") -> Rows:
    """Return the ``quantity`` of a run by epoch where it was evaluated, as ``column``; accuracy in %."""
    end = run.end
    values = end.history[quantity] * (100 if quantity == "test_accuracy" else 1)
    epochs = end.history["step"] * end.epoch / max(1, end.step)
    table = pd.DataFrame({"epoch": epochs, column or quantity: values, "diverged": end.diverged})
    return table[np.isfinite(values)]


def draw_curves(ax: Any, rows: Rows, column: str, label: str | None = None, **look: Any) -> None:
    """Draw a column by epoch, a line for each seed, with a cross where one diverged."""
    ax.locator_params(axis="x", integer=True)
    for k, (_, run) in enumerate(rows.groupby("seed") if len(rows) else []):
        ax.plot(run["epoch"], run[column], label=None if k else label, **look)
        if run["diverged"].iloc[-1]:
            ax.plot(run["epoch"].iloc[-1], run[column].iloc[-1], "x", color=look["color"], ms=8, mew=2)


def ends(rows: Rows, value: str, quantity: str, **where: Any) -> Series:
    """Return the last ``value`` of each seed, of ``quantity``; of a run that diverged what stands for it."""
    rows = rows.assign(**{value: rows[value].mask(rows["diverged"].astype(bool), _LOST[quantity])})
    return by_seed(rows, value, **where)


def gain(where: str, quantity: str, names: tuple[str, ...], *pair: Series, least: float = 0.0) -> Effect:
    """Return the gain of the first of a pair over the second, by seed: in points or nats.

    It is first − second of accuracies, and second − first of losses. ``where`` gets the two ``names`` in this
    order.
    """
    order = 1 if quantity == "test_accuracy" else -1
    where += " − ".join(names[::order])
    what, margin = GAIN[quantity], MARGIN[quantity]
    return effect_of(where, what, *pair[::order], claimed=(least, math.inf), margin=margin)


# ---- Figure 1

_QUANTITIES = {"lstm": "test_loss", "efficientnet-b0": "test_accuracy", "senet-18": "test_accuracy"}
_LINES = {"SSGD": "-", "SSGD*": "--", "DPSGD": "-."}


def _judge_1(rows: Rows) -> Iterator[Effect]:
    """Judge DPSGD against both others."""
    names = {"lstm": "LSTM", "efficientnet-b0": "EfficientNet-B0", "senet-18": "SENet-18"}
    for (model, quantity), baseline in itertools.product(_QUANTITIES.items(), ("SSGD", "SSGD*")):
        pair = (ends(rows, "value", quantity, model=model, algorithm=a) for a in ("DPSGD", baseline))
        yield gain(f"{names[model]}, ", quantity, ("DPSGD", baseline), *pair)


@figure("fig1", _judge_1)
def _fig1(context: Context) -> Drawing:
    rows = context.table(lambda run: curve(run, run.values["_quantity"], "value"))
    rows.insert(2, "quantity", rows["model"].map(_QUANTITIES))
    rows.insert(3, "value", rows.pop("value"))
    compared = list[Compared]()
    picture, axes = panels(1, 3, 3.5, 3.2)
    for ax, (model, quantity) in zip(axes, _QUANTITIES.items(), strict=True):
        network = next(c.values["_network"] for c in context.cells if c.values["model"] == model)
        for k, (name, ls) in enumerate(_LINES.items()):
            of_rule = select(rows, model=model, algorithm=name)
            # Earlier rules have wider lines, so that equal curves are both visible.
            draw_curves(ax, of_rule, "value", name, color=color_of(name), ls=ls, lw=2.2 - 0.4 * k)
            scores = ends(of_rule, "value", quantity)
            what = f"{_WHAT[quantity].replace(' of $w_a$', '')}, {network}, {name}"
            number = select(printed("figures"), figure="fig1", network=model, algorithm=name)["value"].item()
            compared.append(Compared(what, mean_and_spread(scores.tolist()), number))
        ax.set(title=f"{network}, {_batch(context, model=model)}", xlabel="epoch", ylabel=_WHAT[quantity])
    shared_legend(picture, axes, ncols=3)
    return Drawing({"": picture}, rows, compared)


def _batch(context: Context, **values: Any) -> str:
    """Return the batch of the runs with these values, and the paper's where it is another one."""
    cell = next(c for c in context.cells if values.items() <= c.values.items())
    return label_with_batch(f"batch {cell.values['_printed']}", cell.recipe.batch)


# ---- Figures 6 and 7


def _judge_progress(rows: Rows) -> Iterator[Effect]:
    """Judge DPSGD against SSGD at each network's largest batch."""
    quantity = "test_loss" if "test_loss" in rows else "test_accuracy"
    for model, batch in rows.groupby("model", sort=False)["batch"].max().items():
        pair = (ends(rows, quantity, quantity, model=model, batch=batch, algorithm=a) for a in _PAIR[::-1])
        where = f"{model}, batch {batch * (16 if quantity == 'test_loss' else 1):g}, "
        yield gain(where, quantity, _PAIR[::-1], *pair)


_PAIR = ("SSGD", "DPSGD")


def _draw_progress(context: Context, column: str) -> Drawing:
    """Draw a column of the history against the epoch, for SSGD and DPSGD at all batches.

    Several networks have a panel each, where the largest batch has solid lines. A single network has a panel
    for each batch. SSGD's lines are wider than DPSGD's, so that equal lines are both visible.
    """
    rows = context.table(lambda run: curve(run, column))
    rows = rows[["model", "batch", "algorithm", "seed", "epoch", column, "diverged"]]
    models = list(dict.fromkeys(cell.values["model"] for cell in context.cells))
    batches = list(dict.fromkeys(cell.values["batch"] for cell in context.cells))
    style_of_batch = dict(zip(sorted(batches, reverse=True), ("-", "--", "-.", ":"), strict=False))
    several_models = len(models) > 1
    if several_models:
        contents = [(model, batches) for model in models]
    else:
        contents = [(models[0], [batch]) for batch in batches]
    picture, axes = wrapped_panels(len(contents), 4.6 if several_models else 3.5, 3.2, sharey=True)
    for ax, (model, panel_batches) in zip(axes, contents, strict=True):
        for algorithm, batch in itertools.product(_PAIR, panel_batches):
            ls = style_of_batch[batch] if several_models else "-"
            lw = 2.6 if algorithm == "SSGD" else 1.2
            curves = select(rows, model=model, batch=batch, algorithm=algorithm)
            draw_curves(ax, curves, column, color=color_of(algorithm), ls=ls, lw=lw)
        title = model if several_models else f"{model}, {_batch(context, batch=panel_batches[0])}"
        ax.set(title=title, xlabel="epoch")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(_WHAT[column])
    handles = [handle(algorithm, color=color_of(algorithm)) for algorithm in _PAIR]
    if several_models:
        handles += [handle(_batch(context, batch=b), ls=ls, lw=1.4) for b, ls in style_of_batch.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=6)
    return Drawing({"": picture}, rows, [])


figure("fig6", _judge_progress)(lambda context: _draw_progress(context, "test_accuracy"))
figure("fig7", _judge_progress)(lambda context: _draw_progress(context, "test_loss"))

# ---- Table 1


def _judge_sizes(rows: Rows) -> list[Effect]:
    """Judge the sizes, which are exact: no seed enters. The paper prints two digits."""
    differences, near = tuple((rows["ours"] - rows["paper"]).tolist()), (-0.0151, 0.0151)
    return [Effect(f"{len(rows)} networks", "our size − the paper's (MiB)", differences, near, exact=True)]


@figure("table1", _judge_sizes)
def _table1(context: Context) -> Drawing:
    rows = printed("table1_models").rename(
        columns={"task": "setting", "model": "network", "size_mib": "paper"}
    )
    networks = figures_toml()["axes"]["networks"]["paper"]
    keys = dict(zip(networks["network"], networks["_model"], strict=True))
    rows["parameters"] = [Layout.of(models.build(keys.get(name, "lstm"))).size for name in rows["network"]]
    rows["ours"], rows["paper"] = 4 * rows["parameters"] / MIB, rows["paper"].astype(float)
    compared = compare_with_paper(rows, "MiB, {network} ({setting})", "ours", paper="{paper:.2f}")
    return Drawing({}, rows[["setting", "network", "parameters", "ours", "paper"]], compared)


# ---- Tables 2 to 6


def judge_batches(rows: Rows) -> Iterator[Effect]:
    """Judge batch 1024 against each larger one, at the same rate."""
    rows, what = rows[rows["seed"].notna()], "test accuracy (points)"
    for network, batch in itertools.product(distinct(rows, "network"), (2048, 4096, 8192)):
        where, pair = f"{network}, batch 1024 − batch {batch}", ("batch 1024", f"batch {batch}")
        yield paired_effect(where, what, rows, "ours", network=network, at=pair)


def judge_pairs(rows: Rows, quantity: str, small: str = "") -> Iterator[Effect]:
    """Judge whether DPSGD is better than SSGD or, at settings that begin with ``small``, as good."""
    rows = rows[rows["seed"].notna()]
    forms = [a for a in distinct(rows, "algorithm") if a.startswith("DPSGD")]
    for (network, at), form in itertools.product(distinct(rows, "network", "at"), forms):
        dpsgd, ssgd = (by_seed(rows, "ours", algorithm=a, network=network, at=at) for a in (form, "SSGD"))
        if len(dpsgd) and len(ssgd):
            margin = -MARGIN[quantity] if small and at.startswith(small) else 0.0
            yield gain(f"{network}, {at}: ", quantity, (form, "SSGD"), dpsgd, ssgd, least=margin)


def _add_table(
    name: str, file: str, column: str, where: dict[str, str], quantity: str = "test_accuracy", small: str = ""
) -> None:
    """Register a table of the paper as a figure, which has our numbers beside the paper's, and no picture.

    The arguments come from the table printed.NAME of figures.toml. ``column`` and the values of ``where`` are
    templates, which are filled with the settings of a run (``run.values``): "bs{_batch}" becomes "bs1024".
    RULE stands for the run's ``_rule`` in capitals: "{RULE}" becomes "DPSGD".

    Args:
        name: the name of the figure.
        file: the paper's numbers are in numbers/FILE.csv.
        column: the column with the paper's number for a run.
        where: column -> value, for the row with the paper's number for a run.
        quantity: what the numbers are, "test_accuracy" or "test_loss".
        small: a run has a small batch if its setting ``at`` begins with this text. For small batches the
            paper only claims that DPSGD is as good as SSGD. "": no run has a small batch.
    """

    def draw(context: Context) -> Drawing:
        numbers = printed(file)

        def measure(run: Ended) -> dict[str, Any]:
            values = {**run.values, "RULE": run.values["_rule"].upper()}
            row = select(numbers, **{key: pattern.format(**values) for key, pattern in where.items()})
            end, recipe = run.end, run.last.recipe
            # In Table 2 the algorithm is empty: the label would begin with ", ".
            label = "{algorithm}, {at}, {network}".format(**values).removeprefix(", ")
            return {
                "ours": score(end, quantity),
                "lr": recipe.schedule.peak_lr(recipe.lr, recipe.batch),
                "batch": recipe.batch,
                "diverged": end.diverged,
                "paper": float(row[column.format(**values)].iloc[0]),
                "what": label_with_batch(label, recipe.batch),
            }

        rows = context.table(measure)
        compared = compare_with_paper(rows, "{what}", "ours", mean_and_spread, "{paper:.2f}")
        columns = ["algorithm", "at", "network", "seed", "ours", "lr", "batch", "diverged", "paper"]
        return Drawing({}, rows[columns], compared)

    judge_in_pairs = functools.partial(judge_pairs, quantity=quantity, small=small)
    figure(name, judge_batches if name == "table2" else judge_in_pairs)(draw)


for _name, _keys in figures_toml()["printed"].items():
    _add_table(_name, **_keys)

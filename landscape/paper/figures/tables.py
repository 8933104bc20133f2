"""DPSGD-2020's Tables 1 to 6 and our numbers, those of 4 and 6 with spoken digits for Switchboard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from landscape import models
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper import numbers
from landscape.paper.context import Context, Scale
from landscape.paper.figure import Compared, Drawing, figure
from landscape.paper.figures.table_picture import table_picture, used, value_text
from landscape.paper.figures.training_curves import (
    BOTH,
    GAIN,
    NAMED,
    SCALED,
    SPOKEN,
    accuracy,
    batches,
    by_batch,
    cell,
    held_out,
    networks,
    seeded,
)
from landscape.paper.verdicts import (
    Effect,
    Rows,
    difference,
    difference_effect,
    need,
    pair,
    settings,
    stacked,
)
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.problem.layout import Layout
from landscape.train.table_recipes import BATCHES, NETWORKS, SPEECH_BATCHES

MIB = 2.0**20
# "As good as": up to so many points of accuracy, or nats of loss, less (ours).
MARGIN = {"test_accuracy": 1.0, "test_loss": 0.05}

_ACCURACY = "test accuracy of $w_a$ (%)"
_LOST = f"{_ACCURACY}, 10 where training diverged"

# ---- Rows of Tables 2 to 6


@dataclass(frozen=True)
class Entry:
    """One cell: an ``algorithm`` ``at`` a setting in the column ``network``.

    ``key`` is that of its runs, ``paper`` the paper's number.
    """

    algorithm: str
    at: str
    network: str
    key: str
    paper: float


def _entry(
    row: dict[str, str], column: str, at: str, network: str, place: tuple[str, int, str, str]
) -> Entry:
    """The cell at ``place``, with the paper's number in ``column`` of a ``row`` of its table."""
    return Entry(row["algorithm"], at, network, cell(*place), float(row[column]))


def _tabulate(context: Context, entries: Iterable[Entry], what: str, quantity: str) -> tuple[Drawing, Rows]:
    """The table of ``entries`` as a picture: ours, and the paper's below it in grey; and the cells drawn.

    The labels name the batch that was used. Cells of which no run has ended are left out.
    """
    score: Callable[[Checkpoint], float] = accuracy if quantity == "test_accuracy" else held_out

    def measure(key: str, run: Checkpoint) -> dict[str, object]:
        recipe = context.runs[key]
        lr = recipe.schedule.peak_lr(recipe.lr, recipe.batch)
        return {"ours": score(run), "lr": lr, "batch": recipe.batch, "diverged": run.diverged}

    tables = []
    for e in entries:
        first = {"algorithm": e.algorithm, "at": e.at, "network": e.network}
        tables.append(context.table(e.key, {}, measure, **first).assign(paper=e.paper))
    rows = stacked(tables)
    place = ["algorithm", "at", "network", "batch", "paper"]
    groups = rows.groupby(place, sort=False, dropna=False)["ours"]
    cells = groups.agg(ours="mean", ours_std="std").reset_index()
    cells["setting"] = (cells["algorithm"] + ", " + cells["at"]).str.removeprefix(", ")
    compared = [
        Compared(
            used(f"{cell.setting}, {cell.network}", cell.batch),
            value_text(cell.ours, cell.ours_std),
            f"{cell.paper:.2f}",
        )
        for cell in cells.itertuples()
    ]
    higher = quantity == "test_accuracy"
    wide = cells.pivot(index=["at", "network"], columns="algorithm", values="ours")
    won = pairs = 0
    if {"SSGD", "DPSGD"} <= set(wide):
        both = wide.dropna(subset=["SSGD", "DPSGD"])
        pairs = len(both)
        won = int((both["DPSGD"] > both["SSGD"] if higher else both["DPSGD"] < both["SSGD"]).sum())
    said = f"DPSGD's mean is better than SSGD's in {won} of {pairs} pairs."
    return Drawing({"": table_picture(cells, what, higher)}, rows, compared, said), cells


def _judge_pairs(rows: Rows, quantity: str, small: str = "") -> list[Effect]:
    """Every form of DPSGD against SSGD: better; at the settings that begin with ``small``, as good."""
    effects = []
    need(rows, "seed")
    forms = [a for a in settings(rows, "algorithm") if a.startswith("DPSGD")]
    for (network, at), form in itertools.product(settings(rows, "network", "at"), forms):
        ssgd, dpsgd = pair(rows, "ours", algorithm=("SSGD", form), network=network, at=at)
        if ssgd and dpsgd:
            both = (dpsgd, ssgd) if quantity == "test_accuracy" else (ssgd, dpsgd)
            least = -MARGIN[quantity] if small and at.startswith(small) else 0.0
            where = f"{network}, {at}: {form} less SSGD"
            effects.append(Effect(where, GAIN[quantity], difference(*both), (least, np.inf)))
    return effects


# ---- Table 1


def _table1(context: Context) -> Drawing:
    rows = pd.DataFrame(numbers.rows("table1_models")).rename(columns={"task": "setting", "model": "network"})
    keys = {name: key for key, name in NAMED.items()}
    rows["parameters"] = [Layout.of(models.build(keys.get(name, "lstm"))).size for name in rows["network"]]
    rows["ours"], rows["ours_std"] = 4 * rows["parameters"] / MIB, float("nan")
    rows["paper"] = rows["size_mib"].astype(float)
    rows = rows[["setting", "network", "parameters", "ours", "ours_std", "paper"]]
    labels = [f"{row.network} ({row.setting})" for row in rows.itertuples()]
    with style():
        picture, (ax,) = panels(1, 1, 7.6, 4.2)
        place = np.arange(len(rows))
        ax.barh(place - 0.2, rows["ours"], 0.38, color="C0", label="here")
        ax.barh(place + 0.2, rows["paper"], 0.38, color="#BBBBBB", label="paper")
        for k, row in enumerate(rows.itertuples()):
            text = f"{row.ours:.2f}  (paper {row.paper:.2f})"
            ax.text(row.ours * 1.03, k, text, va="center", fontsize=8.5)
        ax.set_yticks(place, labels)
        ax.set(xscale="log", xlim=(2, 900), ylim=(len(rows) - 0.4, -0.6))
        ax.set_xlabel("size of the float32 parameters (MiB)")
        picture.legend(loc="outside lower center", ncols=2)
    compared = [
        Compared(f"MiB, {label}", f"{row.ours:.2f}", f"{row.paper:.2f}")
        for label, row in zip(labels, rows.itertuples(), strict=True)
    ]
    same = int(((rows["ours"] - rows["paper"]).abs() < 0.0151).sum())
    return Drawing({"": picture}, rows, compared, f"{same} of {len(rows)} sizes agree within 0.01 MiB.")


def _judge_1(rows: Rows) -> list[Effect]:
    """Exact: no seed enters. The paper prints two digits."""
    off, near = tuple((rows["ours"] - rows["paper"]).tolist()), (-0.0151, 0.0151)
    return [Effect(f"{len(rows)} networks", "size less the paper's (MiB)", off, near, exact=True)]


_SIZES = "the networks as they are; the paper's hours on a V100 are not repeated"
figure(
    "table1", "DPSGD-2020, Table 1", "size of the networks",
    "The networks and their sizes.",
    lambda scale: {}, _judge_1, smoke=_SIZES, laptop=_SIZES,
)(_table1)  # fmt: skip

# ---- Table 2


def _table2_entries(scale: Scale) -> list[Entry]:
    chosen = NETWORKS if scale == "paper" else NETWORKS[3:4]
    keys = {128: "sgd", 256: "sgd", 512: "sgd", 1024: "ssgd"} | dict.fromkeys(BATCHES[1:], "ssgd")
    if scale == "smoke":
        keys = {128: "sgd", 8192: "ssgd"}
    elif scale == "laptop":  # a batch of 8 takes as long as all others
        del keys[128]
    printed = {row["model"]: row | {"algorithm": ""} for row in numbers.rows("table2_batch_size")}
    return [
        _entry(printed[NAMED[m]], f"bs{batch}", f"batch {batch}", NAMED[m], (m, batch, a, rate))
        for m in chosen
        for batch, a in keys.items()
        for rate in ["-lr0.1" if batch > 1024 else ""]
    ]


def _table2(context: Context) -> Drawing:
    what, entries = f"{_ACCURACY} by batch, at rate 0.1", _table2_entries(context.scale)
    drawing, cells = _tabulate(context, entries, what, "test_accuracy")
    lowest = cells.loc[cells.groupby("network")["ours"].idxmin(), "at"]
    worst = lowest == cells["at"].iloc[-1]
    drawing.conclusion = f"The largest batch is the worst for {worst.sum()} of {len(worst)} networks."
    return drawing


def _judge_2(rows: Rows) -> list[Effect]:
    """Batch 1024 against each larger one, at the same rate."""
    effects = []
    need(rows, "seed")
    for network, batch in itertools.product(settings(rows, "network"), BATCHES[1:]):
        both = pair(rows, "ours", network=network, at=("batch 1024", f"batch {batch}"))
        where = f"{network}, batch 1024 less {batch}"
        effects.append(difference_effect(where, "test accuracy (points)", both))
    return effects


figure(
    "table2", "DPSGD-2020, Table 2", "batch size at a fixed rate, CIFAR-10",
    "Without a larger rate, accuracy falls as the batch grows beyond 1024.",
    lambda scale: seeded(scale, [e.key for e in _table2_entries(scale)]), _judge_2, **SCALED,
)(_table2)  # fmt: skip

# ---- Tables 3 and 5


def _table3_entries(scale: Scale) -> list[Entry]:
    rows = [(row, int(row["batch_size"]), row["algorithm"].lower()) for row in numbers.rows("table3_cifar10")]
    return [
        _entry(row, NAMED[m], f"batch {batch}, lr {row['lr']}", NAMED[m], (m, batch, a, ""))
        for row, batch, a in rows
        if a in BOTH and batch in batches(scale)
        for m in networks(scale, 4)
    ]


def _table5_entries(scale: Scale) -> list[Entry]:
    return [
        _entry(row, NAMED[m], f"lr {row['lr']}", NAMED[m], (m, 8192, row["algorithm"].lower(), rate))
        for row in numbers.rows("table5_lr_tuning_cifar10")
        for rate in ["" if row["lr"] == "0.8" else f"-lr{row['lr']}"]
        for m in (NETWORKS[2:4] if scale == "laptop" else networks(scale, 2))
    ]


def _table5(context: Context) -> Drawing:
    entries = _table5_entries(context.scale)
    batch = used("batch 8192", context.runs[f"{entries[0].key}/0"].batch)
    what = f"{_ACCURACY} at {batch}, 10 where training diverged"
    return _tabulate(context, entries, what, "test_accuracy")[0]


figure(
    "table3", "DPSGD-2020, Table 3", "SSGD and DPSGD by batch, CIFAR-10",
    "DPSGD is as good as SSGD at small batches and better at batch 8192, where SSGD diverges for some "
    "networks.",
    lambda scale: seeded(scale, [e.key for e in _table3_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_accuracy", small="batch 1024,"), **SCALED,
)(
    lambda c: _tabulate(c, _table3_entries(c.scale), _LOST, "test_accuracy")[0]
)  # fmt: skip
figure(
    "table5", "DPSGD-2020, Table 5", "learning rates at batch 8192, CIFAR-10",
    "DPSGD is better than SSGD at every rate tried (but for MobileNetV2's best entry).",
    lambda scale: seeded(scale, [e.key for e in _table5_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_accuracy"), **SCALED,
)(_table5)  # fmt: skip

# ---- Tables 4 and 6


def _table4_entries(scale: Scale) -> list[Entry]:
    rows = itertools.product(numbers.rows("table4_asr"), SPEECH_BATCHES)
    return [
        _entry(
            row, f"SWB300_bs{16 * b}", f"batch {16 * b}", "LSTM", ("lstm", b, row["algorithm"].lower(), "")
        )
        for row, b in rows
    ]


def _table6_entries(scale: Scale) -> list[Entry]:
    chosen = SPEECH_BATCHES[2:] if scale == "laptop" else SPEECH_BATCHES[1:]
    entries = []
    for row, batch in itertools.product(numbers.rows("table6_lr_tuning_asr"), chosen):
        rate, network = "" if row["lr"] == "0.1" else f"-lr{row['lr']}", f"LSTM, batch {16 * batch}"
        place = ("lstm", batch, row["algorithm"].lower(), rate)
        entries.append(_entry(row, f"SWB300_bs{16 * batch}", f"lr {row['lr']}", network, place))
    return entries


figure(
    "table4", "DPSGD-2020, Table 4", "held-out loss by batch, LSTM (paper: SWB300)",
    "SSGD diverges from batch 4096 on, DPSGD converges up to 8192.",
    lambda scale: by_batch(scale, ("lstm",), SPEECH_BATCHES),
    lambda rows: _judge_pairs(rows, "test_loss", small="batch 2048"), **SPOKEN,
)(lambda c: _tabulate(c, _table4_entries(c.scale), "held-out loss (nat)", "test_loss")[0])  # fmt: skip
figure(
    "table6", "DPSGD-2020, Table 6", "learning rates at the largest batches, LSTM (paper: SWB300)",
    "DPSGD converges at larger rates than SSGD and reaches a lower held-out loss.",
    lambda scale: seeded(scale, [e.key for e in _table6_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_loss"), **SPOKEN,
)(lambda c: _tabulate(c, _table6_entries(c.scale), "held-out loss (nat)", "test_loss")[0])  # fmt: skip

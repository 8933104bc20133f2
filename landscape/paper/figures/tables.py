"""DPSGD-2020's Tables 1 to 6 and our numbers, those of 4 and 6 with spoken digits for Switchboard."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from landscape import models, paper
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Scale
from landscape.paper.figure import Compared, Drawing, figure
from landscape.paper.figures.training_curves import (
    BOTH,
    FORMS,
    GAIN,
    NAMED,
    ORDERS,
    PLAIN,
    SCALED,
    SPOKEN,
    accuracy,
    batches,
    cell,
    held_out,
    networks,
    tuned,
    used,
)
from landscape.paper.scales import cells
from landscape.paper.verdicts import (
    Effect,
    Rows,
    difference,
    difference_effect,
    pair,
    settings,
    stacked,
)
from landscape.problem.layout import Layout
from landscape.training.recipes.table_recipes import BATCHES, NETWORKS, SPEECH_BATCHES

MIB = 2.0**20
# "As good as": up to so many points of accuracy, or nats of loss, less (ours).
MARGIN = {"test_accuracy": 1.0, "test_loss": 0.05}

# ---- Rows of Tables 2 to 6


# A cell: what its rows in the CSV begin with, the key of its runs, and the paper's number.
Entry = tuple[dict[str, str], str, float]


def printed(table: str) -> list[dict[str, str]]:
    """What DPSGD-2020 prints: the rows of TABLE.csv, such as "table3_cifar10", by column."""
    with (Path(paper.__path__[0]) / "numbers" / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _entry(row: dict[str, str], column: str, at: str, network: str, key: str) -> Entry:
    """The cell ``at`` a setting in the column ``network``, with the number in ``column`` of the paper's."""
    return {"algorithm": row["algorithm"], "at": at, "network": network}, key, float(row[column])


def value_text(mean: float, spread: float = float("nan")) -> str:
    """ "36.90 ± 1.10", or "diverged" for what is not finite."""
    if not np.isfinite(mean):
        return "diverged"
    return f"{mean:.2f}" if np.isnan(spread) else f"{mean:.2f} ± {spread:.2f}"


def _tabulate(context: Context, entries: Iterable[Entry], quantity: str) -> tuple[Drawing, Rows]:
    """The table of ``entries``, without a picture, and the means of the runs that have ended.

    The labels name the batch that was used.
    """
    higher = quantity == "test_accuracy"

    def measure(key: str, run: Checkpoint) -> dict[str, object]:
        recipe, score = context.runs[key], accuracy if higher else held_out
        lr = recipe.schedule.peak_lr(recipe.lr, recipe.batch)
        return {"ours": score(run), "lr": lr, "batch": recipe.batch, "diverged": run.diverged}

    rows = stacked(
        context.table(key, {}, measure, **first).assign(paper=number) for first, key, number in entries
    )
    place = ["algorithm", "at", "network", "batch", "paper"]
    groups = rows.groupby(place, sort=False, dropna=False)["ours"]
    means = groups.agg(ours="mean", ours_std="std").reset_index()
    labels = (means["algorithm"] + ", " + means["at"]).str.removeprefix(", ")
    compared = [
        Compared(
            used(f"{label}, {mean.network}", mean.batch),
            value_text(mean.ours, mean.ours_std),
            f"{mean.paper:.2f}",
        )
        for label, mean in zip(labels, means.itertuples(), strict=True)
    ]
    wide = means.pivot(index=["at", "network"], columns="algorithm", values="ours")
    both = wide.reindex(columns=["SSGD", "DPSGD"]).dropna()
    won = (both["DPSGD"] > both["SSGD"] if higher else both["DPSGD"] < both["SSGD"]).sum()
    said = f"DPSGD's mean is better than SSGD's in {won} of {len(both)} pairs."
    return Drawing({}, rows, compared, said), means


def _judge_pairs(rows: Rows, quantity: str, small: str = "") -> list[Effect]:
    """Every form of DPSGD against SSGD: better; at the settings that begin with ``small``, as good."""
    effects, rows = [], rows[rows["seed"].notna()]
    forms = [a for a in settings(rows, "algorithm") if a.startswith("DPSGD")]
    for (network, at), form in itertools.product(settings(rows, "network", "at"), forms):
        ssgd, dpsgd = pair(rows, "ours", algorithm=("SSGD", form), network=network, at=at)
        if ssgd and dpsgd:
            both = (dpsgd, ssgd) if quantity == "test_accuracy" else (ssgd, dpsgd)
            least = -MARGIN[quantity] if small and at.startswith(small) else 0.0
            where = f"{network}, {at}: {form} less SSGD"
            effects.append(Effect(where, GAIN[quantity], difference(*both), (least, np.inf)))
    return effects


def _forms(row: dict[str, str], key: str, forms: Mapping[str, str]) -> list[tuple[dict[str, str], str]]:
    """The printed row and the key of its cell; of DPSGD, whose form the paper leaves open, all ``forms``."""
    if row["algorithm"] != "DPSGD":
        return [(row, key)]
    return [(row | {"algorithm": name}, key + settings) for name, settings in forms.items()]


# ---- Table 1


def _table1(context: Context) -> Drawing:
    rows = pd.DataFrame(printed("table1_models")).rename(columns={"task": "setting", "model": "network"})
    keys = {name: key for key, name in NAMED.items()}
    rows["parameters"] = [Layout.of(models.build(keys.get(name, "lstm"))).size for name in rows["network"]]
    rows["ours"] = 4 * rows["parameters"] / MIB
    rows["paper"] = rows["size_mib"].astype(float)
    rows = rows[["setting", "network", "parameters", "ours", "paper"]]
    compared = [
        Compared(f"MiB, {row.network} ({row.setting})", f"{row.ours:.2f}", f"{row.paper:.2f}")
        for row in rows.itertuples()
    ]
    same = int(((rows["ours"] - rows["paper"]).abs() < 0.0151).sum())
    return Drawing({}, rows, compared, f"{same} of {len(rows)} sizes agree within 0.01 MiB.")


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
    chosen = NETWORKS if scale == "paper" else ("resnet-18",)
    keys = {128: "sgd", 256: "sgd", 512: "sgd", 1024: "ssgd"} | dict.fromkeys(BATCHES[1:], "ssgd")
    if scale == "smoke":
        keys = {128: "sgd", 8192: "ssgd"}
    elif scale == "laptop":
        del keys[256], keys[512]
    rows = {row["model"]: row | {"algorithm": ""} for row in printed("table2_batch_size")}
    return [
        _entry(
            rows[NAMED[m]],
            f"bs{batch}",
            f"batch {batch}",
            NAMED[m],
            cell(m, batch, a, "-lr0.1" * (batch > 1024)),
        )
        for m in chosen
        for batch, a in keys.items()
    ]


def _table2(context: Context) -> Drawing:
    drawing, means = _tabulate(context, _table2_entries(context.scale), "test_accuracy")
    lowest = means.loc[means.groupby("network")["ours"].idxmin(), "at"]
    worst = lowest == means["at"].iloc[-1]
    drawing.conclusion = f"The largest batch is the worst for {worst.sum()} of {len(worst)} networks."
    return drawing


def _judge_2(rows: Rows) -> list[Effect]:
    """Batch 1024 against each larger one, at the same rate."""
    rows, what = rows[rows["seed"].notna()], "test accuracy (points)"
    return [
        difference_effect(
            f"{network}, batch 1024 less {batch}",
            what,
            pair(rows, "ours", network=network, at=("batch 1024", f"batch {batch}")),
        )
        for network, batch in itertools.product(settings(rows, "network"), BATCHES[1:])
    ]


figure(
    "table2", "DPSGD-2020, Table 2", "batch size at a fixed rate, CIFAR-10",
    "Without a larger rate, accuracy falls as the batch grows beyond 1024.",
    lambda scale: cells(scale, [key for _, key, _ in _table2_entries(scale)]), _judge_2, **SCALED,
)(_table2)  # fmt: skip

# ---- Tables 3 and 5


def _table3_entries(scale: Scale) -> list[Entry]:
    rows = [(row, int(row["batch_size"]), row["algorithm"].lower()) for row in printed("table3_cifar10")]
    return [
        _entry(row, NAMED[m], f"batch {batch}, lr {row['lr']}", NAMED[m], key)
        for printed_row, batch, a in rows
        if a in BOTH and batch in batches(scale)
        for m in networks(scale)
        for row, key in _forms(printed_row, cell(m, batch, a), FORMS if batch == BATCHES[-1] else PLAIN)
    ]


def _table5_entries(scale: Scale) -> list[Entry]:
    return [
        _entry(row, NAMED[m], f"lr {row['lr']}", NAMED[m], key)
        for printed_row in printed("table5_lr_tuning_cifar10")
        for m in networks(scale)
        for row, key in _forms(
            printed_row, tuned(m, printed_row["algorithm"].lower(), float(printed_row["lr"])), ORDERS
        )
    ]


figure(
    "table3", "DPSGD-2020, Table 3", "SSGD and DPSGD by batch, CIFAR-10",
    "DPSGD is as good as SSGD at small batches and better at batch 8192, where SSGD diverges for some "
    "networks.",
    lambda scale: cells(scale, [key for _, key, _ in _table3_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_accuracy", small="batch 1024,"), **SCALED,
)(lambda c: _tabulate(c, _table3_entries(c.scale), "test_accuracy")[0])  # fmt: skip
figure(
    "table5", "DPSGD-2020, Table 5", "learning rates at batch 8192, CIFAR-10",
    "DPSGD is better than SSGD at every rate tried (but for MobileNetV2's best entry).",
    lambda scale: cells(scale, [key for _, key, _ in _table5_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_accuracy"), **SCALED,
)(lambda c: _tabulate(c, _table5_entries(c.scale), "test_accuracy")[0])  # fmt: skip

# ---- Tables 4 and 6


def _table4_entries(scale: Scale) -> list[Entry]:
    return [
        _entry(row, f"SWB300_bs{16 * b}", f"batch {16 * b}", "LSTM", key)
        for printed_row, b in itertools.product(printed("table4_asr"), SPEECH_BATCHES)
        for row, key in _forms(printed_row, cell("lstm", b, printed_row["algorithm"].lower()), ORDERS)
    ]


def _table6_entries(scale: Scale) -> list[Entry]:
    chosen = SPEECH_BATCHES[2:] if scale == "laptop" else SPEECH_BATCHES[1:]
    entries = []
    for printed_row, batch in itertools.product(printed("table6_lr_tuning_asr"), chosen):
        rate, network = f"-lr{printed_row['lr']}".removesuffix("-lr0.1"), f"LSTM, batch {16 * batch}"
        plain = cell("lstm", batch, printed_row["algorithm"].lower(), rate)
        for row, key in _forms(printed_row, plain, ORDERS):
            entries.append(_entry(row, f"SWB300_bs{16 * batch}", f"lr {row['lr']}", network, key))
    return entries


figure(
    "table4", "DPSGD-2020, Table 4", "held-out loss by batch, LSTM (paper: SWB300)",
    "SSGD diverges from batch 4096 on, DPSGD converges up to 8192.",
    lambda scale: cells(scale, [key for _, key, _ in _table4_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_loss", small="batch 2048"), **SPOKEN,
)(lambda c: _tabulate(c, _table4_entries(c.scale), "test_loss")[0])  # fmt: skip
figure(
    "table6", "DPSGD-2020, Table 6", "learning rates at the largest batches, LSTM (paper: SWB300)",
    "DPSGD converges at larger rates than SSGD and reaches a lower held-out loss.",
    lambda scale: cells(scale, [key for _, key, _ in _table6_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_loss"), **SPOKEN,
)(lambda c: _tabulate(c, _table6_entries(c.scale), "test_loss")[0])  # fmt: skip

"""DPSGD-2020's Tables 1 to 6 and our numbers, those of 4 and 6 with spoken digits for Switchboard."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from landscape import models, paper
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Scale
from landscape.paper.figure import Compared, Drawing, figure
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
    used,
)
from landscape.paper.verdicts import (
    Effect,
    Rows,
    difference,
    difference_effect,
    pair,
    settings,
    stacked,
)
from landscape.plots.picture import caption, panels
from landscape.plots.style import OTHER, color_of
from landscape.problem.layout import Layout
from landscape.training.recipes.table_recipes import BATCHES, NETWORKS, SPEECH_BATCHES

MIB = 2.0**20
# "As good as": up to so many points of accuracy, or nats of loss, less (ours).
MARGIN = {"test_accuracy": 1.0, "test_loss": 0.05}

_ACCURACY = "test accuracy of $w_a$ (%)"
_LOST = f"{_ACCURACY}, 10 where training diverged"

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


def winners(cells: Rows, higher: bool) -> set[int]:
    """The cells that are best among those of their network that differ in the algorithm alone.

    Where no two cells do, the best of each network. Means closer than the paper prints (0.005) are equal, and
    nobody has won.
    """
    place = ["network", "at"] if cells.duplicated(["network", "at"]).any() else ["network"]
    won = set()
    for _, group in cells.groupby(place):
        finite = group["ours"][np.isfinite(group["ours"])].sort_values(ascending=not higher)
        second = finite.iloc[1] if len(finite) > 1 else np.inf
        if len(group) > 1 and len(finite) and abs(second - finite.iloc[0]) > 0.005:
            won.add(finite.index[0])
    return won


def table_picture(cells: Rows, what: str, higher: bool) -> Figure:
    """A table: our numbers, the best of each setting in bold, and the paper's below them in grey.

    ``cells`` has "setting" and "network", the place; "at", which cells to be compared share; "ours",
    "ours_std", "batch" and "paper".
    """
    from landscape.plots.picture import panels

    lines, columns = (list(dict.fromkeys(cells[name])) for name in ("setting", "network"))
    won = winners(cells, higher)
    shown = [used(line, cells["batch"][cells["setting"] == line].iloc[0]) for line in lines]
    heads = [used(column, cells["batch"][cells["network"] == column].iloc[0]) for column in columns]
    width = 1.0 + 0.075 * max(map(len, shown)) + 1.45 * len(columns)
    picture, (ax,) = panels(1, 1, max(6.6, width), 1.0 + 0.38 * (len(lines) + 1))
    left = -0.6 - 0.052 * max(map(len, shown))
    ax.axis("off")
    ax.set(xlim=(left - 0.1, len(columns) - 0.4), ylim=(len(lines) - 0.4, -1.3))
    for j, column in enumerate(heads):
        text = column.replace(", batch", ",\nbatch")
        ax.text(j, -0.9, text, ha="center", va="center", fontsize=9.5, weight="bold")
    for i, line in enumerate(shown):
        if i % 2 == 0:
            ax.axhspan(i - 0.5, i + 0.5, color="#f2f2f2", lw=0)
        ax.text(left, i, line, ha="left", va="center", fontsize=9.5)
    for each in cells.itertuples():
        at = (columns.index(each.network), lines.index(each.setting))
        _draw_cell(ax, at, each, each.Index in won)
    caption(picture, f"{what[0].upper()}{what[1:]}. Bold: the best mean of its setting.")
    return picture


def _draw_cell(ax: Any, at: tuple[int, int], cell: Any, won: bool) -> None:
    (j, i), color = at, color_of(cell.setting)
    look = {"weight": "bold", "color": color if color != OTHER else "k"} if won else {}
    text = value_text(cell.ours, cell.ours_std)
    ax.text(j, i - 0.14, text, ha="center", va="center", fontsize=9.5, **look)
    below = f"paper {cell.paper:.2f}" if np.isfinite(cell.paper) else ""
    ax.text(j, i + 0.26, below, ha="center", va="center", fontsize=7, color="#666666")


def _tabulate(context: Context, entries: Iterable[Entry], what: str, quantity: str) -> tuple[Drawing, Rows]:
    """The table of ``entries`` as a picture: ours, and the paper's below it in grey; and the cells drawn.

    The labels name the batch that was used. Cells of which no run has ended are left out.
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
    wide = cells.pivot(index=["at", "network"], columns="algorithm", values="ours")
    both = wide.reindex(columns=["SSGD", "DPSGD"]).dropna()
    won = (both["DPSGD"] > both["SSGD"] if higher else both["DPSGD"] < both["SSGD"]).sum()
    said = f"DPSGD's mean is better than SSGD's in {won} of {len(both)} pairs."
    return Drawing({"": table_picture(cells, what, higher)}, rows, compared, said), cells


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


# ---- Table 1


def _table1(context: Context) -> Drawing:
    rows = pd.DataFrame(printed("table1_models")).rename(columns={"task": "setting", "model": "network"})
    keys = {name: key for key, name in NAMED.items()}
    rows["parameters"] = [Layout.of(models.build(keys.get(name, "lstm"))).size for name in rows["network"]]
    rows["ours"], rows["ours_std"] = 4 * rows["parameters"] / MIB, float("nan")
    rows["paper"] = rows["size_mib"].astype(float)
    rows = rows[["setting", "network", "parameters", "ours", "ours_std", "paper"]]
    labels = [f"{row.network} ({row.setting})" for row in rows.itertuples()]
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
    what, entries = f"{_ACCURACY} by batch, at rate 0.1", _table2_entries(context.scale)
    drawing, cells = _tabulate(context, entries, what, "test_accuracy")
    lowest = cells.loc[cells.groupby("network")["ours"].idxmin(), "at"]
    worst = lowest == cells["at"].iloc[-1]
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
    lambda scale: seeded(scale, [key for _, key, _ in _table2_entries(scale)]), _judge_2, **SCALED,
)(_table2)  # fmt: skip

# ---- Tables 3 and 5


def _table3_entries(scale: Scale) -> list[Entry]:
    rows = [(row, int(row["batch_size"]), row["algorithm"].lower()) for row in printed("table3_cifar10")]
    return [
        _entry(row, NAMED[m], f"batch {batch}, lr {row['lr']}", NAMED[m], cell(m, batch, a))
        for row, batch, a in rows
        if a in BOTH and batch in batches(scale)
        for m in networks(scale, 4)
    ]


def _table5_entries(scale: Scale) -> list[Entry]:
    return [
        _entry(row, NAMED[m], f"lr {row['lr']}", NAMED[m], cell(m, 8192, row["algorithm"].lower(), rate))
        for row in printed("table5_lr_tuning_cifar10")
        for rate in ["" if row["lr"] == "0.8" else f"-lr{row['lr']}"]
        for m in (NETWORKS[2:4] if scale == "laptop" else networks(scale, 2))
    ]


def _table5(context: Context) -> Drawing:
    entries = _table5_entries(context.scale)
    batch = used("batch 8192", context.runs[f"{entries[0][1]}/0"].batch)
    what = f"{_ACCURACY} at {batch}, 10 where training diverged"
    return _tabulate(context, entries, what, "test_accuracy")[0]


figure(
    "table3", "DPSGD-2020, Table 3", "SSGD and DPSGD by batch, CIFAR-10",
    "DPSGD is as good as SSGD at small batches and better at batch 8192, where SSGD diverges for some "
    "networks.",
    lambda scale: seeded(scale, [key for _, key, _ in _table3_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_accuracy", small="batch 1024,"), **SCALED,
)(
    lambda c: _tabulate(c, _table3_entries(c.scale), _LOST, "test_accuracy")[0]
)  # fmt: skip
figure(
    "table5", "DPSGD-2020, Table 5", "learning rates at batch 8192, CIFAR-10",
    "DPSGD is better than SSGD at every rate tried (but for MobileNetV2's best entry).",
    lambda scale: seeded(scale, [key for _, key, _ in _table5_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_accuracy"), **SCALED,
)(_table5)  # fmt: skip

# ---- Tables 4 and 6


def _table4_entries(scale: Scale) -> list[Entry]:
    return [
        _entry(
            row, f"SWB300_bs{16 * b}", f"batch {16 * b}", "LSTM", cell("lstm", b, row["algorithm"].lower())
        )
        for row, b in itertools.product(printed("table4_asr"), SPEECH_BATCHES)
    ]


def _table6_entries(scale: Scale) -> list[Entry]:
    chosen = SPEECH_BATCHES[2:] if scale == "laptop" else SPEECH_BATCHES[1:]
    entries = []
    for row, batch in itertools.product(printed("table6_lr_tuning_asr"), chosen):
        rate, network = "" if row["lr"] == "0.1" else f"-lr{row['lr']}", f"LSTM, batch {16 * batch}"
        key = cell("lstm", batch, row["algorithm"].lower(), rate)
        entries.append(_entry(row, f"SWB300_bs{16 * batch}", f"lr {row['lr']}", network, key))
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
    lambda scale: seeded(scale, [key for _, key, _ in _table6_entries(scale)]),
    lambda rows: _judge_pairs(rows, "test_loss"), **SPOKEN,
)(lambda c: _tabulate(c, _table6_entries(c.scale), "held-out loss (nat)", "test_loss")[0])  # fmt: skip

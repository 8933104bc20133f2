"""DPSGD-2020's Tables 1 to 6 and our numbers: one row for each setting, differences, and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from landscape import models
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper import numbers
from landscape.paper.figure import Compared, Drawing, Scale, Work, figure
from landscape.paper.figures.networks import (
    BATCHES,
    BOTH,
    NAMED,
    SCALED,
    SPEECH_BATCHES,
    SPOKEN,
    accuracy,
    batches,
    cell,
    held_out,
    networks,
    seeded,
    speech,
)
from landscape.paper.recipes import NETWORKS
from landscape.paper.table_picture import table_picture, used, value_text
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.problem.layout import Layout

MIB = 2.0**20


@dataclass(frozen=True)
class Entry:
    """One cell: the names of its ``line`` and ``column``, the key of its runs, and the paper's number."""

    line: str
    column: str
    key: str
    paper: float


def _drawing(
    work: Work,
    entries: Iterable[Entry],
    what: str,
    score: Callable[[Checkpoint], float],
    claim: Callable[..., Any],
    higher: bool,
) -> Drawing:
    """The table of ``entries`` as a picture: ours, and the paper's below it in grey.

    ``higher``: whether higher scores are better. The labels name the batch that was used.
    """
    rows: list[dict[str, Any]] = []
    for e in entries:
        values = [score(run) for run in work.group(e.key)]
        finite = [v for v in values if np.isfinite(v)]
        mean = float(np.mean(finite)) if len(finite) == len(values) else float("inf")
        rows.append(
            {
                "setting": e.line,
                "network": e.column,
                "ours": mean,
                "ours_std": float(np.std(values, ddof=1)) if len(finite) > 1 else float("nan"),
                "seeds": len(values),
                "batch": work.runs[f"{e.key}/0"].batch,
                "diverged": sum(run.diverged != "" for run in work.group(e.key)),
                "paper": e.paper,
                "difference": mean - e.paper,
            }
        )
    picture = table_picture(rows, what, higher)
    compared = [
        Compared(
            used(f"{r['setting']}, {r['network']}", r["batch"]),
            value_text(r["ours"], r["ours_std"]),
            f"{r['paper']:.2f}",
        )
        for r in rows
    ]
    conclusion, holds = claim({(r["setting"], r["network"]): r["ours"] for r in rows})
    return Drawing({"": picture}, rows, compared, conclusion, holds)


def _wins(pairs: Iterable[tuple[float, float]], higher: bool) -> tuple[int, int]:
    """(how often the second of a pair is better, how many pairs)."""
    listed = list(pairs)
    return sum((b > a) if higher else (b < a) for a, b in listed), len(listed)


# ---- Table 1


def _table1(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    for row in numbers.rows("table1_models"):
        name = next((k for k, v in NAMED.items() if v == row["model"]), "lstm")
        count = Layout.of(models.build(name)).size
        rows.append(
            {
                "setting": row["task"],
                "network": row["model"],
                "parameters": count,
                "ours": 4 * count / MIB,
                "ours_std": float("nan"),
                "paper": float(row["size_mib"]),
            }
        )
    with style():
        picture, (ax,) = panels(1, 1, 7.6, 4.2)
        place = np.arange(len(rows))
        ax.barh(place - 0.2, [r["ours"] for r in rows], 0.38, color="C0", label="here")
        ax.barh(place + 0.2, [r["paper"] for r in rows], 0.38, color="#BBBBBB", label="paper")
        for k, r in enumerate(rows):
            ax.text(
                r["ours"] * 1.03, k, f"{r['ours']:.2f}  (paper {r['paper']:.2f})", va="center", fontsize=8.5
            )
        ax.set_yticks(place, [f"{r['network']} ({r['setting']})" for r in rows])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_xscale("log")
        ax.set_xlim(2, 900)
        ax.set_xlabel("size of the float32 parameters (MiB)")
        picture.legend(loc="outside lower center", ncols=2)
    same = sum(abs(r["ours"] - r["paper"]) < 0.0151 for r in rows)
    return Drawing(
        {"": picture},
        rows,
        [
            Compared(f"MiB, {r['network']} ({r['setting']})", f"{r['ours']:.2f}", f"{r['paper']:.2f}")
            for r in rows
        ],
        f"{same} of {len(rows)} sizes agree within 0.01 MiB.",
        same == len(rows),
    )


_SIZES = "the networks as they are; the paper's hours on a V100 are not repeated"
figure(
    "table1",
    "DPSGD-2020, Table 1",
    "size of the networks",
    "The networks and their sizes.",
    lambda scale: {},
    smoke=_SIZES,
    laptop=_SIZES,
    paper=_SIZES,
)(_table1)

# ---- Table 2


def _table2_entries(scale: Scale) -> list[Entry]:
    chosen = NETWORKS if scale == "paper" else NETWORKS[3:4]
    keys = {128: "sgd", 256: "sgd", 512: "sgd", 1024: "ssgd"} | dict.fromkeys(BATCHES[1:], "ssgd")
    if scale == "smoke":
        keys = {128: "sgd", 8192: "ssgd"}
    elif scale == "laptop":  # a batch of 8 takes as long as all others
        del keys[128]
    printed = {row["model"]: row for row in numbers.rows("table2_batch_size")}
    return [
        Entry(
            f"batch {batch}",
            NAMED[m],
            cell(m, batch, a, "-lr0.1" if batch > 1024 else ""),
            float(printed[NAMED[m]][f"bs{batch}"]),
        )
        for m in chosen
        for batch, a in keys.items()
    ]


def _table2(work: Work) -> Drawing:
    def claim(ours: dict[tuple[str, str], float]) -> tuple[str, bool]:
        columns = list(dict.fromkeys(column for _, column in ours))
        lines = list(dict.fromkeys(line for line, _ in ours))
        worst = [min(lines, key=lambda line: ours[line, c]) == lines[-1] for c in columns]
        return (f"The largest batch is the worst for {sum(worst)} of {len(worst)} networks.", all(worst))

    entries = _table2_entries(work.scale)
    return _drawing(
        work, entries, "test accuracy of $w_a$ (%) by batch, at rate 0.1", accuracy, claim, higher=True
    )


figure(
    "table2",
    "DPSGD-2020, Table 2",
    "batch size at a fixed rate, CIFAR-10",
    "Without a larger rate, accuracy falls as the batch grows beyond 1024.",
    lambda scale: seeded(scale, [e.key for e in _table2_entries(scale)]),
    **SCALED,
)(_table2)

# ---- Tables 3 and 5


def _table3_entries(scale: Scale) -> list[Entry]:
    entries = []
    for row in numbers.rows("table3_cifar10"):
        batch, a = int(row["batch_size"]), row["algorithm"].lower()
        if a in BOTH and batch in batches(scale):
            entries += [
                Entry(
                    f"{row['algorithm']}, batch {batch}, lr {row['lr']}",
                    NAMED[m],
                    cell(m, batch, a),
                    float(row[NAMED[m]]),
                )
                for m in networks(scale, 4)
            ]
    return entries


def _table5_entries(scale: Scale) -> list[Entry]:
    entries = []
    for row in numbers.rows("table5_lr_tuning_cifar10"):
        rate = "" if row["lr"] == "0.8" else f"-lr{row['lr']}"
        entries += [
            Entry(
                f"{row['algorithm']}, lr {row['lr']}",
                NAMED[m],
                cell(m, 8192, row["algorithm"].lower(), rate),
                float(row[NAMED[m]]),
            )
            for m in (NETWORKS[2:4] if scale == "laptop" else networks(scale, 2))
        ]
    return entries


def _pairs(ours: dict[tuple[str, str], float]) -> list[tuple[float, float]]:
    """(SSGD, DPSGD) of each setting and network that has both."""
    return [
        (value, ours["DPSGD" + line.removeprefix("SSGD"), column])
        for (line, column), value in ours.items()
        if line.startswith("SSGD") and ("DPSGD" + line.removeprefix("SSGD"), column) in ours
    ]


def _claim_cifar(ours: dict[tuple[str, str], float]) -> tuple[str, bool]:
    won, of = _wins(_pairs(ours), higher=True)
    last = {k: v for k, v in ours.items() if "8192" in k[0] or "lr 0.8" in k[0]}
    top, among = _wins(_pairs(last), higher=True)
    return (
        f"DPSGD is better in {won} of {of} pairs, at the largest batch and rate in {top} of {among}.",
        top == among,
    )


def _table3(work: Work) -> Drawing:
    what = "test accuracy of $w_a$ (%), 10 where training diverged"
    return _drawing(work, _table3_entries(work.scale), what, accuracy, _claim_cifar, higher=True)


def _table5(work: Work) -> Drawing:
    batch = work.runs[f"{_table5_entries(work.scale)[0].key}/0"].batch
    what = f"test accuracy of $w_a$ (%) at {used('batch 8192', batch)}, 10 where training diverged"
    return _drawing(work, _table5_entries(work.scale), what, accuracy, _claim_cifar, higher=True)


figure(
    "table3",
    "DPSGD-2020, Table 3",
    "SSGD and DPSGD by batch, CIFAR-10",
    "DPSGD is as good as SSGD at small batches and better at batch 8192, where SSGD diverges for some "
    "networks.",
    lambda scale: seeded(scale, [e.key for e in _table3_entries(scale)]),
    **SCALED,
)(_table3)
figure(
    "table5",
    "DPSGD-2020, Table 5",
    "learning rates at batch 8192, CIFAR-10",
    "DPSGD is better than SSGD at every rate tried (but for MobileNetV2's best entry).",
    lambda scale: seeded(scale, [e.key for e in _table5_entries(scale)]),
    **SCALED,
)(_table5)

# ---- Tables 4 and 6


def _table4_entries(scale: Scale) -> list[Entry]:
    return [
        Entry(
            f"{row['algorithm']}, batch {16 * batch}",
            "LSTM",
            cell("lstm", batch, row["algorithm"].lower()),
            float(row[f"SWB300_bs{16 * batch}"]),
        )
        for row, batch in itertools.product(numbers.rows("table4_asr"), SPEECH_BATCHES)
    ]


def _table6_entries(scale: Scale) -> list[Entry]:
    entries = []
    chosen = SPEECH_BATCHES[2:] if scale == "laptop" else SPEECH_BATCHES[1:]
    for row, batch in itertools.product(numbers.rows("table6_lr_tuning_asr"), chosen):
        rate = "" if row["lr"] == "0.1" else f"-lr{row['lr']}"
        printed = float(row[f"SWB300_bs{16 * batch}"])
        key = cell("lstm", batch, row["algorithm"].lower(), rate)
        entries.append(
            Entry(f"{row['algorithm']}, lr {row['lr']}", f"LSTM, batch {16 * batch}", key, printed)
        )
    return entries


def _claim_speech(ours: dict[tuple[str, str], float]) -> tuple[str, bool]:
    won, of = _wins(_pairs(ours), higher=False)
    lost = sum(not np.isfinite(a) for a, _ in _pairs(ours))
    return f"DPSGD has the lower held-out loss in {won} of {of} pairs; SSGD diverged in {lost}.", won == of


figure(
    "table4",
    "DPSGD-2020, Table 4",
    "held-out loss by batch, LSTM (paper: SWB300)",
    "SSGD diverges from batch 4096 on, DPSGD converges up to 8192.",
    speech,
    **SPOKEN,
)(
    lambda work: _drawing(
        work, _table4_entries(work.scale), "held-out loss (nat)", held_out, _claim_speech, higher=False
    )
)
figure(
    "table6",
    "DPSGD-2020, Table 6",
    "learning rates at the largest batches, LSTM (paper: SWB300)",
    "DPSGD converges at larger rates than SSGD and reaches a lower held-out loss.",
    lambda scale: seeded(scale, [e.key for e in _table6_entries(scale)]),
    **SPOKEN,
)(
    lambda work: _drawing(
        work, _table6_entries(work.scale), "held-out loss (nat)", held_out, _claim_speech, higher=False
    )
)

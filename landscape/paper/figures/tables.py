"""DPSGD-2020's Tables 1, 2, 3 and 5 and our numbers: one row for each setting, differences, and a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape import models
from landscape.paper import numbers
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure
from landscape.paper.figures import edges
from landscape.paper.figures.table_rows import Entry, at_the_edge, judge_pairs, tabulate
from landscape.paper.figures.training_curves import (
    BOTH,
    NAMED,
    SCALED,
    accuracy,
    batches,
    cell,
    networks,
    seeded,
)
from landscape.paper.table_picture import used
from landscape.paper.verdicts import Effect, Rows, by_seed, column, difference
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.problem.layout import Layout
from landscape.train.table_recipes import BATCHES, NETWORKS

MIB = 2.0**20

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
    )


def _judge_1(rows: Rows) -> list[Effect]:
    """Exact: no seed enters. The paper prints two digits."""
    off = tuple(float(r["ours"]) - float(r["paper"]) for r in rows)
    return [
        Effect(f"{len(rows)} networks", "size less the paper's (MiB)", off, (-0.0151, 0.0151), exact=True)
    ]


_SIZES = "the networks as they are; the paper's hours on a V100 are not repeated"
figure(
    "table1",
    "DPSGD-2020, Table 1",
    "size of the networks",
    "The networks and their sizes.",
    lambda scale: {},
    _judge_1,
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
            "",
            f"batch {batch}",
            NAMED[m],
            cell(m, batch, a, "-lr0.1" if batch > 1024 else ""),
            float(printed[NAMED[m]][f"bs{batch}"]),
        )
        for m in chosen
        for batch, a in keys.items()
    ]


def _table2(work: Work) -> Drawing:
    what = "test accuracy of $w_a$ (%) by batch, at rate 0.1"
    drawing, table = tabulate(work, _table2_entries(work.scale), what, accuracy, higher=True)
    columns = list(dict.fromkeys(r["network"] for r in table))
    ranked = [sorted((r for r in table if r["network"] == c), key=lambda r: r["ours"]) for c in columns]
    last = table[-1]["at"]
    worst = [rows[0]["at"] == last for rows in ranked]
    drawing.conclusion = f"The largest batch is the worst for {sum(worst)} of {len(worst)} networks."
    return drawing


def _judge_2(rows: Rows) -> list[Effect]:
    """Batch 1024 against each larger one, at the same rate."""
    effects = []
    column(rows, "seed")
    for network in dict.fromkeys(column(rows, "network")):
        base = by_seed(rows, "ours", network=network, at="batch 1024")
        for batch in BATCHES[1:]:
            fall = difference(base, by_seed(rows, "ours", network=network, at=f"batch {batch}"))
            effects.append(Effect(f"{network}, batch 1024 less {batch}", "test accuracy (points)", fall))
    return effects


figure(
    "table2",
    "DPSGD-2020, Table 2",
    "batch size at a fixed rate, CIFAR-10",
    "Without a larger rate, accuracy falls as the batch grows beyond 1024.",
    lambda scale: seeded(scale, [e.key for e in _table2_entries(scale)]),
    _judge_2,
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
                    row["algorithm"],
                    f"batch {batch}, lr {row['lr']}",
                    NAMED[m],
                    cell(m, batch, a),
                    float(row[NAMED[m]]),
                )
                for m in networks(scale, 4)
            ]
    return entries


def _searched(scale: Scale) -> list[tuple[str, int]]:
    """The networks and batches whose edge is searched for."""
    if scale not in ("smoke", "workstation"):
        return []
    return [(m, batch) for m in networks(scale, 4, smoke=1) for batch in batches(scale)[::-1]]


def _more3(work: Work) -> Runs:
    runs: dict[str, Any] = {}
    for model, batch in _searched(work.scale):
        runs |= edges.search(work, model, batch)
    return runs


def _table3(work: Work) -> Drawing:
    entries = _table3_entries(work.scale)
    for model, batch in _searched(work.scale):
        entries += at_the_edge(work, model, batch, f"batch {batch}", NAMED[model])
    what = "test accuracy of $w_a$ (%), 10 where training diverged"
    return tabulate(work, entries, what, accuracy, higher=True)[0]


def _table5_entries(scale: Scale) -> list[Entry]:
    printed = {(row["algorithm"], row["lr"]): row for row in numbers.rows("table5_lr_tuning_cifar10")}
    if scale != "workstation":
        return [
            Entry(
                algorithm,
                f"lr {lr}",
                NAMED[m],
                cell(m, 8192, algorithm.lower(), "" if lr == "0.8" else f"-lr{lr}"),
                float(row[NAMED[m]]),
            )
            for (algorithm, lr), row in printed.items()
            for m in (NETWORKS[2:4] if scale == "laptop" else networks(scale, 2))
        ]
    entries = []
    for factor in (*LOWER, *edges.FACTORS):
        lr = f"{0.8 * factor:g}"
        for a in edges.variants("") if factor >= 1 else BOTH:
            name = edges.VARIANTS[a].name
            for m in NETWORKS[:2]:
                row = printed.get((name, lr), {})
                paper = float(row.get(NAMED[m], "nan"))
                entries.append(Entry(name, f"lr {lr}", NAMED[m], edges.key(m, 8192, a, factor), paper))
    return entries


# Table 5's rates below 0.8, as multiples of it.
LOWER = (0.25, 0.5)


def _table5_runs(scale: Scale) -> Runs:
    """On a workstation first the algorithms of the paper, network by network, then DPSGD's other forms."""
    if scale != "workstation":
        return seeded(scale, [e.key for e in _table5_entries(scale)])
    runs: dict[str, Any] = {}
    for model in NETWORKS[:2]:
        runs |= edges.runs_at(scale, model, 8192, BOTH, edges.FACTORS)
    for model in NETWORKS[:2]:
        runs |= edges.runs_at(scale, model, 8192, edges.variants(model)[2:], edges.FACTORS)
        runs |= edges.runs_at(scale, model, 8192, BOTH, LOWER)
    return runs


def _table5(work: Work) -> Drawing:
    entries = _table5_entries(work.scale)
    batch = work.runs[f"{entries[0].key}/0"].batch
    what = f"test accuracy of $w_a$ (%) at {used('batch 8192', batch)}, 10 where training diverged"
    return tabulate(work, entries, what, accuracy, higher=True)[0]


figure(
    "table3",
    "DPSGD-2020, Table 3",
    "SSGD and DPSGD by batch, CIFAR-10",
    "DPSGD is as good as SSGD at small batches and better at batch 8192, where SSGD diverges for some "
    "networks; on a workstation also at SSGD's best rate and at the first at which it fails.",
    lambda scale: seeded(scale, [e.key for e in _table3_entries(scale)]),
    lambda rows: judge_pairs(rows, higher=True, small="batch 1024,"),
    more=_more3,
    **SCALED,
)(_table3)
figure(
    "table5",
    "DPSGD-2020, Table 5",
    "learning rates at batch 8192, CIFAR-10",
    "DPSGD is better than SSGD at every rate tried (but for MobileNetV2's best entry).",
    _table5_runs,
    lambda rows: judge_pairs(rows, higher=True),
    **SCALED,
)(_table5)

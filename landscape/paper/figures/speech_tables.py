"""DPSGD-2020's Tables 4 and 6, with spoken digits for Switchboard."""

from __future__ import annotations

import itertools
from typing import Any

from landscape.paper import numbers
from landscape.paper.figure import Drawing, Runs, Scale, Work, figure
from landscape.paper.figures import edges
from landscape.paper.figures.table_rows import Entry, at_the_edge, judge_pairs, tabulate
from landscape.paper.figures.training_curves import BOTH, SPOKEN, cell, held_out, seeded, speech
from landscape.train.table_recipes import SPEECH_BATCHES


def _table4_entries(scale: Scale) -> list[Entry]:
    return [
        Entry(
            row["algorithm"],
            f"batch {16 * batch}",
            "LSTM",
            cell("lstm", batch, row["algorithm"].lower()),
            float(row[f"SWB300_bs{16 * batch}"]),
        )
        for row, batch in itertools.product(numbers.rows("table4_asr"), SPEECH_BATCHES)
    ]


def _searched(scale: Scale) -> tuple[int, ...]:
    """The batches at which SSGD's edge is searched for."""
    return {"smoke": SPEECH_BATCHES[-1:], "workstation": SPEECH_BATCHES[::-1]}.get(scale, ())


def _more4(work: Work) -> Runs:
    runs: dict[str, Any] = {}
    for batch in _searched(work.scale):
        runs |= edges.search(work, "lstm", batch)
    return runs


def _table4(work: Work) -> Drawing:
    entries = _table4_entries(work.scale)
    for batch in _searched(work.scale):
        entries += at_the_edge(work, "lstm", batch, f"batch {16 * batch}", "LSTM")
    return tabulate(work, entries, "held-out loss (nat)", held_out, higher=False)[0]


# The paper's rate at the baseline batch, of which Table 6 tries smaller ones.
_RATE = 0.1


def _table6_entries(scale: Scale) -> list[Entry]:
    entries = []
    chosen = SPEECH_BATCHES[2:] if scale in ("laptop", "workstation") else SPEECH_BATCHES[1:]
    for row, batch in itertools.product(numbers.rows("table6_lr_tuning_asr"), chosen):
        rate = "" if row["lr"] == "0.1" else f"-lr{row['lr']}"
        printed = float(row[f"SWB300_bs{16 * batch}"])
        key = cell("lstm", batch, row["algorithm"].lower(), rate)
        if scale == "workstation":
            key = edges.key("lstm", batch, row["algorithm"].lower(), float(row["lr"]) / _RATE)
        entries.append(Entry(row["algorithm"], f"lr {row['lr']}", f"LSTM, batch {16 * batch}", key, printed))
    if scale == "workstation":
        for factor, a in itertools.product(edges.FACTORS, edges.variants("lstm")):
            if factor == 1 and a in BOTH:
                continue
            key, name = edges.key("lstm", SPEECH_BATCHES[-1], a, factor), edges.VARIANTS[a].name
            entries.append(
                Entry(
                    name,
                    f"lr {_RATE * factor:g}",
                    f"LSTM, batch {16 * SPEECH_BATCHES[-1]}",
                    key,
                    float("nan"),
                )
            )
    return entries


def _table6_runs(scale: Scale) -> Runs:
    if scale != "workstation":
        return seeded(scale, [e.key for e in _table6_entries(scale)])
    batch = SPEECH_BATCHES[-1]
    return {
        **edges.runs_at(scale, "lstm", batch, edges.variants("lstm"), edges.FACTORS),
        **edges.runs_at(scale, "lstm", batch, BOTH, (0.125, 0.25, 0.5)),
    }


def _table6(work: Work) -> Drawing:
    return tabulate(work, _table6_entries(work.scale), "held-out loss (nat)", held_out, higher=False)[0]


figure(
    "table4",
    "DPSGD-2020, Table 4",
    "held-out loss by batch, LSTM (paper: SWB300)",
    "SSGD diverges from batch 4096 on, DPSGD converges up to 8192; on a workstation also at SSGD's best rate "
    "and at the first at which it fails.",
    speech,
    lambda rows: judge_pairs(rows, higher=False, small="batch 2048"),
    more=_more4,
    **SPOKEN,
)(_table4)
figure(
    "table6",
    "DPSGD-2020, Table 6",
    "learning rates at the largest batches, LSTM (paper: SWB300)",
    "DPSGD converges at larger rates than SSGD and reaches a lower held-out loss.",
    _table6_runs,
    lambda rows: judge_pairs(rows, higher=False),
    **SPOKEN,
)(_table6)

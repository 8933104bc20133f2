"""Rows of DPSGD-2020's tables: from entries and finished runs to a drawing, and to the effects of pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import Compared, Drawing, Work
from landscape.paper.figures import edges
from landscape.paper.table_picture import table_picture, used, value_text
from landscape.paper.verdicts import Effect, Rows, by_seed, column, difference

# "As good as" and "no worse": up to so many points of accuracy, or nats of loss, less (ours).
MARGIN = {True: 1.0, False: 0.05}
EDGE, BEST = "SSGD's edge", "SSGD's best rate"


@dataclass(frozen=True)
class Entry:
    """One cell: an ``algorithm`` ``at`` a setting in the column ``network``.

    ``key`` is that of its runs, ``paper`` the paper's number (NaN: none), ``note`` what stands in its place.
    """

    algorithm: str
    at: str
    network: str
    key: str
    paper: float
    note: str = ""

    @property
    def line(self) -> str:
        """The name of the row."""
        return f"{self.algorithm}, {self.at}" if self.algorithm else self.at


def at_the_edge(work: Work, model: str, batch: int, setting: str, network: str) -> list[Entry]:
    """SSGD and DPSGD at SSGD's best rate and at the first at which it fails, once these are known."""
    found = edges.edge(work, model, batch)
    if found is None:
        return []
    entries = []
    for factor, name in zip(found, (BEST, EDGE), strict=True):
        if factor == 1 or factor > edges.FACTORS[-1]:  # the paper's rate has a row; or it never fails
            continue
        for a in ("ssgd", "dpsgd"):
            key = edges.key(model, batch, a, factor)
            if f"{key}/0" in work.runs:
                run = work.runs[f"{key}/0"]
                lr = f"lr {run.schedule.peak_lr(run.lr, run.batch):g}"
                at = f"{setting}, {name}"
                entries.append(Entry(edges.VARIANTS[a].name, at, network, key, float("nan"), lr))
    return entries


def tabulate(
    work: Work, entries: Iterable[Entry], what: str, score: Callable[[Checkpoint], float], higher: bool
) -> tuple[Drawing, list[dict[str, Any]]]:
    """The table of ``entries`` as a picture: ours, and the paper's below it in grey; and the rows drawn.

    ``higher``: whether higher scores are better. The labels name the batch that was used. Cells of which no
    run has ended are left out.
    """
    rows: list[dict[str, Any]] = []
    table: list[dict[str, Any]] = []
    for e in entries:
        runs = work.group(e.key)
        scores = [score(run) for run in runs]
        recipe = work.runs[f"{e.key}/0"]
        rows += [
            {
                "algorithm": e.algorithm,
                "at": e.at,
                "network": e.network,
                "seed": run.seed,
                "ours": value,
                "lr": recipe.schedule.peak_lr(recipe.lr, recipe.batch),
                "batch": recipe.batch,
                "diverged": run.diverged,
                "paper": e.paper,
            }
            for run, value in zip(runs, scores, strict=True)
        ]
        if scores:
            spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else float("nan")
            place = {
                "setting": e.line,
                "network": e.network,
                "at": e.at,
                "batch": recipe.batch,
                "note": e.note,
            }
            table.append({**place, "ours": float(np.mean(scores)), "ours_std": spread, "paper": e.paper})
    compared = [
        Compared(
            used(f"{r['setting']}, {r['network']}", r["batch"]) + (f" ({r['note']})" if r["note"] else ""),
            value_text(r["ours"], r["ours_std"]),
            f"{r['paper']:.2f}" if np.isfinite(r["paper"]) else "",
        )
        for r in table
    ]
    picture = table_picture(table, what, higher)
    return Drawing({"": picture}, rows, compared, _counted(table, higher)), table


def _counted(table: list[dict[str, Any]], higher: bool) -> str:
    """In how many settings DPSGD's mean is better than SSGD's."""
    means = {(r["setting"], r["network"]): r["ours"] for r in table}
    pairs = [
        (value, means["DPSGD" + line.removeprefix("SSGD"), network])
        for (line, network), value in means.items()
        if line.startswith("SSGD") and ("DPSGD" + line.removeprefix("SSGD"), network) in means
    ]
    won = sum((b > a) if higher else (b < a) for a, b in pairs)
    return f"DPSGD's mean is better than SSGD's in {won} of {len(pairs)} pairs."


def judge_pairs(rows: Rows, *, higher: bool, small: str = "") -> list[Effect]:
    """Every form of DPSGD against SSGD at the same setting.

    It must be better; at the settings that begin with ``small``, and at SSGD's best rate, as good.
    """
    effects = []
    column(rows, "seed")
    quantity = "test accuracy (points)" if higher else "held-out loss, by how much lower (nat)"
    for network, at in dict.fromkeys(zip(column(rows, "network"), column(rows, "at"), strict=True)):
        scores = {
            a: by_seed(rows, "ours", algorithm=a, network=network, at=at)
            for a in dict.fromkeys(column(rows, "algorithm"))
        }
        as_good = at.endswith(BEST) or (small and at.startswith(small))
        least = -MARGIN[higher] if as_good else 0.0
        for a, ours in scores.items():
            if re.match("DPSGD", a) and ours and scores.get("SSGD"):
                pair = (ours, scores["SSGD"]) if higher else (scores["SSGD"], ours)
                where = f"{network}, {at}: {a} less SSGD"
                effects.append(Effect(where, quantity, difference(*pair), (least, np.inf)))
    return effects

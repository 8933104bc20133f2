"""Ours: all update rules side by side, decomposed, and whether the spread lies in sharp directions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from landscape import models
from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate
from landscape.paper.context import Context, Ended
from landscape.paper.figure import Compared, Drawing, figure, handle, late
from landscape.paper.scales import declared
from landscape.paper.verdicts import CONFIDENCE, Effect, Rows, effect_of, paired_effect, select, settings
from landscape.plots.picture import caption, panels, points, wrapped_panels
from landscape.plots.style import color_of, log_axis
from landscape.plots.training import column_of

SHOWN: dict[str, Any] = declared()["rules_shown"]
# The bytes at which rules are compared are those of SSGD in this share of its steps (ours).
SHARE = 8
SAMPLES, BYTES = "equal samples", "equal bytes"
IID, SKEWED = "iid", "Dirichlet 0.1"
ERROR, COSINE = "test_error_percent", "path_cosine"
PLACE = ["network", "split", "rule"]
# Rules that differ in the schedule of the rate or the optimizer only, and are compared with one another.
ADAPTIVE, PLAIN = "DSGD-AC, cosine rate", "DPSGD AWC, cosine rate"
MULOCO, DILOCO = "MuLoCo", "DiLoCo, AdamW"


# ---- The table


def _sent(run: Ended) -> Array:
    """The bytes that a learner sends in each step."""
    sent = run.end.history["comm_bytes"]
    sent = sent[np.isfinite(sent)]
    assert len(sent) == run.end.step  # a record has all of up to record.POINTS steps
    return sent


def _derived(run: Ended) -> dict[str, Array]:
    """The columns of the history with those that follow from them; NaN where a column is not there."""
    h = {name: column_of(run.end, name) for name in SHOWN["columns"]}
    with np.errstate(divide="ignore", invalid="ignore"):  # a rate of zero; an estimate of ‖g‖² below zero
        return h | {
            "relative_rate": h["alpha_e"] / h["lr"],
            "step_cosine": h["alpha_e"] * np.sqrt(h["grad_norm2"] / h["displacement2"]),
            "delta_from_spread": (h["delta_2"] + h["delta_cross"]) / h["delta"],
            "of_limit": h["lr_lambda_max"] / h["lr_lambda_limit"],
        }


def _measured(run: Ended, until: int) -> dict[str, Any]:
    """The numbers of a run up to the step ``until``; NaN where its rule or its optimizer has none.

    Means and medians are over the second half of the steps, the others the last values. Ratios are medians:
    a denominator such as the rate of a schedule or an estimate of ‖g‖² may be near zero.
    """
    h, sent = _derived(run), _sent(run)[:until]
    before = h["step"] <= until
    late = before & (h["step"] > until / 2)

    def of(name: str, rows: Array, reduce: Any) -> float:
        values = h[name][rows & np.isfinite(h[name])]
        return float(reduce(values)) if len(values) else float("nan")

    ends = np.append(np.flatnonzero(sent) + 1, until)
    return {
        "step": until,
        "megabytes": sent.sum() / 1e6,
        "kilobytes_a_step": sent.mean() / 1e3,
        "kilobytes_burst": sent.max() / 1e3,
        "steps_apart": int(np.diff(ends, prepend=0).max()),
        **{name: of(name, late, np.median) for name in SHOWN["medians"]},
        **{name: of(name, late, np.mean) for name in SHOWN["means"]},
        "train_loss": of("train_loss", before, lambda values: values[-1]),
        ERROR: 100 * (1 - of("test_accuracy", before, lambda values: values[-1])),
        "diverged": run.end.diverged,
    }


def _judge_rules(rows: Rows) -> list[Effect]:
    """At equal bytes local SGD against SSGD; MuLoCo's way against DiLoCo's; what skewed data cost D²."""
    effects = []
    for network, split in settings(rows, "network", "split"):
        here: dict[str, Any] = {"network": network, "split": split}
        where = f"{network}, {split}"
        what = "test error at equal bytes, SSGD less local SGD (points)"
        effects.append(paired_effect(where, what, rows, ERROR, at=BYTES, rule=("SSGD", "local SGD"), **here))
        what = f"cosine of the way of w_a with −g, {MULOCO} less {DILOCO}"
        effects.append(paired_effect(where, what, rows, COSINE, at=SAMPLES, rule=(MULOCO, DILOCO), **here))
    for network in settings(rows, "network"):
        by = select(rows, network=network, at=SAMPLES).pivot_table(ERROR, "seed", ["rule", "split"])
        worse = {rule: by[rule, SKEWED] - by[rule, IID] for rule in ("DPSGD AWC", "D²")}
        what = f"what {SKEWED} adds to the test error, DPSGD AWC less D² (points)"
        effects.append(effect_of(network, what, worse["DPSGD AWC"], worse["D²"]))
    return effects


@figure("rules", _judge_rules)
def _rules(context: Context) -> Drawing:
    """A row of points for each rule, a panel for each number, a picture for each network."""
    tables, compared, pictures = [], list[Compared](), dict[str, Any]()
    colors = {run.values["rule"]: color_of(run.end.algorithm) for run in context.ended()}
    for network in dict.fromkeys(cell.values["network"] for cell in context.cells):
        reference = context.ended(network=network, rule="SSGD")[0]
        budget = _sent(reference).mean() * reference.last.recipe.steps / SHARE

        def measure(run: Ended, budget: float = budget) -> list[dict[str, Any]]:
            within = int(np.searchsorted(_sent(run).cumsum(), budget * (1 + 1e-9), "right"))
            each = {SAMPLES: run.end.step, BYTES: max(1, within)}
            return [{"at": at, **_measured(run, until)} for at, until in each.items()]

        rows = context.table(measure, network=network)
        tables.append(rows)
        pictures[f"-{network.split(',')[0].lower()}" if pictures else ""] = _picture(rows, network, colors)
        compared += _compared(rows)
    return Drawing(pictures, pd.concat(tables, ignore_index=True), compared, SHOWN["remark"])


def _interval(values: Any) -> tuple[float, float, float]:
    """(mean, low, high) over the seeds, with NaN where a seed has no number, or there is one seed only."""
    estimate = Estimate.of(values.to_numpy(float))
    return estimate.value, *estimate.interval(CONFIDENCE)


def _text(values: Any, form: str) -> str:
    """The mean over the seeds ± half of the interval, or "–" where it is no number."""
    mean, low, _ = _interval(values)
    off = f" ± {float(f'{mean - low:.1g}'):g}" if mean - low > 1e-9 * abs(mean) else ""  # not its rounding
    return f"{mean:{form}}{off}" if np.isfinite(mean) else "–"


def _compared(rows: Rows) -> list[Compared]:
    """A line for each network, split and rule: its numbers."""
    lines = []
    for place, group in rows.groupby(PLACE, sort=False):
        texts = [f"{label} {_text(select(group, at=at)[c], form)}" for label, c, form, at in SHOWN["table"]]
        lines.append(Compared(", ".join(place), "; ".join(texts)))
    return lines


def _picture(rows: Rows, network: str, colors: dict[str, str]) -> Any:
    """The numbers of SHOWN against the rules: filled for iid data, hollow for skewed."""
    rules = settings(rows, "rule")
    shown = [panel for panel in SHOWN["panels"] if rows[panel[0]].notna().any()]
    picture, axes = panels(1, len(shown), 2.15, 0.27 * len(rules) + 1.3, sharey=True)
    for ax, (column, label, scale, at) in zip(axes, shown, strict=True):
        for (place, rule), split in itertools.product(enumerate(rules), (IID, SKEWED)):
            mean, low, high = _interval(select(rows, rule=rule, split=split, at=at)[column])
            if not np.isfinite(mean) or (scale == "log" and not mean > 0):
                continue
            off = [[mean - low], [high - mean]] if np.isfinite(low) else None
            color = colors[rule]
            look: Any = {"mfc": color if split == IID else "white", "ms": 4, "lw": 0.8, "capsize": 0}
            points(ax, mean, place + (0.17 if split == SKEWED else -0.17), None, color, xerr=off, **look)
        least, most = ax.dataLim.intervalx
        if scale == "log" and most > 2 * least:  # within less, few ticks of a logarithmic axis have a number
            log_axis(ax.xaxis)
        elif scale == "symlog":
            ax.set_xscale("symlog", linthresh=1)
            ax.xaxis.set_major_formatter("{x:g}")  # powers of ten take more room than there is
        ax.set_xlabel(label)
    axes[0].set_yticks(range(len(rules)), rules)
    axes[0].set_ylim(len(rules) - 0.5, -0.5)
    gray = {"marker": "o", "ls": "none", "ms": 4}
    both = [handle(IID, **gray), handle(SKEWED, mfc="white", **gray)]
    picture.legend(handles=both, loc="outside lower center", ncols=2)
    caption(picture, f"{network}. {SHOWN['caption']}")
    return picture


# ---- Where the spread lies

COLUMNS = 5  # of panels in a row


def _along(run: Ended) -> Rows:
    """A row for each measurement at which the learners' weights differ."""
    h = _derived(run)
    at = np.isfinite(h["spread_share"]) & np.isfinite(h["noise_share"])
    h = {name: column[at] for name, column in h.items()}
    table = pd.DataFrame({name: h[name] for name in ("step", *SHOWN["shares"])})
    bent = 2 * h["disagreement_cost"] / (h["consensus"] * h["lambda_max"])
    model = run.end.model
    size = sum(p.numel() for p in models.build(model["name"], **model["options"]).parameters())
    # A random direction has its equal part along each of the eigenvectors.
    random_share = run.last.recipe.monitor.k / size
    return table.assign(alignment=bent, random_share=random_share).astype({"step": int})


def _judge_disagreement(rows: Rows) -> list[Effect]:
    """Each rule's share of the spread against that of the noise, and adaptive consensus against DPSGD."""
    effects = []
    for place, here in rows.groupby(PLACE, sort=False):
        means = late(here).groupby("seed")[["spread_share", "noise_share"]].mean()
        what = "share in the sharp space, the spread's / the noise's"
        both = means["spread_share"], means["noise_share"]
        effects.append(effect_of(", ".join(place), what, *both, times=True))
    for (network, split), here in rows.groupby(PLACE[:2], sort=False):
        means = late(here).groupby(["rule", "seed"], as_index=False)["alignment"].mean()
        what = f"tr(HC)/(λ_max tr C), {ADAPTIVE} / {PLAIN}"
        how: dict[str, Any] = {"times": True, "claimed": (0.0, 1.0), "rule": (ADAPTIVE, PLAIN)}
        effects.append(paired_effect(f"{network}, {split}", what, means, "alignment", **how))
    return effects


@figure("disagreement", _judge_disagreement)
def _disagreement(context: Context) -> Drawing:
    """A panel for each rule whose learners differ: the shares along training, a picture for each network."""
    rows = context.table(_along)
    pictures: dict[str, Any] = {}
    for network, here in rows.groupby("network", sort=False):
        pictures[f"-{network.split(',')[0].lower()}" if pictures else ""] = _shares_picture(here, network)
    compared = []
    for place, here in rows.groupby(PLACE, sort=False):
        half = late(here).groupby("seed").mean(numeric_only=True)
        names = (*SHOWN["shares"][:2], "random_share")
        texts = [_text(half[name], ".2g") for name in names]
        what = (
            f"{', '.join(place)}: share in the sharp space of the spread; of the noise; of a random direction"
        )
        compared.append(Compared(what, "; ".join(texts)))
    return Drawing(pictures, rows, compared)


def _shares_picture(rows: Rows, network: str) -> Any:
    """The median over seeds of the spread's share, solid, and the noise's, dashed, by rule and split."""
    rules = settings(rows, "rule")
    picture, axes = wrapped_panels(len(rules), 2.5, 1.9, columns=COLUMNS, sharex=True, sharey=True)
    looks = {IID: color_of("dpsgd"), SKEWED: color_of("ssgd")}
    for ax, rule in zip(axes, rules, strict=True):
        for split, color in looks.items():
            middle = select(rows, rule=rule, split=split).groupby("step")[SHOWN["shares"][:2]].median()
            for name, line in zip(middle, ("-", ":"), strict=True):
                ax.plot(middle.index, middle[name], color=color, ls=line, lw=1.3)
        ax.set_title(rule)
    axes[0].set_ylim(0, 1)
    lines = [handle("the learners' spread", lw=1.3), handle("gradient noise at the mean", lw=1.3, ls=":")]
    lines += [handle(split, color=color, lw=1.8) for split, color in looks.items()]
    picture.legend(handles=lines, loc="outside lower center", ncols=4)
    for ax in axes[-COLUMNS:]:
        ax.set_xlabel("step")
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("share")
    caption(picture, f"{network}. {SHOWN['shares_caption']}")
    return picture

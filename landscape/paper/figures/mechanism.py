"""Ours: the mechanism behind the edge: ω_min alone, by lazy mixing; what precedes bursts of the spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.hdf5 import Array
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary, test_error
from landscape.paper.figures.figure_2 import last, median_rise
from landscape.paper.figures.plateaus import limit_of, plateau, rows_of
from landscape.paper.scales import SMOKE_NOTE, mnist, seeds_of
from landscape.paper.verdicts import Effect, Rows, by_seed, column, ratio, select
from landscape.plots.picture import panels
from landscape.plots.style import color_of, decimal_labels, shades, style
from landscape.train.mixing import Mixing

# ---- Lazy mixing

LEARNERS, RATE, STEPS = 6, 0.5, 1000
# Mixings of six learners: three with the spectral gap of ring(1), 1/3, and three with the ω_min of full, 0.
SAME_GAP = ("ring(1)", f"lazy({5 / 12!r}, ring(2))", f"lazy({1 / 3!r}, full)")
SAME_OMEGA = ("full", f"lazy({5 / 6!r}, ring(2))", "lazy(0.75, ring(1))")
_FAMILIES = {"the same gap": SAME_GAP, "the same ω_min": SAME_OMEGA}
# How near 1 a ratio counts as "the same" (ours).
_SAME = (0.8, 1.25)


def _lazy_runs(scale: Scale) -> Runs:
    every = ("decompose.every=0", "monitor.sharpness=50", "evaluate.every=500")
    return {
        f"{name}/{seed}": mnist(
            scale,
            "fig2b-dpsgd",
            seed,
            f"lr={RATE}",
            f"algorithm={{name='dpsgd', mixing='{name}', order='awc'}}",
            *every,
            steps=STEPS,
        )
        for name in (*SAME_GAP, *SAME_OMEGA)
        for seed in seeds_of(scale, 5)
    }


def _lazy(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    compared: list[Compared] = []
    for family, names in _FAMILIES.items():
        for name in names:
            mixing = Mixing(name, LEARNERS, 0)
            for run in work.group(name):
                rise = median_rise(work.contour(work.last(f"{name}/{run.seed}"), grid=work.pick(5, 11, 11)))
                more = {
                    "gap": mixing.gap,
                    "omega_min": mixing.omega_min,
                    "lambda_max_nat": plateau(run) / RATE,
                    "median_rise_nat": rise,
                    "consensus_distance": last(run, "consensus"),
                    "test_error_percent": test_error(run),
                }
                rows += rows_of(family, name, [run], **more)
            values = [plateau(run) for run in work.group(name)]
            what = f"plateau of ηλ_max, gap {mixing.gap:.3g}, ω_min {mixing.omega_min:+.3g} ({short(name)})"
            compared.append(Compared(what, summary(values)))
    with style():
        picture, axes = panels(1, 2, 4.8, 3.7, sharey=True)
        colors = dict(zip(_FAMILIES, (color_of("dpsgd"), color_of("ssgd")), strict=True))
        for ax, (quantity, label) in zip(axes, _AGAINST.items(), strict=True):
            for (family, color), marker in zip(colors.items(), "os", strict=True):
                chosen = select(rows, panel=family)
                at = [1 + r["omega_min"] if quantity == "omega_min" else r[quantity] for r in chosen]
                sharp = [r["plateau_lr_lambda_max"] for r in chosen]
                ax.plot(at, sharp, marker, color=color, mfc="none", ms=6, label=family)
            ax.set_xlabel(label)
        ends = np.array([0.5, 1.8])
        axes[0].plot(ends, ends, color="#777777", lw=0.9, ls=":", label="the limit 1 + ω_min")
        axes[0].set_ylabel(r"plateau of $\eta\lambda_{max}$")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    effects = _judge_lazy(rows)
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"Sharpness follows ω_min: as the power {_mean(effects[0])} of 1 + ω_min and {_mean(effects[1])} of "
        "the spectral gap, fitted over six mixings.",
    )


_AGAINST = {"omega_min": "1 + ω_min of the mixing matrix", "gap": "its spectral gap"}


def short(name: str) -> str:
    """The name of a mixing with three digits of a."""
    form, _, rest = name.partition("(")
    share, comma, inner = rest.partition(",")
    return f"lazy({float(share):.3g},{inner}" if form == "lazy" and comma else name


def _mean(effect: Effect) -> str:
    return f"{np.mean(effect.values):.2f}" if effect.values else "–"


def _powers(rows: Rows, quantity: str) -> dict[float, Array]:
    """By seed the powers (b, c) of log quantity = a + b log(1 + ω_min) + c log gap, over the mixings."""
    found = {}
    for seed in dict.fromkeys(float(s) for s in column(rows, "seed")):
        here = select(rows, seed=seed)
        y = np.array([float(r[quantity]) for r in here])
        x = [[1.0, np.log(1 + float(r["omega_min"])), np.log(float(r["gap"]))] for r in here]
        if len(here) > 3 and (y > 0).all():
            found[seed] = np.linalg.lstsq(np.array(x), np.log(y), rcond=None)[0][1:]
    return found


def _judge_lazy(rows: Rows) -> list[Effect]:
    """Powers of sharpness and of the rise of the loss; and the families, end against end."""
    effects = []
    for quantity, words in (("plateau_lr_lambda_max", "sharpness"), ("median_rise_nat", "rise of the loss")):
        powers = list(_powers(rows, quantity).values())
        for k, what, claimed in ((0, "1 + ω_min", (0.5, 1.5)), (1, "the spectral gap", (-0.25, 0.25))):
            values = tuple(float(p[k]) for p in powers)
            effects.append(Effect("six mixings", f"power of {words} in {what}", values, claimed))
    for family, names in _FAMILIES.items():
        for name in names[1:]:
            one, first = (
                by_seed(rows, "plateau_lr_lambda_max", panel=family, setting=each)
                for each in (name, names[0])
            )
            claimed = (1.25, np.inf) if family == "the same gap" else _SAME
            where = f"{family}: {short(name)} / {names[0]}"
            effects.append(Effect(where, "plateau of ηλ_max", ratio(one, first), claimed, ratio=True))
    return effects


_LAZY_NOTE = "n = 6, nB = 1998, α = 0.5, 1,000 steps, AWC order, five seeds: all settings ours"
figure(
    "edge-lazy",
    "Further analyses",
    "only ω_min changed: lazy mixing, MNIST",
    "Flatness follows ω_min of the mixing matrix and not its spectral gap: (1 − a)I + aM with the same gap "
    "and another ω_min moves ηλ_max with 1 + ω_min, with the same ω_min and another gap leaves it (ours).",
    _lazy_runs,
    _judge_lazy,
    smoke=SMOKE_NOTE,
    laptop=_LAZY_NOTE,
    paper=_LAZY_NOTE,
    weights=True,
)(_lazy)

# ---- Bursts

BURST_RATE, BURST_STEPS, MEASURED = 1.0, 1000, 10
BURST_MIXINGS = ("full", "ring(2)", "ring(1)")
# A burst: the consensus distance above so many times its median over the steps before (ours); an alarm must
# come no more than so many steps before it begins.
TIMES, BEFORE, AHEAD = 5.0, 100, 20


def _burst_runs(scale: Scale) -> Runs:
    every = ("decompose.every=0", f"monitor.sharpness={MEASURED}", "evaluate.every=500")
    return {
        f"{name}/{seed}": mnist(
            scale,
            "fig2b-dpsgd",
            seed,
            f"lr={BURST_RATE}",
            f"algorithm={{name='dpsgd', mixing='{name}', order='awc'}}",
            *every,
            steps=BURST_STEPS,
        )
        for name in BURST_MIXINGS
        for seed in seeds_of(scale, 5)
    }


def bursts(steps: Array, spread: Array) -> list[int]:
    """The steps at which bursts begin: ``spread`` exceeds TIMES its median over the BEFORE steps before.

    A burst ends where the spread is below that bound again; the bound of its beginning stays until then.
    """
    begun, bound = list[int](), 0.0
    for k, (step, value) in enumerate(zip(steps, spread, strict=True)):
        if bound:
            bound = bound if value > bound else 0.0
            continue
        earlier = spread[(steps >= step - BEFORE) & (steps < step)]
        usual = TIMES * float(np.median(earlier)) if len(earlier) >= BEFORE // 2 else np.inf
        if k and value > usual:
            begun.append(int(step))
            bound = usual
    return begun


@dataclass(frozen=True)
class Alarms:
    """Counts of a predictor in one run: measurements, those that alarm, that a burst follows, and both.

    ``caught`` of ``bursts`` had an alarm within AHEAD steps before.
    """

    times: int
    alarms: int
    followed: int
    right: int
    bursts: int
    caught: int


def count(steps: Array, alarm: Array, begun: list[int]) -> Alarms:
    """How alarms at ``steps`` fare against bursts that begin at ``begun``."""
    follows = np.array([any(s < b <= s + AHEAD for b in begun) for s in steps], dtype=bool)
    caught = [any(alarm[(steps < b) & (steps >= b - AHEAD)]) for b in begun]
    return Alarms(
        len(steps),
        int(alarm.sum()),
        int(follows.sum()),
        int((alarm & follows).sum()),
        len(begun),
        sum(caught),
    )


def _bursts(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    with style():
        picture, axes = panels(2, len(BURST_MIXINGS), 4.2, 2.6)
        for k, name in enumerate(BURST_MIXINGS):
            modes = np.unique(np.round(Mixing(name, LEARNERS, 0).modes.real, 9))
            for run in work.group(name):
                rows += _alarm_rows(name, modes, run)
            runs = work.group(name)
            if runs:
                _draw_run(axes[k], axes[k + len(BURST_MIXINGS)], runs[0], modes)
            axes[k].set_title(f"DPSGD {name}, seed 0")
            axes[k + len(BURST_MIXINGS)].set_xlabel("step")
        axes[0].set_ylabel("consensus distance")
        axes[len(BURST_MIXINGS)].set_ylabel(r"$|\omega - \eta\lambda_{max}|$")
        picture.legend(
            *axes[2 * len(BURST_MIXINGS) - 1].get_legend_handles_labels(), loc="outside lower center", ncols=5
        )
    lowest = [r for r in rows if r["is_omega_min"]]
    total = {
        c: sum(r[c] for r in lowest) for c in ("alarms", "right", "bursts", "caught", "times", "followed")
    }
    compared = [
        Compared(f"{what}, {name}", _share(select(lowest, setting=name), *pair))
        for name in BURST_MIXINGS
        for what, pair in _SHARES.items()
    ]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"Of {total['bursts']} bursts {total['caught']} come within {AHEAD} steps after ηλ_max has crossed "
        f"1 + ω_min; of {total['alarms']} such crossings {total['right']} are followed by one, of all "
        f"{total['times']} measurements {total['followed']}.",
    )


_SHARES = {
    "precision of ηλ_max > 1 + ω_min": ("right", "alarms"),
    "its recall": ("caught", "bursts"),
    "share of all measurements that a burst follows": ("followed", "times"),
}


def _share(rows: Rows, part: str, whole: str) -> str:
    total = sum(r[whole] for r in rows)
    return f"{sum(r[part] for r in rows) / total:.2f} (of {total})" if total else "–"


def _alarm_rows(name: str, modes: Array, run: Checkpoint) -> list[dict[str, Any]]:
    """Rows of the CSV: each mode's |ω − ηλ_max| > 1 as a predictor of the bursts of a run."""
    known = np.isfinite(run.history["consensus"])
    begun = bursts(run.history["step"][known], run.history["consensus"][known])
    at = np.isfinite(run.history["lr_lambda_max"])
    steps, sharpness = run.history["step"][at], run.history["lr_lambda_max"][at]
    rows = []
    for omega in modes:
        found = count(steps, np.abs(omega - sharpness) > 1, begun)
        rows.append(
            {
                "setting": name,
                "seed": run.seed,
                "omega": float(omega),
                "is_omega_min": int(omega == modes.min()),
                "limit": limit_of(run),
                **vars(found),
            }
        )
    return rows


def _draw_run(above: Any, below: Any, run: Checkpoint, modes: Array) -> None:
    """The spread with the beginnings of bursts, and the factor of each disagreement mode; 1 is the border."""
    known = np.isfinite(run.history["consensus"])
    steps, spread = run.history["step"][known], run.history["consensus"][known]
    above.plot(steps, spread, color=color_of("dpsgd"), lw=1.0)
    for begin in bursts(steps, spread):
        for ax in (above, below):
            ax.axvline(begin, color="#CC79A7", lw=0.8, ls="--")
    above.set_yscale("log")
    decimal_labels(above.yaxis)
    at = np.isfinite(run.history["lr_lambda_max"])
    for color, omega in zip(shades(color_of("dpsgd"), len(modes)), modes, strict=True):
        factor = np.abs(omega - run.history["lr_lambda_max"][at])
        below.plot(run.history["step"][at], factor, color=color, lw=1.2, label=f"ω = {omega:.2f}")
    below.axhline(1.0, color="#777777", lw=0.9, ls=":")


def _judge_bursts(rows: Rows) -> list[Effect]:
    """By mixing, over seeds with bursts and alarms: precision and recall against those of chance."""
    effects = []
    for name in dict.fromkeys(column(rows, "setting")):
        lowest = select(rows, setting=name, is_omega_min=1)
        better, recall = [], []
        for r in lowest:
            n = {key: float(r[key]) for key in ("times", "alarms", "followed", "right", "bursts", "caught")}
            if n["alarms"] and n["bursts"]:
                better.append(n["right"] / n["alarms"] - n["followed"] / n["times"])
                recall.append(n["caught"] / n["bursts"] - n["alarms"] / n["times"])
        effects.append(Effect(f"{name}: ηλ_max > 1 + ω_min", "precision less the base rate", tuple(better)))
        effects.append(
            Effect(f"{name}: ηλ_max > 1 + ω_min", "recall less the share of alarms", tuple(recall))
        )
    return effects


_BURST_NOTE = (
    f"n = 6, nB = 1998, α = {BURST_RATE:g}, {BURST_STEPS:,} steps, λ_max on 2,000 samples every {MEASURED} "
    f"steps, five seeds; a burst: consensus distance above {TIMES:g} times its median of {BEFORE} steps: ours"
)
figure(
    "edge-bursts",
    "Further analyses",
    "what precedes bursts of the spread, MNIST",
    "Bursts of the learners' spread begin when ηλ_max crosses 1 + ω_min, where the mode of ω_min, and it "
    "first, grows: |ω − ηλ_max| > 1 (ours).",
    _burst_runs,
    _judge_bursts,
    smoke=SMOKE_NOTE,
    laptop=_BURST_NOTE,
    paper=_BURST_NOTE,
)(_bursts)

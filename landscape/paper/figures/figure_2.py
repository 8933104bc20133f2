"""DPSGD-2020's Figure 2, and what its runs say about the paper's noise: MNIST, at the paper's own size."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from landscape import plots
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import (
    Compared,
    Drawing,
    Point,
    Runs,
    Scale,
    Work,
    figure,
    mean_and_spread,
    summary,
    test_error,
)
from landscape.paper.scales import MNIST_NOTE, SMOKE_NOTE, mnist, seeds
from landscape.paper.verdicts import Effect, Rows, by_seed, difference, measured, ratio
from landscape.results.surface import Surface

ALGORITHMS = ("ssgd", "ssgd-noise", "dpsgd")
NAMED = {"ssgd": "SSGD", "ssgd-noise": "SSGD*", "dpsgd": "DPSGD"}
# Test errors in % that the paper prints.
PAPER = {
    "fig2a": {"ssgd": "does not converge", "ssgd-noise": "5.7", "dpsgd": "2.1"},
    "fig2b": {"ssgd": "2.6", "ssgd-noise": "3.9", "dpsgd": "2.3"},
}
# Where a loss or an error counts as not having converged (ours): far above what every other run reaches.
POOR = 5.0
ABOVE = (1.0, np.inf)


def runs_of(part: str, algorithms: tuple[str, ...] = ALGORITHMS, many: int = 5) -> Any:
    """What gives the runs of Figure 2's ``part``, with ``many`` seeds, at a scale."""

    def runs(scale: Scale) -> Runs:
        return {
            f"{a}/{s}": mnist(scale, f"{part}-{a}", s)
            for a, s in itertools.product(algorithms, seeds(scale, many))
        }

    return runs


def _figure2(work: Work, part: str) -> tuple[Drawing, dict[str, list[float]]]:
    groups = {a: work.group(a) for a in ALGORITHMS}
    picture = plots.draw([run for runs in groups.values() for run in runs])
    rounds = {
        a: [
            work.contour(
                work.last(f"{a}/{run.seed}"), f"{NAMED[a]}, seed {run.seed}", grid=work.pick(7, 50, 50)
            )
            for run in runs
        ]
        for a, runs in groups.items()
    }
    surfaces = [each[0] for each in rounds.values()]
    contour = plots.draw(surfaces)
    errors = {a: [test_error(run) for run in runs] for a, runs in groups.items()}
    rows = [
        {
            "algorithm": NAMED[a],
            "seed": run.seed,
            "step": run.step,
            "test_error_percent": test_error(run),
            "train_loss_nat": last(run, "train_loss"),
            "median_rise_nat": median_rise(surface),
            "alpha_e_first_100": _early_rate(run),
            "alpha_e_last": last(run, "alpha_e"),
            "consensus_distance": last(run, "consensus"),
            "diverged": run.diverged,
        }
        for a, runs in groups.items()
        for run, surface in zip(runs, rounds[a], strict=True)
    ]
    form = summary if part == "fig2a" else mean_and_spread
    compared = [
        Compared(f"test error of {NAMED[a]} (%)", form(errors[a]), PAPER[part][a]) for a in ALGORITHMS
    ]
    for surface in surfaces:
        rise = f"{np.nanmin(surface.loss):.3g} to {np.nanmax(surface.loss):.3g}"
        compared.append(Compared(f"test loss over the plane, {surface.label}", rise))
    return Drawing({"": picture, "-contour": contour}, rows, compared, ""), errors


def median_rise(surface: Surface) -> float:
    """The median rise of the loss over a surface above its centre (nat)."""
    return float(np.nanmedian(surface.loss) - surface.loss[len(surface.y) // 2, len(surface.x) // 2])


def last(run: Checkpoint | Point, column: str) -> float:
    """The last number of a column of the history; NaN if it has none."""
    values = run.history[column]
    recorded = values[np.isfinite(values)]
    return float(recorded[-1]) if len(recorded) else float("nan")


def _fig2a(work: Work) -> Drawing:
    drawing, errors = _figure2(work, "fig2a")
    ss, noise, dp = (float(np.median(errors[a])) for a in ALGORITHMS)
    early = [_early_rate(run) for run in work.group("dpsgd")]
    late = [last(run, "alpha_e") for run in work.group("dpsgd")]
    drawing.compared.append(Compared("α_e of DPSGD, median of the first 100 steps", summary(early)))
    drawing.compared.append(Compared("α_e of DPSGD at the end", summary(late)))
    drawing.conclusion = (
        f"Median test error: DPSGD {dp:.2f}%, SSGD* {noise:.2f}%, SSGD {ss:.2f}%, which swings to the end; "
        f"DPSGD's effective learning rate is {np.median(early):.2f} in the first 100 steps, α being 1."
    )
    return drawing


def _early_rate(run: Checkpoint) -> float:
    early = (run.history["step"] <= 100) & np.isfinite(run.history["alpha_e"])
    return float(np.median(run.history["alpha_e"][early])) if early.any() else float("nan")


def _fig2b(work: Work) -> Drawing:
    drawing, errors = _figure2(work, "fig2b")
    means = {a: float(np.mean(errors[a])) for a in ALGORITHMS}
    drawing.conclusion = (
        f"Mean test error: SSGD {means['ssgd']:.2f}%, DPSGD {means['dpsgd']:.2f}%, SSGD* "
        f"{means['ssgd-noise']:.2f}%; the paper has 2.6, 2.3 and 3.9%."
    )
    return drawing


def _judge_2a(rows: Rows) -> list[Effect]:
    error = {a: by_seed(rows, "test_error_percent", algorithm=NAMED[a]) for a in ALGORITHMS}
    return [
        Effect("SSGD", "test error (%)", tuple(error["ssgd"].values()), (POOR, np.inf), ratio=True),
        Effect("SSGD / DPSGD", "test error", ratio(error["ssgd"], error["dpsgd"]), ABOVE, ratio=True),
        Effect("SSGD* / DPSGD", "test error", ratio(error["ssgd-noise"], error["dpsgd"]), ABOVE, ratio=True),
        measured(
            "DPSGD",
            "α_e in the first 100 steps, α being 1",
            lambda: by_seed(rows, "alpha_e_first_100", algorithm="DPSGD").values(),
            (-np.inf, 1.0),
        ),
    ]


def _rises(rows: Rows) -> tuple[float, ...]:
    rise = {a: by_seed(rows, "median_rise_nat", algorithm=NAMED[a]) for a in ("ssgd", "dpsgd")}
    return ratio(rise["ssgd"], rise["dpsgd"])


def _judge_2b(rows: Rows) -> list[Effect]:
    error = {a: by_seed(rows, "test_error_percent", algorithm=NAMED[a]) for a in ALGORITHMS}
    return [
        Effect("SSGD less DPSGD", "test error (points)", difference(error["ssgd"], error["dpsgd"])),
        Effect("SSGD* less SSGD", "test error (points)", difference(error["ssgd-noise"], error["ssgd"])),
        measured("around SSGD / DPSGD", "median rise of the loss", lambda: _rises(rows), ABOVE, ratio=True),
    ]


figure(
    "fig2a",
    "DPSGD-2020, Figure 2(a)",
    "MNIST, α = 1, n = 5, nB = 2000",
    "At a large rate SSGD fails to converge; DPSGD's effective rate is low at first and lets it converge; "
    "SSGD* converges to something worse.",
    runs_of("fig2a"),
    _judge_2a,
    smoke=SMOKE_NOTE,
    laptop=MNIST_NOTE,
    paper=MNIST_NOTE,
    weights=True,
)(_fig2a)
figure(
    "fig2b",
    "DPSGD-2020, Figure 2(b)",
    "MNIST, α = 0.2, n = 6, ring(2), nB = 1998",
    "At a smaller rate DPSGD finds a flatter minimum with a lower test error than SSGD; SSGD* is the worst.",
    runs_of("fig2b"),
    _judge_2b,
    smoke=SMOKE_NOTE,
    laptop=MNIST_NOTE,
    paper=MNIST_NOTE,
    weights=True,
)(_fig2b)

"""DPSGD-2020's Figure 2, and how its flatness depends on what is measured: MNIST, at the paper's own size."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape import plots
from landscape.analysis.grids import contour
from landscape.analysis.planes import learners_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Point
from landscape.paper.figure import (
    Compared,
    Drawing,
    compare_with_paper,
    figure,
    last,
    mean_and_spread,
    summary,
    test_error,
)
from landscape.paper.scales import MNIST_NOTE, mnist_runs
from landscape.paper.verdicts import (
    NOT_KEPT,
    Effect,
    Rows,
    by_seed,
    difference_effect,
    pair,
    ratio,
    ratio_effect,
    settings,
)
from landscape.plots.picture import panels
from landscape.plots.style import decimal_labels
from landscape.results.grids import Surface

NAMED = {"ssgd": "SSGD", "ssgd-noise": "SSGD*", "dpsgd": "DPSGD"}
# Test errors in % that the paper prints.
PAPER = {
    "fig2a": {"SSGD": "does not converge", "SSGD*": "5.7", "DPSGD": "2.1"},
    "fig2b": {"SSGD": "2.6", "SSGD*": "3.9", "DPSGD": "2.3"},
}
# Where a loss or an error counts as not having converged (ours): far above what every other run reaches.
POOR = 5.0
FORM, ERROR, RISE = "{algorithm}", "test_error_percent", "median_rise_nat"
_NOTES: dict[str, Any] = {"laptop": MNIST_NOTE, "weights": True}


def runs_of_part(part: str, algorithms: tuple[str, ...] = tuple(NAMED), many: int = 5) -> Any:
    """What gives the runs of Figure 2's ``part``, with ``many`` seeds, at a scale."""
    return mnist_runs(FORM, {"algorithm": algorithms}, many, f"{part}-{FORM}")


def median_rise(surface: Surface) -> float:
    """The median rise of the loss over a surface above its centre (nat)."""
    return float(np.nanmedian(surface.loss) - surface.loss[len(surface.y) // 2, len(surface.x) // 2])


def _early_rate(run: Checkpoint) -> float:
    early = (run.history["step"] <= 100) & np.isfinite(run.history["alpha_e"])
    return float(np.median(run.history["alpha_e"][early])) if early.any() else float("nan")


def _figure2(context: Context, part: str, text: Any) -> tuple[Drawing, Any]:
    """The drawing without its conclusion, and the test errors grouped by algorithm."""
    grid, first = context.pick(7, 50, 50), list[Surface]()

    def measure(key: str, run: Checkpoint) -> dict[str, Any]:
        label = f"{NAMED[key.partition('/')[0]]}, seed {run.seed}"
        surface = context.contour(context.last(key), label, grid=grid)
        if run.seed == 0:
            first.append(surface)
        return {
            "step": run.step,
            ERROR: test_error(run),
            "train_loss_nat": last(run, "train_loss"),
            RISE: median_rise(surface),
            "alpha_e_first_100": _early_rate(run),
            "alpha_e_last": last(run, "alpha_e"),
            "consensus_distance": last(run, "consensus"),
            "diverged": run.diverged,
        }

    rows = context.table(FORM, {"algorithm": NAMED}, measure).replace({"algorithm": NAMED})
    compared = [
        Compared(f"test error of {name} (%)", text(group[ERROR]), PAPER[part][name])
        for name, group in rows.groupby("algorithm", sort=False)
    ]
    compared += [
        Compared(
            f"test loss over the plane, {s.label}", f"{np.nanmin(s.loss):.3g} to {np.nanmax(s.loss):.3g}"
        )
        for s in first
    ]
    ends = [run for a in NAMED for run in context.group(a)]
    pictures = {"": plots.draw(ends), "-contour": plots.draw(first)}
    return Drawing(pictures, rows, compared, ""), rows.groupby("algorithm")[ERROR]


def _fig2a(context: Context) -> Drawing:
    drawing, errors = _figure2(context, "fig2a", summary)
    middle, dpsgd = errors.median(), drawing.rows[drawing.rows["algorithm"] == "DPSGD"]
    early = dpsgd["alpha_e_first_100"]
    drawing.compared += [
        Compared("α_e of DPSGD, median of the first 100 steps", summary(early)),
        Compared("α_e of DPSGD at the end", summary(dpsgd["alpha_e_last"])),
    ]
    drawing.conclusion = (
        f"Median test error: DPSGD {middle['DPSGD']:.2f}%, SSGD* {middle['SSGD*']:.2f}%, SSGD "
        f"{middle['SSGD']:.2f}%, which swings to the end; DPSGD's effective learning rate is "
        f"{np.median(early):.2f} in the first 100 steps, α being 1."
    )
    return drawing


def _fig2b(context: Context) -> Drawing:
    drawing, errors = _figure2(context, "fig2b", mean_and_spread)
    means = errors.mean()
    drawing.conclusion = (
        f"Mean test error: SSGD {means['SSGD']:.2f}%, DPSGD {means['DPSGD']:.2f}%, SSGD* "
        f"{means['SSGD*']:.2f}%; the paper has 2.6, 2.3 and 3.9%."
    )
    return drawing


def _judge_2a(rows: Rows) -> list[Effect]:
    ssgd, noise, dpsgd = pair(rows, ERROR, algorithm=tuple(NAMED.values()))
    early = "alpha_e_first_100"  # older files lack it
    rates = by_seed(rows, early, algorithm="DPSGD") if early in rows else {}
    why, below = "" if early in rows else NOT_KEPT.format(early), (-np.inf, 1.0)
    return [
        Effect("SSGD", "test error (%)", tuple(ssgd.values()), (POOR, np.inf), ratio=True),
        ratio_effect("SSGD / DPSGD", "test error", (ssgd, dpsgd)),
        ratio_effect("SSGD* / DPSGD", "test error", (noise, dpsgd)),
        Effect("DPSGD", "α_e in the first 100 steps, α being 1", tuple(rates.values()), below, untested=why),
    ]


def _rises(rows: Rows, **where: str) -> tuple[float, ...]:
    """The rise around SSGD over that around DPSGD, by seed."""
    return ratio(*pair(rows, RISE, algorithm=("SSGD", "DPSGD"), **where))


def _judge_2b(rows: Rows) -> list[Effect]:
    ssgd, noise, dpsgd = pair(rows, ERROR, algorithm=tuple(NAMED.values()))
    return [
        difference_effect("SSGD less DPSGD", "test error (points)", (ssgd, dpsgd)),
        difference_effect("SSGD* less SSGD", "test error (points)", (noise, ssgd)),
        ratio_effect(
            "around SSGD / DPSGD", "median rise of the loss", pair(rows, RISE, algorithm=("SSGD", "DPSGD"))
        ),
    ]


figure(
    "fig2a", "DPSGD-2020, Figure 2(a)", "MNIST, α = 1, n = 5, nB = 2000",
    "At a large rate SSGD fails to converge; DPSGD's effective rate is low at first and lets it converge; "
    "SSGD* converges to something worse.",
    runs_of_part("fig2a"), _judge_2a, **_NOTES,
)(_fig2a)  # fmt: skip
figure(
    "fig2b", "DPSGD-2020, Figure 2(b)", "MNIST, α = 0.2, n = 6, ring(2), nB = 1998",
    "At a smaller rate DPSGD finds a flatter minimum with a lower test error than SSGD; SSGD* is the worst.",
    runs_of_part("fig2b"), _judge_2b, **_NOTES,
)(_fig2b)  # fmt: skip

# ---- Figure 2(b) by other measures of flatness


def _flatness(context: Context) -> Drawing:
    """How far the loss rises at distance along random directions, as they are and filter-normalised, and from
    checkpoints of equal training loss."""
    grid = context.pick(5, 21, 25)
    measures = {"as drawn (paper)": ("none", 0.1), "filter-normalised": ("filter", 0.5)}

    def rise(point: Point, norm: str, span: float) -> float:
        return median_rise(context.contour(point, grid=grid, norm=norm, span=span))

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        points = {"end": context.last(key), "equal loss": _of_equal_loss(context, key, run)}
        return [
            {"point": when, "directions": label, "step": point.step, RISE: rise(point, *how)}
            for when, point in points.items()
            for label, how in measures.items()
        ]

    rows = context.table(FORM, {"algorithm": ("ssgd", "dpsgd")}, measure).replace({"algorithm": NAMED})
    effects = _judge_flatness(rows)
    medians = [float(np.median(effect.values)) for effect in effects]
    picture, (ax,) = panels(1, 1, 7.6, 3.6)
    for k, effect in enumerate(effects):
        ax.plot(effect.values, np.full(len(effect.values), k), "o", color=f"C{k}", ms=6, mfc="none")
        ax.plot(medians[k], k, "|", color="k", ms=18, mew=2)
    ax.axvline(1, color="#777777", lw=0.9, ls=":")
    ax.set_yticks(range(len(effects)), [effect.where for effect in effects])
    label = "rise of the loss around SSGD / around DPSGD, a ring a seed, a bar the median"
    ax.set(ylim=(len(effects) - 0.5, -0.5), xscale="log", xlabel=label)
    decimal_labels(ax.xaxis)
    return Drawing(
        {"": picture},
        rows,
        [Compared(f"rise around SSGD / DPSGD: {e.where}", summary(e.values)) for e in effects],
        f"The loss rises {medians[0]:.2f} times as much around SSGD's solution as around DPSGD's. That is as "
        "the paper draws it, a median over the plane; with filter-normalised directions it is "
        f"{medians[1]:.2f} times, at checkpoints of about equal training loss {medians[2]:.2f} and "
        f"{medians[3]:.2f} times.",
    )


def _of_equal_loss(context: Context, key: str, run: Checkpoint) -> Point:
    """Of the run's checkpoints, that whose training loss is nearest to the larger of both final losses."""
    other = context.end(f"{'dpsgd' if key.startswith('ssgd') else 'ssgd'}/{run.seed}")
    target = max(last(run, "train_loss"), last(other, "train_loss"))
    return min(context.points(key), key=lambda point: abs(np.log(last(point, "train_loss") / target)))


def _judge_flatness(rows: Rows) -> list[Effect]:
    """By directions and point, those at the end first."""
    what, claimed = "rise of the loss around SSGD / DPSGD", (1.0, np.inf)
    return [
        Effect(f"{label}, {when}", what, _rises(rows, directions=label, point=when), claimed, ratio=True)
        for label, when in sorted(settings(rows, "directions", "point"), key=lambda both: both[1] != "end")
    ]


figure(
    "flatness", "Further analyses", "does DPSGD's flatness survive other measures? (Figure 2(b))",
    "The flatter contours of DPSGD stay flatter with filter-normalised directions and at equal training "
    "loss.",
    runs_of_part("fig2b", ("ssgd", "dpsgd")), _judge_flatness, **_NOTES,
)(_flatness)  # fmt: skip

# ---- Where the learners of Figure 2(a) are

_WHEN = ("early", "in the middle", "at the end")
_LOSSES = ("learners_loss_median_nat", "loss_at_mean_nat")


def _planes(context: Context) -> Drawing:
    """The loss in the plane nearest to DPSGD's learners, early, in the middle and at the end."""
    surfaces: list[Surface] = []

    def row(when: str, point: Point) -> dict[str, Any]:
        surfaces.append(surface := _learners_surface(context, point))
        return {
            "when": when,
            "step": point.step,
            "loss_at_mean_nat": float(surface.marker_loss[-1]),  # after the learners, the mean
            "learners_loss_median_nat": float(np.median(surface.marker_loss[:-1])),
            "consensus_distance": last(point, "consensus"),
            "explained_percent": float(100 * sum(surface.explained)),
        }

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        points = context.points(key)
        return list(map(row, _WHEN, (points[0], points[len(points) // 2], points[-1])))

    rows = context.table("dpsgd", {}, measure)
    rows["of_mean"] = rows[_LOSSES[0]] / rows[_LOSSES[1]]
    return Drawing(
        {"": plots.draw(surfaces[: len(_WHEN)])},
        rows.drop(columns="of_mean"),
        compare_with_paper(rows, "loss of a learner / loss of the mean, {when}", "of_mean", form=".3g"),
        f"The mean has a lower loss than the median learner at {(rows['of_mean'] > 1).sum()} of {len(rows)} "
        "checkpoints; the picture is of the first seed.",
    )


def _learners_surface(context: Context, point: Point) -> Surface:
    grid = context.pick(7, 41, 51)

    def make() -> Surface:
        here = point.load()
        problem = context.problem(here, "train")
        plane = learners_plane(problem, here.weights)
        return contour(problem, plane, grid=(grid, grid), split="train", label=f"step {point.step:,}")

    by = (contour, learners_plane)
    return context.cached(Surface, point, {"plane": "learners", "grid": grid}, make, by)[0]


def _judge_planes(rows: Rows) -> list[Effect]:
    what = "loss of the median learner / of the mean"
    return [ratio_effect(w, what, [by_seed(rows, name, when=w) for name in _LOSSES]) for w in _WHEN]


figure(
    "learners-plane", "Further analyses", "the loss in the plane of DPSGD's learners, Figure 2(a)",
    "The learners lie around their mean on the walls of the valley that the mean sits in.",
    runs_of_part("fig2a", ("dpsgd",)), _judge_planes, **_NOTES,
)(_planes)  # fmt: skip

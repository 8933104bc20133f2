"""DPSGD-2020's Figures 2, 3 and 4, contours and Hessian ratios around networks, and what follows from 2.

Figure 2 is MNIST at the paper's own size, 3 and 4 are CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from landscape import plots
from landscape.analysis.grids import contour
from landscape.analysis.planes import learners_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.compared import Compared, compare_with_paper, mean_and_spread, printed, summary
from landscape.paper.context import Context, Ended, Point
from landscape.paper.figure import Drawing, figure, last, test_error
from landscape.paper.figures.large_batch import score
from landscape.paper.verdicts import Effect, Rows, by_seed, distinct, effect_of, paired_effect, select
from landscape.plots.picture import caption, panels
from landscape.plots.style import OTHER, decimal_labels
from landscape.results.surfaces import Surface

# Where an error in % counts as not having converged (our choice: far above what every other run reaches).
POOR = 5.0
ERROR, RISE, EARLY = "test_error_percent", "median_rise_nat", "alpha_e_first_100"


def median_rise(surface: Surface) -> float:
    """Return the median rise of the loss over a surface above its center (nat)."""
    return float(np.nanmedian(surface.loss) - surface.loss[len(surface.y) // 2, len(surface.x) // 2])


def _add_to_caption(picture: Any, text: str) -> None:
    """Add a sentence to the caption of ``picture``, where it has room."""
    caption(picture, f"{picture.get_caption()} {text}")


# ---- Figure 2


def _early_rate(run: Checkpoint) -> float:
    early = (run.history["step"] <= 100) & np.isfinite(run.history["alpha_e"])
    return float(np.median(run.history["alpha_e"][early])) if early.any() else float("nan")


def _figure_2(context: Context, name: str, text: Callable[..., str], log: bool | None = None) -> Drawing:
    """Draw the training curves of all runs, and the contours of the runs of seed 0.

    Args:
        name: the figure's name in numbers/figures.csv, which has the paper's test errors.
        text: :func:`.summary` or :func:`.mean_and_spread`: a function that formats the seeds' test errors.
        log: whether the contours' levels are logarithmic; None as in :func:`landscape.draw`.
    """
    surfaces_of_seed_0 = list[Surface]()

    def measure(run: Ended) -> dict[str, Any]:
        # run.end has the history. run.last has the weights of the last step.
        label, end = "{algorithm}, seed {seed}".format(**run.values), run.end
        surface = context.contour(run.last, label)
        if end.seed == 0:
            surfaces_of_seed_0.append(surface)
        return {
            "step": end.step,
            ERROR: test_error(end),
            "train_loss_nat": last(end, "train_loss"),
            RISE: median_rise(surface),
            EARLY: _early_rate(end),
            "alpha_e_last": last(end, "alpha_e"),
            "consensus_distance": last(end, "consensus"),
            "diverged": end.diverged,
        }

    rows = context.table(measure)
    paper_errors = select(printed("figures"), figure=name).set_index("algorithm")["value"]
    with_paper = rows.assign(paper=rows["algorithm"].map(paper_errors))
    # {algorithm} and {paper} are columns of ``with_paper``.
    compared = compare_with_paper(with_paper, "test error of {algorithm} (%)", ERROR, text, paper="{paper}")
    for surface in surfaces_of_seed_0:
        lowest, highest = np.nanmin(surface.loss), np.nanmax(surface.loss)
        what = f"test loss over the plane, {surface.label}"
        compared.append(Compared(what, f"{lowest:.3g} to {highest:.3g}"))
    curves: Any = plots.draw([run.end for run in context.ended()])
    contours = plots.draw(surfaces_of_seed_0, log=log)
    # The caption of the curves begins with the data and the learners. They are in the figure's title. Only
    # the rest of the caption is kept, from the seeds on.
    _, _, from_seeds = curves.get_caption().partition(", seed")
    caption(curves, f"Seed{from_seeds}")
    rises = ", ".join(f"{s.label.removesuffix(', seed 0')} {median_rise(s):.2g}" for s in surfaces_of_seed_0)
    _add_to_caption(contours, f"Median rise over the plane (nat): {rises}.")
    return Drawing({"": curves, "-contour": contours}, rows, compared)


def _judge_2a(rows: Rows) -> list[Effect]:
    ssgd, noise, dpsgd = (by_seed(rows, ERROR, algorithm=a) for a in ("SSGD", "SSGD*", "DPSGD"))
    rates, below = by_seed(rows, EARLY, algorithm="DPSGD"), (-np.inf, 1.0)
    return [
        Effect("SSGD", "test error (%)", tuple(ssgd), (POOR, np.inf), ratio=True),
        effect_of("SSGD / DPSGD", "test error", ssgd, dpsgd, times=True),
        effect_of("SSGD* / DPSGD", "test error", noise, dpsgd, times=True),
        Effect("DPSGD", "α_e in the first 100 steps, α being 1", tuple(rates), below),
    ]


def _judge_2b(rows: Rows) -> list[Effect]:
    what, rise = "test error (points)", "median rise of the loss around w_a"
    return [
        paired_effect("SSGD − DPSGD", what, rows, ERROR, algorithm=("SSGD", "DPSGD")),
        paired_effect("SSGD* − SSGD", what, rows, ERROR, algorithm=("SSGD*", "SSGD")),
        paired_effect("SSGD / DPSGD", rise, rows, RISE, algorithm=("SSGD", "DPSGD"), times=True),
    ]


@figure("fig2a", _judge_2a)
def _fig2a(context: Context) -> Drawing:
    # SSGD's loss is ten times DPSGD's, which would have one color.
    drawing = _figure_2(context, "fig2a", summary, log=True)
    dpsgd = select(drawing.rows, algorithm="DPSGD")
    drawing.compared += [
        Compared("α_e of DPSGD, median of the first 100 steps", summary(dpsgd[EARLY])),
        Compared("α_e of DPSGD at the end", summary(dpsgd["alpha_e_last"])),
    ]
    return drawing


@figure("fig2b", _judge_2b)
def _fig2b(context: Context) -> Drawing:
    return _figure_2(context, "fig2b", mean_and_spread)


# ---- Figure 2(b) by other measures of flatness

_MEASURES: dict[str, dict[str, Any]] = {
    "as drawn (paper)": {"norm": "none", "span": 0.1},
    "filter-normalized": {"norm": "filter", "span": 0.5},
}


def _judge_flatness(rows: Rows) -> list[Effect]:
    """Judge the two rises by directions and point, those at the end first."""
    what, pair = "rise of the loss around w_a, SSGD / DPSGD", ("SSGD", "DPSGD")
    every = sorted(distinct(rows, "directions", "point"), key=lambda setting: setting[1] != "end")
    return [
        paired_effect(f"{how}, {at}", what, rows, RISE, directions=how, point=at, algorithm=pair, times=True)
        for how, at in every
    ]


@figure("flatness", _judge_flatness)
def _flatness(context: Context) -> Drawing:
    """Draw how much more the loss rises around SSGD's weights than around DPSGD's, as a ratio.

    The rise is measured in four ways: in two kinds of random directions, around two sets of weights. The
    directions are as drawn or filter-normalized. The first set of weights is the end of the run. The second
    set, "equal loss", is the checkpoint of the run whose training loss is nearest to a target. The target is
    the higher of the final losses of SSGD and DPSGD with the run's seed.
    """
    final_loss = {(run.values["_rule"], run.end.seed): last(run.end, "train_loss") for run in context.ended()}

    def measure(run: Ended) -> Iterator[dict[str, Any]]:
        target_loss = max(final_loss[rule, run.end.seed] for rule in ("ssgd", "dpsgd"))

        def distance(point: Point) -> float:
            return abs(float(np.log(last(point, "train_loss") / target_loss)))

        points = {"end": run.last, "equal loss": min(run.points, key=distance)}
        for when, point in points.items():
            for label, options in _MEASURES.items():
                rise = median_rise(context.contour(point, **options))
                yield {"point": when, "directions": label, "step": point.step, RISE: rise}

    rows = context.table(measure)
    effects = _judge_flatness(rows)
    picture, (ax,) = panels(1, 1, 7.6, 3.6)
    for row, effect in enumerate(effects):
        ax.plot(effect.values, np.full(len(effect.values), row), "o", color=OTHER, ms=6, mfc="none")
        ax.plot(np.median(effect.values), row, "|", color="k", ms=18, mew=2)
    ax.axvline(1, color=OTHER, lw=0.9, ls=":")
    names = [effect.where.replace("as drawn (paper)", "not normalized") for effect in effects]
    ax.set_yticks(range(len(effects)), names)
    ax.set(ylim=(len(effects) - 0.5, -0.5), xscale="log", xlabel="rise of the loss, SSGD / DPSGD")
    decimal_labels(ax.xaxis)
    compared = [Compared(f"rise around SSGD / DPSGD: {e.where}", summary(e.values)) for e in effects]
    return Drawing({"": picture}, rows, compared)


# ---- Where the learners of Figure 2(a) are

_WHEN = ("early", "in the middle", "at the end")
_LOSSES = ("learners_loss_median_nat", "loss_at_mean_nat")


def _judge_planes(rows: Rows) -> list[Effect]:
    what = "loss of the median learner / of the mean"
    return [effect_of(w, what, *(by_seed(rows, n, when=w) for n in _LOSSES), times=True) for w in _WHEN]


@figure("learners-plane", _judge_planes)
def _planes(context: Context) -> Drawing:
    """Draw the loss in the plane nearest to DPSGD's learners, early and in the middle of training.

    The table also has the end of training. The picture leaves it out, because the learners are then so near
    to one another that their loss has only one color in the scale of the other panels.
    """
    surfaces = list[Surface]()  # of each run, in the order of _WHEN

    def measure(run: Ended) -> list[dict[str, Any]]:
        points = (run.points[0], run.points[len(run.points) // 2], run.points[-1])
        surfaces_of_run = [_learners_surface(context, point) for point in points]
        surfaces.extend(surfaces_of_run)
        return [
            {
                "when": when,
                "step": point.step,
                "loss_at_mean_nat": float(surface.marker_loss[-1]),  # the last marker is the mean
                "learners_loss_median_nat": float(np.median(surface.marker_loss[:-1])),
                "consensus_distance": last(point, "consensus"),
                "explained_percent": float(100 * sum(surface.explained)),
            }
            for when, point, surface in zip(_WHEN, points, surfaces_of_run, strict=True)
        ]

    rows = context.table(measure)
    learners_loss, loss_at_mean = (rows[column] for column in _LOSSES)
    with_ratio = rows.assign(loss_ratio=learners_loss / loss_at_mean)
    what = "loss of a learner / loss of the mean, {when}"
    pair = surfaces[:2]  # of the first run, early and in the middle
    picture = plots.draw([replace(s, label=f"DPSGD, {s.label}") for s in pair])
    losses = [f"{np.median(s.marker_loss[:-1]):.2g} (mean: {s.marker_loss[-1]:.2g})" for s in pair]
    _add_to_caption(picture, f"Median loss of the learners themselves: {', then '.join(losses)} nat.")
    compared = compare_with_paper(with_ratio, what, "loss_ratio", form=".3g")
    remark = "The picture is of the first seed, early and in the middle."
    return Drawing({"": picture}, rows, compared, remark)


def _learners_surface(context: Context, point: Point) -> Surface:
    grid = context.sizes["grid"]

    def make() -> Surface:
        checkpoint = point.load()
        problem = context.problem(checkpoint, "train")
        plane = learners_plane(problem, checkpoint.weights)
        return contour(problem, plane, grid=(grid, grid), split="train", label=f"step {point.step:,}")

    by = (contour, learners_plane)
    return context.cached(Surface, point, {"plane": "learners", "grid": grid}, make, by)[0]


# ---- Figures 3 and 4

# Test accuracy in % up to which a network counts as not trained (our choice); of ten classes chance is 10.
# The share of a grid's points that must have converged for a run to count (our choice).
CHANCE, _CONVERGED = 15.0, 0.5
_RUN_COLUMNS = ["model", "algorithm", "seed"]


def _effects(rows: Rows, what: str, value: str, count: str = "") -> list[Effect]:
    """Return SSGD's median over a grid against that of each form of DPSGD, by network, of runs that trained.

    ``count``: a column that says which points count; a run counts if half of its points do.
    """
    trained = rows[rows["test_accuracy_percent"].astype(float) >= CHANCE]
    good = trained[trained[count].astype(str) == "True"] if count else trained
    groups, every = good.groupby(_RUN_COLUMNS, sort=False)[value], trained.groupby(_RUN_COLUMNS, sort=False)
    table = groups.agg(median=lambda v: float(np.median(v.astype(float))), points="size")
    table = table[table["points"] >= _CONVERGED * every.size().reindex(table.index)].reset_index()
    return [
        paired_effect(f"{m}, SSGD / {a}", what, table, "median", model=m, algorithm=("SSGD", a), times=True)
        for m, a in distinct(rows, "model", "algorithm")
        if a != "SSGD"
    ]


def _grids(
    context: Context, make: Callable[[Ended, str], Any], columns: Callable[[Any], dict[str, Any]], value: str,
    what: str, valid: str = "",
) -> Drawing:  # fmt: skip
    """Draw the grids of the runs of seed 0, and make a table of all points of the grids of all runs.

    For each run, the median of the column ``value`` over the points that count is taken. For each network and
    algorithm, ``Drawing.compared`` has the :func:`.summary` of the medians of the runs.

    Args:
        make: a function that takes a run and a label, and returns the grid of the run.
        columns: a function that takes a grid, and returns the columns of its points by name, each an array
            (ny, nx).
        value: the name of one of these columns.
        what: the words beside this summary, as for :func:`.compare_with_paper`.
        valid: the name of the column that says which points count (bool). Default: all points count.
    """
    grids_of_seed_0 = list[Any]()

    def measure(run: Ended) -> Rows:
        grid = make(run, "{model}, {algorithm}".format(**run.values))
        if run.values["seed"] == 0:
            grids_of_seed_0.append(grid)
        x, y = np.tile(grid.x, len(grid.y)), np.repeat(grid.y, len(grid.x))
        table = pd.DataFrame({"x": x, "y": y, **{name: np.ravel(a) for name, a in columns(grid).items()}})
        table.insert(0, "test_accuracy_percent", score(run.end, "test_accuracy"))
        return table

    rows = context.table(measure).drop(columns="network")  # "model" has the same names
    rows.insert(0, "model", rows.pop("model"))  # the first column
    # A median leaves out NaN, which stands for the points that do not count.
    counted_rows = rows.assign(**{value: rows[value].where(rows[valid])}) if valid else rows
    medians = counted_rows.groupby(_RUN_COLUMNS, sort=False)[value].median().reset_index()
    picture = plots.draw(grids_of_seed_0)
    texts = [f"{median:.2g}" for median in select(medians, seed=0)[value]]
    _add_to_caption(picture, f"Seed 0; medians over the points: {', '.join(texts)}.")
    remarks = []
    # The verdict is without the runs at chance (``_effects``). The medians above are of all runs.
    untrained = distinct(rows[rows["test_accuracy_percent"] < CHANCE], "model", "algorithm")
    if untrained:
        names = ", ".join(f"{model} with {algorithm}" for model, algorithm in untrained)
        remarks.append(f"Runs that stayed at chance do not count in the verdict: {names}.")
    if valid and not rows[valid].all():
        left_out = rows[~rows[valid]].groupby(["model", "algorithm"], sort=False).size()
        texts = [f"{points} of {model} with {algorithm}" for (model, algorithm), points in left_out.items()]
        remarks.append(f"Points that did not converge do not count: {', '.join(texts)}.")
    compared = compare_with_paper(medians, what, value, form=".3g")
    return Drawing({"": picture}, rows, compared, " ".join(remarks))


def _judge_3(rows: Rows) -> list[Effect]:
    return _effects(rows, "median rise of the loss around w_a", "rise_nat")


@figure("fig3", _judge_3)
def _fig3(context: Context) -> Drawing:
    return _grids(
        context,
        lambda run, label: context.contour(run.last, label),
        lambda s: {"test_loss_nat": s.loss, "rise_nat": s.loss - s.loss[len(s.y) // 2, len(s.x) // 2]},
        "rise_nat",
        "median rise of the test loss, {model}, {algorithm}",
    )


def _judge_4(rows: Rows) -> list[Effect]:
    """Judge the ratios at the points where both eigenvalues converged."""
    return _effects(rows, "median |λ_min|/|λ_max|", "ratio", "converged")


@figure("fig4", _judge_4)
def _fig4(context: Context) -> Drawing:
    def make(run: Ended, label: str) -> Any:
        early = run.points[0]
        return replace(context.hessian_grid(early, f"{label}, epoch {early.epoch:.3g}"), label=label)

    what = "median |λ_min|/|λ_max| where both converged, {model}, {algorithm}"
    return _grids(
        context, make, lambda g: {"ratio": g.ratio, "converged": g.converged}, "ratio", what, "converged"
    )

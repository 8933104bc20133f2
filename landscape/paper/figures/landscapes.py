"""DPSGD-2020's Figures 3 and 4: contours and Hessian ratios around CIFAR-10's networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from landscape import plots
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Axes, Context, Runs, Scale, runs_of
from landscape.paper.figure import Drawing, compare_with_paper, figure
from landscape.paper.figures.training_curves import NAMED, ORDERS, accuracy, networks, tuned
from landscape.paper.scales import CIFAR_NOTE, PAPER_CIFAR
from landscape.paper.scales import cell as scaled
from landscape.paper.verdicts import Effect, Rows, pair, ratio_effect, settings
from landscape.training.recipes.recipe import Recipe

# Test accuracy in % up to which a network counts as not trained (ours); of ten classes chance is 10.
CHANCE = 15.0
# Of a grid's points that must have converged for a run to count (ours).
_CONVERGED = 0.5


# The rate on a laptop: that of Table 5 at which all of these train (ours, by trial).
_RATES: dict[Scale, float] = {"smoke": 0.8, "laptop": 0.2, "paper": 0.8}
_RULES = {"SSGD": "ssgd", **dict.fromkeys(ORDERS, "dpsgd")}
_KEYS = {name: key for key, name in NAMED.items()}
FORM = "{model}, {algorithm}"


def _axes(scale: Scale) -> Axes:
    """The networks of Figures 3 and 4, of which VGG-19 takes no images of laptop scale's size."""
    chosen = networks(scale) if scale == "laptop" else ("vgg-19", "resnet-18", "densenet-121")
    return {"model": [NAMED[model] for model in chosen], "algorithm": _RULES}


def _runs(scale: Scale) -> Runs:
    def make(model: str, algorithm: str, seed: int) -> Recipe:
        name = tuned(_KEYS[model], _RULES[algorithm], _RATES[scale])
        return scaled(scale, name + ORDERS.get(algorithm, ""), seed)

    return runs_of(FORM, _axes(scale), range(1 if scale == "smoke" else 3), make)


def _table(context: Context, grids: list[Any], make: Any, columns: Any) -> Rows:
    """The points of what ``make`` gives for each run, a row each; ``grids`` gets those of seed 0.

    ``make`` takes a run's key and a label, ``columns`` gives arrays (ny, nx) by name.
    """

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        grid = make(key, key.rpartition("/")[0])
        if run.seed == 0:
            grids.append(grid)
        points = {"x": np.tile(grid.x, len(grid.y)), "y": np.repeat(grid.y, len(grid.x)), **columns(grid)}
        table = pd.DataFrame({name: np.ravel(column) for name, column in points.items()})
        table.insert(0, "test_accuracy_percent", accuracy(run))
        return table.to_dict("records")  # type: ignore[no-any-return]

    rows = context.table(FORM, _axes(context.scale), measure)
    grids[:] = [grid for k in range(len(_RULES)) for grid in grids[k :: len(_RULES)]]  # a row for each rule
    return rows


def _medians(rows: Rows, value: str, count: str = "") -> Rows:
    """By network, algorithm and seed, the median of ``value`` over a grid, of runs that trained.

    ``count``: a column that says which points count; a run counts if half of its points do.
    """
    place = ["model", "algorithm", "seed"]
    trained = rows[rows["test_accuracy_percent"].astype(float) >= CHANCE]
    good = trained[trained[count].astype(str) == "True"] if count else trained
    groups, every = good.groupby(place, sort=False)[value], trained.groupby(place, sort=False)
    table = groups.agg(median=lambda v: float(np.median(v.astype(float))), points="size")
    return table[table["points"] >= _CONVERGED * every.size().reindex(table.index)].reset_index()


def _effects(rows: Rows, what: str, value: str, count: str = "") -> list[Effect]:
    """SSGD's over that of each form of DPSGD, by network; above 1 as claimed."""
    table = _medians(rows, value, count)
    return [
        ratio_effect(f"{model}, {name}", what, pair(table, "median", model=model, algorithm=("SSGD", name)))
        for model, name in settings(rows, "model", "algorithm")
        if name != "SSGD"
    ]


def _finding(rows: Rows, effects: list[Effect], words: str) -> str:
    """A sentence on the effects' means, which take the place of {}, and one on runs that did not train."""
    known = [f"{np.mean(e.values):.2f} times ({e.where})" for e in effects if e.values]
    said = f"{words.format(' and '.join(known))}." if known else "No network trained with both."
    stuck = settings(rows[rows["test_accuracy_percent"] < CHANCE], "model", "algorithm")
    names = ", ".join(f"{model} with {a}" for model, a in stuck)
    return said + (f" At chance stayed runs of {names}, which do not count." if stuck else "")


def _drawing(context: Context, make: Any, columns: Any, value: str, what: str, count: str = "") -> Drawing:
    """The grids and, of each run, the median ``value`` over its points, or over those that ``count``.

    ``make`` and ``columns`` as of :func:`_table`; the conclusion is left to the caller.
    """
    first: list[Any] = []
    rows = _table(context, first, make, columns)
    good = rows.assign(**{value: rows[value].where(rows[count])}) if count else rows
    by_run = good.groupby(["model", "algorithm", "seed"], sort=False)[value].median().reset_index()
    return Drawing({"": plots.draw(first)}, rows, compare_with_paper(by_run, what, value, form=".3g"), "")


def _fig3(context: Context) -> Drawing:
    sizes = {"grid": context.pick(3, 25, 50), "samples": context.pick(32, 1000, 0)}
    drawing = _drawing(
        context,
        lambda key, label: context.contour(context.last(key), label=label, **sizes),
        lambda s: {"test_loss_nat": s.loss, "rise_nat": s.loss - s.loss[len(s.y) // 2, len(s.x) // 2]},
        "rise_nat",
        "median rise of the test loss, {model}, {algorithm}",
    )
    words = "The loss rises {} as much around SSGD's solutions as around DPSGD's"
    drawing.conclusion = _finding(drawing.rows, _judge_3(drawing.rows), words)
    return drawing


def _judge_3(rows: Rows) -> list[Effect]:
    return _effects(rows, "median rise of the loss around SSGD / DPSGD", "rise_nat")


figure(
    "fig3", "DPSGD-2020, Figure 3", "contours of the test loss, CIFAR-10, batch 8192",
    "DPSGD's contours are wider apart: its minima are flatter.",
    _runs, _judge_3, laptop=f"lr 0.2, 25 × 25 points, 1,000 test images; {CIFAR_NOTE}", paper=PAPER_CIFAR,
    weights=True,
)(_fig3)  # fmt: skip


def _fig4(context: Context) -> Drawing:
    grid, samples, products = context.pick((2, 16, 4), (4, 128, 200), (4, 0, 1000))

    def make(key: str, label: str) -> Any:
        early = context.points(key)[0]
        label += f", epoch {early.epoch:.3g}"
        return context.hessian_grid(early, label=label, grid=grid, samples=samples, products=products)

    what = "median |λ_min|/|λ_max| where both converged, {model}, {algorithm}"
    drawing = _drawing(
        context, make, lambda g: {"ratio": g.ratio, "converged": g.converged}, "ratio", what, "converged"
    )
    rows = drawing.rows
    drawing.conclusion = _finding(rows, _judge_4(rows), "SSGD's median ratio is {} that of DPSGD")
    lost = rows[~rows["converged"]].groupby(["model", "algorithm"], sort=False).size()
    if len(lost):
        missed = ", ".join(f"{n} of {model} with {a}" for (model, a), n in lost.items())
        drawing.conclusion += f" Points that did not converge do not count: {missed}."
    return drawing


def _judge_4(rows: Rows) -> list[Effect]:
    """A point counts where both of its eigenvalues converged."""
    return _effects(rows, "median |λ_min|/|λ_max|, SSGD / DPSGD", "ratio", "converged")


figure(
    "fig4", "DPSGD-2020, Figure 4", "Hessian ratios early in training, CIFAR-10, batch 8192",
    "Early in training DPSGD is less likely than SSGD to be at a saddle: |λ_min|/|λ_max| is lower.",
    _runs, _judge_4,
    laptop=f"lr 0.2, after a quarter of training, 128 test images, up to 200 products a point; {CIFAR_NOTE}",
    paper=f"after epoch 16; {PAPER_CIFAR}", weights=True,
)(_fig4)  # fmt: skip

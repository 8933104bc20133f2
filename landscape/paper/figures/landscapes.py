"""DPSGD-2020's Figures 3 and 4: contours and Hessian ratios around CIFAR-10's networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from landscape import plots
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.context import Context, Runs, Scale
from landscape.paper.figure import Drawing, compare, figure
from landscape.paper.figures.training_curves import ALL, BOTH, NAMED, accuracy, cell
from landscape.paper.scales import PAPER_CIFAR, cells, cifar_note
from landscape.paper.verdicts import Effect, Rows, pair, ratio_effect, settings

# Test accuracy in % up to which a network counts as not trained (ours); of ten classes chance is 10.
CHANCE = 15.0
# Of a grid's points that must have converged for a run to count (ours).
_CONVERGED = 0.5
# On a laptop: VGG-19 has not left chance after the 12 epochs of the tables.
_EPOCHS = 36


def _shaped(scale: Scale) -> tuple[str, ...]:
    """The networks of Figures 3 and 4; DenseNet-121 takes as long as ten others."""
    return ("vgg-19", "resnet-18") if scale == "laptop" else ("vgg-19", "resnet-18", "densenet-121")


def _runs(scale: Scale) -> Runs:
    many = 1 if scale == "laptop" else 3
    return cells(scale, [cell(m, 8192, a) for m in _shaped(scale) for a in BOTH], many, epochs=_EPOCHS)


def _table(context: Context, grids: list[Any], make: Any, columns: Any) -> Rows:
    """The points of what ``make`` gives for each run, a row each; ``grids`` gets those of seed 0.

    ``make`` takes a run's key and a label, ``columns`` gives arrays (ny, nx) by name.
    """

    def measure(key: str, run: Checkpoint) -> list[dict[str, Any]]:
        grid = make(key, f"{NAMED[run.model['name']]}, {ALL[run.algorithm]}")
        if run.seed == 0:
            grids.append(grid)
        points = {"x": np.tile(grid.x, len(grid.y)), "y": np.repeat(grid.y, len(grid.x)), **columns(grid)}
        table = pd.DataFrame({name: np.ravel(column) for name, column in points.items()})
        table.insert(0, "test_accuracy_percent", accuracy(run))
        return table.to_dict("records")  # type: ignore[no-any-return]

    axes = {"model": _shaped(context.scale), "algorithm": BOTH}
    rows = context.table(cell("{model}", 8192, "{algorithm}"), axes, measure)
    grids[:] = grids[::2] + grids[1::2]
    return rows.replace({"model": NAMED, "algorithm": ALL})


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
    """SSGD's over DPSGD's, by network; above 1 as claimed."""
    table, both = _medians(rows, value, count), tuple(ALL[a] for a in BOTH)
    return [
        ratio_effect(model, what, pair(table, "median", model=model, algorithm=both))
        for model in settings(rows, "model")
    ]


def _finding(rows: Rows, effects: list[Effect], words: str) -> str:
    """A sentence on the effects' means, which take the place of {}, and one on runs that did not train."""
    known = [f"{np.mean(e.values):.2f} times ({e.where})" for e in effects if e.values]
    said = f"{words.format(' and '.join(known))}." if known else "No network trained with both algorithms."
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
    return Drawing({"": plots.draw(first)}, rows, compare(by_run, what, value, form=".3g"), "")


def _fig3(context: Context) -> Drawing:
    sizes = {"grid": context.pick(3, 25, 50), "samples": context.pick(32, 500, 0)}
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
    _runs, _judge_3, laptop=f"25 × 25 points, 500 test images; {cifar_note(_EPOCHS)}", paper=PAPER_CIFAR,
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
    laptop="after a quarter of training, on 128 test images, up to 200 products a point; "
    + cifar_note(_EPOCHS),
    paper=f"after epoch 16; {PAPER_CIFAR}", weights=True,
)(_fig4)  # fmt: skip

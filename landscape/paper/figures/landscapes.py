"""DPSGD-2020's Figures 3 and 4: contours and Hessian ratios around CIFAR-10's networks."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape import plots
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary
from landscape.paper.figures.figure_2 import median_rise
from landscape.paper.figures.training_curves import ALL, BOTH, NAMED, accuracy, cell
from landscape.paper.scales import PAPER_CIFAR, SMOKE_NOTE, STATION_CIFAR, cells, cifar_note
from landscape.paper.verdicts import Effect, Rows, column, ratio, select
from landscape.results.hessian_grid import HessianGrid
from landscape.results.surface import Surface

# Test accuracy in % up to which a network counts as not trained (ours); of ten classes chance is 10.
CHANCE = 15.0
# Of a grid's points that must have converged for a run to count (ours).
_CONVERGED = 0.5
# On a laptop: VGG-19 has not left chance after the 12 epochs of the tables.
_EPOCHS = 36


def _shaped(scale: Scale) -> tuple[str, ...]:
    """The networks of Figures 3 and 4; DenseNet-121 takes as long as ten others."""
    small = ("vgg-19", "resnet-18")
    return small if scale in ("laptop", "workstation") else (*small, "densenet-121")


def _shape_runs(scale: Scale) -> Runs:
    many = 1 if scale == "laptop" else 3
    return cells(scale, [cell(m, 8192, a) for m in _shaped(scale) for a in BOTH], many, epochs=_EPOCHS)


def _stuck(work: Work) -> str:
    """The runs that did not train, in words: around them is a plain, not a minimum."""
    found = [
        f"{NAMED[model]} with {ALL[a]}"
        for model in _shaped(work.scale)
        for a in BOTH
        if any(accuracy(run) < CHANCE for run in work.group(cell(model, 8192, a)))
    ]
    return f" At chance stayed runs of {', '.join(found)}, which do not count." if found else ""


def _by_seed(rows: Rows, value: str, count: str = "") -> dict[str, dict[str, dict[float, float]]]:
    """By network, algorithm and seed, the median of ``value`` over a grid, of runs that trained.

    ``count``: a column that says which points count; a run counts if half of its points do.
    """
    table: dict[str, dict[str, dict[float, float]]] = {}
    for name in ("model", "algorithm", "seed", "test_accuracy_percent", value):
        column(rows, name)
    for model, algorithm, seed in dict.fromkeys((r["model"], r["algorithm"], float(r["seed"])) for r in rows):
        points = select(rows, model=model, algorithm=algorithm, seed=seed)
        good = [float(r[value]) for r in points if not count or str(r[count]) == "True"]
        if float(points[0]["test_accuracy_percent"]) >= CHANCE and len(good) >= _CONVERGED * len(points):
            table.setdefault(model, {}).setdefault(algorithm, {})[seed] = float(np.median(good))
    return table


def _effects(rows: Rows, what: str, value: str, count: str = "") -> list[Effect]:
    """SSGD's over DPSGD's, by network; above 1 as claimed."""
    table = _by_seed(rows, value, count)
    effects = []
    for model in dict.fromkeys(column(rows, "model")):
        both = [table.get(model, {}).get(ALL[a], {}) for a in BOTH]
        effects.append(Effect(model, what, ratio(*both), (1.0, np.inf), ratio=True))
    return effects


def _finding(effects: list[Effect], words: str) -> str:
    """A sentence on the effects' means, which take the place of {} in ``words``."""
    known = [f"{np.mean(e.values):.2f} times ({e.where})" for e in effects if e.values]
    return f"{words.format(' and '.join(known))}." if known else "No network trained with both algorithms."


def _cell_of(model: str, algorithm: str, run: Checkpoint) -> dict[str, Any]:
    """The columns that say which run a row is about."""
    return {
        "model": NAMED[model],
        "algorithm": ALL[algorithm],
        "seed": run.seed,
        "test_accuracy_percent": accuracy(run),
    }


def _fig3(work: Work) -> Drawing:
    first: list[Surface] = []
    rows, compared = list[dict[str, Any]](), list[Compared]()
    for model in _shaped(work.scale):
        for a in BOTH:
            key, rises = cell(model, 8192, a), list[float]()
            for run in work.group(key):
                surface = work.contour(
                    work.last(f"{key}/{run.seed}"),
                    label=f"{NAMED[model]}, {ALL[a]}",
                    grid=work.pick(3, 25, 50),
                    samples=work.pick(32, 500, 0),
                )
                first += [surface] if run.seed == 0 else []
                center = surface.loss[len(surface.y) // 2, len(surface.x) // 2]
                rises.append(median_rise(surface))
                rows += [
                    {
                        **_cell_of(model, a, run),
                        "x": float(x),
                        "y": float(y),
                        "test_loss_nat": float(v),
                        "rise_nat": float(v - center),
                    }
                    for y, line in zip(surface.y, surface.loss, strict=True)
                    for x, v in zip(surface.x, line, strict=True)
                ]
            name = f"median rise of the test loss, {NAMED[model]}, {ALL[a]}"
            compared.append(Compared(name, summary(rises, ".3g")))
    return Drawing(
        {"": plots.draw(first[::2] + first[1::2])},
        rows,
        compared,
        _finding(_judge_3(rows), "The loss rises {} as much around SSGD's solutions as around DPSGD's")
        + _stuck(work),
    )


def _judge_3(rows: Rows) -> list[Effect]:
    return _effects(rows, "median rise of the loss around SSGD / DPSGD", "rise_nat")


_POINTS = "on 128 test images"
figure(
    "fig3",
    "DPSGD-2020, Figure 3",
    "contours of the test loss, CIFAR-10, batch 8192",
    "DPSGD's contours are wider apart: its minima are flatter.",
    _shape_runs,
    _judge_3,
    smoke=SMOKE_NOTE,
    laptop=f"25 × 25 points, 500 test images; {cifar_note(_EPOCHS)}",
    workstation=f"25 × 25 points, 500 test images; {STATION_CIFAR}",
    paper=PAPER_CIFAR,
    weights=True,
)(_fig3)


def _fig4(work: Work) -> Drawing:
    first: list[HessianGrid] = []
    rows, compared, missed = list[dict[str, Any]](), list[Compared](), list[str]()
    for model in _shaped(work.scale):
        for a in BOTH:
            key, medians, lost = cell(model, 8192, a), list[float](), 0
            for run in work.group(key):
                early = work.points(f"{key}/{run.seed}")[0]
                grid = work.hessian_grid(
                    early,
                    label=f"{NAMED[model]}, {ALL[a]}, epoch {early.epoch:.3g}",
                    grid=work.pick(2, 4, 4),
                    samples=work.pick(16, 128, 0),
                    products=work.pick(4, 200, 1000),
                )
                first += [grid] if run.seed == 0 else []
                medians += [float(np.median(grid.ratio[grid.converged]))] if grid.converged.any() else []
                lost += int((~grid.converged).sum())
                rows += [
                    {
                        **_cell_of(model, a, run),
                        "x": float(x),
                        "y": float(y),
                        "ratio": float(v),
                        "converged": bool(c),
                    }
                    for y, line, marks in zip(grid.y, grid.ratio, grid.converged, strict=True)
                    for x, v, c in zip(grid.x, line, marks, strict=True)
                ]
            missed += [f"{lost} of {NAMED[model]} with {ALL[a]}"] if lost else []
            name = f"median |λ_min|/|λ_max| where both converged, {NAMED[model]}, {ALL[a]}"
            compared.append(Compared(name, summary(medians, ".3g")))
    return Drawing(
        {"": plots.draw(first[::2] + first[1::2])},
        rows,
        compared,
        _finding(_judge_4(rows), "SSGD's median ratio is {} that of DPSGD")
        + _stuck(work)
        + (f" Points that did not converge do not count: {', '.join(missed)}." if missed else ""),
    )


def _judge_4(rows: Rows) -> list[Effect]:
    """A point counts where both of its eigenvalues converged."""
    return _effects(rows, "median |λ_min|/|λ_max|, SSGD / DPSGD", "ratio", "converged")


figure(
    "fig4",
    "DPSGD-2020, Figure 4",
    "Hessian ratios early in training, CIFAR-10, batch 8192",
    "Early in training DPSGD is less likely than SSGD to be at a saddle: |λ_min|/|λ_max| is lower.",
    _shape_runs,
    _judge_4,
    smoke=SMOKE_NOTE,
    laptop=f"after a quarter of training, {_POINTS}, up to 200 products a point; {cifar_note(_EPOCHS)}",
    workstation=f"after a quarter of training, {_POINTS}, up to 200 products a point; {STATION_CIFAR}",
    paper=f"after epoch 16; {PAPER_CIFAR}",
    weights=True,
)(_fig4)

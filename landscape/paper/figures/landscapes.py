"""DPSGD-2020's Figures 3 and 4: contours and Hessian ratios around CIFAR-10's networks."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape import plots
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure
from landscape.paper.figures.networks import ALL, BOTH, NAMED, accuracy, cell
from landscape.paper.scales import PAPER_CIFAR, SMOKE_NOTE, cells, cifar_note

# Test accuracy in % up to which a network counts as not trained (ours); of ten classes chance is 10.
CHANCE = 15.0
# Of a grid's points that must have converged for a network to count (ours).
_CONVERGED = 0.5
# On a laptop: VGG-19 has not left chance after the 12 epochs of the tables.
_EPOCHS = 36


def _shaped(scale: Scale) -> tuple[str, ...]:
    """The networks of Figures 3 and 4; DenseNet-121 takes a laptop as long as the others together."""
    return ("vgg-19", "resnet-18") if scale == "laptop" else ("vgg-19", "resnet-18", "densenet-121")


def _shape_runs(scale: Scale) -> Runs:
    return cells(scale, [cell(m, 8192, a) for m in _shaped(scale) for a in BOTH], epochs=_EPOCHS)


def _near_chance(work: Work, model: str) -> list[str]:
    """Those of a network's two runs that did not train: around them is a plain, not a minimum."""
    accuracies = {a: accuracy(work.group(cell(model, 8192, a))[0]) for a in BOTH}
    return [f"{NAMED[model]} with {ALL[a]} ({v:.1f}%)" for a, v in accuracies.items() if v < CHANCE]


def _both_trained(stuck: list[str]) -> str:
    return "that trained with both" + (f"; at chance stayed {' and '.join(stuck)}" if stuck else "")


def _fig3(work: Work) -> Drawing:
    surfaces, rows, compared = [], list[dict[str, Any]](), list[Compared]()
    wider, stuck = [], list[str]()
    for model in _shaped(work.scale):
        rise = {}
        for a in BOTH:
            run = work.group(cell(model, 8192, a))[0]
            surface = work.contour(
                run,
                label=f"{NAMED[model]}, {ALL[a]}",
                grid=work.pick(3, 25, 50),
                samples=work.pick(32, 500, 0),
            )
            surfaces.append(surface)
            center = surface.loss[len(surface.y) // 2, len(surface.x) // 2]
            rise[a] = float(np.nanmedian(surface.loss) - center)
            rows += [
                {
                    "model": NAMED[model],
                    "algorithm": ALL[a],
                    "x": float(x),
                    "y": float(y),
                    "test_loss_nat": float(v),
                }
                for y, line in zip(surface.y, surface.loss, strict=True)
                for x, v in zip(surface.x, line, strict=True)
            ]
            compared.append(
                Compared(f"median rise of the test loss, {NAMED[model]}, {ALL[a]}", f"{rise[a]:.3g}")
            )
        if not (failed := _near_chance(work, model)):
            wider.append(rise["dpsgd"] < rise["ssgd"])
        stuck += failed
    picture = plots.draw(surfaces[::2] + surfaces[1::2])
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"The loss rises less around DPSGD's solution than around SSGD's for {sum(wider)} of {len(wider)} "
        f"networks {_both_trained(stuck)}.",
        all(wider) if wider else None,
    )


figure(
    "fig3",
    "DPSGD-2020, Figure 3",
    "contours of the test loss, CIFAR-10, batch 8192",
    "DPSGD's contours are wider apart: its minima are flatter.",
    _shape_runs,
    smoke=SMOKE_NOTE,
    laptop=f"25 × 25 points, 500 test images; {cifar_note(_EPOCHS)}",
    paper=PAPER_CIFAR,
)(_fig3)


def _fig4(work: Work) -> Drawing:
    grids, rows, compared, lower, stuck = [], list[dict[str, Any]](), list[Compared](), [], list[str]()
    missed = list[str]()
    for model in _shaped(work.scale):
        medians: dict[str, float] = {}
        for a in BOTH:
            early = work.checkpoints(f"{cell(model, 8192, a)}/0")[0]
            grid = work.hessian_grid(
                early,
                label=f"{NAMED[model]}, {ALL[a]}, epoch {early.epoch:.3g}",
                grid=work.pick(2, 4, 4),
                samples=work.pick(16, 128, 0),
                products=work.pick(4, 16, 1000),
            )
            grids.append(grid)
            good = grid.ratio[grid.converged]
            medians[a] = float(np.median(good)) if len(good) >= _CONVERGED * grid.ratio.size else np.nan
            median_text = f"{np.median(good):.3g}" if len(good) else "–"
            if len(good) < grid.ratio.size:
                median_text += f" ({len(good)} of {grid.ratio.size} points)"
                missed.append(f"{grid.ratio.size - len(good)} of {NAMED[model]} with {ALL[a]}")
            rows += [
                {
                    "model": NAMED[model],
                    "algorithm": ALL[a],
                    "x": float(x),
                    "y": float(y),
                    "ratio": float(v),
                    "converged": bool(c),
                }
                for y, line, marks in zip(grid.y, grid.ratio, grid.converged, strict=True)
                for x, v, c in zip(grid.x, line, marks, strict=True)
            ]
            compared.append(
                Compared(f"median |λ_min|/|λ_max| where it converged, {NAMED[model]}, {ALL[a]}", median_text)
            )
        if not (failed := _near_chance(work, model)) and np.isfinite(list(medians.values())).all():
            lower.append(medians["dpsgd"] < medians["ssgd"])
        stuck += failed
    picture = plots.draw(grids[::2] + grids[1::2])
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"DPSGD's median ratio is lower than SSGD's for {sum(lower)} of {len(lower)} networks "
        f"{_both_trained(stuck)}." + _left_out(missed),
        all(lower) if lower else None,
    )


def _left_out(missed: list[str]) -> str:
    return f" Points that did not converge are not counted: {', '.join(missed)}." if missed else ""


figure(
    "fig4",
    "DPSGD-2020, Figure 4",
    "Hessian ratios early in training, CIFAR-10, batch 8192",
    "Early in training DPSGD is less likely than SSGD to be at a saddle: |λ_min|/|λ_max| is lower.",
    _shape_runs,
    smoke=SMOKE_NOTE,
    laptop=f"after a quarter of training, on 128 test images, 16 products a point; {cifar_note(_EPOCHS)}",
    paper=f"after epoch 16; {PAPER_CIFAR}",
)(_fig4)

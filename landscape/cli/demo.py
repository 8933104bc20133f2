"""landscape demo"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from landscape import plots
from landscape.analysis.contour import contour
from landscape.analysis.hessian_grid import hessian_grid
from landscape.analysis.noise import estimate_noise
from landscape.analysis.planes import random_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, options
from landscape.cli.analysis import about
from landscape.results.base import save
from landscape.results.hessian_grid import HessianGrid
from landscape.results.noise import NoiseEstimate
from landscape.results.surface import Surface
from landscape.train import launch, recipe

SEEDS = (0, 1, 2)
# Ratios are drawn early in training, as in DPSGD-2020's Figure 4 (its first 5%); so is Δ(2), which is
# large while the learners' spread is.
EARLY = 50


@click.command(epilog="Example: landscape demo -o demo")
@click.option(
    "-o", "--output", default="demo", show_default=True, metavar="DIR", help="Folder for runs and pictures."
)
@options.quiet
def demo(output: str, quiet: bool) -> None:
    """Train SSGD and DPSGD on the bundled digits, and map the landscape around them.

    There are three seeds of each.

    Writes training.png, contour.png, hessian.png and noise.png with their results, and prints a table.
    Existing runs are reused.
    """
    folder = Path(output)
    common.make_folder(folder)
    ends: dict[str, list[Checkpoint]] = {"ssgd": [], "dpsgd": []}
    with common.progress_bar("training", quiet) as bar:
        for i, (name, seed) in enumerate((a, s) for a in ends for s in SEEDS):
            settings = (f"seed={seed}", f"checkpoint.every={EARLY}", "decompose.every=5", "evaluate.every=20")
            chosen = recipe.read(f"digits-{name}", settings)
            run = launch.launch(chosen, folder / f"{name}-{seed}", resume=True, device="cpu")
            ends[name].append(run)
            bar((i + 1) / 6)
    paths = [folder / f"{name}-0" / "last.h5" for name in ends]
    last = [Checkpoint.load(path) for path in paths]
    early = [Checkpoint.load(path.with_name(f"step-{EARLY:07d}.h5")) for path in paths]
    problems = [run.problem("test") for run in last]
    with common.progress_bar("contours", quiet) as bar:
        surfaces = [
            contour(p, random_plane(p), progress=bar, **about(run, "test"))
            for p, run in zip(problems, last, strict=True)
        ]
    with common.progress_bar("Hessian", quiet) as bar:
        grids = []
        for run in early:
            p = run.problem("test")
            grids.append(hessian_grid(p, random_plane(p), progress=bar, **about(run, "test")))
    with common.progress_bar("noise", quiet) as bar:
        dp = [early[1], last[1]]
        noises = [
            estimate_noise(
                run.problem("train"),
                run.weights,
                run.lr,
                run.local_batch,
                progress=bar,
                **about(run, "train"),
            )
            for run in dp
        ]
    for kind, results in (("contour", surfaces), ("hessian", grids), ("noise", noises)):
        save(results, folder / f"{kind}.h5")
        plots.save_figure(plots.draw(results), folder / f"{kind}.png")
    plots.save_figure(plots.draw([run for runs in ends.values() for run in runs]), folder / "training.png")
    click.echo(_table(ends, surfaces, grids, noises))
    for picture in ("training", "contour", "hessian", "noise"):
        click.echo(folder / f"{picture}.png")


def _table(
    ends: dict[str, list[Checkpoint]],
    surfaces: list[Surface],
    grids: list[HessianGrid],
    noises: list[NoiseEstimate],
) -> str:
    lines = [
        "Bundled digits, MLP 64-50-50-10, 5 learners × 100 samples, lr 1, seeds 0, 1, 2",
        f"{'':8}{'test error % by seed':>26}{'test loss rise, plane':>24}{'ratio at step ' + str(EARLY):>20}",
    ]
    for (name, runs), surface, grid in zip(ends.items(), surfaces, grids, strict=True):
        errors = ", ".join(f"{100 * (1 - run.history['test_accuracy'][-1]):.2f}" for run in runs)
        rise = surface.loss.max() - surface.loss.min()
        lines.append(f"{name:8}{errors:>26}{rise:>24.4g}{np.median(grid.ratio):>20.4g}")
    lines.append("Δ(2) of DPSGD, seed 0 (direct ± s.e. | full-batch | Eq. 4 | first-order ± s.e.):")
    for estimate in noises:
        s = estimate.summary()
        lines.append(
            f"  {estimate.label:30} {s['direct'][0]:.2e} ± {s['direct'][1]:.0e} | {s['full_batch'][0]:.2e} | "
            f"{s['eq4'][0]:.2e} | {s['first_order'][0]:.2e} ± {s['first_order'][1]:.0e}"
        )
    return "\n".join(lines)

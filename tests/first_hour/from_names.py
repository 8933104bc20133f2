"""A stranger's check: three tasks each for six parts of the package, solved from its names alone.

Each task is its docstring. Its script was written from the public names, their signatures and the first sentences
of their docstrings, without a look at bodies, documents or examples.

At the first try, on 2026-11-25 with the names of 0.18, 17 of 18 ran. What did not:

- comparison 2: ``compare`` refused the folder of a run, which ``draw`` and ``report`` take. It takes names of files and
  folders now.

A stranger repeated the check on the same day with tasks of their own, when all names were final: of 18 scripts 13 ran
at the first try, and 16 in a second round, after the words of ``style`` and ``quantities`` had come into the
signatures and the first sentences of ``line`` and ``sharpness`` said what they compute. What did not: ``Sweep.keys``
was taken for the keys that vary, and ``matrix="ggn"`` for "gauss-newton".

The author of the tasks below had written ``draw`` and ``report`` themself: the drawing tasks say less than the others.
The names of the curvature functions' options were about to change; their tasks use the defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import landscape

SMALL: dict[str, Any] = {"steps": 10, "model.widths": [64, 16, 10]}


def small_problem() -> landscape.Problem:
    torch.manual_seed(0)
    digits = landscape.data.load("digits")
    model = landscape.models.build("mlp", widths=[64, 16, 10])
    return landscape.Problem(model, digits.loss, digits.train).subset(slice(0, 200))


def small_run(folder: Path, **settings: Any) -> Any:
    return landscape.train("digits-dpsgd", folder, **SMALL, **settings)


def training_1(folder: Path) -> None:
    """Train five learners for ten steps and say their test accuracy and consensus distance."""
    run = landscape.train("digits-dpsgd", folder / "run", steps=10)
    assert run.step == 10
    assert run.learners == 5
    assert run.history["consensus"][-1] >= 0
    assert 0 <= run.problem(split="test").accuracy() <= 1


def training_2(folder: Path) -> None:
    """Change a recipe's topology and learning rate, write it to a file, train from the file, and go on for longer."""
    recipe = landscape.Recipe.read("digits-dpsgd").replace(lr=0.2, **SMALL, **{"algorithm.mixing": "ring(1)"})
    (folder / "mine.toml").write_text(recipe.to_toml())
    landscape.train(folder / "mine.toml", folder / "run")
    longer = landscape.train(recipe.replace(steps=15), folder / "run", resume=True)
    assert longer.step == 15
    assert longer.lr == 0.2


def training_3(folder: Path) -> None:
    """Record a loop of one's own, with the loss on test data, and open the record."""
    digits = landscape.data.load("digits")
    model = landscape.models.build("mlp", widths=[64, 16, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = landscape.Recorder(
        folder / "mine", model, digits.loss, digits.train, every=2, test=digits.test, optimizer=optimizer
    )
    x, y = digits.train
    for k in range(6):
        optimizer.zero_grad()
        batch = slice(100 * k, 100 * k + 100)
        digits.loss(model(x[batch]), y[batch]).backward()
        with recorder.step():
            optimizer.step()
    recorder.close()
    run: Any = landscape.load(folder / "mine" / "last.h5")
    assert run.step == 6


def contour_1(folder: Path) -> None:
    """Map the loss of a model of one's own on 7 × 5 points of a random plane, and save it."""
    problem = small_problem()
    plane = landscape.random_plane(problem, norm="filter", seed=1)
    surface = landscape.contour(problem, plane, grid=(7, 5), span=0.5)
    assert surface.loss.shape == (5, 7)
    surface.save(folder / "surface.h5")
    again: Any = landscape.load(folder / "surface.h5")
    assert (again.loss == surface.loss).all()


def contour_2(folder: Path) -> None:
    """Find the loss barrier between two runs."""
    one, two = small_run(folder / "a"), small_run(folder / "b", seed=1)
    plane = landscape.between(one, [one.mean, two.mean])
    surface = landscape.contour(one, plane, 3)
    assert surface.markers.shape == (2, 2)
    line = landscape.line(one, weights=torch.stack([one.mean, two.mean]), points=7)
    assert line.barrier == landscape.barrier(line.t, line.loss)


def contour_3(folder: Path) -> None:
    """Break a contour off and go on with it from its file; measure the basin in it."""
    run = small_run(folder / "run")
    plane = landscape.random_plane(run)
    for _ in range(2):
        with landscape.open(folder / "surface.h5", "a") as file:
            surface = landscape.contour(run, plane, 9, span=0.2, into=file)
    basins = surface.basins()
    assert len(landscape.open(folder / "surface.h5")) == 1
    assert basins.minima >= 1


def curvature_1(folder: Path) -> None:
    """Both ends of the Hessian's spectrum of a run, and how many products they took."""
    run = small_run(folder / "run")
    ends = landscape.extreme_eigenvalues(run.problem())
    assert ends.min < ends.max
    assert ends.converged


def curvature_2(folder: Path) -> None:
    """The three largest eigenvalues and the trace, with its error, of a problem of one's own."""
    problem = small_problem()
    pairs = landscape.top_eigenvalues(problem, k=3)
    assert pairs.values.shape == (3,)
    trace = landscape.trace(problem)
    assert abs(trace.value) < 100 * pairs.values[0]
    assert trace.standard_error > 0


def curvature_3(folder: Path) -> None:
    """The Hessian ratio on a grid of 2 × 2 points, and what memory it takes at most."""
    problem = small_problem()
    plane = landscape.random_plane(problem)
    assert landscape.forecast(landscape.hessian_grid, problem, plane, 2) > 0
    grid = landscape.hessian_grid(problem, plane, 2, span=0.1)
    assert grid.ratio.shape == (2, 2)


def instruments_1(folder: Path) -> None:
    """The noise scale and the batch sharpness of a run at its own batch."""
    run = small_run(folder / "run")
    scale = landscape.noise_scale(run, 100, max_draws=32)
    sharp = landscape.batch_sharpness(run, 100, max_draws=32)
    assert scale.standard_error >= 0
    low, high = sharp.interval(level=0.9)
    assert low < sharp.value < high


def instruments_2(folder: Path) -> None:
    """What the spread of the learners adds to the noise, and where it lies in the Hessian."""
    run = small_run(folder / "run")
    noise = landscape.noise(run, draws=4)
    assert {"direct", "eq4"} <= {*noise.means()}
    shares = landscape.disagreement(run, k=2)
    assert 0 <= shares.value <= 1


def instruments_3(folder: Path) -> None:
    """Follow the sharpness during training, every fifth step."""
    settings = {"monitor.instruments": ["lambda-max"], "monitor.every": 5}
    run = small_run(folder / "run", **settings)
    values = run.history["lambda_max"]
    assert (values > 0).any()


def comparison_1(folder: Path) -> None:
    """Say which of two runs is flatter by its sharpness."""
    runs = {"a": small_run(folder / "a"), "b": small_run(folder / "b", lr=0.05)}
    found = landscape.compare(runs, quantities=["lambda-max"])
    assert found.sides == ("a", "b")
    assert found.value.shape == (1, 2)
    assert found.describe()


def comparison_2(folder: Path) -> None:
    """Compare files of runs with a problem of one's own, without naming them."""
    small_run(folder / "a")
    found = landscape.compare([folder / "a", small_problem()], quantities=["lambda-max"])
    assert found.significant.shape == (1, 1)


def comparison_3(folder: Path) -> None:
    """Compare two groups of seeds at a stricter significance."""
    groups = {
        lr: [small_run(folder / f"{lr}-{seed}", lr=float(lr), seed=seed) for seed in range(2)]
        for lr in ("0.5", "0.1")
    }
    found = landscape.compare(groups, quantities=["lambda-max"], significance=0.01)
    assert found.grouped
    assert found.significance == 0.01


def drawing_1(folder: Path) -> None:
    """Draw the training curves of two runs into one file."""
    runs = [small_run(folder / "a"), small_run(folder / "b", seed=1)]
    landscape.draw(runs, folder / "curves.png")
    assert (folder / "curves.png").exists()


def drawing_2(folder: Path) -> None:
    """Draw a surface beside one's own plot, without caption and title, and its profile elsewhere."""
    problem = small_problem()
    surface = landscape.contour(problem, landscape.random_plane(problem), 6)
    own = Figure()
    left, right = own.subplots(1, 2)
    names = landscape.draw(surface).axes_by_name  # type: ignore[attr-defined]
    landscape.draw(
        surface, axes=dict(zip(names, (left, right), strict=True)), visuals={"title": False, "caption": False}
    )
    assert left.has_data()
    assert right.has_data()


def drawing_3(folder: Path) -> None:
    """Write one page about a run and a result."""
    run = small_run(folder / "run")
    surface = landscape.contour(run, landscape.random_plane(run), 4)
    landscape.report([run, surface], folder / "page.html", title="My run")
    assert "My run" in (folder / "page.html").read_text()


TASKS = {
    f"{part} {k}": globals()[f"{part}_{k}"]
    for part in ("training", "contour", "curvature", "instruments", "comparison", "drawing")
    for k in (1, 2, 3)
}

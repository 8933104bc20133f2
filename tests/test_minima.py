"""The largest rates that stay at a minimum: on quadratics against the roots, on a trained network, by command."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import landscape
from landscape import FailedError, InputError, Minima
from landscape.stability import limits
from landscape.train.experiments.minima import FACTOR, Start, length, minima, run, search
from landscape.train.recipes import recipe
from landscape.train.run import launch
from tests import problems
from tests.conftest import Command


@pytest.mark.parametrize(
    ("weight_decay", "delays"), [pytest.param(0.0, [0, 1, 3], marks=pytest.mark.slow), (0.5, [0, 1])]
)
def test_on_a_quadratic_training_leaves_where_the_roots_say(
    weight_decay: float, delays: list[int], tmp_path: Path
) -> None:
    problem = problems.quadratic([0.5, 4.0], start=0.0)
    found = minima(problem, delays, 0.5, weight_decay=weight_decay)
    np.testing.assert_allclose(found.predicted, limits(delays, 0.5) / (4.0 + weight_decay), rtol=1e-6)
    assert (found.leaves <= 1.07 * found.stays).all()
    # A run is long enough for 10% above the limit to show; below it nothing leaves.
    assert (found.leaves > 0.99 * found.predicted).all()
    assert (found.stays < 1.1 * found.predicted).all()
    np.testing.assert_allclose(found.lambda_after, 4.0)
    assert found.factor == FACTOR
    found.save(tmp_path / "m.h5")
    back = landscape.load(tmp_path / "m.h5")
    assert isinstance(back, Minima)
    np.testing.assert_array_equal(back.boundary, found.boundary)
    (ax,) = back.plot().axes
    assert len(ax.get_legend_handles_labels()[0]) == 6
    with pytest.raises(ValueError, match="stays"):
        Minima(**{**vars(found), "stays": np.zeros((2, 3))})


def test_a_run_is_the_recursion_of_delayed_steps() -> None:
    problem = problems.quadratic([0.5, 4.0], start=0.0)
    start = problem.theta + 0.1
    xs = [start] * 3
    for _ in range(25):
        xs.append(xs[-1] - 0.05 * problem.gradient(xs[-3]))
    end = run(Start(problem, start, 0.0, 1e9), 25, 2, 0.0, 0.0, 0.05)
    assert end is not None
    torch.testing.assert_close(end, xs[-1])
    assert run(Start(problem, start, 0.0, problem.loss(start) - 1e-9), 25, 2, 0.0, 0.0, 0.05) is None


def test_longer_delays_take_longer_runs() -> None:
    assert length(0, 0.0, 0.0) == 100
    for momentum, shifted in ((0.0, 0.0), (0.9, 0.0), (0.0, 0.9)):
        steps = [length(tau, momentum, shifted) for tau in (2, 8, 32)]
        assert steps == sorted(steps)
    assert length(32, 0.0, 0.9) > 10_000  # shifted momentum remembers over τ + 1 steps


def test_the_search_widens_and_gives_up() -> None:
    end = torch.zeros(1)
    low, high, _ = search(lambda lr: end if lr <= 0.2 else None, 1.0, 0.01)
    assert low <= 0.2 < high <= 1.01 * low
    low, high, _ = search(lambda lr: end if lr <= 7.0 else None, 1.0, 0.01)
    assert low <= 7.0 < high <= 1.01 * low
    with pytest.raises(FailedError, match="training leaves it even at lr"):
        search(lambda lr: None, 1.0, 0.1)
    with pytest.raises(FailedError, match="training stays even at lr"):
        search(lambda lr: end, 1.0, 0.1)
    with pytest.raises(InputError, match="λ_max with weight decay is -1, it must be > 0"):
        minima(problems.quadratic([-1.0, -2.0]), [0])
    with pytest.raises(InputError, match="tol: 0 is not allowed"):
        minima(problems.quadratic([1.0, 2.0]), [0], tol=0)


@pytest.mark.slow
def test_from_a_trained_minimum_by_command(command: Command, tiny: Path, tmp_path: Path) -> None:
    settings = ["learners=1", "batch=200", "sampling=all", "steps=1500", "algorithm={name='ssgd'}", "lr=0.5"]
    settings += ["optimizer={name='sgd', momentum=0.9, weight_decay=0.01}", "decompose.every=0"]
    launch.launch(recipe.read(str(tiny), [*settings, "dtype=float64"]), tmp_path / "run")
    path, picture = tmp_path / "run" / "last.h5", tmp_path / "m.png"
    code, out, err = command("minima", path, "--delay", "0,2", "--momentum", 0.5, "--plot", picture)
    assert (code, out.split()[-2:]) == (0, [f"{tmp_path}/run/last-minima.h5", str(picture)]), err
    found = landscape.load(tmp_path / "run" / "last-minima.h5")
    assert found.gradient_norm < 1e-4
    assert found.weight_decay == 0.01
    np.testing.assert_allclose(found.boundary, found.predicted, rtol=0.2)
    assert re.search(r"weight decay +0\.01\n", out)
    assert picture.stat().st_size > 10_000
    lamb = recipe.read(str(tiny), ["optimizer={name='lamb'}", "steps=2"])
    launch.launch(lamb, tmp_path / "lamb")
    code, _, err = command("minima", tmp_path / "lamb" / "last.h5")
    assert code == 2
    assert "its optimizer is 'lamb', the experiment needs 'sgd'" in err

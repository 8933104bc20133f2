"""Experiments that train: rates that stay at a minimum, escape from saddles, the critical batch by branching."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import Escape, InputError, OperationError, Problem
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.data.synthetic import mean_output
from landscape.limits import limits
from landscape.results.noise import CriticalBatch
from landscape.results.training import median_rank
from landscape.training.experiments.continued import critical_batch
from landscape.training.experiments.escapes import (
    FACTOR,
    Start,
    escape_time,
    escape_times,
    minima,
    search,
    train_from,
)
from landscape.training.recipes import recipe
from landscape.training.run import launch
from landscape.training.run.loop import Trainer
from tests import problems
from tests.conftest import Command
from tests.dense import dense_hessian

# Minima.


@pytest.mark.parametrize(
    ("weight_decay", "delays"), [pytest.param(0.0, [0, 1, 3], marks=pytest.mark.slow), (0.5, [1])]
)
def test_on_a_quadratic_training_leaves_where_the_roots_say(weight_decay: float, delays: list[int]) -> None:
    problem = problems.quadratic([0.5, 4.0], start=0.0)
    found = minima(problem, delays, 0.5, weight_decay=weight_decay)
    np.testing.assert_allclose(found.predicted, limits(delays, 0.5) / (4.0 + weight_decay), rtol=1e-6)
    assert (found.leaves <= 1.07 * found.stays).all()
    # A run is long enough for 10% above the limit to show; below it nothing leaves.
    assert (found.leaves > 0.99 * found.predicted).all()
    assert (found.stays < 1.1 * found.predicted).all()
    np.testing.assert_allclose(found.lambda_after, 4.0)
    assert found.factor == FACTOR
    (ax,) = found.plot().axes
    assert len(ax.get_legend_handles_labels()[0]) == 6


def test_a_run_is_the_recursion_of_delayed_steps() -> None:
    problem = problems.quadratic([0.5, 4.0], start=0.0)
    start = problem.weights + 0.1
    xs = [start] * 3
    for _ in range(25):
        xs.append(xs[-1] - 0.05 * problem.gradient(xs[-3]))
    end = train_from(Start(problem, start, 0.0, 1e9), 25, 2, 0.0, 0.0, 0.05)
    assert end is not None
    torch.testing.assert_close(end, xs[-1])
    assert train_from(Start(problem, start, 0.0, problem.loss(start) - 1e-9), 25, 2, 0.0, 0.0, 0.05) is None


def test_the_search_widens_and_gives_up() -> None:
    end = torch.zeros(1)
    for limit in (0.2, 7.0):
        low, high, _ = search(lambda lr, limit=limit: end if lr <= limit else None, 1.0, 0.01)  # type: ignore[misc]
        assert low <= limit < high <= 1.01 * low
    with pytest.raises(OperationError, match="training leaves it even at lr"):
        search(lambda lr: None, 1.0, 0.1)
    with pytest.raises(OperationError, match="training stays even at lr"):
        search(lambda lr: end, 1.0, 0.1)
    with pytest.raises(InputError, match="λ_max with weight decay is -1, it must be > 0"):
        minima(problems.quadratic([-1.0, -2.0]), [0])
    with pytest.raises(InputError, match="rate_tol: 0 is not allowed"):
        minima(problems.quadratic([1.0, 2.0]), [0], rate_tol=0)


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


# Saddles.


FAST = ("steps=200", "lr=0.4")


def test_the_saddle_has_the_hessian_and_minima_it_promises() -> None:
    model = landscape.models.build("saddle", dimension=4, unstable=2, descent=0.5, curvature=3.0)
    data = landscape.data.load("quadratic", dimension=4, curvature_std=1.0, gradient_std=0.1)
    problem = Problem(model, mean_output, data.train)
    assert torch.equal(problem.weights, torch.zeros(4, dtype=torch.float64))
    assert problem.loss() == 0
    torch.testing.assert_close(problem.gradient(), torch.zeros(4).double(), atol=1e-14, rtol=0)
    hessian = torch.diag(torch.tensor([-0.5, -0.5, 3.0, 3.0])).double()
    torch.testing.assert_close(dense_hessian(problem), hessian)
    minimum = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    assert problem.loss(minimum) == pytest.approx(model.depth) == pytest.approx(-0.25)
    torch.testing.assert_close(problem.gradient(minimum), torch.zeros(4).double(), atol=1e-14, rtol=0)


def test_without_noise_nobody_escapes_and_more_noise_is_faster() -> None:
    assert escape_time([*FAST, "data.gradient_std=0"]) == math.inf
    little, much = (escape_time([*FAST, f"data.gradient_std={s}"]) for s in (1e-6, 1e-2))
    # Near the saddle x grows by 1 + αγ a step: 10⁴ times the noise saves about ln 10⁴/ln 1.4 = 27 steps.
    assert little - much == pytest.approx(math.log(1e4) / math.log(1.4), abs=6)
    with pytest.raises(InputError, match="model.name: 'quadratic' is not allowed"):
        escape_time(["model={name='quadratic', eigenvalues=[1.0, 1.0]}"])


def test_a_sweep_sees_the_algorithms_on_the_same_minibatches() -> None:
    same = {"one": ["algorithm={name='ssgd'}"], "two": ["algorithm={name='ssgd*', sigma=0.0}"]}
    found = escape_times("lr", [0.2, 0.4], same, range(2), ["steps=200"])
    np.testing.assert_array_equal(found.times[0], found.times[1])
    assert (found.times[:, 1] < found.times[:, 0]).all()
    assert found.setting == "dimension 2, noise 0.01"


@given(st.integers(6, 60), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_band_holds_the_median_as_often_as_it_says(samples: int, level: float) -> None:
    def coverage(rank: int) -> float:
        return sum(math.comb(samples, k) for k in range(rank + 1, samples - rank)) / 2**samples

    rank = median_rank(samples, level)
    assert coverage(rank) >= level - 1e-12
    assert rank + 1 == (samples + 1) // 2 or coverage(rank + 1) < level


def test_runs_that_do_not_escape_are_longer_than_all_others() -> None:
    times = np.array([[[5.0, math.inf, 3.0, 4.0, math.inf, 6.0, 7.0]]])
    found = Escape(times, np.array([1.0]), "lr", ("ssgd",), 0.5, 10)
    low, high = found.band()
    assert (found.median[0, 0], low[0, 0], high[0, 0]) == (6.0, 3.0, math.inf)
    with pytest.raises(InputError, match="seeds: 5 is not allowed, a band of 0.95 needs at least 6"):
        median_rank(5, 0.95)


# Critical batches.


LR, DIMENSION = 0.2, 200


def quadratic(lr: float = LR, steps: int = 60, **more: object) -> Checkpoint:
    """SGD on ½‖w‖² with gradient noise of variance 1/nB, after it has become stationary."""
    values: dict[str, object] = {
        "name": "quadratic",
        "learners": 1,
        "batch": 4,
        "lr": lr,
        "steps": steps,
        "dtype": "float64",
        "algorithm": {"name": "ssgd"},
        "model": {"name": "quadratic", "eigenvalues": [1.0] * DIMENSION, "rotate": False},
        "data": {"name": "quadratic", "dimension": DIMENSION, "gradient_std": 1.0},
        "decompose": {"every": 0},
    }
    return Trainer(recipe.from_values(values | more)).run()


@pytest.mark.slow
def test_on_a_quadratic_it_is_where_the_closed_form_says() -> None:
    """E‖w‖² = α²σ²/(nB(1 − (1 − α)²)): with α and nB times k, the loss grows as (2 − α)/(2 − kα)."""
    run = quadratic()
    result = critical_batch(run, [1, 4, 5, 6], loss_tol=0.8, trained_samples=2400, seeds=3)
    k = result.batch / 4
    exact = (2 - LR) / (2 - k * LR) - 1
    assert result.lr.tolist() == pytest.approx((LR * k).tolist())
    assert result.steps.tolist() == [600, 150, 120, 100]
    np.testing.assert_array_less(np.abs(result.rise - exact)[1:], 4 * result.rise_error[1:] + 0.03)
    assert result.value == pytest.approx(20.0, abs=3 * result.standard_error + 0.5)  # exact: k = 5
    assert result.bracket in ((16.0, 20.0), (20.0, 24.0))
    assert result.samples == 1000
    constant = critical_batch(run, [1, 4], scaling="none", loss_tol=0.1, trained_samples=640, seeds=1)
    assert constant.value == math.inf  # less noise, at the same rate, near the minimum
    assert math.isnan(constant.standard_error)


def test_branches_that_diverge_are_worse_than_any() -> None:
    result = critical_batch(quadratic(1.0), [1, 4], loss_tol=0.5, trained_samples=800, seeds=2)
    assert np.isinf(result.loss[1]).all()
    assert (result.value, result.standard_error) == (pytest.approx(8.0), 0.0)
    assert result.bracket == (4.0, 16.0)


def test_the_jackknife_over_seeds() -> None:
    rng = np.random.default_rng(0)
    made = CriticalBatch(
        batch=np.array([10, 100]), lr=np.array([1.0, 2.0]), steps=np.array([9, 9]), loss=np.ones((2, 8)),
        own_batch=10, step=0, trained_samples=90, loss_tol=0.1, scaling="sqrt", samples=9, seed=0, dtype="float32",
    )  # fmt: skip
    values, errors = [], []
    for _ in range(300):
        loss = np.stack([np.ones(8), 1.2 + 0.01 * rng.normal(size=8)])
        one = dataclasses.replace(made, loss=loss)
        values.append(one.value)
        errors.append(one.standard_error)
        assert one.rise_error[1] == pytest.approx(loss[1].std(ddof=1) / 8**0.5)
    assert np.mean(values) == pytest.approx(10**1.5, rel=0.01)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.1)


def test_what_cannot_be_measured_is_refused() -> None:
    run = quadratic(steps=3)
    for words, arguments in (
        ("factors: \\[1\\]", {"factors": [1]}),
        ("factors: 0.3", {"factors": [0.3, 1]}),
        ("trained_samples: 16", {"factors": [1, 2], "trained_samples": 16}),
        ("scaling: 'cube'", {"scaling": "cube"}),
        ("seeds: 0", {"seeds": 0}),
    ):
        with pytest.raises(InputError, match=words):
            critical_batch(run, **arguments)  # type: ignore[arg-type]
    with pytest.raises(OperationError, match="diverged"):
        critical_batch(dataclasses.replace(run, diverged="mean"))

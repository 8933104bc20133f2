"""What two figures measure: rates that stay at a minimum, and times of escape from a saddle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import OperationError, Problem
from landscape.data.base import mean_output
from landscape.limits import limits
from landscape.paper.figures.stability import (
    LEVEL,
    MOMENTUM,
    Escape,
    Start,
    escape_time,
    keeps_minimum,
    median_rank,
    minima,
    saddles,
    search,
)
from tests import problems
from tests.dense import dense_hessian

# Minima.


@pytest.mark.parametrize(
    ("weight_decay", "delays"), [pytest.param(0.0, [0, 1, 3], marks=pytest.mark.slow), (0.5, [1])]
)
def test_on_a_quadratic_training_leaves_where_the_roots_say(weight_decay: float, delays: list[int]) -> None:
    problem = problems.quadratic([0.5, 4.0], start=0.0)
    found = minima(problem, delays, weight_decay, 0.07)
    np.testing.assert_allclose(found.predicted, limits(delays, MOMENTUM) / (4.0 + weight_decay), rtol=1e-6)
    assert (found.leaves <= 1.07 * found.stays).all()
    # A run is long enough for 10% above the limit to show; below it nothing leaves.
    assert (found.leaves > 0.99 * found.predicted).all()
    assert (found.stays < 1.1 * found.predicted).all()


def test_a_run_is_the_recursion_of_delayed_steps() -> None:
    """A ceiling just above its losses leaves it alone, and one just below the largest ends it."""
    problem = problems.quadratic([0.5, 4.0], start=0.0)
    start = problem.weights + 0.1
    xs = [start] * 3
    for _ in range(25):
        xs.append(xs[-1] - 0.15 * problem.gradient(xs[-3]))
    largest = max(problem.loss(x) for x in xs[2:-3])
    assert largest > 1.01 * problem.loss(start)
    for ceiling, stays in ((largest + 1e-6, True), (largest - 1e-6, False)):
        assert keeps_minimum(Start(problem, start, 0.0, ceiling), 25, 2, 0.0, 0.0, 0.15) is stays


def test_the_search_widens_and_gives_up() -> None:
    for limit in (0.2, 7.0):
        low, high = search(lambda lr, limit=limit: lr <= limit, 1.0, 0.01)  # type: ignore[misc]
        assert low <= limit < high <= 1.01 * low
    with pytest.raises(OperationError, match="training leaves it even at lr"):
        search(lambda lr: False, 1.0, 0.1)
    with pytest.raises(OperationError, match="training stays even at lr"):
        search(lambda lr: True, 1.0, 0.1)
    with pytest.raises(OperationError, match="λ_max with weight decay is -1, it must be > 0"):
        minima(problems.quadratic([-1.0, -2.0]), [0], 0.0, 0.1)


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


def test_the_algorithms_see_the_same_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"one": ("algorithm={name='ssgd'}",), "two": ("algorithm={name='ssgd*', sigma=0.0}",)}
    monkeypatch.setattr("landscape.paper.figures.stability.ALGORITHMS", same)
    (found,) = saddles(range(2), dimension=[], lr=[0.2, 0.4])
    assert (found.vary, found.algorithms) == ("lr", ("one", "two"))
    np.testing.assert_array_equal(found.times[0], found.times[1])
    assert (found.times[:, 1] < found.times[:, 0]).all()
    assert found.setting == "dimension 2, noise 0.01"


@given(st.integers(6, 60))
def test_the_band_holds_the_median_as_often_as_it_says(samples: int) -> None:
    def coverage(rank: int) -> float:
        return sum(math.comb(samples, k) for k in range(rank + 1, samples - rank)) / 2**samples

    rank = median_rank(samples)
    assert coverage(rank) >= LEVEL - 1e-12
    assert rank + 1 == (samples + 1) // 2 or coverage(rank + 1) < LEVEL


def test_runs_that_do_not_escape_are_longer_than_all_others() -> None:
    times = np.array([[[5.0, math.inf, 3.0, 4.0, math.inf, 6.0, 7.0]]])
    found = Escape(times, np.array([1.0]), "lr", ("ssgd",), 10, "")
    low, high = found.band
    assert (found.median[0, 0], low[0, 0], high[0, 0]) == (6.0, 3.0, math.inf)

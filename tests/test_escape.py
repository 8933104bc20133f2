"""Escape times from saddles: the problem itself, the bands, and the command."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import Escape, InputError, Problem
from landscape.data.synthetic import mean_output
from landscape.results.training import median_rank
from landscape.train.experiments.saddles import escape_time, sweep
from tests.dense import dense_hessian

FAST = ("steps=200", "lr=0.4")


def test_the_saddle_has_the_hessian_and_minima_it_promises() -> None:
    model = landscape.models.build("saddle", dimension=4, unstable=2, descent=0.5, curvature=3.0)
    data = landscape.data.load("quadratic", dimension=4, curvature_std=1.0, gradient_std=0.1)
    problem = Problem(model, mean_output, data.train)
    assert torch.equal(problem.theta, torch.zeros(4, dtype=torch.float64))
    assert problem.loss() == 0
    torch.testing.assert_close(problem.gradient(), torch.zeros(4).double(), atol=1e-14, rtol=0)
    hessian = torch.diag(torch.tensor([-0.5, -0.5, 3.0, 3.0])).double()
    torch.testing.assert_close(dense_hessian(problem), hessian)
    minimum = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    assert problem.loss(minimum) == pytest.approx(model.depth) == pytest.approx(-0.25)
    torch.testing.assert_close(problem.gradient(minimum), torch.zeros(4).double(), atol=1e-14, rtol=0)


def test_without_noise_nobody_escapes_and_more_noise_is_faster() -> None:
    assert escape_time("saddle-dpsgd", [*FAST, "data.gradient_std=0"]) == math.inf
    little, much = (escape_time("saddle-dpsgd", [*FAST, f"data.gradient_std={s}"]) for s in (1e-6, 1e-2))
    # Near the saddle x grows by 1 + αγ a step: 10⁴ times the noise saves about ln 10⁴/ln 1.4 = 27 steps.
    assert little - much == pytest.approx(math.log(1e4) / math.log(1.4), abs=6)
    with pytest.raises(InputError, match="model.name: 'quadratic' is not allowed"):
        escape_time("saddle-dpsgd", ["model={name='quadratic', eigenvalues=[1.0, 1.0]}"])


def test_a_sweep_sees_the_algorithms_on_the_same_minibatches() -> None:
    same = {"one": ["algorithm={name='ssgd'}"], "two": ["algorithm={name='ssgd*', sigma=0.0}"]}
    found = sweep("lr", [0.2, 0.4], same, range(2), settings=["steps=200"])
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

"""The predicted loss of averages of weights: where it is exact, its interval, and the choice of members."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import landscape
from benchmarks import averages
from landscape import Problem
from landscape.analysis import connection
from tests import problems


def every_subset(n: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([row for row in itertools.product([0.0, 1.0], repeat=n) if any(row)])


def test_of_a_quadratic_every_average_is_exact() -> None:
    problem = problems.quadratic([4.0, 1.0, 0.5, -0.2, 2.0])
    weights = problems.around(problem, 5, 0.7)
    result = landscape.average(problem, weights, every_subset(5))
    np.testing.assert_allclose(result.loss, result.exact, atol=1e-8)
    assert result.inside.all()
    assert (result.high - result.low).max() < 1e-6
    mean = weights.mean(0)
    h = problems.textbook_hessian(problem)
    half_trace = 0.5 * torch.einsum("ni,ij,nj->", weights - mean, h, weights - mean) / 5
    np.testing.assert_allclose(result.change[-2], -float(half_trace), rtol=1e-7)  # −½ tr(HC)


def test_the_choice_is_that_of_the_greedy_soup_with_exact_losses() -> None:
    problem = problems.quadratic([4.0, 1.0, 0.5, 0.3, 2.0], start=1.0)
    weights = problems.around(problem, 6, 1.5, seed=3)
    result = landscape.average(problem, weights)
    chosen: list[int] = []
    lowest = np.inf
    for j in np.argsort(result.members_loss):
        if (loss := problem.loss(weights[[*chosen, j]].mean(0))) < lowest:
            chosen, lowest = [*chosen, int(j)], loss
    assert np.flatnonzero(result.chosen).tolist() == sorted(chosen)
    assert 1 < len(chosen) < 6
    assert result.exact[-1] == pytest.approx(lowest)


def derivative(x: Tensor, first: list[Tensor], y: Tensor, second: list[Tensor], length: float) -> float:
    """That of the kernel along directions in x and in y, by automatic differentiation."""
    steps = torch.zeros(len(first) + len(second), dtype=torch.float64, requires_grad=True).unbind()
    x = x + sum(step * u for step, u in zip(steps, first, strict=False))
    y = y + sum(step * v for step, v in zip(steps[len(first) :], second, strict=True))
    value = torch.exp(-(x - y).square().sum() / (2 * length**2))
    for step in steps:
        (value,) = torch.autograd.grad(value, step, create_graph=True)
    return value.item()


ORDERS = [*itertools.product(range(3), repeat=2)]


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_covariances_of_derivatives_are_those_of_the_kernel(first: int, second: int) -> None:
    draw = np.random.default_rng(first + 3 * second)
    a, b = (draw.normal(size=(1 + order, m, 3)) for m, order in ((2, first), (4, second)))
    blocks = [connection._Block(rows[0], tuple(rows[1:])) for rows in (a, b)]
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    wanted = [
        [derivative(x[0, i], [*x[1:, i]], y[0, j], [*y[1:, j]], 1.3) for j in range(4)] for i in range(2)
    ]
    np.testing.assert_allclose(connection._covariance(*blocks, 1.3), wanted, atol=1e-12)


def test_the_interval_is_that_of_the_mixture() -> None:
    means, scales, draw = np.array([[0.0], [1.0]]), np.array([[1.0], [0.2]]), np.random.default_rng(0)
    ends = connection._quantiles(means, scales, 5)
    drawn = (means + scales * draw.standard_t(5, size=(2, 200_000))).ravel()
    np.testing.assert_allclose(np.ravel(ends), np.quantile(drawn, [0.05, 0.95]), atol=0.02)


def test_networks_far_apart_get_no_prediction_and_are_not_chosen() -> None:
    x, y = averages.images("digits", 500)
    found = []
    for seed, counts in ((3, (300, 20)), (4, (300,))):  # two of one run, and an independent one
        net = averages.network("mlp", seed, x, widths=[64, 20, 10])
        for count in counts:
            found += averages.steps(net, x, y, count, 0.3, seed=seed)
    problem = averages.problem_of(net, x, y)
    result = landscape.average(problem, found, [[1, 1, 0], [1, 0, 1]])
    assert result.inside.all()
    assert (result.high - result.low)[0] < 0.03 < np.inf == result.high[1]
    assert not (result.chosen[2] and result.chosen[:2].any())
    assert "the members are too far apart" in result.summary()


def test_batchnorm_statistics_are_estimated_at_the_average() -> None:
    members = next(averages.with_batchnorm())
    result = landscape.average(members.problem, members.weights, bn_samples=500)
    again = members.problem.with_batchnorm("recalibrate", 500)
    assert result.exact[0] == pytest.approx(again.loss(members.weights.mean(0)), abs=1e-6)
    np.testing.assert_allclose(result.members_loss, [again.loss(w) for w in members.weights], rtol=1e-5)
    assert abs(members.problem.loss(members.weights.mean(0)) - result.exact[0]) > 10 * abs(
        result.loss[0] - result.exact[0]
    )
    assert (result.bn, result.bn_samples) == ("recalibrate", 500)
    assert "estimated again" in result.summary()


def test_equal_members_weigh_and_what_is_not_exact_is_nan() -> None:
    problem = problems.mlp()
    weights = problems.around(problem, 3, 0.1)
    doubled = landscape.average(problem, weights[[0, 1, 1]])  # equal ones among others are only weights
    assert doubled.loss[0] == pytest.approx(landscape.average(problem, weights[:2], [1, 2]).loss[0], rel=1e-4)
    relu = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3))
    other = Problem(relu, nn.functional.cross_entropy, (torch.randn(9, 6), torch.zeros(9).long()))
    assert np.isnan(landscape.average(other, problems.around(other, 2, 0.1), exact=False).exact).all()

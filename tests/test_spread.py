"""The learners' spread in the sharp subspace, and smoothed losses, against dense matrices and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape import Problem, plots, smoothing
from landscape.analysis.spread import displacement
from landscape.data.base import mean_output
from tests import problems
from tests.battery.case import net as network
from tests.conftest import slow_but
from tests.dense import dense_hessian


def check_against_dense(problem: Problem, weights: torch.Tensor, k: int, samples: int) -> None:
    mean, n = weights.mean(0), len(weights)
    h, g = problems.textbook_hessian(problems.at(problem, mean)), problems.textbook_gradient(problem, mean)
    values, vectors = (t.flip(-1)[..., :k] for t in torch.linalg.eigh(h))
    spread = weights - mean
    c = spread.T @ spread / n
    found = landscape.disagreement(problem, weights, k, residual_tol=1e-8, search="exact")
    np.testing.assert_allclose(found.values, values, rtol=1e-6)
    shares = torch.stack([v @ c @ v for v in vectors.T]) / c.trace()
    np.testing.assert_allclose(found.spread_share, shares, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(found.gradient_share, (vectors.T @ g) ** 2 / (g @ g), rtol=1e-4, atol=1e-9)
    assert found.consensus == pytest.approx(float(c.trace()), rel=1e-9)
    assert found.cost == pytest.approx(float(torch.trace(h @ c)) / 2, rel=1e-8)
    top = float(sum(value * (v @ c @ v) for value, v in zip(values, vectors.T, strict=True))) / 2
    assert found.cost_top == pytest.approx(top, rel=1e-4)
    p = torch.linalg.pinv(spread, rtol=1e-9) @ spread  # (P, P), the projector on the span
    q = vectors @ vectors.T
    assert found.gradient_in_span == pytest.approx(float((p @ g) @ (p @ g) / (g @ g)), rel=1e-6)
    sharp = q @ g
    dominant = float((p @ sharp).square().sum() / (sharp @ sharp))
    assert found.dominant_in_span == pytest.approx(dominant, rel=1e-4)
    assert found.rank == min(n - 1, len(g))
    assert found.loss == pytest.approx(problem.loss(mean), rel=1e-12)
    assert found.learners_loss == pytest.approx(np.mean([problem.loss(w) for w in weights]), rel=1e-12)
    # The jackknife, learner by learner, with the mean of the others.
    without, costs = [], []
    for j in range(n):
        rest = torch.cat([weights[:j], weights[j + 1 :]])
        away = rest - rest.mean(0)
        without.append(float((away @ vectors).square().sum() / away.square().sum()))
        costs.append(float(torch.einsum("ni,ij,nj->", away, h, away)) / (n - 1) / 2)
    assert found.standard_error == pytest.approx((n - 1) ** 0.5 * np.std(without), rel=1e-3)
    assert found.cost_error == pytest.approx((n - 1) ** 0.5 * np.std(costs), rel=1e-6)
    assert (found.samples, found.learners, found.parameters) == (samples, n, len(g))
    assert found.chance == k / len(g)


def test_a_network_matches_dense_matrices() -> None:
    check_against_dense(problems.mlp(samples=30), problems.around(problems.mlp(samples=30), 5), 4, 30)
    few = problems.linear_regression()  # with parameters that are not used
    check_against_dense(few, problems.around(few, 4, 0.3), 2, 40)
    square = problems.quadratic([3.0, 1.0])
    found = landscape.disagreement(square, problems.around(square, 6), 1)  # more learners than parameters
    assert (found.rank, found.gradient_in_span, found.dominant_in_span) == (2, *[pytest.approx(1)] * 2)
    # To second order the cost is that of the losses: of a quadratic exactly.
    assert found.learners_loss - found.loss == pytest.approx(found.cost)


def test_the_mean_of_learners_in_float32_adds_nothing() -> None:
    model = torch.nn.Linear(50, 3)
    x, y = torch.randn(40, 50), torch.randint(3, (40,))
    problem = Problem(model, torch.nn.functional.cross_entropy, (x, y))
    weights = problem.weights + 1e-5 * torch.randn(6, problem.weights.numel())  # close to rounding
    found = landscape.disagreement(problem, weights, 2)
    exact = landscape.disagreement(problem.to(torch.float64), weights, 2)
    assert found.rank == 5
    assert found.consensus == pytest.approx(exact.consensus, rel=1e-6)
    assert found.gradient_in_span == pytest.approx(exact.gradient_in_span, rel=1e-3)


def test_two_learners_have_no_error_and_a_zero_gradient_no_share() -> None:
    problem = problems.quadratic([3.0, 1.0], start=0.0)
    found = landscape.disagreement(problem, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double(), k=1)
    assert np.isnan([found.standard_error, found.cost_error]).all()
    exact = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]).double()
    zero = landscape.disagreement(problem, exact, 1)
    assert zero.grad_norm2 == 0
    assert np.isnan([*zero.gradient_share, zero.gradient_in_span, zero.dominant_in_span]).all()
    assert 0 <= zero.value <= 1
    assert plots.draw([zero]).axes


def test_batches_and_batchnorm_with_the_statistics_of_the_mean() -> None:
    problem = problems.conv()
    assert problem.resident is not None
    x, y = problem.resident
    batches = Problem(problem.model, problem.criterion, [(x[:12], y[:12]), (x[12:], y[12:])])
    weights = problems.around(problem, 4, 0.05)
    check_against_dense(problem, weights, 3, 20)
    whole, found = (landscape.disagreement(p, weights, 3) for p in (problem, batches))
    assert (found.batchnorm, found.bn) == (True, "center")
    for name in ("value", "cost", "gradient_in_span", "learners_loss"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-4)
    again = landscape.disagreement(problem.with_batchnorm("recalibrate", 10), weights, 3)
    assert (again.bn, again.bn_samples) == ("recalibrate", 10)
    assert again.learners_loss != found.learners_loss
    assert "BatchNorm" in plots.draw([again]).get_caption()  # type: ignore[attr-defined]


EIGENVALUES = [-0.5, 0.2, 1.0, 3.0]


def cosine() -> Problem:
    """Σ_i a_i (1 − cos w_i): smoothed by N(0, Σ), the i-th curvature a_i cos w_i shrinks by exp(−Σ_ii/2)."""
    w, a = nn.Parameter(torch.zeros(3).double()), torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    model = network(lambda m, x: (m.a * (1 - m.w.cos())).sum() + 0 * x[:, 0], w=w, a=a)
    return Problem(model, mean_output, (torch.zeros(5, 1).double(), torch.zeros(5)))


def learners(size: int, scale: float = 0.3, n: int = 5) -> Tensor:
    return scale * torch.randn(n, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_quadratic_is_smoothed_to_itself_and_a_constant() -> None:
    problem, weights = problems.quadratic(EIGENVALUES), learners(4)
    path = torch.cumsum(learners(4, n=4), 0)
    found = smoothing(problem, weights, draws=40, k=4, trajectory=path, residual_tol=1e-8)
    mean = weights.mean(0)
    spread = weights - mean
    h, covariance = dense_hessian(problem), spread.T @ spread / 5
    trace = float((h @ covariance).trace())
    assert found.trace_hs == pytest.approx(trace)
    assert found.consensus == pytest.approx(float(covariance.trace()))
    isotropic = found.consensus / 4 * sum(EIGENVALUES)
    for value, error, exact in zip(found.loss_smooth, found.loss_smooth_se, (trace, isotropic), strict=True):
        assert 0 < error < 0.1
        assert abs(value - found.loss - exact / 2) < 4 * error
    np.testing.assert_allclose([found.lambda_max, *found.lambda_smooth], 3.0)
    np.testing.assert_allclose([found.lambda_smooth_se, found.lambda_smooth_bias], 0, atol=1e-9)
    np.testing.assert_allclose(found.rates, 2 / 3)
    np.testing.assert_allclose(found.eigenvalues, EIGENVALUES[::-1])
    assert found.share.sum() == pytest.approx(1)
    steps = path[1:] - path[:-1]
    slopes = (steps @ h).norm(dim=1) / steps.norm(dim=1)
    np.testing.assert_allclose(found.lipschitz, slopes)
    np.testing.assert_allclose(found.lipschitz_smooth, np.stack([slopes] * 2))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_a_cosine_is_smoothed_as_its_transform_says(scale: float) -> None:
    weights = learners(3, scale)
    weights = weights - weights.mean(0)  # w_a = 0, its minimum
    found = smoothing(cosine(), weights, draws=100, residual_tol=1e-6)
    variances = (weights**2).mean(0).numpy(), np.full(3, found.consensus / 3)
    a = np.array([4.0, 2.0, 1.0])
    for k, variance in enumerate(variances):
        shrunk = np.exp(-variance / 2)
        # A mean of 100 has its largest eigenvalue too high by the bias, which it knows.
        error = 4 * found.lambda_smooth_se[k] + 2 * found.lambda_smooth_bias[k]
        assert 0 < error < 0.5
        assert abs(found.lambda_smooth[k] - (a * shrunk).max()) < error
        assert abs(found.loss_smooth[k] - (a * (1 - shrunk)).sum()) < 4 * found.loss_smooth_se[k]
    assert found.lambda_max == pytest.approx(4.0)
    assert (found.lambda_smooth < 4.0).all()


@pytest.mark.parametrize("name", slow_but(["conv"], ["mlp relu", "conv"]))
def test_the_fast_path_is_the_mean_of_dense_hessians(name: str) -> None:
    problem = problems.ALL[name]()
    weights = problem.weights + learners(problem.layout.size, 0.1, 3)
    found = smoothing(problem, weights, draws=3, residual_tol=1e-6, trajectory=weights)
    mean = weights.mean(0)
    for k, kind in enumerate(("measured", "isotropic")):
        shifts = [displacement(weights - mean, kind, found.consensus, 0, i) for i in range(3)]
        points = [mean + sign * d for d in shifts for sign in (1, -1)]
        h = torch.stack([dense_hessian(problem, p) for p in points]).mean(0)
        assert found.lambda_smooth[k] == pytest.approx(float(torch.linalg.eigvalsh(h)[-1]), rel=1e-5)
        assert found.loss_smooth[k] == pytest.approx(np.mean([problem.loss(p) for p in points]))
        around = [torch.stack([problem.gradient(w + p - mean) for p in points]).mean(0) for w in weights]
        changes, steps = (torch.stack([*x]).diff(dim=0).norm(dim=1) for x in (around, weights))
        slope = (changes / steps).tolist()
        np.testing.assert_allclose(found.lipschitz_smooth[k], slope, rtol=1e-6)


def test_displacements_have_the_covariance_they_are_named_for() -> None:
    spread = learners(3) - learners(3).mean(0)
    variance = float((spread**2).sum()) / 5
    for kind, exact in (("measured", spread.T @ spread / 5), ("isotropic", torch.eye(3) * variance / 3)):
        drawn = torch.stack([displacement(spread, kind, variance, 0, i) for i in range(4000)])
        torch.testing.assert_close(drawn.T @ drawn / 4000, exact.to(drawn), atol=0.1 * variance, rtol=0)

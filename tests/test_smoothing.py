"""Smoothed losses: closed forms on a quadratic and on a cosine, within their own error bars."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from landscape import FailedError, InputError, Problem, smoothing
from landscape.analysis.smoothing import displacement
from landscape.data.synthetic import mean_output
from tests import problems
from tests.conftest import slow_but
from tests.dense import dense_hessian

EIGENVALUES = [-0.5, 0.2, 1.0, 3.0]


class Cosine(nn.Module):
    """Σ_i a_i (1 − cos w_i): smoothed by N(0, Σ), the i-th curvature a_i cos w_i shrinks by exp(−Σ_ii/2)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("a", torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * (1 - self.w.cos())).sum() + 0 * x[:, 0]


def cosine() -> Problem:
    data = torch.zeros(5, 1, dtype=torch.float64), torch.zeros(5)
    return Problem(Cosine(), mean_output, data)


def learners(size: int, scale: float = 0.3, n: int = 5) -> Tensor:
    return scale * torch.randn(n, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_quadratic_is_smoothed_to_itself_and_a_constant() -> None:
    problem, weights = problems.quadratic(EIGENVALUES), learners(4)
    path = torch.cumsum(learners(4, n=4), 0)
    found = smoothing(problem, weights, pairs=40, top=4, path=path, tol=1e-8)
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
    found = smoothing(cosine(), weights, pairs=100, tol=1e-6)
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
    weights = problem.theta + learners(problem.layout.size, 0.1, 3)
    found = smoothing(problem, weights, pairs=3, tol=1e-6, path=weights)
    mean = weights.mean(0)
    for k, kind in enumerate(("measured", "isotropic")):
        shifts = [displacement(weights - mean, kind, found.consensus, 0, i) for i in range(3)]
        points = [mean + sign * d for d in shifts for sign in (1, -1)]
        h = torch.stack([dense_hessian(problem, p) for p in points]).mean(0)
        assert found.lambda_smooth[k] == pytest.approx(float(torch.linalg.eigvalsh(h)[-1]), rel=1e-5)
        assert found.loss_smooth[k] == pytest.approx(np.mean([problem.loss(p) for p in points]))
        smooth = [
            torch.stack([problem.gradient(w + s * d) for d in shifts for s in (1, -1)]).mean(0)
            for w in weights
        ]
        slope = [
            float((smooth[i + 1] - smooth[i]).norm() / (weights[i + 1] - weights[i]).norm()) for i in (0, 1)
        ]
        np.testing.assert_allclose(found.lipschitz_smooth[k], slope, rtol=1e-6)


def test_displacements_have_the_covariance_they_are_named_for() -> None:
    spread = learners(3) - learners(3).mean(0)
    variance = float((spread**2).sum()) / 5
    for kind, exact in (("measured", spread.T @ spread / 5), ("isotropic", torch.eye(3) * variance / 3)):
        drawn = torch.stack([displacement(spread, kind, variance, 0, i) for i in range(4000)])
        torch.testing.assert_close(drawn.T @ drawn / 4000, exact.to(drawn), atol=0.1 * variance, rtol=0)


def test_what_cannot_be_smoothed_is_refused() -> None:
    problem = problems.quadratic(EIGENVALUES)
    with pytest.raises(FailedError, match="their consensus distance is 0, there is no spread"):
        smoothing(problem, torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="learners: 1 is not allowed"):
        smoothing(problem, learners(4, n=1))

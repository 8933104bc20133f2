"""The four Δ(2) numbers against closed forms on the quadratic and dense matrices on a small network."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, Problem
from landscape.data.synthetic import mean_output
from tests import problems

SPECTRUM = [0.2, 1.0, 3.0, -0.5]


def spread_quadratic(curvature_std: float, gradient_std: float) -> tuple[Problem, torch.Tensor]:
    """A quadratic whose samples differ in curvature and gradient, and four learners around w = 1."""
    model = landscape.models.build("quadratic", eigenvalues=SPECTRUM)
    data = landscape.data.load(
        "quadratic", dimension=4, samples=500, curvature_std=curvature_std, gradient_std=gradient_std
    )
    problem = Problem(model, mean_output, data.train)
    noise = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return problem, problem.theta + 0.3 * noise


def test_with_one_common_hessian_all_but_eq4_vanish() -> None:
    problem, weights = spread_quadratic(0.0, 0.5)
    n, lr = 4, 0.7
    spread = weights - weights.mean(0)
    h = problem.model.get_buffer("hessian")
    estimate = landscape.estimate_noise(problem, weights, lr, local_batch=5, draws=4)
    assert estimate.eq4 == pytest.approx(float(lr**2 / n**2 * (spread @ h).square().sum()), rel=1e-10)
    assert estimate.direct == pytest.approx(np.zeros(4), abs=1e-25)
    assert estimate.first_order == pytest.approx(np.zeros(4), abs=1e-25)
    assert estimate.full_batch == pytest.approx(0, abs=1e-25)


@pytest.mark.slow
def test_with_varying_curvature_the_closed_form_lies_within_the_error_bar() -> None:
    problem, weights = spread_quadratic(0.4, 0.5)
    n, lr, batch = 4, 0.7, 5
    spread = weights - weights.mean(0)
    h = problem.model.get_buffer("hessian")
    estimate = landscape.estimate_noise(problem, weights, lr, local_batch=batch, draws=400, seed=1)
    # δ = n⁻¹ Σ s_j H Δw_j with s_j the mean of B draws: variance std²/B, independent between learners.
    truth = float(lr**2 * 0.4**2 / batch / n**2 * (spread @ h).square().sum())
    for name in ("direct", "first_order"):
        mean, error = estimate.summary()[name]
        assert 0 < error < 0.2 * truth
        assert abs(mean - truth) < 4 * error
    np.testing.assert_allclose(
        estimate.direct, estimate.first_order, rtol=1e-9
    )  # a quadratic has no higher order
    # Δ_S: α²‖P⊥(g_S)‖²; here g_S = s̄ H w_a + b̄, whose part orthogonal to g = H w_a is P⊥ b̄, in 3 of 4 dimensions.
    mean, error = estimate.summary()["delta_s"]
    assert abs(mean - lr**2 * 3 * 0.5**2 / (n * batch)) < 4 * error


def test_a_network_matches_dense_matrices_draw_by_draw() -> None:
    problem = problems.mlp(samples=30)
    weights = problem.theta + 0.2 * torch.randn(3, problem.layout.size, dtype=torch.float64)
    mean, lr, batch = weights.mean(0), 0.5, 6
    estimate = landscape.estimate_noise(problem, weights, lr, batch, draws=3, seed=9)
    generator = torch.Generator().manual_seed(9)
    g = problems.textbook_gradient(problem, mean)
    project = torch.eye(len(g), dtype=torch.float64) - torch.outer(g, g) / (g @ g)
    for k in range(3):
        delta, first, shared = 0, 0, 0
        for j, indices in enumerate(torch.randint(30, (3, batch), generator=generator)):
            part = problem.subset(indices)
            at_mean = Problem(part.model, part.criterion, part.tensors or (), theta=mean)
            own, ours = (problems.textbook_gradient(part, w) for w in (weights[j], mean))
            delta, shared = delta + (own - ours) / 3, shared + ours / 3
            first = first + problems.textbook_hessian(at_mean) @ (weights[j] - mean) / 3
        assert estimate.direct[k] == pytest.approx(float(lr**2 * delta @ delta), rel=1e-9)
        assert estimate.first_order[k] == pytest.approx(float(lr**2 * first @ first), rel=1e-9)
        p_delta, p_shared = project @ delta, project @ shared
        assert estimate.delta_2[k] == pytest.approx(float(lr**2 * p_delta @ p_delta), rel=1e-9)
        assert estimate.delta_s[k] == pytest.approx(float(lr**2 * p_shared @ p_shared), rel=1e-9)
        assert estimate.delta_cross[k] == pytest.approx(float(2 * lr**2 * p_delta @ p_shared), rel=1e-8)
    full = sum(problems.textbook_gradient(problem, w) for w in weights) / 3 - g
    assert estimate.full_batch == pytest.approx(float(lr**2 * full @ full), rel=1e-9)
    centred = Problem(problem.model, problem.criterion, problem.tensors or (), theta=mean)
    h = problems.textbook_hessian(centred)
    assert estimate.eq4 == pytest.approx(float(lr**2 * ((weights - mean) @ h).square().sum() / 9), rel=1e-9)
    c = (weights - mean).T @ (weights - mean) / 9  # the weight covariance matrix as Eq. 4 writes it
    assert estimate.eq4 == pytest.approx(float(lr**2 * torch.trace(h @ c @ h)), rel=1e-9)


def test_batchnorm_takes_the_statistics_of_minibatches() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
    ).double()
    x, y = torch.randn(23, 5, dtype=torch.float64), torch.randint(3, (23,))
    problem = Problem(model, torch.nn.functional.cross_entropy, (x, y))
    weights = problem.theta + 0.1 * torch.randn(2, problem.theta.numel(), dtype=torch.float64)
    estimate = landscape.estimate_noise(problem, weights, 0.3, local_batch=5, draws=2, seed=4)

    def gradient(theta: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        own = copy.deepcopy(model).train()
        torch.nn.utils.vector_to_parameters(theta, own.parameters())
        torch.nn.functional.cross_entropy(own(x[indices]), y[indices]).backward()
        return torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])

    # 20 of the 23 samples are four whole minibatches; draws are from these.
    draw, mean = torch.Generator().manual_seed(4), weights.mean(0)
    parts = torch.arange(20).split(5)
    for k in range(2):
        indices = torch.randint(20, (2, 5), generator=draw)
        delta = sum(gradient(w, i) - gradient(mean, i) for w, i in zip(weights, indices, strict=True)) / 2
        assert estimate.direct[k] == pytest.approx(0.3**2 * float(delta @ delta), rel=1e-9)
    full = sum(gradient(w, p) - gradient(mean, p) for w in weights for p in parts) / 8
    assert estimate.full_batch == pytest.approx(0.3**2 * float(full @ full), rel=1e-9)


def test_bad_arguments_name_themselves() -> None:
    problem, weights = spread_quadratic(0.0, 0.0)
    batches = Problem(problem.model, mean_output, [problem.tensors or ()])
    for match, of, learners in (("learners: 1", problem, weights[:1]), ("tensors", batches, weights)):
        with pytest.raises(InputError, match=match):
            landscape.estimate_noise(of, learners, 1.0, 5)

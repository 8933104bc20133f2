"""The local learning coefficient against a textbook loop, exact posteriors, and coefficients that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape import InputError, OperationError, Problem
from landscape.analysis.learning_coefficient import Langevin
from landscape.gradients.minibatches import stream
from tests import problems

# Bounds for tests that are to be quick: few steps, and R̂ that is not yet small.
QUICK = {"max_steps": 1000, "max_rhat": 1.2}


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood of a normal distribution of variance 1, but for a constant."""
    return 0.5 * (outputs - targets).square().sum(1).mean()


def regression(scale: float = 1.0, samples: int = 500, spread: float = 1.0) -> Problem:
    """Least squares at its minimum: 4 parameters, inputs in units of ``scale``, as unequal as ``spread``."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1, 0.7, 0.5, 1.5], dtype=torch.float64) ** spread
    x = torch.randn(samples, 4, dtype=torch.float64, generator=generator) * sizes
    y = x.sum(1, keepdim=True) + torch.randn(samples, 1, dtype=torch.float64, generator=generator)
    x = x * scale
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    theta = torch.linalg.lstsq(x, y).solution.flatten()
    return Problem(model, half_squares, (x, y), weights=theta, dtype=torch.float64)


def coefficient_of_a_quadratic(problem: Problem, localization: float) -> float:
    """½ Σ nβh/(nβh + γ) over the eigenvalues h of the Hessian: P/2 where γ is small."""
    h = torch.linalg.eigvalsh(problems.textbook_hessian(problem)).numpy()
    s = problem.samples / math.log(problem.samples) * h
    return float((s / (s + localization)).sum() / 2)


def two_layers(m: int, h: int, n: int) -> Problem:
    """½‖BA‖² exactly, A (h, m), B (n, h), at the most singular of its minima, 0."""
    x = math.sqrt(m) * torch.eye(m, dtype=torch.float64)  # of mean square 1
    model = nn.Sequential(nn.Linear(m, h, bias=False), nn.Linear(h, n, bias=False))
    theta, y = torch.zeros(h * (m + n)), torch.zeros(m, n, dtype=torch.float64)
    return Problem(model, half_squares, (x, y), weights=theta, dtype=torch.float64)


def exact_two_layers(m: int, h: int, n: int, nbeta: float, draws: int = 100_000) -> float:
    """nβ E L of ``two_layers`` with γ = 1: draws of A, and B integrated out."""
    a = np.random.default_rng(0).normal(size=(draws, h, m))
    s = np.linalg.eigvalsh(a @ a.transpose(0, 2, 1)).clip(0)
    log_weight = -n / 2 * np.log(nbeta * s + 1).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    return float((weight * (n / 2 * (nbeta * s / (nbeta * s + 1)).sum(1))).sum() / weight.sum())


def test_steps_are_those_of_the_algorithm() -> None:
    problem, chains, batch, steps = problems.mlp(samples=30), 3, 6, 4
    eps, nbeta, gamma = 0.02, 9.0, 3.0
    sampler = Langevin(problem, batch, chains, step_size=eps, nbeta=nbeta, localization=gamma, seed=5)
    rise, heating, distance2 = sampler.run(steps)
    minibatches, noise = stream(5, 0), torch.Generator()
    noise.manual_seed(int(torch.randint(2**62, (), generator=stream(5, 1))))
    start = problem.weights
    w = start.repeat(chains, 1)
    for t in range(steps):
        parts = [problem.subset(i) for i in torch.randint(30, (chains, batch), generator=minibatches)]
        a = torch.stack([nbeta * problems.textbook_gradient(p, v) for p, v in zip(parts, w, strict=True)])
        d = w - start
        g = a + gamma * d
        rises = [nbeta * (p.loss(v) - p.loss(start)) for p, v in zip(parts, w, strict=True)]
        np.testing.assert_allclose(rise[:, t], rises, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(distance2[:, t], d.square().sum(1), rtol=1e-9)
        for c in range(chains):
            skew = [(a[c] @ d[e] - a[e] @ d[c]) ** 2 / 2 for e in range(chains) if e != c]
            assert heating[c, t] == pytest.approx(
                float(eps / 8 * (a[c] @ g[c] - gamma * sum(skew) / 2)), rel=1e-8
            )
        w = w - eps / 2 * g + math.sqrt(eps) * torch.empty_like(w).normal_(generator=noise)


@pytest.mark.parametrize("scale", [*(pytest.param(s, marks=pytest.mark.slow) for s in (0.3, 1.0)), 20.0])
def test_a_regular_model_has_half_of_its_parameters_in_any_units(scale: float) -> None:
    problem = regression(scale)
    found = landscape.learning_coefficient(problem, 256, localization=0.1, seed=1, **QUICK)
    truth = coefficient_of_a_quadratic(problem, 0.1)
    assert truth == pytest.approx(2.0, abs=0.05)
    assert abs(found.value - truth) < 4 * found.standard_error < 2
    assert found.chain_values.mean() == pytest.approx(found.value)
    kept = (found.rise - found.heating)[:, found.burn_in :].reshape(20, -1).mean(1)
    assert found.standard_error >= kept.std(ddof=1) / math.sqrt(20) * (1 - 1e-12)
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(found.value)
    assert high - low == pytest.approx(2 * 2.093 * found.standard_error, rel=1e-3)  # Student's t, 19
    assert found.mean_loss == pytest.approx(problem.loss() + found.value / found.nbeta)


@pytest.mark.slow
def test_minibatches_and_steps_that_are_too_large_are_corrected_for() -> None:
    problem = regression()
    truth = coefficient_of_a_quadratic(problem, 20.0)
    assert truth < 1.8  # γ counts
    step = 0.02 / problem.samples * math.log(problem.samples)
    sampler = Langevin(problem, 64, 8, step_size=20 * step, nbeta=1 / step / 50, localization=20.0, seed=3)
    rise, heating, _ = sampler.run(1200)[:, :, 200:]
    error = np.std((rise - heating).mean(1), ddof=1) / math.sqrt(8)
    assert abs((rise - heating).mean() - truth) < 4 * error
    assert rise.mean() - truth > 8 * error


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 1), (3, 1, 2), (2, 2, 2)])
def test_linear_networks_with_two_layers(sizes: tuple[int, int, int]) -> None:
    m, h, n = sizes
    found = landscape.learning_coefficient(
        two_layers(m, h, n), m, localization=1.0, nbeta=300.0, relative_error=0.03, max_steps=128_000
    )
    truth = exact_two_layers(m, h, n, 300.0)
    assert abs(found.value - truth) < 4 * found.standard_error < 0.5
    assert found.value < 0.8 * h * (m + n) / 2  # a singular model has less than P/2


@pytest.mark.slow
def test_the_error_bars_cover_the_truth() -> None:
    problem = regression(samples=200, spread=0.2)
    truth = coefficient_of_a_quadratic(problem, 1.0)
    results = [
        landscape.learning_coefficient(problem, 100, localization=1.0, max_rhat=1.05, seed=s)
        for s in range(200)
    ]
    deviations = np.array([(r.value - truth) / r.standard_error for r in results])
    assert 0.58 <= np.mean(np.abs(deviations) < 1) <= 0.8
    covered = np.mean([low <= truth <= high for low, high in (r.interval() for r in results)])
    print(f"{covered:.1%} covered; deviations of {deviations.std():.2f} standard errors")
    assert 0.92 <= covered <= 0.99
    assert abs(deviations.mean()) < 0.3


@pytest.mark.parametrize(("make", "options", "words"), [
    (regression, {"step_size": 1.0}, r"not finite after .* smaller step_size \(now 1\)"),
    (regression, {"step_size": 0.01, "batch": 8}, "heat up: .* larger batch"),
    (regression, {"step_size": 1e-5}, r"(do not mix: R-hat|still move away: ).* max_steps"),
    (lambda: moved(3.0), {"localization": 1.0}, "estimate is negative, .* train further"),
], ids=["runs away", "heats up", "does not mix", "no minimum"])  # fmt: skip
def test_refused_in_words(make: Callable[[], Problem], options: dict[str, float], words: str) -> None:
    given: dict[str, Any] = {"batch": 64, "localization": 1.0, "max_steps": 1000, "max_rhat": 1.05, **options}
    with pytest.raises(OperationError, match=words):
        landscape.learning_coefficient(make(), **given)


def moved(by: float) -> Problem:
    """The regression at weights that are not its minimum."""
    problem = regression()
    problem.weights.add_(by)
    return problem


def test_data_and_losses_that_it_is_not_defined_for() -> None:
    problem = problems.mlp()
    x, y = problem.tensors  # type: ignore[misc]
    for data, options, words in (
        ((x, y), {"weight_decay": 0.1}, "penalty: "),
        ((x[:1], y[:1]), {}, "nbeta: missing"),
    ):
        with pytest.raises(InputError, match=words):
            landscape.learning_coefficient(Problem(problem.model, problem.criterion, data, **options), 5)

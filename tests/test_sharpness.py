"""Sharpness against trust-region problems that are solved exactly, closed forms, and invariance."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import landscape
from landscape import InputError, Problem
from landscape.gradients.minibatches import stream
from tests import problems
from tests.conftest import Command
from tests.test_cli import one_line


def largest(h: np.ndarray, g: np.ndarray, rho: float) -> float:
    """max gᵀε + ½εᵀhε over ‖ε‖ ≤ ρ: (μ − h)ε = g, μ ≥ λ_max, ‖ε‖ = ρ, where h has a positive eigenvalue."""
    values, vectors = np.linalg.eigh(h)
    b = vectors.T @ g

    def excess(mu: float) -> float:
        return float(np.linalg.norm(b / (mu - values)) - rho)

    low, high = values[-1] + 1e-12, values[-1] + np.linalg.norm(b) / rho + 1
    e = b / (brentq(excess, low, high, xtol=1e-14) - values)
    return float(b @ e + 0.5 * e @ (values * e))


@settings(max_examples=20)  # each takes a tenth of a second
@given(
    st.lists(st.floats(-3, 5), min_size=3, max_size=6).filter(lambda v: max(v) > 0.5),
    st.floats(0.05, 2),
    st.booleans(),
)
def test_a_quadratic_has_its_trust_regions_maximum(spectrum: list[float], rho: float, adaptive: bool) -> None:
    problem = problems.quadratic(spectrum)
    problem.weights.copy_(torch.linspace(0.4, 1.3, len(spectrum)))
    h, w = problem.model.get_buffer("hessian").numpy(), problem.weights.numpy()
    c = np.abs(w) if adaptive else np.ones_like(w)
    exact = largest(c[:, None] * h * c, c * (h @ w), rho)
    found = landscape.sharpness(problem, rho, adaptive=adaptive, steps=300, starts=4)
    assert found.value <= exact + 1e-9
    assert found.value == pytest.approx(exact, rel=2e-3)
    assert found.standard_error == 0
    assert found.converged
    assert found.draws == 0


def noisy(samples: int = 400) -> Problem:
    """Least squares in 3 dimensions, of which minibatches have different Hessians."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, dtype=torch.float64, generator=generator)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(samples, 1, dtype=torch.float64, generator=generator)
    model = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.9, 1.2, 0.7]]))
    return Problem(model, torch.nn.functional.mse_loss, (x, y))


def test_minibatches_match_dense_matrices_draw_by_draw() -> None:
    problem, rho, m = noisy(), 0.4, 5
    found = landscape.sharpness(problem, rho, m=m, min_draws=6, max_draws=6, steps=200, starts=0, seed=3)
    generator = stream(3, 0)
    x, y = (t.numpy() for t in problem.tensors)  # type: ignore[union-attr]
    w = problem.weights.numpy()
    c, exact = np.abs(w), []
    for _ in range(6):
        rows = torch.randint(400, (m,), generator=generator).numpy()
        h, g = 2 * x[rows].T @ x[rows] / m, 2 * x[rows].T @ (x[rows] @ w - y[rows, 0]) / m
        exact.append(largest(c[:, None] * h * c, c * g, rho))
    np.testing.assert_allclose(found.values, exact, rtol=2e-3)
    assert found.standard_error == pytest.approx(np.std(exact, ddof=1) / 6**0.5, rel=0.02)
    assert (found.m, found.converged, found.draws) == (5, False, 6)


def test_adaptive_sharpness_does_not_see_the_scale_of_layers() -> None:
    problem = problems.mlp(activation="relu")
    scaled = problem.weights.clone()
    views = problem.layout.views(scaled)
    names = [slot.name for slot in problem.layout.slots]
    for name, factor in zip(names[:3], (5.0, 5.0, 0.2), strict=True):  # weight and bias, and the next weight
        views[name].mul_(factor)
    other = Problem(problem.model, problem.criterion, problem.resident, weights=scaled)
    assert other.loss() == pytest.approx(problem.loss())
    for options in ({"starts": 0}, {"kind": "average", "min_draws": 20, "max_draws": 20}):
        one, two = (landscape.sharpness(p, 0.3, **options).value for p in (problem, other))  # type: ignore[arg-type]
        assert two == pytest.approx(one, rel=1e-6)
    plain = [landscape.sharpness(p, 0.3, adaptive=False, starts=0).value for p in (problem, other)]
    assert abs(plain[0] / plain[1] - 1) > 0.1


def test_weights_that_are_zero_stay() -> None:
    problem = problems.conv()  # BatchNorm's bias begins at 0
    zeros = sum(int((t == 0).sum()) for t in problem.layout.views(problem.weights).values())
    assert landscape.sharpness(problem, 0.1, m=8, min_draws=3, max_draws=3).fixed == zeros > 0


def test_radii_and_minibatches_that_there_are_not() -> None:
    for options, words in (
        ({"rho": math.nan}, "rho: nan"),
        ({"rho": 0.1, "m": 54}, "m: 54 is not allowed, the data has 53"),
    ):
        with pytest.raises(InputError, match=words):
            landscape.sharpness(problems.mlp(), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="adaptive: all weights are 0"):
        landscape.sharpness(problems.quadratic([1.0, 2.0], start=0.0), 0.1)


def test_the_command_takes_several_radii(trained: Path, tmp_path: Path, command: Command) -> None:
    last, out = trained / "last.h5", tmp_path / "s.h5"
    code, text, err = command("sharpness", last, "--rho", "0.01", "--rho", "0.1", "-o", out)
    assert code == 0, err
    small, large = landscape.load(out)
    assert small.value < large.value
    alone = landscape.sharpness(landscape.load(last).problem(), 0.1)
    assert alone.value == pytest.approx(large.value, rel=1e-5)
    assert "lower bound" in text
    average = ["--rho", "0.1", "--kind", "average", "--min-draws", "3", "--max-draws", "3", "--m", "9"]
    code, text, err = command("sharpness", last, *average, "-o", tmp_path / "a.h5")
    assert code == 0, err
    assert re.search(r"converged +NO", text)
    one_line(command("sharpness", last), 2, "--rho")

"""The noise of minibatch gradients in the curvature, against dense matrices and a quadratic with known noise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, Problem
from landscape.analysis.noise import exponent
from landscape.data.synthetic import mean_output
from landscape.gradients.minibatches import stream
from tests import problems
from tests.conftest import Command
from tests.test_cli import one_line


def noisy(spectrum: list[float], gamma: float, samples: int = 4000) -> Problem:
    """A quadratic without rotation, whose samples have gradients of covariance diag(λ^γ) exactly."""
    model = landscape.models.build("quadratic", eigenvalues=spectrum, rotate=False)
    data = landscape.data.load("quadratic", dimension=len(spectrum), samples=samples, gradient_std=1.0)
    x = data.train[0].clone()
    b = x[:, 1:]
    white = b @ torch.linalg.inv(torch.linalg.cholesky(b.T @ b / samples)).T
    x[:, 1:] = white * torch.tensor(spectrum, dtype=torch.float64).abs() ** (gamma / 2)
    return Problem(model, mean_output, (x, data.train[1]), dtype=torch.float64)


def test_a_network_matches_dense_matrices_draw_by_draw() -> None:
    problem, batch, count, k = problems.mlp(samples=30), 6, 11, 3
    found = landscape.noise_alignment(problem, batch, k, max_draws=count, seed=9)
    h = problems.textbook_hessian(problem)
    g = problems.textbook_gradient(problem, problem.theta)
    values, vectors = torch.linalg.eigh(h)
    vectors = vectors.flip(1)[:, :k]
    generator, rows = stream(9, 0), []
    for _ in range(count):
        indices = torch.randint(30, (batch,), generator=generator)
        rows.append(problems.textbook_gradient(problem.subset(indices), problem.theta))
    drawn = torch.stack(rows)
    second = drawn.T @ drawn / count
    away = drawn - g
    c = away.T @ away / count
    assert found.ias == pytest.approx(float(torch.trace(h @ second) / second.trace()), rel=1e-8)
    assert found.noise_curvature == pytest.approx(float(torch.trace(h @ c) / c.trace()), rel=1e-8)
    np.testing.assert_allclose(found.covariance, [v @ c @ v for v in vectors.T], rtol=1e-2)
    np.testing.assert_allclose(found.values, values.flip(0)[:k], rtol=1e-3)
    assert found.trace_s == pytest.approx(float(second.trace()))
    without = []
    for j in range(count):
        rest = torch.cat([drawn[:j], drawn[j + 1 :]])
        without.append(float(torch.einsum("ni,ij,nj->", rest, h, rest) / rest.square().sum()))
    assert found.ias_error == pytest.approx((count - 1) ** 0.5 * np.std(without), rel=1e-6)
    assert (found.draws, found.reached) == (count, False)


def test_the_exponent_is_the_slope_of_logarithms() -> None:
    values = np.array([4.0, 2.0, 1.0, -1.0])
    squares = np.random.default_rng(0).chisquare(1, (50, 4)) * [8, 2, 1, 7]
    gamma, error, scatter = exponent(values, squares)
    fit, covariance = np.polyfit(np.log(values[:3]), np.log(squares.mean(0)[:3]), 1, cov="unscaled")
    assert gamma == pytest.approx(fit[0])
    misfit = np.log(squares.mean(0)[:3]) - np.polyval(fit, np.log(values[:3]))
    assert scatter == pytest.approx(np.sqrt((misfit @ misfit) * covariance[0, 0]))
    slopes = [
        np.polyfit(np.log(values[:3]), np.log(np.delete(squares, j, 0).mean(0)[:3]), 1)[0] for j in range(50)
    ]
    assert error == pytest.approx(7 * np.std(slopes), rel=1e-6)
    assert all(map(math.isnan, exponent(values[2:], squares[:, 2:])))
    assert math.isnan(exponent(values[:2], squares[:, :2])[2])
    assert all(map(math.isnan, exponent(np.ones(3), squares[:, :3])))


def test_data_and_losses_that_it_is_not_defined_for() -> None:
    problem = problems.mlp()
    assert problem.tensors is not None
    decayed = Problem(problem.model, problem.criterion, problem.tensors, weight_decay=0.1)
    with pytest.raises(InputError, match="penalty: "):
        landscape.noise_alignment(decayed, 5)


def test_the_command_has_the_batch_of_the_run(trained: Path, tmp_path: Path, command: Command) -> None:
    last = trained / "last.h5"
    assert command("noise-alignment", last, "--top-k", "3", "-o", tmp_path / "n.h5")[0] == 0
    saved = landscape.load(tmp_path / "n.h5")
    assert saved.batch == 40  # 4 learners of 10 samples
    problem = landscape.load(last).problem()
    assert landscape.noise_alignment(problem, 40, 3).ias == pytest.approx(saved.ias, rel=1e-4)
    torch.save(landscape.models.build("mlp", widths=[6, 8, 3]).state_dict(), tmp_path / "one.pt")
    own = ("--model", "mlp(widths=[6, 8, 3])", "--data", "synthetic")
    one_line(command("noise-alignment", tmp_path / "one.pt", *own), 2, "--batch", "one.pt")
    with pytest.raises(InputError, match="k: 999"):
        landscape.noise_alignment(problem, 40, 999)

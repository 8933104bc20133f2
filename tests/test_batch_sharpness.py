"""Batch sharpness against dense matrices, closed forms on the quadratic, and the command."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import Problem
from landscape.data.base import mean_output
from landscape.gradients.minibatches import stream
from tests import problems
from tests.conftest import Command, slow_but
from tests.test_cli import one_line

SPECTRUM = [0.2, 1.0, 3.0, -0.5]


def noisy(curvature_std: float, gradient_std: float = 0.0, samples: int = 500) -> Problem:
    """A quadratic whose samples differ in curvature and gradient."""
    model = landscape.models.build("quadratic", eigenvalues=SPECTRUM)
    data = landscape.data.load(
        "quadratic", dimension=4, samples=samples, curvature_std=curvature_std, gradient_std=gradient_std
    )
    return Problem(model, mean_output, data.train)


def along_gradient(problem: Problem) -> float:
    """wᵀH³w/wᵀH²w: the curvature of the quadratic along its gradient."""
    h, w = problem.model.get_buffer("hessian"), problem.weights
    return float((w @ h @ h @ h @ w) / (w @ h @ h @ w))


def dense(problem: Problem, theta: Tensor, indices: Tensor) -> tuple[float, float]:
    """gᵀHg/‖g‖² and ‖g‖² of a minibatch, from the whole matrix."""
    part = problem.subset(indices)
    g = problems.textbook_gradient(part, theta)
    own = copy.copy(part)
    own.weights = theta
    return float(g @ problems.textbook_hessian(own) @ g / (g @ g)), float(g @ g)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["saddle", "mlp tanh", "structured", "masked classes"],
        [name for name in (*problems.ALL, *problems.STRUCTURED) if name != "conv"],
    ),
)
def test_each_draw_is_that_of_the_dense_matrix(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    n, batch, draws = 2, 8, 2
    noise = torch.randn(n, problem.layout.size, dtype=torch.float64, generator=stream(5, 0))
    weights = problem.weights + 0.1 * noise
    result = landscape.batch_sharpness(
        problem, batch, weights=weights, min_draws=draws, max_draws=draws, seed=3
    )
    total, local = stream(3, 0), stream(3, 1)
    for k in range(draws):
        indices = torch.randint(problem.samples, (1, batch), generator=total)[0]
        curvature, norm2 = dense(problem, problem.weights, indices)
        assert result.curvature[k] == pytest.approx(curvature, rel=1e-8)
        assert result.norm2[k] == pytest.approx(norm2, rel=1e-8)
        for j, own in enumerate(torch.randint(problem.samples, (n, batch // n), generator=local)):
            curvature, norm2 = dense(problem, weights[j], own)
            assert result.learner_curvature[k, j] == pytest.approx(curvature, rel=1e-8)
            assert result.learner_norm2[k, j] == pytest.approx(norm2, rel=1e-8)
    assert result.local_batch == batch // n
    values = result.curvature
    assert result.standard_error == pytest.approx(abs(values[1] - values[0]) / 2)
    assert result.pooled == pytest.approx((values * result.norm2).sum() / result.norm2.sum())
    assert result.learner_value == pytest.approx(result.learner_curvature.mean())
    top = float(torch.linalg.eigvalsh(problems.textbook_hessian(problem))[-1])
    assert result.lambda_max == pytest.approx(top, rel=0.01)


def test_the_closed_form_lies_within_the_error_bar_and_the_error_is_as_small_as_asked() -> None:
    problem = noisy(1.0)
    truth = along_gradient(problem)
    few, many = (landscape.batch_sharpness(problem, 5, relative_error=tol, seed=2) for tol in (0.1, 0.02))
    for result in (few, many):
        assert abs(result.value - truth) < 4 * result.standard_error
        assert result.standard_error <= result.relative_error * abs(result.value)
        assert result.converged
        low, high = result.interval()
        assert low < result.value < high
    assert len(many.curvature) > 10 * len(few.curvature)


@pytest.mark.parametrize("bn", ["center", "recalibrate"])
def test_batchnorm_takes_the_statistics_of_minibatches_unless_it_is_told_otherwise(bn: str) -> None:
    problem, batch = problems.conv(samples=23).with_batchnorm(bn, 23), 6
    result = landscape.batch_sharpness(problem, batch, min_draws=2, max_draws=2)
    model, (x, y) = copy.deepcopy(problems.conv(samples=23).model), problems.conv(samples=23).tensors or ()
    if bn == "recalibrate":
        torch.optim.swa_utils.update_bn([x], model)
    model.train(bn == "center")

    def loss(theta: Tensor, indices: Tensor) -> Tensor:
        views = problem.layout.views(theta)
        outputs = torch.func.functional_call(copy.deepcopy(model), views, (x[indices],))
        return torch.nn.functional.cross_entropy(outputs, y[indices])

    generator = stream(0, 0)
    for k in range(2):
        indices = torch.randint(23, (1, batch), generator=generator)[0]
        g = torch.func.grad(loss)(problem.weights, indices)
        h = torch.autograd.functional.hessian(lambda t, i=indices: loss(t, i), problem.weights)
        assert result.curvature[k] == pytest.approx(float(g @ h @ g / (g @ g)), rel=1e-7)
    assert result.batchnorm
    assert (result.bn, result.bn_samples) == (("train", batch) if bn == "center" else ("recalibrate", 23))


def test_the_command_has_a_runs_batch_rate_and_limit(trained: Path, tmp_path: Path, command: Command) -> None:
    args = ("batch-sharpness", trained / "last.h5", "--max-draws", "16", "-o", tmp_path / "b.h5")
    code, _, err = command(*args)
    assert code == 0, err
    result = landscape.load(tmp_path / "b.h5")
    assert (result.batch, result.local_batch, result.lr) == (40, 10, 0.2)
    assert result.limit == pytest.approx(2 / 3)
    assert np.isfinite([result.lambda_max, result.learner_value]).all()
    more = ("--no-learners", "--no-lambda-max", "--force", "--batch")
    assert command(*args, *more, "10,20")[0] == 0
    assert [(r.batch, r.local_batch) for r in landscape.load(tmp_path / "b.h5")] == [(10, 0), (20, 0)]
    for text in ("x", "", "10,"):
        one_line(command(*args, *more, text), 2, f"--batch: '{text.removeprefix('10,')}'")
    one_line(command(*args, "--force", "--batch", "1"), 2, "no multiple of 4 learners")

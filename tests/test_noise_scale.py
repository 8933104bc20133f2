"""The gradient noise scale against textbook gradients, closed forms on the quadratic, and the command."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import FailedError, InputError, Problem
from landscape.cli.noise_scale import gradient_points
from landscape.data.synthetic import mean_output
from landscape.gradients.minibatches import Jackknife, from_round, stream
from landscape.results.shown import text_of
from landscape.train.recipes import recipe
from landscape.train.run import launch
from tests import problems
from tests.conftest import Command
from tests.test_cli import one_line

SPECTRUM = [0.2, 1.0, 3.0, -0.5]


def noisy(gradient_std: float, samples: int = 500) -> Problem:
    """A quadratic whose samples' gradients have exactly this standard deviation in each of 4 coordinates."""
    model = landscape.models.build("quadratic", eigenvalues=SPECTRUM)
    data = landscape.data.load("quadratic", dimension=4, samples=samples, gradient_std=gradient_std)
    return Problem(model, mean_output, data.train)


def norm2(problem: Problem) -> float:
    """‖∇L‖² = wᵀH²w."""
    return float((problem.model.get_buffer("hessian") @ problem.theta).square().sum())


@pytest.mark.parametrize("name", [name for name in (*problems.ALL, *problems.STRUCTURED) if name != "conv"])
def test_each_draw_is_that_of_textbook_gradients(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    n, batch, draws = 2, 8, 16
    noise = torch.randn(n, problem.layout.size, dtype=torch.float64, generator=stream(5, 0))
    weights = problem.theta + 0.1 * noise
    options: dict[str, Any] = {"draws": draws, "max_draws": draws, "seed": 3}
    result = landscape.noise_scale(problem, batch, weights=weights, **options)
    pairs = landscape.noise_scale(problem, batch, gradient="draws", **options)
    total, local = stream(3, 0), stream(3, 1)
    g = problems.textbook_gradient(problem, problem.theta)
    at_mean, rounds = [], []
    for _ in range(draws):
        indices = torch.randint(problem.samples, (1, batch), generator=total)[0]
        at_mean.append(problems.textbook_gradient(problem.subset(indices), problem.theta))
        own = torch.randint(problem.samples, (n, batch // n), generator=local)
        rounds.append(
            torch.stack([problems.textbook_gradient(problem.subset(i), w) for i, w in zip(own, weights, strict=True)])
        )  # fmt: skip
    drawn = torch.stack(at_mean)
    traces = batch * (drawn - g).square().sum(1).numpy()
    np.testing.assert_allclose(result.estimates, traces / float(g @ g), rtol=1e-8)
    assert result.trace == pytest.approx(traces.mean(), rel=1e-8)
    assert result.norm2 == pytest.approx(float(g @ g), rel=1e-8)
    assert result.norm2_error == 0
    # From pairs: the mean of all ⟨g_j, g_k⟩ of different draws, and the sample variance.
    gram = (drawn @ drawn.T).numpy()
    assert pairs.norm2 == pytest.approx(
        (gram.sum() - np.trace(gram)) / (draws * (draws - 1)), rel=1e-8, abs=1e-12
    )
    assert pairs.trace == pytest.approx(batch * float(drawn.var(0).sum()), rel=1e-8, abs=1e-12)
    # The learners: of each round the product of both gradients, and half of their squared distance.
    u = np.mean([float(r[0] @ r[1]) for r in rounds])
    v = np.mean([4 * float((r[0] - r[1]).square().sum()) / 2 for r in rounds])
    assert result.round_norm2 == pytest.approx(u, rel=1e-8, abs=1e-12)
    assert result.round_trace == pytest.approx(v, rel=1e-8, abs=1e-12)
    means = torch.stack([r.mean(0) for r in rounds])
    trace, square = from_round(means, batch)
    assert result.learner_norm2 == pytest.approx(square, rel=1e-8, abs=1e-12)
    assert result.learner_trace == pytest.approx(trace, rel=1e-8, abs=1e-12)


def test_the_jackknife_is_that_of_leaving_each_draw_out() -> None:
    draws = torch.randn(9, 5, dtype=torch.float64, generator=stream(0, 3)) + 0.7
    whole = Jackknife(draws[0], 3)
    for row in draws:
        whole.add(row[None])
    full = from_round(draws, 3)
    left = [from_round(torch.cat((draws[:k], draws[k + 1 :])), 3) for k in range(9)]
    scale = whole.scale()
    assert (scale.trace, scale.norm2) == pytest.approx(full)
    ratio, ratios = full[0] / full[1], np.array([a / b for a, b in left])
    np.testing.assert_allclose(scale.estimates, 9 * ratio - 8 * ratios)
    assert scale.standard_error == pytest.approx(np.sqrt(8 / 9 * np.square(ratios - ratios.mean()).sum()))


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 1000))
def test_a_round_is_the_sample_variance_and_the_mean_product_of_pairs(n: int, size: int, seed: int) -> None:
    rows = torch.randn(n, size, dtype=torch.float64, generator=stream(seed, 0))
    trace, square = from_round(rows, 7)
    gram = rows @ rows.T
    assert trace == pytest.approx(7 * float(rows.var(0).sum()), abs=1e-9)
    assert square == pytest.approx(float(gram.sum() - gram.trace()) / (n * (n - 1)), abs=1e-9)


def test_the_learners_have_the_closed_form_with_their_spread() -> None:
    problem = noisy(2.0)
    n, batch = 5, 30
    weights = problem.theta + 0.2 * torch.randn(n, 4, dtype=torch.float64, generator=stream(1, 1))
    own = weights @ problem.model.get_buffer("hessian")  # each learner's mean gradient
    variance, square = float(own.var(0).sum()), float(own.mean(0).square().sum())
    result = landscape.noise_scale(problem, n * batch, weights=weights, tol=0.05, seed=3)
    assert (result.learners, result.local_batch) == (n, batch)
    # The mean gradient's noise has no part of the spread; what single steps show has.
    assert abs(result.learner_trace - 16) < 4 * result.learner_trace_error
    assert abs(result.learner_norm2 - square) < 4 * result.learner_norm2_error
    assert abs(result.learner_value - 16 / square) < 4 * result.learner_standard_error
    assert abs(result.round_trace - (16 + batch * variance)) < 4 * result.round_trace_error
    assert abs(result.round_norm2 - (square - variance / n)) < 4 * result.round_norm2_error
    assert batch * variance > 4 * result.round_trace_error


def test_without_noise_it_is_zero_and_at_a_minimum_it_is_not_resolved() -> None:
    exact = landscape.noise_scale(noisy(0.0), 4, max_draws=20)
    assert exact.value == pytest.approx(0, abs=1e-25)
    flat = noisy(1.0)
    flat = Problem(flat.model, mean_output, flat.tensors or (), theta=torch.zeros(4))
    result = landscape.noise_scale(flat, 4, gradient="draws", max_draws=40)
    assert not result.converged
    assert not result.resolved
    assert "not told apart from 0" in text_of(result)


@pytest.mark.parametrize(
    ("seeds", "least", "most"), [(30, 0.8, 1.0), pytest.param(2000, 0.93, 0.97, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("size", [0.3, 0.6, 2.0])
def test_intervals_of_a_ratio_cover_the_truth_and_no_scale_is_negative(
    size: float, seeds: int, least: float, most: float
) -> None:
    """24 gradients with noise of variance 1 in each of 20 coordinates, around a small and a large g."""
    g, covered, open_ends = torch.full((20,), size / 20**0.5, dtype=torch.float64), [], 0
    for seed in range(seeds):
        estimator = Jackknife(g, 1)
        for row in g + torch.randn(24, 20, dtype=torch.float64, generator=stream(seed, 7)):
            estimator.add(row[None])
        scale = estimator.scale()
        low, high = scale.interval()
        covered.append(low <= 20 / size**2 <= high)
        open_ends += math.isinf(high)
        assert math.isnan(scale.value) == math.isinf(high)
        assert not scale.value < 0
    assert least <= np.mean(covered) <= (most if size > 1 else 1)  # without an upper end one tail is left
    print(f"‖g‖ = {size}: {np.mean(covered):.1%} covered, {open_ends / seeds:.1%} without an upper end")
    assert (open_ends > seeds / 2) == (size < 1)


def test_bad_input_is_named() -> None:
    problem = noisy(0.1)
    for match, weights in (
        ("weights: those of 1 learner", torch.ones(1, 4)),
        ("weights: shape", torch.ones(2, 5)),
        ("no multiple of the 3 learners", torch.ones(3, 4)),
    ):
        with pytest.raises(InputError, match=match):
            landscape.noise_scale(problem, 4, weights=weights)
    wild = torch.full((4,), 1e308, dtype=torch.float64)
    with pytest.raises(FailedError, match="not finite"):
        landscape.noise_scale(Problem(problem.model, mean_output, problem.tensors or (), theta=wild), 4)


def test_the_command_takes_learners_where_their_gradients_are(
    trained: Path, tmp_path: Path, tiny: Path, command: Command
) -> None:
    early, last, out = trained / "step-0000010.h5", trained / "last.h5", tmp_path / "n.h5"
    code, stdout, err = command("noise-scale", early, last, "-o", out)
    assert code == 0, err
    for result in landscape.load(out):
        assert (result.batch, result.local_batch, result.learners) == (40, 10, 4)
        assert np.isfinite([result.value, result.learner_value]).all()
    assert "mean of 4 learners" in stdout
    run = launch.launch(recipe.read(str(tiny), ["algorithm={name='ssgd'}"]), tmp_path / "ss")
    assert torch.equal(gradient_points(run), run.mean.expand_as(run.weights))
    assert not torch.equal(run.weights, run.mean.expand_as(run.weights))
    again = ("--no-learners", "--gradient", "draws", "--batch", "5", "-o", tmp_path / "m.h5")
    assert command("noise-scale", last, *again)[0] == 0
    one_line(
        command("noise-scale", last, "--batch", "6", "-o", tmp_path / "x.h5"),
        2,
        "--batch: 6 is no multiple of the 4 learners",
    )

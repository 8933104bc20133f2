"""The noise of gradients: Δ(2), the noise scale and the alignment, against closed forms and dense matrices."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, Problem
from landscape.analysis.noise import exponent
from landscape.cli.measures import gradient_points
from landscape.data.base import mean_output
from landscape.gradients.minibatches import GradientNoise, JackknifeEstimator, from_round, stream
from landscape.results.shown import text_of
from landscape.training.recipes import recipe
from landscape.training.run.loop import Trainer
from tests import problems
from tests.conftest import Command, slow_but
from tests.test_cli import one_line

SPECTRUM = [0.2, 1.0, 3.0, -0.5]


def test_with_one_common_hessian_all_but_eq4_vanish() -> None:
    problem, n, lr = noisy(0.5), 4, 0.7
    weights = problems.around(problem, n, 0.3)
    spread = weights - weights.mean(0)
    h = problem.model.get_buffer("hessian")
    estimate = landscape.noise(problem, weights, lr, local_batch=5, draws=4)
    assert estimate.eq4 == pytest.approx(float(lr**2 / n**2 * (spread @ h).square().sum()), rel=1e-10)
    found = [*estimate.direct, *estimate.first_order, estimate.full_batch]
    assert found == pytest.approx(np.zeros(9), abs=1e-25)


def test_a_network_matches_dense_matrices_draw_by_draw() -> None:
    problem = problems.mlp(samples=30)
    weights = problem.weights + 0.2 * torch.randn(3, problem.layout.size, dtype=torch.float64)
    mean, lr, batch = weights.mean(0), 0.5, 6
    estimate = landscape.noise(problem, weights, lr, batch, draws=3, seed=9)
    generator = torch.Generator().manual_seed(9)
    g = problems.textbook_gradient(problem, mean)
    project = torch.eye(len(g), dtype=torch.float64) - torch.outer(g, g) / (g @ g)
    for k in range(3):
        delta, first, shared = 0, 0, 0
        for j, indices in enumerate(torch.randint(30, (3, batch), generator=generator)):
            part = problem.subset(indices)
            own, ours = (problems.textbook_gradient(part, w) for w in (weights[j], mean))
            delta, shared = delta + (own - ours) / 3, shared + ours / 3
            first = first + problems.textbook_hessian(problems.at(part, mean)) @ (weights[j] - mean) / 3
        assert estimate.direct[k] == pytest.approx(float(lr**2 * delta @ delta), rel=1e-9)
        assert estimate.first_order[k] == pytest.approx(float(lr**2 * first @ first), rel=1e-9)
        p_delta, p_shared = project @ delta, project @ shared
        assert estimate.delta_2[k] == pytest.approx(float(lr**2 * p_delta @ p_delta), rel=1e-9)
        assert estimate.delta_s[k] == pytest.approx(float(lr**2 * p_shared @ p_shared), rel=1e-9)
        assert estimate.delta_cross[k] == pytest.approx(float(2 * lr**2 * p_delta @ p_shared), rel=1e-8)
    for name in ("direct", "first_order", "delta_s"):
        drawn = getattr(estimate, name)
        assert estimate.means()[name] == pytest.approx((drawn.mean(), drawn.std(ddof=1) / 3**0.5))
    full = sum(problems.textbook_gradient(problem, w) for w in weights) / 3 - g
    assert estimate.full_batch == pytest.approx(float(lr**2 * full @ full), rel=1e-9)
    h = problems.textbook_hessian(problems.at(problem, mean))
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
    weights = problem.weights + 0.1 * torch.randn(2, problem.weights.numel(), dtype=torch.float64)
    estimate = landscape.noise(problem, weights, 0.3, local_batch=5, draws=2, seed=4)

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


def noisy(gradient_std: float, samples: int = 500) -> Problem:
    """A quadratic whose samples' gradients have exactly this standard deviation in each of 4 coordinates."""
    model = landscape.models.build("quadratic", eigenvalues=SPECTRUM)
    data = landscape.data.load("quadratic", dimension=4, samples=samples, gradient_std=gradient_std)
    return Problem(model, mean_output, data.train)


def norm2(problem: Problem) -> float:
    """‖∇L‖² = wᵀH²w."""
    return float((problem.model.get_buffer("hessian") @ problem.weights).square().sum())


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["mlp tanh", "structured", "masked classes"],
        [name for name in (*problems.ALL, *problems.STRUCTURED) if name != "conv"],
    ),
)
def test_each_draw_is_that_of_textbook_gradients(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    n, batch, draws = 2, 8, 16
    noise = torch.randn(n, problem.layout.size, dtype=torch.float64, generator=stream(5, 0))
    weights = problem.weights + 0.1 * noise
    options: dict[str, Any] = {"min_draws": draws, "max_draws": draws, "seed": 3}
    result = landscape.noise_scale(problem, batch, weights=weights, **options)
    pairs = landscape.noise_scale(problem, batch, gradient="draws", **options)
    total, local = stream(3, 0), stream(3, 1)
    g = problems.textbook_gradient(problem, problem.weights)
    at_mean, rounds = [], []
    for _ in range(draws):
        indices = torch.randint(problem.samples, (1, batch), generator=total)[0]
        at_mean.append(problems.textbook_gradient(problem.subset(indices), problem.weights))
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
    norm2 = (gram.sum() - np.trace(gram)) / (draws * (draws - 1))
    assert pairs.norm2 == pytest.approx(norm2, rel=1e-8, abs=1e-12)
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
    whole = JackknifeEstimator(draws[0], 3)
    for row in draws:
        whole.add(row[None])
    full = from_round(draws, 3)
    left = [from_round(torch.cat((draws[:k], draws[k + 1 :])), 3) for k in range(9)]
    scale = whole.estimate()
    assert (scale.trace, scale.norm2) == pytest.approx(full)
    ratio, ratios = full[0] / full[1], np.array([a / b for a, b in left])
    np.testing.assert_allclose(scale.estimates, 9 * ratio - 8 * ratios)
    assert scale.standard_error == pytest.approx(np.sqrt(8 / 9 * np.square(ratios - ratios.mean()).sum()))


@pytest.mark.parametrize(
    ("seeds", "least", "most"), [(20, 0.8, 1.0), pytest.param(2000, 0.93, 0.97, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("size", [0.3, 0.6, 2.0])
def test_intervals_of_a_ratio_cover_the_truth(size: float, seeds: int, least: float, most: float) -> None:
    """24 gradients with noise of variance 1 in each of 20 coordinates, around a small and a large g."""
    g, covered, open_ends = torch.full((20,), size / 20**0.5, dtype=torch.float64), [], 0
    for seed in range(seeds):
        estimator = JackknifeEstimator(g, 1)
        for row in g + torch.randn(24, 20, dtype=torch.float64, generator=stream(seed, 7)):
            estimator.add(row[None])
        scale = estimator.estimate()
        low, high = scale.interval()
        covered.append(low <= 20 / size**2 <= high)
        open_ends += math.isinf(high)
        assert math.isnan(scale.value) if math.isinf(high) else scale.value >= 0
    assert least <= np.mean(covered) <= (most if size > 1 else 1)  # without an upper end one tail is left
    assert (open_ends > seeds / 2) == (size < 1)
    assert np.isnan(GradientNoise(np.zeros(21), 0.1, 1.0, 4.0, norm2_error=math.nan).interval()).all()


def test_the_command_of_several_learners(trained: Path, tmp_path: Path, tiny: Path, command: Command) -> None:
    early, last, out = trained / "step-0000010.h5", trained / "last.h5", tmp_path / "n.h5"
    code, stdout, err = command("noise-scale", early, last, "--max-draws", "40", "-o", out)
    assert code == 0, err
    for result in landscape.load(out):
        assert (result.batch, result.local_batch, result.learners) == (40, 10, 4)
        assert np.isfinite([result.value, result.learner_value]).all()
    assert "mean of 4 learners" in stdout
    run = Trainer(recipe.read(str(tiny), ["algorithm={name='ssgd'}"])).run()
    assert torch.equal(gradient_points(run), run.mean.expand_as(run.weights))
    assert not torch.equal(run.weights, run.mean.expand_as(run.weights))
    again = ["--no-learners", "--gradient", "draws", "--batch", "5", "--max-draws", "40"]
    assert command("noise-scale", last, *again, "-o", tmp_path / "m.h5")[0] == 0
    wrong = command("noise-scale", last, "--batch", "6", "-o", tmp_path / "x.h5")
    one_line(wrong, 2, "--batch: 6 is no multiple of 4 learners")


def aligned(spectrum: list[float], gamma: float, samples: int = 4000) -> Problem:
    """A quadratic without rotation, whose samples have gradients of covariance diag(λ^γ) exactly."""
    model = landscape.models.build("quadratic", eigenvalues=spectrum, rotate=False)
    data = landscape.data.load("quadratic", dimension=len(spectrum), samples=samples, gradient_std=1.0)
    x = data.train[0].clone()
    b = x[:, 1:]
    white = b @ torch.linalg.inv(torch.linalg.cholesky(b.T @ b / samples)).T
    x[:, 1:] = white * torch.tensor(spectrum, dtype=torch.float64).abs() ** (gamma / 2)
    return Problem(model, mean_output, (x, data.train[1]), dtype=torch.float64)


def test_alignment_matches_dense_matrices_draw_by_draw() -> None:
    problem, batch, count, k = problems.mlp(samples=30), 6, 11, 3
    found = landscape.noise_alignment(problem, batch, k, min_draws=count, max_draws=count, seed=9)
    h = problems.textbook_hessian(problem)
    g = problems.textbook_gradient(problem, problem.weights)
    values, vectors = torch.linalg.eigh(h)
    vectors = vectors.flip(1)[:, :k]
    generator, rows = stream(9, 0), []
    for _ in range(count):
        indices = torch.randint(30, (batch,), generator=generator)
        rows.append(problems.textbook_gradient(problem.subset(indices), problem.weights))
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
    assert (found.draws, found.draws_converged) == (count, False)


def test_at_a_minimum_the_scale_has_no_bound() -> None:
    flat = noisy(1.0)
    flat = Problem(flat.model, mean_output, flat.tensors or (), weights=torch.zeros(4))
    result = landscape.noise_scale(flat, 4, gradient="draws", max_draws=40)
    assert not result.converged
    assert not result.bounded
    assert "not significantly above 0" in text_of(result)


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


def test_alignment_is_not_defined_with_a_penalty() -> None:
    problem = problems.mlp()
    assert problem.tensors is not None
    decayed = Problem(problem.model, problem.criterion, problem.tensors, weight_decay=0.1)
    with pytest.raises(InputError, match="penalty: "):
        landscape.noise_alignment(decayed, 5)


def test_alignment_by_command_has_the_runs_batch(trained: Path, tmp_path: Path, command: Command) -> None:
    last = trained / "last.h5"
    assert command("noise-alignment", last, "--k", "3", "-o", tmp_path / "n.h5")[0] == 0
    saved = landscape.load(tmp_path / "n.h5")
    assert saved.batch == 40  # 4 learners of 10 samples
    torch.save(landscape.models.build("mlp", widths=[6, 8, 3]).state_dict(), tmp_path / "one.pt")
    own = ("--model", "mlp(widths=[6, 8, 3])", "--data", "synthetic(dimension=6, classes=3)")
    one_line(command("noise-alignment", tmp_path / "one.pt", *own), 2, "--batch: missing; neither")
    with pytest.raises(InputError, match="k: 999"):
        landscape.noise_alignment(landscape.load(last).problem(), 40, 999)


def test_the_noise_scale_with_a_preconditioner_is_that_of_rescaled_weights() -> None:
    """With w = P^{-1/2} v the gradient in v is P^{-1/2} that in w."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, n, generator=generator, dtype=torch.float64) for n in (6, 1))
    diagonal = torch.linspace(0.1, 4, 6, dtype=torch.float64)
    w, layer = (
        torch.randn(6, generator=generator, dtype=torch.float64),
        torch.nn.Linear(6, 1, bias=False).double(),
    )
    problem = landscape.Problem(layer, torch.nn.MSELoss(), (x, y), weights=w)
    scaled = landscape.Problem(layer, torch.nn.MSELoss(), (x * diagonal**-0.5, y), weights=w * diagonal**0.5)
    learners: dict[str, Any] = {"weights": torch.stack([w, w + 0.1]), "local_batch": 4, "max_draws": 64}
    of_scaled = {**learners, "weights": learners["weights"] * diagonal**0.5}
    for gradient in ("whole", "draws"):
        result = landscape.noise_scale(problem, 8, gradient=gradient, precondition=diagonal, **learners)
        expected = landscape.noise_scale(scaled, 8, gradient=gradient, **of_scaled)
        for name in ("value", "trace", "norm2", "learner_trace", "round_norm2", "standard_error"):
            assert getattr(result, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
        assert result.precondition == "given"
        assert "preconditioned by given" in result.describe()[0].note

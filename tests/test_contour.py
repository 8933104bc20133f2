"""Planes and contours against closed forms and the textbook loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import landscape
from landscape import Problem
from landscape.data.synthetic import mean_output
from landscape.evaluation.evaluate import evaluator
from landscape.gradients.learners import chain
from tests import problems


def test_asymmetric_quadratic_matches_its_closed_form_and_is_not_transposed() -> None:
    problem = problems.quadratic([0.5, 2.0, -1.0, 7.0])
    plane = landscape.random_plane(problem, seed=3)
    s = landscape.contour(problem, plane, grid=(7, 4), span=0.8)
    assert s.loss.shape == (4, 7)
    h = problem.model.get_buffer("hessian").numpy()
    u, v, c = *plane.directions.numpy(), problem.weights.numpy()
    for i, y in enumerate(np.linspace(-0.8, 0.8, 4)):
        for j, x in enumerate(np.linspace(-0.8, 0.8, 7)):
            w = c + x * u + y * v
            assert s.loss[i, j] == pytest.approx(0.5 * w @ h @ w, rel=1e-6, abs=1e-9)
    np.testing.assert_array_equal(s.x, np.linspace(-0.8, 0.8, 7))
    np.testing.assert_array_equal(s.y, np.linspace(-0.8, 0.8, 4))


@pytest.mark.parametrize("path", ["batched", "folded", "pointwise"])
def test_every_path_weighs_a_ragged_last_chunk_by_its_samples(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("landscape.evaluation.paths.CHUNK", 20)
    monkeypatch.setattr("landscape.evaluation.paths.MAX_BLOCK", 4)  # 15 points: the last block is ragged, too
    problem = problems.mlp()  # 53 samples
    problem.data.chunk_size = 20
    plane = landscape.random_plane(problem, seed=1)
    s = landscape.contour(problem, plane, grid=(5, 3), span=0.5, method=path)
    expected = problems.textbook_surface(problem, plane.directions, s.x.tolist(), s.y.tolist())
    np.testing.assert_allclose(s.loss, expected, rtol=1e-10)
    assert problem.tensors is not None
    x, y = problem.tensors
    theta = problem.weights + s.x[4] * plane.directions[0] + s.y[0] * plane.directions[1]
    right = (problem.outputs(theta, x).argmax(1) == y).double().mean()
    assert s.accuracy[0, 4] == pytest.approx(float(right))


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.sampled_from(["relu", "tanh", "gelu", "identity", "softplus"]),
    st.integers(1, 40),
)
def test_batched_path_equals_pointwise(widths: list[int], activation: str, samples: int) -> None:
    problem = problems.mlp(widths=(*widths, 3), activation=activation, samples=samples)
    plane = landscape.random_plane(problem, seed=2)
    points = torch.randn(5, 2, dtype=torch.float64)
    both = [
        evaluator(problem, plane.center, plane.directions, 5, method=path)(points)
        for path in ("batched", "pointwise")
    ]
    torch.testing.assert_close(both[0]["loss"], both[1]["loss"], rtol=1e-11, atol=1e-12)
    assert torch.equal(both[0]["accuracy"], both[1]["accuracy"])


def test_ties_between_outputs_count_as_argmax_counts_them() -> None:
    problem = problems.mlp(widths=(4, 3), samples=30)
    dead = Problem(problem.model, problem.criterion, problem.tensors or (), weights=torch.zeros(15))
    plane = landscape.Plane(dead.weights, torch.zeros(2, 15, dtype=torch.float64), "random", "none", 0)
    a = landscape.contour(dead, plane, grid=(2, 1), method="batched")
    b = landscape.contour(dead, plane, grid=(2, 1), method="pointwise")
    np.testing.assert_array_equal(a.accuracy, b.accuracy)


def test_losses_that_are_not_finite_stay_so() -> None:
    relu, quadratic = problems.mlp(activation="relu"), problems.quadratic([-3.0, 5.0])
    for problem, path, kind in (
        (relu, "batched", np.isnan),
        (relu, "folded", np.isnan),
        (relu, "pointwise", np.isnan),
        (quadratic, "folded", np.isposinf),
        (quadratic, "pointwise", np.isposinf),
    ):
        plane = landscape.random_plane(problem, seed=1)
        huge = landscape.Plane(plane.center, plane.directions * 1e200, "random", "none", 0)
        s = landscape.contour(problem, huge, grid=(3, 3), span=1.0, method=path)
        assert kind(s.loss[0, 0])
        assert np.isfinite(s.loss[1, 1])
        expected = problems.textbook_surface(problem, huge.directions, s.x.tolist(), s.y.tolist())
        np.testing.assert_allclose(s.loss, expected, rtol=1e-9)


@pytest.mark.parametrize("path", ["batched", "folded", "pointwise"])
def test_one_sample_that_is_nan_is_not_left_out_of_the_mean(path: str) -> None:
    problem = problems.mlp()
    assert problem.tensors is not None
    problem.tensors[0][7, 0] = torch.nan
    s = landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2), method=path)
    assert np.isnan(s.loss).all()
    assert s.done.all()


def test_what_is_not_a_plain_chain_is_not_taken_for_one() -> None:
    class Shifted(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    frozen[0].weight.requires_grad_(False)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, args, out: out + 1)
    twice = nn.Linear(3, 3)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    for model in (
        Shifted(nn.Linear(3, 3)),
        tied,
        frozen,
        hooked,
        normed,
        nn.Sequential(twice, nn.ReLU(), twice),
        nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
        problems.SmallConv(),
        nn.Linear(3, 3),
    ):
        x = torch.randn(4, 1, 5, 5) if isinstance(model, problems.SmallConv) else torch.randn(4, 3)
        assert chain(Problem(model, mean_output, (x, torch.zeros(4)))) is None, model
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))
    flat, wide = (torch.randn(4, 3), torch.zeros(4)), (torch.randn(4, 1, 3), torch.zeros(4))
    assert chain(Problem(plain, mean_output, flat)) is not None
    assert chain(Problem(plain, mean_output, wide)) is None  # acts on each row of a sample
    assert chain(Problem(nn.Sequential(nn.Flatten(), *plain), mean_output, wide)) is not None
    plain.register_parameter("own", nn.Parameter(torch.ones(2)))
    assert chain(Problem(plain, mean_output, flat)) is None  # a parameter that no layer has


def test_random_directions_are_normal_and_the_same_everywhere() -> None:
    wide = problems.mlp(widths=(60, 50, 10))
    d = landscape.random_plane(wide, seed=5).directions
    assert abs(float(d.mean())) < 0.05
    assert float(d.std()) == pytest.approx(1, abs=0.03)
    assert float(d.pow(4).mean()) == pytest.approx(3, abs=0.3)  # a uniform draw would have 9/5
    assert abs(float(d[0] @ d[1])) < 4 * d.shape[1] ** 0.5
    single = Problem(wide.model, wide.criterion, wide.tensors or (), dtype=torch.float32)
    assert torch.equal(landscape.random_plane(single, seed=5).directions, d.float())
    assert not torch.equal(landscape.random_plane(wide, seed=6).directions, d)


@pytest.mark.parametrize("norm", ["filter", "layer"])
def test_normalised_directions_have_the_norms_of_the_weights(norm: str) -> None:
    """Of each filter, and nothing for biases and norms; or of each tensor. A tensor of zeros gives zero."""
    problem = problems.conv()
    centers = problem.layout.views(problem.weights)
    centers["conv.bias"].zero_()
    for direction in landscape.random_plane(problem, norm=norm).directions:
        for slot in problem.layout.slots:
            own, center = problem.layout.views(direction)[slot.name], centers[slot.name]
            if norm == "layer":
                torch.testing.assert_close(own.norm(), center.norm())
            elif slot.role == "weight":
                torch.testing.assert_close(own.flatten(1).norm(dim=1), center.flatten(1).norm(dim=1))
            else:
                assert not own.any()

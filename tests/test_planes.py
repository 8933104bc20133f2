"""Planes made from weights and curvature, lines, and BatchNorm policies, against closed forms and textbooks."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch import Tensor, nn

import landscape
from landscape import LandscapeError, OperationError, Problem
from landscape.problem.batchnorm import BATCH, sample_parts
from tests import problems


def reached(plane: landscape.Plane) -> Tensor:
    """The points of the plane at its markers (M, P)."""
    return plane.center + torch.from_numpy(plane.markers).to(plane.center) @ plane.directions


def scattered(problem: Problem, count: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return problem.weights + torch.randn(count, problem.layout.size, dtype=problem.dtype)


MLP = functools.cache(problems.mlp)  # for tests with many examples


@given(st.integers(0, 10**6), st.sampled_from([2, 3]), st.floats(1e-3, 1e3))
def test_between_gives_its_weights_back(seed: int, count: int, scale: float) -> None:
    problem = MLP()
    thetas = scale * scattered(problem, count, seed)
    plane = landscape.between(problem, thetas, seed=seed)
    torch.testing.assert_close(reached(plane), thetas, rtol=1e-11, atol=1e-11 * scale)
    u, v = plane.directions
    assert abs(float(u @ v)) <= 1e-12 * float(u @ u)
    torch.testing.assert_close(u.norm(), v.norm())
    torch.testing.assert_close(u, thetas[1] - thetas[0])
    np.testing.assert_allclose(plane.markers.max(0) + plane.markers.min(0), 0, atol=1e-12)
    assert plane.span > np.abs(plane.markers).max()


def test_pca_plane_is_scikit_learns() -> None:
    problem = problems.mlp()
    thetas = scattered(problem, 6).cumsum(0)
    plane = landscape.pca_plane(problem, thetas)
    reference = PCA(n_components=2).fit(thetas.numpy())
    np.testing.assert_allclose(plane.explained, reference.explained_variance_ratio_, rtol=1e-10)
    signs = np.sign((plane.directions.numpy() * reference.components_).sum(1))
    np.testing.assert_allclose(plane.directions.numpy(), signs[:, None] * reference.components_, atol=1e-10)
    projected = (thetas - thetas[-1]).numpy() @ reference.components_.T * signs
    np.testing.assert_allclose(plane.markers, projected, atol=1e-10)
    assert torch.equal(plane.center, thetas[-1])
    assert not plane.markers[-1].any()


@given(st.integers(3, 12), st.integers(0, 10**6))
def test_what_the_learners_plane_leaves_is_the_tail_of_the_singular_values(n: int, seed: int) -> None:
    problem = MLP()
    weights = scattered(problem, n, seed)
    plane = landscape.learners_plane(problem, weights)
    spread = weights - weights.mean(0)
    s2 = torch.linalg.svdvals(spread) ** 2
    left = (torch.cat((weights, weights.mean(0)[None])) - reached(plane)).square().sum()
    torch.testing.assert_close(left, s2[2:].sum(), rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(plane.explained, (s2[:2] / s2.sum()).numpy(), rtol=1e-9)
    np.testing.assert_allclose(plane.markers[:-1].sum(0), 0, atol=1e-10)
    torch.testing.assert_close(plane.directions @ plane.directions.T, torch.eye(2, dtype=torch.float64))


def test_float32_learners_close_to_each_other_keep_their_digits() -> None:
    single = problems.mlp()
    problem = Problem(single.model, single.criterion, single.tensors or (), dtype=torch.float32)
    near = problem.weights + 1e-3 * torch.randn(3, problem.layout.size)
    plane = landscape.learners_plane(problem, near)
    exact = torch.linalg.svdvals(near.double() - near.double().mean(0)) ** 2
    np.testing.assert_allclose(plane.explained, (exact[:2] / exact.sum()).numpy(), rtol=1e-9)
    torch.testing.assert_close(reached(plane)[:3], near, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["saddle", "mostly negative", "mlp tanh"])
def test_eigen_plane_is_the_dense_hessians(name: str) -> None:
    problem = problems.ALL[name]()
    values, vectors = torch.linalg.eigh(problems.textbook_hessian(problem))
    plane = landscape.eigen_plane(problem, residual_tol=1e-8)
    for direction, vector in zip(plane.directions, (vectors[:, -1], vectors[:, 0]), strict=True):
        assert abs(float(direction @ vector)) == pytest.approx(1, abs=1e-6)
        assert float(direction.norm()) == pytest.approx(1, abs=1e-9)
    assert f"{float(values[-1]):.3g}" in plane.axes[0]
    assert f"{float(values[0]):.3g}" in plane.axes[1]


def test_planes_that_cannot_be_are_refused() -> None:
    problem = problems.mlp()
    a, b, c, d = scattered(problem, 4)
    between, pca, learners = landscape.between, landscape.pca_plane, landscape.learners_plane
    for make, thetas, words in (
        (between, [a], "between: 1 weight vectors are not allowed, it takes two or three"),
        (between, [a, b, c, d], "between: 4 weight vectors are not allowed, it takes two or three"),
        (between, [a, a, b], "equal"),
        (between, [a, b, a + 0.3 * (b - a)], "one line"),
        (between, [a, a[:3], b], r"w1: shape \(3,\), needed is \(107,\)"),
        (between, [a, b, c * torch.nan], "w2: its weights are NaN or infinite"),
        (pca, [a, b], "2 checkpoints are too few, at least 3"),
        (pca, [a, b, (a + b) / 2], "checkpoints: all 3 lie on one line"),
        (learners, a.expand(4, -1), "learners: all 4 are equal"),
        (learners, torch.stack((a, b)), "2 learners span no plane"),
    ):
        with pytest.raises(LandscapeError, match=words):
            make(problem, thetas)
    with pytest.raises(LandscapeError, match="labels: 1 for 3"):
        pca(problem, [a, b, c], ["one"])
    with pytest.raises(OperationError, match="do not bring the vectors"):
        landscape.eigen_plane(problem, residual_tol=1e-12, max_products=3)
    with pytest.raises(LandscapeError, match="did you mean 'bias\\+norm'"):
        landscape.random_plane(problem, ignore="bias_norm")


@pytest.mark.parametrize("norm", ["none", "filter", "layer"])
def test_ignoring_bias_and_norm_leaves_just_those_out(norm: str) -> None:
    problem = problems.conv()
    zeros = problem.layout.views(problem.weights)
    zeros["conv.bias"].zero_()  # and a zero bias, or filter, divides nothing by zero
    zeros["conv.weight"][0].zero_()
    inside, outside, usual = (
        landscape.random_plane(problem, norm=norm, ignore=i) for i in ("none", "bias+norm", None)
    )
    assert usual.ignore == ("bias+norm" if norm == "filter" else "none")
    assert torch.equal(usual.directions, (outside if norm == "filter" else inside).directions)
    assert bool(torch.isfinite(inside.directions).all())
    centers = problem.layout.views(problem.weights)
    for slot in problem.layout.slots:
        a, b = (problem.layout.views(p.directions)[slot.name] for p in (inside, outside))
        if slot.role == "weight":
            assert torch.equal(a, b)
            assert bool(a[:, 0].any()) == (slot.name != "conv.weight" or norm != "filter")
        else:
            assert not b.any()
            assert bool(a.any()) == (norm == "none" or bool(centers[slot.name].any()))


@pytest.mark.parametrize("path", ["batched", "pointwise"])
def test_a_line_between_two_weights_is_the_textbook_loop(path: str) -> None:
    problem = problems.mlp()
    a, b = scattered(problem, 2)
    found = landscape.line(problem, weights=torch.stack((a, b)), points=7, method=path)
    t = np.linspace(0, 1, 7)
    expected = np.array([problem.evaluate((1 - s) * a + s * b) for s in t])
    np.testing.assert_array_equal(found.t, t)
    np.testing.assert_allclose(found.loss, expected[:, 0], rtol=1e-10)
    np.testing.assert_array_equal(found.accuracy, expected[:, 1])
    straight = (1 - t) * expected[0, 0] + t * expected[-1, 0]
    assert found.barrier == pytest.approx(max(expected[:, 0] - straight), rel=1e-9)


def test_barriers_of_quadratics_have_closed_forms() -> None:
    valley, hill = problems.quadratic([2.0, 2.0]), problems.quadratic([-2.0, -2.0])
    ends = torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=torch.float64)
    assert landscape.line(valley, weights=ends).barrier == 0  # convex: never above the straight line
    # L = −‖w‖² along a line of length ℓ lies t(1−t)ℓ² above its chord, at most ℓ²/4 = 8/4
    assert landscape.line(hill, weights=ends).barrier == pytest.approx(2.0, rel=1e-6)
    t = np.linspace(0, 1, 3)
    assert np.isnan(landscape.barrier(t, np.array([0.0, np.nan, 0.0])))
    assert landscape.barrier(t, np.array([0.0, np.inf, 0.0])) == np.inf


def test_a_line_along_a_direction_is_a_row_of_the_surface() -> None:
    problem = problems.mlp()
    plane = landscape.random_plane(problem, seed=8)
    surface = landscape.contour(problem, plane, grid=(5, 3), span=0.7)
    found = landscape.line(problem, plane.directions[0], 5, span=0.7)
    np.testing.assert_allclose(found.loss, surface.loss[1], rtol=1e-12)
    assert np.isnan(found.barrier)
    for vectors, span, words in (
        ({"direction": plane.directions[0]}, -1.0, "span: -1.0"),
        ({"weights": plane.directions}, 1.0, "runs from 0 to 1"),
        ({}, None, "direction, weights: .* is not allowed, a line takes one"),
        ({"direction": plane.directions[0], "weights": plane.directions}, None, "direction, weights: "),
        ({"weights": plane.directions[:, :4]}, None, r"weights: shape \(2, 4\)"),
    ):
        with pytest.raises(LandscapeError, match=words):
            landscape.line(problem, **vectors, span=span)


def at(problem: Problem, theta: Tensor) -> nn.Module:
    """A real copy of the model with the weights ``theta`` put into it."""
    model = copy.deepcopy(problem.model)
    views = problem.layout.views(theta)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(views[name])
    return model


def whole(problem: Problem, model: nn.Module) -> float:
    assert problem.tensors is not None
    with torch.no_grad():
        return float(problem.criterion(model(problem.tensors[0]), problem.tensors[1]))


def test_batchnorm_policies_are_the_textbooks() -> None:
    problem = problems.conv(samples=2 * BATCH)
    assert problem.tensors is not None
    x, y = problem.tensors
    before = copy.deepcopy(problem.model.state_dict())
    plane = landscape.random_plane(problem, seed=1)
    surfaces = {
        bn: landscape.contour(problem, plane, grid=(3, 2), span=0.8, bn=bn, bn_samples=samples)
        for bn, samples in (("center", 1000), ("recalibrate", 10**6), ("train", 150))
    }
    for i, b in enumerate(surfaces["center"].y):
        for j, a in enumerate(surfaces["center"].x):
            model = at(problem, plane.center + a * plane.directions[0] + b * plane.directions[1])
            assert surfaces["center"].loss[i, j] == pytest.approx(whole(problem, model), rel=1e-10)
            # Recalibrated on all samples: both batches' statistics averaged, by torch's own routine.
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
            batches = [x[part] for part in order.tensor_split(2)]
            torch.optim.swa_utils.update_bn(batches, model)
            assert surfaces["recalibrate"].loss[i, j] == pytest.approx(
                whole(problem, model.eval()), rel=1e-10
            )
            model.train()
            total = 0.0
            with torch.no_grad():
                for k in range(0, len(y), 150):  # the last batch has 50 samples and counts for 50
                    part = y[k : k + 150]
                    total += float(problem.criterion(model(x[k : k + 150]), part)) * len(part)
            assert surfaces["train"].loss[i, j] == pytest.approx(total / len(y), rel=1e-10)
    assert [s.bn for s in surfaces.values()] == ["center", "recalibrate", "train"]
    assert [s.bn_samples for s in surfaces.values()] == [0, 2 * BATCH, 150]
    assert all(s.batchnorm for s in surfaces.values())
    losses = [s.loss for s in surfaces.values()]
    assert not np.allclose(losses[0], losses[1], rtol=1e-3)
    assert not np.allclose(losses[1], losses[2], rtol=1e-6)
    for name, value in problem.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(m.training for m in problem.model.modules())


@pytest.mark.parametrize("bn", ["center", "recalibrate", "train"])
def test_a_line_takes_the_policy_and_says_so(bn: str) -> None:
    problem = problems.conv()
    plane = landscape.random_plane(problem, seed=1)
    surface = landscape.contour(problem, plane, grid=(3, 1), span=0.7, bn=bn, bn_samples=9)
    found = landscape.line(problem, plane.directions[0], 3, span=0.7, bn=bn, bn_samples=9)
    np.testing.assert_allclose(found.loss, surface.loss[0], rtol=1e-10)
    assert (found.bn, found.batchnorm, found.bn_samples) == (bn, True, surface.bn_samples)


def test_recalibration_draws_the_same_sample_at_every_point_and_call() -> None:
    problem = problems.conv(samples=40)
    own = problem.with_batchnorm("recalibrate", 11)
    assert own.batchnorm.samples == 11
    first = own.evaluate()
    own.evaluate(problem.weights + 1)
    assert own.evaluate() == first
    assert problem.with_batchnorm("recalibrate", 11).evaluate() == first
    parts = sample_parts(2 * BATCH + 1, 10**6)
    assert [len(part) for part in parts] == [167, 167, 167]  # no short last batch with a full one's weight


def test_batches_given_as_such_serve_the_policies_too() -> None:
    problem = problems.conv(samples=24)
    assert problem.tensors is not None
    x, y = problem.tensors
    listed = Problem(problem.model, problem.criterion, list(zip(x.split(10), y.split(10), strict=True)))
    again = listed.with_batchnorm("recalibrate", 15)
    assert again.batchnorm.samples == 20  # two whole batches of 10
    model = at(problem, problem.weights)
    torch.optim.swa_utils.update_bn([x[:10], x[10:20]], model)
    assert again.loss() == pytest.approx(whole(problem, model.eval()), rel=1e-10)
    train = listed.with_batchnorm("train")
    assert train.batchnorm.samples == 0
    assert train.loss() == pytest.approx(problem.with_batchnorm("train", 10).loss(), rel=1e-10)


def test_without_batchnorm_the_policy_changes_nothing() -> None:
    problem = problems.mlp()
    plane = landscape.random_plane(problem)
    a, b = (landscape.contour(problem, plane, grid=(3, 2), bn=bn) for bn in ("center", "recalibrate"))
    np.testing.assert_array_equal(a.loss, b.loss)
    assert b.method == "batched"
    assert (b.batchnorm, b.bn_samples) == (False, 0)


def test_surfaces_from_before_there_were_markers_load(tmp_path: Path) -> None:
    problem = problems.mlp()
    s = landscape.contour(problem, landscape.learners_plane(problem, scattered(problem, 4)), grid=(3, 2))
    s.save(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5", "a") as file:
        for name in ("markers", "explained", "marker_loss"):
            del file[name]
        for name in ("labels", "axes", "ignore", "batchnorm", "bn_samples"):
            del file.attrs[name]
    old = landscape.load(tmp_path / "s.h5")
    assert (old.labels, old.markers.shape) == ((), (0, 2))
    with h5py.File(tmp_path / "s.h5", "a") as file:
        file["markers"] = np.zeros((3, 2))
    with pytest.raises(OperationError, match=r"labels has shape \(0,\)"):
        landscape.load(tmp_path / "s.h5")

"""Planes made from weights and curvature, lines, and BatchNorm policies, against closed forms and textbooks."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import landscape
from landscape import Problem, ProblemWarning
from landscape.plots import style
from landscape.problem.batchnorm import BATCH, sample_parts
from tests import problems


def reached(plane: landscape.Plane) -> Tensor:
    """The points of the plane at its markers (M, P)."""
    return plane.center + torch.from_numpy(plane.markers).to(plane.center) @ plane.directions


def scattered(problem: Problem, count: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return problem.weights + torch.randn(count, problem.layout.size, dtype=problem.dtype)


def in_float32(problem: Problem) -> Problem:
    return Problem(problem.model, problem.criterion, problem.resident, dtype=torch.float32)


MLP = functools.cache(problems.mlp)  # for tests with many examples


def test_random_directions_are_normal_and_the_same_everywhere() -> None:
    wide = problems.mlp(widths=(60, 50, 10))
    d = landscape.random_plane(wide, seed=5).directions
    assert abs(float(d.mean())) < 0.05
    assert float(d.std()) == pytest.approx(1, abs=0.03)
    assert float(d.pow(4).mean()) == pytest.approx(3, abs=0.3)  # a uniform draw would have 9/5
    assert abs(float(d[0] @ d[1])) < 4 * d.shape[1] ** 0.5
    assert torch.equal(landscape.random_plane(in_float32(wide), seed=5).directions, d.float())
    assert not torch.equal(landscape.random_plane(wide, seed=6).directions, d)


@pytest.mark.parametrize("norm", ["none", "filter", "layer"])
def test_directions_have_the_norms_of_the_weights_and_leave_out_what_is_ignored(norm: str) -> None:
    problem = problems.conv()
    views = problem.layout.views
    centers = views(problem.weights)
    centers["conv.bias"].zero_()  # a zero bias, or filter, divides nothing by zero
    centers["conv.weight"][0].zero_()
    inside, outside, usual = (
        landscape.random_plane(problem, norm=norm, ignore=i) for i in ("none", "bias+norm", None)
    )
    assert usual.ignore == ("bias+norm" if norm == "filter" else "none")
    assert torch.equal(usual.directions, (outside if norm == "filter" else inside).directions)
    assert bool(torch.isfinite(inside.directions).all())
    for slot in problem.layout.slots:
        center = centers[slot.name]
        for k in range(2):
            a, b = (views(p.directions[k])[slot.name] for p in (inside, outside))
            assert torch.equal(a, b) if slot.role == "weight" else not b.any()
            if norm == "layer":
                torch.testing.assert_close(a.norm(), center.norm())
            elif norm == "filter" and slot.role == "weight":
                torch.testing.assert_close(a.flatten(1).norm(dim=1), center.flatten(1).norm(dim=1))
            elif norm == "filter":  # a bias is one filter
                torch.testing.assert_close(a.norm(), center.norm())
            else:
                assert bool(a.any())


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
    from sklearn.decomposition import PCA  # here, as it takes long to import

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


@given(st.integers(3, 12), st.integers(0, 10**6))
def test_what_the_learners_plane_leaves_is_the_tail_of_the_singular_values(n: int, seed: int) -> None:
    problem = MLP()
    weights = scattered(problem, n, seed)
    plane = landscape.learners_plane(problem, weights)
    s2 = torch.linalg.svdvals(weights - weights.mean(0)) ** 2
    left = (torch.cat((weights, weights.mean(0)[None])) - reached(plane)).square().sum()
    torch.testing.assert_close(left, s2[2:].sum(), rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(plane.explained, (s2[:2] / s2.sum()).numpy(), rtol=1e-9)
    np.testing.assert_allclose(plane.markers[:-1].sum(0), 0, atol=1e-10)
    torch.testing.assert_close(plane.directions @ plane.directions.T, torch.eye(2, dtype=torch.float64))


def test_float32_learners_close_to_each_other_keep_their_digits() -> None:
    problem = in_float32(problems.mlp())
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
    for k, place in enumerate((-1, 0)):
        assert abs(float(plane.directions[k] @ vectors[:, place])) == pytest.approx(1, abs=1e-6)
        assert float(plane.directions[k].norm()) == pytest.approx(1, abs=1e-9)
        assert f"{float(values[place]):.3g}" in plane.axes[k]


@pytest.mark.parametrize("path", ["batched", "pointwise"])
def test_a_line_between_two_weights_is_the_textbook_loop(path: str) -> None:
    problem = problems.mlp()
    a, b = scattered(problem, 2)
    found = landscape.line(problem, a, b, points=7, method=path)
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
    assert landscape.line(valley, *ends).barrier == 0  # convex: never above the straight line
    # L = −‖w‖² along a line of length ℓ lies t(1−t)ℓ² above its chord, at most ℓ²/4 = 8/4
    assert landscape.line(hill, *ends).barrier == pytest.approx(2.0, rel=1e-6)
    t = np.linspace(0, 1, 3)
    assert np.isnan(landscape.barrier(t, np.array([0.0, np.nan, 0.0])))
    assert landscape.barrier(t, np.array([0.0, np.inf, 0.0])) == np.inf


@pytest.mark.parametrize("bn", ["center", "recalibrate", "train"])
def test_a_line_along_a_direction_is_a_row_of_the_surface_of_the_same_policy(bn: str) -> None:
    problem = problems.conv()
    plane = landscape.random_plane(problem, seed=1)
    surface = landscape.contour(problem, plane, grid=(3, 1), span=0.7, bn=bn, bn_samples=9)
    found = landscape.line(problem, plane.directions[0], points=3, span=0.7, bn=bn, bn_samples=9)
    np.testing.assert_allclose(found.loss, surface.loss[0], rtol=1e-10)
    assert np.isnan(found.barrier)
    assert (found.bn, found.batchnorm, found.bn_samples) == (bn, True, surface.bn_samples)


def test_lines_without_batchnorm() -> None:
    problem = problems.mlp()
    directions = landscape.random_plane(problem).directions
    a, b = (landscape.line(problem, directions[0], points=3, bn=bn) for bn in ("center", "recalibrate"))
    np.testing.assert_array_equal(a.loss, b.loss)
    assert (b.method, b.batchnorm, b.bn_samples) == ("batched", False, 0)


@torch.no_grad()
def textbook(problem: Problem, theta: Tensor, batches: list[Tensor], train: int = 0) -> float:
    """The loss of a real copy of the model at θ: BatchNorm recalibrated on ``batches``, or by batches of ``train``."""
    model = copy.deepcopy(problem.model)
    nn.utils.vector_to_parameters(theta, model.parameters())
    if batches:
        torch.optim.swa_utils.update_bn(batches, model)
    model.train(bool(train))
    x, y = problem.tensors  # type: ignore[misc]
    parts = list(zip(x.split(train or len(x)), y.split(train or len(x)), strict=True))
    return sum(float(problem.criterion(model(a), b)) * len(b) for a, b in parts) / len(y)


def test_layers_that_share_statistics_are_recalibrated_together() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2))).double()
    for name, buffer in model[0][1].named_buffers():
        setattr(model[1][1], name, buffer)
    x = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = Problem(model, nn.functional.mse_loss, (x, x)).with_batchnorm("recalibrate")
    assert problem.loss() == pytest.approx(textbook(problem, problem.weights, [x]), rel=1e-10)


def test_batchnorm_policies_are_the_textbooks() -> None:
    problem = problems.conv(samples=2 * BATCH)
    x, y = problem.tensors  # type: ignore[misc]
    plane = landscape.random_plane(problem, seed=1)
    # Recalibrated on all samples: both batches' statistics averaged, by torch's own routine.
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    both = [x[part] for part in order.tensor_split(2)]
    losses = []
    for bn, samples, kept, batches, size in (
        ("center", 1000, 0, [], 0),
        ("recalibrate", 10**6, 2 * BATCH, both, 0),
        ("train", 150, 150, [], 150),  # the last batch has 50 samples and counts for 50
    ):
        s = landscape.contour(problem, plane, grid=(3, 2), span=0.8, bn=bn, bn_samples=samples)
        for i, j in np.ndindex(2, 3):
            theta = plane.center + s.x[j] * plane.directions[0] + s.y[i] * plane.directions[1]
            assert s.loss[i, j] == pytest.approx(textbook(problem, theta, batches, size), rel=1e-10)
        assert (s.bn, s.bn_samples, s.batchnorm) == (bn, kept, True)
        losses.append(s.loss)
    assert not np.allclose(losses[0], losses[1], rtol=1e-3)
    assert not np.allclose(losses[1], losses[2], rtol=1e-6)
    assert not any(m.training for m in problem.model.modules())


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
    x, y = problem.tensors  # type: ignore[misc]
    listed = Problem(problem.model, problem.criterion, list(zip(x.split(10), y.split(10), strict=True)))
    again = listed.with_batchnorm("recalibrate", 15)
    assert again.batchnorm.samples == 20  # two whole batches of 10
    expected = textbook(problem, problem.weights, [x[:10], x[10:20]])
    assert again.loss() == pytest.approx(expected, rel=1e-10)
    train = listed.with_batchnorm("train")
    assert train.batchnorm.samples == 0
    assert train.loss() == pytest.approx(textbook(problem, problem.weights, [], 10), rel=1e-10)


@functools.cache
def trained(seed: int, samples: int = 600) -> Problem:
    """A small network with BatchNorm after some steps, on data that all seeds share."""
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(samples, 6, generator=draw) + 1
    y = (x[:, :3] + torch.randn(samples, 3, generator=draw)).argmax(1)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(40):
        few = torch.randint(samples, (100,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[few]), y[few]).backward()
        optimizer.step()
    return Problem(net, nn.CrossEntropyLoss(), (x, y))


def of(problem: Problem, form: str) -> nn.Module | dict[str, Tensor] | Problem:
    return {"model": problem.model, "state": problem.model.state_dict(), "problem": problem}[form]  # type: ignore[return-value]


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3, unique=True), st.sampled_from(["model", "state", "problem"]),
       st.sampled_from(["between", "pca", "learners"]))  # fmt: skip
@settings(max_examples=8)
def test_networks_on_a_plane_have_statistics_of_their_own(seeds: list[int], form: str, kind: str) -> None:
    nets = [trained(seed) for seed in seeds]
    own = [net.loss() for net in nets]
    make = {"between": landscape.between, "pca": landscape.pca_plane, "learners": landscape.learners_plane}[
        kind
    ]
    plane = make(nets[0], [of(net, form) for net in nets])
    surface = landscape.contour(nets[0], plane, grid=2)
    assert (surface.bn, surface.statistics_of) == ("recalibrate", "")
    np.testing.assert_allclose(surface.own_loss[:3], own, rtol=1e-6)
    # All 600 samples: what differs is the running average of the statistics over minibatches in training.
    np.testing.assert_allclose(surface.marker_loss[:3], own, atol=0.04)
    again = [net.with_batchnorm("recalibrate").loss() for net in nets]
    np.testing.assert_allclose(surface.marker_loss[:3], again, rtol=1e-5)
    fixed = landscape.contour(nets[0], plane, grid=2, bn="center")
    assert (fixed.bn, fixed.statistics_of) == ("center", fixed.labels[0])
    np.testing.assert_array_equal(fixed.own_loss, surface.own_loss)
    for result in (surface, fixed):
        gap = np.nanmax(abs(result.own_loss - result.marker_loss))
        note = style.batchnorm_note(result)
        assert f"up to {gap:.2g} away" in note
        assert f"up to {gap:.2g} away" in result.summary()
        assert kind == "learners" or f"own losses {', '.join(f'{loss:.4g}' for loss in own)} nat" in note
    assert f"the statistics of {fixed.labels[0]}," in style.batchnorm_note(fixed)
    assert f"the statistics of {fixed.labels[0]}" in repr(fixed.check())


def test_networks_with_the_same_statistics_keep_them_and_vectors_have_none() -> None:
    p, q = trained(0), trained(1)
    other = copy.deepcopy(p.model)
    with torch.no_grad():
        for t in other.parameters():
            t.mul_(1.1)
    plane = landscape.between(p, [p, other])
    surface = landscape.contour(p, plane, grid=2)
    assert surface.bn == "center"
    np.testing.assert_allclose(surface.own_loss, surface.marker_loss)
    line = landscape.line(p, p.weights, q.weights, points=3, labels=("A", "B"))
    assert line.bn == "recalibrate"
    assert (
        np.isfinite(line.own_loss) == [True, False]
    ).all()  # the first has the center's, of the other none are known
    line = landscape.line(p, p, q, points=3, bn="center", labels=("A", "B"))
    assert line.statistics_of == "A"
    np.testing.assert_allclose(line.own_loss, [p.loss(), q.loss()], rtol=1e-6)
    assert line.loss[0] == pytest.approx(p.loss(), rel=1e-5)
    assert "the statistics of A" in str(line.plot().get_caption())
    # A problem that has a policy keeps it; of a plane from a file the networks are not known.
    again = landscape.contour(p.with_batchnorm("train", 100), plane, grid=2)
    assert again.bn == "train"
    assert landscape.contour(p, surface.plane(p.weights), grid=2).bn == "recalibrate"
    lost = landscape.contour(p, surface.plane(p.weights), grid=2, bn="center")
    assert (lost.statistics_of, lost.own_loss.size) == ("the problem's model", 0)
    assert landscape.contour(p, landscape.random_plane(p), grid=2).bn == "center"
    first = landscape.contour(p, plane := landscape.between(p, [p, q]), grid=2)
    finer = landscape.contour(p, plane, grid=3, execution=landscape.Execution(previous=first))
    np.testing.assert_array_equal(finer.own_loss, first.own_loss)
    aligned = landscape.contour(p, landscape.between(p, [p, q], align="weights"), grid=2)
    np.testing.assert_allclose(aligned.own_loss, [p.loss(), q.loss()], rtol=1e-6)
    np.testing.assert_allclose(aligned.marker_loss, aligned.own_loss, atol=0.04)


def low(seed: int, kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(8)] if kind == "BatchNorm" else []
    return nn.Sequential(nn.Linear(6, 8), *norm, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


@given(
    st.integers(0, 10**6),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from(["MLP", "BatchNorm"]),
)
@settings(max_examples=10)
def test_the_middle_of_networks_in_half_precision_is_one(seed: int, dtype: torch.dtype, kind: str) -> None:
    a, b = low(seed, kind, dtype), low(seed + 1, kind, dtype)
    x, y = torch.randn(40, 6).to(dtype), torch.randint(3, (40,))
    problem = Problem(a, nn.CrossEntropyLoss(), (x, y), check="off")
    recalibrated = problem.with_batchnorm("recalibrate")
    first, second = (nn.utils.parameters_to_vector(m.parameters()).detach().double() for m in (a, b))
    middle = recalibrated.loss(((first + second) / 2).to(dtype))  # rounded once
    line = landscape.line(problem, a, b, points=5, bn="recalibrate")
    assert line.loss[2] == middle
    assert (line.loss[0], line.loss[-1]) == (recalibrated.loss(), recalibrated.loss(second.to(dtype)))
    assert landscape.connect(problem, a, b, points=5, steps=2).loss[0, 2] == middle
    with pytest.warns(ProblemWarning, match="computes in"):
        average = landscape.average(problem, [a, b])
    single = Problem(copy.deepcopy(a).float(), nn.CrossEntropyLoss(), (x.float(), y)).with_batchnorm(
        "recalibrate"
    )
    assert average.exact[0] == pytest.approx(single.loss(((first + second) / 2).float()), rel=1e-6)
    assert average.stored[0] == pytest.approx(single.loss(((first + second) / 2).to(dtype).float()), rel=1e-6)
    floats = [copy.deepcopy(net).float() for net in (a, b)]
    reference = landscape.average(Problem(floats[0], nn.CrossEntropyLoss(), (x.float(), y)), floats)
    np.testing.assert_allclose([average.low, average.high], [reference.low, reference.high], rtol=1e-5)
    assert (line.dtype, average.dtype) == (str(dtype).removeprefix("torch."), "float32")
    plane = landscape.between(problem, [a, b])
    surface = landscape.contour(problem, plane, grid=(3, 1), span=0.5, bn="recalibrate")
    assert surface.loss[0, 1] == middle

"""Contours and their fast paths against closed forms, the plain path and the textbook loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import landscape
from landscape import InputError, Problem
from landscape.data.base import mean_output
from landscape.evaluation.evaluate import evaluator
from landscape.gradients.learners import chain
from tests import problems

PATHS = ("batched", "folded", "pointwise")


def both(problem: Problem, path: str, **options: str) -> tuple[Tensor, Tensor]:
    """Losses by ``path`` and by the plain path at a few points; the accuracies are the same."""
    plane = landscape.random_plane(problem, seed=4)
    points = 0.3 * torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    wanted = {path: options, "pointwise": {}}
    runs = [evaluator(problem, plane.center, plane.directions, 7, method=p, **o) for p, o in wanted.items()]
    assert runs[0].method == path
    fast, plain = (run(points) for run in runs)
    near = 0.1 if options else 0.0  # the share of samples that another precision may turn
    torch.testing.assert_close(fast["accuracy"], plain["accuracy"], equal_nan=True, atol=near, rtol=0)
    return fast["loss"], plain["loss"]


def test_asymmetric_quadratic_matches_its_closed_form_and_is_not_transposed() -> None:
    problem = problems.quadratic([0.5, 2.0, -1.0, 7.0])
    plane = landscape.random_plane(problem, seed=3)
    s = landscape.contour(problem, plane, grid=(7, 4), span=0.8)
    h = problem.model.get_buffer("hessian").numpy()
    x, y = np.linspace(-0.8, 0.8, 7), np.linspace(-0.8, 0.8, 4)
    u, v = plane.directions.numpy()
    w = problem.weights.numpy() + x[None, :, None] * u + y[:, None, None] * v
    np.testing.assert_allclose(s.loss, 0.5 * np.einsum("ijk,kl,ijl->ij", w, h, w), rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(s.x, x)
    np.testing.assert_array_equal(s.y, y)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_weighs_a_ragged_last_chunk(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 samples and 4 points, of 15: the last block is ragged, too.
    monkeypatch.setattr("landscape.evaluation.evaluate.block_size", lambda *_: (20, 4))
    problem = problems.mlp()  # 53 samples
    problem.data.chunk_size = 20
    plane = landscape.random_plane(problem, seed=1)
    s = landscape.contour(problem, plane, grid=(5, 3), span=0.5, method=path)
    expected = problems.textbook_surface(problem, plane.directions, s.x.tolist(), s.y.tolist())
    np.testing.assert_allclose(s.loss, expected, rtol=1e-10)
    x, y = problem.tensors  # type: ignore[misc]
    theta = problem.weights + s.x[4] * plane.directions[0] + s.y[0] * plane.directions[1]
    right = problem.outputs(theta, x).argmax(1) == y
    assert s.accuracy[0, 4] == pytest.approx(float(right.double().mean()))
    x[7, 0] = torch.nan  # one sample that is NaN is not left out of the mean
    s = landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2), method=path)
    assert np.isnan(s.loss).all()
    assert s.done.all()


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.sampled_from(["relu", "tanh", "gelu", "identity", "softplus"]),
    st.integers(1, 40),
)
def test_batched_path_equals_pointwise(widths: list[int], activation: str, samples: int) -> None:
    fast, plain = both(problems.mlp(widths=(*widths, 3), activation=activation, samples=samples), "batched")
    torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-12)


def test_ties_between_outputs_count_as_argmax_counts_them() -> None:
    problem = problems.mlp(widths=(4, 3), samples=30)
    dead = Problem(problem.model, problem.criterion, problem.resident, weights=torch.zeros(15))
    directions = torch.full((2, 15), 1e-150, dtype=torch.float64)
    plane = landscape.Plane(dead.weights, directions, "random", "none", 0)
    a, b = (landscape.contour(dead, plane, grid=(2, 1), method=path) for path in ("batched", "pointwise"))
    np.testing.assert_array_equal(a.accuracy, b.accuracy)


@pytest.mark.parametrize("path", PATHS)
def test_losses_that_are_not_finite_stay_so(path: str) -> None:
    chosen = [(problems.mlp(activation="relu"), np.isnan)]
    chosen += [(problems.quadratic([-3.0, 5.0]), np.isposinf)] if path != "batched" else []
    for problem, kind in chosen:
        plane = landscape.random_plane(problem, seed=1)
        huge = landscape.Plane(plane.center, plane.directions * 1e200, "random", "none", 0)
        s = landscape.contour(problem, huge, grid=(3, 3), span=1.0, method=path)
        assert kind(s.loss[0, 0])
        assert np.isfinite(s.loss[1, 1])
        expected = problems.textbook_surface(problem, huge.directions, s.x.tolist(), s.y.tolist())
        np.testing.assert_allclose(s.loss, expected, rtol=1e-9)


class Shifted(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_what_is_not_a_plain_chain_is_not_taken_for_one() -> None:
    tied, frozen = (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)) for _ in range(2))
    tied[2].weight = tied[0].weight
    frozen[0].weight.requires_grad_(False)
    hooked = nn.Sequential(nn.Linear(3, 3))
    hooked[0].register_forward_hook(lambda module, args, out: out + 1)
    twice = nn.Linear(3, 3)
    for model in (
        Shifted(nn.Linear(3, 3)), tied, frozen, hooked, nn.Linear(3, 3), problems.SmallConv(),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
        nn.Sequential(twice, nn.ReLU(), twice),
        nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
    ):  # fmt: skip
        x = torch.randn(4, 1, 5, 5) if isinstance(model, problems.SmallConv) else torch.randn(4, 3)
        assert chain(Problem(model, mean_output, (x, torch.zeros(4)))) is None, model
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 2)))
    flat, wide = (torch.randn(4, 3), torch.zeros(4)), (torch.randn(4, 1, 3), torch.zeros(4))
    assert chain(Problem(plain, mean_output, flat)) is not None
    assert chain(Problem(plain, mean_output, wide)) is None  # acts on each row of a sample
    assert chain(Problem(nn.Sequential(nn.Flatten(), *plain), mean_output, wide)) is not None
    plain.register_parameter("own", nn.Parameter(torch.ones(2)))
    assert chain(Problem(plain, mean_output, flat)) is None  # a parameter that no layer has


class Residual(nn.Module):
    """Pairs that fold, one with a biased convolution, one that is used twice, and a BatchNorm that may not.

    ReLUs and sums of values that nothing else needs, of one that is needed as it was, and of unequal shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)
        self.twice, self.nt = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.lone = nn.BatchNorm2d(4)
        self.kept, self.relu = nn.Conv2d(4, 4, 1), nn.ReLU()
        self.gate, self.add = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.na(self.a(x)))
        h = nn.functional.relu(h + self.nb(self.b(h)).tanh())
        kept = self.kept(h)
        h = h + self.relu(kept) * kept
        h = self.nt(self.twice(h)) + self.twice(h)
        h = self.gate(h.mean((2, 3), keepdim=True)) + (h + self.add(h))
        h = self.add(h) + h.mean((2, 3), keepdim=True)
        out: Tensor = self.head(self.lone(h).mean((2, 3)))
        return out


def residual(in_batches: bool = False) -> Problem:
    torch.manual_seed(1)
    model = Residual()
    for _ in range(3):
        model(torch.randn(8, 1, 5, 5))
    model.a.weight.requires_grad_(False)  # folded all the same
    x, y = torch.randn(30, 1, 5, 5, dtype=torch.float64), torch.randint(3, (30,))
    data = [(x[:20], y[:20]), (x[20:], y[20:])] if in_batches else (x, y)
    problem = Problem(model, nn.functional.cross_entropy, data, dtype=torch.float64)
    problem.data.chunk_size = 8
    return problem


@pytest.mark.parametrize(
    "make", [problems.conv, residual, lambda: residual(True), problems.linear_regression, problems.mlp]
)
def test_folded_equals_plain(make: Callable[[], Problem]) -> None:
    fast, plain = both(make(), "folded")
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)


class Branching(problems.SmallConv):
    """Control flow on values, which torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.square().sum()) >= 0 else -x)


def branching() -> Problem:
    data = torch.randn(10, 1, 6, 6), torch.randint(2, (10,))
    return Problem(Branching(), nn.functional.cross_entropy, data)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (problems.conv, {"method": "batched"}, "needs a chain"),
        (problems.conv, {"method": "pointwise", "autocast": "bfloat16"}, "'pointwise' works in the model's own"),
        (problems.mlp, {"method": "batched", "autocast": "bfloat16"}, "'batched' needs a chain"),
        (branching, {"method": "folded"}, "needs a model that torch.fx can trace"),
        (problems.conv, {"method": "folded", "bn": "recalibrate"}, "BatchNorm statistics of the center"),
    ],
)  # fmt: skip
def test_a_missing_path_is_refused(make: Callable[[], Problem], options: dict[str, str], words: str) -> None:
    problem, bn = make(), options.get("bn", "center")
    plane = landscape.random_plane(problem)
    with pytest.raises(InputError, match=words):
        landscape.contour(problem, plane, grid=(2, 2), **options)
    fits = landscape.contour(problem, plane, grid=(1, 1), bn=bn)
    assert fits.loss[0, 0] == pytest.approx(problem.with_batchnorm(bn, 1000).loss(), rel=1e-6)


def test_bfloat16_is_near_and_returns_full_precision_losses() -> None:
    fast, plain = both(residual(), "folded", autocast="bfloat16")
    assert fast.dtype == torch.float64
    np.testing.assert_allclose(fast, plain, rtol=0.03)
    assert not torch.equal(fast, plain)

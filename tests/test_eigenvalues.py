"""Eigenvalues, products of chains, searches in step and cheap searches, against dense matrices."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape import InputError, OperationError, Problem
from landscape.core.devices import inner, vector_norm
from landscape.curvature import eigenvalues, search
from landscape.curvature.chain_hessian import ChainHessian
from landscape.curvature.hessian import HessianOperator
from landscape.curvature.operators import ALONE, NEAR_ZERO
from tests import problems
from tests.conftest import slow_but
from tests.dense import dense_hessian


def chain(activation: str = "tanh", loss: nn.Module | None = None, targets: Tensor | None = None) -> Problem:
    base = problems.mlp(activation=activation)
    assert base.tensors is not None
    x, y = base.tensors
    model = nn.Sequential(*copy.deepcopy(base.model))
    return Problem(model, loss or nn.CrossEntropyLoss(), (x, y if targets is None else targets))


CHAINS = {
    "tanh": chain,
    "relu": lambda: chain("relu"),
    "gelu": lambda: chain("gelu"),
    "smoothed": lambda: chain(loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    "squares": lambda: chain(loss=nn.MSELoss(), targets=torch.randn(53, 3, dtype=torch.float64)),
    "linear in the outputs": lambda: chain(loss=Picked()),
}


class Picked(nn.Module):
    """The mean of the outputs at the targets: no curvature of its own."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -outputs.gather(1, targets[:, None]).mean()


@pytest.mark.parametrize("name", slow_but(["tanh", "squares", "linear in the outputs"], CHAINS))
@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_products_of_a_chain_are_the_matrix(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 53 samples: the last chunk is ragged.
    monkeypatch.setattr("landscape.curvature.chain_hessian.MAX_CHUNK", 20)
    problem = CHAINS[name]()
    torch.manual_seed(1)
    thetas = problem.weights + 0.3 * torch.randn(3, problem.layout.size, dtype=torch.float64)
    vectors = torch.randn_like(thetas)
    dense = [dense_hessian(problem, theta, kind=kind) for theta in thetas]
    assert ChainHessian.saved_bytes(problem)
    h = ChainHessian(problem, thetas, matrix=kind)
    expected = torch.stack([d @ v for d, v in zip(dense, vectors, strict=True)])
    torch.testing.assert_close(h(vectors), expected, rtol=1e-9, atol=1e-11)
    h.select([2, 0])
    torch.testing.assert_close(h(vectors[[2, 0]]), expected[[2, 0]], rtol=1e-9, atol=1e-11)
    many = ChainHessian(problem, thetas[1:2], matrix=kind)
    torch.testing.assert_close(many(vectors), vectors @ dense[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(many(vectors[:1]), vectors[:1] @ dense[1], rtol=1e-9, atol=1e-11)


def test_what_is_no_chain_is_left_to_the_general_operator() -> None:
    assert ChainHessian.saved_bytes(problems.conv()) is None
    behind = problems.mlp()  # Gauss-Newton means the outputs, here those of the function
    behind.model.append(nn.Softplus())
    assert ChainHessian.saved_bytes(behind) is None
    assert eigenvalues.points_at_once(problems.conv()) == 1


@pytest.fixture(scope="module")
def single() -> Problem:
    """A float32 chain of 1,423 parameters after some training, so that λ_min is far below λ_max."""
    torch.manual_seed(0)
    x = torch.rand(400, 40)
    y = (x[:, :4].sum(1) * 5).long() % 3
    model = landscape.models.build("mlp", widths=[40, 30, 6, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(1500):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return Problem(model, nn.functional.cross_entropy, (x, y))


def test_a_cheap_search_ends_with_exact_residuals(single: Problem) -> None:
    double = Problem(single.model, single.criterion, single.tensors, dtype=torch.float64)
    h = ChainHessian(double, double.weights[None])
    dense = torch.linalg.eigvalsh(h(torch.eye(len(double.weights), dtype=torch.float64)))
    ends = landscape.extreme_eigenvalues(single)
    top = landscape.top_eigenvalues(single, 4)
    assert ends.converged
    assert top.converged
    general = landscape.top_eigenvalues(single, 2, part=["1", "3", "5"])  # all of it, by the general operator
    every = ends, top, general
    assert all(re.fullmatch(r"float32, \d+ of 400 samples", each.search) for each in every)
    found, stated, vectors = (
        torch.from_numpy(np.concatenate([getattr(each, name) for each in every])).double()
        for name in ("values", "residuals", "vectors")
    )
    truth = torch.stack((dense[-1], dense[0], *dense.flip(0)[:4], *dense.flip(0)[:2]))
    residuals = (h(vectors) - found[:, None] * vectors).norm(dim=1)
    torch.testing.assert_close(residuals, stated, rtol=1e-2, atol=1e-6)
    assert bool((stated <= 1e-2 * found.abs() + 1e-6).all())
    assert bool(((found - truth).abs() <= stated + 1e-6).all())


def test_cheap_searches_are_tried_where_they_help(single: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def how(problem: Problem, **options: Any) -> str:
        return landscape.extreme_eigenvalues(problem, **options).search

    assert re.fullmatch(r"float32, \d+ of 400 samples", how(single))
    assert how(single, search="exact") == "float32"
    assert how(single, residual_tol=1e-4) == "float32"
    assert how(single, part=["1", "3", "5"]) == how(single)
    monkeypatch.setattr("landscape.curvature.eigenvalues.MAX_SAMPLES", 0.4)
    assert how(single) == "float32"
    assert single.tensors is not None
    squares = Problem(single.model, nn.MSELoss(), (single.tensors[0], torch.randn(400, 3)))
    monkeypatch.setattr("landscape.curvature.eigenvalues.MAX_SAMPLES", 1.0)
    assert how(squares) == "float32"  # what a sample brings to these does not vanish where it is fitted
    monkeypatch.setattr("landscape.curvature.eigenvalues.MIN_PARAMETERS", 10**6)
    assert how(single) == "float32"
    assert how(problems.mlp()) == "float64"


def test_what_corrections_leave_is_searched_exactly(single: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.curvature.search.CORRECTIONS", 0)
    ends = landscape.extreme_eigenvalues(single, residual_tol=1e-3)
    exact = landscape.extreme_eigenvalues(single, search="exact", residual_tol=1e-3)
    assert ends.search == "float32"
    assert ends.converged
    assert (ends.min, ends.max) == pytest.approx((exact.min, exact.max), abs=2e-3 * abs(exact.max))
    assert ends.products > exact.products  # what the first search took is counted


def test_corrections_lead_from_a_nearby_operator_to_the_true_one() -> None:
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.cat((torch.linspace(-0.05, 0.1, 500), torch.tensor([-0.3, 2.0, 5.0]))).double()
    noise = torch.randn(503, 503, dtype=torch.float64, generator=generator)
    near = torch.diag(diagonal) + 1e-4 * (noise + noise.T)
    start = torch.randn(503, dtype=torch.float64, generator=generator)
    steps = search.search_eigenpairs(start, search.SearchOptions(low=1, residual_tol=1e-3))
    found = search.run_in_lockstep([steps], lambda v, _: v @ near)[0]
    raw = search.verify_and_refine(found, lambda v: v * diagonal, residual_tol=1.0)
    assert raw.residuals[-1] > 1e-3 * 0.3
    pairs = search.verify_and_refine(found, lambda v: v * diagonal, residual_tol=1e-3)
    assert pairs.converged
    assert bool((pairs.residuals <= 1e-3 * pairs.values.abs()).all())
    assert pairs.values.tolist() == pytest.approx([5.0, -0.3], abs=1e-4)
    assert found.products + 2 < pairs.products <= found.products + 8
    # An operator that is quite another is said to be so.
    other = search.verify_and_refine(
        found, lambda v: v.roll(7, 1) + v.roll(-7, 1) + v.flip(1), residual_tol=1e-3
    )
    assert not other.converged


def test_a_point_that_is_not_finite_leaves_the_others_their_samples(single: Problem) -> None:
    thetas = torch.stack((single.weights, 1e30 * single.weights))
    start = search.start_vector(single, 0)
    good, bad = eigenvalues.eigenpairs(single, thetas, start, search.SearchOptions(low=1))
    alone = landscape.extreme_eigenvalues(single)
    assert good.converged
    assert good.values.tolist() == pytest.approx([alone.max, alone.min], rel=1e-3)
    assert not bad.converged
    assert bool(bad.values.isnan().all())


def test_points_in_step_are_the_points_one_by_one(single: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = landscape.random_plane(single, seed=3)
    together = landscape.hessian_grid(single, plane, grid=(3, 2), search="exact")
    monkeypatch.setattr("landscape.curvature.eigenvalues.MAX_POINTS", 1)
    shares: list[float] = []
    apart = landscape.hessian_grid(single, plane, grid=(3, 2), search="exact", progress=shares.append)
    assert shares == sorted(shares)  # with each product, not as a point ends: a forecast needs them early
    assert len([share for share in shares if share < 1 / 6]) > 3
    assert len(set(together.products.ravel())) > 1  # they end at different times
    for name in ("lambda_min", "lambda_max"):
        a, b = (torch.from_numpy(getattr(g, name)) for g in (together, apart))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert abs(together.products - apart.products).max() <= 2


def test_a_hessian_grid_is_gone_on_with_and_refined(single: Problem) -> None:
    plane = landscape.random_plane(single, seed=3)
    coarse = landscape.hessian_grid(single, plane, grid=(3, 2))

    def gone_on(previous: landscape.HessianGrid, plane: Any = plane, **options: Any) -> landscape.HessianGrid:
        execution = landscape.Execution(previous=previous, save=lambda g: None)
        return landscape.hessian_grid(single, plane, execution=execution, **options)

    assert gone_on(coarse, grid=(3, 2)) is coarse
    done = np.array([[True, False, True], [False, True, True]])
    marked = dataclasses.replace(coarse, done=done, lambda_max=np.where(done, -7.0, np.nan))
    rest = gone_on(marked, grid=(3, 2))
    assert rest.done.all()
    np.testing.assert_array_equal(rest.lambda_max == -7.0, done)  # those were not computed again
    np.testing.assert_allclose(rest.lambda_max[~done], coarse.lambda_max[~done], rtol=0.02)
    fine = gone_on(marked, grid=(5, 3))
    np.testing.assert_array_equal(fine.lambda_max[::2, ::2] == -7.0, done)
    assert (fine.lambda_max == -7.0).sum() == 4
    cut = landscape.hessian_grid(single, plane, grid=(3, 2), max_products=4)
    assert not cut.converged.any()
    np.testing.assert_array_equal(gone_on(cut, grid=(3, 2)).lambda_max, coarse.lambda_max)
    with pytest.raises(InputError, match="its seed is 3 and not 4"):
        gone_on(coarse, landscape.random_plane(single, seed=4))
    with pytest.raises(InputError, match="its plane_sha256 is"):
        gone_on(coarse, dataclasses.replace(plane, center=plane.center + 1))


@pytest.mark.parametrize("done", [0, 3])
def test_a_point_s_result_does_not_depend_on_what_is_computed_with_it(
    single: Problem, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """Bitwise: whichever are there already, and in portions of one block."""
    monkeypatch.setattr("landscape.curvature.eigenvalues.MAX_POINTS", 4)
    monkeypatch.setattr("landscape.evaluation.grid.SAVE_SECONDS", 0.0)
    plane = landscape.random_plane(single, seed=3)
    whole = landscape.hessian_grid(single, plane, grid=(3, 2), span=0.3)
    marked = np.zeros((2, 3), bool)
    marked.flat[np.random.default_rng(done).permutation(6)[:done]] = True
    known = dataclasses.replace(whole, done=marked)
    portions: list[int] = []
    execution = landscape.Execution(previous=known, save=lambda g: portions.append(int(g.done.sum())))
    again = landscape.hessian_grid(single, plane, grid=(3, 2), span=0.3, execution=execution)
    for name in ("lambda_min", "lambda_max", "residual_min", "residual_max", "products"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
    if not done:
        assert portions == [4]


def test_a_grid_reaches_as_far_as_its_plane_s_markers() -> None:
    problem = problems.mlp(widths=(3, 4, 2), samples=20)
    far = torch.stack((problem.weights, problem.weights + 1, problem.weights - problem.weights.flip(0)))
    plane = landscape.between(problem, far)
    g = landscape.hessian_grid(problem, plane, grid=(3, 1))
    assert g.span == plane.span > 0.5
    assert g.x[-1] == plane.span
    assert landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(1, 1)).span == 0.1


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_graphs_that_are_kept_in_part_leave_no_chunk_out(kind: str) -> None:
    problem = problems.mlp(widths=(6, 3, 3))
    problem.data.chunk_size = 8  # 7 chunks
    operator = HessianOperator(problem, matrix=kind, graph_bytes=6_000)
    v = torch.randn_like(problem.weights)
    expected = dense_hessian(problem, kind=kind) @ v
    for _ in range(3):
        torch.testing.assert_close(operator(v), expected, rtol=1e-8, atol=1e-9)
        assert 0 < len(operator._kept_chunks) < 7


def test_a_start_with_little_of_the_top_eigenvector_does_not_end_at_the_second() -> None:
    top = torch.tensor([8.904, 8.587, 7.572, 6.14, 5.36, 4.0, 3.0, 2.0, 1.5], dtype=torch.float64)
    diagonal = torch.cat((torch.linspace(-0.07, 0.5, 2000, dtype=torch.float64), top))
    for seed in range(8):
        start = torch.randn(len(diagonal), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        start[2000] *= 0.03
        found = search.find_eigenpairs(lambda v: diagonal * v, start, high=1, residual_tol=1e-2)
        assert found.converged
        assert float(found.values[0]) == pytest.approx(8.904, rel=1e-2)


def test_the_grid_is_not_transposed_and_each_point_is_its_own_spectrum() -> None:
    problem = problems.mlp(widths=(3, 4, 2), samples=20)
    plane = landscape.random_plane(problem, seed=4)
    g = landscape.hessian_grid(problem, plane, grid=(3, 2), span=1.0, residual_tol=1e-4)
    assert g.ratio.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            theta = plane.center + g.x[j] * plane.directions[0] + g.y[i] * plane.directions[1]
            dense = torch.linalg.eigvalsh(problems.textbook_hessian(problems.at(problem, theta))).numpy()
            assert abs(g.lambda_min[i, j] - dense[0]) <= g.residual_min[i, j] + 1e-12
            assert abs(g.lambda_max[i, j] - dense[-1]) <= g.residual_max[i, j] + 1e-12
    np.testing.assert_allclose(g.ratio, np.abs(g.lambda_min) / np.abs(g.lambda_max))
    assert bool(g.converged.all())
    assert bool((g.products > 2).all())


@pytest.mark.parametrize("name", ["mlp relu", "conv"])
def test_a_hessian_that_is_not_finite_is_nan_and_not_converged(name: str) -> None:
    """Of the convolution the gradient there is finite, and no product is."""
    problem = problems.ALL[name]()
    plane = landscape.random_plane(problem)
    huge = landscape.Plane(plane.center, plane.directions * 1e200, "random", "none", 0)
    g = landscape.hessian_grid(problem, huge, grid=(3, 1), span=1.0)
    ends = landscape.extreme_eigenvalues(problem)
    np.testing.assert_allclose(g.lambda_max, [[np.nan, ends.max, np.nan]], rtol=1e-6)
    np.testing.assert_allclose(g.lambda_min, [[np.nan, ends.min, np.nan]], rtol=1e-6)
    assert g.converged.tolist() == [[False, True, False]]
    assert g.products[0, 0] <= 2  # it does not go on
    assert "2 without: loss, gradient or products are NaN or infinite" in g.summary()
    if name == "mlp relu":
        there = problems.at(problem, problem.weights + huge.directions[0])
        with pytest.raises(OperationError, match="the loss there is nan"):
            landscape.spectrum(there, 1, quantities=["trace", "density"])


# No eigenvalue is missed in silence: spectra that are hard for Krylov spaces.
SIZE = 240  # more than the basis: it is not gone through whole
BULK = np.linspace(-0.05, 0.1, SIZE)


def topped(*top: float) -> np.ndarray:
    """The bulk with these in place of its largest."""
    return np.concatenate((BULK[: SIZE - len(top)], np.array(top)))


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE)


SPECTRA: dict[str, np.ndarray] = {
    **{f"pair {gap:g}": topped(5, 4, 3, 2, 2 - gap, 1) for gap in (1e-1, 1e-3, 1e-5, 1e-8)},
    **{f"first pair {gap:g}": topped(5, 5 - gap, 3, 2, 1.5, 1) for gap in (1e-1, 1e-3, 1e-5)},
    **{f"three pairs {gap:g}": topped(3, 3 - gap, 2, 2 - gap, 1, 1 - gap) for gap in (1e-2, 1e-6)},
    **{f"{n} copies of the largest": topped(*[1.0] * n, 0.5, 0.4, 0.3, 0.2) for n in range(2, 8)},
    **{f"{n} copies of the fifth": topped(5, 4, 3, 2, *[1.0] * n) for n in range(2, 5)},
    "copies twice": topped(2, 2, 1, 1, 0.5, 0.5),
    **{f"{n} in [{low}, 1]": topped(*np.linspace(low, 1, n)) for low in (0.8, 0.95, 0.99) for n in (8, 50)},
    "copies of zero": np.concatenate((np.zeros(SIZE - 3), [1, 2, 3])),
    "copies of zero, saddle": np.concatenate((np.zeros(SIZE - 6), [-3, -2, -1, 1, 2, 3])),
    "uniform": np.linspace(0, 1, SIZE),
    "positive definite": np.linspace(0.1, 1, SIZE),
    "negative definite": -np.linspace(0.1, 1, SIZE),
    "+1 and -0.98": np.concatenate((np.linspace(-0.98, -0.5, 40), np.zeros(SIZE - 80), np.linspace(0.5, 1, 40))),
    "+1 and -0.98 alone": np.concatenate(([-0.98], np.linspace(-0.1, 0.1, SIZE - 2), [1.0])),
    "semicircle": np.cos(np.pi * (np.arange(SIZE) + 0.5) / SIZE),
    **{f"power {power:g}": np.arange(1, SIZE + 1) ** -power for power in (0.5, 1.0, 2.0)},
    **{f"normal {seed}": normal(seed) for seed in range(4)},
    **{f"squares {seed}": normal(seed) ** 2 for seed in range(2)},
    "large negative": np.concatenate((topped(5, 4, 3, 2, 1)[1:], [-1000])),
    "tiny steps": topped(*(1 - 1e-4 * np.arange(12))),
}  # fmt: skip
STARTS = ("random", "without the first")


def made(values: np.ndarray, missing: str) -> tuple[Tensor, Tensor]:
    """A dense matrix with these eigenvalues, and where to start."""
    generator = torch.Generator().manual_seed(7)
    q = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)).Q
    start = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    if missing != "random":
        column = q[:, np.argmax(values)]
        start = start - (1 - 1e-9) * (start @ column) * column
    return (q * torch.from_numpy(np.asarray(values, float))) @ q.T, start


def top_five(name: str, missing: str) -> tuple[search.RitzPairs, np.ndarray]:
    """What is found, and the dense spectrum, descending."""
    matrix, start = made(SPECTRA[name], missing)
    dense = torch.linalg.eigvalsh(matrix).flip(0).numpy()
    return search.find_eigenpairs(lambda v: matrix @ v, start, high=5), dense


@pytest.mark.parametrize("missing", STARTS)
@pytest.mark.parametrize("name", slow_but([*SPECTRA][::5], SPECTRA))
def test_none_of_the_top_five_is_missed(name: str, missing: str) -> None:
    pairs, dense = top_five(name, missing)
    assert pairs.converged
    slack = np.maximum(1e-2 * np.abs(dense[:5]), NEAR_ZERO * np.abs(dense).max())
    assert bool((pairs.values.numpy() >= dense[:5] - slack).all())
    tiny = 1e-12 * np.abs(dense).max()
    assert pairs.bounds[1] >= dense[5] - tiny
    assert pairs.checks < pairs.products / 2
    if pairs.complete:
        assert pairs.bounds[1] <= dense[4] + slack[4] + tiny


def test_what_is_verified_says_so() -> None:
    apart = ["pair 0.001", "first pair 0.001", "2 copies of the fifth", "copies of zero", "power 1"]
    assert [name for name in apart if top_five(name, "random")[0].complete] == apart
    crowded, dense = top_five("50 in [0.95, 1]", "random")
    assert not crowded.complete  # the sixth is nearer than a few products can tell
    assert crowded.bounds[1] > dense[0]
    # Nor is a search that is cut short.
    matrix, start = made(SPECTRA["pair 0.001"], "random")
    whole = search.find_eigenpairs(lambda v: matrix @ v, start, high=5)
    cut = search.find_eigenpairs(
        lambda v: matrix @ v, start, high=5, max_products=whole.products - 5 - whole.checks
    )
    assert not cut.complete
    assert cut.checks == 0


@pytest.mark.parametrize("name", slow_but([*SPECTRA][1::5], SPECTRA))
def test_one_start_bounds_both_ends(name: str) -> None:
    matrix, start = made(SPECTRA[name], "random")
    dense = torch.linalg.eigvalsh(matrix)
    found = search.find_eigenpairs(lambda v: matrix @ v, start, low=1)
    low, high = found.bounds
    tiny = 1e-12 * float(dense.abs().max())
    assert low <= float(dense[0]) + tiny
    assert high >= float(dense[-1]) - tiny
    assert low > 2 * dense[0] - dense[-1]  # bounds that say something
    assert high < 2 * dense[-1] - dense[0]


def test_bounds_fail_as_rarely_as_they_say() -> None:
    """A few steps from random starts on a spectrum whose largest eigenvalue lies far out, and is seen late."""
    diagonal = torch.cat((torch.linspace(0, 1, 399), torch.tensor([1.05]))).double()
    missed = 0
    for seed in range(150):
        start = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found = search.find_eigenpairs(lambda v: v * diagonal, start, residual_tol=0.2, max_products=6)
        missed += found.bounds[1] < 1.05
    assert missed <= 6  # 1.5 are expected at most; half of b may be random only, hence fewer


def test_sums_of_millions_of_float32_numbers_keep_their_digits() -> None:
    """PyTorch's own norm and inner product are off by 1e-4 here, and by percents in larger models."""
    v = torch.randn(5 * 10**6, generator=torch.Generator().manual_seed(0))
    exact = float(v.double() @ v.double())
    assert abs(float(vector_norm(v)) / exact**0.5 - 1) < 1e-5
    assert abs(float(inner(v[None], v)[0]) / exact - 1) < 1e-5
    q = ALONE.orthonormal(v[None])
    assert abs(float(q.double().norm()) - 1) < 1e-5


def test_large_weights_are_not_copied_and_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.mlp()
    plain = problem.hessian() @ problem.weights
    monkeypatch.setattr("landscape.curvature.hessian.SHARED", 0)
    h = problem.hessian()
    torch.testing.assert_close(h @ problem.weights, plain)
    problem.weights.mul_(2)
    with pytest.raises(OperationError, match=r"^weights: they were changed in place .* again"):
        h @ problem.weights

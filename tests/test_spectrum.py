"""Top eigenvalues, trace and density against dense matrices, for the Hessian, its blocks and Gauss-Newton."""

from __future__ import annotations

import copy
import functools
import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import landscape
from landscape import HessianOperator, InputError, Problem
from landscape.core.analysis import memory_of
from landscape.curvature.hessian import MATRICES
from landscape.curvature.operators import ALONE
from landscape.curvature.search import find_eigenpairs
from landscape.data.base import mean_output
from landscape.gradients.minibatches import Minibatches, stream
from landscape.problem.layout import Layout
from landscape.results.spectrum import QUANTITIES
from tests import problems
from tests.conftest import Command, slow_but
from tests.dense import dense_hessian, same_ends

TINY = 1e-10


def dense_gauss_newton(problem: Problem) -> Tensor:
    """JᵀH_L J (P, P) over all data as one batch, from the full Jacobian and the full Hessian in the outputs."""
    assert problem.tensors is not None
    x, y = problem.tensors
    z = problem.outputs(problem.weights, x).detach()
    jacobian = torch.autograd.functional.jacobian(lambda t: problem.outputs(t, x), problem.weights)
    curvature = torch.autograd.functional.hessian(lambda o: problem.criterion(o, y), z)
    j, h = jacobian.reshape(z.numel(), -1), curvature.reshape(z.numel(), z.numel())
    return j.T @ h @ j


def dense(problem: Problem, kind: str = "hessian") -> Tensor:
    return problems.textbook_hessian(problem) if kind == "hessian" else dense_gauss_newton(problem)


@pytest.mark.parametrize("name", slow_but(["saddle", "mlp tanh", "conv"], problems.ALL))
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("graph_bytes", [pytest.param(0, marks=pytest.mark.slow), 2**30])
def test_products_of_both_kinds_are_of_the_averaged_matrix(name: str, kind: str, graph_bytes: int) -> None:
    problem = problems.ALL[name]()
    problem.data.chunk_size = 7  # ragged chunks: sums that are not averages, or one batch for all, would show
    matrix = dense(problem, kind)
    torch.testing.assert_close(dense_hessian(problem, kind=kind), matrix, rtol=1e-7, atol=1e-9)
    operator = HessianOperator(problem, matrix=kind, graph_bytes=graph_bytes)
    v = torch.randn_like(problem.weights)
    for _ in range(2):  # a kept graph serves more than once
        torch.testing.assert_close(operator(v), matrix @ v, rtol=1e-7, atol=1e-9)
    assert operator.products == 2


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize(
    ("part", "names"), [("1.weight", ["1.weight"]), (["5.bias", "1"], ["1.weight", "1.bias", "5.bias"])]
)
def test_a_part_is_a_diagonal_block(kind: str, part: str | list[str], names: list[str]) -> None:
    problem = problems.mlp(widths=(4, 5, 4, 3), samples=20)
    slots = [s for s in problem.layout.slots if s.name in names]
    rows = torch.cat([torch.arange(s.offset, s.offset + s.size) for s in slots])
    block = dense(problem, kind)[rows][:, rows]
    torch.testing.assert_close(dense_hessian(problem, kind=kind, part=part), block, rtol=1e-8, atol=TINY)
    exact = torch.linalg.eigvalsh(block).flip(0)
    found = landscape.top_eigenvalues(problem, 3, residual_tol=1e-6, matrix=kind, part=part)
    np.testing.assert_allclose(found.values, exact[:3], rtol=1e-6, atol=1e-8)
    assert found.vectors.shape == (3, len(rows))
    same_ends(problem, block, None, abs=1e-7, matrix=kind, part=part)
    many = landscape.trace(problem, 3 * len(rows), matrix=kind, part=part)
    assert many.value == pytest.approx(float(block.trace()))
    assert landscape.density(problem, 2, len(rows), matrix=kind, part=part).parameters == len(rows)


TABLES: dict[str, tuple[Callable[[], Problem], str | list[str], list[str], dict[str, Any]]] = {
    "mlp": (problems.mlp, "block", ["1", "3", "5"], {}),
    "mlp, patterns": (problems.mlp, ["*.bias", "5"], ["*.bias", "5", "others"], {"matrix": "gauss-newton"}),
    "mlp, differences": (problems.mlp, "layer", ["1", "3", "5"], {"derivatives": "differences"}),
    "convolution, BatchNorm": (problems.conv, "layer", ["conv", "norm", "head"], {}),
    "frozen and unused": (problems.linear_regression, "parameter", ["w", "unused"], {}),
    "tied transformer": (problems.language_model, "block", ["embedding", "mix", "norm", "unused"], {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_ends_and_traces_of_the_diagonal_blocks(name: str) -> None:
    make, by, names, options = TABLES[name]
    problem = make()
    table = landscape.curvature_table(problem, by, residual_tol=1e-4, max_memory=2**33, **options)
    matrix = dense_hessian(problem, kind=options.get("matrix", "hessian"))
    groups = problem.layout.groups(by)
    assert (table.groups, list(groups)) == (("all", *names), names)
    assert sum(table.sizes[1:]) == table.sizes[0] == problem.layout.size
    assert table.converged
    whole = float(matrix.trace())
    for g, slots in enumerate([problem.layout.slots, *groups.values()]):
        rows = torch.cat([torch.arange(s.offset, s.offset + s.size) for s in slots])
        block = matrix[rows][:, rows]
        values, radius = torch.linalg.eigvalsh(block), float(matrix.norm())
        assert table.lambda_max[g] == pytest.approx(float(values[-1]), rel=1e-6, abs=1e-6 * radius)
        assert table.lambda_min[g] == pytest.approx(float(values[0]), rel=1e-6, abs=1e-6 * radius)
        near = 5 * table.trace_error[g] + 1e-9 * radius
        assert table.trace[g] == pytest.approx(float(block.trace()), abs=near)
        near = 5 * table.share_error[g] + 1e-9
        assert table.share[g] == pytest.approx(float(block.trace()) / whole, abs=near)
        assert table.trace_error[g] <= 0.25 * abs(whole)
    assert table.trace[1:].sum() == pytest.approx(table.trace[0])


def test_shares_of_the_trace_lie_around_the_true_ones_as_their_errors_say() -> None:
    problem = problems.mlp()
    traces = [float(dense_hessian(problem, part=name).trace()) for name in ("1", "3", "5")]
    pulls = []
    for seed in range(8):
        table = landscape.curvature_table(problem, residual_tol=0.5, seed=seed)
        assert (table.share[0], table.share_error[0]) == (1.0, 0.0)
        pulls.append((table.share[1:] - np.divide(traces, sum(traces))) / table.share_error[1:])
    assert 0.65 < np.sqrt(np.mean(np.square(pulls))) < 1.5
    assert (np.abs(np.mean(pulls, 0)) * np.sqrt(len(pulls)) < 4).all()


def test_a_short_search_and_a_trace_near_zero_are_said() -> None:
    short = landscape.curvature_table(problems.mlp(), max_products=2)
    assert (short.converged, short.met.any()) == (False, False)
    assert "NOT converged" in short.describe()[1].note
    balanced = problems.quadratic([*np.linspace(-1, 1, 400)])
    table = landscape.curvature_table(balanced, residual_tol=0.5)
    assert np.isnan(table.share).all()
    assert np.isfinite(table.trace_error).all()


FORECASTS: list[tuple[str, dict[str, Any], bool]] = [
    ("extreme_eigenvalues", {"residual_tol": 0.01, "search": "exact"}, False),
    ("top_eigenvalues", {"k": 1, "search": "exact"}, False),
    ("top_eigenvalues", {"k": 5, "search": "exact"}, False),
    ("top_eigenvalues", {"k": 2, "part": "5"}, False),
    ("curvature_table", {"by": "layer"}, False),
    ("spectrum", {"k": 2, "quantities": ("trace",), "search": "exact"}, False),
    ("trace", {"products": 30}, True),
    ("trace", {"products": 200, "part": "5.bias"}, True),
    ("density", {"draws": 3, "steps": 7}, True),
]


@pytest.mark.parametrize(("name", "options", "known"), FORECASTS)
def test_products_are_forecast_to_a_factor_of_two(name: str, options: dict[str, Any], known: bool) -> None:
    problem = problems.mlp(widths=(20, 30, 20, 5), activation="relu", samples=100)
    cost = landscape.forecast(getattr(landscape, name), problem, **options)
    found = getattr(landscape, name)(problem, **options).products
    assert found == cost.products if known else found / 2 <= cost.products <= 2 * found
    assert cost.memory == memory_of(getattr(landscape, name), problem, **options)[0] < cost.free
    assert 0 < cost.seconds < np.inf
    assert re.fullmatch(
        rf"{name}: some {cost.products} Hessian products, about .*s, [\d,]+ MiB of memory at most, [\d,]+ MiB are free",
        repr(cost),
    )


def test_the_forecast_of_a_grid_is_that_of_its_points() -> None:
    problem = problems.mlp()
    ends = landscape.forecast(landscape.extreme_eigenvalues, problem)
    assert landscape.forecast(landscape.eigen_plane, problem).products == ends.products
    grid = landscape.forecast(landscape.hessian_grid, problem, grid=(3, 2))
    assert abs(grid.products - 6 * ends.products) <= 6
    contour = landscape.forecast(landscape.contour, problem, grid=9)
    assert (contour.products, "Hessian" in repr(contour)) == (0, False)
    assert contour.seconds >= 0
    assert landscape.forecast(landscape.line, problem, points=5).memory <= contour.memory
    tight = landscape.forecast(landscape.extreme_eigenvalues, problem, max_memory=2**20)
    assert tight.memory > tight.free
    assert (tight.products, "about" in repr(tight)) == (0, False)  # nothing is timed that does not fit
    with pytest.raises(InputError, match="function: max is not allowed, it must be one of "):
        landscape.forecast(max, problem)
    with pytest.raises(InputError, match="args: trace has a forecast for a landscape.Problem or a run only"):
        landscape.forecast(landscape.trace, torch.eye(3))
    with pytest.raises(InputError, match="products: None is not allowed"):
        landscape.forecast(landscape.trace, problem, products=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kk'"):
        landscape.forecast(landscape.top_eigenvalues, problem, kk=5)


@pytest.mark.parametrize("name", ["extreme_eigenvalues", "top_eigenvalues"])
def test_a_search_says_in_its_first_third_how_long_it_takes(name: str) -> None:
    problem = problems.mlp(widths=(20, 30, 20, 5), activation="relu", samples=100)
    shares: list[float] = []
    products = getattr(landscape, name)(problem, search="exact", progress=shares.append).products
    first = np.array(shares[1 : products // 3])
    total = np.arange(2, len(first) + 2) / first  # the products that each share foretells
    assert len(total) > 1
    assert (np.maximum(total / products, products / total) < 2.2).all()
    assert shares == sorted(shares)
    assert shares[-1] <= 1


def test_groups_have_each_parameter_once() -> None:
    layers = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    layout = Layout.of(layers)
    assert [s.name for s in layout.select("h")] == [s.name for s in layout.slots[:4]]
    assert [*layout.groups("block")] == [*layout.groups("layer")] == ["h.0", "h.1", "head"]
    assert [*layout.groups("parameter")] == [s.name for s in layout.slots]
    named = {name: [s.name for s in own] for name, own in layout.groups(["*.bias", "h"]).items()}
    assert named == {
        "*.bias": ["h.0.bias", "h.1.bias", "head.bias"],
        "h": ["h.0.weight", "h.1.weight"],
        "others": ["head.weight"],
    }
    for wrong in ("blocks", ["h", "h.0"], ["*.gain"]):
        with pytest.raises(InputError, match="by: .* fits no trainable parameter that is left"):
            layout.groups(wrong)


@pytest.mark.parametrize("name", slow_but(["saddle", "mlp tanh", "conv"], problems.ALL))
@pytest.mark.parametrize("kind", MATRICES)
def test_top_and_ends_are_those_of_the_dense_spectrum(name: str, kind: str) -> None:
    problem = problems.ALL[name]()
    matrix = dense(problem, kind)
    k = min(3, problem.layout.size)
    found = landscape.top_eigenvalues(problem, k, residual_tol=1e-6, matrix=kind)
    assert found.converged
    assert found.products >= k + 1
    expected, vectors = torch.linalg.eigvalsh(matrix).flip(0)[:k], torch.from_numpy(found.vectors)
    np.testing.assert_allclose(found.values, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-8)
    residuals = (vectors @ matrix - torch.from_numpy(found.values)[:, None] * vectors).norm(dim=1)
    np.testing.assert_allclose(residuals, found.residuals, rtol=1e-5, atol=1e-11)
    ends = landscape.extreme_eigenvalues(problem, residual_tol=1e-3, matrix=kind)
    truth, vectors = torch.linalg.eigvalsh(matrix)[[-1, 0]].numpy(), torch.from_numpy(ends.vectors)
    residuals = (vectors @ matrix - torch.from_numpy(ends.values)[:, None] * vectors).norm(dim=1)
    np.testing.assert_allclose(residuals, ends.residuals, rtol=1e-6, atol=1e-12)
    floor = 1e-3 * np.abs(ends.values).max()
    assert ends.converged
    assert (np.abs(ends.values - truth) <= ends.residuals + 1e-12).all()
    assert (ends.residuals <= 1.01e-3 * np.maximum(np.abs(ends.values), floor) + 1e-12).all()


@pytest.mark.parametrize(
    ("spectrum", "k"),
    [([3.0, 3.0, 1.0], 2), ([3.0, 3.0, 3.0, 0.0], 3), ([0.0] * 5, 2), ([3.0, 0.0, 0.0, 0.0, 0.0], 3), ([1.0, 1.0], 2),
     ([0.1, 1.0], 2), ([-0.98, 1.0], 2), ([4.0], 1), ([-1.0, -1.0, -2.0, 5.0], 4), ([-5.0, 0.1, 1.0], 2)],
)  # fmt: skip
def test_repeated_eigenvalues_are_found_as_often_as_they_are_there(spectrum: list[float], k: int) -> None:
    problem = problems.quadratic(spectrum)
    found, ends = landscape.top_eigenvalues(problem, k), landscape.extreme_eigenvalues(problem)
    assert found.converged
    assert found.values.tolist() == pytest.approx(sorted(spectrum, reverse=True)[:k], abs=1e-9)
    expected = pytest.approx((min(spectrum), max(spectrum)), abs=1e-9)
    assert (ends.min, ends.max) == expected
    g = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(1, 1))
    assert (g.lambda_min.item(), g.lambda_max.item()) == expected
    values = landscape.spectrum(problem).values
    assert (values[-1], values[0]) == expected


# Small whole numbers make copies, all of which are found in a small matrix.
NUMBERS = st.one_of(st.floats(-100, 100), st.integers(-3, 3).map(float))


@settings(max_examples=25)
@given(st.lists(NUMBERS, min_size=6, max_size=40), st.integers(0, 3), st.integers(1, 5))
def test_low_and_high_from_one_run(values: list[float], low: int, high: int) -> None:
    diagonal = torch.tensor(values, dtype=torch.float64)
    start = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = find_eigenpairs(lambda v: diagonal * v, start, low=low, high=high, residual_tol=1e-8)
    ordered = np.sort(values)[::-1]
    expected = ordered if low + high >= len(values) else np.r_[ordered[:high], ordered[len(ordered) - low :]]
    scale = float(diagonal.abs().max())
    np.testing.assert_allclose(found.values, expected, atol=1e-5 * scale + 1e-9)


@pytest.mark.parametrize("low", [0, 1])
def test_a_full_basis_is_restarted_not_given_up(low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.evaluation.needs.MAX_BASIS", 20)
    diagonal = torch.linspace(-9, 1, 500, dtype=torch.float64)
    diagonal[:5] = torch.tensor([3.0, 2.6, 2.2, 1.9, -9.1])
    start = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = find_eigenpairs(lambda v: diagonal * v, start, high=4, low=low, residual_tol=1e-4)
    assert found.converged
    assert found.products > 24
    assert found.values.tolist() == pytest.approx([3.0, 2.6, 2.2, 1.9, -9.1][: 4 + low], abs=1e-5)
    cut = find_eigenpairs(lambda v: diagonal * v, start, high=4, low=low, residual_tol=1e-4, max_products=10)
    assert not cut.converged
    assert cut.products == 14 + low


def test_a_restart_of_both_ends_takes_no_second_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps before the restart bound what was not seen: the products would otherwise be half as many more."""
    monkeypatch.setattr("landscape.evaluation.needs.MAX_BASIS", 8)
    diagonal = torch.linspace(-1, 1, 500, dtype=torch.float64)
    diagonal[:4] = torch.tensor([5.0, 4.5, -3.0, -2.8])
    start = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = find_eigenpairs(lambda v: diagonal * v, start, low=1, high=1, residual_tol=1e-6)
    assert found.converged
    assert found.products > 10
    assert found.checks == 0
    assert found.values.tolist() == pytest.approx([5.0, -3.0], abs=1e-5)
    low, high = found.bounds
    assert -20 < low <= -3
    assert 5 <= high < 20


def test_a_warm_start_saves_products_and_misses_nothing() -> None:
    diagonal = torch.linspace(-1, 1, 300, dtype=torch.float64)
    diagonal[0] = 5.0
    unit = torch.eye(300, dtype=torch.float64)
    # Starting at an eigenvector that is not the top's, the top is found all the same.
    model = landscape.models.build("quadratic", eigenvalues=diagonal.tolist(), rotate=False, start=1.0)
    data = landscape.data.load("quadratic", dimension=300, samples=10)
    problem = Problem(model, mean_output, data.train, dtype=torch.float64)
    astray = landscape.top_eigenvalues(problem, 1, residual_tol=1e-6, initial=unit[150])
    cold = landscape.top_eigenvalues(problem, 1, residual_tol=1e-6)
    near = landscape.top_eigenvalues(problem, 1, residual_tol=1e-6, initial=unit[0])
    assert float(astray.values[0]) == pytest.approx(5.0)
    assert near.products <= cold.products
    assert float(near.values[0]) == pytest.approx(5.0)


def test_the_trace_is_unbiased_and_its_error_bar_honest() -> None:
    torch.manual_seed(0)
    a = torch.randn(60, 60, dtype=torch.float64)
    a = a + a.T + torch.diag(torch.linspace(0, 30, 60, dtype=torch.float64))
    exact = float(a.trace())
    found = [landscape.trace(a, 45, seed=seed) for seed in range(200)]
    errors = np.array([t.value - exact for t in found])
    bars = np.array([t.standard_error for t in found])
    assert abs(errors.mean()) <= 4 * errors.std(ddof=1) / np.sqrt(len(errors))
    assert np.mean(np.abs(errors) <= 2 * bars) >= 0.9  # about 94% for 15 samples
    assert np.sqrt(np.mean(bars**2)) == pytest.approx(errors.std(ddof=1), rel=0.15)
    assert all(t.products == 45 for t in found)
    again = landscape.trace(a, 45, seed=3)
    assert (again.value, again.standard_error) == (found[3].value, found[3].standard_error)
    np.testing.assert_array_equal(again.draws, found[3].draws)


def test_the_signs_of_the_trace_are_signs() -> None:
    like = torch.zeros(50, dtype=torch.float64)
    drawn = ALONE.signs(like, 4, torch.Generator().manual_seed(0))
    assert drawn.shape == (4, 50)
    assert drawn.unique().tolist() == [-1.0, 1.0]


def test_each_probe_is_exact_in_its_full_krylov_space() -> None:
    problem = problems.mlp(widths=(3, 3, 2), samples=15)
    matrix = dense(problem)
    size = len(matrix)
    d = landscape.density(problem, draws=3, steps=size)
    generator = torch.Generator().manual_seed(0)
    for nodes, weights in zip(d.nodes, d.masses, strict=True):
        z = 2.0 * torch.randint(2, (1, size), dtype=torch.int8, generator=generator)[0].double() - 1
        for function in (torch.exp, torch.sin, torch.square):
            values, vectors = torch.linalg.eigh(matrix)
            exact = float(((vectors.T @ z) ** 2 * function(values)).sum()) / size
            assert float(weights @ function(torch.from_numpy(nodes)).numpy()) == pytest.approx(
                exact, abs=1e-10
            )


def test_the_broadened_density_integrates_to_one_and_shows_the_spectrum() -> None:
    eigenvalues = [0.0] * 6 + [4.0] * 2
    d = landscape.density(problems.quadratic(eigenvalues), draws=40)
    assert d.products <= 40 * 3  # two eigenvalues: Krylov spaces of dimension 2 at most, the rest filled up
    at = np.linspace(-2, 6, 4001)
    curve = d.broadened(at, 0.1)
    assert np.trapezoid(curve, at) == pytest.approx(1, abs=1e-9)
    top = np.trapezoid(curve[at > 2], at[at > 2])
    assert top == pytest.approx(0.25, abs=0.1)
    assert d.width() == pytest.approx(0.04)
    assert landscape.density(problems.quadratic([2.0, 2.0])).width() == pytest.approx(0.02)


def test_probes_that_end_early_do_not_move_the_moments() -> None:
    diagonal = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    d = landscape.density(torch.diag(diagonal), draws=5, steps=4)
    assert d.nodes.shape == (5, 4)
    np.testing.assert_allclose(d.masses.sum(1), 1)
    assert d.moment(1)[0] == pytest.approx(1.25)  # random signs weigh every coordinate alike


@pytest.mark.parametrize("name", slow_but(["mostly negative"], ["mlp tanh", "conv", "mostly negative"]))
def test_pyhessian_agrees_on_the_largest_magnitude_and_the_trace(name: str) -> None:
    problem = problems.ALL[name]()
    problem.data.chunk_size = 7
    values = torch.linalg.eigvalsh(dense(problem))
    largest = float(values[values.abs().argmax()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = landscape.top_eigenvalues(problem, engine="pyhessian", residual_tol=1e-3, max_products=2000)
        trace = landscape.trace(problem, 200, engine="pyhessian")
    assert float(theirs.values[0]) == pytest.approx(largest, rel=2e-3)
    assert theirs.converged
    assert abs(trace.value - float(values.sum())) <= 4.5 * trace.standard_error + TINY
    assert trace.products == 200
    ours = landscape.top_eigenvalues(problem, residual_tol=1e-4)
    assert float(ours.values[0]) == pytest.approx(float(values[-1]), rel=2e-3)


def test_what_misleads_power_iteration_is_said() -> None:
    problem = problems.quadratic([-0.98, 1.0])  # ends of like magnitude
    cut = landscape.top_eigenvalues(problem, engine="pyhessian", max_products=100, seed=2)
    assert float(cut.values[0]) == pytest.approx(0.85, abs=0.01)  # each step removes 2% of what is left
    assert float(cut.residuals[0]) > 0.5
    assert not cut.converged
    ours = landscape.top_eigenvalues(problem, seed=2)
    assert (float(ours.values[0]), ours.converged) == (pytest.approx(1.0), True)
    negative = problems.quadratic([-3.0, -1.0, 1.0])  # a negative trace does not end its estimate
    found = landscape.trace(negative, 150, engine="pyhessian")
    assert abs(found.value + 3) <= 4.5 * found.standard_error


def test_batches_that_come_in_another_order_each_time() -> None:
    problem = problems.mlp(widths=(3, 4, 2), samples=40)
    x, y = problem.tensors or ()

    class Shuffled:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return ((x[i], y[i]) for i in torch.randperm(40).split(9))

    shuffled = Problem(problem.model, problem.criterion, Shuffled())
    v = torch.randn_like(problem.weights)
    expected = dense(problem) @ v
    for graph_bytes in (0, 50_000, 2**30):
        operator = HessianOperator(shuffled, graph_bytes=graph_bytes)
        for _ in range(3):
            torch.testing.assert_close(operator(v), expected, rtol=1e-8, atol=TINY)


def test_gauss_newton_needs_one_tensor() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    problem = Problem(
        Pair(2, 2), lambda z, y: (z[0] - y).square().mean(), (torch.ones(3, 2), torch.ones(3, 2))
    )
    assert landscape.extreme_eigenvalues(problem).converged
    with pytest.raises(InputError, match="matrix: 'gauss-newton' needs outputs of one tensor"):
        landscape.extreme_eigenvalues(problem, matrix="gauss-newton")


def test_one_result_holds_what_was_asked() -> None:
    problem = problems.mlp(widths=(3, 3, 3, 2))
    exact = torch.linalg.eigvalsh(dense(problem)).flip(0)
    asked: dict[str, Any] = {"quantities": QUANTITIES, "part": ["1", "3", "5"]}
    everything = landscape.spectrum(problem, 2, residual_tol=1e-6, draws=2, **asked)
    np.testing.assert_allclose(everything.values, exact[[0, 1, -1]], rtol=1e-5)
    assert (everything.lowest, everything.converged, everything.parameters) == (1, True, 32)
    assert abs(everything.trace - float(exact.sum())) <= 5 * everything.trace_error
    assert everything.density is not None
    np.testing.assert_allclose(everything.density.masses.sum(1), 1)
    assert everything.part == "1,3,5"
    default, only = landscape.spectrum(problem), landscape.spectrum(problem, quantities=["trace"])
    assert (len(default.values), default.lowest, default.density) == (2, 1, None)
    assert np.isnan(default.trace)
    assert (len(only.values), only.products) == (0, 60)


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(trained / "last.h5", tmp_path))


def test_the_command_prints_numbers_and_errors(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    out_file = tmp_path / "s.h5"
    quantities = ("--quantities", "trace,density", "--steps", 20, "--draws", 3)
    flags = ("--k", 2, *quantities, "--part", "1", "--part", "3.bias")
    code, out, err = command("spectrum", checkpoint, *flags, "-o", out_file)
    assert code == 0, err
    result = landscape.load(out_file)
    problem = landscape.load(checkpoint).problem()
    expected = landscape.top_eigenvalues(problem, 2, part=["1", "3.bias"])
    np.testing.assert_array_equal(result.values, expected.values)
    assert (result.split, result.part, result.parameters) == ("train", "1,3.bias", 6 * 8 + 8 + 3)
    assert result.source_sha256 == landscape.core.hdf5.sha256(checkpoint)
    for value, residual in zip(result.values, result.residuals, strict=True):
        assert f"relative residual {residual / value:.1e}" in out
    assert f"{result.bound_high:.6g} nat   no other eigenvalue" in out
    assert result.complete
    for words in ("λ_1", "λ_2", "trace", "±", f"{result.values[0]:.6g}", f"{result.trace:.6g}"):
        assert words in out
    theirs = ("--engine", "pyhessian", "--k", 1, "--max-products", 2)
    code, out, _ = command("spectrum", checkpoint, *theirs)
    assert out.endswith(f"{checkpoint.with_name('last-spectrum.h5')}\n")
    assert "largest |λ|" in out
    assert re.search(r"converged +NO", out)


def test_the_command_writes_a_table_of_blocks(
    checkpoint: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = command("spectrum", checkpoint, "--by", "layer", "--matrix", "gauss-newton")
    assert code == 0, err
    path = checkpoint.with_name("last-curvature-table-layer.h5")
    assert out.endswith(f"{path}\n")
    assert "Hessian products" not in err
    monkeypatch.setattr("landscape.cli.common.LONG", 0.0)
    assert "spectrum: some " in command("spectrum", checkpoint, "--part", "1", "-o", tmp_path / "part.h5")[2]
    grid = ("--grid", 1, "--residual-tol", 1, "-o", tmp_path / "grid.h5")
    assert "hessian_grid: some " in command("hessian-grid", checkpoint, *grid)[2]
    table = landscape.load(path)
    assert (table.groups, table.matrix, table.draws) == (("all", "1", "3"), "gauss-newton", 20)
    for words in (["--k", 2], ["--quantities", "trace"], ["--part", "1"], ["--precondition"]):
        code, _, err = command("spectrum", checkpoint, "--by", "layer", *words)
        assert (code, f"{words[0]}: not allowed with --by" in err) == (2, True)


STEPS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.0003, momentum=0.9),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_loss_change_is_that_of_the_dense_hessian(name: str) -> None:
    """The terms of a step of any optimizer are g_aᵀd_a and ½ d_aᵀH_ab d_b, block by block."""
    problem = problems.mlp(samples=20)
    before, model = problem.weights, copy.deepcopy(problem.model)
    optimizer = STEPS[name]([*model.parameters()])
    problem.criterion(model(problem.tensors[0][:7]), problem.tensors[1][:7]).backward()
    optimizer.step()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    change = landscape.loss_change(problem, before, after, by="parameter")
    d, h, g = after - before, problems.textbook_hessian(problem), problem.gradient()
    slots = problem.layout.slots
    blocks = [[float(d[a.place] @ h[a.place, b.place] @ d[b.place]) / 2 for b in slots] for a in slots]
    near = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-15)
    near(change.between, blocks)
    near(change.curvature, [np.sum(blocks), *np.sum(blocks, 1)])
    near(change.within, [np.trace(blocks), *np.diag(blocks)])
    near(change.gradient, [float(g @ d), *(float(g[s.place] @ d[s.place]) for s in slots)])
    near(change.loss_change, problem.loss(after) - problem.loss(before))
    near(change.gradient[0] + change.curvature[0] + change.rest, change.loss_change)
    near(change.sharpness, float(d @ h @ d / (d @ d)))
    assert abs(change.rest) < 0.2 * abs(change.curvature[0])
    close = landscape.loss_change(problem, before, after, by="parameter", derivatives="differences")
    off = abs(close.curvature[0] - change.curvature[0])
    assert 0 < off <= close.product_error < 1e-4 * abs(change.curvature[0])


@pytest.mark.parametrize("lr", [1e-4, 0.03, 0.49, 0.6, 40.0])
def test_the_critical_multiple_of_a_step_on_a_quadratic(lr: float) -> None:
    """L(θ + md) is m⟨g, d⟩ + m²c above L(θ), and above it from m = −⟨g, d⟩/c on."""
    problem = problems.quadratic([4.0, 1.0, 0.5])
    before, g = problem.weights, problem.gradient()
    change = landscape.loss_change(problem, before, before - lr * g, lr=lr)
    assert change.critical_multiple == pytest.approx(-change.gradient[0] / change.curvature[0], rel=0.0101)
    assert change.critical_sharpness == pytest.approx(2 / (lr * change.critical_multiple))
    assert change.rest == pytest.approx(0, abs=1e-9 * change.curvature[0])
    uphill = landscape.loss_change(problem, before, before + lr * g, lr=lr)
    assert (uphill.critical_multiple, uphill.critical_sharpness) == (0.0, math.inf)


@pytest.mark.filterwarnings("ignore:model. it computes in bfloat16")
def test_the_loss_change_of_weights_in_half_precision_is_that_in_full() -> None:
    """A difference of weights in bfloat16 would keep two digits of the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    data = torch.randn(30, 4).bfloat16(), torch.arange(30) % 3
    half = Problem(model, nn.CrossEntropyLoss(), data)
    before = half.weights.clone()
    after = before - 0.3 * half.gradient()
    found = landscape.loss_change(half, before, after)
    wanted = landscape.loss_change(half.to(torch.float32), before.float(), after.float())
    for name in ("gradient", "curvature", "loss_change", "critical_multiple"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert found.step_norm == pytest.approx(float((after.double() - before.double()).norm()), rel=1e-6)


@pytest.mark.parametrize("name", ["mlp tanh", "masked classes", "structured"])
def test_the_spectra_of_minibatches_are_those_of_dense_matrices(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    result = landscape.batch_spectrum(problem, 8, 2, draws=3, weight_decay=0.1, residual_tol=1e-7, seed=5)
    minibatches = Minibatches(problem, 8, stream(5, 0))
    parts = [minibatches.whole_problem, *(part for (part,), _ in zip(minibatches, range(3), strict=False))]
    for part, values in zip(parts, [result.whole, *result.values], strict=True):
        ends = torch.linalg.eigvalsh(problems.textbook_hessian(part)).numpy() + 0.1
        np.testing.assert_allclose(values, ends[[-1, -2, 0]], rtol=0, atol=1e-6 * abs(ends).max())
    assert result.converged
    assert 0 <= result.negative <= 1

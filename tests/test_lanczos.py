"""Eigenvalues against dense matrices and pyhessian; products against the textbook."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import HessianOperator, InputError, Problem
from landscape.curvature.hessian import dense_hessian
from landscape.curvature.lanczos import ends_of, lanczos
from tests import problems


@pytest.mark.parametrize("name", problems.ALL)
@pytest.mark.parametrize("graph_bytes", [pytest.param(0, marks=pytest.mark.slow), 2**30])
def test_products_are_columns_of_the_averaged_hessian(name: str, graph_bytes: int) -> None:
    problem = problems.ALL[name]()
    problem.data.chunk_size = 8  # more than one chunk: sums over batches that are not averaged would show
    expected = problems.textbook_hessian(problem)
    torch.testing.assert_close(dense_hessian(problem), expected, rtol=1e-8, atol=1e-9)
    operator = HessianOperator(problem, graph_bytes=graph_bytes)
    v = torch.randn_like(problem.theta)
    for _ in range(2):  # a kept graph serves more than once
        torch.testing.assert_close(operator(v), expected @ v, rtol=1e-8, atol=1e-9)
    assert operator.products == 2


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_graphs_that_are_kept_in_part_leave_no_chunk_out(kind: str) -> None:
    problem = problems.mlp()
    problem.data.chunk_size = 8  # 7 chunks
    operator = HessianOperator(problem, kind=kind, graph_bytes=8_000)
    v = torch.randn_like(problem.theta)
    expected = dense_hessian(problem, kind=kind) @ v
    for _ in range(3):
        torch.testing.assert_close(operator(v), expected, rtol=1e-8, atol=1e-9)
        assert 0 < len(operator._graphs) < 7


@pytest.mark.parametrize("name", problems.ALL)
def test_both_ends_match_the_dense_spectrum_within_the_residual(name: str) -> None:
    problem = problems.ALL[name]()
    dense = torch.linalg.eigvalsh(problems.textbook_hessian(problem))
    ends = landscape.extreme_eigenvalues(problem, tol=1e-3)
    assert ends.converged
    assert abs(ends.min - float(dense[0])) <= ends.residual_min + 1e-12
    assert abs(ends.max - float(dense[-1])) <= ends.residual_max + 1e-12
    floor = 1e-3 * max(abs(ends.min), abs(ends.max))
    assert ends.residual_min <= 1.01e-3 * max(abs(ends.min), floor) + 1e-12
    assert ends.residual_max <= 1.01e-3 * max(abs(ends.max), floor) + 1e-12


@pytest.mark.parametrize(
    "spectrum", [[0.1, 1.0], [-0.98, 1.0], [-5.0, 0.1, 1.0], [-2.0, -1.0], [0.0, 0.0, 3.0], [4.0], [1.0, 1.0]]
)
def test_hard_small_spectra(spectrum: list[float]) -> None:
    problem, expected = problems.quadratic(spectrum), pytest.approx((min(spectrum), max(spectrum)), abs=1e-9)
    ends = landscape.extreme_eigenvalues(problem)
    assert (ends.min, ends.max) == expected
    assert ends.converged
    g = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(1, 1))
    assert (g.lambda_min.item(), g.lambda_max.item()) == expected
    values = landscape.spectrum(problem).values
    assert (values[-1], values[0]) == expected


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.integers(0, 3))
def test_any_diagonal(values: list[float], seed: int) -> None:
    diagonal = torch.tensor(values, dtype=torch.float64)
    start = torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ends = ends_of(lanczos(lambda v: diagonal * v, start, low=1, tol=1e-6))
    scale = float(diagonal.abs().max())
    assert ends.min == pytest.approx(min(values), abs=1e-5 * scale + 1e-9)
    assert ends.max == pytest.approx(max(values), abs=1e-5 * scale + 1e-9)


def test_a_full_basis_is_restarted_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.curvature.krylov.MAX_BASIS", 16)
    diagonal = torch.linspace(-1, 3, 400, dtype=torch.float64)
    diagonal[0], diagonal[-1] = -1.02, 3.05
    start = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = ends_of(lanczos(lambda v: diagonal * v, start, low=1, tol=1e-4))
    assert ends.converged
    assert ends.hvps > 32
    assert (ends.min, ends.max) == pytest.approx((-1.02, 3.05), abs=1e-5)
    cut = ends_of(lanczos(lambda v: diagonal * v, start, low=1, tol=1e-4, max_products=20))
    assert not cut.converged
    assert cut.residual_min > 1e-4


def test_a_start_with_little_of_the_top_eigenvector_does_not_end_at_the_second() -> None:
    top = torch.tensor([8.904, 8.587, 7.572, 6.14, 5.36, 4.0, 3.0, 2.0, 1.5], dtype=torch.float64)
    diagonal = torch.cat((torch.linspace(-0.07, 0.5, 2000, dtype=torch.float64), top))
    for seed in range(20):
        start = torch.randn(len(diagonal), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        start[2000] *= 0.03
        found = lanczos(lambda v: diagonal * v, start, high=1, tol=1e-2)
        assert found.converged
        assert float(found.values[0]) == pytest.approx(8.904, rel=1e-2)


def test_residuals_are_those_of_the_returned_vectors() -> None:
    problem = problems.mlp()
    h = problems.textbook_hessian(problem)
    ends = landscape.extreme_eigenvalues(problem, tol=0.05)
    low, high = ends.vectors
    assert float((h @ low - ends.min * low).norm()) == pytest.approx(ends.residual_min, rel=1e-6, abs=1e-12)
    assert float((h @ high - ends.max * high).norm()) == pytest.approx(ends.residual_max, rel=1e-6, abs=1e-12)


@pytest.mark.filterwarnings("ignore")  # pyhessian's own
def test_the_top_eigenvalue_agrees_with_pyhessian_where_that_is_right() -> None:
    from pyhessian import hessian

    problem = problems.mlp(samples=60)  # its largest eigenvalue is also the largest magnitude
    dense = torch.linalg.eigvalsh(problems.textbook_hessian(problem))
    assert abs(float(dense[0])) < 0.8 * float(dense[-1])
    torch.manual_seed(0)
    theirs = hessian(problem.model, problem.criterion, data=problem.tensors, cuda=False)
    top = theirs.eigenvalues(maxIter=500, tol=1e-8)[0][0]
    assert landscape.extreme_eigenvalues(problem, tol=1e-6).max == pytest.approx(top, rel=1e-4)


def test_the_grid_is_not_transposed_and_each_point_is_its_own_spectrum() -> None:
    problem = problems.mlp(widths=(3, 4, 2), samples=20)
    plane = landscape.random_plane(problem, seed=4)
    g = landscape.hessian_grid(problem, plane, grid=(3, 2), span=1.0, tol=1e-4)
    assert g.ratio.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            theta = plane.center + g.x[j] * plane.directions[0] + g.y[i] * plane.directions[1]
            moved = Problem(problem.model, problem.criterion, problem.tensors or (), theta=theta)
            dense = torch.linalg.eigvalsh(problems.textbook_hessian(moved)).numpy()
            assert abs(g.lambda_min[i, j] - dense[0]) <= g.residual_min[i, j] + 1e-12
            assert abs(g.lambda_max[i, j] - dense[-1]) <= g.residual_max[i, j] + 1e-12
    np.testing.assert_allclose(g.ratio, np.abs(g.lambda_min) / np.abs(g.lambda_max))
    assert bool(g.converged.all())
    assert bool((g.hvps > 2).all())


@pytest.mark.parametrize("name", ["mlp relu", "conv"])
def test_a_hessian_that_is_not_finite_is_nan_and_not_converged(name: str) -> None:
    problem = problems.ALL[name]()
    plane = landscape.random_plane(problem)
    huge = landscape.Plane(plane.center, plane.directions * 1e200, "random", "none", 0)
    g = landscape.hessian_grid(problem, huge, grid=(3, 1), span=1.0)
    ends = landscape.extreme_eigenvalues(problem)
    np.testing.assert_allclose(g.lambda_max, [[np.nan, ends.max, np.nan]], rtol=1e-6)
    np.testing.assert_allclose(g.lambda_min, [[np.nan, ends.min, np.nan]], rtol=1e-6)
    assert g.converged.tolist() == [[False, True, False]]
    assert g.hvps[0, 0] <= 2  # it does not go on
    there = Problem(
        problem.model, problem.criterion, problem.tensors or (), theta=problem.theta + huge.directions[0]
    )
    found = landscape.spectrum(there, 1, with_trace=True, with_density=True)
    assert not found.converged
    assert np.isnan([*found.values, *found.residuals, found.trace, found.density.moment(1)[0]]).all()  # type: ignore[union-attr]


def test_float32_residuals_hold_their_rounding() -> None:
    double = problems.mlp(samples=200)
    dense = torch.linalg.eigvalsh(problems.textbook_hessian(double))
    single = Problem(double.model, double.criterion, double.tensors or (), dtype=torch.float32)
    ends = landscape.extreme_eigenvalues(single)
    assert abs(ends.max - float(dense[-1])) <= ends.residual_max + 1e-5
    assert abs(ends.min - float(dense[0])) <= ends.residual_min + 1e-5


def test_bad_arguments_name_themselves() -> None:
    problem = problems.mlp()
    with pytest.raises(InputError, match="tol: 0"):
        landscape.extreme_eigenvalues(problem, tol=0)
    with pytest.raises(InputError, match=r"v: shape \(2,\)"):
        HessianOperator(problem)(torch.ones(2))

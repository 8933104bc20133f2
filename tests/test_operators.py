"""Curvature as linear operators: ours, SciPy's, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import landscape
from landscape import InputError
from landscape.problem.problem import Problem
from tests import problems
from tests.dense import dense_hessian

KINDS: dict[str, Callable[[], Problem]] = {"chain": problems.mlp, "conv": problems.conv}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("graph_bytes", [0, 2**30])
@pytest.mark.parametrize("options", [{}, {"matrix": "gauss-newton"}, {"part": "conv"}, {"part": "1"}])
def test_a_block_of_vectors_has_the_products_of_its_columns(
    name: str, graph_bytes: int, options: dict[str, Any]
) -> None:
    problem = KINDS[name]()
    if "part" in options and not any(s.name.startswith(options["part"]) for s in problem.layout.slots):
        pytest.skip("it has no such part")
    problem.data.chunk_size = 7
    h = problem.hessian(graph_bytes=graph_bytes, **options)
    assert isinstance(h, landscape.HessianOperator)
    assert (h.shape, h.dtype, h.device) == ((h.size, h.size), torch.float64, problem.device)
    block = torch.randn(h.size, 3, dtype=torch.float64)
    columns = torch.stack([h @ v for v in block.T], dim=1)
    assert h.products == 3
    torch.testing.assert_close(h @ block, columns, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(h(block), columns, rtol=1e-10, atol=1e-12)
    assert h.products == 9


def test_the_penalty_is_part_of_a_block() -> None:
    plain = problems.mlp()
    decayed = Problem(plain.model, plain.criterion, plain.tensors, dtype=torch.float64, weight_decay=0.5)
    block = torch.randn(plain.layout.size, 2, dtype=torch.float64)
    torch.testing.assert_close(decayed.hessian() @ block, plain.hessian() @ block + 0.5 * block)


@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton"])
def test_scipy_finds_the_eigenvalues_of_the_dense_matrix(matrix: str) -> None:
    problem = problems.mlp()
    dense = dense_hessian(problem, kind=matrix).numpy()
    h = problem.hessian(matrix=matrix)
    scipy = h.to_scipy()
    assert (scipy.shape, scipy.dtype) == (dense.shape, np.float64)
    values, vectors = eigsh(scipy, k=3, which="LA", tol=1e-10)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(dense)[-3:], rtol=1e-8)
    np.testing.assert_allclose(scipy @ vectors, vectors * values, atol=1e-8)  # a block
    np.testing.assert_allclose(scipy.T @ vectors[:, 0], dense @ vectors[:, 0], atol=1e-10)
    single = problem.to(torch.float32).hessian(matrix=matrix).to_scipy()
    assert single.dtype == np.float32
    found = eigsh(single, k=1, which="LA", tol=1e-4)[0]
    np.testing.assert_allclose(found, np.linalg.eigvalsh(dense)[-1:], rtol=1e-3)


def test_a_run_stands_for_its_problem() -> None:
    problem = problems.mlp()

    class Run:
        def problem(self) -> Problem:
            return problem

    v = torch.randn_like(problem.weights)
    assert torch.equal(landscape.HessianOperator(Run()) @ v, problem.hessian() @ v)


@pytest.mark.parametrize(
    ("v", "words"),
    [
        (torch.ones(2), r"v: shape \(2,\) of float32, it must be \(\d+,\) or \(\d+, m\)"),
        (torch.ones(2, 3), r"v: shape \(2, 3\)"),
        (torch.ones(3, 2, 2), r"v: shape \(3, 2, 2\)"),
        (torch.ones(5), "v: shape .* of int64"),
        (np.ones(5), "v: a ndarray is not allowed"),
    ],
)
def test_what_is_no_vector_is_refused(v: Any, words: str) -> None:
    h = problems.mlp().hessian()
    v = torch.ones(h.size, dtype=torch.int64) if isinstance(v, torch.Tensor) and len(v) == 5 else v
    with pytest.raises(InputError, match=words):
        h @ v
    assert h.products == 0

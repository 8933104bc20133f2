"""Curvature as linear operators: ours, SciPy's, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh

import landscape
from landscape import InputError
from landscape.problem.problem import Problem
from tests import problems
from tests.dense import dense, dense_hessian

KINDS: dict[str, Callable[[], Problem]] = {"chain": problems.mlp, "conv": problems.conv}


@pytest.mark.parametrize("graph_bytes", [0, 2**30])
@pytest.mark.parametrize(
    ("name", "options"),
    [("chain", {}), ("conv", {"matrix": "gauss-newton"}), ("conv", {"part": "conv"})],
)
def test_a_block_has_the_products_of_columns(name: str, graph_bytes: int, options: dict[str, Any]) -> None:
    problem = KINDS[name]()
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


# Arguments of a convolution of 4 channels, and how many dimensions it has.
CONVOLUTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d, in groups, without bias": (1, {"groups": 2, "bias": False}),
    "2d, with stride and padding": (2, {"stride": 2, "padding": (1, 0)}),
    "2d, dilated, each channel by itself": (2, {"dilation": 2, "groups": 4}),
    "2d, padded to the same size": (2, {"padding": "same"}),
    "3d": (3, {"padding": 1, "stride": (1, 2, 1)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_of_convolutions_are_those_of_pytorchs_own_derivatives(name: str) -> None:
    dimensions, options = CONVOLUTIONS[name]
    made = getattr(torch.nn, f"Conv{dimensions}d")
    torch.manual_seed(0)
    layers = made(2, 4, 3, padding=1), torch.nn.Tanh(), made(4, 4, 3, **options), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers).double()
    x = torch.randn(3, 2, *[5] * dimensions, dtype=torch.float64)
    y = torch.randn_like(model(x))
    problem = landscape.Problem(model, lambda a, b: (a - b).pow(4).mean(), (x, y))
    hessian = dense(model, lambda: (model(x) - y).pow(4).mean())[2]
    jacobian = torch.func.jacrev(lambda theta: problem.outputs(theta, x).flatten())(problem.weights)
    curved = 12 * (model(x) - y).detach().flatten().square() / y.numel()
    for matrix, whole in (("hessian", hessian), ("gauss-newton", jacobian.T @ (curved[:, None] * jacobian))):
        for part in (None, "0.bias", "2.weight"):
            h = problem.hessian(matrix=matrix, part=part)
            own = torch.cat([torch.arange(len(whole))[slot.place] for slot in problem.layout.select(part)])
            block = h @ torch.eye(h.size, dtype=torch.float64)
            torch.testing.assert_close(block, whole[own][:, own], rtol=1e-9, atol=1e-12)


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


MATRIX = torch.diag(torch.tensor([4.0, -1.0, 0.5, 0.25])).double()


def turned(matrix: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = len(matrix)
    q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    return q @ matrix @ q.T


class Own:
    """An object with a shape and @, and no more."""

    shape = (4, 4)

    def __matmul__(self, block: torch.Tensor) -> torch.Tensor:
        assert block.ndim == 2
        return turned(MATRIX).float() @ block


GIVEN: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: turned(MATRIX),
    "ndarray": lambda: turned(MATRIX).numpy(),
    "csr_array": lambda: csr_array(turned(MATRIX).numpy()),
    "_CustomLinearOperator": lambda: LinearOperator(
        (4, 4), matvec=lambda v: turned(MATRIX).numpy() @ v, dtype=np.float64
    ),
    "Own": Own,
}


@pytest.mark.parametrize("name", GIVEN)
def test_estimators_take_any_symmetric_matrix(name: str) -> None:
    given = GIVEN[name]()
    ends = landscape.extreme_eigenvalues(given, 1e-5)
    assert (ends.min, ends.max) == (pytest.approx(-1, abs=1e-5), pytest.approx(4, rel=1e-6))
    assert ends.converged
    np.testing.assert_allclose(turned(MATRIX).numpy() @ ends.vectors[0], 4 * ends.vectors[0], atol=1e-4)
    top = landscape.top_eigenvalues(given, 2, 1e-5)
    assert top.values.tolist() == pytest.approx([4, 0.5], rel=1e-5)
    trace = landscape.trace(given, 12)
    assert (trace.value, trace.standard_error) == (pytest.approx(3.75, rel=1e-5), 0)
    density = landscape.density(given, 3, 4)
    assert density.moment(1)[0] == pytest.approx(3.75 / 4, abs=4 * density.moment(1)[1] + 1e-6)
    whole = landscape.spectrum(given, 1, quantities=("trace",))
    assert whole.values[0] == pytest.approx(4, rel=1e-4)
    for result in (ends, top, trace, density, whole):
        assert (result.matrix, result.parameters, result.samples) == (name, 4, 0)
        assert result.plot() is not None
        assert [row.value for row in result.describe() if row.name == "matrix"] == [name]


@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton"])
def test_an_operator_of_ours_gives_what_its_problem_gives(matrix: str) -> None:
    problem = problems.conv()
    options: dict[str, Any] = {"search": "exact"}
    for estimate, more in (
        (landscape.top_eigenvalues, options),
        (landscape.trace, {}),
        (landscape.density, {}),
    ):
        of_problem = estimate(problem, matrix=matrix, **more)
        of_operator = estimate(problem.hessian(matrix=matrix))
        assert (of_operator.samples, of_operator.matrix, of_operator.part) == (20, matrix, "")
        for name in of_problem.shapes:
            np.testing.assert_allclose(
                getattr(of_operator, name), getattr(of_problem, name), rtol=1e-6, atol=1e-9
            )
        assert of_operator.products == of_problem.products
    part = landscape.trace(problem.hessian(part="norm"))
    assert part.part == "norm.weight,norm.bias"
    assert part.value == pytest.approx(landscape.trace(problem, part="norm").value, rel=1e-8)


def test_rounding_is_no_asymmetry() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, 300, generator=generator)
    a = (a + a.T) * torch.logspace(-6, 6, 300)[:, None].sqrt() * torch.logspace(-6, 6, 300).sqrt()
    assert landscape.trace(a, 30).parameters == 300
    assert landscape.trace(a.bfloat16().float().bfloat16(), 30).parameters == 300


def test_a_spectrum_is_made_of_its_parts() -> None:
    problem = problems.mlp()
    top = landscape.top_eigenvalues(problem, 2, precondition=torch.full_like(problem.weights, 2.0))
    parts = top, landscape.trace(problem, 12), landscape.density(problem, 2, 5)
    whole = landscape.Spectrum.of(*parts)
    assert (top.precondition, top.unit) == ("given", "1/η")
    assert whole.values.tolist() == top.values.tolist()
    assert whole.products == sum(result.products for result in parts)


@pytest.mark.filterwarnings("ignore")
def test_operators_of_curvlinops_have_our_estimators() -> None:
    pytest.importorskip("curvlinops")
    problem = problems.mlp()
    problem.data.chunk_size = 20
    theirs, away = problem.to_curvlinops(), problem.to_curvlinops(weights=2 * problem.weights)
    kfac = problem.to_curvlinops("KFACLinearOperator", check_deterministic=False)
    block = torch.randn(problem.layout.size, 3, dtype=torch.float64)
    for other, weights in ((theirs, None), (away, 2 * problem.weights)):
        torch.testing.assert_close(other @ block, problem.hessian(weights) @ block, rtol=1e-8, atol=1e-10)
    ours, found = (landscape.extreme_eigenvalues(p, 1e-5) for p in (problem, theirs))
    assert (found.min, found.max) == pytest.approx((ours.min, ours.max), rel=1e-4)
    dense = kfac @ torch.eye(kfac.shape[0], dtype=torch.float64)
    trace = landscape.trace(kfac, 3 * kfac.shape[0])
    assert trace.matrix == "KFACLinearOperator"
    assert trace.value == pytest.approx(float(dense.trace()), rel=1e-6)
    top = landscape.top_eigenvalues(kfac, 1, 1e-4).values[0]
    assert top == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-4)
    decayed = Problem(problem.model, problem.criterion, problem.tensors, weight_decay=0.5)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("operator: 'KFAC' is not known", lambda: problem.to_curvlinops("KFAC")),
        ("KFACLinearOperator fails on", lambda: problem.to_curvlinops("KFACLinearOperator", no_such=1)),
        ("to_curvlinops: curvlinops knows no penalty", decayed.to_curvlinops),
    ]
    for words, call in refused:
        with pytest.raises(InputError, match=words):
            call()

"""Hessian products are tried before they are used: symmetry, chains against PyTorch, bfloat16, penalties."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import landscape
from landscape import HessianOperator, InputError, PathWarning, Problem
from landscape.curvature import approximation, chain_hessian, eigenvalues
from landscape.curvature.hessian import KINDS, HessianOptions, dense_hessian
from landscape.curvature.lanczos import SearchOptions
from landscape.curvature.start import start_vector
from landscape.problem.data import Data
from tests import problems
from tests.conftest import slow_but

CALLS: dict[str, Callable[[Problem], Any]] = {
    "operator": HessianOperator,
    "ends": landscape.extreme_eigenvalues,
    "top": lambda p: landscape.top_eigenvalues(p, 2),
    "trace": landscape.trace,
    "density": lambda p: landscape.density(p, 2, 5),
    "spectrum": landscape.spectrum,
    "grid": lambda p: landscape.hessian_grid(p, landscape.random_plane(p), grid=(1, 1)),
    "block": lambda p: landscape.extreme_eigenvalues(p, part="0"),
}


def data(samples: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_weight_norm_whose_second_derivative_is_wrong_is_refused(call: str, dtype: torch.dtype) -> None:
    problem = Problem(normed(), F.cross_entropy, data(), dtype=dtype)
    with pytest.raises(InputError, match=r"weight_norm \(in 0\).*remove_parametrizations"):
        CALLS[call](problem)


def test_what_weight_norm_leaves_right_is_given() -> None:
    problem = Problem(normed(), F.cross_entropy, data(), dtype=torch.float64)
    landscape.extreme_eigenvalues(problem, part="2")  # the block of the plain layer
    x, y = problem.tensors or ()

    def outputs(theta: Tensor) -> Tensor:
        views = problem.layout.views(theta)
        g, v = (views[f"0.parametrizations.weight.original{i}"] for i in (0, 1))
        h = F.linear(x, g * v / v.norm(dim=1, keepdim=True), views["0.bias"]).tanh()
        return F.linear(h, views["2.weight"], views["2.bias"])

    jacobian = torch.autograd.functional.jacobian(outputs, problem.theta).flatten(0, 1)
    bend = torch.autograd.functional.hessian(
        lambda z: F.cross_entropy(z.view(-1, 3), y), outputs(problem.theta).flatten()
    )
    expected = jacobian.T @ bend @ jacobian
    torch.testing.assert_close(dense_hessian(problem, kind="gauss-newton"), expected, rtol=1e-9, atol=1e-12)


class Askew(torch.autograd.Function):
    """z², whose second derivative is given as that of the neighbour."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return grads[0] * (2 * z.detach() + (z - z.detach()).roll(1, -1))


class Wrong(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return Askew.apply(z)  # type: ignore[no-any-return, no-untyped-call]


def test_any_other_wrong_second_derivative_is_refused_too_but_not_with_check_off() -> None:
    problem = Problem(nn.Sequential(nn.Linear(4, 3), Wrong()), F.cross_entropy, data())
    with pytest.raises(InputError, match=r"not symmetric.*backward pass"):
        landscape.trace(problem)
    problem.check = "off"
    assert landscape.trace(problem).hvps > 0


def test_products_are_tried_once_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(normed()[1:], F.cross_entropy, (data()[0] @ torch.ones(4, 5), data()[1]))
    HessianOperator(problem)
    monkeypatch.setattr(Data, "few", lambda data: 1 / 0)
    HessianOperator(problem)
    HessianOperator(problem.subset(slice(3)))
    with pytest.raises(ZeroDivisionError):
        HessianOperator(problem, kind="gauss-newton")


class Kinks(nn.Module):
    """Inputs and weights at the kinks of ReLU, |z|, max pooling and Huber's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 2)
        self.head = nn.Linear(3, 3)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool1d(self.conv(x.round()[:, None]).relu(), 2, ceil_mode=True)
        out: Tensor = self.head(h.abs().amax(2))
        return out


LEGITIMATE: dict[str, Callable[[], nn.Module]] = {
    "kinks": Kinks,
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)),
    "deep": lambda: nn.Sequential(
        *[m for _ in range(20) for m in (nn.Linear(4, 4), nn.ReLU6())], nn.Linear(4, 3)
    ),
    "fitted": lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_models_are_not_refused(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, (x, y) = LEGITIMATE[name](), data()
    if name == "fitted":  # 1 − p is of the size of float32's rounding
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(300):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            model[2].weight *= 4  # type: ignore[index, operator]
            model[2].bias *= 4  # type: ignore[index, operator]
    problem = Problem(model, F.cross_entropy, (x, y), dtype=dtype)
    with warnings.catch_warnings(action="error"):
        for kind in KINDS:
            HessianOperator(problem, kind=kind)
            landscape.trace(problem, 6, kind=kind)


def test_a_model_that_knows_one_precision_is_judged_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return self.inner(x)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="weight_norm"):
        HessianOperator(Problem(Single(normed()), F.cross_entropy, data()))


def test_a_chain_whose_fast_products_differ_goes_by_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.mlp()
    expected = torch.linalg.eigvalsh(problems.textbook_hessian(problem))
    right = chain_hessian._derivatives

    def wrong(act: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a, slope, bend = right(act, z)
        return a, slope, None if bend is None else 1.01 * bend

    monkeypatch.setattr(chain_hessian, "_derivatives", wrong)
    with pytest.warns(PathWarning, match="chain of linear layers"):
        ends = landscape.extreme_eigenvalues(problem, tol=1e-6)
    assert (ends.min, ends.max) == pytest.approx((float(expected[0]), float(expected[-1])), rel=1e-5)
    assert landscape.extreme_eigenvalues(problem, tol=1e-6).max == ends.max  # told once a problem
    assert eigenvalues.points_at_once(problem) == 1


def test_bfloat16_is_taken_by_what_the_hardware_is_and_only_where_it_is_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(60, 40), torch.randint(3, (60,))
    model = landscape.models.build("mlp", widths=[40, 30, 6, 3])
    problem = Problem(model, F.cross_entropy, (x, y))
    fast = approximation.bfloat16_is_fast(torch.device("cpu"))
    assert [approximation._bfloat16_serves(problem) for _ in range(3)] == [fast] * 3
    monkeypatch.setattr(approximation, "bfloat16_is_fast", lambda device: True)
    assert approximation._bfloat16_serves(problem)
    assert not approximation._bfloat16_serves(problems.mlp())  # float64
    monkeypatch.setattr(approximation, "BFLOAT16_ERROR", 1e-4)  # finer than its 3 digits
    assert not approximation._bfloat16_serves(problem)


def penalty(parameters: dict[str, Tensor]) -> Tensor:
    """One with a Hessian that is neither diagonal nor constant."""
    theta = torch.cat([p.flatten() for p in parameters.values()])
    return 0.1 * (theta[:-1] * theta[1:]).sum() + 0.02 * theta.pow(4).sum()


@pytest.mark.parametrize("name", slow_but(["mlp tanh"], ["mlp tanh", "conv"]))
@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_s_hessian_is_added_once(name: str, kind: str) -> None:
    plain = problems.ALL[name]()
    problem = Problem(plain.model, plain.criterion, plain.resident, penalty=penalty, weight_decay=0.1)
    problem.data.chunk_size = plain.data.chunk_size = plain.samples // 3 + 1  # several chunks
    bend = torch.autograd.functional.hessian(problem.penalty_value, problem.theta)
    expected = dense_hessian(plain, kind=kind) + bend
    torch.testing.assert_close(dense_hessian(problem, kind=kind), expected)
    part = problem.layout.slots[-2].name
    rows = slice(problem.layout.slots[-2].offset, problem.layout.slots[-1].offset)
    torch.testing.assert_close(dense_hessian(problem, kind=kind, part=part), expected[rows, rows])
    values = torch.linalg.eigvalsh(expected)
    ends = landscape.extreme_eigenvalues(problem, tol=1e-6, kind=kind)
    assert (ends.min, ends.max) == pytest.approx((float(values[0]), float(values[-1])), rel=1e-5)
    traced = landscape.trace(problem, 3 * problem.layout.size, kind=kind)
    assert traced.value == pytest.approx(float(values.sum()))
    thetas = problem.theta + 0.1 * torch.randn(2, len(problem.theta), dtype=torch.float64)
    wanted, options = SearchOptions(low=1, tol=1e-6), HessianOptions(kind)
    pairs = eigenvalues.eigenpairs(problem, thetas, start_vector(problem, 0), wanted, options)
    for theta, found in zip(thetas, pairs, strict=True):
        dense = torch.linalg.eigvalsh(dense_hessian(problem, theta, kind=kind))
        torch.testing.assert_close(found.values, dense[[-1, 0]], rtol=1e-5, atol=1e-8)


def test_a_regularised_problem_is_searched_with_all_samples_and_not_by_pyhessian() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(300, 40), torch.randint(3, (300,))
    model = landscape.models.build("mlp", widths=[40, 30, 6, 3])
    problem = Problem(model, F.cross_entropy, (x, y), weight_decay=1e-3)
    assert "samples" not in landscape.extreme_eigenvalues(problem).search
    with pytest.raises(InputError, match="engine: 'pyhessian'.*penalty"):
        landscape.top_eigenvalues(problem, engine="pyhessian")


class Odd(nn.Module):
    """An unused submodule, a parameter without numbers and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.unused = nn.Linear(7, 7)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale.exp() * self.body(x).tanh() + self.nothing.sum()
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_odd_parameters_and_half_precision_go_through_every_analysis(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    problem = Problem(Odd(), F.cross_entropy, data(), dtype=dtype)
    double = Problem(Odd(), F.cross_entropy, data(), theta=problem.theta.double(), dtype=torch.float64)
    values = torch.linalg.eigvalsh(dense_hessian(double, kind=kind))
    near = {"rel": 1e-2 if dtype == torch.float64 else 0.05, "abs": 1e-3 if dtype == torch.float64 else 0.02}
    ends = landscape.extreme_eigenvalues(problem, kind=kind)
    assert (ends.min, ends.max) == pytest.approx((float(values[0]), float(values[-1])), **near)
    top = landscape.top_eigenvalues(problem, 3, kind=kind)
    assert top.values.tolist() == pytest.approx(values.flip(0)[:3].tolist(), **near)
    traced = landscape.trace(problem, 3 * problem.layout.size, kind=kind)
    assert traced.value == pytest.approx(float(values.sum()), **near)
    dense = landscape.density(problem, 4, 10, kind=kind)
    assert dense.moment(2)[0] * len(values) == pytest.approx(float(values.square().sum()), rel=0.6)
    if kind == "hessian":
        grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(1, 1))
        assert grid.lambda_max.item() == pytest.approx(float(values[-1]), **near)
        found = landscape.spectrum(problem, 2, ends=True, with_trace=True, with_density=True)
        assert found.values[0] == pytest.approx(float(values[-1]), **near)

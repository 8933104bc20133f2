"""Second derivatives are those of the loss: not of its rounding in half precision, nor of a surrogate's gradient."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import HessianOperator, InputError, Problem, ProblemWarning
from landscape.curvature.hessian import KINDS
from tests.dense import dense_hessian

LOW = (torch.bfloat16, torch.float16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(-1, 2, 4)
        out: Tensor = self.head((z + self.inner(z, z, z, need_weights=False)[0]).flatten(1))
        return out


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(9, 3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3)),
    "convolution": convolutional,
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
    "layer norm, GELU": lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)),
    "attention": Attention,
    "softplus, hard tanh": lambda: nn.Sequential(
        nn.Linear(8, 6), nn.Softplus(), nn.Linear(6, 6), nn.Hardtanh(), nn.Dropout(), nn.Linear(6, 3)
    ),
}


class Inside(nn.Module):
    """A model that computes in half precision by itself, with weights in float32."""

    def __init__(self, net: nn.Module, how: str) -> None:
        super().__init__()
        self.net, self.how = net, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x).float()  # type: ignore[no-any-return]
        out: Tensor = self.net(x).half().sin().bfloat16()
        return out.to(x)


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(60, 8, generator=generator).to(dtype), torch.randint(3, (60,), generator=generator)


def low_and_exact(name: str, how: Any) -> tuple[Problem, Tensor]:
    """A model in low precision, and its Hessian in float64 at the same weights and inputs."""
    torch.manual_seed(0)
    net = MODELS[name]()
    model = Inside(net, how) if isinstance(how, str) else net.to(how)
    x, y = data(torch.float32 if isinstance(how, str) else how)
    full = copy.deepcopy(net).double()
    exact = full if how != "casts" else nn.Sequential(full, Sine())
    problem = Problem(model, F.cross_entropy, (x, y))
    return problem, dense_hessian(Problem(exact, F.cross_entropy, (x.double(), y)))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.parametrize("how", [*LOW, "autocast", "casts"])
@pytest.mark.parametrize("name", MODELS)
def test_eigenvalues_of_a_model_in_low_precision_are_within_their_residuals(name: str, how: Any) -> None:
    problem, dense = low_and_exact(name, how)
    values = torch.linalg.eigvalsh(dense)
    with pytest.warns(ProblemWarning, match=r"float16.*float32 arithmetic"):
        ends = landscape.extreme_eigenvalues(problem, 1e-3)
    rounding = 1e-5 * float(values[-1])
    assert ends.converged
    assert "float16" not in ends.search
    for found, residual, true in ((ends.max, ends.residual_max, -1), (ends.min, ends.residual_min, 0)):
        assert residual <= max(1e-3 * abs(found), rounding)
        assert float((values - found).abs().min()) <= residual + rounding
        assert abs(found - float(values[true])) <= 2e-3 * abs(found) + rounding
    assert ends.bounds[0] <= float(values[0]) + rounding
    assert float(values[-1]) - rounding <= ends.bounds[1]


@pytest.mark.parametrize("how", [*LOW, "autocast", "casts"])
def test_every_function_of_curvature_has_float32_arithmetic_and_says_so_once(how: Any) -> None:
    problem, dense = low_and_exact("layer norm, GELU", how)
    values, p = torch.linalg.eigvalsh(dense), problem.layout.size
    top = pytest.approx(float(values[-1]), rel=1e-3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.testing.assert_close(dense_hessian(problem).double(), dense, rtol=1e-4, atol=1e-5)
        assert float(landscape.top_eigenvalues(problem, 2, 1e-3).values[0]) == top
        assert landscape.trace(problem, 3 * p).value == pytest.approx(float(values.sum()), rel=1e-4)
        moments = landscape.density(problem, 3, 20).moment(2)[0] * p
        assert moments == pytest.approx(float(values.square().sum()), rel=0.5)
        assert landscape.spectrum(problem, 1, tol=1e-3).values[0] == top
        grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(1, 1), tol=1e-3)
        assert grid.lambda_max.item() == top
    assert len([w for w in seen if "float32 arithmetic" in str(w.message)]) == 1


class Stubborn(nn.Module):
    """One whose weights do not follow the precision of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        out: Tensor = self.inner(x)
        return out


def test_a_model_of_half_precision_only_has_a_loss_but_no_curvature() -> None:
    problem = Problem(Stubborn().bfloat16(), F.cross_entropy, data(torch.bfloat16))
    assert problem.loss() > 0
    assert problem.gradient().dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"half precision only.*self\.weight\.dtype"):
        landscape.trace(problem)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return (16 * z).round() / 16

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Made(nn.Module):
    """Two layers with ``function`` of the hidden ones between them."""

    def __init__(self, function: Callable[[Made, Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, width), nn.Linear(width, 3), nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.function(self, self.a(x)))
        return out


def phantom(model: Made, z: Tensor) -> Tensor:
    """A deep equilibrium, differentiated through its last step alone."""
    h = torch.zeros_like(z)
    with torch.no_grad():
        for _ in range(100):
            h = (model.c(h) + z).tanh()
    return (model.c(h) + z).tanh()


def unrolled(model: Made, z: Tensor) -> Tensor:
    h = torch.zeros_like(z)
    for _ in range(30):
        h = (model.c(h) / 2 + z).tanh()
    return h


def weights_of_8_bits(model: Made, z: Tensor) -> Tensor:
    w = model.c.weight
    scale = w.detach().abs().max() / 127
    return F.linear(z.tanh(), w + ((w / scale).round() * scale - w).detach())


SURROGATES: dict[str, Callable[[Made, Tensor], Tensor]] = {
    "round, straight-through": lambda m, z: z + (z.round() - z).detach(),
    "a Function of one's own": lambda m, z: Rounded.apply(z),  # type: ignore[no-any-return, no-untyped-call]
    "sign of the weights": lambda m, z: F.linear(z, m.c.weight + (m.c.weight.sign() - m.c.weight).detach()),
    "weights of 8 bits": weights_of_8_bits,
    "phantom gradient": phantom,
    "a detached branch": lambda m, z: z.tanh() + m.c(z).tanh().detach(),
    "a detached factor": lambda m, z: z * z.sigmoid().detach(),
    "Gumbel's hard sample": lambda m, z: F.one_hot(z.argmax(1), z.shape[1]) - z.softmax(1).detach() + z.softmax(1),
    "rounding that no cast shows": lambda m, z: z + (torch.from_numpy((z.detach().numpy() * 64).round() / 64) - z).detach(),
}  # fmt: skip
DERIVATIVES: dict[str, Callable[[Made, Tensor], Tensor]] = {
    "ReLU": lambda m, z: m.c(z.relu()).relu(),
    "hard tanh": lambda m, z: m.c(F.hardtanh(3 * z)),
    "ReLU6, hard swish": lambda m, z: F.hardswish(m.c(F.relu6(z))),
    "max pooling": lambda m, z: m.c(F.max_pool1d(z, 3, 1, 1)),
    "sorted": lambda m, z: m.c(z.sort(1).values.abs()),
    "dropout": lambda m, z: F.dropout(m.c(z), 0.5, m.training),
    "a shift that cancels": lambda m, z: (z - z.amax(1, keepdim=True).detach()).softmax(1),
    "an equilibrium, unrolled": unrolled,
    "in float32 at any precision": lambda m, z: m.c(z.float().tanh().to(z)),
    "complex": lambda m, z: m.c(torch.fft.irfft(torch.fft.rfft(z).to(torch.complex64), n=z.shape[1]).to(z)),
    "saturated": lambda m, z: (1e3 * m.c(z)).tanh(),
}


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float64, 6), (torch.float32, 6), (torch.bfloat16, 6), (torch.float32, 300)]
)
@pytest.mark.parametrize("name", [*SURROGATES, *DERIVATIVES])
def test_a_gradient_that_is_not_the_loss_s_is_refused_and_any_other_taken(
    name: str, dtype: torch.dtype, width: int
) -> None:
    if dtype == torch.bfloat16 and name in ("rounding that no cast shows", "complex"):
        pytest.skip("NumPy and the Fourier transform have no bfloat16")
    torch.manual_seed(0)
    model = Made({**SURROGATES, **DERIVATIVES}[name], width)
    problem = Problem(model, F.cross_entropy, data(), dtype=dtype)
    assert problem.loss() > 0
    assert bool(problem.gradient().isfinite().all())
    refused = pytest.raises(InputError, match="gradient is not the derivative of the loss")
    for kind in KINDS:
        with warnings.catch_warnings(), refused if name in SURROGATES else contextlib.nullcontext():
            warnings.simplefilter("ignore", ProblemWarning)
            HessianOperator(problem, kind=kind)


def test_what_lies_before_a_detached_part_is_refused_but_what_lies_behind_is_not() -> None:
    torch.manual_seed(0)
    problem = Problem(Made(lambda m, z: z.tanh().detach()), F.cross_entropy, data())
    assert landscape.extreme_eigenvalues(problem, part="b").max > 0
    with pytest.raises(InputError, match="a detached part"):
        landscape.extreme_eigenvalues(problem)
    problem.check = "off"
    assert landscape.extreme_eigenvalues(problem).max > 0

"""Hessian products are tried before they are used, and are those of the loss.

Symmetry, chains against PyTorch, bfloat16, penalties; not of the loss's rounding in half precision, nor of a surrogate's
gradient.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import landscape
from landscape import HessianOperator, InputError, OperationError, PathWarning, Problem, ProblemWarning
from landscape.curvature import chain_hessian, double_backward, eigenvalues
from landscape.curvature.hessian import MATRICES, HessianOptions
from landscape.curvature.search import SearchOptions, start_vector
from landscape.problem.data import Data
from tests import problems
from tests.battery.case import net as network
from tests.conftest import slow_but
from tests.dense import dense_hessian, same_ends

# What is said of curvature in half precision.
SAID = pytest.mark.filterwarnings("ignore:model. it computes in:landscape.ProblemWarning")

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "operator": lambda p, **o: HessianOperator(p, **o) @ torch.ones(p.layout.size, dtype=p.dtype),
    "ends": lambda p, **o: landscape.extreme_eigenvalues(p, part="a", **o),
    "top": lambda p, **o: landscape.top_eigenvalues(p, 2, **o),
    "trace": lambda p, **o: landscape.trace(p, **o),
    "density": lambda p, **o: landscape.density(p, 2, 5, **o),
    "spectrum": lambda p, **o: landscape.spectrum(
        p, 1, quantities=("trace", "density"), draws=2, steps=3, **o
    ),
    "table": lambda p, **o: landscape.curvature_table(p, draws=2, **o),
    "grid": lambda p, **o: landscape.hessian_grid(p, landscape.random_plane(p), grid=(2, 1), **o),
    "batch sharpness": lambda p, **o: landscape.batch_sharpness(p, 70, min_draws=2, max_draws=2, **o),
    "disagreement": lambda p, **o: landscape.disagreement(p, problems.around(p, 3, 1e-3), 1, **o),
    "loss change": lambda p, **o: landscape.loss_change(p, p.weights, 0.9 * p.weights, **o),
    "preconditioned": lambda p, **o: landscape.top_eigenvalues(
        p, precondition=torch.ones_like(p.weights), **o
    ),
}


EXACT: dict[str, Any] = {"derivatives": "exact"}


def data(samples: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)


def normed(old: bool, dim: int | None) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own, on the old one
        layer = (nn.utils.weight_norm if old else weight_norm)(nn.Linear(4, 5), dim=dim)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize("old", [False, True])
def test_weight_norm_is_right_although_pytorchs_second_derivative_is_not(old: bool, dim: int | None) -> None:
    x, y = data()
    problem = Problem(normed(old, dim), F.cross_entropy, (x.double(), y))
    new = [f"0.parametrizations.weight.original{i}" for i in (0, 1)]
    names = ("0.weight_g", "0.weight_v") if old else new

    def loss(theta: Tensor) -> Tensor:
        views = problem.layout.views(theta)
        g, v = (views[name] for name in names)
        norm = v.norm() if dim is None else v.norm(dim=1 - dim, keepdim=True)
        h = F.linear(x.double(), g * v / norm, views["0.bias"]).tanh()
        return F.cross_entropy(F.linear(h, views["2.weight"], views["2.bias"]), y)

    expected = torch.autograd.functional.hessian(loss, problem.weights)
    torch.testing.assert_close(dense_hessian(problem), expected, rtol=1e-9, atol=1e-12)
    same_ends(problem, expected)


class Bags(nn.Module):
    def __init__(self, plain: bool, mode: str, padding: int | None) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding)
        nn.init.normal_(self.words.weight)
        self.head, self.plain = nn.Linear(4, 3), plain

    def forward(self, words: Tensor, offsets: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
        if not self.plain:
            out: Tensor = self.head(self.words(words, offsets, shares).tanh())
            return out
        ends = range(0, words.numel() + 1, 6) if offsets is None else [*offsets.tolist(), len(words)]
        shares = torch.ones(words.numel()) if shares is None else shares.flatten()
        rows = []
        for a, b in itertools.pairwise(ends):
            bag = words.flatten()[a:b]
            padding = self.words.padding_idx
            counted = torch.ones_like(bag) if padding is None else bag != padding
            row = (self.words.weight[bag] * (counted * shares[a:b])[:, None]).sum(0)
            rows.append(row / max(1, int(counted.sum())) if self.words.mode == "mean" else row)
        plain: Tensor = self.head(torch.stack(rows).tanh())
        return plain


@pytest.mark.parametrize(
    ("mode", "padding", "form"),
    [("mean", None, "samples"), ("mean", 0, "offsets"), ("sum", None, "offsets"), ("sum", -9, "shares")],
)
def test_embedding_bags_have_second_derivatives(mode: str, padding: int | None, form: str) -> None:
    torch.manual_seed(0)
    words, y = torch.randint(9, (20, 6)), torch.randint(3, (20,))
    words[3] = 0  # nothing but padding
    x: dict[str, Tensor] = {"words": words}
    if form == "offsets":
        x = {"words": words.flatten(), "offsets": torch.arange(0, 120, 6) - (torch.arange(20) == 4).long()}
    elif form == "shares":
        x["shares"] = torch.rand(20, 6)
    problems_of = []
    for plain in (False, True):
        torch.manual_seed(1)
        problems_of.append(Problem(Bags(plain, mode, padding).double(), F.cross_entropy, [(x, y)]))
    ours, plainly = (dense_hessian(p) for p in problems_of)
    assert problems_of[0].loss() == pytest.approx(problems_of[1].loss(), rel=1e-12)
    torch.testing.assert_close(ours, plainly, rtol=1e-9, atol=1e-12)


def test_the_largest_word_of_a_bag_has_no_second_derivative() -> None:
    words = torch.randint(9, (20, 6)), torch.randint(3, (20,))
    with pytest.raises(InputError, match="no second derivative of embedding_bag"):
        landscape.trace(Problem(Bags(False, "max", None), F.cross_entropy, words), **EXACT)


class Askew(torch.autograd.Function):
    """z², whose second derivative is given as that of the neighbor."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return grads[0] * (2 * z.detach() + (z - z.detach()).roll(1, -1))


def askew() -> nn.Module:
    torch.manual_seed(0)
    return network(lambda m, x: Askew.apply(m.a(x)), a=nn.Linear(4, 3))  # type: ignore[no-untyped-call]


@SAID
@pytest.mark.parametrize(
    ("call", "dtype"), [*((call, torch.float64) for call in FUNCTIONS), ("trace", torch.bfloat16)]
)
def test_a_wrong_second_derivative_is_refused_but_not_with_check_off(call: str, dtype: torch.dtype) -> None:
    problem = Problem(askew(), F.cross_entropy, data(), dtype=dtype)
    with pytest.raises(InputError, match=r"not symmetric.*is wrong"):
        FUNCTIONS[call](problem, **EXACT)
    problem.check = "off"
    assert landscape.trace(problem).products > 0


def test_products_are_tried_once_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(nn.Linear(4, 3), F.cross_entropy, data())
    HessianOperator(problem)
    monkeypatch.setattr(Data, "few", lambda data: 1 / 0)
    HessianOperator(problem)
    HessianOperator(problem.subset(slice(3)))
    with pytest.raises(ZeroDivisionError):
        HessianOperator(problem, matrix="gauss-newton")


def kinks() -> nn.Module:
    """Inputs and weights at the kinks of ReLU, |z| and max pooling."""
    torch.manual_seed(1)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.max_pool1d(m.conv(x.round()[:, None]).relu(), 2, ceil_mode=True)
        out: Tensor = m.head(h.abs().amax(2))
        return out

    return network(forward, conv=nn.Conv1d(1, 3, 2, bias=False), head=nn.Linear(3, 3))


def fitted() -> nn.Module:
    """1 − p is of the size of float32's rounding."""
    torch.manual_seed(1)
    (x, y), model = data(), nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(4)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [kinks, fitted])
def test_legitimate_models_are_not_refused(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    problem = Problem(make(), F.cross_entropy, data(), dtype=dtype)
    with warnings.catch_warnings(action="error"):
        warnings.simplefilter("ignore" if dtype == torch.bfloat16 else "error", ProblemWarning)
        for kind in MATRICES:
            landscape.trace(problem, 6, matrix=kind)


def test_a_model_that_knows_one_precision_is_judged_by_that() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        assert x.dtype == known
        return model.inner(x)  # type: ignore[no-any-return]

    known = torch.float32
    with pytest.raises(InputError, match="not symmetric"):
        HessianOperator(Problem(network(forward, inner=askew()), F.cross_entropy, data()), **EXACT)
    known = torch.bfloat16
    low = network(forward, inner=nn.Linear(8, 3)).bfloat16()
    problem = Problem(low, F.cross_entropy, eight(torch.bfloat16))
    assert problem.loss() > 0
    assert problem.gradient().dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"half precision only.*self\.weight\.dtype"):
        landscape.trace(problem, **EXACT)


def test_a_chain_whose_fast_products_differ_goes_by_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.mlp()
    expected = problems.textbook_hessian(problem)
    right = chain_hessian._derivatives

    def wrong(act: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a, slope, bend = right(act, z)
        return a, slope, None if bend is None else 1.01 * bend

    monkeypatch.setattr(chain_hessian, "_derivatives", wrong)
    with pytest.warns(PathWarning, match="fast Hessian products of this model"):
        same_ends(problem, expected)
    same_ends(problem, expected)  # told once a problem
    assert eigenvalues.points_at_once(problem) == 1


def penalty(parameters: dict[str, Tensor]) -> Tensor:
    """One with a Hessian that is neither diagonal nor constant."""
    theta = torch.cat([p.flatten() for p in parameters.values()])
    return 0.1 * (theta[:-1] * theta[1:]).sum() + 0.02 * theta.pow(4).sum()


@pytest.mark.parametrize("made", slow_but([problems.mlp], [problems.mlp, problems.conv]))
@pytest.mark.parametrize("kind", MATRICES)
def test_the_penalty_s_hessian_is_added_once(made: Callable[..., Problem], kind: str) -> None:
    plain = made(widths=(4, 5, 3)) if made is problems.mlp else made()
    problem = Problem(plain.model, plain.criterion, plain.resident, penalty=penalty, weight_decay=0.1)
    problem.data.chunk_size = plain.data.chunk_size = plain.samples // 3 + 1  # several chunks
    bend = torch.autograd.functional.hessian(problem.penalty_value, problem.weights)
    expected = dense_hessian(plain, kind=kind) + bend
    torch.testing.assert_close(dense_hessian(problem, kind=kind), expected)
    part = problem.layout.slots[-2].name
    rows = slice(problem.layout.slots[-2].offset, problem.layout.slots[-1].offset)
    torch.testing.assert_close(dense_hessian(problem, kind=kind, part=part), expected[rows, rows])
    same_ends(problem, expected, matrix=kind)
    traced = landscape.trace(problem, 3 * problem.layout.size, matrix=kind)
    assert traced.value == pytest.approx(float(expected.trace()))
    thetas = problem.weights + 0.1 * torch.randn(2, len(problem.weights), dtype=torch.float64)
    wanted, options = SearchOptions(low=1, residual_tol=1e-6), HessianOptions(kind)
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


LOW = (torch.bfloat16, torch.float16)


def inside(how: str) -> Callable[[Any, Tensor], Tensor]:
    """The forward pass of a model that computes in half precision by itself, with weights in float32."""

    def forward(model: Any, x: Tensor) -> Tensor:
        if how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model.net(x).float()  # type: ignore[no-any-return]
        return model.net(x).half().sin().bfloat16().to(x)  # type: ignore[no-any-return]

    return forward


def attention(model: Any, x: Tensor) -> Tensor:
    z = x.view(-1, 2, 4)
    out: Tensor = model.head((z + model.inner(z, z, z, need_weights=False)[0]).flatten(1))
    return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(9, 3)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
    "layer norm, GELU": lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)),
    "attention": lambda: network(
        attention, inner=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(8, 3)
    ),
}


def eight(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(60, 8, generator=generator).to(dtype), torch.randint(3, (60,), generator=generator)


def low_and_exact(name: str, how: Any) -> tuple[Problem, Tensor]:
    """A model in low precision, and its Hessian in float64 at the same weights and inputs."""
    torch.manual_seed(0)
    net = MODELS[name]()
    model = network(inside(how), net=net) if isinstance(how, str) else net.to(how)
    x, y = eight(torch.float32 if isinstance(how, str) else how)
    full = copy.deepcopy(net).double()
    exact = full if how != "casts" else network(lambda m, x: m.net(x).sin(), net=full)
    problem = Problem(model, F.cross_entropy, (x, y))
    return problem, dense_hessian(Problem(exact, F.cross_entropy, (x.double(), y)))


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "autocast") for name in MODELS), *(("convolution", how) for how in (*LOW, "casts"))],
)
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


@pytest.mark.parametrize("how", ["autocast", torch.bfloat16])
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
        assert landscape.spectrum(problem, 1, residual_tol=1e-3).values[0] == top
        plane = landscape.random_plane(problem)
        grid = landscape.hessian_grid(problem, plane, grid=(1, 1), residual_tol=1e-3)
        assert grid.lambda_max.item() == top
    assert len([w for w in seen if "float32 arithmetic" in str(w.message)]) == 1


def made_with(function: Callable[[Any, Tensor], Tensor], width: int = 6) -> nn.Module:
    """Two layers with ``function`` of the hidden ones between them, which may use another layer, c."""
    layers = {"a": nn.Linear(8, width), "b": nn.Linear(width, 3), "c": nn.Linear(width, width)}
    return network(lambda m, x: m.b(function(m, m.a(x))), **layers)


def phantom(model: Any, z: Tensor) -> Tensor:
    """A deep equilibrium, differentiated through its last step alone."""
    h = torch.zeros_like(z)
    with torch.no_grad():
        for _ in range(100):
            h = (model.c(h) + z).tanh()
    return (model.c(h) + z).tanh()


SURROGATES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "round, straight-through": lambda m, z: z + (z.round() - z).detach(),
    "sign of the weights": lambda m, z: F.linear(z, m.c.weight + (m.c.weight.sign() - m.c.weight).detach()),
    "weights of 8 bits": lambda m, z: F.linear(
        z.tanh(), m.c.weight + ((m.c.weight * 300).round() / 300 - m.c.weight).detach()
    ),
    "phantom gradient": phantom,
    "a detached branch": lambda m, z: z.tanh() + m.c(z).tanh().detach(),
    "a detached factor": lambda m, z: z * z.sigmoid().detach(),
    "a small detached part": lambda m, z: z + 0.005 * z.tanh().detach(),
    "Gumbel's hard sample": lambda m, z: F.one_hot(z.argmax(1), z.shape[1]) - z.softmax(1).detach() + z.softmax(1),
    "rounding that no cast shows": lambda m, z: z + (torch.from_numpy((z.detach().numpy() * 64).round() / 64) - z).detach(),
}  # fmt: skip


DERIVATIVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ReLU": lambda m, z: m.c(z.relu()).relu(),
    "max pooling": lambda m, z: m.c(F.max_pool1d(z, 3, 1, 1)),
    "deep": lambda m, z: functools.reduce(lambda h, _: F.relu6(m.c(h)), range(20), z),
    "ReLU6, hard swish": lambda m, z: F.hardswish(m.c(F.relu6(z))),
    "sorted": lambda m, z: m.c(z.sort(1).values.abs()),
    "dropout": lambda m, z: F.dropout(m.c(z), 0.5, m.training),
    "a shift that cancels": lambda m, z: (z - z.amax(1, keepdim=True).detach()).softmax(1),
    "in float32 at any precision": lambda m, z: m.c(z.float().tanh().to(z)),
    "complex": lambda m, z: m.c(torch.fft.irfft(torch.fft.rfft(z).to(torch.complex64), n=z.shape[1]).to(z)),
    "saturated": lambda m, z: (1e3 * m.c(z)).tanh(),
}


@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [
        *((name, torch.float64, 6) for name in (*SURROGATES, *DERIVATIVES)),
        *(
            (name, torch.bfloat16, 6)
            for name in ("weights of 8 bits", "phantom gradient", "saturated", "sorted")
        ),
        *(
            (name, torch.float32, 300)
            for name in ("weights of 8 bits", "a detached branch", "saturated", "sorted")
        ),
    ],
)
def test_gradients_are_refused_unless_of_the_loss(name: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    model = made_with({**SURROGATES, **DERIVATIVES}[name], width)
    problem = Problem(model, F.cross_entropy, eight(), dtype=dtype)
    assert problem.loss() > 0
    assert bool(problem.gradient().isfinite().all())
    refused = pytest.raises(InputError, match="gradient is not the derivative of the loss")
    for kind in MATRICES:
        with warnings.catch_warnings(), refused if name in SURROGATES else contextlib.nullcontext():
            warnings.simplefilter("ignore", ProblemWarning)
            HessianOperator(problem, matrix=kind)


def test_what_lies_before_a_detached_part_is_refused_but_what_lies_behind_is_not() -> None:
    torch.manual_seed(0)
    problem = Problem(made_with(lambda m, z: z.tanh().detach()), F.cross_entropy, eight())
    assert landscape.extreme_eigenvalues(problem, part="b").max > 0
    with pytest.raises(InputError, match="a detached part"):
        landscape.extreme_eigenvalues(problem)
    problem.check = "off"
    assert landscape.extreme_eigenvalues(problem).max > 0


# Where the second derivative of an operation is NaN at one sample, or divides by it, and the gradient is not.


class Special(nn.Module):
    """Layers, of which one operation has a removable singularity of its second derivative at zero."""

    def __init__(self, operation: Callable[[Tensor], Tensor], before: bool) -> None:
        super().__init__()
        self.operation, self.before = operation, before
        self.a, self.b, self.c = nn.Linear(4, 4, False), nn.Linear(4, 4, False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.operation(self.a(x)) if self.before else self.operation(self.b(self.a(x).tanh()))
        return self.c(self.b(z).tanh() if self.before else z)  # type: ignore[no-any-return]


SINGULAR: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda z: F.normalize(z, dim=1),
    "norm": lambda z: z * z.norm(dim=1, keepdim=True),
    "norm squared": lambda z: z + z.norm(dim=1, keepdim=True) ** 2,
    "std of a constant": lambda z: z + torch.relu(z - 9).std(1, keepdim=True),
    "a ** b": lambda z: z + torch.relu(z) ** (2 + z.exp()),
    "cosine": lambda z: z + F.cosine_similarity(z, z.flip(1), dim=1)[:, None],
}


def special(name: str, dtype: torch.dtype, seed: int, place: int, before: bool) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(70, 4, generator=generator)
    x[place] = 0
    torch.manual_seed(seed)
    model = Special(SINGULAR[name], before)
    return Problem(model, F.cross_entropy, (x, torch.randint(3, (70,), generator=generator)), dtype=dtype)


def by_central_differences(problem: Problem, step: float = 1e-6) -> Tensor:
    wide = problem.to(torch.float64)
    unit = step * torch.eye(problem.layout.size, dtype=torch.float64)
    return torch.stack([wide.gradient(wide.weights + d) - wide.gradient(wide.weights - d) for d in unit]) / (
        2 * step
    )


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(sorted(SINGULAR)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
    place=st.integers(0, 69),
    before=st.booleans(),
)
def test_products_that_are_nan_are_refused_with_differences_as_the_remedy(
    name: str, dtype: torch.dtype, seed: int, place: int, before: bool
) -> None:
    problem = special(name, dtype, seed, place, before)
    dense = by_central_differences(problem)
    with warnings.catch_warnings(action="ignore", category=ProblemWarning):
        try:  # differences where the sample is among those that are checked, else refused
            ends = landscape.extreme_eigenvalues(problem, 1e-4)
        except InputError:
            ends = landscape.extreme_eigenvalues(problem, 1e-4, derivatives="differences")
    values = torch.linalg.eigvalsh((dense + dense.T) / 2)
    allowed = 1e-3 * float(values.abs().max())
    assert ends.derivatives == "differences"
    assert abs(ends.max - float(values[-1])) <= allowed
    assert abs(ends.min - float(values[0])) <= allowed
    with pytest.raises(InputError, match=r"NaN or infinite.*derivatives='differences'"):
        landscape.extreme_eigenvalues(problem, derivatives="exact")


EXACT_ONLY: dict[str, Callable[..., Any]] = {
    "noise": lambda p: landscape.noise(p, problems.around(p, 3, 1e-3), lr=0.1, local_batch=10, draws=2),
    "alignment": lambda p: landscape.noise_alignment(p, 10, 1),
    "smoothing": lambda p: landscape.smoothing(p, problems.around(p, 3, 1e-3), draws=2),
    "average": lambda p: landscape.average(p, problems.around(p, 3, 1e-3)),
}
GRADIENTS: dict[str, Callable[..., Any]] = {
    "sharpness": lambda p: landscape.sharpness(p, 0.1),
    "learning coefficient": lambda p: landscape.learning_coefficient(p, 10, step_size=1e-6),
    "noise scale": lambda p: landscape.noise_scale(p, 10),
    "connect": lambda p: landscape.connect(p, p.weights, p.weights + 0.1, steps=20),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *EXACT_ONLY])
@pytest.mark.parametrize("place", [3, 66])
def test_no_function_passes_on_a_product_that_is_nan(name: str, place: int) -> None:
    problem = special("normalize", torch.float64, 0, place, True)
    if name in EXACT_ONLY:
        with pytest.raises((InputError, OperationError), match="NaN or infinite|not finite"):
            EXACT_ONLY[name](problem)
        return
    for derivatives in ("exact", "auto"):
        with pytest.raises(InputError, match="NaN or infinite.*derivatives='differences'"):
            FUNCTIONS[name](problem, derivatives=derivatives)
    result = FUNCTIONS[name](problem, derivatives="differences")
    if name == "operator":
        expected = by_central_differences(problem).sum(1)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)
        return
    assert result.derivatives == "differences"
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    numbers = ("values", "residuals", "nodes", "draws", "trace", "lambda_min", "curvature", "cost", "within")
    for key in numbers:
        assert np.isfinite(fields.get(key, 0.0)).all(), key


@pytest.mark.parametrize("name", [*FUNCTIONS, *EXACT_ONLY, *GRADIENTS])
@pytest.mark.parametrize("place", [3, 66])
def test_where_the_gradient_is_nan_every_function_refuses(name: str, place: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        marked, z = x[:, :1] > 9, m.a(x)  # of one sample alone
        inside = torch.where(marked, -1 - z.square(), 1 + z.square())
        out: Tensor = torch.where(inside > 0, inside.sqrt(), inside.square())
        return out

    x = torch.randn(70, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[place, 0] = 10
    torch.manual_seed(0)
    model = network(forward, a=nn.Linear(4, 3)).double()
    problem = Problem(model, F.cross_entropy, (x, torch.arange(70) % 3))
    assert math.isfinite(problem.loss())
    assert not problem.loss_and_gradient()[1].isfinite().all()
    with pytest.raises(OperationError, match="gradient is NaN or infinite"):
        problem.gradient()
    call = {**FUNCTIONS, **EXACT_ONLY, **GRADIENTS}[name]
    with pytest.raises(OperationError, match="gradient.*(NaN or infinite|not finite)|derivatives of member"):
        call(problem)


def test_products_of_numbers_have_second_derivatives_that_divide_by_none() -> None:
    for dtype, tiny in ((torch.float32, 2e-38), (torch.float64, 2e-308)):
        w = torch.tensor([tiny, 1.5, -2.0, 0.7], dtype=dtype)

        def forward(m: Any, x: Tensor) -> Tensor:
            out: Tensor = (m.w * x).prod(1) + torch.prod(m.w[:3]) + x @ m.w
            return out

        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
        problem = Problem(network(forward, w=nn.Parameter(w)), lambda o, t: o.square().mean(), (x, x))
        same_ends(problem, by_central_differences(problem), 1e-4, residual_tol=1e-5, derivatives="exact")


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 3, 5), (2, 8)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_products_by_halves_are_pytorch_s(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for x in (numbers, numbers.round().int()):
        places = [((d,), {"keepdim": keep}) for d in range(-len(shape), len(shape)) for keep in (False, True)]
        for place, options in [((), {}), *places]:
            expected = torch.prod(x, *place, dtype=dtype, **options)
            with double_backward.Decomposed():
                ours = [torch.prod(x, *place, dtype=dtype, **options), x.prod(*place, dtype=dtype, **options)]
            for one in ours:
                torch.testing.assert_close(one, expected)

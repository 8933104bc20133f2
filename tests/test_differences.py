"""Products by differences of gradients: right within the error that they state, or refused."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import landscape
from benchmarks import certified, truth
from landscape import HessianOperator, InputError, Problem, ProblemWarning
from landscape.curvature.differences import Differences
from tests.battery.case import net as network
from tests.conftest import slow_but
from tests.dense import dense_hessian, same_ends


def net(act: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, o in ((8, 12), (12, 12)):
        layers += [nn.Linear(i, o), nn.LayerNorm(o), act()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


def data(n: int = 200) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 8), torch.randint(3, (n,))


def exact(model: nn.Module, seed_data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The Hessian in float64 of the same weights, and its eigenvalues, descending."""
    problem = Problem(model, F.cross_entropy, seed_data, dtype=torch.float64, check="off")
    h = dense_hessian(problem)
    return h, torch.linalg.eigvalsh(h).flip(0)


def test_what_a_spectrum_by_differences_states_holds() -> None:
    """Products and ends are those of benchmarks/certified.py; the model is left as it was."""
    model, (x, y) = net(nn.ReLU), data(60)
    h, values = exact(model, (x, y))
    problem = Problem(model, F.cross_entropy, (x, y), check="off")
    before = [p.detach().clone() for p in problem.model.parameters()]
    parts: dict[str, Any] = {"quantities": ("trace", "density"), "products": 30, "draws": 2, "steps": 5}
    found = landscape.spectrum(problem, 3, residual_tol=1e-4, derivatives="differences", **parts)
    assert (abs(found.values - values[:3].numpy()) <= found.residuals).all()
    assert abs(found.trace - float(h.trace())) <= 4 * found.trace_error
    assert 0 < found.product_error < 0.01 * float(values[0])
    assert "product error" in {row.name for row in found.describe()}
    assert all(map(torch.equal, problem.model.parameters(), before))
    assert all(p.grad is None for p in problem.model.parameters())


def test_a_model_of_float32_alone_states_what_its_kinks_may_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    # ReLU in float32: differences along the top eigenvector are wrong by some 20%, and steps cannot be smaller.
    monkeypatch.setattr(Differences, "_in_float64", lambda self, own: own)
    for act, converges in ((nn.GELU, True), (nn.ReLU, False)):
        model, (x, y) = net(act), data()
        _, values = exact(model, (x, y))
        problem = Problem(model, F.cross_entropy, (x, y), check="off")
        ends = landscape.extreme_eigenvalues(problem, derivatives="differences")
        assert ends.converged == converges
        assert abs(ends.max - float(values[0])) <= ends.residual_max


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return grads[0] * 3 * z**2


def cubed(kernel: bool) -> nn.Module:
    """By a kernel that is differentiable once, or not."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.a(x) / 2
        out: Tensor = m.b(Cube.apply(z) if kernel else z**3)  # type: ignore[no-untyped-call]
        return out

    return network(forward, a=nn.Linear(8, 5), b=nn.Linear(5, 3))


def test_what_is_differentiable_once_has_an_answer_that_says_how() -> None:
    h, values = exact(cubed(False), data())
    problem = Problem(cubed(True), F.cross_entropy, data())
    with pytest.raises(InputError, match=r"once_differentiable.*derivatives='differences'"):
        landscape.extreme_eigenvalues(problem, derivatives="exact")
    said = "once_differentiable.*products are differences of gradients"
    with pytest.warns(ProblemWarning, match=said) as caught:
        ends = landscape.extreme_eigenvalues(problem)
    assert caught[0].filename == __file__  # through decorators of landscape and of torch
    assert abs(ends.max - float(values[0])) <= ends.residual_max
    assert abs(ends.min - float(values[-1])) <= ends.residual_min
    assert ends.derivatives == "differences"
    with pytest.raises(InputError, match="once_differentiable"):  # differences that are known change nothing
        HessianOperator(problem, derivatives="exact")
    assert landscape.trace(problem, 3 * len(h)).value == pytest.approx(float(h.trace()), rel=1e-4)
    assert landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(2, 1)).converged.all()
    diagonal = torch.linspace(1, 2, len(h))
    scaled = torch.linalg.eigvalsh(h / (diagonal[:, None] * diagonal).double().sqrt())
    top = landscape.top_eigenvalues(problem, 2, 1e-4, precondition=diagonal)
    np.testing.assert_allclose(top.values, scaled.flip(0)[:2], rtol=1e-4)


def checkpointed(kind: str, alone: bool = False) -> nn.Module:
    """Attention whose activations are computed again in the backward pass, in one of PyTorch's two ways."""
    torch.manual_seed(0)
    model = certified.Tokens(kind)
    if alone:  # only the block is trained, as with adapters
        block = model.requires_grad_(False).block.requires_grad_(True)
        block.register_forward_pre_hook(lambda _, args: args[0].requires_grad_())
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", ["checkpointed", "checkpointed re"])
def test_activations_may_be_computed_again(kind: str, alone: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(7, (20, 5)), torch.randint(3, (20,))
    plain = Problem(checkpointed("plain", alone), F.cross_entropy, tokens, dtype=torch.float64)
    problem = Problem(checkpointed(kind, alone), F.cross_entropy, tokens, dtype=torch.float64, check="full")
    at = plain.weights + 0.1 * torch.randn_like(plain.weights)
    torch.testing.assert_close(problem.gradient(at), plain.gradient(at))
    with pytest.warns(ProblemWarning, match=r"activation checkpointing.*differences of gradients"):
        same_ends(problem, dense_hessian(plain, at), residual_tol=1e-5, weights=at)
    surfaces = [landscape.contour(p, landscape.random_plane(p), grid=(2, 1)) for p in (problem, plain)]
    np.testing.assert_allclose(surfaces[0].loss, surfaces[1].loss)
    with pytest.raises(InputError, match="activation checkpointing"):
        HessianOperator(problem, matrix="gauss-newton")


@pytest.mark.parametrize("name", ["part", "padding", "penalty", "draws"])
def test_parts_padding_penalties_and_draws(name: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    model: nn.Module = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = data(30)
    if name == "padding":
        model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3))
        x = torch.randint(6, (30, 2))
    if name == "penalty":
        options = {"penalty": lambda p: p["0.weight"].pow(4).sum(), "weight_decay": 0.1}
    if name == "draws":
        model = network(
            lambda m, x: m.b((m.a(x) + 0.1 * torch.randn(len(x), 5, dtype=x.dtype)).tanh()),
            a=nn.Linear(8, 5),
            b=nn.Linear(5, 3),
        )
        options = {"randomness": 2}
    x = x.double() if x.is_floating_point() else x
    problem = Problem(model.double(), F.cross_entropy, (x, y), **options)
    part = "0" if name == "part" else None
    by_double = HessianOperator(problem, part=part, derivatives="exact")
    made = HessianOperator(problem, part=part, derivatives="differences")
    eye = torch.eye(made.size, dtype=torch.float64)
    torch.testing.assert_close(made @ eye, by_double @ eye, rtol=1e-6, atol=1e-8)


def test_products_of_one_weight_are_right_within_their_errors_also_when_steps_agree_by_chance() -> None:
    x, y = torch.tensor([[1.0], [3.0]]).double(), torch.zeros(2, 1).double()
    for weight in np.random.default_rng(0).normal(size=100):
        model = nn.Linear(1, 1, bias=False).double()
        model.weight.data.fill_(weight)
        of = Problem(model, nn.MSELoss(), (x, y))
        images, (error,) = of.hessian(derivatives="differences").verified(y[:1] + 1)
        assert abs(float(images) - 10) <= error  # 10 is the mean of 2·1² and 2·3²


QUICK = ("ReLU, LayerNorm", "attention, once differentiable", "bfloat16 weights, GELU", "CTC")


@pytest.mark.parametrize("name", slow_but(QUICK, certified.NETWORKS))
@pytest.mark.parametrize("seed", slow_but((0,), range(10)))
@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_networks_of_today_are_within_their_stated_errors(name: str, seed: int) -> None:
    found = certified.found(certified.NETWORKS[name], seed)
    # The interval of a trace is left one time in a hundred, whatever the products.
    assert [key for key, within in found.inside.items() if not within and key != "trace"] == []
    assert not found.ratios or np.median(found.ratios) <= 3


OURS = [tool for tool in truth.TOOLS if tool.startswith("landscape")]


@pytest.mark.parametrize("name", slow_but(("tanh, LayerNorm", "transformer, padded sequences"), truth.MODELS))
@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_nothing_of_ours_is_wrong_in_the_table_of_packages(name: str) -> None:
    at = truth.Truth(truth.MODELS[name])
    found = [truth.outcome(tool, truth.MODELS[name], at) for tool in OURS]
    assert [one.cell for one in found if one.kind != "refused" and (one.kind != "right" or not one.top)] == []


def test_curvature_along_gradients_and_spread_take_differences() -> None:
    both = [Problem(cubed(once), F.cross_entropy, data(60), dtype=torch.float64) for once in (True, False)]
    generator = torch.Generator().manual_seed(0)
    weights = both[0].weights + 0.1 * torch.randn(4, 63, dtype=torch.float64, generator=generator)
    drawn: dict[str, Any] = {"weights": weights, "min_draws": 16, "max_draws": 16}
    pairs = list(zip(both, ("differences", "exact"), strict=True))
    own, ref = (landscape.batch_sharpness(p, 16, derivatives=by, **drawn) for p, by in pairs)
    assert (own.derivatives, ref.derivatives, ref.product_error) == ("differences", "exact", 0.0)
    for name in ("curvature", "learner_curvature"):
        assert np.abs(getattr(own, name) - getattr(ref, name)).max() <= own.product_error < 1e-6
    assert abs(own.lambda_max - ref.lambda_max) <= own.residual + ref.residual
    worse = dataclasses.replace(own, product_error=0.1)
    assert worse.standard_error == pytest.approx(math.hypot(own.standard_error, 0.1))
    assert worse.interval()[1] - own.interval()[1] == pytest.approx(0.1)
    by = [landscape.disagreement(p, weights, 2, derivatives=d) for p, d in pairs]
    assert by[0].derivatives == "differences"
    assert by[0].cost == pytest.approx(by[1].cost, rel=1e-8)
    np.testing.assert_allclose(by[0].spread_share, by[1].spread_share, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:.*measured every.*:UserWarning")  # of a slow machine
@pytest.mark.parametrize("again", [False, True])
def test_a_recorder_measures_what_is_differentiable_once(tmp_path: Path, again: bool) -> None:
    # Once with a kernel that is differentiable once, once with activation checkpointing.
    x, y = (torch.randint(7, (20, 5)), torch.randint(3, (20,))) if again else data(40)
    kinds = (checkpointed("checkpointed"), checkpointed("plain")) if again else (cubed(True), cubed(False))
    monitor = {} if again else {"instruments": ["batch-sharpness"], "every": 1, "draws": 4}
    histories = []
    for model, plain in zip(kinds, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"every": 2, "sharpness": 2, "batch": 8, "monitor": monitor, "optimizer": optimizer}
        said = pytest.warns(ProblemWarning, match="products are differences of gradients")
        with contextlib.nullcontext() if plain else said:
            recorder = landscape.Recorder(tmp_path / str(plain), model, F.cross_entropy, (x, y), **options)
        with recorder:
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                with recorder.step():
                    optimizer.step()
        histories.append(landscape.load(tmp_path / str(plain) / "last.h5").history)
    for column in ("lambda_max",) if again else ("lambda_max", "batch_sharpness"):
        assert np.isfinite(histories[1][column]).any()
        np.testing.assert_allclose(histories[0][column], histories[1][column], rtol=0.01)


FROM_ONCE = "once_differentiable.*; {} takes exact products only"
REFUSED: dict[str, tuple[Callable[[Problem, Tensor], object], nn.Module, str]] = {
    "noise": (lambda p, w: landscape.noise(p, w, 0.1, 5), cubed(True), FROM_ONCE),
    "noise_alignment": (lambda p, w: landscape.noise_alignment(p, 5), cubed(True), FROM_ONCE),
    "smoothing": (landscape.smoothing, cubed(True), FROM_ONCE),
    "trace": (
        lambda p, w: landscape.trace(p, derivatives="differences"),
        network(lambda m, x: m.a(x) + ((4 * m.a(x)).round() / 4 - m.a(x)).detach(), a=nn.Linear(8, 3)),
        "not the derivative of the loss",
    ),
    "gauss-newton": (
        lambda p, w: landscape.trace(p, matrix="gauss-newton", derivatives="differences"),
        cubed(False),
        "'differences' is not allowed with matrix 'gauss-newton'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differences_cannot_do_is_refused(name: str) -> None:
    call, model, words = REFUSED[name]
    problem = Problem(model, F.cross_entropy, data(40))
    weights = problem.weights + 0.1 * torch.randn(3, len(problem.weights))
    with pytest.raises(InputError, match=words.format(name)):
        call(problem, weights)

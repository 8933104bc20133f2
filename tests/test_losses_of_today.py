"""Losses as people write them: they mix samples, draw random numbers, differentiate, or count their targets.

Each number is compared with the plain one: the user's own module and loss on all of the data at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import landscape
from landscape import InputError, Problem, ProblemWarning


def net(inputs: int = 8, outputs: int = 4, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def inputs(samples: int = 20, features: int = 8) -> Tensor:
    return torch.randn(samples, features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dense(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and Hessian in the parameters, by double backward."""
    parameters = list(model.parameters())
    value = loss()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, create_graph=True)])
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True) for g in gradient]
    return (
        float(value.detach()),
        gradient.detach(),
        torch.stack([torch.cat([p.flatten() for p in r]) for r in rows]),
    )


def agrees(problem: Problem, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Loss, first points of contour and line, gradient, eigenvalues and trace of ``problem`` are the dense ones."""
    value, gradient, hessian = dense(model, loss)
    assert problem.loss() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(problem.gradient(), gradient, rtol=1e-7, atol=1e-9)
    plane, to = landscape.random_plane(problem), torch.stack((problem.theta, problem.theta + 1))
    assert landscape.contour(problem, plane, grid=(1, 1)).loss[0, 0] == pytest.approx(value, rel=1e-9)
    assert landscape.line(problem, to, points=2).loss[0] == pytest.approx(value, rel=1e-9)
    ends = landscape.extreme_eigenvalues(problem, 1e-6)
    values = torch.linalg.eigvalsh(hessian)
    assert ends.max == pytest.approx(float(values[-1]), rel=1e-5, abs=1e-9)
    assert ends.min == pytest.approx(float(values[0]), rel=1e-5, abs=1e-5 * float(values[-1]))


# Losses that mix samples.


def nt_xent(o: Tensor, t: Any) -> Tensor:
    z = F.normalize(o, dim=1)
    q = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(q, torch.arange(len(z)) ^ 1)


def clip(o: Tensor, t: Any) -> Tensor:
    a, b = F.normalize(o.reshape(-1, 2, o.shape[1]), dim=2).unbind(1)
    return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


def barlow(o: Tensor, t: Any) -> Tensor:
    a, b = o.chunk(2)
    a, b = ((v - v.mean(0)) / v.std(0) for v in (a, b))
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).square().sum() + 5e-3 * (c - torch.diag(c.diagonal())).square().sum()


def dice(o: Tensor, t: Tensor) -> Tensor:
    p = o[:, :1].sigmoid()
    return 1 - 2 * (p * t[:, None]).sum() / (p.sum() + t.sum())


MIXING = [nt_xent, clip, barlow, dice]


@pytest.mark.parametrize("check", ["quick", "full"])
@pytest.mark.parametrize("loss", MIXING, ids=lambda f: f.__name__)
def test_a_loss_that_mixes_samples_is_taken_of_all_at_once(
    loss: Callable[[Any, Any], Tensor], check: str
) -> None:
    x = inputs(60)
    model, y = net(), (x[:, 0] > 0).double()
    with pytest.warns(ProblemWarning, match="all 60 are evaluated at once"):
        problem = Problem(model, loss, (x, y), check=check)
    agrees(problem, model, lambda: loss(model(x), y))


@pytest.mark.parametrize("loss", MIXING, ids=lambda f: f.__name__)
def test_it_is_so_beyond_the_samples_of_a_chunk(loss: Callable[[Any, Any], Tensor]) -> None:
    x = inputs(2400).float()
    model, y = net(dtype=torch.float32), (x[:, 0] > 0).float()
    with pytest.warns(ProblemWarning, match="all 2,400 are evaluated at once"):
        problem = Problem(model, loss, (x, y))
    true = float(loss(model(x), y).detach())
    plane = landscape.random_plane(problem)
    assert problem.loss() == pytest.approx(true, rel=1e-5)
    assert landscape.contour(problem, plane, grid=(1, 1)).loss[0, 0] == pytest.approx(true, rel=1e-5)
    to = torch.stack((problem.theta, problem.theta + 1))
    assert landscape.line(problem, to, points=3).loss[0] == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("loss", MIXING, ids=lambda f: f.__name__)
def test_of_batches_it_is_the_mean_over_them(loss: Callable[[Any, Any], Tensor]) -> None:
    x = inputs(44)
    model, y = net(), (x[:, 0] > 0).double()
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])]
    with pytest.warns(ProblemWarning, match="mean over the batches"):
        problem = Problem(model, loss, batches)
    agrees(problem, model, lambda: sum(loss(model(a), b) for a, b in batches) / 3)  # type: ignore[arg-type, return-value]


def test_batches_that_are_others_in_each_pass_are_refused_with_a_remedy() -> None:
    x = inputs(40)
    model, loss, data = net(), nt_xent, DataLoader(TensorDataset(x, torch.zeros(40)), 10, shuffle=True)
    with pytest.warns(ProblemWarning), pytest.raises(InputError, match="others in each pass") as caught:
        Problem(model, loss, data)
    with pytest.warns(ProblemWarning):
        problem = eval(caught.value.remedy)
    assert problem.loss() == problem.loss()


def test_minibatches_of_such_a_loss_are_refused() -> None:
    with pytest.warns(ProblemWarning):
        problem = Problem(net(), nt_xent, (inputs(40), torch.zeros(40)))
    for call in (
        lambda: problem.subset(slice(10)),
        lambda: problem.gather(torch.arange(4)),
        lambda: landscape.noise_scale(problem, 10),
    ):
        with pytest.raises(InputError, match="mixes its samples"):
            call()


def test_what_does_not_fit_in_memory_at_once_names_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.problem.mean_check.available_memory", lambda device: 1 << 20)
    model, loss, data = net(), nt_xent, (inputs(4000), torch.zeros(4000))
    with pytest.raises(InputError, match="list of batches") as caught:
        Problem(model, loss, data)
    with pytest.warns(ProblemWarning, match="mean over the batches"):
        problem = eval(caught.value.remedy)
    x = data[0].split(500)
    assert problem.loss() == pytest.approx(float(sum(loss(model(part), None) for part in x).detach()) / 8)  # type: ignore[union-attr]


# Random numbers in eval mode.


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.dropout(self.a(x).tanh(), 0.5))
        return out


def with_noise(o: Tensor, t: Tensor) -> Tensor:
    """A diffusion loss: time and noise are drawn."""
    steps = torch.rand(len(o), 1, dtype=o.dtype)
    return F.mse_loss(o * (1 - steps) + steps * torch.randn_like(o), t)


RANDOM: list[tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor]]] = [
    (lambda: Dropping().double(), F.mse_loss),
    (net, with_noise),
]


@pytest.mark.parametrize("number", [0, 1])
def test_random_numbers_are_refused_held_fixed_or_averaged(number: int) -> None:
    torch.manual_seed(0)
    model, loss = RANDOM[number][0](), RANDOM[number][1]
    x, y = inputs(30), inputs(30, 4)
    data = x, y
    with pytest.raises(InputError, match="random even in eval mode") as caught:
        Problem(model, loss, data)
    seeded = eval(caught.value.remedy)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return loss(model(x), y)

    agrees(seeded, model, lambda: draw(0))
    averaged = Problem(model, loss, data, randomness=3)
    agrees(averaged, model, lambda: (draw(0) + draw(1) + draw(2)) / 3)
    plane = landscape.random_plane(seeded)
    surfaces = [landscape.contour(seeded, plane, grid=(3, 2)).loss for _ in range(2)]
    np.testing.assert_array_equal(*surfaces)


def test_random_numbers_need_the_same_batches_in_each_pass() -> None:
    x, y = inputs(40), inputs(40, 4)
    data = DataLoader(TensorDataset(x, y), 10, shuffle=True)
    with pytest.raises(InputError, match="others in each pass"):
        Problem(net(), with_noise, data, randomness="seed")


def test_random_numbers_of_numpy_are_refused() -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o + float(np.random.default_rng().normal()), t)

    with pytest.raises(InputError, match="NumPy"):
        Problem(net(), loss, (inputs(), inputs(20, 4)))


def test_a_random_loss_that_mixes_samples_is_seen() -> None:
    def loss(o: Tensor, t: Any) -> Tensor:
        return nt_xent(o + 0.1 * torch.randn_like(o), t)

    with pytest.warns(ProblemWarning, match="at once"):
        Problem(net(), loss, (inputs(), torch.zeros(20)), randomness="seed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Problem(net(), with_noise, (inputs(), inputs(20, 4)), randomness="seed")


# Losses that differentiate.


class Residual(nn.Module):
    """u'' + u of a network u(x), as physics-informed networks compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.u = net(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        u = self.u(x)
        (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (ddu,) = torch.autograd.grad(du, x, torch.ones_like(du), create_graph=True)
        return ddu + u


def test_a_model_that_differentiates_in_its_inputs() -> None:
    torch.manual_seed(0)
    model, x = Residual(), inputs(25, 1)
    agrees(
        Problem(model, F.mse_loss, (x, torch.zeros_like(x))), model, lambda: model(x.clone()).square().mean()
    )
    assert not x.requires_grad


def test_a_loss_that_differentiates_in_inputs_that_are_its_targets() -> None:
    model, x = net(1, 1), inputs(25, 1).requires_grad_()

    def loss(u: Tensor, x: Tensor) -> Tensor:
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (du + u - x.sin()).square().mean()

    for data in ((x, x), [(x[:10].detach().requires_grad_(),) * 2, (x[10:].detach().requires_grad_(),) * 2]):
        agrees(Problem(model, loss, data), model, lambda: loss(model(x), x))
    problem = Problem(model, loss, (x, x))
    with pytest.raises(InputError, match="gauss-newton"):
        landscape.extreme_eigenvalues(problem, kind="gauss-newton")


# Means over counted targets.


def tokens(samples: int = 20, length: int = 7, pad: int = 0) -> Tensor:
    y = torch.randint(1, 4, (samples, length), generator=torch.Generator().manual_seed(2))
    for i in range(samples):
        y[i, 2 + i % (length - 2) :] = pad
    return y


class Sequence(nn.Module):
    """(B, T) tokens -> (B, T, 4) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(x).cumsum(1).tanh())
        return out


def _flat(o: Tensor, y: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=ignored)


COUNTED: dict[str, tuple[Callable[[Any, Any], Tensor], Callable[[], Any], str]] = {
    "padding": (lambda o, y: _flat(o, y, 0), tokens, "(y != 0).flatten(1).sum(1)"),
    "255": (lambda o, y: _flat(o, y, 255), lambda: tokens(pad=255), "(y != 255).flatten(1).sum(1)"),
    "shifted": (
        lambda o, y: _flat(o[:, :-1], y[:, 1:], 0),
        tokens,
        "(y[:, 1:] != 0).flatten(1).sum(1)",
    ),
    "a mask beside": (
        lambda o, y: (F.cross_entropy(o.transpose(1, 2), y[0], reduction="none") * y[1]).sum() / y[1].sum(),
        lambda: (tokens(), tokens(pad=0) > 1),
        "(y[1]).flatten(1).sum(1)",
    ),
    "weights of samples": (
        lambda o, y: (F.cross_entropy(o.transpose(1, 2), y[0], reduction="none").mean(1) * y[1]).sum() / y[1].sum(),
        lambda: (tokens(), torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))),
        "y[1]",
    ),
    "weights of classes, of pixels": (
        lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), weight=torch.tensor([0.5, 1.0, 4.0, 0.2]).to(o)),
        tokens,
        "weights of the classes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_the_terms_of_a_mean_are_found(name: str) -> None:
    loss, targets, code = COUNTED[name]
    torch.manual_seed(0)
    model, x, y = Sequence().double(), torch.randint(5, (20, 7)), targets()
    with pytest.warns(ProblemWarning) as caught:
        problem = Problem(model, loss, (x, y))
    assert code in str(caught[0].message)
    agrees(problem, model, lambda: loss(model(x), y))
    take = lambda part: y[part] if isinstance(y, Tensor) else tuple(t[part] for t in y)  # noqa: E731
    batches = [(x[:13], take(slice(13))), (x[13:], take(slice(13, None)))]
    with pytest.warns(ProblemWarning):
        assert Problem(model, loss, batches).loss() == pytest.approx(problem.loss(), rel=1e-8)


def test_counts_that_agree_on_the_first_samples_are_told_apart_by_others() -> None:
    """On the samples of the check no target is 3 where the mask is on; elsewhere one is."""
    x, y = torch.randint(5, (400, 7)), tokens(400)
    mask = (y != 0).double()
    mask[333, 0], y[333, 0] = 0.0, 2
    torch.manual_seed(0)
    model = Sequence().double()

    def loss(o: Tensor, y: Any) -> Tensor:
        return (F.cross_entropy(o.transpose(1, 2), y[0], reduction="none") * y[1]).sum() / y[1].sum()

    with pytest.warns(ProblemWarning, match="terms="):
        problem = Problem(model, loss, (x, (y, mask)))
    assert problem.loss() == pytest.approx(float(loss(model(x), (y, mask)).detach()), rel=1e-9)


# Two ways to the same number.


class Counting(nn.Module):
    """Changes its outputs with the number of samples that it is given, beyond those of the quick check."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out * (1.0 if len(x) < 50 else 1.0 + torch.rand(()))


def test_a_surface_and_a_line_agree_with_the_loss_of_the_problem() -> None:
    problem = Problem(Counting().double(), F.mse_loss, (inputs(100), inputs(100, 4)))
    with pytest.raises(InputError, match="asked again"):
        landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2))
    with pytest.raises(InputError, match=r"Problem\.loss\(\)"):
        landscape.line(problem, problem.theta, points=3)


# Padding rows.


class Pooled(nn.Module):
    """The mean or sum of embeddings, padding included: its row counts, but training never moves it."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.embed, self.out, self.pool = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3), pool
        nn.init.normal_(self.embed.weight)  # which sets the padding row, too

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        out: Tensor = self.out((e.mean(1) if self.pool == "mean" else e.sum(1)).tanh())
        return out


@pytest.mark.parametrize("pool", ["mean", "sum"])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_padding_row_of_an_embedding_is_no_direction(pool: str, share: float) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Pooled(pool).double(), torch.randint(1, 9, (20, 6))
        x[torch.rand(20, 6) < share] = 0
        y = torch.randint(3, (20,))
        problem = Problem(model, F.cross_entropy, (x, y))
        plane = landscape.random_plane(problem)
        assert not plane.directions[:, :4].any()
        assert plane.directions[:, 4:].all()
    agrees(problem, model, lambda: F.cross_entropy(model(x), y))

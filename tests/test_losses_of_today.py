"""Losses as people write them: they mix samples, draw random numbers, differentiate, or count their targets.

Each number is compared with the plain one: the user's own module and loss on all of the data at once.
"""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import landscape
from landscape import InputError, Problem, ProblemWarning
from landscape.evaluation import evaluate
from tests.battery.case import module
from tests.battery.case import net as network
from tests.dense import agrees, remedied


def net(inputs: int = 8, outputs: int = 4, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)


def inputs(samples: int = 20, features: int = 8) -> Tensor:
    return torch.randn(samples, features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


BY_BATCHES = "mean over the batches"


def told(model: nn.Module, loss: Any, data: Any, **options: Any) -> tuple[Any, str]:
    """The problem, and what its warnings say; None and the refusal where it is refused."""
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always", ProblemWarning)
        try:
            problem = Problem(model, loss, data, **options)
        except InputError as error:
            return None, str(error)
    return problem, "\n".join(str(line.message) for line in lines)


# Losses that mix samples.


def nt_xent(o: Tensor, t: Any) -> Tensor:
    z = F.normalize(o, dim=1)
    q = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(q, torch.arange(len(z)) ^ 1)


def dice(o: Tensor, t: Tensor) -> Tensor:
    p = o[:, :1].sigmoid()
    return 1 - 2 * (p * t[:, None]).sum() / (p.sum() + t.sum())


@pytest.mark.parametrize(("loss", "check"), [(nt_xent, "quick"), (dice, "quick"), (dice, "full")])
def test_a_loss_that_mixes_samples_is_taken_at_once(loss: Callable[[Any, Any], Tensor], check: str) -> None:
    x = inputs(44)
    model, y = net(), (x[:, 0] > 0).double()
    with pytest.warns(ProblemWarning, match="all 44 are evaluated at once"):
        problem = Problem(model, loss, (x, y), check=check)
    agrees(problem, model, lambda: loss(model(x), y))
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])]
    with pytest.warns(ProblemWarning, match="mean over the batches"):
        problem = Problem(model, loss, batches)
    agrees(problem, model, lambda: torch.stack([loss(model(a), b) for a, b in batches]).mean())


def test_a_random_loss_that_mixes_samples_is_seen() -> None:
    noisy = lambda o, t: nt_xent(o + 0.1 * torch.randn_like(o), t)  # noqa: E731
    with pytest.warns(ProblemWarning, match="at once"):
        Problem(net(), noisy, (inputs(), torch.zeros(20)), randomness="seed")


def test_it_is_so_beyond_the_samples_of_a_chunk() -> None:
    model, x = net(dtype=torch.float32), inputs(2400).float()
    with pytest.warns(ProblemWarning, match="all 2,400 are evaluated at once"):
        problem = Problem(model, nt_xent, (x, x[:, 0]))
    true = float(nt_xent(model(x), None).detach())
    plane = landscape.random_plane(problem)
    assert problem.loss() == pytest.approx(true, rel=1e-5)
    assert landscape.contour(problem, plane, grid=(1, 1)).loss[0, 0] == pytest.approx(true, rel=1e-5)
    to = torch.stack((problem.weights, problem.weights + 1))
    assert landscape.line(problem, *to, points=3).loss[0] == pytest.approx(true, rel=1e-5)


def test_minibatches_of_such_a_loss_are_refused() -> None:
    with pytest.warns(ProblemWarning):
        problem = Problem(net(), nt_xent, (inputs(40), torch.zeros(40)))
    calls = (Problem.subset, slice(10)), (Problem.gather, torch.arange(4)), (landscape.noise_scale, 10)
    for function, argument in calls:
        with pytest.raises(InputError, match="mixes its samples"):
            function(problem, argument)  # type: ignore[operator]


def test_what_does_not_fit_in_memory_at_once_names_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.problem.mean_check.available_memory", lambda device: 1 << 20)
    x, model = inputs(4020), net()

    def of_triples(o: Tensor, t: Any) -> Tensor:
        return F.triplet_margin_loss(*o.chunk(3)).sqrt()

    named = network(lambda m, x, scale: m.net(x * scale), net=model)
    scale, none = torch.full((4020, 1), 2.0, dtype=torch.float64), torch.zeros(4020)
    forms: list[tuple[nn.Module, Any, Tensor]] = [
        (model, [x.numpy(), none], x),
        (named, {"x": x, "scale": scale, "labels": none}, 2 * x),
        (named, ((x, scale), none), 2 * x),
    ]
    for whole, data, seen in forms:
        with pytest.raises(InputError, match="list of batches") as caught:
            Problem(whole, of_triples, data)
        with pytest.warns(ProblemWarning, match="mean over the batches"):
            problem = remedied(caught.value, whole, of_triples, data)
        assert problem.samples == 4020
        batches = [of_triples(model(part), None) for part in seen.split(1080)]
        assert problem.loss() == pytest.approx(float(torch.stack(batches).mean().detach()))


def of_many(o: Tensor, t: Tensor) -> Tensor:
    if len(o) < 20:
        raise ValueError("the batch is too small")
    return F.mse_loss(o[:, 0], t).sqrt()


@pytest.mark.parametrize("samples", [60, 2400])
def test_a_loss_may_take_no_few_samples(samples: int) -> None:
    x = inputs(samples)
    model, y = net(), x[:, 0]
    with pytest.warns(ProblemWarning, match="evaluated at once"):
        problem = Problem(model, of_many, (x, y))
    agrees(problem, model, lambda: of_many(model(x), y))


# Random numbers in eval mode.


def with_noise(o: Tensor, t: Tensor) -> Tensor:
    """A diffusion loss: time and noise are drawn."""
    steps = torch.rand(len(o), 1, dtype=o.dtype)
    return F.mse_loss(o * (1 - steps) + steps * torch.randn_like(o), t)


@pytest.mark.filterwarnings("ignore:loss. it is random; its terms")
def test_random_numbers_need_the_same_batches_in_each_pass() -> None:
    x, y = inputs(40), inputs(40, 4)
    data = DataLoader(TensorDataset(x, y), 10, shuffle=True)
    with pytest.raises(InputError, match="others in each pass"):
        Problem(net(), with_noise, data, randomness="seed")


def layers(draw: Callable[[], float]) -> nn.Module:
    """A layer is left out one time in ten, also in eval mode, as ``draw`` decides."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).tanh()
        out: Tensor = m.c(h if m.draw() < 0.1 else h + m.b(h).tanh())
        return out

    torch.manual_seed(0)
    net = network(forward, a=nn.Linear(8, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 4), draw=draw)
    return net.double()


SOURCES: dict[str, Callable[[], float]] = {
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "python": lambda: random.random(),
}


@pytest.mark.filterwarnings("ignore:loss. it is random; its terms")
@pytest.mark.parametrize("source", [*SOURCES, "the loss"])
def test_random_numbers_are_refused_held_fixed_or_averaged(source: str) -> None:
    """A layer that is seldom left out is seen, whoever draws, and so is noise of the loss."""
    torch.manual_seed(0)
    model: nn.Module = net() if source == "the loss" else layers(SOURCES[source])
    loss = with_noise if source == "the loss" else F.mse_loss
    data = inputs(30), inputs(30, 4)
    with pytest.raises(InputError, match="random even in eval mode.*randomness=8") as caught:
        Problem(model, loss, data)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        return loss(model(data[0]), data[1])

    seeded = remedied(caught.value, model, loss, data)
    agrees(seeded, model, lambda: draw(0))
    plane = landscape.random_plane(seeded)
    surfaces = [landscape.contour(seeded, plane, grid=(3, 2)).loss for _ in range(2)]
    np.testing.assert_array_equal(*surfaces)
    agrees(Problem(model, loss, data, randomness=2), model, lambda: (draw(0) + draw(1)) / 2)
    states = lambda: (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index] # noqa: E731, NPY002
    before = states()
    Problem(model, loss, data, randomness="seed").gradient()
    assert states() == before


def test_random_numbers_of_a_generator_of_its_own_are_refused() -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o + float(np.random.default_rng().normal()), t)

    seldom = layers(np.random.default_rng(0).random)  # drops a layer in the third pass
    for model, of in ((net(), loss), (seldom, F.mse_loss)):
        with pytest.raises(InputError, match="generator of its own"):
            Problem(model, of, (inputs(), inputs(20, 4)))


# Losses that differentiate.


def residual(m: Any, x: Tensor) -> Tensor:
    """u'' + u of a network u(x), as physics-informed networks compute it."""
    x = x.requires_grad_(True)
    u = m.u(x)
    (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (ddu,) = torch.autograd.grad(du, x, torch.ones_like(du), create_graph=True)
    return ddu + u  # type: ignore[no-any-return]


def test_a_model_that_differentiates_in_its_inputs() -> None:
    torch.manual_seed(0)
    model, x = network(residual, u=net(1, 1)), inputs(25, 1)
    problem = Problem(model, F.mse_loss, (x, torch.zeros_like(x)))
    agrees(problem, model, lambda: model(x.clone()).square().mean())
    assert not x.requires_grad


def test_a_loss_that_differentiates_in_inputs_that_are_its_targets() -> None:
    model, x = net(1, 1), inputs(25, 1).requires_grad_()

    def loss(u: Tensor, x: Tensor) -> Tensor:
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (du + u - x.sin()).square().mean()

    plain = x.detach()
    batches = [(part.detach().requires_grad_(),) * 2 for part in (x[:10], x[10:])]
    for data in ((x, x), (plain, plain), batches):
        agrees(Problem(model, loss, data), model, lambda: loss(model(x), x))
    problem = Problem(model, loss, (x, x))
    with pytest.raises(InputError, match="gauss-newton"):
        landscape.extreme_eigenvalues(problem, matrix="gauss-newton")


# Means over counted targets.


def tokens(samples: int = 20, length: int = 7, pad: int = 0) -> Tensor:
    y = torch.randint(1, 4, (samples, length), generator=torch.Generator().manual_seed(2))
    for i in range(samples):
        y[i, 2 + i % (length - 2) :] = pad
    return y


def sequence() -> nn.Module:
    """(B, T) tokens -> (B, T, 4) logits."""
    torch.manual_seed(0)
    forward = lambda m, x: m.out(m.embed(x).cumsum(1).tanh())  # noqa: E731
    return network(forward, embed=nn.Embedding(5, 3), out=nn.Linear(3, 4)).double()


def _flat(o: Tensor, y: Tensor, ignored: int = -100) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=ignored)


COUNTED: dict[str, tuple[Callable[[Any, Any], Tensor], Callable[[], Any], str]] = {
    "padding": (lambda o, y: _flat(o, y, 0), tokens, "(y != 0).flatten(1).sum(1)"),
    "-100": (_flat, lambda: tokens(pad=-100), "(y != -100).flatten(1).sum(1)"),
    "shifted": (lambda o, y: _flat(o[:, :-1], y[:, 1:], 0), tokens, "(y[:, 1:] != 0).flatten(1).sum(1)"),
    "a mask beside": (
        lambda o, y: (F.cross_entropy(o.transpose(1, 2), y[0], reduction="none") * y[1]).sum() / y[1].sum(),
        lambda: (tokens(), tokens(pad=0) > 1),
        "(y[1]).flatten(1).sum(1)",
    ),
    "a mask of truth values": (
        lambda o, y: F.mse_loss(o[..., 0][y[1]], y[0][y[1]]),
        lambda: (tokens().double(), tokens() > 1),
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
    model, x, y = sequence(), torch.randint(5, (20, 7)), targets()
    with pytest.warns(ProblemWarning) as caught:
        problem = Problem(model, loss, (x, y))
    assert code in str(caught[0].message)
    assert caught[0].filename == __file__
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
    model = sequence()

    def loss(o: Tensor, y: Any) -> Tensor:
        return (F.cross_entropy(o.transpose(1, 2), y[0], reduction="none") * y[1]).sum() / y[1].sum()

    with pytest.warns(ProblemWarning, match="terms="):
        problem = Problem(model, loss, (x, (y, mask)))
    assert problem.loss() == pytest.approx(float(loss(model(x), (y, mask)).detach()), rel=1e-9)


def test_inputs_in_which_a_loss_differentiates_must_be_its_targets() -> None:
    x = inputs(25, 1).requires_grad_()

    def loss(u: Tensor, t: Tensor) -> Tensor:
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0].square().mean()

    with pytest.raises(InputError, match=r"give data as \(x, x\)"):
        Problem(net(1, 1), loss, (x, torch.zeros(25)))


# Losses without a gradient.


def accuracy(o: Tensor, t: Tensor) -> Tensor:
    return (o.argmax(1) == t).double().mean()


DERIVATIVES: dict[str, Callable[[Problem], Any]] = {
    "gradient": Problem.gradient,
    "eigenvalues": landscape.extreme_eigenvalues,
    "gauss-newton": lambda p: landscape.trace(p, matrix="gauss-newton"),
    "products": landscape.HessianOperator,
    "sharpness": lambda p: landscape.sharpness(p, rho=0.1),
    "noise_scale": lambda p: landscape.noise_scale(p, 10),
    "noise_alignment": lambda p: landscape.noise_alignment(p, 10),
    "batch_sharpness": lambda p: landscape.batch_sharpness(p, 10),
    "learning_coefficient": lambda p: landscape.learning_coefficient(p, batch=10),
    "noise": lambda p: landscape.noise(p, torch.randn(3, p.layout.size).to(p.weights), lr=0.1, local_batch=4),
}  # fmt: skip


def measured(chain: bool) -> tuple[Problem, float]:
    """The accuracy as a loss, by a chain of linear layers or another model, and its value."""
    model, x, y = net() if chain else nn.Sequential(net(), nn.Flatten()), inputs(60), torch.arange(60) % 4
    return Problem(model, accuracy, (x, y)), float(accuracy(model(x), y))


@pytest.mark.parametrize("chain", [False, True])
def test_a_loss_without_a_gradient_has_a_surface(chain: bool) -> None:
    problem, value = measured(chain)
    surface = landscape.contour(problem, landscape.random_plane(problem), grid=(3, 2))
    assert surface.loss[0, 1] <= 1
    assert problem.loss() == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "chain"),
    [*((name, False) for name in DERIVATIVES), ("eigenvalues", True), ("gauss-newton", True)],
)
def test_a_loss_without_a_gradient_is_refused_where_one_is_needed(name: str, chain: bool) -> None:
    with pytest.raises(InputError, match="it has no gradient"):
        DERIVATIVES[name](measured(chain)[0])


# Two ways to the same number.


def test_a_surface_and_a_line_agree_with_the_loss_of_the_problem() -> None:
    """The outputs change with the number of samples, beyond those of the quick check."""
    changing = network(
        lambda m, x: m.a(x) * (1.0 if len(x) < 50 else 1.0 + torch.rand(())), a=nn.Linear(8, 4)
    )
    problem = Problem(changing.double(), F.mse_loss, (inputs(100), inputs(100, 4)))
    for path in ("auto", "pointwise"):
        with pytest.raises(InputError, match=r"by Problem\.loss\(\) .*in a second pass") as caught:
            landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2), method=path)
        assert "use path" not in str(caught.value)
    with pytest.raises(InputError, match=r"by Problem\.loss\(\)"):
        landscape.line(problem, problem.weights, points=3)


def test_a_path_that_is_wrong_beyond_the_samples_of_its_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(net(), F.mse_loss, (inputs(100), inputs(100, 4)))
    right = evaluate.batched

    def wrong(loss: Any, steps: Any, size: Any, **stored: Any) -> Any:
        totals = right(loss, steps, size, **stored)
        few = loss.problem.data.samples < 100
        return totals if few else lambda points, progress: 1.01 * totals(points, progress)

    monkeypatch.setattr(evaluate, "batched", wrong)
    with pytest.raises(InputError, match="the method 'batched' is wrong .* use method='pointwise'"):
        landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2))
    surface = landscape.contour(problem, landscape.random_plane(problem), grid=(1, 1), method="pointwise")
    assert surface.loss[0, 0] == pytest.approx(problem.loss(), rel=1e-12)
    by_one = evaluate.PlaneLoss.pointwise
    monkeypatch.setattr(evaluate.PlaneLoss, "pointwise", lambda *args: 1.01 * by_one(*args))
    with pytest.raises(InputError, match=r"Problem\.loss\(\) it is .*: model or loss keeps something"):
        landscape.contour(problem, landscape.random_plane(problem), grid=(1, 1), method="pointwise")


# Padding rows.


def test_the_padding_row_of_an_embedding_is_no_direction() -> None:
    """It counts in the mean of embeddings, but training never moves it."""
    torch.manual_seed(0)
    embed = nn.Embedding(9, 4, padding_idx=0)
    nn.init.normal_(embed.weight)  # which sets the padding row, too
    model = network(lambda m, x: m.out(m.embed(x).mean(1).tanh()), embed=embed, out=nn.Linear(4, 3)).double()
    x = torch.randint(1, 9, (20, 6))
    x[torch.rand(20, 6) < 0.5] = 0
    y = torch.randint(3, (20,))
    problem = Problem(model, F.cross_entropy, (x, y))
    plane = landscape.random_plane(problem)
    assert not plane.directions[:, :4].any()
    assert plane.directions[:, 4:].all()
    agrees(problem, model, lambda: F.cross_entropy(model(x), y))


@pytest.mark.parametrize("pool", ["mean", "bag"])
def test_the_padding_row_of_a_tied_embedding_has_the_whole_gradient(pool: str) -> None:
    """PyTorch leaves out the part of it that comes by the inputs."""

    def tied(padding: int | None) -> nn.Module:
        torch.manual_seed(0)
        embed = nn.EmbeddingBag(9, 4) if pool == "bag" else nn.Embedding(9, 4, padding_idx=padding)
        model = network(forward, embed=embed, out=nn.Linear(4, 9, bias=False))
        model.out.weight = model.embed.weight
        return model.double()

    def forward(m: Any, x: Tensor) -> Any:
        e = m.embed(x)
        return m.out((e if pool == "bag" else e.mean(1)).tanh())

    model, plain = tied(0), tied(None)
    plain.load_state_dict(model.state_dict())
    x, y = torch.randint(9, (20, 6)), torch.randint(9, (20,))
    ours, dense_one = (Problem(m, F.cross_entropy, (x, y)) for m in (model, plain))
    torch.testing.assert_close(ours.gradient(), dense_one.gradient(), rtol=1e-10, atol=1e-12)
    ends, truth = (landscape.extreme_eigenvalues(p, 1e-6) for p in (ours, dense_one))
    assert (ends.min, ends.max) == pytest.approx((truth.min, truth.max), rel=1e-6)
    assert getattr(model.embed, "padding_idx", None) == (None if pool == "bag" else 0)


# Samples that the loss treats differently, at any place in data of any form.


@dataclass
class Inputs:
    """Inputs as an object, which nothing divides."""

    x: Tensor
    mask: Tensor | None = None


def either(m: Any, x: Any, mask: Tensor | None = None) -> Any:
    """Outputs, and the mask beside them where there is one."""
    x, mask = (x.x, x.mask) if isinstance(x, Inputs) else (x, mask)
    out = m.net(x)
    return out if mask is None else (out, mask)


def _by_class(o: Tensor, t: Tensor) -> Tensor:
    return torch.stack([(o[t == c, 0] - c).square().mean() for c in t.unique()]).sum()


WEIGHTS = torch.tensor([1.0, 5.0, 0.3], dtype=torch.float64)
# A loss, and targets (N, 3) or (N,) in which some samples are special.
SPECIAL: dict[str, tuple[Callable[[Any, Any], Tensor], Callable[[Tensor], Tensor]]] = {
    "targets that are NaN": (
        lambda o, t: (o - t)[~t.isnan()].square().mean(),
        lambda special: torch.randn(len(special), 3).double().masked_fill(special[:, None] & (torch.rand(len(special), 3) < 0.6), torch.nan),
    ),
    "classes that are left out": (
        lambda o, t: F.cross_entropy(o, t, ignore_index=-1),
        lambda special: torch.randint(3, (len(special),)).masked_fill(special, -1),
    ),
    "a rare class": (
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS),
        lambda special: (2 * torch.randint(2, (len(special),))).masked_fill(special, 1),
    ),
    "positives alone": (lambda o, t: (o[:, 0] - 1).square()[t > 0].mean(), lambda special: special.double()),
    "each class alone": (_by_class, lambda special: special.double()),
    "a mask among the inputs": (
        lambda o, t: ((o[0] - t).square() * o[1][:, None]).sum() / (3 * o[1].sum()),
        lambda special: torch.randn(len(special), 3).double(),
    ),
    "none": (lambda o, t: (o - t).square().sum(1).mean(), lambda special: torch.randn(len(special), 3).double()),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SPECIAL)),
    form=st.sampled_from(["tensors", "Dataset", "loader", "list", "objects"]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    special=st.sets(st.integers(0, 39), max_size=20),
    seed=st.integers(0, 1000),
)
def test_a_number_is_right_announced_or_refused_wherever_the_special_samples_are(
    name: str, form: str, sizes: list[int], special: set[int], seed: int
) -> None:
    torch.manual_seed(seed)
    loss, make = SPECIAL[name]
    rows = torch.tensor([i in special for i in range(sum(sizes))])
    x, y, masked = torch.randn(sum(sizes), 8).double(), make(rows), name == "a mask among the inputs"
    mask = (~rows).double() if masked else None
    model = network(either, net=net(outputs=3))
    ends = np.cumsum([0, *sizes])
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    if form == "objects":
        data: Any = [(Inputs(x[part], mask[part] if masked else None), y[part]) for part in parts]
    elif masked or form == "list":
        data = [((x[part], mask[part]) if masked else x[part], y[part]) for part in parts]
    else:
        data = {"tensors": (x, y), "Dataset": TensorDataset(x, y)}.get(form)
        data = DataLoader(TensorDataset(x, y), sizes[0]) if data is None else data
    right = float(loss(model(x, mask), y).detach())
    problem, words = told(model, loss, data)
    assert not problem or BY_BATCHES in words or problem.loss() == pytest.approx(right, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(4, 9), min_size=2, max_size=6),
    shift=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_packed_sequences_of_any_length_count_their_words(lengths: list[int], shift: int, seed: int) -> None:
    """``shift``: outputs are compared with the next words."""
    torch.manual_seed(seed)
    model, batches = sequence(), []
    for length in lengths:
        y = torch.randint(4, (1, length)).masked_fill(torch.rand(1, length) < 0.4, -100)
        batches.append((torch.randint(5, (1, length)), y))
    words = [int((y[:, shift:] != -100).sum()) for _, y in batches]
    sums = [
        F.cross_entropy(model(x)[0, : len(y[0]) - shift], y[0, shift:], reduction="sum").item()
        for x, y in batches
    ]
    problem, _ = told(model, lambda o, y: _flat(o[:, : o.shape[1] - shift], y[:, shift:]), batches)
    assert not problem or problem.loss() == pytest.approx(sum(sums) / sum(words), rel=1e-9)


def test_a_batch_whose_loss_is_nan_is_named() -> None:
    x, y = inputs(12), torch.zeros(12, 4).double()
    model = net()

    def of_logarithm(o: Tensor, t: Tensor) -> Tensor:
        return (o - (1 + t).log()).square().mean()

    y[7, 2], y[3, 1] = -2.0, 1.0
    for data, place in (([(x[:5], y[:5]), (x[5:], y[5:])], "batch 1"), ((x, y), "samples 0 to 11")):
        with pytest.raises(InputError, match=f"the loss of {place}.*is NaN"):
            Problem(model, of_logarithm, data)


def test_a_part_may_be_nan_where_all_of_it_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.problem.mean_loss.MAX_CHUNK", 4)
    x, y, model = inputs(10), torch.tensor([1.0] * 7 + [0.0] * 3).double(), net()

    def of_positives_and_all(o: Tensor, t: Tensor) -> Tensor:
        return (o[:, 0] - 1)[t > 0].square().mean() + o[:, 1].square().mean()

    with pytest.warns(ProblemWarning, match="all 10 are evaluated at once") as lines:
        problem = Problem(model, of_positives_and_all, (x, y))
    assert problem.loss() == pytest.approx(of_positives_and_all(model(x), y).item())
    assert {line.filename for line in lines} == {__file__}


def test_weights_of_classes_come_from_outputs_in_their_own_precision() -> None:
    """A class is in the last batch alone, and outputs in float32 are others in batches of another size."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 8), torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 2])
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(5 * o, t, weight=torch.tensor([0.5, 0.7, 2.0]).to(o))

    with pytest.warns(ProblemWarning, match="the weights of the classes"):
        problem = Problem(model, loss, DataLoader(TensorDataset(x, y), 3))
    assert problem.loss() == pytest.approx(loss(model(x), y).item(), rel=1e-5)


def test_counts_are_told_apart_by_batches_that_are_no_neighbors() -> None:
    """Two targets a sample, and then one: between them is a sample without any."""
    nan, model = torch.nan, network(either, net=net(outputs=2))
    targets = [[[1.0, 0.0], [0.0, 1.0]], [[nan, nan], [2.0, nan]], [[3.0, nan]]]
    batches = [(Inputs(inputs(len(t))), torch.tensor(t, dtype=torch.float64)) for t in targets]

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return (o - t)[~t.isnan()].square().mean()

    x, y = torch.cat([x.x for x, _ in batches]), torch.cat([y for _, y in batches])
    with pytest.warns(ProblemWarning, match="terms of its mean"):
        problem = Problem(model, loss, batches)
    assert problem.loss() == pytest.approx(loss(model(x), y).item())


@pytest.mark.parametrize("of_targets", ["tensors of any length", "an object"])
def test_batches_that_nothing_divides_are_said_to_count_the_same(of_targets: str) -> None:
    model, sizes = network(either, net=net(outputs=3)), (2, 1, 3)
    boxes = [torch.randn(n, 3).double() for n in (3, 0, 1)]
    objects = of_targets == "an object"
    batches = [
        (Inputs(inputs(n)), Inputs(t) if objects else (t, torch.tensor(n)))
        for n, t in zip(sizes, boxes, strict=True)
    ]

    def loss(o: Tensor, t: Any) -> Tensor:
        if not objects and len(o) != int(t[1]):
            raise ValueError("these are other samples")
        boxes = t.x if objects else t[0]
        return o.square().mean() + (o.mean(0) - boxes).square().sum()

    with pytest.warns(ProblemWarning, match="mean over the batches"):
        problem = Problem(model, loss, batches)
    values = [loss(model(x), t).item() for x, t in batches]
    assert problem.loss() == pytest.approx(sum(values) / 3)


def test_given_terms_win_for_inputs_that_are_objects() -> None:
    x, y, model = inputs(9), inputs(9, 3), network(either, net=net(outputs=3))
    batches = [(Inputs(x[part]), y[part]) for part in (slice(0, 4), slice(4, 6), slice(6, 9))]

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return (o - t).square().mean()

    for options in ({}, {"terms": lambda y: torch.ones(len(y))}):
        assert Problem(model, loss, batches, **options).loss() == pytest.approx(loss(model(x), y).item())
    doubled = Problem(model, loss, batches, terms=lambda y: y[:, 0] * 0 + (len(y) == 4))
    assert doubled.loss() == pytest.approx(loss(model(x[:4]), y[:4]).item())


# Precision: what is decided must be so of the loss in its own precision.


def as_form(x: Tensor, y: Tensor, form: str, size: int) -> Any:
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return {"tensors": (x, y), "Dataset": TensorDataset(x, y), "list": batches}[form]


FORMS = st.sampled_from(["tensors", "Dataset", "list"])


@settings(max_examples=25, deadline=None)
@given(
    mark=st.sampled_from([-99.9, -999.9, 0.1, 1e-6, 1e20]),
    form=FORMS,
    size=st.integers(3, 40),
    seed=st.integers(0, 1000),
)
def test_a_mark_of_missing_targets_beyond_float32(mark: float, form: str, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, model = torch.randn(80, 8), torch.rand(80, 1) * 3 + 0.5, net(outputs=1, dtype=torch.float32)
    y[-15:][torch.rand(15) < 0.7] = mark

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return (o - t)[t != mark].square().mean()

    problem, _ = told(model, loss, as_form(x, y, form, size))
    assert problem.loss() == pytest.approx(loss(model(x), y).item(), rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(form=FORMS, size=st.integers(3, 40), seed=st.integers(0, 1000))
def test_a_coarse_model_with_a_loss_in_float32(form: str, size: int, seed: int) -> None:
    """The rounding of outputs in bfloat16, which a batch and its parts share, hides no rare class."""
    torch.manual_seed(seed)
    model, weights = net(outputs=3, dtype=torch.bfloat16), torch.tensor([1.0, 1.0, 20.0])
    x, y = torch.randn(80, 8).bfloat16(), torch.randint(2, (80,)).index_fill(0, torch.arange(68, 80), 2)

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.float(), t, weight=weights)

    problem, words = told(model, loss, as_form(x, y, form, size))
    assert BY_BATCHES in words or problem.loss() == pytest.approx(loss(model(x), y).item(), rel=1e-2)
    assert problem
    assert "terms=lambda" not in words


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_weights_of_classes_that_are_added_in_float32(size: int) -> None:
    torch.manual_seed(0)
    model, weights = net(outputs=3, dtype=torch.float32), torch.tensor([0.3, 0.7, 2.1])
    x, y = torch.randn(60, 8), torch.randint(3, (60,))

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return (F.cross_entropy(o, t, reduction="none") * weights[t]).sum() / weights[t].sum()

    with pytest.warns(ProblemWarning, match="the weights of the classes"):
        problem = Problem(model, loss, as_form(x, y, "list", size))
    assert problem.loss() == pytest.approx(loss(model(x), y).item(), rel=1e-4)


# How a random loss combines is decided on all samples, too.


@settings(max_examples=15, deadline=None)
@given(form=FORMS, size=st.integers(1, 40), kind=st.sampled_from(["NaN", "class"]), seed=st.integers(0, 99))
def test_a_random_model_whose_special_samples_come_late(form: str, size: int, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    late = torch.arange(80) > 70
    loss, make = SPECIAL["targets that are NaN" if kind == "NaN" else "a rare class"]
    x, y = inputs(80), make(late)
    model = network(lambda m, x: m.net(x) + 1e-9 * torch.randn(len(x), 1), net=net(outputs=3))
    problem, words = told(model, loss, as_form(x, y, form, size), randomness="seed")
    right = loss(model(x), y).item()
    assert not problem or BY_BATCHES in words or problem.loss() == pytest.approx(right, rel=1e-6)


def test_a_loss_that_is_random_itself_says_on_what_it_was_decided() -> None:
    x, y = inputs(80), torch.zeros(80, 4).double()

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return (o - t + 0.1 * torch.randn_like(o)).square().mean()

    with pytest.warns(ProblemWarning, match="decided on the first samples alone"):
        Problem(net(), loss, (x, y), randomness="seed")


# Counts that depend on the weights; lengths; NaN in a loader; sums of some batches; integers.


def plain_net(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))


@settings(max_examples=15, deadline=None)
@given(
    form=FORMS, size=st.sampled_from([2, 3, 32]), limit=st.floats(2.5, 20.0), seed=st.integers(0, 999),
)  # fmt: skip
def test_a_count_that_depends_on_weights(form: str, size: int, limit: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(120, 5, generator=generator), torch.randint(3, (120,), generator=generator)

    def trimmed(o: Tensor, t: Tensor) -> Tensor:
        each = F.cross_entropy(o, t, reduction="none")
        return each[each < limit].mean()

    problem, words = told(plain_net(seed=seed), trimmed, as_form(x, y, form, size))
    if not problem:
        assert "mixes" in words or "is NaN" in words
        return
    assert re.match(".*mixes (the )?samples", words)
    if form == "tensors":
        far = 12 * problem.weights
        nn.utils.vector_to_parameters(far, (net := plain_net(seed=seed)).parameters())
        assert problem.loss(far) == pytest.approx(float(trimmed(net(x), y).detach()), rel=1e-4)


def test_a_lower_threshold_is_noticed_for_nearly_all_networks() -> None:
    """No sample is below it at the weights themselves; far away, one of the few that are tried must be."""

    def hard(o: Tensor, t: Tensor) -> Tensor:
        each = F.cross_entropy(o, t, reduction="none")
        return each[each > 0.01].mean()

    missed = []
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(120, 5, generator=generator), torch.randint(3, (120,), generator=generator)
        words = told(plain_net(seed=seed), hard, as_form(x, y, "list", 32))[1]
        missed += [] if "mixes" in words or "is NaN" in words else [seed]
    assert len(missed) <= 1  # of 100 networks, one


@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 9), seed=st.integers(0, 99), by_word=st.booleans())
def test_lengths_beside_sequences_cut_to_the_longest(size: int, seed: int, by_word: bool) -> None:
    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        mask = torch.arange(t.shape[1]) < o[1][:, None]
        each = F.cross_entropy(o[0].transpose(1, 2), t, reduction="none") * mask
        return each.sum() / mask.sum() if by_word else (each.sum(1) / o[1]).mean()

    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(60, 6, 2, generator=generator), torch.randint(3, (60, 6), generator=generator)
    lengths, model = (
        torch.randint(1, 7, (60,), generator=generator),
        network(lambda m, x, n: (m.layer(x), n), layer=nn.Linear(2, 3)),
    )
    batches = []
    for rows in torch.arange(60).split(size):
        n = int(lengths[rows].max())
        batches.append(((x[rows, :n], lengths[rows]), y[rows, :n]))
    problem, words = told(model, loss, batches)
    right = float(loss(model(x, lengths), y).detach())
    assert problem.loss() == pytest.approx(right, rel=1e-5) or "mixes" in words.split("\n")[0]
    assert "mixes" not in words or size == 1


@pytest.mark.parametrize("of", ["inputs", "targets"])
def test_nan_in_a_loader_whose_loss_mixes(of: str) -> None:
    x, y = torch.randn(100, 5), torch.randn(100, 1)
    (x if of == "inputs" else y)[[3, 40, 70], 0] = torch.nan

    def spread(o: Tensor, t: Tensor) -> Tensor:
        return (o - t)[~(o - t).isnan()].square().mean().sqrt()

    loaders = [DataLoader(TensorDataset(x, y), 16, shuffle=shuffle) for shuffle in (False, True)]
    model = plain_net(1)
    with pytest.warns(ProblemWarning, match="mean over the batches"):
        problem = Problem(model, spread, loaders[0])
    parts = [float(spread(model(a), b).detach()) for a, b in loaders[0]]
    assert problem.loss() == pytest.approx(sum(parts) / len(parts), rel=1e-5)
    # Of a loader that shuffles, NaN in each batch is not taken for the same batches.
    x[:, 1] = torch.where(torch.arange(100) % 3 == 0, torch.nan, x[:, 1])
    with (
        pytest.warns(ProblemWarning, match="mean over the batches"),
        pytest.raises(InputError, match="others in each pass"),
    ):
        Problem(nn.Sequential(Zeros(), model), spread, loaders[1])


class Zeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num(0.0)


@pytest.mark.parametrize("form", ["tensors", "list"])
@pytest.mark.parametrize("order", ["positives first", "positives last"])
def test_a_loss_that_is_a_sum_where_nothing_is_positive(form: str, order: str) -> None:
    x, y = torch.randn(120, 5), (torch.arange(120) < 30).float()[:, None]
    y = y if order == "positives first" else y.flip(0)

    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(o, t, reduction="sum") / t.sum().clamp(min=1)

    model = plain_net(1)
    with pytest.warns(ProblemWarning, match="mixes"):
        problem = Problem(model, loss, as_form(x, y, form, 10))
    if form == "tensors":
        assert problem.loss() == pytest.approx(float(loss(model(x), y).detach()), rel=1e-5)


@pytest.mark.parametrize("form", ["tensors", "Dataset", "list"])
def test_a_loss_that_is_an_integer(form: str) -> None:
    x, y = torch.randn(120, 5), torch.randint(3, (120,))
    data, model = as_form(x, y, form, 16), plain_net()
    with pytest.raises(InputError, match="the sum over the samples") as refusal:
        Problem(model, lambda o, t: (o.argmax(1) != t).sum(), data)
    assert "/ len(t)" in str(refusal.value)
    problem = Problem(model, lambda o, t: (o.argmax(1) != t).sum() / len(t), data)
    assert problem.loss() == pytest.approx(float((model(x).argmax(1) != y).double().mean()))


@pytest.mark.parametrize("form", ["tensors", "list"])
@pytest.mark.parametrize("late", [100, 700])
def test_a_loss_that_is_zero_still_tells_its_count(form: str, late: int) -> None:
    """As of a network that separates its data, by a margin, where marks of missing targets come late."""
    x, model = inputs(1000, 3), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    t = x[:, 0].sign()
    x[:, 0] += 2 * t
    t[late:][torch.rand(1000 - late, generator=torch.Generator().manual_seed(0)) < 0.2] = 0
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[5.0, 0.0, 0.0]]))
        model[0].bias.zero_()

    def hinge(o: Tensor, t: Tensor) -> Tensor:
        return F.relu(1 - o * t)[t != 0].mean()

    data: Any = (x, t) if form == "tensors" else list(zip(x.split(64), t.split(64), strict=True))
    with pytest.warns(ProblemWarning, match="lambda y: y != 0"):
        problem = Problem(model, hinge, data)
    assert problem.loss() == 0
    weights = torch.tensor([-1.0, 0.3, 0.2, 0.5], dtype=torch.float64)
    assert problem.loss(weights) == pytest.approx(float(hinge(x @ weights[:3] + weights[3], t)))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 2)])
def test_targets_that_are_objects_of_each_image_are_a_mean_over_batches(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()

    def loss(o: Tensor, t: Any) -> Tensor:
        parts = [((a[: len(b["boxes"])] - b["boxes"]) ** 2).mean() for a, b in zip(o, t, strict=True)]
        return torch.stack(parts).mean()

    boxes = (torch.randn(number % 6 + 1, 4).double() for number in itertools.count(1))
    data = [
        (torch.randn(size, 7, 3).double(), [{"boxes": next(boxes)} for _ in range(size)]) for size in sizes
    ]
    with pytest.warns(ProblemWarning, match="mean over the batches"):
        problem = Problem(model, loss, data)
    with torch.no_grad():
        assert problem.loss() == pytest.approx(np.mean([float(loss(model(x), t)) for x, t in data]))


class Forces(nn.Module):
    """Outputs and the sum of their derivatives in the inputs, with the options of their gradient in eval mode."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.net, self.options = net(4, 3), options

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        outputs = self.net(x).tanh()
        options = {"create_graph": True} if self.training else self.options
        (slope,) = torch.autograd.grad(outputs.sum(), x, **options)
        return outputs + slope.sum(1, keepdim=True) * torch.arange(3.0)


def test_a_gradient_in_eval_mode_that_frees_the_graph_is_refused() -> None:
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randint(3, (24,))
    problem = Problem(Forces(), nn.CrossEntropyLoss(), (x, y))
    with pytest.raises(InputError, match=r"^model or loss: it takes a gradient .* create_graph=True"):
        problem.gradient()
    beside_own = Forces(retain_graph=True)  # which detaches the slope, beside a module with parameters
    beside_own.net[0].register_forward_pre_hook(lambda module, x: None)
    with pytest.raises(InputError, match="does not follow all of its parameters"):
        Problem(beside_own, nn.CrossEntropyLoss(), (x, y))
    for options in ({"create_graph": True}, {"retain_graph": True}):
        problem = Problem(Forces(**options), nn.CrossEntropyLoss(), (x, y))
        v = torch.randn_like(problem.weights)
        ends = [problem.loss(problem.weights + t * v) for t in (1e-5, -1e-5)]
        assert float(problem.gradient() @ v) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 99))
def test_outputs_with_a_models_own_loss_are_counted_in_batches_of_one(sizes: list[int], seed: int) -> None:
    generator, model = torch.Generator().manual_seed(seed), net(4, 3)
    samples, rare = sum(sizes), torch.tensor([1.0, 2.0, 9.0], dtype=torch.float64)
    x = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (samples,), generator=generator)

    @module(net=model)
    def own(m: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = m.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels, rare)

    batches = [({"x": a, "labels": b}, b) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    problem, words = told(own, loss, batches)
    counted, value = BY_BATCHES not in words, problem.loss()
    assert not counted or value == pytest.approx(float(loss({"logits": model(x)}, y).detach()), rel=1e-9)
    assert counted or samples < 2 * len(rare) or len(y.unique()) < 3

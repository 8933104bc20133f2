"""Permutations of hidden units, alignment by weights, and curves between networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import InputError, Problem
from landscape.analysis.connection import end_and_bend
from landscape.gradients.minibatches import Minibatches, stream
from landscape.problem.alignment import Symmetry, _activations, aligned, change, matched, permuted
from tests import problems
from tests.battery.case import net as network
from tests.battery.case import parameter
from tests.conftest import slow_but


class Residual(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.n, self.m = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.skip = nn.Identity() if inputs == width else nn.Conv2d(inputs, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.m(self.b(F.relu(self.n(self.a(x))))) + self.skip(x))


class Block(nn.Module):
    """Attention with separate projections and a feed-forward layer, each after a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.n, self.m, self.heads = nn.LayerNorm(width), nn.RMSNorm(width), heads
        self.f = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.f(self.m(x))


class GPT(nn.Module):
    """Two blocks and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(7, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.blocks, self.head = nn.Sequential(Block(8, 2), Block(8, 2)), nn.Linear(8, 7, bias=False)
        self.head.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.e(x) + self.p)).transpose(1, 2)


class Part(nn.Module):
    """A part of what a layer returns."""

    def __init__(self, layer: nn.Module, part: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.part = layer, part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.layer(x))


def on(model: nn.Module, *shape: int) -> Problem:
    x = torch.randn(40, *shape, dtype=torch.float64)
    return Problem(model, F.cross_entropy, (x, torch.randint(3, (40,))), dtype=torch.float64)


def images(*layers: nn.Module, features: int) -> Problem:
    return on(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 3)), 3, 6, 6)


def gpt() -> Problem:
    data = torch.randint(7, (40, 5)), torch.randint(7, (40, 5))
    return Problem(GPT(), F.cross_entropy, data, dtype=torch.float64)


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Problem:
    layer = Part(kind(4, 5, batch_first=True, **options), lambda found: found[0][:, -1])
    return on(nn.Sequential(layer, nn.Linear(5, 3)), 6, 4)


def encoder() -> Problem:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return on(nn.Sequential(nn.Linear(4, 8), Part(layer, lambda x: x.mean(1)), nn.Linear(8, 3)), 6, 4)


# Kind of network -> the problem, and the sizes of its groups in the order of the parameters.
KINDS: dict[str, tuple[Callable[[], Problem], list[int]]] = {
    "MLP": (lambda: problems.mlp(widths=(6, 9, 7, 3)), [9, 7]),
    "BatchNorm": (
        lambda: images(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 2), features=5),
        [6, 5]),
    "grouped": (
        lambda: images(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 3, groups=3), nn.ReLU(), features=9), [3, 2, 3]),
    "depthwise": (
        lambda: images(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 4, 1), features=4), [6, 4]),
    "GroupNorm": (lambda: images(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), features=6), [2, 3]),
    "ResNet": (
        lambda: images(nn.Conv2d(3, 5, 3), nn.ReLU(), Residual(5, 5), Residual(5, 7), Residual(7, 7), features=7),
        [5, 5, 7, 7, 7]),
    "LSTM": (lambda: recurrent(nn.LSTM, num_layers=2), [5, 5]),
    "GRU": (lambda: recurrent(nn.GRU), [5]),
    "encoder": (encoder, [8, 2, 4, 12]),
    "GPT": (gpt, [8, *[2, 4, 4, 16] * 2]),
}  # fmt: skip


@pytest.fixture(params=slow_but(["MLP", "BatchNorm", "grouped", "GroupNorm", "ResNet", "LSTM", "GPT"], KINDS))
def kind(request: pytest.FixtureRequest) -> tuple[Problem, Symmetry]:
    torch.manual_seed(0)
    make, sizes = KINDS[request.param]
    problem = make()
    symmetry = Symmetry.of(problem)
    assert [group.size for group in symmetry.groups] == sizes
    assert not symmetry.fixed
    return problem, symmetry


def test_planted_permutations_leave_the_function_and_are_found_again(kind: tuple[Problem, Symmetry]) -> None:
    problem, symmetry = kind
    for seed in range(100):
        b = permuted(symmetry, problem.weights, seed)
        assert not torch.equal(b, problem.weights)
        assert torch.equal(matched(symmetry, problem.weights, b, seed), problem.weights)
        if seed < 5:
            assert change(problem, problem.weights, b) < 1e-12


def test_planted_permutations_are_found_again_by_activations(kind: tuple[Problem, Symmetry]) -> None:
    problem, symmetry = kind
    read = symmetry.of_activations()
    assert read.groups == symmetry.groups
    for seed in range(5):
        b = permuted(symmetry, problem.weights, seed)
        activations = _activations(problem, read, (problem.weights, b))
        assert torch.equal(matched(read, problem.weights, b, seed, activations), problem.weights)


def test_units_are_matched_by_the_correlations_of_activations() -> None:
    problem = problems.mlp(widths=(6, 5, 3))
    a, b = torch.randn(2, problem.layout.size, dtype=torch.float64)
    found, symmetry = aligned(problem, a, b, "activations")
    x = problem.data.resident[0]  # type: ignore[index]
    views = [problem.layout.views(w) for w in (a, b)]
    units = [torch.tanh(x @ v["1.weight"].T + v["1.bias"]) for v in views]
    table = np.corrcoef(*(each.T.numpy() for each in units))[:5, 5:]
    best = max(itertools.permutations(range(5)), key=lambda order: table[range(5), order].sum())
    index = torch.tensor(best)
    (group,) = symmetry.groups
    blocks = symmetry.blocks(b)
    assert torch.equal(found, symmetry.flat(blocks | group.permute(blocks, index)))


def test_units_without_activations_keep_their_places_and_are_named() -> None:
    """Of a matrix of two factors, whose product is taken before it meets the data."""
    problem = on(network(lambda m, x: x @ (m.a @ m.b).T, a=parameter(3, 4), b=parameter(4, 3)), 3)
    assert [group.size for group in Symmetry.of(problem).groups] == [4]
    b = permuted(Symmetry.of(problem), problem.weights, 0)
    found = landscape.connect(problem, problem.weights, b, align="activations", points=3, steps=0)
    assert found.fixed == ("a: no activation has them",)
    assert (found.weights[2] == b.numpy()).all()
    assert landscape.connect(problem, problem.weights, b, points=3, steps=0).aligned_distance == 0


def test_activations_of_other_operations_are_refused() -> None:
    """The network has one more where its weights are large."""
    forward = lambda m, x: m.g((m.f(x) * 1 if m.g.bias.norm() > 9 else m.f(x)).tanh())  # noqa: E731
    fickle = network(forward, f=nn.Linear(3, 4), g=nn.Linear(4, 3))
    problem = Problem(fickle, F.cross_entropy, (torch.randn(9, 3), torch.randint(3, (9,))))
    a, b = problem.weights, problem.weights + 9
    landscape.connect(problem, a, b, points=3, steps=0)
    with pytest.raises(InputError, match="align: 'activations' needs the same operations .* 'weights'"):
        landscape.connect(problem, a, b, align="activations", points=3, steps=0)


def pairs_of(x: Tensor) -> Tensor:
    """Every other number of blocks, as rotary positions take them, and a part of the rest."""
    x = torch.stack((x[:, 1::2], x[:, ::2]), 2).flatten(1)
    return x.unflatten(1, (3, 4)).transpose(1, 2).flatten(1)[:, :6]


@pytest.mark.parametrize("widths", [(3, 5, 4, 3), (3, 5, 3)])
def test_no_permutation_of_one_group_is_better(widths: tuple[int, ...]) -> None:
    problem = problems.mlp(widths=widths)
    symmetry = Symmetry.of(problem)
    torch.manual_seed(1)
    a, b = torch.randn(2, problem.layout.size, dtype=torch.float64)
    blocks = symmetry.blocks(matched(symmetry, a, b, 0))
    best = a @ symmetry.flat(blocks)
    for group in symmetry.groups:
        for order in itertools.permutations(range(group.size)):
            other = symmetry.flat(blocks | group.permute(blocks, torch.tensor(order)))
            assert a @ other <= best + 1e-12


def unseen(x: Tensor) -> Tensor:
    """``x`` reversed, where no operation of PyTorch is seen."""
    return torch.from_numpy(x.detach().numpy()[:, ::-1].copy())


@pytest.mark.parametrize(("layer", "inputs", "sizes", "fixed"), [
    (Part(nn.Identity(), unseen), 5, [4], {"0.weight": "its permutation changes the outputs", "4.weight": "a constant"}),
    (Part(nn.Linear(5, 12), pairs_of), 6, [5, 5, 3, 4], {}),
    (Part(nn.Identity(), lambda h: h.unfold(1, 3, 1).flatten(1)), 9, [5, 4], {"2.weight": "operation unfold"}),
    (Part(nn.Identity(), lambda h: h[:, 1:4]), 3, [5, 4], {"2.weight": "taken apart"}),
    (Part(nn.Identity(), lambda h: h.sort(1)[0]), 5, [5, 4], {"2.weight": "operation sort"}),
    (Part(nn.Identity(), lambda h: torch.cat((h, h), 1)), 10, [5, 4], {"2.weight": "joined with others"}),
])  # fmt: skip
def test_units_that_are_not_understood_keep_their_places_and_are_named(
    layer: nn.Module, inputs: int, sizes: list[int], fixed: dict[str, str]
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), layer, nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, 3)
    )
    problem = Problem(net, F.cross_entropy, (torch.randn(40, 3), torch.randint(3, (40,))), check="off")
    symmetry = Symmetry.of(problem)
    b = permuted(symmetry, problem.weights, 0)
    assert [group.size for group in symmetry.groups] == sizes
    assert fixed.items() <= symmetry.fixed.items()
    assert change(problem, problem.weights, b) < 1e-12


def test_weights_that_become_another_function_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.mlp()
    monkeypatch.setattr("landscape.problem.alignment._tested", lambda problem, symmetry: symmetry)
    monkeypatch.setattr(
        "landscape.problem.symmetry.Axes.fix", lambda *_: None
    )  # outputs may be permuted, too
    with pytest.raises(InputError, match=r"b: .*5.weight.* changes the outputs by"):
        landscape.connect(problem, problem.weights, permuted(Symmetry.of(problem), problem.weights, 0))


class Root(nn.Linear):
    """Outputs that are NaN where the bias is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bias.sum().sqrt()


def test_an_end_without_finite_outputs_is_refused() -> None:
    ends = Root(3, 2), Root(3, 2)
    with torch.no_grad():
        ends[0].bias.fill_(1.0)
        ends[1].bias.fill_(-1.0)
    problem = Problem(ends[0], nn.MSELoss(), (torch.randn(8, 3), torch.randn(8, 2)))
    with pytest.raises(InputError, match="^b: its outputs are NaN or infinite, they must be finite"):
        landscape.connect(problem, *ends, points=3, steps=0)


def test_a_model_of_one_precision_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 4), Part(nn.Identity(), lambda x: x.float()), nn.Linear(4, 3))
    problem = Problem(net, F.cross_entropy, (torch.randn(9, 3), torch.randint(3, (9,))))
    with pytest.raises(InputError, match="model: it does not run in torch.float64"):
        landscape.connect(problem, problem.weights, problem.weights)


def test_a_plane_goes_through_the_aligned_weights() -> None:
    problem = problems.mlp()
    a = problem.weights
    b = permuted(Symmetry.of(problem), a, 0) + 0.001 * torch.sin(torch.arange(len(a)).to(a))
    plane = landscape.between(problem, [a, b], align="weights")
    near = torch.from_numpy(landscape.connect(problem, a, b, steps=0, points=3).weights[2])
    ends = plane.center + torch.from_numpy(plane.markers).to(a) @ plane.directions
    torch.testing.assert_close(ends, torch.stack((a, near)), rtol=0, atol=1e-12)
    assert (near - a).norm() < 0.1 < (b - a).norm()


@pytest.mark.parametrize("curve", ["bezier", "chain"])
def test_curves_are_those_of_the_paper(curve: str) -> None:
    t, (a, b, bend) = np.linspace(0, 1, 9), np.random.default_rng(0).normal(size=(3, 1, 4))
    of_b, of_bend = (np.array(share)[:, None] for share in end_and_bend(curve, t))
    found, t = (1 - of_b - of_bend) * a + of_b * b + of_bend * bend, t[:, None]
    quadratic = (1 - t) ** 2 * a + 2 * t * (1 - t) * bend + t**2 * b
    polygon = np.where(t <= 0.5, 2 * (t * bend + (0.5 - t) * a), 2 * ((t - 0.5) * b + (1 - t) * bend))
    np.testing.assert_allclose(found, quadratic if curve == "bezier" else polygon, atol=1e-12)


@pytest.mark.parametrize("curve", ["bezier", "chain"])
def test_a_step_of_the_bend_is_that_of_autograd(curve: str) -> None:
    problem = problems.mlp()
    a, b = torch.randn(2, problem.layout.size, dtype=torch.float64)
    found = landscape.connect(problem, a, b, curve, steps=1, lr=0.01, batch=8, points=5, seed=3)
    a, _, b, bend = torch.from_numpy(found.weights)
    middle = ((a + b) / 2).requires_grad_()
    t = float(torch.rand((), generator=stream(3, 1)))
    of_b, of_bend = end_and_bend(curve, t)
    ((few,),) = itertools.islice(Minibatches(problem, 8, stream(3, 0)), 1)
    theta = (1 - of_b - of_bend) * a + of_b * b + of_bend * middle
    x, y = few.resident
    F.cross_entropy(few.outputs(theta, x), y).backward()
    optimizer = torch.optim.Adam([middle], 0.01)
    optimizer.step()
    torch.testing.assert_close(bend, middle.detach(), rtol=1e-10, atol=1e-12)
    for path, end in ((0, found.weights[1]), (1, found.weights[2]), (2, found.weights[2])):
        assert found.loss[path, 0] == pytest.approx(problem.loss(a), rel=1e-9)
        assert found.loss[path, -1] == pytest.approx(problem.loss(torch.from_numpy(end)), rel=1e-9)


def test_a_curve_is_lower_than_the_line_and_batchnorm_is_estimated_at_each_point() -> None:
    torch.manual_seed(0)
    problem, _ = KINDS["BatchNorm"][0](), None
    a, b = torch.randn(2, problem.layout.size, dtype=torch.float64)
    found = landscape.connect(problem, a, b, points=5, steps=100, lr=0.02, batch=40)
    assert found.bn == "recalibrate"
    assert found.largest_change < 1e-12
    assert found.loss[2, 1:-1].max() < found.loss[1, 1:-1].max()
    middle = torch.from_numpy(found.weights[0] + found.weights[2]) / 2
    assert found.loss[1, 2] == pytest.approx(problem.with_batchnorm("recalibrate").loss(middle), rel=1e-9)


def test_a_network_and_itself_have_no_barrier_to_remove() -> None:
    problem = problems.mlp()
    found = landscape.connect(problem, problem.weights, problem.weights, points=3, steps=2)
    assert found.barrier.tolist() == [0, 0, 0]
    assert "a and b are equal" in found.summary()
    assert "none to remove" in found.summary()
    assert "nan" not in found.summary()
    assert "both ends are equal" in landscape.line(problem, problem, problem, points=3).summary()

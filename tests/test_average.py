"""The predicted loss of averages of weights: where it is exact, its interval, and the choice of members."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import landscape
from benchmarks import averages
from landscape import InputError, OperationError, Problem
from landscape.analysis import hull
from tests import problems


def every_subset(n: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([row for row in itertools.product([0.0, 1.0], repeat=n) if any(row)])


def test_of_a_quadratic_every_average_is_exact() -> None:
    problem = problems.quadratic([4.0, 1.0, 0.5, -0.2, 2.0])
    weights = problems.around(problem, 5, 0.7)
    result = landscape.average(problem, weights, every_subset(5))
    np.testing.assert_allclose(result.loss, result.exact, atol=1e-8)
    assert result.inside.all()
    assert (result.high - result.low).max() < 1e-6
    mean = weights.mean(0)
    h = problems.textbook_hessian(problem)
    half_trace = 0.5 * torch.einsum("ni,ij,nj->", weights - mean, h, weights - mean) / 5
    np.testing.assert_allclose(result.change[-2], -float(half_trace), rtol=1e-7)  # −½ tr(HC)


def test_the_choice_is_that_of_the_greedy_soup_with_exact_losses() -> None:
    problem = problems.quadratic([4.0, 1.0, 0.5, 0.3, 2.0], start=1.0)
    weights = problems.around(problem, 6, 1.5, seed=3)
    result = landscape.average(problem, weights)
    chosen: list[int] = []
    lowest = np.inf
    for j in np.argsort(result.members_loss):
        if (loss := problem.loss(weights[[*chosen, j]].mean(0))) < lowest:
            chosen, lowest = [*chosen, int(j)], loss
    assert np.flatnonzero(result.chosen).tolist() == sorted(chosen)
    assert 1 < len(chosen) < 6
    assert result.exact[-1] == pytest.approx(lowest)


def derivative(x: Tensor, first: list[Tensor], y: Tensor, second: list[Tensor], length: float) -> float:
    """That of the kernel along directions in x and in y, by automatic differentiation."""
    steps = torch.zeros(len(first) + len(second), dtype=torch.float64, requires_grad=True).unbind()
    x = x + sum(step * u for step, u in zip(steps, first, strict=False))
    y = y + sum(step * v for step, v in zip(steps[len(first) :], second, strict=True))
    value = torch.exp(-(x - y).square().sum() / (2 * length**2))
    for step in steps:
        (value,) = torch.autograd.grad(value, step, create_graph=True)
    return value.item()


ORDERS = [*itertools.product(range(3), repeat=2)]


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_covariances_of_derivatives_are_those_of_the_kernel(first: int, second: int) -> None:
    draw = np.random.default_rng(first + 3 * second)
    a, b = (draw.normal(size=(1 + order, m, 3)) for m, order in ((2, first), (4, second)))
    blocks = [hull._Block(rows[0], tuple(rows[1:])) for rows in (a, b)]
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    wanted = [
        [derivative(x[0, i], [*x[1:, i]], y[0, j], [*y[1:, j]], 1.3) for j in range(4)] for i in range(2)
    ]
    np.testing.assert_allclose(hull._covariance(*blocks, 1.3), wanted, atol=1e-12)


def test_the_interval_is_that_of_the_mixture() -> None:
    means, scales, draw = np.array([[0.0], [1.0]]), np.array([[1.0], [0.2]]), np.random.default_rng(0)
    ends = hull._quantiles(means, scales, 5)
    drawn = (means + scales * draw.standard_t(5, size=(2, 200_000))).ravel()
    np.testing.assert_allclose(np.ravel(ends), np.quantile(drawn, [0.05, 0.95]), atol=0.02)


def test_networks_far_apart_get_no_prediction_and_are_not_chosen() -> None:
    x, y = averages.images("digits", 500)
    found = []
    for seed, counts in ((3, (300, 20)), (4, (300,))):  # two of one run, and an independent one
        net = averages.network("mlp", seed, x, widths=[64, 20, 10])
        for count in counts:
            found += averages.steps(net, x, y, count, 0.3, seed=seed)
    problem = averages.problem_of(net, x, y)
    result = landscape.average(problem, found, [[1, 1, 0], [1, 0, 1]])
    assert result.inside.all()
    assert (result.high - result.low)[0] < 0.03 < np.inf == result.high[1]
    assert not (result.chosen[2] and result.chosen[:2].any())
    assert "the members are too far apart" in result.summary()


def test_batchnorm_statistics_are_estimated_at_the_average() -> None:
    members = next(averages.with_batchnorm())
    result = landscape.average(members.problem, members.weights, bn_samples=500)
    again = members.problem.with_batchnorm("recalibrate", 500)
    assert result.exact[0] == pytest.approx(again.loss(members.weights.mean(0)), abs=1e-6)
    np.testing.assert_allclose(result.members_loss, [again.loss(w) for w in members.weights], rtol=1e-5)
    assert abs(members.problem.loss(members.weights.mean(0)) - result.exact[0]) > 10 * abs(
        result.loss[0] - result.exact[0]
    )
    assert (result.bn, result.bn_samples) == ("recalibrate", 500)
    assert "estimated again" in result.summary()


def test_equal_members_weigh_and_what_is_not_exact_is_nan() -> None:
    problem = problems.mlp()
    weights = problems.around(problem, 3, 0.1)
    doubled = landscape.average(problem, weights[[0, 1, 1]])  # equal ones among others are only weights
    assert doubled.loss[0] == pytest.approx(landscape.average(problem, weights[:2], [1, 2]).loss[0], rel=1e-4)
    relu = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 3))
    other = Problem(relu, nn.functional.cross_entropy, (torch.randn(9, 6), torch.zeros(9).long()))
    assert np.isnan(landscape.average(other, problems.around(other, 2, 0.1), exact=False).exact).all()


def test_task_arithmetic_of_a_quadratic_is_exact() -> None:
    problem = problems.quadratic([4.0, 1.0, 0.5, -0.2, 2.0])
    base, *members = weights = problems.around(problem, 4, 0.7)
    scales = [[0.5, 0.5, -0.5], [1.0, 1.0, 1.0], [-1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    result = landscape.average(problem, members, scales, base=base)
    for row, loss, exact in zip(scales, result.loss, result.exact, strict=False):
        moved = base + sum(scale * (w - base) for scale, w in zip(row, members, strict=True))
        assert exact == pytest.approx(problem.loss(moved))
        assert loss == pytest.approx(exact, abs=1e-8)
    assert result.labels == ("base", "0", "1", "2")
    negative = landscape.average(problem, weights, [1, 1, 1, -1])
    np.testing.assert_allclose(negative.coefficients[0], [0.5, 0.5, 0.5, -0.5])
    assert negative.loss[0] == pytest.approx(problem.loss((weights[:3].sum(0) - weights[3]) / 2))
    grid = landscape.average(problem, members, plan="grid", base=base, exact=False)
    np.testing.assert_allclose(grid.coefficients[:-1, 1], np.arange(1, 21) / 20)
    assert grid.names[0] == "average at λ = 0.05"


def test_windows_are_ranked_by_prediction_and_the_best_evaluated() -> None:
    problem = problems.quadratic([4.0, 1.0, 0.5, 0.3, 2.0], start=1.0)
    weights = problems.around(problem, 6, 1.5, seed=3)
    result = landscape.average(problem, weights, plan="windows", last=4, exact=3, labels=[*"abcdef"])
    assert result.labels == tuple("cdef")
    assert result.names[:-1] == tuple(f"last {k}{kind}" for k in (2, 3, 4) for kind in ("", ", growing"))
    wanted = [
        problem.loss((torch.tensor(own, dtype=weights.dtype) @ weights[-k:]) / sum(own))
        for k in (2, 3, 4)
        for own in ([1.0] * k, [*map(float, range(1, k + 1))])
    ]
    np.testing.assert_allclose(result.loss[:-1], wanted, atol=1e-8)
    assert result.ranking.tolist() == np.argsort(wanted).tolist()
    assert np.flatnonzero(np.isfinite(result.exact)).tolist() == sorted(result.ranking[:3])
    (best,) = (row.value for row in result.describe() if row.name == "best by prediction")
    assert best == result.names[result.ranking[0]]
    all_of_them = landscape.average(problem, weights, plan="windows", last=4, exact=7).exact
    mean = torch.from_numpy(result.coefficients[-1]).to(weights) @ weights[2:]
    assert all_of_them[-1] == pytest.approx(problem.loss(mean))


class Adapter(nn.Module):
    """A frozen layer W with the factors of an adapter, under the names of peft: W + 2BA."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = nn.Linear(6, 5).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 5, bias=False)})
        self.scaling = {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling["default"] * low  # type: ignore[no-any-return]


def adapted() -> Problem:
    torch.manual_seed(0)
    net = nn.Sequential(Adapter(), nn.Tanh(), nn.Linear(5, 3)).double()
    data = torch.randn(40, 6).double(), torch.randint(3, (40,))
    return Problem(net, nn.functional.cross_entropy, data)


def test_adapters_are_averaged_as_products() -> None:
    problem = adapted()
    views = problem.layout.views(theta := problem.weights.clone())
    flipped = {name: -t if "lora" in name else t for name, t in views.items()}
    pair = [theta, problem.layout.flatten(flipped)]
    with pytest.raises(OperationError, match="all 2 members are equal"):
        landscape.average(problem, pair)  # one function
    factors = landscape.average(problem, pair, factors=())
    zero = {name: 0 * t if "lora" in name else t for name, t in views.items()}
    assert factors.exact[0] == pytest.approx(problem.loss(problem.layout.flatten(zero)))
    assert "the factors of adapters" in factors.summary()

    members = problems.around(problem, 3, 0.3)
    result = landscape.average(problem, members, [[1, 2, 1], [1, 0, 0]], rank=3)
    dense = copy.deepcopy(problem.model)
    parts = [problem.layout.views(w) for w in members]
    products = [v["0.lora_B.default.weight"] @ v["0.lora_A.default.weight"] for v in parts]
    mean = (products[0] + 2 * products[1] + products[2]) / 4
    u, sizes, v = torch.linalg.svd(mean, full_matrices=False)
    losses = []
    for delta in (mean, u[:, :3] * sizes[:3] @ v[:3]):
        with torch.no_grad():
            for name, p in dense.named_parameters():
                if p.requires_grad and "lora" not in name:
                    p.copy_((parts[0][name] + 2 * parts[1][name] + parts[2][name]) / 4)
            dense[0].base_layer.weight.copy_(problem.model[0].base_layer.weight + 2 * delta)
            dense[0].lora_B["default"].weight.zero_()
        losses.append(Problem(dense, problem.criterion, problem.data.resident).loss())
    np.testing.assert_allclose([result.exact[0], result.stored[0]], losses, rtol=1e-9)
    assert result.inside[0]
    assert result.ranks.tolist()[:2] == [5, 2]
    error = float(sizes[3:].square().sum().sqrt() / sizes.norm())
    np.testing.assert_allclose(result.truncation[:2], [error, 0], atol=1e-9)
    assert result.exact[1] == pytest.approx(problem.loss(members[0]))
    for words in ("the products of adapters", "in rank 3", "rank of the average 0", "products BA is cut"):
        assert words in result.summary()


def test_files_of_adapters_fit_a_model_of_the_same_scale(tmp_path: Path) -> None:
    problem = adapted()
    members = problems.around(problem, 2, 0.3)
    for k, row in enumerate(members):  # as peft writes them: without the adapter's name and the frozen part
        (tmp_path / str(k)).mkdir()
        views = problem.layout.views(row).items()
        state = {name.replace(".default", ""): t.contiguous() for name, t in views}
        safetensors.torch.save_file(state, tmp_path / str(k) / "adapter_model.safetensors")
        (tmp_path / str(k) / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    result = landscape.average(problem, [tmp_path / "0", tmp_path / "1" / "adapter_model.safetensors"])
    assert result.exact.tolist() == landscape.average(problem, members).exact.tolist()
    model = landscape.load_weights(tmp_path / "0", into=copy.deepcopy(problem.model))
    assert torch.equal(problem.layout.flatten(dict(model.named_parameters())), members[0])
    (tmp_path / "0" / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 8}')
    for call in (landscape.load_weights, landscape.import_state):
        with pytest.raises(OperationError, match="lora_alpha/r is 4, the model's is 2; make the model with"):
            call(tmp_path / "0", model)


def test_own_names_of_factors_and_what_has_no_products() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(averages.Adapted(nn.Linear(6, 4), rank=2), nn.Tanh(), nn.Linear(4, 3)).double()
    data = torch.randn(30, 6).double(), torch.randint(3, (30,))
    problem = Problem(net, nn.functional.cross_entropy, data)
    members = problems.around(problem, 2, 0.3)
    result = landscape.average(problem, members, factors=[("a", "b")])
    assert (result.space, result.ranks[0]) == ("products", 4)
    assert landscape.average(problem, members, exact=False).space == "weights"
    decayed = Problem(net, nn.functional.cross_entropy, data, weight_decay=1e-6)
    for of, options, words in (
        (
            problem,
            {"factors": [("a", "c")]},
            "no names of trainable parameters differ only by 'a' and 'c'; give",
        ),
        (problem, {"factors": [("b", "a")]}, "have no product"),
        (problem, {"rank": 2}, "rank: not allowed, only averages of products"),
        (decayed, {"factors": [("a", "b")]}, "the loss is no function of their products"),
    ):
        with pytest.raises(InputError, match=words):
            landscape.average(of, members, **options)


class Bent(Adapter):
    """An adapter that is no function of its product, unless one factor is zero."""

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B["default"](self.lora_A["default"](x).tanh())
        return self.base_layer(x) + low  # type: ignore[no-any-return]


def test_each_member_must_be_a_function_of_its_own_products() -> None:
    torch.manual_seed(0)
    data = torch.randn(40, 6).double(), torch.randint(5, (40,))
    problem = Problem(Bent().double(), nn.functional.cross_entropy, data)
    members = problems.around(problem, 3, 0.3)
    problem.layout.views(members[-1])["lora_B.default.weight"].zero_()
    with pytest.raises(InputError, match="the loss is no function of their products"):
        landscape.average(problem, members)
    twice = nn.Sequential(Adapter(), nn.Linear(5, 6), Adapter()).double()
    twice[2].lora_A["default"].weight = twice[0].lora_A["default"].weight
    shared = Problem(twice, nn.functional.cross_entropy, data)
    with pytest.raises(
        InputError, match="'0.lora_A.default.weight' is shared by several layers; give factors"
    ):
        landscape.average(shared, problems.around(shared, 2, 0.3))


def test_files_in_bfloat16_are_averaged_in_float32(tmp_path: Path) -> None:
    problem = problems.mlp()
    low = problems.around(problem, 3, 0.3).bfloat16()
    for k, row in enumerate(low):
        torch.save(problem.layout.views(row), tmp_path / f"{k}.pt")
    result = landscape.average(problem, [tmp_path / f"{k}.pt" for k in range(3)])
    mean = low.to(problem.dtype).mean(0)
    assert result.exact[0] == pytest.approx(problem.loss(mean))
    assert result.stored[0] == pytest.approx(problem.loss(mean.bfloat16().to(problem.dtype)))
    assert result.stored[0] != result.exact[0]
    assert "average in bfloat16" in result.summary()
    assert landscape.average(problem, [*low]).stored[0] == result.stored[0]
    half = landscape.average(problem.to(torch.bfloat16), low)
    assert half.exact[0] == pytest.approx(result.exact[0], rel=1e-3)
    assert half.dtype == "float32"


def test_far_outside_of_the_members_there_is_no_prediction() -> None:
    problem = Problem(nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.randn(20, 3), torch.arange(20) % 2))
    members = [problem.weights + 0.1 * torch.randn(8) for _ in range(4)]
    result = landscape.average(problem, members, base=problem.weights, plan="grid")
    outside = 4 * np.arange(1, 21) / 20 - 1 > 1  # the base's coefficient is 1 − 4λ
    np.testing.assert_array_equal(np.isinf(result.ratio[:-1]), outside)
    np.testing.assert_array_equal(np.isinf(result.high[:-1]), outside)
    assert not np.isin(result.ranking, np.flatnonzero(outside)).any()
    far = landscape.average(problem, members, base=problem.weights, coefficients=[1.0, 1.0, 1.0, 1.0])
    assert "too far outside of the members" in far.summary()

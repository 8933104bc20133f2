"""Models, losses and data of strangers: each number is the user's own function's, or is refused with a cause."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import InputError, Problem

torch.manual_seed(0)
X, Y = torch.randn(64, 8, dtype=torch.float64), torch.randint(3, (64,))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Net(nn.Module):
    """Convolution, BatchNorm, linear head; ``kind`` says what a stranger's forward does besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(24, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x[:, None]))
        if self.kind == "weight used twice":
            h = h + F.conv1d(x[:, None], self.conv.weight)
        if self.kind == "convolution used twice":
            h = h + self.conv(x[:, None])
        if self.kind == "isinstance" and isinstance(x, Tensor):
            h = 2 * h
        out: Tensor = self.head(h.relu().flatten(1))
        if self.kind == "parameters":
            out = out * sum(p.square().sum() for p in self.parameters())
        return out


def strange(kind: str) -> nn.Module:
    model = Net(kind).double()
    model(X)  # statistics that are not the initial ones
    if kind == "hook":
        model.register_forward_hook(lambda module, args, out: 10 * out)
    return model.eval()


def textbook(model: nn.Module, loss: Callable[[Any, Any], Tensor], theta: Tensor, x: Any, y: Any) -> float:
    """The loss of a deep copy of the module itself with ``theta`` loaded."""
    own = copy.deepcopy(model).eval()
    nn.utils.vector_to_parameters(theta, own.parameters())
    with torch.no_grad():
        return float(loss(own(x.clone()), y.clone()))


STRANGE = ["hook", "parameters", "weight used twice", "convolution used twice", "isinstance"]


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("path", ["auto", "folded"])
def test_a_fast_path_is_the_user_s_function_or_is_not_used(kind: str, path: str) -> None:
    model = strange(kind)
    problem = Problem(model, F.cross_entropy, (X, Y))
    plane = landscape.random_plane(problem, norm="filter")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if path == "folded" and kind in ("hook", "parameters", "isinstance"):
            with pytest.raises(InputError, match="use 'pointwise'"):
                landscape.contour(problem, plane, grid=(2, 3), span=1.0, path=path)
            return
        surface = landscape.contour(problem, plane, grid=(2, 3), span=1.0, path=path)
    assert surface.path == "folded" or any(issubclass(w.category, landscape.PathWarning) for w in told)
    for i, b in enumerate(surface.y):
        for j, a in enumerate(surface.x):
            theta = plane.center + a * plane.directions[0] + b * plane.directions[1]
            assert surface.loss[i, j] == pytest.approx(
                textbook(model, F.cross_entropy, theta, X, Y), rel=1e-9
            )


def test_the_same_call_takes_the_same_path() -> None:
    problem = Problem(strange("plain"), F.cross_entropy, (X, Y))
    plane = landscape.random_plane(problem)
    runs = [landscape.contour(problem, plane, grid=(2, 2)) for _ in range(10)]
    assert {run.path for run in runs} == {"folded"}
    assert all(np.array_equal(run.loss, runs[0].loss) for run in runs)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        out: Tensor = self.body(x)
        return out


@pytest.mark.parametrize("model", [Writes(), nn.Sequential(nn.LeakyReLU(inplace=True), *mlp())])
def test_a_model_that_writes_to_its_input_leaves_the_data_as_it_is(model: nn.Module) -> None:
    x = X.clone()
    expected = textbook(model, F.cross_entropy, nn.utils.parameters_to_vector(model.parameters()), X, Y)
    problem = Problem(model, F.cross_entropy, (x, Y))
    assert [problem.loss() for _ in range(3)] == pytest.approx([expected] * 3, rel=1e-12)
    assert landscape.contour(problem, landscape.random_plane(problem), (1, 1)).loss == pytest.approx(expected)
    assert torch.equal(x, X)


class Listed(nn.Module):
    """Its forward pass goes past the module's attributes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3, dtype=torch.float64))
        w = self.w
        self.held: Any = {"list": [w], "dict": {"w": w}, "function": lambda x: x @ w}[how]
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "function":
            return self.held(x)
        return x @ (self.held[0] if self.how == "list" else self.held["w"])


@pytest.mark.parametrize("how", ["list", "dict", "function"])
def test_parameters_reached_past_attributes_are_refused(how: str) -> None:
    with pytest.raises(InputError, match=r"parameter 'w'.*nn\.ParameterList"):
        Problem(Listed(how), F.cross_entropy, (X, Y))


def test_a_loss_that_holds_the_model_s_parameters_is_refused_and_penalty_is_the_remedy() -> None:
    model = mlp()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())

    with pytest.raises(InputError, match=r"loss:.*parameter '.*penalty=lambda parameters.*weight_decay="):
        Problem(model, loss, (X, Y))
    plain = Problem(model, F.cross_entropy, (X, Y))
    with_penalty = Problem(
        model, F.cross_entropy, (X, Y), penalty=lambda p: 1e-2 * sum(t.pow(2).sum() for t in p.values())
    )
    with_decay = Problem(model, F.cross_entropy, (X, Y), weight_decay=2e-2)
    ends = landscape.extreme_eigenvalues(plain, tol=1e-9)
    plane = landscape.random_plane(plain)
    for problem in (with_penalty, with_decay):
        assert problem.loss() == pytest.approx(float(loss(model(X), Y).detach()), rel=1e-12)
        shifted = landscape.extreme_eigenvalues(problem, tol=1e-9)
        assert (shifted.min, shifted.max) == pytest.approx((ends.min + 2e-2, ends.max + 2e-2), rel=1e-6)
        for path in ("batched", "pointwise"):
            s = landscape.contour(problem, plane, grid=(2, 2), path=path)
            theta = plane.center + s.x[1] * plane.directions[0] + s.y[0] * plane.directions[1]
            moved = plain.loss(theta) + 1e-2 * float(theta.square().sum())
            assert s.loss[0, 1] == pytest.approx(moved, rel=1e-9)


def test_results_of_another_loss_or_data_are_not_gone_on_with() -> None:
    problem = Problem(mlp(), F.cross_entropy, (X, Y))
    plane = landscape.random_plane(problem)
    before = landscape.hessian_grid(problem, plane, grid=(2, 2))
    assert landscape.hessian_grid(problem, plane, grid=(2, 2), previous=before) is before
    other = X.clone()
    other[17, 3] += 1e-3
    for changed in (
        Problem(mlp(), functools.partial(F.cross_entropy, label_smoothing=0.1), (X, Y)),
        Problem(mlp(), lambda o, y: F.cross_entropy(o, y), (X, Y)),
        Problem(mlp(), F.cross_entropy, (other, Y)),
        Problem(mlp(), F.cross_entropy, (X, Y.flip(0))),
        Problem(mlp(), F.cross_entropy, (X, Y), weight_decay=1e-3),
    ):
        with pytest.raises(InputError, match="its loss is|other data|penalty"):
            landscape.hessian_grid(changed, plane, grid=(2, 2), previous=before)
    few = landscape.hessian_grid(problem, plane, grid=(2, 2), max_products=4)
    assert not few.converged.any()
    again = landscape.hessian_grid(problem, plane, grid=(2, 2), previous=few)
    np.testing.assert_array_equal(again.lambda_max, before.lambda_max)


def test_recalibrated_products_are_of_the_point_s_own_statistics() -> None:
    problem = Problem(strange("plain"), F.cross_entropy, (X, Y)).with_batchnorm("recalibrate", 64)
    first = landscape.extreme_eigenvalues(problem, tol=1e-9)
    problem.loss(problem.theta + 0.3 * torch.randn_like(problem.theta))  # leaves other statistics behind
    assert landscape.extreme_eigenvalues(problem, tol=1e-9).max == pytest.approx(first.max, rel=1e-7)
    loss, gradient = problem.loss_and_gradient()
    assert loss == pytest.approx(problem.loss(), rel=1e-12)
    assert torch.equal(gradient, problem.gradient())


def test_accuracy_has_a_meaning_or_is_nan() -> None:
    def binary(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.double())

    one = nn.Sequential(nn.Linear(8, 1)).double()
    assert np.isnan(Problem(one, binary, (X, (Y > 0).long())).accuracy())
    rows = nn.Sequential(nn.Linear(8, 3)).double()  # (N, T, C) with T = C, classes last
    x, y = torch.randn(20, 3, 8, dtype=torch.float64), torch.randint(3, (20, 3))
    last = Problem(rows, lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), (x, y))
    assert np.isnan(last.accuracy())
    assert not np.isnan(Problem(rows, F.cross_entropy, (x, y)).accuracy())  # classes second


def test_the_error_of_a_lower_precision_is_measured_at_more_than_two_points() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    problem = Problem(model, F.cross_entropy, (X.float(), Y))
    plane = landscape.random_plane(problem)
    low, own = (
        landscape.contour(problem, plane, grid=(4, 4), span=2.0, precision=p) for p in ("bfloat16", "model")
    )
    assert low.precision_error == pytest.approx(float(np.abs(low.loss - own.loss).max()), rel=1e-4)


class Tutorial(nn.Module):
    """As in PyTorch's tutorial: a view of what the convolutions give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).relu().view(-1, 4 * 36)) * self.scale.exp() + x.size(2) * 0
        return out


def test_views_unused_layers_and_odd_parameters_are_legitimate() -> None:
    model, x, y = Tutorial().double(), torch.randn(20, 1, 8, 8, dtype=torch.float64), torch.randint(3, (20,))
    problem = Problem(model, F.cross_entropy, (x, y))
    plane = landscape.random_plane(problem, norm="filter")
    s = landscape.contour(problem, plane, grid=(2, 2))
    theta = plane.center + s.x[1] * plane.directions[0] + s.y[1] * plane.directions[1]
    assert s.loss[1, 1] == pytest.approx(textbook(model, F.cross_entropy, theta, x, y), rel=1e-9)
    assert landscape.extreme_eigenvalues(problem).converged


@pytest.mark.parametrize("targets", [Y - 1, 10 * Y, Y > 0, Y.to(torch.uint8)])
def test_integer_targets_need_not_be_classes(targets: Tensor) -> None:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs.sum(1), y.double())

    problem = Problem(mlp(), loss, (X, targets))
    s = landscape.contour(problem, landscape.random_plane(problem), grid=(1, 1))
    assert s.loss[0, 0] == pytest.approx(float(loss(mlp()(X), targets).detach()), rel=1e-9)


def test_class_weights_follow_the_precision_and_a_loss_may_view_its_outputs() -> None:
    weight = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    assert Problem(mlp().float(), weight, (X, Y), dtype=torch.float64).dtype == torch.float64
    one = nn.Sequential(nn.Linear(8, 1)).double()
    problem = Problem(one, lambda o, y: F.mse_loss(o.view(-1), y.double()), (X, Y))
    assert landscape.contour(problem, landscape.random_plane(problem), (1, 1)).path == "batched"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # within torch.compile
@pytest.mark.parametrize("wrap", [nn.DataParallel, pytest.param(torch.compile, marks=pytest.mark.slow)])
def test_wrapped_models_are_what_is_inside(wrap: Callable[[nn.Module], Any]) -> None:
    problem = Problem(wrap(mlp()), F.cross_entropy, (X, Y))
    assert problem.layout.slots[0].name == "0.weight"
    assert landscape.extreme_eigenvalues(problem).converged


def test_data_that_could_be_batches_or_single_samples_are_refused() -> None:
    with pytest.raises(InputError, match="two batches"):
        Problem(mlp(), F.cross_entropy, ((X[:32], Y[:32]), (X[32:], Y[32:])))
    for samples in ([{"x": [1.0, 2.0], "y": 1}], [(X[0], 1), (X[1], 2)]):
        with pytest.raises(InputError, match="DataLoader"):
            Problem(mlp(), F.cross_entropy, samples)


def test_how_much_is_checked_can_be_chosen() -> None:
    assert Problem(mlp(), F.cross_entropy, (X, Y), check="full").check == "full"
    Problem(Listed("list"), F.cross_entropy, (X, Y), check="off")
    with pytest.raises(InputError, match="check: 'some'"):
        Problem(mlp(), F.cross_entropy, (X, Y), check="some")

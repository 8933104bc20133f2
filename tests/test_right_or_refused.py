"""Models, losses and data of strangers: each number is the user's own function's, or is refused with a cause."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import InputError, Problem
from tests import problems

torch.manual_seed(0)
X, Y = torch.randn(64, 8, dtype=torch.float64), torch.randint(3, (64,))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Net(nn.Module):
    """Convolution, BatchNorm, linear head; perhaps the convolution's weight a second time."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Linear(24, 3)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x[:, None]))
        if self.twice:
            h = h + F.conv1d(x[:, None], self.conv.weight)
        out: Tensor = self.head(h.relu().flatten(1))
        return out


def seen(model: nn.Module) -> nn.Module:
    """With statistics that are not the initial ones."""
    model.double()(X)
    return model.eval()


def test_the_folded_path_is_the_user_s_function_or_is_refused() -> None:
    problem = Problem(seen(Net(twice=True)), F.cross_entropy, (X, Y))
    plane = landscape.random_plane(problem, norm="filter")
    expected = problems.textbook_surface(problem, plane.directions, [-1.0, 0.0, 1.0], [-1.0, 1.0])
    found = landscape.contour(problem, plane, grid=(3, 2), span=1.0, method="folded")
    np.testing.assert_allclose(found.loss, np.array(expected), rtol=1e-9)
    runs = [landscape.contour(problem, plane, grid=(2, 2)) for _ in range(3)]
    assert {run.method for run in runs} == {"folded"}
    assert all(np.array_equal(run.loss, runs[0].loss) for run in runs)
    hooked = seen(Net())
    hooked.register_forward_hook(lambda module, args, out: 10 * out)
    with pytest.raises(InputError, match="use 'pointwise'"):
        landscape.contour(Problem(hooked, F.cross_entropy, (X, Y)), plane, grid=(2, 2), method="folded")


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
    ends = landscape.extreme_eigenvalues(plain, residual_tol=1e-9)
    plane = landscape.random_plane(plain)
    for problem in (with_penalty, with_decay):
        assert problem.loss() == pytest.approx(float(loss(model(X), Y).detach()), rel=1e-12)
        shifted = landscape.extreme_eigenvalues(problem, residual_tol=1e-9)
        assert (shifted.min, shifted.max) == pytest.approx((ends.min + 2e-2, ends.max + 2e-2), rel=1e-6)
        for path in ("batched", "pointwise"):
            s = landscape.contour(problem, plane, grid=(2, 2), method=path)
            theta = plane.center + s.x[1] * plane.directions[0] + s.y[0] * plane.directions[1]
            moved = plain.loss(theta) + 1e-2 * float(theta.square().sum())
            assert s.loss[0, 1] == pytest.approx(moved, rel=1e-9)


def test_recalibrated_products_are_of_the_point_s_own_statistics() -> None:
    problem = Problem(seen(Net()), F.cross_entropy, (X, Y)).with_batchnorm("recalibrate", 64)
    first = landscape.extreme_eigenvalues(problem, residual_tol=1e-9)
    problem.loss(problem.weights + 0.3 * torch.randn_like(problem.weights))  # leaves other statistics behind
    assert landscape.extreme_eigenvalues(problem, residual_tol=1e-9).max == pytest.approx(first.max, rel=1e-7)
    loss, gradient = problem.loss_and_gradient()
    assert loss == pytest.approx(problem.loss(), rel=1e-12)
    assert torch.equal(gradient, problem.gradient())


def test_hessian_grids_of_another_loss_or_data_are_not_gone_on_with() -> None:
    """What tells them apart is that of contours, of which tests/test_grid.py has more."""
    problem = Problem(mlp(), F.cross_entropy, (X, Y))
    plane = landscape.random_plane(problem)
    before = landscape.hessian_grid(problem, plane, grid=(2, 2))
    assert (
        landscape.hessian_grid(problem, plane, grid=(2, 2), execution=landscape.Execution(previous=before))
        is before
    )
    for changed, words in (
        (Problem(mlp(), functools.partial(F.cross_entropy, label_smoothing=0.1), (X, Y)), "its loss is"),
        (Problem(mlp(), F.cross_entropy, (X, Y.flip(0))), "other data"),
    ):
        with pytest.raises(InputError, match=words):
            landscape.hessian_grid(
                changed, plane, grid=(2, 2), execution=landscape.Execution(previous=before)
            )
    few = landscape.hessian_grid(problem, plane, grid=(2, 2), max_products=4)
    assert not few.converged.any()
    again = landscape.hessian_grid(problem, plane, grid=(2, 2), execution=landscape.Execution(previous=few))
    np.testing.assert_array_equal(again.lambda_max, before.lambda_max)


def test_the_error_of_a_lower_precision_is_measured_at_more_than_two_points() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    problem = Problem(model, F.cross_entropy, (X.float(), Y))
    plane = landscape.random_plane(problem)
    low, own = (
        landscape.contour(problem, plane, grid=(4, 4), span=2.0, autocast=p) for p in ("bfloat16", None)
    )
    assert (low.autocast, own.autocast, own.autocast_error) == ("bfloat16", "", 0.0)
    assert 0 < low.autocast_error == pytest.approx(float(np.abs(low.loss - own.loss).max()), rel=1e-4)
    with pytest.raises(InputError, match="'tf32' is not allowed here, it needs a float32 model on a CUDA"):
        landscape.contour(problem, plane, (3, 3), autocast="tf32")


def test_how_much_is_checked_can_be_chosen() -> None:
    assert Problem(mlp(), F.cross_entropy, (X, Y), check="full").check == "full"
    Problem(mlp(), nn.CrossEntropyLoss(reduction="sum"), (X, Y), check="off")
    with pytest.raises(InputError, match="check: 'some'"):
        Problem(mlp(), F.cross_entropy, (X, Y), check="some")

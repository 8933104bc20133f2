"""The fast paths of evaluation against the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape import InputError, OperationError, Problem
from landscape.evaluation.evaluate import evaluator
from tests import problems


def both(problem: Problem, path: str, **options: str) -> tuple[Tensor, Tensor]:
    """Losses by ``path`` and by the plain path at a few points."""
    plane = landscape.random_plane(problem, seed=4)
    points = 0.3 * torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    wanted = {path: options, "pointwise": {}}
    runs = [evaluator(problem, plane.center, plane.directions, 7, method=p, **o) for p, o in wanted.items()]
    assert runs[0].method == path
    fast, plain = (run(points) for run in runs)
    assert torch.equal(fast["accuracy"].isnan(), plain["accuracy"].isnan())
    return fast["loss"], plain["loss"]


class Residual(nn.Module):
    """Pairs that fold, one with a biased convolution, one that is used twice, and a BatchNorm that may not.

    ReLUs and sums of values that nothing else needs, of one that is needed as it was, and of unequal shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)
        self.twice, self.nt = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.lone = nn.BatchNorm2d(4)
        self.kept, self.relu = nn.Conv2d(4, 4, 1), nn.ReLU()
        self.gate, self.add = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.na(self.a(x)))
        h = nn.functional.relu(h + self.nb(self.b(h)).tanh())
        kept = self.kept(h)
        h = h + self.relu(kept) * kept
        h = self.nt(self.twice(h)) + self.twice(h)
        h = self.gate(h.mean((2, 3), keepdim=True)) + (h + self.add(h))
        h = self.add(h) + h.mean((2, 3), keepdim=True)
        out: Tensor = self.head(self.lone(h).mean((2, 3)))
        return out


class Branching(problems.SmallConv):
    """Control flow on values, which torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.square().sum()) >= 0 else -x)


def residual() -> Problem:
    torch.manual_seed(1)
    model = Residual()
    for _ in range(3):
        model(torch.randn(8, 1, 5, 5))
    model.a.weight.requires_grad_(False)  # folded all the same
    data = torch.randn(30, 1, 5, 5, dtype=torch.float64), torch.randint(3, (30,))
    problem = Problem(model, nn.functional.cross_entropy, data, dtype=torch.float64)
    problem.data.chunk_size = 8
    return problem


def batched() -> Problem:
    problem = residual()
    assert problem.tensors is not None
    x, y = problem.tensors
    return Problem(problem.model, problem.criterion, [(x[:20], y[:20]), (x[20:], y[20:])])


@pytest.mark.parametrize("make", [problems.conv, residual, batched, problems.linear_regression, problems.mlp])
def test_folded_equals_plain(make: Callable[[], Problem]) -> None:
    fast, plain = both(make(), "folded")
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)


def test_the_problems_own_model_stays_as_it_is() -> None:
    problem = residual()
    before = copy.deepcopy(problem.model.state_dict())
    trained = [p.requires_grad for p in problem.model.parameters()]
    for path in ("folded", "pointwise"):
        landscape.contour(problem, landscape.random_plane(problem), grid=(2, 2), span=1.0, method=path)
    problem.gradient(problem.weights + 1)
    landscape.extreme_eigenvalues(problem, weights=problem.weights + 1, residual_tol=0.3)
    after = problem.model.state_dict()
    assert list(after) == list(before)
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    assert [p.requires_grad for p in problem.model.parameters()] == trained
    assert all(p.grad is None for p in problem.model.parameters())


def branching() -> Problem:
    torch.manual_seed(0)
    return Problem(
        Branching(), nn.functional.cross_entropy, (torch.randn(10, 1, 6, 6), torch.randint(2, (10,)))
    )


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (problems.conv, {"method": "batched"}, "needs a chain"),
        (
            problems.conv,
            {"method": "pointwise", "autocast": "bfloat16"},
            "'pointwise' works in the model's own",
        ),
        (problems.mlp, {"method": "batched", "autocast": "bfloat16"}, "'batched' needs a chain"),
        (branching, {"method": "folded"}, "needs a model that torch.fx can trace"),
        (problems.conv, {"method": "folded", "bn": "recalibrate"}, "BatchNorm statistics of the centre"),
    ],
)
def test_a_path_that_is_not_there_is_refused(
    make: Callable[[], Problem], options: dict[str, str], words: str
) -> None:
    problem = make()
    plane = landscape.random_plane(problem)
    with pytest.raises(InputError, match=words):
        landscape.contour(problem, plane, grid=(2, 2), **options)
    if "autocast" not in options:
        bn = options.get("bn", "center")
        fits = landscape.contour(problem, plane, grid=(1, 1), bn=bn)
        assert fits.loss[0, 0] == pytest.approx(problem.with_batchnorm(bn, 1000).loss(), rel=1e-6)


def test_bfloat16_is_near_and_returns_full_precision_losses() -> None:
    fast, plain = both(residual(), "folded", autocast="bfloat16")
    assert fast.dtype == torch.float64
    np.testing.assert_allclose(fast, plain, rtol=0.03)
    assert not torch.equal(fast, plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_equals_batched() -> None:
    fast, plain = both(problems.mlp(widths=(20, 9, 7, 4), activation="relu", samples=130), "compiled")
    torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-12)


def test_auto_falls_back_where_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> object:
        def fail(*inputs: object) -> None:
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr("landscape.evaluation.paths.COMPILE_WORK", 0.0)
    monkeypatch.setattr(torch, "compile", broken)
    problem = problems.mlp()
    with pytest.warns(landscape.PathWarning, match="no compiler"):
        s = landscape.contour(problem, landscape.random_plane(problem), grid=(4, 4))
    assert s.method == "batched"
    assert np.isfinite(s.loss).all()
    with pytest.raises(OperationError, match=r"method: 'compiled' fails here \(no compiler\); use 'batched'"):
        landscape.contour(problem, landscape.random_plane(problem), grid=(4, 4), method="compiled")

"""All instruments on data that is read in parts, and with BatchNorm after DPSGD by hand."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import landscape
from landscape import Checkpoint, DecentralizedDataParallel, Preconditioner, Problem
from landscape.analysis.learning_coefficient import Langevin
from landscape.gradients.minibatches import draws, stream
from landscape.problem.batches import take
from landscape.training.processes.process_group import Group
from tests import problems
from tests.groups import together
from tests.nets import norm_net


class Fresh:
    """The batches of a loader in memory of their own; ``most`` is how many were alive at one time."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.most = loader, 0
        self._alive: list[weakref.ref[Any]] = []

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in self.loader:
            # A tensor of it keeps it alive.
            arrays = {key: rows.numpy().copy() for key, rows in batch.items()}
            self._alive = [each for each in self._alive if each() is not None]
            self._alive.append(weakref.ref(arrays["input_ids"]))
            self.most = max(self.most, len(self._alive))
            yield arrays


def perturbed(problem: Problem, n: int = 3) -> Tensor:
    noise = torch.randn(n, len(problem.weights), dtype=torch.float64, generator=stream(7, 0))
    return problem.weights + 0.03 * noise.to(problem.weights)


def preconditioned(problem: Problem) -> Tensor:
    p = torch.linspace(0.5, 2.0, len(problem.weights)).to(problem.weights)
    found = landscape.top_eigenvalues(problem, 1, precondition=Preconditioner(p), residual_tol=1e-6)
    return torch.from_numpy(found.values)


def chains(problem: Problem) -> Any:
    return Langevin(problem, 4, 2, step_size=1e-3, nbeta=2.0, localization=1.0, seed=3).run(5)


def compared(problem: Problem) -> Any:
    moved = problem.on(problem.data)
    moved.weights = perturbed(problem)[0]
    only = ["loss", "batch-sharpness", "sharpness-average"]
    return landscape.compare({"a": problem, "b": moved}, 4, quantities=only, draws=2, planes=2).value


INSTRUMENTS: dict[str, Callable[[Problem], Any]] = {
    "batch sharpness": lambda p: landscape.batch_sharpness(p, 4, weights=perturbed(p), local_batch=3, max_draws=16).learner_curvature,
    "noise scale": lambda p: landscape.noise_scale(p, 4, max_draws=16).value,
    "noise alignment": lambda p: landscape.noise_alignment(p, 4, 2, min_draws=3, max_draws=3).estimates,
    "preconditioned": preconditioned,
    "worst": lambda p: landscape.sharpness(p, 0.05, steps=3).value,
    "average, m": lambda p: landscape.sharpness(p, 0.05, "average", m=4, min_draws=3, max_draws=3).values,
    "disagreement": lambda p: landscape.disagreement(p, perturbed(p), 2).cost,
    "chains": chains,
    "compare": compared,
    "basins": lambda p: landscape.basins(landscape.contour(p, landscape.random_plane(p), (5, 4), span=0.5), [0.1]).area,
}  # fmt: skip


@functools.cache
def in_memory(name: str) -> Any:
    return INSTRUMENTS[name](problems.language_model())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loader", "streamed"])
def test_data_in_parts_gives_the_numbers_of_data_in_memory(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dict batches of unequal weight; a loader has no numbered samples, a stream fetches each by its own."""
    expected = {name: in_memory(name) for name in INSTRUMENTS}
    whole, data = problems.language_model(), problems.tokens()
    if form == "streamed":
        monkeypatch.setattr("landscape.problem.data.fits", lambda size, device: False)
    fresh = Fresh(DataLoader([take(data, i) for i in range(11)], batch_size=2))  # type: ignore[arg-type]
    parts = Problem(whole.model, None, fresh if form == "loader" else data, dtype=torch.float64)
    assert parts.resident is None
    assert parts.indexed == (form == "streamed")
    for name, measure in INSTRUMENTS.items():
        fresh.most = 0
        np.testing.assert_allclose(measure(parts), expected[name], rtol=1e-5, atol=1e-12, err_msg=name)
        if name in ("worst", "average, m", "chains"):  # products keep graphs within their budget
            assert fresh.most <= 3, f"{name} keeps {fresh.most} of 6 batches in memory"


def test_passes_hold_a_bounded_part_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws a pass where samples are large, and the same numbers."""
    reads = []

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            reads.append(1)
            return super().__iter__()

    x = torch.arange(20.0, dtype=torch.float64)[:, None]
    problem = Problem(nn.Linear(1, 1).double(), nn.MSELoss(), Counted([(x[:12], x[:12]), (x[12:], x[12:])]))

    def drawn(bound: int) -> tuple[Tensor, int]:
        monkeypatch.setattr("landscape.gradients.minibatches.PASS_BYTES", bound)
        reads.clear()
        found = itertools.islice(draws(problem.data, 2, 3, stream(0, 0)), 32)
        return torch.stack([inputs for inputs, _ in found]), len(reads)

    (many, few_passes), (same, more_passes) = drawn(2**20), drawn(4 * 2 * 3 * 16)
    assert torch.equal(many, same)
    assert more_passes - few_passes >= 32 // 4 - 32 // 16  # of 4 draws each, in place of 16


def trained_on(model: nn.Module, problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """(θ, samples) -> the loss of a plain call in training mode: BatchNorm has the statistics of the samples."""
    assert problem.tensors is not None
    x, y = problem.tensors

    def loss(theta: Tensor, rows: Tensor) -> Tensor:
        own = copy.deepcopy(model).train()
        outputs = torch.func.functional_call(own, problem.layout.views(theta), (x[rows],))
        return nn.functional.cross_entropy(outputs, y[rows])

    return loss


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(24, 6, dtype=torch.float64, generator=generator), torch.arange(24) % 3


def by_hand(group: Group, folder: Path) -> None:
    """A loop of the user's own: one learner of DPSGD with BatchNorm, saved."""
    torch.manual_seed(0)
    x, y = samples()
    module = norm_net().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = DecentralizedDataParallel(module, optimizer, "dpsgd")
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(8):
        rows = torch.randint(24, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.save_checkpoint(folder / "last.h5")


def test_learners_of_dpsgd_by_hand(tmp_path: Path) -> None:
    """Their spread under the statistics of the mean, their batch sharpness under those of minibatches."""
    assert together(3, by_hand, tmp_path) == [None] * 3
    run = landscape.load(tmp_path / "last.h5")
    assert isinstance(run, Checkpoint)
    torch.manual_seed(0)
    model = norm_net().double()
    problem = run.problem(model=model, data=samples())
    x, y = samples()
    weights = run.weights.double()
    mean = weights.mean(0)
    still = copy.deepcopy(model)
    for layer in still.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():  # the statistics of the mean's weights over all samples
        torch.func.functional_call(still.train(), problem.layout.views(mean), (x,))
    for (name, ours), theirs in zip(problem.model.named_buffers(), still.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    still.eval()

    def loss(theta: Tensor) -> Tensor:
        outputs = torch.func.functional_call(still, problem.layout.views(theta), (x,))
        return nn.functional.cross_entropy(outputs, y)

    h = torch.autograd.functional.hessian(loss, mean)
    away = weights - mean
    found = landscape.disagreement(problem, run.weights, 2)
    assert found.cost == pytest.approx(float(torch.einsum("ni,ij,nj->", away, h, away)) / 6, rel=1e-3)
    assert found.learners_loss == pytest.approx(np.mean([float(loss(w)) for w in weights]), rel=1e-5)
    sharp = landscape.batch_sharpness(
        problem, 18, weights=run.weights, min_draws=2, max_draws=2, quantities=()
    )
    trained, own = trained_on(model, problem), stream(0, 1)
    for k in range(2):
        for j, rows in enumerate(torch.randint(24, (3, 6), generator=own)):

            def own_loss(theta: Tensor, rows: Tensor = rows) -> Tensor:
                return trained(theta, rows)

            g = torch.autograd.functional.jacobian(own_loss, weights[j])
            product = torch.autograd.functional.hvp(own_loss, weights[j], g)[1]
            assert sharp.learner_curvature[k, j] == pytest.approx(float(g @ product / (g @ g)), rel=1e-4)

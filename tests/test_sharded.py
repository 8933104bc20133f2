"""Models whose parameters are shared among ranks, against the same model in one process."""

from __future__ import annotations

import copy
import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import landscape
from landscape import InputError, OperationError
from landscape.problem.problem import Problem
from landscape.problem.sharded import ShardedProblem
from tests.conftest import slow_but
from tests.groups import together
from tests.nets import GPT2, CausalBlock, fsdp

SAMPLES, WORDS, LENGTH, WIDTH, CLASSES = 16, 13, 6, 8, 5


class Images(nn.Module):
    """A small vision transformer: patches, of which each sees those before, one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.blocks = nn.ModuleList([CausalBlock(WIDTH, 2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(h[:, -1])
        return found


class Words(GPT2):
    """A small GPT-2, with weights as of a network this narrow."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH, 2, WORDS, LENGTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)


def made(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and its data, the same in every process."""
    torch.manual_seed(0)
    model = kind()
    if kind is Words:
        words = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
        targets = words[:, 1:].clone()
        targets[3, 2:] = -100  # the ranks' shares have unequal numbers of terms
        return model, words[:, :-1], targets
    return model, torch.randn(SAMPLES, 1, 8, 8), torch.randint(CLASSES, (SAMPLES,))


def tensor_parallel(model: nn.Module, ranks: int, mesh: Any = None) -> nn.Module:
    """Tensor parallelism of the perceptrons of the blocks."""
    mesh = mesh or init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def both(model: nn.Module, ranks: int) -> nn.Module:
    """Tensor parallelism inside of FSDP2."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    return fsdp(tensor_parallel(model, 2, mesh["tensor"]), ranks, mesh["data"])


def ddp(model: nn.Module, ranks: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


KINDS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "fsdp": fsdp,
    "tensor": tensor_parallel,
    "both": both,
    "ddp": ddp,
}


def problem_on(rank: int, ranks: int, kind: str, net: type[nn.Module]) -> tuple[ShardedProblem, Problem]:
    """The problem on the ranks, each with its share of the data in two unequal batches, and that of one process."""
    model, x, y = made(net)
    alone = landscape.Problem(model, F.cross_entropy, (x, y))
    shares, own = {"tensor": (1, 0), "both": (ranks // 2, rank // 2)}.get(kind, (ranks, rank))
    rows = slice(own * SAMPLES // shares, (own + 1) * SAMPLES // shares)
    x, y = x[rows], y[rows]
    make: Any = ShardedProblem if kind == "ddp" else landscape.Problem
    return make(KINDS[kind](model, ranks), F.cross_entropy, [(x[:3], y[:3]), (x[3:], y[3:])]), alone


def same_numbers(problem: ShardedProblem, alone: Problem) -> None:
    """Loss, accuracy, gradient, line and contour are those of one process."""
    assert (problem.samples, problem.size) == (SAMPLES, alone.layout.size)
    loss, accuracy = alone.evaluate()
    assert problem.evaluate() == (pytest.approx(loss, rel=1e-5), pytest.approx(accuracy, nan_ok=True))
    g = alone.gradient()
    assert problem.norm(problem.gradient()) == pytest.approx(float(g.norm()), rel=1e-4)
    plane, expected = (landscape.random_plane(p, norm="filter", seed=1) for p in (problem, alone))
    for u, v in zip(plane.directions, expected.directions, strict=True):
        assert problem.norm(u) == pytest.approx(float(v.norm()), rel=1e-5)
        slope = float(problem.total(problem.gradient() @ u))
        assert slope == pytest.approx(float(g @ v), rel=1e-3, abs=1e-5)
    surface = landscape.contour(problem, plane, grid=(2, 3), span=0.5)
    same = landscape.contour(alone, expected, grid=(2, 3), span=0.5)
    assert surface.loss == pytest.approx(same.loss, rel=1e-5)
    assert surface.method == "pointwise"
    along = landscape.line(problem, plane.directions[0], points=3, span=0.5).loss
    whole = landscape.line(alone, expected.directions[0], points=3, span=0.5).loss
    assert along == pytest.approx(whole, rel=1e-5)


def same_curvature(problem: ShardedProblem, alone: Problem) -> None:
    """Eigenvalues, trace and density are those of exact products in one process, within the stated errors."""
    low, high = landscape.extreme_eigenvalues(problem, 3e-3), landscape.extreme_eigenvalues(alone, 1e-3)
    assert (low.converged, low.derivatives) == (True, "differences")
    assert 0 < low.product_error < 1e-2 * low.max
    for end in ("min", "max"):
        residuals = getattr(low, f"residual_{end}") + getattr(high, f"residual_{end}")
        assert abs(getattr(low, end) - getattr(high, end)) <= residuals, end
    v = torch.as_tensor(low.vectors[low.values.argmax()])
    assert problem.norm(v) == pytest.approx(1.0, rel=1e-5)
    assert float(problem.total(v @ (problem.hessian() @ v))) == pytest.approx(low.max, rel=1e-3)
    ours, exact = landscape.trace(problem, 9), landscape.trace(alone, 9)  # of the same random signs
    assert ours.value == pytest.approx(exact.value, abs=ours.product_error + 1e-3 * abs(exact.value))
    assert ours.standard_error == pytest.approx(exact.standard_error, rel=0.05)
    dense, same = (landscape.density(p, draws=2, steps=4) for p in (problem, alone))
    assert dense.moment(2)[0] == pytest.approx(same.moment(2)[0], rel=1e-2)
    assert dense.parameters == alone.layout.size
    part = problem.pieces[-1].slot.name.rpartition(".")[0]
    head, block = (
        landscape.extreme_eigenvalues(problem.of(part)),
        landscape.extreme_eigenvalues(alone, part=part),
    )
    assert head.max == pytest.approx(block.max, abs=head.residual_max + block.residual_max)
    grid, expected = (
        landscape.hessian_grid(p, landscape.random_plane(p), grid=(2, 1), span=0.02) for p in (problem, alone)
    )
    assert grid.lambda_max == pytest.approx(expected.lambda_max, rel=0.02)


def agree(group: Any, cases: list[tuple[str, type[nn.Module], bool]]) -> None:
    """Whatever is computed is that of one process, and the weights stay as they are."""
    for kind, net, curved in cases:
        problem, alone = problem_on(group.rank, group.size, kind, net)
        assert type(problem) is ShardedProblem, kind
        before = state(problem)
        same_numbers(problem, alone)
        if curved:
            same_curvature(problem, alone)
        assert same(before, state(problem)), (kind, net)


def test_two_ranks_agree_with_one_process() -> None:
    cases = [("fsdp", Images, True), *((kind, Words, False) for kind in ("fsdp", "tensor", "ddp"))]
    assert together(2, agree, cases) == [None] * 2


@pytest.mark.slow
@pytest.mark.parametrize("net", [Words, Images])
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_agree_with_one_process(kind: str, net: type[nn.Module]) -> None:
    assert together(4, agree, [(kind, net, True)]) == [None] * 4


def averaged(group: Any) -> None:
    """Averages of members that ranks have in parts are those of one process; float32 states its errors."""
    for kind, dtype in (("fsdp", torch.float64), ("ddp", torch.float32)):
        model, x, y = made(Words)
        alone = landscape.Problem(copy.deepcopy(model).double(), F.cross_entropy, (x, y))
        x, y = x[8 * group.rank :][:8], y[8 * group.rank :][:8]
        sharded = KINDS[kind](model.to(dtype), 2)
        problem = ShardedProblem(sharded, F.cross_entropy, [(x[:3], y[:3]), (x[3:], y[3:])])
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(3, alone.layout.size, dtype=torch.float64, generator=generator)
        whole = alone.weights + 0.1 * noise
        parts = torch.stack([problem.draw(lambda p, w=w: w[p.slot.place].view(p.slot.shape)) for w in whole])
        before = state(problem)
        options: Any = {"coefficients": [[1, 2, 0], [3, -1, 1]]}
        on_ranks, of_one = dict[str, Any](), dict[str, Any]()
        if kind == "fsdp":
            options = {"plan": "grid", "exact": 2}
            on_ranks["base"], of_one["base"] = problem.weights, alone.weights
        ours = landscape.average(problem, parts, **options, **on_ranks)
        truth = landscape.average(alone, whole, **options, **of_one)
        assert (ours.parameters, ours.products) == (truth.parameters, truth.products)
        assert (ours.chosen.tolist(), ours.labels) == (truth.chosen.tolist(), truth.labels)
        assert np.isfinite(truth.high).any()
        names = ("members_loss", "coefficients", "exact", "loss", "low", "high", "ratio")
        for name in names if dtype == torch.float64 else names[:3]:
            expected = pytest.approx(getattr(truth, name), rel=1e-6, abs=1e-9, nan_ok=True)
            assert getattr(ours, name) == expected, name
        assert ours.loss == pytest.approx(truth.loss, rel=1e-4)
        assert same(before, state(problem))


def test_averages_on_two_ranks_are_those_of_one_process() -> None:
    assert together(2, averaged) == [None] * 2


class Causal(Words):
    """It computes its loss itself, from labels whose first one it leaves out, as Hugging Face's models do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids)
        return {"loss": F.cross_entropy(logits[..., :-1], labels[:, 1:]), "logits": logits}


def own_loss(group: Any) -> None:
    """A model with its own loss and batches as dicts has the loss of one process, by terms that count."""
    torch.manual_seed(0)
    model, words = Causal(), torch.randint(WORDS, (SAMPLES, LENGTH))
    labels = words.clone()
    labels[:5, 3:] = -100
    alone = landscape.Problem(model, None, {"input_ids": words, "labels": labels})
    rows = slice(8 * group.rank, 8 * group.rank + 8)
    batches = [
        {"input_ids": words[rows][part], "labels": labels[rows][part]} for part in (slice(6), slice(6, 8))
    ]
    problem = landscape.Problem(fsdp(model, 2), None, batches)
    assert problem.loss() == pytest.approx(alone.loss(), rel=1e-5)
    assert problem.norm(problem.gradient()) == pytest.approx(float(alone.gradient().norm()), rel=1e-4)


def test_a_model_with_its_own_loss_is_taken_as_it_is() -> None:
    assert together(2, own_loss) == [None] * 2


def state(problem: ShardedProblem) -> list[Any]:
    """Copies of all that passes must leave as it is: weights, buffers, gradients, modes."""
    gradients = [piece.gradient().clone() for piece in problem.pieces]
    tensors = [*(piece.local.clone() for piece in problem.pieces), *gradients]
    return [tensors, [module.training for module in problem.model.modules()]]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(map(torch.equal, before[0], after[0])) and before[1] == after[1]


def ended_early(group: Any) -> None:
    """Weights, gradients and modes are as before after an error in a pass, and after Ctrl-C."""
    for kind in ("fsdp", "ddp"):
        problem, _ = problem_on(group.rank, group.size, kind, Images)
        x, y = made(Images)[1:]
        F.cross_entropy(problem.model(x[:2]), y[:2]).backward()  # of the user's step under way
        criterion, moved, before = problem.criterion, problem.weights + 1.0, state(problem)
        calls = 0

        def fails(outputs: Any, targets: Any) -> Tensor:
            raise ValueError("of the user's loss")

        def pressed(outputs: Any, targets: Any, criterion: Any = criterion) -> Tensor:
            nonlocal calls
            calls += 1
            os.kill(os.getpid(), signal.SIGINT)
            found: Tensor = criterion(outputs, targets)
            return found

        for criterion_, error in ((fails, ValueError), (pressed, KeyboardInterrupt)):
            problem.criterion = criterion_
            for call in (problem.gradient, problem.loss):
                with pytest.raises(error):
                    call(moved)
                assert same(before, state(problem)), (kind, error)
        assert calls == 4  # the pass under way ends, on all ranks
        problem.criterion = criterion
        assert problem.loss(moved) != pytest.approx(problem.loss(), rel=1e-3)
        assert same(before, state(problem))


def test_whatever_ends_a_pass_the_weights_are_restored_to_the_bit() -> None:
    assert together(2, ended_early) == [None] * 2


def loses_a_rank(group: Any) -> None:
    problem, _ = problem_on(group.rank, group.size, "fsdp", Images)
    if group.rank == 1:
        os._exit(1)
    before = state(problem)
    with pytest.raises(OperationError, match="^rank 0: another rank is lost") as raised:
        problem.gradient(problem.weights + 1.0)
    assert "\n" not in str(raised.value)
    assert same(before, state(problem))


def test_a_lost_rank_ends_the_call_in_one_line() -> None:
    assert together(2, loses_a_rank, lost=(1,), timeout=5.0) == [None, None]


def trained(folder: Path, model: nn.Module, data: Any, first: bool = True) -> None:
    """Four steps of SGD, on the same samples in every process, recorded from ``data``."""
    x, y = made(Words)[1:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"every": 2, "sharpness": 2, "save_every": 3, "optimizer": optimizer}
    recorder = landscape.Recorder(
        folder, model, F.cross_entropy, data, test=data, monitor={"samples": 0}, **options
    )
    with recorder:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with recorder.step():
                optimizer.step()
        if first:
            recorder.log(note=1.0)


def recorded(group: Any, folder: Path, kind: str) -> None:
    model, x, y = made(Words)
    if kind == "fsdp":
        x, y = x[8 * group.rank :][:8], y[8 * group.rank :][:8]
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    trained(folder / kind, KINDS[kind](model, 2), batches, first=group.rank == 0)
    sharded = fsdp(made(Words)[0], 2)
    refused: dict[str, dict[str, Any]] = {
        "holds a run": {},  # rank 0 sees it, and all say it
        "^resume": {"resume": True},
        "^samples": {"samples": 16},
        "^monitor": {"monitor": {"instruments": ["noise-scale"]}},
    }
    for words, options in refused.items():
        with pytest.raises(landscape.LandscapeError, match=words) as raised:
            landscape.Recorder(folder / kind, sharded, F.cross_entropy, batches, **options)
        assert "\n" not in str(raised.value)
    recorder = landscape.Recorder(folder / "ended", sharded, F.cross_entropy, batches)
    with recorder.step():
        pass
    if group.rank == 0:
        with pytest.raises(ValueError, match="in the loop"), recorder:
            raise ValueError("in the loop")  # rank 0 does not wait for the other to write the step with it
    recorder.abort()


@pytest.mark.parametrize("kind", slow_but(["fsdp"], ["fsdp", "tensor"]))
def test_a_recorder_on_two_ranks_has_the_history_of_one_process(kind: str, tmp_path: Path) -> None:
    """And its weights, within the errors that they state."""
    model, x, y = made(Words)
    trained(tmp_path / "alone", model, (x, y))
    assert together(2, recorded, tmp_path, kind) == [None] * 2
    for name in ("step-0000003.h5", "last.h5"):
        run, alone = (landscape.load(tmp_path / each / name) for each in (kind, "alone"))
        assert torch.allclose(run.weights, alone.weights, atol=1e-6)
        assert run.layout == alone.layout
    assert run.model["name"] == "tests.test_sharded:Words"
    assert run.history["note"][-1] == 1.0
    for name in ("alpha_e", "train_loss", "grad_norm2", "displacement2", "test_loss"):
        assert run.history[name] == pytest.approx(alone.history[name], rel=1e-4, nan_ok=True), name
    top, expected = (each.history["lambda_max"] for each in (run, alone))
    error = run.history["lambda_max_residual"] + alone.history["lambda_max_residual"]
    assert (abs(top - expected) <= error).sum() == 2
    assert (error < 0.05 * expected).sum() == 2


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 0.3, 1.0, 2.0]))


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def counted(group: Any) -> None:
    """Losses whose terms are counted alike on all ranks, of which each has another number of them."""
    model, x, y = made(Images)
    rare, alone = y % 2 * 3, y.clone()
    rare[8:12], alone[8:] = 1, -100
    cases = [(weighted, rare, 4), (weighted, rare, 8), (plain, alone, 4), (plain, alone, 8)]
    for seed in range(4):  # each rank leaves out its own share
        generator = torch.Generator().manual_seed(seed)
        left = torch.rand(16, generator=generator) < torch.rand(2, generator=generator).repeat_interleave(8)
        left[seed], left[15 - seed] = True, False
        cases.append((plain, y.masked_fill(left, -100), 4 + 4 * (seed % 2)))
    ddp = nn.parallel.DistributedDataParallel(model)
    for loss, targets, size in cases:
        truth = loss(model(x), targets).item()
        batches = [
            (x[k : k + size], targets[k : k + size]) for k in range(8 * group.rank, 8 * group.rank + 8, size)
        ]
        with pytest.warns(landscape.ProblemWarning, match="the terms of its mean are counted as"):
            problem = landscape.ShardedProblem(ddp, loss, batches if size < 8 else batches[0])
        assert problem.loss() == pytest.approx(truth, rel=1e-5)
    with pytest.raises(InputError, match="all its targets are left out"):
        landscape.ShardedProblem(ddp, plain, (x, torch.full_like(y, -100)))


RARE = torch.tensor([1.0, 2.0, 9.0])


def of_classes(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, RARE)


class Weighing(nn.Module):
    """It computes its loss itself, with weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 3)])

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.blocks[0](x)
        return {"loss": F.cross_entropy(logits, labels, RARE), "logits": logits}


def weighs_itself(group: Any) -> None:
    """A class that is rare, on one rank alone, or not in the first batches, has its weight in the mean."""
    for seed in range(4):
        torch.manual_seed(seed)
        model, sizes = Weighing(), torch.randint(1, 12, (2, 4))
        x, y = torch.randn(int(sizes.sum()), 4), torch.randint(2, (int(sizes.sum()),))
        last = int(sizes[1, 2:].sum())  # samples of the last batches of the last rank
        y[len(y) - 1 - torch.randperm(last)[:3]] = 2
        truth = model(x, y)["loss"].item()
        shares = [torch.split(t, sizes.flatten().tolist())[4 * group.rank :][:4] for t in (x, y)]
        batches = [{"x": inputs, "labels": labels} for inputs, labels in zip(*shares, strict=True)]
        with_labels = [(batch, batch["labels"]) for batch in batches]
        for loss, data in ((None, batches), (of_classes, with_labels)):
            divided = KINDS["ddp" if seed else "fsdp"](copy.deepcopy(model), 2)
            with pytest.warns(landscape.ProblemWarning, match="the weights of the classes of y"):
                problem = landscape.ShardedProblem(divided, loss, data)
            assert problem.loss() == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("function", [counted, weighs_itself])
def test_what_counts_in_a_loss_is_compared_across_ranks(function: Callable[[Any], None]) -> None:
    assert together(2, function) == [None] * 2


def of_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs.sum(1) - targets) ** 2).mean()


def wrong_on_one(group: Any) -> None:
    """What is wrong with the data of one rank is said on all of them, with the rank; the model is as before."""
    _, x, y = made(Images)
    own = slice(8 * group.rank, 8 * group.rank + 8)

    def three(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets) == 3:
            raise KeyError("three")
        return plain(outputs, targets)

    def data(change: Any, place: int) -> Any:
        batches = list(zip(x[own].split([5, 3]), y[own].split([5, 3]), strict=True))
        if group.rank == 1:
            batches[place] = change(*batches[place])
        return batches

    def label(x: Tensor, y: Tensor) -> Any:
        return x, torch.cat((y[:1] + CLASSES, y[1:]))

    same_: Any = lambda x, y: (x, y)  # noqa: E731
    wide: Any = lambda x, y: (x.expand(-1, 2, -1, -1), y)  # noqa: E731
    blank: Any = lambda x, y: (torch.cat((x[:1] * math.nan, x[1:])), y)  # noqa: E731
    far: Any = lambda x, y: (x, y / 0.0)  # noqa: E731
    cases: list[tuple[str, Any, Any, int]] = [
        ("its labels go from", F.cross_entropy, label, 0),
        ("IndexError: Target", plain, label, 1),
        ("RuntimeError: ", F.cross_entropy, wide, 0),
        ("KeyError: 'three'", three, lambda x, y: (x[:3], y[:3]), 0),
        *(
            ("NaN in inputs of batch {}", loss, blank, place)
            for loss in (plain, F.cross_entropy)
            for place in (0, 1)
        ),
        ("the loss of batch 0 .* is inf", of_sums, far, 0),
    ]
    for kind in ("ddp", "fsdp"):
        model = KINDS[kind](made(Images)[0], 2)
        for words, loss, change, place in cases:
            if kind == "fsdp" and not hasattr(model, "reset_iter_state"):  # PyTorch before 2.13
                model = KINDS[kind](made(Images)[0], 2)
            with pytest.raises(InputError, match=words.format(place)) as raised:
                landscape.ShardedProblem(model, loss, data(change, place))
            assert str(raised.value).endswith("(rank 1)"), words
            assert "\n" not in str(raised.value), words
        late = landscape.ShardedProblem(model, F.cross_entropy, data(label, 1))  # seen where it is used
        full = functools.partial(
            landscape.ShardedProblem, model, F.cross_entropy, data(label, 1), check="full"
        )
        for call in (full, late.loss, late.gradient):
            with pytest.raises(InputError, match=r"(IndexError: Target|its labels go) .*\(rank 1\)"):
                call()
        truth = F.cross_entropy(made(Images)[0](x), y).item()
        assert landscape.ShardedProblem(model, plain, data(same_, 0)).loss() == pytest.approx(truth, rel=1e-5)


def old_fsdp(group: Any) -> None:
    """A pass that ends within FSDP2 ends the use of the model where PyTorch cannot set it back."""
    kind = torch.distributed.fsdp.FSDPModule
    if hasattr(kind, "reset_iter_state"):
        del kind.reset_iter_state
    _, x, y = made(Images)
    model = fsdp(made(Images)[0], 2)
    with pytest.raises(InputError, match="RuntimeError"):
        landscape.ShardedProblem(model, F.cross_entropy, (x.expand(-1, 1 + group.rank, -1, -1), y))
    with pytest.raises(OperationError, match="^model: a pass of it ended in an error"):
        landscape.ShardedProblem(model, F.cross_entropy, (x, y))


def other_calls(group: Any) -> None:
    """Another argument on one rank is said on all, with the rank, and so is NaN that no check has seen."""
    model, x, y = made(Images)
    rows, r = slice(8 * group.rank, 8 * group.rank + 8), group.rank
    x, y = x[rows], y[rows]
    sharded = fsdp(model, 2)
    problem = landscape.ShardedProblem(sharded, F.cross_entropy, (x, y))
    unchecked = landscape.ShardedProblem(sharded, F.cross_entropy, (x / (1.0 - r), y), check="off")
    members = problem.weights * torch.arange(1, 4)[:, None]
    cases: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("k: 2 on rank 1, but 1 on rank 0", lambda: landscape.top_eigenvalues(problem, 1 + r)),
        ("k: 0 on rank 1, but 1 on rank 0", lambda: landscape.spectrum(problem, 1 - r)),
        ("seed: 1 on rank 1", lambda: landscape.random_plane(problem, seed=r)),
        ("call: trace on rank 1", lambda: (landscape.density, landscape.trace)[r](problem)),
        ("check: 'of' on rank 1", lambda: landscape.ShardedProblem(sharded, None, x, check="off"[: 3 - r])),
        ("part: 'no' on rank 1", lambda: problem.of(("head", "no")[r])),
        ("k: 'x' on rank 1", lambda: landscape.spectrum(problem, (1, "x")[r])),
        ("weights: a Tensor on rank 1", lambda: landscape.trace(problem, weights=(None, x)[r])),
        (r"call: trace\(\) too many .* on rank 1", lambda: landscape.trace(problem, 6, *"ab"[:r])),
        ("kk: 1 on rank 1, but nothing", lambda: landscape.trace(problem, **{"kk": 1} if r else {})),
        ("terms: 5 on rank 1", lambda: landscape.ShardedProblem(sharded, None, x, terms=(None, 5)[r])),
        ("dtype: 'x' on rank 1", lambda: landscape.Problem(sharded, None, x, **{"dtype": "x"} if r else {})),
        (r"\(rank 1\)", lambda: problem.loss(problem.weights[r:])),
        (r"weights: 3 on rank 1", lambda: landscape.average(problem, members[: 2 + r])),
        (
            r"coefficients: \(1\.0, 1\.0\)",
            lambda: landscape.average(problem, members[:2], np.array([2.0 - r, 1])),
        ),
        (r"weights\[0\]: shape .*\(rank 1\)", lambda: landscape.average(problem, members[:, r:])),
        (r"NaN .*\(rank 1\)", lambda: landscape.average(problem, members / (1.0 - r))),
        (r"all 3 members are equal", lambda: landscape.average(problem, members * 0)),
        ("the loss on rank 1 is nan", unchecked.gradient),
        ("the loss on rank 1 is nan", lambda: landscape.top_eigenvalues(unchecked, 1)),
    )
    for words, call in cases:
        with pytest.raises((InputError, OperationError), match=words) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert math.isfinite(problem.loss())


@pytest.mark.parametrize("function", [wrong_on_one, other_calls, old_fsdp])
def test_what_is_wrong_on_one_rank_is_said_on_all(function: Callable[[Any], None]) -> None:
    assert together(2, function) == [None] * 2


def refused(group: Any) -> None:
    """What would be a wrong number is an error of one line, on every rank."""
    model, x, y = made(Images)
    rows = slice(8 * group.rank, 8 * group.rank + 8)
    own = (x[rows], y[rows])

    def fails(
        match: str, model: nn.Module, loss: Any = F.cross_entropy, data: Any = own, **options: Any
    ) -> None:
        with pytest.raises(InputError, match=match) as raised:
            landscape.ShardedProblem(model, loss, data, **options)
        assert "\n" not in str(raised.value)

    fails("its parameters must be DTensors", model)
    old = torch.distributed.fsdp.FullyShardedDataParallel(made(Images)[0], device_id=torch.device("cpu"))
    fails("use fully_shard", old)
    with pytest.raises(InputError, match="use fully_shard"):
        landscape.Problem(old, F.cross_entropy, own)
    sharded = fsdp(model, 2)
    total = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum")  # noqa: E731
    fails("no mean over samples", sharded, total)
    noisy = lambda outputs, targets: F.cross_entropy(F.dropout(outputs), targets)  # noqa: E731
    fails("random even in eval mode", sharded, noisy)
    fails("^data: rank 0 has 1 and rank 1 has 2 batches; ", sharded, data=[own] * (1 + group.rank))
    fails("no trainable parameters", fsdp(made(Images)[0].requires_grad_(False), 2))
    with torch.no_grad():
        broken = fsdp(made(Images)[0], 2)
        next(broken.parameters()).to_local().fill_(math.nan)
    fails("NaN or infinite", broken)
    summed: Any = fsdp(made(Images)[0], 2)
    for module in summed.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    fails("not that of the mean loss", summed)
    unsynchronized: Any = fsdp(made(Images)[0], 2)
    unsynchronized.set_requires_gradient_sync(False)
    fails("not that of the mean loss", unsynchronized)
    apart = nn.parallel.DistributedDataParallel(made(Images)[0])
    with torch.no_grad():
        apart.module.head.bias.add_(group.rank)
    fails("differ from rank to rank", apart)
    with pytest.raises(InputError, match="^weight_decay: it is not allowed with a sharded model"):
        landscape.Problem(sharded, F.cross_entropy, own, weight_decay=0.1)

    problem = landscape.Problem(sharded, F.cross_entropy, own)
    plane = landscape.random_plane(problem)
    with_norm = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.BatchNorm1d(CLASSES)).eval()
    normed: Any = ShardedProblem(nn.parallel.DistributedDataParallel(with_norm), F.cross_entropy, own)
    adapter = nn.Sequential(nn.Flatten())
    adapter.add_module("lora_A", nn.Linear(64, 2, bias=False))
    adapter.add_module("lora_B", nn.Linear(2, CLASSES, bias=False))
    adapted: Any = ShardedProblem(nn.parallel.DistributedDataParallel(adapter), F.cross_entropy, own)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: landscape.noise_scale(problem, 4),
        lambda: landscape.sharpness(problem, 0.05),
        lambda: landscape.smoothing(problem, torch.zeros(2, 3)),
        lambda: landscape.learning_coefficient(problem, 4),
        lambda: landscape.eigen_plane(problem),
        lambda: landscape.spectrum(problem, 1, engine="pyhessian"),
        lambda: landscape.trace(problem, part="head"),
        lambda: landscape.trace(problem, matrix="gauss-newton"),
        lambda: landscape.top_eigenvalues(problem, precondition=torch.ones(3)),
        lambda: landscape.extreme_eigenvalues(problem, derivatives="exact"),
        lambda: landscape.density(problem, 1, 2, max_memory=2**40),
        lambda: landscape.contour(problem, plane, 3, max_memory=2**40),
        lambda: problem.hessian().to_scipy(),
        lambda: landscape.HessianOperator(problem),
        lambda: landscape.contour(problem, plane, bn="train"),
        lambda: landscape.contour(problem, plane, autocast="bfloat16"),
        lambda: landscape.contour(problem, plane, method="folded"),
        lambda: landscape.contour(problem, plane, execution=landscape.Execution()),
        lambda: landscape.line(problem, problem.weights[:-1]),
        lambda: landscape.average(problem),
        lambda: landscape.average(problem, ["a.pt", "b.pt"]),
        lambda: landscape.average(problem, [problem.weights, model]),
        lambda: landscape.average(problem, torch.ones(2, 3)),
        lambda: landscape.average(problem, torch.stack([problem.weights] * 2), bn_samples=64),
        lambda: landscape.average(problem, torch.stack([problem.weights] * 2).bfloat16()),
        lambda: landscape.average(problem, torch.stack([problem.weights] * 2), rank=2),
        lambda: landscape.average(adapted, [adapted.weights, 2 * adapted.weights]),
        lambda: landscape.average(normed, [normed.weights, 2 * normed.weights]),
        lambda: problem.loss(problem.weights[:-1]),
        lambda: problem.of("nowhere"),
    )
    for k, call in enumerate(calls):
        with pytest.raises(InputError) as raised:
            call()
        assert "\n" not in str(raised.value), k


def test_what_a_sharded_model_has_not_is_refused_in_one_line() -> None:
    assert together(2, refused) == [None] * 2


def test_a_sharded_problem_needs_a_process_group() -> None:
    with pytest.raises(InputError, match="no process group"):
        landscape.ShardedProblem(nn.Linear(2, 2), F.cross_entropy, (torch.zeros(2, 2), torch.zeros(2)))


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = Path(__file__).parents[1] / "examples" / "sharded.py"
    found = subprocess.run([*command, str(example)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "ShardedProblem(FSDPSequential, 5,512 parameters on 2 ranks" in found.stdout
    assert landscape.open(tmp_path / "runs/sharded/contour.h5")[0].loss.shape == (11, 11)

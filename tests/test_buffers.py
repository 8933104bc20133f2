"""BatchNorm and dropout under learners: against plain modules, resumed, in processes, and at the mean."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import landscape
from landscape import Checkpoint, OperationError
from landscape.gradients import learners
from landscape.gradients.learners import Stack, Training
from landscape.problem.batchnorm import sample_parts
from landscape.testing.checks import RECIPE
from landscape.training.processes.process_group import Group
from landscape.training.recipes import recipe
from landscape.training.run import generator, launch
from landscape.training.run.loop import Hooks, Trainer
from landscape.training.run.setup import STATE
from tests.conftest import slow_but
from tests.groups import together
from tests.nets import norm_net

NET = "tests.nets:norm_net"
BASE: dict[str, Any] = RECIPE | {
    "learners": 3, "batch": 36, "model": {"name": NET},
    "decompose": {"every": 4}, "evaluate": {"every": 6, "bn_samples": 100},
}  # fmt: skip
DROPOUT = {"name": NET, "dropout": 0.3}
MATCHING: dict[str, Any] = {
    "algorithm": {"name": "dpsgd", "mixing": "random-matching", "order": "atc"}, "model": DROPOUT,
}  # fmt: skip


def chosen(**changes: Any) -> recipe.Recipe:
    return recipe.from_values(BASE | changes)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """A run that has ended, and its file."""
    folder = tmp_path_factory.mktemp("ended")
    return launch.launch(chosen(), folder), folder / "last.h5"


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in module.named_buffers() if "running" in k or "tracked" in k}


def module_of(trainer: Trainer) -> nn.Module:
    """The run's network as it starts, as a plain module in training mode."""
    module = copy.deepcopy(trainer.train_problem.model).train()
    load(module, trainer, trainer.train_problem.weights)
    return module


def load(module: nn.Module, trainer: Trainer, theta: Tensor) -> None:
    module.load_state_dict(trainer.train_problem.layout.views(theta), strict=False)


def gradient_of(module: nn.Module, trainer: Trainer) -> Tensor:
    named, layout = dict(module.named_parameters()), trainer.train_problem.layout
    return layout.flatten({s.name: named[s.name].grad for s in layout.slots})


def same_tensors(mine: Mapping[str, Tensor], others: Mapping[str, Tensor], **near: float) -> None:
    assert set(mine) == set(others)
    for name in mine:
        torch.testing.assert_close(mine[name], others[name], **(near or {"rtol": 0, "atol": 0}), msg=name)


@pytest.mark.parametrize(("algorithm", "accumulate"), [("ssgd", 1), ("dpsgd", 1), ("dpsgd", 2)])
def test_learners_train_as_modules_of_their_own(algorithm: str, accumulate: int) -> None:
    trainer = Trainer(chosen(algorithm={"name": algorithm}, accumulate=accumulate))
    x, y = trainer.train_problem.tensors or ()
    modules = [module_of(trainer) for _ in range(3)]
    weights = trainer.train_problem.weights.repeat(3, 1)
    for t in range(1, 13):
        rows = torch.randint(len(y), (3, 12), generator=generator(0, "batch", t))
        points = weights.mean(0).expand(3, -1) if algorithm == "ssgd" else weights
        gradients = []
        for j, module in enumerate(modules):
            load(module, trainer, points[j])
            module.zero_grad()
            for part in rows[j].chunk(accumulate):
                (F.cross_entropy(module(x[part]), y[part]) / accumulate).backward()
            gradients.append(gradient_of(module, trainer))
        weights = weights.mean(0) - 0.2 * torch.stack(gradients)
    end = trainer.run()
    torch.testing.assert_close(end.weights, weights, rtol=1e-10, atol=1e-12)
    for j, module in enumerate(modules):
        assert len(statistics(module)) == 6
        for name, value in statistics(module).items():
            torch.testing.assert_close(end.buffers[name][j], value, rtol=1e-10, atol=1e-12)
    first, second = (end.buffers["1.running_mean"][j] for j in (0, 1))
    assert float((first - second).abs().max()) > 1e-3


def test_the_mean_has_statistics_of_its_own_everywhere(ended: tuple[Checkpoint, Path]) -> None:
    end, path = ended
    trainer = Trainer(chosen())
    x, _ = trainer.train_problem.tensors or ()
    module = module_of(trainer)
    load(module, trainer, end.mean)
    inputs = [(x[part],) for part in sample_parts(trainer.train_problem.samples, 100)]
    torch.optim.swa_utils.update_bn(inputs, module)
    for name, value in statistics(module).items():
        if "tracked" not in name:
            torch.testing.assert_close(end.mean_buffers[name], value, rtol=1e-10, atol=1e-12)
            assert float((end.buffers[name].mean(0) - value).abs().max()) > 1e-4
            assert float((end.buffers[name] - value).abs().amax(1).min()) > 1e-4
    x, y = trainer.test_problem.tensors or ()
    tested = F.cross_entropy(module.eval()(x), y).detach()
    assert end.history["test_loss"][-1] == pytest.approx(float(tested), rel=1e-10)
    # The file holds all of it, and an analysis takes what belongs to its weights.
    read = Checkpoint.load(path)
    same_tensors(read.buffers, end.buffers)
    same_tensors(read.mean_buffers, end.mean_buffers)
    network = trainer.train_problem.model
    problem = read.problem("test", model=network, dtype=torch.float64)
    assert problem.loss() == pytest.approx(float(tested), rel=1e-12)
    own = read.problem("test", learner=1, model=network, dtype=torch.float64)
    assert torch.equal(dict(own.model.named_buffers())["1.running_var"], end.buffers["1.running_var"][1])
    state = {k: v[1] for k, v in read.buffers.items()} | trainer.train_problem.layout.views(end.weights[1])
    expected = F.cross_entropy(functional_call(module.eval(), state, (x,)), y).detach()
    assert own.loss() == pytest.approx(float(expected), rel=1e-12)
    # Without recorded statistics they come from all of the training set.
    read.mean_buffers = {}
    fresh = read.problem("test", model=network, dtype=torch.float64).loss()
    assert fresh == pytest.approx(float(tested), abs=0.02)
    assert fresh != problem.loss()


def test_what_is_constant_or_frozen_is_kept_with_the_learners(ended: tuple[Checkpoint, Path]) -> None:
    """A network whose factory draws it anew each time is still that of the run."""
    end, path = ended
    assert end.buffers["7.scale"].shape == (3, 3)
    assert end.buffers["4.bias"].shape == (3, 5)
    torch.manual_seed(99)
    problem = Checkpoint.load(path).problem("test", model=norm_net, dtype=torch.float64)
    tested = end.history["test_loss"][-1]
    assert problem.loss() == pytest.approx(tested, rel=1e-7)  # its own precision is single


def launch_in(group: Group, folder: str) -> Checkpoint:
    return launch.launch(chosen(**MATCHING), folder, group=group)


def test_a_run_of_two_processes_is_saved_whole_and_goes_on_in_one(tmp_path: Path) -> None:
    for part in together(2, launch_in, str(tmp_path / "two")):
        assert isinstance(part, Checkpoint), part
    whole = launch.launch(chosen(**MATCHING), tmp_path / "one")
    read = Checkpoint.load(tmp_path / "two" / "last.h5")
    (tmp_path / "two" / "last.h5").write_bytes((tmp_path / "two" / "step-0000005.h5").read_bytes())
    for found in (read, launch.launch(chosen(**MATCHING), tmp_path / "two", resume=True)):
        same_tensors(found.stacked(), whole.stacked(), rtol=1e-10, atol=1e-10)
        same_tensors(found.mean_buffers, whole.mean_buffers, rtol=1e-10, atol=1e-10)


def test_g_is_the_gradient_of_the_loss_with_each_batchs_statistics() -> None:
    trainer = Trainer(chosen())
    module = module_of(trainer)
    x, y = trainer.train_problem.tensors or ()
    start = trainer.train_problem.weights
    theta = start + 0.05 * torch.randn(len(start), dtype=torch.float64)
    load(module, trainer, theta)
    parts = torch.randperm(200, generator=generator(0, "decompose")).tensor_split(17)  # of 11 and 12 samples
    loss = sum(F.cross_entropy(module(x[part]), y[part]) * len(part) / 200 for part in parts)
    assert isinstance(loss, Tensor)
    loss.backward()
    layout, expected = trainer.train_problem.layout, gradient_of(module, trainer)
    g = trainer.decomposer.gradient.at(theta, 1)
    torch.testing.assert_close(g.rows[0], expected, rtol=1e-10, atol=1e-12)
    assert g.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    # Minibatches that are those parts have g as the mean of their gradients, and no noise.
    order = torch.cat([part for part in parts if len(part) == 12])
    network, data = trainer.train_problem.model, (x[order], y[order])
    few = landscape.Problem(network, F.cross_entropy, data, dtype=torch.float64)
    n = len(order) // 12
    own = torch.empty(n, layout.size, dtype=torch.float64)
    xs, ys = few.gather(torch.arange(len(order)).view(n, 12))
    training = Training({}, lambda learner, micro: 0)
    trainer.stack.gradients(theta.expand(n, -1), xs, ys, out=own, training=training)
    problem = trainer.decomposer.gradient.problem
    gradients = [problem.subset(part).gradient(theta) for part in order.split(12)]
    torch.testing.assert_close(own.mean(0), sum(gradients) / n, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_sampled_g_is_the_expected_gradient_of_a_minibatch() -> None:
    """960 estimates from a batch each against 960 minibatches, in units of their standard error."""
    trainer = Trainer(chosen())
    theta = trainer.train_problem.weights + 0.05
    estimator = dataclasses.replace(trainer.decomposer.gradient, samples=192)
    estimates = torch.cat([estimator.at(theta, t).rows.clone() for t in range(60)])
    indices = torch.randint(200, (960, 12), generator=torch.Generator().manual_seed(1))
    drawn = trainer.train_problem.gather(indices)
    own = torch.empty_like(estimates)
    trainer.stack.gradients(
        theta.expand(960, -1), *drawn, out=own, training=Training({}, lambda learner, micro: 0)
    )
    error = (estimates.var(0) + own.var(0)).div(960).sqrt()
    z = ((estimates.mean(0) - own.mean(0)) / error)[error > 1e-9]
    assert len(z) > 60
    assert 0.5 < float(z.square().mean().sqrt()) < 1.5


def test_dropout_is_drawn_for_each_learner_step_and_microbatch() -> None:
    trainer = Trainer(chosen(model=DROPOUT | {"dropout": 0.5}))
    x, y = trainer.train_problem.gather(torch.arange(12))
    same = [t.expand(3, *t.shape) for t in (x, y)]
    points = trainer.train_problem.weights.expand(3, -1)

    def gradients(step: int) -> Tensor:
        out = torch.empty(3, trainer.train_problem.layout.size, dtype=torch.float64)
        trainer.stack.gradients(points, *same, out=out, training=trainer.buffers.training(step))
        return out

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = gradients(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, gradients(1))
    assert not torch.equal(first, gradients(2))
    assert not torch.equal(first[0], first[1])
    seeds = {trainer.buffers.training(t).seed(j, i) for t in (1, 2) for j in range(3) for i in range(3)}
    assert len(seeds) == 18
    # There is no dropout where the network is judged.
    assert trainer.test_problem.loss() == trainer.test_problem.loss()


def test_a_diverged_run_keeps_the_statistics_of_its_last_finite_state() -> None:
    values = {"dtype": "float32", "lr": 1e30, "decompose": {"every": 0}, "evaluate": {"every": 0}}
    end = Trainer(chosen(**values)).run()
    assert end.diverged
    assert all(bool(torch.isfinite(t).all()) for t in (end.weights, *end.buffers.values()))
    assert int(end.buffers["1.num_batches_tracked"][0]) == end.step


def test_a_checkpoint_without_statistics_is_not_resumed(tmp_path: Path) -> None:
    end = launch.launch(chosen(steps=5), tmp_path)
    end.buffers = {}
    end.save(tmp_path / "last.h5")
    with pytest.raises(OperationError, match=r"holds no buffer '1.running_mean'"):
        launch.launch(chosen(steps=9), tmp_path, resume=True)


def test_statistics_come_along_with_the_weights_of_another_run(ended: tuple[Checkpoint, Path]) -> None:
    end, path = ended
    trainer = Trainer(chosen(init={"checkpoint": str(path)}, seed=3))
    assert end.mean_buffers
    for name, value in end.mean_buffers.items():
        torch.testing.assert_close(trainer.buffers.local[name], value.expand(3, *value.shape))
    torch.testing.assert_close(trainer.weights, end.mean.expand(3, -1))


# Learners of convolutional networks, looped or batched: the same gradients, and one choice for a whole run.


def images(model: nn.Module) -> landscape.Problem:
    torch.manual_seed(3)
    data = torch.randn(24, 3, 32, 32, dtype=torch.float64), torch.randint(10, (24,))
    return landscape.Problem(model.double(), F.cross_entropy, data, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", slow_but(["lenet-5", "resnet-20"], ["lenet-5", "resnet-20", "shufflenet-v2"])
)
@pytest.mark.parametrize("training", ["evaluated", "statistics kept", "statistics dropped"])
def test_batched_learners_have_the_gradients_and_statistics_of_looped_ones(name: str, training: str) -> None:
    n, batch = 3, 4
    found = images(landscape.models.build(name, width=0.25))
    weights = found.weights + 0.01 * torch.randn(n, found.weights.numel(), dtype=torch.float64)
    x, y = (t.view(n, 2 * batch, *t.shape[1:]) for t in found.tensors or ())
    results = []
    for batched in (False, True):
        ways = Stack(found, accumulate=2)
        ways.batched = batched
        kept = dict(ways.training_model.named_buffers()) if training == "statistics kept" else {}
        kept = {k: v.detach().expand(n, *v.shape).clone() for k, v in kept.items()}
        state = None if training == "evaluated" else Training(kept, lambda j, i: 0)
        out = torch.empty_like(weights)
        losses = ways.gradients(weights, x, y, out, state)
        if state is None:
            torch.testing.assert_close(ways.losses(weights, x, y), losses, rtol=1e-12, atol=0)
        results.append((out, losses, dict(state.buffers) if state else {}))
    (a, losses_a, own_a), (b, losses_b, own_b) = results
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(losses_a, losses_b, rtol=1e-12, atol=0)
    for key in own_a:
        torch.testing.assert_close(own_a[key], own_b[key], rtol=1e-12, atol=1e-12)


def test_dropout_and_what_does_not_fit_are_looped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Dropout(), nn.Flatten(), nn.Linear(1800, 10))
    found = images(model)
    weights = found.weights.repeat(3, 1)
    x, y = (t.view(3, 8, *t.shape[1:]) for t in found.tensors or ())
    assert not Stack(found).batching_pays(weights, x, y, Training({}, lambda j, i: 0))
    plain = images(landscape.models.build("lenet-5", width=0.25))
    monkeypatch.setattr(learners, "MAX_TIME_SHARE", 1e9)
    weights = plain.weights.repeat(3, 1)
    assert Stack(plain).batching_pays(weights, x, y, None)
    assert not Stack(plain).batched
    monkeypatch.setattr(learners, "MAX_BATCHED_BYTES", 1000)
    assert not Stack(plain).batching_pays(weights, x, y, None)


@pytest.mark.slow
def test_a_run_keeps_to_its_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path))
    run = chosen(
        learners=2, batch=8, lr=0.05, steps=4, dtype="float32", algorithm={"name": "dpsgd"},
        model={"name": "resnet-20", "width": 0.25}, data={"name": "digits", "form": "image"},
        decompose={"every": 0}, evaluate={"every": 0}, checkpoint={"every": 2},
    )  # fmt: skip
    saved: list[Checkpoint] = []
    monkeypatch.setattr(learners, "MAX_TIME_SHARE", 1e9)  # batched, however long that takes
    whole = Trainer(run, hooks=Hooks(save=lambda state: saved.append(copy.deepcopy(state))))
    end = whole.run()
    assert whole.stack.batched
    assert end.shared[STATE].tolist() == [1]
    monkeypatch.setattr(learners, "MAX_TIME_SHARE", 0.0)  # from now on any trial would find the other way
    middle = next(c for c in saved if c.step == 2)
    resumed = Trainer(run, checkpoint=middle)
    np.testing.assert_array_equal(resumed.run().weights, end.weights)
    assert resumed.stack.batched
    # A fresh run goes by what was found before, on the same machine.
    again = Trainer(run)
    np.testing.assert_array_equal(again.run().weights, end.weights)

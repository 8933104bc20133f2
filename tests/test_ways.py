"""Learners of convolutional networks, looped or batched: the same gradients, and one choice for a whole run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape.gradients import learners
from landscape.gradients.learners import Stack, Training
from landscape.models import build
from landscape.problem.problem import Problem
from landscape.training.recipes.recipe import Recipe, from_values
from landscape.training.run import setup
from landscape.training.run.loop import Hooks, Trainer
from tests.conftest import slow_but


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path / "cache"))


def problem(model: torch.nn.Module, samples: int = 24) -> Problem:
    torch.manual_seed(3)
    data = torch.randn(samples, 3, 32, 32, dtype=torch.float64), torch.randint(10, (samples,))
    return Problem(model.double(), torch.nn.functional.cross_entropy, data, dtype=torch.float64)


def buffers(model: torch.nn.Module, learners: int) -> dict[str, torch.Tensor]:
    return {k: v.detach().expand(learners, *v.shape).clone() for k, v in model.named_buffers()}


@pytest.mark.parametrize(
    "name", slow_but(["lenet-5", "resnet-20"], ["lenet-5", "resnet-20", "shufflenet-v2"])
)
@pytest.mark.parametrize("training", ["evaluated", "statistics kept", "statistics dropped"])
def test_batched_learners_have_the_gradients_and_statistics_of_looped_ones(name: str, training: str) -> None:
    n, batch = 3, 4
    found = problem(build(name, width=0.25))
    weights = found.weights + 0.01 * torch.randn(n, found.weights.numel(), dtype=torch.float64)
    x, y = (t.view(n, 2 * batch, *t.shape[1:]) for t in found.tensors or ())
    results = []
    for batched in (False, True):
        ways = Stack(found, accumulate=2)
        ways.batched = batched
        kept = buffers(ways.training_model, n) if training == "statistics kept" else {}
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


def test_dropout_and_what_does_not_fit_are_looped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 2, 3), torch.nn.Dropout(), torch.nn.Flatten(), torch.nn.Linear(1800, 10)
    )
    found = problem(model)
    weights = found.weights.repeat(3, 1)
    x, y = (t.view(3, 8, *t.shape[1:]) for t in found.tensors or ())
    assert not Stack(found).batching_pays(weights, x, y, Training({}, lambda j, i: 0))
    plain = problem(build("lenet-5", width=0.25))
    monkeypatch.setattr(learners, "MAX_TIME_SHARE", 1e9)
    weights = plain.weights.repeat(3, 1)
    assert Stack(plain).batching_pays(weights, x, y, None)
    assert not Stack(plain).batched
    monkeypatch.setattr(learners, "MAX_BATCHED_BYTES", 1000)
    assert not Stack(plain).batching_pays(weights, x, y, None)


def recipe(steps: int = 4) -> Recipe:
    values: dict[str, Any] = {
        "name": "ways", "learners": 2, "batch": 8, "lr": 0.05, "steps": steps,
        "algorithm": {"name": "dpsgd"}, "model": {"name": "resnet-20", "width": 0.25},
        "data": {"name": "digits", "form": "image"}, "decompose": {"every": 0}, "evaluate": {"every": 0},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    return from_values(values)


@pytest.mark.slow
def test_a_run_keeps_to_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[landscape.Checkpoint] = []
    monkeypatch.setattr(learners, "MAX_TIME_SHARE", 1e9)  # batched, however long that takes
    whole = Trainer(recipe(), hooks=Hooks(save=lambda state: saved.append(copy.deepcopy(state))))
    end = whole.run()
    assert whole.stack.batched
    assert end.shared[setup.STATE].tolist() == [1]
    monkeypatch.setattr(learners, "MAX_TIME_SHARE", 0.0)  # from now on any trial would find the other way
    middle = next(c for c in saved if c.step == 2)
    resumed = Trainer(recipe(), checkpoint=middle)
    np.testing.assert_array_equal(resumed.run().weights, end.weights)
    assert resumed.stack.batched
    # A fresh run goes by what was found before, on the same machine.
    again = Trainer(recipe())
    np.testing.assert_array_equal(again.run().weights, end.weights)

"""Calls that are recorded and replayed: on the CPU with a graph that computes the recorded call again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import Problem
from landscape.core import devices
from landscape.core.devices import CALLS, Captured
from landscape.curvature.chain_hessian import ChainHessian
from landscape.gradients.learners import Stack, Training
from tests.problems import conv, mlp


class Again:
    """A graph whose replay computes the recorded call again, in the memory of the first result."""

    replays = 0

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def record(self, call: Callable[[], Tensor]) -> Tensor:
        self.call, self.result = call, call()
        return self.result

    def replay(self) -> None:
        Again.replays += 1
        self.result.copy_(self.call())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Again]:
    monkeypatch.setitem(devices.GRAPHS, "cpu", Again)
    monkeypatch.setattr(Again, "replays", 0)
    return Again


def test_a_call_is_replayed_from_its_fourth_on(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count, captured = 0, Captured()

    def cube(t: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return t**3

    results = [captured(cube, torch.full((2,), float(k))) for k in range(6)]
    assert [float(r[1]) for r in results] == [k**3 for k in range(6)]  # no result is the graph's own memory
    assert captured.replays == 6 - CALLS + 1  # the first is compared
    assert captured(cube, torch.full((2,), torch.nan)).isnan().all()
    before, replays = count, captured.replays
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, requires_grad=True)):
        assert torch.equal(captured(cube, other), other**3)
    captured(cube, torch.ones(2), state="another state")
    monkeypatch.setattr(devices, "MAX_NUMBERS", 1)
    captured(cube, torch.ones(2))
    monkeypatch.undo()  # the CPU has no graphs
    captured(cube, torch.ones(1))
    assert (count, captured.replays) == (before + 6, replays)


calls = iter(range(100))


@pytest.mark.parametrize(("function", "reason"), [
    (lambda t: t + next(calls), "a replay gives other numbers"),
    (lambda t: t * 2 if t.sum() else torch.linalg.cholesky(t), "linalg.cholesky: The input tensor"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_called(
    function: Callable[[Tensor], Tensor],
    reason: str,
    graphs: type[Again],
    caplog: pytest.LogCaptureFixture,
) -> None:
    captured = Captured()
    with caplog.at_level(logging.INFO, "landscape.core.devices"):
        for _ in range(6):
            captured(function, torch.ones(2))
    assert captured.failure.startswith(reason)
    assert captured.replays <= 1
    assert [r.message for r in caplog.records] == [f"<lambda> is not replayed: {captured.failure}"]


@pytest.mark.parametrize("make", [mlp, conv])
@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton"])
def test_searches_replay_products(make: Any, matrix: Any, request: pytest.FixtureRequest) -> None:
    plain = landscape.extreme_eigenvalues(make(), 1e-4, matrix=matrix)
    graphs = request.getfixturevalue("graphs")
    replayed = landscape.extreme_eigenvalues(make(), 1e-4, matrix=matrix)
    assert graphs.replays > plain.products / 2
    np.testing.assert_allclose(replayed.values, plain.values, 1e-12, 1e-14)  # roundings vary with alignment
    np.testing.assert_allclose(np.abs((plain.vectors * replayed.vectors).sum(1)), 1, atol=1e-6)


def test_selected_weights_are_recorded_anew(graphs: type[Again]) -> None:
    of = mlp()
    weights = torch.stack([of.weights, 2 * of.weights])
    both, second = ChainHessian(of, weights), ChainHessian(of, weights[1:])
    vectors = torch.randn_like(weights)
    for _ in range(5):
        both(vectors)
    assert graphs.replays
    both.select([1])
    for _ in range(5):
        torch.testing.assert_close(both(vectors[1:]), second(vectors[1:]), rtol=1e-12, atol=1e-14)


def test_after_a_change_in_place_autograd_decides(graphs: type[Again]) -> None:
    of = conv()
    h, v = of.hessian(), of.gradient()
    for _ in range(6):
        h @ v
    assert (before := graphs.replays)
    assert of.resident is not None
    of.resident[0].mul_(2)
    h @ v
    assert graphs.replays == before


@pytest.mark.parametrize("method", ["pointwise", "folded"])
def test_contours_replay_points(method: Any, request: pytest.FixtureRequest) -> None:
    of = conv()
    plane = landscape.random_plane(of)
    plain = landscape.contour(of, plane, (4, 5), 0.5, method=method)
    graphs = request.getfixturevalue("graphs")
    replayed = landscape.contour(of, plane, (4, 5), 0.5, method=method)
    assert graphs.replays >= 20 - CALLS
    assert np.array_equal(plain.loss, replayed.loss)
    assert np.array_equal(plain.accuracy, replayed.accuracy)
    graphs.replays = 0
    landscape.contour(of, plane, (4, 5), 0.5, method=method, max_memory=2**40)
    assert not graphs.replays  # a record has memory of its own


class Counter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x * self.calls


@pytest.mark.parametrize("kind", ["chain", "loop", "batched", "counter", "dropout", "hook", "own loss"])
def test_steps_of_training_are_replayed(kind: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.ReLU()] if kind == "chain" else [nn.BatchNorm1d(4)]
    layers += {"counter": [Counter()], "dropout": [nn.Dropout()]}.get(kind, [])
    model = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2))
    if kind == "hook":
        model[0].register_forward_hook(lambda *_: None)
    loss: Any = (lambda z, y: F.cross_entropy(z, y)) if kind == "own loss" else F.cross_entropy
    of = Problem(model, loss, (torch.randn(60, 3), torch.randint(2, (60,))), check="off")
    x, y = torch.randn(7, 3, 5, 3), torch.randint(2, (7, 3, 5))

    def steps() -> tuple[list[Tensor], dict[str, Tensor]]:
        stack, weights, losses = Stack(of), of.weights.repeat(3, 1), list[Tensor]()
        stack.batched = kind == "batched"
        buffers = {k: b.repeat(3, 1) for k, b in model.named_buffers() if b.dim()}
        out = torch.empty_like(weights)
        for t in range(7):
            training = Training(buffers, lambda learner, microbatch, t=t: t)  # type: ignore[misc]
            losses.append(stack.gradients(weights, x[t], y[t], out, training))
            weights = weights - 0.1 * out  # in other memory
        return [*losses, weights], buffers

    plain = steps()
    graphs = request.getfixturevalue("graphs")
    torch.testing.assert_close(steps(), plain, rtol=0, atol=0)
    assert graphs.replays == (7 - CALLS + 1 if kind in ("chain", "loop", "batched") else 0)


def test_branches_of_a_record_begin_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [MagicMock() for _ in range(devices.STREAMS)]
    monkeypatch.setattr(devices, "_stream", lambda device, k: streams[k])
    monkeypatch.setattr(torch, "cuda", cuda := MagicMock())
    with devices.branches(torch.device("cuda")) as branch:
        assert all(map(branch, range(devices.STREAMS + 2)))
    assert all(s.wait_stream.call_args_list == [call(cuda.current_stream.return_value)] for s in streams)
    assert cuda.current_stream.return_value.wait_stream.call_args_list == [call(s) for s in streams]
    assert cuda.stream.call_args_list == [call(stream) for stream in [*streams, *streams[:2]]]

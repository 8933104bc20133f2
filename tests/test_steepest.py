"""Steepest descent in other norms, and the sharpness in them against dense matrices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from landscape.problem.layout import Layout
from landscape.problem.problem import Problem
from landscape.training.algorithms.dpsgd import DPSGD
from landscape.training.instruments import MeasuredRun, StepState
from landscape.training.instruments.sharpness import GeneralizedSharpness
from landscape.training.optimizer import Steepest, steepest
from landscape.training.processes.comm import Comm
from landscape.training.recipes import Monitor
from tests import problems

NORMS = ["max", "spectral", "block"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(*widths: int, samples: int = 20) -> Problem:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    draw = generator()
    x, y = torch.randn(samples, widths[0], generator=draw), torch.randn(samples, widths[-1], generator=draw)
    return Problem(nn.Sequential(*layers), nn.MSELoss(), (x, y), dtype=torch.float64)


def size(norm: str, layout: Layout, w: Tensor) -> float:
    """The norm of ``w`` (P,), by its textbook definition."""
    if norm == "max":
        return float(w.abs().max())
    parts = [w[slot.place].reshape(slot.shape) for slot in layout.slots]
    if norm == "block":
        return sum(float(part.norm()) for part in parts)
    return max(float(torch.linalg.matrix_norm(torch.atleast_2d(part), 2)) for part in parts)


@pytest.mark.parametrize("norm", NORMS)
def test_the_direction_is_the_best_of_the_unit_ball(norm: str) -> None:
    layout = network(4, 3, 2).layout
    v = torch.randn(3, layout.size, generator=generator(), dtype=torch.float64)
    v[2, layout.slots[0].place] = 0  # a matrix of zeros has no direction
    d, dual = steepest(norm, layout, v)
    others = torch.randn(200, layout.size, generator=generator(1), dtype=torch.float64)
    others = torch.stack([w / size(norm, layout, w) for w in others])
    for row, best, product in zip(v, d, dual, strict=True):
        assert size(norm, layout, best) == pytest.approx(1)
        assert float(row @ best) == pytest.approx(float(product), rel=1e-12)
        assert float((others @ row).max()) < product
    assert steepest(norm, layout, torch.zeros_like(v))[0].abs().max() == 0


def test_the_steps_are_the_textbooks() -> None:
    layout = network(4, 3, 2).layout
    g = torch.randn(1, layout.size, generator=generator(), dtype=torch.float64)

    def step(norm: Any, normalized: bool = False) -> Tensor:
        optimizer = Steepest(norm, normalized)
        optimizer.start(layout, g)
        return optimizer.directions(g, g, 0.1, 1)[0]

    assert torch.allclose(step("max"), g[0].abs().sum() * g[0].sign(), rtol=1e-12)
    parts = [g[0, slot.place].reshape(slot.shape) for slot in layout.slots]
    polar = []
    for part in map(torch.atleast_2d, parts):
        left, _, right = np.linalg.svd(part.numpy(), full_matrices=False)
        polar.append(torch.from_numpy(left @ right).flatten())
    nuclear = sum(float(torch.linalg.matrix_norm(torch.atleast_2d(part), "nuc")) for part in parts)
    assert torch.allclose(step("spectral", normalized=True), torch.cat(polar), rtol=1e-9)
    assert torch.allclose(step("spectral"), nuclear * torch.cat(polar), rtol=1e-9)
    largest = max(range(len(parts)), key=lambda k: float(parts[k].norm()))
    alone = torch.zeros_like(g[0])
    alone[layout.slots[largest].place] = g[0, layout.slots[largest].place]
    assert torch.allclose(step("block"), alone, rtol=1e-12)


def measured(problem: Problem, norm: str, normalized: bool = False, lr: float = 0.5) -> dict[str, float]:
    monitor = Monitor(samples=0, k=1)
    run = MeasuredRun(
        monitor, problem, Comm(1), 0, 10, math.nan, None, geometry=(norm, normalized), plain_limit=2.0
    )
    w = problem.weights
    return GeneralizedSharpness(run).measure(StepState(1, lr, w[None], w[None], w))


def test_the_sharpness_is_the_largest_over_the_unit_ball() -> None:
    # ℓ∞: of a convex function at a corner of the cube; the Hessian of a linear model is positive.
    x, y = torch.randn(30, 9, generator=generator()), torch.randn(30, 1, generator=generator(1))
    linear = Problem(nn.Linear(9, 1, bias=False), nn.MSELoss(), (x, y), dtype=torch.float64)
    h = problems.textbook_hessian(linear)
    corners = torch.tensor([*itertools.product([-1.0, 1.0], repeat=9)], dtype=torch.float64)
    assert measured(linear, "max")["generalized_sharpness"] == pytest.approx(
        float(((corners @ h) * corners).sum(1).max()), rel=1e-9
    )
    # Blocks: the largest eigenvalue of a diagonal block, where the Hessian is positive.
    deep = network(4, 3, 2)
    deep.weights = deep.weights * 0.05
    h = problems.textbook_hessian(deep)
    blocks = [float(torch.linalg.eigvalsh(h[s.place, s.place])[-1]) for s in deep.layout.slots]
    found = measured(deep, "block")["generalized_sharpness"]
    assert max(blocks) * 0.99 <= found
    # Any norm: no point of the ball that chance finds is higher, and the value is that of a point.
    for norm in NORMS:
        found = measured(deep, norm)["generalized_sharpness"]
        others = torch.randn(3000, deep.layout.size, generator=generator(2), dtype=torch.float64)
        others = torch.stack([w / size(norm, deep.layout, w) for w in others])
        assert ((others @ h) * others).sum(1).max() < found


@pytest.mark.parametrize("norm", NORMS)
def test_the_sharpness_of_rank_one_is_the_square_of_the_dual_norm(norm: str) -> None:
    x = torch.tensor([[1.0, -2.0, 0.5]])
    problem = Problem(nn.Linear(3, 1, bias=False), nn.MSELoss(), (x, torch.ones(1, 1)), dtype=torch.float64)
    dual = 3.5 if norm == "max" else float(x.norm())
    row = measured(problem, norm)
    assert row["generalized_sharpness"] == pytest.approx(2 * dual**2, rel=0.02)
    assert (row["lr_generalized_sharpness"], row["lr_generalized_limit"]) == (
        pytest.approx(0.5 * row["generalized_sharpness"]), 2.0,
    )  # fmt: skip
    g = problems.textbook_gradient(problem, problem.weights)
    size = float(g.abs().sum() if norm == "max" else g.norm())
    assert measured(problem, norm, normalized=True)["lr_generalized_sharpness"] == pytest.approx(
        0.5 * row["generalized_sharpness"] / size
    )


@pytest.mark.parametrize(("order", "limit"), [("awc", 2 / 3), ("atc", 2.0)])
@pytest.mark.parametrize("norm", NORMS)
def test_curvature_of_rank_one_has_the_limit_of_the_rule(norm: str, order: Any, limit: float) -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 0.3, 1.5, -0.7], dtype=torch.float64)  # H = xxᵀ
    layout = network(2, 2).layout
    assert DPSGD(6, 0, "ring(1)", order).stability_limit() == pytest.approx(limit)
    sharpness = float(steepest(norm, layout, x[None])[1]) ** 2
    for factor, grows in ((0.97, False), (1.03, True)):
        rule, optimizer = DPSGD(6, 0, "ring(1)", order), Steepest(norm)
        w = 1e-3 * torch.randn(6, 6, generator=generator(), dtype=torch.float64)
        rule.start(w)
        optimizer.start(layout, w)
        start = float((w @ x).abs().max())
        for step in range(1, 600):
            rule.begin(w, step)
            g = (w @ x)[:, None] * x
            lr = factor * limit / sharpness
            w = rule.finish(w, optimizer.directions(g, w, lr, step), lr, step).clone()
        assert (float((w @ x).abs().max()) > start) == grows

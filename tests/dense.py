"""A user's own module and loss in plain PyTorch, and what a problem says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape import InputError, Problem
from landscape.curvature.hessian import HessianOperator, Part


def dense_hessian(
    problem: Problem, theta: Tensor | None = None, *, kind: str = "hessian", part: Part = None
) -> Tensor:
    """∇²L(θ), or its Gauss-Newton part, or a block of it, as a matrix, for very small models: P products."""
    made = HessianOperator(problem, theta, matrix=kind, part=part)
    eye = torch.eye(made.size, dtype=made.problem.dtype, device=problem.device)
    return torch.stack([made(e) for e in eye], dim=1)


def dense(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and Hessian in the parameters, by double backward."""
    parameters = list(model.parameters())
    value = loss()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, create_graph=True)])
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True) for g in gradient]
    return (
        float(value.detach()),
        gradient.detach(),
        torch.stack([torch.cat([p.flatten() for p in r]) for r in rows]),
    )


def same_ends(
    problem: Problem, truth: Tensor, rel: float | None = 1e-5, abs: float | None = None, **options: Any
) -> None:
    """The ends of the spectrum of ``problem`` are those of the matrix ``truth``."""
    values = torch.linalg.eigvalsh(truth)
    ends = landscape.extreme_eigenvalues(problem, **{"residual_tol": 1e-6} | options)
    assert (ends.min, ends.max) == pytest.approx((float(values[0]), float(values[-1])), rel=rel, abs=abs)


def agrees(problem: Problem, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Loss, first points of contour and line, gradient, eigenvalues and trace of ``problem`` are the dense ones."""
    value, gradient, hessian = dense(model, loss)
    assert problem.loss() == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(problem.gradient(), gradient, rtol=1e-7, atol=1e-9)
    plane, to = landscape.random_plane(problem), torch.stack((problem.weights, problem.weights + 1))
    assert landscape.contour(problem, plane, grid=(1, 1)).loss[0, 0] == pytest.approx(value, rel=1e-9)
    assert landscape.line(problem, *to, points=2).loss[0] == pytest.approx(value, rel=1e-9)
    same_ends(problem, hessian, abs=1e-5 * float(torch.linalg.eigvalsh(hessian)[-1]))


def remedied(error: InputError, model: nn.Module, loss: Any, data: Any) -> Problem:
    """What the code of the remedy makes."""
    names = {"landscape": landscape, "torch": torch, "model": model, "loss": loss, "data": data}
    problem = eval(error.remedy, names)
    assert isinstance(problem, Problem)
    return problem

"""The curvature of a loss along its own gradient."""

from __future__ import annotations

import math

from torch import Tensor

from landscape.core.errors import FailedError
from landscape.curvature.hessian import HessianOperator
from landscape.curvature.precision import in_full_precision
from landscape.problem.problem import Problem


def gradient_curvature(problem: Problem, theta: Tensor | None = None) -> tuple[float, float]:
    """gᵀHg/‖g‖² and ‖g‖², g = ∇L(θ) and H = ∇²L(θ), by one gradient and one product over all samples.

    Args:
        problem: the loss, such as that of one minibatch.
        theta: θ (P,); default: the problem's centre.

    Raises:
        FailedError: a gradient that is zero, or numbers that are not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> round(gradient_curvature(problem, torch.tensor([1.0, 0.0]))[0], 4)  # H = diag(1, 9)
        1.0
    """
    problem = in_full_precision(problem)
    theta = (problem.theta if theta is None else theta).to(problem.dtype)
    g = problem.gradient(theta)
    product = HessianOperator(problem, theta)(g)
    norm2, curved = float(g.double() @ g.double()), float(g.double() @ product.double())
    if not math.isfinite(norm2 + curved):
        raise FailedError("weights: gradient or Hessian of a minibatch is not finite at these weights")
    if norm2 == 0:
        raise FailedError(
            f"batch: the gradient of a minibatch of {problem.samples} samples is zero at these weights, so "
            "that there is no curvature along it"
        )
    return curved / norm2, norm2

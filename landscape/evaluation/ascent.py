"""The largest loss within a distance of the weights, by projected gradient ascent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from landscape.problem.problem import Problem

# First step relative to the radius (that of APGD; Croce and Hein 2020), its factors after a success and a
# failure (ours), and the step below which a search ends (ours: it then changes the loss no more).
FIRST, LONGER, SHORTER, LAST = 2.0, 1.5, 0.4, 1e-3
# The search also ends where gradient and displacement are parallel to this angle in radians, as at a maximum
# on the sphere: the loss is then lower by half its square at most, relatively (ours).
PARALLEL = 1e-3


class Ascent(NamedTuple):
    """``rise``: the largest loss that was found less ``base``, that at the centre; ``residual``: the angle
    between gradient and displacement there, in radians, 0 at a maximum on the sphere; and ``gradients``.
    """

    rise: float
    base: float
    residual: float
    gradients: int


def largest_rise(
    problem: Problem, theta: Tensor, scale: Tensor | None, rho: float, starts: list[Tensor], steps: int
) -> Ascent:
    """The largest L(θ + scale·ε) − L(θ) over ‖ε‖ ≤ ρ that ``steps`` gradients from each start find.

    A lower bound of the maximum: the problem is not convex. The first start is ρ times the direction of the
    gradient, the maximum to first order (Foret et al. 2021), where the gradient is not zero.

    Args:
        problem: the loss.
        theta: θ (P,).
        scale: (P,), such as |θ|; None: 1 for all.
        rho: ρ.
        starts: further directions (P,) in which the search starts.
        steps: gradients for each start, at most.
    """
    base, slope = _loss_and_slope(problem, theta, scale)
    best = Ascent(0.0, base, 0.0, 1)  # ε = 0 is allowed, too
    for start in ([slope] if float(slope.norm()) > 0 else []) + starts:
        found = _climb(problem, theta, scale, rho, start, steps)
        higher = found.rise - base > best.rise
        best = Ascent(
            found.rise - base if higher else best.rise,
            base,
            found.residual if higher else best.residual,
            best.gradients + found.gradients,
        )
    return best


def _loss_and_slope(problem: Problem, at: Tensor, scale: Tensor | None) -> tuple[float, Tensor]:
    """The loss at ``at``, and its gradient in ε."""
    loss, gradient = problem.loss_and_gradient(at)
    return loss, gradient if scale is None else gradient.mul_(scale)


def _climb(
    problem: Problem, theta: Tensor, scale: Tensor | None, rho: float, start: Tensor, steps: int
) -> Ascent:
    """From ``start``, scaled to norm ρ; the step grows where the loss does, and shrinks where it falls."""
    at, step = start * (rho / float(start.norm())), FIRST
    loss, slope = _loss_and_slope(problem, _moved(theta, scale, at), scale)
    used, angle = 1, _angle(slope, at, rho)
    while used < steps and step > LAST and angle > PARALLEL and float(slope.norm()) > 0:
        other = torch.add(at, slope, alpha=step * rho / float(slope.norm()))
        other *= min(1.0, rho / float(other.norm()))
        value, gradient = _loss_and_slope(problem, _moved(theta, scale, other), scale)
        used += 1
        if value > loss:  # False for NaN
            at, loss, slope, step = other, value, gradient, step * LONGER
            angle = _angle(slope, at, rho)
        else:
            step *= SHORTER
    return Ascent(loss, 0.0, angle, used)


def _moved(theta: Tensor, scale: Tensor | None, at: Tensor) -> Tensor:
    return theta + at if scale is None else torch.addcmul(theta, scale, at)


def _angle(slope: Tensor, at: Tensor, rho: float) -> float:
    """The angle between gradient and displacement; π inside the ball, where the gradient must vanish."""
    size, length = float(slope.double().norm()), float(at.double().norm())
    if size == 0:
        return 0.0
    if length < rho * (1 - 1e-6):
        return torch.pi
    between = slope.double() / size - at.double() / length
    return 2 * float(torch.asin((between.norm() / 2).clamp(max=1)))

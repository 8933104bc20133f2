"""Sharpness: the rise of the loss within a distance, at worst or on average."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.memory import bounded
from landscape.core.options import choose, expect, positive
from landscape.core.progress import Progress
from landscape.core.statistics import mean_and_error, standard_error
from landscape.curvature.krylov import start_vector
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import Minibatches, stream
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.flatness import Sharpness

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


KINDS = ("worst", "average")
# Gradients of one search (Andriushchenko et al. 2023 take 20 on CIFAR-10), and random starts of it besides
# that along the gradient (ours: at a minimum the gradient is mostly noise).
STEPS, STARTS = 20, 1
# A relative standard error of 5% in at most 256 draws, not judged before the 32nd (ours: an error from fewer
# is itself wrong by an eighth).
TOL, DRAWS, FEWEST = 0.05, 256, 32


@bounded(needs.sharpness)
def sharpness(
    problem: Problem,
    rho: float,
    kind: str = "worst",
    *,
    adaptive: bool = True,
    m: int | None = None,
    steps: int = STEPS,
    starts: int = STARTS,
    tol: float = TOL,
    max_draws: int = DRAWS,
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Sharpness:
    """How far the loss rises within ρ of the weights: (adaptive) worst-case or average-case m-sharpness.

    The definitions are those of Andriushchenko et al. (arXiv 2302.07011), after Kwon et al. (2021) for
    ``adaptive`` and Foret et al. (2021) for ``m``, with the logits as they are; pairs ±δ and the search are
    ours. Adaptive sharpness does not change where the weights of two layers are scaled so that the network
    stays the same. Neither kind predicts generalisation well: over modern networks its correlation with the
    test error is low, and may be negative (arXiv 2302.07011). BatchNorm has the statistics of the problem at
    all weights, not those of the minibatches.

    Args:
        problem: the loss.
        rho: ρ: the radius ("worst"), or the standard deviation of each component of δ/c ("average").
        kind: "worst" or "average".
        adaptive: c = |w|, so that each weight moves in proportion to its size; else c = 1.
        m: samples of a minibatch, over which the sharpness is a mean; default: all samples at once.
        steps: gradients for each start of a search, at most.
        starts: random starts of a search, besides that along the gradient.
        tol: draws go on until the standard error is this share of the value…
        max_draws: …or until there are so many: minibatches, or pairs ±δ; at least 2.
        seed: draws minibatches, displacements and starts.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        ``value`` and ``standard_error`` in nats; for kind "worst" and all samples nothing is drawn.

    Raises:
        InputError: a number or kind that is not allowed, ``m`` above the number of samples, or weights that
            are all 0 with ``adaptive``.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> problem.theta.zero_()  # the minimum; H has the eigenvalues 1 and 9
        tensor([0., 0.])
        >>> round(landscape.sharpness(problem, 0.1, adaptive=False).value, 4)  # 9ρ²/2
        0.045
    """
    choose("kind", kind, KINDS)
    expect("problem", problem, Problem)
    positive("rho", rho)
    positive("tol", tol)
    for name, value, least in (("steps", steps, 1), ("starts", starts, 0), ("max_draws", max_draws, 2)):
        positive(name, value, least=least)
    theta = problem.theta
    scale = theta.abs() if adaptive else None
    if scale is not None and not bool(scale.any()):
        raise InputError("adaptive: all weights are 0, so that none could move; give adaptive=False")
    if m is not None:
        positive("m", m, least=1)
        if m > problem.data.samples:
            raise InputError(f"m: {m} is not allowed, the data has {problem.data.samples} samples")
    start_vector(problem, seed, 1)  # refuses a seed below 0
    fixed = kind == "worst" and m is None
    drawn = _Draws(problem, float(rho), scale, _parts(problem, m, seed), stream(seed, 1))
    whole = problem.loss() if kind == "average" and m is None else None
    found: list[Ascent] = []
    reached = False
    while not reached and len(found) < (1 if fixed else max_draws):
        found.append(drawn.worst(steps, starts) if kind == "worst" else drawn.pair(whole))
        reached = fixed or (len(found) >= FEWEST and _relative_error([each.rise for each in found]) <= tol)
        if progress:
            progress(1.0 if reached else len(found) / max_draws)
    rises = np.array([each.rise for each in found])
    return Sharpness(
        values=rises,
        standard_error=0.0 if fixed else standard_error(rises),
        loss=float(np.mean([each.base for each in found])),
        kind=kind,
        rho=float(rho),
        adaptive=adaptive,
        m=m or 0,
        reached=reached,
        residual=float(np.mean([each.residual for each in found])),
        gradients=sum(each.gradients for each in found) + (whole is not None),
        steps=steps if kind == "worst" else 0,
        starts=starts if kind == "worst" else 0,
        fixed=0 if scale is None else int((scale == 0).sum()),
        parameters=len(theta),
        seed=seed,
        **setting(problem),
        **about,
    )


@dataclass(frozen=True)
class _Draws:
    """What is drawn: minibatches (or all samples, always the same), displacements and starts."""

    problem: Problem
    rho: float
    scale: Tensor | None
    parts: Iterator[Problem]
    generator: torch.Generator

    def normal(self) -> Tensor:
        """(P,), the same draw on every device."""
        theta = self.problem.theta
        drawn = torch.randn(len(theta), dtype=torch.float64, generator=self.generator).to(theta)
        return self.problem.along_weights(drawn)

    def worst(self, steps: int, starts: int) -> Ascent:
        """The largest rise of one minibatch's loss."""
        part = next(self.parts)
        directions = [self.normal() for _ in range(starts)]
        return largest_rise(part, part.theta, self.scale, self.rho, directions, steps)

    def pair(self, base: float | None) -> Ascent:
        """The mean rise at ±δ, in which odd terms cancel; ``base``: the loss at the centre, if known."""
        part, shift = next(self.parts), self.normal() * self.rho
        shift = shift if self.scale is None else shift * self.scale
        known = part.loss() if base is None else base
        rise = (part.loss(part.theta + shift) + part.loss(part.theta - shift)) / 2 - known
        return Ascent(rise, known, 0.0, 2 + (base is None))


def _parts(problem: Problem, m: int | None, seed: int) -> Iterator[Problem]:
    """Minibatches of ``m`` samples, drawn with replacement; None: the problem itself, again and again."""
    if m is None:
        return itertools.repeat(problem)
    drawn = Minibatches(problem, m, stream(seed, 0), own_statistics=False)
    return (part for (part,) in drawn)


def _relative_error(values: list[float]) -> float:
    """The standard error of the mean of ``values``, relative to it; infinite for a mean of 0."""
    mean, error = mean_and_error(np.array(values))
    return error / abs(mean) if mean else math.inf

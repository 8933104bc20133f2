"""How wide the basin around a problem's centre is at one rise of the loss, over several random planes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from landscape.analysis.planes import random_plane
from landscape.core.errors import FailedError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.core.progress import Progress
from landscape.evaluation.evaluate import evaluator
from landscape.problem.problem import Problem
from landscape.results.grids import SPAN

# Directions in each plane, at equal angles (ours): the area of an ellipse is then right within 0.03% for axes
# of 1 : 2 and within 3.4% for 1 : 4; random planes in many dimensions are rounder.
ANGLES = 16
# The loss at the distances found is right within this share of the rise (ours: widths within 0.1%).
EXACT = 2e-3
# Steps of the search, and the factor between two tries of a distance that is too small (ours).
STEPS, FACTOR = 100, 2.0
# A rise below so many roundings of the loss cannot be measured (ours).
ROUNDINGS = 1000


def basin_widths(
    problem: Problem, rise: float, planes: int, *, seed: int = 0, progress: Progress | None = None
) -> Array:
    """(planes,), the width of the region around the centre in which the loss rises by less than ``rise``.

    In each of several planes along two i.i.d. normal directions, the same for every problem of that seed and
    size, the distance at which the loss has risen that far is found in 16 directions. The width is the
    diameter of the circle with the area inside, 2 √(mean of the squared distances): for a basin that each
    ray leaves once it is :attr:`.Basins.equivalent_width`, without a grid. Distances are Euclidean ones in
    weight space, so that they depend on how the network is scaled.

    Args:
        problem: the loss.
        rise: in nats.
        planes: how many; each takes about 150 losses.
        seed: draws the directions.
        progress: called with the share of the planes done.

    Raises:
        InputError: a rise that is not positive, or a model with one parameter.
        FailedError: a loss that is not finite, a rise that rounding hides, or one that is never reached in
            some direction.

    Example:
        >>> import torch, landscape
        >>> x, y = 2**0.5 * torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> problem.theta.zero_()
        tensor([0., 0.])
        >>> basin_widths(problem, 0.25, 2).round(2).tolist()  # ‖w‖² < 0.25
        [1.0, 1.0]
    """
    positive("rise", rise)
    positive("planes", planes, least=1)
    positive("parameters of the model", problem.layout.size, least=2)
    start, widths = np.full(ANGLES, SPAN * math.sqrt(problem.layout.size)), []
    angles = 2 * math.pi * torch.arange(ANGLES, dtype=torch.float64) / ANGLES
    circle = torch.stack((angles.cos(), angles.sin()), 1)
    for k, own in enumerate(np.random.SeedSequence(seed).generate_state(planes).tolist()):
        drawn = random_plane(problem, seed=own).directions.double()
        unit = torch.linalg.qr(drawn.T)[0].T.to(problem.theta)
        loss = evaluator(problem, problem.theta, unit, ANGLES)
        base = float(loss(torch.zeros(1, 2, dtype=torch.float64)).loss[0])
        _check(problem, base, rise)

        def risen(distance: Array, loss: object = loss, base: float = base) -> Array:
            points = circle * torch.from_numpy(distance)[:, None]
            values: Array = loss(points).loss.numpy() - base  # type: ignore[operator]
            return np.where(np.isfinite(values), values, np.inf)

        start = _distances(risen, rise, start)
        widths.append(2 * math.sqrt(float(np.mean(start**2))))
        if progress:
            progress((k + 1) / planes)
    return np.array(widths)


def _check(problem: Problem, base: float, rise: float) -> None:
    if not math.isfinite(base):
        raise FailedError(f"weights: the loss there is {base:g}, so that nothing rises above it")
    if rise < ROUNDINGS * torch.finfo(problem.dtype).eps * abs(base):
        raise FailedError(
            f"rise: {rise:g} is hidden by the rounding of a loss of {base:g}; give a larger one"
        )


def _distances(risen: Callable[[Array], Array], rise: float, start: Array) -> Array:
    """The distances at which ``risen`` passes ``rise``, from below, in all directions together.

    Each is between one that is too small and one that is too large, by the secant in the squared distance,
    which is exact for a quadratic, and by halves where that is slow.
    """
    low, high, at = np.zeros_like(start), np.full_like(start, np.inf), start
    below, above = np.zeros_like(start), np.full_like(start, np.inf)  # the rises at both ends
    for step in range(STEPS):
        now = risen(at)
        under = now <= rise
        low, below = np.where(under, at, low), np.where(under, now, below)
        high, above = np.where(under, high, at), np.where(under, above, now)
        done = (np.abs(now - rise) <= EXACT * rise) | (np.isfinite(high) & (low >= (1 - EXACT / 4) * high))
        if done.all():
            return at
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            share = (rise - below) / (above - below)
            secant = np.sqrt(low**2 + share * (high**2 - low**2))
        inside = np.isfinite(secant) & (secant > low) & (secant < high) & (step % 3 < 2)
        between = np.where(inside, secant, (low + high) / 2)
        other = np.where(np.isinf(high), FACTOR * at, between)
        at = np.where(done, at, other)
    raise FailedError(f"rise: the loss does not rise by {rise:g} in all directions; give a smaller rise")

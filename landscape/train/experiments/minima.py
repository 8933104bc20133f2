"""Minima stability (Delay-2019): from a trained minimum, the largest rate at which delayed training stays.

The prediction is for the gradient of the whole training set, and so is the experiment: minibatches would add
noise of their own, and with it other limits (:func:`landscape.stability.max_stable_step`, ``noise``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Unpack

import numpy as np
from torch import Tensor

from landscape.core.errors import FailedError, InputError
from landscape.core.options import positive
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.evaluation.paths import Progress
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.minima import Minima
from landscape.stability import limits, max_stable_step, polynomials
from landscape.train import algorithms
from landscape.train.optimizer import SGD

# All ours. The start lies so much of ‖w‖ away from the minimum: far above rounding in float32 and what the
# minimum itself still drifts, and near enough for the loss to be nearly quadratic.
DISPLACEMENT = 1e-3
# A run has left where its loss ever is as much above the minimum's as FACTOR times the displacement would
# bring it: so it counts as leaving, too, if it is thrown out and settles in a flatter place nearby, and
# drifting along flat directions, by which the loss falls, does not. Stable runs reach 5 displacements.
FACTOR = 10.0
# A run is long enough for what grows at EXCESS above the predicted limit to grow by e^GROWTH, twice FACTOR.
# On exact quadratics the rates found are then up to 8% too large.
EXCESS, GROWTH, LEAST_STEPS = 0.1, 3.0, 100
# The search begins at predicted/WIDEN and predicted·WIDEN, and widens so often where these do not differ.
WIDEN, ATTEMPTS = 1.3, 10


def minima(
    problem: Problem,
    delays: Sequence[int],
    momentum: float = 0.9,
    *,
    weight_decay: float = 0.0,
    tol: float = 0.07,
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Minima:
    """Search for each of ``delays`` and three forms of momentum the largest rate that stays at the minimum.

    The minimum is the problem's centre, of its loss plus ½ ``weight_decay`` ‖w‖² (the optimizer's). Rates are
    bisected until that at which training leaves is at most 1 + ``tol`` times that at which it stays.
    ``momentum`` as in :func:`.stability`; ``seed`` draws where the search for λ_max
    starts.

    Raises InputError where nothing curves upwards, FailedError where training leaves at any rate, or at none.
    """
    positive("tol", tol)
    positive("weight_decay", weight_decay, least=0)
    table, center = limits(delays, momentum), problem.theta
    top = top_eigenvalues(problem, 1, seed=seed)
    curvature = float(top.values[0]) + weight_decay
    if not curvature > 0:
        raise InputError(f"minimum: λ_max with weight decay is {curvature:.3g}, it must be > 0")
    loss, gradient = objective(problem, center, weight_decay)
    displacement = DISPLACEMENT * float(center.norm()) or DISPLACEMENT
    start = center + displacement * top.vectors[0].to(center)
    ceiling = loss + 0.5 * curvature * (FACTOR * displacement) ** 2
    settings = ((0.0, 0.0), (momentum, 0.0), (0.0, momentum))  # the optimizer's momentum, the rule's
    columns = {name: np.zeros(table.shape) for name in ("stays", "leaves", "lambda_after")}
    steps = np.array([[length(tau, m, s) for tau in delays] for m, s in settings], dtype=np.int64)
    done = 0
    for (f, k), count in np.ndenumerate(steps):
        end_at = functools.partial(
            run, problem, start, int(count), delays[k], *settings[f], weight_decay, ceiling
        )
        low, high, end = search(end_at, float(table[f, k]) / curvature, tol)
        after = top_eigenvalues(problem, 1, theta=end, start=top.vectors[0], seed=seed)
        for column, value in zip(columns.values(), (low, high, float(after.values[0])), strict=True):
            column[f, k] = value
        done += int(count)
        if progress:
            progress(done / float(steps.sum()))
    return Minima(
        delay=np.asarray(delays, dtype=np.int64),
        predicted=table / curvature,
        steps=steps,
        momentum=momentum,
        weight_decay=weight_decay,
        lambda_max=float(top.values[0]),
        residual=float(top.residuals[0]),
        loss=loss,
        gradient_norm=float(gradient.norm()),
        displacement=displacement,
        factor=FACTOR,
        samples=problem.samples,
        stays=columns["stays"],
        leaves=columns["leaves"],
        lambda_after=columns["lambda_after"],
        **about,
    )


def objective(problem: Problem, theta: Tensor, weight_decay: float) -> tuple[float, Tensor]:
    """(L + ½ ``weight_decay`` ‖w‖², its gradient (P,)) at ``theta`` (P,), over all samples."""
    loss, gradient = problem.loss_and_gradient(theta)
    return loss + 0.5 * weight_decay * float(theta @ theta), gradient + weight_decay * theta


def length(delay: int, momentum: float, shifted: float) -> int:
    """Steps in which what grows at EXCESS above the limit grows by e^GROWTH, by the largest root there."""
    m, form = (shifted, "shifted") if shifted else (momentum, "ordinary")
    p0, p1 = polynomials(delay, m, form)
    root = np.abs(np.roots(p0 + (1 + EXCESS) * max_stable_step(delay, m, form) * p1)).max()
    return max(LEAST_STEPS, math.ceil(GROWTH / math.log(root)))


def run(
    problem: Problem,
    start: Tensor,
    steps: int,
    delay: int,
    momentum: float,
    shifted: float,
    weight_decay: float,
    ceiling: float,
    lr: float,
) -> Tensor | None:
    """Steps of the rule async-sgd, its optimizer and the gradient of all samples, called as the loop does.

    Returns the last weights (P,); None as soon as the loss where a gradient is taken, weight decay included,
    is above ``ceiling``.
    """
    rule = algorithms.make("async-sgd", {"delay": delay, "shifted": shifted}, learners=1, seed=0)
    optimizer = SGD(momentum)
    weights = start[None].clone()
    rule.start(weights)
    optimizer.start(problem.layout, weights)
    for t in range(1, steps + 1):
        rule.begin(weights, t)
        points = rule.gradient_points(weights)
        loss, gradient = objective(problem, points[0], weight_decay)
        if not loss <= ceiling:  # NaN is above, too
            return None
        directions = optimizer.directions(gradient[None], points, lr, t)
        weights = rule.finish(weights, directions, lr, t)
    return weights[0].clone()


def search(
    end_at: Callable[[float], Tensor | None], predicted: float, tol: float
) -> tuple[float, float, Tensor]:
    """A rate that stays, one at most 1 + ``tol`` times it that leaves, and where the first one ended.

    By bisection of the logarithm; ``end_at`` gives where a rate ends, None if it leaves.
    """
    low, high = predicted / WIDEN, predicted * WIDEN
    for _ in range(ATTEMPTS):
        end = end_at(low)
        if end is not None:
            break
        low, high = low / WIDEN, low
    else:
        raise FailedError(f"minimum: training leaves it even at lr {high:.3g}; train it longer first")
    for _ in range(ATTEMPTS):
        further = end_at(high)
        if further is None:
            break
        low, high, end = high, high * WIDEN, further
    else:
        raise FailedError(f"minimum: training stays even at lr {low:.3g}, {low / predicted:.3g} × predicted")
    while high > low * (1 + tol):
        middle = math.sqrt(low * high)
        further = end_at(middle)
        if further is None:
            high = middle
        else:
            low, end = middle, further
    return low, high, end

"""The times and rates at which training leaves a saddle or a minimum, for two figures of the papers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from torch import Tensor

from landscape.core.devices import vector_norm
from landscape.core.errors import OperationError
from landscape.core.hdf5 import Array
from landscape.core.registry import algorithms as rules
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.limits import limits, max_stable_step, polynomials
from landscape.models.small import Saddle
from landscape.problem.problem import Problem
from landscape.results.base import Result, Sourced
from landscape.training.optimizer.base import SGD
from landscape.training.recipes.recipe import read
from landscape.training.run.loop import Hooks, Trainer

# ---- Saddles

RECIPE = "saddle-dpsgd"
# Half of the depth lies far outside of the nearly quadratic region (ours).
SHARE = 0.5
# Name of a quantity that can be varied -> the recipe's keys that change.
VARY = {"dimension": ("model.dimension", "data.dimension"), "noise": ("data.gradient_std",), "lr": ("lr",)}
# SSGD* adds noise of this standard deviation to the weights (ours).
ALGORITHMS = {
    "ssgd": ("algorithm={name='ssgd'}",),
    "ssgd*": ("algorithm={name='ssgd*', sigma=0.001}",),
    "dpsgd": (),
}
# The level of the bands of escape times (the usual one).
LEVEL = 0.95


@dataclass(frozen=True)
class Escape(Result):
    """Escape times from a saddle: the steps until L(w_a) is below SHARE of the saddle's depth.

    One quantity is varied.

    Attributes:
        times: (algorithms, values, runs), in steps, one run for each seed; inf for runs that diverged or had
            not escaped after ``steps`` steps.
        values: (values,), of the quantity that is varied.
        vary: the name of this quantity.
        algorithms: names of the algorithms.
        steps: the length of the runs.
        setting: the quantities that are not varied, as text.
    """

    schema: ClassVar[str] = "landscape.escape"

    times: Annotated[Array, "algorithms+ values+ run+", "steps"]
    values: Annotated[Array, "values"]
    vary: str
    algorithms: Annotated[tuple[str, ...], "algorithms"]
    steps: Annotated[int, "steps"]
    setting: str

    @property
    def median(self) -> Array:
        """(algorithms, values): the median over the runs; inf where half of them or more had not escaped."""
        ordered = np.sort(self.times, axis=2)
        middle = ordered.shape[2] // 2  # the upper of two: halfway to inf is inf
        return ordered[:, :, middle]

    @property
    def band(self) -> tuple[Array, Array]:
        """The lower and upper ends (algorithms, values) of confidence intervals for the median, at LEVEL.

        An interval lies between two of the measured times, chosen by rank. It is valid for every
        distribution of times, because the number of times below the median is binomial with probability ½.
        Runs that did not escape count as longer than all others, which does not change the ranks.
        """
        rank = median_rank(self.times.shape[2])
        ordered = np.sort(self.times, axis=2)
        return ordered[:, :, rank], ordered[:, :, -1 - rank]


def median_rank(samples: int) -> int:
    """The rank of the ends of a confidence interval for the median of so many independent samples, from 6 on.

    The largest r, counted from 0, for which the interval from the r-th smallest to the r-th largest sample
    contains the median with probability LEVEL or more.
    """
    tails = itertools.accumulate(2 * math.comb(samples, k) / 2**samples for k in range((samples + 1) // 2))
    rank = sum(1 for outside in tails if outside <= 1 - LEVEL) - 1
    assert rank >= 0, "fewer than six seeds"
    return rank


class _Escaped(Exception):
    pass


def escape_time(settings: Sequence[str]) -> float:
    """The first step after which L(w_a) ≤ SHARE of the saddle's depth; inf if none is.

    ``settings`` of the recipe as :func:`landscape.training.recipes.recipe.read` takes them.
    """
    recipe = read(RECIPE, [*settings, "evaluate.every=1", "decompose.every=0"])
    level = SHARE * Saddle(**recipe.spec("model").options).depth

    def check_escape(done: int, total: int) -> None:
        if trainer.history.rows[-1]["test_loss"] <= level:
            raise _Escaped

    trainer = Trainer(recipe, hooks=Hooks(step=check_escape))
    try:
        trainer.run()
    except _Escaped:
        return float(trainer.step)
    return math.inf


@numerics(1)
def saddles(seeds: Sequence[int], **varied: Sequence[float]) -> list[Escape]:
    """Steps until SSGD, SSGD* and DPSGD leave a saddle, a result for each quantity of VARY that is varied.

    One varies at a time; the others are as in the recipe saddle-dpsgd. The problem is ours: DPSGD-2020
    describes its problem in an appendix that is not available. The seeds, at least six, are the same for all,
    so that the algorithms see the same minibatches. A quantity without values is skipped.
    """
    base = read(RECIPE)
    fixed = {
        "dimension": base.spec("model").options["dimension"],
        "noise": base.spec("data").options["gradient_std"],
        "lr": base.lr,
    }
    results = []
    for vary, values in varied.items():
        if not len(values):
            continue
        times, changes = np.zeros((len(ALGORITHMS), len(values), len(seeds))), list(ALGORITHMS.values())
        for a, k, s in np.ndindex(times.shape):
            settings = [f"{key}={values[k]}" for key in VARY[vary]]
            times[a, k, s] = escape_time([*changes[a], *settings, f"seed={seeds[s]}"])
        setting = ", ".join(f"{name} {value:g}" for name, value in fixed.items() if name != vary)
        given = np.array(values, dtype=np.float64)
        results.append(Escape(times, given, vary, tuple(ALGORITHMS), base.steps, setting))
    return results


# ---- Minima

# The usual momentum.
MOMENTUM = 0.9
# All ours. The start lies so much of ‖w‖ away from the minimum: far above rounding in float32 and what the
# minimum itself still drifts, and near enough for the loss to be nearly quadratic.
DISPLACEMENT = 1e-3
# A run has left where its loss ever is as much above the minimum's as FACTOR times the displacement would
# bring it: so it counts as leaving, too, if it is thrown out and settles in a flatter place nearby, and
# drifting along flat directions, by which the loss falls, does not. Stable runs reach 5 displacements.
FACTOR = 10.0
# A run is long enough for what grows at EXCESS above the predicted limit to grow by e^GROWTH, twice FACTOR.
# On exact quadratics the resulting rates are then up to 8% too large.
EXCESS, GROWTH, LEAST_STEPS = 0.1, 3.0, 100
# The search begins at predicted/WIDEN and predicted·WIDEN, and widens at most ATTEMPTS times if needed.
WIDEN, ATTEMPTS = 1.3, 10


@dataclass(frozen=True)
class Minima(Sourced):
    """Learning rates at which full-batch training with delayed gradients stays at a minimum or leaves it.

    Arrays (3, K) have a row for each form of momentum (none, ordinary, shifted) and a column for each delay.

    Attributes:
        delay: (K,), in steps.
        predicted: (3, K), the largest stable ηλ divided by ``lambda_max`` and the weight decay.
        stays: (3, K), the largest learning rate at which training stayed.
        leaves: (3, K), the smallest learning rate at which training left.
        momentum: the momentum of the second and third row.
        lambda_max: of the Hessian at the minimum, in nats.
        samples: of the data.
    """

    schema: ClassVar[str] = "landscape.minima"

    delay: Annotated[Array, "delay+", "steps"]
    predicted: Annotated[Array, "form delay"]
    stays: Annotated[Array, "form delay"]
    leaves: Annotated[Array, "form delay"]
    momentum: float
    lambda_max: Annotated[float, "nat"]
    samples: int

    @property
    def boundary(self) -> Array:
        """(3, K): the geometric mean of ``stays`` and ``leaves``, an estimate of the largest stable rate."""
        return np.sqrt(self.stays * self.leaves)


@numerics(1)
def minima(
    problem: Problem, delays: Sequence[int], weight_decay: float, rate_tol: float, **about: str
) -> Minima:
    """Find the largest learning rate that keeps a minimum, for each delay and form of momentum.

    Full-batch training by async-sgd starts close to the minimum: without momentum, with MOMENTUM, and with
    shifted momentum. Bisection finds the rate above which training leaves the minimum; beside it stands the
    prediction of linear stability.

    Args:
        problem: its center is the minimum, of its loss plus ½ ``weight_decay`` ‖w‖².
        delays: τ of each experiment, in steps.
        weight_decay: the optimizer's.
        rate_tol: rates are bisected until the one at which training leaves is at most 1 + ``rate_tol`` times
            the one at which it stays.
        about: ``split`` and ``label`` of the result.

    Raises:
        OperationError: where training leaves at every rate, or at none.
    """
    table, top = limits(delays, MOMENTUM), top_eigenvalues(problem, 1)
    curvature = float(top.values[0]) + weight_decay
    if not curvature > 0:
        raise OperationError(f"minimum: λ_max with weight decay is {curvature:.3g}, it must be > 0")
    loss, _ = objective(problem, problem.weights, weight_decay)
    displacement = DISPLACEMENT * float(vector_norm(problem.weights)) or DISPLACEMENT
    start = Start(
        problem,
        problem.weights + displacement * problem.weights.new_tensor(top.vectors[0]),
        weight_decay,
        loss + 0.5 * curvature * (FACTOR * displacement) ** 2,
    )
    settings = ((0.0, 0.0), (MOMENTUM, 0.0), (0.0, MOMENTUM))  # the optimizer's momentum, the rule's
    stays, leaves = np.zeros(table.shape), np.zeros(table.shape)
    for f, k in np.ndindex(table.shape):
        steps = length(delays[k], *settings[f])
        stays_at = functools.partial(stays_from, start, steps, delays[k], *settings[f])
        stays[f, k], leaves[f, k] = search(stays_at, float(table[f, k]) / curvature, rate_tol)
    return Minima(
        np.asarray(delays, dtype=np.int64), table / curvature, stays, leaves, MOMENTUM, float(top.values[0]),
        problem.samples, **about,
    )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """The start of training at a minimum, and the test of when it has left it.

    ``weights`` (P,): the first weights, near the minimum of the ``problem``'s loss plus ½ ``weight_decay``
    ‖w‖²; ``ceiling``: training has left the minimum when that sum is above it.
    """

    problem: Problem
    weights: Tensor
    weight_decay: float
    ceiling: float


def objective(problem: Problem, weights: Tensor, weight_decay: float) -> tuple[float, Tensor]:
    """(L + ½ ``weight_decay`` ‖w‖², its gradient (P,)) at ``weights`` (P,), over all samples."""
    loss, gradient = problem.loss_and_gradient(weights)
    return loss + 0.5 * weight_decay * float(weights @ weights), gradient + weight_decay * weights


def length(delay: int, momentum: float, shifted: float) -> int:
    """Steps in which what grows at EXCESS above the limit grows by e^GROWTH, by the largest root there."""
    m, form = (shifted, "shifted") if shifted else (momentum, "ordinary")
    p0, p1 = polynomials(delay, m, form)
    root = np.abs(np.roots(p0 + (1 + EXCESS) * max_stable_step(delay, m, form) * p1)).max()
    return max(LEAST_STEPS, math.ceil(GROWTH / math.log(root)))


def stays_from(start: Start, steps: int, delay: int, momentum: float, shifted: float, lr: float) -> bool:
    """Steps of the rule async-sgd, its optimizer and the gradient of all samples, called as the loop does.

    Args:
        start: the first weights and the ceiling.
        steps: their number.
        delay: τ.
        momentum: the optimizer's.
        shifted: the rule's shifted momentum.
        lr: α.

    Returns:
        Whether the loss where gradients are taken, weight decay included, is never above the ceiling.
    """
    rule = rules.make("async-sgd", {"delay": delay, "shifted": shifted}, learners=1, seed=0)
    optimizer = SGD(momentum)
    weights = start.weights[None].clone()
    rule.start(weights)
    optimizer.start(start.problem.layout, weights)
    for t in range(1, steps + 1):
        rule.begin(weights, t)
        points = rule.gradient_points(weights)
        loss, gradient = objective(start.problem, points[0], start.weight_decay)
        if not loss <= start.ceiling:  # NaN is above, too
            return False
        directions = optimizer.directions(gradient[None], points, lr, t)
        weights = rule.finish(weights, directions, lr, t)
    return True


def search(stays_at: Callable[[float], bool], predicted: float, rate_tol: float) -> tuple[float, float]:
    """A rate at which training stays, and one at most 1 + ``rate_tol`` times it at which it leaves.

    By bisection of the logarithm. ``stays_at`` says whether training stays at a rate.
    """
    low, high = predicted / WIDEN, predicted * WIDEN
    for _ in range(ATTEMPTS):
        if stays_at(low):
            break
        low, high = low / WIDEN, low
    else:
        raise OperationError(f"minimum: training leaves it even at lr {high:.3g}; train it longer first")
    for _ in range(ATTEMPTS):
        if not stays_at(high):
            break
        low, high = high, high * WIDEN
    else:
        raise OperationError(
            f"minimum: training stays even at lr {low:.3g}, {low / predicted:.3g} × predicted"
        )
    while high > low * (1 + rate_tol):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stays_at(middle) else (low, middle)
    return low, high

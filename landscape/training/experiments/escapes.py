"""The steps at which training leaves a saddle or a minimum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
from torch import Tensor

from landscape.core.errors import InputError, OperationError
from landscape.core.options import positive
from landscape.core.progress import Progress
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.limits import limits, max_stable_step, polynomials
from landscape.models.small import Saddle
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.training import Escape, Minima
from landscape.training import algorithms as rules
from landscape.training.optimizer import SGD
from landscape.training.recipes.recipe import read
from landscape.training.run.loop import Hooks, Trainer

# Half of the depth lies far outside of the nearly quadratic region (ours).
SHARE = 0.5
# Name of a quantity that can be varied -> the recipe's keys that change.
VARY = {"dimension": ("model.dimension", "data.dimension"), "noise": ("data.gradient_std",), "lr": ("lr",)}


class _Escaped(Exception):
    pass


def escape_time(recipe: str, settings: Sequence[str]) -> float:
    """The first step after which L(w_a) ≤ SHARE of the saddle's depth; inf if none is.

    ``recipe`` and ``settings`` as in :func:`landscape.training.recipes.recipe.read`; the model must be
    "saddle".
    """
    run_recipe = read(recipe, [*settings, "evaluate.every=1", "decompose.every=0"])
    spec = run_recipe.spec("model")
    if spec.name != "saddle":
        raise InputError(f"model.name: '{spec.name}' is not allowed, escape times are those of 'saddle'")
    level = SHARE * Saddle(**spec.options).depth

    def check_escape(done: int, total: int) -> None:
        if trainer.history.rows[-1]["test_loss"] <= level:
            raise _Escaped

    trainer = Trainer(run_recipe, hooks=Hooks(step=check_escape))
    try:
        trainer.run()
    except _Escaped:
        return float(trainer.step)
    return math.inf


@numerics(1)
def sweep(
    vary: str,
    values: Sequence[float],
    algorithms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    *,
    recipe: str = "saddle-dpsgd",
    settings: Sequence[str] = (),
    done: Callable[[], None] = lambda: None,
) -> Escape:
    """:class:`Escape` of each of ``algorithms`` (name -> settings) over ``values`` of a key of VARY.

    The seeds are the same for all, so that algorithms see the same minibatches.
    """
    times = np.zeros((len(algorithms), len(values), len(seeds)))
    for a, changes in enumerate(algorithms.values()):
        for k, value in enumerate(values):
            varied = [f"{key}={value}" for key in VARY[vary]]
            for s, seed in enumerate(seeds):
                times[a, k, s] = escape_time(recipe, [*settings, *changes, *varied, f"seed={seed}"])
                done()
    base = read(recipe, settings)
    model, data = base.spec("model").options, base.spec("data").options
    fixed = {"dimension": model["dimension"], "noise": data["gradient_std"], "lr": base.lr}
    setting = ", ".join(f"{name} {value:g}" for name, value in fixed.items() if name != vary)
    return Escape(
        times, np.array(values, dtype=np.float64), vary, tuple(algorithms), SHARE, base.steps, setting
    )


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


@numerics(1)
def minima(
    problem: Problem,
    delays: Sequence[int],
    momentum: float = 0.9,
    *,
    weight_decay: float = 0.0,
    rate_tol: float = 0.07,
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Minima:
    """The largest learning rate at which training stays at a minimum, for each delay and form of momentum.

    Args:
        problem: its centre is the minimum, of its loss plus ½ ``weight_decay`` ‖w‖².
        delays: τ of each experiment.
        momentum: m of the ordinary and of the shifted form; the third form has none.
        weight_decay: the optimizer's.
        rate_tol: rates are bisected until the one at which training leaves is at most 1 + ``rate_tol`` times
            the one at which it stays.
        seed: draws the vector that the search for λ_max starts from.
        progress: takes the share that is done.
        **about: the provenance of the result.

    Returns:
        For each form and delay the rates between which the boundary lies, and the predicted one.

    Raises:
        InputError: where the loss curves upwards in no direction.
        OperationError: where training leaves at every rate, or at none.
    """
    positive("rate_tol", rate_tol)
    positive("weight_decay", weight_decay, least=0)
    table = limits(delays, momentum)
    top = top_eigenvalues(problem, 1, seed=seed)
    curvature = float(top.values[0]) + weight_decay
    if not curvature > 0:
        raise InputError(f"minimum: λ_max with weight decay is {curvature:.3g}, it must be > 0")
    loss, gradient = objective(problem, problem.weights, weight_decay)
    displacement = DISPLACEMENT * float(problem.weights.norm()) or DISPLACEMENT
    start = Start(
        problem,
        problem.weights + displacement * problem.weights.new_tensor(top.vectors[0]),
        weight_decay,
        loss + 0.5 * curvature * (FACTOR * displacement) ** 2,
    )
    settings = ((0.0, 0.0), (momentum, 0.0), (0.0, momentum))  # the optimizer's momentum, the rule's
    steps = np.array([[length(tau, m, s) for tau in delays] for m, s in settings], dtype=np.int64)
    columns = {name: np.zeros(table.shape) for name in ("stays", "leaves", "lambda_after")}
    done = 0
    for (f, k), count in np.ndenumerate(steps):
        end_at = functools.partial(run, start, int(count), delays[k], *settings[f])
        low, high, end = search(end_at, float(table[f, k]) / curvature, rate_tol)
        after = top_eigenvalues(problem, 1, weights=end, initial=top.vectors[0], seed=seed)
        for column, value in zip(columns.values(), (low, high, float(after.values[0])), strict=True):
            column[f, k] = value
        done += int(count)
        if progress:
            progress(done / float(steps.sum()))
    return Minima(
        delay=np.asarray(delays, dtype=np.int64), predicted=table / curvature, steps=steps, momentum=momentum,
        weight_decay=weight_decay, lambda_max=float(top.values[0]), residual=float(top.residuals[0]),
        loss=loss, gradient_norm=float(gradient.norm()), displacement=displacement, factor=FACTOR,
        samples=problem.samples, **columns, **about,
    )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """The start of training at a minimum, and the test of when it has left it.

    ``theta`` (P,): the first weights, near the minimum of the ``problem``'s loss plus ½ ``weight_decay``
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


def run(start: Start, steps: int, delay: int, momentum: float, shifted: float, lr: float) -> Tensor | None:
    """Steps of the rule async-sgd, its optimizer and the gradient of all samples, called as the loop does.

    Args:
        start: the first weights and the ceiling.
        steps: their number.
        delay: τ.
        momentum: the optimizer's.
        shifted: the rule's shifted momentum.
        lr: α.

    Returns:
        The last weights (P,); None as soon as the loss where a gradient is taken, weight decay included, is
        above the ceiling.
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
            return None
        directions = optimizer.directions(gradient[None], points, lr, t)
        weights = rule.finish(weights, directions, lr, t)
    return weights[0].clone()


def search(
    end_at: Callable[[float], Tensor | None], predicted: float, rate_tol: float
) -> tuple[float, float, Tensor]:
    """A rate at which training stays, one at most 1 + ``rate_tol`` times it at which it leaves, and an end.

    By bisection of the logarithm. ``end_at`` gives the last weights of training at a rate, None if it leaves;
    the end is the last weights at the first of the two rates.
    """
    low, high = predicted / WIDEN, predicted * WIDEN
    for _ in range(ATTEMPTS):
        end = end_at(low)
        if end is not None:
            break
        low, high = low / WIDEN, low
    else:
        raise OperationError(f"minimum: training leaves it even at lr {high:.3g}; train it longer first")
    for _ in range(ATTEMPTS):
        further = end_at(high)
        if further is None:
            break
        low, high, end = high, high * WIDEN, further
    else:
        raise OperationError(
            f"minimum: training stays even at lr {low:.3g}, {low / predicted:.3g} × predicted"
        )
    while high > low * (1 + rate_tol):
        middle = math.sqrt(low * high)
        further = end_at(middle)
        if further is None:
            high = middle
        else:
            low, end = middle, further
    return low, high, end

"""The times and rates at which training leaves a saddle or a minimum, and the limits of its stability."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.core.analysis import analysis
from landscape.core.devices import vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.options import positive, toml_value
from landscape.core.progress import ProgressOption, shows_progress, taken
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.curvature.hessian import Preconditioner, as_preconditioner
from landscape.limits import limits, max_stable_step, polynomials
from landscape.models.small import Saddle
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.training import LEVEL, Escape, Minima, Stability, median_rank
from landscape.training import algorithms as rules
from landscape.training.experiments.continued import operating_point
from landscape.training.optimizer.base import SGD
from landscape.training.optimizer.preconditioning import preconditioner
from landscape.training.own_loop.flat import read_settings
from landscape.training.recipes.recipe import read, recipe_of
from landscape.training.run.loop import Hooks, Trainer

RECIPE = "saddle-dpsgd"
# Half of the depth lies far outside of the nearly quadratic region (ours).
SHARE = 0.5
# Name of a quantity that can be varied -> the recipe's keys that change.
VARY = {"dimension": ("model.dimension", "data.dimension"), "noise": ("data.gradient_std",), "lr": ("lr",)}


class _Escaped(Exception):
    pass


def escape_time(settings: Sequence[str]) -> float:
    """The first step after which L(w_a) ≤ SHARE of the saddle's depth; inf if none is.

    ``recipe`` and ``settings`` as in :func:`landscape.training.recipes.recipe.read`; the model must be
    "saddle".
    """
    recipe = read(RECIPE, [*settings, "evaluate.every=1", "decompose.every=0"])
    spec = recipe.spec("model")
    if spec.name != "saddle":
        raise InputError(f"model.name: '{spec.name}' is not allowed, escape times are those of 'saddle'")
    level = SHARE * Saddle(**spec.options).depth

    def check_escape(done: int, total: int) -> None:
        if trainer.history.rows[-1]["test_loss"] <= level:
            raise _Escaped

    trainer = Trainer(recipe, hooks=Hooks(step=check_escape))
    try:
        trainer.run()
    except _Escaped:
        return float(trainer.step)
    return math.inf


def escape_times(
    vary: str,
    values: Sequence[float],
    algorithms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    settings: Sequence[str],
    done: Callable[[], None] = lambda: None,
) -> Escape:
    """:class:`Escape` of each of ``algorithms`` (name -> settings) over ``values`` of a key of VARY.

    The seeds are the same for all, so that algorithms see the same minibatches.
    """
    times, changes = np.zeros((len(algorithms), len(values), len(seeds))), list(algorithms.values())
    for a, k, s in np.ndindex(times.shape):
        varied = [f"{key}={values[k]}" for key in VARY[vary]]
        times[a, k, s] = escape_time([*settings, *changes[a], *varied, f"seed={seeds[s]}"])
        done()
    base = read(RECIPE, settings)
    model, data = base.spec("model").options, base.spec("data").options
    fixed = {"dimension": model["dimension"], "noise": data["gradient_std"], "lr": base.lr}
    setting = ", ".join(f"{name} {value:g}" for name, value in fixed.items() if name != vary)
    return Escape(
        times, np.array(values, dtype=np.float64), vary, tuple(algorithms), SHARE, base.steps, setting
    )


# Around the recipe's own values, far enough to show the slope (ours).
DIMENSION, NOISE, LR = (2, 4, 8, 16), (0.0001, 0.001, 0.01, 0.1), (0.05, 0.1, 0.2, 0.4)


@numerics(1)
@shows_progress("a smaller seeds=")
def saddles(
    seeds: Sequence[int] = range(20),
    *,
    dimension: Sequence[int] = DIMENSION,
    noise: Sequence[float] = NOISE,
    lr: Sequence[float] = LR,
    sigma: float = 0.001,
    settings: Mapping[str, Any] = MappingProxyType({}),
    progress: ProgressOption = None,
) -> list[Escape]:
    """Steps until SSGD, SSGD* and DPSGD leave a saddle, by dimension, noise and learning rate.

    One of the three varies at a time; the others are as in the recipe saddle-dpsgd. An empty list skips one.
    The problem is ours: DPSGD-2020 describes its problem in an appendix that is not available.

    Args:
        seeds: those of each setting, at least six; the same for all, so that the algorithms see the same
            minibatches.
        dimension: dimensions of the saddle.
        noise: standard deviations of a sample's gradient.
        lr: learning rates.
        sigma: noise on the weights that SSGD* adds.
        settings: other values of the recipe's keys, for all.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.

    Returns:
        The escape times, a result for each quantity that varies.

    Raises:
        InputError: too few seeds for a band of 95%, nothing that varies, or a value that is not allowed.

    Example:
        >>> import landscape
        >>> only = {"dimension": (), "noise": (), "settings": {"steps": 50}}
        >>> (result,) = landscape.saddles(range(6), lr=[0.4], **only)
        >>> result.algorithms, result.times.shape
        (('ssgd', 'ssgd*', 'dpsgd'), (3, 1, 6))
    """
    median_rank(len(seeds), LEVEL)
    values = {"dimension": dimension, "noise": noise, "lr": lr}
    chosen = {name: given for name, given in values.items() if len(given)}
    if not chosen:
        raise InputError(f"{', '.join(VARY)}: at least one of them must have a value")
    for name, given in chosen.items():
        for value in given:
            positive(name, value, **({"least": 1} if name == "dimension" else {}))
    algorithms = {
        "ssgd": ["algorithm={name='ssgd'}"],
        "ssgd*": [f"algorithm={{name='ssgd*', sigma={sigma!r}}}"],
        "dpsgd": list[str](),
    }
    texts = [f"{key}={toml_value(value)}" for key, value in settings.items()]
    runs, ended = len(seeds) * len(algorithms) * sum(map(len, chosen.values())), itertools.count(1)
    report = taken(progress)

    def done() -> None:
        report(next(ended) / runs)

    return [escape_times(name, given, algorithms, seeds, texts, done) for name, given in chosen.items()]


# The tables of docs/explanation/stability.md, and of Delay-2019's experiment.
DELAYS, MINIMUM_DELAYS = (0, 1, 3, 7, 31), (0, 1, 2, 4, 8, 16, 32)


@analysis(shorter="a larger residual_tol= or a part of the data", of_the_run=None)
def stability(
    problem: Problem | Run,
    delays: Sequence[int] = DELAYS,
    momentum: float = 0.9,
    *,
    lr: float | None = None,
    own_limit: float | None = None,
    own_delay: int | None = None,
    precondition: Preconditioner | Tensor | bool | None = None,
    residual_tol: float = 0.01,
    seed: int = 0,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Stability:
    """λ_max of the Hessian at the problem's center, and the limits of stability for ``delays``.

    Args:
        problem: the loss; or a run.
        delays: gradient delays τ in steps.
        momentum: m of the ordinary and shifted forms. 0.9 is the usual value.
        lr: the learning rate, for the picture of ηλ_max; default: the run's.
        own_limit, own_delay: the limit on ηλ of the run itself, and its delay; default: those of the run's
            update rule.
        precondition: P, as :func:`landscape.spectrum` takes it, or True: that of the run's optimizer. λ_max
            is then that of P^{-1/2} H P^{-1/2}, the limits are of steps w ← w − η P⁻¹ v, v ← m v + g, and lr
            and own_limit are those of P, if it has them.
        residual_tol: residual of λ_max, relative to it.
        seed: draws the starting vector.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        λ_max with its residual, and the limits on ηλ, (3, K): without momentum, ordinary, shifted.

    Raises:
        InputError: a negative delay, a momentum outside [0, 1), a residual_tol that is not positive, or
            ``precondition=True`` without a run.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.stability(problem, delays=[0, 1])
        >>> round(result.lambda_max, 4), result.limit[0].round(3).tolist()
        (9.0, [2.0, 1.0])
    """
    table, run = limits(delays, momentum), problem if isinstance(problem, Checkpoint) else None
    problem = problem_of(problem)
    own_lr, rule_limit, rule_delay = operating_point(run) if run else (math.nan, None, 0)
    lr, own_limit = own_lr if lr is None else lr, rule_limit if own_limit is None else own_limit
    own_delay = rule_delay if own_delay is None else own_delay
    positive("own_delay", own_delay, least=0)
    if isinstance(precondition, bool):
        if precondition and run is None:
            raise InputError("precondition: True is not allowed for a problem, whose optimizer is not known")
        precondition = preconditioner(run, problem) if precondition and run else None
    if given := as_preconditioner(precondition):
        lr, own_limit = given.lr, given.limit
    top = top_eigenvalues(problem, 1, residual_tol, seed=seed, precondition=given, progress=progress)
    return Stability(
        np.asarray(delays, dtype=np.int64),
        table,
        momentum,
        float(top.values[0]),
        float(top.residuals[0]),
        bool(top.converged),
        lr,
        math.nan if own_limit is None else own_limit,
        own_delay,
        problem.data.samples,
        precondition=given.name if given else "",
        **about,
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


@analysis(shorter="a larger rate_tol=", version=1, group="Experiments and papers", of_the_run=None)
def minima(
    problem: Problem | Run,
    delays: Sequence[int] = MINIMUM_DELAYS,
    momentum: float = 0.9,
    *,
    weight_decay: float | None = None,
    rate_tol: float = 0.07,
    seed: int = 0,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Minima:
    """Find the largest learning rate that keeps a minimum.

    There is one for each delay and form of momentum.

    Full-batch training by async-sgd starts close to the minimum: without momentum, with momentum, and with
    shifted momentum. Bisection finds the rate above which training leaves the minimum; beside it stands the
    prediction of :func:`landscape.stability`. The weights must be near a minimum of the training loss, such
    as the end of the recipe mnist-minimum.

    Args:
        problem: its center is the minimum, of its loss plus ½ ``weight_decay`` ‖w‖²; or a run.
        delays: τ of each experiment, in steps.
        momentum: m of the ordinary and of the shifted form; the third form has none.
        weight_decay: the optimizer's; default: that of the run's SGD, 0 for a problem.
        rate_tol: rates are bisected until the one at which training leaves is at most 1 + ``rate_tol`` times
            the one at which it stays.
        seed: draws the vector that the search for λ_max starts from.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        For each form and delay the rates between which the boundary lies, and the predicted one.

    Raises:
        InputError: where the loss curves upwards in no direction, or the run's optimizer is not SGD.
        OperationError: where training leaves at every rate, or at none.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> problem = landscape.Problem(layer, torch.nn.MSELoss(), (x, y), weights=torch.zeros(2))
        >>> result = landscape.minima(problem, [0])  # λ_max = 9: the limit is 2/9
        >>> bool(0.21 < result.boundary[0, 0] < 0.25)
        True
    """
    positive("rate_tol", rate_tol)
    run = problem if isinstance(problem, Checkpoint) else None
    if weight_decay is None:
        weight_decay = _weight_decay(run) if run else 0.0
    positive("weight_decay", weight_decay, least=0)
    problem = problem_of(problem)
    table = limits(delays, momentum)
    top = top_eigenvalues(problem, 1, seed=seed)
    curvature = float(top.values[0]) + weight_decay
    if not curvature > 0:
        raise InputError(f"minimum: λ_max with weight decay is {curvature:.3g}, it must be > 0")
    loss, gradient = objective(problem, problem.weights, weight_decay)
    displacement = DISPLACEMENT * float(vector_norm(problem.weights)) or DISPLACEMENT
    start = Start(
        problem,
        problem.weights + displacement * problem.weights.new_tensor(top.vectors[0]),
        weight_decay,
        loss + 0.5 * curvature * (FACTOR * displacement) ** 2,
    )
    settings = ((0.0, 0.0), (momentum, 0.0), (0.0, momentum))  # the optimizer's momentum, the rule's
    steps = np.array([[length(tau, m, s) for tau in delays] for m, s in settings], dtype=np.int64)
    columns: dict[str, Any] = {name: np.zeros(table.shape) for name in ("stays", "leaves", "lambda_after")}
    done = 0
    for (f, k), count in np.ndenumerate(steps):
        end_at = functools.partial(train_from, start, int(count), delays[k], *settings[f])
        low, high, end = search(end_at, float(table[f, k]) / curvature, rate_tol)
        after = top_eigenvalues(problem, 1, weights=end, initial=top.vectors[0], seed=seed)
        for column, value in zip(columns.values(), (low, high, float(after.values[0])), strict=True):
            column[f, k] = value
        done += int(count)
        taken(progress)(done / float(steps.sum()))
    return Minima(
        delay=np.asarray(delays, dtype=np.int64), predicted=table / curvature, steps=steps, momentum=momentum,
        weight_decay=weight_decay, lambda_max=float(top.values[0]), residual=float(top.residuals[0]),
        loss=loss, gradient_norm=float(vector_norm(gradient)), displacement=displacement, factor=FACTOR,
        samples=problem.samples, **columns, **about,
    )  # fmt: skip


def _weight_decay(run: Checkpoint) -> float:
    """The weight decay of a run's SGD, which is part of its loss; 0 for imported weights."""
    if run.algorithm == IMPORTED:
        return 0.0
    if run.algorithm == RECORDED:
        options = read_settings(run).get("optimizer", {"name": "SGD"})
        name = str(options["name"]).lower()
    else:
        name, options = recipe_of(run).part("optimizer")
    if name != "sgd":
        raise InputError(f"{run.path}: its optimizer is '{name}', the experiment needs 'sgd'")
    return float(options.get("weight_decay", 0.0))


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


def train_from(
    start: Start, steps: int, delay: int, momentum: float, shifted: float, lr: float
) -> Tensor | None:
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

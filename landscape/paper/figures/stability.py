"""Delay-2019's stability boundary and rates that leave a minimum, and DPSGD-2020's steps to leave a saddle.

All settings are ours: of the first only the abstract is at hand, and the problem of the second is in an
appendix that is not available.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import binom
from torch import Tensor

from landscape.core.devices import vector_norm
from landscape.core.errors import OperationError
from landscape.core.hdf5 import Array
from landscape.core.registry import algorithms as rules
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.limits import limits, max_stable_step, polynomials
from landscape.models import Saddle
from landscape.paper.compared import Compared, compare_with_paper, printed, summary
from landscape.paper.context import Context, Ended
from landscape.paper.figure import Drawing, figure
from landscape.paper.verdicts import NEGLIGIBLE, Effect, Rows, by_seed, distinct, paired_effect, select
from landscape.plots import style
from landscape.plots.picture import finish, panels, points, wrapped_panels
from landscape.plots.style import ticks_at
from landscape.plots.tables import label_delay_axes, with_gap_at_zero
from landscape.problem.problem import Problem
from landscape.results.base import Result, Sourced
from landscape.results.flatness import forms_with
from landscape.training.optimizer.base import SGD
from landscape.training.recipes.recipe import read
from landscape.training.run.loop import Hooks, Trainer

# ---- Saddles

RECIPE = "saddle-dpsgd"
# Half of the depth lies far outside of the nearly quadratic region (our choice).
SHARE = 0.5
# Name of a quantity that can be varied -> the recipe's keys that change.
VARY = {"dimension": ("model.dimension", "data.dimension"), "noise": ("data.gradient_std",), "lr": ("lr",)}
# SSGD* adds noise of this standard deviation to the weights (our choice).
ALGORITHMS = {
    "ssgd": ("algorithm={name='ssgd'}",),
    "ssgd*": ("algorithm={name='ssgd*', sigma=0.001}",),
    "dpsgd": (),
}
# The level of the bands of escape times (the usual one).
LEVEL = 0.95


@dataclass(frozen=True)
class Escape(Result, schema="landscape.escape"):
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
    """Return the rank of the ends of a confidence interval for the median of 6 or more ``samples``.

    The largest r, counted from 0, for which the interval from the r-th smallest to the r-th largest sample
    contains the median with probability LEVEL or more.
    """
    rank = int(binom.ppf((1 - LEVEL) / 2, samples, 0.5)) - 1
    assert rank >= 0, "fewer than six seeds"
    return rank


class _Escaped(Exception):
    pass


def escape_time(settings: Sequence[str]) -> float:
    """Return the first step after which L(w_a) ≤ SHARE of the saddle's depth; inf if none is.

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
def saddles(seeds: Sequence[int], **values_by_quantity: Sequence[float]) -> list[Escape]:
    """Measure how many steps SSGD, SSGD* and DPSGD need to leave a saddle, as one quantity varies.

    The problem is ours, because DPSGD-2020 describes its problem in an appendix that is not available.

    Args:
        seeds: at least six; each algorithm runs with each of them, so that all see the same minibatches.
        values_by_quantity: a quantity of VARY -> the values that it takes, while the other quantities are as
            in the recipe saddle-dpsgd. A quantity without values is skipped.

    Returns:
        A result for each quantity.
    """
    base = read(RECIPE)
    defaults = {
        "dimension": base.spec("model").options["dimension"],
        "noise": base.spec("data").options["gradient_std"],
        "lr": base.lr,
    }
    results = []
    for quantity, values in values_by_quantity.items():
        if not len(values):
            continue
        times = np.zeros((len(ALGORITHMS), len(values), len(seeds)))
        for a, k, s in np.ndindex(times.shape):
            algorithm_settings = list(ALGORITHMS.values())[a]
            value_settings = [f"{key}={values[k]}" for key in VARY[quantity]]
            times[a, k, s] = escape_time([*algorithm_settings, *value_settings, f"seed={seeds[s]}"])
        other_values = ", ".join(f"{name} {value:g}" for name, value in defaults.items() if name != quantity)
        numbers = np.array(values, dtype=np.float64)
        results.append(Escape(times, numbers, quantity, tuple(ALGORITHMS), base.steps, other_values))
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
class Minima(Sourced, schema="landscape.minima"):
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
    """Measure, for each delay and form of momentum, the learning rate above which training leaves a minimum.

    Full-batch training by async-sgd starts close to the minimum, once with each form of momentum: none,
    ordinary and shifted. Bisection finds a rate at which training stays, and a slightly higher rate at which
    it leaves. The result also has the rate that linear stability predicts.

    Args:
        problem: its weights are a minimum of its loss plus ½ ``weight_decay`` ‖w‖².
        delays: τ of each experiment, in steps.
        weight_decay: the weight decay of the optimizer.
        rate_tol: the bisection ends when the rate at which training leaves is at most 1 + ``rate_tol`` times
            the rate at which it stays.
        about: ``split`` and ``label`` of the result.

    Raises:
        OperationError: training leaves at every rate, or at none; or the curvature is not positive.
    """
    eta_lambda_limits = limits(delays, MOMENTUM)  # (3, number of delays): a row for each form of momentum
    top_pair = top_eigenvalues(problem, 1)
    lambda_max = float(top_pair.values[0])
    curvature = lambda_max + weight_decay
    if not curvature > 0:
        raise OperationError(f"minimum: λ_max with weight decay is {curvature:.3g}, it must be > 0")
    loss, _ = objective(problem, problem.weights, weight_decay)
    norm = float(vector_norm(problem.weights))
    displacement = DISPLACEMENT * norm if norm else DISPLACEMENT
    # The ceiling is the loss at FACTOR times the displacement, if the loss were quadratic.
    start = Start(
        problem,
        problem.weights + displacement * problem.weights.new_tensor(top_pair.vectors[0]),
        weight_decay,
        ceiling=loss + 0.5 * curvature * (FACTOR * displacement) ** 2,
    )
    momenta = ((0.0, 0.0), (MOMENTUM, 0.0), (0.0, MOMENTUM))  # (ordinary, shifted) momentum of each row
    predicted = eta_lambda_limits / curvature
    stays, leaves = np.zeros(predicted.shape), np.zeros(predicted.shape)
    for row, column in np.ndindex(predicted.shape):
        delay, (momentum, shifted) = delays[column], momenta[row]
        steps = step_count(delay, momentum, shifted)
        stays_at = functools.partial(keeps_minimum, start, steps, delay, momentum, shifted)
        predicted_lr = float(predicted[row, column])
        stays[row, column], leaves[row, column] = search(stays_at, predicted_lr, rate_tol)
    return Minima(
        np.asarray(delays, dtype=np.int64), predicted, stays, leaves, MOMENTUM, lambda_max, problem.samples,
        **about,
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
    """Return (L + ½ ``weight_decay`` ‖w‖², its gradient (P,)) at ``weights`` (P,), over all samples."""
    loss, gradient = problem.loss_and_gradient(weights)
    return loss + 0.5 * weight_decay * float(weights @ weights), gradient + weight_decay * weights


def step_count(delay: int, momentum: float, shifted: float) -> int:
    """Return the number of steps in which an oscillation grows by e^GROWTH at 1 + EXCESS times the limit."""
    m, form = (shifted, "shifted") if shifted else (momentum, "ordinary")
    p0, p1 = polynomials(delay, m, form)
    root = np.abs(np.roots(p0 + (1 + EXCESS) * max_stable_step(delay, m, form) * p1)).max()
    return max(LEAST_STEPS, math.ceil(GROWTH / math.log(root)))


def keeps_minimum(start: Start, steps: int, delay: int, momentum: float, shifted: float, lr: float) -> bool:
    """Return whether async-sgd with the gradient of all samples stays at a minimum.

    Steps are made as in the training loop. Training stays if the loss plus weight decay, at the weights at
    which gradients are taken, is never above the ceiling.

    Args:
        start: the problem, the first weights, the weight decay and the ceiling.
        steps: the number of steps.
        delay: τ, in steps.
        momentum: the momentum of the optimizer.
        shifted: the shifted momentum of async-sgd.
        lr: α.
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
        if not loss <= start.ceiling:  # also for NaN, after training has diverged
            return False
        directions = optimizer.directions(gradient[None], points, lr, t)
        weights = rule.finish(weights, directions, lr, t)
    return True


def search(stays_at: Callable[[float], bool], predicted: float, rate_tol: float) -> tuple[float, float]:
    """Return (rate at which training stays, rate at which it leaves), by bisection of the logarithm.

    The second rate is at most 1 + ``rate_tol`` times the first. ``stays_at``: whether training stays at a
    rate.
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


# ---- The boundary

DELAYS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FORMS: dict[tuple[float, Any], str] = {
    (0.0, "ordinary"): "no momentum",
    (0.9, "ordinary"): "momentum 0.9",
    (0.9, "shifted"): "shifted momentum 0.9",
}


def _judge_boundary(rows: Rows) -> Iterator[Effect]:
    """Judge the boundary, which is exact: no seed enters."""
    limits = {}
    for m, form in FORMS:
        chosen = select(rows, momentum=m, form=form)
        limits[m, form] = chosen.set_index("delay")["limit"]
        tau, limit = np.log(chosen[["delay", "limit"]].to_numpy(float)[-5:].T)
        slope = float(np.polyfit(tau, limit, 1)[0])
        name = f"{form} momentum {m:g}" if m else "no momentum"
        yield Effect(name, "power of τ, long delays", (slope,), (-1.15, -0.85), exact=True)
    more = (limits[0.9, "shifted"] / limits[0.9, "ordinary"]).drop(0)
    what = "limit of shifted / ordinary momentum"
    yield Effect("all delays", what, tuple(more.tolist()), (1.0, np.inf), exact=True)


@figure("delay-boundary", _judge_boundary)
def _boundary(context: Context) -> Drawing:
    rows = pd.DataFrame(
        {"momentum": m, "form": form, "delay": tau, "limit": max_stable_step(tau, m, form)}
        for m, form in FORMS
        for tau in DELAYS
    )
    picture, (ax,) = panels(1, 1, 6.8, 3.9)
    for marker, size, label, (m, form) in zip("osD", (5, 9, 5), FORMS.values(), FORMS, strict=True):
        limits = select(rows, momentum=m, form=form)["limit"].to_numpy()
        ax.plot(*with_gap_at_zero(np.array(DELAYS), limits), marker=marker, ms=size, mfc="w", label=label)
    line = [np.pi / (2 * tau + 1) for tau in DELAYS[1:]]
    ax.plot(DELAYS[1:], line, color=style.OTHER, lw=0.9, ls=":", label="π/(2τ + 1), no momentum")
    ax.set_xscale("symlog", base=2, linthresh=1)
    ticks_at(ax.xaxis, [0, 1, 2, 4, 8, 16, 32, 64])
    ax.set(xlabel="delay τ (steps)", ylabel="largest stable ηλ", yscale="log")
    picture.legend(loc="outside lower center", ncols=2)
    compared = list[Compared]()
    for row in printed("delay_limits").itertuples():
        m, tau = float(row.momentum), int(row.delay)
        what = f"largest ηλ, τ = {tau}, {FORMS[m, row.form]} (known value)"
        compared.append(Compared(what, f"{max_stable_step(tau, m, row.form):.4f}", f"{float(row.limit):.4f}"))
    return Drawing({"": picture}, rows, compared)


# ---- Which rates leave a minimum


def _judge_minima(rows: Rows) -> list[Effect]:
    what, claimed = "largest rate that stays / predicted", (0.8, 1.25)
    return [
        Effect(f"{form}, delay {tau:g}", what, tuple(by_seed(of_delay, "ratio")), claimed, ratio=True)
        for (form, tau), of_delay in rows.groupby(["form", "delay"], sort=False)
    ]


def _draw_minimum(r: Minima) -> Figure:
    """Draw learning rate against delay: lines are predicted, markers are measured.

    The bar of a marker reaches from the largest rate at which training stayed at the minimum to the smallest
    at which it left.
    """
    picture, (ax,) = panels(1, 1, 6.8, 3.9)
    for f, (name, marker) in enumerate(zip(forms_with(r.momentum), "osD", strict=True)):
        ax.plot(*with_gap_at_zero(r.delay, r.predicted[f]), color=style.CYCLE[f])
        # No line goes through delay 0.
        ax.plot(r.delay[:1], r.predicted[f, :1], marker="_", ms=14, mew=1.6, color=style.CYCLE[f])
        bars = np.abs(np.stack([r.stays[f], r.leaves[f]]) - r.boundary[f])
        look: Any = {"marker": marker, "ms": (5, 9, 5)[f], "mfc": "w", "capsize": 2}
        points(ax, r.delay, r.boundary[f], bars, style.CYCLE[f], name, **look)
    ax.plot([], [], color=style.DARK, label="predicted")
    label_delay_axes(ax, r, r.delay.max())
    ax.set(title="", ylabel="largest η that stays at the minimum")
    text = f"At the minimum λ_max is {r.lambda_max:.3g} nat."
    return finish(picture, "The largest rate at which training stays at its minimum", text, [ax], ncols=2)


@figure("delay-minima", _judge_minima)
def _delay_minima(context: Context) -> Drawing:
    """Draw the largest learning rate at which training stays at its minimum, against the delay.

    The picture is of the first seed; the table has all seeds.
    """
    results, settings = list[Minima](), dict(context.sizes)

    def measure(run: Ended) -> Rows:
        point = run.last
        weight_decay = float(point.recipe.optimizer["weight_decay"])

        def make() -> Minima:
            problem = context.problem(point, "train")
            about = {"split": "train", "label": point.label}
            return minima(problem, settings["delays"], weight_decay, settings["tol"], **about)

        (result,) = context.cached(Minima, point, settings, make, functions=[minima])
        results.append(result)
        forms = forms_with(result.momentum)
        return pd.DataFrame({
            "delay": np.tile(result.delay, len(forms)),
            "form": np.repeat(forms, len(result.delay)),
            "largest_lr_that_stays": result.boundary.ravel(),
            "predicted_lr": result.predicted.ravel(),
            "ratio": (result.boundary / result.predicted).ravel(),
        })  # fmt: skip

    rows = context.table(measure)
    # {form} is the column with the form of momentum. The argument form=".3f" is the format of a number.
    what = "largest rate that stays / predicted, {form}"
    compared = compare_with_paper(rows, what, "ratio", paper="1", form=".3f")
    return Drawing({"": _draw_minimum(results[0])}, rows, compared, "The picture is of the first seed.")


# ---- Steps to leave a saddle


def _judge_saddles(rows: Rows) -> list[Effect]:
    """Judge each setting; a run that does not leave counts with all of its steps."""
    what = "steps of SSGD / of DPSGD"
    how: dict[str, Any] = {"algorithm": ("ssgd", "dpsgd"), "times": True, "margin": NEGLIGIBLE}
    return [
        paired_effect(f"{vary} {value:g}", what, rows, "steps", vary=vary, value=value, **how)
        for vary, value in distinct(rows, "vary", "value")
    ]


def _draw_escapes(results: Sequence[Escape]) -> Figure:
    """Draw median escape time, with its 95% confidence band, against the quantity that is varied.

    Each result has a panel. Times are cut at the last step: a line or band at that height stands for runs
    that had not escaped by then.
    """
    names = {"dimension": "dimension", "noise": "std of a sample's gradient", "lr": "learning rate"}
    picture, axes = wrapped_panels(len(results), 3.5, 3.0, names="times", sharey=True)
    for ax, r in zip(axes, results, strict=True):
        low, high = (np.minimum(edge, r.steps) for edge in r.band)
        median = np.minimum(r.median, r.steps)
        for a, name in enumerate(r.algorithms):
            color = style.color_of(name)
            ax.fill_between(r.values, low[a], high[a], color=color, alpha=0.2, lw=0)
            # Later lines are narrower: an earlier one stays visible where two coincide (SSGD and DPSGD).
            look: Any = {"color": color, "marker": "osD"[a], "ms": 8 - 2 * a, "lw": 3 - 0.8 * a}
            ax.plot(r.values, median[a], label=style.paper_name(name), **look)
        ax.set_xscale("log", base=10 if r.vary == "noise" else 2)
        if r.vary != "noise":
            ticks_at(ax.xaxis, r.values)
        style.log_axis(ax.yaxis)
        ax.set(title=r.setting, xlabel=names[r.vary])
    axes[0].set_ylabel("steps to escape")
    title = f"Escape from a saddle, median of {results[0].times.shape[2]} seeds and 95% band"
    return finish(picture, title, "", axes[:1], ncols=3)


@figure("saddles", _judge_saddles)
def _saddles(context: Context) -> Drawing:
    sizes = dict(context.sizes)
    seeds = range(sizes.pop("seeds"))
    stored = {"values": {name: values for name, values in sizes.items() if values}, "seeds": len(seeds)}
    functions = [saddles, Trainer]
    results = context.cached(Escape, [], stored, lambda: saddles(seeds, **sizes), functions)
    rows = pd.DataFrame(
        {"vary": r.vary, "value": float(v), "algorithm": name, "seed": s, "steps": min(float(steps), r.steps)}
        for r in results
        for a, name in enumerate(r.algorithms)
        for k, v in enumerate(r.values)
        for s, steps in enumerate(r.times[a, k])
    )
    ratios = [float(np.median(effect.values)) for effect in _judge_saddles(rows)]
    what = "steps of SSGD / steps of DPSGD to leave, median over the seeds"
    return Drawing({"": _draw_escapes(results)}, rows, [Compared(what, summary(ratios))])

"""Several networks: how two are connected by paths, and what an average of their weights loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import numpy as np
import torch
from scipy import linalg, special
from torch import Tensor

from landscape.analysis.spread import Spread
from landscape.checkpoint.weights import Weights, network_of, networks_of
from landscape.core.analysis import analysis
from landscape.core.devices import double, single
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import Count, Natural, Positive, Seed, Several, Within
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.curvature.double_backward import in_full_precision
from landscape.curvature.eigenvalues import fast_hessian
from landscape.curvature.hessian import exact_only
from landscape.evaluation import needs
from landscape.evaluation.evaluate import confirm, evaluator
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import Minibatches, placed, stream
from landscape.problem.alignment import aligned, change
from landscape.problem.batchnorm import SAMPLES, tracked
from landscape.problem.layout import as_array
from landscape.problem.losses import existing
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.comparison import Connection, WeightAverage
from landscape.results.geometry import barrier

# Points of a path, and samples in a minibatch: those of Garipov et al.'s code (eval_curve.py, train.py).
POINTS, BATCH = 61, 128
# Adam's step size (Kingma and Ba 2015, Algorithm 1). The number of steps is ours: minutes on a small network,
# where Garipov et al. train a curve as long as a network.
LR, STEPS = 1e-3, 1000


def shares(curve: str, t: Any) -> tuple[Any, Any]:
    """The shares of b and of the bend at ``t`` on a curve; that of a is the rest.

    Bézier: t² and 2t(1 − t). Chain: the bend is reached at t = ½, on straight lines (Garipov et al. 2018,
    section 3).

    Example:
        >>> [[float(share) for share in shares(curve, 0.5)] for curve in ("bezier", "chain")]
        [[0.25, 0.5], [0.0, 1.0]]
    """
    if curve == "bezier":
        return t**2, 2 * t * (1 - t)
    beyond = np.maximum(2 * t - 1, 0)
    return beyond, 1 - np.abs(2 * t - 1)


def _connect_need(problem: Any, align: Any, **_: Any) -> Need:
    """The ends, the bend, Adam's state and gradients; of the alignment, four vectors in float64.

    Activations of both networks, and a copy, are in float64, too, for half of the samples of a chunk.
    """
    read = 1.5 * needs.double(problem) * (align == "activations")
    return needs.need(problem, 12 + 8 * needs.double(problem), 3 + read)


@analysis(_connect_need, shorter="fewer steps=, fewer points= or a part of the data", version=1)
def connect(
    problem: Problem | Run,
    a: Weights,
    b: Weights | None = None,
    curve: Literal["bezier", "chain"] = "bezier",
    *,
    align: Literal["weights", "activations"] = "weights",
    points: Annotated[int, Within(3)] = POINTS,
    steps: Natural = STEPS,
    lr: Positive = LR,
    batch: Count = BATCH,
    bn_samples: Several = SAMPLES,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Connection:
    """The loss between two networks: on the line, on the line after alignment, and along a trained curve.

    Hidden units have no order: permuting them gives other weights of the same function (Entezari et al.
    2022). The permutations of this model are found by tracing one pass of it and are tried on it; those of b
    that bring it near to a are then found by matching weights (Ainsworth et al. 2023, Algorithm 1) or the
    correlations of activations (Li et al. 2015). The curve
    leads from a to the aligned b by a bend, which is trained on the mean loss over t uniform in [0, 1]
    (Garipov et al. 2018, Eq. 2), by Adam with constant steps that fall linearly to zero in the second half.

    BatchNorm's statistics are estimated again at each point of each path, as Jordan et al. 2023 do for
    networks that have it, and those of each minibatch train the bend.

    Args:
        problem: the loss; or a run, on its training set.
        a, b: two networks, in any form that :func:`landscape.line` takes; without b the paths lead from the
            problem's center to a.
        curve: "bezier", quadratic, or "chain", two straight lines that meet in the bend.
        align: what units are matched by: "weights", or "activations", their correlations over up to 1,000
            samples, at the operations that sum over the units.
        points: of each path, at equal distances of t, at least 3. Barriers and highest losses are the largest
            at these points.
        steps: of the training of the bend, each on one minibatch at one t. With 0 it stays in the middle, so
            that the curve is the aligned line.
        lr: of Adam.
        batch: samples in a minibatch, at most all.
        bn_samples: samples from which statistics of BatchNorm are estimated at each point.
        seed: of the order in which layers are aligned, and of minibatches and t.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Loss and accuracy, (3, points) each, barriers (3,) and the weights (4, P): a, b, the aligned b, and
        the bend. ``landscape.between(problem, [w[0], w[2], w[3]])`` is the plane that contains the curve.

    Raises:
        InputError: weights of another model; an unknown curve; a number that is not allowed; a model that
            does not run in float64; aligned weights that compute another function than b.
        OperationError: weights that are not finite, or a file of others.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> problem = landscape.Problem(net, torch.nn.functional.cross_entropy, (x, y))
        >>> a = torch.randn(26)
        >>> order = torch.tensor([2, 0, 3, 1])  # b is a with its hidden units in another order
        >>> first, bias, last = a[:12].view(4, 3)[order], a[12:16][order], a[16:24].view(2, 4)[:, order]
        >>> b = torch.cat((first.flatten(), bias, last.flatten(), a[24:]))
        >>> bool((torch.from_numpy(landscape.connect(problem, a, b, steps=1).weights[2]) == a).all())
        True
    """
    problem = problem_of(problem)
    ends = {"problem": problem, "a": a} if b is None else {"a": a, "b": b}
    networks = [network_of(problem, end, name) for name, end in ends.items()]
    a, b = (single(network.theta) for network in networks)
    report, measured = taken(progress), problem.with_batchnorm("recalibrate", bn_samples)
    near, symmetry = aligned(problem, a, b, align, seed)
    report(0.1)
    batch = min(batch, problem.samples)
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    bend = _trained(minibatches, curve, (a, near), steps, lr, stream(seed, 1), portion(report, 0.1, 0.7))
    t = np.linspace(0, 1, points)
    zero = np.zeros_like(t)
    paths = ((b, (t, zero)), (near, (t, zero)), (near, shares(curve, t)))
    values = []
    for k, (end, at) in enumerate(paths):
        directions, coordinates = torch.stack((end - a, bend - a)), torch.from_numpy(np.stack(at, 1))
        run = evaluator(measured, a, directions, points)
        evaluation = run(coordinates, portion(report, 0.7 + k / 10, 0.8 + k / 10))
        confirm(run, a, directions, coordinates, evaluation["loss"].numpy())
        values.append(evaluation)
    loss, accuracy = (np.stack([row[name].numpy() for row in values]) for name in ("loss", "accuracy"))
    settings: dict[str, Any] = {"curve": curve, "align": align, "steps": steps, "lr": float(lr)}
    return Connection(
        t=t,
        loss=loss,
        accuracy=accuracy,
        barrier=np.array([barrier(t, row) for row in loss]),
        weights=np.stack([as_array(w) for w in (a, b, near, bend)]),
        distance=float((double(a) - double(b)).norm()),
        aligned_distance=float((double(a) - double(near)).norm()),
        groups=tuple(group.name for group in symmetry.groups),
        sizes=np.array([group.size for group in symmetry.groups], int),
        fixed=tuple(f"{name}: {reason}" for name, reason in symmetry.fixed.items()),
        largest_change=change(problem, b, near),
        own_loss=np.array([network.own_loss(problem) for network in networks if tracked(problem.model)]),
        **settings,
        batch=batch,
        seed=seed,
        **setting(measured),
        **about,
    )


def _trained(
    minibatches: Minibatches, curve: str, ends: tuple[Tensor, Tensor], steps: int, lr: float,
    generator: torch.Generator, report: Progress,
) -> Tensor:  # fmt: skip
    """The bend (P,) of a curve between two ends, from their middle on."""
    a, b = ends
    bend: Tensor = (a + b) / 2
    optimizer = torch.optim.Adam([bend], lr)
    for step, (few,) in zip(range(steps), minibatches, strict=False):
        t = float(torch.rand((), generator=generator))
        of_b, of_bend = shares(curve, t)
        theta = (1 - of_b - of_bend) * a + of_b * b + of_bend * bend
        bend.grad = of_bend * existing(*few.loss_and_gradient(theta.to(few.dtype))).to(bend)
        optimizer.param_groups[0]["lr"] = lr * min(1, 2 * (1 - step / steps))
        optimizer.step()
        report((step + 1) / steps)
    return bend


# Length scales ℓ in root mean squared distances of the vectors from their mean, each as likely as the others
# (our choice: weighted by their likelihoods, the intervals were too narrow, and matrices of longer ones are
# near singular). They were chosen on averages of 56 sets of checkpoints of digits and MNIST, where 90%
# intervals held 94% of the exact losses; none of these sets is in benchmarks/averages.py.
LENGTHS = np.geomspace(0.5, 4, 7)
# Added to the covariance matrix of standardized observations, for numerical stability (usual in kriging).
JITTER = 1e-9
# Directions with a smaller share of the largest variance are rounding of the weights in float32 (our choice).
ROUNDING = 1e-10
LEVEL = 0.9


@dataclass(frozen=True)
class Measured:
    """Measurements at n vectors w_j with deviations Δw_j from their mean, in float64.

    Attributes:
        gram: (n, n), ⟨Δw_i, Δw_j⟩.
        losses: (n,), L(w_i), of which the slopes and bends are.
        offsets: (n,), what is added to these losses; between the vectors it is interpolated, and the largest
            is part of the interval.
        slopes: (n, n), ⟨∇L(w_i), Δw_j⟩.
        bends: (n, n), ⟨∇²L(w_i) Δw_i, Δw_j⟩.
        rounding: the rounding error of a loss.
    """

    gram: Array
    losses: Array
    offsets: Array
    slopes: Array
    bends: Array
    rounding: float


class Predicted(NamedTuple):
    """Predicted losses (K,), the ends of their 90% intervals, and the convergence ratios."""

    loss: Array
    low: Array
    high: Array
    ratio: Array


@dataclass(frozen=True)
class _Block:
    """Observations at ``points`` (m, r): values, or derivatives along 1 or 2 ``directions`` (m, r)."""

    points: Array
    directions: tuple[Array, ...] = ()


class Hull:
    """The loss in the affine hull of weight vectors.

    Args:
        measured: at the vectors.
    """

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        sizes, vectors = np.linalg.eigh(measured.gram)
        retained = sizes > ROUNDING * sizes[-1]
        # In coordinates of unit root mean square Δw_j is points[j], and ∇L is slopes @ dual.
        scale = np.sqrt(sizes[retained].sum() / len(sizes))
        self._points = vectors[:, retained] * np.sqrt(sizes[retained]) / scale
        dual = vectors[:, retained] / np.sqrt(sizes[retained]) * scale
        n, r = self._points.shape
        at, axes = np.repeat(self._points, r, 0), np.tile(np.eye(r), (n, 1))
        self._blocks = [_Block(self._points), _Block(at, (axes,)), _Block(at, (at, axes))]
        observed = (measured.losses, measured.slopes @ dual, measured.bends @ dual)
        values = np.concatenate([part.ravel() for part in observed])
        self._processes = [_Process(self._blocks, values, length) for length in LENGTHS]

    def __call__(self, coefficients: Array) -> Predicted:
        """The losses at Σ_j a_j w_j for the rows a of ``coefficients`` (K, n), each of which sums to 1."""
        m, a = self._measured, coefficients
        target = _Block(a @ self._points)
        predictions = np.array([process.predict(target) for process in self._processes])
        loss, errors = predictions[:, 0].mean(0), np.hypot(predictions[:, 1], m.rounding)
        low, high = _quantiles(predictions[:, 0], errors, self._processes[0].freedom)
        # To second order L(w) is Σ a_j (L(w_j) + ½⟨∇L(w_j), w − w_j⟩) = Σ a_j L(w_j) − ½ tr(HC), C the
        # covariance. If what is left is to that correction as each further order to the one before, the
        # remainder is that of a geometric series, which may not converge.
        halves = a * (a @ m.slopes.T - m.slopes.diagonal()) / 2
        rest = np.maximum(np.abs(loss - a @ m.losses - halves.sum(1)) - m.rounding, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.nan_to_num(rest / np.abs(halves).sum(1), nan=0.0, posinf=np.inf)
            remainder = np.where(ratio < 1, rest * ratio / (1 - ratio), np.inf)
        # The losses of single members are known.
        single, wide = (a == 1).any(1), np.abs(m.offsets).max()
        total = np.where(single, a @ m.losses, loss) + a @ m.offsets
        beyond = np.hypot(remainder, wide)
        below, above = (np.where(single, 0.0, np.hypot(part, beyond)) for part in (loss - low, high - loss))
        return Predicted(total, total - below, total + above, np.where(single, 0.0, ratio))


class _Process:
    """Quadratic function and Gaussian process of one length scale, conditioned on ``values`` (N,)."""

    def __init__(self, blocks: list[_Block], values: Array, length: float) -> None:
        self._blocks, self._length = blocks, length
        covariance = np.block([[_covariance(a, b, length) for b in blocks] for a in blocks])
        self._scale = 1 / np.sqrt(covariance.diagonal())
        covariance *= self._scale[:, None] * self._scale
        covariance.flat[:: len(values) + 1] += JITTER
        self._factor = linalg.cho_factor(covariance, lower=True, overwrite_a=True)
        self._trend = np.vstack([_quadratic(block) for block in blocks]) * self._scale[:, None]
        values = values * self._scale
        self._solved = linalg.cho_solve(self._factor, self._trend)
        self._normal = linalg.cho_factor(self._trend.T @ self._solved)
        self._fit = linalg.cho_solve(self._normal, self._solved.T @ values)
        residual = values - self._trend @ self._fit
        self._weights = linalg.cho_solve(self._factor, residual)
        self.freedom = len(values) - self._trend.shape[1]
        self._variance = max(residual @ self._weights, 0.0) / self.freedom

    def predict(self, target: _Block) -> tuple[Array, Array]:
        """The mean and the scale (K,) of Student's t with ``freedom`` degrees at the points of a block."""
        cross = np.hstack([_covariance(target, block, self._length) for block in self._blocks]) * self._scale
        trend = _quadratic(target)
        residual = trend - cross @ self._solved
        share = 1 - (cross.T * linalg.cho_solve(self._factor, cross.T)).sum(0)
        share += (residual.T * linalg.cho_solve(self._normal, residual.T)).sum(0)
        return trend @ self._fit + cross @ self._weights, np.sqrt(np.maximum(share, 0.0) * self._variance)


def _covariance(a: _Block, b: _Block, length: float) -> Array:
    """(m_a, m_b), the derivatives of exp(−s), s = ‖x − y‖²/2ℓ², along a's directions in x and b's in y.

    By Faà di Bruno's formula it is the sum over the partitions of the directions into sets of one or two of
    the products of (−1) times the derivatives of s, of which there are no higher ones: the first direction
    stands alone, or with one of the others.
    """
    x, y = a.points / length, b.points / length
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    us, vs = [u / length for u in a.directions], [v / length for v in b.directions]
    slopes = [(u * x).sum(1)[:, None] - u @ y.T for u in us] + [(v * y).sum(1) - x @ v.T for v in vs]
    count = len(us)

    def bend(i: int, j: int) -> Any:
        if j < count:
            return (us[i] * us[j]).sum(1)[:, None]
        return (vs[i - count] * vs[j - count]).sum(1) if i >= count else -us[i] @ vs[j - count].T

    def products(indices: list[int]) -> Any:
        if not indices:
            return 1.0
        first, *rest = indices
        total = -slopes[first] * products(rest)
        for k in rest:
            total = total - bend(first, k) * products([j for j in rest if j != k])
        return total

    covariance: Array = np.exp(-np.maximum(squares, 0.0) / 2) * products([*range(len(slopes))])
    return covariance


def _quadratic(block: _Block) -> Array:
    """(m, (r + 1)(r + 2)/2), what the block observes of 1, x_i and x_i x_j, i ≤ j."""
    x = block.points
    i, j = np.triu_indices(x.shape[1])
    if not block.directions:
        return np.hstack([np.ones((len(x), 1)), x, x[:, i] * x[:, j]])
    u, v = block.directions[0], block.directions[-1]
    if len(block.directions) == 1:
        return np.hstack([np.zeros((len(x), 1)), u, u[:, i] * x[:, j] + x[:, i] * u[:, j]])
    return np.hstack([np.zeros((len(x), 1 + x.shape[1])), u[:, i] * v[:, j] + v[:, i] * u[:, j]])


def _quantiles(means: Array, scales: Array, freedom: int) -> tuple[Array, Array]:
    """The ends (K,) of the interval of an even mixture of Student's t with ``means`` (m, K), by bisection."""
    tail, ends = (1 - LEVEL) / 2, []
    reach = -special.stdtrit(freedom, tail / len(means)) * scales  # beyond it no component has a tail's share
    for probability in (tail, 1 - tail):
        below, above = (means - reach).min(0), (means + reach).max(0)
        for _ in range(60):  # to rounding
            middle = (below + above) / 2
            reached = special.stdtr(freedom, (middle - means) / scales).mean(0) >= probability
            above, below = np.where(reached, middle, above), np.where(reached, below, middle)
        ends.append(above)
    return ends[0], ends[1]


# The most members: with n of them a matrix of (2n² − n)² numbers is factored, 32 MB for 32 (our choice).
MEMBERS = 32


def _average_need(problem: Any, weights: Any, **_: Any) -> Need:
    """Members, deviations, gradient, product; a matrix over the observations for each length, and terms."""
    n = len(weights) if isinstance(weights, Sequence) else needs.rows(weights)
    return needs.curved(problem, 2 * n + 4, 8 * (len(LENGTHS) + 8) * (2 * min(n, MEMBERS) ** 2) ** 2)


@analysis(_average_need, shorter="a part of the data", of_the_run=("weights",), version=1)
def average(
    problem: Problem | Run,
    weights: Sequence[Weights] | Tensor | None = None,
    coefficients: Sequence[float | Sequence[float]] | Array | None = None,
    *,
    exact: bool = True,
    bn_samples: Several = SAMPLES,
    labels: Sequence[str] = (),
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> WeightAverage:
    """Predict the loss of averages of weights, before they are evaluated.

    Members may be checkpoints of a run (SWA, LAWA, WSM), the learners of a run, fine-tunings of a network (a
    soup) or adapters. The loss and the gradient at each member w_j, and one Hessian product with its distance
    from the mean, are measured once; from them follow the losses of all averages w = Σ_j a_j w_j: to second
    order Σ a_j L(w_j) − ½ tr(HC), with C the covariance of the members, and higher orders from a Gaussian
    process around a quadratic function, in the affine hull of the members. The average is not evaluated for
    it. The 90% interval is that of length scales from half the members' distance from their mean to four
    times, and of the orders that are missing: where each order corrects more than the one before (``ratio`` ≥
    1), as between networks that were trained independently, the interval has no ends.

    Besides, members are chosen by prediction: from the best on, each that lowers the predicted loss of the
    uniform average (greedy soup, Wortsman et al. 2022, Recipe 1, which evaluates each average), if the
    interval of that loss is below the mean loss of the averaged members.

    A network with BatchNorm has, at each member and average, statistics that are estimated there. Gradients
    and products go through those of batches of ``bn_samples``; the differences between the losses with either
    statistics are predicted linearly, and the largest of them is part of the interval.

    Args:
        problem: the loss; or a run, on its training set.
        weights: the members, 2 to 32: (n, P), or a list of networks in any form that :func:`landscape.line`
            takes; default: the run's learners.
        coefficients: one for each member, ≥ 0, divided by their sum; by default uniform. Of shape (n,), or
            (K, n) for K averages.
        exact: whether the exact losses of the averages are computed beside it, a pass over the data each.
        bn_samples: samples from which statistics of BatchNorm are estimated.
        labels: names of the members; default: 0, 1, …
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Predicted losses with intervals of the averages that were asked for, and of the chosen one.

    Raises:
        InputError: a number of members or coefficients that is not allowed, what is no weights of this model,
            or a model without second derivatives.
        OperationError: members that are equal, or that are not finite in weights, losses or gradients.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> members = torch.tensor([[1.0, 0.2], [-1.0, 0.2], [0.0, 3.0]])
        >>> result = landscape.average(problem, members, [1, 1, 0])
        >>> result.loss.round(3).tolist(), result.chosen.tolist()  # of the first two; they are chosen, too
        ([0.02, 0.02], [True, True, False])
    """
    problem = problem_of(problem)
    members = None if weights is None else [member.theta for member in networks_of(problem, weights)]
    if not isinstance(weights, Tensor):  # which is taken without a copy
        weights = torch.stack(members) if members else None
    weights = placed(problem, weights, smallest=2)
    n = len(weights)
    if n > MEMBERS:
        raise InputError(f"weights: {n} members are not allowed, it must be 2 to {MEMBERS}")
    if labels and len(labels) != n:
        raise InputError(f"labels: {len(labels)} for {n} members, each needs one")
    requested = _shares(coefficients, n)
    exact_only(problem, "average")
    evaluated, curved = _with_statistics(problem, in_full_precision(problem), bn_samples)
    measured = _measure(evaluated, curved, weights := single(weights), portion(progress, 0, 0.9))
    hull, members_loss = Hull(measured), measured.losses + measured.offsets
    averages = np.vstack([requested, chosen := _greedy(hull, members_loss)])
    losses = np.full(len(averages), np.nan)
    for k, row in enumerate(averages if exact else []):
        losses[k] = evaluated.loss((torch.from_numpy(row).to(weights) @ weights).to(evaluated.dtype))
    taken(progress)(1.0)
    return WeightAverage(
        members_loss=members_loss,
        coefficients=averages,
        **hull(averages)._asdict(),
        exact=losses,
        chosen=chosen > 0,
        labels=tuple(labels) or tuple(map(str, range(n))),
        parameters=problem.layout.size,
        products=n,
        level=LEVEL,
        **setting(evaluated),
        **about,
    )


def _shares(coefficients: Any, n: int) -> Array:
    """(K, n), ``coefficients`` whose rows sum to 1. InputError for others than numbers ≥ 0."""
    if coefficients is None:
        return np.full((1, n), 1 / n)
    try:
        rows = np.atleast_2d(np.asarray(coefficients, dtype=np.float64))
    except (TypeError, ValueError):
        rows = np.zeros((0, 0))
    if rows.ndim != 2 or rows.shape[1] != n or not len(rows):
        raise InputError(f"coefficients: shape {np.shape(coefficients)}, it must be ({n},) or (K, {n})")
    sums = rows.sum(1, keepdims=True)
    for row in rows[~((rows >= 0).all(1) & (sums[:, 0] > 0) & np.isfinite(sums[:, 0]))][:1]:
        raise InputError(f"coefficients: {row.tolist()} are not allowed, they must be ≥ 0, not all of them 0")
    shares: Array = rows / sums
    return shares


def _with_statistics(problem: Problem, full: Problem, bn_samples: int) -> tuple[Problem, Problem]:
    """The problem of the losses, and of the derivatives, which differs with BatchNorm and half precision."""
    trained = full.with_batchnorm("train", bn_samples)
    if problem.batchnorm.name == "train" or not tracked(problem.model):
        return problem, full
    recalibrates = problem.batchnorm.name == "recalibrate"
    return problem if recalibrates else problem.with_batchnorm("recalibrate", bn_samples), trained


def _measure(evaluated: Problem, curved: Problem, weights: Tensor, progress: Progress) -> Measured:
    """Measure the members by ``curved``; offsets are the losses by ``evaluated`` minus those."""
    n, spread = len(weights), Spread(weights)
    if not spread.consensus > 0 or all(torch.equal(w, weights[0]) for w in weights):
        raise OperationError(f"weights: all {n} members are equal; give members that differ")
    losses, offsets, slopes, bends = np.zeros(n), np.zeros(n), np.zeros((n, n)), np.zeros((n, n))
    for i, w in enumerate(weights):
        losses[i], gradient = curved.loss_and_gradient(w)
        image = fast_hessian(curved, w)(w - spread.mean)[None]
        slopes[i], bends[i] = spread.products(torch.cat([gradient[None], image])).T.cpu().numpy()
        offsets[i] = evaluated.loss(w.to(evaluated.dtype)) - losses[i] if evaluated is not curved else 0.0
        if not all(np.isfinite(part).all() for part in (losses[i], offsets[i], slopes[i], bends[i])):
            raise OperationError(f"weights: loss or derivatives of member {i} are not finite, leave it out")
        progress((i + 1) / n)
    rounding = float(torch.finfo(evaluated.dtype).eps * np.abs(losses).max())
    return Measured(spread.gram.cpu().numpy(), losses, offsets, slopes, bends, rounding)


def _greedy(hull: Hull, losses: Array) -> Array:
    """The coefficients (n,) of the uniform average of the members that are chosen one after another."""
    order = np.argsort(losses, kind="stable")
    best: Array = np.eye(len(order))[order[0]]
    lowest = losses[order[0]]
    for j in order[1:]:
        trial = ((best > 0) | (np.arange(len(order)) == j)).astype(np.float64)
        trial /= trial.sum()
        prediction = hull(trial[None])
        if prediction.loss[0] < lowest and prediction.high[0] < trial @ losses:
            best, lowest = trial, prediction.loss[0]
    return best

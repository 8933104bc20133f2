"""Several networks: how two are connected by paths, and what an average of their weights loses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.hull import LENGTHS, LEVEL, Hull, Measured
from landscape.analysis.spread import Spread
from landscape.checkpoint.weights import Kinds, Weights, network_of, networks_of
from landscape.core.analysis import analysis
from landscape.core.devices import double, single
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import Count, Natural, Positive, Seed, Several, Within
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.curvature.differences import ShardedRanks
from landscape.curvature.double_backward import LOW, in_full_precision
from landscape.curvature.eigenvalues import fast_hessian
from landscape.curvature.hessian import exact_only
from landscape.curvature.operators import ALONE
from landscape.evaluation import needs
from landscape.evaluation.evaluate import confirm, evaluator
from landscape.evaluation.grid import setting, with_metrics
from landscape.gradients.minibatches import Minibatches, placed, stream
from landscape.problem.adapters import PEFT, Products, pairs_of, rounded
from landscape.problem.alignment import aligned, change
from landscape.problem.batchnorm import SAMPLES, tracked
from landscape.problem.layout import as_array
from landscape.problem.losses import existing
from landscape.problem.metrics import names_of
from landscape.problem.problem import Problem, Run, problem_of
from landscape.problem.sharded import on_all, on_ranks
from landscape.results.base import Provenance
from landscape.results.comparison import Connection, WeightAverage, ranked
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
    columns = {name: np.stack([row[name].numpy() for row in values]) for name in values[0]}
    settings: dict[str, Any] = {"curve": curve, "align": align, "steps": steps, "lr": float(lr)}
    return Connection(
        t=t,
        barrier=np.array([barrier(t, row) for row in columns["loss"]]),
        **with_metrics(names_of(problem), columns),
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


# The most members: with n of them a matrix of (2n² − n)² numbers is factored, 32 MB for 32 (our choice).
MEMBERS = 32
# A sum of coefficients below this share of the sum of their sizes is rounding (our choice).
CANCELED = 1e-9


def _average_need(problem: Any, weights: Any, base: Any, last: Any, factors: Any, **_: Any) -> Need:
    """Members, deviations, gradient, product; a matrix over the observations for each length, and terms."""
    n = len(weights) if isinstance(weights, Sequence) else needs.rows(weights)
    n = min(n, last or n) + (base is not None)
    more = sum(a.size // a.shape[0] * b.shape[0] for a, b in pairs_of(problem.layout, factors))
    vectors, n = (2 * n + 4) * (1 + more / problem.layout.size), min(n, MEMBERS)
    return needs.curved(problem, vectors, 8 * (len(LENGTHS) + 8) * (2 * n**2) ** 2)


@analysis(_average_need, shorter="a part of the data", of_the_run=("weights",), version=2)
def average(
    problem: Problem | Run,
    weights: Sequence[Weights] | Tensor | None = None,
    coefficients: Sequence[float | Sequence[float]] | Array | None = None,
    *,
    base: Weights | None = None,
    plan: Literal["windows", "grid"] | None = None,
    last: Several | None = None,
    factors: Sequence[tuple[str, str]] = PEFT,
    rank: Count | None = None,
    exact: Natural | bool = True,
    bn_samples: Several = SAMPLES,
    labels: Sequence[str] = (),
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> WeightAverage:
    """Predict the loss of averages of weights, before they are evaluated.

    Members may be checkpoints of a run (SWA, LAWA, WSM), the learners of a run, fine-tunings of a network (a
    soup, task vectors) or adapters. The loss and the gradient at each member w_j, and one Hessian product
    with its distance from the mean, are measured once; from them follow the losses of all averages w =
    Σ_j a_j w_j: to second order Σ a_j L(w_j) − ½ tr(HC), with C the covariance of the members, and higher
    orders from a Gaussian process around a quadratic function, in the affine hull of the members. The average
    is not evaluated for it. The 90% interval is that of length scales from half the members' distance from
    their mean to four times, and of the orders that are missing: where each order corrects more than the one
    before (``ratio`` ≥ 1), as between networks that were trained independently, the interval has no ends.

    Besides, members are chosen by prediction: from the best on, each that lowers the predicted loss of the
    uniform average (greedy soup, Wortsman et al. 2022, Recipe 1, which evaluates each average), if the
    interval of that loss is below the mean loss of the averaged members.

    A network with BatchNorm has, at each member and average, statistics that are estimated there. Gradients
    and products go through those of batches of ``bn_samples``; the differences between the losses with either
    statistics are predicted linearly, and the largest of them is part of the interval.

    Losses are those of averages in float32. The loss of an average as a file would have it, in the members'
    own type and rank, is ``stored``.

    Args:
        problem: the loss; or a run, on its training set. It may be sharded.
        weights: the members, 2 to 32: (n, P), or a list of networks in any form that :func:`landscape.line`
            takes; default: the run's learners. Of a sharded problem each rank gives vectors of its own parts.
        coefficients: a_j, one for each member, divided by their sum; by default uniform. Of shape (n,), or
            (K, n) for K averages. With a base λ_j, which are taken as they are.
        base: the network from which the members were fine-tuned. Averages are then base + Σ_j λ_j (w_j −
            base) (task arithmetic, Ilharco et al. 2023). It is measured as a further member, the first.
        plan: averages to rank: "windows", the last 2, 3, … members with equal weights (LAWA, Kaddour 2022)
            and with weights that grow linearly; "grid", with a base, 0.05, 0.10, … 1 for all λ_j (Ilharco et
            al. 2023).
        last: how many of the members ``plan="windows"`` takes, the last ones; default: all.
        factors: names of the factors A and B of adapters, by which parameters' names differ, such as
            [("A", "B")]; default: those of peft. The products BA are averaged; with () their factors are,
            each by itself.
        rank: of the average of products, as it would be stored; default: all that it needs.
        exact: whether the exact losses of the averages are computed beside it, a pass over the data each; or
            of how many, those with the lowest predictions; the chosen one comes last.
        bn_samples: samples from which statistics of BatchNorm are estimated.
        labels: names of the members; default: 0, 1, …
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Predicted losses with intervals of the averages that were asked for, and of the chosen one.

    Raises:
        InputError: a number of members or coefficients that is not allowed, what is no weights of this model,
            a model without second derivatives, or factors whose products do not determine the loss.
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
    own: Any = problem_of(problem, sharded=True)
    based = base is not None
    if last is not None and plan != "windows":
        raise InputError("last: not allowed without plan='windows'; leave members out of weights")
    if last is not None and weights is not None:
        weights, labels = weights[-last:], list(labels)[-last:]
    pairs, sharded = pairs_of(own.layout, factors), on_ranks(own)
    problem = own if sharded else in_full_precision(own)
    if rank is not None and not pairs:
        raise InputError("rank: not allowed, only averages of products have one; name their factors")
    if sharded:
        on_all(own, partial(_check_sharded, own, weights, pairs, bn_samples))
    members, kinds = on_all(own, partial(_members, own, problem, weights, base, labels))
    n = len(members)
    if sharded:  # of arrays the call has compared the kind only
        numbers_of = getattr(coefficients, "tolist", lambda: coefficients)
        own.agree("average", {"weights": n, "coefficients": numbers_of()})
    if n > MEMBERS:
        raise InputError(f"weights: {n} members are not allowed, it must be 2 to {MEMBERS}")
    names, requested = _requested(coefficients, plan, n, based)
    exact_only(problem, "average")
    products = Products(problem, pairs) if pairs else None
    if products:
        for row in members:
            products.check(row)
        problem = in_full_precision(products.problem)
        members = torch.stack([products(row) for row in members])
    evaluated, curved = _with_statistics(problem, bn_samples)
    measured = _measure(evaluated, curved, members := single(members), portion(progress, 0, 0.9))
    hull, members_loss = Hull(measured), measured.losses + measured.offsets
    averages = np.vstack([requested, chosen := _greedy(hull, members_loss)])
    predicted = hull(averages)
    best = ranked(predicted.loss[:-1], predicted.ratio[:-1])
    places = range(len(averages)) if exact is True else [*best, len(requested)][:exact]
    numbers: dict[str, Any] = _exact(evaluated, averages, members, places, kinds, products, rank)
    taken(progress)(1.0)
    by_factor = not factors and pairs_of(own.layout, PEFT)
    return WeightAverage(
        members_loss=members_loss,
        coefficients=averages,
        **predicted._asdict(),
        **numbers,
        stored_as=", ".join(sorted({str(kind).removeprefix("torch.") for kind in kinds.values()})),
        space="products" if products else "factors" if by_factor else "weights",
        rank=rank or 0,
        names=(*names, "chosen average"),
        metric_names=names_of(problem),
        chosen=chosen > 0,
        labels=("base",) * based + tuple(labels or map(str, range(n - based))),
        parameters=own.size if sharded else problem.layout.size,
        products=n,
        level=LEVEL,
        **setting(evaluated),
        **about,
    )


def _exact(
    problem: Problem, averages: Array, members: Tensor, places: Iterable[int], kinds: Kinds,
    products: Products | None, rank: int | None,
) -> dict[str, Array]:  # fmt: skip
    """The exact losses and metrics of the averages at ``places``, the losses also as they would be stored.

    They are NaN for the other averages.
    """
    numbers = {name: np.full(len(averages), np.nan) for name in ("exact", "stored", "ranks", "truncation")}
    numbers["metrics"] = np.full((len(names_of(problem)), len(averages)), np.nan)
    for k in places:
        theta = (torch.from_numpy(averages[k]).to(members) @ members).to(problem.dtype)
        values = problem.totals(theta).cpu().numpy() / problem.samples  # loss, accuracy, metrics
        numbers["exact"][k], numbers["metrics"][:, k] = values[0], values[2:]
        if products:
            theta, numbers["ranks"][k], numbers["truncation"][k] = products.stored(theta, rank, kinds)
        elif kinds:
            theta = rounded(problem, theta, kinds)
        if kinds or rank:
            numbers["stored"][k] = problem.loss(theta)
    return numbers


def _check_sharded(problem: Any, weights: Any, pairs: Sequence[Any], bn_samples: int) -> None:
    """InputError for what averages of a sharded model do not take."""
    low = next((k for k in (problem.coarse, getattr(weights, "dtype", None)) if k in LOW), None)
    words = "not allowed with a sharded model"
    if pairs:
        raise InputError(f"factors: products are {words}; give factors=() for averages of the factors")
    if bn_samples != SAMPLES or tracked(problem.model):
        raise InputError(f"bn_samples: estimates of BatchNorm's statistics are {words}; take a Problem")
    if low:
        name = str(low).removeprefix("torch.")
        raise InputError(f"problem, weights: {name} is {words} in averages; take float32 or float64")


def _members(
    own: Problem, problem: Problem, weights: Any, base: Any, labels: Sequence[str]
) -> tuple[Tensor, Kinds]:
    """The members (n, P), the base before them, and the types below float32 of what stores them, by name."""
    networks = [] if weights is None else networks_of(problem, weights, labels)
    if base is not None:
        networks.insert(0, network_of(problem, base, "base"))
    every = [network.kinds for network in networks] + [{slot.name: own.dtype for slot in own.layout.slots}]
    kinds = ({name: kind for name, kind in of.items() if kind in LOW} for of in every)
    if base is not None or not isinstance(weights, Tensor):  # which is taken without a copy
        weights = torch.stack([network.theta for network in networks]) if networks else None
    return placed(problem, weights, smallest=2), next((k for k in kinds if k), {})


def _requested(coefficients: Any, plan: str | None, n: int, based: bool) -> tuple[list[str], Array]:
    """Names and coefficients (K, n) of the averages that are asked for; the rows sum to 1.

    InputError for coefficients that are not allowed.
    """
    if plan is None:
        rows = _shares(coefficients, n, based)
        return [f"average {k}" for k in range(len(rows))] if len(rows) > 1 else ["average"], rows
    if coefficients is not None or based != (plan == "grid"):
        needed = "with a base" if plan == "grid" else "without a base"
        raise InputError(f"plan: '{plan}' is allowed {needed} and without coefficients alone")
    named = {f"average at λ = {k / 20:g}": np.full(n - 1, k / 20) for k in range(1, 21)}
    if plan == "windows":
        shapes = {"": np.ones(n), ", growing": np.arange(1, n + 1)}
        windows = [(k, kind) for k in range(2, n + 1) for kind in shapes]
        named = {f"last {k}{kind}": np.append(np.zeros(n - k), shapes[kind][:k]) for k, kind in windows}
    return [*named], _shares([*named.values()], n, based)


def _shares(coefficients: Any, n: int, based: bool) -> Array:
    """(K, n), ``coefficients`` whose rows sum to 1, by the base, the first member, if there is one."""
    m = n - based
    if coefficients is None:
        coefficients = np.full(m, 1 / m)
    try:
        rows = np.atleast_2d(np.asarray(coefficients, dtype=np.float64))
    except (TypeError, ValueError):
        rows = np.zeros((0, 0))
    if rows.ndim != 2 or rows.shape[1] != m or not len(rows):
        raise InputError(f"coefficients: shape {np.shape(coefficients)}, it must be ({m},) or (K, {m})")
    sums, sizes = rows.sum(1, keepdims=True), np.abs(rows).sum(1)
    for row in rows[~(np.isfinite(sizes) & (based | (sums[:, 0] > CANCELED * sizes)))][:1]:
        needed = "finite" if based else "finite and sum to more than 0"
        raise InputError(f"coefficients: {row.tolist()} are not allowed, they must be {needed}")
    return np.hstack([1 - sums, rows]) if based else np.divide(rows, sums)


def _with_statistics(problem: Problem, bn_samples: int) -> tuple[Problem, Problem]:
    """The problem of the losses, and of the derivatives, which differs with BatchNorm."""
    if problem.batchnorm.name == "train" or not tracked(problem.model):
        return problem, problem
    trained = problem.with_batchnorm("train", bn_samples)
    recalibrates = problem.batchnorm.name == "recalibrate"
    return problem if recalibrates else problem.with_batchnorm("recalibrate", bn_samples), trained


def _measure(evaluated: Problem, curved: Any, weights: Tensor, progress: Progress) -> Measured:
    """Measure the members by ``curved``; offsets are the losses by ``evaluated`` minus those."""
    ranks = ShardedRanks(curved) if on_ranks(curved) else ALONE
    n, spread, error = len(weights), Spread(weights, ranks), 0.0
    differ = ranks.total(torch.tensor([not torch.equal(w, weights[0]) for w in weights]).double())
    if not (spread.consensus > 0 and differ.any()):
        raise OperationError(f"weights: all {n} members are equal; give members that differ")
    losses, offsets, slopes, bends = np.zeros(n), np.zeros(n), np.zeros((n, n)), np.zeros((n, n))
    for i, w in enumerate(weights):
        losses[i], gradient = curved.loss_and_gradient(w)
        image, errors = fast_hessian(curved, w).verified((w - spread.mean)[None])
        error = max(error, errors[0] * float(spread.gram[i, i].sqrt()) / 2)
        slopes[i], bends[i] = spread.products(torch.cat([gradient[None], image])).T.cpu().numpy()
        offsets[i] = evaluated.loss(w.to(evaluated.dtype)) - losses[i] if evaluated is not curved else 0.0
        if not all(np.isfinite(part).all() for part in (losses[i], offsets[i], slopes[i], bends[i])):
            raise OperationError(f"weights: loss or derivatives of member {i} are not finite, leave it out")
        progress((i + 1) / n)
    rounding = float(torch.finfo(evaluated.dtype).eps * np.abs(losses).max())
    return Measured(spread.gram.cpu().numpy(), losses, offsets, slopes, bends, rounding, error)


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

"""Connect two networks by paths of low loss, and predict the loss of averages of networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.hull import LENGTHS, LEVEL, Hull, MemberMeasurements
from landscape.analysis.spread import Spread
from landscape.checkpoint.weights import Kinds, Weights, network_of, networks_of
from landscape.core.analysis import analysis
from landscape.core.devices import at_least_float32, double
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import AtLeastTwo, Count, Natural, Positive, Seed, Within
from landscape.core.progress import Progress, ProgressOption, portion, reporter
from landscape.curvature.differences import ShardedRanks
from landscape.curvature.double_backward import LOW, in_full_precision
from landscape.curvature.eigenvalues import fast_hessian
from landscape.curvature.hessian import exact_only
from landscape.curvature.operators import ALONE
from landscape.evaluation import needs
from landscape.evaluation.evaluate import check_one_loss, evaluator
from landscape.evaluation.grid import setting, with_metrics
from landscape.gradients.minibatches import Minibatches, placed, stream
from landscape.problem.adapters import PEFT, Products, pairs_of, rounded
from landscape.problem.alignment import aligned, change
from landscape.problem.batchnorm import SAMPLES, layers_with_statistics
from landscape.problem.layout import as_array
from landscape.problem.losses import finite_gradient
from landscape.problem.metrics import names_of
from landscape.problem.problem import Problem, Run, problem_of
from landscape.problem.sharded import on_all, on_ranks
from landscape.results.base import Provenance
from landscape.results.comparison import Connection, WeightAverage, ranked
from landscape.results.geometry import barrier

# Points of a path, and samples in a minibatch: those of Garipov et al.'s code (eval_curve.py, train.py).
POINTS, BATCH = 61, 128
# Adam's step size (Kingma and Ba 2015, Algorithm 1). The number of steps is our choice: it takes minutes on a
# small network. Garipov et al. train a curve as long as a network.
LR, STEPS = 1e-3, 1000


def end_and_bend(curve: str, t: Any) -> tuple[Any, Any]:
    """Return the coefficients of the end and of the bend at ``t`` on a curve.

    The coefficients of start, end and bend sum to 1. Bézier: t² and 2t(1 − t). Chain: two straight lines,
    which meet in the bend at t = ½ (Garipov et al. 2018, section 3).

    Example:
        >>> [[float(number) for number in end_and_bend(curve, 0.5)] for curve in ("bezier", "chain")]
        [[0.25, 0.5], [0.0, 1.0]]
    """
    if curve == "bezier":
        return t**2, 2 * t * (1 - t)
    beyond = np.maximum(2 * t - 1, 0)
    return beyond, 1 - np.abs(2 * t - 1)


def _connect_need(problem: Any, align: Any, **_: Any) -> Need:
    """Return the need of :func:`connect`: ends, bend, Adam's state, gradients, and vectors in float64.

    Alignment by activations has those of both networks, and a copy, in float64, for half a chunk of samples.
    """
    aligned_activations = 1.5 * needs.double(problem) if align == "activations" else 0.0
    return needs.need(problem, 12 + 8 * needs.double(problem), 3 + aligned_activations)


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
    bn_samples: AtLeastTwo = SAMPLES,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Connection:
    """Compute the loss between two networks: on a line, on a line after alignment, and along a trained curve.

    A permutation of hidden units changes the weights, but not the function (Entezari et al. 2022). Alignment
    permutes the units of b so that b is near to a, by matching weights (Ainsworth et al. 2023, Algorithm 1)
    or activations (Li et al. 2015). The model's outputs confirm that the function stays the same.

    The curve from a to the aligned b has one control point, the bend. Adam trains the bend on the mean loss
    over t uniform in [0, 1] (Garipov et al. 2018, Eq. 2). During this training, BatchNorm uses each
    minibatch's statistics; on the paths, its statistics are estimated again at each point (Jordan et al.
    2023).

    Args:
        problem: the loss; or a run, on its training set.
        a, b: two networks, in any form that :func:`landscape.line` accepts; without b, the paths lead from
            the problem's center to a.
        curve: "bezier", a quadratic curve, or "chain", two straight lines that meet in the bend.
        align: what units are matched by: "weights"; or "activations", by their correlations over up to 1,000
            samples. A unit's activation is taken at the input of the next layer that sums over units, such as
            a linear layer.
        points: the number of points of each path, at equal distances of t; a barrier is a maximum over them.
        steps: the number of training steps of the bend; with 0, the curve is the aligned line.
        lr: Adam's step size; it falls linearly to zero in the second half of the steps.
        batch: the number of samples in a minibatch; if the data has fewer samples, their number.
        bn_samples: the number of samples from which BatchNorm's statistics are estimated.
        seed: the seed of the order in which layers are aligned, of the minibatches, and of t.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Loss and accuracy (3, points) and barriers (3,) of the three paths, and weights w (4, P) of a, b, the
        aligned b and the bend. ``landscape.between(problem, [w[0], w[2], w[3]])`` is the plane that contains
        the curve.

    Raises:
        InputError: a vector of another length, a model with other layers, an argument that is not allowed, a
            model that does not run in float64, or aligned weights that compute another function than b.
        OperationError: weights that are not finite, or tensors whose names or shapes do not fit the model.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> problem = landscape.Problem(net, torch.nn.functional.cross_entropy, (x, y))
        >>> a = torch.randn(26)
        >>> order = torch.tensor([2, 0, 3, 1])  # b is a with its hidden units in another order
        >>> first, bias, last = a[:12].view(4, 3)[order], a[12:16][order], a[16:24].view(2, 4)[:, order]
        >>> b = torch.cat((first.flatten(), bias, last.flatten(), a[24:]))
        >>> aligned_b = landscape.connect(problem, a, b, steps=1).weights[2]
        >>> bool((torch.from_numpy(aligned_b) == a).all())
        True
    """
    problem = problem_of(problem)
    named_weights = {"problem": problem, "a": a} if b is None else {"a": a, "b": b}
    networks = [network_of(problem, weights, name) for name, weights in named_weights.items()]
    # (P,) each. In results, ``start`` is called a, and ``end`` is called b.
    start, end = (at_least_float32(network.theta) for network in networks)
    report = reporter(progress)
    path_problem = problem.with_batchnorm("recalibrate", bn_samples)
    aligned_end, symmetry = aligned(problem, start, end, align, seed)
    report(0.1)  # of the progress bar, alignment has 0.1, training 0.6, and each of the three paths 0.1
    batch = min(batch, problem.samples)
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    bend_progress = portion(report, 0.1, 0.7)
    bend = _train_bend(minibatches, curve, (start, aligned_end), steps, lr, stream(seed, 1), bend_progress)
    t = np.linspace(0, 1, points)
    # Coordinates (points, 2) along two directions: from the start to the path's end, and to the bend.
    on_line = np.stack((t, np.zeros_like(t)), 1)
    on_curve = np.stack(end_and_bend(curve, t), 1)
    paths = ((end, on_line), (aligned_end, on_line), (aligned_end, on_curve))
    values_of_paths = []
    for k, (path_end, path_coordinates) in enumerate(paths):
        directions = torch.stack((path_end - start, bend - start))
        coordinates = torch.from_numpy(path_coordinates)
        evaluate = evaluator(path_problem, start, directions, points)
        path_values = evaluate(coordinates, portion(report, 0.7 + k / 10, 0.8 + k / 10))
        check_one_loss(evaluate, start, directions, coordinates, path_values["loss"].numpy())
        values_of_paths.append(path_values)
    columns = {}
    for name in values_of_paths[0]:
        columns[name] = np.stack([path_values[name].numpy() for path_values in values_of_paths])
    own_loss = np.array([])  # of the networks with their own statistics of BatchNorm
    if layers_with_statistics(problem.model):
        own_loss = np.array([network.own_loss(problem) for network in networks])
    curve_options: dict[str, Any] = {"curve": curve, "align": align, "steps": steps, "lr": float(lr)}
    return Connection(
        t=t,
        barrier=np.array([barrier(t, losses) for losses in columns["loss"]]),
        **with_metrics(names_of(problem), columns),
        weights=np.stack([as_array(w) for w in (start, end, aligned_end, bend)]),
        distance=float((double(start) - double(end)).norm()),
        aligned_distance=float((double(start) - double(aligned_end)).norm()),
        groups=tuple(group.name for group in symmetry.groups),
        sizes=np.array([group.size for group in symmetry.groups], int),
        fixed=tuple(f"{name}: {reason}" for name, reason in symmetry.fixed.items()),
        # The largest change of the loss and the outputs by alignment: only rounding.
        largest_change=change(problem, end, aligned_end),
        own_loss=own_loss,
        **curve_options,
        batch=batch,
        seed=seed,
        **setting(path_problem),  # loss, number of samples, dtype and BatchNorm's statistics
        **about,
    )


def _train_bend(
    minibatches: Minibatches, curve: str, ends: tuple[Tensor, Tensor], steps: int, lr: float,
    generator: torch.Generator, report: Progress,
) -> Tensor:  # fmt: skip
    """Train the bend (P,) of a curve, and return it.

    Training starts in the middle of the two ``ends`` (P,). ``generator`` draws the t of each step.
    """
    start, end = ends
    bend: Tensor = (start + end) / 2
    optimizer = torch.optim.Adam([bend], lr)
    for step, (minibatch,) in zip(range(steps), minibatches, strict=False):
        t = float(torch.rand((), generator=generator))
        of_end, of_bend = end_and_bend(curve, t)
        theta = (1 - of_end - of_bend) * start + of_end * end + of_bend * bend
        gradient = finite_gradient(*minibatch.loss_and_gradient(theta.to(minibatch.dtype))).to(bend)
        bend.grad = of_bend * gradient  # the chain rule: theta has the coefficient of_bend
        optimizer.param_groups[0]["lr"] = lr * min(1, 2 * (1 - step / steps))
        optimizer.step()
        report((step + 1) / steps)
    return bend


# The largest number of members: n members need a factored matrix of (2n² − n)² numbers, 32 MB for 32 (our
# choice).
MEMBERS = 32
# A sum of coefficients below this share of the sum of their sizes is only rounding (our choice).
CANCELED = 1e-9


def _average_need(problem: Any, weights: Any, base: Any, last: Any, factors: Any, **_: Any) -> Need:
    """Return the need of :func:`average`.

    These are members, deviations, a gradient and a product; and, for each length scale, a matrix over the
    observations.
    """
    n = len(weights) if isinstance(weights, Sequence) else needs.rows(weights)
    n = min(n, last or n) + (base is not None)
    product_size = sum(a.size // a.shape[0] * b.shape[0] for a, b in pairs_of(problem.layout, factors))
    vectors, n = (2 * n + 4) * (1 + product_size / problem.layout.size), min(n, MEMBERS)
    return needs.curved(problem, vectors, 8 * (len(LENGTHS) + 8) * (2 * n**2) ** 2)


@analysis(_average_need, shorter="a part of the data", of_the_run=("weights",), version=2)
def average(
    problem: Problem | Run,
    weights: Sequence[Weights] | Tensor | None = None,
    coefficients: Sequence[float | Sequence[float]] | Array | None = None,
    *,
    base: Weights | None = None,
    plan: Literal["windows", "grid"] | None = None,
    last: AtLeastTwo | None = None,
    factors: Sequence[tuple[str, str]] = PEFT,
    rank: Count | None = None,
    exact: Natural | bool = True,
    bn_samples: AtLeastTwo = SAMPLES,
    labels: Sequence[str] = (),
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> WeightAverage:
    """Predict the loss of averages of weights, before an average is evaluated.

    The averaged networks, called members, may be checkpoints of a run (SWA, LAWA, WSM), its learners,
    fine-tunings of a network (a soup, task vectors) or adapters. From the loss, the gradient and one Hessian
    product at each member w_j, a Gaussian process around a quadratic function predicts the losses of all
    averages w = Σ_j a_j w_j. The 90% interval of a prediction is infinite if terms of higher order are larger
    than those of second order (``ratio`` ≥ 1), for example between networks that were trained independently.
    A greedy soup (Wortsman et al. 2022, Recipe 1), chosen by predicted losses, is added as the last average.

    BatchNorm's statistics are estimated again at each member and average. Averages are evaluated in the
    problem's precision, but at least in float32. Saving rounds an average to the members' own type. Averages
    of products of adapter factors are first cut to ``rank``. The field ``stored`` has the losses of averages
    as saved.

    Args:
        problem: the loss; or a run, on its training set. If the model is sharded, each rank passes its own
            part of the weights.
        weights: the 2 to 32 members: (n, P), or a list of networks in any form that :func:`landscape.line`
            accepts; default: the run's learners.
        coefficients: the a_j: (n,), or (K, n) for K averages; each row is divided by its sum. With a base:
            λ_j, not divided. Default: equal coefficients.
        base: the network from which the members were fine-tuned: averages are base + Σ_j λ_j (w_j − base)
            (task arithmetic, Ilharco et al. 2023). The base is measured as the first member.
        plan: a set of averages in place of ``coefficients``. "windows": averages of the last 2, 3, … members,
            with equal (LAWA, Kaddour 2022) and with linearly growing coefficients. "grid": averages with a
            base, in which all λ_j are equal: 0.05, 0.10, …, 1.
        last: the number of last members that ``plan="windows"`` uses; default: all.
        factors: substrings of parameter names that mark the factors A and B of an adapter; default: those of
            peft. The products BA are averaged; with () each factor is averaged by itself.
        rank: the rank of stored averages of products; default: the rank that they need.
        exact: whether to also compute the exact loss of each average, by a pass over the data; or the
            number of averages for which to do so: first those of lowest predicted loss, last the greedy soup.
        bn_samples: the number of samples from which BatchNorm's statistics are estimated.
        labels: names of the members; default: 0, 1, …
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The predicted losses of the requested averages and of the greedy soup, with intervals.

    Raises:
        InputError: a number of members or coefficients that is not allowed, a vector of another length, a
            model with other layers or without second derivatives, or factors whose products do not determine
            the loss.
        OperationError: equal members, tensors whose names or shapes do not fit the model, or weights, losses
            or gradients that are not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> members = torch.tensor([[1.0, 0.2], [-1.0, 0.2], [0.0, 3.0]])
        >>> result = landscape.average(problem, members, [1, 1, 0])
        >>> result.loss.round(3).tolist(), result.chosen.tolist()  # the soup has the same two members
        ([0.02, 0.02], [True, True, False])
    """
    given_problem: Any = problem_of(problem, sharded=True)
    has_base = base is not None
    if last is not None and plan != "windows":
        raise InputError("last: not allowed without plan='windows'; leave members out of weights")
    # ``weights`` is None only if they were left out and ``problem`` is no run. This is refused below.
    if last is not None and weights is not None:
        weights, labels = weights[-last:], list(labels)[-last:]
    factor_pairs = pairs_of(given_problem.layout, factors)
    is_sharded = on_ranks(given_problem)
    problem = given_problem if is_sharded else in_full_precision(given_problem)
    if rank is not None and not factor_pairs:
        raise InputError("rank: not allowed, only averages of products have one; name their factors")
    if is_sharded:  # ``on_all``: an error on one rank is raised on all ranks
        on_all(given_problem, partial(_check_sharded, given_problem, weights, factor_pairs, bn_samples))
    read_members = partial(_members, given_problem, problem, weights, base, labels)
    # half_types: by name, the type of each parameter that a network stores in float16 or bfloat16.
    members, half_types = on_all(given_problem, read_members)
    n = len(members)
    if is_sharded:  # the ranks have compared only types and shapes of arrays: compare the numbers
        coefficient_numbers: Any = getattr(coefficients, "tolist", lambda: coefficients)()
        given_problem.agree("average", {"weights": n, "coefficients": coefficient_numbers})
    if n > MEMBERS:
        raise InputError(f"weights: {n} members are not allowed, it must be 2 to {MEMBERS}")
    names, requested_averages = _requested_averages(coefficients, plan, n, has_base)
    exact_only(problem, "average")  # refuses a model without second derivatives
    # From weights of factors to their products.
    to_products = Products(problem, factor_pairs) if factor_pairs else None
    if to_products:
        for member in members:
            to_products.check(member)
        problem = in_full_precision(to_products.problem)
        members = torch.stack([to_products(member) for member in members])
    members = at_least_float32(members)
    loss_problem, derivative_problem = _with_statistics(problem, bn_samples)
    measurements = _measure(loss_problem, derivative_problem, members, portion(progress, 0, 0.9))
    hull = Hull(measurements)
    # With the offsets, these are losses with BatchNorm's statistics estimated again at each member.
    members_loss = measurements.losses + measurements.offsets
    soup = _greedy_soup(hull, members_loss)
    averages = np.vstack([requested_averages, soup])  # coefficients (K, n)
    prediction = hull(averages)
    ranking = [*ranked(prediction.loss[:-1], prediction.ratio[:-1]), len(averages) - 1]  # the soup is last
    indices = range(len(averages)) if exact is True else ranking[: int(exact)]  # False: none
    exact_fields: dict[str, Any] = _exact_fields(
        loss_problem, averages, members, indices, half_types, to_products, rank
    )
    reporter(progress)(1.0)
    space = "products" if to_products else "weights"
    if not factors and pairs_of(given_problem.layout, PEFT):  # adapters whose factors are averaged themselves
        space = "factors"
    type_names = sorted({str(dtype).removeprefix("torch.") for dtype in half_types.values()})
    labels = labels or [str(k) for k in range(n - has_base)]  # the base is named below
    return WeightAverage(
        members_loss=members_loss,
        coefficients=averages,
        **prediction._asdict(),
        **exact_fields,
        stored_as=", ".join(type_names),
        space=space,
        rank=rank or 0,
        names=(*names, "chosen average"),
        metric_names=names_of(problem),
        chosen=soup > 0,
        labels=("base", *labels) if has_base else tuple(labels),
        parameters=given_problem.size if is_sharded else problem.layout.size,
        products=n,  # a Hessian product for each member
        level=LEVEL,
        **setting(loss_problem),
        **about,
    )


def _exact_fields(
    problem: Problem, averages: Array, members: Tensor, indices: Iterable[int], half_types: Kinds,
    to_products: Products | None, rank: int | None,
) -> dict[str, Array]:  # fmt: skip
    """Return the fields on exact losses and metrics of ``averages`` (K, n), also as they would be stored.

    They are NaN for averages that are not at ``indices``.
    """
    fields = {name: np.full(len(averages), np.nan) for name in ("exact", "stored", "ranks", "truncation")}
    fields["metrics"] = np.full((len(names_of(problem)), len(averages)), np.nan)
    for k in indices:
        theta = (torch.from_numpy(averages[k]).to(members) @ members).to(problem.dtype)
        loss, _, *metrics = problem.totals(theta).cpu().numpy() / problem.samples
        fields["exact"][k], fields["metrics"][:, k] = loss, metrics
        if to_products:
            theta, fields["ranks"][k], fields["truncation"][k] = to_products.truncate(theta, rank, half_types)
        elif half_types:
            theta = rounded(problem, theta, half_types)
        if half_types or rank:
            fields["stored"][k] = problem.loss(theta)
    return fields


def _check_sharded(problem: Any, weights: Any, pairs: Sequence[Any], bn_samples: int) -> None:
    """Raise InputError for arguments of averages that are not allowed with a sharded model."""
    words = "not allowed with a sharded model"
    if pairs:
        raise InputError(f"factors: products are {words}; give factors=() for averages of the factors")
    if bn_samples != SAMPLES or layers_with_statistics(problem.model):
        raise InputError(f"bn_samples: estimates of BatchNorm's statistics are {words}; take a Problem")
    for dtype in (problem.coarse, getattr(weights, "dtype", None)):
        if dtype in LOW:
            name = str(dtype).removeprefix("torch.")
            raise InputError(f"problem, weights: {name} is {words} in averages; take float32 or float64")


def _members(
    given_problem: Problem, problem: Problem, weights: Any, base: Any, labels: Sequence[str]
) -> tuple[Tensor, Kinds]:
    """Return the members (n, P), the base first, and the types below float32 of stored parameters, by name.

    The types are those of the first network that has one, or else of the given problem.
    """
    networks = [] if weights is None else networks_of(problem, weights, labels)
    if base is not None:
        networks.insert(0, network_of(problem, base, "base"))
    own_types = {slot.name: given_problem.dtype for slot in given_problem.layout.slots}
    half_types: Kinds = {}
    for types in [*(network.kinds for network in networks), own_types]:
        half_types = half_types or {name: dtype for name, dtype in types.items() if dtype in LOW}
    if base is not None or not isinstance(weights, Tensor):  # a tensor is used without a copy
        weights = torch.stack([network.theta for network in networks]) if networks else None
    return placed(problem, weights, min_rows=2), half_types


def _requested_averages(
    coefficients: Any, plan: str | None, n: int, has_base: bool
) -> tuple[list[str], Array]:
    """Return the names (K,) of the requested averages, and their coefficients (K, n), whose rows sum to 1.

    Raises InputError for coefficients that are not allowed.
    """
    if plan is None:
        rows = _normalized(coefficients, n, has_base)
        return [f"average {k}" for k in range(len(rows))] if len(rows) > 1 else ["average"], rows
    if coefficients is not None or has_base != (plan == "grid"):
        needed = "with a base" if plan == "grid" else "without a base"
        raise InputError(f"plan: '{plan}' is allowed {needed} and without coefficients alone")
    if plan == "grid":
        averages = {f"average at λ = {k / 20:g}": np.full(n - 1, k / 20) for k in range(1, 21)}
        return [*averages], _normalized([*averages.values()], n, has_base)
    averages = {}
    for length in range(2, n + 1):
        zeros = np.zeros(n - length)
        averages[f"last {length}"] = np.append(zeros, np.ones(length))
        averages[f"last {length}, growing"] = np.append(zeros, np.arange(1, length + 1))
    return [*averages], _normalized([*averages.values()], n, has_base)


def _normalized(coefficients: Any, n: int, has_base: bool) -> Array:
    """Return ``coefficients`` as rows (K, n) that sum to 1: a base takes the rest, else they are divided."""
    m = n - has_base
    if coefficients is None:
        coefficients = np.full(m, 1 / m)
    try:
        rows = np.atleast_2d(np.asarray(coefficients, dtype=np.float64))
    except (TypeError, ValueError):
        rows = np.zeros((0, 0))
    if rows.ndim != 2 or rows.shape[1] != m or not len(rows):
        raise InputError(f"coefficients: shape {np.shape(coefficients)}, it must be ({m},) or (K, {m})")
    sums, sizes = rows.sum(1, keepdims=True), np.abs(rows).sum(1)
    is_allowed = np.isfinite(sizes) & (has_base | (sums[:, 0] > CANCELED * sizes))
    if not is_allowed.all():
        needed = "finite" if has_base else "finite and sum to more than 0"
        refused_row = rows[~is_allowed][0].tolist()
        raise InputError(f"coefficients: {refused_row} are not allowed, they must be {needed}")
    return np.hstack([1 - sums, rows]) if has_base else np.divide(rows, sums)


def _with_statistics(problem: Problem, bn_samples: int) -> tuple[Problem, Problem]:
    """Return the problems of the losses and of the derivatives, which differ in BatchNorm's statistics.

    Losses have statistics that are estimated again at each member; derivatives have those of batches of
    ``bn_samples``. The difference of the two losses at a member is its ``offsets`` in
    :class:`MemberMeasurements`.
    """
    if problem.batchnorm.name == "train" or not layers_with_statistics(problem.model):
        return problem, problem
    derivative_problem = problem.with_batchnorm("train", bn_samples)
    if problem.batchnorm.name != "recalibrate":
        problem = problem.with_batchnorm("recalibrate", bn_samples)
    return problem, derivative_problem


def _measure(
    loss_problem: Problem, derivative_problem: Any, weights: Tensor, progress: Progress
) -> MemberMeasurements:
    """Measure losses and derivatives at the members ``weights`` (n, P), each with its own problem."""
    ranks = ShardedRanks(derivative_problem) if on_ranks(derivative_problem) else ALONE
    n, spread, error = len(weights), Spread(weights, ranks), 0.0
    differences = ranks.total(torch.tensor([not torch.equal(w, weights[0]) for w in weights]).double())
    if not (spread.consensus > 0 and differences.any()):
        raise OperationError(f"weights: all {n} members are equal; give members that differ")
    losses, offsets, slopes, bends = np.zeros(n), np.zeros(n), np.zeros((n, n)), np.zeros((n, n))
    for i, w in enumerate(weights):
        losses[i], gradient = derivative_problem.loss_and_gradient(w)
        image, errors = fast_hessian(derivative_problem, w).verified((w - spread.mean)[None])
        error = max(error, errors[0] * float(spread.gram[i, i].sqrt()) / 2)
        slopes[i], bends[i] = spread.inner_products(torch.cat([gradient[None], image])).T.cpu().numpy()
        if loss_problem is not derivative_problem:
            offsets[i] = loss_problem.loss(w.to(loss_problem.dtype)) - losses[i]
        if not np.isfinite([losses[i], offsets[i], *slopes[i], *bends[i]]).all():
            raise OperationError(f"weights: loss or derivatives of member {i} are not finite, leave it out")
        progress((i + 1) / n)
    rounding = float(torch.finfo(loss_problem.dtype).eps * np.abs(losses).max())
    return MemberMeasurements(spread.gram.cpu().numpy(), losses, offsets, slopes, bends, rounding, error)


def _greedy_soup(hull: Hull, losses: Array) -> Array:
    """Return the coefficients (n,) of the greedy soup of members with ``losses`` (n,).

    The soup begins with the best member. A further member joins if this lowers the predicted loss of the
    uniform average, and if the interval of that loss is below the mean loss of the averaged members.
    (Wortsman et al. 2022 evaluate each average instead.)
    """
    best_member, *others = np.argsort(losses, kind="stable")
    soup: Array = np.eye(len(losses))[best_member]
    lowest = losses[best_member]
    for member in others:
        trial = (soup > 0).astype(np.float64)
        trial[member] = 1.0
        trial /= trial.sum()
        prediction = hull(trial[None])
        if prediction.loss[0] < lowest and prediction.high[0] < trial @ losses:
            soup, lowest = trial, prediction.loss[0]
    return soup

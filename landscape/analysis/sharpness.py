"""Sharpness: the rise of the loss within a distance, and the curvature of minibatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.analysis import analysis
from landscape.core.devices import double, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import Count, Natural, NonNegative, Positive, Seed, Several, UpToOne
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.core.statistics import mean_and_error
from landscape.curvature.eigenvalues import Matrix, top_eigenvalues
from landscape.curvature.hessian import Derivatives, HessianOptions, Part, gradient_curvature
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL, RitzPairs, SearchOptions, search_operator
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import (
    MAX_COSTLY,
    MIN_COSTLY,
    Minibatches,
    Precision,
    known_batch,
    learners_of,
    stream,
)
from landscape.problem.losses import existing
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.flatness import BatchSharpness, Sharpness
from landscape.results.spectrum import BatchSpectrum

# First step relative to the radius (that of APGD; Croce and Hein 2020), its factors after a success and a
# failure (our choice), and the step below which a search ends (our choice: it then changes the loss no more).
FIRST, LONGER, SHORTER, LAST = 2.0, 1.5, 0.4, 1e-3
# The search also ends where gradient and displacement are parallel to this angle in radians, as at a maximum
# on the sphere (our choice: the loss is then lower by half its square at most, relatively).
PARALLEL = 1e-3


class Ascent(NamedTuple):
    """``rise``: the largest loss that was found less ``base``, that at the center; ``residual``: the angle
    between gradient and displacement there, in radians, 0 at a maximum on the sphere; and ``gradients``.
    """

    rise: float
    base: float
    residual: float
    gradients: int


def _largest_rise(
    problem: Problem, scale: Tensor | None, rho: float, starts: list[Tensor], steps: int
) -> Ascent:
    """The largest L(θ + scale·ε) − L(θ) over ‖ε‖ ≤ ρ that ``steps`` gradients from each start find.

    A lower bound of the maximum: the problem is not convex. The first start is ρ times the direction of the
    gradient, the maximum to first order (Foret et al. 2021), where the gradient is not zero.

    Args:
        problem: the loss, centered on θ.
        scale: (P,), such as |θ|; None: 1 for all.
        rho: ρ.
        starts: further directions (P,) in which the search starts.
        steps: gradients for each start, at most.
    """

    def loss_and_slope(at: Tensor) -> tuple[float, Tensor]:
        """The loss at ε = ``at``, and its gradient in ε."""
        theta = problem.weights + at if scale is None else torch.addcmul(problem.weights, scale, at)
        loss, gradient = problem.loss_and_gradient(theta)
        existing(loss, gradient)
        return loss, gradient if scale is None else gradient.mul_(scale)

    base, slope = loss_and_slope(torch.zeros_like(problem.weights))
    rise, residual, gradients = 0.0, 0.0, 1  # ε = 0 is allowed, too
    for start in ([slope] if float(vector_norm(slope)) > 0 else []) + starts:
        highest, angle, used = _climb(loss_and_slope, rho, start, steps)
        gradients += used
        if highest - base > rise:
            rise, residual = highest - base, angle
    return Ascent(rise, base, residual, gradients)


def _climb(
    loss_and_slope: Callable[[Tensor], tuple[float, Tensor]], rho: float, start: Tensor, steps: int
) -> tuple[float, float, int]:
    """The largest loss from ``start``, scaled to norm ρ, the angle there, and how many gradients it took.

    The step grows where the loss does, and shrinks where it falls.
    """
    at, step = start * (rho / float(vector_norm(start))), FIRST
    loss, slope = loss_and_slope(at)
    used, angle = 1, _angle(slope, at, rho)
    while used < steps and step > LAST and angle > PARALLEL and float(vector_norm(slope)) > 0:
        end = torch.add(at, slope, alpha=step * rho / float(vector_norm(slope)))
        end *= min(1.0, rho / float(vector_norm(end)))
        value, gradient = loss_and_slope(end)
        used += 1
        if value > loss:  # False for NaN
            at, loss, slope, step = end, value, gradient, step * LONGER
            angle = _angle(slope, at, rho)
        else:
            step *= SHORTER
    return loss, angle, used


def _angle(slope: Tensor, at: Tensor, rho: float) -> float:
    """The angle between gradient and displacement; π inside the ball, where the gradient must vanish."""
    size, length = float(vector_norm(slope)), float(vector_norm(at))
    if size == 0:
        return 0.0
    if length < rho * (1 - 1e-6):
        return torch.pi
    between = double(slope) / size - double(at) / length
    return 2 * float(torch.asin((vector_norm(between) / 2).clamp(max=1)))


# Gradients of one search (Andriushchenko et al. 2023 take 20 on CIFAR-10), and random starts of it besides
# that along the gradient (our choice: at a minimum the gradient is mostly noise).
STEPS, STARTS = 20, 1


@analysis(
    # Scale, starts, two displacements with their gradients, and moved weights.
    lambda problem, starts, **_: needs.need(problem, 8 + starts + 2 * needs.double(problem), 2),
    shorter="a larger relative_error= or a smaller max_draws=",
    group="Measure curvature",
    options={"rho": {"metavar": "ρ,…", "each": True}},
    variant="kind",
)
def sharpness(
    problem: Problem | Run,
    rho: Positive,
    kind: Literal["worst", "average"] = "worst",
    *,
    adaptive: bool = True,
    m: Count | None = None,
    steps: Count = STEPS,
    starts: Natural = STARTS,
    relative_error: Positive = Precision.relative_error,
    min_draws: Several = MIN_COSTLY,
    max_draws: Several = MAX_COSTLY,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Sharpness:
    """Measure the rise of the loss within a radius.

    It is the worst rise within ρ of the weights, or its mean over N(0, ρ²): (adaptive) m-sharpness.

    The definitions are those of Andriushchenko et al. (arXiv 2302.07011), after Kwon et al. (2021) for
    ``adaptive`` and Foret et al. (2021) for ``m``, with the logits as they are; pairs ±δ and the search are
    ours. Adaptive sharpness does not change where the weights of two layers are scaled so that the network
    stays the same. Neither kind predicts generalization well: over modern networks its correlation with the
    test error is low, and may be negative (arXiv 2302.07011). BatchNorm has the statistics of the problem at
    all weights, not those of the minibatches.

    Args:
        problem: the loss; or a run, on its training set.
        rho: ρ: the radius ("worst"), or the standard deviation of each component of δ/c ("average").
        kind: "worst" or "average".
        adaptive: c = |w|, so that each weight moves in proportion to its size; else c = 1.
        m: samples of a minibatch, over which the sharpness is a mean; default: all samples at once.
        steps: gradients for each start of a search, at most.
        starts: random starts of a search, besides that along the gradient.
        relative_error: draw until the standard error is at most this share of the value.
        min_draws: the least number of draws, which are minibatches or pairs ±δ.
        max_draws: the largest number of draws.
        seed: draws minibatches, displacements and starts.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
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
        >>> problem.weights.zero_()  # the minimum; H has the eigenvalues 1 and 9
        tensor([0., 0.])
        >>> round(landscape.sharpness(problem, 0.1, adaptive=False).value, 4)  # 9ρ²/2
        0.045
    """
    problem = problem_of(problem)
    precision = Precision(relative_error, min_draws, max_draws)
    theta, rho = problem.weights, float(rho)
    scale = theta.abs() if adaptive else None
    if scale is not None and not bool(scale.any()):
        raise InputError("adaptive: all weights are 0, so that none could move; give adaptive=False")
    if m is not None and m > problem.samples:
        raise InputError(f"m: {m} is not allowed, the data has {problem.samples} samples")
    worst, generator = kind == "worst", stream(seed, 1)
    fixed = worst and m is None
    whole = problem.loss() if not worst and m is None else None

    def normal() -> Tensor:
        """(P,), the same draw on every device."""
        direction = torch.randn(len(theta), dtype=torch.float64, generator=generator).to(theta)
        return problem.along_weights(direction)

    ascents, report = list[Ascent](), taken(progress)
    for part in _parts(problem, m, seed):
        directions = [normal() for _ in range(starts if worst else 1)]
        if worst:
            ascents.append(_largest_rise(part, scale, rho, directions, steps))
        else:
            ascents.append(_mean_rise(part, scale, rho * directions[0], whole))
        rises = np.array([ascent.rise for ascent in ascents])
        mean, error = mean_and_error(rises)
        if fixed or precision.enough(len(ascents), mean, error, report):
            break
    report(1.0)
    settings: dict[str, Any] = {"kind": kind, "rho": rho, "adaptive": adaptive, "m": m or 0, "seed": seed}
    return Sharpness(
        values=rises,
        standard_error=0.0 if fixed else error,
        loss=float(np.mean([ascent.base for ascent in ascents])),
        converged=fixed or precision.met(mean, error),
        residual=float(np.mean([ascent.residual for ascent in ascents])),
        gradients=sum(ascent.gradients for ascent in ascents) + (whole is not None),
        steps=steps if worst else 0,
        starts=starts if worst else 0,
        fixed=0 if scale is None else int((scale == 0).sum()),
        parameters=len(theta),
        **settings,
        **setting(problem),
        **about,
    )


def _mean_rise(part: Problem, scale: Tensor | None, shift: Tensor, base: float | None) -> Ascent:
    """The mean rise at ±δ, in which odd terms cancel; ``base``: the loss at the center, if known."""
    shift = shift if scale is None else shift * scale
    base_loss = part.loss() if base is None else base
    rise = (part.loss(part.weights + shift) + part.loss(part.weights - shift)) / 2 - base_loss
    if not math.isfinite(rise):
        raise OperationError(f"rho: displacements raise the loss from {base_loss:g} by {rise:g}; take less")
    return Ascent(rise, base_loss, 0.0, 2 + (base is None))


def _parts(problem: Problem, m: int | None, seed: int) -> Iterator[Problem]:
    """Minibatches of ``m`` samples, drawn with replacement; None: the problem itself, again and again."""
    if m is None:
        return itertools.repeat(problem)
    minibatches = Minibatches(problem, m, stream(seed, 0), own_statistics=False)
    return (part for (part,) in minibatches)


@analysis(
    lambda problem, quantities, **_: needs.curved(problem, needs.basis(problem, 1) if quantities else 4),
    shorter="a larger relative_error=",
    of_the_run=("batch",),
    version=1,
)
def batch_sharpness(
    problem: Problem | Run,
    batch: Count | None = None,
    *,
    weights: Tensor | None = None,
    local_batch: Count | None = None,
    lr: float = math.nan,
    limit: float | None = None,
    quantities: Sequence[Literal["lambda-max"]] = ("lambda-max",),
    derivatives: Derivatives = "auto",
    relative_error: Positive = Precision.relative_error,
    min_draws: Several = Precision.min_draws,
    max_draws: Several = Precision.max_draws,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> BatchSharpness:
    """E_B[g_Bᵀ H_B g_B/‖g_B‖²]: the curvature that a minibatch's step meets along itself.

    g_B and H_B are gradient and Hessian of the loss of a minibatch B of ``batch`` samples, drawn with
    replacement. With plain SGD it settles near 2/η where the batch is small (Andreyev and Beneventano 2024,
    arXiv:2412.20553), while λ_max of the whole loss stays below. With ``weights`` it is measured at each
    learner's weights, too, with a minibatch of its own (our choice). BatchNorm takes each minibatch's
    statistics, as in training. A problem's penalty and weight decay belong to the loss of every minibatch.

    Args:
        problem: the loss, on the training set, centered on w_a; or a run.
        batch: B, samples of a minibatch at w_a: the total batch of a step; default: the run's.
        weights: (n, P), the learners' weights, if they are to be measured.
        local_batch: samples of a learner's minibatch; default: batch / n.
        lr, limit: η and the largest stable ηλ of the update rule, kept with the result.
        quantities: what is measured besides: "lambda-max" at w_a over all data, which is most of the work
            where the data is much larger than a minibatch; () for nothing.
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
            By differences a draw takes some twenty times as long: gradients at several steps, in float64.
        relative_error: draw until the standard error of the mean is at most this share of it.
        min_draws: the least number of draws. Each takes one gradient and one product over ``batch`` samples,
            or ``local_batch`` for each learner.
        max_draws: the largest number of draws.
        seed: draws the minibatches.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        curvature and norm2 (draws,), learner_curvature and learner_norm2 (learner draws, n), and their means
        with standard errors.

    Raises:
        InputError: a batch, relative error, quantity or number of draws that is not allowed, or weights of
            another shape.
        OperationError: a minibatch whose gradient is zero or not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([2.0, 2.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.batch_sharpness(problem, 1)  # of single samples, with Hessians of rank one
        >>> round(result.value, 3), round(result.lambda_max, 3)
        (8.0, 4.0)
    """
    precision = Precision(relative_error, min_draws, max_draws)
    problem, batch = problem_of(problem), known_batch(batch)
    with_lambda_max = bool(quantities)
    thetas, local = learners_of(problem, batch, weights, local_batch)
    at_mean = Minibatches(problem, batch, stream(seed, 0))
    few = at_mean.whole.on(at_mean.whole.data.few())
    by = HessianOptions(derivatives=derivatives).at(few).derivatives
    part = 1 / (1 + (thetas is not None) + with_lambda_max)
    curvatures = _curvatures(at_mean, problem.weights[None], by, precision, portion(progress, 0, part))
    measured, of_learners = [curvatures], dict[str, Any]()
    if thetas is not None:
        at_learners = Minibatches(problem, local, stream(seed, 1), len(thetas))
        curvatures = _curvatures(at_learners, thetas, by, precision, portion(progress, part, 2 * part))
        of_learners = {"learner_curvature": curvatures[0], "learner_norm2": curvatures[1]}
        measured.append(curvatures)
    top, residual = math.nan, math.nan
    if with_lambda_max:
        last = portion(progress, 1 - part, 1)
        pairs = top_eigenvalues(at_mean.whole, derivatives=by, seed=seed, progress=last)
        top, residual = float(pairs.values[0]), float(pairs.residuals[0])
    return BatchSharpness(
        curvature=measured[0][0, :, 0],
        norm2=measured[0][1, :, 0],
        **of_learners,
        local_batch=0 if thetas is None else local,
        batch=batch,
        lambda_max=top,
        residual=residual,
        lr=lr,
        limit=math.nan if limit is None else limit,
        relative_error=relative_error,
        converged=all(precision.met(*_mean_of(columns)) for columns in measured),
        derivatives=by,
        product_error=max(float(columns[2].max()) for columns in measured),
        seed=seed,
        # The minibatches come from all samples; with BatchNorm λ_max leaves a smaller last minibatch out.
        **(setting(at_mean.whole) | {"samples": problem.samples}),
        **about,
    )


def _curvatures(
    minibatches: Minibatches, weights: Tensor, by: str, precision: Precision, progress: Progress
) -> Array:
    """(3, draws, n), curvature, ‖g‖² and the first's error at ``weights`` (n, P), until the mean is as exact
    as asked for."""
    rows: list[list[tuple[float, ...]]] = []
    for batches in minibatches:
        pairs = zip(batches, weights, strict=True)
        rows.append([gradient_curvature(p, t, derivatives=by) for p, t in pairs])
        if precision.enough(len(rows), *_mean_of(np.moveaxis(np.array(rows), 2, 0)), progress):
            break
    return np.moveaxis(np.array(rows), 2, 0)


def _mean_of(columns: Array) -> tuple[float, float]:
    """The mean curvature of (3, draws, n), and its standard error with that of the products."""
    value, error = mean_and_error(columns[0].mean(1))
    return value, math.hypot(error, float(columns[2].max()))


# Minibatches of a spectrum over them (our choice: the spread of λ_max then has an error of 9%, 1/√(2·63)).
BATCHES = 64


@analysis(
    lambda problem, k, part, derivatives, **_: needs.curved(
        problem, needs.basis(problem, 2 * k + 1, part), part=part, derivatives=derivatives
    ),
    shorter="a smaller draws= or batch=",
    of_the_run=("batch",),
    version=1,
    group="Measure curvature",
    options={"split": None, "part": None},
)
def batch_spectrum(
    problem: Problem | Run,
    batch: Count | None = None,
    k: Count = 1,
    *,
    draws: Several = BATCHES,
    weight_decay: NonNegative = 0.0,
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    part: Part = None,
    derivatives: Derivatives = "auto",
    residual_tol: UpToOne = RESIDUAL_TOL,
    max_products: Count = MAX_PRODUCTS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> BatchSpectrum:
    """The largest eigenvalues and the smallest of the Hessians of drawn minibatches, at the center.

    Their distribution is that of Park and Kim 2022 (arXiv 2202.06709, Figure 4). Minibatches are drawn with
    replacement; BatchNorm takes each one's statistics, and each loss has the penalty and weight decay.

    Args:
        problem: the loss, on the training set; or a run.
        batch: B, samples of a minibatch; default: the run's total batch.
        k: how many of the largest eigenvalues.
        draws: minibatches, 64 by default.
        weight_decay: λ of a penalty λ/2·‖θ‖² that the problem does not have: its Hessian λI is added.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
        residual_tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to
            zero.
        max_products: Hessian-vector products of a search, at most.
        seed: draws the minibatches and the starting vector of all searches.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        values and residuals (draws, k + 1), and those over all samples (k + 1,).

    Raises:
        InputError: a batch, count, tolerance or option that is not allowed.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([2.0, 2.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.batch_spectrum(problem, 1, draws=4)  # each sample sees one of two directions
        >>> round(result.value, 3), result.whole.round(3).tolist()
        (8.0, [4.0, 4.0])
    """
    problem, progress = problem_of(problem), taken(progress)
    minibatches = Minibatches(problem, known_batch(batch), stream(seed, 0))
    options = {"weights": None, "matrix": matrix, "part": part, "derivatives": derivatives}
    whole = Matrix.of(minibatches.whole, seed, about, **options, max_memory=max_memory)
    shares = itertools.pairwise(np.linspace(0, 1, draws + 2))
    target = SearchOptions(1, k, residual_tol, max_products)
    start, by = whole.start(), replace(whole.options, derivatives=whole.operator.derivatives)
    every = list[RitzPairs]()
    operators = itertools.chain([whole.operator], (by.at(minibatch) for (minibatch,) in minibatches))
    for h, share in zip(operators, shares, strict=False):
        pairs, _ = search_operator(h, start, replace(target, progress=portion(progress, *share)))
        whole.check(pairs.residuals)
        every.append(pairs)
    values = np.stack([pairs.values.numpy() for pairs in every]) + weight_decay
    residuals = np.stack([pairs.residuals.numpy() for pairs in every])
    return BatchSpectrum(
        **(whole.about | {"samples": problem.samples}),
        values=values[1:],
        residuals=residuals[1:],
        whole=values[0],
        whole_residuals=residuals[0],
        batch=minibatches.batch,
        weight_decay=weight_decay,
        converged=all(pairs.converged for pairs in every),
        residual_tol=residual_tol,
        products=sum(pairs.products for pairs in every),
        product_error=max(pairs.product_error for pairs in every),
    )

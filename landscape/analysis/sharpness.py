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
from landscape.core.devices import double, generator, normal, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import AtLeastTwo, Count, Natural, NonNegative, Positive, Seed, UpToOne
from landscape.core.progress import Progress, ProgressOption, portion, reporter
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
    learners_of,
    required_batch,
    stream,
)
from landscape.problem.losses import finite_gradient
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


class Rise(NamedTuple):
    """A rise of the loss above the center: the largest that a search has found, or the mean of two points.

    Attributes:
        rise: in nats.
        center_loss: the loss at the center.
        angle: the angle in radians between gradient and displacement where the search ended, 0 at a maximum
            on the sphere; 0 for a mean.
        gradients: the number of gradients, or of losses for a mean.
    """

    rise: float
    center_loss: float
    angle: float
    gradients: int


def _largest_rise(
    problem: Problem, scale: Tensor | None, rho: float, starts: list[Tensor], steps: int
) -> Rise:
    """Search the largest rise L(θ + scale·ε) − L(θ) over ‖ε‖ ≤ ρ, and return the largest that was found.

    The returned rise is a lower bound of the maximum, because a search can end in a local maximum. The first
    search starts at ε = ρ · g/‖g‖, where g is the gradient in ε at 0; there the loss is largest to first
    order (Foret et al. 2021). If g is zero, this search is left out.

    Args:
        problem: the loss, centered on θ.
        scale: (P,), such as |θ|; None: 1 for all parameters.
        rho: ρ, in units of ‖ε‖.
        starts: directions (P,) in which further searches start.
        steps: the largest number of gradients of each search.
    """

    def loss_and_slope(at: Tensor) -> tuple[float, Tensor]:
        """Return the loss at ε = ``at``, and its gradient in ε."""
        theta = problem.weights + at if scale is None else torch.addcmul(problem.weights, scale, at)
        loss, gradient = problem.loss_and_gradient(theta)
        finite_gradient(loss, gradient)  # refuses a loss or gradient that is not finite
        return loss, gradient if scale is None else gradient.mul_(scale)

    center_loss, slope = loss_and_slope(torch.zeros_like(problem.weights))
    if float(vector_norm(slope)) > 0:
        starts = [slope, *starts]
    # The first candidate is ε = 0. Without a displacement, the angle between it and the gradient counts as 0.
    largest_rise, angle = 0.0, 0.0
    gradients = 1
    for start in starts:
        highest_loss, angle_there, search_gradients = _climb(loss_and_slope, rho, start, steps)
        gradients += search_gradients
        if highest_loss - center_loss > largest_rise:
            largest_rise, angle = highest_loss - center_loss, angle_there
    return Rise(largest_rise, center_loss, angle, gradients)


def _climb(
    loss_and_slope: Callable[[Tensor], tuple[float, Tensor]], rho: float, start: Tensor, steps: int
) -> tuple[float, float, int]:
    """Search from ``start``, and return the largest loss, the angle there, and the number of gradients.

    ``start`` is scaled to norm ρ. The step grows where the loss rises, and shrinks where the loss falls.
    """
    at, step = start * (rho / float(vector_norm(start))), FIRST
    loss, slope = loss_and_slope(at)
    count, angle = 1, _angle(slope, at, rho)
    while count < steps and step > LAST and angle > PARALLEL and float(vector_norm(slope)) > 0:
        trial = torch.add(at, slope, alpha=step * rho / float(vector_norm(slope)))
        trial *= min(1.0, rho / float(vector_norm(trial)))
        trial_loss, trial_slope = loss_and_slope(trial)
        count += 1
        if trial_loss > loss:  # False for NaN
            at, loss, slope = trial, trial_loss, trial_slope
            step *= LONGER
            angle = _angle(slope, at, rho)
        else:
            step *= SHORTER
    return loss, angle, count


def _angle(slope: Tensor, at: Tensor, rho: float) -> float:
    """Return the angle between gradient and displacement; π inside the ball with a remaining gradient."""
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
    # Vectors: the random starts; eight others (scale, slope at 0, two displacements with their gradients,
    # moved weights, a chunk's gradient); and two in float64, for the angle.
    lambda problem, starts, **_: needs.need(problem, 8 + starts + 2 * needs.double(problem), activations=2),
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
    min_draws: AtLeastTwo = MIN_COSTLY,
    max_draws: AtLeastTwo = MAX_COSTLY,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Sharpness:
    """Measure the rise of the loss within a radius: the (adaptive) m-sharpness.

    Sharpness is the largest rise L(w + δ) − L(w) over ‖δ/c‖ ≤ ρ, or the mean rise over δ/c ~ N(0, ρ²). The
    scale c is |w| if ``adaptive``, else 1. This follows Andriushchenko et al. (arXiv 2302.07011), who take
    ``adaptive`` from Kwon et al. 2021 and ``m`` from Foret et al. 2021; but logits are not normalized. The
    search for the largest rise is our choice. So are draws in pairs ±δ for the mean rise. Over modern
    networks, sharpness has a low, sometimes negative correlation with the test error (arXiv 2302.07011). At w
    and at w + δ, BatchNorm uses the statistics that the problem prescribes, by default those of its model.

    Args:
        problem: the loss; or a run, on its training set.
        rho: ρ: the radius ("worst"), or the standard deviation of each component of δ/c ("average").
        kind: "worst", for the largest rise, or "average", for the mean rise.
        adaptive: True: c = |w|, so that each weight moves in proportion to its size; False: c = 1.
        m: the number of samples in a minibatch; sharpness is the mean over minibatches; default: all samples.
        steps: the largest number of gradients of each search.
        starts: the number of random starts of searches; a further search starts along the gradient.
        relative_error: draw until the standard error is at most this share of the value.
        min_draws: the smallest number of draws; a draw is a minibatch if ``m`` is given, and a pair ±δ if
            ``kind`` is "average".
        max_draws: the largest number of draws.
        seed: the seed of minibatches, displacements and starts.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        ``value`` and ``standard_error`` in nats; the error is 0 for kind "worst" over all samples.

    Raises:
        InputError: an argument that is not allowed, or weights that are all 0 with ``adaptive``.

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
    is_worst = kind == "worst"
    # Stream 0 of the seed is for minibatches, and stream 1 for displacements and starts.
    rng = generator(stream(seed, 1).initial_seed(), theta.device, len(theta))
    is_single_search = is_worst and m is None  # over all samples: there is nothing to draw
    # Draws ±δ over all samples share one loss at the center. In other cases each draw computes its own.
    shared_center_loss = None if is_worst or m is not None else problem.loss()

    measured_rises: list[Rise] = []
    report = reporter(progress)
    for minibatch in _minibatches(problem, m, seed):
        count = starts if is_worst else 1
        # ``along_weights`` sets a direction to zero along padding rows of embeddings, which never move.
        directions = [problem.along_weights(normal(len(theta), rng).to(theta)) for _ in range(count)]
        if is_worst:
            measured_rises.append(_largest_rise(minibatch, scale, rho, directions, steps))
        else:
            measured_rises.append(_mean_rise(minibatch, scale, rho * directions[0], shared_center_loss))
        rises = np.array([measured.rise for measured in measured_rises])
        mean, error = mean_and_error(rises)
        if is_single_search or precision.enough(len(rises), mean, error, report):
            break
    report(1.0)
    arguments: dict[str, Any] = {"kind": kind, "rho": rho, "adaptive": adaptive, "m": m or 0, "seed": seed}
    return Sharpness(
        values=rises,
        standard_error=0.0 if is_single_search else error,
        loss=float(np.mean([measured.center_loss for measured in measured_rises])),
        converged=is_single_search or precision.met(mean, error),
        # The angle between gradient and displacement where a search has ended; 0 at a maximum on the sphere.
        residual=float(np.mean([measured.angle for measured in measured_rises])),
        gradients=sum(measured.gradients for measured in measured_rises) + (shared_center_loss is not None),
        steps=steps if is_worst else 0,
        starts=starts if is_worst else 0,
        fixed=0 if scale is None else int((scale == 0).sum()),
        parameters=len(theta),
        random_device=rng.device.type,
        **arguments,
        **setting(problem),
        **about,
    )


def _mean_rise(problem: Problem, scale: Tensor | None, shift: Tensor, known_loss: float | None) -> Rise:
    """Return the mean rise at ±δ, in which odd terms cancel. ``known_loss``: at the center; None: unknown."""
    delta = shift if scale is None else shift * scale
    center_loss = problem.loss() if known_loss is None else known_loss
    rise = (problem.loss(problem.weights + delta) + problem.loss(problem.weights - delta)) / 2 - center_loss
    if not math.isfinite(rise):
        raise OperationError(f"rho: displacements raise the loss from {center_loss:g} by {rise:g}; take less")
    return Rise(rise, center_loss, 0.0, 2 + (known_loss is None))


def _minibatches(problem: Problem, m: int | None, seed: int) -> Iterator[Problem]:
    """Yield problems of ``m`` samples, drawn with replacement, or for None the whole problem; never end."""
    if m is None:
        return itertools.repeat(problem)
    minibatches = Minibatches(problem, m, stream(seed, 0), own_statistics=False)
    return (minibatch for (minibatch,) in minibatches)


@analysis(
    # Vectors: those of a search for λ_max; without a search four, for the curvature along a gradient.
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
    min_draws: AtLeastTwo = Precision.min_draws,
    max_draws: AtLeastTwo = Precision.max_draws,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> BatchSharpness:
    """Measure E_B[g_Bᵀ H_B g_B/‖g_B‖²], the curvature along the gradient of a minibatch.

    g_B and H_B are gradient and Hessian of the loss of a minibatch B, drawn with replacement. With plain SGD
    and small batches this curvature settles near 2/η, and λ_max of the loss over all samples stays below 2/η
    (Andreyev and Beneventano 2024, arXiv:2412.20553). BatchNorm uses each minibatch's statistics. The loss of
    every minibatch contains the penalty and the weight decay of the problem.

    Args:
        problem: the loss, on the training set, centered on w_a; or a run.
        batch: the number of samples in B at w_a; default: the total batch of one step of the run.
        weights: (n, P), the learners' weights. With them, each learner is also measured, at its own weights
            and on its own minibatches. (The paper measures no learners.)
        local_batch: the number of samples in a learner's minibatch; default: batch / n.
        lr: η, the learning rate, kept with the result.
        limit: the largest stable ηλ of the update rule, kept with the result.
        quantities: "lambda-max" to also compute λ_max at w_a over all data, or () to leave this out.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        relative_error: draw until the standard error is at most this share of the mean.
        min_draws: the smallest number of draws; a draw takes a gradient and a Hessian product.
        max_draws: the largest number of draws.
        seed: the seed of the minibatches.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        curvature and norm2 (draws,), learner_curvature and learner_norm2 (learner draws, n), and their means
        with standard errors.

    Raises:
        InputError: an argument that is not allowed, or weights of another shape.
        OperationError: a minibatch whose gradient is zero or not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([2.0, 2.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.batch_sharpness(problem, 1)  # a sample's Hessian has rank 1
        >>> round(result.value, 3), round(result.lambda_max, 3)
        (8.0, 4.0)
    """
    precision = Precision(relative_error, min_draws, max_draws)
    problem, batch = problem_of(problem), required_batch(batch)
    weights, local_batch = learners_of(problem, batch, weights, local_batch)
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    all_data = minibatches.whole_problem  # on all samples, in minibatches if the model has BatchNorm
    # For "auto", a check on a few samples decides between "exact" and "differences" for all minibatches.
    small_problem = all_data.on(all_data.data.few())
    derivatives = HessianOptions(derivatives=derivatives).at(small_problem).derivatives
    stages = 1 + (weights is not None) + bool(quantities)  # each has an equal share of the progress bar
    stage_progress = portion(progress, 0, 1 / stages)
    # (draws, 1) each: curvature, ‖g_B‖², and the error of the curvature by differences of gradients.
    center_columns = _curvatures(minibatches, problem.weights[None], derivatives, precision, stage_progress)
    curvature, norm2, _ = center_columns
    all_columns = [center_columns]
    learner_fields: dict[str, Any] = {}
    if weights is not None:
        learner_minibatches = Minibatches(problem, local_batch, stream(seed, 1), len(weights))
        stage_progress = portion(progress, 1 / stages, 2 / stages)
        learner_columns = _curvatures(learner_minibatches, weights, derivatives, precision, stage_progress)
        learner_fields = {"learner_curvature": learner_columns[0], "learner_norm2": learner_columns[1]}
        all_columns.append(learner_columns)
    lambda_max, residual = math.nan, math.nan
    if quantities:
        stage_progress = portion(progress, 1 - 1 / stages, 1)
        pairs = top_eigenvalues(all_data, derivatives=derivatives, seed=seed, progress=stage_progress)
        lambda_max, residual = float(pairs.values[0]), float(pairs.residuals[0])
    return BatchSharpness(
        curvature=curvature[:, 0],
        norm2=norm2[:, 0],
        **learner_fields,
        local_batch=0 if weights is None else local_batch,
        batch=batch,
        lambda_max=lambda_max,
        residual=residual,
        lr=lr,
        limit=math.nan if limit is None else limit,
        relative_error=relative_error,
        converged=all(precision.met(*_mean_of(columns)) for columns in all_columns),
        derivatives=derivatives,
        # The largest error of a curvature by differences.
        product_error=max(float(columns[2].max()) for columns in all_columns),
        seed=seed,
        # The number of samples from which minibatches are drawn. It may exceed that of ``all_data``, whose
        # minibatches have equal sizes.
        **(setting(all_data) | {"samples": problem.samples}),
        **about,
    )


def _curvatures(
    minibatches: Minibatches, weights: Tensor, derivatives: str, precision: Precision, progress: Progress
) -> Array:
    """Return curvature, ‖g‖² and the curvature's error by differences, at ``weights`` (n, P): (3, draws, n).

    Minibatches are drawn until ``precision`` is reached. The errors are 0 for exact products.
    """
    rows: list[list[tuple[float, ...]]] = []
    for learners_minibatches in minibatches:
        pairs = zip(learners_minibatches, weights, strict=True)
        rows.append([gradient_curvature(b, theta, derivatives=derivatives) for b, theta in pairs])
        columns = np.moveaxis(np.array(rows), 2, 0)
        if precision.enough(len(rows), *_mean_of(columns), progress):
            break
    return columns


def _mean_of(columns: Array) -> tuple[float, float]:
    """Return the mean curvature of (3, draws, n), and its standard error, with the error by differences."""
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
    draws: AtLeastTwo = BATCHES,
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
    """Compute the k largest eigenvalues and the smallest of the Hessian of each drawn minibatch.

    Park and Kim 2022 show the distribution of these eigenvalues (arXiv 2202.06709, Figure 4). Minibatches are
    drawn with replacement. BatchNorm uses each minibatch's statistics. The loss of every minibatch contains
    the penalty and the weight decay of the problem.

    Args:
        problem: the loss, on the training set; or a run.
        batch: the number of samples in a minibatch; default: the run's total batch.
        k: the number of largest eigenvalues.
        draws: the number of minibatches.
        weight_decay: the factor c of a penalty c/2·‖θ‖² in addition to that of the problem. The Hessian cI of
            this penalty is added.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters, to use only their diagonal block; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000).
        max_products: the largest number of Hessian-vector products of each search.
        seed: the seed of the minibatches and the starting vector of all searches.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        values and residuals (draws, k + 1) of minibatches, whole and whole_residuals (k + 1,) of all samples.

    Raises:
        InputError: an argument that is not allowed.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([2.0, 2.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.batch_spectrum(problem, 1, draws=4)  # a sample's Hessian has rank 1
        >>> round(result.value, 3), result.whole.round(3).tolist()
        (8.0, [4.0, 4.0])
    """
    problem, progress = problem_of(problem), reporter(progress)
    minibatches = Minibatches(problem, required_batch(batch), stream(seed, 0))
    options = {"weights": None, "matrix": matrix, "part": part, "derivatives": derivatives}
    # ``whole_problem``: on all samples, in minibatches if the model has BatchNorm.
    whole_hessian = Matrix.of(minibatches.whole_problem, seed, about, **options, max_memory=max_memory)
    target = SearchOptions(1, k, residual_tol, max_products)  # the smallest eigenvalue and the k largest
    start = whole_hessian.start()
    # ``derivatives``, exact or differences, is the same for all minibatches as for all samples.
    hessian_options = replace(whole_hessian.options, derivatives=whole_hessian.operator.derivatives)
    # ``at`` returns the Hessian of a minibatch, which is drawn only when its Hessian is needed.
    minibatch_hessians = (hessian_options.at(minibatch) for (minibatch,) in minibatches)
    hessians = itertools.islice(itertools.chain([whole_hessian.operator], minibatch_hessians), draws + 1)
    results: list[RitzPairs] = []  # first those of all samples, then those of each minibatch
    for number, h in enumerate(hessians):
        report = portion(progress, number / (draws + 1), (number + 1) / (draws + 1))
        pairs, _ = search_operator(h, start, replace(target, progress=report))
        whole_hessian.check(pairs.residuals)  # refuses residuals that are not finite
        results.append(pairs)
    values = np.stack([pairs.values.numpy() for pairs in results]) + weight_decay
    residuals = np.stack([pairs.residuals.numpy() for pairs in results])
    return BatchSpectrum(
        # The number of samples from which minibatches are drawn. It may exceed that of ``whole_problem``,
        # whose minibatches have equal sizes.
        **(whole_hessian.about | {"samples": problem.samples}),
        values=values[1:],
        residuals=residuals[1:],
        whole=values[0],
        whole_residuals=residuals[0],
        batch=minibatches.batch,
        weight_decay=weight_decay,
        converged=all(pairs.converged for pairs in results),
        residual_tol=residual_tol,
        products=sum(pairs.products for pairs in results),
        product_error=max(pairs.product_error for pairs in results),
    )

"""Measure the noise of gradients: Δ(2) of the learners' spread, the noise scale, and the alignment with H."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core import statistics
from landscape.core.analysis import analysis
from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import AtLeastTwo, Count, Positive, Seed
from landscape.core.progress import Progress, ProgressOption, portion, reporter
from landscape.curvature.eigenvalues import fast_hessian, top_eigenvalues
from landscape.curvature.hessian import HessianOperator, Preconditioner, as_preconditioner, exact_only
from landscape.curvature.operators import Products, row_products
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.learners import Stack
from landscape.gradients.minibatches import (
    GROUP_BYTES,
    GROUPS,
    LEAST_GROUPS,
    MAX_COSTLY,
    MIN_COSTLY,
    ExactGradientEstimator,
    GradientNoise,
    JackknifeEstimator,
    LearnersEstimator,
    Minibatches,
    Precision,
    check_unpenalized,
    in_minibatches,
    learners_of,
    placed,
    required_batch,
    stream,
)
from landscape.problem.layout import average
from landscape.problem.losses import finite_gradient
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.noise import Noise, NoiseAlignment, NoiseScale

# Draws give each standard error to about 13%, 1/√(2·31) (our choice).
DRAWS = 32


@analysis(
    # Memory: 5 tensors (n, P), which are weights, deviations, Hessian products, gradients at the learners and
    # gradients at the mean; and 4 tensors (P,) in float64.
    lambda problem, weights, **_: needs.curved(problem, 5 * needs.rows(weights) + 4 * needs.double(problem)),
    shorter="a smaller draws=",
    of_the_run=("weights", "lr", "local_batch"),
    version=1,
    group="Measure noise and learners",
    options={"split": None},
)
def noise(
    problem: Problem | Run,
    weights: Tensor | None = None,
    lr: Positive | None = None,
    local_batch: Count | None = None,
    *,
    draws: AtLeastTwo = DRAWS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Noise:
    """Estimate Δ(2), the noise from the learners' spread, in four ways.

    δ is the mean over learners j of ∇L^μ(w_j) − ∇L^μ(w_a). Here w_a is the mean of the learners' weights w_j,
    and L^μ is the loss of learner j's minibatch. The four estimates are α²‖δ‖² over drawn minibatches, which
    is the definition (``direct``); its first-order expansion with the minibatches' Hessians
    (``first_order``); α²‖δ‖² with gradients of all data (``full_batch``); and Eq. 4 of DPSGD-2020 with the
    Hessian of all data (``eq4``). BatchNorm uses each minibatch's statistics.

    Args:
        problem: the loss on the training set; or a run.
        weights: (n, P), the weights of at least 2 learners; default: the run's.
        lr: α, the learning rate; default: the run's.
        local_batch: the number of samples in a learner's minibatch; default: the run's.
        draws: the number of draws of minibatches; with 32, standard errors are right to about 13%.
        seed: the seed of the minibatches.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The estimates of Δ(2): direct and first_order (draws,), full_batch and eq4 (numbers). Other quantities
        are the terms of Δ_DP in DPSGD-2020: delta_s, delta_2 and delta_cross (draws,). All are squared
        distances in weight space.

    Raises:
        InputError: an argument that is not allowed, data without numbered samples, a penalty, or a model
            without second derivatives.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> weights = problem.weights + 0.1 * torch.randn(4, 8)
        >>> landscape.noise(problem, weights, lr=0.1, local_batch=5, draws=3).direct.shape
        (3,)
    """
    problem = problem_of(problem)
    # From a run, the decorator has filled in both (``of_the_run``).
    if lr is None or local_batch is None:
        raise InputError("lr, local_batch: missing, a problem and imported weights have none; give both")
    weights = placed(problem, weights, min_rows=2)  # checks them, and moves them to the problem's device
    check_unpenalized(problem, "Δ(2) is defined by the loss on data alone")
    problem.data.gather(torch.zeros(1, dtype=torch.long))  # refuses data without numbered samples at once
    problem = in_minibatches(problem, local_batch)
    exact_only(problem, "noise")  # refuses a model without second derivatives
    n, mean = len(weights), average(weights)
    deviations = weights - mean
    gradient = double(finite_gradient(*problem.loss_and_gradient(mean)))
    delta_terms = _delta_terms(problem, weights, mean, gradient)
    generator = torch.Generator().manual_seed(seed)
    report = reporter(progress)
    rows = []
    for draw in range(draws):
        rows.append(delta_terms(torch.randint(problem.samples, (n, local_batch), generator=generator)))
        report((draw + 1) / draws)
    columns = lr**2 * torch.tensor(rows, dtype=torch.float64).numpy().T  # (terms, draws)
    gradients_at_learners = torch.stack([finite_gradient(*problem.loss_and_gradient(w)) for w in weights])
    # δ with gradients of all data.
    full_delta = gradients_at_learners.to(gradient.device).mean(0, dtype=torch.float64) - gradient
    operator = HessianOperator(problem, mean, derivatives="exact")
    eq4 = sum(float(double(operator(deviation)).square().sum()) for deviation in deviations) / n**2
    return Noise(
        **dict(zip(DELTA_TERMS, columns, strict=True)),
        full_batch=lr**2 * float(full_delta @ full_delta),
        eq4=lr**2 * eq4,
        consensus=float(double(deviations).square().sum()) / n,
        lr=lr,
        learners=n,
        local_batch=local_batch,
        samples=problem.samples,
        seed=seed,
        **about,
    )


# Names of the result's fields that are computed from a draw of minibatches.
DELTA_TERMS = ("direct", "first_order", "delta_s", "delta_2", "delta_cross")


def _delta_terms(
    problem: Problem, weights: Tensor, mean: Tensor, gradient: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Return a function from a draw to the quantities named in DELTA_TERMS, without their factor lr².

    A draw is the indices (n, local_batch) of the samples in the learners' minibatches.

    Args:
        problem: the loss.
        weights: (n, P), the learners' weights.
        mean: (P,), the mean of ``weights``.
        gradient: (P,), the gradient of all data at ``mean``.
    """
    stack = Stack(problem)  # computes the gradients of all learners together
    gradients_at_learners, gradients_at_mean = torch.empty_like(weights), torch.empty_like(weights)

    def mean_row(rows: Tensor) -> Tensor:
        """Return the mean over the learners, (n, P) -> (P,), in float64."""
        return rows.to(gradient.device).mean(0, dtype=torch.float64)

    def perpendicular(v: Tensor) -> Tensor:
        """Return the component of ``v`` (P,) orthogonal to ``gradient``."""
        return v - (v @ gradient) / (gradient @ gradient) * gradient

    def terms(indices: Tensor) -> list[Tensor]:
        x, y = problem.data.gather(indices)
        stack.gradients(weights, x, y, out=gradients_at_learners)
        stack.gradients(mean.expand_as(weights), x, y, out=gradients_at_mean)
        delta = mean_row(gradients_at_learners - gradients_at_mean)
        products = []
        for samples, deviation in zip(indices, weights - mean, strict=True):
            operator = HessianOperator(problem.subset(samples), mean, derivatives="exact")
            products.append(operator(deviation))
        first_order = mean_row(torch.stack(products))
        perpendicular_delta = perpendicular(delta)
        perpendicular_s = perpendicular(mean_row(gradients_at_mean))  # g_S: the gradient of all minibatches
        return [  # in the order of DELTA_TERMS
            delta @ delta,
            first_order @ first_order,
            perpendicular_s @ perpendicular_s,
            perpendicular_delta @ perpendicular_delta,
            2 * perpendicular_s @ perpendicular_delta,
        ]

    return terms


def _noise_scale_need(problem: Any, weights: Any, gradient: Any, **_: Any) -> Need:
    """Return the need of :func:`noise_scale`: gradients of a draw, and sums of groups of gradients."""
    learners, groups = needs.rows(weights), 0
    if learners or gradient == "draws":
        groups = max(LEAST_GROUPS, min(GROUPS, GROUP_BYTES // (8 * problem.layout.size)))
    return needs.need(problem, 4 + 2 * learners + (groups + 2) * needs.double(problem), 2)


@analysis(_noise_scale_need, shorter="a larger relative_error=", of_the_run=("batch",))
def noise_scale(
    problem: Problem | Run,
    batch: Count | None = None,
    *,
    weights: Tensor | None = None,
    local_batch: Count | None = None,
    gradient: Literal["whole", "draws"] = "whole",
    precondition: Preconditioner | Tensor | None = None,
    relative_error: Positive = Precision.relative_error,
    min_draws: AtLeastTwo = Precision.min_draws,
    max_draws: AtLeastTwo = Precision.max_draws,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> NoiseScale:
    """Estimate B_simple = tr Σ/‖g‖², the batch at which noise and gradient are equal in size.

    Far below B_simple, a batch of twice the size needs little more than half the steps. Far above B_simple, a
    larger batch saves no steps (McCandlish et al. 2018, arXiv:1812.06162). g is the gradient of the loss at
    w_a, and Σ the covariance of one sample's gradient. tr Σ is B E‖g_B − g‖² over minibatches of B samples,
    drawn with replacement.
    BatchNorm uses each minibatch's statistics, which makes B_simple depend a little on B. Other layers, such
    as dropout, are in eval mode.

    Args:
        problem: the loss, on the training set, centered on w_a; or a run.
        batch: B, the number of samples in a minibatch at w_a; default: the run's total batch.
        weights: (n, P), the weights of n ≥ 2 learners. If given, B_simple of the learners' mean gradient is
            also estimated: from all draws together, and from single draws. (A training step has the
            minibatches of a single draw.)
        local_batch: the number of samples in a learner's minibatch; default: batch / n.
        gradient: "whole": g is computed from all data. "draws": ‖g‖² is the mean of ⟨g_B, g_B'⟩ over pairs of
            minibatches, which is less exact for a small ‖g‖.
        precondition: a positive diagonal D (P,), or the :func:`landscape.preconditioner` of a checkpoint that
            Adam or a similar optimizer trained; each gradient g is replaced by D^{-1/2} g.
        relative_error: draw until the standard error is at most this share of the value.
        min_draws: the smallest number (≥ 2) of draws. A draw is a minibatch at w_a, or one for each learner.
        max_draws: the largest number of draws.
        seed: the seed of the minibatches.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        B_simple in samples, tr Σ and ‖g‖², with standard errors, at w_a and from the learners.

    Raises:
        InputError: an argument that is not allowed, or weights of one learner or of another shape.
        OperationError: gradients that are not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.tensor([[1.0], [1.0]]), torch.tensor([[-2.0], [0.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> problem = landscape.Problem(model, torch.nn.MSELoss(), (x, y), weights=torch.zeros(1))
        >>> result = landscape.noise_scale(problem, 1)  # gradients 4 and 0
        >>> result.trace, result.norm2, result.value
        (4.0, 4.0, 1.0)
    """
    problem, batch = problem_of(problem), required_batch(batch)
    precision = Precision(relative_error, min_draws, max_draws)
    learner_weights, local_batch = learners_of(problem, batch, weights, local_batch)
    if learner_weights is not None and len(learner_weights) < 2:
        raise InputError("weights: those of 1 learner are not allowed, at least 2 are needed")
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    center_share = 1.0 if learner_weights is None else 0.5  # the share of the progress bar for w_a
    preconditioner = as_preconditioner(precondition)
    scale = None if preconditioner is None else preconditioner.root(problem).to(problem.weights)  # D^{-1/2}
    estimator: ExactGradientEstimator | JackknifeEstimator
    if gradient == "whole":
        whole_gradient = finite_gradient(*minibatches.whole_problem.loss_and_gradient())
        estimator = ExactGradientEstimator(whole_gradient if scale is None else scale * whole_gradient, batch)
    else:  # from pairs of minibatches, with standard errors by the jackknife
        estimator = JackknifeEstimator(problem.weights, batch)
    center_progress = portion(progress, 0, center_share)
    center = problem.weights[None]
    center_noise = _gradient_noise(minibatches, center, estimator, precision, center_progress, scale)
    noises = [center_noise]
    learner_fields: dict[str, Any] = {}
    if learner_weights is not None:
        learners = len(learner_weights)
        local_minibatches = Minibatches(problem, local_batch, stream(seed, 1), learners)
        local_estimator = LearnersEstimator(problem.weights, learners, local_batch)
        local_progress = portion(progress, center_share, 1)
        local_noise = _gradient_noise(
            local_minibatches, learner_weights, local_estimator, precision, local_progress, scale
        )
        noises.append(local_noise)
        learner_fields = {f"learner_{name}": value for name, value in vars(local_noise).items()}
        # ``rounds``: tr Σ and ‖g‖², estimated from each draw alone. A round is a draw of all learners.
        learner_fields |= local_estimator.rounds() | {"learners": learners, "local_batch": local_batch}
        learner_fields["learner_draws"] = local_estimator.draws
    return NoiseScale(
        **vars(center_noise),
        **learner_fields,
        batch=batch,
        draws=estimator.draws,
        gradient=gradient,
        precondition=preconditioner.name if preconditioner else "",
        relative_error=relative_error,
        converged=all(precision.met(noise.value, noise.standard_error) for noise in noises),
        seed=seed,
        **setting(minibatches.whole_problem),  # the loss, number of samples, dtype and BatchNorm's policy
        **about,
    )


def _gradient_noise(
    minibatches: Minibatches, weights: Tensor, estimator: ExactGradientEstimator | JackknifeEstimator,
    precision: Precision, progress: Progress, scale: Tensor | None,
) -> GradientNoise:  # fmt: skip
    """Draw gradients at ``weights`` (n, P) until their noise scale has the ``precision``, and return it.

    Gradients are multiplied by ``scale`` (P,).
    """
    for minibatch_problems in minibatches:
        pairs = zip(minibatch_problems, weights, strict=True)
        gradients = torch.stack([finite_gradient(*minibatch.loss_and_gradient(w)) for minibatch, w in pairs])
        estimator.add(gradients if scale is None else scale * gradients)
        if estimator.draws < precision.min_draws:
            precision.enough(estimator.draws, 0.0, math.inf, progress)  # reports the progress
            continue
        noise = estimator.estimate()
        if precision.enough(estimator.draws, noise.value, noise.standard_error, progress):
            break
    return noise


# The number of outliers in the spectrum of a classifier with ten classes (Gur-Ari et al. 2018).
K = 10
# Minibatches whose gradients and products are computed at once (our choice: the same number of products as in
# a trace).
BLOCK = 8


def _noise_alignment_need(problem: Any, k: Any, **_: Any) -> Need:
    """Return the need of :func:`noise_alignment`: the search, or eigenvectors and a block of gradients."""
    eigenvectors = (1 + needs.double(problem)) * k
    block = BLOCK * (3 + 5 * needs.double(problem))  # gradients, products, deviations, some in float64
    return needs.curved(problem, max(eigenvectors + block, needs.several(problem, k)))


@analysis(
    _noise_alignment_need,
    shorter="a larger relative_error=",
    of_the_run=("batch",),
    group="Measure noise and learners",
    options={"split": None, "search": None},
)
def noise_alignment(
    problem: Problem | Run,
    batch: Count | None = None,
    k: Count = K,
    *,
    relative_error: Positive = Precision.relative_error,
    min_draws: AtLeastTwo = MIN_COSTLY,
    max_draws: AtLeastTwo = MAX_COSTLY,
    search: Literal["auto", "exact"] = "auto",
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> NoiseAlignment:
    """Compare gradient noise with the Hessian.

    S is the second moment, and C the covariance, of the gradients of minibatches that are drawn with
    replacement. H is the Hessian of all samples. The result has tr(HS)/tr S, the interaction-aware sharpness
    of "A new characterization of the edge of stability" (2022); the diagonal C_ii in the basis of H's top
    eigenvectors; and the exponent γ in C_ii ∝ λ_i^γ. arXiv 2602.05600 finds 1 ≤ γ ≤ 2 in single fully
    connected layers; we take all parameters together (our choice). BatchNorm uses each minibatch's
    statistics.

    Args:
        problem: the loss on the training set; or a run.
        batch: the number of samples in a minibatch; default: the run's total batch.
        k: the number of eigenvectors; at most P.
        relative_error: draw until the standard error of tr(HS)/tr S is at most this share of the value.
        min_draws: the smallest number of draws. A draw takes a minibatch gradient and a Hessian product.
        max_draws: the largest number of draws.
        search: "auto" or "exact", as in :func:`landscape.top_eigenvalues`.
        seed: the seed of the minibatches and the start of the search of eigenvalues.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        ``value`` and ``standard_error`` of tr(HS)/tr S, C_ii (k,) and γ with their errors.

    Raises:
        InputError: a number that is not allowed, a penalty, or a model without second derivatives.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.ones(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.noise_alignment(problem, 1, 2)
        >>> bool(1 <= result.value <= 9)  # H has these eigenvalues
        True
    """
    problem, batch = problem_of(problem), required_batch(batch)
    precision = Precision(relative_error, min_draws, max_draws)
    check_unpenalized(problem, "the noise is that of the loss on data alone")
    exact_only(problem, "noise_alignment")  # refuses a model without second derivatives
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    problem = minibatches.whole_problem  # the loss of all data, where BatchNorm uses minibatches' statistics
    # An item of ``minibatches`` is a tuple with a minibatch for each learner: here one.
    endless_minibatches = (minibatch for (minibatch,) in minibatches)
    first_half, second_half = portion(progress, 0, 0.5), portion(progress, 0.5, 1)
    pairs = top_eigenvalues(problem, k, derivatives="exact", search=search, seed=seed, progress=first_half)
    hessian_products = row_products(fast_hessian(problem))
    gradient = double(finite_gradient(*problem.loss_and_gradient()))
    vectors = torch.from_numpy(pairs.vectors).to(gradient)
    curvature_terms = _curvature_terms(problem, hessian_products, gradient, vectors)
    rows = np.zeros((0, 4 + k))  # a row of curvature terms for each minibatch
    while True:
        block = itertools.islice(endless_minibatches, min(BLOCK, max_draws - len(rows)))
        rows = np.concatenate([rows, curvature_terms([*block])])
        # (draws,) each: gᵀHg and ‖g‖² of minibatch gradients g, and dᵀHd and ‖d‖² of their deviations d.
        gradient_forms, gradient_norms2, deviation_forms, deviation_norms2 = rows[:, :4].T
        # The interaction-aware sharpness: the result's ``value`` and ``standard_error``.
        ias, ias_error = statistics.ratio(gradient_forms, gradient_norms2)
        if precision.enough(len(rows), ias, ias_error, second_half):
            break
    noise_ratio, noise_ratio_error = statistics.ratio(deviation_forms, deviation_norms2)  # tr(HC)/tr C
    squared_deviations = rows[:, 4:]  # (draws, k), along each eigenvector
    gamma, gamma_error, scatter = exponent(pairs.values, squared_deviations)
    return NoiseAlignment(
        values=pairs.values,
        residuals=pairs.residuals,
        converged=pairs.converged,
        covariance=squared_deviations.mean(0),
        covariance_error=np.array([statistics.standard_error(column) for column in squared_deviations.T]),
        ias=ias,
        ias_error=ias_error,
        estimates=statistics.ratio_estimates(gradient_forms, gradient_norms2),
        noise_curvature=noise_ratio,
        noise_curvature_error=noise_ratio_error,
        trace_s=float(gradient_norms2.mean()),
        trace_c=float(deviation_norms2.mean()),
        grad_norm2=float(gradient.square().sum()),
        gamma=gamma,
        gamma_error=gamma_error,
        gamma_scatter=scatter,
        batch=batch,
        draws=len(rows),
        draws_converged=precision.met(ias, ias_error),
        parameters=problem.layout.size,
        products=pairs.products + len(rows) + 1,  # 1: with the full gradient
        relative_error=relative_error,
        seed=seed,
        **setting(problem),
        **about,
    )


def exponent(values: Array, squares: Array) -> tuple[float, float, float]:
    """Return γ in C_ii ∝ λ_i^γ, its jackknife error over draws, and its error by the scatter of log C_ii.

    All three are NaN unless two eigenvalues differ. The error by scatter is NaN for fewer than three
    eigenvalues.

    Args:
        values: (k,), the eigenvalues λ_i; where λ_i or C_ii is not positive, i is left out.
        squares: (draws, k), squared deviations along each eigenvector; their means over the draws are C_ii.

    Example:
        >>> gamma, error, scatter = exponent(np.array([4.0, 2.0, 1.0]), np.array([[16.0, 4, 1], [32, 8, 2]]))
        >>> round(gamma, 6), round(error, 6), round(scatter, 6)
        (2.0, 0.0, 0.0)
    """
    is_positive = (values > 0) & (squares.mean(0) > 0)
    if is_positive.sum() < 2:
        return math.nan, math.nan, math.nan
    squares = squares[:, is_positive]
    log_values = np.log(values[is_positive])
    x = log_values - log_values.mean()
    if not x @ x > 0:
        return math.nan, math.nan, math.nan
    y = np.log(squares.mean(0))
    gamma = float(x @ y / (x @ x))  # the slope of the regression line
    means_without_one = (squares.sum(0) - squares) / (len(squares) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gammas_without_one = np.log(means_without_one) @ x / (x @ x)
    residuals = y - y.mean() - gamma * x
    freedom = len(x) - 2
    scatter = math.sqrt(float(residuals @ residuals) / freedom / float(x @ x)) if freedom > 0 else math.nan
    # ``error_of``: the jackknife's error, from the values of γ without one draw each.
    return gamma, float(statistics.error_of(gammas_without_one)), scatter


def _curvature_terms(
    problem: Problem, products: Products, gradient: Tensor, vectors: Tensor
) -> Callable[[Sequence[Problem]], Array]:
    """Return the function from m minibatches to an array (m, 4 + k).

    With d = g_B − g, the columns are g_BᵀHg_B, ‖g_B‖², dᵀHd, ‖d‖², and (dᵀv)² for the k eigenvectors v.

    Args:
        problem: the loss of all samples.
        products: returns the Hessian products of rows (m, P).
        gradient: (P,), g.
        vectors: (k, P), the eigenvectors v.
    """
    gradient_image = double(products(gradient[None].to(problem.weights))[0])  # Hg

    def terms(minibatches: Sequence[Problem]) -> Array:
        rows = [finite_gradient(*minibatch.loss_and_gradient(problem.weights)) for minibatch in minibatches]
        gradients = torch.stack(rows)
        images = double(products(gradients))
        gradients = double(gradients)
        deviations, deviation_images = gradients - gradient, images - gradient_image
        columns = [(gradients * images).sum(1), gradients.square().sum(1)]
        columns += [(deviations * deviation_images).sum(1), deviations.square().sum(1)]
        squares = (deviations @ vectors.T).square()
        return torch.cat([torch.stack(columns, 1), squares], 1).cpu().numpy()

    return terms

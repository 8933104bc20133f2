"""The noise of gradients: Δ(2) of the learners' spread, the noise scale, and its alignment with H."""

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
from landscape.core.options import Count, Positive, Seed, Several
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.curvature.eigenvalues import fast_hessian, top_eigenvalues
from landscape.curvature.hessian import HessianOperator, Preconditioner, as_preconditioner, exact_only
from landscape.curvature.operators import Products, row_products
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.learners import Stack
from landscape.gradients.minibatches import (
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
    known_batch,
    learners_of,
    placed,
    stream,
)
from landscape.problem.layout import average
from landscape.problem.losses import existing
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.noise import Noise, NoiseAlignment, NoiseScale

# Draws give each standard error to about 13%, 1/√(2·31) (our choice).
DRAWS = 32


@analysis(
    # Gradients of the learners there and at the mean, deviations, and their products as rows and as one.
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
    draws: Several = DRAWS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Noise:
    """Estimate Δ(2), the noise from the learners' spread.

    Four estimates stand side by side.

    With δ the mean over learners of ∇L^μ(w_j) − ∇L^μ(w_a): the definition α²‖δ‖² over drawn minibatches, the
    same with the whole data, Eq. 4 of DPSGD-2020 with the Hessian, and the first-order expansion with the
    minibatches' Hessians. BatchNorm takes each minibatch's statistics, as in training; the whole data then
    comes in minibatches of that size, without a smaller last one.

    Args:
        problem: the loss on the training set; or a run.
        weights: (n, P), those of at least 2 learners; default: the run's.
        lr: α, the learning rate; default: the run's.
        local_batch: B, samples per learner in a minibatch; default: the run's.
        draws: how many times the minibatches are drawn; 32 give each standard error to about 13%.
        seed: draws the minibatches.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        direct, first_order, delta_s, delta_2 and delta_cross (draws,), full_batch and eq4, in units of the
        squared step.

    Raises:
        InputError: fewer than 2 learners or draws, a batch below 1, data without numbered samples, a penalty,
            or a model without second derivatives.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> weights = problem.weights + 0.1 * torch.randn(4, 8)
        >>> landscape.noise(problem, weights, lr=0.1, local_batch=5, draws=3).direct.shape
        (3,)
    """
    problem = problem_of(problem)
    if lr is None or local_batch is None:
        raise InputError("lr, local_batch: missing, a problem and imported weights have none; give both")
    weights = placed(problem, weights, smallest=2)
    check_unpenalized(problem, "Δ(2) is of the data's minibatches")
    problem.data.gather(torch.zeros(1, dtype=torch.long))  # refuses data without numbered samples at once
    problem = in_minibatches(problem, local_batch)
    exact_only(problem, "noise")
    n, mean = len(weights), average(weights)
    gradient, spread = double(existing(*problem.loss_and_gradient(mean))), weights - mean
    terms = _terms_of_delta(problem, weights, mean, gradient)
    rows, generator, report = [], torch.Generator().manual_seed(seed), taken(progress)

    for k in range(draws):
        rows.append(terms(torch.randint(problem.samples, (n, local_batch), generator=generator)))
        report((k + 1) / draws)
    names = ("direct", "first_order", "delta_s", "delta_2", "delta_cross")
    table = lr**2 * torch.tensor(rows, dtype=torch.float64).numpy()
    gradients = torch.stack([existing(*problem.loss_and_gradient(w)) for w in weights])
    full = gradients.to(gradient.device).mean(0, dtype=torch.float64) - gradient
    operator = HessianOperator(problem, mean, derivatives="exact")
    eq4 = sum(float(double(operator(d)).square().sum()) for d in spread) / n**2
    return Noise(
        **dict(zip(names, table.T, strict=True)),
        full_batch=lr**2 * float(full @ full),
        eq4=lr**2 * eq4,
        consensus=float(double(spread).square().sum()) / n,
        lr=lr,
        learners=n,
        local_batch=local_batch,
        samples=problem.samples,
        seed=seed,
        **about,
    )


def _terms_of_delta(
    problem: Problem, weights: Tensor, mean: Tensor, gradient: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Samples (n, B) ↦ direct, first order, Δ_S, Δ(2) and cross term over lr², on these minibatches.

    ``gradient`` (P,) is that of all data at the ``mean``.
    """
    stack, at_learners, at_mean = Stack(problem), torch.empty_like(weights), torch.empty_like(weights)

    def perpendicular(v: Tensor) -> Tensor:
        """The part of ``v`` (P,) orthogonal to the gradient."""
        return v - (v @ gradient) / (gradient @ gradient) * gradient

    def terms(indices: Tensor) -> list[Tensor]:
        x, y = problem.data.gather(indices)
        stack.gradients(weights, x, y, out=at_learners)
        stack.gradients(mean.expand_as(weights), x, y, out=at_mean)
        delta = (at_learners - at_mean).to(gradient.device).mean(0, dtype=torch.float64)
        pairs = zip(indices, weights - mean, strict=True)
        products = [HessianOperator(problem.subset(i), mean, derivatives="exact")(d) for i, d in pairs]
        first = torch.stack(products).to(gradient.device).mean(0, dtype=torch.float64)
        of_mean = at_mean.to(gradient.device).mean(0, dtype=torch.float64)
        p_delta, p_s = perpendicular(delta), perpendicular(of_mean)
        return [delta @ delta, first @ first, p_s @ p_s, p_delta @ p_delta, 2 * p_s @ p_delta]

    return terms


def _noise_scale_need(problem: Any, weights: Any, gradient: Any, **_: Any) -> Need:
    """Gradients of a draw as rows and as one, and the sums of groups of them."""
    learners = needs.rows(weights)
    groups = max(8, min(32, 2**30 // (8 * problem.layout.size))) if learners or gradient == "draws" else 0
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
    min_draws: Several = Precision.min_draws,
    max_draws: Several = Precision.max_draws,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> NoiseScale:
    """B_simple = tr Σ/‖g‖²: the batch at which noise and gradient are equal in size.

    Below it a larger batch saves nearly as many steps as it costs samples; far above it saves none
    (McCandlish et al. 2018, arXiv:1812.06162). Σ is the covariance of one sample's gradient and g that of the
    loss at w_a; tr Σ is B E‖g_B − g‖² for minibatches drawn with replacement. BatchNorm takes each
    minibatch's statistics, as in training, so that B_simple then depends on B a little, as it does where
    samples weigh unequally. Other layers, such as dropout, are in eval mode: their noise is left out.

    Args:
        problem: the loss, on the training set, centered on w_a; or a run.
        batch: B, samples of a minibatch at w_a; default: the run's total batch. Without BatchNorm the result
            does not depend on it, and small ones are cheaper.
        weights: (n, P), where n ≥ 2 learners take their gradients (SSGD's all at w_a): B_simple of their mean
            gradient, too, and what the n gradients of single steps show of it, as training sees them at no
            cost.
        local_batch: samples of a learner's minibatch; default: batch / n.
        gradient: "whole": g from all data, one pass; "draws": ‖g‖² from pairs of minibatches, without a pass,
            which is the less exact the smaller ‖g‖² is.
        precondition: P, a positive diagonal (P,), or what :func:`landscape.preconditioner` makes of a
            checkpoint of Adam and its relatives: all is then of the gradients P^{-1/2} g, as that optimizer
            sees them.
        relative_error: draw until the standard error is at most this share of the value.
        min_draws: the least number of draws, of one gradient, or one for each learner.
        max_draws: the largest number of draws.
        seed: draws the minibatches.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        B_simple in samples with its standard error, tr Σ and ‖g‖² with theirs, at w_a and from the learners.

    Raises:
        InputError: a batch, relative error or number of draws that is not allowed, weights of another shape
            or of one learner, or a preconditioner that is not positive or of another length.
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
    problem, batch = problem_of(problem), known_batch(batch)
    precision = Precision(relative_error, min_draws, max_draws)
    thetas, local = learners_of(problem, batch, weights, local_batch)
    if thetas is not None and len(thetas) < 2:
        raise InputError("weights: those of 1 learner are not allowed, at least 2 are needed")
    at_mean = Minibatches(problem, batch, stream(seed, 0))
    middle = 1.0 if thetas is None else 0.5
    estimator: ExactGradientEstimator | JackknifeEstimator
    by = as_preconditioner(precondition)
    root = None if by is None else by.root(problem).to(problem.weights)
    if gradient == "whole":
        whole = existing(*at_mean.whole.loss_and_gradient())
        estimator = ExactGradientEstimator(whole if root is None else root * whole, batch)
    else:
        estimator = JackknifeEstimator(problem.weights, batch)
    first = portion(progress, 0, middle)
    mean = _gradient_noise(at_mean, problem.weights[None], estimator, precision, first, root)
    measured, of_learners = [mean], dict[str, Any]()
    if thetas is not None:
        at_learners = Minibatches(problem, local, stream(seed, 1), len(thetas))
        own_gradients = LearnersEstimator(problem.weights, len(thetas), local)
        last = portion(progress, middle, 1)
        measured.append(_gradient_noise(at_learners, thetas, own_gradients, precision, last, root))
        of_learners = {f"learner_{name}": value for name, value in vars(measured[1]).items()}
        of_learners |= own_gradients.rounds()
        of_learners |= {"learners": len(thetas), "local_batch": local, "learner_draws": own_gradients.draws}
    return NoiseScale(
        **vars(mean),
        **of_learners,
        batch=batch,
        draws=estimator.draws,
        gradient=gradient,
        precondition=by.name if by else "",
        relative_error=relative_error,
        converged=all(precision.met(estimate.value, estimate.standard_error) for estimate in measured),
        seed=seed,
        **setting(at_mean.whole),
        **about,
    )


def _gradient_noise(
    minibatches: Minibatches,
    thetas: Tensor,
    by: ExactGradientEstimator | JackknifeEstimator,
    precision: Precision,
    progress: Progress,
    root: Tensor | None,
) -> GradientNoise:
    """The noise scale from gradients at ``thetas`` (n, P), until it is as exact as asked for.

    ``root`` (P,): what gradients are multiplied by.
    """
    for parts in minibatches:
        pairs = zip(parts, thetas, strict=True)
        rows = torch.stack([existing(*part.loss_and_gradient(theta)) for part, theta in pairs])
        by.add(rows if root is None else root * rows)
        if by.draws < precision.min_draws:
            precision.enough(by.draws, 0.0, math.inf, progress)
            continue
        estimate = by.estimate()
        if precision.enough(by.draws, estimate.value, estimate.standard_error, progress):
            break
    return estimate


# The number of outliers in the spectrum of a classifier with ten classes (Gur-Ari et al. 2018).
K = 10
# Minibatches whose gradients and products are computed at once (our choice: as many products as a trace
# takes).
BLOCK = 8


def _noise_alignment_need(problem: Any, k: Any, **_: Any) -> Need:
    """The vectors in float64; of a block of gradients rows, products and deviations, some in float64."""
    vectors, search = k, needs.several(problem, k)
    block = BLOCK * (3 + 5 * needs.double(problem))
    return needs.curved(problem, max((1 + needs.double(problem)) * vectors + block, search))


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
    min_draws: Several = MIN_COSTLY,
    max_draws: Several = MAX_COSTLY,
    search: Literal["auto", "exact"] = "auto",
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> NoiseAlignment:
    """Compare gradient noise with the Hessian.

    It gives tr(HS)/tr S of minibatch gradients, their covariance by eigenvector of H, and γ in C_ii ∝ λ_i^γ.

    S is the second moment of the gradients of minibatches drawn with replacement, C their covariance around
    the gradient g of all samples, H the Hessian over all samples. tr(HS)/tr S is the interaction-aware
    sharpness of "A new characterization of the edge of stability" (2022). The exponent is that of
    arXiv 2602.05600, which finds 1 ≤ γ ≤ 2 in fully connected layers, each by itself; here it is of all
    parameters, in the basis of H's top eigenvectors (our choice). BatchNorm takes each minibatch's
    statistics, as in training; H and g are then means over minibatches of that size, without a smaller last
    one, and g_B has a mean that differs a little from g.

    Args:
        problem: the loss on the training set; or a run.
        batch: B, samples in a minibatch; default: the run's total batch.
        k: the number of eigenvectors; at most P.
        relative_error: draw until the standard error of tr(HS)/tr S is at most this share of it.
        min_draws: the least number of draws. Each takes a minibatch gradient and a Hessian product.
        max_draws: the largest number of draws.
        search: "auto" or "exact", as in :func:`landscape.top_eigenvalues`.
        seed: draws the minibatches and the start of the search of eigenvalues.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
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
    problem, batch = problem_of(problem), known_batch(batch)
    precision = Precision(relative_error, min_draws, max_draws)
    check_unpenalized(problem, "the noise is of the data's minibatches")
    exact_only(problem, "noise_alignment")
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    problem, parts = minibatches.whole, iter(minibatches)
    first, drawing = portion(progress, 0, 0.5), portion(progress, 0.5, 1)
    pairs = top_eigenvalues(problem, k, derivatives="exact", search=search, seed=seed, progress=first)
    products = row_products(fast_hessian(problem))
    gradient = double(existing(*problem.loss_and_gradient()))
    terms = _terms_in_curvature(problem, products, gradient, torch.from_numpy(pairs.vectors).to(gradient))
    rows = np.zeros((0, 4 + k))
    while True:
        block = itertools.islice(parts, min(BLOCK, max_draws - len(rows)))
        rows = np.concatenate([rows, terms([part for (part,) in block])])
        ias, ias_error = statistics.ratio(rows[:, 0], rows[:, 1])
        if precision.enough(len(rows), ias, ias_error, drawing):
            break
    noise, noise_error = statistics.ratio(rows[:, 2], rows[:, 3])
    gamma, gamma_error, scatter = exponent(pairs.values, rows[:, 4:])
    return NoiseAlignment(
        **{name: getattr(pairs, name) for name in ("values", "residuals", "converged")},
        covariance=rows[:, 4:].mean(0),
        covariance_error=np.array([statistics.standard_error(column) for column in rows[:, 4:].T]),
        ias=ias,
        ias_error=ias_error,
        estimates=statistics.ratio_estimates(rows[:, 0], rows[:, 1]),
        noise_curvature=noise,
        noise_curvature_error=noise_error,
        trace_s=float(rows[:, 1].mean()),
        trace_c=float(rows[:, 3].mean()),
        grad_norm2=float(gradient.square().sum()),
        gamma=gamma,
        gamma_error=gamma_error,
        gamma_scatter=scatter,
        batch=batch,
        draws=len(rows),
        draws_converged=precision.met(ias, ias_error),
        parameters=problem.layout.size,
        products=pairs.products + len(rows) + 1,
        relative_error=relative_error,
        seed=seed,
        **setting(problem),
        **about,
    )


def exponent(values: Array, squares: Array) -> tuple[float, float, float]:
    """(γ, its jackknife error, its error from the scatter) of C_ii ∝ λ_i^γ.

    Args:
        values: (k,), λ_i; those that are not positive are left out.
        squares: (draws, k), squared deviations along each eigenvector, whose means are C_ii.

    Example:
        >>> gamma, error, scatter = exponent(np.array([4.0, 2.0, 1.0]), np.array([[16.0, 4, 1], [32, 8, 2]]))
        >>> round(gamma, 6), round(error, 6), round(scatter, 6)
        (2.0, 0.0, 0.0)
    """
    used = (values > 0) & (squares.mean(0) > 0)
    if used.sum() < 2:
        return math.nan, math.nan, math.nan
    picked, x = squares[:, used], np.log(values[used]) - np.log(values[used]).mean()
    if not x @ x > 0:
        return math.nan, math.nan, math.nan
    heights = np.log(picked.mean(0))
    gamma = float(x @ heights / (x @ x))
    without_one = (picked.sum(0) - picked) / (len(picked) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.log(without_one) @ x / (x @ x)
    misfit, freedom = heights - heights.mean() - gamma * x, len(x) - 2
    scatter = math.sqrt(float(misfit @ misfit) / freedom / float(x @ x)) if freedom > 0 else math.nan
    return gamma, float(statistics.error_of(without)), scatter


def _terms_in_curvature(
    problem: Problem, products: Products, gradient: Tensor, vectors: Tensor
) -> Callable[[Sequence[Problem]], Array]:
    """Minibatches ↦ (minibatches, 4 + k): gᵀHg, ‖g‖², both of g_B − g, and its squares along ``vectors``."""
    image_of_gradient = double(products(gradient[None].to(problem.weights))[0])

    def terms(parts: Sequence[Problem]) -> Array:
        rows = torch.stack([existing(*part.loss_and_gradient(problem.weights)) for part in parts])
        images, rows = double(products(rows)), double(rows)
        deviations, their_images = rows - gradient, images - image_of_gradient
        factors = ((rows, images), (rows, rows), (deviations, their_images), (deviations, deviations))
        columns = torch.stack([(a * b).sum(1) for a, b in factors], 1)
        return torch.cat([columns, (deviations @ vectors.T).square()], 1).cpu().numpy()

    return terms

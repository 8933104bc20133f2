"""Measure the learners' spread: its share along the sharp directions, and how it smooths the loss.

The smoothed loss is the mean over displacements (DPSGD-2021, smoothing): L_Σ(w) = E L(w + δ), δ ~ N(0, Σ). Of
the measured spread, Σ = n⁻¹ Σ_j Δw_jΔw_jᵀ, δ is n^(−1/2) Σ_j ξ_j Δw_j with ξ_j independent and normal. It is
compared with the isotropic spread Σ = σ²I of the same trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import statistics
from landscape.core.analysis import analysis
from landscape.core.devices import double, float64_device, inner, vector_norm
from landscape.core.errors import OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need, spare
from landscape.core.options import AtLeastTwo, Count, Seed, UpToOne, fit
from landscape.core.progress import Progress, ProgressOption, portion, reporter
from landscape.curvature.chain_hessian import ChainHessian
from landscape.curvature.eigenvalues import fast_hessian, points_at_once, top_eigenvalues
from landscape.curvature.hessian import Derivatives, HessianOperator, HessianOptions, exact_only
from landscape.curvature.operators import ALONE, Ranks
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL, find_eigenpairs, start_vector, warm_start
from landscape.data.base import IID, NAMES
from landscape.evaluation import needs
from landscape.evaluation.grid import named_loss, setting
from landscape.evaluation.needs import GRAPH_BYTES
from landscape.gradients.minibatches import placed
from landscape.problem.layout import average
from landscape.problem.losses import finite_gradient
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.flatness import Smoothing
from landscape.results.noise import Disagreement, LabelCounts

# The number of outliers in the spectrum of a classifier with ten classes (Gur-Ari et al. 2018).
K = 10
# Numbers of each vector that are in float64 at once (our choice: 8 MB a vector).
BLOCK = 2**20
# Squared lengths below this share of the largest are rounding of the weights in float32 (our choice).
ROUNDING = 1e-10


@analysis(
    # Memory, in vectors: n for the learners' weights, n for their deviations, and those of a search for k
    # eigenvectors.
    lambda problem, weights, k, **_: needs.curved(
        problem, 2 * needs.rows(weights) + needs.several(problem, k)
    ),
    shorter="a larger residual_tol=",
    of_the_run=("weights",),
    group="Measure noise and learners",
    options={"search": None},
)
def disagreement(
    problem: Problem | Run,
    weights: Tensor | None = None,
    k: Count = K,
    *,
    residual_tol: UpToOne = RESIDUAL_TOL,
    max_products: Count = MAX_PRODUCTS,
    derivatives: Derivatives = "auto",
    search: Literal["auto", "exact"] = "auto",
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Disagreement:
    """Measure which share of the learners' spread lies in the sharpest directions.

    Learners of local SGD differ mostly along these directions (arXiv 2605.27739). Further results are the
    share of the gradient in these directions, and the second-order cost of the spread, ½ tr(HC), where C is
    the learners' covariance. At all weights, BatchNorm uses the statistics that the problem prescribes, by
    default those of its model.

    Args:
        problem: the loss; or a run, on its training set.
        weights: (n, P), the weights of n ≥ 2 learners; default: the run's.
        k: the number of top eigenvectors of the Hessian at w_a that span the sharp space; at most P.
        residual_tol: the largest residual of an eigenvalue, relative to the eigenvalue.
        max_products: the most Hessian-vector products for the eigenvalues; tr(HC) takes n further products.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        search: "auto" or "exact", as in :func:`landscape.top_eigenvalues`.
        seed: the seed of the vector that the search of eigenvalues starts from.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The shares of the spread and of the gradient along each eigenvector (k,), the cost in nats, and the
        share of the gradient in the span of the learners' deviations.

    Raises:
        InputError: fewer than 2 learners, or a ``k`` or weights that are not allowed.
        OperationError: all learners have the same weights, or weights that are not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.ones(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> learners = torch.tensor([[0.1, 0.4], [0.1, 0.2], [0.2, 0.3]])
        >>> result = landscape.disagreement(problem, learners, 1)
        >>> round(result.value, 3), round(result.cost, 4)  # the sharp direction is the second
        (0.75, 0.0311)
    """
    problem = problem_of(problem)
    weights = placed(problem, weights, min_rows=2)
    report = reporter(progress)
    spread = Spread(weights)
    mean, consensus = spread.mean, spread.consensus
    if not 0 < consensus < math.inf:
        raise OperationError(f"weights: their consensus distance is {consensus:g}, it must be finite and > 0")
    pairs = top_eigenvalues(
        problem, k, residual_tol, weights=mean, derivatives=derivatives, search=search,
        max_products=max_products, seed=seed, progress=portion(progress, 0, 0.6),
    )  # fmt: skip
    report(0.6)
    loss, gradient = problem.loss_and_gradient(mean)
    learners_loss = float(np.mean([problem.loss(w) for w in weights]))
    finite_gradient(loss + learners_loss, gradient)  # refuses losses or a gradient that are not finite
    vectors = torch.from_numpy(pairs.vectors).to(mean.device)
    values = torch.from_numpy(pairs.values)
    components = spread.inner_products(vectors)  # (n, k), the learners' deviations along the eigenvectors
    curvatures, product_error = spread.curvature(problem, pairs.derivatives)
    report(0.8)
    share, share_error = shares(components.square().numpy(), spread.gram.diagonal().numpy())
    cost, cost_error = half_mean(curvatures)
    result = Disagreement(
        values=pairs.values,
        residuals=pairs.residuals,
        converged=pairs.converged,
        derivatives=pairs.derivatives,
        spread_share=share,
        spread_error=share_error,
        **_gradient_fields(gradient, vectors, spread, components),
        consensus=consensus,
        cost=cost,
        cost_error=math.hypot(cost_error, product_error / 2),
        cost_top=0.5 * float(values @ components.square().mean(0)),
        loss=loss,
        learners_loss=learners_loss,
        parameters=len(mean),
        learners=len(weights),
        products=pairs.products + len(weights),
        residual_tol=residual_tol,
        seed=seed,
        **setting(problem),
        **about,
    )
    report(1.0)
    return result


class Spread:
    """The deviations Δw_j (n, P) of ``weights`` from their mean, and inner products with them in float64.

    ``ranks`` hold parts of them.
    """

    def __init__(self, weights: Tensor, ranks: Ranks = ALONE) -> None:
        self.mean, self._ranks = average(weights), ranks
        self._rows = weights - self.mean
        n = len(weights)
        self._centered = torch.eye(n, dtype=torch.float64) - 1 / n  # takes off the mean's rounding, too
        self.gram = self.inner_products(self._rows) @ self._centered

    @property
    def consensus(self) -> float:
        """n⁻¹ Σ_j ‖Δw_j‖²."""
        return float(self.gram.trace()) / len(self.gram)

    def inner_products(self, vectors: Tensor) -> Tensor:
        """Return ⟨Δw_j, x⟩ (n, m) for ``vectors`` x (m, P)."""
        return self._centered @ self._ranks.total(_products(self._rows, vectors))

    def curvature(self, problem: Problem, derivatives: str) -> tuple[Array, float]:
        """Return Δw_jᵀHΔw_j (n,), and the largest error of their mean by differences.

        One Hessian product at a time, so that their memory does not grow with n.
        """
        h = fast_hessian(problem, self.mean, HessianOptions(derivatives=derivatives))
        columns, product_errors = [], []
        for row in self._rows:
            image, errors = h.verified(row[None])
            columns.append(self.inner_products(image))
            product_errors.append(errors[0] * float(vector_norm(row)))
        return (torch.cat(columns, 1) @ self._centered).diagonal().numpy(), float(np.mean(product_errors))

    def in_span(self, dots: Tensor) -> tuple[int, float]:
        """Return the rank of the Δw_j, and ‖Px‖² of x with products ``dots`` (n,), P their projector."""
        sizes, rows = torch.linalg.eigh(self.gram)
        retained = sizes > ROUNDING * sizes[-1]
        parts = rows.T[retained] @ dots
        return int(retained.sum()), float((parts.square() / sizes[retained]).sum())


def _gradient_fields(gradient: Tensor, vectors: Tensor, spread: Spread, components: Tensor) -> dict[str, Any]:
    """Return the fields on the gradient (P,): its shares in the top-k space and in the span of the spread."""
    norm2 = float(_products(gradient[None], gradient[None]))
    scale = 1 / norm2 if norm2 > 0 else math.nan
    in_space = _products(vectors, gradient[None])[:, 0]  # (k,)
    rank, in_span = spread.in_span(spread.inner_products(gradient[None])[:, 0])
    _, sharp_in_span = spread.in_span(components @ in_space)
    sharp2 = float(in_space.square().sum())
    return {
        "gradient_share": in_space.square().numpy() * scale,
        "gradient_in_span": in_span * scale,
        "dominant_in_span": sharp_in_span / sharp2 if sharp2 > 0 else math.nan,
        "rank": rank,
        "grad_norm2": norm2,
    }


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products (n, m) of ``a`` (n, P) with ``b`` (m, P), in float64 on the CPU."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=float64_device(a.device))
    for left_block, right_block in zip(torch.split(a, BLOCK, 1), torch.split(b, BLOCK, 1), strict=True):
        total += double(left_block) @ double(right_block).T
    return total.cpu()


def shares(along: Array, totals: Array) -> tuple[Array, Array]:
    """Return the shares of the spread along directions, from squares of deviations from the mean.

    Args:
        along: (n, k), of each learner along each direction.
        totals: (n,), of each learner in all directions.

    Returns:
        The shares (k,), Σ_j along_ji/Σ_j totals_j, and the jackknife errors (k,) of the shares' cumulative
        sums; NaN for two learners.

    Example:
        >>> share, error = shares(np.array([[1.0], [0.0], [1.0]]), np.array([1.0, 1.0, 2.0]))
        >>> share.tolist()
        [0.5]
    """
    n = len(totals)
    share = along.sum(0) / totals.sum()
    if n < 3:
        return share, np.full(len(share), np.nan)
    summed = np.cumsum(along, 1)
    # Without learner j the mean moves, and the sum of squares is less by its part times n/(n − 1).
    without = (summed.sum(0) - summed * n / (n - 1)) / (totals.sum() - totals * n / (n - 1))[:, None]
    return share, statistics.error_of(without)


def half_mean(values: Array) -> tuple[float, float]:
    """Return ½ tr(HC) and its jackknife error, NaN for two learners.

    Args:
        values: (n,), vᵀHv of the learners' deviations v from their own mean.

    Example:
        >>> half_mean(np.array([1.0, 3.0]))
        (1.0, nan)
    """
    n = len(values)
    if n < 3:
        return float(values.mean()) / 2, math.nan
    without = (values.sum() - values * n / (n - 1)) / (n - 1) / 2
    return float(values.mean()) / 2, float(statistics.error_of(without))


KINDS = ("measured", "isotropic")
# Antithetic pairs ±δ (our choice: they give standard errors to about 18%, 1/√(2·15)).
DRAWS = 16
SMOOTHING_K = 5


def _smoothing_need(problem: Any, weights: Any, k: Any, draws: Any, trajectory: Any, **_: Any) -> Need:
    """Return the need of the deviations, a search and its vectors, and gradients on a trajectory per pair."""
    route = 0 if trajectory is None else 3 * draws * needs.double(problem)
    search = k + needs.several(problem, k)
    return needs.curved(problem, needs.rows(weights) + search + 6 + route)


@analysis(_smoothing_need, shorter="a smaller draws= or k=", of_the_run=("weights", "lr"), version=1)
def smoothing(
    problem: Problem | Run,
    weights: Tensor | None = None,
    *,
    draws: AtLeastTwo = DRAWS,
    k: Count = SMOOTHING_K,
    trajectory: Tensor | None = None,
    lr: float = math.nan,
    alpha_e: float = math.nan,
    residual_tol: UpToOne = RESIDUAL_TOL,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Smoothing:
    """Measure how the spread of learners smooths the loss of ``problem`` around the learners' mean.

    The smoothed loss is L_Σ(w) = E L(w + δ) with δ ~ N(0, Σ), where Σ is the learners' covariance. The
    DPSGD-2021 paper claims that it is smoother than L. For comparison, δ is also drawn from an isotropic
    distribution of equal total variance.

    Args:
        problem: the loss; or a run, on its training set.
        weights: (n, P), the weights of n ≥ 2 learners; default: the run's.
        draws: the number of antithetic pairs ±δ, at least 2; with 16, standard errors are right to about 18%.
        k: the number of top eigenvectors along which the spread is measured; at most P.
        trajectory: (S + 1, P), w_a at successive steps, to also measure the gradient's Lipschitz constant.
        lr: the learning rate, kept with the result; default: the run's.
        alpha_e: the effective learning rate α_e, kept with the result; default: unknown (NaN).
        residual_tol: the largest residual of an eigenvalue, relative to the eigenvalue.
        seed: the seed of the displacements δ.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Loss (2,), λ_max (2,) and Lipschitz constants (2, S) of L_Σ with standard errors; the first entry is
        of the measured spread, the second of the isotropic one.

    Raises:
        InputError: fewer than 2 learners or draws, or a model without second derivatives.
        OperationError: all learners have the same weights.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.smoothing(problem, torch.eye(2), draws=2)
        >>> result.lambda_smooth.round(3).tolist()  # the same as λ_max of L: the loss is quadratic
        [9.0, 9.0]
    """
    problem = problem_of(problem)
    exact_only(problem, "smoothing")
    weights = placed(problem, weights, min_rows=2)
    mean = average(weights)
    deviations = weights - mean
    variance = float(double(deviations).square().sum()) / len(weights)  # tr Σ
    if not 0 < variance < math.inf:
        raise OperationError(f"weights: their consensus distance is {variance:g}, there is no spread")
    eigenpairs = top_eigenvalues(
        problem, min(k, len(mean)), residual_tol, weights=mean, seed=seed, progress=portion(progress, 0, 0.3)
    )
    vectors = torch.from_numpy(eigenpairs.vectors).to(mean.device)
    h = fast_hessian(problem, mean)
    variances_along = double(deviations @ vectors.T).square().sum(0) / len(weights)  # along vectors
    trace_hs = sum(float(double(d) @ double(h(d))) for d in deviations) / len(weights)  # tr(HΣ)
    # Without a trajectory there is one point, and no step.
    trajectory = mean[None] if trajectory is None else trajectory.to(mean)
    lengths = double(trajectory[1:] - trajectory[:-1]).norm(dim=1)
    gradients = []
    if len(trajectory) > 1:
        gradients = [double(finite_gradient(*problem.loss_and_gradient(w))) for w in trajectory]
    rows: list[dict[str, Any]] = []
    converged = bool(eigenpairs.converged)

    def smoothed_loss(kind: str) -> _SmoothedLoss:
        """Return the loss that is smoothed by the spread of a ``kind``."""

        def shift(i: int) -> Tensor:
            # Padding rows of embeddings never move: ``along_weights`` sets their entries of δ to zero.
            return problem.along_weights(displacement(deviations, kind, variance, seed, i))

        return _SmoothedLoss(problem, mean, shift, draws)

    further_progress = portion(progress, 0.3, 1)  # the search above has 0.3 of the progress bar
    for index, kind in enumerate(KINDS):
        kind_progress = portion(further_progress, index / len(KINDS), (index + 1) / len(KINDS))
        smoothed = smoothed_loss(kind)
        losses = smoothed.losses()
        if not np.isfinite(losses).all():
            raise OperationError(f"weights: their {kind} spread reaches infinite losses; take others")
        search_progress = portion(kind_progress, 0, 0.5)
        row = smoothed.eigenvalue_fields(vectors[0], residual_tol, seed, search_progress)
        converged = converged and bool(row.pop("converged"))
        row["loss_smooth"], row["loss_smooth_se"] = statistics.mean_and_error(losses)
        row["lipschitz_smooth"], row["lipschitz_smooth_se"] = smoothed.lipschitz(trajectory, lengths)
        rows.append(row)
        kind_progress(1.0)
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    gradient_changes = [float(vector_norm(after - before)) for before, after in itertools.pairwise(gradients)]
    settings: dict[str, Any] = {"lr": lr, "alpha_e": alpha_e, "draws": draws, "seed": seed}
    return Smoothing(
        loss=problem.loss(mean),
        lambda_max=float(eigenpairs.values[0]),
        residual=float(eigenpairs.residuals[0]),
        eigenvalues=eigenpairs.values,
        share=(variances_along / variance).cpu().numpy(),
        trace_hs=trace_hs,
        consensus=variance,
        lipschitz=np.array(gradient_changes) / lengths.cpu().numpy(),
        parameters=len(mean),
        learners=len(weights),
        samples=problem.samples,
        converged=converged,
        **settings,
        **columns,
        **named_loss(problem),
        **about,
    )


def displacement(spread: Tensor, kind: str, variance: float, seed: int, i: int) -> Tensor:
    """Return δ_i (P,) ~ N(0, Σ), Σ = n⁻¹ ΣΔw_jΔw_jᵀ of ``spread`` (n, P), or isotropic of trace ``variance``.

    ``seed`` and i determine the draw, so that no displacement has to be stored.
    """
    entropy = np.random.SeedSequence((seed, KINDS.index(kind), i)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(entropy[0]))
    size = spread.shape[0] if kind == "measured" else spread.shape[1]
    xi: Tensor = torch.randn(size, dtype=torch.float64, generator=generator).to(spread)
    xi /= size**0.5
    return torch.mv(spread.T, xi) if kind == "measured" else xi * variance**0.5


@dataclass(frozen=True)
class _SmoothedLoss:
    """The mean of the losses at mean ± δ_i over ``draws`` pairs i; δ_i = shift(i), (P,).

    H_i is the mean of the two Hessians of pair i.
    """

    problem: Problem
    mean: Tensor
    shift: Callable[[int], Tensor]
    draws: int

    def losses(self) -> Array:
        """Return the mean loss of each pair, (draws,)."""
        losses = []
        for i in range(self.draws):
            delta = self.shift(i)
            losses.append([self.problem.loss(self.mean + delta), self.problem.loss(self.mean - delta)])
        return np.mean(losses, axis=1)

    def products(self) -> Callable[[Tensor], Iterator[Tensor]]:
        """Return a function of v (P,) that yields H_i v (P,) for each pair i.

        The Hessians of a model that is a chain of layers are stored if they need at most 1 GiB and fit into
        the spare memory. Otherwise Hessians are computed again for each v.
        """
        problem = self.problem
        # The bytes that the Hessian at one point takes if it is stored; None: the model is no chain.
        point_bytes = ChainHessian.saved_bytes(problem)
        size = 1 if point_bytes is None else max(1, points_at_once(problem) // 2)  # pairs in a group
        # Groups of pairs i whose products are computed together.
        groups = [range(start, min(start + size, self.draws)) for start in range(0, self.draws, size)]
        is_stored = point_bytes is not None and 2 * self.draws * point_bytes <= min(GRAPH_BYTES, spare())

        def make_operator(group: range) -> Callable[[Tensor], Tensor]:
            """Return the function from v (P,) to H_i v of the pairs i in ``group``, (len(group), P)."""
            points = torch.stack([self.mean + sign * self.shift(i) for i in group for sign in (1, -1)])
            if point_bytes is not None:
                hessians = ChainHessian(problem, points)
                return lambda v: hessians(v.expand(len(points), -1)).view(len(group), 2, -1).mean(1)
            # Without a chain, a group is one pair.
            plus, minus = (HessianOperator(problem, p, derivatives="exact", graph_bytes=0) for p in points)
            return lambda v: ((plus(v) + minus(v)) / 2)[None]

        stored_operators = [make_operator(group) for group in groups] if is_stored else []

        def products(v: Tensor) -> Iterator[Tensor]:
            for operator in stored_operators or map(make_operator, groups):
                yield from operator(v)

        return products

    def eigenvalue_fields(
        self, first_guess: Tensor, residual_tol: float, seed: int, progress: Progress
    ) -> dict[str, Any]:
        """Return the fields on λ_max of the mean of all H_i; the search starts near ``first_guess`` (P,).

        Let v be the eigenvector. The standard error of λ_max is that of the mean of vᵀH_i v over all pairs i
        of points mean ± δ_i. The components of H_i v orthogonal to v also differ between pairs. Let e be the
        standard error of the mean of these components over i. It biases λ_max by about e²/λ_max.
        """
        products = self.products()

        def mean_product(v: Tensor) -> Tensor:
            total = torch.zeros_like(v)
            for image in products(v):
                total += image
            return total / self.draws

        start = warm_start(first_guess, start_vector(self.problem, seed))
        eigenpairs = find_eigenpairs(mean_product, start, residual_tol=residual_tol, progress=progress)
        v, value = eigenpairs.vectors[0], float(eigenpairs.values[0])
        mean_image = mean_product(v)
        along_v = np.zeros(self.draws)  # vᵀ(H_iv − mean Hv) of each pair i
        orthogonal_sum = 0.0  # Σ_i ‖(1 − vvᵀ)(H_iv − mean Hv)‖²
        for i, image in enumerate(products(v)):
            deviation = image - mean_image
            along_v[i] = float(double(v) @ double(deviation))
            orthogonal_sum += float(double(deviation).square().sum()) - float(along_v[i]) ** 2
        squared_error = max(0.0, orthogonal_sum) / (self.draws * (self.draws - 1))
        bias = squared_error / abs(value) if value else math.nan
        return {
            "lambda_smooth": value,
            "lambda_smooth_residual": float(eigenpairs.residuals[0]),
            "lambda_smooth_se": statistics.standard_error(along_v),
            "lambda_smooth_bias": bias,
            "converged": eigenpairs.converged,
        }

    def lipschitz(self, trajectory: Tensor, lengths: Tensor) -> tuple[Array, Array]:
        """Return ‖Δ∇L_Σ‖/‖Δw‖ of each step of ``trajectory`` (S + 1, P), and the standard errors, (S,) each.

        ``lengths`` (S,) are ‖Δw‖ of each step. For each i, the mean of the gradients at w + δ_i and w − δ_i
        changes in a step by c_i (P,). Δ∇L_Σ is the mean of c_i over all i. The standard error is computed
        from the components of c_i along Δ∇L_Σ. A ratio that is no larger than its error is overestimated,
        because noise adds to the norm.
        """
        ratios, errors = list[float](), list[float]()

        def pair_gradient(w: Tensor, i: int) -> Tensor:
            """Return the mean of ∇L at w ± δ_i."""
            delta = self.shift(i)
            plus = finite_gradient(*self.problem.loss_and_gradient(w + delta))
            minus = finite_gradient(*self.problem.loss_and_gradient(w - delta))
            return double((plus + minus) / 2)

        before = [pair_gradient(trajectory[0], i) for i in range(self.draws)] if len(lengths) else []
        for w, length in zip(trajectory[1:], lengths.tolist(), strict=True):
            after = [pair_gradient(w, i) for i in range(self.draws)]
            changes = [new - old for old, new in zip(before, after, strict=True)]
            mean_change = torch.stack(changes).mean(0)
            size = float(vector_norm(mean_change))  # ‖Δ∇L_Σ‖
            components = [float(inner(change, mean_change)) / size if size else 0.0 for change in changes]
            ratios.append(size / length)
            errors.append(statistics.standard_error(np.array(components)) / length)
            before = after
        return np.array(ratios), np.array(errors)


@analysis(group="Measure noise and learners", of_the_run=None)
def label_counts(run: Checkpoint, **about: Unpack[Provenance]) -> LabelCounts:
    """Count how many training samples of each label each learner of a run has.

    Args:
        run: a checkpoint of ``landscape train`` with the recipe's key ``data.split``.
        about: ``label``, ``source`` and ``source_sha256``, kept with the result; default: those of the run.

    Returns:
        The counts (learners, labels), read from the checkpoint alone, without the data.

    Raises:
        OperationError: a run whose learners all draw from the whole training set.

    Example:
        >>> import landscape
        >>> from landscape.training.run.loop import Trainer
        >>> divided = landscape.Recipe.read("digits-dpsgd", steps=0, **{"data.split": "labels(4)"})
        >>> counts = label_counts(Trainer(divided).run())
        >>> counts.counts.shape, int((counts.counts[0] > 0).sum())
        ((5, 10), 4)
    """
    fit("run", run, Checkpoint)  # refuses all other types
    if not set(NAMES) <= run.shared.keys():  # NAMES: the arrays of a run whose data are divided
        reason = "its learners have no parts of their own; set the recipe's key data.split"
        raise OperationError(f"{run.path or 'run'}: {reason}")
    _learners, counts, labels = (run.shared[name].cpu().numpy() for name in NAMES)
    division = str(run.settings.get("data", {}).get("split", IID))
    return LabelCounts(counts.astype(float), labels.astype(float), division, **about | {"split": "train"})

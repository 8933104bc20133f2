"""The learners' spread: how much of it lies along the sharp directions, and how it smooths the loss.

The loss as learners that are spread out see it is averaged over displacements (DPSGD-2021, smoothing):
L_Σ(w) = E L(w + δ), δ ~ N(0, Σ). With Σ = n⁻¹ Σ_j Δw_jΔw_jᵀ, the measured spread, δ is n^(−1/2) Σ_j ξ_j Δw_j
with ξ_j independent and normal; and for comparison the isotropic Σ = σ²I of the same trace.
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
from landscape.core.options import Count, Seed, Several, UpToOne, fit
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.curvature.chain_hessian import ChainHessian
from landscape.curvature.eigenvalues import fast_hessian, points_at_once, top_eigenvalues
from landscape.curvature.hessian import Derivatives, HessianOperator, HessianOptions, exact_only
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL, find_eigenpairs, start_vector, warm_start
from landscape.data.base import IID, NAMES
from landscape.evaluation import needs
from landscape.evaluation.grid import named_loss, setting
from landscape.evaluation.needs import GRAPH_BYTES
from landscape.gradients.minibatches import placed
from landscape.problem.layout import average
from landscape.problem.losses import existing
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
    # Weights and deviations, a search and its vectors.
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
    """Measure learners' spread in the sharpest directions.

    The gradient in the same space and ½ tr(HC), the second-order cost of the spread, stand beside it.

    Local SGD's learners differ mostly along sharp directions, so that their differences show these without a
    Hessian (arXiv 2605.27739). BatchNorm has the statistics of the problem at all weights: by default those
    of w_a, so that the losses of the learners can be compared with the second-order cost.

    Args:
        problem: the loss; or a run, on its training set.
        weights: (n, P), those of at least 2 learners; default: the run's.
        k: how many of the largest eigenvalues of the Hessian at w_a span the sharp space; at most P.
        residual_tol: the largest residual of the eigenvalues, relative to them.
        max_products: Hessian-vector products for the eigenvalues, at most; n more are for tr(HC).
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
        search: "auto" or "exact", as in :func:`landscape.top_eigenvalues`.
        seed: draws the vector that the search of eigenvalues starts from.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The shares of the spread and of the gradient along each eigenvector (k,), the cost in nats, and how
        much of the gradient lies in the span of the spread.

    Raises:
        InputError: fewer than 2 learners, a ``k`` that is not allowed, weights of another length, or
            a problem without weights.
        OperationError: all learners have the same weights.

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
    weights = placed(problem, weights, smallest=2)
    report = taken(progress)
    spread = Spread(weights)
    mean, consensus = spread.mean, spread.consensus
    if not 0 < consensus < math.inf:
        raise OperationError(f"weights: their consensus distance is {consensus:g}, there is no disagreement")
    pairs = top_eigenvalues(
        problem, k, residual_tol, weights=mean, derivatives=derivatives, search=search,
        max_products=max_products, seed=seed, progress=portion(progress, 0, 0.6),
    )  # fmt: skip
    report(0.6)
    loss, gradient = problem.loss_and_gradient(mean)
    learners_loss = float(np.mean([problem.loss(w) for w in weights]))
    existing(loss + learners_loss, gradient)
    vectors, values = torch.from_numpy(pairs.vectors).to(mean.device), torch.from_numpy(pairs.values)
    along = spread.products(vectors)  # (n, k)
    bends, product_error = spread.curvature(problem, pairs.derivatives)
    report(0.8)
    share, share_error = shares(along.square().numpy(), spread.gram.diagonal().numpy())
    cost, cost_error = half_mean(bends)
    result = Disagreement(
        **{name: getattr(pairs, name) for name in ("values", "residuals", "converged", "derivatives")},
        spread_share=share,
        spread_error=share_error,
        **_of_gradient(gradient, vectors, spread, along),
        consensus=consensus,
        cost=cost,
        cost_error=math.hypot(cost_error, product_error / 2),
        cost_top=0.5 * float(values @ along.square().mean(0)),
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
    """The deviations Δw_j (n, P) of ``weights`` from their mean, and inner products with them in float64."""

    def __init__(self, weights: Tensor) -> None:
        self.mean = average(weights)
        self._rows = weights - self.mean
        n = len(weights)
        self._centered = torch.eye(n, dtype=torch.float64) - 1 / n  # takes off the mean's rounding, too
        self.gram = self.products(self._rows) @ self._centered

    @property
    def consensus(self) -> float:
        """n⁻¹ Σ_j ‖Δw_j‖²."""
        return float(self.gram.trace()) / len(self.gram)

    def products(self, vectors: Tensor) -> Tensor:
        """(n, m), ⟨Δw_j, x⟩ for ``vectors`` x (m, P)."""
        return self._centered @ _products(self._rows, vectors)

    def curvature(self, problem: Problem, derivatives: str) -> tuple[Array, float]:
        """(n,), Δw_jᵀHΔw_j, and the largest error of their mean by differences.

        One Hessian product at a time, so that their memory does not grow with n.
        """
        h = fast_hessian(problem, self.mean, HessianOptions(derivatives=derivatives))
        columns, product_errors = [], []
        for row in self._rows:
            image, errors = h.verified(row[None])
            columns.append(self.products(image))
            product_errors.append(errors[0] * float(vector_norm(row)))
        return (torch.cat(columns, 1) @ self._centered).diagonal().numpy(), float(np.mean(product_errors))

    def in_span(self, dots: Tensor) -> tuple[int, float]:
        """(rank, ‖Px‖²), P the projector on the span of the Δw_j, for x with the products ``dots`` (n,)."""
        sizes, rows = torch.linalg.eigh(self.gram)
        retained = sizes > ROUNDING * sizes[-1]
        parts = rows.T[retained] @ dots
        return int(retained.sum()), float((parts.square() / sizes[retained]).sum())


def _of_gradient(gradient: Tensor, vectors: Tensor, spread: Spread, along: Tensor) -> dict[str, Any]:
    """The fields on the gradient (P,): its shares in the top-k space and in the span of the spread."""
    norm2 = float(_products(gradient[None], gradient[None]))
    scale = 1 / norm2 if norm2 > 0 else math.nan
    in_space = _products(vectors, gradient[None])[:, 0]  # (k,)
    rank, in_span = spread.in_span(spread.products(gradient[None])[:, 0])
    _, sharp_in_span = spread.in_span(along @ in_space)
    sharp2 = float(in_space.square().sum())
    return {
        "gradient_share": in_space.square().numpy() * scale,
        "gradient_in_span": in_span * scale,
        "dominant_in_span": sharp_in_span / sharp2 if sharp2 > 0 else math.nan,
        "rank": rank,
        "grad_norm2": norm2,
    }


def _products(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) float64 on the CPU, the inner products of ``a`` (n, P) with ``b`` (m, P), summed in float64."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=float64_device(a.device))
    for left_block, right_block in zip(torch.split(a, BLOCK, 1), torch.split(b, BLOCK, 1), strict=True):
        total += double(left_block) @ double(right_block).T
    return total.cpu()


def shares(along: Array, totals: Array) -> tuple[Array, Array]:
    """The shares of the learners' spread along directions, from squares of deviations from their own mean.

    Args:
        along: (n, k), of each learner along each direction.
        each: (n,), of each learner in all directions.

    Returns:
        (k,) Σ_j along_ji/Σ_j each_j, and (k,) jackknife errors of their cumulative sums, NaN for two
        learners.

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
    """½ tr(HC) and its jackknife error, NaN for two learners.

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
    """The deviations, a search and its vectors; the gradients on a trajectory for each pair."""
    route = 0 if trajectory is None else 3 * draws * needs.double(problem)
    search = k + needs.several(problem, k)
    return needs.curved(problem, needs.rows(weights) + search + 6 + route)


@analysis(_smoothing_need, shorter="a smaller draws= or k=", of_the_run=("weights", "lr"), version=1)
def smoothing(
    problem: Problem | Run,
    weights: Tensor | None = None,
    *,
    draws: Several = DRAWS,
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
    """How the spread of learners at ``weights`` (n, P) smooths the loss of ``problem`` around their mean.

    That it does is the claim of the DPSGD-2021 paper, whose smoothed loss this is.

    The memory is that of :func:`landscape.top_eigenvalues` for any number of draws, if the Hessians at all
    points exceed 1 GiB; a ``trajectory`` takes 3m vectors of P numbers more.

    Args:
        problem: the loss; or a run, on its training set.
        weights: (n, P), those of at least 2 learners; default: the run's.
        draws: m ≥ 2 antithetic pairs ±δ; 16 give standard errors to about 18%.
        k: how many eigenvectors the spread is compared with; at most P.
        trajectory: w_a at S + 1 successive steps, (S + 1, P), along which the gradient's Lipschitz constant
            is estimated.
        lr, alpha_e: the learning rate (default: the run's) and effective learning rate, kept with the result.
        residual_tol: the largest residual of eigenvalues, relative to them.
        seed: draws the displacements.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Loss, λ_max and Lipschitz constants of L_Σ, (2,) or (2, S) each with standard errors: for the measured
        spread and for the isotropic one.

    Raises:
        InputError: fewer than 2 learners or draws, or a model without second derivatives.
        OperationError: all learners have the same weights.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.smoothing(problem, torch.eye(2), draws=2)
        >>> result.lambda_smooth.round(3).tolist()  # the same as without: the loss is quadratic
        [9.0, 9.0]
    """
    problem = problem_of(problem)
    exact_only(problem, "smoothing")
    weights = placed(problem, weights, smallest=2)
    mean = average(weights)
    spread = weights - mean
    variance = float(double(spread).square().sum()) / len(weights)
    if not 0 < variance < math.inf:
        raise OperationError(f"weights: their consensus distance is {variance:g}, there is no spread")
    search, count = portion(progress, 0, 0.3), min(k, len(mean))
    eigen = top_eigenvalues(problem, count, residual_tol, weights=mean, seed=seed, progress=search)
    vectors = torch.from_numpy(eigen.vectors).to(mean.device)
    h = fast_hessian(problem, mean)
    along = double(spread @ vectors.T).square().sum(0) / len(weights)
    trace_hs = sum(float(double(s) @ double(h(s))) for s in spread) / len(weights)
    route = mean[None] if trajectory is None else trajectory.to(mean)
    lengths = double(route[1:] - route[:-1]).norm(dim=1)
    gradients = [double(existing(*problem.loss_and_gradient(w))) for w in route] if len(route) > 1 else []
    rows, converged = list[dict[str, Any]](), bool(eigen.converged)
    for index, kind in enumerate(KINDS):

        def shift(i: int, kind: str = kind) -> Tensor:
            return problem.along_weights(displacement(spread, kind, variance, seed, i))

        smoothed = _Smoothed(problem, mean, shift, draws)
        began, ends = (0.3 + 0.7 * (index + share) / len(KINDS) for share in (0, 1))
        losses = [[problem.loss(mean + sign * shift(i)) for sign in (1, -1)] for i in range(draws)]
        if not np.isfinite(losses).all():
            raise OperationError(f"weights: their {kind} spread reaches infinite losses; take others")
        first_half = portion(progress, began, (began + ends) / 2)
        row = smoothed.sharpest(vectors[0], residual_tol, seed, first_half)
        converged = converged and bool(row.pop("converged"))
        row["loss_smooth"], row["loss_smooth_se"] = statistics.mean_and_error(np.mean(losses, axis=1))
        row["lipschitz_smooth"], row["lipschitz_smooth_se"] = smoothed.lipschitz(route, lengths)
        rows.append(row)
        portion(progress, began, ends)(1.0)
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    changes = [float(vector_norm(b - a)) for a, b in itertools.pairwise(gradients)]
    settings: dict[str, Any] = {"lr": lr, "alpha_e": alpha_e, "draws": draws, "seed": seed}
    return Smoothing(
        loss=problem.loss(mean),
        lambda_max=float(eigen.values[0]),
        residual=float(eigen.residuals[0]),
        eigenvalues=eigen.values,
        share=(along / variance).cpu().numpy(),
        trace_hs=trace_hs,
        consensus=variance,
        lipschitz=np.array(changes) / lengths.cpu().numpy(),
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
    """δ_i (P,) ~ N(0, Σ): Σ = n⁻¹ ΣΔw_jΔw_jᵀ of ``spread`` (n, P), or isotropic with trace ``variance``.

    Each call draws it anew, the same for the same ``seed`` and i, so that none has to be stored.
    """
    entropy = np.random.SeedSequence((seed, KINDS.index(kind), i)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(entropy[0]))
    size = spread.shape[0] if kind == "measured" else spread.shape[1]
    xi: Tensor = torch.randn(size, dtype=torch.float64, generator=generator).to(spread)
    xi /= size**0.5
    return torch.mv(spread.T, xi) if kind == "measured" else xi * variance**0.5


@dataclass(frozen=True)
class _Smoothed:
    """The mean over ``draws`` of the loss at mean ± δ_i, δ_i = shift(i) (P,)."""

    problem: Problem
    mean: Tensor
    shift: Callable[[int], Tensor]
    draws: int

    def products(self) -> Callable[[Tensor], Iterator[Tensor]]:
        """v (P,) ↦ the products (P,) with the mean Hessian of each pair, in order."""
        problem, saved = self.problem, ChainHessian.saved_bytes(self.problem)
        size = 1 if saved is None else max(1, points_at_once(problem) // 2)
        groups = [range(i, min(i + size, self.draws)) for i in range(0, self.draws, size)]
        stored = saved is not None and 2 * self.draws * saved <= min(GRAPH_BYTES, spare())

        def group(rows: range) -> Callable[[Tensor], Tensor]:
            """v (P,) ↦ the products (rows, P)."""
            points = torch.stack([self.mean + sign * self.shift(i) for i in rows for sign in (1, -1)])
            if saved is not None:
                hessians = ChainHessian(problem, points)
                return lambda v: hessians(v.expand(len(points), -1)).view(len(rows), 2, -1).mean(1)
            ends = [HessianOperator(problem, point, derivatives="exact", graph_bytes=0) for point in points]
            return lambda v: ((ends[0](v) + ends[1](v)) / 2)[None]

        operators = [group(rows) for rows in groups] if stored else None

        def products(v: Tensor) -> Iterator[Tensor]:
            for k, rows in enumerate(groups):
                yield from (operators[k] if operators else group(rows))(v)

        return products

    def sharpest(self, near: Tensor, residual_tol: float, seed: int, progress: Progress) -> dict[str, Any]:
        """λ_max of the mean Hessian with its errors, searched from a vector ``near``."""
        products = self.products()

        def product(v: Tensor) -> Tensor:
            total = torch.zeros_like(v)
            for image in products(v):
                total += image
            return total / self.draws

        start = warm_start(near, start_vector(self.problem, seed))
        top = find_eigenpairs(product, start, residual_tol=residual_tol, progress=progress)
        v, value = top.vectors[0], float(top.values[0])
        center, along, across = product(v), np.zeros(self.draws), 0.0
        for i, product_of_one in enumerate(products(v)):
            away = product_of_one - center
            along[i] = part = float(double(v) @ double(away))
            across += float(double(away).square().sum()) - part**2
        bias = max(0.0, across) / (self.draws * (self.draws - 1)) / abs(value) if value else math.nan
        return {
            "lambda_smooth": value,
            "lambda_smooth_residual": float(top.residuals[0]),
            "lambda_smooth_se": statistics.standard_error(along),
            "lambda_smooth_bias": bias,
            "converged": top.converged,
        }

    def lipschitz(self, route: Tensor, lengths: Tensor) -> tuple[Array, Array]:
        """‖Δ∇L_Σ‖/‖Δw‖ of each step of ``route`` (S + 1, P) and its standard error, (S,) each.

        The error is that of the part along the mean difference of gradients; where it is of the norm's size,
        the norm is too large.
        """
        ratios: list[tuple[float, float]] = []

        def smooth(w: Tensor, i: int) -> Tensor:
            d = self.shift(i)
            ahead, behind = (existing(*self.problem.loss_and_gradient(at)) for at in (w + d, w - d))
            return double((ahead + behind) / 2)

        before = [smooth(route[0], i) for i in range(self.draws)] if len(lengths) else []
        for w, length in zip(route[1:], lengths.tolist(), strict=True):
            after = [smooth(w, i) for i in range(self.draws)]
            changes = [b - a for a, b in zip(before, after, strict=True)]
            change = torch.stack(changes).mean(0)
            size = float(vector_norm(change))
            parts = np.array([float(inner(c, change)) / size if size else 0.0 for c in changes])
            ratios.append((size / length, statistics.standard_error(parts) / length))
            before = after
        values, errors = np.array(ratios).reshape(-1, 2).T
        return values, errors


@analysis(group="Measure noise and learners", of_the_run=None)
def label_counts(run: Checkpoint, **about: Unpack[Provenance]) -> LabelCounts:
    """Count the training samples of each label that each learner of a run has.

    Args:
        run: a checkpoint of ``landscape train`` with the recipe's key ``data.split``.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result; by default those
            of the run.

    Returns:
        The counts (n, K), which the checkpoint recorded: no data is read.

    Raises:
        OperationError: for a run whose learners all draw from the whole training set.

    Example:
        >>> import landscape
        >>> from landscape.training.run.loop import Trainer
        >>> divided = landscape.Recipe.read("digits-dpsgd", steps=0, **{"data.split": "labels(4)"})
        >>> counts = label_counts(Trainer(divided).run())
        >>> counts.counts.shape, int((counts.counts[0] > 0).sum())
        ((5, 10), 4)
    """
    fit("run", run, Checkpoint)
    if not {*NAMES} <= {*run.shared}:
        words = "its learners have no parts of their own; set the recipe's key data.split"
        raise OperationError(f"{run.path or 'run'}: {words}")
    _, counts, classes = (run.shared[name].cpu().numpy() for name in NAMES)
    division = str(run.settings.get("data", {}).get("split", IID))
    return LabelCounts(counts.astype(float), classes.astype(float), division, **about | {"split": "train"})

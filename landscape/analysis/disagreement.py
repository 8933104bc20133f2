"""How much of the learners' spread lies along the sharp directions of the loss, and what it costs."""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import statistics
from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import bounded
from landscape.core.options import SPLIT, expect, positive
from landscape.core.progress import Progress, no_progress, portion
from landscape.curvature.eigenvalues import exact_products, top_eigenvalues
from landscape.curvature.lanczos import MAX_PRODUCTS, TOL
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.problem.layout import average
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.curvature import Disagreement

# The number of outliers in the spectrum of a classifier with ten classes (Gur-Ari et al. 2018).
TOP_K = 10
# Numbers of each vector that are in float64 at once: 8 MB a vector (ours).
BLOCK = 2**20
# Squared lengths below this share of the largest are rounding of the weights in float32 (ours).
ROUNDING = 1e-10


@bounded(needs.disagreement)
def disagreement(
    checkpoint: Checkpoint | Tensor,
    top_k: int = TOP_K,
    *,
    problem: Problem | None = None,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
    search: str = "auto",
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Disagreement:
    """The learners' spread and the gradient in the space of the sharpest directions, and ½ tr(HC).

    Local SGD's learners differ mostly along sharp directions, so that their differences show these without a
    Hessian (arXiv 2605.27739). BatchNorm has the statistics of the problem at all weights: by default those
    of w_a, so that the losses of the learners can be compared with the second-order cost.

    Args:
        checkpoint: a run with at least 2 learners, or their weights (n, P).
        top_k: k, how many of the largest eigenvalues of the Hessian at w_a span the sharp space; at most P.
        problem: the loss; default: the checkpoint's, on its training set. Needed with weights, and where the
            checkpoint's model or data is the user's own.
        tol: the largest residual of the eigenvalues, relative to them.
        max_products: Hessian-vector products for the eigenvalues, at most; n more are for tr(HC).
        search: "auto" or "exact", as in :func:`landscape.top_eigenvalues`.
        seed: draws the vector that the search of eigenvalues starts from.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The shares of the spread and of the gradient along each eigenvector (k,), the cost in nats, and how
        much of the gradient lies in the span of the spread.

    Raises:
        InputError: fewer than 2 learners, a ``top_k`` that is not allowed, weights of another length, or
            weights without a problem.
        FailedError: all learners have the same weights.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.ones(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> learners = torch.tensor([[0.1, 0.4], [0.1, 0.2], [0.2, 0.3]])
        >>> result = landscape.disagreement(learners, 1, problem=problem)
        >>> round(result.value, 3), round(result.cost, 4)  # the sharp direction is the second
        (0.75, 0.0311)
    """
    weights, problem, origin = _learners(checkpoint, problem)
    positive("top_k", top_k, least=1)
    report = progress or no_progress
    spread = _Spread(weights.to(problem.device, problem.dtype))
    mean, consensus = spread.mean, spread.consensus
    if not 0 < consensus < math.inf:
        raise FailedError(f"weights: their consensus distance is {consensus:g}, there is no disagreement")
    pairs = top_eigenvalues(
        problem, top_k, tol, theta=mean, search=search, max_products=max_products, seed=seed,
        progress=portion(progress, 0, 0.6),
    )  # fmt: skip
    report(0.6)
    loss, gradient = problem.loss_and_gradient(mean)
    along = spread.products(pairs.vectors)  # (n, k)
    bent = spread.curvature(problem)
    report(0.8)
    share, share_error = shares(along.square().numpy(), spread.gram.diagonal().numpy())
    cost, cost_error = half_mean(bent)
    result = Disagreement(
        values=pairs.values.numpy(),
        residuals=pairs.residuals.numpy(),
        spread_share=share,
        spread_error=share_error,
        **_of_gradient(gradient, pairs.vectors, spread, along),
        consensus=consensus,
        cost=cost,
        cost_error=cost_error,
        cost_top=0.5 * float(pairs.values @ along.square().mean(0)),
        loss=loss,
        learners_loss=float(np.mean([problem.loss(w) for w in weights.to(mean)])),
        parameters=len(mean),
        learners=len(weights),
        hvps=pairs.hvps + len(weights),
        converged=pairs.converged,
        tol=tol,
        seed=seed,
        **setting(problem),
        **(origin | about),
    )
    report(1.0)
    return result


def _learners(checkpoint: Checkpoint | Tensor, problem: Problem | None) -> tuple[Tensor, Problem, Provenance]:
    """The learners' weights (n, P) with n ≥ 2, the problem, and where both come from, if it is known."""
    expect("checkpoint", checkpoint, Checkpoint, Tensor)
    weights = checkpoint.weights if isinstance(checkpoint, Checkpoint) else checkpoint
    origin: Provenance = {}
    positive("learners", len(weights), least=2)  # before the data is read
    if problem is None:
        if not isinstance(checkpoint, Checkpoint):
            raise InputError("problem: missing; weights alone have no loss, give problem=")
        problem = checkpoint.problem()
        origin = {"split": SPLIT, "label": checkpoint.label}
    if weights.dim() != 2 or weights.shape[1] != problem.layout.size:
        raise InputError(f"weights: shape {tuple(weights.shape)}, it must be (n, {problem.layout.size})")
    return weights, problem, origin


class _Spread:
    """The deviations Δw_j (n, P) of ``weights`` from their mean, and inner products with them in float64."""

    def __init__(self, weights: Tensor) -> None:
        self.mean = average(weights)
        self._rows = weights - self.mean
        n = len(weights)
        self._centred = torch.eye(n, dtype=torch.float64) - 1 / n  # takes off the mean's rounding, too
        self.gram = self.products(self._rows) @ self._centred

    @property
    def consensus(self) -> float:
        """n⁻¹ Σ_j ‖Δw_j‖²."""
        return float(self.gram.trace()) / len(self.gram)

    def products(self, vectors: Tensor) -> Tensor:
        """(n, m), ⟨Δw_j, x⟩ for ``vectors`` x (m, P)."""
        return self._centred @ _products(self._rows, vectors)

    def curvature(self, problem: Problem) -> Array:
        """(n,), Δw_jᵀHΔw_j; one Hessian product at a time, so that their memory does not grow with n."""
        products, _ = exact_products(problem, self.mean)
        columns = torch.cat([self.products(products(row[None])) for row in self._rows], 1)
        return (columns @ self._centred).diagonal().numpy()

    def in_span(self, dots: Tensor) -> tuple[int, float]:
        """(rank, ‖Px‖²), P the projector on the span of the Δw_j, for x with the products ``dots`` (n,)."""
        sizes, rows = torch.linalg.eigh(self.gram)
        kept = sizes > ROUNDING * sizes[-1]
        parts = rows.T[kept] @ dots
        return int(kept.sum()), float((parts.square() / sizes[kept]).sum())


def _of_gradient(gradient: Tensor, vectors: Tensor, spread: _Spread, along: Tensor) -> dict[str, Any]:
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
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for left, right in zip(torch.split(a, BLOCK, 1), torch.split(b, BLOCK, 1), strict=True):
        total += left.double() @ right.double().T
    return total.cpu()


def shares(along: Array, each: Array) -> tuple[Array, Array]:
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
    n = len(each)
    share = along.sum(0) / each.sum()
    if n < 3:
        return share, np.full(len(share), np.nan)
    summed = np.cumsum(along, 1)
    # Without learner j the mean moves, and the sum of squares is less by its part times n/(n − 1).
    without = (summed.sum(0) - summed * n / (n - 1)) / (each.sum() - each * n / (n - 1))[:, None]
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

"""The Lanczos iteration with thick restarts, and a bound on the eigenvalues that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from landscape.core.devices import double, part_length
from landscape.core.hdf5 import Array
from landscape.curvature.operators import ALONE, Ranks
from landscape.evaluation.needs import basis_of_room, least_basis

# Numbers of each vector that are combined at once (ours).
COLUMNS = 2**20
# In its first MIN_PRODUCTS products (ARPACK's basis) a search must have been converged for STABLE_PRODUCTS of
# them: from a random start with little of λ_max's vector in it, 5 of 60 searches on MNIST's MLPs stayed at
# the second largest eigenvalue for 2 to 4 products, before their twelfth.
STABLE_PRODUCTS, MIN_PRODUCTS = 5, 20
# An end smaller than this share of the spectral radius counts as zero, and may be zero exactly (ours).
NEAR_ZERO = 1e-3
# The probability with which a bound on unseen eigenvalues may fail (ours; that of the usual error bars).
RISK = 0.01


def orthogonalize(w: Tensor, vectors: Tensor, t: Array, j: int, ranks: Ranks = ALONE) -> tuple[Tensor, float]:
    """The part of an operator's product ``w`` with vectors[j] orthogonal to the basis, and its norm β.

    The basis is the orthonormal rows ``vectors[: j + 1]``; w/β is the next one. Row and column j of ``t``,
    the operator in that basis, are set.
    """
    coefficients = torch.zeros(j + 1, dtype=w.dtype, device=w.device)
    for _ in range(2):  # twice is enough (Kahan and Parlett) for orthogonality to rounding
        c = ranks.inner(vectors[: j + 1], w).to(w)
        w = torch.addmv(w, vectors[: j + 1].T, c, alpha=-1)
        coefficients += c
    t[: j + 1, j] = t[j, : j + 1] = double(coefficients).cpu().numpy()
    return w, float(ranks.norm(w))


def small_eigh(t: Array) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors of a small symmetric matrix; NaN where it is not finite.

    By PyTorch: the threads of NumPy's library keep spinning for a while, which slows the next products.
    """
    if not np.isfinite(t).all():  # LAPACK fails on these
        return np.full(len(t), np.nan), np.full(t.shape, np.nan)
    values, s = torch.linalg.eigh(torch.from_numpy(t))
    return values.numpy(), s.numpy()


def combine(
    rows: Sequence[Tensor] | Tensor, weights: Array, into: Sequence[Tensor] | Tensor | None = None
) -> None:
    """Write the combinations ``weights`` (m, n), m ≤ n, of the first n rows (P,) into m rows.

    These are the first of the same rows, if no others are given. COLUMNS numbers of each at once: another
    such matrix would take much memory, and a product of all at once takes a copy of it besides.
    """
    into = rows if into is None else into
    for first in range(0, len(rows[0]), COLUMNS):
        part = slice(first, first + COLUMNS)
        old = torch.stack([row[part] for row in rows[: weights.shape[1]]])
        for row, new in zip(into, torch.from_numpy(weights.copy()).to(old) @ old, strict=False):
            row[part] = new


def gram(rows: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The inner products (m, n) of two lists of vectors (P,) in float64, in parts."""
    total = torch.zeros(len(rows), len(others), dtype=torch.float64)
    length = part_length(rows[0].device)
    for first in range(0, len(rows[0]), length):
        part = slice(first, first + length)
        a, b = (torch.stack([v[part] for v in vectors]) for vectors in (rows, others))
        total += (a @ b.T).cpu()
    return total


def negligible(beta: float, radius: float, dtype: torch.dtype) -> bool:
    """Test whether the rest of a Lanczos step is rounding: the basis then spans an invariant subspace.

    100 times the precision is more than rounding makes in small matrices, and far below any tolerance (ours).
    """
    return beta <= 100 * torch.finfo(dtype).eps * max(radius, float(np.finfo(float).tiny))


def outer_indices(values: Array, low: int, high: int) -> Array:
    """Indices of the ``low`` smallest and ``high`` largest of ``values``, by descending value."""
    order = np.argsort(values)[::-1]
    rank = np.arange(len(order))
    chosen: Array = order[(rank < high) | (rank >= len(order) - low)]
    return chosen.copy()


class KrylovSpace(NamedTuple):
    """The Ritz pairs of one Krylov space, and the space.

    The operator maps the orthonormal ``basis`` (j, P) to itself by ``t`` (j, j), and besides its last
    vector to ``rest`` (P,), orthogonal to the basis. ``first``: t, tridiagonal, and ‖rest‖ before a restart.
    """

    values: Array
    vectors: Tensor
    products: int
    converged: bool
    invariant: bool
    radius: float
    basis: Tensor
    t: Array
    rest: Tensor
    first: tuple[Array, float]


def krylov(
    start: Tensor,
    locked: Tensor,
    radius: float,
    low: int,
    high: int,
    residual_tol: float,
    budget: int,
    ranks: Ranks,
    report_ratio: Callable[[float], None] = lambda ratio: None,
) -> Generator[Tensor, Tensor, KrylovSpace]:
    """One Krylov space orthogonal to ``locked`` (m, P), with thick restarts (Wu and Simon 2000).

    Returns the wanted Ritz pairs; all of them if the space is invariant. ``radius`` is the largest magnitude
    of eigenvalues so far, which sets the size of rounding errors. ``report_ratio`` takes, after each product,
    the residual ratio: how many times the largest residual is what the tolerance allows.
    """

    def outside(w: Tensor) -> Tensor:
        return w - locked.T @ ranks.inner(locked, w).to(w)

    size = ranks.size(start)
    dimension = size - len(locked)
    vector_bytes = ranks.length(start) * start.itemsize
    max_basis = basis_of_room(low + high, vector_bytes, max(low, high) > 1)
    vectors = torch.empty(min(max_basis, dimension) + 1, len(start), dtype=start.dtype, device=start.device)
    vectors[: least_basis(low + high, vector_bytes) + 1] = 0  # what is needed is taken now, the rest if used
    if len(locked):
        start = outside(outside(start))
    torch.div(start, ranks.norm(start), out=vectors[0])
    t = np.zeros((len(vectors), len(vectors)))
    j, products, since = 0, 0, 0
    first: tuple[Array, float] | None = None
    stable: Array | None = None  # the wanted values since they met the tolerance
    while True:
        w = yield vectors[j]
        w, beta = orthogonalize(outside(w) if len(locked) else w, vectors, t, j, ranks)
        if len(locked):  # once more, now that w is small: their rounding error in it would be scaled up
            w = outside(w)
            beta = float(ranks.norm(w))
        products += 1
        values, s = small_eigh(t[: j + 1, : j + 1])
        radius = max(radius, float(np.abs(values).max()))
        finite = bool(np.isfinite(beta))
        invariant = finite and (negligible(beta, radius, start.dtype) or j + 1 == dimension)
        chosen = np.arange(j + 1) if invariant else outer_indices(values, low, high)
        bound = residual_tol * np.maximum(np.abs(values[chosen]), NEAR_ZERO * radius)
        # The basis of a small matrix becomes complete, which costs little and finds every copy of an
        # eigenvalue.
        enough = j + 1 >= min(low + high, dimension) and not (max(low, high) > 1 and dimension <= max_basis)
        residuals = beta * np.abs(s[-1, chosen])
        converged = invariant or (enough and bool(np.all(residuals <= bound)))
        if enough and finite and radius:
            report_ratio(float(np.max(residuals / bound)))
        if invariant or not converged:
            stable = None
        elif stable is None or np.any(np.abs(values[chosen] - stable) > bound):
            stable, since = values[chosen], products
        settled = converged and (products - since >= STABLE_PRODUCTS or products >= MIN_PRODUCTS)
        if invariant or settled or products >= budget or not finite:
            break
        if j + 1 == len(vectors) - 1:
            # Half of the basis, divided between the outer_indices if both count.
            share = max(1, (j + 1) // (4 if low and high else 2))
            retained = outer_indices(values, share if low else 0, share if high else 0)
            combine(vectors, s[:, retained].T)
            first = first or (t[: j + 1, : j + 1].copy(), beta)
            t[:] = 0
            t[range(len(retained)), range(len(retained))] = values[retained]
            j = len(retained) - 1  # the next product fills in the arrow of couplings by itself
        torch.div(w, beta, out=vectors[j + 1])
        del w  # before the next product
        j += 1
    ritz = start.new_empty(len(chosen), len(start))
    combine(vectors, s[:, chosen].T, ritz)
    found = values[chosen], ritz, products, converged, invariant, radius
    t = t[: j + 1, : j + 1]
    return KrylovSpace(*found, vectors[: j + 1], t, w, first or (t, beta))


def outermost(t: Array, beta: float, size: int) -> float:
    """An upper bound on λ_max of a symmetric operator on R^``size``, which fails with a probability of RISK.

    ``t`` (j, j) is tridiagonal, of j Lanczos steps from a random start b of norm 1, and ``beta`` the norm of
    the rest after the last. A unit eigenvector x to λ > θ_j has |xᵀb| ≤ Πβ_i / Π(λ − θ_i), θ the Ritz values,
    and a random b less of x than c/√size only with probability c·√(2/π) (van Dorsselaer, Hochstenbach and van
    der Vorst 2000, section 3). Where not more than half of b is not random, it has half of that (Anderson
    1955).
    """
    betas = np.abs(np.append(np.diag(t, -1), beta))
    if not np.isfinite(betas).all():
        return math.inf
    values = small_eigh(t)[0]
    if betas.min() == 0:
        return float(values[-1])
    least = math.log(RISK * math.sqrt(math.pi / 2) / 2) - math.log(size) / 2
    known = np.log(betas).sum() - least

    def allowed(distance: float) -> bool:
        return bool(known >= np.log(values[-1] - values + distance).sum())

    near, far = 0.0, float(betas.max())
    while allowed(far):
        near, far = far, 2 * far
    for _ in range(40):  # to a part in 10¹² of β
        middle = (near + far) / 2
        near, far = (middle, far) if allowed(middle) else (near, middle)
    return float(values[-1] + far)

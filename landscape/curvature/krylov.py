"""Krylov spaces of a symmetric operator, and bounds on the eigenvalues outside of them.

They are generators: each yields the vectors whose products it needs, and is sent these products
(:func:`landscape.curvature.lanczos.search_eigenpairs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.evaluation.needs import BASIS_BYTES, MAX_BASIS
from landscape.problem.problem import Problem


def start_vector(problem: Problem, seed: int, size: int | None = None) -> Tensor:
    """A normal vector (size,), by default (P,), from ``seed``: the same draw on every device.

    Of a model in half precision it is float32, in which a basis can be orthogonal. Lanczos needs one with
    components along all eigenvectors. InputError for a seed below 0.
    """
    positive("seed", seed, least=0)
    generator = torch.Generator().manual_seed(seed)
    length = problem.layout.size if size is None else size
    return torch.randn(length, dtype=torch.float64, generator=generator).to(
        problem.device, torch.promote_types(problem.dtype, torch.float32)
    )


def warm_start(near: Tensor, first: Tensor) -> Tensor:
    """(P,), the start of a search near ``near``, with as much of ``first``, which misses no eigenvector."""
    start: Tensor = near.to(first) / near.norm() + first / first.norm()
    return start


# Numbers of each basis vector that a restart combines at once (ours).
COLUMNS = 2**20
# In its first MIN_PRODUCTS products (ARPACK's basis) a search must have been converged for STABLE_PRODUCTS of
# them: from a random start with little of λ_max's vector in it, 5 of 60 searches on MNIST's MLPs stayed at
# the second largest eigenvalue for 2 to 4 products, before their twelfth.
STABLE_PRODUCTS, MIN_PRODUCTS = 5, 20
# An end smaller than this share of the spectral radius counts as zero, and may be zero exactly (ours).
NEAR_ZERO = 1e-3
# The probability with which a bound on unseen eigenvalues may fail (ours; that of the usual error bars).
RISK = 0.01
# Products of a second start, at most: as a share of the search's own, and at least so many. The top 5 of an
# MNIST MLP take 3 after 19, the top 20 take 16 after 43.
SECOND_SHARE, MIN_SECOND = 0.5, 10


def orthogonalise(w: Tensor, vectors: Tensor, t: Array, j: int) -> tuple[Tensor, float]:
    """The part of an operator's product ``w`` with vectors[j] orthogonal to the basis, and its norm β.

    The basis is the orthonormal rows ``vectors[: j + 1]``; w/β is the next one. Row and column j of ``t``,
    the operator in that basis, are set.
    """
    coefficients = torch.zeros(j + 1, dtype=w.dtype, device=w.device)
    for _ in range(2):  # twice is enough (Kahan and Parlett) for orthogonality to rounding
        c = vectors[: j + 1] @ w
        w = torch.addmv(w, vectors[: j + 1].T, c, alpha=-1)
        coefficients += c
    t[: j + 1, j] = t[j, : j + 1] = coefficients.double().cpu().numpy()
    return w, float(w.norm())


def small_eigh(t: Array) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors of a small symmetric matrix; NaN where it is not finite.

    By PyTorch: the threads of NumPy's library keep spinning for a while, which slows the next products.
    """
    if not np.isfinite(t).all():  # LAPACK fails on these
        return np.full(len(t), np.nan), np.full(t.shape, np.nan)
    values, s = torch.linalg.eigh(torch.from_numpy(t))
    return values.numpy(), s.numpy()


def negligible(beta: float, radius: float, dtype: torch.dtype) -> bool:
    """Whether the rest of a Lanczos step is only rounding: the basis then spans an invariant subspace.

    100 times the precision is more than rounding makes in small matrices, and far below any tolerance (ours).
    """
    return beta <= 100 * torch.finfo(dtype).eps * max(radius, float(np.finfo(float).tiny))


def ends(values: Array, low: int, high: int) -> Array:
    """Indices of the ``low`` smallest and ``high`` largest of ``values``, by descending value."""
    order = np.argsort(values)[::-1]
    rank = np.arange(len(order))
    chosen: Array = order[(rank < high) | (rank >= len(order) - low)]
    return chosen.copy()


class KrylovSpace(NamedTuple):
    """The Ritz pairs of one Krylov space, and the space.

    The operator maps the orthonormal ``basis`` (j, P) to itself by ``t`` (j, j), and besides its last
    vector to ``rest`` (P,), orthogonal to the basis. ``restarted``: earlier basis vectors were dropped.
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
    restarted: bool


def krylov(
    start: Tensor,
    aside: Tensor,
    radius: float,
    low: int,
    high: int,
    tol: float,
    budget: int,
    excess: Callable[[float], None] = lambda ratio: None,
) -> Generator[Tensor, Tensor, KrylovSpace]:
    """One Krylov space orthogonal to ``aside`` (m, P), with thick restarts (Wu and Simon 2000).

    Returns the wanted Ritz pairs; all of them if the space is invariant. ``radius`` is the largest magnitude
    of eigenvalues so far, which sets the size of rounding errors. ``excess`` takes, after each product, how
    many times the largest residual is what the tolerance allows.
    """

    def outside(w: Tensor) -> Tensor:
        return w - aside.T @ (aside @ w)

    size = len(start)
    dimension = size - len(aside)
    room = max(4 * (low + high), min(MAX_BASIS, BASIS_BYTES // (size * start.itemsize)))
    vectors = torch.zeros(min(room, dimension) + 1, size, dtype=start.dtype, device=start.device)
    start = outside(outside(start))
    vectors[0] = start / start.norm()
    t = np.zeros((len(vectors), len(vectors)))
    j, products, since, restarted = 0, 0, 0, False
    stable: Array | None = None  # the wanted values since they met the tolerance
    while True:
        w = yield vectors[j]
        w, beta = orthogonalise(outside(w) if len(aside) else w, vectors, t, j)
        if len(aside):  # once more, now that w is small: their rounding error in it would be scaled up
            w = outside(w)
            beta = float(w.norm())
        products += 1
        values, s = small_eigh(t[: j + 1, : j + 1])
        radius = max(radius, float(np.abs(values).max()))
        finite = bool(np.isfinite(beta))
        invariant = finite and (negligible(beta, radius, start.dtype) or j + 1 == dimension)
        chosen = np.arange(j + 1) if invariant else ends(values, low, high)
        bound = tol * np.maximum(np.abs(values[chosen]), NEAR_ZERO * radius)
        # The basis of a small matrix becomes complete, which costs little and finds every copy of an
        # eigenvalue.
        enough = j + 1 >= min(low + high, dimension) and not (max(low, high) > 1 and dimension <= room)
        residuals = beta * np.abs(s[-1, chosen])
        converged = invariant or (enough and bool(np.all(residuals <= bound)))
        if enough and finite and radius:
            excess(float(np.max(residuals / bound)))
        if invariant or not converged:
            stable = None
        elif stable is None or np.any(np.abs(values[chosen] - stable) > bound):
            stable, since = values[chosen], products
        settled = converged and (products - since >= STABLE_PRODUCTS or products >= MIN_PRODUCTS)
        if invariant or settled or products >= budget or not finite:
            break
        if j + 1 == len(vectors) - 1:
            # Half of the basis, divided between the ends if both count.
            share = max(1, (j + 1) // (4 if low and high else 2))
            retained = ends(values, share if low else 0, share if high else 0)
            turn = torch.from_numpy(s[:, retained]).to(start).T
            for part in torch.split(vectors, COLUMNS, 1):  # half of the basis once more would be much
                part[: len(retained)] = turn @ part[: j + 1]
            t[:], restarted = 0, True
            t[range(len(retained)), range(len(retained))] = values[retained]
            j = len(retained) - 1  # the next product fills in the arrow of couplings by itself
        vectors[j + 1] = w / beta
        j += 1
    ritz = torch.from_numpy(s[:, chosen]).to(start).T @ vectors[: j + 1]
    found = values[chosen], ritz, products, converged, invariant, radius
    return KrylovSpace(*found, vectors[: j + 1], t[: j + 1, : j + 1], w, restarted)


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


class SecondStart(NamedTuple):
    """The result of a second start: a ``bound`` on all eigenvalues that the search does not have, which fails
    with a probability of RISK; its products; and a start for the next search, if one was missed."""

    bound: float
    products: int
    start: Tensor | None


def second_start(
    space: KrylovSpace, aside: Tensor, floor: float, level: float, sign: float, budget: int
) -> Generator[Tensor, Tensor, SecondStart]:
    """Whether there is an eigenvalue above ``level`` besides those of ``space`` and ``aside``.

    ``sign`` −1: of the negative of the operator, to whose eigenvalues ``floor``, the least that was wanted,
    and ``level`` belong as well. Let A be the operator on what is orthogonal to basis and aside, r = ``rest``
    what couples the two, and (θ_i, s_i) the Ritz pairs below the floor. By Sylvester's law of inertia there
    are as many more eigenvalues above the level τ as A + Σ_i s_ji²/(τ − θ_i)·rrᵀ has (Schur's complement; the
    squared residuals of the Ritz pairs enter). A Lanczos run from a random start there finds one, or bounds
    them (:func:`outermost`), without products for the space of the basis.
    """
    size, basis = space.basis.shape[1], len(space.basis)
    most = max(MIN_SECOND, int(SECOND_SHARE * space.products))
    room = min(budget, max(MIN_SECOND // 2, basis // 2), most, size - len(aside) - basis)
    values, s = small_eigh(sign * space.t)
    under = values < floor
    weight = float((s[-1, under] ** 2 / (level - values[under])).sum())

    def outside(w: Tensor) -> Tensor:
        for known in (aside, space.basis) if len(aside) else (space.basis,):
            w = w - known.T @ (known @ w)
        return w

    generator = torch.Generator().manual_seed(size + len(aside))
    start = outside(torch.randn(size, dtype=torch.float64, generator=generator).to(space.rest))
    start = outside(start / start.norm())
    mixed = start + space.rest / space.rest.norm()
    vectors = torch.zeros(room + 1, size, dtype=start.dtype, device=start.device)
    vectors[0] = mixed / mixed.norm()
    t, bound = np.zeros((room, room)), math.inf
    for j in range(room):
        w = sign * (yield vectors[j])
        w = outside(torch.add(w, space.rest, alpha=weight * float(space.rest @ vectors[j])))
        w, beta = orthogonalise(w, vectors, t, j)
        w = outside(w)
        ritz, turn = small_eigh(t[: j + 1, : j + 1])
        if not np.isfinite(beta):
            break
        bound = max(level, outermost(t[: j + 1, : j + 1], beta, size))
        if ritz[-1] > level:
            again = torch.from_numpy(turn[:, -1].copy()).to(start) @ vectors[: j + 1]
            return SecondStart(bound, j + 1, start + again)
        if bound <= level:
            break
        vectors[j + 1] = w / beta
    return SecondStart(bound, j + 1 if room else 0, None)

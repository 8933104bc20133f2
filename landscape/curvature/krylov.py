"""Krylov spaces of a symmetric operator, and what with high probability lies outside of them.

Generators that yield the vectors whose products they need, and are sent these products
(:func:`landscape.curvature.lanczos.search`).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array

# Basis vectors kept before a restart, unless P or the memory below says fewer. MNIST's MLP needs 40 to 90.
MAX_BASIS = 128
BASIS_BYTES = 2**30
# In its first LEAST products (ARPACK's basis) a search must have stood for PERSIST of them: from a random
# start with little of λ_max's vector in it, 5 of 60 searches on MNIST's MLPs settled on the second largest
# eigenvalue for 2 to 4 products, before their twelfth.
PERSIST, LEAST = 5, 20
# An end smaller than this share of the spectral radius is zero to any eye, and may be zero exactly (ours).
NEAR_ZERO = 1e-3
# The probability with which a bound on unseen eigenvalues may fail (ours; that of the usual error bars).
RISK = 0.01
# Products of a second start, at most: as a share of the search's own, and at least so many. The top 5 of an
# MNIST MLP take 3 after 19, the top 20 take 16 after 43.
SHARE, FEWEST = 0.5, 10


def orthogonalise(w: Tensor, vectors: Tensor, t: Array, j: int) -> tuple[Tensor, float]:
    """What the product ``w`` of an operator with vectors[j] has outside of the basis, and its norm β.

    The basis is the orthonormal rows ``vectors[: j + 1]``; w/β is to be the next. Row and column j of ``t``,
    the operator in that basis, are filled in.
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

    By PyTorch: the threads of NumPy's library, spinning on for a while, slow the products that come next.
    """
    if not np.isfinite(t).all():  # LAPACK fails on these
        return np.full(len(t), np.nan), np.full(t.shape, np.nan)
    values, s = torch.linalg.eigh(torch.from_numpy(t))
    return values.numpy(), s.numpy()


def negligible(beta: float, radius: float, dtype: torch.dtype) -> bool:
    """Whether a Lanczos step left nothing but rounding: the basis then spans an invariant subspace.

    100 times the precision is more than rounding makes in small matrices, and far below any tolerance (ours).
    """
    return beta <= 100 * torch.finfo(dtype).eps * max(radius, float(np.finfo(float).tiny))


def ends(values: Array, low: int, high: int) -> Array:
    """Indices of the ``low`` smallest and ``high`` largest of ``values``, by descending value."""
    order = np.argsort(values)[::-1]
    rank = np.arange(len(order))
    chosen: Array = order[(rank < high) | (rank >= len(order) - low)]
    return chosen.copy()


class Run(NamedTuple):
    """What one Krylov space gave.

    The operator maps the orthonormal ``basis`` (j, P) to itself by ``t`` (j, j), and its last vector to
    ``rest`` (P,), orthogonal to it, besides. ``restarted``: the basis is not all that there was.
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
    start: Tensor, aside: Tensor, radius: float, low: int, high: int, tol: float, budget: int
) -> Generator[Tensor, Tensor, Run]:
    """One Krylov space orthogonal to ``aside`` (m, P), restarted thickly (Wu and Simon 2000) when it is full.

    Returns the wanted Ritz pairs; all of them where the space turned out invariant. ``radius`` is the largest
    magnitude seen before, by which rounding is judged.
    """

    def outside(w: Tensor) -> Tensor:
        return w - aside.T @ (aside @ w)

    size = len(start)
    left = size - len(aside)
    room = max(4 * (low + high), min(MAX_BASIS, BASIS_BYTES // (size * start.itemsize)))
    vectors = torch.zeros(min(room, left) + 1, size, dtype=start.dtype, device=start.device)
    start = outside(outside(start))
    vectors[0] = start / start.norm()
    t = np.zeros((len(vectors), len(vectors)))
    j, products, since, restarted = 0, 0, 0, False
    held: Array | None = None  # the wanted values since they met the tolerance
    while True:
        w = yield vectors[j]
        w, beta = orthogonalise(outside(w) if len(aside) else w, vectors, t, j)
        if len(aside):  # once more, now that w is small: what rounding left of them would be scaled up
            w = outside(w)
            beta = float(w.norm())
        products += 1
        values, s = small_eigh(t[: j + 1, : j + 1])
        radius = max(radius, float(np.abs(values).max()))
        finite = bool(np.isfinite(beta))
        invariant = finite and (negligible(beta, radius, start.dtype) or j + 1 == left)
        chosen = np.arange(j + 1) if invariant else ends(values, low, high)
        bound = tol * np.maximum(np.abs(values[chosen]), NEAR_ZERO * radius)
        # A small matrix is gone through whole, which costs little and sees every copy of an eigenvalue.
        enough = j + 1 >= min(low + high, left) and not (max(low, high) > 1 and left <= room)
        converged = invariant or (enough and bool(np.all(beta * np.abs(s[-1, chosen]) <= bound)))
        if invariant or not converged:
            held = None
        elif held is None or np.any(np.abs(values[chosen] - held) > bound):
            held, since = values[chosen], products
        stood = converged and (products - since >= PERSIST or products >= LEAST)
        if invariant or stood or products >= budget or not finite:
            break
        if j + 1 == len(vectors) - 1:
            share = max(
                1, (j + 1) // (4 if low and high else 2)
            )  # half the basis, split where both ends count
            kept = ends(values, share if low else 0, share if high else 0)
            vectors[: len(kept)] = torch.from_numpy(s[:, kept]).to(start).T @ vectors[: j + 1]
            t[:], restarted = 0, True
            t[range(len(kept)), range(len(kept))] = values[kept]
            j = len(kept) - 1  # the next product fills in the arrow of couplings by itself
        vectors[j + 1] = w / beta
        j += 1
    ritz = torch.from_numpy(s[:, chosen]).to(start).T @ vectors[: j + 1]
    k = j + 1
    basis, within = vectors[:k], t[:k, :k]
    return Run(values[chosen], ritz, products, converged, invariant, radius, basis, within, w, restarted)


def outermost(t: Array, beta: float, size: int) -> float:
    """What λ_max of a symmetric operator on R^``size`` is at most, but for a probability of RISK.

    ``t`` (j, j) is tridiagonal, of j Lanczos steps from a random start b of norm 1, and ``beta`` the norm of
    what the last left. A unit eigenvector x to λ > θ_j has |xᵀb| ≤ Πβ_i / Π(λ − θ_i), θ the Ritz values, and
    a random b less of x than c/√size only with probability c·√(2/π) (van Dorsselaer, Hochstenbach and van der
    Vorst 2000, section 3). Where not more than half of b is not random, it has half of that (Anderson 1955).
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


class Unseen(NamedTuple):
    """What a second start saw: ``bound``, but for a probability of RISK that of all that was not found; the
    products it took; and where to go on from, if an eigenvalue beyond the level was missed."""

    bound: float
    products: int
    start: Tensor | None


def second_start(
    run: Run, aside: Tensor, floor: float, level: float, sign: float, budget: int
) -> Generator[Tensor, Tensor, Unseen]:
    """Whether there is an eigenvalue above ``level`` besides those that ``run`` and ``aside`` hold.

    ``sign`` −1: of the negative of the operator, to whose eigenvalues ``floor``, the least that was wanted,
    and ``level`` belong as well. Let A be the operator on what is orthogonal to basis and aside, r = ``rest``
    what couples the two, and (θ_i, s_i) the Ritz pairs below the floor. By Sylvester's law of inertia there
    are as many more eigenvalues above the level τ as A + Σ_i s_ji²/(τ − θ_i)·rrᵀ has (Schur's complement; the
    residuals of the found enter squared). A Lanczos run from a random start there sees one, or bounds them
    (:func:`outermost`): what the basis holds is not gone through again.
    """
    size, room = run.basis.shape[1], max(FEWEST // 2, len(run.basis) // 2)
    room = min(budget, room, max(FEWEST, int(SHARE * run.products)), size - len(aside) - len(run.basis))
    values, s = small_eigh(sign * run.t)
    under = values < floor
    weight = float((s[-1, under] ** 2 / (level - values[under])).sum())
    held = torch.cat((aside, run.basis)) if len(aside) else run.basis

    def outside(w: Tensor) -> Tensor:
        return w - held.T @ (held @ w)

    generator = torch.Generator().manual_seed(size + len(aside))
    start = outside(torch.randn(size, dtype=torch.float64, generator=generator).to(run.rest))
    start = outside(start / start.norm())
    mixed = start + run.rest / run.rest.norm()
    vectors = torch.zeros(room + 1, size, dtype=start.dtype, device=start.device)
    vectors[0] = mixed / mixed.norm()
    t, bound = np.zeros((room, room)), math.inf
    for j in range(room):
        w = sign * (yield vectors[j])
        w = outside(torch.add(w, run.rest, alpha=weight * float(run.rest @ vectors[j])))
        w, beta = orthogonalise(w, vectors, t, j)
        w = outside(w)
        largest = small_eigh(t[: j + 1, : j + 1])[0][-1]
        if not np.isfinite(beta):
            break
        bound = max(level, outermost(t[: j + 1, : j + 1], beta, size))
        if largest > level:
            return Unseen(bound, j + 1, start + _outer(t[: j + 1, : j + 1]) @ vectors[: j + 1])
        if bound <= level:
            break
        vectors[j + 1] = w / beta
    return Unseen(bound, j + 1 if room else 0, None)


def _outer(t: Array) -> Tensor:
    """The coefficients of the last Ritz vector."""
    return torch.from_numpy(small_eigh(t)[1][:, -1].copy())

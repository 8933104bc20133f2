"""Ends and top of the Hessian's spectrum from one Lanczos routine, each with its residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from landscape import second_opinion
from landscape.hessian import Part, operator
from landscape.options import InputError, choose, positive
from landscape.problem import Problem
from landscape.store import Array

Product = Callable[[Tensor], Tensor]

# Basis vectors kept before a restart, unless P or the memory below says fewer. MNIST's MLP needs 40 to 90.
MAX_BASIS = 128
BASIS_BYTES = 2**30
# ARPACK and its peers stop at a residual relative to the eigenvalue; 1% is what a heatmap can show (DESIGN).
TOL = 1e-2
MAX_PRODUCTS = 1000
# An end smaller than this share of the spectral radius is zero to any eye, and may be zero exactly (ours).
NEAR_ZERO = 1e-3


@dataclass(frozen=True)
class Ends:
    """The algebraically smallest and the largest eigenvalue, with unit eigenvectors (2, P) in that order.

    ``residual_*`` is ‖Hv − λv‖, from a product of its own, so that rounding is in it: an eigenvalue of H
    lies within that distance of λ. ``converged`` says whether both met the tolerance. ``hvps`` counts the
    Hessian-vector products, the two for the residuals included.
    """

    min: float
    max: float
    residual_min: float
    residual_max: float
    hvps: int
    converged: bool
    vectors: Tensor


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues (k,) in descending order with unit eigenvectors (k, P), or (k, P') for a part of the model.

    ``residuals`` (k,) are ‖Hv − λv‖, each from a product of its own, so that rounding is in it: an eigenvalue
    of H lies within that distance of λ. values and residuals are float64 on the CPU. ``converged`` says
    whether all met the tolerance; ``hvps`` counts the products, the k for the residuals included.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    hvps: int
    converged: bool


def extend(product: Product, vectors: Tensor, t: Array, j: int) -> tuple[Tensor, float]:
    """One Lanczos step with full reorthogonalisation on the orthonormal rows ``vectors[: j + 1]``.

    Fills row and column j of ``t``, the operator in that basis. Returns what product(vectors[j]) has outside
    of the basis, and its norm β; their quotient is to be the next row.
    """
    w = product(vectors[j])
    coefficients = torch.zeros(j + 1, dtype=w.dtype, device=w.device)
    for _ in range(2):  # twice is enough (Kahan and Parlett) for orthogonality to rounding
        c = vectors[: j + 1] @ w
        w = w - vectors[: j + 1].T @ c
        coefficients += c
    t[: j + 1, j] = t[j, : j + 1] = coefficients.double().cpu().numpy()
    return w, float(w.norm())


def negligible(beta: float, radius: float, dtype: torch.dtype) -> bool:
    """Whether a Lanczos step left nothing but rounding: the basis then spans an invariant subspace.

    100 times the precision is more than rounding makes in small matrices, and far below any tolerance (ours).
    """
    return beta <= 100 * torch.finfo(dtype).eps * max(radius, float(np.finfo(float).tiny))


def lanczos(
    product: Product,
    start: Tensor,
    *,
    low: int = 0,
    high: int = 1,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
) -> Eigenpairs:
    """The ``low`` smallest and ``high`` largest eigenvalues (algebraically) of a symmetric operator.

    ``product`` maps vectors like ``start`` (P,) to such; ``start`` must have a component along every
    eigenvector. It stops when each wanted Ritz residual is at most tol·|λ|, or tol·max|λ|/1000 for a λ
    nearer to zero than that. (Power iteration, by contrast, returns the largest *magnitude*.)

    A basis that turns out to span an invariant subspace holds exact eigenpairs; they are set aside and the
    rest is searched from a new vector, until that adds nothing wanted: repeated eigenvalues are found as
    often as they are there. (When the wanted ones converge before the subspace is exhausted, exact copies
    stay unseen, as in any Krylov method with one starting vector. Where several eigenvalues of an end are
    wanted and P is at most the basis, 128, it goes on until it is exhausted.)

    Raises InputError for a tol that is not positive, or more eigenvalues than P.
    """
    positive("tol", tol)
    positive("max_products", max_products, least=1)
    size = len(start)
    if max(low, high) > size:
        raise InputError(
            f"k: {max(low, high)} is not allowed, it must be at most {size}, the number of parameters"
        )
    generator = torch.Generator().manual_seed(size)
    values, vectors = np.zeros(0), start.new_zeros(0, size)
    wanted, products, radius = np.zeros(0), 0, 0.0
    while True:
        run = _lanczos_run(product, start, vectors, radius, low, high, tol, max_products - products)
        values, vectors = np.concatenate((values, run.values)), torch.cat((vectors, run.vectors))
        products += run.products
        radius = run.radius
        before, chosen = wanted, _ends(values, low, high)
        wanted = values[chosen]
        # Where one eigenvalue an end is wanted, no other vector can add one further out.
        single = max(low, high) == 1 and len(wanted) == min(low + high, size)
        enough = single or len(values) == size or not run.invariant
        same = max(tol * NEAR_ZERO, 100 * torch.finfo(start.dtype).eps) * radius
        settled = len(before) == len(wanted) and bool(np.all(np.abs(before - wanted) <= same))
        if enough or settled or products >= max_products:
            break
        start = torch.randn(size, dtype=torch.float64, generator=generator).to(start)
    pairs = vectors[torch.from_numpy(chosen).to(start.device)]
    pairs = pairs / pairs.norm(dim=1, keepdim=True)
    residuals = [float((product(v) - x * v).norm()) for v, x in zip(pairs, wanted.tolist(), strict=True)]
    return Eigenpairs(
        values=torch.from_numpy(wanted),
        vectors=pairs,
        residuals=torch.tensor(residuals, dtype=torch.float64),
        hvps=products + len(pairs),
        converged=(enough or settled) and run.converged,
    )


def _ends(values: Array, low: int, high: int) -> Array:
    """Indices of the ``low`` smallest and ``high`` largest of ``values``, by descending value."""
    order = np.argsort(values)[::-1]
    rank = np.arange(len(order))
    chosen: Array = order[(rank < high) | (rank >= len(order) - low)]
    return chosen.copy()


class _Run(NamedTuple):
    values: Array
    vectors: Tensor
    products: int
    converged: bool
    invariant: bool
    radius: float


def _lanczos_run(
    product: Product,
    start: Tensor,
    aside: Tensor,
    radius: float,
    low: int,
    high: int,
    tol: float,
    budget: int,
) -> _Run:
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
    j, products = 0, 0
    while True:
        w, beta = extend(lambda v: outside(product(v)), vectors, t, j)
        if len(aside):  # once more, now that w is small: what rounding left of them would be scaled up
            w = outside(w)
            beta = float(w.norm())
        products += 1
        values, s = np.linalg.eigh(t[: j + 1, : j + 1])
        radius = max(radius, float(np.abs(values).max()))
        invariant = negligible(beta, radius, start.dtype) or j + 1 == left
        chosen = np.arange(j + 1) if invariant else _ends(values, low, high)
        bound = tol * np.maximum(np.abs(values[chosen]), NEAR_ZERO * radius)
        # A small matrix is gone through whole, which costs little and sees every copy of an eigenvalue.
        enough = j + 1 >= min(low + high, left) and not (max(low, high) > 1 and left <= room)
        converged = invariant or (enough and bool(np.all(beta * np.abs(s[-1, chosen]) <= bound)))
        if converged or products >= budget:
            break
        if j + 1 == len(vectors) - 1:
            share = max(
                1, (j + 1) // (4 if low and high else 2)
            )  # half the basis, split where both ends count
            kept = _ends(values, share if low else 0, share if high else 0)
            vectors[: len(kept)] = torch.from_numpy(s[:, kept]).to(start).T @ vectors[: j + 1]
            t[:] = 0
            t[range(len(kept)), range(len(kept))] = values[kept]
            j = len(kept) - 1  # the next product fills in the arrow of couplings by itself
        vectors[j + 1] = w / beta
        j += 1
    ritz = torch.from_numpy(s[:, chosen]).to(start).T @ vectors[: j + 1]
    return _Run(values[chosen], ritz, products, converged, invariant, radius)


def start_vector(problem: Problem, seed: int, size: int | None = None) -> Tensor:
    """A normal vector (size,), by default (P,), from ``seed``: the same draw on every device.

    Lanczos needs one with components along all eigenvectors. InputError for a seed below 0.
    """
    if seed < 0:
        raise InputError(f"seed: {seed} is not allowed, it must be an integer ≥ 0")
    generator = torch.Generator().manual_seed(seed)
    length = problem.layout.size if size is None else size
    return torch.randn(length, dtype=torch.float64, generator=generator).to(problem.theta)


def lanczos_ends(
    product: Product, start: Tensor, *, tol: float = TOL, max_products: int = MAX_PRODUCTS
) -> Ends:
    """Both ends of the spectrum of ``product``; see :func:`lanczos`."""
    found = lanczos(product, start, low=1, high=1, tol=tol, max_products=max_products)
    order = [-1, 0]
    low, high = found.values[order].tolist()
    residual_low, residual_high = found.residuals[order].tolist()
    return Ends(low, high, residual_low, residual_high, found.hvps, found.converged, found.vectors[order])


def extreme_eigenvalues(
    problem: Problem,
    tol: float = TOL,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    max_products: int = MAX_PRODUCTS,
    seed: int = 0,
) -> Ends:
    """λ_min and λ_max of ∇²L(θ) over all of the problem's data, θ (P,) by default the centre.

    ``tol`` bounds each residual relative to its eigenvalue; see :func:`lanczos`. ``kind``, ``part`` and
    ``randomness`` as in :class:`landscape.HessianOperator`. ``seed`` draws the starting vector. Where
    ``max_products`` run out first, ``converged`` is False and the residuals say how far it got.
    """
    h = operator(problem, theta, kind=kind, part=part, randomness=randomness)
    return lanczos_ends(h, start_vector(problem, seed, h.size), tol=tol, max_products=max_products)


def top_eigenvalues(
    problem: Problem,
    k: int = 1,
    tol: float = TOL,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    engine: str = "landscape",
    start: Tensor | None = None,
    max_products: int = MAX_PRODUCTS,
    seed: int = 0,
) -> Eigenpairs:
    """The ``k`` algebraically largest eigenvalues of ∇²L(θ), descending, with vectors and residuals.

    Options as in :func:`extreme_eigenvalues`, and:

    - ``start`` (P,), such as the sum of eigenvectors found nearby, is where the search begins. As much of the
      random vector is added, so that an eigenvector orthogonal to it is not missed.
    - ``engine`` "pyhessian" asks that package instead, for one eigenvalue: that of largest *magnitude*. Its
      residual is still from our product.

    Raises InputError for a k below 1 or above P, a start of another shape, and what pyhessian cannot do.
    """
    positive("k", k, least=1)
    h = operator(problem, theta, kind=kind, part=part, randomness=randomness)
    if choose("engine", engine, second_opinion.ENGINES) == "pyhessian":
        second_opinion.check(kind, part)
        if k != 1:
            raise InputError(f"k: {k} is not allowed with engine 'pyhessian', it must be 1")
        value, v, hvps = second_opinion.largest_magnitude(
            problem, theta, tol=tol, max_products=max_products, seed=seed
        )
        residual = float((h(v) - value * v).norm())
        pair = torch.tensor([[value], [residual]], dtype=torch.float64)
        return Eigenpairs(pair[0], v[None], pair[1], hvps + 1, residual <= tol * abs(value))
    first = start_vector(problem, seed, h.size)
    if start is not None:
        if start.shape != first.shape:
            raise InputError(f"start: shape {tuple(start.shape)}, it must be {tuple(first.shape)}")
        positive("start: norm", float(start.norm()))
        near = start.to(first)
        first = near / near.norm() + first / first.norm()
    return lanczos(h, first, high=k, tol=tol, max_products=max_products)

"""Eigenvalues of symmetric operators by Lanczos, each with its residual, and bounds on the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.core.progress import Progress
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


Product = Callable[[Tensor], Tensor]

# ARPACK and its peers stop at a residual relative to the eigenvalue; 1% is what a heatmap can show (DESIGN).
TOL = 1e-2
MAX_PRODUCTS = 1000
# Corrections of an approximate pair before a new search; MNIST's MLPs took at most 3.
CORRECTIONS = 8


@dataclass(frozen=True)
class SearchOptions:
    """Which eigenvalues: the ``low`` smallest, ``high`` largest, to ``tol``, in at most ``max_products``.

    ``progress`` takes an estimate of the share of the search that is done.
    """

    low: int = 0
    high: int = 1
    tol: float = TOL
    max_products: int = MAX_PRODUCTS
    progress: Progress | None = None


@dataclass(frozen=True)
class Ends:
    """The algebraically smallest and the largest eigenvalue, with unit eigenvectors.

    Attributes:
        min, max: λ_min and λ_max, in nats.
        vectors: (2, P), the eigenvectors in that order.
        residual_min, residual_max: ‖Hv − λv‖, each from another product, so that rounding is included: some
            eigenvalue of H lies within that distance of λ. It does not bound the error of
            λ_min or λ_max; that λ_min is at most ``min`` and λ_max at least ``max`` holds up to rounding.
        hvps: the number of Hessian-vector products, those of the verification included.
        converged: whether both residuals met the tolerance.
        search: the arithmetic of the search, such as "bfloat16, 2,372 of 10,000 samples".
        bounds: all eigenvalues lie between these, each with a probability of 99%.

    Example:
        >>> ends = Ends(0.0, 2.0, 0.0, 0.0, hvps=4, converged=True, vectors=torch.eye(2))
        >>> ends.max
        2.0
    """

    min: float
    max: float
    residual_min: float
    residual_max: float
    hvps: int
    converged: bool
    vectors: Tensor
    search: str = ""
    bounds: tuple[float, float] = (-np.inf, np.inf)


@dataclass(frozen=True)
class Eigenpairs:
    """The largest eigenvalues, with unit eigenvectors.

    After a search with cheaper products, bounds and ``verified`` are those of the cheaper operator; the
    bounds are widened by its error in the last of the eigenvalues wanted.

    Attributes:
        values: (k,), eigenvalues in nats, descending.
        vectors: (k, P), the eigenvectors, or (k, P') for a part of the model.
        residuals: (k,) ‖Hv − λv‖, each from another product, so that rounding is included: some eigenvalue of
            H lies within that distance of λ; whether it is the largest, ``bounds`` say. Values and
            residuals are float64 on the CPU.
        hvps: the number of products, those of the verification included.
        converged: whether all residuals met the tolerance.
        search: the arithmetic of the search (:mod:`landscape.curvature.eigenvalues`).
        bounds: all other eigenvalues lie between these, each with a probability of 99% over the random start
            (infinite where nothing is known).
        verified: no eigenvalue was missed that lies beyond the last of those wanted by more than the
            tolerance, or a thousandth of the largest magnitude.
        checks: the products that the verification of this took.

    Example:
        >>> pairs = Eigenpairs(torch.tensor([2.0]), torch.eye(2)[:1], torch.zeros(1), hvps=3, converged=True)
        >>> pairs.values.tolist()
        [2.0]
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    hvps: int
    converged: bool
    search: str = ""
    bounds: tuple[float, float] = (-np.inf, np.inf)
    verified: bool = False
    checks: int = 0


class SearchResult(NamedTuple):
    """The result of a search, before it is verified.

    Attributes:
        values, vectors: the wanted Ritz pairs, (k,) descending and (k, P) of norm 1 each.
        products, checks: all products, and those of second starts.
        converged, verified, bounds: see :class:`Eigenpairs`.
        radius: the largest magnitude of a Ritz value.
        basis, t: the last basis (j, P), and the operator in it (j, j).
        wanted: what was searched.
    """

    values: Array
    vectors: Tensor
    products: int
    converged: bool
    radius: float
    basis: Tensor
    t: Array
    wanted: SearchOptions
    bounds: tuple[float, float]
    verified: bool
    checks: int


T = TypeVar("T")
Search = Generator[Tensor, Tensor, SearchResult]


def search_eigenpairs(start: Tensor, wanted: SearchOptions) -> Search:
    """The eigenvalues (algebraically the smallest, the largest) that are ``wanted`` of a symmetric operator.

    A generator: it yields the vectors like ``start`` (P,) whose products with the operator it needs, and is
    sent these products, so that many searches can share one pass over the data. ``start`` is a random vector,
    or contains at least as much of one (:func:`.warm_start`).

    The search stops when each wanted Ritz residual is at most tol·|λ|, or tol·max|λ|/1000 for a λ nearer to
    zero than that. (Power iteration, by contrast, returns the largest *magnitude*.)

    A Krylov space from one start has one copy of a repeated eigenvalue, and may have one vector for two close
    ones. Where several eigenvalues of an end are wanted, a second start (:func:`.second_start`) therefore
    tests whether one lies beyond the last by more than the tolerance (tol·|λ|, or max|λ|/1000); while one
    does, the search continues in the orthogonal complement of its Ritz vectors. Where one eigenvalue is
    wanted, the first start bounds it (:func:`.outermost`), which takes no product.

    A basis of an invariant subspace has exact eigenpairs; they are set aside and the rest is searched from a
    new vector, until that adds nothing wanted. Where several eigenvalues of an end are wanted and P is at
    most the basis, 128, the search continues until the basis is complete.

    A product that is NaN or infinite ends the search, not converged, with NaN.

    Raises InputError for a tol that is not positive, or more eigenvalues than P.
    """
    low, high, tol, most = wanted.low, wanted.high, wanted.tol, wanted.max_products
    positive("tol", tol)
    positive("max_products", most, least=1)
    size = len(start)
    if max(low, high) > size:
        raise InputError(f"k: {max(low, high)} is not allowed, it must be at most {size}, all parameters")
    generator = torch.Generator().manual_seed(size)
    values, vectors = np.zeros(0), start.new_zeros(0, size)
    found, products, checks, radius = np.zeros(0), 0, 0, 0.0
    bounds = {1: np.inf, -1: np.inf}  # of the other eigenvalues times 1 and −1
    excess = _Decline(wanted.progress) if wanted.progress else lambda ratio: None
    sides = [(sign, count) for sign, count in ((1, high), (-1, low)) if count]
    good = complete = False
    while True:
        space = yield from krylov(start, vectors, radius, low, high, tol, most - products, excess)
        aside = vectors
        values, vectors = np.concatenate((values, space.values)), torch.cat((vectors, space.vectors))
        products, radius = products + space.products, space.radius
        before, chosen = found, ends(values, low, high)
        found = values[chosen]
        near = max(tol * NEAR_ZERO, 100 * torch.finfo(start.dtype).eps) * radius
        same = len(before) == len(found) and bool(np.all(np.abs(before - found) <= near))
        if not len(aside) and not space.restarted:
            bounds = {sign: outermost(sign * space.t, float(space.rest.norm()), size) for sign in bounds}
        floors = {sign: float(np.sort(sign * found)[-min(count, len(found))]) for sign, count in sides}
        good = space.converged
        if space.invariant:
            # Where one eigenvalue an end is wanted, no other vector can add one further out.
            single = max(low, high) == 1 and len(found) == min(low + high, size)
            complete = good = single or same or len(values) == size
            bounds |= floors if complete else {}
            start = torch.randn(size, dtype=torch.float64, generator=generator).to(start)
        elif good:
            complete = True
            for sign, count in sides:
                if count == 1 and np.isfinite(bounds[sign]):
                    continue
                level = floors[sign] + _slack(floors[sign], tol, radius)
                second = yield from second_start(space, aside, floors[sign], level, sign, most - products)
                products, checks = products + second.products, checks + second.products
                bounds[sign] = second.bound
                if second.start is not None and not same:  # else it cannot be reached: the bound says so
                    complete, start = False, second.start
                    break
        if complete or products >= most or not space.converged:
            break
        del space  # its basis, before the next one
    pairs = vectors[torch.from_numpy(chosen).to(start.device)]
    pairs = pairs / pairs.norm(dim=1, keepdim=True)
    verified = good and all(bounds[sign] <= at + _slack(at, tol, radius) for sign, at in floors.items())
    known = wanted, (-bounds[-1], bounds[1]), verified, checks
    return SearchResult(found, pairs, products, good, radius, space.basis, space.t, *known)


def _slack(value: float, tol: float, radius: float) -> float:
    """How far beyond ``value`` an eigenvalue may lie without counting as missed."""
    return max(tol * abs(value), NEAR_ZERO * radius)


class _Decline:
    """The share of a search that is done: residuals fall about geometrically, from the largest to 1.

    It takes the residual relative to what the tolerance allows, and never goes back.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._largest, self._share = progress, math.e, 0.0

    def __call__(self, ratio: float) -> None:
        self._largest = max(self._largest, ratio)
        share = 1 - math.log(max(ratio, 1.0)) / math.log(self._largest)
        self._share = max(self._share, share)
        self._progress(self._share)


def run_in_lockstep(
    searches: list[Generator[Tensor, Tensor, T]],
    products: Callable[[Tensor, list[int]], Tensor],
    done: Callable[[], None] = lambda: None,
) -> list[T]:
    """The results of ``searches``, whose products are computed together.

    ``products`` maps one vector for each search that still runs, (k, P), and the numbers of these searches,
    to the products (k, P). ``done`` is called as each search ends.
    """
    results: dict[int, T] = {}
    running = list(range(len(searches)))
    vectors = [next(one) for one in searches]
    while running:
        images = products(torch.stack(vectors), running)
        still, vectors = [], []
        for number, image in zip(running, images, strict=True):
            try:
                vectors.append(searches[number].send(image))
                still.append(number)
            except StopIteration as end:
                results[number] = end.value
                done()
        running = still
    return [results[number] for number in range(len(searches))]


def verify_and_refine(result: SearchResult, products: Callable[[Tensor], Tensor], tol: float) -> Eigenpairs:
    """The pairs of a search, verified and refined with ``products`` (k, P) -> (k, P) of the exact operator.

    The values are those of the exact operator in the span of the vectors (Rayleigh–Ritz). Where a residual r
    misses the tolerance because the search's operator was an approximation, the span is widened by (A − λ)⁻¹r
    (Davidson 1975), A being the search's operator in its last basis and zero outside. Two or three of these
    usually suffice. ``converged`` says whether the search converged and each residual meets the tolerance, up
    to rounding.
    """
    vectors, images = result.vectors, products(result.vectors)
    rounding = torch.finfo(vectors.dtype).eps * result.radius
    for step in range(CORRECTIONS + 1):
        t = (vectors @ images.T).double().cpu().numpy()
        values, turn = small_eigh((t + t.T) / 2)
        chosen = ends(values, result.wanted.low, result.wanted.high)
        at, rows = values[chosen], torch.from_numpy(turn[:, chosen].T.copy()).to(vectors)
        pairs = rows @ vectors
        gaps = rows @ images - torch.from_numpy(at).to(vectors)[:, None] * pairs
        residuals = gaps.norm(dim=1).double().cpu()
        met = residuals.numpy() <= tol * np.maximum(np.abs(at), NEAR_ZERO * result.radius) + rounding
        if met.all() or not result.converged or step == CORRECTIONS:
            break
        missed = np.flatnonzero(~met)
        new = torch.stack([_davidson(result, gaps[i], at[i], float(residuals[i])) for i in missed])
        for _ in range(2):
            new = new - new @ vectors.T @ vectors
        new = torch.linalg.qr(new.T).Q.T
        vectors, images = torch.cat((vectors, new)), torch.cat((images, products(new)))
    good = result.converged and bool(met.all())
    off = np.abs(at - result.values)
    below, above = result.bounds
    low, high = result.wanted.low or 1, result.wanted.high or 1
    bounds = below - float(off[-low]), above + float(off[high - 1])
    verified = good and result.verified
    return Eigenpairs(
        torch.from_numpy(at), pairs, residuals, result.products + len(vectors), good, "", bounds, verified,
        result.checks,
    )  # fmt: skip


def _davidson(result: SearchResult, gap: Tensor, at: float, residual: float) -> Tensor:
    """(A − λ)⁻¹r with A the operator of the search in its last basis, zero outside of it."""
    values, turn = small_eigh(result.t)
    away = values - at
    away = np.where(np.abs(away) < residual, residual, away)  # smaller differences are not resolved
    inside = result.basis @ gap
    weights = torch.from_numpy(turn @ np.diag(1 / away) @ turn.T).to(gap) @ inside
    outside = gap - result.basis.T @ inside
    return result.basis.T @ weights - outside / (at if abs(at) > residual else residual)


def lanczos(product: Product, start: Tensor, **wanted: Any) -> Eigenpairs:
    """:func:`search_eigenpairs` for one operator, ``product`` (P,) -> (P,), with exact residuals.

    ``wanted``: the fields of :class:`SearchOptions`.
    """
    options = SearchOptions(**wanted)
    result = run_in_lockstep([search_eigenpairs(start, options)], lambda v, _: product(v[0])[None])[0]
    return verify_and_refine(result, lambda v: torch.stack([product(row) for row in v]), options.tol)


def ends_of(pairs: Eigenpairs) -> Ends:
    """The smallest and the largest of ``pairs``."""
    order = [-1, 0]
    (low, high), (off_low, off_high) = pairs.values[order].tolist(), pairs.residuals[order].tolist()
    found = pairs.hvps, pairs.converged, pairs.vectors[order], pairs.search, pairs.bounds
    return Ends(low, high, off_low, off_high, *found)

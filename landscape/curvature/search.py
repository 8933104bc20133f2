"""The search for the outermost eigenvalues of symmetric operators, with residuals and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.progress import Progress, no_progress
from landscape.curvature import operators
from landscape.curvature.operators import ALONE, KrylovSpace, Ranks, SymmetricOperator
from landscape.evaluation.needs import MAX_BASIS
from landscape.problem.sharded import on_ranks

# Products of a second start, at most: as a share of the search's own, and the smallest number. The top 5 of
# an MNIST MLP take 3 after 19, the top 20 take 16 after 43.
SECOND_SHARE, MIN_SECOND = 0.5, 10


def ranks_of(problem: Any) -> Ranks:
    """The processes that hold the vectors of a problem or an operator."""
    return getattr(problem.hessian() if on_ranks(problem) else problem, "ranks", ALONE)


def start_vector(problem: Any, seed: int, size: int | None = None) -> Tensor:
    """A normal vector (size,), by default (P,), from ``seed``: the same draw on every device.

    Of a model in half precision it is float32, in which a basis can be orthogonal. Lanczos needs one with
    components along all eigenvectors. InputError for a seed below 0.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = ranks_of(problem)
    if ranks is not ALONE:
        return ranks.normal(torch.empty(0), generator, torch.float64)
    if size is None:
        size = problem.size if isinstance(problem, SymmetricOperator) else problem.layout.size
    normal = torch.randn(size, dtype=torch.float64, generator=generator)
    return normal.to(problem.device, torch.promote_types(problem.dtype, torch.float32))


def warm_start(near: Tensor, first: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """(P,), the start of a search near ``near``, with as much of ``first``, which misses no eigenvector."""
    return near.to(first) / ranks.norm(near) + first / ranks.norm(first)


class SecondStart(NamedTuple):
    """The result of a second start: a ``bound`` on all eigenvalues that the search does not have, which fails
    with a probability of RISK; its products; and a start for the next search, if one was missed."""

    bound: float
    products: int
    start: Tensor | None


def second_start(
    space: KrylovSpace, locked: Tensor, floor: float, level: float, sign: float, budget: int, ranks: Ranks
) -> Generator[Tensor, Tensor, SecondStart]:
    """Look for an eigenvalue above ``level`` besides those of ``space`` and ``locked``.

    ``sign`` −1: of the negative of the operator, to whose eigenvalues ``floor``, the least that was wanted,
    and ``level`` belong as well. Let A be the operator on what is orthogonal to the basis and to the
    locked vectors, r = ``rest`` what couples the two, and (θ_i, s_i) the Ritz pairs below the floor. By
    Sylvester's law of inertia there are as many more eigenvalues above the level τ as A + Σ_i s_ji²/(τ −
    θ_i)·rrᵀ has (Schur's complement; the squared residuals of the Ritz pairs enter). A Lanczos run from a
    random start there finds one, or bounds them (:func:`outermost`), without products for the
    space of the basis.
    """
    size, basis = ranks.size(space.rest), len(space.basis)
    most = max(MIN_SECOND, int(SECOND_SHARE * space.products))
    steps = min(budget, max(MIN_SECOND // 2, basis // 2), most, size - len(locked) - basis)
    values, s = operators.small_eigh(sign * space.t)
    under = values < floor
    weight = float((s[-1, under] ** 2 / (level - values[under])).sum())

    def outside(w: Tensor) -> Tensor:
        for block in (locked, space.basis) if len(locked) else (space.basis,):
            w = w - block.T @ ranks.inner(block, w).to(w)
        return w

    generator = torch.Generator().manual_seed(size + len(locked))
    start = outside(ranks.normal(space.rest, generator, torch.float64))
    start = outside(start / ranks.norm(start))
    mixed = start + space.rest / ranks.norm(space.rest)
    vectors = torch.zeros(steps + 1, len(start), dtype=start.dtype, device=start.device)
    vectors[0] = mixed / ranks.norm(mixed)
    t, bound = np.zeros((steps, steps)), math.inf
    for j in range(steps):
        w = sign * (yield vectors[j])
        w = outside(torch.add(w, space.rest, alpha=weight * float(ranks.inner(space.rest, vectors[j]))))
        w, beta = operators.orthogonalize(w, vectors, t, j, ranks)
        w = outside(w)
        ritz, turn = operators.small_eigh(t[: j + 1, : j + 1])
        if not np.isfinite(beta):
            break
        bound = max(level, operators.outermost(t[: j + 1, : j + 1], beta, size))
        if ritz[-1] > level:
            again = torch.from_numpy(turn[:, -1].copy()).to(start) @ vectors[: j + 1]
            return SecondStart(bound, j + 1, start + again)
        if bound <= level:
            break
        vectors[j + 1] = w / beta
    return SecondStart(bound, j + 1 if steps else 0, None)


Product = Callable[[Tensor], Tensor]

# ARPACK and its peers stop at a residual relative to the eigenvalue; 1% is what a heatmap can show (our
# choice).
RESIDUAL_TOL = 1e-2
MAX_PRODUCTS = 1000
# Corrections of an approximate pair before a new search; MNIST's MLPs took at most 3.
CORRECTIONS = 8


@dataclass(frozen=True)
class SearchOptions:
    """A search for the ``low`` smallest and ``high`` largest eigenvalues, to ``residual_tol``.

    ``progress`` takes an estimate of the share of the search that is done; ``ranks`` hold the vectors.
    """

    low: int = 0
    high: int = 1
    residual_tol: float = RESIDUAL_TOL
    max_products: int = MAX_PRODUCTS
    progress: Progress | None = None
    ranks: Ranks = ALONE


# Products of a search for both ends at a tolerance of 0.01, for one eigenvalue and each further one, and
# their growth with each digit of the tolerance: medians over networks on digits and a small transformer.
ENDS, FIRST, FURTHER, DIGIT = 33, 14, 4.6, 0.25


def expected_products(size: int, target: SearchOptions) -> float:
    """Products of a search in ``size`` dimensions, to a factor of 2 for most networks."""
    further = max(target.low, target.high) - 1
    first, whole = (ENDS if target.low and target.high else FIRST), size + 2.0 + further
    digits = math.log10(RESIDUAL_TOL / target.residual_tol) if target.residual_tol > 0 else 0.0
    products = (first + FURTHER * further) * (1 + DIGIT) ** digits
    complete = further and size <= MAX_BASIS  # the basis of a small matrix
    return min(float(target.max_products), whole if complete else min(products, whole))


@dataclass(frozen=True)
class RitzPairs:
    """The eigenvalues that a search found, verified, with unit eigenvectors on the device of the search.

    Attributes:
        values, residuals: (k,), as those of :class:`landscape.Eigenpairs`; float64 on the CPU.
        vectors: (k, P), the eigenvectors, or (k, P') for a part of the model.
        products: the number of products, those of the verification included.
        converged, search, bounds, complete, derivatives, product_error: as in :class:`landscape.Eigenpairs`.
        checks: the products of second starts.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    converged: bool
    search: str = ""
    bounds: tuple[float, float] = (-np.inf, np.inf)
    complete: bool = False
    checks: int = 0
    derivatives: str = "exact"
    product_error: float = 0.0


class SearchResult(NamedTuple):
    """The result of a search, before it is verified.

    Attributes:
        values, vectors: the wanted Ritz pairs, (k,) descending and (k, P) of norm 1 each.
        products, checks: all products, and those of second starts.
        converged, complete, bounds: see :class:`RitzPairs`.
        radius: the largest magnitude of a Ritz value.
        basis, t: the last basis (j, P), and the operator in it (j, j).
        target: the options of the search.
    """

    values: Array
    vectors: Tensor
    products: int
    converged: bool
    radius: float
    basis: Tensor
    t: Array
    target: SearchOptions
    bounds: tuple[float, float]
    complete: bool
    checks: int


T = TypeVar("T")
Search = Generator[Tensor, Tensor, SearchResult]


def search_eigenpairs(start: Tensor, target: SearchOptions) -> Search:
    """The smallest and the largest eigenvalues of a symmetric operator, as many of each as ``target`` says.

    A generator: it yields the vectors like ``start`` (P,) whose products with the operator it needs, and is
    sent these products, so that many searches can share one pass over the data. ``start`` is a random vector,
    or contains at least as much of one (:func:`.warm_start`).

    The search stops when each wanted Ritz residual is at most tol·|λ|, tol the ``residual_tol``, or
    tol·max|λ|/1000 for a λ nearer to zero. (Power iteration, by contrast, returns the largest *magnitude*.)

    A Krylov space from one start has one copy of a repeated eigenvalue, and may have one vector for two close
    ones. Where several eigenvalues of an end are wanted, a second start (:func:`.second_start`) therefore
    tests whether one lies beyond the last by more than the tolerance (tol·|λ|, or max|λ|/1000); while one
    does, the search continues in the orthogonal complement of its Ritz vectors. Where one eigenvalue is
    wanted, the first start bounds it (:func:`.outermost`), which takes no product.

    A basis of an invariant subspace has exact eigenpairs; they are locked and the rest is searched from a
    new vector, until that adds nothing wanted. Where several eigenvalues of an end are wanted and P is at
    most the basis, 128, the search continues until the basis is complete.

    A product that is NaN or infinite ends the search, not converged, with NaN.

    Raises InputError for a residual_tol that is not positive, or more eigenvalues than P.
    """
    low, high, residual_tol, most = target.low, target.high, target.residual_tol, target.max_products
    ranks = target.ranks
    size = ranks.size(start)
    if max(low, high) > size:
        raise InputError(f"k: {max(low, high)} is not allowed, it must be at most {size}, all parameters")
    generator = torch.Generator().manual_seed(size)
    values, vectors = np.zeros(0), start.new_zeros(0, len(start))
    ends, products, checks, radius = np.zeros(0), 0, 0, 0.0
    bounds = {1: np.inf, -1: np.inf}  # of the other eigenvalues times 1 and −1
    report_ratio = _Decline(size, target) if target.progress else lambda ratio: None
    sides = [(sign, count) for sign, count in ((1, high), (-1, low)) if count]
    good = finished = False
    while True:
        counts = low, high, residual_tol, most - products, ranks
        space = yield from operators.krylov(start, vectors, radius, *counts, report_ratio)
        locked = vectors
        values = np.concatenate((values, space.values))
        vectors = torch.cat((locked, space.vectors)) if len(locked) else space.vectors
        products, radius = products + space.products, space.radius
        before, chosen = ends, operators.outer_indices(values, low, high)
        ends = values[chosen]
        near = max(residual_tol * operators.NEAR_ZERO, 100 * torch.finfo(start.dtype).eps) * radius
        same = len(before) == len(ends) and bool(np.all(np.abs(before - ends) <= near))
        if not len(locked):
            steps, rest = space.first  # those before a restart bound the others, too
            for sign in bounds:
                largest = float((sign * values).max())
                bounds[sign] = max(operators.outermost(sign * steps, rest, size), largest)
        floors = {sign: float(np.sort(sign * ends)[-min(count, len(ends))]) for sign, count in sides}
        good = space.converged
        if space.invariant:
            # Where one eigenvalue an end is wanted, no other vector can add one further out.
            single = max(low, high) == 1 and len(ends) == min(low + high, size)
            finished = good = single or same or len(values) == size
            bounds |= floors if finished else {}
            start = ranks.normal(start, generator, torch.float64)
        elif good:
            finished = True
            for sign, count in sides:
                if count == 1 and np.isfinite(bounds[sign]):
                    continue
                level = floors[sign] + _slack(floors[sign], residual_tol, radius)
                beyond = floors[sign], level, sign, most - products, ranks
                second = yield from second_start(space, locked, *beyond)
                products, checks = products + second.products, checks + second.products
                bounds[sign] = second.bound
                if second.start is not None and not same:  # else it cannot be reached: the bound says so
                    finished, start = False, second.start
                    break
        if finished or products >= most or not space.converged:
            break
        del space  # its basis, before the next one
    pairs = vectors[torch.from_numpy(chosen).to(start.device)]  # a copy
    pairs /= ranks.norm(pairs).to(pairs)[:, None]  # of two precisions, all would be converted
    levels = {sign: at + _slack(at, residual_tol, radius) for sign, at in floors.items()}
    complete = good and all(bounds[sign] <= level for sign, level in levels.items())
    remaining = target, (-bounds[-1], bounds[1]), complete, checks
    return SearchResult(ends, pairs, products, good, radius, space.basis, space.t, *remaining)


def _slack(value: float, residual_tol: float, radius: float) -> float:
    """The distance beyond ``value`` at which an eigenvalue may lie without counting as missed."""
    return max(residual_tol * abs(value), operators.NEAR_ZERO * radius)


class _Decline:
    """The share of a search that is done, an estimate that never goes back.

    At first it is that of the products expected. Later, as these are right to a factor of 2 only, it is the
    decline of the residuals, which fall about geometrically, but slowly at first. It takes the residual
    relative to what the tolerance allows.
    """

    def __init__(self, size: int, target: SearchOptions) -> None:
        self._progress, self._expected = target.progress or no_progress, expected_products(size, target)
        self._calls, self._largest, self._share = 0, math.e, 0.0

    def __call__(self, ratio: float) -> None:
        self._calls, self._largest = self._calls + 1, max(self._largest, ratio)
        decline = 1 - math.log(max(ratio, 1.0)) / math.log(self._largest)
        expected = min(self._calls / self._expected, 1.0)
        # The square: in the first third, forecasts for networks on digits were then right to a factor of 2.1.
        self._share = max(self._share, expected + expected**2 * (decline - expected))
        self._progress(self._share)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """The rows (k, P) as one matrix, which is no copy of a single one: a vector has P numbers."""
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


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
    vectors = [next(search) for search in searches]
    while running:
        images = products(stacked(vectors), running)
        still, vectors = [], []
        for number, image in zip(running, images, strict=True):
            try:
                vectors.append(searches[number].send(image))
                still.append(number)
            except StopIteration as end:
                results[number] = end.value
                done()
        running = still
        del images, image  # before the next ones
    return [results[number] for number in range(len(searches))]


def verify_and_refine(
    result: SearchResult,
    products: Callable[[Tensor], Tensor],
    residual_tol: float,
    errors: Sequence[float] | None = None,
) -> RitzPairs:
    """The pairs of a search, verified and refined with ``products`` (k, P) -> (k, P) of the exact operator.

    ``errors``: a list to which ``products`` adds the largest error of each; with the rounding of the vectors
    it is added to the residuals.

    The values are those of the exact operator in the span of the vectors (Rayleigh–Ritz). Where a residual r
    misses the tolerance because the search's operator was an approximation, the span is widened by (A − λ)⁻¹r
    (Davidson 1975), A being the search's operator in its last basis and zero outside. Two or three of these
    usually suffice. ``converged`` says whether the search converged and each residual meets the tolerance, up
    to rounding.
    """
    # Lists of rows, to which others are added without a copy.
    vectors, images, ranks = [*result.vectors], [*products(result.vectors)], result.target.ranks
    rounding = torch.finfo(result.vectors.dtype).eps * result.radius
    mixing = np.eye(len(vectors))  # of the vectors that had products, by those of now

    def gap(i: int) -> Tensor:
        """The residual vector of the pair ``i`` of those wanted."""
        return torch.sub(images[chosen[i]], vectors[chosen[i]], alpha=at[i])

    for step in range(CORRECTIONS + 1):
        t = ranks.total(operators.gram(vectors, images)).cpu().numpy()
        values, turn = operators.small_eigh((t + t.T) / 2)
        operators.combine(vectors, turn.T)
        operators.combine(images, turn.T)
        mixing = mixing @ turn
        chosen = operators.outer_indices(values, result.target.low, result.target.high)
        at = values[chosen]
        norms = double(torch.stack([ranks.norm(gap(i)) for i in range(len(at))])).cpu()
        doubt = 0 * norms
        if errors and any(errors):  # which may be below the rounding of the vectors
            doubt = torch.from_numpy(np.abs(mixing[:, chosen]).T @ np.array(errors)) + rounding
        allowed = residual_tol * np.maximum(np.abs(at), operators.NEAR_ZERO * result.radius) + rounding
        met, residuals = norms.numpy() <= allowed, norms + doubt
        if met.all() or not result.converged or step == CORRECTIONS:
            break
        missed = np.flatnonzero(~met)
        new = torch.stack([_davidson(result, gap(int(i)), at[i], float(norms[i])) for i in missed])
        for v in 2 * vectors:
            new.addr_(ranks.inner(new, v).to(v), v, alpha=-1)
        new = ranks.orthonormal(new)
        vectors, images = [*vectors, *new], [*images, *products(new)]
        mixing = np.pad(mixing, (0, len(new)))
        mixing[-len(new) :, -len(new) :] = np.eye(len(new))
    good = result.converged and bool((residuals.numpy() <= allowed).all())
    shifts = np.abs(at - result.values)
    below, above = result.bounds
    low, high = result.target.low or 1, result.target.high or 1
    bounds = below - float(shifts[-min(low, len(shifts))]), above + float(shifts[min(high, len(shifts)) - 1])
    complete = good and result.complete
    images.clear()  # before the vectors are copied
    return RitzPairs(
        torch.from_numpy(at), torch.stack([vectors[i] for i in chosen]), residuals,
        result.products + len(vectors), good, "", bounds, complete, result.checks,
        "exact" if errors is None else "differences", float(doubt.max()),
    )  # fmt: skip


def _davidson(result: SearchResult, gap: Tensor, at: float, residual: float) -> Tensor:
    """(A − λ)⁻¹r with A the operator of the search in its last basis, zero outside of it."""
    values, turn = operators.small_eigh(result.t)
    away = values - at
    away = np.where(np.abs(away) < residual, residual, away)  # smaller differences are not resolved
    beyond = -1 / (at if abs(at) > residual else residual)
    inside = result.target.ranks.inner(result.basis, gap).to(gap)
    weights = torch.from_numpy(turn @ np.diag(1 / away - beyond) @ turn.T).to(gap) @ inside
    return torch.addmv(gap, result.basis.T, weights, beta=beyond)


def search_operator(
    h: SymmetricOperator, start: Tensor, target: SearchOptions, done: Callable[[], None] = lambda: None
) -> tuple[RitzPairs, SearchResult]:
    """:func:`search_eigenpairs` for a matrix: the pairs, with measured errors of products, and the search.

    Products that are NaN or infinite end it, with NaN.
    """
    errors: list[float] = []

    def verified(rows: Tensor) -> Tensor:
        images, image_errors = h._measured(rows)
        errors.extend(image_errors)
        return images

    search, measured = search_eigenpairs(start, replace(target, ranks=h.ranks)), h.differences is not None
    result = run_in_lockstep([search], lambda v, _: h._images(v), done)[0]
    h.products += result.products
    pairs = verify_and_refine(result, verified, target.residual_tol, errors if measured else None)
    return replace(pairs, search=h.arithmetic * measured), result


def find_eigenpairs(product: Product, start: Tensor, **options: Any) -> RitzPairs:
    """:func:`search_eigenpairs` for one operator, ``product`` (P,) -> (P,), with exact residuals.

    ``options``: the fields of :class:`SearchOptions`.
    """
    target = SearchOptions(**options)
    result = run_in_lockstep([search_eigenpairs(start, target)], lambda v, _: product(v[0])[None])[0]
    return verify_and_refine(result, lambda v: torch.stack([product(row) for row in v]), target.residual_tol)

"""The search for the outermost eigenvalues of symmetric operators, with residuals and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core.devices import double, generator, normal
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
    """A normal vector (size,), by default (P,), from ``seed``, see :func:`.devices.generator`.

    Of a model in half precision it is float32, in which a basis can be orthogonal. Lanczos needs one with
    components along all eigenvectors. InputError for a seed below 0.
    """
    ranks = ranks_of(problem)
    if ranks is not ALONE:
        return ranks.normal(torch.empty(0), torch.Generator().manual_seed(seed), torch.float64)
    if size is None:
        size = problem.size if isinstance(problem, SymmetricOperator) else problem.layout.size
    draw = normal(size, generator(seed, problem.device, size))
    return draw.to(problem.device, torch.promote_types(problem.dtype, torch.float32))


def warm_start(near: Tensor, first: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """(P,), ``near`` and ``first`` with equal norms, added: the start of a search that begins near ``near``.

    ``first`` is random, so that the sum has a component along each eigenvector.
    """
    return near.to(first) / ranks.norm(near) + first / ranks.norm(first)


class SecondStart(NamedTuple):
    """The result of a second start.

    ``bound``: an upper bound on sign·λ of all eigenvalues that the search does not have; it fails with a
    probability of RISK. ``products``: the number of products. ``start``: a start from which the search finds
    the missed eigenvalue; None if none was found.
    """

    bound: float
    products: int
    start: Tensor | None


def second_start(
    space: KrylovSpace, locked: Tensor, floor: float, level: float, sign: float, budget: int, ranks: Ranks
) -> Generator[Tensor, Tensor, SecondStart]:
    """Look for an eigenvalue that the search has missed, at one end of the spectrum.

    This generator yields vectors (P,), and receives the operator's products with them.

    Let H be the operator times ``sign``, so that its largest eigenvalues are wanted. The complement consists
    of the vectors orthogonal to ``locked`` and to the basis of ``space``. Let A be H restricted to the
    complement. The product of H with the last vector of the basis has the component sign·r in the complement,
    with r = ``space.rest``. In the basis, H is the matrix T = sign·``space.t``. Let θ_i be the eigenvalues of
    T below ``floor``, s_i the last component of the eigenvector of θ_i, and τ = ``level``. The other
    eigenvalues of T have converged, with residuals |s_i|·‖r‖ within the tolerance, and are left out of the
    following sum. By Sylvester's law of inertia, A + Σ_i s_i²/(τ − θ_i)·rrᵀ (a Schur complement) has as many
    eigenvalues above τ as the search has missed. Lanczos steps from a random start in the complement find one
    of these eigenvalues, or bound them (:func:`.upper_bound`).

    Args:
        space: the last Krylov space of the search.
        locked: (m, P), the eigenvectors of earlier spaces.
        floor: the smallest sign·λ of the found eigenvalues λ that are wanted at this end.
        level: at least ``floor``. An eigenvalue λ that was not found is missed if sign·λ is above ``level``.
        sign: 1 for the largest eigenvalues; −1 for the smallest.
        budget: the most products.
        ranks: the processes that hold the vectors.
    """
    size, basis_size = ranks.size(space.rest), len(space.t)
    share_of_search = max(MIN_SECOND, int(SECOND_SHARE * space.products))
    complement_size = size - len(locked) - basis_size
    # A second start may have half as many vectors as the basis of the search, and at least MIN_SECOND // 2
    # (our choice, which bounds the memory).
    steps = min(budget, max(MIN_SECOND // 2, basis_size // 2), share_of_search, complement_size)
    ritz_values, s = operators.small_eigh(sign * space.t)
    below = ritz_values < floor
    rest_weight = float((s[-1, below] ** 2 / (level - ritz_values[below])).sum())
    blocks = [locked, *space.basis] if len(locked) else space.basis

    def projected(w: Tensor) -> Tensor:
        """Return the component of ``w`` (P,) in the complement."""
        for block in blocks:
            w = w - block.T @ ranks.inner(block, w).to(w)
        return w

    # The seed is made of dimensions, so that a repeated search gives the same result.
    generator = ranks.generator(size + len(locked), space.rest)
    random_start = projected(ranks.normal(space.rest, generator, torch.float64))
    # The second projection removes rounding errors.
    random_start = projected(random_start / ranks.norm(random_start))
    # Half of the start is r, the only direction in which the second term of the Schur complement acts.
    start = random_start + space.rest / ranks.norm(space.rest)
    vectors = torch.zeros(steps + 1, len(random_start), dtype=random_start.dtype, device=random_start.device)
    vectors[0] = start / ranks.norm(start)
    t = np.zeros((steps, steps))
    bound = math.inf
    for j in range(steps):
        w = sign * (yield vectors[j])
        coupling = float(ranks.inner(space.rest, vectors[j]))
        w = projected(torch.add(w, space.rest, alpha=rest_weight * coupling))
        w, column = operators.orthogonalize(w, [vectors[: j + 1]], ranks)
        ((_, beta),) = operators.read_columns(t, [column], j)  # into t; β is the norm of w
        w = projected(w)
        values, rotation = operators.small_eigh(t[: j + 1, : j + 1])
        if not np.isfinite(beta):
            break
        bound = max(level, operators.upper_bound(t[: j + 1, : j + 1], beta, size))
        if values[-1] > level:  # an eigenvalue was missed
            ritz_vector = torch.from_numpy(rotation[:, -1].copy()).to(random_start) @ vectors[: j + 1]
            # The random start gives the next search a component along each eigenvector of the complement.
            return SecondStart(bound, j + 1, random_start + ritz_vector)
        if bound <= level:  # no eigenvalue was missed
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
    first_products, all_products = (ENDS if target.low and target.high else FIRST), size + 2.0 + further
    digits = math.log10(RESIDUAL_TOL / target.residual_tol) if target.residual_tol > 0 else 0.0
    products = (first_products + FURTHER * further) * (1 + DIGIT) ** digits
    complete = further and size <= MAX_BASIS  # the basis of a small matrix
    return min(float(target.max_products), all_products if complete else min(products, all_products))


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
        basis, t: the last basis, j rows (P,) in blocks, and the operator in it (j, j).
        target: the options of the search.
    """

    values: Array
    vectors: Tensor
    products: int
    converged: bool
    radius: float
    basis: list[Tensor]
    t: Array
    target: SearchOptions
    bounds: tuple[float, float]
    complete: bool
    checks: int


T = TypeVar("T")
Search = Generator[Tensor, Tensor, SearchResult]


def search_eigenpairs(start: Tensor, target: SearchOptions) -> Search:
    """Find the smallest and the largest eigenvalues of a symmetric operator, as a generator.

    The generator yields vectors (P,), receives the operator's products with them, and returns the result. In
    this way, many searches can share one pass over the data. ``start`` (P,) is a random vector, or the sum of
    a given vector and a random one of equal norm (:func:`.warm_start`). ``target`` has the numbers of wanted
    eigenvalues at both ends, and ``residual_tol``.

    The search builds one or several Krylov spaces (:func:`.krylov`). In each space, the residual of each
    wanted Ritz pair must fall to ``residual_tol``·max(|λ|, |λ|_max/1000), where |λ|_max is the largest |λ|.

    A Krylov space has only one copy of a repeated eigenvalue, and may have one vector for two close
    eigenvalues. If several eigenvalues are wanted at one end of the spectrum, :func:`second_start` therefore
    looks for a missed eigenvalue. If it finds one, another Krylov space is built in the orthogonal complement
    of the Ritz vectors.

    The eigenpairs of an invariant space are exact. Further spaces are then built from random vectors in the
    complement, until the wanted eigenvalues stay unchanged.

    A product that is NaN or infinite ends the search; the result then has NaN, and is not converged.

    Raises InputError if more eigenvalues are wanted than the operator has.
    """
    low, high, residual_tol = target.low, target.high, target.residual_tol
    ranks = target.ranks  # the processes that hold the vectors
    size = ranks.size(start)
    if max(low, high) > size:
        raise InputError(f"k: {max(low, high)} is not allowed, there are only {size} parameters")
    generator = ranks.generator(size, start)
    values, vectors = np.zeros(0), start.new_zeros(0, len(start))  # the Ritz pairs of all spaces
    wanted = np.zeros(0)  # the wanted eigenvalues among ``values``
    products = check_products = 0
    radius = 0.0  # |λ|_max of the Ritz values so far
    # sign (1 for the largest eigenvalues, −1 for the smallest) -> upper bound on sign·λ of the eigenvalues λ
    # that are not in ``values``.
    bounds = {1: np.inf, -1: np.inf}
    report_ratio = _SearchProgress(size, target) if target.progress else lambda ratio: None
    # (sign, number of wanted eigenvalues) for each end of the spectrum that has wanted eigenvalues.
    ends = [(sign, count) for sign, count in ((1, high), (-1, low)) if count]
    converged = finished = False
    while True:
        budget = target.max_products - products
        space = yield from operators.krylov(
            start, vectors, radius, low, high, residual_tol, budget, ranks, report_ratio
        )
        locked = vectors
        values = np.concatenate((values, space.values))
        vectors = torch.cat((locked, space.vectors)) if len(locked) else space.vectors
        products += space.products
        radius = space.radius
        chosen = operators.outer_indices(values, low, high)
        previous, wanted = wanted, values[chosen]
        rounding = 100 * torch.finfo(start.dtype).eps  # as in negligible()
        allowed_change = max(residual_tol * operators.NEAR_ZERO, rounding) * radius
        unchanged = len(previous) == len(wanted) and bool(np.all(np.abs(previous - wanted) <= allowed_change))
        if not len(locked):  # the bounds come from the first space, which has a random start
            tridiagonal, beta = space.before_restart
            for sign in bounds:
                largest = float((sign * values).max())
                bounds[sign] = max(operators.upper_bound(sign * tridiagonal, beta, size), largest)
        # sign -> the ``count``-th largest sign·λ in ``wanted``; the smallest if ``wanted`` has fewer values.
        floors = {sign: float(np.sort(sign * wanted)[-min(count, len(wanted))]) for sign, count in ends}
        converged = space.converged
        if space.invariant:
            # The invariant space of a random start has a copy of each eigenvalue. One copy is enough if only
            # the outermost eigenvalue is wanted at an end.
            has_outermost = max(low, high) == 1 and len(wanted) == min(low + high, size)
            finished = converged = has_outermost or unchanged or len(values) == size
            if finished:  # no other eigenvalue lies beyond the wanted ones
                bounds |= floors
            start = ranks.normal(start, generator, torch.float64)
        elif converged:
            finished = True
            for sign, count in ends:
                if count == 1 and np.isfinite(bounds[sign]):
                    continue  # the first start has bounded the other eigenvalues
                floor = floors[sign]
                level = floor + _allowed_gap(floor, residual_tol, radius)
                budget = target.max_products - products
                second = yield from second_start(space, locked, floor, level, sign, budget, ranks)
                products += second.products
                check_products += second.products
                bounds[sign] = second.bound
                # If an eigenvalue was missed, another space is built from second.start. But if the latest
                # space has changed no wanted value, the search ends: another space would hardly change one.
                if second.start is not None and not unchanged:
                    finished, start = False, second.start
                    break
        if finished or products >= target.max_products or not space.converged:
            break
        del space  # frees its basis
    wanted_vectors = vectors[torch.from_numpy(chosen).to(start.device)]  # a copy
    # The norms get the vectors' dtype: to divide by float64 numbers, PyTorch would convert all vectors.
    wanted_vectors /= ranks.norm(wanted_vectors).to(wanted_vectors)[:, None]
    complete = converged and all(
        bounds[sign] <= floor + _allowed_gap(floor, residual_tol, radius) for sign, floor in floors.items()
    )
    return SearchResult(
        bounds=(-bounds[-1], bounds[1]),  # -1 and 1 are keys: the signs of the two ends
        values=wanted, vectors=wanted_vectors, products=products, converged=converged, radius=radius,
        basis=space.basis, t=space.t, target=target, complete=complete, checks=check_products,
    )  # fmt: skip


def _allowed_gap(value: float, residual_tol: float, radius: float) -> float:
    """Return the largest distance beyond ``value`` at which an eigenvalue does not count as missed."""
    return max(residual_tol * abs(value), operators.NEAR_ZERO * radius)


class _SearchProgress:
    """Estimates and reports the finished share of a search; the share never falls.

    At first the estimate is the share of the expected number of products. This number is right only to a
    factor of 2. The estimate therefore moves to the decline of the residuals, which fall about geometrically,
    but slowly at first. A call takes the largest ratio of a residual to its tolerance.
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
) -> list[T]:
    """Run ``searches``, generators that yield vectors and receive products, and return their results.

    In each step the products of all searches are computed together. ``products`` gets the vectors (k, P) of
    the k running searches and these searches' numbers; it returns the products (k, P).
    """
    results: dict[int, T] = {}
    running = list(range(len(searches)))
    vectors = [next(search) for search in searches]
    while running:
        images = products(stacked(vectors), running)
        unfinished, vectors = [], []
        for number, image in zip(running, images, strict=True):
            try:
                vectors.append(searches[number].send(image))
                unfinished.append(number)
            except StopIteration as end:
                results[number] = end.value
        running = unfinished
        del images, image  # frees memory for the next products
    return [results[number] for number in range(len(searches))]


def verify_and_refine(
    result: SearchResult,
    products: Callable[[Tensor], Tensor],
    residual_tol: float,
    errors: Sequence[float] | None = None,
) -> RitzPairs:
    """Verify and refine the pairs of a search with products of the exact operator.

    The values are eigenvalues of the exact operator in the span of the vectors (Rayleigh–Ritz). If the search
    used an approximate operator, a residual r can be above the tolerance. The span is then extended by a
    correction (:func:`_davidson`). Two or three corrections usually suffice.

    Args:
        result: the result of the search.
        products: the products with the exact operator, (k, P) -> (k, P).
        residual_tol: the largest residual, as in :func:`search_eigenpairs`.
        errors: a list to which ``products`` appends the error of each product. These errors, and the rounding
            of the vectors, are added to the residuals. None: products are exact.

    Returns:
        The pairs. They are ``converged`` if the search converged and each residual meets the tolerance up to
        rounding.
    """
    # Lists of rows (P,), which grow without a copy. ``images[j]`` is the product with ``vectors[j]``.
    vectors, images = [*result.vectors], [*products(result.vectors)]
    ranks = result.target.ranks  # the processes that hold the vectors
    rounding = torch.finfo(result.vectors.dtype).eps * result.radius
    # The loop replaces the vectors and images by combinations. Column j of ``mixing`` has the coefficients of
    # ``vectors[j]`` in the uncombined vectors, with which ``products`` was called.
    mixing = np.eye(len(vectors))

    def residual_vector(j: int, eigenvalue: float) -> Tensor:
        """Return Hv − λv (P,) for v = ``vectors[j]`` and λ = ``eigenvalue``."""
        return torch.sub(images[j], vectors[j], alpha=eigenvalue)

    for step in range(CORRECTIONS + 1):
        t = ranks.total(operators.gram(vectors, images)).cpu().numpy()
        values, rotation = operators.small_eigh((t + t.T) / 2)
        operators.combine(vectors, rotation.T)
        operators.combine(images, rotation.T)
        mixing = mixing @ rotation
        chosen = operators.outer_indices(values, result.target.low, result.target.high)
        wanted = values[chosen]
        residual_norms = [ranks.norm(residual_vector(*pair)) for pair in zip(chosen, wanted, strict=True)]
        norms = double(torch.stack(residual_norms)).cpu()
        norm_errors = 0 * norms  # caused by errors of products; NaN where the norm is NaN
        if errors and any(errors):
            # A measured error may be smaller than the rounding.
            norm_errors = torch.from_numpy(np.abs(mixing[:, chosen]).T @ np.array(errors)) + rounding
        allowed = residual_tol * np.maximum(np.abs(wanted), operators.NEAR_ZERO * result.radius) + rounding
        residuals = norms + norm_errors
        # The errors of products do not count here, because corrections cannot reduce these errors.
        meets_tolerance = norms.numpy() <= allowed
        if meets_tolerance.all() or not result.converged or step == CORRECTIONS:
            break
        corrections = torch.stack([
            _davidson(result, residual_vector(chosen[i], wanted[i]), wanted[i], float(norms[i]))
            for i in np.flatnonzero(~meets_tolerance)
        ])  # fmt: skip
        for v in [*vectors, *vectors]:  # the second subtraction removes rounding errors
            corrections.addr_(ranks.inner(corrections, v).to(v), v, alpha=-1)
        corrections = ranks.orthonormal(corrections)
        count = len(corrections)
        vectors, images = [*vectors, *corrections], [*images, *products(corrections)]
        mixing = np.pad(mixing, (0, count))
        mixing[-count:, -count:] = np.eye(count)
    converged = result.converged and bool((residuals.numpy() <= allowed).all())
    shifts = np.abs(wanted - result.values)  # how far verification has changed each value (descending)
    # The lower bound moves down by the shift of the largest of the ``low`` smallest values (for low = 0, of
    # the smallest value). The upper bound moves up by the shift of the smallest of the ``high`` largest
    # values (for high = 0, of the largest value).
    below, above = result.bounds
    low_count = min(max(1, result.target.low), len(shifts))
    high_count = min(max(1, result.target.high), len(shifts))
    bounds = below - float(shifts[-low_count]), above + float(shifts[high_count - 1])
    images.clear()  # frees memory for a copy of the vectors
    return RitzPairs(
        values=torch.from_numpy(wanted), vectors=torch.stack([vectors[i] for i in chosen]),
        residuals=residuals, products=result.products + len(vectors), converged=converged, bounds=bounds,
        complete=converged and result.complete, checks=result.checks,
        derivatives="exact" if errors is None else "differences", product_error=float(norm_errors.max()),
    )  # fmt: skip


def _davidson(result: SearchResult, r: Tensor, eigenvalue: float, residual: float) -> Tensor:
    """Return the correction (A − λ)⁻¹r (P,) for a residual vector r of norm ``residual`` (Davidson 1975).

    Here A is the search's operator projected on its last basis; it is zero outside of this basis.
    """
    values, rotation = operators.small_eigh(result.t)
    distances = values - eigenvalue
    # A distance below the residual may be an error. The residual then takes its place.
    distances = np.where(np.abs(distances) < residual, residual, distances)
    outside = -1 / (eigenvalue if abs(eigenvalue) > residual else residual)  # 1/(0 − λ), outside the basis
    parts = operators.coefficients(result.basis, r, result.target.ranks)
    inverse = torch.from_numpy(rotation @ np.diag(1 / distances - outside) @ rotation.T).to(r)
    products = torch.split(inverse @ torch.cat(parts), [len(part) for part in parts])
    for block, product in zip(result.basis, products, strict=True):
        r = torch.addmv(r, block.T, product, beta=outside)
        outside = 1.0  # r is scaled once
    return r


def search_operator(
    h: SymmetricOperator, start: Tensor, target: SearchOptions
) -> tuple[RitzPairs, SearchResult]:
    """Search eigenpairs of a matrix. Return the pairs, with measured errors of products, and the search.

    Products that are NaN or infinite end the search, with NaN.
    """
    errors: list[float] = []

    def images_of(rows: Tensor) -> Tensor:
        """Return the products with ``rows``, and append the products' errors to ``errors``."""
        images, image_errors = h._measured(rows)
        errors.extend(image_errors)
        return images

    search = search_eigenpairs(start, replace(target, ranks=h.ranks))
    by_differences = h.differences is not None
    result = run_in_lockstep([search], lambda v, _: h._images(v))[0]
    h.products += result.products
    pairs = verify_and_refine(result, images_of, target.residual_tol, errors if by_differences else None)
    return replace(pairs, search=h.arithmetic if by_differences else ""), result


def find_eigenpairs(product: Product, start: Tensor, **options: Any) -> RitzPairs:
    """:func:`search_eigenpairs` for one operator, ``product`` (P,) -> (P,), with exact residuals.

    ``options``: the fields of :class:`SearchOptions`.
    """
    target = SearchOptions(**options)
    result = run_in_lockstep([search_eigenpairs(start, target)], lambda v, _: product(v[0])[None])[0]
    return verify_and_refine(result, lambda v: torch.stack([product(row) for row in v]), target.residual_tol)

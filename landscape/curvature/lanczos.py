"""Eigenvalues of symmetric operators by Lanczos, each with its residual."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.curvature.krylov import NEAR_ZERO, ends, krylov, outermost, second_start, small_eigh

Product = Callable[[Tensor], Tensor]

# ARPACK and its peers stop at a residual relative to the eigenvalue; 1% is what a heatmap can show (DESIGN).
TOL = 1e-2
MAX_PRODUCTS = 1000
# Corrections of an approximate pair before it is searched for anew; 3 were the most that MNIST's MLPs took.
CORRECTIONS = 8


@dataclass(frozen=True)
class Ends:
    """The algebraically smallest and the largest eigenvalue, with unit eigenvectors (2, P) in that order.

    ``residual_*`` is ‖Hv − λv‖, from a product of its own, so that rounding is in it: an eigenvalue of H
    lies within that distance of λ. ``converged`` says whether both met the tolerance. ``hvps`` counts the
    Hessian-vector products, those with the true operator included. ``search`` says what the others were with.
    ``bounds``: between these all eigenvalues lie, each with a probability of 99% (:class:`Eigenpairs`).
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
    """Eigenvalues (k,) in descending order with unit eigenvectors (k, P), or (k, P') for a part of the model.

    ``residuals`` (k,) are ‖Hv − λv‖, each from a product of its own, so that rounding is in it: an eigenvalue
    of H lies within that distance of λ. values and residuals are float64 on the CPU. ``converged`` says
    whether all met the tolerance; ``hvps`` counts the products, those with the true operator
    included; ``search`` says what the others were with (:mod:`landscape.curvature.eigenvalues`).

    ``bounds``: between these all other eigenvalues lie, each with a probability of 99% over the random start
    (infinite where nothing is known). ``verified``: none was missed that lies beyond the last of those wanted
    by more than the tolerance, or a thousandth of the largest magnitude. ``checks`` of the products went into
    finding out. Where the search went by cheaper products, both are said of these; the bounds are widened by
    as much as the last of the eigenvalues wanted is off in them.
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


class Found(NamedTuple):
    """What a search ends with: the wanted Ritz pairs, (k,) descending and (k, P) of norm 1 each; the largest
    magnitude seen; the last basis (j, P) and the operator in it (j, j); how many of each end; between what
    all other eigenvalues lie, and the products of second starts (:class:`Eigenpairs`)."""

    values: Array
    vectors: Tensor
    products: int
    converged: bool
    radius: float
    basis: Tensor
    t: Array
    low: int
    high: int
    bounds: tuple[float, float]
    verified: bool
    checks: int


T = TypeVar("T")
Search = Generator[Tensor, Tensor, Found]


def search(
    start: Tensor, *, low: int = 0, high: int = 1, tol: float = TOL, max_products: int = MAX_PRODUCTS
) -> Search:
    """The ``low`` smallest and ``high`` largest eigenvalues (algebraically) of a symmetric operator.

    A generator: it yields the vectors like ``start`` (P,) that it needs the operator's products with, and is
    sent these products, so that many searches can share one pass over the data. ``start`` is a random vector,
    or holds at least as much of one (:func:`.warm_start`). It stops when each wanted
    Ritz residual is at most tol·|λ|, or tol·max|λ|/1000 for a λ nearer to zero than that. (Power iteration,
    by contrast, returns the largest *magnitude*.)

    A Krylov space from one start has one copy of a repeated eigenvalue, and may hold one vector for two close
    ones. Where several eigenvalues of an end are wanted, a second start
    (:func:`.second_start`) therefore asks whether one lies beyond the last that was found, by
    more than the tolerance (tol·|λ|, or max|λ|/1000); while one does, the search goes on in the complement of
    what was found. Where one is wanted, the first start bounds it (:func:`.outermost`), at no
    product's cost.

    A basis that turns out to span an invariant subspace holds exact eigenpairs; they are set aside and the
    rest is searched from a new vector, until that adds nothing wanted. Where several eigenvalues of an end
    are wanted and P is at most the basis, 128, it goes on until that is exhausted.

    A product that is NaN or infinite ends it, not converged, with NaN.

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
    wanted, products, checks, radius = np.zeros(0), 0, 0, 0.0
    bounds = {1: np.inf, -1: np.inf}  # of the other eigenvalues times 1 and −1
    sides = [(sign, count) for sign, count in ((1, high), (-1, low)) if count]
    good = complete = False
    while not complete:
        run = yield from krylov(start, vectors, radius, low, high, tol, max_products - products)
        aside = vectors
        values, vectors = np.concatenate((values, run.values)), torch.cat((vectors, run.vectors))
        products, radius = products + run.products, run.radius
        before, chosen = wanted, ends(values, low, high)
        wanted = values[chosen]
        near = max(tol * NEAR_ZERO, 100 * torch.finfo(start.dtype).eps) * radius
        same = len(before) == len(wanted) and bool(np.all(np.abs(before - wanted) <= near))
        if not len(aside) and not run.restarted:
            bounds = {sign: outermost(sign * run.t, float(run.rest.norm()), size) for sign in bounds}
        floors = {sign: float(np.sort(sign * wanted)[-min(count, len(wanted))]) for sign, count in sides}
        good = run.converged
        if run.invariant:
            # Where one eigenvalue an end is wanted, no other vector can add one further out.
            single = max(low, high) == 1 and len(wanted) == min(low + high, size)
            complete = good = single or same or len(values) == size
            bounds |= floors if complete else {}
            start = torch.randn(size, dtype=torch.float64, generator=generator).to(start)
        elif good:
            complete = True
            for sign, count in sides:
                if count == 1 and np.isfinite(bounds[sign]):
                    continue
                level = floors[sign] + _slack(floors[sign], tol, radius)
                seen = yield from second_start(run, aside, floors[sign], level, sign, max_products - products)
                products, checks = products + seen.products, checks + seen.products
                bounds[sign] = seen.bound
                if seen.start is not None and not same:  # else what it saw was not found: it is told
                    complete, start = False, seen.start
                    break
        if products >= max_products or not run.converged:
            break
    pairs = vectors[torch.from_numpy(chosen).to(start.device)]
    pairs = pairs / pairs.norm(dim=1, keepdim=True)
    verified = good and all(bounds[sign] <= at + _slack(at, tol, radius) for sign, at in floors.items())
    beyond = -bounds[-1], bounds[1]
    return Found(
        wanted, pairs, products, good, radius, run.basis, run.t, low, high, beyond, verified, checks
    )  # fmt: skip


def _slack(value: float, tol: float, radius: float) -> float:
    """How far beyond ``value`` an eigenvalue may lie that is not missed."""
    return max(tol * abs(value), NEAR_ZERO * radius)


def follow(
    searches: list[Generator[Tensor, Tensor, T]],
    products: Callable[[Tensor, list[int]], Tensor],
    done: Callable[[], None],
) -> list[T]:
    """What ``searches`` end with; they run in step.

    ``products`` maps a vector each (k, P), for the searches whose numbers it is told, to the products.
    ``done`` is called as each search ends.
    """
    found: dict[int, T] = {}
    running = list(range(len(searches)))
    asked = [next(one) for one in searches]
    while running:
        answers = products(torch.stack(asked), running)
        still, asked = [], []
        for number, answer in zip(running, answers, strict=True):
            try:
                asked.append(searches[number].send(answer))
                still.append(number)
            except StopIteration as end:
                found[number] = end.value
                done()
        running = still
    return [found[number] for number in range(len(searches))]


def certified(found: Found, products: Callable[[Tensor], Tensor], tol: float) -> Eigenpairs:
    """The pairs ``found``, checked with ``products`` (k, P) -> (k, P) of the true operator.

    The values are the operator's own in the span of the vectors (Rayleigh–Ritz). Where a residual r misses
    the tolerance because the search's operator was an approximation, the span is widened by (A − λ)⁻¹r
    (Davidson 1975), A being what the search knows: its operator in its last basis and zero outside. Two or
    three of these usually do. ``converged`` says whether the search ended well and each residual meets the
    tolerance, up to rounding.
    """
    vectors, images = found.vectors, products(found.vectors)
    rounding = torch.finfo(vectors.dtype).eps * found.radius
    for step in range(CORRECTIONS + 1):
        t = (vectors @ images.T).double().cpu().numpy()
        values, turn = small_eigh((t + t.T) / 2)
        chosen = ends(values, found.low, found.high)
        at, rows = values[chosen], torch.from_numpy(turn[:, chosen].T.copy()).to(vectors)
        pairs = rows @ vectors
        gaps = rows @ images - torch.from_numpy(at).to(vectors)[:, None] * pairs
        residuals = gaps.norm(dim=1).double().cpu()
        met = residuals.numpy() <= tol * np.maximum(np.abs(at), NEAR_ZERO * found.radius) + rounding
        if met.all() or not found.converged or step == CORRECTIONS:
            break
        new = torch.stack(
            [_davidson(found, gaps[i], at[i], float(residuals[i])) for i in np.flatnonzero(~met)]
        )
        for _ in range(2):
            new = new - new @ vectors.T @ vectors
        new = torch.linalg.qr(new.T).Q.T
        vectors, images = torch.cat((vectors, new)), torch.cat((images, products(new)))
    good = found.converged and bool(met.all())
    off = np.abs(at - found.values)
    below, above = found.bounds
    bounds = below - float(off[-found.low or -1]), above + float(off[(found.high or 1) - 1])
    verified = good and found.verified
    return Eigenpairs(
        torch.from_numpy(at), pairs, residuals, found.products + len(vectors), good, "", bounds, verified,
        found.checks,
    )  # fmt: skip


def _davidson(found: Found, gap: Tensor, at: float, residual: float) -> Tensor:
    """(A − λ)⁻¹r with A the operator of the search in its last basis, zero outside of it."""
    values, turn = small_eigh(found.t)
    away = values - at
    away = np.where(np.abs(away) < residual, residual, away)  # smaller differences are not resolved
    inside = found.basis @ gap
    weights = torch.from_numpy(turn @ np.diag(1 / away) @ turn.T).to(gap) @ inside
    outside = gap - found.basis.T @ inside
    return found.basis.T @ weights - outside / (at if abs(at) > residual else residual)


def lanczos(
    product: Product,
    start: Tensor,
    *,
    low: int = 0,
    high: int = 1,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
) -> Eigenpairs:
    """:func:`search` for one operator, ``product`` (P,) -> (P,), with the residuals of what it found."""
    one = search(start, low=low, high=high, tol=tol, max_products=max_products)
    found = follow([one], lambda v, _: product(v[0])[None], lambda: None)[0]
    return certified(found, lambda vectors: torch.stack([product(v) for v in vectors]), tol)


def ends_of(pairs: Eigenpairs) -> Ends:
    """The last and the first of ``pairs``."""
    order = [-1, 0]
    low, high = pairs.values[order].tolist()
    residual_low, residual_high = pairs.residuals[order].tolist()
    return Ends(
        low,
        high,
        residual_low,
        residual_high,
        pairs.hvps,
        pairs.converged,
        pairs.vectors[order],
        pairs.search,
        pairs.bounds,
    )

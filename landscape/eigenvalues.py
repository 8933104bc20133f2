"""Ends and top of the Hessian's spectrum at one or many sets of weights.

The search for eigenvectors may multiply in bfloat16, where that is faster; values and residuals are always
from products in the problem's own precision, and what misses the tolerance there is searched on in it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from landscape import second_opinion
from landscape.chain_hessian import ChainHessian
from landscape.hessian import GRAPH_BYTES, HessianOperator, Part, operator
from landscape.lanczos import (
    BASIS_BYTES,
    MAX_BASIS,
    MAX_PRODUCTS,
    TOL,
    Eigenpairs,
    Ends,
    certified,
    ends_of,
    follow,
    search,
)
from landscape.options import InputError, choose, positive
from landscape.problem import Problem

PRECISIONS = ("auto", "model", "bfloat16")
# Points of a grid at once, at most. On 2 cores a product of one of 16 points costs half of a lone one's.
MAX_POINTS = 16
# Below, a spectrum is often gone through whole, to exact multiplicities, which needs exact products (ours).
LEAST_PARAMETERS = 10 * MAX_BASIS
# How much faster bfloat16 must multiply, as it can leave more to do in the end, and on how many samples this
# is timed (ours).
PAYS = 1.25
TRIAL = 1000


def points_at_once(problem: Problem, part: Part = None) -> int:
    """How many sets of weights :func:`eigenpairs` should be given at a time, so that memory stays bounded."""
    kept = ChainHessian.kept_bytes(problem) if part is None else None
    if kept is None:
        return 1
    basis = (MAX_BASIS + 1) * problem.theta.nbytes
    return max(1, min(MAX_POINTS, GRAPH_BYTES // kept, BASIS_BYTES // basis))


def eigenpairs(
    problem: Problem,
    thetas: Tensor,
    start: Tensor,
    *,
    low: int = 0,
    high: int = 1,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    precision: str = "auto",
    done: Callable[[], None] = lambda: None,
) -> list[Eigenpairs]:
    """The ``low`` smallest and ``high`` largest eigenvalues of ∇²L at each of ``thetas`` (K, P).

    Args:
        start: where every search begins, (P,) or (P',) for a part; see :func:`landscape.lanczos.search`.
        kind, part, randomness: see :class:`landscape.HessianOperator`.
        precision: what the search multiplies in: "model", "bfloat16" (chains of linear layers only), or
            "auto": bfloat16 for such chains in float32, from 1,280 parameters on, where a trial finds it
            faster.
        done: called as each point is found.

    Points are searched in step, so that on chains of linear layers one pass over the data serves all.
    """
    choose("precision", precision, PRECISIONS)
    kept = ChainHessian.kept_bytes(problem) if part is None else None
    fits = kept is not None and kept * len(thetas) <= GRAPH_BYTES
    if precision == "bfloat16" and not fits:
        raise InputError("precision: 'bfloat16' needs a chain of linear layers, and no part; use 'model'")
    quick = precision == "bfloat16" or (precision == "auto" and fits and _bfloat16_pays(problem))

    def searched(at: Tensor, starts: list[Tensor], dtype: torch.dtype) -> list[Eigenpairs]:
        searches = [search(s, low=low, high=high, tol=tol, max_products=max_products) for s in starts]
        exact: Iterable[Callable[[Tensor], Tensor]]
        if fits:
            h = ChainHessian(problem, at, kind=kind)
            found = follow(searches, _in_step(h, dtype), done)
            # One at a time, as zip below asks for them.
            exact = [h] if len(at) == 1 else (ChainHessian(problem, t[None], kind=kind) for t in at)
        else:
            each = [HessianOperator(problem, t, kind=kind, part=part, randomness=randomness) for t in at]
            exact = [functools.partial(_rows, h) for h in each]

            def products(vectors: Tensor, running: list[int]) -> Tensor:
                return torch.stack([each[i](v) for i, v in zip(running, vectors, strict=True)])

            found = follow(searches, products, done)
        name = str(dtype).removeprefix("torch.")
        return [replace(certified(f, h, tol), precision=name) for f, h in zip(found, exact, strict=True)]

    pairs = searched(thetas, [start] * len(thetas), torch.bfloat16 if quick else problem.dtype)
    missed = [i for i, p in enumerate(pairs) if not p.converged and p.hvps < max_products] if quick else []
    if missed:
        starts = [pairs[i].vectors.sum(0) for i in missed]
        for i, again in zip(missed, searched(thetas[missed], starts, problem.dtype), strict=True):
            pairs[i] = replace(again, hvps=pairs[i].hvps + again.hvps)
    return pairs


def _rows(h: HessianOperator, vectors: Tensor) -> Tensor:
    return torch.stack([h(v) for v in vectors])


def _in_step(h: ChainHessian, dtype: torch.dtype) -> Callable[[Tensor, list[int]], Tensor]:
    """The products of the searches still running; the weights of the others are dropped."""
    left: list[int] = []

    def products(vectors: Tensor, running: list[int]) -> Tensor:
        if left and left != running:
            h.keep([left.index(i) for i in running])
        left[:] = running
        return h(vectors, dtype)

    return products


def _bfloat16_pays(problem: Problem) -> bool:
    """Whether the first layer's products with the data are that much faster in bfloat16."""
    if problem.dtype != torch.float32 or problem.layout.size < LEAST_PARAMETERS:
        return False
    assert problem.tensors is not None
    x = problem.tensors[0][:TRIAL].flatten(1)
    w = next(iter(problem.layout.views(problem.theta).values()))
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = w.to(dtype), x.to(dtype)
        for _ in range(2):  # the second time counts
            clock = time.perf_counter()
            (a @ b.T) @ b
            if problem.device.type == "cuda":
                torch.cuda.synchronize(problem.device)
            elapsed = time.perf_counter() - clock
        times.append(elapsed)
    return times[0] > PAYS * times[1]


def start_vector(problem: Problem, seed: int, size: int | None = None) -> Tensor:
    """A normal vector (size,), by default (P,), from ``seed``: the same draw on every device.

    Lanczos needs one with components along all eigenvectors. InputError for a seed below 0.
    """
    if seed < 0:
        raise InputError(f"seed: {seed} is not allowed, it must be an integer ≥ 0")
    generator = torch.Generator().manual_seed(seed)
    length = problem.layout.size if size is None else size
    return torch.randn(length, dtype=torch.float64, generator=generator).to(problem.theta)


def extreme_eigenvalues(
    problem: Problem,
    tol: float = TOL,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    precision: str = "auto",
    max_products: int = MAX_PRODUCTS,
    seed: int = 0,
) -> Ends:
    """λ_min and λ_max of ∇²L(θ) over all of the problem's data, θ (P,) by default the centre.

    ``tol`` bounds each residual relative to its eigenvalue; see :func:`landscape.lanczos.search`. ``kind``,
    ``part`` and ``randomness`` as in :class:`landscape.HessianOperator`, ``precision`` as in
    :func:`eigenpairs`. ``seed`` draws the starting vector. Where ``max_products`` run out first,
    ``converged`` is False and the residuals say how far it got.
    """
    size = operator(problem, theta, kind=kind, part=part, randomness=randomness).size
    at = problem.theta if theta is None else theta
    pairs = eigenpairs(
        problem, at[None], start_vector(problem, seed, size), low=1, high=1, tol=tol,
        max_products=max_products, kind=kind, part=part, randomness=randomness, precision=precision,
    )  # fmt: skip
    return ends_of(pairs[0])


def top_eigenvalues(
    problem: Problem,
    k: int = 1,
    tol: float = TOL,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    precision: str = "auto",
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
    at = problem.theta if theta is None else theta
    first = start_vector(problem, seed, h.size)
    if start is not None:
        if start.shape != first.shape:
            raise InputError(f"start: shape {tuple(start.shape)}, it must be {tuple(first.shape)}")
        positive("start: norm", float(start.norm()))
        near = start.to(first)
        first = near / near.norm() + first / first.norm()
    return eigenpairs(
        problem, at[None], first, high=k, tol=tol, max_products=max_products,
        kind=kind, part=part, randomness=randomness, precision=precision,
    )[0]  # fmt: skip

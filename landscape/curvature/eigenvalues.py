"""Ends and top of the Hessian's spectrum at one or many sets of weights.

The search for eigenvectors may go by cheaper products: with the samples that carry nearly all of the
curvature, and with the data in bfloat16. Values and residuals are always from products with all samples in
the problem's own precision, by which what the search found is mended, or searched on, until it meets the
tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import choose, positive
from landscape.curvature import pyhessian_engine
from landscape.curvature.chain_hessian import ChainHessian, agrees
from landscape.curvature.hessian import GRAPH_BYTES, HessianOperator, Part, operator
from landscape.curvature.krylov import BASIS_BYTES, MAX_BASIS
from landscape.curvature.lanczos import (
    MAX_PRODUCTS,
    TOL,
    Eigenpairs,
    Ends,
    certified,
    ends_of,
    follow,
    search,
)
from landscape.evaluation.stack import plain_cross_entropy
from landscape.problem.problem import Problem

Products = Callable[[Tensor], Tensor]

SEARCHES = ("auto", "exact")
# Points of a grid at once, at most. On 2 cores a product of one of 16 points costs half of a lone one's.
MAX_POINTS = 16
# Cheaper searches only for spectra that are not gone through whole, to exact multiplicities, and tolerances
# that a few corrections reach from theirs (ours).
LEAST_PARAMETERS = 10 * MAX_BASIS
LEAST_TOL = 1e-3
# The share of Σ(1 − p) that the samples searched with have. On MNIST's MLPs these are 20 to 70% of all, and
# the lowest eigenvalue is then 2 to 4% off. It must be at most so many of all to be worth the corrections.
MASS = 0.99
MOST = 0.8
# What a product in bfloat16 may be off by, relative to it, for the corrections to be few; it is 0.2% on
# MNIST's MLPs, and more where the data's numbers differ by little from one another (ours).
COARSE = 0.02


def points_at_once(problem: Problem, part: Part = None) -> int:
    """How many sets of weights :func:`eigenpairs` should be given at a time, so that memory stays bounded."""
    kept = _chain_bytes(problem, problem.theta, "hessian", part)
    if kept is None:
        return 1
    basis = (MAX_BASIS + 1) * problem.theta.nbytes
    return max(1, min(MAX_POINTS, GRAPH_BYTES // kept, BASIS_BYTES // basis))


def _chain_bytes(problem: Problem, theta: Tensor, kind: str, part: Part) -> int | None:
    """What a set of weights costs where fast products of chains serve; None where they do not."""
    kept = ChainHessian.kept_bytes(problem) if part is None else None
    return kept if kept is not None and agrees(problem, theta, kind) else None


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
    how: str = "auto",
    done: Callable[[], None] = lambda: None,
) -> list[Eigenpairs]:
    """The ``low`` smallest and ``high`` largest eigenvalues of ∇²L at each of ``thetas`` (K, P).

    Args:
        start: where every search begins, (P,) or (P',) for a part; see :func:`.search`.
        kind, part, randomness: see :class:`landscape.HessianOperator`.
        how: "exact": every product with all samples, in the problem's precision; "auto": the search goes by
            cheaper ones where that pays. For tolerances from 1e-3 and 1,280 parameters on: with cross-entropy
            the samples with 99% of the sum of 1 − p, p the probability of the target (a sample's part of the
            Hessian vanishes with 1 − p), and chains of linear layers in float32 in bfloat16, where the
            hardware has it and a few samples' products agree to 2%.
        done: called as each point is found.

    Points are searched in step, so that on chains of linear layers one pass over the data serves all. All
    products count as whole ones.
    """
    choose("search", how, SEARCHES)
    thetas = thetas.to(problem.theta)
    kept = _chain_bytes(problem, thetas[0], kind, part)
    fits = kept is not None and kept * len(thetas) <= GRAPH_BYTES
    whole = _Way(problem, problem.dtype)
    rough = problem.layout.size < LEAST_PARAMETERS or tol < LEAST_TOL or randomness == "seed"
    one = ChainHessian(problem, thetas, kind=kind) if fits and len(thetas) == 1 else None
    way = whole if how == "exact" or rough else _cheapest(problem, thetas, fits, one)

    def searched(at: Tensor, starts: list[Tensor], way: _Way) -> list[Eigenpairs]:
        searches = [search(s, low=low, high=high, tol=tol, max_products=max_products) for s in starts]
        share = way.problem.samples / problem.samples
        exact: Iterable[Products]
        if fits:
            h = one if one and way.problem is problem else ChainHessian(way.problem, at, kind=kind)
            found = follow(searches, _in_step(h, share, way.dtype), done)
            # Else one at a time, as zip below asks for them.
            exact = [one] if one else (ChainHessian(problem, t[None], kind=kind) for t in at)
        else:
            general = functools.partial(HessianOperator, kind=kind, part=part, randomness=randomness)
            each = [general(way.problem, t) for t in at]

            def products(vectors: Tensor, running: list[int]) -> Tensor:
                return torch.stack([each[i](v) * share for i, v in zip(running, vectors, strict=True)])

            found = follow(searches, products, done)
            exact = (
                functools.partial(_rows, h if way is whole else general(problem, t))
                for h, t in zip(each, at, strict=True)
            )
        ends = zip(found, exact, strict=True)
        return [replace(certified(f, h, tol), search=way.name(problem)) for f, h in ends]

    pairs = searched(thetas, [start] * len(thetas), way)
    missed = [i for i, p in enumerate(pairs) if not p.converged and p.hvps < max_products]
    if missed and way is not whole:
        starts = [warm_start(pairs[i].vectors.sum(0), start) for i in missed]
        for i, again in zip(missed, searched(thetas[missed], starts, whole), strict=True):
            pairs[i] = replace(again, hvps=pairs[i].hvps + again.hvps)
    return pairs


@dataclass(frozen=True)
class _Way:
    """What a search multiplies with: a problem, perhaps with fewer samples, and the data's precision."""

    problem: Problem
    dtype: torch.dtype

    def name(self, whole: Problem) -> str:
        """Such as "float32" or "bfloat16, 2,372 of 10,000 samples"."""
        part = f", {self.problem.samples:,} of {whole.samples:,} samples"
        return str(self.dtype).removeprefix("torch.") + part * (self.problem is not whole)


@torch.no_grad()
def _cheapest(problem: Problem, thetas: Tensor, is_chain: bool, one: ChainHessian | None) -> _Way:
    """The samples that matter at ``thetas``, and the precision that is faster; ``one``: if it is there.

    All samples where the problem is regularised: the penalty is no mean over them.
    """
    dtype = torch.bfloat16 if is_chain and _bfloat16_serves(problem) else problem.dtype
    known = plain_cross_entropy(problem.criterion) and problem.tensors is not None and not problem.bn_samples
    known = known and not problem.regularised
    if not known or problem.tensors is None or problem.tensors[1].dim() != 1:
        return _Way(problem, dtype)
    missing = torch.zeros(problem.samples, device=problem.device)
    for theta in thetas:
        outputs = (
            [(c.z[0].T, c.y) for c in one.chunks]
            if one
            else ((problem.outputs(theta, x), y) for x, y, _ in problem.chunks())
        )
        parts = [1 - z.softmax(1).gather(1, y[:, None]).squeeze(1) for z, y in outputs]
        missing += torch.cat(parts).float().nan_to_num(nan=1.0)  # one point's NaN leaves the others theirs
    most, order = missing.sort(descending=True)
    count = int((most.cumsum(0) < MASS * most.sum()).sum()) + 1
    if count > MOST * problem.samples:
        return _Way(problem, dtype)
    return _Way(problem.subset(order[:count].sort().values), dtype)


def exact_products(
    problem: Problem,
    theta: Tensor | None = None,
    *,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
) -> tuple[Products, int]:
    """The products of ∇²L(θ) with vectors (k, P), or (k, P') for a part, and that size.

    Raises InputError as :func:`landscape.curvature.hessian.operator`.
    """
    h = operator(problem, theta, kind=kind, part=part, randomness=randomness)
    at = problem.theta if theta is None else theta
    kept = _chain_bytes(problem, at, kind, part)
    if kept is not None and kept <= GRAPH_BYTES:
        return ChainHessian(problem, at[None], kind=kind), h.size
    return functools.partial(_rows, h), h.size


def _rows(h: HessianOperator, vectors: Tensor) -> Tensor:
    return torch.stack([h(v) for v in vectors])


def _in_step(h: ChainHessian, share: float, dtype: torch.dtype) -> Callable[[Tensor, list[int]], Tensor]:
    """``share`` of the products of the searches still running; the weights of the others are dropped."""
    left: list[int] = []

    def products(vectors: Tensor, running: list[int]) -> Tensor:
        if left and left != running:
            h.keep([left.index(i) for i in running])
        left[:] = running
        return h(vectors, dtype).mul_(share)

    return products


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether the hardware multiplies in bfloat16: CUDA from Ampere on, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def _bfloat16_serves(problem: Problem) -> bool:
    """Whether products with the data in bfloat16 are fast, and near enough on a few samples at the centre."""
    if problem.dtype != torch.float32 or not bfloat16_is_fast(problem.device):
        return False
    few = ChainHessian(problem.probe(), problem.theta[None])
    v = start_vector(problem, 0)[None]
    exact = few(v)
    return bool((few(v, torch.bfloat16) - exact).norm() <= COARSE * exact.norm())


def start_vector(problem: Problem, seed: int, size: int | None = None) -> Tensor:
    """A normal vector (size,), by default (P,), from ``seed``: the same draw on every device.

    Of a model in half precision it is float32, in which a basis can be orthogonal. Lanczos needs one with
    components along all eigenvectors. InputError for a seed below 0.
    """
    if seed < 0:
        raise InputError(f"seed: {seed} is not allowed, it must be an integer ≥ 0")
    generator = torch.Generator().manual_seed(seed)
    length = problem.layout.size if size is None else size
    return torch.randn(length, dtype=torch.float64, generator=generator).to(
        problem.device, torch.promote_types(problem.dtype, torch.float32)
    )


def warm_start(near: Tensor, first: Tensor) -> Tensor:
    """(P,), where a search near ``near`` begins: with as much of ``first``, which misses no eigenvector."""
    start: Tensor = near.to(first) / near.norm() + first / first.norm()
    return start


def extreme_eigenvalues(
    problem: Problem,
    tol: float = TOL,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    search: str = "auto",
    max_products: int = MAX_PRODUCTS,
    seed: int = 0,
) -> Ends:
    """λ_min and λ_max of ∇²L(θ) over all of the problem's data, θ (P,) by default the centre.

    ``tol`` bounds each residual relative to its eigenvalue; see :func:`.search`. ``kind``,
    ``part`` and ``randomness`` as in :class:`landscape.HessianOperator`; ``search`` is ``how`` in
    :func:`eigenpairs`. ``seed`` draws the starting vector. Where ``max_products`` run out first,
    ``converged`` is False and the residuals say how far it got.
    """
    size = operator(problem, theta, kind=kind, part=part, randomness=randomness).size
    at = problem.theta if theta is None else theta
    pairs = eigenpairs(
        problem, at[None], start_vector(problem, seed, size), low=1, high=1, tol=tol,
        max_products=max_products, kind=kind, part=part, randomness=randomness, how=search,
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
    search: str = "auto",
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
    if choose("engine", engine, pyhessian_engine.ENGINES) == "pyhessian":
        pyhessian_engine.check(problem, kind, part)
        if k != 1:
            raise InputError(f"k: {k} is not allowed with engine 'pyhessian', it must be 1")
        value, v, hvps = pyhessian_engine.largest_magnitude(
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
        first = warm_start(start, first)
    return eigenpairs(
        problem, at[None], first, high=k, tol=tol, max_products=max_products,
        kind=kind, part=part, randomness=randomness, how=search,
    )[0]  # fmt: skip

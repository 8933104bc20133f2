"""Ends and top of the Hessian's spectrum at one or many sets of weights.

The search for eigenvectors may use cheaper products: with the samples that have nearly all of the curvature,
and with the data in bfloat16. Its results are verified and refined with exact products, of all samples in the
problem's precision, until they meet the tolerance.
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
    ends_of,
    run_in_lockstep,
    search_eigenpairs,
    verify_and_refine,
)
from landscape.evaluation.chain import is_default_cross_entropy
from landscape.problem.problem import Problem

Products = Callable[[Tensor], Tensor]

SEARCHES = ("auto", "exact")
# Points of a grid at once, at most. On 2 cores a product of one of 16 points costs half of a lone one's.
MAX_POINTS = 16
# Cheaper searches are for matrices whose basis does not become complete, and tolerances that a few
# corrections reach (ours).
MIN_PARAMETERS = 10 * MAX_BASIS
MIN_TOL = 1e-3
# The share of Σ(1 − p) of the samples of a cheaper search. On MNIST's MLPs these are 20 to 70% of all, and
# the lowest eigenvalue is then 2 to 4% off. Above a share of MAX_SAMPLES the corrections would cost more.
CURVATURE_SHARE = 0.99
MAX_SAMPLES = 0.8
# The largest relative error of a product in bfloat16 for which few corrections suffice; it is 0.2% on MNIST's
# MLPs, and more where the numbers of the data are close to one another (ours).
BFLOAT16_ERROR = 0.02


@dataclass(frozen=True)
class Product:
    """Which matrix: the options of :class:`landscape.HessianOperator` with these names."""

    kind: str = "hessian"
    part: Part = None
    randomness: str = "refuse"

    def operator(self, problem: Problem, theta: Tensor | None = None) -> HessianOperator:
        """The matrix of ``problem`` at ``theta`` (P,)."""
        return HessianOperator(problem, theta, kind=self.kind, part=self.part, randomness=self.randomness)


@dataclass(frozen=True)
class Wanted:
    """Which eigenvalues: the ``low`` smallest, ``high`` largest, to ``tol``, in at most ``max_products``."""

    low: int = 0
    high: int = 1
    tol: float = TOL
    max_products: int = MAX_PRODUCTS


def points_at_once(problem: Problem, part: Part = None) -> int:
    """The number of sets of weights for one call of :func:`eigenpairs` with bounded memory."""
    saved = _chain_bytes(problem, problem.theta, Product(part=part))
    if saved is None:
        return 1
    basis = (MAX_BASIS + 1) * problem.theta.nbytes
    return max(1, min(MAX_POINTS, GRAPH_BYTES // saved, BASIS_BYTES // basis))


def _chain_bytes(problem: Problem, theta: Tensor, product: Product) -> int | None:
    """Bytes of a set of weights for the fast products of chains; None where these do not serve."""
    saved = ChainHessian.saved_bytes(problem) if product.part is None else None
    return saved if saved is not None and agrees(problem, theta, product.kind) else None


def eigenpairs(
    problem: Problem,
    thetas: Tensor,
    start: Tensor,
    wanted: Wanted,
    product: Product = Product(),
    *,
    search: str = "auto",
    done: Callable[[], None] = lambda: None,
) -> list[Eigenpairs]:
    """Eigenvalues of ∇²L at each of ``thetas`` (K, P).

    Args:
        start: the first vector of every search, (P,) or (P',) for a part; see :func:`.search_eigenpairs`.
        wanted: which eigenvalues, and how exactly.
        product: which matrix; see :class:`landscape.HessianOperator`.
        search: "exact": every product has all samples, in the problem's precision; "auto": the search uses
            cheaper products where that saves time, for tolerances from 1e-3 and 1,280 parameters on. With
            cross-entropy these are of the samples with 99% of the sum of 1 − p, p the probability of the
            target (a sample's part of the Hessian vanishes with 1 − p). For chains of linear layers in
            float32 they are in bfloat16, if the hardware has it and the products of a few samples agree to
            2%.
        done: called as each point ends.

    All points are searched in lockstep, so that on chains of linear layers one pass over the data serves all.
    Each product counts as one.
    """
    choose("search", search, SEARCHES)
    searches = _PointSearches(problem, product, wanted, done, _saved_on_chain(problem, thetas, product))
    thetas = thetas.to(problem.theta)
    whole = _Approximation(problem, problem.dtype)
    small = problem.layout.size < MIN_PARAMETERS or wanted.tol < MIN_TOL or product.randomness == "seed"
    one = ChainHessian(problem, thetas, kind=product.kind) if searches.chain and len(thetas) == 1 else None
    chosen = whole if search == "exact" or small else _cheapest(problem, thetas, searches.chain, one)
    pairs = searches.run(thetas, [start] * len(thetas), chosen, one)
    missed = [i for i, p in enumerate(pairs) if not p.converged and p.hvps < wanted.max_products]
    if missed and chosen is not whole:
        starts = [warm_start(pairs[i].vectors.sum(0), start) for i in missed]
        for i, again in zip(missed, searches.run(thetas[missed], starts, whole, one), strict=True):
            pairs[i] = replace(again, hvps=pairs[i].hvps + again.hvps)
    return pairs


def _saved_on_chain(problem: Problem, thetas: Tensor, product: Product) -> bool:
    """Whether the fast products of chains serve, and all of ``thetas`` fit into memory."""
    saved = _chain_bytes(problem, thetas[0].to(problem.theta), product)
    return saved is not None and saved * len(thetas) <= GRAPH_BYTES


@dataclass(frozen=True)
class _Approximation:
    """The problem of a search, perhaps with fewer samples, and the precision of its data."""

    problem: Problem
    dtype: torch.dtype

    def name(self, whole: Problem) -> str:
        """Such as "float32" or "bfloat16, 2,372 of 10,000 samples"."""
        part = f", {self.problem.samples:,} of {whole.samples:,} samples"
        return str(self.dtype).removeprefix("torch.") + part * (self.problem is not whole)


@dataclass(frozen=True)
class _PointSearches:
    """The searches of :func:`eigenpairs` at some points; ``chain``: by the fast products of chains."""

    problem: Problem
    product: Product
    wanted: Wanted
    done: Callable[[], None]
    chain: bool

    def run(
        self, thetas: Tensor, starts: list[Tensor], chosen: _Approximation, one: ChainHessian | None
    ) -> list[Eigenpairs]:
        """Search with products of ``chosen``, then verify and refine; ``one``: exact products, or None."""
        w = self.wanted
        searches = [
            search_eigenpairs(s, low=w.low, high=w.high, tol=w.tol, max_products=w.max_products)
            for s in starts
        ]
        products, exact = (self._on_chain if self.chain else self._general)(thetas, chosen, one)
        results = run_in_lockstep(searches, products, self.done)
        name = chosen.name(self.problem)
        return [
            replace(verify_and_refine(result, h, w.tol), search=name)
            for result, h in zip(results, exact, strict=True)
        ]

    def _on_chain(
        self, thetas: Tensor, chosen: _Approximation, one: ChainHessian | None
    ) -> tuple[Callable[[Tensor, list[int]], Tensor], Iterable[Products]]:
        problem, kind = self.problem, self.product.kind
        share = chosen.problem.samples / problem.samples
        h = one if one and chosen.problem is problem else ChainHessian(chosen.problem, thetas, kind=kind)
        # Without one, one point at a time, as the verification asks for them.
        exact = [one] if one else (ChainHessian(problem, t[None], kind=kind) for t in thetas)
        return _in_lockstep(h, share, chosen.dtype), exact

    def _general(
        self, thetas: Tensor, chosen: _Approximation, one: ChainHessian | None
    ) -> tuple[Callable[[Tensor, list[int]], Tensor], Iterable[Products]]:
        share = chosen.problem.samples / self.problem.samples
        each = [self.product.operator(chosen.problem, t) for t in thetas]

        def products(vectors: Tensor, running: list[int]) -> Tensor:
            return torch.stack([each[i](v) * share for i, v in zip(running, vectors, strict=True)])

        exact = chosen.problem is self.problem
        verifying = (
            functools.partial(_rows, h if exact else self.product.operator(self.problem, t))
            for h, t in zip(each, thetas, strict=True)
        )
        return products, verifying


@torch.no_grad()
def _cheapest(problem: Problem, thetas: Tensor, is_chain: bool, one: ChainHessian | None) -> _Approximation:
    """The samples with most of the curvature at ``thetas``, and the faster precision.

    All samples where the problem is regularised: the penalty is no mean over samples. ``one``: the products
    at the only point, whose outputs are used again.
    """
    dtype = torch.bfloat16 if is_chain and _bfloat16_serves(problem) else problem.dtype
    tensors, loss = problem.data.tensors, problem.criterion
    usable = is_default_cross_entropy(loss) and not problem.regularised and not problem.batchnorm.samples
    if not usable or tensors is None or tensors[1].dim() != 1:
        return _Approximation(problem, dtype)
    missing = torch.zeros(problem.samples, device=problem.device)
    for theta in thetas:
        outputs = (
            [(c.z[0].T, c.y) for c in one.chunks]
            if one
            else ((problem.outputs(theta, x), y) for x, y, _ in problem.chunks())
        )
        parts = [1 - z.softmax(1).gather(1, y[:, None]).squeeze(1) for z, y in outputs]
        missing += (
            torch.cat(parts).float().nan_to_num(nan=1.0)
        )  # a NaN of one point does not spread to others
    most, order = missing.sort(descending=True)
    count = int((most.cumsum(0) < CURVATURE_SHARE * most.sum()).sum()) + 1
    if count > MAX_SAMPLES * problem.samples:
        return _Approximation(problem, dtype)
    return _Approximation(problem.subset(order[:count].sort().values), dtype)


def exact_products(
    problem: Problem, theta: Tensor | None = None, product: Product = Product()
) -> tuple[Products, int]:
    """The products of ∇²L(θ) with vectors (k, P), or (k, P') for a part, and that size.

    Raises InputError as :func:`landscape.curvature.hessian.operator`.
    """
    h = operator(problem, theta, kind=product.kind, part=product.part, randomness=product.randomness)
    at = problem.theta if theta is None else theta
    saved = _chain_bytes(problem, at, product)
    if saved is not None and saved <= GRAPH_BYTES:
        return ChainHessian(problem, at[None], kind=product.kind), h.size
    return functools.partial(_rows, h), h.size


def _rows(h: HessianOperator, vectors: Tensor) -> Tensor:
    return torch.stack([h(v) for v in vectors])


def _in_lockstep(h: ChainHessian, share: float, dtype: torch.dtype) -> Callable[[Tensor, list[int]], Tensor]:
    """``share`` of the products of the searches still running; the weights of the others are dropped."""
    present: list[int] = []

    def products(vectors: Tensor, running: list[int]) -> Tensor:
        if present and present != running:
            h.select([present.index(i) for i in running])
        present[:] = running
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
    few = ChainHessian(problem.on(problem.data.few()), problem.theta[None])
    v = start_vector(problem, 0)[None]
    exact = few(v)
    return bool((few(v, torch.bfloat16) - exact).norm() <= BFLOAT16_ERROR * exact.norm())


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
    """(P,), the start of a search near ``near``, with as much of ``first``, which misses no eigenvector."""
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
    """λ_min and λ_max of ∇²L(θ) over all of the problem's data, by one Lanczos run.

    Args:
        problem: the loss.
        tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to zero.
        theta: θ (P,); default: the problem's centre.
        kind: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.
        randomness: "refuse" a model that is random in eval mode, or "seed" its random numbers.
        search: "auto": the search may use cheaper products, with the samples that have most of the curvature
            and the data in bfloat16, and its results are verified and refined with exact ones; "exact": all
            products are exact.
        max_products: Hessian-vector products, at most; where they end first, ``converged`` is False and the
            residuals show the error.
        seed: draws the starting vector.

    Raises:
        InputError: a tol or max_products that is not positive, an unknown option, or a random model.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> ends = landscape.extreme_eigenvalues(problem)  # of the mean of 2xxᵀ
        >>> round(ends.min, 4), round(ends.max, 4)
        (1.0, 9.0)
    """
    product, wanted = Product(kind, part, randomness), Wanted(1, 1, tol, max_products)
    size = operator(problem, theta, kind=kind, part=part, randomness=randomness).size
    at = problem.theta if theta is None else theta
    start = start_vector(problem, seed, size)
    return ends_of(eigenpairs(problem, at[None], start, wanted, product, search=search)[0])


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

    Args:
        problem: the loss.
        k: how many, 1 ≤ k ≤ P.
        tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to zero.
        theta: θ (P,); default: the problem's centre.
        kind: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.
        randomness: "refuse" a model that is random in eval mode, or "seed" its random numbers.
        search: "auto": the search may use cheaper products, with the samples that have most of the curvature
            and the data in bfloat16, and its results are verified and refined with exact ones; "exact": all
            products are exact.
        engine: "pyhessian" asks that package instead, for one eigenvalue: that of largest *magnitude*. Its
            residual is still from our product.
        start: (P,), such as the sum of eigenvectors at nearby weights, where the search begins. As much of a
            random vector is added, so that no eigenvector is missed for being orthogonal to it.
        max_products: Hessian-vector products, at most; where they end first, ``converged`` is False and the
            residuals show the error.
        seed: draws the starting vector.

    Raises:
        InputError: a k below 1 or above P, a start of another shape, an unknown option, a random model, or an
            option that pyhessian does not have.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> landscape.top_eigenvalues(problem, 2).values.round(decimals=3).tolist()
        [9.0, 1.0]
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
    product, wanted = Product(kind, part, randomness), Wanted(0, k, tol, max_products)
    return eigenpairs(problem, at[None], first, wanted, product, search=search)[0]

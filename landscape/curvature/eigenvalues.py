"""Eigenvalues of the Hessian: the largest, both ends, and searches by cheaper products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.analysis import analysis
from landscape.core.devices import finite, generator, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need, spare
from landscape.core.options import Count, Seed, UpToOne, positive
from landscape.core.progress import ProgressOption, reporter
from landscape.curvature import hessian, peers
from landscape.curvature.chain_hessian import ChainHessian, agrees
from landscape.curvature.differences import ShardedHessian
from landscape.curvature.double_backward import HALF_INSIDE, in_full_precision
from landscape.curvature.hessian import Derivatives, Part, Preconditioner
from landscape.curvature.operators import ALONE, Products, SymmetricMatrix, SymmetricOperator, as_operator
from landscape.curvature.search import (
    MAX_PRODUCTS,
    RESIDUAL_TOL,
    RitzPairs,
    SearchOptions,
    ranks_of,
    run_in_lockstep,
    search_eigenpairs,
    search_operator,
    stacked,
    start_vector,
    verify_and_refine,
    warm_start,
)
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.evaluation.needs import BASIS_BYTES, GRAPH_BYTES, MAX_BASIS
from landscape.problem.layout import Vector, vector_of
from landscape.problem.losses import is_softmax_loss
from landscape.problem.problem import Problem, Run, problem_of
from landscape.problem.sharded import on_ranks
from landscape.results.base import Provenance
from landscape.results.spectrum import Eigenpairs, ExtremeEigenvalues

# Cheaper searches are for matrices whose basis does not become complete, and tolerances that a few
# corrections reach (our choice).
MIN_PARAMETERS = 10 * MAX_BASIS
MIN_RESIDUAL_TOL = 1e-3
# The share of Σ(1 − p) of the samples of a cheaper search. On MNIST's MLPs these are 20 to 70% of all, and
# the lowest eigenvalue is then 2 to 4% off. Above a share of MAX_SAMPLES the corrections would cost more.
CURVATURE_SHARE = 0.99
MAX_SAMPLES = 0.8


@torch.no_grad()
def most_curved(problem: Problem, weights: Tensor) -> Problem:
    """Return ``problem`` on the samples with most of the curvature at ``weights`` (K, P).

    These are the samples with the largest 1 − p, where p is the probability of the target: a sample's part of
    the Hessian vanishes with 1 − p. All samples are kept if the loss is no softmax loss of single samples, or
    if the problem is regularized, because the penalty is no mean over samples.
    """
    tensors, loss = problem.data.tensors, problem.criterion
    usable = is_softmax_loss(loss) and not problem.regularised and not problem.batchnorm.samples
    usable = usable and problem.separable
    if not usable or tensors is None or tensors[1].dim() != 1:
        return problem
    curvatures = torch.zeros(problem.samples, device=problem.device)  # of each sample: Σ(1 − p) over weights
    for theta in weights:
        outputs = ((problem.outputs(theta, x), y) for x, y, _ in problem.chunks())
        parts = [1 - z.softmax(1).gather(1, y[:, None]).squeeze(1) for z, y in outputs]
        # NaN at one θ must not hide the samples' values at the others.
        curvatures += torch.cat(parts).float().nan_to_num(nan=1.0)
    descending, order = curvatures.sort(descending=True)
    count = int((descending.cumsum(0) < CURVATURE_SHARE * descending.sum()).sum()) + 1
    if count > MAX_SAMPLES * problem.samples:
        return problem
    return problem.subset(order[:count].sort().values)


# Points of a grid at once, at most. On 2 cores a product of one of 16 points costs half of a lone one's.
MAX_POINTS = 16


def points_at_once(problem: Problem, options: hessian.HessianOptions = hessian.FULL_HESSIAN) -> int:
    """The number of sets of weights for one call of :func:`eigenpairs` with bounded memory."""
    if options.at(problem).derivatives == "differences":
        return 1
    problem = in_full_precision(problem)
    saved = _chain_bytes(problem, problem.weights, hessian.FULL_HESSIAN)
    if saved is None:
        return 1
    basis = (MAX_BASIS + 1) * problem.weights.nbytes
    return max(1, min(MAX_POINTS, GRAPH_BYTES // saved, BASIS_BYTES // basis))


def _chain_bytes(problem: Problem, weights: Tensor, options: hessian.HessianOptions) -> int | None:
    """Bytes of one set of weights for the fast products of chains; None where these cannot be used."""
    is_half = problem.checked.get(HALF_INSIDE)
    saved = ChainHessian.saved_bytes(problem) if options.part is None and not is_half else None
    return saved if saved is not None and agrees(problem, weights, options.matrix) else None


def eigenpairs(
    problem: Problem,
    weights: Tensor,
    start: Tensor,
    target: SearchOptions,
    options: hessian.HessianOptions = hessian.FULL_HESSIAN,
    *,
    search: str = "auto",
) -> list[RitzPairs]:
    """Return the eigenpairs of ∇²L at each of ``weights`` (K, P).

    With exact derivatives, all points are searched in lockstep. For chains of linear layers, one pass over
    the data then gives one product for each point. With differences of gradients, one point is searched after
    another.

    Args:
        problem: the loss.
        weights: (K, P), the points.
        start: the first vector of every search, (P,) or (P',) for a part; see :func:`.search_eigenpairs`.
        target: the wanted eigenvalues and the tolerance. Each search calls ``target.progress``.
        options: the matrix; see :class:`landscape.HessianOperator`. With a preconditioner, K must be 1.
        search: "exact": every product uses all samples. "auto": if the tolerance is at least 1e-3 and the
            model has at least 1,280 parameters, products of the search use only the samples with most
            curvature (:func:`most_curved`); the results are refined with all samples.
    """
    first_hessian = options.at(problem, weights[0])
    if first_hessian.derivatives == "differences":
        hessians = [first_hessian, *(options.at(problem, theta) for theta in weights[1:])]
        pairs = [search_operator(h, start, target)[0] for h in hessians]
        suffix = ", preconditioned" if options.precondition else ""
        return [replace(result, search=result.search + suffix) for result in pairs]
    del first_hessian  # frees its graphs
    if options.precondition:
        result, _ = search_operator(fast_hessian(problem, weights[0], options), start, target)
        return [replace(result, search="exact, preconditioned")]
    problem = in_full_precision(problem)
    weights = weights.to(problem.weights)
    needs_all = problem.layout.size < MIN_PARAMETERS or target.residual_tol < MIN_RESIDUAL_TOL
    may_use_subset = search == "auto" and not needs_all and problem.separable
    # Each call searches at some of the points, with products of the samples of a given problem.
    search_points = _PointSearch(problem, weights, target, options)
    search_problem = most_curved(problem, weights) if may_use_subset else problem
    results = search_points(weights, [start] * len(weights), search_problem)
    if search_problem is problem:
        return results
    # A search whose refinement failed is repeated with all samples, unless it has used up its products or a
    # residual is NaN or infinite.
    failed = [i for i, result in enumerate(results) if not result.converged]
    again = [i for i in failed if results[i].products < target.max_products and finite(results[i].residuals)]
    if again:
        # The sum of the vectors that a search found has a component along each of these vectors.
        starts = [warm_start(results[i].vectors.sum(0), start) for i in again]
        repeated = search_points(weights[again], starts, problem)
        for i, result in zip(again, repeated, strict=True):
            results[i] = replace(result, products=results[i].products + result.products)
    return results


class _PointSearch:
    """Searches at several points, with products of some or all samples; results are refined with all samples.

    Args:
        problem: the loss over all samples.
        weights: (K, P), all points that will be searched. Each call searches all or some of them.
    """

    def __init__(
        self, problem: Problem, weights: Tensor, target: SearchOptions, options: hessian.HessianOptions
    ) -> None:
        self._problem, self._target = problem, target
        self._options = replace(options, derivatives="exact")
        weight_bytes = _chain_bytes(problem, weights[0], options)
        budget = min(GRAPH_BYTES, spare())
        self._is_chain = weight_bytes is not None and weight_bytes * len(weights) <= budget
        # The matrix of all samples, which the search and its verification share; None for several points.
        has_one_point = self._is_chain and len(weights) == 1
        self._matrix_of_all = self._chain(problem, weights) if has_one_point else None

    def _chain(self, problem: Problem, weights: Tensor) -> ChainHessian:
        return ChainHessian(problem, weights, matrix=self._options.matrix)

    def __call__(self, weights: Tensor, starts: list[Tensor], search_problem: Problem) -> list[RitzPairs]:
        """Return the eigenpairs at each of the points ``weights``, one a row.

        The pairs are searched with the samples of ``search_problem``, from the vectors ``starts``, one for
        each point. The pairs are then verified and refined with all samples.
        """
        problem = self._problem
        has_all = search_problem is problem
        # A subset has the samples with most of the curvature. The Hessians of the other samples are nearly
        # zero. So the mean Hessian of all samples is nearly ``share`` times the mean Hessian of the subset.
        share = search_problem.samples / problem.samples
        all_exact_products: Iterable[Products]  # products with all samples, for each point
        if self._is_chain:
            # With all samples, a single point has a matrix already.
            matrix = (self._matrix_of_all if has_all else None) or self._chain(search_problem, weights)
            products = _in_lockstep(matrix, share)
            if self._matrix_of_all:
                all_exact_products = [self._matrix_of_all]
            else:  # a generator, so that one matrix is in memory at a time
                all_exact_products = (self._chain(problem, theta[None]) for theta in weights)
        else:
            operators = [self._options.at(search_problem, theta) for theta in weights]

            def products(rows: Tensor, running: list[int]) -> Tensor:
                images = [operators[i]._images(row[None])[0] for i, row in zip(running, rows, strict=True)]
                return stacked(images).mul_(share)

            if has_all:
                all_exact_products = [h._images for h in operators]
            else:
                all_exact_products = (self._options.at(problem, theta)._images for theta in weights)
        searches = [search_eigenpairs(start, self._target) for start in starts]
        results = run_in_lockstep(searches, products)
        search = str(problem.dtype).removeprefix("torch.")  # for the results' field of this name
        search += "" if has_all else f", {search_problem.samples:,} of {problem.samples:,} samples"
        return [
            replace(verify_and_refine(result, exact_products, self._target.residual_tol), search=search)
            for result, exact_products in zip(results, all_exact_products, strict=True)
        ]


def fast_hessian(
    problem: Problem, weights: Tensor | None = None, options: hessian.HessianOptions = hessian.FULL_HESSIAN
) -> hessian.HessianOperator:
    """The matrix at θ, with the fast products of a chain of linear layers where they serve.

    Raises InputError as :class:`landscape.HessianOperator`.
    """
    h = options.at(problem, weights)
    if h.derivatives == "exact":
        problem = in_full_precision(problem)
        at = vector_of(weights, problem.weights)
        saved = _chain_bytes(problem, at, options)
        if saved is not None and saved <= min(GRAPH_BYTES, spare()):
            h.fast = ChainHessian(problem, at[None], matrix=options.matrix)
    return h


def _in_lockstep(h: ChainHessian, share: float) -> Callable[[Tensor, list[int]], Tensor]:
    """Return the function that computes ``share`` times the products of the searches that still run.

    The weights of ended searches are dropped from ``h``.
    """
    present: list[int] = []  # the searches whose weights ``h`` has

    def products(vectors: Tensor, running: list[int]) -> Tensor:
        if present and present != running:
            h.select([present.index(i) for i in running])
        present[:] = running
        return h(vectors).mul_(share)

    return products


@dataclass(frozen=True)
class Matrix:
    """The matrix that a public function analyzes: the Hessian of a problem, or the caller's operator.

    Attributes:
        source: the problem, or the operator.
        weights: θ (P,) of a problem; None: the problem's center.
        options: the kind of matrix of a problem.
        size: the number of rows.
        seed: of the result's random draws.
        about: fields of the result (:class:`landscape.results.spectrum.MatrixResult`).
    """

    source: Problem | SymmetricOperator
    weights: Tensor | None
    options: hessian.HessianOptions
    size: int
    seed: int
    about: dict[str, Any]

    @classmethod
    def of(cls, subject: Any, seed: int, about: Mapping[str, Any], **options: Any) -> Matrix:
        """Return the matrix of ``subject``: the Hessian of a problem or a run, or a symmetric operator.

        Args:
            subject: the first argument of a public function.
            seed: the seed of the function's random draws.
            about: provenance, kept with the result.
            options: the function's keyword arguments about the matrix, such as ``weights`` and ``part``.

        Raises:
            InputError: a subject of another kind, an option that the operator or pyhessian does not have, or
                a value that :class:`landscape.HessianOperator` refuses.
        """
        engine = options.get("engine", "landscape")
        if on_ranks(subject):  # a sharded model has an operator of its own, with products by differences only
            subject = subject.hessian(options["weights"])
            options["weights"] = None
            if options["derivatives"] == "differences":  # the only kind of such an operator
                options["derivatives"] = None
        operator = as_operator(subject)
        if operator:
            # Options about a Hessian are allowed only with their default values.
            for name, value in options.items():
                if value is not None and (name not in DEFAULTS or value != DEFAULTS[name]):
                    raise InputError(f"{name}: it is an option of a Problem, leave it out with an operator")
            fields = {**_fields(operator, seed), **about}
            return cls(operator, None, hessian.FULL_HESSIAN, operator.size, seed, fields)
        problem, weights, part = problem_of(subject), options["weights"], options["part"]
        preconditioner = hessian.as_preconditioner(options.get("precondition"))
        matrix, derivatives = options["matrix"], options["derivatives"]
        matrix_options = hessian.HessianOptions(matrix, part, preconditioner, derivatives)
        if engine == "pyhessian":
            peers.check(matrix_options)
        # Weights other than a tensor (P,), an array (P,) or None raise InputError here.
        h = matrix_options.at(problem, weights)
        weights = torch.as_tensor(weights) if isinstance(weights, np.ndarray) else weights
        part_text = part if isinstance(part, str) else ",".join(part or ())
        fields = _fields(h, seed) | setting(problem)
        fields |= {"part": part_text, "engine": engine, **about}
        if preconditioner:
            name, lr, limit = preconditioner.name, preconditioner.lr, preconditioner.limit
            fields |= {"precondition": name, "lr": lr, "limit": limit}
        return cls(problem, weights, matrix_options, h.size, seed, fields)

    def start(self) -> Tensor:
        """A normal vector (size,), see :func:`.start_vector`."""
        return start_vector(self.source, self.seed, self.size)

    @functools.cached_property
    def operator(self) -> SymmetricOperator:
        """The matrix, with products of all samples."""
        if isinstance(self.source, SymmetricOperator):
            return self.source
        return fast_hessian(self.source, self.weights, self.options)

    def eigenpair_fields(self, start: Tensor, target: SearchOptions, search: str = "auto") -> dict[str, Any]:
        """The fields of a result with the eigenvalues that ``target`` names, see :func:`eigenpairs`."""
        if isinstance(self.source, SymmetricOperator):
            pairs, _ = search_operator(self.source, start, target)
        elif self.about["engine"] == "pyhessian":
            pairs = self._by_pyhessian(self.source, target)
        else:
            at = self.source.weights if self.weights is None else self.weights
            pairs = eigenpairs(self.source, at[None], start, target, self.options, search=search)[0]
        self.check(pairs.residuals)
        low, high = pairs.bounds
        names = ("products", "converged", "search", "complete", "derivatives", "product_error")
        same = {name: getattr(pairs, name) for name in names}
        arrays = {name: getattr(pairs, name).cpu().numpy() for name in ("values", "vectors", "residuals")}
        more = {"bound_low": low, "bound_high": high, "residual_tol": target.residual_tol}
        return {**self.about, **same, **arrays, **more, "lowest": target.low}

    def check(self, numbers: Tensor) -> None:
        """Raise an error unless what was computed from products is finite; a product says why."""
        if not finite(numbers):
            self.operator(self.start())
            raise OperationError("problem: products of the matrix are NaN or infinite, all must be finite")

    def _by_pyhessian(self, problem: Problem, target: SearchOptions) -> RitzPairs:
        """The eigenvalue of largest magnitude by pyhessian, with a residual by our product."""
        if target.high != 1:
            raise InputError(f"k: {target.high} is not allowed with engine 'pyhessian', it must be 1")
        tol, most = target.residual_tol, target.max_products
        value, v, products = peers.largest_magnitude(problem, self.weights, tol, most, self.seed)
        h = self.options.at(problem, self.weights)
        residual = float(vector_norm(h(v) - value * v))
        pair = torch.tensor([[value], [residual]], dtype=torch.float64)
        return RitzPairs(pair[0], v[None], pair[1], products + 1, residual <= tol * abs(value))


# The default values of options about a problem's matrix; the other options are None by default.
DEFAULTS = {"matrix": "hessian", "derivatives": "auto", "search": "auto", "engine": "landscape"}


def _fields(operator: SymmetricOperator, seed: int) -> dict[str, Any]:
    """The fields of a result that say which matrix an operator is."""
    same: dict[str, Any] = {"matrix": operator.matrix, "parameters": operator.size, "seed": seed}
    if operator.ranks is ALONE:
        same["random_device"] = generator(seed, operator.device, operator.size).device.type
    if isinstance(operator, ShardedHessian):
        problem: Any = operator.problem
        return same | setting(problem) | {"derivatives": operator.derivatives, "parameters": problem.size}
    if not isinstance(operator, hessian.HessianOperator):
        return same | {"samples": 0, "dtype": str(operator.dtype).removeprefix("torch.")}
    whole = operator.size == operator.problem.layout.size
    part = "" if whole else ",".join(slot.name for slot in operator.slots)
    return same | setting(operator.problem) | {"derivatives": operator.derivatives, "part": part}


def ends_need(problem: Any, part: Any = None, derivatives: Any = "auto", **_: Any) -> Need:
    """The memory for a search at both ends of the spectrum."""
    return needs.curved(problem, 1 + needs.basis(problem, 2, part), part=part, derivatives=derivatives)


@analysis(ends_need, shorter="a larger residual_tol= or a part of the data")
def extreme_eigenvalues(
    problem: Problem | Run | SymmetricMatrix,
    residual_tol: UpToOne = RESIDUAL_TOL,
    *,
    weights: Vector | None = None,
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    part: Part = None,
    derivatives: Derivatives = "auto",
    search: Literal["auto", "exact"] = "auto",
    max_products: Count = MAX_PRODUCTS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> ExtremeEigenvalues:
    """Compute the smallest and the largest eigenvalue of ∇²L(θ) by Lanczos steps (Lanczos 1950).

    Args:
        problem: the loss, a run, or a symmetric matrix of PyTorch, NumPy, SciPy, curvlinops or this package.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000).
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters, to use only their diagonal block; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        search: "exact", or "auto": the search may leave out samples with little curvature; results use all.
        max_products: the most Hessian-vector products. If they do not suffice, ``converged`` is False.
        seed: the seed of the starting vector.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The two eigenvalues with their residuals and eigenvectors.

    Raises:
        InputError: a value out of range, a matrix that is not symmetric, or an option that is unknown or not
            allowed with a matrix.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> ends = landscape.extreme_eigenvalues(problem)  # the Hessian is the mean of 2xxᵀ
        >>> round(ends.min, 4), round(ends.max, 4)
        (1.0, 9.0)
    """
    options: dict[str, Any] = {"weights": weights, "matrix": matrix, "part": part, "derivatives": derivatives}
    operand = Matrix.of(problem, seed, about, **options, search=search, max_memory=max_memory)
    target = SearchOptions(1, 1, residual_tol, max_products, reporter(progress))  # one eigenvalue at each end
    return ExtremeEigenvalues(**operand.eigenpair_fields(operand.start(), target, search))


def top_need(problem: Any, k: Any, max_products: Any, part: Any, derivatives: Any, **_: Any) -> Need:
    """The memory for a search of the ``k`` largest eigenvalues."""
    vectors = 1 + needs.several(problem, k, max_products, part)
    return needs.curved(problem, vectors, part=part, derivatives=derivatives)


@analysis(top_need, shorter="a smaller k=, a larger residual_tol= or a part of the data")
def top_eigenvalues(
    problem: Problem | Run | SymmetricMatrix,
    k: Count = 1,
    residual_tol: UpToOne = RESIDUAL_TOL,
    *,
    weights: Vector | None = None,
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    part: Part = None,
    derivatives: Derivatives = "auto",
    precondition: Preconditioner | Tensor | None = None,
    search: Literal["auto", "exact"] = "auto",
    engine: Literal["landscape", "pyhessian"] = "landscape",
    initial: Tensor | Array | None = None,
    max_products: Count = MAX_PRODUCTS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Eigenpairs:
    """Compute the ``k`` algebraically largest eigenvalues of ∇²L(θ), with eigenvectors and residuals.

    The method is a Lanczos iteration with thick restarts (Wu and Simon 2000). A second start from another
    random vector finds eigenvalues that the first start missed (our choice).

    Args:
        problem: the loss, a run, or a symmetric matrix, as in :func:`landscape.extreme_eigenvalues`.
        k: the number of eigenvalues, 1 ≤ k ≤ P.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000).
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters, to use only their diagonal block; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        precondition: a positive diagonal in the order of θ, or what :func:`landscape.preconditioner` returns.
            The eigenpairs are then those of the preconditioned Hessian.
        search: "exact" or "auto", as in :func:`landscape.extreme_eigenvalues`.
        engine: "landscape", or "pyhessian" for that package's eigenvalue of largest *magnitude*, if k is 1.
        initial: (P,), a vector near the wanted eigenvectors. A random vector of equal norm is added.
        max_products: the most Hessian-vector products. If they do not suffice, ``converged`` is False.
        seed: the seed of the starting vector.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Eigenvalues, eigenvectors and residuals.

    Raises:
        InputError: a value out of range, a vector of another shape, an unknown option, an option that
            pyhessian does not have, or a matrix that is not symmetric.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> landscape.top_eigenvalues(problem, 2).values.round(3).tolist()
        [9.0, 1.0]
    """
    options: dict[str, Any] = {"weights": weights, "matrix": matrix, "part": part, "derivatives": derivatives}
    options |= {"search": search, "max_memory": max_memory, "engine": engine, "precondition": precondition}
    operand = Matrix.of(problem, seed, about, **options)
    # No smallest eigenvalue, and the k largest.
    search_options = SearchOptions(0, k, residual_tol, max_products, reporter(progress))
    start = operand.start()
    if initial is not None:
        vector = torch.as_tensor(initial)
        if vector.shape != start.shape:
            raise InputError(f"initial: shape {tuple(vector.shape)}, it must be {tuple(start.shape)}")
        ranks = ranks_of(operand.source)  # the processes that hold the vectors
        positive("initial: norm", float(ranks.norm(vector)))
        start = warm_start(vector.to(start), start, ranks)
    return Eigenpairs(**operand.eigenpair_fields(start, search_options, search))

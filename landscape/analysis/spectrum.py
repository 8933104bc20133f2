"""The Hessian's spectrum, of the whole and of the parts of a network, and the loss's change in a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.weights import Weights, network_of
from landscape.core.analysis import analysis
from landscape.core.devices import double, inner, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import Count, Positive, Seed, Several, UpToOne, Within
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.core.statistics import mean_and_error
from landscape.curvature import trace as traces
from landscape.curvature.double_backward import in_full_precision
from landscape.curvature.eigenvalues import Matrix, ends_need, top_need
from landscape.curvature.hessian import Derivatives, Part, Preconditioner
from landscape.curvature.operators import ALONE, SymmetricMatrix, combine, small_eigh
from landscape.curvature.search import (
    MAX_PRODUCTS,
    RESIDUAL_TOL,
    RitzPairs,
    SearchOptions,
    SearchResult,
    search_operator,
)
from landscape.evaluation import needs
from landscape.gradients.minibatches import stream
from landscape.problem.layout import Slot, Vector, cut, put
from landscape.problem.losses import existing
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.spectrum import (
    QUANTITIES,
    WHOLE,
    CurvatureTable,
    Eigenpairs,
    LossChange,
    MatrixResult,
    Spectrum,
)


def _spectrum_need(problem: Any, k: Any, quantities: Any, **options: Any) -> Need:
    """The largest of what was asked for, and the start that these share."""
    several = max(k or 1, 1 + ("extremes" in quantities))
    memory_needs = [top_need(problem, several, **options)] if k or "trace" not in quantities else []
    counts = dict[str, Any](extremes=ends_need, trace=traces.trace_need, density=traces.density_need)
    memory_needs += [counts[name](problem, **options) for name in QUANTITIES if name in quantities]
    return max(memory_needs, key=lambda need: need.fixed)


@analysis(_spectrum_need, shorter="a smaller k= or draws= or a part of the data", version=1)
def spectrum(
    problem: Problem | Run | SymmetricMatrix,
    k: Count | None = None,
    *,
    quantities: Sequence[Literal["extremes", "trace", "density"]] = (),
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    part: Part = None,
    derivatives: Derivatives = "auto",
    precondition: Preconditioner | Tensor | None = None,
    engine: Literal["landscape", "pyhessian"] = "landscape",
    search: Literal["auto", "exact"] = "auto",
    residual_tol: UpToOne = RESIDUAL_TOL,
    max_products: Count = MAX_PRODUCTS,
    products: Annotated[int, Within(6)] = traces.TRACE_PRODUCTS,
    draws: Count = traces.DRAWS,
    steps: Count = traces.STEPS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Spectrum:
    """Eigenvalues, trace and density of ∇²L at the problem's center, in one result that can be saved.

    Args:
        problem: the loss, a run, or any symmetric matrix, as in :func:`landscape.extreme_eigenvalues`.
        k: how many of the largest eigenvalues; default: none.
        quantities: what is computed besides: "extremes", the smallest and the largest eigenvalue, from the
            same Lanczos run as the largest; "trace", by Hutch++ (Meyer et al. 2021); "density", by stochastic
            Lanczos quadrature (Ghorbani et al. 2019); default: "extremes" without ``k``.
        products: Hessian-vector products for the trace.
        draws: random vectors for the density.
        steps: Lanczos steps, and so products, for each of these vectors.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
        precondition: P, a positive diagonal (P,), or what :func:`landscape.preconditioner` makes of a
            checkpoint: all is then of P^{-1/2} H P^{-1/2}, by exact products.
        engine: "pyhessian" gives one eigenvalue, that of largest magnitude, and the trace; no more.
        search: "auto" may search eigenvalues with cheaper products, whose results are verified and refined
            with exact ones; "exact": all products are exact. Trace and density are always exact.
        residual_tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to
            zero.
        max_products: Hessian-vector products for the eigenvalues, at most.
        seed: draws the starting vector, the signs and the random vectors.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        values and residuals (k,), trace, trace_error, nodes and masses (draws, steps).

    Raises:
        InputError: a count, tolerance or option that is not allowed, a preconditioner that is not positive or
            of another length, an option that pyhessian does not have, or an operator that is not symmetric.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.spectrum(problem, quantities=("extremes", "trace"))
        >>> result.values.round(3).tolist(), round(result.trace, 3)
        ([9.0, 1.0], 10.0)
    """
    external = engine == "pyhessian"
    chosen: set[str] = {*quantities}
    if not (k or chosen) and external:
        k = 1
    elif not (k or chosen):
        chosen = {"extremes"}
    foreign = [name for name in QUANTITIES if name in chosen - {"trace"}]
    if external and foreign:
        raise InputError(f"engine: 'pyhessian' is not allowed with {foreign[0]}, only with k=1 and trace")
    settings = {"weights": None, "matrix": matrix, "part": part, "derivatives": derivatives, "search": search}
    more_options = {"max_memory": max_memory, "engine": engine, "precondition": precondition}
    operand = Matrix.of(problem, seed, about, **settings, **more_options)
    low = int("extremes" in chosen)
    high = max(k or 0, low)
    needed = [high > 0, "trace" in chosen, "density" in chosen]

    def stage(part: int) -> Progress:
        """The progress of a part, each an equal share of what was asked for."""
        return portion(progress, sum(needed[:part]) / sum(needed), (sum(needed[:part]) + 1) / sum(needed))

    parts: list[MatrixResult] = []
    if needed[0]:
        options = SearchOptions(low, high, residual_tol, max_products, stage(0))
        parts.append(Eigenpairs(**operand.search(operand.start(), options, search)))
        stage(0)(1.0)
    if needed[1]:
        parts.append(traces.trace_of(operand, products, stage(1)))
    if needed[2]:
        parts.append(traces.density_of(operand, draws, steps, stage(2)))
    return dataclasses.replace(Spectrum.of(*parts), residual_tol=residual_tol)


# Errors of eigenvalues are of the second order in residuals: λ_max was right to 11 digits, and λ_min to 0.5%,
# of an MLP on digits and a small transformer, with 80% of the products that 0.01 takes.
TABLE_TOL = 0.1
# Random vectors of the traces: their standard errors are then known to about 16%, as those of a trace.
TABLE_DRAWS = 20
# Ritz vectors of a block's search whose part of the trace is known from it. They approximate eigenvectors;
# with the 10 largest of these removed, the standard error was 5 to 9 times smaller for an MLP on digits, and
# 2 to 7 times for a small transformer.
KNOWN = 10
# A share of a trace that is less than this number of standard errors from zero would have no error bar.
SIGNIFICANT = 3.0


@dataclasses.dataclass(frozen=True)
class Block:
    """A diagonal block after its search.

    Attributes:
        slots: its parameters.
        basis: (m, P'), orthonormal Ritz vectors.
        basis_trace: tr(QᵀHQ), Q these vectors.
        doubt: the error that it may have by products that are differences.
    """

    slots: tuple[Slot, ...]
    basis: Tensor
    basis_trace: float
    doubt: float

    def remove_basis(self, rows: Tensor) -> None:
        """Project ``rows`` (n, P) on what is orthogonal to the Ritz vectors, in place."""
        own_rows = cut(rows, self.slots)
        for _ in range(2):  # twice, as in Lanczos: once leaves rounding errors of the removed part
            own_rows -= inner(own_rows, self.basis).to(own_rows) @ self.basis
        put(rows, self.slots, own_rows)


def at_once(problem: Any) -> int:
    """The number of random vectors whose products are computed together."""
    return max(1, min(traces.BLOCK, needs.BASIS_BYTES // (4 * int(problem.weights.nbytes))))


def vectors_kept(problem: Any) -> int:
    """The number of Ritz vectors that are kept of each block."""
    return max(2, min(KNOWN, needs.BASIS_BYTES // int(problem.weights.nbytes)))


def table_need(problem: Any, derivatives: Any, **_: Any) -> Need:
    """The Ritz vectors of all blocks, and a search, or the random vectors and their products."""
    vectors = vectors_kept(problem) + max(1 + needs.basis(problem, 2), 4 * at_once(problem))
    return needs.curved(problem, vectors, derivatives=derivatives)


@analysis(table_need, shorter="a larger residual_tol=, a smaller draws= or a part of the data", version=1)
def curvature_table(
    problem: Problem | Run,
    by: str | Sequence[str] = "block",
    residual_tol: UpToOne = TABLE_TOL,
    *,
    weights: Vector | None = None,
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    derivatives: Derivatives = "auto",
    draws: Several = TABLE_DRAWS,
    max_products: Count = MAX_PRODUCTS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> CurvatureTable:
    """λ_max, λ_min and trace of ∇²L(θ) and of its diagonal blocks: how much curvature is where in a network.

    The ends of each block are found by a Lanczos run, as by :func:`landscape.extreme_eigenvalues` with
    ``part``, by exact products. The traces of all blocks and of the whole come from the same products with
    ``draws`` random vectors z over all parameters: z_bᵀ(Hz)_b has the mean tr H_bb for every block b (the
    products between blocks add to its variance only). From z_b the Ritz vectors Q of the block's search are
    removed, whose tr(QᵀH_bbQ) is known exactly, as in Hutch++ (Meyer et al. 2021). A product of all blocks is
    dearer than that of one block and cheaper than one for each of them.

    Args:
        problem: the loss, or a run.
        by: the rows of the table, of which each parameter is in one: "block", the first module with a number
            in its name (h.3, layer1.0), or one module where there is none; "layer", one module with
            parameters of its own; "parameter", one tensor; or names, prefixes and patterns (*.bias) of
            parameters. The rest of these is "others".
        residual_tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to
            zero; the default 0.1 leaves errors of some 0.1 to 1% in λ_min and smaller ones in λ_max.
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
        draws: random vectors for the traces, at least 2; the default 20 gives their standard errors to about
            16%.
        max_products: products of a block's search, at most; where they end first, it is not converged.
        seed: draws the starting vectors and the random vectors.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        A table with the whole in its first row and each block in another.

    Raises:
        InputError: a name that fits no parameter, a number or option that is not allowed, or a matrix that is
            not symmetric.

    Example:
        >>> import torch, landscape
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        >>> _ = torch.nn.init.constant_(model[0].weight, 1.0), torch.nn.init.constant_(model[1].weight, 2.0)
        >>> problem = landscape.Problem(model, torch.nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)))
        >>> table = landscape.curvature_table(problem)
        >>> table.groups, table.trace.round(3).tolist()
        (('all', '0', '1'), [10.0, 8.0, 2.0])
    """
    problem = problem_of(problem)
    groups = problem.layout.groups(by)
    options: dict[str, Any] = {"weights": weights, "matrix": matrix, "max_memory": max_memory}
    whole = Matrix.of(problem, seed, about, **options, part=None, derivatives=derivatives)
    if whole.operator.derivatives == "differences":  # so are its blocks, of which some may have no kinks
        derivatives = "differences"

    def searched(chosen: Matrix, number: int) -> tuple[RitzPairs, SearchResult]:
        """The search of a row, each an equal share of the work."""
        share = portion(progress, number / (len(groups) + 2), (number + 1) / (len(groups) + 2))
        target = SearchOptions(1, 1, residual_tol, max_products, share)
        pairs, result = search_operator(chosen.operator, chosen.start(), target)
        chosen.check(pairs.residuals)
        return pairs, result

    pairs_of_blocks, blocks = [searched(whole, 0)[0]], list[Block]()
    for number, slots in enumerate(groups.values(), 1):
        names = [slot.name for slot in slots]
        chosen = Matrix.of(problem, seed, {}, **options, part=names, derivatives=derivatives)
        pairs, result = searched(chosen, number)
        pairs_of_blocks.append(pairs)
        blocks.append(_block(chosen, slots, result, vectors_kept(problem)))
        del chosen, result  # the graphs and the basis, before the next ones
    last = portion(progress, 1 - 1 / (len(groups) + 2), 1.0)
    return CurvatureTable(
        **whole.about
        | ends_of(pairs_of_blocks)
        | _traces(whole, blocks, draws, [pairs.product_error for pairs in pairs_of_blocks], last),
        met=np.array([pairs.converged for pairs in pairs_of_blocks]),
        groups=(WHOLE, *groups),
        sizes=np.array([whole.size, *(sum(s.size for s in slots) for slots in groups.values())]),
        products=sum(pairs.products for pairs in pairs_of_blocks) + draws,
        residual_tol=residual_tol,
        draws=draws,
    )


def ends_of(searches: Sequence[RitzPairs]) -> dict[str, Array]:
    """λ_max and λ_min of several searches with their residuals, as columns; a single eigenvalue is both."""
    columns = {}
    for end, index in (("min", -1), ("max", 0)):
        columns[f"lambda_{end}"] = np.array([float(pairs.values[index]) for pairs in searches])
        columns[f"residual_{end}"] = np.array([float(pairs.residuals[index]) for pairs in searches])
    return columns


def _block(chosen: Matrix, slots: tuple[Slot, ...], result: SearchResult, count: int) -> Block:
    """The block with the ``count`` Ritz vectors of its search that have most of the trace."""
    values, turn = small_eigh(result.t)
    largest = np.argsort(-np.abs(values))[: count if np.isfinite(values).all() else 0]
    basis = result.basis.new_empty(len(largest), result.basis.shape[1])
    combine(result.basis, turn[:, largest].T, basis)
    doubt = traces.doubt_of(chosen.operator)
    return Block(slots, basis, float(values[largest].sum()), len(basis) * doubt(basis) if doubt else 0.0)


def _traces(
    whole: Matrix, blocks: Sequence[Block], draws: int, errors: Sequence[float], progress: Progress
) -> dict[str, Any]:
    """The traces and their shares, with errors, of the whole and of the blocks.

    ``errors``: of the products by differences with eigenvectors.
    """
    h, like, generator = whole.operator, whole.start(), stream(whole.seed, 1)
    step, samples, errors_sum = at_once(whole.source), [], np.array([block.doubt for block in blocks])
    for first in range(0, draws, step):
        z = ALONE.signs(like, min(step, draws - first), generator)
        for block in blocks:
            block.remove_basis(z)
        images = (h @ z.T).T
        samples.append(_inner(blocks, z, images))
        if first == 0 and h.derivatives == "differences":  # the others have the same distribution
            sure, most = h.verified(z[:1])
            sizes = np.array([float(vector_norm(cut(z[:1], block.slots))) for block in blocks])
            errors_sum += np.abs(_inner(blocks, z[:1], images[:1] - sure)[0]) + most[0] * sizes
        progress((first + len(z)) / draws)
    own_traces = np.concatenate(samples) + np.array([block.basis_trace for block in blocks])
    columns = np.column_stack((own_traces.sum(1), own_traces))
    errors_sum = np.append(errors_sum.sum(), errors_sum)
    trace, drawn_error = np.transpose([mean_and_error(column) for column in columns.T])
    error = np.hypot(drawn_error, errors_sum)
    share, share_error = np.full((2, len(trace)), np.nan)
    if abs(trace[0]) > SIGNIFICANT * error[0]:
        share = trace / trace[0]
        # Of the ratio of two means over the same draws (the delta method).
        rest = columns - np.outer(columns[:, 0], share)
        spread = [mean_and_error(column)[1] for column in rest.T]
        product_errors = np.append(0.0, errors_sum[1:] + np.abs(share[1:]) * errors_sum[0])
        share_error = np.hypot(spread, product_errors) / abs(trace[0])
    fields = {"trace": trace, "trace_error": error, "share": share, "share_error": share_error}
    return fields | {"product_error": max(errors_sum[0], *errors)}


def _inner(blocks: Sequence[Block], rows: Tensor, images: Tensor) -> Array:
    """z_bᵀ(Hz)_b of each row z and block b, (n, blocks)."""
    sums = [(double(cut(rows, block.slots)) * double(cut(images, block.slots))).sum(1) for block in blocks]
    return torch.stack(sums, 1).cpu().numpy()


# Of a critical multiple: the ratio of the two bounds at which its bisection ends, and the doublings of the
# step, or halvings, before it is given up (our choice: from 2 to 1.02 takes six losses).
WITHIN, DOUBLINGS = 1.02, 40


def change_need(problem: Any, derivatives: Any, **_: Any) -> Need:
    """The step, a part of it, its product, gradient and a moved vector of weights."""
    return needs.curved(problem, 6, derivatives=derivatives)


@analysis(change_need, shorter="a coarser by= or a part of the data", version=1)
def loss_change(
    problem: Problem | Run,
    before: Weights,
    after: Weights,
    by: str | Sequence[str] = "layer",
    *,
    lr: Positive | None = None,
    derivatives: Derivatives = "auto",
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> LossChange:
    """L(θ + d) − L(θ) = ⟨g, d⟩ + ½ dᵀHd + rest of a step d: in total, by layer, and between layers.

    The step is that which an optimizer really took, with momentum, weight decay, averaging and all. The terms
    of a group of parameters are ⟨g_a, d_a⟩ and ½ Σ_b d_aᵀH_ab d_b, of which b = a is the curvature within the
    group, and the others are between groups; the rest, of third order and more, has no parts. One product of
    the Hessian for each group.

    With it come the directional sharpness dᵀHd/‖d‖² (arXiv 2606.04662), and the critical multiple m, the
    smallest for which the loss at θ + md is above L(θ): the critical sharpness of arXiv 2601.16979 is 2/(αm)
    for a step with learning rate α. It is found by doubling or halving, and bisection, to 1%.

    Args:
        problem: the loss, or a run.
        before, after: θ and θ + d, (P,) each, or in another form that :func:`landscape.line` takes.
        by: the groups, as in :func:`landscape.curvature_table`.
        lr: α; default: the critical sharpness is not known.
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        A table with the whole in its first row and each group in another.

    Raises:
        InputError: weights of another model, or equal ones; a name that fits no parameter.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> change = landscape.loss_change(problem, torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0]))
        >>> change.gradient.round(3).tolist(), change.curvature.round(3).tolist()
        ([-0.5, -0.5], [0.125, 0.125])
        >>> round(change.critical_multiple, 1)
        4.0
    """
    problem = in_full_precision(problem_of(problem))  # half precision has two digits of a step
    before, after = (network_of(problem, *w).theta for w in ((before, "before"), (after, "after")))
    step = after - before
    norm = float(vector_norm(step))
    if not norm:
        raise InputError("after: it is equal to before, there must be a step between them")
    groups = problem.layout.groups(by)
    options: dict[str, Any] = {"weights": before, "derivatives": derivatives, "max_memory": max_memory}
    chosen = Matrix.of(problem, 0, about, **options, matrix="hessian", part=None)
    h = chosen.operator
    start, g = problem.loss_and_gradient(before)
    existing(start, g)
    if math.isnan(end := problem.loss(after)):
        raise OperationError("after: the loss there is NaN; take a shorter step")
    report = taken(progress)
    pieces = [[slot.place for slot in slots] for slots in groups.values()]

    def along(vector: Tensor) -> list[float]:
        """⟨vector_a, d_a⟩ for each group a."""
        return [sum(float(inner(vector[p], step[p])) for p in pieces_of_group) for pieces_of_group in pieces]

    between, error = np.zeros((len(groups), len(groups))), 0.0
    for k, slots in enumerate(groups.values()):
        part = put(torch.zeros_like(step), slots, cut(step, slots))
        images, errors = h.verified(part[None])
        error += errors[0] * norm / 2
        between[k] = np.array(along(images[0])) / 2
        report((k + 1) / (len(groups) + 1))
    between = (between + between.T) / 2
    gradient, curvature = np.array(along(g)), between.sum(1)
    return LossChange(
        **chosen.about,
        groups=(WHOLE, *groups),
        sizes=np.array([problem.layout.size, *(sum(s.size for s in slots) for slots in groups.values())]),
        gradient=np.array([gradient.sum(), *gradient]),
        curvature=np.array([curvature.sum(), *curvature]),
        within=np.array([np.trace(between), *np.diag(between)]),
        between=between,
        loss_before=start,
        loss_after=end,
        step_norm=norm,
        step_lr=math.nan if lr is None else lr,
        critical_multiple=_critical(
            lambda m: not problem.loss(torch.add(before, step, alpha=m)) <= start, gradient.sum()
        ),
        products=len(groups),
        product_error=error,
    )


def _critical(rises: Callable[[float], bool], slope: float) -> float:
    """The smallest multiple of a step at which the loss ``rises`` above its start; 0 for a step uphill.

    NaN where it does not rise within DOUBLINGS. A rise that lies between two multiples that were tried, with
    a lower loss behind it, is not seen.
    """
    if not slope < 0:
        return math.nan if math.isnan(slope) else 0.0
    factor = 0.5 if rises(1.0) else 2.0
    last = 1.0
    now = 1.0
    for _ in range(DOUBLINGS):
        last, now = now, now * factor
        if rises(now) == (factor > 1):
            break
    else:
        return math.nan
    low, high = sorted((last, now))
    while high > WITHIN * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rises(middle) else (middle, high)
    return math.sqrt(low * high)

"""The Hessian's spectrum, of the whole and of the parts of a network, and the loss's change in a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
from landscape.core.options import AtLeastTwo, Count, Positive, Seed, UpToOne, Within
from landscape.core.progress import Progress, ProgressOption, portion, reporter
from landscape.core.statistics import mean_and_error
from landscape.curvature import trace as traces
from landscape.curvature.double_backward import in_full_precision
from landscape.curvature.eigenvalues import Matrix, ends_need, top_need
from landscape.curvature.hessian import Derivatives, Part, Preconditioner
from landscape.curvature.operators import ALONE, SymmetricMatrix, combine, rows_of, small_eigh
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
from landscape.problem.losses import finite_gradient
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
    """Return the largest need of the quantities."""
    eigenvalues = max(k or 1, 1 + ("extremes" in quantities))
    memory_needs = [top_need(problem, eigenvalues, **options)] if k or "trace" not in quantities else []
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
    products: Annotated[int, Within(least=6)] = traces.TRACE_PRODUCTS,
    draws: Count = traces.DRAWS,
    steps: Count = traces.STEPS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Spectrum:
    """Compute eigenvalues, trace and density of ∇²L at the problem's center, together in one result.

    Args:
        problem: the loss, a run, or any symmetric matrix, as in :func:`landscape.extreme_eigenvalues`.
        k: the number of largest eigenvalues; default: none.
        quantities: further results: "extremes", the smallest and the largest eigenvalue; "trace", by Hutch++
            (Meyer et al. 2021); "density", by stochastic Lanczos quadrature (Ghorbani et al. 2019). Default:
            none, or "extremes" if ``k`` is not given.
        products: the number of Hessian-vector products for the trace.
        draws: the number of random vectors for the density.
        steps: the number of Lanczos steps for each random vector; one step takes one product.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters, to use only their diagonal block; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        precondition: a positive diagonal (P,), or a checkpoint's :func:`landscape.preconditioner`; all
            results are then of the preconditioned Hessian.
        engine: "landscape", or "pyhessian", which has only the eigenvalue of largest magnitude and the trace.
        search: "auto": to save time, the search may begin with products on only the samples with the most
            curvature; exact products then verify and refine the results. "exact": all products are exact.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000).
        max_products: the largest number of Hessian-vector products for the eigenvalues.
        seed: the seed of the starting vector and of the random vectors.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        values and residuals (k,), trace, trace_error, nodes and masses (draws, steps).

    Raises:
        InputError: an argument that is not allowed, or an operator that is not symmetric.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.spectrum(problem, quantities=("extremes", "trace"))
        >>> result.values.round(3).tolist(), round(result.trace, 3)
        ([9.0, 1.0], 10.0)
    """
    by_pyhessian = engine == "pyhessian"
    requested: set[str] = {*quantities}
    if not k and not requested:
        if by_pyhessian:
            k = 1
        else:
            requested = {"extremes"}
    unsupported = [name for name in QUANTITIES if name in requested - {"trace"}]
    if by_pyhessian and unsupported:
        raise InputError(f"engine: 'pyhessian' is not allowed with {unsupported[0]}, only with k=1 and trace")
    operand = Matrix.of(
        problem, seed, about, weights=None, matrix=matrix, part=part, derivatives=derivatives, search=search,
        max_memory=max_memory, engine=engine, precondition=precondition,
    )  # fmt: skip
    smallest_count = int("extremes" in requested)
    largest_count = max(k or 0, smallest_count)
    # Each stage has an equal share of the progress bar.
    stages = (largest_count > 0) + ("trace" in requested) + ("density" in requested)
    results: list[MatrixResult] = []

    def next_progress() -> Progress:
        return portion(progress, len(results) / stages, (len(results) + 1) / stages)

    if largest_count:
        report = next_progress()
        # ``target``: how many eigenvalues, and how exact. ``search``: whether all products are exact.
        target = SearchOptions(smallest_count, largest_count, residual_tol, max_products, report)
        results.append(Eigenpairs(**operand.eigenpair_fields(operand.start(), target, search)))
        report(1.0)
    if "trace" in requested:
        results.append(traces.trace_of(operand, products, next_progress()))
    if "density" in requested:
        results.append(traces.density_of(operand, draws, steps, next_progress()))
    return dataclasses.replace(Spectrum.of(*results), residual_tol=residual_tol)


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
        slots: the block's parameters.
        basis: Q, (m, P'), orthonormal Ritz vectors in its rows.
        basis_trace: tr(QHQᵀ).
        basis_trace_error: the error of ``basis_trace``; 0 for exact products.
    """

    slots: tuple[Slot, ...]
    basis: Tensor
    basis_trace: float
    basis_trace_error: float

    def remove_basis(self, rows: Tensor) -> None:
        """Remove the Ritz vectors' directions from ``rows`` (n, P), in place."""
        block_rows = cut(rows, self.slots)
        for _ in range(2):  # twice, as in Lanczos: once leaves rounding errors of the removed part
            block_rows -= inner(block_rows, self.basis).to(block_rows) @ self.basis
        put(rows, self.slots, block_rows)


def at_once(problem: Any) -> int:
    """Return the number of random vectors whose products are computed together."""
    return max(1, min(traces.BLOCK, needs.BASIS_BYTES // (4 * int(problem.weights.nbytes))))


def ritz_vector_count(problem: Any) -> int:
    """Return the number of Ritz vectors that are kept of each block."""
    return max(2, min(KNOWN, needs.BASIS_BYTES // int(problem.weights.nbytes)))


def table_need(problem: Any, derivatives: Any, **_: Any) -> Need:
    """Return the need of the Ritz vectors of all blocks, and a search or random vectors with products."""
    vectors = ritz_vector_count(problem) + max(1 + needs.basis(problem, 2), 4 * at_once(problem))
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
    draws: AtLeastTwo = TABLE_DRAWS,
    max_products: Count = MAX_PRODUCTS,
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> CurvatureTable:
    """Compute λ_max, λ_min and trace of ∇²L(θ) and of its diagonal blocks, one for each part of a network.

    The eigenvalues of each block come from its own Lanczos run over all samples. The traces of all blocks
    share products Hz with random vectors z over all parameters, because z_bᵀ(Hz)_b has the mean tr H_bb for
    every block b. The search of a block also finds Ritz vectors. The part of the block's trace along them is
    known from the search, so that random vectors estimate only the rest (as in Hutch++, Meyer et al. 2021).

    Args:
        problem: the loss, or a run.
        by: which parameters share a row of the table. "layer": those of one module. "block": those inside the
            outermost module that is named by a number, such as h.3 or layer1.0; outside such modules, as for
            "layer". "parameter": each tensor has a row. Or a list of names, prefixes and patterns (*.bias)
            with a row for each; the row "others" has the remaining parameters.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000). With the default 0.1,
            eigenvalues have smaller errors than 0.1: about 0.1 to 1% of λ_min, and less of λ_max.
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        draws: the number of random vectors for the traces; with 20, standard errors are right to about 16%.
        max_products: the most products of a row's search; ``met`` is False where the search needs more.
        seed: the seed of the starting vectors and the random vectors.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        A table with all parameters in the first row, and a block in each further row.

    Raises:
        InputError: an argument that is not allowed, a name that fits no parameter, or a matrix that is not
            symmetric.

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
    # All rows have the same kind of products, even where exact ones are possible for a block alone.
    if whole.operator.derivatives == "differences":
        derivatives = "differences"
    stages = len(groups) + 2  # a search for each row, and the traces: equal shares of the progress bar

    def search_row(matrix_of_row: Matrix, number: int) -> tuple[RitzPairs, SearchResult]:
        """Search both ends of the spectrum for row ``number`` of the table."""
        row_progress = portion(progress, number / stages, (number + 1) / stages)
        target = SearchOptions(1, 1, residual_tol, max_products, row_progress)  # one eigenvalue at each end
        pairs, result = search_operator(matrix_of_row.operator, matrix_of_row.start(), target)
        matrix_of_row.check(pairs.residuals)  # refuses residuals that are not finite
        return pairs, result

    row_pairs = [search_row(whole, 0)[0]]  # without the search's result, whose basis takes memory
    blocks: list[Block] = []
    for number, slots in enumerate(groups.values(), 1):
        names = [slot.name for slot in slots]
        block_matrix = Matrix.of(problem, seed, {}, **options, part=names, derivatives=derivatives)
        pairs, result = search_row(block_matrix, number)
        row_pairs.append(pairs)
        blocks.append(_block(block_matrix, slots, result, ritz_vector_count(problem)))
        del block_matrix, result  # frees the memory of graphs and basis for the next block
    traces_progress = portion(progress, 1 - 1 / stages, 1.0)
    fields = whole.about | ends_of(row_pairs) | _traces(whole, blocks, draws, traces_progress)
    # The larger of two errors: that of the whole trace, from ``_traces``, and that of the Hessian products in
    # the searches. Both are 0 for exact products.
    fields["product_error"] = max(fields["product_error"], *(pairs.product_error for pairs in row_pairs))
    return CurvatureTable(
        **fields,
        met=np.array([pairs.converged for pairs in row_pairs]),
        groups=(WHOLE, *groups),
        sizes=_row_sizes(whole.size, groups),
        products=sum(pairs.products for pairs in row_pairs) + draws,
        residual_tol=residual_tol,
        draws=draws,
    )


def _row_sizes(whole: int, groups: Mapping[str, Sequence[Slot]]) -> Array:
    """Return the number of parameters of all groups, ``whole``, and of each group."""
    return np.array([whole, *(sum(slot.size for slot in slots) for slots in groups.values())])


def ends_of(searches: Sequence[RitzPairs]) -> dict[str, Array]:
    """Return λ_max, λ_min and residuals of several searches; a single eigenvalue is both ends."""
    columns = {}
    for end, index in (("min", -1), ("max", 0)):
        columns[f"lambda_{end}"] = np.array([float(pairs.values[index]) for pairs in searches])
        columns[f"residual_{end}"] = np.array([float(pairs.residuals[index]) for pairs in searches])
    return columns


def _block(chosen: Matrix, slots: tuple[Slot, ...], result: SearchResult, count: int) -> Block:
    """Return the block with the ``count`` Ritz vectors of its search whose |eigenvalues| are largest."""
    values, rotation = small_eigh(result.t)
    largest = np.argsort(-np.abs(values))[:count]
    if not np.isfinite(values).all():
        largest = largest[:0]
    rows = rows_of(result.basis)
    basis = rows[0].new_empty(len(largest), len(rows[0]))
    combine(rows, rotation[:, largest].T, basis)
    form_error = traces.form_error_of(chosen.operator)
    basis_trace_error = len(basis) * form_error(basis) if form_error else 0.0
    return Block(slots, basis, float(values[largest].sum()), basis_trace_error)


def _traces(whole: Matrix, blocks: Sequence[Block], draws: int, progress: Progress) -> dict[str, Any]:
    """Return the traces, and their shares of the whole trace, of all parameters and of each block.

    The arrays (1 + blocks,) have all parameters in entry 0. ``product_error`` is the error of the trace of
    all parameters that is due to differences of gradients.

    Args:
        whole: the Hessian of all parameters.
        blocks: the blocks, with the Ritz vectors of their searches.
        draws: the number of random vectors.
        progress: called with the finished share of the draws.
    """
    h, template = whole.operator, whole.start()
    generator = ALONE.generator(stream(whole.seed, 1).initial_seed(), template)
    chunk = at_once(whole.source)
    forms = []  # for each chunk of z: z_bᵀ(Hz)_b, (chunk, blocks); z_b is orthogonal to the Ritz vectors of b
    # The errors (blocks,) that differences of gradients cause in the traces; 0 for exact products.
    product_errors = np.array([block.basis_trace_error for block in blocks])
    for start in range(0, draws, chunk):
        z = ALONE.signs(template, min(chunk, draws - start), generator)
        for block in blocks:  # z changes in place; the trace along the Ritz vectors is added below
            block.remove_basis(z)
        images = (h @ z.T).T
        forms.append(_block_products(blocks, z, images))
        # The errors of differences are measured at one draw, because all draws have the same distribution.
        if start == 0 and h.derivatives == "differences":
            verified_image, image_error = h.verified(z[:1])
            norms = np.array([float(vector_norm(cut(z[:1], block.slots))) for block in blocks])
            deviations = np.abs(_block_products(blocks, z[:1], images[:1] - verified_image)[0])
            product_errors += deviations + image_error[0] * norms
        progress((start + len(z)) / draws)
    block_traces = np.concatenate(forms) + np.array([block.basis_trace for block in blocks])
    columns = np.column_stack((block_traces.sum(1), block_traces))  # (draws, 1 + blocks)
    product_errors = np.append(product_errors.sum(), product_errors)  # of all parameters first
    trace, drawn_error = np.transpose([mean_and_error(column) for column in columns.T])
    error = np.hypot(drawn_error, product_errors)
    share = share_error = np.full(len(trace), np.nan)
    if abs(trace[0]) > SIGNIFICANT * error[0]:
        share = trace / trace[0]
        # A share is a ratio of two means over the same draws. By the delta method, the standard error of a
        # share is the standard error of the mean of these residuals, divided by the whole trace.
        residuals = columns - np.outer(columns[:, 0], share)
        drawn_share_error = [mean_and_error(column)[1] for column in residuals.T]
        product_share_error = np.append(0.0, product_errors[1:] + np.abs(share[1:]) * product_errors[0])
        share_error = np.hypot(drawn_share_error, product_share_error) / abs(trace[0])
    fields = {"trace": trace, "trace_error": error, "share": share, "share_error": share_error}
    return fields | {"product_error": product_errors[0]}


def _block_products(blocks: Sequence[Block], rows: Tensor, images: Tensor) -> Array:
    """Return z_bᵀ(Hz)_b (n, blocks) for each row z of ``rows``, its row Hz of ``images``, and block b."""
    sums = [(double(cut(rows, block.slots)) * double(cut(images, block.slots))).sum(1) for block in blocks]
    return torch.stack(sums, 1).cpu().numpy()


# Of a critical multiple: the ratio of the two bounds at which its bisection ends, and the doublings of the
# step, or halvings, before it is given up (our choice: from 2 to 1.02 takes six losses).
WITHIN, DOUBLINGS = 1.02, 40


def change_need(problem: Any, derivatives: Any, **_: Any) -> Need:
    """Return the need of the step, a part of it, its product, a gradient and moved weights."""
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
    """Divide the change L(θ + d) − L(θ) in a step d into ⟨g, d⟩ + ½ dᵀHd + remainder, in total and by layer.

    d is the step that an optimizer made, with momentum, weight decay and averaging; g and H are the gradient
    and the Hessian at θ. Group i of the parameters has the terms ⟨g_i, d_i⟩ and ½ Σ_j d_iᵀH_ij d_j. The
    second term is the curvature within the group (j = i) and between groups. The remainder, of third order
    and more, is not divided among groups.

    Further results are the directional sharpness dᵀHd/‖d‖² (arXiv 2606.04662) and the critical multiple,
    which is the smallest m with L(θ + md) > L(θ), with an error of 1%. The critical sharpness of arXiv
    2601.16979 is 2/(αm).

    Args:
        problem: the loss, or a run.
        before, after: θ and θ + d, (P,) each, or in another form that :func:`landscape.line` accepts.
        by: the groups, as in :func:`landscape.curvature_table`.
        lr: α, the learning rate of the step; without it, there is no critical sharpness.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        A table with all parameters in the first row, and a group in each further row.

    Raises:
        InputError: a vector of another length, a model with other layers, equal weights, or a name that fits
            no parameter.
        OperationError: tensors whose names or shapes do not fit the model, or weights, a loss or a gradient
            that are not finite.

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
    # In half precision, the difference of the two weight vectors would have only two correct digits.
    problem = in_full_precision(problem_of(problem))
    before = network_of(problem, before, "before").theta
    after = network_of(problem, after, "after").theta
    step = after - before
    norm = float(vector_norm(step))
    if not norm:
        raise InputError("after: it is equal to before, there must be a step between them")
    groups = problem.layout.groups(by)
    options: dict[str, Any] = {"weights": before, "derivatives": derivatives, "max_memory": max_memory}
    operand = Matrix.of(problem, seed=0, about=about, **options, matrix="hessian", part=None)
    h = operand.operator
    loss_before, g = problem.loss_and_gradient(before)
    finite_gradient(loss_before, g)  # refuses a loss or gradient that is not finite
    loss_after = problem.loss(after)
    if math.isnan(loss_after):
        raise OperationError("after: the loss there is NaN; take a shorter step")
    report = reporter(progress)

    def dots_with_step(vector: Tensor) -> Array:
        """Return ⟨vector_i, d_i⟩ for each group i."""
        sums = []
        for slots in groups.values():
            sums.append(sum(float(inner(vector[slot.place], step[slot.place])) for slot in slots))
        return np.array(sums)

    pair_terms = np.zeros((len(groups), len(groups)))  # ½ d_iᵀH_ij d_j of groups i and j
    product_error = 0.0
    for index, slots in enumerate(groups.values()):
        group_step = put(torch.zeros_like(step), slots, cut(step, slots))
        images, image_errors = h.verified(group_step[None])
        pair_terms[index] = dots_with_step(images[0]) / 2
        # The sum of these terms is ½ dᵀHd_i. Its error is at most ½‖d‖ times the error of the product Hd_i.
        product_error += image_errors[0] * norm / 2
        report((index + 1) / (len(groups) + 1))
    pair_terms = (pair_terms + pair_terms.T) / 2  # removes the asymmetry from errors of the products
    gradient = dots_with_step(g)
    curvature = pair_terms.sum(1)

    def rises(multiple: float) -> bool:
        loss = problem.loss(torch.add(before, step, alpha=multiple))
        return not loss <= loss_before  # True for NaN

    return LossChange(
        **operand.about,
        groups=(WHOLE, *groups),
        sizes=_row_sizes(problem.layout.size, groups),
        gradient=np.array([gradient.sum(), *gradient]),
        curvature=np.array([curvature.sum(), *curvature]),
        within=np.array([np.trace(pair_terms), *np.diag(pair_terms)]),
        between=pair_terms,
        loss_before=loss_before,
        loss_after=loss_after,
        step_norm=norm,
        step_lr=math.nan if lr is None else lr,
        critical_multiple=_critical(rises, gradient.sum()),
        products=len(groups),
        product_error=product_error,
    )


def _critical(rises: Callable[[float], bool], slope: float) -> float:
    """Return the smallest multiple of a step at which the loss ``rises`` above its start.

    It is 0 if the step leads uphill (``slope`` ≥ 0), and NaN if the loss does not rise within DOUBLINGS. A
    rise between two multiples is missed if the loss has fallen again at the larger multiple.
    """
    if not slope < 0:
        return math.nan if math.isnan(slope) else 0.0
    factor = 0.5 if rises(1.0) else 2.0
    multiple = last_multiple = 1.0
    for _ in range(DOUBLINGS):
        last_multiple, multiple = multiple, multiple * factor
        if rises(multiple) == (factor > 1):
            break
    else:
        return math.nan
    low, high = sorted((last_multiple, multiple))
    while high > WITHIN * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rises(middle) else (middle, high)
    return math.sqrt(low * high)

"""The trace of the Hessian, and the density of its spectrum."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.analysis import analysis
from landscape.core.devices import double
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import Count, Seed, Within
from landscape.core.progress import Progress, ProgressOption, no_progress, reporter
from landscape.core.statistics import mean_and_error
from landscape.curvature import peers
from landscape.curvature.eigenvalues import Matrix
from landscape.curvature.hessian import Derivatives, Part
from landscape.curvature.operators import (
    ALONE,
    READ,
    Products,
    Ranks,
    SymmetricMatrix,
    SymmetricOperator,
    negligible,
    orthogonalize,
    read_columns,
    small_eigh,
)
from landscape.curvature.search import run_in_lockstep, start_vector
from landscape.evaluation import needs
from landscape.evaluation.needs import BASIS_BYTES
from landscape.problem.layout import Vector
from landscape.problem.problem import Problem, Run
from landscape.results.base import Provenance
from landscape.results.spectrum import Density, Trace

# Ghorbani, Krishnan and Xiao 2019 use 10 draws of 80 to 90 steps for networks of all sizes.
DRAWS = 10
STEPS = 80
# Vectors of a trace's products at once: on 2 cores more are no faster.
BLOCK = 8


def _quadrature(start: Tensor, steps: int, ranks: Ranks) -> Generator[Tensor, Tensor, tuple[Array, Array]]:
    """Return the nodes and masses (steps,) of the Lanczos quadrature that begins with ``start`` (P,).

    This generator yields vectors (P,), and receives their products. If the Lanczos steps end early, the
    missing nodes have mass 0.
    """
    vectors = start.new_zeros(steps, len(start))
    vectors[0] = start
    t = np.zeros((steps, steps))
    # On a GPU several columns of t are read at once, because each read waits for the device.
    columns_per_read = 1 if start.device.type == "cpu" else READ
    unread_columns = list[Tensor]()
    count = 0  # Lanczos steps whose columns are in t
    for j in range(steps):
        w = yield vectors[j]
        w, column = orthogonalize(w, [vectors[: j + 1]], ranks)
        unread_columns.append(column)
        if len(unread_columns) < columns_per_read and j + 1 < steps:
            # column[-1] is β, the norm of w. The clamp avoids 0/0.
            vectors[j + 1] = w / column[-1].clamp(min=torch.finfo(w.dtype).tiny)
            continue
        # One iteration for each unread step i: read_columns writes column i of t, and yields i and its β.
        for i, beta in read_columns(t, unread_columns, j):
            count, largest = i + 1, float(np.abs(t).max())
            # A product that is not finite, or a space that the matrix maps to itself, also ends the steps.
            is_last = count == steps or not beta < np.inf or negligible(beta, largest, start.dtype)
            if is_last:
                break
        if is_last:
            break
        unread_columns.clear()
        vectors[j + 1] = w / beta
    values, s = small_eigh(t[:count, :count])
    nodes, masses = np.full(steps, values[0]), np.zeros(steps)
    nodes[:count] = values
    masses[:count] = s[0] ** 2
    return nodes, masses


def density_need(problem: Any, draws: Any, steps: Any, part: Any, derivatives: Any, **_: Any) -> Need:
    """The bases of the draws that are computed together."""
    size = needs.size(problem, part)
    basis = min(steps, size)
    at_once = max(1, min(draws, BASIS_BYTES // (basis * size * int(problem.weights.itemsize))))
    return needs.curved(problem, at_once * (basis + 4), part=part, derivatives=derivatives)


@analysis(density_need, shorter="a smaller draws= or steps= or a part of the data")
def density(
    problem: Problem | Run | SymmetricMatrix,
    draws: Count = DRAWS,
    steps: Count = STEPS,
    *,
    weights: Vector | None = None,
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    part: Part = None,
    derivatives: Derivatives = "auto",
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Density:
    """Estimate the spectral density of ∇²L(θ) by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017).

    Args:
        problem: the loss, a run, or a symmetric matrix, as in :func:`landscape.extreme_eigenvalues`.
        draws: the number of random vectors, one for each quadrature.
        steps: the number of Lanczos steps for each draw; one step takes one product.
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters, to use only their diagonal block; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        seed: the seed of the random vectors.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Nodes and masses, (draws, steps) each; the masses of a draw sum to 1.

    Raises:
        InputError: a count below 1, an unknown option, or a matrix that is not symmetric.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> landscape.density(problem, draws=2, steps=5).nodes.shape
        (2, 5)
    """
    options = {"weights": weights, "matrix": matrix, "part": part, "derivatives": derivatives}
    operand = Matrix.of(problem, seed, about, **options, max_memory=max_memory)
    return density_of(operand, draws, steps, reporter(progress))


def density_of(operand: Matrix, draws: int, steps: int, progress: Progress | None) -> Density:
    """Return the spectral density of the matrix A (P, P) of ``operand``, by stochastic Lanczos quadrature.

    See Ubaru, Chen and Saad 2017, section 3. Each draw z of random signs starts ``steps`` Lanczos steps with
    full reorthogonalization. These give a tridiagonal matrix T. The nodes are the eigenvalues of T, and the
    masses are the squared first components of the eigenvectors of T. The quadrature Σ mass·p(node) equals
    zᵀp(A)z/P for any polynomial p of degree below 2·steps.
    """
    a, template = operand.operator, operand.start()  # A, and a vector (P,) of the wanted dtype and device
    rng = a.ranks.generator(operand.seed, template)
    size = a.ranks.size(template)
    steps = min(steps, size)
    basis_bytes = steps * a.ranks.local_size(template) * template.itemsize  # for one draw
    draws_at_once = max(1, min(draws, BASIS_BYTES // basis_bytes))
    report = progress or no_progress
    products = 0

    def counted_products(vectors: Tensor, _: list[int]) -> Tensor:
        nonlocal products
        products += len(vectors)
        report(min(1.0, products / (draws * steps)))
        return (a @ vectors.T).T

    quadratures: list[tuple[Array, Array]] = []
    for i in range(0, draws, draws_at_once):
        count = min(draws_at_once, draws - i)
        starts = [a.ranks.signs(template, 1, rng)[0] / size**0.5 for _ in range(count)]
        lanczos_runs = [_quadrature(start, steps, a.ranks) for start in starts]
        quadratures += run_in_lockstep(lanczos_runs, counted_products)
    nodes, masses = (np.stack(arrays) for arrays in zip(*quadratures, strict=True))
    error = _product_error(operand)
    return Density(**operand.about, nodes=nodes, masses=masses, products=products, product_error=error)


# Vectors of each kind whose products' errors are measured (our choice: the rest have the same distribution).
MEASURED = 2
FormError = Callable[[Tensor], float]


def form_error_of(h: SymmetricOperator) -> FormError | None:
    """Return the function from rows v (n, P) to the mean error of the forms vᵀHv; None for exact products.

    The error comes from products that are differences of gradients.
    """
    if h.derivatives == "exact":
        return None

    def form_error(rows: Tensor) -> float:
        rows = rows[:MEASURED]
        quick_images = (h @ rows.T).T
        images, image_errors = h.verified(rows)
        deviations = h.ranks.total((double(quick_images - images) * double(rows)).sum(1)).abs().cpu()
        return float((deviations + torch.tensor(image_errors) * h.ranks.norm(rows).cpu()).mean())

    return form_error


def _product_error(operand: Matrix) -> float:
    """Return the largest error of products with two random vectors of norm 1; 0 for exact products."""
    h, seed = operand.operator, operand.seed
    if h.derivatives == "exact":
        return 0.0
    rows = torch.stack([start_vector(h, s) for s in (seed, seed + 1)])
    rows = rows / h.ranks.norm(rows).to(rows)[:, None]
    quick_images = (h @ rows.T).T
    images, image_errors = h.verified(rows)
    return float(h.ranks.norm(quick_images - images).max()) + max(image_errors)


# A third of these products, 20, are the samples of the standard error. 20 samples give the standard error to
# about 16% (our choice).
TRACE_PRODUCTS = 60


def hutchpp(
    operator: Products,
    like: Tensor,
    *,
    products: Annotated[int, Within(6)] = TRACE_PRODUCTS,
    seed: Seed = 0,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    quadratic_form_error: FormError | None = None,
) -> dict[str, Any]:
    """Return tr A of a symmetric operator A (P, P), by Hutch++ (Meyer et al. 2021, Algorithm 1).

    A third of the products gives AS for random signs S. Q is an orthonormal basis of the range of AS. Another
    third gives tr(QᵀAQ). The last third gives samples gᵀ(I − QQᵀ)A(I − QQᵀ)g for random signs g; their mean
    estimates tr A − tr(QᵀAQ) without bias. The standard error of tr A is the standard error of this mean.

    Args:
        operator: the products with A, (k, P) -> (k, P) for k up to 8.
        like: (P,), a vector of the wanted dtype and device.
        products: the number of products, at least 6: the last third then has two samples.
        seed: the seed of the random signs.
        progress: called with the finished share of the products.
        ranks: the processes that hold the vectors.
        quadratic_form_error: a function from rows v (k, P) to the mean error of vᵀAv, which enters the
            standard error; None for exact products.

    Returns:
        Fields of :class:`landscape.Trace`.
    """
    rng = ranks.generator(seed, like)
    size = ranks.size(like)
    basis_size = min(products // 3, size)
    report = progress or no_progress
    used_products = 0

    def images_of(rows: Tensor) -> Tensor:
        nonlocal used_products
        images = []
        for block in torch.split(rows, BLOCK):
            images.append(operator(block))
            used_products += len(block)
            report(min(1.0, used_products / products))
        return torch.cat(images)

    # Q as rows (basis_size, P), in one expression, so that the memory of signs and images is freed at once.
    q = ranks.orthonormal(images_of(ranks.signs(like, basis_size, rng))).contiguous()
    product_error = basis_size * quadratic_form_error(q) if quadratic_form_error else 0.0
    trace_on_q = float(ranks.total((double(q) * double(images_of(q))).sum()))
    if basis_size == size:  # Q spans the whole space: tr(QᵀAQ) = tr A
        fields = {"value": trace_on_q, "standard_error": product_error, "draws": np.array([trace_on_q])}
        return {**fields, "products": used_products, "product_error": product_error}
    g = ranks.signs(like, products - 2 * basis_size, rng)
    for _ in range(2):  # the second subtraction removes rounding errors of the first
        g -= ranks.inner(g, q).to(q) @ q
    samples = ranks.total((double(g) * double(images_of(g))).sum(1))
    draws = trace_on_q + samples.cpu().numpy()
    product_error += quadratic_form_error(g) if quadratic_form_error else 0.0
    return {**_mean_fields(draws, used_products, product_error), "product_error": product_error}


def _mean_fields(draws: Array, products: int, product_error: float = 0.0) -> dict[str, Any]:
    """Return the fields of a trace: the mean of ``draws``, and a standard error with ``product_error``."""
    value, error = mean_and_error(draws)
    total_error = float(np.hypot(error, product_error))
    return {"value": value, "standard_error": total_error, "draws": draws, "products": products}


def trace_need(problem: Any, products: Any, part: Any, derivatives: Any = "auto", **_: Any) -> Need:
    """A third of the products: signs, images and an orthonormal basis, and what QR copies."""
    vectors = 6 * products / 3 + BLOCK
    return needs.curved(problem, vectors, part=part, derivatives=derivatives)


@analysis(trace_need, shorter="a smaller products= or a part of the data")
def trace(
    problem: Problem | Run | SymmetricMatrix,
    products: Annotated[int, Within(6)] = TRACE_PRODUCTS,
    *,
    weights: Vector | None = None,
    matrix: Literal["hessian", "gauss-newton"] = "hessian",
    part: Part = None,
    derivatives: Derivatives = "auto",
    engine: Literal["landscape", "pyhessian"] = "landscape",
    seed: Seed = 0,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Trace:
    """Estimate tr ∇²L(θ), with its standard error, by Hutch++ (Meyer et al. 2021).

    Args:
        problem: the loss, a run, or a symmetric matrix, as in :func:`landscape.extreme_eigenvalues`.
        products: the most Hessian-vector products, at least 6.
        weights: θ (P,); default: the problem's center.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters, to use only their diagonal block; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        engine: "landscape", or "pyhessian" for that package's Hutchinson estimate, one sample per product.
        seed: the seed of the random signs.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The estimate and its standard error.

    Raises:
        InputError: fewer than 6 products, an unknown option, an option that pyhessian does not have, or a
            matrix that is not symmetric.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> round(landscape.trace(problem).value, 5)
        2.0
    """
    options = {"weights": weights, "matrix": matrix, "part": part, "derivatives": derivatives}
    operand = Matrix.of(problem, seed, about, **options, engine=engine, max_memory=max_memory)
    return trace_of(operand, products, reporter(progress))


def trace_of(operand: Matrix, products: int, progress: Progress | None) -> Trace:
    """The trace of a matrix, by :func:`hutchpp` or by pyhessian."""
    seed = operand.seed
    if isinstance(operand.source, Problem) and operand.about["engine"] == "pyhessian":
        draws = peers.trace_samples(operand.source, operand.weights, products=products, seed=seed)
        operand.check(torch.from_numpy(draws))
        return Trace(**operand.about, **_mean_fields(draws, products))
    h = operand.operator
    options: dict[str, Any] = {"products": products, "seed": seed, "progress": progress}
    options |= {"quadratic_form_error": form_error_of(h), "ranks": h.ranks}
    return Trace(**operand.about, **hutchpp(lambda rows: (h @ rows.T).T, operand.start(), **options))

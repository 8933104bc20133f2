"""Symmetric matrices that are known by their products with vectors, and Lanczos iterations with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from landscape.core.devices import (
    LONG,
    double,
    finite,
    generator,
    inner,
    normal,
    part_length,
    vector_norm,
    widest_dtype,
)
from landscape.core.errors import InputError, LandscapeError, OperationError, first_words
from landscape.core.hdf5 import Array
from landscape.core.options import fit
from landscape.evaluation.needs import max_basis_size, min_basis_size

#: A function from vectors (k, size), one a row, to their products with a matrix, (k, size).
Products = Callable[[Tensor], Tensor]


class SymmetricMatrix(Protocol):
    """An object with ``shape`` and ``@``: a matrix, or a linear operator, of whatever package."""

    @property
    def shape(self) -> Any:
        """The dimensions, (size, size)."""

    def __matmul__(self, block: Any) -> Any:
        """The product with a block of vectors (size, m)."""


def qr(columns: Tensor) -> tuple[Tensor, Tensor]:
    """The QR decomposition, with columns of Q whose norm is 1; LAPACK's are 2% off for 10⁸ numbers."""
    q, r = torch.linalg.qr(columns)
    sizes = vector_norm(q.T).to(q)
    return q / sizes, r * sizes[:, None]


class Ranks:
    """The processes that hold vectors: one, which has them whole.

    A subclass is about vectors of which each of several processes holds a part.
    """

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes of what each computed of its part, such as of an inner product."""
        return values

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner products of the rows of ``a`` and of ``b``, see :func:`.inner`."""
        return self.total(inner(a, b))

    def norm(self, v: Tensor) -> Tensor:
        """The norm of a vector, or the norms of the rows of a matrix, see :func:`.vector_norm`."""
        return vector_norm(v)

    def size(self, v: Tensor) -> int:
        """The number of dimensions of the space of ``v``."""
        return len(v)

    def local_size(self, v: Tensor) -> int:
        """The count of numbers of ``v`` that a process holds, at most."""
        return len(v)

    def generator(self, seed: int, like: Tensor) -> torch.Generator:
        """Return the generator of random vectors like ``like``, see :func:`.devices.generator`."""
        return generator(seed, like.device, len(like))

    def normal(self, like: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        """Return a normal vector like ``like``, see :func:`.devices.normal`."""
        return normal(len(like), generator, dtype).to(like)

    def signs(self, like: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Vectors of random signs ±1 like ``like``, as ``count`` rows."""
        dtype = torch.int8 if generator.device.type == "cpu" else torch.float32  # all devices draw float32
        draw = torch.empty(count, len(like), dtype=dtype, device=generator.device)
        return draw.random_(2, generator=generator).to(like).mul_(2).sub_(1)

    def orthonormal(self, rows: Tensor) -> Tensor:
        """Orthonormal rows, as many as ``rows``, whose span contains these."""
        return qr(rows.T)[0].T


ALONE = Ranks()


class SymmetricOperator:
    """A real symmetric matrix A (size, size), known by its products with vectors.

    ``A @ v`` takes a vector (size,) or a block of vectors (size, m), and so does ``A(v)``. A subclass
    computes the products in :meth:`_images`, or has ``differences``.

    Attributes:
        matrix: what it is, such as "hessian".
        size: the length of the vectors.
        dtype, device: the arithmetic of the products, and where they are computed.
        products: the number of products so far; a block counts as its m vectors.
        ranks: the processes that hold its vectors.
        derivatives: "exact", or "differences" of gradients, whose errors :meth:`verified` measures.
        arithmetic: the precision of the products, in words.
        differences: the products, where they are these.
    """

    matrix: str
    size: int
    dtype: torch.dtype
    device: torch.device
    products: int = 0
    ranks: Ranks = ALONE
    derivatives: str = "exact"
    arithmetic: str = ""
    differences: Any = None

    def verified(self, rows: Tensor) -> tuple[Tensor, list[float]]:
        """The products with several vectors, and the largest errors that they may have.

        Args:
            rows: vectors (m, size), one a row.

        Returns:
            (images (m, size), errors): the length of an image's error is at most the error of that row, as it
            was measured for differences of gradients; 0 for exact products.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
            >>> images, errors = problem.hessian(derivatives="differences").verified(torch.eye(2))
            >>> images.round(decimals=3).tolist(), max(errors) < 1e-6
            ([[1.0, 0.0], [0.0, 9.0]], True)
        """
        images, errors = self._measured(rows)
        return self._finite(rows, images), errors

    def _measured(self, rows: Tensor) -> tuple[Tensor, list[float]]:
        """The same as :meth:`verified` gives, also NaN or infinite products."""
        self.products += len(rows)
        if self.differences is None:
            return self._images(rows), [0.0] * len(rows)
        images, errors = zip(*map(self.differences.measured, rows), strict=True)
        return torch.stack(images).to(rows), list(errors)

    @property
    def shape(self) -> tuple[int, int]:
        """The dimensions of the matrix, (size, size)."""
        return self.size, self.size

    def _images(self, rows: Tensor) -> Tensor:
        """The products with the rows of ``rows``, (m, size) -> (m, size), also NaN or infinite ones."""
        return torch.stack([self.differences.product(row) for row in rows]).to(rows)

    def _finite(self, rows: Tensor, images: Tensor) -> Tensor:
        """``images``, the products with ``rows``; an error where they are not finite, and the rows are."""
        if not finite(images) and finite(rows):
            raise self._not_finite()
        return images

    def _not_finite(self) -> LandscapeError:
        return OperationError(
            f"problem: products of the {self.matrix} are NaN or infinite, they must be finite"
        )

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector (size,) or a block (size, m), a tensor or an array as ``v`` is."""
        if isinstance(v, np.ndarray):
            return (self @ torch.tensor(v, device=self.device)).cpu().numpy()
        fit("v", v, Tensor)
        if v.dim() not in (1, 2) or len(v) != self.size or not v.is_floating_point():
            what = f"shape {tuple(v.shape)} of {str(v.dtype).removeprefix('torch.')}"
            raise InputError(f"v: {what}, it must be ({self.size},) or ({self.size}, m) of real numbers")
        rows = v[None] if v.dim() == 1 else v.T.contiguous()
        self.products += len(rows)
        images = self._finite(rows, self._images(rows))
        return images[0] if v.dim() == 1 else images.T

    __call__ = __matmul__

    def to_scipy(self) -> Any:
        """The matrix as an operator of SciPy, for its eigenvalue and equation solvers.

        Returns:
            A ``scipy.sparse.linalg.LinearOperator`` with ``matvec`` and ``matmat`` of NumPy arrays, in the
            precision of the matrix.

        Example:
            >>> import torch, landscape
            >>> from scipy.sparse.linalg import eigsh
            >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
            >>> round(float(eigsh(problem.hessian().to_scipy(), k=1, which="LA")[0][0]), 3)
            9.0
        """
        from scipy.sparse.linalg import LinearOperator  # only here: it would slow down every import

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype

        def image(v: Any) -> Any:
            return self @ np.asarray(v, dtype=dtype)

        every = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), image)
        return LinearOperator(self.shape, dtype=dtype, **every)


# Random vectors of the test of symmetry, as of the Hessian's.
VECTORS = 4


def rounding_of(images: Tensor, of_sum: Tensor, dtype: torch.dtype) -> float:
    """How far products (m, P) in ``dtype`` may be off by rounding; ``of_sum``: that of the vectors' sum.

    Products are linear in v, except for rounding, which is therefore what this measures.
    """
    difference = float(vector_norm(images.sum(0) - of_sum))
    largest = float(vector_norm(images).max())
    return 100 * difference + math.sqrt(torch.finfo(dtype).eps) * largest


class GivenOperator(SymmetricOperator):
    """The symmetric matrix of an object with ``shape`` and ``@``: of SciPy, curvlinops, NumPy or PyTorch.

    What has the precision of PyTorch, or none, is multiplied with blocks of tensors (size, m), other objects
    with arrays. Raises InputError for a matrix that is not square, not of real floating-point numbers, or not
    symmetric, and for products that fail.
    """

    def __init__(self, matrix: Any) -> None:
        self._multiplier, self.matrix = matrix, type(matrix).__name__
        shape = tuple(matrix.shape)
        if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
            raise InputError(f"problem: a {self.matrix} of shape {shape}, it must be square, (P, P)")
        self.size, dtype = shape[0], getattr(matrix, "dtype", None) or torch.get_default_dtype()
        self._tensors = isinstance(dtype, torch.dtype)
        self.dtype = dtype if self._tensors else torch.from_numpy(np.empty(0, dtype)).dtype
        if not self.dtype.is_floating_point:
            raise InputError(f"problem: a {self.matrix} of {dtype}, it must be of floating-point numbers")
        self.device = torch.device(getattr(matrix, "device", "cpu") if self._tensors else "cpu")
        self._check_symmetric()

    def _images(self, rows: Tensor) -> Tensor:
        block: Any = rows.T.to(self.device, self.dtype, copy=True)  # it may write to what it gets
        images = torch.as_tensor(self._multiplier @ (block if self._tensors else block.numpy())).detach()
        if images.shape != block.shape:
            raise ValueError(f"it has the shape {tuple(images.shape)}")
        return images.T.to(rows)

    def _check_symmetric(self) -> None:
        """Raise InputError where uᵀAv and vᵀAu of random u and v differ by more than rounding."""
        draws = normal((VECTORS, self.size), generator(0, self.device, self.size))
        rows = torch.cat((draws, draws.sum(0, keepdim=True))).to(self.device, self.dtype)
        try:
            *images, whole = double(self._images(rows))
        except Exception as error:  # the user's object raises any kind of error
            words = f"{self.matrix} fails ({first_words(error)})"
            raise InputError(f"problem: a {words}, A @ V must take a block V (P, m)") from error
        products = self._finite(rows, torch.stack(images))
        pairs = products @ double(rows[:-1]).T
        asymmetry = float((pairs - pairs.T).abs().max())
        if not asymmetry <= rounding_of(products, whole, self.dtype):  # NaN is refused, too
            words = f"uᵀAv and vᵀAu of random u and v differ by {asymmetry:.2g}"
            raise InputError(f"problem: a {self.matrix} is not symmetric, it must be: {words}")


def as_operator(candidate: Any) -> SymmetricOperator | None:
    """The operator that ``candidate`` is, or whose products it has; None for what has no ``shape`` and ``@``.

    Raises:
        InputError: a matrix that is not symmetric (:class:`GivenOperator`).

    Example:
        >>> as_operator(np.eye(3)).shape
        (3, 3)
    """
    if isinstance(candidate, SymmetricOperator):
        return candidate
    is_matrix = hasattr(candidate, "shape") and hasattr(type(candidate), "__matmul__")
    return GivenOperator(candidate) if is_matrix else None


def row_products(operator: SymmetricOperator) -> Products:
    """The products of ``operator`` with vectors that are rows, (k, size) -> (k, size)."""
    return lambda rows: (operator @ rows.T).T


# Numbers of each vector that are combined at once (our choice).
COLUMNS = 2**20
# In its first EARLY_PRODUCTS products (ARPACK's basis) a search must have been converged for STABLE_PRODUCTS
# of them: from a random start with little of λ_max's vector in it, 5 of 60 searches on MNIST's MLPs stayed at
# the second largest eigenvalue for 2 to 4 products, before their twelfth.
STABLE_PRODUCTS, EARLY_PRODUCTS = 5, 20
# An end smaller than this share of the spectral radius counts as zero, and may be zero exactly (our choice).
NEAR_ZERO = 1e-3
# The probability with which a bound on unseen eigenvalues may fail (our choice, as usual for error bars).
RISK = 0.01


class Basis:
    """The first ``count`` vectors of a search, as rows (P,) in blocks of memory.

    On the CPU there is one block, whose memory the system allocates as rows are written. Another device
    would allocate all of it at once; there, blocks have ``least`` rows, and are allocated when their first
    row is needed. The memory of the first ``least`` rows is allocated now.
    """

    def __init__(self, like: Tensor, count: int, least: int) -> None:
        self._like, self._count = like, count
        self._step = count if like.device.type == "cpu" else min(least, count)
        self._blocks = list[Tensor]()
        self[0]
        self._blocks[0][:least] = 0  # takes its memory

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, j: int) -> Tensor:
        number, row = divmod(j, self._step)
        if number == len(self._blocks):
            rows = min(self._step, self._count - j)
            self._blocks.append(self._like.new_empty(rows, len(self._like)))
        return self._blocks[number][row]

    def first(self, count: int) -> list[Tensor]:
        """Return the first ``count`` rows, as one matrix for each block."""
        firsts = range(0, count, self._step)
        return [block[: count - i] for i, block in zip(firsts, self._blocks, strict=False)]


def rows_of(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows (P,) of several matrices."""
    return [row for block in blocks for row in block]


# Devices other than the CPU multiply rows in pieces of this many numbers, in one product for all rows.
WIDTH = 2**14


def coefficients(basis: Sequence[Tensor], w: Tensor, ranks: Ranks = ALONE) -> list[Tensor]:
    """Return the inner products of ``w`` (P,) with the rows of each block of a basis."""
    whole = len(w) // WIDTH * WIDTH
    if w.device.type == "cpu" or not whole:
        return [ranks.inner(block, w).to(w) for block in basis]
    column, dtype = w[:whole].view(-1, WIDTH, 1), widest_dtype(w.device)
    totals = []
    for block in basis:
        products = torch.bmm(block[:, :whole].view(len(block), -1, WIDTH).transpose(0, 1), column)
        sums = products.sum(0, dtype=dtype)[:, 0] + block[:, whole:] @ w[whole:]
        totals.append(ranks.total(sums.to(w)).to(w))  # in one precision on all ranks
    return totals


def orthogonalize(w: Tensor, basis: Sequence[Tensor], ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """Return the part of ``w``, the product with a basis's last vector, that is orthogonal to the basis.

    ``basis``: matrices whose j + 1 rows are orthonormal. The second result (j + 2,), on the device, is the
    operator's column in that basis and, last, the norm β of the first result: w/β is the next vector.
    """
    first: list[Tensor] = []
    for _ in range(2):  # twice is enough (Kahan and Parlett) for orthogonality to rounding
        parts = coefficients(basis, w, ranks)
        for block, c in zip(basis, parts, strict=True):
            w = torch.addmv(w, block.T, c, alpha=-1)
        first = first or parts
    return w, torch.cat([*map(torch.add, first, parts), ranks.norm(w)[None]])


# Steps of Lanczos whose columns are read together from a device other than the CPU, so that it does not wait
# for the host after each step. A search may then take up to READ − 1 products too many. Above LONG numbers
# they cost more than waiting, and each step is read (our choice).
READ = 10


def read_columns(t: Array, columns: list[Tensor], j: int) -> Iterator[tuple[int, float]]:
    """Read the ``columns`` of the last Lanczos steps, up to step j, into ``t``; yield each step and its β."""
    numbers = (torch.cat(columns) if len(columns) > 1 else columns[0]).cpu().double().numpy()
    for i in range(j + 1 - len(columns), j + 1):
        t[: i + 1, i] = t[i, : i + 1] = numbers[: i + 1]
        beta, numbers = float(numbers[i + 1]), numbers[i + 2 :]
        yield i, beta


def small_eigh(t: Array) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors of a small symmetric matrix; NaN where it is not finite.

    By PyTorch: the threads of NumPy's library keep spinning for a while, which slows the next products.
    """
    if not np.isfinite(t).all():  # LAPACK fails on these
        return np.full(len(t), np.nan), np.full(t.shape, np.nan)
    values, s = torch.linalg.eigh(torch.from_numpy(t))
    return values.numpy(), s.numpy()


def combine(
    rows: Sequence[Tensor] | Tensor, weights: Array, into: Sequence[Tensor] | Tensor | None = None
) -> None:
    """Write the combinations ``weights`` (m, n), m ≤ n, of the first n rows (P,) into m rows.

    These are the first of the same rows, if no others are given. COLUMNS numbers of each at once: another
    such matrix would take much memory, and a product of all at once takes a copy of it besides.
    """
    into = rows if into is None else into
    for first in range(0, len(rows[0]), COLUMNS):
        part = slice(first, first + COLUMNS)
        old = torch.stack([row[part] for row in rows[: weights.shape[1]]])
        for row, new in zip(into, torch.from_numpy(weights.copy()).to(old) @ old, strict=False):
            row[part] = new


def gram(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """The inner products (m, n) of two lists of vectors (P,) in float64, in parts."""
    total = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    length = part_length(rows[0].device)
    for first in range(0, len(rows[0]), length):
        part = slice(first, first + length)
        a, b = (torch.stack([v[part] for v in vectors]) for vectors in (rows, columns))
        total += (a @ b.T).cpu()
    return total


def negligible(beta: float, radius: float, dtype: torch.dtype) -> bool:
    """Return whether the rest of a Lanczos step is rounding: the basis then spans an invariant subspace.

    100 times the precision is more than rounding makes in small matrices, and far below any tolerance.
    """
    return beta <= 100 * torch.finfo(dtype).eps * max(radius, float(np.finfo(float).tiny))


def outer_indices(values: Array, low: int, high: int) -> Array:
    """Indices of the ``low`` smallest and ``high`` largest of ``values``, by descending value."""
    order = np.argsort(values)[::-1]
    rank = np.arange(len(order))
    chosen: Array = order[(rank < high) | (rank >= len(order) - low)]
    return chosen.copy()


class KrylovSpace(NamedTuple):
    """The Ritz pairs of one Krylov space, and the space.

    In the orthonormal ``basis``, j rows (P,) in blocks, the operator is ``t`` (j, j). The image of the last
    of these vectors has also the part ``rest`` (P,), orthogonal to the basis. ``before_restart``: the
    tridiagonal t and ‖rest‖ before the first restart.
    """

    values: Array
    vectors: Tensor
    products: int
    converged: bool
    invariant: bool
    radius: float
    basis: list[Tensor]
    t: Array
    rest: Tensor
    before_restart: tuple[Array, float]


def krylov(
    start: Tensor, locked: Tensor, radius: float, low: int, high: int, residual_tol: float, budget: int,
    ranks: Ranks, report_ratio: Callable[[float], None] = lambda ratio: None,
) -> Generator[Tensor, Tensor, KrylovSpace]:  # fmt: skip
    """Build a Krylov space orthogonal to ``locked`` (m, P), with thick restarts (Wu and Simon 2000).

    This generator yields vectors (P,), receives their products, and returns the wanted Ritz pairs. These are
    the ``low`` smallest and the ``high`` largest, or all pairs of an invariant space.

    Args:
        start: (P,), the first vector; it is made orthogonal to ``locked``, and its norm 1, here.
        radius: the largest |λ| so far; rounding errors are in proportion to it.
        residual_tol: the largest residual of a wanted pair, as in :func:`.search_eigenpairs`.
        budget: the most products.
        report_ratio: takes, after each product, the largest ratio of a residual to its tolerance.
    """

    def projected(w: Tensor) -> Tensor:  # the component of w that is orthogonal to the locked vectors
        return w - locked.T @ ranks.inner(locked, w).to(w)

    local_size = ranks.local_size(start)
    dimension = ranks.size(start) - len(locked)
    wants_several = max(low, high) > 1
    vector_bytes = local_size * start.itemsize
    max_basis = max_basis_size(low + high, vector_bytes, wants_several)
    min_basis = min_basis_size(low + high, vector_bytes) + 1
    vectors = Basis(start, count=min(max_basis, dimension) + 1, least=min_basis)
    # The space of a small matrix grows until it is invariant. search_eigenpairs then finds copies of repeated
    # eigenvalues in further spaces.
    must_complete = wants_several and dimension <= max_basis
    if len(locked):
        start = projected(projected(start))  # the second projection removes rounding errors
    torch.div(start, ranks.norm(start), out=vectors[0])
    t = np.zeros((len(vectors), len(vectors)))
    columns_per_read = 1 if start.device.type == "cpu" or local_size > LONG else READ
    unread_columns = list[Tensor]()  # columns of t that are still on the device
    j, products = 0, 0
    before_restart: tuple[Array, float] | None = None  # t and β before the first restart
    # The wanted values after ``stable_since`` products; since then, changes were below the tolerance.
    stable_values: Array | None = None
    stable_since = 0
    while True:
        w = yield vectors[j]
        w, column = orthogonalize(projected(w) if len(locked) else w, vectors.first(j + 1), ranks)
        if len(locked):
            # Project again: w is small now, and w/β would scale up what rounding left of the locked vectors.
            w = projected(w)
            column[-1] = ranks.norm(w)
        products += 1
        unread_columns.append(column)
        if len(unread_columns) < columns_per_read and products < budget and j + 2 < len(vectors):
            # column[-1] is β. The clamp avoids 0/0 in an invariant space, which the loop below detects.
            torch.div(w, column[-1].clamp(min=torch.finfo(w.dtype).tiny), out=vectors[j + 1])
            j += 1
            continue
        for i, beta in read_columns(t, unread_columns, j):
            count = products - (j - i)  # the number of products up to step i
            values, rotation = small_eigh(t[: i + 1, : i + 1])
            radius = max(radius, float(np.abs(values).max()))
            is_finite = bool(np.isfinite(beta))
            invariant = is_finite and (negligible(beta, radius, start.dtype) or i + 1 == dimension)
            chosen = np.arange(i + 1) if invariant else outer_indices(values, low, high)
            allowed = residual_tol * np.maximum(np.abs(values[chosen]), NEAR_ZERO * radius)
            residuals_decide = i + 1 >= min(low + high, dimension) and not must_complete
            residuals = beta * np.abs(rotation[-1, chosen])
            converged = invariant or (residuals_decide and bool(np.all(residuals <= allowed)))
            if residuals_decide and is_finite and radius:
                report_ratio(float(np.max(residuals / allowed)))
            if invariant or not converged:
                stable_values = None
            elif stable_values is None or np.any(np.abs(values[chosen] - stable_values) > allowed):
                stable_values, stable_since = values[chosen], count
            is_too_early = count < EARLY_PRODUCTS and count - stable_since < STABLE_PRODUCTS
            stops = invariant or (converged and not is_too_early) or count >= budget or not is_finite
            if stops:
                break
        unread_columns.clear()
        if stops:
            if i < j:  # the steps after step i are dropped, and the w of step i is restored
                j, w = i, vectors[i + 1] * beta
            break
        if j + 1 == len(vectors) - 1:  # full: restart with half as many vectors, the outer Ritz vectors
            count_per_end = max(1, (j + 1) // (4 if low and high else 2))
            retained = outer_indices(values, count_per_end if low else 0, count_per_end if high else 0)
            combine(rows_of(vectors.first(j + 1)), rotation[:, retained].T)  # overwrites the first rows
            before_restart = before_restart or (t[: j + 1, : j + 1].copy(), beta)
            # t becomes diagonal; the next orthogonalization writes the couplings to the next vector.
            t[:] = 0
            t[range(len(retained)), range(len(retained))] = values[retained]
            j = len(retained) - 1
        torch.div(w, beta, out=vectors[j + 1])
        del w  # frees memory for the next product
        j += 1
    ritz_vectors = start.new_empty(len(chosen), len(start))
    basis, t = vectors.first(j + 1), t[: j + 1, : j + 1]
    combine(rows_of(basis), rotation[:, chosen].T, into=ritz_vectors)
    return KrylovSpace(
        values=values[chosen], vectors=ritz_vectors, products=products, converged=converged,
        invariant=invariant, radius=radius, basis=basis, t=t, rest=w,
        before_restart=before_restart or (t, beta),
    )  # fmt: skip


def upper_bound(t: Array, beta: float, size: int) -> float:
    """Return an upper bound on λ_max of a symmetric operator on R^``size``, from Lanczos steps.

    ``t`` (j, j) is the tridiagonal matrix of j steps from a start b of norm 1. It has eigenvalues (Ritz
    values) θ_i and off-diagonals β_i. ``beta``: β_j, the norm of the remainder after the last step. The bound
    fails with probability RISK.

    If x is a unit eigenvector to an eigenvalue λ above all θ_i, then |xᵀb| ≤ Πβ_i / Π(λ − θ_i). Let c be
    RISK·√(π/2). For a random b, |xᵀb| is below c/√size with a probability of at most RISK (van Dorsselaer,
    Hochstenbach and van der Vorst 2000, section 3). For a b of :func:`.warm_start`, |xᵀb| is below c/(2√size)
    with a probability of at most RISK (Anderson 1955). This bound uses the smaller number, c/(2√size).
    """
    betas = np.abs(np.append(np.diag(t, -1), beta))
    if not np.isfinite(betas).all():
        return math.inf
    values = small_eigh(t)[0]
    if betas.min() == 0:  # then xᵀb = 0, which a random b excludes: no λ is above all θ_i
        return float(values[-1])
    log_threshold = math.log(RISK * math.sqrt(math.pi / 2) / 2) - math.log(size) / 2  # log of c/(2√size)
    largest_log_product = np.log(betas).sum() - log_threshold  # of Π(λ − θ_i)

    def is_possible(distance: float) -> bool:
        """Return whether λ can lie at this distance above the largest Ritz value."""
        return bool(largest_log_product >= np.log(values[-1] - values + distance).sum())

    near, far = 0.0, float(betas.max())
    while is_possible(far):
        near, far = far, 2 * far
    for _ in range(40):  # bisection, to 10⁻¹² of the first interval
        middle = (near + far) / 2
        near, far = (middle, far) if is_possible(middle) else (near, middle)
    return float(values[-1] + far)

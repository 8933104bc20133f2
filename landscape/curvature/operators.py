"""Symmetric matrices that are known by their products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from landscape.core.devices import double, finite, inner, vector_norm
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.options import expect

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

    def length(self, v: Tensor) -> int:
        """The count of numbers of ``v`` that a process holds, at most."""
        return len(v)

    def normal(self, like: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        """A normal vector like ``like``, drawn in ``dtype`` on the CPU: a seed gives the same everywhere."""
        return torch.randn(len(like), dtype=dtype, generator=generator).to(like)

    def signs(self, like: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Vectors of random signs ±1 like ``like``, as ``count`` rows; drawn on the CPU, too."""
        draw = torch.randint(2, (count, len(like)), dtype=torch.int8, generator=generator)
        return draw.to(like).mul_(2).sub_(1)

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
            f"problem: products of the {self.matrix} are NaN or infinite, all must be finite"
        )

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector (size,) or a block (size, m), a tensor or an array as ``v`` is."""
        if isinstance(v, np.ndarray):
            return (self @ torch.tensor(v, device=self.device)).cpu().numpy()
        expect("v", v, Tensor)
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
    lost = float(vector_norm(images.sum(0) - of_sum))
    largest = float(vector_norm(images).max())
    return 100 * lost + math.sqrt(torch.finfo(dtype).eps) * largest


class GivenOperator(SymmetricOperator):
    """The symmetric matrix of an object with ``shape`` and ``@``: of SciPy, curvlinops, NumPy or PyTorch.

    What has the precision of PyTorch, or none, is multiplied with blocks of tensors (size, m), other objects
    with arrays. Raises InputError for a matrix that is not square, not of real floating-point numbers, or not
    symmetric, and for products that fail.
    """

    def __init__(self, given: Any) -> None:
        self.given, self.matrix, shape = given, type(given).__name__, tuple(given.shape)
        if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
            raise InputError(f"problem: a {self.matrix} of shape {shape}, it must be square, (P, P)")
        self.size, dtype = shape[0], getattr(given, "dtype", None) or torch.get_default_dtype()
        self._tensors = isinstance(dtype, torch.dtype)
        self.dtype = dtype if self._tensors else torch.from_numpy(np.empty(0, dtype)).dtype
        if not self.dtype.is_floating_point:
            raise InputError(
                f"problem: a {self.matrix} of {dtype}, it must be of real floating-point numbers"
            )
        self.device = torch.device(getattr(given, "device", "cpu") if self._tensors else "cpu")
        self._check_symmetric()

    def _images(self, rows: Tensor) -> Tensor:
        block: Any = rows.T.to(self.device, self.dtype, copy=True)  # it may write to what it gets
        images = torch.as_tensor(self.given @ (block if self._tensors else block.numpy())).detach()
        if images.shape != block.shape:
            raise ValueError(f"it has the shape {tuple(images.shape)}")
        return images.T.to(rows)

    def _check_symmetric(self) -> None:
        """Raise InputError where uᵀAv and vᵀAu of random u and v differ by more than rounding."""
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(VECTORS, self.size, dtype=torch.float64, generator=generator)
        rows = torch.cat((draws, draws.sum(0, keepdim=True))).to(self.device, self.dtype)
        try:
            *images, whole = double(self._images(rows))
        except Exception as error:  # the user's object raises any kind of error
            words = " ".join(str(error).split())[:100]
            raise InputError(
                f"problem: a {self.matrix} fails ({words}), its product A @ V must take a block V (P, m)"
            ) from error
        found = self._finite(rows, torch.stack(images))
        pairs = found @ double(rows[:-1]).T
        off = float((pairs - pairs.T).abs().max())
        if not off <= rounding_of(found, whole, self.dtype):  # NaN is refused, too
            words = f"uᵀAv and vᵀAu of random u and v differ by {off:.2g}"
            raise InputError(f"problem: a {self.matrix} is not symmetric, it must be: {words}")


def as_operator(given: Any) -> SymmetricOperator | None:
    """The operator that ``given`` is, or whose products it has; None for what has no ``shape`` and ``@``.

    Raises:
        InputError: a matrix that is not symmetric (:class:`GivenOperator`).

    Example:
        >>> as_operator(np.eye(3)).shape
        (3, 3)
    """
    if isinstance(given, SymmetricOperator):
        return given
    is_matrix = hasattr(given, "shape") and hasattr(type(given), "__matmul__")
    return GivenOperator(given) if is_matrix else None


def row_products(operator: SymmetricOperator) -> Products:
    """The products of ``operator`` with vectors that are rows, (k, size) -> (k, size)."""
    return lambda rows: (operator @ rows.T).T

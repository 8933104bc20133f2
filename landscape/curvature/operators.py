"""Symmetric matrices that are known by their products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import expect

#: A function from vectors (k, size), one a row, to their products with a matrix, (k, size).
Products = Callable[[Tensor], Tensor]


class Ranks:
    """The processes that hold vectors: one, which has them whole.

    A subclass is about vectors of which each of several processes holds a part.
    """

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes of what each computed of its part, such as of an inner product."""
        return values

    def norm(self, v: Tensor, **options: Any) -> Tensor:
        """The norm of a vector; with ``dim=1``, the norms of the rows of a matrix."""
        found: Tensor = v.norm(**options)
        return found

    def size(self, v: Tensor) -> int:
        """The number of dimensions of the space of ``v``."""
        return len(v)

    def length(self, v: Tensor) -> int:
        """How many numbers of ``v`` a process holds, at most."""
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
        q: Tensor = torch.linalg.qr(rows.T)[0]
        return q.T


ALONE = Ranks()


class SymmetricOperator:
    """A real symmetric matrix A (size, size), known by its products with vectors.

    ``A @ v`` takes a vector (size,) or a block of vectors (size, m), and so does ``A(v)``. A subclass
    computes the products in :meth:`_images`.

    Attributes:
        size: the length of the vectors.
        dtype, device: the arithmetic of the products, and where they are computed.
        products: the number of products so far; a block counts as its m vectors.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    products: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The dimensions of the matrix, (size, size)."""
        return self.size, self.size

    def _images(self, rows: Tensor) -> Tensor:
        """The products with the rows of ``rows``, (m, size) -> (m, size)."""
        raise NotImplementedError

    def __matmul__(self, v: Tensor) -> Tensor:
        """The product with a vector (size,) or a block (size, m), in the shape and precision of ``v``."""
        expect("v", v, Tensor)
        if v.dim() not in (1, 2) or len(v) != self.size or not v.is_floating_point():
            what = f"shape {tuple(v.shape)} of {str(v.dtype).removeprefix('torch.')}"
            raise InputError(f"v: {what}, it must be ({self.size},) or ({self.size}, m) of real numbers")
        rows = v[None] if v.dim() == 1 else v.T.contiguous()
        self.products += len(rows)
        images = self._images(rows)
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

        def image(v: Any) -> Any:
            found: Any = (self @ torch.tensor(np.asarray(v), dtype=self.dtype, device=self.device)).cpu()
            return found.numpy()

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        every = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), image)
        return LinearOperator(self.shape, dtype=dtype, **every)


def row_products(operator: SymmetricOperator) -> Products:
    """The products of ``operator`` with vectors that are rows, (k, size) -> (k, size)."""
    return lambda rows: (operator @ rows.T).T

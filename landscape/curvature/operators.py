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

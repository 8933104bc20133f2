"""Radial basis functions through values at scattered points, with their errors where a point is left out.

f(p) = Σ_i c_i φ(‖p − p_i‖) + a polynomial, with f(p_i) = v_i and Σ_i c_i q(p_i) = 0 for every polynomial q
of that degree (Wendland, Scattered Data Approximation, 2005, section 8.5). SciPy's RBFInterpolator does the
same, but does not give the inverse, from which all errors of leaving one point out come at once.

Matrices are inverted and multiplied by PyTorch: NumPy's threads would still wait for work, each on a core,
when the next points are evaluated, which then takes 1.5 times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import scipy  # loads its parts when they are used
import torch

from landscape.core.hdf5 import Array

# φ and the degree of the polynomial. Cubic and quintic ones follow smooth surfaces, linear ones kinks.
KERNELS: dict[str, tuple[Callable[[Array], Array], int]] = {
    "linear": (lambda r: r, 0),
    "cubic": (lambda r: r * r * r, 1),
    "quintic": (lambda r: r * r * r * r * r, 2),
}
DISTANCES = 2**21  # so many are in memory at once: 16 MiB (ours)


class Interpolant:
    """The functions of one kernel through the points ``at`` (N, d), d 1 or 2, for any values there.

    Example:
        >>> at = np.array([[0.0], [1.0], [2.0], [3.0]])
        >>> curve = Interpolant(at, "cubic")
        >>> curve(curve.coefficients(np.array([1.0, 3.0, 5.0, 7.0])), np.array([[1.5]])).round(6)
        array([4.])
    """

    def __init__(self, at: Array, kernel: str) -> None:
        self._at = at
        self._phi, self._degree = KERNELS[kernel]

    @cached_property
    def _inverse(self) -> Array:
        """Of the system for the coefficients, (N + M, N + M)."""
        powers = self._powers(self._at)
        n, m = powers.shape
        system = np.zeros((n + m, n + m))
        system[:n, :n] = self._phi(scipy.spatial.distance.cdist(self._at, self._at))
        system[:n, n:], system[n:, :n] = powers, powers.T
        try:
            inverse: Array = torch.linalg.inv(torch.from_numpy(system)).numpy()
        except RuntimeError as error:
            raise np.linalg.LinAlgError("the points lie on a curve of the polynomial's degree") from error
        return inverse

    def _powers(self, at: Array) -> Array:
        """The monomials up to the degree, (K, M)."""
        exponents = [e for e in np.ndindex(*[self._degree + 1] * at.shape[1]) if sum(e) <= self._degree]
        return np.stack([np.prod(at**e, axis=1) for e in exponents], axis=1)

    def coefficients(self, values: Array) -> Array:
        """(N + M,) for the values (N,)."""
        return _product(self._inverse[:, : len(values)], values)

    def left_out(self, coefficients: Array) -> Array:
        """(N,): at each point, its value minus that of the function through all others.

        It is c_i divided by the inverse's diagonal (Rippa, Advances in Computational Mathematics 11, 1999).
        """
        n = len(self._at)
        found: Array = coefficients[:n] / np.diagonal(self._inverse)[:n]
        return found

    def __call__(self, coefficients: Array, at: Array) -> Array:
        """The values (K,) at the points ``at`` (K, d)."""
        n = len(self._at)
        found = np.empty(len(at))
        step = max(1, DISTANCES // n)
        for k in range(0, len(at), step):  # a bound on memory, however fine the grid
            part = at[k : k + step]
            distances = scipy.spatial.distance.cdist(part, self._at)
            found[k : k + step] = _product(self._phi(distances), coefficients[:n])
            found[k : k + step] += _product(self._powers(part), coefficients[n:])
        return found


def _product(matrix: Array, vector: Array) -> Array:
    product: Array = (torch.from_numpy(matrix) @ torch.from_numpy(vector)).numpy()
    return product

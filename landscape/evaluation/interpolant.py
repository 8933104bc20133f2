"""Tolerances of errors, radial functions through points of a line or a plane, and the choice of points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy  # loads its parts when they are used
import torch

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.results.shown import logarithmic


@dataclass(frozen=True)
class Tolerance:
    """The largest error that is allowed.

    Attributes:
        size: a share of the range shown if ``relative``, otherwise a number in the values' unit.
        relative: whether the size is a share.
        rounding: the machine epsilon of the values' computation.

    Example:
        >>> Tolerance.parse("1%").size, Tolerance.parse(0.005).relative
        (0.01, False)
    """

    size: float
    relative: bool
    rounding: float = np.finfo(np.float64).eps

    @classmethod
    def parse(cls, value: str | float, dtype: torch.dtype = torch.float64) -> Tolerance:
        """Return the tolerance of text such as "1%" or "0.005", or of a number, for values in ``dtype``.

        Raises:
            InputError: anything else, or a size that is not positive, or a share of 100% and more.
        """
        text = str(value).strip()
        relative = text.endswith("%")
        try:
            size = float(text.removesuffix("%")) / (100 if relative else 1)
        except ValueError:
            size = math.nan
        if not 0 < size < (1 if relative else math.inf):
            raise InputError(
                f"interpolation_tol: {value!r} is not allowed, it must be a share of the range shown, such "
                "as '1%', or a positive number in the unit of the values"
            )
        return cls(size, relative, torch.finfo(dtype).eps)

    def __str__(self) -> str:
        return f"{100 * self.size:g}%" if self.relative else f"{self.size:g}"


@dataclass(frozen=True)
class ErrorScale:
    """The scale on which errors are compared with a tolerance.

    A relative tolerance is a share of the range shown: the range of the logarithms if a picture has a
    logarithmic scale (:mod:`landscape.results.shown`).

    Attributes:
        log: whether errors are errors of logarithms.
        limit: the largest allowed error.
        possible: whether the limit is above the rounding of the values.
    """

    log: bool
    limit: float
    possible: bool

    @classmethod
    def of(cls, values: Array, tolerance: Tolerance) -> ErrorScale:
        """Return the scale for finite ``values`` (K,), at least one of them."""
        log = tolerance.relative and logarithmic(values)
        width = float(np.ptp(np.log(values) if log else values)) if tolerance.relative else 1.0
        rounding = tolerance.rounding * (1.0 if log else float(np.abs(values).max()))
        limit = max(tolerance.size * width, np.finfo(np.float64).tiny)
        return cls(log, limit, limit > rounding)

    def __call__(self, values: Array) -> Array:
        """Return ``values`` in units of the largest allowed error; NaN without a logarithm."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            scaled: Array = (np.log(values) if self.log else values) / self.limit
        return np.where(np.isfinite(scaled), scaled, np.nan)


# φ, the degree of the polynomial, and the smallest power of a hole's size with which the error shrinks. Cubic
# and quintic functions follow smooth surfaces, linear functions follow kinks.
KERNELS: dict[str, tuple[Callable[[Array], Array], int, float]] = {
    "linear": (lambda r: r, 0, 1.0),
    "cubic": (lambda r: r * r * r, 1, 2.0),
    "quintic": (lambda r: r * r * r * r * r, 2, 3.0),
}
# The number of distances in memory at once, 16 MiB (our choice: little beside a grid's values).
DISTANCES = 2**21


class Interpolant:
    """The functions of one kernel through the points ``at`` (N, d), d 1 or 2, for any values there.

    Example:
        >>> at = np.array([[0.0], [1.0], [2.0], [3.0]])
        >>> curve = Interpolant(at, "cubic")
        >>> curve(curve.coefficients(np.array([1.0, 3.0, 5.0, 7.0])), np.array([[1.5]])).round(6)
        array([4.])
    """

    def __init__(self, at: Array, kernel: str) -> None:
        self.points = at
        self._phi, self._degree, self.order = KERNELS[kernel]

    @cached_property
    def _inverse(self) -> Array:
        """The inverse of the system for the coefficients, (N + M, N + M)."""
        powers = self._powers(self.points)
        n, m = powers.shape
        system = np.zeros((n + m, n + m))
        system[:n, :n] = self._phi(scipy.spatial.distance.cdist(self.points, self.points))
        system[:n, n:], system[n:, :n] = powers, powers.T
        try:
            inverse: Array = torch.linalg.inv(torch.from_numpy(system)).numpy()
        except RuntimeError as error:
            raise np.linalg.LinAlgError("the points lie on a curve of the polynomial's degree") from error
        return inverse

    def _powers(self, at: Array) -> Array:
        return monomials(at, self._degree)

    def coefficients(self, values: Array) -> Array:
        """Return the coefficients (N + M,) for values (N,)."""
        return _product(self._inverse[:, : len(values)], values)

    def left_out(self, coefficients: Array) -> Array:
        """Return each point's value minus that of the function through all other points, (N,).

        It is c_i divided by the inverse's diagonal (Rippa, Advances in Computational Mathematics 11, 1999).
        """
        n = len(self.points)
        return coefficients[:n] / np.diagonal(self._inverse)[:n]

    def __call__(self, coefficients: Array, at: Array) -> Array:
        """Return the values (K,) at the points ``at`` (K, d)."""
        return evaluate([(self, coefficients)], at)[0]

    def combine(self, coefficients: Array, distances: Array, at: Array) -> Array:
        """Return the values (K,) at the points ``at`` (K, d), of given ``distances`` (K, N) to all points."""
        n = len(self.points)
        return _product(self._phi(distances), coefficients[:n]) + _product(self._powers(at), coefficients[n:])


def evaluate(functions: Sequence[tuple[Interpolant, Array]], at: Array) -> list[Array]:
    """Return the values (K,) of each function at the points ``at`` (K, d).

    A function is an interpolant with its coefficients. All functions pass through the same points, so that
    they share the distances to these.
    """
    values = [np.empty(len(at)) for _ in functions]
    points = functions[0][0].points
    step = max(1, DISTANCES // len(points))
    for k in range(0, len(at), step):  # memory is bounded for any grid
        rows = slice(k, k + step)
        distances = scipy.spatial.distance.cdist(at[rows], points)
        for column, (interpolant, coefficients) in zip(values, functions, strict=True):
            column[rows] = interpolant.combine(coefficients, distances, at[rows])
    return values


def _product(matrix: Array, vector: Array) -> Array:
    return (torch.from_numpy(matrix) @ torch.from_numpy(vector)).numpy()


def monomials(at: Array, degree: int) -> Array:
    """Return the monomials up to the degree at the points ``at`` (K, d), as (K, M)."""
    exponents = [e for e in np.ndindex(*[degree + 1] * at.shape[1]) if sum(e) <= degree]
    columns = at.T
    return np.stack(
        [math.prod(x**power for x, power in zip(columns, e, strict=True)) for e in exponents], axis=1
    )


def choose_points(
    at: Array, values: Array, weights: Array, kernel: str, start: Array, tolerance: float, minimum: int,
    usual: int, maximum: int,
) -> Array:  # fmt: skip
    """Choose few points whose interpolant, of a ``kernel``, approximates ``values`` at all points.

    The first points determine a polynomial. The next points are those of ``start``. Each further point is the
    one where the interpolant through the points so far has the largest weighted error. A point adds a row to
    a Newton basis, so that no system of equations is solved again.

    Args:
        at: points (K, d).
        values: (K,), finite.
        weights: (K,), factors of the errors.
        kernel: a name in KERNELS.
        start: indices of points to choose, at most ``maximum``.
        tolerance: the allowed weighted error. It is doubled once the number of points has reached ``usual``.
        minimum, usual, maximum: numbers of points. At least ``minimum`` and at most ``maximum`` are chosen;
            fewer if the errors are only rounding.

    Returns:
        The indices of the chosen points.
    """
    phi, degree, _ = KERNELS[kernel]
    powers = monomials(at, degree)  # (K, M), M monomials at each point
    terms = powers.shape[1]
    # The nodes are M points that determine a polynomial. They are points of ``start`` if it has at least 2·M
    # points (our choice). The pivots of a QR decomposition are nodes for which the inverse below is accurate.
    pool = start if len(start) >= 2 * terms else np.arange(len(at))
    pivots = scipy.linalg.qr(powers[pool].T, mode="r", pivoting=True)[1]
    nodes = pool[pivots[:terms]]
    lagrange = powers @ np.linalg.inv(powers[nodes])  # (K, M), Lagrange polynomials of the nodes
    phi_to_nodes = phi(scipy.spatial.distance.cdist(at, at[nodes]))  # (K, M)
    # From each column, the polynomial through its values at the nodes is subtracted.
    phi_remainder = phi_to_nodes - lagrange @ phi_to_nodes[nodes]
    residual = values - lagrange @ values[nodes]
    basis = np.zeros((maximum, len(at)))
    chosen: list[int] = nodes.tolist()
    required = [index for index in start.tolist() if index not in chosen]
    sign = -1.0 if degree % 2 == 0 else 1.0  # makes φ positive definite once polynomials are subtracted
    for row in range(maximum - len(chosen)):
        if row < len(required):
            index = required[row]
        else:
            index = int(np.abs(weights * residual).argmax())
            allowed_error = tolerance if len(chosen) < usual else 2 * tolerance
            if len(chosen) >= minimum and abs(weights[index] * residual[index]) <= allowed_error:
                break
        # φ(p, q) for each point p and the new point q. Polynomials in p and in q are subtracted, so that the
        # column is zero if p or q is a node. Then its components along the rows of the basis are subtracted.
        column = phi(np.linalg.norm(at - at[index], axis=1))
        column -= lagrange @ phi_to_nodes[index] + phi_remainder @ lagrange[index]
        column = sign * column - basis[:row, index] @ basis[:row]
        if not column[index] > 0:  # the point adds only rounding to the basis: the search ends
            break
        basis[row] = column / np.sqrt(column[index])
        residual -= residual[index] / basis[row, index] * basis[row]
        residual[index] = 0.0
        chosen.append(index)
    return np.array(chosen, dtype=int)


def coarse_indices(shape: Sequence[int], base: int) -> Array:
    """Return the indices of ``base`` × ``base`` points of a grid of ``shape``, the last axis fastest.

    They are denser toward the ends of an axis, where an interpolant has neighbors on one side only.
    """
    chosen = np.zeros(shape, bool)
    along = []
    for count in shape:
        even = np.linspace(-1, 1, min(base, count))
        dense_ends = np.sin(np.pi / 2 * even)
        along.append(np.unique(np.rint((0.5 * (even + dense_ends) + 1) / 2 * (count - 1)).astype(int)))
    chosen[np.ix_(*along)] = True
    return np.flatnonzero(chosen)


def widest_holes(
    rng: np.random.Generator, exact: Array, candidates: Array, chosen: Sequence[int], count: int,
    jitter: float,
) -> list[int]:  # fmt: skip
    """Return ``chosen`` and ``count`` more positions in ``candidates``, in the widest holes between points.

    Coordinates are in half steps of a grid: odd for points, even for a point's corners, half a step away.
    Each corner of a candidate has a distance from the nearest exact or chosen point. The width of the hole at
    the candidate is the largest of these distances, reduced by a random share.

    Args:
        rng: the generator of the shares.
        exact: (N, d), the exact points.
        candidates: (M, d).
        chosen: positions in ``candidates``.
        count: the number of further positions.
        jitter: the largest share.
    """
    size, dimension = np.concatenate([exact, candidates]).max(0) + 2, candidates.shape[1]
    empty = np.ones(size, bool)
    empty[tuple(exact.T)] = empty[tuple(candidates[chosen].T)] = False
    at_corners = (slice(None, None, 2),) * dimension
    corners = np.moveaxis(np.indices(size), 0, -1)[at_corners].reshape(-1, dimension)
    distance: Array = scipy.ndimage.distance_transform_edt(empty)[at_corners].ravel()
    offsets = np.array([*itertools.product((-1, 1), repeat=dimension)])[:, None]
    # The numbers of the corners of each candidate, (corners, M).
    around = np.ravel_multi_index(tuple((candidates + offsets).T // 2), size // 2 + 1).T
    chosen = [*chosen]
    for _ in range(count):
        widths = distance[around].max(0) * rng.uniform(1 - jitter, 1, len(candidates))
        widths[chosen] = 0.0
        chosen.append(int(widths.argmax()))
        to_chosen = scipy.spatial.distance.cdist(corners, candidates[chosen[-1:]])[:, 0]
        distance = np.minimum(distance, to_chosen)
    return chosen

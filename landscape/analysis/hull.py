"""Predict the loss in the affine hull of weight vectors, by kriging with measurements at the vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import linalg, special

from landscape.core.hdf5 import Array

# Length scales ℓ in root mean squared distances of the vectors from their mean, each as likely as the others
# (our choice: weighted by their likelihoods, the intervals were too narrow, and matrices of longer ones are
# near singular). They were chosen on averages of 56 sets of checkpoints of digits and MNIST, where 90%
# intervals held 94% of the exact losses; none of these sets is in benchmarks/averages.py.
LENGTHS = np.geomspace(0.5, 4, 7)
# Added to the covariance matrix of standardized observations, for numerical stability (usual in kriging).
JITTER = 1e-9
# Directions with a smaller share of the largest variance are rounding of the weights in float32 (our choice).
ROUNDING = 1e-10
# An average whose negative coefficients have a larger sum than this has no prediction (our choice: of 72 sets
# of a base and fine-tunings on digits, 90% intervals held 90% of the exact losses up to 1, and 82% from 1 to
# 2).
OUTSIDE = 1.0
LEVEL = 0.9


@dataclass(frozen=True)
class MemberMeasurements:
    """Measurements at n vectors w_j with deviations Δw_j from their mean, in float64.

    Attributes:
        gram: (n, n), ⟨Δw_i, Δw_j⟩.
        losses: (n,), L(w_i).
        offsets: (n,), numbers that are added to these losses; between the vectors they are interpolated, and
            the largest is part of the interval.
        slopes: (n, n), ⟨∇L(w_i), Δw_j⟩.
        bends: (n, n), ⟨∇²L(w_i) Δw_i, Δw_j⟩.
        rounding: the rounding error of a loss.
        error: the largest error of a loss between the vectors if products are differences of gradients.
    """

    gram: Array
    losses: Array
    offsets: Array
    slopes: Array
    bends: Array
    rounding: float
    error: float = 0.0


class Prediction(NamedTuple):
    """Predictions for K averages.

    Attributes:
        loss: (K,), the predicted losses.
        low, high: (K,), the ends of their 90% intervals.
        ratio: (K,), the corrections of higher orders, divided by those of second order.
    """

    loss: Array
    low: Array
    high: Array
    ratio: Array


@dataclass(frozen=True)
class _Block:
    """Observations at ``points`` (m, r): values, or derivatives along 1 or 2 ``directions`` (m, r)."""

    points: Array
    directions: tuple[Array, ...] = ()


class Hull:
    """The loss in the affine hull of weight vectors.

    Args:
        measurements: at the vectors.
    """

    def __init__(self, measurements: MemberMeasurements) -> None:
        self._measurements = measurements
        eigenvalues, vectors = np.linalg.eigh(measurements.gram)
        retained = eigenvalues > ROUNDING * eigenvalues[-1]
        lengths, vectors = np.sqrt(eigenvalues[retained]), vectors[:, retained]
        # In coordinates of unit root mean square Δw_j is points[j], and ∇L is slopes @ dual.
        scale = np.sqrt(eigenvalues[retained].sum() / len(eigenvalues))
        self._points, dual = vectors * lengths / scale, vectors / lengths * scale
        n, r = self._points.shape
        # Each point is repeated for its derivatives along the r axes.
        points, axes = np.repeat(self._points, r, 0), np.tile(np.eye(r), (n, 1))
        self._blocks = [_Block(self._points), _Block(points, (axes,)), _Block(points, (points, axes))]
        observations = (measurements.losses, measurements.slopes @ dual, measurements.bends @ dual)
        values = np.concatenate([observation.ravel() for observation in observations])
        self._processes = [_Process(self._blocks, values, length) for length in LENGTHS]

    def __call__(self, coefficients: Array) -> Prediction:
        """Return the losses at Σ_j a_j w_j for the rows a of ``coefficients`` (K, n), which sum to 1."""
        m, a = self._measurements, coefficients
        averages = _Block(a @ self._points)
        predictions = np.array([process.predict(averages) for process in self._processes])
        means, errors = predictions[:, 0], np.hypot(predictions[:, 1], m.rounding)  # (lengths, K)
        loss = means.mean(0)
        low, high = _quantiles(means, errors, self._processes[0].freedom)
        # To second order L(w) is Σ a_j (L(w_j) + ½⟨∇L(w_j), w − w_j⟩) = Σ a_j L(w_j) − ½ tr(HC), C the
        # covariance. The ratio is that of all higher orders to this correction. If each order is to the order
        # before as this ratio, the missing orders are the rest of a geometric series, which may not converge.
        corrections = a * (a @ m.slopes.T - m.slopes.diagonal()) / 2
        higher = np.maximum(np.abs(loss - a @ m.losses - corrections.sum(1)) - m.rounding, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.nan_to_num(higher / np.abs(corrections).sum(1), nan=0.0, posinf=np.inf)
            missing_orders = np.where(ratio < 1, higher * ratio / (1 - ratio), np.inf)
        inside = np.maximum(-a, 0.0).sum(1) <= OUTSIDE + 1e-9  # with the rounding of coefficients
        ratio, missing_orders = np.where(inside, ratio, np.inf), np.where(inside, missing_orders, np.inf)
        is_member = (a == 1).any(1) & (np.count_nonzero(a, axis=1) == 1)  # whose loss was measured
        offset_error = (np.abs(m.offsets).max() + m.error) * np.abs(a).sum(1)
        total = np.where(is_member, a @ m.losses, loss) + a @ m.offsets
        further_errors = np.hypot(missing_orders, offset_error)
        below = np.where(is_member, 0.0, np.hypot(loss - low, further_errors))
        above = np.where(is_member, 0.0, np.hypot(high - loss, further_errors))
        return Prediction(total, total - below, total + above, np.where(is_member, 0.0, ratio))


class _Process:
    """A quadratic function plus a Gaussian process of one length scale, conditioned on ``values`` (N,)."""

    def __init__(self, blocks: list[_Block], values: Array, length: float) -> None:
        self._blocks, self._length = blocks, length
        covariance = np.block([[_covariance(a, b, length) for b in blocks] for a in blocks])
        self._scale = 1 / np.sqrt(covariance.diagonal())
        covariance *= self._scale[:, None] * self._scale
        covariance.flat[:: len(values) + 1] += JITTER
        self._factor = linalg.cho_factor(covariance, lower=True, overwrite_a=True)
        self._trend = np.vstack([_quadratic(block) for block in blocks]) * self._scale[:, None]
        values = values * self._scale
        self._solved = linalg.cho_solve(self._factor, self._trend)
        self._normal = linalg.cho_factor(self._trend.T @ self._solved)
        self._fit = linalg.cho_solve(self._normal, self._solved.T @ values)
        residual = values - self._trend @ self._fit
        self._weights = linalg.cho_solve(self._factor, residual)
        self.freedom = len(values) - self._trend.shape[1]
        self._variance = max(residual @ self._weights, 0.0) / self.freedom

    def predict(self, target: _Block) -> tuple[Array, Array]:
        """Return mean and scale (K,) of Student's t with ``freedom`` degrees at the points of a block."""
        cross = np.hstack([_covariance(target, block, self._length) for block in self._blocks]) * self._scale
        trend = _quadratic(target)
        residual = trend - cross @ self._solved
        share = 1 - (cross.T * linalg.cho_solve(self._factor, cross.T)).sum(0)
        share += (residual.T * linalg.cho_solve(self._normal, residual.T)).sum(0)
        return trend @ self._fit + cross @ self._weights, np.sqrt(np.maximum(share, 0.0) * self._variance)


def _covariance(a: _Block, b: _Block, length: float) -> Array:
    """Return the covariances (m_a, m_b) of the observations in two blocks.

    An observation is the value of the random function f at a point, or a first or second derivative of f
    there. Let x be a point of block a, and y a point of block b. The covariance of f(x) and f(y) is exp(−s)
    with s = ‖x − y‖²/(2ℓ²), where ℓ is ``length``. The covariance of derivatives is a derivative of exp(−s):
    with respect to x along each direction of block a, and with respect to y along each direction of block b.

    Faà di Bruno's formula gives this derivative as exp(−s) times a sum over partitions of all directions into
    sets. The term of a partition is a product over its sets. The factor of a set is −1 times the derivative
    of s along the directions in the set. Only sets of one or two directions count, because third derivatives
    of s are zero.
    """
    x, y = a.points / length, b.points / length  # in units of ℓ, in which s = ‖x − y‖²/2
    twice_s = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    # Each u has the shape (m_a, r) and each v (m_b, r): row i is the direction at point i of the block.
    us, vs = [u / length for u in a.directions], [v / length for v in b.directions]
    # First derivatives of s: along the directions of a, in x, and then along those of b, in y.
    slopes = [(u * x).sum(1)[:, None] - u @ y.T for u in us] + [(v * y).sum(1) - x @ v.T for v in vs]
    count_a = len(us)

    def second_derivative(i: int, j: int) -> Any:
        """Return the derivative of s along directions i < j."""
        if j < count_a:
            return (us[i] * us[j]).sum(1)[:, None]
        if i >= count_a:
            return (vs[i - count_a] * vs[j - count_a]).sum(1)
        return -us[i] @ vs[j - count_a].T

    def sum_over_partitions(indices: list[int]) -> Any:
        if not indices:
            return 1.0
        first, *others = indices
        total = -slopes[first] * sum_over_partitions(others)  # the first direction alone in its set
        for partner in others:  # the first direction and its partner in a set
            remaining = [other for other in others if other != partner]
            total = total - second_derivative(first, partner) * sum_over_partitions(remaining)
        return total

    factor = sum_over_partitions([*range(len(slopes))])
    covariance: Array = np.exp(-np.maximum(twice_s, 0.0) / 2) * factor
    return covariance


def _quadratic(block: _Block) -> Array:
    """Return a block's observations of 1, x_i and x_i x_j, i ≤ j, (m, (r + 1)(r + 2)/2)."""
    x = block.points
    i, j = np.triu_indices(x.shape[1])
    if not block.directions:
        return np.hstack([np.ones((len(x), 1)), x, x[:, i] * x[:, j]])
    u, v = block.directions[0], block.directions[-1]
    if len(block.directions) == 1:
        return np.hstack([np.zeros((len(x), 1)), u, u[:, i] * x[:, j] + x[:, i] * u[:, j]])
    return np.hstack([np.zeros((len(x), 1 + x.shape[1])), u[:, i] * v[:, j] + v[:, i] * u[:, j]])


def _quantiles(means: Array, scales: Array, freedom: int) -> tuple[Array, Array]:
    """Return the ends (K,) of the interval of an even mixture of Student's t with ``means`` (m, K)."""
    tail, ends = (1 - LEVEL) / 2, []
    reach = -special.stdtrit(freedom, tail / len(means)) * scales  # beyond it no component has a tail's share
    for probability in (tail, 1 - tail):
        below, above = (means - reach).min(0), (means + reach).max(0)
        for _ in range(60):  # to rounding
            middle = (below + above) / 2
            reached = special.stdtr(freedom, (middle - means) / scales).mean(0) >= probability
            above, below = np.where(reached, middle, above), np.where(reached, below, middle)
        ends.append(above)
    return ends[0], ends[1]

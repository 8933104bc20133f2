"""The rise of the loss above the centre of a surface, by distance in weight space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.grids import CENTERED, Surface

# Directions that a profile is a median over, and its points (ours: more change nothing that can be seen).
DIRECTIONS, POINTS = 128, 60


@dataclass(frozen=True)
class Profile:
    """The loss against the distance from the centre, over all directions of a plane.

    Attributes:
        distance: (K,), Euclidean distances in weight space, from 0 to the edge of the grid.
        low, median, high: (K,), quartiles of the loss over the directions, in nats; infinite where more
            than a quarter (half, three quarters) of the directions have no finite loss.
    """

    distance: Array
    low: Array
    median: Array
    high: Array


def lengths(surface: Surface) -> tuple[float, float, float]:
    """(‖u‖, ‖v‖, ‖centre‖): the lengths of the directions and of the weights at the centre."""
    norms = [float(np.linalg.norm(v.astype(np.float64))) for v in (*surface.directions, surface.center)]
    return norms[0], norms[1], norms[2]


def gram(surface: Surface) -> Array:
    """(2, 2), the inner products of the directions."""
    u, v = surface.directions.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no comparison of lengths, nor NaN
        return np.array([[u @ u, u @ v], [u @ v, v @ v]])


def independent(gram: Array) -> bool:
    """Whether directions with these inner products are finite, not zero and not parallel."""
    with np.errstate(over="ignore", invalid="ignore"):
        area = gram[0, 0] * gram[1, 1]
        return bool(np.isfinite(gram).all() and np.isfinite(area) and area - gram[0, 1] ** 2 > 1e-12 * area)


def loss_at(surface: Surface, x: Array, y: Array) -> Array:
    """The loss at points of the plane, between the points of the grid by bilinear interpolation.

    Losses that are not finite count as infinite, also beside such a point.
    """
    loss = np.where(np.isfinite(surface.loss), surface.loss, np.inf)
    total = np.zeros(np.broadcast(x, y).shape)
    for row, y_share in _neighbours(surface.y, y):
        for column, x_share in _neighbours(surface.x, x):
            share = x_share * y_share
            total = total + np.where(share > 0, np.where(share > 0, share, 1) * loss[row, column], 0.0)
    return total


def _neighbours(grid: Array, at: Array) -> list[tuple[Array, Array]]:
    """The two neighbours of ``at`` on a grid, and the share of each."""
    left = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
    share = np.clip((at - grid[left]) / (grid[left + 1] - grid[left]), 0.0, 1.0)
    return [(left, 1 - share), (left + 1, share)]


def profile(surface: Surface) -> Profile:
    """The loss against the distance from the centre: quartiles over all directions of the plane."""
    angle = np.arange(DIRECTIONS) / DIRECTIONS * 2 * np.pi
    circle = np.stack([np.cos(angle), np.sin(angle)])
    steps = np.linalg.solve(
        np.linalg.cholesky(gram(surface)).T, circle
    )  # coordinates of points at distance 1
    with np.errstate(divide="ignore"):
        reach = [
            np.where(s > 0, grid[-1], grid[0]) / np.where(s == 0, np.nan, s)
            for s, grid in zip(steps, (surface.x, surface.y), strict=True)
        ]
    distance = np.linspace(0.0, float(np.nanmin(reach)), POINTS)
    along = loss_at(surface, *(s * distance[:, None] for s in steps))
    # "inverted_cdf" takes one of the losses and so never the difference of two infinite ones.
    return Profile(distance, *np.quantile(along, (0.25, 0.5, 0.75), axis=1, method="inverted_cdf"))


def has_profile(surface: Surface) -> bool:
    """Whether a surface has a profile: its centre is a set of weights inside the grid, with a finite loss."""
    if surface.kind not in CENTERED or min(surface.loss.shape) < 2:
        return False
    inside = all(grid[0] < 0 < grid[-1] and np.all(np.diff(grid) > 0) for grid in (surface.x, surface.y))
    return inside and independent(gram(surface)) and bool(np.isfinite(center_loss(surface)))


def center_loss(surface: Surface) -> float:
    """The loss at the centre, interpolated where the grid has no point there."""
    return float(loss_at(surface, np.zeros(1), np.zeros(1))[0])


def median_rise(surface: Surface) -> float:
    """The median over the plane of the loss, less that at the centre: how flat a minimum is, in nats."""
    finite = surface.loss[np.isfinite(surface.loss)]
    return float(np.median(finite)) - center_loss(surface) if finite.size else np.nan


def shared_rise(surfaces: Sequence[Surface]) -> float:
    """The rise of the loss above the centre whose contour is drawn on all ``surfaces``; NaN for none.

    Half the median rise at the edge of the profile, of the surface on which that is the smallest (ours): the
    contour is then inside every picture.
    """
    rises = [float(p.median[-1] - p.median[0]) for p in map(profile, filter(has_profile, surfaces))]
    positive = [rise for rise in rises if np.isfinite(rise) and rise > 0]
    return min(positive) / 2 if positive else np.nan


def comparable(surfaces: Sequence[Surface]) -> bool:
    """Whether the rises of ``surfaces`` can be compared.

    They must be of networks of one size, over one kind of plane, one span and one split of the data.
    """
    kinds = {(s.kind, s.norm, s.seed, s.ignore, s.span, s.split, len(s.center)) for s in surfaces}
    return len(kinds) == 1 and all(map(has_profile, surfaces))


def barrier(t: Array, loss: Array) -> float:
    """The loss barrier between the ends of a line: max_t [L(t) − ((1−t)·L(0) + t·L(1))] ≥ 0.

    A barrier of 0 means that the loss never rises above the straight line between its ends, as in a convex
    valley: the two ends are linearly connected (Frankle et al. 2020, who use the mean of the two ends in
    place of the straight line; this form is from Entezari et al. 2022, section 2).

    Args:
        t: (K,), from 0 to 1.
        loss: (K,).

    Returns:
        The barrier in the unit of the loss; NaN if a loss is NaN or an end is infinite.

    Example:
        >>> barrier(np.array([0.0, 0.5, 1.0]), np.array([1.0, 4.0, 3.0]))
        2.0
    """
    with np.errstate(invalid="ignore"):
        return float(np.max(loss - ((1 - t) * loss[0] + t * loss[-1])))

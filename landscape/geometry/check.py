"""Checks of finished surfaces: do their pictures show what they seem to, and what do they leave out?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from landscape.core.errors import OperationError
from landscape.core.hdf5 import Array
from landscape.results.grids import CENTERED, Surface
from landscape.results.shown import Finding, SurfaceCheck
from landscape.results.spectrum import ExtremeEigenvalues

# Ours, all of them. A center that lies higher than the lowest point by more than this share of the median
# rise is no minimum of the picture: the threshold of a basin that is listed (landscape.basins).
NO_MINIMUM = 0.01
# A loss that changes by less than this share of itself is drawn from its last digits.
FLAT = 1e-3
# A rise by more than this many times the lowest loss, or of 1, is of weights that compute nothing sensible:
# runs at Figure 2(a)'s rate come back from bursts of 1,272 nat, and count as diverged above 10,000.
FAR = 1e3
# The lower tenth of the range is a valley. With fewer points its shape is that of the grid, unless they are
# more than this share of a coarse one; a parabola has 16% of the points there.
VALLEY, LEAST_POINTS, LEAST_SHARE = 0.1, 9, 0.05
# A plane with less than half of λ_max, or of a negative λ_min, does not show how sharp the place is.
SHOWN = 0.5
# Of the spread of the places on a plane, and of the range of losses: what a reader of the picture overlooks.
EXPLAINED, OVERLOOKED = 0.9, 0.05


def check(surface: Surface, ends: ExtremeEigenvalues | None = None) -> SurfaceCheck:
    """Look at what a picture of ``surface`` shows and leaves out; as :meth:`landscape.Surface.check`.

    Raises OperationError for a surface without a finite loss.
    """
    if not np.isfinite(surface.loss).any():
        raise OperationError("surface: it has no finite loss to look at; choose a smaller span")
    found = [*_center(surface), *_window(surface), *_curvature(surface, ends), *_places(surface)]
    return SurfaceCheck((*found, *_batchnorm(surface), *_directions(surface), *_points(surface)))


def _center(surface: Surface) -> Iterator[Finding]:
    if surface.kind not in CENTERED:
        return
    loss = surface.loss
    i, j = np.abs(surface.y).argmin(), np.abs(surface.x).argmin()
    low = np.unravel_index(np.nanargmin(np.where(np.isfinite(loss), loss, np.nan)), loss.shape)
    depth = loss[i, j] - loss[low]
    rise = np.nanmedian(loss[np.isfinite(loss)]) - loss[low]
    fine = bool(depth <= NO_MINIMUM * rise)
    words = f"its loss is {loss[i, j]:.4g}"
    if depth > 0:
        words += f", {depth:.2g} above the lowest, at ({surface.x[low[1]]:.3g}, {surface.y[low[0]]:.3g})"
    else:
        words += ", the lowest of all points"
    fit = _quadratic(surface)
    if fit is not None:
        slope, curvature = fit
        words += f"; slopes {slope[0]:.2g} and {slope[1]:.2g} {surface.loss_unit} a unit".replace("  ", " ")
        if np.linalg.eigvalsh(curvature)[0] > 0:
            step = np.linalg.solve(curvature, slope)
            words += f", zero {np.abs(step).max() / surface.span:.1g} spans away"
    yield Finding("center", fine, words, "" if fine else "the training split, or more training steps")


def _quadratic(surface: Surface) -> tuple[Array, Array] | None:
    """Slope (2,) and second derivatives (2, 2) at the origin, of a parabola fitted to 3 × 3 points there.

    None where the origin is no inner point of the grid, or a loss there is not finite.
    """
    i, j = np.abs(surface.y).argmin(), np.abs(surface.x).argmin()
    loss = surface.loss[i - 1 : i + 2, j - 1 : j + 2] if i and j else surface.loss[:0]
    if loss.shape != (3, 3) or not np.isfinite(loss).all():
        return None
    x, y = (a.ravel() for a in np.meshgrid(surface.x[j - 1 : j + 2], surface.y[i - 1 : i + 2]))
    width, height = np.ptp(x), np.ptp(y)
    u, v = x / width, y / height  # of the size of 1, for the least squares
    terms = np.stack((np.ones(9), u, v, u * u / 2, u * v, v * v / 2), axis=1)
    _, gu, gv, uu, uv, vv = np.linalg.lstsq(terms, loss.ravel())[0]
    scale = np.array([1 / width, 1 / height])
    return np.array([gu, gv]) * scale, np.array([[uu, uv], [uv, vv]]) * np.outer(scale, scale)


def _window(surface: Surface) -> Iterator[Finding]:
    finite = surface.loss[np.isfinite(surface.loss)]
    low, high = float(finite.min()), float(finite.max())
    lost = surface.loss.size - finite.size if surface.done.all() or surface.columns else 0
    few = int((finite <= low + VALLEY * (high - low)).sum())
    words = f"losses from {low:.4g} to {high:.4g}; {few:,} of {surface.loss.size:,} points in the lower tenth"
    if lost:
        yield Finding("window", False, f"{lost:,} points have no finite loss; {words}", "a smaller span=")
    elif high - low <= FLAT * abs(low):
        yield Finding("window", False, f"the loss hardly changes, {words}", "a larger span=")
    elif not high - low <= FAR * max(abs(low), 1.0):
        yield Finding("window", False, f"far beyond any working network, {words}", "a smaller span=")
    elif few < min(LEAST_POINTS, LEAST_SHARE * surface.loss.size):
        advice = "a smaller span=, a larger grid= or a logarithmic scale"
        yield Finding("window", False, f"the walls hide the valley, {words}", advice)
    else:
        yield Finding("window", True, words)


def _curvature(surface: Surface, ends: ExtremeEigenvalues | None) -> Iterator[Finding]:
    """The curvature along the plane against the ends of the spectrum at its center."""
    if ends is None or surface.kind not in CENTERED:
        return
    fit, directions = _quadratic(surface), surface.directions.astype(np.float64)
    if np.linalg.matrix_rank(directions) < 2:
        return
    if fit is None:
        yield Finding("curvature", False, "the grid has no 3 × 3 points around its center", "an odd grid=")
        return
    import scipy.linalg  # here, because most checks do without it, and it takes longer than they

    least, largest = scipy.linalg.eigh(fit[1], directions @ directions.T, eigvals_only=True)
    sharp, down = largest >= SHOWN * ends.max, ends.min >= 0 or least <= SHOWN * ends.min
    words = f"{least:.3g} to {largest:.3g} on the plane, λ_min {ends.min:.3g} and λ_max {ends.max:.3g} in all"
    advice = "landscape.eigen_plane, which shows both ends" if not (sharp and down) else ""
    yield Finding("curvature", bool(sharp and down), words, advice)


def _places(surface: Surface) -> Iterator[Finding]:
    """The places that define the plane, as far as the plane leaves them out."""
    if surface.explained.size:
        share = float(surface.explained.sum())
        advice = "" if share >= EXPLAINED else "the distances of the places beside the picture"
        words = f"the plane has {share:.0%} of the spread of its {len(surface.labels)} places"
        yield Finding("places", share >= EXPLAINED, words, advice)
    if not len(surface.marker_loss):
        return
    finite = surface.loss[np.isfinite(surface.loss)]
    method = "cubic" if min(surface.loss.shape) > 3 and finite.size == surface.loss.size else "linear"
    from scipy.interpolate import RegularGridInterpolator

    drawn = RegularGridInterpolator((surface.y, surface.x), surface.loss, method, bounds_error=False)(
        surface.markers[:, ::-1]
    )
    gap = np.where(np.isfinite(drawn), surface.marker_loss - drawn, 0.0)
    if not np.isfinite(drawn).any():
        return
    worst = int(np.abs(gap).argmax())
    words = f"{surface.labels[worst]} has the loss {surface.marker_loss[worst]:.4g}"
    words += f", the plane below it {drawn[worst]:.4g}"
    fine = bool(abs(gap[worst]) <= OVERLOOKED * np.ptp(finite))
    advice = "" if fine else "a plane through fewer places, as of landscape.between"
    yield Finding("places", fine, words, advice)


def _batchnorm(surface: Surface) -> Iterator[Finding]:
    if surface.batchnorm and surface.bn == "center":
        whose = surface.statistics_of or "the center"
        words = f"all points use the statistics of {whose}, so that losses away from it come out too high"
        yield Finding("BatchNorm", False, words, 'bn="recalibrate"')
    elif surface.batchnorm:
        yield Finding("BatchNorm", True, f"statistics of each point itself ({surface.bn})")


def _directions(surface: Surface) -> Iterator[Finding]:
    if surface.kind != "random":
        return
    moved = "" if surface.ignore == "bias+norm" else ", and biases and normalization layers move, too"
    if surface.norm == "none":
        words = f"random, of the same size for large and small weights{moved}"
        advice = 'norm="filter" before pictures of two networks are compared'
        yield Finding("directions", False, words, advice)
    else:
        yield Finding("directions", True, f"random, scaled by {surface.norm}{moved}")


def _points(surface: Surface) -> Iterator[Finding]:
    missing = int((~surface.done).sum())
    if missing and not surface.columns:
        share = f"{missing:,} of {surface.done.size:,} points are not computed yet"
        yield Finding("points", False, share, "the same call again, which goes on with the file")
    elif missing:
        yield Finding("points", True, surface.interpolation())

"""Contour levels and colour scales of surfaces that are drawn together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colors, ticker

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.results.shown import LOG_RATIO, logarithmic

PAPER_SPACING = 0.005  # distance between contour lines in DPSGD-2020, Figure 3
MAX_LEVELS = 40  # more lines than this cannot be told apart at this size (ours)
LOG_LEVELS = 25  # at equal ratios (ours)


@dataclass(frozen=True)
class Look:
    """How surfaces are drawn where the user says so; None: the default.

    Attributes:
        log: whether levels and colours are at equal ratios; None: see :func:`.shown.logarithmic`.
        levels: about how many levels.
        vmax: the highest level; higher losses have the last colour.
        cmap: a colour map of matplotlib.
        labels: whether contour lines are labelled with their losses.

    Example:
        >>> levels([np.array([[1.0, 3.0]])], Look(levels=4))
        array([1. , 1.5, 2. , 2.5, 3. ])
    """

    log: bool | None = None
    levels: int | None = None
    vmax: float | None = None
    cmap: str | None = None
    labels: bool = False


@dataclass(frozen=True)
class Scale:
    """Increasing ``levels``, the colour scale ``norm``, the ``step`` between lines and ``why`` it is so.

    Example:
        >>> scale([np.array([[0.0, 0.02]])]).step
        'lines 0.005 apart'
    """

    levels: Array
    norm: colors.Normalize
    step: str
    why: str


def levels(losses: Sequence[Array], look: Look | None = None) -> Array:
    """Contour levels for surfaces that are drawn together.

    The levels are 0.005 apart (DPSGD-2020, Figure 3) if that takes 4 to 40 lines, else at round numbers.
    Losses that differ by more than a factor of 100 get levels at equal ratios: at equal distances a whole
    valley would lie below the first level. The highest 2% of the losses lie above the last level if they
    would otherwise take more than half of the levels.

    Args:
        losses: arrays of losses in nats; values that are not finite are ignored.
        look: what the user chose.

    Returns:
        Increasing levels; the first is at most the lowest loss.

    Raises:
        InputError: no loss is finite, or a choice that these losses do not allow.

    Example:
        >>> levels([np.array([[0.0, 0.01], [0.02, np.nan]])])
        array([0.   , 0.005, 0.01 , 0.015, 0.02 ])
    """
    return scale(losses, look).levels


def scale(losses: Sequence[Array], look: Look | None = None) -> Scale:
    """Levels, colour scale and texts for surfaces that are drawn together; see :func:`levels`.

    Example:
        >>> scale([np.array([[0.1, 50.0]])]).why
        'logarithmic, as losses differ by a factor of 500, more than 100'
    """
    look = look or Look()
    low, high = _range(losses, look)
    log, why = _is_logarithmic(low, high, look)
    flat = high - low <= 1e-12 * max(1.0, abs(high))
    if flat:  # one level on either side
        pad = max(abs(high), 1.0) * 1e-6
        chosen, log = np.array([low - pad, high + pad]), False
    elif log:
        chosen = np.geomspace(low, high, max(2, look.levels or LOG_LEVELS))
    elif look.levels is None and 4 <= (high - low) / PAPER_SPACING <= MAX_LEVELS:
        start, stop = np.floor(low / PAPER_SPACING), np.ceil(high / PAPER_SPACING)
        chosen = np.arange(start, stop + 1) * PAPER_SPACING
    else:
        chosen = np.asarray(ticker.MaxNLocator(look.levels or 24).tick_values(low, high))
    chosen[0] = min(chosen[0], low)  # a rounding must not leave a hole
    chosen[-1] = max(chosen[-1], high)
    if log:
        return Scale(
            chosen,
            colors.LogNorm(chosen[0], chosen[-1]),
            f"each line {100 * (chosen[1] / chosen[0] - 1):.0f}% above the last",
            why,
        )
    step = f"lines {float(chosen[1] - chosen[0]):.3g} apart"
    return Scale(chosen, colors.Normalize(chosen[0], chosen[-1]), step, why)


def _range(losses: Sequence[Array], look: Look) -> tuple[float, float]:
    """The lowest and the highest level."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    if finite.size == 0:
        raise InputError("loss: no value is finite, there is nothing to draw")
    low, high, usual = float(finite.min()), float(finite.max()), float(np.quantile(finite, 0.98))
    if look.levels is not None:
        positive("--levels", look.levels, least=2)
    if look.vmax is not None:
        if not np.isfinite(look.vmax) or look.vmax <= low:
            raise InputError(
                f"--vmax: {look.vmax:g} is not allowed, it must be above the lowest loss, {low:.4g}"
            )
        return low, look.vmax
    return low, usual if usual > low and high - low > 2 * (usual - low) else high


def _is_logarithmic(low: float, high: float, look: Look) -> tuple[bool, str]:
    """Whether levels are at equal ratios, and why, for the caption."""
    if look.log is not None:
        if look.log and low <= 0:
            raise InputError(
                f"--log: not allowed, the lowest loss is {low:.4g}; it must be > 0 (or --linear)"
            )
        return look.log, f"{'logarithmic' if look.log else 'linear'}, as asked"
    if logarithmic(np.array([low, high])):
        return True, f"logarithmic, as losses differ by a factor of {high / low:.3g}, more than {LOG_RATIO:g}"
    if low <= 0:
        return False, "linear, as not all losses are > 0"
    return False, f"linear, as losses differ by a factor of {high / low:.3g}, at most {LOG_RATIO:g}"

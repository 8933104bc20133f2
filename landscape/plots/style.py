"""The look of all figures: matplotlib's settings, the colours of algorithms, labels of logarithmic axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib import ticker

# Figure 2's colours, in a colour-blind-safe version: DPSGD green, SSGD red, SSGD* blue.
COLORS = {"ssgd": "#D55E00", "dpsgd": "#009E73", "ssgd*": "#0072B2"}
_SETTINGS = str(Path(__file__).with_name("style.mplstyle"))


@contextlib.contextmanager
def style() -> Iterator[None]:
    """A context in which matplotlib draws with the settings of ``style.mplstyle``.

    Example:
        >>> import matplotlib
        >>> with style():
        ...     matplotlib.rcParams["savefig.dpi"]
        150.0
    """
    with matplotlib.style.context(_SETTINGS):
        yield


def decimal_labels(axis: Any) -> None:
    """Label a logarithmic axis with decimal numbers (0.5, 20, 100) instead of powers of ten.

    Args:
        axis: an x or y axis of matplotlib, ``ax.xaxis`` or ``ax.yaxis``.

    Example:
        >>> from landscape.plots.picture import panels
        >>> figure, (ax,) = panels(1, 1, 4.0, 3.0)
        >>> ax.set_yscale("log")
        >>> decimal_labels(ax.yaxis)
        >>> ax.yaxis.get_major_formatter()(0.1)
        '0.1'
    """
    for setter in (axis.set_major_formatter, axis.set_minor_formatter):
        setter(_Decimal(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


class _Decimal(ticker.LogFormatter):
    """Labels the same ticks as its base class, with decimal numbers also below 1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""

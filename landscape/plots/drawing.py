"""Which function draws which kind of result: the registry of drawings.

A drawing is a function of a sequence of results of one kind and a title that returns a figure. It registers
itself under the name of the class of the results::

    @draws(Surface)
    def draw_surfaces(results: Sequence[Surface], title: str = "") -> Figure: ...

Another package registers drawings of its own classes in the same way, in the module that its entry point of
the group "landscape.plugins" names (see :mod:`landscape.core.registry`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser

from landscape.core.errors import InputError
from landscape.core.files import printable
from landscape.core.hdf5 import LARGEST
from landscape.core.registry import drawings
from landscape.plots.style import style as figure_style
from landscape.results.base import Result
from landscape.results.grids import Interpolated

# Longest label in characters: more do not fit into any picture (ours).
LENGTH = 300


def literal(text: str) -> str:
    """``text`` in the form in which matplotlib shows its characters unchanged.

    A dollar sign then begins no formula, and characters that cannot be printed are written as escapes. Texts
    longer than 300 characters are cut.
    """
    short = text if len(text) <= LENGTH else text[:LENGTH] + "…"
    return "\n".join(printable(line) for line in short.split("\n")).replace("$", r"\$")


def drawable(result: Any) -> Any:
    """A copy of ``result`` with :func:`literal` texts, and with infinity for numbers too large for an axis.

    Of an unfinished grid it is the finest part that is complete.

    Drawings leave out infinite numbers. Other objects than results are returned unchanged.
    """
    if not isinstance(result, Result):
        return result
    if isinstance(result, Interpolated):
        result = result.nested()
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, str):
            changed[field.name] = literal(value)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(map(literal, value))
        elif isinstance(value, float) and abs(value) > LARGEST:
            changed[field.name] = np.copysign(np.inf, value)
        elif isinstance(value, np.ndarray) and value.dtype == np.float64:
            too_large = np.abs(value) > LARGEST
            if too_large.any():
                changed[field.name] = np.where(too_large, np.copysign(np.inf, value), value)
    return dataclasses.replace(result, **changed) if changed else result


def each_of(given: Any) -> list[Any]:
    """One or several results, runs or names of files, as a list."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, Path))
    return list(given) if several else [given]


def check_title(where: str, text: str) -> None:
    """Check that matplotlib can set the formulas between dollar signs in ``text``.

    Args:
        where: the option that the text was given with, for the message.

    Raises:
        InputError: a formula that matplotlib cannot read.
    """
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        return  # matplotlib then shows every dollar sign as it is
    try:
        MathTextParser("agg").parse(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"{where}: '{text}' holds a formula that cannot be read; write \\$ for a dollar sign"
        ) from error


F = TypeVar("F", bound=Callable[..., Figure])


def draws(kind: type) -> Callable[[F], F]:
    """A decorator that registers a function as the drawing of results of class ``kind``.

    The function runs in the style of all pictures and receives results whose texts and numbers can be drawn
    (``drawable``). A parameter ``style`` of the function receives the argument of
    :func:`landscape.draw` with that name.

    Args:
        kind: the class of the results. Its subclasses without a drawing of their own are drawn likewise.

    Raises:
        InputError: another class of the same name already has a drawing.

    Example:
        >>> from landscape.plots import draw
        >>> from landscape.plots.picture import panels
        >>> class Height(float):
        ...     pass
        >>> @draws(Height)
        ... def draw_heights(results, title=""):
        ...     figure, (ax,) = panels(1, 1, 4.0, 3.0)
        ...     ax.bar(range(len(results)), results)
        ...     return figure
        >>> len(draw([Height(2), Height(1)]).axes[0].patches)
        2
    """

    def register(function: F) -> F:
        @functools.wraps(function)
        def draw(results: Sequence[Any], *arguments: Any, **options: Any) -> Figure:
            with figure_style():
                return function([drawable(r) for r in results], *arguments, **options)

        return drawings.add(kind.__name__)(draw)  # type: ignore[return-value]

    return register


def drawing_of(kind: type) -> Callable[..., Figure]:
    """The drawing of results of class ``kind``: its own, or that of the nearest base class.

    Raises:
        InputError: neither the class nor any base class has a drawing.
    """
    for base in kind.__mro__:
        if base.__name__ in drawings:
            return drawings[base.__name__]
    raise InputError(
        f"results: a {kind.__name__} has no drawing (allowed: {', '.join(drawings.names())}); register one "
        "with landscape.plugins.draws"
    )

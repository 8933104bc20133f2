"""Which function draws which kind of result: the registry of drawings.

A drawing is a function of a sequence of results of one kind and a title that returns a figure. It registers
itself under the name of the class of the results::

    @draws(Surface)
    def draw_surfaces(results: Sequence[Surface], title: str = "") -> Figure: ...

Another package registers drawings of its own classes in the same way, in the module that its entry point of
the group "landscape.plugins" names (see :mod:`landscape.core.registry`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.core.registry import drawings
from landscape.plots.values import drawable

F = TypeVar("F", bound=Callable[..., Figure])


def draws(kind: type) -> Callable[[F], F]:
    """A decorator that registers a function as the drawing of results of class ``kind``.

    The function receives results whose texts and numbers can be drawn (see
    :func:`landscape.plots.values.drawable`). A parameter ``style`` of the function receives the argument of
    :func:`landscape.plots.draw` with that name.

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
            return function([drawable(r) for r in results], *arguments, **options)

        return drawings.add(kind.__name__)(draw)  # type: ignore[return-value]

    return register


def drawing_of(kind: type) -> Callable[..., Figure]:
    """The drawing of results of class ``kind``: its own, or that of the nearest base class.

    Raises:
        InputError: neither the class nor any base class has a drawing.

    Example:
        >>> from landscape.results.line import Line
        >>> class MyLine(Line):
        ...     pass
        >>> drawing_of(MyLine) is drawing_of(Line)
        True
    """
    for base in kind.__mro__:
        if base.__name__ in drawings:
            drawing: Callable[..., Figure] = drawings[base.__name__]
            return drawing
    raise InputError(
        f"FILE: a {kind.__name__} has no drawing (allowed: {', '.join(drawings.names())}); register one with "
        "landscape.plots.drawing.draws"
    )

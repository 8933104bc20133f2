"""Versions of the numerics: what stores results knows by them which of these must be computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from landscape.core.options import positive

T = TypeVar("T")
_VERSIONS: dict[Any, int] = {}


def numerics(version: int) -> Callable[[T], T]:
    """A decorator: ``version`` is that of the numbers which the function or class computes.

    Raise it with each change of the numbers beyond rounding, be it in the function or in what it calls.
    ``landscape figures`` then computes again what it has stored. Speed, messages and rounding do not count.

    Args:
        version: 1 at first.

    Returns:
        The decorator; it gives the function or class back as it is.

    Raises:
        InputError: a version below 1.

    Example:
        >>> @numerics(2)
        ... def mean(values: list[float]) -> float:
        ...     return sum(values) / len(values)
        >>> version_of(mean)
        2
    """
    positive("numerics", version, least=1)

    def declare(computed_by: T) -> T:
        _VERSIONS[computed_by] = version
        return computed_by

    return declare


def version_of(computed_by: Any) -> int:
    """The version that :func:`numerics` gave a function or class.

    Args:
        computed_by: the function or class.

    Returns:
        The version.

    Raises:
        KeyError: it was given none.

    Example:
        >>> version_of(numerics(3)(str.upper))
        3
    """
    return _VERSIONS[computed_by]

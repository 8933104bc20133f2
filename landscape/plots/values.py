"""What is drawn of a result: its texts as they are, no formulas, and numbers that have a place on an axis."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser

from landscape.core.errors import InputError
from landscape.core.files import printable
from landscape.core.hdf5 import LARGEST
from landscape.results.base import Result

F = TypeVar("F", bound=Callable[..., Figure])
# Characters of a label: more do not fit into any picture (ours).
LENGTH = 300


def plain(text: str) -> str:
    """``text`` as matplotlib shows it: a dollar sign begins no formula, an escape sequence is written out."""
    short = text if len(text) <= LENGTH else text[:LENGTH] + "…"
    return "\n".join(printable(line) for line in short.split("\n")).replace("$", r"\$")


def drawing(function: F) -> F:
    """A function that draws results, given them with :func:`drawable` values."""

    @functools.wraps(function)
    def draw(results: Sequence[Any], title: str = "") -> Figure:
        return function([drawable(r) for r in results], title)

    return draw  # type: ignore[return-value]


def drawable(result: Any) -> Any:
    """``result`` with :func:`plain` texts; numbers beyond any axis are infinite, which is left out."""
    if not isinstance(result, Result):
        return result
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, str):
            changed[field.name] = plain(value)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(map(plain, value))
        elif isinstance(value, float) and abs(value) > LARGEST:
            changed[field.name] = np.copysign(np.inf, value)
        elif isinstance(value, np.ndarray) and value.dtype == np.float64:
            beyond = np.abs(value) > LARGEST
            if beyond.any():
                changed[field.name] = np.where(beyond, np.copysign(np.inf, value), value)
    return dataclasses.replace(result, **changed) if changed else result


def check_title(where: str, text: str) -> None:
    """InputError unless matplotlib can set the formulas between dollar signs in ``text``."""
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        return  # then it takes none of them for a formula
    try:
        MathTextParser("agg").parse(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"{where}: '{text}' holds a formula that cannot be read; write \\$ for a dollar sign"
        ) from error

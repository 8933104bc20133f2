"""The texts and numbers of a result in a form that matplotlib can draw."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from matplotlib.mathtext import MathTextParser

from landscape.core.errors import InputError
from landscape.core.files import printable
from landscape.core.hdf5 import LARGEST
from landscape.results.base import Result

# Longest label in characters: more do not fit into any picture (ours).
LENGTH = 300


def literal(text: str) -> str:
    """``text`` in the form in which matplotlib shows its characters unchanged.

    A dollar sign then begins no formula, and characters that cannot be printed are written as escapes. Texts
    longer than 300 characters are cut.

    Example:
        >>> print(literal("costs $5"))
        costs \\$5
    """
    short = text if len(text) <= LENGTH else text[:LENGTH] + "…"
    return "\n".join(printable(line) for line in short.split("\n")).replace("$", r"\$")


def drawable(result: Any) -> Any:
    """A copy of ``result`` with :func:`literal` texts, and with infinity for numbers too large for an axis.

    Drawings leave out infinite numbers. Other objects than results are returned unchanged.

    Example:
        >>> from landscape.results.escape import Escape
        >>> times, values = np.full((1, 1, 6), 1e200), np.ones(1)
        >>> result = Escape(times, values, "lr", ("ssgd",), share=0.5, steps=10, label="$x$")
        >>> drawable(result).label, float(drawable(result).times.max())
        ('\\\\$x\\\\$', inf)
    """
    if not isinstance(result, Result):
        return result
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


def check_title(where: str, text: str) -> None:
    """Check that matplotlib can set the formulas between dollar signs in ``text``.

    Args:
        where: the option that the text was given with, for the message.

    Raises:
        InputError: a formula that matplotlib cannot read.

    Example:
        >>> check_title("--title", r"rate $\\alpha$")
        >>> check_title("--title", r"$\\frac$")
        Traceback (most recent call last):
        landscape.core.errors.InputError: --title: '$\\frac$' holds a formula that cannot be read; ...
    """
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        return  # matplotlib then shows every dollar sign as it is
    try:
        MathTextParser("agg").parse(text)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"{where}: '{text}' holds a formula that cannot be read; write \\$ for a dollar sign"
        ) from error

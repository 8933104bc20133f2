"""The HTML by which notebooks show a result: a small picture and a table."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from landscape.core.files import printable

LENGTH = 200  # characters of a value in the table (ours)
DPI = 72  # pixels per inch: a picture of 5 × 4.7 inches is then 360 pixels wide (ours)


def summary(title: str, values: Mapping[str, Any], units: Mapping[str, str], draw: Callable[[], Any]) -> str:
    """A title, a picture and a table of ``values`` as HTML, with all texts escaped.

    Args:
        values: numbers, texts, tuples of texts and arrays by name. Of an array the table shows the shape;
            empty arrays and texts are left out.
        units: of the values that have one, by name.
        draw: returns a figure of matplotlib. Where it raises an error about the values, such as that none is
            finite, the error's text takes the place of the picture.

    Example:
        >>> from matplotlib.figure import Figure
        >>> text = summary("Line <1>", {"barrier": 0.25}, {"barrier": "nat"}, lambda: Figure(figsize=(1, 1)))
        >>> "Line &lt;1&gt;" in text, "0.25 nat" in text, "data:image/png;base64," in text
        (True, True, True)
    """
    rows = "".join(
        f"<tr><th style='text-align:left'>{_escaped(name)}</th>"
        f"<td style='text-align:left'>{_escaped(_text(value, units.get(name, '')))}</td></tr>"
        for name, value in values.items()
        if np.size(value) and not (isinstance(value, str) and not value)
    )
    inside = f"<div>{_picture(draw)}</div><table>{rows}</table>"
    return f"<b>{_escaped(title)}</b><div style='display:flex;gap:1em;align-items:start'>{inside}</div>"


def _picture(draw: Callable[[], Any]) -> str:
    buffer = io.BytesIO()
    try:
        draw().savefig(buffer, format="png", dpi=DPI)
    except (
        ArithmeticError,
        LookupError,
        ValueError,
    ) as error:  # as for landscape plot: values without a place
        return f"<i>no picture: {_escaped(_short(str(error)))}</i>"
    return f"<img alt='picture' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


def _text(value: Any, unit: str) -> str:
    """A value as the table shows it; the unit "1" is left out."""
    if isinstance(value, np.ndarray):
        text = f"{' × '.join(map(str, value.shape))} {value.dtype}"
    elif isinstance(value, tuple):
        text = ", ".join(map(str, value))
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    else:
        text = str(value)
    return _short(text) + (f" {unit}" if unit not in ("", "1") else "")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LENGTH else line[: LENGTH - 1] + "…"


def _escaped(text: str) -> str:
    return html.escape(printable(text))

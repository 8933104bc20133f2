"""How results are shown on terminals, in pictures, on pages and in notebooks: rows, words, scales, HTML."""

from __future__ import annotations

import base64
import html
import io
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from landscape.core.files import printable
from landscape.core.hdf5 import Array

# The ratio of the largest to the smallest number above which a scale is logarithmic (ours): at equal
# distances a whole valley would then lie below the first of some forty levels.
LOG_RATIO = 100.0
# The share of the steps that a running median is of, and the number of its points (ours): what is shown of
# 10,000 steps then follows changes over 500 of them.
WINDOW, POINTS = 0.05, 200


def logarithmic(values: Array) -> bool:
    """True if ``values`` are shown on a logarithmic scale by default.

    Args:
        values: numbers of any shape; those that are not finite are ignored.

    Returns:
        True where all finite numbers are > 0 and the largest is more than 100 times the smallest.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = values[np.isfinite(values)]
    if not finite.size or finite.min() <= 0:
        return False
    # A product: the ratio of a large number to a subnormal one overflows.
    return bool(finite.max() > LOG_RATIO * finite.min())


def running_quartiles(steps: Array, values: Array) -> tuple[Array, Array]:
    """The quartiles of noisy ``values`` in a window that moves along the steps.

    Args:
        steps: (T,), in any order; of several runs one after another.
        values: (T,); those that are not finite are ignored.

    Returns:
        (at, quartiles): at (K,) steps, and quartiles (3, K), the lower quartile, the median and the upper
        quartile of the values at most 2.5% of the range of the steps away. Empty without a finite value.
    """
    finite = np.isfinite(values) & np.isfinite(steps)
    order = np.argsort(steps[finite], kind="stable")
    steps, values = steps[finite][order], values[finite][order]
    places = np.unique(steps)
    if len(places) > POINTS:
        places = places[np.linspace(0, len(places) - 1, POINTS).round().astype(int)]
    reach = WINDOW / 2 * float(np.ptp(steps)) if len(steps) else 0.0
    first = np.searchsorted(steps, places - reach, "left")
    last = np.searchsorted(steps, places + reach, "right")
    inside = [np.quantile(values[a:b], (0.25, 0.5, 0.75)) for a, b in zip(first, last, strict=True)]
    return places, np.array(inside).reshape(-1, 3).T


@dataclass(frozen=True)
class Row:
    """A line of a result's description: a number with its error, or a text.

    Attributes:
        name: what it is.
        value: the number, or a text.
        error: what follows "±": one standard error, or what ``note`` says; 0 if the number is exact, NaN if
            there is none.
        unit: "" for numbers without a unit.
        note: what else belongs to it, such as the number of draws.
    """

    name: str
    value: float | str
    error: float = math.nan
    unit: str = ""
    note: str = ""

    @property
    def number(self) -> str:
        """The value, to the digits that its error leaves, with error and unit; "–" for NaN."""
        if isinstance(self.value, str):
            return self._with_unit(self.value)
        if math.isnan(self.value):
            return "–"
        return self._with_unit(in_words(self.value, self.error if self.error > 0 else math.nan))

    @property
    def text(self) -> str:
        """The value to six digits, with error, unit and note."""
        if isinstance(self.value, str) or math.isnan(self.value):
            text = self.value if isinstance(self.value, str) else "–"
        else:
            text = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:.6g}"
            text += f" ± {self.error:.2g}" if self.error > 0 else ""
        note = "exact" if self.error == 0 and not self.note else self.note
        return "   ".join(filter(None, (self._with_unit(text), note)))

    def _with_unit(self, text: str) -> str:
        return text + (self.unit if self.unit == "%" else f" {self.unit}" if self.unit else "")


def percent(name: str, share: float, error: float = math.nan, note: str = "") -> Row:
    """A share as a row, in %."""
    return Row(name, 100 * float(share), 100 * float(error), "%", note)


def converged(met: bool, missed: str) -> Row:
    """A row that says if the tolerance was met; ``missed`` says what to do if not."""
    return Row("converged", "yes" if met else "NO", note="" if met else missed)


def interval(ends: tuple[float, float]) -> str:
    """The ends of a 95% interval in words; "" where neither is known."""
    if math.isfinite(ends[1]):
        return f"95%: {ends[0]:.4g} to {ends[1]:.4g}"
    return "" if math.isnan(ends[0]) else f"95%: above {ends[0]:.4g}"


def limit_in_words(limit: float) -> str:
    """The largest stable ηλ, as a note."""
    return f"limit {limit:.4g}" if math.isfinite(limit) else "limit not known"


def eigenvalue(name: str, value: float, residual: float, unit: str = "nat") -> Row:
    """An eigenvalue as a row, its residual as the error."""
    relative = f", relative residual {residual / abs(value):.1e}" if value else ""
    return Row(name, float(value), float(residual), unit, f"±: residual{relative}")


def text_of(result: Any) -> str:
    """A description as lines: label and split of the result, and its rows, names below each other."""
    label = " ".join(str(getattr(result, "label", "")).split()) or type(result).__name__
    split = f": {result.split} loss" if getattr(result, "split", "") else ""
    rows = result.describe()
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join([label + split, *(f"  {row.name:{width}}  {row.text}" for row in rows)])


def in_words(value: float, error: float = math.nan) -> str:
    """A number to four digits; with an error, to its first digit, or to its second where it begins with 1."""
    if not math.isfinite(error) or error < 0:
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"
    if error == 0 or not math.isfinite(value):
        return f"{value:.4g} ± {error:g}"
    size = math.floor(math.log10(error))
    more = int(10 ** (math.log10(error) - size) < 1.95)
    places = more - size
    if not -3 <= places <= 4:
        digits = places + math.floor(math.log10(abs(value))) if value else 0
        return f"{value:.{min(max(digits, 0), 15) + 1}g} ± {error:.{more}e}"
    return f"{value:,.{max(places, 0)}f} ± {error:,.{max(places, 0)}f}"


LONGEST = 200  # characters of a value in the table (ours)
DPI = 72  # pixels per inch: a picture of 5 × 4.7 inches is then 360 pixels wide (ours)


def html_of(result: Any) -> str:
    """A result as HTML with all texts escaped: its class, a picture, its description, and then its fields.

    Of arrays the table shows the shape; empty arrays and texts are left out. Where the drawing raises an
    error about the values, such as that none is finite, the error's text takes the place of the picture.
    """
    cells = [(row.name, _short(row.text)) for row in result.describe()]
    cells += fields_in_words(result).items()
    table = "".join(
        f"<tr><th style='text-align:left'>{_escaped(name)}</th>"
        f"<td style='text-align:left'>{_escaped(text)}</td></tr>"
        for name, text in cells
    )
    inside = f"<div>{_picture(result)}</div><table>{table}</table>"
    title = type(result).__name__
    return f"<b>{title}</b><div style='display:flex;gap:1em;align-items:start'>{inside}</div>"


def fields_in_words(result: Any) -> dict[str, str]:
    """The fields of a result with their units, but for empty arrays and texts; of arrays the shape."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    known = {k: v for k, v in values.items() if (v if isinstance(v, str) else np.size(v))}
    return {name: _text(value, result.units.get(name, "")) for name, value in known.items()}


def _picture(result: Any) -> str:
    buffer = io.BytesIO()
    try:
        result.plot().savefig(buffer, format="png", dpi=DPI)
    # As for landscape plot: values without a place.
    except (ArithmeticError, LookupError, ValueError) as error:
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
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        subject: what was looked at: "centre", "window", "curvature", "places", "BatchNorm", "directions" or
            "points".
        fine: whether the picture shows it as a reader expects.
        answer: a sentence with the numbers.
        advice: what to try; "" where it is fine.
    """

    subject: str
    fine: bool
    answer: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{'fine' if self.fine else 'LOOK'}  {self.subject}: {self.answer}"
        return f"{line}; try {self.advice}" if self.advice else line


@dataclass(frozen=True, repr=False)
class SurfaceCheck:
    """The findings about a surface: a line for each subject when printed.

    Attributes:
        findings: in the order in which a reader asks.
    """

    findings: tuple[Finding, ...]

    @property
    def fine(self) -> bool:
        """True where a reader needs to know nothing more."""
        return all(finding.fine for finding in self.findings)

    def __repr__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)

"""How results are shown on terminals, in pictures, on pages and in notebooks: rows, words, scales, HTML."""

from __future__ import annotations

import base64
import html
import importlib
import io
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from landscape.core.errors import InputError, OperationError
from landscape.core.files import printable
from landscape.core.hdf5 import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The ratio of the largest to the smallest number above which a scale is logarithmic (our choice: at equal
# distances a whole valley would then lie below the first of some forty levels).
LOG_RATIO = 100.0
# The share of the steps that a running median is of, and the number of its points (our choice: what is shown
# of 10,000 steps then follows changes over 500 of them).
WINDOW, POINTS = 0.05, 200
# What stands for infinity between the points of a grid, and the share of a radius whose error is rough (our
# choice).
HUGE, ROUGH = 1e200, 0.1


def logarithmic(values: Array) -> bool:
    """Return whether ``values`` are shown on a logarithmic scale by default.

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
    """Return the quartiles of noisy ``values`` in a window that moves along the steps.

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
    positions = np.unique(steps)
    if len(positions) > POINTS:
        positions = positions[np.linspace(0, len(positions) - 1, POINTS).round().astype(int)]
    reach = WINDOW / 2 * float(np.ptp(steps)) if len(steps) else 0.0
    first = np.searchsorted(steps, positions - reach, "left")
    last = np.searchsorted(steps, positions + reach, "right")
    inside = [np.quantile(values[a:b], (0.25, 0.5, 0.75)) for a, b in zip(first, last, strict=True)]
    return positions, np.array(inside).reshape(-1, 3).T


@dataclass(frozen=True)
class Row:
    """A line of a result's description: a number with its error, or a text.

    Attributes:
        name: the name of the number.
        value: the number, or a text.
        error: the number after "±": one standard error, or the error that ``note`` names; 0 for an exact
            number, NaN without an error.
        unit: "" for numbers without a unit.
        note: a remark, such as the number of draws.
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
        note = "exact" if self.error == 0 and self.value == self.value and not self.note else self.note
        return "   ".join(filter(None, (self._with_unit(text), note)))

    def _with_unit(self, text: str) -> str:
        return text + (self.unit if self.unit == "%" else f" {self.unit}" if self.unit else "")


def rows_of_each(
    names: Iterable[str], values: Any, errors: Any = math.nan, unit: str = "", notes: Any = ""
) -> list[Row]:
    """Return a row for each name; an error or a note that is given once is that of all rows."""
    rows = zip(names, *np.broadcast_arrays(values, errors, notes), strict=True)
    return [Row(name, float(value), float(error), unit, str(note)) for name, value, error, note in rows]


def own_losses(losses: Array, evaluated: Array) -> list[Row]:
    """Return a row on the losses of networks by their own BatchNorm statistics, or by those in use."""
    finite = np.isfinite(losses)
    if not finite.any() or losses.shape != evaluated.shape:
        return []
    with np.errstate(invalid="ignore"):
        gap = np.abs(losses - evaluated)[finite].max()
    listed = f"{losses[finite].min():.4g} to {losses[finite].max():.4g}"
    if len(losses) <= 3:
        listed = ", ".join(f"{loss:.4g}" if math.isfinite(loss) else "–" for loss in losses)
    note = f"each network by its own BatchNorm statistics; here up to {gap:.2g} away"
    return [Row("own losses", listed, unit="nat", note=note)]


def percent(name: str, share: float, error: float = math.nan, note: str = "") -> Row:
    """Return a share as a row, in %."""
    return Row(name, 100 * float(share), 100 * float(error), "%", note)


def converged(met: bool, missed: str) -> Row:
    """Return a row that says if the tolerance was met; ``missed`` says what to do if not."""
    return Row("converged", "yes" if met else "NO", note="" if met else missed)


def drawn_on(device: str) -> list[Row]:
    """A row on the device that drew random vectors; none for the CPU, whose draws all devices share."""
    return [Row("random vectors", f"of {device}", note="other devices draw others")] * (device != "cpu")


def interval(ends: tuple[float, float]) -> str:
    """Return the ends of a 95% interval in words; "" where neither is known."""
    if math.isfinite(ends[1]):
        return f"95%: {ends[0]:.4g} to {ends[1]:.4g}"
    return "" if math.isnan(ends[0]) else f"95%: above {ends[0]:.4g}"


def limit_in_words(limit: float) -> str:
    """Return the largest stable ηλ, as a note."""
    return f"limit {limit:.4g}" if math.isfinite(limit) else "limit not known"


def eigenvalue(name: str, value: float, residual: float, unit: str = "nat") -> Row:
    """Return an eigenvalue as a row, its residual as the error."""
    relative = f", relative residual {residual / abs(value):.1e}" if value else ""
    return Row(name, float(value), float(residual), unit, f"±: residual{relative}")


def text_of(result: Any, most: int = 0) -> str:
    """Return a description as lines: label and split of the result, and its rows, names below each other.

    Args:
        most: if not 0, the largest number of lines, with the class, without rows of NaN.
    """
    name, rows = type(result).__name__, result.describe()
    label = " ".join(str(getattr(result, "label", "")).split())
    split = f": {result.split} loss" if getattr(result, "split", "") else ""
    chosen = [row for row in rows if not most or row.value == row.value]
    # That a tolerance was missed is never left out.
    if most and len(chosen) + (len(chosen) < len(rows)) >= most:
        missed = [row for row in chosen[most - 2 :] if row.value == "NO"]
        chosen = chosen[: most - 2 - len(missed)] + missed
    width = max((len(row.name) for row in chosen), default=0)
    lines = [(label or name) + split, *(f"  {row.name:{width}}  {row.text}" for row in chosen)]
    if not most:
        return "\n".join(lines)
    lines[0] = f"{name}: {label}{split}" if label else name + split
    lines += [f"  … {len(rows) - len(chosen)} more in summary()"] if len(chosen) < len(rows) else []
    return "\n".join(_cut(printable(line), WIDTH) for line in lines)


def in_words(value: float, error: float = math.nan) -> str:
    """Return a number to four digits; with an error, to its first digit, or second if the first is 1."""
    if not math.isfinite(error) or error < 0:
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"
    if error == 0 or not math.isfinite(value):
        return f"{value:.4g} ± {error:g}"
    size = math.floor(math.log10(error))
    more = int(10 ** (math.log10(error) - size) < 1.95)
    decimals = more - size
    if not -3 <= decimals <= 4:
        digits = decimals + math.floor(math.log10(abs(value))) if value else 0
        return f"{value:.{min(max(digits, 0), 15) + 1}g} ± {error:.{more}e}"
    return f"{value:,.{max(decimals, 0)}f} ± {error:,.{max(decimals, 0)}f}"


LONGEST = 200  # characters of a value in the table (our choice)
DPI = 72  # pixels per inch: a picture of 5 × 4.7 inches is then 360 pixels wide (our choice)
LINES, WIDTH = 7, 120  # of repr(result): a title, five numbers and what is left out (our choice)


class Text(str):
    """A text of several lines, which is the last line of a cell in a notebook as it is printed."""

    def __repr__(self) -> str:
        return str(self)


def html_of(result: Any) -> str:
    """Return a result as HTML with all texts escaped: its class and label, a picture, its description.

    Where the drawing raises an error about the values, such as that none is finite, the error's text takes
    the place of the picture. All rows but the first six are behind a click.
    """
    rows = [
        f"<tr><th style='text-align:left'>{_escaped(row.name)}</th>"
        f"<td style='text-align:left'>{_escaped(_short(row.text))}</td></tr>"
        for row in result.describe()
    ]
    table = f"<table>{''.join(rows[:LINES])}</table>"
    if rows[LINES:]:
        more = f"<table>{''.join(rows[LINES:])}</table>"
        table += f"<details><summary>{len(rows) - LINES} more</summary>{more}</details>"
    title = _escaped(text_of(result, LINES).splitlines()[0])
    inside = f"<div>{_picture(result)}</div><div>{table}</div>"
    return f"<b>{title}</b><div style='display:flex;gap:1em;align-items:start'>{inside}</div>"


def _picture(result: Any) -> str:
    buffer = io.BytesIO()
    try:
        result.plot().savefig(buffer, format="png", dpi=DPI)
    # As for landscape plot: values without a place.
    except (ArithmeticError, LookupError, ValueError) as error:
        return f"<i>no picture: {_escaped(_short(str(error)))}</i>"
    return f"<img alt='picture' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


def _short(text: str) -> str:
    return _cut(" ".join(text.split()), LONGEST)


def _cut(line: str, length: int) -> str:
    return line if len(line) <= length else line[: length - 1] + "…"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


class Shown(ABC):
    """Numbers that are shown as text, in notebooks and as a picture; a subclass has ``describe``."""

    @abstractmethod
    def describe(self) -> list[Row]:
        """Return the numbers of the result, the most important first.

        The printed summary, ``--json``, titles of pictures, the tables of reports and notebooks show them.

        Returns:
            Rows with ``name``, ``value`` (a number or a text), ``error`` (one standard error, or the residual
            of an eigenvalue; 0 if exact, NaN if there is none), ``unit`` and ``note``.

        Example:
            >>> counted_labels.describe()[0].text
            '30 samples   largest 30'
        """

    def summary(self) -> str:
        """Return the description as text, a line for each number.

        Returns:
            Label and split, and below them name, value, error, unit and note of each row of ``describe``.

        Example:
            >>> print(trace.summary())
            Trace
              trace             3 ± 0.1 nat   95%: 2.448 to 3.552
              matrix            hessian   2 rows
              samples           10
              Hessian products  9
        """
        return Text(text_of(self))

    def __repr__(self) -> str:
        return text_of(self, LINES)

    def _repr_html_(self) -> str:
        """Return a small picture and the description, for notebooks."""
        return html_of(self)

    def plot(
        self, path: str | Path | None = None, *,
        style: Literal["contour", "hillshade", "surface", "difference"] = "contour", ax: Axes | None = None,
        **options: Any,
    ) -> Figure:  # fmt: skip
        """Draw the numbers; a notebook shows the figure, and the figure's ``show()`` opens a window.

        Args:
            path: a .png, .pdf or .svg file for the figure; default: no file.
            style: for a surface, "contour", "hillshade" or "surface" (three dimensions). "difference" needs
                two surfaces and is refused; :func:`landscape.draw` takes two.
            ax: axes to draw into, for a picture of one panel. Default: a new figure.
            options: further arguments of :func:`landscape.draw`, such as ``axes``, ``width`` and ``title``.

        Returns:
            The new figure, or the figure of ``ax``.

        Raises:
            InputError: there is nothing finite to draw, or an argument is not allowed.
            OperationError: ``path`` cannot be written.

        Example:
            >>> counted_labels.plot(title="Who has which label").get_suptitle()
            'Who has which label'
        """
        # Imported by name, and only here: results do not depend on plots, and load no matplotlib.
        plots = importlib.import_module("landscape.plots")
        return plots.draw([self], path, style=style, ax=ax, **options)


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        subject: what was looked at: "center", "window", "curvature", "places", "BatchNorm", "directions" or
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
        """Return whether a reader needs to know nothing more."""
        return all(finding.fine for finding in self.findings)

    def __repr__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)


@dataclass(frozen=True, repr=False)
class Radius:
    """How far along each direction a metric stays within a border: the numbers when printed.

    Attributes:
        metric: the name of the metric.
        change: the change of the metric at the border, such as "−1%".
        center, border: the values of the metric at the center and at the border.
        distance: (D,), the distance in weight space at which the metric first reaches the border, by cubic
            interpolation; for a censored direction, the distance up to which it does not.
        censored: (D,), whether the border lies beyond the surface, or beyond a value that is not known.
        points: (D, 2) or (D, 1), the coordinates at these distances.
        near: (D,), whether the border is so few steps of the grid away that ``error`` exceeds a tenth of the
            distance.
        error: (D,), the difference between ``distance`` and the distance by linear interpolation.
    """

    metric: str
    change: str
    center: float
    border: float
    distance: Array
    censored: Array
    points: Array
    near: Array
    error: Array

    def quantile(self, share: float) -> tuple[float, bool]:
        """Return the distance that a ``share`` of the directions does not exceed.

        Args:
            share: of all directions.

        Returns:
            (distance, whether it is known). If not, it is at least that distance.

        Example:
            >>> distance, known = surface.radius("loss", rise=0.25).quantile(1.0)
            >>> round(distance, 3), known
            (0.5, True)
        """
        ends = (self.distance, np.where(self.censored, np.inf, self.distance))
        low, high = (float(np.quantile(values, share, method="inverted_cdf")) for values in ends)
        return low, low == high

    @property
    def median(self) -> float:
        """The median over the directions; NaN where it lies beyond the surface."""
        value, known = self.quantile(0.5)
        return value if known else math.nan

    def describe(self) -> list[Row]:
        """Return the median, the interval of 80% of the directions, and how many reach the border."""
        rows = []
        for name, share in (("median", 0.5), ("10%", 0.1), ("90%", 0.9)):
            value, known = self.quantile(share)
            error, text = self.error[self.distance == value].max(), value if known else f"≥ {value:.6g}"
            note = "± the difference to linear interpolation" * known
            rows.append(Row(f"{name} of the distances", text, float(error), note=note))
        reached = f"{(~self.censored).sum()} of {len(self.distance)} directions reach it"
        if self.near.any():
            reached += f", {self.near.sum()} so near that it is rough: take a smaller span"
        return [Row(f"{self.metric} at the border", self.border, note=f"{self.change}, {reached}"), *rows]

    def __repr__(self) -> str:
        return text_of(self)


def radius_of(
    metric: str, axes: Sequence[Array], values: Array, unit_points: Array, reach: Array,
    drop: str | float | None, rise: float | None,
) -> Radius:  # fmt: skip
    """Return the distances from the center at which a metric first reaches a border, along D directions.

    Args:
        metric: the name of the metric.
        axes: the coordinates of the grid, first y (ny,), then x (nx,); or those of a line, (K,).
        values: the metric on the grid; NaN where it is not known.
        unit_points: (D, 2) or (D, 1), for each direction the coordinates (x, y) of the point at distance 1.
        reach: (D,), the distances to the edge of the grid.
        drop: by how much the border is below the value at the center: a number, or a share such as "1%".
        rise: by how much the border is above the value at the center, a number, in place of ``drop``.
    """
    # The change as text. Wrong types, and both or none of ``drop`` and ``rise``, are refused below.
    text = f"{rise:g}" if isinstance(rise, (int, float)) else str(drop).strip()
    is_share = text.endswith("%")
    try:
        size = float(text.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        size = math.nan
    if (drop is None) == (rise is None) or not 0 < size < math.inf:
        words = f"drop, rise: {drop!r} and {rise!r}, it must be one of them, as drop='1%' or rise=0.1"
        raise InputError(words)
    # (T, D): along each direction T distances, several between two points of the grid, and denser near the
    # center (our choice).
    distance = np.linspace(0, 1, max(400, 8 * max(values.shape)))[:, None] ** 2 * reach
    points = []  # for each axis: its coordinate at all these points, (T, D)
    for unit, axis in zip(unit_points.T[::-1], axes, strict=True):  # reversed: ``axes`` begin with y
        points.append(np.clip(distance * unit, axis[0], axis[-1]))
    # Between points: linear interpolation by the 2 nearest points, or a cubic one by 4. The linear one has
    # huge numbers for infinite values, and so crosses the border directly after the last finite value.
    linear = _interpolated(axes, np.clip(values, -HUGE, HUGE), points, count=2)
    cubic = _interpolated(axes, np.where(np.isfinite(values), values, np.nan), points, count=4)
    interpolated = np.where(np.isnan(cubic), linear, cubic)
    sign = 1 if drop is None else -1

    def border_of(center: float) -> float:
        return center + sign * size * (abs(center) if is_share else 1)

    center = float(interpolated[0, 0])
    border = border_of(center)
    if not math.isfinite(border) or border == center:
        words = f"at the center it is {center:g}, from which no change can be measured; take another metric"
        raise OperationError(f"{metric}: {words}")
    radii, censored = _crossings(distance, interpolated, border, sign)
    linear_radii, _ = _crossings(distance, linear, border_of(float(linear[0, 0])), sign)
    error = np.abs(radii - linear_radii)
    change = f"{'+' if sign > 0 else '−'}{text}"
    # The error is large, or NaN, where the border is too near to the center for the steps of the grid.
    rough = ~censored & ~(error <= ROUGH * radii)
    return Radius(metric, change, center, border, radii, censored, unit_points * radii[:, None], rough, error)


def _crossings(distance: Array, values: Array, border: float, sign: int) -> tuple[Array, Array]:
    """Return the distances (D,) at which ``values`` (T, D) first cross a border, and which are censored.

    A direction is censored if its values end, or are not known, before they cross the border. The distance
    is then the last one with a known value.
    """
    crossed, columns = sign * (values - border) >= 0, np.arange(values.shape[1])
    last = np.where(crossed.any(0), crossed.argmax(0), len(values) - 1)
    unknown = np.isnan(values)
    first_unknown = np.where(unknown.any(0), unknown.argmax(0), len(values))
    censored = ~crossed.any(0) | (first_unknown < last)
    last = np.minimum(last, first_unknown - 1)
    previous = np.maximum(last - 1, 0)
    before, after = values[previous, columns], values[last, columns]
    start, end = distance[previous, columns], distance[last, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = start + (end - start) * (border - before) / (after - before)
    return np.where(censored, end, crossing), censored


def _interpolated(axes: Sequence[Array], values: Array, at: Sequence[Array], count: int) -> Array:
    """Return ``values`` at coordinates, by polynomials through the ``count`` nearest points of each axis."""
    indices, weights = list[Array](), list[Array]()
    for axis, x in zip(axes, at, strict=True):
        n = min(count, len(axis))
        first = np.clip(np.searchsorted(axis, x, side="right") - n // 2, 0, len(axis) - n)
        indices.append(first[..., None] + np.arange(n))
        nodes, same = axis[indices[-1]], np.eye(n, dtype=bool)
        gaps = np.where(same, 1.0, nodes[..., None] - nodes[..., None, :])
        weights.append(np.where(same, 1.0, (x[..., None, None] - nodes[..., None, :]) / gaps).prod(-1))
    total = np.zeros(at[0].shape)
    for corner in itertools.product(*(range(w.shape[-1]) for w in weights)):
        weight = math.prod(w[..., k] for w, k in zip(weights, corner, strict=True))
        part = values[tuple(index[..., k] for index, k in zip(indices, corner, strict=True))]
        total += np.where(weight == 0, 0.0, weight * part)
    return total

"""The look of all figures: matplotlib's settings, the colors of algorithms, labels of logarithmic axes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from cycler import cycler
from matplotlib import ticker
from matplotlib.colors import to_hex, to_rgb

from landscape.core import registry
from landscape.results.base import with_unit

# The palette of all pictures: the colors of Okabe and Ito, and grays. The colors of algorithms stand in
# their rules. DPSGD-2020's Figure 2 has DPSGD green, SSGD red, SSGD* blue; these are its colors in this
# palette, and so are most others; the rest are from Tol's muted palette, which color-blind readers can tell
# apart, too.
SKY, AMBER, PINK, YELLOW, RED = "#56B4E9", "#E69F00", "#CC79A7", "#F0E442", "#D55E00"
DARK, PALE = "#444444", "#BBBBBB"
OTHER = "#777777"  # of what is no algorithm or has no color, and of lines for comparison
# Of what is no algorithm, without the colors of SSGD, SSGD* and DPSGD; the last four are Tol's.
CYCLE = (SKY, AMBER, PINK, "#000000", "#332288", "#999933", "#882255")
# Color maps of seaborn and matplotlib: dark where a value is high, monotone in lightness; and around zero.
SEQUENTIAL, DIVERGING = "mako_r", "RdBu_r"
# The largest number of characters of a title and of a line of an axis label (our choice: a title then has one
# line in a picture of two panels, and a label ends within its panel).
TITLE, LABEL = 60, 35
# Inches between the middles of neighboring numbers on an axis (our choice: room for three digits, or a line).
NEAREST = {"x": 0.25, "y": 0.16}
_SETTINGS = [str(Path(__file__).with_name(name)) for name in ("style.mplstyle", "paper.mplstyle")]


def style(paper: bool = False) -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws with the settings of ``style.mplstyle`` and the palette.

    Args:
        paper: whether also with those of ``paper.mplstyle``.
    """
    return matplotlib.style.context([*_SETTINGS[: 1 + paper], {"axes.prop_cycle": cycler(color=CYCLE)}])


def color_of(algorithm: str) -> str:
    """Return the color of an algorithm in all pictures, which its rule declares; gray for other names.

    Args:
        algorithm: a name as recipes have it, such as "ssgd*", or a label with one, such as "VGG-19, SSGD".
    """
    name = algorithm_in(algorithm)
    return (registry.algorithms[name].color if name else "") or OTHER


def algorithm_in(label: str) -> str:
    """Return the algorithm, as recipes call it, with which an item of ``label`` begins; "" for none."""
    words = [_first_word(item) for item in re.split(r",\s*", label)]
    return next((word for word in words if word in registry.algorithms), "")


def paper_name(label: str) -> str:
    """Return ``label``, in which the algorithm at its beginning, if any, has the name of the papers."""
    first = _first_word(label)
    name = registry.algorithms[first].label if first in registry.algorithms else ""
    return (name or label[: len(first)]) + label[len(first) :]


def short_names(labels: Sequence[str]) -> list[str]:
    """Return each label up to its first comma, if these differ; else the full labels."""
    short = [paper_name(label.split(",")[0]) for label in labels]
    names = short if len(set(short)) == len(short) else [paper_name(label) for label in labels]
    return [name or f"result {k}" for k, name in enumerate(names)]


def names_of(results: Sequence[Any], default: str) -> list[str]:
    """Return the label of each result by :func:`paper_name`, or ``default``, with a number if several."""
    defaults = numbered(default, len(results))
    return [paper_name(r.label) or name.strip() for r, name in zip(results, defaults, strict=True)]


def numbered(name: str, count: int) -> list[str]:
    """Return the names of ``count`` panels or results of one kind."""
    return [name] if count == 1 else [f"{name} {k}" for k in range(count)]


def labeled(results: Sequence[Any], default: str) -> Iterator[tuple[Any, str, str]]:
    """Yield each result with its name (:func:`names_of`) and its color (:func:`colors_of`)."""
    return zip(results, names_of(results, default), colors_of([r.label for r in results]), strict=True)


def _first_word(label: str) -> str:
    return re.split(r"[\s,]", label, maxsplit=1)[0].lower()


def in_order(count: int) -> list[str]:
    """Return ``count`` colors from dark to light, of things that have an order, such as layers."""
    import seaborn  # only here: it takes longer to import than everything else

    return [to_hex(color) for color in seaborn.color_palette(SEQUENTIAL, count)[::-1]]


def shades(color: str, count: int) -> list[str]:
    """Return ``count`` shades of ``color``, the darkest first: settings of one algorithm."""
    if count == 1:
        return [color]
    rgb = np.array(to_rgb(color))
    # From 60% of the way to black to 60% of the way to white (our choice: still told from both).
    tones = np.linspace(-0.6, 0.6, count)
    return [to_hex(rgb * (1 + t) if t < 0 else rgb + t * (1 - rgb)) for t in tones]


def colors_of(labels: Sequence[str]) -> list[str]:
    """Return a color for each label: a shade of its algorithm's color, else the next one of ``CYCLE``."""
    algorithms = [algorithm_in(label) for label in labels]
    tones = {name: iter(shades(color_of(name), algorithms.count(name))) for name in algorithms}
    cycle = itertools.cycle(CYCLE)
    return [next(tones[name] if color_of(name) != OTHER else cycle) for name in algorithms]


def log_axis(axis: Any, factor: float = 0) -> None:
    """Make an axis logarithmic, with :func:`decimal_labels`, if its data have a ratio above ``factor``.

    Within 2, few ticks of a logarithmic axis have a number.
    """
    lowest, highest = getattr(axis.axes.dataLim, f"interval{axis.axis_name}")
    if factor and not highest > factor * lowest:
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    decimal_labels(axis)
    room = axis.get_tick_space()
    if room > 4 and 0 < lowest < highest < 5 * lowest:  # too few of the numbers 1, 2 and 5 (our choice)
        axis.set_major_locator(ticker.MaxNLocator(8, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter("{x:g}")
    if not 0 < 5 * lowest <= highest:
        return
    # The axis begins at a number with a label, if that is at most a quarter of it away (our choice).
    axis.get_major_locator().set_params(numticks=max(5, room))  # each of few decades
    decade = 10.0 ** math.floor(math.log10(lowest))
    number = max((digit * decade for digit in (1, 2, 3, 5) if digit * decade <= lowest), default=lowest)
    if (lowest / number) ** 4 <= highest / lowest:
        axis.axes.update_datalim([(number, number)], **{f"update{'xy'.replace(axis.axis_name, '')}": False})
        axis.axes.autoscale_view()


def ticks_at(axis: Any, positions: Any, labels: Sequence[str] = ()) -> None:
    """Put ticks at ``positions``, and nowhere else; by default with these numbers."""
    axis.set_ticks(positions, labels or [f"{position:g}" for position in positions])
    axis.set_minor_locator(ticker.NullLocator())


def decimal_labels(axis: Any) -> None:
    """Label a logarithmic axis with decimal numbers (0.5, 20, 100) instead of powers of ten.

    Args:
        axis: an x or y axis of matplotlib, ``ax.xaxis`` or ``ax.yaxis``.
    """
    for setter in (axis.set_major_formatter, axis.set_minor_formatter):
        setter(_Decimal(labelOnlyBase=False, minor_thresholds=(2, math.inf)))


class _Decimal(ticker.LogFormatter):
    """Labels the ticks of its base class that have room, with decimal numbers also below 1.

    The base class counts decades and not inches, so that labels of a low panel would lie on one another.
    """

    axis: Any  # set by matplotlib
    _leading = "123456789"  # the first digits of the numbers that are shown

    def set_locs(self, locs: Any = None) -> None:
        super().set_locs(locs)
        low, high = sorted(self.axis.get_view_interval())
        if low <= 0:
            return
        decades = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        most_labels, ax = self.axis.get_tick_space(), self.axis.axes
        inches = (ax.bbox.width if self.axis.axis_name == "x" else ax.bbox.height) / ax.figure.dpi
        self._leading = "1"
        if len(decades) > most_labels + 2:  # the powers of ten alone fill the axis
            return
        choices = (2, "123456789"), (3, "1235"), (3, "125"), (2, "125"), (2, "57"), (2, "13"), (2, "1")
        for fewest, self._leading in choices:  # the first that fits
            ticks = sorted(int(digit) * decade for digit in self._leading for decade in decades)
            labeled = [x for x in ticks if low <= x <= high and self(x)]
            positions = np.log(labeled) * inches / math.log(high / low)
            smallest_gap = NEAREST[self.axis.axis_name]
            if fewest <= len(labeled) <= most_labels + 1 and np.diff(positions).min() >= smallest_gap:
                return

    def __call__(self, x: float, pos: int | None = None) -> str:
        visible = super().__call__(x, pos) and (x <= 0 or f"{x:.0e}"[0] in self._leading)
        digits = f"{x:.7f}".rstrip("0") if 1e-7 < x < 1e-4 else f"{x:g}"
        return digits if visible else ""


def unit(of: Any, field: str) -> str:
    """Return the unit of ``field`` in a result, or in a class, for a label: " (nat)"; "" for none."""
    return in_brackets(with_unit(of, of.units[field]))


def in_brackets(unit: str) -> str:
    """Return a unit for a label, " (nat²)"; "" for pure numbers."""
    return "" if unit in ("", "1") else f" ({unit.replace('^2', '²').replace('nat2', 'nat²')})"


def splits(results: Sequence[Any]) -> str:
    """Return the splits of the data that ``results`` were computed on.

    Args:
        results: objects with an attribute ``split``.

    Returns:
        "train", "train and test", or "data" where no split is known.
    """
    return " and ".join(dict.fromkeys(r.split for r in results if r.split)) or "data"


def loss_of(results: Sequence[Any]) -> str:
    """Return the name of the loss of ``results``: "train loss", or "loss" if no split is known."""
    name = getattr(results[0], "loss_name", "loss")
    return f"{splits(results)} {name}" if any(r.split for r in results) else name


def loss_label(results: Sequence[Any]) -> str:
    """Return :func:`loss_of` with its unit, such as "train loss (nat)"."""
    return f"{loss_of(results)}{unit(results[0], 'loss')}"


def interpolation_note(results: Sequence[Any]) -> str:
    """Return the number of exact points of interpolated ``results``, with errors, after "; "; "" for none."""
    notes = [r.interpolation() for r in results]
    return f"; {joined(n or 'all points exact' for n in notes)}" if any(notes) else ""


def sentence(*parts: str) -> str:
    """Return the parts of a caption that are not empty as a sentence; "" if all are."""
    text = "; ".join(filter(None, parts))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def joined(texts: Iterable[str]) -> str:
    """Return the different texts of results in their order, and a text that they share only once."""
    return " / ".join(dict.fromkeys(texts))


def fitting(*texts: str, most: int = TITLE) -> str:
    """Return the first of ``texts`` with at most ``most`` characters; else the last one, cut."""
    short = next((text for text in texts if len(text) <= most), texts[-1])
    return short if len(short) <= most else f"{short[: most - 1].rstrip()}…"


def headline(results: Sequence[Any]) -> str:
    """Return the default title of a picture, with the number in the first row of each result's description.

    Numbers have three digits. Where the numbers of several results have no room, the title has the smallest
    and the largest number.
    """
    rows = [r.describe()[0] for r in results]
    numbers = [three_digits(row.number) for row in rows]  # row.number: row.value as text, with its error
    labels = [getattr(r, "label", "") for r in results]  # a sweep is of many runs and has no label
    labels_differ = any(labels) and len(set(labels)) == len(rows)
    labels = short_names(labels) if labels_differ else [""] * len(rows)
    texts_by_name: dict[str, list[str]] = {}  # name of a row -> label and number of each result with this row
    for label, row, number in zip(labels, rows, numbers, strict=True):
        texts_by_name.setdefault(row.name, []).append(f"{label} {number}".strip())
    # The possible titles, from the longest to the shortest.
    texts = ["; ".join(f"{name}: {', '.join(words)}" for name, words in texts_by_name.items())]
    if len({row.note for row in rows}) == 1 and rows[0].note:
        texts.insert(0, f"{texts[0]} ({three_digits(rows[0].note)})")
    name = rows[0].name
    if len(texts_by_name) > 1:
        texts.append(f"{len(rows)} results")
    elif len(rows) == 1:
        texts.append(f"{name}: {numbers[0]}")  # a long label must not cut the number
    elif all(not isinstance(row.value, str) and math.isfinite(row.value) for row in rows):
        by_value = sorted(range(len(rows)), key=lambda k: rows[k].value)
        low, high = by_value[0], by_value[-1]  # the indices of the smallest and the largest value
        if labels_differ:
            texts.append(f"{name}: {numbers[low]} ({labels[low]}) to {numbers[high]} ({labels[high]})")
        texts.append(f"{name}: {numbers[low]} to {numbers[high]}")
    title = fitting(*texts, name)
    first_word = title.split()[0].rstrip(":").replace("-", "")  # may be a formula, which stays as it is
    return title[0].upper() + title[1:] if first_word.isalpha() else title


def power_of_ten(value: float) -> str:
    """Return ``value`` with two digits, and as a multiple of a power of ten below a thousandth."""
    number, exponent = f"{value:.1e}".split("e")
    return f"{value:.2g}" if not 0 < abs(value) < 1e-3 else f"${number}\\times10^{{{int(exponent)}}}$"


def three_digits(text: str) -> str:
    """Return ``text`` in which decimal numbers without an error have three digits at most."""
    return re.sub(r"(?<!± )\b\d+\.\d+(e[-+]\d+)?(?![\de]| ±)", lambda m: f"{float(m[0]):.3g}", text)


def rows_of(results: Sequence[Any], *names: str) -> str:
    """Return rows of the results' descriptions for a caption, such as "draws 9 / 12; γ 1.1 ± 0.1".

    A row that no result has is left out; a number or a note that all results share appears once.
    """

    def unique(texts: list[str]) -> str:
        return " / ".join(texts if len({*texts}) > 1 else texts[:1])

    words = []
    all_rows = [row for r in results for row in r.describe()]
    for name in names:
        rows = [row for row in all_rows if row.name == name]
        if rows:
            note = unique([row.note for row in rows])
            words.append(f"{name} {unique([row.number for row in rows])}{f' ({note})' if note else ''}")
    return "; ".join(words)


def preconditioned_by(results: Sequence[Any]) -> str:
    """Return the optimizers whose preconditioners the results have, in words; "" without a preconditioner."""
    optimizers = dict.fromkeys(r.precondition for r in results if r.precondition)
    return f"preconditioned by {', '.join(optimizers)}" if optimizers else ""


def samples_of(results: Sequence[Any]) -> str:
    """Return the number of samples, their split, and the statistics of BatchNorm, if the model has it."""
    note = batchnorm_note(results[0]) if hasattr(results[0], "batchnorm") else ""
    return f"{results[0].samples:,} {splits(results)} samples{f', {note}' if note else ''}"


def batchnorm_note(result: Any) -> str:
    """Return the statistics that BatchNorm used, in words; "" for a model without BatchNorm.

    Args:
        result: a surface, a line, a Hessian grid or a spectrum (``batchnorm``, ``bn``, ``bn_samples``).
    """
    if not result.batchnorm:
        return ""
    samples, whose = result.bn_samples, getattr(result, "statistics_of", "")
    if getattr(result, "kind", "") in ("between", "pca", "learners"):  # as of Hessian grids
        whose = whose or "the problem's model"
    notes = {
        "center": f"the statistics of {paper_name(whose)}" if whose else "the center's statistics",
        "recalibrate": f"from {samples:,} samples per point",
        "train": f"statistics of batches of {samples:,}" if samples else "statistics of each batch",
    }
    losses = rows_of([result], "own losses") if hasattr(result, "own_loss") else ""
    return f"BatchNorm: {notes.get(result.bn, result.bn)}{f', {losses}' if losses else ''}"

"""Several checkpoints, or groups of them, in one table: quantities with errors, tests, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import t_quantile
from landscape.results.base import Result
from landscape.results.shown import Row, in_words, rows_of_each

#: What the error of a number is: one standard error, a bound, or nothing but rounding.
ERRORS = {
    "standard error": "±: one standard error over what the row names",
    "bound": "bound: the true eigenvalue is within it with 99% probability; no standard error",
    "exact": "exact: nothing is drawn",
}
# The level of the intervals in pictures (the usual one).
INTERVAL = 0.95


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Quantities (Q) of the sides (S) that are compared, and the differences (Q, K) of all K pairs of sides.

    A side is a checkpoint, or a group of checkpoints, such as the seeds of one recipe. The error of a
    checkpoint is what ``kinds`` says: one standard error over draws, a bound (within which the true
    eigenvalue is with a probability of 99%; not the residual, within which some eigenvalue is), or nothing
    ("exact": what rounding leaves). The error of a group is the standard error over its checkpoints, which
    contains their own errors, as each has draws of its own.

    Attributes:
        quantities, titles, unit_names: (Q,), names, names in words, and units.
        flatter: (Q,), −1 where small values mean a flat minimum, 1 where large ones do, 0 where it does not
            say.
        kinds: (Q,), of the errors of the sides: "standard error", "bound" or "exact".
        own_kinds: (Q,), the same of the errors of single checkpoints.
        over: (Q,), what the errors are over, such as "64 minibatches"; "" where nothing is drawn.
        tests: (Q,), how differences were tested: "paired t", "Welch t", "McNemar", "bounds" (they do not
            overlap) or "exact".
        sides: (S,), the names of the sides.
        value, error, freedom: (Q, S), the numbers, their errors, and the degrees of freedom of standard
            errors. NaN where a quantity could not be measured; ``notes`` say why.
        labels, sources, sources_sha256: (M,), of the checkpoints: names, files, and their SHA-256.
        side_of: (M,), the place of each checkpoint's side.
        own_value, own_error: (Q, M), of the single checkpoints.
        steps, given_steps: (M,), the step that was measured, and that of the file given; −1 if unknown.
        first, second: (K,), the places of the sides of each pair.
        difference, difference_error, difference_freedom: (Q, K), that of the second side less the first.
        p, p_holm: (Q, K), two-sided p-values, and Holm's correction for all of this table together; NaN for
            bounds and exact numbers, which are not tested, and for groups of fewer than 3.
        significant: (Q, K), true where the difference is larger than its error: ``p_holm`` at most
            ``significance``, or bounds
            that do not overlap; and in any case more than rounding.
        significance: the significance level of all tests together.
        grouped: whether the sides are groups.
        equal_loss: the training loss in nats at which the sides are compared; NaN: at the files given.
        notes: what was left out and why, and what else must be known.
        batch, draws, planes, rise, rho, rho_average, k: of the measurements, see
            :func:`landscape.compare`; batch 0 where none was needed.
        sample_counts: (M,), samples of each one's data.
        seed, dtype, split, batchnorm: as in other results.

    Example:
        >>> comparison.significant[:, 0].tolist(), comparison.quantities
        ([True, True], ('lambda-max', 'batch-sharpness'))
    """

    schema: ClassVar[str] = "landscape.comparison"
    renamed: ClassVar[Mapping[str, str]] = {"told": "significant", "level": "significance", "top_k": "k"}
    table: ClassVar[str] = "quantities sides"

    quantities: Annotated[tuple[str, ...], "quantities+"]
    titles: Annotated[tuple[str, ...], "quantities"]
    unit_names: Annotated[tuple[str, ...], "quantities"]
    flatter: Annotated[Array, "quantities"]
    kinds: Annotated[tuple[str, ...], "quantities"]
    own_kinds: Annotated[tuple[str, ...], "quantities"]
    over: Annotated[tuple[str, ...], "quantities"]
    tests: Annotated[tuple[str, ...], "quantities"]
    sides: Annotated[tuple[str, ...], "sides+"]
    value: Annotated[Array, "quantities sides"]
    error: Annotated[Array, "quantities sides"]
    freedom: Annotated[Array, "quantities sides", "1"]
    labels: Annotated[tuple[str, ...], "labels+"]
    sources: Annotated[tuple[str, ...], "labels"]
    sources_sha256: Annotated[tuple[str, ...], "labels"]
    side_of: Annotated[Array, "labels"]
    own_value: Annotated[Array, "quantities labels"]
    own_error: Annotated[Array, "quantities labels"]
    steps: Annotated[Array, "labels"]
    given_steps: Annotated[Array, "labels"]
    first: Annotated[Array, "pair"]
    second: Annotated[Array, "pair"]
    difference: Annotated[Array, "quantities pair"]
    difference_error: Annotated[Array, "quantities pair"]
    difference_freedom: Annotated[Array, "quantities pair", "1"]
    p: Annotated[Array, "quantities pair", "1"]
    p_holm: Annotated[Array, "quantities pair", "1"]
    significant: Annotated[Array, "quantities pair"]
    significance: Annotated[float, "1"]
    grouped: bool
    equal_loss: Annotated[float, "nat"]
    notes: tuple[str, ...]
    batch: int
    draws: int
    planes: int
    rise: Annotated[float, "nat"]
    rho: Annotated[float, "1"]
    rho_average: Annotated[float, "1"]
    k: int
    seed: int
    sample_counts: Annotated[Array, "labels"]
    dtype: str
    split: str
    batchnorm: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in (*self.kinds, *self.own_kinds):
            if kind not in ERRORS:
                raise ValueError(f"kinds holds '{kind}', it must be one of {', '.join(ERRORS)}")
        for name in ("side_of", "first", "second"):
            places, count = getattr(self, name), len(self.sides)
            if places.dtype.kind not in "iu" or not ((places >= 0) & (places < count)).all():
                raise ValueError(f"{name} must hold the numbers of sides, 0 to {count - 1}")

    @property
    def label(self) -> str:
        """The names of the sides."""
        return " against ".join(self.sides) if len(self.sides) < 4 else f"{len(self.sides)} sides"

    @property
    def interval(self) -> Array:
        """(Q, S), half the width of the 95% interval of a standard error; a bound as it is, and 0 if exact.

        Example:
            >>> comparison.interval.round(2).tolist()
            [[0.1, 0.1], [1.0, 0.5]]
        """
        wide = np.where(np.isfinite(self.freedom), self.freedom, 1e9)  # the limit of the distribution
        factor = t_quantile(INTERVAL, np.maximum(wide, 1))
        drawn = np.array([kind == "standard error" for kind in self.kinds])[:, None]
        return np.where(drawn, factor * self.error, self.error)

    def describe(self) -> list[Row]:
        rows = []
        for q, (title, unit) in enumerate(zip(self.titles, self.unit_names, strict=True)):
            names = [f"{title}, {side}" for side in self.sides]
            rows += rows_of_each(names, self.value[q], self.error[q], "" if unit == "1" else unit)
            rows.append(Row(f"{title}, difference", verdict(self, q)))
        return rows


def table_of(comparison: Comparison) -> list[list[str]]:
    """A row for each quantity: name, numbers of the sides, what their errors are over, verdict."""
    c = comparison
    table = []
    for q in range(len(c.quantities)):
        over = c.over[q] or ("99% bound" if c.kinds[q] == "bound" else "–")
        table.append([heading(c, q), *(cell(c, q, s) for s in range(len(c.sides))), over, verdict(c, q)])
    return table


def heading(comparison: Comparison, quantity: int) -> str:
    """The name of a quantity with its unit, "λ_max (nat)"."""
    unit = comparison.unit_names[quantity]
    return comparison.titles[quantity] + (f" ({unit})" if unit != "1" else "")


# Pairs of which each is named where not all are significant (ours): more make no readable line.
NAMED_PAIRS = 6


def cell(comparison: Comparison, quantity: int, side: int) -> str:
    """A number with its error: "12.0 ± 0.5" (a standard error), "20 (bound 0.1)" or "0.01 (exact)"."""
    value, error = float(comparison.value[quantity, side]), float(comparison.error[quantity, side])
    if math.isnan(value):
        return "–"
    kind = comparison.kinds[quantity]
    if kind == "bound":
        return f"{value:.4g} (bound {error:.1g})"
    if math.isnan(error):
        return f"{value:.4g} (no error)"
    return in_words(value, error) if kind == "standard error" and error else f"{value:.4g} (exact)"


def verdict(comparison: Comparison, quantity: int) -> str:
    """The last column of the table: which differences are significant, and how surely."""
    c, pairs = comparison, range(len(comparison.first))
    known = [k for k in pairs if not math.isnan(c.difference[quantity, k])]
    if not known:
        return "not measured at two"
    if len(pairs) == 1:
        return _of_a_pair(c, quantity, 0)
    significant = [k for k in known if c.significant[quantity, k]]
    if not significant:
        return f"none significant{_evidence(c, quantity, known, least=True)}"
    if len(significant) == len(pairs):
        order = sorted(range(len(c.sides)), key=lambda s: _rank(c, quantity, s))
        ordered = " < ".join(c.sides[s] for s in order)
        return f"all significant: {ordered}{_evidence(c, quantity, significant)}"
    if len(pairs) > NAMED_PAIRS:
        return f"{len(significant)} of {len(pairs)} pairs significant{_evidence(c, quantity, significant)}"
    word = " flatter than " if c.flatter[quantity] else " below "
    beaten: dict[int, list[str]] = {}
    for k in significant:
        low, high = _ordered(c, quantity, k)
        beaten.setdefault(low, []).append(c.sides[high])
    said = [f"{c.sides[low]}{word}{', '.join(others)}" for low, others in beaten.items()]
    return f"{'; '.join(said)}{_evidence(c, quantity, significant)}; others not significant"


def _of_a_pair(c: Comparison, q: int, k: int) -> str:
    if not c.significant[q, k]:
        return f"not significant{_evidence(c, q, [k], least=True)}"
    low, high = _ordered(c, q, k)
    values = float(c.value[q, low]), float(c.value[q, high])
    word = "flatter" if c.flatter[q] else "lower"
    factor = f", {values[0] / values[1]:.2g} times {c.sides[high]}'s" if values[0] * values[1] > 0 else ""
    return f"{c.sides[low]} {word}{factor}{_evidence(c, q, [k])}"


def _rank(c: Comparison, q: int, side: int) -> float:
    """By which sides are ordered: the flattest first, or the lowest where flatness is not meant."""
    value = float(c.value[q, side])
    return -value if c.flatter[q] > 0 else value


def _ordered(c: Comparison, q: int, k: int) -> tuple[int, int]:
    """Both sides of a pair, the flatter (or lower) one first."""
    a, b = int(c.first[k]), int(c.second[k])
    return (a, b) if _rank(c, q, a) <= _rank(c, q, b) else (b, a)


def _evidence(c: Comparison, q: int, pairs: Sequence[int], least: bool = False) -> str:
    """The corrected p-value in brackets: the largest of these pairs, or with ``least`` the smallest."""
    kind = c.kinds[q]
    if kind == "bound":
        return " (bounds overlap)" if least else " (bounds apart)"
    if kind == "exact":
        return " (equal)" if least else " (exact)"
    values = [float(c.p_holm[q, k]) for k in pairs if math.isfinite(c.p_holm[q, k])]
    if not values:
        return " (no statement)"
    p = min(values) if least else max(values)
    sign = "=" if len(pairs) == 1 else "≥" if least else "≤"
    return " (p < 0.001)" if p < 1e-3 else f" (p {sign} {p:.2g})"


def summary(comparison: Comparison) -> list[str]:
    """How many measures of flatness say that one side is flatter, a line for each pair."""
    c, lines = comparison, []
    measures = [q for q in range(len(c.quantities)) if c.flatter[q]]
    for k in range(len(c.first)):
        known = [q for q in measures if not math.isnan(c.difference[q, k])]
        if not known:
            continue
        flatter = [_ordered(c, q, k) for q in known if c.significant[q, k]]
        first, second = int(c.first[k]), int(c.second[k])
        wins = [sum(low == side for low, _ in flatter) for side in (first, second)]
        if wins[1] > wins[0]:
            first, second, wins = second, first, wins[::-1]
        a, b, total = c.sides[first], c.sides[second], len(known)
        if not flatter:
            lines.append(f"{a} and {b} differ significantly in none of {total} measures of flatness")
            continue
        line = f"{a} is flatter than {b} by {wins[0]} of {total} measures"
        line += f", sharper by {wins[1]}" if wins[1] else ""
        left = total - sum(wins)
        lines.append(f"{line}; {left} not significant" if left else line)
    return lines


def footnotes(comparison: Comparison) -> list[str]:
    """The meaning of the errors, how the differences were tested, at which loss, and the notes."""
    c = comparison
    lines = [f"{'; '.join(words for kind, words in ERRORS.items() if kind in c.kinds)}."]
    named = {
        test: ", ".join(name for name, own in zip(c.quantities, c.tests, strict=True) if own == test)
        for test in dict.fromkeys(c.tests)
    }
    drawn = [f"{test} ({names})" for test, names in named.items() if test not in ("bounds", "exact")]
    count = int(np.isfinite(c.p).sum())
    said = []
    if drawn:
        tests = f"{count} tests" if count > 1 else "1 test"
        said.append(f"p ≤ {c.significance:g} by {' or '.join(drawn)}, with Holm's correction for {tests}")
    if "bounds" in named:
        said.append(f"bounds where they do not overlap ({named['bounds']})")
    if "exact" in named:
        said.append(f"exact numbers where they differ by more than rounding ({named['exact']})")
    lines.append(f"Significant: {'; '.join(said)}.")
    if math.isfinite(c.equal_loss):
        steps = zip(c.labels, c.given_steps.tolist(), strict=True)
        taken = "; ".join(f"{label} (of {given:,})" for label, given in steps)
        lines.append(f"At the training loss nearest to {c.equal_loss:.4g} nat: {taken}.")
    if not c.grouped:
        lines.append("This is about these weights alone; what made them is compared by groups of seeds.")
    return [*lines, *(f"Note: {note}" for note in c.notes)]

"""What a comparison says, in words: the cells of its table, its last column, and how it was tested."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from landscape.results.comparison import Comparison
from landscape.results.shown import in_words

# Pairs of which each is named where not all are told apart (ours): more make no readable line.
NAMED_PAIRS = 6


def cell(comparison: Comparison, quantity: int, side: int) -> str:
    """A number with its error: "12.0 ± 0.5" (a standard error), "20 (bound 0.1)" or "0.01 (exact)".

    Example:
        >>> from landscape.results.comparison import example
        >>> cell(example(), 0, 0), cell(example(), 1, 0)
        ('20 (bound 0.1)', '12.0 ± 0.5')
    """
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
    """The last column of the table: which sides are told apart, and how surely.

    Example:
        >>> from landscape.results.comparison import example
        >>> verdict(example(), 0)
        "DPSGD flatter, 0.5 times SSGD's (bounds apart)"
        >>> verdict(example(), 1)
        "DPSGD flatter, 0.5 times SSGD's (p < 0.001)"
    """
    c, pairs = comparison, range(len(comparison.first))
    known = [k for k in pairs if not math.isnan(c.difference[quantity, k])]
    if not known:
        return "not measured at two"
    if len(pairs) == 1:
        return _of_a_pair(c, quantity, 0)
    told = [k for k in known if c.told[quantity, k]]
    if not told:
        return f"none told apart{_evidence(c, quantity, known, least=True)}"
    if len(told) == len(pairs):
        order = sorted(range(len(c.sides)), key=lambda s: _rank(c, quantity, s))
        return f"all told apart: {' < '.join(c.sides[s] for s in order)}{_evidence(c, quantity, told)}"
    if len(pairs) > NAMED_PAIRS:
        return f"{len(told)} of {len(pairs)} pairs told apart{_evidence(c, quantity, told)}"
    word = " flatter than " if c.flatter[quantity] else " below "
    beaten: dict[int, list[str]] = {}
    for k in told:
        low, high = _ordered(c, quantity, k)
        beaten.setdefault(low, []).append(c.sides[high])
    said = [f"{c.sides[low]}{word}{', '.join(others)}" for low, others in beaten.items()]
    return f"{'; '.join(said)}{_evidence(c, quantity, told)}; others not told apart"


def _of_a_pair(c: Comparison, q: int, k: int) -> str:
    if not c.told[q, k]:
        return f"not told apart{_evidence(c, q, [k], least=True)}"
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
    """How many measures of flatness say that one side is flatter, a line for each pair.

    Example:
        >>> from landscape.results.comparison import example
        >>> summary(example())
        ['DPSGD is flatter than SSGD by 2 of 2 measures']
    """
    c, lines = comparison, []
    measures = [q for q in range(len(c.quantities)) if c.flatter[q]]
    for k in range(len(c.first)):
        known = [q for q in measures if not math.isnan(c.difference[q, k])]
        if not known:
            continue
        told = [_ordered(c, q, k) for q in known if c.told[q, k]]
        first, second = int(c.first[k]), int(c.second[k])
        wins = [sum(low == side for low, _ in told) for side in (first, second)]
        if wins[1] > wins[0]:
            first, second, wins = second, first, wins[::-1]
        a, b, total = c.sides[first], c.sides[second], len(known)
        if not told:
            lines.append(f"{a} and {b} are not told apart by any of {total} measures of flatness")
            continue
        line = f"{a} is flatter than {b} by {wins[0]} of {total} measures"
        line += f", sharper by {wins[1]}" if wins[1] else ""
        left = total - sum(wins)
        lines.append(f"{line}; {left} {'does' if left == 1 else 'do'} not tell them apart" if left else line)
    return lines


def footnotes(comparison: Comparison) -> list[str]:
    """What the errors are, how the differences were tested, at which loss, and the notes.

    Example:
        >>> from landscape.results.comparison import example
        >>> print(footnotes(example())[1])  # doctest: +NORMALIZE_WHITESPACE
        Told apart: p ≤ 0.05 by paired t (batch-sharpness), with Holm's correction for 1 test; bounds where
        they do not overlap (lambda-max).
    """
    c = comparison
    errors = []
    if "standard error" in c.kinds:
        errors.append("±: one standard error over what the row names")
    if "bound" in c.kinds:
        errors.append("bound: the true eigenvalue is within it with 99% probability; no standard error")
    if "exact" in c.kinds:
        errors.append("exact: nothing is drawn")
    lines = [f"{'; '.join(errors)}."]
    named = {
        test: ", ".join(name for name, own in zip(c.quantities, c.tests, strict=True) if own == test)
        for test in dict.fromkeys(c.tests)
    }
    drawn = [f"{test} ({names})" for test, names in named.items() if test not in ("bounds", "exact")]
    count = int(np.isfinite(c.p).sum())
    said = []
    if drawn:
        tests = f"{count} tests" if count > 1 else "1 test"
        said.append(f"p ≤ {c.level:g} by {' or '.join(drawn)}, with Holm's correction for {tests}")
    if "bounds" in named:
        said.append(f"bounds where they do not overlap ({named['bounds']})")
    if "exact" in named:
        said.append(f"exact numbers where they differ by more than rounding ({named['exact']})")
    lines.append(f"Told apart: {'; '.join(said)}.")
    if math.isfinite(c.equal_loss):
        steps = zip(c.labels, c.given_steps.tolist(), strict=True)
        taken = "; ".join(f"{label} (of {given:,})" for label, given in steps)
        lines.append(f"At the training loss nearest to {c.equal_loss:.4g} nat: {taken}.")
    if not c.grouped:
        lines.append("This is about these weights alone; what made them is compared by groups of seeds.")
    return [*lines, *(f"Note: {note}" for note in c.notes)]

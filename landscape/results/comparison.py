"""Several networks: tables of quantities with tests, paths between two of them, and averages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import t_quantile
from landscape.results.base import Evaluated, Result, no_values, with_unit
from landscape.results.shown import Row, in_words, own_losses, rows_of_each

#: What the error of a number is: one standard error, a bound, or nothing but rounding.
ERRORS = {
    "standard error": "±: one standard error over what the row names",
    "bound": "bound: the true eigenvalue is within it with 99% probability; no standard error",
    "exact": "exact: nothing is drawn",
}
# The level of the intervals in pictures (the usual one).
INTERVAL = 0.95


@dataclass(frozen=True, kw_only=True)
class Comparison(Result, schema="landscape.comparison", table="quantities sides"):
    """Quantities (Q) of the sides (S) that are compared, and the differences (Q, K) of all K pairs of sides.

    A side is a checkpoint, or a group of checkpoints, such as the seeds of one recipe. ``own_kinds`` name the
    kind of a checkpoint's error: one standard error over draws; a bound, which the outermost eigenvalue
    keeps with a probability of 99% (a residual only shows that some eigenvalue is near); or the rounding of
    an exact number. The error of a group is the standard error over the group's checkpoints. Each checkpoint
    of a group has its own draws, so that this error contains the errors of the checkpoints.

    Attributes:
        quantities, titles, unit_names: (Q,), names, names in words, and units.
        loss_name, loss_unit: the loss's name and unit, as in :class:`landscape.Surface`; "loss" and "" where
            the sides have different losses.
        flatter: (Q,), −1 where small values mean a flat minimum, 1 where large values do, 0 where the
            quantity does not say how flat a minimum is.
        kinds: (Q,), the kinds of the sides' errors: "standard error", "bound" or "exact".
        own_kinds: (Q,), the kinds of single checkpoints' errors.
        over: (Q,), the draws over which errors are standard errors, such as "64 minibatches"; "" without
            draws.
        tests: (Q,), the tests of differences: "paired t", "Welch t", "McNemar", "bounds" (whether bounds
            overlap) or "exact".
        sides: (S,), the names of the sides.
        value, error, freedom: (Q, S), the numbers, their errors, and the degrees of freedom of standard
            errors. NaN where a quantity could not be measured; ``notes`` say why.
        labels, sources, sources_sha256: (M,), of the checkpoints: names, files, and their SHA-256.
        side_of: (M,), the place of each checkpoint's side.
        own_value, own_error: (Q, M), of the single checkpoints.
        steps, given_steps: (M,), the step of the measured checkpoint, and of the caller's; −1 if unknown.
        first, second: (K,), the places of the sides of each pair.
        difference, difference_error, difference_freedom: (Q, K), the second side minus the first, the error,
            and the degrees of freedom.
        p, p_holm: (Q, K), two-sided p-values, and these with Holm's correction for all tests of the table;
            NaN for bounds and exact numbers, which are not tested, and for groups of fewer than 3.
        significant: (Q, K), true where the difference is larger than rounding and than its error: ``p_holm``
            at most ``significance``, or bounds that do not overlap.
        significance: the significance level of all tests together.
        grouped: whether the sides are groups.
        equal_loss: the common training loss of the compared checkpoints, in nats; NaN: the caller's
            checkpoints are compared.
        notes: quantities that were left out, with reasons, and limits of the comparison.
        batch, draws, planes, rise, rho, rho_average, k: of the measurements, see
            :func:`landscape.compare`; batch 0 where none was needed.
        sample_counts: (M,), the number of samples of each checkpoint's data.
        seed, dtype, split, batchnorm: as in other results.

    Example:
        >>> comparison.significant[:, 0].tolist(), comparison.quantities
        ([True, True], ('lambda-max', 'batch-sharpness'))
    """

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
    loss_name: str = "loss"
    loss_unit: str = "nat"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "unit_names", tuple(with_unit(self, unit) or "1" for unit in self.unit_names)
        )
        super().__post_init__()
        for kind in (*self.kinds, *self.own_kinds):
            if kind not in ERRORS:
                raise ValueError(f"kinds holds '{kind}', it must be one of {', '.join(ERRORS)}")
        for name in ("side_of", "first", "second"):
            sides, count = getattr(self, name), len(self.sides)
            if sides.dtype.kind not in "iu" or not ((sides >= 0) & (sides < count)).all():
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
        has_error = np.array([kind == "standard error" for kind in self.kinds])[:, None]
        return np.where(has_error, factor * self.error, self.error)

    def describe(self) -> list[Row]:
        rows = []
        for q, (title, unit) in enumerate(zip(self.titles, self.unit_names, strict=True)):
            names = [f"{title}, {side}" for side in self.sides]
            rows += rows_of_each(names, self.value[q], self.error[q], "" if unit == "1" else unit)
            rows.append(Row(f"{title}, difference", verdict(self, q)))
        return rows + [Row("note", note) for note in self.notes]


def table_of(comparison: Comparison) -> list[list[str]]:
    """Return a row for each quantity: name, numbers of the sides, source of the errors, verdict."""
    c, table = comparison, []
    for q, (over, kind) in enumerate(zip(comparison.over, comparison.kinds, strict=True)):
        over = over or ("99% bound" if kind == "bound" else "–")
        table.append([heading(c, q), *(cell(c, q, s) for s in range(len(c.sides))), over, verdict(c, q)])
    return table


def heading(comparison: Comparison, quantity: int) -> str:
    """Return the name of a quantity with its unit, "λ_max (nat)"."""
    unit = comparison.unit_names[quantity]
    return comparison.titles[quantity] + (f" ({unit})" if unit != "1" else "")


# Pairs of which each is named where not all are significant (our choice: more make no readable line).
NAMED_PAIRS = 6


def cell(comparison: Comparison, quantity: int, side: int) -> str:
    """Return a number with its error: "12.0 ± 0.5" (a standard error), "20 (bound 0.1)" or "0.01 (exact)"."""
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
    """Return the last column of the table: which differences are significant, and how surely."""
    c, pairs = comparison, range(len(comparison.first))
    measured = [k for k in pairs if not math.isnan(c.difference[quantity, k])]
    if not measured:
        return "not measured at two"
    if len(pairs) == 1:
        return _of_a_pair(c, quantity, 0)
    significant = [k for k in measured if c.significant[quantity, k]]
    if not significant:
        return f"none significant{_evidence(c, quantity, measured, smallest=True)}"
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
    sentences = [f"{c.sides[low]}{word}{', '.join(worse)}" for low, worse in beaten.items()]
    return f"{'; '.join(sentences)}{_evidence(c, quantity, significant)}; others not significant"


def _of_a_pair(c: Comparison, q: int, k: int) -> str:
    if not c.significant[q, k]:
        return f"not significant{_evidence(c, q, [k], smallest=True)}"
    low, high = _ordered(c, q, k)
    values = float(c.value[q, low]), float(c.value[q, high])
    word = "flatter" if c.flatter[q] else "lower"
    factor = f", {values[0] / values[1]:.2g} times {c.sides[high]}'s" if values[0] * values[1] > 0 else ""
    return f"{c.sides[low]} {word}{factor}{_evidence(c, q, [k])}"


def _rank(c: Comparison, q: int, side: int) -> float:
    """Return the values by which sides are ordered: the flattest first, or the lowest."""
    value = float(c.value[q, side])
    return -value if c.flatter[q] > 0 else value


def _ordered(c: Comparison, q: int, k: int) -> tuple[int, int]:
    """Return both sides of a pair, the flatter (or lower) one first."""
    a, b = int(c.first[k]), int(c.second[k])
    return (a, b) if _rank(c, q, a) <= _rank(c, q, b) else (b, a)


def _evidence(c: Comparison, q: int, pairs: Sequence[int], smallest: bool = False) -> str:
    """Return the largest corrected p-value of these pairs, or with ``smallest`` the smallest, in brackets."""
    kind = c.kinds[q]
    if kind == "bound":
        return " (bounds overlap)" if smallest else " (bounds apart)"
    if kind == "exact":
        return " (equal)" if smallest else " (exact)"
    values = [float(c.p_holm[q, k]) for k in pairs if math.isfinite(c.p_holm[q, k])]
    if not values:
        return " (no statement)"
    p = min(values) if smallest else max(values)
    sign = "=" if len(pairs) == 1 else "≥" if smallest else "≤"
    return " (p < 0.001)" if p < 1e-3 else f" (p {sign} {p:.2g})"


def summary(comparison: Comparison) -> list[str]:
    """Return how many measures of flatness say that one side is flatter, a line for each pair."""
    c, lines = comparison, []
    measures = [q for q in range(len(c.quantities)) if c.flatter[q]]
    for k in range(len(c.first)):
        measured = [q for q in measures if not math.isnan(c.difference[q, k])]
        if not measured:
            continue
        flatter = [_ordered(c, q, k) for q in measured if c.significant[q, k]]
        first, second = int(c.first[k]), int(c.second[k])
        wins = [sum(low == side for low, _ in flatter) for side in (first, second)]
        if wins[1] > wins[0]:
            first, second, wins = second, first, wins[::-1]
        a, b, total = c.sides[first], c.sides[second], len(measured)
        if not flatter:
            lines.append(f"{a} and {b} differ significantly in none of {total} measures of flatness")
            continue
        line = f"{a} is flatter than {b} by {wins[0]} of {total} measures"
        line += f", sharper by {wins[1]}" if wins[1] else ""
        undecided = total - sum(wins)
        lines.append(f"{line}; {undecided} not significant" if undecided else line)
    return lines


def footnotes(comparison: Comparison) -> list[str]:
    """Return the meaning of the errors, how the differences were tested, at which loss, and the notes."""
    c = comparison
    lines = [f"{'; '.join(words for kind, words in ERRORS.items() if kind in c.kinds)}."]
    by_test: dict[str, str] = {}
    for name, test in zip(c.quantities, c.tests, strict=True):
        by_test[test] = f"{by_test[test]}, {name}" if test in by_test else name
    bounds, exact = by_test.pop("bounds", ""), by_test.pop("exact", "")
    rules = []
    if by_test:
        count = int(np.isfinite(c.p).sum())
        tests = " or ".join(f"{test} ({names})" for test, names in by_test.items())
        correction = f"Holm's correction for {count} test{'s' * (count > 1)}"
        rules.append(f"p ≤ {c.significance:g} by {tests}, with {correction}")
    rules += [f"bounds where they do not overlap ({bounds})"] if bounds else []
    rules += [f"exact numbers where they differ by more than rounding ({exact})"] if exact else []
    lines.append(f"Significant: {'; '.join(rules)}.")
    if math.isfinite(c.equal_loss):
        steps = zip(c.labels, c.given_steps.tolist(), strict=True)
        nearest = "; ".join(f"{label} (of {step:,})" for label, step in steps)
        lines.append(f"At the training loss nearest to {c.equal_loss:.4g}{with_unit(c, ' nat')}: {nearest}.")
    if not c.grouped:
        lines.append("This is about these weights alone; what made them is compared by groups of seeds.")
    return [*lines, *(f"Note: {note}" for note in c.notes)]


#: The paths, in this order, and the weights on them.
PATHS = ("line", "aligned line", "curve")
PLACES = ("a", "b", "aligned b", "bend")


@dataclass(frozen=True, kw_only=True)
class Connection(Evaluated, schema="landscape.connection", axes="t", table="path t"):
    """Loss and accuracy on three paths from a to b, and their barriers.

    Attributes:
        t: (K,), from 0 (a) to 1 (b). Paths are the line from a to b, the line from a to the aligned b, and
            the curve from a to the aligned b.
        loss: (3, K), in nats.
        accuracy: (3, K), between 0 and 1; NaN without class labels.
        metrics: (metrics, 3, K), the values of the metrics ``metric_names``.
        barrier: (3,), of each path, in nats (see :func:`landscape.barrier`).
        weights: (4, P): a, b, the aligned b, and the bend of the curve.
        distance, aligned_distance: ‖a − b‖, and ‖a − aligned b‖.
        groups: groups of hidden units that were permuted, each named by the first parameter with the units.
        sizes: the number of units in each group.
        fixed: parameters whose units could not be permuted, with the reason.
        largest_change: the largest difference of the loss, and of the outputs, between b and the aligned b,
            each relative to the largest, in float64, on 1,000 samples.
        curve: "bezier" or "chain".
        align: the match of units, by "weights" or "activations".
        steps, lr, batch: settings of the bend's training.
        seed: the seed of the alignment's order and of the bend's training.
        own_loss: (2,), with BatchNorm, the losses of a and b with their own statistics; NaN where these are
            not known.

    Example:
        >>> connection.barrier.tolist(), connection.removed
        ([2.0, 0.5, 0.0], 0.75)
    """

    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"path": PATHS, "place": PLACES}

    t: Annotated[Array, "t+"]
    loss: Annotated[Array, "path t", "nat"]
    accuracy: Annotated[Array, "path t", "1"]
    barrier: Annotated[Array, "path", "nat"]
    weights: Annotated[Array, "place parameter"]
    distance: Annotated[float, "1"]
    aligned_distance: Annotated[float, "1"]
    groups: Annotated[tuple[str, ...], "groups"]
    sizes: Annotated[Array, "groups"]
    fixed: Annotated[tuple[str, ...], "fixed"]
    largest_change: Annotated[float, "1"]
    curve: str
    steps: int
    lr: float
    batch: int
    seed: int
    align: str = "weights"
    metrics: Annotated[Array, "metric path t", "1"] = field(default_factory=no_values)
    own_loss: Annotated[Array, "network", "nat"] = field(default_factory=no_values)

    @property
    def removed(self) -> float:
        """The share of the line's barrier that the alignment removed; NaN where there was none."""
        line, aligned, _ = self.barrier.tolist()
        return 1 - aligned / line if line > 0 else float("nan")

    def describe(self) -> list[Row]:
        step = f"largest of t in steps of {self.t[1] - self.t[0]:.3g}"
        trained = f"{self.curve}, {self.steps:,} steps"
        share = f"{self.removed:.0%} of it removed" if self.barrier[0] > 0 else "the line has none to remove"
        notes = step, f"{share}, matched by {self.align}", trained
        barriers, highest = self.barrier, self.loss.max(1)
        rows = rows_of_each([f"barrier on the {path}" for path in PATHS], barriers, unit="nat", notes=notes)
        rows += rows_of_each([f"highest loss on the {path}" for path in PATHS], highest, unit="nat")
        rows += [
            Row("distance", self.distance, note="" if self.distance else "a and b are equal"),
            Row("distance after alignment", self.aligned_distance),
            Row("permuted units", float(self.sizes.sum()), note=f"in {len(self.groups)} groups"),
            Row("change of the outputs by alignment", f"{self.largest_change:.1g}", note="relative"),
        ]
        rows += [*own_losses(self.own_loss, self.loss[0, [0, -1]]), *self._metric_rows()]
        return [*rows, Row("not permuted", "; ".join(self.fixed))] if self.fixed else rows


MANY = 8  # averages that a description lists (our choice)


@dataclass(frozen=True, kw_only=True)
class WeightAverage(Evaluated, schema="landscape.weight_average", table="average"):
    """The losses of averages w = Σ_j a_j w_j of n members w_j, predicted from measurements at the members.

    The last average was chosen by prediction (greedy soup, Wortsman et al. 2022); the other averages have the
    caller's coefficients.

    Attributes:
        members_loss: (n,) in nats, the exact losses of the members.
        coefficients: (K, n), the coefficients a_j; each row sums to 1.
        loss, low, high: (K,) in nats, the predicted losses and the ends of their intervals; infinite where
            ``ratio`` is at least 1.
        level: the probability of an interval.
        exact: (K,) in nats, the exact losses; NaN where not computed.
        metrics: (metrics, K), the metrics ``metric_names`` of the averages, exact as ``exact`` is.
        ratio: (K,), the part of the predicted change that is beyond the second order, in units of the second
            order's correction ½ Σ_j a_j |⟨∇L(w_j), w − w_j⟩|; infinite for coefficients too far below 0.
        chosen: (n,), the members of the last average.
        labels: the names of the members.
        parameters: P.
        products: the number of Hessian-vector products, one a member.
        names: (K,), of the averages.
        space: what was averaged: "weights"; of adapters the "products" BA of their factors, or the "factors".
        stored_as: the members' types of numbers below float32.
        rank: to which averages of products are cut; 0: to none.
        stored: (K,) in nats, the exact losses of the averages in these types and of this rank; NaN where
            neither changes them.
        ranks, truncation: (K,), the largest rank that an average of products needs, and the norm of what
            ``rank`` cuts, relative to that of all products; NaN where not computed.

    Example:
        >>> result = WeightAverage(
        ...     members_loss=np.array([0.25, 0.27]), coefficients=np.full((2, 2), 0.5), level=0.9,
        ...     loss=np.full(2, 0.21), low=np.full(2, 0.2), high=np.full(2, 0.22), exact=np.full(2, 0.213),
        ...     ratio=np.full(2, 0.1), chosen=np.array([True, True]), labels=("a", "b"), parameters=9,
        ...     products=2, samples=100, dtype="float32")
        >>> result.change.round(3).tolist(), result.inside.tolist()
        ([-0.05, -0.05], [True, True])
    """

    members_loss: Annotated[Array, "member+", "nat"]
    coefficients: Annotated[Array, "average+ member", "1"]
    loss: Annotated[Array, "average", "nat"]
    low: Annotated[Array, "average", "nat"]
    high: Annotated[Array, "average", "nat"]
    exact: Annotated[Array, "average", "nat"]
    ratio: Annotated[Array, "average", "1"]
    chosen: Annotated[Array, "member"]
    labels: Annotated[tuple[str, ...], "member"]
    level: Annotated[float, "1"]
    parameters: int
    products: int
    names: Annotated[tuple[str, ...], "name"] = ()
    space: str = "weights"
    stored: Annotated[Array, "stored", "nat"] = field(default_factory=no_values)
    stored_as: str = ""
    rank: int = 0
    ranks: Annotated[Array, "stored", "1"] = field(default_factory=no_values)
    truncation: Annotated[Array, "stored", "1"] = field(default_factory=no_values)
    metrics: Annotated[Array, "metric average", "1"] = field(default_factory=no_values)

    @property
    def titles(self) -> Sequence[str]:
        """The names of the averages; their numbers where a file has no names."""
        numbered = tuple(f"average {k}" for k in range(len(self.loss)))
        return self.names if len(self.names) == len(numbered) else numbered

    @property
    def ranking(self) -> Array:
        """The places of the averages that were asked for, by predicted loss; without those that have none."""
        return ranked(self.loss[:-1], self.ratio[:-1])

    @property
    def change(self) -> Array:
        """(K,), the predicted loss minus the mean loss of the members with the same coefficients."""
        change: Array = self.loss - self.coefficients @ self.members_loss
        return change

    @property
    def inside(self) -> Array:
        """(K,), whether the exact loss is inside the interval."""
        return (self.low <= self.exact) & (self.exact <= self.high)

    def describe(self) -> list[Row]:
        count = len(self.loss) - 1
        names = self.titles
        order = [*self.ranking, *np.flatnonzero(~(self.ratio[:-1] < 1))]
        rows = [row for k in order[:MANY] for row in self._rows_of_average(k, names[k])]
        if count > 1:
            best = names[order[0]] if len(self.ranking) else "none, the members are too far apart"
            rows.append(Row("best by prediction", best, note=f"of {count:,} averages"))
        labels = np.array(self.labels, dtype=object)
        chosen, omitted = labels[self.chosen.astype(bool)], labels[~self.chosen.astype(bool)]
        several = len(chosen) > 1
        note = f"without {', '.join(omitted)}" if len(omitted) else "all"
        note = note if several else "no average is predicted to be better with certainty"
        rows.append(Row("members chosen by prediction", ", ".join(chosen), note=note))
        rows += self._rows_of_average(count, "chosen average") if several else []
        low, high = self.members_loss.min(), self.members_loss.max()
        rows.append(Row("losses of the members", f"{low:.6g} to {high:.6g}", unit="nat"))
        if self.batchnorm:
            samples = f"from {self.bn_samples:,} samples"
            source = samples if self.bn == "recalibrate" else "those of each batch"
            rows.append(Row("BatchNorm statistics", "estimated again at each average", note=source))
        if self.space != "weights":
            rows.append(Row("averaged", f"the {self.space} of adapters"))
        products = Row("Hessian products", self.products, note="one a member")
        return [*rows, products, Row("samples", self.samples)]

    def _rows_of_average(self, k: int, name: str) -> list[Row]:
        """Return rows with all known numbers of average ``k``. In the rows, ``name`` is the average's name.

        The predicted loss and its change come first, then the exact loss and metrics. The last rows are the
        exact loss of the average as it is stored, and the rank of the average.
        """
        title = f"predicted loss of the {name}"
        ratio_note = f"the correction of each order is {self.ratio[k]:.2g} times that of the order before"
        if self.ratio[k] < 1:  # the expansion converges
            half_width = float(max(self.high[k] - self.loss[k], self.loss[k] - self.low[k]))
            change = float(self.change[k])
            rows = [
                Row(title, float(self.loss[k]), half_width, "nat", f"±: {self.level:.0%} interval"),
                Row(f"{name} minus the members' mean loss", change, half_width, "nat", ratio_note),
            ]
        else:
            note = f"the members are too far apart, {ratio_note}"
            if not np.isfinite(self.ratio[k]):  # stands for coefficients too far below 0
                note = "its negative coefficients put the average too far outside of the members"
            rows = [Row(title, "none", note=note)]
        if np.isfinite(self.exact[k]):
            rows.append(Row(f"exact loss of the {name}", float(self.exact[k]), 0.0, "nat"))
            note = "metrics have no prediction"
            for metric, value in zip(self.metric_names, self.metrics[:, k], strict=True):
                rows.append(Row(f"exact {metric} of the {name}", float(value), 0.0, note=note))
        # The average as it is stored: rounded to the types ``stored_as``, and cut to ``rank``.
        if len(self.stored) and np.isfinite(self.stored[k]):
            rank_text = f"rank {self.rank}" if self.rank else ""
            form = " and ".join(filter(None, [self.stored_as, rank_text]))
            rows.append(Row(f"{name} in {form}", float(self.stored[k]), 0.0, "nat"))
        # ``ranks`` has the largest rank of a product BA in the average, before the cut to ``rank``.
        if len(self.ranks) and np.isfinite(self.ranks[k]):
            note = f"{self.truncation[k]:.2g} of the norm of all products BA is cut" if self.rank else ""
            rows.append(Row(f"rank of the {name}", float(self.ranks[k]), note=note))
        return rows


def ranked(loss: Array, ratio: Array) -> Array:
    """Return the indices of predicted losses in their order, without those whose interval has no ends."""
    order = np.argsort(loss, kind="stable")
    return order[ratio[order] < 1]

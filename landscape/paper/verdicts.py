"""Verdicts on claims: effects by seed with their intervals, and the grade that follows from them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from landscape.core.statistics import Estimate, t_quantile

if TYPE_CHECKING:
    import pandas as pd

Outcome = Literal["holds", "holds in part", "does not hold", "undecided", "not tested here"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds in part", "does not hold", "undecided", "not tested here")
#: A table of pandas, which is imported where a figure is drawn or judged.
Rows: TypeAlias = "pd.DataFrame"
#: A number by seed.
BySeed = Mapping[float, float]
# The fewest seeds that a verdict may rest on, and the confidence of its intervals (ours).
SEEDS, CONFIDENCE = 3, 0.95
# Seeds beyond which nobody would go to decide an effect (ours).
MANY = 1000
# Effects that the first table of the gallery shows for one claim (ours).
SHOWN = 3
# Why a verdict is open where a figure of an older version lacks a column.
NOT_KEPT = "its CSV has no numbers by seed ({})"


@dataclass(frozen=True)
class Effect:
    """One test of a claim: the size of an effect, and the sizes that the claim speaks of.

    The claim holds where the whole interval lies in ``claimed``, fails where it lies outside, and is open
    where the interval contains a border, zero by default.

    Attributes:
        where: the setting, such as "SENet-18, batch 8192".
        what: the effect with its unit, such as "accuracy of DPSGD less SSGD (points)".
        values: one for each seed; of numbers that no seed enters, any number of them.
        claimed: the sizes for which the claim holds, an open interval.
        exact: no seed and no estimate enters: the values themselves must lie in ``claimed``.
        ratio: the values are positive, and compared as ratios: the mean is the geometric one, and the
            interval that of the logarithms.
        untested: why nothing can be said, whatever the values.

    Example:
        >>> effect = Effect("network A", "points", (1.0, 1.5, 2.0))
        >>> effect.text, effect.holds
        ('+1.5 (+0.26 to +2.7)', True)
        >>> Effect("network A", "points", (1.0, 2.0)).reason
        '2 seeds, a verdict needs 3'
    """

    where: str
    what: str
    values: tuple[float, ...]
    claimed: tuple[float, float] = (0.0, math.inf)
    exact: bool = False
    ratio: bool = False
    untested: str = ""

    @property
    def interval(self) -> tuple[float, float, float]:
        """(mean, low, high): of several seeds Student's t interval; of exact values (median, least, most)."""
        if self.ratio:
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(np.array(self.values))
            mean, low, high = Effect(self.where, self.what, tuple(logs.tolist())).interval
            return math.exp(mean), math.exp(low), math.exp(high)
        v = np.array(self.values)
        if self.exact:
            return float(np.median(v)), float(v.min()), float(v.max())
        if not len(v):
            return math.nan, math.nan, math.nan
        estimate = Estimate.of(v)
        return estimate.value, *estimate.interval(CONFIDENCE)

    @property
    def reason(self) -> str:
        """Why nothing can be said; "" where the effect is decided."""
        if self.untested:
            return self.untested
        if not self.exact and len(self.values) < SEEDS:
            return f"{len(self.values) or 'no'} seed{'s' * (len(self.values) != 1)}, a verdict needs {SEEDS}"
        if not np.isfinite(self.values).all() or (self.ratio and min(self.values) <= 0):
            return "not finite"
        _, low, high = self.interval
        outside = high < self.claimed[0] or low > self.claimed[1]
        return "" if self._inside or outside else f"the interval contains the border; {self._deciding}"

    @property
    def _deciding(self) -> str:
        """How many seeds would decide if their mean and spread were these."""
        values, borders = np.array(self.values), np.array(self.claimed)
        if self.ratio:
            with np.errstate(divide="ignore", invalid="ignore"):
                values, borders = np.log(values), np.log(borders)
        distance = np.abs(values.mean() - borders[np.isfinite(borders)]).min()
        more = np.arange(len(values) + 1, MANY + 1)
        enough = t_quantile(CONFIDENCE, more - 1) * values.std(ddof=1) / np.sqrt(more) < distance
        return f"about {more[enough][0]} seeds would decide" if enough.any() else f"{MANY} would not decide"

    @property
    def _inside(self) -> bool:
        _, low, high = self.interval
        return self.claimed[0] < low and high < self.claimed[1]

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds here; None where nothing can be said."""
        return None if self.reason else self._inside

    @property
    def text(self) -> str:
        """ "+1.5 (+0.26 to +2.7)": the mean and its interval."""
        mean, low, high = self.interval
        if math.isnan(low):
            return "–" if math.isnan(mean) else self._shown(mean)
        texts = [self._shown(value) for value in (mean, low, high)]
        return texts[0] if texts[0] == texts[1] == texts[2] else f"{texts[0]} ({texts[1]} to {texts[2]})"

    def _shown(self, value: float) -> str:
        """With a sign where zero is among the claimed sizes, or their border."""
        if self.ratio or not self.claimed[0] <= 0 <= self.claimed[1]:
            return f"{value:.3g}"
        return f"{value:+.3g}" if abs(value) >= 100 else f"{value:+.2g}"

    def entry(self) -> dict[str, Any]:
        """For the JSON file of a figure; numbers that are not finite are null."""
        mean, low, high = self.interval
        numbers = {"mean": mean, "low": low, "high": high, "least": self.claimed[0], "most": self.claimed[1]}
        return {
            "where": self.where,
            "what": self.what,
            "seeds": 0 if self.exact else len(self.values),
            **{key: round(v, 6) if math.isfinite(v) else None for key, v in numbers.items()},
            "text": self.text,
            "holds": self.holds,
            "reason": self.reason,
        }


#: Gives the effects on which the verdict on a claim rests, from the rows of a figure's CSV.
Judge = Callable[[Rows], list[Effect]]


def judged(judge: Judge, rows: Rows) -> list[Effect]:
    """The effects of ``rows`` as a CSV has them; one without values where a column is missing.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"loss": [1.0]})
        >>> judged(lambda rows: [Effect("", "", tuple(by_seed(rows, "gain")))], rows)[0].reason
        'its CSV has no numbers by seed (seed)'
    """
    try:
        return judge(rows)
    except KeyError as error:  # of pandas
        return [Effect("", "", (), untested=NOT_KEPT.format(error.args[0]))]


def outcome(effects: Sequence[Effect]) -> Outcome:
    """The grade of a claim; "holds" where all of its effects do, and none is open.

    Example:
        >>> good, open_ = Effect("a", "", (1.0, 1.1, 1.2)), Effect("b", "", (-1.0, 1.1, 1.2))
        >>> outcome([good]), outcome([good, open_]), outcome([open_]), outcome([])
        ('holds', 'holds in part', 'undecided', 'not tested here')
    """
    decided = [effect.holds for effect in effects if effect.holds is not None]
    if not decided:
        return "not tested here" if all(effect.untested for effect in effects) else "undecided"
    if not any(decided):
        return "does not hold"
    return "holds" if all(decided) and len(decided) == len(effects) else "holds in part"


def stacked(tables: Iterable[Rows]) -> Rows:
    """The rows of all ``tables``, one after another.

    Example:
        >>> import pandas as pd
        >>> stacked([pd.DataFrame({"a": [1]}), pd.DataFrame(), pd.DataFrame({"a": [2]})])["a"].tolist()
        [1, 2]
    """
    import pandas as pd

    known = [table for table in tables if len(table)]
    return pd.concat(known, ignore_index=True) if known else pd.DataFrame()


def select(rows: Rows, /, **where: Any) -> Rows:
    """The rows with these values.

    Example:
        >>> import pandas as pd
        >>> select(pd.DataFrame({"a": [1, 2], "b": [2, 3]}), a=2)["b"].tolist()
        [3]
    """
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def settings(rows: Rows, *names: str) -> list[Any]:
    """The values of a column, or of several the tuples, each once in the order of the rows.

    Example:
        >>> import pandas as pd
        >>> settings(pd.DataFrame({"a": [2, 1, 2], "b": ["x", "y", "x"]}), "a", "b")
        [(2, 'x'), (1, 'y')]
    """
    columns = [rows[name].tolist() for name in names]
    return list(dict.fromkeys(columns[0] if len(names) == 1 else zip(*columns, strict=True)))


def by_seed(rows: Rows, value: str, /, **where: Any) -> dict[float, float]:
    """``value`` by seed; of several rows with one seed the last, such as that of the last epoch.

    Example:
        >>> import pandas as pd
        >>> by_seed(pd.DataFrame({"seed": 0, "x": [1.0, 2.0], "a": "s"}), "x", a="s")
        {0.0: 2.0}
    """
    seeds = rows["seed"]  # a verdict says first that there are none
    chosen = select(rows, **where)
    return dict(zip(map(float, seeds[chosen.index]), map(float, chosen[value]), strict=True))


def pair(rows: Rows, value: str, /, **where: Any) -> list[dict[float, float]]:
    """:func:`by_seed` for each of the values of the one column for which a tuple is given.

    Example:
        >>> import pandas as pd
        >>> pair(pd.DataFrame({"seed": [0, 0], "x": [1.0, 2.0], "a": ["s", "d"]}), "x", a=("d", "s"))
        [{0.0: 2.0}, {0.0: 1.0}]
    """
    ((name, values),) = ((n, v) for n, v in where.items() if isinstance(v, tuple))
    return [by_seed(rows, value, **(where | {name: each})) for each in values]


def difference(a: BySeed, b: BySeed) -> tuple[float, ...]:
    """a − b of the seeds that both have; of two infinities, which is no number, 0.

    Example:
        >>> difference({0: 3.0, 1: 5.0, 2: 1.0}, {0: 1.0, 1: 2.0})
        (2.0, 3.0)
    """
    return tuple(a[s] - b[s] if a[s] != b[s] else 0.0 for s in sorted(a.keys() & b.keys()))


def ratio(a: BySeed, b: BySeed) -> tuple[float, ...]:
    """a/b of the seeds that both have."""
    return tuple(a[s] / b[s] if b[s] else math.nan for s in sorted(a.keys() & b.keys()))


def difference_effect(
    where: str, what: str, two: Sequence[BySeed], claimed: tuple[float, float] = (0.0, math.inf)
) -> Effect:
    """The first of ``two`` less the second, by seed, claimed to be above zero.

    Example:
        >>> difference_effect("here", "points", [{0: 3.0, 1: 5.0}, {0: 1.0, 1: 2.0}]).values
        (2.0, 3.0)
    """
    return Effect(where, what, difference(*two), claimed)


def ratio_effect(
    where: str, what: str, two: Sequence[BySeed], claimed: tuple[float, float] = (1.0, math.inf)
) -> Effect:
    """The first of ``two`` over the second, by seed, claimed to be above one.

    Example:
        >>> ratio_effect("here", "steps", [{0: 3.0, 1: 5.0}, {0: 1.0, 1: 2.0}]).values
        (3.0, 2.5)
    """
    return Effect(where, what, ratio(*two), claimed, ratio=True)


def table(rows: Rows) -> str:
    """``rows`` as CSV; numbers to 6 digits.

    Example:
        >>> import pandas as pd
        >>> table(pd.DataFrame({"a": [1.0], "b": "x"}))
        'a,b\\n1,x\\n'
    """
    buffer = io.StringIO()
    if len(rows):
        writer = csv.DictWriter(buffer, list(rows), lineterminator="\n")
        writer.writeheader()
        for row in rows.to_dict("records"):
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return buffer.getvalue()


def rows_of(text: str) -> Rows:
    """The rows of a CSV; what reads as a number is one.

    Raises:
        ValueError: it is no CSV.

    Example:
        >>> rows_of("a,b\\n1,x\\n").to_dict("records")
        [{'a': 1.0, 'b': 'x'}]
    """
    import pandas as pd

    try:
        rows = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    return pd.DataFrame([{key: _value(value) for key, value in row.items()} for row in rows])


def _value(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return text

"""Verdicts on claims: effects by seed with their intervals, and the grade that follows from them."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate, t_quantile

if TYPE_CHECKING:
    import pandas as pd

Outcome = Literal["holds", "holds in part", "does not hold", "no difference", "undecided", "not tested here"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
#: A table of pandas, which is imported where a figure is drawn or judged; and one number for each seed.
Rows: TypeAlias = "pd.DataFrame"
Series: TypeAlias = "pd.Series[float]"
#: The sizes of an effect that a claim speaks of, an open interval.
Sizes: TypeAlias = tuple[float, float]
ABOVE_ZERO, ABOVE_ONE = (0.0, math.inf), (1.0, math.inf)
# The fewest seeds that a verdict may rest on, and the confidence of its intervals (our choice).
SEEDS, CONFIDENCE = 3, 0.95
# What counts as no difference between times or numbers of steps, as a share (our choice, as for the cross
# term of noise-split; it was made when the intervals of saddles and runtime-loopback were known).
NEGLIGIBLE = 0.05
CLAIMED = "as claimed"
# Seeds beyond which nobody would go to decide an effect (our choice).
MANY = 1000


@dataclass(frozen=True)
class Effect:
    """One test of a claim: the size of an effect, and the sizes that the claim speaks of.

    The claim holds where the whole interval lies in ``claimed``, fails where it lies outside, and is open
    where the interval contains a border, zero by default. Where it then lies within ``margin`` of no
    difference, both are equal: two one-sided tests (Schuirmann 1987) at (1 − CONFIDENCE)/2, which is
    stricter than their usual 5%.

    Attributes:
        where: the setting, such as "SENet-18, batch 8192".
        what: the effect with its unit, such as "accuracy of DPSGD − that of SSGD (points)".
        values: one for each seed; of numbers that no seed enters, any number of them.
        claimed: the sizes for which the claim holds, an open interval.
        exact: no seed and no estimate enters: the values themselves must lie in ``claimed``.
        ratio: the values are positive, and compared as ratios: the mean is the geometric one, and the
            interval that of the logarithms.
        margin: the largest difference from zero that counts as none; of a ratio as a share, such as 0.05
            for a factor of 1.05. By default each difference counts.
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
    claimed: Sizes = ABOVE_ZERO
    exact: bool = False
    ratio: bool = False
    margin: float = 0.0
    untested: str = ""

    @property
    def interval(self) -> tuple[float, float, float]:
        """(mean, low, high): of several seeds Student's t interval; of exact values (median, least, most)."""
        if self.exact:
            return float(np.median(self.values)), min(self.values), max(self.values)
        if not self.values:
            return math.nan, math.nan, math.nan
        estimate = Estimate.of(self._scaled(self.values))
        low, high = estimate.interval(CONFIDENCE)
        if self.ratio:
            return math.exp(estimate.value), math.exp(low), math.exp(high)
        return estimate.value, low, high

    def _scaled(self, values: Sequence[float]) -> Array:
        """Return ``values`` on the scale on which they are compared: of ratios the logarithms."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(values) if self.ratio else np.array(values)

    @property
    def reason(self) -> str:
        """The reason why nothing can be said; "" where the effect is decided."""
        if self.untested:
            return self.untested
        if not self.exact and len(self.values) < SEEDS:
            return f"{len(self.values) or 'no'} seed{'s' * (len(self.values) != 1)}, a verdict needs {SEEDS}"
        if not np.isfinite(self.values).all() or (self.ratio and min(self.values) <= 0):
            return "not finite"
        if not self._differing:
            return "the same numbers with each seed, as where both diverge"
        _, low, high = self.interval
        if self._inside or high < self.claimed[0] or low > self.claimed[1]:
            return ""
        if self.equal:
            return f"equal within {self.margin:.0%}" if self.ratio else f"equal within {self.margin:g}"
        return f"the interval contains the border; {self._deciding}"

    @property
    def equal(self) -> bool:
        """Return whether the interval lies within the margin."""
        most = math.log1p(self.margin) if self.ratio else self.margin
        tested = len(self.values) >= SEEDS and not self.untested and np.isfinite(self.values).all()
        return bool(tested and self._differing and (np.abs(self._scaled(self.interval[1:])) < most).all())

    @property
    def _differing(self) -> bool:
        """Return whether a seed has a difference at all, unlike numbers that stand for runs that diverged."""
        return self.exact or not self.margin or bool(self._scaled(self.values).any())

    @property
    def _deciding(self) -> str:
        """The number of seeds that would decide if their mean and spread were these."""
        values, borders = self._scaled(self.values), self._scaled(self.claimed)
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
        """Return whether the claim holds here; None where nothing can be said."""
        return None if self.reason else self._inside

    @property
    def answer(self) -> str:
        """The answer in words: "as claimed", "not as claimed", "open" and so on."""
        if self.reason and not self.untested:
            return self.reason if self.equal else "open"
        return "untested" if self.untested else CLAIMED if self.holds else f"not {CLAIMED}"

    @property
    def text(self) -> str:
        """ "+1.5 (+0.26 to +2.7)": the mean and its interval."""
        mean, low, high = self.interval
        if math.isnan(low):
            return "–" if math.isnan(mean) else self._number(mean)
        texts = [self._number(value) for value in (mean, low, high)]
        return texts[0] if texts[0] == texts[1] == texts[2] else f"{texts[0]} ({texts[1]} to {texts[2]})"

    def _number(self, value: float) -> str:
        """Return ``value`` in a few digits, with a sign if the claimed sizes include or border on zero."""
        if self.ratio or not self.claimed[0] <= 0 <= self.claimed[1]:
            return f"{value:.3g}"
        return f"{value:+.3g}" if abs(value) >= 100 else f"{value:+.2g}"

    def entry(self) -> dict[str, Any]:
        """Return the entry in the JSON file of a figure; numbers that are not finite are null."""
        mean, low, high = self.interval
        numbers = {"mean": mean, "low": low, "high": high, "least": self.claimed[0], "most": self.claimed[1]}
        return {
            "where": self.where,
            "what": self.what,
            "seeds": 0 if self.exact else len(self.values),
            **{key: round(v, 6) if math.isfinite(v) else None for key, v in numbers.items()},
            "text": self.text,
            "holds": self.holds,
            "answer": self.answer,
            "reason": self.reason,
        }


#: Gives the effects on which the verdict on a claim rests, from the rows of a figure's CSV.
Judge = Callable[[Rows], Iterable[Effect]]


def judged(judge: Judge, rows: Rows) -> list[Effect]:
    """Return the effects of ``rows`` of a CSV; one without values if a column is missing.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"loss": [1.0]})
        >>> judged(lambda rows: [Effect("", "", tuple(by_seed(rows, "gain")))], rows)[0].reason
        'its CSV has no numbers by seed (seed)'
    """
    try:
        return list(judge(rows))
    except KeyError as error:  # of pandas
        return [Effect("", "", (), untested=f"its CSV has no numbers by seed ({error.args[0]})")]


def outcome(effects: Sequence[Effect]) -> Outcome:
    """Return the grade of a claim; "holds" where all of its effects do, and none is open.

    Example:
        >>> good, open_ = Effect("a", "", (1.0, 1.1, 1.2)), Effect("b", "", (-1.0, 1.1, 1.2))
        >>> outcome([good]), outcome([good, open_]), outcome([open_]), outcome([])
        ('holds', 'holds in part', 'undecided', 'not tested here')
    """
    decided = [effect.holds for effect in effects if effect.holds is not None]
    if not decided:
        if effects and all(effect.equal for effect in effects):
            return "no difference"
        return "not tested here" if all(effect.untested for effect in effects) else "undecided"
    if not any(decided):
        return "does not hold"
    return "holds" if all(decided) and len(decided) == len(effects) else "holds in part"


def counted(effects: Sequence[Effect]) -> str:
    """Return the number of effects with each answer.

    Example:
        >>> good, open_ = Effect("a", "", (1.0, 1.1, 1.2)), Effect("b", "", (-1.0, 1.1, 1.2))
        >>> counted([good, open_, open_]), counted([Effect("c", "", (-0.1, 0.0, 0.1), margin=1.0)])
        ('1 of 3 as claimed, 2 open', '0 of 1 as claimed, 1 equal within 1')
    """
    answers = Counter(effect.answer for effect in effects)
    first = f"{answers.pop(CLAIMED, 0)} of {len(effects)} {CLAIMED}"
    return ", ".join([first, *(f"{n} {of.removesuffix(f' {CLAIMED}')}" for of, n in sorted(answers.items()))])


def select(rows: Rows, /, **where: Any) -> Rows:
    """Return the rows with these values.

    Example:
        >>> import pandas as pd
        >>> select(pd.DataFrame({"a": [1, 2], "b": [2, 3]}), a=2)["b"].tolist()
        [3]
    """
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def distinct(rows: Rows, *names: str) -> list[Any]:
    """Return the distinct values of a column, or of several the distinct tuples, in the order of the rows.

    Example:
        >>> import pandas as pd
        >>> distinct(pd.DataFrame({"a": [2, 1, 2], "b": ["x", "y", "x"]}), "a", "b")
        [(2, 'x'), (1, 'y')]
    """
    unique_rows = rows[list(names)].drop_duplicates()
    if len(names) == 1:
        return unique_rows[names[0]].tolist()
    return list(unique_rows.itertuples(index=False, name=None))


def by_seed(rows: Rows, value: str, /, **where: Any) -> Series:
    """Return ``value`` by seed; of several rows with one seed the last, such as that of the last epoch.

    Example:
        >>> import pandas as pd
        >>> by_seed(pd.DataFrame({"seed": 0, "x": [1.0, 2.0], "a": "s"}), "x", a="s").to_dict()
        {0.0: 2.0}
    """
    seeds = rows["seed"].astype(float)  # a verdict says first that there are none
    numbers = select(rows, **where)[value].astype(float)
    return numbers.set_axis(seeds[numbers.index]).groupby(level=0).nth(-1)


def difference(a: Series, b: Series) -> tuple[float, ...]:
    """Return a − b of the seeds that both have; of two infinities, which is no number, 0.

    Example:
        >>> import pandas as pd
        >>> difference(pd.Series({0: 3.0, 1: 5.0, 2: 1.0}), pd.Series({0: 1.0, 1: 2.0}))
        (2.0, 3.0)
    """
    a, b = a.align(b, join="inner")
    return tuple((a - b).mask(a == b, 0.0).sort_index().tolist())


def ratio(a: Series, b: Series) -> tuple[float, ...]:
    """Return a/b of the seeds that both have."""
    a, b = a.align(b, join="inner")
    return tuple((a / b.where(b != 0)).sort_index().tolist())


def paired_effect(
    where: str, what: str, rows: Rows, value: str, /, *, times: bool = False, claimed: Sizes | None = None,
    margin: float = 0.0, **columns: Any,
) -> Effect:  # fmt: skip
    """Return the first of two settings against the second, by seed.

    Args:
        where, what, claimed, margin: as of :class:`Effect`; claimed is by default above zero, of a ratio
            above one.
        rows, value: of the figure, and the column.
        times: a ratio, and no difference.
        columns: values of columns; of the one in which both differ the two.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"seed": [0, 0], "x": [1.0, 3.0], "a": ["s", "d"]})
        >>> paired_effect("here", "points", rows, "x", a=("d", "s")).values
        (2.0,)
        >>> paired_effect("here", "times", rows, "x", a=("d", "s"), times=True).values
        (3.0,)
    """
    ((column, pair),) = ((name, values) for name, values in columns.items() if isinstance(values, tuple))
    a, b = (by_seed(rows, value, **(columns | {column: setting})) for setting in pair)
    return effect_of(where, what, a, b, times=times, claimed=claimed, margin=margin)


def effect_of(
    where: str, what: str, a: Series, b: Series, *, times: bool = False, claimed: Sizes | None = None,
    **options: Any,
) -> Effect:  # fmt: skip
    """Return :func:`paired_effect` of numbers by seed; ``options`` are further ones of :class:`Effect`."""
    border = claimed or (ABOVE_ONE if times else ABOVE_ZERO)
    return Effect(where, what, (ratio if times else difference)(a, b), border, ratio=times, **options)


def table(rows: Rows) -> str:
    """Return ``rows`` as CSV; numbers to 6 digits.

    Example:
        >>> import pandas as pd
        >>> table(pd.DataFrame({"a": [1.0], "b": "x"}))
        'a,b\\n1,x\\n'
    """
    if not len(rows):
        return ""
    texts = rows.astype(object).map(lambda v: f"{v:.6g}" if isinstance(v, float) else v)
    return str(texts.to_csv(index=False, lineterminator="\n"))


def rows_of(text: str) -> Rows:
    """Return the rows of a CSV, in which "nan" alone is no number.

    Raises:
        ValueError: it is no CSV.

    Example:
        >>> rows_of("a,b\\n1,x\\n").to_dict("records")
        [{'a': 1, 'b': 'x'}]
    """
    import pandas as pd

    if not text.strip():
        return pd.DataFrame()
    return pd.read_csv(io.StringIO(text), keep_default_na=False, na_values="nan", low_memory=False)

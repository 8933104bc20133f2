"""Numbers of ours, as texts beside the paper's."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from landscape.paper.verdicts import Rows


@dataclass(frozen=True)
class Compared:
    """A number of ours and the paper's; ``paper`` is "" if the paper has none."""

    what: str
    ours: str
    paper: str = ""


def printed(table: str) -> Rows:
    """Return the numbers of a paper, all as text: the rows of numbers/TABLE.csv, such as "table3_cifar10"."""
    import pandas as pd

    return pd.read_csv(Path(__file__).parent / "numbers" / f"{table}.csv", dtype=str, keep_default_na=False)


def summary(values: Iterable[float], form: str = ".2f") -> str:
    """Return "3.09 (2.69 to 4.53)": median and range, or the one value there is."""
    finite = np.array([v for v in values if np.isfinite(v)])
    if not len(finite):
        return "–"
    if len(finite) == 1:
        return f"{finite[0]:{form}}"
    return f"{np.median(finite):{form}} ({finite.min():{form}} to {finite.max():{form}})"


def mean_and_spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return "2.43 ± 0.11": mean and sample standard deviation, or the one value there is.

    It is "diverged" if a value is not finite.
    """
    values = list(values)
    if not np.isfinite(values).all():
        return "diverged"
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "–"
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}}"


def compare_with_paper(
    rows: Rows, what: str, value: str, text: Callable[..., str] = summary, paper: str = "", **form: str
) -> list[Compared]:
    """Return ``text`` of the column ``value`` for each setting that ``what`` names, in the order of the rows.

    Args:
        rows: of the figure.
        what: the words, with columns in braces, such as "test error of {algorithm} (%)".
        value: the column.
        text: :func:`summary` or ``mean_and_spread``.
        paper: the paper's number, with columns in braces if it differs by setting.
        form: ``form`` of ``text``.
    """
    columns = [name for _, name, _, _ in string.Formatter().parse(what + paper) if name]
    compared = []
    for values, group in rows.groupby(columns, sort=False, dropna=False):
        setting = dict(zip(columns, values, strict=True))
        ours = text(group[value], **form)
        compared.append(Compared(what.format(**setting), ours, paper.format(**setting)))
    return compared

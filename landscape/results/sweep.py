"""What a sweep found: a row for each setting, with mean and spread over its seeds."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.results.base import Result

#: The columns of numbers, in order: those of a row besides its settings and seeds.
COLUMNS = (
    "test_loss", "test_loss_std", "test_error", "test_error_std", "best_test_error", "best_test_error_std",
    "diverged", "seconds",
)  # fmt: skip


def texts(table: Sequence[Any]) -> Array:
    """Strings as an array of UTF-8 bytes, which HDF5 holds at any length."""
    return np.char.encode(np.array(table, dtype=str), "utf-8")


@dataclass(frozen=True)
class Sweep(Result):
    """A row for each setting whose runs have ended, at least those of some seeds.

    ``settings`` (rows, keys) and ``seeds`` (rows,) are UTF-8 text, the latter such as "0 1 2"; a key that a
    setting does not have is "". All else is (rows,) float64: means over the seeds of the test loss (nats) and
    the test error (%) after the last step, and of the lowest test error along training, each with its sample
    standard deviation (NaN with one seed); how many runs ``diverged``, which are in the means with the last
    state that was finite; mean ``seconds`` of training. NaN where a column was not recorded.
    """

    schema: ClassVar[str] = "landscape.sweep"
    shapes: ClassVar[Mapping[str, str]] = {
        "seeds": "rows",
        "keys": "keys",
        "settings": "rows keys",
    } | dict.fromkeys(COLUMNS, "rows")
    texts: ClassVar[tuple[str, ...]] = ("settings", "seeds")

    keys: tuple[str, ...]
    settings: Array
    seeds: Array
    test_loss: Array
    test_loss_std: Array
    test_error: Array
    test_error_std: Array
    best_test_error: Array
    best_test_error_std: Array
    diverged: Array
    seconds: Array

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in (*self.settings.flat, *self.seeds.flat):
            text.decode("utf-8")
        if not all(re.fullmatch(rb"\d+( \d+)*", text) for text in self.seeds):
            raise ValueError("seeds must be numbers with a blank between")

    @property
    def rows(self) -> list[dict[str, str]]:
        """The settings of each row, by key."""
        return [dict(zip(self.keys, row, strict=True)) for row in np.char.decode(self.settings, "utf-8")]

    @property
    def seed_lists(self) -> list[list[int]]:
        """The seeds of each row."""
        return [[int(word) for word in text.split()] for text in self.seeds]

    def to_csv(self, path: str | Path) -> None:
        """Write the table as CSV, atomically: the settings, ``seeds`` (their number), the columns."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*self.keys, "seeds", *COLUMNS])
        for i, (row, seeds) in enumerate(zip(self.rows, self.seed_lists, strict=True)):
            writer.writerow([*row.values(), len(seeds), *(f"{getattr(self, c)[i]:.9g}" for c in COLUMNS)])
        write_text(path, out.getvalue())

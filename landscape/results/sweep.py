"""The table of a sweep: a row for each setting, with means and standard deviations over its seeds."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.results.base import Result

if TYPE_CHECKING:
    import pandas as pd

#: The columns of numbers, in order; the table has them after the settings and the seeds.
COLUMNS = (
    "test_loss", "test_loss_std", "test_error", "test_error_std", "best_test_error", "best_test_error_std",
    "diverged", "seconds",
)  # fmt: skip


def texts(table: Sequence[Any]) -> Array:
    """Strings as an array of UTF-8 bytes, which HDF5 stores at any length.

    Example:
        >>> texts([["0.1", "10"]]).tolist()
        [[b'0.1', b'10']]
    """
    return np.char.encode(np.array(table, dtype=str), "utf-8")


def _strings(table: Array) -> list[Any]:
    """The reverse of :func:`texts`, as lists."""
    strings: list[Any] = np.char.decode(table, "utf-8").tolist()
    return strings


@dataclass(frozen=True)
class Sweep(Result):
    """A row for each setting for which the runs of at least one seed have ended.

    Attributes:
        keys: (keys,), the keys of the recipe that are varied.
        settings: (rows, keys), UTF-8 text; "" for a key that a setting does not have.
        seeds: (rows,), UTF-8 text such as "0 1 2".
        test_loss, test_error: (rows,), means over the seeds after the last step, in nats and percent.
        best_test_error: (rows,), the mean of the lowest test error along training, in percent.
        test_loss_std, test_error_std, best_test_error_std: (rows,), sample standard deviations; NaN with one
            seed.
        diverged: (rows,), number of runs that diverged; the means contain their last finite state.
        seconds: (rows,), mean duration of training.

    Columns that were not recorded are NaN.

    Example:
        >>> column = np.array([30.0, 20.0])
        >>> sweep = Sweep(keys=("lr",), settings=texts([["0.1"], ["1.0"]]), seeds=texts(["0 1", "0"]),
        ...               **dict.fromkeys(COLUMNS, column))
        >>> sweep.rows, sweep.seed_lists
        ([{'lr': '0.1'}, {'lr': '1.0'}], [[0, 1], [0]])
        >>> sweep.to_dataframe()[["lr", "test_error"]].to_numpy().tolist()
        [['0.1', 30.0], ['1.0', 20.0]]
    """

    schema: ClassVar[str] = "landscape.sweep"
    shapes: ClassVar[Mapping[str, str]] = {
        "seeds": "row",
        "keys": "keys",
        "settings": "row keys",
    } | dict.fromkeys(COLUMNS, "row")
    units: ClassVar[Mapping[str, str]] = {
        "test_loss": "nat", "test_loss_std": "nat", "test_error": "%", "test_error_std": "%",
        "best_test_error": "%", "best_test_error_std": "%", "seconds": "s",
    }  # fmt: skip
    table: ClassVar[str] = "row"
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
            raise ValueError("seeds must be numbers separated by one blank")

    @property
    def rows(self) -> list[dict[str, str]]:
        """The settings of each row, by key."""
        return [dict(zip(self.keys, row, strict=True)) for row in _strings(self.settings)]

    @property
    def seed_lists(self) -> list[list[int]]:
        """The seeds of each row."""
        return [[int(word) for word in text.split()] for text in self.seeds]

    def to_dataframe(self, dims: str = "") -> pd.DataFrame:
        """The table, with a column for each key that is varied.

        Args:
            dims: as in :meth:`landscape.results.base.Result.to_dataframe`.

        Returns:
            A DataFrame with a row for each setting.

        Raises:
            FailedError: pandas is not installed.
            InputError: a dimension that the result does not have.

        Example:
            >>> column = np.array([30.0, 20.0])
            >>> sweep = Sweep(keys=("lr",), settings=texts([["0.1"], ["1.0"]]), seeds=texts(["0 1", "0"]),
            ...               **dict.fromkeys(COLUMNS, column))
            >>> sweep.to_dataframe().lr.tolist()
            ['0.1', '1.0']
        """
        frame = super().to_dataframe(dims)
        if not dims:
            for i, key in enumerate(self.keys):
                frame.insert(i, key, _strings(self.settings[:, i]))
        return frame

    def to_csv(self, path: str | Path) -> None:
        """Write the table as CSV: the settings, ``seeds`` (their number), the columns of numbers.

        Args:
            path: the file, which is replaced.

        Raises:
            FailedError: the file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> column = np.array([30.0])
            >>> sweep = Sweep(keys=("lr",), settings=texts([["0.1"]]), seeds=texts(["0 1"]),
            ...               **dict.fromkeys(COLUMNS, column))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     sweep.to_csv(f"{folder}/sweep.csv")
            ...     pathlib.Path(f"{folder}/sweep.csv").read_text()[:13]
            'lr,seeds,test'
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*self.keys, "seeds", *COLUMNS])
        for i, (row, seeds) in enumerate(zip(self.rows, self.seed_lists, strict=True)):
            writer.writerow([*row.values(), len(seeds), *(f"{getattr(self, c)[i]:.9g}" for c in COLUMNS)])
        write_text(path, out.getvalue())

"""Tables about runs: a sweep, and predicted times of a step."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
    """Strings as an array of UTF-8 bytes, which HDF5 stores at any length."""
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
    table: ClassVar[str] = "row"
    texts: ClassVar[tuple[str, ...]] = ("settings", "seeds")

    keys: Annotated[tuple[str, ...], "keys"]
    settings: Annotated[Array, "row keys"]
    seeds: Annotated[Array, "row"]
    test_loss: Annotated[Array, "row", "nat"]
    test_loss_std: Annotated[Array, "row", "nat"]
    test_error: Annotated[Array, "row", "%"]
    test_error_std: Annotated[Array, "row", "%"]
    best_test_error: Annotated[Array, "row", "%"]
    best_test_error_std: Annotated[Array, "row", "%"]
    diverged: Annotated[Array, "row"]
    seconds: Annotated[Array, "row", "s"]

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


@dataclass(frozen=True)
class RunTimes(Result):
    """Predicted times of a step, a row for each number of workers, algorithm and mixing.

    Attributes:
        workers: (rows,), number of workers.
        algorithm: (rows,), "ssgd", "ssgd*", "dpsgd awc" or "dpsgd atc".
        mixing: (rows,), "" for algorithms without mixing.
        gradient_s, update_s: (rows,), seconds of computation of a worker without stragglers.
        exchange_s: (rows,), seconds of an exchange if no worker is late.
        step_s, step_error: (rows,), seconds of a step, and the standard error of the simulation.
        steps, run_s: (rows,), steps for the samples of the recipe, and their seconds.
        waiting: (rows,), the share of a step in which a worker does not compute.
        samples_per_s: (rows,), of all workers together.
        speedup: (rows,), ``samples_per_s`` relative to SSGD with the same number of workers.
        efficiency: (rows,), ``samples_per_s`` relative to workers without exchange and stragglers.
        recipe, parameters: name of the recipe, and number of parameters of its network.
        held: learners per worker.
        bandwidth, latency: of the link, in bytes per second and seconds.
        straggler: s, where computing takes (1 + s·E) times as long, E ~ Exp(1) anew for each worker and step.
        slow: factor by which one worker is slower than the others.
        all_reduce: algorithm of the all-reduce.
        news: whether all workers receive the loss of each step before the next one ends.
        seed: of the simulation.

    Example:
        >>> import numpy as np
        >>> one = np.ones(1)
        >>> result = RunTimes(
        ...     workers=np.array([2]), algorithm=("ssgd",), mixing=("",), gradient_s=one, update_s=one,
        ...     exchange_s=one, step_s=3 * one, step_error=0 * one, steps=one, run_s=3 * one, waiting=0 * one,
        ...     samples_per_s=one, speedup=one, efficiency=one, recipe="r", parameters=9, held=1,
        ...     bandwidth=1e9, latency=1e-5, straggler=0.0, slow=1.0, all_reduce="ring", news=True, seed=0)
        >>> print(result.label)
        r, 9 parameters
        8 Gbit/s, 10 µs
    """

    schema: ClassVar[str] = "landscape.plan"
    table: ClassVar[str] = "row"

    workers: Annotated[Array, "row+"]
    algorithm: Annotated[tuple[str, ...], "row+"]
    mixing: Annotated[tuple[str, ...], "row+"]
    gradient_s: Annotated[Array, "row+", "s"]
    update_s: Annotated[Array, "row+", "s"]
    exchange_s: Annotated[Array, "row+", "s"]
    step_s: Annotated[Array, "row+", "s"]
    step_error: Annotated[Array, "row+", "s"]
    steps: Annotated[Array, "row+"]
    run_s: Annotated[Array, "row+", "s"]
    waiting: Annotated[Array, "row+", "1"]
    samples_per_s: Annotated[Array, "row+", "1/s"]
    speedup: Annotated[Array, "row+", "1"]
    efficiency: Annotated[Array, "row+", "1"]
    recipe: str
    parameters: int
    held: int
    bandwidth: Annotated[float, "byte/s"]
    latency: Annotated[float, "s"]
    straggler: float
    slow: float
    all_reduce: str
    news: bool
    seed: int

    @property
    def label(self) -> str:
        """The recipe with the size of its network, and the link, in two lines."""
        rate = f"{8e-9 * self.bandwidth:.3g} Gbit/s"
        slow = f", stragglers {self.straggler:g}" if self.straggler else ""
        slow += f", one worker {self.slow:g}× slower" if self.slow != 1 else ""
        network = f"{self.recipe}, {self.parameters:,} parameters"
        return f"{network}\n{rate}, {1e6 * self.latency:.3g} µs{slow}"

"""Results about training: limits of stability, times of escape, sweeps, and predicted times of a step."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from landscape.core.errors import InputError
from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.results.base import Result, Sourced
from landscape.results.shown import Row, converged, eigenvalue, limit_in_words, percent, rows_of_each

if TYPE_CHECKING:
    import pandas as pd


# Forms of momentum: the rows of the limits.
FORMS = ("no momentum", "momentum", "shifted momentum")
# The level of the bands of escape times (the usual one).
LEVEL = 0.95


def limit_names(delays: Array, momentum: float) -> list[str]:
    """Names of the limits, by delay and then by form of momentum."""
    return [f"τ = {delay}, {form}" for delay in delays for form in forms_with(momentum)]


def forms_with(momentum: float) -> list[str]:
    """Names of the forms with the momentum."""
    return [FORMS[0], *(f"{form} {momentum:g}" for form in FORMS[1:])]


@dataclass(frozen=True)
class Stability(Sourced):
    """Limits of stable training with delayed gradients at a minimum, and the run that led there.

    Attributes:
        delay: (K,), in steps.
        limit: (3, K), the largest stable ηλ, a row for each form of momentum (none, ordinary, shifted).
            Training leaves this minimum if the learning rate is above limit/λ_max.
        momentum: the momentum of the second and third row.
        lambda_max, residual: the largest eigenvalue of the Hessian over all ``samples``, in nats, and its
            residual ‖Hv − λv‖.
        lr: the learning rate of the run; NaN if unknown.
        own_limit: the largest stable ηλ of the update rule of the run; NaN if unknown.
        own_delay: the delay of the run, in steps.
        precondition: the optimizer whose preconditioner P the Hessian is seen through, P^{-1/2} H P^{-1/2};
            "" without.

    Example:
        >>> result = Stability(np.array([0]), np.array([[2.0], [3.8], [3.8]]), momentum=0.9, lambda_max=4.0,
        ...                    residual=0.0, converged=True, lr=0.1, own_limit=2.0, own_delay=0, samples=10)
        >>> result.rates[:, 0].round(3).tolist()
        [0.5, 0.95, 0.95]
    """

    schema: ClassVar[str] = "landscape.stability"
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": FORMS}
    table: ClassVar[str] = "form delay"

    delay: Annotated[Array, "delay+", "steps"]
    limit: Annotated[Array, "form delay", "1"]
    momentum: float
    lambda_max: Annotated[float, "nat"]
    residual: Annotated[float, "nat"]
    converged: bool
    lr: float
    own_limit: float
    own_delay: Annotated[int, "steps"]
    samples: int
    precondition: str = ""

    @property
    def rates(self) -> Array:
        """(3, K): the learning rates above which training leaves this minimum; inf where λ_max ≤ 0."""
        return self.limit / self.lambda_max if self.lambda_max > 0 else np.full_like(self.limit, np.inf)

    def describe(self) -> list[Row]:
        by = f"preconditioned by {self.precondition}" if self.precondition else ""
        rows = [eigenvalue("λ_max", self.lambda_max, self.residual, "1/η" if by else "nat")]
        if math.isfinite(self.lr):
            note = f"lr {self.lr:g}, {limit_in_words(self.own_limit)}"
            rows.append(Row("lr·λ_max", self.lr * self.lambda_max, note=note))
        if by:
            rows.append(Row("Hessian", by))
        if self.lambda_max <= 0:
            rows.append(Row("rates", "no direction curves upwards: no rate is too large for it"))
        else:
            names = limit_names(self.delay, self.momentum)
            leaves = np.where(self.lr > self.rates.T.ravel(), "the run's lr leaves", "")
            above = [f"training leaves above lr, {name}" for name in names]
            rows += rows_of_each(above, self.rates.T.ravel(), notes=leaves)
        return [*rows, converged(self.converged, "raise max_products")]


@dataclass(frozen=True)
class Minima(Sourced):
    """Learning rates at which full-batch training with delayed gradients stays at a minimum or leaves it.

    Arrays (3, K) have a row for each form of momentum (none, ordinary, shifted) and a column for each delay.

    Each run starts at the distance ``displacement`` from the minimum, in the sharpest direction. It has left
    the minimum if its loss exceeds, within ``steps`` steps, the loss at ``factor`` times this distance.

    Attributes:
        delay: (K,), in steps.
        predicted: (3, K), the largest stable ηλ divided by ``lambda_max`` + ``weight_decay``.
        stays: (3, K), the largest learning rate at which training stayed.
        leaves: (3, K), the smallest learning rate at which training left.
        steps: (3, K), length of the runs.
        lambda_after: (3, K), λ_max at the end of the run at ``stays``, in nats.
        momentum: the momentum of the second and third row.
        lambda_max, residual: of the Hessian at the minimum, in nats.
        weight_decay: that of the training.
        displacement: the distance from the minimum at which each run starts, in the sharpest direction.
        factor: a run has left where its loss exceeds the loss at this many times the distance.
        loss, gradient_norm: at the minimum, with weight decay.

    Example:
        >>> ones = np.ones((3, 1))
        >>> result = Minima(np.array([0]), predicted=ones, stays=ones, leaves=4 * ones, steps=ones,
        ...                 lambda_after=ones, momentum=0.9, weight_decay=0.0, lambda_max=2.0, residual=0.0,
        ...                 loss=0.0, gradient_norm=0.0, displacement=0.1, factor=4.0, samples=10)
        >>> result.boundary[:, 0].tolist()
        [2.0, 2.0, 2.0]
    """

    schema: ClassVar[str] = "landscape.minima"
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": FORMS}
    table: ClassVar[str] = "form delay"

    delay: Annotated[Array, "delay+", "steps"]
    predicted: Annotated[Array, "form delay"]
    stays: Annotated[Array, "form delay"]
    leaves: Annotated[Array, "form delay"]
    steps: Annotated[Array, "form delay", "steps"]
    lambda_after: Annotated[Array, "form delay", "nat"]
    momentum: float
    weight_decay: float
    lambda_max: Annotated[float, "nat"]
    residual: Annotated[float, "nat"]
    loss: Annotated[float, "nat"]
    gradient_norm: float
    displacement: float
    factor: float
    samples: int

    @property
    def boundary(self) -> Array:
        """(3, K): the geometric mean of ``stays`` and ``leaves``, an estimate of the largest stable rate."""
        return np.sqrt(self.stays * self.leaves)

    def describe(self) -> list[Row]:
        names = limit_names(self.delay, self.momentum)
        ratios = zip(self.boundary.T.flat, self.predicted.T.flat, strict=True)
        notes = [f"predicted {expected:.4g}, ratio {found / expected:.3f}" for found, expected in ratios]
        moved = float(np.abs(self.lambda_after / self.lambda_max - 1).max())
        largest = [f"largest lr that stays, {name}" for name in names]
        return [
            *rows_of_each(largest, self.boundary.T.ravel(), notes=notes),
            eigenvalue("λ_max", self.lambda_max, self.residual),
            percent("largest change of λ_max", moved),
            Row("weight decay", self.weight_decay),
            Row("‖gradient‖", self.gradient_norm),
        ]


@dataclass(frozen=True)
class LabelCounts(Sourced):
    """Training samples by learner and label.

    Attributes:
        counts: (n, K), samples of each label that each learner draws its minibatches from.
        classes: (K,), the labels; one, 0, where samples have none.
        division: how the training set was divided, as in the recipe's key ``data.split``.

    Example:
        >>> result = LabelCounts(np.array([[30, 0], [10, 20]]), np.array([0, 1]), "dirichlet(0.1)")
        >>> [row.name for row in result.describe()]
        ['smallest part', 'labels of a learner', 'division']
    """

    schema: ClassVar[str] = "landscape.label_counts"
    table: ClassVar[str] = "learner class"

    counts: Annotated[Array, "learner+ class+", "samples"]
    classes: Annotated[Array, "class"]
    division: str

    def describe(self) -> list[Row]:
        sizes, present = self.counts.sum(1), (self.counts > 0).sum(1)
        largest = f"largest {sizes.max():,.0f}"
        of = f"of {len(self.classes)}, mean over {len(sizes)} learners"
        return [
            Row("smallest part", float(sizes.min()), 0.0, "samples", largest),
            Row("labels of a learner", float(present.mean()), 0.0, note=of),
            Row("division", self.division),
        ]


@dataclass(frozen=True)
class Escape(Result):
    """Escape times from a saddle: the steps until L(w_a) is below ``share`` of the saddle's depth.

    One quantity is varied.

    Attributes:
        times: (algorithms, values, runs), in steps, one run for each seed; inf for runs that diverged or had
            not escaped after ``steps`` steps.
        values: (values,), of the quantity that is varied.
        vary: the name of this quantity.
        algorithms: names of the algorithms.
        share: the share of the saddle's depth below which a run has escaped.
        steps: the length of the runs.
        setting: the quantities that are not varied, as text.

    Example:
        >>> times = np.array([[[3.0, 1.0, 2.0, 5.0, 4.0, np.inf]]])
        >>> result = Escape(times, np.array([0.1]), "lr", ("ssgd",), share=0.5, steps=10)
        >>> result.median.tolist(), [edge.tolist() for edge in result.band(0.9)]
        ([[4.0]], [[[1.0]], [[inf]]])
    """

    schema: ClassVar[str] = "landscape.escape"
    table: ClassVar[str] = "algorithms values run"

    times: Annotated[Array, "algorithms+ values+ run+", "steps"]
    values: Annotated[Array, "values"]
    vary: str
    algorithms: Annotated[tuple[str, ...], "algorithms"]
    share: float
    steps: Annotated[int, "steps"]
    setting: str = ""
    label: str = ""

    @property
    def median(self) -> Array:
        """(algorithms, values): the median over the runs; inf where half of them or more had not escaped."""
        ordered = np.sort(self.times, axis=2)
        middle = ordered.shape[2] // 2  # the upper of two: halfway to inf is inf
        return ordered[:, :, middle]

    def band(self, level: float = 0.95) -> tuple[Array, Array]:
        """A confidence interval for the median escape time.

        The interval lies between two of the measured times, chosen by rank. It is valid for every
        distribution of times, because the number of times below the median is binomial with probability ½.
        Runs that did not escape count as longer than all others, which does not change the ranks.

        Args:
            level: the least probability with which the interval contains the median, between 0 and 1.

        Returns:
            (lower ends, upper ends), both (algorithms, values), in steps.

        Raises:
            InputError: a level that is not between 0 and 1, or that needs more runs.

        Example:
            >>> times = np.arange(6.0).reshape(1, 1, 6)
            >>> result = Escape(times, np.array([0.1]), "lr", ("ssgd",), share=0.5, steps=9)
            >>> lower, upper = result.band()
            >>> float(lower[0, 0]), float(upper[0, 0])
            (0.0, 5.0)
        """
        rank = median_rank(self.times.shape[2], level)
        ordered = np.sort(self.times, axis=2)
        return ordered[:, :, rank], ordered[:, :, -1 - rank]

    def describe(self) -> list[Row]:
        runs = self.times.shape[2]
        known = 2.0 ** (1 - runs) <= 1 - LEVEL  # else no two of the times bound the median at that level
        low, high = self.band(LEVEL) if known else (np.zeros_like(self.median), self.median + np.inf)
        names = [f"{name}, {self.vary} {value:g}" for value in self.values for name in self.algorithms]
        bands = [f"95% band {a:.0f} to {b:.0f}" for a, b in zip(low.T.flat, high.T.flat, strict=True)]
        rows = rows_of_each(names, self.median.T.ravel(), unit="steps", notes=bands)
        return [*rows, Row("runs", runs, note=self.setting)]


def median_rank(samples: int, level: float) -> int:
    """The rank of the ends of a confidence interval for the median.

    Args:
        samples: number of independent samples.
        level: the least probability with which the interval contains the median, between 0 and 1.

    Returns:
        The largest r, counted from 0, for which the interval from the r-th smallest to the r-th largest
        sample contains the median with probability ``level`` or more.

    Raises:
        InputError: even the interval from the smallest to the largest sample does not.
    """
    if not 0 < level < 1:
        raise InputError(f"level: {level} is not allowed, it must be > 0 and < 1")
    tails = itertools.accumulate(2 * math.comb(samples, k) / 2**samples for k in range((samples + 1) // 2))
    rank = sum(1 for outside in tails if outside <= 1 - level) - 1
    if rank < 0:
        least = math.ceil(1 - math.log2(1 - level))
        raise InputError(f"seeds: {samples} is not allowed, a band of {level:g} needs at least {least}")
    return rank


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
    return np.char.decode(table, "utf-8").tolist()


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

    def describe(self) -> list[Row]:
        best = int(np.lexsort((np.nan_to_num(self.test_loss, nan=np.inf), self.diverged))[0])
        setting = ", ".join(f"{key} = {value}" for key, value in self.rows[best].items())
        seeds = len(self.seed_lists[best])
        spread = f"±: standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
        error = float(self.test_error[best]), float(self.test_error_std[best])
        return [
            Row("best setting", setting, note=f"of {len(self.rows)}"),
            Row("its test loss", float(self.test_loss[best]), float(self.test_loss_std[best]), "nat", spread),
            Row("its test error", *error, "%", spread),
            Row("runs that diverged", int(self.diverged.sum()), note=f"of {sum(map(len, self.seed_lists))}"),
        ]

    def best(self, key: str) -> list[dict[str, str]]:
        """The settings with the best value of ``key``, one for each combination of the other keys.

        The best has the fewest diverged runs, and among those the lowest mean final test loss.

        Args:
            key: one of ``keys``, such as that of a search.

        Returns:
            The settings, as ``rows`` has them.

        Raises:
            InputError: another key.

        Example:
            >>> column = np.array([3.0, 2.0])
            >>> sweep = Sweep(keys=("lr",), settings=texts([["0.1"], ["1"]]), seeds=texts(["0", "0"]),
            ...               **dict.fromkeys(COLUMNS, column))
            >>> sweep.best("lr")
            [{'lr': '1'}]
        """
        choose("key", key, self.keys)
        loss = np.where(np.isnan(self.test_loss), np.inf, self.test_loss)
        found: dict[tuple[str, ...], tuple[tuple[float, float], dict[str, str]]] = {}
        for row, *score in zip(self.rows, self.diverged.tolist(), loss.tolist(), strict=True):
            others = tuple(value for name, value in row.items() if name != key)
            if row[key] and (others not in found or tuple(score) < found[others][0]):
                found[others] = (score[0], score[1]), row
        return [row for _, row in found.values()]

    def to_dataframe(self, dims: str = "") -> pd.DataFrame:
        """The table, with a column for each key that is varied.

        Args:
            dims: as in :meth:`landscape.plugins.Result.to_dataframe`.

        Returns:
            A DataFrame with a row for each setting.

        Raises:
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
            OperationError: the file cannot be written.

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
        table = self.to_dataframe().assign(seeds=[len(seeds) for seeds in self.seed_lists])
        form = {"index": False, "float_format": "%.9g", "na_rep": "nan", "lineterminator": "\n"}
        write_text(path, table.to_csv(columns=[*self.keys, "seeds", *COLUMNS], **form))

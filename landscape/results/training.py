"""Results about training: limits of stability, labels by learner, sweeps, and the learners' spread."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.results.base import Measurement, Result, Sourced
from landscape.results.shown import Row, converged, eigenvalue, limit_in_words, percent, rows_of_each

if TYPE_CHECKING:
    import pandas as pd


# Forms of momentum: the rows of the limits.
FORMS = ("no momentum", "momentum", "shifted momentum")


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


@dataclass(frozen=True, kw_only=True)
class Disagreement(Measurement):
    """The share of the learners' spread Δw_j = w_j − w_a, and of the gradient, in the top-k Hessian space.

    H is the Hessian and g the gradient of the mean loss at w_a, over all samples; v_i the eigenvectors of
    the k largest eigenvalues of H; C = n⁻¹ Σ_j Δw_jΔw_jᵀ the covariance of the learners (not n⁻² Σ, as in
    Eq. 4 of DPSGD-2020). Errors are one standard error by the jackknife over the learners, as if these were
    independent draws; learners that have mixed are not, and the error is then too small. They are NaN for
    two learners. For these very learners the numbers are exact, but for the residuals of the eigenvectors.

    Attributes:
        values, residuals: (k,), eigenvalues in nats, descending, and ‖Hv − λv‖.
        spread_share: (k,), v_iᵀCv_i/tr C.
        spread_error: (k,), the error of its sum over the first i eigenvectors.
        gradient_share: (k,), (v_iᵀg)²/‖g‖²; NaN, as all shares of the gradient, where it is zero.
        consensus: tr C, the consensus distance.
        cost, cost_error: ½ tr(HC) in nats: to second order, the mean loss of the learners above that of w_a;
            the error has that of products by differences.
        cost_top: the part of it from the top-k space, ½ Σ_i λ_i v_iᵀCv_i.
        loss, learners_loss: at w_a, and the mean over the learners at their own weights, in nats, with the
            statistics of BatchNorm that ``bn`` names at both.
        gradient_in_span: ‖Pg‖²/‖g‖², P the projector on the span of the Δw_j, of dimension ``rank``.
        rank: the dimension of the span of the Δw_j, at most n − 1.
        dominant_in_span: ‖PQg‖²/‖Qg‖², Q the projector on the top-k space: the share of the gradient's sharp
            part that the spread alone shows (arXiv 2605.27739).
        grad_norm2: ‖g‖².
        parameters: P; an isotropic vector has the share k/P in the top-k space, and rank/P in the span.
        products: the number of Hessian-vector products.
        residual_tol: the relative residual of the eigenvalues that was asked for.
        derivatives: "exact", or "differences" of gradients.

    Example:
        >>> import numpy as np
        >>> half = np.array([0.5, 0.25])
        >>> result = Disagreement(
        ...     values=np.array([4.0, 1.0]), residuals=half, spread_share=half, spread_error=half,
        ...     gradient_share=half, consensus=0.1, cost=0.15, cost_error=0.01, cost_top=0.1, loss=0.5,
        ...     learners_loss=0.64, gradient_in_span=0.2, dominant_in_span=0.3, rank=3, grad_norm2=0.01,
        ...     parameters=100, learners=4, products=20, converged=True, residual_tol=0.01, seed=0, samples=9,
        ...     dtype="float64")
        >>> result.value, result.standard_error, result.chance
        (0.75, 0.25, 0.02)
    """

    schema: ClassVar[str] = "landscape.disagreement"
    table: ClassVar[str] = "rank_of_eigenvalue"

    values: Annotated[Array, "rank_of_eigenvalue+", "nat"]
    residuals: Annotated[Array, "rank_of_eigenvalue", "nat"]
    spread_share: Annotated[Array, "rank_of_eigenvalue", "1"]
    spread_error: Annotated[Array, "rank_of_eigenvalue", "1"]
    gradient_share: Annotated[Array, "rank_of_eigenvalue", "1"]
    consensus: Annotated[float, "1"]
    cost: Annotated[float, "nat"]
    cost_error: Annotated[float, "nat"]
    cost_top: Annotated[float, "nat"]
    loss: Annotated[float, "nat"]
    learners_loss: Annotated[float, "nat"]
    gradient_in_span: Annotated[float, "1"]
    dominant_in_span: Annotated[float, "1"]
    rank: int
    grad_norm2: float
    parameters: int
    learners: int
    products: int
    converged: bool
    residual_tol: float
    derivatives: str = "exact"

    @property
    def value(self) -> float:
        """The share of the spread in the top-k space."""
        return float(self.spread_share.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of :attr:`value`."""
        return float(self.spread_error[-1])

    @property
    def chance(self) -> float:
        """k/P: the expected share of an isotropic spread."""
        return len(self.values) / self.parameters

    @property
    def gradient_value(self) -> float:
        """The share of the gradient in the top-k space."""
        return float(self.gradient_share.sum())

    def describe(self) -> list[Row]:
        k, chance = len(self.values), f"an isotropic one: {100 * self.chance:.2g}%"
        span = f"an isotropic one: {100 * self.rank / self.parameters:.2g}%"
        top = f"of it in the top {k} {self.cost_top:.4g}"
        return [
            percent(f"of the learners' spread in the top {k}", self.value, self.standard_error, chance),
            percent(f"of the gradient in the top {k}", self.gradient_value),
            percent("of the gradient in the spread", self.gradient_in_span, note=span),
            percent("of its sharp part in the spread", self.dominant_in_span),
            Row("½ tr(HC)", self.cost, self.cost_error, "nat", top),
            Row("mean loss of the learners above w_a", self.learners_loss - self.loss, unit="nat"),
            Row("consensus distance", self.consensus, note=f"{self.learners} learners"),
            eigenvalue("λ_1", self.values[0], self.residuals[0]),
            Row("Hessian products", self.products),
            converged(self.converged, "raise max_products"),
        ]

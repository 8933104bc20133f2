"""Losses and eigenvalues on planes and lines, which may be interpolated, and the runs of a sweep."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np

from landscape.core.files import write_text
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.results.base import Evaluated, Measured, Result, no_values
from landscape.results.shown import Radius, Row, own_losses, radius_of, rows_of_each

if TYPE_CHECKING:  # results are read and shown without torch
    import pandas as pd
    from torch import Tensor

SPAN = 0.1  # x, y ∈ [−0.1, 0.1] around w_a (DPSGD-2020, section 4.1)
MARGIN = 1.25  # the span of a plane with markers, relative to the outermost marker (our choice)


@dataclass(frozen=True)
class Plane:
    """The points ``center + x·directions[0] + y·directions[1]`` in weight space.

    Attributes:
        center: (P,).
        directions: (2, P).
        kind: the choice of the directions: "random", "between", "pca", "learners" or "eigen".
        norm: normalization of random directions, as in :func:`landscape.random_plane`.
        seed: the seed of random directions.
        ignore: parameters that random directions do not change: "none" or "bias+norm".
        axes: the meaning of a step of length 1 along each direction, for plots.
        weights: (M, P), the M weight vectors from which the plane was computed, if any.
        networks: (M,), with BatchNorm, the networks of ``weights`` with their own statistics, not aligned.
        markers: (M, 2), coordinates of the points of the plane nearest to ``weights``; (0, 2) without any.
        labels: (M,), the names of ``weights``.
        explained: (2,), each direction's share of the variance of ``weights``; (0,) if unknown.

    Example:
        >>> import torch
        >>> plane = Plane(torch.zeros(3), torch.eye(3)[:2], "random", "none", seed=0)
        >>> plane.span
        0.1
    """

    center: Tensor
    directions: Tensor
    kind: str
    norm: str
    seed: int
    ignore: str = "none"
    axes: tuple[str, ...] = ("u", "v")
    markers: Array = field(default_factory=lambda: np.zeros((0, 2)))
    labels: tuple[str, ...] = ()
    explained: Array = field(default_factory=no_values)
    weights: Tensor | None = None
    networks: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        about = [f"norm {self.norm}, seed {self.seed}"] if self.kind == "random" else []
        about += [f"{len(self.center):,} weights"]
        about += [f"through {', '.join(self.labels)}"] if self.labels else []
        return f"Plane({self.kind}; {'; '.join(about)})"

    @property
    def span(self) -> float:
        """The default half width of a picture: 0.1, or 1.25 times the largest coordinate of the markers."""
        largest = float(np.abs(self.markers).max(initial=0.0))
        return MARGIN * largest if largest > 0 else SPAN


@dataclass(frozen=True, kw_only=True)
class Interpolated(Measured):
    """A result with values at points: exact where ``done``, and elsewhere interpolated.

    Subclasses have the field ``done``.

    Attributes:
        interpolation_tol: the allowed error, such as "1%" (of the range shown) or "0.005"; "" where all
            points are exact or the computation is not finished.
        columns: the names of the interpolated arrays. The tolerance is for the first column, and for all
            eigenvalues.
        stated_error: (columns,), a bound on the error at any point, as a share of the range of the values
            for a relative tolerance, else in the unit of the values. The bound is twice the estimate from
            measured errors, at most the tolerance. After a long refinement, and with a part of the samples,
            the bound is the tolerance. It held on at least 99% of 300 surfaces (benchmarks/surfaces.py), and
            is no guarantee.
        largest_error: (columns,), the largest measured error at the last ``checks`` points. These were drawn
            at random, most in the widest holes between exact points, before the interpolation had their
            values. The final interpolation passes through them.
        checks: the number of these points.
        log_columns: the columns with errors of logarithms: their values differ by more than a factor of 100,
            and pictures show them on a logarithmic scale.
        part_samples, part_evaluations: the number of samples in the part that was computed first, and the
            number of points computed with the part; 0 without a part.
    """

    interpolation_tol: str = ""
    columns: Annotated[tuple[str, ...], "column"] = ()
    stated_error: Annotated[Array, "column"] = field(default_factory=no_values)
    largest_error: Annotated[Array, "column"] = field(default_factory=no_values)
    checks: int = 0
    log_columns: Annotated[tuple[str, ...], "log_column"] = ()
    part_samples: int = 0
    part_evaluations: int = 0

    @property
    def exact(self) -> Array:
        """The field ``done`` of the subclass: where points are computed, and not interpolated."""
        return vars(self)["done"]

    def nested(self) -> Self:
        """Return a coarser result whose points are all ``done``, to draw an unfinished computation.

        Returns:
            A result with every 2nd point of each axis; if these are not all done, with every 4th, and so on.
            The result itself, if it is finished or interpolated, or if even the coarsest grid has points that
            are not done.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (x, y))
            >>> surface = landscape.contour(problem, landscape.random_plane(problem), grid=5)
            >>> surface.done[1] = False
            >>> surface.nested().loss.shape
            (3, 3)
        """
        # ``columns`` has the names of the interpolated arrays; ``exact`` is the field ``done``.
        if self.columns or self.exact.all():
            return self
        shortest = min((n for n in self.exact.shape if n > 1), default=1)
        step = 2
        while step < shortest:  # a step of ``shortest`` or more leaves one point of that axis
            every_step = slice(None, None, step)
            if self.exact[(every_step,) * self.exact.ndim].all():
                return dataclasses.replace(self, **self._subset(every_step))
            step *= 2
        return self

    def _subset(self, points: slice) -> dict[str, Any]:
        """Return the fields with a dimension along an axis of the grid, at some ``points`` of each axis."""
        fields = {}
        for name, text in self.shapes.items():
            is_axis = [dimension.rstrip("+") in self.axes_of for dimension in text.split()]
            if any(is_axis):
                fields[name] = getattr(self, name)[tuple(points if axis else slice(None) for axis in is_axis)]
        return fields

    @property
    def evaluations(self) -> int:
        """The number of exact points."""
        return int(self.exact.sum())

    def _interpolated(self) -> list[Row]:
        """Return a row with the number of exact points and the error of the others; none if all are exact."""
        return [Row("points", text)] if (text := self.interpolation()) else []

    def interpolation(self) -> str:
        """Return the number of exact points and the stated errors in words.

        Returns:
            A phrase for captions; "" if no point is interpolated.

        Example:
            >>> from landscape.results.grids import Line
            >>> t = np.array([0.0, 0.5, 1.0])
            >>> line = Line(
            ...     t=t, loss=t, accuracy=t, done=t < 2, start=t, direction=t, kind="direction", barrier=0.0,
            ...     samples=1, dtype="float64", bn="center", batchnorm=False, bn_samples=0, method="batched")
            >>> line.interpolation()
            ''
        """
        if not self.columns:  # no array is interpolated
            return ""
        scale, percent, range_note = 1, "", ""
        if self.interpolation_tol.endswith("%"):
            scale, percent, range_note = 100, "%", " of the range shown"
        errors = []
        for name, error in zip(self.columns, self.stated_error, strict=True):
            errors.append(f"{name.replace('_', ' ')} below {scale * error:.2g}{percent}")
        evaluations, points = f"{self.evaluations:,}", f"{self.exact.size:,}"
        words = f"interpolated from {evaluations} of {points} points"
        if self.part_samples:
            part = f"{self.part_evaluations:,} of {100 * self.part_samples / self.samples:.2g}% of samples"
            words = f"{points} points interpolated from {evaluations} evaluations of all samples and {part}"
        return f"{words}, error of {', '.join(errors)}{range_note}"


@dataclass(frozen=True)
class Line(Interpolated, Evaluated, schema="landscape.line", axes="t", table="t"):
    """Loss and accuracy at the weights ``start + t·direction``.

    Attributes:
        t: (K,), coordinates on the line.
        loss: (K,), in nats.
        accuracy: (K,), between 0 and 1; NaN without class labels.
        metrics: (metrics, K), the values of the metrics ``metric_names``.
        start, direction: (P,), weights.
        kind: "interpolation" (from one set of weights at t = 0 to another at t = 1) or "direction" (t around
            0, start is the center).
        done: (K,), True where the values are exact. Elsewhere they are interpolated, see
            :class:`landscape.results.grids.Interpolated`.
        barrier: of an interpolation, the barrier in nats (:func:`landscape.barrier`); NaN for a direction.
        labels: names of the two sets of weights.
        own_loss, statistics_of: as in :class:`landscape.Surface`, for the two sets of weights.
        method: the evaluation of points, see :func:`landscape.contour`.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`.

    Example:
        >>> t = np.linspace(0, 1, 3)
        >>> line = Line(t=t, loss=t**2, accuracy=1 - t, start=np.zeros(2), direction=np.ones(2),
        ...             kind="interpolation", barrier=0.0, samples=1, dtype="float64", bn="center",
        ...             batchnorm=False, bn_samples=0, method="batched", labels=("a", "b"))
        >>> line.to_dataframe().loss.tolist()
        [0.0, 0.25, 1.0]
    """

    t: Annotated[Array, "t+"]
    loss: Annotated[Array, "t", "nat"]
    accuracy: Annotated[Array, "t", "1"]
    start: Annotated[Array, "parameter"]
    direction: Annotated[Array, "parameter"]
    kind: str
    barrier: Annotated[float, "nat"]
    method: str
    labels: tuple[str, ...] = ()
    done: Annotated[Array, "t"] = field(default_factory=lambda: np.zeros(0, bool))
    metrics: Annotated[Array, "metric t", "1"] = field(default_factory=no_values)
    own_loss: Annotated[Array, "network", "nat"] = field(default_factory=no_values)
    statistics_of: str = ""

    def __post_init__(self) -> None:
        if self.done.size == 0:
            object.__setattr__(self, "done", np.ones(self.loss.shape, bool))
        super().__post_init__()

    def radius(self, metric: str, drop: str | float | None = None, *, rise: float | None = None) -> Radius:
        """Return the distance from t = 0 at which a metric has fallen by ``drop``, or risen by ``rise``.

        Args:
            metric, drop, rise: as in :meth:`landscape.Surface.radius`.

        Returns:
            The distances along the direction and, where the line has negative t, against it.

        Raises:
            InputError: an unknown metric, or not exactly one of ``drop`` and ``rise``.
            OperationError: the metric has no finite value at t = 0.

        Example:
            >>> t = np.linspace(-1, 1, 5)
            >>> line = Line(
            ...     t=t, loss=t**2, accuracy=t, start=np.zeros(2), direction=np.array([3.0, 4.0]),
            ...     kind="direction", barrier=0.0, samples=1, dtype="float64", method="batched")
            >>> line.radius("loss", rise=0.25).distance.round(3).tolist()
            [2.5, 2.5]
        """
        values = self.column(metric)
        if not self.t[0] <= 0 <= self.t[-1]:
            values = np.nan * values  # all NaN: radius_of then raises, as there is no value at t = 0
        length = np.linalg.norm(self.direction.astype(np.float64))
        # D directions: along the line and, if the line has negative t, also against it.
        signs, ends = [1.0], [self.t[-1]]
        if self.t[0] < 0:
            signs, ends = [1.0, -1.0], [self.t[-1], self.t[0]]
        # (D, 1), for each direction the coordinate t of the point at distance 1.
        unit_points = np.array(signs)[:, None] / length
        reach = np.abs(ends) * length  # (D,), the distances to the ends
        return radius_of(metric, [self.t], values, unit_points, reach, drop, rise)

    def describe(self) -> list[Row]:
        rows = [
            Row("loss at the start", float(self.loss[0]), unit="nat", note="".join(self.labels[:1])),
            Row("loss at the end", float(self.loss[-1]), unit="nat", note="".join(self.labels[1:])),
            Row("highest loss", float(np.max(self.loss)), unit="nat"),
        ]
        if self.kind == "interpolation":
            note = "" if self.direction.any() else "both ends are equal"
            rows.insert(0, Row("barrier", self.barrier, unit="nat", note=note))
        else:
            rows.append(Row("lowest loss", float(np.min(self.loss)), unit="nat"))
        rows += own_losses(self.own_loss, self.loss[[0, -1]])
        return [*rows, *self._metric_rows(), *self._interpolated()]


@dataclass(frozen=True)
class HessianGrid(Interpolated, schema="landscape.hessian_grid", axes="x y", table="y x"):
    """λ_min, λ_max and the ratio |λ_min|/|λ_max| of the Hessian on a grid, as in DPSGD-2020, Figure 4.

    A low ratio means a nearly convex region, a high ratio a saddle.

    Attributes:
        x, y: (nx,) and (ny,), coordinates in the plane.
        lambda_min, lambda_max: (ny, nx), in nats; NaN where not computed yet.
        ratio: (ny, nx); infinite where λ_max is 0.
        residual_min, residual_max: (ny, nx), ‖Hv − λv‖ in nats: some eigenvalue lies within this
            distance, not necessarily the outermost.
        products: (ny, nx), number of Hessian-vector products.
        residual_tol: the allowed residual, relative to |λ|.
        converged: (ny, nx), whether both residuals are within ``residual_tol``.
        done: (ny, nx), True where the values are exact; elsewhere they are interpolated, or not computed yet.
        interpolation_tol, columns, stated_error, largest_error, checks, log_columns: as in
            :class:`landscape.results.grids.Interpolated`. Residuals are NaN there, ``converged`` is
            False.
        plane_sha256: SHA-256 of the bytes of the center and the directions.
        derivatives: "exact", or "differences" of gradients, whose measured errors the residuals contain.
        metric_names, metrics: (metrics,), of the problem, and their values at the center.
        batchnorm, bn, bn_samples, provenance: as in :class:`landscape.Surface`.

    Example:
        >>> one = np.ones((1, 2))
        >>> grid = HessianGrid(
        ...     x=np.arange(2.0), y=np.zeros(1), lambda_min=-one, lambda_max=2 * one, ratio=one / 2,
        ...     residual_min=one, residual_max=one, products=one, converged=one > 0, kind="random",
        ...     norm="none", seed=0, span=0.1, residual_tol=0.01, samples=1, dtype="float64")
        >>> grid.to_dataframe()[["x", "ratio"]].to_numpy().tolist()
        [[0.0, 0.5], [1.0, 0.5]]
    """

    x: Annotated[Array, "x+"]
    y: Annotated[Array, "y+"]
    lambda_min: Annotated[Array, "y x", "nat"]
    lambda_max: Annotated[Array, "y x", "nat"]
    ratio: Annotated[Array, "y x", "1"]
    residual_min: Annotated[Array, "y x", "nat"]
    residual_max: Annotated[Array, "y x", "nat"]
    products: Annotated[Array, "y x"]
    converged: Annotated[Array, "y x"]
    kind: str
    norm: str
    seed: int
    span: float
    residual_tol: float
    search: str = ""
    plane_sha256: str = ""
    done: Annotated[Array, "y x"] = field(default_factory=lambda: np.zeros((0, 0), bool))
    max_products: int = 0
    randomness: str = ""
    provenance: tuple[str, ...] = ()
    derivatives: str = "exact"
    metric_names: Annotated[tuple[str, ...], "metric"] = ()
    metrics: Annotated[Array, "metric", "1"] = field(default_factory=no_values)

    @property
    def usable(self) -> Array:
        """(ny, nx): where the eigenvalues converged, or are interpolated between exact points."""
        interpolated = ~self.done if "ratio" in self.columns else np.zeros_like(self.done)
        return self.converged.astype(bool) | interpolated

    def __post_init__(self) -> None:
        if self.done.size == 0:
            object.__setattr__(self, "done", np.ones(self.ratio.shape, bool))
        super().__post_init__()

    def describe(self) -> list[Row]:
        good = self.ratio[self.usable & np.isfinite(self.ratio)]
        low, middle, high = (float(f(good)) if good.size else np.nan for f in (np.min, np.median, np.max))
        ends = ((self.residual_min, self.lambda_min), (self.residual_max, self.lambda_max))
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = [residual[self.done] / abs(value[self.done]) for residual, value in ends]
        top = self.lambda_max[np.isfinite(self.lambda_max)]
        bad = int((self.done & ~np.isfinite(self.lambda_max)).sum())
        note = f"{bad} without: loss, gradient or products are NaN or infinite there" if bad else ""
        met = f"{int(self.converged[self.done].sum())} of {self.evaluations}"
        return [
            Row("median |λ_min|/|λ_max|", middle),
            Row("lowest ratio", low),
            Row("highest ratio", high),
            Row("λ_max", f"{top.min():.4g} to {top.max():.4g}" if top.size else "–", unit="nat"),
            Row("largest relative residual", f"{np.fmax.reduce(relative, axis=None, initial=0.0):.1e}"),
            Row("converged points", met, note=note),
            Row("Hessian products", self.products.sum().item()),
            *rows_of_each((f"{name} at the center" for name in self.metric_names), self.metrics),
            *self._interpolated(),
        ]


#: The columns of numbers, in order; the table has them after the settings and the seeds.
COLUMNS = (
    "test_loss", "test_loss_std", "test_error", "test_error_std", "best_test_error", "best_test_error_std",
    "diverged", "seconds",
)  # fmt: skip


def texts(table: Sequence[Any]) -> Array:
    """Return strings as an array of UTF-8 bytes, which HDF5 stores at any length."""
    return np.char.encode(np.array(table, dtype=str), "utf-8")


def _strings(table: Array) -> list[Any]:
    """Return the reverse of :func:`texts`, as lists."""
    return np.char.decode(table, "utf-8").tolist()


@dataclass(frozen=True)
class Sweep(Result, schema="landscape.sweep", table="row"):
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
        """Return the settings with the best value of ``key``, one for each combination of the other keys.

        The best value has the fewest diverged runs. If several values have equally few, the one with the
        lowest mean final test loss is the best.

        Args:
            key: one of ``keys``.

        Returns:
            The settings, as in ``rows``. Settings without the key are left out.

        Raises:
            InputError: a key that is not in ``keys``.

        Example:
            >>> column = np.array([3.0, 2.0])
            >>> sweep = Sweep(keys=("lr",), settings=texts([["0.1"], ["1"]]), seeds=texts(["0", "0"]),
            ...               **dict.fromkeys(COLUMNS, column))
            >>> sweep.best("lr")
            [{'lr': '1'}]
        """
        choose("key", key, self.keys)
        loss = np.where(np.isnan(self.test_loss), np.inf, self.test_loss)
        # Values of the other keys -> (score, row) of the best row so far. A score is (diverged runs, test
        # loss), and the lowest score is the best.
        best_rows: dict[tuple[str, ...], tuple[tuple[float, float], dict[str, str]]] = {}
        scores = zip(self.diverged.tolist(), loss.tolist(), strict=True)
        for row, score in zip(self.rows, scores, strict=True):
            if not row[key]:
                continue
            other_values = tuple(value for name, value in row.items() if name != key)
            if other_values not in best_rows or score < best_rows[other_values][0]:
                best_rows[other_values] = score, row
        return [row for _, row in best_rows.values()]

    def to_dataframe(self, dims: str = "") -> pd.DataFrame:
        """Return the table, with a column for each key that is varied.

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

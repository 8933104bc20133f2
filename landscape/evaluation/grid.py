"""Grids of points: exact and interpolated values, portions, saving, resuming, and what they are of."""

from __future__ import annotations

import functools
import io
import json
import math
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.devices import gather_bytes
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.progress import Progress, portion
from landscape.evaluation.adaptive import first_points, interpolate
from landscape.evaluation.evaluate import Evaluator
from landscape.evaluation.fit import Evaluations
from landscape.evaluation.interpolant import Tolerance
from landscape.problem.batches import strided
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.layout import as_array
from landscape.problem.losses import describe_loss, loss_name_and_unit
from landscape.problem.metrics import described, few_of, names_of
from landscape.problem.problem import Problem
from landscape.problem.sharded import on_ranks
from landscape.results.base import Result
from landscape.results.grids import Interpolated, Plane


def named_loss(problem: Problem) -> dict[str, Any]:
    """The name and the unit of a problem's loss, as results keep them."""
    return dict(zip(("loss_name", "loss_unit"), loss_name_and_unit(problem.criterion), strict=True))


def setting(problem: Problem) -> dict[str, Any]:
    """Samples, precision, BatchNorm's policy and the loss's name of a problem, as results keep them."""
    return named_loss(problem) | {
        "samples": problem.samples,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "batchnorm": has_batchnorm(problem.model),
        "bn": problem.batchnorm.name,
        "bn_samples": problem.batchnorm.samples,
    }


def provenance(problem: Problem) -> tuple[str, ...]:
    """Return lines such as "loss=…" that describe all that L(θ) depends on besides θ: model, loss, data …

    A result keeps these lines. A later call resumes the result only if the call's problem has the same lines.
    The line "probe=…" has the losses of a few samples at two points. It shows a change that no name shows,
    such as other code in a loss function of the same name.
    """
    if on_ranks(problem):
        return ()  # a result of a sharded model is never resumed
    model = problem.model
    trainable = {slot.name for slot in problem.layout.slots}
    state = model.state_dict(keep_vars=True).items()
    fixed_tensors = {name: t for name, t in state if name not in trainable and isinstance(t, Tensor)}
    digest = 0
    for name, tensor in sorted(fixed_tensors.items()):
        digest = zlib.crc32(name.encode(), digest)
        digest = zlib.crc32(as_array(strided(tensor)).tobytes(), digest)
    draws = f", {problem.draws} draws" if problem.draws else ""
    penalty = "" if problem.penalty is None else describe_loss(problem.penalty)
    metrics = [f"metrics={described(problem.metrics)}"] if problem.metrics else []
    probe = " ".join(f"{value:.17g}" for value in _probe_losses(problem))
    return (
        f"model={type(model).__module__}.{type(model).__qualname__}, {problem.layout.size} parameters",
        f"buffers={digest:08x}",
        f"loss={describe_loss(problem.criterion)}{draws}",
        f"penalty={penalty}, weight_decay={problem.weight_decay!r}",
        f"data={problem.data.fingerprint()}",
        f"terms={problem.data.terms!r}",
        *metrics,
        f"probe={probe}",
    )


@torch.no_grad()
def _probe_losses(problem: Problem) -> list[float]:
    few = few_of(problem)
    generator = torch.Generator().manual_seed(0)
    theta = problem.weights
    moved = theta + 0.1 * theta.abs().mean() * torch.randn(len(theta), generator=generator).to(theta)
    totals = [few.totals(at) / few.samples for at in (theta, moved)]
    return [value for row in totals for value in (row[:1].tolist() + row[2:].tolist())]


def changed(old: Sequence[str], new: Sequence[str], dtype: torch.dtype) -> str:
    """The first difference between the lines ``old`` and ``new``, in words; "" for rounding of probes."""
    if len(old) != len(new):
        return "it does not say what it was computed from"
    for before, now in zip(old, new, strict=True):
        name, _, value = before.partition("=")
        new_value = now.partition("=")[2]
        if value == new_value:
            continue
        if name not in ("probe", "data"):
            return f"its {name} is {value} and not {new_value}"
        pairs = list(zip(value.split(), new_value.split(), strict=False))
        numbers = len(value.split()) == len(new_value.split()) and (name == "probe" or len(pairs) > 1)
        allowed = 1e-9 if name == "data" else 1000 * torch.finfo(dtype).eps
        near = (a == b == "nan" or math.isclose(float(a), float(b), rel_tol=allowed) for a, b in pairs)
        if not numbers or not all(near):
            return "it is of other data" if name == "data" else "its loss at the same weights is another"
    return ""


# The computation between two saves takes about SAVE_SECONDS, and at least SAVE_RATIO times as long as a save
# (our choice: a killed process loses little, and files take no more than a tenth of the time).
SAVE_SECONDS, SAVE_RATIO = 10.0, 10.0
COINCIDE = 1e-9  # coordinates nearer than this share of the largest are equal: linspace rounds to 1e-16

RESUMABLE = "the points that were saved are kept, and the same call continues from there"

Named = Mapping[str, Array | Tensor]
Evaluate = Callable[[Tensor, Progress], Named]
# Of one process: its values by name; and its facts, "reason" (of its failure, or ""), "seconds" (for the
# values), and "save_seconds" (for the last saving).
_Part = tuple[dict[str, Array], dict[str, Any]]


class MismatchError(InputError):
    """An earlier result belongs to a different model, plane or setting and cannot be resumed."""


class LostError(OperationError):
    """Another process of the group has ended without a reason."""

    words = "another process of the group has ended"


def coincide(new: Array, old: Array) -> tuple[Array, Array]:
    """Indices (M,) into ``new`` and into ``old`` of the coordinates that both have, up to rounding.

    Over one span, K and 2K − 1 points share every other one; K and 2K share few besides the ends.
    """
    near = COINCIDE * max(np.abs(new).max(initial=0.0), np.abs(old).max(initial=0.0))
    mine, theirs = np.nonzero(np.abs(new[:, None] - old[None, :]) <= near)
    return mine, theirs


def difference(previous: Result, fields: Mapping[str, Any]) -> str:
    """The first difference between ``previous`` and the fields ``wanted``, in words; "" if there is none.

    Arrays are equal up to a hundred rounding errors, more than another order of summation makes, as with
    another number of threads.
    """
    for name, value in fields.items():
        if name in ("loss_name", "loss_unit"):  # what its provenance says, and old files do not
            continue
        old = getattr(previous, name)
        if not isinstance(value, (np.ndarray, Tensor)):
            if old != value:
                return f"its {name} is {_short(old)} and not {_short(value)}"
            continue
        new = as_array(value) if isinstance(value, Tensor) else value
        if old.shape != new.shape or old.dtype != new.dtype:
            return f"its {name} has shape {old.shape} ({old.dtype}), not {new.shape} ({new.dtype})"
        limit = 100 * np.finfo(new.dtype).eps
        for a, b in zip(np.atleast_2d(old), np.atleast_2d(new), strict=True):
            if not _distance(a, b) <= limit * _distance(b, None):
                return f"its {name} is another"
    return ""


def _distance(a: Array, b: Array | None) -> float:
    """‖a − b‖, or ‖a‖, of (P,) a slice at a time: no copy of all of it."""
    total, size = 0.0, 2**20
    for i in range(0, len(a), size):
        part = a[i : i + size].astype(np.float64)
        total += float(np.square(part if b is None else part - b[i : i + size]).sum())
    return float(np.sqrt(total))


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) > 40 else repr(value)


@dataclass(frozen=True)
class Execution:
    """The execution of a grid: where its points are computed, from which on, and who hears of them.

    Args:
        group: a torch.distributed group whose processes all make the call, each for its part of the points;
            all return the whole result, and its first one saves.
        save: called with the unfinished result about every ten seconds.
        previous: an earlier result of the same problem and plane, unfinished or on another grid: the points
            in common are not computed again. If these are all, or within the tolerance, it is returned
            itself. Over one span, K and 2K − 1 points have every other one in common.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> plane = landscape.random_plane(problem)
        >>> coarse = landscape.contour(problem, plane, grid=3)
        >>> fine = landscape.contour(problem, plane, grid=5, execution=landscape.Execution(previous=coarse))
        >>> bool((fine.loss[::2, ::2] == coarse.loss).all())
        True
    """

    group: dist.ProcessGroup | None = None
    save: Callable[[Any], None] | None = None
    previous: Interpolated | None = None


@dataclass(frozen=True)
class Dispatch:
    """The division of the missing points into calls and among processes, and how they are saved.

    Attributes:
        min_per_process: the number of points that a process needs in a call for it to be fast.
        block: the number of points that are always evaluated in one call, counted from the first, even if
            some of them are done: the values then depend neither on the clock nor on earlier results.
        save: called, in one process, whenever SAVE_SECONDS have passed, but not at the end. Without it, one
            call has all points.
        group: processes that all make the call. Each evaluates an equal part of the points between two saves,
            and all have all values in the end. The points that the group's first process has count as done.
        progress: called with the share of the work done.
    """

    min_per_process: int = 1
    block: int = 1
    save: Callable[[], None] | None = None
    group: dist.ProcessGroup | None = None
    progress: Progress | None = None


def compute_missing(
    points: Tensor,
    done: Array,
    values: Mapping[str, Array],
    evaluate: Evaluate,
    dispatch: Dispatch,
    indices: Array | None = None,
) -> None:
    """Evaluate the points that are not done, and write their values.

    Args:
        points: (K, 2).
        done: (K,) bool, whether a point has values. It is updated.
        values: name -> (K,) array. They are updated.
        evaluate: takes some points (k, 2), and a function to which it reports the finished share of these
            points. It returns name -> values (k,).
        dispatch: how the points are divided among calls and processes.
        indices: the indices of the points to compute, in this order; default: all.

    Raises OperationError, after the computed points were saved, if another process fails.
    """
    indices = np.arange(len(done)) if indices is None else indices
    group, block, save = dispatch.group, dispatch.block, dispatch.save
    rank, processes = 0, 1
    if group:  # all processes continue from the values of the first process
        rank, processes = dist.get_rank(group), dist.get_world_size(group)
        columns_and_done = {"done": done, **values}
        chosen_values = {name: column[indices] for name, column in columns_and_done.items()}
        first_values, _ = _gather(chosen_values, {}, group)[0]
        for name, column in columns_and_done.items():
            column[indices] = first_values[name]
    # The indices of the blocks that have missing points.
    missing_blocks = np.unique(np.flatnonzero(~done[indices]) // block)
    min_blocks_per_process = math.ceil(dispatch.min_per_process / block)
    total_blocks = math.ceil(len(indices) / block)
    # The number of blocks that all processes together compute before the next save.
    block_count = len(missing_blocks) if save is None else min_blocks_per_process * processes
    save_seconds = 0.0
    while len(missing_blocks):
        finished_before = 1 - len(missing_blocks) / total_blocks
        blocks, missing_blocks = missing_blocks[:block_count], missing_blocks[block_count:]
        report = portion(dispatch.progress, finished_before, 1 - len(missing_blocks) / total_blocks)
        # For each process, the indices of its points.
        process_indices = [_points_of(share, block, indices) for share in np.array_split(blocks, processes)]
        clock = time.perf_counter()
        columns, failure = _evaluate_or_fail(evaluate, points[process_indices[rank]], report, group)
        reason = f"{type(failure).__name__}: {failure}" if failure else ""
        facts = {"reason": reason, "seconds": time.perf_counter() - clock, "save_seconds": save_seconds}
        parts: list[_Part] = _gather(columns, facts, group) if group else [(columns, facts)]
        for computed_indices, (computed, _) in zip(process_indices, parts, strict=True):
            _store(computed, computed_indices, done, values)
        all_facts = [part_facts for _, part_facts in parts]  # in the order of ranks
        failed_ranks = [r for r, part_facts in enumerate(all_facts) if part_facts["reason"]]
        if save and rank == 0 and (len(missing_blocks) or failed_ranks):
            clock = time.perf_counter()
            save()
            save_seconds = time.perf_counter() - clock
        if failure:
            raise failure
        if failed_ranks:
            failed = failed_ranks[0]
            raise OperationError(f"rank {failed} failed ({all_facts[failed]['reason']}); {RESUMABLE}")
        # All processes have all times, and so choose the same number of blocks.
        slowest = max(part_facts["seconds"] for part_facts in all_facts)
        seconds_per_block = slowest / math.ceil(len(blocks) / processes)
        # Only the first process saves.
        seconds_between_saves = max(SAVE_SECONDS, SAVE_RATIO * all_facts[0]["save_seconds"])
        blocks_per_process = int(min(seconds_between_saves / max(seconds_per_block, 1e-9), total_blocks))
        block_count = processes * max(min_blocks_per_process, blocks_per_process)
        report(1.0)


def _evaluate_or_fail(
    evaluate: Evaluate, points: Tensor, report: Progress, group: dist.ProcessGroup | None
) -> tuple[dict[str, Array], Exception | None]:
    """Return the values at ``points``, and a failure, which the other processes of a group must learn.

    Without a group the failure is raised.
    """
    try:
        columns = evaluate(points, report) if len(points) else {}
        return {name: np.asarray(column) for name, column in columns.items()}, None
    except Exception as error:
        if group is None:
            raise
        return {}, error


def _store(part: Mapping[str, Array], indices: Array, done: Array, values: Mapping[str, Array]) -> None:
    """Write the values of a process to the points ``indices`` that are not done."""
    new = ~done[indices]
    for name, column in part.items():
        values[name][indices[new]] = column[new]
    done[indices] |= bool(part)


def _points_of(blocks: Array, block: int, indices: Array) -> Array:
    """Return the entries of ``indices`` in the ``blocks``, which have ``block`` entries each."""
    numbers = (blocks[:, None] * block + np.arange(block)).ravel()
    return indices[numbers[numbers < len(indices)]]


def _gather(arrays: Mapping[str, Array], facts: dict[str, Any], group: dist.ProcessGroup) -> list[_Part]:
    """``arrays`` and ``facts`` of every process of the group, in the order of their ranks.

    They are sent as numpy's files and JSON, which are only read, never executed as a pickle is.
    """
    buffer = io.BytesIO()
    columns: dict[str, Any] = {"facts": json.dumps(facts), **arrays}
    np.savez(buffer, **columns)
    try:
        return [_part(part) for part in gather_bytes(buffer.getvalue(), group=group)]
    except RuntimeError as error:  # a connection closed, as when a process is killed
        raise LostError(f"{LostError.words}; {RESUMABLE}") from error


def _part(message: bytes) -> _Part:
    """The columns of numbers and the facts in ``message``. OperationError for anything else."""
    try:
        with np.load(io.BytesIO(message), allow_pickle=False) as file:
            arrays = dict(file)
        facts = json.loads(str(arrays.pop("facts")))
        if strange := [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]:
            raise ValueError(f"{strange[0]} holds no numbers")
        return arrays, facts
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise OperationError(f"another process sent no part of a grid ({error}); {RESUMABLE}") from error


# The largest error of an interpolated column, divided by the tolerance (our choice: the accuracy of 10,000
# samples, which is no smooth function, is off by about two tolerances).
MAX_TOLERANCES = 5.0
# Where the number of calls is not known, each has this share of the rest of the progress bar (our choice: the
# first call computes the coarsest level, which is often most of the work).
SHARE_OF_REST = 0.75


def meets(previous: Interpolated, tolerance: Tolerance | None) -> bool:
    """Return whether the values of ``previous`` are all exact, or interpolated within ``tolerance``."""
    if previous.exact.all():
        return True
    if tolerance is None or not previous.columns:
        return False
    previous_tolerance = Tolerance.parse(previous.interpolation_tol)
    return previous_tolerance.relative == tolerance.relative and previous_tolerance.size <= tolerance.size


def axes(grid: int | tuple[int, int], span: float) -> tuple[Array, Array]:
    """x (nx,) and y (ny,) evenly spaced over [−span, span]; a single point is 0. InputError if impossible.

    ``grid``: (nx, ny), or one number for both.
    """
    counts = (grid, grid) if isinstance(grid, int) else grid
    x, y = (np.linspace(-span, span, n) if n > 1 else np.zeros(1) for n in counts)
    return x, y


def coarse_first(shape: Sequence[int]) -> Array:
    """The numbers of a grid's points, those of every 2ᵏ-th along each axis before the others, k falling.

    A picture of all is there early, and becomes finer (:meth:`landscape.results.grids.Interpolated.nested`).
    """
    powers = [np.where(at, at & -at, 2**62) for at in map(np.arange, shape)]  # the largest 2ᵏ that divides it
    powers_of_both: Array = functools.reduce(np.minimum.outer, powers)
    return np.argsort(-powers_of_both.ravel(), kind="stable")


class Grid:
    """The points of a grid, which of them are done, and the columns of values there.

    Args:
        problem: whose values these are.
        axes: x (nx,) and y (ny,); or the coordinates of a line (nx,), for which y is 0.
        tol: the tolerance of interpolated values; None: all are exact.
        kinds: column -> its type; default: loss, accuracy and the metrics.

    Attributes:
        x, y: the axes.
        points: (K, 2), (x[j], y[i]) row by row: reshape(ny, nx) puts them back in a surface's order.
        columns: name -> (ny, nx), or (nx,) of a line.
        done: of the same shape.
        tolerance: ``tol``, parsed.
        axes_unchanged: whether the axes are those of the earlier result whose values were taken.
    """

    def __init__(
        self,
        problem: Problem,
        axes: Sequence[Array],
        tol: str | float | None,
        kinds: Mapping[str, type] | None = None,
    ) -> None:
        self.dtype = problem.dtype
        self.x, self.y = (*axes, np.zeros(1))[:2]
        self.tolerance = None if tol is None else Tolerance.parse(tol, problem.dtype)
        gx, gy = np.meshgrid(self.x, self.y)
        self.points = torch.from_numpy(np.stack((gx.ravel(), gy.ravel()), 1))
        shape = [len(axis) for axis in reversed(axes)]
        self.metrics = names_of(problem) if kinds is None else ()
        kinds = kinds or dict.fromkeys(("loss", "accuracy", *self.metrics), float)
        self.columns: dict[str, Any] = {n: np.full(shape, _unknown(k), k) for n, k in kinds.items()}
        self.done, self.axes_unchanged = np.zeros(shape, bool), False

    @property
    def min_computed_points(self) -> int:
        """Return the smallest number of points to compute."""
        return self.done.size if self.tolerance is None else first_points(self.done.shape)

    def exact(self, name: str) -> Array:
        """The values (K,) of a column where they are done, else NaN."""
        return np.where(self.done, self.columns[name], np.nan).ravel()

    def fields(self) -> dict[str, Any]:
        """The fields of a result, with copies of the columns as they are now."""
        copies = {name: column.copy() for name, column in self.columns.items()}
        return {"x": self.x, "y": self.y, "done": self.done.copy(), **with_metrics(self.metrics, copies)}

    def values(self) -> dict[str, Any]:
        """The fields of the columns, with those of metrics in one array."""
        return with_metrics(self.metrics, dict(self.columns))

    def reuse(self, previous: Any, usable: Array) -> bool:
        """Copy ``usable`` values of an earlier result at common points. Return whether no other is needed."""
        self.axes_unchanged = np.array_equal(self.x, previous.x) and np.array_equal(self.y, previous.y)
        value_of = getattr(previous, "column", functools.partial(getattr, previous))
        old = [(column, value_of(name)) for name, column in self.columns.items()]
        (across, old_across), (up, old_up) = coincide(self.x, previous.x), coincide(self.y, previous.y)
        for new, values in [*old, (self.done, usable)]:
            new[np.ix_(up, across)] = values[np.ix_(old_up, old_across)]
        for column in self.columns.values():
            column[~self.done] = _unknown(column.dtype)  # what was interpolated, or is searched again
        return (
            self.axes_unchanged and np.array_equal(usable, previous.done) and meets(previous, self.tolerance)
        )

    def complete(
        self, evaluate: Evaluate, dispatch: Dispatch, deciding: Sequence[str], optional: Sequence[str] = (),
        seed: int = 0, part_evaluator: Evaluator | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Complete the columns: compute values until the others can be interpolated within the tolerance.

        Without a tolerance, all values are computed.

        Args:
            evaluate, dispatch: as for :func:`compute_missing`.
            deciding: the columns whose error must be within the tolerance.
            optional: further columns. A column whose stated error is more than MAX_TOLERANCES times the
                tolerance gets NaN in place of interpolated values.
            seed: the seed of the points at which the error is measured.
            part_evaluator: an evaluator on a part of the samples, whose values guide which points are
                computed; None: there is none.

        Returns:
            The fields of :class:`landscape.results.grids.Interpolated` that describe the interpolation;
            empty if all points are exact.
        """
        # Views of shape (K,), through which the arrays of this grid are written.
        done = self.done.reshape(-1)
        flat_columns = {name: column.reshape(-1) for name, column in self.columns.items()}
        if self.tolerance is None:
            # Single points are computed coarse first, which gives an early picture of the whole grid. A block
            # of several points is made of neighboring points.
            indices = coarse_first(self.done.shape) if dispatch.block == 1 else None
            compute_missing(self.points, done, flat_columns, evaluate, dispatch, indices)
            return {}
        interpolated = {name: flat_columns[name] for name in (*deciding, *optional)}
        finished = 0.0  # the share of the progress bar

        def evaluations(
            columns: dict[str, Array], is_done: Array, evaluate_points: Evaluate, calls: Dispatch
        ) -> Evaluations:
            """Return evaluations, with all samples or with a part, that write to ``columns``."""

            def compute(indices: Array) -> None:
                nonlocal finished
                # The number of calls is not known. Each call advances the bar by a share of its rest.
                finished_after = finished + (1 - finished) * SHARE_OF_REST
                call = replace(calls, progress=portion(calls.progress, finished, finished_after))
                compute_missing(self.points, is_done, columns, evaluate_points, call, indices)
                finished = finished_after

            return Evaluations({name: columns[name] for name in interpolated}, is_done, compute)

        whole = evaluations(flat_columns, done, evaluate, dispatch)
        part_done, part_evaluations = np.zeros(len(done), bool), None
        if part_evaluator is not None:
            part_values = {name: np.full(len(done), np.nan) for name in interpolated}
            part_dispatch = replace(dispatch, min_per_process=part_evaluator.block, save=None)
            part_evaluations = evaluations(part_values, part_done, part_evaluator, part_dispatch)
        outcome = interpolate(self.done.shape, whole, self.tolerance, deciding, seed, part_evaluations)
        # ``outcome.largest`` has the largest errors at check points. ``outcome.stated`` has errors that are
        # estimated for all points. The errors are multiples of the tolerance.
        names = tuple(name for name in interpolated if outcome.stated.get(name, np.inf) <= MAX_TOLERANCES)
        for name in set(optional) - set(names):
            interpolated[name][~done] = np.nan
        if done.all():
            return {}
        tolerance_size = self.tolerance.size
        return {
            "interpolation_tol": str(self.tolerance),
            "columns": names,
            "stated_error": tolerance_size * np.array([outcome.stated[name] for name in names]),
            "largest_error": tolerance_size * np.array([outcome.largest[name] for name in names]),
            "checks": outcome.checks,
            "log_columns": tuple(name for name in names if name in outcome.log),
            "part_samples": part_evaluator.samples if part_evaluator is not None else 0,
            "part_evaluations": int(part_done.sum()),
        }


def with_metrics(names: tuple[str, ...], columns: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result: its columns, with those of the metrics ``names`` in one array."""
    if not names:
        return columns
    values = np.stack([columns.pop(name) for name in names])
    return columns | {"metrics": values, "metric_names": names}


def check_plane(problem: Problem, plane: Plane) -> None:
    """InputError for a plane of a model with another number of parameters."""
    size = len(problem.weights)
    if plane.directions.shape != (2, size) or plane.center.shape != (size,):
        count = plane.directions.shape[-1]
        raise InputError(f"plane: it has {count:,} parameters, this model {size:,}; make it with this one")
    if not all(0 < largest < math.inf for largest in plane.directions.abs().amax(1).tolist()):
        raise InputError("plane: a direction of zeros, or with numbers that are not finite, is not allowed")


def _unknown(kind: Any) -> Any:
    """The stand-in for a number that is not known: NaN, or 0 for whole numbers."""
    return np.nan if np.dtype(kind).kind == "f" else 0


def reused_points(previous: Any, surface: Any) -> int:
    """The number of points of ``surface``, or Hessian grid, that were taken from ``previous``."""
    columns, rows = coincide(surface.x, previous.x)[1], coincide(surface.y, previous.y)[1]
    return int(previous.done[np.ix_(rows, columns)].sum())

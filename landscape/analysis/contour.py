"""Loss (and accuracy) on a grid over a plane."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.evaluation import evaluate
from landscape.evaluation.grid import MismatchError, coincide, difference, fill
from landscape.evaluation.provenance import changed, provenance
from landscape.problem.batchnorm import SAMPLES, has_batchnorm, with_policy
from landscape.problem.layout import as_array
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.plane import Plane

if TYPE_CHECKING:
    import torch.distributed as dist

from landscape.results.surface import Surface

# Points that the error of a lower precision is measured at (ours): under 1% of the paper's 2,500.
ERROR_POINTS = 16


def axes(grid: int | tuple[int, int], span: float) -> tuple[Array, Array]:
    """x (nx,) and y (ny,) evenly spaced over [−span, span]; a single point is 0. InputError if impossible.

    ``grid``: (nx, ny), or one number for both.
    """
    counts = (grid, grid) if isinstance(grid, numbers.Integral) else grid
    if not isinstance(counts, Sequence) or [isinstance(n, numbers.Integral) for n in counts] != [True, True]:
        raise InputError(f"grid: {grid!r} is not allowed, it must be a whole number or two, such as (51, 25)")
    nx, ny = map(int, counts)
    for count in (nx, ny):
        positive("grid", count, least=1)
    positive("span", span)
    x, y = (np.linspace(-span, span, n) if n > 1 else np.zeros(1) for n in (nx, ny))
    return x, y


def grid_points(x: Array, y: Array) -> Tensor:
    """(ny·nx, 2) points (x[j], y[i]), row by row: reshape(ny, nx) puts them back in a surface's order."""
    gx, gy = np.meshgrid(x, y)
    return torch.from_numpy(np.stack((gx.ravel(), gy.ravel()), 1))


def contour(
    problem: Problem,
    plane: Plane,
    grid: int | tuple[int, int] = (50, 50),
    span: float | None = None,
    *,
    bn: str = "center",
    bn_samples: int = SAMPLES,
    path: str = "auto",
    precision: str = "model",
    max_memory: int | None = None,
    previous: Surface | None = None,
    save: Callable[[Surface], None] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: evaluate.Progress | None = None,
    **about: Unpack[Provenance],
) -> Surface:
    """Loss and accuracy of ``problem`` on an (nx, ny) ``grid``, or (n, n) of one number, over ``plane``.

    Args:
        grid, span: 50 × 50 points over x, y ∈ [−0.1, 0.1] by default (DPSGD-2020, section 4.1), over more
            where the plane has markers further out (``plane.span``).
        bn, bn_samples: whose statistics BatchNorm uses; see :func:`landscape.problem.batchnorm.with_policy`.
        path: "auto", "batched", "compiled", "folded" or "pointwise"; see :mod:`.evaluate`.
        precision: "model", "tf32" or "bfloat16"; see :func:`landscape.evaluation.evaluate.evaluator`.
        max_memory: bytes that the process may hold, at most; see :func:`.evaluator`.
        previous: a surface of the same problem and plane, unfinished or on another grid: its points that lie
            on this grid are kept. Where that is all of this grid, it is returned itself. Over one span, K
            and 2K − 1 points share every other one. "auto" keeps the path of an unfinished one.
        save: called with the unfinished surface about every ten seconds.
        group: a torch.distributed group whose processes all make this call, each for its part of the points;
            all return the whole surface, and its first one saves.
        progress: called with the share of the work done.
        about: see :class:`landscape.results.base.Provenance`; kept with the result.

    The model is evaluated in eval mode. Raises InputError for a grid below 1, a span that is not positive, an
    unknown policy or a bound on memory that cannot be kept; MismatchError, an InputError, for a ``previous``
    of something else.
    """
    span = plane.span if span is None else span
    x, y = axes(grid, span)
    shape = (len(y), len(x))
    problem = with_policy(problem, bn, bn_samples)
    fields: dict[str, Any] = {
        "kind": plane.kind,
        "norm": plane.norm,
        "ignore": plane.ignore,
        "seed": plane.seed,
        "samples": problem.samples,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "bn": bn,
        "bn_samples": problem.bn_samples,
        "precision": precision,
    }
    made_of = provenance(problem)
    loss, accuracy, done = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool)
    error = 0.0 if precision == "model" else math.nan
    if previous is not None:
        wanted = {k: v for k, v in about.items() if k in ("source_sha256", "split")} | fields
        wanted |= {"center": plane.center, "directions": plane.directions}
        if path not in ("auto", previous.path):
            wanted["path"] = path
        reason = difference(previous, wanted)
        if previous.provenance:
            reason = reason or changed(previous.provenance, made_of, problem.dtype)
        else:  # a file older than the field
            reason = reason or _another_loss(problem, previous)
        if reason:
            raise MismatchError(reason)
        same = np.array_equal(x, previous.x) and np.array_equal(y, previous.y)
        if same and previous.done.all():
            return previous
        plane = previous.plane(problem.theta)  # the very same, where the one given differs by a rounding
        path = previous.path if same else path
        (columns, old_columns), (rows, old_rows) = coincide(x, previous.x), coincide(y, previous.y)
        for new, old in ((loss, previous.loss), (accuracy, previous.accuracy), (done, previous.done)):
            new[np.ix_(rows, columns)] = old[np.ix_(old_rows, old_columns)]
    run = evaluate.evaluator(
        problem,
        plane.center,
        plane.directions,
        loss.size,
        path=path,
        precision=precision,
        max_memory=max_memory,
    )
    fields |= {
        "x": x,
        "y": y,
        "directions": as_array(plane.directions),
        "center": as_array(plane.center),
        "span": span,
        "path": run.path,
        "provenance": made_of,
        "batchnorm": has_batchnorm(problem.model),
        "axes": plane.axes,
        "markers": plane.markers,
        "labels": plane.labels,
        "marker_loss": previous.marker_loss if previous else evaluate.losses(problem, plane.thetas),
        "explained": plane.explained,
    }

    def surface() -> Surface:
        return Surface(
            loss=loss.copy(),
            accuracy=accuracy.copy(),
            done=done.copy(),
            precision_error=error,
            **fields,
            **about,
        )

    def values(points: Tensor, progress: evaluate.Progress) -> dict[str, Tensor]:
        found = run(points, progress)
        return {"loss": found.loss, "accuracy": found.accuracy}

    fill(
        grid_points(x, y),
        done.reshape(-1),
        {"loss": loss.reshape(-1), "accuracy": accuracy.reshape(-1)},
        values,
        least=run.block,
        save=(lambda: save(surface())) if save else None,
        group=group,
        progress=progress,
    )
    if precision != "model":
        error = _precision_error(problem, plane, x, y, loss)
    return surface()


def kept(previous: Surface, surface: Surface) -> int:
    """How many points of ``surface`` :func:`contour` took from ``previous``."""
    columns, rows = coincide(surface.x, previous.x)[1], coincide(surface.y, previous.y)[1]
    return int(previous.done[np.ix_(rows, columns)].sum())


def _another_loss(problem: Problem, previous: Surface) -> str:
    """Evaluate the first finite point of ``previous`` again: "", or how it differs by more than rounding.

    It does where model, loss or data are others, which the plane alone does not show.
    """
    finite = np.argwhere(previous.done & np.isfinite(previous.loss))
    if not len(finite):
        return ""
    i, j = finite[0]
    plane = previous.plane(problem.theta)
    theta = torch.add(plane.center, plane.directions[0], alpha=float(previous.x[j]))
    theta.add_(plane.directions[1], alpha=float(previous.y[i]))
    before, now = float(previous.loss[i, j]), problem.loss(theta)
    low = torch.bfloat16 if previous.precision != "model" else problem.dtype
    eps = torch.finfo(low).eps
    if abs(now - before) <= math.sqrt(eps) * abs(before) + 100 * eps:
        return ""
    return f"its loss at one point is {before:.6g}, not {now:.6g}: it is of another model, loss or data"


def _precision_error(problem: Problem, plane: Plane, x: Array, y: Array, loss: Array) -> float:
    """The largest |difference| of ``loss`` to the model's own precision, at up to ERROR_POINTS points.

    These are the centre, the corners, the lowest and the highest loss, and others drawn at random.
    """
    ny, nx = loss.shape
    finite = np.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
    center = int(np.abs(y).argmin()) * nx + int(np.abs(x).argmin())
    corners = [0, nx - 1, (ny - 1) * nx, ny * nx - 1]
    drawn = np.random.default_rng(0).permutation(loss.size)
    chosen = dict.fromkeys([center, *corners, int(finite.argmin()), int(finite.argmax()), *drawn.tolist()])
    flat = np.array(list(chosen)[:ERROR_POINTS])
    points = grid_points(x, y)[flat]
    own = evaluate.evaluate_plane(problem, plane.center, plane.directions, points).loss.numpy()
    with np.errstate(invalid="ignore"):
        return float(np.abs(own - loss.reshape(-1)[flat]).max())

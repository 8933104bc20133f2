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
from landscape.core.memory import bounded
from landscape.core.options import expect, positive
from landscape.core.progress import Progress
from landscape.core.registry import numerics
from landscape.evaluation import evaluate, needs
from landscape.evaluation.adaptive import Tolerance, first_points
from landscape.evaluation.filling import complete, meets
from landscape.evaluation.grid import (
    MismatchError,
    Portions,
    Workers,
    changed,
    coincide,
    copy_common,
    difference,
    provenance,
)
from landscape.problem.batchnorm import SAMPLES, has_batchnorm
from landscape.problem.layout import as_array
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.grids import Plane, Surface

if TYPE_CHECKING:
    import torch.distributed as dist

# Points at which the error of a lower precision is measured (ours): under 1% of the paper's 2,500.
ERROR_POINTS = 16


def axes(grid: int | tuple[int, int], span: float) -> tuple[Array, Array]:
    """x (nx,) and y (ny,) evenly spaced over [−span, span]; a single point is 0. InputError if impossible.

    ``grid``: (nx, ny), or one number for both.
    """
    # typeshed does not know that int is an Integral
    counts = (grid, grid) if isinstance(grid, numbers.Integral) else grid  # type: ignore[redundant-expr]
    if not isinstance(counts, Sequence) or [isinstance(n, numbers.Integral) for n in counts] != [True, True]:
        raise InputError(f"grid: {grid!r} is not allowed, it must be a whole number or two, such as (51, 25)")
    for count in counts:
        positive("grid", count, least=1)
    nx, ny = map(int, counts)
    positive("span", span)
    x, y = (np.linspace(-span, span, n) if n > 1 else np.zeros(1) for n in (nx, ny))
    return x, y


def check_plane(problem: Problem, plane: Plane) -> None:
    """Check that ``plane`` is one through the weights of ``problem``. InputError otherwise."""
    expect("plane", plane, Plane)
    size = problem.layout.size
    if plane.directions.shape != (2, size) or plane.center.shape != (size,):
        raise InputError(
            f"plane: it is of a model with {plane.directions.shape[-1]:,} parameters, this one has {size:,}; "
            "make it with the same problem, such as by landscape.random_plane(problem)"
        )


def grid_points(x: Array, y: Array) -> Tensor:
    """(ny·nx, 2) points (x[j], y[i]), row by row: reshape(ny, nx) puts them back in a surface's order."""
    gx, gy = np.meshgrid(x, y)
    return torch.from_numpy(np.stack((gx.ravel(), gy.ravel()), 1))


@numerics(1)
@bounded(needs.contour)
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
    tolerance: str | float | None = None,
    previous: Surface | None = None,
    save: Callable[[Surface], None] | None = None,
    group: dist.ProcessGroup | None = None,
    cluster: Workers | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Surface:
    """Loss and accuracy of ``problem`` on an (nx, ny) ``grid`` over ``plane``.

    Args:
        problem: the loss; its model is evaluated in eval mode.
        plane: centre and directions, such as :func:`landscape.random_plane` gives.
        grid, span: 50 × 50 points over x, y ∈ [−0.1, 0.1] by default (DPSGD-2020, section 4.1), over more if
            the plane has markers further out (``plane.span``). One number: the same for both axes.
        bn, bn_samples: whose statistics BatchNorm uses, "center", "recalibrate" or "train"; see
            :meth:`landscape.Problem.with_batchnorm`.
        path: how the losses are computed. "batched" (chains of linear layers: many points at once),
            "compiled" (the same under torch.compile), "folded" (BatchNorm folded into convolutions,
            channels-last layout), "pointwise" (any model, point by point) or "auto", the fastest that agrees
            with "pointwise" on a few samples.
        precision: "model"; or, faster, "tf32" or "bfloat16": the largest error at up to 16 points is then
            measured and kept with the result.
        max_memory: bytes that the process may take, at most.
        tolerance: None: all points are exact (as in the papers). "1%" or 0.005: exact points are chosen, and
            the others interpolated, until the estimated error of the loss is everywhere below this share of
            the range shown (that of the logarithm, if the losses differ by more than a factor of 100), or
            this number of nats. Smooth surfaces of 51 × 51 points need 229 exact ones for 1%; where half of
            the points would be needed, or the loss is flat but for rounding, all are computed. An island that
            covers less than 1.5% of the picture can be missed. See :mod:`landscape.evaluation.adaptive`.
        previous: a surface of the same problem and plane, unfinished or on another grid: the points in common
            are not computed again. If these are all, or within the tolerance, it is returned itself. Over one
            span, K and 2K − 1 points have every other one in common. "auto" keeps the path of an unfinished
            surface.
        save: called with the unfinished surface about every ten seconds.
        group: a torch.distributed group whose processes all make this call, each for its part of the points;
            all return the whole surface, and its first one saves.
        cluster: a :class:`landscape.Cluster`, whose workers compute the points, in place of a group. The
            problem is pickled and sent to them.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        x (nx,), y (ny,), loss and accuracy (ny, nx): ``loss[i, j]`` is at center + x[j]·directions[0] +
        y[i]·directions[1]. Losses that are not finite are kept as they are.

    Raises:
        InputError: a grid below 1, a span that is not positive, an unknown option, a tolerance that is no
            positive number and no share below 100%, a path or precision that the model cannot take, or a
            bound on memory that is too small.
        MismatchError: an InputError, for a ``previous`` of a different model, plane or setting.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> surface = landscape.contour(problem, landscape.random_plane(problem), grid=(5, 3), span=0.5)
        >>> surface.loss.shape
        (3, 5)
    """
    expect("problem", problem, Problem)
    check_plane(problem, plane)
    span = plane.span if span is None else span
    x, y = axes(grid, span)
    allowed = None if tolerance is None else Tolerance.parse(tolerance, problem.dtype)
    problem = problem.with_batchnorm(bn, bn_samples)
    setting = _setting(problem, plane, bn, precision)
    made_of = provenance(problem)
    columns = {"loss": np.full((len(y), len(x)), np.nan), "accuracy": np.full((len(y), len(x)), np.nan)}
    done = np.zeros((len(y), len(x)), bool)
    if previous is not None:
        wanted = {k: v for k, v in about.items() if k in ("source_sha256", "split")} | setting
        _check_previous(previous, problem, wanted | _fixed(plane, previous, path), made_of)
        same = np.array_equal(x, previous.x) and np.array_equal(y, previous.y)
        if same and meets(previous, allowed):
            return previous
        plane = previous.plane(problem.theta)  # the same numbers: the one given may differ by rounding
        path = previous.path if same else path
        old = [(columns["loss"], previous.loss), (columns["accuracy"], previous.accuracy)]
        copy_common((x, y), (previous.x, previous.y), [*old, (done, previous.done)])
        for column in columns.values():
            column[~done] = np.nan  # what was interpolated
    count = done.size if allowed is None else first_points(done.shape)
    run = evaluate.evaluator(
        problem, plane.center, plane.directions, count,
        path=path, precision=precision,
    )  # fmt: skip
    fields = setting | _description(problem, plane, previous) | {"path": run.path, "provenance": made_of}
    error = 0.0 if precision == "model" else math.nan

    def surface() -> Surface:
        copies: dict[str, Any] = {name: column.copy() for name, column in columns.items()}
        return Surface(
            x=x, y=y, span=span, done=done.copy(), precision_error=error, **copies, **fields, **about
        )

    def values(points: Tensor, progress: Progress) -> dict[str, Tensor]:
        at_points = run(points, progress)
        return {"loss": at_points.loss, "accuracy": at_points.accuracy}

    portions = Portions(
        least=run.block,
        save=(lambda: save(surface())) if save else None,
        group=group,
        cluster=cluster,
        progress=progress,
    )
    columns_of = (("loss",), ("accuracy",))
    points = grid_points(x, y)
    fields |= complete(points, done, columns, values, portions, allowed, *columns_of, plane.seed)
    if precision == "model":
        exact = np.where(done, columns["loss"], np.nan).ravel()
        evaluate.confirm(problem, plane.center, plane.directions, points, exact, run.path)
    else:
        error = _precision_error(problem, plane, x, y, columns["loss"], done)
    return surface()


def _setting(problem: Problem, plane: Plane, bn: str, precision: str) -> dict[str, Any]:
    """The fields of a surface that must be equal for it to be resumed."""
    return {
        "kind": plane.kind,
        "norm": plane.norm,
        "ignore": plane.ignore,
        "seed": plane.seed,
        "samples": problem.data.samples,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "bn": bn if bn != "center" else problem.batchnorm.name,  # the problem may have a policy already
        "bn_samples": problem.batchnorm.samples,
        "precision": precision,
    }


def _fixed(plane: Plane, previous: Surface, path: str) -> dict[str, Any]:
    """The plane, and the path if it was asked for: what must be equal, too."""
    wanted: dict[str, Any] = {"center": plane.center, "directions": plane.directions}
    return wanted if path in ("auto", previous.path) else wanted | {"path": path}


def _description(problem: Problem, plane: Plane, previous: Surface | None) -> dict[str, Any]:
    """The other fields of a surface that its values do not depend on."""
    return {
        "directions": as_array(plane.directions),
        "center": as_array(plane.center),
        "batchnorm": has_batchnorm(problem.model),
        "axes": plane.axes,
        "markers": plane.markers,
        "labels": plane.labels,
        "marker_loss": previous.marker_loss if previous else evaluate.losses(problem, plane.thetas),
        "explained": plane.explained,
    }


def _check_previous(
    previous: Surface, problem: Problem, wanted: dict[str, Any], made_of: tuple[str, ...]
) -> None:
    """Raise MismatchError unless ``previous`` has these fields, and the same model, loss and data."""
    if reason := difference(previous, wanted) or changed(previous.provenance, made_of, problem.dtype):
        raise MismatchError(reason)


def reused_points(previous: Any, surface: Any) -> int:
    """How many points of ``surface``, or Hessian grid, were taken from ``previous``."""
    columns, rows = coincide(surface.x, previous.x)[1], coincide(surface.y, previous.y)[1]
    return int(previous.done[np.ix_(rows, columns)].sum())


def _precision_error(problem: Problem, plane: Plane, x: Array, y: Array, loss: Array, done: Array) -> float:
    """The largest |difference| of ``loss`` from that in the model's precision, at up to ERROR_POINTS points.

    These are the centre, the corners, the lowest and the highest loss, and others drawn at random, of those
    that are ``done``.
    """
    ny, nx = loss.shape
    finite = np.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
    center = int(np.abs(y).argmin()) * nx + int(np.abs(x).argmin())
    corners = [0, nx - 1, (ny - 1) * nx, ny * nx - 1]
    drawn = np.random.default_rng(0).permutation(loss.size)
    chosen = dict.fromkeys([center, *corners, int(finite.argmin()), int(finite.argmax()), *drawn.tolist()])
    flat = np.array([place for place in chosen if done.flat[place]][:ERROR_POINTS])
    points = grid_points(x, y)[flat]
    exact = evaluate.evaluate_plane(problem, plane.center, plane.directions, points).loss.numpy()
    with np.errstate(invalid="ignore"):
        return float(np.abs(exact - loss.reshape(-1)[flat]).max())

"""Loss and accuracy on a grid and along a line, and both ends of the Hessian's spectrum on a grid."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.spectrum import ends_of
from landscape.checkpoint.storage import ResultFile
from landscape.checkpoint.weights import Network, Weights, networks_of
from landscape.core.analysis import analysis
from landscape.core.devices import single
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import Count, GridSize, Several, Span, UpToOne, fit
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.curvature.eigenvalues import eigenpairs, points_at_once
from landscape.curvature.hessian import Derivatives, HessianOptions
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL, SearchOptions, ranks_of, start_vector
from landscape.evaluation import needs
from landscape.evaluation.evaluate import (
    BLOCK_BYTES,
    Autocast,
    Evaluator,
    Method,
    confirm,
    evaluator,
    of_device,
)
from landscape.evaluation.grid import (
    Dispatch,
    Execution,
    Grid,
    MismatchError,
    axes,
    changed,
    check_plane,
    difference,
    provenance,
    setting,
)
from landscape.evaluation.part import part_of
from landscape.problem.batchnorm import SAMPLES, tracked
from landscape.problem.layout import as_array, vector_of
from landscape.problem.metrics import names_of
from landscape.problem.problem import Problem, Run, chain, problem_of
from landscape.problem.sharded import on_ranks
from landscape.results.base import Provenance
from landscape.results.geometry import barrier
from landscape.results.grids import SPAN, HessianGrid, Line, Plane
from landscape.results.surfaces import Surface

# Points at which the error of a lower precision is measured (our choice: under 1% of the paper's 2,500).
ERROR_POINTS = 16


R = TypeVar("R", Surface, HessianGrid)


def _source(about: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result's origin that an earlier one must have equal."""
    return {name: value for name, value in about.items() if name in ("source_sha256", "split")}


# Bytes of a point of a grid at the peak: its values, place, number, and their copies in the result.
SURFACE_POINT, HESSIAN_POINT, LINE_POINT = 130, 300, 130


def _contour_need(problem: Any, grid: Any, max_memory: Any, **_: Any) -> Need:
    """The moved weights and their outputs; or center and directions in one, and a block of points."""
    blocks = 2 * of_device(BLOCK_BYTES, problem.device) if chain(problem) else 0
    held = SURFACE_POINT * needs.points(grid)
    return needs.evaluated(problem, (4 if blocks else 2) + blocks / problem.weights.nbytes, held, max_memory)


@analysis(_contour_need, shorter="a smaller grid= or a part of the data", version=1)
def contour(
    problem: Problem | Run,
    plane: Plane,
    grid: GridSize = (50, 50),
    span: Span | None = None,
    *,
    bn: Literal["center", "recalibrate", "train"] | None = None,
    bn_samples: Several = SAMPLES,
    method: Method = "auto",
    autocast: Autocast | None = None,
    max_memory: Count | None = None,
    interpolation_tol: str | float | None = None,
    into: ResultFile | None = None,
    execution: Execution | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Surface:
    """Loss and accuracy of ``problem`` on an (nx, ny) ``grid`` over ``plane``.

    Args:
        problem: the loss; its model is evaluated in eval mode. Or a run, on its training set.
        plane: center and directions, such as :func:`landscape.random_plane` gives.
        grid: numbers of points (nx, ny), or one for both axes; 50 × 50 by default (DPSGD-2020, section 4.1).
        span: x and y run over [−span, span]; by default 0.1, or what shows all markers. The 0.1 is that of
            DPSGD-2020, section 4.1, the other ``plane.span``.
        bn: statistics of BatchNorm, "center" (those of the problem's model), "recalibrate" (estimated again
            at each point) or "train" (those of the batch); by default recalibrate through networks that
            differ in them, else center. See :meth:`landscape.Problem.with_batchnorm`.
        bn_samples: number of samples for "recalibrate", and in a batch for "train".
        method: how points are evaluated. Paths are "batched" (chains of linear layers: many points at once),
            "folded" (BatchNorm folded into convolutions,
            channels-last layout), "pointwise" (any model, point by point) or "auto", the fastest that agrees
            with "pointwise" on a few samples.
        autocast: faster arithmetic, "bfloat16" (networks that torch.fx can trace) or "tf32" (CUDA); by
            default that of the problem. The largest error at up to 16 points is then measured and kept with
            the result.
        max_memory: bytes that the process may take, at most.
        interpolation_tol: compute exact points only until the others can be interpolated with an error below
            this: "1%" of the range shown, or a number such as 0.005; by default all points are exact. The
            range is that of the logarithm, if the losses differ by more than a factor of 100; numbers are
            nats. Smooth surfaces of 51 × 51 points need 229 exact ones for 1%;
            where 70% of the points would be needed, or the loss is flat but for rounding, all are computed.
            From 512 samples on these are of a twentieth of the samples, and some 40 to 100 of all. An island
            that covers less than 1.5% of the picture can be missed, and a larger one that no sample of the
            part has. See ``landscape.evaluation.adaptive``.
        into: a file of :func:`landscape.open`, into which the surface is written, about every ten seconds and
            at the end. A surface that is there, unfinished or on another grid, is resumed: the points in
            common are not computed again. "auto" keeps the method of an unfinished surface.
        execution: the processes that compute it, and the earlier surface that it goes on with without a file,
            see :class:`landscape.Execution`.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        x (nx,), y (ny,), loss and accuracy (ny, nx): ``loss[i, j]`` is at center + x[j]·directions[0] +
        y[i]·directions[1]. Losses that are not finite are kept as they are.

    Raises:
        InputError: a grid below 1, a span that is not positive, an unknown option, an interpolation_tol that
            is no positive number and no share below 100%, a method or autocast that the model cannot take, or
            a bound on memory that is too small.
        MismatchError: an InputError, for an ``execution.previous`` of a different model, plane or setting.
        OperationError: the file ``into`` holds other results, or points that the grid does not have.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> surface = landscape.contour(problem, landscape.random_plane(problem), grid=(5, 3), span=0.5)
        >>> surface.loss.shape
        (3, 5)
    """
    problem = problem_of(problem, sharded=True)
    _check_sharded(problem, into, execution)
    check_plane(problem, plane)
    span = plane.span if span is None else span
    at = Grid(problem, axes(grid, span), interpolation_tol)
    original, policy = problem, _policy(problem, bn, plane.networks, len(plane.markers))
    problem = problem.with_batchnorm(policy, bn_samples)
    setting, made_of = _setting(problem, plane, policy, autocast), provenance(problem)
    same = setting | _source(about) | {"center": plane.center, "directions": plane.directions}
    same |= {} if method == "auto" else {"method": method}
    execution = execution or Execution()
    previous, save = _resumed(Surface, at, same, made_of, into, execution)
    if previous is not None:
        if at.take(previous, previous.done):
            return _ended(previous, into)
        plane = previous.plane(plane.center)  # the same numbers: the one given may differ by rounding
        method = previous.method if at.same else method
    run = evaluator(problem, plane.center, plane.directions, at.first, method=method, autocast=autocast)
    fields = setting | _description(problem, plane, previous) | {"method": run.method, "provenance": made_of}
    if previous is None:
        fields |= _own_losses(original, problem, plane.networks, plane.labels)
    error = 0.0 if autocast is None else math.nan

    def surface() -> Surface:
        return Surface(span=span, autocast_error=error, **at.fields(), **fields, **about)

    dispatch = _dispatch(execution, save, surface, progress=taken(progress), least=run.block)
    part = _part(problem, at, plane.center, plane.directions, run, autocast)
    fields |= at.complete(run, dispatch, ("loss",), [*at.columns][1:], plane.seed, part)
    if autocast is None:
        confirm(run, plane.center, plane.directions, at.points, at.exact("loss"))
    else:
        error = _autocast_error(problem, plane, at)
    return _ended(surface(), into)


def _part(
    problem: Problem, at: Grid, center: Tensor, directions: Tensor, run: Evaluator, autocast: str | None
) -> Evaluator | None:
    """The same path as ``run``'s for a part of the samples, where points are interpolated and it pays."""
    part = part_of(problem) if at.tolerance is not None and 2 * at.first <= at.done.size else None
    if part is None:
        return None
    return evaluator(part, center, directions, at.first, method=run.method, autocast=autocast)


def _check_sharded(problem: Any, into: ResultFile | None, execution: Execution | None) -> None:
    """Raise InputError for a sharded problem with what divides points among processes, or saves them."""
    if on_ranks(problem) and (into is not None or execution is not None):
        raise InputError("into, execution: not allowed with a sharded model, whose ranks share each point")


def _resumed(
    kind: type[R],
    at: Grid,
    same: Mapping[str, Any],
    made_of: Sequence[str],
    into: ResultFile | None,
    execution: Execution,
) -> tuple[R | None, Callable[[R], None] | None]:
    """The earlier result that a call goes on with, and the function that saves an unfinished one, if any.

    ``same`` are the fields that an earlier one has equal, and ``made_of`` its provenance.
    """

    def differs(result: R) -> str:
        return difference(result, same) or changed(result.provenance, made_of, at.dtype)

    previous: Any = execution.previous
    if into is None:
        if previous is not None:
            fit("execution.previous", previous, kind)
            if reason := differs(previous):
                raise MismatchError(reason)
        return previous, execution.save
    if previous is not None or execution.save is not None:
        raise InputError("execution: previous and save are not allowed with into, which stands for both")
    earlier = into.earlier(kind, differs, same.get("source_sha256", ""), at.x, at.y)
    return earlier, functools.partial(into.put, finished=False)


def _dispatch(
    execution: Execution, save: Callable[[R], None] | None, unfinished: Callable[[], R], **division: Any
) -> Dispatch:
    """How the points are divided, and how ``unfinished()`` is saved."""
    saved = (lambda: save(unfinished())) if save else None
    return Dispatch(save=saved, group=execution.group, **division)


def _ended(result: R, into: ResultFile | None) -> R:
    """Write the finished result, and return it."""
    if into is not None:
        into.put(result, finished=True)
    return result


def _setting(problem: Problem, plane: Plane, bn: str, autocast: str | None) -> dict[str, Any]:
    """The fields of a surface that must be equal for it to be resumed."""
    return {
        **{name: getattr(plane, name) for name in ("kind", "norm", "ignore", "seed")},
        **setting(problem),
        "bn": bn if bn != "center" else problem.batchnorm.name,  # the problem may have a policy already
        "autocast": autocast or "",
    }


def _description(problem: Problem, plane: Plane, previous: Surface | None) -> dict[str, Any]:
    """The other fields of a surface that its values do not depend on."""
    losses = [math.nan] * len(plane.markers)  # of a plane from a file, which has no weights
    if plane.weights is not None and not previous:
        losses = [problem.loss(theta.to(problem.weights)) for theta in plane.weights]
    names = ("own_loss", "statistics_of") if previous else ()
    return {
        **{name: getattr(previous, name) for name in names},
        **{name: getattr(plane, name) for name in ("axes", "markers", "labels", "explained")},
        "directions": as_array(plane.directions),
        "center": as_array(plane.center),
        "marker_loss": previous.marker_loss if previous else np.array(losses, dtype=np.float64),
    }


def _policy(problem: Problem, bn: str | None, networks: Sequence[Network], count: int) -> str:
    """The policy of BatchNorm: the one asked for, else the problem's, or what ``places`` networks need."""
    if bn is not None or not count or problem.batchnorm.name != "center":
        return bn or "center"
    alike = len(networks) == count and all(network.shares_statistics(problem) for network in networks)
    return "center" if alike else "recalibrate"


def _own_losses(
    original: Problem, evaluated: Problem, networks: Sequence[Network], labels: Sequence[str]
) -> dict[str, Any]:
    """The fields on the losses of networks with their own statistics, and on whose all points have."""
    if not tracked(original.model):
        return {}
    of = [label for label, n in zip(labels, networks, strict=False) if n.shares_statistics(original)]
    whose = of[0] if of else "the problem's model"
    return {
        "own_loss": np.array([network.own_loss(original) for network in networks]),
        "statistics_of": whose if labels and evaluated.batchnorm.name == "center" else "",
    }


def _autocast_error(problem: Problem, plane: Plane, at: Grid) -> float:
    """The largest |difference| of the loss from that in the model's precision, at up to ERROR_POINTS points.

    These are the center, the corners, the lowest and the highest loss, and others drawn at random, of those
    that are ``done``.
    """
    loss, (ny, nx) = at.columns["loss"].ravel(), at.done.shape
    finite = np.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
    center = int(np.abs(at.y).argmin()) * nx + int(np.abs(at.x).argmin())
    corners = [0, nx - 1, (ny - 1) * nx, ny * nx - 1]
    order = np.random.default_rng(0).permutation(loss.size)
    chosen = dict.fromkeys([center, *corners, int(finite.argmin()), int(finite.argmax()), *order.tolist()])
    flat = np.array([index for index in chosen if at.done.flat[index]][:ERROR_POINTS])
    exact = evaluator(problem, plane.center, plane.directions, len(flat))(at.points[flat])["loss"].numpy()
    with np.errstate(invalid="ignore"):
        return float(np.abs(exact - loss[flat]).max())


POINTS = 51  # ours; Frankle et al. 2020 take 30 between two ends. Odd, so that the middle is one of them


def _line_need(problem: Any, b: Any, points: Any, max_memory: Any, **_: Any) -> Need:
    """The need of a contour, and a second direction, which is zero."""
    held = LINE_POINT * (b if isinstance(b, int) else points)
    return needs.evaluated(problem, 5 if chain(problem) else 3, held, max_memory)


@analysis(_line_need, shorter="a smaller points= or a part of the data")
def line(
    problem: Problem | Run,
    a: Weights | None = None,
    b: Weights | Several | None = None,
    *,
    points: Several = POINTS,
    span: Span | None = None,
    direction: Tensor | None = None,
    weights: Sequence[Weights] | Tensor | None = None,
    labels: Sequence[str] = (),
    bn: Literal["center", "recalibrate", "train"] | None = None,
    bn_samples: Several = SAMPLES,
    method: Method = "auto",
    interpolation_tol: str | float | None = None,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Line:
    """Loss and accuracy at ``points`` weights along a direction from the center, or between two weights.

    Args:
        problem: the loss; its model is evaluated in eval mode. Or a run, on its training set.
        a, b: two networks: the line (1−t)·a + t·b, t ∈ [0, 1], with the barrier between the two. Each is a
            vector (P,), a problem (its center), a model, a state dict, a run (its mean), or the name of a
            file of one; parameters are matched by name. Without b the line leads from the problem's center
            to a; but a vector alone is a direction, and a number after it is that of the points.
        points: how many, at least 2; 51 by default.
        span: along a direction t runs over [−span, span]; by default 0.1, as for planes (DPSGD-2020, section
            4.1).
        direction: (P,), in place of a and b: the line is center + t·direction, t ∈ [−span, span].
        weights: a and b as one list, or (2, P).
        labels: names of a and b for plots.
        bn: statistics of BatchNorm, "center" (those of the problem's model), "recalibrate" (estimated again
            at each point) or "train" (those of the batch); by default recalibrate between networks that
            differ in them, else center. See :meth:`landscape.Problem.with_batchnorm`.
        bn_samples: number of samples for "recalibrate", and in a batch for "train".
        method: how the losses are computed; "auto" takes the fastest one that agrees with the model itself.
        interpolation_tol: compute exact points only until the others can be interpolated with an error below
            this: "1%" of the range shown, or a number such as 0.005; by default all points are exact. Of 51
            points a smooth line needs 25 exact ones, with a part of the samples 15. Where 70% of them do not
            suffice, all are computed.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        t, loss and accuracy, (points,) each.

    Raises:
        InputError: fewer than 2 points, a span that is not positive or for two weights, both or neither of
            direction and a, what is no weights of this model, an unknown option, or an interpolation_tol that
            is not allowed.
        OperationError: weights that are not finite, or a file of others.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> a = torch.tensor([1.0, 0.0])
        >>> landscape.line(problem, -a, a, points=3).loss.tolist()
        [0.5, 0.0, 0.5]
    """
    problem = problem_of(problem, sharded=True)
    if isinstance(b, int):
        points, b = b, None
    if weights is not None:
        if not (hasattr(weights, "__len__") and len(weights) == 2 and a is None and b is None):
            raise InputError("weights: for a line it must be two networks, [a, b], without a or b beside it")
        a, b = weights
    if b is None and isinstance(a, (Tensor, np.ndarray)) and direction is None:
        a, direction = None, a
    if (a is None) == (direction is None) or (a is None and b is not None):
        raise InputError("a, direction: give two networks, a and b, or one direction")
    networks: list[Network] = []
    if a is not None:
        ends = {"problem": problem, "a": a} if b is None else {"a": a, "b": b}
        networks = networks_of(problem, [*ends.values()], labels or tuple(ends))
        if span is not None:
            raise InputError("span: a line between two weights runs from 0 to 1; leave it out")
        kind, t = "interpolation", np.linspace(0, 1, points)
        start, end = (single(network.theta) for network in networks)
        direction = end - start
    else:
        span = SPAN if span is None else span
        kind, t = "direction", np.linspace(-span, span, points)
        start, direction = problem.weights, vector_of(direction, problem.weights, "direction")
        if not 0 < (norm := float(ranks_of(problem).norm(direction))) < math.inf:
            raise InputError(f"direction: one of norm {norm:g} is not allowed, it must be finite and > 0")
    original = problem
    problem = problem.with_batchnorm(_policy(problem, bn, networks, len(networks)), bn_samples)
    at = Grid(problem, (t,), interpolation_tol)
    directions = torch.stack((direction, torch.zeros_like(direction)))
    run = evaluator(problem, start, directions, at.first, method=method)
    part = _part(problem, at, start, directions, run, None)
    dispatch = Dispatch(progress=taken(progress))
    errors = at.complete(run, dispatch, ("loss",), [*at.columns][1:], part=part)
    confirm(run, start, directions, at.points, at.exact("loss"))
    return Line(
        t=t,
        **at.values(),
        done=at.done,
        start=as_array(start),
        direction=as_array(direction),
        kind=kind,
        barrier=barrier(t, at.columns["loss"]) if kind == "interpolation" else float("nan"),
        method=run.method,
        labels=tuple(labels),
        **_own_losses(original, problem, networks, labels or ("the first", "the second")[: len(networks)]),
        **errors,
        **setting(problem),
        **about,
    )


VALUES = ("lambda_min", "lambda_max", "ratio")
RESIDUALS = ("residual_min", "residual_max")


def _hessian_grid_need(problem: Any, grid: Any, derivatives: Any, **_: Any) -> Need:
    arrays = HESSIAN_POINT * needs.points(grid)
    return needs.curved(problem, 3 + needs.basis(problem, 2), arrays, derivatives=derivatives)


@analysis(
    _hessian_grid_need, shorter="a smaller grid=, a larger residual_tol= or a part of the data", version=1
)
def hessian_grid(
    problem: Problem | Run,
    plane: Plane,
    grid: GridSize = (4, 4),
    span: Span | None = None,
    *,
    residual_tol: UpToOne = RESIDUAL_TOL,
    max_products: Count = MAX_PRODUCTS,
    search: Literal["auto", "exact"] = "auto",
    derivatives: Derivatives = "auto",
    bn: Literal["center", "recalibrate", "train"] = "center",
    bn_samples: Several = SAMPLES,
    interpolation_tol: str | float | None = None,
    into: ResultFile | None = None,
    execution: Execution | None = None,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> HessianGrid:
    """Both ends of the Hessian's spectrum at each point of an (nx, ny) grid over ``plane``.

    Args:
        problem: the loss; or a run, on its training set.
        plane: center and directions, such as :func:`landscape.random_plane` gives.
        grid: numbers of points (nx, ny), or one for both axes; 4 × 4 by default (DPSGD-2020, section 4.1).
        span: x and y run over [−span, span]; by default 0.1, or what shows all markers. The 0.1 is that of
            DPSGD-2020, section 4.1, the other ``plane.span``.
        residual_tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to
            zero.
        max_products: Hessian-vector products per point, at most.
        search: "auto" may search with cheaper products, whose results are verified and refined with exact
            ones; "exact": all products are exact.
        derivatives: "exact" (double backward), "differences" (of gradients, with measured errors), or "auto",
            exact where the model has second derivatives. See :class:`landscape.HessianOperator`.
        bn: statistics of BatchNorm, "center" (those of the problem's model), "recalibrate" (estimated again
            at each point) or "train" (those of the batch). See :meth:`landscape.Problem.with_batchnorm`.
        bn_samples: number of samples for "recalibrate", and in a batch for "train".
        interpolation_tol: compute exact points only until the others can be interpolated with an error below
            this: "1%" of the range shown, or a number such as 0.005; by default all points are exact. It is
            of λ_min, λ_max and the ratio alike, pays for grids finer than about 20 × 20, and should not be
            below ``residual_tol``.
        into, execution: as for :func:`landscape.contour`; points that did not converge are computed again
            with another ``max_products``.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        lambda_min, lambda_max, their residuals, ratio = |λ_min|/|λ_max|, products and
        converged, (ny, nx) each.

    Raises:
        InputError: a grid below 1, a span, residual_tol or max_products that is not positive, or an
            interpolation_tol that is not allowed.
        MismatchError, OperationError: as for :func:`landscape.contour`.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(2, 1))
        >>> grid.lambda_max.round(4).tolist()  # the same everywhere: the loss is quadratic
        [[9.0, 9.0]]
    """
    kinds = {"products": np.int64, "converged": bool, **dict.fromkeys((*VALUES, *RESIDUALS), float)}
    problem = problem_of(problem, sharded=True)
    _check_sharded(problem, into, execution)
    check_plane(problem, plane)
    span = plane.span if span is None else span
    at = Grid(problem, axes(grid, span), interpolation_tol, kinds)
    target = SearchOptions(1, 1, residual_tol, max_products)
    problem = problem.with_batchnorm(bn, bn_samples)
    h = HessianOptions(derivatives=derivatives).at(problem)
    h(start_vector(problem, plane.seed))  # the center has one, other points may be NaN
    options = HessianOptions(derivatives=h.derivatives)
    fields = _fields(problem, plane, residual_tol, search) | {"derivatives": h.derivatives}
    del h
    made_of = provenance(problem)
    execution = execution or Execution()
    previous, save = _resumed(HessianGrid, at, fields | _source(about), made_of, into, execution)
    if previous is not None:
        # With other limits a point that did not converge is searched again.
        usable = previous.done & (previous.converged | (previous.max_products == max_products))
        if at.take(previous, usable):
            return _ended(previous, into)
    fields |= {"max_products": max_products, "provenance": made_of}
    if problem.metrics:
        metrics = problem.totals(plane.center.to(problem.weights))[2:].cpu().numpy() / problem.samples
        fields |= {"metric_names": names_of(problem), "metrics": metrics}

    def result() -> HessianGrid:
        return HessianGrid(span=span, **at.fields(), **fields, **about)

    at_once = points_at_once(problem, options)
    dispatch = _dispatch(execution, save, result, progress=taken(progress), block=at_once)
    ends = _ends_at(problem, plane, target, options, search, at_once)
    fields |= at.complete(ends, dispatch, VALUES, (), plane.seed)
    return _ended(result(), into)


def _fields(problem: Problem, plane: Plane, residual_tol: float, search: str) -> dict[str, Any]:
    """The fields of a result that must be equal for it to be resumed, but for ``max_products``."""
    digest = hashlib.sha256(as_array(plane.center).tobytes())
    digest.update(as_array(plane.directions).tobytes())
    return {
        **{name: getattr(plane, name) for name in ("kind", "norm", "seed")},
        "residual_tol": residual_tol,
        **setting(problem),
        "search": search,
        "randomness": problem.randomness,
        "plane_sha256": digest.hexdigest(),
    }


def _ends_at(
    problem: Problem, plane: Plane, target: SearchOptions, options: HessianOptions, search: str, at_once: int
) -> Callable[[Tensor, Progress], dict[str, Array]]:
    """(K, 2) points -> the columns of the result there, ``at_once`` points together.

    Each point starts from the same random vector. A start from the neighbor's eigenvectors plus a random
    part took 15% fewer products on MNIST's MLP, but ended at eigenvalues near the lowest, up to 1.9% off. The
    points share samples and passes over the data in fixed blocks, whatever the portions and processes.
    """
    start = start_vector(problem, plane.seed)

    def ends(points: Tensor, progress: Progress) -> dict[str, Array]:
        pairs, reached = [], 0.0

        def advance(share: float) -> None:  # of the search that is furthest
            nonlocal reached
            reached = max(reached, share)
            progress(reached)

        for i in range(0, len(points), at_once):
            thetas = plane.center + points[i : i + at_once].to(plane.directions) @ plane.directions
            report = portion(advance, i / len(points), (i + len(thetas)) / len(points))
            shown = dataclasses.replace(target, progress=report)
            pairs += eigenpairs(problem, thetas, start, shown, options, search=search)
        columns = ends_of(pairs)
        for name in ("products", "converged"):
            columns[name] = np.array([getattr(pair, name) for pair in pairs])
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["ratio"] = np.abs(columns["lambda_min"]) / np.abs(columns["lambda_max"])
        return columns

    return ends

"""Compute loss and accuracy on a grid or a line, and both ends of the Hessian's spectrum on a grid."""

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
from landscape.core.devices import at_least_float32
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.options import AtLeastTwo, Count, GridSize, Span, UpToOne, fit
from landscape.core.progress import Progress, ProgressOption, portion, reporter
from landscape.curvature.eigenvalues import eigenpairs, points_at_once
from landscape.curvature.hessian import Derivatives, HessianOptions
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL, SearchOptions, ranks_of, start_vector
from landscape.evaluation import needs
from landscape.evaluation.evaluate import (
    BLOCK_BYTES,
    Autocast,
    Evaluator,
    Method,
    check_one_loss,
    evaluator,
    scaled_to_device,
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
from landscape.problem.batchnorm import SAMPLES, layers_with_statistics
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
    """Return the fields of a result's origin that an earlier result must share with it."""
    return {name: value for name, value in about.items() if name in ("source_sha256", "split")}


# Bytes per point of a grid at the peak: its values, coordinates, index, and their copies in the result.
SURFACE_POINT, HESSIAN_POINT, LINE_POINT = 130, 300, 130


def _contour_need(problem: Any, grid: Any, max_memory: Any, **_: Any) -> Need:
    """Return the need of :func:`contour`: of a chain, center, directions and a block; else moved weights."""
    vectors = 2.0
    if chain(problem):
        vectors = 4 + 2 * scaled_to_device(BLOCK_BYTES, problem.device) / problem.weights.nbytes
    return needs.evaluated(problem, vectors, SURFACE_POINT * needs.points(grid), max_memory)


@analysis(_contour_need, shorter="a smaller grid= or a part of the data", version=1)
def contour(
    problem: Problem | Run,
    plane: Plane,
    grid: GridSize = (50, 50),
    span: Span | None = None,
    *,
    bn: Literal["center", "recalibrate", "train"] | None = None,
    bn_samples: AtLeastTwo = SAMPLES,
    method: Method = "auto",
    autocast: Autocast | None = None,
    max_memory: Count | None = None,
    interpolation_tol: str | float | None = None,
    into: ResultFile | None = None,
    execution: Execution | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Surface:
    """Compute loss and accuracy of ``problem`` on an (nx, ny) ``grid`` over ``plane``.

    Args:
        problem: the loss, evaluated in eval mode; or a run, on its training set.
        plane: center and directions, for example of :func:`landscape.random_plane`.
        grid: the number of points (nx, ny), or one for both axes; default: 50 × 50 (DPSGD-2020, section 4.1).
        span: x and y are in [−span, span]; default: ``plane.span``, or 0.1 if the plane has no markers.
        bn: BatchNorm's statistics: "center" (the model's), "recalibrate" (estimated again at each point) or
            "train" (each batch's); default: "recalibrate" if the networks on the plane have different
            statistics, else "center".
        bn_samples: the number (≥ 2) of samples for the statistics of "recalibrate", or in a batch of "train".
        method: "batched" (many points at once, for chains of linear layers), "folded" (BatchNorm folded into
            convolutions), "pointwise" (any model) or "auto" (the fastest that agrees with "pointwise").
        autocast: faster arithmetic, "bfloat16" (networks that torch.fx can trace) or "tf32" (CUDA); default:
            the problem's arithmetic. The field ``autocast_error`` is the largest error at up to 16 points.
        max_memory: the most bytes that the process may use.
        interpolation_tol: the largest error of interpolated losses: "1%" of the range shown (of the range of
            log L if losses differ by more than a factor of 100), or a number in nats, such as 0.005; default:
            no point is interpolated. A region that covers less than 1.5% of the picture can be missed.
        into: a file of :func:`landscape.open` that gets the surface about every ten seconds. Points of an
            earlier surface in the file are not computed again; the grid must contain all of them.
        execution: the processes to use, and an earlier surface to resume; see :class:`landscape.Execution`.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        x (nx,), y (ny,), loss and accuracy (ny, nx): ``loss[i, j]`` is at center + x[j]·directions[0] +
        y[i]·directions[1]. Losses that are not finite are kept as they are.

    Raises:
        InputError: an argument that is not allowed or does not fit the model, or too small a max_memory.
        MismatchError: ``execution.previous`` has a different model, plane or setting; a kind of InputError.
        OperationError: the file ``into`` has other results, or its points would be lost on this grid.

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
    result_grid = Grid(problem, axes(grid, span), interpolation_tol)
    given_problem = problem
    policy = _batchnorm_policy(problem, bn, plane.networks, count=len(plane.markers))
    problem = problem.with_batchnorm(policy, bn_samples)
    surface_setting = _setting(problem, plane, policy, autocast)
    origin = provenance(problem)
    must_equal = surface_setting | _source(about) | {"center": plane.center, "directions": plane.directions}
    if method != "auto":
        must_equal["method"] = method
    execution = execution or Execution()
    previous, save = _resume(Surface, result_grid, must_equal, origin, into, execution)
    if previous is not None:
        is_complete = result_grid.reuse(previous, previous.done)  # copies values; whether none is missing
        if is_complete:
            return _write_finished(previous, into)
        plane = previous.plane(like=plane.center)  # may differ from the given plane by rounding
        # On the axes of the earlier surface, that surface is completed by its own method.
        method = previous.method if result_grid.axes_unchanged else method
    center, directions, count = plane.center, plane.directions, result_grid.min_computed_points
    evaluate = evaluator(problem, center, directions, count, method=method, autocast=autocast)
    fields = surface_setting | _description(problem, plane, previous)
    fields |= {"method": evaluate.method, "provenance": origin}
    if previous is None:
        fields |= _batchnorm_fields(given_problem, problem, plane.networks, plane.labels)
    autocast_error = 0.0 if autocast is None else math.nan  # NaN until it is measured at the end

    def current_surface() -> Surface:
        return Surface(span=span, autocast_error=autocast_error, **result_grid.fields(), **fields, **about)

    dispatch_options = {"progress": reporter(progress), "min_per_process": evaluate.block}
    dispatch = _dispatch(execution, save, current_surface, **dispatch_options)
    # Losses on a part of the samples guide the choice of points. evaluate_part is None if this saves no time.
    evaluate_part = _part_evaluator(problem, result_grid, center, directions, evaluate)
    others = [name for name in result_grid.columns if name != "loss"]
    fields |= result_grid.complete(evaluate, dispatch, ("loss",), others, plane.seed, evaluate_part)
    if autocast is None:
        check_one_loss(evaluate, center, directions, result_grid.points, result_grid.exact("loss"))
    else:
        autocast_error = _autocast_error(problem, plane, result_grid)
    return _write_finished(current_surface(), into)


def _part_evaluator(
    problem: Problem, result_grid: Grid, center: Tensor, directions: Tensor, evaluate: Evaluator
) -> Evaluator | None:
    """Return the evaluator of a part of the samples by the same method, or None where it saves no time."""
    count = result_grid.min_computed_points
    interpolates = result_grid.tolerance is not None and 2 * count <= result_grid.done.size
    part = part_of(problem) if interpolates else None
    if part is None:
        return None
    return evaluator(part, center, directions, count, method=evaluate.method, autocast=evaluate.autocast)


def _check_sharded(problem: Any, into: ResultFile | None, execution: Execution | None) -> None:
    """Raise InputError for a sharded problem with a file, or with processes that divide the points."""
    if on_ranks(problem) and (into is not None or execution is not None):
        raise InputError("into, execution: not allowed with a sharded model, whose ranks share each point")


def _resume(
    result_type: type[R], result_grid: Grid, must_equal: Mapping[str, Any], origin: Sequence[str],
    into: ResultFile | None, execution: Execution,
) -> tuple[R | None, Callable[[R], None] | None]:  # fmt: skip
    """Return the earlier result to resume, and the function that saves an unfinished one, if there are any.

    The earlier result must have the fields ``must_equal``, and ``origin`` as its provenance.
    """

    def mismatch(result: R) -> str:
        return difference(result, must_equal) or changed(result.provenance, origin, result_grid.dtype)

    previous: Any = execution.previous
    if into is None:
        if previous is not None:
            fit("execution.previous", previous, result_type)
        if previous is not None and mismatch(previous):
            raise MismatchError(mismatch(previous))
        return previous, execution.save
    if previous is not None or execution.save is not None:
        raise InputError("execution: previous and save are not allowed with into, which replaces both")
    source = must_equal.get("source_sha256", "")
    previous = into.earlier(result_type, mismatch, source, result_grid.x, result_grid.y)
    return previous, functools.partial(into.put, finished=False)


def _dispatch(
    execution: Execution, save: Callable[[R], None] | None, unfinished: Callable[[], R], **division: Any
) -> Dispatch:
    """Return the division of the points, which saves ``unfinished()`` with ``save``."""
    save_unfinished = (lambda: save(unfinished())) if save else None
    return Dispatch(save=save_unfinished, group=execution.group, **division)


def _write_finished(result: R, into: ResultFile | None) -> R:
    """Write the finished result to a file, if there is one, and return it."""
    if into is not None:
        into.put(result, finished=True)
    return result


def _setting(problem: Problem, plane: Plane, bn: str, autocast: str | None) -> dict[str, Any]:
    """Return the fields of a surface that an earlier surface must share to be resumed."""
    return {
        **{name: getattr(plane, name) for name in ("kind", "norm", "ignore", "seed")},
        **setting(problem),
        "bn": bn if bn != "center" else problem.batchnorm.name,  # the problem may have a policy already
        "autocast": autocast or "",
    }


def _description(problem: Problem, plane: Plane, previous: Surface | None) -> dict[str, Any]:
    """Return the fields of a surface that describe its plane; those of losses are of the ``previous`` one."""
    fields = {name: getattr(plane, name) for name in ("axes", "markers", "labels", "explained")}
    fields |= {"directions": as_array(plane.directions), "center": as_array(plane.center)}
    if previous:
        return fields | {n: getattr(previous, n) for n in ("own_loss", "statistics_of", "marker_loss")}
    losses = [math.nan] * len(plane.markers)  # of a plane from a file, which has no weights
    if plane.weights is not None:
        losses = [problem.loss(theta.to(problem.weights)) for theta in plane.weights]
    return fields | {"marker_loss": np.array(losses, dtype=np.float64)}


def _batchnorm_policy(problem: Problem, bn: str | None, networks: Sequence[Network], count: int) -> str:
    """Return ``bn``, or the default policy of BatchNorm for ``count`` networks; ``networks``: those known."""
    if bn is not None or not count or problem.batchnorm.name != "center":
        return bn or "center"
    same = len(networks) == count and all(network.shares_statistics(problem) for network in networks)
    return "center" if same else "recalibrate"


def _batchnorm_fields(
    given_problem: Problem, problem_on_grid: Problem, networks: Sequence[Network], labels: Sequence[str]
) -> dict[str, Any]:
    """Return the result's fields about BatchNorm's statistics, ``own_loss`` and ``statistics_of``."""
    if not layers_with_statistics(given_problem.model):
        return {}
    named = zip(labels, networks, strict=False)
    owners = [label for label, network in named if network.shares_statistics(given_problem)]
    owner = owners[0] if owners else "the problem's model"
    return {
        "own_loss": np.array([network.own_loss(given_problem) for network in networks]),
        "statistics_of": owner if labels and problem_on_grid.batchnorm.name == "center" else "",
    }


def _autocast_error(problem: Problem, plane: Plane, result_grid: Grid) -> float:
    """Return the largest distance from the loss in the model's precision, at up to ERROR_POINTS points.

    These are the center, the corners, the lowest and the highest loss, and others drawn at random.
    """
    loss, (ny, nx) = result_grid.columns["loss"].ravel(), result_grid.done.shape
    finite = np.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
    center = int(np.abs(result_grid.y).argmin()) * nx + int(np.abs(result_grid.x).argmin())
    corners = [0, nx - 1, (ny - 1) * nx, ny * nx - 1]
    order = np.random.default_rng(0).permutation(loss.size).tolist()
    candidates = dict.fromkeys([center, *corners, int(finite.argmin()), int(finite.argmax()), *order])
    computed = [index for index in candidates if result_grid.done.flat[index]][:ERROR_POINTS]
    evaluate = evaluator(problem, plane.center, plane.directions, len(computed))
    exact = evaluate(result_grid.points[computed])["loss"].numpy()
    with np.errstate(invalid="ignore"):
        return float(np.abs(exact - loss[computed]).max())


# Our choice: odd, so that the middle is one of the points. Frankle et al. 2020 take 30 between two ends.
POINTS = 51


def _line_need(problem: Any, b: Any, points: Any, max_memory: Any, **_: Any) -> Need:
    """Return the need of :func:`line`: that of a contour, and a second direction, which is zero."""
    result_bytes = LINE_POINT * (b if isinstance(b, int) else points)
    return needs.evaluated(problem, 5 if chain(problem) else 3, result_bytes, max_memory)


@analysis(_line_need, shorter="a smaller points= or a part of the data")
def line(
    problem: Problem | Run,
    a: Weights | None = None,
    b: Weights | AtLeastTwo | None = None,
    *,
    points: AtLeastTwo = POINTS,
    span: Span | None = None,
    direction: Tensor | None = None,
    weights: Sequence[Weights] | Tensor | None = None,
    labels: Sequence[str] = (),
    bn: Literal["center", "recalibrate", "train"] | None = None,
    bn_samples: AtLeastTwo = SAMPLES,
    method: Method = "auto",
    interpolation_tol: str | float | None = None,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Line:
    """Compute loss and accuracy along a line through weight space.

    Args:
        problem: the loss, evaluated in eval mode; or a run, on its training set.
        a, b: two networks: the line is (1−t)·a + t·b, t ∈ [0, 1]; the result has the barrier between them.
            Each is a vector (P,), a problem (its center), a model, a state dict, a run (its mean), or the
            name of a file with one of these; parameters are matched by name. Without b, the line leads from
            the problem's center to a; but a vector a without b is a ``direction``. An int in place of b is
            ``points``.
        points: the number of points, at least 2; default: 51.
        span: along a direction, t ∈ [−span, span]; default: 0.1, as for planes (DPSGD-2020, section 4.1).
        direction: (P,), in place of a and b: the line is center + t·direction.
        weights: a and b as one list, or (2, P).
        labels: names of a and b for plots.
        bn: BatchNorm's statistics: "center" (the model's), "recalibrate" (estimated again at each point) or
            "train" (each batch's); default: "recalibrate" if a and b have different statistics, else
            "center".
        bn_samples: the number (≥ 2) of samples for the statistics of "recalibrate", or in a batch of "train".
        method: how the losses are computed, as for :func:`landscape.contour`.
        interpolation_tol: the largest error of interpolated losses: "1%" of the range shown, or a number in
            nats, such as 0.005; default: no point is interpolated.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        t, loss and accuracy, (points,) each.

    Raises:
        InputError: an argument that is not allowed, both or neither of direction and a, a vector of another
            length, or a model with other layers.
        OperationError: weights that are not finite, or tensors whose names or shapes do not fit the model.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> a = torch.tensor([1.0, 0.0])
        >>> landscape.line(problem, -a, a, points=3).loss.tolist()
        [0.5, 0.0, 0.5]
    """
    problem = problem_of(problem, sharded=True)
    if isinstance(b, int):  # the caller gave the number of points in b's place
        points, b = b, None
    if weights is not None:
        if not (hasattr(weights, "__len__") and len(weights) == 2 and a is None and b is None):
            raise InputError("weights: for a line it must be two networks, [a, b]; then leave out a and b")
        a, b = weights
    if b is None and isinstance(a, (Tensor, np.ndarray)) and direction is None:
        a, direction = None, a  # one vector without b is a direction
    if (a is None) == (direction is None) or (a is None and b is not None):
        raise InputError("a, direction: give two networks, a and b, or one direction")
    networks: list[Network] = []
    if a is not None:
        ends = {"problem": problem, "a": a} if b is None else {"a": a, "b": b}
        networks = networks_of(problem, [*ends.values()], labels or tuple(ends))  # names for messages
        if span is not None:
            raise InputError("span: a line between two weights runs from 0 to 1; leave it out")
        kind, t = "interpolation", np.linspace(0, 1, points)
        start, end = (at_least_float32(network.theta) for network in networks)
        direction = end - start
        network_names = labels or ("the first", "the second")  # names for the field statistics_of
    else:
        span = SPAN if span is None else span
        kind, t = "direction", np.linspace(-span, span, points)
        start, direction = problem.weights, vector_of(direction, problem.weights, "direction")
        norm = float(ranks_of(problem).norm(direction))
        if not 0 < norm < math.inf:
            raise InputError(f"direction: its norm {norm:g} is not allowed, it must be finite and > 0")
        network_names = labels  # a direction has no networks
    given_problem = problem
    policy = _batchnorm_policy(problem, bn, networks, count=len(networks))
    problem = problem.with_batchnorm(policy, bn_samples)
    result_grid = Grid(problem, (t,), interpolation_tol)
    # A line is computed as a plane whose second direction is zero.
    directions = torch.stack((direction, torch.zeros_like(direction)))
    evaluate = evaluator(problem, start, directions, result_grid.min_computed_points, method=method)
    evaluate_part = _part_evaluator(problem, result_grid, start, directions, evaluate)  # as in contour()
    dispatch = Dispatch(progress=reporter(progress))
    others = [name for name in result_grid.columns if name != "loss"]
    error_fields = result_grid.complete(evaluate, dispatch, ("loss",), others, part_evaluator=evaluate_part)
    # One computed loss is compared with Problem.loss(). ``exact``: losses, with NaN where interpolated.
    check_one_loss(evaluate, start, directions, result_grid.points, result_grid.exact("loss"))
    return Line(
        t=t,
        **result_grid.values(),
        done=result_grid.done,
        start=as_array(start),
        direction=as_array(direction),
        kind=kind,
        barrier=barrier(t, result_grid.columns["loss"]) if kind == "interpolation" else math.nan,
        method=evaluate.method,
        labels=tuple(labels),
        **_batchnorm_fields(given_problem, problem, networks, network_names),
        **error_fields,
        **setting(problem),
        **about,
    )


VALUE_COLUMNS = ("lambda_min", "lambda_max", "ratio")


def _hessian_grid_need(problem: Any, grid: Any, derivatives: Any, **_: Any) -> Need:
    """Return the need of :func:`hessian_grid`: center, directions, and a search for two eigenvalues."""
    vectors, result_bytes = 3 + needs.basis(problem, 2), HESSIAN_POINT * needs.points(grid)
    return needs.curved(problem, vectors, result_bytes, derivatives=derivatives)


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
    bn_samples: AtLeastTwo = SAMPLES,
    interpolation_tol: str | float | None = None,
    into: ResultFile | None = None,
    execution: Execution | None = None,
    max_memory: Count | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> HessianGrid:
    """Compute both ends of the Hessian's spectrum at each point of an (nx, ny) grid over ``plane``.

    Args:
        problem: the loss; or a run, on its training set.
        plane: center and directions, for example of :func:`landscape.random_plane`.
        grid: the number of points (nx, ny), or one for both axes; default: 4 × 4 (DPSGD-2020, section 4.1).
        span: x and y are in [−span, span]; default: ``plane.span``, or 0.1 if the plane has no markers.
        residual_tol: the largest allowed ‖Hv − λv‖ / max(|λ|, |λ|_max/1000).
        max_products: the largest number of Hessian-vector products per point.
        search: "auto": to save time, the search may begin with products on only the samples with the most
            curvature; exact products then verify and refine the results. "exact": all products are exact.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        bn: BatchNorm's statistics: "center" (the model's), "recalibrate" (estimated again at each point) or
            "train" (each batch's).
        bn_samples: the number (≥ 2) of samples for the statistics of "recalibrate", or in a batch of "train".
        interpolation_tol: the largest error of interpolated λ_min, λ_max and ratios: "1%" of the range shown,
            or an absolute error such as 0.005, at least ``residual_tol``; default: no point is interpolated.
            Interpolation saves time for grids finer than about 20 × 20.
        into, execution: as for :func:`landscape.contour`; points that did not converge are computed again if
            ``max_products`` has changed.
        max_memory: the most bytes that the process may use.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        lambda_min, lambda_max, their residuals, ratio = |λ_min|/|λ_max|, products and converged: (ny, nx).

    Raises:
        InputError: a number that is not allowed.
        MismatchError, OperationError: as for :func:`landscape.contour`.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(2, 1))
        >>> grid.lambda_max.round(4).tolist()  # the same everywhere: the loss is quadratic
        [[9.0, 9.0]]
    """
    float_columns = dict.fromkeys((*VALUE_COLUMNS, "residual_min", "residual_max"), float)
    column_types = {"products": np.int64, "converged": bool, **float_columns}
    problem = problem_of(problem, sharded=True)
    _check_sharded(problem, into, execution)
    check_plane(problem, plane)
    span = plane.span if span is None else span
    result_grid = Grid(problem, axes(grid, span), interpolation_tol, column_types)
    search_options = SearchOptions(1, 1, residual_tol, max_products)  # one eigenvalue at each end
    problem = problem.with_batchnorm(bn, bn_samples)
    hessian = HessianOptions(derivatives=derivatives).at(problem)
    hessian(start_vector(problem, plane.seed))  # refuses a NaN at the center; other points may have NaN
    hessian_options = HessianOptions(derivatives=hessian.derivatives)  # as "auto" has chosen at the center
    del hessian  # frees its graphs
    fields = _hessian_setting(problem, plane, residual_tol, search)
    fields["derivatives"] = hessian_options.derivatives
    origin = provenance(problem)
    execution = execution or Execution()
    previous, save = _resume(HessianGrid, result_grid, fields | _source(about), origin, into, execution)
    if previous is not None:
        # A point that did not converge is computed again if max_products has changed: it may converge now.
        usable = previous.done & (previous.converged | (previous.max_products == max_products))
        is_complete = result_grid.reuse(previous, usable)
        if is_complete:
            return _write_finished(previous, into)
    fields |= {"max_products": max_products, "provenance": origin}
    if problem.metrics:  # measured at the center only
        totals = problem.totals(plane.center.to(problem.weights)).cpu().numpy()
        _loss, _accuracy, *metrics = totals / problem.samples
        fields |= {"metric_names": names_of(problem), "metrics": np.array(metrics)}

    def current_grid() -> HessianGrid:
        return HessianGrid(span=span, **result_grid.fields(), **fields, **about)

    block = points_at_once(problem, hessian_options)
    dispatch = _dispatch(execution, save, current_grid, progress=reporter(progress), block=block)
    evaluate = _eigenvalue_evaluator(problem, plane, search_options, hessian_options, search, block)
    fields |= result_grid.complete(evaluate, dispatch, VALUE_COLUMNS, seed=plane.seed)
    return _write_finished(current_grid(), into)


def _hessian_setting(problem: Problem, plane: Plane, residual_tol: float, search: str) -> dict[str, Any]:
    """Return the fields, except ``derivatives``, that an earlier result must share to be resumed."""
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


def _eigenvalue_evaluator(
    problem: Problem, plane: Plane, search_options: SearchOptions, hessian_options: HessianOptions,
    search: str, block: int,
) -> Callable[[Tensor, Progress], dict[str, Array]]:  # fmt: skip
    """Return the function from points (K, 2) to the columns of the result at these points.

    All searches start from the same random vector. (From a neighbor's eigenvectors, they took 15% fewer
    products on MNIST's MLP, but missed the lowest eigenvalue at some points.) The searches of a ``block`` of
    points share passes over the data.
    """
    start = start_vector(problem, plane.seed)

    def evaluate(points: Tensor, progress: Progress) -> dict[str, Array]:
        searches = []  # the search result at each point
        largest_share = 0.0

        def advance(share: float) -> None:
            """Report a share, unless another search of the block has reported a larger one."""
            nonlocal largest_share
            largest_share = max(largest_share, share)
            progress(largest_share)

        for first in range(0, len(points), block):
            block_points = points[first : first + block].to(plane.directions)
            weights = plane.center + block_points @ plane.directions
            report = portion(advance, first / len(points), (first + len(weights)) / len(points))
            block_options = dataclasses.replace(search_options, progress=report)
            searches += eigenpairs(problem, weights, start, block_options, hessian_options, search=search)
        columns = ends_of(searches)  # λ_min, λ_max and their residuals
        for name in ("products", "converged"):
            columns[name] = np.array([getattr(point_search, name) for point_search in searches])
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["ratio"] = np.abs(columns["lambda_min"]) / np.abs(columns["lambda_max"])
        return columns

    return evaluate

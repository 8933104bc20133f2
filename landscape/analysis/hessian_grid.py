"""Both ends of the Hessian's spectrum on a grid over a plane."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.contour import axes, check_plane, grid_points
from landscape.core.hdf5 import Array
from landscape.core.memory import bounded
from landscape.core.options import expect
from landscape.core.progress import Progress
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import eigenpairs, points_at_once
from landscape.curvature.hessian import HessianOptions
from landscape.curvature.krylov import start_vector
from landscape.curvature.lanczos import MAX_PRODUCTS, TOL, SearchOptions, ends_of
from landscape.evaluation import needs
from landscape.evaluation.adaptive import Tolerance
from landscape.evaluation.filling import complete, meets
from landscape.evaluation.grid import (
    MismatchError,
    Portions,
    Workers,
    changed,
    copy_common,
    difference,
    provenance,
    setting,
)
from landscape.problem.batchnorm import SAMPLES
from landscape.problem.layout import as_array
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.grids import HessianGrid, Plane

if TYPE_CHECKING:
    import torch.distributed as dist

VALUES = ("lambda_min", "lambda_max", "ratio")
RESIDUALS = ("residual_min", "residual_max")


def _another(previous: HessianGrid, wanted: dict[str, Any], dtype: torch.dtype) -> str:
    """The first difference of ``previous`` from the fields ``wanted``, in words; "" if there is none."""
    exact = {k: v for k, v in wanted.items() if k not in ("max_products", "provenance")}
    return difference(previous, exact) or changed(previous.provenance, wanted["provenance"], dtype)


@numerics(1)
@bounded(needs.hessian_grid)
def hessian_grid(
    problem: Problem,
    plane: Plane,
    grid: int | tuple[int, int] = (4, 4),
    span: float | None = None,
    *,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
    search: str = "auto",
    bn: str = "center",
    bn_samples: int = SAMPLES,
    tolerance: str | float | None = None,
    previous: HessianGrid | None = None,
    save: Callable[[HessianGrid], None] | None = None,
    group: dist.ProcessGroup | None = None,
    cluster: Workers | None = None,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> HessianGrid:
    """Both ends of the Hessian's spectrum at each point of an (nx, ny) grid over ``plane``.

    Args:
        problem: the loss.
        plane: centre and directions, such as :func:`landscape.random_plane` gives.
        grid, span: 4 × 4 points over x, y ∈ [−0.1, 0.1] by default (DPSGD-2020, section 4.1), over more if
            the plane has markers further out (``plane.span``). One number: the same for both axes.
        tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to zero.
        max_products: Hessian-vector products a point, at most.
        search: "auto" may search with cheaper products, whose results are verified and refined with exact
            ones; "exact": all products are exact.
        bn, bn_samples: whose statistics BatchNorm uses, as for :func:`landscape.contour`.
        tolerance: as for :func:`landscape.contour`, of λ_min, λ_max and the ratio alike. It pays for grids
            finer than about 20 × 20, and should not be below ``tol``.
        previous: a result of the same problem and plane, unfinished or on another grid: the points in common
            are not computed again, except those that did not converge with another ``max_products``. If these
            are all, or within the tolerance, it is returned itself.
        save: called with the unfinished result about every ten seconds.
        group: a torch.distributed group whose processes all make this call, each for its part of the points;
            all return the whole result, and its first one saves.
        cluster: a :class:`landscape.Cluster`, whose workers compute the points, in place of a group. The
            problem is pickled and sent to them.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        lambda_min, lambda_max, their residuals, ratio = |λ_min|/|λ_max|, hvps and converged, (ny, nx) each.

    Raises:
        InputError: a grid below 1, a span, tol or max_products that is not positive, or a tolerance that is
            not allowed.
        MismatchError: an InputError, for a ``previous`` of a different model, plane or setting.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> grid = landscape.hessian_grid(problem, landscape.random_plane(problem), grid=(2, 1))
        >>> grid.lambda_max.round(4).tolist()  # the same everywhere: the loss is quadratic
        [[9.0, 9.0]]
    """
    expect("problem", problem, Problem)
    check_plane(problem, plane)
    span = plane.span if span is None else span
    x, y = axes(grid, span)
    allowed = None if tolerance is None else Tolerance.parse(tolerance, problem.dtype)
    wanted = SearchOptions(1, 1, tol, max_products)
    problem = problem.with_batchnorm(bn, bn_samples)
    fields = _fields(problem, plane, wanted, search)
    columns = {name: np.full((len(y), len(x)), np.nan) for name in (*VALUES, *RESIDUALS)}
    columns |= {
        name: np.zeros((len(y), len(x)), kind) for name, kind in (("hvps", np.int64), ("converged", bool))
    }
    done = np.zeros((len(y), len(x)), bool)
    if previous is not None:
        expected = {k: v for k, v in about.items() if k in ("source_sha256", "split")} | fields
        if reason := _another(previous, expected, problem.dtype):
            raise MismatchError(reason)
        # With other limits a point that did not converge is searched again.
        usable = previous.done & (previous.converged | (previous.max_products == max_products))
        same = np.array_equal(x, previous.x) and np.array_equal(y, previous.y)
        if same and np.array_equal(usable, previous.done) and meets(previous, allowed):
            return previous
        old = [(column, getattr(previous, name)) for name, column in columns.items()]
        copy_common((x, y), (previous.x, previous.y), [*old, (done, usable)])
        for name in VALUES:
            columns[name][~done] = np.nan  # what was interpolated

    def result() -> HessianGrid:
        copies: dict[str, Any] = {name: column.copy() for name, column in columns.items()}
        return HessianGrid(x=x, y=y, span=span, done=done.copy(), **copies, **fields, **about)

    at_once = points_at_once(problem)
    ends = _ends_at(problem, plane, wanted, HessianOptions(), search, at_once)
    portions = Portions(
        block=at_once,
        save=(lambda: save(result())) if save else None,
        group=group,
        cluster=cluster,
        progress=progress,
    )
    fields |= complete(grid_points(x, y), done, columns, ends, portions, allowed, VALUES, seed=plane.seed)
    return result()


def _fields(problem: Problem, plane: Plane, wanted: SearchOptions, search: str) -> dict[str, Any]:
    """The fields of a result that must be equal for it to be resumed, but for ``max_products``."""
    digest = hashlib.sha256(as_array(plane.center).tobytes())
    digest.update(as_array(plane.directions).tobytes())
    return {
        "kind": plane.kind,
        "norm": plane.norm,
        "seed": plane.seed,
        "tol": wanted.tol,
        **setting(problem),
        "search": search,
        "max_products": wanted.max_products,
        "randomness": problem.randomness,
        "provenance": provenance(problem),
        "plane_sha256": digest.hexdigest(),
    }


def _ends_at(
    problem: Problem, plane: Plane, wanted: SearchOptions, options: HessianOptions, search: str, at_once: int
) -> Callable[[Tensor, Progress], dict[str, Array]]:
    """(K, 2) points -> the columns of the result there, ``at_once`` points together.

    Each point starts from the same random vector. A start from the neighbour's eigenvectors plus a random
    part took 15% fewer products on MNIST's MLP, but ended at eigenvalues near the lowest, up to 1.9% off. The
    points share samples and passes over the data in fixed blocks, whatever the portions and processes.
    """
    start = start_vector(problem, plane.seed)

    def ends(points: Tensor, progress: Progress) -> dict[str, Array]:
        pairs, count = [], 0

        def one() -> None:
            nonlocal count
            count += 1
            progress(count / len(points))

        for i in range(0, len(points), at_once):
            thetas = plane.center + points[i : i + at_once].to(plane.directions) @ plane.directions
            pairs += eigenpairs(problem, thetas, start, wanted, options, search=search, done=one)
        rows = [ends_of(each) for each in pairs]
        names = {"lambda_min": "min", "lambda_max": "max"} | {
            name: name for name in (*RESIDUALS, "hvps", "converged")
        }
        columns = {name: np.array([getattr(row, key) for row in rows]) for name, key in names.items()}
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["ratio"] = np.abs(columns["lambda_min"]) / np.abs(columns["lambda_max"])
        return columns

    return ends

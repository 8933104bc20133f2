"""Both ends of the Hessian's spectrum on a grid over a plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from landscape.contour import axes, grid_points
from landscape.directions import Plane
from landscape.eigenvalues import eigenpairs, points_at_once, start_vector
from landscape.evaluate import Progress
from landscape.hessian import operator
from landscape.lanczos import MAX_PRODUCTS, TOL, Eigenpairs, ends_of
from landscape.problem import Problem
from landscape.store import About, Array, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HessianGrid(Result):
    """λ_min, λ_max and ratio |λ_min|/|λ_max| (ny, nx) of the Hessian on a grid, as in DPSGD-2020, Figure 4.

    A low ratio means a nearly convex region, a high one a saddle. Residuals, product counts (hvps) and the
    converged flags belong to each point; ``ratio`` is infinite where λ_max is 0.
    """

    schema: ClassVar[str] = "landscape.hessian_grid"

    x: Array
    y: Array
    lambda_min: Array
    lambda_max: Array
    ratio: Array
    residual_min: Array
    residual_max: Array
    hvps: Array
    converged: Array
    kind: str
    norm: str
    seed: int
    span: float
    tol: float
    samples: int
    dtype: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    search: str = ""  # what the search multiplied with; values and residuals are exact

    def __post_init__(self) -> None:
        shape = (len(self.y), len(self.x))
        if not self.lambda_min.shape == self.lambda_max.shape == self.ratio.shape == shape:
            raise ValueError(f"lambda_min, lambda_max and ratio must have shape {shape}")

    def plot(self, **options: Any) -> Figure:
        """A heatmap of the ratio; see :func:`landscape.plots.hessian_grids`."""
        from landscape import plots  # numerics import no matplotlib until a picture is asked for

        return plots.hessian_grids([self], **options)


def hessian_grid(
    problem: Problem,
    plane: Plane,
    grid: tuple[int, int] = (4, 4),
    span: float = 0.1,
    *,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
    randomness: str = "refuse",
    search: str = "auto",
    progress: Progress | None = None,
    **about: Unpack[About],
) -> HessianGrid:
    """Both ends of the spectrum at each point of an (nx, ny) grid over ``plane``.

    4 × 4 points over [−0.1, 0.1] by default (DPSGD-2020, section 4.1). ``randomness`` as in
    :class:`landscape.HessianOperator`, ``search`` as in :func:`landscape.extreme_eigenvalues`, ``about``
    as in :func:`landscape.contour`. Raises InputError for a grid below 1, a span, tol or max_products that
    is not positive, or a model that is random in eval mode.
    """
    x, y = axes(grid, span)
    points = grid_points(x, y)
    operator(problem, randomness=randomness)  # refuses a random model
    # Every point starts from the same random vector. Starting from the neighbour's eigenvectors plus a random
    # part took 15% fewer products on MNIST's MLP, but settled on eigenvalues near the lowest, up to 1.9% off.
    start, found = start_vector(problem, plane.seed), 0
    pairs: list[Eigenpairs] = []

    def done() -> None:
        nonlocal found
        found += 1
        if progress:
            progress(min(found / len(points), 1.0))

    at_once = points_at_once(problem)
    for i in range(0, len(points), at_once):
        thetas = plane.center + points[i : i + at_once].to(plane.directions) @ plane.directions
        pairs += eigenpairs(
            problem, thetas, start, low=1, high=1, tol=tol, max_products=max_products,
            randomness=randomness, how=search, done=done,
        )  # fmt: skip
    ends = [ends_of(p) for p in pairs]
    shape = (len(y), len(x))
    low, high = (np.array([getattr(e, end) for e in ends]).reshape(shape) for end in ("min", "max"))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(low) / np.abs(high)
    return HessianGrid(
        x=x,
        y=y,
        lambda_min=low,
        lambda_max=high,
        ratio=ratio,
        residual_min=np.array([e.residual_min for e in ends]).reshape(shape),
        residual_max=np.array([e.residual_max for e in ends]).reshape(shape),
        hvps=np.array([e.hvps for e in ends]).reshape(shape),
        converged=np.array([e.converged for e in ends]).reshape(shape),
        kind=plane.kind,
        norm=plane.norm,
        seed=plane.seed,
        span=span,
        tol=tol,
        samples=problem.samples,
        dtype=str(problem.dtype).removeprefix("torch."),
        search="; ".join(sorted({e.search for e in ends})),
        **about,
    )

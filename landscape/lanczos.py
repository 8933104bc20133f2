"""Both ends of the Hessian's spectrum from one Lanczos run, each with its residual; and on a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.contour import axes, grid_points
from landscape.directions import Plane
from landscape.evaluate import Progress
from landscape.hessian import HessianOperator
from landscape.options import positive
from landscape.problem import Problem
from landscape.store import About, Array, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Basis vectors kept before a restart, unless P or the memory below says fewer. MNIST's MLP needs 40 to 90.
MAX_BASIS = 128
BASIS_BYTES = 2**30
# ARPACK and its peers stop at a residual relative to the eigenvalue; 1% is what a heatmap can show (DESIGN).
TOL = 1e-2
MAX_PRODUCTS = 1000
# An end smaller than this share of the spectral radius is zero to any eye, and may be zero exactly (ours).
NEAR_ZERO = 1e-3


@dataclass(frozen=True)
class Ends:
    """The algebraically smallest and the largest eigenvalue, with unit eigenvectors (2, P) in that order.

    ``residual_*`` is ‖Hv − λv‖, from a product of its own, so that rounding is in it: an eigenvalue of H
    lies within that distance of λ. ``converged`` says whether both met the tolerance. ``hvps`` counts the
    Hessian-vector products, the two for the residuals included.
    """

    min: float
    max: float
    residual_min: float
    residual_max: float
    hvps: int
    converged: bool
    vectors: Tensor


def lanczos_ends(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
) -> Ends:
    """Both ends of the spectrum of the symmetric operator ``product`` on vectors like ``start`` (P,).

    Lanczos with full reorthogonalisation, restarted thickly (Wu & Simon 2000) when the basis is full: the
    Ritz vectors nearest both ends are kept. It stops when the Ritz residual of each end is at most tol·|λ|,
    or tol·max|λ|/1000 for an end nearer to zero than that; an invariant subspace counts as converged.
    (Power iteration, by contrast, returns the largest *magnitude*.)
    """
    positive("tol", tol)
    size = len(start)
    basis = max(4, min(size, MAX_BASIS, BASIS_BYTES // (size * start.itemsize)))
    vectors = torch.zeros(min(basis, size) + 1, size, dtype=start.dtype, device=start.device)
    vectors[0] = start / start.norm()
    eps = torch.finfo(start.dtype).eps
    t = np.zeros((len(vectors), len(vectors)))
    j, done, products = 0, False, 0
    while True:
        w = product(vectors[j])
        products += 1
        coefficients = torch.zeros(j + 1, dtype=start.dtype, device=start.device)
        for _ in range(2):  # twice is enough (Kahan and Parlett) for orthogonality to rounding
            c = vectors[: j + 1] @ w
            w = w - vectors[: j + 1].T @ c
            coefficients += c
        t[: j + 1, j] = t[j, : j + 1] = coefficients.double().cpu().numpy()
        beta = float(w.norm())
        values, s = np.linalg.eigh(t[: j + 1, : j + 1])
        radius = float(np.abs(values).max())
        exhausted = beta <= 10 * eps * max(radius, np.finfo(float).tiny) or j + 1 == size
        residuals = beta * np.abs(s[-1, [0, -1]])
        done = exhausted or bool(
            np.all(residuals <= tol * np.maximum(np.abs(values[[0, -1]]), NEAR_ZERO * radius))
        )
        if done or products >= max_products:
            break
        if j + 1 == len(vectors) - 1:
            keep = max(1, (j + 1) // 4)
            ends = list(range(keep)) + list(range(j + 1 - keep, j + 1))
            mix = torch.from_numpy(s[:, ends]).to(start)
            vectors[: len(ends)] = mix.T @ vectors[: j + 1]
            t[:] = 0
            t[range(len(ends)), range(len(ends))] = values[ends]
            j = len(ends) - 1  # the next product fills in the arrow of couplings by itself
        vectors[j + 1] = w / beta
        j += 1
    pair = torch.from_numpy(s[:, [0, -1]]).to(start).T @ vectors[: j + 1]
    pair /= pair.norm(dim=1, keepdim=True)
    lowest, highest = float(values[0]), float(values[-1])
    low, high = (float((product(v) - x * v).norm()) for v, x in zip(pair, (lowest, highest), strict=True))
    return Ends(lowest, highest, low, high, products + 2, done, pair)


def start_vector(problem: Problem, seed: int) -> Tensor:
    """A normal vector (P,) from ``seed``, the same on every device: Lanczos needs one with all components."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.layout.size, dtype=torch.float64, generator=generator).to(problem.theta)


def extreme_eigenvalues(
    problem: Problem,
    tol: float = TOL,
    *,
    theta: Tensor | None = None,
    max_products: int = MAX_PRODUCTS,
    seed: int = 0,
) -> Ends:
    """λ_min and λ_max of ∇²L(θ) over all of the problem's data, θ (P,) by default the centre.

    ``tol`` bounds each residual relative to its eigenvalue; see :func:`lanczos_ends`. ``seed`` draws the
    starting vector. Where ``max_products`` run out first, ``converged`` is False and the residuals say
    how far it got.
    """
    operator = HessianOperator(problem, theta)
    return lanczos_ends(operator, start_vector(problem, seed), tol=tol, max_products=max_products)


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
    progress: Progress | None = None,
    **about: Unpack[About],
) -> HessianGrid:
    """Both ends of the spectrum at each point of an (nx, ny) grid over ``plane``.

    4 × 4 points over [−0.1, 0.1] by default (DPSGD-2020, section 4.1). ``about`` as in
    :func:`landscape.contour`. Raises InputError for a grid below 1, a span or a tol that is not positive.
    """
    x, y = axes(grid, span)
    points = grid_points(x, y).tolist()
    start, ends = start_vector(problem, plane.seed), []
    for k, (a, b) in enumerate(points):
        theta = torch.add(plane.center, plane.directions[0], alpha=a).add_(plane.directions[1], alpha=b)
        operator = HessianOperator(problem, theta)
        ends.append(lanczos_ends(operator, start, tol=tol, max_products=max_products))
        if progress:
            progress((k + 1) / len(points))
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
        **about,
    )

"""Eigenvalues, trace and density of the Hessian at one vector of weights, and limits of stability."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.memory import Need, bounded
from landscape.core.options import choose, positive
from landscape.core.progress import Progress, ProgressOption, portion, shows_progress
from landscape.core.registry import numerics
from landscape.curvature.eigenvalues import Matrix, ends_need, top_need
from landscape.curvature.hessian import Part, Preconditioner
from landscape.curvature.operators import SymmetricMatrix
from landscape.curvature.search import MAX_PRODUCTS, RESIDUAL_TOL, SearchOptions
from landscape.curvature.trace import (
    DRAWS,
    STEPS,
    TRACE_PRODUCTS,
    density_need,
    density_of,
    trace_need,
    trace_of,
)
from landscape.evaluation import needs
from landscape.problem.problem import Problem, Run
from landscape.results.base import Provenance
from landscape.results.spectrum import QUANTITIES, Eigenpairs, MatrixResult, Spectrum


def _spectrum_need(problem: Any, k: Any, quantities: Any, **options: Any) -> Need:
    """The largest of what was asked for, and the start that these share."""
    several = max(needs.count(k), 1 + ("extremes" in quantities))
    asked = [top_need(problem, several, **options)] if k or "trace" not in quantities else []
    counts = dict[str, Callable[..., Need]](extremes=ends_need, trace=trace_need, density=density_need)
    asked += [counts[name](problem, **options) for name in QUANTITIES if name in quantities]
    return max(asked, key=lambda need: need.fixed)


@numerics(1)
@bounded(_spectrum_need)
@shows_progress("a smaller k= or draws= or a part of the data")
def spectrum(
    problem: Problem | Run | SymmetricMatrix,
    k: int = 0,
    *,
    quantities: Sequence[Literal["extremes", "trace", "density"]] = (),
    matrix: str = "hessian",
    part: Part = None,
    derivatives: str = "auto",
    precondition: Preconditioner | Tensor | None = None,
    engine: str = "landscape",
    search: str = "auto",
    residual_tol: float = RESIDUAL_TOL,
    max_products: int = MAX_PRODUCTS,
    products: int = TRACE_PRODUCTS,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
    max_memory: int | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Spectrum:
    """Eigenvalues, trace and density of ∇²L at the problem's centre, in one result that can be saved.

    Args:
        problem: the loss, a run, or any symmetric matrix, as in :func:`landscape.extreme_eigenvalues`.
        k: how many of the largest eigenvalues.
        quantities: what is computed besides: "extremes", the smallest and the largest eigenvalue, from the
            same Lanczos run as the largest; "trace", by Hutch++ (Meyer et al. 2021); "density", by stochastic
            Lanczos quadrature (Ghorbani et al. 2019). The default is "extremes" if ``k`` is 0.
        products: Hessian-vector products for the trace.
        draws, steps: random vectors for the density, and products for each.
        matrix: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        precondition: P, a positive diagonal (P,), or what :func:`landscape.preconditioner` makes of a
            checkpoint: all is then of P^{-1/2} H P^{-1/2}, by exact products.
        engine: "pyhessian" gives one eigenvalue, that of largest magnitude, and the trace; no more.
        search: "auto" may search eigenvalues with cheaper products, whose results are verified and refined
            with exact ones; "exact": all products are exact. Trace and density are always exact.
        residual_tol: the largest residual ‖Hv − λv‖ relative to |λ|, or to max|λ|/1000 for a λ nearer to
            zero.
        max_products: Hessian-vector products for the eigenvalues, at most.
        seed: draws the starting vector, the signs and the random vectors.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        values and residuals (k,), trace, trace_error, nodes and masses (draws, steps).

    Raises:
        InputError: a count, tolerance or option that is not allowed, a preconditioner that is not positive or
            of another length, an option that pyhessian does not have, or an operator that is not symmetric.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.spectrum(problem, quantities=("extremes", "trace"))
        >>> result.values.round(3).tolist(), round(result.trace, 3)
        ([9.0, 1.0], 10.0)
    """
    positive("k", k, least=0)
    positive("residual_tol", residual_tol)
    external = engine == "pyhessian"
    wanted = {choose("quantities", name, QUANTITIES) for name in quantities}
    if not (k or wanted):
        k, wanted = (1, set()) if external else (0, {"extremes"})
    if external and (foreign := [name for name in QUANTITIES if name in wanted - {"trace"}]):
        raise InputError(
            f"engine: 'pyhessian' is not allowed with {foreign[0]}, it gives the eigenvalue of largest "
            "magnitude (k=1) and the trace"
        )
    own = {"weights": None, "matrix": matrix, "part": part, "derivatives": derivatives, "search": search}
    other = {"max_memory": max_memory, "engine": engine, "precondition": precondition}
    chosen = Matrix.of(problem, seed, about, **own, **other)
    low = int("extremes" in wanted)
    high = max(k, low)
    asked = [high > 0, "trace" in wanted, "density" in wanted]

    def stage(part: int) -> Progress:
        """The progress of a part, each an equal share of what was asked for."""
        return portion(progress, sum(asked[:part]) / sum(asked), (sum(asked[:part]) + 1) / sum(asked))

    parts: list[MatrixResult] = []
    if asked[0]:
        options = SearchOptions(low, high, residual_tol, max_products, stage(0))
        parts.append(Eigenpairs(**chosen.search(chosen.start(), options, search)))
        stage(0)(1.0)
    if asked[1]:
        parts.append(trace_of(chosen, products, stage(1)))
    if asked[2]:
        parts.append(density_of(chosen, draws, steps, stage(2)))
    return dataclasses.replace(Spectrum.of(*parts), residual_tol=residual_tol)

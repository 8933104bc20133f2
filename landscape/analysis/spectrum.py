"""Eigenvalues, trace and density of the Hessian at one vector of weights, as one result."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from landscape.core.errors import InputError
from landscape.core.options import choose, positive
from landscape.curvature import pyhessian_engine
from landscape.curvature.density import PROBES, STEPS, quadrature
from landscape.curvature.eigenvalues import eigenpairs, exact_products, start_vector, top_eigenvalues
from landscape.curvature.hessian import Part
from landscape.curvature.lanczos import MAX_PRODUCTS, TOL
from landscape.curvature.trace import TRACE_PRODUCTS, hutchpp, trace
from landscape.evaluation.paths import Progress
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.spectrum import Spectrum, Trace


def spectrum(
    problem: Problem,
    top_k: int = 0,
    *,
    ends: bool = False,
    with_trace: bool = False,
    with_density: bool = False,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    engine: str = "landscape",
    search: str = "auto",
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
    products: int = TRACE_PRODUCTS,
    probes: int = PROBES,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Spectrum:
    """What is asked about the spectrum of ∇²L at the problem's centre, in one result that can be saved.

    Args:
        top_k: how many of the largest eigenvalues; ends: the smallest and the largest; both come from one
            Lanczos run. Both ends where nothing at all is asked.
        with_trace, with_density: see :func:`trace` (``products``), :func:`density` (``probes``, ``steps``).
        kind, part, randomness: see :class:`landscape.HessianOperator`.
        engine: "pyhessian" gives one eigenvalue, that of largest magnitude, and the trace; no more.
        tol, max_products, seed, search: see :func:`extreme_eigenvalues`. Trace and density are always exact.
        about: see :class:`landscape.results.base.Provenance`; kept with the result.

    Raises InputError as these do.
    """
    positive("top_k", top_k, least=0)
    choose("engine", engine, pyhessian_engine.ENGINES)
    outside = engine == "pyhessian"
    if not (top_k or ends or with_trace or with_density):
        top_k, ends = (1, False) if outside else (0, True)
    if outside and (ends or with_density):
        raise InputError(
            f"engine: 'pyhessian' is not allowed with {'ends' if ends else 'density'}, it gives "
            "the eigenvalue of largest magnitude (top_k=1) and the trace"
        )
    positive("tol", tol)
    of: dict[str, Any] = {"kind": kind, "part": part, "randomness": randomness}
    h, size = exact_products(problem, **of)
    start = start_vector(problem, seed, size)
    low, high = int(ends), max(top_k, int(ends))
    asked = {"pairs": high, "trace": with_trace, "density": with_density}
    stages = [name for name, wanted in asked.items() if wanted]

    def stage(name: str) -> Progress:
        place = stages.index(name)
        return lambda share: progress((place + share) / len(stages)) if progress else None

    pairs, traced, dense = None, Trace(np.nan, np.nan, 0), None
    if high:
        if outside:
            pairs = top_eigenvalues(
                problem, high, tol, engine=engine, max_products=max_products, seed=seed, **of
            )
        else:
            pairs = eigenpairs(
                problem, problem.theta[None], start, low=low, high=high, tol=tol,
                max_products=max_products, how=search, **of,
            )[0]  # fmt: skip
        stage("pairs")(1.0)
    if with_trace and outside:
        traced = trace(problem, products, engine=engine, seed=seed, **of)
    elif with_trace:
        traced = hutchpp(h, start, products=products, seed=seed, progress=stage("trace"))
    if with_density:
        dense = quadrature(h, start, probes=probes, steps=steps, seed=seed, progress=stage("density"))
    return Spectrum(
        values=pairs.values.numpy() if pairs else np.zeros(0),
        residuals=pairs.residuals.numpy() if pairs else np.zeros(0),
        lowest=low,
        converged=pairs.converged if pairs else True,
        trace=traced.value,
        trace_error=traced.standard_error,
        nodes=dense.nodes if dense else np.zeros((0, 0)),
        weights=dense.weights if dense else np.zeros((0, 0)),
        parameters=size,
        hvps=sum(found.hvps for found in (pairs, traced, dense) if found),
        kind=kind,
        part=",".join([part] if isinstance(part, str) else part or ()),
        engine=engine,
        search=pairs.search if pairs else "",
        tol=tol,
        seed=seed,
        samples=problem.samples,
        dtype=str(problem.dtype).removeprefix("torch."),
        batchnorm=has_batchnorm(problem.model),
        bn=problem.bn,
        bn_samples=problem.bn_samples,
        **dict(zip(("bound_low", "bound_high"), pairs.bounds if pairs else (-np.inf, np.inf), strict=True)),
        verified=pairs.verified if pairs else False,
        **about,
    )

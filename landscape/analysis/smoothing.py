"""The loss as learners that are spread out see it: averaged over displacements (DPSGD-2021, smoothing).

L_Σ(w) = E L(w + δ), δ ~ N(0, Σ). With Σ = n⁻¹ Σ_j Δw_jΔw_jᵀ, the measured spread, δ is n^(−1/2) Σ_j ξ_j Δw_j
with ξ_j independent and normal; beside it the isotropic Σ = σ²I of the same trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import FailedError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.curvature.chain_hessian import ChainHessian
from landscape.curvature.eigenvalues import (
    exact_products,
    points_at_once,
    start_vector,
    top_eigenvalues,
    warm_start,
)
from landscape.curvature.hessian import GRAPH_BYTES, HessianOperator
from landscape.curvature.lanczos import TOL, lanczos
from landscape.evaluation.paths import Progress
from landscape.problem.layout import average
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.smoothing import Smoothing

KINDS = ("measured", "isotropic")
# Antithetic pairs ±δ: standard errors to about 18%, 1/√(2·15) (ours).
PAIRS = 16
TOP = 5


def smoothing(
    problem: Problem,
    weights: Tensor,
    *,
    pairs: int = PAIRS,
    top: int = TOP,
    path: Tensor | None = None,
    lr: float = math.nan,
    alpha_e: float = math.nan,
    tol: float = TOL,
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Smoothing:
    """How the spread of learners at ``weights`` (n, P) smooths the loss of ``problem`` around their mean.

    Args:
        pairs: m ≥ 2 antithetic pairs ±δ, drawn from ``seed``.
        top: how many eigenvectors the spread is held against; at most P are taken.
        path: w_a at S + 1 successive steps, (S + 1, P), along which the gradient's Lipschitz constant is
            estimated.
        tol: residual of eigenvalues, relative to them; see :func:`landscape.top_eigenvalues`.

    Memory is that of :func:`landscape.top_eigenvalues` whatever m is, where the Hessians at all points do not
    fit in 1 GiB; a ``path`` takes 3m vectors of P numbers more.

    Raises InputError for fewer than 2 learners or pairs, FailedError where all learners agree.
    """
    positive("learners", len(weights), least=2)
    positive("pairs", pairs, least=2)
    positive("top", top, least=1)
    weights = weights.to(problem.device, problem.dtype)
    mean = average(weights)
    spread = weights - mean
    variance = float(spread.double().square().sum()) / len(weights)
    if not 0 < variance < math.inf:
        raise FailedError(
            f"weights: their consensus distance is {variance:g}, there is no spread to smooth by"
        )
    tell = progress or (lambda share: None)
    found = top_eigenvalues(problem, min(top, len(mean)), tol, theta=mean, seed=seed)
    products, _ = exact_products(problem, mean)
    along = (spread @ found.vectors.T).double().square().sum(0) / len(weights)
    bent = sum(float(s.double() @ products(s[None])[0].double()) for s in spread) / len(weights)
    steps = 0 if path is None else len(path) - 1
    route = mean[None] if path is None else path.to(mean)
    lengths = (route[1:] - route[:-1]).double().norm(dim=1)
    rough = [problem.gradient(w).double() for w in route] if steps else []
    columns: dict[str, list[Any]] = {name: [] for name in ("loss", "lambda", "lipschitz")}
    for k, kind in enumerate(KINDS):

        def shift(i: int, kind: str = kind) -> Tensor:
            return displacement(spread, kind, variance, seed, i)

        values = [[problem.loss(mean + sign * shift(i)) for sign in (1, -1)] for i in range(pairs)]
        columns["loss"].append(_mean(np.mean(values, axis=1)))
        columns["lambda"].append(_sharpest(problem, mean, shift, pairs, found.vectors[0], tol, seed))
        columns["lipschitz"].append(_lipschitz(problem, route, lengths, shift, pairs))
        tell((k + 1) / len(KINDS))
    changes = [float((b - a).norm()) for a, b in itertools.pairwise(rough)]
    loss, sharp, slope = (np.array(columns[name]) for name in ("loss", "lambda", "lipschitz"))
    return Smoothing(
        loss=problem.loss(mean),
        loss_smooth=loss[:, 0],
        loss_smooth_se=loss[:, 1],
        lambda_max=float(found.values[0]),
        residual=float(found.residuals[0]),
        lambda_smooth=sharp[:, 0],
        lambda_smooth_residual=sharp[:, 1],
        lambda_smooth_se=sharp[:, 2],
        lambda_smooth_bias=sharp[:, 3],
        eigenvalues=found.values.numpy(),
        share=(along / variance).cpu().numpy(),
        trace_hs=bent,
        consensus=variance,
        lipschitz=np.array(changes) / lengths.cpu().numpy(),
        lipschitz_smooth=slope[:, 0],
        lipschitz_smooth_se=slope[:, 1],
        lr=lr,
        alpha_e=alpha_e,
        parameters=len(mean),
        learners=len(weights),
        pairs=pairs,
        samples=problem.samples,
        seed=seed,
        converged=bool(found.converged) and bool(np.all(sharp[:, 4])),
        **about,
    )


def displacement(spread: Tensor, kind: str, variance: float, seed: int, i: int) -> Tensor:
    """δ_i (P,) ~ N(0, Σ): Σ = n⁻¹ ΣΔw_jΔw_jᵀ of ``spread`` (n, P), or isotropic with trace ``variance``.

    Drawn anew at each call, the same for the same ``seed`` and i, so that none has to be kept.
    """
    entropy = np.random.SeedSequence((seed, KINDS.index(kind), i)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(entropy[0]))
    size = spread.shape[0] if kind == "measured" else spread.shape[1]
    xi: Tensor = torch.randn(size, dtype=torch.float64, generator=generator).to(spread)
    xi /= size**0.5
    return torch.mv(spread.T, xi) if kind == "measured" else xi * variance**0.5


def _mean(values: Array) -> tuple[float, float]:
    """(mean, its standard error) of independent ``values``."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _sharpest(
    problem: Problem,
    mean: Tensor,
    shift: Callable[[int], Tensor],
    pairs: int,
    near: Tensor,
    tol: float,
    seed: int,
) -> tuple[float, float, float, float, bool]:
    """(λ_max, residual, standard error, bias, converged) of the mean of ∇²L(mean ± δ_i) over the pairs."""
    kept = ChainHessian.kept_bytes(problem)
    size = 1 if kept is None else max(1, points_at_once(problem) // 2)
    groups = [range(i, min(i + size, pairs)) for i in range(0, pairs, size)]
    hold = kept is not None and 2 * pairs * kept <= GRAPH_BYTES

    def group(rows: range) -> Callable[[Tensor], Tensor]:
        """v (P,) ↦ the products (rows, P), each the mean of those at its pair of points."""
        points = torch.stack([mean + sign * shift(i) for i in rows for sign in (1, -1)])
        if kept is not None:
            many = ChainHessian(problem, points)
            return lambda v: many(v.expand(len(points), -1)).view(len(rows), 2, -1).mean(1)
        ends = [HessianOperator(problem, point, graph_bytes=0) for point in points]
        return lambda v: ((ends[0](v) + ends[1](v)) / 2)[None]

    held = [group(rows) for rows in groups] if hold else None

    def each(v: Tensor) -> Iterator[Tensor]:
        """The products (P,) of the pairs, in order."""
        for k, rows in enumerate(groups):
            yield from (held[k] if held else group(rows))(v)

    def product(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for one in each(v):
            total += one
        return total / pairs

    found = lanczos(product, warm_start(near, start_vector(problem, seed)), tol=tol)
    v, value = found.vectors[0], float(found.values[0])
    centre, along, across = product(v), np.zeros(pairs), 0.0
    for i, one in enumerate(each(v)):
        away = one - centre
        along[i] = part = float(v.double() @ away.double())
        across += float(away.double().square().sum()) - part**2
    bias = max(0.0, across) / (pairs * (pairs - 1)) / abs(value) if value else math.nan
    return value, float(found.residuals[0]), _mean(along)[1], bias, found.converged


def _lipschitz(
    problem: Problem, route: Tensor, lengths: Tensor, shift: Callable[[int], Tensor], pairs: int
) -> tuple[Array, Array]:
    """‖Δ∇L_Σ‖/‖Δw‖ of each step of ``route`` (S + 1, P) and its standard error, (S,) each.

    The error is that of the part along the mean difference of gradients; where it is of the norm's size, the
    norm is too large.
    """
    values, errors = np.zeros(len(lengths)), np.zeros(len(lengths))
    if not len(lengths):
        return values, errors
    shifts = range(pairs)

    def smooth(w: Tensor, i: int) -> Tensor:
        d = shift(i)
        return ((problem.gradient(w + d) + problem.gradient(w - d)) / 2).double()

    before = [smooth(route[0], i) for i in shifts]
    for t in range(len(lengths)):
        after = [smooth(route[t + 1], i) for i in shifts]
        changes = [b - a for a, b in zip(before, after, strict=True)]
        change = torch.stack(changes).mean(0)
        norm = float(change.norm())
        parts = np.array([float(c @ change) / norm if norm else 0.0 for c in changes])
        values[t], errors[t] = norm / float(lengths[t]), _mean(parts)[1] / float(lengths[t])
        before = after
    return values, errors

"""How the noise of minibatch gradients lies in the curvature of the loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core import statistics
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import bounded
from landscape.core.options import expect, positive
from landscape.core.progress import Progress, portion
from landscape.core.statistics import standard_error
from landscape.curvature.eigenvalues import Products, exact_products, top_eigenvalues
from landscape.curvature.lanczos import TOL as EIGEN_TOL
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import Minibatches, stream
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.noise import NoiseAlignment

# The number of outliers in the spectrum of a classifier with ten classes (Gur-Ari et al. 2018).
TOP_K = 10
# A relative standard error of 5% in at most 256 draws, not judged before the 32nd (ours: an error from fewer
# is itself wrong by an eighth).
TOL, DRAWS, FEWEST = 0.05, 256, 32
# Minibatches whose gradients and products are computed at once (ours: as many products as a trace takes).
BLOCK = 8


@bounded(needs.noise_alignment)
def noise_alignment(
    problem: Problem,
    batch: int,
    top_k: int = TOP_K,
    *,
    tol: float = TOL,
    max_draws: int = DRAWS,
    search: str = "auto",
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> NoiseAlignment:
    """tr(HS)/tr S of minibatch gradients, their covariance by eigenvector of H, and γ in C_ii ∝ λ_i^γ.

    S is the second moment of the gradients of minibatches drawn with replacement, C their covariance around
    the gradient g of all samples, H the Hessian over all samples. tr(HS)/tr S is the interaction-aware
    sharpness of "A new characterization of the edge of stability" (2022). The exponent is that of
    arXiv 2602.05600, which finds 1 ≤ γ ≤ 2 in fully connected layers, each by itself; here it is of all
    parameters, in the basis of H's top eigenvectors (ours). BatchNorm takes each minibatch's statistics, as
    in training; H and g are then means over minibatches of that size, without a smaller last one, and g_B
    has a mean that differs a little from g.

    Args:
        problem: the loss on the training set.
        batch: B, samples in a minibatch.
        top_k: k, the number of eigenvectors; at most P.
        tol: draws go on until the standard error of tr(HS)/tr S is this share of it…
        max_draws: …or until there are so many; at least 2. Each takes a minibatch gradient and a Hessian
            product.
        search: "auto" or "exact", as in :func:`landscape.top_eigenvalues`.
        seed: draws the minibatches and the start of the search of eigenvalues.
        max_memory: bytes that the process may take, at most.
        progress: called with an estimate of the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        ``value`` and ``standard_error`` of tr(HS)/tr S, C_ii (k,) and γ with their errors.

    Raises:
        InputError: a number that is not allowed, or a penalty.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.ones(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.noise_alignment(problem, 1, 2)
        >>> bool(1 <= result.value <= 9)  # H has these eigenvalues
        True
    """
    expect("problem", problem, Problem)
    positive("batch", batch, least=1)
    positive("top_k", top_k, least=1)
    positive("tol", tol)
    positive("max_draws", max_draws, least=2)
    if problem.regularised:
        raise InputError(
            "penalty: the noise is of the data's minibatches, leave out penalty and weight_decay"
        )
    minibatches = Minibatches(problem, batch, stream(seed, 0))
    problem, parts = minibatches.whole, iter(minibatches)
    pairs = top_eigenvalues(
        problem, top_k, EIGEN_TOL, search=search, seed=seed, progress=portion(progress, 0, 0.5)
    )
    products, _ = exact_products(problem)
    terms = _Terms(problem, products, pairs.vectors)
    rows = np.zeros((0, 4 + top_k))
    reached, drawing = False, portion(progress, 0.5, 1)
    while len(rows) < max_draws and not reached:
        block = itertools.islice(parts, min(BLOCK, max_draws - len(rows)))
        rows = np.concatenate([rows, terms.of([part for (part,) in block])])
        ias, ias_error = statistics.ratio(rows[:, 0], rows[:, 1])
        reached = len(rows) >= FEWEST and ias_error <= tol * abs(ias)
        if drawing:
            drawing(1.0 if reached else len(rows) / max_draws)
    noise, noise_error = statistics.ratio(rows[:, 2], rows[:, 3])
    values = pairs.values.numpy()
    covariance = rows[:, 4:].mean(0)
    gamma, gamma_error, scatter = exponent(values, rows[:, 4:])
    return NoiseAlignment(
        values=values,
        residuals=pairs.residuals.numpy(),
        covariance=covariance,
        covariance_error=np.array([standard_error(column) for column in rows[:, 4:].T]),
        ias=ias,
        ias_error=ias_error,
        estimates=statistics.ratio_estimates(rows[:, 0], rows[:, 1]),
        noise_curvature=noise,
        noise_curvature_error=noise_error,
        trace_s=float(rows[:, 1].mean()),
        trace_c=float(rows[:, 3].mean()),
        grad_norm2=float(terms.gradient.square().sum()),
        gamma=gamma,
        gamma_error=gamma_error,
        gamma_scatter=scatter,
        batch=batch,
        draws=len(rows),
        reached=reached,
        parameters=problem.layout.size,
        hvps=pairs.hvps + len(rows) + 1,
        converged=pairs.converged,
        tol=tol,
        seed=seed,
        **setting(problem),
        **about,
    )


def exponent(values: Array, squares: Array) -> tuple[float, float, float]:
    """(γ, its jackknife error, its error from the scatter) of C_ii ∝ λ_i^γ.

    Args:
        values: (k,), λ_i; those that are not positive are left out.
        squares: (draws, k), squared deviations along each eigenvector, whose means are C_ii.

    Example:
        >>> gamma, error, scatter = exponent(np.array([4.0, 2.0, 1.0]), np.array([[16.0, 4, 1], [32, 8, 2]]))
        >>> round(gamma, 6), round(error, 6), round(scatter, 6)
        (2.0, 0.0, 0.0)
    """
    used = (values > 0) & (squares.mean(0) > 0)
    if used.sum() < 2:
        return math.nan, math.nan, math.nan
    x = np.log(values[used]) - np.log(values[used]).mean()
    if not x @ x > 0:
        return math.nan, math.nan, math.nan
    picked = squares[:, used]
    heights = np.log(picked.mean(0))
    gamma = float(x @ heights / (x @ x))
    left = (picked.sum(0) - picked) / (len(picked) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.log(left) @ x / (x @ x)
    misfit = heights - heights.mean() - gamma * x
    freedom = len(x) - 2
    scatter = math.sqrt(float(misfit @ misfit) / freedom / float(x @ x)) if freedom > 0 else math.nan
    return gamma, float(statistics.error_of(without)), scatter


class _Terms:
    """Terms of minibatches; ``vectors`` (k, P) are the eigenvectors."""

    def __init__(self, problem: Problem, products: Products, vectors: Tensor) -> None:
        self.theta, self.products, self.vectors = problem.theta, products, vectors.double()
        self.gradient = problem.gradient().double()
        self.bent = products(self.gradient[None].to(problem.dtype))[0].double()

    def of(self, parts: Sequence[Problem]) -> Array:
        """(minibatches, 4 + k): gᵀHg, ‖g‖², both of g_B − g, and its squares along the eigenvectors."""
        rows = torch.stack([part.gradient(self.theta) for part in parts])
        bent, rows = self.products(rows).double(), rows.double()
        away, bent_away = rows - self.gradient, bent - self.bent
        columns = [
            (rows * bent).sum(1),
            rows.square().sum(1),
            (away * bent_away).sum(1),
            away.square().sum(1),
        ]
        along = (away @ self.vectors.T).square()
        return torch.cat([torch.stack(columns, 1), along], 1).cpu().numpy()

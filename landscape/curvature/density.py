"""The density of the Hessian's spectrum by Lanczos quadrature from random probes."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.curvature.eigenvalues import Products, exact_products, start_vector
from landscape.curvature.hessian import Part
from landscape.curvature.krylov import BASIS_BYTES, negligible, orthogonalise, small_eigh
from landscape.curvature.lanczos import follow
from landscape.curvature.trace import signs
from landscape.evaluation.paths import Progress
from landscape.problem.problem import Problem
from landscape.results.spectrum import Density

# Ghorbani, Krishnan and Xiao 2019 use 10 probes of 80 to 90 steps for networks of all sizes.
PROBES = 10
STEPS = 80


def quadrature(
    products: Products,
    like: Tensor,
    *,
    probes: int = PROBES,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The density of a symmetric operator on vectors like ``like`` (P,), by stochastic Lanczos quadrature.

    Ubaru, Chen and Saad 2017, section 3. From each probe z of random signs, ``steps`` Lanczos steps with full
    reorthogonalisation give the Ritz values as nodes, and the squared first components of T's eigenvectors as
    weights: exact for zᵀp(A)z/P, p any polynomial of degree below 2·steps. ``products`` takes (k, P), the
    vectors of as many probes as fit in memory. InputError for a count below 1.
    """
    positive("probes", probes, least=1)
    positive("steps", steps, least=1)
    generator = torch.Generator().manual_seed(seed)
    size = len(like)
    steps = min(steps, size)
    at_once = max(1, min(probes, BASIS_BYTES // (steps * like.nbytes)))
    hvps = 0

    def counted(vectors: Tensor, running: list[int]) -> Tensor:
        nonlocal hvps
        hvps += len(vectors)
        if progress:
            progress(min(1.0, hvps / (probes * steps)))
        return products(vectors)

    found: list[tuple[Array, Array]] = []
    for i in range(0, probes, at_once):
        starts = [signs(size, 1, generator, like)[0] / size**0.5 for _ in range(min(at_once, probes - i))]
        found += follow([_probe(start, steps) for start in starts], counted, lambda: None)
    nodes, weights = (np.stack(part) for part in zip(*found, strict=True))
    return Density(nodes, weights, size, hvps)


def _probe(start: Tensor, steps: int) -> Generator[Tensor, Tensor, tuple[Array, Array]]:
    """Nodes and weights (steps,) of one probe; see :func:`.search` for what it yields."""
    vectors = start.new_zeros(steps, len(start))
    vectors[0] = start
    t = np.zeros((steps, steps))
    for j in range(steps):
        w = yield vectors[j]
        w, beta = orthogonalise(w, vectors, t, j)
        if j + 1 == steps or not beta < np.inf or negligible(beta, float(np.abs(t).max()), start.dtype):
            break
        vectors[j + 1] = w / beta
    values, s = small_eigh(t[: j + 1, : j + 1])
    nodes, weights = np.full(steps, values[0]), np.zeros(steps)
    nodes[: j + 1], weights[: j + 1] = values, s[0] ** 2
    return nodes, weights


def density(
    problem: Problem,
    probes: int = PROBES,
    steps: int = STEPS,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The spectral density of ∇²L(θ), θ (P,) by default the centre; see :func:`quadrature`.

    ``kind``, ``part`` and ``randomness`` as in :class:`landscape.HessianOperator`.
    """
    h, size = exact_products(problem, theta, kind=kind, part=part, randomness=randomness)
    like = start_vector(problem, seed, size)
    return quadrature(h, like, probes=probes, steps=steps, seed=seed, progress=progress)

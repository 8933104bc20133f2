"""The density of the Hessian's spectrum by Lanczos quadrature from random probes."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.core.memory import bounded
from landscape.core.options import positive
from landscape.core.progress import Progress
from landscape.curvature.eigenvalues import Products, exact_products
from landscape.curvature.hessian import HessianOptions, Part
from landscape.curvature.krylov import negligible, orthogonalise, small_eigh, start_vector
from landscape.curvature.lanczos import run_in_lockstep
from landscape.curvature.trace import signs
from landscape.evaluation import needs
from landscape.evaluation.needs import BASIS_BYTES
from landscape.problem.problem import Problem
from landscape.results.curvature import Density

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
    vectors of as many probes as fit in memory. Raises InputError for a count below 1.
    """
    positive("probes", probes, least=1)
    positive("steps", steps, least=1)
    positive("seed", seed, least=0)
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

    rules: list[tuple[Array, Array]] = []
    for i in range(0, probes, at_once):
        starts = [signs(size, 1, generator, like)[0] / size**0.5 for _ in range(min(at_once, probes - i))]
        rules += run_in_lockstep([_probe(start, steps) for start in starts], counted, lambda: None)
    nodes, weights = (np.stack(part) for part in zip(*rules, strict=True))
    return Density(nodes, weights, size, hvps)


def _probe(start: Tensor, steps: int) -> Generator[Tensor, Tensor, tuple[Array, Array]]:
    """Nodes and weights (steps,) of one probe; it yields vectors (P,), and is sent their products."""
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


@bounded(needs.density)
def density(
    problem: Problem,
    probes: int = PROBES,
    steps: int = STEPS,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
) -> Density:
    """The spectral density of ∇²L(θ) by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017).

    Args:
        problem: the loss.
        probes: random vectors, each of which gives one quadrature; 10 by default.
        steps: Lanczos steps, that is products, a probe; 80 by default. (Ghorbani, Krishnan and Xiao 2019 use
            these numbers for networks of all sizes.)
        theta: θ (P,); default: the problem's centre.
        kind: "hessian", or "gauss-newton" for its positive semi-definite part JᵀH_L J.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.
        seed: draws the probes.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.

    Returns:
        Nodes and weights, (probes, steps) each; the weights of a probe sum to 1.

    Raises:
        InputError: a count below 1, or an unknown option.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> landscape.density(problem, probes=2, steps=5).nodes.shape
        (2, 5)
    """
    h, size = exact_products(problem, theta, HessianOptions(kind, part))
    like = start_vector(problem, seed, size)
    return quadrature(h, like, probes=probes, steps=steps, seed=seed, progress=progress)

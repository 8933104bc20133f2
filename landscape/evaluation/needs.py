"""What each public function takes of memory at its peak, besides what is in use when it is called.

Counted in vectors of P numbers in the problem's precision, arrays of a grid, and what a chunk of data saves
for its backward pass, which one forward pass measures. The counts are those of the code; tests/test_needs.py
measures the peaks of processes against them. What is no number here is refused by the function itself.
"""

from __future__ import annotations

import math
from typing import Any

from landscape.core.memory import Need
from landscape.evaluation.paths import BLOCK_BYTES
from landscape.problem.chain import chain

# Basis vectors of a search before a restart, or fewer if P or the memory below is smaller. MNIST's MLP needs
# 40 to 90.
MAX_BASIS = 128
BASIS_BYTES = 2**30
# Memory for gradient graphs (ours: small compared to the 24 GB of a usual machine, and enough for all of
# MNIST's test set with a small network).
GRAPH_BYTES = 2**30
# Vectors of a trace's products at once: on 2 cores more are no faster.
BLOCK = 8
# A second derivative saves about so many times what the first does: measured on MLPs.
TWICE = 4
# Bytes of a point of a grid at the peak: its values, place, number, and their copies in the result.
SURFACE_POINT, HESSIAN_POINT, LINE_POINT = 130, 300, 130
# Vectors besides those that a function counts for itself: of a product with the Hessian, and of the check of
# its symmetry (4 random vectors, 3 sums and images, the gradient and its parts).
PRODUCT, CHECK = 7, 14


def _need(problem: Any, vectors: float, activations: float = 1.0, other: float = 0.0) -> Need:
    """``vectors`` of P numbers, ``activations`` times what a chunk of data saves, and ``other`` bytes."""
    return Need(problem.device, vectors * problem.theta.nbytes + activations * problem.chunk_bytes + other)


def _curved(problem: Any, vectors: float, other: float = 0.0, part: Any = None) -> Need:
    """:func:`_need` of a function with products of the Hessian, whose graphs are kept where there is room.

    ``vectors`` are those of the ``part`` of the parameters.
    """
    vectors *= _size(problem, part) / problem.layout.size
    full = max(1, 4 // int(problem.theta.itemsize))  # half precisions have their products in float32
    need = _need(problem, full * max(CHECK, vectors + PRODUCT), TWICE, other)
    chunks = math.ceil(problem.samples / problem.chunk) if problem.data.resident is not None else 1
    graphs = (chunks - 1) * (TWICE * problem.chunk_bytes + problem.theta.nbytes)
    return Need(problem.device, need.fixed, min(GRAPH_BYTES, graphs))


def _double(problem: Any) -> float:
    """How many vectors of the problem's precision one in float64 takes."""
    return 8 / int(problem.theta.itemsize)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _rows(weights: Any) -> int:
    return int(weights.shape[0]) if getattr(weights, "ndim", 0) else 0


def _size(problem: Any, part: Any) -> int:
    return sum(slot.size for slot in problem.layout.select(part))


def _basis(problem: Any, wanted: int, part: Any = None) -> int:
    """The vectors of a search for ``wanted`` eigenvalues: its basis, and each result with its image."""
    size = _size(problem, part)
    basis = max(4 * wanted, min(MAX_BASIS, BASIS_BYTES // (size * int(problem.theta.itemsize))))
    return min(size, basis) + 1 + 6 * wanted


def _several(problem: Any, wanted: Any, products: Any = MAX_BASIS, part: Any = None) -> float:
    """The vectors of a search for the largest, and of its second start where these are several."""
    k = _count(wanted)
    basis = _basis(problem, k, part)
    return basis + (min(basis, _count(products)) / 2 if k > 1 else 0)


def random_plane(problem: Any, **_: Any) -> Need:
    """Two directions, and a draw of the largest parameter in float64."""
    largest = max(slot.size for slot in problem.layout.slots) / problem.layout.size
    return _need(problem, 2 + largest * _double(problem), 0)


def contour(problem: Any, grid: Any, **_: Any) -> Need:
    """The moved weights and their outputs; or centre and directions in one, and a block of points."""
    blocks = 2 * BLOCK_BYTES if chain(problem) else 0
    return _need(problem, 4 if blocks else 2, 1, blocks + SURFACE_POINT * _points(grid))


def line(problem: Any, points: Any, **_: Any) -> Need:
    """That of a contour, and a second direction, which is zero."""
    return _need(problem, 5 if chain(problem) else 3, 1, LINE_POINT * _count(points))


def hessian_grid(problem: Any, grid: Any, **_: Any) -> Need:
    return _curved(problem, 3 + _basis(problem, 2), HESSIAN_POINT * _points(grid))


def extremes(problem: Any, part: Any = None, **_: Any) -> Need:
    return _curved(problem, 1 + _basis(problem, 2, part), part=part)


def top(problem: Any, k: Any, max_products: Any, part: Any, **_: Any) -> Need:
    return _curved(problem, 1 + _several(problem, k, max_products, part), part=part)


def trace(problem: Any, products: Any, part: Any, **_: Any) -> Need:
    """A third of the products: signs, images and an orthonormal basis, and what QR copies."""
    return _curved(problem, 6 * _count(products) / 3 + BLOCK, part=part)


def density(problem: Any, probes: Any, steps: Any, part: Any, **_: Any) -> Need:
    """The bases of the probes that are computed together."""
    size = _size(problem, part)
    basis = min(_count(steps), size)
    at_once = max(1, min(_count(probes), BASIS_BYTES // (basis * size * int(problem.theta.itemsize))))
    return _curved(problem, at_once * (basis + 4), part=part)


def spectrum(problem: Any, top_k: Any, ends: Any, with_trace: Any, with_density: Any, **options: Any) -> Need:
    """The largest of what was asked for, and the start that these share."""
    asked = [top(problem, max(_count(top_k), 1 + bool(ends)), **options)] if top_k or not with_trace else []
    asked += [extremes(problem, **options)] if ends else []
    asked += [trace(problem, **options)] if with_trace else []
    asked += [density(problem, **options)] if with_density else []
    return max(asked, key=lambda need: need.fixed)


def eigen_plane(problem: Any, **_: Any) -> Need:
    return _curved(problem, 5 + _basis(problem, 2))


def estimate_noise(problem: Any, weights: Any, **_: Any) -> Need:
    """Gradients of the learners there and at the mean, deviations, and their products as rows and as one."""
    return _curved(problem, 5 * _rows(weights) + 4 * _double(problem))


def smoothing(problem: Any, weights: Any, top: Any, pairs: Any, path: Any, **_: Any) -> Need:
    """The deviations, a search and its vectors; the gradients on a path for each pair."""
    route = 0 if path is None else 3 * _count(pairs) * _double(problem)
    return _curved(problem, _rows(weights) + _count(top) + _several(problem, top) + 6 + route)


def noise_scale(problem: Any, weights: Any, gradient: Any, **_: Any) -> Need:
    """Gradients of a draw as rows and as one, and the sums of groups of them."""
    learners = _rows(weights)
    groups = max(8, min(32, 2**30 // (8 * problem.layout.size))) if learners or gradient == "draws" else 0
    return _need(problem, 4 + 2 * learners + (groups + 2) * _double(problem), 2)


def sharpness(problem: Any, starts: Any, **_: Any) -> Need:
    """Scale, starts, two displacements with their gradients, and moved weights."""
    return _need(problem, 8 + _count(starts) + 2 * _double(problem), 2)


def learning_coefficient(problem: Any, chains: Any, **_: Any) -> Need:
    """Weights, gradients, distances, drifts, noise and products of the chains."""
    return _need(problem, 7 * _count(chains) + 2, 2 * _count(chains))


def disagreement(problem: Any, checkpoint: Any, top_k: Any, **_: Any) -> Need:
    """Weights and deviations, a search and its vectors."""
    learners = _rows(getattr(checkpoint, "weights", checkpoint))
    return _curved(problem, 2 * learners + _several(problem, top_k))


def noise_alignment(problem: Any, top_k: Any, **_: Any) -> Need:
    """The vectors in float64; of a block of gradients rows, products and deviations, some in float64."""
    vectors, search = _count(top_k), _several(problem, top_k)
    block = BLOCK * (3 + 5 * _double(problem))
    return _curved(problem, max((1 + _double(problem)) * vectors + block, search))


def batch_sharpness(problem: Any, with_lambda_max: Any, weights: Any, **_: Any) -> Need:
    return _curved(problem, _basis(problem, 1) if with_lambda_max else 4)


def _points(grid: Any) -> int:
    pair = grid if isinstance(grid, (tuple, list)) else (grid, grid)
    return math.prod(map(_count, pair))

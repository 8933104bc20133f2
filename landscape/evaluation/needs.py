"""Estimate the peak memory of public functions, in addition to the memory in use before a call.

Above a function its estimate, ``name_need``, counts vectors of P numbers in the problem's precision, arrays
of a grid, and the activations that a chunk of data saves for its backward pass, which one forward pass
measures. The counts follow the code; tests/test_needs.py compares them with the peaks of processes. Arguments
that are not numbers are refused by the function itself.
"""

from __future__ import annotations

import math
from typing import Any

from landscape.core.memory import Need, limit, room
from landscape.problem.batches import recomputes

# Basis vectors of a search before a restart; fewer if P is smaller, or for the memory below. MNIST's MLP
# needs 40 to 90. Restarts cost less than a second Lanczos run in place of a basis: a small GPT-2 takes 23
# products with 8 vectors, and 22 without restart (benchmarks bases). A basis in a file would be read four
# times per product, twice for each orthogonalization: 52 GiB for 28 vectors of 124 million numbers.
MAX_BASIS = 128
BASIS_BYTES = 2**30
# Memory for gradient graphs (our choice: small beside the 24 GB of a usual machine, and enough for all of
# MNIST's test set with a small network).
GRAPH_BYTES = 2**30
# The activations that a second derivative saves, as a multiple of the first derivative's: measured on MLPs.
TWICE = 4
# Vectors in addition to the function's own: of a Hessian product, and of the check of its symmetry (4 random
# vectors, 3 sums and images, the gradient and its parts).
PRODUCT, CHECK = 4, 14
# The largest number of vectors in float64 of a product by differences with its error: the weights of problem,
# model and two gradients, the center of these, seven of a difference, and one for each of eight steps.
DIFFERENCES = 22
# A key of ``Problem.checked``: the model's second derivatives are missing or wrong.
NO_SECOND = "second derivatives"


def need(problem: Any, vectors: float, activations: float = 1.0, extra: float = 0.0) -> Need:
    """Return the need of vectors of P numbers, of multiples of a chunk's activations, and of extra bytes."""
    return Need(problem.device, vectors * problem.weights.nbytes + activations * problem.chunk_bytes + extra)


def evaluated(problem: Any, vectors: float, extra: float, max_memory: Any) -> Need:
    """Return the need of a function that evaluates points.

    Under a limit the function uses smaller chunks of data, and states its minimum itself.
    """
    whole = need(problem, vectors, 1, extra)
    bound = max_memory is not None or limit() is not None
    return Need(whole.device, extra, whole.fixed - extra) if bound else whole


def curved(
    problem: Any, vectors: float, extra: float = 0.0, part: Any = None, derivatives: Any = "auto"
) -> Need:
    """Return the need of a function with Hessian products, and of gradient graphs if there is room.

    ``vectors`` have the size of the ``part`` of the parameters. ``derivatives`` are those of HessianOperator;
    "auto" means differences for a model without correct second derivatives.
    """
    if derivatives == "differences" or (derivatives == "auto" and lacks_second(problem)):
        extra += difference_bytes(problem)
    vectors *= size(problem, part) / problem.layout.size
    full = max(1, 4 // int(problem.weights.itemsize))  # half precisions have their products in float32
    fixed = need(problem, full * max(CHECK, vectors + PRODUCT), TWICE, extra).fixed
    chunks = math.ceil(problem.samples / problem.chunk) if problem.data.resident is not None else 1
    graphs = (chunks - 1) * (TWICE * problem.chunk_bytes + problem.weights.nbytes)
    return Need(problem.device, fixed, min(GRAPH_BYTES, graphs))


def lacks_second(problem: Any) -> bool:
    """Return whether the model is known to have no second derivatives, or wrong ones."""
    return recomputes(problem.model) or any(key[0] == NO_SECOND for key in problem.checked)


def difference_bytes(problem: Any) -> float:
    """Return the bytes that products by differences need in addition to exact ones."""
    return DIFFERENCES * 8.0 * int(problem.layout.size)


def double(problem: Any) -> float:
    """Return the size of a vector in float64, in vectors of the problem's precision."""
    return 8 / int(problem.weights.itemsize)


def rows(weights: Any) -> int:
    """Return the number of learners of ``weights`` (n, P), or 0 without weights."""
    return int(weights.shape[0]) if getattr(weights, "ndim", 0) else 0


def size(problem: Any, part: Any) -> int:
    """Return the number of parameters in a ``part`` of the model."""
    return sum(slot.size for slot in problem.layout.select(part))


def basis(problem: Any, count: int, part: Any = None) -> int:
    """Return the number of vectors of a search for ``count`` eigenvalues: basis, results, and images."""
    numbers = size(problem, part)
    vectors = min_basis_size(count, numbers * int(problem.weights.itemsize))
    return min(numbers, vectors) + 1 + 4 * count


def min_basis_size(count: int, vector_bytes: int) -> int:
    """Return the number of basis vectors that a search for ``count`` eigenvalues always has."""
    return max(4 * count, min(MAX_BASIS, BASIS_BYTES // vector_bytes))


def max_basis_size(count: int, vector_bytes: int, several: bool) -> int:
    """Return :func:`min_basis_size`, or more up to MAX_BASIS where the current call has the memory.

    With ``several`` eigenvalues at an end, a second start needs half of the basis again.
    """
    minimum = min_basis_size(count, vector_bytes)
    further = room() / (1.5 if several else 1) // vector_bytes
    return max(minimum, int(min(MAX_BASIS, minimum + further)))


def several(problem: Any, count: Any, products: Any = MAX_BASIS, part: Any = None) -> float:
    """Return the number of vectors of a search for the largest ``count``, with a second start above 1."""
    k = count or 1
    vectors = basis(problem, k, part)
    return vectors + (min(vectors, products) / 2 if k > 1 else 0)


def points(grid: Any) -> int:
    """Return the number of points of a ``grid`` (nx, ny), or of a number for both axes."""
    pair = grid if isinstance(grid, (tuple, list)) else (grid, grid)
    return math.prod(map(int, pair))

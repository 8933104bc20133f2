"""Vectors from which a search of eigenvectors starts."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core.options import positive
from landscape.problem.problem import Problem


def start_vector(problem: Problem, seed: int, size: int | None = None) -> Tensor:
    """A normal vector (size,), by default (P,), from ``seed``: the same draw on every device.

    Of a model in half precision it is float32, in which a basis can be orthogonal. Lanczos needs one with
    components along all eigenvectors. InputError for a seed below 0.
    """
    positive("seed", seed, least=0)
    generator = torch.Generator().manual_seed(seed)
    length = problem.layout.size if size is None else size
    return torch.randn(length, dtype=torch.float64, generator=generator).to(
        problem.device, torch.promote_types(problem.dtype, torch.float32)
    )


def warm_start(near: Tensor, first: Tensor) -> Tensor:
    """(P,), the start of a search near ``near``, with as much of ``first``, which misses no eigenvector."""
    start: Tensor = near.to(first) / near.norm() + first / first.norm()
    return start

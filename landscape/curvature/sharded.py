"""Products with the Hessian of a model that is divided among ranks, as differences of its gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.errors import InputError
from landscape.curvature.differences import Differences, Gradient
from landscape.curvature.operators import Ranks, SymmetricOperator
from landscape.problem.sharded import ShardedProblem


class ShardedRanks(Ranks):
    """The ranks that hold the vectors of a problem (:class:`.ShardedProblem`)."""

    def __init__(self, problem: ShardedProblem) -> None:
        self.problem = problem
        own = torch.tensor([float(sum(piece.local.numel() for piece in problem.chosen))])
        self._length = int(problem.reduced(own, dist.ReduceOp.MAX))

    def total(self, values: Tensor) -> Tensor:
        return self.problem.total(values)

    def norm(self, v: Tensor, **options: Any) -> Tensor:
        return self.total(v.double().square().sum(**options)).sqrt().to(v)

    def size(self, v: Tensor) -> int:
        return self.problem.size

    def length(self, v: Tensor) -> int:
        return self._length

    def normal(self, like: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        return self.problem.draw(lambda shape: torch.randn(shape, dtype=dtype, generator=generator))

    def signs(self, like: Tensor, count: int, generator: torch.Generator) -> Tensor:
        def draw(shape: torch.Size) -> Tensor:
            return torch.randint(2, shape, dtype=torch.int8, generator=generator) * 2 - 1

        return torch.stack([self.problem.draw(draw) for _ in range(count)])

    def orthonormal(self, rows: Tensor) -> Tensor:
        # By the factors of each rank's part, one below the other (Demmel et al. 2012, tall and skinny QR).
        count, rank = len(rows), dist.get_rank()
        q, r = torch.linalg.qr(rows.T)
        factors = r.new_zeros(self.problem.ranks, count, count)
        factors[rank, : len(r)] = r
        turn = torch.linalg.qr(self.total(factors).flatten(0, 1))[0].view_as(factors)[rank]
        found: Tensor = q @ turn[: len(r)]
        return found.T


class ShardedGradient(Gradient):
    """∇L of a sharded problem near its weights."""

    def __init__(self, problem: ShardedProblem) -> None:
        self.problem, self.dtype, self.coarse = problem, problem.dtype, problem.coarse

    def __call__(self, step: Tensor | None = None) -> Tensor:
        return self.problem.gradient(step)


class ShardedDifferences(Differences):
    """The products of a sharded problem's Hessian, and their errors."""

    def __init__(self, problem: ShardedProblem) -> None:
        self.problem, self.ranks = problem, ShardedRanks(problem)
        self.gradients = self.finest = ShardedGradient(problem)
        self.sizes = [piece.local.numel() for piece in problem.chosen]
        squares = self._squares(problem.flatten(piece.local for piece in problem.chosen))
        counts = [piece.parameter.numel() for piece in problem.chosen]
        average = sum(squares) / sum(counts) or 1.0
        self.scales = [square + average * count for square, count in zip(squares, counts, strict=True)]
        self._center = {}
        self.arithmetic = f"differences of gradients on {problem.ranks} ranks"

    def _masked(self, v: Tensor) -> Tensor:
        return v.to(self.problem.dtype) * self.problem.mask


class ShardedHessian(SymmetricOperator):
    """The Hessian of a sharded problem, as a linear operator on the vectors of each rank.

    Every rank computes the products together with the others.

    Args:
        problem: the loss.
        part: names or name prefixes of parameters: the diagonal block of these; default: all.

    Attributes:
        size: the numbers of a vector on this rank.
        ranks: inner products of vectors, and random ones.
    """

    matrix, derivatives = "hessian", "differences"

    def __init__(self, problem: ShardedProblem, part: Any = None) -> None:
        self.problem = problem.of(part)
        self.differences = ShardedDifferences(self.problem)
        self.ranks, self.arithmetic = self.differences.ranks, self.differences.arithmetic
        self.size = sum(self.differences.sizes)
        self.dtype, self.device = problem.dtype, self.problem.chosen[0].local.device

    def _images(self, rows: Tensor) -> Tensor:
        return torch.stack([self.differences.product(row) for row in rows]).to(rows)

    def verified(self, rows: Tensor) -> tuple[Tensor, list[float]]:
        """The products with the rows, and bounds on the lengths of their errors."""
        self.products += len(rows)
        images, errors = zip(*map(self.differences.measured, rows), strict=True)
        return torch.stack(images).to(rows), list(errors)

    def to_scipy(self) -> Any:
        """InputError: SciPy takes inner products of one rank's part."""
        raise InputError("to_scipy: not of a sharded model, SciPy takes inner products in one process")

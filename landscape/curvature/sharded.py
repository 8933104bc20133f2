"""Products with the Hessian of a model that is divided among ranks, as differences of its gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.devices import finite, vector_norm
from landscape.core.errors import InputError
from landscape.curvature.differences import Differences, Gradient
from landscape.curvature.operators import Ranks, SymmetricOperator, qr
from landscape.problem.ranks import Piece
from landscape.problem.sharded import ShardedProblem


class ShardedRanks(Ranks):
    """The ranks that hold the vectors of a problem (:class:`.ShardedProblem`)."""

    def __init__(self, problem: ShardedProblem) -> None:
        self.problem = problem
        own = sum(piece.local.numel() for piece in problem.chosen)
        self._length = int(problem.gathered(torch.tensor(own)).max())

    def total(self, values: Tensor) -> Tensor:
        return self.problem.total(values)

    def norm(self, v: Tensor) -> Tensor:
        return self.total(vector_norm(v).square()).sqrt()

    def size(self, v: Tensor) -> int:
        return self.problem.size

    def length(self, v: Tensor) -> int:
        return self._length

    def normal(self, like: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        return self.problem.draw(lambda p: torch.randn(p.slot.shape, dtype=dtype, generator=generator))

    def signs(self, like: Tensor, count: int, generator: torch.Generator) -> Tensor:
        def draw(piece: Piece) -> Tensor:
            return torch.randint(2, piece.slot.shape, dtype=torch.int8, generator=generator) * 2 - 1

        return torch.stack([self.problem.draw(draw) for _ in range(count)])

    def orthonormal(self, rows: Tensor) -> Tensor:
        # By the factors of each rank's part, one below the other (Demmel et al. 2012, tall and skinny QR).
        q, r = qr(rows.T)
        own = r.new_zeros(len(rows), len(rows))
        own[: len(r)] = r
        factors = self.problem.gathered(own)
        turn = torch.linalg.qr(factors.flatten(0, 1))[0].view_as(factors)[dist.get_rank()]
        return (q @ turn[: len(r)]).T


class ShardedGradient(Gradient):
    """∇L of a sharded problem near its weights."""

    def __init__(self, problem: ShardedProblem, weights: Tensor | None) -> None:
        self.problem: Any = problem
        self.dtype, self.coarse = problem.dtype, problem.coarse
        self.weights = problem.weights if weights is None else weights

    def __call__(self, step: Tensor | None = None) -> Tensor:
        at = self.weights if step is None else self.weights + step
        return self.problem.loss_and_gradient(at)[1]


class ShardedDifferences(Differences):
    """The products of a sharded problem's Hessian, and their errors."""

    def __init__(self, problem: ShardedProblem, weights: Tensor | None) -> None:
        self.problem: Any = problem
        self.ranks = ShardedRanks(problem)
        self.gradients = self.finest = ShardedGradient(problem, weights)
        self.sizes = [piece.local.numel() for piece in problem.chosen]
        squares = self._squares(self.finest.weights)
        counts = [piece.parameter.numel() for piece in problem.chosen]
        average = sum(squares) / sum(counts) or 1.0
        self.scales = [square + average * count for square, count in zip(squares, counts, strict=True)]
        self._center = {}
        self.arithmetic = f"differences of gradients on {problem.ranks} ranks"

    def _masked(self, v: Tensor) -> Tensor:
        return self.problem.along_weights(v.to(self.problem.dtype, copy=True))


class ShardedHessian(SymmetricOperator):
    """The Hessian of a sharded problem, as a linear operator on the vectors of each rank.

    Every rank computes the products together with the others.

    Args:
        problem: the loss.
        weights: (n,); default: the model's own.

    Attributes:
        size: the numbers of a vector on this rank.
        ranks: inner products of vectors, and random ones.
    """

    matrix, derivatives = "hessian", "differences"

    def __init__(self, problem: ShardedProblem, weights: Tensor | None = None) -> None:
        self.problem = problem
        self.differences = ShardedDifferences(problem, weights)
        self.ranks, self.arithmetic = self.differences.ranks, self.differences.arithmetic
        self.size = sum(self.differences.sizes)
        self.dtype, self.device = problem.dtype, self.problem.chosen[0].local.device

    def _finite(self, rows: Tensor, images: Tensor) -> Tensor:
        if float(self.ranks.total(torch.tensor([not finite(images) and finite(rows)]).double())):
            raise self._not_finite()  # on all ranks
        return images

    def to_scipy(self) -> Any:
        """InputError: SciPy takes inner products of one rank's part."""
        raise InputError(
            "to_scipy: not allowed with a sharded model, SciPy takes inner products in one process; use "
            "landscape.top_eigenvalues"
        )

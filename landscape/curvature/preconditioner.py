"""The Hessian as an optimizer with a diagonal preconditioner sees it: P^{-1/2} H P^{-1/2}."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.curvature.hessian import Part
from landscape.problem.problem import Problem

Products = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """A positive diagonal P: steps are w ← w − η P⁻¹ u, u the gradient or a momentum of gradients.

    With P fixed that is the same method without it in the coordinates P^{1/2} w, whose Hessian is P^{-1/2} H
    P^{-1/2}: stable where η times its largest eigenvalue is below the method's own limit (Cohen et al. 2022,
    arXiv:2207.14484).

    Attributes:
        diagonal: (P,), in the order of θ.
        name: of the optimizer.
        lr, limit: η, and the largest stable ηλ of the optimizer with P fixed; NaN if unknown.

    Raises:
        InputError: a diagonal that is not positive and finite.

    Example:
        >>> Preconditioner(torch.tensor([1.0, 4.0]), name="torch:Adam", lr=0.1, limit=38.0).limit
        38.0
    """

    diagonal: Tensor
    name: str = "given"
    lr: float = math.nan
    limit: float = math.nan

    def __post_init__(self) -> None:
        wrong = ~(torch.isfinite(self.diagonal) & (self.diagonal > 0))
        if self.diagonal.dim() != 1 or bool(wrong.any()):
            raise InputError(
                f"precondition: {int(wrong.sum())} of {self.diagonal.numel()} numbers are not positive and "
                "finite, it must be the diagonal (P,) of a positive matrix"
            )

    def around(self, products: Products, problem: Problem, part: Part = None) -> Products:
        """The products of P^{-1/2} H P^{-1/2} from those of H, or of its block of some parameters.

        Args:
            products: takes vectors (k, P), or (k, P') for a part, to H times them.
            problem: whose Hessian H is.
            part: names or name prefixes of parameters: the diagonal block of these; default: all.

        Returns:
            What takes such vectors to P^{-1/2} H P^{-1/2} times them.

        Raises:
            InputError: a diagonal of another length than θ.

        Example:
            >>> import landscape
            >>> x, y = torch.eye(2), torch.zeros(2, 1)
            >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
            >>> scaled = Preconditioner(torch.tensor([1.0, 4.0])).around(lambda v: v, problem)
            >>> scaled(torch.eye(2)).tolist()
            [[1.0, 0.0], [0.0, 0.25]]
        """
        size = problem.layout.size
        if self.diagonal.shape != (size,):
            raise InputError(f"precondition: shape {tuple(self.diagonal.shape)}, it must be {(size,)}")
        slots = problem.layout.select(part)
        chosen = torch.cat([self.diagonal[s.offset : s.offset + s.size] for s in slots])
        root = chosen.to(problem.device, torch.float64).rsqrt()

        def scaled(vectors: Tensor) -> Tensor:
            factor = root.to(vectors.dtype)
            return factor * products(factor * vectors)

        return scaled


def as_preconditioner(given: Preconditioner | Tensor) -> Preconditioner:
    """``given``, or the preconditioner with that diagonal (P,).

    Example:
        >>> as_preconditioner(torch.tensor([1.0, 4.0])).name
        'given'
    """
    return given if isinstance(given, Preconditioner) else Preconditioner(given)

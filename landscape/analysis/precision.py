"""What analyses of drawn minibatches share: when the draws are enough, and the learners' weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.problem.problem import Problem

# The relative standard error asked for, and the fewest and the most draws (ours): a standard error from 16
# draws is itself right to 18%, 1/√(2·15), and a stop much earlier would favour draws that agree by accident.
TOL, LEAST, MOST = 0.05, 16, 1000


@dataclass(frozen=True)
class Precision:
    """Draw until the standard error is at most ``tol`` times the estimate; ``least`` to ``most`` draws.

    Example:
        >>> precision = Precision(0.1, 16, 100)
        >>> precision.enough(15, 1.0, 0.0), precision.enough(16, 1.0, 0.05), precision.enough(100, 1.0, 9.0)
        (False, True, True)
    """

    tol: float = TOL
    least: int = LEAST
    most: int = MOST

    def __post_init__(self) -> None:
        positive("tol", self.tol)
        positive("draws", self.least, least=2)
        if self.most < self.least:
            raise InputError(
                f"max_draws: {self.most} is not allowed, it must be at least draws, {self.least}"
            )

    def met(self, value: float, error: float) -> bool:
        """Whether the standard error ``error`` of ``value`` is small enough."""
        return error <= self.tol * abs(value)

    def enough(self, draws: int, value: float, error: float) -> bool:
        """Whether no further draw is needed, or allowed."""
        return draws >= self.most or (draws >= self.least and self.met(value, error))

    def share(self, draws: int, value: float, error: float) -> float:
        """The share of the work that is done, from the draws that the error needs: it falls as 1/√draws."""
        if draws < self.least or not 0 < error < float("inf") or not abs(value) > 0:
            return min(1.0, draws / max(self.least, draws + 1))
        needed = max(self.least, draws * (error / (self.tol * abs(value))) ** 2)
        return min(1.0, draws / min(self.most, needed))


def learners_of(
    problem: Problem, batch: int, weights: Tensor | None, local_batch: int | None
) -> tuple[Tensor | None, int]:
    """The learners' weights on the device (None: none), and the samples of a learner's minibatch.

    InputError for weights of another shape, or a local batch that is missing or not allowed.
    """
    if weights is None:
        if local_batch is not None:
            raise InputError(f"local_batch: {local_batch} is not allowed without weights, the learners'")
        return None, 0
    if weights.dim() != 2 or weights.shape[1] != problem.layout.size or not len(weights):
        raise InputError(
            f"weights: shape {tuple(weights.shape)}, it must be (n, {problem.layout.size}) with n ≥ 1"
        )
    if local_batch is None:
        if batch % len(weights):
            raise InputError(
                f"batch: {batch} is no multiple of the {len(weights)} learners; give local_batch"
            )
        local_batch = batch // len(weights)
    positive("local_batch", local_batch, least=1)
    return weights.to(problem.device, problem.dtype), local_batch

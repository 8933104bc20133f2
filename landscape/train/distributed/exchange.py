"""What one process sends and receives under a mixing matrix, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array


@dataclass(frozen=True)
class Exchange:
    """An exchange of ``weights`` (n_local, P) that has been started: one of its two ways is used, once.

    ``mixed`` waits and gives Σ_k M_jk w_k, (n_local, P). ``pull``, where there is one, adds
    Σ_k M_jk (w_k − w_j) to its argument in less time.
    """

    weights: Tensor
    mixed: Callable[[], Tensor]
    pull: Callable[[Tensor], Tensor] | None = None

    def __call__(self) -> Tensor:
        return self.mixed()

    def add_to(self, out: Tensor) -> Tensor:
        """Wait, and add Σ_k M_jk (w_k − w_j) to ``out`` (n_local, P), in place."""
        return self.pull(out) if self.pull else out.add_(self.mixed() - self.weights)


@dataclass(frozen=True)
class Plan:
    """The messages of one process under one mixing matrix, and its entries of the matrix.

    ``receive``: the other processes' learners it needs. ``transfers``: (learner, the other process), in the
    order of (learner, receiver), which all processes share: NCCL hangs if matching ones differ in order.
    ``local_block`` (n_local, n_local) and ``remote_block`` (n_local, len(receive)): the entries of M for its
    own learners and for those that it receives.
    """

    receive: list[int]
    transfers: list[tuple[int, int]]
    local_block: Tensor
    remote_block: Tensor

    @classmethod
    def of(cls, matrix: Array, bounds: list[int], rank: int) -> Plan:
        """The plan of ``rank``, which holds the learners bounds[rank]…bounds[rank + 1] − 1."""
        a, b = bounds[rank], bounds[rank + 1]
        holder = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        sources = (matrix[a:b] != 0).any(0)
        receive = [int(k) for k in np.flatnonzero(sources) if not a <= k < b]
        receivers = np.logical_or.reduceat(matrix[:, a:b] != 0, bounds[:-1], axis=0)  # (processes, n_local)
        sent = [(a + int(k), int(receiver)) for k, receiver in np.argwhere(receivers.T) if receiver != rank]
        transfers = sorted([*sent, *((k, int(holder[k])) for k in receive)])
        local, remote = matrix[a:b, a:b], matrix[a:b][:, receive]
        return cls(receive, transfers, torch.from_numpy(local.copy()), torch.from_numpy(remote.copy()))

    def apply(self, weights: Tensor, received: Tensor, out: Tensor) -> Tensor:
        """Σ_k M_jk w_k for this process's learners j; uses up ``received``, and ``out`` if it needs it.

        Mixes differences from the first local row, as :meth:`Mixing.apply` does from the mean, so that
        rounding in the matrix does not let the mean drift.
        """
        if len(weights) == len(received) == 1:  # a pair: one pass over memory
            return torch.lerp(weights, received, float(self.remote_block), out=received)
        origin = weights[0]
        mixed = origin.expand_as(weights)
        if len(weights) > 1:
            mixed = torch.addmm(mixed, self.local_block.to(weights), weights - origin, out=out)
        if len(received):
            mixed = torch.addmm(mixed, self.remote_block.to(weights), received.sub_(origin), out=out)
        return mixed

    def pull(self, out: Tensor, weights: Tensor, received: Tensor) -> Tensor:
        """Add Σ_k M_jk (w_k − w_j) to ``out``, of one local learner; uses up ``received``."""
        received.sub_(weights)
        if len(received) == 1:
            return out.add_(received, alpha=float(self.remote_block))
        return out.addmm_(self.remote_block.to(weights), received) if len(received) else out

"""Products of the loss Hessian with vectors, over the whole data of a problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape.options import InputError
from landscape.problem import Problem, SavedBytes

# Memory that kept gradient graphs may take (ours: small beside the 24 GB of a usual machine, and enough to
# keep all of MNIST's test set for a small network).
GRAPH_BYTES = 2**30


class HessianOperator:
    """v ↦ ∇²L(θ) v for a fixed θ, averaged over all samples of ``problem``.

    The gradient's graph is built once and kept for as many chunks of data as fit in ``graph_bytes``; the
    other chunks build theirs again for every product. ``products`` counts the calls.
    """

    def __init__(
        self, problem: Problem, theta: Tensor | None = None, *, graph_bytes: int = GRAPH_BYTES
    ) -> None:
        self.problem = problem
        theta = problem.theta if theta is None else theta
        views = problem.layout.views(theta)
        self._leaves = {k: v.detach().clone().requires_grad_() for k, v in views.items()}
        self._kept: list[tuple[list[Tensor], list[int], float]] = []
        self._budget = graph_bytes
        self._full = False
        self.products = 0

    def _gradient(self, x: Any, y: Any, share: float) -> tuple[list[Tensor], list[int], float]:
        """The chunk's gradients that depend on θ, which parameters they belong to, and its weight."""
        # Fused attention kernels have no double backward.
        with sdpa_kernel(SDPBackend.MATH):
            loss = self.problem.criterion(functional_call(self.problem.model, self._leaves, (x,)), y)
        parts = torch.autograd.grad(
            loss, list(self._leaves.values()), create_graph=True, materialize_grads=True
        )
        live = [i for i, part in enumerate(parts) if part.requires_grad]
        return [parts[i] for i in live], live, share

    def __call__(self, v: Tensor) -> Tensor:
        """∇²L(θ) v, (P,) -> (P,)."""
        if v.shape != self.problem.theta.shape:
            raise InputError(f"v: shape {tuple(v.shape)}, it must be {tuple(self.problem.theta.shape)}")
        self.products += 1
        vectors = list(self.problem.layout.views(v).values())
        total = torch.zeros_like(v)
        for i, (x, y, count) in enumerate(self.problem.chunks()):
            if i < len(self._kept):
                chunk = self._kept[i]
            else:
                saved = SavedBytes(besides=self._leaves.values())
                with saved:
                    chunk = self._gradient(x, y, count / self.problem.samples)
                if not self._full and saved.bytes_ <= self._budget:
                    self._budget -= saved.bytes_
                    self._kept.append(chunk)
                else:
                    self._full = True
            self._add_product(chunk, vectors, total, keep=i < len(self._kept))
        return total

    def _add_product(
        self, chunk: tuple[list[Tensor], list[int], float], vectors: list[Tensor], total: Tensor, keep: bool
    ) -> None:
        gradients, live, share = chunk
        if not live:  # a loss that is linear in θ
            return
        with sdpa_kernel(SDPBackend.MATH):
            parts = torch.autograd.grad(
                gradients,
                list(self._leaves.values()),
                grad_outputs=[vectors[i] for i in live],
                retain_graph=keep,
                materialize_grads=True,
            )
        total.add_(self.problem.layout.flatten(dict(zip(self._leaves, parts, strict=True))), alpha=share)


def dense_hessian(problem: Problem, theta: Tensor | None = None) -> Tensor:
    """∇²L(θ) as a (P, P) matrix, one product a column: for tests and very small models."""
    operator = HessianOperator(problem, theta)
    columns = [operator(e) for e in torch.eye(len(problem.theta), dtype=problem.dtype, device=problem.device)]
    return torch.stack(columns, dim=1)

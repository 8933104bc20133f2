"""A quadratic loss with an exactly known Hessian, the reference of the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from landscape.core import registry
from landscape.core.errors import InputError


@registry.models.add("quadratic")
class Quadratic(nn.Module):
    """Per-sample losses L_i(w) = s_i/2 · (w−c)ᵀH(w−c) + b_iᵀ(w−c), for samples x_i = (s_i, b_i).

    H = Q diag(eigenvalues) Qᵀ. Input x (B, 1 + P), output (B,). With the samples' mean s at 1 and mean b at
    0, as in the data set "quadratic", the mean loss is ½(w−c)ᵀH(w−c) and its Hessian exactly H. All in
    float64.

    Args:
        eigenvalues: The P eigenvalues of H.
        rotate: Q is a random orthogonal matrix; if false, the identity. Source: ours.
        seed: Draws Q. Source: ours.
        start: All initial weights. Source: ours.
        center: All coordinates of c. Source: ours.
    """

    hessian: Tensor
    center: Tensor

    def __init__(
        self,
        eigenvalues: list[float],
        rotate: bool = True,
        seed: int = 0,
        start: float = 1.0,
        center: float = 0.0,
    ) -> None:
        super().__init__()
        if not eigenvalues:
            raise InputError("model.eigenvalues: [] is not allowed, it must hold at least one number")
        size = len(eigenvalues)
        generator = torch.Generator().manual_seed(seed)
        q = torch.eye(size, dtype=torch.float64)
        if rotate:
            q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
        h = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
        self.register_buffer("hessian", ((h + h.T) / 2))
        self.register_buffer("center", torch.full((size,), center, dtype=torch.float64))
        self.w = nn.Parameter(torch.full((size,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.w - self.center
        return 0.5 * x[:, 0] * (offset @ self.hessian @ offset) + x[:, 1:] @ offset

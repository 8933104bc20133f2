"""A strict saddle of any dimension, bounded below, for experiments on the escape time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import positive


@registry.models.add("saddle")
class Saddle(nn.Module):
    """L_i(w) = s_i f(w) + b_iᵀw, f(x, y) = Σ_k γ(x_k⁴/4 − x_k²/2) + κ/2 ‖y‖², for samples x_i = (s_i, b_i).

    x are the unstable coordinates, which come first, y the rest. The Hessian of f at its saddle w = 0 has −γ
    and κ; the minima are at x_k = ±1, y = 0, where f is :attr:`depth` = −γ/4 for each unstable coordinate.
    Training starts at the saddle, so that it leaves only by noise. Data as for
    :class:`landscape.models.quadratic.Quadratic`. DPSGD-2020's problem is in an appendix that is not
    available: this family is ours.

    Args:
        dimension: Number of weights. Source: ours.
        unstable: Number of unstable coordinates. Source: ours.
        descent: γ. Source: ours.
        curvature: κ. Source: ours.
    """

    def __init__(
        self, dimension: int = 2, unstable: int = 1, descent: float = 1.0, curvature: float = 1.0
    ) -> None:
        super().__init__()
        positive("model.dimension", dimension, least=1)
        if not 1 <= unstable <= dimension:
            raise InputError(f"model.unstable: {unstable} is not allowed, it must be 1…{dimension}")
        positive("model.descent", descent)
        positive("model.curvature", curvature)
        self.unstable, self.descent, self.curvature = unstable, descent, curvature
        self.w = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    @property
    def depth(self) -> float:
        """min f."""
        return -self.descent * self.unstable / 4

    def forward(self, x: Tensor) -> Tensor:
        u, y = self.w[: self.unstable], self.w[self.unstable :]
        f = self.descent * (u**4 / 4 - u**2 / 2).sum() + self.curvature / 2 * (y**2).sum()
        return x[:, 0] * f + x[:, 1:] @ self.w

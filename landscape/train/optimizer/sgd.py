"""SGD with momentum, Nesterov's or none, and weight decay."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import below_one, positive
from landscape.train.optimizer.base import Optimizer


@registry.optimizers.add("sgd")
class SGD(Optimizer):
    """``torch.optim.SGD`` without dampening: g ← g + λ p; v ← m v + g; u = v, or Nesterov's u = g + m v.

    Without momentum and weight decay u is the gradient.

    Args:
        momentum: m. Source: DPSGD-2020, Figure 2.
        nesterov: Use Nesterov's form. Source: torch.optim.SGD.
        weight_decay: λ. Source: DPSGD-2020, Figure 2.
    """

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        super().__init__()
        below_one("optimizer.momentum", momentum)
        positive("optimizer.weight_decay", weight_decay, least=0)
        if nesterov and not momentum:
            raise InputError("optimizer.nesterov: true is not allowed without optimizer.momentum > 0")
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.names = ("momentum",) if momentum else ()

    @property
    def direction_is_gradient(self) -> bool:
        return not self.momentum and not self.weight_decay

    @property
    def heavy_ball(self) -> tuple[float, str] | None:
        return self.momentum, "nesterov" if self.nesterov else "ordinary"

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        if self.weight_decay:
            gradients = torch.add(gradients, points, alpha=self.weight_decay)
        if not self.momentum:
            return gradients
        v = torch.add(gradients, self.state["momentum"], alpha=self.momentum)
        self.state = {"momentum": v}
        return torch.add(gradients, v, alpha=self.momentum) if self.nesterov else v

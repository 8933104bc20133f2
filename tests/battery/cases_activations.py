"""Every activation of PyTorch between two linear layers."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from tests.battery.case import Case, Parts, classes

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Softplus": lambda: nn.Softplus(2.0, 1.0),
    "ELU": lambda: nn.ELU(0.7),
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "Identity": nn.Identity,
    "Hardtanh": nn.Hardtanh,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "ReLU6": nn.ReLU6,
    "Threshold": lambda: nn.Threshold(0.1, -0.3),
    "PReLU": lambda: nn.PReLU(6),
    "RReLU": nn.RReLU,
    "GLU": nn.GLU,
    "Softmax": lambda: nn.Softmax(dim=1),
    "LogSoftmax": lambda: nn.LogSoftmax(dim=1),
}


def _case(name: str, activation: Callable[[], nn.Module]) -> Case:
    def build() -> Parts:
        middle = activation()
        hidden = 3 if isinstance(middle, nn.GLU) else 6
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), middle, nn.Linear(hidden, 3))
        return model, F.cross_entropy, classes()

    # PyTorch has no second derivative of it: "derivative for aten::hardsigmoid_backward is not implemented".
    refused = "second derivative" if name == "Hardsigmoid" else ""
    return Case(f"activation {name}", build, refused_hessian=refused)


CASES = [_case(name, activation) for name, activation in ACTIVATIONS.items()]

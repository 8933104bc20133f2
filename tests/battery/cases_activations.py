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
    "GELU tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "Softplus": lambda: nn.Softplus(2.0, 1.0),
    "ELU": lambda: nn.ELU(0.7),
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "Identity": nn.Identity,
    "Mish": nn.Mish,
    "Hardtanh": nn.Hardtanh,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "SELU": nn.SELU,
    "CELU": lambda: nn.CELU(0.5),
    "ReLU6": nn.ReLU6,
    "Softsign": nn.Softsign,
    "Tanhshrink": nn.Tanhshrink,
    "Hardshrink": lambda: nn.Hardshrink(0.2),
    "Softshrink": lambda: nn.Softshrink(0.2),
    "Threshold": lambda: nn.Threshold(0.1, -0.3),
    "LogSigmoid": nn.LogSigmoid,
    "PReLU": lambda: nn.PReLU(6),
    "PReLU of one": nn.PReLU,
    "RReLU": nn.RReLU,
    "GLU": nn.GLU,
    "Softmax": lambda: nn.Softmax(dim=1),
    "Softmin": lambda: nn.Softmin(dim=-1),
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

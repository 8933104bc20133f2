"""Structures of inputs and outputs, and precisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import Case, Parts, chain, classes, classifier, images, module, net


class Two(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


def _outputs(kind: Callable[[Tensor, Tensor], Any], logits: Callable[[Any], Tensor]) -> Callable[[], Parts]:
    """A model with two outputs in one structure, and a loss of both."""

    def forward(m: Any, x: Tensor) -> Any:
        h = m.a(x).tanh()
        return kind(m.b(h), h)

    def loss(o: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(logits(o), y)

    return lambda: (net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), loss, classes())


def dict_inputs() -> Parts:
    @module(a=nn.Linear(2, 3), b=nn.Linear(4, 3))
    def model(m: Any, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return m.a(left).tanh() * scale + m.b(right)

    x, y = classes()
    return model, F.cross_entropy, ({"left": x[:, :2].clone(), "right": x, "scale": 0.5}, y)


def complex_parameter() -> nn.Module:
    w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    return net(lambda m, x: (x.to(m.w.dtype) @ m.w).abs(), w=w)


def mixed_precision() -> nn.Module:
    """A float64 layer behind a float32 one."""
    return net(lambda m, x: m.b(m.a(x).to(m.b.weight.dtype)), a=nn.Linear(4, 4), b=nn.Linear(4, 3).double())


CASES = [
    classifier("complex parameter", complex_parameter, refused="complex"),
    classifier("float64 behind float32", mixed_precision),
    classifier("float32 chain", chain, dtype=None),
    classifier("float64 model, float32 data", lambda: chain().double(), dtype=None),
    classifier("bfloat16 chain", lambda: chain().bfloat16(), dtype=None),
    Case("float32 convolution", lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), F.cross_entropy, images()), dtype=None),
    Case("tuple of outputs", _outputs(lambda z, h: (z, h), lambda o: o[0] + o[1].sum(1, keepdim=True) ** 2)),
    Case("NamedTuple of outputs", _outputs(Two, lambda o: o.logits * o.hidden.mean(1, keepdim=True))),
    Case("dataclass of outputs", _outputs(Result, lambda o: o.logits * o.hidden.mean(1, keepdim=True))),
    Case("dict of inputs", dict_inputs),
]  # fmt: skip

"""Quantised, pruned, low-rank and shared weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.ordinary.use import Parts, Theme, once

compressed = Theme("compressed")


def digits(samples: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6), torch.randint(3, (samples,))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class LoRALinear(nn.Module):
    def __init__(self, linear: nn.Linear, r: int = 2, alpha: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.linear.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.randn(linear.out_features, r) * 0.3)
        self.scaling, self.dropout = alpha / r, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T * self.scaling


@compressed("LoRA written by hand over frozen layers")
def lora() -> Parts:
    model = network()
    model[0], model[2] = LoRALinear(model[0]), LoRALinear(model[2])
    return model, nn.CrossEntropyLoss(), digits()


@compressed("BitFit: biases only")
def bitfit() -> Parts:
    model = network()
    for name, p in model.named_parameters():
        p.requires_grad = "bias" in name
    return model, nn.CrossEntropyLoss(), digits()


@compressed("torch.nn.utils.prune: l1_unstructured, with its masks in place")
def pruned() -> Parts:
    model = network()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    return model, nn.CrossEntropyLoss(), digits()


@compressed(
    "quantisation-aware training: fake quantisation, straight-through",
    expected="refused_hessian",
    undefined=True,
    words="derivative",
    why="rounding has no derivative; the straight-through gradient is not that of the loss",
)
def fake_quantised() -> Parts:
    class QuantLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = float(self.weight.detach().abs().max()) / 7
            return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, scale, 0, -8, 7), self.bias)

    return nn.Sequential(QuantLinear(6, 5), nn.Tanh(), nn.Linear(5, 3)), F.cross_entropy, digits()


@compressed(
    "dynamically quantised to int8",
    expected="refused",
    undefined=True,
    words="parameter",
    why="its weights are integers in buffers; nothing is left to differentiate by or to move along",
)
def int8() -> Parts:
    class Int8Linear(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("scale", scale)
            self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
            self.register_buffer("bias", linear.bias.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x) * self.scale, self.bias)

    model = network()
    return nn.Sequential(Int8Linear(model[0]), nn.ReLU(), Int8Linear(model[2])), F.cross_entropy, digits()


@compressed("tied autoencoder: the decoder is the encoder's transpose")
def tied_autoencoder() -> Parts:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.bias = nn.Linear(6, 3), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)

    x, _ = digits()
    return Tied(), nn.MSELoss(), (x, x)


@compressed("parametrizations.orthogonal, and a symmetric parametrisation of one's own")
def parametrised() -> Parts:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(6, 4), orthogonal_map="cayley"),
        nn.Tanh(),
        nn.Linear(4, 4),
        nn.Linear(4, 3),
    )
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    return model, nn.CrossEntropyLoss(), digits()


def without_compile(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The module inside of a compiled one."""
    return once(getattr(model, "_orig_mod", model), loss, data)


@compressed("torch.compile(model)", total=without_compile)
def compiled() -> Parts:
    return torch.compile(network()), nn.CrossEntropyLoss(), digits()

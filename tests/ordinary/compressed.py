"""Quantized, pruned, low-rank and shared weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.battery.case import module
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


@compressed("DoRA: magnitude and direction of a low-rank update")
def dora() -> Parts:
    class DoRALinear(nn.Module):
        def __init__(self, linear: nn.Linear, r: int = 2) -> None:
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.m = nn.Parameter(linear.weight.norm(p=2, dim=0, keepdim=True).detach().clone())
            self.A, self.B = nn.Parameter(torch.randn(r, 6) / 2), nn.Parameter(torch.randn(5, r) / 2)

        def forward(self, x: Tensor) -> Tensor:
            combined = self.linear.weight + self.B @ self.A
            return F.linear(x, self.m * combined / combined.norm(p=2, dim=0, keepdim=True), self.linear.bias)

    model = network()
    model[0] = DoRALinear(model[0])
    return model, nn.CrossEntropyLoss(), digits()


@compressed("bottleneck adapters in a frozen network")
def adapters() -> Parts:
    @module(base=network().requires_grad_(False),
        adapter=nn.Sequential(nn.Linear(5, 2), nn.GELU(), nn.Linear(2, 5)))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        h = self.base[1](self.base[0](x))
        return self.base[2](h + self.adapter(h))

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


@compressed("pruned by rows and made permanent")
def pruned_for_good() -> Parts:
    model = network()
    prune.ln_structured(model[0], "weight", amount=2, n=2, dim=0)
    prune.remove(model[0], "weight")
    return model, nn.CrossEntropyLoss(), digits()


@compressed("lottery ticket: a mask in a buffer, multiplied in forward")
def lottery_ticket() -> Parts:
    class MaskedLinear(nn.Linear):
        def __init__(self, i: int, o: int) -> None:
            super().__init__(i, o)
            self.register_buffer("weight_mask", (torch.rand(o, i) > 0.5).float())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.weight_mask, self.bias)

    return nn.Sequential(MaskedLinear(6, 5), nn.Tanh(), MaskedLinear(5, 3)), F.cross_entropy, digits()


@compressed.no_hessian("quantization-aware training: fake quantization, straight-through",
    "rounding has no derivative; the straight-through gradient is not that of the loss")  # fmt: skip
def fake_quantized() -> Parts:
    class QuantLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = float(self.weight.detach().abs().max()) / 7
            return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, scale, 0, -8, 7), self.bias)

    return nn.Sequential(QuantLinear(6, 5), nn.Tanh(), nn.Linear(5, 3)), F.cross_entropy, digits()


@compressed.no_hessian("binarized weights: sign with a straight-through trick",
    "the sign has no derivative; the straight-through gradient is not that of the loss")  # fmt: skip
def binarized() -> Parts:
    class BinaryLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            binary = w.abs().mean() * torch.sign(w)
            return F.linear(x, w + (binary - w).detach(), self.bias)

    return nn.Sequential(BinaryLinear(6, 5), nn.Tanh(), nn.Linear(5, 3)), F.cross_entropy, digits()


@compressed.undefined("dynamically quantized to int8",
    "its weights are integers in buffers; nothing is left to differentiate by or to move along", "parameter")  # fmt: skip
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


@compressed("QLoRA's form: int8 base in buffers, trainable low-rank part")
def qlora() -> Parts:
    class QLinear(nn.Module):
        def __init__(self, linear: nn.Linear, r: int = 2) -> None:
            super().__init__()
            scale = linear.weight.detach().abs().max() / 127
            self.register_buffer("scale", scale)
            self.register_buffer("base", (linear.weight.detach() / scale).round().to(torch.int8))
            self.A, self.B = (
                nn.Parameter(torch.randn(r, linear.in_features) / 2),
                nn.Parameter(torch.randn(linear.out_features, r) / 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.base.to(x.dtype) * self.scale) + x @ self.A.T @ self.B.T

    model = network()
    return nn.Sequential(QLinear(model[0]), nn.ReLU(), QLinear(model[2])), nn.CrossEntropyLoss(), digits()


@compressed("tied autoencoder: the decoder is the encoder's transpose")
def tied_autoencoder() -> Parts:
    @module(encoder=nn.Linear(6, 3), bias=nn.Parameter(torch.zeros(6)))
    def model(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)

    x, _ = digits()
    return model, nn.MSELoss(), (x, x)


@compressed("ALBERT's form: one layer used three times")
def shared_layers() -> Parts:
    @module(inputs=nn.Linear(6, 4), layer=nn.Linear(4, 4), head=nn.Linear(4, 3))
    def model(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for _ in range(3):
            x = x + torch.tanh(self.layer(x))
        return self.head(x)

    return model, nn.CrossEntropyLoss(), digits()


@compressed("hashed weights: one vector of values, indices in a buffer")
def hashed() -> Parts:
    class HashedLinear(nn.Module):
        def __init__(self, i: int, o: int, k: int = 8) -> None:
            super().__init__()
            self.values, self.bias = nn.Parameter(torch.randn(k) / 2), nn.Parameter(torch.zeros(o))
            self.register_buffer("index", torch.randint(k, (o, i)))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.values[self.index], self.bias)

    return nn.Sequential(HashedLinear(6, 5), nn.ReLU(), HashedLinear(5, 3)), F.cross_entropy, digits()


@compressed("a low-rank layer from an SVD, as two linear layers")
def svd_layers() -> Parts:
    linear = nn.Linear(6, 5)
    u, s, v = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5)
    down.weight.data, up.weight.data = (s[:2, None] * v[:2]).clone(), u[:, :2].clone()
    return nn.Sequential(down, up, nn.ReLU(), nn.Linear(5, 3)), F.cross_entropy, digits()


@compressed("parametrizations.orthogonal, and a symmetric parametrization of one's own")
def parametrized() -> Parts:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    layers = parametrizations.orthogonal(nn.Linear(6, 4), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(4, 4)
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    return model, nn.CrossEntropyLoss(), digits()


@compressed("early exits: a list of outputs, the mean of their losses")
def early_exits() -> Parts:
    @module(blocks=nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 5)]),
        exits=nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]))  # fmt: skip
    def model(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for block, head in zip(self.blocks, self.exits, strict=True):
            x = F.relu(block(x))
            outputs.append(head(x))
        return outputs

    return model, lambda outs, y: sum(F.cross_entropy(o, y) for o in outs) / len(outs), digits()


@compressed("an average of weights: torch.optim.swa_utils.AveragedModel")
def averaged_model() -> Parts:
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    averaged.update_parameters(model)
    return averaged, F.cross_entropy, digits()


def without_compile(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The module inside of a compiled one."""
    return once(getattr(model, "_orig_mod", model), loss, data)


# fmt: off
compressed("torch.compile(model)", total=without_compile, name="compiled")(
    lambda: (torch.compile(network()), nn.CrossEntropyLoss(), digits()))

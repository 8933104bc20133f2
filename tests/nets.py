"""Networks that recipes of the tests name as a user's own, "tests.nets:norm_net"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


def norm_net(inputs: int = 6, classes: int = 3, dropout: float = 0.0) -> nn.Sequential:
    """BatchNorm twice, once without an average that decays; perhaps dropout; a frozen layer and a constant."""
    layers = nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5)
    net = nn.Sequential(*layers, nn.BatchNorm1d(5, momentum=None), nn.Linear(5, classes), Scale(classes))
    net[4].bias.requires_grad_(False)
    return net


def tagger() -> nn.Sequential:
    """Three classes at each of two places of six inputs."""
    return nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (3, 2)))


class Scale(nn.Module):
    """Multiplies by a constant that is drawn when it is made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", 1 + torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("scale")


class Counting(nn.Module):
    """Counts its calls in a buffer that BatchNorm has no part in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("calls").add_(1)
        return self.linear(x)


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019) with random weights and a tied head; by default the one of 124,439,808.

    It takes tokens (B, T) to logits (B, vocabulary, T), as cross_entropy wants them.
    """

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():  # as in its paper
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** (0.5 * into_residual))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return (self.norm(h) @ self.tokens.weight.T).transpose(1, 2)


class CausalBlock(nn.Module):
    """A block of GPT-2: causal attention and two layers, each after a LayerNorm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Tied(nn.Module):
    """Tied weights, a frozen one, and a layer that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.rare = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = self.second(self.first(x).tanh()) * self.scale
        out: Tensor = self.rare(x) if rare else x
        return out


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that is drawn anew."""

    def __init__(self, x: Tensor, y: Tensor, noise: float = 0.1) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + self.noise * torch.randn(5), self.y[i]


def flat(model: nn.Module) -> Tensor:
    """(P,): all parameters, in order."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fsdp(model: nn.Module, ranks: int, mesh: Any = None) -> nn.Module:
    """``model`` under FSDP2, each of its blocks by itself."""
    from torch.distributed.device_mesh import init_device_mesh  # here, as they take a second
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

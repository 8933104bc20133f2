"""How much of the barrier between two networks goes by alignment, at several widths?

``python -m benchmarks.widths`` trains three networks of each kind and width on the bundled digits, a pair of each two of
them, and writes the table of docs/explanation/connection.md (five minutes on one core).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape.problem.alignment import Symmetry, _activations, aligned

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "connection.md"
BEGIN, END = "<!-- widths: python -m benchmarks.widths -->\n", "<!-- end of widths -->"
SEEDS, EPOCHS, BATCH, LR, POINTS = 3, 20, 64, 5e-3, 5


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.skip = nn.Identity() if inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.skip(x))


class Block(nn.Module):
    """Attention of four heads with separate projections and a feed-forward layer, each after a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.n, self.m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.f = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        q, k, v = (layer(h).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.f(self.m(x))


class ViT(nn.Module):
    """Two blocks over the 16 patches of an image of 8 × 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).mT + self.places).mean(1))


def mlp(width: int) -> nn.Module:
    hidden = (nn.Sequential(nn.Linear(n, width), nn.ReLU()) for n in (64, width, width))
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def vgg(width: int) -> nn.Module:
    sizes = (1, width, 2 * width, 4 * width)
    layers = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
        for i, o in itertools.pairwise(sizes)
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width, 10))


def resnet(width: int) -> nn.Module:
    blocks = Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
    first = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


KINDS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "MLP, 3 hidden layers": (mlp, (32, 128, 512)),
    "VGG with BatchNorm, 3 convolutions": (vgg, (8, 16, 32)),
    "ResNet with BatchNorm, 3 blocks": (resnet, (8, 16, 32)),
    "ViT, 2 layers, 4 heads": (ViT, (16, 32, 64)),
}


def trained(make: Callable[[int], nn.Module], width: int, seed: int, x: Tensor, y: Tensor) -> nn.Module:
    """Train by Adam, with a rate that falls linearly to zero."""
    torch.manual_seed(seed)
    net = make(width).train()
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.Adam(net.parameters(), LR)
    for step in range(steps):
        few = torch.randint(len(x), (BATCH,))
        optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
        optimizer.zero_grad()
        F.cross_entropy(net(x[few]), y[few]).backward()
        optimizer.step()
    return net.eval()


def measured(problem: landscape.Problem, a: Tensor, b: Tensor) -> list[float]:
    """The barriers on the line, and after alignment by weights and by activations; with the units' correlation.

    That is the mean over the units of each activation that is read, after matching by activations.
    """
    ends = [b, *(aligned(problem, a, b, by)[0] for by in ("weights", "activations"))]
    lines = [
        landscape.line(
            problem, weights=torch.stack((a, end)), points=POINTS, bn="recalibrate", bn_samples=500
        )
        for end in ends
    ]
    symmetry = Symmetry.of(problem).of_activations()
    of_a, of_b = _activations(problem, symmetry, (a, ends[2]))
    correlations = [float((of_a[name] * t).sum() / (t.square().sum() or 1)) for name, t in of_b.items()]
    return [*(line.barrier for line in lines), float(np.mean(correlations))]


def main() -> None:
    x, y = landscape.data.load("digits").train  # type: ignore[misc]
    x = x.view(-1, 1, 8, 8)
    head = "network | width | barrier on the line | removed, by weights | removed, by activations | correlation of units"
    rows = [f"| {head} |", "| --- | --- | --- | --- | --- | --- |"]
    for kind, (make, widths) in KINDS.items():
        for width in widths:
            nets = [trained(make, width, seed, x, y) for seed in range(SEEDS)]
            problem = landscape.Problem(nets[0], F.cross_entropy, (x, y))
            weights = [nn.utils.parameters_to_vector(net.parameters()).detach() for net in nets]
            pairs = [measured(problem, a, b) for a, b in itertools.combinations(weights, 2)]
            print(kind, width, pairs, flush=True)
            line, *aligned_, alike = map(np.array, zip(*pairs, strict=True))
            removed = [", ".join(f"{share:.0%}" for share in 1 - each / line) for each in aligned_]
            barriers = ", ".join(f"{value:.2f}" for value in line)
            rows.append(
                f"| {kind} | {width} | {barriers} | {removed[0]} | {removed[1]} | {alike.mean():.2f} |"
            )
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    table = "\n".join(rows)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()

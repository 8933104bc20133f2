"""Contours of the MNIST network against the textbook loop."""

from __future__ import annotations

import copy

import torch

import landscape
from tests.benchmarks.harness import compare, mnist


def main() -> None:
    data = landscape.data.load(**mnist())
    x, y = (t[:10_000] for t in data.test)
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[784, 50, 50, 10])
    problem = landscape.Problem(model, data.loss, (x, y))
    plane = landscape.random_plane(problem)
    moved = copy.deepcopy(model).eval()
    grid = torch.linspace(-0.1, 0.1, 50).tolist()
    found: dict[str, torch.Tensor] = {}

    def ours() -> None:
        surface = landscape.contour(problem, plane, grid=(50, 50), span=0.1)
        found["ours"] = torch.from_numpy(surface.loss)

    @torch.no_grad()
    def textbook() -> None:
        """Set the weights of a model, one full-batch forward pass, for every point."""
        rows = []
        for b in grid:
            for a in grid:
                theta = plane.center + a * plane.directions[0] + b * plane.directions[1]
                torch.nn.utils.vector_to_parameters(theta, moved.parameters())
                rows.append(data.loss(moved(x), y))
        found["textbook"] = torch.stack(rows).view(50, 50)

    compare(
        "contour, 784-50-50-10, 50 × 50 points, 10,000 images, against a full-batch forward a point",
        ours, textbook, rounds=3, need=4.0,
    )  # fmt: skip
    worst = float((found["ours"] - found["textbook"]).abs().max())
    print(f"  largest difference in loss: {worst:.1e} (allowed 1e-5)", flush=True)

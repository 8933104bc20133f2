"""Sixteen stacked learners against a loop over sixteen modules."""

from __future__ import annotations

import dataclasses

import torch

import landscape
from landscape.train import recipe
from landscape.train.loop import Trainer
from landscape.train.randomness import generator
from tests.benchmarks.harness import compare, mnist

LEARNERS, STEPS = 16, 40


def main() -> None:
    table = mnist()
    data = landscape.data.load(**table)
    settings = [
        f"learners={LEARNERS}", f"steps={STEPS}", "lr=0.2", "decompose.every=0", "evaluate.every=0",
    ]  # fmt: skip
    chosen = dataclasses.replace(recipe.read("mnist-fig2a-dpsgd", settings), data=table)
    stacked = Trainer(chosen)
    start = stacked.weights.clone()
    x, y = data.train
    models = [landscape.models.build("mlp", widths=[784, 50, 50, 10]) for _ in range(LEARNERS)]
    found: dict[str, torch.Tensor] = {}

    def ours() -> None:
        stacked.weights, stacked.step, stacked.rows = start.clone(), 0, []
        found["ours"] = stacked.run().weights

    def loop() -> None:
        """What one would write: a module a learner, backward, average, step."""
        for model in models:
            torch.nn.utils.vector_to_parameters(start[0].clone(), model.parameters())
        for t in range(1, STEPS + 1):
            indices = torch.randint(len(y), (LEARNERS, 2000 // LEARNERS), generator=generator(0, "batch", t))
            for model, rows in zip(models, indices, strict=True):
                model.zero_grad()
                data.loss(model(x[rows]), y[rows]).backward()
            with torch.no_grad():
                for parameters in zip(*(m.parameters() for m in models), strict=True):
                    mean = torch.stack([p.data for p in parameters]).mean(0)
                    for p in parameters:
                        p.copy_(mean - 0.2 * p.grad)
        found["loop"] = torch.stack(
            [torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
        )

    compare(
        f"training, 784-50-50-10, {LEARNERS} DPSGD learners × {2000 // LEARNERS}, {STEPS} steps, against a loop",
        ours, loop, rounds=9, need=1.5,
    )  # fmt: skip
    worst = float((found["ours"] - found["loop"]).abs().max())
    print(f"  largest difference in weights after {STEPS} steps: {worst:.1e}", flush=True)

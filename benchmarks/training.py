"""Sixteen learners, of a small network against a loop over modules, of ResNet-18 against plain SGD; a recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import landscape
from benchmarks.harness import DEVICE, MATCHING, SMOKE, compare, few, mnist, say, synthetic, trained
from landscape.training.recipes import recipe
from landscape.training.run import generator
from landscape.training.run.loop import Trainer

LEARNERS, STEPS = 16, few(40, 2)
# Images a step of ResNet-18: 32 a learner.
BATCH = few(512, 32)


def main() -> None:
    small()
    six_learners("noise-scale every 50 steps", 0.95, ["monitor.instruments=['noise-scale']"])
    six_learners("loss-change every 50 steps", 0.97, ["monitor.instruments=['loss-change']"])
    estimated = ["decompose.every=10", "decompose.samples=512"]
    what = "every 10th step decomposed, g of 512 samples"
    six_learners(what, 0.95, [*estimated, "decompose.split=false"])
    six_learners(f"{what}, with the terms of Eq. 4", 0.9, estimated)
    convolutional()


def small() -> None:
    table = mnist()
    data = landscape.data.load(**table)
    settings = [
        f"learners={LEARNERS}", f"steps={STEPS}", "lr=0.2", "decompose.every=0", "evaluate.every=0",
    ]  # fmt: skip
    chosen = dataclasses.replace(recipe.read("mnist-fig2a-dpsgd", settings), data=table)
    stacked = Trainer(chosen, device=DEVICE)
    start = stacked.weights.clone()
    x, y = (part.to(DEVICE) for part in data.train)
    models = [landscape.models.build("mlp", widths=[784, 50, 50, 10]).to(DEVICE) for _ in range(LEARNERS)]
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
    say(f"  largest difference in weights after {STEPS} steps: {worst:.1e}")


def fifty_steps(run: Trainer) -> None:
    """As many as from one measurement to the next."""
    for _ in range(few(50, 2)):
        run._step(run.step + 1)


def six_learners(what: str, need: float, settings: list[str]) -> None:
    """Steps of Figure 2's network with ``settings`` that measure, against those that only train."""
    table = mnist()
    for rule in ("ssgd", "dpsgd"):
        runs = []
        for measured in (settings, []):
            chosen = recipe.read(
                "mnist-fig2b-dpsgd",
                [f"algorithm={{name='{rule}'}}", "decompose.every=0", "evaluate.every=0",
                 f"steps={10**6}", "monitor.instruments=[]", *measured],
            )  # fmt: skip
            runs.append(Trainer(dataclasses.replace(chosen, data=table), device=DEVICE))

        with_, without = (functools.partial(fifty_steps, run) for run in runs)
        compare(
            f"training, 784-50-50-10, 6 learners of {rule.upper()}, batch 1998, {what}",
            with_, without, rounds=15, need=need,
        )  # fmt: skip


def resnet18() -> nn.Module:
    """CIFAR's ResNet-18 for rows of numbers, such as the synthetic data set's."""
    network = landscape.models.build("resnet-18", width=0.25 if SMOKE else 1.0)
    return nn.Sequential(nn.Unflatten(1, (3, 32, 32)), network)


def convolutional() -> None:
    """A step of 16 DPSGD learners, BatchNorm in training mode, against one of plain SGD on the same images."""
    learners = Trainer(
        synthetic(
            "convolutional", learners=LEARNERS, batch=BATCH, samples=BATCH, dimension=3 * 32 * 32,
            algorithm=MATCHING, model={"name": "benchmarks.training:resnet18"},
        ),
        device=DEVICE,
    )  # fmt: skip
    assert learners.train_problem.tensors is not None
    x, y = learners.train_problem.tensors
    model = resnet18().train().to(DEVICE)

    def plain() -> None:
        rows = torch.randint(len(y), (BATCH,))
        trained(model, torch.nn.functional.cross_entropy, [(x[rows], y[rows])], lr=0.01)

    compare(
        f"training, ResNet-18, {LEARNERS} DPSGD learners × {BATCH // LEARNERS}, against plain SGD on {BATCH}",
        lambda: learners._step(learners.step + 1), plain, rounds=5, need=1 / 1.1,
    )  # fmt: skip


# A loop of the user's own with a recorder against the same loop without one.

RECORDED, RECORDED_STEPS = 128, few(200, 50)  # a minibatch, steps
# g of a recorded step: eight minibatches, beside fifty of the loop.
SAMPLES = 1024


def own_loop(data: Any, recorder: Callable[..., landscape.Recorder] | None) -> Callable[[], None]:
    """RECORDED_STEPS steps of SGD with momentum; ``recorder(model=…, optimizer=…)`` makes what records them."""
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[784, 300, 100, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = data.train
    own = recorder(model=model, optimizer=optimizer) if recorder else None

    def run() -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(RECORDED_STEPS):
            rows = torch.randint(len(y), (RECORDED,), generator=generator)
            optimizer.zero_grad()
            data.loss(model(x[rows]), y[rows]).backward()
            with own.step() if own else contextlib.nullcontext():
                optimizer.step()

    return run


def recorded() -> None:
    data = landscape.data.load(**mnist())
    for title, every, need in (
        (f"recorder on every 50th step, g from {SAMPLES:,} samples", 50, 0.65),
        ("recorder, no step due", 0, 0.98),
    ):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            options = {"every": every, "samples": SAMPLES, "save_every": 0}
            make = functools.partial(landscape.Recorder, folder, loss=data.loss, data=data.train, **options)
            compare(
                f"own loop, 784-300-100-10, batch {RECORDED}, {title}, against no recorder",
                own_loop(data, lambda make=make, **own: stack.enter_context(make(**own))),
                own_loop(data, None), rounds=9, need=need,
            )  # fmt: skip

"""Pictures of 51 × 51 points within 1%, stated, against all points by the textbook loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import landscape
from benchmarks.harness import (
    DEVICE,
    MADE,
    Textbook,
    compare,
    few,
    installed,
    loader,
    mnist_problem,
    passes,
    say,
    trained,
)  # fmt: skip

POINTS = few(51, 5)
IMAGES = few(512, 2)  # of ResNet-18: a part of the samples is used from so many on


def main() -> None:
    small()
    large()
    language()


def said(surface: landscape.Surface, whole: landscape.Surface | None = None) -> None:
    """Print how many points a picture took, and its error."""
    true = ""
    if whole is not None:
        true = f", true {np.abs(surface.loss - whole.loss).max() / np.ptp(whole.loss):.2%}"
    stated = f"{surface.stated_error[0]:.2%}" if surface.columns else "no error"  # all points are computed
    say(f"  {surface.evaluations} of {surface.done.size} points, stated {stated}{true}")


def diagonal(span: float, count: int, slope: float) -> list[tuple[float, float]]:
    """``count`` points (a, slope · a) of the picture."""
    return [(a, slope * a) for a in np.linspace(-span, span, count).tolist()]


def small() -> None:
    """784-50-50-10 trained for 1,500 steps, 10,000 images."""
    problem = mnist_problem(steps=1500, batch=500, lr=0.5)
    plane = landscape.random_plane(problem)
    by_loader = Textbook(problem.model, plane, passes(problem.criterion, loader(problem)))
    found: dict[str, landscape.Surface] = {}

    def ours() -> None:
        found["some"] = landscape.contour(problem, plane, POINTS, interpolation_tol="1%")

    def full() -> None:
        found["all"] = landscape.contour(problem, plane, POINTS, method="batched")

    title = "contour within 1%, 784-50-50-10, 51 × 51 points, 10,000 images"
    compare(f"{title}, against all points", ours, full, rounds=5, need=15.0)
    said(found["some"], found["all"])
    work = POINTS**2
    if DEVICE.type == "cpu" and (peer := installed("loss_landscapes")):  # it fails on tensors of a GPU
        metric = peer.metrics.Loss(problem.criterion, *problem.tensors)
        compare(
            f"{title}, against loss-landscapes, all points", ours,
            lambda: peer.random_plane(by_loader.model, metric, distance=1, steps=20, deepcopy_model=True),
            rounds=5, need=150.0, work=work / 400,
        )  # fmt: skip
    compare(
        f"{title}, against a loader pass for each of all points", ours,
        lambda: by_loader(diagonal(0.1, 16, 1.0)), rounds=5, need=1100.0, work=work / 16,
    )  # fmt: skip


def cifar() -> tuple[torch.Tensor, torch.Tensor]:
    """The images and labels of CIFAR-10 where LANDSCAPE_DATA has it, else a mixture of their shape."""
    try:
        images, labels = landscape.data.load("cifar10").train
    except landscape.OperationError as error:
        say(f"a Gaussian mixture, with a deeper valley, stands in for CIFAR-10: {error}")
        images, labels = landscape.data.load(**MADE | {"samples": few(5000, 30), "dimension": 3072}).train
    return images.view(-1, 3, 32, 32).to(DEVICE), labels.to(DEVICE)


def large() -> None:
    """ResNet-18 of CIFAR's size with BatchNorm, after 300 steps; filter-normalized directions."""
    torch.manual_seed(0)
    images, labels = cifar()
    model = landscape.models.build("resnet-18").to(DEVICE)
    batches = torch.randint(len(labels), (few(300, 1), few(64, 2)))
    trained(model, F.cross_entropy, ((images[b], labels[b]) for b in batches), lr=0.02, momentum=0.9)
    model.eval()
    rows = torch.randint(len(labels), (IMAGES,))
    x, y = images[rows], labels[rows]
    problem = landscape.Problem(model, F.cross_entropy, (x, y))
    plane = landscape.random_plane(problem, norm="filter")
    textbook = Textbook(model, plane, lambda moved: F.cross_entropy(moved(x), y))
    found: list[landscape.Surface] = []
    options: dict[str, Any] = {"span": 0.5, "interpolation_tol": "1%"}
    for precision in (None, "bfloat16"):
        compare(
            f"contour within 1%, ResNet-18, {precision or 'float32'}, {IMAGES} images, against the plain loop over 51 × 51 points",
            lambda p=precision: found.append(landscape.contour(problem, plane, POINTS, autocast=p, **options)),
            lambda: textbook(diagonal(0.5, 20, -1.0)),
            rounds=1, need=35.0, work=POINTS**2 / 20, warm=False,
        )  # fmt: skip
        said(found[-1])


def language() -> None:
    """GPT-2 of 2 layers from a configuration, on tokens."""
    if (transformers := installed("transformers")) is None:
        return
    torch.manual_seed(0)
    settings = transformers.GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(settings).eval().to(DEVICE)
    tokens = torch.randint(1000, (few(256, 2), 64)).to(DEVICE)

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    problem = landscape.Problem(model, loss, (tokens, tokens))
    plane = landscape.random_plane(problem, norm="filter")
    textbook = Textbook(model, plane, lambda moved: loss(moved(tokens), tokens))
    found: list[landscape.Surface] = []

    def ours() -> None:
        found.append(landscape.contour(problem, plane, POINTS, span=0.5, interpolation_tol="1%"))

    title = (
        "contour within 1%, GPT-2 of 2 layers, 256 × 64 tokens, against the plain loop over 51 × 51 points"
    )
    compare(title, ours, lambda: textbook(diagonal(0.5, 50, -1.0)), rounds=3, need=30.0, work=POINTS**2 / 50)
    said(found[-1])

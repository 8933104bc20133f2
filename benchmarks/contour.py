"""Contours against the textbook loops: a small network, and one of ResNet-18's size."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

import landscape
from benchmarks.harness import (
    DEVICE,
    Textbook,
    compare,
    few,
    installed,
    judged,
    loader,
    mnist_problem,
    passes,
    say,
)  # fmt: skip
from landscape.evaluation.evaluate import evaluator


def main() -> None:
    small()
    checks()
    large()


def small() -> None:
    """784-50-50-10, 50 × 50 points, 10,000 images."""
    problem = mnist_problem()
    plane = landscape.random_plane(problem)
    x, y = problem.tensors
    grid = torch.linspace(-0.1, 0.1, few(50, 5)).tolist()
    points = [(a, b) for b, a in itertools.product(grid, grid)]
    found: dict[str, Tensor] = {}

    def ours() -> None:
        found["ours"] = torch.from_numpy(landscape.contour(problem, plane, grid=(len(grid),) * 2).loss)

    forward = Textbook(problem.model, plane, lambda model: problem.criterion(model(x), y))
    by_loader = Textbook(problem.model, plane, passes(problem.criterion, loader(problem)))

    def full_batch() -> None:
        found["full batch"] = forward(points)

    title = "contour, 784-50-50-10, 2,500 points, 10,000 images"
    compare(f"{title}, against a full-batch forward a point", ours, full_batch, rounds=3, need=5.5)
    worst = float((found["ours"].flatten() - found["full batch"]).abs().max())
    say(f"  largest difference in loss: {worst:.1e} (allowed 1e-5)")
    if DEVICE.type == "cpu" and (peer := installed("loss_landscapes")):  # it fails on tensors of a GPU
        metric = peer.metrics.Loss(problem.criterion, x, y)
        compare(
            f"{title}, against loss-landscapes",
            ours,
            lambda: peer.random_plane(forward.model, metric, distance=1, steps=20, deepcopy_model=True),
            rounds=3, need=5.5, work=2500 / 400,
        )  # fmt: skip
    compare(
        f"{title}, against a loader pass a point",
        ours, lambda: by_loader(points[::100]), rounds=3, need=50.0, work=2500 / 25,
    )  # fmt: skip


def checks() -> None:
    """What the quick check and the comparison of paths cost, beside 625 points of the small network."""
    problem = mnist_problem()
    plane = landscape.random_plane(problem)
    times: dict[str, list[float]] = {"quick": [], "off": [], "contour": []}
    for _ in range(few(7, 1)):
        for check in ("quick", "off"):
            clock = time.perf_counter()
            made = landscape.Problem(problem.model, problem.criterion, problem.tensors, check=check)
            evaluator(made, plane.center, plane.directions, 625)
            times[check].append(time.perf_counter() - clock)
        clock = time.perf_counter()
        landscape.contour(problem, plane, grid=(25, 25))
        times["contour"].append(time.perf_counter() - clock)
    quick, off, whole = (statistics.median(t) for t in times.values())
    share = (quick - off) / whole
    say(
        f"quick check and comparison of paths: {share:.2%} of a contour of 625 points (allowed 1%: "
        f"{judged(share, 0.01, most=True)})"
    )


def large() -> None:
    """ResNet-18 of CIFAR's size, 1,000 images, a point a round; filter-normalized directions."""
    torch.manual_seed(0)
    model = landscape.models.build("resnet-18").to(DEVICE)
    with torch.no_grad():
        for _ in range(3):  # statistics that are not the initial ones
            model(torch.randn(64, 3, 32, 32).to(DEVICE))
    x = torch.randn(few(1000, 4), 3, 32, 32).to(DEVICE)
    y = torch.randint(10, (few(1000, 4),)).to(DEVICE)
    problem = landscape.Problem(model.eval(), F.cross_entropy, (x, y))
    plane = landscape.random_plane(problem, norm="filter")
    points = torch.tensor([[0.3, -0.2]])
    found: dict[str | None, Tensor] = {}

    # Made once: the comparison of paths, which a contour makes once, too, would weigh too much beside one point.
    made = {
        name: evaluator(problem, plane.center, plane.directions, 1, method="folded", autocast=name)
        for name in (None, "bfloat16")
    }

    def ours(precision: str | None) -> None:
        found[precision] = made[precision](points)["loss"]

    batches = [*zip(x.split(100), y.split(100), strict=True)]
    textbook = Textbook(model, plane, passes(F.cross_entropy, batches))

    def loop() -> None:
        found["loop"] = textbook(points.tolist())

    for precision, need in ((None, 1.25), ("bfloat16", 2.5)):
        title = f"contour, ResNet-18, {precision or 'float32'}, against the plain eval loop"
        compare(title, lambda p=precision: ours(p), loop, rounds=9, need=need)
        worst = float((found[precision] / found["loop"] - 1).abs().max())
        say(f"  largest relative difference in loss: {worst:.1e}")

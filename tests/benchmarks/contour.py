"""Contours against the textbook loops: a small network, and one of ResNet-18's size."""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

import landscape
from landscape.evaluation.evaluate import evaluator
from tests.benchmarks.harness import compare, installed, mnist


def main() -> None:
    small()
    checks()
    large()


def small() -> None:
    """784-50-50-10, 50 × 50 points, 10,000 images."""
    data = landscape.data.load(**mnist())
    x, y = (t[:10_000] for t in data.test)
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[784, 50, 50, 10])
    problem = landscape.Problem(model, data.loss, (x, y))
    plane = landscape.random_plane(problem)
    moved = copy.deepcopy(model).eval()
    grid = torch.linspace(-0.1, 0.1, 50).tolist()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=256)
    found: dict[str | None, Tensor] = {}

    def ours(path: str) -> None:
        found[path] = torch.from_numpy(landscape.contour(problem, plane, grid=(50, 50), method=path).loss)

    def move(a: float, b: float) -> None:
        theta = plane.center + a * plane.directions[0] + b * plane.directions[1]
        torch.nn.utils.vector_to_parameters(theta, moved.parameters())

    @torch.no_grad()
    def full_batch(every: int = 1) -> None:
        """Set the weights of a model, one full-batch forward pass, for every point."""
        losses = []
        for b in grid[::every]:
            for a in grid[::every]:
                move(a, b)
                losses.append(data.loss(moved(x), y))
        found["full batch"] = torch.stack(losses)

    @torch.no_grad()
    def loader_pass() -> None:
        """The same with a pass over a DataLoader, for 25 of the points."""
        for b in grid[::10]:
            for a in grid[::10]:
                move(a, b)
                sum(float(data.loss(moved(xb), yb)) * len(yb) for xb, yb in loader)

    title = "contour, 784-50-50-10, 2,500 points, 10,000 images"
    against = "against a full-batch forward a point"
    compare(f"{title}, compiled, {against}", lambda: ours("compiled"), full_batch, rounds=3, need=10.0)
    compare(
        f"{title}, without a compiler, {against}", lambda: ours("batched"), full_batch, rounds=3, need=5.5
    )
    for path in ("compiled", "batched"):
        worst = float((found[path].flatten() - found["full batch"]).abs().max())
        print(f"  largest difference in loss, {path}: {worst:.1e} (allowed 1e-5)", flush=True)
    if (peer := installed("loss_landscapes")) is not None:
        metric = peer.metrics.Loss(data.loss, x, y)
        compare(
            f"{title}, without a compiler, against loss-landscapes",
            lambda: ours("batched"),
            lambda: peer.random_plane(moved, metric, distance=1, steps=20, deepcopy_model=True),
            rounds=3, need=5.5, work=2500 / 400,
        )  # fmt: skip
    compare(
        f"{title}, compiled, against a loader pass a point",
        lambda: ours("compiled"), loader_pass, rounds=3, need=50.0, work=2500 / 25,
    )  # fmt: skip


def checks() -> None:
    """What the quick check and the comparison of paths cost, beside 625 points of the small network."""
    data = landscape.data.load(**mnist())
    x, y = (t[:10_000] for t in data.test)
    model = landscape.models.build("mlp", widths=[784, 50, 50, 10])
    problem = landscape.Problem(model, data.loss, (x, y), check="off")
    plane = landscape.random_plane(problem)
    times: dict[str, list[float]] = {"quick": [], "off": [], "contour": []}
    for _ in range(7):
        for check in ("quick", "off"):
            clock = time.perf_counter()
            made = landscape.Problem(model, data.loss, (x, y), check=check)
            evaluator(made, plane.center, plane.directions, 625)
            times[check].append(time.perf_counter() - clock)
        clock = time.perf_counter()
        landscape.contour(problem, plane, grid=(25, 25))
        times["contour"].append(time.perf_counter() - clock)
    quick, off, whole = (statistics.median(t) for t in times.values())
    share = (quick - off) / whole
    verdict = "ok" if share < 0.01 else "ABOVE"
    print(
        f"quick check and comparison of paths: {share:.2%} of a contour of 625 points (allowed 1%: {verdict})"
    )


def large() -> None:
    """ResNet-18 of CIFAR's size, 1,000 images, a point a round; filter-normalised directions."""
    torch.manual_seed(0)
    model = landscape.models.build("resnet-18")
    with torch.no_grad():
        for _ in range(3):  # statistics that are not the initial ones
            model(torch.randn(64, 3, 32, 32))
    x, y = torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,))
    model.eval()
    problem = landscape.Problem(model, F.cross_entropy, (x, y))
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

    @torch.no_grad()
    def loop() -> None:
        """Set the weights, then the usual evaluation loop in batches of 100."""
        losses = []
        for a, b in points.tolist():
            theta = plane.center + a * plane.directions[0] + b * plane.directions[1]
            torch.nn.utils.vector_to_parameters(theta, model.parameters())
            batches = zip(x.split(100), y.split(100), strict=True)
            losses.append(sum(float(F.cross_entropy(model(xb), yb)) * len(yb) for xb, yb in batches) / len(y))
        found["loop"] = torch.tensor(losses, dtype=torch.float64)

    for precision, need in ((None, 1.25), ("bfloat16", 2.5)):
        name = precision or "float32"
        compare(
            f"contour, ResNet-18, {name}, against the plain eval loop",
            lambda p=precision: ours(p), loop, rounds=9, need=need,
        )  # fmt: skip
        worst = float((found[precision] / found["loop"] - 1).abs().max())
        print(f"  largest relative difference in loss: {worst:.1e}", flush=True)

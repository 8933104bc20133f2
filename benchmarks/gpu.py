"""What users with a GPU feel, in at most six minutes: is it right there, and how fast?

``python -m benchmarks.gpu`` needs a checkout, PyTorch and the package's dependencies, pytest and scikit-learn, and no
network. Each row is printed and written as soon as it is measured, so that a run that is cut keeps its rows. With
``--device cpu`` and ``LANDSCAPE_BENCH=smoke`` it only shows that each row can be measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

ARGUMENTS = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
ARGUMENTS.add_argument("--device", default="cuda", help="where to measure (default: cuda)")
ARGUMENTS.add_argument("--only", action="append", metavar="ROW", help="this row alone; may be repeated")
ARGUMENTS.add_argument("-o", "--output", type=Path, default=Path("gpu"), help="FILE of FILE.json and FILE.md")
GIVEN = ARGUMENTS.parse_args()
# The modules of the benchmarks, of the battery and of the conformance suite read these when they are imported.
os.environ["LANDSCAPE_BENCH_DEVICE"] = os.environ["LANDSCAPE_TEST_DEVICE"] = GIVEN.device

import landscape  # noqa: E402
from benchmarks import harness, training  # noqa: E402
from benchmarks.curvature import TOL, language_model  # noqa: E402
from benchmarks.harness import DEVICE, MATCHING, SMOKE, Textbook, few, say, synthetic, wait  # noqa: E402
from landscape.cli.details import plain  # noqa: E402
from landscape.curvature.search import start_vector  # noqa: E402
from landscape.testing.device import compared  # noqa: E402
from landscape.training.run.loop import Trainer  # noqa: E402

ON_GPU = DEVICE.type == "cuda"
#: Seconds of the whole script, after which no row begins; of the sample of the tests.
SECONDS, OF_TESTS = 330, few(90, 3)
POINTS = few(51, 5)


@dataclass(frozen=True)
class Reading:
    """A number of a row, and the number that is wanted: at least that, or with ``most`` at most."""

    what: str
    value: float
    wanted: float = math.nan
    most: bool = False
    note: str = ""

    def __str__(self) -> str:
        if math.isnan(self.value):
            return f"{self.what} {'not measured' if self.note else ''}".rstrip()
        if math.isnan(self.wanted):
            return f"{self.what}: {self.value:.3g} {self.note}".rstrip()
        bound = "at most" if self.most else "at least"
        verdict = harness.judged(self.value, self.wanted, most=self.most)
        return (
            f"{self.what}: {self.value:.3g} (wanted: {bound} {self.wanted:g}: {verdict}) {self.note}".rstrip()
        )


Row = Callable[[], Iterator[Reading]]
ROWS: dict[str, Row] = {}


def row(name: str) -> Callable[[Row], Row]:
    """Register a row."""

    def register(measure: Row) -> Row:
        ROWS[name] = measure
        return measure

    return register


def seconds(function: Callable[[], object], rounds: int = 3) -> float:
    """The median time of a call, after one that warms up."""
    times = []
    for _ in range(1 + (1 if SMOKE else rounds)):
        wait()
        clock = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - clock)
    return statistics.median(times[1:])


def peak(function: Callable[[], object]) -> float:
    """GiB of the device that a call takes beside what is there before; NaN on the CPU."""
    if not ON_GPU:
        return math.nan
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


@row("versions")
def versions() -> Iterator[Reading]:
    for name, text in machine().items():
        yield Reading(f"{name} {text}", math.nan)


def machine() -> dict[str, str]:
    """The card, and the versions of what computes."""
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "cuda": str(torch.version.cuda),
        "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "landscape": landscape.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


@row("doctor")
def doctor() -> Iterator[Reading]:
    """The calls of ``landscape doctor --device``: the same numbers as on the CPU."""
    if not ON_GPU:
        say("  this is the CPU: left out")
        return
    calls = list(compared(GIVEN.device))
    yield Reading("calls that give the CPU's numbers", sum(c.same for c in calls), len(calls))
    for call in calls:
        if not call.same:
            yield Reading(f"not the same: {call.call}", call.difference, call.allowed, True, call.error)


class Sample:
    """A pytest plugin: tests in random order until the time is up, and how they ended."""

    def __init__(self) -> None:
        self.ends, self.failures = Counter[str](), list[str]()
        self.until = time.perf_counter() + OF_TESTS

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        of_device = [item for item in items if "battery" in item.nodeid or GIVEN.device in item.name]
        items[:] = random.Random(0).sample(of_device, len(of_device))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.ends[report.outcome] += 1
            if report.failed:
                self.failures.append(report.nodeid)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.perf_counter() > self.until:
            item.session.shouldstop = "the time is up"


@row("tests")
def tests() -> Iterator[Reading]:
    """A sample of the battery and of the conformance suite on the device."""
    plugin = Sample()
    files = ["tests/battery/test_battery.py", "tests/test_conformance.py"]
    pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *files], plugins=[plugin])
    yield Reading("tests that passed", plugin.ends["passed"], plugin.ends["passed"] + plugin.ends["failed"])
    for name in plugin.failures:
        yield Reading(f"failed: {name}", math.nan)


@functools.cache
def gpt2() -> landscape.Problem:
    """GPT-2 with 124 million random weights, and 2 × 64 tokens."""
    return language_model()


@functools.cache
def product_seconds(problem: landscape.Problem) -> float:
    h, v = problem.hessian(), start_vector(problem, 0)
    return seconds(lambda: h @ v)


def product(problem: landscape.Problem, wanted: float) -> Iterator[Reading]:
    """A Hessian product in gradients, and the memory of both."""
    h, v = problem.hessian(), start_vector(problem, 0)
    gradient = seconds(problem.gradient)
    yield Reading("a product in gradients", product_seconds(problem) / gradient, wanted, True)
    yield Reading("memory of a gradient", peak(problem.gradient), note="GiB")
    yield Reading("memory of a product", peak(lambda: h @ v), note="GiB")


@row("gpt2-product")
def gpt2_product() -> Iterator[Reading]:
    yield from product(gpt2(), 2.0)


@row("gpt2-ends")
def gpt2_ends() -> Iterator[Reading]:
    """Both ends of its spectrum: their time over that of their products."""
    problem = gpt2()
    wait()
    clock = time.perf_counter()
    ends = landscape.extreme_eigenvalues(problem, residual_tol=TOL)
    whole = time.perf_counter() - clock
    note = f"{ends.products} products in {whole:.2g} s"
    share = whole / (ends.products * product_seconds(problem))
    yield Reading("time of both ends, over that of the products", share, 1.3, True, note)


class Scores(nn.Module):
    """ResNet-50 at 224² by torchvision; CIFAR's ResNet-18 where that is not installed, ResNet-20 in smoke size."""

    def __init__(self) -> None:
        super().__init__()
        self.large = not SMOKE and harness.installed("torchvision") is not None
        if SMOKE:
            self.net = landscape.models.build("resnet-20", width=0.25)
        else:
            self.net = landscape.models.build("imagenet-resnet-50" if self.large else "resnet-18")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@functools.cache
def resnet(images: int) -> landscape.Problem:
    """A network with BatchNorm's statistics of random images, and ``images`` others."""
    torch.manual_seed(0)
    model = Scores().to(DEVICE)
    size, classes = (224, 1000) if model.large else (32, 10)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(few(64, 2), 3, size, size, device=DEVICE))
    x = torch.randn(few(images, 4), 3, size, size, device=DEVICE)
    y = torch.randint(classes, (len(x),), device=DEVICE)
    return landscape.Problem(model.eval(), nn.functional.cross_entropy, (x, y))


@row("resnet-product")
def resnet_product() -> Iterator[Reading]:
    yield from product(resnet(64), 2.2)


@row("resnet-top")
def resnet_top() -> Iterator[Reading]:
    """The five largest eigenvalues against a textbook's Lanczos, residuals included, in its fewest steps."""
    problem = resnet(64)
    ours = seconds(lambda: landscape.top_eigenvalues(problem, 5, residual_tol=TOL), 1)
    steps = next((m for m in range(10, 100, few(5, 45)) if lanczos(problem, m) <= TOL), 100)
    theirs = seconds(lambda: lanczos(problem, steps), 1)
    yield Reading("top five, against Lanczos over double backward", theirs / ours, 1.5, note=f"{steps} steps")


def lanczos(problem: landscape.Problem, steps: int, k: int = 5) -> float:
    """The largest relative residual of the top k pairs after ``steps``, orthogonalized against all vectors."""
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    x, y = problem.tensors

    def double_backward(v: Tensor) -> Tensor:
        loss = problem.criterion(problem.model(x), y)
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        inner = sum((g * part.view_as(g)).sum() for g, part in zip(gradient, v.split(sizes), strict=True))
        return torch.cat([part.flatten() for part in torch.autograd.grad(inner, parameters)])

    sizes = [p.numel() for p in parameters]
    rows = [torch.nn.functional.normalize(torch.randn(sum(sizes), device=DEVICE), dim=0)]
    t = np.zeros((steps + 1, steps + 1))
    for j in range(steps):
        w, basis = double_backward(rows[j]), torch.stack(rows)
        t[j, j] = float(w @ rows[j])
        w = w - basis.T @ (basis @ w)
        w = w - basis.T @ (basis @ w)
        t[j, j + 1] = t[j + 1, j] = float(w.norm())
        rows.append(w / w.norm())
    values, coordinates = np.linalg.eigh(t[:steps, :steps])
    vectors = torch.from_numpy(coordinates[:, -k:].T).to(rows[0]) @ torch.stack(rows[:steps])
    pairs = zip(values[-k:], vectors, strict=True)
    return max(float((double_backward(v) - value * v).norm()) / abs(value) for value, v in pairs)


def last_ratio(measure: Callable[[], None], wanted: float) -> Iterator[Reading]:
    """The ratio of a row of the other benchmarks."""
    measure()
    title, ratio = (harness.ROWS[-1][key] for key in ("what", "ratio"))
    yield Reading(title, ratio, wanted)


@row("learners-resnet")
def learners_resnet() -> Iterator[Reading]:
    yield from last_ratio(training.convolutional, 0.8)


@row("learners-mlp")
def learners_mlp() -> Iterator[Reading]:
    yield from last_ratio(training.small, 15)


@row("contour-mlp")
def contour_mlp() -> Iterator[Reading]:
    """All points of a plane of the small network, against a forward pass with all images for each point."""
    problem = harness.mnist_problem()
    plane, (x, y) = landscape.random_plane(problem), problem.tensors
    loop = Textbook(problem.model, plane, lambda model: problem.criterion(model(x), y))
    points = [(a, a) for a in np.linspace(-0.1, 0.1, few(100, 3)).tolist()]
    ours = seconds(lambda: landscape.contour(problem, plane, POINTS))
    theirs = seconds(lambda: loop(points)) / len(points) * POINTS**2
    yield Reading(
        f"{POINTS} × {POINTS} points, {len(y):,} images, against a pass for each", theirs / ours, 10
    )


def within(problem: landscape.Problem, loop: Callable[[nn.Module], Any], **options: Any) -> Iterator[Reading]:
    """A contour within 1% against the plain loop over all points."""
    plane = landscape.random_plane(problem, norm="filter")
    clock = time.perf_counter()
    surface = landscape.contour(problem, plane, POINTS, span=0.5, interpolation_tol="1%", **options)
    ours = time.perf_counter() - clock
    textbook, points = Textbook(problem.model, plane, loop), [(0.1, 0.1), (-0.2, 0.3), (0.4, -0.1)]
    theirs = seconds(lambda: textbook(points), 1) / len(points) * POINTS**2
    note = f"{surface.evaluations} points in {ours:.3g} s"
    yield Reading("contour within 1%, against the loop over all points", theirs / ours, 40, note=note)


@row("tolerance-gpt2")
def tolerance_gpt2() -> Iterator[Reading]:
    """GPT-2 with 64 × 512 tokens, eight sequences at a time in the loop."""
    model = gpt2().model
    tokens = torch.randint(20 if SMOKE else 50257, (few(64, 2), few(513, 17)), device=DEVICE)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    problem = landscape.Problem(model, nn.functional.cross_entropy, (x, y))
    batches = [*zip(x.split(8), y.split(8), strict=True)]
    yield from within(problem, harness.passes(nn.functional.cross_entropy, batches))


@row("tolerance-resnet")
def tolerance_resnet() -> Iterator[Reading]:
    """1,000 images in bfloat16, against the loop in bfloat16, 100 images at a time."""
    problem = resnet(1000)
    x, y = problem.tensors
    loop = harness.passes(nn.functional.cross_entropy, [*zip(x.split(100), y.split(100), strict=True)])

    def in_bfloat16(model: nn.Module) -> float:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return loop(model)

    yield from within(problem, in_bfloat16, autocast="bfloat16")


@row("waiting")
def waiting() -> Iterator[Reading]:
    """The share of the steps of 8 DPSGD learners of ResNet-18 during which no kernel runs."""
    settings = {"algorithm": MATCHING, "model": {"name": "benchmarks.training:resnet18"}}
    samples = few(256, 16)
    recipe = synthetic("waiting", learners=8, batch=samples, samples=samples, dimension=3072, **settings)
    learners, steps = Trainer(recipe, device=DEVICE), few(5, 1)

    def run() -> None:
        for _ in range(steps):
            learners._step(learners.step + 1)
        wait()

    run()  # warms up
    kind = DEVICE.type.upper()
    activities = [getattr(torch.profiler.ProfilerActivity, kind)]
    with torch.profiler.profile(activities=activities) as profile:
        clock = time.perf_counter()
        run()
        passed = time.perf_counter() - clock
    # On the CPU these are PyTorch's operations, which lets the row be tried there.
    kernels = [event.time_range for event in profile.events() if event.device_type.name == kind]
    busy, end = 0.0, -math.inf
    for interval in sorted(kernels, key=lambda kernel: kernel.start):  # in microseconds; they may overlap
        busy += max(0.0, interval.end - max(interval.start, end))
        end = max(end, interval.end)
    yield Reading("share of a step during which no kernel runs", 1 - busy * 1e-6 / passed, 0.1, True)


def write(readings: dict[str, list[Reading]]) -> None:
    """All readings so far, as JSON and as a table in Markdown."""
    content = json.dumps(plain({"machine": machine(), "rows": readings}), indent=1, allow_nan=False) + "\n"
    GIVEN.output.with_suffix(".json").write_text(content)
    lines = ["| row | reading | wanted |", "| --- | --- | --- |"]
    for name, row in readings.items():
        for reading in row:
            bound = f"{'≤' if reading.most else '≥'} {reading.wanted:g}"
            wanted = "" if math.isnan(reading.wanted) else bound
            value = "" if math.isnan(reading.value) else f": {reading.value:.3g} {reading.note}"
            lines.append(f"| {name} | {reading.what}{value} | {wanted} |")
    GIVEN.output.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    if ON_GPU and not torch.cuda.is_available():
        ARGUMENTS.error(
            "--device: 'cuda' is not here (allowed: a device that PyTorch finds here, such as cpu)"
        )
    if unknown := {*(GIVEN.only or ())} - {*ROWS}:
        ARGUMENTS.error(f"--only: {', '.join(sorted(unknown))} (allowed: {', '.join(ROWS)})")
    readings: dict[str, list[Reading]] = {}
    began, failed = time.perf_counter(), list[str]()
    for name in GIVEN.only or ROWS:
        clock = time.perf_counter()
        if clock - began > SECONDS:
            say(f"{name}: left out, {SECONDS} s have passed; measure it by --only {name}")
            continue
        readings[name] = []
        try:
            for reading in ROWS[name]():
                say(f"{name}: {reading}")
                readings[name].append(reading)
        except Exception as error:  # the other rows are measured none the less
            failed.append(name)
            readings[name].append(Reading(f"failed: {type(error).__name__}: {error}"[:300], math.nan))
            say(f"{name}: {readings[name][-1].what}")
        say(f"{name}: {time.perf_counter() - clock:.1f} s")
        write(readings)
        if ON_GPU:
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Steps of the loop, and contours, against those of earlier versions, which come from the history of the checkout."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import add_row, few, judged, mnist, say

ROOT = Path(__file__).parents[1]
#: The commits that set these versions.
COMMITS = {"0.15.0": "53602b84e82a", "0.25.0": "6b9f5467"}
STEPS, ROUNDS = few(50, 2), few(41, 1)
CONTOURS = 2, few(7, 1)  # in a round, and rounds
#: Of this version and the earlier one, the modules of recipes and of the loop.
MODULES = (
    ("landscape.training.recipes.recipe", "landscape.training.run.loop"),
    ("landscape.train.recipe", "landscape.train.loop"),
)
# Answers each line of its input with the seconds of processor time that so many further steps took.
WORKER = """
import importlib, json, os, sys, time
recipes, loop = map(importlib.import_module, sys.argv[2:])
assert loop.__file__.startswith(os.getcwd()), loop.__file__  # and not an installed version
trainer, step = loop.Trainer(recipes.from_values(json.loads(sys.argv[1]))), 0
for line in sys.stdin:
    clock = time.process_time()
    for step in range(step + 1, step + 1 + int(line)):
        trainer._step(step)
    print(time.process_time() - clock, flush=True)
"""


# The same for contours within 1% of 784-50-50-10, trained, of 10,000 images.
CONTOUR_WORKER = """
import os, sys, time
import torch, landscape
assert landscape.__file__.startswith(os.getcwd()), landscape.__file__
torch.manual_seed(0)
if sys.argv[1] == "mnist":
    (x, y), test = (getattr(landscape.data.load("mnist"), split) for split in ("train", "test"))
else:
    x, y = torch.randn(3000, 784), torch.randint(10, (3000,))
    test = x, y
model = landscape.models.build("mlp", widths=[784, 50, 50, 10])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(int(sys.argv[2])):
    rows = torch.randint(len(y), (500,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
problem = landscape.Problem(model.eval(), torch.nn.functional.cross_entropy, test)
plane = landscape.random_plane(problem)
for line in sys.stdin:
    clock = time.process_time()
    for _ in range(int(line)):
        landscape.contour(problem, plane, 51, interpolation_tol="1%", progress=False)
    print(time.process_time() - clock, flush=True)
"""


def main() -> None:
    """Two processes, one of each version, in turn: the machine is the same for both."""
    for name in ("ssgd", "dpsgd"):
        values: dict[str, Any] = {
            "name": "earlier", "learners": 5, "batch": 2000, "lr": 0.01, "steps": 10**6, "algorithm": {"name": name},
            "model": {"name": "mlp", "widths": [784, 50, 50, 10]}, "data": mnist(), "decompose": {"every": 0},
            "evaluate": {"every": 0},
        }  # fmt: skip
        title = f"steps of 5 learners of {name.upper()}, 784-50-50-10, against version"
        compare(title, "0.15.0", (WORKER, json.dumps(values)), MODULES, (STEPS, ROUNDS), 1.0)
    title = "contour within 1%, 784-50-50-10, 51 × 51 points, 10,000 images, against version"
    worker = CONTOUR_WORKER, mnist()["name"], str(few(1500, 5))
    compare(title, "0.25.0", worker, ((), ()), CONTOURS, 2.5)


def compare(
    title: str,
    version: str,
    worker: Sequence[str],
    modules: Sequence[Sequence[str]],
    amount: tuple[int, int],
    need: float,
) -> None:
    """Processor time of the same work of this version and of an earlier one.

    ``worker`` is code and its arguments, to which each version adds its ``modules``; ``amount`` the work of a
    round, and the number of rounds.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", COMMITS[version], "landscape"], cwd=ROOT, capture_output=True
    )
    if archive.returncode:
        say(f"{title} {version}: left out, this checkout has no commit {COMMITS[version]}")
        return
    count, rounds = amount
    data = os.path.abspath(os.environ.get("LANDSCAPE_DATA", "data"))  # each runs in its own folder
    times: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", *worker, *names], cwd=source, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(source), "LANDSCAPE_DATA": data},
            )
            for source, names in zip((ROOT, Path(folder)), modules, strict=True)
        ]  # fmt: skip
        for k in range(rounds + 1):
            for process, seconds in zip(workers, times, strict=True):
                assert process.stdin
                assert process.stdout
                print(count, file=process.stdin, flush=True)
                taken = float(process.stdout.readline())
                seconds += [taken] if k else []
        for process in workers:
            process.communicate()
    ratios = sorted(then / now for now, then in zip(*times, strict=True))
    ratio = statistics.median(ratios)
    add_row(f"{title} {version}", ratios, ratio, need)
    words = f"{ratio:.3f}× (rounds {ratios[0]:.2f}…{ratios[-1]:.2f}; needed {need:g}×: {judged(ratio, need)}"
    say(f"{title} {version}: {words}; processor time)")

"""Steps of the loop against those of version 0.15.0, which comes from the history of the checkout."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import add_row, few, judged, mnist, say

ROOT = Path(__file__).parents[1]
#: The commit that set version 0.15.0.
EARLIER = "53602b84e82a"
STEPS, ROUNDS = few(50, 2), few(41, 1)
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


def main() -> None:
    """Two processes, one of each version, in turn: the machine is the same for both."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", EARLIER, "landscape"], cwd=ROOT, capture_output=True
    )
    if archive.returncode:
        say(f"steps against version 0.15.0: left out, this checkout has no commit {EARLIER}")
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        for name in ("ssgd", "dpsgd"):
            compare(name, [ROOT, Path(folder)])


def compare(algorithm: str, sources: list[Path]) -> None:
    """Processor time of as many steps of the package in each of the ``sources``, this version first."""
    values: dict[str, Any] = {
        "name": "earlier", "learners": 5, "batch": 2000, "lr": 0.01, "steps": 10**6, "algorithm": {"name": algorithm},
        "model": {"name": "mlp", "widths": [784, 50, 50, 10]}, "data": mnist(), "decompose": {"every": 0},
        "evaluate": {"every": 0},
    }  # fmt: skip
    argv = [sys.executable, "-c", WORKER, json.dumps(values)]
    data = os.path.abspath(os.environ.get("LANDSCAPE_DATA", "data"))  # each runs in its own folder
    workers = [
        subprocess.Popen(
            [*argv, *modules], cwd=source, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(source), "LANDSCAPE_DATA": data},
        )
        for source, modules in zip(sources, MODULES, strict=True)
    ]  # fmt: skip
    times: list[list[float]] = [[], []]
    for k in range(ROUNDS + 1):
        for worker, found in zip(workers, times, strict=True):
            assert worker.stdin
            assert worker.stdout
            print(STEPS, file=worker.stdin, flush=True)
            seconds = float(worker.stdout.readline())
            found += [seconds] if k else []  # the first to warm up
    for worker in workers:
        worker.communicate()
    ratios = sorted(then / now for now, then in zip(*times, strict=True))
    ratio = statistics.median(ratios)
    title = f"steps of 5 learners of {algorithm.upper()}, 784-50-50-10, against version 0.15.0"
    add_row(title, ratios, ratio, 1.0)
    said = f"{title}: {ratio:.3f}× (rounds {ratios[0]:.2f}…{ratios[-1]:.2f}; needed 1×: {judged(ratio, 1.0)}"
    say(f"{said}; processor time)")

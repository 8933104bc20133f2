"""A report on 20 surfaces of 51 × 51 points and a run of 10,000 steps, in a process of its own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import few, judged, say
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import UNITS
from landscape.problem.layout import Layout, Slot
from landscape.results.base import save
from landscape.results.surfaces import Surface

SURFACES, POINTS, STEPS, WEIGHTS = few(20, 2), few(51, 9), few(10_000, 100), 1000
ROUNDS, MOST = few(3, 1), 10.0  # seconds that a report may take


def make(folder: Path) -> list[Path]:
    """Write the run and the surfaces, made of random numbers; gives what the report is about."""
    draw = np.random.default_rng(0)
    history = {name: draw.lognormal(size=STEPS) for name in UNITS}
    history["step"] = np.arange(1.0, STEPS + 1)
    history["test_accuracy"] = draw.uniform(size=STEPS)
    history["lr"], history["lr_lambda_limit"] = np.full(STEPS, 0.5), np.ones(STEPS)
    recipe = 'learners = 5\n[algorithm]\nname = "dpsgd"\n'
    layout = Layout((Slot("w", (WEIGHTS,), 0, WEIGHTS, "weight"),))
    data = {"name": "digits", "options": {}, "train": 1437, "test": 360, "fingerprint": ""}
    run = Checkpoint(
        torch.randn(5, WEIGHTS), layout, step=STEPS, epoch=1.0, algorithm="dpsgd", recipe=recipe,
        model={"name": "mlp", "options": {}}, data=data, lr=0.5, local_batch=100, seed=0, history=history,
    )  # fmt: skip
    (folder / "run").mkdir()
    run.save(folder / "run" / "last.h5")
    grid = np.linspace(-1, 1, POINTS)
    surfaces = [
        Surface(
            x=grid, y=grid, loss=0.1 + a * grid**2 + b * grid[:, None] ** 2, accuracy=np.zeros((POINTS, POINTS)),
            done=np.ones((POINTS, POINTS), bool), directions=np.eye(2, WEIGHTS), center=np.zeros(WEIGHTS),
            kind="random", norm="none", seed=0, span=1.0, samples=360, dtype="float32", bn="center",
            method="batched", split="test", label=f"surface {k}",
        )
        for k, (a, b) in enumerate(draw.uniform(1, 3, size=(SURFACES, 2)))
    ]  # fmt: skip
    save(surfaces, folder / "surfaces.h5")
    return [folder / "run", folder / "surfaces.h5"]


def seconds(paths: list[Path], page: Path) -> float:
    """How long ``landscape report`` takes, with the start of Python, on at most two threads."""
    clock = time.perf_counter()
    command = [sys.executable, "-m", "landscape", "report", *map(str, paths), "-o", str(page), "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "2"})
    return time.perf_counter() - clock


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, page = make(folder), folder / "report.html"
        took = statistics.median(seconds(paths, page) for _ in range(ROUNDS))
        size = page.stat().st_size / 1e6
    say(
        f"report on {SURFACES} surfaces of {POINTS} × {POINTS} and {STEPS:,} steps: {took:.1f} s, {size:.1f} MB "
        f"(allowed {MOST:g} s: {judged(took, MOST, most=True)})"
    )

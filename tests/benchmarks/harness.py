"""A and B in turn, medians, and their ratio."""

from __future__ import annotations

import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import landscape


def compare(
    title: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    rounds: int,
    need: float,
    work: float = 1.0,
    warm: bool = True,
) -> None:
    """Print how many times faster ``ours`` is than ``peer``: both once to warm up, then A, B, A, B, …

    ``work`` is how many times as much of the same work ``ours`` does; without ``warm`` the first round counts.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for k in range(rounds + warm):
        for which, run in enumerate((ours, peer)):
            clock = time.perf_counter()
            run()
            if k >= warm:
                times[which].append((time.perf_counter() - clock) / (work if which == 0 else 1.0))
    a, b = (statistics.median(t) for t in times)
    spread = sorted(y / x for x, y in zip(*times, strict=True))
    verdict = "ok" if b / a >= need else "BELOW"
    print(
        f"{title}: {b / a:.2f}× (rounds {spread[0]:.2f}…{spread[-1]:.2f}; needed {need:g}×: {verdict}; "
        f"{torch.get_num_threads()} threads)",
        flush=True,
    )


def on_shaped_link(rate: float, code: str) -> None:
    """Run Python ``code`` where loopback is one queue of ``rate`` (bit/s), or print that it is left out."""
    shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate:.0f}bit burst 1mb latency 200ms"
    if subprocess.run(["unshare", "--net", "sh", "-c", shape], capture_output=True).returncode:
        print("shaped link: left out, this machine permits no network namespace with tc", flush=True)
        return
    inside = ["unshare", "--net", "sh", "-c", f'{shape} && exec "$0" -c "$1"', sys.executable, code]
    subprocess.run(inside, check=True)


def installed(name: str) -> Any:
    """The peer's package; None, and a line that says so, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"against {name}: skipped, it is not installed (make bench sets it up)", flush=True)
        return None


MADE = {"name": "synthetic", "samples": 60_000, "dimension": 784, "classes": 10}


def mnist() -> dict[str, Any]:
    """The data table of a recipe: MNIST where LANDSCAPE_DATA has it, else a mixture that times the same."""
    try:
        landscape.data.load("mnist")
    except landscape.OperationError:
        print("MNIST is not in LANDSCAPE_DATA: a Gaussian mixture of its shape stands in", flush=True)
        return MADE
    return {"name": "mnist"}

"""A and B in turn, medians, and their ratio; the networks and the textbook's loops that several compare."""

from __future__ import annotations

import copy
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import landscape
from landscape.training.recipes import recipe
from landscape.training.recipes.recipe import Recipe

# LANDSCAPE_BENCH=smoke: every row once, as small as it runs, so that none breaks unseen; its numbers say nothing.
SMOKE = os.environ.get("LANDSCAPE_BENCH") == "smoke"
# LANDSCAPE_BENCH_DEVICE=cuda: the rows of contour, tolerance, curvature, large and training are measured there.
DEVICE = torch.device(os.environ.get("LANDSCAPE_BENCH_DEVICE", "cpu"))
CPU_INFO = Path("/proc/cpuinfo")  # Linux
#: What was compared, in order.
ROWS: list[dict[str, Any]] = []


def say(text: str) -> None:
    print(text, flush=True)


def wait() -> None:
    """Until the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def few(whole: int, smoke: int) -> int:
    """A size of the work: ``whole``, or ``smoke`` where only is tried that it runs."""
    return smoke if SMOKE else whole


def add_row(what: str, ratios: Sequence[float], median: float, need: float | None) -> None:
    row = {"what": what, "ratio": median, "low": min(ratios), "high": max(ratios), "needed": need}
    ROWS.append(row | {"threads": torch.get_num_threads()})


def write(path: Path) -> None:
    """The rows as JSON, with the machine; earlier rows of the file that were not measured again stay."""
    measured = {row["what"] for row in ROWS}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    cpu = re.search(r"model name\s*: (.*)", CPU_INFO.read_text()) if CPU_INFO.exists() else None
    machine = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "cpu": cpu[1] if cpu else platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "landscape": landscape.__version__,
    }  # fmt: skip
    rows = [row for row in old if row["what"] not in measured] + [row | {"machine": machine} for row in ROWS]
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def judged(value: float, need: float, *, most: bool = False) -> str:
    """Whether ``value`` is at least ``need``, or at most."""
    return "ok" if (value <= need if most else value >= need) else "ABOVE" if most else "BELOW"


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
    if SMOKE:
        rounds, warm = 1, False
    for k in range(rounds + warm):
        for which, run in enumerate((ours, peer)):
            clock = time.perf_counter()
            run()
            wait()
            if k >= warm:
                times[which].append((time.perf_counter() - clock) / (work if which == 0 else 1.0))
    a, b = (statistics.median(t) for t in times)
    spread = sorted(y / x for x, y in zip(*times, strict=True))
    add_row(title, spread, b / a, need)
    say(
        f"{title}: {b / a:.2f}× (rounds {spread[0]:.2f}…{spread[-1]:.2f}; needed {need:g}×: "
        f"{judged(b / a, need)}; {torch.get_num_threads()} threads)"
    )


def on_shaped_link(rate: float, code: str) -> None:
    """Run Python ``code`` where loopback is one queue of ``rate`` (bit/s), or print that it is left out."""
    shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate:.0f}bit burst 1mb latency 200ms"
    if subprocess.run(["unshare", "--net", "sh", "-c", shape], capture_output=True).returncode:
        say("shaped link: left out, this machine permits no network namespace with tc")
        return
    inside = ["unshare", "--net", "sh", "-c", f'{shape} && exec "$0" -c "$1"', sys.executable, code]
    subprocess.run(inside, check=True)


def installed(name: str) -> Any:
    """The peer's package; None, and a line that says so, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        say(f"against {name}: skipped, it is not installed (make bench sets it up)")
        return None


MADE = {"name": "synthetic", "samples": few(60_000, 3000), "dimension": 784, "classes": 10}


def mnist() -> dict[str, Any]:
    """The data table of a recipe: MNIST where LANDSCAPE_DATA has it, else a mixture that times the same."""
    try:
        landscape.data.load("mnist")
    except landscape.OperationError:
        say("MNIST is not in LANDSCAPE_DATA: a Gaussian mixture of its shape stands in")
        return MADE
    return {"name": "mnist"}


def synthetic(
    name: str, *, batch: int, model: dict[str, Any], samples: int, dimension: int = 784, **settings: Any
) -> Recipe:
    """A recipe without an end that only trains: a Gaussian mixture in ``dimension`` dimensions."""
    return recipe.from_values(
        {
            "name": name, "batch": batch, "lr": 0.01, "steps": 10**6, "model": model,
            "data": {**MADE, "samples": samples, "dimension": dimension}, "decompose": {"every": 0}, "evaluate": {"every": 0}, **settings,
        }
    )  # fmt: skip


MATCHING = {"name": "dpsgd", "mixing": "random-matching"}


def trained(model: nn.Module, loss: Any, batches: Iterable[tuple[Tensor, Tensor]], **sgd: float) -> None:
    """A step of plain SGD on each batch."""
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def mnist_problem(
    steps: int = 0, batch: int = 2000, lr: float = 0.2, split: str = "test", activation: str = "relu"
) -> landscape.Problem:
    """784-50-50-10 after plain SGD on the training set, with 10,000 images of ``split`` as data."""
    data = landscape.data.load(**mnist())
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[784, 50, 50, 10], activation=activation).to(DEVICE)
    x, y = (part.to(DEVICE) for part in data.train)
    drawn = (torch.randint(len(y), (batch,)) for _ in range(few(steps, min(steps, 5))))
    trained(model, data.loss, ((x[rows], y[rows]) for rows in drawn), lr=lr)
    part = tuple(t[: few(10_000, 100)].to(DEVICE) for t in getattr(data, split))
    return landscape.Problem(model, data.loss, part)


class Textbook:
    """What one would write: the weights of each point go into the model, then come passes over the data."""

    def __init__(self, model: nn.Module, plane: landscape.Plane, loss: Callable[[nn.Module], Any]) -> None:
        self.model, self.plane, self.loss = copy.deepcopy(model).eval(), plane, loss

    @torch.no_grad()
    def __call__(self, points: Sequence[tuple[float, float]]) -> Tensor:
        """The losses (points,)."""
        losses = []
        for a, b in points:
            theta = self.plane.center + a * self.plane.directions[0] + b * self.plane.directions[1]
            nn.utils.vector_to_parameters(theta, self.model.parameters())
            losses.append(float(self.loss(self.model)))
        return torch.tensor(losses, dtype=torch.float64)


def passes(loss: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Callable[[nn.Module], float]:
    """The usual evaluation loop, which gives the mean over all samples."""

    def run(model: nn.Module) -> float:
        total, count = 0.0, 0
        for x, y in batches:
            x, y = x.to(DEVICE), y.to(DEVICE)
            total, count = total + float(loss(model(x), y)) * len(y), count + len(y)
        return total / count

    return run


def loader(problem: landscape.Problem) -> torch.utils.data.DataLoader[Any]:
    held = torch.utils.data.TensorDataset(*(part.cpu() for part in problem.tensors))
    return torch.utils.data.DataLoader(held, batch_size=256, pin_memory=DEVICE.type == "cuda")

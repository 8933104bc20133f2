"""The calls that ``landscape doctor --device`` and the tests compare between the CPU and another device."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from landscape import data, models
from landscape.analysis import grids, noise, planes, sharpness, spectrum, spread
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.storage import load
from landscape.core.hdf5 import Array
from landscape.curvature import eigenvalues, trace
from landscape.curvature.hessian import HessianOperator
from landscape.problem.problem import Problem
from landscape.training.own_loop.recorder import Recorder
from landscape.training.run.launch import train

SETTINGS: Mapping[str, Any] = {
    "steps": 6, "batch": 100, "lr": 0.2, "model.widths": [64, 8, 10], "decompose.every": 2,
    "algorithm": {"name": "dpsgd", "mixing": "ring(1)"},
}  # fmt: skip
# Names of fields and columns that are not compared: times, errors by rounding, vectors of either sign.
LEFT_OUT = re.compile(r"wall_s|samples_per_s|wait_s|vectors|product_error|.*residuals?(_min|_max)?")
# The allowed relative difference by a pattern in a call's name, and for other calls. Changes of the last bits
# of weights change most numbers by 4e-7, and the others by up to 2e-4 (measured); cuDNN convolves in TF32.
ALLOWED, ELSEWHERE = {"bfloat16": 0.1, r"^(?!.* of conv)(loss|grad|Hess|cont|line|trace|train)": 1e-3}, 1e-2


class Place:
    """Small problems and runs on a device, with the same numbers on all devices.

    Args:
        device: the name of the device.
        folder: the folder for the runs.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        split = data.load("digits").train
        assert isinstance(split, tuple)
        self.x, self.y = (part[:200].to(device) for part in split)
        self.problems = {name: self.of(network) for name, network in networks().items()}
        self.problem = self.problems["perceptron"]
        self.plane = planes.random_plane(self.problem, "filter")
        draws = torch.randn(3, self.problem.layout.size, generator=torch.Generator().manual_seed(0))
        self.weights = self.problem.weights + 0.05 * draws.to(self.problem.weights)

    def of(self, network: nn.Module) -> Problem:
        """Return the problem of a network."""
        return Problem(network, cross_entropy, (self.x, self.y), device=self.device)

    def trained(self, **settings: Any) -> Checkpoint:
        """Return the end of a small run on the device."""
        folder = tempfile.mkdtemp(dir=self.folder)
        return train("digits-dpsgd", folder, device=self.device, **{**SETTINGS, **settings})

    def recorded(self) -> Any:
        """Return the checkpoint that a Recorder makes of a user's own loop."""
        model, folder = networks()["perceptron"].to(self.device), tempfile.mkdtemp(dir=self.folder)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        settings: dict[str, Any] = {"every": 2, "optimizer": optimizer, "sharpness": 2}
        with Recorder(folder, model, cross_entropy, (self.x, self.y), **settings) as recorder:
            for k in range(4):
                optimizer.zero_grad()
                part = slice(50 * k, 50 * k + 50)
                cross_entropy(model(self.x[part]), self.y[part]).backward()  # type: ignore[no-untyped-call]
                with recorder.step():
                    optimizer.step()
        return load(f"{folder}/last.h5")


class _First(nn.Module):
    """A module that returns the outputs of a recurrent layer, without its last state."""

    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0]


def networks() -> dict[str, nn.Module]:
    """Return networks for 64 pixels and 10 classes, with the same weights in each call."""
    image, rows = nn.Unflatten(1, (1, 8, 8)), nn.Unflatten(1, (8, 8))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        recurrent = nn.RNN(8, 6, batch_first=True), _First()
        convolution = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        return {
            "perceptron": models.build("mlp", widths=[64, 4, 4, 10], activation="tanh"),
            "convolution": nn.Sequential(image, *convolution, nn.Flatten(), nn.Linear(144, 10)),
            "attention": nn.Sequential(rows, attention, nn.Flatten(), nn.Linear(64, 10)),
            "recurrent": nn.Sequential(rows, *recurrent, nn.Flatten(), nn.Linear(48, 10)),
        }


Compute = Callable[[Place], Any]
OF_NETWORKS: dict[str, Callable[[Problem], Any]] = {
    "loss and accuracy": lambda problem: problem.evaluate(),
    "gradient": lambda problem: problem.gradient(),
    "Hessian product": lambda problem: HessianOperator(problem)(problem.gradient()),
    "extreme_eigenvalues": lambda problem: eigenvalues.extreme_eigenvalues(problem),
    "contour": lambda problem: grids.contour(problem, planes.random_plane(problem), (3, 4), 0.3),
}
CALLS: dict[str, Compute] = {
    "random_plane": lambda at: [planes.random_plane(at.problem, norm).directions for norm in planes.NORMS],
    "eigen_plane": lambda at: planes.eigen_plane(at.problem).directions.abs(),
    "line": lambda at: grids.line(at.problem, at.weights[0], points=5, span=0.5),
    "hessian_grid": lambda at: grids.hessian_grid(at.problem, at.plane, 2, 0.2),
    "eigenvalues by differences": lambda at: eigenvalues.extreme_eigenvalues(
        at.problem, derivatives="differences"
    ),
    "top_eigenvalues": lambda at: eigenvalues.top_eigenvalues(at.problem, 3),
    "Gauss-Newton": lambda at: eigenvalues.top_eigenvalues(at.problem, matrix="gauss-newton"),
    "trace": lambda at: trace.trace(at.problem, 12),
    "density": lambda at: trace.density(at.problem, 2, 12).moment(2),
    "spectrum": lambda at: spectrum.spectrum(at.problem, 2, quantities=("extremes", "trace")),
    "noise": lambda at: noise.noise(at.problem, at.weights, 0.1, 20, draws=4),
    "noise_scale": lambda at: noise.noise_scale(at.problem, 50, max_draws=16),
    "noise_alignment": lambda at: noise.noise_alignment(at.problem, 50, 2, min_draws=9, max_draws=9),
    "sharpness": lambda at: sharpness.sharpness(at.problem, 0.1, m=50, max_draws=32),
    "batch_spectrum": lambda at: sharpness.batch_spectrum(at.problem, 50, draws=4),
    "batch_sharpness": lambda at: sharpness.batch_sharpness(at.problem, 50, quantities=()),
    "disagreement": lambda at: spread.disagreement(at.problem, at.weights, 2),
    "Recorder": Place.recorded,
}
INSTRUMENTS = ["lambda-max", "batch-sharpness", "noise-scale", "disagreement", "worst-sharpness"]
RUNS: dict[str, dict[str, Any]] = {
    "ssgd": {"algorithm": {"name": "ssgd"}},
    "dpsgd": {},
    "local-sgd": {"algorithm": {"name": "local-sgd", "period": 2}},
    "async-sgd": {"algorithm": {"name": "async-sgd", "delay": 2}},
    "sgp": {"algorithm": {"name": "sgp", "graph": "random"}},
    "adamw": {"optimizer": {"name": "adamw"}, "lr": 0.01},
    "in bfloat16": {"autocast": "bfloat16"},
    "with instruments": {"monitor": {"instruments": INSTRUMENTS, "every": 3, "rho": 0.1}},
}


def calls() -> dict[str, Compute]:
    """Return all calls by name."""
    of_networks = {
        f"{name} of {network}": lambda at, call=call, network=network: call(at.problems[network])
        for network in networks()
        for name, call in OF_NETWORKS.items()
    }
    runs = {f"train {name}": functools.partial(Place.trained, **more) for name, more in RUNS.items()}
    return {**of_networks, **CALLS, **runs}


@dataclasses.dataclass(frozen=True)
class Compared:
    """A comparison of a call on a device with the same call on the CPU.

    Attributes:
        call: the name of the call.
        difference: the largest relative difference of numbers; infinite for arrays of different shapes.
        ratio: the time on the device over the time on the CPU.
        error: the error that the call raised on the device, in one line; "" for none.
    """

    call: str
    difference: float = math.inf
    ratio: float = math.nan
    error: str = ""

    @property
    def allowed(self) -> float:
        """The allowed difference."""
        return next((limit for pattern, limit in ALLOWED.items() if re.search(pattern, self.call)), ELSEWHERE)

    @property
    def same(self) -> bool:
        """Return whether the difference is allowed."""
        return self.difference <= self.allowed


def compared(device: str) -> Iterator[Compared]:
    """Yield the comparison of each call on a device with the CPU."""
    with tempfile.TemporaryDirectory(prefix="landscape-doctor-") as folder:
        on_cpu = Place("cpu", Path(folder))
        try:
            on_device = Place(device, Path(folder))
        except Exception as error:  # a device that does not work raises any kind of error
            yield Compared("problems", error=one_line(error))
            return
        for name, call in calls().items():
            expected, cpu_seconds = timed(call, on_cpu)
            try:
                values, seconds = timed(call, on_device)
            except Exception as error:
                yield Compared(name, error=one_line(error))
            else:
                yield Compared(name, difference(expected, values), seconds / cpu_seconds)


def one_line(error: Exception) -> str:
    """Return an error as a line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def timed(call: Compute, at: Place) -> tuple[dict[str, Array], float]:
    """Return the numbers of a call, and its seconds; of two calls, if it is short, those of the faster."""
    seconds = math.inf
    for _ in range(2):
        start = time.perf_counter()
        values = dict(numbers(call(at)))
        seconds = min(seconds, time.perf_counter() - start)
        if seconds > 0.5:
            break
    return values, seconds


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """Yield the numbers in a value, with names: of tensors, results, runs, and containers of them."""
    if isinstance(value, Checkpoint):
        value = {**value.stacked(), **value.history}
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (list, tuple)):
        value = {str(k): item for k, item in enumerate(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not LEFT_OUT.fullmatch(key):
                yield from numbers(item, f"{name}.{key}")
    elif isinstance(value, Tensor):
        yield name, value.detach().cpu().double().numpy()
    elif isinstance(value, (float, np.ndarray)) and np.asarray(value).dtype.kind == "f":
        yield name, np.asarray(value, float)


def difference(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> float:
    """Return the largest difference between arrays of equal names, relative to the largest number of each."""
    assert expected, "no number to compare"
    if expected.keys() != actual.keys():
        return math.inf
    worst = 0.0
    for name, a in expected.items():
        b, is_finite = actual[name], np.isfinite(a)
        if a.shape != b.shape or (is_finite != np.isfinite(b)).any():
            return math.inf
        scale = float(np.abs(a[is_finite]).max(initial=0.0))
        error = float(np.abs(a[is_finite] - b[is_finite]).max(initial=0.0))
        if error:
            worst = max(worst, error / scale if scale else math.inf)
    return worst

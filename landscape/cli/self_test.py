"""The calls that ``landscape doctor --device`` and the tests compare between the CPU and another device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape import data, models
from landscape.analysis import (
    compare,
    grids,
    learning_coefficient,
    noise,
    planes,
    sharpness,
    spectrum,
    spread,
)
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.run_folder import load
from landscape.core.hdf5 import Array
from landscape.curvature import eigenvalues, trace
from landscape.curvature.hessian import HessianOperator
from landscape.problem.problem import Problem
from landscape.training.experiments.continued import critical_batch
from landscape.training.optimizer.preconditioning import preconditioner
from landscape.training.own_loop.module import DecentralizedDataParallel
from landscape.training.own_loop.recorder import Recorder
from landscape.training.run.train import train

SAMPLES = 200
SETTINGS: Mapping[str, Any] = {
    "steps": 6, "batch": 100, "lr": 0.2, "model.widths": [64, 8, 10],
    "algorithm": {"name": "dpsgd", "mixing": "ring(1)"}, "decompose.every": 2, "evaluate.every": 3,
}  # fmt: skip
#: Fields and columns that are times, or errors of rounding, or vectors whose sign is free.
LEFT_OUT = (
    "wall_s",
    "samples_per_s",
    "wait_s",
    "residual",
    "residuals",
    "residual_min",
    "residual_max",
    "product_error",
    "vectors",
)


class Place:
    """Small problems and a run on a device; their numbers are the same on each.

    Args:
        device: its name.
        folder: gets the runs.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        split = data.load("digits").train
        assert isinstance(split, tuple)
        self.x, self.y = (part[:SAMPLES] for part in split)
        self.problems = {name: self.of(network) for name, network in networks().items()}
        self.problem = self.problems["perceptron"]
        noise = torch.randn(3, self.problem.layout.size, generator=torch.Generator().manual_seed(0))
        self.weights = self.problem.weights + 0.05 * noise.to(self.problem.weights)
        self.run = self.trained()

    def of(self, network: nn.Module, batches: bool = False) -> Problem:
        """The problem of a network; its data stay on the CPU where they come in batches."""
        given: Any = (
            list(zip(torch.split(self.x, 70), torch.split(self.y, 70), strict=True))
            if batches
            else (self.x, self.y)
        )
        return Problem(network, nn.functional.cross_entropy, given, device=self.device)

    def plane(self, norm: str = "filter") -> Any:
        return planes.random_plane(self.problem, norm)

    def trained(self, recipe: str = "digits-dpsgd", **settings: Any) -> Checkpoint:
        """The end of a small run on the device."""
        folder = tempfile.mkdtemp(dir=self.folder)
        return train(recipe, folder, device=self.device, **{**SETTINGS, **settings})

    def own_loop(self, wrap: bool = False) -> Any:
        """A loop of one's own: its record, or the weights that decentralised training around it ends at."""
        model = networks()["perceptron"].to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x, y, loss = self.x.to(self.device), self.y.to(self.device), nn.functional.cross_entropy
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "loop"
        wrapped = DecentralizedDataParallel(model, optimizer) if wrap else model
        recorder = (
            None if wrap else Recorder(folder, model, loss, (x, y), every=2, optimizer=optimizer, sharpness=2)
        )
        for k in range(4):
            optimizer.zero_grad()
            value: Any = loss(wrapped(x[50 * k : 50 * k + 50]), y[50 * k : 50 * k + 50])
            value.backward()
            with recorder.step() if recorder else contextlib.nullcontext():
                optimizer.step()
        if not recorder:
            return dict(model.named_parameters())
        recorder.close()
        return load(folder / "last.h5")


def networks() -> dict[str, nn.Module]:
    """Networks for 64 pixels and 10 classes, with the same weights each time."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.last = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.layer(x.reshape(-1, 8, 8)).mean(1))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.RNN(8, 6, batch_first=True), nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.layer(x.reshape(-1, 8, 8))[0][:, -1])

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        convolution = [
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
        ]
        return {
            "perceptron": models.build("mlp", widths=[64, 4, 4, 10], activation="tanh"),
            "convolution": nn.Sequential(*convolution, nn.Linear(144, 10)),
            "attention": Attention(),
            "recurrent": Recurrent(),
        }


Compute = Callable[[Place], Any]
#: The name of a call -> the relative difference that is allowed, and the call. The differences are some ten
#: times those that changes of the weights in their last bit make (ours).
CALLS: dict[str, tuple[float, Compute]] = {
    "evaluate": (1e-4, lambda at: at.problem.evaluate()),
    "evaluate batches": (1e-4, lambda at: at.of(networks()["perceptron"], batches=True).evaluate()),
    "random_plane": (1e-4, lambda at: [at.plane(norm).directions for norm in ("none", "filter", "layer")]),
    "between": (1e-3, lambda at: planes.between(at.problem, at.weights)),
    "pca_plane": (1e-3, lambda at: planes.pca_plane(at.problem, at.weights)),
    "learners_plane": (1e-3, lambda at: planes.learners_plane(at.problem, at.weights)),
    "eigen_plane": (1e-2, lambda at: planes.eigen_plane(at.problem).directions.abs()),
    "line": (1e-4, lambda at: grids.line(at.problem, at.weights[0], 5, 0.5)),
    "line between": (1e-4, lambda at: grids.line(at.problem, weights=at.weights[:2], points=5)),
    "contour of a run": (1e-3, lambda at: grids.contour(at.run, planes.random_plane(at.run), 3)),
    "hessian_grid": (1e-2, lambda at: grids.hessian_grid(at.problem, at.plane(), 2, 0.2)),
    "eigenvalues by differences": (1e-2, lambda at: eigenvalues.extreme_eigenvalues(
        at.problem, derivatives="differences")),
    "top_eigenvalues": (1e-2, lambda at: eigenvalues.top_eigenvalues(at.problem, 3)),
    "trace": (1e-3, lambda at: trace.trace(at.problem, 12)),
    "density": (1e-2, lambda at: trace.density(at.problem, 2, 12).moment(2)),
    "spectrum": (1e-2, lambda at: spectrum.spectrum(at.problem, 2, quantities=("extremes", "trace"))),
    "noise": (1e-2, lambda at: noise.noise(at.problem, at.weights, 0.1, 20, draws=4)),
    "noise of a run": (1e-2, lambda at: noise.noise(at.run, draws=3)),
    "noise_scale": (1e-3, lambda at: noise.noise_scale(at.problem, 50, max_draws=16)),
    "noise_alignment": (1e-2, lambda at: noise.noise_alignment(at.problem, 50, 2, min_draws=9, max_draws=9)),
    "worst sharpness": (1e-2, lambda at: sharpness.sharpness(at.problem, 0.1, m=50, max_draws=32)),
    "average sharpness": (1e-3, lambda at: sharpness.sharpness(at.problem, 0.1, "average", max_draws=32)),
    "batch_sharpness": (1e-3, lambda at: sharpness.batch_sharpness(at.problem, 50, quantities=())),
    "disagreement": (1e-2, lambda at: spread.disagreement(at.problem, at.weights, 2)),
    "smoothing": (1e-2, lambda at: spread.smoothing(at.problem, at.weights, draws=2, k=2)),
    "learning_coefficient": (1e-2, lambda at: learning_coefficient.learning_coefficient(
        at.problem, 50, max_steps=1000, max_rhat=9.0, nbeta=1.0)),
    "compare": (1e-2, lambda at: compare.compare([at.problem, at.run], quantities=["lambda-max"])),
    "preconditioner": (1e-3, lambda at: preconditioner(
        at.trained(optimizer={"name": "adamw"}, lr=0.01), at.run.problem(device=at.device))),
    "critical_batch": (1e-1, lambda at: critical_batch(at.run, (1.0, 2.0), seeds=2, device=at.device)),
    "Recorder": (1e-2, lambda at: at.own_loop()),
    "DecentralizedDataParallel": (1e-3, lambda at: at.own_loop(wrap=True)),
}  # fmt: skip
OF_NETWORKS: dict[str, tuple[float, Callable[[Problem], Any]]] = {
    "loss": (1e-4, lambda problem: problem.loss()),
    "gradient": (1e-3, lambda problem: problem.gradient()),
    "product": (1e-3, lambda problem: HessianOperator(problem)(problem.gradient())),
    "Gauss-Newton product": (
        1e-3,
        lambda problem: HessianOperator(problem, matrix="gauss-newton")(problem.gradient()),
    ),
    "extreme_eigenvalues": (1e-2, lambda problem: eigenvalues.extreme_eigenvalues(problem)),
    "contour": (1e-3, lambda problem: grids.contour(problem, planes.random_plane(problem), (3, 4), 0.3)),
}
INSTRUMENTS = ["lambda-max", "batch-sharpness", "noise-scale", "disagreement", "worst-sharpness"]
RULES: dict[str, dict[str, Any]] = {
    "ssgd": {}, "ssgd*": {"sigma": 0.01}, "local-sgd": {"period": 2}, "diloco": {"period": 2},
    "slowmo": {"period": 2, "mixing": "ring(1)"}, "async-sgd": {"delay": 2}, "ad-psgd": {"delay": 2},
    "sgp": {"graph": "random"}, "dsgd-ac": {"mixing": "ring(1)"},
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "lars": {}, "lamb": {}, "adamw": {}}
RUNS: dict[str, tuple[float, dict[str, Any]]] = {
    "in bfloat16": (1e-1, {"autocast": "bfloat16"}),
    "with instruments": (1e-2, {"monitor": {"instruments": INSTRUMENTS, "every": 3, "rho": 0.1}}),
    **{name: (1e-3, {"algorithm": {"name": name, **more}}) for name, more in RULES.items()},
    **{name: (1e-3, {"optimizer": {"name": name, **more}, "lr": 0.01}) for name, more in OPTIMIZERS.items()},
}


def calls() -> dict[str, tuple[float, Compute]]:
    """All calls by name, each with the relative difference that is allowed."""
    of_networks = {
        f"{name} of {network}": (rtol, lambda at, call=call, network=network: call(at.problems[network]))
        for network in networks()
        for name, (rtol, call) in OF_NETWORKS.items()
    }
    runs = {
        f"train {name}": (rtol, functools.partial(Place.trained, **changes))
        for name, (rtol, changes) in RUNS.items()
    }
    return {**of_networks, **CALLS, **runs}


@dataclasses.dataclass(frozen=True)
class Compared:
    """A call on a device and on the CPU: the largest relative difference of numbers, and the ratio of times.

    ``error`` is what it raised on the device; the difference is then infinite, as of arrays of other shapes.
    """

    call: str
    difference: float
    allowed: float
    ratio: float = math.nan
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether the difference is allowed."""
        return self.difference <= self.allowed


def compared(device: str) -> Iterator[Compared]:
    """Every call on a device and on the CPU, as it is done."""
    with tempfile.TemporaryDirectory(prefix="landscape-doctor-") as folder:
        here = Place("cpu", Path(folder))
        try:
            there = Place(device, Path(folder))
        except Exception as error:  # whatever does not work there
            yield Compared("problems and a run", math.inf, 0.0, error=one_line(error))
            return
        for name, (allowed, call) in calls().items():
            expected, usual = timed(call, here)
            try:
                found, seconds = timed(call, there)
            except Exception as error:
                yield Compared(name, math.inf, allowed, error=one_line(error))
            else:
                yield Compared(name, difference(expected, found), allowed, seconds / usual)


def one_line(error: Exception) -> str:
    """An error in a line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def timed(call: Compute, at: Place) -> tuple[dict[str, Array], float]:
    """The numbers of a call, and its seconds: of the faster of two calls, where they are short."""
    seconds = math.inf
    for _ in range(2):
        clock = time.perf_counter()
        found = dict(numbers(call(at)))
        seconds = min(seconds, time.perf_counter() - clock)
        if seconds > 0.5:
            break
    return found, seconds


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """The numbers in a value by name: of tensors, results, runs, and containers of them."""
    if isinstance(value, Checkpoint):
        value = {**value.stacked(), **value.history}
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (list, tuple)):
        value = {str(k): each for k, each in enumerate(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in LEFT_OUT:
                yield from numbers(each, f"{name}.{key}")
    elif isinstance(value, Tensor):
        yield name, value.detach().cpu().double().numpy()
    elif isinstance(value, (float, np.ndarray)) and np.asarray(value).dtype.kind == "f":
        yield name, np.asarray(value, float)


def difference(expected: Mapping[str, Array], found: Mapping[str, Array]) -> float:
    """The largest relative difference of two values' numbers: of an array, by its largest number."""
    assert expected, "no number to compare"
    worst = 0.0 if expected.keys() == found.keys() else math.inf
    for name in expected.keys() & found.keys():
        one, other = expected[name], found[name]
        if one.shape != other.shape or (np.isfinite(one) != np.isfinite(other)).any():
            return math.inf
        sound = np.isfinite(one)
        size = np.abs(one[sound]).max(initial=0.0)
        apart = np.abs(one[sound] - other[sound]).max(initial=0.0)
        worst = max(worst, apart / size if size else (math.inf if apart else 0.0))
    return float(worst)

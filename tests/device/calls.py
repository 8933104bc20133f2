"""What is asked of the simulated device: calls beside those of ``landscape doctor --device``, refusals, random numbers."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import landscape
from landscape.core import devices
from landscape.core.devices import has_float64, kept_randomness, pick_device
from landscape.curvature import operators
from landscape.gradients import learners
from landscape.gradients.learners import Stack, Training
from landscape.problem.batches import fixed_randomness, random_state
from landscape.testing import device as self_test
from landscape.testing.device import Compute, Place, networks
from tests.device import simulated


def in_batches(at: Place) -> Any:
    """A problem whose data stay on the CPU, in batches."""
    batches = [(at.x[k : k + 70].cpu(), at.y[k : k + 70].cpu()) for k in (0, 70, 140)]
    return landscape.Problem(networks()["perceptron"], cross_entropy, batches, device=at.device)


def contour_of_learners(at: Place) -> Any:
    """The losses in ascending order: the signs of the directions are free."""
    plane = landscape.learners_plane(at.problem, at.weights)
    return np.sort(landscape.contour(at.problem, plane, 3, method="pointwise").loss.ravel())


def terms_found(at: Place, weighted: bool) -> list[float]:
    """The loss of batches whose terms the package has to find: classes that are left out, or that have weights."""
    weight = torch.linspace(0.5, 2, 10).to(at.device) if weighted else None
    batches = [(at.x[k : k + 70], at.y[k : k + 70]) for k in (0, 70, 140)]
    with warnings.catch_warnings(action="ignore"):  # it says which terms it found
        loss = lambda o, y: cross_entropy(o, y, weight, ignore_index=0)  # noqa: E731
        problem = landscape.Problem(networks()["perceptron"], loss, batches, device=at.device)
    return [problem.loss(), float(problem.gradient().norm())]


def run(at: Place, **settings: Any) -> Any:
    """A run and its problem on the device."""
    end = at.trained(**settings)
    return end, end.problem(device=at.device)


def contour_of_a_run(at: Place) -> Any:
    problem = run(at)[1]
    return landscape.contour(problem, landscape.random_plane(problem), 3)


def decentralized(at: Place) -> Any:
    """The weights after four steps of a loop of one's own with decentralized training around the model."""
    model = networks()["perceptron"].to(at.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wrapped = landscape.DecentralizedDataParallel(model, optimizer)
    for k in range(4):
        optimizer.zero_grad()
        cross_entropy(wrapped(at.x[50 * k : 50 * k + 50]), at.y[50 * k : 50 * k + 50]).backward()
        optimizer.step()
    return dict(model.named_parameters())


def resumed(at: Place) -> Any:
    """A run that goes on after six steps."""
    end = at.trained()
    assert end.path is not None
    folder = Path(end.path).parent
    return landscape.train(
        landscape.Recipe.read(folder / "recipe.toml").replace(steps=9), folder, resume=True, device=at.device
    )


RULES: dict[str, dict[str, Any]] = {
    "ssgd*": {"sigma": 0.01}, "slowmo": {"period": 2, "mixing": "ring(1)"}, "diloco": {"period": 2}, "ad-psgd": {"delay": 2},
    "dsgd-ac": {"mixing": "ring(1)"}, "gradient-tracking": {"mixing": "ring(1)"}, "d2": {"mixing": "lazy(0.5, ring(1))"},
    "noloco": {"period": 2}, "snoo": {"period": 2}, "gpa": {}, "single-merge": {"at": 4}, "demo": {}, "sparta": {},
    "sparseloco": {"period": 2}, "decoupled-diloco": {"period": 2, "fragments": 2, "availability": 0.5},
    "streaming-diloco": {"period": 2, "fragments": 2},
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "lars": {}, "lamb": {}}
OPTIMIZERS |= {"muon": {"groups": {"bias": {"name": "sgd"}}}, "steepest": {"norm": "spectral"}}
MORE: dict[str, Compute] = {
    "loss and gradient in batches": lambda at: in_batches(at).loss_and_gradient(),
    "classes left out": lambda at: terms_found(at, False),
    "weights of classes": lambda at: terms_found(at, True),
    "between": lambda at: landscape.between(at.problem, at.weights),
    "pca_plane": lambda at: landscape.pca_plane(at.problem, at.weights).directions.abs(),
    "learners_plane": lambda at: landscape.learners_plane(at.problem, at.weights).directions.abs(),
    "line between": lambda at: landscape.line(at.problem, *at.weights[:2], points=5),
    "contour of learners": contour_of_learners,
    "contour of a run": contour_of_a_run,
    "average sharpness": lambda at: landscape.sharpness(at.problem, 0.1, "average", max_draws=32),
    "average": lambda at: landscape.average(at.problem, at.weights),
    "smoothing": lambda at: landscape.smoothing(at.problem, at.weights, draws=2, k=2),
    "learning_coefficient": lambda at: landscape.learning_coefficient(
        at.problem, 50, step_size=0.003, chains=2, max_steps=1000, max_rhat=9.0, nbeta=1.0
    ),
    "loss_change": lambda at: landscape.loss_change(at.problem, at.problem.weights, 0.9 * at.problem.weights),
    "connect": lambda at: landscape.connect(at.problem, *at.weights[:2], points=3, steps=2),
    "compare": lambda at: landscape.compare(
        [at.problem, at.of(networks()["attention"])], quantities=["lambda-max"]
    ),
    "preconditioner": lambda at: landscape.preconditioner(*run(at, optimizer={"name": "adamw"}, lr=0.01)),
    "critical_batch": lambda at: landscape.critical_batch(
        at.trained(), (1.0, 2.0), seeds=2, device=at.device
    ),
    "DecentralizedDataParallel": decentralized,
    "train and resume": resumed,
    "Gauss-Newton product": lambda at: landscape.HessianOperator(at.problem, matrix="gauss-newton")(
        at.problem.gradient()
    ),
    "BatchNorm recalibrated": lambda at: at.problems["convolution"].with_batchnorm("recalibrate").evaluate(),
    **{
        f"train {name}": functools.partial(Place.trained, algorithm={"name": name, **more})
        for name, more in RULES.items()
    },
    **{
        f"train {name}": functools.partial(Place.trained, optimizer={"name": name, **more}, lr=0.01)
        for name, more in OPTIMIZERS.items()
    },
}


def lines(*calls: Callable[[], object]) -> list[str]:
    """The first line of the error of each call; "done" where there is none."""
    found = []
    for call in calls:
        try:
            call()
        except (RuntimeError, TypeError, landscape.InputError) as error:
            found.append(str(error).splitlines()[0])
        else:
            found.append("done")
    return found


def refused() -> dict[str, list[str]]:
    """What the device, and the package there, say of operands on two devices, other generators, and float64."""
    x, (data, labels) = torch.ones(3, device="sim"), (torch.randn(20, 3), torch.randint(2, (20,)))
    model = torch.nn.Linear(3, 2)

    def problem(**options: Any) -> landscape.Problem:
        return landscape.Problem(model, cross_entropy, (data, labels), device="sim", **options)

    return {
        "mixed": lines(
            lambda: x + torch.ones(3),
            lambda: torch.addmm(x[:1], x[None], torch.ones(3, 1)),
            lambda: torch.nn.functional.conv1d(x[None, None], torch.ones(1, 1, 1)),
            lambda: torch.randn(2, device="sim", generator=torch.Generator()),
            lambda: torch.randn(2, generator=torch.Generator("sim")),
        ),
        "float64": lines(
            lambda: x.double(),
            lambda: x.sum(dtype=torch.float64),
            lambda: torch.zeros(2, dtype=torch.float64).to("sim"),
        ),
        "package": lines(
            lambda: problem(dtype=torch.float64),
            lambda: problem().to(torch.float64),
            lambda: landscape.train(
                "digits-ssgd", tempfile.mkdtemp(), steps=2, device="sim", dtype="float64"
            ),
        ),
    }


def random_numbers() -> dict[str, Any]:
    """Whether states are kept, and what is drawn twice under one seed."""
    device = torch.device("sim")

    def draw() -> list[float]:
        return [torch.rand(1).item(), torch.rand(1, device=device).item()]

    before = random_state(device)
    with kept_randomness(device):
        first = draw()
    kept = random_state(device) == before and draw() == first
    before, drawn = random_state(device), []
    for _ in range(2):
        with fixed_randomness(device, 3, elsewhere=True):
            drawn.append(draw())
    return {"kept": kept, "restored": random_state(device) == before, "drawn": drawn}


def drawn_there() -> dict[str, Any]:
    """Results whose random vectors the device draws: where, whether twice the same, and how far from the CPU's."""
    differences = {"derivatives": "differences"}
    calls: dict[str, tuple[Compute, Callable[[Any], float]]] = {
        "ends": (lambda at: landscape.extreme_eigenvalues(at.problem, 1e-4), lambda ends: ends.max),
        "top": (
            lambda at: landscape.top_eigenvalues(at.problem, 3, **differences),
            lambda top: top.values[2],
        ),
        "trace": (lambda at: landscape.trace(at.problem, 60), lambda trace: trace.value),
        "sharpness": (lambda at: landscape.sharpness(at.problem, 0.1, "average"), lambda s: s.value),
    }
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(devices, "LONG", 0):
        there, here = (Place(device, Path(folder)) for device in ("sim", "cpu"))
        found = {}
        for name, (call, number) in calls.items():
            results = [call(place) for place in (there, there, here)]
            found[name] = {
                "drawn": [result.random_device for result in results],
                "shown": [any(row.value == "of sim" for row in result.describe()) for result in results],
                "twice": self_test.difference(*(dict(self_test.numbers(r)) for r in results[:2])),
                "ratio": float(number(results[0]) / number(results[2])),
            }
    return found


def lanczos() -> dict[str, Any]:
    """How often a search reads the device, and what it allocates, in small blocks and wide products."""
    found, bases, init = dict[str, Any](), list[operators.Basis](), operators.Basis.__init__

    def kept(basis: operators.Basis, *given: Any, **named: Any) -> None:
        bases.append(basis)
        init(basis, *given, **named)

    for device in ("cpu", "sim"):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(operators, "read_columns", wraps=operators.read_columns) as reads,
            mock.patch.object(operators, "WIDTH", 16),
            mock.patch.object(operators, "min_basis_size", return_value=6),
            mock.patch.object(operators, "max_basis_size", return_value=15),
            mock.patch.object(operators.Basis, "__init__", kept),
        ):
            ends = landscape.extreme_eigenvalues(Place(device, Path(folder)).problem, 1e-6)
        invariant = landscape.extreme_eigenvalues(torch.diag(torch.tensor([1.0, 1, 2, 3])).to(device))
        found[device] = {
            "reads": reads.call_count, "products": ends.products, "values": ends.values.tolist(),
            "blocks": [len(block) for block in bases[-1]._blocks], "residuals": ends.residuals.tolist(),
            "invariant": invariant.values.tolist(),
        }  # fmt: skip
    return found


def batched() -> dict[str, bool]:
    """Which learners go at once there, whatever the clock says."""
    found, layers = (
        dict[str, bool](),
        (torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10)),
    )
    for name, first in {
        "plain": torch.nn.Identity(),
        "dropout": torch.nn.Dropout(),
        "slow": Sorted(),
    }.items():
        data = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
        stack = Stack(
            landscape.Problem(torch.nn.Sequential(first, *layers), cross_entropy, data, device="sim")
        )
        x, y = (part.view(8, 4, *part.shape[1:]) for part in stack.problem.tensors or ())
        weights = stack.problem.weights.repeat(8, 1)
        for count, most in ((3, learners.SMALL_BYTES), (4, learners.SMALL_BYTES), (8, 1000)):
            part, training = slice(count), Training({}, lambda j, i: 0)
            with (
                mock.patch.object(learners.time, "perf_counter", side_effect=AssertionError),
                mock.patch.object(learners, "SMALL_BYTES", most),
            ):
                found[f"{name}, {count}"] = stack.batching_pays(weights[part], x[part], y[part], training)
    return found


class Sorted(torch.nn.Module):
    """An operation that torch.vmap makes one by one, with a warning."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.nn.functional.ctc_loss(
            x.flatten(1)[:, None, :4].log_softmax(2).transpose(0, 1), torch.ones(len(x), 1, dtype=torch.long),
            torch.ones(len(x), dtype=torch.long), torch.ones(len(x), dtype=torch.long),
        )  # fmt: skip


def compared(folder: Path) -> dict[str, Any]:
    """What is found on the device, with float64 and without; the numbers of the CPU are computed once."""
    every, found = {**self_test.calls(), **MORE}, dict[str, Any]()
    here = Place("cpu", folder)
    expected = {name: dict(self_test.numbers(call(here))) for name, call in every.items()}
    for float64 in (True, False):
        simulated.give_float64(float64)
        has_float64.cache_clear()
        there, rows = Place("sim", folder), {}
        for name, call in every.items():
            try:
                rows[name] = self_test.difference(expected[name], dict(self_test.numbers(call(there))))
            except Exception as error:  # whatever it is, the test shows it
                rows[name] = self_test.one_line(error)
        picked = [str(pick_device(name)) for name in ("auto", "cpu")]
        found["float64" if float64 else "no float64"] = {
            "calls": rows, "picked": picked, **refused(), **random_numbers(), "there": drawn_there(),
            "lanczos": lanczos(), "batched": batched(),
        }  # fmt: skip
    return found


def main() -> None:
    """The command, or what is compared as JSON."""
    if sys.argv[1:]:
        from landscape.cli import main as command

        self_test.CALLS |= MORE
        command()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compared(Path(folder))))

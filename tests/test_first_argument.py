"""What every public function is about, a problem or a run: another kind is refused in one line that helps."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import landscape
from landscape import Checkpoint, InputError, Problem
from landscape.core.memory import forecast
from landscape.training.recipes.recipe import read
from landscape.training.run.loop import Trainer

WORDS = {"problem": "a Problem", "run": "a Checkpoint", "checkpoint": "a Checkpoint"}
#: Arguments that functions cannot do without, for a model of 8 parameters.
GIVEN: dict[str, Any] = {
    "a": torch.zeros(8),
    "b": torch.ones(8),
    "direction": torch.ones(8),
    "before": torch.zeros(8),
    "after": torch.ones(8),
    "batch": 4,
    "local_batch": 4,
    "lr": 0.1,
    "plane": landscape.Plane(torch.zeros(8), torch.eye(2, 8), "random", "none", 0),
    "problem": None,
    "rho": 0.1,
    "weights": torch.randn(3, 8),
}


def parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(landscape, name)).parameters.values())


def first(name: str) -> str:
    return parameters(name)[0].name


def needed(name: str) -> dict[str, Any]:
    """The arguments after the first that a public function cannot do without."""
    _, *others = parameters(name)
    return {p.name: GIVEN[p.name] for p in others if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


#: Every public function about a problem or a run -> the arguments that it needs.
NEEDED = {
    name: needed(name)
    for name in landscape.__all__
    if (name == "HessianOperator" or inspect.isfunction(getattr(landscape, name))) and first(name) in WORDS
}


assert len(NEEDED) > 20


def linear() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.randn(20, 3), torch.randint(2, (20,)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "last.h5"
    Trainer(read("digits-ssgd", ["steps=2", "decompose.every=0", "batch=20"])).run().save(file)
    return file


@pytest.fixture(scope="module")
def given(path: Path) -> dict[str, Any]:
    """A first argument of each kind."""
    model, loss, data = linear()
    return {
        "Problem": Problem(model, loss, data), "Checkpoint": landscape.load(path), "Path": path, "Linear": model,
        "list": [Problem(model, loss, data)],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["Problem", "Checkpoint", "Path", "Linear", "list"])
@pytest.mark.parametrize("name", NEEDED)
def test_another_kind_is_refused_with_what_would_do(name: str, kind: str, given: dict[str, Any]) -> None:
    wanted = WORDS[first(name)]
    if wanted == f"a {kind}" or (kind == "Checkpoint" and wanted == "a Problem"):
        return
    shown = type(given[kind]).__name__  # PosixPath
    with pytest.raises(InputError, match=f"^{first(name)}: a {shown} is not allowed, .*{wanted}") as refusal:
        getattr(landscape, name)(given[kind], **NEEDED[name])
    assert "\n" not in str(refusal.value)
    if kind == "Path" or (wanted == "a Problem" and kind == "Linear"):
        names = dict(zip(("model", "loss", "data"), linear(), strict=True))
        names |= {"run": given["Checkpoint"], "landscape": landscape}
        found = eval(refusal.value.remedy, names)
        assert isinstance(found, Problem if wanted == "a Problem" else Checkpoint)
    else:
        assert not refusal.value.remedy


OF_RUNS = [
    "contour", "line", "hessian_grid", "random_plane", "between", "eigen_plane", "noise", "noise_scale",
    "noise_alignment", "batch_sharpness", "sharpness", "disagreement", "smoothing", "average",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_run_stands_for_its_problem(name: str, path: Path) -> None:
    run, function = Checkpoint.load(path), getattr(landscape, name)
    problem = run.problem()
    every: dict[str, Any] = {
        "plane": landscape.random_plane(problem),
        "direction": run.mean,
        "weights": torch.stack((run.mean, 1.1 * run.mean)),
        "grid": (2, 1), "batch": 20, "local_batch": 10, "lr": 0.1, "rho": 0.05, "k": 2, "draws": 2, "min_draws": 2,
        "max_draws": 2,
    }  # fmt: skip
    if name == "line":  # which takes one of the two
        del every["weights"]
    every = {key: value for key, value in every.items() if key in inspect.signature(function).parameters}
    of_run, of_problem = function(run, **every), function(problem, **every)
    known = run.about()  # as the commands have it
    assert sorted(known) == ["label", "source", "source_sha256", "split"]
    for field in dataclasses.fields(of_run):
        if field.name in known:
            assert getattr(of_run, field.name) == known[field.name]  # type: ignore[literal-required]
            continue  # which the problem alone does not know
        np.testing.assert_array_equal(getattr(of_run, field.name), getattr(of_problem, field.name))
    if name != "between":
        assert forecast(function, run, **every) == forecast(function, problem, **every)


def test_a_run_brings_its_learners_and_its_settings(tmp_path: Path) -> None:
    settings = ["steps=3", "decompose.every=0", "learners=3", "batch=30", "algorithm.name=dpsgd"]
    Trainer(read("digits-ssgd", settings)).run().save(tmp_path / "last.h5")
    run = Checkpoint.load(tmp_path / "last.h5")
    found = landscape.noise(run, draws=2)
    own = landscape.noise(run.problem(), run.weights, run.lr, run.local_batch, draws=2)
    assert (found.label, found.split, found.lr, found.local_batch) == (run.label, "train", run.lr, 10)
    np.testing.assert_array_equal(found.direct, own.direct)
    assert landscape.smoothing(run, draws=2, k=1).lr == run.lr
    assert landscape.disagreement(run, k=1, label="mine").label == "mine"
    for name in ("noise", "smoothing", "disagreement", "average"):
        own_step = {"lr": 0.1, "local_batch": 10} if name == "noise" else {}
        with pytest.raises(
            InputError, match="weights: missing; a problem has no learners, give theirs .* or the run"
        ):
            getattr(landscape, name)(run.problem(), **own_step)
    with pytest.raises(InputError, match="lr, local_batch: missing"):
        landscape.noise(run.problem(), run.weights)


def test_compare_takes_several(path: Path) -> None:
    model, loss, data = linear()
    for one in (Problem(model, loss, data), str(path), model):
        with pytest.raises(InputError, match="1 given, at least 2"):
            landscape.compare(one)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a Linear is not allowed, it must be a Checkpoint .* or a Problem"):
        landscape.compare([model] * 2)  # type: ignore[list-item]
    found = landscape.compare([str(path), path, landscape.load(path)], quantities=["trace"])  # type: ignore[list-item]
    assert found.value[0, 0] == found.value[0, 1] == found.value[0, 2]

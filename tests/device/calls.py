"""Calls that the tests compare beside those of ``landscape doctor --device``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import landscape
from landscape.cli.self_test import Compute, Place, networks


def in_batches(at: Place) -> Any:
    """A problem whose data stay on the CPU, in batches."""
    batches = [(at.x[k : k + 70].cpu(), at.y[k : k + 70].cpu()) for k in (0, 70, 140)]
    return landscape.Problem(networks()["perceptron"], cross_entropy, batches, device=at.device)


def run(at: Place, **settings: Any) -> Any:
    """A run and its problem on the device."""
    end = at.trained(**settings)
    return end, end.problem(device=at.device)


def decentralised(at: Place) -> Any:
    """The weights after four steps of a loop of one's own with decentralised training around the model."""
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
    "dsgd-ac": {"mixing": "ring(1)"},
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "lars": {}, "lamb": {}}
MORE: dict[str, Compute] = {
    "loss and gradient in batches": lambda at: in_batches(at).loss_and_gradient(),
    "between": lambda at: landscape.between(at.problem, at.weights),
    "pca_plane": lambda at: landscape.pca_plane(at.problem, at.weights),
    "learners_plane": lambda at: landscape.learners_plane(at.problem, at.weights),
    "line between": lambda at: landscape.line(at.problem, weights=at.weights[:2], points=5),
    "contour of learners": lambda at: landscape.contour(
        at.problem, landscape.learners_plane(at.problem, at.weights), 3, method="pointwise"
    ),
    "contour of a run": lambda at: landscape.contour(run(at)[1], landscape.random_plane(run(at)[1]), 3),
    "average sharpness": lambda at: landscape.sharpness(at.problem, 0.1, "average", max_draws=32),
    "smoothing": lambda at: landscape.smoothing(at.problem, at.weights, draws=2, k=2),
    "learning_coefficient": lambda at: landscape.learning_coefficient(
        at.problem, 50, max_steps=1000, max_rhat=9.0, nbeta=1.0
    ),
    "compare": lambda at: landscape.compare(
        [at.problem, at.of(networks()["attention"])], quantities=["lambda-max"]
    ),
    "preconditioner": lambda at: landscape.preconditioner(*run(at, optimizer={"name": "adamw"}, lr=0.01)),
    "critical_batch": lambda at: landscape.critical_batch(
        at.trained(), (1.0, 2.0), seeds=2, device=at.device
    ),
    "DecentralizedDataParallel": decentralised,
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

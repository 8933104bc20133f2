"""Sharpness with a preconditioner: dense matrices, closed forms, and the state of real optimizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, OperationError
from landscape.gradients.minibatches import stream
from landscape.training import optimizer
from landscape.training.recipes import recipe
from landscape.training.run import launch
from landscape.training.run.loop import Trainer
from tests import problems
from tests.conftest import Command, slow_but
from tests.test_cli import one_line


def diagonal(size: int) -> torch.Tensor:
    """A positive diagonal over two orders of magnitude."""
    return torch.logspace(-1, 1, size, dtype=torch.float64)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["saddle", "mlp tanh", "conv", "structured", "masked classes"], [*problems.ALL, *problems.STRUCTURED]
    ),
)
def test_eigenvalues_and_all_else_are_those_of_the_dense_matrix(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    p = diagonal(problem.layout.size)
    root = p.rsqrt()
    dense = root[:, None] * problems.textbook_hessian(problem) * root
    truth = torch.linalg.eigvalsh(dense).flip(0)
    pairs = landscape.top_eigenvalues(problem, 2, 1e-6, precondition=p)
    np.testing.assert_allclose(pairs.values, truth[:2], rtol=1e-5, atol=1e-9)
    for value, v in zip(pairs.values, torch.from_numpy(pairs.vectors), strict=True):
        assert float((dense @ v - value * v).norm()) < 1e-4 * float(truth.abs().max())
    given = landscape.Preconditioner(p, name="mine", lr=0.5, limit=2.0)
    result = landscape.spectrum(
        problem,
        quantities=("extremes", "trace", "density"),
        precondition=given,
        residual_tol=1e-6,
        products=3 * len(p),
    )
    np.testing.assert_allclose(result.values, truth[[0, -1]], rtol=1e-5, atol=1e-9)
    assert result.trace == pytest.approx(float(dense.trace()), rel=1e-6)
    assert result.density is not None
    assert (result.precondition, result.lr, result.limit) == ("mine", 0.5, 2.0)


def test_a_part_takes_its_part_of_the_diagonal() -> None:
    problem = problems.mlp()
    p = diagonal(problem.layout.size)
    (slot,) = problem.layout.select("1.weight")
    rows = slice(slot.offset, slot.offset + slot.size)
    root = p[rows].rsqrt()
    dense = root[:, None] * problems.textbook_hessian(problem)[rows, rows] * root
    found = landscape.top_eigenvalues(problem, residual_tol=1e-6, part="1.weight", precondition=p)
    assert float(found.values[0]) == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-5)


def test_bad_input_is_named() -> None:
    problem = problems.mlp()
    size = problem.layout.size
    wrong: tuple[tuple[Any, str], ...] = (
        ([1.0] * size, "precondition: a list is not allowed, it must be a Preconditioner or a Tensor"),
        (torch.ones(3), r"precondition: shape \(3,\)"),
        (torch.zeros(size), f"precondition: {size} of {size} numbers are not positive"),
        (torch.full((size,), torch.nan), "not positive and finite"),
        (torch.ones(size, 1), "diagonal"),
    )
    for call in (landscape.top_eigenvalues, landscape.spectrum):
        for p, match in wrong:
            with pytest.raises(InputError, match=match):
                call(problem, precondition=p)
        for option, value in (("engine", "pyhessian"), ("search", "no")):
            with pytest.raises(InputError, match=value):
                call(problem, 1, precondition=torch.ones(size), **{option: value})


SMALL = [
    "steps=12", "learners=3", "batch=30", "model.widths=[64,8,10]", "decompose.every=0", "evaluate.every=0",
    "checkpoint.every=0",
]  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch:Adam": {},
    "torch:AdamW": {"amsgrad": True, "betas": [0.8, 0.99]},
    "torch:RMSprop": {"momentum": 0.5, "centered": True},
    "lars": {"momentum": 0.5},
    "lamb": {"beta1": 0.5},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_momentum_of_one_gradient_moves_by_the_inverse_of_p(name: str) -> None:
    """The directions of two gradients that differ by a little differ by P⁻¹ times that, but for P's own change.

    For Adam and RMSprop P belongs to the state after the step, as the direction does.
    """
    problem = problems.mlp()
    size = problem.layout.size
    made = optimizer.make(name, OPTIMIZERS[name])
    theta = problem.weights[None]
    made.start(problem.layout, theta)
    draws = torch.randn(30, 1, size, dtype=torch.float64, generator=stream(0, 0)) + 0.5
    momentum = torch.zeros_like(theta)
    assert made.preconditioned is not None
    m, _, c = made.preconditioned
    ratios = []
    for t, g in enumerate(draws, 1):
        direction = made.directions(g, theta, 0.1, t)
        decay = getattr(made, "weight_decay", 0) or 0
        p = made.preconditioner(theta, g, t)
        if name == "lars":  # the ratio is inside the momentum
            momentum = m * momentum + (g + decay * theta) / p
            np.testing.assert_allclose(direction, momentum, rtol=1e-9, atol=1e-12)
            continue
        if name == "torch:RMSprop":
            momentum = m * momentum + g / p
            np.testing.assert_allclose(direction, momentum, rtol=1e-6, atol=1e-9)
            continue
        momentum = m * momentum + c * g
        expected = momentum / p
        if name == "lamb":  # whose weight decay has the same ratio ‖w‖/‖s‖
            ratio = made._root(t) / p  # type: ignore[attr-defined]
            expected = expected + decay * ratio * theta
        if name == "torch:AdamW":
            expected = expected + 0.01 * theta  # torch's default, decoupled
        ratios.append(float((direction - expected).norm() / direction.norm()))
    assert all(ratio < 1e-6 for ratio in ratios)


@pytest.mark.parametrize(
    ("name", "limit"), [("torch:Adam", 38.0), ("torch:AdamW", 18.0), ("torch:RMSprop", 3.0), ("lars", 3.0), ("lamb", 6.0)]
)  # fmt: skip
def test_a_run_gives_its_preconditioner_and_limit(name: str, limit: float) -> None:
    options = [
        f"optimizer.{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in OPTIMIZERS[name].items()
    ]
    run = Trainer(recipe.read("digits-ssgd", [*SMALL, "lr=0.01", f"optimizer.name={name}", *options])).run()
    problem = run.problem()
    p = landscape.preconditioner(run, problem)
    assert p.diagonal.shape == (problem.layout.size,)
    assert (p.name, p.lr) == (name, 0.01)
    assert p.limit == pytest.approx(limit)
    own = landscape.preconditioner(run, problem, 1)
    if name != "lars":  # under SSGD all learners have one state
        np.testing.assert_allclose(own.diagonal, p.diagonal, rtol=1e-6)
    with pytest.raises(InputError, match="learner: 3"):
        landscape.preconditioner(run, problem, 3)


def test_the_command_and_what_it_refuses(trained: Path, tiny: Path, tmp_path: Path, command: Command) -> None:
    launch.launch(recipe.read(str(tiny), ["optimizer.name=adam", "lr=0.01"]), tmp_path / "adam")
    picture = tmp_path / "s.png"
    code, out, err = command("stability", tmp_path / "adam", "--precondition", "-o", tmp_path / "limits.h5")
    assert code == 0, err
    assert "preconditioned by torch:Adam" in out
    code, out, err = command("spectrum", tmp_path / "adam", "--precondition", "--plot", picture)
    assert code == 0, err
    result = landscape.load(tmp_path / "adam" / "last-spectrum-preconditioned.h5")
    assert (result.precondition, result.lr) == ("torch:Adam", 0.01)
    assert 0 < result.limit < 38  # of the ring
    assert "preconditioned by torch:Adam; lr · λ_max" in " ".join(result.plot().get_suptitle().split())
    one_line(command("spectrum", trained, "--precondition"), 2, "precondition: the optimizer 'sgd'")
    run = landscape.load(tmp_path / "adam" / "step-0000000.h5")
    with pytest.raises(OperationError, match="step 0"):
        landscape.preconditioner(run, run.problem())
    theirs = dataclasses.replace(run, algorithm="recorded", recipe="")
    with pytest.raises(
        OperationError, match=r"landscape train did not make it.*give a landscape.Preconditioner"
    ):
        landscape.preconditioner(theirs, run.problem())

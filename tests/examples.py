"""Results with which the examples in docstrings begin, and from which tests make others."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch

import landscape
from landscape.results.comparison import Comparison, Connection
from landscape.results.flatness import LearningCoefficient
from landscape.results.noise import LabelCounts, Noise
from landscape.results.spectrum import CurvatureTable, Density, Eigenpairs, LossChange, Spectrum, Trace
from landscape.results.surfaces import Surface


def parabola() -> Surface:
    """L = x² + y² on 41 × 41 points."""
    grid = np.linspace(-1, 1, 41)
    loss = grid**2 + grid[:, None] ** 2
    return Surface(
        x=grid, y=grid, loss=loss, accuracy=loss, done=loss < 9, directions=np.eye(2), center=np.zeros(2),
        kind="random", norm="none", seed=0, span=1.0, samples=1, dtype="float64", bn="center", method="batched",
    )  # fmt: skip


def comparison() -> Comparison:
    """Two checkpoints, of which the second is flatter."""
    two, k = ("lambda-max", "batch-sharpness"), np.array([[0]])
    return Comparison(
        quantities=two, titles=("λ_max", "batch sharpness"), unit_names=("nat", "nat"),
        flatter=np.array([-1, -1]), kinds=("bound", "standard error"), own_kinds=("bound", "standard error"),
        over=("", "64 minibatches"), tests=("bounds", "paired t"), sides=("SSGD", "DPSGD"),
        value=np.array([[20.0, 10.0], [12.0, 6.0]]), error=np.array([[0.1, 0.1], [0.5, 0.25]]),
        freedom=np.array([[np.nan, np.nan], [63.0, 63.0]]),
        labels=("ssgd, seed 0, step 1,000", "dpsgd, seed 0, step 1,000"), sources=("last.h5", "last.h5"),
        sources_sha256=("0" * 64, "1" * 64), side_of=np.array([0, 1]),
        own_value=np.array([[20.0, 10.0], [12.0, 6.0]]), own_error=np.array([[0.1, 0.1], [0.5, 0.25]]),
        steps=np.array([1000, 1000]), given_steps=np.array([1000, 1000]), first=k[0], second=k[0] + 1,
        difference=np.array([[-10.0], [-6.0]]), difference_error=np.array([[0.2], [0.5]]),
        difference_freedom=np.array([[np.nan], [63.0]]), p=np.array([[np.nan], [1e-17]]),
        p_holm=np.array([[np.nan], [1e-17]]), significant=np.array([[True], [True]]), significance=0.05,
        grouped=False, equal_loss=np.nan, notes=(), batch=500, draws=64, planes=8, rise=0.1, rho=0.5,
        rho_average=0.05, k=10, seed=0, sample_counts=np.array([1437, 1437]), dtype="float32", split="train",
        batchnorm=False,
    )  # fmt: skip


def noise() -> Noise:
    """Two draws, 1 and 3, of two learners."""
    values = np.array([1.0, 3.0])
    names = ("direct", "first_order", "delta_s", "delta_2", "delta_cross")
    return Noise(
        **dict.fromkeys(names, values), full_batch=1.5, eq4=1.0, consensus=0.1, lr=0.1, learners=2,
        local_batch=4, samples=10, seed=0,
    )  # fmt: skip


def label_counts() -> LabelCounts:
    """Two learners and two labels: one has one of them, the other both."""
    return LabelCounts(np.array([[30, 0], [10, 20]]), np.array([0, 1]), "dirichlet(0.1)")


def spectrum() -> Spectrum:
    """A trace of 3.0 ± 0.1 with 1.6 degrees of freedom, and both ends."""
    none = np.zeros((0, 0))
    return Spectrum(
        values=np.array([2.0, -1.0]), residuals=np.zeros(2), lowest=1, converged=True, trace=3.0,
        trace_error=0.1, trace_freedom=1.6, nodes=none, masses=none, parameters=9, products=12, matrix="hessian",
        part="", engine="landscape", residual_tol=0.01, seed=0, samples=10, dtype="float64",
    )  # fmt: skip


SETTING: dict[str, Any] = {"samples": 10, "dtype": "float64", "seed": 0}


def table() -> CurvatureTable:
    """Two blocks with traces of 3 and 1."""
    three = np.array([4.0, 3.0, 1.0])
    return CurvatureTable(
        groups=("all", "h.0", "h.1"), sizes=np.array([9, 5, 4]), lambda_max=three / 2, lambda_min=-three / 9,
        residual_max=three / 100, residual_min=three / 100, trace=three, trace_error=three / 10, share=three / 4,
        share_error=np.array([0.0, 0.05, 0.05]), met=np.ones(3, bool), residual_tol=0.1, draws=20, parameters=9,
        products=90, **SETTING,
    )  # fmt: skip


def change() -> LossChange:
    """A step with learning rate 0.1 of two groups."""
    return LossChange(
        groups=("all", "h.0", "h.1"), sizes=np.array([9, 5, 4]), gradient=np.array([-2.0, -1.5, -0.5]),
        curvature=np.array([1.0, 0.75, 0.25]), within=np.array([0.75, 0.625, 0.125]),
        between=np.array([[0.625, 0.125], [0.125, 0.125]]), loss_before=2.0, loss_after=1.25, step_norm=2.0,
        step_lr=0.1, critical_multiple=4.0, parameters=9, products=2, **SETTING,
    )  # fmt: skip


def connection() -> Connection:
    """A barrier of 2, of which alignment removes three quarters, and the curve all."""
    loss = np.array([[1.0, 3.0, 1.0], [1.0, 1.5, 1.0], [1.0, 1.0, 1.0]])
    return Connection(
        t=np.linspace(0, 1, 3), loss=loss, accuracy=1 - loss / 4, barrier=np.array([2.0, 0.5, 0.0]),
        weights=np.zeros((4, 2)), distance=2.0, aligned_distance=1.0, groups=("0.weight",), sizes=np.array([5]),
        fixed=(), largest_change=0.0, curve="bezier", steps=100, lr=1e-3, batch=128, **SETTING,
    )  # fmt: skip


def pairs() -> Eigenpairs:
    """The eigenvalues 2 and -1, the lowest one, of two parameters."""
    return Eigenpairs(
        values=np.array([2.0, -1.0]), residuals=np.zeros(2), vectors=np.eye(2), lowest=1, parameters=2,
        products=4, **SETTING,
    )  # fmt: skip


def trace() -> Trace:
    """A trace of 3.0 ± 0.1 from three draws."""
    draws = np.array([2.9, 2.9, 3.2])
    return Trace(value=3.0, standard_error=0.1, draws=draws, parameters=2, products=9, **SETTING)


def density() -> Density:
    """Three quarters of the eigenvalues at 0, and one quarter at 2."""
    nodes, masses = np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]])
    return Density(nodes=nodes, masses=masses, parameters=4, products=2, **SETTING)


def coefficient() -> LearningCoefficient:
    """Two chains of two draws after the burn-in, λ̂ = 3.0 ± 0.3."""
    rise = np.array([[0.0, 3.0, 5.0], [0.0, 4.0, 4.0]])
    return LearningCoefficient(
        rise=rise, heating=rise / 4, distance2=rise, standard_error=0.3, r_hat=1.0, r_hat_distance=1.0, ess=4.0,
        nbeta=10.0, localization=1.0, step_size=0.1, batch=8, steps=3, burn_in=1, loss=0.5,
        weights_norm2=1.0, lambda_max=2.0, parameters=6, max_rhat=1.01, relative_error=0.05, converged=False,
        samples=36, seed=0, dtype="float64",
    )  # fmt: skip


def imported(model: torch.nn.Module) -> landscape.Checkpoint:
    """The weights of ``model`` as a run without a file."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/net.pt")
        return landscape.import_state(f"{folder}/net.pt", model)


def namespace() -> dict[str, Any]:
    """The names that examples in docstrings may use."""
    model = torch.nn.Linear(3, 2)
    return {
        "np": np, "torch": torch, "landscape": landscape, "linear": model, "run": imported(model),
        "surface": parabola(), "comparison": comparison(), "noise": noise(), "counted_labels": label_counts(),
        "spectrum": spectrum(), "coefficient": coefficient(), "pairs": pairs(), "trace": trace(),
        "density": density(), "table": table(), "change": change(), "connection": connection(),
    }  # fmt: skip

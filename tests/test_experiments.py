"""The critical batch by branching."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.results.noise import CriticalBatch
from landscape.training.experiments import critical_batch
from landscape.training.recipes import recipe
from landscape.training.run.loop import Trainer

LR, DIMENSION = 0.2, 200


def quadratic(lr: float = LR, steps: int = 60, **more: object) -> Checkpoint:
    """SGD on ½‖w‖² with gradient noise of variance 1/nB, after it has become stationary."""
    values: dict[str, object] = {
        "name": "quadratic", "learners": 1, "batch": 4, "lr": lr, "steps": steps, "dtype": "float64",
        "algorithm": {"name": "ssgd"},
        "model": {"name": "quadratic", "eigenvalues": [1.0] * DIMENSION, "rotate": False},
        "data": {"name": "quadratic", "dimension": DIMENSION, "gradient_std": 1.0}, "decompose": {"every": 0},
    }  # fmt: skip
    return Trainer(recipe.from_values(values | more)).run()


@pytest.mark.slow
def test_on_a_quadratic_it_is_where_the_closed_form_says() -> None:
    """E‖w‖² = α²σ²/(nB(1 − (1 − α)²)): with α and nB times k, the loss grows as (2 − α)/(2 − kα)."""
    run = quadratic()
    result = critical_batch(run, [1, 4, 5, 6], loss_tol=0.8, trained_samples=2400, seeds=3)
    k = result.batch / 4
    exact = (2 - LR) / (2 - k * LR) - 1
    assert result.lr.tolist() == pytest.approx((LR * k).tolist())
    assert result.steps.tolist() == [600, 150, 120, 100]
    np.testing.assert_array_less(np.abs(result.rise - exact)[1:], 4 * result.rise_error[1:] + 0.03)
    assert result.value == pytest.approx(20.0, abs=3 * result.standard_error + 0.5)  # exact: k = 5
    assert result.bracket in ((16.0, 20.0), (20.0, 24.0))
    assert result.samples == 1000
    constant = critical_batch(run, [1, 4], scaling="none", loss_tol=0.1, trained_samples=640, seeds=1)
    assert constant.value == math.inf  # less noise, at the same rate, near the minimum
    assert math.isnan(constant.standard_error)


def test_branches_that_diverge_are_worse_than_any() -> None:
    result = critical_batch(quadratic(1.0), [1, 4], loss_tol=0.5, trained_samples=800, seeds=2)
    assert np.isinf(result.loss[1]).all()
    assert (result.value, result.standard_error) == (pytest.approx(8.0), 0.0)
    assert result.bracket == (4.0, 16.0)


def test_the_jackknife_over_seeds() -> None:
    rng = np.random.default_rng(0)
    made = CriticalBatch(
        batch=np.array([10, 100]), lr=np.array([1.0, 2.0]), steps=np.array([9, 9]), loss=np.ones((2, 8)),
        own_batch=10, step=0, trained_samples=90, loss_tol=0.1, scaling="sqrt", samples=9, seed=0, dtype="float32",
    )  # fmt: skip
    values, errors = [], []
    for _ in range(300):
        loss = np.stack([np.ones(8), 1.2 + 0.01 * rng.normal(size=8)])
        one = dataclasses.replace(made, loss=loss)
        values.append(one.value)
        errors.append(one.standard_error)
        assert one.rise_error[1] == pytest.approx(loss[1].std(ddof=1) / 8**0.5)
    assert np.mean(values) == pytest.approx(10**1.5, rel=0.01)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.1)

"""The examples in the docstrings of problem, evaluation, curvature, analysis and stability run, and are there."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import pytest

import landscape
from landscape import stability
from landscape.analysis.stability import stability as stability_analysis

ROOMS = ("problem", "evaluation", "curvature", "analysis", "stability")
MODULES = [
    "landscape.stability",
    *(
        f"landscape.{room}.{module.name}"
        for room in ROOMS
        for module in pkgutil.iter_modules(importlib.import_module(f"landscape.{room}").__path__)
    ),
]
PUBLIC = [
    landscape.Problem,
    landscape.Problem.with_batchnorm,
    landscape.Problem.evaluate,
    landscape.HessianOperator,
    landscape.contour,
    landscape.line,
    landscape.hessian_grid,
    landscape.spectrum,
    landscape.trace,
    landscape.density,
    landscape.extreme_eigenvalues,
    landscape.top_eigenvalues,
    landscape.estimate_noise,
    landscape.batch_sharpness,
    landscape.noise_scale,
    landscape.critical_batch,
    landscape.noise_alignment,
    landscape.compare,
    landscape.learning_coefficient,
    landscape.disagreement,
    landscape.sharpness,
    landscape.Surface.basins,
    landscape.smoothing,
    landscape.random_plane,
    landscape.between,
    landscape.pca_plane,
    landscape.learners_plane,
    landscape.eigen_plane,
    stability_analysis,
    stability.max_stable_step,
    stability.limits,
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__qualname__)
def test_public_functions_have_an_example(function: Any) -> None:
    text = function.__doc__
    assert ">>> " in text
    assert "Raises" in text or function is landscape.Problem.evaluate

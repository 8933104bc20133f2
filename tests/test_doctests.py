"""The examples in docstrings run and print what they say, and public functions have one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import pytest
import torch

import landscape
from landscape import stability
from landscape.analysis.spectrum import stability as stability_analysis
from tests.examples import namespace
from tests.test_first_argument import NEEDED

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Rooms of commands and figures have no examples.
LEFT_OUT = ("landscape.cli", "landscape.paper", "landscape.integrations", "landscape.__main__")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(landscape.__path__, "landscape.")
    if not module.name.startswith(LEFT_OUT)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    x, y = torch.eye(2), torch.tensor([0, 1])
    model = torch.nn.Linear(2, 2, bias=False)
    problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
    known = {"torch": torch, "x": x, "y": y, "problem": problem}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report: list[str] = []
    for test in finder.find(importlib.import_module(name), extraglobs=namespace() | known):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_result_that_a_user_can_reach_has_an_example() -> None:
    reached = [getattr(landscape, name) for name in landscape.__all__]
    results = [v for v in reached if getattr(v, "__module__", "").startswith("landscape.results.")]
    assert results
    assert [value for value in results if ">>>" not in (value.__doc__ or "")] == []


PUBLIC = [
    *(getattr(landscape, name) for name in NEEDED),
    landscape.Problem,
    landscape.Problem.with_batchnorm,
    landscape.Problem.evaluate,
    landscape.Surface.basins,
    landscape.compare,
    stability_analysis,
    stability.max_stable_step,
    stability.limits,
]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__qualname__)
def test_public_functions_have_an_example(function: Any) -> None:
    text = function.__doc__
    assert ">>> " in text
    assert "Raises" in text or function is landscape.Problem.evaluate

"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import landscape
from tests.examples import namespace

# Packages whose examples run.
ROOMS = (
    "landscape.core",
    "landscape.geometry",
    "landscape.results",
    "landscape.plots",
    "landscape.report",
    "landscape.checkpoint",
    "landscape.data",
    "landscape.models",
    "landscape.train",
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules(rooms: tuple[str, ...]) -> list[str]:
    """The names of the packages and of all modules in them."""
    names = []
    for room in rooms:
        package = importlib.import_module(room)
        inside = pkgutil.walk_packages(getattr(package, "__path__", ()), f"{room}.")
        names += [room, *(module.name for module in inside)]
    return names


@pytest.mark.parametrize("name", modules(ROOMS))
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report: list[str] = []
    for test in finder.find(module, extraglobs=namespace()):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_result_that_a_user_can_reach_has_an_example() -> None:
    reached = [getattr(landscape, name) for name in landscape.__all__]
    results = [v for v in reached if getattr(v, "__module__", "").startswith("landscape.results.")]
    assert results
    assert [value for value in results if ">>>" not in (value.__doc__ or "")] == []

"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

# Packages whose examples run; every public function and class in those of EXAMPLES_NEEDED has one.
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
EXAMPLES_NEEDED = ("landscape.results", "landscape.plots")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules(rooms: tuple[str, ...]) -> list[str]:
    """The names of the packages and of all modules in them."""
    names = []
    for room in rooms:
        package = importlib.import_module(room)
        inside = pkgutil.walk_packages(getattr(package, "__path__", ()), f"{room}.")
        names += [room, *(module.name for module in inside)]
    return names


def public(module: ModuleType) -> dict[str, object]:
    """The functions and classes that ``module`` defines, but for names that begin with an underscore."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", modules(ROOMS))
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report: list[str] = []
    for test in finder.find(module):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", modules(EXAMPLES_NEEDED))
def test_public_functions_and_classes_have_an_example(name: str) -> None:
    missing = [
        key
        for key, value in public(importlib.import_module(name)).items()
        if ">>>" not in (value.__doc__ or "")
    ]
    assert missing == []

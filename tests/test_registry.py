"""One registry for all that can be asked for by name."""

from __future__ import annotations

import doctest
import importlib.metadata

import pytest

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.registry import PluginWarning, Registry


def test_the_examples_of_the_registry_run() -> None:
    assert doctest.testmod(registry).failed == 0


def test_names_are_taken_once_and_unknown_ones_named() -> None:
    kinds = Registry("algorithm", "algorithm.name")
    kinds.add("one")(int)
    kinds.add("one")(int)  # a module that is imported again adds the same
    with pytest.raises(InputError, match="'one'.*float.*int"):
        kinds.add("one")(float)
    with pytest.raises(InputError, match=r"algorithm\.name: 'onee'.*'one'"):
        kinds["onee"]


def test_a_broken_plugin_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("broken", "no_such_package.at_all", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    kinds = Registry("model", "model.name")
    kinds.add("mine")(int)
    with pytest.warns(PluginWarning, match=r"'broken'.*no_such_package"):
        assert kinds.names() == ["mine"]
    assert kinds["mine"] is int  # and only once

"""One registry for all that can be asked for by name, and packages that are not there."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import landscape
from landscape.cli import as_command
from landscape.core import registry
from landscape.core.errors import InputError, OperationError
from landscape.core.registry import PluginWarning, Registry
from tests import problems
from tests.examples import parabola


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
    monkeypatch.setattr(registry, "_entry_points", lambda path: (point,))
    kinds = Registry("model", "model.name")
    kinds.add("mine")(int)
    with pytest.warns(PluginWarning, match=r"'broken'.*no_such_package"):
        assert kinds.names() == ["mine"]
    assert kinds["mine"] is int  # and only once


def test_entry_points_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: searched.append(group) or [])
    monkeypatch.setattr(registry, "_entry_points", functools.cache(registry._entry_points.__wrapped__))
    kinds = Registry("model", "model.name")
    assert "mine" not in kinds
    assert kinds.names() == []
    assert searched == [registry.GROUP]


def test_a_declared_entry_is_imported_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "declared_here.py").write_text("def two(): return 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    kinds = Registry("model", "model.name")
    kinds.declare("two", "declared_here:two", "The number two.")
    kinds.declare("absent", "declared_here:three")
    kinds.declare("lost", "no_such_module_at_all:x")
    assert (kinds.names(), kinds.summary("two"), kinds.summary("lost")) == (
        ["absent", "lost", "two"], "The number two.", "",
    )  # fmt: skip
    assert "declared_here" not in sys.modules
    assert kinds["two"]() == 2
    kinds.declare("two", "declared_here:two", "The number two.")  # once more, after its import
    assert kinds["two"]() == 2
    with pytest.raises(InputError, match="'two'.*elsewhere.two.*declared_here.two"):
        kinds.declare("two", "elsewhere:two")
    for name, place in (("absent", "declared_here:three"), ("lost", "no_such_module_at_all:x")):
        with pytest.raises(OperationError, match=f"model '{name}': {place}"):
            kinds[name]
    monkeypatch.delitem(sys.modules, "declared_here")


def test_a_decorated_entry_may_be_declared_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = Registry("model", "model.name")
    monkeypatch.setitem(registry.__dict__, "kinds_of_the_test", kinds)
    (tmp_path / "decorated_here.py").write_text(
        "from landscape.core.registry import kinds_of_the_test\n"
        "@kinds_of_the_test.add('two')\ndef two(): return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kinds.declare("two", "decorated_here:two")
    assert kinds["two"]() == 2
    monkeypatch.delitem(sys.modules, "decorated_here")


def test_plugins_are_imported_only_for_names_that_the_package_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(registry, "load_plugins", lambda: asked.append(1))
    kinds = Registry("model", "model.name")
    kinds.add("mine")(int)
    assert kinds["mine"] is int
    assert not asked
    assert "other" not in kinds
    assert asked
    assert list(kinds) == ["mine"]


def test_the_list_of_commands_has_their_own_summaries() -> None:
    for name in registry.commands.names():
        command = as_command(registry.commands[name])
        first = " ".join(command.help.split("\n\n")[0].split())
        assert (command.name, registry.commands.summary(name)) == (name, first)


#: Package that is missing, its extra, and what needs it: one line says what to install.
EXTRAS: dict[str, tuple[str, str, Callable[[], object]]] = {
    "pyhessian": ("pyhessian", "engine 'pyhessian'", lambda: landscape.trace(problems.mlp(), engine="pyhessian")),
    "curvlinops": ("curvlinops", "to_curvlinops", lambda: problems.mlp().to_curvlinops()),
    "arviz_stats": ("bayes", "", lambda: landscape.learning_coefficient(problems.mlp(), 8)),
    "xarray": ("frames", "to_xarray", lambda: parabola().to_xarray()),
    "torchvision": ("imagenet", "model 'imagenet-vgg-11'", lambda: landscape.models.build("imagenet-vgg-11")),
}  # fmt: skip


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_extra_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, who, call = EXTRAS[package]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OperationError, match=rf"{who}.*{package} is not installed; .*\[{extra}\]") as caught:
        call()
    assert "\n" not in str(caught.value)

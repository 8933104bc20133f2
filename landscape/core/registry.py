"""What can be asked for by name: algorithms, optimizers, models, data sets, drawings, figures, commands.

Each kind has one :class:`Registry`. The package's own entries add themselves where they are defined, in the
room that the registry names; another package adds its own the same way, in a module that its metadata lists
as an entry point of the group "landscape.plugins"::

    [project.entry-points."landscape.plugins"]
    mine = "my_package.landscape_plugin"

    # my_package/landscape_plugin.py
    from landscape.core import registry

    @registry.algorithms.add("my-rule")
    class MyRule(Rule): ...
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from landscape.core.errors import InputError
from landscape.core.options import choose

GROUP = "landscape.plugins"
T = TypeVar("T")


class PluginWarning(UserWarning):
    """A plugin could not be loaded, and is left out."""


class Registry:
    """The entries of one kind, by name.

    Args:
        kind: what an entry is, for messages: "algorithm".
        option: what a user typed the name for: "algorithm.name".
        room: the module, or the package with one module an entry, that holds the package's own entries. It
            is imported when a name is first looked up.

    Example:
        >>> colours = Registry("colour", "--colour")
        >>> @colours.add("red")
        ... def red() -> str:
        ...     return "#ff0000"
        >>> colours["red"]()
        '#ff0000'
        >>> colours.names()
        ['red']
    """

    def __init__(self, kind: str, option: str, room: str = "") -> None:
        self.kind, self.option, self._room = kind, option, room
        self._entries: dict[str, Any] = {}
        self._complete = False

    def add(self, name: str) -> Callable[[T], T]:
        """A decorator that adds what it decorates under ``name``.

        Raises InputError where the name is taken by something else.
        """

        def decorate(entry: T) -> T:
            taken = self._entries.get(name)
            if taken is not None and _place(taken) != _place(entry):
                raise InputError(
                    f"{self.kind} '{name}': {_place(entry)} may not take the name of {_place(taken)}"
                )
            self._entries[name] = entry
            return entry

        return decorate

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        """The entry called ``name``. InputError names the nearest one."""
        self._load()
        return self._entries[choose(self.option, name, self._entries)]

    def _load(self) -> None:
        """Import the package's own entries, then the plugins: once."""
        if self._complete:
            return
        self._complete = True  # before: what is imported may look names up
        if self._room:
            room = importlib.import_module(self._room)
            for module in pkgutil.iter_modules(getattr(room, "__path__", ())):
                importlib.import_module(f"{self._room}.{module.name}")
        load_plugins()


_loaded: set[str] = set()


def load_plugins() -> None:
    """Import each entry point of the group once; one that fails is left out with a PluginWarning."""
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.value in _loaded:
            continue
        _loaded.add(point.value)
        try:
            point.load()
        except Exception as error:  # the plugin is another's code, and must not stop what does not need it
            warnings.warn(
                f"plugin '{point.name}' ({point.value}) cannot be loaded: {type(error).__name__}: {error}",
                PluginWarning,
                stacklevel=4,
            )


def _place(entry: object) -> str:
    """Where an entry is defined."""
    return f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', type(entry).__name__)}"


algorithms = Registry("algorithm", "algorithm.name", "landscape.train.algorithms")
optimizers = Registry("optimizer", "optimizer.name", "landscape.train.optimizer")
models = Registry("model", "model.name", "landscape.models")
data_sets = Registry("data set", "data.name", "landscape.data")
results = Registry("result", "FILE", "landscape.results")
drawings = Registry("drawing", "FILE", "landscape.plots")
figures = Registry("figure", "NAME", "landscape.paper.figures")
commands = Registry("command", "COMMAND", "landscape.cli")

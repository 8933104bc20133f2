"""Registries of entries by name, optional packages, and versions of numerics."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import operator
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from landscape.core.errors import InputError, OperationError, warn_caller
from landscape.core.options import check_keywords, choose, positive

T = TypeVar("T")
_VERSIONS: dict[Any, int] = {}


def numerics(version: int) -> Callable[[T], T]:
    """Return a decorator that records the version of the numbers that a function or class computes.

    Increase the version when the numbers change by more than rounding, even if only a callee was changed.
    ``landscape figures`` then computes the stored numbers again.

    Args:
        version: the version; a new function has 1.

    Returns:
        The decorator; it returns the function or class unchanged.

    Raises:
        InputError: a version below 1.

    Example:
        >>> @numerics(2)
        ... def mean(values: list[float]) -> float:
        ...     return sum(values) / len(values)
        >>> version_of(mean)
        2
    """
    positive("numerics", version, least=1)

    def declare(function_or_class: T) -> T:
        _VERSIONS[function_or_class] = version
        return function_or_class

    return declare


def version_of(computed_by: Any) -> int:
    """Return the version that :func:`numerics` recorded for a function or class.

    Args:
        computed_by: the function or class.

    Returns:
        The version.

    Raises:
        KeyError: it has no version.

    Example:
        >>> version_of(numerics(3)(str.upper))
        3
    """
    return _VERSIONS[computed_by]


GROUP = "landscape.plugins"


class PluginWarning(UserWarning):
    """A plugin could not be loaded, and is left out."""


class _Declared(str):
    """An entry, as its reference "MODULE:NAME", that is imported at its first use."""


class Registry:
    """The entries of one kind, by name.

    Args:
        kind: a noun for an entry, for messages, such as "algorithm".
        option: the option that a user gives a name with, such as "algorithm.name".
        room: the module with the package's own entries, or the package with one module for each entry. It is
            imported when a name is first looked up. Plugins are imported after it, if it has no entry of that
            name, or for a list of all names.
        function: returns the function or class behind an entry that is another kind of object.
        given: arguments of an entry that the program sets; they are no options of a user.

    Example:
        >>> colors = Registry("color", "color")
        >>> @colors.add("red")
        ... def red() -> str:
        ...     return "#ff0000"
        >>> colors["red"]()
        '#ff0000'
        >>> colors.declare("pi", "math:pi", "No color at all.")
        >>> colors.names(), colors.summary("pi"), colors["pi"]
        (['pi', 'red'], 'No color at all.', 3.141592653589793)
    """

    def __init__(
        self,
        kind: str,
        option: str,
        room: str = "",
        function: Callable[[Any], Any] = lambda entry: entry,
        given: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.option, self._room, self._function, self._given = kind, option, room, function, given
        self._entries: dict[str, Any] = {}
        self._summaries: dict[str, str] = {}
        self._room_loaded = False

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds a function or class as the entry ``name``.

        Raises InputError if another entry has the name.
        """

        def decorate(entry: T) -> T:
            self._add(name, entry)
            return entry

        return decorate

    def declare(self, name: str, place: str, summary: str = "") -> None:
        """Add an entry whose module is imported at its first use.

        Args:
            name: the name of the entry.
            place: the module and the name in it, "MODULE:NAME".
            summary: one line for a list of the entries.

        Raises InputError if another entry has the name.
        """
        self._add(name, _Declared(place))
        self._summaries[name] = summary

    def _add(self, name: str, entry: object) -> None:
        if name in self._entries:
            old, new = self._origin(self._entries[name]), self._origin(entry)
            if old != new:
                raise InputError(f"{self.kind} '{name}': {new} may not take the name of {old}")
            if isinstance(entry, _Declared):  # the present entry may be the imported object
                return
        self._entries[name] = entry

    def names(self) -> list[str]:
        """Return all names, including those of plugins.

        Returns:
            The names in alphabetical order.

        Example:
            >>> {"ssgd", "dpsgd"} <= set(algorithms.names())
            True
        """
        self._load_room()
        load_plugins()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, in the order in which they were added."""
        self.names()
        return iter(tuple(self._entries))

    @property
    def untouched(self) -> bool:
        """Return whether it has no entry yet, as before the room is imported where no plugin adds one."""
        load_plugins()
        return not self._entries

    def summary(self, name: str) -> str:
        """Return the summary that :meth:`declare` got for ``name``, or ""."""
        return self._summaries.get(name, "")

    def __contains__(self, name: object) -> bool:
        self._load_room()
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __getitem__(self, name: str) -> Any:
        """Return the entry called ``name``; raise InputError with the most similar name if there is none."""
        if name not in self:
            choose(self.option, name, self._entries)
        entry = self._entries[name]
        if isinstance(entry, _Declared):
            entry = self._entries[name] = self._imported(name, entry)
        return entry

    def options(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check ``given`` against the signature of the entry ``name``, and add the defaults of other options.

        Args:
            name: one of :meth:`names`.
            given: options by name, as in a table of a recipe.

        Returns:
            All options of the entry.

        Raises:
            InputError: for an unknown name or option, a value of another type, or a missing one; it names
                the key.

        Example:
            >>> algorithms.options("dpsgd", {"mixing": "ring(1)"})
            {'mixing': 'ring(1)', 'order': 'awc', 'buffers': 'keep'}
        """
        return check_keywords(self.option.partition(".")[0], given, self[name], given=self._given)

    def make(self, name: str, given: Mapping[str, Any], **own: Any) -> Any:
        """Call the entry ``name`` with the options ``given``.

        Args:
            name: one of :meth:`names`.
            given: options by name; the others have their defaults.
            own: the arguments that the program sets.

        Returns:
            The result of the entry's function, or an object of its class.

        Raises:
            InputError: as for :meth:`options`, or for a value that the entry does not allow.

        Example:
            >>> algorithms.make("dpsgd", {"mixing": "ring(2)"}, learners=6, seed=0).stability_limit()
            0.8
        """
        return self[name](**own, **self.options(name, given))

    def _imported(self, name: str, reference: str) -> Any:
        """Import a declared entry; raise OperationError if a plugin's module or the name in it is missing."""
        module, _, attribute = reference.partition(":")
        try:
            with others_code():
                return operator.attrgetter(attribute)(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            if module.partition(".")[0] == __name__.partition(".")[0]:
                raise
            reason = f"{reference} cannot be imported ({type(error).__name__}: {error})"
            raise OperationError(f"{self.kind} '{name}': {reason}") from error

    def _load_room(self) -> None:
        """Import the package's own entries, once."""
        if self._room_loaded or not self._room:
            return
        self._room_loaded = True  # set first, because an imported module may look up names
        room = importlib.import_module(self._room)
        for module in pkgutil.iter_modules(getattr(room, "__path__", ())):
            importlib.import_module(f"{self._room}.{module.name}")

    def _origin(self, entry: object) -> str:
        """Return the module and name of an entry's definition, as "MODULE.NAME"."""
        if isinstance(entry, _Declared):
            return entry.replace(":", ".")
        source = self._function(entry)
        return f"{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', type(source).__name__)}"


@contextlib.contextmanager
def others_code() -> Iterator[None]:
    """Turn ``sys.exit()`` in the module of a plugin into an ImportError; Ctrl-C still ends the program."""
    try:
        yield
    except SystemExit as error:
        words = f"it ends the program ({' '.join(f'SystemExit {error}'.split())})"
        raise ImportError(words).with_traceback(error.__traceback__) from error


_loaded: set[str] = set()


@functools.cache
def _entry_points(path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of the group on ``path``, stored because a search reads a file per package."""
    return tuple(importlib.metadata.entry_points(group=GROUP))


def load_plugins() -> None:
    """Import each entry point of the group once, and warn with PluginWarning of one that fails."""
    for point in _entry_points(tuple(sys.path)):
        if point.value in _loaded:
            continue
        _loaded.add(point.value)
        try:
            with others_code():
                point.load()
        except Exception as error:  # a plugin's fault must not stop a program that does not need the plugin
            reason = f"cannot be loaded: {type(error).__name__}: {error}"
            warn_caller(f"plugin '{point.name}' ({point.value}) {reason}", PluginWarning)


algorithms = Registry(
    "algorithm", "algorithm.name", "landscape.training.algorithms", given=("learners", "seed")
)
topologies = Registry("topology", "algorithm.mixing", "landscape.training.topology")
optimizers = Registry("optimizer", "optimizer.name", "landscape.training.optimizer")
models = Registry("model", "model.name", "landscape.models")
data_sets = Registry("data set", "data.name", "landscape.data", given=("data_dir",))
results = Registry("result", "schema", "landscape.results")
instruments = Registry("instrument", "monitor.instruments", "landscape.training.instruments")
drawings = Registry("drawing", "drawing", "landscape.plots")
figures = Registry("figure", "NAME", "landscape.paper.figures", operator.attrgetter("draw"))
commands = Registry(
    "command", "COMMAND", "landscape.cli.commands", lambda entry: getattr(entry, "callback", entry)
)


def optional(module: str, purpose: str, install: str) -> Any:
    """Import a module of an optional package, and return it.

    Args:
        module: the name of the module, such as "torch.utils.tensorboard".
        purpose: the method, or the option with its value, that needs the module; for the message.
        install: the argument of ``pip install``: a package, or an extra of this one.

    Raises:
        OperationError: the module cannot be imported; the message names ``purpose`` and ``install``.

    Example:
        >>> optional("json", "an example", "json").dumps([1])
        '[1]'
        >>> optional("no_such_module", "an example", "it")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: an example: no_such_module is not installed; pip install it
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name not in (None, module, package):  # the package is there, but one that it imports is not
            raise OperationError(f"{purpose}: {module} cannot be imported ({error})") from error
        raise OperationError(f"{purpose}: {package} is not installed; pip install {install}") from error

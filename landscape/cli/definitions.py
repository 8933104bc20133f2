"""Commands as their sources define them, without an import of what they compute with.

The options, defaults and words of a command stand in signatures and docstrings; to import its module takes
seconds, because torch comes with it. Help and completion need the definitions only: a name of a module is
computed here when it is looked up, from the one statement of the source that binds it, and that statement
looks up the names that it needs in turn. Modules that are imported already are taken as they are.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]


class _Absent:
    """A stand-in for what comes from another package, such as torch.float32 as a default."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Absent:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __bool__(self) -> bool:
        return False


class _Builtins(dict[str, Any]):
    """The builtins of a module's statements, where Python looks for a name last, also from within a class."""

    def __init__(self, find: Callable[[str], Any], taken: Iterable[str]) -> None:
        super().__init__({**vars(builtins), "__import__": _import})
        self._find = find
        for name in taken:
            self.pop(name, None)  # such as "open": the module's own goes before

    def __missing__(self, name: str) -> Any:
        return self._find(name)


class _Module:
    """The names of a module of the package as its attributes, each computed when it is looked up."""

    def __init__(self, name: str) -> None:
        self._name, place = name, ROOT.parent.joinpath(*name.split("."))
        self._package = place.is_dir()
        source = place / "__init__.py" if self._package else place.with_suffix(".py")
        stub = source.with_suffix(".pyi")  # has the names that a package imports when they are used
        self._path = stub if stub.exists() else source
        self._statements = dict(_bound(ast.parse(self._path.read_text("utf-8")).body))
        # A module that exists stands for this one: dataclasses look for that of a class.
        self._names = {"__name__": __name__, "__file__": str(source), "import_module": _module}
        self._names["__builtins__"] = _Builtins(self._find, self._statements)

    def _find(self, name: str) -> Any:
        if name not in self._names and (statement := self._statements.pop(name, None)):
            # Run as the module's import would; annotations are texts, as in this file.
            exec(compile(ast.Module([statement], []), str(self._path), "exec"), self._names)
        elif name not in self._names and self._package and importlib.util.find_spec(f"{self._name}.{name}"):
            self._names[name] = _module(f"{self._name}.{name}")
        return self._names[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._find(name)
        except KeyError:
            if name.startswith("__"):
                raise AttributeError(name) from None
        return self._find("__getattr__")(name)  # PEP 562


def _bound(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that statements of a module bind, each with its statement; of an import with its part."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                part = copy.copy(statement)
                part.names = [alias]
                yield alias.asname or alias.name.partition(".")[0], part
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)]
            yield from ((name, statement) for name in names)
        else:
            for part_name in ("body", "orelse", "handlers", "finalbody"):
                yield from ((name, statement) for name, _ in _bound(getattr(statement, part_name, ())))


def _import(
    name: str, names: Any = None, inner: Any = None, wanted: Sequence[str] | None = (), level: int = 0
) -> Any:
    """The module that an import statement uses; of one that is imported without a ``wanted`` part, ours."""
    module = _module(name if wanted else name.partition(".")[0])
    whole = all(hasattr(module, each) for each in wanted or ())
    return module if whole or isinstance(module, _Module | _Absent) else _Module(name)


@functools.cache
def _module(name: str) -> Any:
    """A module: imported, if that is done already or is quick; of this package, its definitions."""
    top = name.partition(".")[0]
    # The package itself is always imported, but imports its public names when they are asked for.
    if name != ROOT.name and (name in sys.modules or top in sys.stdlib_module_names or top == "click"):
        return importlib.import_module(name)
    return _Module(name) if top == ROOT.name else _Absent()


def command_of(place: str) -> click.Command:
    """The command "MODULE:NAME" of this package, which imports what it uses once it is run.

    Args:
        place: "MODULE:NAME".

    Returns:
        The command, whose options and words are those of its source.

    Example:
        >>> [option.name for option in command_of("landscape.cli.info:info").params]
        ['file']
    """
    module, _, name = place.partition(":")
    made: click.Command = copy.copy(getattr(_module(module), name))
    made.callback = lambda **given: getattr(importlib.import_module(module), name).callback(**given)
    return made

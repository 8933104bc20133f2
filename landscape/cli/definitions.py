"""Commands as their sources define them, without an import of what they compute with.

The options, defaults and words of a command stand in signatures and docstrings; to import its module takes
seconds, because torch comes with it. Help and completion need the definitions only: a name of a module is
computed here when it is looked up, from the one statement of the source that binds it, and that statement
looks up the names that it needs in turn. Modules that are imported already are taken as they are.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
_STATEMENTS = ("body", "orelse", "handlers", "finalbody")


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


class Definitions(dict[str, Any]):
    """The names of one module of the package, each computed when it is looked up."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module
        path = ROOT.parent.joinpath(*module.split("."))
        self._package = path.is_dir()
        source = path / "__init__.py" if self._package else path.with_suffix(".py")
        stub = source.with_suffix(".pyi")  # has the names that a package imports when they are used
        self._path = stub if stub.exists() else source
        # A module that exists stands for this one: dataclasses look for that of a class. What a module
        # imports by name are definitions, too.
        self |= {"__name__": __name__, "__file__": str(source), "import_module": _module}
        tree = ast.parse(self._path.read_text("utf-8"))
        self._statements = {name: statement for statement in tree.body for name in _bound(statement)}

    def __missing__(self, name: str) -> Any:
        statement = self._statements.pop(name, None)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self[name] = self._imported(statement, name)
        elif statement:
            if isinstance(statement, ast.ClassDef):  # whose body looks into a plain dict only
                for used in _used(statement):
                    if used in self._statements:
                        self[used]
            # A statement of this package, run as its import would; annotations are texts, as in this file.
            exec(compile(ast.Module([statement], []), str(self._path), "exec"), self)
        elif self._package and importlib.util.find_spec(f"{self._module}.{name}"):
            self[name] = _module(f"{self._module}.{name}")
        if name not in self:
            raise KeyError(name)
        return self[name]

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        """The object that ``statement`` binds to ``name``."""
        alias = next(each for each in statement.names if (each.asname or each.name.split(".")[0]) == name)
        if isinstance(statement, ast.ImportFrom):
            assert statement.module
            module = _module(statement.module)
            if statement.module in sys.modules and not hasattr(module, alias.name):
                return _module(f"{statement.module}.{alias.name}")
            return getattr(module, alias.name)
        return _module(alias.name if alias.asname else name)


class _Module:
    """The names of a module as its attributes."""

    def __init__(self, name: str) -> None:
        self._names = Definitions(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._names[name]
        except KeyError:
            if name.startswith("__"):
                raise AttributeError(name) from None
        return self._names["__getattr__"](name)  # PEP 562


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name))
    else:
        for part in _STATEMENTS:
            for inner in getattr(statement, part, ()):
                yield from _bound(inner)


def _used(of: ast.ClassDef) -> Iterator[str]:
    """The names that the body of a class looks up when it is run, but for its functions and annotations."""
    for statement in of.body:
        parts: list[ast.AST | None] = [statement]
        if isinstance(statement, ast.FunctionDef):
            parts = [*statement.decorator_list, *statement.args.defaults, *statement.args.kw_defaults]
        elif isinstance(statement, ast.AnnAssign):
            parts = [statement.value]
        for node in itertools.chain.from_iterable(map(ast.walk, filter(None, parts))):
            if isinstance(node, ast.Name):
                yield node.id


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
        >>> [option.name for option in command_of("landscape.cli.watch:watch").params]
        ['folder', 'once', 'every']
    """
    module, _, name = place.partition(":")
    made: click.Command = copy.copy(getattr(_module(module), name))
    made.callback = lambda **given: getattr(importlib.import_module(module), name).callback(**given)
    return made

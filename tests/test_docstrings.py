"""Public names are described: arguments, result, errors, an example that runs, and the source of a formula."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import landscape
from landscape import plugins, testing
from landscape.core.options import described
from tests.examples import namespace

PACKAGE = Path(landscape.__file__).parent
# Signs of a formula that has an origin, and what names its source: a paper with its year, an arXiv number, an equation, "ours", "our choice".
FORMULA = re.compile("[∇Σ∂∝]")
SOURCE = re.compile(r"\b(19|20)\d\d\b|arXiv|\bEq\. \d|\bours\b|\bour\s+choice\b|\bpaper")


def own(value: Any) -> bool:
    """Whether the package defines it."""
    return str(getattr(value, "__module__", "")).startswith("landscape")


def names() -> Iterator[tuple[str, Any, Any]]:
    """(name, object, class that it is a member of or None) of every public name."""
    for name in landscape.__all__:
        value = getattr(landscape, name)
        if name == "plugins":  # base classes and helpers, described where they are; some are no functions
            continue
        if inspect.ismodule(value):
            for inner in value.__all__:
                yield from with_members(f"{name}.{inner}", getattr(value, inner))
        elif name != "__version__":
            yield from with_members(name, value)


def with_members(name: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    yield name, value, None
    for key, member in inspect.getmembers(value) if inspect.isclass(value) else ():
        function = member.fget if isinstance(member, property) else member
        if not key.startswith("_") and own(function) and callable(function):
            yield f"{name}.{key}", member, value


def every_name() -> Iterator[tuple[str, Any, Any]]:
    """Every public name, and those of ``landscape.testing`` and ``landscape.plugins``."""
    yield from names()
    for name in testing.__all__:
        yield from with_members(f"testing.{name}", getattr(testing, name))
    yield from ((f"plugins.{name}", getattr(plugins, name), None) for name in plugins.__all__)


# A method that several classes inherit is one entry.
PUBLIC = {
    f"{value.__qualname__}" if inspect.isroutine(value) and owner else name: (value, owner)
    for name, value, owner in names()
}


def raises(function: Any) -> bool:
    """Whether its own code raises an error that a user sees."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(
        isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in ("InputError", "OperationError", "ValueError", "TypeError")
        for node in ast.walk(tree)
    )


def overrides(owner: Any, name: str) -> bool:
    """Whether a class of another package, such as torch.nn.Module, describes the method."""
    return any(name in vars(base) for base in inspect.getmro(owner) if not own(base) and base is not object)


def undescribed(name: str) -> list[str]:
    """What the docstring of a public name lacks."""
    value, owner = PUBLIC[name]
    text = inspect.getdoc(value) or ""
    missing = [] if text.split("\n\n")[0].endswith((".", ":")) else ["a sentence"]
    if inspect.isclass(value):
        fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        texts: set[str] = set().union(*(described(base) for base in inspect.getmro(value)))
        wanted = fields or ([] if issubclass(value, Exception) else list(inspect.signature(value).parameters))
        missing += [n for n in wanted if n not in texts]
    elif not isinstance(value, property) and not (owner and overrides(owner, name.rpartition(".")[2])):
        signature, texts = inspect.signature(value), set(described(value))
        missing += [n for n in signature.parameters if n not in {"self", "cls", *texts}]
        if signature.return_annotation not in ("None", None) and "Returns:" not in text:
            missing.append("Returns")
        if raises(value) and "Raises:" not in text:
            missing.append("Raises")
    elif isinstance(value, property):
        return missing
    if ">>>" not in text and not (owner and overrides(owner, name.rpartition(".")[2])):
        missing.append("an example")
    if FORMULA.search(text) and not SOURCE.search(text + (inspect.getdoc(owner) or "" if owner else "")):
        missing.append("the source of a formula")
    return missing


def test_public_names_are_described() -> None:
    assert {name: missing for name in PUBLIC if (missing := undescribed(name))} == {}


# A first sentence has a subject and a verb, or is an imperative or a noun phrase that stands alone.
FRAGMENT = re.compile(r"(Of|What|Whether|Where|That|As|From)\b")


def fragments(source: str) -> list[str]:
    """First lines of docstrings that are the rest of a sentence."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    texts = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
    return [text.split("\n")[0] for text in texts if FRAGMENT.match(text)]


def test_docstrings_begin_with_a_whole_sentence() -> None:
    assert fragments('def f():\n    """Whether it is."""\n') == ["Whether it is."]
    sources = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert {str(path): found for path, text in sources.items() if (found := fragments(text))} == {}


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
    known = namespace() | {"torch": torch, "x": x, "y": y, "problem": problem}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=flags, verbose=False)
    report: list[str] = []
    for test in finder.find(importlib.import_module(name), extraglobs=known):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)

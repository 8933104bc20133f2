"""The size of the project: limits in pyproject.toml, which a change raises in a line of its own, with its reason."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["landscape"]["size"]


def files(folder: str, pattern: str) -> list[Path]:
    """The files below ``folder`` that are kept by hand."""
    left_out = {ROOT / "docs" / "reference" / "generated", ROOT / "docs" / "gallery"}
    return [path for path in sorted((ROOT / folder).rglob(pattern)) if not left_out & {*path.parents}]


def code_lines(source: str) -> int:
    """The lines of ``source`` without blank ones, comments and docstrings."""
    left_out = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
            left_out |= {*range(first.lineno, (first.end_lineno or 0) + 1)} if first else set()
    lines = enumerate(source.splitlines(), 1)
    return sum(
        n not in left_out and bool(line.strip()) and not line.lstrip().startswith("#") for n, line in lines
    )


def length(folder: str) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in files(folder, "*.py"))


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").split()) for path in paths)


SIZES = {
    "code": lambda: sum(code_lines(path.read_text("utf-8")) for path in files("landscape", "*.py")),
    "modules": lambda: len(files("landscape", "*.py")),
    "tests": lambda: length("tests"),
    "benchmarks": lambda: length("benchmarks"),
    "words": lambda: words([*files("docs", "*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]),
    "words_of_figures": lambda: words([ROOT / "figures" / "README.md"]),
    "words_of_changes": lambda: words([ROOT / "CHANGELOG.md"]),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_the_project_is_within_its_limits(name: str) -> None:
    size = SIZES[name]()
    assert 0 < size <= LIMITS[name], f"take something away, or raise tool.landscape.size.{name} and say why"


def test_only_code_counts() -> None:
    source = '"""A module.\n\nIt does nothing."""\n\n# A comment.\ndef f() -> str:\n    """A docstring."""\n    return """a\nb"""\n'
    assert code_lines(source) == 3

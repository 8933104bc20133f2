"""Runs a notebook of examples/notebooks without Jupyter: its cells of code in order, in one namespace."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def code(path: Path) -> list[str]:
    """The cells of code after the first, which installs the package; none has been run."""
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells), (
        f"{path.name}: clear outputs"
    )
    sources = ["".join(c["source"]) for c in cells]
    assert sources[0].startswith("%pip install"), path.name
    return sources[1:]


def run(path: Path) -> Iterator[str]:
    """Run a notebook in the current folder. Yields what Jupyter would show of each cell that ends with a value."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for source in code(path):
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
            if value is not None:
                yield shown(value)


def shown(value: Any) -> str:
    """The HTML, the picture's size or the text that stands for a value."""
    if hasattr(value, "_repr_png_"):
        return f"picture of {len(value._repr_png_()):,} bytes"
    return str(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))

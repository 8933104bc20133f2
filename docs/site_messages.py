"""The messages of errors, read from the source, for the page that lists them and its test."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import landscape

PACKAGE = Path(landscape.__file__).parent
#: The errors that end a command with one line, as :mod:`landscape.core.errors` and its users define them.
ERRORS = {
    "InputError",
    "OperationError",
    "MismatchError",
    "LostError",
    "LostProcessError",
    "RestartableError",
    "UnsoundError",
    "UsageError",
}
#: Headings of the page, from the folder of the source.
AREAS = {
    "problem": "Model, loss and data of a problem",
    "analysis": "Analyses",
    "curvature": "Curvature",
    "gradients": "Gradients of learners and minibatches",
    "evaluation": "Losses on a grid",
    "results": "Results",
    "geometry": "Surfaces",
    "plots": "Pictures",
    "reports": "Reports",
    "checkpoint": "Checkpoints and weights from other programs",
    "core": "Files, options, packages",
    "data": "Data sets",
    "models": "Networks",
    "limits": "Stability limits",
    "training": "Training",
    "integrations": "Callbacks",
    "testing": "Checks of plugins",
    "paper": "Figures of the papers",
    "cli": "Options of commands",
}


def texts(node: ast.expr, constants: dict[str, list[str]]) -> list[str]:
    """What a string may be, "…" for what is put in; several where it depends on a condition."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Name):
        return constants.get(node.id, ["…"])
    if isinstance(node, ast.FormattedValue):
        return constants.get(node.value.id, ["…"]) if isinstance(node.value, ast.Name) else ["…"]
    if isinstance(node, ast.IfExp):
        return texts(node.body, constants) + texts(node.orelse, constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in texts(node.left, constants) for b in texts(node.right, constants)]
    if isinstance(node, ast.JoinedStr):
        found = [""]
        for part in node.values:
            found = [a + b for a in found for b in texts(part, constants)]
        return found
    return ["…"]


@functools.cache
def trees() -> dict[Path, list[ast.AST]]:
    """All nodes of the source, by file."""
    return {
        path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def messages() -> Iterator[tuple[str, str]]:
    """(folder of the source, message) of every error that the package raises; "…" stands for what is put in.

    A message that is only passed on, from another error or another process, has no words of its own and is
    left out.
    """
    constants = {
        target.id: [node.value.value]
        for nodes in trees().values()
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and isinstance(node.value.value, str)
    }
    for path, nodes in trees().items():
        for node in nodes:
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name not in ERRORS:
                    continue
                words = _words(node, nodes) if isinstance(node.args[0], ast.JoinedStr) else {}
                for text in texts(node.args[0], constants | words):
                    text = re.sub("…+", "…", text) + _ending(node)
                    if re.search(r"\w{2}", text):
                        yield path.relative_to(PACKAGE).parts[0], text


def _words(call: ast.Call, nodes: list[ast.AST]) -> dict[str, list[str]]:
    """The texts of the variables that the function around ``call`` has set before it."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    around = [node.lineno for node in functions if node.lineno <= call.lineno <= (node.end_lineno or 0)]
    first = max(around, default=call.lineno)
    words: dict[int, tuple[str, list[str]]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and first < node.lineno < call.lineno:
            target, value = node.targets[0], node.value
            text = isinstance(value, ast.JoinedStr) or isinstance(getattr(value, "value", None), str)
            if isinstance(target, ast.Name) and text:
                words[node.lineno] = target.id, texts(value, {})
    return dict(words[line] for line in sorted(words))


def _ending(call: ast.Call) -> str:
    """What an error adds to its first argument: the value, what is allowed, and what to do."""
    given = {keyword.arg for keyword in call.keywords}
    value = ": … is not allowed" * (len(call.args) > 1)
    ways = "; give …" * bool(given & {"give", "otherwise", "remedy"})
    return value + ", it must be …" * ("allowed" in given) + ways


def messages_page() -> Iterator[str]:
    """The page that lists every message."""
    yield from ("# Error messages", "")
    yield (
        "Every error that the package raises, by the part that raises it, for a search by its words. "
        "'…' stands for names and numbers. [Troubleshooting](../../troubleshooting.md) says what to do where "
        "a message does not say it itself."
    )
    yield ""
    found: dict[str, set[str]] = {}
    for folder, text in messages():
        found.setdefault(folder, set()).add(text)
    for folder in sorted(found, key=list(AREAS).index):
        yield from (f"## {AREAS[folder]}", "")
        yield from (f"- `` {text} ``" for text in sorted(found[folder]))
        yield ""
